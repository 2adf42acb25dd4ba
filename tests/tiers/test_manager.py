"""TieredOffloadingManager over a plain tier: promotion, write-through, budgets and deadlines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import (
    IntegrityError,
    KVGroup,
    LookupState,
    MissReason,
    OffloadKey,
    ReqContext,
    Slots,
    States,
    TierError,
    TierResult,
)
from kvoffload.cache.admission import FilterReusedOffloadingManager
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.slots import HostBackend
from kvoffload.testing.conformance import ManagerConformance
from kvoffload.testing.tiers import MemoryTier, SteppedExecutor, make_pools
from kvoffload.tiers import writethrough
from kvoffload.tiers.manager import (
    FAILURE_PERIOD_S,
    MAX_FAILURES,
    MAX_HANGS,
    MISS_TTL_S,
    PROMOTION_SHARE,
    RATE_TTL_S,
    WRITE_SHARE,
    TieredOffloadingManager,
)
from kvoffload.tiers.writethrough import MAX_WRITES_PER_BLOCK, PATIENCE_S, WriteThrough

SLOT_BYTES = 4096
A, B = ReqContext("a"), ReqContext("b")


def chain(name: str, n: int) -> list[OffloadKey]:
    return [f"{name}{i}".encode().ljust(12, b".") + bytes(4) for i in range(n)]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class SpyTier(MemoryTier):
    """A MemoryTier that remembers what it was asked, and goes wrong as it is told."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.reads: list[OffloadKey] = []
        self.asked: list[OffloadKey] = []
        self.refuses = False
        self.fails: TierError | None = None
        self.unsure = False
        self.seconds_a_block: float | None = None
        self.most_writes = 1 << 30
        """Blocks that it writes at a time."""
        self.fails_for: OffloadKey | None = None
        self.num_fails = 0
        """The first writes of ``fails_for`` fail."""
        self.claimed_blocks: int | None = None
        self.hanging: set[OffloadKey] = set()
        """Blocks whose reads do not end."""

    @property
    def capacity_bytes(self) -> int:
        return super().capacity_bytes if self.claimed_blocks is None else self.claimed_blocks * self.block_bytes

    def write(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        n = max(0, self.most_writes - len(self.under_way))
        return super().write(keys[:n], slots[:n])

    def read_block(self, key: OffloadKey, slot: int, block: Any) -> None:
        if key in self.hanging:
            assert isinstance(self.executor, SteppedExecutor)
            self.executor.stall(1e9)
        super().read_block(key, slot, block)

    def contains(self, keys: Sequence[OffloadKey]) -> States:
        self.asked += keys
        states = super().contains(keys)
        return np.full_like(states, LookupState.RETRY) if self.unsure else states

    def read(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        taken = [] if self.refuses else super().read(keys, slots)
        self.reads += taken
        return taken

    def poll(self) -> list[TierResult]:
        results = []
        for result in super().poll():
            error = self.fails or result.error
            if result.key == self.fails_for and not result.is_read and self.num_fails:
                error, self.num_fails = TierError.IO, self.num_fails - 1
                self.delete([result.key])
            seconds = result.seconds if self.seconds_a_block is None else self.seconds_a_block
            begun = result.ended - seconds
            results.append(TierResult(result.key, result.is_read, error, result.nbytes, seconds, begun, result.ended))
        return results


class Rig:
    """A host of ``host_blocks`` in front of a tier, and its clock."""

    def __init__(
        self, host_blocks: int = 16, tier_blocks: int = 64, policy: str = "lru", groups: int = 1, **options: float
    ) -> None:
        self.clock = Clock()
        self.pools = make_pools(host_blocks, SLOT_BYTES)
        self.executor = SteppedExecutor(clock=self.clock)
        self.tier = SpyTier(self.pools, tier_blocks, self.executor, self.clock)
        backend = HostBackend(16, host_blocks)
        self.host = PolicyOffloadingManager(backend, make_policy(policy, host_blocks), clock=self.clock)
        self.manager = TieredOffloadingManager(
            self.host, [self.tier], tokens_per_block=[16.0] * groups, clock=self.clock, **options
        )

    def store(self, keys: list[OffloadKey]) -> None:
        """A request whose chain is ``keys`` stores blocks whose bytes are made of their keys, and ends."""
        output = self.manager.prepare_store(keys)
        assert output is not None
        for key, slot in zip(output.keys_to_store, output.store_spec.slots.tolist(), strict=True):
            self.pools[0][slot] = content(key)
        self.manager.complete_store(keys)
        self.manager.offer_chain(keys)

    def settle(self) -> None:
        """What was asked for begins, and all that is under way in the tier ends."""
        self.manager.poll()
        self.executor.drain()
        self.manager.poll()
        self.manager.check_integrity()

    def store_below(self, keys: list[OffloadKey]) -> None:
        """``keys`` are in the tier, and not in the host."""
        for key in keys:
            self.store([key])
            self.settle()
        self.host.reset()

    def bytes_of(self, keys: list[OffloadKey]) -> list[bytes]:
        spec = self.manager.prepare_load(keys)
        self.manager.complete_load(keys)
        return [bytes(self.pools[0][slot]) for slot in spec.slots.tolist()]

    def fill_host(self, name: str = "filler") -> None:
        """Other blocks are the most recent ones, in the whole host."""
        for key in chain(name, self.host.num_blocks):
            output = self.host.prepare_store([key])
            if output is not None:
                self.host.complete_store([key])

    def counts(self) -> dict[str, float]:
        return dict(self.manager.take_counts())


def content(key: OffloadKey) -> np.ndarray:
    return np.resize(np.frombuffer(key, dtype=np.uint8), SLOT_BYTES)


# What any manager does.


class TestConformance(ManagerConformance):
    """A tier that has room for nothing changes nothing of what a manager is."""

    def make_manager(self, num_blocks: int) -> TieredOffloadingManager:
        tier = MemoryTier(make_pools(num_blocks, SLOT_BYTES), 0)
        backend = HostBackend(16, num_blocks)
        host = PolicyOffloadingManager(backend, make_policy("lru", num_blocks), enable_events=True)
        return TieredOffloadingManager(host, [tier], tokens_per_block=[16.0])


# The way up.


def test_a_block_goes_down_and_comes_up_with_its_bytes() -> None:
    rig = Rig()
    keys = chain("x", 4)
    rig.store_below(keys)
    assert rig.manager.lookup(keys, A) is None
    assert rig.tier.reads == [], "a lookup starts nothing: lookups of a step are taken together"
    rig.manager.poll()
    assert rig.tier.reads == keys
    rig.settle()
    assert rig.manager.lookup(keys, A) == 4
    assert rig.bytes_of(keys) == [bytes(content(key)) for key in keys]


def test_a_block_is_not_found_before_it_has_arrived() -> None:
    rig = Rig()
    keys = chain("x", 2)
    rig.store_below(keys)
    rig.manager.lookup(keys, A)
    rig.manager.poll()
    assert rig.manager.lookup(keys, A) is None
    assert rig.host.lookup(keys) == 0


def test_poll_tells_when_it_is_worth_asking_again() -> None:
    rig = Rig()
    keys = chain("x", 2)
    rig.store_below(keys)
    rig.manager.poll()
    assert not rig.manager.poll(), "nothing has happened"
    rig.manager.lookup(keys, A)
    rig.manager.poll()
    assert not rig.manager.poll(), "nothing has arrived"
    rig.executor.drain()
    assert rig.manager.poll()


def test_blocks_between_those_of_the_host_come_up() -> None:
    rig = Rig()
    keys = chain("x", 6)
    rig.store_below([keys[2], keys[4]])
    rig.store([keys[0], keys[1], keys[3]])
    rig.settle()
    assert rig.manager.lookup(keys, A) is None
    rig.settle()
    assert rig.manager.lookup(keys, A) == 5
    assert sorted(rig.tier.reads) == [keys[2], keys[4]]


def test_what_lies_past_a_block_that_is_nowhere_stays_below() -> None:
    rig = Rig()
    keys = chain("x", 6)
    rig.store_below(keys[:2] + keys[3:])
    assert rig.manager.lookup(keys, A) is None
    rig.settle()
    assert rig.manager.lookup(keys, A) == 2
    assert rig.tier.reads == keys[:2]


def test_a_key_is_on_its_way_once_however_many_ask() -> None:
    rig = Rig()
    keys = chain("x", 4)
    rig.store_below(keys)
    assert rig.manager.lookup(keys, A) is None
    assert rig.manager.lookup(keys[:3], B) is None
    rig.manager.poll()
    assert rig.manager.lookup(keys, ReqContext("c")) is None
    rig.settle()
    assert rig.tier.reads == keys
    assert [rig.manager.num_promoted(context) for context in (A, B, ReqContext("c"))] == [4, 3, 4]


def test_who_asks_without_a_context_is_told_of_the_host_alone() -> None:
    rig = Rig()
    keys = chain("x", 2)
    rig.store_below(keys)
    assert rig.manager.lookup(keys) == 0
    assert rig.manager.lookup_each(keys) == [LookupState.MISS] * 2
    rig.settle()
    assert rig.tier.reads == []


def test_the_reuse_filter_promotes_nothing_when_it_decides_what_to_store() -> None:
    rig = Rig()
    keys = chain("x", 2)
    rig.store_below(keys)
    output = FilterReusedOffloadingManager(rig.manager).prepare_store(keys, A)
    assert output is not None
    assert output.keys_to_store == []
    rig.settle()
    assert rig.tier.reads == []


def test_windows_wait_for_what_they_lack() -> None:
    rig = Rig()
    keys = chain("x", 3)
    rig.store_below(keys)
    rig.store(keys[:1])
    rig.settle()
    hit, retry = LookupState.HIT, LookupState.RETRY
    assert rig.manager.lookup_each(keys, A) == [hit, retry, retry]
    rig.settle()
    assert rig.manager.lookup_each(keys, A) == [hit, hit, hit]


def test_windows_that_cannot_be_complete_promote_nothing() -> None:
    rig = Rig()
    keys = chain("x", 3)
    rig.store_below(keys[:1])
    assert rig.manager.lookup_each(keys, A) == [LookupState.RETRY, LookupState.MISS, LookupState.MISS]
    rig.settle()
    assert rig.tier.reads == []


@pytest.mark.parametrize(("n", "promoted"), [(8, True), (9, False)])
def test_a_window_that_can_never_be_promoted_as_a_whole_is_a_miss_at_once(n: int, promoted: bool) -> None:
    rig = Rig(host_blocks=16)
    keys = chain("x", n)
    rig.store_below(keys)
    state = LookupState.RETRY if promoted else LookupState.MISS
    assert rig.manager.lookup_each(keys, A) == [state] * n
    rig.settle()
    assert rig.tier.reads == (keys if promoted else [])
    if not promoted:
        assert rig.manager.explain_miss(keys[0]).reason is MissReason.TOO_LARGE
        rig.host.prepare_store(keys[:1])
        rig.host.complete_store(keys[:1])
        hit, retry = LookupState.HIT, LookupState.RETRY
        assert rig.manager.lookup_each(keys, A) == [hit, *[retry] * 8], "what the host has need not come"


# What is kept ready.


def test_what_came_up_stays_until_the_request_loads_it() -> None:
    rig = Rig()
    keys = chain("x", 4)
    rig.store_below(keys)
    rig.manager.lookup(keys, A)
    rig.settle()
    rig.fill_host()
    assert rig.manager.lookup(keys, A) == 4
    rig.manager.prepare_load(keys, A)
    rig.manager.release_request(A)
    rig.manager.complete_load(keys, A)
    rig.manager.check_integrity()
    rig.fill_host("other")
    assert rig.host.lookup(keys) == 0, "and not for ever"


@pytest.mark.parametrize("arrived", [True, False])
def test_a_request_that_ends_leaves_nothing_behind(arrived: bool) -> None:
    rig = Rig()
    keys = chain("x", 4)
    rig.store_below(keys)
    rig.manager.lookup(keys, A)
    rig.manager.poll()
    if arrived:
        rig.settle()
    rig.manager.release_request(A)
    rig.settle()
    rig.fill_host()
    assert rig.host.lookup(keys) == 0
    assert rig.host.num_available_blocks == rig.host.num_blocks


def test_what_came_up_stays_for_a_request_that_the_engine_cannot_schedule() -> None:
    rig = Rig(load_deadline_ms=1000)
    keys = chain("x", 4)
    rig.store_below(keys)
    rig.manager.lookup(keys, A)
    rig.settle()
    rig.clock.now += 3.0
    rig.settle()
    rig.fill_host()
    assert rig.manager.lookup(keys, A) == 4
    assert rig.tier.reads == keys, "they were read once"


def test_what_came_up_in_time_stays_for_a_request_whose_rest_was_late() -> None:
    rig = Rig(load_deadline_ms=1000)
    keys = chain("x", 4)
    rig.store_below(keys)
    with rig.executor.hold():
        assert rig.manager.lookup(keys[:2], A) is None
        rig.manager.poll()
    rig.executor.drain()
    with rig.executor.hold():
        rig.manager.poll()
        assert rig.manager.lookup(keys, A) is None, "the rest is on its way, and hangs"
        rig.manager.poll()
        rig.clock.now += 1.0
        rig.manager.poll()
        rig.fill_host()
        assert rig.manager.lookup(keys, A) == 2


def test_blocks_kept_for_long_give_way_to_whoever_needs_their_room() -> None:
    rig = Rig(host_blocks=8, load_deadline_ms=1000)
    keys, more = chain("x", 4), chain("y", 4)
    rig.store_below(keys + more)
    rig.manager.lookup(keys, A)
    rig.settle()
    rig.clock.now += 0.999
    rig.manager.lookup(more, B)
    rig.settle()
    assert rig.manager.num_promoted(B) == 0, "they have not been ready for a whole deadline"
    rig.clock.now += 0.001
    rig.settle()
    rig.settle()
    assert rig.manager.lookup(more, B) == 4
    rig.fill_host()
    assert rig.manager.lookup(keys, A) is None, "who has lost its blocks may wait again"


def test_requests_that_take_blocks_from_each_other_do_so_once_in_a_deadline() -> None:
    rig = Rig(host_blocks=8, load_deadline_ms=1000)
    keys, more = chain("x", 4), chain("y", 4)
    rig.store_below(keys + more)
    seconds = 20
    for step in range(1000 * seconds):
        rig.clock.now += 0.001
        rig.manager.lookup(keys, A)
        rig.manager.lookup(more, B)
        rig.manager.poll()
        rig.executor.drain()
        rig.manager.poll()
        if step % 10 == 0:
            rig.fill_host(f"filler{step}")
    rig.manager.check_integrity()
    assert len(rig.tier.reads) <= 2 * 4 * seconds


def test_a_request_that_was_late_is_answered_and_may_wait_again() -> None:
    rig = Rig(load_deadline_ms=1000)
    keys = chain("x", 2)
    rig.store_below(keys)
    rig.manager.lookup(keys, A)
    rig.tier.refuses = True
    rig.manager.poll()
    rig.clock.now += 1.0
    assert [rig.manager.lookup(keys, A), rig.manager.lookup(keys, A)] == [0, 0]
    rig.tier.refuses = False
    rig.manager.poll()
    assert rig.manager.lookup(keys, A) is None
    rig.settle()
    assert rig.manager.lookup(keys, A) == 2


def test_promotions_take_their_share_of_the_host_at_most() -> None:
    rig = Rig(host_blocks=16)
    share = int(16 * PROMOTION_SHARE)
    keys, more = chain("x", 12), chain("y", 4)
    rig.store_below(keys + more)
    assert rig.manager.lookup(keys, A) is None
    assert rig.manager.lookup(more, B) is None
    rig.settle()
    assert rig.tier.reads == keys[:share]
    assert rig.manager.lookup(keys, A) == share, "a request gets no more than that, and does not wait for it"
    assert rig.manager.lookup(more, B) is None
    rig.fill_host()
    assert rig.manager.prepare_store(chain("new", 16 - share)) is not None, "stores have the rest"
    rig.manager.release_request(A)
    rig.settle()
    assert rig.tier.reads == keys[:share] + more
    rig.settle()
    assert rig.manager.lookup(more, B) == 4


def test_the_first_to_ask_is_served_first() -> None:
    rig = Rig(host_blocks=8)
    first, second = chain("x", 4), chain("y", 4)
    rig.store_below(first + second)
    rig.manager.lookup(first, A)
    rig.manager.lookup(second, B)
    rig.settle()
    assert rig.tier.reads == first


@pytest.mark.parametrize("second_asks_first", [True, False])
def test_requests_that_hold_some_and_want_more_do_not_wait_for_each_other(second_asks_first: bool) -> None:
    rig = Rig(host_blocks=8)
    first, second = chain("x", 4), chain("y", 4)
    rig.store_below(first + second)
    rig.manager.lookup(first[2:], A)
    rig.manager.lookup(second[2:], B)
    rig.settle()
    assert [rig.manager.num_promoted(context) for context in (A, B)] == [2, 2]
    questions = [(first, A), (second, B)]
    for keys, context in questions[::-1] if second_asks_first else questions:
        assert rig.manager.lookup(keys, context) is None
    for _ in range(3):
        rig.settle()
    assert rig.manager.lookup(first, A) == 4, "who came first goes on"
    rig.manager.release_request(A)
    for _ in range(3):
        rig.settle()
        found = rig.manager.lookup(second, B)
    assert found == 4


def test_who_came_later_takes_nothing_from_who_came_first() -> None:
    rig = Rig(host_blocks=8)
    first, second = chain("x", 4), chain("y", 4)
    rig.store_below(first + second)
    rig.manager.lookup(first, A)
    rig.settle()
    rig.manager.lookup(second, B)
    for _ in range(5):
        rig.settle()
    assert rig.manager.num_promoted(A) == 4
    assert rig.host.num_available_blocks == 4, "they are still kept ready"
    assert rig.tier.reads == first


def test_groups_share_the_room_of_a_request() -> None:
    rig = Rig(host_blocks=16, groups=2)
    keys = [key[:-1] + bytes([g]) for g in range(2) for key in chain("x", 8)]
    for i in range(8):
        rig.store([keys[i], keys[8 + i]])
        rig.settle()
    rig.host.reset()
    for _ in range(2):
        found = [rig.manager.lookup(keys[8 * g : 8 * g + 8], A) for g in range(2)]
        rig.settle()
    assert [rig.manager.lookup(keys[8 * g : 8 * g + 8], A) for g in range(2)] == [4, 4], found


def test_no_more_is_on_its_way_than_can_come_in_time() -> None:
    rig = Rig(host_blocks=64, load_deadline_ms=1000)
    keys, more = chain("x", 1), chain("y", 20)
    rig.store_below(keys + more)
    rig.tier.seconds_a_block = 0.25
    rig.manager.lookup(keys, A)
    rig.settle()
    rig.manager.lookup(more, B)
    rig.manager.poll()
    assert rig.tier.reads == keys + more[:4]


def test_a_host_in_use_makes_promotions_wait() -> None:
    rig = Rig(host_blocks=4)
    keys = chain("x", 2)
    rig.store_below(keys)
    busy = chain("busy", 4)
    rig.store(busy)
    rig.settle()
    rig.manager.prepare_load(busy)
    assert rig.manager.lookup(keys, A) is None
    rig.settle()
    assert rig.tier.reads == []
    rig.manager.complete_load(busy)
    rig.settle()
    assert rig.manager.lookup(keys, A) == 2


def test_a_tier_that_takes_nothing_on_is_asked_again() -> None:
    rig = Rig()
    keys = chain("x", 2)
    rig.store_below(keys)
    rig.tier.refuses = True
    rig.manager.lookup(keys, A)
    rig.settle()
    assert rig.host.num_used_blocks == 0
    rig.tier.refuses = False
    rig.settle()
    assert rig.manager.lookup(keys, A) == 2


# Deadlines.


def test_at_the_deadline_a_request_gets_what_has_arrived() -> None:
    rig = Rig(load_deadline_ms=1000)
    keys = chain("x", 4)
    rig.store_below(keys[:2])
    rig.manager.lookup(keys[:2], A)
    rig.settle()
    rig.manager.release_request(A)
    rig.host.reset()
    rig.store_below(keys[2:])
    rig.store(keys[:2])
    rig.settle()
    assert rig.manager.lookup(keys, A) is None
    rig.manager.poll()
    rig.clock.now += 0.999
    assert rig.manager.lookup(keys, A) is None
    rig.clock.now += 0.001
    assert rig.manager.lookup(keys, A) == 2
    assert rig.manager.explain_miss(keys[2]).reason is MissReason.NOT_IN_TIME
    assert rig.counts()["late_promotions"] == 1
    rig.settle()
    assert rig.host.lookup(keys) == 4, "what comes later serves the next one"


def test_of_a_tier_that_hangs_nobody_else_waits() -> None:
    rig = Rig(load_deadline_ms=1000)
    keys, other = chain("x", 2), chain("y", 2)
    rig.store_below(keys + other)
    rig.manager.lookup(keys, A)
    rig.manager.poll()
    rig.clock.now += 1.0
    assert rig.manager.lookup(keys, A) == 0
    assert rig.manager.lookup(other, B) == 0
    assert rig.manager.lookup(keys, B) == 0
    rig.settle()
    assert rig.manager.lookup(other, B) is None, "it has come back"


def hang(rig: Rig, name: str = "x") -> list[OffloadKey]:
    """Of two blocks that a request waits for, the reading of the first hangs."""
    keys = chain(name, 2)
    rig.store_below(keys)
    rig.tier.hanging.add(keys[0])
    rig.manager.lookup(keys, ReqContext(name))
    rig.settle()
    return keys


def wait_for_probe(rig: Rig, keys: list[OffloadKey]) -> None:
    """Somebody asks for ``keys`` after the deadline, and what that gives rise to ends."""
    rig.clock.now += 1.0
    assert rig.manager.lookup(keys, ReqContext("prober")) == 0, "it does not wait"
    rig.settle()
    rig.manager.release_request(ReqContext("prober"))


def test_the_reads_of_a_tier_go_on_without_one_that_hangs(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(host_blocks=32, load_deadline_ms=1000)
    other = chain("y", 6)
    rig.store_below(other)
    keys = hang(rig)
    wait_for_probe(rig, other)
    for name, n in (("b", 3), ("c", 6)):
        rig.clock.now += 5.0
        assert rig.manager.lookup(other[:n], ReqContext(name)) is None
        rig.settle()
        assert rig.manager.lookup(other[:n], ReqContext(name)) == n
    assert rig.manager.lookup(keys, B) == 0, "but for the block that hangs"
    assert rig.bytes_of(other) == [bytes(content(key)) for key in other]
    assert len([record for record in caplog.records if "has ended no read" in record.message]) == 1


def test_the_slot_of_a_read_that_hangs_belongs_to_nobody_else() -> None:
    rig = Rig(host_blocks=8, load_deadline_ms=1000)
    keys = hang(rig)
    rig.manager.release_request(ReqContext("x"))
    slot = int(rig.host._table.find(keys[:1])[0])
    wait_for_probe(rig, chain("y", 1))
    for _ in range(3):
        rig.fill_host()
        assert int(rig.host._table.find(keys[:1])[0]) == slot
    rig.manager.reset()
    rig.fill_host("other")
    assert slot not in rig.host._table.slots().tolist(), "nor after a reset"
    rig.clock.now += 1e9
    rig.settle()
    assert rig.host.num_available_blocks == rig.host.num_blocks
    assert rig.manager._lanes[0].overdue == set()


def test_the_reads_that_may_hang_are_bounded_and_one_that_ends_makes_room() -> None:
    rig = Rig(host_blocks=64, load_deadline_ms=1000)
    victims = [chain(f"v{i}", 2) for i in range(10)]
    rig.store_below([key for keys in victims for key in keys])
    rig.tier.hanging = {key for keys in victims for key in keys}
    rig.manager.lookup(victims[0], A)
    rig.settle()
    for keys in victims[1:]:
        wait_for_probe(rig, keys)
        rig.clock.now += 10.0
    assert len(rig.tier.reads) == 2 + MAX_HANGS - 1
    rig.tier.hanging.clear()
    rig.executor._under_way[0].until = 0.0
    rig.settle()
    assert rig.manager.lookup(victims[9], B) is None
    rig.settle()
    assert rig.manager.lookup(victims[9], B) == 2


def test_a_read_that_hung_says_nothing_of_how_fast_the_tier_is() -> None:
    rig = Rig(host_blocks=32, load_deadline_ms=1000, load_only_if_faster=True)
    other = chain("y", 4)
    rig.store_below(other)
    hang(rig)
    wait_for_probe(rig, other)
    before = rig.manager._lanes[0].read_rate.seconds_for(1)
    rig.clock.now += 1e9
    rig.settle()
    assert rig.manager._lanes[0].read_rate.seconds_for(1) == before


def test_a_tier_that_does_not_answer_does_not_have_it() -> None:
    rig = Rig(lookup_deadline_ms=100)
    keys = chain("x", 2)
    rig.store_below(keys)
    rig.tier.unsure = True
    assert rig.manager.lookup(keys, A) is None
    assert rig.manager.poll(), "it must be asked again"
    rig.clock.now += 0.099
    assert rig.manager.lookup(keys, A) is None
    rig.clock.now += 0.001
    assert rig.manager.lookup(keys, A) == 0
    assert rig.manager.lookup(keys, B) == 0, "a miss is remembered"
    rig.clock.now += MISS_TTL_S + 0.1
    assert rig.manager.lookup(keys, B) is None, "for a while"
    rig.tier.unsure = False
    assert rig.manager.lookup(keys, B) is None
    rig.settle()
    assert rig.manager.lookup(keys, B) == 2


def test_a_tier_that_is_slow_but_reads_on_is_not_taken_for_one_that_hangs() -> None:
    rig = Rig(load_deadline_ms=1000)
    keys, other = chain("x", 2), chain("y", 2)
    rig.store_below(keys + other)
    rig.manager.lookup(keys[:1], A)
    rig.manager.poll()
    rig.clock.now += 0.9
    rig.manager.lookup(keys[1:], B)
    rig.manager.poll()
    rig.executor.turn()
    while len(rig.manager._lanes[0].flights) == 2:
        rig.executor.turn()
        rig.manager.poll()
    rig.clock.now += 0.9
    assert rig.manager.lookup(other, ReqContext("c")) is None


def test_what_came_from_disk_is_told_as_such_after_the_deadline_too() -> None:
    rig = Rig(load_deadline_ms=1000)
    keys = chain("x", 4)
    rig.store_below(keys)
    rig.manager.lookup(keys, A)
    rig.settle()
    rig.clock.now += 2
    rig.manager.poll()
    assert rig.manager.lookup(keys, A) == 4
    assert rig.manager.num_promoted(A) == 4


def test_a_block_that_the_tier_has_was_not_delivered_in_time() -> None:
    rig = Rig(host_blocks=8)
    keys = chain("x", 8)
    rig.store_below(keys)
    rig.manager.lookup(keys, A)
    rig.settle()
    assert rig.manager.lookup(keys, A) == 4
    assert rig.manager.explain_miss(keys[4]).reason is MissReason.NOT_IN_TIME


# Load or compute.


def test_reads_at_the_same_time_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    lane = rig.manager._lanes[0]
    keys = chain("x", 8)

    def read(i: int, begun: float, ended: float) -> TierResult:
        return TierResult(keys[i], True, None, 4096, 0.001, begun, ended)

    lane.measure([read(i, 1.0, 2.0) for i in range(4)], 2.0)
    assert lane.read_rate.seconds_for(4 * 4096) == pytest.approx(1.0), "blocks of one call"
    for i in range(4, 8):
        lane.measure([read(i, 2.0, 3.0)], 3.0)
    assert lane.read_rate.seconds_for(8 * 4096) == pytest.approx(2.0, rel=0.2), "told of one by one"


def test_what_others_want_is_read_first() -> None:
    rig = Rig(host_blocks=8, load_deadline_ms=1e6)
    keys, other, late = chain("x", 1), chain("y", 4), chain("z", 4)
    rig.store_below(keys + other + late)
    rig.tier.seconds_a_block = 0.75
    rig.manager.lookup(keys, A)
    rig.settle()
    rig.manager.release_request(A)
    rig.manager.observe_prefill(160, 10.0)  # A block a second: four take 4 s, and 3 s to read.
    assert rig.manager.lookup(other, A) is None
    assert rig.manager.lookup(late, B) == 0, "behind the others it would take 6 s"


@pytest.mark.parametrize(("seconds_a_block", "loads"), [(0.9, True), (1.1, False)])
def test_what_takes_longer_to_load_than_to_compute_is_computed(seconds_a_block: float, loads: bool) -> None:
    rig = Rig(load_deadline_ms=1e6)
    keys, other = chain("x", 4), chain("y", 4)
    rig.store_below(keys + other)
    rig.tier.seconds_a_block = seconds_a_block
    rig.manager.lookup(keys[:1], A)
    rig.settle()
    rig.manager.observe_prefill(160, 10.0)  # A block of 16 tokens a second.
    found = rig.manager.lookup(other, B)
    assert found is None if loads else found == 0
    if not loads:
        assert rig.manager.explain_miss(other[0]).reason is MissReason.FASTER_TO_COMPUTE
        rig.clock.now += RATE_TTL_S + 1
        assert rig.manager.lookup(other, B) is None, "an old measurement is made again"
        assert rig.manager.lookup(keys[1:], ReqContext("c")) == 0, "by one request"


def test_it_can_be_told_to_load_always() -> None:
    rig = Rig(load_only_if_faster=False, load_deadline_ms=1e6)
    keys = chain("x", 4)
    rig.store_below(keys)
    rig.tier.seconds_a_block = 1e6
    rig.manager.lookup(keys[:1], A)
    rig.settle()
    rig.manager.observe_prefill(160, 0.001)
    assert rig.manager.lookup(keys[1:], B) is None


# The way down.


def test_every_store_is_written_through_once() -> None:
    rig = Rig()
    keys = chain("x", 2)
    rig.store(keys)
    rig.settle()
    rig.store(keys)
    rig.settle()
    assert (rig.tier.contains(keys) == LookupState.HIT).all()
    assert rig.counts()["disk_write_blocks"] == 2


def test_a_failed_store_is_not_written() -> None:
    rig = Rig()
    keys = chain("x", 2)
    rig.manager.prepare_store(keys)
    rig.manager.complete_store(keys, success=False)
    rig.settle()
    assert rig.tier.used_bytes == 0


def test_a_block_is_not_evicted_while_it_is_written_down() -> None:
    rig = Rig(host_blocks=8)
    keys = chain("x", 1)
    rig.store(keys)
    rig.fill_host()
    assert rig.host.lookup(keys) == 1
    rig.settle()
    rig.fill_host("other")
    assert rig.host.lookup(keys) == 0
    rig.manager.lookup(keys, A)
    rig.settle()
    assert rig.bytes_of(keys) == [bytes(content(keys[0]))]


def test_writing_down_changes_no_blocks_place_in_the_order() -> None:
    rig = Rig(host_blocks=8)
    keys = chain("x", 8)
    for key in keys:
        rig.store([key])
    rig.settle()
    output = rig.manager.prepare_store(chain("y", 3))
    assert output is not None
    assert output.evicted_keys == keys[:3]


def test_writes_pin_their_share_of_the_host_at_most_and_the_rest_is_written_later() -> None:
    rig = Rig(host_blocks=32)
    share = int(32 * WRITE_SHARE)
    keys = chain("x", 10)
    rig.store(keys)
    assert rig.host.num_available_blocks == 32 - share
    rig.settle()
    assert on_disk(rig, keys) == share
    rig.settle()
    rig.settle()
    assert on_disk(rig, keys) == 10
    assert not rig.counts().get("disk_dropped_writes")


def test_what_the_tier_does_not_take_on_is_offered_again() -> None:
    rig = Rig(host_blocks=32)
    keys = chain("x", 3)
    rig.tier.most_writes = 1
    rig.store(keys)
    assert rig.host.num_available_blocks == rig.host.num_blocks - 1
    for n in range(3):
        assert on_disk(rig, keys) == n
        rig.settle()
        rig.clock.now += 1
    assert on_disk(rig, keys) == 3
    assert rig.host.num_available_blocks == rig.host.num_blocks


# Nothing behind a hole.


def on_disk(rig: Rig, keys: list[OffloadKey]) -> int:
    """Leading blocks that the tier has. None may be behind them."""
    found = rig.tier.contains(keys) == LookupState.HIT
    leading = len(keys) if found.all() else int(found.argmin())
    assert np.count_nonzero(found) == leading, "a block is written behind a hole"
    return leading


def begin(rig: Rig, keys: list[OffloadKey], context: ReqContext) -> None:
    """A request asks for ``keys``, which it will compute."""
    rig.manager.touch(keys, context)
    rig.manager.lookup(keys, context)


def compute(rig: Rig, keys: list[OffloadKey]) -> None:
    output = rig.manager.prepare_store(keys)
    assert output is not None
    rig.manager.complete_store(keys)


def test_a_prompt_is_written_while_it_is_computed() -> None:
    rig = Rig(host_blocks=64)
    keys = chain("x", 6)
    begin(rig, keys, A)
    for end in (2, 4, 6):
        compute(rig, keys[end - 2 : end])
        rig.settle()
        assert on_disk(rig, keys) == end


def test_blocks_that_become_ready_before_their_predecessors_wait_for_them() -> None:
    rig = Rig(host_blocks=64)
    keys = chain("x", 6)
    begin(rig, keys, A)
    compute(rig, keys[2:])
    rig.settle()
    assert on_disk(rig, keys) == 0
    compute(rig, keys[:2])
    rig.settle()
    assert on_disk(rig, keys) == 6


def test_a_chain_that_was_begun_is_written_to_its_end_before_another_and_then_the_latest() -> None:
    rig = Rig(host_blocks=64)
    chains = [chain(name, 20) for name in "abc"]
    for keys in chains:
        rig.store(keys)
    order = [[on_disk(rig, keys) for keys in chains]]
    while sum(order[-1]) < 60:
        rig.settle()
        order.append([on_disk(rig, keys) for keys in chains])
    firsts = [next(i for i, row in enumerate(order) if row[n]) for n in range(3)]
    lasts = [next(i for i, row in enumerate(order) if row[n] == 20) for n in range(3)]
    assert lasts[0] <= firsts[2] <= lasts[2] <= firsts[1]


def test_a_host_hit_offers_again_what_was_left_out() -> None:
    rig = Rig(host_blocks=64)
    keys = chain("x", 6)
    rig.host.prepare_store(keys)
    rig.host.complete_store(keys)
    rig.settle()
    assert on_disk(rig, keys) == 0
    begin(rig, keys, A)
    rig.settle()
    assert on_disk(rig, keys) == 6


def test_the_missing_head_of_a_chain_is_written_again() -> None:
    rig = Rig(host_blocks=64)
    keys = chain("x", 6)
    rig.store(keys)
    rig.settle()
    rig.tier.delete(keys[:2])
    begin(rig, keys, A)
    rig.settle()
    assert on_disk(rig, keys) == 6


def test_what_the_host_has_lost_ends_its_chain() -> None:
    rig = Rig(host_blocks=64)
    keys = chain("x", 20)
    rig.store(keys)
    held = int(64 * WRITE_SHARE)
    for key in keys[held + 2 : held + 4]:
        rig.host._evict(1, rig.host._table.find([other for other in keys if other != key]))
    for _ in range(4):
        rig.settle()
    assert on_disk(rig, keys) == held + 2
    assert rig.counts()["disk_dropped_writes"] == 20 - held - 2
    assert not rig.manager.has_pending_writes


@pytest.mark.parametrize("times", [1, 2])
def test_after_a_failed_write_the_chain_is_written_again_or_taken_back(times: int) -> None:
    rig = Rig(host_blocks=64)
    keys = chain("x", 6)
    rig.tier.fails_for, rig.tier.num_fails = keys[2], times
    rig.store(keys)
    for _ in range(4):
        rig.settle()
    assert on_disk(rig, keys) == (6 if times == 1 else 2)
    assert rig.host.num_available_blocks == rig.host.num_blocks
    assert not rig.manager.has_pending_writes


def test_a_chain_longer_than_the_tier_leaves_its_head_there() -> None:
    rig = Rig(host_blocks=64, tier_blocks=6)
    keys = chain("x", 20)
    rig.store(keys)
    for _ in range(4):
        rig.settle()
    assert on_disk(rig, keys) == 6


def test_a_tier_that_evicts_what_it_was_just_given_is_not_written_for_ever() -> None:
    rig = Rig(host_blocks=64, tier_blocks=4)
    keys = chain("x", 20)
    rig.tier.claimed_blocks = 20
    rig.store(keys)
    for _ in range(100):
        rig.settle()
        rig.clock.now += 0.01
    assert not rig.manager.has_pending_writes
    assert rig.counts()["disk_write_blocks"] <= 2 * MAX_WRITES_PER_BLOCK * 20
    on_disk(rig, keys)


def test_the_last_written_of_a_chain_is_evicted_first() -> None:
    rig = Rig(host_blocks=64, tier_blocks=20)
    keys = chain("x", 20)
    rig.store(keys)
    for _ in range(4):
        rig.settle()
    assert on_disk(rig, keys) == 20
    rig.store(chain("y", 5))
    rig.settle()
    assert on_disk(rig, keys) == 15


def test_the_backlog_is_bounded_and_the_oldest_chain_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writethrough, "MAX_CHAINS", 3)
    rig = Rig(host_blocks=64)
    chains = [chain(name, 4) for name in "abcde"]
    rig.tier.most_writes = 0
    for keys in chains:
        rig.store(keys)
    rig.tier.most_writes = 1000
    rig.clock.now += 0.02
    for _ in range(4):
        rig.settle()
    assert [on_disk(rig, keys) for keys in chains] == [0, 0, 4, 4, 4]
    assert rig.counts()["disk_dropped_writes"] == 8


def test_an_idle_engine_steps_on_for_the_backlog_while_the_tier_writes() -> None:
    rig = Rig(host_blocks=64)
    assert not rig.manager.has_pending_writes
    with rig.executor.hold():
        rig.store(chain("x", 20))
        assert rig.manager.has_pending_writes
        rig.clock.now += PATIENCE_S
        assert not rig.manager.has_pending_writes, "it hangs"
    for _ in range(3):
        rig.settle()
    assert not rig.manager.has_pending_writes


def test_a_tier_that_takes_nothing_on_keeps_no_engine_stepping() -> None:
    rig = Rig(host_blocks=64)
    rig.tier.most_writes = 0
    rig.store(chain("x", 3))
    for _ in range(300):
        rig.clock.now += 0.01
        rig.manager.poll()
    assert not rig.manager.has_pending_writes
    assert not rig.manager._lanes[0].writes.has_backlog


def test_the_check_finds_a_chain_that_is_written_behind_a_hole() -> None:
    rig = Rig(host_blocks=64)
    keys = chain("x", 6)
    begin(rig, keys, A)
    compute(rig, keys[:4])
    rig.settle()
    writes = rig.manager._lanes[0].writes
    next(iter(writes._chains)).done = 5
    with pytest.raises(IntegrityError, match="behind a hole"):
        writes.check_integrity()


def two_groups(rig: Rig, other: KVGroup, n: int) -> tuple[list[OffloadKey], list[OffloadKey]]:
    """The blocks of a chain in a group with full attention, and in ``other``."""
    writes = WriteThrough(rig.host, rig.tier, [KVGroup(16), other], rig.manager._count, rig.clock)
    rig.manager._lanes[0].writes = writes
    full = chain("x", n)
    return full, [key[:-1] + bytes([1]) for key in full]


def interleaved(full: list[OffloadKey], window: list[OffloadKey]) -> list[OffloadKey]:
    return [key for pair in zip(full, window, strict=True) for key in pair]


WINDOW = KVGroup(16, sliding_window=33)
"""A request that goes on at the end of a block needs the last two."""


def test_of_a_window_what_slid_out_is_not_needed() -> None:
    rig = Rig(host_blocks=128)
    full, window = two_groups(rig, WINDOW, 8)
    begin(rig, interleaved(full, window), A)
    compute(rig, full + window[5:])
    for _ in range(3):
        rig.settle()
    assert on_disk(rig, full) == 8
    assert (rig.tier.contains(window) == LookupState.HIT).tolist() == [False] * 5 + [True] * 3


def test_without_its_window_no_block_is_written() -> None:
    rig = Rig(host_blocks=128)
    full, window = two_groups(rig, WINDOW, 8)
    begin(rig, interleaved(full, window), A)
    compute(rig, full + window[:3] + window[6:7])
    for _ in range(3):
        rig.settle()
    assert on_disk(rig, full) == 3, "requests can go on after the third block, and nowhere behind it"
    assert on_disk(rig, window) == 3


def test_a_hole_in_one_group_with_full_attention_is_a_hole_in_all() -> None:
    rig = Rig(host_blocks=128)
    full, draft = two_groups(rig, KVGroup(16, draft=True), 8)
    begin(rig, interleaved(full, draft), A)
    compute(rig, full + draft[:3] + draft[4:])
    for _ in range(3):
        rig.settle()
    assert on_disk(rig, full) == 3
    assert on_disk(rig, draft) == 3


def test_a_chunk_of_attention_is_written_from_its_beginning() -> None:
    rig = Rig(host_blocks=128)
    full, chunked = two_groups(rig, KVGroup(16, attention_chunk=64), 10)
    begin(rig, interleaved(full, chunked), A)
    compute(rig, full + chunked[:1] + chunked[5:7] + chunked[8:])
    for _ in range(3):
        rig.settle()
    assert on_disk(rig, full) == 10
    # From 64 and from 128 on a chunk begins: there nothing is needed, and behind 128 the blocks since.
    assert (rig.tier.contains(chunked) == LookupState.HIT).tolist() == [True] + [False] * 7 + [True] * 2


def in_tier(rig: Rig, keys: list[OffloadKey]) -> list[int]:
    return np.flatnonzero(rig.tier.contains(keys) == LookupState.HIT).tolist()


@pytest.mark.parametrize("dropped", [True, False])
def test_a_chain_that_ends_without_its_last_window_keeps_what_can_be_reached(
    dropped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(host_blocks=256, tier_blocks=300)
    full, window = two_groups(rig, WINDOW, 10)
    begin(rig, interleaved(full, window), A)
    # The first blocks of the window slid out before they could be stored.
    compute(rig, full + window[4:8])
    for _ in range(3):
        rig.settle()
    if dropped:
        monkeypatch.setattr(writethrough, "MAX_CHAINS", 1)
        others = chain("y", 2)
        rig.manager.touch(interleaved(others, [key[:-1] + bytes([1]) for key in others]), B)
    else:
        rig.manager.offer_chain(interleaved(full, window), A)
    for _ in range(3):
        rig.settle()
    assert in_tier(rig, full) == list(range(8))
    assert in_tier(rig, window) == [4, 5, 6, 7]


def test_a_window_that_cannot_be_written_leaves_nothing_behind_the_last_usable_position() -> None:
    rig = Rig(host_blocks=256, tier_blocks=300)
    full, window = two_groups(rig, WINDOW, 10)
    rig.tier.fails_for, rig.tier.num_fails = window[9], 9
    begin(rig, interleaved(full, window), A)
    compute(rig, full + window)
    for _ in range(8):
        rig.clock.now += 0.05
        rig.settle()
    assert in_tier(rig, full) == in_tier(rig, window) == list(range(9))


def test_nothing_stays_behind_the_first_of_several_blocks_that_cannot_be_written() -> None:
    """Whichever of them the tier reports first."""
    rig = Rig(host_blocks=128)
    keys = chain("x", 8)
    bad = {keys[3], keys[5]}
    poll = rig.tier.poll

    def fail() -> list[TierResult]:
        results = [TierResult(r.key, r.is_read, TierError.IO if r.key in bad else r.error) for r in poll()]
        rig.tier.delete([result.key for result in results if result.key in bad])
        return results[::-1]

    rig.tier.poll = fail  # type: ignore[method-assign]
    rig.store(keys)
    for _ in range(8):
        rig.clock.now += 0.05
        rig.settle()
    assert in_tier(rig, keys) == [0, 1, 2]


def test_a_dropped_chain_leaves_what_another_is_writing_the_way_to(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(host_blocks=512, tier_blocks=600)
    shared, tail = chain("x", 10), chain("y", 4)
    write = rig.tier.write_block

    def stall(key: OffloadKey, slot: int, block: Any) -> None:
        if key == shared[3]:
            rig.executor.stall(1.0)
        write(key, slot, block)

    rig.tier.write_block = stall  # type: ignore[method-assign]
    rig.store(shared)
    rig.settle()
    assert in_tier(rig, shared) == [0, 1, 2, *range(4, 10)]
    begin(rig, shared + tail, B)
    monkeypatch.setattr(writethrough, "MAX_CHAINS", 1)
    rig.manager.touch(chain("z", 2), A)
    assert B.req_id not in rig.manager._lanes[0].writes._of_request
    rig.clock.now += 2.0
    rig.settle()
    assert in_tier(rig, shared) == list(range(10))


# When things go wrong.


@pytest.mark.parametrize(
    ("error", "reason", "counter"),
    [
        (TierError.CORRUPT, MissReason.CORRUPT, "disk_bad_blocks"),
        (TierError.IO, MissReason.READ_FAILED, "disk_read_failures"),
    ],
)
def test_a_block_that_cannot_be_read_is_a_miss(error: TierError, reason: MissReason, counter: str) -> None:
    rig = Rig()
    keys = chain("x", 2)
    rig.store_below(keys)
    rig.manager.lookup(keys, A)
    rig.manager.poll()
    rig.tier.fails = error
    rig.settle()
    rig.tier.delete(keys)
    assert rig.manager.lookup(keys, A) == 0
    assert rig.manager.explain_miss(keys[0]).reason is reason
    assert rig.counts()[counter] == 2
    assert rig.host.num_used_blocks == 0


def test_who_wants_a_block_that_was_found_bad_meanwhile_is_told_so() -> None:
    rig = Rig(host_blocks=8)
    keys = chain("x", 4)
    rig.store_below(keys)
    rig.manager.lookup(keys[:2], A)
    rig.manager.poll()
    rig.tier.fails = TierError.CORRUPT
    rig.manager.lookup(keys, B)
    rig.executor.drain()
    rig.manager.poll()
    rig.tier.delete(keys)
    rig.tier.fails = None
    rig.settle()
    assert rig.manager.lookup(keys, B) == 0
    assert rig.manager.explain_miss(keys[0]).reason is MissReason.CORRUPT


def fail(rig: Rig, times: int) -> None:
    for i in range(times):
        keys = chain(f"bad{rig.clock.now}/{i}", 1)
        rig.store_below(keys)
        rig.tier.fails = TierError.CORRUPT
        rig.manager.lookup(keys, ReqContext(f"bad{rig.clock.now}/{i}"))
        rig.settle()
        rig.tier.fails = None


def test_a_tier_that_fails_too_often_is_switched_off_and_the_host_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(tier_blocks=100)
    keys = chain("x", 2)
    rig.store_below(keys)
    fail(rig, MAX_FAILURES - 1)
    assert rig.manager.lookup(keys, A) is None
    assert rig.counts()["disk_off"] == 0
    fail(rig, 1)
    assert rig.manager.lookup(keys, B) == 0
    assert rig.counts()["disk_off"] == 1
    fail_messages = [record for record in caplog.records if "TIER IS OFF" in record.message]
    assert len(fail_messages) == 1
    rig.store(chain("y", 2))
    assert rig.manager.lookup(chain("y", 2), B) == 2


def test_failures_far_apart_switch_nothing_off() -> None:
    rig = Rig(tier_blocks=100)
    for _ in range(MAX_FAILURES + 2):
        fail(rig, 1)
        rig.clock.now += FAILURE_PERIOD_S / (MAX_FAILURES - 2)
    assert rig.counts()["disk_off"] == 0


def test_tiers_can_be_switched_off_from_outside() -> None:
    rig = Rig()
    keys = chain("x", 2)
    rig.store_below(keys)
    rig.manager.lookup(keys, A)
    rig.manager.switch_off_tiers("keys do not outlive the process")
    assert rig.manager.poll(), "those who wait must ask again"
    assert rig.manager.lookup(keys, A) == 0
    rig.settle()
    assert rig.tier.reads == []


@pytest.mark.parametrize("under_way", ["read", "write", "arrived"])
def test_a_reset_makes_everything_unreachable_whatever_is_under_way(under_way: str) -> None:
    rig = Rig()
    keys = chain("x", 2)
    if under_way == "write":
        rig.store(keys)
    else:
        rig.store_below(keys)
        rig.manager.lookup(keys, A)
        rig.manager.poll()
    if under_way == "arrived":
        rig.settle()
    rig.manager.reset()
    for _ in range(2):
        assert rig.manager.lookup(keys, B) in (0, None)
        rig.settle()
    assert rig.manager.lookup(keys, A) == 0
    assert rig.manager.lookup(keys, B) == 0
    assert rig.host.num_used_blocks == 0
    rig.store(keys)
    rig.settle()
    assert rig.manager.lookup(keys, A) == 2
    assert rig.bytes_of(keys) == [bytes(content(key)) for key in keys]


def test_shutting_down_twice_is_once() -> None:
    rig = Rig()
    rig.store(chain("x", 2))
    rig.manager.shutdown()
    rig.manager.shutdown()
    assert rig.host.num_used_blocks == 0


def test_the_books_are_checked() -> None:
    rig = Rig()
    keys = chain("x", 2)
    rig.store_below(keys)
    rig.manager.lookup(keys, A)
    rig.settle()
    rig.manager._reserved.clear()
    with pytest.raises(IntegrityError):
        rig.manager.check_integrity()

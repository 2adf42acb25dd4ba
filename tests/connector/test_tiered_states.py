"""State groups over a lower tier: a request waits for the state and the blocks before it, and for nothing else."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from kvoffload.abc import KVGroup, OffloadKey, ReqContext, ScheduledStep, Slots
from kvoffload.cache.admission import ReuseFilter
from kvoffload.cache.keys import key_group_idx
from kvoffload.cache.manager import LRUOffloadingManager
from kvoffload.cache.slots import HostBackend
from kvoffload.connector.layout import KeyLayout
from kvoffload.connector.request import RequestBlocks
from tests.clock import Clock
from tests.connector.group_rig import FULL, HYBRID, OTHER, SIZE, STATE, GroupRig
from tests.connector.rig import FakeRequest
from tests.connector.test_tiered_scheduler import SpyManager


class TieredRig(GroupRig):
    def __init__(self, num_host_blocks: int = 100) -> None:
        self.clock = Clock()
        manager = SpyManager(num_host_blocks, self.clock, HYBRID)
        super().__init__(manager=manager, options={"clock": self.clock, "load_deadline_ms": 1000})

    def settle(self) -> None:
        for _ in range(3):
            self.half.build_connector_meta(ScheduledStep({}))
            self.manager.executor.drain()
        self.half.build_connector_meta(ScheduledStep({}))

    def put_below(self, request: FakeRequest, *ends: int) -> None:
        """The blocks of the request and its states at ``ends`` are in the tier, and not in the host."""
        self.compute(request, *ends)
        self.finish(request)
        self.settle()
        self.manager.host.reset()
        self.half.jobs.changes.contents += 1

    def held_below(self, request: FakeRequest, g: int) -> list[int]:
        ends = range(4, request.num_tokens + 1, 4)
        return [end for end in ends if self.manager.tier.contains([self.key(request, g, end)])[0] == 1]

    def answer(self, request: FakeRequest) -> int | None:
        """What the request is offered when it has waited, and as many blocks have come as it asked for."""
        for _ in range(8):
            hit = self.hit(request)
            if hit is not None:
                return hit
            self.settle()
        return None


def test_a_request_waits_for_its_state_and_the_blocks_before_it() -> None:
    rig = TieredRig()
    writer = rig.request(42)
    rig.put_below(writer, 40)
    assert rig.held_below(writer, STATE) == rig.held_below(writer, OTHER) == [40]
    request = rig.request(60)
    assert rig.hit(request) is None
    assert rig.answer(request) == 40
    tables = rig.tables(60, skip_at=40)
    rig.allocate(request, tables, 40)
    (spec,) = rig.half.build_connector_meta(ScheduledStep({})).loads.values()
    assert spec.device.group_sizes == (10, 1, 1)
    assert rig.half.records[-1].tier_tokens == {"memory": 40}


def test_blocks_below_without_a_state_are_not_read() -> None:
    rig = TieredRig()
    writer = rig.request(42)
    rig.put_below(writer, 40)
    for g in (STATE, OTHER):
        rig.manager.tier.delete([rig.key(writer, g, 40)])
    request = rig.request(60)
    assert rig.hit(request) == 0
    assert rig.manager.host.num_used_blocks == 0
    rig.allocate(request, rig.tables(60))
    assert rig.half.records[-1].reason == "no_state"


def test_a_superseded_state_stays_in_the_tier_where_it_was_before() -> None:
    """An earlier request has left it there, as the end of its turn."""
    rig = TieredRig()
    first = rig.request(48)
    rig.put_below(first, 44)
    request = rig.request(42)
    rig.compute(request, 40)
    for end in (44, 48):
        request.tokens += range(len(request.tokens), end)
        rig.done(rig.step(request, end - request.num_computed_tokens, rig.offer(end)))
    assert rig.manager.host.lookup([rig.key(first, STATE, 44)]) == 0
    assert rig.held_below(first, STATE) == rig.held_below(first, OTHER) == [44]


# Which states count as used: policies see those that a request uses or keeps, none of boundaries without a state.


Keys = Sequence[OffloadKey]


class Phantom(AssertionError):
    """A policy was given the key of a state that is not stored."""


class StrictManager(LRUOffloadingManager):
    """A real manager that raises Phantom, and remembers its calls."""

    def __init__(self, num_blocks: int = 1000) -> None:
        super().__init__(HostBackend(1, num_blocks), enable_events=True)
        self.touches: list[tuple[list[OffloadKey], list[OffloadKey] | None]] = []
        self.reorders: list[list[OffloadKey]] = []
        self.offers: list[list[OffloadKey]] = []

    def check(self, keys: Keys) -> None:
        for key in keys:
            if key_group_idx(key) in (STATE, OTHER) and self.block_status(key) is None:
                raise Phantom(key.hex())

    def touch(
        self, keys: Keys, req_context: ReqContext | None = None, chain: Keys | None = None, found: Slots | None = None
    ) -> None:
        self.check(keys)
        self.touches.append((list(keys), None if chain is None else list(chain)))
        super().touch(keys, req_context, chain, found)

    def end_chain(self, keys: Any, stored: Any, req_context: Any = None, chain: Any = None, found: Any = None) -> None:
        self.check(keys)
        self.reorders.append(list(keys))
        self.offers.append(list(chain or ()))
        super().end_chain(keys, stored, req_context, chain, found)


def used(rig: GroupRig, request: FakeRequest, *ends: int) -> list[OffloadKey]:
    """The request's blocks, and its states at ``ends``, each behind the blocks that end there."""
    keys = []
    for end in range(SIZE, request.num_tokens + 1, SIZE):
        keys += [rig.key(request, g, end) for g in ((FULL, STATE, OTHER) if end in ends else (FULL,))]
    return keys


def whole(rig: GroupRig, request: FakeRequest) -> list[OffloadKey]:
    return used(rig, request, *range(SIZE, request.num_tokens + 1, SIZE))


def resume(rig: GroupRig, request: FakeRequest) -> int:
    """The request loads its hit. Returns where it ends."""
    hit = rig.hit(request)
    assert hit
    tables = rig.tables(request.num_tokens + 12, skip_at=hit)
    rig.allocate(request, tables, hit)
    new = frozenset({request.request_id})
    rig.done(rig.half.build_connector_meta(ScheduledStep({}, {request.request_id: tables}, new)))
    request.num_computed_tokens = hit
    return hit


def test_a_request_touches_the_last_state_in_host_memory() -> None:
    manager = StrictManager()
    rig = GroupRig(manager=manager)
    rig.compute(rig.request(18), 16)
    rig.compute(rig.request(42), 40)
    for request, last in ((rig.request(62), 40), (rig.request(40), 16), (rig.request(16), 0), (rig.request(6), 0)):
        rig.hit(request)
        assert manager.touches[-1] == (used(rig, request, last), whole(rig, request))
    # Another group's state is missing there. That costs the order no more than a block that no request asks for.
    manager.drop([rig.key(rig.request(42), OTHER, 40)])
    with pytest.raises(Phantom):
        manager.check(used(rig, rig.request(42), 40))


def test_an_ended_request_reorders_the_states_that_it_has_kept_or_used() -> None:
    """It continues at 16, parts from others at 32, ends its prompt at 80, and its output at 88."""
    manager = StrictManager()
    rig = GroupRig(manager=manager)
    rig.compute(rig.request(18), 16)
    rig.compute(rig.request(82), 80)
    request = rig.request(82)
    request.tokens[46:] = range(1000, 1036)
    assert resume(rig, request) == 16
    for end in (32, 48, 80, 84, 88):
        request.tokens += range(2000, 2000 + end - len(request.tokens))
        rig.done(rig.step(request, end - request.num_computed_tokens, rig.offer(end)))
    rig.finish(request)
    assert manager.reorders[-1] == used(rig, request, 16, 32, 80, 88)
    assert manager.offers[-1] == whole(rig, request)


def test_the_devices_own_hit_counts_as_one_that_was_resumed_at() -> None:
    manager = StrictManager()
    rig = GroupRig(manager=manager)
    rig.compute(rig.request(18), 16)
    request = rig.request(42)
    rig.admit(request, computed=16)
    rig.done(rig.step(request, 26))
    rig.finish(request)
    assert manager.reorders[-1] == used(rig, request, 16)


class Whole(LRUOffloadingManager):
    """Touches and reorders a chain with the states of all of its boundaries."""

    def touch(
        self, keys: Keys, req_context: ReqContext | None = None, chain: Keys | None = None, found: Slots | None = None
    ) -> None:
        self.chain = list(chain or ())
        super().touch(self.chain, req_context, found=found)

    def end_chain(self, keys: Keys, *args: Any, **more: Any) -> None:
        super().end_chain(self.chain, *args, **more)


def test_a_state_behind_which_a_conversation_went_on_is_evicted_first() -> None:
    """No request has continued at 48. If its state were as recent as the blocks there, the end of the chain would go
    first."""
    held = []
    for manager in (LRUOffloadingManager, Whole):
        rig = GroupRig(manager=manager(HostBackend(1, 24)))
        request, turn = rig.request(50), rig.request(70)
        rig.compute(request, 48)
        request.tokens += range(50, 61)
        rig.done(rig.step(request, 10, rig.offer(60)))
        rig.finish(request)
        resume(rig, turn)
        rig.done(rig.step(turn, 10))
        rig.finish(turn)
        assert rig.held(turn, STATE) == [48, 60]
        rig.compute(rig.request(22, first=5000))
        held.append((rig.held(turn, STATE), rig.held(turn, FULL)[-1]))
    assert held == [([60], 68), ([48, 60], 60)]


# The order.


@pytest.mark.parametrize("seed", range(40))
def test_keys_come_by_the_end_of_their_blocks(seed: int) -> None:
    rng = random.Random(seed)
    one_size = rng.random() < 0.5
    kinds: list[dict[str, Any]] = [{}, {"lookahead": 1}, {"sliding_window": 9}, {"state": True}, {"state": True}]
    kinds = [kind for kind in kinds for _ in range(rng.choice((0, 1, 2)))]
    rng.shuffle(kinds)
    groups = [KVGroup(4 if one_size else rng.choice((4, 8, 12)), **kind) for kind in kinds]
    groups = groups or [KVGroup(4, state=True)]
    request = FakeRequest("r", list(range(rng.randint(0, 120))), hash_tokens=1)
    layout = KeyLayout(groups, 1, lambda request, end, lookahead: str(end).encode())
    blocks = RequestBlocks(request, layout, b"", 1 << 40)
    blocks.extend_keys()
    boundaries = range(layout.align, 121, layout.align)
    chosen = rng.sample(boundaries, min(len(boundaries), rng.randint(0, 4)))
    ends = [
        ((i + 1) * group.block_tokens, group.state, g, key)
        for g, group in enumerate(groups)
        for i, key in enumerate(blocks.keys[g])
    ]
    if layout.states:
        expected = [key for end, is_state, _, key in sorted(ends) if not is_state or end in chosen]
    else:
        expected = blocks.keys_in_order()
    assert blocks.used_keys(chosen) == expected
    assert sorted(blocks.keys_in_order()) == sorted(key for *_, key in ends)


# Admissions and lower tiers.


def states_after_two_requests(manager: LRUOffloadingManager, num_requests: int) -> list[list[int]]:
    rig = GroupRig(manager=manager)
    manager.admission = ReuseFilter(2)
    for _ in range(num_requests):
        request = rig.request(42)
        rig.compute(request, 40)
        rig.finish(request)
    return [rig.held(request, STATE), rig.held(request, OTHER)]


def test_an_admission_counts_a_request_once_for_each_of_its_states() -> None:
    assert states_after_two_requests(LRUOffloadingManager(HostBackend(1, 100)), 1) == [[], []]
    assert states_after_two_requests(LRUOffloadingManager(HostBackend(1, 100)), 2) == [[40], [40]]


def test_a_touch_reads_no_state_from_a_tier() -> None:
    rig = TieredRig()
    rig.put_below(rig.request(42), 40)
    request = rig.request(60, load=False)
    assert rig.hit(request) == 0
    rig.settle()
    assert rig.manager.host.num_used_blocks == 0
    assert rig.manager.num_promotions == 0
    # A request that may load does read it.
    rig.hit(rig.request(60))
    rig.settle()
    assert rig.manager.host.num_used_blocks == 12


@pytest.mark.parametrize("has_chain", [True, False])
def test_states_of_a_prompt_are_written_below_while_its_request_runs(has_chain: bool) -> None:
    rig = TieredRig()
    if not has_chain:
        touch = rig.manager.touch
        rig.manager.touch = lambda keys, context, chain: touch(keys, context)
    request = rig.request(42)
    rig.compute(request, 40)
    rig.settle()
    assert rig.held_below(request, STATE) == rig.held_below(request, OTHER) == ([40] if has_chain else [])

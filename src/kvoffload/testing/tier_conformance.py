"""The conformance suite of tiers, as a pytest class.

Subclass it and say how to make a tier::

    from kvoffload.testing.tier_conformance import TierConformance

    class TestMyTier(TierConformance):
        def make_tier(self, pools, num_blocks):
            return MyTier(pools, num_blocks)

The suite uses only the contract of ``Tier``, and gives the tier time with ``wait``. Letters stand for keys, as in
``conformance``. For a tier that several servers share, subclass SharedTierConformance and define ``another`` as well.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from random import Random
from types import FrameType

import numpy as np
import pytest

from kvoffload.abc import ByteArray, Keys, LookupState, OffloadKey, Slots, Tier, TierError, TierResult
from kvoffload.testing.conformance import ALPHABET, keys, letters

HIT, MISS, RETRY = LookupState.HIT, LookupState.MISS, LookupState.RETRY
SLOT_BYTES = 4096
NUM_SLOTS = 64
READ_SLOTS = 32
"""The first slot that is read into. Lower slots are written from."""
DEADLINE_S = 30.0
"""A result that the tier has not reported by then counts as lost, and a call that has not returned by then while the
medium stands still as one that waits for it."""
MAX_DEADLINES = 10
"""A test takes as many deadlines at most."""


def make_pools(num_slots: int, *slot_bytes: int, seed: int = 0) -> list[ByteArray]:
    """Returns one pool per rank, of ``num_slots`` slots of ``slot_bytes`` each, filled at random."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (num_slots, nbytes), dtype=np.uint8) for nbytes in slot_bytes]


def fits(nbytes: int, tier: Tier) -> bool:
    """Returns whether ``nbytes`` are within the tier's budget, if it has one."""
    capacity_bytes = tier.stats().capacity_bytes
    return capacity_bytes is None or nbytes <= capacity_bytes


@contextmanager
def watched(seconds: float, rule: str) -> Iterator[None]:
    """Lets the running test fail, with ``rule`` and the call of a tier that hangs, if the body takes longer. Does
    nothing outside the main thread, where nothing can interrupt it, or if another timer ends before."""
    start, left = time.monotonic(), signal.getitimer(signal.ITIMER_REAL)[0]
    if threading.current_thread() is not threading.main_thread() or 0 < left <= seconds:
        yield
        return

    def fail(signum: int, frame: FrameType | None) -> None:
        call = "no call of a tier"
        while frame is not None:
            caller = frame.f_locals.get("self")
            if isinstance(caller, Tier) and hasattr(Tier, frame.f_code.co_name):
                call = f"{type(caller).__name__}.{frame.f_code.co_name}"
            frame = frame.f_back
        pytest.fail(f"{rule}: not done after {seconds:g} s, in {call}")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left - (time.monotonic() - start)))


class TierDriver:
    """How a suite makes a tier, which subclasses define, and how it drives one through the contract."""

    max_under_way: int | None = None
    """Blocks that the tier takes on before the first is done, if that is bounded and ``hold`` works."""

    def make_tier(self, pools: Sequence[ByteArray], num_blocks: int) -> Tier:
        """Returns a new, empty tier for the blocks of ``pools``, with room for ``num_blocks`` or a few more."""
        raise NotImplementedError

    def reopen(self, tier: Tier, pools: Sequence[ByteArray], num_blocks: int) -> Tier | None:
        """Returns the tier of a later process on the medium of ``tier``, which was closed; None if no block outlives
        it."""
        return None

    def hold(self, tier: Tier) -> AbstractContextManager[None] | None:
        """Returns a context in which the tier's work stands still. None: that is not possible, and some tests are
        weaker."""
        return None

    def spoil(self, tier: Tier) -> bool:
        """Changes a bit of every block in the medium. Returns False if that is not possible."""
        return False

    def lose(self, tier: Tier, names: str) -> bool:
        """Makes the medium lose blocks, as if others had needed the room. Returns False if that is not possible."""
        return False

    # Helpers.

    @pytest.fixture(autouse=True)
    def _is_watched(self, request: pytest.FixtureRequest) -> Iterator[None]:
        with watched(MAX_DEADLINES * DEADLINE_S, f"{request.node.name}: each test ends"):
            yield

    def make_bounded(self, num_blocks: int) -> tuple[Tier, list[ByteArray]]:
        """Returns a tier and its pools, if its size is its own."""
        tier, pools = self.make(num_blocks)
        if tier.stats().capacity_bytes is None:
            pytest.skip("the medium bounds itself")
        return tier, pools

    def make(self, num_blocks: int = 8, *slot_bytes: int) -> tuple[Tier, list[ByteArray]]:
        pools = make_pools(NUM_SLOTS, *(slot_bytes or (SLOT_BYTES,)))
        tier = self.make_tier(pools, num_blocks)
        self.check(tier)
        return tier, pools

    def check(self, tier: Tier) -> None:
        """Asserts the tier's invariants."""
        tier.check_integrity()
        assert tier.block_bytes > 0
        stats = tier.stats()
        if stats.capacity_bytes is not None:
            assert stats.used_bytes is not None
            in_use = f"{stats.used_bytes} of {stats.capacity_bytes} bytes in use"
            assert 0 <= stats.used_bytes <= stats.capacity_bytes, in_use
        assert stats.num_blocks is None or stats.num_blocks >= 0
        assert tier.num_failed_lookups >= 0

    def begin_write(self, tier: Tier, pools: list[ByteArray], names: str, version: int = 0) -> str:
        """Begins writes of ``names``. Returns the names that were taken on."""
        asked = keys(names)
        for key, slot in zip(asked, write_slots(names).tolist(), strict=True):
            put(pools, slot, key, version)
        taken = tier.write(asked, write_slots(names))
        assert set(taken) <= set(asked)
        self.check(tier)
        return letters(taken)

    def begin_read(self, tier: Tier, names: str) -> str:
        """Begins reads of ``names``. Returns the names that were taken on."""
        asked = keys(names)
        taken = tier.read(asked, read_slots(names))
        assert set(taken) <= set(asked)
        self.check(tier)
        return letters(taken)

    def finish(self, tier: Tier, wanted: str | Keys) -> list[TierResult]:
        """Waits until the tier has reported ``wanted``, names or keys, each once, and nothing else."""
        asked = keys(wanted) if isinstance(wanted, str) else wanted
        results: list[TierResult] = []
        deadline = time.monotonic() + DEADLINE_S
        while len(results) < len(asked) and time.monotonic() < deadline:
            tier.wait(0.01)
            results += tier.poll()
            self.check(tier)
        results += tier.poll()
        assert Counter(result.key for result in results) == Counter(asked), "not each key was reported once"
        for result in results:
            assert result.nbytes >= 0
            assert result.seconds >= 0
        return results

    def transfer(self, tier: Tier, names: str, begin: Callable[[str], str], is_read: bool) -> None:
        """Begins transfers of ``names``, all of which must succeed. Keys that are not taken on are tried again."""
        deadline = time.monotonic() + DEADLINE_S
        while names and time.monotonic() < deadline:
            taken = begin(names)
            for result in self.finish(tier, taken):
                assert result.ok, f"{result}"
                assert result.is_read is is_read
            names = "".join(name for name in names if name not in taken)
            if not taken:
                if is_read:
                    # The tier may have to ask its medium first.
                    self.present(tier, names)
                tier.wait(0.01)
                assert tier.poll() == []
        assert not names, f"{names!r} was never taken on"

    def write(self, tier: Tier, pools: list[ByteArray], names: str, version: int = 0) -> None:
        """Writes all of ``names``."""
        self.transfer(tier, names, lambda left: self.begin_write(tier, pools, left, version), is_read=False)

    def check_reads(self, tier: Tier, pools: list[ByteArray], names: str, version: int = 0) -> None:
        """Reads all of ``names``, and asserts that they have the bytes that were written."""
        self.read(tier, names)
        for key, slot in zip(keys(names), read_slots(names).tolist(), strict=True):
            assert holds(pools, slot, key, version), f"block {letters([key])} has other bytes"

    def read(self, tier: Tier, names: str) -> None:
        """Reads all of ``names``."""
        self.transfer(tier, names, lambda left: self.begin_read(tier, left), is_read=True)

    def await_present(self, tier: Tier, names: str) -> None:
        """Asks until the tier says that all of ``names`` can be read: its list of other servers' blocks may be old."""
        deadline = time.monotonic() + DEADLINE_S
        while self.present(tier, names) != names:
            assert time.monotonic() < deadline, f"never found {names!r}, only {self.present(tier, names)!r}"
            tier.wait(0.01)
            assert tier.poll() == []

    def present(self, tier: Tier, names: str = ALPHABET) -> str:
        """Returns the ``names`` that can be read, as soon as the tier knows."""
        deadline = time.monotonic() + DEADLINE_S
        while (states := tier.contains(keys(names)).tolist()).count(RETRY) and time.monotonic() < deadline:
            tier.wait(0.01)
            assert tier.poll() == []
        assert set(states) <= {HIT, MISS}
        return "".join(name for name, state in zip(names, states, strict=True) if state == HIT)

    def can_be_read(self, tier: Tier, names: str) -> bool:
        """Returns whether one of ``names`` can be read, as far as the tier knows now."""
        return HIT in tier.contains(keys(names)).tolist()

    def fill(self, tier: Tier, pools: list[ByteArray]) -> str:
        """Writes one block after the other until one is evicted. Returns all that were written."""
        for i, name in enumerate(ALPHABET):
            self.write(tier, pools, name)
            if tier.stats().num_evicted:
                return ALPHABET[: i + 1]
        raise AssertionError(f"room for more than {len(ALPHABET)} blocks")

    @contextmanager
    def under_way(self, tier: Tier) -> Iterator[bool]:
        """Makes transfers stand still, if that is possible, and yields whether it is."""
        held = self.hold(tier)
        rule = "no call waits for the medium: what it begins goes on in the background, and poll reports it"
        with held or nullcontext(), watched(DEADLINE_S, rule) if held is not None else nullcontext():
            yield held is not None


class TierConformance(TierDriver):
    """Tests of the contract of ``Tier``.

    As long as no block was used twice, the tier must evict the oldest one first, as LRU and ARC do. A tier without
    ``capacity_bytes``, whose medium bounds itself, may evict as it likes, but needs room for the blocks of a test.
    """

    # write, read.

    def test_a_new_tier_is_empty(self) -> None:
        tier, _ = self.make()
        assert tier.name
        assert self.present(tier) == ""
        assert tier.stats().num_evicted == 0
        assert fits(8 * tier.block_bytes, tier)
        assert tier.poll() == []
        assert tier.contains([]).tolist() == []
        assert tier.read([], read_slots("")) == []
        assert tier.write([], write_slots("")) == []

    @pytest.mark.parametrize("slot_bytes", [(4096,), (12288,), (4096, 4096, 4096), (4096, 8192)])
    def test_reading_gives_what_was_written(self, slot_bytes: tuple[int, ...]) -> None:
        tier, pools = self.make(8, *slot_bytes)
        assert tier.block_bytes >= sum(slot_bytes)
        self.write(tier, pools, "abc")
        self.write(tier, pools, "d")
        assert self.present(tier) == "abcd"
        self.check_reads(tier, pools, "db")
        self.check_reads(tier, pools, "abcd")

    def test_later_changes_of_the_host_slots_do_not_reach_written_blocks(self) -> None:
        tier, pools = self.make()
        self.write(tier, pools, "ab")
        for pool in pools:
            pool[:] = 0x55
        self.check_reads(tier, pools, "ba")

    def test_the_caller_may_reuse_its_lists_after_the_call(self) -> None:
        tier, pools = self.make()
        asked, slots = keys("ab"), write_slots("ab")
        for key, slot in zip(asked, slots.tolist(), strict=True):
            put(pools, slot, key)
        written = letters(tier.write(asked, slots))
        assert written
        asked.clear()
        slots[:] = 0
        self.finish(tier, written)
        asked, slots = keys(written), read_slots(written)
        assert list(tier.read(tuple(asked), slots)) == asked
        slots[:] = 0
        self.finish(tier, written)
        for key, slot in zip(asked, read_slots(written).tolist(), strict=True):
            assert holds(pools, slot, key)

    def test_present_blocks_are_not_written_again(self) -> None:
        tier, pools = self.make()
        self.write(tier, pools, "ab")
        taken = self.begin_write(tier, pools, "ba", version=1)
        assert not taken or tier.is_shared
        assert all(result.ok and result.nbytes == 0 for result in self.finish(tier, taken))
        self.write(tier, pools, "c", version=1)
        self.check_reads(tier, pools, "ab")
        self.check_reads(tier, pools, "c", version=1)

    def test_a_block_can_be_read_once_its_write_was_reported_and_not_before(self) -> None:
        tier, pools = self.make()
        with self.under_way(tier) as held:
            taken = self.begin_write(tier, pools, "ab")
            assert not held or not self.can_be_read(tier, "ab")
        self.finish(tier, taken)
        assert self.present(tier) == "ab"

    @pytest.mark.parametrize("length", [1, 7, 8, 31, 32, 33, 44, 63, 64])
    def test_keys_of_any_length_are_distinguished(self, length: int) -> None:
        tier, pools = self.make(8)
        key = bytes(range(1, length + 1))
        # Keys with the same beginning or end, with one more zero, or with zeros only.
        family = [key, key[:-1] + b"\0", bytes(length), key[1:] + b"\0", (key + b"\0")[:64], key[:-1]]
        family = [other for other in dict.fromkeys(family) if other]
        slots = np.arange(len(family), dtype=np.int64)
        for i, each in enumerate(family):
            put(pools, i, each)
        deadline = time.monotonic() + DEADLINE_S
        while (tier.contains(family) != HIT).any() and time.monotonic() < deadline:
            self.finish(tier, tier.write(family, slots))
            tier.wait(0.01)
            assert tier.poll() == []
        assert tier.contains(family).tolist() == [HIT] * len(family)
        assert list(tier.read(family, slots + READ_SLOTS)) == family
        assert all(result.ok for result in self.finish(tier, family))
        assert all(holds(pools, READ_SLOTS + i, each) for i, each in enumerate(family))

    # Room and order.

    def test_used_bytes_stay_within_the_capacity(self) -> None:
        tier, pools = self.make_bounded(4)
        for i in range(0, len(ALPHABET), 3):
            self.write(tier, pools, ALPHABET[i : i + 3])
        assert tier.stats().num_evicted > 0
        there = self.present(tier)
        assert there
        assert fits(len(there) * tier.block_bytes, tier)
        self.check_reads(tier, pools, there)

    def test_the_oldest_block_is_evicted_first(self) -> None:
        tier, pools = self.make_bounded(4)
        names = self.fill(tier, pools)
        assert self.present(tier) == names[tier.stats().num_evicted :]

    def test_what_was_evicted_is_taken_once(self) -> None:
        """A tier may leave events of its evictions out, but not some of them."""
        tier, pools = self.make_bounded(4)
        assert tier.take_evicted() == []
        names = self.fill(tier, pools)
        taken = tier.take_evicted()
        if not taken:
            pytest.skip("the tier does not say what it has evicted")
        assert letters(taken) == names[: tier.stats().num_evicted]
        assert tier.take_evicted() == []
        tier.delete(keys(names))
        tier.take_evicted()
        self.write(tier, pools, names[0])
        assert tier.take_evicted() == [], "a block that it holds"

    def test_a_touched_block_is_kept_and_a_chain_loses_its_tail_first(self) -> None:
        tier, pools = self.make_bounded(4)
        names = self.fill(tier, pools)
        there = self.present(tier)
        tier.touch(keys(there[:2] + "!"))
        tier.touch([])
        gone = ""
        for name in ALPHABET[len(names) :]:
            self.write(tier, pools, name)
            gone += "".join(old for old in there if old not in self.present(tier) + gone)
            if len(gone) == len(there):
                break
        assert gone == there[2:] + there[1] + there[0]

    def test_contains_does_not_change_the_order(self) -> None:
        tier, pools = self.make_bounded(4)
        names = self.fill(tier, pools)
        there = self.present(tier)
        for _ in range(3):
            tier.contains(keys(there[:1]))
        before = tier.stats().num_evicted
        self.write(tier, pools, ALPHABET[len(names)])
        assert there[: tier.stats().num_evicted - before] not in self.present(tier)

    # delete, reset.

    @pytest.mark.parametrize("how", ["delete", "reset"])
    def test_removed_blocks_free_their_room_and_can_be_written_again(self, how: str) -> None:
        tier, pools = self.make(8)
        self.skip_reset_if_shared(tier, how)
        for version in range(5):
            self.write(tier, pools, ALPHABET[:8], version)
            self.check_reads(tier, pools, ALPHABET[:8], version)
            self.remove(tier, how, ALPHABET[:8])
            assert self.present(tier) == ""
        assert tier.stats().num_evicted == 0

    @pytest.mark.parametrize("how", ["delete", "reset"])
    def test_a_write_under_way_does_not_bring_a_removed_key_back(self, how: str) -> None:
        tier, pools = self.make()
        self.skip_reset_if_shared(tier, how)
        self.write(tier, pools, "a")
        with self.under_way(tier):
            taken = self.begin_write(tier, pools, "bc")
            self.remove(tier, how, "abc")
            assert not self.can_be_read(tier, "abc")
        self.finish(tier, taken)
        assert self.present(tier) == ""
        self.write(tier, pools, "bad", version=1)
        self.check_reads(tier, pools, "abd", version=1)

    def skip_reset_if_shared(self, tier: Tier, how: str) -> None:
        if how == "reset" and tier.is_shared:
            pytest.skip("after a reset, a shared tier takes nothing on, see the tests of sharing")

    def remove(self, tier: Tier, how: str, names: str) -> None:
        if how == "delete":
            tier.delete(keys(names))
        else:
            tier.reset()
        self.check(tier)

    # Bounds and bad bytes.

    def test_transfers_taken_on_stay_within_the_bound(self) -> None:
        tier, pools = self.make(26)
        if self.max_under_way is None:
            pytest.skip("no bound is given")
        with self.under_way(tier) as is_held:
            if not is_held:
                pytest.skip("the tier cannot be held")
            taken = self.begin_write(tier, pools, ALPHABET)
            assert len(taken) <= self.max_under_way
        self.finish(tier, taken)
        with self.under_way(tier):
            taken = self.begin_read(tier, taken)
            assert len(taken) <= self.max_under_way
        self.finish(tier, taken)
        self.check_reads(tier, pools, taken)

    def test_spoiled_blocks_are_misses(self) -> None:
        tier, pools = self.make()
        self.write(tier, pools, "abc")
        if not self.spoil(tier):
            pytest.skip("the medium cannot be spoiled")
        taken = self.begin_read(tier, "abc")
        results = self.finish(tier, taken)
        assert [r.error for r in results] == [TierError.CORRUPT] * 3
        # What a shared tier knows of its medium may be out of date: it may find the block again, and read it as bad.
        assert self.present(tier) == "" or tier.is_shared
        self.check(tier)

    # The end.

    def test_a_closed_tier_is_empty_and_does_not_raise(self) -> None:
        tier, pools = self.make()
        self.write(tier, pools, "ab")
        tier.close()
        tier.close()
        assert tier.read(keys("ab"), read_slots("ab")) == []
        assert tier.write(keys("cd"), write_slots("cd")) == []
        assert not self.can_be_read(tier, "abcd")
        tier.touch(keys("a"))
        tier.delete(keys("a"))
        tier.reset()
        tier.wait(0.01)
        assert tier.poll() == []
        self.check(tier)
        assert tier.stats().num_evicted == 0
        tier.close()

    def test_close_ends_all_transfers(self) -> None:
        tier, pools = self.make()
        self.write(tier, pools, "abc")
        writes, reads = self.begin_write(tier, pools, "de"), self.begin_read(tier, "ab")
        tier.close()
        results = tier.poll()
        assert set(letters([result.key for result in results])) <= set(writes + reads)
        before = [pool.copy() for pool in pools]
        for _ in range(3):
            tier.wait(0.02)
        assert tier.poll() == []
        assert all(np.array_equal(pool, old) for pool, old in zip(pools, before, strict=True))

    def test_blocks_outlive_the_process(self) -> None:
        tier, pools = self.make()
        self.write(tier, pools, "abcd")
        tier.delete(keys("c"))
        tier.close()
        later = self.reopen(tier, pools, 8)
        if later is None:
            pytest.skip("no block outlives the tier")
        self.check(later)
        there = self.present(later)
        # A shared tier removes blocks later, if its medium lets it.
        assert there == "abd" or (tier.is_shared and there == "abcd")
        self.check_reads(later, pools, "dab")
        new = "e" if "c" in there else "ce"
        self.write(later, pools, new, 1)
        self.check_reads(later, pools, new, 1)
        later.close()

    @pytest.mark.parametrize("how", ["delete", "reset"])
    def test_no_later_process_finds_removed_blocks(self, how: str) -> None:
        tier, pools = self.make()
        self.skip_reset_if_shared(tier, how)
        self.write(tier, pools, "ab")
        with self.under_way(tier):
            self.begin_write(tier, pools, "cd")
            self.remove(tier, how, "abcd")
        tier.close()
        later = self.reopen(tier, pools, 8)
        if later is None:
            pytest.skip("no block outlives the tier")
        if tier.is_shared:
            # A shared tier removes blocks later, if its medium lets it.
            assert set(self.present(later)) <= set("abcd")
        else:
            assert self.present(later) == ""
        self.check(later)
        later.close()

    # Media that bound themselves, and lose blocks.

    def test_a_tier_without_a_capacity_is_bounded_by_its_medium(self) -> None:
        tier, pools = self.make(16)
        self.write(tier, pools, ALPHABET[:12])
        stats = tier.stats()
        if stats.capacity_bytes is not None:
            pytest.skip("the tier has a budget of its own")
        assert stats.num_blocks is None or stats.num_blocks <= 12
        self.check_reads(tier, pools, self.present(tier, ALPHABET[:12]))

    def test_a_tier_that_is_asked_ahead_answers_in_the_end_and_blocks_nobody(self) -> None:
        tier, pools = self.make()
        self.write(tier, pools, "ac")
        with self.under_way(tier):
            for ahead in (keys("abcd"), keys("abcd"), []):
                states = tier.contains(keys("ab"), ahead).tolist()
                assert len(states) == 2
                assert all(MISS <= state <= RETRY for state in states)
        assert self.present(tier, "abcd") == "ac"
        assert tier.poll() == []
        tier.close()
        assert tier.contains(keys("a"), keys("abcd")).tolist() == [MISS]

    def test_blocks_that_the_medium_has_lost_are_gone(self) -> None:
        tier, pools = self.make()
        self.write(tier, pools, "abcd")
        assert self.present(tier, "abcd") == "abcd"
        if not self.lose(tier, "bd"):
            pytest.skip("the medium cannot be made to lose blocks")
        taken = self.begin_read(tier, "abcd")
        results = {letters([r.key]): r for r in self.finish(tier, taken)}
        assert all(results[name].ok for name in taken if name in "ac")
        assert all(results[name].error is TierError.GONE for name in taken if name in "bd")
        assert not self.can_be_read(tier, "bd")
        assert self.present(tier, "abcd") == "ac"
        self.check_reads(tier, pools, "ac")
        self.write(tier, pools, "bd", version=1)
        self.check_reads(tier, pools, "bd", version=1)

    # Everything at once.

    @pytest.mark.parametrize("seed", range(12))
    def test_any_calls_in_any_order(self, seed: int) -> None:
        rng = Random(seed)
        tier, pools = self.make(rng.randint(3, 9), *rng.choice([(4096,), (4096, 8192)]))
        version: dict[OffloadKey, int] = {}
        """The version that was written last, per key."""
        writes: dict[OffloadKey, int] = {}
        reads: dict[OffloadKey, int] = {}
        free = list(range(NUM_SLOTS))
        now = 0

        def poll() -> None:
            for result in tier.poll():
                under_way = reads if result.is_read else writes
                assert result.key in under_way, f"reported {letters([result.key])}, which is not in transfer"
                slot = under_way.pop(result.key)
                free.append(slot)
                if result.ok and result.is_read:
                    assert holds(pools, slot, result.key, version[result.key]), "read other bytes than were written"
                scribble(pools, slot)

        for _ in range(150):
            idle = [key for key in keys(ALPHABET[:14]) if key not in writes and key not in reads]
            rng.shuffle(idle)
            chosen = idle[: rng.randint(0, min(5, len(free)))]
            slots = np.array(rng.sample(free, len(chosen)), dtype=np.int64)
            action = rng.randrange(8)
            if action < 2:
                # Others may hold the bytes of a shared block already, so they never change.
                now += not tier.is_shared
                for key, slot in zip(chosen, slots.tolist(), strict=True):
                    put(pools, slot, key, now)
                taken = list(tier.write(chosen, slots))
                version.update(dict.fromkeys(taken, now))
                add(writes, taken, chosen, slots, free)
            elif action < 5:
                taken = list(tier.read(chosen, slots))
                add(reads, taken, chosen, slots, free)
            elif action == 5:
                tier.touch(chosen)
            elif action == 6 and rng.random() < 0.4:
                gone = rng.sample(keys(ALPHABET[:14]), 3)
                tier.delete(gone)
                assert not self.can_be_read(tier, letters(gone))
            elif action == 7 and rng.random() < 0.2 and not tier.is_shared:
                tier.reset()
                assert not self.can_be_read(tier, ALPHABET)
            if rng.random() < 0.5:
                tier.wait(0.001)
                poll()
            self.check(tier)
        deadline = time.monotonic() + DEADLINE_S
        while (writes or reads) and time.monotonic() < deadline:
            tier.wait(0.01)
            poll()
        assert not writes
        assert not reads
        there = self.present(tier)
        self.read(tier, there)
        for key, slot in zip(keys(there), read_slots(there).tolist(), strict=True):
            assert holds(pools, slot, key, version[key])
        tier.close()


class SharedTierConformance(TierConformance):
    """The same for a tier whose medium several servers use, and tests with more than one of them."""

    def another(self, tier: Tier, pools: Sequence[ByteArray]) -> Tier:
        """Returns a tier of another server, with other ``pools``, on the medium of ``tier``."""
        raise NotImplementedError

    def make_another(self, tier: Tier) -> tuple[Tier, list[ByteArray]]:
        """Returns another server's tier and its pools."""
        pools = make_pools(NUM_SLOTS, SLOT_BYTES, seed=1)
        other = self.another(tier, pools)
        assert other.is_shared
        self.check(other)
        return other, pools

    def make_shared(self) -> tuple[Tier, list[ByteArray]]:
        """Returns a tier and its pools."""
        tier, pools = self.make(16)
        assert tier.is_shared, "others use the blocks of a tier that does not say so"
        return tier, pools

    def test_servers_find_each_others_blocks(self) -> None:
        tier, pools = self.make_shared()
        other, other_pools = self.make_another(tier)
        self.write(tier, pools, "abc")
        self.await_present(other, "abc")
        self.check_reads(other, other_pools, "cab")
        self.write(other, other_pools, "de")
        self.await_present(tier, "abcde")
        self.check_reads(tier, pools, "edab")
        tier.close()
        later, later_pools = self.make_another(other)
        self.await_present(later, "abcde")
        self.check_reads(later, later_pools, "edcba")
        other.close()

    def test_a_miss_is_not_remembered_for_good(self) -> None:
        tier, pools = self.make_shared()
        other, other_pools = self.make_another(tier)
        assert self.present(other, "ab") == ""
        self.write(tier, pools, "ab")
        self.await_present(other, "ab")
        self.check_reads(other, other_pools, "ab")

    def test_a_block_that_another_server_holds_is_not_written_again(self) -> None:
        tier, pools = self.make_shared()
        other, other_pools = self.make_another(tier)
        self.write(tier, pools, "ab")
        self.await_present(other, "ab")
        taken = self.begin_write(other, other_pools, "ab")
        assert all(result.ok and result.nbytes == 0 for result in self.finish(other, taken))
        self.check_reads(other, other_pools, "ab")
        self.check_reads(tier, pools, "ab")

    def test_a_write_that_finds_the_block_held_has_succeeded(self) -> None:
        tier, pools = self.make_shared()
        other, other_pools = self.make_another(tier)
        assert self.present(other, "ab") == ""
        with self.under_way(other):
            taken = self.begin_write(other, other_pools, "ab")
            self.write(tier, pools, "ab")
        results = self.finish(other, taken)
        assert all(result.ok for result in results)
        self.await_present(other, "ab")
        self.check_reads(other, other_pools, "ab")
        self.check_reads(tier, pools, "ba")

    def test_a_reset_forgets_without_deleting(self) -> None:
        tier, pools = self.make_shared()
        other, other_pools = self.make_another(tier)
        self.write(tier, pools, "ab")
        self.write(other, other_pools, "cd")
        self.await_present(tier, "abcd")
        tier.reset()
        self.check(tier)
        assert self.present(tier, "abcd") == ""
        self.write(other, other_pools, "ef")
        for _ in range(5):
            tier.wait(0.02)
            assert tier.poll() == []
        assert self.present(tier, "abcdef") == ""
        assert self.begin_read(tier, "abcdef") == ""
        assert self.begin_write(tier, pools, "gh", version=1) == ""
        self.check(tier)
        self.await_present(other, "abcdef")
        self.check_reads(other, other_pools, "fedcba")
        assert self.present(other, "gh") == ""
        third, third_pools = self.make_another(tier)
        self.await_present(third, "abcdef")
        self.check_reads(third, third_pools, "abcdef")

    def test_a_reset_ends_what_is_under_way(self) -> None:
        tier, pools = self.make_shared()
        self.write(tier, pools, "ab")
        with self.under_way(tier):
            taken = self.begin_read(tier, "ab") + self.begin_write(tier, pools, "cd")
            tier.reset()
            assert not self.can_be_read(tier, "abcd")
        ok = [r.key for r in self.finish(tier, taken) if r.ok and r.is_read]
        assert all(holds(pools, READ_SLOTS + ALPHABET.index(letters([key])), key) for key in ok)
        assert self.present(tier, "abcd") == ""
        other, other_pools = self.make_another(tier)
        self.await_present(other, "ab")
        self.check_reads(other, other_pools, self.present(other, "abcd"))

    def test_deleting_leaves_what_others_have_written(self) -> None:
        tier, pools = self.make_shared()
        other, other_pools = self.make_another(tier)
        self.write(tier, pools, "abc")
        self.await_present(other, "abc")
        self.write(other, other_pools, "d")
        other.delete(keys("abx"))
        assert not self.can_be_read(other, "ab") or self.present(other, "ab") == "ab"
        for each in (tier, other):
            for _ in range(5):
                each.wait(0.02)
                assert each.poll() == []
        third, third_pools = self.make_another(tier)
        self.await_present(third, "abcd")
        self.check_reads(third, third_pools, "abcd")
        self.check_reads(tier, pools, "abc")

    def test_bad_bytes_are_not_given_to_any_server(self) -> None:
        tier, pools = self.make_shared()
        other, _ = self.make_another(tier)
        self.write(tier, pools, "abc")
        self.await_present(other, "abc")
        if not self.spoil(tier):
            pytest.skip("the medium cannot be spoiled")
        for each in (tier, other):
            results = self.finish(each, self.begin_read(each, "abc"))
            assert all(result.error in (TierError.CORRUPT, TierError.GONE) for result in results)
            assert not self.can_be_read(each, "abc")


def add(
    under_way: dict[OffloadKey, int],
    taken: Keys,
    asked: Keys,
    slots: Slots,
    free: list[int],
) -> None:
    slot_of = dict(zip(asked, slots.tolist(), strict=True))
    for key in taken:
        assert key not in under_way
        under_way[key] = slot_of[key]
        free.remove(slot_of[key])


def write_slots(names: str) -> Slots:
    return np.array([ALPHABET.index(name) for name in names], dtype=np.int64)


def read_slots(names: str) -> Slots:
    """Returns host slots to read into, one per letter."""
    return np.array([READ_SLOTS + ALPHABET.index(name) for name in names], dtype=np.int64)


def content(key: OffloadKey, rank: int, version: int, nbytes: int) -> ByteArray:
    return np.random.default_rng([version, rank, *key]).integers(0, 256, nbytes, dtype=np.uint8)


def put(pools: Sequence[ByteArray], slot: int, key: OffloadKey, version: int = 0) -> None:
    """Puts the bytes of ``key`` into the slot of every rank."""
    for rank, pool in enumerate(pools):
        pool[slot] = content(key, rank, version, pool.shape[1])


def holds(pools: Sequence[ByteArray], slot: int, key: OffloadKey, version: int = 0) -> bool:
    """Returns whether the slot of every rank has the bytes of ``key``."""
    return all(
        np.array_equal(pool[slot], content(key, rank, version, pool.shape[1])) for rank, pool in enumerate(pools)
    )


def scribble(pools: Sequence[ByteArray], slot: int) -> None:
    """Changes every byte of the slot, so that a transfer that still uses it is noticed."""
    for pool in pools:
        pool[slot] ^= 0xA5

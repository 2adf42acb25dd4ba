"""Every tier passes the conformance suite, and the suite finds the bug of each tier that has one."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import ByteArray, LookupState, OffloadKey, Slots, States, Tier, TierError, TierResult
from kvoffload.testing.conformance import keys
from kvoffload.testing.tier_conformance import SharedTierConformance, TierConformance, watched
from kvoffload.tiers.remote.client import Outcome
from kvoffload.tiers.remote.messages import Op, Response
from kvoffload.tiers.remote.record import ValueFormat
from kvoffload.tiers.remote.tier import RemoteTier
from kvoffload.tiers.remote.worker import StoreWorker, ValueMemory
from kvoffload.tiers.threads import Executor
from tests.sim.executor import SteppedExecutor
from tests.sim.memory_tier import MemoryTier, checksum_of
from tests.sim.stores import ClientState, SimulatedClient, SimulatedStarter, SimulatedStore, StoreFaults
from tests.testing.suites import failures

Keys = Sequence[OffloadKey]
VALUES = ValueFormat("0f" * 32, "kv")


class MemoryTierConformance(TierConformance):
    """The suite for MemoryTier and its subclasses with a bug."""

    tier_class: type[MemoryTier] = MemoryTier
    max_under_way = 10

    def make_tier(self, pools: Sequence[ByteArray], num_blocks: int) -> Tier:
        return self.tier_class(pools, num_blocks, SteppedExecutor(max_queued=self.max_under_way))

    def hold(self, tier: Tier) -> AbstractContextManager[None]:
        assert isinstance(tier, MemoryTier)
        assert isinstance(tier.executor, SteppedExecutor)
        return tier.executor.hold()

    def spoil(self, tier: Tier) -> bool:
        assert isinstance(tier, MemoryTier)
        for block in tier.blocks.values():
            block.raw[0][7] ^= 1
        return True


class TestMemoryTier(MemoryTierConformance):
    pass


class RemoteTierConformance(SharedTierConformance):
    """The suite for RemoteTier on a simulated store, and for subclasses of tier and worker with a bug."""

    tier_class: type[RemoteTier] = RemoteTier
    worker_class: type[StoreWorker] = StoreWorker

    @property
    def stores(self) -> dict[int, tuple[SimulatedStore, SimulatedStarter]]:
        """The store of each tier, and what starts its client."""
        return vars(self).setdefault("_stores", {})  # type: ignore[no-any-return]

    def make_tier(self, pools: Sequence[ByteArray], num_blocks: int) -> Tier:
        return self.on(SimulatedStore(time.monotonic), pools)

    def on(self, store: SimulatedStore, pools: Sequence[ByteArray]) -> Tier:
        def stall(seconds: float) -> None:
            starter.stall(seconds)

        state = ClientState(object(), StoreFaults, Random(0), lambda: starter.pause(), stall)
        starter = SimulatedStarter(
            lambda: self.worker_class(SimulatedClient(store, state), ValueMemory(pools), VALUES),
            time.monotonic,
            chance=0.9,
        )
        tier = self.tier_class(starter.start, sum(pool.shape[1] for pool in pools), random=lambda: 0.5)
        self.stores[id(tier)] = store, starter
        tier.poll()
        assert tier.stats().is_connected
        return tier

    def reopen(self, tier: Tier, pools: Sequence[ByteArray], num_blocks: int) -> Tier:
        return self.another(tier, pools)

    def another(self, tier: Tier, pools: Sequence[ByteArray]) -> Tier:
        return self.on(self.stores[id(tier)][0], pools)

    def hold(self, tier: Tier) -> AbstractContextManager[None]:
        return self.stores[id(tier)][1].hold()

    def spoil(self, tier: Tier) -> bool:
        for value in self.stores[id(tier)][0].values.values():
            value.data[200] ^= 1
        return True

    def lose(self, tier: Tier, names: str) -> bool:
        for key in keys(names):
            self.stores[id(tier)][0].evict(VALUES.name(key))
        return True


class TestRemoteTier(RemoteTierConformance):
    pass


# Tiers with one bug each, and the test that must catch it.


class ForgetsARank(MemoryTier):
    def read_block(self, key: OffloadKey, slot: int, block: Any) -> None:
        super().read_block(key, slot, block)
        self.pools[-1][slot, 100] ^= 1


class KeepsAView(MemoryTier):
    def write_block(self, key: OffloadKey, slot: int, block: Any) -> None:
        super().write_block(key, slot, block)
        block.raw = [pool[slot] for pool in self.pools]


class ReadsTheSlotsLater(MemoryTier):
    """Uses the caller's array after the call."""

    def read(self, keys: Keys, slots: Slots) -> list[OffloadKey]:
        self._at = getattr(self, "_at", {}) | {key: (slots, i) for i, key in enumerate(keys)}
        return super().read(keys, slots)

    def read_block(self, key: OffloadKey, slot: int, block: Any) -> None:
        slots, i = self._at[key]
        super().read_block(key, int(slots[i]), block)


class ReadyTooEarly(MemoryTier):
    def contains(self, keys: Keys, ahead: Keys = ()) -> States:
        return np.array([LookupState.HIT if key in self.blocks else LookupState.MISS for key in keys], np.uint8)


class OneBlockTooMany(MemoryTier):
    def make_room(self) -> bool:
        return len(self.blocks) <= self.max_blocks or super().make_room()

    def check_integrity(self) -> None:
        pass


class TouchesForwards(MemoryTier):
    def touch(self, keys: Keys, stored: Collection[OffloadKey] | None = None) -> None:
        super().touch(list(reversed(keys)))


class WritesAgain(MemoryTier):
    def write(self, keys: Keys, slots: Slots) -> list[OffloadKey]:
        self.delete([key for key in keys if key not in self.under_way])
        return super().write(keys, slots)


class LateWriteResurrects(MemoryTier):
    def poll(self) -> list[TierResult]:
        for result, block in self.ended:
            if not result.is_read and result.key not in self.blocks and not self.is_closed:
                self.blocks[result.key] = block
        return super().poll()


class ReadsIntoAFreedSlot(MemoryTier):
    """Writes into the slot once more after the read was reported."""

    def poll(self) -> list[TierResult]:
        results = super().poll()
        for result in results:
            if result.is_read and result.ok:
                self.executor.submit_read(partial(self._again, result.key))
        return results

    def _again(self, key: OffloadKey) -> None:
        block = self.blocks.get(key)
        if block is not None and block.raw:
            for pool in self.pools:
                pool[40] = 0


class DoesNotVerify(MemoryTier):
    def read_block(self, key: OffloadKey, slot: int, block: Any) -> None:
        block.checksum = checksum_of(block.raw)
        super().read_block(key, slot, block)


class GoesOnWhenClosed(MemoryTier):
    def close(self) -> None:
        self.is_closed = True
        self.blocks.clear()


class TakesOnEverything(MemoryTier):
    def __init__(self, pools: Sequence[ByteArray], num_blocks: int, executor: Executor) -> None:
        super().__init__(pools, num_blocks, SteppedExecutor())


class TruncatesKeys(MemoryTier):
    """Pads keys to a fixed length, and does not keep their own."""

    def contains(self, keys: Keys, ahead: Keys = ()) -> States:
        return super().contains([key.rstrip(b"\0") for key in keys])

    def read(self, keys: Keys, slots: Slots) -> list[OffloadKey]:
        return self.whole(keys, super().read([key.rstrip(b"\0") for key in keys], slots))

    def write(self, keys: Keys, slots: Slots) -> list[OffloadKey]:
        return self.whole(keys, super().write([key.rstrip(b"\0") for key in keys], slots))

    def whole(self, keys: Keys, taken: list[OffloadKey]) -> list[OffloadKey]:
        self._whole = getattr(self, "_whole", {})
        self._whole.update({key.rstrip(b"\0"): key for key in keys})
        return [self._whole[key] for key in taken]

    def poll(self) -> list[TierResult]:
        return [TierResult(self._whole[r.key], r.is_read, r.error) for r in super().poll()]


class DeleteWaitsForTheMedium(MemoryTier):
    def delete(self, keys: Keys) -> None:
        assert isinstance(self.executor, SteppedExecutor)
        while not self.executor.idle:
            # What it waits for may be held, and its own code may hide what goes wrong.
            with suppress(Exception):
                self.executor.wait(0.01)
                time.sleep(0.01)
        super().delete(keys)


class ResetOnlyForgets(RemoteTier):
    """Goes on after the reset."""

    def reset(self) -> None:
        super().reset()
        self._is_off = False


class DeletesWhatOthersHaveWritten(RemoteTier):
    def delete(self, keys: Keys) -> None:
        self._removals.note_written(keys)
        super().delete(keys)


class RemembersMissesForGood(RemoteTier):
    def _end_lookup(self, keys: Keys, response: Response) -> None:
        super()._end_lookup(keys, response)
        missing = [key for key, each in zip(keys, response.outcomes, strict=True) if each is Outcome.MISSING]
        self._presence.note_missing(missing, response.ended, float("inf"))


class NeverAnswers(RemoteTier):
    def _ask(self, keys: Keys) -> None:
        self._asked.update(keys)


class SeesOnlyItsOwn(RemoteTier):
    def contains(self, keys: Keys, ahead: Keys = ()) -> States:
        states = super().contains(keys)
        states[[key not in self._removals._written for key in keys]] = LookupState.MISS
        return states


class OverwritesOthers(RemoteTier):
    """Writes again what is there, and says that it has moved bytes."""

    def write(self, keys: Keys, slots: Slots) -> list[OffloadKey]:
        self._presence.clear()
        return super().write(keys, slots)

    def poll(self) -> list[TierResult]:
        return [r if r.is_read else r._replace(nbytes=self.block_bytes) for r in super().poll()]


class HeldIsAFailure(RemoteTier):
    def poll(self) -> list[TierResult]:
        return [
            TierResult(r.key, r.is_read, TierError.IO) if r.ok and not r.is_read and not r.nbytes else r
            for r in super().poll()
        ]


class StillClaimsWhatIsLost(RemoteTier):
    def _note_end(self, op: Op, key: OffloadKey, outcome: Outcome, is_wanted: bool) -> None:
        super()._note_end(op, key, Outcome.OK if outcome is Outcome.MISSING else outcome, is_wanted)


class SharesWithoutVerifying(StoreWorker):
    def _get(self, keys: Keys, names: Sequence[str], slots: Sequence[int]) -> list[Outcome]:
        return [Outcome.OK if each is Outcome.CORRUPT else each for each in super()._get(keys, names, slots)]


class CloseDeletes(RemoteTier):
    def close(self) -> None:
        self.delete(list(self._removals._written))
        for _ in range(20):
            self.wait(0.1)
            self.poll()
        super().close()


CAUGHT_BY: dict[type, str] = {
    ForgetsARank: "reading_gives_what_was_written",
    KeepsAView: "later_changes_of_the_host_slots_do_not_reach_written_blocks",
    ReadsTheSlotsLater: "the_caller_may_reuse_its_lists_after_the_call",
    ReadyTooEarly: "a_block_can_be_read_once_its_write_was_reported_and_not_before",
    OneBlockTooMany: "used_bytes_stay_within_the_capacity",
    TouchesForwards: "a_touched_block_is_kept_and_a_chain_loses_its_tail_first",
    WritesAgain: "present_blocks_are_not_written_again",
    LateWriteResurrects: "a_write_under_way_does_not_bring_a_removed_key_back",
    ReadsIntoAFreedSlot: "any_calls_in_any_order",
    DoesNotVerify: "spoiled_blocks_are_misses",
    GoesOnWhenClosed: "close_ends_all_transfers",
    TakesOnEverything: "transfers_taken_on_stay_within_the_bound",
    TruncatesKeys: "keys_of_any_length_are_distinguished",
    ResetOnlyForgets: "a_reset_forgets_without_deleting",
    DeletesWhatOthersHaveWritten: "deleting_leaves_what_others_have_written",
    RemembersMissesForGood: "a_miss_is_not_remembered_for_good",
    NeverAnswers: "a_tier_that_is_asked_ahead_answers_in_the_end_and_blocks_nobody",
    SeesOnlyItsOwn: "servers_find_each_others_blocks",
    OverwritesOthers: "a_block_that_another_server_holds_is_not_written_again",
    HeldIsAFailure: "a_write_that_finds_the_block_held_has_succeeded",
    StillClaimsWhatIsLost: "blocks_that_the_medium_has_lost_are_gone",
    SharesWithoutVerifying: "bad_bytes_are_not_given_to_any_server",
    CloseDeletes: "blocks_outlive_the_process",
}


@pytest.mark.parametrize("bug", CAUGHT_BY)
def test_a_planted_bug_is_caught_by_the_test_that_is_for_it(bug: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.testing.tier_conformance.DEADLINE_S", 0.2)
    assert failures(*suite_of(bug), f"test_{CAUGHT_BY[bug]}")


def suite_of(bug: type) -> tuple[type, str, type]:
    if issubclass(bug, StoreWorker):
        return RemoteTierConformance, "worker_class", bug
    return (RemoteTierConformance if issubclass(bug, RemoteTier) else MemoryTierConformance), "tier_class", bug


def test_a_call_that_hangs_is_named_with_its_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.testing.tier_conformance.DEADLINE_S", 0.2)
    suite = type("Suite", (MemoryTierConformance,), {"tier_class": DeleteWaitsForTheMedium})()
    with pytest.raises(pytest.fail.Exception, match=r"no call waits for the medium.*DeleteWaitsForTheMedium.delete"):
        suite.test_a_write_under_way_does_not_bring_a_removed_key_back("delete")
    message = r"each test ends: not done after 0.05 s, in no call"
    with pytest.raises(pytest.fail.Exception, match=message), watched(0.05, "each test ends"):
        time.sleep(30)
    with watched(30.0, "the outer one goes on"):
        with watched(20.0, "the inner one"):
            pass
        assert 20 < signal.getitimer(signal.ITIMER_REAL)[0] <= 30

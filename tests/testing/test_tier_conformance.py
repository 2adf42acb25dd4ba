"""Every tier passes the conformance suite, and the suite finds the bug of each tier that has one."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import ByteArray, LookupState, OffloadKey, Slots, States, Tier, TierError, TierResult
from kvoffload.testing.conformance import keys
from kvoffload.testing.tier_conformance import SharedTierConformance, TierConformance, watched
from kvoffload.tiers.disk.directory import DirectoryStorage
from kvoffload.tiers.disk.layout import FIXED_BYTES, SLAB_OVERHEAD_BYTES, slot_cost
from kvoffload.tiers.disk.storage import Storage
from kvoffload.tiers.disk.tier import DiskSettings, DiskTier
from kvoffload.tiers.executor import Executor
from tests.asking_tier import AskingTier
from tests.sim.executor import SteppedExecutor
from tests.sim.memory_tier import MemoryTier, checksum_of
from tests.sim.plain_shared import PlainSharedTier
from tests.sim.storage import SimulatedStorage
from tests.sim.stores import ClientState, SimulatedClient, SimulatedStore, StoreFaults, StoreValue
from tests.testing.suites import failures

Keys = Sequence[OffloadKey]


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


class TestAskingTier(MemoryTierConformance):
    tier_class = AskingTier


class PlainSharedTierConformance(SharedTierConformance):
    """The suite for PlainSharedTier and its subclasses with a bug."""

    shared_class: type[PlainSharedTier] = PlainSharedTier
    max_under_way = 10

    def make_tier(self, pools: Sequence[ByteArray], num_blocks: int) -> Tier:
        return self.on(SimulatedStore(time.monotonic), pools)

    def on(self, store: SimulatedStore, pools: Sequence[ByteArray]) -> Tier:
        executor = SteppedExecutor(max_queued=self.max_under_way)
        state = ClientState(object(), StoreFaults, Random(0), lambda: None, executor.stall)
        return self.shared_class(SimulatedClient(store, state), pools, executor, time.monotonic)

    def reopen(self, tier: Tier, pools: Sequence[ByteArray], num_blocks: int) -> Tier:
        return self.another(tier, pools)

    def another(self, tier: Tier, pools: Sequence[ByteArray]) -> Tier:
        return self.on(store_of(tier), pools)

    def hold(self, tier: Tier) -> AbstractContextManager[None]:
        assert isinstance(tier, PlainSharedTier)
        assert isinstance(tier.executor, SteppedExecutor)
        return tier.executor.hold()

    def spoil(self, tier: Tier) -> bool:
        for value in values_of(tier).values():
            value.data = value.data ^ np.uint8(1)
        return True

    def lose(self, tier: Tier, names: str) -> bool:
        assert isinstance(tier, PlainSharedTier)
        for key in keys(names):
            del values_of(tier)[tier.name_of(key)]
        return True


def store_of(tier: Tier) -> SimulatedStore:
    assert isinstance(tier, PlainSharedTier)
    assert isinstance(tier.client, SimulatedClient)
    return tier.client.store


def values_of(tier: Tier) -> dict[str, StoreValue]:
    return store_of(tier).values


class TestPlainSharedTier(PlainSharedTierConformance):
    pass


FINGERPRINT = "0f" * 32


def disk_bytes(pools: Sequence[ByteArray], num_blocks: int) -> int:
    """Returns a capacity with room for exactly ``num_blocks`` blocks, in slabs of three."""
    block_bytes = sum(pool.shape[1] for pool in pools)
    slabs = -(-num_blocks // 3)
    return FIXED_BYTES + slabs * SLAB_OVERHEAD_BYTES + num_blocks * slot_cost(block_bytes)


def make_disk_tier(
    storage: Storage, pools: Sequence[ByteArray], num_blocks: int, executor: Executor | None = None, **settings: Any
) -> DiskTier:
    settings["slab_bytes"] = 3 * sum(pool.shape[1] for pool in pools)
    kept = DiskSettings(FINGERPRINT, disk_bytes(pools, num_blocks), **settings)
    return DiskTier(storage, pools, kept, executor=executor)


def spoil_slabs(storage: Storage) -> bool:
    """Changes one bit of every page of every slab."""
    for name in storage.files(FINGERPRINT):
        file = storage.open(FINGERPRINT, name)
        data = np.zeros(file.size() if name.startswith("slab") else 0, np.uint8)
        file.read([data], 0)
        data[17::4096] ^= 4
        file.write([data], 0)
        file.close()
    return True


class TestDiskTierInASimulation(TierConformance):
    max_under_way = 10

    def make_tier(self, pools: Sequence[ByteArray], num_blocks: int) -> Tier:
        executor = SteppedExecutor(num_blocks, max_queued=self.max_under_way)
        storage = SimulatedStorage(1 << 30, pause=executor.pause)
        return self.on(storage, executor, pools, num_blocks)

    def on(
        self, storage: SimulatedStorage, executor: SteppedExecutor, pools: Sequence[ByteArray], num_blocks: int
    ) -> Tier:
        self.executor, self.storage = executor, storage
        # Small blocks usually share a job. Here each has its own, so that there is more to interleave.
        return make_disk_tier(storage, pools, num_blocks, executor, job_bytes=1)

    def reopen(self, tier: Tier, pools: Sequence[ByteArray], num_blocks: int) -> Tier:
        executor = SteppedExecutor()
        return self.on(self.storage.restart(executor.pause), executor, pools, num_blocks)

    def hold(self, tier: Tier) -> AbstractContextManager[None]:
        return self.executor.hold()

    def spoil(self, tier: Tier) -> bool:
        return spoil_slabs(self.storage)


class TestDiskTierInADirectory(TierConformance):
    @pytest.fixture(autouse=True)
    def in_directory(self, tmp_path: Path) -> Iterator[None]:
        self.path = tmp_path
        self.tiers: list[DiskTier] = []
        yield
        for tier in self.tiers:
            tier.close()

    def make_tier(self, pools: Sequence[ByteArray], num_blocks: int) -> Tier:
        folder = self.path / str(len(self.tiers))
        return self.on(folder, pools, num_blocks)

    def on(self, folder: Path, pools: Sequence[ByteArray], num_blocks: int) -> Tier:
        self.folder = folder
        self.tiers.append(make_disk_tier(DirectoryStorage(folder), pools, num_blocks))
        return self.tiers[-1]

    def reopen(self, tier: Tier, pools: Sequence[ByteArray], num_blocks: int) -> Tier:
        return self.on(self.folder, pools, num_blocks)

    def spoil(self, tier: Tier) -> bool:
        return spoil_slabs(DirectoryStorage(self.folder))


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


class ResetOnlyForgets(PlainSharedTier):
    """Goes on after the reset."""

    def reset(self) -> None:
        self.deleted |= self.under_way
        self.answers.clear()


class DeletesWhatOthersHaveWritten(PlainSharedTier):
    def delete(self, keys: Keys) -> None:
        self.written.update(keys)
        super().delete(keys)


class RemembersMissesForGood(PlainSharedTier):
    def _trust(self, key: OffloadKey, is_there: bool) -> None:
        super()._trust(key, is_there)
        if not is_there:
            self.answers[key] = False, float("inf")


class NeverAnswers(PlainSharedTier):
    def ask_for(self, keys: Keys) -> None:
        self.asking.difference_update(keys)


class SeesOnlyItsOwn(PlainSharedTier):
    def name_of(self, key: OffloadKey) -> str:
        return f"{id(self)}/{key.hex()}"


class OverwritesOthers(PlainSharedTier):
    """Writes again what is there, and says that it has moved bytes."""

    def write_block(self, key: OffloadKey, slot: int) -> None:
        values_of(self).pop(self.name_of(key), None)
        super().write_block(key, slot)

    def contains(self, keys: Keys, ahead: Keys = ()) -> States:
        states = super().contains(keys)
        for key in keys:
            self.answers.pop(key, None)
        return states


class HeldIsAFailure(PlainSharedTier):
    def poll(self) -> list[TierResult]:
        return [
            TierResult(r.key, r.is_read, TierError.IO) if r.ok and not r.is_read and not r.nbytes else r
            for r in super().poll()
        ]


class StillClaimsWhatIsLost(PlainSharedTier):
    def poll(self) -> list[TierResult]:
        before = dict(self.answers)
        results = super().poll()
        for result in results:
            if result.is_read and result.error is TierError.GONE and result.key in before:
                self.answers[result.key] = before[result.key]
        return results


class SharesWithoutVerifying(PlainSharedTier):
    def is_right(self, key: OffloadKey, parts: Sequence[ByteArray]) -> bool:
        return True


class CloseDeletes(PlainSharedTier):
    def close(self) -> None:
        for key in self.written:
            self.client.remove([self.name_of(key)])
        super().close()


CAUGHT_BY: dict[type[Tier], str] = {
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
def test_a_planted_bug_is_caught_by_the_test_that_is_for_it(bug: type[Tier], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.testing.tier_conformance.DEADLINE_S", 0.2)
    assert failures(*suite_of(bug), f"test_{CAUGHT_BY[bug]}")


def suite_of(tier: type[Tier]) -> tuple[type, str, type[Tier]]:
    if issubclass(tier, PlainSharedTier):
        return PlainSharedTierConformance, "shared_class", tier
    return MemoryTierConformance, "tier_class", tier


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

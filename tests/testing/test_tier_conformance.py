"""Every tier passes the conformance suite, and the suite finds the bug of each tier that has one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import ByteArray, LookupState, OffloadKey, Slots, States, Tier, TierError, TierResult
from kvoffload.testing.storage import SimulatedStorage
from kvoffload.testing.tier_conformance import TierConformance
from kvoffload.testing.tiers import AskingTier, MemoryTier, SteppedExecutor, checksum_of
from kvoffload.tiers.disk.directory import DirectoryStorage
from kvoffload.tiers.disk.slabs import FIXED_BYTES, SLAB_OVERHEAD_BYTES, slot_cost
from kvoffload.tiers.disk.storage import Storage
from kvoffload.tiers.disk.tier import DiskTier
from kvoffload.tiers.executor import Executor

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


FINGERPRINT = "0f" * 32


def disk_bytes(pools: Sequence[ByteArray], num_blocks: int) -> int:
    """Returns a capacity with room for exactly ``num_blocks`` blocks, in slabs of three."""
    block_bytes = sum(pool.shape[1] for pool in pools)
    slabs = -(-num_blocks // 3)
    return FIXED_BYTES + slabs * SLAB_OVERHEAD_BYTES + num_blocks * slot_cost(block_bytes)


def make_disk_tier(
    storage: Storage, pools: Sequence[ByteArray], num_blocks: int, executor: Executor | None = None, **settings: Any
) -> DiskTier:
    block_bytes = sum(pool.shape[1] for pool in pools)
    capacity = disk_bytes(pools, num_blocks)
    return DiskTier(
        storage,
        pools,
        fingerprint=FINGERPRINT,
        capacity_bytes=capacity,
        executor=executor,
        slab_bytes=3 * block_bytes,
        **settings,
    )


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
        self.path, self.tiers = tmp_path, []
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


# Tiers with one bug each.


class SwapsSlots(MemoryTier):
    def read(self, keys: Keys, slots: Slots) -> list[OffloadKey]:
        return super().read(keys, slots[::-1].copy())


class ForgetsARank(MemoryTier):
    def read_block(self, key, slot, block) -> None:
        super().read_block(key, slot, block)
        self.pools[-1][slot, 100] ^= 1


class KeepsAView(MemoryTier):
    def write_block(self, key, slot, block) -> None:
        super().write_block(key, slot, block)
        block.raw = [pool[slot] for pool in self.pools]


class ReadsTheSlotsLater(MemoryTier):
    """Uses the caller's array after the call."""

    def read(self, keys: Keys, slots: Slots) -> list[OffloadKey]:
        self._at = getattr(self, "_at", {}) | {key: (slots, i) for i, key in enumerate(keys)}
        return super().read(keys, slots)

    def read_block(self, key, slot, block) -> None:
        slots, i = self._at[key]
        super().read_block(key, int(slots[i]), block)


class ReportsTwice(MemoryTier):
    def poll(self) -> list[TierResult]:
        results = super().poll()
        return results + results[:1]


class LosesAResult(MemoryTier):
    def poll(self) -> list[TierResult]:
        return [result for result in super().poll() if result.key[0] != ord("c")]


class ReportsRefusedKeys(MemoryTier):
    def read(self, keys: Keys, slots: Slots) -> list[OffloadKey]:
        taken = super().read(keys, slots)
        self._refused = [key for key in keys if key not in taken]
        return taken

    def poll(self) -> list[TierResult]:
        refused, self._refused = getattr(self, "_refused", []), []
        return super().poll() + [TierResult(key, True, TierError.GONE) for key in refused]


class HidesRefusals(MemoryTier):
    def write(self, keys: Keys, slots: Slots) -> list[OffloadKey]:
        super().write(keys, slots)
        return list(keys)


class ReadyTooEarly(MemoryTier):
    def contains(self, keys: Keys) -> States:
        return np.array([LookupState.HIT if key in self.blocks else LookupState.MISS for key in keys], np.uint8)


class OneBlockTooMany(MemoryTier):
    def make_room(self) -> bool:
        return len(self.blocks) <= self.max_blocks or super().make_room()

    def check_integrity(self) -> None:
        pass


class NeverEvicts(MemoryTier):
    def make_room(self) -> bool:
        return len(self.blocks) < self.max_blocks


class EvictsTheNewest(MemoryTier):
    def make_room(self) -> bool:
        if len(self.blocks) == self.max_blocks:
            self.blocks.move_to_end(next(reversed(self.blocks)), last=False)
        return super().make_room()


class TouchesForwards(MemoryTier):
    def touch(self, keys: Keys) -> None:
        super().touch(list(reversed(keys)))


class TouchDoesNothing(MemoryTier):
    def touch(self, keys: Keys) -> None:
        pass


class TouchOfUnknownRaises(MemoryTier):
    def touch(self, keys: Keys) -> None:
        for key in reversed(keys):
            self.blocks.move_to_end(key)


class ContainsTouches(MemoryTier):
    def contains(self, keys: Keys) -> States:
        self.touch(keys)
        return super().contains(keys)


class WritesAgain(MemoryTier):
    def write(self, keys: Keys, slots: Slots) -> list[OffloadKey]:
        self.delete([key for key in keys if key not in self.under_way])
        return super().write(keys, slots)


class DeleteWaitsForTheWrite(MemoryTier):
    """A delete leaves blocks that are being written."""

    def delete(self, keys: Keys) -> None:
        super().delete([key for key in keys if key not in self.blocks or self.blocks[key].ready])


class ResetKeepsWhatIsUnderWay(MemoryTier):
    def reset(self) -> None:
        self.delete([key for key, block in self.blocks.items() if block.ready])


class DeleteDoesNothing(MemoryTier):
    def delete(self, keys: Keys) -> None:
        pass


class DeleteOfUnknownRaises(MemoryTier):
    def delete(self, keys: Keys) -> None:
        for key in keys:
            del self.blocks[key]


class LateWriteResurrects(MemoryTier):
    def poll(self) -> list[TierResult]:
        for result, block in self.ended:
            if not result.is_read and result.key not in self.blocks and not self.is_closed:
                self.blocks[result.key] = block
        return super().poll()


class DeleteLeaksRoom(MemoryTier):
    leaked = 0

    def delete(self, keys: Keys) -> None:
        held = len(self.blocks)
        super().delete(keys)
        self.leaked += held - len(self.blocks)

    def make_room(self) -> bool:
        return len(self.blocks) + self.leaked < self.max_blocks or self.evict()


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
    def read_block(self, key, slot, block) -> None:
        block.checksum = checksum_of(block.raw)
        super().read_block(key, slot, block)


class KeepsBadBlocks(MemoryTier):
    def poll(self) -> list[TierResult]:
        bad = {result.key: block for result, block in self.ended if result.error is TierError.CORRUPT}
        results = super().poll()
        self.blocks.update(bad)
        return results


class TruncatesKeys(MemoryTier):
    """Pads keys to a fixed length, and does not keep their own."""

    def contains(self, keys: Keys) -> States:
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


class RaisesWhenClosed(MemoryTier):
    def read(self, keys: Keys, slots: Slots) -> list[OffloadKey]:
        if self.is_closed:
            raise RuntimeError("closed")
        return super().read(keys, slots)


class CloseTwiceRaises(MemoryTier):
    def close(self) -> None:
        if self.is_closed:
            raise RuntimeError("closed")
        super().close()


class StillThereWhenClosed(MemoryTier):
    def close(self) -> None:
        self.executor.close(1.0)
        self.is_closed = True


class GoesOnWhenClosed(MemoryTier):
    def close(self) -> None:
        self.is_closed = True
        self.blocks.clear()


class TakesOnEverything(MemoryTier):
    def __init__(self, pools, num_blocks, executor) -> None:
        super().__init__(pools, num_blocks, SteppedExecutor())


class UsedBytesLag(MemoryTier):
    @property
    def capacity_bytes(self) -> int:
        return (self.max_blocks - 1) * self.block_bytes


BUGS = [
    bug
    for bug in list(globals().values())
    if isinstance(bug, type) and issubclass(bug, MemoryTier) and bug not in (MemoryTier, AskingTier)
]


def cases(suite: object) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields the tests of a suite, parametrized ones once per value."""
    for name, method in inspect.getmembers(suite, inspect.ismethod):
        if not name.startswith("test_"):
            continue
        marks = [mark for mark in getattr(method, "pytestmark", []) if mark.name == "parametrize"]
        if not marks:
            yield name, method
        for mark in marks:
            argument, values = mark.args
            for value in values:
                yield f"{name}[{value}]", partial(method, **{argument: value})


def failures(bug: type[MemoryTier]) -> list[str]:
    """Returns the first test that fails for ``bug``, or nothing."""
    suite = type("Suite", (MemoryTierConformance,), {"tier_class": bug})()
    for name, case in cases(suite):
        try:
            case()
        except pytest.skip.Exception:
            continue
        except (Exception, pytest.fail.Exception):
            return [name]
    return []


@pytest.mark.parametrize("bug", BUGS)
def test_the_suite_catches_a_wrong_tier(bug: type[MemoryTier], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.testing.tier_conformance.DEADLINE_S", 0.2)
    found = failures(bug)
    assert found
    print(bug.__name__, *found)


def test_the_suite_accepts_a_right_tier() -> None:
    assert failures(MemoryTier) == []

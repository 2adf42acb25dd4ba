"""A tier without bytes: for replays, where only what is kept counts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from kvoffload.abc import LookupState, OffloadKey, Slots, States, Tier, TierResult
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.slots import SlotBackend


class BookTier(Tier):
    """``capacity`` blocks, kept as the disk tier keeps its book: by a manager with a policy. What begins has ended at
    the next ``poll``: a medium that always keeps up."""

    name = "disk"

    def __init__(self, capacity: int, block_bytes: int, policy: str, clock: Callable[[], float]) -> None:
        backend = SlotBackend(block_bytes, "DISK", capacity)
        self._book = PolicyOffloadingManager(backend, make_policy(policy, capacity), must_store=True, clock=clock)
        self._block_bytes = block_bytes
        self._clock = clock
        self._under_way: dict[OffloadKey, bool] = {}
        """Whether it is a read."""
        self.num_written = self.num_read = 0
        """Blocks."""
        self._num_evicted = 0

    @property
    def capacity_bytes(self) -> int:
        return self._book.num_blocks * self._block_bytes

    @property
    def used_bytes(self) -> int:
        return self._book.num_used_blocks * self._block_bytes

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    @property
    def num_blocks(self) -> int:
        return self._book.num_used_blocks

    @property
    def num_evicted(self) -> int:
        return self._num_evicted

    @property
    def is_busy(self) -> bool:
        """Whether something has begun that ``poll`` will end."""
        return bool(self._under_way)

    def contains(self, keys: Sequence[OffloadKey]) -> States:
        states = self._book.states(keys)
        states[states != LookupState.HIT] = LookupState.MISS
        return states

    def read(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        there = np.flatnonzero(self.contains(keys) == LookupState.HIT).tolist()
        taken = [keys[i] for i in there if keys[i] not in self._under_way]
        self._book.prepare_load(taken)
        self._under_way.update(dict.fromkeys(taken, True))
        self.num_read += len(taken)
        return taken

    def write(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        absent = np.flatnonzero(self._book.states(keys) == LookupState.MISS).tolist()
        output = self._book.prepare_store([keys[i] for i in absent[: self._book.num_available_blocks]])
        if output is None:
            return []
        self._book.reorder_chain(output.keys_to_store, output.keys_to_store)
        self._under_way.update(dict.fromkeys(output.keys_to_store, False))
        self.num_written += len(output.keys_to_store)
        self._num_evicted += len(output.evicted_keys)
        return output.keys_to_store

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        self._book.touch(keys)

    def reorder_chain(self, keys: Sequence[OffloadKey], stored: Collection[OffloadKey]) -> None:
        self._book.reorder_chain(keys, stored)

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        """What is under way stays, to be found or evicted later."""
        self._book.drop([key for key in keys if key not in self._under_way])

    def reset(self) -> None:
        self._book.reset()

    def poll(self) -> list[TierResult]:
        if not self._under_way:
            return []
        now = self._clock()
        under_way, self._under_way = self._under_way, {}
        self._book.complete_load([key for key, is_read in under_way.items() if is_read])
        self._book.complete_store([key for key, is_read in under_way.items() if not is_read])
        return [TierResult(key, is_read, None, self._block_bytes, 0.0, now, now) for key, is_read in under_way.items()]

    def wait(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        self._book.shutdown()

    def check_integrity(self) -> None:
        self._book.check_integrity()

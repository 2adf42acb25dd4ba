"""OffloadingManager over one backend: a table, a policy and the events in between."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.abc import (
    Access,
    Backend,
    BlockNotPinnedError,
    BlockNotReadyError,
    BlockStatus,
    CachePolicy,
    ConfigError,
    Eviction,
    IntegrityError,
    LoadStoreSpec,
    LookupState,
    Miss,
    MissReason,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    Slots,
)
from kvoffload.cache.misses import MISS_MEMORY_ENTRIES, MissMemory
from kvoffload.cache.policies.arc import ARCPolicy
from kvoffload.cache.policies.lru import LRUPolicy
from kvoffload.cache.table import BlockTable

MAX_PENDING_EVENTS = 1 << 16
"""Events kept for a taker; beyond it the oldest are lost."""


class PolicyOffloadingManager(OffloadingManager):
    """Any policy on any backend. ``policy`` must be made for ``backend.num_blocks`` blocks."""

    def __init__(
        self,
        backend: Backend,
        policy: CachePolicy,
        enable_events: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if policy.capacity != backend.num_blocks:
            raise ConfigError(
                f"policy capacity {policy.capacity}: the backend has {backend.num_blocks} blocks; "
                "make the policy for as many"
            )
        self.backend = backend
        self.policy = policy
        self._table = BlockTable(backend.num_blocks)
        self._events: deque[OffloadingEvent] | None = deque(maxlen=MAX_PENDING_EVENTS) if enable_events else None
        self._orphans: dict[OffloadKey, list[int]] = {}
        """Keys that vanished in a reset while in transfer: [slot, users]. Until the transfer ends they
        count as in flight, so that its completion cannot be taken for another's."""
        self._gone = MissMemory(clock=clock)

    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> int | None:
        return self._table.leading_ready(keys)

    def lookup_each(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> list[LookupState]:
        return list(map(LookupState, self.states(keys).tolist()))

    def states(self, keys: Sequence[OffloadKey]) -> npt.NDArray[np.uint8]:
        """What ``lookup_each`` tells, as an array."""
        slots = self._table.find(keys)
        states = np.where(self._table.is_writing(slots), LookupState.PENDING, LookupState.HIT)
        return np.where(slots < 0, LookupState.MISS, states).astype(np.uint8)

    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> LoadStoreSpec:
        slots = self._table.find(keys)
        for unready in np.flatnonzero((slots < 0) | self._table.is_writing(slots)).tolist():
            raise BlockNotReadyError(f"block {keys[unready].hex()} is not ready; look it up before loading it")
        self._table.pin(self._table.distinct(slots))
        return self.backend.get_load_store_spec(keys, slots)

    def complete_load(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        late = {key for key in keys if self._orphans.get(key, (0, 0))[1] > 0} if self._orphans else set()
        present = [key for key in keys if key not in late] if late else keys
        slots = self._table.find(present)
        for unpinned in np.flatnonzero((slots < 0) | (self._table.ref_cnt[slots] < 1)).tolist():
            raise BlockNotPinnedError(f"block {present[unpinned].hex()} has no reader to let go")
        for key in late:
            self._let_go_orphan(key)
        # Last key first, as in touch: a chain loses its tail before its head.
        self.policy.mark_evictable(self._table.unpin(self._table.distinct(slots[::-1])))

    def hold(self, keys: Sequence[OffloadKey]) -> Slots:
        """The slots of distinct ``keys``, all ready, for a writer to a lower tier: they stay as they are until
        ``release``. Unlike a load's, its pins change no block's place in the order."""
        slots = self._table.find(keys)
        if (slots < 0).any() or self._table.is_writing(slots).any():
            raise BlockNotReadyError("a block that is not ready cannot be written to a lower tier")
        self._table.hold(slots)
        return slots

    def release(self, keys: Sequence[OffloadKey]) -> None:
        """Undoes one ``hold`` each."""
        present = [key for key in keys if key not in self._orphans] if self._orphans else keys
        for key in self._orphans.keys() & set(keys) if self._orphans else ():
            self._let_go_orphan(key)
        self.policy.mark_evictable(self._table.release(self._table.find(present)))

    @property
    def num_available_blocks(self) -> int:
        """Blocks that ``prepare_store`` could make room for now."""
        return self.backend.get_num_free_blocks() + self._table.num_evictable

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        found = self._table.find(keys)
        present = found >= 0
        slots = found if np.count_nonzero(present) == len(keys) else found[present]
        slots = self._table.distinct(slots[::-1])
        self.policy.access(Access(keys, found, slots, ~self._table.is_writing(slots)))

    def refresh(
        self,
        keys: Sequence[OffloadKey],
        stored: Collection[OffloadKey],
        req_context: ReqContext | None = None,
    ) -> None:
        slots = self._table.find(keys)
        present, stored = slots >= 0, frozenset(stored)
        mine = slots[present & np.fromiter(map(stored.__contains__, keys), np.bool_, len(keys))]
        slots = self._table.distinct(slots[present][::-1])
        self.policy.reorder(slots, self._table.among(slots, mine))

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> PrepareStoreOutput | None:
        present, new_keys, homes = self._table.split(keys)
        if self._orphans:
            new_keys, homes = [key for key in new_keys if key not in self._orphans], None
        refused: list[OffloadKey] = []
        entering = tuple(reversed(new_keys))
        shortage = len(new_keys) - self.backend.get_num_free_blocks()
        if shortage > 0 and getattr(self.policy, "may_refuse", True):
            admitted = self.policy.admit(entering, shortage)
            if admitted is not None and not admitted.all():
                refused = list(compress(entering, ~admitted))[::-1]
                entering = tuple(compress(entering, admitted))
                new_keys, homes = list(reversed(entering)), None
        protected = self._protected(len(new_keys), present)
        if protected is None:
            self._gone.record(new_keys, MissReason.NO_ROOM)
            return None
        if refused:
            self._gone.record(refused, MissReason.NOT_ADMITTED)
            self.policy.refuse(refused[::-1])
        evicted = self._evict(len(new_keys) - self.backend.get_num_free_blocks(), protected, entering)
        new_slots = self.backend.allocate_blocks(new_keys)
        self._table.insert(new_keys, new_slots, homes)
        self.policy.insert(new_slots[::-1], entering)
        spec = self.backend.get_load_store_spec(new_keys, new_slots)
        return PrepareStoreOutput(new_keys, spec, evicted, refused)

    def refuse(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        _, absent, _ = self._table.split(keys)
        self._gone.record(absent, MissReason.NOT_ADMITTED)
        self.policy.refuse(absent[::-1])

    def _protected(self, n: int, present: Slots) -> Slots | None:
        """The evictable ones of ``present``, which must stay; None if ``n`` slots cannot be made free."""
        shortage = n - self.backend.get_num_free_blocks()
        if shortage <= 0:
            return present[:0]
        protected = self._table.distinct(present)
        protected = protected[~self._table.busy[protected]]
        return None if shortage > self._table.num_evictable - len(protected) else protected

    def _evict(self, n: int, protected: Slots, entering: Sequence[OffloadKey]) -> list[OffloadKey]:
        if n <= 0:
            return []
        busy = self._table.busy
        busy[protected] = True
        victims = self.policy.evict(Eviction(n, busy, self._table.key_of, entering))
        if len(victims) != n or busy[victims].any() or len(self._table.distinct(victims)) != n:
            raise IntegrityError(f"policy {type(self.policy).__name__} chose blocks that it may not evict")
        busy[protected] = False
        self.policy.mark_evictable(protected)
        keys = self._table.remove(victims)
        self.backend.free(victims)
        self._gone.record(keys, MissReason.EVICTED)
        self._emit(keys, removed=True)
        return keys

    def complete_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None, success: bool = True
    ) -> None:
        if self._orphans:
            for key in set(keys) & self._orphans.keys():
                if self._orphans[key][1] < 0:
                    self._free_orphan(key)
        slots = self._table.find(keys)
        slots = slots[slots >= 0]
        written = self._table.distinct(slots[self._table.is_writing(slots)][::-1])[::-1]
        if success:
            self._table.set_ready(written)
            self.policy.mark_evictable(written)
            if self._events is not None:
                self._emit(self._table.key_of[written].tolist(), removed=False)
        else:
            self.policy.remove(written)
            self._gone.record(self._table.remove(written), MissReason.COPY_FAILED)
            self.backend.free(written)

    def take_events(self) -> Iterable[OffloadingEvent]:
        if self._events is not None:
            while self._events:
                yield self._events.popleft()

    def _emit(self, keys: list[OffloadKey], removed: bool) -> None:
        if self._events is not None and keys:
            self._events.append(OffloadingEvent(keys, self.backend.medium, removed))

    def reset(self) -> None:
        slots, key_of = self._table.slots(), self._table.key_of
        in_transfer = self._table.busy[slots]
        busy = slots[in_transfer]
        users = self._table.num_users(busy)
        for key, slot, n in zip(key_of[busy].tolist(), busy.tolist(), users.tolist(), strict=True):
            self._orphans[key] = [slot, n]
        if self._events is not None:
            self._emit(key_of[slots[~self._table.is_writing(slots)]].tolist(), removed=True)
        # No more than the memory can hold: this may be of millions of blocks, on the engine's thread.
        self._gone.record(key_of[slots[-MISS_MEMORY_ENTRIES:]].tolist(), MissReason.RESET)
        self.policy.clear()
        self._table.clear()
        self.backend.free(slots[~in_transfer])

    def _let_go_orphan(self, key: OffloadKey) -> None:
        self._orphans[key][1] -= 1
        if self._orphans[key][1] == 0:
            self._free_orphan(key)

    def _free_orphan(self, key: OffloadKey) -> None:
        slot, _ = self._orphans.pop(key)
        self.backend.free(np.array([slot], dtype=np.int64))

    def shutdown(self) -> None:
        self.reset()

    def policy_state(self) -> Mapping[str, Any]:
        return self.policy.state()

    def explain_miss(self, key: OffloadKey) -> Miss:
        if key in self._table:
            return Miss(MissReason.BEING_WRITTEN)
        return self._gone.explain(key)

    def poll(self) -> bool:
        return False

    @property
    def num_blocks(self) -> int:
        return self.backend.num_blocks

    @property
    def num_used_blocks(self) -> int:
        return self.backend.num_blocks - self.backend.get_num_free_blocks()

    def block_status(self, key: OffloadKey) -> BlockStatus | None:
        """Slot and reference count of ``key`` now, or None if it is absent."""
        return self._table.status(key)

    def check_integrity(self) -> None:
        self._table.check_integrity()
        self.policy.check_integrity(self._table.slots())
        self.backend.check_integrity()
        held = [*self._table.slots().tolist(), *(slot for slot, _ in self._orphans.values())]
        if len(set(held)) != len(held) or len(held) != self.num_used_blocks:
            raise IntegrityError("slots handed out and blocks held do not match")
        if any(key in self._table for key in self._orphans):
            raise IntegrityError("a key is both held and waiting for an old transfer")


class LRUOffloadingManager(PolicyOffloadingManager):
    """Evicts the least recently used."""

    def __init__(self, backend: Backend, enable_events: bool = False) -> None:
        super().__init__(backend, LRUPolicy(backend.num_blocks), enable_events)


class ARCOffloadingManager(PolicyOffloadingManager):
    """Evicts by Adaptive Replacement Cache."""

    def __init__(self, backend: Backend, enable_events: bool = False) -> None:
        super().__init__(backend, ARCPolicy(backend.num_blocks), enable_events)

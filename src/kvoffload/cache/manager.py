"""PolicyOffloadingManager: a table of blocks, a policy that orders them, and a backend that has their slots."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.abc import (
    Access,
    Admission,
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
    TenantUse,
)
from kvoffload.abc.tier import HIT, MISS, PENDING
from kvoffload.cache.hints import HintedBlocks
from kvoffload.cache.index import Homes
from kvoffload.cache.misses import MISS_MEMORY_ENTRIES, MissMemory
from kvoffload.cache.policies.arc import ARCPolicy
from kvoffload.cache.policies.lru import LRUPolicy
from kvoffload.cache.policies.tenants import TenantPolicy
from kvoffload.cache.table import BlockTable
from kvoffload.cache.tenants import HOST

MAX_PENDING_EVENTS = 1 << 16
"""Events kept for a taker; beyond it the oldest are lost."""


class PolicyOffloadingManager(OffloadingManager):
    """A manager with any policy on any backend. ``policy`` must be made for ``backend.num_blocks`` blocks.

    With ``must_store`` the policy may not refuse new blocks. ``admission``, if given, decides which of them are stored
    at all. ``misses`` remembers why blocks left, by default in a table of fixed size.
    """

    def __init__(
        self,
        backend: Backend,
        policy: CachePolicy,
        enable_events: bool = False,
        *,
        must_store: bool = False,
        admission: Admission | None = None,
        misses: MissMemory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if policy.capacity != backend.num_blocks:
            raise ConfigError(
                f"policy capacity {policy.capacity}: the backend has {backend.num_blocks} blocks; "
                "make the policy for as many"
            )
        self.backend = backend
        self.policy = policy
        self._tenants = policy if isinstance(policy, TenantPolicy) else None
        self._must_store = must_store
        self._admission = admission
        self._table = BlockTable(backend.num_blocks)
        self._busy, self._key_of = _read_only(self._table.busy), _read_only(self._table.key_of)
        self._events: deque[OffloadingEvent] | None = None
        if enable_events:
            self.enable_events()
        self._gone = misses or MissMemory(clock=clock)
        self._clock = clock
        self._num_entered = self._num_removed = 0
        """Blocks that have become ready since the start, and those of them that have left."""
        self._hints: HintedBlocks | None = None
        """None until a request has hints."""
        self._num_early = 0
        """Blocks that were evicted because of hints, since ``take_counts``."""

    def set_admission(self, admission: Admission) -> None:
        self._admission = admission

    # Lookup.

    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> int | None:
        self.count_request(keys, req_context)
        return self._table.leading_ready(keys)

    def lookup_each(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> list[LookupState]:
        self.count_request(keys, req_context)
        return list(map(LookupState, self.states(keys).tolist()))

    def lookup_last(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> tuple[int, LookupState]:
        self.count_request(keys, req_context)
        last = self._table.last_ready(keys)
        return last, LookupState.MISS if last < 0 else LookupState.HIT

    def count_request(self, keys: Sequence[OffloadKey], req_context: ReqContext | None) -> None:
        """Tells the admission that a request asks for ``keys``, as ``lookup`` and ``touch`` do."""
        if self._admission is not None:
            self._admission.count(keys, req_context)

    def states(self, keys: Sequence[OffloadKey]) -> npt.NDArray[np.uint8]:
        """Returns one LookupState per key: ``lookup_each`` as an array, without counting a request."""
        slots = self._table.find(keys)
        states = np.full(len(keys), HIT, dtype=np.uint8)
        states[self._table.is_writing(slots)] = PENDING
        states[slots < 0] = MISS
        return states

    def find(self, keys: Sequence[OffloadKey]) -> Slots:
        """Returns one slot per key, -1 where the key is absent."""
        return self._table.find(keys)

    def block_status(self, key: OffloadKey) -> BlockStatus | None:
        """Returns slot and reference count of ``key`` now, or None if it is absent."""
        return self._table.status(key)

    def explain_miss(self, key: OffloadKey) -> Miss:
        if key in self._table:
            return Miss(MissReason.BEING_WRITTEN)
        miss = self._gone.explain(key)
        if miss.reason is MissReason.NEVER_STORED and self._admission is not None:
            return self._admission.explain(key)
        return miss

    # Loads.

    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> LoadStoreSpec:
        slots = self._table.find(keys)
        for unready in np.flatnonzero((slots < 0) | self._table.is_writing(slots)).tolist():
            raise BlockNotReadyError(f"block {keys[unready].hex()} is not ready; look it up before loading it")
        self._pin(self._table.distinct(slots))
        return self.backend.get_load_store_spec(keys, slots)

    def _pin(self, slots: Slots) -> None:
        self._table.pin(slots)
        if self._tenants is not None:
            self._tenants.mark_busy(slots)

    def pin(self, lease: LoadStoreSpec) -> npt.NDArray[np.bool_]:
        """Adds a pin to each block of ``lease`` that is ready and was not dropped, and returns which these are.

        For a caller whose lease has just been completed: nothing may have been stored or evicted since.
        """
        loadable = self._table.is_loadable(lease.slots)
        self._pin(lease.slots[loadable])
        return loadable

    def complete_load(
        self, blocks: LoadStoreSpec | Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> None:
        slots = blocks.slots if isinstance(blocks, LoadStoreSpec) else self._table.find_in_transfer(blocks)
        if ((slots < 0) | (self._table.ref_cnt[slots] < 1)).any():
            raise BlockNotPinnedError("a block that was to be unpinned has no pin; complete each lease once")
        idle, freed = self._table.unpin(self._table.distinct(slots))
        self.policy.mark_evictable(idle)
        self.backend.free(freed)

    # Stores.

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> PrepareStoreOutput | None:
        present, new_keys, homes = self._table.split(keys)
        refused: list[OffloadKey] = []
        if self._admission is not None:
            accepted = self._admission.accepts(new_keys)
            if not all(accepted):
                refused = list(compress(new_keys, (not each for each in accepted)))
                self._admission.refuse(refused)
                new_keys, homes = list(compress(new_keys, accepted)), None
        tail_first, worthless = new_keys[::-1], []
        shortage = len(new_keys) - self.backend.get_num_free_blocks()
        if self._hints is not None and self._tenants is None:
            shortage -= self._hints.num_unexpected
        if (shortage > 0 or self._tenants is not None) and not self._must_store:
            admitted = self.policy.admit(tail_first, shortage)
            if admitted is not None and len(admitted) != len(tail_first):
                raise IntegrityError(f"policy {type(self.policy).__name__} gave no answer for some blocks")
            if admitted is not None and not admitted.all():
                worthless = list(compress(tail_first, ~admitted))
                tail_first = list(compress(tail_first, admitted))
                new_keys, homes = tail_first[::-1], None
        output = self._store(new_keys, tail_first, homes, present, worthless)
        if output is not None and refused:
            output = replace(output, refused_keys=[*output.refused_keys, *refused])
        return output

    def allocate(self, keys: Sequence[OffloadKey]) -> PrepareStoreOutput | None:
        """Does the same as ``prepare_store`` for blocks that neither admission nor policy may refuse, such as those
        that come from a lower tier."""
        present, new_keys, homes = self._table.split(keys)
        return self._store(new_keys, new_keys[::-1], homes, present, [])

    def _store(
        self,
        new_keys: list[OffloadKey],
        tail_first: list[OffloadKey],
        homes: Homes | None,
        present: Slots,
        worthless: list[OffloadKey],
    ) -> PrepareStoreOutput | None:
        """Stores ``new_keys``, which are also given tail first. ``worthless``, tail first, are keys that the policy
        does not admit."""
        if worthless:
            self._gone.record(worthless, MissReason.NOT_ADMITTED)
        num_free = self.backend.get_num_free_blocks()
        shortage = len(new_keys) - num_free
        is_short = shortage > 0 or self._tenants is not None
        protected = self._table.idle(present) if is_short else present[:0]
        if self._tenants is not None:
            room = self._tenants.room(tail_first, num_free, protected)
            refusal, shortage = (room, 0) if isinstance(room, MissReason) else (None, room)
        else:
            refusal = MissReason.NO_ROOM if shortage > self._table.num_evictable - len(protected) else None
        if refusal is not None:
            self._gone.record(new_keys, refusal)
            return None
        if worthless:
            self.policy.refuse(worthless)
        evicted = self._evict(shortage, protected, tail_first) if shortage > 0 else []
        new_slots = self.backend.allocate_blocks(new_keys)
        self._table.insert(new_keys, new_slots, homes)
        self.policy.insert(new_slots[::-1], tail_first)
        if self._hints is not None:
            self._hints.entered(new_slots)
        spec = self.backend.get_load_store_spec(new_keys, new_slots)
        return PrepareStoreOutput(new_keys, spec, evicted, worthless[::-1])

    def refuse(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        _, absent, _ = self._table.split(keys)
        if self._admission is not None:
            accepted = self._admission.accepts(absent)
            self._admission.refuse(list(compress(absent, (not each for each in accepted))))
            absent = list(compress(absent, accepted))
        self._gone.record(absent, MissReason.NOT_ADMITTED)
        self.policy.refuse(absent[::-1])

    def _evict(self, n: int, protected: Slots, entering: Sequence[OffloadKey]) -> list[OffloadKey]:
        if len(protected):
            self._table.mark_busy(protected, True)
            if self._tenants is not None:
                self._tenants.mark_busy(protected)
        early = self._evict_early(n, entering) if self._hints is not None else protected[:0]
        victims = early
        if len(early) < n:
            victims = np.asarray(self.policy.evict(Eviction(n - len(early), self._busy, self._key_of, entering)))
            if len(early):
                victims = np.concatenate((early, victims))
        keys = self._table.evict(victims) if victims.shape == (n,) and victims.dtype.kind == "i" else None
        if keys is None:
            raise IntegrityError(f"policy {type(self.policy).__name__} chose blocks that it may not evict")
        if len(protected):
            self._table.mark_busy(protected, False)
            self.policy.mark_evictable(protected)
        self.backend.free(victims)
        self._num_removed += len(keys)
        self._gone.record(keys, MissReason.EVICTED)
        if self._events is not None:
            self._emit(keys, removed=True)
        return keys

    def _evict_early(self, n: int, entering: Sequence[OffloadKey]) -> Slots:
        """Removes up to ``n`` blocks that are to leave early from the policy, and returns their slots. Of each tenant
        no more leave than it must lose."""
        assert self._hints is not None
        shares = {0: n} if self._tenants is None else self._tenants.leaving(entering, n)
        early = np.concatenate([self._hints.take(most, self._busy, tenant) for tenant, most in shares.items()])
        if len(early):
            self._num_early += len(early)
            if self._tenants is not None:
                self._tenants.evict_early(early)
            else:
                self.policy.remove(early)
            # So that the policy learns from their return, if the hint was wrong.
            self.policy.refuse(self._key_of[early].tolist())
        return early

    def complete_store(
        self,
        blocks: LoadStoreSpec | Sequence[OffloadKey],
        req_context: ReqContext | None = None,
        success: bool = True,
    ) -> None:
        slots = blocks.slots if isinstance(blocks, LoadStoreSpec) else self._table.find_in_transfer(blocks)
        if success:
            ready, freed = self._table.set_ready(slots)
            self._num_entered += len(ready)
            self.policy.mark_evictable(ready)
            if self._events is not None:
                self._emit(self._table.key_of[ready].tolist(), removed=False)
        else:
            freed = self._table.being_written(slots)
            known = freed[~self._table.is_dropped(freed)]
            self.policy.remove(known)
            self._gone.record(self._table.key_of[known].tolist(), MissReason.COPY_FAILED)
            self._table.remove(freed)
        if len(freed):
            self.backend.free(freed)

    def restorable(self, keys: Sequence[OffloadKey]) -> npt.NDArray[np.bool_] | None:
        """Returns which of ``keys``, the least recently used first, ``restore`` may be given without breaking a
        tenant's quota, if nothing is held yet; None for all."""
        return None if self._tenants is None else self._tenants.restorable(keys)

    def restore(self, keys: Sequence[OffloadKey], slots: Slots) -> None:
        """Takes in distinct blocks that are in the medium already, in ``slots`` that the backend counts as allocated,
        the least recently used first."""
        self._table.insert(keys, slots)
        self.policy.insert(slots, keys)
        self._table.set_ready(slots)
        self._num_entered += len(slots)
        self.policy.mark_evictable(slots)

    def lease(self, slots: Collection[int] | Slots) -> LoadStoreSpec:
        """Returns the lease of blocks in transfer in ``slots``, for a caller that keeps leases by slot."""
        if not isinstance(slots, np.ndarray):
            slots = np.fromiter(slots, np.int64, len(slots))
        return LoadStoreSpec(self.backend.medium, slots)

    def keys_of(self, lease: LoadStoreSpec) -> list[OffloadKey]:
        """Returns the keys of the blocks of ``lease`` that were not dropped."""
        slots = lease.slots
        keys: list[OffloadKey] = self._table.key_of[slots[self._table.is_loadable(slots)]].tolist()
        return keys

    @property
    def num_available_blocks(self) -> int:
        """Blocks that ``prepare_store`` could make room for now, of all tenants together."""
        return self.backend.get_num_free_blocks() + self._table.num_evictable

    def num_storable(self, key: OffloadKey) -> int:
        """Returns how many blocks of the tenant of ``key`` ``prepare_store`` could make room for now."""
        if self._tenants is None:
            return self.num_available_blocks
        return self._tenants.num_storable(key, self.backend.get_num_free_blocks())

    def most_blocks(self, key: OffloadKey) -> int:
        return self.num_blocks if self._tenants is None else self._tenants.most_blocks(key)

    def tenant_uses(self) -> Sequence[TenantUse]:
        """Returns what each tenant holds; nothing if the slots are not shared among tenants."""
        return () if self._tenants is None else self._tenants.uses()

    def uses_by_tier(self) -> Mapping[str, Sequence[TenantUse]]:
        return {} if self._tenants is None else {HOST: self.tenant_uses()}

    # The eviction order.

    def touch(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext | None = None,
        chain: Sequence[OffloadKey] | None = None,
        found: Slots | None = None,
    ) -> None:
        """``found``: what ``find`` has returned for ``keys``, if the caller has called it."""
        if self._admission is not None:
            self._admission.count(keys if chain is None else chain, req_context)
        if found is None:
            found = self._table.find(keys)
        slots, ready = self._table.used(found)
        self.policy.access(Access(keys, found, slots, ready))
        hints = None if req_context is None else req_context.hints
        if hints is not None and self._hints is None:
            tenant_of = None if self._tenants is None else self._tenants.tenant_of
            self._hints = HintedBlocks(self._table, self._clock, tenant_of)
        if self._hints is not None:
            self._hints.used(slots, hints)

    def reorder_chain(
        self,
        keys: Sequence[OffloadKey],
        stored: Collection[OffloadKey],
        req_context: ReqContext | None = None,
        found: Slots | None = None,
    ) -> None:
        """``found``: what ``find`` has returned for ``keys``, if the caller has called it."""
        if found is None:
            found = self._table.find(keys)
        slots, new = self._table.chain(found, stored if isinstance(stored, list | tuple) else list(stored))
        self.policy.reorder(slots, new)
        if self._hints is not None:
            self._hints.ended(slots, new, None if req_context is None else req_context.hints)

    def policy_state(self) -> Mapping[str, Any]:
        return self.policy.state()

    # Removal.

    def drop(self, keys: Sequence[OffloadKey]) -> None:
        slots = self._table.find(keys)
        slots = self._table.distinct(slots[slots >= 0])
        self._note_dropped(slots)
        self.policy.remove(slots)
        self.backend.free(self._table.drop(slots))

    def is_dropped(self, lease: LoadStoreSpec) -> npt.NDArray[np.bool_]:
        """Returns which blocks of ``lease``, which is not completed yet, were dropped."""
        return self._table.is_dropped(lease.slots)

    def reset(self) -> None:
        slots = self._table.slots()
        self._note_dropped(slots)
        self.policy.clear()
        self.backend.free(self._table.drop_all())

    def _note_dropped(self, slots: Slots) -> None:
        """Remembers why the blocks in ``slots`` will be missing, and counts and emits the removal of those that are
        ready."""
        ready = slots[~self._table.is_writing(slots)]
        self._num_removed += len(ready)
        if self._events is not None:
            self._emit(self._table.key_of[ready].tolist(), removed=True)
        # No more than the memory can hold: this may be of millions of blocks, on the engine's thread.
        self._gone.record(self._table.key_of[slots[-MISS_MEMORY_ENTRIES:]].tolist(), MissReason.RESET)

    def shutdown(self) -> None:
        self.reset()

    # Events and counts.

    @property
    def has_events(self) -> bool:
        """Whether there are events to take."""
        return self._events is not None

    def enable_events(self) -> None:
        """From now on there are events to take."""
        if self._events is None:
            self._events = deque(maxlen=MAX_PENDING_EVENTS)

    def take_events(self) -> Iterable[OffloadingEvent]:
        if self._events is not None:
            while self._events:
                yield self._events.popleft()

    def _emit(self, keys: list[OffloadKey], removed: bool) -> None:
        if self._events is not None and keys:
            self._events.append(OffloadingEvent(keys, self.backend.medium, removed))

    def poll(self) -> bool:
        return False

    def take_counts(self) -> Mapping[str, float]:
        num_early, self._num_early = self._num_early, 0
        return {"early_evictions": num_early} if num_early else {}

    @property
    def num_blocks(self) -> int:
        return self.backend.num_blocks

    @property
    def num_removed(self) -> int:
        return self._num_removed

    @property
    def num_used_blocks(self) -> int:
        return self.backend.num_existing_blocks - self.backend.get_num_free_blocks()

    def check_integrity(self) -> None:
        self._table.check_integrity()
        self.policy.check_integrity(self._table.slots())
        self.backend.check_integrity()
        if self._admission is not None:
            self._admission.check_integrity()
        if self._hints is not None:
            self._hints.check_integrity()
        if self._table.num_held != self.num_used_blocks:
            raise IntegrityError("slots handed out and blocks held do not match")
        if np.count_nonzero(~self._table.is_writing(self._table.slots())) != self._num_entered - self._num_removed:
            raise IntegrityError("a block has left without being counted: requests may be promised what is gone")


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view


class LRUOffloadingManager(PolicyOffloadingManager):
    """Evicts the least recently used."""

    def __init__(self, backend: Backend, enable_events: bool = False) -> None:
        super().__init__(backend, LRUPolicy(backend.num_blocks), enable_events)


class ARCOffloadingManager(PolicyOffloadingManager):
    """Evicts by Adaptive Replacement Cache."""

    def __init__(self, backend: Backend, enable_events: bool = False) -> None:
        super().__init__(backend, ARCPolicy(backend.num_blocks), enable_events)

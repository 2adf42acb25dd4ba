"""PolicyOffloadingManager: what requests look up in host memory, store there and load from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import compress

import numpy as np
import numpy.typing as npt

from kvoffload.abc import (
    Access,
    Admission,
    Backend,
    BlockNotReadyError,
    BlockStatus,
    CachePolicy,
    IntegrityError,
    Keys,
    LoadStoreSpec,
    Miss,
    MissReason,
    Need,
    Offer,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    Retained,
    Slots,
    States,
    TenantUse,
)
from kvoffload.abc.tier import HIT
from kvoffload.cache.bills import TenantCounts
from kvoffload.cache.blocks import BlockCache
from kvoffload.cache.misses import MissMemory
from kvoffload.cache.policies.lru import LRUPolicy
from kvoffload.cache.room import NO_SLOTS
from kvoffload.cache.tenants import HOST

READ_STATE_EVERY_S = 1.0
"""The most seconds by which gauges of tenants and of a self-tuning policy may be old. Engines take counts in every
step."""


class PolicyOffloadingManager(OffloadingManager):
    """A manager with any policy on any backend: the calls of requests, in front of a BlockCache. ``policy`` must be
    made for ``backend.num_blocks`` blocks.

    With ``must_store`` the policy may refuse new blocks only when they leave the device. ``admission``, if given,
    decides which of them are stored at all. ``misses`` and ``device_blocks``: see BlockCache; with ``device_blocks``
    the caller says with ``note_device`` what the device holds.
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
        device_blocks: int = 0,
    ) -> None:
        self.backend = backend
        self.policy = policy
        self._must_store = must_store
        self._clock = clock
        policy.must_store = must_store
        self.admission = admission
        """Decides which new blocks are stored. None: all are. May be set."""
        self.blocks = BlockCache(backend, policy, clock, misses, enable_events, device_blocks)
        self.is_behind_device = self.blocks.is_behind_device
        self.table = self.blocks.table
        self.room = self.blocks.room
        self.retention = self.blocks.retention
        self.history = self.blocks.history
        self._hints = self.room.hints
        self._gauges = _Gauges(clock)

    # Lookup.

    def lookup(self, keys: Keys, req_context: ReqContext | None = None) -> int | None:
        if self.admission is not None:
            self.admission.count(keys, req_context)
        return self.table.leading_ready(keys)

    def lookup_each(self, keys: Keys, req_context: ReqContext | None = None, need: Need = Need.ALL) -> States:
        if self.admission is not None:
            self.admission.count(keys, req_context)
        if need is not Need.RUN:
            return self.table.states(keys)
        states = np.zeros(len(keys), dtype=np.uint8)
        states[: self.table.leading_ready(keys)] = HIT
        return states

    def block_status(self, key: OffloadKey) -> BlockStatus | None:
        """Returns slot and reference count of ``key`` now, or None if it is absent."""
        return self.table.status(key)

    def explain_miss(self, key: OffloadKey) -> Miss:
        miss = Miss(MissReason.BEING_WRITTEN) if key in self.table else self.history.misses.explain(key)
        if miss.reason is MissReason.NEVER_STORED and self.admission is not None:
            miss = self.admission.explain(key)
        state = self.policy.state()
        return replace(miss, policy=state) if state else miss

    # Loads.

    def prepare_load(self, keys: Keys, req_context: ReqContext | None = None) -> LoadStoreSpec:
        slots = self.table.find(keys)
        for unready in np.flatnonzero((slots < 0) | self.table.is_writing(slots)).tolist():
            raise BlockNotReadyError(f"block {keys[unready].hex()} is not ready; look it up before loading it")
        self.blocks.pin(self.table.distinct(slots))
        return self.backend.get_load_store_spec(keys, slots)

    def pin(self, lease: LoadStoreSpec) -> npt.NDArray[np.bool_]:
        """Adds a pin to each block of ``lease`` that is ready and was not dropped, and returns which these are.

        For a caller whose lease has just been completed: nothing may have been stored or evicted since.
        """
        loadable = self.table.is_loadable(lease.slots)
        self.blocks.pin(self.table.distinct(lease.slots[loadable]))
        return loadable

    def complete_load(self, blocks: LoadStoreSpec | Keys, req_context: ReqContext | None = None) -> None:
        slots = blocks.slots if isinstance(blocks, LoadStoreSpec) else self.table.find_in_transfer(blocks)
        self.blocks.unpin(slots)

    # Stores.

    def prepare_store(
        self, keys: Keys, req_context: ReqContext | None = None, offer: Offer = Offer.COMPUTED
    ) -> PrepareStoreOutput | None:
        present, absent = self.table.split(keys)
        # What its tenant pays for, or somebody waits for, is stored, whatever it seems to be worth.
        hints = None if req_context is None else req_context.hints
        is_retained = (
            absent and hints is not None and bool(hints.retain_s) and self.retention.tenants.quota_of(absent[0]) > 0
        )
        is_wanted = is_retained or (req_context is not None and req_context.goes_on)
        admission = None if is_wanted else self.admission
        new_keys, refused = (absent, []) if admission is None else admission.sift(absent)
        if offer is Offer.BEHIND_REFUSED:
            self.history.misses.record(new_keys, MissReason.NOT_ADMITTED)
            self.policy.refuse(new_keys[::-1])
            nothing = self.backend.get_load_store_spec([], NO_SLOTS)
            return PrepareStoreOutput([], nothing, [], [*new_keys, *refused])
        tail_first, worthless = new_keys[::-1], []
        may_refuse = not is_wanted and (offer is Offer.LEAVING or not self._must_store)
        admitted = self.room.admitted(tail_first) if may_refuse else None
        if admitted is not None and len(admitted) != len(tail_first):
            raise IntegrityError(f"policy {type(self.policy).__name__} gave no answer for some blocks")
        if admitted is not None and not admitted.all():
            worthless = list(compress(tail_first, ~admitted))
            tail_first = list(compress(tail_first, admitted))
            new_keys = tail_first[::-1]
        output = self.blocks.store(tail_first, new_keys, present, worthless)
        if output is not None and refused:
            output = replace(output, refused_keys=[*output.refused_keys, *refused])
        return output

    def allocate(self, keys: Keys) -> PrepareStoreOutput | None:
        """Does the same for blocks from lower tiers, which neither admission nor policy may refuse."""
        return self.blocks.allocate(keys)

    def complete_store(
        self, blocks: LoadStoreSpec | Keys, req_context: ReqContext | None = None, success: bool = True
    ) -> None:
        slots = blocks.slots if isinstance(blocks, LoadStoreSpec) else self.table.find_in_transfer(blocks)
        if success:
            self.blocks.set_ready(slots)
        else:
            self.history.misses.record(self.blocks.take_back(slots), MissReason.COPY_FAILED)

    def take_back(self, blocks: LoadStoreSpec) -> None:
        """Undoes ``allocate``: nothing was written to ``blocks``. Why they are missing is what it was before."""
        self.blocks.take_back(blocks.slots)

    def lease(self, slots: Collection[int] | Slots) -> LoadStoreSpec:
        """Returns the lease of blocks in transfer in ``slots``, for a caller that keeps leases by slot."""
        if not isinstance(slots, np.ndarray):
            slots = np.fromiter(slots, np.int64, len(slots))
        return LoadStoreSpec(self.backend.medium, slots)

    @property
    def num_available_blocks(self) -> int:
        """Blocks that ``prepare_store`` could make room for now, of all tenants together."""
        return self.blocks.num_available

    def most_blocks(self, key: OffloadKey | None = None) -> int:
        return self.num_blocks if key is None else self.room.most_blocks(key)

    # The eviction order.

    def touch(
        self,
        keys: Keys,
        req_context: ReqContext | None = None,
        chain: Keys | None = None,
        found: Slots | None = None,
    ) -> None:
        """``found``: what ``find`` has returned for ``keys``, if the caller has called it."""
        if self.admission is not None:
            self.admission.count(keys if chain is None else chain, req_context)
        if found is None:
            found = self.table.find(keys)
        ordered = self.room.duplicates.others(found)
        slots, ready = self.table.used(ordered)
        self.policy.access(Access(keys, ordered, slots, ready, self._clock()))
        hints = None if req_context is None else req_context.hints
        if self._hints.has_begun or hints is not None:
            self._hints.used(slots if ordered is found else self.table.used(found)[0], hints)

    def end_chain(
        self,
        keys: Keys,
        stored: Collection[OffloadKey],
        req_context: ReqContext | None = None,
        chain: Keys | None = None,
        found: Slots | None = None,
    ) -> None:
        """``found``: what ``find`` has returned for ``keys``, if the caller has called it."""
        if found is None:
            found = self.table.find(keys)
        stored = stored if isinstance(stored, list | tuple) else list(stored)
        ordered = self.room.duplicates.others(found)
        slots, new = self.table.chain(ordered, stored)
        hints = None if req_context is None else req_context.hints
        if self.retention.num_absent and hints is not None and hints.retain_s:
            # Its last stores have begun: what is not being written now does not come any more.
            self.retention.give_up(list(compress(keys, (found < 0).tolist())))
        if self.is_behind_device and (absent := list(compress(keys, (ordered < 0).tolist()))):
            # The device holds them, and was the last to use them.
            self.policy.refuse(absent[::-1])
        self.policy.reorder(slots, new)
        if self._hints.has_begun:
            if ordered is not found:
                slots, new = self.table.chain(found, stored)
            self._hints.ended(slots, new, hints)

    def retain(self, keys: Keys, req_context: ReqContext) -> Retained:
        hints = req_context.hints
        if hints is None or (hints.retain_s is None and not hints.drop):
            return Retained(None)
        if hints.drop or not hints.retain_s:
            if hints.session is not None:
                self.retention.end(hints.session)
            return Retained(None)
        refusal = self.retention.retain(keys, hints.session, hints.retain_s)
        return Retained(refusal) if refusal is not None else Retained(None, HOST, len(keys))

    def note_device(self, held: Keys = (), left: Keys = ()) -> None:
        self.room.note_device(held, left)

    # Removal.

    def drop(self, keys: Keys, only_host: bool = False) -> None:
        self.blocks.drop(keys)

    def reset(self, keep_shared: bool = False) -> bool:
        self.blocks.reset()
        return False

    def shutdown(self) -> None:
        self.reset()

    # Events and counts.

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self.history.take_events()

    def take_counts(self) -> Mapping[str, float]:
        counts: dict[str, float] = {"pool_used_blocks": self.num_used_blocks}
        num_early = self.room.take_num_early()
        if num_early:
            counts["early_evictions"] = num_early
        block_bytes = 0 if self.room.shares is None else self.room.shares.block_bytes
        return counts | self._gauges.take(self.policy, self.tenant_uses, block_bytes)

    def tenant_uses(self) -> Sequence[TenantUse]:
        return self.blocks.tenant_uses()

    @property
    def num_blocks(self) -> int:
        return self.backend.num_blocks

    @property
    def num_removed(self) -> int:
        return self.history.num_removed

    @property
    def num_used_blocks(self) -> int:
        """Blocks that take a slot now, including blocks that are being written."""
        return self.blocks.num_used

    def check_integrity(self) -> None:
        self.blocks.check_integrity()
        if self.admission is not None:
            self.admission.check_integrity()


class _Gauges:
    """Gauges of a self-tuning policy and of tenants, read once per READ_STATE_EVERY_S."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._read_at = float("-inf")
        self._tenants = TenantCounts(HOST)

    def take(self, policy: CachePolicy, uses: Callable[[], Sequence[TenantUse]], block_bytes: int) -> dict[str, float]:
        now = self._clock()
        if now < self._read_at:
            return {}
        self._read_at = now + READ_STATE_EVERY_S
        counts: dict[str, float] = {}
        state = policy.state()
        for rule, score in state.get("scores", {}).items():
            counts |= {f"policy_rule:{rule}": float(rule == state["rule"]), f"policy_score:{rule}": score}
        return counts | self._tenants.take(uses(), block_bytes, now)


class LRUOffloadingManager(PolicyOffloadingManager):
    """Evicts the least recently used."""

    def __init__(self, backend: Backend, enable_events: bool = False) -> None:
        super().__init__(backend, LRUPolicy(backend.num_blocks), enable_events)

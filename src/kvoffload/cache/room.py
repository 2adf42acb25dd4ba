"""Room: which blocks leave so that new ones can enter, with the slots of one owner or shared among tenants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.abc import Backend, CachePolicy, Eviction, IntegrityError, MissReason, OffloadKey, Slots, TenantUse
from kvoffload.cache.duplicates import Duplicates
from kvoffload.cache.hints import HintedBlocks
from kvoffload.cache.policies.tenants import TenantPolicy
from kvoffload.cache.retention import Retention
from kvoffload.cache.table import BlockTable
from kvoffload.cache.tenants import RETAIN_SHARE

Flags = npt.NDArray[np.bool_]
NO_SLOTS = np.empty(0, dtype=np.int64)


class EvictionPlan(NamedTuple):
    """How many blocks leave, and which idle blocks stay because they belong to the chain that is stored."""

    n: int
    protected: Slots


class Evictor:
    """Room in slots that all blocks share. Dropped blocks and duplicates leave before the policy is asked."""

    def __init__(
        self, backend: Backend, policy: CachePolicy, table: BlockTable, hints: HintedBlocks, duplicates: Duplicates
    ) -> None:
        self.backend = backend
        self.duplicates = duplicates
        self._policy = policy
        self._table = table
        self._hints = hints
        self._busy, self._key_of = _read_only(table.busy), _read_only(table.key_of)
        self._num_early = 0

    def take_num_early(self) -> int:
        """Returns how many blocks left because of hints since the last call."""
        num_early, self._num_early = self._num_early, 0
        return num_early

    def admitted(self, keys: Sequence[OffloadKey]) -> Flags | None:
        """Returns which of ``keys``, absent and tail first, the policy admits; None for all."""
        shortage = len(keys) - self.backend.get_num_free_blocks() - self._hints.num_dropped - self.duplicates.num
        return self._policy.admit(keys, shortage) if shortage > 0 else None

    def plan(self, entering: Sequence[OffloadKey], present: Slots) -> EvictionPlan | MissReason:
        """Returns how room is made for new keys, whose chain has the blocks ``present`` too, or why there is none.
        Changes nothing."""
        n = len(entering) - self.backend.get_num_free_blocks()
        if n <= 0:
            return EvictionPlan(0, NO_SLOTS)
        protected = self._table.idle(present)
        return MissReason.NO_ROOM if n > self._table.num_evictable - len(protected) else EvictionPlan(n, protected)

    def evict(self, plan: EvictionPlan, entering: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Carries out what ``plan`` has just returned for the same keys. Returns the keys of the blocks that left."""
        n, protected = plan
        if len(protected):
            self._table.mark_busy(protected, True)
            self.mark_busy(protected)
        has_early = self._hints.has_begun or self.duplicates.num > 0
        victims = self._evict_early(n, entering) if has_early else NO_SLOTS
        if len(victims) < n:
            eviction = Eviction(n - len(victims), self._busy, self._key_of, entering)
            chosen = np.asarray(self._policy.evict(eviction))
            victims = np.concatenate((victims, chosen)) if len(victims) else chosen
        keys = self._table.evict(victims) if victims.shape == (n,) and victims.dtype.kind == "i" else None
        if keys is None:
            raise IntegrityError(f"policy {type(self._policy).__name__} chose blocks that it may not evict")
        if len(protected):
            self._table.mark_busy(protected, False)
            self.mark_evictable(protected)
        self.backend.free(victims)
        return keys

    def _evict_early(self, n: int, entering: Sequence[OffloadKey]) -> Slots:
        """Removes up to ``n`` blocks that are to leave early from the policy, and returns their slots. Of each tenant
        no more leave than it must lose."""
        chosen, learned = [NO_SLOTS], [NO_SLOTS]
        for tenant, most in self._leaving(n, entering).items():
            hinted = self._hints.take(most, self._busy, tenant) if self._hints.has_begun else NO_SLOTS
            self._num_early += len(hinted)
            learned.append(hinted)
            duplicates = self.duplicates.take(most, self._busy, tenant)
            # Some may be both.
            others = duplicates[~np.isin(duplicates, hinted)] if len(hinted) else duplicates
            chosen += [hinted, others[: most - len(hinted)]]
        early, dropped = np.concatenate(chosen), np.concatenate(learned)
        if len(early):
            self._remove_early(early)
        if len(dropped):
            # So that the policy learns from their return.
            self._policy.refuse(self._key_of[dropped].tolist())
        return early

    def _leaving(self, n: int, entering: Sequence[OffloadKey]) -> dict[int, int]:
        """Returns how many of ``n`` blocks each tenant loses."""
        return {0: n}

    def _remove_early(self, slots: Slots) -> None:
        self.remove(slots)

    def remove(self, slots: Slots) -> None:
        """Removes blocks that leave for another reason than eviction."""
        self._policy.remove(self._known(slots))
        self.duplicates.discard(slots)

    def _known(self, slots: Slots) -> Slots:
        """Returns those of ``slots`` that the policy knows: not the duplicates, which are lent."""
        return slots[~self.duplicates.holds[slots]] if self.duplicates.num else slots

    def mark_busy(self, slots: Slots) -> None:
        """Marks blocks that must not be evicted any more. The table knows them."""

    def mark_evictable(self, slots: Slots) -> None:
        """Tells that blocks are not busy any more."""
        self._policy.mark_evictable(self._known(slots))

    def note_device(self, held: Sequence[OffloadKey], left: Sequence[OffloadKey]) -> None:
        """Takes the blocks that the device ``held``, head first, out of the policy's order, and puts in again those
        that have ``left`` it."""
        slots = self.duplicates.find(left)
        if len(slots):
            self.duplicates.discard(slots)
            self._take_back(slots)
        slots = self._table.find(held)
        slots = self._table.distinct(slots[slots >= 0])[::-1]
        if len(slots) and len(new := self.duplicates.add(slots)):
            self._policy.lend(new)

    def _take_back(self, slots: Slots) -> None:
        self._policy.insert(slots, self._key_of[slots].tolist())

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the policy orders all blocks but the duplicates."""
        slots = self._table.slots()
        if np.count_nonzero(self.duplicates.holds) != self.duplicates.num:
            raise IntegrityError("the number of duplicates is wrong")
        if np.count_nonzero(self.duplicates.holds[slots]) != self.duplicates.num:
            raise IntegrityError("a duplicate is no block")
        self._policy.check_integrity(self._known(slots))

    def num_storable(self, key: OffloadKey) -> int:
        """Returns how many blocks of the tenant of ``key`` could be stored now."""
        return self.backend.get_num_free_blocks() + self._table.num_evictable

    def most_blocks(self, key: OffloadKey) -> int:
        """Returns how many blocks the tenant of ``key`` can have whatever the others hold."""
        return self.backend.num_blocks

    def restorable(self, keys: Sequence[OffloadKey]) -> Flags | None:
        """Returns which of ``keys``, the least recently used first, may enter if nothing is held yet; None for all."""
        return None

    def uses(self) -> Sequence[TenantUse]:
        """Returns what each tenant holds; nothing if the slots are not shared."""
        return ()

    @property
    def block_bytes(self) -> int:
        """Bytes per block; 0 if the slots are not shared."""
        return 0

    def retention(
        self, pin: Callable[[Slots], None], unpin: Callable[[Slots], None], clock: Callable[[], float]
    ) -> Retention:
        """Makes what keeps blocks for a promised time. Without shares nobody may ask for that."""
        return Retention(self._table, (0,), lambda key: 0, pin, unpin, clock)


class SharedRoom(Evictor):
    """Room in slots that tenants share: each loses its own blocks above its quota, even if slots are free."""

    def __init__(
        self, backend: Backend, policy: TenantPolicy, table: BlockTable, hints: HintedBlocks, duplicates: Duplicates
    ) -> None:
        super().__init__(backend, policy, table, hints, duplicates)
        self._tenants = policy

    def admitted(self, keys: Sequence[OffloadKey]) -> Flags | None:
        return self._tenants.admit(keys, len(keys) - self.backend.get_num_free_blocks())

    def plan(self, entering: Sequence[OffloadKey], present: Slots) -> EvictionPlan | MissReason:
        protected = self._table.idle(present)
        n = self._tenants.room(entering, self.backend.get_num_free_blocks(), protected)
        return n if isinstance(n, MissReason) else EvictionPlan(n, protected)

    def _leaving(self, n: int, entering: Sequence[OffloadKey]) -> dict[int, int]:
        return self._tenants.leaving(entering, n)

    def _remove_early(self, slots: Slots) -> None:
        self._tenants.evict_early(slots)
        self.duplicates.discard(slots)

    def _known(self, slots: Slots) -> Slots:
        return slots

    def mark_busy(self, slots: Slots) -> None:
        self._tenants.mark_busy(slots)

    def _take_back(self, slots: Slots) -> None:
        self._tenants.take_back(slots)

    def num_storable(self, key: OffloadKey) -> int:
        return self._tenants.num_storable(key, self.backend.get_num_free_blocks())

    def most_blocks(self, key: OffloadKey) -> int:
        return self._tenants.most_blocks(key)

    def restorable(self, keys: Sequence[OffloadKey]) -> Flags | None:
        return self._tenants.restorable(keys)

    def uses(self) -> Sequence[TenantUse]:
        return self._tenants.uses()

    @property
    def block_bytes(self) -> int:
        return self._tenants.shares.block_bytes

    def retention(
        self, pin: Callable[[Slots], None], unpin: Callable[[Slots], None], clock: Callable[[], float]
    ) -> Retention:
        shares = self._tenants.shares
        most = [int(RETAIN_SHARE * quota) for quota in shares.quota]
        spare = min(shares.num_unclaimed, int(RETAIN_SHARE * shares.num_blocks) - sum(shares.retain))
        return Retention(self._table, shares.retain, shares.tenant, pin, unpin, clock, spare, most)


def room_of(backend: Backend, policy: CachePolicy, table: BlockTable) -> tuple[Evictor, HintedBlocks]:
    """Returns the room of a policy's blocks, and which of them leave early."""
    if isinstance(policy, TenantPolicy):
        hints = HintedBlocks(table, policy.tenant_of)
        return SharedRoom(backend, policy, table, hints, Duplicates(table, policy.tenant_of)), hints
    nobody = np.broadcast_to(np.int8(0), table.num_blocks)
    hints = HintedBlocks(table, nobody)
    return Evictor(backend, policy, table, hints, Duplicates(table, nobody)), hints


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view

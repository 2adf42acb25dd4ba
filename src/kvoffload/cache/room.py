"""Room: which blocks leave so that new ones can enter, with the slots of one owner or shared among tenants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.abc import Backend, CachePolicy, Eviction, IntegrityError, Keys, MissReason, OffloadKey, Slots, TenantUse
from kvoffload.cache.duplicates import Duplicates
from kvoffload.cache.hints import HintedBlocks
from kvoffload.cache.policies.tenants import TenantPolicy
from kvoffload.cache.table import BlockTable
from kvoffload.cache.tenants import Shares

Flags = npt.NDArray[np.bool_]
NO_SLOTS = np.empty(0, dtype=np.int64)


class EvictionPlan(NamedTuple):
    """How many blocks of each tenant leave, and which idle blocks stay because they belong to the chain that is
    stored. Slots that are not shared have one tenant."""

    leaving: Sequence[int]
    protected: Slots


class Room:
    """The slots of ``backend``, whose blocks ``table`` and ``policy`` know. Dropped blocks and duplicates leave before
    the policy is asked. Tenants that share the slots lose their own blocks above their quotas, even if slots are
    free."""

    def __init__(self, backend: Backend, policy: CachePolicy, table: BlockTable) -> None:
        self._backend = backend
        self._policy = policy
        self._tenants = policy if isinstance(policy, TenantPolicy) else None
        self._table = table
        tenant_of = np.broadcast_to(np.int8(0), table.num_blocks) if self._tenants is None else self._tenants.tenant_of
        self.hints = HintedBlocks(table, tenant_of)
        """Which blocks leave early because of hints."""
        self.duplicates = Duplicates(table, tenant_of)
        self._busy, self._key_of = _read_only(table.busy), _read_only(table.key_of)
        self._num_early = 0

    def take_num_early(self) -> int:
        """Returns how many blocks left because of hints since the last call."""
        num_early, self._num_early = self._num_early, 0
        return num_early

    def admitted(self, keys: Keys) -> Flags | None:
        """Returns which of ``keys``, absent and tail first, the policy admits; None for all."""
        shortage = len(keys) - self._backend.get_num_free_blocks()
        if self._tenants is None:
            shortage -= self.hints.num_dropped + self.duplicates.num
            if shortage <= 0:
                return None
        return self._policy.admit(keys, shortage)

    def plan(self, entering: Keys, present: Slots) -> EvictionPlan | MissReason:
        """Returns how room is made for new keys, whose chain has the blocks ``present`` too, or why there is none."""
        num_free = self._backend.get_num_free_blocks()
        if self._tenants is not None:
            protected = self._table.idle(present)
            leaving = self._tenants.room(entering, num_free, protected)
            return leaving if isinstance(leaving, MissReason) else EvictionPlan(leaving, protected)
        n = len(entering) - num_free
        if n <= 0:
            return EvictionPlan((0,), NO_SLOTS)
        protected = self._table.idle(present)
        enough = n <= self._table.num_evictable - len(protected)
        return EvictionPlan((n,), protected) if enough else MissReason.NO_ROOM

    def evict(self, plan: EvictionPlan, entering: Keys) -> list[OffloadKey]:
        """Carries out what ``plan`` has just returned for the same keys. Returns the keys of the blocks that left."""
        leaving, protected = plan
        n = sum(leaving)
        if not n:
            return []
        if len(protected):
            self._table.busy[protected] = True
            self.mark_busy(protected)
        victims = NO_SLOTS
        if self.hints.has_begun or self.duplicates.num > 0:
            victims, leaving = self._evict_early(leaving)
        if len(victims) < n:
            eviction = Eviction(n - len(victims), self._busy, self._key_of, entering)
            tenants = self._tenants
            chosen = np.asarray(
                self._policy.evict(eviction) if tenants is None else tenants.evict_of(leaving, eviction)
            )
            victims = np.concatenate((victims, chosen)) if len(victims) else chosen
        keys = self._table.evict(victims) if victims.shape == (n,) and victims.dtype.kind == "i" else None
        if keys is None:
            raise IntegrityError(f"policy {type(self._policy).__name__} chose blocks that it may not evict")
        if len(protected):
            self._table.busy[protected] = False
            self.mark_evictable(protected)
        self._backend.free(victims)
        return keys

    def _evict_early(self, leaving: Sequence[int]) -> tuple[Slots, Sequence[int]]:
        """Removes blocks that are to leave early from the policy, of each tenant no more than it must lose. Returns
        their slots, and how many blocks of each tenant leave after them."""
        chosen, learned = [NO_SLOTS], [NO_SLOTS]
        for tenant, most in enumerate(leaving):
            if not most:
                continue
            hinted = self.hints.take(most, self._busy, tenant) if self.hints.has_begun else NO_SLOTS
            self._num_early += len(hinted)
            learned.append(hinted)
            duplicates = self.duplicates.take(most, self._busy, tenant)
            # Some may be both.
            others = duplicates[~np.isin(duplicates, hinted)] if len(hinted) else duplicates
            chosen += [hinted, others[: most - len(hinted)]]
        early, dropped = np.concatenate(chosen), np.concatenate(learned)
        if len(early):
            if self._tenants is not None:
                leaving = self._tenants.count_early(early, leaving)
            self.remove(early)
        if len(dropped):
            # So that the policy learns from their return.
            self._policy.refuse(self._key_of[dropped].tolist())
        return early, leaving

    def remove(self, slots: Slots) -> None:
        """Removes blocks from policy and duplicates."""
        self._policy.remove(self._known(slots))
        self.duplicates.discard(slots)

    def _known(self, slots: Slots) -> Slots:
        """Returns those of ``slots`` that the policy knows: not the duplicates, which are lent, unless it counts the
        blocks of tenants."""
        return slots if self._tenants is not None or not self.duplicates.num else slots[~self.duplicates.holds[slots]]

    def mark_busy(self, slots: Slots) -> None:
        """Marks blocks that must not be evicted any more. The table knows them."""
        if self._tenants is not None:
            self._tenants.mark_busy(slots)

    def mark_evictable(self, slots: Slots) -> None:
        """Tells that blocks are not busy any more."""
        self._policy.mark_evictable(self._known(slots))

    def note_device(self, held: Keys, left: Keys) -> None:
        """Takes the blocks that the device ``held``, head first, out of the policy's order, and puts in again those
        that have ``left`` it."""
        slots = self.duplicates.find(left)
        if len(slots):
            self.duplicates.discard(slots)
            if self._tenants is None:
                self._policy.insert(slots, self._key_of[slots].tolist())
            else:
                self._tenants.take_back(slots)
        slots = self._table.find(held)
        slots = self._table.distinct(slots[slots >= 0])[::-1]
        if len(slots) and len(new := self.duplicates.add(slots)):
            self._policy.lend(new)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the policy orders all blocks but the duplicates."""
        slots = self._table.slots()
        if np.count_nonzero(self.duplicates.holds) != self.duplicates.num:
            raise IntegrityError("the number of duplicates is wrong")
        if np.count_nonzero(self.duplicates.holds[slots]) != self.duplicates.num:
            raise IntegrityError("a duplicate is no block")
        self._policy.check_integrity(self._known(slots))
        self.hints.check_integrity()

    def num_storable(self, key: OffloadKey) -> int:
        """Returns how many blocks of the tenant of ``key`` could be stored now."""
        num_free = self._backend.get_num_free_blocks()
        return (
            num_free + self._table.num_evictable if self._tenants is None else self._tenants.num_storable(key, num_free)
        )

    def most_blocks(self, key: OffloadKey) -> int:
        """Returns how many blocks the tenant of ``key`` can have whatever the others hold."""
        return self._backend.num_blocks if self._tenants is None else self._tenants.most_blocks(key)

    def restorable(self, keys: Keys) -> Flags | None:
        """Returns which of ``keys``, the least recently used first, may enter if nothing is held yet; None for all."""
        return None if self._tenants is None else self._tenants.restorable(keys)

    def uses(self) -> Sequence[TenantUse]:
        """Returns what each tenant holds; nothing if the slots are not shared."""
        return () if self._tenants is None else self._tenants.uses()

    @property
    def shares(self) -> Shares | None:
        """What each tenant may take of the slots; None if they are not shared."""
        return None if self._tenants is None else self._tenants.shares


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view

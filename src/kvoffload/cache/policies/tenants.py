"""TenantPolicy: one policy per tenant, and who loses blocks when one of them needs room."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.abc import Access, CachePolicy, Eviction, IntegrityError, Keys, MissReason, OffloadKey, Slots, TenantUse
from kvoffload.cache.slots import check_slots
from kvoffload.cache.tenants import KeysOfTenant, Shares
from kvoffload.native.structures import FreeSlots

MakePolicy = Callable[[int], CachePolicy]
Flags = npt.NDArray[np.bool_]

_NOBODY = -1
_NONE = np.empty(0, dtype=np.int64)


class _Blocks:
    """The blocks of one tenant in ``policy``, which knows them by places below ``quota``, not by their slots."""

    def __init__(self, policy: CachePolicy, quota: int, guaranteed: int) -> None:
        self.policy = policy
        self.quota = quota
        self.guaranteed = guaranteed
        self.slot_of = np.zeros(quota, dtype=np.int64)
        self.key_of = np.full(quota, None, dtype=np.object_)
        self.busy = np.zeros(quota, dtype=np.bool_)
        self.lent = np.zeros(quota, dtype=np.bool_)
        """Which blocks the device holds too: ``policy`` does not."""
        self.num_evicted = 0
        self.num_refused = 0
        self.clear()

    def clear(self) -> None:
        self.free = FreeSlots(self.quota)
        self.free.add(np.arange(self.quota))
        self.num_held = self.num_busy = 0
        self.busy.fill(False)
        self.lent.fill(False)
        self.policy.full = self.quota
        self.policy.clear()

    @property
    def num_idle(self) -> int:
        return self.num_held - self.num_busy

    def insert(self, slots: Slots, keys: Keys) -> Slots:
        """Adds busy blocks, and returns their places. Raises IntegrityError if they are more than the quota allows."""
        places = self.free.take(len(slots))
        self.slot_of[places] = slots
        self.key_of[places] = np.fromiter(keys, dtype=np.object_, count=len(keys))
        self.busy[places] = True
        self.num_held += len(slots)
        self.num_busy += len(slots)
        self.policy.insert(places, keys)
        return places

    def mark_busy(self, places: Slots) -> None:
        self.num_busy += len(places) - int(np.count_nonzero(self.busy[places]))
        self.busy[places] = True

    def mark_evictable(self, places: Slots) -> None:
        self.num_busy -= int(np.count_nonzero(self.busy[places]))
        self.busy[places] = False
        self.policy.mark_evictable(places[~self.lent[places]])

    def remove(self, places: Slots) -> None:
        self.policy.remove(places[~self.lent[places]])
        self.lent[places] = False
        self.forget(places)

    def forget(self, places: Slots) -> None:
        self.num_held -= len(places)
        self.num_busy -= int(np.count_nonzero(self.busy[places]))
        self.busy[places] = False
        self.free.give_back(places)


class TenantPolicy(CachePolicy):
    """Shares the slots of a tier among tenants. The blocks of each are in a policy of its own, ``make_policy(quota)``.

    A tenant never holds more blocks than its quota. Above that its own blocks leave, even if slots are free. If slots
    are short, the tenant that is furthest above its guarantee loses blocks first, so that all tenants above their
    guarantees come to exceed them by the same number. No tenant falls below its guarantee for another one.

    ``room`` plans an eviction, and ``evict_of`` carries it out. Beside what the contract says, the caller tells with
    ``mark_busy`` which blocks it must not evict any more: ``Eviction.busy`` is not read.
    """

    def __init__(self, capacity: int, shares: Shares, make_policy: MakePolicy) -> None:
        super().__init__(capacity)
        self.shares = shares
        self.tenants = [
            _Blocks(make_policy(quota), quota, guaranteed)
            for quota, guaranteed in zip(shares.quota, shares.guaranteed, strict=True)
        ]
        self.tenant_of = np.full(capacity, _NOBODY, dtype=np.int8)
        """The tenant of the block in each slot. Read only."""
        self._place_of = np.zeros(capacity, dtype=np.int64)
        """The place that its policy knows it by."""
        self._last: tuple[Keys, Sequence[KeysOfTenant]] | None = None
        """The keys of the last call, by tenant: the next call is often about the same list, which does not change."""

    # Whose blocks.

    def _by_tenant(self, slots: Slots) -> Iterator[tuple[_Blocks, Slots, Flags | None]]:
        """Yields each tenant that has some of ``slots``, their places, and which they are, None for all."""
        if not len(slots):
            return
        tenants = self.tenant_of[slots]
        first = tenants[0]
        places = self._place_of[slots]
        if (tenants == first).all():
            yield self.tenants[first], places, None
            return
        for t in np.unique(tenants).tolist():
            chosen = tenants == t
            yield self.tenants[t], places[chosen], chosen

    def _keys_by_tenant(self, keys: Keys) -> Sequence[KeysOfTenant]:
        """Returns each tenant that has some of ``keys``, these keys, and which they are, None for all."""
        if self._last is None or self._last[0] is not keys:
            self._last = keys, self.shares.split(keys)
        return self._last[1]

    def _counts(self, keys: Keys) -> list[int]:
        """Returns how many of ``keys`` each tenant has."""
        counts = [0] * len(self.tenants)
        for t, own, _ in self._keys_by_tenant(keys):
            counts[t] = len(own)
        return counts

    # Room.

    def room(self, keys: Keys, num_free: int, protected: Slots) -> list[int] | MissReason:
        """Returns how many blocks of each tenant must leave so that new ``keys`` can be stored, or why they cannot be.
        ``num_free`` slots are free. The blocks in ``protected``, which are not busy, must stay."""
        idle = [blocks.num_idle for blocks in self.tenants]
        for t, n in enumerate(np.bincount(self.tenant_of[protected], minlength=len(idle)).tolist()):
            idle[t] -= n
        entering = self._counts(keys)
        plan = self._leaving(entering, len(keys) - num_free, idle)
        if isinstance(plan, MissReason):
            for blocks, n, most in zip(self.tenants, entering, idle, strict=True):
                is_cause = plan is MissReason.NO_ROOM or blocks.num_held + n - blocks.quota > most
                blocks.num_refused += n > 0 and is_cause
        return plan

    def _leaving(self, entering: Sequence[int], shortage: int, idle: Sequence[int]) -> list[int] | MissReason:
        """Returns how many blocks of each tenant leave so that ``entering`` new ones of each can enter, at least
        ``shortage``, of the ``idle`` ones of each; or why they cannot."""
        over = [max(0, b.num_held + n - b.quota) for b, n in zip(self.tenants, entering, strict=True)]
        if any(n > most for n, most in zip(over, idle, strict=True)):
            return MissReason.OVER_QUOTA
        rest = shortage - sum(over)
        if rest <= 0:
            return over
        excess, most = [], []
        for b, new, out, n in zip(self.tenants, entering, over, idle, strict=True):
            held = b.num_held + new - out
            excess.append(held - b.guaranteed)
            # Blocks of the store itself count for its tenant: it may lose as many others below its guarantee.
            most.append(min(n - out, held - min(b.guaranteed, b.num_held)))
        if sum(most) < rest:
            return MissReason.NO_ROOM
        return [out + n for out, n in zip(over, _from_the_top(excess, most, rest), strict=True)]

    def num_storable(self, key: OffloadKey, num_free: int) -> int:
        """Returns how many blocks of the tenant of ``key`` could be stored now."""
        own = self.tenants[self.shares.tenant(key)]
        others = sum(max(0, min(b.num_idle, b.num_held - b.guaranteed)) for b in self.tenants if b is not own)
        return min(own.quota - own.num_busy, num_free + own.num_idle + others)

    def most_blocks(self, key: OffloadKey) -> int:
        """Returns how many blocks the tenant of ``key`` can have whatever the others hold."""
        return self.shares.sure_blocks(self.shares.tenant(key))

    def restorable(self, keys: Keys) -> Flags:
        """Returns which of ``keys``, the least recently used first, may enter if nothing is held yet."""
        kept = np.ones(len(keys), dtype=np.bool_)
        for t, own, chosen in self._keys_by_tenant(keys):
            at = np.arange(len(keys)) if chosen is None else np.flatnonzero(chosen)
            kept[at[: max(0, len(own) - self.tenants[t].quota)]] = False
        return kept

    def lend(self, slots: Slots) -> None:
        """Tells that the device holds these blocks too. Each still counts for its tenant."""
        for blocks, places, _ in self._by_tenant(slots):
            blocks.policy.lend(places)
            blocks.lent[places] = True

    def take_back(self, slots: Slots) -> None:
        """Tells that blocks which were lent have left the device."""
        for blocks, places, _ in self._by_tenant(slots):
            blocks.lent[places] = False
            blocks.policy.insert(places, blocks.key_of[places].tolist())

    # The contract of a policy, tenant by tenant.

    def put_behind(self, device_blocks: int) -> None:
        """Each tenant is taken to have a share of the device as of these slots."""
        total = sum(blocks.quota for blocks in self.tenants)
        for blocks in self.tenants:
            blocks.policy.put_behind(max(1, device_blocks * blocks.quota // total))

    def insert(self, slots: Slots, keys: Keys) -> None:
        for t, own, chosen in self._keys_by_tenant(keys):
            own_slots = slots if chosen is None else slots[chosen]
            self._place_of[own_slots] = self.tenants[t].insert(own_slots, own)
            self.tenant_of[own_slots] = t

    def access(self, access: Access) -> None:
        found = self._place_of[access.found]
        found[access.found < 0] = -1
        owners = self.tenant_of[access.slots]
        for t, keys, chosen in self.shares.split(access.keys):
            policy, mine = self.tenants[t].policy, owners == t
            policy.must_store = self.must_store
            own_found, used = found if chosen is None else found[chosen], self._place_of[access.slots[mine]]
            policy.access(Access(keys, own_found, used, access.ready[mine], access.time))

    def admit(self, keys: Keys, shortage: int) -> Flags | None:
        entering = self._counts(keys)
        plan = self._leaving(entering, shortage, [blocks.num_idle for blocks in self.tenants])
        admitted = np.ones(len(keys), dtype=np.bool_)
        for t, own, chosen in self._keys_by_tenant(keys):
            blocks = self.tenants[t]
            short = blocks.num_held + len(own) - blocks.quota if isinstance(plan, MissReason) else plan[t]
            full = blocks.num_held + len(own) - short
            short -= int(np.count_nonzero(blocks.lent))
            if short <= 0:
                continue
            blocks.policy.full = max(1, full)
            answer = blocks.policy.admit(own, min(short, len(own)))
            if answer is not None:
                admitted[slice(None) if chosen is None else chosen] = answer
        return None if admitted.all() else admitted

    def refuse(self, keys: Keys) -> None:
        for t, own, _ in self._keys_by_tenant(keys):
            self.tenants[t].policy.refuse(own)

    def count_early(self, slots: Slots, leaving: Sequence[int]) -> list[int]:
        """Counts blocks that leave before any policy is asked as evicted. Returns how many of each tenant leave beside
        them. Raises IntegrityError if these are more of a tenant than the ``leaving`` ones."""
        early = np.bincount(self.tenant_of[slots], minlength=len(leaving))
        rest: list[int] = (np.array(leaving) - early).tolist()
        if min(rest) < 0:
            raise IntegrityError("more blocks of a tenant leave early than it may lose")
        for blocks, n in zip(self.tenants, early.tolist(), strict=True):
            blocks.num_evicted += n
        return rest

    def evict(self, eviction: Eviction) -> Slots:
        plan = self._leaving(self._counts(eviction.entering), eviction.n, [blocks.num_idle for blocks in self.tenants])
        if isinstance(plan, MissReason) or sum(plan) != eviction.n:
            raise IntegrityError(f"{eviction.n} blocks cannot leave without breaking a tenant's share")
        return self.evict_of(plan, eviction)

    def evict_of(self, leaving: Sequence[int], eviction: Eviction) -> Slots:
        """Does the same, and each tenant loses as many blocks as ``leaving`` says."""
        entering = {t: own for t, own, _ in self._keys_by_tenant(eviction.entering)}
        victims = [_NONE]
        for t, (blocks, n) in enumerate(zip(self.tenants, leaving, strict=True)):
            if not n:
                continue
            own, before = entering.get(t, ()), blocks.num_held
            blocks.policy.full = max(1, before + len(own) - n)
            places = blocks.policy.evict(Eviction(n, blocks.busy, blocks.key_of, own))
            if len(places) != n:
                raise IntegrityError(f"policy {type(blocks.policy).__name__} evicted {len(places)} blocks, not {n}")
            if before + len(own) - n < min(before, blocks.guaranteed):
                raise IntegrityError(f"tenant {self.shares.names[t]} would lose what is guaranteed to it")
            blocks.forget(places)
            blocks.num_evicted += n
            victims.append(blocks.slot_of[places])
        slots = np.concatenate(victims)
        self.tenant_of[slots] = _NOBODY
        return slots

    def reorder(self, slots: Slots, new: Flags) -> None:
        for blocks, places, chosen in self._by_tenant(slots):
            blocks.policy.reorder(places, new if chosen is None else new[chosen])

    def mark_busy(self, slots: Slots) -> None:
        """Tells that these blocks are busy from now on; some may have been before."""
        for blocks, places, _ in self._by_tenant(slots):
            blocks.mark_busy(places)

    def mark_evictable(self, slots: Slots) -> None:
        for blocks, places, _ in self._by_tenant(slots):
            blocks.mark_evictable(places)

    def remove(self, slots: Slots) -> None:
        for blocks, places, _ in self._by_tenant(slots):
            blocks.remove(places)
        self.tenant_of[slots] = _NOBODY

    def clear(self) -> None:
        for blocks in self.tenants:
            blocks.clear()
        self.tenant_of.fill(_NOBODY)

    def uses(self) -> list[TenantUse]:
        """Returns what each tenant holds."""
        return [
            TenantUse(name, blocks.num_held, blocks.num_evicted, blocks.num_refused)
            for name, blocks in zip(self.shares.names, self.tenants, strict=True)
        ]

    def check_integrity(self, slots: Slots) -> None:
        if len(slots) != int(np.count_nonzero(self.tenant_of != _NOBODY)):
            raise IntegrityError("the tenants do not hold the blocks that they should")
        for t, (name, blocks) in enumerate(zip(self.shares.names, self.tenants, strict=True)):
            own = slots[self.tenant_of[slots] == t]
            places = self._place_of[own]
            if blocks.num_held != len(own) or len(own) > self.shares.quota[t]:
                raise IntegrityError(f"tenant {name} holds {len(own)} blocks, and counts {blocks.num_held}")
            if (blocks.slot_of[places] != own).any() or len(np.unique(places)) != len(places):
                raise IntegrityError(f"tenant {name} confuses its blocks")
            if blocks.num_busy != int(np.count_nonzero(blocks.busy)) or blocks.busy[places].sum() != blocks.num_busy:
                raise IntegrityError(f"tenant {name} counts its busy blocks wrong")
            if any(self.shares.tenant(key) != t for key in blocks.key_of[places].tolist()):
                raise IntegrityError(f"tenant {name} holds a block of another one")
            check_slots(blocks.free, blocks.quota)
            blocks.policy.check_integrity(places[~blocks.lent[places]])


def _from_the_top(excess: Sequence[int], most: Sequence[int], n: int) -> list[int]:
    """Returns how many blocks to take of each tenant so that their excesses over the guarantees become as equal as
    possible: ``n`` in all, at most ``most`` of each."""
    taken = [0] * len(excess)
    top, *others = sorted((t for t in range(len(excess)) if most[t] > 0), key=lambda t: -excess[t])
    if most[top] >= n and (not others or excess[top] - n >= excess[others[0]]):
        taken[top] = n
        return taken

    def above(level: int) -> list[int]:
        return [max(0, min(e - level, m)) for e, m in zip(excess, most, strict=True)]

    # How far below the highest excess all excesses are cut.
    lowest = min(excess[t] - most[t] for t in (top, *others))
    depth = bisect_left(range(excess[top] - lowest), n, key=lambda depth: sum(above(excess[top] - depth)))
    level = excess[top] - depth
    taken, fewer = above(level), above(level + 1)
    surplus = sum(taken) - n
    for t, (some, less) in enumerate(zip(taken, fewer, strict=True)):
        if surplus and some > less:
            taken[t] -= 1
            surplus -= 1
    return taken

"""Retention: blocks that stay for a promised time, whatever others store, within a quota per tenant."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from kvoffload.abc import IntegrityError, Keys, OffloadKey, RetainRefusal, Slots
from kvoffload.cache.table import BlockTable
from kvoffload.cache.tenants import RETAIN_SHARE, Shares

MAX_RETAIN_S = 30 * 86_400.0
"""The longest time for which a request can have its blocks retained, in seconds."""
QUEUE_SLACK = 64
"""The heap of times is rebuilt when it has this many more than twice those at which blocks end."""
MAX_ENDED_AT_ONCE = 4096
"""``expire`` releases this many blocks at most, so that no step takes long if many end together."""
ABSENT = -1
"""The slot of a block that is to be retained and is not ready, or was lost."""


@dataclass(slots=True, eq=False)
class RetainedBlock:
    """A block that is charged to ``tenant`` until the latest time for which a request had it retained."""

    tenant: int
    session: int | None
    """The only session that has had it retained, which can end that; None: nobody can."""
    until: float
    slot: int = ABSENT
    is_lost: bool = False
    """Whether it was counted as lost since it was promised, or was last there."""


class RetainedShares:
    """What each tenant has retained, within what ``shares`` let it retain: without shares nothing."""

    def __init__(self, shares: Shares | None, now: float) -> None:
        self._shares = shares
        self._quotas = (0,) if shares is None else shares.retain
        self._most = list(self._quotas)
        """The quotas, or what was restored beyond them."""
        self._spare = 0
        """Blocks that may still be restored beyond the quotas."""
        self._limits = self._quotas
        """How many blocks each tenant may have retained then."""
        if shares is not None:
            self._limits = tuple(int(RETAIN_SHARE * quota) for quota in shares.quota)
            self._spare = min(shares.num_unclaimed, int(RETAIN_SHARE * shares.num_blocks) - sum(shares.retain))
        self.block_seconds = [0.0] * len(self._quotas)
        """Charged blocks per tenant, times seconds, since the start."""
        self._counted_at = now
        """Until when these are counted."""
        self.num_charged = [0] * len(self._quotas)
        """Blocks per tenant. ``count`` comes before each change."""
        self.num_lost = [0] * len(self._quotas)
        """Retained blocks per tenant that were lost, or did not come, since the start."""

    def tenant_of(self, key: OffloadKey) -> int:
        return 0 if self._shares is None else self._shares.tenant(key)

    def quota_of(self, key: OffloadKey) -> int:
        """Returns how many blocks the tenant of ``key`` may have retained."""
        return self._quotas[self.tenant_of(key)] if any(self._quotas) else 0

    def count(self, now: float) -> None:
        """Counts what was charged until ``now``."""
        seconds = now - self._counted_at
        if seconds > 0:
            self._counted_at = now
            for tenant, num_blocks in enumerate(self.num_charged):
                self.block_seconds[tenant] += num_blocks * seconds

    def allows_restored(self, tenant: int) -> bool:
        """Returns whether one more block that a former process has retained stays so, beyond the quota only if nobody
        needs its room."""
        if self.num_charged[tenant] >= self._most[tenant]:
            if self._spare <= 0 or self._most[tenant] >= self._limits[tenant]:
                return False
            self._spare -= 1
            self._most[tenant] += 1
        return True

    def check_integrity(self, blocks: Iterable[RetainedBlock]) -> None:
        """Raises IntegrityError unless ``blocks`` are what is charged, within the quotas."""
        charged = [0] * len(self._quotas)
        for block in blocks:
            charged[block.tenant] += 1
        if charged != self.num_charged or any(n > most for n, most in zip(charged, self._most, strict=True)):
            raise IntegrityError("a tenant has more blocks retained than it may")


class Retention:
    """Keeps blocks of ``table`` pinned until the times that requests have asked for.

    A block stays until the latest of these times. Its session can end that before, unless another request had the
    block retained too. Blocks are charged to their tenant once, however many requests name them. A request for which
    its quota has no room is refused as a whole. Blocks that are being written are pinned when they become ready. A
    block that is lost is charged until its time, and is pinned again when it is stored again.

    ``pin`` and ``unpin`` change the pins of ready blocks in distinct slots. ``restore`` may exceed quotas that have
    become smaller, by blocks that nobody needs.
    """

    def __init__(
        self,
        table: BlockTable,
        shares: Shares | None,
        pin: Callable[[Slots], None],
        unpin: Callable[[Slots], None],
        clock: Callable[[], float],
    ) -> None:
        self._table = table
        self.tenants = RetainedShares(shares, clock())
        """Read only for others."""
        self._pin = pin
        self._unpin = unpin
        self._clock = clock
        self.blocks: dict[OffloadKey, RetainedBlock] = {}
        """Read only for others."""
        self._of_session: dict[int, set[OffloadKey]] = {}
        """The blocks that a session can end."""
        self._ending: dict[float, dict[OffloadKey, None]] = {}
        """The retained blocks by the time at which they end."""
        self._ends: list[float] = []
        """A heap of these times, and of others at which no block ends any more."""
        self.num_absent = 0
        """Retained blocks that are not ready."""
        self.changes: dict[int, float] | None = None
        """New times of the retained blocks in those slots, 0 if they are not retained any more; None: not noted."""

    def retain(self, keys: Keys, session: int | None, seconds: float) -> RetainRefusal | None:
        """Retains ``keys``, the whole chain of a request, for ``seconds`` from now on. Returns why not, and changes
        nothing then. Blocks that are not in the table yet are retained when they come."""
        if not keys:
            return RetainRefusal.NOTHING
        quota = self.tenants.quota_of(keys[0])
        if not quota:
            return RetainRefusal.NO_QUOTA
        tenant = self.tenants.tenant_of(keys[0])
        now = self._clock()
        self.expire()
        while self.tenants.num_charged[tenant] + len(new := self._not_retained(keys)) > quota:
            if not self._ends or self._ends[0] > now:
                return RetainRefusal.OVER_QUOTA
            self.expire()
        until = now + seconds
        self.tenants.count(now)
        for key in keys:
            block = self.blocks.get(key)
            if block is not None and block.session not in (session, None):
                self._disown((key,), block.session)
                block.session = None
            if block is not None and until > block.until:
                self._take_out(key, block)
                block.until = until
                self._ends_at(until)[key] = None
                self._note(block.slot, until)
        self._add(new, tenant, session, until)
        self._pin_ready(keys)
        return None

    def _not_retained(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        return [key for key in dict.fromkeys(keys) if key not in self.blocks]

    def _add(self, new: list[OffloadKey], tenant: int, session: int | None, until: float) -> None:
        self.blocks.update((key, RetainedBlock(tenant, session, until)) for key in new)
        self.tenants.num_charged[tenant] += len(new)
        self.num_absent += len(new)
        if new:
            self._ends_at(until).update(dict.fromkeys(new))
        if new and session is not None:
            self._of_session.setdefault(session, set()).update(new)

    def _ends_at(self, until: float) -> dict[OffloadKey, None]:
        """Returns the blocks that end at a time, to which some are added now."""
        if until not in self._ending:
            if len(self._ends) > 2 * len(self._ending) + QUEUE_SLACK:
                self._ends = sorted(self._ending)
            heapq.heappush(self._ends, until)
        return self._ending.setdefault(until, {})

    def _take_out(self, key: OffloadKey, block: RetainedBlock) -> None:
        ending = self._ending[block.until]
        del ending[key]
        if not ending:
            del self._ending[block.until]

    def _disown(self, keys: Iterable[OffloadKey], session: int) -> None:
        """From now on the session cannot end the retention of ``keys``."""
        own = self._of_session[session]
        own.difference_update(keys)
        if not own:
            del self._of_session[session]

    def _note(self, slot: int, until: float) -> None:
        if self.changes is not None and slot != ABSENT:
            self.changes[slot] = until

    def take_changes(self) -> dict[int, float]:
        """Returns until when the blocks in those slots are retained for which that has changed since the last call, 0
        for those that are not any more. The first call returns none; until then none are kept."""
        changes, self.changes = self.changes or {}, {}
        return changes

    def _pin_ready(self, keys: Iterable[OffloadKey]) -> None:
        """Pins those of ``keys`` that are retained, ready, and not pinned yet."""
        waiting = {key: block for key in keys if (block := self.blocks.get(key)) is not None and block.slot == ABSENT}
        slots = self._table.find(list(waiting))
        found = np.flatnonzero(slots >= 0)
        found = found[self._table.is_loadable(slots[found])]
        if not len(found):
            return
        blocks = list(waiting.values())
        for i in found.tolist():
            blocks[i].slot, blocks[i].is_lost = int(slots[i]), False
            self._note(blocks[i].slot, blocks[i].until)
        self.num_absent -= len(found)
        self._pin(slots[found])

    def entered(self, slots: Slots) -> None:
        """Takes note of blocks that became ready. Call it only while ``num_absent`` is not 0."""
        self._pin_ready(self._table.key_of[slots].tolist())

    def end(self, session: int) -> None:
        """Ends what only that session had retained."""
        self._release(list(self._of_session.get(session, ())))

    def expire(self) -> None:
        """Releases blocks whose time is over, at most MAX_ENDED_AT_ONCE, and counts what was charged until now. If more
        have ended, it counts until their end."""
        now, num_ended = self._clock(), 0
        while self._ends and (end := self._ends[0]) <= now and num_ended < MAX_ENDED_AT_ONCE:
            ended = list(islice(self._ending.get(end, ()), MAX_ENDED_AT_ONCE - num_ended))
            num_ended += len(ended)
            self._release(ended, end)
            if end not in self._ending:
                heapq.heappop(self._ends)
        self.tenants.count(min([now, *self._ends[:1]]))

    def _release(self, keys: Keys, now: float | None = None) -> None:
        """The blocks ``keys`` are not retained any more, from ``now`` on."""
        self.tenants.count(self._clock() if now is None else now)
        blocks = list(map(self.blocks.pop, keys))
        of_session: dict[int, list[OffloadKey]] = {}
        for key, block in zip(keys, blocks, strict=True):
            self._take_out(key, block)
            self.tenants.num_charged[block.tenant] -= 1
            if block.session is not None:
                of_session.setdefault(block.session, []).append(key)
        for session, own in of_session.items():
            self._disown(own, session)
        pinned = [block.slot for block in blocks if block.slot != ABSENT]
        self.num_absent -= len(blocks) - len(pinned)
        self._let_go(pinned)

    def _let_go(self, slots: list[int]) -> None:
        if self.changes is not None:
            self.changes.update(dict.fromkeys(slots, 0.0))
        if slots:
            self._unpin(np.array(slots, dtype=np.int64))

    def lose(self, keys: Iterable[OffloadKey]) -> None:
        """Unpins those of ``keys`` that are retained: they are about to be dropped."""
        lost: list[int] = []
        for key in keys:
            block = self.blocks.get(key)
            if block is not None and block.slot != ABSENT:
                lost.append(block.slot)
                block.slot = ABSENT
                self._count_lost(block)
        self.num_absent += len(lost)
        self._let_go(lost)

    def give_up(self, keys: Iterable[OffloadKey]) -> None:
        """Those of ``keys`` that are retained and not there will not come: they are not charged any more, and are
        counted as lost."""
        given_up = []
        for key in dict.fromkeys(keys):
            block = self.blocks.get(key)
            if block is not None and block.slot == ABSENT:
                given_up.append(key)
                self._count_lost(block)
        self._release(given_up)

    def _count_lost(self, block: RetainedBlock) -> None:
        self.tenants.num_lost[block.tenant] += not block.is_lost
        block.is_lost = True

    def clear(self) -> None:
        """Ends everything: every block is about to be dropped."""
        self.tenants.count(self._clock())
        blocks = list(self.blocks.values())
        for block in blocks:
            self._count_lost(block)
            self.tenants.num_charged[block.tenant] -= 1
        self.blocks.clear()
        self._of_session.clear()
        self._ending.clear()
        self._ends.clear()
        self.num_absent = 0
        self._let_go([block.slot for block in blocks if block.slot != ABSENT])

    def restore(self, keys: Keys, seconds: Sequence[float]) -> None:
        """Retains ready blocks that a former process has retained, each for so many ``seconds`` from now on. Beyond the
        quotas, those that end first are lost, unless nobody needs their room."""
        now = self._clock()
        self.tenants.count(now)
        for i in np.argsort(seconds, kind="stable")[::-1].tolist():
            tenant = self.tenants.tenant_of(keys[i])
            if not self.tenants.allows_restored(tenant):
                self.tenants.num_lost[tenant] += 1
                continue
            self._add([keys[i]], tenant, None, now + seconds[i])
        self._pin_ready(keys)

    def check_integrity(self) -> None:
        """Raises IntegrityError if a quota is exceeded, or pins and counts do not match. O(retained blocks)."""
        self.tenants.check_integrity(self.blocks.values())
        of_session = dict[int, set[OffloadKey]]()
        for key, block in self.blocks.items():
            if block.session is not None:
                of_session.setdefault(block.session, set()).add(key)
            if block.slot != ABSENT and (self._table.get(key) != block.slot or self._table.ref_cnt[block.slot] < 1):
                raise IntegrityError("a retained block has left before its time")
        if of_session != self._of_session:
            raise IntegrityError("the blocks that a session can end are miscounted")
        if self.num_absent != sum(block.slot == ABSENT for block in self.blocks.values()):
            raise IntegrityError("the number of retained blocks that are absent is wrong")
        ending = {key: end for end, keys in self._ending.items() for key in keys}
        is_known = self._ending.keys() <= {*self._ends}
        if ending != {key: block.until for key, block in self.blocks.items()} or not is_known:
            raise IntegrityError("a block would be retained beyond its time")

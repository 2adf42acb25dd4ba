"""Retention: blocks that stay for a promised time, whatever others store, within a quota per tenant."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from kvoffload.abc import IntegrityError, OffloadKey, RetainRefusal, Slots
from kvoffload.cache.keys import key_group_idx
from kvoffload.cache.table import BlockTable

MAX_RETAIN_S = 30 * 86_400.0
"""The longest time for which a request can have its blocks retained, in seconds."""
MAX_RETENTIONS = 1 << 17
"""Retentions of all tenants together. Each may have an equal part of them; beyond that new ones are refused."""
QUEUE_SLACK = 256
"""The queue is rebuilt when it has this many entries more than twice the number of retentions."""
MAX_ENDED_AT_ONCE = 1024
"""Retentions that one call ends at most, so that no step takes long if many end together."""
_NOBODY = -1
_UNKNOWN = OffloadKey(b"")
"""The parent of a block that was restored."""
ABSENT = -1
"""The slot of a block that is to be retained and is not ready, or was lost."""


@dataclass(slots=True, eq=False)
class _Node:
    """One retained block."""

    parent: OffloadKey | None
    """The block before it in its chain, which stays at least as long; _UNKNOWN if nobody has said it."""
    tenant: int
    is_charged: bool = True
    """Whether it is still promised."""
    is_lost: bool = False
    """Whether it was counted as lost since it was promised, or was last there."""
    num_uses: int = 0
    """Blocks behind it, and retentions that end with it."""
    slot: int = ABSENT
    until: float = 0.0
    """The latest time for which it was promised."""


@dataclass(slots=True, eq=False)
class _Retention:
    """What was retained at the end of one request."""

    name: int | OffloadKey
    tenant: int
    """Whose it is; of what was restored, _NOBODY."""
    until: float
    ends: list[OffloadKey] = field(default_factory=list)
    """The last blocks of its chains, one chain per KV cache group."""


class Retention:
    """Keeps blocks of ``table`` pinned until the times that requests have asked for.

    A retention belongs to a session, or to the last block of its chain if the request names no session. A later one of
    the same name takes its place. Blocks are charged to their tenant once, however many retentions name them:
    ``quotas[t]`` blocks at most for tenant ``t`` of ``tenant_of``. A retention for which the quota has no room is
    refused as a whole. Blocks that are being written are pinned when they become ready. A block that is lost is charged
    until the retention ends, and is pinned again when it is stored again.

    ``pin`` and ``unpin`` change the pins of ready blocks in distinct slots. ``restore`` may exceed quotas that have
    become smaller, by ``spare`` blocks in all: up to ``most[t]`` blocks for tenant ``t``.
    """

    def __init__(
        self,
        table: BlockTable,
        quotas: Sequence[int],
        tenant_of: Callable[[OffloadKey], int],
        pin: Callable[[Slots], None],
        unpin: Callable[[Slots], None],
        clock: Callable[[], float],
        spare: int = 0,
        most: Sequence[int] = (),
    ) -> None:
        self._table = table
        self._quotas = list(quotas)
        self._most = list(quotas)
        """The quotas, or what was restored beyond them."""
        self._spare = spare
        self._most_restored = list(most or quotas)
        self._tenant_of = tenant_of
        self._pin = pin
        self._unpin = unpin
        self._clock = clock
        self._nodes: dict[OffloadKey, _Node] = {}
        self.by_name: dict[int | OffloadKey, _Retention] = {}
        """Read only for others."""
        self._num_of: Counter[int] = Counter()
        """Retentions by tenant."""
        self._queue: list[tuple[float, int, _Retention]] = []
        """A heap, the first to end first. Retentions that have ended before their time may still be in it."""
        self._order = count()
        self._lone_groups: set[int] = set()
        """KV cache groups of which requests keep different blocks, so that these are no chains: states."""
        self._block_seconds = [0.0] * len(quotas)
        """Charged blocks per tenant, times seconds."""
        self._counted_at = clock()
        """Until when these are counted."""
        self.num_charged = [0] * len(quotas)
        """Blocks per tenant."""
        self.num_absent = 0
        """Charged blocks that are not ready."""
        self.num_lost = [0] * len(quotas)
        """Retained blocks per tenant that were lost, or did not come, since the start."""
        self.changes: dict[int, float] | None = None
        """Until when the blocks in those slots are retained for which that has changed; None: nobody wants to know."""
        self._restored = count(-1, -1)
        """Names of retentions that were restored."""

    def __len__(self) -> int:
        return len(self.by_name)

    @property
    def next_end(self) -> float:
        """When ``expire`` may have something to do."""
        return self._queue[0][0] if self._queue else float("inf")

    def allows(self, key: OffloadKey) -> bool:
        """Returns whether the tenant of ``key`` may have blocks retained at all."""
        return any(self._quotas) and self._quotas[self._tenant_of(key)] > 0

    def retain(self, keys: Sequence[OffloadKey], session: int | None, seconds: float) -> RetainRefusal | None:
        """Retains ``keys``, the whole chain of a request, head first, for ``seconds`` from now on. Returns why not, and
        changes nothing then. Blocks that are not in the table yet are retained when they come."""
        self.expire()
        if not keys:
            return RetainRefusal.NOTHING
        tenant = self._tenant_of(keys[0])
        refusal = self._refusal(keys, session, tenant)
        while refusal is not None and self.next_end <= self._clock():
            self.expire()
            refusal = self._refusal(keys, session, tenant)
        if refusal is not None:
            return refusal
        until = self._clock() + seconds
        retention = _Retention(keys[-1] if session is None else session, tenant, until)
        before = self._pop(retention.name)
        if before is not None and session is None:
            retention.until = until = max(until, before.until)
        self._count(self._clock())
        for group, chain in _by_group(keys):
            if group in self._lone_groups:
                for key in chain:
                    self._add_chain(retention, [key], tenant, group)
            else:
                self._add_chain(retention, chain, tenant, group)
        self._enqueue(retention)
        covered = [before]
        if session is None:
            # Those of shorter chains that end no later: the new one keeps all of theirs.
            of_chain = set(keys)
            for key in keys[:-1]:
                shorter = self.by_name.get(key)
                if shorter is not None and shorter.until <= until and of_chain.issuperset(shorter.ends):
                    covered.append(self._pop(key))
        self._release([each for each in covered if each is not None])
        if before is not None and before.until > until:
            self._shorten(retention)
        self._pin_ready(keys)
        return None

    def _refusal(self, keys: Sequence[OffloadKey], session: int | None, tenant: int) -> RetainRefusal | None:
        quota = self._quotas[tenant]
        if not quota:
            return RetainRefusal.NO_QUOTA
        before = self.by_name.get(keys[-1] if session is None else session)
        if before is None and self._num_of[tenant] >= MAX_RETENTIONS // len(self._quotas):
            return RetainRefusal.TOO_MANY
        num_new = sum((node := self._nodes.get(key)) is None or not node.is_charged for key in set(keys))
        if self.num_charged[tenant] + num_new <= quota:
            return None
        num_freed = 0 if before is None else self._num_freed(before, set(keys), tenant)
        return RetainRefusal.OVER_QUOTA if self.num_charged[tenant] + num_new - num_freed > quota else None

    def _num_freed(self, retention: _Retention, kept: set[OffloadKey], tenant: int) -> int:
        """Returns how many blocks of ``tenant``, beside those in ``kept``, only ``retention`` retains."""
        fewer: dict[OffloadKey, int] = {}
        num_freed = 0
        for end in retention.ends:
            key: OffloadKey | None = end
            while key and key not in kept:
                fewer[key] = fewer.get(key, 0) + 1
                node = self._nodes[key]
                if fewer[key] < node.num_uses:
                    break
                num_freed += node.is_charged and node.tenant == tenant
                key = node.parent
        return num_freed

    def _add_chain(self, retention: _Retention, chain: Sequence[OffloadKey], tenant: int, group: int) -> None:
        parent: OffloadKey | None = None
        for key in chain:
            node = self._nodes.get(key)
            if node is None:
                node = self._nodes[key] = _Node(parent, tenant, is_charged=False)
                if parent is not None:
                    self._nodes[parent].num_uses += 1
            elif node.parent == _UNKNOWN and parent is not None:
                node.parent = parent
                self._nodes[parent].num_uses += 1
            elif node.parent not in (parent, _UNKNOWN):
                self._lone_groups.add(group)
                if parent is not None:
                    self._end_with(retention, parent)
            if not node.is_charged:
                node.is_charged, node.is_lost = True, False
                self.num_charged[node.tenant] += 1
                self.num_absent += 1
            self._prolong(node, retention.until)
            parent = key
        if parent is not None:
            self._end_with(retention, parent)

    def _shorten(self, retention: _Retention) -> None:
        """Takes the time of a retention that has taken the place of a longer one over for blocks that no other has."""
        for end in retention.ends:
            key: OffloadKey | None = end
            while key and (node := self._nodes[key]).num_uses == 1:
                node.until = retention.until
                self._note(node.slot, node.until)
                key = node.parent

    def _prolong(self, node: _Node, until: float) -> None:
        if until > node.until:
            node.until = until
            self._note(node.slot, until)

    def _note(self, slot: int, until: float) -> None:
        if self.changes is not None and slot != ABSENT:
            self.changes[slot] = until

    def take_changes(self) -> dict[int, float]:
        """Returns until when the blocks in those slots are retained for which that has changed since the last call, 0
        for those that are not any more. The first call returns none; until then none are kept."""
        changes, self.changes = self.changes or {}, {}
        return changes

    def _end_with(self, retention: _Retention, key: OffloadKey) -> None:
        retention.ends.append(key)
        self._nodes[key].num_uses += 1

    def _enqueue(self, retention: _Retention) -> None:
        self.by_name[retention.name] = retention
        self._num_of[retention.tenant] += 1
        heapq.heappush(self._queue, (retention.until, next(self._order), retention))
        self._compact()

    def _compact(self) -> None:
        if len(self._queue) > 2 * len(self.by_name) + QUEUE_SLACK:
            self._queue = [entry for entry in self._queue if self.by_name.get(entry[2].name) is entry[2]]
            heapq.heapify(self._queue)

    def _pin_ready(self, keys: Iterable[OffloadKey]) -> None:
        """Pins those of ``keys`` that are retained, ready, and not pinned yet."""
        nodes = {
            key: node
            for key in keys
            if (node := self._nodes.get(key)) is not None and node.slot == ABSENT and node.is_charged
        }
        slots = self._table.find(list(nodes))
        found = np.flatnonzero(slots >= 0)
        found = found[self._table.is_loadable(slots[found])]
        if not len(found):
            return
        waiting = list(nodes.values())
        for i in found.tolist():
            waiting[i].slot, waiting[i].is_lost = int(slots[i]), False
            self._note(waiting[i].slot, waiting[i].until)
        self.num_absent -= len(found)
        self._pin(slots[found])

    def entered(self, slots: Slots) -> None:
        """Takes note of blocks that became ready. Call it only while ``num_absent`` is not 0."""
        self._pin_ready(self._table.key_of[slots].tolist())

    def end(self, session: int) -> None:
        """Ends the retention of a session, if there is one."""
        retention = self._pop(session)
        if retention is not None:
            self._count(self._clock())
            self._release([retention])
            self._compact()

    def _pop(self, name: int | OffloadKey) -> _Retention | None:
        retention = self.by_name.pop(name, None)
        if retention is not None:
            self._num_of[retention.tenant] -= 1
        return retention

    def expire(self) -> None:
        """Ends retentions whose time is over, at most MAX_ENDED_AT_ONCE."""
        now = self._clock()
        if self.next_end > now:
            return
        ended: list[_Retention] = []
        freed: list[int] = []
        while self._queue and self._queue[0][0] <= now and len(ended) < MAX_ENDED_AT_ONCE:
            retention = heapq.heappop(self._queue)[2]
            if self.by_name.get(retention.name) is retention:
                self._pop(retention.name)
                ended.append(retention)
                self._count(retention.until)
                freed += self._freed(retention)
        self._let_go(freed)

    def _release(self, retentions: Iterable[_Retention]) -> None:
        self._let_go([slot for retention in retentions for slot in self._freed(retention)])

    def _freed(self, retention: _Retention) -> list[int]:
        """Forgets what only ``retention`` retains. Returns the slots of those of these blocks that are pinned."""
        freed: list[int] = []
        for end in retention.ends:
            key: OffloadKey | None = end
            while key:
                node = self._nodes[key]
                node.num_uses -= 1
                if node.num_uses:
                    break
                del self._nodes[key]
                if node.slot != ABSENT:
                    freed.append(node.slot)
                self._discharge(node)
                key = node.parent
        return freed

    def _discharge(self, node: _Node) -> None:
        if node.is_charged:
            self.num_charged[node.tenant] -= 1
            self.num_absent -= node.slot == ABSENT
            node.is_charged = False

    def _count(self, now: float) -> None:
        """Counts what was charged until ``now``."""
        seconds = now - self._counted_at
        if seconds > 0:
            self._counted_at = now
            for tenant, num_blocks in enumerate(self.num_charged):
                self._block_seconds[tenant] += num_blocks * seconds

    def block_seconds(self, tenant: int) -> int:
        """Returns how many blocks times seconds were charged to a tenant since the start."""
        self._count(self._clock())
        return int(self._block_seconds[tenant])

    def _let_go(self, slots: list[int]) -> None:
        for slot in slots:
            self._note(slot, 0.0)
        if slots:
            self._unpin(np.array(slots, dtype=np.int64))

    def lose(self, keys: Iterable[OffloadKey]) -> None:
        """Unpins those of ``keys`` that are retained: they are about to be dropped."""
        lost: list[int] = []
        for key in keys:
            node = self._nodes.get(key)
            if node is not None and node.slot != ABSENT:
                lost.append(node.slot)
                node.slot = ABSENT
                self._count_lost(node)
        self.num_absent += len(lost)
        self._let_go(lost)

    def give_up(self, keys: Iterable[OffloadKey]) -> None:
        """Those of ``keys`` that are retained and not there will not come: they are not charged any more, and are
        counted as lost."""
        self._count(self._clock())
        for key in keys:
            node = self._nodes.get(key)
            if node is not None and node.slot == ABSENT and node.is_charged:
                self._discharge(node)
                self._count_lost(node)

    def _count_lost(self, node: _Node) -> None:
        self.num_lost[node.tenant] += not node.is_lost
        node.is_lost = True

    def clear(self) -> None:
        """Ends all retentions: every block is about to be dropped."""
        self._count(self._clock())
        pinned = []
        for node in self._nodes.values():
            if node.slot != ABSENT:
                pinned.append(node.slot)
            if node.is_charged:
                self._count_lost(node)
        self._nodes.clear()
        self.by_name.clear()
        self._num_of.clear()
        self._queue.clear()
        self.num_charged = [0] * len(self._quotas)
        self.num_absent = 0
        self._let_go(pinned)

    def restore(self, keys: Sequence[OffloadKey], seconds: Sequence[float]) -> None:
        """Retains ready blocks that a former process has retained, each for so many ``seconds`` from now on. Beyond the
        quotas, those that end first are lost, unless nobody needs their room."""
        now, by_end = self._clock(), dict[float, list[OffloadKey]]()
        self._count(now)
        for i in np.argsort(seconds, kind="stable")[::-1].tolist():
            by_end.setdefault(seconds[i], []).append(keys[i])
        for left, of_end in by_end.items():
            retention = _Retention(next(self._restored), _NOBODY, now + left)
            for key in of_end:
                tenant = self._tenant_of(key)
                if self.num_charged[tenant] >= self._most[tenant]:
                    if not self._spare or self._most[tenant] >= self._most_restored[tenant]:
                        self.num_lost[tenant] += 1
                        continue
                    self._spare -= 1
                    self._most[tenant] += 1
                self._nodes[key] = _Node(_UNKNOWN, tenant, until=retention.until)
                self.num_charged[tenant] += 1
                self.num_absent += 1
                self._end_with(retention, key)
            if retention.ends:
                self._enqueue(retention)
        self._pin_ready(keys)

    def check_integrity(self) -> None:
        """Raises IntegrityError if a quota is exceeded, or pins and counts do not match. O(retained blocks)."""
        charged, uses = [0] * len(self._quotas), dict.fromkeys(self._nodes, 0)
        for key, node in self._nodes.items():
            charged[node.tenant] += node.is_charged
            if node.parent:
                uses[node.parent] += 1
            if node.slot != ABSENT and (self._table.get(key) != node.slot or self._table.ref_cnt[node.slot] < 1):
                raise IntegrityError("a retained block has left before its time")
        for retention in self.by_name.values():
            for end in retention.ends:
                uses[end] += 1
        if any(node.num_uses != uses[key] or not uses[key] for key, node in self._nodes.items()):
            raise IntegrityError("blocks are retained for nobody, or not as long as promised")
        if charged != self.num_charged or any(n > most for n, most in zip(charged, self._most, strict=True)):
            raise IntegrityError("a tenant has more blocks retained than it may")
        if self.num_absent != sum(node.is_charged and node.slot == ABSENT for node in self._nodes.values()):
            raise IntegrityError("the number of retained blocks that are absent is wrong")
        most = MAX_RETENTIONS // len(self._quotas)
        if +self._num_of != Counter(each.tenant for each in self.by_name.values()) or any(
            n > most for tenant, n in self._num_of.items() if tenant != _NOBODY
        ):
            raise IntegrityError("a tenant has more retentions than it may, or they are miscounted")
        if len(self._queue) > 2 * len(self.by_name) + QUEUE_SLACK + 1:
            raise IntegrityError("the queue of retentions is too long")


def _by_group(keys: Sequence[OffloadKey]) -> Iterable[tuple[int, list[OffloadKey]]]:
    """Returns each KV cache group with its keys, in order."""
    groups: dict[int, list[OffloadKey]] = {}
    for key in dict.fromkeys(keys):
        groups.setdefault(key_group_idx(key), []).append(key)
    return groups.items()

"""HintedBlocks: blocks that may leave before the policy is asked, because the clients that stored them said so."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt

from kvoffload.abc import Hints, IntegrityError, Slots
from kvoffload.cache.table import BlockTable

MAX_WAITS = 1 << 14
"""Chains whose next use is remembered, at most. Beyond it the oldest is forgotten."""
MIN_SCAN = 64
"""Blocks of a chain that ``take`` looks at together, at least."""
MAX_SCAN = 1 << 15
"""Blocks that one ``take`` looks at before it leaves the rest to the policy; each chain counts as MIN_SCAN at least."""
QUEUE_SLACK = 256
"""The queue is rebuilt when it has this many entries more than twice the number of waits."""
IDLE_QUANTILE = 0.9
"""Of all blocks, this share was used more recently than the *idle age*."""
IDLE_SAMPLE = 256
"""Blocks whose age is looked at to estimate the idle age."""
IDLE_SHARE = 1 / 64
"""The idle age is estimated again when this share of all blocks has been evicted."""
FACTOR = 2.0
"""Blocks leave early if their next use is further away than the idle age times this. Estimates of clients are rough,
and a block that leaves too early costs more than one that stays too long."""

_NEW, _SHARED = 0, 1
"""Owners of blocks that a running request has stored, and of blocks that belong to no session."""
_UNNAMED = 1 << 63
"""The first owner that is a single request without a session. Sessions are below, and above ``_SHARED``."""


@dataclass(slots=True, eq=False)
class _IdleAge:
    """The idle age of a tenant's blocks."""

    seconds: float = 0.0
    num_evicted: float = math.inf
    """Blocks that were evicted since it was estimated."""


@dataclass(slots=True, eq=False)
class _Wait:
    """The blocks of ``owner`` in a chain, whose next use is expected at ``returns_at``."""

    owner: int
    returns_at: float
    """Infinite if no use is expected."""
    slots: Slots
    """Tail first."""
    tenant: int
    num_passed: int = 0
    """Of these, how many have been looked at."""

    @property
    def num_left(self) -> int:
        return len(self.slots) - self.num_passed


class HintedBlocks:
    """Which blocks of ``table`` leave first, because of the hints of requests.

    A block belongs to the session whose request has stored it until a request of another session, or of none, uses it:
    from then on it is shared, and hints do not concern it. When a request with a hint ends, the blocks of its chain
    that belong to its session wait for their next use; the session's next request ends that. ``take`` chooses among the
    waiting blocks: the chain whose next use is furthest away first, from its tail. So hints can only make a session's
    own blocks leave earlier; other blocks stay longer.

    The records may be out of date: blocks may have left, and their slots may hold others. Owners tell: a slot
    that gets a new block has no owner until the request that has stored it ends.

    ``tenant_of``: the tenant of the block in each slot. No tenant loses a block for another one, even if two of them
    have a session of the same number. Before the first hint nothing is recorded.
    """

    def __init__(
        self,
        table: BlockTable,
        clock: Callable[[], float],
        tenant_of: npt.NDArray[np.int8],
    ) -> None:
        self._table = table
        self._clock = clock
        self._tenant_of = tenant_of
        self.has_begun = False
        """Whether a request has had hints."""
        self._owner = np.zeros(0, dtype=np.uint64)
        """Of the block in each slot."""
        self._used_at = np.zeros(0)
        """When it was stored or last used; before the first hint, that is not known."""
        self._waits: OrderedDict[int, _Wait] = OrderedDict()
        """By owner, the oldest first."""
        self._queues: dict[int, list[tuple[float, int, _Wait]]] = {}
        """By tenant: a heap of all waits, the last to end first. Waits that have ended may still be in it."""
        self._num_waiting = 0
        """Blocks left in all waits."""
        self._num_unexpected = 0
        """Waiting blocks of which no use is expected."""
        self._order = count()
        self._unnamed = count(_UNNAMED)
        self._idle_ages: dict[int, _IdleAge] = {}
        """By tenant."""

    @property
    def num_unexpected(self) -> int:
        """Blocks that will leave before the policy is asked, at most."""
        return self._num_unexpected

    def _begin(self) -> None:
        self.has_begun = True
        self._owner = np.full(self._table.num_blocks, _SHARED, dtype=np.uint64)
        self._used_at = np.full(self._table.num_blocks, -math.inf)

    def entered(self, slots: Slots) -> None:
        """Takes note of new blocks."""
        if self.has_begun:
            self._owner[slots] = _NEW
            self._used_at[slots] = self._clock()

    def used(self, slots: Slots, hints: Hints | None) -> None:
        """Takes note of a request that uses the blocks in ``slots``, each once."""
        if not self.has_begun:
            if hints is None:
                return
            self._begin()
        owner = None if hints is None else hints.session
        others = slots
        if owner is not None:
            self._end_wait(owner)
            others = slots[self._owner[slots] != owner]
        self._owner[others] = _SHARED
        self._used_at[slots] = self._clock()

    def ended(self, slots: Slots, stored: npt.NDArray[np.bool_], hints: Hints | None) -> None:
        """Takes note of the end of a request that has used ``slots``, its chain, tail first, each once. It has
        ``stored`` some of them itself."""
        if not self.has_begun:
            return
        now = self._clock()
        self._used_at[slots] = now
        stored_slots = slots[stored]
        if hints is None:
            self._owner[stored_slots] = _SHARED
            return
        owner = next(self._unnamed) if hints.session is None else hints.session
        owners = self._owner[stored_slots]
        self._owner[stored_slots] = np.where((owners == _NEW) | (owners == owner), np.uint64(owner), _SHARED)
        if hints.returns_in_s is not None:
            own = slots[self._owner[slots] == owner]
            tenant = int(self._tenant_of[own[0]]) if len(own) else 0
            self._begin_wait(_Wait(owner, now + hints.returns_in_s, own, tenant))

    def _begin_wait(self, wait: _Wait) -> None:
        self._end_wait(wait.owner)
        if not wait.num_left:
            return
        self._waits[wait.owner] = wait
        self._count(wait, wait.num_left)
        queue = self._queues.setdefault(wait.tenant, [])
        heapq.heappush(queue, (-wait.returns_at, next(self._order), wait))
        while len(self._waits) > MAX_WAITS or self._num_waiting > self._table.num_blocks:
            self._end_wait(next(iter(self._waits)))
        if len(queue) > 2 * len(self._waits) + QUEUE_SLACK:
            queue[:] = [entry for entry in queue if self._is_current(entry[2])]
            heapq.heapify(queue)

    def _count(self, wait: _Wait, more: int) -> None:
        self._num_waiting += more
        if wait.returns_at == math.inf:
            self._num_unexpected += more

    def _is_current(self, wait: _Wait) -> bool:
        return self._waits.get(wait.owner) is wait

    def _end_wait(self, owner: int) -> None:
        wait = self._waits.pop(owner, None)
        if wait is not None:
            self._count(wait, -wait.num_left)
            wait.slots = _NONE

    def take(self, n: int, busy: npt.NDArray[np.bool_], tenant: int = 0) -> Slots:
        """Returns up to ``n`` blocks of ``tenant`` that leave now, in the order in which they leave. None of them is
        busy."""
        now = self._clock()
        idle_age = self._idle_ages.setdefault(tenant, _IdleAge())
        idle_age.num_evicted += n
        taken: list[Slots] = []
        num_left = MAX_SCAN
        queue = self._queues.get(tenant, [])
        while n > 0 and queue and num_left > 0:
            wait = queue[0][2]
            num_left -= MIN_SCAN
            if not self._is_current(wait):
                heapq.heappop(queue)
                continue
            is_expected = wait.returns_at < math.inf
            if is_expected and wait.returns_at - now <= FACTOR * self._estimate(idle_age, tenant, now):
                break
            slots = wait.slots[wait.num_passed : wait.num_passed + max(n, MIN_SCAN)]
            num_left -= len(slots)
            may_leave = (self._owner[slots] == wait.owner) & self._table.is_loadable(slots) & ~busy[slots]
            may_leave &= self._tenant_of[slots] == tenant
            found = np.flatnonzero(may_leave)[:n]
            num_passed = int(found[-1]) + 1 if len(found) == n else len(slots)
            wait.num_passed += num_passed
            self._count(wait, -num_passed)
            leaving = slots[found]
            self._owner[leaving] = _SHARED
            taken.append(leaving)
            n -= len(leaving)
            if not wait.num_left:
                self._end_wait(wait.owner)
        return np.concatenate(taken) if taken else _NONE

    def _estimate(self, idle_age: _IdleAge, tenant: int, now: float) -> float:
        """Returns the idle age of a tenant's blocks, in seconds."""
        if idle_age.num_evicted >= IDLE_SHARE * self._table.num_blocks:
            idle_age.num_evicted = 0
            step = max(1, self._table.num_blocks // IDLE_SAMPLE)
            ages = (now - self._used_at[::step])[self._tenant_of[::step] == tenant]
            rank = int(IDLE_QUANTILE * (len(ages) - 1))
            idle_age.seconds = float(np.partition(ages, rank)[rank]) if len(ages) else math.inf
        return idle_age.seconds

    def check_integrity(self) -> None:
        """Raises IntegrityError if a bound is exceeded or a count is wrong."""
        waits = self._waits.values()
        unexpected = [wait.num_left for wait in waits if wait.returns_at == math.inf]
        if (sum(wait.num_left for wait in waits), sum(unexpected)) != (self._num_waiting, self._num_unexpected):
            raise IntegrityError("the number of waiting blocks is wrong")
        if self._num_waiting > self._table.num_blocks or len(self._waits) > MAX_WAITS:
            raise IntegrityError("more blocks or chains are waiting than hints may concern")
        queued = {id(wait) for queue in self._queues.values() for _, _, wait in queue}
        if len(queued) != sum(map(len, self._queues.values())) or not queued.issuperset(map(id, waits)):
            raise IntegrityError("a chain that waits is not in the queue")
        if max(map(len, self._queues.values()), default=0) > 2 * MAX_WAITS + QUEUE_SLACK:
            raise IntegrityError("the queue of waiting chains is too long")


_NONE = np.empty(0, dtype=np.int64)

"""HintedBlocks: blocks that may leave before the policy is asked, because the clients that stored them said so."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt

from kvoffload.abc import Hints, IntegrityError, Slots
from kvoffload.cache.table import BlockTable

MAX_DROPPED = 1 << 14
"""Sessions whose end is remembered, at most. Beyond it the oldest is forgotten."""
MIN_SCAN = 64
"""Blocks of a chain that ``take`` looks at together, at least."""
MAX_SCAN = 1 << 15
"""Blocks that one ``take`` looks at before it leaves the rest to the policy; each chain counts as MIN_SCAN at least."""

_NEW, _SHARED = 0, 1
"""Owners of blocks that a running request has stored, and of blocks that belong to no session."""
_UNNAMED = 1 << 63
"""The first owner that is a single request without a session. Sessions are below, and above ``_SHARED``."""


@dataclass(slots=True, eq=False)
class _Dropped:
    """The blocks in a chain whose session has ended."""

    slots: Slots
    """Those that have not been looked at yet, tail first."""
    tenant: int


class HintedBlocks:
    """Which blocks of ``table`` leave first, because of the hints of requests.

    A block belongs to the session whose request has stored it until a request of another session, or of none, uses it:
    from then on it is shared, and hints do not concern it. When the last request of a session ends, the blocks of its
    chain that belong to the session are dropped: ``take`` returns them, the oldest chain first, from its tail. A
    further request of the session undoes that. So hints can only make a session's own blocks leave earlier; other
    blocks stay longer.

    The records may be out of date: blocks may have left, and their slots may hold others. Owners tell: a slot
    that gets a new block has no owner until the request that has stored it ends.

    ``tenant_of``: the tenant of the block in each slot. No tenant loses a block for another one, even if two of them
    have a session of the same number. Before the first hint it need not be called.
    """

    def __init__(self, table: BlockTable, tenant_of: npt.NDArray[np.int8]) -> None:
        self._table = table
        self._tenant_of = tenant_of
        self.has_begun = False
        """Whether a request has had hints."""
        self._owner = np.zeros(0, dtype=np.uint64)
        """Of the block in each slot."""
        self._dropped: OrderedDict[int, _Dropped] = OrderedDict()
        """By owner, the oldest first."""
        self._of_tenant: dict[int, OrderedDict[int, _Dropped]] = {}
        """The same by tenant."""
        self.num_dropped = 0
        """Blocks that will leave before the policy is asked, at most."""
        self._unnamed = count(_UNNAMED)

    def entered(self, slots: Slots) -> None:
        """Takes note of new blocks."""
        self._owner[slots] = _NEW

    def used(self, slots: Slots, hints: Hints | None) -> None:
        """Takes note of a request that uses the blocks in ``slots``, each once."""
        if not self.has_begun:
            self.has_begun = True
            self._owner = np.full(self._table.num_blocks, _SHARED, dtype=np.uint64)
        owner = None if hints is None else hints.session
        others = slots
        if owner is not None:
            self._forget(owner)
            others = slots[self._owner[slots] != owner]
        self._owner[others] = _SHARED

    def ended(self, slots: Slots, stored: npt.NDArray[np.bool_], hints: Hints | None) -> None:
        """Takes note of the end of a request that has used ``slots``, its chain, tail first, each once. It has
        ``stored`` some of them itself."""
        stored_slots = slots[stored]
        if hints is None:
            self._owner[stored_slots] = _SHARED
            return
        owner = next(self._unnamed) if hints.session is None else hints.session
        owners = self._owner[stored_slots]
        self._owner[stored_slots] = np.where((owners == _NEW) | (owners == owner), np.uint64(owner), _SHARED)
        if hints.drop:
            self._drop(owner, slots[self._owner[slots] == owner])

    def _drop(self, owner: int, slots: Slots) -> None:
        self._forget(owner)
        if not len(slots):
            return
        dropped = _Dropped(slots, int(self._tenant_of[slots[0]]))
        self._dropped[owner] = dropped
        self._of_tenant.setdefault(dropped.tenant, OrderedDict())[owner] = dropped
        self.num_dropped += len(slots)
        while len(self._dropped) > MAX_DROPPED or self.num_dropped > self._table.num_blocks:
            self._forget(next(iter(self._dropped)))

    def _forget(self, owner: int) -> None:
        dropped = self._dropped.pop(owner, None)
        if dropped is not None:
            del self._of_tenant[dropped.tenant][owner]
            self.num_dropped -= len(dropped.slots)

    def take(self, n: int, busy: npt.NDArray[np.bool_], tenant: int = 0) -> Slots:
        """Returns up to ``n`` blocks of ``tenant`` that leave now, in the order in which they leave. None of them is
        busy."""
        taken = [np.empty(0, dtype=np.int64)]
        num_left = MAX_SCAN
        chains = self._of_tenant.get(tenant, OrderedDict())
        while n > 0 and chains and num_left > 0:
            owner, chain = next(iter(chains.items()))
            slots = chain.slots[: max(n, MIN_SCAN)]
            num_left -= MIN_SCAN + len(slots)
            may_leave = (self._owner[slots] == owner) & self._table.is_loadable(slots) & ~busy[slots]
            may_leave &= self._tenant_of[slots] == tenant
            found = np.flatnonzero(may_leave)[:n]
            num_passed = int(found[-1]) + 1 if len(found) == n else len(slots)
            chain.slots = chain.slots[num_passed:]
            self.num_dropped -= num_passed
            leaving = slots[found]
            self._owner[leaving] = _SHARED
            taken.append(leaving)
            n -= len(leaving)
            if not len(chain.slots):
                self._forget(owner)
        return np.concatenate(taken)

    def check_integrity(self) -> None:
        """Raises IntegrityError if a bound is exceeded or a count is wrong."""
        if sum(len(dropped.slots) for dropped in self._dropped.values()) != self.num_dropped:
            raise IntegrityError("the number of dropped blocks is wrong")
        if self.num_dropped > self._table.num_blocks or len(self._dropped) > MAX_DROPPED:
            raise IntegrityError("more blocks or sessions are dropped than hints may concern")
        if {
            owner: each for of_tenant in self._of_tenant.values() for owner, each in of_tenant.items()
        } != self._dropped:
            raise IntegrityError("a chain that is dropped is not known of its tenant")

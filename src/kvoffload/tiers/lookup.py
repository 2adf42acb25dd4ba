"""TierLookup: which blocks the host and the lower tiers hold, whether or not a tier answers in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.abc import MissReason, OffloadKey, Slots, States
from kvoffload.abc.tier import HIT, MISS, PENDING, RETRY
from kvoffload.cache.keys import key_group_idx
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.misses import MissMemory
from kvoffload.tiers.promotion import Promotion
from kvoffload.tiers.state import TierState

MAX_UNANSWERED = 1 << 16
"""Keys remembered because a tier has not answered for them."""
MISS_TTL_S = 1.0
"""How long a key counts as missing after a tier has not answered for it within the deadline."""
FIRST_CHUNK = 256
"""Keys that are looked up at once at first; doubled while all are found."""


class Run(NamedTuple):
    """The leading blocks of a chain that the host or a tier holds."""

    num_ready: int
    """Leading blocks that the host can load now."""
    below: list[OffloadKey]
    """Blocks behind them that must be promoted first, as many as the request may have."""
    is_unanswered: bool
    """Whether a tier must be asked again for the block at which the run ends."""


class TierLookup:
    """Looks up keys in ``host`` and then in ``tiers``, the fastest first.

    A tier may answer that it does not know yet. If that takes longer than ``deadline_s``, the block counts as missing.
    """

    def __init__(
        self,
        host: PolicyOffloadingManager,
        tiers: Sequence[TierState],
        deadline_s: float,
        reasons: MissMemory,
        clock: Callable[[], float],
    ) -> None:
        self._host = host
        self._tiers = tiers
        self._deadline_s = deadline_s
        self._reasons = reasons
        self._clock = clock
        self._asked_at: dict[OffloadKey, float] = {}
        """When a tier was first asked for each key that it has not answered for, the earliest first."""
        self._is_unanswered = False

    def take_unanswered(self) -> bool:
        """Returns whether, since the last call, a tier has left a question open that must be asked again."""
        is_unanswered, self._is_unanswered = self._is_unanswered, False
        return is_unanswered

    def find_run(
        self,
        keys: Sequence[OffloadKey],
        promotion: Promotion | None,
        room_for: Callable[[Promotion | None, int], int],
    ) -> Run:
        """Returns the leading blocks of ``keys``, all of one KV cache group, that the request with ``promotion`` can
        have. ``room_for`` says how many of the group may be promoted."""
        num_ready = room = len(keys)
        found: list[OffloadKey] = []
        start, size, is_unanswered = 0, FIRST_CHUNK, False
        while start < len(keys) and len(found) < room:
            chunk = keys[start : start + size]
            states = self.host_states(chunk, promotion)
            below = np.flatnonzero(states != HIT)
            if len(below):
                if num_ready == len(keys):
                    num_ready = start + int(below[0])
                    room = max(0, room_for(promotion, key_group_idx(keys[num_ready])))
                states[below] = self.states_below([chunk[i] for i in below.tolist()], states[below])
                missing = np.flatnonzero(states != HIT)
                end = int(missing[0]) if len(missing) else len(chunk)
                found += [chunk[i] for i in below.tolist() if i < end]
                if len(missing):
                    is_unanswered = bool(states[end] == RETRY)
                    break
            start, size = start + size, size * 2
        return Run(num_ready, found[:room], is_unanswered)

    def host_states(self, keys: Sequence[OffloadKey], promotion: Promotion | None) -> States:
        """Returns the states of ``keys`` in the host. Those that are pinned for the request are not looked up again."""
        if promotion is None or not promotion.pinned:
            return self._host.states(keys)
        is_pinned = np.fromiter(map(promotion.pinned.__contains__, keys), np.bool_, len(keys))
        states = np.full(len(keys), HIT, dtype=np.uint8)
        others = np.flatnonzero(~is_pinned)
        if len(others):
            states[others] = self._host.states([keys[i] for i in others.tolist()])
        return states

    def states_below(self, keys: Sequence[OffloadKey], host_states: States) -> States:
        """Returns the state of each key, none of which the host can load now; ``host_states`` are theirs in the host.

        HIT: being read into the host, or held by a tier that can be read. RETRY: a tier does not know yet. PENDING:
        being stored from the device. MISS: none of these.
        """
        now = self._clock()
        states = np.where(host_states == PENDING, host_states, MISS).astype(np.uint8)
        is_reading = np.zeros(len(keys), dtype=np.bool_)
        for tier in self._tiers:
            tier.suspend_if_hanging(now)
            if tier.reads and (tier.breaker.may_probe or not tier.reads.keys().isdisjoint(keys)):
                self._find_reads(tier, keys, states, is_reading)
        for tier in self._tiers:
            asked = np.flatnonzero((states == MISS) & ~is_reading)
            if len(asked) and tier.breaker.can_read:
                names = [keys[i] for i in asked.tolist()] if len(asked) < len(keys) else keys
                states[asked] = self._without_late_answers(names, tier.tier.contains(names), now)
        return states

    @staticmethod
    def _find_reads(
        tier: TierState, keys: Sequence[OffloadKey], states: States, is_reading: npt.NDArray[np.bool_]
    ) -> None:
        """Notes which of ``keys`` the tier is reading. If it is suspended, another key is noted for a test read."""
        for i, batch in enumerate(map(tier.reads.get, keys)):
            if batch is not None:
                is_reading[i] = True
                is_coming = tier.breaker.can_read and not batch.is_overdue
                states[i] = HIT if is_coming else MISS
            elif tier.probe is None and tier.breaker.may_probe:
                tier.probe = keys[i]

    def _without_late_answers(self, keys: Sequence[OffloadKey], states: States, now: float) -> States:
        """Returns ``states`` with MISS for keys that a tier has not answered for within the deadline."""
        unanswered: Slots = np.flatnonzero(states == RETRY)
        for i in unanswered.tolist():
            key = keys[i]
            since = self._asked_at.get(key)
            if since is None or now - since > self._deadline_s + MISS_TTL_S:
                self._asked_at.pop(key, None)
                self._asked_at[key] = since = now
                while len(self._asked_at) > MAX_UNANSWERED:
                    del self._asked_at[next(iter(self._asked_at))]
            self._is_unanswered = True
            if now - since >= self._deadline_s:
                states[i] = MISS
                self._reasons.record([key], MissReason.NOT_IN_TIME)
        return states

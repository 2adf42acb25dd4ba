"""TierLookup: which blocks the host and the lower tiers hold, whether or not a tier answers in time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.abc import MissReason, OffloadKey, States
from kvoffload.abc.tier import HIT, MISS, PENDING, RETRY
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.misses import MissMemory
from kvoffload.tiers.promotion import NONE, Located, Promotion, Sources
from kvoffload.tiers.state import TierState

MAX_UNANSWERED = 1 << 16
"""Keys remembered per tier because it has not answered for them."""
MISS_TTL_S = 1.0
"""How long a key counts as missing after a tier has not answered for it within the deadline."""
FIRST_CHUNK = 256
"""Keys that are looked up at once at first; doubled while all are found."""


class Run(NamedTuple):
    """The leading blocks of a chain that the host or a tier holds."""

    num_ready: int
    """Leading blocks that the host can load now."""
    below: Located
    """Blocks behind them that must be promoted first, as many as the request may have."""
    is_unanswered: bool
    """Whether a tier must be asked again for the block at which the run ends."""


class Last(NamedTuple):
    """The last block of a list that the host or a tier holds, or may hold."""

    at: int
    """Its index in the list, or -1."""
    in_host: int
    """The index of the last block that the host can load now, or -1."""
    below: Located
    """The block, if a tier holds it. It must be promoted first."""


class OpenQuestions:
    """The keys for which one tier was asked and has not answered. Each may take ``deadline_s``."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._asked_at: OrderedDict[OffloadKey, float] = OrderedDict()
        """When the tier was first asked for each key, the earliest first."""
        self._failed_at = float("-inf")
        """When the latest keys were asked for of which an answer was late. Keys that are asked for together count as
        one lookup."""

    def __len__(self) -> int:
        return len(self._asked_at)

    def forget(self, keys: Sequence[OffloadKey]) -> None:
        """Takes in that the tier has answered for ``keys``."""
        if self._asked_at:
            for key in keys:
                self._asked_at.pop(key, None)

    def expire(self, now: float) -> None:
        """Forgets the keys that count as missing no longer: nobody may ask for them again."""
        while self._asked_at and now - next(iter(self._asked_at.values())) > self._deadline_s + MISS_TTL_S:
            self._asked_at.popitem(last=False)

    def find_late(self, keys: Sequence[OffloadKey], now: float) -> tuple[list[bool], int]:
        """Takes in that the tier does not know yet whether it holds ``keys``. Returns for which of them it is late, and
        how many lookups have failed by that."""
        self.expire(now)
        is_late, failed = [], set[float]()
        for key in keys:
            since = self._asked_at.setdefault(key, now)
            is_late.append(now - since >= self._deadline_s)
            if is_late[-1] and since > self._failed_at:
                failed.add(since)
        while len(self._asked_at) > MAX_UNANSWERED:
            self._asked_at.popitem(last=False)
        self._failed_at = max(failed, default=self._failed_at)
        return is_late, len(failed)


class TierLookup:
    """Looks up keys in ``host`` and then in ``tiers``, the fastest first.

    A tier may answer that it does not know yet. If that takes longer than its deadline, the block counts as missing,
    and the lookup as failed. ``deadlines_s``: one per tier.
    """

    def __init__(
        self,
        host: PolicyOffloadingManager,
        tiers: Sequence[TierState],
        deadlines_s: Sequence[float],
        reasons: MissMemory,
        clock: Callable[[], float],
    ) -> None:
        self._host = host
        self._tiers = tiers
        self._open = list(map(OpenQuestions, deadlines_s))
        self._reasons = reasons
        self._clock = clock
        self._is_unanswered = False

    def take_unanswered(self) -> bool:
        """Returns whether, since the last call, a tier has left a question open that must be asked again."""
        now = self._clock()
        for questions in self._open:
            questions.expire(now)
        is_unanswered, self._is_unanswered = self._is_unanswered, False
        return is_unanswered

    def find_run(
        self,
        keys: Sequence[OffloadKey],
        promotion: Promotion | None,
        room_for: Callable[[Promotion | None, OffloadKey], int],
    ) -> Run:
        """Returns the leading blocks of ``keys``, all of one KV cache group, that the request with ``promotion`` can
        have. ``room_for`` says how many of the group of a key may be promoted."""
        num_ready = room = len(keys)
        found: list[OffloadKey] = []
        sources: list[Sources] = []
        start, size, is_unanswered, expecting = 0, FIRST_CHUNK, False, set[int]()
        while start < len(keys) and len(found) < room:
            chunk = keys[start : start + size]
            states = self.host_states(chunk, promotion)
            below = np.flatnonzero(states != HIT)
            if len(below):
                if num_ready == len(keys):
                    num_ready = start + int(below[0])
                    room = max(0, room_for(promotion, keys[num_ready]))
                states[below], holders = self.states_below(keys, start + below, states[below], expecting)
                missing = np.flatnonzero(states != HIT)
                end = int(missing[0]) if len(missing) else len(chunk)
                num_found = int(np.searchsorted(below, end))
                found += [chunk[i] for i in below[:num_found].tolist()]
                sources.append(holders[:num_found])
                if len(missing):
                    is_unanswered = bool(states[end] == RETRY)
                    break
            start, size = start + size, size * 2
        holders = np.concatenate(sources) if sources else np.zeros(0, dtype=np.int8)
        return Run(num_ready, Located(found[:room], holders[:room]), is_unanswered)

    def find_last(self, keys: Sequence[OffloadKey], promotion: Promotion | None) -> Last:
        """Returns the last of ``keys`` that the host or a tier holds, or for which a tier must be asked again. Tiers
        are asked only for those behind the last one in the host."""
        states = self.host_states(keys, promotion)
        ready = np.flatnonzero(states == HIT)
        in_host = int(ready[-1]) if len(ready) else -1
        behind = np.arange(in_host + 1, len(keys))
        if len(behind):
            found, sources = self.states_below(keys, behind, states[behind], set())
            possible = np.flatnonzero((found == HIT) | (found == RETRY))
            if len(possible):
                last = int(possible[-1])
                at = in_host + 1 + last
                below = Located([keys[at]], sources[[last]]) if found[last] == HIT else NONE
                return Last(at, in_host, below)
        return Last(in_host, in_host, NONE)

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

    def states_below(
        self, chain: Sequence[OffloadKey], at: npt.NDArray[np.intp], host_states: States, expecting: set[int]
    ) -> tuple[States, Sources]:
        """Returns states and sources of the keys of ``chain`` with the indices ``at``, none of which the host can load
        now; ``host_states`` are theirs in the host. ``expecting``: the tiers that know already that the rest of the
        chain will be looked up; others are added.

        HIT: being read into the host, or held by a tier that can be read. RETRY: a tier does not know yet. PENDING:
        being stored from the device. MISS: none of these.
        """
        now = self._clock()
        keys = [chain[i] for i in at.tolist()]
        states = np.where(host_states == PENDING, host_states, MISS).astype(np.uint8)
        sources = np.zeros(len(keys), dtype=np.int8)
        is_reading = np.zeros(len(keys), dtype=np.bool_)
        for tier in self._tiers:
            if tier.may_probe and tier.probe is None:
                tier.choose_probe(next((key for key in keys if key not in tier.reads), None), now)
            if tier.reads and not tier.reads.keys().isdisjoint(keys):
                self._find_reads(tier, keys, states, sources, is_reading)
        for tier in self._tiers:
            # A slower tier is asked at the same time as one that does not know yet.
            asked = np.flatnonzero(((states == MISS) | (states == RETRY)) & ~is_reading)
            if len(asked) and tier.can_read:
                if tier.index not in expecting:
                    expecting.add(tier.index)
                    tier.tier.expect(chain[int(at[asked[0]]) :])
                names = [keys[i] for i in asked.tolist()] if len(asked) < len(keys) else keys
                answers = self._without_late_answers(tier, names, tier.tier.contains(names), now)
                is_news = states[asked] == MISS
                states[asked[is_news]] = answers[is_news]
                sources[asked[is_news & (answers == HIT)]] = tier.index
        self._is_unanswered |= bool((states == RETRY).any())
        return states, sources

    @staticmethod
    def _find_reads(
        tier: TierState,
        keys: Sequence[OffloadKey],
        states: States,
        sources: Sources,
        is_reading: npt.NDArray[np.bool_],
    ) -> None:
        """Notes which of ``keys`` the tier is reading."""
        for i, batch in enumerate(map(tier.reads.get, keys)):
            if batch is not None:
                is_reading[i] = True
                states[i] = HIT if tier.can_read and not batch.is_overdue else MISS
                sources[i] = tier.index

    def _without_late_answers(self, tier: TierState, keys: Sequence[OffloadKey], states: States, now: float) -> States:
        """Returns ``states`` with MISS for keys that the tier has not answered for within the deadline."""
        questions, is_open = self._open[tier.index], states == RETRY
        if not is_open.any():
            questions.forget(keys)
        else:
            unanswered = np.flatnonzero(is_open)
            questions.forget([keys[i] for i in np.flatnonzero(~is_open).tolist()])
            names = [keys[i] for i in unanswered.tolist()]
            is_late, num_failed = questions.find_late(names, now)
            late = unanswered[is_late]
            if len(late):
                states = states.copy()
                states[late] = MISS
                self._reasons.record([keys[i] for i in late.tolist()], MissReason.NOT_IN_TIME)
            if num_failed:
                tier.count("lookup_failures", num_failed)
                tier.lookups_failed(num_failed, now)
        return states

"""Lookups in the manager: which blocks the host and the lower tiers hold, whether or not a tier answers in time, and
which of them are loaded, because that is faster than computing them.

Each answers one question of ``connector/hits.py`` about keys; ``connector/lookups.py`` answers the request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.abc import Awaited, KVGroup, Miss, MissReason, Need, OffloadKey, States
from kvoffload.abc.tier import HIT, MISS, PENDING, RETRY
from kvoffload.cache.keys import key_group_idx
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.misses import MissMemory
from kvoffload.tiering.health import TierState
from kvoffload.tiering.plan import ChainLayout
from kvoffload.tiering.promoter import Promoter
from kvoffload.tiering.promotion import NONE, Located, Promotion, Sources
from kvoffload.tiering.rates import LoadOrCompute

LOOK_AGAIN_S = 0.005
"""The least time between two looks for a block that another server hands over."""
LOOK_AGAIN_SHARE = 0.25
"""The share of the time for which the request has waited, after which the tier looks again if that is longer."""
FIRST_CHUNK = 256
"""Keys that are looked up at once at first; doubled while all are found."""


@dataclass(slots=True, eq=False)
class TierSearch:
    """A lookup in ``host`` and then in ``tiers``, the fastest first, by a request with ``promotion``."""

    host: PolicyOffloadingManager
    tiers: Sequence[TierState]
    reasons: MissMemory
    now: float
    promotion: Promotion | None = None
    awaited: Awaited | None = None
    """What another server hands over to the request."""
    expecting: set[int] = field(default_factory=set)
    """The tiers that know already that the rest of the chain will be looked up."""
    is_unanswered: bool = False
    """Whether some tier must be asked again."""


class FoundRun(NamedTuple):
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


def find_run(search: TierSearch, keys: Sequence[OffloadKey], promoter: Promoter) -> FoundRun:
    """Returns the leading blocks of ``keys``, all of one KV cache group, that the request can have."""
    num_ready = room = len(keys)
    found: list[OffloadKey] = []
    sources: list[Sources] = []
    start, size, is_unanswered = 0, FIRST_CHUNK, False
    while start < len(keys) and len(found) < room:
        chunk = keys[start : start + size]
        states = host_states(search, chunk)
        below = np.flatnonzero(states != HIT)
        if len(below):
            if num_ready == len(keys):
                num_ready = start + int(below[0])
                room = max(0, promoter.room_for(search.promotion, keys[num_ready]))
            states[below], holders = states_below(search, keys, start + below, states[below])
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
    return FoundRun(num_ready, Located(found[:room], holders[:room]), is_unanswered)


def find_last(search: TierSearch, keys: Sequence[OffloadKey]) -> Last:
    """Returns the last of ``keys`` that the host or a tier holds, or for which a tier must be asked again. Tiers are
    asked only for those behind the last one in the host."""
    states = host_states(search, keys)
    ready = np.flatnonzero(states == HIT)
    in_host = int(ready[-1]) if len(ready) else -1
    behind = np.arange(in_host + 1, len(keys))
    if len(behind):
        found, sources = states_below(search, keys, behind, states[behind])
        possible = np.flatnonzero((found == HIT) | (found == RETRY))
        if len(possible):
            last = int(possible[-1])
            at = in_host + 1 + last
            return Last(at, in_host, Located([keys[at]], sources[[last]]) if found[last] == HIT else NONE)
    return Last(in_host, in_host, NONE)


def host_states(search: TierSearch, keys: Sequence[OffloadKey]) -> States:
    """Returns the states of ``keys`` in the host. Those that are pinned for the request are not looked up again."""
    pinned = () if search.promotion is None else search.promotion.pinned
    if not pinned:
        return search.host.table.states(keys)
    is_pinned = np.fromiter(map(pinned.__contains__, keys), np.bool_, len(keys))
    states = np.full(len(keys), HIT, dtype=np.uint8)
    others = np.flatnonzero(~is_pinned)
    if len(others):
        states[others] = search.host.table.states([keys[i] for i in others.tolist()])
    return states


def states_below(
    search: TierSearch, chain: Sequence[OffloadKey], at: npt.NDArray[np.intp], in_host: States
) -> tuple[States, Sources]:
    """Returns states and sources of the keys of ``chain`` with the indices ``at``, none of which the host can load now;
    ``in_host`` are their states there.

    HIT: being read into the host, or held by a tier that can be read. RETRY: a tier does not know yet. PENDING: being
    stored from the device. MISS: none of these.
    """
    keys = [chain[i] for i in at.tolist()]
    states = np.where(in_host == PENDING, in_host, MISS).astype(np.uint8)
    sources = np.zeros(len(keys), dtype=np.int8)
    is_reading = np.zeros(len(keys), dtype=np.bool_)
    for tier in search.tiers:
        if tier.probe is None and tier.read_health.may_test:
            tier.choose_probe(next((key for key in keys if key not in tier.reads), None), search.now)
        if tier.reads and not tier.reads.keys().isdisjoint(keys):
            for i, batch in enumerate(map(tier.reads.get, keys)):
                if batch is not None:
                    is_reading[i] = True
                    states[i] = HIT if tier.can_read and not batch.is_overdue else MISS
                    sources[i] = tier.index
    for tier in search.tiers:
        # A slower tier is asked at the same time as one that does not know yet.
        asked = np.flatnonzero(((states == MISS) | (states == RETRY)) & ~is_reading)
        if len(asked) and tier.can_read:
            ahead = () if tier.index in search.expecting else chain[int(at[asked[0]]) :]
            search.expecting.add(tier.index)
            names = [keys[i] for i in asked.tolist()] if len(asked) < len(keys) else keys
            answers = _in_time(search, tier, names, tier.tier.contains(names, ahead))
            if search.awaited is not None and tier.tier.is_shared:
                answers = _until_handed_over(search, search.awaited, tier, names, answers)
            is_news = states[asked] == MISS
            states[asked[is_news]] = answers[is_news]
            sources[asked[is_news & (answers == HIT)]] = tier.index
    search.is_unanswered |= bool((states == RETRY).any())
    return states, sources


def _in_time(search: TierSearch, tier: TierState, keys: Sequence[OffloadKey], states: States) -> States:
    """Returns ``states``, the tier's answers, with MISS for keys for which it has no answer within the deadline."""
    is_open = states == RETRY
    if not is_open.any():
        tier.questions.forget(keys)
        return states
    unanswered = np.flatnonzero(is_open)
    tier.questions.forget([keys[i] for i in np.flatnonzero(~is_open).tolist()])
    is_late, num_failed = tier.questions.find_late([keys[i] for i in unanswered.tolist()], search.now)
    late = unanswered[is_late]
    if len(late):
        states = states.copy()
        states[late] = MISS
        search.reasons.record([keys[i] for i in late.tolist()], MissReason.NOT_ANSWERED)
    if num_failed:
        tier.count("lookup_failures", num_failed)
        tier.read_health.lookups_failed(num_failed, search.now)
    return states


def _until_handed_over(
    search: TierSearch, awaited: Awaited, tier: TierState, keys: Sequence[OffloadKey], states: States
) -> States:
    """Returns ``states``, the tier's answers, with RETRY for keys that another server is still to write there, and has
    the tier look for them."""
    if search.now >= awaited.until:
        return states
    lacking = [i for i in np.flatnonzero(states == MISS).tolist() if keys[i] in awaited.keys]
    if lacking:
        coming = [keys[i] for i in lacking]
        search.reasons.record(coming[:1], MissReason.NOT_IN_TIME)
        pause_s = max(LOOK_AGAIN_S, (search.now - awaited.since) * LOOK_AGAIN_SHARE)
        tier.tier.look_for(coming, awaited.places.get(tier.name, ""), pause_s)
        states = states.copy()
        states[lacking] = RETRY
    return states


class LoadGate:
    """Judges hits by ``rates``, by what ``tiers`` are reading already, and by what ``promoter`` has queued.

    A state saves nothing by itself. So it is first compared with all tokens up to it, and then the KV of these tokens
    is judged together with the states that the request wants.
    """

    def __init__(
        self,
        tiers: Sequence[TierState],
        groups: Sequence[KVGroup],
        promoter: Promoter,
        rates: LoadOrCompute,
        reasons: MissMemory,
        clock: Callable[[], float],
    ) -> None:
        self._tiers = tiers
        self._layout = ChainLayout(groups)
        self._num_full = max(1, sum(group.is_full for group in groups))
        self._promoter = promoter
        self._rates = rates
        self._reasons = reasons
        self._clock = clock

    def worth_loading(self, below: Located, promotion: Promotion | None) -> Located:
        """Returns the leading blocks of a run that are to be loaded; the rest is faster to compute. With states all of
        it is loaded, or nothing: then the request that waits with ``promotion`` does not want its states any more."""
        num_ahead, num_states = [], []
        for tier in self._tiers:
            # What the request itself wants is judged with its blocks. Groups with full attention share its states.
            its_own = 0 if promotion is None else int(promotion.num_wanted[tier.index])
            num_ahead.append(self._num_ahead(tier) - its_own)
            num_states.append(self._num_states(promotion, tier) / self._num_full if its_own else 0.0)
        num_loaded = self._rates.num_worth_loading(
            key_group_idx(below.keys[0]),
            below.sources,
            num_ahead,
            [tier.estimator for tier in self._tiers],
            self._clock(),
            num_states if self._layout.num_states else None,
        )
        self._reasons.record(below.keys[num_loaded : num_loaded + 1], MissReason.FASTER_TO_COMPUTE)
        if not num_loaded and promotion is not None and promotion.is_waiting:
            self._promoter.withdraw(promotion)
        return Located(below.keys[:num_loaded], below.sources[:num_loaded])

    def is_state_worth_loading(self, last: Last) -> bool:
        """Returns whether a state in a tier takes less time to load than the tokens to compute between it and the last
        one in the host."""
        tier = self._tiers[int(last.below.sources[0])]
        is_worth = self._rates.is_worth_loading(
            (last.at - last.in_host) * self._layout.unit_tokens,
            self._layout.num_states,
            self._num_ahead(tier),
            tier.estimator,
            self._clock(),
        )
        if not is_worth:
            self._reasons.record(last.below.keys, MissReason.FASTER_TO_COMPUTE)
        return is_worth

    def _num_ahead(self, tier: TierState) -> int:
        """Returns how many blocks the tier is to read before others."""
        return tier.num_reading + self._promoter.num_queued(tier)

    def _num_states(self, promotion: Promotion | None, tier: TierState) -> int:
        """Returns how many states of the tier the request wants."""
        if promotion is None or not self._layout.num_states:
            return 0
        groups, wanted = self._layout.groups, promotion.wanted
        return sum(
            groups[key_group_idx(key)].state
            for key, source in zip(wanted.keys, wanted.sources.tolist(), strict=True)
            if source == tier.index
        )


def find_hit(
    search: TierSearch, keys: Sequence[OffloadKey], need: Need, promoter: Promoter, gate: LoadGate
) -> tuple[States, Located]:
    """Answers a request that may wait. Returns the states of ``keys``, and the blocks to be promoted for it."""
    find = {Need.RUN: _look_up_run, Need.LAST: _look_up_last, Need.ALL: _look_up_all}[need]
    return find(search, keys, promoter, gate)


def _look_up_run(
    search: TierSearch, keys: Sequence[OffloadKey], promoter: Promoter, gate: LoadGate
) -> tuple[States, Located]:
    run = find_run(search, keys, promoter)
    states = np.zeros(len(keys), dtype=np.uint8)
    states[: run.num_ready] = HIT
    worth = run.below
    if run.below.keys and search.awaited is None:
        worth = gate.worth_loading(run.below, search.promotion)
    if worth.keys or (run.is_unanswered and not run.below.keys):
        states[run.num_ready] = RETRY
    return states, worth


def _look_up_all(
    search: TierSearch, keys: Sequence[OffloadKey], promoter: Promoter, gate: LoadGate
) -> tuple[States, Located]:
    states, coming = host_states(search, keys), NONE
    below = np.flatnonzero(states != HIT)
    if len(below):
        found, sources = states_below(search, keys, below, states[below])
        is_found = found == HIT
        if is_found.any() and (is_found | (found == RETRY)).all():
            there = Located([keys[i] for i in below[is_found].tolist()], sources[is_found])
            coming = _with_room(search, there, promoter)
            if not coming.keys:
                found[is_found] = MISS
        found[found == HIT] = RETRY
        states[below] = found
    return states, coming


def _look_up_last(
    search: TierSearch, keys: Sequence[OffloadKey], promoter: Promoter, gate: LoadGate
) -> tuple[States, Located]:
    last, coming = find_last(search, keys), NONE
    states = np.zeros(len(keys), dtype=np.uint8)
    if last.in_host >= 0:
        states[last.in_host] = HIT
    if last.below.keys and (search.awaited is not None or gate.is_state_worth_loading(last)):
        coming = _with_room(search, last.below, promoter)
    if last.at > last.in_host and (coming.keys or not last.below.keys):
        states[last.at] = RETRY
    return states, coming


def _with_room(search: TierSearch, coming: Located, promoter: Promoter) -> Located:
    """Returns ``coming`` if it may be promoted with what the request waits for. If not, remembers why it is missing."""
    wanted = set(coming.keys).union(() if search.promotion is None else search.promotion.wanted.keys)
    if len(wanted) <= promoter.room_for(search.promotion, next(iter(wanted), b""), in_all=True):
        return coming
    search.reasons.record(coming.keys, MissReason.TOO_LARGE)
    return NONE


def explain_miss(key: OffloadKey, host: Miss, own: Miss, tiers: Sequence[TierState]) -> Miss:
    """Returns why ``key`` cannot be loaded now. ``host``: why the host lacks it; ``own``: why it was not promoted."""
    own = replace(own, policy=host.policy)
    for tier in tiers:
        if key in tier.reads or (tier.can_read and tier.tier.contains([key])[0] == HIT):
            if own.reason in (MissReason.FASTER_TO_COMPUTE, MissReason.TOO_LARGE):
                return replace(own, tier=tier.name)
            return Miss(MissReason.NOT_IN_TIME, tier=tier.name, policy=host.policy)
    if host.reason is MissReason.BEING_WRITTEN or own.age_s is None:
        return host
    return own if host.age_s is None or own.age_s <= host.age_s else host

"""Which blocks a request can have: what the host and the lower tiers hold, whether or not a tier answers in time, and
what of it is loaded, because there is room for it and that is faster than computing it.

Each answers one question of ``connector/lookups.py`` about keys, which answers the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from kvoffload.abc import Awaited, Keys, Miss, MissReason, Need, OffloadKey, States
from kvoffload.abc.tier import HIT, MISS, PENDING, RETRY
from kvoffload.cache.keys import key_group_idx, num_of_group
from kvoffload.tiering.common import Common
from kvoffload.tiering.health import LowerTier
from kvoffload.tiering.plan import ChainLayout
from kvoffload.tiering.rates import MovingRate, ReadEstimator
from kvoffload.tiering.reads import PROMOTION_SHARE, Wait
from kvoffload.tiering.waits import Waits

LOOK_AGAIN_S = 0.005
"""The least time between two looks for a block that another server hands over."""
LOOK_AGAIN_SHARE = 0.25
"""The share of the time for which the request has waited, after which the tier looks again if that is longer."""
RATE_TTL_S = 30.0
"""A measured read rate is trusted for this long. After that, one run of blocks is loaded to measure it again."""
FIRST_CHUNK = 256
"""Keys that are looked up at once at first; doubled while all are found."""

Sources = npt.NDArray[np.int8]
"""By block, the index of the tier that holds it."""
Coming = dict[OffloadKey, int]
"""Blocks to be promoted, in the order of their chain, with the index of the tier that holds each."""


@dataclass(slots=True, eq=False)
class TierSearch:
    """A lookup in the host and then in the tiers of ``gate``, the fastest first, by a request with ``wait``."""

    gate: LoadGate
    now: float
    wait: Wait | None = None
    awaited: Awaited | None = None
    """What another server hands over to the request."""
    expecting: set[int] = field(default_factory=set)
    """The tiers that know already that the rest of the chain will be looked up."""
    is_unanswered: bool = False
    """Whether some tier must be asked again."""


class LoadGate:
    """Judges what was found: by the room that promotions have, and by which is faster, to load it or to compute its
    tokens, as far as that is known. What another server hands over is loaded in any case, and so is everything without
    ``load_only_if_faster``.

    A state saves nothing by itself. So it is first compared with all tokens up to it, and then the KV of these tokens
    is judged together with the states that the request wants.
    """

    def __init__(self, common: Common, waits: Waits) -> None:
        self.prefill = MovingRate()
        """How many tokens of prompts the engine computes per second."""
        self.host = common.host
        self.tiers = common.tiers
        self.reasons = common.reasons
        groups = common.settings.groups
        self._layout = ChainLayout(groups)
        self._num_full = max(1, sum(group.is_full for group in groups))
        # A token is saved only if the blocks of all groups are loaded. Those with a window or a state need few, so the
        # groups with full attention share the tokens.
        self._saved_tokens = [group.block_tokens / self._num_full for group in groups]
        self._waits = waits
        self._only_if_faster = common.settings.load_only_if_faster

    def room_for(self, wait: Wait | None, key: OffloadKey, in_all: bool = False) -> int:
        """Returns how many more blocks the request, which wants ``key``, may have promoted: of the KV cache group of
        ``key``, which has no states, or ``in_all``. A request needs one state of each of the others."""
        pinned = () if wait is None else wait.pinned
        most = max(1, int(self.host.most_blocks(key) * PROMOTION_SHARE))
        num_groups, num_states = len(self._layout.groups), self._layout.num_states
        if in_all or num_groups == 1:
            return most - len(pinned)
        share = (most - num_states) // max(1, num_groups - num_states)
        return share - num_of_group(pinned, key_group_idx(key))

    def num_worth_loading(self, search: TierSearch, keys: Keys, sources: Sources) -> int:
        """Returns how many leading blocks of a run are to be loaded; the rest is faster to compute. With states all of
        it is loaded, or nothing: then the request that waits does not want its states any more."""
        wait, num_ahead, num_states = search.wait, [], []
        computing = self.prefill.seconds_for(self._saved_tokens[key_group_idx(keys[0])])
        if not self._only_if_faster or computing is None or search.awaited is not None:
            return len(keys)
        for tier in self.tiers:
            # What the request itself wants is judged with its blocks. Groups with full attention share its states.
            own = [] if wait is None else [key for key, source in wait.wanted.items() if source == tier.index]
            num_ahead.append(self._num_ahead(tier) - len(own))
            if self._layout.num_states:
                groups = [self._layout.groups[key_group_idx(key)] for key in own]
                num_states.append(sum(group.state for group in groups) / self._num_full)
        estimators = [tier.estimator for tier in self.tiers]
        num_loaded = num_worth_loading(computing, sources, num_ahead, estimators, search.now, num_states)
        self.reasons.record(keys[num_loaded : num_loaded + 1], MissReason.FASTER_TO_COMPUTE)
        if not num_loaded and wait is not None:
            self._waits.end(wait)
        return num_loaded

    def is_state_worth_loading(self, search: TierSearch, state: OffloadKey, source: int, num_units: int) -> bool:
        """Returns whether a state in a tier takes less time to load than the tokens of ``num_units`` to compute, which
        lie between it and the last one in the host."""
        tier = self.tiers[source]
        num_ahead = self._num_ahead(tier)
        computing = self.prefill.seconds_for(num_units * self._layout.unit_tokens)
        loading = _seconds_per_block(tier.estimator, num_ahead, search.now)
        if not self._only_if_faster or computing is None or loading is None or search.awaited is not None:
            return True
        is_worth = (num_ahead + self._layout.num_states) * loading <= computing
        if not is_worth:
            self.reasons.record([state], MissReason.FASTER_TO_COMPUTE)
        return is_worth

    def _num_ahead(self, tier: LowerTier) -> int:
        """Returns how many blocks the tier is to read before others."""
        return tier.num_reading + self._waits.reads.num_queued[tier.index]


def find_hit(search: TierSearch, keys: Keys, need: Need) -> tuple[States, Coming]:
    """Answers a request that may wait. Returns the states of ``keys``, and the blocks to be promoted for it."""
    find = {Need.RUN: _find_run, Need.LAST: _find_last, Need.ALL: _find_all}[need]
    return find(search, keys)


def _find_run(search: TierSearch, keys: Keys) -> tuple[States, Coming]:
    """Finds the leading blocks of ``keys``, all of one KV cache group."""
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
                room = max(0, search.gate.room_for(search.wait, keys[num_ready]))
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
    found = found[:room]
    is_unanswered &= not found
    held_by = np.concatenate(sources)[:room] if found else np.zeros(0, dtype=np.int8)
    if found:
        found = found[: search.gate.num_worth_loading(search, found, held_by)]
    states = np.zeros(len(keys), dtype=np.uint8)
    states[:num_ready] = HIT
    if found or is_unanswered:
        states[num_ready] = RETRY
    return states, dict(zip(found, held_by.tolist(), strict=False))


def _find_last(search: TierSearch, keys: Keys) -> tuple[States, Coming]:
    """Finds the last of ``keys`` that the host or a tier holds, or for which a tier must be asked again. Tiers are
    asked only for those behind the last one in the host."""
    there = host_states(search, keys)
    ready = np.flatnonzero(there == HIT)
    in_host = int(ready[-1]) if len(ready) else -1
    states, coming = np.zeros(len(keys), dtype=np.uint8), Coming()
    if in_host >= 0:
        states[in_host] = HIT
    behind = np.arange(in_host + 1, len(keys))
    if len(behind):
        in_tiers, sources = states_below(search, keys, behind, there[behind])
        possible = np.flatnonzero((in_tiers == HIT) | (in_tiers == RETRY))
        if len(possible):
            last = int(possible[-1])
            at, is_found = in_host + 1 + last, in_tiers[last] == HIT
            state, source = keys[at], int(sources[last])
            if is_found and search.gate.is_state_worth_loading(search, state, source, at - in_host):
                coming = _with_room(search, {state: source})
            if coming or not is_found:
                states[at] = RETRY
    return states, coming


def _find_all(search: TierSearch, keys: Keys) -> tuple[States, Coming]:
    states, coming = host_states(search, keys), Coming()
    below = np.flatnonzero(states != HIT)
    if len(below):
        found, sources = states_below(search, keys, below, states[below])
        is_found = found == HIT
        if is_found.any() and (is_found | (found == RETRY)).all():
            there = [keys[i] for i in below[is_found].tolist()]
            coming = _with_room(search, dict(zip(there, sources[is_found].tolist(), strict=True)))
            if not coming:
                found[is_found] = MISS
        found[found == HIT] = RETRY
        states[below] = found
    return states, coming


def _with_room(search: TierSearch, coming: Coming) -> Coming:
    """Returns ``coming`` if it may be promoted with what the request waits for. If not, remembers why it is missing."""
    wanted = coming.keys() | (() if search.wait is None else search.wait.wanted)
    if len(wanted) <= search.gate.room_for(search.wait, next(iter(coming)), in_all=True):
        return coming
    search.gate.reasons.record(list(coming), MissReason.TOO_LARGE)
    return {}


def host_states(search: TierSearch, keys: Keys) -> States:
    """Returns the states of ``keys`` in the host. Those that are pinned for the request are not looked up again."""
    pinned = () if search.wait is None else search.wait.pinned
    if not pinned:
        return search.gate.host.table.states(keys)
    is_pinned = np.fromiter(map(pinned.__contains__, keys), np.bool_, len(keys))
    states = np.full(len(keys), HIT, dtype=np.uint8)
    others = np.flatnonzero(~is_pinned)
    if len(others):
        states[others] = search.gate.host.table.states([keys[i] for i in others.tolist()])
    return states


def states_below(search: TierSearch, chain: Keys, at: npt.NDArray[np.intp], in_host: States) -> tuple[States, Sources]:
    """Returns states and sources of the keys of ``chain`` with the indices ``at``, none of which the host can load now;
    ``in_host`` are their states there.

    HIT: being read into the host, or held by a tier that can be read. RETRY: a tier does not know yet. PENDING: being
    stored from the device. MISS: none of these.
    """
    keys = [chain[i] for i in at.tolist()]
    states = np.where(in_host == PENDING, in_host, MISS).astype(np.uint8)
    sources = np.zeros(len(keys), dtype=np.int8)
    is_reading = np.zeros(len(keys), dtype=np.bool_)
    for tier in search.gate.tiers:
        if not tier.probe and tier.read_health.may_test:
            # Of states, few exist.
            tier.probe = [key for key in keys if key not in tier.reads]
        if tier.reads and not tier.reads.keys().isdisjoint(keys):
            for i, key in enumerate(keys):
                if key in tier.reads:
                    is_reading[i] = True
                    states[i] = HIT if tier.can_read and key not in tier.read_health.overdue else MISS
                    sources[i] = tier.index
    for tier in search.gate.tiers:
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
        elif search.awaited is not None and tier.tier.is_shared and tier.read_health.is_tested:
            # A server to which all requests are handed over may have no other blocks to test the tier with.
            states = _until_handed_over(search, search.awaited, tier, keys, states)
    search.is_unanswered |= bool((states == RETRY).any())
    return states, sources


def _in_time(search: TierSearch, tier: LowerTier, keys: Keys, states: States) -> States:
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
        search.gate.reasons.record([keys[i] for i in late.tolist()], MissReason.NOT_ANSWERED)
    if num_failed:
        tier.count("lookup_failures", num_failed)
        tier.read_health.lookups_failed(num_failed, search.now)
    return states


def _until_handed_over(search: TierSearch, awaited: Awaited, tier: LowerTier, keys: Keys, states: States) -> States:
    """Returns ``states``, the tier's answers, with RETRY for keys that another server is still to write there, and has
    the tier look for them."""
    if search.now >= awaited.until:
        return states
    lacking = [i for i in np.flatnonzero(states == MISS).tolist() if keys[i] in awaited.keys]
    if lacking:
        coming = [keys[i] for i in lacking]
        search.gate.reasons.record(coming[:1], MissReason.NOT_IN_TIME)
        pause_s = max(LOOK_AGAIN_S, (search.now - awaited.since) * LOOK_AGAIN_SHARE)
        tier.tier.look_for(coming, awaited.places.get(tier.name, ""), pause_s, awaited.keys)
        states = states.copy()
        states[lacking] = RETRY
    return states


def num_worth_loading(
    computing: float,
    sources: Sources,
    num_ahead: Sequence[int],
    estimators: Sequence[ReadEstimator],
    now: float,
    num_states: Sequence[float] = (),
) -> int:
    """Returns how many leading blocks of a run are to be loaded, so that loading these and computing the rest, each
    block in ``computing`` seconds, takes the least time, as far as that is known.

    ``sources[i]`` is the index of the tier that holds block i. Tier t reads ``num_ahead[t]`` blocks before; tiers read
    at the same time. With ``num_states`` a request can resume at the end of the run only, so all of it is loaded or
    nothing, and tier t reads ``num_states[t]`` states for it.
    """
    num_blocks = len(sources)
    loading = np.zeros(num_blocks + 1)
    """Seconds, by number of blocks that are loaded."""
    for index, (estimator, ahead) in enumerate(zip(estimators, num_ahead, strict=True)):
        seconds_per_block = _seconds_per_block(estimator, ahead, now)
        if seconds_per_block:
            num_read = np.cumsum(sources == index) + (num_states[index] if num_states else 0)
            seconds = np.where(num_read > 0, (ahead + num_read) * seconds_per_block, 0.0)
            loading[1:] = np.maximum(loading[1:], seconds)
    total = loading - np.arange(num_blocks + 1) * computing
    if num_states:
        return num_blocks if total[-1] <= 0 else 0
    return num_blocks - int(np.argmin(total[::-1]))


def _seconds_per_block(estimator: ReadEstimator, num_ahead: int, now: float) -> float | None:
    """Returns how long a tier takes to read a block, or None if that is to be measured."""
    is_outdated = num_ahead == 0 and now - estimator.measured_at > RATE_TTL_S
    return None if is_outdated else estimator.seconds_to_read(1)


def explain_miss(key: OffloadKey, host: Miss, own: Miss, tiers: Sequence[LowerTier]) -> Miss:
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

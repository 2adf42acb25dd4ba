"""What a request is offered, whether it waits, and how long the answer is remembered. ``locate`` answers the engine;
``longest`` asks the manager, behind which ``tiering/lookup.py`` asks the tiers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import NamedTuple

import numpy as np

from kvoffload.abc import Awaited, Need, OffloadingManager, OffloadKey, ReqContext, States
from kvoffload.abc.tier import HIT, RETRY
from kvoffload.connector.adapters import AdapterDigests
from kvoffload.connector.handover import Patience
from kvoffload.connector.jobs import JobTable
from kvoffload.connector.layout import KeyLayout
from kvoffload.connector.leaving import LeavingBlocks
from kvoffload.connector.request import Hit, Match, RequestState
from kvoffload.connector.resets import PausedContents

MAX_WAITS_PER_REQUEST = 3
"""A request that has waited, had its answer and could not be scheduled may find less when it is looked up again, and
wait again. It waits at most this often until it is given device blocks, each time up to the load deadline."""
OTHER_NAME = (
    "kvoffload: another server handed over a request whose blocks have other keys there than here, so this server "
    "computes the prompt: models, versions, layouts or tenants of the servers differ; `kvoffload doctor` names the "
    "difference"
)
NOTHING_COMES = (
    "kvoffload: several requests in a row did not find all blocks that another server had handed over to them, so "
    "requests from that server wait less: check that both servers use the same store, and that the other one can write "
    "to it"
)


@dataclass(slots=True, eq=False)
class Lookups:
    """What lookups ask and remember. A request waits at most ``deadline_s`` for a load of another, a lower tier, the
    digest of its adapter, blocks that the engine has forgotten on the device, or after a reset for the weights."""

    jobs: JobTable
    keys_loading: Mapping[OffloadKey, int]
    """See JobTable; empty if loads are not shared."""
    paused: PausedContents
    adapters: AdapterDigests | None
    leaving: LeavingBlocks | None
    deadline_s: float
    patience: Patience = field(default_factory=Patience)

    @property
    def contents(self) -> int:
        """Grows when an answer other than to wait may have become wrong."""
        return self.jobs.changes.contents + self.jobs.manager.num_removed


def locate(lookups: Lookups, state: RequestState, computed: int) -> Match:
    """Returns what can be loaded for a request with ``computed`` tokens on the device."""
    lookup = state.lookup
    if (match := lookup.match) is not None:
        change = lookups.jobs.changes.wakeups if match.tokens is None else lookups.contents
        if (match.change, match.computed) == (change, computed) and lookups.jobs.observer.clock() < match.expires:
            return match
    match = lookup.match = _look_up(lookups, state, computed)
    if match.tokens is not None and lookup.waiting_since is not None:
        lookup.waited_s += lookups.jobs.observer.clock() - lookup.waiting_since
        lookup.waiting_since = None
        lookup.num_waits += 1
    return match


def _look_up(lookups: Lookups, state: RequestState, computed: int) -> Match:
    adapters, adapter, layout = lookups.adapters, state.adapter, lookups.jobs.layout
    if adapters and adapter and not state.has_given_up and (state.options.load or state.options.store):
        known = adapters.digests(adapter)
        if known is None and (wait := _wait(lookups, state, computed)):
            return wait
        if not known or state.origin not in (None, known):
            state.give_up()
        elif state.origin is None:
            state.bind(known)
    if state.origin is None:
        return Match(lookups.contents, computed)
    state.blocks.extend_keys()
    if not state.may_load:
        _touch(lookups, state)
        # The first block behind what the device has was not looked up.
        keys, first = state.blocks.keys[0], computed // layout.block_tokens[0]
        return Match(lookups.contents, computed, hit=Hit(missed=keys[first] if first < len(keys) else None))
    if lookups.paused.is_hidden:
        lookups.paused.must_check = True
        return _wait(lookups, state, computed) or Match(lookups.contents, computed)
    _touch(lookups, state)
    if computed % (align := math.lcm(*layout.device_block_sizes)):
        return Match(lookups.contents, computed)
    # The engine computes less than a block in one step. A load would take a step of its own.
    is_worth = last_loadable(state, most_end(layout, state)) - computed >= align
    # If many requests wait for the same load, a look at the next block avoids searching further.
    is_early = is_worth and _is_any_loading(lookups, state, computed, computed + 1)
    if is_early and (wait := _wait(lookups, state, computed)):
        return wait
    if (handover := state.lookup.handover) is not None and state.context.awaited is None:
        # From now on, if the request has the keys that are handed over to it.
        handed, now = handover.keys(layout, state.blocks.keys) or {}, lookups.jobs.observer.clock()
        until = now + lookups.patience.wait_s(handover.server, lookups.deadline_s)
        state.context = replace(state.context, awaited=Awaited(handed, handover.places, now, until))
    if not is_worth:
        return Match(lookups.contents, computed)
    may_wait = state.lookup.num_waits < MAX_WAITS_PER_REQUEST
    hit = longest(lookups, state, computed, may_wait)
    is_early = not hit.is_known or (hit.end > computed and _is_any_loading(lookups, state, computed, hit.end))
    if is_early and (wait := _wait(lookups, state, computed)):
        return wait
    if not hit.is_known:
        # It may not wait any longer.
        hit = longest(lookups, state, computed, may_wait=False)
    leaving = lookups.leaving
    if leaving is not None and leaving.bring_back(state, hit.end) and (wait := _wait(lookups, state, computed)):
        return wait
    tokens = last_loadable(state, hit.end) - computed if hit.end - computed >= layout.align else 0
    return Match(lookups.contents, computed, tokens, hit)


def _touch(lookups: Lookups, state: RequestState) -> None:
    """Counts one use of the request's blocks, and of the last state that it could continue from. States are kept at
    few boundaries: to a policy, those at all the others would be blocks that it has lost."""
    if state.lookup.was_touched:
        return
    state.lookup.was_touched = True
    blocks, layout, manager = state.blocks, lookups.jobs.layout, lookups.jobs.manager
    if not layout.states:
        manager.touch(blocks.keys_in_order(), state.context)
        return
    # The first state group answers for all; other blocks are not looked at.
    first = layout.states[0]
    keys = layout.boundary_keys(first, blocks.keys[first], 0, most_end(layout, state))
    found = manager.lookup_each(keys, replace(state.context, may_wait=False), Need.LAST)
    last = (last_possible(found) + 1) * layout.align
    manager.touch(blocks.used_keys([last] if last else []), state.context, blocks.keys_in_order())


def _is_any_loading(lookups: Lookups, state: RequestState, computed: int, end: int) -> bool:
    """Whether a block of the hit that ends at ``end`` is being loaded for another."""
    if not lookups.keys_loading:
        return False
    layout, loading, last = lookups.jobs.layout, lookups.keys_loading.keys(), last_loadable(state, end)
    pairs = ((keys, layout.needed_blocks(g, computed, last)) for g, keys in enumerate(state.blocks.keys))
    return any(not loading.isdisjoint(keys[span.start : span.stop]) for keys, span in pairs)


def _wait(lookups: Lookups, state: RequestState, computed: int) -> Match | None:
    """Returns an answer that makes the request ask again: when a load has started or ended, when the manager may find
    more, or at the deadline. None if that is over, or the request has waited MAX_WAITS_PER_REQUEST times."""
    lookup, now = state.lookup, lookups.jobs.observer.clock()
    if lookup.num_waits >= MAX_WAITS_PER_REQUEST:
        return None
    if lookup.waiting_since is None:
        lookup.waiting_since = now
    deadline = lookup.waiting_since + lookups.deadline_s
    return Match(lookups.jobs.changes.wakeups, computed, None, expires=deadline) if now < deadline else None


def end_handover(lookups: Lookups, state: RequestState, num_found: int) -> None:
    """Notes how much of what was handed over to a request it has found."""
    observer, handover, awaited = lookups.jobs.observer, state.lookup.handover, state.context.awaited
    state.lookup.handover = None
    if handover is None or awaited is None:
        return
    if not awaited.keys:
        result = "other_name"
        observer.warn(OTHER_NAME)
    else:
        num_missing = min(handover.tokens, state.request.num_tokens - 1) - num_found
        is_complete = num_missing < math.lcm(*lookups.jobs.layout.device_block_sizes)
        result = "complete" if is_complete else "partial" if num_found else "none"
        # A part may be what this server has computed itself.
        lookups.patience.ended(handover.server, is_complete)
        if lookups.patience.is_lost(handover.server):
            observer.warn(NOTHING_COMES)
    observer.metrics.add("handovers", label=result)


class HitSearch(NamedTuple):
    """What is asked about a request with ``computed`` tokens on the device."""

    manager: OffloadingManager
    layout: KeyLayout
    state: RequestState
    computed: int
    context: ReqContext


def longest(lookups: Lookups, state: RequestState, computed: int, may_wait: bool) -> Hit:
    """Returns the longest hit of a request. If it may not wait, lower tiers are not asked.

    Full-attention groups need every block from ``computed`` on, the others only those that the next token attends
    to, and states exactly the one at its end. Each group's answer shortens the next one's question until all agree.
    """
    context, layout = state.context if may_wait else replace(state.context, may_wait=False), lookups.jobs.layout
    search, end = HitSearch(lookups.jobs.manager, layout, state, computed, context), most_end(layout, state)
    if not layout.states:
        return _agreed(search, end)
    hit = _with_states(search, end)
    return _explained(search, hit, end) if hit.is_known and hit.end < end else hit


def _with_states(search: HitSearch, end: int) -> Hit:
    """Returns the longest hit up to ``end`` with states at its end, which come first because few are kept."""
    computed = search.computed
    while end > computed:
        end, is_known, lacking = _last_states(search, end)
        hit = _agreed(search, end) if end > computed else Hit(computed)
        if not hit.is_known or (hit.end == end and not is_known):
            return Hit(computed, hit.missed, is_known=False)
        if hit.end == end:
            return hit._replace(no_state=lacking)
        end = hit.end
    return Hit(computed)


def _explained(search: HitSearch, hit: Hit, limit: int) -> Hit:
    """Returns ``hit``, which ends before ``limit``, with what is missing behind it: a block, or the states."""
    layout, lookup = search.layout, search.state.lookup
    now = search._replace(computed=hit.end, context=replace(search.context, may_wait=False))
    behind = _agreed(now, limit)
    junction, missed = behind.end if layout.full else hit.end, behind.missed
    if junction > hit.end or missed is None:
        boundary = max(junction, (hit.end // layout.align + 1) * layout.align)
        keys = [search.state.blocks.keys[g][layout.last_within(g, boundary)] for g in layout.states]
        missed = next(compress(keys, search.manager.lookup_each(keys, now.context) != HIT), None)
    # After a wait, a state may be missing because it did not come in time.
    is_sure = search.context.may_wait and lookup.waiting_since is None and lookup.num_waits == 0
    return hit._replace(missed=missed, junction=junction, no_state=hit.no_state if is_sure else None)


def _last_states(search: HitSearch, end: int) -> tuple[int, bool, OffloadKey | None]:
    """Returns the last position up to ``end`` at which no state is certainly missing, ``computed`` if there is
    none; whether all states are there; and the key of a state that is missing for more."""
    layout, blocks, lacking = search.layout, search.state.blocks, None
    first, *others = layout.states
    start = search.computed // layout.align * layout.align
    while end > search.computed:
        keys = layout.boundary_keys(first, blocks.keys[first], start, end)
        found = search.manager.lookup_each(keys, search.context, Need.LAST)
        last = last_possible(found)
        if last < len(keys) - 1:
            lacking = keys[-1]
        end = start + (last + 1) * layout.align
        if last < 0:
            break
        rest = [blocks.keys[g][layout.last_within(g, end)] for g in others]
        others_found = search.manager.lookup_each(rest, search.context)
        absent = np.flatnonzero((others_found != HIT) & (others_found != RETRY))
        if not len(absent):
            return end, bool(found[last] == HIT and (others_found == HIT).all()), lacking
        lacking = rest[int(absent[0])]
        end -= layout.align
    return search.computed, True, lacking


def _agreed(search: HitSearch, end: int) -> Hit:
    """Returns the longest hit up to ``end`` of the groups that have KV."""
    layout, keys, computed = search.layout, search.state.blocks.keys, search.computed
    known, missed, asked = False, None, None
    while not known and asked != end:
        # An answer is not waited for if another group has none of the blocks that it is about.
        known, asked = True, end
        for g in layout.full:
            size = layout.block_tokens[g]
            first = computed // size
            if first * size >= end:
                continue
            hits = search.manager.lookup(keys[g][first : end // size], search.context)
            if hits is None:
                # The other groups are asked at once, so that the blocks of all of them are read at the same time.
                known = False
            elif (first + hits) * size < end:
                found = (first + hits) * size
                end, missed = found // layout.align * layout.align, keys[g][found // size]
    while known and end > computed and (gap := _first_gap(search, end)) is not None:
        start, g, ordinal, known = gap
        missed, end = keys[g][ordinal], start // layout.align * layout.align
    return Hit(max(end, computed) if known else computed, missed, known)


def _first_gap(search: HitSearch, end: int) -> tuple[int, int, int, bool] | None:
    """Returns the first missing block that a window needs to continue at ``end``, in the group whose hit ends soonest
    for it, as every hit past it needs it too: the token at which it begins, its group, its ordinal, and whether it is
    certainly missing. A block of which that is not known yet counts only if no other is certainly missing."""
    layout, gaps, unknown = search.layout, [], None
    for g in layout.windows:
        needed = layout.needed_blocks(g, search.computed, last_loadable(search.state, end))
        keys = search.state.blocks.keys[g][needed.start : needed.stop]
        states = search.manager.lookup_each(keys, search.context)
        for i in np.flatnonzero(states != HIT).tolist():
            gap = (needed[i] * layout.block_tokens[g], g, needed[i], bool(states[i] != RETRY))
            if gap[-1]:
                gaps.append(gap)
                break
            unknown = unknown or gap
    return min(gaps) if gaps else unknown


def last_possible(states: States) -> int:
    """Returns the index of the last block that can be loaded now, or perhaps later; -1 if there is none."""
    possible = np.flatnonzero((states == HIT) | (states == RETRY))
    return int(possible[-1]) if len(possible) else -1


def most_end(layout: KeyLayout, state: RequestState) -> int:
    """Returns the end of the longest hit that the request could have."""
    # One token is left to compute. KV before it can be loaded, but a state cannot go back by a token.
    num_tokens = state.request.num_tokens
    end = min(state.options.max_tokens, num_tokens - 1 if layout.states else num_tokens)
    for keys, size in zip(state.blocks.keys, layout.block_tokens, strict=True):
        end = min(end, len(keys) * size)
    return end // layout.align * layout.align


def last_loadable(state: RequestState, end: int) -> int:
    """Returns the end of the part of a hit that is loaded: at least one token is left to compute."""
    return min(end, state.request.num_tokens - 1)

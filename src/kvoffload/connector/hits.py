"""The hit search: the longest hit that all groups of a layout agree on, by the states of blocks in a manager."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import compress
from typing import NamedTuple

import numpy as np

from kvoffload.abc import Need, OffloadingManager, OffloadKey, ReqContext, States
from kvoffload.abc.tier import HIT, RETRY
from kvoffload.connector.layout import KeyLayout
from kvoffload.connector.request import RequestState


class Hit(NamedTuple):
    """The longest hit of a request."""

    end: int
    """Up to this token, every group has the blocks that the request needs to continue there."""
    missed: OffloadKey | None
    """The first key that was missing for more."""
    is_known: bool
    """False: a lower tier has not answered yet, and the hit may become longer."""
    junction: int = 0
    """The last position behind ``end`` up to which host memory has the blocks but not the states."""
    no_state: OffloadKey | None = None
    """A state behind ``end`` that no tier has either: without it, blocks in lower tiers are of no use."""


class _Gap(NamedTuple):
    """A block that a request would need and that cannot be loaded. Gaps sort by the token at which they begin."""

    start: int
    group: int
    ordinal: int
    state: int


def longest(manager: OffloadingManager, layout: KeyLayout, state: RequestState, computed: int, may_wait: bool) -> Hit:
    """Returns the longest hit of a request with ``computed`` tokens on the device.

    Full-attention groups need every block from ``computed`` on, the others only those that the next token attends
    to, and states exactly the one at its end. Each group's answer shortens the next one's question until all agree.
    If the request may not wait, only blocks that can be loaded now count, and lower tiers are not asked.
    """
    context = state.context if may_wait else replace(state.context, may_wait=False)
    end = most_end(layout, state)
    if not layout.states:
        return _agreed(manager, layout, state, computed, end, context)
    limit, hit = end, _with_states(manager, layout, state, computed, end, context)
    return _explained(manager, layout, state, hit, limit, may_wait) if hit.is_known and hit.end < limit else hit


def last_state(manager: OffloadingManager, layout: KeyLayout, state: RequestState) -> int:
    """Returns the last position at which the request could continue from a state that is in host memory now, 0 if
    there is none. The first state group answers for all; other blocks are not looked at, and lower tiers not
    asked."""
    first = layout.states[0]
    keys = layout.boundary_keys(first, state.blocks.keys[first], 0, most_end(layout, state))
    states = manager.lookup_each(keys, replace(state.context, may_wait=False), Need.LAST)
    return (last_possible(states) + 1) * layout.align


def most_end(layout: KeyLayout, state: RequestState) -> int:
    """Returns the end of the longest hit that the request could have."""
    blocks, num_tokens = state.blocks, state.request.num_tokens
    # One token is left to compute. KV before it can be loaded, but a state cannot go back by a token.
    end = min(blocks.max_tokens, num_tokens - 1 if layout.states else num_tokens)
    for keys, size in zip(blocks.keys, layout.block_tokens, strict=True):
        end = min(end, len(keys) * size)
    return end // layout.align * layout.align


def _with_states(
    manager: OffloadingManager, layout: KeyLayout, state: RequestState, computed: int, end: int, context: ReqContext
) -> Hit:
    """Returns the longest hit up to ``end``, with states at its end. These come first: few are kept, and blocks
    behind the last one are of no use."""
    no_state = None
    while end > computed:
        end, is_known, lacking = _last_states(manager, layout, state, computed, end, context)
        no_state = lacking or no_state
        if end <= computed:
            break
        hit = _agreed(manager, layout, state, computed, end, context)
        if not hit.is_known or (hit.end == end and not is_known):
            return Hit(computed, hit.missed, False)
        if hit.end == end:
            return Hit(end, hit.missed, True, no_state=no_state)
        end, no_state = hit.end, None
    return Hit(computed, None, True, no_state=no_state)


def _explained(
    manager: OffloadingManager, layout: KeyLayout, state: RequestState, hit: Hit, limit: int, may_wait: bool
) -> Hit:
    """Returns ``hit``, which ends before ``limit``, with what is missing behind it: a block, or the states."""
    context = replace(state.context, may_wait=False)
    behind = _agreed(manager, layout, state, hit.end, limit, context)
    junction, missed = behind.end if layout.full else hit.end, behind.missed
    if junction > hit.end or missed is None:
        boundary = max(junction, (hit.end // layout.align + 1) * layout.align)
        keys = [state.blocks.keys[g][layout.last_within(g, boundary)] for g in layout.states]
        found = manager.lookup_each(keys, context)
        missed = next(compress(keys, found != HIT), None)
    # After a wait, a state may be missing because it did not come in time.
    is_sure = may_wait and state.waiting_since is None and state.num_waits == 0
    return Hit(hit.end, missed, True, junction, hit.no_state if is_sure else None)


def _last_states(
    manager: OffloadingManager, layout: KeyLayout, state: RequestState, computed: int, end: int, context: ReqContext
) -> tuple[int, bool, OffloadKey | None]:
    """Returns the last position up to ``end`` at which no state is certainly missing, ``computed`` if there is
    none; whether all states are there; and the key of a state that is missing for more."""
    blocks, lacking = state.blocks, None
    first, *others = layout.states
    start = computed // layout.align * layout.align
    while end > computed:
        keys = layout.boundary_keys(first, blocks.keys[first], start, end)
        found = manager.lookup_each(keys, context, Need.LAST)
        last = last_possible(found)
        if last < len(keys) - 1:
            lacking = keys[-1]
        end = start + (last + 1) * layout.align
        if last < 0:
            break
        rest = [blocks.keys[g][layout.last_within(g, end)] for g in others]
        others_found = manager.lookup_each(rest, context)
        absent = np.flatnonzero((others_found != HIT) & (others_found != RETRY))
        if not len(absent):
            return end, bool(found[last] == HIT and (others_found == HIT).all()), lacking
        lacking = rest[int(absent[0])]
        end -= layout.align
    return computed, True, lacking


def _agreed(
    manager: OffloadingManager, layout: KeyLayout, state: RequestState, computed: int, end: int, context: ReqContext
) -> Hit:
    """Returns the longest hit up to ``end`` of the groups that have KV."""
    blocks, known, missed, asked = state.blocks, False, None, None
    while not known and asked != end:
        # An answer is not waited for if another group has none of the blocks that it is about.
        known, asked = True, end
        for g in layout.full:
            size = layout.block_tokens[g]
            first = computed // size
            if first * size >= end:
                continue
            hits = manager.lookup(blocks.keys[g][first : end // size], context)
            if hits is None:
                # The other groups are asked at once, so that the blocks of all of them are read at the same time.
                known = False
            elif (first + hits) * size < end:
                found = (first + hits) * size
                end, missed = found // layout.align * layout.align, blocks.keys[g][found // size]
    if not known:
        return Hit(computed, missed, False)
    while end > computed:
        gap = _first_gap(manager, layout, state, computed, end, context)
        if gap is None:
            break
        missed = blocks.keys[gap.group][gap.ordinal]
        if gap.state == RETRY:
            return Hit(computed, missed, False)
        end = gap.start // layout.align * layout.align
    return Hit(max(end, computed), missed, True)


def _first_gap(
    manager: OffloadingManager, layout: KeyLayout, state: RequestState, computed: int, end: int, context: ReqContext
) -> _Gap | None:
    """The first missing block that a window needs in order to continue at ``end``, in the group whose hit ends
    soonest for it; every hit that reaches past that block needs it too. A block whose state is not known yet counts
    only if no other is certainly missing."""
    gaps, unknown = [], None
    for g in layout.windows:
        needed = layout.needed_blocks(g, computed, last_loadable(state, end))
        states = manager.lookup_each(state.blocks.keys[g][needed.start : needed.stop], context)
        for i in np.flatnonzero(states != HIT).tolist():
            ordinal = needed[i]
            gap = _Gap(ordinal * layout.block_tokens[g], g, ordinal, int(states[i]))
            if gap.state == RETRY:
                unknown = unknown or gap
            else:
                gaps.append(gap)
                break
    return min(gaps) if gaps else unknown


def is_next_loading(
    keys_loading: Mapping[OffloadKey, int], layout: KeyLayout, state: RequestState, computed: int
) -> bool:
    """Whether the first block that the request lacks, which it can have, is being loaded for another. If many requests
    wait for the same load, this avoids searching further."""
    if not keys_loading or not layout.full:
        return False
    g = layout.full[0]
    return state.blocks.keys[g][computed // layout.block_tokens[g]] in keys_loading


def is_any_loading(
    keys_loading: Mapping[OffloadKey, int], layout: KeyLayout, state: RequestState, computed: int, end: int
) -> bool:
    """Whether a block of the hit that ends at ``end`` is being loaded for another."""
    if not keys_loading:
        return False
    loading, last = keys_loading.keys(), last_loadable(state, end)
    for g, keys in enumerate(state.blocks.keys):
        needed = layout.needed_blocks(g, computed, last)
        if not loading.isdisjoint(keys[needed.start : needed.stop]):
            return True
    return False


def last_possible(states: States) -> int:
    """Returns the index of the last block that can be loaded now, or perhaps later; -1 if there is none."""
    possible = np.flatnonzero((states == HIT) | (states == RETRY))
    return int(possible[-1]) if len(possible) else -1


def last_loadable(state: RequestState, end: int) -> int:
    """Returns the end of the part of a hit that is loaded: at least one token is left to compute."""
    return min(end, state.request.num_tokens - 1)

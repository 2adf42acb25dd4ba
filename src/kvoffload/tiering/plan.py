"""Which blocks of a chain are written to a tier next, and which blocks of the tier are useless: functions over masks.

A *unit* is the span of tokens between two positions at which the blocks of all KV cache groups end, so that a request
can resume at the end of any unit, if the blocks that it needs there are present: of a group with full attention all
blocks before that position, of a group with a window or chunks those within it, of a group with states the state at
exactly that position. States exist at a few positions only, so between two of them no request can resume.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.abc import Keys, KVGroup, OffloadKey
from kvoffload.cache.keys import key_group_idx

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
ByGroup: TypeAlias = Sequence[Keys]
"""The blocks of a chain by KV cache group, each in order."""
Look: TypeAlias = Callable[[Keys], tuple[Bools, Bools]]
"""Returns which blocks the tier holds or is being given, and which of all are these or can be given to it."""


class ChainLayout:
    """How the blocks of chains lie in the KV cache groups ``groups``."""

    def __init__(self, groups: Sequence[KVGroup]) -> None:
        self.groups = tuple(groups)
        self.unit_tokens = math.lcm(*(group.block_tokens for group in groups))
        self.blocks_per_unit = [self.unit_tokens // group.block_tokens for group in groups]
        self.num_states = sum(group.state for group in groups)
        """Blocks without which a chain is of no use, however short it is: one state per group that has states."""
        kv_blocks = (n for n, group in zip(self.blocks_per_unit, groups, strict=True) if not group.state)
        self.kv_blocks_per_unit = sum(kv_blocks) or sum(self.blocks_per_unit)
        """Blocks per unit without states, of which most units have none."""

    def tokens(self, num_blocks: int) -> int:
        """Returns how many tokens have all their KV in ``num_blocks`` blocks. States come on top."""
        return num_blocks * self.unit_tokens // self.kv_blocks_per_unit

    def split(self, keys: list[OffloadKey]) -> list[list[OffloadKey]]:
        """Returns the blocks of a chain by group, each in order."""
        if len(self.groups) == 1:
            return [keys]
        by_group: list[list[OffloadKey]] = [[] for _ in self.groups]
        for key in keys:
            by_group[key_group_idx(key)].append(key)
        return by_group

    def num_units(self, by_group: ByGroup) -> int:
        """Returns how many units the blocks of a chain make."""
        return min(len(keys) // n for keys, n in zip(by_group, self.blocks_per_unit, strict=True))

    def spans(self, by_group: ByGroup, start: int, stop: int) -> list[GroupSpan]:
        """Returns, by group, the blocks that matter for a request which resumes at the end of one of the units
        ``start`` to ``stop`` (exclusive), at least one. Of groups with full attention these are the blocks of these
        units only."""
        ends, spans = np.arange(start + 1, stop + 1, dtype=np.int64) * self.unit_tokens, []
        for group, keys, per_unit in zip(self.groups, by_group, self.blocks_per_unit, strict=True):
            size = group.block_tokens
            if group.is_full:
                firsts = np.full(len(ends), start * per_unit, dtype=np.int64)
            else:
                firsts = np.array([group.skipped_tokens(end) // size for end in ends.tolist()], dtype=np.int64)
            stops, offset = ends // size, int(firsts[0])
            spans.append(GroupSpan(group, offset, keys[offset : int(stops[-1])], firsts - offset, stops - offset))
        return spans


@dataclass(frozen=True, slots=True)
class GroupSpan:
    """The blocks of one group that matter for a request which resumes at one of some token positions.

    A request that resumes at position ``i`` needs blocks ``firsts[i]`` to ``stops[i]`` (exclusive). All are indices
    into ``keys``, which begin with block ``offset`` of the group.
    """

    group: KVGroup
    offset: int
    keys: Keys
    firsts: Ints
    stops: Ints

    def end_of(self, index: int) -> int:
        """Returns the token position at which block ``index`` ends."""
        return (self.offset + index + 1) * self.group.block_tokens

    def is_complete(self, present: Bools) -> Bools:
        """Returns, by position, whether all blocks that a request needs there are ``present``."""
        if present.all():
            return np.ones(len(self.stops), dtype=np.bool_)
        holes = np.concatenate(([0], np.cumsum(~present)))
        complete: Bools = holes[self.stops] == holes[self.firsts]
        return complete

    def needed(self, points: Bools) -> Bools:
        """Returns which blocks are needed by a request that resumes at one of the positions ``points``."""
        edges = np.zeros(len(self.keys) + 1, dtype=np.int64)
        np.add.at(edges, self.firsts[points], 1)
        np.add.at(edges, self.stops[points], -1)
        needed: Bools = np.cumsum(edges[:-1]) > 0
        return needed


def resumable(spans: Sequence[GroupSpan], present: Sequence[Bools]) -> Bools:
    """Returns, by position, whether a request can resume there. ``present``: by span and block, whether it is there."""
    points = np.ones(len(spans[0].stops), dtype=np.bool_)
    for span, mask in zip(spans, present, strict=True):
        points &= span.is_complete(mask)
    return points


def last_resumable(layout: ChainLayout, by_group: ByGroup, present: Sequence[Bools], num_units: int) -> int:
    """Returns the last token within the first ``num_units`` units of a chain at which a request can resume, 0 if there
    is none. ``present``: by group and block, whether it is there."""
    if num_units <= 0:
        return 0
    spans = layout.spans(by_group, 0, num_units)
    cut = [mask[span.offset :][: len(span.keys)] for mask, span in zip(present, spans, strict=True)]
    points = np.flatnonzero(resumable(spans, cut))
    return (int(points[-1]) + 1) * layout.unit_tokens if len(points) else 0


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The next writes of a chain."""

    keys: list[OffloadKey]
    """Blocks to be written, in order."""
    done: int
    """Units of which the tier lacks nothing that a request needs once they are written."""
    holes: Keys = ()
    """If nothing else is left to be written before it: the block that the tier lacks and cannot be given now. If that
    is a state, all states with which more could be written, the last one first."""


def plan_writes(layout: ChainLayout, by_group: ByGroup, start: int, stop: int, is_last: bool, look: Look) -> WritePlan:
    """Returns the blocks to write so that requests can resume at the ends of units ``start`` to ``stop`` (exclusive).

    ``is_last``: nothing can be written behind these units.
    """
    states: Keys = ()
    if layout.num_states:
        # Behind the last state no request can resume, until there is another one.
        stop, states = _last_state(layout, by_group, start, stop, look)
    if stop == start:
        return WritePlan([], start, states if is_last else ())
    spans = layout.spans(by_group, start, stop)
    in_tier, available = zip(*(look(span.keys) for span in spans), strict=True)
    if all(mask.all() for mask in in_tier):
        return WritePlan([], stop, states if is_last else ())
    points = resumable(spans, available)
    keys = _in_order(spans, [span.needed(points) & ~mask for span, mask in zip(spans, in_tier, strict=True)])
    done = start + int(np.flatnonzero(points)[-1]) + 1 if points.any() else start
    if is_last and done == stop:
        return WritePlan(keys, done, states)
    # The first unavailable block of each group. Behind one of a group with full attention nothing can be written.
    absent = [(span, int(mask.argmin())) for span, mask in zip(spans, available, strict=True) if not mask.all()]
    firsts = [(span.end_of(i), span.keys[i], span.group.is_full) for span, i in absent if not span.group.state]
    holes = [hole for hole in firsts if hole[2]] or (firsts if is_last else [])
    return WritePlan(keys, done, (min(holes)[1],) if holes else ())


def _last_state(
    layout: ChainLayout, by_group: ByGroup, start: int, stop: int, look: Look
) -> tuple[int, list[OffloadKey]]:
    """Returns the last of the units ``start`` to ``stop``, exclusive, at whose end all states are in the tier or can be
    written, plus one; ``start`` if there is none. And the states that are unavailable behind it, the last one first."""
    usable = np.ones(stop - start, dtype=np.bool_)
    absent: list[tuple[int, OffloadKey]] = []
    for group, keys, per_unit in zip(layout.groups, by_group, layout.blocks_per_unit, strict=True):
        if group.state:
            states = keys[(start + 1) * per_unit - 1 : stop * per_unit : per_unit]
            _, available = look(states)
            usable &= available
            absent += [(start + i, states[i]) for i in np.flatnonzero(~available).tolist()]
    end = start + int(np.flatnonzero(usable)[-1]) + 1 if usable.any() else start
    return end, [key for unit, key in sorted(absent, reverse=True) if unit >= end]


def _in_order(spans: Sequence[GroupSpan], chosen: Sequence[Bools]) -> list[OffloadKey]:
    """Returns the blocks that are ``chosen``, by the position at which they end."""
    if len(spans) == 1:
        return list(compress(spans[0].keys, chosen[0].tolist()))
    found = [
        (span.end_of(i), span.group.state, span.keys[i])
        for span, mask in zip(spans, chosen, strict=True)
        for i in np.flatnonzero(mask).tolist()
    ]
    # A state comes after the other blocks that end where it does.
    return [key for _, _, key in sorted(found, key=lambda item: item[:2])]


def unreachable(
    layout: ChainLayout,
    by_group: ByGroup,
    held: Sequence[Bools],
    num_units: int,
    written: Collection[OffloadKey],
) -> list[Bools]:
    """Returns, by group, which blocks of a chain no lookup can use; ``held`` says what the tier holds.

    These are all blocks behind a hole in a group with full attention, and those of ``written`` behind the last position
    at which a request can resume. Others behind that position may serve other chains.
    """
    sizes = [group.block_tokens for group in layout.groups]
    limit = max(size * len(keys) for size, keys in zip(sizes, by_group, strict=True))
    for group, size, present in zip(layout.groups, sizes, held, strict=True):
        if group.is_full and not present.all():
            limit = min(limit, int(present.argmin()) * size)
    last = last_resumable(layout, by_group, held, min(num_units, limit // layout.unit_tokens))
    useless = [np.zeros(len(keys), dtype=np.bool_) for keys in by_group]
    for mask, size, keys in zip(useless, sizes, by_group, strict=True):
        first, end = last // size, min(len(keys), limit // size)
        mask[first:end] = [key in written for key in keys[first:end]]
        mask[max(first, end) :] = True
    return useless

"""Which blocks of a chain are written to a tier next, and which blocks of the tier are useless: functions over masks.

A *unit* is the span of tokens between two positions at which the blocks of all KV cache groups end, so that a request
can resume at the end of any unit, if the blocks that it needs there are present: of a group with full attention all
blocks before that position, of a group with a window or chunks those within it, of a group with states the state at
exactly that position. States exist at a few positions only, so between two of them no request can resume.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload.abc import KVGroup, OffloadKey
from kvoffload.cache.keys import key_group_idx

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


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

    def num_units(self, by_group: Sequence[Sequence[OffloadKey]]) -> int:
        """Returns how many units the blocks of a chain make."""
        return min(len(keys) // n for keys, n in zip(by_group, self.blocks_per_unit, strict=True))

    def unit_ends(self, start: int, stop: int) -> Ints:
        """Returns the token positions at which units ``start`` to ``stop`` (exclusive) end."""
        return np.arange(start + 1, stop + 1, dtype=np.int64) * self.unit_tokens


@dataclass(frozen=True, slots=True)
class GroupSpan:
    """The blocks of one group that matter for a request which resumes at one of some token positions.

    A request that resumes at position ``i`` needs blocks ``firsts[i]`` to ``stops[i]`` (exclusive). All are indices
    into ``keys``, which begin with block ``offset`` of the group.
    """

    group: KVGroup
    offset: int
    keys: Sequence[OffloadKey]
    firsts: Ints
    stops: Ints

    @classmethod
    def of(cls, group: KVGroup, keys: Sequence[OffloadKey], ends: Ints, num_done: int) -> GroupSpan:
        """Returns the span for positions ``ends``, at least one. The first ``num_done`` blocks need not be looked at if
        the group has full attention."""
        size = group.block_tokens
        if group.is_full:
            firsts = np.full(len(ends), num_done, dtype=np.int64)
        else:
            firsts = np.array([group.skipped_tokens(end) // size for end in ends.tolist()], dtype=np.int64)
        stops = ends // size
        offset = int(firsts[0])
        return cls(group, offset, keys[offset : int(stops[-1])], firsts - offset, stops - offset)

    def end_of(self, index: int) -> int:
        """Returns the token position at which block ``index`` ends."""
        return (self.offset + index + 1) * self.group.block_tokens

    def is_complete(self, present: Bools) -> Bools:
        """Returns, by position, whether all blocks that a request needs there are ``present``."""
        holes = np.concatenate(([0], np.cumsum(~present)))
        complete: Bools = holes[self.stops] == holes[self.firsts]
        return complete

    def needed(self, points: Ints) -> Bools:
        """Returns which blocks are needed by a request that resumes at one of the positions with indices ``points``."""
        edges = np.zeros(len(self.keys) + 1, dtype=np.int64)
        np.add.at(edges, self.firsts[points], 1)
        np.add.at(edges, self.stops[points], -1)
        needed: Bools = np.cumsum(edges[:-1]) > 0
        return needed


@dataclass(frozen=True, slots=True)
class Plan:
    """The next writes of a chain."""

    keys: list[OffloadKey]
    """Blocks to be written, in order."""
    done: int
    """Units of which the tier lacks nothing that a request needs once they are written."""
    holes: Sequence[OffloadKey] = ()
    """If nothing else is left to be written before it: the block that the tier lacks and cannot be given now. If that
    is a state, all states with which more could be written, the last one first."""


def plan_writes(
    spans: Sequence[GroupSpan],
    in_tier: Sequence[Bools],
    available: Sequence[Bools],
    ends: Ints,
    *,
    start: int,
    is_last: bool,
    room: int,
) -> Plan:
    """Returns the blocks to write so that requests can resume at the positions ``ends``, at most ``room`` blocks.

    ``start`` is the unit that ends at ``ends[0]``; with ``is_last`` nothing can be written behind ``ends[-1]``, where
    all states are available. By group and block, ``in_tier``: the tier holds the block or is being given it;
    ``available``: it is in the tier or can be written.
    """
    if all(mask.all() for mask in in_tier):
        return Plan([], start + len(ends))
    usable = np.ones(len(ends), dtype=np.bool_)
    num_full = len(ends)
    holes: list[tuple[int, OffloadKey, bool]] = []
    """The first unavailable block of each group without states: where it ends, and whether its group has full
    attention."""
    for span, present in zip(spans, available, strict=True):
        if present.all():
            continue
        complete = span.is_complete(present)
        usable &= complete
        if span.group.state:
            continue
        i = int(present.argmin())
        holes.append((span.end_of(i), span.keys[i], span.group.is_full))
        if span.group.is_full:
            num_full = min(num_full, int(complete.argmin()))
    points = np.flatnonzero(usable)
    lacking = [np.flatnonzero(span.needed(points) & ~mask) for span, mask in zip(spans, in_tier, strict=True)]
    keys, refused_end = _first_keys(spans, lacking, room)
    if refused_end is not None:
        points = points[ends[points] < refused_end]
    done = start + int(points[-1]) + 1 if len(points) else start
    hole = None
    if refused_end is None:
        if num_full < len(ends):
            hole = min((end, key) for end, key, is_full in holes if is_full)[1]
        elif is_last and done < start + len(ends):
            hole = min(holes)[1]
    return Plan(keys, done, () if hole is None else (hole,))


def _first_keys(
    spans: Sequence[GroupSpan], lacking: Sequence[npt.NDArray[np.intp]], room: int
) -> tuple[list[OffloadKey], int | None]:
    """Returns the first ``room`` of the blocks with the indices ``lacking``, by the position at which they end; and
    where the next one ends, if there is one."""
    if len(spans) == 1:
        (span,), (indices,) = spans, lacking
        keys = [span.keys[i] for i in indices[:room].tolist()]
        return keys, span.end_of(int(indices[room])) if len(indices) > room else None
    wanted = [
        (span.end_of(i), span.group.state, span.keys[i])
        for span, indices in zip(spans, lacking, strict=True)
        for i in indices.tolist()
    ]
    # A state comes after the other blocks that end where it does.
    wanted.sort(key=lambda item: item[:2])
    return [key for _, _, key in wanted[:room]], wanted[room][0] if len(wanted) > room else None


def unreachable(
    layout: ChainLayout,
    by_group: Sequence[Sequence[OffloadKey]],
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
    last = 0
    ends = layout.unit_ends(0, min(num_units, limit // layout.unit_tokens))
    if len(ends):
        usable = np.ones(len(ends), dtype=np.bool_)
        for group, keys, present in zip(layout.groups, by_group, held, strict=True):
            span = GroupSpan.of(group, keys, ends, 0)
            usable &= span.is_complete(present[span.offset : span.offset + len(span.keys)])
        last = int(ends[usable].max(initial=0))
    useless = [np.zeros(len(keys), dtype=np.bool_) for keys in by_group]
    for mask, size, keys in zip(useless, sizes, by_group, strict=True):
        first, end = last // size, min(len(keys), limit // size)
        mask[first:end] = [key in written for key in keys[first:end]]
        mask[max(first, end) :] = True
    return useless

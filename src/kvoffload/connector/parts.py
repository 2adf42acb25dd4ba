"""Parts: blocks that are divided because the groups of an engine have blocks of different sizes.

All slots of a pool have the same size, so a block of 64 KiB beside blocks of 1 MiB would waste most of its slot. A
block of a group is therefore divided into as many parts as it needs slots of one smaller size, and each part is a KV
cache group of its own for the connector: it has the block table of its group, a range of the bytes of each device
block, and keys of its own. Managers, tiers and formats know nothing of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from operator import mul
from typing import Any, TypeVar

from kvoffload.abc import BoundaryState, KVGroup, PageGroup, ScheduledStep
from kvoffload.host.pool import padded_slot_bytes
from kvoffload.units import format_bytes

T = TypeVar("T")

MAX_PARTS = 32
"""Parts per block. Each part costs the scheduler half as much as a block."""
MAX_WASTE = 0.1
"""The share of the slots' bytes that may hold nothing before blocks are divided further."""
STATE_TOKENS = 512
"""Tokens of new KV per state that is kept: a request keeps about two, at the ends of its prompt and of its output."""
PAGE_ALIGNMENT = 16
"""The bytes of a device block are divided at multiples of it, so that kernels copy parts as fast as whole blocks."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Into how many parts the blocks of each KV cache group are divided: ``counts``, the same on every rank. The parts
    of a group follow one another, in the order of the groups."""

    counts: tuple[int, ...]
    is_divided: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_divided", max(self.counts, default=1) > 1)

    @classmethod
    def none(cls, num_groups: int) -> Parts:
        """Returns the parts of groups whose blocks are not divided."""
        return cls((1,) * num_groups)

    @property
    def last(self) -> tuple[int, ...]:
        """The last part of each group. It is written last and evicted first, so while it is present the others are."""
        return tuple(end - 1 for end in accumulate(self.counts))

    def of_groups(self, each: Sequence[T]) -> list[T]:
        """Returns for every part what its group has in ``each``, not a copy of it."""
        return [one for one, count in zip(each, self.counts, strict=True) for _ in range(count)]

    def step(self, step: ScheduledStep) -> ScheduledStep:
        """Returns the step with one block table per part, and each boundary state once per part of its group."""
        parts = [range(last + 1 - count, last + 1) for last, count in zip(self.last, self.counts, strict=True)]
        tables = {req_id: tuple(self.of_groups(tables)) for req_id, tables in step.block_ids.items()}
        states = {
            req_id: [BoundaryState(part, block, end) for g, block, end in states for part in parts[g]]
            for req_id, states in step.boundary_states.items()
        }
        return dataclasses.replace(step, block_ids=tables, boundary_states=states)

    def page_groups(self, groups: Sequence[PageGroup]) -> list[PageGroup]:
        """Returns the pages of every part: each has a range of the bytes of each device block of its group."""
        return [part for group, count in zip(groups, self.counts, strict=True) for part in _cut(group, count)]

    def slot_bytes(self, groups: Sequence[KVGroup], device_block_bytes: Sequence[int]) -> int:
        """Returns the bytes of a slot for the parts of a rank with ``device_block_bytes`` in each group."""
        sizes = zip(groups, device_block_bytes, self.counts, strict=True)
        return padded_slot_bytes(max(1, *(part_bytes(size, n) * group.block_size_factor for group, size, n in sizes)))


def part_bytes(device_block_bytes: int, count: int) -> int:
    """Returns how many bytes of a device block each of ``count`` parts has; the last one may have fewer."""
    if count == 1:
        return device_block_bytes
    return min(device_block_bytes, -(-device_block_bytes // (count * PAGE_ALIGNMENT)) * PAGE_ALIGNMENT)


def _cut(group: PageGroup, count: int) -> Iterator[PageGroup]:
    if count == 1:
        yield group
        return
    size = part_bytes(group.device_block_bytes, count)
    for first in range(0, count * size, size) if size else repeat(0, count):
        views: list[Any] = []
        at = 0
        for view in group.views:
            begin, end = max(0, first - at), min(first + size - at, view.shape[1])
            if begin < end:
                views.append(view[:, begin:end])
            at += view.shape[1]
        yield PageGroup(views, group.factor)


@dataclass(frozen=True, slots=True)
class PartPlan:
    """How blocks are divided. The waste is the share of the slots' bytes that holds nothing, at most."""

    parts: Parts
    block_bytes: tuple[int, ...]
    """Bytes of one block of each KV cache group, on all ranks together."""
    slot_bytes: int
    """Bytes of one slot on all ranks together."""
    waste: float
    waste_of_whole: float = 0.0
    """The waste if no block were divided."""

    def describe(self) -> str:
        """Describes the plan for the log."""
        blocks = f"blocks of {', '.join(map(format_bytes, self.block_bytes))}, by KV cache group,"
        waste = f"slots of {format_bytes(self.slot_bytes)}: {self.waste:.1%} of the slots' bytes hold nothing"
        if not self.parts.is_divided:
            return f"{blocks} are in {waste}"
        counts = ", ".join(map(str, self.parts.counts))
        return f"{blocks} are divided into {counts} parts for {waste}, instead of {self.waste_of_whole:.1%}"


def plan_parts(groups: Sequence[KVGroup], ranks: Sequence[Sequence[int]]) -> PartPlan:
    """Returns the plan with the fewest parts that wastes less than MAX_WASTE; without one, the plan that wastes least.

    ``ranks`` has the bytes of one device block of each group on each rank that has a pool. Every rank must pass the
    same, since the parts are the same on all of them; slots may differ between ranks. Groups count by the number of
    their blocks for the same tokens, states by one per STATE_TOKENS. Since there may be fewer states, the waste is the
    larger one of that with these states and that without any.
    """
    by_rank = Counter(map(tuple, ranks))
    total = [sum(sizes) for sizes in zip(*ranks, strict=True)]
    block_bytes = [size * group.block_size_factor for size, group in zip(total, groups, strict=True)]
    align = math.lcm(*(group.block_tokens for group in groups))
    weights = [align / max(group.block_tokens, STATE_TOKENS if group.state else 0) for group in groups]
    mixes = [weights, [0.0 if group.state else weight for group, weight in zip(groups, weights, strict=True)]]

    def plan(counts: Sequence[int]) -> PartPlan:
        parts = Parts(tuple(counts))
        slot_bytes = sum(parts.slot_bytes(groups, sizes) * n for sizes, n in by_rank.items())
        waste = 0.0
        for mix in mixes:
            used, num_slots = sum(map(mul, mix, block_bytes)), sum(map(mul, mix, counts))
            if used:
                waste = max(waste, 1 - used / (num_slots * slot_bytes))
        return PartPlan(parts, tuple(block_bytes), slot_bytes, waste)

    def cost(plan: PartPlan) -> tuple[bool, float, float]:
        num_slots = float(sum(map(mul, weights, plan.parts.counts)))
        if plan.waste < MAX_WASTE:
            return False, num_slots, plan.waste
        # More parts for less than a hundredth of the pool are not worth their cost.
        return True, round(plan.waste, 2), num_slots

    whole = plan((1,) * len(groups))
    # If the ranks have different blocks, their slots cannot all be full: one of these divisions is good on average.
    found = {counts for sizes in (*by_rank, total) for counts in _divisions(groups, sizes)}
    best = min([whole, *map(plan, sorted(found))], key=cost)
    return dataclasses.replace(best, waste_of_whole=whole.waste)


def _divisions(groups: Sequence[KVGroup], device_block_bytes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yields all counts worth a look for device blocks of these sizes: for each slot that some number of parts of some
    block fills, how many parts of each block fit into such slots."""
    blocks = list(zip(groups, device_block_bytes, strict=True))
    for filling, size in blocks:
        for count in range(1, MAX_PARTS + 1):
            slot = padded_slot_bytes(part_bytes(size, count) * filling.block_size_factor)
            counts = tuple(_num_parts(each, group.block_size_factor, slot) for group, each in blocks)
            if max(counts) <= MAX_PARTS:
                yield counts


def _num_parts(device_block_bytes: int, factor: int, slot_bytes: int) -> int:
    """Returns how many parts a block needs so that each fits into a slot; more than MAX_PARTS if none does."""
    if device_block_bytes * factor <= slot_bytes:
        return 1
    size = slot_bytes // factor // PAGE_ALIGNMENT * PAGE_ALIGNMENT
    return -(-device_block_bytes // size) if size else MAX_PARTS + 1

"""The copies of a job: those of a count one by one, or an error."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.abc import DeviceSpec, LoadStoreSpec, PageGroup, TransferSpec
from kvoffload.transfer.copies import copy_lists

FACTORS = (1, 3, 2)
NUM_BLOCKS = (20, 0, 9)
"""The rank has no layer of the second group."""
NUM_SLOTS = 12


@st.composite
def specs(draw: st.DrawFn) -> TransferSpec:
    """Returns a job, which often is possible."""
    parts = draw(st.tuples(*(st.tuples(st.integers(0, 5), st.integers(0, 7)) for _ in FACTORS)))
    sizes, firsts = tuple(size for size, _ in parts), tuple(first for _, first in parts)
    if draw(st.integers(0, 9)) == 0:
        sizes = sizes[:-1]
    blocks = [draw(st.integers(0, NUM_BLOCKS[g] or 99)) for g, size in enumerate(sizes) for _ in range(size)]
    needed = sum(
        -(-(first % factor + size) // factor)
        for size, first, factor in zip(sizes, firsts, FACTORS, strict=False)
        if size
    )
    num_slots = needed + (draw(st.integers(-1, 1)) if draw(st.integers(0, 9)) == 0 else 0)
    slots = draw(st.lists(st.integers(0, NUM_SLOTS), min_size=max(num_slots, 0), max_size=max(num_slots, 0)))
    device = DeviceSpec(np.array(blocks, dtype=np.int64), sizes, firsts)
    return TransferSpec("r", LoadStoreSpec("CPU", np.array(slots, dtype=np.int64)), device)


def rows_of(spec: TransferSpec) -> list[tuple[int, int, int, int]] | None:
    """Returns group, device block, slot and part of each copy, one by one; None if the job is not possible."""
    device, slots, blocks = spec.device, spec.host.slots.tolist(), spec.device.block_ids.tolist()
    if len(device.group_sizes) != len(FACTORS):
        return None
    rows, used, taken = [], 0, 0
    for g, (size, first, factor) in enumerate(zip(device.group_sizes, device.block_indices, FACTORS, strict=True)):
        for i in range(size):
            at = used + (first % factor + i) // factor
            if at >= len(slots):
                return None
            if NUM_BLOCKS[g]:
                if not (0 <= blocks[taken] < NUM_BLOCKS[g] and 0 <= slots[at] < NUM_SLOTS):
                    return None
                rows.append((g, blocks[taken], slots[at], (first % factor + i) % factor))
            taken += 1
        used += -(-(first % factor + size) // factor) if size else 0
    return rows if (used, taken) == (len(slots), len(blocks)) else None


GROUPS = [
    PageGroup([np.zeros((n, 8), np.uint8)] if n else [], factor) for factor, n in zip(FACTORS, NUM_BLOCKS, strict=True)
]


def lists_of(spec: TransferSpec) -> list[tuple[int, int, int, int]] | None:
    """Returns what ``copy_lists`` makes of a job, as ``rows_of`` does."""
    try:
        lists = copy_lists(spec, GROUPS, NUM_SLOTS)
    except ValueError:
        return None
    return [
        (copies.group, *row)
        for copies in lists
        for row in zip(copies.device_blocks.tolist(), copies.slots.tolist(), copies.parts.tolist(), strict=True)
    ]


@given(specs())
def test_a_job_has_the_copies_of_a_count_one_by_one_or_an_error(spec: TransferSpec) -> None:
    assert lists_of(spec) == rows_of(spec)

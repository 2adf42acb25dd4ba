"""Parts: the plan wastes little with few parts, and each byte of a block is in exactly one part."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.abc import BoundaryState, ByteArray, KVGroup, PageGroup, ScheduledStep
from kvoffload.connector import parts
from kvoffload.connector.layout import KeyLayout
from kvoffload.connector.parts import MAX_PARTS, MAX_WASTE, PAGE_ALIGNMENT, Parts, plan_parts
from tests.connector.rig import FakeRequest

KIB = 1024
FULL, WINDOW, STATE = KVGroup(128), KVGroup(128, sliding_window=512), KVGroup(128, state=True)


def weights_of(groups: Sequence[KVGroup]) -> list[float]:
    """Returns how many blocks of each group belong to the same tokens."""
    align = math.lcm(*(group.block_tokens for group in groups))
    return [align / max(group.block_tokens, parts.STATE_TOKENS if group.state else 0) for group in groups]


def waste_of(groups: Sequence[KVGroup], sizes: Sequence[int], counts: Sequence[int], states: bool) -> float:
    """Returns the waste on one rank, counted block by block. ``states``: whether some states are stored, or none."""
    used = slots = 0.0
    for group, size, count, weight in zip(groups, sizes, counts, weights_of(groups), strict=True):
        if states or not group.state:
            used += size * group.block_size_factor * weight
            slots += count * weight
    if not used:
        return 0.0
    slot_bytes = Parts(tuple(counts)).slot_bytes(groups, sizes)
    return 1 - used / (slots * slot_bytes)


# The plan.


@pytest.mark.parametrize(
    ("groups", "sizes", "counts", "slot_bytes"),
    [
        pytest.param([STATE] * 3 + [FULL], [2, 2, 2, 128], (1, 1, 1, 8), 16, id="small states"),
        pytest.param([FULL, STATE], [64, 1024], (1, 16), 64, id="large states, of which there may be few"),
        pytest.param([FULL, STATE], [1088, 1072], (1, 1), 1088, id="pages of nearly one size"),
        pytest.param([WINDOW] * 6 + [FULL], [640] * 6 + [128], (2,) * 6 + (1,), 320, id="fewer layers in one group"),
        pytest.param([KVGroup(16, 3), KVGroup(48)], [10, 7], (4, 1), 8, id="several device blocks per block"),
        pytest.param([FULL], [5], (1,), 8, id="one group"),
        pytest.param([FULL, WINDOW], [0, 0], (1, 1), 4, id="a rank without layers"),
    ],
)
def test_plans(groups: list[KVGroup], sizes: list[int], counts: tuple[int, ...], slot_bytes: int) -> None:
    plan = plan_parts(groups, [[size * KIB for size in sizes]])
    assert (plan.parts.counts, plan.slot_bytes) == (counts, slot_bytes * KIB)


kinds = st.builds(
    lambda kind, factor: KVGroup(16, 1 if kind.state else factor, kind.sliding_window, state=kind.state),
    st.sampled_from([FULL, WINDOW, STATE]),
    st.sampled_from([1, 1, 2, 3]),
)
sizes = st.one_of(st.sampled_from([0, 16, 2048, 4096, 65_536, 98_304, 1 << 20]), st.integers(1, 3 << 20))


@st.composite
def engines(draw: st.DrawFn) -> tuple[list[KVGroup], list[list[int]]]:
    """Groups, and the bytes of their device blocks on up to three ranks."""
    groups = draw(st.lists(kinds, min_size=1, max_size=5))
    rank = st.lists(sizes, min_size=len(groups), max_size=len(groups))
    return groups, draw(st.lists(rank, min_size=1, max_size=3))


@given(engines())
def test_any_plan(engine: tuple[list[KVGroup], list[list[int]]]) -> None:
    groups, ranks = engine
    plan = plan_parts(groups, ranks)
    counts = plan.parts.counts
    assert len(counts) == len(groups)
    assert all(1 <= count <= MAX_PARTS for count in counts)
    assert 0 <= plan.waste <= plan.waste_of_whole < 1
    assert plan.slot_bytes == sum(plan.parts.slot_bytes(groups, rank) for rank in ranks)
    assert plan_parts(groups, [list(rank) for rank in ranks]) == plan, "every rank finds the same plan"
    if plan.waste_of_whole < MAX_WASTE:
        assert not plan.parts.is_divided
    if len(ranks) == 1:
        found = max(waste_of(groups, ranks[0], counts, states) for states in (True, False))
        assert plan.waste == pytest.approx(found, abs=1e-9)
    for rank in ranks:
        pages = [PageGroup([np.broadcast_to(np.uint8(0), (1, size))] if size else []) for size in rank]
        divided = plan.parts.page_groups(
            [PageGroup(page.views, group.block_size_factor) for page, group in zip(pages, groups, strict=True)]
        )
        assert max(part.block_bytes for part in divided) <= plan.parts.slot_bytes(groups, rank)


@settings(max_examples=30)
@given(st.lists(kinds, min_size=2, max_size=3), st.data())
def test_no_plan_is_better(groups: list[KVGroup], data: st.DataObject) -> None:
    """On one rank, no other division with up to eight parts per block wastes less than a tenth with fewer parts, or
    clearly less than the plan if that wastes more."""
    rank = data.draw(st.lists(sizes, min_size=len(groups), max_size=len(groups)))
    plan = plan_parts(groups, [rank])
    weights = weights_of(groups)

    def num_slots(counts: Sequence[int]) -> float:
        return sum(weight * count for weight, count in zip(weights, counts, strict=True))

    for counts in itertools.product(range(1, 9), repeat=len(groups)):
        waste = max(waste_of(groups, rank, counts, states) for states in (True, False))
        if plan.waste < MAX_WASTE:
            assert waste >= MAX_WASTE or num_slots(counts) >= num_slots(plan.parts.counts)
        else:
            assert waste > plan.waste - 0.011


def test_ranks_with_other_layers_have_the_same_parts_and_slots_of_their_own() -> None:
    """Of a pipeline, the first rank has two layers per group, the second one."""
    ranks = [[512 * KIB, 48 * KIB], [256 * KIB, 24 * KIB]]
    plan = plan_parts([FULL, FULL], ranks)
    assert plan.parts.counts == (6, 1)
    assert [plan.parts.slot_bytes([FULL, FULL], rank) for rank in ranks] == [88 * KIB, 44 * KIB]
    assert plan.slot_bytes == 132 * KIB


# Groups, tables and states of parts.


def test_tables_and_states_go_to_every_part_of_their_group() -> None:
    divided = Parts((2, 1, 3))
    assert divided.of_groups([FULL, WINDOW, STATE]) == [FULL, FULL, WINDOW, STATE, STATE, STATE]
    assert divided.last == (1, 2, 5)
    tables = [[1, 2], [3], [4, 5]]
    found = divided.of_groups(tables)
    assert found == [[1, 2], [1, 2], [3], [4, 5], [4, 5], [4, 5]]
    assert found[0] is tables[0], "no table is copied"
    states = {"r": [BoundaryState(2, 5, 128), BoundaryState(1, 9, 256)]}
    step = divided.step(ScheduledStep({"r": 7}, {"r": ([1], [3], [4])}, frozenset("r"), boundary_states=states))
    assert step.block_ids == {"r": ([1], [1], [3], [4], [4], [4])}
    assert step.num_scheduled_tokens == {"r": 7}
    assert step.replaced == {"r"}
    assert step.boundary_states == {
        "r": [BoundaryState(part, 5, 128) for part in (3, 4, 5)] + [BoundaryState(2, 9, 256)]
    }


def test_without_parts_nothing_is_copied() -> None:
    whole = Parts.none(2)
    assert not whole.is_divided
    pages = [PageGroup([np.zeros((2, 40), np.uint8)], 2), PageGroup([])]
    assert all(mine is given for mine, given in zip(whole.page_groups(pages), pages, strict=True))
    assert whole.last == (0, 1)


def test_a_layout_has_a_group_per_part() -> None:
    layout = KeyLayout([FULL, WINDOW, STATE], None, parts=Parts((3, 1, 2)))
    assert (layout.full, layout.windows, layout.states) == ((0, 1, 2), (3,), (4, 5))
    assert layout.chains.kv_blocks_per_unit == 4, "states come on top"
    request = FakeRequest("r", list(range(256)), hash_tokens=layout.hash_block_size)
    assert len({layout.key(part, 0, request, b"") for part in range(6)}) == 6, "each part has a key of its own"


# Bytes.

BLOCKS = SLOTS = 24


def noise(*shape: int) -> ByteArray:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, np.uint8)


def merged(pages: Sequence[int]) -> list[ByteArray]:
    """Returns layers of one array, with pages of one size."""
    return list(noise(len(pages), BLOCKS, pages[0]))


def apart(pages: Sequence[int]) -> list[ByteArray]:
    """Returns layers that were allocated one by one."""
    return [noise(BLOCKS, size) for size in pages]


def packed(pages: Sequence[int]) -> list[ByteArray]:
    """Returns layers whose pages of one device block follow one another."""
    whole, ends = noise(BLOCKS, sum(pages)), list(itertools.accumulate(pages))
    return [whole[:, end - size : end] for size, end in zip(pages, ends, strict=True)]


@given(
    st.lists(st.integers(1, 200), max_size=5),
    st.integers(1, MAX_PARTS),
    st.sampled_from([merged, apart, packed]),
    st.integers(1, 3),
)
def test_each_byte_is_in_one_part(
    pages: list[int], count: int, make: Callable[[Sequence[int]], list[ByteArray]], factor: int
) -> None:
    views = make(pages) if pages else []
    whole = PageGroup(views, factor)
    divided = Parts((count,)).page_groups([whole])
    assert len(divided) == count
    assert all(part.factor == factor for part in divided)
    for block in range(3):
        row = b"".join(view[block].tobytes() for view in views)
        assert b"".join(view[block].tobytes() for part in divided for view in part.views) == row
    at = 0
    for part in divided:
        # Parts begin at multiples of 16 bytes of the device block.
        assert at % PAGE_ALIGNMENT == 0 or not part.views
        at += part.device_block_bytes
    assert at == whole.device_block_bytes

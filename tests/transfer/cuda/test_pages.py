"""Runs of addresses computed from views."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from kvoffload.abc import PageGroup, Placement
from kvoffload.transfer.cuda.pages import LayerRun, PageTable, page_table

LAYERS, BLOCKS, PAGE = 3, 4, 32


def test_layers_apart_have_a_run_each_in_the_order_of_the_views() -> None:
    views = [np.zeros((BLOCKS, size), np.uint8) for size in (64, 24, 40)]
    table = page_table(PageGroup(views, 2))
    bases = [view.ctypes.data for view in views]
    assert table.runs == (LayerRun(bases[0], 64, 64, 0), LayerRun(bases[1], 24, 24, 64), LayerRun(bases[2], 40, 40, 88))
    assert (table.device_block_bytes, table.num_blocks, table.factor, table.needs_gather) == (128, BLOCKS, 2, True)


def test_blocks_outermost_are_one_run() -> None:
    whole = np.zeros((BLOCKS, LAYERS, PAGE), np.uint8)
    table = page_table(PageGroup([whole[:, layer] for layer in range(LAYERS)]))
    assert table.runs == (LayerRun(whole.ctypes.data, LAYERS * PAGE, LAYERS * PAGE, 0),)
    assert table.is_compact
    assert not table.needs_gather


def test_pages_in_another_order_or_with_gaps_are_not_merged() -> None:
    whole = np.zeros((BLOCKS, LAYERS, PAGE), np.uint8)
    assert len(page_table(PageGroup([whole[:, layer] for layer in (1, 0, 2)])).runs) == 3
    assert len(page_table(PageGroup([whole[:, 0], whole[:, 2]])).runs) == 2


def test_pages_at_places_in_a_row_share_a_run_only_if_they_are_neighbours_there_too() -> None:
    whole = np.zeros((BLOCKS, LAYERS, PAGE), np.uint8)
    views, base, step = [whole[:, layer] for layer in range(LAYERS)], int(whole.ctypes.data), LAYERS * PAGE
    table = page_table(PageGroup(views, 2, Placement((7, 7 + PAGE, 8 + 2 * PAGE), 200)))
    assert table.runs == (LayerRun(base, step, 2 * PAGE, 7), LayerRun(base + 2 * PAGE, step, PAGE, 8 + 2 * PAGE))
    assert (table.device_block_bytes, table.row_bytes, table.factor) == (LAYERS * PAGE, 200, 2)
    assert [table.is_compact, table.needs_gather] == [False] * 2
    one_run = page_table(PageGroup(views, 1, Placement((PAGE, 2 * PAGE, 3 * PAGE), 4 * PAGE)))
    assert one_run.runs == (LayerRun(base, step, LAYERS * PAGE, PAGE),)
    assert not one_run.is_compact, "a part of the row belongs to other ranks"
    in_another_order = page_table(PageGroup(views, 1, Placement((PAGE, 2 * PAGE, 0), LAYERS * PAGE)))
    assert [run.offset for run in in_another_order.runs] == [PAGE, 0]
    assert in_another_order.needs_gather


@pytest.mark.parametrize(
    "offsets", [(-1, 40, 80), (0, PAGE - 1, 80), (80, 40, 40), (0, 40, 97), (0, 40), (0, 40, 64, 96)]
)
def test_pages_without_places_of_their_own_are_refused(offsets: tuple[int, ...]) -> None:
    views = [np.zeros((BLOCKS, PAGE), np.uint8) for _ in range(LAYERS)]
    assert page_table(PageGroup(views, 1, Placement((0, 96, 40), 128))).row_bytes == 128
    with pytest.raises(ValueError, match=r"places are given|into a row of 128 bytes"):
        page_table(PageGroup(views, 1, Placement(offsets, 128)))


def test_a_run_of_every_page_holds_the_bytes_of_the_view() -> None:
    rng = np.random.default_rng(0)
    whole = rng.integers(0, 256, (BLOCKS, LAYERS + 1, PAGE), np.uint8)
    views = [whole[:, 0], whole[:, 1], whole[:, 3]]
    runs = page_table(PageGroup(views)).runs
    for block in range(BLOCKS):
        row = b"".join(ctypes.string_at(run.base + block * run.stride, run.nbytes) for run in runs)
        assert row == b"".join(view[block].tobytes() for view in views)


def test_a_rank_without_layers_of_a_group_has_no_runs() -> None:
    assert page_table(PageGroup([], 2)) == PageTable((), 0, 0, 2)


def test_views_with_different_numbers_of_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="same number"):
        page_table(PageGroup([np.zeros((4, 8), np.uint8), np.zeros((5, 8), np.uint8)]))

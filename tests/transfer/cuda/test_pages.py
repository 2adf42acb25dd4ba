"""Runs of addresses computed from views."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffload.abc import PageGroup, Placement
from kvoffload.transfer.cuda.pages import LayerRun, PageTable, page_table

LAYERS, BLOCKS, PAGE = 3, 4, 32


def test_blocks_outermost_are_one_run() -> None:
    whole = np.zeros((BLOCKS, LAYERS, PAGE), np.uint8)
    table = page_table(PageGroup([whole[:, layer] for layer in range(LAYERS)]))
    assert table.runs == (LayerRun(whole.ctypes.data, LAYERS * PAGE, LAYERS * PAGE, 0),)
    assert table.is_compact
    assert not table.needs_gather


@pytest.mark.parametrize(
    "offsets", [(-1, 40, 80), (0, PAGE - 1, 80), (80, 40, 40), (0, 40, 97), (0, 40), (0, 40, 64, 96)]
)
def test_pages_without_places_of_their_own_are_refused(offsets: tuple[int, ...]) -> None:
    views = [np.zeros((BLOCKS, PAGE), np.uint8) for _ in range(LAYERS)]
    assert page_table(PageGroup(views, 1, Placement((0, 96, 40), 128))).row_bytes == 128
    with pytest.raises(ValueError, match=r"places are given|into a row of 128 bytes"):
        page_table(PageGroup(views, 1, Placement(offsets, 128)))


def test_a_rank_without_layers_of_a_group_has_no_runs() -> None:
    assert page_table(PageGroup([], 2)) == PageTable((), 0, 0, 2)


def test_views_with_different_numbers_of_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="same number"):
        page_table(PageGroup([np.zeros((4, 8), np.uint8), np.zeros((5, 8), np.uint8)]))

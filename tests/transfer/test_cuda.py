"""Gathering and scattering with functions of torch, on CPU tensors."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvoffload.transfer.cuda.kernels import as_words, gather, scatter  # noqa: E402

LAYERS, BLOCKS, PAGE = 3, 12, 64


def together() -> list[torch.Tensor]:
    """Returns views of one allocation, as vLLM makes them."""
    return list(torch.randint(0, 256, (LAYERS, BLOCKS, PAGE), dtype=torch.uint8))


def apart() -> list[torch.Tensor]:
    """Returns separate allocations, with pages of different sizes."""
    return [torch.randint(0, 256, (BLOCKS, size), dtype=torch.uint8) for size in (64, 24, 40)]


def interleaved() -> list[torch.Tensor]:
    """Returns views of one allocation whose outermost dimension is blocks."""
    whole = torch.randint(0, 256, (BLOCKS, LAYERS, PAGE), dtype=torch.uint8)
    return [whole[:, layer] for layer in range(LAYERS)]


LAYOUTS = pytest.mark.parametrize("make", [together, apart, interleaved])


@LAYOUTS
def test_gather_copies_every_layers_page_of_each_block(make) -> None:
    views = make()
    index = torch.tensor([5, 0, 11])
    stage = torch.empty((3, sum(view.shape[1] for view in views)), dtype=torch.uint8)
    gather(as_words(views), index, stage)
    assert torch.equal(stage, torch.cat([view[index] for view in views], dim=1))


@LAYOUTS
def test_scatter_undoes_gather_and_touches_nothing_else(make) -> None:
    views = make()
    before = [view.clone() for view in views]
    index = torch.tensor([7, 2])
    stage = torch.empty((2, sum(view.shape[1] for view in views)), dtype=torch.uint8)
    gather(as_words(views), index, stage)
    for view in views:
        view[index] = 0
    scatter(as_words(views), index, stage)
    assert all(torch.equal(view, old) for view, old in zip(views, before, strict=True))


def test_equally_spaced_views_become_one_array_of_words() -> None:
    (merged,) = as_words(together())
    assert merged.shape == (BLOCKS, LAYERS, PAGE // 8)
    assert merged.dtype == torch.int64
    assert len(as_words(apart())) == 3


def test_the_size_of_pages_limits_the_width_of_words() -> None:
    views = [torch.zeros((BLOCKS, 6), dtype=torch.uint8) for _ in range(2)]
    assert as_words(views)[0].dtype == torch.int16

"""The CUDA transfer engine. Gathering and scattering are tested on CPU tensors; the other tests need a CUDA device."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvoffload.abc import DeviceSpec, LoadStoreSpec, PageGroup, TransferSpec
from kvoffload.host.pool import HostPool, padded_slot_bytes

torch = pytest.importorskip("torch")

from kvoffload.transfer.cuda.kernels import as_words, gather, scatter  # noqa: E402

LAYERS, BLOCKS, PAGE = 3, 12, 64
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def together(device: str = "cpu") -> list[torch.Tensor]:
    """Returns views of one allocation, as vLLM makes them."""
    return list(torch.randint(0, 256, (LAYERS, BLOCKS, PAGE), dtype=torch.uint8, device=device))


def apart(device: str = "cpu") -> list[torch.Tensor]:
    """Returns separate allocations, with pages of different sizes."""
    return [torch.randint(0, 256, (BLOCKS, size), dtype=torch.uint8, device=device) for size in (64, 24, 40)]


def interleaved(device: str = "cpu") -> list[torch.Tensor]:
    """Returns views of one allocation whose outermost dimension is blocks."""
    whole = torch.randint(0, 256, (BLOCKS, LAYERS, PAGE), dtype=torch.uint8, device=device)
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


@pytest.fixture
def pool() -> Iterator[HostPool]:
    pool = HostPool(8, padded_slot_bytes(LAYERS * PAGE * 2))
    yield pool
    pool.close()


def run(transfer, job_id: int, spec: TransferSpec, is_store: bool):
    transfer.submit(job_id, spec, is_store)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        transfer.wait_any(0.1)
        for result in transfer.poll(busy=False):
            assert result.job_id == job_id
            return result
    raise AssertionError("the copy did not end")


def spec_of(slots: list[int], blocks: list[int], first: int = 0) -> TransferSpec:
    device = DeviceSpec(np.array(blocks), (len(blocks),), (first,))
    return TransferSpec("r", LoadStoreSpec("CPU", np.array(slots)), device)


@needs_cuda
@pytest.mark.cuda
@LAYOUTS
@pytest.mark.parametrize("factor", [1, 2])
def test_round_trip_on_a_device(make, factor: int, pool: HostPool) -> None:
    from kvoffload.transfer.cuda.transfer import CudaTransfer

    views = make("cuda")
    before = [view.clone() for view in views]
    transfer = CudaTransfer([PageGroup(views, factor)], pool.data)
    blocks = [4, 9, 1, 6]
    slots = [5, 2, 7, 0][: len(blocks) // factor]
    assert run(transfer, 1, spec_of(slots, blocks), is_store=True).ok
    for view in views:
        view.zero_()
    result = run(transfer, 2, spec_of(slots, blocks), is_store=False)
    assert result.ok
    assert result.nbytes == len(blocks) * sum(view.shape[1] for view in views)
    for view, old in zip(views, before, strict=True):
        assert torch.equal(view[blocks], old[blocks])
        assert not view[0].any(), "a block outside the job was written"
    transfer.close()


@needs_cuda
@pytest.mark.cuda
def test_more_blocks_than_the_staging_buffer(monkeypatch: pytest.MonkeyPatch, pool: HostPool) -> None:
    from kvoffload.transfer.cuda import transfer as cuda

    monkeypatch.setattr(cuda, "STAGING_BYTES", 2 * LAYERS * PAGE)
    views = together("cuda")
    before = [view.clone() for view in views]
    transfer = cuda.CudaTransfer([PageGroup(views)], pool.data)
    spec = spec_of(list(range(8)), [11, 3, 5, 7, 1, 2, 8, 10])
    assert run(transfer, 1, spec, is_store=True).ok
    for view in views:
        view.zero_()
    assert run(transfer, 2, spec, is_store=False).ok
    blocks = spec.device.block_ids.tolist()
    assert all(torch.equal(view[blocks], old[blocks]) for view, old in zip(views, before, strict=True))
    transfer.close()


@needs_cuda
@pytest.mark.cuda
def test_a_fence_makes_later_device_work_wait_for_the_store(pool: HostPool) -> None:
    from kvoffload.transfer.cuda.transfer import CudaTransfer

    views = together("cuda")
    before = [view.clone() for view in views]
    transfer = CudaTransfer([PageGroup(views)], pool.data)
    transfer.submit(1, spec_of([0, 1], [3, 4]), is_store=True)
    transfer.wait([1])
    for view in views:
        view[3:5] = 0
    torch.cuda.synchronize()
    stored = torch.from_numpy(pool.data[:2, : LAYERS * PAGE].copy())
    assert torch.equal(stored, torch.cat([old[3:5].cpu() for old in before], dim=1))
    transfer.close()


@needs_cuda
@pytest.mark.cuda
def test_a_bad_block_number_fails_only_its_job(pool: HostPool) -> None:
    from kvoffload.transfer.cuda.transfer import CudaTransfer

    transfer = CudaTransfer([PageGroup(together("cuda"))], pool.data)
    assert not run(transfer, 1, spec_of([0], [BLOCKS]), is_store=True).ok
    assert run(transfer, 2, spec_of([0], [1]), is_store=True).ok
    transfer.close()

"""Copies between CUDA device blocks and the host pool: a stream a direction, events, batched copies."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvoffload.base import Slots, TransferSpec
from kvoffload.hostpool import ByteArray
from kvoffload.transfer.base import Transfer, TransferResult
from kvoffload.transfer.inline import expand_spec

logger = logging.getLogger(__name__)

STAGING_BYTES = 64 << 20
"""Device memory a direction uses to gather or scatter blocks."""
POLL_EVERY_S = 50e-6


@dataclass(slots=True)
class _Job:
    nbytes: int
    is_store: bool
    start: torch.cuda.Event
    end: torch.cuda.Event
    keep: list[torch.Tensor] = field(default_factory=list)
    """Index tensors that the stream still reads."""


class CudaTransfer(Transfer):
    """One kernel gathers (or scatters) up to STAGING_BYTES of pages, one copy a block crosses the bus.

    ``device_views`` are the layers' pages as bytes on one CUDA device, each (num_device_blocks, page_bytes)
    with contiguous pages. ``pool_data`` is registered with CUDA, so that copies neither block nor bounce;
    where that fails, copies work and are slower. Stores wait for the work issued before they were
    submitted, loads for the work issued before the current forward pass.
    """

    def __init__(self, device_views: Sequence[torch.Tensor], pool_data: ByteArray, factor: int = 1) -> None:
        self._device = device_views[0].device
        self._layers = as_words(device_views)
        self._num_device_blocks = device_views[0].shape[0]
        self._block_bytes = sum(view.shape[1] for view in device_views)
        self._factor = factor
        host = torch.from_numpy(pool_data)
        self._host = host[:, : factor * self._block_bytes].unflatten(1, (factor, self._block_bytes))
        self._registered = self._register(host)
        self._streams = {is_store: torch.cuda.Stream(self._device) for is_store in (False, True)}
        blocks = max(1, STAGING_BYTES // self._block_bytes)
        self._staging = {
            is_store: torch.empty((blocks, self._block_bytes), dtype=torch.uint8, device=self._device)
            for is_store in (False, True)
        }
        self._before_forward = self._record(torch.cuda.current_stream(self._device))
        self._jobs: dict[int, _Job] = {}
        self._results: list[TransferResult] = []

    def _register(self, host: torch.Tensor) -> int | None:
        address = host.data_ptr()
        error = torch.cuda.cudart().cudaHostRegister(address, host.numel(), 0)
        if int(error) != 0:
            logger.warning(
                "kvoffload: CUDA cannot register the host pool (error %s); copies will be slower. "
                "Raise the locked-memory limit (ulimit -l unlimited)",
                error,
            )
            # The runtime remembers the error until somebody asks; better here than in the engine's next kernel.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1, device=self._device)
            return None
        return int(address)

    @staticmethod
    def _record(stream: Any, timing: bool = False) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=timing)
        event.record(stream)
        return event

    def before_forward(self) -> None:
        self._before_forward = self._record(torch.cuda.current_stream(self._device))

    def submit(self, job_id: int, spec: TransferSpec, is_store: bool) -> None:
        try:
            blocks, slots, parts = expand_spec(spec, self._factor)
            if len(blocks) and not (blocks.min() >= 0 and blocks.max() < self._num_device_blocks):
                raise ValueError(f"a device block is not in [0, {self._num_device_blocks})")
            if len(slots) and not (slots.min() >= 0 and slots.max() < len(self._host)):
                raise ValueError(f"a slot is not in [0, {len(self._host)})")
        except ValueError:
            logger.exception("kvoffload: job %d cannot be copied", job_id)
            self._results.append(TransferResult(job_id, ok=False))
            return
        try:
            self._start(job_id, is_store, blocks, slots, parts)
        except torch.OutOfMemoryError:
            # The engine has taken all memory for a moment. Nothing of this job may go on behind its report.
            logger.warning("kvoffload: no device memory for the blocks of job %d", job_id)
            self._streams[is_store].synchronize()
            self._results.append(TransferResult(job_id, ok=False))

    def _start(
        self,
        job_id: int,
        is_store: bool,
        blocks: npt.NDArray[np.int64],
        slots: Slots,
        parts: npt.NDArray[np.int64],
    ) -> None:
        stream, staging = self._streams[is_store], self._staging[is_store]
        if is_store:
            stream.wait_event(self._record(torch.cuda.current_stream(self._device)))
        else:
            stream.wait_event(self._before_forward)
        keep = []
        with torch.cuda.stream(stream):
            start = self._record(stream, timing=True)
            for first in range(0, len(blocks), len(staging)):
                last = min(first + len(staging), len(blocks))
                pinned = torch.from_numpy(blocks[first:last].copy()).pin_memory()
                index = pinned.to(self._device, non_blocking=True)
                keep += [pinned, index]
                stage = staging[: last - first]
                places = list(zip(slots[first:last].tolist(), parts[first:last].tolist(), strict=True))
                if is_store:
                    gather(self._layers, index, stage)
                    for row, place in zip(stage, places, strict=True):
                        self._host[place].copy_(row, non_blocking=True)
                else:
                    for row, place in zip(stage, places, strict=True):
                        row.copy_(self._host[place], non_blocking=True)
                    scatter(self._layers, index, stage)
            end = self._record(stream, timing=True)
        self._jobs[job_id] = _Job(len(blocks) * self._block_bytes, is_store, start, end, keep)

    def poll(self, busy: bool) -> list[TransferResult]:
        for job_id in [job_id for job_id, job in self._jobs.items() if job.end.query()]:
            job = self._jobs.pop(job_id)
            seconds = job.start.elapsed_time(job.end) / 1e3
            self._results.append(TransferResult(job_id, True, job.nbytes, seconds))
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: Iterable[int]) -> None:
        """Makes the device wait, not this thread: later work on the engine's stream, and later loads."""
        current = torch.cuda.current_stream(self._device)
        for job_id in job_ids:
            job = self._jobs.get(job_id)
            if job is not None:
                current.wait_event(job.end)
                if job.is_store:
                    self._streams[False].wait_event(job.end)

    def wait_any(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._jobs and not self._results and time.monotonic() < deadline:
            if any(job.end.query() for job in self._jobs.values()):
                return
            time.sleep(POLL_EVERY_S)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()
        self._jobs.clear()
        if self._registered is not None:
            torch.cuda.cudart().cudaHostUnregister(self._registered)
            self._registered = None


def as_words(views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The pages as the widest integers that divide all their sizes, strides and addresses, so that a kernel
    moves words and not bytes; views equally far apart in one storage become one (num_blocks, layers, words)."""
    width = 8
    for view in views:
        width = math.gcd(width, view.shape[1], view.stride(0), view.data_ptr())
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    words = [view.view(dtype) for view in views]
    first = words[0]
    steps = {b.storage_offset() - a.storage_offset() for a, b in pairwise(words)}
    same = all(
        (w.shape, w.stride()) == (first.shape, first.stride())
        and w.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        for w in words
    )
    if same and len(steps) == 1 and min(steps) > 0:
        shape = (first.shape[0], len(words), first.shape[1])
        return [first.as_strided(shape, (first.stride(0), steps.pop(), 1), first.storage_offset())]
    return [word.unsqueeze(1) for word in words]


def gather(layers: Sequence[torch.Tensor], index: torch.Tensor, stage: torch.Tensor) -> None:
    """Copies blocks ``index`` of all layers into the rows of ``stage``, bytes of shape (blocks, block_bytes)."""
    for piece, pages in _pieces(layers, stage):
        if piece.is_contiguous():
            torch.index_select(pages, 0, index, out=piece)
        else:
            piece.copy_(pages[index])


def scatter(layers: Sequence[torch.Tensor], index: torch.Tensor, stage: torch.Tensor) -> None:
    """Copies the rows of ``stage`` into blocks ``index`` of all layers."""
    for piece, pages in _pieces(layers, stage):
        pages.index_copy_(0, index, piece)


def _pieces(layers: Sequence[torch.Tensor], stage: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Each of ``layers`` with its columns of ``stage``, in its type and shape."""
    at = 0
    for pages in layers:
        width = pages.shape[1] * pages.shape[2] * pages.element_size()
        columns = stage[:, at : at + width].view(pages.dtype)
        yield columns.unflatten(1, tuple(pages.shape[1:])), pages
        at += width

"""Copies between CUDA device blocks and the host pool: one stream per direction, events, batched copies."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvoffload.abc import ByteArray, PageGroup, Transfer, TransferResult, TransferSpec
from kvoffload.transfer.copies import CopyList, copy_lists
from kvoffload.transfer.cuda.kernels import as_words, gather, scatter

logger = logging.getLogger(__name__)

STAGING_BYTES = 64 << 20
"""Device memory per direction in which blocks are gathered or scattered."""
POLL_EVERY_S = 50e-6
CLOSE_DEADLINE_S = 5.0
"""How long ``close`` waits for copies in progress."""


@dataclass(slots=True)
class _Job:
    nbytes: int
    is_store: bool
    start: torch.cuda.Event
    end: torch.cuda.Event
    keep: list[torch.Tensor] = field(default_factory=list)
    """Tensors that the stream still reads."""


class CudaTransfer(Transfer):
    """Gathers or scatters up to STAGING_BYTES of pages with one kernel, and copies over the bus block by block.

    The views of ``groups`` are torch tensors of bytes on one CUDA device, with contiguous pages. ``pool_data`` is
    registered with CUDA, so that copies are asynchronous and need no bounce buffer; if that fails, copies still work,
    but slower. Stores wait for the device work issued before they were submitted, loads for the work issued before
    the current forward pass.
    """

    def __init__(self, groups: Sequence[PageGroup], pool_data: ByteArray) -> None:
        self._groups = list(groups)
        self._device = next(view for group in groups for view in group.views).device
        self._layers = [as_words(group.views) if group.views else [] for group in groups]
        host = torch.from_numpy(pool_data)
        self._host = [
            host[:, : group.block_bytes].unflatten(1, (group.factor, group.device_block_bytes)) for group in groups
        ]
        self._registered = self._register(host)
        self._streams = {is_store: torch.cuda.Stream(self._device) for is_store in (False, True)}
        staging_bytes = max(STAGING_BYTES, *(group.device_block_bytes for group in groups))
        self._staging = {
            is_store: torch.empty(staging_bytes, dtype=torch.uint8, device=self._device) for is_store in (False, True)
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
            # The runtime reports the error again at the next call: consume it here, not in the engine's next kernel.
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
            lists = copy_lists(spec, self._groups, len(self._host[0]))
        except ValueError:
            logger.exception("kvoffload: job %d cannot be copied", job_id)
            self._results.append(TransferResult(job_id, ok=False))
            return
        try:
            self._start(job_id, is_store, lists)
        except torch.OutOfMemoryError:
            # The copies of this job that were issued must end before the job is reported.
            logger.warning("kvoffload: no device memory for the blocks of job %d", job_id)
            self._streams[is_store].synchronize()
            self._results.append(TransferResult(job_id, ok=False))

    def _start(self, job_id: int, is_store: bool, lists: list[CopyList]) -> None:
        stream = self._streams[is_store]
        if is_store:
            stream.wait_event(self._record(torch.cuda.current_stream(self._device)))
        else:
            stream.wait_event(self._before_forward)
        keep: list[torch.Tensor] = []
        with torch.cuda.stream(stream):
            start = self._record(stream, timing=True)
            for copies in lists:
                keep += self._copy(copies, is_store)
            end = self._record(stream, timing=True)
        nbytes = sum(len(copies.slots) * self._groups[copies.group].device_block_bytes for copies in lists)
        self._jobs[job_id] = _Job(nbytes, is_store, start, end, keep)

    def _copy(self, copies: CopyList, is_store: bool) -> list[torch.Tensor]:
        """Issues the copies of one group on the current stream. Returns tensors that must live until they are done."""
        block_bytes = self._groups[copies.group].device_block_bytes
        host, layers = self._host[copies.group], self._layers[copies.group]
        at_once = self._staging[is_store].numel() // block_bytes
        staging = self._staging[is_store][: at_once * block_bytes].view(at_once, block_bytes)
        keep = []
        for first in range(0, len(copies.slots), at_once):
            last = min(first + at_once, len(copies.slots))
            pinned = torch.from_numpy(copies.device_blocks[first:last].copy()).pin_memory()
            index = pinned.to(self._device, non_blocking=True)
            keep += [pinned, index]
            stage = staging[: last - first]
            places = list(zip(copies.slots[first:last].tolist(), copies.parts[first:last].tolist(), strict=True))
            if is_store:
                gather(layers, index, stage)
                for row, place in zip(stage, places, strict=True):
                    host[place].copy_(row, non_blocking=True)
            else:
                for row, place in zip(stage, places, strict=True):
                    row.copy_(host[place], non_blocking=True)
                scatter(layers, index, stage)
        return keep

    def poll(self, busy: bool) -> list[TransferResult]:
        for job_id in [job_id for job_id, job in self._jobs.items() if job.end.query()]:
            job = self._jobs.pop(job_id)
            seconds = job.start.elapsed_time(job.end) / 1e3
            self._results.append(TransferResult(job_id, True, job.nbytes, seconds))
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: Iterable[int], device_blocks: Collection[int] | None = None) -> None:
        """Makes later work on the engine's stream, and later loads, wait on the device; this thread does not wait."""
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
        deadline = time.monotonic() + CLOSE_DEADLINE_S
        while time.monotonic() < deadline and not all(stream.query() for stream in self._streams.values()):
            time.sleep(POLL_EVERY_S)
        self._jobs.clear()
        if self._registered is not None and all(stream.query() for stream in self._streams.values()):
            torch.cuda.cudart().cudaHostUnregister(self._registered)
            self._registered = None

"""Copies for engines whose KV cache lies in host memory: numpy on the engine's own thread."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload.base import Slots, TransferSpec
from kvoffload.hostpool import ByteArray
from kvoffload.transfer.base import Transfer, TransferResult

logger = logging.getLogger(__name__)

BUSY_BYTES_PER_POLL = 128 << 20
"""What a step that computes tokens pays for at most, about 10 ms at memcpy speed; the rest waits."""


@dataclass(slots=True)
class _Job:
    job_id: int
    is_store: bool
    device_blocks: npt.NDArray[np.int64]
    slots: Slots
    parts: npt.NDArray[np.int64]
    """Where in its slot each device block lies, in device blocks."""
    done: int = 0
    seconds: float = 0.0


def expand_spec(spec: TransferSpec, factor: int) -> tuple[npt.NDArray[np.int64], Slots, npt.NDArray[np.int64]]:
    """Per device block of a one-group job: its id, its slot, and its part of the slot.

    The host slots hold ``factor`` device blocks each; the first device block of the job may lie inside
    the first slot. Raises ValueError if the two sides of the spec do not match.
    """
    (first,) = spec.device.block_indices
    blocks = spec.device.block_ids
    place = first % factor + np.arange(len(blocks))
    if len(blocks) and place[-1] // factor != len(spec.host.slots) - 1:
        raise ValueError(f"{len(blocks)} device blocks from index {first} do not fill {len(spec.host.slots)} slots")
    return blocks, spec.host.slots[place // factor], place % factor


class InlineTransfer(Transfer):
    """Copies when polled or waited for, loads before stores.

    ``device_views`` are the layers' pages as bytes, each (num_device_blocks, page_bytes), rows possibly
    strided. A slot of ``pool_data`` holds ``factor`` device blocks one after another, each with its pages
    in the order of the views.
    """

    def __init__(self, device_views: Sequence[ByteArray], pool_data: ByteArray, factor: int = 1) -> None:
        if len({len(view) for view in device_views}) != 1:
            raise ValueError(f"device views have {[len(view) for view in device_views]} blocks; they must be as many")
        self._views = list(device_views)
        """Keeps alive what the merged arrays point to."""
        self._device = merge_views(device_views)
        block_bytes = sum(view.shape[1] for view in device_views)
        self._num_device_blocks = device_views[0].shape[0]
        self._host = pool_data[:, : factor * block_bytes].reshape(len(pool_data), factor, block_bytes)
        self._block_bytes = block_bytes
        self._factor = factor
        self._loads: deque[_Job] = deque()
        self._stores: deque[_Job] = deque()
        self._results: list[TransferResult] = []

    def submit(self, job_id: int, spec: TransferSpec, is_store: bool) -> None:
        try:
            blocks, slots, parts = expand_spec(spec, self._factor)
            for name, index, end in (
                ("device block", blocks, self._num_device_blocks),
                ("slot", slots, len(self._host)),
            ):
                if len(index) and not (index.min() >= 0 and index.max() < end):
                    raise ValueError(f"a {name} is not in [0, {end})")
        except ValueError:
            logger.exception("kvoffload: job %d cannot be copied", job_id)
            self._results.append(TransferResult(job_id, ok=False))
            return
        (self._stores if is_store else self._loads).append(_Job(job_id, is_store, blocks, slots, parts))

    def poll(self, busy: bool) -> list[TransferResult]:
        budget = max(1, BUSY_BYTES_PER_POLL // self._block_bytes) if busy else None
        for queue in (self._loads, self._stores):
            while queue and (budget is None or budget > 0):
                job = queue[0]
                copied = self._run(job, budget)
                budget = None if budget is None else budget - copied
                if job.done == len(job.device_blocks):
                    queue.popleft()
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: Iterable[int]) -> None:
        wanted = set(job_ids)
        for queue in (self._loads, self._stores):
            for job in [job for job in queue if job.job_id in wanted]:
                self._run(job, None)
                queue.remove(job)

    def wait_any(self, timeout_s: float) -> None:
        """Nothing runs beside this thread: there is nothing to wait for."""

    def _run(self, job: _Job, limit: int | None) -> int:
        start = time.perf_counter()
        first = job.done
        last = len(job.device_blocks) if limit is None else min(first + limit, len(job.device_blocks))
        host = self._host
        for block, slot, part in zip(
            job.device_blocks[first:last].tolist(),
            job.slots[first:last].tolist(),
            job.parts[first:last].tolist(),
            strict=True,
        ):
            row, at = host[slot, part], 0
            for view in self._device:
                pages = view[:, block]
                piece = row[at : at + pages.size].reshape(pages.shape)
                if job.is_store:
                    piece[:] = pages
                else:
                    pages[:] = piece
                at += pages.size
        job.done = last
        job.seconds += time.perf_counter() - start
        if last == len(job.device_blocks):
            self._results.append(TransferResult(job.job_id, True, last * self._block_bytes, job.seconds))
        return last - first


def merge_views(views: Sequence[ByteArray]) -> list[ByteArray]:
    """The same pages in fewer arrays of shape (layers, num_blocks, page_bytes): neighbouring views of equal
    shape and strides whose addresses are equally far apart become one, so that one call copies them all."""
    runs: list[list[ByteArray]] = []
    for view in views:
        run = runs[-1] if runs else None
        if run is not None and (view.shape, view.strides) == (run[0].shape, run[0].strides):
            step = _address(view) - _address(run[-1])
            if step > 0 and (len(run) == 1 or step == _address(run[1]) - _address(run[0])):
                run.append(view)
                continue
        runs.append([view])
    return [
        np.lib.stride_tricks.as_strided(
            run[0],
            shape=(len(run), *run[0].shape),
            strides=(_address(run[1]) - _address(run[0]) if len(run) > 1 else 0, *run[0].strides),
        )
        for run in runs
    ]


def _address(view: ByteArray) -> int:
    return int(view.ctypes.data)

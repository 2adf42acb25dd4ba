"""What a device must get right before the engine uses it: copies, and kernels."""

from __future__ import annotations

import dataclasses
import time
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from kvoffload.abc import ByteArray, DeviceSpec, LoadStoreSpec, TransferSpec
from kvoffload.transfer.cuda.calls import Kernel
from kvoffload.transfer.cuda.driver import Driver, DriverError
from kvoffload.transfer.cuda.limits import Limits
from kvoffload.transfer.cuda.native_loop import LOADS, STORES, error_of, make_loop
from kvoffload.transfer.cuda.pages import LayerRun, PageTable
from kvoffload.transfer.cuda.slots import Unregistered

if TYPE_CHECKING:
    from kvoffload.transfer.cuda.cuda_device import CudaDevice

CHECK_DEADLINE_S = 5.0
NUM_BLOCKS = 3
ALIGNMENT = 16
PAUSE_S = 100e-6


class CopiesHang(RuntimeError):
    """Copies do not end. They still use their memory."""


class _PageLocked(Unregistered):
    """Slots in memory of the driver: copies need no bounce buffer."""

    num_ready_slots = NUM_BLOCKS


class StartCheck:
    """Stores and loads device blocks in memory of its own with the native loop, and compares bytes with what the
    driver's plain copies see. The engine's memory is not touched: copies that hang may end later.

    ``blocks`` are NUM_BLOCKS device blocks in runs as long as those of ``table``, which follow one another in a row.
    All memory is that of ``device``.
    """

    def __init__(self, device: CudaDevice, driver: Driver, table: PageTable, deadline_s: float) -> None:
        self._device = device
        self._driver = driver
        self._deadline_s = deadline_s
        strides = [-(-run.nbytes // ALIGNMENT) * ALIGNMENT + ALIGNMENT for run in table.runs]
        ends = [NUM_BLOCKS * end for end in accumulate(strides)]
        address = device.allocate(ends[-1])
        offsets = accumulate((run.nbytes for run in table.runs), initial=0)
        runs = [
            LayerRun(address + end - NUM_BLOCKS * stride, stride, run.nbytes, offset)
            for run, stride, end, offset in zip(table.runs, strides, ends, offsets, strict=False)
        ]
        self.blocks = PageTable(tuple(runs), table.device_block_bytes, NUM_BLOCKS)
        self._rows = device.allocate_host(NUM_BLOCKS * self.blocks.row_bytes).reshape(NUM_BLOCKS, -1)
        self._stream = device.new_stream()

    def problem(self, kernel: Kernel | None = None) -> str | None:
        """Tries copies in both directions, with a kernel for ``blocks`` or run by run. Returns what is wrong, or None.

        Raises CopiesHang if copies do not end within the deadline, and RuntimeError if the device works no more."""
        stored, loaded = np.random.default_rng(0).integers(0, 256, (2, *self._rows.shape), np.uint8)
        problem: str | None = None
        try:
            calls = dataclasses.replace(self._device.native_calls(), kernels=[kernel])
            nbytes = self._rows.nbytes
            limits = Limits(chunk_bytes=nbytes, in_flight=1, stage_bytes=nbytes, fence_bytes=0)
            loop, _ = make_loop(self._device, calls, [self.blocks], self._rows, _PageLocked(), limits)
            loop.set_ready(NUM_BLOCKS)
            self._write(stored)
            self._rows[:] = 0
            self._copy(loop, STORES)
            if not np.array_equal(self._rows, stored):
                problem = "wrong bytes came from the device"
            self._rows[:] = loaded
            self._copy(loop, LOADS)
            if not np.array_equal(self._read(), loaded):
                problem = problem or "wrong bytes came to the device"
            if loop.batches_are_off:
                problem = problem or "the driver refused a batch of copies"
        except DriverError as error:
            problem = str(error)
        try:
            self._driver.synchronize()
        except DriverError as error:
            raise RuntimeError(
                f"the device failed while copies were tried ({problem or error}): a newer driver than CUDA "
                f"{self._driver.version} may help"
            ) from error
        return problem

    def _copy(self, loop: Any, direction: int) -> None:
        blocks = np.arange(NUM_BLOCKS)
        spec = TransferSpec("", LoadStoreSpec("CPU", blocks), DeviceSpec(blocks, (NUM_BLOCKS,), (0,)))
        loop.renew_point()
        if not loop.record_point(self._stream):
            raise error_of(loop)
        loop.submit(direction, spec, direction == STORES)
        loop.renew_point()
        loop.record_point(self._stream)
        deadline = time.monotonic() + self._deadline_s
        while not loop.take():
            if loop.error is not None:
                raise error_of(loop)
            if time.monotonic() > deadline:
                raise CopiesHang(
                    f"copies of a few blocks did not end within {self._deadline_s:g} s: a newer driver than CUDA "
                    f"{self._driver.version} may help"
                )
            if not loop.advance(direction):
                time.sleep(PAUSE_S)

    def _read(self) -> ByteArray:
        rows = np.empty_like(self._rows)
        for block, row in enumerate(rows):
            for run in self.blocks.runs:
                self._driver.read(run.base + block * run.stride, int(row.ctypes.data) + run.offset, run.nbytes)
        return rows

    def _write(self, rows: ByteArray) -> None:
        for block, row in enumerate(rows):
            for run in self.blocks.runs:
                self._driver.write(run.base + block * run.stride, int(row.ctypes.data) + run.offset, run.nbytes)

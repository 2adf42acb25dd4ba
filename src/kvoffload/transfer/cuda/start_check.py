"""What a device must get right before the engine uses it: copies and kernels are tried on its own pages."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import numpy as np

from kvoffload.abc import ByteArray
from kvoffload.transfer.copies import Numbers
from kvoffload.transfer.cuda.device import Device, Stream
from kvoffload.transfer.cuda.driver import Driver, DriverError
from kvoffload.transfer.cuda.pages import PageTable

CHECK_DEADLINE_S = 5.0


class CopiesHang(RuntimeError):
    """Copies do not end. They still use their memory."""


class StartCheck:
    """Moves the first, middle and last device block of a group to page-locked memory and back, and compares bytes with
    what the driver's plain copies see. The bytes of the blocks are put back.

    Each method returns what is wrong, or None. It raises CopiesHang if copies do not end within ``deadline_s``, and
    RuntimeError if the device works no more.
    """

    def __init__(self, device: Device, driver: Driver, stream: Stream, deadline_s: float) -> None:
        self._device = device
        self._driver = driver
        self._stream = stream
        self._deadline_s = deadline_s
        self._random = np.random.default_rng(0)
        self._end = device.new_event()

    def copies(self, table: PageTable) -> str | None:
        """Tries copies of pages in both directions."""
        blocks = _some_blocks(table)
        rows = self._driver.allocate_host(len(blocks) * table.device_block_bytes)
        pages = np.concatenate([run.base + blocks * run.stride for run in table.runs])
        places = np.concatenate(
            [rows + run.offset + np.arange(len(blocks)) * table.device_block_bytes for run in table.runs]
        )
        sizes = np.repeat([run.nbytes for run in table.runs], len(blocks))

        def store() -> None:
            self._device.copy(self._stream, places, pages, sizes)

        def load() -> None:
            self._device.copy(self._stream, pages, places, sizes)

        problem = self._round_trip(table, blocks, rows, store, load)
        self._driver.free_host(rows)
        return problem

    def kernel(self, group: int, table: PageTable) -> str | None:
        """Tries the kernels of a group, with copies of staged rows."""
        blocks = _some_blocks(table)
        nbytes = len(blocks) * table.device_block_bytes
        staging, rows = self._driver.allocate(nbytes), self._driver.allocate_host(nbytes)

        def copy(target: int, source: int) -> None:
            self._device.copy(self._stream, *(np.array([each]) for each in (target, source, nbytes)))

        def store() -> None:
            self._device.gather(self._stream, group, blocks, staging)
            copy(rows, staging)

        def load() -> None:
            copy(staging, rows)
            self._device.scatter(self._stream, group, blocks, staging)

        problem = self._round_trip(table, blocks, rows, store, load)
        self._driver.free(staging)
        self._driver.free_host(rows)
        return problem

    def _round_trip(
        self, table: PageTable, blocks: Numbers, address: int, store: Callable[[], None], load: Callable[[], None]
    ) -> str | None:
        shape = (len(blocks), table.device_block_bytes)
        memory = (ctypes.c_uint8 * (shape[0] * shape[1])).from_address(address)
        rows: ByteArray = np.ctypeslib.as_array(memory).reshape(shape)
        stored, loaded = self._random.integers(0, 256, (2, *shape), np.uint8)
        # The engine may still be clearing its cache.
        self._driver.synchronize()
        before = self._read(table, blocks)
        problem: str | None = None
        try:
            self._write(table, blocks, stored)
            rows[:] = 0
            store()
            self._wait()
            if not np.array_equal(rows, stored):
                problem = "wrong bytes came from the device"
            rows[:] = loaded
            load()
            self._wait()
            if not np.array_equal(self._read(table, blocks), loaded):
                problem = problem or "wrong bytes came to the device"
        except DriverError as error:
            problem = str(error)
        try:
            self._write(table, blocks, before)
        except DriverError as error:
            raise RuntimeError(
                f"the device failed while copies were tried ({problem or error}): a newer driver than CUDA "
                f"{self._driver.version}, or batched_copies=false, may help"
            ) from error
        return problem

    def _wait(self) -> None:
        self._device.record(self._end, self._stream)
        deadline = time.monotonic() + self._deadline_s
        while not self._device.is_done(self._end):
            if time.monotonic() > deadline:
                raise CopiesHang(
                    f"copies of a few blocks did not end within {self._deadline_s:g} s: a newer driver than CUDA "
                    f"{self._driver.version}, or batched_copies=false, may help"
                )
            time.sleep(100e-6)

    def _read(self, table: PageTable, blocks: Numbers) -> ByteArray:
        rows = np.empty((len(blocks), table.device_block_bytes), np.uint8)
        for row, block in zip(rows, blocks.tolist(), strict=True):
            for run in table.runs:
                self._driver.read(run.base + block * run.stride, int(row.ctypes.data) + run.offset, run.nbytes)
        return rows

    def _write(self, table: PageTable, blocks: Numbers, rows: ByteArray) -> None:
        for row, block in zip(rows, blocks.tolist(), strict=True):
            for run in table.runs:
                self._driver.write(run.base + block * run.stride, int(row.ctypes.data) + run.offset, run.nbytes)


def _some_blocks(table: PageTable) -> Numbers:
    return np.unique(np.array([0, table.num_blocks // 2, table.num_blocks - 1]))

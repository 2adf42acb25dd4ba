"""What a device must get right before the engine uses it: copies, and kernels."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from itertools import accumulate

import numpy as np

from kvoffload.abc import ByteArray
from kvoffload.transfer.cuda.calls import Kernel
from kvoffload.transfer.cuda.driver import Driver, DriverError
from kvoffload.transfer.cuda.kernels import launch
from kvoffload.transfer.cuda.pages import LayerRun, PageTable

CHECK_DEADLINE_S = 5.0
NUM_BLOCKS = 3
ALIGNMENT = 16


class CopiesHang(RuntimeError):
    """Copies do not end. They still use their memory."""


class StartCheck:
    """Moves device blocks in memory of its own to page-locked memory and back, and compares bytes with what the
    driver's plain copies see. The engine's memory is not touched: copies that hang may end later.

    ``copies`` and ``kernel`` return what is wrong, or None. They raise CopiesHang if copies do not end within
    ``deadline_s``, and RuntimeError if the device works no more.
    """

    def __init__(self, driver: Driver, stream: int, end: int, deadline_s: float) -> None:
        self._driver = driver
        self._stream = stream
        self._end = end
        """An event for the end of what is tried."""
        self._deadline_s = deadline_s
        self._random = np.random.default_rng(0)

    @contextlib.contextmanager
    def blocks_like(self, table: PageTable) -> Iterator[PageTable]:
        """Yields NUM_BLOCKS device blocks in runs as long as those of ``table``, which follow one another in a row.
        After an error they are not freed."""
        strides = [-(-run.nbytes // ALIGNMENT) * ALIGNMENT + ALIGNMENT for run in table.runs]
        ends = [NUM_BLOCKS * end for end in accumulate(strides)]
        address = self._driver.allocate(ends[-1])
        offsets = accumulate((run.nbytes for run in table.runs), initial=0)
        runs = [
            LayerRun(address + end - NUM_BLOCKS * stride, stride, run.nbytes, offset)
            for run, stride, end, offset in zip(table.runs, strides, ends, offsets, strict=False)
        ]
        yield PageTable(tuple(runs), table.device_block_bytes, NUM_BLOCKS, table.factor)
        self._driver.free(address)

    def copies(self, table: PageTable) -> str | None:
        """Tries copies of pages in both directions."""
        rows = self._driver.allocate_host(NUM_BLOCKS * table.device_block_bytes)
        blocks = np.arange(NUM_BLOCKS)
        pages = np.concatenate([run.base + blocks * run.stride for run in table.runs])
        places = np.concatenate([rows + run.offset + blocks * table.device_block_bytes for run in table.runs])
        sizes = np.repeat([run.nbytes for run in table.runs], NUM_BLOCKS)

        def store() -> None:
            self._driver.copy(self._stream, places, pages, sizes)

        def load() -> None:
            self._driver.copy(self._stream, pages, places, sizes)

        problem = self._round_trip(table, rows, store, load)
        self._driver.free_host(rows)
        return problem

    def kernel(self, kernel: Kernel, table: PageTable) -> str | None:
        """Tries the kernels for the blocks of ``table``, with copies of staged rows."""
        nbytes = NUM_BLOCKS * table.device_block_bytes
        staging, rows = self._driver.allocate(nbytes), self._driver.allocate_host(nbytes)
        blocks = np.arange(NUM_BLOCKS)

        def copy(target: int, source: int) -> None:
            self._driver.copy(self._stream, *(np.array([each]) for each in (target, source, nbytes)))

        def store() -> None:
            launch(self._driver, kernel, kernel.gather, self._stream, blocks, staging)
            copy(rows, staging)

        def load() -> None:
            copy(staging, rows)
            launch(self._driver, kernel, kernel.scatter, self._stream, blocks, staging)

        problem = self._round_trip(table, rows, store, load)
        self._driver.free(staging)
        self._driver.free_host(rows)
        return problem

    def _round_trip(
        self, table: PageTable, address: int, store: Callable[[], None], load: Callable[[], None]
    ) -> str | None:
        shape = (NUM_BLOCKS, table.device_block_bytes)
        memory = (ctypes.c_uint8 * (shape[0] * shape[1])).from_address(address)
        rows: ByteArray = np.ctypeslib.as_array(memory).reshape(shape)
        stored, loaded = self._random.integers(0, 256, (2, *shape), np.uint8)
        problem: str | None = None
        try:
            self._write(table, stored)
            rows[:] = 0
            store()
            self._wait()
            if not np.array_equal(rows, stored):
                problem = "wrong bytes came from the device"
            rows[:] = loaded
            load()
            self._wait()
            if not np.array_equal(self._read(table), loaded):
                problem = problem or "wrong bytes came to the device"
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

    def _wait(self) -> None:
        self._driver.record(self._end, self._stream)
        deadline = time.monotonic() + self._deadline_s
        while not self._driver.is_done(self._end):
            if time.monotonic() > deadline:
                raise CopiesHang(
                    f"copies of a few blocks did not end within {self._deadline_s:g} s: a newer driver than CUDA "
                    f"{self._driver.version} may help"
                )
            time.sleep(100e-6)

    def _read(self, table: PageTable) -> ByteArray:
        rows = np.empty((NUM_BLOCKS, table.device_block_bytes), np.uint8)
        for block, row in enumerate(rows):
            for run in table.runs:
                self._driver.read(run.base + block * run.stride, int(row.ctypes.data) + run.offset, run.nbytes)
        return rows

    def _write(self, table: PageTable, rows: ByteArray) -> None:
        for block, row in enumerate(rows):
            for run in table.runs:
                self._driver.write(run.base + block * run.stride, int(row.ctypes.data) + run.offset, run.nbytes)

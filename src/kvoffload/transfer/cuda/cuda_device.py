"""A CUDA device, used through the driver alone: streams, events, memory, batched copies, and kernels of its own."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
from collections.abc import Callable, Sequence

import numpy as np

from kvoffload.abc import ByteArray
from kvoffload.transfer.cuda.calls import DriverCalls, Kernel
from kvoffload.transfer.cuda.device import Device
from kvoffload.transfer.cuda.driver import LIBRARY, Driver, DriverError
from kvoffload.transfer.cuda.kernels import cut, kernel_code, make_kernel
from kvoffload.transfer.cuda.pages import PageTable
from kvoffload.transfer.cuda.start_check import CHECK_DEADLINE_S, CopiesHang, StartCheck

logger = logging.getLogger(__name__)

CALLS = {
    "copy": "cuMemcpyAsync",
    "launch": "cuLaunchKernel",
    "record": "cuEventRecord",
    "wait": "cuStreamWaitEvent",
    "query": "cuEventQuery",
    "elapsed": "cuEventElapsedTime",
}
"""The functions of the driver by the fields of DriverCalls, but for the batch, which not all drivers have."""


class CudaDevice(Device):
    """The CUDA device with ``number`` among those that this process sees, which holds the pages of ``tables``.

    Made on the engine's thread. ``engine_stream`` returns the handle of the stream on which the engine issues its work,
    such as ``torch.cuda.current_stream().cuda_stream``.
    Copies that do not end within ``check_deadline_s`` at the start are an error.

    To make, enlarge and close it leaves a thread's current context as it was, but gives the device's to an engine's
    thread that has none: fences are issued there.

    Memory and streams are the driver's. Torch's memory may belong to a pool of the engine, which loses its contents
    when the engine sleeps, and work on other streams may still use it; torch's streams are the same 32 again and again,
    so one of them could be a stream on which the engine works or captures a CUDA graph.
    """

    def __init__(
        self,
        tables: Sequence[PageTable],
        number: int,
        engine_stream: Callable[[], int],
        *,
        library: str = LIBRARY,
        check_deadline_s: float = CHECK_DEADLINE_S,
    ) -> None:
        self._driver = Driver(number, library)
        self._driver.use_context()
        self._engine_stream = engine_stream
        self._check_deadline_s = check_deadline_s
        self._memory: list[int] = []
        self._host: list[int] = []
        self._streams: list[int] = []
        self._events: list[int] = []
        self._module: int | None = None
        self._is_closed = False
        self._kernels: list[Kernel | None] = [None for _ in tables]
        try:
            with self._driver.context():
                self._load_kernels(tables)
                self._check(tables)
        except CopiesHang:
            # Copies still use the memory, and to free it would wait for them.
            raise
        except Exception:
            self.close()
            raise

    def enter_thread(self) -> None:
        self._driver.enter_thread()

    def new_stream(self) -> int:
        with self._driver.context():
            self._streams.append(self._driver.new_stream())
        return self._streams[-1]

    def engine_stream(self) -> int:
        return self._engine_stream()

    def new_event(self) -> int:
        with self._driver.context():
            self._events.append(self._driver.new_event())
        return self._events[-1]

    def allocate(self, nbytes: int) -> int:
        with self._driver.context():
            self._memory.append(self._driver.allocate(nbytes))
        return self._memory[-1]

    def allocate_host(self, nbytes: int) -> ByteArray:
        with self._driver.context():
            self._host.append(self._driver.allocate_host(nbytes))
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self._host[-1]))

    @property
    def batches(self) -> bool:
        """Whether copies are issued in batches."""
        return self._driver.copies_in_batches

    def native_calls(self) -> DriverCalls:
        addresses = {field: self._driver.address_of(name) for field, name in CALLS.items()}
        return DriverCalls(copy_batch=self._driver.batch_address, **addresses, kernels=tuple(self._kernels))

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        driver = self._driver
        try:
            with driver.context():
                for handles, free in (
                    (self._memory, driver.free),
                    (self._host, driver.free_host),
                    (self._events, driver.destroy_event),
                    (self._streams, driver.destroy_stream),
                ):
                    while handles:
                        free(handles.pop())
                if self._module is not None:
                    driver.unload_module(self._module)
            driver.close()
        except DriverError:
            # A device that has failed frees nothing any more.
            logger.exception("kvoffload: memory of the device could not be freed")

    def _load_kernels(self, tables: Sequence[PageTable]) -> None:
        """Makes the kernels of all groups whose blocks must be gathered. Without one, blocks are copied run by run."""
        wanted = [g for g, table in enumerate(tables) if table.needs_gather]
        if not wanted:
            return
        try:
            self._module = self._driver.load_module(kernel_code())
            for g in wanted:
                self._kernels[g] = make_kernel(self._driver, self._module, tables[g], self._send_pieces(tables[g]))
        except (DriverError, RuntimeError) as error:
            self._kernels = [None for _ in tables]
            self._warn("the driver cannot load kvoffload's kernel", error)

    def _check(self, tables: Sequence[PageTable]) -> None:
        """Tries batches and kernels on blocks like those of each group, and does without what copies wrong bytes or
        fails.

        Raises RuntimeError if single copies are wrong, too, and CopiesHang.
        """
        check = StartCheck(self._driver, self.new_stream(), self.new_event(), self._check_deadline_s)
        for g, table in enumerate(tables):
            if not table.runs:
                continue
            with check.blocks_like(table) as blocks:
                self._check_copies(check, blocks)
                self._check_kernel(check, g, blocks)

    def _check_copies(self, check: StartCheck, table: PageTable) -> None:
        problem = check.copies(table)
        if problem is not None and self._driver.copies_in_batches:
            self._driver.stop_batches()
            logger.warning(
                "kvoffload: batched copies do not work with CUDA %s (%s), so copies are issued one by one, which is "
                "slower. A newer driver may help",
                self._driver.version,
                problem,
            )
            problem = check.copies(table)
        if problem is not None:
            raise RuntimeError(f"copies between the device and page-locked memory do not work: {problem}")

    def _check_kernel(self, check: StartCheck, group: int, table: PageTable) -> None:
        kernel = self._kernels[group]
        if kernel is None:
            return
        problem = check.kernel(dataclasses.replace(kernel, pieces=self._send_pieces(table)), table)
        if problem is not None:
            self._kernels[group] = None
            self._warn("kvoffload's kernel does not work", problem)

    def _send_pieces(self, table: PageTable) -> int:
        """Returns the address, on the device, of what the kernels of ``table`` copy."""
        pieces = cut(table)
        address = self.allocate(pieces.nbytes)
        self._driver.write(address, int(pieces.ctypes.data), pieces.nbytes)
        return address

    def _warn(self, what: str, problem: object) -> None:
        logger.warning(
            "kvoffload: %s with CUDA %s (%s), so the pages of a block are copied one by one, which is slower. A newer "
            "driver may help; please report it with the GPU's model",
            what,
            self._driver.version,
            problem,
        )

"""A CUDA device, used through the driver alone: streams, events, memory, batched copies, and kernels of its own."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvoffload.abc import ByteArray
from kvoffload.transfer.cuda.calls import DriverCalls, Kernel
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


class CudaDevice:
    """The CUDA device with ``number`` among those that this process sees, which holds the pages of ``tables``.

    Made on the engine's thread. ``engine_stream`` returns the handle of the stream on which the engine issues its work,
    such as ``torch.cuda.current_stream().cuda_stream``. Copies that do not end within ``check_deadline_s`` at the start
    are an error.

    Addresses are virtual addresses; streams and events are the driver's handles. Memory and events live until
    ``close``, so that serving allocates nothing. Any method may raise an error of the driver; the device is not used
    after that.

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
        """Prepares the calling thread, once, before it uses the device."""
        self._driver.enter_thread()

    def new_stream(self) -> int:
        """Returns a new stream, which runs beside the engine's. Work on one stream runs in order, work on different
        streams in any order."""
        with self._driver.context():
            self._streams.append(self._driver.new_stream())
        return self._streams[-1]

    def engine_stream(self) -> int:
        """Returns the stream on which the engine issues its work. Called on the engine's thread."""
        return self._engine_stream()

    def new_event(self) -> int:
        """Returns a new event, which counts as done until it is recorded. It may be recorded again and again."""
        with self._driver.context():
            self._events.append(self._driver.new_event())
        return self._events[-1]

    def allocate(self, nbytes: int) -> int:
        """Returns the address of new device memory, a multiple of 256."""
        with self._driver.context():
            self._memory.append(self._driver.allocate(nbytes))
        return self._memory[-1]

    def allocate_host(self, nbytes: int) -> ByteArray:
        """Returns new host memory, shape (nbytes,), that the device copies to and from without blocking a thread."""
        with self._driver.context():
            self._host.append(self._driver.allocate_host(nbytes))
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self._host[-1]))

    @property
    def batches(self) -> bool:
        """Whether copies are issued in batches."""
        return self._driver.copies_in_batches

    def native_calls(self) -> DriverCalls:
        """Returns what the loop of copies calls, on the engine's thread and on threads that called ``enter_thread``."""
        addresses = {field: self._driver.address_of(name) for field, name in CALLS.items()}
        return DriverCalls(copy_batch=self._driver.batch_address, **addresses, kernels=tuple(self._kernels))

    def close(self) -> None:
        """Frees memory, streams and events. Called when no work is in progress."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            with self._driver.context():
                self._free((0, 0, 0, 0))
                if self._module is not None:
                    self._driver.unload_module(self._module)
            self._driver.close()
        except DriverError:
            # A device that has failed frees nothing any more.
            logger.exception("kvoffload: memory of the device could not be freed")

    @property
    def _handles(self) -> tuple[list[int], ...]:
        return self._memory, self._host, self._events, self._streams

    def _free(self, kept: Sequence[int]) -> None:
        """Frees all but the first so many of each kind of ``_handles``."""
        driver = self._driver
        frees = driver.free, driver.free_host, driver.destroy_event, driver.destroy_stream
        for handles, free, n in zip(self._handles, frees, kept, strict=True):
            while len(handles) > n:
                free(handles.pop())

    @contextlib.contextmanager
    def _borrowing(self) -> Iterator[None]:
        """What is made in the ``with`` statement is freed at its end, unless there is an error."""
        before = [len(handles) for handles in self._handles]
        yield
        self._free(before)

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
        for g, table in enumerate(tables):
            if table.runs:
                with self._borrowing():
                    check = StartCheck(self, self._driver, table, self._check_deadline_s)
                    self._check_copies(check)
                    self._check_kernel(check, g)

    def _check_copies(self, check: StartCheck) -> None:
        problem = check.problem()
        if problem is not None and self._driver.copies_in_batches:
            self._driver.stop_batches()
            logger.warning(
                "kvoffload: batched copies do not work with CUDA %s (%s), so copies are issued one by one, which is "
                "slower. A newer driver may help",
                self._driver.version,
                problem,
            )
            problem = check.problem()
        if problem is not None:
            raise RuntimeError(f"copies between the device and page-locked memory do not work: {problem}")

    def _check_kernel(self, check: StartCheck, group: int) -> None:
        kernel = self._kernels[group]
        if kernel is None:
            return
        problem = check.problem(dataclasses.replace(kernel, pieces=self._send_pieces(check.blocks)))
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

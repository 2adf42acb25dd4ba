"""A cache on the device, a host pool and the real CudaTransfer between them, as the vLLM adapter puts them together."""

from __future__ import annotations

import enum
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.gpu import cuda
from kvoffload.abc import ByteArray, DeviceSpec, LoadStoreSpec, PageGroup, TransferResult, TransferSpec
from kvoffload.host.pool import HostPool, padded_slot_bytes
from kvoffload.host.registration import Registration
from kvoffload.transfer.copies import Numbers
from kvoffload.transfer.cuda import driver
from kvoffload.transfer.cuda.cuda_device import CudaDevice
from kvoffload.transfer.cuda.limits import DEFAULT_LIMITS, Limits
from kvoffload.transfer.cuda.pages import page_table
from kvoffload.transfer.cuda.transfer import CudaTransfer
from tests.transfer.cuda.calls import WrappedDevice

Blocks: TypeAlias = npt.NDArray[np.int64]
JOB_DEADLINE_S = 60.0


class Layout(enum.Enum):
    """How the pages of the layers lie in device memory."""

    MERGED = "layers outermost"
    SEPARATE = "a tensor per layer"
    PACKED = "blocks outermost"
    PADDED = "blocks outermost, padded"


def make_views(layout: Layout, layers: int, blocks: int, page: int, memory: Any = None) -> list[Any]:
    """Returns bytes of shape (blocks, page) per layer. ``memory``: bytes on the device that they are cut from."""

    def new(*shape: int) -> Any:
        nbytes = int(np.prod(shape))
        return (cuda.empty(nbytes) if memory is None else memory[:nbytes]).view(shape)

    if layout is Layout.MERGED:
        return list(new(layers, blocks, page))
    if layout is Layout.SEPARATE:
        return [new(blocks, page) for _ in range(layers)]
    gap = 256 if layout is Layout.PADDED else 0
    whole = new(blocks, layers, page + gap)
    return [whole[:, layer, :page] for layer in range(layers)]


@dataclass
class Reshaped:
    """Slots of another size in memory that ``inner`` has registered with ``slots_per_inner`` of them in each slot."""

    inner: Registration
    slots_per_inner: int

    @property
    def num_ready_slots(self) -> int:
        return self.inner.num_ready_slots * self.slots_per_inner

    @property
    def boundary_slots(self) -> int:
        return self.inner.boundary_slots * self.slots_per_inner

    def release(self) -> None:
        """Does nothing: the memory stays registered for the next transfer."""


@dataclass
class Ready:
    """Slots of which the first may be copied to and from directly, as ``kvoffload.transfer.cuda.slots`` asks."""

    num_ready_slots: int
    boundary_slots: int = 1 << 40

    def release(self) -> None:
        """Does nothing."""


class Rig:
    """A transfer between ``groups`` and ``slots``. ``wrap`` may plant a fault in the device."""

    def __init__(
        self,
        groups: Sequence[PageGroup],
        slots: ByteArray,
        registration: Any,
        wrap: Callable[[CudaDevice], CudaDevice] = lambda device: device,
        with_threads: bool = True,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self.groups = groups
        self.slots = slots
        self.tables = [page_table(group) for group in groups]
        self.device = wrap(cuda.make_device(groups))
        self.transfer = CudaTransfer(
            self.tables, slots, self.device, registration, limits=limits, with_threads=with_threads
        )
        self._ids = itertools.count()
        self._results: dict[int, TransferResult] = {}

    def spec(self, slots: Blocks, blocks: Blocks | Sequence[Blocks]) -> TransferSpec:
        """Returns a copy of device blocks of the only group, or of several groups, beginning with slots in order."""
        lists = [blocks] if isinstance(blocks, np.ndarray) else list(blocks)
        sizes = tuple(len(each) for each in lists)
        device = DeviceSpec(np.concatenate(lists), sizes, (0,) * len(lists))
        return TransferSpec("proof", LoadStoreSpec("CPU", np.asarray(slots, dtype=np.int64)), device)

    def store(self, slots: Blocks, blocks: Blocks | Sequence[Blocks]) -> int:
        return self._submit(self.spec(slots, blocks), True)

    def load(self, slots: Blocks, blocks: Blocks | Sequence[Blocks]) -> int:
        return self._submit(self.spec(slots, blocks), False)

    def _submit(self, spec: TransferSpec, is_store: bool) -> int:
        job = next(self._ids)
        self.transfer.submit(job, spec, is_store)
        return job

    def poll(self) -> None:
        """Takes note of the jobs that have ended."""
        for result in self.transfer.poll(busy=False):
            self._results[result.job_id] = result

    def has_ended(self, job: int) -> bool:
        self.poll()
        return job in self._results

    def take(self, job: int) -> TransferResult | None:
        """Returns the result of a job that ``poll`` has found to have ended."""
        return self._results.pop(job, None)

    def result(self, job: int) -> TransferResult:
        """Waits until a job has ended."""
        deadline = time.monotonic() + JOB_DEADLINE_S
        while not self.has_ended(job):
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job} did not end within {JOB_DEADLINE_S:g} s")
            self.transfer.wait_any(0.1)
        return self._results.pop(job)

    def rows(self, group: int, blocks: Blocks) -> ByteArray:
        """Returns what device blocks hold now, shape (len(blocks), block bytes). Waits for the device."""
        cuda.synchronize()
        index = torch.from_numpy(np.asarray(blocks)).to(cuda.DEVICE)
        pages = [view[index] for view in self.groups[group].views]
        rows: ByteArray = torch.cat(pages, dim=1).cpu().numpy()
        return rows

    def fill(self, group: int, blocks: Blocks, value: int) -> None:
        """Enqueues a write of one value to device blocks, on the current stream."""
        index = cuda.send(np.asarray(blocks))
        views = self.groups[group].views

        def work() -> None:
            for view in views:
                view.index_fill_(0, index, value)

        cuda.launch(work)

    def write(self, group: int, blocks: Blocks, rows: ByteArray) -> None:
        """Enqueues a write of ``rows`` to device blocks, on the current stream."""
        index, source = cuda.send(np.asarray(blocks)), cuda.send(rows)
        views = self.groups[group].views

        def work() -> None:
            at = 0
            for view in views:
                view.index_copy_(0, index, source[:, at : at + view.shape[1]])
                at += view.shape[1]

        cuda.launch(work)

    def look(self, group: int, blocks: Blocks) -> Any:
        """Enqueues a read of device blocks on the current stream. Returns where the rows will be."""
        index = cuda.send(np.asarray(blocks))
        views = self.groups[group].views
        seen = cuda.empty((len(blocks), self.groups[group].device_block_bytes))

        def work() -> None:
            at = 0
            for view in views:
                seen[:, at : at + view.shape[1]] = view[index]
                at += view.shape[1]

        cuda.launch(work)
        return seen

    def close(self) -> None:
        self.transfer.close()


def slot_bytes(groups: Sequence[PageGroup]) -> int:
    return padded_slot_bytes(max(group.block_bytes for group in groups))


@contextmanager
def registered_pool(
    num_slots: int, nbytes: int, wait: bool = True, chunk_bytes: int | None = None
) -> Iterator[tuple[HostPool, Registration]]:
    """Yields a pool and its registration, which has ended if ``wait`` is set. ``chunk_bytes``: what one call registers,
    if not what the product does."""
    registrar = driver.Driver(0)
    pool = HostPool(num_slots, nbytes, registrar.numa_node())
    sizes = {} if chunk_bytes is None else {"chunk_bytes": chunk_bytes, "min_chunk_bytes": chunk_bytes}
    registration = Registration(pool.data, registrar, pool.wait_until_touched, **sizes)
    pool.before_close(registration.close)
    try:
        if wait:
            registration._thread.join()
        yield pool, registration
    finally:
        pool.close()


@contextmanager
def rig(
    groups: Sequence[PageGroup],
    num_slots: int,
    wrap: Callable[[CudaDevice], CudaDevice] = lambda device: device,
    registration: Any = None,
    limits: Limits = DEFAULT_LIMITS,
) -> Iterator[Rig]:
    """Yields a rig with a pool of its own, registered with the driver or as ``registration`` says."""
    with registered_pool(num_slots, slot_bytes(groups)) as (pool, registered):
        made = Rig(groups, pool.data, registration or registered, wrap, limits=limits)
        try:
            yield made
        finally:
            made.close()
            # The pool's registration waits for this.
            registered.release()


def block_numbers(values: Collection[int]) -> Blocks:
    return np.fromiter(values, dtype=np.int64, count=len(values))


class DelayedDevice(WrappedDevice):
    """Lets streams do nothing for ``seconds`` before each operation in ``operations``: "copy", "gather", "scatter"."""

    def __init__(self, inner: CudaDevice, seconds: float, operations: Collection[str]) -> None:
        super().__init__(inner)
        # The first call calibrates, which must not happen in the middle of a test.
        cuda.sleep(0.0)
        self._seconds = seconds
        self._operations = operations

    def delay(self) -> float:
        """Returns how long the stream of the next operation does nothing."""
        return self._seconds

    def before_copies(self, stream: int, targets: Numbers, sources: Numbers, sizes: Numbers) -> None:
        self._delay("copy", stream)

    def before_launch(self, stream: int, is_scatter: bool) -> None:
        self._delay("scatter" if is_scatter else "gather", stream)

    def _delay(self, operation: str, stream: int) -> None:
        seconds = self.delay() if operation in self._operations else 0.0
        if seconds:
            cuda.sleep(seconds, stream)

"""A rank of the model engine that computes and copies on the streams of a simulated device."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.abc import ByteArray, KVGroup, PageGroup, Placement, Transfer, TransferResult, TransferSpec
from kvoffload.connector.messages import StepMeta, WorkerReport
from kvoffload.connector.worker import Finished
from kvoffload.native import load
from kvoffload.transfer.copies import CopyList, copy_lists
from kvoffload.transfer.cuda.device import Device
from kvoffload.transfer.cuda.limits import DEFAULT_LIMITS, Limits
from kvoffload.transfer.cuda.pages import page_table
from kvoffload.transfer.cuda.transfer import CudaTransfer
from tests.sim.content import Access, Batch, EngineRequest, Words, to_words
from tests.sim.faults import FailingTransfer, WrappedDevice, WrappedTransfer
from tests.sim.races import Integers, Ranges
from tests.sim.ranks import Rank, WrongBytes, layers_of, salt
from tests.sim.scenario import Scenario
from tests.sim.streams import SimulatedDevice, Timing
from tests.transfer.cuda.callbacks import CallbackDevice

SLOT_ALIGNMENT = 16
BESIDE_OTHERS = 10, 7
"""In every tenth schedule, from that of seed 7 on, ranks have only a part of each slot."""
HELPER_STEPS = (1, 2, 8)
"""How many steps a transfer's helper makes at a time."""
Plane: TypeAlias = npt.NDArray[Any]
"""A part of the KV of one layer, shape (num_device_blocks, block_size): of each token's word the lowest bits."""


class Layout(enum.Enum):
    """How the device blocks of all layers lie in memory."""

    MERGED = enum.auto()
    """One array of shape (layers, blocks, page)."""
    SEPARATE = enum.auto()
    """One array per layer."""
    PACKED = enum.auto()
    """One array of shape (blocks, bytes): a device block is one run of bytes."""


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """How the ranks of an engine lay out their KV and use their devices."""

    layout: Layout
    dtypes: tuple[str, ...]
    """The views per layer, by the type of what they have per token: ``u8`` a word; after it perhaps small scales."""
    timing: Timing | None
    helper_chance: float
    """The chance that the transfer's helper makes some steps at a tick."""
    registered_chance: float
    """The chance that one more slot of the pool is registered at a tick."""
    num_registered_first: float
    """The share of the slots that is registered at the start."""
    boundary_slots: int
    """How many slots are registered by one call."""
    syncs_chance: float
    """The chance that the engine waits for the results of a step before the next one begins."""
    limits: Limits
    """Small chunks and buffers."""
    num_without_kernels: int = 0
    """How many of the first groups have no kernel. With the plain loop all have one."""
    refuses_batches: bool = False
    """Whether the driver copies only one by one. The plain loop always has batches."""
    finds_races: bool = True
    """Whether races are found, and not only wrong bytes."""

    @classmethod
    def random(cls, rng: Random) -> StreamPlan:
        """Returns a plan for small blocks, with staging memory for a few of them."""
        return cls(
            layout=rng.choice(list(Layout)),
            dtypes=rng.choice((("u8",), ("u8",), ("u8", "u4"), ("u8", "u2"))),
            timing=rng.choice((None, None, *Timing)),
            helper_chance=rng.choice((0.05, 0.2, 0.5)),
            registered_chance=rng.choice((0.0, 0.02, 0.3)),
            num_registered_first=rng.choice((0.0, 0.5, 1.0, 1.0)),
            boundary_slots=rng.choice((1, 2, 5, 1000)),
            syncs_chance=rng.choice((0.0, 0.5, 1.0)),
            limits=Limits(
                chunk_bytes=rng.choice((256, 1024, 4096)),
                chunk_rows=rng.choice((2, 5, 64)),
                bounce_bytes=rng.choice((64, 512)),
                num_bounce_buffers=DEFAULT_LIMITS.in_flight + rng.choice((0, 1, 4)),
                stage_bytes=rng.choice((256, 1024)),
                fence_bytes=rng.choice((64, 256, 1024)),
            ),
            num_without_kernels=rng.choice((0, 0, 0, 1, 2, 100)),
            refuses_batches=rng.random() < 0.1,
        )


class KVMemory:
    """The device memory of a rank. Device blocks of all groups lie in the same place, so a device block that goes from
    one group to another is overwritten."""

    def __init__(self, plan: StreamPlan, layers: Sequence[int], groups: Sequence[KVGroup], num_blocks: int) -> None:
        sizes = [group.device_block_size for group in groups]
        self.arrays: list[Plane] = []
        """The allocations."""
        self.planes: list[list[Plane]] = []
        """Per group, its planes layer by layer."""
        if plan.layout is Layout.PACKED:
            token_bytes = sum(np.dtype(each).itemsize for each in plan.dtypes)
            row = max(n * size for n, size in zip(layers, sizes, strict=True)) * token_bytes
            whole = self._new((num_blocks, -(-row // 8) * 8), "u1")
            for n, size in zip(layers, sizes, strict=True):
                self.planes.append(list(_cut(whole, plan.dtypes * n, size)))
            return
        shape, per_dtype = (max(layers), num_blocks, max(sizes)), []
        for dtype in plan.dtypes:
            merged = plan.layout is Layout.MERGED
            per_dtype.append(
                self._new(shape, dtype) if merged else [self._new(shape[1:], dtype) for _ in range(shape[0])]
            )
        for n, size in zip(layers, sizes, strict=True):
            self.planes.append([arrays[layer][:, :size] for layer in range(n) for arrays in per_dtype])

    def _new(self, shape: tuple[int, ...], dtype: str) -> Plane:
        self.arrays.append(np.zeros(shape, dtype))
        return self.arrays[-1]

    def page_groups(self, groups: Sequence[KVGroup]) -> list[PageGroup]:
        return [
            PageGroup([_pages(plane) for plane in planes], group.block_size_factor)
            for group, planes in zip(groups, self.planes, strict=True)
        ]


def beside_others(groups: Sequence[PageGroup], rng: Random) -> list[PageGroup]:
    """Returns the groups with places of their own in a slot, in any order, between which other ranks have theirs."""
    placed = []
    for group in groups:
        pages = [view.shape[1] for view in group.views]
        offsets, at = [0] * len(pages), 0
        for page in rng.sample(range(len(pages)), len(pages)):
            at += rng.choice((0, 0, 1, pages[page]))
            offsets[page] = at
            at += pages[page]
        placed.append(PageGroup(group.views, group.factor, Placement(tuple(offsets), at + rng.choice((1, 8, 40)))))
    return placed


def _cut(whole: Plane, dtypes: Iterable[str], size: int) -> Iterator[Plane]:
    """Yields one plane per entry of ``dtypes`` from the rows of ``whole``."""
    at = 0
    for dtype in dtypes:
        end = at + size * np.dtype(dtype).itemsize
        yield np.ndarray((len(whole), size), dtype, whole.data, at, (whole.strides[0], np.dtype(dtype).itemsize))
        at = end


def _pages(plane: Plane) -> ByteArray:
    """Returns the bytes of a plane, shape (num_device_blocks, page_bytes)."""
    pages: ByteArray = np.lib.stride_tricks.as_strided(
        plane.view(np.uint8), (len(plane), plane.shape[1] * plane.itemsize), (plane.strides[0], 1)
    )
    return pages


def _tokens(plane: Plane, blocks: Integers, offsets: Integers) -> Ranges:
    """Returns the bytes of one token each."""
    return Ranges.of(int(plane.ctypes.data) + plane.strides[0] * blocks + plane.itemsize * offsets, plane.itemsize)


class CheckedTransfer(WrappedTransfer):
    """Lets the device and the helper of ``inner`` work at any moment, and compares what reported jobs have copied.

    A store must have copied what the device blocks hold after the device work that was issued before ``submit``. After
    a report the host may read and overwrite the slots, and the engine may use the device blocks. Of the jobs that were
    copied, a share ``rate`` is reported as failed, so that they are tried again.
    """

    def __init__(
        self,
        inner: Transfer,
        device: SimulatedDevice,
        groups: Sequence[PageGroup],
        host: ByteArray,
        tick: Callable[[], None],
        rate: float,
    ) -> None:
        super().__init__(inner)
        self._device = device
        self._groups = groups
        self._host = host
        self.tick = tick
        self._rate = rate
        self._random = Random(device.random.random())
        self._jobs: dict[int, tuple[TransferSpec, bool]] = {}
        self.seen: Counter[str] = Counter()
        """What has happened."""
        self._beside: dict[int, tuple[Integers, ByteArray]] = {}
        """What other ranks have written between the pages of each store in progress: where in the pool, and what."""
        self._noise = np.random.default_rng(0)
        self._sources: dict[int, list[ByteArray]] = {}
        """What the device blocks of a store hold, when the engine's stream has got there."""

    def submit(self, job_id: int, spec: TransferSpec, is_store: bool) -> None:
        self._jobs[job_id] = spec, is_store
        if is_store:
            self._begin_beside(job_id, spec)

            def look() -> Iterator[None]:
                self._sources[job_id] = self._device_rows(spec)
                yield

            engine, nothing = self._device.engine_stream(), Ranges.none()
            self._device.launch(engine, f"a look at what job {job_id} stores", look(), nothing, nothing)
        with self._noting_errors():
            super().submit(job_id, spec, is_store)
        self.tick()

    def poll(self, busy: bool) -> list[TransferResult]:
        self.tick()
        self._write_beside()
        results = []
        with self._noting_errors():
            ended = super().poll(busy)
        self._check_beside()
        for result in ended:
            self._beside.pop(result.job_id, None)
            spec, is_store = self._jobs.pop(result.job_id)
            source = self._sources.pop(result.job_id, None) if is_store else self._device_rows(spec)
            self.seen[f"{'stores' if is_store else 'loads'} {'copied' if result.ok else 'failed'}"] += 1
            if result.ok:
                self._compare(result.job_id, spec, is_store, source)
                if self._random.random() < self._rate:
                    result = TransferResult(result.job_id, ok=False)
            results.append(result)
        return results

    def wait(self, job_ids: Iterable[int], device_blocks: Collection[int] | None = None) -> None:
        self.tick()
        with self._noting_errors():
            super().wait(job_ids, device_blocks)
        self.tick()

    def before_forward(self) -> None:
        self.tick()
        with self._noting_errors():
            super().before_forward()
        self.tick()

    def wait_any(self, timeout_s: float) -> None:
        """Lets time pass, but not the caller's."""
        with self._noting_errors():
            super().wait_any(0.0)
        self.tick()

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        """Notes broken checks, which make the worker give up, and the engine go on without offloading."""
        try:
            yield
        except Exception as error:
            self._device.note_error(error)
            raise

    def _compare(self, job_id: int, spec: TransferSpec, is_store: bool, device: list[ByteArray] | None) -> None:
        rows, ranges = [], Ranges.none()
        for copies in copy_lists(spec, self._groups, len(self._host)):
            group, at = self._groups[copies.group], self._rows_at(copies)
            rows.append(self._host.reshape(-1)[np.add.outer(at, _own_bytes(group))])
            for offset, view in zip(group.offsets, group.views, strict=True):
                ranges += Ranges.of(int(self._host.ctypes.data) + at + offset, view.shape[1])
        if not rows:
            return
        kind = "store" if is_store else "load"
        if device is None:
            self._device.complain(WrongBytes(f"store {job_id} has ended before the work that it had to wait for"))
        elif not all(map(np.array_equal, rows, device)):
            self._device.complain(
                WrongBytes(f"{kind} {job_id} has ended, but its bytes are not the ones it had to copy")
            )
        # Others may still load from the slots of a load.
        busy = [spec.host.slots for spec, _ in self._jobs.values()]
        may_write = not len(np.intersect1d(spec.host.slots, np.concatenate(busy))) if busy else True
        self._device.touch_host(ranges, f"who uses the slots of {kind} {job_id}", writes=may_write and not is_store)

    def _rows_at(self, copies: CopyList) -> Integers:
        """Returns where the rows of device blocks begin in the pool."""
        at: Integers = copies.slots * self._host.shape[1] + copies.parts * self._groups[copies.group].row_bytes
        return at

    def _begin_beside(self, job_id: int, spec: TransferSpec) -> None:
        places = []
        for copies in copy_lists(spec, self._groups, len(self._host)):
            group = self._groups[copies.group]
            others = np.setdiff1d(np.arange(group.row_bytes), _own_bytes(group))
            places.append(np.add.outer(self._rows_at(copies), others).ravel())
        at = np.concatenate([np.zeros(0, np.int64), *places])
        if len(at):
            self._beside[job_id] = at, self._host.reshape(-1)[at]
            self.seen["stores beside other ranks"] += 1

    def _write_beside(self) -> None:
        """Other ranks write their pages in the slots of stores in progress."""
        self._check_beside()
        for job_id, (at, _) in self._beside.items():
            written = self._noise.integers(0, 256, len(at), np.uint8)
            self._host.reshape(-1)[at] = written
            self._beside[job_id] = at, written

    def _check_beside(self) -> None:
        for job_id, (at, written) in self._beside.items():
            if not np.array_equal(self._host.reshape(-1)[at], written):
                self._device.complain(WrongBytes(f"store {job_id} has changed bytes of other ranks"))

    def _device_rows(self, spec: TransferSpec) -> list[ByteArray]:
        lists = copy_lists(spec, self._groups, len(self._host))
        return [
            np.concatenate([view[copies.device_blocks] for view in self._groups[copies.group].views], axis=1)
            for copies in lists
        ]


def _own_bytes(group: PageGroup) -> Integers:
    """Returns where a row has the bytes of a device block, page by page."""
    pages = zip(group.offsets, group.views, strict=True)
    return np.concatenate([np.arange(at, at + view.shape[1]) for at, view in pages])


class Registration:
    """How many slots of a pool are registered, which grows. No copy may cross a boundary between ``boundary_slots``
    slots."""

    def __init__(self, num_slots: int, share: float, boundary_slots: int) -> None:
        self._num_slots = num_slots
        self.num_ready_slots = int(share * num_slots)
        self.boundary_slots = boundary_slots

    def grow(self) -> None:
        """One more slot is registered."""
        self.num_ready_slots = min(self.num_ready_slots + 1, self._num_slots)

    def release(self) -> None:
        """Does nothing: nothing is registered."""


class StreamRank(Rank):
    """A rank whose forward passes are work on a simulated device's engine stream, which checks bytes when it runs.

    ``make_transfer`` makes the transfer for the page groups, the pool's data, its registration and the device, and
    returns it with a function that lets its helper make progress.
    """

    def __init__(
        self,
        s: Scenario,
        groups: Sequence[KVGroup],
        number: int,
        plan: StreamPlan,
        make_transfer: MakeTransfer,
        leader: Rank | None,
    ) -> None:
        self._groups = groups
        self._plan = plan
        layers = [layers_of(s, len(groups), g, number) for g in range(len(groups))]
        kv = KVMemory(plan, [len(own) for own in layers], groups, s.num_device_blocks)
        self._planes = kv.planes
        self._salts = [
            [to_words([salt(str(s.leader_of(number)), g, layer)]) for layer in own for _ in plan.dtypes]
            for g, own in enumerate(layers)
        ]
        page_groups = s.parts.page_groups(kv.page_groups(groups))
        if s.seed % BESIDE_OTHERS[0] == BESIDE_OTHERS[1]:
            # Ranks that load from the pool of another one have the same places.
            page_groups = beside_others(page_groups, Random(f"places {s.seed} {s.leader_of(number)}"))
        slot_bytes = max(group.block_bytes for group in page_groups)
        slot_bytes = -(-slot_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        host: ByteArray = leader.host if leader else np.zeros((s.num_host_blocks, slot_bytes), np.uint8)
        seed = s.seed + (number << 40)
        self.random = Random(seed)
        self.device = SimulatedDevice(page_groups, seed, plan.timing)
        self.device.memory.finds_races = plan.finds_races
        for i, array in enumerate(kv.arrays):
            self.device.add_memory(f"KV tensor {i}", array.reshape(-1).view(np.uint8))
        self.registration = Registration(len(host), plan.num_registered_first, plan.boundary_slots)
        boundary = plan.boundary_slots * host.shape[1]
        self.device.add_host("the pool", host, lambda: self.registration.num_ready_slots * host.shape[1], boundary)
        inner, self._advance = make_transfer(page_groups, host, self.registration, self.device, plan)
        self.checked = CheckedTransfer(inner, self.device, page_groups, host, self._let_work, s.copy_failure_rate / 2)
        transfer = FailingTransfer(self.checked, s.copy_failure_rate / 2, seed)
        super().__init__(number, host, transfer, self._let_work, leader)
        self._step_end = self.device.new_event()

    def step(self, meta: StepMeta, batch: Batch, loads_first: bool) -> tuple[Finished, WorkerReport | None]:
        if self.random.random() < self._plan.syncs_chance:
            self.device.sleep_until_done(self._step_end)
        results = super().step(meta, batch, loads_first)
        self.device.record(self._step_end, self.device.engine_stream())
        self.device.check()
        return results

    def compute(self, request: EngineRequest, start: int, end: int) -> None:
        checks: list[tuple[Plane, Integers, Integers, Words, int]] = []
        writes: list[tuple[Plane, Integers, Integers, Words]] = []
        read_ranges, written_ranges = [Ranges.none()], [Ranges.none()]
        for g, (group, planes, salts) in enumerate(zip(self._groups, self._planes, self._salts, strict=True)):
            if not planes:
                continue
            access = Access.of(request, g, group, start, end)
            for ranges, part in ((read_ranges, slice(access.num_read)), (written_ranges, slice(access.num_read, None))):
                blocks, offsets = access.blocks[part], access.offsets[part]
                for plane, mask in zip(planes, salts, strict=True):
                    want = (access.words[part] ^ mask).astype(plane.dtype)
                    ranges.append(_tokens(plane, blocks, offsets))
                    if ranges is read_ranges:
                        checks.append((plane, blocks, offsets, want, g))
                    else:
                        writes.append((plane, blocks, offsets, want))

        def run() -> Iterator[None]:
            for plane, blocks, offsets, want, g in checks:
                wrong = plane[blocks, offsets] != want
                if wrong.any():
                    self._complain(request.request_id, g, int(blocks[int(np.argmax(wrong))]))
            yield
            for plane, blocks, offsets, want in writes:
                plane[blocks, offsets] = want
                if self.random.random() < 0.3:
                    yield

        engine, what = self.device.engine_stream(), f"the forward pass of {request.request_id}"
        self.device.launch(engine, what, run(), _sum(read_ranges), _sum(written_ranges))

    def finish(self) -> None:
        self.device.finish()
        self.worker.shutdown()
        self.device.check()

    def seen(self) -> Counter[str]:
        """Returns what has happened here."""
        return self.checked.seen + self.device.seen + Counter({"steps of streams": self.device.now})

    def _complain(self, request_id: str, g: int, block: int) -> None:
        self.device.complain(
            WrongBytes(
                f"request {request_id} attends to wrong bytes in device block {block} of group {g} "
                f"({self._groups[g]}), rank {self.number}"
            )
        )

    def _let_work(self) -> None:
        """Lets the helper, the registration and the device work, or not."""
        if self.random.random() < self._plan.registered_chance:
            self.registration.grow()
        self.device.tick()
        if self.random.random() < self._plan.helper_chance:
            try:
                for _ in range(self.random.choice(HELPER_STEPS)):
                    self._advance()
            except Exception as error:
                # The next call of the transfer raises it, as it does if a thread fails.
                self.device.note_error(error)


MakeTransfer: TypeAlias = Callable[
    [Sequence[PageGroup], ByteArray, Registration, SimulatedDevice, StreamPlan], tuple[Transfer, Callable[[], Any]]
]


def _sum(ranges: Sequence[Ranges]) -> Ranges:
    return Ranges(np.concatenate([r.starts for r in ranges]), np.concatenate([r.sizes for r in ranges]))


def make_plain_transfer(
    groups: Sequence[PageGroup], host: ByteArray, registration: Registration, device: Device, plan: StreamPlan
) -> tuple[Transfer, Callable[[], Any]]:
    """Returns a CudaTransfer with the loop in Python, without a thread."""
    tables = [page_table(group) for group in groups]
    transfer = CudaTransfer(tables, host, device, registration, limits=plan.limits, with_threads=False)
    return transfer, transfer.advance


def make_native_transfer(
    groups: Sequence[PageGroup], host: ByteArray, registration: Registration, device: Device, plan: StreamPlan
) -> tuple[Transfer, Callable[[], Any]]:
    """Returns a CudaTransfer with the native loop, without a thread."""
    tables = [page_table(group) for group in groups]
    inner = device
    while isinstance(inner, WrappedDevice):
        inner = inner.inner
    assert isinstance(inner, SimulatedDevice)
    native = CallbackDevice(device, tables, inner.note_error, plan.num_without_kernels)
    native.refuses_batches = plan.refuses_batches
    transfer = CudaTransfer(tables, host, native, registration, limits=plan.limits, with_threads=False)
    return transfer, transfer.advance


LOOPS: dict[str, MakeTransfer] = {"plain": make_plain_transfer}
"""The loops of copies that there are here."""
if load("_transfer") is not None:
    LOOPS["native"] = make_native_transfer

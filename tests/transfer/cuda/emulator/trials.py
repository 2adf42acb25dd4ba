"""Random trials of the real CudaTransfer, CudaDevice, Driver and kernels over the emulated driver.

A trial is an engine with a KV cache in device memory, which writes and reads device blocks by work on its own stream,
and stores, loads and fences jobs. These laws must hold, whenever the work of streams runs:

- a store that is reported as done has filled its slots with what its blocks held when it was submitted;
- work of the engine that comes after a load, or after a fence of it, reads the bytes that were loaded;
- nothing else changes: other blocks, gaps between pages, other slots, and what other ranks write between the pages in
  the slots of a store, at any moment;
- the driver sees no call that it would refuse or punish, and everything is freed in the end.
"""

from __future__ import annotations

import ctypes
import enum
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.abc import ByteArray, DeviceSpec, LoadStoreSpec, PageGroup, Placement, TransferSpec
from kvoffload.host.registration import Registration
from kvoffload.transfer.cuda.cuda_device import CudaDevice
from kvoffload.transfer.cuda.driver import Driver
from kvoffload.transfer.cuda.limits import Limits
from kvoffload.transfer.cuda.pages import PageTable, page_table
from kvoffload.transfer.cuda.slots import Unregistered
from kvoffload.transfer.cuda.transfer import CudaTransfer
from tests.transfer.cuda.calls import LAUNCH_FAILED, WrappedDevice
from tests.transfer.cuda.emulator import PROFILES, Count, Emulator, Memory, Profile, Timing, bytes_at

DEADLINE_S = 60.0
"""How long a trial may take: no trial comes near it, whatever else the machine does."""
PAGE = 4096
MAX_CACHE_BYTES = 1 << 18


class Broken(AssertionError):
    """A law is broken."""


class Cache:
    """A page group in device memory: ``num_blocks`` blocks of pages, laid out at random, and what they must hold.
    ``places`` chooses where their pages are in a slot."""

    def __init__(self, rng: Random, driver: Driver, places: Random) -> None:
        unit = rng.choice((1, 2, 4, 16, 16, 16, 64, 656))
        num_layers = rng.choice((1, 2, 3, 5, 5, 12, 80))
        self.num_blocks = rng.choice((4, 9, 17, 24))
        self.factor = rng.choice((1, 1, 2, 4))
        most = max(1, min(60, MAX_CACHE_BYTES // (self.num_blocks * num_layers * unit)))
        pages = [unit * rng.randint(1, most) for _ in range(num_layers)]
        if rng.random() < 0.6:
            pages = [pages[0]] * num_layers
        gap = rng.choice((0, 0, unit))
        data = np.random.default_rng(rng.getrandbits(32))
        self.memory: list[ByteArray] = []
        self.views: list[ByteArray] = []
        if rng.random() < 0.5:  # a block's pages are beside one another
            stride = sum(pages) + gap * num_layers
            memory = self._allocate(driver, stride * self.num_blocks, data)
            starts = np.cumsum([0, *(page + gap for page in pages[:-1])]).tolist()
            for start, page in zip(starts, pages, strict=True):
                self.views.append(_strided(memory[start:], self.num_blocks, page, stride))
        else:  # a layer's pages are
            for page in pages:
                memory = self._allocate(driver, (page + gap) * self.num_blocks, data)
                self.views.append(_strided(memory, self.num_blocks, page, page + gap))
        self.row_bytes = sum(pages)
        self.placement = _placement(places, pages) if places.random() < 0.5 else None
        self.group = PageGroup(self.views, self.factor, self.placement)
        self.own = np.concatenate([np.arange(at, at + n) for at, n in zip(self.group.offsets, pages, strict=True)])
        """Where a row in a slot has the bytes of a block, page by page; at ``others`` are those of other ranks."""
        self.others = np.setdiff1d(np.arange(self.group.row_bytes), self.own)
        self.whole = [memory.copy() for memory in self.memory]
        self.blocks = self.read()
        """What the device blocks hold once the engine's stream has done its work, shape (num_blocks, row_bytes)."""

    def _allocate(self, driver: Driver, nbytes: int, data: np.random.Generator) -> ByteArray:
        self.memory.append(bytes_at(driver.allocate(nbytes), nbytes))
        self.memory[-1][:] = data.integers(0, 256, nbytes, np.uint8)
        return self.memory[-1]

    def read(self, numbers: Sequence[int] | None = None) -> ByteArray:
        """Returns what device blocks hold now, one per row."""
        chosen = slice(None) if numbers is None else list(numbers)
        return np.concatenate([view[chosen] for view in self.views], axis=1)

    def pages(self, block: int) -> list[tuple[int, int]]:
        """Returns the address and the bytes of each page of a block."""
        return [(view.ctypes.data + block * view.strides[0], view.shape[1]) for view in self.views]

    def check(self, known: npt.NDArray[np.bool_]) -> None:
        """Compares all bytes with what they must be, but for blocks that are not ``known``."""
        held = self.read()
        if not np.array_equal(held[known], self.blocks[known]):
            raise Broken(f"blocks {np.flatnonzero((held != self.blocks).any(axis=1) & known)} hold wrong bytes")
        for view in self.views:
            view[:] = 0
        for memory, before in zip(self.memory, self.whole, strict=True):
            mask = np.zeros(len(before), bool)
            for view in self.views:
                if memory.ctypes.data <= view.ctypes.data < memory.ctypes.data + len(memory):
                    at = view.ctypes.data - memory.ctypes.data
                    _strided(mask[at:], self.num_blocks, view.shape[1], view.strides[0])[:] = True
            if not np.array_equal(memory[~mask], before[~mask]):
                raise Broken("bytes between pages were changed")


def _placement(rng: Random, pages: Sequence[int]) -> Placement:
    """Returns places in any order, with gaps or without."""
    order = rng.sample(range(len(pages)), len(pages)) if rng.random() < 0.5 else list(range(len(pages)))
    gaps = rng.choice(((0,), (0, 1), (pages[0],), (1, 2, 64)))
    offsets, at = [0] * len(pages), 0
    for page in order:
        at += rng.choice(gaps)
        offsets[page] = at
        at += pages[page]
    return Placement(tuple(offsets), at + rng.choice(gaps))


def _strided(memory: Any, rows: int, columns: int, stride: int) -> Any:
    return np.lib.stride_tricks.as_strided(memory, (rows, columns), (stride, 1))


@dataclass(eq=False)
class Job:
    number: int
    is_store: bool
    spec: TransferSpec
    blocks: list[tuple[int, int]]
    """Group and number of each device block."""
    slots: list[int]
    expected: list[ByteArray]
    """Rows that are stored, or loaded, by device block."""
    fenced: set[tuple[int, int]] = field(default_factory=set)
    """Blocks that later work of the engine may use before the job has ended."""
    may_fail: bool = False
    """Whether it was fenced while not all slots were registered: there may be no bounce buffer for it."""


@dataclass(eq=False)
class Probe:
    """A copy of a block that the engine's stream made, and what it must hold. ``job``: only if this load is done."""

    memory: ByteArray
    expected: ByteArray
    job: int | None


class Engine:
    """Work on the engine's stream: copies between device blocks and other device memory."""

    def __init__(self, emulator: Emulator, driver: Driver) -> None:
        self.stream = driver.new_stream()
        self.allocated = 0
        self._driver = driver
        self._copy = ctypes.CDLL(emulator.path).cuMemcpyAsync
        self._copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)

    def write(self, cache: Cache, block: int, row: ByteArray) -> None:
        source = self._allocate(len(row))
        bytes_at(source, len(row))[:] = row
        for address, nbytes in cache.pages(block):
            self._issue(address, source, nbytes)
            source += nbytes

    def read(self, cache: Cache, block: int) -> ByteArray:
        """Returns memory that the block is copied to."""
        target = self._allocate(cache.row_bytes)
        at = target
        for address, nbytes in cache.pages(block):
            self._issue(at, address, nbytes)
            at += nbytes
        return bytes_at(target, cache.row_bytes)

    def _allocate(self, nbytes: int) -> int:
        self.allocated += nbytes
        return self._driver.allocate(nbytes)

    def _issue(self, target: int, source: int, nbytes: int) -> None:
        code = self._copy(target, source, nbytes, self.stream)
        if code:
            raise DeviceEnded(code)


class DeviceEnded(Exception):
    """A call of the engine failed, because the context has ended."""


class Fault(enum.Enum):
    """What goes wrong in a trial. After STICKY the context has ended; the transfer must say so, and end. After ONCE it
    must end, too, and what it has issued must not reach blocks that are used after that."""

    NONE = enum.auto()
    BATCH_INVALID = enum.auto()
    BATCH_UNSUPPORTED = enum.auto()
    NO_KERNEL = enum.auto()
    STICKY = enum.auto()
    ONCE = enum.auto()


class FailsOnce(WrappedDevice):
    """One call of the loop, at random, fails and enqueues nothing. What was enqueued before goes on."""

    def __init__(self, inner: CudaDevice, rng: Random) -> None:
        super().__init__(inner)
        self._calls_left = rng.randrange(20, 200)
        self.has_failed = False

    def failing(self, call: Callable[..., int], *arguments: Any) -> int:
        self._calls_left -= 1
        if self._calls_left == 0:
            self.has_failed = True
            return LAUNCH_FAILED
        return call(*arguments)

    def copy_batch(self, *arguments: Any) -> int:
        return self.failing(super().copy_batch, *arguments)

    def copy(self, *arguments: Any) -> int:
        return self.failing(super().copy, *arguments)

    def launch(self, *arguments: Any) -> int:
        return self.failing(super().launch, *arguments)

    def record(self, event: int, stream: int) -> int:
        return self.failing(super().record, event, stream)

    def wait(self, stream: int, event: int, flags: int = 0) -> int:
        return self.failing(super().wait, stream, event)


STICKY_IN = (
    "cuMemcpyBatchAsync",
    "cuMemcpyAsync",
    "cuLaunchKernel",
    "cuEventRecord",
    "cuEventQuery",
    "cuStreamWaitEvent",
)


@dataclass(frozen=True)
class Plan:
    """The driver and the settings of a trial. ``registered``: bytes of the pool that can be registered; None: all."""

    profile: Profile
    timing: Timing
    queue_size: int
    fault: Fault
    with_threads: bool
    limits: Limits
    chunk_slots: int
    registered: int | None
    num_steps: int

    @classmethod
    def random(cls, rng: Random) -> Plan:
        return cls(
            profile=rng.choice(list(PROFILES.values())),
            timing=rng.choice(list(Timing)),
            queue_size=rng.choice((3, 20, 1000)),
            fault=rng.choice((Fault.NONE, Fault.NONE, Fault.NONE, *Fault)),
            with_threads=rng.random() < 0.5,
            limits=Limits(
                chunk_bytes=rng.choice((1 << 10, 1 << 14, 8 << 20)),
                chunk_rows=rng.choice((2, 7, 8192)),
                in_flight=rng.choice((1, 2, 4)),
                stage_bytes=rng.choice((1 << 10, 1 << 14, 4 << 20)),
                fence_bytes=rng.choice((1 << 10, 1 << 14, 2 << 20)),
                bounce_bytes=rng.choice((1 << 10, 1 << 16)),
                num_bounce_buffers=rng.choice((1, 8)),
                close_deadline_s=DEADLINE_S,
            ),
            chunk_slots=rng.choice((1, 4, 1024)),
            registered=rng.choice((None, None, 0, 8)),
            num_steps=rng.randint(3, 12),
        )


MakeDevice: TypeAlias = Callable[[Sequence[PageTable], Callable[[], int], str], CudaDevice]


def make_device(tables: Sequence[PageTable], engine_stream: Callable[[], int], library: str) -> CudaDevice:
    return CudaDevice(tables, 0, engine_stream, library=library)


class Trial:
    """An engine and the transfer under test. ``make`` may plant a fault in the device."""

    fails_once: type[FailsOnce] = FailsOnce

    def __init__(self, library: Path, seed: int, plan: Plan, make: MakeDevice = make_device) -> None:
        self.rng = Random(seed)
        self.plan = plan
        self.emulator = Emulator(library, plan.profile, seed=seed, timing=plan.timing, queue_size=plan.queue_size)
        if plan.fault is Fault.NO_KERNEL:
            self.emulator.fail("cuModuleLoadData", 222)
        self.driver = Driver(0, self.emulator.path)
        self.driver.enter_thread()
        self.engine = Engine(self.emulator, self.driver)
        places = Random(f"places {seed}")
        self.caches = [Cache(self.rng, self.driver, places) for _ in range(self.rng.choice((1, 1, 2, 3)))]
        self.noise = np.random.default_rng(seed)
        tables = [page_table(cache.group) for cache in self.caches]
        slot_bytes = -(-max(cache.group.block_bytes for cache in self.caches) // PAGE) * PAGE
        self.num_slots = self.rng.choice((8, 24))
        raw = np.zeros(self.num_slots * slot_bytes + PAGE, np.uint8)
        self.pool = raw[-raw.ctypes.data % PAGE :][: self.num_slots * slot_bytes].reshape(self.num_slots, slot_bytes)
        self.pool[:] = np.random.default_rng(seed).integers(0, 256, self.pool.shape, np.uint8)
        self.slots = self.pool.copy()
        """What the slots must hold, but for those that are being filled."""
        device = make(tables, lambda: self.engine.stream, self.emulator.path)
        self.failing: FailsOnce | None = None
        if plan.fault is Fault.ONCE:
            device = self.failing = self.fails_once(device, self.rng)
        self.registration: Any = Unregistered()
        if self.driver.copies_registered_memory:
            if plan.registered is not None:
                self.emulator.limit_registrations(together=max(1, plan.registered * slot_bytes))
            self.registration = Registration(
                self.pool,
                Driver(0, self.emulator.path),
                lambda _: True,
                chunk_bytes=plan.chunk_slots * slot_bytes,
                min_chunk_bytes=self.rng.choice((1, plan.chunk_slots)) * slot_bytes,
            )
        self.transfer = CudaTransfer(
            tables, self.pool, device, self.registration, limits=plan.limits, with_threads=plan.with_threads
        )
        self.jobs: dict[int, Job] = {}
        self.failed: set[int] = set()
        self.probes: list[Probe] = []
        self.unknown = [np.zeros(cache.num_blocks, bool) for cache in self.caches]
        """Blocks that a failed load may have filled in part."""
        self.touched: set[tuple[int, int]] = set()
        """Blocks of the last forward pass, for which loads do not wait."""
        self.seen: Counter[str] = Counter()
        if plan.fault is Fault.BATCH_INVALID:
            self.emulator.fail_copy(self.rng.choice((0, 1, 5)))
        elif plan.fault is Fault.BATCH_UNSUPPORTED:
            self.emulator.fail("cuMemcpyBatchAsync", 801, after=self.rng.randint(0, 3))
        elif plan.fault is Fault.STICKY:
            self.emulator.fail(self.rng.choice(STICKY_IN), 700, after=self.rng.randint(0, 40), is_sticky=True)

    def wait_until_registered(self) -> None:
        """Waits until no more slots become ready, so that the seed alone says what happens."""
        if isinstance(self.registration, Registration):
            self.registration._thread.join()

    def run(self) -> Counter[str]:
        """Raises Broken if a law is broken."""
        try:
            for _ in range(self.plan.num_steps):
                self._step()
            self._drain()
            if self.emulator.problems:
                raise Broken(str(self.emulator.problems))
        except (RuntimeError, DeviceEnded) as error:
            if self.failing is not None and self.failing.has_failed:
                self._go_on()
            elif self.plan.fault is not Fault.STICKY:
                raise Broken(f"{error}: {self.emulator.problems}") from error
            else:
                self.seen["contexts that ended"] += 1
            return self.seen
        finally:
            self.transfer.close()
            self.wait_until_registered()
        if self.emulator.has_ended or (self.failing is not None and self.failing.has_failed):
            # While the transfer was closed: what it holds cannot be freed.
            self.seen["contexts that ended"] += 1
            return self.seen
        if isinstance(self.registration, Registration) and not self.registration.close():
            raise Broken("the pool remains registered")
        self._check_all()
        for which in Count:
            self.seen[which.name.lower()] += self.emulator.count(which)
        return self.seen

    def _go_on(self) -> None:
        """Gives all device blocks to others, as an engine does whose transfer has raised an error."""
        self.transfer.close()
        for cache in self.caches:
            for block in range(cache.num_blocks):
                cache.blocks[block] = self.noise.integers(0, 256, cache.row_bytes, np.uint8)
                self.engine.write(cache, block, cache.blocks[block])
        self.emulator.tick()
        for cache in self.caches:
            cache.check(np.ones(cache.num_blocks, bool))
        if self.emulator.problems:
            raise Broken(str(self.emulator.problems))
        self.seen["errors after which the engine has gone on"] += 1

    def _step(self) -> None:
        rng = self.rng
        self._collect()
        self._write_as_other_ranks()
        for _ in range(rng.choice((0, 1, 1, 2, 4))):
            self._submit(rng.random() < 0.5)
        if self.jobs and rng.random() < 0.5:
            self._fence()
        self.transfer.before_forward()
        self.touched.clear()
        self._forward()
        self.emulator.tick(rng.choice((0, 0, 3, 100)))
        self._write_as_other_ranks()
        if not self.plan.with_threads:
            for _ in range(rng.choice((0, 1, 4, 20))):
                self.transfer.advance()

    def _open(self, is_store: bool) -> list[Job]:
        return [job for job in self.jobs.values() if job.is_store is is_store]

    def _submit(self, is_store: bool) -> None:
        taken = set().union(*(set(job.blocks) - (job.fenced if job.is_store else set()) for job in self.jobs.values()))
        if not is_store:
            taken |= self.touched
        used = {slot for job in self._open(True) for slot in job.slots}
        if is_store:
            used |= {slot for job in self._open(False) for slot in job.slots}
        free_slots = [slot for slot in range(self.num_slots) if slot not in used]
        self.rng.shuffle(free_slots)
        blocks: list[tuple[int, int]] = []
        slots: list[int] = []
        expected: list[ByteArray] = []
        sizes = []
        for g, cache in enumerate(self.caches):
            free = [b for b in range(cache.num_blocks) if (g, b) not in taken and not (is_store and self.unknown[g][b])]
            most = min(len(free) // cache.factor, len(free_slots))
            chosen = self.rng.sample(free, self.rng.randint(0, most) * cache.factor)
            for position, block in enumerate(chosen):
                if position % cache.factor == 0:
                    slots.append(free_slots.pop())
                own = position % cache.factor * cache.group.row_bytes + cache.own
                row = cache.blocks[block] if is_store else self.slots[slots[-1], own]
                expected.append(row.copy())
                blocks.append((g, block))
                if not is_store:
                    cache.blocks[block] = row
            sizes.append(len(chosen))
        number = self.seen["jobs"]
        spec = TransferSpec(
            "request",
            LoadStoreSpec("CPU", np.array(slots, np.int64)),
            DeviceSpec(np.array([b for _, b in blocks], np.int64), tuple(sizes), (0,) * len(sizes)),
        )
        self.jobs[number] = Job(number, is_store, spec, blocks, slots, expected)
        self.seen["jobs"] += 1
        self.seen["blocks"] += len(blocks)
        self.transfer.submit(number, spec, is_store)

    def _fence(self) -> None:
        chosen = self.rng.sample(list(self.jobs.values()), self.rng.randint(1, len(self.jobs)))
        every = [each for job in chosen for each in job.blocks]
        # Blocks are named by their numbers alone, which may be those of several groups.
        numbers = None if self.rng.random() < 0.5 else {b for _, b in every if self.rng.random() < 0.7}
        is_ready = self.registration.num_ready_slots >= self.num_slots
        self.transfer.wait([job.number for job in chosen], numbers)
        self.touched.clear()
        for job in chosen:
            job.may_fail |= not is_ready
            job.fenced |= {(g, b) for g, b in job.blocks if numbers is None or b in numbers}
        self.seen["fences"] += 1

    def _forward(self) -> None:
        stored = set().union(*(set(job.blocks) - job.fenced for job in self._open(True)))
        loads = {each: job for job in self._open(False) for each in job.blocks}
        for g, cache in enumerate(self.caches):
            for b in self.rng.sample(range(cache.num_blocks), self.rng.randint(0, 3)):
                load = loads.get((g, b))
                if load is not None and (g, b) not in load.fenced:
                    continue
                if load is None and (g, b) not in stored and self.rng.random() < 0.6:
                    cache.blocks[b] = np.frombuffer(self.rng.randbytes(cache.row_bytes), np.uint8)
                    self.engine.write(cache, b, cache.blocks[b])
                    self.unknown[g][b] = False
                elif not self.unknown[g][b]:
                    memory = self.engine.read(cache, b)
                    self.probes.append(Probe(memory, cache.blocks[b].copy(), load.number if load else None))
                self.touched.add((g, b))

    def _collect(self) -> None:
        for result in self.transfer.poll(busy=True):
            job = self.jobs.pop(result.job_id)
            if not result.ok:
                if not job.may_fail:
                    raise Broken(f"job {job.number} failed")
                self._fail(job)
                continue
            self.seen["stores" if job.is_store else "loads"] += 1
            for position, (g, b) in enumerate(job.blocks):
                cache, row = self.caches[g], job.expected[position]
                if not job.is_store:
                    if not np.array_equal(cache.read([b])[0], row):
                        raise Broken(f"job {job.number} did not load block {b} of group {g}")
                    continue
                slot, at = self._place(job, position)
                if not np.array_equal(self.pool[slot, at + cache.own], row):
                    raise Broken(f"job {job.number} did not store block {b} of group {g}")
                self.slots[slot, at + cache.own] = row
                self.seen["blocks stored beside other ranks"] += len(cache.others) > 0

    def _write_as_other_ranks(self) -> None:
        """Writes to the places of other ranks in the slots of stores that are not reported."""
        for job in self._open(True):
            for position, (g, _) in enumerate(job.blocks):
                slot, at = self._place(job, position)
                others = at + self.caches[g].others
                self.pool[slot, others] = self.slots[slot, others] = self.noise.integers(0, 256, len(others), np.uint8)

    def _place(self, job: Job, position: int) -> tuple[int, int]:
        """Returns the slot of a block of a job, and where its row begins in it."""
        first = [g for g, _ in job.blocks].index(job.blocks[position][0])
        before = sum(1 / self.caches[g].factor for g, _ in job.blocks[:first])
        cache = self.caches[job.blocks[position][0]]
        row = position - first
        return job.slots[round(before) + row // cache.factor], row % cache.factor * cache.group.row_bytes

    def _fail(self, job: Job) -> None:
        self.seen["jobs without room in a bounce buffer"] += 1
        self.failed.add(job.number)
        for position, (g, b) in enumerate(job.blocks):
            if job.is_store:
                slot, at = self._place(job, position)
                self.slots[slot, at + self.caches[g].own] = self.pool[slot, at + self.caches[g].own]
            else:
                self.unknown[g][b] = True

    def _drain(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while self.jobs:
            if time.monotonic() > deadline:
                raise Broken(f"jobs {list(self.jobs)} do not end")
            if self.plan.with_threads:
                self.transfer.wait_any(0.002)
            elif not self.transfer.advance():
                self.emulator.tick(1)
            self._collect()
            self._write_as_other_ranks()
        self.emulator.tick()

    def _check_all(self) -> None:
        if not np.array_equal(self.pool, self.slots):
            raise Broken("slots were changed that no job fills")
        for probe in self.probes:
            if probe.job not in self.failed and not np.array_equal(probe.memory, probe.expected):
                raise Broken("the engine has read wrong bytes")
        self.seen["blocks read by the engine"] += len(self.probes)
        for cache, unknown in zip(self.caches, self.unknown, strict=True):
            cache.check(~unknown)
        left = [self.emulator.num_bytes(kind) for kind in Memory]
        own = self.engine.allocated + sum(len(memory) for cache in self.caches for memory in cache.memory)
        if left != [own, 0, 0]:
            raise Broken(f"{left[0] - own} bytes of the device, {left[1:]} of the host are not freed")


def run_trial(library: Path, seed: int) -> Counter[str]:
    """Runs the trial of ``seed`` and returns what happened."""
    plan = Plan.random(Random(seed))
    seen = Trial(library, seed, plan).run()
    seen["trials"] += 1
    seen[f"trials with {plan.fault.name.lower().replace('_', ' ')}"] += 1
    return seen

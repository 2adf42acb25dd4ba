"""A simulated device: streams that run their work at adversarial moments, in numpy memory, and races that are found.

Every operation is deferred onto a stream and runs at the earliest, the latest or a random moment that the streams and
events allow. Copies are torn into pieces between which other streams work. New memory is poisoned, a full launch queue
blocks its caller until work has run, and every access is compared with all others by ``races``. One seed replays a run.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from kvoffload.abc import ByteArray, PageGroup
from kvoffload.transfer.copies import Numbers
from kvoffload.transfer.cuda.device import Addresses, Device, Event, Stream
from kvoffload.transfer.cuda.driver import DriverError
from tests.sim.races import (
    HOST,
    MAX_TRACKS,
    POISON,
    Access,
    Clock,
    DeviceFault,
    Integers,
    Memory,
    Ranges,
    Region,
)

QUEUE_SIZES = (3, 20, 1000)
"""How much work a stream's launch queue holds."""
STEPS = (0, 0, 1, 3, 12)
"""How many steps the device makes at a time, at random moments."""
SPEEDS = (0.0, 0.1, 1.0, 1.0)
"""How likely a stream is to work, compared with others."""
STEPS_PER_SPEED = 30
"""How often streams change their speeds: after this many steps on average."""
LATEST_CHANCE = 0.1
"""If work runs as late as possible: the chance that a query finds it done, so that a caller who asks again and again
gets an answer."""
ALIGNMENT = 256
ARENA_BYTES = 1 << 20
MAX_PIECES = 4
"""A copy or kernel runs in at most this many steps."""


class Timing(enum.Enum):
    """When work runs."""

    EARLIEST = enum.auto()
    LATEST = enum.auto()
    RANDOM = enum.auto()


@dataclass(slots=True, eq=False)
class Mark:
    """A point in a stream, which an event stands for until it is recorded again."""

    stream: SimulatedStream
    clock: Clock
    done_at: int | None = None
    """The time at which the device reached it."""


@dataclass(slots=True, eq=False)
class SimulatedEvent:
    mark: Mark | None = None
    """None: never recorded."""


@dataclass(slots=True, eq=False)
class _Work:
    steps: Iterator[None]


@dataclass(slots=True, eq=False)
class SimulatedStream:
    """Work that runs in order. ``clock`` is that of work issued next."""

    track: int
    clock: Clock
    queue: deque[_Work | Mark] = field(default_factory=deque)
    """What has not run yet; a mark of another stream is waited for."""
    speed: float = 1.0


class _Arena:
    """Memory for allocations of the host, and what is known to be in it."""

    def __init__(self, nbytes: int) -> None:
        self._data = _aligned(nbytes)
        self._known = self._data.copy()
        self._used = 0

    @property
    def num_left(self) -> int:
        return len(self._data) - self._used

    def take(self, nbytes: int) -> ByteArray:
        data = self._data[self._used : self._used + nbytes]
        # Nothing is at the bytes between two allocations.
        self._used = min(len(self._data), -(-(self._used + nbytes + 1) // ALIGNMENT) * ALIGNMENT)
        return data

    def accept(self, address: int, nbytes: int) -> None:
        """The device has written here, perhaps."""
        at = address - int(self._data.ctypes.data)
        if 0 <= at < len(self._data):
            self._known[at : at + nbytes] = self._data[at : at + nbytes]

    def take_changes(self) -> Integers:
        """Returns the addresses of the bytes that the host has changed since the last call."""
        data, known = self._data[: self._used], self._known[: self._used]
        if (data.view(np.int64) == known.view(np.int64)).all():
            return np.zeros(0, np.int64)
        changed: Integers = np.flatnonzero(data != known)
        known[changed] = data[changed]
        return changed + int(self._data.ctypes.data)


class SimulatedDevice(Device):
    """A device with the pages of ``groups``, whose views are numpy arrays that lie in memory added with ``add_memory``.

    It makes no step by itself: only when it is called. Faults are kept until ``check``, because they may be found while
    it is called by code that handles errors. ``num_registered`` says how many bytes of added host memory are registered
    now.
    """

    def __init__(self, groups: Sequence[PageGroup], seed: int, timing: Timing | None = None) -> None:
        self.random = Random(seed)
        self.timing = timing or self.random.choice(list(Timing))
        self.memory = Memory()
        self.now = 0
        """Steps made so far: the time."""
        self.seen: Counter[str] = Counter()
        """What has happened."""
        self._groups = [[(int(v.ctypes.data), v.strides[0], v.shape[1], len(v)) for v in g.views] for g in groups]
        self._host_clock: Clock = np.zeros(MAX_TRACKS, np.int64)
        self._host_clock[HOST] = 1
        self._engine = SimulatedStream(1, self._host_clock.copy())
        self._streams = [self._engine]
        self._queue_size = self.random.choice(QUEUE_SIZES)
        self._registered: dict[int, tuple[Callable[[], int], int]] = {}
        """By start of a region: how many of its bytes are registered now, and how many by each call."""
        self._arenas: list[_Arena] = []
        """Memory for ``allocate_host``."""

    # Memory.

    def add_memory(self, name: str, data: ByteArray) -> None:
        """Adds the engine's own device memory: contiguous, of any contents."""
        self.memory.add(name, _bytes_of(data), is_device=True)

    def add_host(self, name: str, data: ByteArray, num_registered: Callable[[], int], boundary: int = 1 << 60) -> None:
        """Adds contiguous host memory of others, such as a pool. It is registered piece by piece, ``boundary`` bytes at
        a time, and no run of a copy may lie in two pieces."""
        region = self.memory.add(name, _bytes_of(data), is_device=False)
        self._registered[region.start] = num_registered, boundary

    def allocate(self, nbytes: int) -> int:
        raw = _aligned(nbytes)
        return self.memory.add(f"device memory of {nbytes} bytes", raw, is_device=True, is_fresh=True).start

    def allocate_host(self, nbytes: int) -> ByteArray:
        if not self._arenas or self._arenas[-1].num_left < nbytes:
            self._arenas.append(_Arena(max(ARENA_BYTES, -(-nbytes // ALIGNMENT) * ALIGNMENT)))
        data = self._arenas[-1].take(nbytes)
        # What the host writes there is only seen where it differs from the poison, so it is not fresh.
        self.memory.add(f"host memory of {nbytes} bytes", data, is_device=False)
        return data

    def touch_host(self, ranges: Ranges, what: str, writes: bool = False) -> None:
        """Notes that the host reads or writes memory now."""
        self._note_host_writes()
        who = Access(HOST, int(self._host_clock[HOST]), self._host_clock.copy(), what)
        self.memory.access(who, *((Ranges.none(), ranges) if writes else (ranges, Ranges.none())))

    def _note_host_writes(self) -> None:
        """Finds what the host has changed in its allocated memory since the last call."""
        for arena in self._arenas:
            changed = arena.take_changes()
            if len(changed):
                who = Access(HOST, int(self._host_clock[HOST]), self._host_clock.copy(), "the host")
                self.memory.access(who, Ranges.none(), Ranges.of(changed, 1))

    # Streams and events.

    def enter_thread(self) -> None:
        """Does nothing."""

    def new_stream(self) -> Stream:
        stream = SimulatedStream(len(self._streams) + 1, self._host_clock.copy())
        if stream.track == MAX_TRACKS:
            raise ValueError(f"this device has {MAX_TRACKS - 2} streams beside the engine's")
        self._streams.append(stream)
        return stream

    def engine_stream(self) -> Stream:
        return self._engine

    def new_event(self) -> Event:
        return SimulatedEvent()

    def record(self, event: Event, stream: Stream) -> None:
        self._begin_issue(stream)
        event.mark = Mark(stream, stream.clock.copy())
        self._issue(stream, event.mark)

    def wait(self, stream: Stream, event: Event) -> None:
        if event.mark is None:
            return
        self._begin_issue(stream)
        np.maximum(stream.clock, event.mark.clock, out=stream.clock)
        if event.mark.stream is not stream:
            self._issue(stream, event.mark)

    def is_done(self, event: Event) -> bool:
        self._note_host_writes()
        mark = event.mark
        if mark is None:
            return True
        if self.timing is Timing.LATEST and self.random.random() < LATEST_CHANCE:
            self._finish(mark)
        self._work()
        return self._observe(mark)

    def sleep_until_done(self, event: Event) -> None:
        self._note_host_writes()
        if event.mark is not None:
            self._work()
            self._finish(event.mark)
            self._observe(event.mark)

    def seconds_between(self, start: Event, end: Event) -> float:
        begin, done = (event.mark.done_at if event.mark is not None else None for event in (start, end))
        if begin is None or done is None:
            raise self._fault("the time between events that the device has not reached")
        return float(done - begin) * 1e-6

    def _observe(self, mark: Mark) -> bool:
        if mark.done_at is None:
            return False
        np.maximum(self._host_clock, mark.clock, out=self._host_clock)
        return True

    # Work.

    def launch(self, stream: Stream, what: str, steps: Iterator[None], reads: Ranges, writes: Ranges) -> None:
        """Enqueues work of the engine: ``steps`` runs later, with other work between its steps."""
        self._launch(stream, what, steps, reads, writes)

    def copy(self, stream: Stream, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        targets, sources, sizes = (np.array(each, np.int64) for each in (targets, sources, sizes))
        if not len(targets):
            raise self._fault("a copy of nothing")
        sides = self._check_side(sources, sizes), self._check_side(targets, sizes)
        from_device = sides[0].is_device
        if sides[1].is_device is from_device:
            raise self._fault("a copy must have one side on the device and the other on the host")
        on_device, on_host = sides if from_device else sides[::-1]
        host = "registered" if on_host.start in self._registered else "pinned"
        self.seen[f"copies {'from' if from_device else 'to'} the device, {host} memory"] += 1
        self.seen["direct copies"] += not on_device.is_fresh
        pieces = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))
        what = f"a copy of {sizes.sum()} bytes {'from' if from_device else 'to'} the device"
        self._launch(stream, what, self._torn(pieces), Ranges(sources, sizes), Ranges(targets, sizes))

    def gather(self, stream: Stream, group: int, blocks: Numbers, staging: int) -> None:
        self._move_rows(stream, group, blocks, staging, is_gather=True)

    def scatter(self, stream: Stream, group: int, blocks: Numbers, staging: int) -> None:
        self._move_rows(stream, group, blocks, staging, is_gather=False)

    def close(self) -> None:
        if any(stream.queue for stream in self._streams if stream is not self._engine):
            self._fault("the device was closed while it had work in progress")

    def tick(self) -> None:
        """Lets time pass on the device."""
        self._note_host_writes()
        self._work()

    def finish(self) -> None:
        """Lets all work end."""
        while ready := [stream for stream in self._streams if self._is_ready(stream)]:
            for stream in ready:
                self._step(stream)

    def check(self) -> None:
        """Raises the first fault, if there is one."""
        self._note_host_writes()
        self.memory.check()

    def complain(self, fault: Exception) -> None:
        """Notes a fault that something else has found."""
        self.memory.complain(fault)

    def note_error(self, error: Exception) -> None:
        """Notes an error that the user of the device has raised, unless a DriverError has caused it, which is no fault
        of the one who gets it."""
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, DriverError):
                return
            cause = cause.__cause__
        self.memory.complain(error)

    def _fault(self, text: str) -> DeviceFault:
        fault = DeviceFault(text)
        self.memory.complain(fault)
        return fault

    def _check_side(self, addresses: Addresses, sizes: Addresses) -> Region:
        """Returns memory of one side of a copy. Host memory must be registered now."""
        sides: dict[bool, Region] = {}
        for address, size in zip(addresses.tolist(), sizes.tolist(), strict=True):
            found = self.memory.find(address, size)
            if size <= 0 or found is None:
                raise self._fault(f"a copy of {size} bytes at {address:#x}: there is no such memory")
            region, offset = found
            num_registered, boundary = self._registered.get(region.start, (lambda: 1 << 60, 1 << 60))
            if offset + size > num_registered():
                raise self._fault(f"a copy of {size} bytes at offset {offset} of {region.name}: not registered")
            if offset // boundary != (offset + size - 1) // boundary:
                raise self._fault(f"a copy of {size} bytes at offset {offset} of {region.name} crosses a boundary")
            sides[region.is_device] = region
        if len(sides) > 1:
            raise self._fault("a copy has device memory and host memory on the same side")
        return next(iter(sides.values()))

    def _move_rows(self, stream: Stream, group: int, blocks: Numbers, staging: int, is_gather: bool) -> None:
        what = f"the {'gather' if is_gather else 'scatter'} of {len(blocks)} blocks of group {group}"
        if staging % 16 or not len(blocks):
            raise self._fault(f"{what}: staging at {staging:#x}")
        pages = self._groups[group]
        if not ((blocks >= 0) & (blocks < pages[0][3])).all() or (not is_gather and len(set(blocks)) < len(blocks)):
            raise self._fault(f"{what}: the block numbers are {blocks.tolist()}")
        self.seen["gathers" if is_gather else "scatters"] += 1
        row_bytes = sum(nbytes for _, _, nbytes, _ in pages)
        self.memory.view(staging, len(blocks) * row_bytes)
        on_device = rows = Ranges.none()
        offset = 0
        for base, stride, nbytes, _ in pages:
            on_device += Ranges.of(base + stride * blocks, nbytes)
            rows += Ranges.of(staging + offset + row_bytes * np.arange(len(blocks)), nbytes)
            offset += nbytes
        targets, sources = (rows, on_device) if is_gather else (on_device, rows)
        pieces = list(zip(targets.starts.tolist(), sources.starts.tolist(), sources.sizes.tolist(), strict=True))
        self._launch(stream, what, self._torn(pieces), sources, targets)

    def _torn(self, pieces: list[tuple[int, int, int]]) -> Iterator[None]:
        """Copies ``pieces`` (target, source, number of bytes) in any order, some of them in two parts."""
        order = list(pieces)
        self.random.shuffle(order)
        target, source, size = order[0] if order else (0, 0, 0)
        if size > 1:
            cut = self.random.randrange(1, size)
            order[0] = (target, source, cut)
            order.append((target + cut, source + cut, size - cut))
        per_step = -(-len(order) // self.random.randint(1, MAX_PIECES))
        for i, (target, source, size) in enumerate(order):
            to, data = self.memory.find(target, size), self.memory.view(source, size)
            assert to is not None
            to[0].data[to[1] : to[1] + size] = data
            if not to[0].is_device:
                for arena in self._arenas:
                    arena.accept(target, size)
            if (i + 1) % per_step == 0:
                yield

    def _launch(self, stream: SimulatedStream, what: str, steps: Iterator[None], reads: Ranges, writes: Ranges) -> None:
        self._begin_issue(stream)
        stream.clock[stream.track] += 1
        who = Access(stream.track, int(stream.clock[stream.track]), stream.clock.copy(), what)

        def run() -> Iterator[None]:
            self.memory.access(who, reads, writes)
            yield from steps

        self._issue(stream, _Work(run()))

    def _begin_issue(self, stream: SimulatedStream) -> None:
        """What the host has done so far is done before the work that it issues."""
        self._note_host_writes()
        np.maximum(stream.clock, self._host_clock, out=stream.clock)

    def _issue(self, stream: SimulatedStream, item: _Work | Mark) -> None:
        self._host_clock[HOST] += 1
        stream.queue.append(item)
        while len(stream.queue) > self._queue_size:
            self.seen["full launch queues"] += 1
            self._run_next(stream)
        self._work()

    # Time.

    def _work(self) -> None:
        """Makes as many steps as the timing wants now."""
        if self.timing is Timing.EARLIEST:
            self.finish()
        elif self.timing is Timing.RANDOM:
            for _ in range(self.random.choice(STEPS)):
                if self.random.random() * STEPS_PER_SPEED < 1:
                    for stream in self._streams:
                        stream.speed = self.random.choice(SPEEDS)
                ready = [stream for stream in self._streams if stream.speed and self._is_ready(stream)]
                if not ready:
                    break
                self._step(self.random.choices(ready, [stream.speed for stream in ready])[0])

    def _is_ready(self, stream: SimulatedStream) -> bool:
        if not stream.queue:
            return False
        head = stream.queue[0]
        return isinstance(head, _Work) or head.stream is stream or head.done_at is not None

    def _step(self, stream: SimulatedStream) -> bool:
        """Makes one step of a stream, if that is possible."""
        if not self._is_ready(stream):
            return False
        self.now += 1
        head = stream.queue[0]
        if isinstance(head, Mark):
            stream.queue.popleft()
            if head.stream is stream:
                head.done_at = self.now
        elif next(head.steps, stream) is stream:
            stream.queue.popleft()
        return True

    def _run_next(self, stream: SimulatedStream) -> None:
        """Lets the oldest work of a stream end, and what it waits for, and nothing else."""
        head = stream.queue[0]
        if isinstance(head, Mark) and head.stream is not stream:
            self._finish(head)
        while stream.queue and stream.queue[0] is head:
            self._step(stream)

    def _finish(self, mark: Mark) -> None:
        """Lets the work before a mark end, and what that waits for, and nothing else."""
        while mark.done_at is None:
            self._run_next(mark.stream)


def _aligned(nbytes: int) -> ByteArray:
    """Returns poisoned memory that starts, and can be viewed, on multiples of ALIGNMENT."""
    raw = np.full(-(-nbytes // ALIGNMENT) * ALIGNMENT + ALIGNMENT, POISON, np.uint8)
    first = -int(raw.ctypes.data) % ALIGNMENT
    return raw[first : first + nbytes]


def _bytes_of(data: ByteArray) -> ByteArray:
    if not data.flags.c_contiguous:
        raise ValueError("memory of a device must be contiguous")
    return data.reshape(-1).view(np.uint8)

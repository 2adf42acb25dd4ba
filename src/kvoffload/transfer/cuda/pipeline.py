"""The copies of one direction: chunks of rows, their staging memory, streams and events."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvoffload.transfer.copies import Numbers
from kvoffload.transfer.cuda.device import Addresses, Device, Event, Stream
from kvoffload.transfer.cuda.limits import ROW_ALIGNMENT, Limits, aligned, device_bytes
from kvoffload.transfer.cuda.pages import PageTable
from kvoffload.transfer.cuda.rows import (
    BLOCK,
    GROUP,
    NBYTES,
    OFFSET,
    SLOT,
    Batch,
    Point,
    RowArray,
    RowQueue,
    matching,
)
from kvoffload.transfer.cuda.slots import BounceBuffer, HostSlots, merge

DEVICE_SIDE, BOUNCE_AT, POOL_AT, SIZE, SECTION = range(5)
"""What a copy of a chunk has: its address on the device, its places in a bounce buffer and in the pool, its bytes, and
its section of the pool."""


@dataclass(slots=True, eq=False)
class Half:
    """Staging memory. ``free``: reached when the last chunk in it does not need it any more; None: it is free."""

    address: int
    free: Event = None


@dataclass(slots=True, eq=False)
class _Launch:
    """A kernel that gathers or scatters ``blocks`` of ``group``, whose rows are at ``staging``."""

    group: int
    blocks: Numbers
    staging: int


@dataclass(slots=True, eq=False)
class Chunk:
    """Rows that are issued together, ordered by group."""

    rows: RowArray
    device_side: Addresses
    """Where the bytes of each row are staged, or where its first run is on the device."""
    begin: Event
    copied: Event
    """Reached when the bytes have passed the bus."""
    kernel: Event = None
    """Reached when the rows are gathered, or scattered. None: no row is staged."""
    launches: list[_Launch] = field(default_factory=list)
    is_direct: bool = False
    """Whether some row is copied without staging."""
    bounce: BounceBuffer | None = None

    @property
    def events(self) -> list[Event]:
        return [event for event in (self.begin, self.copied, self.kernel) if event is not None]


@dataclass(slots=True, eq=False)
class _Stream:
    """A stream of the device, and the number of the last point of the engine's stream for which it waits."""

    device: Device
    stream: Stream
    after: int = -1

    def wait_for(self, point: Point) -> None:
        if point.number > self.after:
            self.device.wait(self.stream, point.event)
            self.after = point.number


class Pipeline:
    """Issues rows of one direction, chunk by chunk, and finds out which have ended.

    A chunk of a store is gathered into a half on the kernel stream, then copied to its slots on the copy stream; a
    load goes the other way. So the kernels of one chunk run beside the copy of another. Rows of a group whose device
    blocks are one piece of memory are copied directly, and run by run where other ranks fill the rest of a row.
    Chunks of one direction end in order. Not thread-safe.
    """

    def __init__(
        self, device: Device, tables: Sequence[PageTable], slots: HostSlots, limits: Limits, is_store: bool
    ) -> None:
        self.queue = RowQueue()
        self._device = device
        self._tables = tables
        self._slots = slots
        self._limits = limits
        self._is_store = is_store
        self._kernels = _Stream(device, device.new_stream())
        self._copies = _Stream(device, device.new_stream())
        self._chunks: deque[Chunk] = deque()
        self._ends: list[Event] = [device.new_event() for _ in range(2)]
        self._events: list[Event] = [device.new_event() for _ in range(3 * limits.in_flight)]
        self._block_bytes = [table.device_block_bytes for table in tables]
        largest = max(self._block_bytes, default=0)
        padding = ROW_ALIGNMENT * (len(tables) - 1)
        self._is_staged = [table.needs_gather and device.can_gather(g) for g, table in enumerate(tables)]
        """By group."""
        self._is_split = [not (self._is_staged[g] or table.is_direct) for g, table in enumerate(tables)]
        """By group: whether the runs of its device blocks are copied one by one."""
        is_direct = all(len(table.runs) <= 1 for table in tables)
        half_bytes = aligned(max(limits.direct_bytes if is_direct else limits.chunk_bytes, largest + padding))
        self._max_bytes = half_bytes - padding
        self._halves: deque[Half] = deque()
        if any(self._is_staged):
            at = device.allocate(2 * half_bytes)
            self._halves += (Half(at), Half(at + half_bytes))
        self.staging_bytes = device_bytes(half_bytes * len(self._halves))
        """Device memory that was allocated."""
        self._bounce = slots.new_bounce_buffers(device, limits, largest)

    @property
    def is_idle(self) -> bool:
        """Whether no chunk is in flight, as far as ``finish`` knows."""
        return not self._chunks

    def mark_end(self) -> list[Event]:
        """Returns events that are reached when the device has done all that was issued, even of a chunk whose issuing
        has failed halfway."""
        for event, each in zip(self._ends, (self._kernels, self._copies), strict=True):
            self._device.record(event, each.stream)
        return self._ends

    def issue(self) -> bool:
        """Issues the next chunk. Returns False if there is none, or if enough are in flight."""
        if not self.queue or len(self._chunks) >= self._limits.in_flight:
            return False
        batch = self._issue_first(self.queue)
        if batch is not None:
            # There is room when a chunk has ended.
            self.queue.put_back(batch)
        return batch is None

    def issue_now(self, jobs: Numbers, blocks: Numbers | None) -> list[RowArray]:
        """Issues all rows of ``jobs`` that copy one of ``blocks`` (None: any) before all other rows. Returns those for
        which there is no room; they are not copied."""
        wanted = self.queue.take_matching(jobs, blocks)
        rejected = []
        while wanted:
            batch = self._issue_first(wanted)
            if batch is not None:
                rejected.append(batch.rows)
        return rejected

    def make_wait(self, stream: Stream, jobs: Numbers, blocks: Numbers | None) -> None:
        """Makes ``stream`` wait until issued rows of ``jobs`` that copy one of ``blocks`` (None: any) have read their
        device blocks, if this direction stores, or have filled them."""
        # The events of one stream are reached in order: the last on each stream is enough.
        last: dict[bool, Event] = {}
        for chunk in self._chunks:
            if matching(chunk.rows, jobs, blocks).any():
                event = chunk.kernel if self._is_store and not chunk.is_direct else self._end(chunk)
                last[event is chunk.kernel] = event
        for event in last.values():
            self._device.wait(stream, event)

    def finish(self) -> tuple[RowArray, float] | None:
        """Returns the rows of the oldest chunk, if it has ended, and the seconds that its copy took."""
        if not self._chunks or not self._device.is_done(self._end(self._chunks[0])):
            return None
        chunk = self._chunks.popleft()
        seconds = self._device.seconds_between(chunk.begin, chunk.copied)
        if chunk.bounce is not None:
            if self._is_store:
                _, at, offsets, sizes, _ = self._pieces(chunk)
                self._slots.write(chunk.bounce, at, offsets, sizes)
            self._bounce.append(chunk.bounce)
        for half in self._halves:
            if any(half.free is event for event in chunk.events):
                half.free = None
        self._events += chunk.events
        return chunk.rows, seconds

    def _end(self, chunk: Chunk) -> Event:
        """Returns the event at which the chunk has ended."""
        return chunk.copied if self._is_store or chunk.kernel is None else chunk.kernel

    def _new_event(self) -> Event:
        return self._events.pop() if self._events else self._device.new_event()

    def _issue_first(self, queue: RowQueue) -> Batch | None:
        """Issues the first rows of ``queue``. If there is no room for them, they are removed and returned."""
        batch = queue.take(self._max_bytes, self._limits.chunk_rows)
        bounce = None
        if not self._slots.are_ready(batch.rows[SLOT]):
            if not self._bounce:
                return batch
            bounce = self._bounce[-1]
            fits = np.cumsum(batch.rows[NBYTES]) <= bounce.data.nbytes
            queue.put_back(Batch(batch.rows[:, ~fits], batch.point))
            batch = Batch(batch.rows[:, fits], batch.point)
        chunk = self._plan(batch.rows)
        if bounce is not None:
            chunk.bounce = self._bounce.pop()
        self._chunks.append(chunk)
        if self._is_store:
            self._issue_store(chunk, batch.point)
        else:
            self._issue_load(chunk, batch.point)
        return None

    def _plan(self, rows: RowArray) -> Chunk:
        """Returns a chunk of these rows with its places in staging memory."""
        n = rows.shape[1]
        groups, starts = [int(rows[GROUP, 0])], [0]
        if not (rows[GROUP] == groups[0]).all():
            # The rows of a group follow one another, so that one kernel takes them.
            rows = rows[:, np.argsort(rows[GROUP], kind="stable")]
            starts = [0, *(np.flatnonzero(np.diff(rows[GROUP])) + 1).tolist()]
            groups = rows[GROUP, starts].tolist()
        chunk = Chunk(rows, np.empty(n, dtype=np.int64), self._new_event(), self._new_event())
        at = self._halves[0].address if self._halves else 0
        for g, start, end in zip(groups, starts, [*starts[1:], n], strict=True):
            table, blocks = self._tables[g], rows[BLOCK, start:end]
            if not self._is_staged[g]:
                chunk.is_direct = True
                chunk.device_side[start:end] = table.runs[0].base + blocks * table.runs[0].stride
            else:
                chunk.launches.append(_Launch(g, blocks, at))
                nbytes = (end - start) * self._block_bytes[g]
                chunk.device_side[start:end] = np.arange(at, at + nbytes, self._block_bytes[g])
                at += aligned(nbytes)
        if chunk.launches:
            chunk.kernel = self._new_event()
        return chunk

    def _issue_store(self, chunk: Chunk, point: Point) -> None:
        device = self._device
        if chunk.launches:
            self._kernels.wait_for(point)
            self._take_half(self._kernels.stream, chunk.copied)
            for launch in chunk.launches:
                device.gather(self._kernels.stream, launch.group, launch.blocks, launch.staging)
            device.record(chunk.kernel, self._kernels.stream)
            device.wait(self._copies.stream, chunk.kernel)
        if chunk.is_direct:
            self._copies.wait_for(point)
        device.record(chunk.begin, self._copies.stream)
        device_side, host_side, sizes = self._copies_of(chunk, self._pieces(chunk))
        device.copy(self._copies.stream, host_side, device_side, sizes)
        device.record(chunk.copied, self._copies.stream)

    def _issue_load(self, chunk: Chunk, point: Point) -> None:
        device, pieces = self._device, self._pieces(chunk)
        if chunk.bounce is not None:
            _, at, offsets, sizes, _ = pieces
            self._slots.read(chunk.bounce, at, offsets, sizes)
        if chunk.launches:
            self._take_half(self._copies.stream, chunk.kernel)
        if chunk.is_direct:
            self._copies.wait_for(point)
        device.record(chunk.begin, self._copies.stream)
        device.copy(self._copies.stream, *self._copies_of(chunk, pieces))
        device.record(chunk.copied, self._copies.stream)
        if chunk.launches:
            device.wait(self._kernels.stream, chunk.copied)
            self._kernels.wait_for(point)
            for launch in chunk.launches:
                device.scatter(self._kernels.stream, launch.group, launch.blocks, launch.staging)
            device.record(chunk.kernel, self._kernels.stream)

    def _pieces(self, chunk: Chunk) -> Addresses:
        """Returns what is copied, shape (5, pieces): a piece per row, or per run of it if those are copied one by one.

        In a bounce buffer the pieces follow one another: it has nothing of what other ranks have in the same slots.
        """
        rows = chunk.rows
        pieces = np.stack(
            [
                chunk.device_side,
                np.cumsum(rows[NBYTES]) - rows[NBYTES],
                rows[OFFSET],
                rows[NBYTES],
                self._slots.sections(rows),
            ]
        )
        groups = np.unique(rows[GROUP]).tolist()
        if not any(self._is_split[g] for g in groups):
            return pieces
        return np.concatenate([self._split(g, rows[BLOCK], pieces, rows[GROUP] == g) for g in groups], axis=1)

    def _split(self, group: int, blocks: Numbers, pieces: Addresses, of_group: npt.NDArray[np.bool_]) -> Addresses:
        """Returns the pieces of one group, as copies of its runs if those are copied one by one."""
        pieces = pieces[:, of_group]
        if not self._is_split[group]:
            return pieces
        blocks, runs, at = blocks[of_group], [], 0
        for run in self._tables[group].runs:
            part = pieces.copy()
            part[DEVICE_SIDE] = run.base + blocks * run.stride
            part[BOUNCE_AT] += at
            part[POOL_AT] += run.offset
            part[SIZE] = run.nbytes
            runs.append(part)
            at += run.nbytes
        return np.concatenate(runs, axis=1)

    def _copies_of(self, chunk: Chunk, pieces: Addresses) -> tuple[Addresses, Addresses, Addresses]:
        """Returns the addresses on the device and on the host, and the sizes, of what passes the bus."""
        if chunk.bounce is None:
            host_side = self._slots.address + pieces[POOL_AT]
        else:
            host_side = chunk.bounce.address + pieces[BOUNCE_AT]
        return merge(pieces[DEVICE_SIDE], host_side, pieces[SIZE], pieces[SECTION])

    def _take_half(self, stream: Stream, free: Event) -> None:
        """Makes ``stream`` wait until the first half is free, and moves it to the end. The chunk that takes it needs
        it until ``free``."""
        half = self._halves[0]
        if half.free is not None:
            self._device.wait(stream, half.free)
        half.free = free
        self._halves.rotate(-1)

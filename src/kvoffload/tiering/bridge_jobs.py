"""Jobs of a bridge: which foreign pages may be touched now, and how each job has ended."""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.abc import ByteArray, IntegrityError, Keys, OffloadKey

Page: TypeAlias = Sequence[npt.NDArray[np.uint8]]
"""The memory of one block: one-dimensional arrays, ``block_bytes`` bytes together, in order."""

MAX_INBOX = 4096
"""Jobs and ends of requests that the bridge's thread has not seen yet. There are so many only while a tier hangs; those
beyond are dropped."""
GRACE_S = 1.0
"""How long after its deadline a job ends if the bridge's thread does not end it."""


class JobEnd(NamedTuple):
    """How a store or a load has ended.

    ``done``: of a load, the keys whose pages have the right bytes; of a store, those that were copied, and those that
    every tier held already. ``ok``: whether these are all. ``nbytes`` were copied; ``seconds`` have passed since the
    job was submitted.
    """

    job: int
    is_load: bool
    done: frozenset[OffloadKey]
    ok: bool
    nbytes: int
    seconds: float


class RequestChain(NamedTuple):
    """The first ``length`` keys of ``keys`` are the chain of ``request`` so far."""

    request: str
    keys: Keys
    length: int
    namespace: bytes


class JobState(enum.Enum):
    OPEN = enum.auto()
    """Its pages may be touched."""
    STOPPED = enum.auto()
    """It ends after the copy of a block that has begun."""
    ENDED = enum.auto()


@dataclass(slots=True, eq=False)
class BridgeJob:
    """A store from, or a load into, ``pages``, one per key. ``number`` is None if a thread waits for the job.
    ``chain``: that of the request whose blocks are stored; None for a load."""

    number: int | None
    keys: Keys
    pages: Sequence[Page]
    namespace: bytes
    since: float
    deadline: float
    chain: RequestChain | None
    is_use: bool
    """Whether it is a use of its keys, or part of a use of the chain."""
    state: JobState = field(default=JobState.OPEN, init=False)
    names: list[OffloadKey] = field(default_factory=list, init=False)
    """The keys with the ``namespace`` in front. Not made with the job: that is on the engine's thread."""
    begun: int = field(default=0, init=False)
    """How many of its blocks have been looked at."""
    done: set[int] = field(default_factory=set, init=False)
    """The indices of the blocks that are done."""
    num_settled: int = field(default=0, init=False)
    """Blocks that are done or given up."""
    nbytes: int = field(default=0, init=False)

    @property
    def is_load(self) -> bool:
        return self.chain is None

    @property
    def has_ended(self) -> bool:
        return self.state is JobState.ENDED

    def name_keys(self) -> None:
        self.names = [self.namespace + key for key in self.keys]


class Jobs:
    """The open jobs of a bridge, what its thread has not seen yet, and the reports of jobs that have ended. Any thread
    may call any method, but one thread alone copies.

    ``max_pages``: pages of stores that wait at the same time. ``slots``: the staging pool, shape (slots, block_bytes).
    """

    def __init__(self, slots: ByteArray, max_pages: int, clock: Callable[[], float]) -> None:
        self.inbox: deque[BridgeJob | RequestChain] = deque()
        """What the thread has not seen yet, at most MAX_INBOX. A chain: its request has ended."""
        self.wake = threading.Event()
        """Set when there is something to do for the thread."""
        self.is_closed = False
        self.num_settled = 0
        """Blocks of which the jobs are done with, since the start."""
        self.block_bytes: int = slots.shape[1]
        self._slots = slots
        self._max_pages = max_pages
        self.clock = clock
        self._changed = threading.Condition()
        self.open: dict[BridgeJob, None] = {}
        """Read only for others."""
        self._copying: BridgeJob | None = None
        self._num_pages = 0
        """Pages of open stores."""
        self._reports: deque[JobEnd] = deque()
        self._look_at = 0.0
        """When to look next for jobs that are long past their deadlines."""

    def submit(self, entry: BridgeJob | RequestChain) -> None:
        """Hands a job, or the chain of a request that has ended, to the thread. A job ends at once if there is nothing
        to do, if too many pages or calls wait, or if all is closed."""
        with self._changed:
            is_taken = not self.is_closed and len(self.inbox) < MAX_INBOX
            if isinstance(entry, BridgeJob):
                num_pages = 0 if entry.is_load else len(entry.keys)
                self._num_pages += num_pages
                self.open[entry] = None
                has_room = self._num_pages <= self._max_pages or self._num_pages == num_pages
                if not (is_taken and entry.keys and has_room):
                    self._end(entry)
            if is_taken:
                # A store that has ended at once, too: its request has a hole.
                self.inbox.append(entry)
                self.wake.set()

    def settle(self, job: BridgeJob, indices: Sequence[int], done: bool) -> None:
        """Takes in that blocks of ``job`` are done, or are given up. Ends the job with its last block."""
        with self._changed:
            if not job.has_ended:
                self.num_settled += len(indices)
                job.num_settled += len(indices)
                if done:
                    job.done.update(indices)
                if job.num_settled == len(job.keys):
                    self._end(job)

    def copy(self, job: BridgeJob, indices: Sequence[int], slots: Sequence[int]) -> int:
        """Copies blocks of ``job`` between their pages and ``slots``. Returns how many, from the first one on: fewer if
        the job is to end meanwhile."""
        num_copied = 0
        with self._changed:
            self._copying, pages = job, job.pages
        try:
            for index, slot in zip(indices, slots, strict=True):
                if job.state is not JobState.OPEN:
                    break
                _copy(pages[index], self._slots[slot], job.is_load)
                num_copied += 1
        finally:
            with self._changed:
                self._copying = None
                job.nbytes += num_copied * self.block_bytes
                if job.state is JobState.STOPPED:
                    self._end(job)
                self._changed.notify_all()
        return num_copied

    def stop(self, jobs: Sequence[BridgeJob] | None = None) -> None:
        """Ends ``jobs``, by default all that are open. When it returns, none of their pages is touched any more."""
        with self._changed:
            stopped = list(self.open) if jobs is None else jobs
            self._stop(stopped)
            self._changed.wait_for(lambda: all(job.has_ended for job in stopped))

    def _stop(self, jobs: Sequence[BridgeJob]) -> None:
        """Ends ``jobs``: the one whose pages are being touched after the copy of a block."""
        for job in jobs:
            if job.state is JobState.OPEN and job is self._copying:
                job.state = JobState.STOPPED
            elif job.state is JobState.OPEN:
                self._end(job)

    def wait(self, job: BridgeJob) -> list[bool]:
        """Returns which blocks of ``job`` are done, when it has ended, or was stopped at its deadline."""
        with self._changed:
            self._changed.wait_for(lambda: job.has_ended, job.deadline - job.since)
        self.stop([job])
        return [i in job.done for i in range(len(job.keys))]

    def close(self) -> None:
        """Ends all jobs, now and from now on."""
        with self._changed:
            self.is_closed = True
        self.stop()
        self._slots = np.empty((0, 0), dtype=np.uint8)
        self.wake.set()

    def finished(self) -> list[JobEnd]:
        """Returns the reports since the last call. Ends jobs that are long past their deadlines, because the thread
        that should have done so hangs in a tier."""
        with self._changed:
            now = self.clock()
            if self.open and now >= self._look_at:
                self._look_at = now + GRACE_S / 4
                self._stop([job for job in self.open if now >= job.deadline + GRACE_S])
            reports = list(self._reports)
            self._reports.clear()
            return reports

    def _end(self, job: BridgeJob) -> None:
        del self.open[job]
        job.state, job.pages = JobState.ENDED, ()
        self._num_pages -= 0 if job.is_load else len(job.keys)
        if job.number is not None:
            done = frozenset(job.keys[i] for i in job.done)
            ok = len(job.done) == len(job.keys)
            seconds = self.clock() - job.since
            self._reports.append(JobEnd(job.number, job.is_load, done, ok, job.nbytes, seconds))
        self._changed.notify_all()


def _copy(page: Page, slot: ByteArray, is_load: bool) -> None:
    """Copies a block between its page and its slot. Raises IntegrityError if they have not the same size: the engine
    would get, or give, other bytes than it means."""
    if sum(map(len, page)) != len(slot):
        raise IntegrityError(f"a page has {sum(map(len, page))} bytes, and a block {len(slot)}")
    at = 0
    for part in page:
        piece = slot[at : at + len(part)]
        if is_load:
            np.copyto(part, piece)
        else:
            np.copyto(piece, part)
        at += len(part)

"""Jobs of a bridge: which foreign pages may be touched now, and how each job has ended."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.abc import ByteArray, IntegrityError, OffloadKey

Page: TypeAlias = Sequence[npt.NDArray[np.uint8]]
"""The memory of one block: one-dimensional arrays, ``block_bytes`` bytes together, in order."""

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


@dataclass(slots=True, eq=False)
class BridgeJob:
    """A store from, or a load into, ``pages``, one per key. ``number`` is None if a thread waits for the job.

    ``names``: the keys with the ``namespace`` in front. ``chain``: its first ``chain_length`` keys are the chain of
    ``request`` when the job was submitted.
    """

    number: int | None
    is_load: bool
    keys: Sequence[OffloadKey]
    pages: Sequence[Page]
    request: str
    namespace: bytes
    since: float
    deadline: float
    chain: Sequence[OffloadKey] = ()
    chain_length: int = 0
    is_use: bool = True
    """Whether the job is part of a use of the chain. If not, its request counts none."""
    names: list[OffloadKey] = field(default_factory=list)
    begun: int = 0
    """How many of its blocks have been looked at."""
    done: set[int] = field(default_factory=set)
    """The indices of the blocks that are done."""
    num_open: int = field(init=False)
    """Blocks that are neither done nor given up."""
    nbytes: int = 0
    may_copy: bool = True
    """Whether its pages may be touched."""
    has_ended: bool = False

    def __post_init__(self) -> None:
        self.num_open = len(self.keys)

    def name_keys(self) -> None:
        """Makes ``names``. Not when the job is made: that is on the engine's thread."""
        if not self.names:
            self.names = [self.namespace + key for key in self.keys]


class Jobs:
    """The open jobs of a bridge, and the reports of those that have ended. Any thread may call any method, but one
    thread alone copies.

    ``max_pages``: pages of stores that wait at the same time. ``slots``: the staging pool, shape (slots, slot_bytes).
    """

    def __init__(self, slots: ByteArray, block_bytes: int, max_pages: int, clock: Callable[[], float]) -> None:
        self._slots = slots
        self._block_bytes = block_bytes
        self._max_pages = max_pages
        self._clock = clock
        self._changed = threading.Condition()
        self._open: dict[BridgeJob, None] = {}
        self._copying: BridgeJob | None = None
        self._num_pages = 0
        """Pages of open stores."""
        self._reports: deque[JobEnd] = deque()
        self.num_settled = 0
        """Blocks of which the jobs are done with, since the start."""
        self._look_at = 0.0
        """When to look next for jobs that are long past their deadlines."""
        self._is_closed = False

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def has_reports(self) -> bool:
        return bool(self._reports)

    def submit(self, job: BridgeJob) -> None:
        """Opens ``job``. It ends at once if there is nothing to do, if too many pages wait, or if all is closed."""
        with self._changed:
            num_pages = 0 if job.is_load else len(job.keys)
            self._num_pages += num_pages
            self._open[job] = None
            has_room = self._num_pages <= self._max_pages or self._num_pages == num_pages
            if self._is_closed or not job.keys or not has_room:
                self._end(job)

    def settle(self, job: BridgeJob, indices: Sequence[int], done: bool, nbytes: int = 0) -> None:
        """Takes in that blocks of ``job`` are done, or are given up. Ends the job with its last block."""
        with self._changed:
            if not job.has_ended:
                self.num_settled += len(indices)
                job.num_open -= len(indices)
                job.nbytes += nbytes
                if done:
                    job.done.update(indices)
                if job.num_open == 0:
                    self._end(job)

    def copy(self, job: BridgeJob, indices: Sequence[int], slots: Sequence[int]) -> int:
        """Copies blocks of ``job`` between their pages and ``slots``. Returns how many, from the first one on: fewer if
        the job is to end meanwhile."""
        num_copied = 0
        with self._touch(job) as pages:
            for index, slot in zip(indices, slots, strict=True):
                if not job.may_copy:
                    break
                _copy(pages[index], self._slots[slot, : self._block_bytes], job.is_load)
                num_copied += 1
        return num_copied

    @contextmanager
    def _touch(self, job: BridgeJob) -> Iterator[Sequence[Page]]:
        """Returns a context in which the pages of ``job`` may be touched while ``job.may_copy``."""
        with self._changed:
            self._copying = job
            pages = job.pages
        try:
            yield pages
        finally:
            with self._changed:
                self._copying = None
                if not job.may_copy and not job.has_ended:
                    self._end(job)
                self._changed.notify_all()

    def stop(self, jobs: Sequence[BridgeJob] | None = None) -> None:
        """Ends ``jobs``, by default all that are open. When it returns, none of their pages is touched any more."""
        with self._changed:
            stopped = list(self._open) if jobs is None else jobs
            for job in stopped:
                job.may_copy = False
                if job is not self._copying and not job.has_ended:
                    self._end(job)
            self._changed.wait_for(lambda: all(job.has_ended for job in stopped))

    def wait(self, job: BridgeJob, timeout_s: float) -> None:
        """Returns when ``job`` has ended, or has been stopped after ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: job.has_ended, timeout_s)
        self.stop([job])

    def close(self) -> None:
        """Ends all jobs, now and from now on."""
        with self._changed:
            self._is_closed = True
        self.stop()
        self._slots = np.empty((0, 0), dtype=np.uint8)

    def finished(self) -> list[JobEnd]:
        """Returns the reports since the last call. Ends jobs that are long past their deadlines, because the thread
        that should have done so hangs in a tier."""
        with self._changed:
            now = self._clock()
            if self._open and now >= self._look_at:
                self._look_at = now + GRACE_S / 4
                for job in [each for each in self._open if now >= each.deadline + GRACE_S]:
                    job.may_copy = False
                    if job is not self._copying:
                        self._end(job)
            reports = list(self._reports)
            self._reports.clear()
            return reports

    def _end(self, job: BridgeJob) -> None:
        del self._open[job]
        job.has_ended, job.may_copy, job.pages = True, False, ()
        self._num_pages -= 0 if job.is_load else len(job.keys)
        if job.number is not None:
            done = frozenset(job.keys[i] for i in job.done)
            ok = len(job.done) == len(job.keys)
            seconds = self._clock() - job.since
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

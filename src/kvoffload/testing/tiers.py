"""Tiers and executors for tests: a plain tier in memory, and an executor whose every turn is chosen by a seed."""

from __future__ import annotations

import threading
import time
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TypeAlias

import numpy as np

from kvoffload.abc import ByteArray, IntegrityError, LookupState, OffloadKey, Slots, States, Tier, TierError, TierResult
from kvoffload.testing.storage import Killed
from kvoffload.tiers.executor import Executor

Job: TypeAlias = Callable[[], None]


class SteppedExecutor(Executor):
    """Jobs begin, pause, go on and end at moments chosen by ``seed``, all within ``tick`` and ``wait``.

    At most ``num_threads`` jobs are under way at once. Each runs on a thread of its own, but only while the caller
    waits for it, so nothing ever runs at the same time and a run can be had again. A job is interrupted where it calls
    ``pause`` or ``stall``: give these to the storage it works on. What a job raises, ``tick`` raises. ``chance``: of
    each further turn within a tick.
    """

    def __init__(
        self,
        seed: int = 0,
        num_threads: int = 4,
        max_queued: int = 1 << 16,
        chance: float = 0.5,
        pause_chance: float = 0.3,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._held = False
        self._random = Random(seed)
        self._num_threads = num_threads
        self._max_queued = max_queued
        self._chance = chance
        self._pause_chance = pause_chance
        self._clock = clock
        self._maintenance: deque[Job] = deque()
        self._reads: deque[Job] = deque()
        self._writes: deque[Job] = deque()
        self._idle: list[_Fiber] = []
        self._under_way: list[_Fiber] = []
        self._running: _Fiber | None = None
        self._closed = False

    def submit_maintenance(self, job: Job) -> bool:
        return self._submit(self._maintenance, job)

    def submit_read(self, job: Job) -> bool:
        return self._submit(self._reads, job)

    def submit_write(self, job: Job) -> bool:
        return self._submit(self._writes, job)

    def _submit(self, queue: deque[Job], job: Job) -> bool:
        if self._closed or len(queue) >= self._max_queued:
            return False
        queue.append(job)
        return True

    @property
    def in_job(self) -> bool:
        """Whether a job is what runs now."""
        return self._running is not None

    @property
    def in_the_middle(self) -> bool:
        """Whether a job has paused where it is."""
        return bool(self._under_way)

    @property
    def idle(self) -> bool:
        """Nothing is queued or under way."""
        return not (self._maintenance or self._reads or self._writes or self._under_way)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Within it nothing begins and nothing goes on."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def tick(self) -> None:
        """Some time passes."""
        while self._random.random() < self._chance and self._turn():
            pass

    def wait(self, timeout_s: float) -> None:
        self.tick()

    def drain(self) -> None:
        """Runs until nothing is left that could go on."""
        while self._turn():
            pass

    def close(self, timeout_s: float) -> bool:
        self._closed = True
        until = self._clock() + timeout_s
        while not self._held and self._turn(until):
            pass
        self._clear_queues()
        return self.idle

    def kill(self) -> None:
        """The process is gone: what is queued never runs, what is under way stops where it is."""
        self._closed = True
        self._clear_queues()
        for fiber in self._under_way + self._idle:
            fiber.kill()
        self._under_way.clear()
        self._idle.clear()

    def _clear_queues(self) -> None:
        for queue in (self._maintenance, self._reads, self._writes):
            queue.clear()

    def pause(self) -> None:
        """Called in a job: it may stop here for a while. Elsewhere nothing happens."""
        if self._running is not None and self._random.random() < self._pause_chance:
            self._running.park()

    def stall(self, seconds: float) -> None:
        """Called in a job: it hangs for so long, by the executor's clock. Elsewhere nothing happens."""
        if self._running is not None:
            self._running.until = self._clock() + seconds
            self._running.park()

    def _turn(self, now: float | None = None) -> bool:
        """Begins a job, or lets one go on that has paused. False if there is none."""
        if self._held:
            return False
        now = self._clock() if now is None else now
        ready = [fiber for fiber in self._under_way if fiber.until <= now]
        queue = self._maintenance or self._reads or self._writes
        may_begin = bool(queue) and len(self._under_way) < self._num_threads
        if not ready and not may_begin:
            return False
        n = self._random.randrange(len(ready) + may_begin)
        if n < len(ready):
            fiber = ready[n]
        else:
            fiber = self._idle.pop() if self._idle else _Fiber()
            fiber.job = queue.popleft()
            self._under_way.append(fiber)
        self._running = fiber
        try:
            fiber.resume()
        finally:
            self._running = None
            if fiber.job is None:
                self._under_way.remove(fiber)
                self._idle.append(fiber)
        return True

    def __del__(self) -> None:
        self.kill()


class _Fiber:
    """A thread that runs only while another waits for it in ``resume``."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self.until = float("-inf")
        """It goes on at this time, not before."""
        self._error: BaseException | None = None
        self._killed = False
        self._go = threading.Lock()
        self._back = threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._run, name="kvoffload-simulated", daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Returns when the job has ended or parked. Raises what it raised."""
        self._go.release()
        self._back.acquire()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def park(self) -> None:
        """Called by the job."""
        self._back.release()
        self._go.acquire()
        self.until = float("-inf")
        if self._killed:
            raise Killed

    def kill(self) -> None:
        self._killed = True
        self._go.release()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._go.acquire()
            if self._killed:
                return
            try:
                assert self.job is not None
                self.job()
            except BaseException as error:
                if self._killed:
                    return
                self._error = error
            self.job = None
            self._back.release()


@dataclass(eq=False, slots=True)
class _Stored:
    """A block of MemoryTier."""

    raw: list[ByteArray] = field(default_factory=list)
    checksum: int = 0
    ready: bool = False


class MemoryTier(Tier):
    """The plainest tier: ``num_blocks`` blocks in a dict, the oldest evicted first.

    ``pools``: of each rank, (num_slots, slot_bytes).
    """

    name = "memory"

    def __init__(
        self,
        pools: Sequence[ByteArray],
        num_blocks: int,
        executor: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pools = pools
        self._num_blocks = num_blocks
        self._executor = executor or SteppedExecutor(clock=clock)
        self._clock = clock
        self._blocks: OrderedDict[OffloadKey, _Stored] = OrderedDict()
        """Oldest first, those being written included."""
        self._under_way: set[OffloadKey] = set()
        """Keys that ``poll`` must still tell of. Their blocks are not evicted."""
        self._ended: deque[tuple[TierResult, _Stored]] = deque()
        self._num_evicted = 0
        self._closed = False

    @property
    def capacity_bytes(self) -> int:
        return self._num_blocks * self.block_bytes

    @property
    def used_bytes(self) -> int:
        return len(self._blocks) * self.block_bytes

    @property
    def block_bytes(self) -> int:
        return sum(pool.shape[1] for pool in self._pools)

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_evicted(self) -> int:
        return self._num_evicted

    def contains(self, keys: Sequence[OffloadKey]) -> States:
        hits = [key in self._blocks and self._blocks[key].ready for key in keys]
        return np.where(hits, LookupState.HIT, LookupState.MISS).astype(np.uint8)

    def read(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        taken = []
        for key, slot in zip(keys, slots.tolist(), strict=True):
            block = self._blocks.get(key)
            if block is None or not block.ready or key in self._under_way or self._closed:
                continue
            if self._executor.submit_read(partial(self._read, key, slot, block)):
                self._under_way.add(key)
                taken.append(key)
        return taken

    def write(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        taken = []
        for key, slot in zip(keys, slots.tolist(), strict=True):
            if key in self._blocks or key in self._under_way or self._closed or not self._make_room():
                continue
            block = _Stored()
            if self._executor.submit_write(partial(self._write, key, slot, block)):
                self._blocks[key] = block
                self._under_way.add(key)
                taken.append(key)
        return taken

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            self._blocks.pop(key, None)

    def reset(self) -> None:
        self._blocks.clear()

    def poll(self) -> list[TierResult]:
        told = []
        while self._ended:
            result, block = self._ended.popleft()
            self._under_way.discard(result.key)
            if self._blocks.get(result.key) is not block:
                result = TierResult(result.key, result.is_read, TierError.GONE)
            elif not result.ok:
                del self._blocks[result.key]
            block.ready = True
            told.append(result)
        return told

    def wait(self, timeout_s: float) -> None:
        if not self._ended:
            self._executor.wait(timeout_s)

    def close(self) -> None:
        self._closed = True
        self._executor.close(timeout_s=1.0)
        self.reset()

    def check_integrity(self) -> None:
        if len(self._blocks) > self._num_blocks:
            raise IntegrityError(f"{len(self._blocks)} blocks, and room for {self._num_blocks}")
        if any(not block.ready and key not in self._under_way for key, block in self._blocks.items()):
            raise IntegrityError("a block is being written by nobody")

    def _make_room(self) -> bool:
        if len(self._blocks) < self._num_blocks:
            return True
        victim = next((key for key in self._blocks if key not in self._under_way), None)
        if victim is not None:
            del self._blocks[victim]
            self._num_evicted += 1
        return victim is not None

    # On the executor's threads.

    def _read(self, key: OffloadKey, slot: int, block: _Stored) -> None:
        start = self._clock()
        for pool, raw in zip(self._pools, block.raw, strict=True):
            pool[slot] = raw
        good = _checksum([pool[slot] for pool in self._pools]) == block.checksum
        self._end(key, True, None if good else TierError.CORRUPT, start, block)

    def _write(self, key: OffloadKey, slot: int, block: _Stored) -> None:
        start = self._clock()
        block.raw = [pool[slot].copy() for pool in self._pools]
        block.checksum = _checksum(block.raw)
        self._end(key, False, None, start, block)

    def _end(self, key: OffloadKey, is_read: bool, error: TierError | None, start: float, block: _Stored) -> None:
        now = self._clock()
        self._ended.append((TierResult(key, is_read, error, self.block_bytes, now - start, start, now), block))


class AskingTier(MemoryTier):
    """A MemoryTier that has to be asked first whether it holds a key, as one beyond a network has."""

    name = "asking"

    def __init__(
        self,
        pools: Sequence[ByteArray],
        num_blocks: int,
        executor: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(pools, num_blocks, executor, clock)
        self._answered: set[OffloadKey] = set()

    def contains(self, keys: Sequence[OffloadKey]) -> States:
        states = super().contains(keys)
        for i, key in enumerate(keys):
            if key not in self._answered and not self._closed:
                self._executor.submit_read(partial(self._answered.add, key))
                states[i] = LookupState.RETRY
        return states


def _checksum(buffers: Sequence[ByteArray]) -> int:
    return zlib.crc32(b"".join(buffer.tobytes() for buffer in buffers))


def make_pools(num_slots: int, *slot_bytes: int, seed: int = 0) -> list[ByteArray]:
    """A rank's pool for each of ``slot_bytes``, filled at random."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (num_slots, nbytes), dtype=np.uint8) for nbytes in slot_bytes]

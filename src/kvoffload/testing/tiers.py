"""Tiers and executors for tests: a simple tier in memory, and an executor whose interleaving a seed chooses."""

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
    """Runs jobs within ``tick`` and ``wait`` only. ``seed`` chooses when they begin, pause, continue and end.

    At most ``num_threads`` jobs have begun and not ended at a time. Each runs on a thread of its own, but only while
    the caller waits for it: nothing runs in parallel, and a run can be repeated. A job is interrupted where it calls
    ``pause`` or ``stall``: give these to the storage that it uses. An exception of a job is raised by ``tick``.
    ``chance``: the probability of each further turn within a tick.
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
        """Whether the caller is a job."""
        return self._running is not None

    @property
    def in_the_middle(self) -> bool:
        """Whether a job has begun and paused."""
        return bool(self._under_way)

    @property
    def idle(self) -> bool:
        """Whether no job is queued or has begun."""
        return not (self._maintenance or self._reads or self._writes or self._under_way)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Returns a context in which no job begins or continues."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def tick(self) -> None:
        """Takes a random number of turns."""
        while self._random.random() < self._chance and self.turn():
            pass

    def wait(self, timeout_s: float) -> None:
        self.tick()

    def drain(self) -> None:
        """Takes turns until no job can begin or continue."""
        while self.turn():
            pass

    def close(self, timeout_s: float) -> bool:
        self._closed = True
        until = self._clock() + timeout_s
        while not self._held and self.turn(until):
            pass
        self._clear_queues()
        return self.idle

    def kill(self) -> None:
        """Simulates the end of the process: queued jobs never run, and those that have begun stop where they are."""
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
        """May interrupt the job that calls it. Does nothing outside a job."""
        if self._running is not None and self._random.random() < self._pause_chance:
            self._running.park()

    def stall(self, seconds: float) -> None:
        """Interrupts the job that calls it for at least ``seconds`` of the executor's clock. Does nothing outside a
        job."""
        if self._running is not None:
            self._running.until = self._clock() + seconds
            self._running.park()

    def turn(self, now: float | None = None) -> bool:
        """Begins a job, or continues one that has paused. Returns False if there is none. ``now``: the time to go by
        instead of the clock's."""
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
    """A thread that runs only while another one waits for it in ``resume``."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self.until = float("-inf")
        """The time before which it must not continue."""
        self._error: BaseException | None = None
        self._killed = False
        self._go = threading.Lock()
        self._back = threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._run, name="kvoffload-simulated", daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Runs the job until it ends or pauses. Raises what it raises."""
        self._go.release()
        self._back.acquire()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def park(self) -> None:
        """Gives control back to the caller of ``resume``. Called by the job."""
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
class StoredBlock:
    """A block of MemoryTier. ``raw``: its bytes, one buffer per rank."""

    raw: list[ByteArray] = field(default_factory=list)
    checksum: int = 0
    ready: bool = False


class MemoryTier(Tier):
    """A simple tier: at most ``num_blocks`` blocks in a dict, of which the oldest is evicted first.

    ``pools``: one per rank, shape (num_slots, slot_bytes). Subclasses with a bug override its methods; ``read_block``
    and ``write_block`` run on the executor's threads.
    """

    name = "memory"

    def __init__(
        self,
        pools: Sequence[ByteArray],
        num_blocks: int,
        executor: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pools = pools
        self.max_blocks = num_blocks
        self.executor = executor or SteppedExecutor(clock=clock)
        self.clock = clock
        self.blocks: OrderedDict[OffloadKey, StoredBlock] = OrderedDict()
        """Oldest first, including blocks that are being written."""
        self.under_way: set[OffloadKey] = set()
        """Keys that ``poll`` has not reported yet. Their blocks are not evicted."""
        self.ended: deque[tuple[TierResult, StoredBlock]] = deque()
        self._num_evicted = 0
        self.is_closed = False

    @property
    def capacity_bytes(self) -> int:
        return self.max_blocks * self.block_bytes

    @property
    def used_bytes(self) -> int:
        return len(self.blocks) * self.block_bytes

    @property
    def block_bytes(self) -> int:
        return sum(pool.shape[1] for pool in self.pools)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_evicted(self) -> int:
        return self._num_evicted

    def contains(self, keys: Sequence[OffloadKey]) -> States:
        hits = [key in self.blocks and self.blocks[key].ready for key in keys]
        return np.where(hits, LookupState.HIT, LookupState.MISS).astype(np.uint8)

    def read(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        taken = []
        for key, slot in zip(keys, slots.tolist(), strict=True):
            block = self.blocks.get(key)
            if block is None or not block.ready or key in self.under_way or self.is_closed:
                continue
            if self.executor.submit_read(partial(self.read_block, key, slot, block)):
                self.under_way.add(key)
                taken.append(key)
        return taken

    def write(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        taken = []
        for key, slot in zip(keys, slots.tolist(), strict=True):
            if key in self.blocks or key in self.under_way or self.is_closed or not self.make_room():
                continue
            block = StoredBlock()
            if self.executor.submit_write(partial(self.write_block, key, slot, block)):
                self.blocks[key] = block
                self.under_way.add(key)
                taken.append(key)
        return taken

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        for key in reversed(keys):
            if key in self.blocks:
                self.blocks.move_to_end(key)

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            self.blocks.pop(key, None)

    def reset(self) -> None:
        self.blocks.clear()

    def poll(self) -> list[TierResult]:
        results = []
        while self.ended:
            result, block = self.ended.popleft()
            self.under_way.discard(result.key)
            if self.blocks.get(result.key) is not block:
                result = TierResult(result.key, result.is_read, TierError.GONE)
            elif not result.ok:
                del self.blocks[result.key]
            block.ready = True
            results.append(result)
        return results

    def wait(self, timeout_s: float) -> None:
        if not self.ended:
            self.executor.wait(timeout_s)

    def close(self) -> None:
        self.is_closed = True
        self.executor.close(timeout_s=1.0)
        self.reset()

    def check_integrity(self) -> None:
        if len(self.blocks) > self.max_blocks:
            raise IntegrityError(f"{len(self.blocks)} blocks, but room for {self.max_blocks}")
        if any(not block.ready and key not in self.under_way for key, block in self.blocks.items()):
            raise IntegrityError("a block is not ready, but no write of it is under way")

    def make_room(self) -> bool:
        """Returns whether there is room for one more block, after an eviction if necessary."""
        return len(self.blocks) < self.max_blocks or self.evict()

    def evict(self) -> bool:
        """Evicts the oldest block that is not in transfer. Returns whether there was one."""
        victim = next((key for key in self.blocks if key not in self.under_way), None)
        if victim is not None:
            del self.blocks[victim]
            self._num_evicted += 1
        return victim is not None

    # On the executor's threads.

    def read_block(self, key: OffloadKey, slot: int, block: StoredBlock) -> None:
        start = self.clock()
        for pool, raw in zip(self.pools, block.raw, strict=True):
            pool[slot] = raw
        good = checksum_of([pool[slot] for pool in self.pools]) == block.checksum
        self._end(key, True, None if good else TierError.CORRUPT, start, block)

    def write_block(self, key: OffloadKey, slot: int, block: StoredBlock) -> None:
        start = self.clock()
        block.raw = [pool[slot].copy() for pool in self.pools]
        block.checksum = checksum_of(block.raw)
        self._end(key, False, None, start, block)

    def _end(self, key: OffloadKey, is_read: bool, error: TierError | None, start: float, block: StoredBlock) -> None:
        now = self.clock()
        self.ended.append((TierResult(key, is_read, error, self.block_bytes, now - start, start, now), block))


class AskingTier(MemoryTier):
    """A MemoryTier whose first answer about a key is RETRY, like that of a tier beyond a network."""

    name = "asking"

    def __init__(
        self,
        pools: Sequence[ByteArray],
        num_blocks: int,
        executor: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(pools, num_blocks, executor, clock)
        self.answered: set[OffloadKey] = set()

    def contains(self, keys: Sequence[OffloadKey]) -> States:
        states = super().contains(keys)
        for i, key in enumerate(keys):
            if key not in self.answered and not self.is_closed:
                self.executor.submit_read(partial(self.answered.add, key))
                states[i] = LookupState.RETRY
        return states


def checksum_of(buffers: Sequence[ByteArray]) -> int:
    return zlib.crc32(b"".join(buffer.tobytes() for buffer in buffers))


def make_pools(num_slots: int, *slot_bytes: int, seed: int = 0) -> list[ByteArray]:
    """Returns one pool per rank, of ``num_slots`` slots of ``slot_bytes`` each, filled at random."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (num_slots, nbytes), dtype=np.uint8) for nbytes in slot_bytes]

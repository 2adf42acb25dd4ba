"""The simplest shared tier: a dict that the tiers of several servers use, for tests of whatever works on shared tiers.

``SharedMemory`` is the medium, which bounds itself, ``SharedMemoryTier`` a tier on it, and ``SharedMemoryMedium`` makes
the servers of a simulation use one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

import numpy as np

from kvoffload.abc import ByteArray, LookupState, OffloadKey, Slots, States, Tier, TierError, TierResult
from kvoffload.testing.servers import Connection, DeletedOthers, SharedMedium, SharingServer
from kvoffload.testing.tiers import SteppedExecutor, checksum_of
from kvoffload.tiers.executor import Executor

HIT_TTL_S = 5.0
"""How long a tier trusts the answer that a block is there."""
MISS_TTL_S = 0.05
"""How long a tier trusts the answer that a block is not there."""


@dataclass(slots=True)
class SharedValue:
    """A block: its bytes, one buffer per rank, with their checksum, and the writer's name."""

    raw: list[ByteArray]
    checksum: int
    writer: object


class SharedMemory:
    """At most ``max_values`` values by name, of which the oldest is evicted first."""

    def __init__(self, max_values: int = 1 << 20) -> None:
        self.max_values = max_values
        self.values: OrderedDict[bytes, SharedValue] = OrderedDict()
        self.put_by: dict[bytes, set[object]] = {}
        """By name, who has ever put a value: after an eviction several may."""
        self.removed_by_others = 0
        """Values that were removed by one who has never put one of that name."""

    def put(self, name: bytes, value: SharedValue) -> bool:
        """Returns False if there is one of that name already, which stays."""
        if name in self.values:
            return False
        self.values[name] = value
        self.put_by.setdefault(name, set()).add(value.writer)
        while len(self.values) > self.max_values:
            self.values.popitem(last=False)
        return True

    def remove(self, name: bytes, writer: object) -> None:
        value = self.values.pop(name, None)
        self.removed_by_others += value is not None and writer not in self.put_by[name]


class SharedMemoryTier(Tier):
    """A tier of one server on ``medium``. Subclasses with a bug override its methods; ``ask_for``, ``read_block`` and
    ``write_block`` run on the executor's threads. They call ``pause`` before each access to the medium: there a
    simulation may raise an OSError, or let others run."""

    name = "shared"
    is_shared = True

    def __init__(
        self,
        medium: SharedMemory,
        pools: Sequence[ByteArray],
        executor: Executor | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        fingerprint: str = "",
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        self.medium = medium
        self.pause = pause
        self.pools = pools
        self.executor = executor or SteppedExecutor(clock=clock)
        self.clock = clock
        self.fingerprint = fingerprint
        self.answers: dict[OffloadKey, tuple[bool, float]] = {}
        """Whether the medium has a block, and until when that is trusted."""
        self.asking: set[OffloadKey] = set()
        self.written: set[OffloadKey] = set()
        """Blocks that this process has written and not deleted."""
        self.under_way: set[OffloadKey] = set()
        self.deleted: set[OffloadKey] = set()
        """Those of them that were deleted meanwhile."""
        self.removing: set[OffloadKey] = set()
        """Blocks that are being removed from the medium."""
        self.ended: deque[TierResult] = deque()
        self.failed_lookups = 0
        self.is_off = False
        """After a reset or the end."""

    @property
    def block_bytes(self) -> int:
        return sum(pool.shape[1] for pool in self.pools)

    @property
    def num_failed_lookups(self) -> int:
        return self.failed_lookups

    def name_of(self, key: OffloadKey) -> bytes:
        return self.fingerprint.encode() + b"/" + key

    def expect(self, keys: Sequence[OffloadKey]) -> None:
        self.contains(keys)

    def contains(self, keys: Sequence[OffloadKey]) -> States:
        states = np.zeros(len(keys), np.uint8)
        unknown = []
        for i, key in enumerate(keys):
            is_there, until = self.answers.get(key, (False, float("-inf")))
            if self.is_off or key in self.removing or (key in self.under_way and not is_there):
                states[i] = LookupState.MISS
            elif self.clock() < until:
                states[i] = LookupState.HIT if is_there else LookupState.MISS
            else:
                states[i] = LookupState.RETRY
                unknown.append(key)
        unknown = [key for key in unknown if key not in self.asking]
        if unknown and self.executor.submit_read(partial(self.ask_for, unknown)):
            self.asking.update(unknown)
        return states

    def read(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        return self._begin(keys, slots, is_read=True)

    def write(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        return self._begin(keys, slots, is_read=False)

    def _begin(self, keys: Sequence[OffloadKey], slots: Slots, is_read: bool) -> list[OffloadKey]:
        taken: list[OffloadKey] = []
        for key, slot in zip(keys, slots.tolist(), strict=True):
            is_there, until = self.answers.get(key, (False, float("-inf")))
            is_held = is_there and self.clock() < until
            if self.is_off or key in self.under_way or key in self.removing or is_held != is_read:
                continue
            submit = self.executor.submit_read if is_read else self.executor.submit_write
            if submit(partial(self.read_block if is_read else self.write_block, key, slot)):
                self.under_way.add(key)
                taken.append(key)
        return taken

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        pass

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            self.deleted.update({key} & self.under_way)
            self.answers.pop(key, None)
            if key in self.written:
                self.written.discard(key)
                self._remove(key)

    def _remove(self, key: OffloadKey) -> None:
        if not self.is_off and self.executor.submit_write(partial(self.remove_block, key)):
            self.removing.add(key)

    def reset(self) -> None:
        self.is_off = True
        self.deleted |= self.under_way
        self.answers.clear()

    def poll(self) -> list[TierResult]:
        results = []
        while self.ended:
            result = self.ended.popleft()
            self.under_way.discard(result.key)
            if result.key in self.deleted:
                self.deleted.discard(result.key)
                if not result.is_read and result.nbytes:
                    self._remove(result.key)
                result = TierResult(result.key, result.is_read, TierError.GONE)
            elif not result.is_read and result.ok:
                self.answers[result.key] = True, self.clock() + HIT_TTL_S
                self.written.update([result.key] if result.nbytes else [])
            elif result.error in (TierError.GONE, TierError.CORRUPT):
                self.answers[result.key] = False, self.clock() + MISS_TTL_S
            results.append(result)
        return results

    def wait(self, timeout_s: float) -> None:
        if not self.ended:
            self.executor.wait(timeout_s)

    def close(self) -> None:
        self.is_off = True
        self.executor.close(timeout_s=1.0)
        self.answers.clear()

    # On the executor's threads.

    def ask_for(self, keys: Sequence[OffloadKey]) -> None:
        try:
            for key in keys:
                self.pause()
                is_there = self.name_of(key) in self.medium.values
                self.answers[key] = is_there, self.clock() + (HIT_TTL_S if is_there else MISS_TTL_S)
        except OSError:
            self.failed_lookups += 1
        finally:
            self.asking.difference_update(keys)

    def read_block(self, key: OffloadKey, slot: int) -> None:
        start = self.clock()
        try:
            self.pause()
            value = self.medium.values.get(self.name_of(key))
        except OSError:
            self._end(key, True, TierError.IO, start)
            return
        if value is None:
            self._end(key, True, TierError.GONE, start)
            return
        for pool, raw in zip(self.pools, value.raw, strict=True):
            pool[slot] = raw
        is_good = checksum_of([pool[slot] for pool in self.pools]) == value.checksum
        self._end(key, True, None if is_good else TierError.CORRUPT, start)

    def write_block(self, key: OffloadKey, slot: int) -> None:
        start = self.clock()
        raw = [pool[slot].copy() for pool in self.pools]
        try:
            self.pause()
            is_new = self.medium.put(self.name_of(key), SharedValue(raw, checksum_of(raw), self))
        except OSError:
            self._end(key, False, TierError.IO, start)
        else:
            self._end(key, False, None, start, self.block_bytes if is_new else 0)

    def remove_block(self, key: OffloadKey) -> None:
        self.medium.remove(self.name_of(key), self)
        self.removing.discard(key)

    def _end(
        self, key: OffloadKey, is_read: bool, error: TierError | None, start: float, nbytes: int | None = None
    ) -> None:
        now = self.clock()
        nbytes = self.block_bytes if nbytes is None and error is None else nbytes or 0
        self.ended.append(TierResult(key, is_read, error, nbytes, now - start, start, now))


class SharedMemoryMedium(SharedMedium):
    """A SharedMemory that stalls, fails, forgets and spoils what it has."""

    kind = "memory"

    def __init__(self, seed: int, is_calm: bool) -> None:
        super().__init__()
        rng = self.random = Random(f"memory {seed}")
        self.memory = SharedMemory(1 << 20 if is_calm else rng.choice((5, 20, 1 << 20)))
        rates = [0.0 if is_calm else rng.choice((0.0, 0.0, 0.02, 0.2)) for _ in range(4)]
        self.stalls, self.fails, self.forgets, self.spoils = rates
        self.stall_s = rng.choice((0.005, 0.05, 30.0))
        self.is_dead = False

    def connect(self, server: SharingServer) -> Connection:
        return _MemoryConnection(self, server)

    def tick(self) -> None:
        values, rng = self.memory.values, self.random
        if values and rng.random() < self.forgets:
            del values[rng.choice(list(values))]
            self.injected["forgotten"] += 1
        if values and rng.random() < self.spoils:
            value = values[rng.choice(list(values))]
            value.raw = [np.bitwise_xor(raw, np.uint8(4)) for raw in value.raw]
            self.injected["spoiled"] += 1

    def end_faults(self) -> None:
        self.stalls = self.fails = self.forgets = self.spoils = 0.0
        self.is_dead = False
        self.memory.max_values = 1 << 20

    def begin_outage(self) -> bool:
        self.is_dead = True
        return True

    def check(self) -> None:
        if self.memory.removed_by_others:
            raise DeletedOthers(f"{self.memory.removed_by_others} blocks were removed by another than their writer")

    def counts(self) -> Counter[str]:
        return self.injected


class _MemoryConnection(Connection):
    def __init__(self, medium: SharedMemoryMedium, server: SharingServer) -> None:
        self.medium = medium
        self.server = server

    def open(self, pools: Sequence[ByteArray]) -> Tier:
        server = self.server
        return SharedMemoryTier(
            self.medium.memory, pools, server.executor, server.clock, server.fingerprint, self._pause
        )

    def _pause(self) -> None:
        medium, server = self.medium, self.server
        server.pause()
        while medium.is_dead or medium.random.random() < medium.stalls:
            medium.injected["stalls"] += 1
            server.executor.stall(medium.stall_s)
        if medium.random.random() < medium.fails:
            medium.injected["failures"] += 1
            raise OSError("the medium has failed")

"""A simulated store for remote tiers, with clients that fail, in simulated processes.

``SimulatedStore`` is what all servers share. ``SimulatedClient`` is the client of one process, which lies, hangs, loses
its connection and returns wrong values at the rates of ``StoreFaults``. ``SimulatedStarter`` starts
processes that run StoreWorkers on their threads, may crash, and go on for a while after they were killed.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TypeVar

import numpy as np

from kvoffload.abc import ByteArray
from kvoffload.tiers.remote.client import Outcome, StoreClient, StoreError
from kvoffload.tiers.remote.link import StoreProcess
from kvoffload.tiers.remote.messages import Op, Response, StoreRequest
from kvoffload.tiers.remote.worker import StoreWorker
from tests.sim.executor import SteppedExecutor

Answer = TypeVar("Answer")
OUTAGE_RETRY_S = 0.5
"""A call that hangs in an outage looks this often whether that has ended."""


@dataclass(frozen=True)
class StoreFaults:
    """The probability of each fault, per value unless said otherwise."""

    says_it_has: float = 0.0
    """``exists`` says that the store has a value, which it has not."""
    says_it_lacks: float = 0.0
    wrong_value: float = 0.0
    """``get`` returns the value of another name."""
    truncated: float = 0.0
    """``get`` fills only a part of the buffers and says OK."""
    garbage: float = 0.0
    """``get`` returns random bytes."""
    rotten: float = 0.0
    """``put`` stores other bytes than it was given."""
    forgotten: float = 0.0
    """``put`` says OK and stores nothing."""
    failed: float = 0.0
    """A value fails, although the store has perhaps done what was asked."""
    full: float = 0.0
    """``put`` finds no room."""
    connection_lost: float = 0.0
    """A call ends with StoreError before this value."""
    stall: float = 0.0
    """A call hangs before this value."""
    late_get: float = 0.0
    """``get`` hangs when it has half of the bytes, and delivers the rest afterwards, whether or not anyone waits."""
    crash: float = 0.0
    """The client ends its process."""


@dataclass(slots=True, eq=False)
class StoreValue:
    data: ByteArray
    checksum: bytes
    """The bytes that were put, if ``data`` has others."""
    writer: object
    leased_until: float
    note: str = ""
    """What a client of a bucket has stored with it."""


class SimulatedStore:
    """Values by name, at most ``max_values``; the oldest is evicted first. ``lease_s``: a value cannot be removed for
    this long after a put or a get. ``overwrites``: a second put of a name replaces the first."""

    def __init__(self, clock: Callable[[], float], lease_s: float = 0.0, overwrites: bool = False) -> None:
        self.clock = clock
        self.lease_s = lease_s
        self.overwrites = overwrites
        self.max_values = 1 << 20
        self.refuses_when_full = False
        """Whether a full store refuses puts instead of evicting."""
        self.is_reachable = True
        """If not, calls hang."""
        self.values: dict[str, StoreValue] = {}
        """The oldest first."""
        self.num_evicted = 0
        self.removed_by_others: list[str] = []
        """Good values that a client has removed which has not put them."""

    def put(self, name: str, data: ByteArray, original: ByteArray, writer: object, note: str = "") -> Outcome:
        if name in self.values and not self.overwrites:
            return Outcome.HELD
        if name not in self.values and len(self.values) >= self.max_values:
            if self.refuses_when_full:
                return Outcome.FULL
            self.evict(next(iter(self.values)))
        self.values[name] = StoreValue(data, original.tobytes(), writer, self.clock() + self.lease_s, note)
        return Outcome.OK

    def remove(self, name: str, state: ClientState) -> Outcome:
        """Removes a value for the server of ``state``, and notes if it was not its own."""
        value = self.values.get(name)
        if value is None:
            return Outcome.MISSING
        if self.clock() < value.leased_until:
            state.injected["lease"] += 1
            return Outcome.FAILED
        is_good = value.data.tobytes() == value.checksum
        if is_good and name not in state.put and name not in state.misread:
            self.removed_by_others.append(name)
        del self.values[name]
        return Outcome.OK

    def evict(self, name: str) -> None:
        del self.values[name]
        self.num_evicted += 1

    def clear(self) -> None:
        """The store was restarted, empty."""
        self.values.clear()


@dataclass
class ClientState:
    """What the clients of one server have in common, across restarts of its process."""

    server: object
    faults: Callable[[], StoreFaults]
    random: Random
    pause: Callable[[], None]
    """Called before each value: others run there, or the process is killed."""
    stall: Callable[[float], None]
    """Called to hang for so many seconds."""
    stall_s: float = 30.0
    call_s: Callable[[], float] = lambda: 0.0
    """How long a call takes, without faults."""
    injected: Counter[str] = field(default_factory=Counter)
    put: set[str] = field(default_factory=set)
    """Names that this server has put."""
    misread: set[str] = field(default_factory=set)
    """Names of good values that were read wrong."""


class FaultyCalls:
    """The calls of one process to ``store``, with the faults of ``state``."""

    def __init__(self, store: SimulatedStore, state: ClientState) -> None:
        self._store = store
        self._state = state

    def begin(self) -> None:
        """A call begins."""
        seconds = self._state.call_s()
        if seconds:
            self._state.stall(seconds)

    def one(self, act: Callable[[], Answer], failed: Answer) -> Answer:
        """Returns the answer for one value, or ``failed`` although the store has done what was asked."""
        state = self._state
        state.pause()
        if self.injects("stall"):
            state.stall(state.stall_s)
        while not self._store.is_reachable:
            state.injected["outage"] += 1
            state.stall(OUTAGE_RETRY_S)
        if self.injects("connection_lost"):
            raise StoreError("the connection to the simulated store is lost")
        if self.injects("crash"):
            raise _Crash
        answer = act()
        return failed if self.injects("failed") else answer

    def injects(self, fault: str) -> bool:
        """Returns whether this fault happens now."""
        state = self._state
        rate: float = getattr(state.faults(), fault)
        if rate == 0.0 or state.random.random() >= rate:
            return False
        state.injected[fault] += 1
        return True

    def read(self, name: str, value: StoreValue, buffers: Sequence[ByteArray], part: slice = slice(None)) -> bool:
        """Fills ``buffers`` with this part of ``value``. Returns False, with nothing filled, if it has another size."""
        store, state, rng = self._store, self._state, self._state.random
        value.leased_until = store.clock() + store.lease_s
        data, size = value.data, sum(buffer.size for buffer in buffers)
        if self.injects("wrong_value"):
            data = store.values[rng.choice(list(store.values))].data
        data = data[part]
        if self.injects("garbage"):
            data = np.frombuffer(rng.randbytes(size), np.uint8)
        if data.size != size:
            return False
        end = rng.randrange(size) if self.injects("truncated") else size
        is_right = end == size and data.tobytes() == value.checksum[part]
        if not is_right:
            state.misread.add(name)
        # The bytes come in two parts, between which others run or the process is killed.
        middle = rng.randrange(end + 1)
        _fill(buffers, data[:middle], 0)
        if self.injects("late_get"):
            state.stall(state.stall_s)
        state.pause()
        _fill(buffers, data[middle:end], middle)
        return True

    def write(self, name: str, buffers: Sequence[ByteArray], note: str = "") -> Outcome:
        """Puts a value."""
        if self.injects("full"):
            return Outcome.FULL
        data = np.concatenate([buffer.reshape(-1) for buffer in buffers])
        original = data
        # Another client may put the same name meanwhile.
        self._state.pause()
        if self.injects("rotten"):
            data = data.copy()
            data[self._state.random.randrange(data.size)] ^= 1 << self._state.random.randrange(8)
            self._state.misread.add(name)
        if self.injects("forgotten"):
            # The server cannot know that the value of this name is not its own.
            self._state.put.add(name)
            return Outcome.OK
        outcome = self._store.put(name, data, original, self._state.server, note)
        if outcome is Outcome.OK:
            self._state.put.add(name)
        return outcome


class SimulatedClient(StoreClient):
    """The client of one process."""

    def __init__(self, store: SimulatedStore, state: ClientState) -> None:
        self.store = store
        self.state = state
        self._calls = FaultyCalls(store, state)

    def exists(self, names: Sequence[str]) -> list[Outcome]:
        return self._each(names, self._exists)

    def get(self, names: Sequence[str], buffers: Sequence[Sequence[ByteArray]]) -> list[Outcome]:
        of = dict(zip(names, buffers, strict=True))
        return self._each(names, lambda name: self._get(name, of[name]))

    def put(self, names: Sequence[str], buffers: Sequence[Sequence[ByteArray]]) -> list[Outcome]:
        of = dict(zip(names, buffers, strict=True))
        return self._each(names, lambda name: self._calls.write(name, of[name]))

    def remove(self, names: Sequence[str]) -> list[Outcome]:
        return self._each(names, lambda name: self.store.remove(name, self.state))

    def _each(self, names: Sequence[str], act: Callable[[str], Outcome]) -> list[Outcome]:
        self._calls.begin()
        return [self._calls.one(partial(act, name), Outcome.FAILED) for name in names]

    def _exists(self, name: str) -> Outcome:
        is_there = name in self.store.values
        if self._calls.injects("says_it_lacks" if is_there else "says_it_has"):
            is_there = not is_there
        return Outcome.OK if is_there else Outcome.MISSING

    def _get(self, name: str, buffers: Sequence[ByteArray]) -> Outcome:
        value = self.store.values.get(name)
        if value is None:
            return Outcome.MISSING
        whole = sum(buffer.size for buffer in buffers)
        if not self._calls.read(name, value, first_bytes(buffers, value.data.size)):
            return Outcome.OTHER_SIZE
        return Outcome.OK if value.data.size >= whole else Outcome.OTHER_SIZE


def first_bytes(buffers: Sequence[ByteArray], nbytes: int) -> list[ByteArray]:
    """Returns the first ``nbytes`` of ``buffers``, or all."""
    parts = []
    for buffer in buffers:
        parts.append(buffer.reshape(-1)[:nbytes])
        nbytes -= parts[-1].size
    return parts


class _Crash(BaseException):
    """The client has ended its process."""


def _fill(buffers: Sequence[ByteArray], data: ByteArray, offset: int) -> None:
    """Puts ``data`` into the buffers, which follow each other, from byte ``offset`` on."""
    for buffer in buffers:
        flat = buffer.reshape(-1)
        part = data[: max(0, flat.size - offset)] if offset < flat.size else data[:0]
        flat[offset : offset + part.size] = part
        data, offset = data[part.size :], max(0, offset - flat.size)


class SimulatedStarter:
    """Starts simulated processes, whose threads run within ``tick`` and ``wait`` only.

    ``make_worker`` makes one worker per thread of a new process. A process needs ``start_s`` until it is ready, and
    goes on for up to ``death_s`` after it was killed. The interleaving depends on ``seed``.
    """

    process_class: type[SimulatedProcess]

    def __init__(
        self,
        make_worker: Callable[[], StoreWorker],
        clock: Callable[[], float],
        seed: int = 0,
        num_threads: int = 2,
        max_submitted: int = 1 << 16,
        start_s: float = 0.0,
        death_s: float = 0.0,
        chance: float = 0.6,
        is_store_reachable: Callable[[], bool] = lambda: True,
    ) -> None:
        self._make_worker = make_worker
        self.clock = clock
        self.random = Random(seed)
        self._num_threads = num_threads
        self.max_submitted = max_submitted
        self._start_s, self.death_s, self._chance = start_s, death_s, chance
        self.is_store_reachable = is_store_reachable
        self.process: SimulatedProcess | None = None
        """The process that was started last."""
        self.num_starts = 0

    def start(self) -> StoreProcess:
        self.num_starts += 1
        executors = [
            SteppedExecutor(self.random.randrange(1 << 30), num_threads, 1 << 20, self._chance, clock=self.clock)
            for num_threads in (1, self._num_threads)
        ]
        workers = [self._make_worker() for _ in range(1 + self._num_threads)]
        ready_at = self.clock() + self.random.uniform(0, self._start_s)
        self.process = self.process_class(self, executors, workers, ready_at)
        return self.process

    # For simulations.

    def processes(self) -> list[SimulatedProcess]:
        """Returns the processes that have not ended."""
        return [] if self.process is None or self.process.has_ended else [self.process]

    def end(self) -> None:
        for process in self.processes():
            process.end()

    def tick(self) -> None:
        """Lets the process go on for a while."""
        for process in self.processes():
            process.run(lambda executor: executor.tick())

    def drain(self) -> None:
        """Lets the process go on until it waits for time to pass."""
        for process in self.processes():
            process.run(lambda executor: executor.drain())

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Returns a context in which the process stands still."""
        with ExitStack() as held:
            for process in self.processes():
                for executor in process.executors:
                    held.enter_context(executor.hold())
            yield

    @property
    def is_idle(self) -> bool:
        """Whether no thread of a process can touch a host slot."""
        return all(process.num_open == 0 for process in self.processes())

    def pause(self) -> None:
        """May interrupt the job that calls it."""
        for process in self.processes():
            process.run(lambda executor: executor.pause())

    def stall(self, seconds: float) -> None:
        """Interrupts the job that calls it for so many seconds."""
        for process in self.processes():
            process.run(lambda executor: executor.stall(seconds))

    @property
    def in_process(self) -> bool:
        """Whether the caller is a thread of a process."""
        return any(executor.in_job for process in self.processes() for executor in process.executors)


class SimulatedProcess(StoreProcess):
    """A process with a thread for lookups and others for transfers."""

    is_ready = False

    def __init__(
        self,
        starter: SimulatedStarter,
        executors: Sequence[SteppedExecutor],
        workers: Sequence[StoreWorker],
        ready_at: float,
    ) -> None:
        self._starter = starter
        self.executors = executors
        self._ready_at = ready_at
        self.dies_at = float("inf")
        self.has_crashed = False
        self._stopped = ExitStack()
        """Holds its threads where they are when it has crashed."""
        self.responses: list[Response] = []
        self.num_open = 0
        """Requests that are not answered yet."""
        self._lookup_worker, *self._free = workers

    @property
    def has_ended(self) -> bool:
        if self.has_crashed or self._starter.clock() >= self.dies_at:
            self.end()
            return True
        return False

    def poll(self) -> list[Response]:
        is_reached = self._starter.clock() >= self._ready_at and self._starter.is_store_reachable()
        self.is_ready |= is_reached and self.dies_at == float("inf") and not self.has_crashed
        responses, self.responses = self.responses, []
        return [Response.unpack(response.pack()) for response in responses] if self.is_ready else []

    def wait(self, timeout_s: float) -> None:
        self._starter.tick()

    def kill(self) -> None:
        if self.dies_at == float("inf"):
            self.is_ready = False
            self.dies_at = self._starter.clock() + self._starter.random.uniform(0, self._starter.death_s)

    def close(self, timeout_s: float) -> bool:
        self.end()
        return True

    def submit(self, request: StoreRequest) -> bool:
        if self.num_open >= self._starter.max_submitted:
            return False
        request = StoreRequest.unpack(request.pack())
        self.num_open += 1
        lookups, transfers = self.executors
        if request.op is Op.LOOKUP:
            lookups.submit_read(lambda: self._answer(self._lookup_worker, request))
        elif request.op is Op.READ:
            transfers.submit_read(lambda: self._transfer(request))
        else:
            transfers.submit_write(lambda: self._transfer(request))
        return True

    def _transfer(self, request: StoreRequest) -> None:
        worker = self._free.pop()
        try:
            self._answer(worker, request)
        finally:
            self._free.append(worker)

    def _answer(self, worker: StoreWorker, request: StoreRequest) -> None:
        try:
            response = worker.run(request)
            # The list may have become another one meanwhile.
            self.responses.append(response)
        except _Crash:
            self.has_crashed = True
            for executor in self.executors:
                self._stopped.enter_context(executor.hold())
        self.num_open -= 1

    def run(self, action: Callable[[SteppedExecutor], None]) -> None:
        for executor in self.executors:
            if not self.has_crashed:
                action(executor)

    def end(self) -> None:
        """Ends all threads where they are."""
        for executor in self.executors:
            executor.kill()
        self.num_open = 0
        self.is_ready, self.dies_at = False, float("-inf")


SimulatedStarter.process_class = SimulatedProcess


def random_faults(rng: Random, kind: type[StoreFaults] = StoreFaults) -> StoreFaults:
    """Returns no faults, or some kinds of them, rare or frequent."""
    names = [each.name for each in dataclasses.fields(kind)]
    chosen = rng.sample(names, rng.choice((0, 1, 1, 2, 3)))
    return kind(**{name: rng.choice((0.01, 0.05, 0.3)) for name in chosen})

"""Deterministic simulation of several servers that share a medium, which fails as a seed chooses.

Each of 2 to 4 machines runs one server after the other: a model engine, the real connector and
TieredOffloadingManager, a tier on the shared medium and perhaps a disk tier of its own in front. All of them run in
simulated time and take turns on one thread, chosen by the seed, so a seed replays a whole run. Servers start, are
killed, reset, closed and started again while their medium misbehaves; some do not use the same weights. Afterwards the
medium works again. These laws must hold:

- every byte that a request attends to is its own (the model engine checks each);
- a host slot that a tier reads into or writes from belongs to that block until the tier has reported it;
- no request waits past its deadline, all of them end, and nothing waits for the medium on the scheduler's thread;
- a promised load begins, no pin is left, and the connector is never switched off;
- nothing is written behind a block that no server has ever written;
- on a medium that never fails, no block is found bad;
- a reset deletes nothing that another server has stored;
- when the medium does not answer, most requests do not wait for it;
- when it works again, servers find each other's blocks again without a restart.

``SharedMedium`` and ``Connection`` are what a kind of medium must implement; docs of their methods say when they are
called. The report counts the blocks that one server has read and another has written.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, TypeAlias

from kvoffload.abc import ByteArray, IntegrityError, KVGroup, OffloadKey, Tier
from kvoffload.connector.options import PARAM
from tests.clock import Clock
from tests.sim.engine import EngineRequest, Leak, Scenario
from tests.sim.executor import Killed, SteppedExecutor
from tests.sim.life import WEIGHTS_APART, FalseAlarm, Life, LivingServer, Patch, disk_bytes
from tests.sim.scenario import make_requests
from tests.sim.shared_storage import SimulatedStorage
from tests.sim.simulation import choose_full_steps, small_scenario
from tests.sim.watch import TierWatch

CLOCK_SKEW_S = 0.004
"""How far the clock of one server may be ahead of another's while both have work."""
LONG_S = 0.01
"""An idle server ends all jobs within this time, as far as they do not wait for time to pass."""
CALL_S = 0.02
"""How long a call of the slowest medium takes that works. The threads of an idle server make one after the other."""
MAX_CALLS = 50
"""More of them in a row are not simulated one by one: what is under way hangs."""
IDLE_STEP_S = 0.02
"""How long an engine without requests waits from step to step."""
JUMPS_S = (0.1, 6.0, 25.0)
"""How long all processes stand still."""
MAX_SETTLING_S = 3600.0
"""Transfers under way when all requests have ended end within this time: chains that compete for a tiny tier are
written several times, and each write may stall."""
MAX_QUICK_STEPS = 1000
"""Small steps while transfers end."""
MAX_TURNS = 200_000
"""A simulation that takes more turns has hung."""
QUIET_S = 90.0
"""After faults have ended, nothing is asked for this long: every pause of a circuit breaker ends."""
PROPAGATION_S = 10.0
"""Within this time, servers see what others have written."""
MAX_ROUNDS = 8
"""How often requests are tried, with pauses between them, until blocks are found again."""
ROUND_REQUESTS = 3
"""Requests per round and server."""
OUTAGE_REQUESTS = 48
"""Requests of one server while the medium does not answer."""
MAX_OUTAGE_WAITS = 28
"""At most this many of them may wait for it: those before the circuit breaker opens, and its tests."""
OUTAGE_GAP_S = 0.2
"""Seconds between two of them."""


class NotFound(AssertionError):
    """The medium works again, but no server finds what another one has stored."""


class DeletedOthers(AssertionError):
    """A server has deleted what another one has stored."""


class Costly(AssertionError):
    """Requests wait again and again for a medium that does not answer."""


@dataclass(frozen=True, kw_only=True)
class ServerLife(Life):
    """One server from its start to its end. It ends by close, kill, or stay: it goes on until the end of the
    simulation."""

    pause_s: float
    """How long its machine runs nothing before it."""
    disk_blocks: int
    """Room on a disk of its own, which is not shared and never fails; 0: none."""

    @property
    def must_find(self) -> bool:
        """Whether its settings leave time and room to find the blocks of others."""
        s = self.scenario
        return (
            s.load_deadline_ms >= 30.0
            and self.lookup_deadline_ms >= 30.0
            and s.store_threshold is None
            and s.num_host_blocks >= 24 * sum(s.parts.counts)
            and s.document_tokens >= 2 * _unit_tokens(s)
            and (not s.groups or any(group.is_full for group in s.groups))
            and not s.drops_last_state
            and self.max_queued >= 64
            and not (s.abort_chance or s.reset_chance or s.update_chance or s.copy_failure_rate or s.sleep_chance)
            and not self.load_only_if_faster
        )


@dataclass(frozen=True)
class ServersPlan:
    """A whole simulation: the lives of the server of each machine, and what happens to the medium."""

    seed: int
    is_calm: bool
    """Whether the medium never fails."""
    machines: tuple[tuple[ServerLife, ...], ...]
    has_outage: bool
    """Whether the medium answers nothing for a while, before it works again."""
    jump_rate: float
    """How often, per turn, all processes stand still for seconds, and miss their deadlines."""


def plan_servers(seed: int) -> ServersPlan:
    """Returns the plan of the simulation of ``seed``."""
    rng = Random(f"servers {seed}")
    base = small_scenario(rng)
    while base.document_tokens < 2 * _unit_tokens(base) and rng.random() < 0.9:
        # Servers share whole blocks only.
        base = small_scenario(rng)
    base = base.with_heads(Random(f"heads {seed}"))
    is_calm = rng.random() < 0.3
    slow = rng.random() < 0.3
    machines = []
    for machine in range(rng.choice((2, 2, 3, 4))):
        lives, weights = [], int(rng.random() < 0.05)
        num_lives = rng.choice((1, 1, 2, 3))
        for number in range(num_lives):
            weights = 1 - weights if rng.random() < 0.05 else weights
            is_last = number == num_lives - 1
            life_seed = seed * 100 + machine * 10 + number
            lives.append(_life(rng, base, life_seed, slow, weights, is_last))
        machines.append(tuple(lives))
    jump_rate = 0.0 if is_calm else rng.choice((0.0, 0.0, 0.005, 0.02))
    return ServersPlan(seed, is_calm, tuple(machines), rng.random() < 0.2, jump_rate)


def _unit_tokens(scenario: Scenario) -> int:
    """Returns the tokens after which blocks of all groups end."""
    groups = scenario.groups or (KVGroup(scenario.block_size, scenario.block_size_factor),)
    return math.lcm(*(group.block_tokens for group in groups))


def _life(rng: Random, base: Scenario, seed: int, slow: bool, weights: int, is_last: bool) -> ServerLife:
    is_plain = rng.random() < 0.75
    """Whether nothing keeps it from finding blocks."""
    scenario = dataclasses.replace(
        base,
        seed=seed,
        num_requests=rng.randint(4, 12),
        num_documents=base.num_documents + 1,
        update_chance=0.0 if is_plain else rng.choice((0.0, 0.0, 0.04)),
        reset_chance=0.0 if is_plain else rng.choice((0.0, 0.03)),
        abort_chance=0.0 if is_plain else base.abort_chance,
        copy_failure_rate=0.0 if is_plain else base.copy_failure_rate,
        keeps_device_cache=rng.random() < 0.5,
        store_threshold=None if is_plain else rng.choice((None, None, 2)),
        num_host_blocks=rng.choice((24, 48)) * sum(base.parts.counts) if is_plain else base.num_host_blocks,
        load_deadline_ms=rng.choice((3.0, 10.0, 30.0)) if slow and not is_plain else rng.choice((30.0, 200.0)),
    ).with_parallelism(Random(f"parallelism {seed}"))
    ends_in_the_middle = rng.random() < 0.6
    return ServerLife(
        scenario=scenario,
        weights=weights,
        pause_s=rng.choice((0.0, 0.02, 0.05, 0.3, 1.0, 40.0)),
        end=rng.choice(("stay", "stay", "stay", "stay", "close", "kill") if is_last else ("close", "kill", "kill")),
        end_at=rng.randint(5, 80) if ends_in_the_middle else None,
        disk_blocks=rng.choice((0, 0, 6, 40)),
        lookup_deadline_ms=rng.choice((30.0, 100.0)) if is_plain else rng.choice((0.0, 5.0, 100.0)),
        load_only_if_faster=not is_plain and rng.random() < 0.2,
        num_threads=rng.choice((1, 3, 4)),
        max_queued=4096 if is_plain else rng.choice((2, 8, 4096)),
        write_share=rng.choice((0.125, 0.5, 0.9)),
        full_steps=range(0) if is_plain else choose_full_steps(seed),
    )


class Connection(ABC):
    """One server's tier on a shared medium."""

    @abstractmethod
    def open(self, pools: Sequence[ByteArray]) -> Tier | None:
        """Returns the tier. Called once. May raise Killed; None: the server starts without the tier."""

    def tick(self) -> None:
        """Lets some time pass for threads of the tier that ``server.executor`` does not run. Called several times per
        step, and while the server is idle."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing that uses a host slot is in progress, apart from what ``server.executor`` runs."""
        return True

    def drain(self) -> None:
        """Lets threads go on until they wait for time to pass."""

    def closed(self) -> None:
        """The server was shut down in order. Raises Leak if the tier still holds something."""

    def die(self) -> None:
        """The process is gone, in order or not; ``server.executor`` was killed. Called at every end."""

    def counts(self) -> Counter[str]:
        """Returns counts for the report. Called once, at the end."""
        return Counter()


class SharedMedium(ABC):
    """What the servers of a simulation share, with its faults, which its seed chooses.

    ``now`` is the time: that of the server whose clock is the latest. ``injected`` counts faults by name. A fault ends
    with OSErrors, wrong bytes or whatever the medium's interface allows, on threads of the server: a connection calls
    ``server.pause()`` before it uses the medium, and ``server.executor.stall(seconds)`` to hang.
    """

    kind: ClassVar[str]
    keeps_enough = True
    """Whether there is room for what servers store until others ask for it."""
    handover_s = 0.3
    """How long a request waits for blocks that another server is writing, at most."""

    def __init__(self) -> None:
        self.now = 0.0
        self.injected: Counter[str] = Counter()

    @abstractmethod
    def connect(self, server: SharingServer) -> Connection:
        """Returns the connection of a server that starts."""

    def tick(self) -> None:
        """Some time has passed. Called once per turn of a server, and while all are idle."""

    @abstractmethod
    def end_faults(self) -> None:
        """The medium works from now on, and has room for everything."""

    def begin_outage(self) -> bool:
        """From now on the medium answers nothing, until ``end_faults``. Returns False if it cannot do that."""
        return False

    def check(self) -> None:
        """Raises the error of a law that is broken. Called often."""

    def afterwards(self, servers: Servers) -> None:
        """Raises the error of a law that is broken when the medium has worked for a while. Called before the last
        servers end; may let time pass."""

    def counts(self) -> Counter[str]:
        """Returns counts for the report."""
        return Counter()


class SharingServer(LivingServer):
    """One server, from its start to its end.

    For connections: ``number`` of its machine, ``clock``, ``fingerprint``, ``executor`` for the tier's jobs, ``pause``,
    and ``life``.
    """

    life: ServerLife
    steps_per_check = 32

    def __init__(
        self,
        number: int,
        life: ServerLife,
        medium: SharedMedium,
        disk: SimulatedStorage,
        clock: Clock,
        new_versions: Iterator[int],
        given: set[OffloadKey],
    ) -> None:
        super().__init__(life, clock, new_versions)
        self.medium = medium
        self.number = number
        self.executor, self.disk_executor = (self._make_executor(name) for name in ("shared", "disk"))
        self.connection = medium.connect(self)
        self.tier: Tier | None = None
        """The tier on the shared medium."""
        self.waited: set[str] = set()
        """Requests that the connector has let wait."""
        self._disk = disk.restart(self.pause)
        self._given = given

    def _make_executor(self, name: str) -> SteppedExecutor:
        rng = Random(f"{name} {self.life.scenario.seed}")
        chance = rng.choice((0.3, 0.6, 0.9))
        return self.make_executor(rng.randrange(1 << 30), chance)

    def start(self, patch: Callable[[Any], None] | None = None) -> None:
        super().start()
        scheduler, ask = self.engine.scheduler, self.engine.scheduler.get_num_new_matched_tokens

        def watched(request: EngineRequest, computed: int) -> tuple[int | None, bool]:
            answer = ask(request, computed)
            self.note_answer(request, computed, answer[0])
            return answer

        scheduler.get_num_new_matched_tokens = watched  # type: ignore[method-assign, assignment]
        if patch is not None:
            patch(self)

    def note_answer(self, request: EngineRequest, computed: int, num_tokens: int | None) -> None:
        """Called with each answer of the connector: tokens that can be loaded, or None if the request waits."""
        if num_tokens is None:
            self.waited.add(request.request_id)

    def make(self, pools: Sequence[ByteArray]) -> Sequence[Tier]:
        tiers: list[Tier] = []
        if self.life.disk_blocks:
            tiers.append(self._open_disk(pools))
            self.watches.append(TierWatch(tiers[0]))
        self.tier = self.connection.open(pools)
        if self.tier is not None:
            tiers.append(self.tier)
            self.watches.append(TierWatch(self.tier, self._given))
        return tiers

    def _open_disk(self, pools: Sequence[ByteArray]) -> Tier:
        num_blocks = self.life.disk_blocks
        self._disk.capacity_bytes = max(self._disk.used_bytes, disk_bytes(pools, num_blocks, num_blocks)) + (64 << 10)
        return self.open_disk(self._disk, pools, num_blocks, num_blocks, self.disk_executor)

    @property
    def shared_watch(self) -> TierWatch | None:
        return self.watches[-1] if self.tier is not None else None

    @property
    def must_find(self) -> bool:
        """Whether it must find what others have stored, once the medium works."""
        watch = self.shared_watch
        return self.life.must_find and watch is not None and not watch.was_reset and self._has_room(watch.tier)

    def _has_room(self, tier: Tier) -> bool:
        """Whether the tier can keep all blocks of one round of requests."""
        s = self.life.scenario
        tokens = s.document_tokens + s.max_question_tokens + s.max_new_tokens
        groups = self.engine.scheduler.layout.groups
        num_blocks = ROUND_REQUESTS * sum(-(-tokens // group.block_tokens) for group in groups)
        capacity_bytes = tier.stats().capacity_bytes
        return capacity_bytes is None or capacity_bytes >= num_blocks * tier.block_bytes

    def turn(self) -> None:
        """Runs one step of the engine."""
        with self.serving():
            self.engine.turn()
            if not self.engine.has_requests:
                # Steps only for writes: an idle engine takes its time.
                self.clock.now += self.idle_step_s()

    def idle_step_s(self) -> float:
        """Returns how long a step without requests takes."""
        return IDLE_STEP_S

    def finish(self) -> None:
        """Ends all transfers, when there is no work left. Raises Leak if something is still held."""
        self.engine.finish()

    def tick_threads(self) -> None:
        super().tick_threads()
        self.connection.tick()

    @property
    def is_idle(self) -> bool:
        """Whether no thread of the tiers has begun or will begin a transfer."""
        return self.connection.is_idle and all(executor.idle for executor in self.executors)

    def drain_threads(self) -> None:
        """Lets threads of the tiers go on until they wait for time to pass."""
        for executor in self.executors:
            executor.drain()
        self.connection.drain()

    def settle(self) -> None:
        """Ends what the tiers have begun, within MAX_SETTLING_S."""
        tiered = self.engine.tiered
        assert tiered is not None
        was_serving, self.is_serving = self.is_serving, False
        until = self.clock.now + MAX_SETTLING_S
        for i in itertools.count():
            self.drain_threads()
            tiered.poll()
            if not tiered.has_transfers and self.connection.is_idle:
                break
            if self.clock.now >= until:
                raise Leak("transfers of the tier do not end")
            # At first in small steps: a small tier may be given many blocks one after the other.
            self.clock.now += 0.005 if i < MAX_QUICK_STEPS else 0.5
            if i >= MAX_QUICK_STEPS:
                # What waits for the end of an outage would wait for ever.
                self.medium.now = max(self.medium.now, self.clock.now)
                self.medium.tick()
        self.is_serving = was_serving

    def close(self) -> None:
        """Shuts down in order."""
        self.engine.scheduler.shutdown()
        self.connection.closed()

    def die(self) -> None:
        super().die()
        self._disk.kill()
        self.connection.die()


MakeMedium: TypeAlias = Callable[[int, bool], SharedMedium]
"""Makes a medium from a seed; the second argument says whether it never fails."""


class Machine:
    """Runs the lives of a server, one after the other."""

    def __init__(self, number: int, lives: Sequence[ServerLife], now: float) -> None:
        self.number = number
        self.lives = deque(lives)
        self.clock = Clock(now + (lives[0].pause_s if lives else 0.0))
        self.server: SharingServer | None = None
        self.disk = SimulatedStorage(0, number)
        self.num_lives = 0
        self.num_expected = 0
        """Requests that are on their way to it."""

    @property
    def has_turn(self) -> bool:
        """Whether there is something to do for it: a start, a step, or an end."""
        if self.server is None:
            return bool(self.lives)
        return self.server.engine.has_work or (self.server.life.end != "stay" and not self.num_expected)


class Servers:
    """The simulation of one plan. ``patch`` is called with each server that has started, and may plant a bug."""

    server_class: ClassVar[type[SharingServer]] = SharingServer

    def __init__(self, plan: ServersPlan, medium: SharedMedium, patch: Patch[SharingServer] | None = None) -> None:
        self.plan = plan
        self.medium = medium
        self.counts: Counter[str] = Counter()
        self.machines = [Machine(n, lives, 1000.0) for n, lives in enumerate(plan.machines)]
        self._patch = patch
        self._random = Random(f"turns {plan.seed}")
        self._given: dict[str, set[OffloadKey]] = {}
        """By fingerprint, the blocks that some server was given to write."""
        self._num_asked = 0
        medium.now = 1000.0

    def run(self) -> None:
        """Runs everything. Raises the error of a law that is broken."""
        try:
            self._run_all(is_storm=True)
            if self.plan.has_outage:
                self._lose_the_medium()
            self.medium.end_faults()
            self.pass_time(QUIET_S)
            self._find_again()
            self.medium.afterwards(self)
            for machine in self.machines:
                if machine.server is not None:
                    machine.server.finish()
                    machine.server.close()
                    self.medium.check()
        finally:
            for machine in self.machines:
                self._end(machine)
            self.counts += self.medium.counts()
            self.counts += Counter({f"faults: {name}": n for name, n in self.medium.injected.items()})

    # Time.

    def _run_all(self, is_storm: bool = False) -> None:
        """Runs until no server has anything to do."""
        for _ in range(MAX_TURNS):
            due = self.deliver()
            ready = [machine for machine in self.machines if machine.has_turn]
            if not ready and due == math.inf:
                return
            if not ready:
                for machine in self.machines:
                    self._idle(machine, max(machine.clock.now, due))
                continue
            earliest = min(machine.clock.now for machine in ready)
            machine = self._random.choice([m for m in ready if m.clock.now <= earliest + CLOCK_SKEW_S])
            for other in self.machines:
                if other.server is not None and not other.has_turn and other.clock.now < earliest:
                    self._idle(other, earliest)
            self._run_guarded(machine, lambda machine=machine: self._turn(machine))  # type: ignore[misc]
            if is_storm and self._random.random() < self.plan.jump_rate:
                seconds = self._random.choice(JUMPS_S)
                for each in self.machines:
                    each.clock.now += seconds
            self.medium.now = max(self.medium.now, machine.clock.now)
            self.medium.tick()
            self.medium.check()
        raise Leak(f"after {MAX_TURNS} turns, servers still have work")

    def deliver(self) -> float:
        """Gives servers the requests that are due by their clocks. Returns when the next one is due."""
        return math.inf

    def pass_time(self, seconds: float) -> None:
        """Lets time pass in which no request comes. Threads of the tiers go on."""
        end = max(machine.clock.now for machine in self.machines) + seconds
        now = end - seconds
        while now < end:
            now = min(end, now + seconds * self._random.uniform(0.02, 0.2))
            for machine in self.machines:
                for _ in range(MAX_CALLS):
                    if machine.server is None or machine.server.is_idle or machine.clock.now + CALL_S >= now:
                        break
                    self._idle(machine, machine.clock.now + CALL_S)
                if machine.clock.now < now:
                    self._idle(machine, now)
            self.medium.now = max(self.medium.now, now)
            self.medium.tick()
            self.medium.check()
            self._run_all()

    def _idle(self, machine: Machine, now: float) -> None:
        """Lets time pass on a machine whose server has nothing to do. In a long time its threads end what they can."""
        server, seconds, machine.clock.now = machine.server, now - machine.clock.now, now
        if server is not None:
            self._run_guarded(machine, server.drain_threads if seconds > LONG_S else server.tick_threads)

    def _run_guarded(self, machine: Machine, action: Callable[[], None]) -> None:
        """Runs ``action`` of the machine's server, which may be killed meanwhile."""
        try:
            action()
        except Killed:
            self.counts["servers killed in an operation"] += 1
            self._end(machine)

    # Lives.

    def _turn(self, machine: Machine) -> None:
        if machine.server is None:
            self._start(machine, machine.lives.popleft())
            return
        server, life = machine.server, machine.server.life
        if server.engine.has_work:
            server.turn()
        is_over = not (server.engine.has_work or machine.num_expected)
        if life.end != "stay" and (server.engine.steps == life.end_at or is_over):
            if life.end == "close":
                if not server.engine.has_work:
                    server.finish()
                server.close()
            self._end(machine)

    def _start(self, machine: Machine, life: ServerLife) -> SharingServer:
        first = life.weights * WEIGHTS_APART + 1 + machine.number * 100_000 + machine.num_lives * 10_000
        given = self._given.setdefault(life.fingerprint, set())
        machine.num_lives += 1
        server = self.server_class(
            machine.number, life, self.medium, machine.disk, machine.clock, itertools.count(first), given
        )
        machine.server = server
        server.start(self._patch)
        self.counts["servers"] += 1
        return server

    def _end(self, machine: Machine) -> None:
        """The process of the machine's server is gone."""
        server, machine.server = machine.server, None
        if server is None:
            return
        server.die()
        self.counts[f"servers that end by {server.life.end}"] += 1
        self.counts += server.connection.counts()
        watch = server.shared_watch
        if watch is not None:
            self.counts += Counter({f"shared {name}": n for name, n in watch.counts.items()})
            self.counts["servers that were reset"] += watch.was_reset
            self.counts["servers that read blocks of others"] += watch.counts["reads of others"] > 0
        if machine.lives:
            machine.clock.now += machine.lives[0].pause_s
        if watch is not None and self.plan.is_calm and watch.counts["reads: corrupt"]:
            raise FalseAlarm("a block was found bad on a medium that never failed")

    # Afterwards.

    def _ask(self, server: SharingServer, documents_seed: int, num_requests: int, store: bool = True) -> None:
        """Gives the server requests about documents that the seed chooses."""
        scenario = dataclasses.replace(
            server.life.scenario,
            num_requests=num_requests,
            documents_seed=documents_seed,
            num_documents=1,
            options_rate=0.0,
        )
        if any(group.state for group in scenario.groups):
            # Only requests with the same prompt are sure to have a state at the same position, and there is none below
            # the last token of a prompt that ends with a block.
            tokens = scenario.document_tokens + (scenario.document_tokens % _unit_tokens(scenario) == 0)
            scenario = dataclasses.replace(scenario, max_question_tokens=0, document_tokens=tokens)
        requests = make_requests(scenario, self._random, server.engine.cache.hash_block_size)
        for request in requests:
            self._num_asked += 1
            request.request_id = f"later-{self._num_asked}"
            if not store:
                request.kv_transfer_params = {PARAM: {"store": False}}
        server.engine.ask(requests)

    def _lose_the_medium(self) -> None:
        """Asks a server again and again while the medium does not answer. Raises Costly if too many requests wait."""
        servers = [machine.server for machine in self.machines if machine.server is not None]
        servers = [server for server in servers if server.must_find]
        if not servers or not self.medium.begin_outage():
            return
        server = self._random.choice(servers)
        waited = len(server.waited)
        for i in range(OUTAGE_REQUESTS):
            self._ask(server, -1 - i, 1)
            self._run_all()
            self.pass_time(OUTAGE_GAP_S)
        waited = len(server.waited) - waited
        self.counts["outages"] += 1
        self.counts["requests that wait in outages"] += waited
        if waited > MAX_OUTAGE_WAITS:
            raise Costly(f"{waited} of {OUTAGE_REQUESTS} requests have waited for a medium that does not answer")

    def _find_again(self) -> None:
        """Lets one server store blocks that another one must find. Raises NotFound."""
        pairs = self.pairs()
        if not pairs or not self.medium.keeps_enough:
            return
        writer, reader = self._random.choice(pairs)
        watch = reader.shared_watch
        assert watch is not None
        before = watch.counts["reads of others"]
        # The first time, a reader without a cache of its own misses, and must not remember that for long.
        asks_before = not reader.life.scenario.prefix_caching
        for i in range(MAX_ROUNDS):
            for server in (reader, writer, reader) if asks_before else (writer, reader):
                self._ask(server, 1_000_000 + i, ROUND_REQUESTS, store=server is writer)
                self._run_all()
                self.pass_time(PROPAGATION_S)
            if not (writer.must_find and reader.must_find):
                self.counts["rounds cut short by a reset"] += 1
                return
            if watch.counts["reads of others"] > before:
                self.counts["blocks found again"] += 1
                self.counts["rounds until they were found"] += i + 1
                if writer.life.scenario.heads != reader.life.scenario.heads:
                    self.counts["blocks found again by other ranks"] += 1
                return
            self.pass_time(QUIET_S)
        raise NotFound(f"server {reader.number} finds nothing that server {writer.number} stores")

    def pairs(self) -> list[tuple[SharingServer, SharingServer]]:
        """Returns every two servers that must find each other's blocks."""
        servers = [machine.server for machine in self.machines if machine.server is not None]
        able = [server for server in servers if server.must_find]
        return [
            (one, other)
            for one, other in itertools.permutations(able, 2)
            if one.fingerprint == other.fingerprint and one.engine.version == other.engine.version
        ]


def simulate_servers(make_medium: MakeMedium, seed: int, patch: Patch[SharingServer] | None = None) -> Counter[str]:
    """Runs the simulation of ``seed`` on a medium of one kind, and returns counts of what happened in it. Raises the
    error of a law that is broken."""
    plan = plan_servers(seed)
    servers = Servers(plan, make_medium(seed, plan.is_calm), patch)
    try:
        servers.run()
    except (AssertionError, IntegrityError) as error:
        raise type(error)(f"simulation {seed} of servers: {error}") from error
    return servers.counts + Counter({"simulations": 1, "calm simulations": int(plan.is_calm)})

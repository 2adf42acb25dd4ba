"""Deterministic simulation of servers that hand requests over to each other: some compute prompts, others go on.

The servers, their medium and the laws are those of ``servers``. On top of them there is a router, as clients have one:
it sends a prompt to a server that computes it, and what that answers to one that goes on. Servers are killed and start
again meanwhile; requests come late, twice, in another order, without an answer, with that of another request, or with
nonsense. When the medium works again these laws must hold, too:

- a request that is handed over finds all of what its answer names, and waits for that a short time only;
- one with the answer of another request, or of a server with other weights or another layout, does not wait for it;
- when nothing comes of what is handed over, all but a few requests wait a tenth of the load deadline;
- when blocks come again, requests wait for them again.

``Router`` counts requests by what they have found of what their answer names.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import itertools
import json
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from kvoffload.abc import IntegrityError
from kvoffload.cache.keys import namespace
from kvoffload.cache.tenants import TenantConfig, Tenants
from kvoffload.connector.handover import (
    IMPATIENT_SHARE,
    MISSES_IN_A_ROW,
    PATIENT_AGAIN,
    SERVER_CHARS,
    Handover,
    is_handover,
    name_of,
)
from kvoffload.connector.layout import KeyLayout
from kvoffload.connector.options import PARAM
from kvoffload.tiering.unwritten import UNWRITTEN_SHARE, WRITE_WITHIN_S
from tests.sim.content import EngineRequest
from tests.sim.life import Patch
from tests.sim.servers import (
    PROPAGATION_S,
    Machine,
    MakeMedium,
    ServerLife,
    Servers,
    ServersPlan,
    SharedMedium,
    SharingServer,
    plan_servers,
)
from tests.sim.shared_folder import SharedFolderMedium

TENANTS = ("search", "chat")
CALM_DEADLINE_MS = 1000.0
"""Servers with a shorter load deadline need not find everything."""
QUICK_STEP_S = 0.002
"""How long a step without requests takes. Others may wait for what it writes."""
MAX_QUICK_STEPS = 200
"""At first; later an idle server takes its time."""
CALM_ROUNDS = 3
FLOOD_REQUESTS = 6
QUICK_HANDOVER_S = 0.5
"""Of media which are that quick, blocks that are handed over come in time although others are written, too."""
HINTS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"drop": True},
    {"session": "agent", "drop": True},
    {"expect_return_s": 1e6},
    {"retain_s": 9.0},
)
"""What clients say of prompts that are handed over."""
LOST_REQUESTS = 12
"""Requests for which nothing comes, one after the other."""


ROLES = ("pd", "pd", "bb", "ppd", "pdd", "bbb", "pbd", "ppdd", "pppd", "pddd", "pbbd")
"""Of all machines."""


class Incomplete(AssertionError):
    """A request has not found all that was handed over to it, although the medium works."""


class Wasted(AssertionError):
    """Requests have waited for blocks of which the server could know that they do not come."""


class Slow(AssertionError):
    """A request has waited long for what was handed over to it, although the medium works."""


class Garbled(AssertionError):
    """An answer is none that a client could send on."""


class Role(enum.Enum):
    PREFILL = "p"
    DECODE = "d"
    BOTH = "b"


class Fate(enum.StrEnum):
    """What becomes of an answer on its way."""

    KEPT = "as answered"
    LATE = "late"
    TWICE = "twice"
    LOST = "without its answer"
    STALE = "with another request's answer"
    OTHER_TOKENS = "with other tokens"
    FORGED = "forged"


@dataclass(frozen=True, kw_only=True)
class HandoverLife(ServerLife):
    """``has_other_ranks``: this server has other ranks than the others, so its blocks have another layout. With the
    canonical layout every server has ranks of its own, and this one another model."""

    has_other_ranks: bool
    has_tenants: bool

    @property
    def fingerprint(self) -> str:
        weights, s = super().fingerprint, self.scenario
        if s.heads is not None:
            layout = f"{weights} {s.num_layers} {s.heads.number} {s.heads.pieces}"
        elif self.has_other_ranks:
            layout = f"{weights} {s.num_ranks}"
        else:
            return weights
        return hashlib.sha256(layout.encode()).hexdigest()


@dataclass(frozen=True)
class HandoversPlan:
    servers: ServersPlan
    roles: tuple[Role, ...]
    """By machine."""


def plan_handovers(seed: int) -> HandoversPlan:
    """Returns the plan of the simulation of ``seed``."""
    plan, rng = plan_servers(seed), Random(f"handovers {seed}")
    has_tenants, is_settled = rng.random() < 0.3, rng.random() < 0.7
    machines = []
    for lives in plan.machines:
        other_ranks = rng.random() < 0.1
        deadline_ms = CALM_DEADLINE_MS if is_settled else rng.choice((3.0, 200.0))
        own = [_life(rng, life, deadline_ms, other_ranks, has_tenants) for life in lives]
        if is_settled:
            # Each of several lookups in a row may take 20 ms.
            own[-1] = dataclasses.replace(own[-1], end="stay", lookup_deadline_ms=100.0)
        machines.append(tuple(own))
    roles = rng.choice([text for text in ROLES if len(text) == len(machines)])
    return HandoversPlan(dataclasses.replace(plan, machines=tuple(machines)), tuple(map(Role, roles)))


def _life(rng: Random, life: ServerLife, deadline_ms: float, other_ranks: bool, has_tenants: bool) -> HandoverLife:
    s = dataclasses.replace(life.scenario, num_requests=rng.randint(0, 4), load_deadline_ms=deadline_ms)
    if other_ranks and s.heads is not None:
        other = dataclasses.replace(s.heads, number=s.heads.number % 4 + 1, pieces=3 - s.heads.pieces)
        s = dataclasses.replace(s, heads=other).with_parallelism(Random(f"other heads {s.seed}"))
    elif other_ranks:
        s = dataclasses.replace(s, num_ranks=s.num_ranks % 3 + 1, tensor_parallel=True)
    if life.scenario.num_host_blocks >= 24:
        s = dataclasses.replace(s, num_host_blocks=s.num_host_blocks * rng.choice((1, 2, 4)))
    fields = {each.name: getattr(life, each.name) for each in dataclasses.fields(life)} | {"scenario": s}
    return HandoverLife(**fields, has_other_ranks=other_ranks, has_tenants=has_tenants)


@dataclass(eq=False)
class Trip:
    """A request that was handed over to a server, until that has given it device blocks."""

    fate: Fate
    handover: Handover | None
    asked_at: float = math.nan
    """When the server has looked it up for the first time."""
    answered_at: float = math.nan
    """When its last lookup has ended."""
    found: int = 0
    is_over: bool = False

    @property
    def waited_s(self) -> float:
        return self.answered_at - self.asked_at

    def result(self, num_tokens: int) -> str:
        assert self.handover is not None
        if self.found >= min(self.handover.tokens, num_tokens - 1):
            return "complete"
        return "partial" if self.found else "none"


class HandoverServer(SharingServer):
    """``trips``: by request, what was handed over to it."""

    life: HandoverLife

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if self.life.has_tenants:
            self.tenants = Tenants(namespace(self.fingerprint), tuple(map(TenantConfig, TENANTS)))
        else:
            self.tenants = Tenants(namespace(self.fingerprint))
        self.trips: dict[str, Trip] = {}
        self._num_idle = 0
        """Steps since its last request ended."""
        self.on_arrival: Callable[[Trip, EngineRequest], None] = lambda trip, request: None

    def start(self, patch: Callable[[Any], None] | None = None) -> None:
        super().start(patch)
        scheduler = self.engine.scheduler
        allocated = scheduler.update_state_after_alloc

        def watched(request: EngineRequest, blocks: Any, num_external_tokens: int) -> None:
            allocated(request, blocks, num_external_tokens)
            trip = self.trips.get(request.request_id)
            if trip is not None and not trip.is_over:
                trip.is_over = True
                self.on_arrival(trip, request)

        scheduler.update_state_after_alloc = watched  # type: ignore[method-assign, assignment]

    def turn(self) -> None:
        self._num_idle = 0 if self.engine.has_requests else self._num_idle + 1
        super().turn()

    def finish(self) -> None:
        """As ``SharingServer.finish``. What was promised to a tier that does not take it is given up first."""
        assert self.engine.tiered is not None
        self.settle()
        self.clock.now += WRITE_WITHIN_S
        self.engine.tiered.poll()
        super().finish()

    def idle_step_s(self) -> float:
        return QUICK_STEP_S if self._num_idle < MAX_QUICK_STEPS else super().idle_step_s()

    def note_answer(self, request: EngineRequest, computed: int, num_tokens: int | None) -> None:
        super().note_answer(request, computed, num_tokens)
        trip = self.trips.get(request.request_id)
        if trip is None or trip.is_over:
            return
        if math.isnan(trip.asked_at):
            trip.asked_at = self.clock.now
        if num_tokens is not None:
            trip.answered_at, trip.found = self.clock.now, computed + num_tokens


@dataclass(frozen=True)
class Message:
    """A request on its way to a machine."""

    due: float
    machine: Machine
    tokens: Sequence[int]
    new_tokens: int
    params: Mapping[str, Any] | None
    tenant: str | None
    trip: Trip | None = None
    """None: it asks for a prompt."""
    goes_to: Machine | None = None
    """The machine that goes on with a prompt. None: any."""
    instead: Handover | None = None
    """What that one is told in place of the answer."""


class Router:
    """Sends requests to servers and answers on to others, as ``roles`` by machine say."""

    def __init__(self, seed: int, is_calm: bool, machines: Sequence[Machine], roles: Sequence[Role]) -> None:
        self.is_calm = is_calm
        """Whether it does nothing wrong."""
        self.counts: Counter[str] = Counter()
        self.last_answer: Handover | None = None
        self.sent: deque[Trip] = deque(maxlen=8)
        """The latest requests that were handed over."""
        self._random = Random(f"router {seed}")
        self._roles = dict(zip(machines, roles, strict=True))
        self._under_way: list[Message] = []
        self._numbers = itertools.count()
        self._prompts: dict[str, Message] = {}
        """The requests for prompts that a server has, by name."""
        self._documents: list[list[int]] = []

    def greet(self, machine: Machine, server: HandoverServer) -> None:
        """Sends prompts to a server that has started, if it computes any."""
        rng = self._random
        if self._roles[machine] is not Role.DECODE:
            now = machine.clock.now
            for _ in range(rng.randint(1, 6)):
                self.ask(machine, self.prompt(server), now + rng.choice((0.0, 0.02, 0.3)) * rng.random())

    def prompt(self, server: HandoverServer) -> list[int]:
        """Returns tokens that may begin as others do, and be fewer than a block has."""
        rng, s = self._random, server.life.scenario
        if not self._documents:
            self._documents = [[rng.randrange(1000) for _ in range(s.document_tokens)] for _ in range(3)]
        document = rng.choice(self._documents)
        size = rng.randint(1, len(document)) if rng.random() < 0.3 else len(document)
        return document[:size] + [rng.randrange(1000) for _ in range(rng.randint(0, s.max_question_tokens))]

    def ask(
        self,
        machine: Machine,
        tokens: Sequence[int],
        due: float,
        goes_to: Machine | None = None,
        instead: Handover | None = None,
    ) -> None:
        """Sends a prompt that is to be handed over."""
        assert isinstance(machine.server, HandoverServer)
        tenant = self._random.choice((None, *TENANTS)) if machine.server.life.has_tenants else None
        hints = self._random.choice(HINTS) if tenant is None else {"tenant": tenant, **self._random.choice(HINTS)}
        params = {"do_remote_decode": True, **({PARAM: hints} if hints else {})}
        self.send(Message(due, machine, tokens, 1, params, tenant, goes_to=goes_to, instead=instead))

    def send(self, message: Message) -> None:
        message.machine.num_expected += 1
        self._under_way.append(message)

    def deliver(self) -> float:
        """Gives servers the requests that are due by their clocks. Returns when the next one is due."""
        kept = []
        for message in sorted(self._under_way, key=lambda message: message.due):
            machine = message.machine
            if machine.server is not None and machine.clock.now >= message.due:
                machine.num_expected -= 1
                self._give(message, machine.server)
            elif machine.server is None and not machine.lives:
                machine.num_expected -= 1
                self.counts["requests to servers that are gone"] += 1
            else:
                kept.append(message)
        self._under_way = kept
        return min((message.due for message in kept), default=math.inf)

    def _give(self, message: Message, server: SharingServer) -> None:
        assert isinstance(server, HandoverServer)
        name, params = f"sent-{next(self._numbers)}", dict(message.params or {})
        if message.tenant is not None and PARAM not in params:
            params[PARAM] = {"tenant": message.tenant}
        if message.trip is not None:
            server.trips[name] = message.trip
        else:
            self._prompts[name] = message
        tokens, size = list(message.tokens), server.engine.cache.hash_block_size
        server.engine.ask([EngineRequest(name, tokens, message.new_tokens, size, 0, params)])

    def ended(self, server: HandoverServer, request: EngineRequest, answer: dict[str, Any] | None) -> None:
        """Sends a computed prompt on to another server, with the answer of the one that has computed it."""
        message = self._prompts.pop(request.request_id, None)
        if message is None:
            return
        if request.request_id not in server.engine.outputs and self._random.random() < 0.5:
            self.counts["prompts aborted"] += 1
            return
        handover = _handover_of(answer)
        self.counts["prompts handed over" if handover is not None else "prompts of which nothing is handed over"] += 1
        weights = [70, 8, 8, 4, 4, 3, 6]
        fate = Fate.KEPT if self.is_calm else self._random.choices([*Fate], weights)[0]
        for _ in range(2 if fate is Fate.TWICE else 1):
            self._send_on(server, message, request, answer, handover, fate)
        self.last_answer = handover or self.last_answer

    def _send_on(
        self,
        server: HandoverServer,
        message: Message,
        request: EngineRequest,
        answer: dict[str, Any] | None,
        handover: Handover | None,
        fate: Fate,
    ) -> None:
        rng = self._random
        tokens = list(request.tokens[: request.num_prompt_tokens])
        delay_s = 0.0 if self.is_calm or rng.random() < 0.5 else rng.choice((0.003, 0.05, 1.0)) * rng.random()
        if fate is Fate.LATE:
            delay_s = rng.choice((2.0, 60.0)) * rng.random()
        elif fate is Fate.LOST:
            answer = handover = None
        elif fate is Fate.STALE and self.last_answer is not None:
            handover = self.last_answer
            answer = params_of(handover)
        elif fate is Fate.OTHER_TOKENS:
            tokens[rng.randrange(len(tokens))] += 1
        elif fate is Fate.FORGED:
            answer = {"do_remote_prefill": True, PARAM: {"handover": forged(rng, handover)}}
            handover = None
        if message.instead is not None:
            handover, answer = message.instead, params_of(message.instead)
        able = [machine for machine, role in self._roles.items() if role is not Role.PREFILL]
        machine = message.goes_to or rng.choice(able)
        new_tokens = rng.randint(1, server.life.scenario.max_new_tokens)
        now = server.clock.now
        trip = Trip(fate, handover)
        self.sent.append(trip)
        self.send(Message(now + delay_s, machine, tokens, new_tokens, answer, message.tenant, trip))

    def arrived(self, trip: Trip, request: EngineRequest) -> None:
        """A server has given device blocks to a request."""
        self.counts["requests handed over"] += 1
        if trip.handover is not None:
            self.counts[f"found {trip.fate}: {trip.result(request.num_tokens)}"] += 1


def params_of(handover: Handover) -> dict[str, Any]:
    return {"do_remote_prefill": True, "do_remote_decode": False, PARAM: handover.to_options()}


def _handover_of(answer: dict[str, Any] | None) -> Handover | None:
    """Returns what an answer names. Raises Garbled if a client cannot send it on."""
    if answer is None or "do_remote_prefill" not in answer:
        return None
    if json.loads(json.dumps(answer)) != answer or (answer["do_remote_prefill"], answer["do_remote_decode"]) != (
        True,
        False,
    ):
        raise Garbled(str(answer))
    if not is_handover(answer[PARAM]["handover"]):
        raise Garbled(str(answer))
    return Handover(**answer[PARAM]["handover"])


def forged(rng: Random, handover: Handover | None) -> object:
    """Returns what somebody sends in place of ``handover``."""
    true = handover or Handover(64, "0" * 32, {"store": "writer-0"}, "0" * SERVER_CHARS)
    value = dict(true.to_options()["handover"])
    change: Callable[[], Any] = rng.choice(
        (
            lambda: value | {"tokens": rng.choice((0, -1, 1, 1 << 31, 1 << 70, True, 1.5, "64", None))},
            lambda: value | {"tokens": max(1, value["tokens"] + rng.choice((-1, 1)) * rng.randint(1, 64))},
            lambda: value | {"name": rng.choice(("", "0" * 32, "0" * (1 << 16), None, 7, ["0"] * 32))},
            lambda: value | {"places": dict.fromkeys(map(str, range(1000)), "writer-1")},
            lambda: value | {"places": {name: "../../" * rng.choice((1, 10, 1000)) for name in value["places"]}},
            lambda: value | {"places": dict.fromkeys(value["places"], f"writer-{rng.choice((1, 99, 1 << 40))}")},
            lambda: value | {"places": rng.choice(([], None, {"store": None}, {7: "writer-1"}, {}))},
            lambda: {name: value[name] for name in ("tokens", "name")},
            lambda: value | {"more": 1},
            lambda: rng.choice((None, [], "handover", 7)),
        )
    )
    return change()


class Handovers(Servers):
    """The simulation of one plan."""

    server_class = HandoverServer

    def __init__(self, plan: HandoversPlan, medium: SharedMedium, patch: Patch[SharingServer] | None = None) -> None:
        super().__init__(plan.servers, medium, patch)
        self.router = Router(plan.servers.seed, plan.servers.is_calm, self.machines, plan.roles)
        if isinstance(medium, SharedFolderMedium):
            medium.has_real_intervals = True

    def run(self) -> None:
        try:
            super().run()
        finally:
            self.counts += self.router.counts

    def deliver(self) -> float:
        return self.router.deliver()

    def _start(self, machine: Machine, life: ServerLife) -> SharingServer:
        server = super()._start(machine, life)
        assert isinstance(server, HandoverServer)
        server.engine.on_end = partial(self.router.ended, server)
        server.on_arrival = self.router.arrived
        self.router.greet(machine, server)
        return server

    # Afterwards.

    def _find_again(self) -> None:
        super()._find_again()
        self.router.is_calm = True
        pairs = [(one, other) for one, other in self._machine_pairs() if self._can_find(one, other)]
        if not pairs or not self.medium.keeps_enough:
            return
        one, other = self._random.choice(pairs)
        self._recover(one, other)
        for _ in range(CALM_ROUNDS):
            self._hand_over(one, other)
            self._hand_over_another(one, other)
        self._hand_over_nothing(one, other)
        self._recover(one, other)

    def _machine_pairs(self) -> list[tuple[Machine, Machine]]:
        of = {machine.server: machine for machine in self.machines}
        return [(of[one], of[other]) for one, other in self.pairs()]

    def _can_find(self, one: Machine, other: Machine) -> bool:
        """Whether one of two servers must find all that the other one hands over."""
        able = all(server is not None and _is_able(server) for server in (one.server, other.server))
        return able and (one, other) in self._machine_pairs()

    def _new_tokens(self, machine: Machine, other: Machine | None = None) -> list[int]:
        """Returns a new prompt of which some blocks are handed over, to ``other``, which has room for them too."""
        assert machine.server is not None
        layout = machine.server.engine.scheduler.layout
        s = machine.server.life.scenario
        most = min(
            _most_units(each.server) for each in (machine, other) if each is not None and each.server is not None
        )
        size = self._random.randint(1, max(1, min(most, s.document_tokens // layout.align) - 1))
        rest = self._random.choice(_rests(layout))
        return [self._random.randrange(1000) for _ in range(size * layout.align + rest)]

    def _hand_over(self, one: Machine, other: Machine, may_fail: bool = False) -> bool:
        """Hands a prompt over. Returns whether all of it was found, or raises an error if not and it may not fail."""
        tokens = self._new_tokens(one, other)
        self.router.ask(one, tokens, one.clock.now, goes_to=other)
        if self.medium.handover_s < QUICK_HANDOVER_S and self._random.random() < 0.5:
            # What fills its memory comes just behind.
            assert one.server is not None
            self.deliver()
            for _ in range(FLOOD_REQUESTS):
                self._ask(one.server, self._random.randrange(1 << 30), 1)
        self._run_all()
        trip = self.router.sent[-1]
        if not self._can_find(one, other):
            self.counts["rounds cut short by a reset"] += 1
            return True
        if trip.handover is None:
            raise Incomplete("an answer names nothing")
        result = trip.result(len(tokens))
        self.counts[f"calm: {result}"] += 1
        heads = [machine.server and machine.server.life.scenario.heads for machine in (one, other)]
        if heads[0] != heads[1]:
            self.counts[f"calm, to other ranks: {result}"] += 1
        self.counts["calm: ms"] += round(trip.waited_s * 1000)
        if may_fail:
            return result == "complete"
        if result != "complete":
            raise Incomplete(f"{trip.found} of {trip.handover} in {trip.waited_s:.3f} s")
        if trip.waited_s > self.medium.handover_s:
            raise Slow(f"{trip.waited_s:.3f} s for {trip.handover}")
        return True

    def _hand_over_another(self, one: Machine, other: Machine) -> None:
        """Hands a prompt over with the answer of another one."""
        answer = self.router.last_answer
        if answer is None:
            return
        self.router.ask(one, self._new_tokens(one, other), one.clock.now, goes_to=other, instead=answer)
        self._run_all()
        trip = self.router.sent[-1]
        if self._can_find(one, other) and trip.waited_s > self.medium.handover_s:
            raise Wasted(f"{trip.waited_s:.3f} s for {answer}, which is of another prompt")

    def _hand_over_nothing(self, one: Machine, other: Machine) -> None:
        """Hands requests over in the name of ``one`` whose blocks nobody has stored. The server that goes on has
        computed how they begin."""
        server = other.server
        assert one.server is not None
        assert isinstance(server, HandoverServer)
        start, waited_s = self._new_tokens(other), 0.0
        self.router.send(Message(other.clock.now, other, start, 1, None, None, Trip(Fate.LOST, None)))
        self._run_all()
        for _ in range(LOST_REQUESTS):
            tokens = (start if self._random.random() < 0.7 else self._new_tokens(other)) + self._new_tokens(other)
            tokens = tokens[: server.life.scenario.document_tokens]
            handover = name(server, tokens, one.server.engine.scheduler.stores.server)
            if handover is None:
                continue
            trip = Trip(Fate.KEPT, handover)
            self.router.send(Message(other.clock.now, other, tokens, 1, params_of(handover), None, trip))
            self._run_all()
            waited_s += trip.waited_s
        deadline_s = server.life.scenario.load_deadline_ms / 1000
        patient = MISSES_IN_A_ROW + LOST_REQUESTS // PATIENT_AGAIN + LOST_REQUESTS * IMPATIENT_SHARE
        if waited_s > patient * deadline_s + LOST_REQUESTS * self.medium.handover_s:
            raise Wasted(f"{waited_s:.3f} s in {LOST_REQUESTS} requests for which nothing came")

    def _recover(self, one: Machine, other: Machine) -> None:
        """Raises Incomplete unless one of a few requests finds all that is handed over, after some that have not."""
        for _ in range(PATIENT_AGAIN):
            if self._hand_over(one, other, may_fail=True):
                return
            self.pass_time(PROPAGATION_S)
        raise Incomplete(f"none of {PATIENT_AGAIN} requests has found all that was handed over to them")


def _is_able(server: SharingServer) -> bool:
    """Whether a server has time for all that is handed over, and prompts of which something is."""
    layout = server.engine.scheduler.layout
    has_time = server.life.scenario.load_deadline_ms >= CALM_DEADLINE_MS
    return has_time and len(_rests(layout)) > 0 and _most_units(server) > 1


def _most_units(server: SharingServer) -> int:
    """Returns how many units of a chain stay in host memory until a tier has them."""
    most = int(server.life.scenario.num_host_blocks * UNWRITTEN_SHARE)
    return most // sum(server.engine.scheduler.layout.chains.blocks_per_unit)


def _rests(layout: KeyLayout) -> range:
    """Returns how many tokens a prompt may have behind whole blocks, so that they are handed over. The names of some
    depend on tokens behind them, and the last state must be where blocks of all groups end, before the last token."""
    least = max(1, *(group.lookahead for group in layout.groups))
    return range(least, min((layout.block_tokens[g] for g in layout.states), default=max(least, layout.align) + 1))


def name(server: HandoverServer, tokens: Sequence[int], sender: str) -> Handover | None:
    """Returns a hand-over of all blocks that a prompt needs, as the server ``sender`` with these names would."""
    scheduler = server.engine.scheduler
    layout = scheduler.layout
    request = EngineRequest("named", list(tokens), 1, server.engine.cache.hash_block_size, 0)
    state = scheduler.queued.make(request)
    state.blocks.extend_keys()
    ahead = max(layout.groups[g].lookahead for g in range(len(layout.groups)))
    handed = (len(tokens) - max(1, ahead)) // layout.align * layout.align
    text = name_of(layout, state.blocks.keys, handed) if handed > 0 else None
    return None if text is None else Handover(handed, text, {"store": "writer-0", "shared_dir": "writer-0"}, sender)


def simulate_handovers(make_medium: MakeMedium, seed: int, patch: Patch[SharingServer] | None = None) -> Counter[str]:
    """Runs the simulation of ``seed`` on a medium of one kind, and returns counts of what happened in it. Raises the
    error of a law that is broken."""
    plan = plan_handovers(seed)
    servers = Handovers(plan, make_medium(seed, plan.servers.is_calm), patch)
    try:
        servers.run()
    except (AssertionError, IntegrityError) as error:
        raise type(error)(f"simulation {seed} of hand-overs: {error}") from error
    return servers.counts + Counter({"simulations": 1, "calm simulations": int(plan.servers.is_calm)})

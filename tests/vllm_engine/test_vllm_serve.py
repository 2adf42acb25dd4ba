"""vLLM's OpenAI server as in production: the README's flag, resets and sleep, request options, KV events over ZMQ,
SIGTERM, and data-parallel engines."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Not "vllm": a directory of that name on sys.path could be imported instead.
pytest.importorskip("vllm.version")
import msgspec
import zmq
from driver import BLOCK_SIZE, DEVICE_BLOCKS, MAX_TOKENS, make_prompts
from serve_harness import (
    Clients,
    Server,
    flag,
    memory_files,
    named_segments,
    readme_flag,
    record_sockets,
)
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm_harness import DEADLINE_S, Runner, differences, eventually

from demo.process import HOST
from kvoffload.abc import MissReason
from kvoffload.connector.options import OPTIONS
from kvoffload.observe.metrics import METRICS
from kvoffload.observe.records import RequestRecord
from kvoffload.observe.server import RecordServer

pytestmark = pytest.mark.vllm

POOL_BYTES = 64 << 20
PROMPTS = make_prompts()
BLOCKS_ASKED = sum(len(prompt) // BLOCK_SIZE for prompt in PROMPTS)
Start = Callable[..., Server]


def fresh_prompts(seed: int, count: int, blocks: int = 4) -> list[list[int]]:
    """Returns prompts of ``blocks`` blocks and a few tokens. They share nothing with each other or with PROMPTS."""
    rng = np.random.default_rng(1000 + seed)
    return [rng.integers(5, 500, size=blocks * BLOCK_SIZE + 9).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def start(run: Runner, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Starts a server with the model of the tests. Use it as a context manager, one server at a time."""
    directory = tmp_path_factory.mktemp("serve")
    model = directory / "model"
    run.write_model(model)
    logs = (directory / f"{i:02d}.log" for i in range(100))

    def start(kv_transfer_config: str | None, *arguments: str) -> Server:
        return Server(model, next(logs), kv_transfer_config, arguments, run)

    return start


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"kvoffload": [value]}
    return value


NONSENSE: dict[str, Any] = {
    "a word instead of a boolean": {"kvoffload": {"store": "yes", "load": "no"}},
    "numbers instead of booleans": {"kvoffload": {"store": 0, "load": 0}},
    "no amount": {"kvoffload": {"max_tokens": "64"}},
    "less than nothing": {"kvoffload": {"max_tokens": -1}},
    "a fraction": {"kvoffload": {"max_tokens": 63.5}},
    "true as an amount": {"kvoffload": {"max_tokens": True}},
    "a number instead of options": {"kvoffload": 7},
    "a list instead of options": {"kvoffload": [{"store": False}]},
    "unknown options": {"kvoffload": {"stores": False, "": None}, "others": {"store": False}},
    "options one level too high": {"store": False, "load": False, "max_tokens": 0},
    "more than there is": {"kvoffload": {"max_tokens": (1 << 64) - 1}},
    "what another connector understands": {"do_remote_prefill": True, "remote_block_ids": [1, 2], "remote_port": "x"},
    "tenants without a name": {"kvoffload": {"tenant": ""}, "tenant": "search"},
    "a list of tenants": {"kvoffload": {"tenant": ["search", None]}},
    "a tenant with a long name": {"kvoffload": {"tenant": "x" * 129}},
    "deep": nested(50),
    "deep within an option": {"kvoffload": {"store": nested(50)}},
    "wide": {"kvoffload": {f"option {i}": i for i in range(5000)}},
    "hints of other kinds": {"kvoffload": {"session": 7, "drop": "yes", "expect_return_s": [60]}},
    "a long name": {"kvoffload": {"session": "s" * 100_000}},
    "a return in the past": {"kvoffload": {"expect_return_s": -1}},
    "more likely than certain": {"kvoffload": {"p_return": 1.5}},
    "retained for ever": {"kvoffload": {"retain_s": float(1 << 40)}},
    "no hand-over": {"do_remote_prefill": True, "kvoffload": {"handover": "complete"}},
    "a hand-over of too much": {
        "kvoffload": {"handover": {"tokens": 1 << 63, "name": "0" * 32, "places": {"store": "../" * 100_000}}}
    },
    "a hand-over of another prompt": {
        "kvoffload": {"handover": {"tokens": 64, "name": "0" * 32, "places": {"store": "../../writer-0"}}}
    },
    "deep within a hand-over": {"kvoffload": {"handover": nested(50)}},
    "deep within a hint": {"kvoffload": {"session": nested(50), "drop": nested(50), "expect_return_s": nested(50)}},
}
NUM_OPTIONS = 5
CONTROL = fresh_prompts(0, NUM_OPTIONS + len(NONSENSE))
"""One prompt per test of request options."""
STORED = (len(CONTROL[0]) + MAX_TOKENS - 1) // BLOCK_SIZE
"""Blocks of each prompt with its answer. The last token has no KV."""
TOGETHER = (DEVICE_BLOCKS - 1) // (STORED + 1)
"""So many of these requests at a time preempt none of each other."""
HIT = len(CONTROL[0]) // BLOCK_SIZE * BLOCK_SIZE
"""Tokens of each prompt that another request can find."""


@pytest.fixture(scope="module")
def alone(start: Start) -> dict[str, list[Any]]:
    """The answers of a server without kvoffload."""
    with start(None) as server:
        return {"prompts": server.round(PROMPTS), "control": server.round(CONTROL)}


def check_rounds(server: Server, expected: list[Any], count: int, rank: int | None = None) -> dict[str, float]:
    """Checks that ``count`` rounds are answered correctly, the last one with host memory. Returns how the metrics
    grew."""
    rounds, grown = server.growth(lambda: [server.round(PROMPTS, rank=rank) for _ in range(count)], rank)
    for answers in rounds:
        assert differences(answers, expected) == []
    assert grown["asked_tokens"] == count * sum(map(len, PROMPTS))
    assert grown["host_hit_tokens"] > 0
    assert grown["load_blocks"] > 0
    assert server.metrics(rank)["off"] == 0
    return grown


# The flag of the README.


@pytest.fixture(scope="class")
def server(start: Start, alone: dict[str, list[Any]]) -> Iterator[Server]:
    """A server with the README's flag but a smaller pool."""
    assert '"1GiB"' in readme_flag()
    with start(readme_flag().replace('"1GiB"', '"64MiB"')) as server:
        yield server


class TestReadmeFlag:
    """All tests use one server. They do not depend on each other."""

    def test_answers_are_those_of_vllm_alone(self, server: Server, alone: dict[str, list[Any]]) -> None:
        assert BLOCKS_ASKED > 2 * DEVICE_BLOCKS
        check_rounds(server, alone["prompts"], 2)
        held = (DEVICE_BLOCKS - 1) * BLOCK_SIZE
        wanted = f"kvoffload: host pool of 64 MiB = 65,536 tokens beyond the device's {held}; exclusive contents"
        assert wanted in server.log()

    def test_every_metric_is_exposed(self, server: Server) -> None:
        assert server.kinds() == {name: spec.kind for name, spec in METRICS.items()}

    def test_explain_says_that_the_device_held_a_whole_prompt(self, server: Server) -> None:
        (prompt,) = fresh_prompts(900, 1)
        for _ in range(2):
            server.complete(prompt, max_tokens=1)
        mine = {int(process.name) for process in server.processes()}
        (pid,) = [engine["pid"] for engine in _explain()["servers"] if engine["pid"] in mine]
        new, again = [RequestRecord.from_dict(record) for record in _explain("--pid", str(pid))["records"][-2:]]
        assert (new.device_sufficed, new.reason) == (False, MissReason.NEVER_STORED)
        assert (again.device_sufficed, again.device_tokens, again.host_tokens) == (True, HIT, 0)

    def test_a_reset_with_the_connector_empties_the_pool(self, server: Server, alone: dict[str, list[Any]]) -> None:
        """A reset without the connector does not."""
        server.round(PROMPTS)
        server.forget_device_blocks()
        used = server.metrics()["pool_used_blocks"]
        assert used > 0
        assert eventually(lambda: server.post("/reset_prefix_cache?reset_external=true")["success"])
        # No request makes the server run a step.
        assert eventually(lambda: server.scrape()["pool_used_blocks"] == 0)
        answers, grown = server.growth(lambda: server.round(PROMPTS))
        assert differences(answers, alone["prompts"]) == []
        assert grown["misses:reset"] > 0
        assert grown["pool_used_blocks"] > 0

    @pytest.mark.parametrize("level", [1, pytest.param(2, marks=pytest.mark.soak)])
    def test_sleep_keeps_the_pool(self, server: Server, alone: dict[str, list[Any]], level: int) -> None:
        """On CPU a worker keeps its memory. The rest of vLLM's sleep runs: the scheduler is paused, and
        ``EngineCore._reset_caches`` resets the prefix cache and the connector."""
        server.round(PROMPTS)
        used = server.metrics()["pool_used_blocks"]
        assert server.post(f"/sleep?level={level}")["status"] == "sleeping"
        assert json.loads(server.get("/is_sleeping")) == {"is_sleeping": True}
        assert server.post("/wake_up")["status"] == "awake"
        assert server.metrics()["pool_used_blocks"] == used > 0
        check_rounds(server, alone["prompts"], 1)

    @pytest.mark.soak
    def test_a_sleep_of_level_0_keeps_the_pool(self, server: Server, alone: dict[str, list[Any]]) -> None:
        """Level 0 only pauses the scheduler."""
        server.round(PROMPTS)
        used = server.metrics()["pool_used_blocks"]
        server.post("/sleep?level=0")
        assert server.post("/wake_up?tags=scheduling")["status"] == "awake"
        assert server.metrics()["pool_used_blocks"] == used > 0
        check_rounds(server, alone["prompts"], 1)

    # Request options.

    @staticmethod
    def _ask(server: Server, alone: dict[str, list[Any]], i: int, params: Any = None) -> dict[str, float]:
        """Checks the answer to CONTROL[i] with an empty device cache. Returns how the metrics grew."""
        server.forget_device_blocks()
        changes = {} if params is None else {"kv_transfer_params": params}
        answer, grown = server.growth(lambda: server.complete(CONTROL[i], **changes))
        assert differences([answer], [alone["control"][i]]) == []
        assert server.metrics()["off"] == 0
        return grown

    def test_a_request_that_is_not_to_be_stored_is_not(self, server: Server, alone: dict[str, list[Any]]) -> None:
        """Not when its blocks leave the device either."""
        self._ask(server, alone, 0, {"kvoffload": {"store": False}})
        assert self._ask(server, alone, 0)["host_hit_tokens"] == 0
        # It may load what others have stored.
        assert self._ask(server, alone, 0, {"kvoffload": {"store": False}})["host_hit_tokens"] == HIT

    def test_a_request_that_is_not_to_be_loaded_is_not(self, server: Server, alone: dict[str, list[Any]]) -> None:
        self._ask(server, alone, 1)
        grown = self._ask(server, alone, 1, {"kvoffload": {"load": False}})
        assert (grown["host_hit_tokens"], grown["load_blocks"], grown["load_bytes"]) == (0, 0, 0)
        assert self._ask(server, alone, 1)["host_hit_tokens"] == HIT

    def test_max_tokens_bounds_what_is_stored_and_loaded(self, server: Server, alone: dict[str, list[Any]]) -> None:
        self._ask(server, alone, 2, {"kvoffload": {"max_tokens": 2 * BLOCK_SIZE}})
        assert self._ask(server, alone, 2)["host_hit_tokens"] == 2 * BLOCK_SIZE
        grown = self._ask(server, alone, 2, {"kvoffload": {"max_tokens": 2 * BLOCK_SIZE + 1}})
        assert (grown["host_hit_tokens"], grown["load_blocks"]) == (2 * BLOCK_SIZE, 2)

    @pytest.mark.soak
    def test_nonsense_changes_nothing(self, server: Server, alone: dict[str, list[Any]]) -> None:
        """Each request is stored and loaded as a request without options."""

        def ask() -> float:
            server.forget_device_blocks()
            with ThreadPoolExecutor(TOGETHER) as threads:
                answers, grown = server.growth(
                    lambda: list(
                        threads.map(
                            lambda prompt, params: server.complete(prompt, kv_transfer_params=params),
                            CONTROL[NUM_OPTIONS:],
                            NONSENSE.values(),
                        )
                    )
                )
            assert differences(answers, alone["control"][NUM_OPTIONS:]) == [], list(NONSENSE)
            assert server.metrics()["off"] == 0
            return grown["host_hit_tokens"]

        # No request can find more than this.
        assert [ask(), ask()] == [0, HIT * len(NONSENSE)]
        counts = server.metrics()
        assert all(counts[f"ignored_options:{option}"] > 0 for option in (*OPTIONS, "unknown"))

    @pytest.mark.soak
    @pytest.mark.parametrize("session", ["in the options", "of vLLM"])
    def test_a_session_that_ends_makes_room_first(
        self, server: Server, alone: dict[str, list[Any]], session: str
    ) -> None:
        """Without ``drop``, which is the control, its blocks are found again. Answers are the same in any case."""
        of_engine = session == "of vLLM"
        i = 3 + of_engine
        flood = iter(fresh_prompts(500 + of_engine, 1000, blocks=14))
        while (counts := server.metrics())["pool_used_blocks"] < counts["pool_blocks"]:
            server.round([next(flood) for _ in range(16)], max_tokens=1)

        def ask(drop: bool) -> tuple[float, float]:
            """Returns how many blocks left early after the request, and how many of its tokens were found then."""

            def complete(**hints: Any) -> list[Any]:
                server.forget_device_blocks()
                options = hints if of_engine else {"session": session, **hints}
                more: dict[str, Any] = {"session_id": session} if of_engine else {}
                return server.complete(CONTROL[i], kv_transfer_params={"kvoffload": options}, **more)

            answer = complete(drop=drop)
            _, grown = server.growth(lambda: server.complete(next(flood)))
            again, found = server.growth(complete)
            assert differences([answer, again], [alone["control"][i]] * 2) == []
            return grown["early_evictions"], found["host_hit_tokens"]

        assert ask(drop=False) == (0, HIT)
        assert ask(drop=True) == (STORED, 0)
        assert server.metrics()["off"] == 0


@pytest.mark.soak
def test_tenants_find_what_they_have_stored_themselves(start: Start, alone: dict[str, list[Any]]) -> None:
    """By the request option and by the salt, with and without shares."""
    salt = "known to the gateway"
    shares = {
        "search": {"guaranteed": {"host": POOL_BYTES // 4}},
        "chat": {"quota": {"host": POOL_BYTES // 2}, "salt_sha256": sha256(salt.encode()).hexdigest()},
    }

    def of(tenant: object) -> dict[str, Any]:
        return {"kv_transfer_params": {"kvoffload": {"tenant": tenant}}}

    with start(flag(host_bytes=POOL_BYTES, tenants=shares)) as server:

        def found(changes: dict[str, Any]) -> float:
            server.forget_device_blocks()
            answer, grown = server.growth(lambda: server.complete(CONTROL[0], **changes))
            assert differences([answer], [alone["control"][0]]) == []
            return grown["host_hit_tokens"]

        clients = [of("search"), of("chat"), of("somebody"), {}, {"cache_salt": salt}, {"cache_salt": "another"}]
        assert [found(client) for client in clients] == [0] * len(clients)
        assert [found(client) for client in clients] == [HIT] * len(clients)
        assert found(of("search") | {"cache_salt": salt}) == 0
        assert found(of("chat") | {"cache_salt": salt}) == HIT, "the salt said the same"
        assert found(of(7)) == HIT, "as a request without a tenant"
        assert eventually(lambda: server.metrics()["tenant_blocks:chat,host"] == 2 * STORED)
        metrics = server.metrics()
        assert {name: metrics[name] for name in metrics if name.startswith("tenant_hit_tokens")} == {
            "tenant_hit_tokens:search": HIT,
            "tenant_hit_tokens:chat": 3 * HIT,
            "tenant_hit_tokens:other": 4 * HIT,
        }
        assert metrics["tenant_evicted_blocks:search,host"] == metrics["off"] == 0


@pytest.mark.soak
def test_a_pause_keeps_blocks_and_a_reset_the_store_while_weights_stay(
    start: Start, alone: dict[str, list[Any]], run: Runner, tmp_path: Path
) -> None:
    other, patient = tmp_path / "other", 1000 * DEADLINE_S
    run.write_model(other, seed=1)
    tiers = [{"kind": "shared_dir", "dir": str(tmp_path / "shared"), "bytes": "64MiB"}]
    deadlines: dict[str, Any] = {"load_deadline_ms": patient, "lookup_deadline_ms": patient}
    with start(flag(host_bytes=POOL_BYTES, load_only_if_faster=False, tiers=tiers, **deadlines)) as server:

        def ask() -> tuple[list[Any], dict[str, float]]:
            answers, grown = server.growth(lambda: server.round(PROMPTS))
            return answers, grown

        ask()
        assert eventually(lambda: server.metrics()["tier_write_blocks:shared_dir"] >= BLOCKS_ASKED // 2)
        assert server.post("/pause")["status"] == "paused"
        assert server.post("/resume")["status"] == "resumed"
        answers, grown = ask()
        assert differences(answers, alone["prompts"]) == []
        assert grown["host_hit_tokens"] > 0
        assert grown["misses:reset"] == 0

        assert eventually(lambda: server.post("/reset_prefix_cache?reset_external=true")["success"])
        assert eventually(lambda: server.scrape()["pool_used_blocks"] == 0)
        answers, grown = ask()
        assert differences(answers, alone["prompts"]) == []
        assert grown["tier_hit_tokens:shared_dir"] > 0
        assert server.metrics()["tier_off:shared_dir"] == 0

        server.post("/pause")
        server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(other)}})
        server.post("/resume")
        answers, grown = ask()
        assert grown["tier_hit_tokens:shared_dir"] == 0
        assert server.metrics()["tier_off:shared_dir"] == 1
        server.forget_device_blocks()
        alone_again = {"kv_transfer_params": {"kvoffload": {"load": False, "store": False}}}
        right = server.round(PROMPTS, **alone_again)
        assert len(differences(right, alone["prompts"])) == len(PROMPTS)
        assert differences(answers, right) == []


def test_corrupted_bytes_change_answers(start: Start, alone: dict[str, list[Any]]) -> None:
    """The control of all comparisons here."""
    with start(flag("CorruptedKVOffloadConnector", host_bytes=POOL_BYTES)) as server:
        server.round(PROMPTS)
        server.forget_device_blocks()
        assert len(differences(server.round(PROMPTS), alone["prompts"])) == len(PROMPTS)


# KV events.


@dataclass(frozen=True)
class Announced:
    """The content of a stored event for one block."""

    parent: Any
    tokens: tuple[int, ...]
    block_size: int
    extra_keys: Any
    lora: tuple[Any, Any]
    group: int | None
    kind: str | None


@dataclass
class Index:
    """The blocks that a router knows from events alone, by medium and block hash."""

    held: dict[str, dict[Any, Announced]] = field(default_factory=lambda: {"GPU": {}, "CPU": {}})
    announced: dict[str, dict[Any, Announced]] = field(default_factory=lambda: {"GPU": {}, "CPU": {}})
    """All blocks that were ever announced."""
    stored: Counter[str] = field(default_factory=Counter)
    removed: Counter[str] = field(default_factory=Counter)

    def take(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        """Applies an event. Fails if a block of the host is announced twice, or removed but not announced."""
        if isinstance(event, AllBlocksCleared):
            self.held["GPU"].clear()
        elif isinstance(event, BlockRemoved):
            assert event.medium in self.held
            for name in event.block_hashes:
                known = self.held[event.medium].pop(name, None)
                assert event.medium != "CPU" or (known is not None and known.group == event.group_idx)
                self.removed[event.medium] += 1
        else:
            self._store(event)

    def _store(self, event: BlockStored) -> None:
        assert event.medium in self.held
        assert len(event.token_ids) == event.block_size * len(event.block_hashes) > 0
        parent = event.parent_block_hash
        for i, name in enumerate(event.block_hashes):
            tokens = event.token_ids[i * event.block_size : (i + 1) * event.block_size]
            block = Announced(
                parent,
                tuple(tokens),
                event.block_size,
                event.extra_keys[i] if event.extra_keys else None,
                (event.lora_id, event.lora_name),
                event.group_idx,
                event.kv_cache_spec_kind,
            )
            assert event.medium != "CPU" or name not in self.held["CPU"]
            self.held[event.medium][name] = self.announced[event.medium][name] = block
            self.stored[event.medium] += 1
            parent = name

    def chain(self, medium: str, tokens: list[int], salt: str | None = None) -> list[Any]:
        """Returns the hashes of the longest prefix of ``tokens`` in ``medium``, as a router would find it."""
        held, found, parent = self.held[medium], [], None
        for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            wanted = tuple(tokens[start : start + BLOCK_SIZE])
            extra = (salt,) if salt is not None and parent is None else None
            following = [
                name
                for name, block in held.items()
                if (block.parent, block.tokens) == (parent, wanted) and _same(block.extra_keys, extra)
            ]
            if not following:
                break
            (parent,) = following
            found.append(parent)
        return found


def _same(keys: Any, extra: tuple[str, ...] | None) -> bool:
    return tuple(keys or ()) == (extra or ())


class Router:
    """Subscribes to a server's events."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        # vLLM binds to a wildcard address, and connects to any other address.
        self.endpoint = f"tcp://{HOST}:{self._socket.bind_to_random_port(f'tcp://{HOST}')}"
        self._decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        self._next: int | None = None
        self._markers = 0
        self.index = Index()

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()

    def join(self, server: Server) -> None:
        """Waits until ZeroMQ has subscribed, which it does in the background: until a new block is announced."""
        assert eventually(lambda: self._mark(server) and self.receive() and self._next is not None)

    def catch_up(self, server: Server) -> None:
        """Receives all events of ``server`` so far: up to that of a new block."""
        server.metrics()
        block = self._mark(server)
        assert eventually(
            lambda: self.receive() and block in {each.tokens for each in self.index.announced["GPU"].values()}
        )

    def _mark(self, server: Server) -> tuple[int, ...]:
        """Makes a new block, on the device only."""
        self._markers += 1
        (prompt,) = fresh_prompts(500 + self._markers, 1, blocks=1)
        server.complete(prompt, max_tokens=1, kv_transfer_params={"kvoffload": {"store": False}})
        return tuple(prompt[:BLOCK_SIZE])

    def receive(self) -> bool:
        """Receives the events that have arrived."""
        while self._socket.poll(0):
            _, number, payload = self._socket.recv_multipart()
            sequence = int.from_bytes(number, "big")
            assert self._next in (None, sequence), "events were lost"
            self._next = sequence + 1
            for event in self._decode(payload).events:
                self.index.take(event)
        return True


@pytest.fixture(scope="class")
def router() -> Iterator[Router]:
    with contextlib.closing(Router()) as router:
        yield router


@pytest.fixture(scope="class")
def server_with_events(start: Start, router: Router) -> Iterator[Server]:
    """A server whose events ``router`` receives. Its pool has 32 blocks, so that prompts evict each other; blocks are
    announced when they are computed."""
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": router.endpoint, "topic": ""}
    options = flag(host_bytes="1MiB", host_contents="inclusive")
    with start(options, "--kv-events-config", json.dumps(config)) as server:
        router.join(server)
        yield server


class TestEvents:
    """The tests do not depend on each other."""

    def test_a_prompt_is_found_in_host_memory_by_events_alone(self, server_with_events: Server, router: Router) -> None:
        """Block by block from the first, and only as far as the prompts are equal."""
        first, second = fresh_prompts(1, 2)
        second[: 2 * BLOCK_SIZE] = first[: 2 * BLOCK_SIZE]
        for prompt in (first, second):
            server_with_events.complete(prompt)
        router.catch_up(server_with_events)
        chains = [router.index.chain("CPU", prompt) for prompt in (first, second)]
        assert [len(chain) for chain in chains] == [4, 4]
        assert chains[0][:2] == chains[1][:2]
        assert set(chains[0][2:]).isdisjoint(chains[1][2:])
        other = list(first)
        other[BLOCK_SIZE] += 1
        assert router.index.chain("CPU", other) == chains[0][:1]
        assert router.index.chain("CPU", first[1:]) == []

    def test_events_of_both_media_agree_on_a_block(self, server_with_events: Server, router: Router) -> None:
        server_with_events.round(PROMPTS)
        router.catch_up(server_with_events)
        on_host, on_device = router.index.announced["CPU"], router.index.announced["GPU"]
        assert len(on_host) >= BLOCKS_ASKED // 2
        for name, block in on_host.items():
            assert block == on_device[name]
            assert block.block_size == BLOCK_SIZE
            assert block.group == 0
        assert {block.parent for block in on_host.values()} - {None} <= set(on_device)

    def test_what_is_announced_is_what_the_pool_holds(self, server_with_events: Server, router: Router) -> None:
        """This holds after evictions, hits and a reset."""
        for _ in range(2):
            server_with_events.round(PROMPTS)
            router.catch_up(server_with_events)
            metrics = server_with_events.metrics()
            assert metrics["evicted_blocks"] > 0
            assert len(router.index.held["CPU"]) == metrics["pool_used_blocks"] > 0
            assert router.index.stored["CPU"] == metrics["store_blocks"]
            assert router.index.removed["CPU"] >= metrics["evicted_blocks"]
        assert eventually(lambda: server_with_events.post("/reset_prefix_cache?reset_external=true")["success"])
        # No request makes the server run a step.
        assert eventually(lambda: router.receive() and not router.index.held["CPU"])
        assert server_with_events.metrics()["pool_used_blocks"] == 0

    def test_events_contain_the_salt(self, server_with_events: Server, router: Router) -> None:
        """Events of the first block contain it, as in vLLM: the same tokens are another block for each tenant."""
        (prompt,) = fresh_prompts(2, 1)
        for salt in (None, "tenant a", "tenant b"):
            salted: dict[str, Any] = {} if salt is None else {"cache_salt": salt}
            server_with_events.complete(prompt, **salted)
        router.catch_up(server_with_events)
        for medium in ("CPU", "GPU"):
            chains = [router.index.chain(medium, prompt, salt) for salt in (None, "tenant a", "tenant b")]
            assert [len(chain) for chain in chains] == [4, 4, 4]
            assert len({name for chain in chains for name in chain}) == 12
            assert router.index.chain(medium, prompt, "tenant c") == []


# Sleep and SIGTERM while requests run and copies are in progress.


@pytest.fixture(scope="class")
def slow(start: Start, alone: dict[str, list[Any]]) -> Iterator[Server]:
    """A server whose copies take many steps, and some fail."""
    with start(flag("SlowKVOffloadConnector", host_bytes=POOL_BYTES)) as server:
        yield server


@contextlib.contextmanager
def load(server: Server) -> Iterator[Clients]:
    """Runs clients that send PROMPTS and new prompts without end. Begins when stores are in progress: when the pool,
    which was empty, holds blocks whose store has not ended."""
    assert eventually(lambda: server.post("/reset_prefix_cache?reset_external=true")["success"])
    assert eventually(lambda: server.metrics()["pool_used_blocks"] == 0)
    stored = server.metrics()["store_blocks"]

    def under_way() -> bool:
        now = server.metrics()
        return now["pool_used_blocks"] > now["store_blocks"] - stored

    def prompts(client: int) -> Iterator[list[int]]:
        for i in count(client):
            yield PROMPTS[i % len(PROMPTS)]
            yield from fresh_prompts(100 * client + i, 1)

    clients = Clients(server, map(prompts, range(6)))
    try:
        assert eventually(under_way)
        yield clients
    finally:
        clients.hang_up()


class TestUnderWay:
    """The last test terminates the server."""

    @pytest.mark.soak
    @pytest.mark.parametrize("mode", ["abort", "wait"])
    def test_sleep(self, slow: Server, alone: dict[str, list[Any]], mode: str) -> None:
        """vLLM aborts requests or lets them end, and waits for the copies. (With "keep" it cannot clear blocks that a
        load is filling: it says so and does not sleep.)"""
        with load(slow) as clients:
            for level in (1, 2):
                assert slow.post(f"/sleep?level={level}&mode={mode}")["status"] == "sleeping"
                assert slow.post("/wake_up")["status"] == "awake"
            clients.end()
        answers = [(PROMPTS.index(prompt), tokens) for prompt, (tokens, _) in clients.answers if prompt in PROMPTS]
        assert answers
        for i, tokens in answers:
            right, _ = alone["prompts"][i]
            assert tokens == right[: len(tokens)]
            assert mode == "abort" or len(tokens) == len(right)
        rounds, grown = slow.growth(lambda: [slow.round(PROMPTS) for _ in range(2)])
        for again in rounds:
            assert differences(again, alone["prompts"]) == []
        assert grown["host_hit_tokens"] > 0
        assert slow.metrics()["off"] == 0

    def test_sigterm_leaves_nothing(self, slow: Server) -> None:
        """All processes that held something of kvoffload end within 30 s, the others when the clients disconnect.
        vLLM's API server may wait for clients, with and without kvoffload."""
        processes = list(slow.processes())
        listening = record_sockets()
        sockets = {process for process in processes if int(process.name) in listening}
        pools = slow.pools().keys()
        holders = {process for process in processes if memory_files(process)} | sockets
        named = set().union(*map(named_segments, processes))
        assert pools
        assert sockets
        with load(slow) as clients:
            slow.process.terminate()
            assert eventually(lambda: holders.isdisjoint(slow.processes()), 30), slow.log()[-6000:]
            clients.hang_up()
            assert eventually(lambda: slow.process.poll() is not None and not list(slow.processes()), 30)
        assert not [path for path in named if path.exists()]
        assert not [path for path in Path("/dev/shm").iterdir() if "kvoffload" in path.name]
        # vLLM may kill an engine that is busy. The next server removes the socket that is left then.
        assert record_sockets().keys().isdisjoint(int(process.name) for process in processes)
        RecordServer(list, "next").close()
        assert not [path for process in sockets for path in listening[int(process.name)] if path.exists()]
        assert not any(pools & memory_files(process).keys() for process in Path("/proc").glob("[0-9]*"))


# Data-parallel engines.

TWO_ENGINES = ("--data-parallel-size", "2")


@pytest.fixture(scope="class")
def two_engines(start: Start, alone: dict[str, list[Any]]) -> Iterator[Server]:
    with start(flag(host_bytes=POOL_BYTES, engines_per_node=2), *TWO_ENGINES) as server:
        yield server


@pytest.mark.soak
class TestDataParallel:
    """The engines of a dense model are independent: one server has two pools."""

    def test_answers_are_those_of_vllm_alone(self, two_engines: Server, alone: dict[str, list[Any]]) -> None:
        for rank in range(2):
            check_rounds(two_engines, alone["prompts"], 2, rank)

    def test_each_pool_is_half_of_host_bytes(self, two_engines: Server) -> None:
        assert list(two_engines.pools().values()) == [POOL_BYTES // 2] * 2

    def test_a_reset_empties_both_pools(self, two_engines: Server) -> None:
        for rank in range(2):
            two_engines.round(PROMPTS, rank=rank)
            assert two_engines.metrics(rank)["pool_used_blocks"] > 0
        assert eventually(lambda: two_engines.post("/reset_prefix_cache?reset_external=true")["success"])
        assert [two_engines.metrics(rank)["pool_used_blocks"] for rank in range(2)] == [0, 0]

    def test_explain_agrees_with_the_metrics(self, two_engines: Server) -> None:
        """For each engine, which is selected by its process."""
        for rank in range(2):
            two_engines.round(PROMPTS, rank=rank)
        metrics = [two_engines.metrics(rank) for rank in range(2)]
        mine = {int(process.name) for process in two_engines.processes()}
        engines = [engine for engine in _explain()["servers"] if engine["pid"] in mine]
        assert sorted(engine["name"][-4:] for engine in engines) == ["_dp0", "_dp1"]
        for engine in engines:
            report, counts = _explain("--pid", str(engine["pid"])), metrics[int(engine["name"][-1])]
            assert report["servers"] == [engine]
            assert (report["malformed"], report["warnings"]) == (0, [])
            total = report["total"]
            assert total["tokens_asked"] == counts["asked_tokens"]
            assert total["device_tokens"] == counts["device_hit_tokens"]
            assert total["host_tokens"] == counts["host_hit_tokens"]
            reasons = {name.partition(":")[2]: n for name, n in counts.items() if name.startswith("misses:") and n}
            assert total["misses"] == reasons


def _explain(*arguments: str) -> Any:
    """Returns the output of ``kvoffload explain --json``."""
    command = [str(Path(sys.executable).with_name("kvoffload")), "explain", "--json", *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S).stdout)


@pytest.mark.soak
def test_engines_share_host_bytes_without_engines_per_node(start: Start) -> None:
    """If vLLM does not say how many there are, the server does not start, and says what to set."""
    server = start(flag(host_bytes=POOL_BYTES), *TWO_ENGINES)
    with contextlib.closing(server):
        if server.wait():
            assert list(server.pools().values()) == [POOL_BYTES // 2] * 2
        else:
            assert "ConfigError: engines_per_node is not set" in server.log()


@pytest.mark.soak
def test_engines_of_a_server_have_one_fingerprint_and_share_tiers(
    start: Start, alone: dict[str, list[Any]], tmp_path: Path
) -> None:
    """After a restart each engine finds what it left on the disk, and what all have left in a tier without shares."""
    tiers = [
        {"kind": "disk", "dir": str(tmp_path / "disk"), "bytes": "64MiB"},
        {"kind": "own_tiers:FolderConfig", "path": str(tmp_path)},
    ]
    value = flag(host_bytes=POOL_BYTES, engines_per_node=2, load_only_if_faster=False, tiers=tiers)
    with start(value, *TWO_ENGINES) as server:
        assert differences(server.round(PROMPTS, rank=0), alone["prompts"]) == []
        assert eventually(lambda: server.metrics(0)["tier_write_blocks:folder"] >= BLOCKS_ASKED // 2)
        fingerprints = re.findall(r"model fingerprint (\w{64})", server.log())
        assert len(fingerprints) == 2
        assert len(set(fingerprints)) == 1
    assert {path.name for path in (tmp_path / "disk").glob("engine-*")} == {"engine-0", "engine-1"}
    with start(value, *TWO_ENGINES) as server:
        assert differences(server.round(PROMPTS, rank=1), alone["prompts"]) == []
        metrics = server.metrics(1)
        assert metrics["tier_hit_tokens:folder"] > 0
        assert metrics["tier_hit_tokens:disk"] == 0


@pytest.mark.soak
def test_more_engines_than_were_promised_are_refused(start: Start) -> None:
    server = start(flag(host_bytes=POOL_BYTES, engines_per_node=1), *TWO_ENGINES)
    with contextlib.closing(server):
        assert not server.wait()
        assert server.process.returncode != 0
        assert "ConfigError: engines_per_node=1: " in server.log()
        assert "set engines_per_node to" in server.log()
        assert eventually(lambda: not list(server.processes()))

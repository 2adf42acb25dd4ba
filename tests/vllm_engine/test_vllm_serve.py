"""vLLM's OpenAI server as in production, with two data-parallel engines above a tier that they share: resets and sleep,
request options, KV events over ZMQ, metrics and ``kvoffload explain``, SIGTERM.

The rows of docs/support.md's table: engines in several processes; data parallelism; cache salts; tiers that servers
share, each of which is an engine here.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driver import BLOCK_SIZE, DEVICE_BLOCKS, MAX_TOKENS, make_prompts
from serve_harness import Clients, Server, flag, memory_files, named_segments, record_sockets
from test_vllm_router import EXAMPLE
from vllm_harness import DEADLINE_S, Runner, differences, eventually

from demo.process import HOST, free_ports
from demo.servers import TO_HAND_OVER
from kvoffload.abc import MissReason
from kvoffload.observe.metrics import METRICS
from kvoffload.observe.records import RequestRecord
from kvoffload.observe.server import RecordServer

pytestmark = pytest.mark.vllm

POOL_BYTES = 64 << 20
PROMPTS = make_prompts()
BLOCKS_ASKED = sum(len(prompt) // BLOCK_SIZE for prompt in PROMPTS)
PATIENT: dict[str, Any] = {
    "load_deadline_ms": 1000 * DEADLINE_S,
    "lookup_deadline_ms": 1000 * DEADLINE_S,
    "load_only_if_faster": False,
}
TWO_ENGINES = ("--data-parallel-size", "2")
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

    def start(kv_transfer_config: str | None, *arguments: str, rank: int | None = None) -> Server:
        return Server(model, next(logs), kv_transfer_config, arguments, run, rank)

    return start


CONTROL = fresh_prompts(0, 2)
"""One prompt per test of request options."""
HIT = len(CONTROL[0]) // BLOCK_SIZE * BLOCK_SIZE
"""Tokens of each prompt that another request can find."""


@pytest.fixture(scope="module")
def control(run: Runner) -> list[Any]:
    """The right answers to CONTROL."""
    config = {"model_kind": "llama", "asked": CONTROL, "max_tokens": MAX_TOKENS}
    return list(run.once("right control", "reference", **config)["outputs"][0])


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


def ask(server: Server, control: list[Any], i: int, params: Any = None) -> dict[str, float]:
    """Checks the answer to CONTROL[i] with an empty device cache. Returns how the metrics grew."""
    server.forget_device_blocks()
    changes = {} if params is None else {"kv_transfer_params": params}
    answer, grown = server.growth(lambda: server.complete(CONTROL[i], **changes))
    assert differences([answer], [control[i]]) == []
    assert server.metrics()["off"] == 0
    return grown


def _explain(*arguments: str) -> Any:
    """Returns the output of ``kvoffload explain --json``."""
    command = [str(Path(sys.executable).with_name("kvoffload")), "explain", "--json", *arguments]
    return json.loads(subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S).stdout)


def is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_server((HOST, port)):
        return True
    return False


def in_host(router: Any) -> set[Any]:
    """Returns the blocks that ``router`` believes to be in host memory of the first engine."""
    places = router.index.held["engine 0"].items()
    return {name for place, names in places if place[0] == "CPU" for name in names}


class TestTwoEngines:
    """All tests use one server; most of them ask its first engine. They do not depend on each other, but the last one
    ends it."""

    @pytest.fixture(scope="class")
    def ports(self) -> tuple[int, int]:
        """Where the engines publish their events: vLLM gives the second one the next port."""
        return next((port, port + 1) for port in iter(lambda: free_ports(1)[0], 0) if is_free(port + 1))

    @pytest.fixture(scope="class")
    def server(
        self, start: Start, ports: tuple[int, int], tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Server]:
        shared = tmp_path_factory.mktemp("shared") / "store"
        tiers = [{"kind": "shared_dir", "dir": str(shared), "bytes": "64MiB"}]
        config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{ports[0]}", "topic": ""}
        options = flag(host_bytes=POOL_BYTES, engines_per_node=2, tiers=tiers, **PATIENT)
        with start(options, *TWO_ENGINES, "--kv-events-config", json.dumps(config), rank=0) as server:
            yield server

    @pytest.fixture(scope="class")
    def router(self, server: Server, ports: tuple[int, int]) -> Iterator[Any]:
        """The router of the examples, which takes the engines for servers."""
        engines = {f"engine {rank}": f"tcp://{HOST}:{port}" for rank, port in enumerate(ports)}
        with contextlib.closing(EXAMPLE.Router(engines)) as router:
            seeds = count(700)

            def has_joined(rank: int) -> bool:
                server.complete(fresh_prompts(next(seeds), 1)[0], rank, max_tokens=1)
                router.receive()
                return router.sequence[f"engine {rank}"] is not None

            for rank in range(2):
                # ZeroMQ subscribes in the background.
                assert eventually(partial(has_joined, rank))
            yield router

    @pytest.mark.usefixtures("router")
    def test_answers_of_both_are_right(self, server: Server, expected: list[Any]) -> None:
        assert BLOCKS_ASKED > 2 * DEVICE_BLOCKS
        for rank in range(2):
            check_rounds(server, expected, 2, rank)
        assert list(server.pools().values()) == [POOL_BYTES // 2] * 2
        assert server.kinds() == {name: spec.kind for name, spec in METRICS.items()}

    def test_explain_agrees_with_the_metrics(self, server: Server) -> None:
        """For each engine, which is selected by its process."""
        (prompt,) = fresh_prompts(900, 1)
        for rank in (0, 1, 0):
            server.complete(prompt, rank, max_tokens=1)
        metrics = [server.metrics(rank) for rank in range(2)]
        mine = {int(process.name) for process in server.processes()}
        engines = [engine for engine in _explain()["servers"] if engine["pid"] in mine]
        assert sorted(engine["name"][-4:] for engine in engines) == ["_dp0", "_dp1"]
        for engine in engines:
            report, counts = _explain("--pid", str(engine["pid"])), metrics[int(engine["name"][-1])]
            assert report["servers"] == [engine]
            total = report["total"]
            for name in ("device", "host"):
                assert total[f"{name}_tokens"] == counts[f"{name}_hit_tokens"]
            reasons = {name.partition(":")[2]: n for name, n in counts.items() if name.startswith("misses:") and n}
            assert total["misses"] == reasons
            if engine["name"].endswith("0"):
                records = [RequestRecord.from_dict(record) for record in report["records"]]
                new, again = [record for record in records if record.tokens_asked == len(prompt)][-2:]
                assert (new.device_sufficed, new.reason) == (False, MissReason.NEVER_STORED)
                assert (again.device_sufficed, again.device_tokens, again.host_tokens) == (True, HIT, 0)

    def test_what_one_has_written_the_other_loads(self, server: Server, router: Any) -> None:
        """The router knows before."""

        def is_loaded() -> bool:
            (prompt,) = fresh_prompts(next(seeds), 1)
            server.complete(prompt, 0)
            assert eventually(lambda: server.metrics(0) and router.choose(prompt)[1]["engine 1"] > 0)
            chosen, scores = router.choose(prompt)
            assert chosen == "engine 0"
            assert scores["engine 0"] > scores["engine 1"]
            _, grown = server.growth(lambda: server.complete(prompt, 1), 1)
            return grown["tier_hit_tokens:shared_dir"] >= HIT

        seeds = count(800)
        # A server follows what others write a moment later.
        assert eventually(is_loaded)

    def test_a_reset_with_the_connector_empties_the_pools(
        self, server: Server, router: Any, expected: list[Any]
    ) -> None:
        """A reset without the connector does not."""
        for rank in range(2):
            server.round(PROMPTS, rank=rank)
        server.forget_device_blocks()
        used = [server.metrics(rank)["pool_used_blocks"] for rank in range(2)]
        # It may have come after some of the blocks.
        assert eventually(lambda: router.receive() or used[0] / 2 < len(in_host(router)) <= used[0])
        assert min(used) > 0
        assert eventually(lambda: server.post("/reset_prefix_cache?reset_external=true")["success"])
        # No request makes the server run a step.
        assert eventually(lambda: [server.scrape(rank)["pool_used_blocks"] for rank in range(2)] == [0, 0])
        assert eventually(lambda: router.receive() or not in_host(router))
        assert differences(server.round(PROMPTS), expected) == []
        assert server.metrics()["pool_used_blocks"] > 0

    def test_sleep_keeps_the_pool(self, server: Server, expected: list[Any]) -> None:
        """On CPU a worker keeps its memory. The rest of vLLM's sleep runs: the scheduler is paused, and
        ``EngineCore._reset_caches`` resets the prefix cache and the connector."""
        server.round(PROMPTS)
        used = server.metrics()["pool_used_blocks"]
        server.post("/sleep?level=1")
        assert json.loads(server.get("/is_sleeping")) == {"is_sleeping": True}
        assert server.post("/wake_up")["status"] == "awake"
        assert server.metrics()["pool_used_blocks"] == used > 0
        check_rounds(server, expected, 1)

    # Request options.

    def test_a_request_that_is_not_to_be_stored_is_not(self, server: Server, control: list[Any]) -> None:
        """Not when its blocks leave the device either."""
        ask(server, control, 0, {"kvoffload": {"store": False}})
        assert ask(server, control, 0)["host_hit_tokens"] == 0
        # It may load what others have stored.
        assert ask(server, control, 0, {"kvoffload": {"store": False}})["host_hit_tokens"] == HIT
        server.forget_device_blocks()
        _, grown = server.growth(lambda: server.complete(CONTROL[0], cache_salt="a salt"))
        assert grown["host_hit_tokens"] == 0, "a salt names other blocks"

    def test_a_request_that_asks_about_its_whole_prompt_loads_nothing(self, server: Server, control: list[Any]) -> None:
        """vLLM computes what is missing in a cache, and there must be nothing in it."""
        ask(server, control, 1)
        server.forget_device_blocks()
        answer, grown = server.growth(lambda: server.complete(CONTROL[1], prompt_logprobs=0))
        assert differences([answer], [control[1]]) == []
        assert (grown["host_hit_tokens"], grown["misses:not_looked_up"]) == (0, 1)
        assert ask(server, control, 1)["host_hit_tokens"] == HIT

    def test_the_second_engine_goes_on_with_a_prompt_of_the_first(self, server: Server) -> None:
        (prompt,) = fresh_prompts(901, 1)
        prefill = server.request(prompt, 0, {"max_tokens": 1, "kv_transfer_params": dict(TO_HAND_OVER)})
        offered = server.client.completions.create(**prefill).model_extra["kv_transfer_params"]
        assert offered["kvoffload"]["handover"]["tokens"] == HIT
        answer, grown = server.growth(lambda: server.complete(prompt, 1, kv_transfer_params=offered), 1)
        assert grown["tier_hit_tokens:shared_dir"] == HIT
        server.forget_device_blocks()
        load_nothing = {"kv_transfer_params": {"kvoffload": {"load": False}}}
        assert differences([answer], [server.complete(prompt, 1, **load_nothing)]) == []

    def test_sigterm_leaves_nothing(self, server: Server) -> None:
        """While requests run. All processes that held something of kvoffload end within 30 s, the others when the
        clients disconnect. vLLM's API server may wait for clients, with and without kvoffload."""
        check_sigterm(server)


def check_sigterm(server: Server) -> None:
    processes = list(server.processes())
    listening = record_sockets()
    sockets = {process for process in processes if int(process.name) in listening}
    pools = server.pools().keys()
    holders = {process for process in processes if memory_files(process)} | sockets
    named = set().union(*map(named_segments, processes))
    assert pools
    assert sockets
    with load(server) as clients:
        server.process.terminate()
        assert eventually(lambda: holders.isdisjoint(server.processes()), 30), server.log()[-6000:]
        clients.hang_up()
        assert eventually(lambda: server.process.poll() is not None and not list(server.processes()), 30)
    assert not [path for path in named if path.exists()]
    assert not [path for path in Path("/dev/shm").iterdir() if "kvoffload" in path.name]
    # vLLM may kill an engine that is busy. The next server removes the socket that is left then.
    assert record_sockets().keys().isdisjoint(int(process.name) for process in processes)
    RecordServer(list, "next").close()
    assert not [path for process in sockets for path in listening[int(process.name)] if path.exists()]
    assert not any(pools & memory_files(process).keys() for process in Path("/proc").glob("[0-9]*"))


@contextlib.contextmanager
def load(server: Server) -> Iterator[Clients]:
    """Runs clients that send PROMPTS and new prompts without end. Begins when stores have begun."""
    assert eventually(lambda: server.post("/reset_prefix_cache?reset_external=true")["success"])
    assert eventually(lambda: server.metrics()["pool_used_blocks"] == 0)

    def prompts(client: int) -> Iterator[list[int]]:
        for i in count(client):
            yield PROMPTS[i % len(PROMPTS)]
            yield from fresh_prompts(100 * client + i, 1)

    clients = Clients(server, map(prompts, range(6)))
    try:
        assert eventually(lambda: server.metrics()["pool_used_blocks"] > 0)
        yield clients
    finally:
        clients.hang_up()


@pytest.mark.soak
def test_a_pause_keeps_blocks_and_a_reset_the_store_while_weights_stay(
    start: Start, expected: list[Any], run: Runner, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    run.write_model(other, seed=1)
    tiers = [{"kind": "shared_dir", "dir": str(tmp_path / "shared"), "bytes": "64MiB"}]
    with start(flag(host_bytes=POOL_BYTES, tiers=tiers, **PATIENT)) as server:

        def ask() -> tuple[list[Any], dict[str, float]]:
            answers, grown = server.growth(lambda: server.round(PROMPTS))
            return answers, grown

        ask()
        assert eventually(lambda: server.metrics()["tier_write_blocks:shared_dir"] >= BLOCKS_ASKED // 2)
        assert server.post("/pause")["status"] == "paused"
        assert server.post("/resume")["status"] == "resumed"
        answers, grown = ask()
        assert differences(answers, expected) == []
        assert grown["host_hit_tokens"] > 0
        assert grown["misses:reset"] == 0

        assert eventually(lambda: server.post("/reset_prefix_cache?reset_external=true")["success"])
        assert eventually(lambda: server.scrape()["pool_used_blocks"] == 0)
        answers, grown = ask()
        assert differences(answers, expected) == []
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
        assert len(differences(right, expected)) == len(PROMPTS)
        assert differences(answers, right) == []


@pytest.mark.soak
def test_corrupted_bytes_change_answers(start: Start, expected: list[Any]) -> None:
    """The control of all comparisons here."""
    with start(flag("CorruptedKVOffloadConnector", host_bytes=POOL_BYTES)) as server:
        server.round(PROMPTS)
        server.forget_device_blocks()
        assert len(differences(server.round(PROMPTS), expected)) == len(PROMPTS)

"""The example of a router: its choice between two servers of real vLLM, from their KV events alone."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Not "vllm": a directory of that name on sys.path could be imported instead.
pytest.importorskip("vllm.version")
from driver import BLOCK_SIZE
from serve_harness import Server, flag
from vllm_harness import Runner, eventually

from demo.process import HOST, free_ports

pytestmark = pytest.mark.vllm

ROUTER = Path(__file__).parents[2] / "examples" / "router.py"


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("router", ROUTER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXAMPLE = load_example()
SEEDS = iter(range(100))


def fresh_prompt(blocks: int = 4) -> list[int]:
    """Returns a prompt of ``blocks`` blocks and a few tokens, which shares nothing with others."""
    tokens: list[int] = np.random.default_rng(next(SEEDS)).integers(5, 500, size=blocks * BLOCK_SIZE + 9).tolist()
    return tokens


# The index, without servers.


def stored(first: int, last: int, medium: str, **place: str) -> dict[str, Any]:
    """An event of blocks ``first`` to ``last`` of the prompt 0, 1, 2, ... in blocks of 16 tokens."""
    return {
        "type": "BlockStored",
        "block_hashes": list(range(first, last)),
        "parent_block_hash": first - 1 if first else None,
        "token_ids": list(range(first * 16, last * 16)),
        "block_size": 16,
        "medium": medium,
        **place,
    }


def removed(*names: int, medium: str, **place: str) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": medium, **place}


LOCAL, REMOTE = {"locality": "LOCAL", "ownership": "disk"}, {"locality": "REMOTE", "ownership": "shared_dir"}
PROMPT = list(range(70))


def test_the_longest_prefix_wins_and_faster_media_count_more() -> None:
    index = EXAMPLE.Index(["a", "b"])
    index.take("a", stored(0, 4, "CPU"))
    index.take("b", stored(0, 4, "GPU"))
    scores = index.scores(PROMPT)
    assert scores["b"] > scores["a"] > 0
    index.take("b", removed(1, medium="GPU"))
    scores = index.scores(PROMPT)
    assert scores["a"] > scores["b"] > 0, "what is behind a hole cannot be used"
    assert index.scores([7, *PROMPT]) == {"a": 0, "b": 0}


def test_a_block_in_several_media_counts_as_in_the_fastest() -> None:
    index = EXAMPLE.Index(["a", "b"])
    index.take("a", stored(0, 2, "CPU"))
    expected = index.scores(PROMPT)["a"]
    index.take("a", stored(0, 2, "STORAGE", **LOCAL))
    assert index.scores(PROMPT)["a"] == expected
    index.take("a", removed(0, 1, medium="CPU"))
    assert 0 < index.scores(PROMPT)["a"] < expected
    index.take("a", removed(0, 1, medium="STORAGE", **LOCAL))
    assert index.scores(PROMPT)["a"] == 0


def test_every_server_reads_a_shared_tier_but_only_one_its_disk() -> None:
    index = EXAMPLE.Index(["a", "b"])
    index.take("a", stored(0, 2, "STORAGE", **REMOTE))
    shared = index.scores(PROMPT)
    assert shared["a"] == shared["b"] > 0
    index.take("a", stored(0, 2, "STORAGE", **LOCAL))
    scores = index.scores(PROMPT)
    assert scores["a"] > scores["b"] == shared["b"]
    index.take("b", removed(0, 1, medium="STORAGE", **REMOTE))
    assert index.scores(PROMPT)["b"] == 0


def test_a_block_named_by_its_hash_only_is_found_if_its_tokens_are_known() -> None:
    index = EXAMPLE.Index(["a", "b"])
    index.take("a", stored(0, 2, "CPU"))
    nothing = {"token_ids": [], "block_size": 0, "parent_block_hash": None}
    index.take("b", stored(0, 2, "STORAGE", **LOCAL) | nothing)
    assert index.scores(PROMPT)["b"] > 0


def test_a_server_whose_events_were_lost_is_forgotten() -> None:
    index = EXAMPLE.Index(["a", "b"])
    index.take("a", stored(0, 2, "CPU"))
    index.forget("a")
    assert index.scores(PROMPT) == {"a": 0, "b": 0}


# Two servers.


@pytest.fixture(scope="module")
def fleet(run: Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, list[Server]]]:
    """A router that has seen events of both its servers, each with a disk of its own above a directory that they
    share."""
    directory = tmp_path_factory.mktemp("router")
    shared = directory / "shared"
    shared.mkdir(mode=0o700)
    model = directory / "model"
    run.write_model(model)
    with contextlib.ExitStack() as opened, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "0")
        servers, endpoints = [], {}
        for i in range(2):
            (port,), disk = free_ports(1), directory / f"disk{i}"
            disk.mkdir()
            config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}", "topic": ""}
            tiers = [{"kind": "disk", "dir": str(disk)}, {"kind": "shared_dir", "dir": str(shared)}]
            options: dict[str, Any] = {"host_bytes": "16MiB", "tiers": [tier | {"bytes": "64MiB"} for tier in tiers]}
            server = Server(
                model,
                directory / f"{i}.log",
                flag(**options, load_only_if_faster=False),
                ["--kv-events-config", json.dumps(config)],
                run,
            )
            opened.callback(server.close)
            servers.append(server)
            endpoints[server.url] = f"tcp://{HOST}:{port}"
        for server in servers:
            opened.enter_context(server)
        router = EXAMPLE.Router(endpoints)
        opened.callback(router.close)
        for server in servers:
            assert eventually(partial(seen, router, server)), "no events arrive"
        yield router, servers


def seen(router: Any, server: Server) -> bool:
    """Whether the router learns of a new prompt on ``server``. ZeroMQ subscribes in the background."""
    server.complete(fresh_prompt(), max_tokens=1)
    router.receive()
    return router.sequence[server.url] is not None


def ask(router: Any, server: Server, tokens: list[int]) -> str:
    """Sends the prompt through the router. Returns the URL of the server that it chose."""
    chosen, _, answer = router.complete(server.model, tokens, max_tokens=4)
    assert answer["choices"]
    return str(chosen)


def is_known(router: Any, prompt: list[int], server: Server) -> bool:
    return bool(router.choose(prompt)[1][server.url] > 0)


def test_a_prompt_goes_to_the_server_that_has_seen_it(fleet: tuple[Any, list[Server]]) -> None:
    router, servers = fleet
    for server in servers:
        prompt = fresh_prompt()
        server.complete(prompt)
        assert eventually(partial(is_known, router, prompt, server))
        follow_up = [*prompt[: 4 * BLOCK_SIZE], *fresh_prompt(1)]
        assert ask(router, server, follow_up) == server.url
        device_hits = server.metrics()["device_hit_tokens"]
        assert device_hits > 0


def test_what_one_server_has_written_to_the_shared_directory_counts_for_both(fleet: tuple[Any, list[Server]]) -> None:
    router, (first, second) = fleet
    prompt = fresh_prompt()
    unseen = router.choose(prompt)[1][second.url]
    first.complete(prompt)
    assert unseen == 0
    assert eventually(lambda: first.metrics() and router.choose(prompt)[1][second.url] > 0)
    scores = router.choose(prompt)[1]
    assert scores[first.url] > scores[second.url]


def test_a_shared_block_that_counts_for_a_server_is_loaded_by_it(fleet: tuple[Any, list[Server]]) -> None:
    """The second server, which has never seen the prompt, loads what it was scored for."""
    router, (first, second) = fleet

    def is_loaded() -> bool:
        prompt = fresh_prompt()
        first.complete(prompt)
        assert eventually(lambda: first.metrics() and router.choose(prompt)[1][second.url] > 0)
        _, grown = second.growth(lambda: second.complete(prompt))
        return grown["tier_hit_tokens:shared_dir"] >= 4 * BLOCK_SIZE

    # A server follows what others write a moment later.
    assert eventually(is_loaded)
    _, grown = second.growth(lambda: second.complete(fresh_prompt()))
    assert grown["tier_hit_tokens:shared_dir"] == 0


def test_a_prompt_that_no_server_has_seen_goes_to_the_less_loaded(fleet: tuple[Any, list[Server]]) -> None:
    """The control: nothing but the load decides."""
    router, servers = fleet
    for busy, idle in (servers, servers[::-1]):
        router.load[busy.url] += 1
        chosen, scores = router.choose(fresh_prompt())
        router.load[busy.url] -= 1
        assert set(scores.values()) == {0}
        assert chosen == idle.url


def test_the_device_is_preferred_to_host_memory_and_that_to_the_disk(fleet: tuple[Any, list[Server]]) -> None:
    router, (near, far) = fleet
    prompt = fresh_prompt()
    for server in (near, far):
        server.complete(prompt)
    far.forget_device_blocks()
    assert eventually(lambda: held(router, far, prompt) == {"CPU", "STORAGE"}), "written through to the disk"
    assert eventually(lambda: held(router, near, prompt) == {"GPU", "CPU", "STORAGE"})
    _, scores = router.choose(prompt)
    assert scores[near.url] > scores[far.url] > 0
    assert ask(router, near, prompt) == near.url
    assert eventually(lambda: near.post("/reset_prefix_cache?reset_external=true")["success"])
    assert eventually(lambda: near.metrics() and held(router, near, prompt) == set())
    assert router.choose(prompt)[0] == far.url


def held(router: Any, server: Server, prompt: list[int]) -> set[str]:
    """The media, other than the shared directory, in which the router believes the whole prompt to be."""
    server.metrics()
    router.receive()
    chain = set(router.index.chain(prompt))
    assert len(chain) in (0, len(prompt) // BLOCK_SIZE)
    return {medium for (medium, _, _), names in router.index.held[server.url].items() if chain and chain <= names}

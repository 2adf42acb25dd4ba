"""RedisClient on a real Cluster of three nodes: names are where they belong, move, and survive the loss of a node."""

from __future__ import annotations

import binascii
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.tiers.redis import nodes as nodes_module
from kvoffload.tiers.redis.location import parse_url
from kvoffload.tiers.redis.login import Login
from kvoffload.tiers.redis.nodes import NUM_SLOTS, Nodes
from kvoffload.tiers.remote.client import Outcome, StoreError
from tests.tiers.redis.rig import HOST, FakeServer, RedisServer, make_client, names, needs_redis

pytestmark = needs_redis
DEADLINE_S = 60.0
KNOWN = names(60)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
    folder = tmp_path_factory.mktemp("cluster")
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "60000", "--cluster-require-full-coverage", "no")
    nodes = [RedisServer(folder / str(i), *options, tcp=True) for i in range(3)]
    addresses = [f"{HOST}:{node.port}" for node in nodes]
    subprocess.run(
        ["redis-cli", "--cluster", "create", *addresses, "--cluster-yes"], capture_output=True, check=True, timeout=60
    )
    deadline = time.monotonic() + DEADLINE_S
    while any(b"cluster_state:ok" not in cli(node, "INFO") for node in nodes):
        assert time.monotonic() < deadline, "the cluster never was ready"
        time.sleep(0.05)
    yield nodes
    for node in nodes:
        node.kill()


@pytest.fixture(autouse=True)
def _empty(nodes: list[RedisServer]) -> None:
    for node in nodes:
        node.raw().flushall()


def cli(node: RedisServer, *words: object) -> Any:
    """Returns the answer to a CLUSTER command, unchanged."""
    return node.raw().execute_command("CLUSTER", *words)


def slot_of(name: str) -> int:
    return binascii.crc_hqx(name.encode(), 0) % NUM_SLOTS


def owner(nodes: list[RedisServer], name: str) -> RedisServer:
    for begin, end, (_, port, *_), *_ in cli(nodes[0], "SLOTS"):
        if begin <= slot_of(name) <= end:
            return next(node for node in nodes if node.port == port)
    raise AssertionError(name)


def node_id(node: RedisServer) -> str:
    return str(cli(node, "MYID").decode())


def values(count: int, seed: int = 0) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [[rng.integers(0, 256, size, dtype=np.uint8) for size in (128, 5000)] for _ in range(count)]


def test_names_are_at_their_nodes(nodes: list[RedisServer]) -> None:
    client = make_client(f"redis://{HOST}:{nodes[1].port}")
    buffers = values(60)
    found = [[np.zeros_like(part) for part in parts] for parts in buffers]
    assert client.exists(KNOWN) == [Outcome.MISSING] * 60
    assert client.put(KNOWN, buffers) == [Outcome.OK] * 60
    assert client.get(KNOWN, found) == [Outcome.OK] * 60
    assert all((a == b).all() for one, two in zip(buffers, found, strict=True) for a, b in zip(one, two, strict=True))
    held = [node.raw().dbsize() for node in nodes]
    assert sum(held) == 60
    assert min(held) > 5
    assert client.put(KNOWN[:2], buffers[:2]) == [Outcome.HELD] * 2
    assert client.remove(KNOWN) == [Outcome.OK] * 60
    assert client.exists(KNOWN) == [Outcome.MISSING] * 60
    client.close()


def test_the_slot_of_a_name_is_that_of_the_server(nodes: list[RedisServer]) -> None:
    for name in KNOWN:
        assert cli(nodes[0], "KEYSLOT", name) == slot_of(name)


def test_names_that_move_are_found_at_once(nodes: list[RedisServer], monkeypatch: pytest.MonkeyPatch) -> None:
    client = make_client(f"redis://{HOST}:{nodes[0].port},{HOST}:{nodes[2].port}")
    buffers = values(60)
    client.put(KNOWN, buffers)
    name, slot = KNOWN[0], slot_of(KNOWN[0])
    old = owner(nodes, name)
    new = next(node for node in nodes if node is not old)
    found = [[np.zeros_like(part) for part in parts] for parts in buffers]

    # While a slot is moved, the old node asks for its names to be looked for at the new one.
    cli(new, "SETSLOT", slot, "IMPORTING", node_id(old))
    cli(old, "SETSLOT", slot, "MIGRATING", node_id(new))
    old.raw().execute_command("MIGRATE", HOST, new.port, name, 0, 5000)
    assert client.get(KNOWN, found) == [Outcome.OK] * 60
    assert client.exists(KNOWN) == [Outcome.OK] * 60
    assert client.put([name], buffers[:1]) == [Outcome.HELD]

    # Afterwards, it says that they have moved, until the client knows.
    for node in (new, old):
        cli(node, "SETSLOT", slot, "NODE", node_id(new))
    monkeypatch.setattr(nodes_module, "REFRESH_PAUSE_S", 0.0)
    found[0][0][:] = 0
    assert client.get([name], found[:1]) == [Outcome.OK]
    assert (found[0][0] == buffers[0][0]).all()
    before = old.raw().info("errorstats").get("errorstat_MOVED")
    assert before
    deadline = time.monotonic() + DEADLINE_S
    while True:
        assert client.remove([name]) in ([Outcome.OK], [Outcome.MISSING])
        now = old.raw().info("errorstats").get("errorstat_MOVED")
        if now == before:
            break
        assert time.monotonic() < deadline, "the client never asked which node has the name now"
        before = now
    client.close()


def test_a_node_that_is_gone_costs_its_names_only(
    nodes: list[RedisServer], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nodes_module, "REFRESH_PAUSE_S", 0.0)
    client = make_client(f"redis://{HOST}:{nodes[0].port}")
    client.put(KNOWN, values(60))
    lost = nodes[2].raw().dbsize()
    nodes[2].process.kill()
    nodes[2].process.wait()
    for _ in range(2):
        outcomes = client.exists(KNOWN)
        assert outcomes.count(Outcome.FAILED) == lost
        assert outcomes.count(Outcome.OK) == 60 - lost
        assert f"{HOST}:{nodes[2].port}" in capfd.readouterr().err
    nodes[2].start()
    deadline = time.monotonic() + DEADLINE_S
    while Outcome.FAILED in client.exists(KNOWN):
        assert time.monotonic() < deadline, "the client never used the node again"
        time.sleep(0.05)
    assert client.exists(KNOWN).count(Outcome.MISSING) == lost
    client.close()


def test_a_node_that_hangs_costs_its_names_only(
    nodes: list[RedisServer], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also if it is the first node that is asked which node has which names."""
    monkeypatch.setattr(nodes_module, "REST_S", DEADLINE_S)
    monkeypatch.setattr(nodes_module, "REFRESH_PAUSE_S", 0.0)
    client = make_client(f"redis://{HOST}:{nodes[1].port}", timeout_s=3.0)
    assert client.put(KNOWN, values(60)) == [Outcome.OK] * 60
    first = owner(nodes, min(KNOWN, key=slot_of))
    others = [node for node in nodes if node is not first]
    lost = first.raw().dbsize()
    capfd.readouterr()
    first.pause()
    try:
        for problem in ("does not answer in time", "is not asked for a while"):
            outcomes = client.exists(KNOWN)
            assert (outcomes.count(Outcome.FAILED), outcomes.count(Outcome.OK)) == (lost, 60 - lost)
            assert f"{HOST}:{first.port}: it" in (words := capfd.readouterr().err)
            assert problem in words
        seeds = ",".join(f"{HOST}:{node.port}" for node in (first, *others))
        monkeypatch.setattr(nodes_module, "START_TIMEOUT_S", 1.0)
        found = Nodes(parse_url(f"redis://{seeds}").seeds, Login("", None, 0, None))
        assert found.is_cluster
        found.close()
    finally:
        first.resume()
    client.close()


def test_redirects_without_an_end_fail() -> None:
    """A node that sends names to itself, again and again."""

    def script(words: list[bytes], send) -> None:  # type: ignore[no-untyped-def]
        port = int(server.url.rpartition(":")[2])
        if words[0] == b"CLUSTER":
            send(b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$-1\r\n:%d\r\n" % port)
        elif words[0] == b"EXISTS":
            send(b"-MOVED 77 :%d\r\n" % port)
        else:
            send(b"+OK\r\n")

    server = FakeServer(script, answers_setup=False)
    client = make_client(server.url)
    with pytest.raises(StoreError, match="names move from node to node"):
        client.exists(names(5))
    assert sum(words[0] == b"EXISTS" for words in server.commands) == 10
    client.close()
    server.close()


def test_a_cluster_without_slots_is_named(tmp_path: Path) -> None:
    node = RedisServer(tmp_path / "node", "--cluster-enabled", "yes", tcp=True)
    with pytest.raises(StoreError, match="has no nodes with slots yet"):
        make_client(node.url)
    node.kill()

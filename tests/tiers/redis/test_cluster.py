"""RedisClient on a real Cluster of three nodes: names are where they belong, move, and survive the loss of a node."""

from __future__ import annotations

import binascii
import itertools
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvoffload.tiers.redis.location import parse_url
from kvoffload.tiers.redis.login import Login
from kvoffload.tiers.redis.nodes import NUM_SLOTS, Nodes, NodeTimes
from kvoffload.tiers.remote.client import Outcome, StoreError
from tests.tiers.made import closed_later
from tests.tiers.redis.rig import HOST, FakeServer, RedisServer, emptied, make_client, names, needs_redis, same, values
from tests.tiers.remote.rig import DEADLINE_S, eventually

pytestmark = needs_redis
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
    eventually(lambda: all(b"cluster_state:ok" in cli(node, "INFO") for node in nodes))
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


def name_in_slot(slot: int) -> str:
    return next(name for i in itertools.count() for name in names(1, i) if slot_of(name) == slot)


def owner(nodes: list[RedisServer], name: str) -> RedisServer:
    for begin, end, (_, port, *_), *_ in cli(nodes[0], "SLOTS"):
        if begin <= slot_of(name) <= end:
            return next(node for node in nodes if node.port == port)
    raise AssertionError(name)


def node_id(node: RedisServer) -> str:
    return str(cli(node, "MYID").decode())


def test_names_are_at_their_nodes(nodes: list[RedisServer]) -> None:
    client = make_client(f"redis://{HOST}:{nodes[1].port}")
    buffers = values(60, 128, 5000)
    found = emptied(buffers)
    assert client.exists(KNOWN) == [Outcome.MISSING] * 60
    assert client.put(KNOWN, buffers) == [Outcome.OK] * 60
    assert client.get(KNOWN, found) == [Outcome.OK] * 60
    assert same(buffers, found)
    assert all(cli(nodes[0], "KEYSLOT", name) == slot_of(name) for name in KNOWN)
    held = [node.raw().dbsize() for node in nodes]
    assert sum(held) == 60
    assert min(held) > 5
    assert client.put(KNOWN[:2], buffers[:2]) == [Outcome.HELD] * 2
    assert client.remove(KNOWN) == [Outcome.OK] * 60
    assert client.exists(KNOWN) == [Outcome.MISSING] * 60


def test_names_that_move_are_found_at_once(nodes: list[RedisServer]) -> None:
    times = NodeTimes(refresh_pause_s=0.0)
    client = make_client(f"redis://{HOST}:{nodes[0].port},{HOST}:{nodes[2].port}", times=times)
    buffers = values(60, 128, 5000)
    client.put(KNOWN, buffers)
    name, slot = KNOWN[0], slot_of(KNOWN[0])
    old = owner(nodes, name)
    new = next(node for node in nodes if node is not old)
    found = emptied(buffers)

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


def test_a_node_that_is_gone_costs_its_names_only(nodes: list[RedisServer], capfd: pytest.CaptureFixture[str]) -> None:
    client = make_client(f"redis://{HOST}:{nodes[0].port}", times=NodeTimes(refresh_pause_s=0.0))
    client.put(KNOWN, values(60, 128, 5000))
    lost = nodes[2].raw().dbsize()
    nodes[2].process.kill()
    nodes[2].process.wait()
    for _ in range(2):
        outcomes = client.exists(KNOWN)
        assert outcomes.count(Outcome.AWAY) == lost
        assert outcomes.count(Outcome.OK) == 60 - lost
        assert f"{HOST}:{nodes[2].port}" in capfd.readouterr().err
    nodes[2].start()
    eventually(lambda: Outcome.AWAY not in client.exists(KNOWN), "the client never used the node again")
    assert client.exists(KNOWN).count(Outcome.MISSING) == lost


def test_a_node_that_hangs_costs_its_names_only(nodes: list[RedisServer], capfd: pytest.CaptureFixture[str]) -> None:
    """Also if it is the first node that is asked which node has which names."""
    client = make_client(f"redis://{HOST}:{nodes[1].port}", times=NodeTimes(refresh_pause_s=0.0))
    assert client.put(KNOWN, values(60, 128, 5000)) == [Outcome.OK] * 60
    first = owner(nodes, min(KNOWN, key=slot_of))
    others = [node for node in nodes if node is not first]
    lost = first.raw().dbsize()
    capfd.readouterr()
    first.pause()
    try:
        for problem in ("no answer before the deadline", "blocks are misses, and it gets no requests"):
            outcomes = client.exists(KNOWN)
            assert (outcomes.count(Outcome.AWAY), outcomes.count(Outcome.OK)) == (lost, 60 - lost)
            assert f"{HOST}:{first.port}: " in (words := capfd.readouterr().err)
            assert problem in words
        seeds = ",".join(f"{HOST}:{node.port}" for node in (first, *others))
        times = NodeTimes(start_timeout_s=1.0)
        found = Nodes(parse_url(f"redis://{seeds}").seeds, Login("", None, 0, None), times)
        assert found.is_cluster
        found.close()
    finally:
        first.resume()
    eventually(lambda: client.exists(KNOWN) == [Outcome.OK] * 60)


def test_a_node_that_refuses_writes_is_read_and_the_others_are_written(nodes: list[RedisServer]) -> None:
    client = make_client(f"redis://{HOST}:{nodes[0].port}")
    full, buffers = owner(nodes, KNOWN[0]), values(60, 128, 5000)
    more, of_full = names(60, 1000), [name for name in names(60, 1000) if owner(nodes, name) is full]
    assert client.put(KNOWN, buffers) == [Outcome.OK] * 60
    full.raw().config_set("maxmemory", "1mb")
    try:
        for _ in range(2):
            outcomes = dict(zip(more, client.put(more, buffers), strict=True))
            assert {name for name in more if outcomes[name] is Outcome.AWAY} == set(of_full)
            assert client.exists(KNOWN) == [Outcome.OK] * 60
        assert full.raw().info("commandstats")["cmdstat_set"]["rejected_calls"] <= len(of_full), "it rests"
        assert client.put(of_full, buffers[: len(of_full)]) == [Outcome.AWAY] * len(of_full)
        for node in nodes:
            node.raw().config_set("maxmemory", "1mb")
        others = [name for name in names(60, 2000) if name not in of_full]
        assert set(client.put(others, buffers[: len(others)])) == {Outcome.FULL}, "all of the store is full"
    finally:
        for node in nodes:
            node.raw().config_set("maxmemory", "0")
    eventually(lambda: Outcome.OK in client.put(of_full[:1], buffers[:1]))


def test_a_node_that_has_left_the_cluster_is_not_asked_for_ever(nodes: list[RedisServer], tmp_path: Path) -> None:
    """Its names have moved to others, and it answers CLUSTERDOWN instead of saying where: while nothing was asked, a
    Cluster was made smaller, and the node reset."""
    options = ("--cluster-enabled", "yes", "--cluster-allow-replica-migration", "no")
    leaving = RedisServer(tmp_path / "leaving", *options, tcp=True)
    target, slot = nodes[0], slot_of(KNOWN[0])
    old = owner(nodes, KNOWN[0])
    cli(leaving, "MEET", HOST, target.port)
    eventually(lambda: known_to(leaving, nodes) and all(knows(node, leaving) for node in nodes))
    move_slot(slot, old, leaving)
    eventually(lambda: all(owner_port(node, slot) == leaving.port for node in nodes))
    eventually(lambda: b"cluster_state:ok" in cli(leaving, "INFO"))
    client = make_client(f"redis://{HOST}:{target.port}")
    buffers = values(60, 128, 5000)
    assert client.put(KNOWN, buffers) == [Outcome.OK] * 60
    assert leaving.raw().dbsize()

    leaving.raw().flushall()
    move_slot(slot, leaving, old)
    for node in nodes:
        cli(node, "FORGET", node_id(leaving))
    cli(leaving, "RESET", "HARD")
    assert Outcome.AWAY in client.exists(KNOWN), "the map was wrong, which this test is about"
    eventually(lambda: Outcome.AWAY not in client.put(KNOWN, buffers))
    assert client.exists(KNOWN) == [Outcome.OK] * 60


def owner_port(node: RedisServer, slot: int) -> int | None:
    return next((port for begin, end, (_, port, *_), *_ in cli(node, "SLOTS") if begin <= slot <= end), None)


def knows(node: RedisServer, other: RedisServer) -> bool:
    return any(node_id(other) in line and "handshake" not in line for line in cli(node, "NODES").decode().splitlines())


def known_to(node: RedisServer, others: Sequence[RedisServer]) -> bool:
    """Whether ``node`` knows which of the others has each slot."""
    return {port for _, _, (_, port, *_), *_ in cli(node, "SLOTS")} >= {other.port for other in others}


def move_slot(slot: int, old: RedisServer, new: RedisServer) -> None:
    """Gives an empty slot to another node."""
    cli(new, "SETSLOT", slot, "IMPORTING", node_id(old))
    cli(old, "SETSLOT", slot, "MIGRATING", node_id(new))
    for node in (new, old):
        cli(node, "SETSLOT", slot, "NODE", node_id(new))


def described(*nodes: tuple[bytes, int]) -> bytes:
    """Returns the answer of a Cluster whose nodes have one slot each, and the last one the rest."""
    parts = []
    for i, (host, port) in enumerate(nodes):
        end = NUM_SLOTS - 1 if i == len(nodes) - 1 else i
        parts.append(b"*3\r\n:%d\r\n:%d\r\n*2\r\n$%d\r\n%b\r\n:%d\r\n" % (i, end, len(host), host, port))
    return b"*%d\r\n" % len(parts) + b"".join(parts)


class FakeNode(FakeServer):
    """A node that describes its Cluster as a test says, and answers every other command with the next of ``answers``,
    or ``+OK``."""

    def __init__(self, answer: Callable[[list[bytes]], bytes], *others: tuple[bytes, int]) -> None:
        def script(words: list[bytes], send: Callable[[bytes], None]) -> None:
            if words[0] == b"CLUSTER":
                send(described(*others, (b"", self.port)))
            else:
                send(b"+OK\r\n" if words[0] in (b"CLIENT", b"AUTH") else answer(words))

        super().__init__(script, answers_setup=False)


@pytest.mark.parametrize("error", ["CLUSTERDOWN", "READONLY", "MASTERDOWN", "NOAUTH", "LOADING", "SOMETHINGNEW"])
def test_errors_that_are_not_about_a_value_make_the_map_stale(error: str) -> None:
    """With a bound on how often it is read."""
    node = FakeNode(lambda words: b"-%b no\r\n" % error.encode())
    client = make_client(node.url, times=NodeTimes(refresh_pause_s=DEADLINE_S))

    def asked() -> int:
        return sum(words[0] == b"CLUSTER" for words in node.commands)

    for _ in range(5):
        with pytest.raises(StoreError, match=error):
            client.exists(KNOWN)
    assert asked() == 2, "once at the start, once since"


def test_a_map_that_could_not_be_read_is_read_again() -> None:
    def script(words: list[bytes], send: Callable[[bytes], None]) -> None:
        send(maps.pop(0) if words[0] == b"CLUSTER" else b"+OK\r\n")

    server = FakeServer(script, answers_setup=False)
    port = int(server.url.rpartition(":")[2])
    # At the start, in vain, once since and once too often.
    maps = [described((b"", port)), b"-LOADING no\r\n", *[described((b"", port))] * 2]
    nodes = Nodes(parse_url(server.url).seeds, Login("", None, 0, None), NodeTimes(refresh_pause_s=0.0))
    closed_later(nodes)
    nodes.note_stale()
    for _ in range(3):
        assert list(nodes.split(KNOWN)) == [(HOST, port)]
    assert len(maps) == 1


def test_a_single_server_that_has_become_a_cluster_is_used_as_one() -> None:
    node = FakeNode(lambda words: b":1\r\n")
    is_single = True

    def script(words: list[bytes], send: Callable[[bytes], None]) -> None:
        if words[0] == b"CLUSTER":
            send(b"-ERR This instance has cluster support disabled\r\n" if is_single else described((b"", node.port)))
        else:
            send(b"+OK\r\n" if words[0] == b"CLIENT" else b"-MOVED 1 127.0.0.1:%d\r\n" % node.port)

    seed = FakeServer(script, answers_setup=False)
    client = make_client(seed.url, times=NodeTimes(refresh_pause_s=0.0))
    with pytest.raises(StoreError, match="other nodes this user may not ask for"):
        client.exists(KNOWN)
    is_single = False
    eventually(lambda: client.exists(KNOWN) == [Outcome.OK] * 60)


def test_a_node_that_names_thousands_of_others_costs_a_few_connections(capfd: pytest.CaptureFixture[str]) -> None:
    target = FakeServer(lambda words, send: send(b":1\r\n"))
    wanted = names(200)
    # All of these names are 127.0.0.1.
    zeros = iter(range(len(wanted)))
    node = FakeNode(lambda words: b"-MOVED 1 127.0.0.%b1:%d\r\n" % (b"0" * next(zeros), target.port))
    client = make_client(node.url)
    outcomes = client.exists(wanted)
    assert (outcomes.count(Outcome.OK), outcomes.count(Outcome.FAILED)) == (16, 184)
    assert "redirects names to more than 16 other nodes" in capfd.readouterr().err
    assert target.num_connections == 16


@pytest.mark.parametrize("host", [b"?", b"not a host"])
def test_a_node_without_an_address_costs_its_names_only(host: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    """Redis names a node "?" that has no hostname, if it is to name hostnames."""
    node = FakeNode(lambda words: b":1\r\n", (host, 6379))
    client = make_client(node.url)
    assert client.exists([name_in_slot(0), *KNOWN]) == [Outcome.AWAY] + [Outcome.OK] * len(KNOWN)
    assert "cluster-announce-hostname" in capfd.readouterr().err
    client.advice()
    assert [b"INFO", b"memory"] in node.commands, "the node with an address is asked"


def test_a_cluster_of_too_many_nodes_is_not_used() -> None:
    node = FakeNode(lambda words: b":1\r\n", *((b"127.1.%d.%d" % divmod(i, 256), 7000) for i in range(1100)))
    with pytest.raises(StoreError, match="has 1101 nodes, and 1024 is the most"):
        make_client(node.url)


@pytest.mark.parametrize("host", ["{socket}", "x/../{socket}", "trap", "evil\x1b[31m", "a b"])
def test_a_node_never_is_a_program_of_this_machine(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Unix socket would get the password, without TLS."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "trap"
    with socket.socket(socket.AF_UNIX) as trap:
        trap.bind(str(path))
        trap.listen()
        trap.setblocking(False)
        text = host.format(socket=path).encode()
        node = FakeNode(lambda words: b"-MOVED 1 %b:0\r\n" % text, (text, 0))
        client = make_client(node.url)
        outcomes = client.exists([name_in_slot(0), *KNOWN])
        assert outcomes == [Outcome.AWAY] + [Outcome.FAILED] * len(KNOWN)
        client.close()
        node.close()
        with pytest.raises(BlockingIOError):
            trap.accept()


def test_redirects_without_an_end_fail() -> None:
    """A node that sends names to itself, again and again."""
    node = FakeNode(lambda words: b"-MOVED 77 :%d\r\n" % node.port)
    client = make_client(node.url)
    with pytest.raises(StoreError, match="names were redirected twice"):
        client.exists(names(5))
    assert sum(words[0] == b"EXISTS" for words in node.commands) == 10

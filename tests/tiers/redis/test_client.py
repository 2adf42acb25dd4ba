"""RedisClient on a real server, in this process: outcomes, sizes, expiry, limits, and what it says about failures."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.tiers.redis import nodes as nodes_module
from kvoffload.tiers.redis.client import LOOKUP_TIMEOUT_S, TRANSFER_TIMEOUT_S, connect
from kvoffload.tiers.redis.config import RedisConfig
from kvoffload.tiers.redis.nodes import NodeTimes
from kvoffload.tiers.remote.client import Outcome, StoreError
from kvoffload.tiers.remote.link import LOOKUP_DEADLINE_S, TRANSFER_DEADLINE_S
from kvoffload.tiers.remote.worker import MORE_WITHIN_S, RETRY_WITHIN_S
from tests.tiers.made import closed_later
from tests.tiers.redis.rig import (
    HOST,
    FakeServer,
    RedisServer,
    emptied,
    free_port,
    make_client,
    names,
    needs_redis,
    same,
    values,
)

pytestmark = needs_redis

OK, MISSING, HELD, OTHER, FULL = (Outcome.OK, Outcome.MISSING, Outcome.HELD, Outcome.OTHER_SIZE, Outcome.FULL)


@pytest.fixture(scope="module")
def module_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"), tcp=True)
    yield server
    server.kill()


@pytest.fixture
def server(module_server: RedisServer) -> RedisServer:
    with module_server.raw() as raw:
        raw.flushall()
        raw.config_set("maxmemory", 0)
        raw.config_set("maxmemory-policy", "noeviction")
    return module_server


def test_timeouts_end_before_the_process_is_killed() -> None:
    assert RETRY_WITHIN_S + LOOKUP_TIMEOUT_S < LOOKUP_DEADLINE_S
    assert MORE_WITHIN_S + LOOKUP_TIMEOUT_S + TRANSFER_TIMEOUT_S < TRANSFER_DEADLINE_S


@pytest.mark.parametrize(
    ("transport", "sizes"), [("tcp", (128, 4096)), ("unix", (128, 100_000, 50_001, 7)), ("tcp", (128, 3 << 20))]
)
def test_values_come_back_as_they_were(server: RedisServer, transport: str, sizes: tuple[int, ...]) -> None:
    client = make_client(server.url if transport == "tcp" else f"unix://{server.socket}")
    known, buffers = names(9), values(9, *sizes)
    assert client.exists(known) == [MISSING] * 9
    assert client.get(known, emptied(buffers)) == [MISSING] * 9
    assert client.put(known[::2], buffers[::2]) == [OK] * 5
    assert client.exists(known) == [OK, MISSING] * 4 + [OK]
    found = emptied(buffers)
    assert client.get(known, found) == [OK, MISSING] * 4 + [OK]
    assert same(found[::2], buffers[::2])
    assert not any(part.any() for parts in found[1::2] for part in parts), "a miss has touched the buffers"
    with server.raw() as raw:
        assert raw.get(known[0]) == b"".join(part.tobytes() for part in buffers[0])
    # A value that is there stays.
    assert client.put(known[:2], values(2, *sizes, seed=1)) == [HELD, OK]
    assert client.get(known[:1], found[:1]) == [OK]
    assert same(found[:1], buffers[:1])
    assert client.remove(known) == [OK, OK, OK, MISSING, OK, MISSING, OK, MISSING, OK]
    assert client.exists(known) == [MISSING] * 9


def test_values_of_another_size_or_kind_leave_the_others_readable(server: RedisServer) -> None:
    client = make_client(server.url)
    known, buffers = names(6), values(6, 128, 70_000)
    client.put(known[4:], buffers[4:])
    with server.raw() as raw:
        raw.set(known[0], b"short")
        raw.set(known[1], b"")
        raw.set(known[2], b"x" * 100_000)
        raw.rpush(known[3], b"a list")
    found = emptied(buffers)
    assert client.get(known, found) == [OTHER] * 4 + [OK] * 2
    assert same(found[4:], buffers[4:])
    starts = [np.concatenate(parts).tobytes() for parts in found[:4]]
    assert starts[0] == b"short".ljust(len(starts[0]), b"\0"), "the beginning of a value says whose it is"
    assert starts[2] == b"x" * len(starts[2])
    assert not any(starts[1] + starts[3])
    assert client.put(known, buffers) == [HELD] * 6
    assert client.remove(known[:4]) == [OK] * 4
    with server.raw() as raw:
        assert len(raw.client_list()) == 2, "the connection went on to be used"


def test_values_expire_if_they_are_to(server: RedisServer) -> None:
    client, forever = make_client(server.url, ttl_s=1000), make_client(server.url)
    known, buffers = names(2), values(2, 128)
    client.put(known[:1], buffers[:1])
    forever.put(known[1:], buffers[1:])
    with server.raw() as raw:
        assert 990_000 < raw.pttl(known[0]) <= 1_000_000
        assert raw.pttl(known[1]) == -1
        # A hit does not extend the time: it is an upper bound of the age.
        raw.pexpire(known[0], 5000)
        assert client.get(known, emptied(buffers)) == [OK, OK]
        assert raw.pttl(known[0]) <= 5000
        raw.pexpire(known[0], 1)
        deadline = time.monotonic() + 10
        while client.exists(known) != [MISSING, OK]:
            assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("limit", "policy", "ttl_s", "words"),
    [
        ("0", "noeviction", None, "has no memory limit"),
        ("100mb", "noeviction", None, "once its 100 MiB are full, because maxmemory-policy is noeviction"),
        ("100mb", "volatile-lru", None, "because maxmemory-policy is volatile-lru"),
        ("100mb", "volatile-lru", 60, ""),
        ("100mb", "allkeys-lru", None, ""),
    ],
)
def test_the_log_says_at_start_how_the_server_uses_memory(
    server: RedisServer, limit: str, policy: str, ttl_s: int | None, words: str
) -> None:
    with server.raw() as raw:
        raw.config_set("maxmemory", limit)
        raw.config_set("maxmemory-policy", policy)
        before = raw.config_get("maxmemory*")
        client = connect(RedisConfig(url=server.url, ttl_s=ttl_s).settings())
        advice = client.advice()
        client.close()
        assert raw.config_get("maxmemory*") == before
    assert words in advice
    assert ("allkeys-lru, so that it evicts" in advice) == bool(words)
    assert len(advice.splitlines()) == bool(words)


def test_values_beyond_the_limit_of_the_server_fail(server: RedisServer) -> None:
    client = make_client(server.url)
    with server.raw() as raw:
        raw.config_set("proto-max-bulk-len", "1mb")
        try:
            with pytest.raises(StoreError, match=r"connection was lost|Protocol error"):
                client.put(names(1), values(1, 8 << 20))
        finally:
            raw.config_set("proto-max-bulk-len", "512mb")
    assert client.put(names(1), values(1, 1000)) == [OK]


def test_database_of_the_url(server: RedisServer) -> None:
    client = make_client(f"{server.url}/3")
    client.put(names(1), values(1, 128))
    with server.raw(db=3) as third, server.raw() as zeroth:
        assert third.exists(names(1)[0])
        assert not zeroth.exists(names(1)[0])
    client.close()
    with pytest.raises(StoreError, match="database 99 of the URL cannot be used"):
        make_client(f"{server.url}/99")


def test_several_hosts_must_be_a_cluster(server: RedisServer) -> None:
    with pytest.raises(StoreError, match=r"does not answer as a node of a Cluster .*name one server"):
        make_client(f"{server.url},localhost")


def test_connections_are_kept_bounded_and_replaced(server: RedisServer) -> None:
    client = make_client(server.url)
    known, buffers = names(4), values(4, 128, 1 << 16)
    client.put(known, buffers)

    def used() -> list[dict[str, Any]]:
        with server.raw() as raw:
            return [each for each in raw.client_list() if each["name"] == "kvoffload"]

    failures: list[object] = []

    def move() -> None:
        for _ in range(20):
            found = emptied(buffers)
            if client.get(known, found) != [OK] * 4 or not same(found, buffers):
                failures.append("wrong")

    threads = [threading.Thread(target=move) for _ in range(2 * nodes_module.MAX_CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert 1 <= len(used()) <= nodes_module.MAX_CONNECTIONS
    # Connections that the server has closed are not used again.
    with server.raw() as raw:
        raw.client_kill_filter(_type="normal", skipme=True)
    assert client.exists(known) == [OK] * 4
    assert len(used()) == 1
    client.close()
    # Nor are connections that were idle for too long.
    client = make_client(server.url, times=NodeTimes(max_idle_s=-1.0))
    assert client.exists(known) == [OK] * 4
    (before,) = used()
    assert client.exists(known) == [OK] * 4
    assert [each["id"] for each in used()] != [before["id"]]
    client.close()
    assert used() == []


def test_a_server_that_stands_still(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / "redis")
    client, patient = make_client(server.url, 0.3, NodeTimes(server_rest_s=0.0)), make_client(server.url)
    usual = make_client(server.url, 0.3)
    known, buffers = names(2), values(2, 128, 1 << 20)
    assert patient.put(known, buffers) == [OK, OK]
    server.pause()
    calls: list[Callable[[], object]] = [
        lambda: client.exists(known),
        lambda: client.get(known, emptied(buffers)),
        lambda: client.put(names(64, first=5), values(64, 1 << 20)),
    ]
    for call in calls:
        with pytest.raises(StoreError, match=r"(no answer|it took no more data) before the deadline$"):
            call()
    # Usually, calls behind one that was not answered fail at once.
    for problem in ("no answer before the deadline", "blocks are misses, and it gets no requests"):
        with pytest.raises(StoreError, match=problem):
            usual.exists(known)
    server.resume()
    assert client.exists(known) == [OK, OK]
    found = emptied(buffers)
    assert patient.get(known, found) == [OK, OK]
    assert same(found, buffers)


# Logins at a real server: passwords, users with few permissions, and TLS. No password is in a message.

ADMIN, PASSWORD = "the-admin-password", "the-users-password"
MINIMAL = "~kv/* resetchannels -@all +exists +get +set +unlink"
"""The permissions that docs/shared.md names for one server."""


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    locked = RedisServer(tmp_path_factory.mktemp("redis"), "--requirepass", ADMIN)
    with locked.raw(password=ADMIN) as raw:
        raw.execute_command("ACL", "SETUSER", "least", "on", f">{PASSWORD}", *MINIMAL.split())
        raw.execute_command("ACL", "SETUSER", "elsewhere", "on", f">{PASSWORD}", "~other/*", "+@all")
    yield locked
    locked.kill()


def secret(folder: Path, text: str) -> str:
    path = folder / "secret"
    path.write_text(text)
    return str(path)


def works(settings_of: RedisConfig) -> bool:
    client = connect(settings_of.settings())
    buffer = np.arange(200, dtype=np.uint8)
    found = np.zeros_like(buffer)
    try:
        return (
            client.put(names(1), [[buffer]]) == client.get(names(1), [[found]]) == client.exists(names(1))
            and client.remove(names(1)) == [Outcome.OK]
            and bool((found == buffer).all())
        )
    finally:
        client.close()


def test_the_permissions_of_the_docs_are_enough(locked: RedisServer, tmp_path: Path) -> None:
    path = secret(tmp_path, f"  {PASSWORD}\n")
    assert works(RedisConfig(url=locked.url, username="least", password_file=path))
    page = (Path(__file__).parents[3] / "docs" / "shared.md").read_text()
    assert MINIMAL.replace("~kv/", "~kvoffload/") in page


@pytest.mark.parametrize(
    ("user", "password", "words"),
    [
        ("", None, "it wants a password; set password_file"),
        ("", "wrong-one", "does not accept the password in password_file, or has"),
        ("nobody-of-this-name", PASSWORD, "the password in password_file for username='nobody-of-this-name'"),
        ("elsewhere", PASSWORD, "the user lacks a permission; docs/shared.md"),
    ],
)
def test_a_login_that_fails_says_why(
    locked: RedisServer, tmp_path: Path, user: str, password: str | None, words: str
) -> None:
    path = None if password is None else secret(tmp_path, password)
    config = RedisConfig(url=locked.url, username=user, password_file=path)
    with pytest.raises(StoreError, match=words) as caught:
        connect(config.settings()).exists(names(1))
    assert (password or ADMIN) not in f"{caught.value}{caught.value.__cause__!r}"


def test_a_password_that_was_changed_is_read_again(locked: RedisServer, tmp_path: Path) -> None:
    path = secret(tmp_path, PASSWORD)
    with locked.raw(password=ADMIN) as raw:
        raw.execute_command("ACL", "SETUSER", "changing", "on", f">{PASSWORD}", *MINIMAL.split())
        client = make_client(locked.url, username="changing", password_file=path)
        assert client.exists(names(1)) == [Outcome.MISSING]
        raw.execute_command("ACL", "SETUSER", "changing", "resetpass", ">another-password")
        raw.client_kill_filter(_type="normal", skipme=True)
        with pytest.raises(StoreError, match="does not accept"):
            client.exists(names(1))
        secret(tmp_path, "another-password")
        assert client.exists(names(1)) == [Outcome.MISSING]
        Path(path).unlink()
        raw.client_kill_filter(_type="normal", skipme=True)
        with pytest.raises(StoreError, match="cannot be read"):
            client.exists(names(1))


def test_a_server_that_repeats_the_password_does_not_bring_it_into_the_log(tmp_path: Path) -> None:
    fake = FakeServer(lambda words, send: send(b"-ERR unknown command, with args: " + b" ".join(words) + b"\r\n"))
    with pytest.raises(StoreError, match="does not accept") as caught:
        make_client(fake.url, password_file=secret(tmp_path, PASSWORD))
    assert PASSWORD not in f"{caught.value}{caught.value.__cause__!r}"


# TLS, with certificates that are made here.


class Authority:
    """Certificates in ``folder``, signed by ``ca.pem``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._openssl("req", "-x509", *self._new("ca"), "-subj", "/CN=test-ca", "-out", "ca.pem")

    def issue(self, name: str, host: str) -> None:
        kind = "IP" if host[0].isdigit() else "DNS"
        (self.folder / "names").write_text(f"subjectAltName={kind}:{host}")
        self._openssl("req", *self._new(name), "-subj", f"/CN={name}", "-out", "request.pem")
        signed = ("-CA", "ca.pem", "-CAkey", "ca-key.pem", "-CAcreateserial", "-extfile", "names")
        self._openssl("x509", "-req", "-in", "request.pem", *signed, "-out", f"{name}.pem")

    def _new(self, name: str) -> tuple[str, ...]:
        return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", f"{name}-key.pem")

    def _openssl(self, *words: str) -> None:
        subprocess.run(["openssl", *words], cwd=self.folder, capture_output=True, check=True)

    def path(self, name: str) -> str:
        return str(self.folder / name)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    authority = Authority(tmp_path_factory.mktemp("tls") / "ca")
    authority.issue("server", HOST)
    authority.issue("client", "client.test")
    return authority


@pytest.fixture(scope="module")
def tls(authority: Authority) -> Iterator[str]:
    """The URL of a server that wants certificates of its clients."""
    port = free_port()
    files = ("--tls-cert-file", "server.pem", "--tls-key-file", "server-key.pem", "--tls-ca-cert-file", "ca.pem")
    locked = RedisServer(authority.folder, "--tls-port", str(port), *files)
    yield f"rediss://{HOST}:{port}"
    locked.kill()


def connections(authority: Authority) -> list[str]:
    """Returns the ids of kvoffload's connections."""
    import redis

    with redis.Redis(unix_socket_path=authority.path("redis.sock")) as raw:
        return [each["id"] for each in raw.client_list() if each["name"] == "kvoffload"]


def test_tls_on_both_sides(tls: str, authority: Authority) -> None:
    config = RedisConfig(
        url=tls,
        ca_file=authority.path("ca.pem"),
        cert_file=authority.path("client.pem"),
        key_file=authority.path("client-key.pem"),
    )
    assert works(config)
    client = closed_later(connect(config.settings()))
    before = connections(authority)
    assert len(before) == 1
    buffers = values(4, 128, 3 << 20, 5000)
    found = emptied(buffers)
    assert client.put(names(4), buffers) == [Outcome.OK] * 4
    assert client.get(names(4), found) == [Outcome.OK] * 4
    assert same(buffers, found)
    # More values than a record has room for, on a connection that was used before.
    assert client.exists(names(3000)) == [Outcome.OK] * 4 + [Outcome.MISSING] * 2996
    assert client.remove(names(4)) == [Outcome.OK] * 4
    assert connections(authority) == before, "the connection was not used again"


def test_tls_without_what_it_needs(tls: str, authority: Authority) -> None:
    ca = authority.path("ca.pem")
    with pytest.raises(StoreError, match=r"certificate verify failed.*set ca_file"):
        connect(RedisConfig(url=tls).settings())
    with pytest.raises(StoreError, match=r"certificate required|closed the connection|connection was lost|EOF"):
        connect(RedisConfig(url=tls, ca_file=ca).settings()).exists(names(1))
    with pytest.raises(StoreError, match="certificate verify failed"):
        connect(RedisConfig(url=tls.replace(HOST, "localhost"), ca_file=ca).settings())
    with pytest.raises(StoreError, match="write rediss:// if it wants TLS"):
        connect(RedisConfig(url=tls.replace("rediss", "redis")).settings())


def test_a_file_that_was_spoiled_later_is_named(authority: Authority, tls: str) -> None:
    ca = authority.folder / "other-ca.pem"
    ca.write_bytes((authority.folder / "ca.pem").read_bytes())
    settings = RedisConfig(url=tls, ca_file=str(ca)).settings()
    ca.write_text("spoiled")
    with pytest.raises(StoreError, match=r"ca_file=.*no certificates"):
        connect(settings)

"""Logins at a real server: passwords, users with few permissions, and TLS. No password is in a message."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvoffload.tiers.redis.client import connect
from kvoffload.tiers.redis.config import RedisConfig
from kvoffload.tiers.remote.client import Outcome, StoreError
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

ADMIN, PASSWORD = "the-admin-password", "the-users-password"
MINIMAL = "~kv/* resetchannels -@all +exists +get +set +unlink"
"""The permissions that docs/shared.md names for one server."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"), "--requirepass", ADMIN)
    with server.raw(password=ADMIN) as raw:
        raw.execute_command("ACL", "SETUSER", "least", "on", f">{PASSWORD}", *MINIMAL.split())
        raw.execute_command("ACL", "SETUSER", "elsewhere", "on", f">{PASSWORD}", "~other/*", "+@all")
    yield server
    server.kill()


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


def test_the_permissions_of_the_docs_are_enough(server: RedisServer, tmp_path: Path) -> None:
    path = secret(tmp_path, f"  {PASSWORD}\n")
    assert works(RedisConfig(url=server.url, username="least", password_file=path))
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
    server: RedisServer, tmp_path: Path, user: str, password: str | None, words: str
) -> None:
    path = None if password is None else secret(tmp_path, password)
    config = RedisConfig(url=server.url, username=user, password_file=path)
    with pytest.raises(StoreError, match=words) as caught:
        connect(config.settings()).exists(names(1))
    assert (password or ADMIN) not in f"{caught.value}{caught.value.__cause__!r}"


def test_a_password_that_was_changed_is_read_again(server: RedisServer, tmp_path: Path) -> None:
    path = secret(tmp_path, PASSWORD)
    with server.raw(password=ADMIN) as raw:
        raw.execute_command("ACL", "SETUSER", "changing", "on", f">{PASSWORD}", *MINIMAL.split())
        client = make_client(server.url, username="changing", password_file=path)
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
    server = FakeServer(lambda words, send: send(b"-ERR unknown command, with args: " + b" ".join(words) + b"\r\n"))
    with pytest.raises(StoreError, match="does not accept") as caught:
        make_client(server.url, password_file=secret(tmp_path, PASSWORD))
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
    server = RedisServer(authority.folder, "--tls-port", str(port), *files)
    yield f"rediss://{HOST}:{port}"
    server.kill()


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

"""Connections to a server that have logged in."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvoffload.abc import ConfigError
from kvoffload.tiers.redis.location import Address, parse_url
from kvoffload.tiers.redis.stream import ErrorReply, Late, Lost, Reply, Stream, command
from kvoffload.tiers.remote.client import StoreError

CLIENT_NAME = "kvoffload"
CONNECT_TIMEOUT_S = 2.0
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))

_WORDS = {
    "NOAUTH": "it wants a password; set password_file, and username unless it is the default user's",
    "WRONGPASS": "it does not accept the password in password_file, or has no password set",
    "NOPERM": "the user lacks a permission; docs/shared.md says which are needed",
    "READONLY": "it is a replica; write the address of the primary",
    "LOADING": "it still loads its data",
    "MASTERDOWN": "it is a replica that has lost its primary; write the address of the primary",
    "MISCONF": "it accepts no writes, because it could not save its data; see the server's log",
    "CLUSTERDOWN": "the Cluster is down, or has no node for a part of the keys",
    "DENIED": "it is in protected mode, which accepts only clients of its own machine; set a password there",
    "MOVED": "it is a node of a Cluster, whose other nodes this user may not ask for; grant +cluster|slots",
}
"""Meanings of the error codes of servers."""


def explain(error: ErrorReply) -> str:
    """Returns the meaning of an error in words."""
    text = f'"{error.text}"'
    return f"{_WORDS[error.code]} ({text})" if error.code in _WORDS else f"it answers {text}"


def tls_context(ca_file: str | None, cert_file: str | None, key_file: str | None) -> ssl.SSLContext:
    """Returns the context of TLS. Raises ConfigError for a file without certificates, or without the key of its
    certificate."""
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError("ca_file", ca_file, f"no certificates in PEM format ({error})", "correct the file") from error
    if cert_file is not None:
        try:
            # An empty passphrase, because OpenSSL would ask a terminal for one.
            context.load_cert_chain(cert_file, key_file, password="")
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                "cert_file",
                cert_file,
                "it and key_file are no certificate with its private key in PEM "
                f"format, without a passphrase ({error})",
                "correct the files",
            ) from error
    return context


@dataclass(frozen=True, slots=True)
class Login:
    """How connections are made and log in. Has no password, which is read from its file each time."""

    username: str
    password_file: str | None
    database: int
    tls: ssl.SSLContext | None

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Login:
        """Returns the login for the fields of RedisConfig. Raises ConfigError."""
        location = parse_url(settings["url"])
        files = (settings["ca_file"], settings["cert_file"], settings["key_file"])
        tls = tls_context(*files) if location.has_tls else None
        return cls(settings["username"], settings["password_file"], location.database, tls)

    def connect(self, address: Address, deadline: float) -> Stream:
        """Returns a new connection to ``address``. Raises StoreError, by ``deadline`` of the monotonic clock."""
        try:
            stream = Stream(self._open(address, min(CONNECT_TIMEOUT_S, deadline - time.monotonic())), deadline)
        except (OSError, UnicodeError) as error:
            # UnicodeError: no name of a host.
            hint = ""
            if isinstance(error, ssl.SSLCertVerificationError):
                hint = (
                    "; set ca_file to the certificates that have signed the server's, and write the host in url as "
                    "the certificate names it"
                )
            raise StoreError(f"{address} cannot be reached ({error}){hint}") from error
        try:
            self._log_in(stream)
        except BaseException as error:
            stream.close()
            if not isinstance(error, StoreError):
                raise
            wants_tls = self.tls is None and isinstance(error, Lost) and not isinstance(error, Late)
            hint = "; write rediss:// if it wants TLS" if wants_tls else ""
            raise StoreError(f"{address}: {error}{hint}") from error
        return stream

    def _open(self, address: Address, timeout_s: float) -> socket.socket:
        if timeout_s <= 0:
            raise TimeoutError("there was no time left")
        with ExitStack() as opened:
            if not address.port:
                connection = opened.enter_context(socket.socket(socket.AF_UNIX))
                connection.settimeout(timeout_s)
                connection.connect(address.host)
            else:
                connection = opened.enter_context(socket.create_connection(address, timeout_s))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in _KEEPALIVE:
                    connection.setsockopt(socket.IPPROTO_TCP, option, value)
                if self.tls is not None:
                    connection = self.tls.wrap_socket(connection, server_hostname=address.host)
            opened.pop_all()
            return connection

    def _log_in(self, stream: Stream) -> None:
        if self.password_file is not None:
            try:
                password = Path(self.password_file).read_bytes().strip()
            except OSError as error:
                raise StoreError(f"password_file={self.password_file!r} cannot be read ({error.strerror})") from None
            user = [self.username.encode()] if self.username else []
            stream.send([command(b"AUTH", *user, password)])
            reply = stream.reply()
            if reply != b"OK":
                # Without the text of the answer, which may repeat the password.
                code = reply.code if isinstance(reply, ErrorReply) and reply.code in _WORDS else "WRONGPASS"
                whose = f" for username={self.username!r}" if self.username else ""
                raise StoreError(_WORDS[code].replace("password_file,", f"password_file{whose},"))
        if self.database:
            reply = self._ask(stream, b"SELECT", b"%d" % self.database)
            if reply != b"OK":
                raise StoreError(f"database {self.database} of the URL cannot be used ({_shown(reply)})")
        # For the server's list of clients.
        self._ask(stream, b"CLIENT", b"SETNAME", CLIENT_NAME.encode())

    def _ask(self, stream: Stream, *words: bytes) -> Reply:
        stream.send([command(*words)])
        return stream.reply()


def _shown(reply: Reply) -> str:
    return explain(reply) if isinstance(reply, ErrorReply) else "an unknown answer"

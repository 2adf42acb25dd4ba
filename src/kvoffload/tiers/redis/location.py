"""Where a Redis or Valkey server is: the option ``url``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from kvoffload.abc import ConfigError

DEFAULT_PORT = 6379
MAX_SEEDS = 64
_SEED = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
_TCP = re.compile(r"(rediss?)://([^/]+)(?:/([0-9]{1,5})?)?")
_NODE = re.compile(r"[A-Za-z0-9._:-]{1,255}")
_PORT = re.compile("[0-9]{1,5}")
_UNIX = re.compile(r"unix://(/[^?#@]+)")
_FIX = 'write url="redis://HOST:6379", or "rediss://HOST:6379" for TLS; several nodes of a Cluster with commas'


class Address(NamedTuple):
    """A server. ``port`` 0: ``host`` is the path of a Unix socket."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" if self.port else self.host


NOWHERE = Address("", 0)
"""Stands for a node that has parts of a Cluster's names, but no address by which it can be reached."""


@dataclass(frozen=True, slots=True)
class Location:
    """``seeds``: a server, or some nodes of a Cluster, which know the others."""

    seeds: tuple[Address, ...]
    has_tls: bool
    database: int


def parse_url(url: object) -> Location:
    """Returns the location that ``url`` names. Raises ConfigError, whose message has no password."""
    if not isinstance(url, str):
        raise ConfigError("url", url, "", _FIX)
    if "@" in url:
        raise ConfigError(
            "url",
            url,
            "has a user name or a password, and servers log their options",
            'leave them out, and write username="USER" and password_file="PATH" of a file with the password',
        )
    match = _UNIX.fullmatch(url)
    if match is not None:
        return Location((Address(match[1], 0),), has_tls=False, database=0)
    match = _TCP.fullmatch(url)
    found = [_SEED.fullmatch(each) for each in match[2].split(",")] if match is not None else [None]
    if match is None or not all(found):
        raise ConfigError("url", url, "", _FIX)
    seeds = tuple(Address(each[1].strip("[]"), int(each[2] or DEFAULT_PORT)) for each in found if each)
    if not all(0 < seed.port < 1 << 16 for seed in seeds):
        raise ConfigError("url", url, "ports are 1 to 65535", _FIX)
    if len(seeds) > MAX_SEEDS:
        raise ConfigError("url", url, "", f"write {MAX_SEEDS} nodes at most, which know the others")
    if len(seeds) > 1 and int(match[3] or 0):
        raise ConfigError("url", url, "a Cluster has one database only", f"leave out /{match[3]}")
    return Location(seeds, match[1] == "rediss", int(match[3] or 0))


def parse_address(text: str, named_by: Address) -> Address | None:
    """Returns the address in "HOST:PORT", a text of the server ``named_by``; None if it is malformed."""
    host, _, port = text.rpartition(":")
    return node_address(host, int(port), named_by) if _PORT.fullmatch(port) else None


def node_address(host: str, port: int, named_by: Address) -> Address | None:
    """Returns the address of a node that the server ``named_by`` has named, or None if it is none. A node that does not
    know its own host leaves it out. It is never a Unix socket: a server could choose a program of this machine, which
    would get the password without TLS."""
    host = host.strip("[]") or named_by.host
    return Address(host, port) if _NODE.fullmatch(host) and 0 < port < 1 << 16 else None

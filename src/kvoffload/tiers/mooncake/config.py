"""The entry of a Mooncake Store in a configuration."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import socket
from dataclasses import dataclass
from typing import Any

from kvoffload.abc import ConfigError
from kvoffload.host.limits import available_memory
from kvoffload.tiers.remote.config import RemoteTierConfig
from kvoffload.units import MIN_BUDGET, Amount, format_bytes, parse_bytes

PROTOCOLS = ("tcp", "rdma")
LIBRARIES = {
    "libcurl.so.4": "libcurl4",
    "libibverbs.so.1": "libibverbs1",
    "libnl-3.so.200": "libnl-3-200",
    "libnl-route-3.so.200": "libnl-route-3-200",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
}
"""Shared libraries that the client needs, whatever the protocol, and the Debian packages that have them."""
_MASTER = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:/\s\[\]]+):([0-9]{1,5})")


@dataclass(frozen=True)
class MooncakeConfig(RemoteTierConfig):
    """A Mooncake Store, whose master and segments run elsewhere."""

    kind = "mooncake"
    connect = "kvoffload.tiers.mooncake.client:connect"
    example = {"master": "10.0.0.5:50051"}
    client_bytes = 128 << 20

    master: str
    """Where the master serves requests, "HOST:PORT"."""
    metadata: str = "P2PHANDSHAKE"
    """The store's metadata server, the same for all its clients."""
    protocol: str = "tcp"
    devices: str = ""
    """RDMA devices, separated by commas. By default the client chooses."""
    host: str = ""
    """The name or address by which other clients of the store reach this node. By default the address that this node
    uses to reach the master. The client takes connections to this address only, to a name by all addresses."""
    segment_bytes: int = 0
    """Memory of this node for the store, shared by the node's engines. It is host memory beside ``host_bytes``; its
    blocks are lost when the server ends."""

    def __post_init__(self) -> None:
        match = _MASTER.fullmatch(self.master) if isinstance(self.master, str) else None
        if match is None or not 0 < int(match[2]) < 1 << 16:
            raise ConfigError("master", self.master, "", 'write the address of the master as "HOST:PORT"')
        if self.protocol not in PROTOCOLS:
            raise ConfigError("protocol", self.protocol, f"must be one of {', '.join(PROTOCOLS)}")
        for name, fix in (
            ("metadata", '"P2PHANDSHAKE", or the address of a metadata server'),
            ("devices", 'such as "mlx5_0,mlx5_1"'),
            ("host", 'such as "10.0.0.7"'),
        ):
            value = getattr(self, name)
            is_word = isinstance(value, str) and value.isprintable() and " " not in value
            if not is_word or (name == "metadata" and not value):
                raise ConfigError(name, value, "", f"write a string, {fix}")
        super().__post_init__()
        if self.segment_bytes != 0:
            object.__setattr__(self, "segment_bytes", parse_bytes("segment_bytes", self.segment_bytes, MIN_BUDGET))
        check_installed()

    @property
    def address(self) -> str:
        return self.master

    @property
    def memory_bytes(self) -> int:
        return self.segment_bytes

    def settings(self, engines: int = 1) -> dict[str, Any]:
        available = available_memory()
        if self.segment_bytes > available:
            raise ConfigError(
                "segment_bytes",
                Amount(self.segment_bytes),
                f"only {format_bytes(available)} of memory are available beside the host pools",
                "write less, or 0 to contribute nothing",
            )
        own = {"host": self.host or _own_address(self.master), "segment_bytes": self.segment_bytes // engines}
        return {**super().settings(engines), **own}


def check_installed() -> None:
    """Raises ConfigError if the client or a library that it needs is missing."""
    if importlib.util.find_spec("mooncake") is None:
        raise ConfigError(
            "kind",
            "mooncake",
            "the client of Mooncake Store is not installed",
            "run pip install mooncake-transfer-engine-non-cuda, or on a machine with CUDA pip "
            "install mooncake-transfer-engine",
        )
    missing = [package for library, package in LIBRARIES.items() if not _can_load(library)]
    if missing:
        raise ConfigError(
            "kind",
            "mooncake",
            "libraries are missing that its client needs",
            f"run apt-get install {' '.join(missing)}, or install your system's packages of these names",
        )


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _own_address(master: str) -> str:
    """Returns the address from which this node reaches the host of ``master``, as far as its routes tell."""
    host, _, port = master.rpartition(":")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()

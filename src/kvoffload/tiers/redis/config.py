"""The entry of a Redis or Valkey server in a configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvoffload.abc import ConfigError
from kvoffload.settings import absolute_path, check_whole_number
from kvoffload.tiers.redis.location import parse_url
from kvoffload.tiers.redis.login import tls_context
from kvoffload.tiers.redis.stream import MAX_VALUE_BYTES
from kvoffload.tiers.remote.config import RemoteTierConfig

_FILES = {
    "password_file": "/etc/kvoffload/redis-password",
    "ca_file": "/etc/kvoffload/redis-ca.pem",
    "cert_file": "/etc/kvoffload/redis.pem",
    "key_file": "/etc/kvoffload/redis-key.pem",
}
"""The settings that are paths, with examples."""


@dataclass(frozen=True)
class RedisConfig(RemoteTierConfig):
    """A Redis or Valkey server, or a Cluster of them. The client finds out whether it is a Cluster."""

    kind = "redis"
    connect = "kvoffload.tiers.redis.client:connect"
    example = {"url": "redis://10.0.0.5:6379"}
    max_value_bytes = MAX_VALUE_BYTES

    url: str
    """Where it is: "redis://HOST:PORT/DATABASE", "rediss://..." with TLS, or "unix:///PATH". Several nodes of a Cluster
    are separated by commas; one is enough, while it can be reached."""
    username: str = ""
    """The user that the client logs in as. By default the server's default user."""
    password_file: str | None = None
    """A file with the password; white space around it does not count. It is read at each login."""
    ca_file: str | None = None
    """Certificates, in PEM, that the server's certificate must be signed by. By default those of the system."""
    cert_file: str | None = None
    """The certificate, in PEM, that the client shows to a server that wants one."""
    key_file: str | None = None
    """The private key of ``cert_file``, without a passphrase."""
    ttl_s: int | None = None
    """Blocks are removed so many seconds after they were stored. By default the server decides what it evicts."""

    def __post_init__(self) -> None:
        location = parse_url(self.url)
        super().__post_init__()
        for name, example in _FILES.items():
            path = getattr(self, name)
            if path is not None:
                object.__setattr__(self, name, _readable(name, path, example))
        if not isinstance(self.username, str) or not self.username.isprintable() or " " in self.username:
            raise ConfigError("username", self.username, "", 'write the name of a user, such as username="kvoffload"')
        if self.username and self.password_file is None:
            raise ConfigError("username", self.username, "has no password", "add password_file, the path of a file")
        check_whole_number("ttl_s", self.ttl_s, 1)
        if not location.has_tls:
            for name in ("ca_file", "cert_file", "key_file"):
                if getattr(self, name) is not None:
                    raise ConfigError(
                        name,
                        getattr(self, name),
                        "is for TLS, which the url does not use",
                        "begin the URL with rediss://, or leave the file out",
                    )
        elif (self.cert_file is None) != (self.key_file is None):
            given = "cert_file" if self.key_file is None else "key_file"
            raise ConfigError(given, getattr(self, given), "", "write both cert_file and key_file, or none of them")
        else:
            tls_context(self.ca_file, self.cert_file, self.key_file)

    @property
    def address(self) -> str:
        return self.url


def _readable(setting: str, value: object, example: str) -> str:
    """Returns the absolute path of a file that can be read. It is not read here, because it may have a secret."""
    path = absolute_path(setting, value, example)
    if not os.path.isfile(path):
        raise ConfigError(setting, value, "there is no such file", "correct the path, or make the file")
    if not os.access(path, os.R_OK):
        raise ConfigError(setting, value, "this user cannot read the file", "change its owner or mode")
    return path

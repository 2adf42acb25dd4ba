"""The common part of the entries of remote stores."""

from __future__ import annotations

import logging
import re
import time
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from kvoffload.abc import ConfigError
from kvoffload.tiers.config import TierConfig, TierContext
from kvoffload.tiers.remote.messages import Setup
from kvoffload.tiers.remote.process import starter
from kvoffload.tiers.remote.record import RECORD_BYTES
from kvoffload.tiers.remote.tier import RemoteTier
from kvoffload.units import format_bytes

logger = logging.getLogger(__name__)

START_WAIT_S = 12.0
"""How long opening waits for the client of a store, so that the first requests find blocks. The start of a server waits
a little longer."""
MAX_PREFIX = 128
MIN_HMAC_KEY_BYTES = 32
_PREFIX = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")


@dataclass(frozen=True, kw_only=True)
class RemoteTierConfig(TierConfig):
    """A store that others use too, reached by a client in a process of its own. Subclasses call ``__post_init__``."""

    is_shared = True
    connect: ClassVar[str]
    """Import path "package.module:function" of the function that returns the StoreClient for ``settings``, to which
    ``value_bytes`` is added, the size of a block's value, and ``chained_groups``, the KV cache groups of which lookups
    want all blocks from the first one on."""
    max_value_bytes: ClassVar[int | None] = None
    """The largest value that the store takes. None: it takes values of any size."""

    prefix: str = "kvoffload"
    """The beginning of the names of all values."""
    hmac_key_file: str | None = None
    """A file with a secret of MIN_HMAC_KEY_BYTES or more, the same on all servers; white space around it does not
    count. Blocks are stored with an HMAC, and those without the right one are never loaded. By default whoever can
    write to the store can forge blocks."""

    def __post_init__(self) -> None:
        if not isinstance(self.prefix, str) or len(self.prefix) > MAX_PREFIX or not _PREFIX.fullmatch(self.prefix):
            raise ConfigError(
                "prefix",
                self.prefix,
                "",
                f'write at most {MAX_PREFIX} letters, digits and ._- such as prefix="kvoffload", '
                "with single slashes between them",
            )
        read_hmac_key(self.hmac_key_file)

    @property
    @abstractmethod
    def address(self) -> str:
        """Where the store is, for the log: without passwords."""

    @property
    def memory_bytes(self) -> int:
        """Host memory of this node that the client takes beside the host pools."""
        return 0

    client_bytes: ClassVar[int] = 0
    """Memory for the client itself, beside its imports, ``memory_bytes`` and the 48 MiB of any client. A process that
    takes more is ended: set it in a class whose client has large buffers."""

    def settings(self, engines: int = 1) -> Mapping[str, Any]:
        """Returns the argument of ``connect`` on a node with so many engines, plain JSON without secrets: by default
        ``prefix`` and the keys that only this kind of tier has. Raises ConfigError."""
        common = {each.name for each in fields(RemoteTierConfig)} - {"prefix"}
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in common}

    def open(self, context: TierContext) -> RemoteTier:
        """Starts the client and waits for it up to START_WAIT_S, unless its process ends before. Raises ConfigError if
        the store cannot have these blocks, or if another process cannot open a host pool."""
        payload_bytes = sum(pool.shape[1] for pool in context.pools)
        nbytes = RECORD_BYTES + payload_bytes
        if self.max_value_bytes is not None and nbytes > self.max_value_bytes:
            raise ConfigError(
                "kind",
                self.kind,
                f"a block has {format_bytes(nbytes)}, and a value of the store "
                f"{format_bytes(self.max_value_bytes)} at most",
                "use smaller blocks (--block-size, block_size_factor), or another kind of tier",
            )
        handles = tuple(handle for handle in context.handles if handle is not None)
        if len(handles) != len(context.pools):
            raise ConfigError(
                "kind",
                self.kind,
                f"the process of the store's client cannot open {len(context.pools) - len(handles)} "
                f"of the {len(context.pools)} host pools",
                "give build_scheduler HostPool.handle() of each pool, not its bytes",
            )
        setup = Setup(
            self.connect,
            {
                **self.settings(context.engines),
                "value_bytes": nbytes,
                "chained_groups": [i for i, group in enumerate(context.groups) if group.is_full],
            },
            handles,
            min(len(pool) for pool in context.pools),
            context.fingerprint,
            self.prefix,
            context.identity,
            self.hmac_key_file,
            self.client_bytes + self.memory_bytes // context.engines,
        )
        tier = RemoteTier(starter(setup, self.kind), payload_bytes, name=self.kind)
        deadline = time.monotonic() + START_WAIT_S
        while tier.is_starting and time.monotonic() < deadline:
            tier.wait(0.05)
            tier.poll()
        logger.info(
            "kvoffload: the %s tier is in %s, values under %s/; its client %s",
            self.kind,
            self.address,
            self.prefix,
            "is connected" if tier.stats().is_connected else "connects in the background",
        )
        return tier


def read_hmac_key(path: str | None) -> bytes:
    """Returns the HMAC key in the file ``path``; nothing for None. Raises ConfigError."""
    if path is None:
        return b""
    fix = "write the path of a file made with: openssl rand -hex 32"
    if not isinstance(path, str) or not path:
        raise ConfigError("hmac_key_file", path, "", fix)
    try:
        key = Path(path).expanduser().read_bytes().strip()
    except OSError as error:
        raise ConfigError("hmac_key_file", path, f"cannot be read ({error.strerror})", fix) from error
    if len(key) < MIN_HMAC_KEY_BYTES:
        raise ConfigError("hmac_key_file", path, f"has {len(key)} bytes, fewer than {MIN_HMAC_KEY_BYTES}", fix)
    return key

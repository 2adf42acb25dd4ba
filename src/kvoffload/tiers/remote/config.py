"""The common part of the entries of remote stores."""

from __future__ import annotations

import logging
import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kvoffload.abc import ConfigError, Tier
from kvoffload.tiers.config import TierConfig, TierContext

logger = logging.getLogger(__name__)

MAX_PREFIX = 128
MIN_HMAC_KEY_BYTES = 32
_PREFIX = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")


@dataclass(frozen=True, kw_only=True)
class RemoteTierConfig(TierConfig):
    """A store that others use too, reached by a client in a process of its own. Subclasses call ``__post_init__``."""

    connect: ClassVar[str]
    """Import path "package.module:function" of the function that returns the StoreClient for ``settings``, to which
    ``value_bytes`` is added, the size of a block's value, and ``chained_groups``, the KV cache groups of which lookups
    want all blocks from the first one on."""

    prefix: str = "kvoffload"
    """The beginning of the names of all values."""
    hmac_key_file: str | None = None
    """A file with a secret of MIN_HMAC_KEY_BYTES or more, the same on all servers; white space around it does not
    count. Blocks are stored with an HMAC, and those without the right one are never loaded. By default whoever can
    write to the store can forge blocks."""

    def __post_init__(self) -> None:
        if not isinstance(self.prefix, str) or len(self.prefix) > MAX_PREFIX or not _PREFIX.fullmatch(self.prefix):
            raise ConfigError(
                f"prefix={self.prefix!r}: write at most {MAX_PREFIX} letters, digits and ._- such as "
                'prefix="kvoffload", with single slashes between them'
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
    """Memory that the client takes for itself, beyond what its module imports, ``memory_bytes`` and the 48 MiB that any
    client may take. Its process is ended if it takes more: set it in a class whose client has large buffers."""

    @property
    def pins_memory(self) -> bool:
        """Whether the client pins the host pools, for RDMA."""
        return False

    @abstractmethod
    def settings(self, engines: int = 1) -> Mapping[str, Any]:
        """Returns the argument of ``connect`` on a node with so many engines: plain JSON without secrets. Raises
        ConfigError."""

    def open(self, context: TierContext) -> Tier:
        # Only here, because it imports what only servers need.
        from kvoffload.tiers.remote.record import RECORD_BYTES
        from kvoffload.tiers.remote.start import open_remote_tier

        values = {
            "value_bytes": RECORD_BYTES + sum(pool.shape[1] for pool in context.pools),
            "chained_groups": [i for i, group in enumerate(context.groups) if group.is_full],
        }
        tier = open_remote_tier(
            self.connect,
            {**self.settings(context.engines), **values},
            context,
            name=self.kind,
            prefix=self.prefix,
            hmac_key_file=self.hmac_key_file,
            client_bytes=self.client_bytes + self.memory_bytes // context.engines,
        )
        logger.info(
            "kvoffload: %s at %s, values under %s/; its client connects in the background",
            self.kind,
            self.address,
            self.prefix,
        )
        return tier


def read_hmac_key(path: str | None) -> bytes:
    """Returns the HMAC key in the file ``path``; nothing for None. Raises ConfigError."""
    if path is None:
        return b""
    fix = "write the path of a file made with: openssl rand -hex 32"
    if not isinstance(path, str) or not path:
        raise ConfigError(f"hmac_key_file={path!r}: {fix}")
    try:
        key = Path(path).expanduser().read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"hmac_key_file={path!r}: cannot be read ({error.strerror}); {fix}") from error
    if len(key) < MIN_HMAC_KEY_BYTES:
        raise ConfigError(f"hmac_key_file={path!r}: has {len(key)} bytes, fewer than {MIN_HMAC_KEY_BYTES}; {fix}")
    return key

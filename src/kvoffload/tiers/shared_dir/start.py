"""Opens a directory as a shared directory tier."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence

from kvoffload.abc import ByteArray, ConfigError
from kvoffload.cache.tenants import MakeShares
from kvoffload.tiers.disk.directory import DirectoryStorage
from kvoffload.tiers.disk.start import allow_descriptors
from kvoffload.tiers.disk.storage import SETTING_ERRORS, reason
from kvoffload.tiers.shared_dir.seats import GONE_AFTER_S
from kvoffload.tiers.shared_dir.tier import SharedDirTier


def open_shared_dir_tier(
    directory: str | os.PathLike[str],
    capacity_bytes: int,
    pools: Sequence[ByteArray],
    fingerprint: str,
    *,
    identity: Mapping[str, str] | None = None,
    policy: str = "lru",
    engines: int = 1,
    gone_after_s: float = GONE_AFTER_S,
    shares: MakeShares | None = None,
) -> SharedDirTier:
    """Opens ``directory``, which other servers use too, as a tier. Each of ``engines`` engines of a server calls this,
    and gets a seat of its own with an equal share of ``capacity_bytes``. ``shares``: what each tenant may take of it.

    Raises ConfigError if a setting is wrong or the directory cannot be used, and OSError if the medium fails: a server
    can continue without the tier then.
    """
    share = capacity_bytes // engines
    try:
        root = DirectoryStorage(directory)
    except ConfigError as error:
        raise ConfigError(f"{error}. All servers that share a directory run as the same user") from error
    try:
        if root.read_only:
            raise OSError(errno.EROFS, "the file system is mounted read-only")
        allow_descriptors(capacity_bytes, engines)
        return SharedDirTier(
            root,
            pools,
            fingerprint=fingerprint,
            capacity_bytes=share,
            identity=identity,
            policy=policy,
            gone_after_s=gone_after_s,
            shares=shares,
        )
    except OSError as error:
        root.close()
        if error.errno not in SETTING_ERRORS:
            raise
        raise ConfigError(
            f"dir={str(root.path)!r}: cannot be used ({reason(error)}); name a directory that this user can write to"
        ) from error
    except BaseException:
        root.close()
        raise

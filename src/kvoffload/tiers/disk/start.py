"""Opens a directory as a disk tier, shared with other engines of the same server if there are any."""

from __future__ import annotations

import errno
import logging
import os
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress

from kvoffload.abc import ConfigError
from kvoffload.tiers.config import TierContext
from kvoffload.tiers.disk.directory import LOCK_NAMES, DirectoryStorage
from kvoffload.tiers.disk.format import ENGINE_FOLDER, is_block_file, is_fingerprint
from kvoffload.tiers.disk.identities import log_unusable, write_identity
from kvoffload.tiers.disk.layout import SLAB_BYTES, check_capacity
from kvoffload.tiers.disk.storage import SETTING_ERRORS, Storage, reason
from kvoffload.tiers.disk.tier import DiskSettings, DiskTier

logger = logging.getLogger(__name__)

SPARE_DESCRIPTORS = 512
"""Files that the rest of the process may still want to open."""
_RAISING = threading.Lock()
"""Held while the limit of open files is raised."""


def open_disk_tier(directory: str | os.PathLike[str], capacity_bytes: int, context: TierContext) -> DiskTier:
    """Opens ``directory`` as a disk tier. Only the other engines of ``context`` may be using it too.

    If there are several engines, each has a folder ``engine-<number>`` and an equal share of ``capacity_bytes``. Raises
    ConfigError if a setting is wrong or the directory is in use, and OSError if the medium fails: a server can continue
    without the tier then.
    """
    engines, share = context.engines, capacity_bytes // context.engines
    storage = root = DirectoryStorage(directory)
    with closed_on_failure(root, "name a directory on a local, writable file system"):
        root.lock(shared=engines > 1)
        if not root.held_bytes():
            check_capacity(capacity_bytes, root.free_bytes())
        with root.alone() if engines > 1 else nullcontext():
            allow_descriptors(capacity_bytes, engines)
            if not root.read_only:
                _remove_other_layouts(root, engines)
            if engines > 1:
                share = (capacity_bytes - root.held_bytes(_is_in_engine_folder)) // engines
                if not root.read_only:
                    _remove_larger_shares(root, context.engine, share)
                folder = f"engine-{context.engine}"
                if root.read_only and folder not in root.folders():
                    raise OSError(errno.EROFS, "the file system is read-only, and holds no blocks of this engine")
                storage = DirectoryStorage(root.path / folder, root)
            return _open(storage, share, context)


@contextmanager
def closed_on_failure(root: DirectoryStorage, fix: str) -> Iterator[None]:
    """Closes the storage if the context fails. Raises ConfigError, with ``fix``, instead of an OSError that says that
    the setting is wrong."""
    try:
        yield
    except BaseException as error:
        root.close()
        if not isinstance(error, OSError) or error.errno not in SETTING_ERRORS:
            raise
        raise ConfigError("dir", str(root.path), f"cannot be used ({reason(error)})", fix) from error


def _open(storage: Storage, capacity_bytes: int, context: TierContext) -> DiskTier:
    """Opens the tier. Logs why other blocks of the model that are there cannot be used, and stores the identity."""
    # Before the tier removes them to make room.
    log_unusable("disk tier", [("", storage)], context.fingerprint, context.identity)
    settings = DiskSettings(context.fingerprint, capacity_bytes, context.policy, context.shares)
    tier = DiskTier(storage, context.pools, settings)
    if not storage.read_only:
        write_identity(storage, context.fingerprint, context.identity)
    return tier


def _is_in_engine_folder(folder: str, name: str) -> bool:
    return ENGINE_FOLDER.fullmatch(folder.partition("/")[0]) is not None


def allow_descriptors(capacity_bytes: int, engines: int) -> None:
    """Raises the soft limit of open files of this process, if possible, so that every slab can be open beside those of
    tiers that open at the same time. Raises ConfigError if the hard limit is too low."""
    slabs = capacity_bytes // engines // SLAB_BYTES
    with _RAISING:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        needed = len(os.listdir("/proc/self/fd")) + slabs + SPARE_DESCRIPTORS
        if soft == resource.RLIM_INFINITY:
            return
        most = sys.maxsize if hard == resource.RLIM_INFINITY else hard
        if most < needed:
            raise ConfigError(
                "bytes",
                capacity_bytes,
                f"this process may have {hard} files open and needs {needed}, one per GiB on disk "
                f"and {SPARE_DESCRIPTORS} to spare",
                f"raise the limit (ulimit -n {needed}), or give the tier fewer bytes",
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(needed, soft + slabs), most), hard))


def _remove_other_layouts(root: DirectoryStorage, engines: int) -> None:
    """Removes the blocks that a server with another number of engines has left, so that they do not count twice."""
    for folder in root.folders():
        match = ENGINE_FOLDER.fullmatch(folder)
        if match and (engines == 1 or int(match[1]) >= engines):
            _remove_engine(root, folder)
        elif is_fingerprint(folder) and engines > 1:
            _remove_folder(root, folder)


def _remove_larger_shares(root: DirectoryStorage, engine: int, share: int) -> None:
    """Removes the blocks of each other engine that has left more than ``share`` bytes, unless it is running."""
    for folder in root.folders():
        match = ENGINE_FOLDER.fullmatch(folder)
        if match and int(match[1]) != engine:
            with suppress(ConfigError):
                _remove_engine(root, folder, share)


def _remove_engine(root: DirectoryStorage, folder: str, most_bytes: int = -1) -> None:
    """Removes an engine's folder with its blocks if these take more than ``most_bytes``. Raises ConfigError if the
    engine is running."""
    with closing(DirectoryStorage(root.path / folder)) as other:
        if other.held_bytes() <= most_bytes:
            return
        other.lock()
        remove_blocks(other)
        for name in LOCK_NAMES:
            with suppress(FileNotFoundError):
                other.remove("", name)
    with suppress(OSError):
        root.remove_folder(folder)


def remove_blocks(storage: Storage) -> None:
    """Removes the blocks of all fingerprints, and no file that is not kvoffload's. Raises OSError."""
    for folder in storage.folders():
        if is_fingerprint(folder):
            _remove_folder(storage, folder)


def _remove_folder(storage: Storage, folder: str) -> None:
    for name in storage.files(folder):
        if is_block_file(name):
            storage.remove(folder, name)
    # Fails, as it should, if there are files of others in it.
    with suppress(OSError):
        storage.remove_folder(folder)

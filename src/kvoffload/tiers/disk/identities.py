"""Identities in the directory of a tier: the causes of each fingerprint in words, for people and for the log of servers
that cannot use its blocks."""

from __future__ import annotations

import errno
import logging
import mmap
from collections.abc import Iterable, Mapping

import numpy as np

from kvoffload.tiers.disk.format import IDENTITY_NAME, is_fingerprint
from kvoffload.tiers.disk.storage import Storage
from kvoffload.tiers.identity import explain_unusable, identity_text, parse_identity

logger = logging.getLogger(__name__)

IDENTITY_BYTES = 16 << 10
"""A longer identity is not stored. The budget has room for this much beside the blocks."""
MAX_LOGGED = 16
"""Fingerprints that the log explains."""


def write_identity(storage: Storage, fingerprint: str, identity: Mapping[str, str]) -> None:
    """Stores ``identity`` in the folder of ``fingerprint``. Raises OSError."""
    data = np.frombuffer(identity_text(identity).encode(), dtype=np.uint8)
    if not identity or data.size > IDENTITY_BYTES:
        return
    file = storage.open(fingerprint, IDENTITY_NAME, create=True)
    try:
        file.resize(0)
        if file.write([data], 0) < data.size:
            raise OSError(errno.ENOSPC, "the identity could not be written in full")
        file.sync()
    finally:
        file.close()


def read_identity(storage: Storage, fingerprint: str) -> dict[str, str]:
    """Returns the identity in the folder of ``fingerprint``, empty if none can be read."""
    try:
        file = storage.open(fingerprint, IDENTITY_NAME, fresh=True)
        try:
            page = np.frombuffer(mmap.mmap(-1, IDENTITY_BYTES), dtype=np.uint8)
            return parse_identity(page[: file.read([page], 0)].tobytes().decode("utf-8", "replace"))
        finally:
            file.close()
    except OSError:
        return {}


def _folders(storage: Storage) -> list[str]:
    """Returns the names of the fingerprints' folders, none if they cannot be listed."""
    try:
        return list(filter(is_fingerprint, storage.folders()))
    except OSError:
        return []


def log_unusable(
    directory: str, parts: Iterable[tuple[str, Storage]], fingerprint: str, identity: Mapping[str, str]
) -> list[str]:
    """Logs which blocks of the same model in ``parts`` of a directory, storages by name, cannot be used under
    ``fingerprint``, and why. ``directory``: its name in the log. Returns the logged texts. Raises OSError."""
    reasons: dict[str, str] = {}
    for name, storage in parts:
        for other in _folders(storage):
            if other != fingerprint and other not in reasons and len(reasons) < MAX_LOGGED:
                reason = explain_unusable(other, identity, read_identity(storage, other))
                if reason is not None:
                    reasons[other] = f"{name}: {reason}" if name else reason
    for reason in reasons.values():
        logger.warning("kvoffload: %s: %s", directory, reason)
    return list(reasons.values())

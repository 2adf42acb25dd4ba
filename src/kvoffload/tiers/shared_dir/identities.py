"""Identities in a shared directory: what each fingerprint depends on, for the log of servers that cannot use it."""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping

import numpy as np

from kvoffload.abc import ConfigError
from kvoffload.tiers.disk.format import IDENTITY_NAME, is_fingerprint
from kvoffload.tiers.disk.storage import Storage
from kvoffload.tiers.identity import explain_unusable, identity_text, parse_identity
from kvoffload.tiers.shared_dir.seats import aligned_buffer, seat_names

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
    """Returns the identity in the folder of ``fingerprint``, nothing if there is none that can be read."""
    try:
        file = storage.open(fingerprint, IDENTITY_NAME, fresh=True)
        try:
            page = aligned_buffer(IDENTITY_BYTES)
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


def log_unusable(root: Storage, fingerprint: str, identity: Mapping[str, str]) -> list[str]:
    """Logs which blocks of the same model in a shared directory cannot be used under ``fingerprint``, and why. Returns
    what it has logged. Raises OSError."""
    reasons: dict[str, str] = {}
    for name in seat_names(root):
        try:
            storage = root.child(name)
        except (OSError, ConfigError):
            continue
        try:
            for other in _folders(storage):
                if other != fingerprint and other not in reasons and len(reasons) < MAX_LOGGED:
                    reason = explain_unusable(other, identity, read_identity(storage, other))
                    if reason is not None:
                        reasons[other] = f"{name}: {reason}"
        finally:
            storage.close()
    for reason in reasons.values():
        logger.warning("kvoffload: shared directory: %s", reason)
    return list(reasons.values())

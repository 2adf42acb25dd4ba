"""Identities in the directory of a tier: the causes of each fingerprint in words, for people and for the log of servers
that cannot use its blocks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress

import numpy as np

from kvoffload.tiers.disk.format import IDENTITY_NAME, is_fingerprint
from kvoffload.tiers.disk.storage import Storage, read_fresh, write_file
from kvoffload.tiers.identity import explain_unusable, identity_text, parse_identity

logger = logging.getLogger(__name__)

IDENTITY_BYTES = 16 << 10
"""A longer identity is not stored. The budget has room for this much beside the blocks."""
MAX_LOGGED = 16
"""Fingerprints that the log explains."""


def write_identity(storage: Storage, fingerprint: str, identity: Mapping[str, str]) -> None:
    """Stores ``identity`` in the folder of ``fingerprint``, if the medium takes it: it is for the log only."""
    data = np.frombuffer(identity_text(identity).encode(), dtype=np.uint8)
    if identity and data.size <= IDENTITY_BYTES:
        try:
            write_file(storage, fingerprint, IDENTITY_NAME, data)
        except OSError as error:
            logger.debug("kvoffload: an identity cannot be written (%s)", error)


def read_identity(storage: Storage, fingerprint: str) -> dict[str, str]:
    """Returns the identity in the folder of ``fingerprint``, empty if none can be read."""
    try:
        data = read_fresh(storage, fingerprint, IDENTITY_NAME, IDENTITY_BYTES)
    except OSError:
        return {}
    return parse_identity(data.tobytes().decode("utf-8", "replace"))


def log_unusable(
    directory: str, parts: Iterable[tuple[str, Storage]], fingerprint: str, identity: Mapping[str, str]
) -> None:
    """Logs which blocks of the same model in ``parts`` of a directory, storages by name, cannot be used under
    ``fingerprint``, and why. ``directory``: its name in the log."""
    reasons: dict[str, str] = {}
    for name, storage in parts:
        folders: list[str] = []
        with suppress(OSError):
            folders = storage.folders()
        for other in filter(is_fingerprint, folders):
            if other != fingerprint and other not in reasons and len(reasons) < MAX_LOGGED:
                reason = explain_unusable(other, identity, read_identity(storage, other))
                if reason is not None:
                    reasons[other] = f"{name}: {reason}" if name else reason
    for reason in reasons.values():
        logger.warning("kvoffload: %s: %s", directory, reason)

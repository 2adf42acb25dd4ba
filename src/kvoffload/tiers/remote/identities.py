"""Identities in a store: the fingerprints of its blocks and their differences, in words for the log.

A store cannot list its names. So servers of one model leave their identities under numbered names, which depend on the
HMAC key if there is one: docs/formats.md has every byte.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator, Mapping

import numpy as np
from xxhash import xxh3_64_intdigest

from kvoffload.abc import ByteArray
from kvoffload.tiers.identity import MODEL, explain_unusable, identity_text, parse_identity
from kvoffload.tiers.remote.client import Outcome, StoreClient, StoreError
from kvoffload.tiers.remote.record import TAG_BYTES, ValueFormat

MAX_IDENTITIES = 32
"""Identities of one model that a store can have; later ones are not explained."""
IDENTITY_BYTES = 8192
_HEADER = struct.Struct("<QQ")
_FINGERPRINT = "fingerprint"


def announce(client: StoreClient, values: ValueFormat, identity: Mapping[str, str]) -> Iterator[str]:
    """Stores ``identity`` unless the store has it. Yields why blocks under other fingerprints cannot be used here."""
    if not identity:
        return
    fingerprint, hmac_key = values.fingerprint, values.hmac_key
    model = identity.get(MODEL, "").encode()
    digest = hmac.digest(hmac_key, b"identity" + model, "sha256") if hmac_key else hashlib.sha256(model).digest()
    folder = f"{values.prefix}/identities/{digest.hex()[:16]}"
    names = [f"{folder}/{number}" for number in range(MAX_IDENTITIES)]
    rows = np.zeros((MAX_IDENTITIES, IDENTITY_BYTES), dtype=np.uint8)
    try:
        client.register(rows)
        outcomes = client.get(names, [[row] for row in rows])
        found = [
            _parse(row, hmac_key) if outcome is Outcome.OK else {} for row, outcome in zip(rows, outcomes, strict=True)
        ]
        if Outcome.MISSING in outcomes and all(each.get(_FINGERPRINT) != fingerprint for each in found):
            text = identity_text({**identity, _FINGERPRINT: fingerprint}).encode()
            if len(text) <= IDENTITY_BYTES - _HEADER.size - TAG_BYTES:
                row = rows[0]
                row[:] = np.frombuffer(_value(text, hmac_key), dtype=np.uint8)
                free = [name for name, outcome in zip(names, outcomes, strict=True) if outcome is Outcome.MISSING]
                # A server that starts at the same moment may take a name first.
                for name in free:
                    if client.put([name], [[row]]) != [Outcome.HELD]:
                        break
    except StoreError:
        return
    for each in found:
        other = each.pop(_FINGERPRINT, fingerprint)
        reason = None if other == fingerprint else explain_unusable(other, identity, each)
        if reason is not None:
            yield reason


def _value(text: bytes, hmac_key: bytes) -> bytes:
    body = (_HEADER.pack(len(text), xxh3_64_intdigest(text)) + text).ljust(IDENTITY_BYTES - TAG_BYTES, b"\0")
    return body + _tag(body, hmac_key)


def _tag(body: bytes, hmac_key: bytes) -> bytes:
    return hmac.digest(hmac_key, body, "sha256")[:TAG_BYTES] if hmac_key else bytes(TAG_BYTES)


def _parse(row: ByteArray, hmac_key: bytes) -> dict[str, str]:
    """Returns the identity in a value: nothing if it is none, or not one of a server with the same HMAC key."""
    raw = row.tobytes()
    body, tag = raw[:-TAG_BYTES], raw[-TAG_BYTES:]
    size, checksum = _HEADER.unpack_from(body)
    text = body[_HEADER.size : _HEADER.size + size]
    is_intact = len(text) == size and xxh3_64_intdigest(text) == checksum
    if not is_intact or not hmac.compare_digest(tag, _tag(body, hmac_key)):
        return {}
    return parse_identity(text.decode(errors="replace"))

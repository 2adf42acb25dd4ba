"""Chained block hashes of tokens, the offload keys made of them, and numbers that stand for keys in tables."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from kvoffload.abc import BlockHash, Keys, OffloadKey
from kvoffload.native import load

GROUP_BYTES = 4
NAMESPACE_BYTES = 8
"""Bytes in front of every block hash in a key: a digest of the fingerprint, and of the tenant if there is one."""
TRANSIENT = b"\xff" * 4
"""Begins the namespaces that no later process knows. A tier does not keep their blocks for the next one."""
ADAPTER_BYTES = 8
"""Bytes after these in the keys of engines that serve adapters: a digest of the adapter's bytes, or zeros."""

_FIRST_GROUP = bytes(GROUP_BYTES)

Hashes = npt.NDArray[np.uint64]


def make_offload_key(block_hash: BlockHash, group_idx: int) -> OffloadKey:
    """Returns the block hash followed by the group index as a big-endian u32."""
    return block_hash + group_idx.to_bytes(GROUP_BYTES, "big")


def with_following(block_hash: BlockHash, following: bytes) -> BlockHash:
    """Returns a hash, as long as ``block_hash``, of the block and of ``following``, which describes the tokens after
    it."""
    return hashlib.blake2b(block_hash + following, digest_size=len(block_hash)).digest()


def key_block_hash(key: OffloadKey) -> BlockHash:
    return key[:-GROUP_BYTES]


def key_group_idx(key: OffloadKey) -> int:
    return int.from_bytes(key[-GROUP_BYTES:], "big")


def num_of_group(keys: Iterable[OffloadKey], group_idx: int) -> int:
    """Returns how many of ``keys`` are of a KV cache group."""
    return [key[-GROUP_BYTES:] for key in keys].count(make_offload_key(b"", group_idx))


def root_hash(*extras: str | bytes) -> BlockHash:
    """Returns the parent hash of a request's first block: a digest of everything but the tokens that shapes the KV.

    ``extras`` are, for example, the model fingerprint, the digests of a LoRA adapter's values or a cache salt. Each is
    framed by its type and length, so that two different lists never give the same bytes.
    """
    h = hashlib.sha256(b"kvoffload.root.1")
    for extra in extras:
        raw = extra.encode() if isinstance(extra, str) else extra
        h.update(b"s" if isinstance(extra, str) else b"b")
        h.update(len(raw).to_bytes(8, "big"))
        h.update(raw)
    return h.digest()


def namespace(fingerprint: str) -> bytes:
    """Returns the bytes of ``fingerprint`` that precede every block hash."""
    return root_hash(fingerprint)[:NAMESPACE_BYTES]


def hash_blocks(
    token_ids: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int32]],
    block_size: int,
    parent: BlockHash = b"",
    extras: Iterable[str | bytes] = (),
) -> list[BlockHash]:
    """Returns the hashes of the whole blocks of ``token_ids``, each sha256(parent digest + int32 token bytes).

    ``parent`` is the hash of the previous block of the chain; without it the chain starts from ``root_hash(*extras)``.
    Tokens past the last whole block are ignored. Token bytes are little-endian, so hashes agree between machines.
    Raises ValueError if a token does not fit into int32, and if both ``parent`` and ``extras`` are given.
    """
    if block_size < 1:
        raise ValueError(f"block_size={block_size}: must be at least 1 token")
    extras = tuple(extras)
    if parent and extras:
        raise ValueError("extras belong to the root of a chain; leave them out where a parent is given")
    tokens = np.asarray(token_ids, dtype=np.int64)
    if len(tokens) and not -(2**31) <= tokens.min() <= tokens.max() < 2**31:
        raise ValueError("a token id does not fit into 32 bits")
    digest = parent or root_hash(*extras)
    raw = tokens.astype("<i4").tobytes()
    step = 4 * block_size
    sha256 = hashlib.sha256
    hashes = []
    for start in range(0, len(raw) - step + 1, step):
        digest = sha256(digest + raw[start : start + step]).digest()
        hashes.append(digest)
    return hashes


def seem_of_several_groups(keys: Keys) -> bool:
    """Returns whether one of the first two or the last two keys is not of the first KV cache group. Engines with one
    group have no such keys; those of several groups are in the order in which blocks end, so in a long list it is seen.
    It takes the same time for any number of keys."""
    for key in (*keys[:2], *keys[-2:]):  # noqa: SIM110  (``any`` takes twice as long)
        if not key.endswith(_FIRST_GROUP):
            return True
    return False


def plain_hash_keys(keys: Iterable[OffloadKey]) -> npt.NDArray[np.int64]:
    """Returns Python's hash of each key, which a key keeps once it was computed. Other processes find others."""
    return np.fromiter(map(hash, keys), dtype=np.int64)


def plain_key_hashes(keys: Keys, of_names: bool = False) -> Hashes:
    """Returns 64 evenly distributed bits per key. They depend on its bytes only, so every process finds the same.

    With ``of_names`` they are those of the keys that blocks of the first KV cache group have at the same places: blocks
    of several groups that end at one token have one name.
    """
    names = [key_block_hash(key) + _FIRST_GROUP for key in keys] if of_names else keys
    return np.fromiter(map(xxhash.xxh3_64_intdigest, names), dtype=np.uint64, count=len(keys))


def plain_same_starts(keys: Keys, n: int) -> bool:
    """Returns whether all keys have the same first ``n`` bytes."""
    return len({key[:n] for key in keys}) <= 1


if TYPE_CHECKING or (native := load("_ghosts")) is None:
    hash_keys = plain_hash_keys
    key_hashes = plain_key_hashes
    same_starts = plain_same_starts
else:
    hash_keys = native.hash_keys
    key_hashes = native.key_hashes
    same_starts = native.same_starts

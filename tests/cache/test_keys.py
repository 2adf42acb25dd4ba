"""Keys: what a block hash names, and how a key is made of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.cache.keys import (
    hash_blocks,
    key_block_hash,
    key_group_idx,
    make_offload_key,
    plain_same_starts,
    root_hash,
    same_starts,
)

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def test_a_key_is_the_hash_then_the_group_as_a_big_endian_u32() -> None:
    assert make_offload_key(b"hash", 0) == b"hash\0\0\0\0"
    assert make_offload_key(b"hash", 0x01020304) == b"hash\x01\x02\x03\x04"
    assert make_offload_key(b"", 2**32 - 1) == b"\xff\xff\xff\xff"


@given(st.binary(max_size=40), st.integers(0, 2**32 - 1))
def test_a_key_can_be_taken_apart(block_hash: bytes, group: int) -> None:
    key = make_offload_key(block_hash, group)
    assert (key_block_hash(key), key_group_idx(key)) == (block_hash, group)


def test_hashes_stay_the_same_from_release_to_release() -> None:
    """Other nodes and the disk know blocks by them."""
    assert root_hash().hex() == "90abf31fc0aea662d424afc48ff6e3152f8af8d6a7989b15db412e39537d2a64"
    assert (
        hash_blocks(range(8), 4, extras=["model", b"salt"])[1].hex()
        == "8ec1ef4255c7f67bb15bcb5678f21e40b7ab7a454caf2e658d7a88afb9add9cb"
    )


def test_only_whole_blocks_have_a_hash() -> None:
    assert hash_blocks([], 4) == []
    assert hash_blocks([1, 2, 3], 4) == []
    assert len(hash_blocks([1, 2, 3, 4], 4)) == 1
    assert len(hash_blocks(range(11), 4)) == 2


@given(tokens, tokens, st.integers(1, 5))
def test_two_prompts_share_hashes_exactly_as_far_as_they_share_blocks(
    one: list[int], other: list[int], block_size: int
) -> None:
    pairs = zip(hash_blocks(one, block_size), hash_blocks(other, block_size), strict=False)
    for n, (a, b) in enumerate(pairs, start=1):
        assert (a == b) == (one[: n * block_size] == other[: n * block_size])


@given(tokens, st.integers(1, 5), st.integers(0, 8))
def test_a_chain_can_be_gone_on_with(token_ids: list[int], block_size: int, done: int) -> None:
    whole = hash_blocks(token_ids, block_size, extras=["m"])
    done = min(done, len(whole))
    parent = whole[done - 1] if done else root_hash("m")
    assert whole[:done] + hash_blocks(token_ids[done * block_size :], block_size, parent) == whole


def test_the_same_tokens_after_different_roots_are_different_blocks() -> None:
    extras: list[list[str | bytes]] = [
        [],
        [""],
        [b""],
        ["", ""],
        ["ab"],
        [b"ab"],
        ["a", "b"],
        ["b", "a"],
        ["a", b"b"],
        ["asb"],
        ["a\0b"],
    ]
    hashes = [hash_blocks([1], 1, extras=each) for each in extras]
    for one, other in combinations(range(len(extras)), 2):
        assert hashes[one] != hashes[other], f"{extras[one]} and {extras[other]} hash alike"
    assert hash_blocks([1], 1, extras=["a", "b"]) == hash_blocks([1], 1, extras=iter(["a", "b"]))


def test_a_token_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        hash_blocks([2**31], 1)
    with pytest.raises(ValueError, match="does not fit"):
        hash_blocks(np.array([2**32 + 5]), 1)


def test_extras_belong_to_the_root() -> None:
    with pytest.raises(ValueError, match="root"):
        hash_blocks([1], 1, parent=b"x", extras=["lora"])


@pytest.mark.parametrize("same", [plain_same_starts, same_starts])
def test_keys_that_begin_alike(same: Callable[[Sequence[bytes], int], bool]) -> None:
    assert same([], 3)
    assert same((b"abc", b"abcd", b"abc\0"), 3)
    assert not same([b"abc", b"abd"], 3)
    assert not same([b"ab", b"abc"], 3)
    assert same([b"ab", b"ab"], 3)
    assert not same([b"ab", b"ab\0"], 3)
    assert same([b"abc", b"abd"], -1)
    assert not same([b"abc", b"aed"], -1)

"""Identities in words: what is stored, what is read back, and how a difference is described."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvoffload.abc import ByteArray
from kvoffload.tiers.identity import (
    MAX_TEXT,
    VALUES,
    VARIABLES,
    describe_difference,
    digest,
    explain_unusable,
    identity_text,
    is_same_model,
    parse_identity,
)
from kvoffload.tiers.remote.client import Outcome
from kvoffload.tiers.remote.identities import MAX_IDENTITIES, announce
from kvoffload.tiers.remote.record import ValueFormat
from tests.tiers.remote.memory_store import MemoryClient

MINE = {
    "model": "llama",
    "weights": digest("w1"),
    "dtype": "bfloat16",
    "tensor parallel size": "2",
    "software": "a=1, b=2, c",
}


def test_an_identity_is_read_back_as_it_was_written() -> None:
    assert parse_identity(identity_text(MINE)) == MINE
    assert list(parse_identity(identity_text(MINE))) == list(MINE)


@pytest.mark.parametrize("is_named", [True, False])
def test_a_difference_of_values_names_the_variables_that_may_have_it(is_named: bool) -> None:
    """Unless the names differ: then these say what there is to look at."""
    mine = {**MINE, VARIABLES: "VLLM_A, VLLM_B", VALUES: digest("1")}
    other = {**mine, VALUES: digest("2"), VARIABLES: mine[VARIABLES] if is_named else "VLLM_A"}
    said = describe_difference(mine, other)
    assert f"other {VALUES} there" in said
    assert ("one of these has another value there: VLLM_A, VLLM_B" in said) == is_named


@pytest.mark.parametrize("text", ["", "nonsense", "[1]", "5", "null", "[" * 60_000, '{"a": "' + "x" * MAX_TEXT + '"}'])
def test_text_that_is_no_identity_says_nothing(text: str) -> None:
    assert parse_identity(text) == {}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "float16"}, "dtype is float16 there, bfloat16 here"),
        ({"weights": digest("w2")}, "other weights there"),
        (
            {"weights": digest("w2"), "tensor parallel size": "4"},
            "other weights there; tensor parallel size is 4 there, 2 here",
        ),
        ({"weights": "v1"}, f"weights is v1 there, {digest('w1')} here"),
        ({"software": "a=1, b=3"}, "software: b=3 there, b=2, c here"),
        ({"software": "a=1, b=2, c, d"}, "software: d there, nothing more here"),
        ({"draft": "eagle"}, "draft is eagle there, not given here"),
        ({"model": "/models/llama"}, "something that the two descriptions leave out"),
        ({}, "something that the two descriptions leave out"),
        ({"dtype": "x" * 100}, f"dtype is {'x' * 77}... there, bfloat16 here"),
        ({"dtype": "a\x1b[31m\nb"}, r"dtype is a\x1b[31m\nb there, bfloat16 here"),
    ],
)
def test_a_difference_in_words(changes: dict[str, str], said: str) -> None:
    assert describe_difference(MINE, {**MINE, **changes}) == said


def test_one_model_is_known_by_name_or_weights() -> None:
    assert is_same_model(MINE, {**MINE, "weights": digest("w2")})
    assert is_same_model(MINE, {**MINE, "model": "/models/llama"})
    assert not is_same_model(MINE, {**MINE, "model": "qwen", "weights": digest("w2")})
    assert not is_same_model(MINE, {})
    assert not is_same_model({}, {})


def test_only_blocks_of_the_same_model_are_explained() -> None:
    assert explain_unusable("ab" * 32, MINE, {**MINE, "dtype": "half"}) == (
        "blocks of model llama under fingerprint abababababababab cannot be used here: dtype is half there, bfloat16 "
        "here"
    )
    assert explain_unusable("ab" * 32, MINE, {"model": "qwen", "dtype": "half"}) is None


# Servers of one model leave their identities in the store, and learn why they cannot use others' blocks.

SERVER = {"model": "llama", "dtype": "bfloat16", "tensor parallelism": "1"}


def notes(client: MemoryClient, number: int, hmac_key: bytes = b"", **changes: str) -> list[str]:
    return list(announce(client, ValueFormat(f"{number:064x}", "kv", hmac_key), SERVER | changes))


def test_the_log_says_in_what_other_servers_differ() -> None:
    client = MemoryClient()
    assert notes(client, 1) == []
    assert notes(client, 1) == []
    assert len(client.values) == 1
    (note,) = notes(client, 2, dtype="float16")
    assert "llama" in note
    assert "dtype is bfloat16 there, float16 here" in note
    changes = {"tensor parallelism": "2"}
    assert len(list(announce(client, ValueFormat(f"{3:064x}", "kv"), SERVER | changes))) == 2
    assert len(client.values) == 3


def test_servers_of_another_model_are_not_named() -> None:
    client = MemoryClient()
    notes(client, 1)
    assert notes(client, 2, model="other") == []


def test_damaged_identities_and_a_store_that_fails_are_ignored() -> None:
    client = MemoryClient()
    notes(client, 1)
    for value in client.values.values():
        value[40] ^= 1
    assert notes(client, 2, dtype="float16") == []
    client.num_errors = 1
    assert notes(client, 3, dtype="float32") == []


def test_servers_that_start_together_leave_both_identities() -> None:
    class Early(MemoryClient):
        """Has not heard of the values of others yet."""

        def get(self, names: Sequence[str], buffers: Sequence[Sequence[ByteArray]]) -> list[Outcome]:
            return [Outcome.MISSING] * len(names)

    client, early = MemoryClient(), Early()
    early.values = client.values
    notes(client, 1)
    assert notes(early, 2, dtype="float16") == []
    assert len(notes(client, 3, dtype="float32")) == 2


def test_no_more_than_the_bound_are_stored() -> None:
    client = MemoryClient()
    for number in range(MAX_IDENTITIES + 3):
        notes(client, number, dtype=f"float{number}")
    assert len(client.values) == MAX_IDENTITIES


def test_with_an_hmac_key_only_identities_of_servers_with_the_same_key_are_named() -> None:
    client, key, other = MemoryClient(), b"k" * 32, b"o" * 32
    assert notes(client, 1, key) == []
    assert len(notes(client, 2, key, dtype="float16")) == 1
    assert notes(client, 3, other, dtype="float32") == []
    assert notes(client, 4, dtype="float64") == []
    # A value of another key under a name that servers with this key use was put there by somebody else.
    mine, _, theirs, _ = client.values
    client.values[mine] = client.values[theirs]
    assert len(notes(client, 5, key, dtype="int8")) == 1

"""Servers of one model leave their identities in the store, and learn why they cannot use others' blocks."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.abc import ByteArray
from kvoffload.tiers.remote.client import Outcome
from kvoffload.tiers.remote.identities import MAX_IDENTITIES, announce
from kvoffload.tiers.remote.record import ValueFormat
from tests.tiers.remote.memory_store import MemoryClient

MINE = {"model": "llama", "dtype": "bfloat16", "tensor parallelism": "1"}


def notes(client: MemoryClient, number: int, hmac_key: bytes = b"", **changes: str) -> list[str]:
    return list(announce(client, ValueFormat(f"{number:064x}", "kv", hmac_key), MINE | changes))


def test_the_log_says_in_what_other_servers_differ() -> None:
    client = MemoryClient()
    assert notes(client, 1) == []
    assert notes(client, 1) == []
    assert len(client.values) == 1
    (note,) = notes(client, 2, dtype="float16")
    assert "llama" in note
    assert "dtype is bfloat16 there, float16 here" in note
    changes = {"tensor parallelism": "2"}
    assert len(list(announce(client, ValueFormat(f"{3:064x}", "kv"), MINE | changes))) == 2
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

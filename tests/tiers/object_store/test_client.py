"""ObjectStoreClient on a bucket in memory: small values share objects, and whatever a note says, reads are right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvoffload.abc import ByteArray, OffloadKey
from kvoffload.abc.tier import HIT, MISS
from kvoffload.cache.keys import make_offload_key
from kvoffload.tiers.object_store import contents as object_contents
from kvoffload.tiers.object_store.bucket import Answer, Found
from kvoffload.tiers.object_store.client import ObjectStoreClient
from kvoffload.tiers.object_store.contents import OBJECT_BYTES, Places, contents, make_note, mark
from kvoffload.tiers.remote.client import Outcome
from kvoffload.tiers.remote.record import ValueFormat
from tests.tiers.object_store.memory_bucket import MemoryBucket
from tests.tiers.object_store.rig import chain
from tests.tiers.remote.rig import FINGERPRINT, tier_here

OK, MISSING, HELD, FAILED, OTHER_SIZE = (Outcome.OK, Outcome.MISSING, Outcome.HELD, Outcome.FAILED, Outcome.OTHER_SIZE)
VALUE_BYTES = 40
"""The smallest values, so that MAX_VALUES of them share an object."""


def names_of(keys: Sequence[OffloadKey]) -> list[str]:
    return [ValueFormat(FINGERPRINT, "kv").name(key) for key in keys]


CHAIN = names_of(chain(200))


def value(name: str) -> list[ByteArray]:
    """Returns the two buffers of a value."""
    data = np.random.default_rng(list(mark(name))).integers(0, 256, VALUE_BYTES, dtype=np.uint8)
    return [data[:8], data[8:]]


def client_on(bucket: MemoryBucket, value_bytes: int = VALUE_BYTES) -> ObjectStoreClient:
    return ObjectStoreClient(bucket, value_bytes, [0])


def put(client: ObjectStoreClient, names: Sequence[str]) -> list[Outcome]:
    return client.put(names, [value(name) for name in names])


def get(client: ObjectStoreClient, names: Sequence[str]) -> list[Outcome]:
    """Reads values, and asserts that those that are OK are right."""
    buffers = [[np.zeros(8, dtype=np.uint8), np.zeros(VALUE_BYTES - 8, dtype=np.uint8)] for _ in names]
    outcomes = client.get(names, buffers)
    for name, outcome, parts in zip(names, outcomes, buffers, strict=True):
        if outcome is OK:
            assert np.array_equal(np.concatenate(parts), np.concatenate(value(name))), "other bytes than were put"
    return outcomes


def store(bucket: MemoryBucket, names: Sequence[str], calls: int = 64) -> None:
    """Lets a server store a chain as a worker does, ``calls`` values at a time."""
    client = client_on(bucket)
    for at in range(0, len(names), calls):
        part = list(names[at : at + calls])
        new = [name for name, has in zip(part, client.exists(part), strict=True) if has is MISSING]
        assert set(put(client, new)) <= {OK, HELD}
    bucket.take_counts()


def test_a_chain_costs_a_request_per_object() -> None:
    bucket = MemoryBucket()
    store(bucket, CHAIN)
    assert len(bucket.objects) == 4
    reader = client_on(bucket)
    assert reader.exists(CHAIN) == [OK] * 200
    assert bucket.take_counts() == {"head": 4}
    assert get(reader, CHAIN[:64]) == [OK] * 64
    assert get(reader, CHAIN[10:20] + CHAIN[30:40]) == [OK] * 20
    assert bucket.take_counts() == {"get": 3}
    assert reader.exists(CHAIN[100:120]) == [OK] * 20
    assert bucket.take_counts() == {"head": 1}, "the object is asked for again, from the middle of the chain too"


@pytest.mark.parametrize("pieces", [[40, 64, 64, 32], [1] * 40, [64, 5, 1, 3, 2, 1, 20, 64, 7], [64, 64, 64, 8]])
def test_a_chain_that_was_stored_bit_by_bit_is_found(pieces: list[int]) -> None:
    bucket = MemoryBucket()
    writer, at = client_on(bucket), 0
    for size in pieces:
        assert put(writer, CHAIN[at : at + size]) == [OK] * size
        at += size
    bucket.take_counts()
    reader = client_on(bucket)
    assert reader.exists(CHAIN) == [OK] * at + [MISSING] * (200 - at)
    assert bucket.take_counts()["head"] < len(CHAIN)
    assert get(reader, CHAIN[:at]) == [OK] * at


def test_large_values_have_objects_of_their_own() -> None:
    bucket = MemoryBucket()
    client = client_on(bucket, OBJECT_BYTES)
    assert put(client, CHAIN[:3]) == [OK] * 3
    assert {note for _, note in bucket.objects.values()} == {""}
    reader = client_on(bucket, OBJECT_BYTES)
    assert get(reader, CHAIN[:4]) == [OK, OK, OK, MISSING], "without a lookup before"
    assert reader.exists(CHAIN[:4]) == [OK, OK, OK, MISSING]


def test_branches_behind_a_common_head_are_found() -> None:
    bucket = MemoryBucket()
    head = chain(30)
    one, other = names_of(head + chain(50, seed=1)), names_of(head + chain(60, seed=2))
    store(bucket, one)
    store(bucket, other)
    assert len(bucket.objects) == 2 + 2
    for names in (one, other):
        reader = client_on(bucket)
        assert reader.exists(names) == [OK] * len(names)
        assert get(reader, names[:64]) == [OK] * 64


def test_blocks_handed_over_are_found_in_an_object_that_begins_with_one_of_the_device() -> None:
    """A request asks for what the device lacks. The object has the name of a block before that."""
    bucket, keys, pool = MemoryBucket(), chain(3), np.zeros((4, 64), dtype=np.uint8)
    one, other = (tier_here(client_on(bucket), [pool], ValueFormat(FINGERPRINT, "kv")) for _ in range(2))
    assert one.write(keys, np.arange(3)) == keys
    assert all(result.ok for result in one.poll())
    found = []
    for before in ([], keys[:2]):
        other.contains(keys[2:])
        other.look_for(keys[2:], "", 0.0, [*before, *keys[2:]])
        other.poll()
        found += other.contains(keys[2:]).tolist()
    assert found == [MISS, HIT]


def test_only_groups_that_are_looked_up_from_the_head_share_objects() -> None:
    bucket = MemoryBucket()
    hashes = [bytes([7, i]) * 16 for i in range(66)]
    merged = names_of([make_offload_key(each, group) for each in hashes for group in range(3)])
    store(bucket, merged)
    assert len(bucket.objects) == 4 + 2 * 66
    reader = client_on(bucket)
    assert reader.exists(names_of([make_offload_key(each, 0) for each in hashes])) == [OK] * 66
    # A window from the middle, and some states.
    wanted = names_of([make_offload_key(each, 1) for each in hashes[50:58]])
    wanted += names_of([make_offload_key(hashes[i], 2) for i in (3, 40, 41)])
    reader = client_on(bucket)
    assert reader.exists(wanted) == [OK] * 11
    assert get(reader, wanted) == [OK] * 11


# What is gone, lies or is damaged.


@pytest.mark.parametrize("note", ["", "1:", "2:AAAA", "1:!!!", "1:AAAA", "1:" + "A" * 2000, make_note([b"x" * 8])])
def test_an_object_whose_note_makes_no_sense_has_its_own_value_only(note: str) -> None:
    assert contents(CHAIN[0], Found(VALUE_BYTES, note)) == (mark(CHAIN[0]),)
    bucket = MemoryBucket()
    store(bucket, CHAIN[:64])
    bucket.objects[CHAIN[0]] = bucket.objects[CHAIN[0]][0], note
    reader = client_on(bucket)
    assert reader.exists(CHAIN[:64]) == [OK] + [MISSING] * 63
    # The worker takes that for a corrupt block, which is removed.
    assert get(reader, CHAIN[:2]) == [OTHER_SIZE, MISSING]
    reader.distrust(CHAIN[:1])
    assert reader.remove(CHAIN[:1]) == [OK]
    assert not bucket.objects


def test_requests_that_fail_are_no_answers() -> None:
    bucket = MemoryBucket()
    store(bucket, CHAIN)
    bucket.broken.add(CHAIN[64])
    reader = client_on(bucket)
    found = reader.exists(CHAIN)
    assert found[:64] == [OK] * 64
    assert found[64:128] == [FAILED] * 64
    bucket.broken.clear()
    assert reader.exists(CHAIN) == [OK] * 200
    bucket.broken = {CHAIN[64]}
    assert get(reader, CHAIN[60:70]) == [OK] * 4 + [FAILED] * 6
    assert put(client_on(bucket), CHAIN[64:66]) == [FAILED] * 2
    reader.distrust([CHAIN[65]])
    assert reader.remove([CHAIN[65]]) == [FAILED]
    bucket.broken.clear()
    assert get(reader, CHAIN[60:70]) == [OK] * 10


def test_a_slow_store_is_not_asked_for_everything() -> None:
    class Slow(MemoryBucket):
        now, call_s = 0.0, 0.6

        def head(self, names: Sequence[str]) -> list[Answer]:
            self.now += self.call_s
            return super().head(names)

    bucket = Slow()
    writer = client_on(bucket)
    for name in CHAIN[:12]:
        put(writer, [name])
    bucket.take_counts()
    reader = ObjectStoreClient(bucket, VALUE_BYTES, [0], clock=lambda: bucket.now)
    found = reader.exists(CHAIN[:20])
    assert bucket.now == 2 * bucket.call_s
    assert found == [OK, OK] + [FAILED] * 18
    bucket.call_s = 0.1
    assert reader.exists(CHAIN[:20]) == [OK] * 12 + [MISSING] * 8


# Removal.


def test_a_value_that_is_removed_is_missing_and_its_neighbours_stay() -> None:
    bucket = MemoryBucket()
    client = client_on(bucket)
    put(client, CHAIN[:4])
    assert client.remove([CHAIN[1], CHAIN[3]]) == [OK, OK]
    assert client.exists(CHAIN[:4]) == [OK, MISSING, OK, MISSING]
    assert get(client, CHAIN[:4]) == [OK, MISSING, OK, MISSING]
    assert put(client, CHAIN[1:2]) == [OK]
    assert client.exists(CHAIN[:4]) == [OK, OK, OK, MISSING]
    assert client_on(bucket).exists(CHAIN[:4]) == [OK] * 4


@pytest.mark.parametrize("removed", [[0], [0, 1], [0, 1, 2, 3], [2]])
def test_an_object_is_deleted_with_all_of_its_values_or_one_that_is_wrong(removed: list[int]) -> None:
    for is_wrong in (False, True):
        bucket = MemoryBucket()
        client = client_on(bucket)
        put(client, CHAIN[:4])
        names = [CHAIN[i] for i in removed]
        if is_wrong:
            client.distrust(names)
        assert client.remove(names) == [OK] * len(names)
        is_deleted = is_wrong or len(removed) == 4
        assert bool(bucket.objects) is not is_deleted
        wanted = [MISSING if is_deleted or i in removed else OK for i in range(4)]
        assert client.exists(CHAIN[:4]) == wanted
        assert get(client, CHAIN[:4]) == wanted
        again = [name for name, each in zip(CHAIN, wanted, strict=False) if each is MISSING]
        assert set(put(client, again)) <= {OK, HELD}
        assert get(client, CHAIN[:4]) == [OK] * 4
        assert get(client_on(bucket), CHAIN[:4]) == [OK] * 4


def test_places_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for bound in ("MAX_PLACES", "MAX_HIDDEN", "MAX_DISTRUSTED"):
        monkeypatch.setattr(object_contents, bound, 8)
    places = Places()
    for i in range(20):
        marks = tuple(bytes([i, j]) for j in range(4))
        places.note(str(i), marks, 4 * VALUE_BYTES)
        places.hide(marks[1])
        places.distrust(str(i))
    known = [i for i in range(20) if places.find(bytes([i, 0])) is not None]
    assert known == [18, 19]
    assert sum(places.is_distrusted(str(i)) for i in range(20)) == 8
    assert sum(places.is_hidden(bytes([i, 1]), str(i)) for i in range(20)) == 8

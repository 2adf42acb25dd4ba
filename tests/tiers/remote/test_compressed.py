"""Compressed values: bit exact, verified before they are decompressed, and apart from those of servers without."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvoffload.abc import ByteArray, ConfigError, TierError
from kvoffload.abc.tier import HIT, MISS
from kvoffload.tiers.config import load_tiers
from kvoffload.tiers.remote.codec import CHUNK_BYTES, ByteCodec, kv_like
from kvoffload.tiers.remote.compressed import COMPRESSED_VERSION, CompressedFormat
from kvoffload.tiers.remote.memory import Rows, SeparateBuffers
from kvoffload.tiers.remote.messages import Op, Request, Status
from kvoffload.tiers.remote.record import FORMAT_VERSION, RECORD_BYTES, ValueFormat
from kvoffload.tiers.remote.worker import MORE_WITHIN_S, StoreWorker
from tests.tiers.remote.memory_store import MemoryClient
from tests.tiers.remote.rig import Server, store_in

FINGERPRINT = "5e" * 32
KEYS = [bytes([i]) * 36 for i in range(8)]
SLOT_BYTES = (20_000, 10_001)
BODY_AT = RECORD_BYTES + 16
"""Where the compressed form begins in a value."""
HMAC_KEY = b"k" * 32
CODEC = ByteCodec()


def blocks() -> st.SearchStrategy[list[ByteArray]]:
    """Parts of blocks of any numbers and sizes, some like KV and some that do not shrink."""

    def part(seed: int, nbytes: int, kind: str) -> ByteArray:
        rng = np.random.default_rng(seed)
        if kind == "random":
            return rng.integers(0, 256, nbytes, dtype=np.uint8)
        if kind == "zero":
            return np.zeros(nbytes, dtype=np.uint8)
        numbers = rng.normal(size=nbytes // 2 + 2)
        if kind == "bfloat16":
            return kv_like(nbytes, seed)
        return numbers.astype(np.float32 if kind == "float32" else np.float16).view(np.uint8)[:nbytes].copy()

    sizes = st.one_of(st.integers(0, 70), st.integers(1000, 9000), st.integers(CHUNK_BYTES - 3, CHUNK_BYTES + 5))
    kinds = st.sampled_from(["random", "zero", "bfloat16", "float16", "float32"])
    return st.lists(st.builds(part, st.integers(0, 99), sizes, kinds), min_size=1, max_size=3)


@settings(max_examples=150, deadline=None)
@given(blocks())
@example([np.zeros(33, dtype=np.uint8), kv_like(1000, 0)])  # A frame is as long as its plane.
def test_blocks_come_back_bit_for_bit(parts: list[ByteArray]) -> None:
    out = np.zeros(sum(part.size for part in parts), dtype=np.uint8)
    size = CODEC.compress(parts, out)
    assert size <= out.size
    if size:
        got = [np.full_like(part, 0xEE) for part in parts]
        assert CODEC.decompress(out[:size], got)
        assert all((a == b).all() for a, b in zip(parts, got, strict=True))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_bytes_decompress_to_more_than_the_block_or_raise(data: st.DataObject) -> None:
    out = np.zeros(9000, dtype=np.uint8)
    size = CODEC.compress([kv_like(9000, 1)], out)
    bad = bytearray(out[: data.draw(st.integers(0, size))].tobytes())
    for _ in range(data.draw(st.integers(0, 3))):
        if bad:
            bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    memory = np.full(9100, 0xEE, dtype=np.uint8)
    CODEC.decompress(np.frombuffer(bytes(bad), dtype=np.uint8), [memory[50:9050]])
    assert (memory[:50] == 0xEE).all()
    assert (memory[9050:] == 0xEE).all()


def test_a_frame_that_announces_more_than_its_plane_is_not_decompressed() -> None:
    for content in (bytes(1 << 30), bytes(101), b""):
        bomb = zstandard.ZstdCompressor().compress(content)
        assert len(bomb) < 1 << 16
        form = b"\x01" + struct.pack("<I", len(bomb)) + bomb
        assert not CODEC.decompress(np.frombuffer(form, dtype=np.uint8), [np.zeros(1 << 17, dtype=np.uint8)])
    unknown = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))
    form = b"\x01" + struct.pack("<I", len(unknown)) + unknown
    assert not CODEC.decompress(np.frombuffer(form, dtype=np.uint8), [np.zeros(1000, dtype=np.uint8)])


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.75), ("float16", 0.97), ("float32", 0.97)])
def test_numbers_shrink_and_random_bytes_do_not(dtype: str, most: float) -> None:
    numbers = kv_like(1 << 20, 0)
    if dtype != "bfloat16":
        numbers = np.random.default_rng(0).normal(size=1 << 18).astype(dtype).view(np.uint8)
    out = np.zeros(numbers.size, dtype=np.uint8)
    assert 0 < CODEC.compress([numbers], out) < most * numbers.size
    control = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
    assert CODEC.compress([control], np.zeros_like(control)) == 0


class Rig:
    """A server's worker on ``client``. Slots 0 to 7 have blocks like KV."""

    def __init__(self, client: MemoryClient, hmac_key: bytes = b"", compress: bool = True) -> None:
        self.client = client
        self.pools = [np.zeros((16, nbytes), dtype=np.uint8) for nbytes in SLOT_BYTES]
        for slot in range(8):
            for rank, pool in enumerate(self.pools):
                pool[slot] = kv_like(pool.shape[1], 10 * slot + rank)
        self.values = (CompressedFormat if compress else ValueFormat)(FINGERPRINT, "kv", hmac_key)
        self.now = 0.0
        memory = Rows(self.pools) if compress else SeparateBuffers(self.pools)
        self.worker = StoreWorker(client, memory, self.values, lambda: self.now)

    def run(self, op: Op, keys: Sequence[bytes], first_slot: int = 0) -> list[Status]:
        slots = range(first_slot, first_slot + len(keys)) if op in (Op.READ, Op.WRITE) else ()
        return list(self.worker.run(Request(1, op, keys, slots)).statuses)

    def stored(self, key: bytes) -> ByteArray:
        return self.client.values[self.values.name(key)]

    def replace(self, key: bytes, value: bytes) -> None:
        self.client.values[self.values.name(key)] = np.frombuffer(value, dtype=np.uint8)

    def has(self, slot: int, source: int) -> bool:
        return all((pool[slot] == pool[source]).all() for pool in self.pools)


@pytest.fixture
def rig() -> Rig:
    return Rig(MemoryClient())


def test_values_are_smaller_and_come_back(rig: Rig) -> None:
    assert rig.run(Op.WRITE, KEYS[:3]) == [Status.OK] * 3
    assert all(value.size < 0.85 * (RECORD_BYTES + sum(SLOT_BYTES)) for value in rig.client.values.values())
    assert all(value[4] == COMPRESSED_VERSION for value in rig.client.values.values())
    assert rig.run(Op.READ, KEYS[:4], 8) == [Status.OK] * 3 + [Status.MISSING]
    assert all(rig.has(8 + i, i) for i in range(3))


def test_a_block_that_does_not_shrink_is_stored_as_it_is(rig: Rig) -> None:
    rng = np.random.default_rng(0)
    for pool in rig.pools:
        pool[1] = rng.integers(0, 256, pool.shape[1])
    assert rig.run(Op.WRITE, KEYS[:2]) == [Status.OK] * 2
    assert rig.stored(KEYS[1]).size == RECORD_BYTES + sum(SLOT_BYTES)
    assert [rig.stored(key)[4] for key in KEYS[:2]] == [COMPRESSED_VERSION, FORMAT_VERSION]
    assert rig.run(Op.READ, KEYS[:2], 8) == [Status.OK] * 2
    assert rig.has(8, 0)
    assert rig.has(9, 1)


def test_padding_does_not_matter(rig: Rig) -> None:
    rig.run(Op.WRITE, KEYS[:1])
    rig.replace(KEYS[0], rig.stored(KEYS[0]).tobytes() + bytes(500))
    assert rig.run(Op.READ, KEYS[:1], 8) == [Status.OK]
    assert rig.has(8, 0)


@pytest.mark.parametrize("hmac_key", [b"", HMAC_KEY])
def test_every_changed_byte_and_every_cut_is_a_miss(hmac_key: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(MemoryClient(), hmac_key)
    rig.run(Op.WRITE, KEYS[:1])
    good = rig.stored(KEYS[0]).tobytes()
    decompressed: list[int] = []
    decompress = ByteCodec.decompress

    def count(*arguments: Any) -> bool:
        decompressed.append(1)
        return decompress(*arguments)

    monkeypatch.setattr(ByteCodec, "decompress", count)
    places = [*range(BODY_AT + 20), *range(BODY_AT + 20, len(good), 997), len(good) - 1]
    for at in places:
        bad = bytearray(good)
        bad[at] ^= 0x10
        rig.replace(KEYS[0], bytes(bad))
        assert rig.run(Op.READ, KEYS[:1], 8) == [Status.CORRUPT], at
    fresh = Rig(MemoryClient(), hmac_key)
    for size in (0, RECORD_BYTES, BODY_AT, len(good) // 2, len(good) - 1):
        # Its rows have no bytes of the value.
        fresh = Rig(fresh.client, hmac_key)
        fresh.replace(KEYS[0], good[:size])
        assert fresh.run(Op.READ, KEYS[:1], 8) == [Status.CORRUPT], size
    assert not decompressed, "bytes that are not those stored reached the decompressor"
    rig.replace(KEYS[0], good)
    assert rig.run(Op.READ, KEYS[:1], 8) == [Status.OK]
    assert decompressed == [1]


def forged(rig: Rig, values: CompressedFormat, key: bytes, body: bytes, size: int | None = None) -> bytes:
    """Returns a value whose checksums are all right, with any bytes in the place of the compressed form."""
    tail = struct.pack("<Q", len(body) if size is None else size) + body
    checksum = values.checksum(key, [np.frombuffer(tail, dtype=np.uint8)])
    stored = np.frombuffer(struct.pack("<Q", checksum) + tail, dtype=np.uint8)
    parts = [pool[0] for pool in rig.pools]
    return values.record(key, parts, COMPRESSED_VERSION, [stored]).tobytes() + stored.tobytes()


def test_forged_values_that_claim_a_huge_size_are_misses(rig: Rig) -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 30))
    frame = b"\x01" + struct.pack("<I", len(bomb)) + bomb
    values = CompressedFormat(FINGERPRINT, "kv")
    for body, size in ((frame, None), (b"\x01" + struct.pack("<I", 0xFFFFFFFF), None), (b"x", 1 << 60), (b"", None)):
        rig.replace(KEYS[0], forged(rig, values, KEYS[0], body, size))
        assert rig.run(Op.READ, KEYS[:1], 8) == [Status.CORRUPT]


def test_with_an_hmac_key_no_forged_byte_is_decompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> bool:
        raise AssertionError("a forged value reached the decompressor")

    signed = Rig(MemoryClient(), HMAC_KEY)
    monkeypatch.setattr(ByteCodec, "decompress", refuse)
    out = np.zeros(1 << 16, dtype=np.uint8)
    size = CODEC.compress([pool[1] for pool in signed.pools], out)
    for hmac_key in (b"", b"x" * 32):
        forger = CompressedFormat(FINGERPRINT, "kv", hmac_key)
        signed.replace(KEYS[0], forged(signed, forger, KEYS[0], out[:size].tobytes()))
        assert signed.run(Op.READ, KEYS[:1], 8) == [Status.CORRUPT]


def test_the_negative_control_without_checksums_wrong_bytes_are_loaded(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.run(Op.WRITE, KEYS[:2])
    # The form of another block, in which everything but the checksums is right.
    body = rig.stored(KEYS[1])[BODY_AT:].tobytes()
    value = forged(rig, CompressedFormat(FINGERPRINT, "kv"), KEYS[0], body)
    rig.replace(KEYS[0], value)
    assert rig.run(Op.READ, KEYS[:1], 8) == [Status.CORRUPT]
    monkeypatch.setattr(CompressedFormat, "checksum", lambda *arguments: 0)
    raw = bytearray(value)
    raw[96:104] = raw[RECORD_BYTES : RECORD_BYTES + 8] = bytes(8)
    raw[120:128] = struct.pack("<Q", xxh3_64_intdigest(bytes(raw[:120])))
    rig.replace(KEYS[0], bytes(raw))
    assert rig.run(Op.READ, KEYS[:1], 8) == [Status.OK]
    assert rig.has(8, 1)


def test_servers_with_and_without_have_names_of_their_own() -> None:
    client = MemoryClient()
    one, plain = Rig(client), Rig(client, compress=False)
    assert one.run(Op.WRITE, KEYS[:2]) == [Status.OK] * 2
    assert plain.run(Op.LOOKUP, KEYS[:2]) == [Status.MISSING] * 2
    assert plain.run(Op.WRITE, KEYS[:2]) == [Status.OK] * 2
    for rig in (one, plain):
        assert rig.run(Op.READ, KEYS[:2], 8) == [Status.OK] * 2
        assert rig.has(8, 0)
    assert len(client.values) == 4


def test_a_compressed_value_under_the_name_of_a_plain_one_is_a_miss_and_stays() -> None:
    client = MemoryClient()
    one, plain = Rig(client), Rig(client, compress=False)
    one.run(Op.WRITE, KEYS[:1])
    plain.replace(KEYS[0], one.stored(KEYS[0]).tobytes())
    assert plain.run(Op.READ, KEYS[:1], 8) == [Status.MISSING]
    assert plain.values.name(KEYS[0]) in client.values
    # The other way round it is read.
    plain.run(Op.WRITE, KEYS[1:2], 1)
    one.replace(KEYS[1], plain.stored(KEYS[1]).tobytes())
    assert one.run(Op.READ, KEYS[1:2], 9) == [Status.OK]
    assert one.has(9, 1)


def test_a_put_does_not_begin_after_compressing_took_too_long(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    compress = ByteCodec.compress

    def slow(*arguments: Any) -> int:
        rig.now += MORE_WITHIN_S
        return compress(*arguments)

    monkeypatch.setattr(ByteCodec, "compress", slow)
    assert rig.run(Op.WRITE, KEYS[:2]) == [Status.FAILED] * 2
    assert [name for name, _ in rig.client.calls] == ["exists"]


def test_processes_share_compressed_blocks(tmp_path: Path) -> None:
    store = store_in(tmp_path / "store")
    one, other, plain = Server(store, compress=True), Server(store, compress=True), Server(store)
    try:
        for each in (one, other, plain):
            each.connect()
        for rank, pool in enumerate(one.pools):
            for slot in range(4):
                pool[slot] = kv_like(pool.shape[1], 4 * rank + slot)
        assert one.finish(one.tier.write(KEYS[:4], np.arange(4)))[KEYS[0]].ok
        assert plain.states(KEYS[:4]) == [MISS] * 4
        assert other.states(KEYS[:4]) == [HIT] * 4
        assert all(result.ok for result in other.read(KEYS[:4]).values())
        assert all((a[:4] == b[16:20]).all() for a, b in zip(one.pools, other.pools, strict=True))
        sizes = {path.stat().st_size for path in store.values()}
        assert max(sizes) < 0.85 * (RECORD_BYTES + sum(one.slot_bytes))
        # A damaged value is removed, and the right one takes its place.
        path = store.path(CompressedFormat(one.fingerprint, "kv").name(KEYS[0]))
        raw = bytearray(path.read_bytes())
        raw[BODY_AT + 100] ^= 1
        path.write_bytes(raw)
        assert other.read(KEYS[:1])[KEYS[0]].error is TierError.CORRUPT
        other.until(lambda: not path.exists(), "the damaged value was never removed")
    finally:
        for each in (one, other, plain):
            each.close()


def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"kind": "redis", "url": "redis://10.0.0.5:6379"}
    with pytest.raises(ConfigError, match=r"tiers\[0\]\.compress='yes': must be true or false"):
        load_tiers([{**entry, "compress": "yes"}])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"compress=True: zstandard is not installed.*extra compress"):
        load_tiers([{**entry, "compress": True}])
    load_tiers([{**entry, "compress": False}])

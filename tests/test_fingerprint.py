"""Which weights are these: any change is noticed, and no file, however broken, raises into the engine."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvoffload.fingerprint import SAMPLE_BYTES, find_model_dir, fingerprint, model_identity, weights_fingerprint

TENSOR_BYTES = 3 * SAMPLE_BYTES
MIDDLE = TENSOR_BYTES // 2


def header(**entries: Any) -> dict[str, Any]:
    """A safetensors header for tensors one after another."""
    return {
        name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for name, (begin, end) in entries.items()
    }


def safetensors(path: Path, head: object, data: bytes) -> None:
    raw = head if isinstance(head, bytes) else json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with config.json and two files of weights."""
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    (tmp_path / "tokenizer.json").write_text("{}")
    both = header(a=(0, TENSOR_BYTES), b=(TENSOR_BYTES, TENSOR_BYTES + 100))
    safetensors(tmp_path / "one.safetensors", both, bytes(TENSOR_BYTES + 100))
    last = {"__metadata__": {"format": "pt"}, **header(c=(0, TENSOR_BYTES))}
    safetensors(tmp_path / "two.safetensors", last, bytes(TENSOR_BYTES))
    return tmp_path


def flip(path: Path, at: int) -> None:
    """Changes the byte of the tensors' data at ``at``."""
    raw = bytearray(path.read_bytes())
    (length,) = struct.unpack_from("<Q", raw)
    raw[8 + length + at] ^= 1
    path.write_bytes(raw)


def edit_header(path: Path, old: bytes, new: bytes) -> None:
    raw = path.read_bytes()
    assert len(old) == len(new)
    assert raw.count(old) == 1
    path.write_bytes(raw.replace(old, new))


CHANGES: dict[str, Callable[[Path], object]] = {
    "config": lambda model: (model / "config.json").write_text('{"hidden_size": 65}'),
    "config gone": lambda model: (model / "config.json").unlink(),
    "dtype in a header": lambda model: edit_header(model / "two.safetensors", b'"U8"', b'"I8"'),
    "metadata in a header": lambda model: edit_header(model / "two.safetensors", b'"pt"', b'"np"'),
    "middle of the first tensor": lambda model: flip(model / "one.safetensors", MIDDLE),
    "first sampled byte": lambda model: flip(model / "one.safetensors", MIDDLE - SAMPLE_BYTES // 2),
    "last sampled byte": lambda model: flip(model / "one.safetensors", MIDDLE + SAMPLE_BYTES // 2 - 1),
    "first byte of a small tensor": lambda model: flip(model / "one.safetensors", TENSOR_BYTES),
    "last byte of a small tensor": lambda model: flip(model / "one.safetensors", TENSOR_BYTES + 99),
    "another file's tensor": lambda model: flip(model / "two.safetensors", MIDDLE),
    "file name": lambda model: (model / "one.safetensors").rename(model / "only.safetensors"),
    "file gone": lambda model: (model / "two.safetensors").unlink(),
    "one more file": lambda model: safetensors(model / "three.safetensors", header(d=(0, 1)), b"x"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_the_weights_changes_it(model: Path, change: str) -> None:
    before = weights_fingerprint(model)
    CHANGES[change](model)
    assert weights_fingerprint(model) != before


HARMLESS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda model: None,
    "read time": lambda model: (model / "one.safetensors").touch(),
    "other files": lambda model: (model / "tokenizer.json").write_text('{"x": 1}'),
    "a byte that is not sampled": lambda model: flip(model / "one.safetensors", 0),
    "same bytes written anew": lambda model: (model / "config.json").write_text('{"hidden_size": 64}'),
}


@pytest.mark.parametrize("change", HARMLESS)
def test_nothing_else_does(model: Path, change: str) -> None:
    before = weights_fingerprint(model)
    assert before is not None
    assert len(before) == 64
    HARMLESS[change](model)
    assert weights_fingerprint(model) == before


def test_where_it_lies_does_not_matter(model: Path, tmp_path: Path) -> None:
    before = weights_fingerprint(model)
    moved = tmp_path.parent / f"{tmp_path.name}-moved"
    model.rename(moved)
    assert weights_fingerprint(moved) == before


def test_without_safetensors_it_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"123")
    assert weights_fingerprint(tmp_path) is None


def file(length: int, rest: bytes) -> bytes:
    return struct.pack("<Q", length) + rest


def with_offsets(*offsets: object) -> bytes:
    raw = json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": offsets}}).encode()
    return file(len(raw), raw + bytes(100))


def with_header(text: bytes) -> bytes:
    return file(len(text), text + bytes(100))


MALFORMED = {
    "empty": b"",
    "cut off in the length": b"\x10\0\0",
    "length without header": file(16, b""),
    "cut off in the header": file(100, b'{"a": {"dty'),
    "header of 2^64 - 1 bytes": file(2**64 - 1, b"{}"),
    "header of 1 TiB": file(1 << 40, b"{}"),
    "header of no bytes": file(0, b""),
    "no JSON": with_header(b"{nonsense"),
    "no UTF-8": with_header(b'{"\xff\xfe": 1}'),
    "three offsets": with_offsets(0, 1, 2),
    "an offset too few": with_offsets(0),
    "end before begin": with_offsets(50, 0),
    "end just before begin": with_offsets(1, 0),
    "begin beyond the file": with_offsets(10**6, 10**6 + 5),
    "end beyond the file": with_offsets(0, 10**6),
    "offsets beyond 64 bits": with_offsets(10**30, 10**30 + 5),
    "negative offsets": with_offsets(-5, 5),
    "far negative offsets": with_offsets(-(10**9), -(10**9) + 5),
    "offsets that are floats": with_offsets(0.0, 5.0),
    "offsets that are text": with_offsets("0", "5"),
    "offsets that are nothing": with_header(b'{"a": {"data_offsets": null}}'),
    "a list for a header": with_header(b"[]"),
    "a number for a header": with_header(b"5"),
    "a number for a tensor": with_header(b'{"a": 5}'),
    "a tensor without offsets": with_header(b'{"a": {}}'),
    "endless nesting": with_header(b"[" * 200_000),
}
"""Files that are no well-formed safetensors."""


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_file_is_a_value_error(model: Path, raw: bytes) -> None:
    (model / "two.safetensors").write_bytes(raw)
    with pytest.raises(ValueError):
        weights_fingerprint(model)


@pytest.mark.parametrize("raw", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_file_raises_nothing_into_the_engine(model: Path, raw: bytes) -> None:
    (model / "two.safetensors").write_bytes(raw)
    assert model_identity(str(model), "main", None)


def test_weights_that_cannot_be_read_are_told_apart_by_revision_with_a_warning(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (model / "two.safetensors").write_bytes(MALFORMED["no JSON"])
    assert model_identity(str(model), "r1", None) == f"revision:{model}@r1"
    assert any(str(model) in record.getMessage() for record in caplog.records)
    assert any("model_fingerprint" in record.getMessage() for record in caplog.records)


def test_a_file_that_may_not_be_read_raises_nothing(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    (model / "two.safetensors").unlink()
    (model / "two.safetensors").symlink_to(model / "nowhere")
    assert model_identity(str(model), None, None) == f"revision:{model}@None"


def test_the_weights_name_the_model(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert model_identity(str(model), None, None) == f"weights:{weights_fingerprint(model)}"
    assert not caplog.records


def test_without_weights_to_read_the_revision_does_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert model_identity(str(tmp_path), "r1", None) == f"revision:{tmp_path}@r1"
    assert model_identity(str(tmp_path), "r2", None) == f"revision:{tmp_path}@r2"
    assert all('model_fingerprint="..."' in record.getMessage() for record in caplog.records)
    assert len(caplog.records) == 2


def test_what_the_user_says_wins_and_nothing_is_read(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    (model / "two.safetensors").write_bytes(b"broken")
    assert model_identity(str(model), "r1", "v7") == "given:v7"
    assert not caplog.records


def test_a_directory_is_where_its_model_lies(model: Path) -> None:
    assert find_model_dir(str(model), None) == model
    assert find_model_dir(str(model / "nowhere"), None) is None


# All that shapes the bytes.

PARTS = {"weights": "w", "dtype": "bfloat16", "block_size": 16, "groups": [1, 2], "layout": {"x": 1, "y": 2}}


def test_a_fingerprint_is_64_hex_digits_and_always_the_same() -> None:
    digits = fingerprint(PARTS)
    assert len(digits) == 64
    assert int(digits, 16) >= 0
    assert fingerprint(dict(PARTS)) == digits


def test_the_order_of_parts_does_not_matter() -> None:
    turned = dict(reversed(PARTS.items()))
    turned["layout"] = {"y": 2, "x": 1}
    assert fingerprint(turned) == fingerprint(PARTS)
    assert fingerprint({**PARTS, "groups": [2, 1]}) != fingerprint(PARTS)


@pytest.mark.parametrize(
    "change",
    [
        *({name: "other"} for name in PARTS),
        {"block_size": "16"},
        {"layout": {"x": 1, "y": 3}},
        {"one more": None},
    ],
    ids=str,
)
def test_every_part_matters(change: dict[str, Any]) -> None:
    assert fingerprint({**PARTS, **change}) != fingerprint(PARTS)


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_is_missing_matters(name: str) -> None:
    assert fingerprint({key: value for key, value in PARTS.items() if key != name}) != fingerprint(PARTS)


def test_our_own_format_is_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(PARTS)
    monkeypatch.setattr("kvoffload.fingerprint.FORMAT_VERSION", 2)
    assert fingerprint(PARTS) != before


def test_what_json_cannot_say_is_refused() -> None:
    with pytest.raises(TypeError):
        fingerprint({"dtype": object()})

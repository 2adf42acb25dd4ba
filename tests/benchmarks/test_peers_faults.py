"""The faults do what their table says."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers import faults


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with files of several sizes: empty, a few bytes, and not a multiple of 64 KiB."""
    made = tmp_path / "cache"
    (made / "deep").mkdir(parents=True)
    for name, size in {"empty": 0, "tiny": 3, "deep/large": (5 << 16) + 77, "even": 1 << 17}.items():
        (made / name).write_bytes(os.urandom(size))
    return made


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_one_bit_flips_in_every_whole_64_kib(folder: Path) -> None:
    before = contents(folder)
    assert faults.flip(folder) == 5 + 2
    for path, old in before.items():
        changed = np.frombuffer(old, np.uint8) ^ np.frombuffer(path.read_bytes(), np.uint8)
        pieces = [changed[start : start + faults.FLIP_EVERY] for start in range(0, len(changed), faults.FLIP_EVERY)]
        expected = [int(len(piece) == faults.FLIP_EVERY) for piece in pieces]
        assert [int(np.unpackbits(piece).sum()) for piece in pieces] == expected
    assert faults.flip(folder) == 7
    assert contents(folder) == before, "the same bits flip back"


def test_a_flip_changes_any_float_of_usual_size(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal(1 << 16).astype("<f4")
    (tmp_path / "values").write_bytes(values.tobytes())
    assert faults.flip(tmp_path) == 4
    flipped = np.fromfile(tmp_path / "values", "<f4")
    changed = flipped != values
    assert changed.sum() == 4
    with np.errstate(over="ignore"):
        assert (~(np.abs(flipped[changed]) < 1e15)).all()

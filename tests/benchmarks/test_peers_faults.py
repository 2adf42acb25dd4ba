"""The faults do what their table says."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers import faults
from demo import model


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


def test_files_are_cut_to_half(folder: Path) -> None:
    before = contents(folder)
    assert faults.truncate(folder) == 3
    for path, old in before.items():
        assert path.read_bytes() == old[: len(old) // 2]


def test_a_small_disk_can_be_filled_and_is_gone_afterwards(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    try:
        with faults.small_disk(disk, 32 << 20) as fill:
            (disk / "before").write_bytes(bytes(faults.FREE_WHEN_FULL))
            fill()
            (disk / "fits").write_bytes(bytes(faults.FREE_WHEN_FULL // 2))
            with pytest.raises(OSError) as raised:
                (disk / "does not fit").write_bytes(bytes(faults.FREE_WHEN_FULL))
            assert raised.value.errno == errno.ENOSPC
    except OSError as error:
        if "cannot be mounted" not in str(error):
            raise
        pytest.skip(str(error))
    assert not list(disk.iterdir())


def test_one_tensor_of_the_replaced_weights_differs(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    model.write_model(one, 3, model.CONFIG | {"num_hidden_layers": 2})
    faults.copy_folder(one, other)
    name = "model.layers.1.self_attn.k_proj.weight"
    faults.negate_tensor(other, name)
    before, after = tensors(one), tensors(other)
    assert before.keys() == after.keys()
    assert [key for key in before if not np.array_equal(before[key], after[key])] == [name]
    np.testing.assert_array_equal(after[name], -before[name])


def tensors(directory: Path) -> dict[str, np.ndarray]:
    raw = (directory / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    return {
        name: np.frombuffer(raw[8 + length :][slice(*entry["data_offsets"])], "<f4")
        for name, entry in header.items()
        if name != "__metadata__"
    }


def test_a_copy_has_the_same_files_and_no_others(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "old").write_text("left")
    faults.copy_folder(folder, copy)
    assert {path.relative_to(copy): raw for path, raw in contents(copy).items()} == {
        path.relative_to(folder): raw for path, raw in contents(folder).items()
    }

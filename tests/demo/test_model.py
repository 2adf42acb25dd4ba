"""The model's files follow Hugging Face's formats."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from demo import model


def test_safetensors_file(tmp_path: Path) -> None:
    weights = model.write_model(tmp_path, seed=0)
    raw = (tmp_path / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    assert size % 8 == 0
    header = json.loads(raw[8 : 8 + size])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert max(t["data_offsets"][1] for t in header.values()) == len(raw) - 8 - size == 4 * weights
    start, end = header["lm_head.weight"]["data_offsets"]
    tensor = np.frombuffer(raw[8 + size + start : 8 + size + end], dtype="<f4")
    assert tensor.size == model.VOCAB * model.HIDDEN
    assert abs(float(tensor.std()) - model.INITIALIZER_RANGE) < 0.001


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    files = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        model.write_model(tmp_path / name, seed)
        files.append((tmp_path / name / "model.safetensors").read_bytes())
    assert files[0] == files[1] != files[2]


def test_fields_of_the_config(tmp_path: Path) -> None:
    model.write_model(tmp_path, seed=0)
    assert model.max_positions(tmp_path) == model.MAX_POSITIONS
    assert model.kv_bytes_per_token(tmp_path) == 2 * 8 * 4 * 64 * 4
    (tmp_path / "config.json").write_text("{}")
    assert model.kv_bytes_per_token(tmp_path) is None
    assert model.max_positions(tmp_path) is None

"""Processes that share a trace in files."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

import numpy as np
import pytest

from benchmarks.synthetic import generate
from kvoffload.lab.columns import PIECE, pieces
from kvoffload.lab.replay import ReplayConfig, replay, replay_many
from kvoffload.lab.trace import TraceError

CONFIGS = [ReplayConfig("lru", 50), ReplayConfig("auto", 50), ReplayConfig("arc", 20, 200, 100, 2)]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder in which temporary folders are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_processes_share_the_files_of_a_trace(temporary: Path) -> None:
    trace = generate("chat", 60)
    alone = [replay(trace, config).to_dict() for config in CONFIGS]
    together = [result.to_dict() for result in replay_many(trace, CONFIGS, processes=2)]
    assert [{**each, "seconds": 0} for each in alone] == [{**each, "seconds": 0} for each in together]
    gc.collect()
    assert list(temporary.iterdir()) == []


def test_no_room_for_the_files_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(TraceError, match="set TMPDIR"):
        replay_many(generate("chat", 60), CONFIGS, processes=2)


def test_pieces_cover_all_requests() -> None:
    lengths = [3, 3 * PIECE, 0, PIECE, 1, *[0] * PIECE, *[1] * (2 * PIECE)]
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    found = list(pieces(offsets))
    assert [first for first, _ in found] == [0, *(end for _, end in found)][:-1]
    assert found[-1][1] == len(lengths)
    for first, end in found:
        assert 1 <= end - first <= PIECE
        assert end == first + 1 or offsets[end] - offsets[first] <= PIECE
    assert list(pieces(np.zeros(1, dtype=np.int64))) == []

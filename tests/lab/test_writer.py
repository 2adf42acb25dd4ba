"""Traces that are written and read back: a replay has the same results."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import numpy as np
import pytest

from benchmarks.synthetic import generate
from kvoffload.lab.readers import read_trace
from kvoffload.lab.replay import ReplayConfig, replay
from kvoffload.lab.trace import UNKNOWN, Trace, TraceError
from kvoffload.lab.writer import write_trace
from tests.lab.traces import make_trace

SAMPLES = Path(__file__).parent / "samples"


def compare(one: Trace, other: Trace) -> None:
    for name in ("input_tokens", "output_tokens", "offsets", "blocks", "prompt_blocks", "ids", "tenants"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    pairs = set(zip(one.sessions.tolist(), other.sessions.tolist(), strict=True))
    assert len({a for a, _ in pairs}) == len({b for _, b in pairs}) == len(pairs)
    assert all((a == UNKNOWN) == (b == UNKNOWN) for a, b in pairs)
    assert np.allclose(one.times - one.times[0], other.times - other.times[0], rtol=0, atol=1e-6)
    assert (one.block_tokens, one.tenant_names) == (other.block_tokens, other.tenant_names)


def figures(trace: Trace) -> list[dict[str, object]]:
    device = max(
        trace.num_distinct // 4, int(max((trace.input_tokens + trace.output_tokens) // trace.block_tokens)) + 2
    )
    configs = [
        ReplayConfig("auto", max(1, trace.num_distinct // 5), device),
        ReplayConfig("lru", max(1, trace.num_distinct // 10), 0, trace.num_distinct // 3),
    ]
    return [replay(trace, config).to_dict() | {"seconds": 0} for config in configs]


SOURCES: list[Path | str] = [
    *sorted(SAMPLES.glob("*.made.jsonl")),
    "chat",
    "agent",
    "documents",
]


@pytest.mark.parametrize("source", SOURCES, ids=[Path(source).name for source in SOURCES])
def test_every_format_survives(tmp_path: Path, source: Path | str) -> None:
    trace = generate(source, 60) if isinstance(source, str) else read_trace(source)
    path = tmp_path / "t.jsonl.gz"
    assert write_trace(trace, path) == path.stat().st_size
    again = read_trace(path)
    compare(trace, again)
    assert figures(again) == figures(trace)
    assert path.read_bytes()[:2] == b"\x1f\x8b"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def example(times: list[float]) -> Trace:
    n = len(times)
    chains = [[1, 2, i + 10] for i in range(n)]
    sessions = [None if i % 3 == 2 else f"s{i % 3}" for i in range(n)]
    tenants = [None if i % 2 else "a tenant: \u00e9\ud800" for i in range(n)]
    return make_trace("t", 16, times, [40] * n, [8] * n, chains, [2 + i % 2 for i in range(n)], sessions, tenants)


def test_sessions_tenants_and_prompt_blocks_survive(tmp_path: Path) -> None:
    trace = example([0.0, 0.0, 1e-7, 1.25, 3e8])
    write_trace(trace, tmp_path / "t")
    again = read_trace(tmp_path / "t")
    compare(trace, again)
    assert (again.num_sessions, again.num_tenants) == (2, 1)
    _, *lines = map(json.loads, (tmp_path / "t").read_text().splitlines())
    assert [line["timestamp"] for line in lines] == [0, 0, 0, 1250, 300_000_000_000]
    assert [line.get("prompt_blocks") for line in lines] == [None, 3, None, 3, None]


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path) -> None:
    trace, path = example([0.0, 1.0]), tmp_path / "t"
    path.write_text("precious")
    with pytest.raises(TraceError, match="exists; name another file, or replace a file with force=True"):
        write_trace(trace, path)
    assert path.read_text() == "precious"
    write_trace(trace, path, force=True)
    compare(trace, read_trace(path))
    with pytest.raises(TraceError, match="exists; name another file"):
        write_trace(trace, tmp_path, force=True)
    with pytest.raises(TraceError, match=r"none/t: cannot be written: .*; name a file in a folder"):
        write_trace(trace, tmp_path / "none" / "t")


def test_a_file_appears_only_when_it_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t"
    path.write_text("precious")
    trace = example([0.0, 1.0])

    def stop(fd: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", stop)
        with pytest.raises(KeyboardInterrupt):
            write_trace(trace, path, force=True)
    assert path.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [path]
    write_trace(trace, path, force=True)
    compare(trace, read_trace(path))

"""Traces in files: equal to traces in memory, and replayed in less memory than they take."""

from __future__ import annotations

import gc
import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

import numpy as np
import pytest

from kvoffload.lab.columns import PIECE, Folder, pieces, renumber, renumber_in_files
from kvoffload.lab.readers import read_trace
from kvoffload.lab.replay import ReplayConfig, replay, replay_many
from kvoffload.lab.trace import Trace, TraceError

ARRAYS = ("times", "input_tokens", "output_tokens", "offsets", "blocks", "prompt_blocks", "ids", "keys", "digests")
CONFIGS = [ReplayConfig("lru", 50), ReplayConfig("auto", 50), ReplayConfig("arc", 20, 200, 100, 2)]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the folder in which temporary folders are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def write_mooncake(path: Path, requests: int, seed: int = 1) -> None:
    """Writes requests, some of which are out of order, and a line that is not one."""
    rng = Random(seed)
    with gzip.open(path, "wt") as file:
        for i in range(requests):
            chain = [(1 << 63) + rng.randrange(12), *range(i, i + rng.randrange(40))]
            line = {"timestamp": 10 * i - rng.choice((0, 0, 35)) + 50, "input_length": 512 * len(chain) - 9}
            file.write(json.dumps({**line, "output_length": 7, "hash_ids": chain}) + "\n")
        file.write("not a request\n")


def write_recorded(path: Path, requests: int) -> None:
    with gzip.open(path, "wt") as file:
        for start in (5000.5, 100.25):
            file.write(json.dumps({"kvoffload_trace": 1, "started": start, "block_tokens": 16}) + "\n")
            for i in range(requests // 2):
                line = {"timestamp": i, "input_length": 33, "output_length": 40, "hash_ids": [1, 2 + i % 9, 50 + i]}
                file.write(json.dumps({**line, "device_tokens": 2, "host_tokens": 3}) + "\n")


def write_sessions(path: Path, requests: int) -> None:
    with gzip.open(path, "wt") as file:
        for session in range(4):
            inner = [
                {"t": 3 * i, "in": 64 * i + 70, "out": 5, "hash_ids": [*range(i + 1)]} for i in range(requests // 4)
            ]
            file.write(json.dumps({"id": str(session), "block_size": 64, "requests": inner}) + "\n")


def write_csv(path: Path, requests: int) -> None:
    rng = Random(2)
    with gzip.open(path, "wt") as file:
        file.writelines(f"{i - i % 3 * 2 + 9},{rng.choice(('a', 'b', '7', str(i)))},100\n" for i in range(requests))


WRITERS = {"mooncake": write_mooncake, "recorded": write_recorded, "kv-cache-tester": write_sessions, "csv": write_csv}


def same_arrays(a: Trace, b: Trace) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ARRAYS)


def both(path: Path, memory_bytes: int = 1000) -> tuple[Trace, Trace]:
    """Returns the trace in memory and in files."""
    return read_trace(path), read_trace(path, memory_bytes=memory_bytes)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_trace_in_files_equals_the_one_in_memory(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    WRITERS[kind](path, 160)
    here, there = both(path)
    assert here.folder is None
    assert there.folder is not None
    assert same_arrays(here, there)
    assert (here.info, here.problems, here.name) == (there.info, there.problems, there.name)
    assert here.info["out_of_order"] if kind != "kv-cache-tester" else "out_of_order" in here.info
    for config in CONFIGS[: 1 if kind == "csv" else 3]:
        one, other = replay(here, config), replay(there, config)
        assert {**one.to_dict(), "seconds": 0} == {**other.to_dict(), "seconds": 0}
        for name in ("device_tokens", "host_tokens", "disk_tokens"):
            assert np.array_equal(getattr(one, name), getattr(other, name))


def test_the_comparison_would_notice_another_trace(tmp_path: Path) -> None:
    """Control."""
    for seed in (1, 2):
        write_mooncake(tmp_path / f"{seed}.gz", 40, seed)
    assert not same_arrays(read_trace(tmp_path / "1.gz"), read_trace(tmp_path / "2.gz", memory_bytes=1000))


def test_a_part_of_a_trace_in_files(tmp_path: Path) -> None:
    write_mooncake(tmp_path / "trace.gz", 100)
    here, there = both(tmp_path / "trace.gz")
    part, other = here.between(0.2, 0.7), there.between(0.2, 0.7)
    del there
    gc.collect()
    assert 0 < part.num_requests < here.num_requests
    assert same_arrays(part, other)
    assert not same_arrays(here, other)


def test_the_files_are_deleted_with_the_trace(tmp_path: Path, temporary: Path) -> None:
    write_mooncake(tmp_path / "trace.gz", 40)
    trace = read_trace(tmp_path / "trace.gz", memory_bytes=1000)
    assert len(list(temporary.iterdir())) == 1
    assert len(trace.keys) == trace.num_distinct
    del trace
    gc.collect()
    assert list(temporary.iterdir()) == []


def test_processes_share_the_files_of_a_trace(tmp_path: Path, temporary: Path) -> None:
    write_mooncake(tmp_path / "trace.gz", 60)
    for trace in both(tmp_path / "trace.gz"):
        alone = [replay(trace, config).to_dict() for config in CONFIGS]
        together = [result.to_dict() for result in replay_many(trace, CONFIGS, processes=2)]
        assert [{**each, "seconds": 0} for each in alone] == [{**each, "seconds": 0} for each in together]
    del trace
    gc.collect()
    assert list(temporary.iterdir()) == []


def test_no_room_for_the_files_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mooncake(tmp_path / "trace.gz", 40)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(TraceError, match="set TMPDIR"):
        read_trace(tmp_path / "trace.gz", memory_bytes=1000)


@pytest.mark.parametrize("part", [10, 1000, 1 << 20])
def test_blocks_are_numbered_in_parts_as_in_memory(part: int) -> None:
    """With ids that are so frequent that they fill several parts."""
    rng = np.random.default_rng(part)
    ids = rng.integers(0, 1 << 64, 30_000, dtype=np.uint64)
    ids[rng.random(len(ids)) < 0.7] = ids[3]
    ids[rng.random(len(ids)) < 0.5] = ids[rng.integers(0, len(ids), int(1e5))][0]
    ids[::7] = rng.integers(0, 500, len(ids[::7]), dtype=np.uint64)
    for each in (ids, ids[:1], ids[:0]):
        blocks, distinct = renumber_in_files(each, Folder(), part)
        expected, expected_distinct = renumber(each)
        assert np.array_equal(blocks, expected)
        assert np.array_equal(distinct, expected_distinct)
        assert np.array_equal(distinct[blocks], each)


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


IN_LITTLE_MEMORY = """
import resource, sys
from array import array
from pathlib import Path
from kvoffload.lab.replay import ReplayConfig, replay
from kvoffload.lab.trace import TraceBuilder

CHAIN, REQUESTS, LIMIT = 1 << 12, 3 << 8, 32 << 20
replay(TraceBuilder().build("warm", 1), ReplayConfig("lru", 1))
status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
limit = int(status["VmData"].split()[0]) * 1024 + LIMIT
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
rows = TraceBuilder(int(sys.argv[1]))
for i in range(REQUESTS):
    rows.add(i, CHAIN, 0, array("Q", range(i * CHAIN // 2, i * CHAIN // 2 + CHAIN)), None)
trace = rows.build("long", 1)
result = replay(trace, ReplayConfig("lru", 3 * CHAIN))
sizes = sum(file.stat().st_size for file in trace.folder.path.iterdir()) if trace.folder else 0
assert result.prefix_hit_tokens == CHAIN // 2 * (REQUESTS - 1), result.prefix_hit_tokens
assert sizes > 2 * LIMIT, sizes
print("replayed")
"""
"""Half of every chain is the end of the one before. Shared mappings do not count as data, because the kernel may drop
their pages."""


@pytest.mark.parametrize(("memory_bytes", "error"), [(1 << 20, ""), (1 << 40, "MemoryError")])
def test_a_trace_that_does_not_fit_into_memory(memory_bytes: int, error: str) -> None:
    """The control keeps it in memory, and fails."""
    done = subprocess.run(
        [sys.executable, "-c", IN_LITTLE_MEMORY, str(memory_bytes)], capture_output=True, text=True, timeout=120
    )
    assert ("replayed" in done.stdout) == (not error), done.stderr[-2000:]
    assert error in done.stderr

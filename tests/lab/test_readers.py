"""Readers: a trace has the content of its file; invalid lines are named, counted and skipped."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import random
import stat
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.synthetic import generate
from kvoffload.lab.readers import FORMATS, read_trace
from kvoffload.lab.readers.lines import MAX_PROBLEMS_KEPT
from kvoffload.lab.readers.mooncake import OUTPUT_TOKEN_S
from kvoffload.lab.replay import ReplayConfig, replay
from kvoffload.lab.trace import UNKNOWN, Trace, TraceError
from kvoffload.lab.writer import write_trace
from tests.lab.traces import TRACES, make_trace, needs_traces

Line = dict[str, Any]
SAMPLES = Path(__file__).parent / "samples"
CONVERT = Path(__file__).parents[2] / "examples" / "convert_trace.py"


def request(at: float = 0, tokens: int = 1024, ids: list[Any] | None = None, **more: Any) -> Line:
    """Returns a line of a Mooncake trace."""
    chain = list(range(-(-tokens // 512))) if ids is None else ids
    return {"timestamp": at, "input_length": tokens, "output_length": 3, "hash_ids": chain, **more}


def write(path: Path, *lines: Line | str | bytes) -> Path:
    raw = [
        line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    ]
    path.write_bytes(b"\n".join(raw) + b"\n")
    return path


def chains(trace: Trace) -> list[list[int]]:
    """Returns the block ids in the file, per request."""
    return [trace.ids[trace.chain(r)].tolist() for r in range(trace.num_requests)]


# Mooncake.


def test_mooncake(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", request(0, 1030, [7, 2**64 - 1, 9]), request(1500.5, 512, [7]))
    trace = read_trace(path)
    assert (trace.block_tokens, trace.num_requests, trace.num_problems, trace.name) == (512, 2, 0, "t.jsonl")
    assert trace.times.tolist() == [0.0, 1.5005]
    assert trace.input_tokens.tolist() == [1030, 512]
    assert trace.output_tokens.tolist() == [3, 3]
    assert chains(trace) == [[7, 2**64 - 1, 9], [7]]
    assert trace.prompt_blocks.tolist() == [3, 1]
    assert trace.info == {"format": "mooncake", "out_of_order": 0}
    incomplete = read_trace(write(tmp_path / "u.jsonl", request(0, 1030, [7, 8])))
    assert incomplete.prompt_blocks.tolist() == [2], "an incomplete last block needs no id"


def test_compressed_files_are_recognized_under_any_name(tmp_path: Path) -> None:
    plain = write(tmp_path / "t.jsonl", *(request(i, 1024, [i, i + 1]) for i in range(300)))
    (tmp_path / "packed").write_bytes(gzip.compress(plain.read_bytes()))
    packed = read_trace(tmp_path / "packed")
    assert chains(packed) == chains(read_trace(plain))


def test_requests_are_sorted_by_time_and_this_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", request(9, 512, [9]), request(5, 512, [5]), request(7, 512, [7]))
    trace = read_trace(path)
    assert chains(trace) == [[5], [7], [9]]
    assert trace.info["out_of_order"] == 1


BAD = [
    ("{", "not JSON: "),
    ('["timestamp"]', "not a JSON object"),
    (b"\xff\xfe{}", "not UTF-8"),
    ("[" * 100_000, "not JSON: nested too deeply"),
    ({"timestamp": 0, "input_length": 512, "output_length": 1}, "hash_ids is missing"),
    ({"input_length": 512, "output_length": 1, "hash_ids": [1]}, "timestamp is missing"),
    (request(timestamp="0"), "timestamp='0': not a time"),
    (request(timestamp=10**400), "timestamp=1000"),
    (json.dumps(request(timestamp=1)).replace("1,", "NaN,", 1), "not JSON: NaN"),
    (json.dumps(request(timestamp=1)).replace("1,", "1e999,", 1), "timestamp=inf: not a time"),
    (json.dumps(request(timestamp=1)).replace("1,", "1" * 5000 + ",", 1), "a number of thousands of digits"),
    (request(input_length=0), "input_length=0: not a whole number, 1 or more"),
    (request(input_length=2**70), "input_length=11805"),
    (request(output_length=-1), "output_length=-1: not a whole number, 0 or more"),
    (request(hash_ids="12"), "hash_ids='12': not a list"),
    (request(ids=[1, "2"]), "hash_ids contains '2'"),
    (request(ids=[-1, 2]), "hash_ids contains -1"),
    (request(ids=[1, 2**64]), "hash_ids contains 18446744073709551616"),
    (request(ids=[1, 1]), "hash_ids contains 1 twice"),
    (request(ids=[1]), "1 hash_ids for input_length=1024, which has 2 blocks"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD, ids=[reason for _, reason in BAD])
def test_an_invalid_line_is_named_counted_and_skipped(tmp_path: Path, bad: Line | str | bytes, reason: str) -> None:
    good = request(1, 1024, [4, 5])
    path = write(tmp_path / "t.jsonl", good, "", bad, good)
    trace = read_trace(path, skip_bad_lines=True)
    assert chains(trace) == [[4, 5], [4, 5]]
    assert trace.num_problems == 1
    (problem,) = trace.problems
    assert (problem.file, problem.line) == (str(path), 3)
    assert reason in problem.reason
    assert len(problem.reason) < 300
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(
        f"{path}: read as mooncake, 1 of 3 lines cannot be used: {path}:3: {problem.reason}"
    )


def test_one_line_of_a_hundred_may_be_bad(tmp_path: Path) -> None:
    lines: list[Line | str | bytes] = [*["x"] * 2, *(request(i) for i in range(198))]
    assert read_trace(write(tmp_path / "t.jsonl", *lines)).num_problems == 2
    worse = write(tmp_path / "u.jsonl", *["y"] * 3, *lines)
    with pytest.raises(TraceError) as caught:
        read_trace(worse)
    assert f"{worse}: read as mooncake, 5 of 203 lines cannot be used: {worse}:1: not JSON" in str(caught.value)
    assert str(caught.value).count("not JSON") == 3
    assert "give --skip-bad-lines (skip_bad_lines=True)" in str(caught.value)
    assert read_trace(worse, skip_bad_lines=True).num_requests == 198


def test_all_problems_are_counted_and_the_first_kept(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t.jsonl", *["x"] * 300, request()), skip_bad_lines=True)
    assert trace.num_problems == 300
    assert [problem.line for problem in trace.problems] == list(range(1, MAX_PROBLEMS_KEPT + 1))


def test_an_empty_trace_or_random_bytes_are_an_error(tmp_path: Path) -> None:
    for name in ("t.jsonl", "t", "t.csv", "t.jsonl.gz"):
        path = tmp_path / name
        for content in (b"", b"\n \n\n"):
            path.write_bytes(gzip.compress(content, mtime=0) if name.endswith("gz") else content)
            with pytest.raises(TraceError, match="the trace is empty: it has no request"):
                read_trace(path)
        path.write_bytes(random.Random(1).randbytes(100_000))
        with pytest.raises(TraceError, match=r"it has no valid request|the format is not recognized"):
            read_trace(path)


def test_a_trace_without_a_valid_line_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", "x", "y")
    with pytest.raises(TraceError) as caught:
        read_trace(path, format="mooncake", skip_bad_lines=True)
    why = "it has no valid request: 2 invalid, the first:"
    assert str(caught.value).startswith(f"{path}: read as mooncake, {why} {path}:1: not JSON")


def test_a_truncated_compressed_file(tmp_path: Path) -> None:
    rng = random.Random(0)
    lines = [request(i, 512, [rng.getrandbits(63)]) for i in range(2000)]
    packed = gzip.compress(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(TraceError, match="cannot be read beyond this line: Compressed file ended"):
        read_trace(path)
    trace = read_trace(path, skip_bad_lines=True)
    assert 500 < trace.num_requests < 1500
    assert chains(trace) == [line["hash_ids"] for line in lines[: trace.num_requests]]
    assert trace.num_problems == 1
    assert trace.problems[0].line == trace.num_requests + 1
    assert "cannot be read beyond this line" in trace.problems[0].reason
    path.write_bytes(packed[:40])
    with pytest.raises(TraceError, match="it has no valid request"):
        read_trace(path)
    path.write_bytes(packed[:500] + bytes(500) + packed[1000:])
    with pytest.raises(TraceError, match="cannot be read beyond this line"):
        read_trace(path)


def test_unknown_formats_and_sizes_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "t.txt", "Lorem ipsum")
    for words in (*FORMATS, "--format"):
        with pytest.raises(TraceError, match=words):
            read_trace(path)
    with pytest.raises(TraceError, match="format='parquet': unknown; use one of mooncake"):
        read_trace(path, format="parquet")
    values: list[Any] = [0, -1, 1.5, True, "512"]
    for value in values:
        with pytest.raises(TraceError, match=r"block_tokens=.*: must be a whole number, 1 or more"):
            read_trace(write(tmp_path / "t.jsonl", request()), block_tokens=value)


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for source, words in (
        (tmp_path / "none.jsonl", "cannot be read: No such file"),
        (tmp_path / "pipe", "not a regular file; write the trace to one"),
        (Path("/dev/zero"), "not a regular file; write the trace to one"),
        (tmp_path, "not a regular file; write the trace to one"),
        ("", "trace='': give the path"),
    ):
        with pytest.raises(TraceError, match=words):
            read_trace(source)


# Turns of sessions.


def test_a_turn_comes_after_the_end_of_the_one_before(tmp_path: Path) -> None:
    def turn_of(name: object, ids: list[int], **when: float) -> Line:
        line = request(0, 512 * len(ids), ids, session_id=name, output_length=100, **when)
        return line if "timestamp" in when else {key: value for key, value in line.items() if key != "timestamp"}

    path = write(
        tmp_path / "t.jsonl",
        turn_of("a", [1], timestamp=1000),
        turn_of("a", [1, 2], delay=500.5),
        turn_of(7, [9], timestamp=0),
        turn_of("a", [1, 2, 3], delay=0),
        turn_of(7, [9, 8], timestamp=60_000, delay=1),
    )
    trace = read_trace(path)
    answer = 100 * OUTPUT_TOKEN_S
    assert trace.times.tolist() == pytest.approx([0, 1, 1.5005 + answer, 1.5005 + 2 * answer, 60])
    assert chains(trace) == [[9], [1], [1, 2], [1, 2, 3], [9, 8]]
    assert trace.sessions.tolist() == [1, 0, 0, 0, 1]
    with pytest.raises(TraceError, match=":1: timestamp is missing, and there is no turn of session_id='a' before"):
        read_trace(write(tmp_path / "u.jsonl", turn_of("a", [1], delay=5)))
    with pytest.raises(TraceError, match=":2: delay=-1: not a time"):
        read_trace(write(tmp_path / "v.jsonl", turn_of("a", [1], timestamp=5), turn_of("a", [1], delay=-1)))


# Files that are no trace.

PACKED = "packed with zstd, xz or bzip2; unpack it"
COUNTS = "token counts without block names: they do not say which prompts begin alike"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,396,156\n", COUNTS),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2026-11-16 18:15:00.68,374,110\n", COUNTS),
        (b'{"timestamp": 0, "input_length": 9, "output_length": 4}\n', COUNTS),
        (b'[{"isl": 9, "osl": 4}]', COUNTS),
        (b'{"messages": [{"role": "user", "content": "tokens"}]}\n', "text without block names: "),
        (b'[\n {"conversations": []}]', "text without block names: .* examples/convert_trace.py"),
        (b'[{"timestamp": 0, "hash_ids": [1]}]', "one JSON array; write one object per line: jq"),
        (
            b'{"id": "s", "block_size": 64, "requests": [{"t": 0, "in": 64, "out": 5, "hash_ids": [1]}]}\n',
            "sessions with lists of requests; .* as in mooncake, recorded, bailian",
        ),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 13\n",
            "a pointer of Git LFS.* git lfs pull",
        ),
        (b'timestamp,input_length,hash_ids\n0,9,"[1]"\n', "has hash_ids, and is not JSON; write one object per line"),
        (b"{'input_length': 9, 'hash_ids': [1]}\n", "has hash_ids, and is not JSON; write one object per line"),
        (b"Count the tokens of this.\n", "the format is not recognized"),
        (b'{"timestamp": 0, "prompt": 9, "output_tokens": 4}\n', COUNTS),
        (b"\x28\xb5\x2f\xfd\x04\x00", PACKED),
        (lzma.compress(b"{}"), PACKED),
        (bz2.compress(b"{}"), PACKED),
        (b"PK\x03\x04\x14\x00", "an archive; unpack it"),
        (gzip.compress(b"trace.jsonl".ljust(257, b"\0") + b"ustar\x0000", mtime=0), "an archive; unpack it"),
        (b"PAR1\x15", "a Parquet file; give the JSON file"),
        (b"<!DOCTYPE html>\n<html>", "a page of a web site, not a trace"),
        ('{"timestamp": 0}\n'.encode("utf-16"), "text in UTF-16; write it in UTF-8"),
        (
            b"\x1b]0;OWNED\x07,obj_id\n1,2\n",
            r'the format is not recognized; it begins with "\\x1b\]0;OWNED\\x07,obj_id"',
        ),
    ],
)
def test_a_file_that_is_no_trace_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=words) as caught:
        read_trace(path, skip_bad_lines=True)
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).isprintable()


def test_a_byte_order_mark_is_no_part_of_a_line(tmp_path: Path) -> None:
    for lines in ([request(0, 512, [5]), request(1, 512, [6])], [HEADER, recorded(0, 16, 0, [5])]):
        plain = write(tmp_path / "t.jsonl", *lines).read_bytes()
        (tmp_path / "u.jsonl").write_bytes(b"\xef\xbb\xbf" + plain)
        assert chains(read_trace(tmp_path / "u.jsonl")) == chains(read_trace(tmp_path / "t.jsonl"))


# Recorded traces. Recording is tested in tests/observe/test_trace.py.

HEADER = {"kvoffload_trace": 1, "started": 1000.0, "block_tokens": 16, "device_blocks": 7, "pool_blocks": 9}


def recorded(at: int, tokens: int, out: int, ids: list[int], **more: Any) -> Line:
    return {"timestamp": at, "input_length": tokens, "output_length": out, "hash_ids": ids, **more}


def test_recorded(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        HEADER,
        recorded(2000, 40, 30, [1, 2, 3, 4], device_tokens=16, host_tokens=16, disk_tokens=0),
        recorded(500, 32, 1, [1, 2], device_tokens=16, host_tokens=0, disk_tokens=1),
    )
    trace = read_trace(path)
    assert trace.block_tokens == 16
    assert trace.times.tolist() == [0.5, 2.0]
    assert trace.prompt_blocks.tolist() == [2, 2]
    assert [len(trace.chain(r)) for r in range(2)] == [2, 4]
    wanted = {
        "device_blocks": 7,
        "pool_blocks": 9,
        "starts": 1,
        "device_tokens": 32,
        "host_tokens": 16,
        "disk_tokens": 1,
    }
    assert wanted.items() <= trace.info.items()
    json.dumps(trace.info)


def test_a_torn_line_of_a_killed_server_is_normal(tmp_path: Path) -> None:
    torn = '{"timestamp": 0, "inp'
    header = HEADER | {"started": 1060.0}
    trace = read_trace(write(tmp_path / "t.jsonl", HEADER, recorded(0, 16, 0, [1]), torn, header, torn))
    assert (trace.num_requests, trace.num_problems) == (1, 2)
    with pytest.raises(TraceError, match="1 of 3 lines cannot be used"):
        read_trace(write(tmp_path / "t.jsonl", HEADER, recorded(0, 16, 0, [1]), torn, recorded(1, 16, 0, [1])))
    with pytest.raises(TraceError, match="1 of 2 lines cannot be used"):
        read_trace(write(tmp_path / "u.jsonl", request(), torn))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (recorded(0, 16, 0, [1, 2]), "2 hash_ids for input_length=16"),
        (recorded(0, 40, 0, [1]), "1 hash_ids for input_length=40"),
        (recorded(0, 40, 0, [1, 2], device_tokens=41), "the sum is more than input_length=40"),
        (recorded(0, 40, 0, [1, 2], host_tokens=-1), "host_tokens=-1"),
        (recorded(0, 40, 0, [1, 2], session=1.5), "session=1.5: not a string or a whole number"),
        (recorded(0, 40, 0, [1, 2], tenant=True), "tenant=True: not a string or a whole number"),
        (recorded(0, 40, 0, [1, 2], prompt_blocks=3), "2 hash_ids for input_length=40"),
        (recorded(0, 40, 64, [1, 2, 3, 4], prompt_blocks=4), "4 hash_ids for input_length=40"),
        (recorded(0, 40, 0, [1, 2], prompt_blocks=-1), "prompt_blocks=-1"),
        (HEADER | {"block_tokens": 0}, "block_tokens=0"),
        ('{"timestamp": 0, "inp', "not JSON"),
    ],
)
def test_invalid_lines_of_a_recorded_trace(tmp_path: Path, line: Line | str, reason: str) -> None:
    trace = read_trace(write(tmp_path / "t.jsonl", HEADER, line, recorded(1, 16, 0, [1])), skip_bad_lines=True)
    assert trace.num_requests == 1
    assert [problem.line for problem in trace.problems] == [2]
    assert reason in trace.problems[0].reason


def test_recorded_traces_that_cannot_be_read(tmp_path: Path) -> None:
    line = recorded(1, 16, 0, [1])
    with pytest.raises(TraceError, match=r"a\.jsonl:1: kvoffload_trace=2: "):
        read_trace(write(tmp_path / "a.jsonl", HEADER | {"kvoffload_trace": 2}, line))
    with pytest.raises(TraceError, match=":3: blocks have 32 tokens from here on"):
        read_trace(write(tmp_path / "b.jsonl", HEADER, line, HEADER | {"block_tokens": 32}))
    with pytest.raises(TraceError, match=r"block_tokens=512: c\.jsonl was recorded with 16"):
        read_trace(write(tmp_path / "c.jsonl", HEADER, line), block_tokens=512)
    with pytest.raises(TraceError, match="the trace is empty"):
        read_trace(write(tmp_path / "d.jsonl", HEADER))


# Traces in the formats of others: samples that were made.


def sessions_of(trace: Trace) -> list[list[int]]:
    """Returns the requests of each session, in the order in which sessions are numbered."""
    return [
        [request for request in range(trace.num_requests) if trace.sessions[request] == session]
        for session in range(trace.num_sessions)
    ]


def prefix(trace: Trace, a: int, b: int) -> int:
    """Returns how many leading blocks two requests share."""
    one, other = trace.chain(a).tolist(), trace.chain(b).tolist()
    return next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))


def test_bailian() -> None:
    path = SAMPLES / "bailian.made.jsonl"
    trace = read_trace(path)
    assert (trace.info["format"], trace.block_tokens) == ("bailian", 16)
    assert trace.times.tolist() == [0, 61.114, 75.5, 80, 99.25]
    assert trace.sessions.tolist() == [0, 1, 0, 2, 0]
    assert [len(trace.chain(request)) for request in range(5)] == [6, 2, 9, 3, 4]
    # An id names a block's own tokens: equal ids after another prefix are other blocks, and one may occur twice.
    assert [prefix(trace, 0, 1), prefix(trace, 0, 2), prefix(trace, 0, 4)] == [1, 6, 0]
    assert len(set(trace.chain(0).tolist())) == 6
    assert not set(trace.chain(0).tolist()) & set(trace.chain(4).tolist())
    larger = read_trace(path, block_tokens=32)
    assert [len(larger.chain(request)) for request in range(5)] == [3, 1, 4, 1, 2]
    assert (prefix(larger, 0, 1), prefix(larger, 0, 2)) == (0, 3)
    with pytest.raises(TraceError, match=r"block_tokens=40: blocks of bailian\.made\.jsonl have 16 tokens"):
        read_trace(path, block_tokens=40)


def test_conversations_with_text_are_converted(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({chr(i): i for i in range(128)}, []))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    sample, trace_file = SAMPLES / "codex_swebenchpro.made.json", tmp_path / "trace.jsonl"
    arguments = [str(sample), str(trace_file), str(tmp_path / "tokenizer.json"), "--block-tokens", "64"]
    subprocess.run([sys.executable, str(CONVERT), *arguments], check=True)
    trace = read_trace(trace_file, block_tokens=64)
    assert trace.num_problems == 0
    first, second = sessions_of(trace)
    assert (len(first), len(second)) == (3, 2)
    # Each prompt continues the one before. Both sessions begin with the same 1,180 letters, after "human" and a line
    # feed: a token each.
    for request, after in pairwise(first):
        assert prefix(trace, request, after) == trace.input_tokens[request] // 64
    assert prefix(trace, first[0], second[0]) == 1186 // 64
    with pytest.raises(TraceError, match=r"text without block names: .* examples/convert_trace\.py"):
        read_trace(sample)


# Real traces.


@needs_traces
@pytest.mark.parametrize(
    ("name", "requests", "accesses", "distinct"),
    [
        ("mooncake_conversation", 12_031, 288_500, 182_790),
        ("mooncake_synthetic", 3_993, 121_877, 43_924),
        ("agentic_coding", 4_204, 939_627, 46_137),
    ],
)
def test_real_traces(name: str, requests: int, accesses: int, distinct: int) -> None:
    trace = read_trace(TRACES / f"{name}.jsonl.gz")
    assert (trace.num_requests, trace.num_accesses, trace.num_distinct) == (requests, accesses, distinct)
    assert (np.diff(trace.times) >= 0).all()


# Traces that are written and read back: a replay has the same results.


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


SOURCES: list[Path | str] = [*sorted(SAMPLES.glob("*.made.jsonl")), "chat", "agent", "documents"]


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

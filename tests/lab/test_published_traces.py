"""Traces that others publish: samples in their formats, and conversations with text."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvoffload.lab.readers import lines, read_trace
from kvoffload.lab.trace import Trace, TraceError

SAMPLES = Path(__file__).parent / "samples"


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


# AgentX and kv-cache-tester.


def test_agentx() -> None:
    trace = read_trace(SAMPLES / "agentx.made.jsonl", strict=True)
    assert (trace.block_tokens, trace.num_requests, trace.num_problems) == (64, 7, 0)
    first, agent, second = sessions_of(trace)
    assert trace.input_tokens[first].tolist() == [640, 896, 1280]
    assert [prefix(trace, first[0], first[1]), prefix(trace, first[1], first[2])] == [10, 14]
    assert prefix(trace, *agent) == 6
    began = trace.times[first[0]]
    # Absolute times: the subagent starts when its marker says, and its second request 5.5 s later.
    assert (trace.times[agent] - began).tolist() == pytest.approx([12.5, 18.0])
    # 7 ids for 377 tokens: the ids of whole blocks count.
    assert [len(trace.chain(request)) for request in second] == [5, 12]
    assert not set(trace.chain(first[0]).tolist()) & set(trace.chain(second[0]).tolist())


def test_rows_of_a_table_have_nulls_where_a_field_is_missing(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (SAMPLES / "agentx.made.jsonl").read_text().splitlines()]
    fields = {field: None for row in rows for request in row["requests"] for field in request}
    for row in rows:
        row |= {"tool_tokens": None, "system_tokens": None}
        row["requests"] = [fields | request for request in row["requests"]]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    trace, wanted = read_trace(path, strict=True), read_trace(SAMPLES / "agentx.made.jsonl")
    assert trace.ids.tolist() == wanted.ids.tolist()
    assert trace.sessions.tolist() == wanted.sessions.tolist()


def test_kv_cache_tester_counts_times_of_subagents_from_their_start() -> None:
    trace = read_trace(SAMPLES / "kv_cache_tester.made.json", strict=True)
    parent, agent = sessions_of(trace)
    assert trace.times[parent].tolist() == [0.0, 30.0]
    assert trace.times[agent].tolist() == [12.5, 19.5]


def test_a_subagent_a_hair_before_its_marker_has_absolute_times(tmp_path: Path) -> None:
    (line, _) = (SAMPLES / "agentx.made.jsonl").read_text().splitlines()
    data = json.loads(line)
    data["requests"][2]["requests"][0]["t"] -= 1e-7
    path = tmp_path / "t.json"
    path.write_text(json.dumps(data))
    _, agent = sessions_of(trace := read_trace(path))
    assert trace.times[agent].tolist() == pytest.approx([12.5, 18.0])


def test_a_parquet_file_is_refused_with_the_fix(tmp_path: Path) -> None:
    path = tmp_path / "train-00000.parquet"
    path.write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(TraceError, match=r"a Parquet file; give the JSON file .* traces\.jsonl"):
        read_trace(path)


# Mooncake.


def test_mooncake_toolagent() -> None:
    trace = read_trace(SAMPLES / "mooncake_toolagent.made.jsonl", strict=True)
    assert (trace.block_tokens, trace.num_requests, trace.num_distinct) == (512, 4, 20)
    assert trace.times.tolist() == [0.0, 3.0, 3.0, 6.0]
    assert [prefix(trace, 0, 1), prefix(trace, 1, 2), prefix(trace, 2, 3)] == [12, 1, 1]
    assert (trace.num_sessions, trace.num_tenants) == (0, 0)


# Bailian.


def test_bailian() -> None:
    path = SAMPLES / "bailian.made.jsonl"
    trace = read_trace(path, strict=True)
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


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("parent_chat_id", -2, "parent_chat_id=-2: not a whole number, -1 or more"),
        ("chat_id", "7", "chat_id='7'"),
        ("hash_ids", [1], "1 hash_ids for input_length=33, which has 3 blocks of 16 tokens"),
        ("timestamp", None, "timestamp=None"),
    ],
)
def test_invalid_lines_of_bailian(tmp_path: Path, field: str, value: object, reason: str) -> None:
    lines = (SAMPLES / "bailian.made.jsonl").read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | {field: value})
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(lines))
    trace = read_trace(path)
    assert trace.num_requests == 4
    assert [problem.line for problem in trace.problems] == [2]
    assert reason in trace.problems[0].reason


# Conversations with text.


def test_codex() -> None:
    trace = read_trace(SAMPLES / "codex_swebenchpro.made.json", strict=True)
    assert trace.block_tokens == 64
    assert trace.info == {"format": "sharegpt", "sessions": 2, "out_of_order": trace.info["out_of_order"]}
    first, second = sessions_of(trace)
    assert (len(first), len(second)) == (3, 2)
    # Each prompt continues the one before and its answer.
    for request, after in pairwise(first):
        assert prefix(trace, request, after) == len(trace.chain(request))
    # The sessions share the 1,180 bytes of instructions, after the mark of the speaker.
    assert prefix(trace, first[0], second[0]) == 1180 // 256
    assert (trace.times[first] - trace.times[first[0]]).tolist() == pytest.approx([0, 10, 20])


def turn(speaker: str, value: object) -> dict[str, object]:
    return {"from": speaker, "value": value}


def conversation(*values: str) -> dict[str, Any]:
    """Returns a conversation in which speakers take turns."""
    return {"conversations": [turn(("human", "gpt")[i % 2], value) for i, value in enumerate(values)]}


def test_blocks_and_tokens_of_a_conversation(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps([conversation("a" * 40, "b" * 23, "c" * 8, "d" * 9), conversation("a" * 40, "x")]))
    trace = read_trace(path, block_tokens=4)
    first, second = sessions_of(trace)
    # "human\n" + 40 + "\n" + "gpt\n" are 51 bytes; the answer and its "\n" 24 more.
    assert trace.input_tokens[first[0]] == 13
    assert trace.output_tokens[first[0]] == 6
    # 13 tokens have 3 whole blocks; of 19 tokens the last is not computed: 4 blocks.
    assert (trace.prompt_blocks[first[0]], len(trace.chain(first[0]))) == (3, 4)
    assert prefix(trace, first[0], second[0]) == 3
    same = tmp_path / "t.jsonl"
    same.write_text("\n".join(map(json.dumps, json.loads(path.read_text()))))
    by_line = read_trace(same, block_tokens=4)
    assert (by_line.ids.tolist(), by_line.times.tolist()) == (trace.ids.tolist(), trace.times.tolist())


def test_a_long_array_is_read_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    text = json.dumps(conversation(*["word " * 2000] * 8)["conversations"])
    with path.open("w") as file:
        file.write("[")
        file.write(",\n".join([f'{{"id": 1, "conversations": {text}}}'] * 400))
        file.write("]")
    assert path.stat().st_size > 30 << 20
    tracemalloc.start()
    trace = read_trace(path, block_tokens=512)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert trace.num_requests == 1600
    assert peak < 12 << 20


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"messages": []}, "not a conversation: expected"),
        (5, "not a conversation: expected"),
        ({"conversations": [turn("user", "x")]}, "turn 0: expected"),
        ({"conversations": [turn("human", 5)]}, "turn 0: expected"),
        ({"conversations": [turn("human", "x"), "y"]}, "turn 1: expected"),
        ({"conversations": [turn("human", "x")]}, "no gpt turn follows"),
        ({"conversations": [turn("gpt", "x")]}, "does not begin with a human turn"),
        ({"conversations": []}, "does not begin with a human turn"),
    ],
)
def test_what_is_not_a_conversation_is_named(tmp_path: Path, record: object, reason: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps([conversation("x", "y"), record, conversation("x", "z")]))
    trace = read_trace(path)
    assert trace.num_requests == 2
    (problem,) = trace.problems
    assert problem.line == 2
    assert reason in problem.reason
    path.write_text(json.dumps([record]))
    with pytest.raises(TraceError, match=r"it has no valid request: 1 invalid, the first: .*t\.json:1: "):
        read_trace(path, format="sharegpt")


@pytest.mark.parametrize(
    ("tail", "reason"),
    [
        (b"", "element 1: not JSON: '' instead of , or ]"),
        (b', {"conversations": [{"from"', "element 2: not JSON: "),
        (b"; 5]", "element 1: not JSON: ';' instead of , or ]"),
        (b", \xff]", "element 2: not JSON: "),
        (b", NaN]", "element 2: not JSON: NaN"),
        (b", " + b"[" * 100_000, "element 2: "),
    ],
)
def test_a_damaged_array_is_read_up_to_the_damage(tmp_path: Path, tail: bytes, reason: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b"\n[" + json.dumps(conversation("x" * 400, "y")).encode() + tail)
    trace = read_trace(path)
    assert trace.num_requests == 1
    assert reason in trace.problems[0].reason


def test_a_truncated_compressed_array(tmp_path: Path) -> None:
    data = json.dumps([conversation(str(i) * 300, "y") for i in range(3000)]).encode()
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(data)[:-1000])
    trace = read_trace(path)
    assert 0 < trace.num_requests < 3000
    assert "beyond element" in trace.problems[0].reason


def test_an_element_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "t.json"
    path.write_text(json.dumps([conversation("x", "y"), conversation("x" * (5 << 20), "y")]))
    trace = read_trace(path)
    assert trace.num_requests == 1
    assert "longer than 1,048,576 characters" in trace.problems[0].reason


def test_any_text_of_json_has_blocks_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    texts = ["\\ud800", "\\udc00", "\\u0000", "?", "\u00e9"]
    path.write_text(
        "["
        + ",".join(
            f'{{"conversations": [{{"from": "human", "value": "{text * 9}"}}, {{"from": "gpt", "value": ""}}]}}'
            for text in texts
        )
        + "]"
    )
    trace = read_trace(path, block_tokens=3)
    assert trace.num_problems == 0
    assert len({int(trace.chain(request)[0]) for request in range(len(texts))}) == len(texts)


def test_an_empty_array_is_an_empty_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(" [ ] ")
    with pytest.raises(TraceError, match="the trace is empty"):
        read_trace(path, format="sharegpt")

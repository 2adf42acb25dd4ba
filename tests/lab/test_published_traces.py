"""Traces that others publish: samples in their formats, and conversations with text."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from kvoffload.lab.readers import read_trace
from kvoffload.lab.trace import Trace, TraceError

EXAMPLES = Path(__file__).parents[2] / "examples"
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


# Mooncake.


# Bailian.


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


# Conversations with text.


def test_conversations_with_text_are_converted(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({chr(i): i for i in range(128)}, []))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    sample, trace_file = SAMPLES / "codex_swebenchpro.made.json", tmp_path / "trace.jsonl"
    arguments = [str(sample), str(trace_file), str(tmp_path / "tokenizer.json"), "--block-tokens", "64"]
    subprocess.run([sys.executable, str(EXAMPLES / "convert_trace.py"), *arguments], check=True)
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

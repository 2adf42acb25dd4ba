"""The replay of the second act: its hits are compared with those of the server."""

from __future__ import annotations

import time
from pathlib import Path

from demo.act import ActResult
from demo.protocol import RequestResult
from demo.replay import replay_act
from kvoffload.cache.keys import hash_blocks
from kvoffload.observe.records import RequestRecord
from kvoffload.observe.trace import TraceRecorder

from .conftest import changed

BLOCK = 16


def record(path: Path, documents: list[int], groups: int = 1) -> None:
    """Records one prompt of 100 tokens per document, on a server whose device cache holds one prompt and one block."""
    header = {"device_blocks": 8, "pool_blocks": 64, "policy": "lru", "groups": groups} | {"host_contents": "exclusive"}
    recorder = TraceRecorder(str(path), BLOCK, header)
    for document in documents:
        keys = hash_blocks([document] * 100, BLOCK)
        recorder.add(time.time(), RequestRecord(time.time(), "r", 100, 0, 0), keys, 101, 100, {})
    recorder.close()


def found(act: ActResult, tokens: list[tuple[int, int]]) -> list[RequestResult]:
    """Returns requests that found the given tokens on the device and in the host."""
    for i, (device, host) in enumerate(tokens):
        act = changed(act, i, device_tokens=device, host_tokens=host)
    return act.requests[: len(tokens)]


def test_agreement(tmp_path: Path, offload: ActResult) -> None:
    record(tmp_path / "t", [7, 7, 1, 1, 2, 1])
    requests = found(offload, [(0, 0), (96, 0), (0, 0), (16, 80)])
    agreement = replay_act(tmp_path / "t", requests)
    assert agreement is not None
    assert agreement.measured == agreement.replayed == {"device": 112, "host": 80}
    assert agreement.agrees
    assert (agreement.requests, agreement.largest_difference) == (4, 0)


def test_disagreement(tmp_path: Path, offload: ActResult) -> None:
    record(tmp_path / "t", [7, 7, 1, 1, 2, 1])
    agreement = replay_act(tmp_path / "t", found(offload, [(0, 0), (96, 0), (0, 0), (16, 64)]))
    assert agreement is not None
    assert not agreement.agrees
    assert agreement.largest_difference == 16

"""The report's checks and numbers."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from demo.act import ActResult
from demo.protocol import RequestResult, Source, classify
from demo.replay import Agreement, replay_act
from demo.report import Report, compare, make_report
from kvoffload.cache.keys import hash_blocks
from kvoffload.observe.records import RequestRecord
from kvoffload.observe.trace import TraceRecorder

from .conftest import changed


def test_a_good_run_has_no_failures(report: Report) -> None:
    assert report.failures == report.warnings == []


def test_the_file_has_the_numbers(report: Report) -> None:
    data = json.loads(json.dumps(report.to_dict()))
    assert data["ok"] is True
    assert data["max_logprob_diff"] == 0.0
    assert data["corrupted_outputs"] == 1
    assert data["hit_tokens"] == {"device": 16 * 1920, "host": 32 * 1920, "disk": 16 * 1920}
    assert {source: q["count"] for source, q in data["ttft_ms"].items()} == {
        "recompute": 48,
        "device": 16,
        "host": 32,
        "disk": 16,
    }
    assert all(q["p50"] <= q["p95"] for q in data["ttft_ms"].values())
    assert {name: len(act["requests"]) for name, act in data["acts"].items()} == {
        "baseline": 64,
        "offload": 64,
        "restart": 16,
    }


def test_a_different_token_fails(baseline: ActResult, restart: ActResult, offload: ActResult) -> None:
    broken = changed(offload, 30, output_tokens=[30, 99, 7])
    report = make_report([baseline, broken, restart], "made up", 0)
    assert report.versus_offload.different == [30]
    (sentence,) = report.failures
    assert "1 of 64 requests, the first of which is 30" in sentence


@pytest.mark.parametrize(("logprob", "same"), [(-1.99995, True), (-1.9998, False), (None, False)])
def test_logprob_tolerance(
    baseline: ActResult, restart: ActResult, offload: ActResult, logprob: float | None, same: bool
) -> None:
    other = changed(offload, 5, logprobs=[-1.0, logprob, -1.5])
    assert (compare(baseline.requests, other.requests).different == []) is same
    content = json.dumps(make_report([baseline, other, restart], "made up", 0).to_dict(), allow_nan=False)
    assert json.loads(content)["ok"] is same


def test_a_replay_with_other_hits_fails(report: Report) -> None:
    measured = {"device": 10_000, "host": 20_000}
    near = Agreement(64, measured, {"device": 9_900, "host": 20_200}, 200)
    far = Agreement(64, measured, {"device": 9_899, "host": 20_000}, 101)
    assert replace(report, replay=near).failures == []
    (sentence,) = replace(report, replay=far).failures
    assert "9,899 instead of 10,000 tokens on the device" in sentence
    data = json.loads(json.dumps(replace(report, replay=near).to_dict()))
    assert data["replay"] == {
        "requests": 64,
        "measured_hit_tokens": measured,
        "replayed_hit_tokens": {"device": 9_900, "host": 20_200},
        "largest_difference": 200,
        "agrees": True,
    }
    assert report.to_dict()["replay"] is None


def test_undetected_corruption_fails(baseline: ActResult, restart: ActResult, offload: ActResult) -> None:
    restart.control = restart.requests
    report = make_report([baseline, offload, restart], "made up", 0)
    (sentence,) = report.failures
    assert "Corruption was not detected" in sentence


@pytest.mark.parametrize(
    ("device", "host", "disk", "source"),
    [
        (0, 0, 0, Source.RECOMPUTE),
        (0, 900, 0, Source.RECOMPUTE),
        (300, 300, 300, Source.RECOMPUTE),
        (0, 1000, 0, Source.HOST),
        (600, 1300, 0, Source.HOST),
        (1300, 600, 0, Source.DEVICE),
        (0, 600, 1300, Source.DISK),
        (0, 1300, 600, Source.HOST),
    ],
)
def test_the_source_is_the_tier_with_most_tokens(device: int, host: int, disk: int, source: Source) -> None:
    assert classify(2000, device, host, disk) is source


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


@pytest.mark.parametrize("host", [80, 64])
def test_agreement(tmp_path: Path, offload: ActResult, host: int) -> None:
    record(tmp_path / "t", [7, 7, 1, 1, 2, 1])
    agreement = replay_act(tmp_path / "t", found(offload, [(0, 0), (96, 0), (0, 0), (16, host)]))
    assert agreement is not None
    assert (agreement.measured, agreement.replayed) == ({"device": 112, "host": host}, {"device": 112, "host": 80})
    assert (agreement.agrees, agreement.requests, agreement.largest_difference) == (host == 80, 4, 80 - host)

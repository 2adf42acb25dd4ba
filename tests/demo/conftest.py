"""Invented acts, as the engine would report them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from demo.act import ActResult
from demo.protocol import ActSummary, EngineInfo, RequestResult, Source, classify
from demo.report import Report, make_report
from demo.run import USUAL, known_answers, plan_visits

INFO = EngineInfo("0.0.0", "CPU, 2 cores", 20.0)
TTFT = {Source.RECOMPUTE: 700.0, Source.DEVICE: 40.0, Source.HOST: 60.0, Source.DISK: 90.0}
PROMPT_TOKENS = 2000


def _request(index: int, document: int, question: int, offload: bool) -> RequestResult:
    follow_up = question == USUAL.turns
    device = 1920 if follow_up else 0
    host = 1920 if offload and not follow_up and question > 0 else 0
    source = classify(PROMPT_TOKENS, device, host, 0)
    return RequestResult(
        index=index,
        document=document,
        follow_up=follow_up,
        prompt_tokens=PROMPT_TOKENS,
        device_tokens=device,
        host_tokens=host,
        disk_tokens=0,
        source=source,
        reason="never_stored" if offload and source is Source.RECOMPUTE else None,
        ttft_ms=TTFT[source] + index,
        total_ms=TTFT[source] + 80.0 + index,
        output_tokens=[index, document, 7],
        logprobs=[-1.0, -2.0, -1.5],
    )


def make_act(offload: bool) -> ActResult:
    requests = [_request(i, d, q, offload) for i, (d, q) in enumerate(plan_visits())]
    metrics = {"store_bytes": 6e8, "store_seconds": 0.1, "load_bytes": 9e8, "load_seconds": 0.1}
    return ActResult(INFO, requests, ActSummary(20.0 if offload else 45.0, metrics if offload else {}))


def make_restart(baseline: ActResult, disk: int = 1920) -> ActResult:
    """Returns an act that repeats each document's last request, with ``disk`` of its tokens found on disk, and then
    with corrupted bytes, which changes one output."""
    requests = [
        replace(
            baseline.requests[index],
            follow_up=False,
            device_tokens=0,
            disk_tokens=disk,
            source=classify(PROMPT_TOKENS, 0, 0, disk),
            ttft_ms=TTFT[Source.DISK if disk else Source.RECOMPUTE],
        )
        for index, answer in enumerate(known_answers(baseline.requests))
        if answer is None
    ]
    control = [replace(requests[0], output_tokens=[1, 2, 3]), *requests[1:]]
    return ActResult(INFO, requests, ActSummary(3.0, {}, direct_io=True), control)


def changed(act: ActResult, index: int, **fields: Any) -> ActResult:
    """Returns the act with one request changed."""
    requests = list(act.requests)
    requests[index] = replace(requests[index], **fields)
    return ActResult(act.info, requests, act.summary, act.control)


@pytest.fixture
def baseline() -> ActResult:
    return make_act(offload=False)


@pytest.fixture
def offload() -> ActResult:
    return make_act(offload=True)


@pytest.fixture
def restart(baseline: ActResult) -> ActResult:
    return make_restart(baseline)


@pytest.fixture
def report(baseline: ActResult, offload: ActResult, restart: ActResult) -> Report:
    return make_report([baseline, offload, restart], model="made up", seed=0)

"""A short version of the demo on real vLLM, in ``make soak``. Its first act runs in a new process, as elsewhere."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from vllm_harness import DEMO_MODEL, Runner, set_up_demo

from demo import forks, process, smollm2
from demo import run as demo_run
from demo.act import EngineProcess, Progress
from demo.engine import connector
from demo.protocol import RequestResult, Source

pytestmark = [pytest.mark.vllm, pytest.mark.soak]

SMALL = demo_run.Sizes(
    documents=4,
    document_blocks=(4, 5),
    turns=2,
    device_blocks=14,
    max_model_len=1280,
    model=DEMO_MODEL,
)


CHATS = replace(
    demo_run.CHATS, users=1, turns=1, document_blocks=(8, 8), device_blocks=14, max_model_len=384, answer_tokens=8
)
"""The device has no room for two prompts."""


class Seen(Progress):
    def __init__(self) -> None:
        self.acts: list[str] = []
        self.requests = 0

    def begin(self, title: str, requests: int) -> None:
        self.acts.append(title.split("  ")[0])

    def request(self, result: RequestResult) -> None:
        self.requests += 1


def test_short_demo(run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_up_demo(monkeypatch)
    warm = run.parent(os.environ).start_process
    starts = chain([process.start_process], repeat(warm))

    def start_process(*arguments: Any) -> process.Process:
        return next(starts)(*arguments)

    monkeypatch.setattr(forks, "start_engine", start_process)
    seen = Seen()
    report = demo_run.run_demo(tmp_path, text=None, model=None, seed=7, progress=seen, sizes=SMALL)
    assert report.failures == []
    assert seen.acts == ["act 1", "act 2", "act 3"]
    assert len(report.offload.requests) == len(demo_run.plan_visits(SMALL))
    assert seen.requests == 2 * len(demo_run.plan_visits(SMALL)) + 2 * len(report.restart.requests)
    assert len(report.restart.control) == 4
    assert [r.source for r in report.offload.requests[:2]] == [Source.RECOMPUTE, Source.DEVICE]
    assert report.ttft_ms[Source.HOST].count == 4
    assert report.ttft_ms[Source.DISK].count == len(report.restart.requests) == 4
    assert not report.versus_restart.different
    assert report.replay is not None
    assert report.replay.measured == {tier: report.hit_tokens[tier] for tier in ("device", "host")}
    assert report.replay.largest_difference <= 1
    assert min(report.replay.replayed.values()) > 1000
    assert list(tmp_path.glob("disk-*")) == []


@pytest.mark.skipif(not smollm2.is_installed(), reason=f"{smollm2.NAME} {smollm2.MISSING}")
def test_a_trained_model_makes_sense_unless_what_it_loads_is_corrupted(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other tokens, or weights in other places, its answers would make no sense either."""
    set_up_demo(monkeypatch)
    monkeypatch.setattr(forks, "start_engine", run.parent(os.environ).start_process)
    model = smollm2.smollm2_directory()
    documents = demo_run.load(model, False, None, 7, CHATS)
    config = demo_run.make_config(model, False, documents, 7, CHATS)
    with EngineProcess(replace(config, connector=connector({"host_bytes": "256MiB"})), tmp_path / "log") as engine:
        computed = engine.ask(0, 0)
        engine.ask(1, 1)
        loaded = engine.ask(2, 0)
        engine.call("corrupt_loads")
        engine.ask(3, 1)
        corrupted = engine.ask(4, 0)
    assert computed.question == "What is this text about?"
    assert computed.answer.startswith("This text")
    assert (computed.source, loaded.source, corrupted.source) == (Source.RECOMPUTE, Source.HOST, Source.HOST)
    assert loaded.output_tokens == computed.output_tokens
    assert not corrupted.answer.startswith("This text")

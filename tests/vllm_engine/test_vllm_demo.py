"""A short version of the demo on real vLLM. In ``make soak`` its first act runs in a new process, as elsewhere."""

from __future__ import annotations

import os
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from vllm_harness import DEMO_MODEL, Runner, set_up_demo

from demo import forks, inside, process
from demo import run as demo_run
from demo.act import Progress
from demo.protocol import RequestResult, Source
from kvoffload.testing.scale import SCALE

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not demo_run.vllm_installed(), reason="vLLM is not installed"),
]

SMALL = demo_run.Sizes(
    documents=4,
    document_blocks=(4, 5),
    turns=2,
    trial_documents=2,
    device_blocks=14,
    max_model_len=1280,
    model=DEMO_MODEL,
)


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
    starts = chain([process.start_process if SCALE > 1 else warm], repeat(warm))

    def start_process(*arguments: Any) -> process.Process:
        return next(starts)(*arguments)

    monkeypatch.setattr(forks, "start_engine", start_process)
    seen = Seen()
    report = demo_run.run_demo(tmp_path, text=None, model=None, seed=7, progress=seen, sizes=SMALL)
    assert report.failures == []
    assert seen.acts == [f"act {number}" for number in (1, 2, 3, 4, 5, 6, 5, 6)]
    assert len(report.offload.requests) == len(demo_run.plan_visits(SMALL))
    tried = 4 * (1 + len(inside.TIERS))
    assert seen.requests == 2 * len(demo_run.plan_visits(SMALL)) + 2 * len(report.restart.requests) + tried
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
    theirs, ours = report.trials
    assert (theirs.found, theirs.wrong, theirs.computed) == (2, 2, 0)
    assert (ours.found, ours.wrong, ours.computed) == (2, 0, 2)
    data = report.to_dict()
    assert data["store_gbps"] > 0
    assert data["load_gbps"] > 0
    assert 0 < report.offload.requests[-1].pool_used <= report.offload.requests[-1].pool_blocks

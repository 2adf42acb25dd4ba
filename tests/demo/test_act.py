"""The parent's side of an act, tested with small programs instead of an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo import act
from demo.act import run_act
from demo.process import DemoError
from demo.protocol import ActConfig, RequestResult

VISITS = [(0, 0), (0, 0)]
CONFIG = ActConfig(
    "model", False, 3, [("x" * 100_000, 9)], [["q"]], VISITS, 4, 8, 3072, 128, 64, 1, 0, None, [None, None]
)

PRELUDE = """
import json, os, sys, time
out = os.fdopen(int(sys.argv[-1]), "w", buffering=1)
config = json.loads(sys.stdin.readline())
def send(message): out.write(json.dumps(message) + "\\n")
def command(name): assert json.loads(sys.stdin.readline())["do"] == name
def info(): send(dict(vllm_version="0", device="none", start_s=0.0))
def request(i, do="visit"):
    command(do)
    send(dict(index=i, document=0, follow_up=False, prompt_tokens=9, device_tokens=0, host_tokens=0, disk_tokens=0,
        source="recompute", reason=None, ttft_ms=1.0, total_ms=2.0, output_tokens=[1], logprobs=[-1.0]))
def summary():
    command("end")
    send(dict(wall_s=1.0, metrics={}))
"""


def run(tmp_path: Path, program: str, seen: list[RequestResult] | None = None) -> act.ActResult:
    note = (seen if seen is not None else []).append
    return run_act(CONFIG, tmp_path / "act.log", note, ("-c", PRELUDE + program))


def test_a_whole_act(tmp_path: Path) -> None:
    seen: list[RequestResult] = []
    result = run(tmp_path, "info(); request(0); request(1); print(len(config['documents'][0][0])); summary()", seen)
    assert seen == result.requests
    assert [r.index for r in result.requests] == [0, 1]
    assert result.summary.wall_s == 1.0
    assert (tmp_path / "act.log").read_text() == "100000\n"


def test_a_crash_shows_the_log(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match=r"ended too early(.|\n)*act\.log(.|\n)*ValueError: no such thing"):
        run(tmp_path, "info(); request(0); raise ValueError('no such thing')")

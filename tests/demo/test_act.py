"""Acts: the parent's side, tested with small programs instead of an engine, and their plan: returning documents miss on
the device, prompts fit, the disk outlives its act."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo import act, run
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


def act_of(tmp_path: Path, program: str, seen: list[RequestResult] | None = None) -> act.ActResult:
    note = (seen if seen is not None else []).append
    return run_act(CONFIG, tmp_path / "act.log", note, ("-c", PRELUDE + program))


def test_a_whole_act(tmp_path: Path) -> None:
    seen: list[RequestResult] = []
    result = act_of(tmp_path, "info(); request(0); request(1); print(len(config['documents'][0][0])); summary()", seen)
    assert seen == result.requests
    assert [r.index for r in result.requests] == [0, 1]
    assert result.summary.wall_s == 1.0
    assert (tmp_path / "act.log").read_text() == "100000\n"


def test_a_crash_shows_the_log(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match=r"ended too early(.|\n)*act\.log(.|\n)*ValueError: no such thing"):
        act_of(tmp_path, "info(); request(0); raise ValueError('no such thing')")


# The plan.


@pytest.mark.parametrize("sizes", [run.USUAL, run.CHATS], ids=["random", "chats"])
def test_a_document_is_evicted_before_it_returns(sizes: run.Sizes) -> None:
    """Whoever asks about it."""
    last: dict[int, int] = {}
    for at, (conversation, turn) in enumerate(run.plan_visits(sizes)):
        document = conversation % sizes.documents
        if turn != sizes.turns and document in last:
            between = {c % sizes.documents for c, _ in run.plan_visits(sizes)[last[document] + 1 : at]} - {document}
            assert len(between) * sizes.document_blocks[0] > sizes.device_blocks
        last[document] = at


def test_the_disk_outlives_the_act(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    plans = run.act_plans(2 << 30, tmp_path, trace)
    options = [(plan.connector or {}).get("kv_connector_extra_config", {}) for plan in plans]
    assert [plan.is_restart for plan in plans] == [False, False, True]
    assert options[2] == {"host_bytes": "2GiB", "disk_dir": str(tmp_path), "disk_bytes": "2GiB"}
    assert options[1] == options[2] | {"record_trace": str(trace)}, "only the second act is recorded"


def test_a_full_disk_is_reported_before_anything_runs(tmp_path: Path) -> None:
    with (
        pytest.raises(DemoError, match="choose a directory on another disk"),
        run.disk_directory(tmp_path, 1 << 60),
    ):
        pass
    with run.disk_directory(tmp_path, 1) as directory:
        (directory / "slab").write_bytes(b"x")
        assert directory.parent == tmp_path
    assert not directory.exists()

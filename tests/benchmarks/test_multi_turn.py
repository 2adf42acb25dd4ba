"""Tests what is around vLLM's multi-turn client: its input, and what is made of its output."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("matplotlib")
from benchmarks.peers import multi_turn
from benchmarks.peers.multi_turn import MAX_TOKENS, MIN_REQUESTS, NUM_CLIENTS, WORKLOADS, Point, measure, publish
from demo.process import DemoError
from demo.servers import VllmServer

CLIENT = """
import json, sys
json.load(open(sys.argv[sys.argv.index("--input-file") + 1]))
stats = [{"ttft_ms": number} for number in (30.0, 10.0, 20.0)]
json.dump(stats, open(sys.argv[sys.argv.index("--stats-json-output") + 1], "w"))
print("requests_per_sec = 2.500")
"""


@pytest.fixture
def server() -> VllmServer:
    return cast(VllmServer, SimpleNamespace(port=1))


def client(monkeypatch: pytest.MonkeyPatch, folder: Path, program: str) -> None:
    (folder / "benchmark_serving_multi_turn.py").write_text(program)
    monkeypatch.setattr(multi_turn, "CLIENT", folder)


def test_a_point_is_what_the_client_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: VllmServer) -> None:
    client(monkeypatch, tmp_path, CLIENT)
    point = measure(server, tmp_path, WORKLOADS[0], 8, tmp_path / "text", tmp_path)
    assert point == Point(8, 2.5, 20.0)


@pytest.mark.parametrize("program", ["raise SystemExit('no such model')", "print('no rate: no such model')"])
def test_a_client_that_fails_is_quoted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: VllmServer, program: str
) -> None:
    client(monkeypatch, tmp_path, program)
    with pytest.raises(DemoError, match="no such model"):
        measure(server, tmp_path, WORKLOADS[0], 8, tmp_path / "text", tmp_path)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
@pytest.mark.parametrize("active", multi_turn.CONVERSATIONS)
def test_there_are_enough_conversations(tmp_path: Path, workload: multi_turn.Workload, active: int) -> None:
    workload.write(tmp_path / "about.json", active, tmp_path / "text")
    about: dict[str, Any] = json.loads((tmp_path / "about.json").read_text())
    assert about["num_conversations"] >= active + NUM_CLIENTS
    assert about["num_conversations"] * workload.turns >= max(MIN_REQUESTS, workload.num_requests(active))
    longest = workload.common + workload.first[1] + workload.turns * (workload.question[1] + 4 * workload.answer[1])
    assert longest < MAX_TOKENS, "the answers of a random model take more bytes than tokens"


def test_a_system_without_points_is_named(tmp_path: Path) -> None:
    ours, theirs = "kvoffload", "LMCache"
    results = {workload.name: {ours: [Point(2, 1.5, 40.0)], theirs: []} for workload in WORKLOADS}
    publish(results, {f"chat, {theirs}": "it does not start"}, tmp_path, "today")
    page = (tmp_path / "multi-turn.md").read_text()
    assert f"| {ours} | 1.50 (40) |" in page
    assert f"| {theirs} | - |" in page
    assert f"- chat, {theirs}: it does not start" in page
    assert "active conversations" in (tmp_path / "multi-turn.svg").read_text()


def test_without_the_client_nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(multi_turn, "CLIENT", tmp_path / "nowhere")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **named: sys.exit("started"))
    with pytest.raises(SystemExit, match="make peers installs"):
        multi_turn.main(tmp_path, [], True, "today")

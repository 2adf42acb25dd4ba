"""``make peers`` in real vLLM: kvoffload against recomputation, through the path that every system takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

# Not "vllm": a directory of that name on sys.path could be imported instead.
pytest.importorskip("vllm.version")
from benchmarks.peers.__main__ import main

pytestmark = pytest.mark.vllm


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_kvoffload_answers_like_recompute_and_finds_its_prompts(tmp_path: Path) -> None:
    main(["--quick", "--only", "kvoffload", "--out", str(tmp_path)])
    recompute, kvoffload = json.loads((tmp_path / "peers.json").read_text())["systems"]
    for system in recompute, kvoffload:
        assert system["problem"] is None
        assert system["disk_problem"] is None
    # The control: without offloading nothing is left of a prompt that the device has evicted.
    for size in "2000", "3500":
        assert recompute["times"][size]["found"] < 0.01
        assert kvoffload["times"][size]["found"] > 0.9
    assert kvoffload["disk_bytes"] > 0
    section = (tmp_path / "peers.md").read_text().partition("**Answers compared")[2]
    (row,) = (line for line in section.splitlines() if line.startswith("| kvoffload |"))
    assert row.endswith("| 0 |")

"""kill -9 at random moments on vLLM's own offloading with kvoffload's disk tier: the next server finds what is there,
and its answers are right. ``KVOFFLOAD_TEST_SCALE=20`` makes 40 kills."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from test_vllm_tier_storm import OURS, offloading
from tier_storm import taken
from vllm_harness import DEADLINE_S, TOLERANCE, Child, Runner, differences_beyond_ties

from demo.process import kill_session
from tests.scale import scaled

pytestmark = [pytest.mark.vllm, pytest.mark.soak]

ENGINE_KILLS = scaled(2)
PROMPTS = 12
REGION = re.compile(r"/dev/shm/vllm_offload_\S+")


def disk(folder: Path, budget: int) -> dict[str, Any]:
    return OURS | {"tier": {"kind": "disk", "dir": str(folder), "bytes": budget}, "load_deadline_ms": 20_000}


def lines_of(said: Path) -> list[Any]:
    """Returns the lines of JSON that a server has written whole."""
    text = said.read_text() if said.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line[:1] in "{[" and line[-1:] in "}]"]


@contextlib.contextmanager
def killed(child: Child | subprocess.Popen[bytes]) -> Iterator[None]:
    """Kills a server in the end, and removes the memory that its vLLM leaves behind."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            regions = set(REGION.findall(Path(f"/proc/{child.pid}/maps").read_text()))
            os.kill(child.pid, signal.SIGKILL)
            child.wait(DEADLINE_S)
            for region in regions:
                Path(region).unlink(missing_ok=True)
        kill_session(child)


def wait_and_watch(
    child: Child | subprocess.Popen[bytes], log: Path, folder: Path, budget: int, is_time: Any, later_s: float
) -> None:
    """Returns ``later_s`` after ``is_time()`` holds. Meanwhile the server lives, and the disk's budget holds."""
    deadline, until = time.monotonic() + DEADLINE_S, None
    while until is None or time.monotonic() < until:
        assert child.poll() is None, log.read_text()[-4000:]
        assert taken(folder) <= budget
        if until is None and is_time():
            until = time.monotonic() + later_s
        assert until is not None or time.monotonic() < deadline, f"it hangs: {log.read_text()[-4000:]}"
        time.sleep(0.01)


def test_a_killed_engine_answers_right_after_its_restart(run: Runner, tmp_path: Path) -> None:
    folder, budget = tmp_path / "disk", 8 << 20
    folder.mkdir(mode=0o700)
    expected = run.right("llama", PROMPTS)
    random = Random(11)
    cached: list[int] = []
    for number in range(ENGINE_KILLS + 1):
        said = tmp_path / f"{number}.said"
        acts = {"endless": {"said": str(said), "seed": number}}
        child, result = run.start(acts, prompts=PROMPTS, offloading=offloading(disk(folder, budget)))
        wanted = random.randint(1, PROMPTS)
        with killed(child):
            log = result.with_suffix(".log")
            wait_and_watch(
                child,
                log,
                folder,
                budget,
                lambda said=said, wanted=wanted: len(lines_of(said)) >= wanted,
                random.uniform(0, 0.3),
            )
        answers = lines_of(said)
        got, right = [each["answer"] for each in answers], [expected[each["prompt"]] for each in answers]
        assert differences_beyond_ties(got, right, TOLERANCE) == []
        cached.append(sum(each["cached"] for each in answers[:1]))
    # The first prompt of each server is one that all have asked: only the first server must compute it.
    assert cached[0] == 0
    assert all(found > 0 for found in cached[1:]), cached

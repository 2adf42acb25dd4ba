"""The board tells an engine that hangs from one that crashes or refuses to start. The engines here compute nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import board_process
from benchmarks.peers.board_judge import Outcome
from benchmarks.peers.board_process import CrashError, RefusedError, Running
from benchmarks.peers.systems import HangError
from demo.process import start_process

PROMPTS = [[1, 2, 3], [4, 5], [6]]
ENGINE = """
import os, signal, time
from demo.process import Served, serve

class Engine(Served):
    '''Answers the first prompt, and then does what the connector says.'''

    def __init__(self, model, connector):
        self.kind, self.asked = connector, 0
        if self.kind == "refuses":
            raise ValueError("only on\\n  GPUs")
        if self.kind == "silent":
            time.sleep(600)
        if self.kind == "dies":
            os._exit(3)

    def ask(self, prompts, max_tokens, source):
        self.asked += 1
        if self.asked > 1 and self.kind == "hangs":
            time.sleep(600)
        if self.asked > 1 and self.kind == "raises":
            raise AssertionError("success expected")
        if self.asked > 1 and self.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return [dict(tokens=[1], logprobs=[-0.5], error=None, cached_tokens=2, reported_tokens=2, ttft_ms=1.0)]

serve(Engine)
"""


@pytest.fixture(autouse=True)
def deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that answers has as much time as it needs; one that hangs would hang for ten minutes."""
    monkeypatch.setattr(board_process, "EXIT_DEADLINE_S", 60.0)


def start(kind: str, tmp_path: Path) -> Running:
    connector: Any = kind
    return Running(tmp_path, connector, tmp_path / "log", program=("-c", ENGINE), start=start_process)


def test_answers_arrive_in_order_and_the_engine_ends(tmp_path: Path) -> None:
    seen: list[int] = []
    with start("well", tmp_path) as running:
        asked = running.ask(PROMPTS, answered=seen.append)
        running.stop()
    assert asked.ended is None
    assert [(answer.prompt_tokens, answer.cached_tokens) for answer in asked.answers] == [(3, 2), (2, 2), (1, 2)]
    assert seen == [1, 2, 3]


def test_a_hang_is_seen_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with start("hangs", tmp_path) as running:
        monkeypatch.setattr(board_process, "ANSWER_DEADLINE_S", 1.0)
        asked = running.ask(PROMPTS)
    assert asked.ended is Outcome.HANG
    assert len(asked.answers) <= 1


@pytest.mark.parametrize(("kind", "words"), [("raises", "AssertionError: success expected"), ("killed", "-9")])
def test_a_crash_is_seen_with_its_last_words(kind: str, words: str, tmp_path: Path) -> None:
    with start(kind, tmp_path) as running:
        asked = running.ask(PROMPTS)
        assert asked.ended is Outcome.CRASH
        assert len(asked.answers) == 1
        assert words in asked.message
        assert running.ask(PROMPTS).ended is Outcome.CRASH


def test_what_happens_at_start_is_distinguished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RefusedError, match=r"^ValueError: only on GPUs"):
        start("refuses", tmp_path)
    with pytest.raises(CrashError):
        start("dies", tmp_path)
    monkeypatch.setattr(board_process, "START_DEADLINE_S", 1.0)
    with pytest.raises(HangError):
        start("silent", tmp_path)


def test_a_killed_engine_is_gone(tmp_path: Path) -> None:
    running = start("well", tmp_path)
    running.kill()
    running.kill()

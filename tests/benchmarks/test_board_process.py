"""The board tells an engine that hangs from one that crashes or refuses to start. The engines here compute nothing."""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers import board_process
from benchmarks.peers.board_judge import Outcome
from benchmarks.peers.board_process import CrashError, HangError, RefusedError, Running

ANSWER = {"tokens": [1], "logprobs": [-0.5], "error": None, "cached_tokens": 2, "reported_tokens": 2, "ttft_ms": 1.0}
PROMPTS = [[1, 2, 3], [4, 5], [6]]


def engine(conversation: Connection, log: str, environment: dict[str, str], model: str, kind: Any) -> None:
    """Answers the first prompt, and then does what ``kind`` says."""
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 2)
    if kind == "refuses":
        conversation.send({"refused": "ValueError: only on\n  GPUs"})
        sys.exit(1)
    if kind == "silent":
        time.sleep(600)
    if kind == "dies":
        os._exit(3)
    conversation.send({"ready": True})
    while True:
        command = conversation.recv()
        if command["do"] == "close":
            conversation.send({"closed": True})
            return
        for number, _ in enumerate(command["prompts"]):
            if number == 1 and kind == "hangs":
                time.sleep(600)
            if number == 1 and kind == "raises":
                raise AssertionError("success expected")
            if number == 1 and kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            conversation.send(ANSWER)


@pytest.fixture(autouse=True)
def deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that answers has as much time as it needs; one that hangs would hang for ten minutes."""
    monkeypatch.setattr(board_process, "EXIT_DEADLINE_S", 60.0)


def start(kind: str, tmp_path: Path) -> Running:
    connector: Any = kind
    return Running(tmp_path, connector, tmp_path / "log", program=engine)


def test_answers_arrive_in_order_and_the_engine_ends(tmp_path: Path) -> None:
    seen: list[int] = []
    with start("well", tmp_path) as running:
        asked = running.ask(PROMPTS, seen.append)
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

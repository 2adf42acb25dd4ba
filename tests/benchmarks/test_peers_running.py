"""``make peers`` tells an engine that hangs from one that crashes or does not start. Engines here compute nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import running as module
from benchmarks.peers.judge import Outcome
from benchmarks.peers.running import FailedError, Running

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

    def ask(self, prompts, max_tokens):
        self.asked += 1
        if self.asked > 1 and self.kind == "hangs":
            time.sleep(600)
        if self.asked > 1 and self.kind == "raises":
            raise AssertionError("success expected")
        if self.asked > 1 and self.kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return [dict(tokens=[1], logprobs=[-0.5], error=None, cached_tokens=2)]

serve(Engine)
"""


@pytest.fixture(autouse=True)
def deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that answers has as much time as it needs; one that hangs would hang for ten minutes."""
    monkeypatch.setattr(module, "EXIT_DEADLINE_S", 60.0)


def start(kind: str, tmp_path: Path) -> Running:
    connector: Any = kind
    return Running(tmp_path, connector, tmp_path / f"{kind}.log", program=("-c", ENGINE))


def test_answers_arrive_in_order_and_the_engine_ends(tmp_path: Path) -> None:
    with start("well", tmp_path) as running:
        asked = running.ask(PROMPTS)
        running.stop()
    assert asked.ended is None
    assert [(answer.prompt_tokens, answer.cached_tokens) for answer in asked.answers] == [(3, 2), (2, 2), (1, 2)]


def test_a_hang_is_seen_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with start("hangs", tmp_path) as running:
        monkeypatch.setattr(module, "ANSWER_DEADLINE_S", 1.0)
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
    def fails(kind: str) -> tuple[Outcome, str]:
        with pytest.raises(FailedError) as raised:
            start(kind, tmp_path)
        return raised.value.outcome, str(raised.value)

    assert fails("refuses") == (Outcome.REFUSED, "ValueError: only on GPUs")
    assert fails("dies") == (Outcome.CRASH, "exit status 3")
    monkeypatch.setattr(module, "START_DEADLINE_S", 1.0)
    assert fails("silent") == (Outcome.HANG, "no answer in 1 s")


def test_a_killed_engine_is_gone(tmp_path: Path) -> None:
    running = start("well", tmp_path)
    running.kill()
    running.kill()

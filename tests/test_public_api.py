"""The names that ``import kvoffload`` gives, and the examples that embed the library with them."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import kvoffload
from kvoffload.abc import ByteArray, PageGroup
from tests.sim.faults import SlowTransfer

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
EXAMPLE = EXAMPLES / "embed.py"
BATCHING = EXAMPLES / "batching.py"


def test_the_public_names_are_documented() -> None:
    assert [name for name in kvoffload.__all__ if not getattr(kvoffload, name).__doc__] == []


def run(*program: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *program], capture_output=True, text=True, timeout=300)


def test_the_example_loads_what_it_has_stored() -> None:
    """It compares every byte itself, after a restart that leaves the disk alone."""
    assert len(EXAMPLE.read_text().splitlines()) <= 47
    done = run(EXAMPLE)
    assert done.returncode == 0, done.stderr


def test_the_example_notices_what_is_not_loaded(tmp_path: Path) -> None:
    """The control: with another fingerprint after the restart nothing may be found."""
    text = EXAMPLE.read_text()
    spoiled = text.replace('{"weights": "version 1"}', '{"weights": str(ids)}')
    assert spoiled != text
    (tmp_path / "embed.py").write_text(spoiled)
    done = run(tmp_path / "embed.py")
    assert done.returncode != 0
    assert "AssertionError" in done.stderr


def test_the_example_with_preemption_answers_all_requests() -> None:
    """It compares every byte that a request attends to."""
    done = run(BATCHING)
    assert done.returncode == 0, done.stderr
    assert " 0 tokens were loaded" not in done.stdout
    assert " 0 preemptions" not in done.stdout


@pytest.mark.parametrize("reserves", ["the prompt and a token", "the offer"])
def test_an_engine_that_accepts_what_it_cannot_continue_makes_no_progress(
    monkeypatch: pytest.MonkeyPatch, reserves: str
) -> None:
    """Loads end one after the other, so while a request that was loaded lacks a block, another one is loading."""
    inline = kvoffload.InlineTransfer

    def one_by_one(groups: Sequence[PageGroup], pool: ByteArray) -> SlowTransfer:
        return SlowTransfer(inline(groups, pool), seed=0, chance=1.0)

    monkeypatch.setattr(kvoffload, "InlineTransfer", one_by_one)
    example: dict[str, Any] = runpy.run_path(str(BATCHING))
    engine = example["Engine"](kvoffload.OffloadConfig(host_bytes=4 << 20), num_device_blocks=8)
    assert engine.run(example["questions"](10)) == 10
    if reserves == "the offer":
        engine.reserve = lambda request, offer: offer or request.num_tokens
    loaded = engine.loaded
    answered = engine.run(example["questions"](10), max_steps=500)
    times = (engine.loaded - loaded) / (10 * 4 * example["TOKENS"])
    if reserves == "the offer":
        assert answered == 0
        assert times > 20, "it loads the same blocks again and again"
    else:
        assert (answered, times) == (10, 1)
    engine.close()

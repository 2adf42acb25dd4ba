"""The replay of hybrid models: a request resumes only at a state that was kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import states
from benchmarks.states import BOUND, RULES, Setting, boundaries, run, turns_of
from kvoffload.lab.trace import Trace
from tests.lab.traces import make_trace

SIZE = 10
ANSWER = 25
"""Tokens of each output."""


def conversation() -> Trace:
    """Returns three turns: the prompt of each is the last prompt, its output, and 30 tokens more."""
    lengths = [45, 45 + ANSWER + 30, 45 + 2 * (ANSWER + 30)]
    chains = [list(range(-(-length // SIZE))) for length in lengths]
    # The incomplete last block of a prompt is another than the whole one.
    named = [chain[: length // SIZE] + [1000 + length] for chain, length in zip(chains, lengths, strict=True)]
    chains = [chain[: -(-length // SIZE)] for chain, length in zip(named, lengths, strict=True)]
    return make_trace("turns", SIZE, [0.0, 1.0, 2.0], lengths, [ANSWER] * 3, chains)


def siblings(n: int) -> Trace:
    """Returns ``n`` prompts of 100 tokens, the first 60 of which are the same."""
    chains = [[*range(6), *range(100 * i, 100 * i + 4)] for i in range(1, n + 1)]
    return make_trace("siblings", SIZE, list(map(float, range(n))), [100] * n, [1] * n, chains)


def hit_tokens(trace: Trace, rule: str, policy: str = "lru", share: float = 9.0, chunk_tokens: int = 1000) -> int:
    cell = run(trace, Setting(rule, policy, share, chunk_tokens=chunk_tokens))
    return round(cell.hit_pct / 100 * int(trace.input_tokens.sum()))


def test_the_blocks_of_an_output_are_those_of_the_next_prompt() -> None:
    turns = turns_of(conversation())
    assert turns.num_continued == 2
    first, second, last = turns.chains
    # 45 tokens and 24 of the output have KV.
    assert len(first) == 6
    assert second[:6] == first
    assert last[: len(second)] == second
    # The last output is in no prompt: its blocks occur once.
    assert set(last[155 // SIZE :]).isdisjoint([*first, *second])
    assert [len(chain) for chain in turns_of(conversation(), 2).chains] == [len(chain) // 2 for chain in turns.chains]


def test_an_output_is_not_taken_from_a_prompt_that_only_begins_alike() -> None:
    assert turns_of(siblings(3)).num_continued == 0


def test_states_are_offered_at_the_ends_of_chunks_and_while_decoding() -> None:
    assert list(boundaries(0, 90, 0, 40, 10, 120)) == [40, 80, 90, 100, 110, 120]
    assert list(boundaries(20, 90, 50, 40, 10, 90)) == [50, 90]
    assert list(boundaries(20, 90, 70, 40, 10, 90)) == [60, 70, 90]
    assert list(boundaries(90, 90, 0, 40, 10, 110)) == [100, 110]


def test_a_turn_resumes_at_the_end_of_the_one_before() -> None:
    # 69 and 124 tokens had KV.
    assert hit_tokens(conversation(), "resume") == hit_tokens(conversation(), BOUND) == 60 + 120
    assert hit_tokens(conversation(), "all that is offered") == 60 + 120
    # Without the states of outputs, it resumes at the end of the last prompt, of 45 and 100 tokens.
    assert hit_tokens(conversation(), "resume, no outputs") == 40 + 100


def test_a_prefix_is_found_by_the_third_request_that_has_it() -> None:
    # The second finds the blocks without a state, and leaves one there.
    assert hit_tokens(siblings(5), BOUND) == 4 * 60
    assert hit_tokens(siblings(5), "resume") == 3 * 60
    assert hit_tokens(siblings(5), "resume, no junctions") == 0
    # The ends of chunks of 40 tokens are at 40 and 80.
    assert hit_tokens(siblings(5), "resume, engine never stops at junctions", chunk_tokens=40) == 3 * 40


def test_a_state_takes_room() -> None:
    # 6 blocks and 3 states of 3 slots do not fit into 9 slots.
    assert hit_tokens(siblings(9), "resume", share=9 / 42) < hit_tokens(siblings(9), BOUND, share=9 / 42)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("policy", ["lru", "auto"])
def test_no_rule_finds_more_than_with_states_everywhere(rule: str, policy: str) -> None:
    for trace in (conversation(), siblings(6)):
        assert hit_tokens(trace, rule, policy) <= hit_tokens(trace, BOUND, policy)


def test_the_benchmark_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KVOFFLOAD_TRACES", raising=False)
    monkeypatch.setattr(states, "SYNTHETIC", {"chat": 40})
    monkeypatch.setattr(states, "SHARES", (states.MIDDLE,))
    states.main(tmp_path, quick=False)
    cells = json.loads((tmp_path / "states-cells.json").read_text())
    assert len(cells) == len(list(states.settings()))
    assert all(0 <= cell["hit_pct"] <= 100 for cell in cells)
    assert "resume minus all" in capsys.readouterr().out

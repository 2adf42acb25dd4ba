"""The tables of ``make peers``: what is compared, and what is said of a system that failed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from benchmarks.peers.__main__ import choose, main
from benchmarks.peers.load import make_load
from benchmarks.peers.measure import Mixed, Result, Same, Times, block_bytes, compare, percentile
from benchmarks.peers.report import markdown, problems, publish, tables, text
from benchmarks.peers.systems import Answer


def answer(tokens: list[int], logprobs: list[float] | None = None) -> Answer:
    return Answer(tokens, logprobs or [-1.0] * len(tokens), ttft_s=0.1, total_s=0.2)


def result(name: str, title: str, scale: float = 1.0, tokens: tuple[int, ...] = (1, 2)) -> Result:
    return Result(
        name,
        title,
        times={2000: Times([0.6 * scale] * 4, [0.05 * scale] * 4, found=0.96)},
        device=[0.04],
        mixed=Mixed(wall_s=2.0, cpu_s=3.0, prompt_tokens=400, output_tokens=10, ttft=[0.2 * scale]),
        memory_start=int(100 * scale) << 20,
        memory_end=int(200 * scale) << 20,
        held_bytes=30 << 20,
        disk_bytes=40 << 20,
        disk_held_bytes=38 << 20,
        answers={"2000 again": [answer(list(tokens))]},
    )


def test_answers_are_identical_tied_or_different() -> None:
    reference = [answer([1, 2, 3]), answer([1, 2, 3]), answer([1, 2, 3])]
    mine = [answer([1, 2, 3]), answer([1, 9, 3], [-1.0, -1.0005, -1.0]), answer([1, 9, 3], [-1.0, -1.4, -1.0])]
    assert compare(mine, reference) == Same(identical=1, ties=1, different=1)


def test_what_follows_the_first_difference_does_not_count() -> None:
    mine = [answer([1, 9, 3], [-1.0, -1.4, -1.0])]
    assert compare(mine, [answer([1, 2, 5], [-1.0, -1.0, -1.0])]).different == 1


@pytest.mark.parametrize(("percent", "expected"), [(50, 2.0), (95, 4.0), (25, 1.0)])
def test_percentile_is_a_measured_value(percent: float, expected: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == expected


def test_a_shared_prefix_is_held_once() -> None:
    shared = list(range(8))
    prompts = [shared + [100] * 4, shared + [200] * 4, shared + [100] * 6]
    # Two blocks of the prefix, and one after it per distinct continuation.
    assert block_bytes(prompts, bytes_per_token=10, block_size=4) == 4 * 4 * 10


def test_tables_have_every_system_and_the_floor() -> None:
    found = {title: rows for title, _, rows in tables([result("recompute", "recompute"), result("a", "A", 2.0)])}
    (times,) = (rows for title, rows in found.items() if "2,000 tokens" in title)
    assert times[0][:5] == ["recompute", "600", "600", "50", "50"]
    assert times[1][:5] == ["A", "1,200", "1,200", "100", "100"]
    assert times[2][:4] == ["device hit (the floor)", "-", "-", "40"]
    (space,) = (rows for title, rows in found.items() if "MiB" in title)
    assert space == [["A", "100", "200", "30", "40", "38"]]
    (mixed,) = (rows for title, rows in found.items() if "Mixed" in title)
    assert mixed[1][:4] == ["A", "200", "5", "3"]


def test_a_wrong_answer_is_in_the_table() -> None:
    for tokens, expected in ((1, 2), ["A", "1", "1", "0", "0"]), ((1, 3), ["A", "1", "0", "0", "1"]):
        reference = result("recompute", "recompute")
        other = result("a", "A", tokens=tokens)
        other.answers["2000 again"][0].logprobs[1] = -2.0
        (rows,) = (rows for title, _, rows in tables([reference, other]) if "Answers" in title)
        assert rows == [expected]


def test_a_system_that_does_not_start_is_named_with_its_message(tmp_path: Path) -> None:
    broken = Result("b", "B", problem="does not start: RuntimeError: no such device")
    half = result("c", "C")
    half.disk_bytes, half.disk_problem = None, "does not start with a disk: OSError: read-only"
    results = [result("recompute", "recompute"), broken, half]
    expected = [
        "B does not start: RuntimeError: no such device",
        "C does not start with a disk: OSError: read-only",
    ]
    assert problems(results) == expected
    publish(results, {"Measured": "today"}, tmp_path)
    page = (tmp_path / "peers.md").read_text()
    assert page == markdown(results, {"Measured": "today"})
    for line in expected:
        assert line in page
        assert line in text(results)
    figures = json.loads((tmp_path / "peers.json").read_text())
    assert figures["systems"][1]["problem"] == broken.problem
    assert figures["systems"][2]["times"]["2000"]["again"] == [0.05] * 4


def test_recompute_is_always_run() -> None:
    assert choose(None, ["recompute", "a"]) == ["recompute", "a"]
    assert choose("a", ["recompute", "a"]) == ["recompute", "a"]
    assert choose("a,recompute", ["recompute", "a"]) == ["recompute", "a"]


def test_an_unknown_system_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "kvofload"])
    assert "unknown system 'kvofload'" in capsys.readouterr().err


def test_prompts_are_the_same_each_time_and_exceed_the_device() -> None:
    load, again = make_load(quick=True), make_load(quick=True)
    assert load == again
    for size, prompts in load.prompts.items():
        assert {len(prompt) for prompt in prompts} == {size}
        assert sum(map(len, prompts)) > 64 * 128
    for turns in load.conversations:
        assert all(late[: len(early)] == early for early, late in itertools.pairwise(turns))

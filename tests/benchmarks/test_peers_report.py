"""The tables of ``make peers``: what is compared, and what is said of a system that failed."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers.__main__ import choose, main
from benchmarks.peers.load import make_load
from benchmarks.peers.measure import HOST_BYTES, Mixed, Result, Same, Times, block_bytes, compare, percentile
from benchmarks.peers.report import markdown, problems, publish, tables, text
from benchmarks.peers.summary import shortfalls
from benchmarks.peers.systems import Answer


def answer(tokens: list[int], logprobs: list[float] | None = None) -> Answer:
    return Answer(tokens, logprobs or [-1.0] * len(tokens), ttft_s=0.1, total_s=0.2)


def result(name: str, title: str, scale: float = 1.0, tokens: tuple[int, ...] = (1, 2)) -> Result:
    return Result(
        name,
        title,
        times={2000: Times([0.6 * scale] * 4, [0.05 * scale] * 4, [0.04], found=0.96)},
        mixed=[
            Mixed(wall_s=wall_s, cpu_s=3.0 * scale, prompt_tokens=400, output_tokens=10, ttft=[0.2 * scale])
            for wall_s in (2.0, 1.0, 4.0)
        ],
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


def rows_of(words: str, results: list[Result]) -> list[list[str]]:
    (rows,) = (rows for title, _, rows in tables(results) if words in title)
    return rows


def test_tables_have_every_system_with_medians_and_spread() -> None:
    results = [result("recompute", "recompute"), result("a", "A", 2.0)]
    results[1].times[2000].first = [1.3, 1.2, 1.1, 1.4]
    recompute, a = rows_of("2,000 tokens", results)
    hit = "40 (40 to 40)"
    assert recompute == ["recompute", "600 (600 to 600)", "600", "-", "-", hit, "96%"]
    assert a == ["A", "1,200 (1,100 to 1,300)", "1,400", "100 (100 to 100)", "100", hit, "96%"]
    assert rows_of("MiB of resident", results) == [["A", "2,048", "100", "200", "30", "170"]]
    assert rows_of("MiB on disk", results)[1] == ["A", "38", "40"]
    assert rows_of("Mixed load, 3 rounds", results)[1][:4] == ["A", "200 (100 to 400)", "5 (2 to 10)", "6 (6 to 6)"]


def test_a_pool_that_is_resident_at_start_is_not_counted_as_beside_it() -> None:
    reference, lazy, eager = result("recompute", "recompute"), result("a", "A"), result("b", "B")
    lazy.memory_start, lazy.memory_end = 120 << 20, 260 << 20
    eager.memory_start, eager.memory_end = (120 << 20) + HOST_BYTES, (230 << 20) + HOST_BYTES
    rows = rows_of("MiB of resident", [reference, lazy, eager])
    # With all blocks: 60 MiB of which 30 hold blocks, and 30 MiB and the budget.
    assert [row[0::5] for row in rows] == [["A", "30"], ["B", "30"]]


def test_the_summary_says_who_is_the_best_at_what() -> None:
    results = [result("recompute", "recompute"), result("a", "A"), result("b", "B", 2.0)]
    results[2].mixed = [replace(mixed, wall_s=mixed.wall_s / 4) for mixed in results[2].mixed]
    results[2].disk_bytes = None
    a, b = rows_of("In short", results)
    assert a == ["A", "**1.25**", "**1.00**", "1.00", "**1.00**", "**-30**", "**1.05**"]
    assert b == ["B", "2.50", "2.00", "**0.25**", "2.00", "170", "-"]


def test_it_is_said_where_kvoffload_is_not_the_best() -> None:
    results = [result("recompute", "recompute"), result("kvoffload", "kvoffload"), result("b", "B", 2.0)]
    assert shortfalls(results) == []
    results[2].times[2000].again = [0.04] * 3
    assert shortfalls(results) == ["again, 2,000 tokens: 1.25; B: 1.00"]
    assert "- again, 2,000 tokens: 1.25; B: 1.00" in markdown(results, {})


def test_who_does_not_write_all_blocks_is_not_the_best_on_disk() -> None:
    results = [result("recompute", "recompute"), result("a", "A"), result("b", "B")]
    results[2].disk_bytes = 20 << 20
    assert [row[-1] for row in rows_of("In short", results)] == ["**1.05**", "-"]


def test_equal_systems_are_both_the_best() -> None:
    results = [result("recompute", "recompute"), result("a", "A"), result("b", "B", 1.005)]
    assert [row[1] for row in rows_of("In short", results)] == ["**1.25**", "**1.26**"]


def test_the_page_has_every_system_and_plots_of_what_was_measured() -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.peers.page import render_page

    half = result("c", "C", 3.0)
    half.times, half.mixed, half.memory_end = {2000: Times()}, [], 0
    results = [result("recompute", "recompute"), result("kvoffload", "kvoffload"), half]
    broken = Result("b", "B", problem="does not start: RuntimeError: no <device>")
    page = render_page([*results, broken], {"Measured": "today"})
    assert page.count("<svg") == 3
    assert "B does not start: RuntimeError: no &lt;device&gt;" in page
    assert "<b>1.25</b>" in page
    assert "<svg" not in render_page([broken], {})


def test_a_wrong_answer_is_in_the_table() -> None:
    for tokens, expected in ((1, 2), ["A", "1", "1", "0", "0"]), ((1, 3), ["A", "1", "0", "0", "1"]):
        reference = result("recompute", "recompute")
        other = result("a", "A", tokens=tokens)
        other.answers["2000 again"][0].logprobs[1] = -2.0
        assert rows_of("Answers", [reference, other]) == [expected]


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
    for turns in itertools.chain(*load.rounds):
        assert all(late[: len(early)] == early for early, late in itertools.pairwise(turns))

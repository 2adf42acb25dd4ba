"""The page and the terminal's tables have the numbers, and the page needs no other file."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
rich_console = pytest.importorskip("rich.console")

from kvoffload.demo.act import ActResult  # noqa: E402
from kvoffload.demo.page import render_page  # noqa: E402
from kvoffload.demo.replay import Agreement  # noqa: E402
from kvoffload.demo.report import Report, make_report  # noqa: E402
from kvoffload.demo.terminal import summary, verdict  # noqa: E402

from .conftest import make_act, make_restart  # noqa: E402


def test_page_is_self_contained(report: Report) -> None:
    page = render_page(report)
    assert page.count("<svg") == 3
    assert re.findall(r"""(?:src|href)=["'](?!#)[^"']*""", page) == []
    assert "Outputs are identical, and the corruption was detected." in page
    assert "the first missing block" not in page or "never stored (16)" in page


@pytest.mark.parametrize("replayed", [20_000, 10_000])
def test_the_replay_is_shown(report: Report, replayed: int) -> None:
    agreement = Agreement(64, {"device": 30_000, "host": 20_000}, {"device": 30_000, "host": replayed}, 7)
    compared = replace(report, replay=agreement)
    assert f"{replayed:,} in host memory; no request differs by more than" in " ".join(render_page(compared).split())
    text = terminal_text(compared)
    assert f"replay of the trace agrees {'yes' if replayed == 20_000 else 'NO'}, device 30,000 hit tokens" in text
    assert ("has other hits" in text) is (replayed != 20_000)


def test_a_replay_without_a_difference_says_so(report: Report) -> None:
    hits = {"device": 30_000, "host": 20_000}
    page = " ".join(render_page(replace(report, replay=Agreement(64, hits, hits, 0))).split())
    assert "20,000 in host memory; every request agrees." in page


def test_page_escapes_its_input(baseline: ActResult, offload: ActResult, restart: ActResult) -> None:
    page = render_page(make_report([baseline, offload, restart], "<script>alert(1)</script>", 0))
    assert "<script>" not in page


def test_page_of_a_failed_run(baseline: ActResult) -> None:
    restart = make_restart(baseline, disk=0)
    page = render_page(make_report([baseline, make_act(offload=False), restart], "made up", 0))
    assert "Nothing was loaded from host memory" in page
    assert "Nothing was read from disk" in page


@pytest.mark.parametrize("direct_io", [True, False])
def test_bypassing_the_page_cache_is_claimed_only_if_it_happened(
    baseline: ActResult, offload: ActResult, restart: ActResult, direct_io: bool
) -> None:
    restart.summary = replace(restart.summary, direct_io=direct_io)
    report = make_report([baseline, offload, restart], "made up", 0)
    for text in (render_page(report), terminal_text(report)):
        assert ("may be those of memory" in text) is not direct_io
    assert ("O_DIRECT" in render_page(report)) is direct_io


def terminal_text(report: Report) -> str:
    console = rich_console.Console(width=100, record=True, file=io.StringIO())
    console.print(summary(report))
    console.print(verdict(report))
    return " ".join(console.export_text().split())


def test_terminal(report: Report) -> None:
    text = terminal_text(report)
    assert "61,440 (48%)" in text
    assert "disk hit 16 90 ms 90 ms 8" in text
    assert "requests per act 64" in text
    assert "30,720 (96% of the prompts after the restart)" in text
    assert "identical after the restart yes, 16 of 16" in text
    assert "9.0 GB/s" in text
    assert "Outputs are identical" in text

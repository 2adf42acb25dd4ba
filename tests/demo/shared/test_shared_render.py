"""The page and the terminal's tables have the numbers, and the page needs no other file."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
rich_console = pytest.importorskip("rich.console")

from demo.pages import shared_page  # noqa: E402
from demo.protocol import RequestResult  # noqa: E402
from demo.shared_report import SharedReport, SkippedStore  # noqa: E402
from demo.view import render, terminal_table, verdict  # noqa: E402

from .conftest import make_store, wrong  # noqa: E402


def render_page(report: SharedReport) -> str:
    return render(shared_page(report))


def terminal_text(report: SharedReport) -> str:
    console = rich_console.Console(width=80, record=True, file=io.StringIO())
    page = shared_page(report)
    for table in page.tables:
        console.print(terminal_table(table))
    console.print(verdict(page), soft_wrap=True)
    return str(console.export_text())


def test_the_page_is_self_contained(report: SharedReport) -> None:
    page = render_page(report)
    assert page.count("<svg") == 1
    assert re.findall(r"""(?:src|href)=["'](?!#)[^"']*""", page) == []
    assert "Outputs of both servers are identical, and both controls were detected." in page
    assert "<td>96%</td><td>96%</td>" in page
    assert "10.0" in page


def test_a_failed_run_says_what(report: SharedReport) -> None:
    failed = replace(report, stores=[replace(make_store(), shared=wrong(answers_of(report)))])
    for text in (render_page(failed), terminal_text(failed)):
        assert "outputs of the second server differ" in " ".join(text.split())
        assert "both controls were detected" not in text
    assert "NO" in terminal_text(failed)


def answers_of(report: SharedReport) -> list[RequestResult]:
    (store,) = report.results[:1]
    return list(store.shared)


def test_skipped_stores_are_named_with_the_line_to_run(report: SharedReport) -> None:
    reason = "the client is not installed: pip install something"
    skipped = replace(report, stores=[make_store(), SkippedStore("mooncake", reason)])
    for text in (render_page(skipped), terminal_text(skipped)):
        assert f"mooncake was skipped: {reason}" in text
    nothing = replace(skipped, stores=skipped.stores[1:])
    assert "No store could run here." in render_page(nothing)
    assert "No store could run here." in terminal_text(nothing)

"""The page and the terminal tables hold the numbers and stand alone."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
rich_console = pytest.importorskip("rich.console")

from kvoffload.demo.act import ActResult  # noqa: E402
from kvoffload.demo.page import render_page  # noqa: E402
from kvoffload.demo.report import Report, make_report  # noqa: E402
from kvoffload.demo.terminal import summary, verdict  # noqa: E402

from .conftest import make_act  # noqa: E402


def test_page_is_self_contained(report: Report) -> None:
    page = render_page(report)
    assert page.count("<svg") == 3
    assert re.findall(r"""(?:src|href)=["'](?!#)[^"']*""", page) == []
    assert "Outputs are identical, and the control was caught." in page
    assert "the first missing block" not in page or "never stored (16)" in page


def test_page_escapes_what_it_is_given(baseline: ActResult, offload: ActResult, control: ActResult) -> None:
    page = render_page(make_report([baseline, offload, control], "<script>alert(1)</script>", 0))
    assert "<script>" not in page


def test_page_of_a_failed_run(baseline: ActResult) -> None:
    page = render_page(make_report([baseline, make_act(offload=False), baseline], "made up", 0))
    assert "Nothing was loaded from host memory" in page


def test_terminal(report: Report) -> None:
    console = rich_console.Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(summary(report))
    console.print(verdict(report))
    text = console.export_text()
    assert "61,440 (48%)" in text
    assert "9.0 GB/s" in text
    assert "Outputs are identical" in text

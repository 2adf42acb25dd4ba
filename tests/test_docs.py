"""Documents name only what exists, and quote what the programs print."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from benchmarks.__main__ import BENCHMARKS
from benchmarks.synthetic import generate
from kvoffload.abc import MissReason
from kvoffload.cli import group
from kvoffload.config import OffloadConfig
from kvoffload.connector.options import OPTIONS
from kvoffload.lab.writer import write_trace
from kvoffload.observe.metrics import METRICS
from kvoffload.tiers.config import BUILTIN, TierConfig

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "kvoffload"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
README_LINES = 185
CONSOLE_COLUMNS = 100

FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"[\w.-]+(/[\w.-]+)*\.(py|md|toml|j2|css)")
"""A file name; directories are recognized by their first part."""

FROM_AN_INDEX = re.compile(
    r"\b(?:pip3?|uv|pipx|poetry|pdm|conda) (?:install|add|inject)(?: -\S+| vllm\S*)* (kvoffload)(?![\w/-])"
    r"|\b(kvoffload(?:\[[a-z][\w,-]*\]|[=~<>]=?\d))"
)
"""kvoffload as pip, uv and pipx would ask an index for it, in text without quotes and line breaks."""


def prose(text: str) -> str:
    """``text`` without its fenced blocks."""
    return FENCED.sub("", text)


def blocks(text: str, *languages: str) -> Iterator[str]:
    """The fenced blocks of ``text`` in any of ``languages``."""
    return (body for language, body in FENCED.findall(text) if language in languages)


# Checks. Each returns the faults that it finds.


def missing_files(document: Path, text: str) -> list[str]:
    """Code spans that look like a path in the repository, and are none."""
    names = {path.name for folder in (ROOT / "tests", SOURCE) for path in folder.rglob("*.py")}
    folders = {path.name for base in (ROOT, SOURCE) for path in base.iterdir() if path.is_dir()} | {"kvoffload"}
    missing = []
    for span in SPAN.findall(prose(text)):
        path = span.split(":")[0]  # a file may be followed by a name in it
        is_path = path.split("/")[0] in folders and re.fullmatch(r"[\w.-]+(/[\w.-]*)+", path)
        if not is_path and not FILE.fullmatch(path):
            continue
        found = any((base / path).exists() for base in (ROOT, ROOT / "docs", SOURCE.parent, SOURCE))
        if not found and not ("/" not in path and path in names):
            missing.append(span)
    return missing


def anchors(text: str) -> set[str]:
    """The anchors of a document: those of its headings, as GitHub makes them, and explicit ones."""
    headings = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a name="([^"]+)">', text))


def broken_links(document: Path, text: str) -> list[str]:
    """Relative links whose file or anchor does not exist."""
    broken = []
    for link in LINK.findall(prose(text)):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        known = anchors(text if target == document else target.read_text()) if anchor and target.is_file() else set()
        if not target.exists() or (anchor and anchor not in known):
            broken.append(link)
    return broken


def unknown_metrics(document: Path, text: str) -> list[str]:
    """Names after "kvoffload:" that are no metrics."""
    names = re.findall(r"`kvoffload:(\w+)", text)
    return [name for name in names if name not in METRICS and name.removesuffix("_total") not in METRICS]


def unknown_commands(document: Path, text: str) -> list[str]:
    """Lines of code blocks that call ``kvoffload`` or ``make`` with a command, option or target that does not exist."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    unknown = []
    for line in "\n".join(blocks(text, "", "console", "sh")).splitlines():
        words = (
            shlex.split(line.removeprefix("$ "), comments=True) if re.match(r"(\$ )?(kvoffload|make) ", line) else []
        )
        if words[:1] == ["make"]:
            unknown += [line for word in words[1:] if "=" not in word and word not in targets]
        elif words:
            command: click.Command | None = group()
            for word in words[1:]:
                if isinstance(command, click.Group):
                    command = command.commands.get(word)
                elif word.startswith("--") and command is not None:
                    known = {option for each in command.params for option in each.opts}
                    unknown += [line] if word.split("=")[0] not in known else []
            unknown += [line] if command is None else []
    return unknown


def unquoted_patterns(document: Path, text: str) -> list[str]:
    """Commands with a pattern outside of quotes, which zsh refuses unless it names a file. Brackets around options
    are a synopsis."""
    lines = "\n".join(blocks(text, "", "console", "sh")).splitlines()
    commands = [line for line in lines if re.match(r"(\$ |sudo )*(kvoffload|curl|pip|python3?) ", line)]
    bare = [re.sub(r"'[^']*'|\"[^\"]*\"|\$\?|#.*| \[[-A-Z][^\]]*\]", "", line) for line in commands]
    return [line for line, rest in zip(commands, bare, strict=True) if re.search(r"[?*\[]", rest)]


def unknown_names(document: Path, text: str) -> list[str]:
    """Dotted names that begin with "kvoffload" and name nothing that can be imported: in code spans, and in Python."""
    names = [span.split("(")[0] for span in SPAN.findall(prose(text)) if re.match(r"kvoffload(\.\w+)+(\(|$)", span)]
    for source in blocks(text, "python"):
        tree = ast.parse(source)
        short: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                short |= {alias.asname or alias.name: alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names += [f"{node.module}.{alias.name}" for alias in node.names]
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in short:
                names.append(f"{short[node.value.id]}.{node.attr}")
    return [name for name in names if name.startswith("kvoffload.") and not is_importable(name)]


def not_python(document: Path, text: str) -> list[str]:
    """The errors of blocks of Python that do not compile."""
    errors = []
    for source in blocks(text, "python"):
        try:
            compile(source, str(document), "exec")
        except SyntaxError as error:
            errors.append(str(error))
    return errors


def from_an_index(text: str) -> list[str]:
    """Places that have kvoffload installed from a package index, where the name belongs to nobody yet."""
    return [found[0] for found in FROM_AN_INDEX.finditer(re.sub(r"[\s\"'`\\]+", " ", text))]


def is_importable(name: str) -> bool:
    """Whether ``name`` is a module, or an attribute of one, even if something that it imports is not installed."""
    parent, _, attribute = name.rpartition(".")
    path = SOURCE.parent.joinpath(*name.split("."))
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    try:
        return hasattr(importlib.import_module(parent), attribute)
    except ModuleNotFoundError:
        module = path.parent.with_suffix(".py")
        return (
            module.is_file() and re.search(rf"^(class|def) {attribute}\b", module.read_text(), re.MULTILINE) is not None
        )


def table(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table under ``heading``, without its head."""
    section = f"\n{text}".split(f"\n{heading}\n", 1)[1]
    rows = re.search(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert rows is not None, f"{heading}: no table"
    return [[cell.strip() for cell in row.strip("| ").split("|")] for row in rows[0].splitlines()[2:]]


# What must hold.


@pytest.mark.parametrize(
    "faults",
    [missing_files, broken_links, unknown_metrics, unknown_commands, unquoted_patterns, unknown_names, not_python],
)
def test_documents_name_only_what_exists(faults: Callable[[Path, str], list[str]]) -> None:
    found = {document.name: faults(document, document.read_text()) for document in DOCUMENTS}
    assert len(found) > 20
    assert {name: each for name, each in found.items() if each} == {}


def test_nothing_installs_kvoffload_from_an_index() -> None:
    """Whoever takes the name there would be installed. There is no release yet: a checkout is installed by its path."""
    folders = [ROOT / name for name in ("docs", "deploy", "src", "examples", "tools", "benchmarks", ".ci")]
    files = [path for folder in folders for path in folder.rglob("*") if "__pycache__" not in path.parts]
    found = {}
    for path in (*ROOT.iterdir(), *files):
        if path.is_file() and path.suffix not in (".so", ".c"):
            found[str(path)] = from_an_index(path.read_text(errors="replace"))
    assert len(found) > 300
    assert {path: places for path, places in found.items() if places} == {}


def test_tests_that_the_makefile_names_exist() -> None:
    named = re.findall(r"tests/[\w/]+\.py", (ROOT / "Makefile").read_text())
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_every_option_is_documented_with_its_default() -> None:
    rows = table((ROOT / "docs" / "serving.md").read_text(), "## Options")
    fields = dataclasses.fields(OffloadConfig)
    assert sorted(row[0] for row in rows) == sorted(f"`{field.name}`" for field in fields)
    documented = {row[0].strip("`"): row[2].strip("`") for row in rows}
    for field in fields:
        if field.default not in (None, (), dataclasses.MISSING):
            default = f"{field.default:g}" if isinstance(field.default, float) else str(field.default).lower()
            assert documented[field.name] == default, field.name


def test_every_key_of_a_tier_is_documented_with_its_default() -> None:
    kinds, documented = [""], dict[str, dict[str, str]]()
    for row in table((ROOT / "docs" / "serving.md").read_text(), "## Tiers"):
        # A row without a kind belongs to the one above it; "| | `key` |" has lost its first cell.
        cells = row if len(row) == 4 else ["", *row]
        kinds = cells[0].replace("`", "").split(", ") if cells[0] else kinds
        for kind in kinds:
            documented.setdefault(kind, {})[cells[1].strip("`")] = cells[3].strip("`")
    shared = {field.name for field in dataclasses.fields(TierConfig)}
    assert set(documented.pop("all")) == shared
    documented.pop("package.module:Class")
    assert list(documented) == list(BUILTIN)
    for name, path in BUILTIN.items():
        module, _, found = path.partition(":")
        fields = dataclasses.fields(getattr(importlib.import_module(module), found))
        defaults = {field.name: field.default for field in fields if field.name not in shared}
        assert sorted(documented[name]) == sorted(defaults)
        for key, default in defaults.items():
            if default is dataclasses.MISSING:
                assert documented[name][key] == "must be set"
            elif default not in (None, ""):
                text = f"{default:g}" if isinstance(default, float) else str(default)
                assert documented[name][key] == (text.lower() if isinstance(default, bool) else text)


def test_every_request_option_is_documented() -> None:
    rows = table((ROOT / "docs" / "serving.md").read_text(), "## Request options")
    assert [row[0].strip("`") for row in rows] == list(OPTIONS)


def test_every_metric_is_documented() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = [line for line in text.splitlines() if re.search(r"\| (counter|gauge) \|", line)]
    labels = {name: f"{{{spec.label}}}" if spec.label else "" for name, spec in METRICS.items()}
    expected = [f"| `{name}{labels[name]}` | {spec.kind} | {spec.help} |" for name, spec in METRICS.items()]
    assert sorted(rows) == sorted(expected), "docs/metrics.md: write these rows instead:\n" + "\n".join(expected)


def test_every_benchmark_is_documented() -> None:
    rows = table((ROOT / "docs" / "benchmarks.md").read_text(), "# Benchmarks")
    assert sorted(row[0] for row in rows) == sorted(f"`{name}`" for name in BENCHMARKS)


def test_every_miss_reason_is_documented() -> None:
    rows = table((ROOT / "docs" / "metrics.md").read_text(), "## Why requests miss")
    assert [row[0] for row in rows] == [f"`{reason}`" for reason in MissReason]


@pytest.mark.parametrize(
    ("document", "block"),
    [
        pytest.param(document.name, block, id=f"{document.name}: {block.splitlines()[0]}")
        for document in DOCUMENTS
        for block in blocks(document.read_text(), "console")
        if block.startswith("$ kvoffload ")
    ],
)
def test_quoted_output_is_what_the_command_prints(document: str, block: str, tmp_path: Path) -> None:
    command, _, quoted = block.partition("\n")
    # The trace that docs/traces.md makes.
    write_trace(generate("documents", 1000), tmp_path / "documents.jsonl")
    path = os.pathsep.join([str(SOURCE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", "from kvoffload.cli import main; main()", *shlex.split(command)[2:]],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": path,
            "COLUMNS": str(CONSOLE_COLUMNS),
            "PYTHONIOENCODING": "utf-8",
            "NO_COLOR": "1",
        },
    )
    printed = [line.rstrip() for line in done.stdout.splitlines()]
    assert printed == quoted.splitlines(), f"{document}: quote this instead:\n" + "\n".join(printed)


# Negative controls.


@pytest.mark.parametrize(
    ("faults", "text", "expected"),
    [
        *[
            (missing_files, f"`{path}` `tests/test_docs.py` `src/kvoffload/abc/` `cache/manager.py:Name` `a/b`", [path])
            for path in ("tests/test_nothing.py", "src/kvoffload/no.py", "cache/no.py:name", "nothing.py", "tests/no/")
        ],
        *[
            (broken_links, f"# A heading\n[text]({link}) [text](#a-heading) [text](docs/serving.md#memory)", [link])
            for link in ("nothing.md", "README.md#nothing", "#nothing")
        ],
        (unknown_metrics, "`kvoffload:off` `kvoffload:store_blocks_total` `kvoffload:nothing`", ["nothing"]),
        *[
            (
                unknown_commands,
                f"```\nkvoffload size TRACE --ram 1GiB    # why\nmake test JOBS=4\n{line}\n```\n",
                [line],
            )
            for line in ("make nothing", "kvoffload nothing", "kvoffload size t --nothing", "kvoffload disk no d")
        ],
        *[
            (
                unquoted_patterns,
                f"```\nkvoffload size 't?n=1' \"*\"    # why?\nkvoffload a [--json]\n{line}\n```\n",
                [line],
            )
            for line in ("kvoffload size trace?n=1", "$ pip install .[redis]", "sudo curl a/?b")
        ],
        (unknown_names, "`kvoffload.abc.Tier` `kvoffload.Nothing`", ["kvoffload.Nothing"]),
        (unknown_names, "`kvoffload.nothing.Tier`", ["kvoffload.nothing.Tier"]),
        (unknown_names, "```python\nfrom kvoffload import Nothing, Tier\n```\n", ["kvoffload.Nothing"]),
        (unknown_names, "```python\nimport kvoffload as kv, numpy as np\nkv.No(np.no)\n```\n", ["kvoffload.No"]),
        (not_python, "```python\nx =\n```\n", ["invalid syntax (README.md, line 1)"]),
    ],
)
def test_a_fault_of_a_document_is_found(
    faults: Callable[[Path, str], list[str]], text: str, expected: list[str]
) -> None:
    assert faults(ROOT / "README.md", text) == expected


def test_an_installation_from_an_index_is_found() -> None:
    for line in (
        "pip install kvoffload",
        "pip install 'kvoffload[redis]'",
        'run pip install "\n    "kvoffload, or something else',
        "uv pip install --upgrade vllm==0.32.0 kvoffload==1.0",
        "python -m pip install -q kvoffload",
        "kvoffload>=0.1",
        "part of the extra kvoffload[plots]",
    ):
        assert from_an_index(f"First, {line}\n") != [], line
    right = "pip install . in a checkout of kvoffload; pip install '.[redis]'; pip install ./kvoffload; "
    assert from_an_index(right + 'kvoffload["name"] add kvoffload-wheels') == []

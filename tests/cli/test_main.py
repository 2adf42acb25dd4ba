"""The command line, and what an installation without extras can do."""

from __future__ import annotations

import ast
import io
import json
import re
import shlex
import subprocess
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console
from rich.table import Table

import kvoffload
from kvoffload import cli
from kvoffload.abc import MissReason
from kvoffload.cli import disk, replay, size
from kvoffload.lab.replay import TierUse
from kvoffload.lab.sizing import Setting, Sizing
from kvoffload.observe.records import RequestRecord
from kvoffload.tiers.config import TierContext
from kvoffload.tiers.disk.offline import FolderReport, PartReport
from kvoffload.tiers.disk.start import open_disk_tier

testing = pytest.importorskip("click.testing")


def test_the_help_of_each_command_has_examples_that_it_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server.log").touch()
    commands: dict[str, Any] = dict(cli.group().commands)
    disk = commands.pop("disk")
    commands |= {f"disk {name}": command for name, command in disk.commands.items()}
    for name, command in commands.items():
        help = testing.CliRunner().invoke(cli.group(), [*name.split(), "--help"]).output
        lines = re.findall(r"^    kvoffload (.+)$", help.partition("Examples:\n")[2], re.MULTILINE)
        assert len(lines) == 2
        for line in lines:
            words = shlex.split(line)
            assert words[: len(name.split())] == name.split()
            command.make_context(name, words[len(name.split()) :])


PROJECT = Path(kvoffload.__file__).parent
PLOTS = ("matplotlib", "jinja2", "markupsafe", "PIL")
NOT_PLAIN = ("vllm", "torch", "triton", *PLOTS, "hypothesis", "pytest", "libcachesim")
PLAIN = f"""
import contextlib, io, json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {NOT_PLAIN}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
from kvoffload.cli import main

for arguments in json.loads(sys.argv[1]):
    out, err, status = io.StringIO(), io.StringIO(), None
    sys.argv = ["kvoffload", *arguments]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            status = stop.code
    print(json.dumps([status or 0, out.getvalue(), err.getvalue()]))
"""
"""Runs commands as if only the core dependencies were installed."""


def plain(commands: list[list[str]]) -> list[tuple[int, str, str]]:
    """Returns status, stdout and stderr of each command."""
    command = [sys.executable, "-c", PLAIN, json.dumps(commands)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    return [(status, out, err) for status, out, err in map(json.loads, done.stdout.splitlines())]


def test_every_command_works_without_extras(tmp_path: Path) -> None:
    log, disk, trace = (str(tmp_path / name) for name in ("log", "disk", "trace"))
    record = RequestRecord(1.0, "r", 100, 16, 64, "ab", MissReason.EVICTED, 2.0)
    Path(log).write_text(json.dumps(record.to_dict()))
    pool = np.zeros((4, 4096), dtype=np.uint8)
    open_disk_tier(disk, 8 << 20, TierContext([pool], "0" * 64)).close()
    lines = [{"timestamp": i, "input_length": 1024, "output_length": 1, "hash_ids": [i, 9]} for i in range(9)]
    Path(trace).write_text("\n".join(map(json.dumps, lines)))
    wanted = [
        ("--help", 0, "replay"),
        ("--version", 0, "kvoffload"),
        ("doctor --help", 0, "--model"),
        ("doctor --config /no/such/file", 2, "cannot be read"),
        (f"explain {log}", 0, "evicted"),
        (f"explain {log} --json", 0, '"reasons"'),
        ("explain --pid 0", 2, "kvoffload explain: no server"),
        (f"disk inspect {disk}", 0, "No server uses it"),
        (f"disk verify {disk}", 0, "block"),
        (f"disk clear {disk} --yes", 0, "emoved"),
        (f"replay {trace} --policy lru,auto --capacity 3,5 --jobs 1", 0, "lru"),
        (f"size {trace} --ram 1GiB --disk none --jobs 1", 0, "RAM"),
    ]
    for (command, status, text), done in zip(wanted, plain([each[0].split() for each in wanted]), strict=True):
        assert done[0] == status, (command, done)
        assert text in done[1] + done[2], (command, done)


def test_a_missing_extra_is_reported_before_any_work(tmp_path: Path) -> None:
    trace, page = str(tmp_path / "none"), str(tmp_path / "page.html")
    for status, out, err in plain([["replay", trace, "--html", page], ["size", trace, "--html", page]]):
        assert (status, out) == (2, "")
        assert err.count("\n") == 1
        assert "plots need jinja2, which is not installed; run pip install jinja2 matplotlib" in err


def third_party_imports() -> dict[str, set[str]]:
    """Returns the modules that import each third-party package, anywhere in their code."""
    found: dict[str, set[str]] = {}
    for path in PROJECT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in {name.split(".")[0] for name in names} - sys.stdlib_module_names - {"kvoffload"}:
                found.setdefault(name, set()).add(path.relative_to(PROJECT).as_posix())
    return found


def test_imports_match_the_declared_dependencies() -> None:
    declared = tomllib.loads((PROJECT.parent.parent / "pyproject.toml").read_text())["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split("[<>=;! ]", requirement)[0] for requirement in requirements}

    core = names(declared["dependencies"])
    extras = {extra: names(wanted) for extra, wanted in declared["optional-dependencies"].items()}
    found = third_party_imports()
    assert set(cli.EXTRA) == extras["plots"]
    assert {name for name in found if any(path.startswith("cli/") for path in found[name])} <= core
    rooms = {
        **dict.fromkeys(extras["plots"], ("lab/",)),
        **dict.fromkeys(extras["testing"], ("testing/",)),
        "vllm": ("vllm/",),
        "sglang": ("sglang/",),
        "prometheus_client": ("vllm/", "sglang/"),
        "torch": ("vllm/", "sglang/"),
        "huggingface_hub": ("fingerprints.py",),
        "mooncake": ("tiers/mooncake/",),
        "obstore": ("tiers/object_store/",),
        "opentelemetry": ("observe/spans.py",),
    }
    for name in found.keys() - core:
        assert all(path.startswith(rooms.get(name, "vllm/")) for path in found[name]), f"{name} in {found[name]}"


# Tables at 80 columns, in a pipe and on a terminal: no head and no number is truncated or wrapped.

WIDTH, WIDE = 80, 1000
TIB = 1 << 40
ON = pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])


def words(text: str) -> Counter[str]:
    """Returns the words of a text, without rules and colour codes."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return Counter(word for word in plain.split() if set(word) - set("─━-"))


def rendered(table: Table, width: int, terminal: bool) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=terminal, legacy_windows=False).print(table)
    return out.getvalue()


def run(width: int, terminal: bool, *arguments: object) -> str:
    # On a dumb terminal rich always uses 80 columns.
    env = {"COLUMNS": str(width), "FORCE_COLOR": "1" if terminal else None, "TERM": "xterm", "NO_COLOR": None}
    done = CliRunner(env=env).invoke(cli.group(), list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    chains = ([i % 7, 100 + i % 3, 200 + i, 300] for i in range(40))
    lines = ({"timestamp": 1000 * i, "input_length": 2048, "hash_ids": ids} for i, ids in enumerate(chains))
    path.write_text("\n".join(json.dumps(line | {"output_length": 1}) for line in lines))
    return path


@ON
@pytest.mark.parametrize(
    "arguments",
    [
        ["--policy", "lru,arc", "--capacity", "20%,50%"],
        ["--policy", "lru", "--capacity", "20%", "--device", "30%", "--disk", "90%"],
        ["--policy", "lru,auto", "--capacity", "20%"],
    ],
)
def test_replay(trace: Path, arguments: list[str], terminal: bool) -> None:
    narrow, wide = (run(width, terminal, "replay", trace, "--jobs", 1, *arguments) for width in (WIDTH, WIDE))
    assert words(narrow) == words(wide)
    assert words(narrow)["policy"] >= 1


@ON
def test_explain(tmp_path: Path, terminal: bool) -> None:
    log = tmp_path / "log"
    reasons = [*MissReason, *[MissReason.FASTER_TO_COMPUTE] * 3, *[MissReason.NEVER_STORED] * 3, None] * 600
    from_disk: dict[str, Any] = {"disk_tokens": 13_000, "tier_tokens": {"disk": 13_000}}
    records = [
        RequestRecord(1.7e9 + 40 * i, f"r{i}", 130_000, 16_000, 6_400, reason and "ab", reason, 345_600.0, **from_disk)
        for i, reason in enumerate(reasons)
    ]
    log.write_text("\n".join(json.dumps(record.to_dict()) for record in records))
    narrow, wide = (run(width, terminal, "explain", log) for width in (WIDTH, WIDE))
    assert words(narrow) == words(wide)
    for reason in MissReason:
        assert f"\n{reason.replace('_', ' ')} " in re.sub(r"\x1b\[[0-9;]*m", "", narrow)


def tables() -> dict[str, Table]:
    """Returns tables with large numbers."""
    blocks, most = 1 << 24, (1 << 50) - (1 << 40)
    host = TierUse("device", blocks, 1, 100.0, 100.0, most, most, 12.34, blocks)
    setting = Setting(most, most, 100.0, 22.2, 55.5, 1.0, 9.999, 99.999, 99_999.0)
    sizing: Any = SimpleNamespace(settings=[setting], chosen=setting, places=["device", "RAM", "disk"])
    sizing.table = lambda: Sizing.table(sizing)
    then = int(time.time()) - 86_400 * 99
    folder = FolderReport("", "0123456789ab" * 5, 1 << 39, 1 << 21, 250_000, then, then)
    return {
        "tiers": replay.tier_table([host]),
        "sizes": size.settings_table(sizing),
        "folders": disk._table([PartReport("", folders=[folder])]),
    }


@ON
@pytest.mark.parametrize("name", ["tiers", "sizes", "folders"])
def test_large_numbers_fit(name: str, terminal: bool) -> None:
    table = tables()[name]
    narrow, wide = (words(rendered(table, width, terminal)) for width in (WIDTH, WIDE))
    assert narrow == wide


def test_a_wrapped_word_would_be_noticed() -> None:
    table = Table("a policy of mine", "number", box=None)
    table.add_row("a", "123,456,789")
    assert words(rendered(table, 30, False)) == words(rendered(table, WIDE, False))
    assert words(rendered(table, 16, False)) != words(rendered(table, WIDE, False))

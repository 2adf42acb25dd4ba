"""Tables at 80 columns, in a pipe and on a terminal: no head and no number is truncated or wrapped."""

from __future__ import annotations

import io
import json
import re
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console
from rich.table import Table

from kvoffload import cli
from kvoffload.abc import MissReason
from kvoffload.cli import disk, replay, size
from kvoffload.lab.replay import TierUse
from kvoffload.lab.sizing import Setting, Sizing
from kvoffload.observe.records import RequestRecord
from kvoffload.tiers.disk.offline import FolderReport, PartReport

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

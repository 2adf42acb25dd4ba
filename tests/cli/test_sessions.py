"""The sessions and tenants that ``kvoffload replay`` shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvoffload import cli

testing = pytest.importorskip("click.testing")
pytest.importorskip("rich")


def run(*args: object) -> Any:
    return testing.CliRunner(env={"COLUMNS": "200"}).invoke(cli.group(), list(map(str, args)), prog_name="kvoffload")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([{}, {}], "2 requests in "),
        ([{"session": "a"}, {}], "2 requests of 1 session in "),
        ([{"session": "a", "tenant": "x"}, {"session": "b", "tenant": "x"}], "2 requests of 2 sessions, 1 tenant in "),
    ],
)
def test_a_replay_shows_sessions_and_tenants(tmp_path: Path, names: list[dict[str, str]], words: str) -> None:
    path = tmp_path / "t.jsonl"
    lines: list[dict[str, object]] = [{"kvoffload_trace": 1, "started": 0, "block_tokens": 16}]
    lines += [{"timestamp": 0, "input_length": 32, "output_length": 1, "hash_ids": [1, 2], **each} for each in names]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert words in run("replay", path, "--jobs", 1).stdout
    (entry,) = json.loads(run("replay", path, "--capacity", "2", "--jobs", 1, "--json").stdout)
    known = {name: len({each[name[:-1]] for each in names if name[:-1] in each}) for name in ("sessions", "tenants")}
    assert {name: entry[name] for name in known if name in entry} == {n: count for n, count in known.items() if count}

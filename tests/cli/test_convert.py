"""``kvoffload convert``, and the sessions and tenants that ``kvoffload replay`` shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvoffload import cli

testing = pytest.importorskip("click.testing")
pytest.importorskip("rich")

SAMPLES = Path(__file__).parent.parent / "lab" / "samples"
BAILIAN = SAMPLES / "bailian.made.jsonl"


def run(*args: object) -> Any:
    return testing.CliRunner(env={"COLUMNS": "200"}).invoke(cli.group(), list(map(str, args)), prog_name="kvoffload")


def test_a_trace_is_converted_and_summed_up(tmp_path: Path) -> None:
    """That a replay has the same results is in tests/lab/test_writer.py."""
    out = tmp_path / "out.jsonl.gz"
    done = run("convert", BAILIAN, out)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{out}: 5 requests of 3 sessions, ")
    out = tmp_path / "out.jsonl"
    found = json.loads(run("convert", BAILIAN, out, "--block-tokens", 32, "--json").stdout)
    about = {"format": "bailian", "block_tokens": 32, "out": str(out), "bytes": out.stat().st_size}
    counts = {"requests": 5, "skipped_lines": 0, "sessions": 3, "tenants": 0, "accesses": 11, "distinct_blocks": 8}
    assert found == about | counts


def test_an_existing_file_needs_force(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("precious")
    done = run("convert", BAILIAN, out)
    assert (done.exit_code, done.stdout) == (2, "")
    assert (
        done.stderr == f"kvoffload convert: {out}: exists; name another file, or replace it with --force (force=True)\n"
    )
    assert out.read_text() == "precious"
    assert run("convert", BAILIAN, out, "--force").exit_code == 0
    assert run("convert", tmp_path / "none", tmp_path / "new").exit_code == 2
    assert not (tmp_path / "new").exists()


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

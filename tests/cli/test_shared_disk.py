"""``kvoffload disk`` on a shared directory: who writes there, and what is wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffload import cli
from kvoffload.tiers.shared_dir.seats import CLOCK_NAME, HEARTBEAT_NAME, SILENT_S
from tests.tiers.disk.rig import FINGERPRINT
from tests.tiers.shared_dir.rig import Server

testing = pytest.importorskip("click.testing")
pytest.importorskip("rich")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@pytest.fixture
def servers(path: Path) -> Iterator[list[Server]]:
    """Three servers: one is serving, one was killed on another machine long ago, one has ended."""
    found = [Server(path, boot=boot, seed=i) for i, boot in enumerate("abc")]
    found[0].write(1, 2, 3)
    found[1].write(4)
    for server in found:
        server.background()
    found[1].kill()
    silent = path / "writer-1" / HEARTBEAT_NAME
    os.utime(silent, (silent.stat().st_mtime - 2 * SILENT_S,) * 2)
    found[2].tier.close()
    yield found
    for server in found:
        server.tier.close()


def run(*arguments: str) -> Any:
    return testing.CliRunner(env={"COLUMNS": "140"}).invoke(cli.group(), ["disk", *arguments])


def test_inspect_shows_a_row_per_writer(path: Path, servers: list[Server]) -> None:
    result = run("inspect", str(path))
    assert result.exit_code == 0
    rows = [line.split() for line in result.output.splitlines() if line.startswith("writer-")]
    assert [(row[0], *row[-2:]) for row in rows] == [
        (f"writer-0/{FINGERPRINT[:12]}", "host-a", "serving"),
        (f"writer-1/{FINGERPRINT[:12]}", "host-b", "silent"),
        (f"writer-2/{FINGERPRINT[:12]}", "host-c", "ended"),
    ]
    assert "4 blocks (" in result.output
    assert "In use by process 1 on host-a (writer-0)." in " ".join(result.output.split())
    assert "Nothing is wrong." in result.output
    report = json.loads(run("inspect", str(path), "--json").output)
    parts = {part["path"]: part for part in report["parts"]}
    assert [(part["host"], part["pid"], part["state"]) for part in parts.values()] == [
        ("", None, ""),
        ("host-a", 1, "serving"),
        ("host-b", 1, "silent"),
        ("host-c", None, "ended"),
    ]
    assert [part["in_use"] for part in parts.values()] == [False, True, False, False]
    assert [folder["fingerprint"] for folder in parts["writer-0"]["folders"]] == [FINGERPRINT]
    assert sum(folder["num_blocks"] for part in parts.values() for folder in part["folders"]) == 4


def test_verify_reads_the_blocks_of_all_writers(path: Path, servers: list[Server]) -> None:
    assert "No block is bad: 4 blocks read" in run("verify", str(path)).output
    slab = path / "writer-1" / FINGERPRINT / "slab-00000"
    slab.write_bytes(bytes(len(slab.read_bytes())))
    result = run("verify", str(path), "--json")
    assert result.exit_code == 1
    folders = [folder for part in json.loads(result.output)["parts"] for folder in part["folders"]]
    assert [folder["path"] for folder in folders if folder["bad"]] == [f"writer-1/{FINGERPRINT}"]


def test_clear_refuses_while_a_writer_serves_and_removes_all_afterwards(path: Path, servers: list[Server]) -> None:
    result = run("clear", str(path), "--yes")
    assert result.exit_code == 2
    assert "writer-0 is in use by process 1 on host-a" in " ".join(result.output.split())
    servers[0].tier.close()
    assert run("clear", str(path), "--yes").exit_code == 0
    assert {each.name for each in path.iterdir()} == {CLOCK_NAME, "writer-0", "writer-1", "writer-2"}
    assert not list(path.rglob("slab-*"))
    assert not list(path.rglob("journal"))


def test_a_server_that_is_alive_on_another_machine_is_in_use_without_a_lock(path: Path) -> None:
    server = Server(path)
    server.write(1)
    server.kill()
    output = " ".join(run("inspect", str(path)).output.split())
    assert "In use by process 1 on host-boot-a (writer-0)." in output
    assert run("clear", str(path), "--yes").exit_code == 2


@pytest.mark.parametrize("bad", [b"garbage", b"[" * 4096, b'{"version": 1, "pid": 1e400'.ljust(4096), None])
def test_a_bad_heartbeat_is_a_finding(path: Path, servers: list[Server], bad: bytes | None) -> None:
    file = path / "writer-1" / HEARTBEAT_NAME
    if bad is None:
        file.unlink()
        file.symlink_to("elsewhere")
    else:
        file.write_bytes(bad)
    output = " ".join(run("inspect", str(path)).output.split())
    assert "writer-1: the heartbeat cannot be read" in output
    assert run("verify", str(path)).exit_code == 0

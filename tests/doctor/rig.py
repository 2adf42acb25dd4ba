"""Runs ``kvoffload doctor`` on set-ups that are really healthy or really broken."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvoffload.cli import group
from kvoffload.doctor import configuration, directories
from kvoffload.doctor.configuration import PlannedTier
from kvoffload.doctor.examine import Effort
from kvoffload.doctor.findings import Finding, Report
from kvoffload.doctor.source import ConfigSource
from kvoffload.tiers.disk.config import DirectoryConfig, DiskConfig

QUICK = Effort(seconds=0.01)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@dataclass(frozen=True)
class Diagnosis:
    """What the command has said."""

    exit_status: int
    findings: list[Mapping[str, Any]] = field(repr=False)
    verdict: str
    output: str = field(repr=False)

    def one(self, id: str, tier: str = "") -> Mapping[str, Any]:
        """Returns the only finding with this id, about this tier if it is about one."""
        found = [each for each in self.findings if each["id"] == id and tier in ("", each["tier"])]
        assert len(found) == 1, f"{id}: {[each['id'] for each in self.findings]}"
        return found[0]

    def ids(self, *levels: str) -> set[str]:
        """Returns the ids of the findings of these levels, by default of all."""
        return {each["id"] for each in self.findings if not levels or each["level"] in levels}


def diagnose(options: Mapping[str, Any], *arguments: str, effort: Effort = QUICK) -> Diagnosis:
    """Runs the command with ``--json``."""
    given = ["doctor", "--json", "--config", json.dumps(options), *arguments]
    result = CliRunner().invoke(group(), given, obj=effort)
    assert result.exit_code in (0, 1), result.output
    report = json.loads(result.stdout)
    assert report["exit_status"] == result.exit_code
    assert result.exit_code == (1 if report["num_problem"] else 0)
    return Diagnosis(result.exit_code, report["findings"], report["verdict"], result.stdout)


def findings_of(check: Callable[[Report], object]) -> dict[str, Finding]:
    """Runs one check in this process. Returns its findings by id."""
    messages: list[Mapping[str, Any]] = []
    check(Report(messages.append))
    found = [Finding.from_json(each["finding"]) for each in messages if "finding" in each]
    return {finding.id: finding for finding in found}


def judge(options: Mapping[str, Any], transfer: Mapping[str, Any] | None = None) -> dict[str, Finding]:
    """Returns what is said about a configuration, by id."""
    return findings_of(partial(configuration.check, ConfigSource(options, transfer)))


def look_at(path: Path, kind: type[DirectoryConfig] = DiskConfig) -> dict[str, Finding]:
    """Returns what is said about the directory of a tier with a budget of 32 MiB, by id."""
    tier = PlannedTier("tier", "tiers[0].", kind(str(path), 32 << 20), 100.0)
    return findings_of(partial(directories.check, tier, 0.0))


def private(folder: Path) -> Path:
    """Makes a directory as a disk tier wants it."""
    folder.mkdir(mode=0o700)
    return folder


def model_file(folder: Path, content: Mapping[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(content))
    return str(path)


@contextmanager
def silent_server() -> Iterator[str]:
    """A server that accepts connections and never answers. Yields its address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield f"127.0.0.1:{listener.getsockname()[1]}"

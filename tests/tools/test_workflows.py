"""The files for the repository's host: forms, workflows and hooks run what the project has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def commands(workflow: Any) -> list[str]:
    return [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]


def test_the_check_is_that_of_the_project() -> None:
    assert commands(read(ROOT / ".github" / "workflows" / "check.yml")) == [".ci/run"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_targets_that_exist(path: Path) -> None:
    workflow = read(path)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = [target for command in commands(workflow) for target in re.findall(r"^make (\S+)$", command)]
    assert [target for target in used if target not in targets] == []
    assert workflow["permissions"] == {"contents": "read"}

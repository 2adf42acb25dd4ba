"""The files for the repository's host: forms, workflows and hooks run what the project has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
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


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_forms_have_what_the_host_requires(path: Path) -> None:
    form = read(path)
    assert {"name", "description", "body"} <= form.keys()
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    ids = [field["id"] for field in fields]
    assert len(ids) == len(set(ids))
    assert all(field["attributes"]["label"] for field in fields)


@pytest.mark.parametrize("name", ["bug.yml", "wrong_answer.yml"])
def test_reports_of_faults_have_what_the_server_says(name: str) -> None:
    body = read(ROOT / ".github" / "ISSUE_TEMPLATE" / name)["body"]
    required = {field["id"] for field in body if field.get("validations", {}).get("required")}
    assert {"doctor", "explain", "versions"} <= required


def test_hooks_run_the_programs_of_make_lint() -> None:
    (repository,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    lint = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert lint is not None
    programs = re.findall(r"\$\(DEV\) ([a-z]+(?: format| check)?)", lint[1])
    hooks = [hook["entry"].removeprefix(".venv/bin/python -m ") for hook in repository["hooks"]]
    assert [hook.removesuffix(" --force-exclude") for hook in hooks] == programs

"""Tools of the Makefile, and the files for the repository's host, which run what the project has."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOL = runpy.run_path(str(ROOT / "tools" / "durations.py"))
REPORT = """<testsuites><testsuite>
<testcase classname="tests.host.test_pool" name="a" time="1.5"/>
<testcase classname="tests.host.test_pool.TestClosed" name="b" time="0.5"/>
<testcase classname="tests.cache.test_room" name="c" time="9"><skipped/></testcase>
</testsuite></testsuites>"""


def test_seconds_are_those_of_tests_that_ran_by_file(tmp_path: Path) -> None:
    path = tmp_path / "tests.xml"
    path.write_text(REPORT)
    assert TOOL["read_report"](path) == {"tests/host/test_pool.py": [1.5, 0.5]}


def test_every_guarantee_of_the_readme_names_tests_that_exist() -> None:
    found = dict(TOOL["guarantees"]((ROOT / "README.md").read_text()))
    assert len(found) == 10
    assert all((ROOT / file).is_file() for files in found.values() for file in files)


SELECTED = runpy.run_path(str(ROOT / "tools" / "requirements.py"))["selected"]
LINES = ["numpy>=1.24", "cuda-python<14,>=13", "cuda-python-more", 'nixl>=1; python_version < "3" and extra == "n"']


def test_extras_and_named_packages_are_left_out() -> None:
    assert SELECTED(LINES, []) == LINES[:3]
    assert SELECTED(LINES, ["CUDA-python", "num"]) == ["numpy>=1.24", "cuda-python-more"]


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(path: Path) -> Any:
    return pytest.importorskip("yaml").safe_load(path.read_text())


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

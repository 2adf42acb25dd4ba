"""The table of where the time of the tests goes."""

from __future__ import annotations

import runpy
from pathlib import Path

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

"""Without native code the managers run on the reference, and evict as their models do."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

WALK = """
from kvoffload.native import describe
from tests.suites.stateful import walk
from tests.cache.{module} import Machine
assert describe().startswith("plain Python"), describe()
for seed in range(3):
    walk(Machine, seed)
print("walked")
"""


@pytest.mark.parametrize("module", ["test_manager_lru", "test_manager_arc", "test_auto"])
def test_a_manager_works_without_native_code(module: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WALK.format(module=module)],
        env={**os.environ, "KVOFFLOAD_NATIVE": "0"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (ended.returncode, ended.stdout) == (0, "walked\n"), ended.stderr[-2000:]

"""What is said of network file systems holds on a real NFS mount, in a guest where this kernel has none."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import kvoffload

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools/nfs_guest.py"
GUEST = ROOT / ".nfs-guest"
TESTS = ("tests/sim/test_shared_storage.py", "tests/tiers/shared_dir/test_mounts.py", "tests/tiers/test_late.py")


@pytest.mark.timeout(300)
def test_the_same_on_a_real_mount() -> None:
    if not (GUEST / "usr/bin/linux.uml").exists():
        pytest.skip("needs a guest with NFS: make nfs-guest")
    tests = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--color=no", "-k", "real", *TESTS]
    run = subprocess.run(
        [sys.executable, TOOL, "run", GUEST, "--", *tests],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(Path(kvoffload.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, f"{shlex.join(tests)}\n{run.stdout}\n{run.stderr}"
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout

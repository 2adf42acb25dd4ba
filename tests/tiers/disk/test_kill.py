"""kill -9 at random moments under load, repeated on one directory."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from kvoffload.tiers.config import TierContext
from kvoffload.tiers.disk.start import open_disk_tier
from tests.scale import scaled
from tests.tiers.disk import kill_server
from tests.tiers.disk.rig import du

KILLS = scaled(6)
BUDGET = 4 << 20
DEADLINE_S = 300.0
ROOT = Path(__file__).resolve().parents[3]


def start(directory: Path, seed: int, said: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", kill_server.__name__, str(directory), str(BUDGET), str(seed)]
    with said.open("wb") as out, said.with_suffix(".errors").open("wb") as errors:
        return subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=errors)


def ended(said: Path) -> list[dict[str, int]]:
    """Returns the counters of each engine that has ended."""
    lines = said.read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def test_a_server_killed_at_any_moment_starts_again_without_wrong_bytes(tmp_path: Path) -> None:
    """A kill comes shortly after a number of engines have ended, so the test does not depend on the machine's speed."""
    directory = tmp_path / "disk"
    rng = random.Random(3)
    engines: list[dict[str, int]] = []
    for number in range(KILLS):
        said = tmp_path / f"{number}.said"
        server = start(directory, 1000 * number, said)
        try:
            wanted, later = number % 3, rng.uniform(0, 0.3)
            deadline, until = time.monotonic() + DEADLINE_S, None
            while until is None or time.monotonic() < until:
                errors = said.with_suffix(".errors").read_text()
                assert server.poll() is None, f"after {number} kills: {errors}"
                assert du(directory) <= BUDGET
                if until is None and "serving" in said.read_text() and len(ended(said)) >= wanted:
                    until = time.monotonic() + later
                assert until is not None or time.monotonic() < deadline, f"after {number} kills, it hangs: {errors}"
                time.sleep(0.02)
        finally:
            server.send_signal(signal.SIGKILL)
            server.wait(DEADLINE_S)
        errors = said.with_suffix(".errors").read_text()
        assert "Error" not in errors, errors
        engines += ended(said)
        assert du(directory) <= BUDGET
        names = {path.name for path in directory.rglob("*") if path.is_file()}
        assert names <= {"lock", "index", "recency"} | {name for name in names if name.startswith("slab-")}
    assert engines, "no engine has ended: the server was killed too early for the test to mean anything"
    assert sum(engine["promoted_blocks"] for engine in engines) > 0
    assert sum(engine["tier_bad_blocks:disk"] for engine in engines) == 0, "torn blocks must be absent, not bad"
    pools = [np.zeros((4, 4096), dtype=np.uint8)] * 2
    tier = open_disk_tier(directory, BUDGET, TierContext(pools, kill_server.FINGERPRINT))
    tier.check_integrity()
    tier.close()

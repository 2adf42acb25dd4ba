"""kill -9 at random moments under load, again and again on one directory."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import kill_server
from kvoffload.tiers.disk import open_disk_tier

KILLS = 100 if os.environ.get("KVOFFLOAD_SOAK") else 10
BUDGET = 4 << 20
DEADLINE_S = 60.0
SERVER = Path(kill_server.__file__)


def taken(directory: Path) -> int:
    """Bytes of the medium that all files under ``directory`` take."""
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def start(directory: Path, seed: int) -> subprocess.Popen[str]:
    command = [sys.executable, str(SERVER), str(directory), str(BUDGET), str(seed)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_killed_at_any_moment_it_starts_again_and_returns_no_wrong_byte(tmp_path: Path) -> None:
    directory = tmp_path / "disk"
    rng = random.Random(3)
    engines: list[dict[str, int]] = []
    for number in range(KILLS):
        server = start(directory, seed=1000 * number)
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "serving\n", server.communicate(timeout=DEADLINE_S)[1]
            until = time.monotonic() + rng.uniform(0, 0.6)
            while time.monotonic() < until:
                assert taken(directory) <= BUDGET
                time.sleep(0.02)
            # The last one is killed after an engine has come to its end, however slow the machine is.
            first = server.stdout.readline() if number == KILLS - 1 else ""
            assert server.poll() is None, f"after {number} kills: {server.communicate(timeout=DEADLINE_S)[1]}"
        finally:
            server.send_signal(signal.SIGKILL)
            out, errors = server.communicate(timeout=DEADLINE_S)
        out = first + out
        assert "Error" not in errors, errors
        engines += [json.loads(line) for line in out.splitlines() if line.startswith("{") and line.endswith("}")]
        assert taken(directory) <= BUDGET
        names = {path.name for path in directory.rglob("*") if path.is_file()}
        assert names <= {"lock", "index", "recency"} | {name for name in names if name.startswith("slab-")}
    assert engines, "no engine came to its end: the server was killed too soon to show anything"
    assert sum(engine["promoted_blocks"] for engine in engines) > 0
    assert sum(engine["disk_bad_blocks"] for engine in engines) == 0, "what a kill tears is void, not bad"
    pools = [np.zeros((4, 4096), dtype=np.uint8)] * 2
    tier = open_disk_tier(directory, BUDGET, pools, kill_server.FINGERPRINT)
    tier.check_integrity()
    tier.close()

"""GrowthWatch: a process that takes more memory than it may is ended, and says why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvoffload.tiers.remote.growth import MAX_GROWTH_BYTES
from tests.tiers.remote.rig import Server, store_in

TAKEN = MAX_GROWTH_BYTES + (16 << 20)
LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0)); time.sleep(0.1)"


def take(own_bytes: int, before: str = "") -> subprocess.CompletedProcess[str]:
    """Returns how a process has ended whose client takes TAKEN bytes, and that waits for its end if it must not."""
    script = f"""
import time
from kvoffload.tiers.remote.growth import GrowthWatch
with GrowthWatch({own_bytes}) as watch, watch.asking():
    {before or "pass"}
    taken = bytearray(b"1" * {TAKEN})
    time.sleep({60 if own_bytes == 0 else 0.2})
"""
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("before", ["", LIMIT], ids=["", "without descriptors"])
def test_a_process_that_takes_more_than_it_may_is_ended_and_says_what_to_set(before: str) -> None:
    done = take(0, before)
    assert done.returncode == 1
    assert "store sends more than requested" in done.stderr
    assert "client_bytes" in done.stderr


def test_a_client_may_take_its_own_bytes() -> None:
    done = take(2 * TAKEN)
    assert done.returncode == 0, done.stderr


def test_what_a_clients_libraries_take_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "from tests.tiers.remote.folder_store import connect as connect_slowly",
        f"KEPT = bytearray(b'1' * {TAKEN})",
        "def connect(settings):",
        "    import time",
        "    time.sleep(0.2)",
        "    return connect_slowly(settings)",
    ]
    (tmp_path / "large_client.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    server = Server(store_in(tmp_path / "store"), client="large_client:connect")
    server.connect()

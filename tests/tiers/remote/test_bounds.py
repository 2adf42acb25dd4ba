"""What a store sends that nobody has asked for costs misses, and a bounded amount of memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffload.tiers.mooncake.config import MooncakeConfig
from kvoffload.tiers.object_store.config import ObjectStoreConfig
from kvoffload.tiers.redis.config import RedisConfig
from kvoffload.tiers.remote.config import RemoteTierConfig
from kvoffload.tiers.remote.growth import MAX_GROWTH_BYTES
from tests.scale import SCALE
from tests.tiers.mooncake.rig import needs_mooncake
from tests.tiers.object_store.rig import CREDENTIALS, needs_obstore, patched
from tests.tiers.remote.hostile import NUM_BLOCKS, S3, SLOT_BYTES, Hostile, Victim, endless, endless_strings
from tests.tiers.remote.rig import Server, store_in

MORE_BYTES = 64 << 20
"""Memory beside what was asked for."""
PROCESS_BYTES = 64 << 20
"""Of a client's process with its libraries, before it asks for anything."""


def attack(config: RemoteTierConfig) -> None:
    with patched(CREDENTIALS):
        victim = Victim(config)
    try:
        victim.serve(2.0 if SCALE == 1 else 8.0)
    finally:
        victim.close()
    asked = NUM_BLOCKS * SLOT_BYTES
    assert victim.client_peak < PROCESS_BYTES + asked + MORE_BYTES
    # The hostile server is in this process too.
    assert victim.peak < MORE_BYTES


def test_redis() -> None:
    server = Hostile(endless_strings)
    attack(RedisConfig(url=f"redis://127.0.0.1:{server.port}"))


@needs_obstore
@pytest.mark.parametrize("name", S3)
def test_object_store(name: str) -> None:
    server = Hostile(S3[name])
    attack(ObjectStoreConfig(url="s3://bucket", endpoint=f"http://127.0.0.1:{server.port}"))


@needs_mooncake
def test_mooncake() -> None:
    server = Hostile(lambda connection: endless(connection, os.urandom(99999)))
    attack(MooncakeConfig(master=f"127.0.0.1:{server.port}"))


# GrowthWatch: a process that takes more memory than it may is ended, and says why.

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

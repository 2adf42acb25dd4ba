"""The doctor on stores that servers share: real ones that are of no use, and healthy ones."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvoffload.abc import ByteArray
from kvoffload.doctor import stores
from kvoffload.doctor.configuration import PlannedTier
from kvoffload.doctor.findings import Level
from kvoffload.tiers.remote.client import Outcome
from kvoffload.tiers.remote.config import RemoteTierConfig
from tests.doctor.rig import QUICK, Diagnosis, diagnose, findings_of, silent_server
from tests.tiers.mooncake.rig import needs_mooncake
from tests.tiers.redis.rig import RedisServer, free_port, needs_redis
from tests.tiers.remote.memory_store import MemoryClient

HERE = "tests.doctor.test_stores"
PASSWORD, WRONG_PASSWORD = "sesameopen", "sesameshut"
DEADLINE_S = 60.0


@needs_mooncake
def test_a_store_that_never_answers() -> None:
    with silent_server() as silent:
        options = {"host_bytes": "64MiB", "tiers": [{"kind": "mooncake", "master": silent}]}
        found = diagnose(options, effort=replace(QUICK, deadline_s=4.0))
    assert found.exit_status == 1
    hung = found.one("doctor.hung", "mooncake")
    assert hung["level"] == "problem"
    assert f"no answer within 4 s while the doctor connects to {silent}" in hung["text"]
    assert "firewall" in hung["fix"]


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    """Tiers on real servers: one that is healthy, one that wants a password, one without room, and none."""
    folder = tmp_path_factory.mktemp("redis")
    (folder / "password").write_text(WRONG_PASSWORD)
    (folder / "password").chmod(0o600)
    limit = ("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru")
    plain, locked = RedisServer(folder / "plain", *limit), RedisServer(folder / "locked", "--requirepass", PASSWORD)
    full = RedisServer(folder / "full", "--maxmemory", "2mb")
    try:
        tiers = [
            {"kind": "redis", "url": plain.url},
            {"kind": "redis", "url": locked.url},
            {"kind": "redis", "url": locked.url, "password_file": str(folder / "password")},
            {"kind": "redis", "url": full.url},
            {"kind": "redis", "url": f"redis://127.0.0.1:{free_port()}"},
        ]
        found = diagnose({"host_bytes": "64MiB", "tiers": tiers})
        keys = subprocess.run(
            ["redis-cli", "-s", plain.socket, "keys", "*"], capture_output=True, text=True, check=True
        )
        assert keys.stdout.strip() == ""
    finally:
        for server in (plain, locked, full):
            server.kill()
    return found


@needs_redis
@pytest.mark.parametrize(
    ("tier", "id", "text", "fix"),
    [
        ("redis-2", "store.connect_fails", "wants a password; set password_file", r"correct tiers\[1\]"),
        ("redis-3", "store.connect_fails", "does not accept", r"correct tiers\[2\] or its credentials"),
        ("redis-4", "store.full", "has no room", "maxmemory"),
        ("redis-5", "store.connect_fails", "Connection refused", r"see that the store runs .* correct tiers\[4\]"),
    ],
)
def test_stores_that_are_of_no_use(redis: Diagnosis, tier: str, id: str, text: str, fix: str) -> None:
    assert redis.exit_status == 1
    found = redis.one(id, tier)
    assert found["level"] == "problem"
    assert text in found["text"]
    assert re.search(fix, found["fix"])
    # The control: the same on a server that wants no password and has room.
    assert {each["level"] for each in redis.findings if each["tier"] == "redis" and each["area"] == "tier"} == {"ok"}


@needs_redis
def test_a_store_that_would_grow_or_stop_storing_is_advised_about(redis: Diagnosis) -> None:
    advice = redis.one("store.advice", "redis-4")
    assert advice["level"] == "warning"
    assert "stores nothing new once its 2 MiB are full" in advice["text"]
    assert "allkeys-lru" in advice["fix"]


@needs_redis
def test_a_store_is_measured(redis: Diagnosis) -> None:
    assert redis.one("store.connects", "redis")["level"] == "ok"
    assert redis.one("store.round_trip", "redis")["figures"]["round_trip_p50_ms"] > 0
    assert redis.one("store.speed", "redis")["figures"]["get_bytes_per_s"] > 0
    assert not {PASSWORD, WRONG_PASSWORD} & set(re.findall(r"\w+", redis.output))


@dataclass(frozen=True, kw_only=True)
class ValuesConfig(RemoteTierConfig):
    """A store in this process. With ``swaps`` it gives back other bytes than were put."""

    kind = "values"
    connect = f"{HERE}:connect"
    address = "far:1"
    swaps: bool


def test_a_store_that_is_far_away_and_one_that_mixes_values_up() -> None:
    far = PlannedTier("far", "tiers[0].", ValuesConfig(swaps=False), 0.0)
    found = findings_of(partial(stores.check, far))
    assert found["store.round_trip"].level is Level.WARNING
    assert "set tiers[0].lookup_deadline_ms to" in found["store.round_trip"].fix
    assert found["store.speed"].level is Level.OK
    found = findings_of(partial(stores.check, replace(far, config=ValuesConfig(swaps=True), lookup_deadline_ms=1e6)))
    assert found["store.round_trip"].level is Level.OK
    assert found["store.other_bytes"].level is Level.PROBLEM
    assert found["store.other_bytes"].fix


class Swapping(MemoryClient):
    def get(self, names: Sequence[str], buffers: Sequence[Sequence[ByteArray]]) -> list[Outcome]:
        outcomes = super().get(names, buffers)
        for (buffer,) in buffers:
            buffer[0] ^= 1
        return outcomes


def connect(settings: Mapping[str, Any]) -> MemoryClient:
    return Swapping() if settings["swaps"] else MemoryClient()


@needs_redis
def test_a_doctor_that_is_interrupted_removes_its_values(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    options = {"host_bytes": "64MiB", "tiers": [{"kind": "redis", "url": server.url}]}
    program = "from kvoffload.cli import main; main()"
    try:
        command = [sys.executable, "-c", program, "doctor", "--config", json.dumps(options)]
        with server.raw() as raw, subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            deadline = time.monotonic() + DEADLINE_S
            while not raw.keys("kvoffload/doctor/*"):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 130
            assert raw.keys("*") == []
    finally:
        server.kill()

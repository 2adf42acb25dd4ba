"""What a store sends that nobody has asked for costs misses, and a bounded amount of memory."""

from __future__ import annotations

import pytest

from kvoffload.tiers.mooncake.config import MooncakeConfig
from kvoffload.tiers.object_store.config import ObjectStoreConfig
from kvoffload.tiers.redis.config import RedisConfig
from kvoffload.tiers.remote.config import RemoteTierConfig
from tests.scale import SCALE
from tests.tiers.mooncake.rig import needs_mooncake
from tests.tiers.object_store.rig import CREDENTIALS, needs_obstore, patched
from tests.tiers.remote.hostile import MOONCAKE, NUM_BLOCKS, REDIS, S3, SLOT_BYTES, Hostile, Talk, Victim

MORE_BYTES = 64 << 20
"""Memory beside what was asked for."""
PROCESS_BYTES = 64 << 20
"""Of a client's process with its libraries, before it asks for anything."""
OFTEN = {"an array of strings", "a body", "an error in chunks"}
"""The others take long, and are tried by ``make soak``."""


def chosen(attacks: dict[str, Talk]) -> list[str]:
    return [name for name in attacks if SCALE > 1 or name in OFTEN]


def attack(config: RemoteTierConfig) -> None:
    with patched(CREDENTIALS):
        victim = Victim(config)
    try:
        victim.serve(1.0 if SCALE == 1 else 8.0)
    finally:
        victim.close()
    asked = NUM_BLOCKS * SLOT_BYTES
    assert victim.client_peak < PROCESS_BYTES + asked + MORE_BYTES
    assert victim.client_peak, "no process was measured"
    # The hostile server is in this process too.
    assert victim.peak < MORE_BYTES


@pytest.mark.parametrize("name", chosen(REDIS))
def test_redis(name: str) -> None:
    server = Hostile(REDIS[name])
    attack(RedisConfig(url=f"redis://127.0.0.1:{server.port}"))
    server.close()


@needs_obstore
@pytest.mark.parametrize("name", chosen(S3))
def test_object_store(name: str) -> None:
    server = Hostile(S3[name])
    attack(ObjectStoreConfig(url="s3://bucket", endpoint=f"http://127.0.0.1:{server.port}"))
    server.close()


@needs_mooncake
@pytest.mark.parametrize("name", chosen(MOONCAKE))
def test_mooncake(name: str) -> None:
    server = Hostile(MOONCAKE[name])
    attack(MooncakeConfig(master=f"127.0.0.1:{server.port}"))
    server.close()

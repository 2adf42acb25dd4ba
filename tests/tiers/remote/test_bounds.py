"""What a store sends that nobody has asked for costs misses, and a bounded amount of memory."""

from __future__ import annotations

import os

import pytest

from kvoffload.tiers.mooncake.config import MooncakeConfig
from kvoffload.tiers.object_store.config import ObjectStoreConfig
from kvoffload.tiers.redis.config import RedisConfig
from kvoffload.tiers.remote.config import RemoteTierConfig
from tests.scale import SCALE
from tests.tiers.mooncake.rig import needs_mooncake
from tests.tiers.object_store.rig import CREDENTIALS, needs_obstore, patched
from tests.tiers.remote.hostile import NUM_BLOCKS, S3, SLOT_BYTES, Hostile, Victim, endless, endless_strings

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

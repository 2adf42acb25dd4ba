"""What the demo does to a directory is what it says, and the tier's checksums find it."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo.process import DemoError, free_ports
from demo.stores import DirectoryStore, MooncakeStore, RedisStore, StoreMissingError
from kvoffload.abc import TierError
from kvoffload.tiers.config import TierContext
from kvoffload.tiers.disk.start import open_disk_tier
from kvoffload.tiers.mooncake import config as mooncake_config
from kvoffload.tiers.redis.client import RedisClient
from kvoffload.tiers.redis.location import parse_url
from kvoffload.tiers.redis.login import Login
from kvoffload.tiers.redis.nodes import Nodes
from kvoffload.tiers.remote.client import Outcome, StoreError

FINGERPRINT = "ab" * 32
KEYS = [bytes([i]) * 20 for i in range(4)]
SLOTS = np.arange(4)
DEADLINE_S = 60.0


def transfer(path: Path, pool: np.ndarray, is_read: bool) -> list[TierError | None]:
    """Writes the slots of ``pool`` to a tier in ``path``, or reads them. Returns the error of each key."""
    tier = open_disk_tier(path, 64 << 20, TierContext([pool], FINGERPRINT))
    try:
        taken = tier.read(KEYS, SLOTS) if is_read else tier.write(KEYS, SLOTS)
        assert taken == KEYS
        results: dict[Any, Any] = {}
        deadline = time.monotonic() + DEADLINE_S
        while len(results) < len(KEYS) and time.monotonic() < deadline:
            tier.wait(0.1)
            results |= {result.key: result.error for result in tier.poll()}
        return [results[key] for key in KEYS]
    finally:
        tier.close()


def test_changed_values_are_found(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    pool = np.random.default_rng(0).integers(0, 256, (4, 4096), dtype=np.uint8)
    assert transfer(store.path / "writer-0", pool, is_read=False) == [None] * 4
    again = np.zeros_like(pool)
    assert transfer(store.path / "writer-0", again, is_read=True) == [None] * 4
    assert (again == pool).all()
    assert store.corrupt() == 1
    assert transfer(store.path / "writer-0", again, is_read=True) == [TierError.CORRUPT] * 4


def test_free_ports_are_distinct() -> None:
    ports = free_ports(3)
    assert len(set(ports)) == 3


def test_a_missing_client_names_the_line_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StoreMissingError, match=r"^the client of .* run pip install"):
        MooncakeStore(tmp_path)


def test_a_wheel_without_the_master_names_the_line_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("")
    monkeypatch.delitem(sys.modules, "mooncake", raising=False)  # Tests before may have imported the real one.
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(mooncake_config, "check_installed", lambda: None)
    with pytest.raises(StoreMissingError, match="no mooncake_master; run pip install"):
        MooncakeStore(tmp_path)


def test_a_missing_server_names_the_line_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(StoreMissingError, match="run apt-get install redis-server"):
        RedisStore(tmp_path)


@pytest.mark.skipif(RedisStore.program() is None, reason="there is no redis-server: apt-get install redis-server")
def test_what_the_demo_does_to_a_server_is_what_it_says(tmp_path: Path) -> None:
    with RedisStore(tmp_path) as store:
        location = parse_url(store.entry()["url"])
        client = RedisClient(Nodes(location.seeds, Login("", None, 0, None)))
        names = [f"kvoffload/{FINGERPRINT}/{key.hex()}" for key in KEYS]
        values = np.random.default_rng(0).integers(0, 256, (4, 4096), dtype=np.uint8)
        found = np.zeros_like(values)
        assert client.put(names, [[row] for row in values]) == [Outcome.OK] * 4
        client.put([f"kvoffload/identities/{FINGERPRINT}/0"], [[values[0]]])
        assert list(store.values()) == [name.encode() for name in names]

        assert store.corrupt() == 4
        assert client.get(names, [[row] for row in found]) == [Outcome.OK] * 4
        assert not (found == values).all(axis=1).any()
        store.kill()
        with pytest.raises(StoreError):
            client.exists(names)
        with pytest.raises(DemoError, match="redis-server does not answer"):
            store.values()
        store.start()
        assert client.exists(names) == [Outcome.MISSING] * 4
        assert store.values() == {}
        client.close()

"""What the demo does to a directory is what it says, and the tier's checksums find it."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from demo import shared_run as run
from demo.process import DemoError, free_ports
from demo.stores import DirectoryStore, MooncakeStore, RedisStore, Servers, StoreMissingError, Throttle, send
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


@pytest.mark.parametrize("change", [DirectoryStore.corrupt, DirectoryStore.exchange])
def test_changed_values_are_found(tmp_path: Path, change: Callable[[DirectoryStore], object]) -> None:
    store = DirectoryStore(tmp_path / "store")
    pool = np.random.default_rng(0).integers(0, 256, (4, 4096), dtype=np.uint8)
    assert transfer(store.path / "writer-0", pool, is_read=False) == [None] * 4
    again = np.zeros_like(pool)
    assert transfer(store.path / "writer-0", again, is_read=True) == [None] * 4
    assert (again == pool).all()
    change(store)
    assert transfer(store.path / "writer-0", again, is_read=True) == [TierError.CORRUPT] * 4


def test_exchanged_values_are_those_of_other_keys(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    pool = np.repeat(np.arange(1, 5, dtype=np.uint8)[:, None], 4096, axis=1)
    transfer(store.path / "writer-0", pool, is_read=False)
    (slab,) = store.slabs()
    before = np.fromfile(slab, np.uint8)
    store.exchange()
    after = np.fromfile(slab, np.uint8)
    assert (after[: 3 * 4096] == before[4096 : 4 * 4096]).all()
    assert len(after) == len(before)


def test_deleting_the_first_server_leaves_the_second(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    pool = np.zeros((4, 4096), np.uint8)
    for number in range(2):
        transfer(store.path / f"writer-{number}", pool, is_read=False)
    store.delete_first()
    assert [slab.relative_to(store.path).parts[0] for slab in store.slabs()] == ["writer-1"]


def test_a_plan_has_new_documents_for_each_fault() -> None:
    plan = run.make_plan(run.NUM_FAULTS)
    assert len(plan.new) == run.NUM_FAULTS * run.NEW_DOCUMENTS
    assert set(plan.new).isdisjoint([*plan.shared, *plan.back])
    assert plan.documents == len(plan.shared) + len(plan.back) + len(plan.new)
    assert run.make_plan(0).documents == len(plan.shared) + len(plan.back)


def test_every_store_has_the_same_faults(tmp_path: Path) -> None:
    faults = [fault.name for fault in DirectoryStore(tmp_path).faults()]
    assert len(faults) == run.NUM_FAULTS
    assert len(set(faults)) == len(faults)
    # Faults can be listed without a store that runs.
    for other in (MooncakeStore, RedisStore):
        others = other.faults(object.__new__(other))
        assert sorted(fault.name for fault in others) == sorted(faults)


def test_a_throttled_process_is_stopped_and_then_runs() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:

        def state() -> str:
            return Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]

        throttle = Throttle([child.pid])
        deadline = time.monotonic() + DEADLINE_S
        while state() != "T" and time.monotonic() < deadline:
            time.sleep(0.001)
        assert state() == "T"
        throttle.close()
        assert state() != "T"
    finally:
        child.kill()
        child.wait()
    send([child.pid], signal.SIGCONT)


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

        assert store.exchange() == 4
        assert client.get(names, [[row] for row in found]) == [Outcome.OK] * 4
        assert (found == np.roll(values, -1, axis=0)).all()
        assert store.corrupt() == 4
        assert client.get(names, [[row] for row in found]) == [Outcome.OK] * 4
        assert not (found == np.roll(values, -1, axis=0)).all(axis=1).any()

        faults = {fault.name: fault for fault in store.faults()}
        servers = cast(Servers, None)
        faults["full"].begin(servers)
        assert client.put(["kvoffload/new"], [[values[0]]]) == [Outcome.FULL]
        assert client.exists(names) == [Outcome.OK] * 4
        faults["full"].end(servers)
        assert client.put(["kvoffload/new"], [[values[0]]]) == [Outcome.OK]
        faults["killed"].begin(servers)
        with pytest.raises(StoreError):
            client.exists(names)
        with pytest.raises(DemoError, match="redis-server does not answer"):
            store.values()
        faults["killed"].end(servers)
        assert client.exists(names) == [Outcome.MISSING] * 4
        client.put(names, [[row] for row in values])
        faults["restarted empty"].begin(servers)
        assert store.values() == {}
        client.close()

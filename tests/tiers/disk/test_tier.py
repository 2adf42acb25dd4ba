"""DiskTier: a read gives the bytes stored under the key or an error, the budget holds, and blocks outlive a restart."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import ConfigError
from kvoffload.testing.tier_conformance import make_pools
from kvoffload.tiers.config import TierContext
from kvoffload.tiers.disk import index
from kvoffload.tiers.disk import tier as disk
from kvoffload.tiers.disk.directory import DirectoryStorage
from kvoffload.tiers.disk.format import RECORD_BYTES, payload_checksum, record_offset
from kvoffload.tiers.disk.layout import FIXED_BYTES
from kvoffload.tiers.disk.maintenance import RETRY_S
from kvoffload.tiers.disk.start import open_disk_tier
from kvoffload.tiers.disk.storage import StoredFile
from kvoffload.tiers.disk.tier import DiskSettings, DiskTier
from kvoffload.tiers.limited_log import WARNING_INTERVAL_S
from tests.sim.executor import Killed
from tests.sim.shared_storage import SimulatedStorage
from tests.sim.storage import FaultRates, FaultyStorage
from tests.tiers.disk.rig import (
    FINGERPRINT,
    OTHERS,
    PAGE,
    Rig,
    capacity,
    content,
    du,
    header_of,
    key,
    pack_record,
    patch,
)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "disk")


# Blocks outlive a restart.


@pytest.mark.parametrize("pieces", [1, 2, 1 << 19])
def test_recency_outlives_a_restart(rig: Rig, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "RECORDS_AT_ONCE", pieces)
    tier = rig.open()
    assert tier.stats().capacity_bytes == capacity(8)
    rig.write(*range(8))
    rig.read(7)
    rig.read(5)
    rig.open()
    for name in (10, 11, 12):
        rig.write(name)
    assert rig.present() == [0, 1, 2, 5, 7, 10, 11, 12]
    rig.open()
    rig.write(13, 14, 15, 16)
    assert rig.present() == [5, 10, 11, 12, 13, 14, 15, 16]


def test_the_newer_of_two_records_of_a_key_counts(rig: Rig) -> None:
    rig.open()
    rig.write(1, 2)
    header = header_of(rig)
    rig.tier.close()
    old = [content(1, 0, PAGE, version=7)]
    record = pack_record(
        header, key(1), sequence=0, stored_at=0, payload_checksum=payload_checksum(header, key(1), old)
    )
    patch(rig.folder / "index", record_offset(5), record.tobytes())
    patch(rig.folder / "slab-00000", 5 * PAGE, old[0].tobytes())
    rig.open()
    assert rig.present() == [1, 2]
    rig.check_reads(1, 2)
    rig.open()
    index = (rig.folder / "index").read_bytes()
    assert index[record_offset(5) : record_offset(6)] == bytes(RECORD_BYTES)


# Only bytes that were written come back.


@pytest.mark.parametrize("change", [{"slot_bytes": (8192,)}, {"slots_per_slab": 99}])
def test_another_layout_makes_the_tier_start_anew(rig: Rig, change: dict[str, Any]) -> None:
    rig.open()
    rig.write(1)
    header = header_of(rig)
    rig.tier.close()
    patch(rig.folder / "index", 0, replace(header, **change).pack().tobytes())
    rig.open()
    assert rig.present() == []
    rig.write(1)
    rig.check_reads(1)


# The budget.


def fill(rig: Rig, num_slots: int) -> list[int]:
    """Writes 12 blocks into 3 slabs. Returns those in the first ``num_slots`` slots."""
    rig.open()
    for name in range(12):
        rig.write(name)
    slots = rig.tier.catalog.blocks.table.find([key(name) for name in range(12)])
    return np.flatnonzero(slots < num_slots).tolist()


@pytest.mark.parametrize("num_slots", [1, 4, 6, 11])
@pytest.mark.parametrize("cause", ["budget", "files of others"])
def test_a_smaller_budget_keeps_the_blocks_that_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, num_slots: int, cause: str
) -> None:
    whole = capacity(12, num_slabs=3)
    rig = Rig(tmp_path / "disk", slab_bytes=4 * PAGE, capacity_bytes=whole)
    kept = fill(rig, num_slots)
    less = capacity(num_slots, num_slabs=-(-num_slots // 4))
    if cause == "budget":
        rig.settings["capacity_bytes"] = less
    else:
        (rig.path / "stray").write_bytes(bytes((whole - less) // PAGE * PAGE))
    for _ in range(2):
        rig.open()
        assert rig.present() == kept
        rig.check_reads(*kept)
    assert caplog.text.count(f"{12 - num_slots} block") == 1
    rig.write(20)
    assert len(rig.present()) == num_slots
    (rig.path / "stray").unlink(missing_ok=True)
    rig.open(capacity_bytes=whole)
    rig.write(*range(30, 42 - num_slots))
    assert len(rig.present()) == 12, "the budget is used again"
    rig.check_reads(*rig.present())


@pytest.mark.parametrize("later", [6, 12])
def test_a_kill_while_slots_beyond_the_budget_are_removed(tmp_path: Path, later: int) -> None:
    """``later``: slots within the budget of the next process."""
    for num_operations in range(1000):
        storage = SimulatedStorage(1 << 20)
        rig = Rig(tmp_path / "none", slab_bytes=4 * PAGE, capacity_bytes=capacity(12, num_slabs=3))
        rig.storage = lambda storage=storage: storage  # type: ignore[method-assign, misc]
        kept = fill(rig, 6)
        before = storage.used_bytes
        restarted = storage.restart()
        faulty = FaultyStorage(restarted)
        faulty.kill_at = num_operations
        rig.opened, is_done = None, True
        try:
            rig.open(faulty, capacity_bytes=capacity(6, num_slabs=2))
        except Killed:
            is_done = False
        rig.opened, again = None, restarted.restart()
        budget = capacity(later, num_slabs=-(-later // 4))
        rig.open(again, capacity_bytes=budget)
        assert storage.peak_bytes <= before, "nothing grows meanwhile"
        assert again.used_bytes <= budget
        assert set(kept) <= set(rig.present())
        assert later == 12 or rig.present() == kept
        rig.check_reads(*rig.present())
        if is_done:
            break
    assert num_operations > 10


def test_other_fingerprints_make_room_oldest_first_and_last_slab_first(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "disk", slab_bytes=64 * PAGE, capacity_bytes=capacity(512, num_slabs=8))
    for age, fingerprint in enumerate(OTHERS[:2]):
        rig.open(fingerprint=fingerprint)
        rig.write(*range(64))
        rig.write(*range(64, 128))
        rig.tier.close()
        os.utime(rig.folder / "index", (1000 - age, 1000 - age))
    young, old = (rig.path / fingerprint for fingerprint in OTHERS[:2])
    rig.open(fingerprint=FINGERPRINT)
    seen = []
    for start in range(0, 640, 64):
        rig.write(*range(start, start + 64))
        left = [sorted(file.name for file in folder.iterdir()) if folder.exists() else [] for folder in (old, young)]
        if left not in seen:
            seen.append(left)
    whole = seen[0][0]
    assert whole == seen[0][1]
    assert whole[:4] == ["index", "recency", "slab-00000", "slab-00001"]
    assert seen[-1] == [[], []]
    assert len(seen) > 3
    for first, second in seen:
        assert first == whole[: len(first)]
        assert second == (whole if first else whole[: len(second)])


def test_files_that_are_not_the_tiers_are_left_alone(rig: Rig) -> None:
    rig.open()
    rig.write(1)
    rig.tier.close()
    (rig.path / "notes").mkdir()
    (rig.path / "notes" / "slab-00000").write_bytes(b"n")
    (rig.folder / "README").write_bytes(b"r")
    (rig.folder / "slab-00077").write_bytes(b"left over")
    rig.open(capacity_bytes=capacity(4) + 8192)
    assert not (rig.folder / "slab-00077").exists()
    assert (rig.folder / "README").exists()
    assert (rig.path / "notes" / "slab-00000").exists()
    rig.check_reads(1)


def test_a_budget_without_room_for_a_block_is_refused(rig: Rig) -> None:
    with pytest.raises(ConfigError, match=r"^bytes=\d+.*not enough for one block; set it to at least"):
        rig.open(capacity_bytes=capacity(1) - 1)
    rig.open(capacity_bytes=capacity(1))
    rig.write(1)
    rig.check_reads(1)


# When the medium fails.


class FullStorage(FaultyStorage):
    """A storage without room for slabs while ``full`` is True."""

    full = True

    def open(
        self, folder: str, name: str, create: bool = False, direct: bool = False, fresh: bool = False
    ) -> StoredFile:
        if self.full and name.startswith("slab"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().open(folder, name, create, direct)


def test_without_any_room_writes_are_refused_until_there_is_some(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    storage = FullStorage(SimulatedStorage(1 << 20))
    rig = Rig(tmp_path / "none", clock=lambda: now[0])
    rig.open(storage)
    assert rig.write(1) == []
    assert caplog.text.count("it cannot grow") == 1
    storage.full = False
    assert rig.write(1) == []
    now[0] += RETRY_S
    assert [result.ok for result in rig.write(1)] == [True]
    rig.check_reads(1)


def test_warnings_are_few_and_name_the_key(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    rig.open(clock=lambda: now[0])
    rig.write(*range(8))
    patch(rig.folder / "slab-00000", 0, bytes(8 * PAGE))
    rig.read(*range(7))
    now[0] += WARNING_INTERVAL_S
    rig.read(7)
    messages = [record.message for record in caplog.records if "corrupt" in record.message]
    assert len(messages) == 2
    assert key(0).hex() in messages[0]
    assert key(7).hex() in messages[1]
    assert "6 more" in messages[1]


# Removed blocks stay away.


def test_a_slot_that_has_a_new_block_is_not_emptied_for_the_old_one(rig: Rig) -> None:
    rig.open(capacity_bytes=capacity(4))
    rig.write(1, 2, 3, 4)
    assert rig.tier.files.recency is not None
    write_recency = rig.tier.files.recency.write

    def hang(buffers: Any, offset: int) -> int:
        rig.executor.stall(1.0)
        return write_recency(buffers, offset)

    rig.tier.files.recency.write = hang  # type: ignore[method-assign]
    rig.tier.touch([key(1)])
    rig.drain()
    # Maintenance hangs until the tier is closed, and empties the records of 2 and 3 after that.
    rig.tier.delete([key(2), key(3)])
    assert len(rig.write(5, 6)) == 2
    rig.open()
    assert rig.present() == [1, 4, 5, 6]
    rig.check_reads(1, 4, 5, 6)


def test_after_a_kill_at_any_moment_only_right_blocks_are_found(tmp_path: Path) -> None:
    """Version 0 stands for the weights that every process loads, version 1 for those that it is given later."""
    num_operations, found = 0, []
    while True:
        storage = SimulatedStorage(1 << 20)
        faulty = FaultyStorage(storage)
        faulty.kill_at = num_operations
        rig = Rig(tmp_path / "none", slab_bytes=2 * PAGE, capacity_bytes=capacity(6, num_slabs=3))
        with_reset = False
        try:
            rig.open(faulty)
            rig.write(1, 2)
            rig.write(3, 4)
            rig.write(6, 7)
            rig.write(8, 9)
            rig.tier.delete([key(3)])
            rig.drain()
            rig.tier.reset()
            with_reset = True
            rig.write(2, 3, version=1)
            rig.write(4, 5, version=1)
            done = True
        except Killed:
            done = False
        rig.open_after_kill(storage)
        there = rig.present()
        rig.check_reads(*there)
        found.append((with_reset, there))
        assert storage.used_bytes <= rig.tier.files.budget.capacity_bytes
        rig.write(1, 2, 3)
        rig.check_reads(1, 2, 3)
        if done:
            break
        num_operations += 1
    assert num_operations > 25
    assert (False, [3, 4, 6, 7]) in found
    assert (False, [4, 6, 7, 8, 9]) in found
    assert found[-1] == (True, [])


# Owners.


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("engines", [1, 2])
def test_no_two_tiers_share_a_directory_and_each_engine_has_a_folder_and_a_share(tmp_path: Path, engines: int) -> None:
    path, budget, pools = tmp_path / "disk", 2 << 20, make_pools(2, PAGE)
    tiers = [
        open_disk_tier(path, budget, TierContext(pools, FINGERPRINT, engine=engine, engines=engines))
        for engine in range(engines)
    ]
    folders = [FINGERPRINT] if engines == 1 else ["engine-0", "engine-1"]
    assert sorted(child.name for child in path.iterdir() if child.is_dir()) == folders
    assert [tier.stats().capacity_bytes for tier in tiers] == [budget // engines] * engines
    for tier in tiers:
        for count in (1, 2):
            with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()}"):
                open_disk_tier(path, budget, TierContext(pools, OTHERS[0], engine=count - 1, engines=count))
        tier.close()
    open_disk_tier(path, budget, TierContext(pools, OTHERS[0])).close()


def test_blocks_of_another_number_of_engines_are_removed(tmp_path: Path) -> None:
    path, budget = tmp_path / "disk", 4 << 20

    def run(engine: int, engines: int) -> None:
        tier = open_disk_tier(
            path, budget, TierContext(make_pools(2, PAGE), FINGERPRINT, engine=engine, engines=engines)
        )
        assert du(path) <= budget + FIXED_BYTES
        tier.close()

    for engines in (1, 3, 2, 1, 4):
        for engine in reversed(range(engines)):
            run(engine, engines)
        folders = {child.name for child in path.iterdir() if child.is_dir()}
        assert folders == ({FINGERPRINT} if engines == 1 else {f"engine-{i}" for i in range(engines)})


# The end.


@pytest.mark.usefixtures("impatient")
def test_close_does_not_wait_for_a_device_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "CLOSE_DEADLINE_S", 0.05)
    hanging, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        hanging.set()
        go_on.wait(30)

    storage = FaultyStorage(DirectoryStorage(tmp_path / "disk"), stall=hang)
    pools = make_pools(4, PAGE)
    tier = DiskTier(storage, pools, DiskSettings(FINGERPRINT, 1 << 20))
    storage.rates = FaultRates(stall=1.0)
    tier.write([key(1)], np.array([0]))
    assert hanging.wait(30)
    tier.close()
    with pytest.raises(ConfigError, match="in use by process"):
        # The thread that hangs could still write.
        open_disk_tier(tmp_path / "disk", 1 << 20, TierContext(pools, FINGERPRINT))
    go_on.set()


def test_a_write_that_goes_on_after_the_tier_was_closed_leaves_no_block(tmp_path: Path) -> None:
    """Its host slot may have other contents by then."""
    storage = SimulatedStorage(1 << 20)
    rig = Rig(tmp_path / "none")
    rig.open(storage)
    rig.write(1)
    write = rig.tier.files.slabs.write

    def hang(slot: int, buffers: Any) -> None:
        rig.executor.stall(60.0)
        write(slot, buffers)

    rig.tier.files.slabs.write = hang  # type: ignore[method-assign]
    assert rig.tier.write([key(2)], np.array([0])) == [key(2)]
    rig.executor.drain()
    rig.tier.close()
    assert rig.executor.turn(now=120.0)
    assert rig.executor.idle
    rig.open_after_kill(storage)
    assert rig.present() == [1]


# Descriptors.


def test_the_limit_of_open_files_is_raised_for_all_slabs_of_all_tiers_and_named_if_it_cannot_be() -> None:
    code = f"""
import resource
from kvoffload.abc import ConfigError
from kvoffload.tiers.disk.start import allow_descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))
def limit(*slabs):
    for each in slabs:
        allow_descriptors(each * {1 << 30}, 1)
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
print(limit(1000), limit(1000), limit(2000, 2000))
try:
    limit(4000)
except ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    limits, error = done.stdout.splitlines()
    one, two, four = map(int, limits.split())
    assert 1000 + 512 <= one < 1000 + 512 + 256
    assert two >= one + 1000
    assert four == 4096
    assert "ulimit -n" in error


def test_close_does_not_wait_for_a_medium_that_hangs_in_its_last_write(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All transfers have ended; then the medium hangs. The files stay open until it continues."""
    monkeypatch.setattr(disk, "FINISH_DEADLINE_S", 0.05)
    tier = rig.open()
    may_continue, closed = threading.Event(), threading.Event()
    close = tier.files.close

    def note_close() -> None:
        close()
        closed.set()

    monkeypatch.setattr(tier, "write_journal", lambda: may_continue.wait(60.0))
    monkeypatch.setattr(tier.files, "close", note_close)
    tier.close()
    assert not closed.is_set()
    may_continue.set()
    assert closed.wait(60.0)


def test_blocks_of_the_same_model_that_cannot_be_used_are_logged_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def start(fingerprint: str, **identity: str) -> str:
        caplog.clear()
        open_disk_tier(
            tmp_path / "disk", 1 << 20, TierContext(make_pools(2, PAGE), fingerprint, identity=identity)
        ).close()
        return caplog.text

    assert start(FINGERPRINT, model="llama", weights="digest:1") == ""
    assert "other weights there" in start(OTHERS[0], model="llama", weights="digest:2")
    assert start(OTHERS[1], model="mistral", weights="digest:3", long="x" * (15 << 10)) == ""
    assert du(tmp_path / "disk") <= 1 << 20, "what is said of the blocks is within the budget"

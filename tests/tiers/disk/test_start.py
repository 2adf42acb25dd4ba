"""The start of a disk tier on a medium that is full, read-only, failing or shared, and the eviction order after it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvoffload.abc import ConfigError, Tier
from kvoffload.testing.tier_conformance import make_pools
from kvoffload.tiers.config import TierContext
from kvoffload.tiers.disk.budget import Budget
from kvoffload.tiers.disk.format import MAX_SEQUENCE, payload_checksum, record_offset
from kvoffload.tiers.disk.layout import SlotLayout
from kvoffload.tiers.disk.maintenance import RECENCY_S, RETRY_S
from kvoffload.tiers.disk.start import open_disk_tier
from tests.sim.shared_storage import SimulatedStorage
from tests.sim.storage import FaultyStorage
from tests.tiers.conftest import Mounts
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

SLAB = 4 * PAGE
BUDGET = capacity(16, num_slabs=4)


@pytest.fixture
def simulated(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "none", capacity_bytes=BUDGET, slab_bytes=SLAB)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


def left_by_a_server(rig: Rig, storage: SimulatedStorage, names: Sequence[int] = range(8)) -> SimulatedStorage:
    """Writes two slabs of blocks and closes the tier. Returns the storage of the next process."""
    rig.open(storage)
    rig.write(*names)
    assert len(rig.present()) == len(names)
    rig.tier.close()
    rig.opened = None
    return storage.restart()


# A full medium.


def test_a_full_disk_serves_its_blocks_with_one_warning(simulated: Rig, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    storage = left_by_a_server(simulated, SimulatedStorage(1 << 20))
    storage.capacity_bytes = storage.used_bytes
    simulated.open(storage, clock=lambda: now[0])
    simulated.check_reads(*range(8))
    for name in range(20, 30):
        simulated.write(name)
        now[0] += RETRY_S
    assert len(simulated.present()) == storage.used_bytes // SLAB * 4 >= 8
    simulated.check_reads(28, 29)
    (warning,) = warnings(caplog)
    assert "can give only" in warning
    storage.capacity_bytes = 1 << 20
    for name in range(30, 60):
        simulated.write(name)
        now[0] += RETRY_S
    assert len(simulated.present()) == 16
    assert len(warnings(caplog)) == 1


def test_blocks_of_other_models_are_removed_from_a_full_disk(simulated: Rig, caplog: pytest.LogCaptureFixture) -> None:
    storage = left_by_a_server(simulated, SimulatedStorage(1 << 20))
    storage.capacity_bytes = storage.used_bytes
    simulated.open(storage, fingerprint=OTHERS[0])
    simulated.write(1, 2, 3)
    simulated.check_reads(1, 2, 3)
    assert storage.used_bytes <= storage.capacity_bytes
    (warning,) = warnings(caplog)
    assert "can give only" in warning


def test_a_failure_to_grow_is_logged_once(simulated: Rig, caplog: pytest.LogCaptureFixture) -> None:
    now, storage = [0.0], SimulatedStorage(1 << 20)
    simulated.open(storage, clock=lambda: now[0])

    def fill(medium_bytes: int) -> int:
        storage.capacity_bytes = medium_bytes
        for name in range(20):
            simulated.write(name)
            now[0] += RETRY_S
        return caplog.text.count("it cannot grow ([Errno 28] No space left on device) and evicts for new blocks; free")

    assert fill(storage.used_bytes) == 1
    assert fill(storage.used_bytes + SLAB + PAGE) == 2, "it has grown in between"
    assert len(warnings(caplog)) == 2


def test_a_slab_that_could_not_be_allocated_is_made_anew_by_the_next_server(tmp_path: Path) -> None:
    """A failed growth, or a kill during one, leaves an empty file behind."""
    rig = Rig(tmp_path / "disk", capacity_bytes=BUDGET, slab_bytes=SLAB)
    rig.open()
    rig.write(*range(4))
    rig.tier.close()
    rig.opened = None
    os.truncate(rig.folder / "slab-00001", 0)
    rig.open()
    rig.write(*range(4, 8))
    rig.open()
    assert rig.present() == list(range(8))
    rig.check_reads(*range(8))


# A medium that cannot be written to.


def test_a_read_only_disk_serves_its_blocks_with_one_warning(simulated: Rig, caplog: pytest.LogCaptureFixture) -> None:
    storage = left_by_a_server(simulated, SimulatedStorage(1 << 20))
    faulty = FaultyStorage(storage)
    faulty.read_only = storage.read_only = True
    before = faulty.operations
    tier = simulated.open(faulty, capacity_bytes=capacity(3))
    assert simulated.write(20) == []
    assert simulated.present() == list(range(8)), "what is beyond the budget cannot be removed"
    again = FaultyStorage(ro(storage.restart()))
    again.read_only = True
    tier = simulated.open(again, capacity_bytes=BUDGET)
    simulated.check_reads(*range(8))
    assert simulated.write(20) == []
    tier.touch([key(1)])
    tier.delete([key(2)])
    simulated.drain()
    assert simulated.present() == [0, 1, 3, 4, 5, 6, 7]
    tier.reset()
    simulated.drain()
    assert simulated.present() == []
    tier.close()
    assert faulty.operations > before
    assert faulty.injected["read_only"] == again.injected["read_only"] == 0, "no write may be tried"
    assert [("read-only" in warning) for warning in warnings(caplog)] == [True, True]
    simulated.opened = None
    simulated.open(storage.restart().restart())
    assert simulated.present() == list(range(8))


def ro(storage: SimulatedStorage) -> SimulatedStorage:
    storage.read_only = True
    return storage


def test_a_read_only_disk_without_blocks_is_refused(simulated: Rig) -> None:
    storage = left_by_a_server(simulated, SimulatedStorage(1 << 20))
    with pytest.raises(OSError, match="read-only, and holds no blocks of this model") as raised:
        simulated.open(ro(storage), fingerprint=OTHERS[0])
    assert raised.value.errno == errno.EROFS
    assert (storage.num_open, storage.is_locked) == (0, False)


def test_blocks_of_changed_weights_are_not_read_from_a_read_only_disk(simulated: Rig) -> None:
    storage = SimulatedStorage(1 << 20)
    simulated.open(storage)
    simulated.write(1)
    simulated.tier.reset()
    simulated.write(2)
    simulated.tier.close()
    simulated.opened = None
    with pytest.raises(OSError, match="read-only"):
        simulated.open(ro(storage.restart()))


# A medium that fails.


@pytest.mark.parametrize("operation", range(3, 16, 3))
def test_a_disk_that_fails_at_the_start_is_not_a_wrong_setting_and_loses_nothing(
    simulated: Rig, operation: int
) -> None:
    storage = left_by_a_server(simulated, SimulatedStorage(1 << 20))

    class Failing(FaultyStorage):
        def injects(self, fault: str) -> bool:
            return fault == "io_error" and self.operations == operation

    with pytest.raises(OSError, match="Input/output error") as raised:
        simulated.open(Failing(storage))
    assert raised.value.errno == errno.EIO
    assert (storage.num_open, storage.is_locked) == (0, False)
    simulated.open(storage.restart())
    assert simulated.present() == list(range(8))


# Files of others.


def test_files_of_others_count_against_the_budget(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "disk", slab_bytes=SLAB, capacity_bytes=BUDGET)
    rig.open()
    rig.tier.close()
    (rig.path / "deep" / "er").mkdir(parents=True)
    for path in (rig.path / "deep" / "er" / "file", rig.path / "file", rig.folder / "file"):
        path.write_bytes(bytes(2 * PAGE))
    rig.open()
    assert rig.tier.files.used_bytes == capacity(4) + 6 * PAGE
    for name in range(30):
        rig.write(name)
    assert len(rig.present()) == 12, "the last of four slabs has no room"
    assert (rig.path / "deep" / "er" / "file").read_bytes() == bytes(2 * PAGE)
    (rig.path / "file").write_bytes(bytes(BUDGET))
    rig.tier.close()
    rig.opened = None
    with pytest.raises(OSError, match="files in the directory that are not kvoffload's take"):
        rig.open()


def test_files_of_others_count_once_if_there_are_several_engines(tmp_path: Path) -> None:
    path, budget, stray = tmp_path / "disk", 4 << 20, 1 << 20
    path.mkdir(mode=0o700)
    (path / "file").write_bytes(bytes(stray))
    tiers = [
        open_disk_tier(path, budget, TierContext(make_pools(2, PAGE), FINGERPRINT, engine=i, engines=3))
        for i in range(3)
    ]
    assert [tier.stats().capacity_bytes for tier in tiers] == [(budget - stray) // 3] * 3
    for tier in tiers:
        tier.close()


def test_files_of_others_that_came_since_leave_no_engine_its_old_share(tmp_path: Path) -> None:
    """The blocks of an engine that has not started yet count, too."""
    path, budget, stray = tmp_path / "disk", 4 << 20, 2 << 20
    pools = make_pools(2, PAGE)

    def open_engine(number: int) -> Tier:
        return open_disk_tier(path, budget, TierContext(pools, FINGERPRINT, engine=number, engines=2))

    open_engine(1).close()
    left = du(path)
    assert left > (budget - stray) // 2
    (path / "file").write_bytes(bytes(stray))
    tier = open_engine(0)
    assert du(path) <= budget
    tier.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_files_of_another_user_are_not_trusted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(tmp_path / "disk", slab_bytes=SLAB, capacity_bytes=BUDGET)
    rig.open()
    rig.write(*range(8))
    rig.tier.close()
    os.chown(rig.folder / "slab-00001", 12345, 12345)
    rig.open()
    assert len(rig.present()) == 4
    assert "slab-00001 belongs to user 12345" in caplog.text
    rig.tier.close()
    os.chown(rig.folder / "index", 12345, 12345)
    rig.open()
    assert rig.present() == []
    rig.write(1)
    rig.check_reads(1)
    rig.tier.close()
    os.chown(rig.folder, 12345, 12345)
    rig.open(fingerprint=OTHERS[0])
    assert f"{FINGERPRINT} belongs to user 12345" in caplog.text
    assert rig.tier.files.used_bytes >= du(rig.path)
    rig.tier.close()
    with pytest.raises(PermissionError, match=f"{FINGERPRINT} belongs to user 12345"):
        rig.open(fingerprint=FINGERPRINT)


# A refused start leaves nothing open.


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"fingerprint": "short"}, "fingerprint"),
        ({"capacity_bytes": 100}, "bytes="),
        ({"capacity_bytes": 1 << 60}, "bytes="),
        ({"pools": []}, "pools"),
        ({"pools": make_pools(2, 1000)}, "multiples of 4096"),
        ({"pools": make_pools(2, PAGE, 100)}, "multiples of 4096"),
        ({"policy": "none"}, "policy"),
    ],
)
def test_a_refused_start_closes_every_file(tmp_path: Path, engines: int, wrong: dict[str, Any], said: str) -> None:
    context = TierContext(make_pools(2, PAGE), FINGERPRINT, engines=engines)
    others = dict(wrong)
    capacity_bytes = others.pop("capacity_bytes", 4 << 20)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ConfigError, match=said):
        open_disk_tier(tmp_path / "disk", capacity_bytes, replace(context, **others))
    assert os.listdir("/proc/self/fd") == before
    open_disk_tier(tmp_path / "disk", 4 << 20, context).close()


# The order of eviction.


def test_uses_are_written_down_every_few_seconds(tmp_path: Path) -> None:
    """A thread writes them in few calls. A kill loses only the uses of the last seconds."""
    now, storage = [1000.0], SimulatedStorage(64 << 20)
    faulty = FaultyStorage(storage)
    rig = Rig(tmp_path / "none", num_slots=2000, clock=lambda: now[0])
    tier = rig.open(faulty)
    for start in range(0, 2000, 250):
        rig.write(*range(start, start + 250))
    tier.touch([key(0)])
    rig.drain()
    now[0] += RECENCY_S / 2
    tier.touch([key(1)])
    rig.drain()
    now[0] += RECENCY_S / 2
    before = faulty.operations
    for _ in range(50):
        for start in range(10, 900, 100):
            tier.touch([key(name) for name in range(start, start + 50)])
    assert faulty.operations == before, "nothing is written on the caller's thread"
    rig.drain()
    assert 1 <= faulty.operations - before <= 4, "one call per 512 slots, however often they are used"
    tier.touch([key(1500)])
    rig.drain()
    rig.open_after_kill(storage)
    hot = {0, 1, *(name for start in range(10, 900, 100) for name in range(start, start + 50))}
    for start in range(3000, 3000 + 2000 - len(hot), 250):
        rig.write(*range(start, min(start + 250, 3000 + 2000 - len(hot))))
    assert set(rig.present(2000)) == hot


@pytest.mark.parametrize("sequence", [(1 << 63) - 1, (1 << 64) - 1, MAX_SEQUENCE])
def test_a_forged_sequence_hides_no_later_block(tmp_path: Path, sequence: int) -> None:
    rig = Rig(tmp_path / "disk")
    rig.open()
    rig.write(1, 2)
    header = header_of(rig)
    rig.tier.close()
    block = [content(3, 0, PAGE)]
    checksum = payload_checksum(header, key(3), block)
    record = pack_record(header, key(3), sequence=sequence, stored_at=0, payload_checksum=checksum)
    patch(rig.folder / "index", record_offset(5), record.tobytes())
    patch(rig.folder / "slab-00000", 5 * PAGE, block[0].tobytes())
    patch(rig.folder / "recency", 16, sequence.to_bytes(8, "little"))
    rig.open()
    rig.write(4, 5, 6)
    rig.read(1)
    rig.open()
    assert {1, 2, 4, 5, 6} <= set(rig.present())
    rig.check_reads(1, 2, 4, 5, 6)
    rig.write(7)
    rig.open()
    rig.check_reads(1, 2, 4, 5, 6, 7)


# Real file systems.


def ext2(mounts: Mounts) -> Path:
    if shutil.which("mkfs.ext2") is None:
        pytest.skip("mkfs.ext2 is not installed")
    image = mounts.path.with_name("ext2.img")
    with image.open("wb") as file:
        file.truncate(64 << 20)
    mounts.run("mkfs.ext2", "-q", "-b", "4096", str(image))
    return mounts.mount("-t", "ext2", "-o", "loop", str(image))


def tmpfs(mounts: Mounts) -> Path:
    return mounts.mount("-t", "tmpfs", "-o", "size=4m", "kvoffload-test")


FILE_SYSTEMS = pytest.mark.parametrize("file_system", [tmpfs, ext2])
MOUNTED_BUDGET = capacity(256, num_slabs=4)


def on(path: Path) -> Rig:
    """Returns a rig whose tier has written 100 blocks to two of four slabs, and was closed."""
    rig = Rig(path / "disk", slab_bytes=64 * PAGE, capacity_bytes=MOUNTED_BUDGET)
    rig.open()
    rig.write(*range(60))
    rig.write(*range(60, 100))
    rig.check_reads(*range(100))
    assert len(list(rig.folder.glob("slab-*"))) == 2
    rig.tier.close()
    rig.opened = None
    return rig


def fill_up(path: Path) -> None:
    """Fills the file system to the last byte."""
    with (path / "log").open("wb", buffering=0) as file:
        for size in (1 << 20, 1):
            with suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass


@FILE_SYSTEMS
def test_a_mounted_disk_that_is_full(
    mounts: Mounts, file_system: Callable[[Mounts], Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = file_system(mounts)
    rig = on(path)
    caplog.clear()
    fill_up(path)
    rig.open()
    rig.check_reads(*range(100))
    for start in range(200, 300, 20):
        rig.write(*range(start, start + 20))
    rig.check_reads(*range(280, 300))
    (warning,) = [each for each in warnings(caplog) if "O_DIRECT" not in each]
    assert "can give only" in warning
    rig.tier.close()


@FILE_SYSTEMS
def test_a_mounted_disk_that_is_read_only(
    mounts: Mounts, file_system: Callable[[Mounts], Path], caplog: pytest.LogCaptureFixture
) -> None:
    rig = on(file_system(mounts))
    caplog.clear()
    mounts.remount("ro")
    rig.open()
    rig.open()
    rig.check_reads(*range(100))
    assert rig.write(200) == []
    rig.tier.close()
    rig.opened = None
    found = [each for each in warnings(caplog) if "O_DIRECT" not in each]
    assert len(found) == 2, "one per start"
    assert all("is read-only" in each for each in found)
    with pytest.raises(ConfigError, match="Read-only file system"):
        open_disk_tier(mounts.path / "typo", MOUNTED_BUDGET, TierContext(rig.pools, FINGERPRINT))
    before = os.listdir("/proc/self/fd")
    for engines in (1, 2):
        with pytest.raises(OSError, match="read-only, and holds no blocks"):
            open_disk_tier(rig.path, MOUNTED_BUDGET, TierContext(rig.pools, OTHERS[0], engines=engines))
    assert os.listdir("/proc/self/fd") == before
    mounts.remount("rw")
    rig.open()
    rig.check_reads(*range(100))
    rig.tier.close()


@FILE_SYSTEMS
def test_a_mounted_disk_stays_within_its_budget(
    mounts: Mounts, file_system: Callable[[Mounts], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Also with large blocks on a file system that keeps the address of every 4 KiB."""
    path = file_system(mounts)
    size = 64 * PAGE
    budget = capacity(10, size, num_slabs=2)
    rig = Rig(path / "disk", size, slab_bytes=5 * size, capacity_bytes=budget)
    rig.open()
    for name in range(15):
        rig.write(name)
    assert len(rig.present()) == 10
    assert 10 * size <= du(rig.path) <= rig.tier.files.used_bytes <= budget
    rig.open()
    rig.check_reads(*rig.present())
    assert [each for each in warnings(caplog) if "O_DIRECT" not in each] == []
    rig.tier.close()


def test_a_file_system_without_inodes_says_so(mounts: Mounts, tmp_path: Path) -> None:
    """It has space. The control has inodes."""
    image = tmp_path / "ext4.img"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    mounts.run("mkfs.ext4", "-q", "-N", "32", str(image))
    path = mounts.mount("-o", "loop", str(image))
    with pytest.raises(OSError, match="No space left"):  # noqa: PT012
        for number in range(64):
            (path / f"small-{number}").touch()
    rig = Rig(path / "disk", slab_bytes=64 * PAGE, capacity_bytes=capacity(64))
    for number in range(3):
        # Room for the directory, then for its lock, too.
        with pytest.raises(OSError, match="no inodes are left"):
            rig.open()
        (path / f"small-{number}").unlink()
    for number in range(3, 12):
        (path / f"small-{number}").unlink()
    rig.open()
    rig.write(1)
    rig.check_reads(1)


class SlowToFree(SimulatedStorage):
    """Has the space of a removed file back when it has been asked three times, as XFS has a little later."""

    late_bytes = asked = 0

    def remove(self, folder: str, name: str) -> None:
        before = self.used_bytes
        super().remove(folder, name)
        self.late_bytes, self.asked = before - self.used_bytes, 0
        self.capacity_bytes -= self.late_bytes

    def free_bytes(self) -> int:
        self.asked += 1
        if self.asked == 3:
            self.capacity_bytes += self.late_bytes
            self.late_bytes = 0
        return super().free_bytes()


def test_a_medium_that_frees_space_late_costs_other_models_no_more_than_their_room() -> None:
    """Each removal is waited for before the next file goes."""
    storage, others = SlowToFree(64 * PAGE), ("11" * 32, "22" * 32)
    for folder in others:
        storage.make_folder(folder)
        for name in ("index", "slab-00000"):
            with closing(storage.open(folder, name, create=True)) as other:
                other.resize(16 * PAGE)
    budget = Budget(1 << 20, SlotLayout(PAGE, 4), storage, FINGERPRINT)
    storage.make_folder(FINGERPRINT)
    file = storage.open(FINGERPRINT, "slab-00000", create=True)
    budget.with_room(lambda: file.resize(8 * PAGE))
    assert [len(storage.files(folder)) for folder in others] == [1, 2]

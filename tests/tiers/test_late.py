"""Tiers that answer late, fail for a while, or are emptied or replaced under a running server."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from kvoffload.abc import ByteArray, ConfigError, OffloadKey, Tier
from kvoffload.abc.tier import HIT, MISS
from kvoffload.cache.tenants import MakeShares, Shares
from kvoffload.testing.tier_conformance import TierConformance, make_pools
from kvoffload.tiering.guard import GuardedTier
from kvoffload.tiers import late, opening
from kvoffload.tiers.config import TierConfig, TierContext, TierEntry
from kvoffload.tiers.disk.config import DiskConfig
from kvoffload.tiers.disk.directory import DirectoryStorage
from kvoffload.tiers.disk.tier import DiskSettings, DiskTier
from kvoffload.tiers.late import LateTier, Opener
from kvoffload.tiers.opening import OPEN_DEADLINE_S
from kvoffload.tiers.remote.config import START_WAIT_S
from kvoffload.tiers.shared_dir import writer
from kvoffload.tiers.shared_dir.config import SharedDirConfig
from tests.sim.executor import SteppedExecutor
from tests.sim.memory_tier import MemoryTier
from tests.tiers.conftest import Mounts
from tests.tiers.disk.rig import FINGERPRINT, capacity, spoil

MIB = 1 << 20
SLOT = 4096
DEADLINE_S = 60.0
"""For what must come in the end."""
KEY = b"k" * 36
OTHER = b"o" * 36


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "OPEN_DEADLINE_S", DEADLINE_S)
    monkeypatch.setattr(opening, "NOTICE_S", DEADLINE_S / 2)
    monkeypatch.setattr(late, "RETRY_S", 0.05)
    monkeypatch.setattr(late, "WATCH_S", 0.05)


def hurry(monkeypatch: pytest.MonkeyPatch, deadline_s: float = 0.2) -> None:
    """Makes starts wait for a moment only."""
    monkeypatch.setattr(opening, "OPEN_DEADLINE_S", deadline_s)
    monkeypatch.setattr(opening, "NOTICE_S", deadline_s / 2)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def open_tier(config: TierConfig, opened: ExitStack, pools: Sequence[ByteArray]) -> Tier:
    context = TierContext(pools, FINGERPRINT)
    ((tier, _),) = opening.open_tiers([TierEntry("tiers[0].", config)], context, opened)
    return tier


def until(condition: Callable[[], bool], tier: Tier) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        tier.poll()
        tier.wait(0.01)


def is_open(tier: Tier) -> bool:
    return tier.stats().is_connected


def write(tier: Tier, key: OffloadKey) -> None:
    """Writes host slot 0."""
    assert tier.write([key], np.array([0])) == [key]
    until(lambda: tier.contains([key]).tolist() == [HIT], tier)


def check_read(tier: Tier, key: OffloadKey, pools: Sequence[ByteArray]) -> None:
    """Reads into host slot 1."""
    pools[0][1] = 0
    assert tier.read([key], np.array([1])) == [key]
    deadline = time.monotonic() + DEADLINE_S
    while not (results := list(tier.poll())):
        assert time.monotonic() < deadline
        tier.wait(0.01)
    assert [result.error for result in results] == [None]
    np.testing.assert_array_equal(pools[0][1], pools[0][0])


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if r.levelno >= logging.WARNING and "O_DIRECT" not in r.message]


# A medium that hangs.


class Frozen:
    """An ext4 file system that takes no writes until ``thaw``. It thaws by itself, so that no test hangs for ever."""

    def __init__(self, mounts: Mounts) -> None:
        image = mounts.path.with_name("ext4.img")
        with image.open("wb") as file:
            file.truncate(64 * MIB)
        mounts.run("mkfs.ext4", "-q", str(image))
        self.path = mounts.mount("-o", "loop", str(image))
        self._lock = threading.Lock()
        self.is_frozen = False
        self._timer = threading.Timer(DEADLINE_S, self.thaw)

    def freeze(self) -> None:
        Mounts.run("fsfreeze", "-f", str(self.path))
        self.is_frozen = True
        self._timer.start()

    def thaw(self) -> None:
        with self._lock:
            if self.is_frozen:
                self.is_frozen = False
                subprocess.run(["fsfreeze", "-u", str(self.path)], check=True)
        self._timer.cancel()


@pytest.fixture
def frozen(mounts: Mounts) -> Iterator[Frozen]:
    made = Frozen(mounts)
    yield made
    made.thaw()


@pytest.mark.parametrize("config", [DiskConfig, SharedDirConfig])
@pytest.mark.parametrize("exists", [True, False])
def test_a_frozen_file_system_does_not_hold_up_the_start(
    frozen: Frozen, config: Any, exists: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what a former server has stored there is found after the thaw."""
    pools = make_pools(4, SLOT)
    made = config(dir=str(frozen.path / "cache"), bytes=16 * MIB)
    if exists:
        with ExitStack() as former:
            write(open_tier(made, former, pools), KEY)
        caplog.clear()
    frozen.freeze()
    hurry(monkeypatch)
    with ExitStack() as opened:
        tier = open_tier(made, opened, pools)
        assert frozen.is_frozen
        slow, missing = warnings(caplog)
        assert "is not open after" in slow
        assert f"THERE IS NO {made.kind.upper()} TIER: its medium has not answered for " in missing
        assert tier.contains([KEY]).tolist() == [MISS]
        assert tier.write([KEY], np.array([0])) == []
        assert not is_open(tier)
        assert tier.stats().capacity_bytes == 0
        assert tier.is_shared == (config is SharedDirConfig)
        assert frozen.is_frozen
        frozen.thaw()
        until(lambda: is_open(tier), tier)
        assert any("is open with" in each for each in warnings(caplog))
        if not exists:
            write(tier, KEY)
        check_read(tier, KEY, pools)


def test_a_process_that_waits_for_a_frozen_file_system_can_be_killed(frozen: Frozen) -> None:
    """The control, which writes there itself, cannot."""
    frozen.freeze()

    def end(code: str) -> bool:
        command = [sys.executable, "-c", f"import os, sys\n{code}", str(frozen.path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(0.3)
            child.kill()
            try:
                child.wait(1.0 if "utime" in code else DEADLINE_S / 2)
            except subprocess.TimeoutExpired:
                frozen.thaw()
                return False
        return frozen.is_frozen

    said = "print(flush=True)"
    assert end(f"from kvoffload.tiers.late import wait_until_writable as w\n{said}\nw(sys.argv[1])\n{said}")
    assert not end(f"{said}\nos.utime(sys.argv[1])")


# Tiers that open late, by the contract.


@dataclass(frozen=True)
class GateConfig(TierConfig):
    """A tier in memory that opens when ``gate`` is set, or fails as long as ``errors`` has something."""

    kind = "gate"
    gate: ClassVar[threading.Event] = threading.Event()
    errors: ClassVar[list[Exception]] = []
    opened: ClassVar[list[MemoryTier]] = []

    number: int = 0

    @property
    def directory(self) -> str | None:
        return None if self.number else "/"

    def open(self, context: TierContext) -> Tier:
        self.gate.wait(DEADLINE_S)
        if self.errors:
            raise self.errors.pop()
        self.opened.append(MemoryTier(context.pools, 8))
        return self.opened[-1]


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    GateConfig.gate.clear()
    GateConfig.errors.clear()
    GateConfig.opened.clear()
    yield GateConfig.gate
    GateConfig.gate.set()


def test_tiers_that_hang_are_waited_for_together(
    gate: threading.Event, opened: ExitStack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those without a directory, too. The control is one that opens: its blocks are found by the first requests."""
    pools = make_pools(4, SLOT)
    hurry(monkeypatch, 1.0)
    working = MemoryTier(pools, 8)
    write(working, KEY)

    def open_some(config: GateConfig, context: TierContext) -> Tier:
        if config.number < 3:
            gate.wait(DEADLINE_S)
            return MemoryTier(context.pools, 8)
        return working

    monkeypatch.setattr(GateConfig, "open", open_some)
    entries = [TierEntry(f"tiers[{number}].", GateConfig(number=number)) for number in range(4)]
    begun = time.monotonic()
    tiers = [tier for tier, _ in opening.open_tiers(entries, TierContext(pools, FINGERPRINT), opened)]
    assert 1.0 <= time.monotonic() - begun < 2.9
    assert tiers[3] is working
    assert [tier.name for tier in tiers] == ["gate", "gate-2", "gate-3", "gate-4"]
    assert [is_open(tier) for tier in tiers] == [False, False, False, True]
    said = [each.split(": ")[1:3] for each in warnings(caplog)]
    settings = [entry.setting for entry in entries[:3]]
    assert [setting for setting, _ in said] == settings * 2
    assert [text.startswith("the tier is not open after") for _, text in said] == [True] * 3 + [False] * 3
    gate.set()
    for tier in tiers[:3]:
        until(lambda tier=tier: is_open(tier), tier)  # type: ignore[misc]
        write(tier, KEY)


def test_a_store_that_does_not_answer_is_open_before_the_start_goes_on_without_it() -> None:
    """So that it is a tier whose store is away, and its client says why."""
    assert START_WAIT_S < OPEN_DEADLINE_S - 1.0


def test_a_tier_and_its_entry_say_the_same_about_sharing(
    gate: threading.Event, opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry says it before the tier is open. The control is a tier that is shared by both."""
    gate.set()
    monkeypatch.setattr(MemoryTier, "is_shared", True)
    with pytest.raises(ConfigError, match="is_shared is True in the tier, and False in its GateConfig"):
        open_tier(GateConfig(), opened, make_pools(4, SLOT))
    monkeypatch.setattr(GateConfig, "is_shared", True)
    assert open_tier(GateConfig(), opened, make_pools(4, SLOT)).is_shared


@pytest.mark.parametrize("change", ["reset", "delete"])
def test_what_is_dropped_before_the_tier_opens_is_dropped_in_it(
    gate: threading.Event, opened: ExitStack, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """New weights, for example. The control is another block, which a deletion leaves."""
    pools = make_pools(4, SLOT)

    def open_filled(config: GateConfig, context: TierContext) -> Tier:
        gate.wait(DEADLINE_S)
        tier = MemoryTier(context.pools, 8)
        write(tier, KEY)
        write(tier, OTHER)
        return tier

    monkeypatch.setattr(GateConfig, "open", open_filled)
    hurry(monkeypatch)
    tier = open_tier(GateConfig(), opened, pools)
    if change == "reset":
        tier.reset()
    else:
        tier.delete([KEY])
    gate.set()
    until(lambda: is_open(tier), tier)
    assert tier.contains([KEY, OTHER]).tolist() == [MISS, MISS if change == "reset" else HIT]


def test_a_tier_that_opens_after_the_end_is_closed(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    pools = make_pools(4, SLOT)
    with ExitStack() as opened:
        tier = open_tier(GateConfig(), opened, pools)
    gate.set()
    deadline = time.monotonic() + DEADLINE_S
    while not any(each.is_closed for each in GateConfig.opened):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert tier.poll() == []


def test_a_medium_that_fails_at_the_start_is_tried_again(
    gate: threading.Event, opened: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says so once per reason, of a setting that was right at the start, too."""
    gate.set()
    GateConfig.errors[:] = [
        ConfigError("in use"),
        OSError(errno.EIO, "broken"),
        OSError(errno.EIO, "broken"),
        OSError(errno.EIO, "broken"),
    ]
    tier = open_tier(GateConfig(), opened, make_pools(4, SLOT))
    until(lambda: is_open(tier), tier)
    missing = [each for each in warnings(caplog) if "THERE IS NO GATE TIER" in each]
    assert ["broken" in each for each in missing] == [True, False]
    write(tier, KEY)


def test_a_wrong_setting_still_ends_the_start(gate: threading.Event, opened: ExitStack) -> None:
    gate.set()
    GateConfig.errors.append(ConfigError("in use"))
    with pytest.raises(ConfigError, match=r"tiers.*in use"):
        open_tier(GateConfig(), opened, make_pools(4, SLOT))


class TestLateTier(TierConformance):
    """A disk tier in a directory that was opened late keeps the contract."""

    @pytest.fixture(autouse=True)
    def in_directory(self, tmp_path: Path) -> Iterator[None]:
        self.path, self.tiers = tmp_path, list[Tier]()
        yield
        for tier in self.tiers:
            tier.close()

    def make_tier(self, pools: Sequence[ByteArray], num_blocks: int) -> Tier:
        self.folder = self.path / str(len(self.tiers))
        return self.on(pools, num_blocks)

    def on(self, pools: Sequence[ByteArray], num_blocks: int) -> Tier:
        """Returns a tier with room for exactly ``num_blocks``, in slabs of three."""
        gate, sizes = threading.Event(), [pool.shape[1] for pool in pools]
        budget = capacity(num_blocks, *sizes, num_slabs=-(-num_blocks // 3))
        storage = DirectoryStorage(self.folder)

        def open_late() -> Tier:
            gate.wait(DEADLINE_S)
            return DiskTier(storage, pools, DiskSettings(FINGERPRINT, budget, slab_bytes=3 * sum(sizes)))

        tier = LateTier(Opener(open_late, None, "disk", "tiers[0]"), sum(sizes), is_shared=False)
        self.tiers.append(tier)
        assert tier.contains([KEY]).tolist() == [MISS]
        gate.set()
        until(lambda: is_open(tier), tier)
        return tier

    def reopen(self, tier: Tier, pools: Sequence[ByteArray], num_blocks: int) -> Tier:
        return self.on(pools, num_blocks)

    def spoil(self, tier: Tier) -> bool:
        for slab in self.folder.glob("*/slab-*"):
            spoil(slab)
        return True


# A directory that changes under a running server.


def remove_files(path: Path) -> None:
    for each in path.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()


def remove_folder(path: Path) -> None:
    shutil.rmtree(next(each for each in path.iterdir() if each.is_dir()))


def replace_directory(path: Path) -> None:
    rename_directory(path)
    path.mkdir(mode=0o700)


def rename_directory(path: Path) -> None:
    path.rename(path.with_name("away"))


@pytest.mark.parametrize("lose", [remove_files, remove_folder, rename_directory, replace_directory, shutil.rmtree])
@pytest.mark.parametrize(("made", "engines"), [(DiskConfig, 1), (DiskConfig, 2), (SharedDirConfig, 1)])
def test_a_tier_that_lost_its_files_opens_anew(
    tmp_path: Path,
    opened: ExitStack,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    made: Any,
    engines: int,
    lose: Callable[[Path], None],
) -> None:
    monkeypatch.setattr(writer, "BEAT_S", 0.05)
    path, pools = tmp_path / "cache", make_pools(4, SLOT)
    path.mkdir(mode=0o700)
    config = made(dir=str(path), bytes=16 * MIB * engines)
    context = TierContext(pools, FINGERPRINT, engines=engines)
    ((tier, _),) = opening.open_tiers([TierEntry("tiers[0].", config)], context, opened)
    write(tier, KEY)
    for _ in range(20):
        tier.poll()
        time.sleep(0.01)
    assert warnings(caplog) == []
    lose(path / "engine-0" if engines > 1 and lose is remove_folder else path)
    until(lambda: any(f"THE {made.kind.upper()} TIER HAS LOST ITS FILES" in each for each in warnings(caplog)), tier)
    assert tier.contains([KEY]).tolist() == [MISS]
    until(lambda: any("is open with 0 blocks" in each for each in warnings(caplog)), tier)
    assert deleted_files() == []
    away = {each: each.stat().st_mtime_ns for each in path.with_name("away").rglob("*")}
    write(tier, KEY)
    check_read(tier, KEY, pools)
    assert away == {each: each.stat().st_mtime_ns for each in path.with_name("away").rglob("*")}
    other = DirectoryStorage(path / "writer-0" if made is SharedDirConfig else path)
    assert not other.try_lock()
    other.close()


def deleted_files() -> list[str]:
    """Returns the removed files of tiers that this process holds open."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if "slab-" in target and target.endswith(" (deleted)"):
                found.append(target)
    return found


class DiskOpener:
    """Opens disk tiers whose jobs run in ``finish_jobs`` only, and says when their directory is lost."""

    def __init__(self, path: Path, shares: MakeShares | None = None) -> None:
        self.pools = make_pools(4, SLOT)
        self._path, self._shares = path, shares
        self._executors: list[SteppedExecutor] = []
        self.tiers: list[DiskTier] = []
        self.opener = Opener(self._open, str(path), "disk", "tiers[0]")
        assert self.opener.wait(time.monotonic() + DEADLINE_S)
        self.opener.is_awaited = False
        self.tier = LateTier(self.opener, SLOT, is_shared=False)

    def _open(self) -> DiskTier:
        self._executors.append(SteppedExecutor())
        settings = DiskSettings(FINGERPRINT, 16 * MIB, shares=self._shares)
        made = DiskTier(DirectoryStorage(self._path), self.pools, settings, executor=self._executors[-1])
        self.tiers.append(made)
        return made

    def finish_jobs(self) -> None:
        self._executors[-1].drain()

    def is_renewed(self) -> bool:
        self.finish_jobs()
        return len(self.tiers) > 1

    def write(self, keys: Sequence[OffloadKey], tier: Tier | None = None) -> None:
        """``tier``: what guards the tier."""
        assert (tier or self.tier).write(keys, np.arange(len(keys))) == keys
        self.finish_jobs()

    def lose(self) -> None:
        """Has the tier left. Another one is opened in its place."""
        remove_files(self._path)
        self.tiers[-1].is_lost = True
        until(lambda: self.is_renewed() and is_open(self.tier), self.tier)


@pytest.fixture
def no_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is not looked at."""
    monkeypatch.setattr(DiskTier, "look", lambda tier: None)


def test_a_directory_that_is_back_before_its_tier_is_left_is_opened_anew(tmp_path: Path) -> None:
    disk = DiskOpener(path := tmp_path / "cache")
    disk.tier.poll()
    rename_directory(path)
    disk.tiers[0].look()
    disk.tier.poll()
    path.with_name("away").rename(path)
    disk.tiers[0].look()
    until(lambda: disk.is_renewed() and is_open(disk.tier), disk.tier)
    disk.tier.close()


def test_a_block_that_is_written_when_the_directory_is_lost_is_not_announced(tmp_path: Path, no_watch: None) -> None:
    """The control is a block that was written before: its removal is announced."""
    disk = DiskOpener(tmp_path)
    tier = GuardedTier(disk.tier, enable_events=True)
    tier.poll()
    disk.write([KEY], tier)
    tier.poll()
    disk.write([OTHER], tier)
    disk.tiers[-1].is_lost = True
    tier.poll()
    assert tier.events is not None
    announced = [(key, event.removed) for event in tier.events.take() for key in event.keys]
    assert announced[0] == (KEY, False)
    latest = dict(announced)
    assert latest[KEY]
    assert latest.get(OTHER, True)
    disk.tier.close()


def test_blocks_of_a_lost_directory_count_as_evicted_and_as_what_tenants_lose(tmp_path: Path, no_watch: None) -> None:
    """So chains of which some were written before are looked up from their head, and not continued behind a hole."""

    def shares(num_blocks: int, block_bytes: int) -> Shares:
        return Shares(("a",), {}, (0,), (num_blocks,), num_blocks, (num_blocks // 2,))

    disk = DiskOpener(tmp_path, shares)
    disk.tier.poll()
    disk.write([KEY, OTHER])
    disk.tier.poll()
    assert disk.tier.retain([KEY], 1, 60.0) is None
    (before,) = disk.tier.tenant_uses()
    assert (before.num_blocks, before.num_retained, before.num_retained_lost) == (2, 1, 0)
    assert disk.tier.stats().num_evicted == 0
    disk.lose()
    assert disk.tier.stats().num_evicted == 2
    (after,) = disk.tier.tenant_uses()
    assert (after.num_blocks, after.num_retained, after.num_retained_lost) == (0, 0, 1)
    disk.tier.close()


def test_a_tier_that_was_left_is_closed_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the thread that closes it has not looked since."""
    monkeypatch.setattr(late, "WATCH_S", DEADLINE_S)
    disk = DiskOpener(tmp_path)
    tier = disk.opener.take()
    assert tier is not None
    disk.opener.leave(tier)
    other = DirectoryStorage(tmp_path)
    assert not other.try_lock()
    disk.opener.close()
    until(other.try_lock, disk.tier)
    other.close()


def test_a_tier_with_other_weights_stays_empty_when_it_opens_anew(tmp_path: Path, opened: ExitStack) -> None:
    """What is stored after a reset must not be found by the next server, in a new directory either."""
    path, pools = tmp_path / "cache", make_pools(4, SLOT)
    config = DiskConfig(dir=str(path), bytes=16 * MIB)
    with ExitStack() as first:
        tier = open_tier(config, first, pools)
        tier.reset()
        remove_files(path)
        until(lambda: not is_open(tier), tier)
        until(lambda: is_open(tier), tier)
        write(tier, KEY)
    assert open_tier(config, opened, pools).contains([KEY]).tolist() == [MISS]


def test_an_unmounted_directory_is_not_made_on_the_file_system_below(
    mounts: Mounts, opened: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    mounts.mount("-t", "tmpfs", "-o", "size=32m", "kvoffload-test")
    path = mounts.path / "cache"
    tier = open_tier(DiskConfig(dir=str(path), bytes=16 * MIB), opened, make_pools(4, SLOT))
    write(tier, KEY)
    mounts.unmount()
    until(lambda: any("is mounted at" in each for each in warnings(caplog)), tier)
    assert not path.exists()
    mounts.mount("-t", "tmpfs", "-o", "size=32m", "kvoffload-test")
    until(lambda: is_open(tier), tier)
    write(tier, KEY)

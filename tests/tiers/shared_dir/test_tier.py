"""SharedDirTier: servers find and read each other's blocks, and never get wrong bytes."""

from __future__ import annotations

import errno
import os
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import ByteArray, ConfigError, TierError
from kvoffload.testing.tier_conformance import make_pools
from kvoffload.tiers.config import TierContext, load_tiers
from kvoffload.tiers.disk import journal
from kvoffload.tiers.disk.directory import DirectoryStorage
from kvoffload.tiers.disk.format import HEADER_BYTES, Header
from kvoffload.tiers.disk.index import Index
from kvoffload.tiers.disk.journal import digests_of
from kvoffload.tiers.disk.slabs import Slabs
from kvoffload.tiers.shared_dir import followers
from kvoffload.tiers.shared_dir.background import Repeating
from kvoffload.tiers.shared_dir.config import SharedDirConfig
from kvoffload.tiers.shared_dir.foreign import IDLE_S, OpenSlabs, SeatView
from kvoffload.tiers.shared_dir.seats import Claimant, Machine
from kvoffload.tiers.shared_dir.tier import BAD_S, GONE_S, SharedDirTier
from tests.clock import Clock
from tests.sim.storage import os_error
from tests.tiers.disk.rig import FINGERPRINT, PAGE, content, key, spoil
from tests.tiers.shared_dir.rig import Serve, Server, capacity


def seat_of(server: Server, tmp_path: Path) -> Path:
    return tmp_path / "shared" / server.tier.seat.name / FINGERPRINT


class _SlowToList(DirectoryStorage):
    """A directory whose folders are listed as slowly as on a busy file server."""

    def folders(self) -> list[str]:
        time.sleep(0.2)
        return super().folders()


def test_the_first_request_finds_what_others_have_written(serve: Serve, tmp_path: Path) -> None:
    serve().write(1, 2)
    opened = serve(repeat=Repeating, storage=lambda: _SlowToList(tmp_path / "shared"))
    with closing(opened.tier):
        assert opened.finds(1, 2) == [1, 2]


def test_changes_are_followed_by_the_journal_without_reading_the_index(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = serve(4), serve()
    one.write(1)
    two.tier.others.follow()
    # An index is not read without its header.
    monkeypatch.setattr(followers, "Header", None)
    one.write(2, 3)
    two.tier.others.follow()
    assert two.finds(1, 2, 3) == [1, 2, 3]
    one.tier.delete([key(2)])
    one.run()
    one.tier.writer.keep()
    two.tier.others.follow()
    assert two.finds(1, 2, 3) == [1, 3]
    one.write(*range(4, 8))
    two.tier.others.follow()
    assert two.finds(*range(1, 8)) == one.finds(*range(1, 8))
    assert len(two.tier.others.blocks) == one.tier.stats().num_blocks


def test_the_record_of_a_block_that_is_gone_is_read_again_before_the_journal_says_so(
    serve: Serve, clock: Clock
) -> None:
    one, two = serve(1), serve()
    one.write(1)
    two.tier.others.follow()
    one.pools[0][0] = content(2)
    one.tier.write([key(2)], np.arange(1))
    one.run()
    assert two.read(1) == {1: TierError.GONE}
    two.tier.others.follow()
    clock.now += GONE_S
    assert two.finds(1) == []


def test_the_size_of_an_index_takes_no_room_from_other_seats(serve: Serve, tmp_path: Path) -> None:
    one, two, three = serve(), serve(), serve(max_foreign_blocks=1 << 16)
    one.write(1)
    two.write(2)
    os.truncate(tmp_path / "shared" / "writer-0" / FINGERPRINT / "index", 1 << 40)
    three.background()
    assert three.read(1, 2) == {1: None, 2: None}


def test_a_seat_whose_files_raise_hides_no_other(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three = serve(), serve(), serve()
    one.write(1)
    two.write(2)
    unpack = journal.JournalHeader.unpack

    def fail_first(data: ByteArray) -> journal.JournalHeader:
        monkeypatch.setattr(journal.JournalHeader, "unpack", unpack)
        raise OverflowError

    monkeypatch.setattr(journal.JournalHeader, "unpack", fail_first)
    three.tier.others.follow()
    assert three.finds(1, 2) == [2]
    three.tier.others.follow()
    assert three.finds(1, 2) == [1, 2]


def test_wrong_bytes_are_corrupt_and_not_found_for_a_while(serve: Serve, clock: Clock, tmp_path: Path) -> None:
    one, two = serve(), serve()
    one.write(1, 2)
    two.tier.others.follow()
    spoil(seat_of(one, tmp_path) / "slab-00000")
    assert two.read(1) == {1: TierError.CORRUPT}
    two.tier.others.follow()
    assert two.finds(1, 2) == [2]
    # So that this server can keep a good copy.
    assert two.write(1) == [1]
    clock.now += BAD_S
    assert two.finds(1) == [1]
    assert two.read(1) == {1: None}


def test_the_record_is_emptied_for_all_before_the_block_is_overwritten(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a reader on another machine could take a replaced block for a corrupt one."""
    one = serve(1)
    order: list[str] = []
    for part, name in ((Index, "empty_records"), (Slabs, "write")):
        original = getattr(part, name)

        def noted(self: Any, *args: Any, name: str = name, original: Any = original) -> Any:
            order.append(name)
            return original(self, *args)

        monkeypatch.setattr(part, name, noted)
    sync = os.fdatasync

    def noted_sync(fd: int) -> None:
        order.append("sync")
        sync(fd)

    monkeypatch.setattr(os, "fdatasync", noted_sync)
    one.write(1)
    del order[:]
    one.pools[0][0] = content(2)
    one.tier.write([key(2)], np.arange(1))
    one.run()
    assert order[:3] == ["empty_records", "sync", "write"]


def test_a_folder_that_has_vanished_is_forgotten_and_its_files_are_closed(serve: Serve, tmp_path: Path) -> None:
    one, two = serve(), serve()
    one.write(1, 2)
    two.tier.others.follow()
    assert two.read(1) == {1: None}
    assert two.tier.others.blocks.slabs.num_open == 1
    folder = seat_of(one, tmp_path)
    for file in folder.iterdir():
        file.unlink()
    assert two.read(2) == {2: None}, "an open file can be read on"
    two.tier.others.follow()
    assert two.finds(1, 2) == []
    assert two.tier.others.blocks.slabs.num_open == 0


def test_files_are_closed_when_they_are_not_used(serve: Serve, clock: Clock) -> None:
    one, two = serve(), serve()
    one.write(1)
    two.tier.others.follow()
    two.read(1)
    assert two.tier.others.blocks.slabs.num_open == 1
    clock.now += IDLE_S
    two.tier.others.follow()
    assert two.tier.others.blocks.slabs.num_open == 0
    assert two.read(1) == {1: None}


def test_no_slab_stays_open_after_the_end_not_even_for_a_late_read(serve: Serve, tmp_path: Path) -> None:
    one, slabs = serve(), OpenSlabs()
    one.write(1)
    with closing(DirectoryStorage(seat_of(one, tmp_path).parent)) as storage:
        view, before = SeatView(0, storage, one.tier.own.files.index.header), len(os.listdir("/proc/self/fd"))
        slabs.get(view, 0, 0.0)
        assert len(os.listdir("/proc/self/fd")) == before + 1
        slabs.shut()
        assert len(os.listdir("/proc/self/fd")) == before
        late = slabs.get(view, 0, 0.0)
        assert late.file.size() > 0
        del late
        assert len(os.listdir("/proc/self/fd")) == before


def test_other_layouts_are_not_found(serve: Serve, tmp_path: Path) -> None:
    one, two = serve(), serve()
    one.write(1)
    index = seat_of(one, tmp_path) / "index"
    records = index.read_bytes()[HEADER_BYTES:]
    for header in (Header(FINGERPRINT, (2 * PAGE,), 8, 3), Header("77" * 32, (PAGE,), 8, 3)):
        index.write_bytes(header.pack().tobytes() + records)
        two.tier.others.follow()
        assert two.finds(1) == []
        assert two.tier.others.blocks.view(0) is None


def test_closing_does_not_wait_for_a_journal_whose_writing_hangs(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    one = serve()
    hangs, goes_on, sync = threading.Event(), threading.Event(), os.fdatasync
    keeper = threading.Thread(target=one.tier.writer.keep, daemon=True)

    def hang(fd: int) -> None:
        if threading.current_thread() is keeper and fd >= 0 and "journal" in os.readlink(f"/proc/self/fd/{fd}"):
            hangs.set()
            goes_on.wait(60)
        sync(fd)

    monkeypatch.setattr(os, "fdatasync", hang)
    keeper.start()
    assert hangs.wait(30)
    closing = threading.Thread(target=one.tier.close, daemon=True)
    closing.start()
    closing.join(30)
    try:
        assert not closing.is_alive()
        # The thread may still write, so no other server gets the seat.
        assert serve().tier.seat.name != one.tier.seat.name
    finally:
        goes_on.set()
        keeper.join(30)
        closing.join(30)


@pytest.mark.parametrize("damage", ["index", "others' files"])
def test_a_seat_that_cannot_be_used_does_not_keep_servers_from_starting(
    serve: Serve, tmp_path: Path, damage: str
) -> None:
    one = serve()
    one.tier.close()
    seat = tmp_path / "shared" / one.tier.seat.name
    if damage == "others' files":
        (seat / "file").write_bytes(bytes(capacity(8)))
    else:
        path = seat / FINGERPRINT / "index"
        path.unlink()
        path.mkdir()
        (path / "file").touch()
    two = serve()
    assert two.tier.seat.name != one.tier.seat.name
    two.write(1)
    assert two.read(1) == {1: None}
    # A wrong setting takes no further seats.
    with pytest.raises(ConfigError, match="not enough for one block"):
        serve(capacity_bytes=4096)
    assert len(list((tmp_path / "shared").glob("writer-*"))) <= 3


def test_the_log_says_whose_blocks_cannot_be_used(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    same = {"model": "m", "weights": "w"}
    one = serve(identity={**same, "dtype": "float16"}, fingerprint="77" * 32)
    one.tier.others.follow()
    other_model = serve(identity={"model": "other", "dtype": "float16"}, fingerprint="88" * 32)
    other_model.tier.others.follow()
    caplog.clear()
    two = serve(identity={**same, "dtype": "bfloat16"})
    two.tier.others.follow()
    two.tier.others.follow()
    said = [message for message in caplog.messages if "cannot be used here" in message]
    assert len(said) == 1
    assert "float16" in said[0]
    assert "writer-0" in said[0]


def test_a_place_is_confirmed_before_it_is_used(serve: Serve) -> None:
    """The follower may have given the slot to another block since the lookup."""
    one, two = serve(), serve()
    one.write(1, 2)
    two.tier.others.follow()
    digests = digests_of([key(1), key(2)])
    here, there = two.tier.others.blocks.find(digests).tolist()
    assert two.tier.others.blocks.locate(here, int(digests[0])) is not None
    assert two.tier.others.blocks.locate(there, int(digests[0])) is None


class UnlistedSeats(DirectoryStorage):
    """A shared directory whose seats cannot be listed."""

    def child(self, name: str) -> DirectoryStorage:
        return UnlistedSeats(self.path / name)

    def folders(self) -> list[str]:
        if self.path.name.startswith("writer-"):
            raise os_error(errno.EIO)
        return super().folders()


def test_a_seat_that_cannot_be_listed_is_not_kept_locked(serve: Serve, tmp_path: Path) -> None:
    one = serve()
    one.write(1)
    one.tier.close()
    root = UnlistedSeats(tmp_path / "shared")
    seat = Claimant(root, FINGERPRINT, Machine.this(), os.urandom, lambda: 0.0).take()
    assert (seat.name, seat.is_new) == ("writer-1", True)
    two = serve()
    assert two.tier.seat.name == "writer-0"
    assert two.read(1) == {1: None}
    seat.storage.close()
    root.close()


def test_a_file_system_without_locks_is_refused(tmp_path: Path) -> None:
    class NoLocks(DirectoryStorage):
        def child(self, name: str) -> NoLocks:
            return NoLocks(self.path / name)

        def try_lock(self) -> bool:
            raise os_error(errno.ENOLCK)

    with pytest.raises(ConfigError, match=r"no file locks.*mount it with locks"):
        Server(tmp_path, storage=lambda: NoLocks(tmp_path))


# The entry of the option tiers.


def test_an_entry_opens_a_tier(tmp_path: Path) -> None:
    (config,) = load_tiers([{"kind": "shared_dir", "dir": str(tmp_path / "x"), "bytes": "8MiB", "gone_after_s": 90}])
    assert config == SharedDirConfig(dir=str(tmp_path / "x"), bytes=8 << 20, gone_after_s=90)
    tier = config.open(TierContext(make_pools(4, 4096), FINGERPRINT, engines=2))
    assert isinstance(tier, SharedDirTier)
    assert tier.is_shared
    assert config.capacity_bytes == 8 << 20
    assert tier.stats().capacity_bytes == 4 << 20
    tier.close()


def test_a_directory_that_had_to_be_made_is_named_with_its_file_system(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A share that is not mounted looks like a directory that does not exist."""
    config = SharedDirConfig(dir=str(tmp_path / "kv"), bytes=8 << 20)
    for warnings in (1, 0):
        caplog.clear()
        config.open(TierContext(make_pools(4, 4096), FINGERPRINT)).close()
        said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(said) == warnings
    config = SharedDirConfig(dir=str(tmp_path / "again" / "kv"), bytes=8 << 20)
    config.open(TierContext(make_pools(4, 4096), FINGERPRINT)).close()
    mounted = next(folder for folder in tmp_path.parents if folder.is_mount())
    assert f"kv did not exist and was made, on the file system that is mounted at {mounted}:" in caplog.text

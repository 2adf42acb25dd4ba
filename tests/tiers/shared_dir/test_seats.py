"""Seats: which one a server takes, how it keeps it, and what becomes of those of servers that are gone."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvoffload.abc import ConfigError, TierError
from kvoffload.tiers.config import TierContext
from kvoffload.tiers.disk import format as disk_format
from kvoffload.tiers.disk.directory import DirectoryStorage
from kvoffload.tiers.shared_dir import seats, tier
from kvoffload.tiers.shared_dir.config import SharedDirConfig
from kvoffload.tiers.shared_dir.seats import (
    BEAT_S,
    CLOCK_NAME,
    GONE_AFTER_S,
    HEARTBEAT_BYTES,
    HEARTBEAT_NAME,
    SILENT_S,
    Claimant,
    Heartbeat,
    Machine,
    SeatState,
    Sighting,
    look,
)
from kvoffload.tiers.shared_dir.table import ForeignTable
from kvoffload.tiers.shared_dir.writer import LOOK_AROUND_S
from tests.clock import Clock
from tests.tiers.disk.rig import FINGERPRINT, PAGE, du, key, put
from tests.tiers.shared_dir.rig import Serve, Server, capacity


def name_of(server: Server) -> str:
    return server.tier.seat.name


def age(path: Path, name: str, seconds: float) -> None:
    """Makes the heartbeat of a seat older, by the medium's clock."""
    file = path / name / HEARTBEAT_NAME
    before = file.stat().st_mtime
    os.utime(file, (before - seconds, before - seconds))


def test_a_tier_that_cannot_be_made_gives_its_seat_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "Follower", None)
    with pytest.raises(TypeError):
        Server(tmp_path)
    monkeypatch.undo()
    server = Server(tmp_path)
    assert [folder.name for folder in tmp_path.glob("writer-*")] == [name_of(server)]
    server.tier.close()


def heartbeat(path: Path, name: str) -> Heartbeat:
    seen = Heartbeat.unpack((path / name / HEARTBEAT_NAME).read_bytes())
    assert seen is not None
    return seen


def test_a_seat_with_blocks_of_the_same_fingerprint_is_preferred(serve: Serve) -> None:
    other, mine = serve(fingerprint="77" * 32), serve()
    mine.write(1)
    other.tier.close()
    mine.tier.close()
    again = serve()
    assert name_of(again) == "writer-1"
    assert again.finds(1) == [1]


@pytest.mark.parametrize("fingerprint", [FINGERPRINT, "77" * 32])
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_seat_of_another_disk_format_is_left_to_servers_of_that_release(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, fingerprint: str, is_killed: bool
) -> None:
    """The control, which has the same format, adopts it: see the tests around."""
    old = serve()
    old.write(1, 2)
    old.kill() if is_killed else old.tier.close()
    with monkeypatch.context() as patched:
        patched.setattr(disk_format, "FORMAT_VERSION", disk_format.FORMAT_VERSION + 1)
        new = serve(fingerprint=fingerprint)
        assert name_of(new) == "writer-1"
        new.write(3)
        new.tier.close()
    again = serve()
    assert name_of(again) == "writer-0"
    assert again.read(1, 2) == {1: None, 2: None}


def test_the_seat_of_a_killed_server_is_adopted_elsewhere_once_it_is_silent(serve: Serve, path: Path) -> None:
    one = serve(boot="a")
    one.write(1)
    one.kill()
    two = serve(boot="b")
    assert name_of(two) == "writer-1", "the lock may be one of another machine"
    age(path, "writer-0", SILENT_S)
    three = serve(boot="c")
    assert name_of(three) == "writer-0"
    assert three.read(1) == {1: None}


def test_a_server_that_loses_its_seat_stops_writing_there(serve: Serve, clock: Clock, path: Path) -> None:
    """As on a mount whose locks are local: another machine takes the seat of a server that was silent."""
    one = serve(boot="a")
    one.write(1, 2)
    thief = DirectoryStorage(path / "writer-0")
    file = thief.open("", HEARTBEAT_NAME)
    file.write([Heartbeat("f" * 32, "thief", 9, "b", SeatState.SERVING, 1, 0.0, 0).pack()], 0)
    file.close()
    thief.close()
    before = {each: each.stat().st_mtime_ns for each in (path / "writer-0").rglob("*") if each.is_file()}
    assert not one.tier.is_lost
    clock.now += BEAT_S
    one.background()
    assert one.tier.is_lost
    # The order of use would be written at the end.
    one.tier.touch([key(1), key(2)])
    one.tier.give_up()
    assert one.write(3) == []
    assert one.finds(1, 2) == []
    one.tier.close()
    after = {each: each.stat().st_mtime_ns for each in (path / "writer-0").rglob("*") if each.is_file()}
    assert before == after
    assert heartbeat(path, "writer-0").host == "thief"
    again = serve(boot="a")
    assert name_of(again) == "writer-1"
    # Its former blocks are those of another server now.
    again.background()
    assert again.read(1, 2) == {1: None, 2: None}


@pytest.mark.parametrize("what", ["its folder", "its blocks", "the directory", "the name of the directory"])
def test_a_server_whose_files_vanish_gives_up_its_seat(serve: Serve, clock: Clock, path: Path, what: str) -> None:
    """As after a file server came back empty, or somebody removed the files, or renamed the directory."""
    before = len(os.listdir("/proc/self/fd"))
    one, two = serve(boot="a"), serve(boot="b")
    one.write(1, 2)
    two.write(5)
    two.tier.others.follow()
    if "name" in what:
        (path.rename(path.with_name("moved")) / "writer-9").mkdir()
        one.tier.others.follow()
        assert not path.exists()
    else:
        shutil.rmtree({"its folder": path / "writer-0", "its blocks": path / "writer-0" / FINGERPRINT}.get(what, path))
    clock.now += LOOK_AROUND_S
    one.background()
    # Nobody follows the other's seat meanwhile.
    two.tier.writer.keep()
    assert (one.tier.is_lost, two.tier.is_lost) == (True, "the directory" in what)
    one.tier.give_up()
    one.tier.close()
    again = serve(boot="a")
    assert again.write(3) == [3]
    two.background()
    clock.now += LOOK_AROUND_S
    two.background()
    assert two.tier.is_lost or two.finds(1, 2, 3) == [3]
    two.tier.close()
    again.tier.close()
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("key_of", [1, 2])
def test_a_block_that_is_moved_while_the_seat_is_lost_is_gone(serve: Serve, clock: Clock, key_of: int) -> None:
    """Of an own block, and of one that another server has; nothing is left that uses the files then."""
    one, two = serve(), serve()
    one.write(1)
    two.write(2)
    one.background()
    assert one.begin_read(key_of) == [key_of]
    assert one.tier.has_jobs
    one.tier.give_up()
    assert one.begin_read(1, 2) == []
    assert one.end_read(key_of) == {key_of: TierError.GONE}
    assert not one.tier.has_jobs


def test_a_seat_whose_heartbeat_was_removed_is_emptied_too(serve: Serve, clock: Clock, path: Path) -> None:
    one, two = serve(boot="a"), serve(boot="b")
    one.write(1)
    one.kill()
    (path / "writer-0" / HEARTBEAT_NAME).unlink()
    for _ in range(int(GONE_AFTER_S / LOOK_AROUND_S)):
        two.background()
        clock.now += LOOK_AROUND_S
    assert (path / "writer-0" / FINGERPRINT).exists()
    two.background()
    assert not (path / "writer-0" / FINGERPRINT).exists()
    assert heartbeat(path, "writer-0").state is SeatState.EMPTIED


def test_what_a_server_writes_into_a_seat_that_it_has_lost_is_removed(
    serve: Serve, clock: Clock, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a stop of the process: it goes on where it was, before it looks at its heartbeat."""
    former = serve(boot="a", slab_bytes=64 * PAGE, capacity_bytes=capacity(192, num_slabs=3))
    former.write(1, 2, 3, 4)
    age(path, "writer-0", SILENT_S)
    with monkeypatch.context() as local_locks:
        local_locks.setattr(DirectoryStorage, "try_lock", lambda self: True)
        local_locks.setattr(DirectoryStorage, "lock", lambda self: None)
        budget = capacity(70, num_slabs=2)
        owner = serve(boot="b", slab_bytes=64 * PAGE, capacity_bytes=budget)
    assert name_of(owner) == "writer-0"
    for name in range(5, 150):
        former.tier.own.write([key(name)], np.array([0]))
        while former.tier.own.has_jobs:
            former.executor.drain()
            former.tier.own.poll()
    assert du(path / "writer-0") > budget
    owner.background()
    assert du(path / "writer-0") <= budget
    assert owner.read(1, 2, 3, 4) == dict.fromkeys((1, 2, 3, 4))
    for name in range(200, 270):
        owner.write(name)
    clock.now += LOOK_AROUND_S
    owner.background()
    assert owner.finds(*range(200, 270)) == list(range(200, 270)), "its own growth stays"
    assert du(path / "writer-0") <= budget


@pytest.mark.parametrize("what", ["link", "folder", "pipe"])
@pytest.mark.parametrize("where", ["writer-0", f"writer-0/{HEARTBEAT_NAME}", "writer-0/lock", CLOCK_NAME])
def test_a_seat_that_cannot_be_claimed_stops_no_start(
    serve: Serve, path: Path, tmp_path: Path, what: str, where: str
) -> None:
    (path / where).parent.mkdir(mode=0o700, parents=True)
    put(what, path / where, tmp_path / "target")
    one, two = serve(), serve()
    assert name_of(one) != name_of(two)
    assert one.write(1) == [1]
    two.background()
    assert two.read(1) == {1: None}
    assert (tmp_path / "target").read_bytes() == b"not ours"


@pytest.mark.parametrize("why", ["it beats", "it has its lock", "not for long", "only the medium's clock says so"])
def test_a_seat_that_is_not_gone_is_not_emptied(serve: Serve, clock: Clock, path: Path, why: str) -> None:
    one, two = serve(boot="a"), serve(boot="b")
    one.write(1)
    if why != "it has its lock":
        one.tier.own.files.close()
    for round_ in range(8):
        if why != "only the medium's clock says so" or round_ == 7:
            age(path, "writer-0", GONE_AFTER_S / 10 if why == "not for long" and not round_ else GONE_AFTER_S)
        if why == "it beats":
            raw = heartbeat(path, "writer-0")
            changed = Heartbeat(raw.owner, "h", 1, "a", SeatState.SERVING, round_ + 100, 0.0, 0)
            (path / "writer-0" / HEARTBEAT_NAME).write_bytes(changed.pack().tobytes())
            age(path, "writer-0", 2 * GONE_AFTER_S)
        if why == "not for long":
            os.utime(path / "writer-0" / HEARTBEAT_NAME)
        if why == "only the medium's clock says so" and round_ < 7:
            continue
        two.background()
        clock.now += LOOK_AROUND_S
    assert (path / "writer-0" / FINGERPRINT / "index").exists()


def test_another_users_directory_is_refused(path: Path) -> None:
    path.mkdir(mode=0o777)
    path.chmod(0o777)
    with pytest.raises(ConfigError, match=r"^dir=.*others can write.*run as the same user"):
        SharedDirConfig(dir=str(path), bytes=8 << 20).open(TierContext([], FINGERPRINT))


def test_a_heartbeat_is_what_was_packed_and_nothing_else(tmp_path: Path) -> None:
    beat = Heartbeat("ab" * 16, "hos\u00e9", 77, "boot", SeatState.SERVING, 4, 12.5, 1 << 40)
    raw = beat.pack().tobytes()
    assert len(raw) == HEARTBEAT_BYTES
    assert Heartbeat.unpack(raw) == beat
    for bad in (
        b"",
        b"{}",
        b"[]",
        raw[:100],
        raw.replace(b'"version": 1', b'"version": 2'),
        b"\xff" * 100,
        b"1" * 9000,
        b"[" * 4000,
        raw.replace(b'"pid": 77', b'"pid": 1e400'),
        raw.replace(b'"pid": 77', b'"pid": ' + b"9" * 3000),
        raw.replace(b'"pid": 77', b'"pid": NaN'),
        raw.replace(b'"time": 12.5', b'"time": ' + b"9" * 3000),
        raw.replace(b'"host"', b'"more": 1, "host"'),
    ):
        assert Heartbeat.unpack(bad) is None
    storage = DirectoryStorage(tmp_path / "seat")
    assert look(storage) is None
    (tmp_path / "seat" / HEARTBEAT_NAME).write_bytes(raw)
    seen = look(storage)
    assert isinstance(seen, Sighting)
    assert seen.heartbeat == beat
    storage.close()


def test_the_number_of_seats_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seats, "MAX_SEATS", 2)
    claimant = Claimant(DirectoryStorage(path), FINGERPRINT, Machine.this(), os.urandom, lambda: 0.0)
    taken = [claimant.take() for _ in range(2)]
    with pytest.raises(ConfigError, match="2 servers use it already"):
        claimant.take()
    taken[0].storage.close()
    assert claimant.take().name == "writer-0"


# ForeignTable: an exact map, also where buckets are full, and safe to look up while it changes.


def digests(n: int, seed: int = 0) -> npt.NDArray[np.uint64]:
    return np.random.default_rng(seed).integers(1, 1 << 63, n, dtype=np.uint64)


def test_many_digests_come_and_go_in_small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single call for all would hold the interpreter while another thread needs it."""
    shares: list[int] = []
    find = ForeignTable._entries_of

    def counting(self: ForeignTable, digests: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        shares.append(len(digests))
        return find(self, digests)

    monkeypatch.setattr(ForeignTable, "_entries_of", counting)
    table, chosen = ForeignTable(20_000), np.unique(digests(20_000))
    table.insert(chosen, np.arange(len(chosen)))
    table.remove(chosen, np.arange(len(chosen)))
    assert len(table) == 0
    assert max(shares) <= 4096


@pytest.mark.parametrize("mask", [(1 << 64) - 1, 0xFFFF_FFFF_FFFF_FF00], ids=["spread", "in few buckets"])
def test_a_table_is_a_map(mask: int) -> None:
    rng = np.random.default_rng(1)
    universe = np.unique(digests(6000) & np.uint64(mask))
    table, model = ForeignTable(5000), dict[int, int]()
    next_place = 0
    for _ in range(60):
        chosen = rng.choice(universe, rng.integers(0, 400))
        if rng.random() < 0.5:
            places = np.arange(next_place, next_place + len(chosen))
            next_place += len(chosen)
            table.insert(chosen, places)
            for digest in np.unique(chosen).tolist():
                if digest not in model:
                    model[digest] = int(places[chosen.tolist().index(digest)])
        else:
            chosen = np.unique(chosen)
            # Half of them name a place that the digest does not have.
            places = np.array([model.get(int(digest), -5) + int(rng.integers(0, 2)) * 10**9 for digest in chosen])
            table.remove(chosen, places)
            for digest, place in zip(chosen.tolist(), places.tolist(), strict=True):
                if model.get(digest) == place:
                    del model[digest]
        assert len(table) == len(model)
        assert table.find(universe).tolist() == [model.get(digest, -1) for digest in universe.tolist()]
    assert model


def test_a_lookup_beside_changes_finds_what_is_not_changed() -> None:
    kept, moving = digests(3000), digests(3000, seed=1)
    table = ForeignTable(6000)
    table.insert(kept, np.arange(3000))
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            table.insert(moving, np.arange(10_000, 13_000))
            table.remove(moving, np.arange(10_000, 13_000))

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(100):
            assert table.find(kept).tolist() == list(range(3000))
    finally:
        stop.set()
        thread.join()


def test_memory_per_block_is_bounded() -> None:
    for num_blocks in (1 << 16, (1 << 16) + 1, 100_000):
        table = ForeignTable(num_blocks)
        assert table.capacity >= num_blocks
        # Digest and checksum per slot come on top: 16 bytes.
        nbytes = sum(each.nbytes for each in vars(table).values() if isinstance(each, np.ndarray))
        assert nbytes / num_blocks + 16 <= 200

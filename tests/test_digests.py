"""Digests of files: every byte counts and is read once, and a cache that cannot be trusted only costs time."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvoffload import digests
from kvoffload.digests import MAX_ENTRIES, MAX_FILE_BYTES, DigestCache, FileChangedError, file_digests

PIECE = 4096
SIZE = 3 * PIECE + 100
LATER = 3600 * 10**9
WRONG = "0123456789abcdef" * 2


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(digests, "BUFFER_BYTES", PIECE // 4)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(SIZE))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def in_an_hour() -> int:
    """A clock by which all files were changed long ago."""
    return time.time_ns() + LATER


def cache_of(folder: Path, clock: Callable[[], int] = in_an_hour) -> DigestCache:
    return DigestCache(folder, clock)


def entries(folder: Path) -> dict[str, str]:
    return dict(json.loads((folder / digests.FILE_NAME).read_text())["digests"])


def poison(folder: Path) -> None:
    """Replaces every digest in the cache with a wrong one. A result with it shows that the cache was used."""
    described = {"version": 1, "digests": dict.fromkeys(entries(folder), WRONG)}
    (folder / digests.FILE_NAME).write_text(json.dumps(described))


def test_every_single_byte_counts(weights: Path) -> None:
    """Including the first and last byte of the file, of a piece and of a read."""
    (before,) = file_digests([weights])
    raw = bytearray(weights.read_bytes())
    seen = {before}
    places = {0, SIZE - 1, SIZE // 2, *(at + by for at in range(PIECE // 4, SIZE, PIECE // 4) for by in (-1, 0, 1))}
    for place in sorted({*places, *range(0, SIZE, 97)}):
        raw[place] ^= 1
        weights.write_bytes(raw)
        seen.update(file_digests([weights]))
        raw[place] ^= 1
    assert len(seen) == 1 + len({*places, *range(0, SIZE, 97)})
    weights.write_bytes(raw)
    assert file_digests([weights]) == [before]


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dead").symlink_to(tmp_path / "nowhere")
    for name in ("pipe", "dead", "nowhere", "."):
        with pytest.raises(OSError):
            file_digests([tmp_path / name])


@pytest.mark.parametrize("change", ["written to", "replaced", "cut off"])
def test_a_file_that_changes_while_it_is_hashed_is_an_error(
    weights: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """It is not known which bytes of it were loaded."""
    preadv = os.preadv

    def changing(fd: int, buffers: Any, offset: int) -> int:
        if offset == PIECE:
            if change == "replaced":
                weights.with_name("other").write_bytes(weights.read_bytes())
                os.replace(weights.with_name("other"), weights)
            elif change == "cut off":
                os.truncate(weights, PIECE)
            else:
                os.utime(weights)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", changing)
    with pytest.raises(FileChangedError, match="changed while it was hashed"):
        file_digests([weights])


# The cache.


def test_a_digest_in_the_cache_is_not_computed_again(weights: Path, folder: Path) -> None:
    made = file_digests([weights], cache_of(folder))
    assert list(entries(folder).values()) == made
    assert file_digests([weights], cache_of(folder)) == made
    poison(folder)
    assert file_digests([weights], cache_of(folder)) == [WRONG]
    assert file_digests([weights]) == made


def write_behind(path: Path) -> None:
    """Sets the modification time back. The time of change cannot be."""
    state = path.stat()
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert path.stat().st_mtime_ns == state.st_mtime_ns


@pytest.mark.parametrize(
    "change",
    [
        lambda path: os.utime(path),
        lambda path: path.chmod(0o640),
        lambda path: path.write_bytes(path.read_bytes()),
        lambda path: (path.with_name("new").write_bytes(path.read_bytes()), path.with_name("new").replace(path)),
        write_behind,
    ],
    ids=["touched", "other rights", "written anew", "replaced", "under the old time"],
)
def test_a_file_whose_times_changed_is_read_again(
    weights: Path, folder: Path, change: Callable[[Path], object]
) -> None:
    made = file_digests([weights], cache_of(folder))
    poison(folder)
    change(weights)
    assert file_digests([weights], cache_of(folder)) == made


@pytest.mark.parametrize("ago", [0, digests.SETTLED_NS // 2, -LATER])
def test_a_file_that_was_just_changed_is_not_remembered(weights: Path, folder: Path, ago: int) -> None:
    """It may change again within the resolution of its timestamps. A clock that runs behind only costs time."""
    changed = weights.stat().st_ctime_ns
    assert file_digests([weights], cache_of(folder, lambda: changed + ago)) == file_digests([weights])
    assert not (folder / digests.FILE_NAME).exists() or entries(folder) == {}


def spoil_file(raw: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / digests.FILE_NAME).write_bytes(raw)


def in_file(**changes: object) -> bytes:
    return json.dumps({"version": 1, "digests": {"1:2:3:4:5": WRONG}, **changes}).encode()


def spoil_file_link(folder: Path) -> None:
    path = folder / digests.FILE_NAME
    path.rename(folder / "elsewhere")
    path.symlink_to(folder / "elsewhere")


def spoil_file_pipe(folder: Path) -> None:
    (folder / digests.FILE_NAME).unlink()
    os.mkfifo(folder / digests.FILE_NAME)


UNTRUSTED: dict[str, Callable[[Path], object]] = {
    "folder that all can write to": lambda folder: folder.chmod(0o777),
    "file that all can write to": lambda folder: (folder / digests.FILE_NAME).chmod(0o666),
    "a link to a file": spoil_file_link,
    "a pipe": spoil_file_pipe,
    "empty": spoil_file(b""),
    "no JSON": spoil_file(b"{nonsense"),
    "no UTF-8": spoil_file(b'{"\xff": 1}'),
    "endless nesting": spoil_file(b"[" * 200_000),
    "another version": spoil_file(in_file(version=2)),
    "no digests": spoil_file(in_file(digests=None)),
    "a digest that is a number": spoil_file(in_file(digests={"1:2:3:4:5": 6})),
    "a digest of no hex digits": spoil_file(in_file(digests={"1:2:3:4:5": "g" * 32})),
    "far too large": spoil_file(b" " * MAX_FILE_BYTES + in_file()),
}


@pytest.mark.parametrize("spoil", UNTRUSTED.values(), ids=UNTRUSTED)
def test_a_cache_that_cannot_be_trusted_is_not_used(
    weights: Path, folder: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], object]
) -> None:
    """There is one warning, the digests are right, and there is no error."""
    made = file_digests([weights], cache_of(folder))
    poison(folder)
    spoil(folder)
    cache = cache_of(folder)
    assert file_digests([weights], cache) == file_digests([weights], cache) == made
    (record,) = caplog.records
    assert str(folder) in record.getMessage()


def test_the_cache_of_another_user_is_not_used(
    weights: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = file_digests([weights], cache_of(folder))
    poison(folder)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert file_digests([weights], cache_of(folder)) == made
    assert len(caplog.records) == 1


def test_a_full_disk_leaves_the_cache_as_it_was(
    weights: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file_digests([weights], cache_of(folder))
    before = (folder / digests.FILE_NAME).read_bytes()
    other = weights.with_name("other")
    other.write_bytes(b"other")

    def full(*args: Any, **settings: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", full)
        assert file_digests([other], cache_of(folder)) == file_digests([other])
    assert len(caplog.records) == 1
    assert (folder / digests.FILE_NAME).read_bytes() == before
    file_digests([other], cache_of(folder))
    assert len(entries(folder)) == 2


def test_it_is_bounded_and_the_least_recently_used_go_first(weights: Path, folder: Path) -> None:
    cache = cache_of(folder)
    cache.save({f"file {i}": WRONG for i in range(MAX_ENTRIES)})
    assert len(entries(folder)) == MAX_ENTRIES
    cache.save({"new": WRONG}, used=["file 0", "no such file"])
    assert len(entries(folder)) == MAX_ENTRIES
    assert {"file 0", "new"} <= entries(folder).keys()
    assert "file 1" not in entries(folder)
    assert (folder / digests.FILE_NAME).stat().st_size < MAX_FILE_BYTES


def keep_one(folder: Path, name: str) -> None:
    DigestCache(folder).save({name: WRONG})


def test_several_processes_keep_the_entries_of_each_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "LOCK_DEADLINE_S", 300.0)
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=keep_one, args=(folder, f"file {i}")) for i in range(12)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * len(children)
    assert entries(folder).keys() == {f"file {i}" for i in range(12)}


def test_a_lock_that_is_never_released_is_not_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import fcntl

    monkeypatch.setattr(digests, "LOCK_DEADLINE_S", 0.05)
    keep_one(folder, "first")
    with (folder / "lock").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        keep_one(folder, "second")
    assert entries(folder).keys() == {"first"}
    keep_one(folder, "second")
    assert entries(folder).keys() == {"first", "second"}

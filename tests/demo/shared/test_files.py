"""Files of a directory stall, slow down and fill up, and others do not."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo import files
from demo.files import BrokenFiles, FileMode


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[BrokenFiles]:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    for name in ("in", "out"):
        (tmp_path / name / "file").write_bytes(b"some bytes")
    made = BrokenFiles(str(tmp_path / "in"))
    try:
        yield made
    finally:
        made.close()


def read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, 100, 0)
    finally:
        os.close(fd)


def write(path: Path) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        os.pwritev(fd, [b"other bytes"], 0)
    finally:
        os.close(fd)


def test_a_stalled_read_returns_when_the_stall_ends(broken: BrokenFiles, tmp_path: Path) -> None:
    found: list[bytes] = []
    broken.set_mode(FileMode.STALLED)
    thread = threading.Thread(target=lambda: found.append(read(tmp_path / "in" / "file")))
    thread.start()
    assert read(tmp_path / "out" / "file") == b"some bytes"
    thread.join(0.2)
    assert thread.is_alive()
    broken.set_mode(FileMode.NORMAL)
    thread.join(60)
    assert found == [b"some bytes"]
    assert broken.num_calls == 1


def test_a_full_directory_can_be_read(broken: BrokenFiles, tmp_path: Path) -> None:
    broken.set_mode(FileMode.FULL)
    with pytest.raises(OSError) as raised:
        write(tmp_path / "in" / "file")
    assert raised.value.errno == errno.ENOSPC
    assert read(tmp_path / "in" / "file") == b"some bytes"
    write(tmp_path / "out" / "file")
    broken.set_mode(FileMode.NORMAL)
    write(tmp_path / "in" / "file")


def test_names_relative_to_a_folder_of_the_directory_count(broken: BrokenFiles, tmp_path: Path) -> None:
    folder = os.open(tmp_path / "in", os.O_RDONLY)
    try:
        broken.set_mode(FileMode.FULL)
        with pytest.raises(OSError, match="No space"):
            os.mkdir("folder", dir_fd=folder)
    finally:
        broken.set_mode(FileMode.NORMAL)
        os.close(folder)


def test_a_slow_call_sleeps_nine_times_as_long(
    broken: BrokenFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    broken.set_mode(FileMode.SLOW)
    read(tmp_path / "in" / "file")
    read(tmp_path / "out" / "file")
    assert len(slept) == 2  # The open and the read of the file in the directory.
    assert min(slept) >= 9 * files.SHORTEST_S


def test_closed_it_gives_the_functions_back(tmp_path: Path) -> None:
    before = os.pread, os.open
    broken = BrokenFiles(str(tmp_path))
    assert (os.pread, os.open) != before
    broken.close()
    assert (os.pread, os.open) == before

"""The folder of one fingerprint in the directory of a tier: reads its index, verifies its blocks, removes it.

Nothing that is read is trusted, and no symbolic link is followed.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvoffload.abc import ByteArray, OffloadKey
from kvoffload.tiers.disk.format import (
    HEADER_BYTES,
    IDENTITY_NAME,
    INDEX_NAME,
    RECORD_BYTES,
    Entries,
    FormatError,
    Header,
    is_block_file,
    parse_records,
    payload_checksum,
    record_offset,
    slab_name,
    slab_number,
)
from kvoffload.tiers.disk.identities import IDENTITY_BYTES
from kvoffload.tiers.identity import parse_identity
from kvoffload.units import counted

RECORDS_PER_READ = 1 << 16
TRIES = 3
"""Attempts to read a block that changes meanwhile."""
MAX_NAMES = 5
"""File names in one finding."""

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Not blocking: there might be a pipe under the name.
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(slots=True)
class Folder:
    """The blocks of one fingerprint according to their index. ``findings``: faults in words."""

    path: str
    """Relative to the inspected directory."""
    fingerprint: str
    allocated_bytes: int = 0
    """Bytes of the medium that the tier's files take."""
    block_bytes: int = 0
    num_blocks: int = 0
    capacity_blocks: int = 0
    """Blocks for which the slabs have room."""
    oldest: int | None = None
    """When the oldest block was stored, in seconds since 1970."""
    newest: int | None = None
    transient: bool = False
    """Whether the blocks become invalid with the end of their server, because its weights changed while it ran."""
    is_lost: bool = False
    """Whether the index cannot be used: a server would not find a block, and would start anew."""
    num_damaged_records: int = 0
    num_lost_blocks: int = 0
    """Blocks whose slab, or one before it, is missing or too short. They are not in ``num_blocks``."""
    identity: dict[str, str] = field(default_factory=dict)
    """The inputs of the fingerprint in words, from the server that wrote it: see ``kvoffload.tiers.identity``."""
    findings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BadBlock:
    """A block that fails its check. A server would not load it."""

    path: str
    """The path of its folder, relative to the directory."""
    fingerprint: str
    slot: int
    key: str
    """In hexadecimal."""
    problem: str


@dataclass(slots=True)
class Verification:
    """The result of reading every block."""

    num_blocks: int = 0
    nbytes: int = 0
    num_changed: int = 0
    """Blocks that a running server has replaced or removed before they could be read."""
    bad: list[BadBlock] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Paths of folders whose index cannot be used, so that their blocks could not be checked."""
    findings: list[str] = field(default_factory=list)
    """Other faults, such as an unreadable index."""


@dataclass(slots=True)
class Cleared:
    """Removed files. ``left``: files in the tier's folders that are not kvoffload's, and stay."""

    nbytes: int = 0
    """Bytes of the medium."""
    num_files: int = 0
    fingerprints: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Block:
    """A slot's block according to its record."""

    slot: int
    key: OffloadKey
    sequence: int
    checksum: int


@dataclass(frozen=True, slots=True)
class _Index:
    header: Header
    entries: Entries
    """In the order of the slots; each key appears once."""
    num_records: int


class OpenFolder:
    """The folder of a fingerprint, given its descriptor and that of the directory in which it is."""

    def __init__(self, report: Folder, fd: int, owner_fd: int) -> None:
        self.report = report
        self._fd = fd
        self._owner_fd = owner_fd
        self._header: Header | None = None
        self._entries: Entries | None = None
        self._direct = os.O_DIRECT

    def inspect(self) -> None:
        """Completes the report."""
        report = self.report
        problem = ""
        with suppress(OSError), open_file(IDENTITY_NAME, self._fd) as fd:
            report.identity = parse_identity(read(fd, IDENTITY_BYTES, 0).tobytes().decode(errors="replace"))
        try:
            index = self._read_index()
            if index.entries.num_damaged:
                # A server may have been writing those records.
                index = self._read_index()
        except FormatError as error:
            problem = f"its blocks are lost: {error}"
        except OSError as error:
            problem = f"its blocks are lost: the index cannot be read ({error.strerror})"
        # After the index: a slab exists before its records do.
        slabs = self._look_at_files()
        if problem:
            report.is_lost = True
            report.findings.append(problem)
            return
        report.block_bytes = index.header.block_bytes
        report.transient = index.header.transient
        self._header = index.header
        self._entries = self._count_blocks(index, slabs)

    def _look_at_files(self) -> dict[int, int]:
        """Returns the size of each slab. Adds to the report what the files take, and files that are not the tier's."""
        slabs, foreign = {}, []
        for name in sorted(os.listdir(self._fd)):
            status = _status(name, self._fd)
            if status is None:
                continue
            if not stat.S_ISREG(status.st_mode) or not is_block_file(name):
                foreign.append(name)
                continue
            self.report.allocated_bytes += status.st_blocks * 512
            number = slab_number(name)
            if number is not None:
                slabs[number] = status.st_size
        if foreign:
            self.report.findings.append(not_ours(foreign))
        return slabs

    def _read_index(self) -> _Index:
        """Raises FormatError or OSError."""
        with open_file(INDEX_NAME, self._fd) as fd:
            header = self._read_header(fd)
            parts = [parse_records(header, np.empty(0, dtype=np.uint8))]
            slot = 0
            # Holes are skipped: a file can claim any size, and only the bytes that it takes bound the work.
            while (stretch := _next_stretch(fd, record_offset(slot))) is not None:
                begin, end = stretch
                slot = (begin - HEADER_BYTES) // RECORD_BYTES
                while record_offset(slot) < end:
                    count = min(RECORDS_PER_READ, -(-(end - record_offset(slot)) // RECORD_BYTES))
                    data = read(fd, count * RECORD_BYTES, record_offset(slot))
                    parts.append(parse_records(header, data, slot))
                    slot += count
            return _Index(header, _merged(parts), (os.fstat(fd).st_size - HEADER_BYTES) // RECORD_BYTES)

    def _read_header(self, fd: int) -> Header:
        header = Header.unpack(read(fd, HEADER_BYTES, 0))
        if header.fingerprint != self.report.fingerprint:
            raise FormatError("the index belongs to another fingerprint")
        return header

    def _count_blocks(self, index: _Index, slabs: Mapping[int, int]) -> Entries:
        """Adds numbers of blocks to the report. Returns the blocks that a server would find."""
        report, header, entries = self.report, index.header, index.entries
        report.num_damaged_records = entries.num_damaged
        if entries.num_damaged:
            report.findings.append(f"{counted(entries.num_damaged, 'damaged record')} in the index")
        number, num_slots = 0, 0
        while number in slabs:
            in_slab = min(slabs[number] // header.block_bytes, header.slots_per_slab)
            num_slots += in_slab
            if in_slab < header.slots_per_slab:
                break
            number += 1
        report.capacity_blocks = num_slots
        if index.num_records < num_slots:
            report.findings.append(
                f"the index ends early: it has records of {index.num_records:,} of {num_slots:,} slots"
            )
        found = _chosen(entries, np.flatnonzero(entries.slots < num_slots))
        report.num_lost_blocks = len(entries.keys) - len(found.keys)
        if report.num_lost_blocks:
            what = "too short" if number in slabs else "missing"
            report.findings.append(
                f"{slab_name(number)} is {what}: {counted(report.num_lost_blocks, 'block')} lost, in it or after it"
            )
        records = found.records
        report.num_blocks = len(records)
        if len(records):
            report.oldest, report.newest = int(records["stored_at"].min()), int(records["stored_at"].max())
        return found

    def verify(self, result: Verification, advance: Callable[[int], None]) -> None:
        """Reads every block and adds to ``result``."""
        if self._header is None or self._entries is None:
            return
        buffer = np.frombuffer(mmap.mmap(-1, self._header.block_bytes), dtype=np.uint8)
        ranks = np.split(buffer, np.cumsum(self._header.slot_bytes)[:-1])
        for at in range(len(self._entries.keys)):
            self._verify_block(_block(self._entries, at), self._header, ranks, result)
            advance(len(buffer))

    def _verify_block(self, block: _Block, header: Header, ranks: Sequence[ByteArray], result: Verification) -> None:
        """Reads the block into ``ranks``, one buffer per rank."""
        report = self.report
        for _ in range(TRIES):
            try:
                is_sound = self._is_sound(block, header, ranks)
                problem = "" if is_sound else "its checksum is wrong"
            except FileNotFoundError:
                # A server has removed the slab to make room.
                break
            except OSError as error:
                problem = f"it cannot be read ({error.strerror})"
            now = self._look_again(block.slot) if problem else block
            if now is None:
                break
            if now == block:
                result.num_blocks += 1
                result.nbytes += header.block_bytes
                if problem:
                    result.bad.append(BadBlock(report.path, report.fingerprint, block.slot, block.key.hex(), problem))
                return
            block = now
        result.num_changed += 1

    def _is_sound(self, block: _Block, header: Header, ranks: Sequence[ByteArray]) -> bool:
        """Raises OSError if the block cannot be read, FileNotFoundError if its slot does not exist any more."""
        number, offset = header.place(block.slot)
        if self._read_direct(slab_name(number), ranks, offset) < header.block_bytes:
            raise FileNotFoundError
        return payload_checksum(header, block.key, ranks) == block.checksum

    def _read_direct(self, name: str, buffers: Sequence[ByteArray], offset: int) -> int:
        """Reads past the page cache if possible: the bytes on the medium count, and the server needs the memory."""
        try:
            with open_file(name, self._fd, self._direct) as fd:
                return os.preadv(fd, [buffer.data for buffer in buffers], offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
            self._direct = 0
            return self._read_direct(name, buffers, offset)

    def _look_again(self, slot: int) -> _Block | None:
        """Returns the block that is in ``slot`` now."""
        with suppress(FormatError, OSError), open_file(INDEX_NAME, self._fd) as fd:
            header = self._read_header(fd)
            entries = parse_records(header, read(fd, RECORD_BYTES, record_offset(slot)), slot)
            if header == self._header and entries.keys:
                return _block(entries, 0)
        return None

    def remove(self, result: Cleared) -> None:
        """Removes the files, the index first: the next server reclaims slabs without one."""
        names = sorted(os.listdir(self._fd), key=lambda name: (name != INDEX_NAME, name))
        for name in names:
            status = _status(name, self._fd)
            if status is None or not stat.S_ISREG(status.st_mode) or not is_block_file(name):
                result.left.append(f"{self.report.path}/{name}")
                continue
            os.unlink(name, dir_fd=self._fd)
            result.nbytes += status.st_blocks * 512
            result.num_files += 1
        with suppress(OSError):
            # The folder is not empty: ``result.left`` says why.
            os.rmdir(self.report.fingerprint, dir_fd=self._owner_fd)
        result.fingerprints.append(self.report.fingerprint)


def _block(entries: Entries, at: int) -> _Block:
    record = entries.records[at]
    return _Block(int(entries.slots[at]), entries.keys[at], int(record["sequence"]), int(record["payload_checksum"]))


def _merged(parts: Sequence[Entries]) -> Entries:
    """Returns all entries in the order of the slots; of a key that appears twice the newer one, like a server."""
    keys = [key for part in parts for key in part.keys]
    slots = np.concatenate([part.slots for part in parts])
    records = np.concatenate([part.records for part in parts])
    newest = {keys[at]: at for at in np.argsort(records["sequence"], kind="stable").tolist()}
    entries = Entries(keys, slots, records, num_damaged=sum(part.num_damaged for part in parts))
    chosen = np.fromiter(newest.values(), dtype=np.int64, count=len(newest))
    return _chosen(entries, chosen[np.argsort(slots[chosen])])


def _chosen(entries: Entries, at: npt.NDArray[np.int64]) -> Entries:
    return replace(
        entries, keys=[entries.keys[i] for i in at.tolist()], slots=entries.slots[at], records=entries.records[at]
    )


@contextmanager
def open_folder(name: str | Path, parent: int | None = None) -> Iterator[int]:
    fd = os.open(name, _FOLDER_FLAGS, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def open_file(name: str, folder: int, flags: int = 0) -> Iterator[int]:
    fd = os.open(name, _FILE_FLAGS | flags, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.ENOENT, "not a regular file")
        yield fd
    finally:
        os.close(fd)


def read(fd: int, count: int, offset: int) -> ByteArray:
    """Returns ``count`` bytes, fewer at the end of the file."""
    data = np.empty(count, dtype=np.uint8)
    return data[: os.preadv(fd, [data.data], offset)]


def _next_stretch(fd: int, offset: int) -> tuple[int, int] | None:
    """Returns begin and end of the next bytes at or after ``offset`` that were ever written, None if there are none."""
    try:
        begin = os.lseek(fd, offset, os.SEEK_DATA)
        return begin, os.lseek(fd, begin, os.SEEK_HOLE)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return None


def _status(name: str, folder: int) -> os.stat_result | None:
    """Returns None if the file does not exist any more."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def not_ours(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"not kvoffload's: {', '.join(map(repr, names[:MAX_NAMES]))}{more}"

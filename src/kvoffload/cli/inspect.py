"""A look at a disk tier's directory from outside the server that owns it: what is there, is it sound, remove it.

Looking changes nothing and works beside a running server: what seems wrong is read again, as it may have been replaced
in between. Nothing that is read is trusted, and no symbolic link is followed.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvoffload.abc import ByteArray, KVOffloadError, OffloadKey
from kvoffload.tiers.disk.directory import LOCK_NAME, LOCK_NAMES
from kvoffload.tiers.disk.format import (
    ENGINE_FOLDER,
    HEADER_BYTES,
    INDEX_NAME,
    RECORD_BYTES,
    Entries,
    FormatError,
    Header,
    is_block_file,
    is_fingerprint,
    parse_records,
    payload_checksum,
    record_offset,
    slab_name,
    slab_number,
)

RECORDS_A_READ = 1 << 16
TRIES = 3
"""How often a block that changes while it is read is read."""
MAX_NAMES = 5
"""File names told in one finding."""

_OWNER = re.compile(rb"process ([0-9]{1,10}) since ")
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Not blocking: what lies under the name might be a pipe.
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class InspectError(KVOffloadError):
    """A directory cannot be looked at or cleared. The message says why, and what to do."""


@dataclass(slots=True)
class Folder:
    """One fingerprint's blocks, as their index tells of them. ``findings``: what is not as it should be, in words."""

    path: str
    """Relative to the directory that was looked at."""
    fingerprint: str
    allocated_bytes: int = 0
    """Bytes of the medium that slabs and index take."""
    block_bytes: int = 0
    num_blocks: int = 0
    capacity_blocks: int = 0
    """Blocks that the slabs have room for."""
    oldest: int | None = None
    """When the oldest block was stored, in seconds since 1970."""
    newest: int | None = None
    hits: int = 0
    num_blocks_hit: int = 0
    transient: bool = False
    """Void as soon as the server has ended that wrote them: its weights were changed while it ran."""
    is_lost: bool = False
    """The index cannot be used: nothing is known of the blocks, and a server starts anew."""
    num_damaged_records: int = 0
    num_lost_blocks: int = 0
    """Blocks whose slab, or one before it, is missing or too short; no other number counts them."""
    findings: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Owned:
    """A directory that one server owns at a time: the one that was looked at (``path`` "") or an engine's below it."""

    path: str
    in_use: bool = False
    pid: int | None = None
    """The process that says it uses it."""
    folders: list[Folder] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BadBlock:
    """A block that no server would load."""

    path: str
    """Of its folder, relative to the directory."""
    fingerprint: str
    slot: int
    key: str
    """In hexadecimal."""
    problem: str


@dataclass(slots=True)
class Verification:
    """What reading every block has shown."""

    num_blocks: int = 0
    nbytes: int = 0
    num_changed: int = 0
    """Blocks that were replaced or removed before they could be read, by a server that is at work."""
    bad: list[BadBlock] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Paths of folders whose index cannot be used, and whose blocks could not be checked therefore."""
    findings: list[str] = field(default_factory=list)
    """What is wrong besides, such as an index that cannot be read."""


@dataclass(slots=True)
class Cleared:
    """What was removed. ``left``: what is none of kvoffload's and was in the way."""

    nbytes: int = 0
    """Bytes of the medium."""
    num_files: int = 0
    fingerprints: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def inspect(directory: Path) -> list[Owned]:
    """What ``directory`` and the engines' directories in it hold. Raises InspectError if it is none of a disk tier."""
    with _told(directory), ExitStack() as stack:
        found = _open_owned(directory, stack)
        for owned, fd in found:
            owned.in_use, owned.pid = _owner(fd)
            for folder in _open_folders(owned, fd, stack):
                folder.look()
        return [owned for owned, _ in found]


def verify(
    directory: Path, begin: Callable[[int], None] = lambda _: None, advance: Callable[[int], None] = lambda _: None
) -> Verification:
    """Reads every block and compares it with its checksum. Raises InspectError if ``directory`` is none of a disk tier.

    Calls ``begin`` with the bytes to read, then ``advance`` with those of each block as it is done.
    """
    result = Verification()
    with _told(directory), ExitStack() as stack:
        found = _open_owned(directory, stack)
        folders = [folder for owned, fd in found for folder in _open_folders(owned, fd, stack)]
        for folder in folders:
            folder.look()
        begin(sum(folder.report.num_blocks * folder.report.block_bytes for folder in folders))
        for folder in folders:
            folder.verify(result, advance)
        result.lost = [folder.report.path for folder in folders if folder.report.is_lost]
        result.findings = findings([owned for owned, _ in found])
    return result


def findings(parts: Iterable[Owned]) -> list[str]:
    """All that is not as it should be, each with its path."""
    return [
        f"{path or '.'}: {finding}"
        for owned in parts
        for path, told in ((owned.path, owned.findings), *((folder.path, folder.findings) for folder in owned.folders))
        for finding in told
    ]


def clear(directory: Path, fingerprint: str | None = None) -> Cleared:
    """Removes the blocks of ``fingerprint``, or all: the files that kvoffload has written, and nothing else.

    Raises InspectError if ``directory`` is none of a disk tier, if a server uses it, and if a file cannot be removed.
    """
    result = Cleared()
    with _told(directory), ExitStack() as stack:
        found = _open_owned(directory, stack)
        for owned, fd in found:
            _lock(directory / owned.path, fd, stack)
        for owned, fd in found:
            for folder in _open_folders(owned, fd, stack):
                if fingerprint in (None, folder.report.fingerprint):
                    folder.remove(result)
    return result


@dataclass(frozen=True, slots=True)
class _Block:
    """What a record says of its slot."""

    slot: int
    key: OffloadKey
    sequence: int
    checksum: int


@dataclass(frozen=True, slots=True)
class _Index:
    header: Header
    entries: Entries
    """In the order of the slots, each key once."""
    num_records: int


class _OpenFolder:
    """A fingerprint's folder, open as ``fd``, in a directory that is open as ``owner_fd``."""

    def __init__(self, report: Folder, fd: int, owner_fd: int) -> None:
        self.report = report
        self._fd = fd
        self._owner_fd = owner_fd
        self._header: Header | None = None
        self._entries: Entries | None = None
        self._direct = os.O_DIRECT

    def look(self) -> None:
        """Completes the report."""
        report = self.report
        problem = ""
        try:
            index = self._read_index()
            if index.entries.num_damaged:
                # A server may have been writing just there.
                index = self._read_index()
        except FormatError as error:
            problem = f"its blocks are lost: {error}"
        except OSError as error:
            problem = f"its blocks are lost: the index cannot be read ({error.strerror})"
        # After the index: a slab is there before its records are.
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
        """Size of each slab. Completes the report by what they take, and what is none of ours."""
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
            self.report.findings.append(_not_ours(foreign))
        return slabs

    def _read_index(self) -> _Index:
        """Raises FormatError and OSError."""
        with _file(INDEX_NAME, self._fd) as fd:
            header = self._read_header(fd)
            parts = [parse_records(header, np.empty(0, dtype=np.uint8))]
            slot = 0
            # Not what was never written: a file may say that it has any size, and what it takes bounds the work.
            while (stretch := _next_stretch(fd, record_offset(slot))) is not None:
                begin, end = stretch
                slot = (begin - HEADER_BYTES) // RECORD_BYTES
                while record_offset(slot) < end:
                    count = min(RECORDS_A_READ, -(-(end - record_offset(slot)) // RECORD_BYTES))
                    data = _read(fd, count * RECORD_BYTES, record_offset(slot))
                    parts.append(parse_records(header, data, slot))
                    slot += count
            return _Index(header, _merged(parts), (os.fstat(fd).st_size - HEADER_BYTES) // RECORD_BYTES)

    def _read_header(self, fd: int) -> Header:
        header = Header.unpack(_read(fd, HEADER_BYTES, 0))
        if header.fingerprint != self.report.fingerprint:
            raise FormatError("the index is of another fingerprint")
        return header

    def _count_blocks(self, index: _Index, slabs: Mapping[int, int]) -> Entries:
        """Returns the blocks that a server would find."""
        report, header, entries = self.report, index.header, index.entries
        report.num_damaged_records = entries.num_damaged
        if entries.num_damaged:
            report.findings.append(f"{_counted(entries.num_damaged, 'damaged record')} in the index")
        number, there = 0, 0
        while number in slabs:
            in_slab = min(slabs[number] // header.block_bytes, header.slots_per_slab)
            there += in_slab
            if in_slab < header.slots_per_slab:
                break
            number += 1
        report.capacity_blocks = there
        if index.num_records < there:
            report.findings.append(f"the index ends early: it tells of {index.num_records:,} of {there:,} slots")
        found = _chosen(entries, np.flatnonzero(entries.slots < there))
        report.num_lost_blocks = len(entries.keys) - len(found.keys)
        if report.num_lost_blocks:
            what = "too short" if number in slabs else "missing"
            report.findings.append(
                f"{slab_name(number)} is {what}: {_counted(report.num_lost_blocks, 'block')} lost, in it or after it"
            )
        records = found.records
        report.num_blocks = len(records)
        if len(records):
            report.oldest, report.newest = int(records["stored_at"].min()), int(records["stored_at"].max())
            report.hits = int(records["hits"].sum(dtype=np.uint64))
            report.num_blocks_hit = int(np.count_nonzero(records["hits"]))
        return found

    def verify(self, result: Verification, advance: Callable[[int], None]) -> None:
        """Reads every block."""
        if self._header is None or self._entries is None:
            return
        buffer = np.frombuffer(mmap.mmap(-1, self._header.block_bytes), dtype=np.uint8)
        ranks = np.split(buffer, np.cumsum(self._header.slot_bytes)[:-1])
        for at in range(len(self._entries.keys)):
            self._verify_block(_block(self._entries, at), self._header, ranks, result)
            advance(len(buffer))

    def _verify_block(self, block: _Block, header: Header, ranks: Sequence[ByteArray], result: Verification) -> None:
        """Reads the block into ``ranks``, a buffer each."""
        report = self.report
        for _ in range(TRIES):
            try:
                is_sound = self._is_sound(block, header, ranks)
                problem = "" if is_sound else "its checksum is wrong"
            except FileNotFoundError:
                # A server has cut off what it needed the room of.
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
        """Raises OSError if it cannot be read, FileNotFoundError if its place is gone."""
        number, offset = header.place(block.slot)
        if self._read_direct(slab_name(number), ranks, offset) < header.block_bytes:
            raise FileNotFoundError
        return payload_checksum(header, block.key, ranks) == block.checksum

    def _read_direct(self, name: str, buffers: Sequence[ByteArray], offset: int) -> int:
        """Past the page cache where that can be done: what is on the medium counts, and a server needs the memory."""
        try:
            with _file(name, self._fd, self._direct) as fd:
                return os.preadv(fd, [buffer.data for buffer in buffers], offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
            self._direct = 0
            return self._read_direct(name, buffers, offset)

    def _look_again(self, slot: int) -> _Block | None:
        """What is in ``slot`` now."""
        with suppress(FormatError, OSError), _file(INDEX_NAME, self._fd) as fd:
            header = self._read_header(fd)
            entries = parse_records(header, _read(fd, RECORD_BYTES, record_offset(slot)), slot)
            if header == self._header and entries.keys:
                return _block(entries, 0)
        return None

    def remove(self, result: Cleared) -> None:
        """Index first: what it does not name is reclaimed by whoever comes next."""
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
            # Not empty: what is left is told.
            os.rmdir(self.report.fingerprint, dir_fd=self._owner_fd)
        result.fingerprints.append(self.report.fingerprint)


def _block(entries: Entries, at: int) -> _Block:
    record = entries.records[at]
    return _Block(int(entries.slots[at]), entries.keys[at], int(record["sequence"]), int(record["payload_checksum"]))


def _merged(parts: Sequence[Entries]) -> Entries:
    """In the order of the slots; of a key that comes twice, the newer one, as a server would choose."""
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


def _open_owned(directory: Path, stack: ExitStack) -> list[tuple[Owned, int]]:
    """``directory`` and the engines' directories in it, each with its descriptor."""
    fix = "name a server's disk_dir"
    try:
        root = stack.enter_context(_folder(directory))
    except OSError as error:
        raise InspectError(f"{directory}: {error.strerror}; {fix}") from error
    names = sorted(os.listdir(root))
    engines = [name for name in names if ENGINE_FOLDER.fullmatch(name)]
    if not (engines or LOCK_NAME in names or any(map(is_fingerprint, names))):
        raise InspectError(f"{directory}: there is no disk tier in it; {fix}")
    found = [(Owned(""), root)]
    for name in engines:
        try:
            found.append((Owned(name), stack.enter_context(_folder(name, root))))
        except OSError as error:
            found[0][0].findings.append(f"{name} cannot be opened: {error.strerror}")
    return found


def _open_folders(owned: Owned, fd: int, stack: ExitStack) -> list[_OpenFolder]:
    """The fingerprints' folders of ``owned``, which gets their reports."""
    opened: list[_OpenFolder] = []
    foreign = []
    for name in sorted(os.listdir(fd)):
        if is_fingerprint(name):
            try:
                folder = stack.enter_context(_folder(name, fd))
            except FileNotFoundError:
                continue
            except OSError as error:
                owned.findings.append(f"{name} cannot be opened: {error.strerror}")
                continue
            report = Folder(f"{owned.path}/{name}".lstrip("/"), name)
            owned.folders.append(report)
            opened.append(_OpenFolder(report, folder, fd))
        elif name not in LOCK_NAMES and (owned.path or not ENGINE_FOLDER.fullmatch(name)):
            foreign.append(name)
    if foreign:
        owned.findings.append(_not_ours(foreign))
    return opened


def _owner(fd: int) -> tuple[bool, int | None]:
    """Whether a server uses the directory ``fd``, and its process id. Takes the lock, shared, for a moment to see."""
    with suppress(FileNotFoundError), _file(LOCK_NAME, fd) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            told = _OWNER.match(os.pread(lock, 100, 0))
            return True, int(told[1]) if told else None
    return False, None


def _lock(path: Path, fd: int, stack: ExitStack) -> None:
    """Keeps servers out of the directory ``fd`` until ``stack`` ends. Where none has ever been, there is no lock."""
    with suppress(FileNotFoundError):
        lock = stack.enter_context(_file(LOCK_NAME, fd))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            told = _OWNER.match(os.pread(lock, 100, 0))
            by = f"process {int(told[1])}" if told else "another process"
            raise InspectError(f"{path} is in use by {by}; stop that server first") from None


@contextmanager
def _told(directory: Path) -> Iterator[None]:
    """Raises InspectError for what else goes wrong in ``directory``."""
    try:
        yield
    except OSError as error:
        where = "" if error.filename is None else f" ({error.filename})"
        raise InspectError(f"{directory}: {error.strerror}{where}") from error


@contextmanager
def _folder(name: str | Path, parent: int | None = None) -> Iterator[int]:
    fd = os.open(name, _FOLDER_FLAGS, dir_fd=parent)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _file(name: str, folder: int, flags: int = 0) -> Iterator[int]:
    fd = os.open(name, _FILE_FLAGS | flags, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.ENOENT, "not a regular file")
        yield fd
    finally:
        os.close(fd)


def _read(fd: int, count: int, offset: int) -> ByteArray:
    """Fewer bytes at the file's end."""
    data = np.empty(count, dtype=np.uint8)
    return data[: os.preadv(fd, [data.data], offset)]


def _next_stretch(fd: int, offset: int) -> tuple[int, int] | None:
    """Where the next bytes at or after ``offset`` that were ever written begin and end; None if there are none."""
    try:
        begin = os.lseek(fd, offset, os.SEEK_DATA)
        return begin, os.lseek(fd, begin, os.SEEK_HOLE)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return None


def _status(name: str, folder: int) -> os.stat_result | None:
    """None if it is gone."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _not_ours(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"not kvoffload's: {', '.join(map(repr, names[:MAX_NAMES]))}{more}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

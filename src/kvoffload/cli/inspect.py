"""Offline tools for the directory of a disk tier or of a shared directory tier: inspect it, verify its blocks, clear
it.

Inspecting and verifying change nothing and work beside a running server: a block that seems wrong is read again, since
the server may have replaced it in between. Nothing that is read is trusted, and no symbolic link is followed.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvoffload.abc import ByteArray, KVOffloadError, OffloadKey
from kvoffload.locks import try_to_lock
from kvoffload.tiers.disk.directory import LOCK_NAME, LOCK_NAMES, owner_of
from kvoffload.tiers.disk.format import (
    ENGINE_FOLDER,
    HEADER_BYTES,
    IDENTITY_NAME,
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
from kvoffload.tiers.disk.identities import IDENTITY_BYTES
from kvoffload.tiers.identity import parse_identity
from kvoffload.tiers.shared_dir.seats import (
    CLOCK_NAME,
    HEARTBEAT_BYTES,
    HEARTBEAT_NAME,
    SILENT_S,
    Heartbeat,
    SeatState,
    seat_number,
)
from kvoffload.units import counted

RECORDS_PER_READ = 1 << 16
TRIES = 3
"""Attempts to read a block that changes meanwhile."""
MAX_NAMES = 5
"""File names in one finding."""

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Not blocking: there might be a pipe under the name.
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class InspectError(KVOffloadError):
    """A directory cannot be inspected or cleared, for the reason that the message gives."""


@dataclass(slots=True)
class Folder:
    """The blocks of one fingerprint according to their index. ``findings``: what is wrong, in words."""

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
    hits: int = 0
    num_blocks_hit: int = 0
    transient: bool = False
    """Whether the blocks are invalid once their server has ended: its weights were changed while it ran."""
    is_lost: bool = False
    """Whether the index cannot be used: a server would not find a block, and would start anew."""
    num_damaged_records: int = 0
    num_lost_blocks: int = 0
    """Blocks whose slab, or one before it, is missing or too short. They are not in ``num_blocks``."""
    identity: dict[str, str] = field(default_factory=dict)
    """What the fingerprint depends on, in words, as the server that wrote it says: see ``kvoffload.tiers.identity``."""
    findings: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Writer:
    """The owner of a seat in a shared directory, as its heartbeat says."""

    host: str
    pid: int
    state: str
    """"serving", "ended" or "emptied"."""
    age_s: float
    """Seconds since the heartbeat, by the clocks of the storage and of this machine."""
    capacity_bytes: int
    """The budget of the seat."""


@dataclass(slots=True)
class Owned:
    """A directory that one server owns at a time: the inspected one (``path`` "") or the folder of an engine or of a
    writer in it."""

    path: str
    in_use: bool = False
    pid: int | None = None
    """The process that uses it, as the lock file says."""
    writer: Writer | None = None
    """In a shared directory only."""
    folders: list[Folder] = field(default_factory=list)
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
    """What else is wrong, such as an index that cannot be read."""


@dataclass(slots=True)
class Cleared:
    """What was removed. ``left``: files in the tier's folders that are not kvoffload's, and were not removed."""

    nbytes: int = 0
    """Bytes of the medium."""
    num_files: int = 0
    fingerprints: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def inspect(directory: Path) -> list[Owned]:
    """Describes the blocks in ``directory`` and in the engines' folders below it. Raises InspectError if it is not the
    directory of a disk tier."""
    with _errors_in(directory), ExitStack() as stack:
        found = _open_owned(directory, stack)
        for owned, fd in found:
            with _finding(owned, LOCK_NAME):
                owned.in_use, owned.pid = _owner(fd)
            if seat_number(owned.path) is not None:
                with _finding(owned, HEARTBEAT_NAME):
                    owned.writer = _writer(owned, fd)
            for folder in _open_folders(owned, fd, stack):
                folder.inspect()
        return [owned for owned, _ in found]


def verify(
    directory: Path, begin: Callable[[int], None] = lambda _: None, advance: Callable[[int], None] = lambda _: None
) -> Verification:
    """Reads every block and compares it with its checksum. Raises InspectError if ``directory`` is not the directory of
    a disk tier.

    Calls ``begin`` with the number of bytes to read, then ``advance`` with the bytes of each block when it is done.
    """
    result = Verification()
    with _errors_in(directory), ExitStack() as stack:
        found = _open_owned(directory, stack)
        folders = [folder for owned, fd in found for folder in _open_folders(owned, fd, stack)]
        for folder in folders:
            folder.inspect()
        begin(sum(folder.report.num_blocks * folder.report.block_bytes for folder in folders))
        for folder in folders:
            folder.verify(result, advance)
        result.lost = [folder.report.path for folder in folders if folder.report.is_lost]
        result.findings = findings([owned for owned, _ in found])
    return result


def findings(parts: Iterable[Owned]) -> list[str]:
    """Returns all findings, each with its path."""
    return [
        f"{path or '.'}: {finding}"
        for owned in parts
        for path, found in ((owned.path, owned.findings), *((folder.path, folder.findings) for folder in owned.folders))
        for finding in found
    ]


def clear(directory: Path, fingerprint: str | None = None) -> Cleared:
    """Removes the blocks of ``fingerprint``, or all blocks: the files that kvoffload has written, and no others.

    Raises InspectError if ``directory`` is not the directory of a disk tier, if a server uses it, or if a file cannot
    be removed.
    """
    result = Cleared()
    with _errors_in(directory), ExitStack() as stack:
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


class _OpenFolder:
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
        with suppress(OSError), _file(IDENTITY_NAME, self._fd) as fd:
            report.identity = parse_identity(_read(fd, IDENTITY_BYTES, 0).tobytes().decode(errors="replace"))
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
            self.report.findings.append(_not_ours(foreign))
        return slabs

    def _read_index(self) -> _Index:
        """Raises FormatError or OSError."""
        with _file(INDEX_NAME, self._fd) as fd:
            header = self._read_header(fd)
            parts = [parse_records(header, np.empty(0, dtype=np.uint8))]
            slot = 0
            # Holes are skipped: a file can claim any size, and only the bytes that it takes bound the work.
            while (stretch := _next_stretch(fd, record_offset(slot))) is not None:
                begin, end = stretch
                slot = (begin - HEADER_BYTES) // RECORD_BYTES
                while record_offset(slot) < end:
                    count = min(RECORDS_PER_READ, -(-(end - record_offset(slot)) // RECORD_BYTES))
                    data = _read(fd, count * RECORD_BYTES, record_offset(slot))
                    parts.append(parse_records(header, data, slot))
                    slot += count
            return _Index(header, _merged(parts), (os.fstat(fd).st_size - HEADER_BYTES) // RECORD_BYTES)

    def _read_header(self, fd: int) -> Header:
        header = Header.unpack(_read(fd, HEADER_BYTES, 0))
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
            report.hits = int(records["hits"].sum(dtype=np.uint64))
            report.num_blocks_hit = int(np.count_nonzero(records["hits"]))
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
            with _file(name, self._fd, self._direct) as fd:
                return os.preadv(fd, [buffer.data for buffer in buffers], offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not self._direct:
                raise
            self._direct = 0
            return self._read_direct(name, buffers, offset)

    def _look_again(self, slot: int) -> _Block | None:
        """Returns the block that is in ``slot`` now."""
        with suppress(FormatError, OSError), _file(INDEX_NAME, self._fd) as fd:
            header = self._read_header(fd)
            entries = parse_records(header, _read(fd, RECORD_BYTES, record_offset(slot)), slot)
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


def _open_owned(directory: Path, stack: ExitStack) -> list[tuple[Owned, int]]:
    """Opens ``directory`` and the engines' folders in it. Returns each with its descriptor."""
    fix = "name the directory of a disk tier or of a shared_dir tier"
    try:
        root = stack.enter_context(_folder(directory))
    except OSError as error:
        raise InspectError(f"{directory}: {error.strerror}; {fix}") from error
    names = sorted(os.listdir(root))
    engines = [name for name in names if ENGINE_FOLDER.fullmatch(name)]
    engines += sorted(
        (name for name in names if seat_number(name) is not None), key=lambda name: seat_number(name) or 0
    )
    if not (engines or LOCK_NAME in names or any(map(is_fingerprint, names))):
        raise InspectError(f"{directory}: is not the directory of a disk tier; {fix}")
    found = [(Owned(""), root)]
    for name in engines:
        try:
            found.append((Owned(name), stack.enter_context(_folder(name, root))))
        except OSError as error:
            found[0][0].findings.append(f"{name} cannot be opened: {error.strerror}")
    return found


def _open_folders(owned: Owned, fd: int, stack: ExitStack) -> list[_OpenFolder]:
    """Opens the folders of the fingerprints in ``owned``, which gets their reports."""
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
        elif not _is_of_tier(owned, name):
            foreign.append(name)
    if foreign:
        owned.findings.append(_not_ours(foreign))
    return opened


def _is_of_tier(owned: Owned, name: str) -> bool:
    """Returns whether a file or folder beside those of the fingerprints is one of kvoffload's."""
    if name in LOCK_NAMES:
        return True
    if owned.path:
        return seat_number(owned.path) is not None and name == HEARTBEAT_NAME
    return name == CLOCK_NAME or seat_number(name) is not None or ENGINE_FOLDER.fullmatch(name) is not None


def _writer(owned: Owned, fd: int) -> Writer | None:
    """Reads the heartbeat of a seat. Sets ``owned.in_use`` if its owner is alive on another machine."""
    try:
        with _file(HEARTBEAT_NAME, fd) as file:
            raw, modified = _read(file, HEARTBEAT_BYTES, 0).tobytes(), os.fstat(file).st_mtime
    except FileNotFoundError:
        return None
    found = Heartbeat.unpack(raw)
    if found is None:
        owned.findings.append("the heartbeat cannot be read")
        return None
    age_s = max(0.0, time.time() - modified)
    if found.state is SeatState.SERVING:
        # Locks may be known to one machine only.
        owned.in_use = owned.in_use or age_s < SILENT_S
        owned.pid = found.pid
    return Writer(found.host, found.pid, str(found.state), age_s, found.capacity_bytes)


def _owner(fd: int) -> tuple[bool, int | None]:
    """Returns whether a server uses the directory ``fd``, and its process id. Takes a shared lock for a moment."""
    with suppress(FileNotFoundError), _file(LOCK_NAME, fd) as lock:
        if not try_to_lock(lock, 0.0, shared=True):
            return True, owner_of(lock)
    return False, None


def _lock(path: Path, fd: int, stack: ExitStack) -> None:
    """Locks the directory ``fd`` until ``stack`` ends. If no server has ever used it, it has no lock file."""
    with suppress(FileNotFoundError):
        lock = stack.enter_context(_file(LOCK_NAME, fd))
        if not try_to_lock(lock, 0.0):
            pid = owner_of(lock)
            owner = "another process" if pid is None else f"process {pid}"
            raise InspectError(f"{path} is in use by {owner}; stop that server first")


@contextmanager
def _errors_in(directory: Path) -> Iterator[None]:
    """Turns an OSError into an InspectError."""
    try:
        yield
    except OSError as error:
        where = "" if error.filename is None else f" ({error.filename})"
        raise InspectError(f"{directory}: {error.strerror}{where}") from error


@contextmanager
def _finding(owned: Owned, name: str) -> Iterator[None]:
    """Turns an OSError of one file into a finding."""
    try:
        yield
    except OSError as error:
        owned.findings.append(f"{name} cannot be read ({error.strerror})")


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


def _not_ours(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"not kvoffload's: {', '.join(map(repr, names[:MAX_NAMES]))}{more}"

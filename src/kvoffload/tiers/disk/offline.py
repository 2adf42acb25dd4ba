"""Offline tools for the directory of a disk tier or of a shared directory tier: inspect it, verify its blocks, clear
it.

Inspecting and verifying change nothing and work beside a running server: a block that seems wrong is read again, since
the server may have replaced it in between. Nothing that is read is trusted, and no symbolic link is followed.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvoffload.abc import ByteArray, KVOffloadError, OffloadKey
from kvoffload.tiers.disk.directory import LOCK_NAME, LOCK_NAMES, DirectoryStorage
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
)
from kvoffload.tiers.disk.identities import read_identity
from kvoffload.tiers.disk.index import RECORDS_AT_ONCE, read_piece
from kvoffload.tiers.disk.storage import StoredFile, aligned_buffer, read_at
from kvoffload.tiers.shared_dir.seats import CLOCK_NAME, HEARTBEAT_NAME, SILENT_S, SeatState, look, seat_number
from kvoffload.units import counted

TRIES = 3
"""Attempts to read a block that changes meanwhile."""
MAX_NAMES = 5
"""File names in one finding."""


class InspectError(KVOffloadError):
    """A directory cannot be inspected or cleared, for the reason that the message gives."""


@dataclass(slots=True)
class FolderReport:
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


@dataclass(slots=True)
class WriterReport:
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
class PartReport:
    """A directory that one server owns at a time: the inspected one (``path`` "") or the folder of an engine or of a
    writer in it."""

    path: str
    in_use: bool = False
    pid: int | None = None
    """The process that uses it, as the lock file says."""
    writer: WriterReport | None = None
    """In a shared directory only."""
    folders: Sequence[FolderReport] = field(default_factory=list)
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


def inspect(directory: Path) -> list[PartReport]:
    """Describes the blocks in ``directory`` and in the engines' folders below it. Raises InspectError if it is not the
    directory of a disk tier."""
    with _opened(directory) as parts:
        for part in parts:
            part.inspect()
    return list(parts)


def verify(
    directory: Path, begin: Callable[[int], None] = lambda _: None, advance: Callable[[int], None] = lambda _: None
) -> Verification:
    """Reads every block and compares it with its checksum. Raises InspectError if ``directory`` is not the directory of
    a disk tier.

    Calls ``begin`` with the number of bytes to read, then ``advance`` with the bytes of each block when it is done.
    """
    result = Verification()
    with _opened(directory) as parts:
        for part in parts:
            part.inspect()
        folders = [folder for part in parts for folder in part.folders]
        begin(sum(folder.num_blocks * folder.block_bytes for folder in folders))
        for folder in folders:
            folder.verify(result, advance)
        result.lost = [folder.path for folder in folders if folder.is_lost]
        result.findings = findings(parts)
    return result


def clear(directory: Path, fingerprint: str | None = None) -> Cleared:
    """Removes the blocks of ``fingerprint``, or all blocks: the files that kvoffload has written, and no others.

    Raises InspectError if ``directory`` is not the directory of a disk tier, if a server uses it, or if a file cannot
    be removed.
    """
    result = Cleared()
    with _opened(directory) as parts:
        for part in parts:
            owner = part.storage.take_lock()
            if owner is not None:
                who = "another process" if owner.pid is None else f"process {owner.pid}"
                raise InspectError(
                    f"{part.storage.path} is in use by {who}; {owner.remedy or 'stop that server first'}"
                )
        for part in parts:
            part.find_folders()
            for folder in part.folders:
                if fingerprint in (None, folder.fingerprint):
                    folder.remove(result)
    return result


def findings(parts: Iterable[PartReport]) -> list[str]:
    """Returns all findings, each with its path."""
    reports: list[PartReport | FolderReport] = []
    for part in parts:
        reports += [part, *part.folders]
    return [f"{report.path or '.'}: {finding}" for report in reports for finding in report.findings]


@contextmanager
def _opened(directory: Path) -> Iterator[list[_OwnedPart]]:
    """Opens ``directory`` and the folders of engines and writers in it. Turns an OSError into an InspectError."""
    fix = "name the directory of a disk tier or of a shared_dir tier"
    with ExitStack() as stack:
        try:
            root = stack.enter_context(closing(DirectoryStorage(directory, as_is=True)))
        except OSError as error:
            raise InspectError(f"{directory}: {error.strerror}; {fix}") from error
        try:
            names = list(root.entries(""))
            inner = [name for name in names if ENGINE_FOLDER.fullmatch(name)]
            inner += sorted(
                (name for name in names if seat_number(name) is not None), key=lambda n: seat_number(n) or 0
            )
            if not (inner or LOCK_NAME in names or any(map(is_fingerprint, names))):
                raise InspectError(f"{directory}: is not the directory of a disk tier; {fix}")
            parts = [_OwnedPart("", root)]
            for name in inner:
                try:
                    parts.append(_OwnedPart(name, stack.enter_context(closing(root.child(name)))))
                except OSError as error:
                    parts[0].findings.append(f"{name} cannot be opened: {error.strerror}")
            yield parts
        except OSError as error:
            where = "" if error.filename is None else f" ({error.filename})"
            raise InspectError(f"{directory}: {error.strerror}{where}") from error


class _OwnedPart(PartReport):
    """A directory that one server owns at a time, open."""

    folders: list[_FingerprintFolder]

    def __init__(self, path: str, storage: DirectoryStorage) -> None:
        super().__init__(path)
        self.storage = storage

    def inspect(self) -> None:
        """Completes the report."""
        with self._finding(LOCK_NAME), closing(self.storage.reopened()) as taken:
            owner = taken.take_lock(shared=True)
            self.in_use, self.pid = owner is not None, None if owner is None else owner.pid
        if seat_number(self.path) is not None:
            with self._finding(HEARTBEAT_NAME):
                self._look_at_heartbeat()
        self.find_folders()
        for folder in self.folders:
            folder.inspect()

    @contextmanager
    def _finding(self, name: str) -> Iterator[None]:
        """Turns an OSError of one file into a finding."""
        try:
            yield
        except OSError as error:
            self.findings.append(f"{name} cannot be read ({error.strerror})")

    def _look_at_heartbeat(self) -> None:
        if HEARTBEAT_NAME not in self.storage.entries(""):
            return
        seen = look(self.storage)
        found = None if seen is None else seen.heartbeat
        if seen is None or found is None:
            self.findings.append("the heartbeat cannot be read")
            return
        age_s = max(0.0, time.time() - seen.modified)
        if found.state is SeatState.SERVING:
            # Locks may be known to one machine only.
            self.in_use = self.in_use or age_s < SILENT_S
            self.pid = found.pid
        self.writer = WriterReport(found.host, found.pid, str(found.state), age_s, found.capacity_bytes)

    def find_folders(self) -> None:
        """Opens the folders of the fingerprints."""
        foreign = []
        for name in self.storage.entries(""):
            if is_fingerprint(name):
                try:
                    self.folders.append(_FingerprintFolder(f"{self.path}/{name}".lstrip("/"), name, self.storage))
                except FileNotFoundError:
                    continue
                except OSError as error:
                    self.findings.append(f"{name} cannot be opened: {error.strerror}")
            elif not self._is_of_tier(name):
                foreign.append(name)
        if foreign:
            self.findings.append(_not_ours(foreign))

    def _is_of_tier(self, name: str) -> bool:
        """Returns whether a file or folder beside those of the fingerprints is one of kvoffload's."""
        if name in LOCK_NAMES:
            return True
        if self.path:
            return seat_number(self.path) is not None and name == HEARTBEAT_NAME
        return name == CLOCK_NAME or seat_number(name) is not None or ENGINE_FOLDER.fullmatch(name) is not None


class _FingerprintFolder(FolderReport):
    """The folder of one fingerprint in ``storage``."""

    def __init__(self, path: str, fingerprint: str, storage: DirectoryStorage) -> None:
        super().__init__(path, fingerprint)
        self._storage = storage
        self._files = storage.entries(fingerprint)
        self._header: Header | None = None
        self._blocks: list[_RecordedBlock] = []

    @property
    def _own_files(self) -> dict[str, os.stat_result]:
        """The files of the tier."""
        return {
            name: status for name, status in self._files.items() if stat.S_ISREG(status.st_mode) and is_block_file(name)
        }

    def inspect(self) -> None:
        """Completes the report."""
        self.identity = read_identity(self._storage, self.fingerprint)
        header, problem = None, ""
        try:
            with self._opened_index() as file:
                header = self._read_header(file)
                num_records = (file.size() - HEADER_BYTES) // RECORD_BYTES
                # A file can claim any size: only the slots of slabs and the bytes that it takes bound the work.
                most = max(self._room(header)[0], file.allocated_bytes() // RECORD_BYTES)
                blocks, num_damaged = _read_blocks(file, header, min(num_records, most))
                if num_damaged:
                    # A server may have been writing those records.
                    blocks, num_damaged = _read_blocks(file, header, min(num_records, most))
        except FormatError as error:
            problem = f"its blocks are lost: {error}"
        except OSError as error:
            problem = f"its blocks are lost: the index cannot be read ({error.strerror})"
        # After the index: a slab exists before its records do.
        self._files = {}
        # A server may have removed the folder.
        with suppress(FileNotFoundError):
            self._files = self._storage.entries(self.fingerprint)
        own = self._own_files
        self.allocated_bytes = sum(status.st_blocks * 512 for status in own.values())
        if len(own) < len(self._files):
            self.findings.append(_not_ours([name for name in self._files if name not in own]))
        if problem or header is None:
            self.is_lost = True
            self.findings.append(problem)
        else:
            self._header = header
            self._count(header, num_records, blocks, num_damaged)

    def _opened_index(self) -> closing[StoredFile]:
        return closing(self._storage.open(self.fingerprint, INDEX_NAME))

    def _read_header(self, file: StoredFile) -> Header:
        header = Header.unpack(read_at(file, 0, HEADER_BYTES))
        if header.fingerprint != self.fingerprint:
            raise FormatError("the index belongs to another fingerprint")
        return header

    def _room(self, header: Header) -> tuple[int, str]:
        """Returns how many slots the slabs have, up to the first that is missing or too short, and its name."""
        files, num_slots, number = self._own_files, 0, 0
        while (name := slab_name(number)) in files:
            in_slab = min(files[name].st_size // header.block_bytes, header.slots_per_slab)
            num_slots, number = num_slots + in_slab, number + 1
            if in_slab < header.slots_per_slab:
                break
        return num_slots, name

    def _count(self, header: Header, num_records: int, blocks: Sequence[_RecordedBlock], num_damaged: int) -> None:
        """Adds numbers of blocks to the report, and keeps the blocks that a server would find."""
        self.block_bytes, self.transient = header.block_bytes, header.transient
        self.num_damaged_records = num_damaged
        if num_damaged:
            self.findings.append(f"{counted(num_damaged, 'damaged record')} in the index")
        self.capacity_blocks, last_slab = self._room(header)
        if num_records < self.capacity_blocks:
            self.findings.append(
                f"the index ends early: it has records of {num_records:,} of {self.capacity_blocks:,} slots"
            )
        self._blocks = [block for block in blocks if block.slot < self.capacity_blocks]
        self.num_blocks, self.num_lost_blocks = len(self._blocks), len(blocks) - len(self._blocks)
        if self.num_lost_blocks:
            what = "too short" if last_slab in self._own_files else "missing"
            lost = counted(self.num_lost_blocks, "block")
            self.findings.append(f"{last_slab} is {what}: {lost} lost, in it or after it")
        times = [block.stored_at for block in self._blocks]
        self.oldest, self.newest = min(times, default=None), max(times, default=None)

    def verify(self, result: Verification, advance: Callable[[int], None]) -> None:
        """Reads every block and adds to ``result``."""
        if self._header is None:
            return
        buffer = aligned_buffer(self._header.block_bytes)
        ranks = np.split(buffer, np.cumsum(self._header.slot_bytes)[:-1])
        for block in self._blocks:
            self._verify_block(block, self._header, ranks, result)
            advance(len(buffer))

    def _verify_block(
        self, block: _RecordedBlock, header: Header, ranks: Sequence[ByteArray], result: Verification
    ) -> None:
        """Reads the block into ``ranks``, one buffer per rank."""
        for _ in range(TRIES):
            try:
                problem = "" if self._is_sound(block, header, ranks) else "its checksum is wrong"
            except FileNotFoundError:
                # A server has removed the slab to make room.
                break
            except OSError as error:
                problem = f"it cannot be read ({error.strerror})"
            now = self._look_again(block.slot, header) if problem else block
            if now is None:
                break
            if now == block:
                result.num_blocks += 1
                result.nbytes += header.block_bytes
                if problem:
                    result.bad.append(BadBlock(self.path, self.fingerprint, block.slot, block.key.hex(), problem))
                return
            block = now
        result.num_changed += 1

    def _is_sound(self, block: _RecordedBlock, header: Header, ranks: Sequence[ByteArray]) -> bool:
        """Raises OSError if the block cannot be read, FileNotFoundError if its slot does not exist any more."""
        number, offset = header.place(block.slot)
        # Past the page cache: the bytes on the medium count, and the server needs the memory.
        with closing(self._storage.open(self.fingerprint, slab_name(number), direct=True)) as file:
            if file.read(ranks, offset) < header.block_bytes:
                raise FileNotFoundError
        return payload_checksum(header, block.key, ranks) == block.checksum

    def _look_again(self, slot: int, header: Header) -> _RecordedBlock | None:
        """Returns the block that is in ``slot`` now."""
        with suppress(FormatError, OSError), self._opened_index() as file:
            if self._read_header(file) == header:
                record = read_at(file, record_offset(slot), RECORD_BYTES)
                return next(_blocks(parse_records(header, record, slot)), None)
        return None

    def remove(self, result: Cleared) -> None:
        """Removes the files, the index first: the next server reclaims slabs without one."""
        own = self._own_files
        result.left += [f"{self.path}/{name}" for name in self._files if name not in own]
        for name in sorted(own, key=lambda name: (name != INDEX_NAME, name)):
            self._storage.remove(self.fingerprint, name)
            result.nbytes += own[name].st_blocks * 512
            result.num_files += 1
        with suppress(OSError):
            # The folder is not empty: ``result.left`` says why.
            self._storage.remove_folder(self.fingerprint)
        result.fingerprints.append(self.fingerprint)


class _RecordedBlock(NamedTuple):
    """A slot's block according to its record."""

    slot: int
    key: OffloadKey
    sequence: int
    checksum: int
    stored_at: int


def _read_blocks(file: StoredFile, header: Header, num_records: int) -> tuple[list[_RecordedBlock], int]:
    """Returns all blocks of an index in the order of the slots, of a key that appears twice the newer one, like a
    server; and the number of damaged records. Raises OSError."""
    newest: dict[OffloadKey, _RecordedBlock] = {}
    num_damaged = 0
    for first in range(0, num_records, RECORDS_AT_ONCE):
        entries = read_piece(file, header, first, num_records)
        num_damaged += entries.num_damaged
        for block in _blocks(entries):
            if block.key not in newest or newest[block.key].sequence <= block.sequence:
                newest[block.key] = block
    return sorted(newest.values()), num_damaged


def _blocks(entries: Entries) -> Iterator[_RecordedBlock]:
    columns = (entries.records[name].tolist() for name in ("sequence", "payload_checksum", "stored_at"))
    return map(_RecordedBlock, entries.slots.tolist(), entries.keys, *columns)


def _not_ours(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"not kvoffload's: {', '.join(map(repr, names[:MAX_NAMES]))}{more}"

"""Offline tools for the directory of a disk tier or of a shared directory tier: inspect it, verify its blocks, clear
it.

Inspecting and verifying change nothing and work beside a running server: the record of a block that seems wrong is read
again, since the server may have replaced the block in between. Nothing that is read is trusted, and no symbolic link is
followed.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvoffload.abc import ByteArray, KVOffloadError, OffloadKey
from kvoffload.tiers.disk.directory import LOCK_NAME, DirectoryStorage
from kvoffload.tiers.disk.format import (
    ENGINE_FOLDER,
    HEADER_BYTES,
    INDEX_NAME,
    RECORD_BYTES,
    Entries,
    FormatError,
    Header,
    Records,
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
from kvoffload.tiers.shared_dir.seats import HEARTBEAT_NAME, SILENT_S, SeatState, look, seat_number
from kvoffload.units import counted

SILENT = "silent"
"""The state of a seat whose owner has neither ended nor written its heartbeat for SILENT_S."""

Progress = Callable[[int, int], None]
"""Is called with the bytes of blocks that were read so far, and that are to be read in all."""


class InspectError(KVOffloadError):
    """A directory cannot be inspected or cleared, for the reason that the message gives."""


@dataclass(frozen=True, slots=True)
class BadBlock:
    """A block that fails its check. A server would not load it. ``key``: in hexadecimal."""

    slot: int
    key: str
    problem: str


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
    oldest: int | None = None
    """When the oldest block was stored, in seconds since 1970."""
    newest: int | None = None
    transient: bool = False
    """Whether the blocks become invalid with the end of their server, because its weights changed while it ran."""
    is_lost: bool = False
    """Whether the index cannot be used: a server would not find a block, and would start anew."""
    identity: dict[str, str] = field(default_factory=dict)
    """The inputs of the fingerprint in words, from the server that wrote it: see ``kvoffload.tiers.identity``."""
    num_verified: int = 0
    """Blocks that were read and compared with their checksums."""
    num_changed: int = 0
    """Blocks that a running server replaced or removed before they could be read."""
    bad: list[BadBlock] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)


@dataclass(slots=True)
class PartReport:
    """A directory that one server owns at a time: the inspected one (``path`` "") or the folder of an engine or of a
    writer in it."""

    path: str
    in_use: bool = False
    pid: int | None = None
    """The process that uses it, as its lock or heartbeat says."""
    host: str = ""
    """The machine of the latest server, as the heartbeat says; in a shared directory only."""
    state: str = ""
    """A SeatState, or SILENT; in a shared directory only."""
    folders: Sequence[FolderReport] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Cleared:
    """Removed files. ``left``: files in the tier's folders that are not kvoffload's, and stay."""

    nbytes: int = 0
    """Bytes of the medium."""
    num_files: int = 0
    fingerprints: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def inspect(directory: Path, verify: Progress | None = None) -> list[PartReport]:
    """Describes the blocks in ``directory`` and in the engines' folders below it. With ``verify``, reads every block
    and compares it with its checksum. Raises InspectError if it is not the directory of a disk tier."""
    with _opened(directory) as parts:
        for part in parts:
            part.inspect()
        if verify is not None:
            folders = [folder for part in parts for folder in part.folders]
            done, total = 0, sum(folder.num_blocks * folder.block_bytes for folder in folders)
            verify(done, total)
            for folder in folders:
                for nbytes in folder.verify():
                    done += nbytes
                    verify(done, total)
    return list(parts)


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
            inner += sorted(filter(_is_seat, names), key=lambda name: seat_number(name) or 0)
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


def _is_seat(name: str) -> bool:
    return seat_number(name) is not None


class _OwnedPart(PartReport):
    """A directory that one server owns at a time, open."""

    folders: list[_FingerprintFolder]

    def __init__(self, path: str, storage: DirectoryStorage) -> None:
        super().__init__(path)
        self.storage = storage

    def inspect(self) -> None:
        """Completes the report."""
        try:
            with closing(DirectoryStorage(self.storage.path, as_is=True)) as taken:
                owner = taken.take_lock(shared=True)
            self.in_use, self.pid = owner is not None, None if owner is None else owner.pid
        except OSError as error:
            self.findings.append(f"{LOCK_NAME} cannot be read ({error.strerror})")
        if _is_seat(self.path) and HEARTBEAT_NAME in self.storage.entries(""):
            self._look_at_heartbeat()
        self.find_folders()
        for folder in self.folders:
            folder.inspect()

    def _look_at_heartbeat(self) -> None:
        seen = None
        with suppress(OSError):
            seen = look(self.storage)
        found = None if seen is None else seen.heartbeat
        if seen is None or found is None:
            self.findings.append("the heartbeat cannot be read")
            return
        self.host, self.state = found.host, str(found.state)
        if found.state is SeatState.SERVING:
            # Locks may be known to one machine only. The ages are differences of the clocks of storage and machine.
            self.in_use = self.in_use or time.time() - seen.modified < SILENT_S
            self.pid = found.pid
            self.state = self.state if self.in_use else SILENT

    def find_folders(self) -> None:
        """Opens the folders of the fingerprints."""
        for name in filter(is_fingerprint, self.storage.entries("")):
            try:
                self.folders.append(_FingerprintFolder(f"{self.path}/{name}".lstrip("/"), name, self.storage))
            except FileNotFoundError:
                continue
            except OSError as error:
                self.findings.append(f"{name} cannot be opened: {error.strerror}")


class _FingerprintFolder(FolderReport):
    """The folder of one fingerprint in ``storage``."""

    def __init__(self, path: str, fingerprint: str, storage: DirectoryStorage) -> None:
        super().__init__(path, fingerprint)
        self._storage = storage
        self._files = storage.entries(fingerprint)
        self._header: Header | None = None
        self._blocks: list[Entries] = []
        """The blocks that a server would find, in pieces."""

    @property
    def _own_files(self) -> dict[str, os.stat_result]:
        return {
            name: status for name, status in self._files.items() if stat.S_ISREG(status.st_mode) and is_block_file(name)
        }

    def inspect(self) -> None:
        """Completes the report."""
        self.identity = read_identity(self._storage, self.fingerprint)
        try:
            with self._opened_index() as file:
                self._header = header = self._read_header(file)
                # A file can claim any size: only the slots of slabs and the bytes that it takes bound the work.
                most = max(self._num_slots(header), file.allocated_bytes() // RECORD_BYTES)
                num_records = min(most, (file.size() - HEADER_BYTES) // RECORD_BYTES)
                starts = range(0, num_records, RECORDS_AT_ONCE)
                self._blocks = [read_piece(file, header, first, num_records) for first in starts]
        except FormatError as error:
            self._lose(str(error))
        except OSError as error:
            self._lose(f"the index cannot be read ({error.strerror})")
        # After the index: a slab exists before its records do. A server may have removed the folder.
        self._files = {}
        with suppress(FileNotFoundError):
            self._files = self._storage.entries(self.fingerprint)
        self.allocated_bytes = sum(status.st_blocks * 512 for status in self._own_files.values())
        if self._header is not None and not self.is_lost:
            self._count(self._header)

    def _lose(self, why: str) -> None:
        self.is_lost = True
        self.findings.append(f"its blocks are lost: {why}")

    def _opened_index(self) -> closing[StoredFile]:
        return closing(self._storage.open(self.fingerprint, INDEX_NAME))

    def _read_header(self, file: StoredFile) -> Header:
        header = Header.unpack(read_at(file, 0, HEADER_BYTES))
        if header.fingerprint != self.fingerprint:
            raise FormatError("the index belongs to another fingerprint")
        return header

    def _num_slots(self, header: Header) -> int:
        """Returns how many slots the slabs have, up to the first that is missing or too short."""
        files, num_slots, number = self._own_files, 0, 0
        while num_slots == number * header.slots_per_slab and slab_name(number) in files:
            in_slab = files[slab_name(number)].st_size // header.block_bytes
            num_slots, number = num_slots + min(in_slab, header.slots_per_slab), number + 1
        return num_slots

    def _count(self, header: Header) -> None:
        """Completes the report with the blocks, and leaves out those that have no slot."""
        self.block_bytes, self.transient = header.block_bytes, header.transient
        num_damaged = sum(piece.num_damaged for piece in self._blocks)
        if num_damaged:
            self.findings.append(f"{counted(num_damaged, 'damaged record')} in the index")
        num_slots, num_found = self._num_slots(header), sum(len(piece.keys) for piece in self._blocks)
        self._blocks = [_within(piece, num_slots) for piece in self._blocks]
        self.num_blocks = sum(len(piece.keys) for piece in self._blocks)
        if self.num_blocks < num_found:
            slab, lost = slab_name(num_slots // header.slots_per_slab), counted(num_found - self.num_blocks, "block")
            self.findings.append(f"{slab} is missing or too short: {lost} lost, in it or after it")
        times = [time for piece in self._blocks for time in piece.records["stored_at"].tolist()]
        self.oldest, self.newest = min(times, default=None), max(times, default=None)

    def verify(self) -> Iterator[int]:
        """Reads every block. Yields the bytes of each when it is done."""
        if self._header is None:
            return
        buffer = aligned_buffer(self._header.block_bytes)
        ranks = np.split(buffer, np.cumsum(self._header.slot_bytes)[:-1])
        for piece in self._blocks:
            for i, (key, slot) in enumerate(zip(piece.keys, piece.slots.tolist(), strict=True)):
                problem = self._problem_of(key, slot, piece.records[i], ranks)
                if problem is None:
                    self.num_changed += 1
                else:
                    self.num_verified += 1
                    self.bad += [BadBlock(slot, key.hex(), problem)] if problem else []
                yield len(buffer)

    def _problem_of(self, key: OffloadKey, slot: int, record: Records, ranks: Sequence[ByteArray]) -> str | None:
        """Reads a block into ``ranks``, one buffer per rank. Returns what is wrong with it, "" for nothing, or None if
        it is not there any more."""
        header = self._header
        assert header is not None
        number, offset = header.place(slot)
        try:
            # Past the page cache: the bytes on the medium count, and the server needs the memory.
            with closing(self._storage.open(self.fingerprint, slab_name(number), direct=True)) as file:
                is_whole = file.read(ranks, offset) == header.block_bytes
        except FileNotFoundError:
            # A server has removed the slab to make room.
            return None
        except OSError as error:
            problem = f"it cannot be read ({error.strerror})"
        else:
            if not is_whole:
                return None
            if payload_checksum(header, key, ranks) == int(record["payload_checksum"]):
                return ""
            problem = "its checksum is wrong"
        with suppress(FormatError, OSError), self._opened_index() as index:
            now = parse_records(header, read_at(index, record_offset(slot), RECORD_BYTES), slot)
            if self._read_header(index) == header and now.keys and now.records[0] == record:
                return problem
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


def _within(entries: Entries, num_slots: int) -> Entries:
    """Returns the blocks in the first ``num_slots`` slots, in the order of the slots."""
    order = np.argsort(entries.slots)
    chosen = order[entries.slots[order] < num_slots]
    keys = [entries.keys[i] for i in chosen.tolist()]
    return Entries(keys, entries.slots[chosen], entries.records[chosen])

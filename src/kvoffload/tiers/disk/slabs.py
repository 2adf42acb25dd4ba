"""The disk tier's files within their budget: those of one fingerprint, and what others have left in the directory."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvoffload.abc import ByteArray, ConfigError
from kvoffload.host.pool import SLOT_ALIGNMENT
from kvoffload.tiers.disk.format import (
    HEADER_BYTES,
    INDEX_NAME,
    MAX_BLOCK_BYTES,
    MAX_RANKS,
    MAX_SEQUENCE,
    RECENCY_BYTES,
    RECENCY_NAME,
    RECORD_BYTES,
    Entries,
    FormatError,
    Header,
    is_block_file,
    is_fingerprint,
    parse_records,
    record_offset,
    slab_name,
    slab_number,
)
from kvoffload.tiers.disk.storage import SETTING_ERRORS, Storage, StoredFile
from kvoffload.units import format_bytes

logger = logging.getLogger(__name__)

SLAB_BYTES = 1 << 30
NOT_A_FILE = (errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENXIO, errno.EPERM)
"""What opening a symbolic link, a directory, a pipe, another user's file, or nothing gives."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FIXED_BYTES = 64 << 10
"""Set aside for folders, lock, header, and what the file system needs to find the index."""
SLAB_OVERHEAD_BYTES = 64 << 10
EXTENT_BYTES = 24
"""Set aside a slot: written one at a time, slots can end as an extent each, 12 bytes in blocks that are half full."""
MAPPED_BYTES = 1020
"""A file system without extents takes a byte for so many: 4 for each block of 4 KiB, and those blocks' own blocks."""
FOLDER_BYTES = 4096
WRITE_TRIES = 2
_RECORDS_AT_ONCE = 1 << 19

_T = TypeVar("_T")


def slot_cost(block_bytes: int) -> int:
    """An upper bound of what the medium has to give for one slot."""
    return block_bytes + RECORD_BYTES + RECENCY_BYTES + max(EXTENT_BYTES, block_bytes // MAPPED_BYTES)


def check_capacity(capacity_bytes: int, possible: int) -> None:
    """Raises ConfigError if ``capacity_bytes`` is more than the file system's ``possible`` bytes."""
    if capacity_bytes > possible:
        raise ConfigError(
            f"disk_bytes={capacity_bytes} ({format_bytes(capacity_bytes)}): the file system of disk_dir can give only "
            f"{format_bytes(possible)}; set disk_bytes to {format_bytes(possible * 9 // 10)} or less"
        )


@dataclass(slots=True)
class _Foreign:
    """Another fingerprint's folder. ``pieces``: name and bytes of each file, the one to be removed first last."""

    folder: str
    modified: float
    pieces: list[tuple[str, int]]


class SlabFiles:
    """The slots of one fingerprint. Those of whole slabs in ``[0, num_allocated)`` exist; ``grow`` adds a slab.

    ``used_bytes``, which what is allocated in the directory never exceeds, never exceeds ``capacity_bytes``: a new
    slab replaces slabs of other fingerprints if it must, the longest unused fingerprint's last slab first. Room for
    ``num_slots`` is there by construction; files that are not the tier's were counted at the start.

    The constructor takes the directory's lock, and drops what is of another layout or beyond the budget. It raises
    ConfigError if the directory cannot be used or the budget cannot be right, and OSError if the medium fails; then
    ``storage`` is closed. ``read_only``: the medium is, and its blocks are served as they are. ``is_short``: it could
    not give ``capacity_bytes`` at the start. Either is logged once. ``header``, when it is assigned to, is the new
    header at once, and on disk after ``write_header``.
    """

    def __init__(
        self,
        storage: Storage,
        fingerprint: str,
        slot_bytes: Sequence[int],
        capacity_bytes: int,
        slab_bytes: int,
        new_generation: Callable[[], int],
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_allocated = 0
        self.read_only = storage.read_only
        self.is_short = False
        self._storage = storage
        self._folder = fingerprint
        self._slabs: list[StoredFile] = []
        self._open_files: list[StoredFile] = []
        self._foreign: list[_Foreign] = []
        self._foreign_bytes = self._stray_bytes = 0
        self._recency: StoredFile | None = None
        self._is_new = self._is_first_use = True
        try:
            _check_slots(slot_bytes)
            if not is_fingerprint(fingerprint):
                raise ConfigError(f"fingerprint={fingerprint!r}: must be 64 hexadecimal digits")
            per_slab = max(1, slab_bytes // sum(slot_bytes))
            self.header = Header(fingerprint, tuple(slot_bytes), per_slab, new_generation())
            if self._slots_within(capacity_bytes) < 1:
                raise ConfigError(
                    f"disk_bytes={capacity_bytes} ({format_bytes(capacity_bytes)}): not enough for one block; set "
                    f"it to at least {format_bytes(self.bytes_of(1))}, better a few hundred times that"
                )
            storage.lock()
            self._open()
        except OSError as error:
            self.close()
            if error.errno not in SETTING_ERRORS:
                raise
            raise ConfigError(
                f"disk_dir: cannot be used ({error.strerror or error}); name a directory on a local file system that "
                "this user can write to"
            ) from error
        except BaseException:
            self.close()
            raise

    def _slots_within(self, capacity_bytes: int) -> int:
        """The most slots whose ``bytes_of`` are not more."""
        whole, rest = divmod(capacity_bytes - FIXED_BYTES, self.bytes_of(self.header.slots_per_slab) - FIXED_BYTES)
        rest_slots = max(0, rest - SLAB_OVERHEAD_BYTES) // slot_cost(self.header.block_bytes)
        return max(0, whole * self.header.slots_per_slab + rest_slots)

    def bytes_of(self, num_slots: int) -> int:
        """An upper bound of what the medium has to give for so many slots."""
        slabs = -(-num_slots // self.header.slots_per_slab)
        return FIXED_BYTES + slabs * SLAB_OVERHEAD_BYTES + num_slots * slot_cost(self.header.block_bytes)

    @property
    def used_bytes(self) -> int:
        return self.bytes_of(self.num_allocated) + self._foreign_bytes + self._stray_bytes

    # The start.

    def _open(self) -> None:
        self._find_foreign()
        self._count_strays()
        self._open_slabs()
        if self.read_only:
            self._open_read_only()
            return
        self._check_capacity()
        self.make_room(0)
        self._with_room(self._open_index)
        self._written: Header | None = None
        try:
            self.write_header()
        except OSError as error:
            # A file system that copies what it overwrites. It is tried again.
            if error.errno not in NO_SPACE:
                raise

    def _open_read_only(self) -> None:
        if not self.num_allocated:
            raise OSError(errno.EROFS, "the file system is read-only, and holds no blocks of this model")
        self._index = self._keep(self._storage.open(self._folder, INDEX_NAME))
        self._written = self.header
        with suppress(OSError):
            self._recency = self._keep(self._storage.open(self._folder, RECENCY_NAME))
        # What is beyond the budget cannot be removed.
        self.capacity_bytes = max(self.capacity_bytes, self.used_bytes)
        logger.warning(
            "kvoffload: the file system of disk_dir is read-only: the blocks that are on it are served, and nothing is "
            "written. Mount it for writing and start again"
        )

    def _open_index(self) -> None:
        self._storage.make_folder(self._folder)
        self._index = self._keep(self._storage.open(self._folder, INDEX_NAME, create=True))
        if self._is_new:
            self._index.resize(0)
        self._index.resize(record_offset(self.num_allocated))
        try:
            self._recency = self._keep(self._storage.open(self._folder, RECENCY_NAME, create=True))
            self._recency.resize(self.num_allocated * RECENCY_BYTES)
        except OSError as error:
            # Blocks are found without it.
            if error.errno not in NO_SPACE or not self.num_allocated:
                raise
            self._recency = None

    def _find_foreign(self) -> None:
        for folder in self._storage.folders():
            if is_fingerprint(folder) and folder != self._folder:
                try:
                    names = [name for name in self._storage.files(folder) if is_block_file(name)]
                except PermissionError as error:
                    logger.warning("kvoffload: disk_dir: %s; it is left alone", error.strerror)
                    continue
                allocated = {name: self._allocated(folder, name) for name in names}
                # What cannot be opened counts as somebody else's.
                sizes = {name: nbytes for name, nbytes in allocated.items() if nbytes is not None}
                modified = self._storage.modified(folder, INDEX_NAME) if INDEX_NAME in sizes else 0.0
                index = [(INDEX_NAME, sizes.pop(INDEX_NAME, 0) + FOLDER_BYTES)]
                # Recency before the slabs, which have numbers.
                rest = sorted(sizes.items(), key=lambda piece: slab_number(piece[0]) or -1)
                self._foreign.append(_Foreign(folder, modified, index + rest))
        self._foreign.sort(key=lambda foreign: foreign.modified)
        self._is_first_use = not self._foreign
        self._foreign_bytes = sum(nbytes for foreign in self._foreign for _, nbytes in foreign.pieces)

    def _count_strays(self) -> None:
        """What others have put into the directory takes of the budget, and is left alone."""
        counted = {(foreign.folder, name) for foreign in self._foreign for name, _ in foreign.pieces}
        self._stray_bytes = self._storage.held_bytes(
            lambda folder, name: (folder, name) in counted or (folder == self._folder and is_block_file(name))
        )
        self.num_slots = self._slots_within(self.capacity_bytes - self._stray_bytes)
        if self.num_slots < 1:
            raise OSError(
                errno.ENOSPC,
                f"files in disk_dir that are not kvoffload's take {format_bytes(self._stray_bytes)}, which leaves no "
                f"room for a block in disk_bytes={self.capacity_bytes}; remove them or set disk_bytes higher",
            )

    def _allocated(self, folder: str, name: str) -> int | None:
        """Bytes of the medium that the file takes; None if it cannot be opened."""
        try:
            file = self._storage.open(folder, name)
        except OSError:
            return None
        try:
            return file.allocated_bytes()
        finally:
            file.close()

    def _open_slabs(self) -> None:
        """Opens the slabs that can go on to be used, and removes everything else."""
        if self._folder not in self._storage.folders():
            return
        names = [name for name in self._storage.files(self._folder) if is_block_file(name)]
        self._is_first_use &= not names
        if INDEX_NAME in names:
            self._read_header()
        for number in range(0 if self._is_new else -(-self.num_slots // self.header.slots_per_slab)):
            if slab_name(number) not in names or not self._open_slab(number):
                break
        kept = {slab_name(number) for number in range(len(self._slabs))}
        if not self._is_new:
            kept |= {INDEX_NAME, RECENCY_NAME}
        for name in names:
            if name not in kept and not self.read_only:
                self._storage.remove(self._folder, name)

    def _read_header(self) -> None:
        data = np.zeros(HEADER_BYTES, dtype=np.uint8)
        try:
            index = self._storage.open(self._folder, INDEX_NAME)
            try:
                found = Header.unpack(data[: index.read([data], 0)])
            finally:
                index.close()
        except (OSError, FormatError) as error:
            if isinstance(error, OSError) and error.errno not in NOT_A_FILE:
                # What cannot be read today may be well tomorrow: nothing is removed for that.
                raise
            logger.warning("kvoffload: the disk tier's blocks cannot be used (%s); starting anew", error)
            return
        layout = replace(self.header, generation=found.generation, transient=found.transient)
        if layout != found:
            logger.warning("kvoffload: the disk tier's blocks were stored by another layout; starting anew")
            return
        if found.transient and self.read_only:
            return
        self._is_new = False
        if not found.transient:
            self.header = found

    def _open_slab(self, number: int) -> bool:
        """Whether the slab is whole, so that the next one may be used too."""
        first = number * self.header.slots_per_slab
        most = min(self.header.slots_per_slab, self.num_slots - first)
        try:
            file = self._keep(self._storage.open(self._folder, slab_name(number), direct=True))
        except OSError as error:
            if isinstance(error, PermissionError):
                logger.warning("kvoffload: disk_dir: %s; its blocks are not used", error.strerror)
            if error.errno in NOT_A_FILE:
                return False
            # What cannot be opened today may be well tomorrow: nothing is removed for that.
            raise
        self._slabs.append(file)
        there = min(file.size() // self.header.block_bytes, most)
        if not self.read_only:
            file.resize(there * self.header.block_bytes)
        self.num_allocated = first + there
        return there == self.header.slots_per_slab

    def _check_capacity(self) -> None:
        """A budget beyond the medium is a mistake where a tier begins. Where one has been, others have filled the
        medium since then: what it still gives is used."""
        possible = self._storage.free_bytes() + self.used_bytes
        self.is_short = self.capacity_bytes > possible
        if self._is_first_use:
            check_capacity(self.capacity_bytes, possible)
        elif self.is_short:
            logger.warning(
                "kvoffload: disk_bytes=%d (%s): the file system of disk_dir can give only %s of that now; the disk "
                "tier uses what it has, and grows when there is space",
                self.capacity_bytes,
                format_bytes(self.capacity_bytes),
                format_bytes(possible),
            )

    def _with_room(self, do: Callable[[], _T]) -> _T:
        """``do``, again as long as the medium is full and a file of another fingerprint can be removed."""
        while True:
            try:
                return do()
            except OSError as error:
                if error.errno not in NO_SPACE or not self._foreign:
                    raise
                self._remove_oldest()

    def load(self) -> Iterator[Entries]:
        """The blocks that the index knows, in pieces. What cannot be read is no block."""
        for first in range(0, self.num_allocated, _RECORDS_AT_ONCE):
            count = min(_RECORDS_AT_ONCE, self.num_allocated - first)
            data = np.zeros(count * RECORD_BYTES, dtype=np.uint8)
            try:
                there = self._index.read([data], record_offset(first))
            except OSError as error:
                logger.warning("kvoffload: the disk tier's index cannot be read in full (%s)", error)
                continue
            yield parse_records(self.header, data[:there], first)

    def load_recency(self) -> npt.NDArray[np.int64]:
        """When each slot was used last, as a sequence number, as far as it was written down: 0 where it was not."""
        data = np.zeros(self.num_allocated * RECENCY_BYTES, dtype=np.uint8)
        try:
            if self._recency is not None:
                self._recency.read([data], 0)
        except OSError as error:
            logger.warning("kvoffload: the disk tier's order of eviction cannot be read (%s)", error)
        found = data.view("<u8")
        return np.where(found <= MAX_SEQUENCE, found, 0).astype(np.int64)

    # While it runs.

    @property
    def header_is_due(self) -> bool:
        return self._written is not self.header

    def write_header(self) -> None:
        while self.header_is_due:
            header = self.header
            _write_all(self._index, [header.pack()], 0)
            self._written = header

    def write_records(self, first_slot: int, records: ByteArray) -> None:
        _write_all(self._index, [records], record_offset(first_slot))

    def write_recency(self, first_slot: int, last_use: npt.NDArray[np.int64]) -> None:
        """Of the slots from ``first_slot`` on."""
        if self._recency is not None:
            last_use = last_use[: max(0, self.num_allocated - first_slot)]
            values = np.minimum(last_use, MAX_SEQUENCE).astype("<u8")
            _write_all(self._recency, [values.view(np.uint8)], first_slot * RECENCY_BYTES)

    def write(self, slot: int, buffers: Sequence[ByteArray]) -> None:
        """From ``slot`` on, within its slab. Raises OSError if not every byte was written."""
        slab, offset = self.header.place(slot)
        _write_all(self._slabs[slab], buffers, offset)

    def read(self, slot: int, buffers: Sequence[ByteArray]) -> None:
        """From ``slot`` on, within its slab. Raises OSError if not every byte was read."""
        slab, offset = self.header.place(slot)
        size = sum(buffer.size for buffer in buffers)
        done = self._slabs[slab].read(buffers, offset)
        if done != size:
            raise OSError(f"only {done} of {size} bytes were read")

    def grow(self) -> int:
        """Allocates the next slab, or the rest of the last. Returns ``num_allocated``. Raises OSError, and then has no
        more slots to use than before. Not to be called again before it has returned."""
        return self._with_room(self._grow)

    def _grow(self) -> int:
        old, per_slab = self.num_allocated, self.header.slots_per_slab
        number = old // per_slab
        new = min((number + 1) * per_slab, self.num_slots)
        self.make_room(self.bytes_of(new) - self.bytes_of(old))
        if number == len(self._slabs):
            name = slab_name(number)
            self._slabs.append(self._keep(self._storage.open(self._folder, name, create=True, direct=True)))
        self.num_allocated = new
        try:
            self._slabs[number].resize((new - number * per_slab) * self.header.block_bytes)
            self._index.resize(record_offset(new))
            if self._recency is not None:
                self._recency.resize(new * RECENCY_BYTES)
        except OSError:
            # If this fails too, it counts as allocated.
            with suppress(OSError):
                self._slabs[number].resize((old - number * per_slab) * self.header.block_bytes)
                self._index.resize(record_offset(old))
                self.num_allocated = old
            raise
        return new

    def make_room(self, nbytes: int) -> None:
        """Removes other fingerprints' files until ``nbytes`` more may be taken."""
        while self.used_bytes + nbytes > self.capacity_bytes and self._foreign:
            self._remove_oldest()

    def _remove_oldest(self) -> None:
        """Removes a file of the longest unused of the other fingerprints."""
        oldest = self._foreign[0]
        name, size = oldest.pieces[-1]
        with suppress(FileNotFoundError):
            self._storage.remove(oldest.folder, name)
        oldest.pieces.pop()
        self._foreign_bytes -= size
        if not oldest.pieces:
            self._foreign.pop(0)
            # Not if somebody else keeps files there.
            with suppress(OSError):
                self._storage.remove_folder(oldest.folder)

    def _keep(self, file: StoredFile) -> StoredFile:
        self._open_files.append(file)
        return file

    def close(self) -> None:
        """Closes the files and gives up the lock. May be called twice."""
        for file in self._open_files:
            file.close()
        self._storage.close()


def _check_slots(slot_bytes: Sequence[int]) -> None:
    if not 1 <= len(slot_bytes) <= MAX_RANKS:
        raise ConfigError(f"{len(slot_bytes)} pools: the disk tier serves 1 to {MAX_RANKS} ranks")
    if any(size < 1 or size % SLOT_ALIGNMENT for size in slot_bytes):
        raise ConfigError(f"slot bytes {tuple(slot_bytes)}: must be multiples of {SLOT_ALIGNMENT}")
    if sum(slot_bytes) > MAX_BLOCK_BYTES:
        raise ConfigError(
            f"blocks of {format_bytes(sum(slot_bytes))}: the disk tier takes at most {format_bytes(MAX_BLOCK_BYTES)}; "
            "set a smaller block size"
        )


def _write_all(file: StoredFile, buffers: Sequence[ByteArray], offset: int) -> None:
    """Raises OSError if not every byte was written. What comes short is tried again, which tells why."""
    size = sum(buffer.size for buffer in buffers)
    # O_DIRECT goes on at whole pages only.
    unit = SLOT_ALIGNMENT if size % SLOT_ALIGNMENT == 0 else 1
    done = 0
    for _ in range(WRITE_TRIES):
        done += file.write(_without_head(buffers, done) if done else buffers, offset + done)
        if done == size:
            return
        done -= done % unit
    raise OSError(f"only {done} of {size} bytes were written")


def _without_head(buffers: Sequence[ByteArray], nbytes: int) -> list[ByteArray]:
    """``buffers`` but for their first ``nbytes``."""
    left = []
    for buffer in buffers:
        if nbytes < buffer.size:
            left.append(buffer[nbytes:])
        nbytes = max(0, nbytes - buffer.size)
    return left

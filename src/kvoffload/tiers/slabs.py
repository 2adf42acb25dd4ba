"""The disk tier's files within their budget: those of one fingerprint, and what others have left in the directory."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from kvoffload.base import ConfigError
from kvoffload.hostpool import SLOT_ALIGNMENT, ByteArray, format_bytes
from kvoffload.tiers.format import (
    HEADER_BYTES,
    INDEX_NAME,
    MAX_BLOCK_BYTES,
    MAX_RANKS,
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
from kvoffload.tiers.storage import Storage, StoredFile

logger = logging.getLogger(__name__)

SLAB_BYTES = 1 << 30
NOT_A_FILE = (errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENXIO)
"""What opening a symbolic link, a directory, a pipe, or nothing gives."""
FIXED_BYTES = 64 << 10
"""Set aside for folders, lock, header, and what the file system needs to find the index."""
SLAB_OVERHEAD_BYTES = 64 << 10
EXTENT_BYTES = 32
"""Set aside a slot: written one at a time, slots can end as an extent each, 12 bytes in blocks that are half full."""
FOLDER_BYTES = 4096
_RECORDS_AT_ONCE = 1 << 19


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
    ``num_slots`` is there by construction.

    The constructor takes the directory's lock, and drops what is of another layout or beyond the budget. It raises
    ConfigError if the directory cannot be used or the budget cannot be right. ``header``, when it is assigned to, is
    the new header at once, and on disk after ``write_header``.
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
        _check_slots(slot_bytes)
        if not is_fingerprint(fingerprint):
            raise ConfigError(f"fingerprint={fingerprint!r}: must be 64 hexadecimal digits")
        block_bytes = sum(slot_bytes)
        self.header = Header(fingerprint, tuple(slot_bytes), max(1, slab_bytes // block_bytes), new_generation())
        self.capacity_bytes = capacity_bytes
        self.num_slots = self._slots_within(capacity_bytes)
        if self.num_slots < 1:
            raise ConfigError(
                f"disk_bytes={capacity_bytes} ({format_bytes(capacity_bytes)}): not enough for one block; set it to at "
                f"least {format_bytes(self._bytes_of(1))}, better a few hundred times that"
            )
        self.num_allocated = 0
        self._storage = storage
        self._folder = fingerprint
        self._slabs: list[StoredFile] = []
        self._open_files: list[StoredFile] = []
        self._foreign: list[_Foreign] = []
        self._foreign_bytes = 0
        self._is_new = True
        try:
            storage.lock()
            self._open()
        except OSError as error:
            self.close()
            raise ConfigError(
                f"disk_dir: cannot be used ({error.strerror or error}); name a directory on a local file system that "
                "this user can write to"
            ) from error
        except ConfigError:
            self.close()
            raise

    def _slots_within(self, capacity_bytes: int) -> int:
        """The most slots whose ``_bytes_of`` are not more."""
        whole, rest = divmod(capacity_bytes - FIXED_BYTES, self._bytes_of(self.header.slots_per_slab) - FIXED_BYTES)
        return max(0, whole * self.header.slots_per_slab + max(0, rest - SLAB_OVERHEAD_BYTES) // self._slot_cost)

    def _bytes_of(self, num_slots: int) -> int:
        """An upper bound of what the medium has to give for so many slots."""
        slabs = -(-num_slots // self.header.slots_per_slab)
        return FIXED_BYTES + slabs * SLAB_OVERHEAD_BYTES + num_slots * self._slot_cost

    @property
    def _slot_cost(self) -> int:
        return self.header.block_bytes + RECORD_BYTES + EXTENT_BYTES

    @property
    def used_bytes(self) -> int:
        return self._bytes_of(self.num_allocated) + self._foreign_bytes

    # The start.

    def _open(self) -> None:
        self._find_foreign()
        self._open_slabs()
        self._check_capacity()
        self._make_room(0)
        self._storage.make_folder(self._folder)
        self._index = self._keep(self._storage.open(self._folder, INDEX_NAME, create=True))
        if self._is_new:
            self._index.resize(0)
        self._index.resize(record_offset(self.num_allocated))
        self._written: Header | None = None
        self.write_header()

    def _find_foreign(self) -> None:
        for folder in self._storage.folders():
            if is_fingerprint(folder) and folder != self._folder:
                names = [name for name in self._storage.files(folder) if is_block_file(name)]
                sizes = {name: self._allocated(folder, name) for name in names}
                modified = self._storage.modified(folder, INDEX_NAME) if INDEX_NAME in sizes else 0.0
                index = [(INDEX_NAME, sizes.pop(INDEX_NAME, 0) + FOLDER_BYTES)]
                slabs = sorted(sizes.items(), key=lambda piece: slab_number(piece[0]) or 0)
                self._foreign.append(_Foreign(folder, modified, index + slabs))
        self._foreign.sort(key=lambda foreign: foreign.modified)
        self._foreign_bytes = sum(nbytes for foreign in self._foreign for _, nbytes in foreign.pieces)

    def _allocated(self, folder: str, name: str) -> int:
        try:
            file = self._storage.open(folder, name)
        except OSError:
            return 0
        try:
            return file.allocated_bytes()
        finally:
            file.close()

    def _open_slabs(self) -> None:
        """Opens the slabs that can go on to be used, and removes everything else."""
        if self._folder not in self._storage.folders():
            return
        names = [name for name in self._storage.files(self._folder) if is_block_file(name)]
        if INDEX_NAME in names:
            self._read_header()
        for number in range(0 if self._is_new else -(-self.num_slots // self.header.slots_per_slab)):
            if slab_name(number) not in names or not self._open_slab(number):
                break
        kept = {INDEX_NAME, *(slab_name(number) for number in range(len(self._slabs)))}
        for name in names:
            if name not in kept:
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
            logger.warning("kvoffload: the disk tier's blocks cannot be used (%s); starting anew", error)
            if isinstance(error, OSError):
                self._storage.remove(self._folder, INDEX_NAME)
            return
        layout = replace(self.header, generation=found.generation, transient=found.transient)
        if layout != found:
            logger.warning("kvoffload: the disk tier's blocks were stored by another layout; starting anew")
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
            if error.errno in NOT_A_FILE:
                return False
            # What cannot be opened today may be well tomorrow: nothing is removed for that.
            raise
        self._slabs.append(file)
        there = min(file.size() // self.header.block_bytes, most)
        file.resize(there * self.header.block_bytes)
        self.num_allocated = first + there
        return there == self.header.slots_per_slab

    def _check_capacity(self) -> None:
        possible = self._storage.free_bytes() + self.used_bytes
        if self.capacity_bytes > possible:
            raise ConfigError(
                f"disk_bytes={self.capacity_bytes} ({format_bytes(self.capacity_bytes)}): the file system of disk_dir "
                f"can give only {format_bytes(possible)}; set disk_bytes to {format_bytes(possible * 9 // 10)} or less"
            )

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
        old, per_slab = self.num_allocated, self.header.slots_per_slab
        number = old // per_slab
        new = min((number + 1) * per_slab, self.num_slots)
        self._make_room(self._bytes_of(new) - self._bytes_of(old))
        if number == len(self._slabs):
            name = slab_name(number)
            self._slabs.append(self._keep(self._storage.open(self._folder, name, create=True, direct=True)))
        self.num_allocated = new
        try:
            self._slabs[number].resize((new - number * per_slab) * self.header.block_bytes)
            self._index.resize(record_offset(new))
        except OSError:
            # If this fails too, it counts as allocated.
            with suppress(OSError):
                self._slabs[number].resize((old - number * per_slab) * self.header.block_bytes)
                self.num_allocated = old
            raise
        return new

    def _make_room(self, nbytes: int) -> None:
        """Removes other fingerprints' files until ``nbytes`` more may be taken."""
        while self.used_bytes + nbytes > self.capacity_bytes and self._foreign:
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
    size = sum(buffer.size for buffer in buffers)
    done = file.write(buffers, offset)
    if done != size:
        raise OSError(f"only {done} of {size} bytes were written")

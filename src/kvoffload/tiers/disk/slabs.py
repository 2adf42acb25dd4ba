"""The disk tier's files: the slots of one fingerprint, within a budget for the whole directory."""

from __future__ import annotations

import errno
import itertools
import logging
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvoffload.abc import ByteArray, ConfigError, Slots
from kvoffload.host.pool import SLOT_ALIGNMENT
from kvoffload.tiers.disk.foreign import ForeignFolders
from kvoffload.tiers.disk.format import (
    EMPTY_RECORD,
    HEADER_BYTES,
    IDENTITY_NAME,
    INDEX_NAME,
    JOURNAL_NAME,
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
from kvoffload.tiers.disk.journal import Journal, journal_bytes, num_entries_for
from kvoffload.tiers.disk.storage import NO_FILE_ERRORS, SETTING_ERRORS, Storage, StoredFile, is_full, reason
from kvoffload.units import format_bytes

logger = logging.getLogger(__name__)

SLAB_BYTES = 1 << 30
FIXED_BYTES = 64 << 10
"""Set aside for folders, lock, header, and the file system's map of the index."""
SLAB_OVERHEAD_BYTES = 64 << 10
"""Set aside per slab for the file system's map of it."""
EXTENT_BYTES = 24
"""Set aside per slot: if slots are written one at a time, each can become an extent of its own, which takes 12 bytes in
file system blocks that are half full."""
MAPPED_BYTES = 1020
"""A file system without extents needs one byte of map per this many bytes: 4 bytes per block of 4 KiB, and the same
again for the map's own blocks."""
WRITE_TRIES = 2
LEAST_ADVISED = 1 << 20
"""A budget below this is no advice."""
_RECORDS_AT_ONCE = 1 << 13
"""Few: a server may open a tier while another of its threads needs the interpreter."""

_T = TypeVar("_T")


def slot_cost(block_bytes: int) -> int:
    """Returns an upper bound of the bytes that one slot takes of the medium."""
    return block_bytes + RECORD_BYTES + RECENCY_BYTES + max(EXTENT_BYTES, block_bytes // MAPPED_BYTES)


def check_capacity(capacity_bytes: int, possible: int) -> None:
    """Raises ConfigError if ``capacity_bytes`` is more than the file system's ``possible`` bytes."""
    if capacity_bytes > possible:
        most = format_bytes(possible * 9 // 10)
        fix = f"set it to {most} or less" if possible >= LEAST_ADVISED else "make room, or name another directory"
        raise ConfigError(
            f"bytes={capacity_bytes} ({format_bytes(capacity_bytes)}): the file system of the directory can give only "
            f"{format_bytes(possible)}; {fix}"
        )


class SlabFiles:
    """The slots of one fingerprint. Slots ``[0, num_allocated)`` exist; ``grow`` adds those of a slab.

    What is allocated in the directory never exceeds ``used_bytes``, and that never exceeds ``capacity_bytes``. A new
    slab replaces files of other fingerprints if necessary. ``num_slots``, the most that there can be, leaves room for
    files that are not the tier's, as they were at the start.

    If a former process had a larger budget, its slots beyond ``num_slots`` exist until ``cut``, which must come before
    anything else in service; ``move`` takes blocks out of them.

    The constructor takes the directory's lock, and removes files of another layout. It raises
    ConfigError if the directory cannot be used or the budget is wrong, and OSError if the medium fails; ``storage`` is
    closed then. ``read_only``: the medium cannot be written, but its blocks can be read. ``is_short``: at the start the
    medium could not give ``capacity_bytes``. Either is logged once. A ``header`` that is assigned takes effect at once,
    and is on disk after ``write_header``.
    """

    def __init__(
        self,
        storage: Storage,
        fingerprint: str,
        slot_bytes: Sequence[int],
        capacity_bytes: int,
        slab_bytes: int,
        new_generation: Callable[[], int],
        with_journal: bool = False,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.num_allocated = self.num_slots = 0
        self.read_only = storage.read_only
        self.is_short = False
        self._storage = storage
        self._folder = fingerprint
        self._slabs: list[StoredFile] = []
        self._open_files: list[StoredFile] = []
        self._stray_bytes = 0
        """Bytes of files in the directory that are not the tier's."""
        self._recency: StoredFile | None = None
        self._resizing = threading.Lock()
        """Held while files get other sizes. No thread waits for it: its holder may hang in the medium."""
        self._num_records = 0
        """Records that the index has at the start."""
        self._written: Header | None = None
        """The header that is on disk."""
        self._new_generation = new_generation
        self._journal: Journal | None = None
        self._journal_entries = 0
        """Entries of the journal, only if others follow the index."""
        try:
            _check_slots(slot_bytes)
            if not is_fingerprint(fingerprint):
                raise ConfigError(f"fingerprint={fingerprint!r}: must be 64 hexadecimal digits")
            per_slab = max(1, slab_bytes // sum(slot_bytes))
            self.header = Header(fingerprint, tuple(slot_bytes), per_slab, new_generation())
            if with_journal and not self.read_only:
                self._journal_entries = num_entries_for(capacity_bytes // slot_cost(self.header.block_bytes))
            if self._slots_within(capacity_bytes) < 1:
                raise ConfigError(
                    f"bytes={capacity_bytes} ({format_bytes(capacity_bytes)}): not enough for one block; set "
                    f"it to at least {format_bytes(self.bytes_of(1))}, better a few hundred times that"
                )
            storage.lock()
            self._foreign = ForeignFolders(storage, fingerprint)
            self._open()
        except OSError as error:
            self.close()
            if error.errno not in SETTING_ERRORS:
                raise
            raise ConfigError(
                f"cannot be used ({reason(error)}); name a directory that this user can write to"
            ) from error
        except BaseException:
            self.close()
            raise

    def _slots_within(self, capacity_bytes: int) -> int:
        """Returns the highest number of slots whose ``bytes_of`` fits."""
        fixed = self.bytes_of(0)
        whole, rest = divmod(capacity_bytes - fixed, self.bytes_of(self.header.slots_per_slab) - fixed)
        rest_slots = max(0, rest - SLAB_OVERHEAD_BYTES) // slot_cost(self.header.block_bytes)
        return max(0, whole * self.header.slots_per_slab + rest_slots)

    def bytes_of(self, num_slots: int) -> int:
        """Returns an upper bound of the bytes that ``num_slots`` slots take of the medium."""
        slabs = self._num_slabs(num_slots)
        journal = journal_bytes(self._journal_entries) if self._journal_entries else 0
        return FIXED_BYTES + journal + slabs * SLAB_OVERHEAD_BYTES + num_slots * slot_cost(self.header.block_bytes)

    @property
    def used_bytes(self) -> int:
        return self.bytes_of(self.num_allocated) + self._foreign.nbytes + self._stray_bytes

    def _num_slabs(self, num_slots: int) -> int:
        return -(-num_slots // self.header.slots_per_slab)

    # The start.

    def _open(self) -> None:
        names = self._block_files()
        is_first_use = not self._foreign and not names
        self._count_strays()
        is_new = INDEX_NAME not in names or not self._adopt_header()
        if not is_new:
            self._open_slabs(names)
        if self.read_only:
            self._open_read_only()
            return
        kept = {IDENTITY_NAME, *map(slab_name, range(self._num_slabs(self.num_allocated)))}
        if not is_new:
            kept |= {INDEX_NAME, RECENCY_NAME}
        if self._journal_entries:
            kept.add(JOURNAL_NAME)
        for name in names:
            if name not in kept:
                self._storage.remove(self._folder, name)
        self._check_capacity(is_first_use)
        self.make_room(0)
        self._with_room(lambda: self._open_index(is_new))
        try:
            self.write_header()
        except OSError as error:
            # Happens on a full file system that copies what is overwritten. The header is written later.
            if not is_full(error):
                raise

    def _block_files(self) -> list[str]:
        if self._folder not in self._storage.folders():
            return []
        return [name for name in self._storage.files(self._folder) if is_block_file(name)]

    def _count_strays(self) -> None:
        """Counts the files that others have put into the directory: they take a part of the budget, and are left
        alone."""
        self._stray_bytes = self._storage.held_bytes(
            lambda folder, name: (folder, name) in self._foreign or (folder == self._folder and is_block_file(name))
        )
        self.num_slots = self._slots_within(self.capacity_bytes - self._stray_bytes)
        if self.num_slots < 1:
            raise OSError(
                errno.ENOSPC,
                f"files in the directory that are not kvoffload's take {format_bytes(self._stray_bytes)}, which leaves "
                f"no room for a block in {format_bytes(self.capacity_bytes)}; remove them or give the tier more bytes",
            )

    def _adopt_header(self) -> bool:
        """Reads the header. Returns whether the files that it describes can be used; their generation is ours then."""
        data = np.zeros(HEADER_BYTES, dtype=np.uint8)
        try:
            index = self._storage.open(self._folder, INDEX_NAME)
            try:
                found = Header.unpack(data[: index.read([data], 0)])
                self._num_records = (index.size() - HEADER_BYTES) // RECORD_BYTES
            finally:
                index.close()
        except (OSError, FormatError) as error:
            if isinstance(error, OSError) and error.errno not in NO_FILE_ERRORS:
                # What cannot be read now may be readable at the next start, so nothing is removed.
                raise
            logger.warning(
                "kvoffload: disk tier: its blocks cannot be used (%s), and are removed; it starts empty", error
            )
            return False
        layout = replace(self.header, generation=found.generation, transient=found.transient)
        if layout != found:
            logger.warning(
                "kvoffload: disk tier: its blocks were stored with another layout, and are removed; it starts empty"
            )
            return False
        if found.transient:
            # The slabs can be used again, but not the blocks in them.
            return not self.read_only
        self.header = found
        return True

    def _open_slabs(self, names: Sequence[str]) -> None:
        """Opens the slabs that can still be used, up to the first that is missing or not whole."""
        for number in itertools.count():
            if slab_name(number) not in names or not self._open_slab(number):
                break
        if self.read_only:
            # What is beyond the budget cannot be removed.
            self.num_slots = max(self.num_slots, self.num_allocated)
            self.capacity_bytes = max(self.capacity_bytes, self.used_bytes)

    def _open_slab(self, number: int) -> bool:
        """Returns whether the slab is whole, so that the next one can be used too. One that is beyond the budget is
        only looked at."""
        first, per_slab = number * self.header.slots_per_slab, self.header.slots_per_slab
        is_excess = first >= self.num_slots and not self.read_only
        if is_excess and first >= self._num_records:
            return False
        try:
            file = self._keep(self._storage.open(self._folder, slab_name(number), direct=True))
        except OSError as error:
            if isinstance(error, PermissionError):
                logger.warning("kvoffload: disk tier: %s; its blocks are not used", error.strerror)
            if error.errno in NO_FILE_ERRORS:
                return False
            # What cannot be opened now may be at the next start, so nothing is removed.
            raise
        size = file.size()
        if first + per_slab > self.num_slots and not self.read_only:
            # What is beyond the budget costs memory and time only if it takes room.
            most = min(per_slab, max(self._num_records, self.num_slots) - first)
            found = min(size // self.header.block_bytes, most)
            found = min(found, max(file.allocated_bytes() // self.header.block_bytes, self.num_slots - first))
        else:
            found = min(size // self.header.block_bytes, per_slab)
        if not self.read_only:
            file.resize(found * self.header.block_bytes)
        if is_excess:
            self._open_files.pop().close()
        else:
            self._slabs.append(file)
        self.num_allocated = first + found
        return found == per_slab

    def _open_read_only(self) -> None:
        if not self.num_allocated:
            raise OSError(errno.EROFS, "the file system is read-only, and holds no blocks of this model")
        self._index = self._keep(self._storage.open(self._folder, INDEX_NAME))
        self._written = self.header
        with suppress(OSError):
            self._recency = self._keep(self._storage.open(self._folder, RECENCY_NAME))
        logger.warning(
            "kvoffload: disk tier: the file system is read-only: the blocks that are on it are served, and nothing is "
            "written. Mount it for writing and start again"
        )

    def _open_index(self, is_new: bool) -> None:
        self._storage.make_folder(self._folder)
        self._index = self._keep(self._storage.open(self._folder, INDEX_NAME, create=True))
        if is_new:
            self._index.resize(0)
        self._index.resize(record_offset(self.num_allocated))
        if self._journal_entries:
            file = self._keep(self._storage.open(self._folder, JOURNAL_NAME, create=True))
            file.resize(journal_bytes(self._journal_entries))
            num_found = 0 if is_new else self.num_allocated
            self._journal = Journal(file, self._journal_entries, self._new_generation, self.num_slots, num_found)
        try:
            self._recency = self._keep(self._storage.open(self._folder, RECENCY_NAME, create=True))
            self._recency.resize(self.num_allocated * RECENCY_BYTES)
        except OSError as error:
            # Blocks are found without it.
            if error.errno in (*NO_FILE_ERRORS, errno.EACCES):
                logger.warning(
                    "kvoffload: disk tier: %s/%s cannot be used (%s), so the next start does not know in which order "
                    "blocks were used; remove it",
                    self._folder,
                    RECENCY_NAME,
                    error.strerror,
                )
            elif not is_full(error) or not self.num_allocated:
                raise
            self._recency = None

    def _check_capacity(self, is_first_use: bool) -> None:
        """Checks the budget against the medium. On first use a budget beyond the medium is a wrong setting. Later it
        means that others have filled the medium: the tier then uses the room that is left."""
        possible = self._storage.free_bytes() + self.used_bytes
        self.is_short = self.capacity_bytes > possible
        if is_first_use:
            check_capacity(self.capacity_bytes, possible)
        elif self.is_short:
            logger.warning(
                "kvoffload: disk tier of %s: the file system can give only %s of that now; the tier uses what it has, "
                "and grows when there is space",
                format_bytes(self.capacity_bytes),
                format_bytes(possible),
            )

    def load(self) -> Iterator[Entries]:
        """Yields the blocks that the index knows, in pieces. Records that cannot be read are left out."""
        for first in range(0, self.num_allocated, _RECORDS_AT_ONCE):
            count = min(_RECORDS_AT_ONCE, self.num_allocated - first)
            data = np.zeros(count * RECORD_BYTES, dtype=np.uint8)
            try:
                done = self._index.read([data], record_offset(first))
            except OSError as error:
                logger.warning(
                    "kvoffload: disk tier: a part of its index cannot be read (%s), so its blocks are misses; check it",
                    error,
                )
                continue
            yield parse_records(self.header, data[:done], first)

    def load_recency(self) -> npt.NDArray[np.int64]:
        """Returns the sequence number of each slot's last use that was recorded, 0 where none was."""
        data = np.zeros(self.num_allocated * RECENCY_BYTES, dtype=np.uint8)
        try:
            if self._recency is not None:
                self._recency.read([data], 0)
        except OSError as error:
            logger.warning(
                "kvoffload: disk tier: its order of eviction cannot be read (%s); blocks are evicted in the order of "
                "their writes and reads",
                error,
            )
        found = data.view("<u8")
        return np.where(found <= MAX_SEQUENCE, found, 0).astype(np.int64)

    def move(self, sources: Slots, targets: Slots, records: ByteArray) -> tuple[npt.NDArray[np.bool_], OSError | None]:
        """Copies the blocks in ``sources``, beyond the budget, to ``targets``, slots within it, whose ``records`` are
        written after them. Returns which blocks have arrived, and the first error. The others are lost, and so is what
        was in ``targets``."""
        arrived = np.zeros(len(sources), dtype=np.bool_)
        buffer = np.frombuffer(mmap.mmap(-1, self.header.block_bytes), dtype=np.uint8)
        errors: list[OSError] = []
        emptied = []
        for i, slot in enumerate(targets.tolist()):
            with _into(errors):
                self._empty_record(slot)
                emptied.append(i)
        with _into(errors):
            if self._journal:
                self._journal.withdraw(targets, self._index.sync)
            by_slab = itertools.groupby(
                sorted(emptied, key=lambda i: int(sources[i])), lambda i: int(sources[i]) // self.header.slots_per_slab
            )
            for number, places in by_slab:
                with _into(errors), self._excess_slab(number) as slab:
                    for i in places:
                        with _into(errors):
                            self._move(slab, int(sources[i]), int(targets[i]), records[i], buffer)
                            arrived[i] = True
        return arrived, errors[0] if errors else None

    @contextmanager
    def _excess_slab(self, number: int) -> Iterator[StoredFile]:
        """Yields a slab that has slots beyond the budget. Raises OSError."""
        if number < len(self._slabs):
            yield self._slabs[number]
            return
        file = self._storage.open(self._folder, slab_name(number), direct=True)
        try:
            yield file
        finally:
            file.close()

    def _move(self, slab: StoredFile, source: int, target: int, record: ByteArray, buffer: ByteArray) -> None:
        if slab.read([buffer], self.header.place(source)[1]) < buffer.size:
            raise OSError(errno.EIO, "not every byte was read")
        self.write(target, [buffer])
        self.write_records(target, record)

    def _empty_record(self, slot: int) -> None:
        _write_all(self._index, [EMPTY_RECORD], record_offset(slot))

    def cut(self) -> None:
        """Removes the slots beyond the budget. Raises OSError."""
        old, new = self.num_allocated, min(self.num_allocated, self.num_slots)
        if self.read_only or old == new:
            return
        self._index.resize(record_offset(new))
        if self._recency is not None:
            self._recency.resize(new * RECENCY_BYTES)
        for number in reversed(range(self._num_slabs(new), self._num_slabs(old))):
            self._storage.remove(self._folder, slab_name(number))
        last = len(self._slabs) - 1
        self._slabs[last].resize((new - last * self.header.slots_per_slab) * self.header.block_bytes)
        self.num_allocated = new

    # In service.

    @property
    def header_is_due(self) -> bool:
        """Whether ``header`` is not on disk yet."""
        return self._written is not self.header

    def write_header(self) -> None:
        """Writes the header if it is due. Raises OSError."""
        while self.header_is_due:
            header = self.header
            _write_all(self._index, [header.pack()], 0)
            self._written = header

    def repair_headers(self) -> None:
        """Has the headers of index and journal written again. May be called by any thread."""
        self._written = None
        if self._journal:
            self._journal.restart()

    def write_records(self, first_slot: int, records: ByteArray, *, is_change: bool = True) -> None:
        """Writes the records of ``first_slot`` and those after it. ``is_change``: whether the blocks in the slots are
        others than before. Raises OSError."""
        if self._journal:
            self._journal.expect_change(first_slot, len(records) // RECORD_BYTES)
        _write_all(self._index, [records], record_offset(first_slot))
        if self._journal and is_change:
            self._journal.note(first_slot, records)

    def empty_records(self, first_slot: int, count: int) -> None:
        """Empties the records of slots whose payloads are about to be overwritten. If other machines may have found
        blocks there, it returns once they do not. Raises OSError."""
        _write_all(self._index, [np.zeros(count * RECORD_BYTES, dtype=np.uint8)], record_offset(first_slot))
        if self._journal:
            self._journal.withdraw(slice(first_slot, first_slot + count), self._index.sync)

    def write_journal(self) -> None:
        """Writes down which blocks have come and gone since the last call, if others follow this index. May be called
        by any thread. Raises OSError."""
        if self._journal and not self.read_only:
            self._journal.write(self.header, self._index.sync)

    def write_recency(self, first_slot: int, last_use: npt.NDArray[np.int64]) -> None:
        """Writes the recency of ``first_slot`` and those after it, as far as they exist. Raises OSError."""
        if self._recency is not None:
            last_use = last_use[: max(0, self.num_allocated - first_slot)]
            values = np.minimum(last_use, MAX_SEQUENCE).astype("<u8")
            _write_all(self._recency, [values.view(np.uint8)], first_slot * RECENCY_BYTES)

    def write(self, slot: int, buffers: Sequence[ByteArray]) -> None:
        """Writes payloads from ``slot`` on, within its slab. Raises OSError if not every byte was written."""
        slab, offset = self.header.place(slot)
        _write_all(self._slabs[slab], buffers, offset)
        if self._journal and self._slabs[slab].is_cached:
            # Its record may reach other machines at any time from now on.
            self._slabs[slab].sync()

    def read(self, slot: int, buffers: Sequence[ByteArray]) -> None:
        """Reads payloads from ``slot`` on, within its slab. Raises OSError if not every byte was read."""
        slab, offset = self.header.place(slot)
        size = sum(buffer.size for buffer in buffers)
        done = self._slabs[slab].read(buffers, offset)
        if done != size:
            raise OSError(f"only {done} of {size} bytes were read")

    def grow(self) -> int:
        """Allocates the next slab, or the rest of the last one, unless ``remove_excess`` is under way. Returns
        ``num_allocated``. Raises OSError, and no slot is added then. May not be called again before it has
        returned."""
        if not self._resizing.acquire(blocking=False):
            return self.num_allocated
        try:
            return self._with_room(self._grow)
        finally:
            self._resizing.release()

    def remove_excess(self) -> None:
        """Removes slots that another process has added: one that has lost this folder does so until it notices. May be
        called by any thread. Does nothing while the files grow. Raises OSError."""
        if not self._resizing.acquire(blocking=False):
            return
        try:
            for name in self._storage.files(self._folder):
                if (slab_number(name) or 0) >= max(1, len(self._slabs)):
                    self._storage.remove(self._folder, name)
            per_slab, num_slots = self.header.slots_per_slab, self.num_allocated
            limits = [
                (slab, min(per_slab, num_slots - number * per_slab) * self.header.block_bytes)
                for number, slab in enumerate(self._slabs[: self._num_slabs(num_slots)])
            ]
            limits.append((self._index, record_offset(num_slots)))
            if self._recency is not None:
                limits.append((self._recency, num_slots * RECENCY_BYTES))
            for file, limit in limits:
                if file.size() > limit:
                    file.resize(limit)
        finally:
            self._resizing.release()

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
            # If this fails too, the bytes count as allocated.
            with suppress(OSError):
                self._slabs[number].resize((old - number * per_slab) * self.header.block_bytes)
                self._index.resize(record_offset(old))
                self.num_allocated = old
            raise
        return new

    def _with_room(self, do: Callable[[], _T]) -> _T:
        """Calls ``do``, and again as long as the medium is full and a file of another fingerprint can be removed."""
        while True:
            try:
                return do()
            except OSError as error:
                if not is_full(error) or not self._foreign:
                    raise
                self._foreign.remove_oldest()

    def make_room(self, nbytes: int) -> None:
        """Removes files of other fingerprints until ``nbytes`` more fit into the budget, or no such file is left."""
        while self.used_bytes + nbytes > self.capacity_bytes and self._foreign:
            self._foreign.remove_oldest()

    def _keep(self, file: StoredFile) -> StoredFile:
        self._open_files.append(file)
        return file

    def close(self) -> None:
        """Closes the files and gives up the lock, unless a thread hangs in one of them. May be called twice."""
        if self._journal and not self._journal.close():
            return
        for file in self._open_files:
            file.close()
        self._storage.close()


def _check_slots(slot_bytes: Sequence[int]) -> None:
    if not 1 <= len(slot_bytes) <= MAX_RANKS:
        raise ConfigError(f"{len(slot_bytes)} pools: the disk tier serves 1 to {MAX_RANKS} ranks")
    if any(size < 1 or size % SLOT_ALIGNMENT for size in slot_bytes):
        raise ConfigError(
            f"slot_bytes={', '.join(map(str, slot_bytes))}: with a disk tier, slots of host pools must be multiples of "
            f"{SLOT_ALIGNMENT} bytes; make each with padded_slot_bytes(block_bytes) of kvoffload.host.pool"
        )
    if sum(slot_bytes) > MAX_BLOCK_BYTES:
        raise ConfigError(
            f"blocks of {format_bytes(sum(slot_bytes))}: the disk tier takes at most {format_bytes(MAX_BLOCK_BYTES)}; "
            "set a smaller block size"
        )


@contextmanager
def _into(errors: list[OSError]) -> Iterator[None]:
    """Returns a context that is left at an OSError, which is added to ``errors``."""
    try:
        yield
    except OSError as error:
        errors.append(error)


def _write_all(file: StoredFile, buffers: Sequence[ByteArray], offset: int) -> None:
    """Raises OSError if not every byte was written. A write that comes short is continued: the next call fails with the
    reason."""
    size = sum(buffer.size for buffer in buffers)
    # O_DIRECT can continue at whole pages only.
    unit = SLOT_ALIGNMENT if size % SLOT_ALIGNMENT == 0 else 1
    done = 0
    for _ in range(WRITE_TRIES):
        done += file.write(_without_head(buffers, done) if done else buffers, offset + done)
        if done == size:
            return
        done -= done % unit
    raise OSError(f"only {done} of {size} bytes were written")


def _without_head(buffers: Sequence[ByteArray], nbytes: int) -> list[ByteArray]:
    """Returns ``buffers`` without their first ``nbytes``."""
    left = []
    for buffer in buffers:
        if nbytes < buffer.size:
            left.append(buffer[nbytes:])
        nbytes = max(0, nbytes - buffer.size)
    return left

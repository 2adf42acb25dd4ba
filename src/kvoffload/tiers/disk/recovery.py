"""Opens the files of a fingerprint: uses the files that a former process has left, and removes unusable ones."""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

from kvoffload.abc import ConfigError
from kvoffload.tiers.disk.budget import Budget
from kvoffload.tiers.disk.files import DiskFiles
from kvoffload.tiers.disk.folder import Folder
from kvoffload.tiers.disk.format import (
    IDENTITY_NAME,
    INDEX_NAME,
    JOURNAL_NAME,
    RECENCY_NAME,
    Header,
    is_fingerprint,
    record_offset,
    slab_name,
)
from kvoffload.tiers.disk.index import Index, adopt_header, count_blocks
from kvoffload.tiers.disk.journal import Journal, journal_bytes, num_entries_for
from kvoffload.tiers.disk.layout import SlotLayout, check_slot_bytes, slot_cost
from kvoffload.tiers.disk.recency import open_recency
from kvoffload.tiers.disk.slabs import Slabs
from kvoffload.tiers.disk.storage import Storage, StoredFile, is_full
from kvoffload.units import Amount, counted, format_bytes

logger = logging.getLogger(__name__)


def open_files(
    storage: Storage,
    fingerprint: str,
    slot_bytes: Sequence[int],
    capacity_bytes: int,
    slab_bytes: int,
    new_generation: Callable[[], int],
    with_journal: bool = False,
) -> DiskFiles:
    """Opens the files of ``fingerprint``, for one pool per rank with slots of ``slot_bytes``.

    Takes the lock of ``storage`` and removes files of another layout. A medium that is read-only, or too full for
    ``capacity_bytes``, is logged. Raises ConfigError if a setting is wrong, and OSError if the medium fails;
    ``storage`` is closed then.
    """
    folder = Folder(storage, fingerprint)
    with ExitStack() as opened:
        opened.callback(folder.close)
        check_slot_bytes(slot_bytes)
        if not is_fingerprint(fingerprint):
            raise ConfigError("fingerprint", fingerprint, "must be 64 hexadecimal digits")
        header = Header(fingerprint, tuple(slot_bytes), max(1, slab_bytes // sum(slot_bytes)), new_generation())
        has_journal = with_journal and not storage.read_only
        journal_entries = num_entries_for(capacity_bytes // slot_cost(header.block_bytes)) if has_journal else 0
        layout = SlotLayout(header.block_bytes, header.slots_per_slab, journal_entries)
        if layout.slots_within(capacity_bytes) < 1:
            raise ConfigError(
                "bytes",
                Amount(capacity_bytes),
                "not enough for one block",
                f"set it to at least {format_bytes(layout.bytes_of(1))}, better a few hundred times that",
            )
        storage.lock()
        files = _open(folder, Budget(capacity_bytes, layout, storage, fingerprint), header, new_generation)
        opened.pop_all()
    return files


def _open(folder: Folder, budget: Budget, wanted: Header, new_generation: Callable[[], int]) -> DiskFiles:
    storage = folder.storage
    names, has_journal = folder.names(), budget.layout.journal_entries > 0
    is_first_use = not budget.foreign and not names
    adopted = adopt_header(folder, wanted) if INDEX_NAME in names else None
    header, slabs = adopted or wanted, Slabs(folder, budget.layout, syncs=has_journal)
    if storage.read_only:
        return _open_read_only(folder, budget, header, slabs, slabs.open_found(names, sys.maxsize) if adopted else 0)
    num_found = 0
    if adopted:
        num_lost = count_blocks(folder, header, budget.num_slots)
        if num_lost:
            logger.warning(
                "kvoffload: disk tier: its budget is smaller than before, so %s are removed", counted(num_lost, "block")
            )
        num_found = slabs.open_found(names, budget.num_slots)
    kept = {IDENTITY_NAME, *map(slab_name, range(budget.layout.num_slabs(num_found)))}
    kept |= {INDEX_NAME, RECENCY_NAME} if adopted else set()
    kept |= {JOURNAL_NAME} if has_journal else set()
    for name in names:
        if name not in kept:
            folder.remove(name)
    possible = storage.free_bytes() + budget.used_bytes(num_found)
    is_short = budget.is_short(possible, is_first_use=is_first_use)
    budget.make_room(num_found)

    def open_index() -> tuple[Index, StoredFile | None]:
        folder.make()
        file = folder.open(INDEX_NAME, create=True)
        if not adopted:
            file.resize(0)
        file.resize(record_offset(num_found))
        journal = _open_journal(folder, budget, num_found, new_generation) if has_journal else None
        return Index(file, header, journal), open_recency(folder, num_found)

    index, recency = budget.with_room(open_index)
    try:
        index.write_header()
    except OSError as error:
        # Happens on a full file system that copies overwritten blocks. The header is written later.
        if not is_full(error):
            raise
    return DiskFiles(folder, budget, index, slabs, recency, num_found, is_short=is_short)


def _open_journal(folder: Folder, budget: Budget, num_found: int, new_epoch: Callable[[], int]) -> Journal:
    """``num_found``: slots in which others may have found blocks."""
    file, num_entries = folder.open(JOURNAL_NAME, create=True), budget.layout.journal_entries
    file.resize(journal_bytes(num_entries))
    return Journal(file, num_entries, new_epoch, budget.num_slots, num_found)


def _open_read_only(folder: Folder, budget: Budget, header: Header, slabs: Slabs, num_found: int) -> DiskFiles:
    if not num_found:
        raise OSError(errno.EROFS, "the file system is read-only, and holds no blocks of this model")
    # Slots beyond the budget cannot be removed.
    budget.include(num_found)
    index, recency = Index(folder.open(INDEX_NAME), header, is_written=True), None
    with suppress(OSError):
        recency = folder.open(RECENCY_NAME)
    logger.warning(
        "kvoffload: disk tier: the file system is read-only: the blocks that are on it are served, and nothing is "
        "written. Mount it for writing and start again"
    )
    return DiskFiles(folder, budget, index, slabs, recency, num_found, read_only=True)

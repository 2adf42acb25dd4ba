"""The disk tier: blocks in slab files of a local directory, verified, bounded, and found again after a restart."""

from __future__ import annotations

import errno
import logging
import os
import resource
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from kvoffload.abc import (
    ByteArray,
    ConfigError,
    IntegrityError,
    LookupState,
    OffloadKey,
    Slots,
    States,
    Tier,
    TierError,
    TierResult,
)
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.slots import SlotBackend
from kvoffload.tiers.disk.directory import LOCK_NAMES, DirectoryStorage
from kvoffload.tiers.disk.format import (
    EMPTY_RECORD,
    ENGINE_FOLDER,
    MAX_HITS,
    MAX_KEY_BYTES,
    MAX_SECONDS,
    RECENCY_BYTES,
    RECORD_BYTES,
    Header,
    is_block_file,
    is_fingerprint,
    pack_record,
    payload_checksum,
)
from kvoffload.tiers.disk.slabs import NO_SPACE, SLAB_BYTES, SlabFiles, check_capacity
from kvoffload.tiers.disk.storage import SETTING_ERRORS, Storage
from kvoffload.tiers.executor import Executor
from kvoffload.tiers.threads import MAX_QUEUED_WRITES, IOThreads

logger = logging.getLogger(__name__)

DISK_MEDIUM = "DISK"
JOB_BYTES = 4 << 20
"""Small blocks share a job up to this size, larger ones have one each."""
MAX_BUFFERS = 1024
"""IOV_MAX: what one call takes."""
CLOSE_DEADLINE_S = 5.0
RETRY_S = 60.0
"""After the medium had no room for another slab, or the index could not be written."""
RECENCY_S = 10.0
"""From one writing down of what was used to the next. A kill makes the tier forget no more uses than those."""
RECENCY_PAGE_SLOTS = 4096 // RECENCY_BYTES
MAX_RECENCY_PAGES = 1024
"""Written at a time, each by one call."""
WARNING_INTERVAL_S = 10.0
SPARE_DESCRIPTORS = 512
"""Files that everybody else in the process may still want to open."""


class _Backend(SlotBackend):
    """Slots on disk, of which only those that were supplied exist yet."""

    def __init__(self, block_bytes: int, num_blocks: int) -> None:
        super().__init__(block_bytes, DISK_MEDIUM, num_blocks)
        self._num_free = 0
        self.num_supplied = 0

    def supply(self, slots: Slots) -> None:
        """New slots, free."""
        self._free[self._num_free : self._num_free + len(slots)] = slots[::-1]
        self._num_free += len(slots)
        self.num_supplied += len(slots)

    def adopt(self, slots: Slots) -> None:
        """New slots that are in use."""
        self._allocated[slots] = True
        self.num_supplied += len(slots)

    def check_integrity(self) -> None:
        free = self._free[: self._num_free]
        if len(np.unique(free)) != len(free) or self._allocated[free].any():
            raise IntegrityError("a disk slot is allocated and free, or free twice")
        if int(np.count_nonzero(self._allocated)) + self._num_free != self.num_supplied:
            raise IntegrityError("disk slots are neither free nor allocated")


class _Book(PolicyOffloadingManager):
    """Which block lies in which slot of the disk, by the host's own manager."""

    backend: _Backend

    def restore(self, keys: Sequence[OffloadKey], slots: Slots) -> None:
        """Distinct blocks that were found on disk, oldest first."""
        self.backend.adopt(slots)
        super().restore(keys, slots)

    def find(self, keys: Sequence[OffloadKey]) -> Slots:
        """The slots of those of ``keys`` that are there, each once."""
        slots = self._table.find(keys)
        return self._table.distinct(slots[slots >= 0])

    def has_vanished(self, key: OffloadKey) -> bool:
        """Whether ``key``, which is in transfer, was dropped meanwhile."""
        return bool(self._table.is_dropped(self._table.find_in_transfer([key]))[0])

    @property
    def num_used_blocks(self) -> int:
        return self.backend.num_supplied - self.backend.get_num_free_blocks()


class _Item(NamedTuple):
    """A block to be moved between a host slot and a slot on disk."""

    key: OffloadKey
    host_slot: int
    slot: int
    sequence: int


@dataclass(frozen=True, slots=True)
class _Done:
    result: TierResult
    slot: int
    problem: str


class DiskTier(Tier):
    """Blocks of ``pools`` (one a rank, shape (num_slots, slot_bytes)) on ``storage``, at most ``capacity_bytes``.

    The book is kept on the caller's thread; jobs on ``executor`` move bytes, verify them and leave results for
    ``poll``. A block is written in this order: its slot's old record becomes void, then the payload, then the new
    record. So whatever a kill interrupts is a miss afterwards. Nothing is synced: what a power loss takes fails its
    checksum. ``random(n)`` gives n random bytes.

    A ``storage`` that is full or read-only serves what it holds. Raises ConfigError if a setting is wrong or
    ``storage`` cannot be used, and OSError if its medium fails; after that, no method raises for it.
    """

    name = "disk"

    def __init__(
        self,
        storage: Storage,
        pools: Sequence[ByteArray],
        *,
        fingerprint: str,
        capacity_bytes: int,
        policy: str = "lru",
        executor: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        random: Callable[[int], bytes] = os.urandom,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        self._pools = list(pools)
        self._clock = clock
        self._wall_clock = wall_clock
        self._random = random
        slot_bytes = [pool.shape[1] for pool in pools]
        self._files = SlabFiles(storage, fingerprint, slot_bytes, capacity_bytes, slab_bytes, self._new_generation)
        num_slots = self._files.num_slots
        self._backend = _Backend(self.block_bytes, num_slots)
        try:
            # A block that is refused would be a hole in its chain.
            self._book = _Book(self._backend, make_policy(policy, num_slots), must_store=True, clock=clock)
        except ConfigError:
            self._files.close()
            raise
        self._checksums = np.zeros(num_slots, dtype=np.uint64)
        self._stored_at = np.zeros(num_slots, dtype=np.uint32)
        self._hits = np.zeros(num_slots, dtype=np.uint32)
        self._serials = np.zeros(num_slots, dtype=np.int64)
        """How often each slot was given to a block."""
        self._sequence = 0
        self._last_use = np.zeros(num_slots, dtype=np.int64)
        """Sequence of each slot's last touch; a block's own record has that of its writing or reading."""
        self._unwritten_uses = np.zeros(-(-num_slots // RECENCY_PAGE_SLOTS), dtype=np.bool_)
        """By page of the recency file, whether it does not tell all of ``_last_use``."""
        self._has_unwritten_uses = False
        self._num_evicted = 0
        self._blocks_per_job = max(1, JOB_BYTES // self.block_bytes)
        self._reading: set[OffloadKey] = set()
        self._num_writing = 0
        self._done: deque[_Done] = deque()
        self._told: list[TierResult] = []
        self._void: deque[tuple[int, int]] = deque(maxlen=num_slots)
        """Slots whose records must go, with their serials: a slot that has a new block by then has lost the old
        record anyway."""
        self._chores_under_way = False
        self._chores_at = self._grow_at = self._warn_at = self._recency_at = -float("inf")
        self._num_unwarned = 0
        self._growing = False
        self._said_it_cannot_grow = self._files.is_short
        self._grown: deque[int | Exception] = deque()
        self._closed = self._abandoned = False
        try:
            self._restore()
        except BaseException:
            self._files.close()
            raise
        if not self._files.num_allocated:
            self._growing = True
            self._grow()
            self._take_growth()
        self._executor = executor or IOThreads()

    def _new_generation(self) -> int:
        return int.from_bytes(self._random(8), "little")

    def _restore(self) -> None:
        keys: list[OffloadKey] = []
        found: list[tuple[Slots, Slots]] = []
        recency = self._files.load_recency()
        # Also after what is said of slots that are free now: the blocks to come into them are newer.
        self._sequence = int(recency.max(initial=-1)) + 1
        for entries in self._files.load():
            self._checksums[entries.slots] = entries.records["payload_checksum"]
            self._stored_at[entries.slots] = entries.records["stored_at"]
            self._hits[entries.slots] = entries.records["hits"]
            keys += entries.keys
            # A slot's recency may be that of the block before.
            sequences = np.maximum(entries.records["sequence"].astype(np.int64), recency[entries.slots])
            found.append((entries.slots, sequences))
        if keys:
            slots, sequences = (np.concatenate(column) for column in zip(*found, strict=True))
            self._last_use[slots] = sequences
            self._sequence = max(self._sequence, int(sequences.max()) + 1)
            order = np.argsort(sequences, kind="stable")
            keys, slots = [keys[i] for i in order.tolist()], slots[order]
            newest = dict(zip(keys, slots.tolist(), strict=True))
            if len(newest) < len(keys):
                is_newest = np.array([newest[key] == slot for key, slot in zip(keys, slots.tolist(), strict=True)])
                self._make_void(slots[~is_newest])
                keys, slots = [keys[i] for i in np.flatnonzero(is_newest).tolist()], slots[is_newest]
            self._book.restore(keys, slots)
        else:
            slots = np.empty(0, dtype=np.int64)
        free = np.ones(self._files.num_allocated, dtype=np.bool_)
        free[slots] = False
        self._backend.supply(np.flatnonzero(free))

    @property
    def capacity_bytes(self) -> int:
        return self._files.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._files.used_bytes

    @property
    def block_bytes(self) -> int:
        return self._files.header.block_bytes

    @property
    def num_evicted(self) -> int:
        return self._num_evicted

    @property
    def num_blocks(self) -> int:
        return self._book.num_used_blocks

    def contains(self, keys: Sequence[OffloadKey]) -> States:
        states = self._book.states(keys)
        states[states != LookupState.HIT] = LookupState.MISS
        return states

    # Reading.

    def read(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        if self._closed:
            return []
        there = self.contains(keys) == LookupState.HIT
        wanted = {keys[i]: int(slots[i]) for i in np.flatnonzero(there).tolist() if keys[i] not in self._reading}
        # Last key first, as in touch: the first one becomes the most recent.
        last = self._take_sequences(len(wanted)) + len(wanted) - 1
        names = list(wanted)
        places = self._book.prepare_load(names).slots.tolist()
        items = [
            _Item(key, wanted[key], place, last - i) for i, (key, place) in enumerate(zip(names, places, strict=True))
        ]
        num_taken = self._submit(self._executor.submit_read, self._read_run, items)
        self._reading.update(names[:num_taken])
        self._book.complete_load(names[num_taken:])
        return names[:num_taken]

    def _read_run(self, run: list[_Item], header: Header) -> None:
        begun, slot = self._clock(), run[0].slot
        try:
            blocks = [[pool[item.host_slot] for pool in self._pools] for item in run]
            self._files.read(slot, [part for block in blocks for part in block])
            records = [self._verify(item, header, block) for item, block in zip(run, blocks, strict=True)]
        except Exception as problem:
            if len(run) > 1:
                for item in run:
                    self._read_run([item], header)
            else:
                self._write_records(slot, EMPTY_RECORD)
                self._tell(run, is_read=True, begun=begun, problem=problem)
            return
        self._write_records(slot, np.concatenate(records))
        corrupt = [record is EMPTY_RECORD for record in records]
        self._tell(run, is_read=True, begun=begun, corrupt=corrupt)

    def _verify(self, item: _Item, header: Header, block: list[ByteArray]) -> ByteArray:
        """The block's record from now on: empty if its bytes are not what was written."""
        slot, checksum = item.slot, int(self._checksums[item.slot])
        if payload_checksum(header, item.key, block) != checksum:
            return EMPTY_RECORD
        hits = min(int(self._hits[slot]) + 1, MAX_HITS)
        self._hits[slot] = hits
        return pack_record(
            header,
            item.key,
            sequence=item.sequence,
            stored_at=int(self._stored_at[slot]),
            hits=hits,
            payload_checksum=checksum,
        )

    def _write_records(self, slot: int, records: ByteArray) -> None:
        """If it can be done; what is read is right without it."""
        if not self._abandoned:
            with suppress(OSError):
                self._files.write_records(slot, records)

    # Writing.

    def write(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        if self._closed:
            return []
        absent = self._book.states(keys) == LookupState.MISS
        wanted = {keys[i]: int(slots[i]) for i in np.flatnonzero(absent).tolist() if len(keys[i]) <= MAX_KEY_BYTES}
        room = self._room(len(wanted))
        most = min(room, MAX_QUEUED_WRITES * self._blocks_per_job - self._num_writing)
        output = self._book.prepare_store(list(wanted)[:most]) if most > 0 else None
        if output is None:
            return []
        names, places = output.keys_to_store, output.store_spec.slots
        self._num_evicted += len(output.evicted_keys)
        self._serials[places] += 1
        # Last key first, as in touch.
        self._book.reorder_chain(names, names)
        last = self._take_sequences(len(names)) + len(names) - 1
        items = [
            _Item(key, wanted[key], place, last - i)
            for i, (key, place) in enumerate(zip(names, places.tolist(), strict=True))
        ]
        num_taken = self._submit(self._executor.submit_write, self._write_run, items)
        self._book.complete_store(names[num_taken:], success=False)
        self._num_writing += num_taken
        return names[:num_taken]

    def _room(self, wanted: int) -> int:
        """Blocks that can be written now. While the files can still grow nothing is evicted; they do, ahead of need."""
        if self._files.read_only:
            return 0
        free = self._backend.get_num_free_blocks()
        is_whole = self._files.num_allocated == self._files.num_slots and not self._growing
        if is_whole or self._clock() < self._grow_at:
            return self._book.num_available_blocks
        if not self._growing and free - wanted < max(1, self._files.header.slots_per_slab // 4):
            self._growing = self._executor.submit_read(self._grow)
        return free

    def _write_run(self, run: list[_Item], header: Header) -> None:
        begun, slot = self._clock(), run[0].slot
        try:
            blocks = [[pool[item.host_slot] for pool in self._pools] for item in run]
            self._files.write_records(slot, np.zeros(len(run) * RECORD_BYTES, dtype=np.uint8))
            checksums = [payload_checksum(header, item.key, block) for item, block in zip(run, blocks, strict=True)]
            self._files.write(slot, [part for block in blocks for part in block])
            if not self._abandoned:
                self._files.write_records(slot, self._new_records(run, header, checksums))
        except Exception as problem:
            if len(run) > 1:
                for item in run:
                    self._write_run([item], header)
            else:
                self._tell(run, is_read=False, begun=begun, problem=problem)
            return
        self._tell(run, is_read=False, begun=begun)

    def _new_records(self, run: list[_Item], header: Header, checksums: list[int]) -> ByteArray:
        stored_at = min(max(0, int(self._wall_clock())), MAX_SECONDS)
        end = run[0].slot + len(run)
        self._checksums[run[0].slot : end], self._stored_at[run[0].slot : end] = checksums, stored_at
        self._hits[run[0].slot : end] = 0
        records = [
            pack_record(
                header, item.key, sequence=item.sequence, stored_at=stored_at, hits=0, payload_checksum=checksum
            )
            for item, checksum in zip(run, checksums, strict=True)
        ]
        return np.concatenate(records)

    # Both.

    def _submit(
        self,
        submit: Callable[[Callable[[], None]], bool],
        do: Callable[[list[_Item], Header], None],
        items: list[_Item],
    ) -> int:
        """Makes jobs of ``items``. Returns how many of them, from the first on, were taken on."""
        header = self._files.header
        for start in range(0, len(items), self._blocks_per_job):
            job = sorted(items[start : start + self._blocks_per_job], key=lambda item: item.slot)
            if not submit(partial(self._run_job, do, job, header)):
                return start
        return len(items)

    def _run_job(self, do: Callable[[list[_Item], Header], None], items: list[_Item], header: Header) -> None:
        """Blocks that lie in a row are moved by one call, so that few calls have to wait for the interpreter's lock."""
        most = max(1, MAX_BUFFERS // len(self._pools))
        start = 0
        for i in range(1, len(items) + 1):
            if i == len(items) or i - start == most or not self._are_neighbours(items[i - 1].slot, items[i].slot):
                do(items[start:i], header)
                start = i

    def _are_neighbours(self, slot: int, other: int) -> bool:
        return other == slot + 1 and other % self._files.header.slots_per_slab != 0

    def _tell(
        self,
        run: list[_Item],
        is_read: bool,
        begun: float,
        problem: Exception | None = None,
        corrupt: Sequence[bool] = (),
    ) -> None:
        ended = self._clock()
        for i, item in enumerate(run):
            error = None
            if problem is not None:
                error = TierError.NO_SPACE if getattr(problem, "errno", None) in NO_SPACE else TierError.IO
            elif corrupt and corrupt[i]:
                error = TierError.CORRUPT
            nbytes = 0 if error else self.block_bytes
            result = TierResult(item.key, is_read, error, nbytes, (ended - begun) / len(run), begun, ended)
            self._done.append(_Done(result, item.slot, str(problem or "")))

    def _take_sequences(self, n: int) -> int:
        self._sequence += n
        return self._sequence - n

    def _grow(self) -> None:
        try:
            self._grown.append(self._files.grow())
        except Exception as error:
            self._grown.append(error)

    # What has ended.

    def poll(self) -> list[TierResult]:
        self._take_growth()
        results, self._told = self._told + self._take_results(), []
        self._submit_chores()
        return results

    def _take_growth(self) -> None:
        while self._grown:
            grown = self._grown.popleft()
            self._growing = False
            if isinstance(grown, Exception):
                self._grow_at = self._clock() + RETRY_S
                self._tell_why_it_cannot_grow(grown)
            else:
                self._said_it_cannot_grow = False
                self._backend.supply(np.arange(self._backend.num_supplied, grown))

    def _tell_why_it_cannot_grow(self, problem: Exception) -> None:
        """Once, until it has grown again."""
        if self._said_it_cannot_grow:
            return
        self._said_it_cannot_grow = True
        effect = "evicts for new blocks" if self._files.num_allocated else "keeps no blocks"
        advice = "use a file system that can"
        if getattr(problem, "errno", None) in NO_SPACE:
            advice = "free space where disk_dir lies, or set disk_bytes lower"
        logger.warning(
            "kvoffload: disk tier: it cannot grow (%s) and %s; %s. It tries again every %.0f s",
            problem,
            effect,
            advice,
            RETRY_S,
        )

    def _take_results(self) -> list[TierResult]:
        if not self._done:
            return []
        results = []
        for done in [self._done.popleft() for _ in range(len(self._done))]:
            result = done.result
            if self._book.has_vanished(result.key):
                # A record may have been written after the key had gone.
                self._make_void(np.array([done.slot]))
                if result.ok:
                    result = replace(result, error=TierError.GONE, nbytes=0)
            elif result.error is not None:
                what = "reading" if result.is_read else "writing"
                self._warn(f"{what} block {result.key.hex()} failed ({done.problem or result.error}): it is a miss")
            results.append(result)
        reads = [result.key for result in results if result.is_read]
        self._reading.difference_update(reads)
        self._num_writing -= len(results) - len(reads)
        if reads:
            self._book.complete_load(reads)
        if len(reads) < len(results):
            self._book.complete_store([result.key for result in results if not result.is_read and result.ok])
        failed = [result for result in results if not result.ok]
        if failed:
            self._book.complete_store([result.key for result in failed if not result.is_read], success=False)
            self._book.drop([result.key for result in failed if result.is_read])
        return results

    def _warn(self, message: str) -> None:
        if self._clock() < self._warn_at:
            self._num_unwarned += 1
            return
        more = f" ({self._num_unwarned} more warnings were left out before)" if self._num_unwarned else ""
        logger.warning("kvoffload: disk tier: %s%s", message, more)
        self._num_unwarned = 0
        self._warn_at = self._clock() + WARNING_INTERVAL_S

    def wait(self, timeout_s: float) -> None:
        if not self._done and not self._told:
            self._executor.wait(timeout_s)

    # Removing.

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        self._book.touch(keys)
        self._note_use(keys)

    def reorder_chain(self, keys: Sequence[OffloadKey], stored: Collection[OffloadKey]) -> None:
        self._book.reorder_chain(keys, stored)
        self._note_use(keys)

    def _note_use(self, keys: Sequence[OffloadKey]) -> None:
        """Last key first, as in touch. A thread writes it down later, see RECENCY_S."""
        slots = self._book.find(keys)
        if len(slots) and not self._files.read_only:
            last = self._take_sequences(len(slots)) + len(slots) - 1
            self._last_use[slots] = last - np.arange(len(slots))
            self._unwritten_uses[slots // RECENCY_PAGE_SLOTS] = True
            self._has_unwritten_uses = True

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        slots = self._book.find(keys)
        self._book.drop(keys)
        self._make_void(slots)
        self._submit_chores()

    def reset(self) -> None:
        """What is stored from now on, until the process ends, is void after that: it belongs to other weights than
        those that the next process will load."""
        self._book.reset()
        self._files.header = replace(self._files.header, generation=self._new_generation(), transient=True)
        self._submit_chores()

    def _make_void(self, slots: Slots) -> None:
        self._void.extend(zip(slots.tolist(), self._serials[slots].tolist(), strict=True))

    def _submit_chores(self) -> None:
        now = self._clock()
        is_due = self._void or self._files.header_is_due or (self._has_unwritten_uses and now >= self._recency_at)
        if is_due and not self._chores_under_way and now >= self._chores_at:
            self._chores_under_way = True
            if not self._executor.submit_read(self._chores):
                self._chores_under_way = False

    def _chores(self) -> None:
        try:
            self._files.write_header()
            while self._void:
                slot, serial = self._void.popleft()
                try:
                    if self._serials[slot] == serial:
                        self._files.write_records(slot, EMPTY_RECORD)
                except OSError:
                    self._void.appendleft((slot, serial))
                    raise
            if self._closed or self._clock() >= self._recency_at:
                self._write_recency()
        except OSError:
            self._chores_at = self._clock() + RETRY_S
        finally:
            self._chores_under_way = False

    def _write_recency(self) -> None:
        """Writes some of the pages in which something has changed, at the end all."""
        self._recency_at = self._clock() + RECENCY_S
        # Before the pages are looked at: who marks one afterwards says so again.
        self._has_unwritten_uses = False
        pages = np.flatnonzero(self._unwritten_uses)
        try:
            for page in (pages if self._closed else pages[:MAX_RECENCY_PAGES]).tolist():
                self._unwritten_uses[page] = False
                first = page * RECENCY_PAGE_SLOTS
                try:
                    self._files.write_recency(first, self._last_use[first : first + RECENCY_PAGE_SLOTS])
                except OSError:
                    self._unwritten_uses[page] = True
                    raise
        finally:
            self._has_unwritten_uses |= bool(self._unwritten_uses.any())

    # The end.

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._submit_chores()
        is_done = self._executor.close(CLOSE_DEADLINE_S)
        self._told += self._take_results()
        self._book.reset()
        if is_done:
            self._chores()
            self._files.close()
        else:
            # A thread hangs in a call. Its descriptors stay open, lest they come to name other files, and so does the
            # lock: the thread may still write when it wakes.
            self._abandoned = True

    def check_integrity(self) -> None:
        self._book.check_integrity()
        if self.used_bytes > self.capacity_bytes:
            raise IntegrityError(f"{self.used_bytes} bytes of disk in use, {self.capacity_bytes} allowed")


def open_disk_tier(
    directory: str | os.PathLike[str],
    capacity_bytes: int,
    pools: Sequence[ByteArray],
    fingerprint: str,
    policy: str = "lru",
    engine: int = 0,
    engines: int = 1,
) -> DiskTier:
    """The tier in ``directory``, of which nobody else may be using anything but the other of ``engines`` engines.

    Several engines have a folder ``engine-<number>`` and an equal share of ``capacity_bytes`` each. Raises ConfigError
    if a setting is wrong or the directory is in use, and OSError if the medium fails: a server can go on without it.
    """
    storage = root = DirectoryStorage(directory)
    try:
        root.lock(shared=engines > 1)
        if not root.held_bytes():
            check_capacity(capacity_bytes, root.free_bytes())
        if engines == 1:
            _allow_descriptors(capacity_bytes // SLAB_BYTES)
            if not root.read_only:
                _remove_other_arrangements(root, engine, engines, capacity_bytes)
            return DiskTier(storage, pools, fingerprint=fingerprint, capacity_bytes=capacity_bytes, policy=policy)
        with root.alone():
            share = capacity_bytes // engines
            _allow_descriptors(share // SLAB_BYTES)
            if not root.read_only:
                _remove_other_arrangements(root, engine, engines, share)
            share = (capacity_bytes - root.held_bytes(_is_an_engines)) // engines
            folder = f"engine-{engine}"
            if root.read_only and folder not in root.folders():
                raise OSError(errno.EROFS, "the file system is read-only, and holds no blocks of this engine")
            storage = root.child(folder)
            return DiskTier(storage, pools, fingerprint=fingerprint, capacity_bytes=share, policy=policy)
    except OSError as error:
        storage.close()
        if error.errno not in SETTING_ERRORS:
            raise
        raise ConfigError(
            f"disk_dir={str(root.path)!r}: cannot be used ({error.strerror or error}); name a directory on a local, "
            "writable file system"
        ) from error
    except BaseException:
        storage.close()
        raise


def _is_an_engines(folder: str, name: str) -> bool:
    return ENGINE_FOLDER.fullmatch(folder.partition("/")[0]) is not None


def _allow_descriptors(num_slabs: int) -> None:
    """Raises this process's soft limit of open files, if it must, so that every slab can be open.

    Raises ConfigError if the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + num_slabs + SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise ConfigError(
                f"disk_bytes: this process may have {hard} files open, and needs {needed}, one for each GiB on disk "
                f"and {SPARE_DESCRIPTORS} to spare; raise the limit (ulimit -n {needed}), or set disk_bytes lower"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _remove_other_arrangements(root: DirectoryStorage, engine: int, engines: int, share: int) -> None:
    """Removes what a server with another number of engines has left, so that it does not count twice."""
    for folder in root.folders():
        match = ENGINE_FOLDER.fullmatch(folder)
        if match and (engines == 1 or int(match[1]) != engine):
            is_other = engines == 1 or int(match[1]) >= engines
            other = DirectoryStorage(root.path / folder)
            try:
                if not is_other and other.held_bytes() <= share:
                    continue
                try:
                    other.lock()
                except ConfigError:
                    if is_other:
                        raise
                    continue
                _remove_blocks(other)
                for name in LOCK_NAMES:
                    with suppress(FileNotFoundError):
                        other.remove("", name)
            finally:
                other.close()
            with suppress(OSError):
                root.remove_folder(folder)
        elif is_fingerprint(folder) and engines > 1:
            _remove_folder(root, folder)


def _remove_blocks(storage: DirectoryStorage) -> None:
    for folder in storage.folders():
        if is_fingerprint(folder):
            _remove_folder(storage, folder)


def _remove_folder(storage: DirectoryStorage, folder: str) -> None:
    for name in storage.files(folder):
        if is_block_file(name):
            storage.remove(folder, name)
    # Not if somebody else keeps files there.
    with suppress(OSError):
        storage.remove_folder(folder)

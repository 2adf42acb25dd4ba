"""What the disk tier knows again after a restart: its blocks, the order of their use, and which are retained."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvoffload.abc import Keys, OffloadKey, Slots
from kvoffload.cache.retention import MAX_RETAIN_S
from kvoffload.tiers.catalog import Catalog
from kvoffload.tiers.disk.files import DiskFiles
from kvoffload.tiers.disk.format import Facts
from kvoffload.tiers.disk.recency import Marks, Recency, mark, retained_until

MAX_CLOCK_STEP_S = 86_400.0
"""How far the wall clock may have stepped back since blocks were retained for the longest time."""


class Restart:
    """Takes over into ``catalog`` what a former process has left in ``files``, and notes for the next one which blocks
    are retained until when. ``clock`` is that of the catalog, ``wall_clock`` counts seconds since 1970."""

    def __init__(
        self,
        files: DiskFiles,
        catalog: Catalog,
        recency: Recency,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._files = files
        self._catalog = catalog
        self._recency = recency
        self._clock = clock
        self._wall_clock = wall_clock

    def restore(self, facts: Facts) -> Slots:
        """Fills the catalog with the blocks on disk, and ``facts`` of each slot. Returns slots whose records must go,
        since their keys have newer ones, or their tenants less room than before."""
        keys: list[OffloadKey] = []
        found: list[Slots] = [np.empty(0, dtype=np.int64)]
        recency, marks = self._recency.load(self._files.num_allocated)
        for entries in self._files.index.load(self._files.num_allocated):
            for name in ("stored_at", "payload_checksum"):
                facts[name][entries.slots] = entries.records[name]
            # The recency of a slot may be that of the block before.
            recency[entries.slots] = np.maximum(recency[entries.slots], entries.records["sequence"].astype(np.int64))
            keys += entries.keys
            found.append(entries.slots)
        slots = np.concatenate(found)
        # Those that are retained count as used last, so that no smaller quota drops them before others.
        retained = self._found_retained(keys, marks[slots])
        order = np.argsort(recency[slots], kind="stable")
        if retained:
            is_retained = np.fromiter(map(retained.__contains__, keys), np.bool_, len(keys))
            order = np.concatenate((order[~is_retained[order]], order[is_retained[order]]))
        # Not by single calls for all blocks, which would hold the interpreter.
        keys, slots = [keys[i] for i in order], slots[order]
        last = {key: i for i, key in enumerate(keys)}
        stale = slots[:0]
        if len(last) < len(keys):
            newest = np.fromiter((last[key] == i for i, key in enumerate(keys)), np.bool_, len(keys))
            keys = [key for i, key in enumerate(keys) if last[key] == i]
            stale, slots = slots[~newest], slots[newest]
        facts["sequence"][: len(recency)] = recency
        self._recency.restore(slots, facts["sequence"][slots])
        left_out = self._catalog.restore(keys, slots)
        if retained:
            states = self._catalog.contains(keys)
            kept = [key for key, state in zip(keys, states, strict=True) if key in retained and state]
            now = self._wall_clock()
            self._catalog.retention.restore(kept, [retained[key] - now for key in kept])
        # What is restored gets its marks again. The others would retain blocks once there is more room.
        marked = np.flatnonzero(marks)
        if len(marked):
            self._recency.note_marks(marked, np.zeros(len(marked), dtype=np.uint64))
        free = np.ones(self._files.num_allocated, dtype=np.bool_)
        free[slots] = False
        free[left_out] = True
        self._catalog.add_free(np.flatnonzero(free))
        return np.concatenate((stale, left_out))

    def _found_retained(self, keys: Keys, marks: Marks) -> dict[OffloadKey, float]:
        """Returns until when, in seconds since 1970, which blocks are retained by their marks: for MAX_RETAIN_S from
        now on at most."""
        now = self._wall_clock()
        last, last_found = now + MAX_RETAIN_S, now + MAX_RETAIN_S + MAX_CLOCK_STEP_S
        untils = {keys[i]: retained_until(keys[i], int(marks[i])) for i in np.flatnonzero(marks).tolist()}
        return {key: min(until, last) for key, until in untils.items() if now < until <= last_found}

    def note_retained(self) -> None:
        """Notes for the next process which blocks are retained until when."""
        slots, keys, untils = self._catalog.take_retained()
        if len(slots):
            ahead = self._wall_clock() - self._clock()
            marks = [mark(key, until + ahead) if until else 0 for key, until in zip(keys, untils, strict=True)]
            self._recency.note_marks(slots, np.array(marks, dtype=np.uint64))

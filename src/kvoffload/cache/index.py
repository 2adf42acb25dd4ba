"""KeyIndex: an exact map from keys to slots in numpy arrays, for batches.

A dict takes twice the time for a store: with a million keys, each of its probes misses the processor's caches one after
the other, and every value is an object. From time to time a dict is also rebuilt as a whole (56 ms measured). KeyIndex
probes a batch of keys together, and is never rebuilt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import compress
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.abc import IntegrityError, OffloadKey, Slots
from kvoffload.cache.keys import plain_hash_keys

WAYS = 8
"""Entries per bucket: 8 tags of 4 bytes are half a cache line."""
SCALAR_BATCH = 8
"""Up to this batch size, one key at a time is cheaper."""
MAX_SLOTS = 1 << 28
"""Slots and places in the table are 32-bit numbers."""
_FREE = -1
_SPILLED = -2

# Arrays, because numpy takes these three times as fast as scalars.
_BYTE_NUMBER = np.array(0x0001020304050607, dtype=np.uint64)
_TOP_BYTE = np.array(56, dtype=np.uint64)
_TAG_SHIFT = np.array(32, dtype=np.uint64)
_ODD = np.array(1, dtype=np.uint32)

UInt64s = npt.NDArray[np.uint64]
Homes: TypeAlias = tuple[npt.NDArray[np.int64], npt.NDArray[np.uint32]]
"""Bucket and tag of each key."""


def check_capacity(capacity: int) -> None:
    """Raises ValueError if an index or a list cannot have so many slots."""
    if not 0 <= capacity <= MAX_SLOTS:
        raise ValueError(f"capacity={capacity}: must be at most {MAX_SLOTS} slots, and not negative")


class KeyIndex:
    """At most one slot per key and one key per slot, for slots in ``[0, capacity)``.

    The key's hash selects a bucket of eight entries; an entry is a 32-bit tag of the hash (0: empty) and a slot. A
    matching tag is confirmed by comparing the keys. The number of buckets is at least half the number of slots, so
    about one key in ten thousand finds its bucket full and goes to a dict. Keys are ``bytes``, or other objects that
    can be hashed and compared. A batch with a key that cannot be hashed changes nothing.
    """

    def __init__(self, capacity: int) -> None:
        check_capacity(capacity)
        num_buckets = 1 << max(0, (max(capacity, 2) // 2 - 1).bit_length())
        self._mask = num_buckets - 1
        self._tags = np.zeros((num_buckets, WAYS), dtype=np.uint32)
        self._slots = np.zeros(num_buckets * WAYS, dtype=np.int32)
        self._place = np.full(capacity, _FREE, dtype=np.int64)
        """Position of a slot's entry in the flat table, _SPILLED if its key is in the dict."""
        self.key_of: npt.NDArray[np.object_] = np.full(capacity, None, dtype=object)
        """The key in each slot. Free slots have None, or, after ``clear``, keys that they had before."""
        self._spill: dict[OffloadKey, int] = {}
        self._spill_count: Counter[int] = Counter()
        self._spilled = np.zeros(num_buckets, dtype=np.bool_)
        """Buckets that have keys in the dict."""
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def get(self, key: OffloadKey) -> int:
        """Returns the key's slot, or -1."""
        bucket, tag = self._home(key)
        row: list[int] = self._tags[bucket].tolist()
        if tag in row:
            for way, other in enumerate(row):
                if other == tag:
                    slot = int(self._slots[bucket * WAYS + way])
                    if self.key_of[slot] == key:
                        return slot
        return self._spill.get(key, -1) if self._spill else -1

    def find(self, keys: Sequence[OffloadKey]) -> Slots:
        """Returns one slot per key, -1 where the key is absent. Duplicates are kept."""
        return self._look_up(keys)[0]

    def _look_up(self, keys: Sequence[OffloadKey]) -> tuple[Slots, Homes | None]:
        """Returns the keys' slots, and their homes if the keys were hashed for that."""
        if len(keys) <= SCALAR_BATCH:
            return np.array([self.get(key) for key in keys], dtype=np.int64), None
        homes = self._homes(keys)
        return self._find(keys, homes), homes

    def _find(self, keys: Sequence[OffloadKey], homes: Homes) -> Slots:
        buckets, tags = homes
        matches = _bytes(self._tags.take(buckets, axis=0) == tags[:, None])
        num_found = np.count_nonzero(matches)
        if num_found == 0:
            slots = np.full(len(keys), -1, dtype=np.int64)
        else:
            slots = self._slots.take(buckets * WAYS + _first_way(matches)).astype(np.int64)
            if num_found < len(keys):
                slots[matches == 0] = -1
            self._confirm(keys, slots, matches.nonzero()[0])
        if self._spill and num_found < len(keys):
            for i in np.flatnonzero((matches == 0) & self._spilled[buckets]).tolist():
                slots[i] = self._spill.get(keys[i], -1)
        return slots

    def split(self, keys: Sequence[OffloadKey]) -> tuple[Slots, list[OffloadKey], Homes | None]:
        """Returns the slots of the keys that are present; the absent keys, in order and without repetitions; and
        hashing work that ``insert`` can use if it gets exactly those."""
        slots, homes = self._look_up(keys)
        present = slots >= 0
        if not np.count_nonzero(present):
            if len(set(keys)) == len(keys):
                return slots[:0], list(keys), homes
            return slots[:0], list(dict.fromkeys(keys)), None
        return slots[present], list(dict.fromkeys(compress(keys, (~present).tolist()))), None

    def _confirm(self, keys: Sequence[OffloadKey], slots: Slots, found: npt.NDArray[np.int64]) -> None:
        """Corrects ``slots`` where only the tags were equal, which happens once in four billion probes."""
        held = self.key_of[slots[found]].tolist()
        asked = list(keys) if len(found) == len(keys) else [keys[i] for i in found.tolist()]
        if held != asked:
            for i, a, b in zip(found.tolist(), held, asked, strict=True):
                if a != b:
                    slots[i] = self.get(b)

    def insert(self, keys: Sequence[OffloadKey], slots: Slots, homes: Homes | None = None) -> None:
        """Puts distinct absent keys into free slots. ``homes``: as returned by ``split``."""
        if len(slots) != len(keys):
            raise IndexError(f"{len(keys)} keys need as many slots, not {len(slots)}")
        if homes is None:
            homes = self._homes(keys)
        elif len(homes[0]) != len(keys):
            raise IndexError(f"these are the homes of {len(homes[0])} keys, not of {len(keys)}")
        self.key_of[slots] = keys
        self._len += len(keys)
        waiting = np.arange(len(keys))
        if len(keys) > SCALAR_BATCH:
            buckets, tags = homes
            while len(waiting) > SCALAR_BATCH:
                empty = _bytes(self._tags.take(buckets.take(waiting), axis=0) == 0)
                if np.count_nonzero(empty) < len(empty):
                    for i in waiting[empty == 0].tolist():
                        self._put(keys[i], int(slots[i]))
                    waiting, empty = waiting[empty != 0], empty[empty != 0]
                # If several keys take the same place at once, the last one wins.
                places = buckets[waiting] * WAYS + _first_way(empty)
                self._slots[places] = slots[waiting]
                won = self._slots.take(places) == slots[waiting]
                now, places = waiting[won], places[won]
                self._tags.ravel()[places] = tags[now]
                self._place[slots[now]] = places
                waiting = waiting[~won]
        for i in waiting.tolist():
            self._put(keys[i], int(slots[i]))

    def _put(self, key: OffloadKey, slot: int) -> None:
        bucket, tag = self._home(key)
        row: list[int] = self._tags[bucket].tolist()
        if 0 in row:
            way = row.index(0)
            self._tags[bucket, way] = tag
            self._slots[bucket * WAYS + way] = slot
            self._place[slot] = bucket * WAYS + way
        else:
            self._spill[key] = slot
            self._place[slot] = _SPILLED
            self._spill_count[bucket] += 1
            self._spilled[bucket] = True

    def remove(self, slots: Slots) -> list[OffloadKey]:
        """Removes the keys of distinct slots that have one, and returns them in order."""
        self._len -= len(slots)
        keys: list[OffloadKey] = self.key_of[slots].tolist()
        places = self._place[slots]
        self._tags.ravel()[places[places >= 0]] = 0
        if self._spill:
            for i in np.flatnonzero(places == _SPILLED).tolist():
                bucket, _ = self._home(keys[i])
                del self._spill[keys[i]]
                self._spill_count[bucket] -= 1
                if self._spill_count[bucket] == 0:
                    del self._spill_count[bucket]
                    self._spilled[bucket] = False
        self._place[slots] = _FREE
        self.key_of[slots] = None
        return keys

    def clear(self) -> None:
        """Removes all keys. Does not release them: with a million keys, that alone would take 30 ms."""
        self._len = 0
        self._tags.fill(0)
        self._place.fill(_FREE)
        self._spill.clear()
        self._spill_count.clear()
        self._spilled.fill(False)

    def slots(self) -> Slots:
        """Returns the slots that have a key, ascending."""
        return np.flatnonzero(self._place != _FREE)

    def holds(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Returns which of ``slots`` have a key."""
        held: npt.NDArray[np.bool_] = self._place[slots] != _FREE
        return held

    def _home(self, key: OffloadKey) -> tuple[int, int]:
        h = hash(key)
        return h & self._mask, (h >> 32) & 0xFFFFFFFF | 1

    def _homes(self, keys: Sequence[OffloadKey]) -> Homes:
        hashes = plain_hash_keys(keys)
        tags = (hashes.view(np.uint64) >> _TAG_SHIFT).astype(np.uint32) | _ODD
        return hashes & self._mask, tags

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every key is found in its slot and nothing else is held."""
        slots = self.slots()
        if len(slots) != self._len:
            raise IntegrityError("the index counts its keys wrongly")
        if any(self.get(key) != slot for key, slot in zip(self.key_of[slots].tolist(), slots.tolist(), strict=True)):
            raise IntegrityError("a key is not found in its slot")
        entries = int(np.count_nonzero(self._tags)) + len(self._spill)
        if entries != self._len or sum(self._spill_count.values()) != len(self._spill):
            raise IntegrityError("the index has entries of removed keys")


def _bytes(flags: npt.NDArray[np.bool_]) -> UInt64s:
    """Returns each row of eight flags as one number, the first flag in the lowest byte."""
    return flags.view("<u8").ravel()


def _first_way(matches: UInt64s) -> npt.NDArray[np.int64]:
    """Returns the position of the lowest byte that is 1, for u64s whose bytes are 0 or 1; 0 if no byte is."""
    return (((matches & -matches) * _BYTE_NUMBER) >> _TOP_BYTE).view(np.int64)

"""Contents of objects: their values in order, and the places of known values.

An object has values of equal size, one after the other, without gaps; smaller ones are padded. If there are several, or
one of another name, its note lists them: NOTE_VERSION, then the marks of the values in base64. A mark is the XXH3-64 of
the value's name: a hint where to look, without proof. The reader verifies the bytes.
"""

from __future__ import annotations

import base64
import binascii
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from xxhash import xxh3_64_digest

from kvoffload.tiers.object_store.bucket import MAX_NOTE, Found
from kvoffload.tiers.remote.record import RECORD_BYTES

MAX_VALUES = 64
"""Values in one object. Their marks take 11 bytes each, and some stores allow 2 KB of metadata."""
OBJECT_BYTES = (8 << 20) + MAX_VALUES * RECORD_BYTES
"""Smaller values share objects of up to this size: blocks of 8 MiB, with their records."""
MAX_PLACES = 1 << 17
"""Values whose place is remembered; beyond that the values of the oldest objects are forgotten."""
MAX_HIDDEN = 1 << 14
"""Values that are hidden although an object has them; beyond that the oldest can be found again."""
MAX_DISTRUSTED = 1 << 12
NOTE_VERSION = "1:"
MARK_BYTES = 8

Marks: TypeAlias = tuple[bytes, ...]
_NOTHING: tuple[Marks, int] = ((), 0)


def values_per_object(value_bytes: int, object_bytes: int = OBJECT_BYTES) -> int:
    """Returns how many values of this size share an object of ``object_bytes`` at most."""
    return max(1, min(MAX_VALUES, object_bytes // value_bytes)) if value_bytes else 1


def mark(name: str) -> bytes:
    """Returns the mark of the value ``name``."""
    return xxh3_64_digest(name.encode())


def make_note(marks: Sequence[bytes]) -> str:
    return NOTE_VERSION + base64.b64encode(b"".join(marks)).decode()


def contents(name: str, found: Found) -> Marks:
    """Returns the marks of the values in the object ``name``. An object whose note makes no sense, or leaves out the
    value of the object's own name, has that value only."""
    own = mark(name)
    note = found.note
    if note.startswith(NOTE_VERSION) and len(note) <= MAX_NOTE:
        try:
            raw = base64.b64decode(note[len(NOTE_VERSION) :], validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        marks = tuple(raw[at : at + MARK_BYTES] for at in range(0, len(raw), MARK_BYTES))
        if own in marks and len(raw) % MARK_BYTES == 0 and len(marks) <= MAX_VALUES:
            return marks
    return (own,)


class ValuePlace(NamedTuple):
    """The place of a value: the object's name, the marks of its values, the number of values before this one, and the
    size of each, 0 if it is not known."""

    name: str
    marks: Marks
    number: int
    value_bytes: int = 0


class Places:
    """Remembers where values are, as the notes of objects say. Methods may be called from several threads."""

    def __init__(self) -> None:
        self._objects: OrderedDict[str, tuple[Marks, int]] = OrderedDict()
        """The marks of each object and the size of its values, the oldest knowledge first."""
        self._places: dict[bytes, tuple[str, int]] = {}
        self._hidden: OrderedDict[bytes, str] = OrderedDict()
        """Values that were removed, and the objects that still have them."""
        self._distrusted: OrderedDict[str, None] = OrderedDict()
        """Objects in which wrong bytes were found."""
        self._lock = threading.Lock()

    def find(self, value: bytes) -> ValuePlace | None:
        """Returns the place of the value with this mark, if it is known and not hidden."""
        with self._lock:
            found = self._places.get(value)
            if found is None or self._hidden.get(value) == found[0]:
                return None
            marks, value_bytes = self._objects[found[0]]
            return ValuePlace(found[0], marks, found[1], value_bytes)

    def is_hidden(self, value: bytes, name: str) -> bool:
        """Returns whether the value in the object ``name`` counts as missing."""
        with self._lock:
            return self._hidden.get(value) == name

    def hide(self, value: bytes) -> bool:
        """Lets the value count as missing where it is now. Returns whether all values of that object are hidden."""
        with self._lock:
            if value not in self._places:
                return False
            name, _ = self._places[value]
            self._hidden[value] = name
            _limit(self._hidden, MAX_HIDDEN)
            return all(self._hidden.get(each) == name for each in self._objects[name][0])

    def show(self, value: bytes) -> None:
        """Undoes ``hide``."""
        with self._lock:
            self._hidden.pop(value, None)

    def distrust(self, name: str) -> None:
        """Notes that the object ``name`` has wrong bytes."""
        with self._lock:
            self._distrusted[name] = None
            _limit(self._distrusted, MAX_DISTRUSTED)

    def is_distrusted(self, name: str) -> bool:
        with self._lock:
            return name in self._distrusted

    def note(self, name: str, marks: Marks, size: int) -> None:
        """Notes that the object ``name`` of ``size`` bytes has the values with ``marks``."""
        with self._lock:
            self._forget(name)
            self._objects[name] = marks, size // len(marks)
            # The latest object that claims to have a value is believed.
            self._places.update((value, (name, index)) for index, value in enumerate(marks))
            while len(self._places) > MAX_PLACES:
                self._forget(next(iter(self._objects)))

    def gone(self, name: str) -> None:
        """Forgets the object ``name``: it does not exist, or has other values."""
        with self._lock:
            for value in self._objects.get(name, _NOTHING)[0]:
                if self._hidden.get(value) == name:
                    del self._hidden[value]
            self._distrusted.pop(name, None)
            self._forget(name)

    def _forget(self, name: str) -> None:
        for value in self._objects.pop(name, _NOTHING)[0]:
            if self._places.get(value, ("", 0))[0] == name:
                del self._places[value]


def _limit(known: OrderedDict[Any, Any], most: int) -> None:
    while len(known) > most:
        known.popitem(last=False)

"""ObjectStoreClient: values in a bucket, several per object where they are small. It runs in the client's process."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvoffload.abc import ByteArray
from kvoffload.tiers.object_store.bucket import TIMES, Bucket, Found, NewObject, Piece, Times
from kvoffload.tiers.object_store.contents import (
    OBJECT_BYTES,
    Places,
    ValuePlace,
    contents,
    make_note,
    mark,
    values_per_object,
)
from kvoffload.tiers.object_store.search import ObjectSearch, group_of
from kvoffload.tiers.remote.client import Outcome, StoreClient

MAX_PUTS = 4
"""How often values are put again into further objects, because another server stored the first of them meanwhile."""


def connect(settings: Mapping[str, Any], times: Times = TIMES) -> ObjectStoreClient:
    """Returns a client, once its bucket has answered. ``settings``: the keys of ObjectStoreConfig, ``value_bytes`` and
    ``chained_groups``; without the last two, every value has an object of its own. Raises StoreError."""
    # Only here, because it needs obstore.
    from kvoffload.tiers.object_store.obstore_bucket import open_bucket

    value_bytes, groups = settings.get("value_bytes", 0), settings.get("chained_groups", ())
    return ObjectStoreClient(open_bucket(settings, times), value_bytes, groups, more_within_s=times.more_within_s)


@dataclass(frozen=True, slots=True)
class _Reading:
    """Neighbouring values of one object that one request reads: their indices in the call, and where the first is."""

    members: list[int]
    place: ValuePlace

    def piece(self, buffers: Sequence[Sequence[ByteArray]], sizes: Sequence[int]) -> Piece:
        """Returns the request for as much of the values as their buffers have room for."""
        place, size = self.place, sizes[self.members[0]]
        parts = [part for i in self.members for part in _first_bytes(buffers[i], place.value_bytes or size)]
        return Piece(place.name, place.number * place.value_bytes, parts)


class ObjectStoreClient(StoreClient):
    """Values in ``bucket``. Blocks of the KV cache ``groups`` share objects of up to ``object_bytes`` if they are
    small: consecutive ones of one ``put`` become one object, which has the name of the first of them, and a note that
    lists them. Blocks of other groups, of which lookups want single ones, have objects of their own.
    ``value_bytes``: the size of a block's value.

    The notes only help to find values; the reader verifies the bytes. An object is deleted with the removal of its last
    value, or of a value with wrong bytes. Until then a removed value is hidden from this client alone, and shown again
    instead of stored again.
    """

    def __init__(
        self,
        bucket: Bucket,
        value_bytes: int,
        groups: Collection[int],
        object_bytes: int = OBJECT_BYTES,
        clock: Callable[[], float] = time.monotonic,
        more_within_s: float = TIMES.more_within_s,
    ) -> None:
        self._bucket = bucket
        self._chained = frozenset(groups)
        self._clock = clock
        self._more_within_s = more_within_s
        self._step = values_per_object(value_bytes, object_bytes) if bucket.has_notes else 1
        self._places = Places()

    def exists(self, names: Sequence[str]) -> list[Outcome]:
        search = ObjectSearch(names, self._step, self._places, self._chained)
        begun = self._clock()
        while wanted := search.next_round():
            if self._clock() - begun > self._more_within_s:
                search.stop()
                break
            search.take(dict(zip(wanted, self._bucket.head(wanted), strict=True)))
        return search.outcomes()

    # Reads.

    def get(self, names: Sequence[str], buffers: Sequence[Sequence[ByteArray]]) -> list[Outcome]:
        outcomes = [Outcome.MISSING] * len(names)
        places = self._locate(names, outcomes)
        sizes = [sum(part.nbytes for part in parts) for parts in buffers]
        readings = _readings(places, sizes)
        pieces = [each.piece(buffers, sizes) for each in readings]
        answers = self._bucket.get(pieces) if pieces else []
        for each, answer in zip(readings, answers, strict=True):
            outcome = answer if isinstance(answer, Outcome) else self._check(each.place, answer, sizes[each.members[0]])
            if outcome is Outcome.MISSING:
                self._places.gone(each.place.name)
            elif isinstance(answer, Found) and self._step > 1:
                self._places.note(each.place.name, each.place.marks, answer.size)
            for i in each.members:
                outcomes[i] = outcome
        return outcomes

    def _locate(self, names: Sequence[str], outcomes: list[Outcome]) -> list[ValuePlace | None]:
        """Returns the places of values; where there is none, ``outcomes`` gets the reason."""
        places = [self._places.find(mark(name)) for name in names]
        unknown = [i for i, place in enumerate(places) if place is None]
        if self._step == 1:
            # It has an object of its own, or there is none.
            for i in unknown:
                places[i] = ValuePlace(names[i], (mark(names[i]),), 0)
        elif unknown:
            for i, outcome in zip(unknown, self.exists([names[i] for i in unknown]), strict=True):
                outcomes[i] = outcome
                if outcome is Outcome.OK:
                    outcomes[i] = Outcome.MISSING
                    places[i] = self._places.find(mark(names[i]))
        return places

    @staticmethod
    def _check(place: ValuePlace, found: Found, size: int) -> Outcome:
        """Compares the object that was read with the known contents. ``size``: that of the buffers of a value."""
        value_bytes = place.value_bytes or found.size
        if contents(place.name, found) != place.marks:
            return Outcome.MISSING
        is_whole = value_bytes == size and found.size == len(place.marks) * value_bytes
        return Outcome.OK if is_whole else Outcome.OTHER_SIZE

    # Writes.

    def put(self, names: Sequence[str], buffers: Sequence[Sequence[ByteArray]]) -> list[Outcome]:
        outcomes = [Outcome.FAILED] * len(names)
        marks = [mark(name) for name in names]
        sizes = [sum(part.nbytes for part in parts) for parts in buffers]
        left = list(range(len(names)))
        begun = self._clock()
        for _ in range(MAX_PUTS):
            if not left or self._clock() - begun > self._more_within_s:
                break
            groups = self._groups(left, names)
            answers = self._bucket.put([new_object(group, names, marks, buffers) for group in groups])
            held: list[list[int]] = []
            for group, answer in zip(groups, answers, strict=True):
                if answer is Outcome.HELD:
                    held.append(group)
                    continue
                if answer is Outcome.OK:
                    self._places.gone(names[group[0]])
                    size = len(group) * max(sizes[i] for i in group)
                    self._places.note(names[group[0]], tuple(marks[i] for i in group), size)
                for i in group:
                    outcomes[i] = answer
            left = self._take_held(held, names, marks, outcomes) if held else []
        return outcomes

    def _groups(self, left: Sequence[int], names: Sequence[str]) -> list[list[int]]:
        """Returns which of the values with the indices ``left`` become one object each."""
        groups: list[list[int]] = []
        open_groups: dict[int, list[int]] = {}
        for i in left:
            kv_group = group_of(names[i])
            most = self._step if kv_group in self._chained else 1
            group = open_groups.get(kv_group)
            if group is None or len(group) >= most:
                group = open_groups[kv_group] = []
                groups.append(group)
            group.append(i)
        return groups

    def _take_held(
        self, held: Sequence[list[int]], names: Sequence[str], marks: Sequence[bytes], outcomes: list[Outcome]
    ) -> list[int]:
        """Looks into the objects ``held``, which other servers stored first, for the values of this call. Returns the
        values that are in none of them."""
        left = []
        leaders = [group[0] for group in held]
        several = [i for i, group in zip(leaders, held, strict=True) if len(group) > 1]
        found = dict(zip(several, self._bucket.head([names[i] for i in several]), strict=True)) if several else {}
        for leader, group in zip(leaders, held, strict=True):
            outcomes[leader] = Outcome.HELD
            self._places.show(marks[leader])
            answer = found.get(leader)
            if not isinstance(answer, Found):
                continue
            there = contents(names[leader], answer)
            self._places.note(names[leader], there, answer.size)
            for i in group:
                if marks[i] in there:
                    outcomes[i] = Outcome.HELD
                    self._places.show(marks[i])
                else:
                    left.append(i)
        return left

    # Removal.

    def remove(self, names: Sequence[str]) -> list[Outcome]:
        objects: dict[str, str] = {}
        """The object to delete for each value."""
        unread = self._look_into([name for name in names if self._places.find(mark(name)) is None])
        for name in names:
            place = self._places.find(mark(name))
            if name in unread:
                continue
            if place is None:
                objects[name] = name
            elif self._places.is_distrusted(place.name) or self._places.hide(mark(name)):
                objects[name] = place.name
        distinct = list(dict.fromkeys(objects.values()))
        answers = dict(zip(distinct, self._bucket.delete(distinct), strict=True)) if distinct else {}
        for name, answer in answers.items():
            if answer is not Outcome.FAILED:
                self._places.gone(name)
        return [unread.get(name) or (answers[objects[name]] if name in objects else Outcome.OK) for name in names]

    def _look_into(self, names: Sequence[str]) -> dict[str, Outcome]:
        """Learns which values are in the objects of these names: others may have stored several there. Returns the
        outcomes of objects that could not be looked into."""
        unread: dict[str, Outcome] = {}
        if self._step == 1 or not names:
            return unread
        for name, answer in zip(names, self._bucket.head(names), strict=True):
            if isinstance(answer, Found):
                self._places.note(name, contents(name, answer), answer.size)
            elif answer is not Outcome.MISSING:
                unread[name] = answer
        return unread

    def distrust(self, names: Sequence[str]) -> list[str]:
        # One value per object: a damaged object is one failure, however many values it has.
        chosen: dict[str, str] = {}
        for name in names:
            place = self._places.find(mark(name))
            if place is not None:
                self._places.distrust(place.name)
            chosen.setdefault(name if place is None else place.name, name)
        return list(chosen.values())

    def close(self) -> None:
        self._bucket.close()


def _readings(places: Sequence[ValuePlace | None], sizes: Sequence[int]) -> list[_Reading]:
    """Returns the reads, one per run of neighbours in an object. Of a value that is larger than its buffers the first
    bytes are read, so no other one is read with it."""
    known = [(place.name, place.number, i, place) for i, place in enumerate(places) if place is not None]
    known.sort(key=lambda each: each[:3])
    readings: list[_Reading] = []
    for name, index, i, place in known:
        last = readings[-1] if readings else None
        if (
            last is not None
            and last.place.name == name
            and last.place.number + len(last.members) == index
            and sizes[last.members[0]] == sizes[i]
            and 0 < place.value_bytes == last.place.value_bytes <= sizes[i]
            and last.place.marks == place.marks
        ):
            last.members.append(i)
        else:
            readings.append(_Reading([i], place))
    return readings


def new_object(
    group: Sequence[int], names: Sequence[str], marks: Sequence[bytes], buffers: Sequence[Sequence[ByteArray]]
) -> NewObject:
    """Returns the object with the values that have these indices, padded to the size of the largest."""
    note = make_note([marks[i] for i in group]) if len(group) > 1 else ""
    sizes = {i: sum(part.nbytes for part in buffers[i]) for i in group}
    largest = max(sizes.values())
    padding = np.zeros(largest - min(sizes.values()), dtype=np.uint8)
    parts = [part for i in group for part in (*buffers[i], padding[: largest - sizes[i]]) if part.nbytes]
    return NewObject(names[group[0]], note, parts)


def _first_bytes(buffers: Sequence[ByteArray], nbytes: int) -> list[ByteArray]:
    """Returns the first ``nbytes`` of ``buffers``, or all."""
    parts = []
    for buffer in buffers:
        parts.append(buffer[:nbytes])
        nbytes -= parts[-1].nbytes
    return [part for part in parts if part.nbytes]

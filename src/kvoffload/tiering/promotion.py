"""Promotion: the blocks that one request waits for from lower tiers, and those that are pinned for it."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np
import numpy.typing as npt

from kvoffload.abc import IntegrityError, LoadStoreSpec, OffloadKey, ReqContext, Slots
from kvoffload.cache.manager import PolicyOffloadingManager

Sources = npt.NDArray[np.int8]
"""By block, the index of the tier that holds it."""


class PromotionState(enum.Enum):
    """State of the request of a promotion."""

    WANTED = enum.auto()
    """Some of its blocks are to be read, and were found in a tier since the last step."""
    QUEUED = enum.auto()
    """Some of its blocks are to be read when there is room; a tier may have lost them since they were found."""
    READING = enum.auto()
    """All blocks that it waits for are being read."""
    READY = enum.auto()
    """It waits for nothing: its blocks that have arrived are pinned."""
    EXPIRED = enum.auto()
    """Its deadline has passed: its next lookup is answered from host memory."""
    ANSWERED = enum.auto()
    """Its deadline has passed, and a lookup in this step was answered from host memory. It may wait again from the
    next step on."""
    RELEASED = enum.auto()
    """Its request was given device blocks or has ended: nothing is pinned for it."""


WAITING = frozenset({PromotionState.WANTED, PromotionState.QUEUED, PromotionState.READING})


@dataclass(frozen=True, slots=True, eq=False)
class Located:
    """Blocks in the order of their chain. ``sources[i]`` is the index of the tier that holds ``keys[i]``."""

    keys: list[OffloadKey]
    sources: Sources

    def __len__(self) -> int:
        return len(self.keys)

    def split(self, room: int, allowed: Sequence[int]) -> tuple[Located, Located]:
        """Returns the next blocks to read, at most ``room``, and at most ``allowed`` of each tier; and the others."""
        if len(allowed) == 1:
            n = min(room, max(0, allowed[0]))
            first, rest = slice(None, n), slice(n, None)
            return Located(self.keys[first], self.sources[first]), Located(self.keys[rest], self.sources[rest])
        is_next = np.zeros(len(self), dtype=np.bool_)
        for tier, limit in enumerate(allowed):
            mine = self.sources == tier
            is_next |= mine & (np.cumsum(mine) <= limit)
        is_next &= np.cumsum(is_next) <= room
        return self.select(is_next), self.select(~is_next)

    def select(self, mask: npt.NDArray[np.bool_]) -> Located:
        return self if mask.all() else Located(list(compress(self.keys, mask.tolist())), self.sources[mask])

    def distinct(self) -> Located:
        """Returns each block once."""
        if len(set(self.keys)) == len(self):
            return self
        sources = dict(zip(self.keys, self.sources.tolist(), strict=True))
        return Located(list(sources), np.array(list(sources.values()), dtype=np.int8))

    def before(self, others: Located) -> Located:
        """Returns these blocks, then ``others``."""
        return Located(self.keys + others.keys, np.concatenate((self.sources, others.sources)))


NONE = Located([], np.zeros(0, dtype=np.int8))
"""No blocks."""


@dataclass(slots=True, eq=False)
class Promotion:
    """The blocks of one request that come from lower tiers.

    ``wanted``, in the order of their chain, are still to be read; ``reading`` are under way; ``pinned`` have arrived
    and cannot be evicted. A request waits for ``wanted`` and ``reading``.
    """

    context: ReqContext
    number: int
    """Grows from promotion to promotion: a higher number means that the request came later."""
    num_wanted: npt.NDArray[np.int64]
    """How many of ``wanted`` are in each tier."""
    state: PromotionState = PromotionState.READY
    since: float = 0.0
    """When its wait began. Its deadline counts from here."""
    wanted: Located = field(default_factory=lambda: NONE)
    reading: set[OffloadKey] = field(default_factory=set)
    pinned: dict[OffloadKey, int] = field(default_factory=dict)
    """Host slots of promoted blocks, with one pin each."""
    pinned_at: float = 0.0
    """When a block was last pinned for it."""
    promoted: dict[str, list[OffloadKey]] = field(default_factory=dict)
    """By name of the tier, blocks that have arrived for it, whether or not they are still pinned."""
    chain: Sequence[OffloadKey] = ()
    """The request's chain, which is offered to the tiers when the request does not wait any more."""

    @property
    def is_waiting(self) -> bool:
        return self.state in WAITING

    def is_late(self, now: float, deadline_s: float) -> bool:
        """Returns whether the request waits, and has waited for its whole deadline."""
        return self.state in WAITING and now - self.since >= deadline_s

    def end_wait_if_done(self) -> None:
        """Ends the wait if there is nothing left to wait for."""
        if not self.wanted.keys and self.state in WAITING:
            self.state = PromotionState.READING if self.reading else PromotionState.READY

    @property
    def may_want_more(self) -> bool:
        """Whether further blocks can be promoted with those that the request waits for."""
        return not self.is_waiting or self.state is PromotionState.WANTED

    def stop_waiting(self, state: PromotionState) -> None:
        """Called when it wants nothing that is still to be read."""
        self.reading.clear()
        self.state = state


class PromotedPins:
    """The pins of promoted blocks in ``host``: one for each promotion that a block is pinned for."""

    def __init__(self, host: PolicyOffloadingManager) -> None:
        self.num_pinned = 0
        """Slots that are pinned for some promotion."""
        self._host = host
        self._pins = np.zeros(host.num_blocks, dtype=np.int32)
        """Promotions that each host slot is pinned for."""

    def has_any(self, slots: Slots) -> bool:
        """Returns whether one of ``slots`` is pinned for some promotion."""
        return bool(self._pins[slots].any())

    def add(self, promotion: Promotion, slots: dict[OffloadKey, int], tier: str, now: float) -> None:
        """Pins blocks that have just come from ``tier``, but not those that were dropped while they were read."""
        lease = self._host.lease(slots.values())
        is_pinned = self._host.pin(lease)
        new = lease.slots[is_pinned]
        self.num_pinned += int(np.count_nonzero(self._pins[new] == 0))
        self._pins[new] += 1
        arrived = dict(compress(slots.items(), is_pinned.tolist()))
        promotion.pinned.update(arrived)
        promotion.pinned_at = now
        promotion.promoted.setdefault(tier, []).extend(arrived)

    def take(self, promotion: Promotion | None, keys: Sequence[OffloadKey], context: ReqContext) -> LoadStoreSpec:
        """Returns a lease of ``keys``, as ``prepare_load`` does. The pins of those that were promoted for the request
        pass to it, without looking them up."""
        if promotion is None or not promotion.pinned:
            return self._host.prepare_load(keys, context)
        pinned = promotion.pinned
        slots = np.array([pinned.get(key, -1) for key in keys], dtype=np.int64)
        others = np.flatnonzero(slots < 0)
        if len(others):
            slots[others] = self._host.prepare_load([keys[i] for i in others.tolist()], context).slots
        self._forget(promotion, keys)
        return self._host.lease(slots)

    def remove(self, promotion: Promotion, keys: Collection[OffloadKey]) -> None:
        """Removes the promotion's pins of those of ``keys`` that have one."""
        slots = self._forget(promotion, keys)
        if len(slots):
            self._host.complete_load(self._host.lease(slots))

    def _forget(self, promotion: Promotion, keys: Collection[OffloadKey]) -> Slots:
        pinned = promotion.pinned
        slots = np.array([pinned.pop(key) for key in keys if key in pinned], dtype=np.int64)
        self._pins[slots] -= 1
        self.num_pinned -= int(np.count_nonzero(self._pins[slots] == 0))
        return slots

    def check_integrity(self, promotions: Iterable[Promotion]) -> None:
        """Raises IntegrityError if these are not the pins of ``promotions``, or a pinned block can be evicted."""
        pins = np.zeros_like(self._pins)
        for promotion in promotions:
            pins[list(promotion.pinned.values())] += 1
            for key, slot in promotion.pinned.items():
                status = self._host.block_status(key)
                is_pinned = status is not None and status.slot == slot and status.ref_cnt > 0
                if not is_pinned and not self._host.table.dropped[slot]:
                    raise IntegrityError("a block that is pinned for a promotion can be evicted")
        if (pins != self._pins).any() or np.count_nonzero(pins) != self.num_pinned:
            raise IntegrityError("the pins of promoted blocks do not match the promotions")


@dataclass(slots=True, eq=False)
class ReadBatch:
    """Blocks that a tier was given to read in one call."""

    slots: dict[OffloadKey, int]
    """Host slots of the blocks that are still under way."""
    promotions: dict[Promotion, None]
    """The promotions that wait for some of them, and others that have stopped waiting."""
    is_overdue: bool = False
    """The read was under way when the tier's reads hung. No request waits for it, and its host slots are not free
    until the tier reports it."""


def waiting_for(batches: Collection[ReadBatch]) -> set[Promotion]:
    """Returns the promotions that wait for a block of ``batches``."""
    return {
        promotion
        for batch in batches
        for promotion in batch.promotions
        if not promotion.reading.isdisjoint(batch.slots)
    }

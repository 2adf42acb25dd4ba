"""Device blocks: what each of the engine's device blocks holds, for host memory that does not repeat the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np

from kvoffload.abc import OffloadKey
from kvoffload.connector.layout import Block
from kvoffload.connector.request import RequestState

EARLY, REFUSED = 1, 2
"""``soon`` has returned what a device block holds, and the policy did not admit it."""
MAX_NAMES = 8
"""Tenants for which one device block is held: the one that has computed or loaded it, and the latest others."""

HeldBlock: TypeAlias = tuple[OffloadKey, bytes, int, int, int]
"""A whole block of computed, known tokens in the engine's device cache, as one tenant names it: its key; what precedes
the block hash in that, which differs between tenants; the device block; its ordinal in its requests; and the ``number``
of the tenant's request that computed, loaded or found it first."""


class DeviceBlocks:
    """Knows which block each device block holds until that is handed out again.

    An entry may be missing: its block is then not stored when it leaves the device. None may be wrong, or wrong bytes
    would be stored. ``keeps_states``: whether it has a request for each.

    Engines have many thousands of device blocks, and Python's garbage collector would stop the scheduler while it looks
    at as many objects. It looks neither into NumPy's arrays nor at tuples of bytes and numbers.
    """

    def __init__(self, keeps_states: bool = False) -> None:
        self._held = np.empty(0, dtype=object)
        self.states = np.empty(0, dtype=object) if keeps_states else None
        """A request that has, or had, what is or was last in each device block; None if it keeps none."""
        self._is_early = bytearray()
        """EARLY or REFUSED by device block, else 0."""
        self._others: dict[int, tuple[HeldBlock, ...]] = {}
        """By device block, what it holds as further tenants name it."""
        self.latest: dict[OffloadKey, int] = {}
        """Of the copies of a block on the device, the one that was computed or found last. Read only for others."""

    def hold(self, state: RequestState, blocks: Iterable[Block]) -> list[OffloadKey]:
        """Notes that the device holds these blocks of a request. Returns those that were in the same device blocks. If
        a device block has the same tokens for another tenant, it holds the block for both."""
        all_held, latest, namespace, number = self._held, self.latest, state.blocks.namespace, state.observed.number
        left: list[OffloadKey] = []
        for _, ordinal, key, _, (at,) in blocks:
            if at >= len(all_held):
                self._grow(at + 1)
                all_held = self._held
            before: HeldBlock | None = all_held[at]
            if before is None or before[0] != key:
                held = (key, namespace, at, ordinal, number)
                if before is not None and not self._is_named(before, held, left):
                    left += [other[0] for other in self.leave((at,))]
                    before = None
                if before is None:
                    all_held[at] = held
                    if self.states is not None:
                        self.states[at] = state
            self._is_early[at] = 0
            latest[key] = at
        return left

    def _grow(self, least: int) -> None:
        more = max(least, 2 * len(self._held)) - len(self._held)
        nothing = np.full(more, None, dtype=object)
        self._held = np.concatenate((self._held, nothing))
        if self.states is not None:
            self.states = np.concatenate((self.states, nothing))
        self._is_early += bytes(more)

    def _is_named(self, first: HeldBlock, held: HeldBlock, left: list[OffloadKey]) -> bool:
        """Adds a further tenant's name for what a device block holds, unless it holds something else: then returns
        False. Adds to ``left`` what is not held any more."""
        if first[0][len(first[1]) :] != held[0][len(held[1]) :]:
            return False
        at, others = first[2], self._others.get(first[2], ())
        if all(other[0] != held[0] for other in others):
            if len(others) == MAX_NAMES - 1:
                oldest, others = others[0][0], others[1:]
                if self.latest.get(oldest) == at:
                    del self.latest[oldest]
                    left.append(oldest)
            self._others[at] = (*others, held)
        return True

    def _names(self, at: int) -> Sequence[HeldBlock]:
        """Returns every block that device block ``at`` holds."""
        return (self._held[at], *self._others.get(at, ()))

    def leave(self, device_blocks: Iterable[int]) -> list[HeldBlock]:
        """Removes what these device blocks hold. Returns the blocks of which no other copy is known, in this order."""
        left: list[HeldBlock] = []
        all_held, latest, others, size = self._held, self.latest, self._others, len(self._held)
        for at in device_blocks:
            if at >= size or (first := all_held[at]) is None:
                continue
            for held in self._names(at) if at in others else (first,):
                if latest.get(held[0]) == at:
                    del latest[held[0]]
                    left.append(held)
            all_held[at] = None
            others.pop(at, None)
        return left

    def not_early(self, left: Sequence[HeldBlock]) -> list[HeldBlock]:
        """Returns those of the blocks that have just left which ``soon`` had not returned, or were refused then."""
        is_early = self._is_early
        return [held for held in left if is_early[held[2]] != EARLY]

    def num_late(self, device_blocks: Iterable[int]) -> int:
        """Returns how many of these device blocks hold something that was not stored early."""
        all_held, is_early, size = self._held, self._is_early, len(self._held)
        return sum(at < size and is_early[at] != EARLY and all_held[at] is not None for at in device_blocks)

    def forget_early(self, device_blocks: Iterable[int], mark: int = 0) -> None:
        """Makes ``soon`` return once more what these device blocks hold; not with the mark REFUSED, if it was not worth
        its room: when it leaves, that may have changed."""
        for at in device_blocks:
            if at < len(self._is_early):
                self._is_early[at] = mark

    def soon(self, device_blocks: Iterable[int], most: int) -> list[HeldBlock]:
        """Returns the blocks that would leave if these device blocks were handed out, in this order, without those that
        it has returned before: those of the first ``most`` device blocks that have any."""
        found: list[HeldBlock] = []
        all_held, latest, others, is_early = self._held, self.latest, self._others, self._is_early
        for at in device_blocks:
            if at >= len(all_held) or is_early[at] or (first := all_held[at]) is None:
                continue
            if not most:
                break
            most -= 1
            is_early[at] = EARLY
            if latest.get(first[0]) == at:
                found.append(first)
            if at in others:
                found += [held for held in others[at] if latest.get(held[0]) == at]
        return found

    def get(self, keys: Iterable[OffloadKey]) -> list[HeldBlock]:
        """Returns those of the blocks that the device holds."""
        places = ((key, self.latest[key]) for key in keys if key in self.latest)
        return [held for key, at in places for held in self._names(at) if held[0] == key]

    def clear(self) -> list[OffloadKey]:
        held = list(self.latest)
        self._held.fill(None)
        if self.states is not None:
            self.states.fill(None)
        self._others.clear()
        self.latest.clear()
        return held

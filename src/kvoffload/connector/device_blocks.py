"""Device blocks: what each of the engine's device blocks holds, for host memory that does not repeat the device."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np

from kvoffload.abc import OffloadKey
from kvoffload.connector.layout import Block
from kvoffload.connector.request import RequestState

MAX_NAMES = 8
"""Tenants for which one device block is held: the one that has computed or loaded it, and the latest others."""


HeldBlock: TypeAlias = tuple[OffloadKey, bytes, int, int, int, RequestState | None]
"""A whole block of computed, known tokens in the engine's device cache, as one tenant names it: its key; what precedes
the block hash in that, which differs between tenants; the device block; its ordinal in its requests; the ``number`` of
the tenant's request that computed, loaded or found it first; and a request that has it, if events are to describe it.
Thousands may leave in one step, and plain tuples are made five times as fast as named ones."""


class DeviceBlocks:
    """Knows which block each device block holds until that is handed out again.

    Each block has one device block. An entry may be missing: its block is then not stored when it leaves the device.
    None may be wrong, or wrong bytes would be stored. ``keeps_states``: whether entries have their requests.

    Engines have many thousands of device blocks, and Python's garbage collector would visit every object that refers to
    others. So there are arrays by device block, into which it does not look, and no object per device block.
    """

    def __init__(self, keeps_states: bool = False) -> None:
        self._keys = np.empty(0, dtype=object)
        self._namespaces = np.empty(0, dtype=object)
        self._states = np.empty(0, dtype=object) if keeps_states else None
        self._ordinals, self._numbers = array("q"), array("q")
        self._is_early = bytearray()
        """Whether ``soon`` has returned what a device block holds."""
        self._others: dict[int, tuple[HeldBlock, ...]] = {}
        """By device block, what it is for further tenants. The collector does not visit tuples of bytes and numbers."""
        self._latest: dict[OffloadKey, int] = {}
        """Of the copies of a block on the device, the one that was computed or found last."""

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._latest

    def __len__(self) -> int:
        """Blocks on the device."""
        return len(self._latest)

    def hold(self, state: RequestState, blocks: Iterable[Block]) -> list[OffloadKey]:
        """Notes that the device holds these blocks of a request. Returns those that were in the same device blocks. If
        a device block has the same tokens for another tenant, it holds the block for both."""
        keys, latest, namespace, number = self._keys, self._latest, state.blocks.namespace, state.number
        left: list[OffloadKey] = []
        for block in blocks:
            (at,), key = block.device_blocks, block.key
            if at >= len(keys):
                self._grow(at + 1)
                keys = self._keys
            before = keys[at]
            if before is not None and before != key and not self._is_named(at, block, state, left):
                left += [held[0] for held in self.leave((at,))]
                before = None
            if before is None:
                keys[at], self._namespaces[at] = key, namespace
                self._ordinals[at], self._numbers[at] = block.ordinal, number
                if self._states is not None:
                    self._states[at] = state
            self._is_early[at] = 0
            latest[key] = at
        return left

    def _grow(self, least: int) -> None:
        more = max(least, 2 * len(self._keys)) - len(self._keys)
        nothing = np.full(more, None, dtype=object)
        self._keys = np.concatenate((self._keys, nothing))
        self._namespaces = np.concatenate((self._namespaces, nothing))
        if self._states is not None:
            self._states = np.concatenate((self._states, nothing))
        self._ordinals.frombytes(bytes(8 * more))
        self._numbers.frombytes(bytes(8 * more))
        self._is_early += bytes(more)

    def _is_named(self, at: int, block: Block, state: RequestState, left: list[OffloadKey]) -> bool:
        """Adds the name that a further tenant has for what a device block holds. Returns False if it holds something
        else. Adds to ``left`` what is not held any more."""
        key, namespace = block.key, state.blocks.namespace
        if self._keys[at][len(self._namespaces[at]) :] != key[len(namespace) :]:
            return False
        others = self._others.get(at, ())
        if all(other[0] != key for other in others):
            kept = None if self._states is None else state
            others = (*others, (key, namespace, at, block.ordinal, state.number, kept))
            if len(others) == MAX_NAMES:
                self._lose_name(others[0][0], at, left)
                others = others[1:]
            self._others[at] = others
        return True

    def _lose_name(self, key: OffloadKey, at: int, left: list[OffloadKey]) -> None:
        if self._latest.get(key) == at:
            del self._latest[key]
            left.append(key)

    def _names(self, at: int) -> Sequence[HeldBlock]:
        """Returns every block that device block ``at`` holds."""
        state = None if self._states is None else self._states[at]
        first = (self._keys[at], self._namespaces[at], at, self._ordinals[at], self._numbers[at], state)
        return (first, *self._others[at]) if at in self._others else (first,)

    def leave(self, device_blocks: Iterable[int]) -> list[HeldBlock]:
        """Removes what these device blocks hold. Returns the blocks of which no other copy is known, in this order."""
        left: list[HeldBlock] = []
        keys, latest, size = self._keys, self._latest, len(self._keys)
        for at in device_blocks:
            if at >= size or keys[at] is None:
                continue
            for held in self._names(at):
                if latest.get(held[0]) == at:
                    del latest[held[0]]
                    left.append(held)
            keys[at] = None
            self._others.pop(at, None)
            if self._states is not None:
                self._states[at] = None
        return left

    def soon(self, device_blocks: Iterable[int], most: int) -> list[HeldBlock]:
        """Returns the blocks that would leave if these device blocks were handed out, in this order, without those that
        it has returned before: those of the first ``most`` device blocks that have any."""
        found: list[HeldBlock] = []
        keys, latest, is_early, size = self._keys, self._latest, self._is_early, len(self._keys)
        for at in device_blocks:
            if at >= size or is_early[at] or keys[at] is None:
                continue
            if not most:
                break
            most -= 1
            is_early[at] = 1
            found += [held for held in self._names(at) if latest.get(held[0]) == at]
        return found

    def get(self, keys: Iterable[OffloadKey]) -> list[HeldBlock]:
        """Returns those of the blocks that the device holds."""
        found = []
        for key in keys:
            if (at := self._latest.get(key)) is not None:
                found += [held for held in self._names(at) if held[0] == key]
        return found

    def having(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Returns those of ``keys`` that the device holds."""
        latest = self._latest
        return [key for key in keys if key in latest]

    def clear(self) -> list[OffloadKey]:
        """Removes and returns everything."""
        held = list(self._latest)
        self._keys.fill(None)
        if self._states is not None:
            self._states.fill(None)
        self._others.clear()
        self._latest.clear()
        return held

"""Device blocks: what each of the engine's device blocks holds, for host memory that does not repeat the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvoffload.abc import OffloadKey
from kvoffload.connector.layout import Block
from kvoffload.connector.request import RequestState


class HeldBlock(NamedTuple):
    """A whole block of computed, known tokens in the engine's device cache."""

    block: Block
    namespace: bytes
    """What precedes its block hash: it differs between tenants."""
    state: RequestState | None
    """A request that has it, if events are to describe it."""


class DeviceBlocks:
    """Knows which block each device block holds until that is handed out again.

    Each block has one device block. An entry may be missing: its block is then not stored when it leaves the device.
    None may be wrong, or wrong bytes would be stored. ``keeps_states``: whether entries have their requests.
    """

    def __init__(self, keeps_states: bool = False) -> None:
        self._keeps_states = keeps_states
        self._held: dict[int, HeldBlock] = {}
        """By device block."""
        self._latest: dict[OffloadKey, HeldBlock] = {}
        """Of the copies of a block on the device, the one that was computed or found last."""
        self._early: set[OffloadKey] = set()
        """Blocks that ``soon`` has returned, and that are still there."""

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._latest

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, state: RequestState, blocks: Iterable[Block]) -> list[HeldBlock]:
        """Notes that the device holds these blocks of a request. Returns those that were in the same device blocks."""
        namespace, kept = state.blocks.namespace, state if self._keeps_states else None
        left = []
        for block in blocks:
            left += [held for held in self.leave(block.device_blocks) if held.block.key != block.key]
            (device_block,) = block.device_blocks
            self._held[device_block] = self._latest[block.key] = HeldBlock(block, namespace, kept)
        return left

    def leave(self, device_blocks: Iterable[int]) -> list[HeldBlock]:
        """Removes what these device blocks hold. Returns the blocks of which no other copy is known, in this order."""
        left = []
        for device_block in device_blocks:
            held = self._held.pop(device_block, None)
            if held is None:
                continue
            key = held.block.key
            if self._latest.get(key) is held:
                del self._latest[key]
                self._early.discard(key)
                left.append(held)
        return left

    def soon(self, device_blocks: Iterable[int]) -> list[HeldBlock]:
        """Returns the blocks that would leave if these device blocks were handed out, in this order, without those that
        it has returned before."""
        found = []
        for device_block in device_blocks:
            held = self._held.get(device_block)
            if held is not None and held.block.key not in self._early and self._latest.get(held.block.key) is held:
                self._early.add(held.block.key)
                found.append(held)
        return found

    def get(self, keys: Iterable[OffloadKey]) -> list[HeldBlock]:
        """Returns those of the blocks that the device holds."""
        return [held for key in keys if (held := self._latest.get(key)) is not None]

    def having(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Returns those of ``keys`` that the device holds."""
        latest = self._latest
        return [key for key in keys if key in latest]

    def clear(self) -> list[HeldBlock]:
        """Removes and returns everything."""
        held = list(self._latest.values())
        self._held.clear()
        self._latest.clear()
        self._early.clear()
        return held

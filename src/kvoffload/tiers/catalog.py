"""Catalog: which block is in which slot of a tier, and which blocks are in transfer."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from itertools import compress

import numpy as np
import numpy.typing as npt

from kvoffload.abc import Access, Keys, OffloadKey, RetainRefusal, Slots, States
from kvoffload.abc.tier import HIT, MISS
from kvoffload.cache.blocks import BlockCache
from kvoffload.cache.keys import TRANSIENT
from kvoffload.cache.policies import make_policy
from kvoffload.cache.slots import SlotBackend
from kvoffload.cache.tenants import Shares

DISK_MEDIUM = "DISK"
RESTORED_AT_ONCE = 1 << 12
"""Few: a tier may be opened while another thread needs the interpreter, which single calls hold."""

Claim = tuple[list[OffloadKey], Slots, Slots]
"""Blocks that are in transfer from now on: keys, host slots, and slots in the tier, all in the same order."""


class Catalog:
    """The blocks of a tier with ``num_slots`` slots of ``block_bytes``. ``policy``: the name of its cache policy.
    ``shares``: what each tenant may take of the slots; without it they are everybody's. ``blocks`` keeps them.

    Every new block is accepted: a refused one would be a hole in its chain. With ``grows`` there are no slots until
    they are added. Raises ConfigError if there is no such policy.
    """

    def __init__(
        self,
        num_slots: int,
        block_bytes: int,
        policy: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        grows: bool = False,
        shares: Shares | None = None,
    ) -> None:
        self.num_evicted = 0
        """Blocks evicted since the start."""
        self._backend = SlotBackend(block_bytes, DISK_MEDIUM, num_slots, grows)
        self._policy = make_policy(policy, num_slots, shares)
        self._policy.must_store = True
        self._clock = clock
        self.blocks = BlockCache(self._backend, self._policy, clock)
        self.retention = self.blocks.retention
        """Which blocks stay for a promised time."""
        self.retention.take_changes()
        self._table = self.blocks.table
        self._is_read = np.zeros(num_slots, dtype=np.bool_)
        """Which slots are being read."""

    @property
    def num_blocks(self) -> int:
        """Slots that are in use: by blocks, or by transfers of blocks that were dropped."""
        return self.blocks.num_used

    @property
    def num_free(self) -> int:
        return self._backend.get_num_free_blocks()

    @property
    def num_available(self) -> int:
        """Blocks that could be written now, in free slots and in place of others."""
        return self.blocks.num_available

    def contains(self, keys: Keys) -> States:
        """Returns one LookupState per key: HIT if the block can be read, else MISS."""
        states = self._table.states(keys)
        states[states != HIT] = MISS
        return states

    # The medium.

    def restore(self, keys: Keys, slots: Slots) -> Slots:
        """Adds distinct blocks that the medium holds already, the least recently used first. Returns the slots of those
        that were left out, because they are more than their tenants' quotas, or their keys are transient."""
        kept = self.blocks.room.restorable(keys)
        # Transient keys sort last.
        if max(keys, default=b"").startswith(TRANSIENT):
            is_lasting = np.array([not key.startswith(TRANSIENT) for key in keys])
            kept = is_lasting if kept is None else kept & is_lasting
        left_out = slots[:0]
        if kept is not None:
            keys, slots, left_out = list(compress(keys, kept.tolist())), slots[kept], slots[~kept]
        for start in range(0, len(keys), RESTORED_AT_ONCE):
            share = slots[start : start + RESTORED_AT_ONCE]
            self._backend.add_allocated(share)
            self.blocks.restore(keys[start : start + RESTORED_AT_ONCE], share)
        return left_out

    def add_free(self, slots: Slots) -> None:
        """Adds new slots of the medium, which are free."""
        self._backend.add_free(slots)

    # Transfers.

    def begin_reads(self, keys: Keys, host_slots: Slots) -> Claim:
        """Pins those of ``keys`` that can be read and are not being read already."""
        if len(set(keys)) < len(keys):
            last = {key: i for i, key in enumerate(keys)}
            keys, host_slots = list(last), host_slots[list(last.values())]
        slots = self._table.find(keys)
        cannot = (slots < 0) | self._table.is_writing(slots) | self._is_read[slots]
        if cannot.any():
            # The caller has looked at another moment, or has not looked.
            chosen = np.flatnonzero(~cannot)
            keys, host_slots, slots = [keys[i] for i in chosen.tolist()], host_slots[chosen], slots[chosen]
        self.blocks.pin(slots)
        self._is_read[slots] = True
        return list(keys), host_slots.copy(), slots

    def begin_writes(self, keys: Keys, host_slots: Slots, room: int) -> Claim:
        """Gives slots to those of ``keys`` that are absent, at most ``room`` of them, which must not be more than
        ``num_available``. Evicts other blocks as necessary."""
        room = min(room, self.blocks.room.num_storable(keys[0])) if keys else 0
        output = self.blocks.allocate(keys) if len(keys) <= room else None
        if output is None:
            # Too many, or some of them are present, and would have to be evicted for the others.
            absent = np.flatnonzero(self._table.states(keys) == MISS)[:room]
            keys, host_slots = [keys[i] for i in absent.tolist()], host_slots[absent]
            output = self.blocks.allocate(keys)
        if output is None:
            return [], host_slots[:0], host_slots[:0]
        self.num_evicted += len(output.evicted_keys)
        if len(output.keys_to_store) < len(keys):
            index = {key: i for i, key in enumerate(keys)}
            host_slots = host_slots[[index[key] for key in output.keys_to_store]]
        return output.keys_to_store, host_slots.copy(), output.store_spec.slots

    def end_reads(self, keys: Keys, slots: Slots, succeeded: npt.NDArray[np.bool_]) -> Slots:
        """Reads of ``keys`` in ``slots`` have ended. Blocks that could not be read are dropped. Returns the slots of
        those that had been dropped before, which are free now."""
        dropped = self._table.dropped[slots]
        self.cancel_reads(slots)
        if not succeeded.all():
            self.blocks.drop([keys[i] for i in np.flatnonzero(~succeeded & ~dropped).tolist()])
        return slots[dropped]

    def end_writes(self, slots: Slots, succeeded: npt.NDArray[np.bool_]) -> Slots:
        """Writes to ``slots`` have ended: the blocks can be read, or vanish if they could not be written. Returns the
        slots of those that had been dropped before, which are free now."""
        dropped = self._table.dropped[slots]
        if succeeded.all():
            self.blocks.set_ready(slots)
        else:
            self.blocks.set_ready(slots[succeeded])
            self.cancel_writes(slots[~succeeded])
        return slots[dropped]

    def cancel_reads(self, slots: Slots) -> None:
        """Undoes ``begin_reads``."""
        self._is_read[slots] = False
        self.blocks.unpin(slots)

    def cancel_writes(self, slots: Slots) -> None:
        """Undoes ``begin_writes``, except the evictions. What is to be retained may be written again."""
        known = slots[~self._table.dropped[slots]]
        self.blocks.drop(self._table.key_of[known].tolist())
        self.blocks.take_back(slots)

    # Order and removal.

    def touch(self, keys: Keys, stored: Collection[OffloadKey] | None = None) -> Slots:
        """Marks as recently used, last key first; with ``stored``, see ``Tier.touch``. Returns the slots of the blocks
        that are present, in order."""
        found = self._table.find(keys)
        if stored is None:
            self._policy.access(Access(keys, found, *self._table.used(found), self._clock()))
        else:
            self._policy.reorder(*self._table.chain(found, list(stored)))
        return found[found >= 0]

    def drop(self, keys: Keys) -> Slots:
        """Drops blocks at once. Returns the slots that they were in."""
        return self.blocks.drop(keys)

    def retain(self, keys: Keys, session: int | None, seconds: float) -> RetainRefusal | None:
        """See ``Tier.retain``."""
        retention = self.retention
        if seconds > 0:
            return retention.retain(keys, session, seconds)
        retention.give_up(keys)
        if session is not None:
            retention.end(session)
        return None

    def take_retained(self) -> tuple[Slots, list[OffloadKey], list[float]]:
        """Returns the slots of blocks for which the time until which they are retained has changed since the last call,
        their keys, and these times, 0 if they are not retained any more. Ends retentions whose time is over."""
        self.retention.expire()
        changes = self.retention.take_changes()
        slots = np.fromiter(changes, np.int64, len(changes))
        return slots, self._table.key_of[slots].tolist(), list(changes.values())

    def take_removed(self) -> list[OffloadKey]:
        """Returns the keys of blocks that have left since the last call, for any reason. The first call returns
        none; until then none are kept."""
        self.blocks.history.has_events = True
        return [key for event in self.blocks.history.take_events() if event.removed for key in event.keys]

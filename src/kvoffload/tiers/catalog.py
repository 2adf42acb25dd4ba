"""Catalog: which block is in which slot of a tier, and which blocks are in transfer."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from itertools import compress

import numpy as np
import numpy.typing as npt

from kvoffload.abc import BlockNotReadyError, OffloadKey, RetainRefusal, Slots, States
from kvoffload.abc.tier import HIT, MISS
from kvoffload.cache.keys import TRANSIENT
from kvoffload.cache.manager import PolicyOffloadingManager
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
    ``shares``: what each tenant may take of the slots; without it they are everybody's. ``manager`` keeps the blocks.

    Keys are looked up when a transfer begins; from then on it is known by its slots in the tier, which do not change
    before it has ended. A block that is dropped in the meantime is no longer found, and its slot becomes free when its
    transfer has ended. Every new block is accepted: a refused one would be a hole in its chain. With ``grows``
    there are no slots until they are added. Raises ConfigError if there is no such policy.
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
        self.manager = PolicyOffloadingManager(
            self._backend, make_policy(policy, num_slots, shares), must_store=True, clock=clock
        )
        self.retention = self.manager.retention
        """Which blocks stay for a promised time."""
        self.retention.take_changes()
        self._table = self.manager.table
        self._is_read = np.zeros(num_slots, dtype=np.bool_)
        """Which slots are being read."""

    @property
    def num_blocks(self) -> int:
        """Slots that are in use: by blocks, or by transfers of blocks that were dropped."""
        return self.manager.num_used_blocks

    @property
    def num_free(self) -> int:
        return self._backend.get_num_free_blocks()

    @property
    def num_available(self) -> int:
        """Blocks that could be written now, in free slots and in place of others."""
        return self.manager.num_available_blocks

    def contains(self, keys: Sequence[OffloadKey]) -> States:
        """Returns one LookupState per key: HIT if the block can be read, else MISS."""
        states = self._table.states(keys)
        states[states != HIT] = MISS
        return states

    # The medium.

    def restore(self, keys: Sequence[OffloadKey], slots: Slots) -> Slots:
        """Adds distinct blocks that the medium holds already, the least recently used first. Returns the slots of those
        that were left out, because they are more than their tenants' quotas, or their keys are transient."""
        kept = self.manager.room.restorable(keys)
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
            self.manager.restore(keys[start : start + RESTORED_AT_ONCE], share)
        return left_out

    def add_free(self, slots: Slots) -> None:
        """Adds new slots of the medium, which are free."""
        self._backend.add_free(slots)

    # Transfers.

    def begin_reads(self, keys: Sequence[OffloadKey], host_slots: Slots) -> Claim:
        """Pins those of ``keys`` that can be read and are not being read already."""
        if len(set(keys)) < len(keys):
            last = {key: i for i, key in enumerate(keys)}
            keys, host_slots = list(last), host_slots[list(last.values())]
        try:
            slots = self.manager.prepare_load(keys).slots
        except BlockNotReadyError:
            # The caller has looked at another moment, or has not looked.
            ready = np.flatnonzero(self._table.states(keys) == HIT)
            keys, host_slots = [keys[i] for i in ready.tolist()], host_slots[ready]
            slots = self.manager.prepare_load(keys).slots
        being_read = self._is_read[slots]
        if being_read.any():
            self._unpin(slots[being_read])
            fresh = np.flatnonzero(~being_read)
            keys, host_slots, slots = [keys[i] for i in fresh.tolist()], host_slots[fresh], slots[fresh]
        self._is_read[slots] = True
        return list(keys), host_slots.copy(), slots

    def begin_writes(self, keys: Sequence[OffloadKey], host_slots: Slots, room: int) -> Claim:
        """Gives slots to those of ``keys`` that are absent, at most ``room`` of them, which must not be more than
        ``num_available``. Evicts other blocks as necessary."""
        room = min(room, self.manager.room.num_storable(keys[0])) if keys else 0
        output = self.manager.prepare_store(keys) if len(keys) <= room else None
        if output is None:
            # Too many, or some of them are present, and would have to be evicted for the others.
            absent = np.flatnonzero(self._table.states(keys) == MISS)[:room]
            keys, host_slots = [keys[i] for i in absent.tolist()], host_slots[absent]
            output = self.manager.prepare_store(keys)
        if output is None:
            return [], host_slots[:0], host_slots[:0]
        self.num_evicted += len(output.evicted_keys)
        if len(output.keys_to_store) < len(keys):
            index = {key: i for i, key in enumerate(keys)}
            host_slots = host_slots[[index[key] for key in output.keys_to_store]]
        return output.keys_to_store, host_slots.copy(), output.store_spec.slots

    def end_reads(self, keys: Sequence[OffloadKey], slots: Slots, succeeded: npt.NDArray[np.bool_]) -> Slots:
        """Reads of ``keys`` in ``slots`` have ended. Blocks that could not be read are dropped. Returns the slots of
        those that had been dropped before, which are free now."""
        dropped = self._table.dropped[slots]
        self.cancel_reads(slots)
        if not succeeded.all():
            self.manager.drop([keys[i] for i in np.flatnonzero(~succeeded & ~dropped).tolist()])
        return slots[dropped]

    def end_writes(self, slots: Slots, succeeded: npt.NDArray[np.bool_]) -> Slots:
        """Writes to ``slots`` have ended: the blocks can be read, or vanish if they could not be written. Returns the
        slots of those that had been dropped before, which are free now."""
        dropped = self._table.dropped[slots]
        if succeeded.all():
            self.manager.complete_store(self.manager.lease(slots))
        else:
            self.manager.complete_store(self.manager.lease(slots[succeeded]))
            self.cancel_writes(slots[~succeeded])
        return slots[dropped]

    def cancel_reads(self, slots: Slots) -> None:
        """Undoes ``begin_reads``."""
        self._is_read[slots] = False
        self._unpin(slots)

    def cancel_writes(self, slots: Slots) -> None:
        """Undoes ``begin_writes``, except the evictions. What is to be retained may be written again."""
        known = slots[~self._table.dropped[slots]]
        self.manager.drop(self._table.key_of[known].tolist())
        self.manager.complete_store(self.manager.lease(slots), success=False)

    def _unpin(self, slots: Slots) -> None:
        self.manager.complete_load(self.manager.lease(slots))

    # Order and removal.

    def touch(self, keys: Sequence[OffloadKey], stored: Collection[OffloadKey] | None = None) -> Slots:
        """Marks as recently used, last key first; with ``stored``, see ``Tier.touch``. Returns the slots of the blocks
        that are present, in order."""
        slots = self._table.find(keys)
        if stored is None:
            self.manager.touch(keys, found=slots)
        else:
            self.manager.end_chain(keys, stored, found=slots)
        return slots[slots >= 0]

    def drop(self, keys: Sequence[OffloadKey]) -> Slots:
        """Drops blocks at once. Returns the slots that they were in."""
        slots = self._table.find(keys)
        self.manager.drop(keys)
        return slots[slots >= 0]

    def retain(self, keys: Sequence[OffloadKey], session: int | None, seconds: float) -> RetainRefusal | None:
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
        self.manager.history.has_events = True
        return [key for event in self.manager.take_events() if event.removed for key in event.keys]

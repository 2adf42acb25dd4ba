"""BlockCache: the blocks in the slots of one medium. Host memory and disks keep theirs with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvoffload.abc import (
    Backend,
    BlockNotPinnedError,
    CachePolicy,
    ConfigError,
    IntegrityError,
    Keys,
    MissReason,
    OffloadKey,
    PrepareStoreOutput,
    Slots,
    TenantUse,
)
from kvoffload.cache.history import History
from kvoffload.cache.misses import MissMemory
from kvoffload.cache.retention import Retention
from kvoffload.cache.room import Room
from kvoffload.cache.table import BlockTable


class BlockCache:
    """Which block is in which slot of ``backend``, which leave for others in the order of ``policy``, and which stay
    for a promised time. ``policy`` must be made for ``backend.num_blocks`` blocks.

    Keys are looked up when a transfer begins; from then on it is known by its slots, which do not change before it has
    ended. A block that is dropped meanwhile is not found any more, and its slot is free when its transfer has ended.

    ``misses`` remembers why blocks left, by default in a table of fixed size. ``device_blocks``: the capacity of the
    engine's device cache, if blocks are stored when they leave that; 0 if they are stored as they are computed.
    """

    def __init__(
        self,
        backend: Backend,
        policy: CachePolicy,
        clock: Callable[[], float],
        misses: MissMemory | None = None,
        enable_events: bool = False,
        device_blocks: int = 0,
    ) -> None:
        if policy.capacity != backend.num_blocks:
            raise ConfigError(
                fault=f"policy capacity {policy.capacity}: the backend has {backend.num_blocks} blocks",
                fix="make the policy for as many",
            )
        self.backend = backend
        self.policy = policy
        self.is_behind_device = device_blocks > 0
        """Whether blocks leave first that the device holds too."""
        if device_blocks:
            policy.put_behind(device_blocks)
        self.table = BlockTable(backend.num_blocks)
        """Which block is in which slot. Others only read it."""
        self.room = Room(backend, policy, self.table)
        """How blocks leave for others, and what each tenant may have."""
        self.retention = Retention(self.table, self.room.shares, self.pin, self.unpin, clock)
        """Which blocks stay for a promised time."""
        self.history = History(backend.medium, self.table, misses or MissMemory(clock=clock), enable_events)

    @property
    def num_used(self) -> int:
        """Blocks that take a slot now, including those in transfer that were dropped."""
        return self.backend.num_existing_blocks - self.backend.get_num_free_blocks()

    @property
    def num_available(self) -> int:
        """Blocks that could be stored now, in free slots and in place of others, of all tenants together."""
        return self.backend.get_num_free_blocks() + self.table.num_evictable

    # Reads.

    def pin(self, slots: Slots) -> None:
        """Adds a pin to each block in ``slots``, which are distinct. All must be ready."""
        self.table.pin(slots)
        self.room.mark_busy(slots)

    def unpin(self, slots: Slots) -> None:
        """Removes a pin from each block in ``slots``. Raises BlockNotPinnedError, and changes nothing, if one has none,
        or a slot is negative."""
        if ((slots < 0) | (self.table.ref_cnt[slots] < 1)).any():
            raise BlockNotPinnedError("a block that was to be unpinned has no pin; complete each lease once")
        idle, freed = self.table.unpin(self.table.distinct(slots))
        self.room.mark_evictable(idle)
        self.backend.free(freed)

    # Writes.

    def allocate(self, keys: Keys) -> PrepareStoreOutput | None:
        """Gives slots to those of ``keys`` that are absent. None of the others leaves for them. Returns None, and
        changes nothing, if there is not enough room."""
        present, new_keys = self.table.split(keys)
        return self.store(new_keys[::-1], new_keys, present)

    def store(
        self,
        tail_first: list[OffloadKey],
        new_keys: list[OffloadKey],
        present: Slots,
        worthless: Keys = (),
    ) -> PrepareStoreOutput | None:
        """Does the same for ``new_keys``, which are absent and also given tail first, and whose chain has the blocks
        ``present`` too. ``worthless``, tail first, are keys that the policy does not admit."""
        if worthless:
            self.history.misses.record(worthless, MissReason.NOT_ADMITTED)
        if self.retention.blocks:
            self.retention.expire()
        plan = self.room.plan(tail_first, present)
        if isinstance(plan, MissReason):
            self.history.misses.record(new_keys, plan)
            return None
        if worthless and not self.is_behind_device:
            self.policy.refuse(worthless)
        evicted = self.room.evict(plan, tail_first)
        if evicted:
            self.history.evicted(evicted)
        slots = self.backend.allocate_blocks(new_keys)
        self.table.insert(new_keys, slots)
        self.policy.insert(slots[::-1], tail_first)
        if self.room.hints.has_begun:
            self.room.hints.entered(slots)
        spec = self.backend.get_load_store_spec(new_keys, slots)
        return PrepareStoreOutput(new_keys, spec, evicted, worthless[::-1])

    def set_ready(self, slots: Slots) -> None:
        """The blocks in ``slots`` were written."""
        ready, freed = self.table.set_ready(slots)
        self.room.mark_evictable(ready)
        self.history.entered(ready)
        if self.retention.num_absent:
            self.retention.entered(ready)
        if len(freed):
            self.backend.free(freed)

    def take_back(self, slots: Slots) -> list[OffloadKey]:
        """Frees ``slots``, which are being written. Returns the keys of those that were not dropped meanwhile. Why they
        are missing is what it was before."""
        freed = self.table.being_written(slots)
        known = freed[~self.table.dropped[freed]]
        self.room.remove(known)
        failed: list[OffloadKey] = self.table.key_of[known].tolist()
        self.table.remove(freed)
        if self.retention.num_absent:
            self.retention.give_up(failed)
        if len(freed):
            self.backend.free(freed)
        return failed

    def restore(self, keys: Keys, slots: Slots) -> None:
        """Takes in distinct blocks that are in the medium already, in ``slots`` that the backend counts as allocated,
        the least recently used first."""
        self.table.insert(keys, slots)
        self.policy.insert(slots, keys)
        self.table.set_ready(slots)
        self.history.num_entered += len(slots)
        self.policy.mark_evictable(slots)

    # Removal.

    def drop(self, keys: Keys) -> Slots:
        """``keys`` vanish at once. Returns the slots that they were in."""
        if self.retention.blocks:
            self.retention.lose(keys)
        slots = self.table.find(keys)
        slots = self.table.distinct(slots[slots >= 0])
        self.history.dropped(slots)
        self.room.remove(slots)
        self.backend.free(self.table.drop(slots))
        return slots

    def reset(self) -> None:
        """Drops every block."""
        self.retention.clear()
        self.history.dropped(self.table.slots())
        self.policy.clear()
        self.room.duplicates.clear()
        self.backend.free(self.table.drop_all())

    def tenant_uses(self) -> Sequence[TenantUse]:
        """Returns what each tenant holds; nothing if the slots are not shared."""
        self.retention.expire()
        kept = self.retention.tenants
        return [
            use._replace(
                num_retained=kept.num_charged[t],
                num_retained_lost=kept.num_lost[t],
                retained_block_s=int(kept.block_seconds[t]),
            )
            for t, use in enumerate(self.room.uses())
        ]

    def check_integrity(self) -> None:
        """Raises IntegrityError if the parts disagree. O(blocks)."""
        self.table.check_integrity()
        self.room.check_integrity()
        self.backend.check_integrity()
        self.retention.check_integrity()
        if self.table.num_held != self.num_used:
            raise IntegrityError("slots handed out and blocks held do not match")
        self.history.check_integrity()

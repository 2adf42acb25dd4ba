"""WriteThrough: writes chains of blocks to a lower tier, whole, head first, and never behind a hole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from kvoffload.abc import (
    IntegrityError,
    KVGroup,
    LookupState,
    MissReason,
    OffloadKey,
    Tier,
    TierError,
    TierResult,
)
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.tiers.chains import BACKLOG_SHARE, Backlog, Chain, ChainState
from kvoffload.tiers.plan import Bools, ChainLayout, GroupSpan, Plan, plan_writes, unreachable

MAX_REWRITES = 1
"""How often a chain is written again from where a write has failed."""
MAX_WRITES_PER_BLOCK = 2
"""Writes per block of one chain, on average: a tier that keeps evicting the chain is given no more of it."""
REFUSAL_S = 0.01
"""A tier that takes on nothing although it has nothing to do is asked again after this time."""
PATIENCE_S = 0.25
"""How long an idle engine is kept stepping for a backlog on which the tier makes no progress."""
GIVE_UP_S = 1.0
"""A chain of which the tier takes on nothing for this long, although it has nothing to do, is dropped."""
FIRST_UNITS = 256
"""Units that are looked at first; doubled while there is nothing to write."""


@dataclass(slots=True, eq=False)
class WriteBatch:
    """Blocks that the tier was given to write in one call."""

    chain: Chain | None
    """The chain that they are written for, or None after a reset."""
    slots: dict[OffloadKey, int]
    """Host slots, pinned, of the blocks that the tier has not reported yet."""


class WriteThrough:
    """Writes to ``tier`` the blocks that it lacks of chains that requests touch or store. Their bytes come from
    ``host``.

    A block is written only if every earlier block that a lookup needs is in the tier or is being written: in a group
    with full attention every block, in a group with a window the blocks that a request needs to resume at some later
    position. Blocks that cannot be written now stay in the backlog while the host holds them.

    ``groups``: the KV cache groups that keys name. ``count`` takes the counters ``tier_NAME`` of METRICS,
    by NAME.
    """

    def __init__(
        self,
        host: PolicyOffloadingManager,
        tier: Tier,
        groups: Sequence[KVGroup],
        count: Callable[[str, float], None],
        clock: Callable[[], float],
    ) -> None:
        self._host = host
        self._tier = tier
        self._layout = ChainLayout(groups)
        self._count = count
        self._clock = clock
        self._backlog = Backlog(max(1, int(host.num_blocks * BACKLOG_SHARE)))
        self._writing: dict[OffloadKey, WriteBatch] = {}
        """Blocks that the tier has not reported yet."""
        self._num_lost = 0
        """Blocks that the tier was given and has lost, without those that it has evicted."""
        self._progress_at = float("-inf")
        """When a write last began or ended, or a chain was offered."""
        self._refused_at: float | None = None
        """When the tier took on nothing, or None if it has done something since."""

    # State.

    @property
    def num_writing(self) -> int:
        """Blocks that the tier has not reported yet, each with a pin in the host."""
        return len(self._writing)

    @property
    def has_backlog(self) -> bool:
        """Whether there are chains to be written now."""
        return self._backlog.is_ready

    @property
    def is_busy(self) -> bool:
        """Whether there is a backlog and the tier makes progress."""
        has_work = self.has_backlog or self._backlog.waits_for_any(self._writing)
        return has_work and self._clock() - self._progress_at < PATIENCE_S

    def chain_of(self, request: str) -> Chain | None:
        """Returns the chain of a request that is in the backlog."""
        return self._backlog.of_request(request)

    # What happens elsewhere.

    def offer(self, keys: Sequence[OffloadKey], request: str | None, is_whole: bool) -> None:
        """Adds ``keys``, the chain of ``request``, to the backlog: head first, the groups merged by the position at
        which blocks end.

        It takes the place of the chain that was offered for the same request before.
        """
        before = self._backlog.of_request(request)
        state = ChainState.FRESH
        if before is not None:
            state = ChainState.STARTED if before.state is ChainState.STARTED else state
            self._backlog.remove(before)
        keys = list(keys)
        by_group = self._layout.split(keys)
        num_units = self._layout.num_units(by_group)
        capacity = self._tier.capacity_bytes
        if capacity is not None:
            # The tail of a chain longer than the tier would evict its head.
            most_blocks = capacity // max(1, self._tier.block_bytes)
            num_units = min(num_units, most_blocks // sum(self._layout.blocks_per_unit))
        if num_units == 0:
            return
        chain = Chain(keys, by_group, num_units, is_whole, request)
        if before is not None:
            chain.written, chain.failures = before.written, before.failures
            chain.num_written_before = len(chain.written)
            for batch in self._batches():
                batch.chain = chain if batch.chain is before else batch.chain
        self._backlog.add(chain, state)
        self._progress_at = self._clock()
        while (excess := self._backlog.excess()) is not None:
            self._drop(excess)

    def postpone(self, request: str) -> None:
        """Called when the request waits for a promotion: its chain is not planned until that has ended."""
        self._backlog.postpone(request)

    def resume(self, request: str) -> None:
        """Called when the request no longer waits for a promotion."""
        if self._backlog.resume(request):
            self._progress_at = self._clock()

    def stored(self, keys: Sequence[OffloadKey]) -> None:
        """Called when ``keys`` have become ready in the host."""
        if self._backlog.wake(keys):
            self._progress_at = self._clock()

    def store_failed(self) -> None:
        """Plans all chains that wait for a block again, because blocks that were to become ready in the host have
        vanished."""
        if self._backlog.wake(self._backlog.awaited):
            self._progress_at = self._clock()

    def lose(self, num_blocks: int) -> None:
        """Notes that the tier has lost blocks that could not be read."""
        self._num_lost += num_blocks

    def clear(self) -> None:
        """Empties the backlog. Writes in progress continue, but belong to no chain."""
        self._backlog.clear()
        for batch in self._batches():
            batch.chain = None

    def close(self) -> None:
        """Called when the tier is closed: it reports no more writes."""
        self.clear()
        self._unpin([slot for batch in self._batches() for slot in batch.slots.values()])
        self._writing.clear()

    # Writing.

    def pump(self, room: int) -> None:
        """Begins to write as much of the backlog as the tier takes on, at most ``room`` blocks."""
        if self._refused_at is not None and self._clock() - self._refused_at < REFUSAL_S:
            return
        while room > 0:
            chain = self._backlog.next()
            if chain is None:
                return
            plan = self._plan(chain, room)
            if plan.keys and len(chain.written) >= MAX_WRITES_PER_BLOCK * len(chain.keys):
                self._drop(chain)
                continue
            taken = self._write(chain, plan.keys)
            room -= taken
            if taken < len(plan.keys):
                self._refuse(chain)
                return
            chain.refused_at = None
            chain.done = plan.done
            if plan.hole is not None:
                self._stop(chain, plan.hole)
            elif chain.done == chain.num_units:
                self._finish(chain)

    def _write(self, chain: Chain, keys: list[OffloadKey]) -> int:
        """Returns how many of ``keys``, from the first one on, the tier has taken on."""
        if not keys:
            return 0
        lease = self._host.prepare_load(keys)
        slots = dict(zip(keys, lease.slots.tolist(), strict=True))
        taken = self._tier.write(keys, lease.slots)
        if len(taken) < len(keys):
            given = frozenset(taken)
            self._unpin([slot for key, slot in slots.items() if key not in given])
            slots = {key: slot for key, slot in slots.items() if key in given}
        if not slots:
            return 0
        self._writing.update(dict.fromkeys(slots, WriteBatch(chain, slots)))
        chain.written += slots
        self._progress_at, self._refused_at = self._clock(), None
        if chain.state is ChainState.FRESH:
            self._backlog.enqueue(chain, ChainState.STARTED)
        return next((i for i, key in enumerate(keys) if key not in slots), len(keys))

    def _refuse(self, chain: Chain) -> None:
        """The tier has refused some blocks."""
        self._refused_at = now = self._clock()
        if self._writing:
            chain.refused_at = None
        elif chain.refused_at is None:
            chain.refused_at = now
        elif now - chain.refused_at > GIVE_UP_S:
            self._drop(chain)

    def ended(self, results: Sequence[TierResult]) -> None:
        """Takes in writes that have ended."""
        if not results:
            return
        self._progress_at, self._refused_at = self._clock(), None
        self._count_results(results)
        failed: dict[Chain, list[TierResult]] = {}
        slots = []
        for result in results:
            batch = self._writing.pop(result.key)
            slots.append(batch.slots.pop(result.key))
            if not result.ok:
                self._num_lost += 1
                if batch.chain is not None:
                    failed.setdefault(batch.chain, []).append(result)
        self._unpin(slots)
        self._backlog.wake([result.key for result in results])
        for chain, failures in failed.items():
            # A block that is GONE was deleted for another chain.
            chain.failures += any(result.error is not TierError.GONE for result in failures)
            if chain.failures > MAX_REWRITES:
                self._delete_unreachable(chain)
                self._backlog.remove(chain)
            else:
                self._rewrite(chain)

    def _count_results(self, results: Sequence[TierResult]) -> None:
        written = [result for result in results if result.ok]
        num_gone = sum(result.error is TierError.GONE for result in results)
        self._count("write_seconds", sum(result.seconds for result in results))
        self._count("write_blocks", len(written))
        self._count("write_bytes", sum(result.nbytes for result in written))
        self._count("write_failures", len(results) - len(written) - num_gone)

    def _unpin(self, slots: Collection[int]) -> None:
        if slots:
            self._host.complete_load(self._host.lease(slots))

    def _batches(self) -> set[WriteBatch]:
        return set(self._writing.values())

    # The end of a chain.

    def _stop(self, chain: Chain, hole: OffloadKey) -> None:
        """Stops writing the chain at ``hole``, which the tier lacks and cannot be given now."""
        # The last blocks of a request are still on their way to the host when it ends.
        is_coming = hole in self._writing or self._host.states([hole])[0] == LookupState.PENDING
        if not chain.is_whole or is_coming:
            self._backlog.wait_for(chain, hole)
            return
        if self._host.explain_miss(hole).reason is MissReason.EVICTED:
            self._count("dropped_writes", self._num_lacking(chain, in_host=False))
        self._delete_unreachable(chain)
        self._finish(chain)

    def _finish(self, chain: Chain) -> None:
        self._backlog.remove(chain)
        if chain.is_whole and len(chain.written) > chain.num_written_before:
            # Blocks written after the request had ended are newer than those before them in the chain.
            self._tier.reorder_chain(chain.keys, chain.written)

    def _drop(self, chain: Chain) -> None:
        self._count("dropped_writes", self._num_lacking(chain, in_host=True))
        self._backlog.remove(chain)
        self._delete_unreachable(chain)

    def _num_lacking(self, chain: Chain, in_host: bool) -> int:
        """Returns how many blocks the tier lacks; with ``in_host`` only those that the host has."""
        lacking = ~self._in_tier(chain.keys, chain)
        if in_host:
            lacking &= self._host.states(chain.keys) == LookupState.HIT
        return int(np.count_nonzero(lacking))

    def _rewrite(self, chain: Chain) -> None:
        """Looks the chain up again from its head; writing continues where the tier lacks a block."""
        chain.done = 0
        if chain.state is ChainState.GONE:
            self._backlog.add(chain, ChainState.STARTED)
        else:
            self._backlog.enqueue(chain, ChainState.STARTED)

    def _delete_unreachable(self, chain: Chain) -> None:
        """Deletes the blocks of the chain that no lookup can use. Blocks that are being written count as held: if a
        write fails, its own chain is corrected then."""
        in_tier = [self._tier.contains(keys) for keys in chain.by_group]
        held = [
            (states == LookupState.HIT) | self._is_writing(keys)
            for keys, states in zip(chain.by_group, in_tier, strict=True)
        ]
        places = unreachable(self._layout, chain.by_group, held, chain.num_units, frozenset(chain.written))
        may_hold = [(states != LookupState.MISS).tolist() for states in in_tier]
        keys, num_lost = [], 0
        for g, i in places:
            key = chain.by_group[g][i]
            batch = self._writing.get(key)
            if may_hold[g][i] if batch is None else batch.chain is chain:
                keys.append(key)
                num_lost += may_hold[g][i]
        self._num_lost += num_lost
        self._tier.delete(keys)

    # Planning.

    def _is_writing(self, keys: Sequence[OffloadKey]) -> Bools:
        return np.fromiter(map(self._writing.__contains__, keys), np.bool_, len(keys))

    def _in_tier(self, keys: Sequence[OffloadKey], chain: Chain) -> Bools:
        """Returns which of ``keys`` the tier holds, or is being given for this chain: if that fails, the chain is
        corrected."""
        held: Bools = self._tier.contains(keys) == LookupState.HIT
        if self._writing and not self._writing.keys().isdisjoint(keys):
            for i in np.flatnonzero(~held).tolist():
                batch = self._writing.get(keys[i])
                held[i] = batch is not None and batch.chain is chain
        return held

    def _available(self, keys: Sequence[OffloadKey], in_tier: Bools) -> Bools:
        """Returns which of ``keys`` are ``in_tier``, or are in the host and are not being written for another chain."""
        available = in_tier.copy()
        absent = np.flatnonzero(~in_tier)
        names = [keys[i] for i in absent.tolist()]
        if names:
            available[absent] = self._host.states(names) == LookupState.HIT
            if self._writing and not self._writing.keys().isdisjoint(names):
                available[absent] &= ~self._is_writing(names)
        return available

    @property
    def _losses(self) -> int:
        return self._tier.num_evicted + self._num_lost

    def _plan(self, chain: Chain, room: int) -> Plan:
        """Returns which blocks of the chain are to be written next, at most ``room``."""
        before = chain.done
        if self._losses != chain.losses and before >= chain.verify_at:
            # The longer the chain, the less often, so that each block is looked up a few times at most.
            chain.verify_at, chain.losses, chain.done = before + before // 4, self._losses, 0
        # The last unit that is done is looked up again in any case.
        start, num_units = max(0, chain.done - 1), FIRST_UNITS
        while True:
            stop = min(chain.num_units, start + num_units)
            plan = self._plan_units(chain, start, stop, room)
            if plan.keys or plan.hole is not None or stop == chain.num_units:
                return plan
            start, num_units = max(start, plan.done), 2 * num_units

    def _plan_units(self, chain: Chain, start: int, stop: int, room: int) -> Plan:
        """Returns the blocks to write so that requests can resume at the ends of units ``start`` to ``stop``."""
        layout, ends = self._layout, self._layout.unit_ends(start, stop)
        spans = [
            GroupSpan.of(group, keys, ends, start * per_unit)
            for group, keys, per_unit in zip(layout.groups, chain.by_group, layout.blocks_per_unit, strict=True)
        ]
        in_tier = [self._in_tier(span.keys, chain) for span in spans]
        available = [self._available(span.keys, mask) for span, mask in zip(spans, in_tier, strict=True)]
        is_last = stop == chain.num_units
        return plan_writes(spans, in_tier, available, ends, start=start, is_last=is_last, room=room)

    def check_integrity(self) -> None:
        """Raises IntegrityError if the backlog is inconsistent, or if the tier lacks a block before the position up to
        which a chain counts as written, although it has lost none since that was looked up."""
        self._backlog.check_integrity()
        for chain in self._backlog:
            if chain.losses == self._losses:
                layout = self._layout
                for group, per_unit, keys in zip(layout.groups, layout.blocks_per_unit, chain.by_group, strict=True):
                    before = keys[: chain.done * per_unit] if group.is_full else []
                    lacking = (self._tier.contains(before) == LookupState.MISS) & ~self._in_tier(before, chain)
                    if lacking.any():
                        raise IntegrityError("a chain is written behind a hole")

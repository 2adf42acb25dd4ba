"""ChainPlanner: looks up what of a chain a tier holds, and plans what is written to it and deleted from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from kvoffload.abc import OffloadKey, Tier
from kvoffload.abc.tier import HIT, MISS, RETRY
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.tiers.chains import Chain, ChainRef
from kvoffload.tiers.plan import Bools, ChainLayout, GroupSpan, Plan, plan_writes, unreachable

FIRST_UNITS = 256
"""Units that are looked at first; doubled while there is nothing to write."""


class ChainPlanner:
    """Plans writes from ``host`` to ``tier``, which is writing the blocks ``writing``, each for a chain.

    ``is_worth`` returns which blocks are worth writing to this tier; None: all are. A block of which the tier does not
    know yet whether it holds it is written, since the tier then finds out, but nothing is deleted because of it.
    """

    def __init__(
        self,
        host: PolicyOffloadingManager,
        tier: Tier,
        layout: ChainLayout,
        writing: Mapping[OffloadKey, ChainRef],
        is_worth: Callable[[Sequence[OffloadKey]], Bools] | None,
    ) -> None:
        self._host = host
        self._tier = tier
        self._layout = layout
        self._writing = writing
        self._is_worth = is_worth

    def is_writing(self, keys: Sequence[OffloadKey]) -> Bools:
        """Returns which of ``keys`` the tier has not reported yet."""
        return _among(keys, self._writing)

    def in_tier(self, keys: Sequence[OffloadKey], chain: Chain) -> Bools:
        """Returns which of ``keys`` the tier holds, or is being given for this chain: if that fails, the chain is
        corrected."""
        states = self._tier.contains(keys)
        held: Bools = states == HIT
        if (states == RETRY).any():
            # It took these once. Until it knows better, it has them.
            written = frozenset(chain.written) - chain.lost
            held |= (states == RETRY) & _among(keys, written)
        if self._writing and not self._writing.keys().isdisjoint(keys):
            for i in np.flatnonzero(~held).tolist():
                held[i] = self._writing.get(keys[i]) is chain.ref
        return held

    def _available(self, keys: Sequence[OffloadKey], in_tier: Bools) -> Bools:
        """Returns which of ``keys`` are ``in_tier``, or are in the host and are not being written for another chain."""
        available = in_tier.copy()
        absent = np.flatnonzero(~in_tier)
        names = [keys[i] for i in absent.tolist()]
        if names:
            available[absent] = self._host.states(names) == HIT
            if self._is_worth is not None:
                available[absent] &= self._is_worth(names)
            if self._writing and not self._writing.keys().isdisjoint(names):
                available[absent] &= ~self.is_writing(names)
        return available

    def plan(self, chain: Chain, room: int, losses: int) -> Plan:
        """Returns which blocks of the chain are to be written next, at most ``room``. ``losses``: how many blocks the
        tier has lost so far."""
        before = chain.done
        if losses != chain.losses and before >= chain.verify_at:
            # The longer the chain, the less often, so that each block is looked up a few times at most.
            chain.verify_at, chain.losses, chain.done = before + before // 4, losses, 0
        # The last unit that is done is looked up again in any case.
        start, num_units = max(0, chain.done - 1), FIRST_UNITS
        while True:
            stop = min(chain.num_units, start + num_units)
            plan = self._plan_units(chain, start, stop, room)
            if plan.keys or plan.holes or stop == chain.num_units:
                return plan
            start, num_units = max(start, plan.done), 2 * num_units

    def _plan_units(self, chain: Chain, start: int, stop: int, room: int) -> Plan:
        """Returns the blocks to write so that requests can resume at the ends of units ``start`` to ``stop``."""
        layout, is_last, states = self._layout, stop == chain.num_units, list[OffloadKey]()
        if layout.num_states:
            # Behind the last state no request can resume, until there is another one.
            stop, states = self.last_state(chain, start, stop)
            if stop == start:
                return Plan([], start, states if is_last else ())
        ends = layout.unit_ends(start, stop)
        spans = [
            GroupSpan.of(group, keys, ends, start * per_unit)
            for group, keys, per_unit in zip(layout.groups, chain.by_group, layout.blocks_per_unit, strict=True)
        ]
        in_tier = [self.in_tier(span.keys, chain) for span in spans]
        available = [self._available(span.keys, mask) for span, mask in zip(spans, in_tier, strict=True)]
        plan = plan_writes(spans, in_tier, available, ends, start=start, is_last=is_last, room=room)
        return replace(plan, holes=states) if is_last and plan.done == stop else plan

    def last_state(self, chain: Chain, start: int, stop: int) -> tuple[int, list[OffloadKey]]:
        """Returns the last of the units ``start`` to ``stop``, exclusive, at whose end all states are in the tier or
        can be written, plus one; ``start`` if there is none. And the states that are unavailable behind it, the last
        one first."""
        usable = np.ones(stop - start, dtype=np.bool_)
        absent: list[tuple[int, OffloadKey]] = []
        for group, keys, per_unit in zip(
            self._layout.groups, chain.by_group, self._layout.blocks_per_unit, strict=True
        ):
            if group.state:
                ends = keys[(start + 1) * per_unit - 1 : stop * per_unit : per_unit]
                available = self._available(ends, self.in_tier(ends, chain))
                usable &= available
                absent += [(start + i, ends[i]) for i in np.flatnonzero(~available).tolist()]
        end = start + int(np.flatnonzero(usable)[-1]) + 1 if usable.any() else start
        return end, [key for unit, key in sorted(absent, reverse=True) if unit >= end]

    def num_lacking(self, chain: Chain, in_host: bool) -> int:
        """Returns how many blocks the tier lacks; with ``in_host`` only those that the host has. Most states of a chain
        were never kept, so only those in the host count in any case."""
        num_lacking = 0
        for group, keys in zip(self._layout.groups, chain.by_group, strict=True):
            lacking = ~self.in_tier(keys, chain)
            if in_host or group.state:
                lacking &= self._host.states(keys) == HIT
            num_lacking += int(np.count_nonzero(lacking))
        return num_lacking

    def unreachable(self, chain: Chain) -> tuple[list[OffloadKey], int]:
        """Returns the blocks of the chain that no lookup can use and that may be deleted, and how many of them the tier
        may hold. Blocks that are being written count as held: if a write fails, its own chain is corrected then."""
        in_tier = [self._tier.contains(keys) for keys in chain.by_group]
        held = [
            (states == HIT) | ((states == RETRY) & ~_among(keys, chain.lost)) | self.is_writing(keys)
            for keys, states in zip(chain.by_group, in_tier, strict=True)
        ]
        written = frozenset(chain.written) - chain.foreign
        useless = unreachable(self._layout, chain.by_group, held, chain.num_units, written)
        keys: list[OffloadKey] = []
        num_held = 0
        for names, mask, is_held, states in zip(chain.by_group, useless, held, in_tier, strict=True):
            may_hold = states != MISS
            for i in np.flatnonzero(mask & (is_held | may_hold)).tolist():
                key, ref = names[i], self._writing.get(names[i])
                is_mine = not self._tier.is_shared or key in written
                if is_mine and (may_hold[i] if ref is None else ref is chain.ref):
                    keys.append(key)
                    num_held += bool(may_hold[i])
        return keys, num_held


def _among(keys: Sequence[OffloadKey], group: Collection[OffloadKey]) -> Bools:
    """Returns which of ``keys`` are in ``group``."""
    return np.fromiter(map(group.__contains__, keys), np.bool_, len(keys)) if group else np.zeros(len(keys), np.bool_)

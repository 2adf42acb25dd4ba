"""TierBlocks: what one tier holds of chains, what it is being given, and what of that is useless."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from kvoffload.abc import OffloadKey, Tier
from kvoffload.abc.tier import HIT, MISS, RETRY
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.tiering.chains import Chain, WriteLog, WriteOutcome
from kvoffload.tiering.plan import Bools, ChainLayout, unreachable


class TierBlocks:
    """What ``tier`` holds of chains, and the blocks of ``host`` that it is writing, which are pinned there."""

    def __init__(self, host: PolicyOffloadingManager, tier: Tier, layout: ChainLayout) -> None:
        self._host = host
        self._tier = tier
        self._layout = layout
        self.history_of: dict[OffloadKey, WriteLog] = {}
        """Blocks that the tier has not reported yet, and the requests that they are written for."""
        self._slots: dict[OffloadKey, int] = {}
        """Their host slots."""
        self.num_lost = 0
        """Blocks that the tier was given and has lost, without those that it has evicted."""

    def begin(self, keys: Sequence[OffloadKey], history: WriteLog) -> list[OffloadKey]:
        """Gives blocks to the tier. Returns those that it has taken on."""
        lease = self._host.prepare_load(keys)
        taken = self._tier.write(keys, lease.slots)
        slots = dict(zip(keys, lease.slots.tolist(), strict=True))
        self._slots.update((key, slots.pop(key)) for key in taken)
        self._unpin(slots.values())
        self.history_of.update(dict.fromkeys(taken, history))
        history.fates.update(dict.fromkeys(taken, WriteOutcome.WRITTEN))
        history.num_writes += len(taken)
        return taken

    def end(self, keys: Sequence[OffloadKey]) -> list[WriteLog]:
        """The tier has reported ``keys``. Returns the history of each."""
        self._unpin([self._slots.pop(key) for key in keys])
        return [self.history_of.pop(key) for key in keys]

    def end_all(self) -> None:
        """The tier reports no more writes."""
        self._unpin(self._slots.values())
        self._slots.clear()
        self.history_of.clear()

    def _unpin(self, slots: Collection[int]) -> None:
        if slots:
            self._host.complete_load(self._host.lease(slots))

    def are_under_way(self, keys: Sequence[OffloadKey]) -> Bools:
        """Returns which of ``keys`` the tier has not reported yet."""
        return _among(keys, self.history_of)

    def in_tier(self, keys: Sequence[OffloadKey], history: WriteLog) -> Bools:
        """Returns which of ``keys`` the tier holds, or is being given for this request: if that fails, its chain is
        corrected."""
        states = self._tier.contains(keys)
        held: Bools = states == HIT
        if (states == RETRY).any():
            # It took these once. Until it knows better, it has them.
            held |= (states == RETRY) & _among(keys, history.having(WriteOutcome.WRITTEN, WriteOutcome.FOREIGN))
        if not self.history_of.keys().isdisjoint(keys):
            for i in np.flatnonzero(~held).tolist():
                held[i] = self.history_of.get(keys[i]) is history
        return held

    def look(self, keys: Sequence[OffloadKey], history: WriteLog) -> tuple[Bools, Bools]:
        """Returns which of ``keys`` are ``in_tier``, and which are that or can be written: the host has them, and they
        are not being written for another request."""
        in_tier = self.in_tier(keys, history)
        available = in_tier.copy()
        absent = np.flatnonzero(~in_tier)
        names = [keys[i] for i in absent.tolist()]
        if names:
            available[absent] = (self._host.table.states(names) == HIT) & ~self.are_under_way(names)
        return in_tier, available

    @property
    def num_losses(self) -> int:
        """Blocks that the tier has evicted or lost since the start."""
        return self._tier.stats().num_evicted + self.num_lost

    def num_lacking(self, chain: Chain, in_host: bool) -> int:
        """Returns how many blocks of the chain are not ``in_tier``; with ``in_host`` only those that the host has. Most
        states of a chain were never kept, so only those in the host count in any case."""
        num_lacking = 0
        for group, keys in zip(self._layout.groups, chain.by_group, strict=True):
            lacking = ~self.in_tier(keys, chain.history)
            if in_host or group.state:
                lacking &= self._host.table.states(keys) == HIT
            num_lacking += int(np.count_nonzero(lacking))
        return num_lacking

    def delete_unreachable(self, chain: Chain) -> None:
        """Deletes the blocks of the chain that no lookup can use. From a shared tier only those that were written for
        its request. Blocks that are being written count as held: if a write fails, its own chain is corrected then."""
        history = chain.history
        mine, lost = history.having(WriteOutcome.WRITTEN, WriteOutcome.LOST), history.having(WriteOutcome.LOST)
        states = [self._tier.contains(keys) for keys in chain.by_group]
        held = [
            (its == HIT) | ((its == RETRY) & ~_among(keys, lost)) | self.are_under_way(keys)
            for keys, its in zip(chain.by_group, states, strict=True)
        ]
        useless: list[OffloadKey] = []
        for keys, mask, its in zip(
            chain.by_group, unreachable(self._layout, chain.by_group, held, chain.num_units, mine), states, strict=True
        ):
            for i in np.flatnonzero(mask).tolist():
                writer, may_hold = self.history_of.get(keys[i]), its[i] != MISS
                is_mine = keys[i] in mine or not self._tier.is_shared
                if is_mine and (may_hold if writer is None else writer is history):
                    useless.append(keys[i])
                    self.num_lost += bool(may_hold)
        self._tier.delete(useless)


def _among(keys: Sequence[OffloadKey], group: Collection[OffloadKey]) -> Bools:
    """Returns which of ``keys`` are in ``group``."""
    return np.fromiter(map(group.__contains__, keys), np.bool_, len(keys)) if group else np.zeros(len(keys), np.bool_)

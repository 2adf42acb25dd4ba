"""The chains with blocks that may still have to be written to one tier, their order, and what the tier has of them."""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, KeysView
from dataclasses import dataclass, field

import numpy as np

from kvoffload.abc import IntegrityError, Keys, OffloadKey, Tier
from kvoffload.abc.tier import HIT, MISS, RETRY
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.tiering.plan import Bools, ChainLayout, unreachable

MAX_CHAINS = 4096
"""Chains in one backlog."""
FIRST_REST_S = 0.05
MAX_REST_S = 4.0
"""The first and the longest pause before a chain is written again of which a write has failed."""


class ChainState(enum.Enum):
    FRESH = enum.auto()
    """Nothing of it has been written since it was offered."""
    STARTED = enum.auto()
    """A part of it has been written, the rest is to be written."""
    WAITING = enum.auto()
    """Its next block is not in the host yet, or is being written for another chain."""
    RESTING = enum.auto()
    """A write of it has failed: it is written again after a pause."""
    HELD = enum.auto()
    """The tier holds all of it, or is writing the rest. Its request may bring a longer one, or promised blocks of it
    are being written."""
    GONE = enum.auto()
    """It is not in the backlog."""


FRESH, STARTED, RESTING, GONE = ChainState.FRESH, ChainState.STARTED, ChainState.RESTING, ChainState.GONE


@dataclass(slots=True)
class WriteLog:
    """What the tier was given of one chain."""

    given: set[OffloadKey] = field(default_factory=set)
    foreign: set[OffloadKey] = field(default_factory=set)
    """Those of which the latest write found that the medium held them: others have written them."""
    lost: set[OffloadKey] = field(default_factory=set)
    """Those of which the latest write has failed."""
    num_writes: int = 0
    num_failed_writes: int = 0
    """Without those of blocks that were deleted meanwhile."""
    num_failures: int = 0
    """How often the tier has reported some of these."""
    rest_s: float = 0.0
    """The latest pause after a failure, and when it ends."""
    rests_until: float = 0.0


@dataclass(slots=True, eq=False)
class Chain:
    """The blocks of one request as they were last offered: ``keys`` in order, ``by_group[g]`` those of group g. The
    chain has ``num_units`` units, see ``kvoffload.tiering.plan``."""

    request: str | None
    keys: list[OffloadKey] = field(default_factory=list)
    by_group: list[list[OffloadKey]] = field(default_factory=list)
    num_units: int = 0
    is_whole: bool = False
    """Its request has ended: blocks that the host lacks now will not be stored any more."""
    log: WriteLog = field(default_factory=WriteLog)
    state: ChainState = GONE
    waits_for: Keys = ()
    """In the state WAITING, the blocks of which it waits for any."""
    done: int = 0
    """Units whose blocks the tier holds or is writing, as far as is known."""
    verify_at: int = 0
    """When this many units are done, all of them are looked up again if the tier has lost blocks since."""
    losses: int = 0
    """Blocks that the tier had lost when the units that are done were last looked up."""
    promised: set[OffloadKey] = field(default_factory=set)
    """Blocks that it is to bring to the tier because the tier retains them."""
    num_writes_before: int = 0
    """Writes of its blocks before it was last offered."""

    def grow(self, keys: list[OffloadKey], by_group: list[list[OffloadKey]], num_units: int, is_whole: bool) -> None:
        """The chain, which is GONE, has these blocks from now on."""
        if is_whole or keys[: len(self.keys)] != self.keys:
            # Another chain, or the last offer of this one: all of it is looked up again.
            self.done = self.verify_at = self.losses = 0
        self.keys, self.by_group, self.num_units, self.is_whole = keys, by_group, num_units, is_whole
        self.num_writes_before = self.log.num_writes


class Backlog:
    """The chains with blocks that may still have to be written: at most MAX_CHAINS and ``max_keys`` keys, but at least
    one chain. A chain that is STARTED comes first, then the FRESH one that was offered last.

    Chains with promised blocks come before all others, and are never dropped. They do not count, but a promised block
    belongs to one chain only: the first one that is whole."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._num_keys = 0
        """Keys of chains without promised blocks."""
        self._chains: dict[Chain, None] = {}
        """Every chain that is not GONE, the oldest first."""
        self._by_request: dict[str, Chain] = {}
        self._queues: dict[ChainState, dict[Chain, None]] = {FRESH: {}, STARTED: {}, RESTING: {}}
        self.num_ready = 0
        """Chains to be written now, or after a pause."""
        self._waiting: dict[OffloadKey, dict[Chain, None]] = {}
        """Chains that are WAITING, by each block that they wait for."""
        self.waited_for: KeysView[OffloadKey] = self._waiting.keys()
        self._bringing: dict[OffloadKey, Chain] = {}
        """The chain to which each promised block belongs."""
        self._num_promising = 0
        """Chains with promised blocks."""
        self._urgent: dict[Chain, None] = {}
        """Those of them that are FRESH or STARTED."""

    def __iter__(self) -> Iterator[Chain]:
        return iter(self._chains)

    def of_request(self, request: str | None) -> Chain | None:
        return None if request is None else self._by_request.get(request)

    def next(self) -> Chain | None:
        """Returns the chain to be written next."""
        first = next(iter(self._urgent), None) or next(iter(self._queues[STARTED]), None)
        return first or next(reversed(self._queues[FRESH]), None)

    def excess(self) -> Chain | None:
        """Returns the chain to be dropped because a bound is exceeded: the oldest, one that is not STARTED if
        possible."""
        num_chains = len(self._chains) - self._num_promising
        if num_chains < 2 or (num_chains <= MAX_CHAINS and self._num_keys <= self._max_keys):
            return None
        candidates = (chain for chain in self._chains if not chain.promised)
        oldest = next(candidates)
        others = (chain for chain in candidates if chain.state is not STARTED)
        return next(others, oldest) if oldest.state is STARTED else oldest

    def promise(self, chain: Chain, keys: Collection[OffloadKey]) -> None:
        """``chain`` is to bring those of ``keys`` to the tier that no whole chain brings."""
        keys = [key for key in keys if (other := self._bringing.get(key)) is None or not other.is_whole]
        if not keys:
            return
        self.settle(keys)
        chain.promised = set(keys)
        self._bringing.update(dict.fromkeys(chain.promised, chain))
        self._num_promising += 1
        self._num_keys -= len(chain.keys)
        if chain.state in (FRESH, STARTED):
            self._urgent[chain] = None

    def settle(self, keys: Collection[OffloadKey]) -> None:
        """``keys`` are promised no more, because the tier has them, or will not get them."""
        for key in keys:
            if (chain := self._bringing.pop(key, None)) is None:
                continue
            chain.promised.discard(key)
            if not chain.promised:
                self._num_promising -= 1
                self._num_keys += len(chain.keys)
                self._urgent.pop(chain, None)
                if chain.state is ChainState.HELD and (chain.is_whole or chain.request is None):
                    self.move(chain, GONE)

    def move(self, chain: Chain, state: ChainState, waits_for: Keys = ()) -> None:
        """Brings ``chain`` into ``state``. WAITING, it waits until ``wake`` names one of ``waits_for``."""
        if chain.promised and state is GONE:
            self.settle(list(chain.promised))
        for key in dict.fromkeys(chain.waits_for):
            del self._waiting[key][chain]
            if not self._waiting[key]:
                del self._waiting[key]
        self._queues.get(chain.state, {}).pop(chain, None)
        self._urgent.pop(chain, None)
        if chain.state is GONE and state is not GONE:
            self._chains[chain] = None
            self._num_keys += len(chain.keys)
            if chain.request is not None:
                self._by_request.setdefault(chain.request, chain)
        elif state is GONE and chain.state is not GONE:
            del self._chains[chain]
            self._num_keys -= len(chain.keys)
            if chain.request is not None and self._by_request.get(chain.request) is chain:
                del self._by_request[chain.request]
        self.num_ready += (state in self._queues) - (chain.state in self._queues)
        chain.state, chain.waits_for = state, waits_for
        if state in self._queues:
            self._queues[state][chain] = None
            if chain.promised and state is not RESTING:
                self._urgent[chain] = None
        for key in waits_for:
            self._waiting.setdefault(key, {})[chain] = None

    def rest(self, chain: Chain, now: float) -> None:
        """Brings ``chain``, of which a write has failed, into the state RESTING until ``wake_rested`` ends it: for
        longer each time."""
        if chain.state is not RESTING:
            log = chain.log
            log.rest_s = min(MAX_REST_S, 2 * log.rest_s) or FIRST_REST_S
            log.rests_until = now + log.rest_s
            self.move(chain, RESTING)

    def wake_rested(self, now: float) -> None:
        """Queues the chains whose rest is over."""
        for chain in [chain for chain in self._queues[RESTING] if chain.log.rests_until <= now]:
            self.move(chain, STARTED)

    def wake(self, keys: Collection[OffloadKey]) -> bool:
        """Queues the chains that wait for one of ``keys``. Returns whether there were any."""
        if self.waited_for.isdisjoint(keys):
            return False
        woken = dict.fromkeys(chain for key in keys for chain in self._waiting.get(key, ()))
        for chain in woken:
            self.move(chain, STARTED if chain.log.given else FRESH)
        return True

    def check_integrity(self) -> None:
        """Raises IntegrityError if a chain is in the wrong queue, or the keys are miscounted."""
        queued = {chain: state for state, queue in self._queues.items() for chain in queue}
        queued |= dict.fromkeys((chain for waiting in self._waiting.values() for chain in waiting), ChainState.WAITING)
        if (
            queued != {chain: chain.state for chain in self._chains if chain.state is not ChainState.HELD}
            or sum(map(len, self._queues.values())) != self.num_ready
        ):
            raise IntegrityError("a chain of the backlog is in no queue, or in the wrong one")
        if self._num_keys != sum(len(chain.keys) for chain in self._chains if not chain.promised):
            raise IntegrityError("the backlog has miscounted the keys of its chains")
        promised = {key: chain for chain in self._chains for key in chain.promised}
        if self._bringing != promised or self._num_promising != len(set(promised.values())):
            raise IntegrityError("a promised block belongs to no chain, or to several")
        urgent = {chain for state in (FRESH, STARTED) for chain in self._queues[state] if chain.promised}
        if self._urgent.keys() != urgent:
            raise IntegrityError("a chain with promised blocks does not come first")


class TierBlocks:
    """What ``tier`` holds of chains, and the blocks of ``host`` that it is writing, which are pinned there."""

    def __init__(self, host: PolicyOffloadingManager, tier: Tier, layout: ChainLayout) -> None:
        self._host = host
        self._tier = tier
        self._layout = layout
        self.chain_of: dict[OffloadKey, Chain | None] = {}
        """Blocks that the tier has not reported yet, and the chain that each is written for; None after a reset."""
        self._slots: dict[OffloadKey, int] = {}
        """Their host slots."""
        self.num_lost = 0
        """Blocks that the tier was given and has lost, without those that it has evicted."""

    def begin(self, keys: Keys, chain: Chain) -> list[OffloadKey]:
        """Gives blocks of ``chain`` to the tier. Returns those that it has taken on."""
        lease = self._host.prepare_load(keys)
        taken = self._tier.write(keys, lease.slots)
        slots = dict(zip(keys, lease.slots.tolist(), strict=True))
        self._slots.update((key, slots.pop(key)) for key in taken)
        self._unpin(slots.values())
        self.chain_of.update(dict.fromkeys(taken, chain))
        log = chain.log
        log.given.update(taken)
        log.foreign.difference_update(taken)
        log.lost.difference_update(taken)
        log.num_writes += len(taken)
        return taken

    def end(self, keys: Keys) -> list[Chain | None]:
        """The tier has reported ``keys``. Returns the chain that each was written for."""
        self._unpin([self._slots.pop(key) for key in keys])
        return [self.chain_of.pop(key) for key in keys]

    def _unpin(self, slots: Collection[int]) -> None:
        if slots:
            self._host.complete_load(self._host.lease(slots))

    def in_tier(self, keys: Keys, chain: Chain) -> Bools:
        """Returns which of ``keys`` the tier holds, or is being given for ``chain``: if that fails, it is corrected."""
        states = self._tier.contains(keys)
        held: Bools = states == HIT
        if (states == RETRY).any():
            # It took these once. Until it knows better, it has them.
            held |= (states == RETRY) & among(keys, chain.log.given - chain.log.lost)
        if not self.chain_of.keys().isdisjoint(keys):
            for i in np.flatnonzero(~held).tolist():
                held[i] = self.chain_of.get(keys[i]) is chain
        return held

    def look(self, keys: Keys, chain: Chain) -> tuple[Bools, Bools]:
        """Returns which of ``keys`` are ``in_tier``, and which are that or can be written: the host has them, and they
        are not being written for another chain."""
        in_tier = self.in_tier(keys, chain)
        available = in_tier.copy()
        absent = np.flatnonzero(~in_tier)
        names = [keys[i] for i in absent.tolist()]
        if names:
            available[absent] = (self._host.table.states(names) == HIT) & ~among(names, self.chain_of)
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
            lacking = ~self.in_tier(keys, chain)
            if in_host or group.state:
                lacking &= self._host.table.states(keys) == HIT
            num_lacking += int(np.count_nonzero(lacking))
        return num_lacking

    def delete_unreachable(self, chain: Chain) -> None:
        """Deletes the blocks of the chain that no lookup can use. From a shared tier only those that were written for
        it.

        Blocks that are being written count as held: if a write fails, its own chain is corrected then. What was written
        for this chain would stay, so only blocks that are being written for it count as held for that."""
        mine = chain.log.given - chain.log.foreign
        own = {key for key, writer in self.chain_of.items() if writer is chain}
        states = [self._tier.contains(keys) for keys in chain.by_group]
        useless: dict[OffloadKey, bool] = {}
        """Blocks, and whether the tier may hold them."""
        for writing, are_all in ((self.chain_of.keys(), not self._tier.is_shared), (own, False)):
            held = [
                (its == HIT) | ((its == RETRY) & ~among(keys, chain.log.lost)) | among(keys, writing)
                for keys, its in zip(chain.by_group, states, strict=True)
            ]
            masks = unreachable(self._layout, chain.by_group, held, chain.num_units, mine)
            for keys, mask, its in zip(chain.by_group, masks, states, strict=True):
                for i in np.flatnonzero(mask).tolist():
                    may_hold = bool(its[i] != MISS)
                    writer = self.chain_of.get(keys[i], chain if may_hold else None)
                    if writer is chain and (are_all or keys[i] in mine):
                        useless[keys[i]] = may_hold
        self.num_lost += sum(useless.values())
        self._tier.delete(list(useless))


def among(keys: Keys, group: Collection[OffloadKey]) -> Bools:
    """Returns which of ``keys`` are in ``group``."""
    return np.fromiter(map(group.__contains__, keys), np.bool_, len(keys)) if group else np.zeros(len(keys), np.bool_)

"""Backlog: the chains with blocks that may still have to be written to one tier, and their order."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvoffload.abc import IntegrityError, OffloadKey

MAX_CHAINS = 4096
"""Chains in one backlog."""
BACKLOG_SHARE = 2.0
"""Keys of these chains, as a multiple of the host's blocks. Above it the oldest chain is dropped."""


class ChainState(enum.Enum):
    FRESH = enum.auto()
    """Nothing of it has been written since it was offered."""
    STARTED = enum.auto()
    """A part of it has been written, the rest is to be written."""
    WAITING = enum.auto()
    """Its next block is not in the host yet, or is being written for another chain."""
    POSTPONED = enum.auto()
    """Its request waits for a promotion: its blocks that the host lacks come from the tier."""
    HELD = enum.auto()
    """The tier holds all of it, or is writing the rest. Its request may bring a longer one."""
    GONE = enum.auto()
    """It is not in the backlog."""


READY = frozenset({ChainState.FRESH, ChainState.STARTED})
"""States of chains that are to be written now."""


@dataclass(slots=True, eq=False)
class ChainRef:
    """Refers to the latest chain of a request. Blocks that are being written hold it, so a new chain takes over all of
    them at once."""

    chain: Chain | None
    """None after a reset."""


@dataclass(slots=True, eq=False)
class Chain:
    """The blocks of one request: ``keys`` in order, ``by_group[g]`` those of group g. The chain has ``num_units``
    units, see ``kvoffload.tiers.plan``."""

    keys: list[OffloadKey]
    by_group: list[list[OffloadKey]]
    num_units: int
    is_whole: bool
    """Its request has ended: blocks that the host lacks now will not be stored any more."""
    request: str | None
    state: ChainState = ChainState.GONE
    waits_for: Sequence[OffloadKey] = ()
    """In the state WAITING, the blocks of which it waits for any."""
    done: int = 0
    """Units whose blocks the tier holds or is writing, as far as is known."""
    verify_at: int = 0
    """When this many units are done, all of them are looked up again if the tier has lost blocks since."""
    losses: int = 0
    """Blocks that the tier had lost when the units that are done were last looked up."""
    written: list[OffloadKey] = field(default_factory=list)
    """Blocks that the tier has been given for its request so far."""
    foreign: set[OffloadKey] = field(default_factory=set)
    """Those of them that the medium held already: others have written them."""
    lost: set[OffloadKey] = field(default_factory=set)
    """Those of them whose latest write has failed."""
    num_written_before: int = 0
    """How many of them it was given before this chain was offered."""
    failures: int = 0
    refused_at: float | None = None
    """Since when the tier takes on none of its blocks, although it has nothing else to do."""
    ref: ChainRef = field(init=False)

    def __post_init__(self) -> None:
        self.ref = ChainRef(self)

    def take_over(self, before: Chain) -> None:
        """Takes the place of ``before``, the chain that was offered for the same request before. What is done of it is
        not looked up again, unless this chain is whole, or is another one."""
        self.written, self.foreign, self.lost = before.written, before.foreign, before.lost
        self.failures, self.num_written_before = before.failures, len(before.written)
        self.ref = before.ref
        self.ref.chain = self
        if not self.is_whole and self.keys[: len(before.keys)] == before.keys:
            self.done, self.verify_at, self.losses = before.done, before.verify_at, before.losses


class Backlog:
    """The chains of one tier, at most MAX_CHAINS and ``max_keys`` keys.

    A chain that is STARTED comes first, then the FRESH chain that was offered last.
    """

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._num_keys = 0
        self._chains: OrderedDict[Chain, None] = OrderedDict()
        """Every chain that is not GONE, the oldest first."""
        self._queues: dict[ChainState, OrderedDict[Chain, None]] = {
            ChainState.FRESH: OrderedDict(),
            ChainState.STARTED: OrderedDict(),
        }
        self._waiting: dict[OffloadKey, dict[Chain, None]] = {}
        """Chains that are WAITING, by each block that they wait for."""
        self._by_request: dict[str, Chain] = {}

    def __iter__(self) -> Iterator[Chain]:
        return iter(self._chains)

    @property
    def is_ready(self) -> bool:
        """Whether there is a chain to be written now."""
        return any(self._queues.values())

    @property
    def awaited(self) -> list[OffloadKey]:
        """The blocks that chains wait for."""
        return list(self._waiting)

    def waits_for_any(self, keys: Iterable[OffloadKey]) -> bool:
        """Returns whether some chain waits for one of ``keys``."""
        return not self._waiting.keys().isdisjoint(keys)

    def of_request(self, request: str | None) -> Chain | None:
        return None if request is None else self._by_request.get(request)

    def next(self) -> Chain | None:
        """Returns the chain to be written next."""
        started, fresh = self._queues[ChainState.STARTED], self._queues[ChainState.FRESH]
        return next(iter(started), None) or next(reversed(fresh), None)

    def add(self, chain: Chain, state: ChainState) -> None:
        """Adds a GONE chain to the chains to be written."""
        self._chains[chain] = None
        self._num_keys += len(chain.keys)
        if chain.request is not None:
            self._by_request.setdefault(chain.request, chain)
        self.enqueue(chain, state)

    def excess(self) -> Chain | None:
        """Returns the chain to be dropped because the bounds are exceeded: the oldest, one that is not STARTED if
        possible."""
        if len(self._chains) < 2 or (len(self._chains) <= MAX_CHAINS and self._num_keys <= self._max_keys):
            return None
        others = (chain for chain in self._chains if chain.state is not ChainState.STARTED)
        return next(others, next(iter(self._chains)))

    def enqueue(self, chain: Chain, state: ChainState) -> None:
        """Queues the chain for writing: ``state`` is FRESH or STARTED."""
        self._leave(chain)
        chain.state = state
        self._queues[state][chain] = None

    def wait_for(self, chain: Chain, keys: Sequence[OffloadKey]) -> None:
        """Makes the chain wait until ``wake`` names one of ``keys``."""
        self._leave(chain)
        chain.state, chain.waits_for = ChainState.WAITING, keys
        for key in keys:
            self._waiting.setdefault(key, {})[chain] = None

    def wake(self, keys: Collection[OffloadKey]) -> bool:
        """Queues the chains that wait for one of ``keys``. Returns whether there were any."""
        if not self._waiting or self._waiting.keys().isdisjoint(keys):
            return False
        awaited = filter(self._waiting.__contains__, keys)
        woken = dict.fromkeys(chain for key in awaited for chain in self._waiting[key])
        for chain in woken:
            self.enqueue(chain, ChainState.STARTED if chain.written else ChainState.FRESH)
        return bool(woken)

    def hold(self, chain: Chain) -> None:
        """Keeps the chain, of which there is nothing to be written, until its request brings a longer one."""
        self._leave(chain)
        chain.state = ChainState.HELD

    def postpone(self, request: str) -> None:
        """Makes the request's chain, if it is FRESH, wait for ``resume``."""
        chain = self._by_request.get(request)
        if chain is not None and chain.state is ChainState.FRESH:
            self._leave(chain)
            chain.state = ChainState.POSTPONED

    def resume(self, request: str) -> bool:
        """Queues the request's chain if it was postponed. Returns whether it was."""
        chain = self._by_request.get(request)
        if chain is None or chain.state is not ChainState.POSTPONED:
            return False
        self.enqueue(chain, ChainState.FRESH)
        return True

    def remove(self, chain: Chain) -> None:
        if chain.state is not ChainState.GONE:
            self._leave(chain)
            chain.state = ChainState.GONE
            del self._chains[chain]
            self._num_keys -= len(chain.keys)
            if chain.request is not None and self._by_request.get(chain.request) is chain:
                del self._by_request[chain.request]

    def clear(self) -> None:
        for chain in list(self._chains):
            self.remove(chain)

    def _leave(self, chain: Chain) -> None:
        """Removes the chain from all queues."""
        for key in dict.fromkeys(chain.waits_for):
            waiting = self._waiting[key]
            del waiting[chain]
            if not waiting:
                del self._waiting[key]
        chain.waits_for = ()
        if chain.state in self._queues:
            self._queues[chain.state].pop(chain, None)

    def check_integrity(self) -> None:
        """Raises IntegrityError if a chain is in the wrong queue, or the keys are miscounted."""
        in_no_queue = (ChainState.POSTPONED, ChainState.HELD)
        states = {chain: chain.state for chain in self._chains if chain.state in in_no_queue}
        states |= {chain: state for state, queue in self._queues.items() for chain in queue}
        for waiting in self._waiting.values():
            states |= dict.fromkeys(waiting, ChainState.WAITING)
        if states != {chain: chain.state for chain in self._chains}:
            raise IntegrityError("a chain of the backlog is in no queue, or in the wrong one")
        if self._num_keys != sum(len(chain.keys) for chain in self._chains):
            raise IntegrityError("the backlog has miscounted the keys of its chains")

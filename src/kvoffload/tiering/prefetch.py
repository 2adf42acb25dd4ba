"""Prefetcher: reads chains from lower tiers shortly before the requests that are expected to use them."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvoffload.abc import IntegrityError, Keys, Need, OffloadKey, ReqContext
from kvoffload.abc.tier import HIT
from kvoffload.cache.keys import NAMESPACE_BYTES, seem_of_several_groups
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.tiering.common import Common
from kvoffload.tiering.lookup import LoadGate, TierSearch, find_hit
from kvoffload.tiering.rates import MovingRate
from kvoffload.tiering.waits import Waits

MAX_CHAINS = 4096
"""Chains whose return is expected. Beyond it the oldest is forgotten."""
KEYS_PER_BLOCK = 8
"""Keys of these chains, as a multiple of the host's blocks."""
QUEUE_SLACK = 256
"""The queue is rebuilt when it has this many entries more than twice the number of chains."""
LEAD_S = 2.0
"""A chain has been read this long before its expected use. What is read earlier takes the room of blocks that others
need."""
QUEUED_S = 10.0
"""What was read for a request in the engine's queue is held for this long."""
HELD_SHARE = 0.5
"""At most this share of what a tenant can have in the host, and of the blocks that nothing else pins, is held for
expected uses. So as many blocks as are held can leave for stores, loads and promotions."""
SWEEP_EVERY_S = 0.5
"""How often blocks whose time is over are looked for."""
BATCH_S = 0.01
"""What a tier can read in this time is read at a time, at least one block: a request that comes meanwhile waits no
longer."""
BATCH_BYTES = 32 << 20
"""The most bytes of a batch, unless one block has more: the speed of a tier may not be known yet."""
BATCH_BLOCKS = 128
"""The most blocks of a batch, so that no step takes long."""
MAX_LOOKS = 8
"""Chains that one step looks at."""
PIECE = 1024
"""Keys that are looked up for a batch, after the first one of a chain."""
TIME_SHARE = 0.5
"""Tiers are read for at most this share of the time."""
PREFETCH = "\0prefetch"
"""The id of the request for which batches are read, one at a time."""


@dataclass(slots=True, eq=False)
class _Expected:
    """A chain that a request is expected to use."""

    name: int | str
    keys: Keys
    returns_at: float
    """When it is used."""
    until: float
    """What was read for it is not held any longer."""
    begins_at: int = 0
    """The index of the first key that is still to be looked up. What was read may be evicted before it is used, and
    is not read again."""


class _Batch(NamedTuple):
    """Blocks that are being read for a chain."""

    chain: _Expected
    began: float
    seconds: float
    """How long its tier takes for it; 0 if that is unknown."""


class ExpectedChains:
    """The chains that requests are expected to use, at most MAX_CHAINS with ``max_keys`` keys, in the order in which
    they are to be looked at."""

    def __init__(self, max_keys: int) -> None:
        self.by_name: OrderedDict[int | str, _Expected] = OrderedDict()
        """The oldest first. Read only for others."""
        self.max_keys = max_keys
        self._num_keys = 0
        self._queue: list[tuple[float, int, _Expected]] = []
        """A heap by the time at which each is looked at, then by its number. Some may not be expected any more."""
        self._numbers = itertools.count()

    @property
    def next_due(self) -> float:
        """When the next one is to be looked at; infinite if nothing is expected."""
        return self._queue[0][0] if self._queue else math.inf

    def add(self, chain: _Expected, due: float) -> None:
        """Adds a chain with a new name, which is looked at when it is ``due``."""
        self.by_name[chain.name] = chain
        self._num_keys += len(chain.keys)
        heapq.heappush(self._queue, (due, next(self._numbers), chain))
        while len(self.by_name) > MAX_CHAINS or self._num_keys > self.max_keys:
            self.forget(next(iter(self.by_name)))
        if len(self._queue) > 2 * len(self.by_name) + QUEUE_SLACK:
            self._queue = [entry for entry in self._queue if self.has(entry[2])]
            heapq.heapify(self._queue)

    def has(self, chain: _Expected) -> bool:
        return self.by_name.get(chain.name) is chain

    def forget(self, name: int | str | None) -> None:
        chain = self.by_name.pop(name, None) if name is not None else None
        if chain is not None:
            self._num_keys -= len(chain.keys)

    def first(self, now: float) -> _Expected | None:
        """Returns the first chain that is due; None if there is none. Forgets those that are late."""
        while self.next_due <= now:
            chain = self._queue[0][2]
            if self.has(chain) and now <= chain.until:
                return chain
            self.put_off(math.inf)
        return None

    def put_off(self, due: float) -> None:
        """The first one is looked at again when it is ``due``; if that is infinite, it is forgotten."""
        _, number, chain = heapq.heappop(self._queue)
        if due < math.inf:
            heapq.heappush(self._queue, (due, number, chain))
        elif self.has(chain):
            self.forget(chain.name)

    def clear(self) -> None:
        self.by_name.clear()
        self._queue.clear()
        self._num_keys = 0


class PrefetchedBlocks:
    """What was prefetched into ``host`` is pinned until its use or the end of its time."""

    def __init__(self, host: PolicyOffloadingManager) -> None:
        self._host = host
        self.held: OrderedDict[OffloadKey, tuple[int, float]] = OrderedDict()
        """Slots of pinned blocks, and until when they are held. Read only for others."""
        self._num_held: Counter[bytes] = Counter()
        """By the namespace of their tenant."""
        self.most = int(host.num_blocks * HELD_SHARE)
        self._sweep_at = -math.inf
        """When blocks whose time is over are looked for again."""

    def hold(self, keys: Keys, until: float) -> None:
        """Pins ready blocks."""
        keys = [key for key in keys if key not in self.held]
        slots = self._host.prepare_load(keys).slots.tolist()
        self.held.update((key, (slot, until)) for key, slot in zip(keys, slots, strict=True))
        self._num_held.update(key[:NAMESPACE_BYTES] for key in keys)

    def sweep(self, now: float) -> None:
        """Lets go what others have no room beside, and what was not used in time."""
        if self._num_excess > 0:
            self.let_go(list(itertools.islice(reversed(self.held), self._num_excess)))
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_EVERY_S
            self.let_go([key for key, (_, until) in self.held.items() if until < now])

    def room(self, key: OffloadKey) -> int:
        """Returns how many more blocks of the tenant of ``key`` may be held."""
        most = int(self._host.most_blocks(key) * HELD_SHARE)
        return max(0, min(-self._num_excess, most - self._num_held[key[:NAMESPACE_BYTES]]))

    def let_go(self, keys: Collection[OffloadKey]) -> int:
        """Unpins those of ``keys`` that are held. Returns how many these are."""
        keys = [key for key in dict.fromkeys(keys) if key in self.held]
        if keys:
            self._host.complete_load(self._host.lease([self.held.pop(key)[0] for key in keys]))
            self._num_held.subtract(key[:NAMESPACE_BYTES] for key in keys)
            self._num_held = +self._num_held
        return len(keys)

    @property
    def _num_excess(self) -> int:
        """How many blocks are held that others have no room beside. Below 0: so many more may be held."""
        return len(self.held) - int(HELD_SHARE * (len(self.held) + self._host.num_available_blocks))

    def check_integrity(self) -> None:
        """Raises IntegrityError if more blocks are held than may be."""
        if len(self.held) > self.most:
            raise IntegrityError("more blocks are held for expected uses than may be")


class Prefetcher:
    """Promotes what tiers hold of expected chains and ``host`` lacks, head first, while no request waits for a tier:
    those whose clients have said when they return, and those of requests in the engine's queue. What was read is pinned
    until its use, or until LEAD_S after the expected time.

    The chain of a session takes the place of its former one, and a request of the session ends the wait. Models with
    several KV cache groups are left out. ``on_device``: blocks that the device holds in place of the host.
    """

    def __init__(self, common: Common, waits: Waits, gate: LoadGate, on_device: Collection[OffloadKey]) -> None:
        self._host = common.host
        self._counts = common.counts
        self._clock = common.clock
        self._waits = waits
        self._gate = gate
        self._on_device = on_device
        self.chains = ExpectedChains(KEYS_PER_BLOCK * common.host.num_blocks)
        self.expected = self.chains.by_name
        self.blocks = PrefetchedBlocks(common.host)
        self.held = self.blocks.held
        self.reading: _Batch | None = None
        self._pace = MovingRate()
        """Blocks that are read per second of the clock, with what passes between two batches."""
        self._not_before = -math.inf
        """When the next batch may be read."""

    # Requests.

    def expect_return(self, keys: Keys, context: ReqContext) -> None:
        """Takes note of the end of a request, which has used the chain ``keys``, if it says when that is used next."""
        hints = context.hints
        if hints is None or hints.drop or hints.expect_return_s is None:
            return
        name = context.req_id if hints.session is None else hints.session
        self.chains.forget(name)
        if hints.likely_return_s is not None:
            returns_at = self._clock() + hints.likely_return_s
            self._add(name, keys, returns_at, returns_at + LEAD_S)

    def expect_now(self, keys: Keys, context: ReqContext) -> None:
        """Takes note of a request that waits in the engine's queue and will use the chain ``keys``."""
        now = self._clock()
        self.forget(context)
        self._add(context.req_id, keys, now, now + QUEUED_S)

    def _add(self, name: int | str, keys: Keys, returns_at: float, until: float) -> None:
        if keys and self.blocks.most and len(keys) <= self.chains.max_keys and not seem_of_several_groups(keys):
            chain = _Expected(name, list(keys), returns_at, until)
            self.chains.add(chain, self._due(returns_at, len(keys)))

    def _due(self, returns_at: float, num_missing: int) -> float:
        """Returns when so many blocks are to be read for a use at ``returns_at``."""
        return returns_at - LEAD_S - (self._pace.seconds_for(num_missing) or 0.0)

    def forget(self, context: ReqContext) -> None:
        """Takes note of a request that is not expected any more, because it is looked up or has ended."""
        self.chains.forget(context.req_id)
        if context.hints is not None:
            self.chains.forget(context.hints.session)

    def used(self, keys: Collection[OffloadKey], context: ReqContext | None) -> None:
        """Takes note of a request that uses ``keys``."""
        if context is not None:
            self.forget(context)
        if self.held:
            self._counts["prefetched_used_blocks"] += self.blocks.let_go(keys)

    def clear(self) -> None:
        """Nothing is expected any more."""
        self.chains.clear()
        self.blocks.let_go(self.held)
        self._waits.release(PREFETCH)
        self.reading = None

    # Steps.

    def poll(self) -> None:
        """Ends a batch that has arrived, and begins the next one if it is time and no request waits for a tier."""
        now = self._clock()
        if self.held:
            self.blocks.sweep(now)
        if self.reading is not None and not self._end_batch(self.reading, now):
            return
        if now < self._not_before or self._waits.reads.queue or any(tier.reads for tier in self._gate.tiers):
            return
        for _ in range(MAX_LOOKS):
            chain = self.chains.first(now)
            due = now if chain is None else self._begin_batch(chain, now)
            if due <= now:
                return
            self.chains.put_off(due)

    def _begin_batch(self, chain: _Expected, now: float) -> float:
        """Reads the next blocks of ``chain`` if it is time. Returns when to look at it again: infinity if nothing is to
        be read any more."""
        if chain.begins_at >= len(chain.keys):
            return math.inf
        room = self.blocks.room(chain.keys[0])
        if not room:
            # It may come when others have been used.
            return now + SWEEP_EVERY_S
        begins_at, is_first_look = chain.begins_at, not chain.begins_at
        if is_first_look and self._host.is_behind_device:
            on_device = itertools.takewhile(self._on_device.__contains__, chain.keys)
            begins_at = sum(1 for _ in on_device)
        # Later looks are at what follows the last block that was read.
        keys = chain.keys[begins_at:] if is_first_look else chain.keys[begins_at : begins_at + PIECE]
        if not keys:
            # They may leave the device before their use.
            due = self._due(chain.returns_at, 0)
            return due if due > now else math.inf
        search = TierSearch(self._gate, now)
        states, found = find_hit(search, keys, Need.RUN)
        if is_first_look:
            # What the host has of it counts as used now, so that it does not leave for the rest.
            self._host.end_chain(keys[: int(np.count_nonzero(states == HIT))], ())
            due = self._due(chain.returns_at, len(found))
            if due > now:
                return due
        if not found:
            if not is_first_look and (states == HIT).all():
                chain.begins_at = begins_at + len(keys)
                return now
            # A shared medium may be asked, and knows at a later step.
            return now if search.is_unanswered else math.inf
        tier = self._gate.tiers[next(iter(found.values()))]
        n = tier.estimator.num_blocks_within(BATCH_S, max(1, min(BATCH_BLOCKS, BATCH_BYTES // tier.tier.block_bytes)))
        batch = dict(itertools.islice(found.items(), min(n, room)))
        chain.begins_at = begins_at + keys.index(next(reversed(batch))) + 1
        self._waits.begin(batch, PREFETCH)
        self.reading = _Batch(chain, now, tier.estimator.seconds_to_read(len(batch)) or 0.0)
        return now

    def _end_batch(self, batch: _Batch, now: float) -> bool:
        """Takes in a batch that was read. Returns False if it is still under way."""
        chain, began, seconds = batch
        if (wait := self._waits.get(PREFETCH)) is not None and wait.is_waiting:
            return False
        self.reading = None
        arrived = [] if wait is None else list(wait.pinned)
        if self.chains.has(chain):
            # Otherwise its session has returned meanwhile, and its request waits for what is being read.
            self.blocks.hold(arrived, chain.until)
        self._waits.release(PREFETCH)
        self._counts["prefetched_blocks"] += len(arrived)
        self._not_before = began + (seconds or now - began) / TIME_SHARE
        self._pace.add(len(arrived), max(now, self._not_before) - began)
        if not arrived:
            # It was not read in time, or others have taken its room.
            self.chains.forget(chain.name)
        return True

"""The clairvoyant policy, an upper bound for all others: Belady, "A Study of Replacement Algorithms for a
Virtual-Storage Computer", IBM Systems Journal 1966, applied to chains of blocks."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.abc import Access, CachePolicy, Eviction, IntegrityError, OffloadKey, Slots
from kvoffload.lab.trace import Ints, Trace

COMPACT_FROM = 4
"""The heap is rebuilt when it has more than this many entries per block of the cache."""

_EMPTY = -1


def clairvoyant_policy(trace: Trace) -> Callable[[int], CachePolicy]:
    """Returns a factory, from a capacity in blocks, of the policy that knows when each block of ``trace`` is used next.

    The policy works only for a replay of that trace from its first request. It maximizes the block hits of one cache
    that gets all requests; we know of no policy that finds longer prefixes.
    """
    future = _Future(trace)
    return lambda capacity: ClairvoyantPolicy(capacity, future)


class _Future:
    """For each access of a block, when the block is requested next, as a rank: lower is sooner.

    Ranks order by request, then by depth in its chain, so a chain's tail comes after its head. A block that is never
    requested again has the rank ``never``. Only prompts request blocks; outputs are just stored.
    """

    def __init__(self, trace: Trace) -> None:
        lengths = np.diff(trace.offsets)
        requests = np.repeat(np.arange(trace.num_requests), lengths)
        depths = np.arange(trace.num_accesses) - np.repeat(trace.offsets[:-1], lengths)
        deepest = int(lengths.max(initial=0)) + 1
        self.never = trace.num_requests * deepest
        self.offsets: list[int] = trace.offsets.tolist()
        self.blocks = trace.blocks
        self.keys = trace.keys_of(np.arange(trace.num_distinct))
        self.number_of = {key: number for number, key in enumerate(self.keys)}
        asks = depths < np.repeat(trace.prompt_blocks, lengths)
        self.ranks = self._next_ranks(requests * deepest + depths, asks, trace.num_distinct)

    def _next_ranks(self, ranks: Ints, asks: npt.NDArray[np.bool_], num_distinct: int) -> Ints:
        """Returns, per access, the rank of the next request for its block."""
        following = [self.never] * num_distinct
        found = []
        for block, rank, asked in zip(
            self.blocks[::-1].tolist(), ranks[::-1].tolist(), asks[::-1].tolist(), strict=True
        ):
            found.append(following[block])
            if asked:
                following[block] = rank
        return np.array(found[::-1], dtype=np.int64)


class ClairvoyantPolicy(CachePolicy):
    """Evicts the block whose next use is furthest away, and refuses a new block if every victim is needed sooner.

    ``access`` raises IntegrityError if it gets a request that is not the trace's next one.
    """

    def __init__(self, capacity: int, future: _Future) -> None:
        super().__init__(capacity)
        self._future = future
        self._request = -1
        self._rank_of_block = np.full(len(future.keys), future.never, dtype=np.int64)
        self._asked_by = np.full(len(future.keys), _EMPTY, dtype=np.int64)
        """The last request that used each block."""
        self._block_of = np.full(capacity, _EMPTY, dtype=np.int64)
        self._rank_of = np.full(capacity, _EMPTY, dtype=np.int64)
        """By slot, as ``_block_of``."""
        self._heap: list[int] = []
        """A rank and a slot combined in each number, the highest rank first. Stale if the slot's rank has changed."""

    def access(self, access: Access) -> None:
        self._request += 1
        future, keys = self._future, access.keys
        start, end = future.offsets[self._request : self._request + 2]
        if len(keys) > end - start or (len(keys) and keys[-1] != future.keys[future.blocks[start + len(keys) - 1]]):
            raise IntegrityError(f"the clairvoyant policy was not given request {self._request} of its trace")
        chain = future.blocks[start:end]
        self._rank_of_block[chain] = future.ranks[start:end]
        self._asked_by[chain] = self._request
        self._rank(access.slots)

    def insert(self, slots: Slots, keys: Sequence[OffloadKey]) -> None:
        self._block_of[slots] = self._numbers(keys)
        self._rank(slots)

    def _rank(self, slots: Slots) -> None:
        """Updates the ranks of blocks."""
        ranks = self._rank_of[slots] = self._rank_of_block[self._block_of[slots]]
        for entry in ((self._future.never - ranks) * self.capacity + slots).tolist():
            heapq.heappush(self._heap, entry)
        if len(self._heap) > COMPACT_FROM * self.capacity:
            held = np.flatnonzero(self._rank_of != _EMPTY)
            self._heap = np.sort((self._future.never - self._rank_of[held]) * self.capacity + held).tolist()

    def admit(self, keys: Sequence[OffloadKey], shortage: int) -> npt.NDArray[np.bool_]:
        ranks = self._rank_of_block[self._numbers(keys)]
        refused: list[int] = []
        last_first = np.argsort(-ranks, kind="stable").tolist()
        popped: list[int] = []
        victim = self._pop_other(popped)
        for _ in range(shortage):
            newcomer = last_first[len(refused)]
            if victim > ranks[newcomer]:
                victim = self._pop_other(popped)
            else:
                refused.append(newcomer)
        self._push(popped)
        admitted = np.ones(len(keys), dtype=np.bool_)
        admitted[refused] = False
        return admitted

    def _pop_other(self, popped: list[int]) -> int:
        """Returns the rank of the next entry that is not part of the current request, which must stay; -1 if there is
        none. Moves the entries that it visits from the heap to ``popped``."""
        while (entry := self._pop(popped)) is not None:
            if self._asked_by[self._block_of[entry % self.capacity]] != self._request:
                return self._future.never - entry // self.capacity
        return -1

    def evict(self, eviction: Eviction) -> Slots:
        popped: list[int] = []
        victims: list[int] = []
        while len(victims) < eviction.n and (entry := self._pop(popped)) is not None:
            if not eviction.busy[entry % self.capacity]:
                victims.append(popped.pop() % self.capacity)
        self._push(popped)
        evicted = np.array(victims, dtype=np.int64)
        self.remove(evicted)
        return evicted

    def _pop(self, popped: list[int]) -> int | None:
        """Moves the current entry with the highest rank from the heap to ``popped`` and returns it; None if none is
        left."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._rank_of[entry % self.capacity] == self._future.never - entry // self.capacity:
                popped.append(entry)
                return entry
        return None

    def _push(self, popped: list[int]) -> None:
        for entry in popped:
            heapq.heappush(self._heap, entry)

    def _numbers(self, keys: Sequence[OffloadKey]) -> list[int]:
        return list(map(self._future.number_of.__getitem__, keys))

    def remove(self, slots: Slots) -> None:
        self._rank_of[slots] = _EMPTY

    def clear(self) -> None:
        self._rank_of.fill(_EMPTY)
        self._heap.clear()

    def check_integrity(self, slots: Slots) -> None:
        held = np.flatnonzero(self._rank_of != _EMPTY)
        if held.tolist() != sorted(slots.tolist()):
            raise IntegrityError("the clairvoyant policy tracks other blocks than the manager")
        entries = set(self._heap)
        if any(e not in entries for e in ((self._future.never - self._rank_of[held]) * self.capacity + held).tolist()):
            raise IntegrityError("the clairvoyant policy lost a heap entry")

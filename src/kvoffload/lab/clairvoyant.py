"""The bound: the policy that knows the future. Belady, "A Study of Replacement Algorithms for a Virtual-Storage
Computer", IBM Systems Journal 1966, over chains of blocks."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.abc import Access, CachePolicy, Eviction, IntegrityError, OffloadKey, Slots
from kvoffload.lab.trace import Ints, Trace

COMPACT_FROM = 4
"""The heap is made anew when it has so many times more entries than the cache has blocks."""

_EMPTY = -1


def clairvoyant_policy(trace: Trace) -> Callable[[int], CachePolicy]:
    """What makes, for a number of blocks, the policy that knows when each block of ``trace`` is asked for next.

    For replays of that very trace, from its first request on. It is a bound for block hits of one cache that gets all
    requests; chains being what they are, no policy is known that finds longer prefixes.
    """
    future = _Future(trace)
    return lambda capacity: ClairvoyantPolicy(capacity, future)


class _Future:
    """When each block is asked for after each of its accesses, as a rank: low is soon.

    By the request that asks, and of one request's blocks by their depth: a chain's tail comes after its head. What
    is never asked for again has the rank ``never``. Only prompts ask; outputs are stored.
    """

    def __init__(self, trace: Trace) -> None:
        lengths = np.diff(trace.offsets)
        requests = np.repeat(np.arange(trace.num_requests), lengths)
        depths = np.arange(trace.num_accesses) - np.repeat(trace.offsets[:-1], lengths)
        deepest = int(lengths.max(initial=0)) + 1
        self.never = trace.num_requests * deepest
        self.offsets: list[int] = trace.offsets.tolist()
        self.blocks = trace.blocks
        self.keys = trace.keys
        self.number_of = {key: number for number, key in enumerate(trace.keys)}
        asks = depths < np.repeat(trace.prompt_blocks, lengths)
        self.ranks = self._next_ranks(requests * deepest + depths, asks, trace.num_distinct)

    def _next_ranks(self, ranks: Ints, asks: npt.NDArray[np.bool_], num_distinct: int) -> Ints:
        """For each access the rank of the next that asks for its block."""
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
    """Evicts the block that is asked for again last, and stores no block for which one that is asked for sooner would
    have to leave.

    ``access`` raises IntegrityError if it is given another request than the next one of the trace.
    """

    def __init__(self, capacity: int, future: _Future) -> None:
        super().__init__(capacity)
        self._future = future
        self._request = -1
        self._rank_of_block = np.full(len(future.keys), future.never, dtype=np.int64)
        self._asked_by = np.full(len(future.keys), _EMPTY, dtype=np.int64)
        """The last request, by block."""
        self._block_of = np.full(capacity, _EMPTY, dtype=np.int64)
        self._rank_of = np.full(capacity, _EMPTY, dtype=np.int64)
        """By slot, as the one before."""
        self._heap: list[int] = []
        """Ranks and slots in one number each, the last rank first. Live while it tells the slot's rank."""

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
        """Gives blocks the ranks that they have from now on."""
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
        """The rank of the next entry that is not of the request now served, since that must stay; -1 if there is none.
        What is looked at leaves the heap for ``popped``."""
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
        """The live entry that is last asked for leaves the heap for ``popped``. None: there is none."""
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
            raise IntegrityError("the clairvoyant policy does not know the blocks it should")
        entries = set(self._heap)
        if any(e not in entries for e in ((self._future.never - self._rank_of[held]) * self.capacity + held).tolist()):
            raise IntegrityError("the clairvoyant policy has lost an entry")

"""What is written to a lower tier and in which order: whole chains, head first, never behind a hole."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvoffload.abc import (
    IntegrityError,
    KVGroup,
    LoadStoreSpec,
    LookupState,
    MissReason,
    OffloadKey,
    Tier,
    TierError,
    TierResult,
)
from kvoffload.cache.keys import key_group_idx
from kvoffload.cache.manager import PolicyOffloadingManager

MAX_CHAINS = 4096
"""Chains of which something may still have to be written to one tier."""
BACKLOG_SHARE = 2.0
"""Keys of these chains, as a multiple of the host's blocks. Beyond it the oldest chain is dropped."""
MAX_REWRITES = 1
"""How often a chain is written again from where a write has failed."""
MAX_WRITES_PER_BLOCK = 2
"""Of one chain, on average: a tier that goes on evicting what it was given is given no more of that chain."""
REFUSAL_S = 0.01
"""A tier that takes nothing on, though it has nothing to do, is asked again after this time."""
PATIENCE_S = 0.25
"""How long an idle engine is kept stepping for a backlog on which the tier makes no progress."""
GIVE_UP_S = 1.0
"""A chain of which the tier takes nothing on for so long, though it has nothing to do, is dropped."""
FIRST_UNITS = 256
"""Resume points that are looked at at first; doubled while there is nothing to write."""

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


class _State(enum.Enum):
    FRESH = enum.auto()
    """Nothing of it was written since it was offered."""
    STARTED = enum.auto()
    """A part of it was written, the rest is to be."""
    WAITING = enum.auto()
    """Its next block is not in the host yet, or is being written for another chain."""
    GONE = enum.auto()


@dataclass(slots=True, eq=False)
class _Chain:
    """The blocks of one request, ``keys`` in order, ``by_group[g]`` those of group g.

    A *unit* is the tokens between two positions at which the blocks of all groups end: a request can go on there.
    """

    keys: list[OffloadKey]
    by_group: list[list[OffloadKey]]
    num_units: int
    is_whole: bool
    """Its request has ended: what the host lacks now does not come any more."""
    request: str | None
    state: _State = _State.FRESH
    waits_for: OffloadKey | None = None
    done: int = 0
    """Units whose blocks the tier holds, or is writing, as far as is known."""
    verify_at: int = 0
    """When so many are done, all of them are looked up again, if the tier has lost blocks since."""
    losses: int = 0
    """Blocks that the tier had lost when the units that are done were last looked up."""
    written: list[OffloadKey] = field(default_factory=list)
    """What the tier has taken on for its request so far."""
    num_written_before: int = 0
    """How many of them before it was offered."""
    failures: int = 0
    refused_at: float | None = None
    """Since when the tier takes nothing of it on, though it has nothing else to do."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to do with a chain next."""

    keys: list[OffloadKey]
    """To be written, in order."""
    done: int
    """``_Chain.done`` when they are."""
    hole: OffloadKey | None
    """The block that the tier lacks and cannot be given now, if there is no more to write before it."""


class WriteThrough:
    """The chains that ``tier`` lacks in part, and what of them is being written.

    A block is written only if all that a lookup needs before it in its chain is in the tier or is being written: of a
    group with full attention every block, of one with a window the blocks that a request needs which goes on at some
    later position. A chain of which something was written comes first, then the chain that was offered last. What
    cannot be written now stays in the backlog while the host holds it.

    ``groups``: the KV cache groups that keys name. ``counts`` takes the counters of METRICS.
    """

    def __init__(
        self,
        host: PolicyOffloadingManager,
        tier: Tier,
        groups: Sequence[KVGroup],
        counts: Callable[[str, float], None],
        clock: Callable[[], float],
    ) -> None:
        self._host = host
        self._tier = tier
        self._groups = tuple(groups)
        self._align = math.lcm(*(group.block_tokens for group in groups))
        self._blocks_per_unit = [self._align // group.block_tokens for group in groups]
        self._count = counts
        self._clock = clock
        self.writing: dict[OffloadKey, _Chain | None] = {}
        """Blocks that the tier has not reported yet, and for which chain they are written; None after a reset."""
        self._slots: dict[OffloadKey, int] = {}
        """Host slots of the blocks in ``writing``, which are pinned."""
        self._chains: dict[_Chain, None] = {}
        """All but those that are gone, the oldest first."""
        self._queues: dict[_State, dict[_Chain, None]] = {_State.FRESH: {}, _State.STARTED: {}}
        self._waiting: dict[OffloadKey, dict[_Chain, None]] = {}
        self._of_request: dict[str, _Chain] = {}
        self._num_keys = 0
        self._max_keys = max(1, int(host.num_blocks * BACKLOG_SHARE))
        self._num_lost = 0
        """Blocks that were given to the tier and have left it, but for those that it has evicted."""
        self._progress = float("-inf")
        """When a write began or ended, or a chain was offered."""
        self._refused_at: float | None = None
        """When the tier took nothing on; None if it has done something since."""

    @property
    def has_backlog(self) -> bool:
        """Whether there are chains to be written on."""
        return any(self._queues.values())

    @property
    def is_busy(self) -> bool:
        """Whether there is a backlog and the tier makes progress."""
        waits = self.has_backlog or not self._waiting.keys().isdisjoint(self.writing)
        return waits and self._clock() - self._progress < PATIENCE_S

    def offer(self, keys: Sequence[OffloadKey], request: str | None, is_whole: bool) -> None:
        """``keys`` are the chain of ``request``, head first, all groups by the position at which their blocks end.

        Takes the place of what was offered for the same request before.
        """
        before = None if request is None else self._of_request.get(request)
        was_started = before is not None and before.state is _State.STARTED
        if before is not None:
            self._remove(before)
        keys = list(keys)
        by_group = self._split(keys)
        num_units = min(len(part) // n for part, n in zip(by_group, self._blocks_per_unit, strict=True))
        # The tail of a chain longer than the tier would push out its head.
        most_blocks = self._tier.capacity_bytes // max(1, self._tier.block_bytes)
        num_units = min(num_units, most_blocks // sum(self._blocks_per_unit))
        if num_units == 0:
            return
        chain = _Chain(keys, by_group, num_units, is_whole, request)
        if before is not None:
            chain.written, chain.failures = before.written, before.failures
            chain.num_written_before = len(chain.written)
            self.writing.update({key: chain for key, other in self.writing.items() if other is before})
        self._chains[chain] = None
        self._num_keys += len(keys)
        if request is not None:
            self._of_request[request] = chain
        self._queue(chain, _State.STARTED if was_started else _State.FRESH)
        self._progress = self._clock()
        while len(self._chains) > 1 and (len(self._chains) > MAX_CHAINS or self._num_keys > self._max_keys):
            idle = (each for each in self._chains if each.state is not _State.STARTED)
            self._drop(next(idle, next(iter(self._chains))))

    def stored(self, keys: Sequence[OffloadKey]) -> None:
        """``keys`` have become ready in the host."""
        self._wake(keys)

    def pump(self, room: int) -> None:
        """Begins to write as much of the backlog as the tier takes on, at most ``room`` blocks."""
        if self._refused_at is not None and self._clock() - self._refused_at < REFUSAL_S:
            return
        while room > 0:
            chain = self._next()
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

    def ended(self, results: Sequence[TierResult]) -> None:
        """Writes have ended."""
        self._progress, self._refused_at = self._clock(), None
        failed: dict[_Chain, list[TierResult]] = {}
        for result in results:
            chain = self.writing.pop(result.key)
            self._num_lost += not result.ok
            if not result.ok and chain is not None:
                failed.setdefault(chain, []).append(result)
        keys = [result.key for result in results]
        self._unpin(keys)
        self._wake(keys)
        for chain, failures in failed.items():
            # What is gone was taken back for another chain.
            chain.failures += any(result.error is not TierError.GONE for result in failures)
            if chain.failures > MAX_REWRITES:
                self._take_back(chain)
                self._remove(chain)
            else:
                self._rewind(chain)

    def _wake(self, keys: Sequence[OffloadKey]) -> None:
        """Chains that waited for one of ``keys`` may go on."""
        if self._waiting:
            for key in keys:
                for chain in self._waiting.pop(key, ()):
                    chain.waits_for = None
                    self._queue(chain, _State.STARTED if chain.written else _State.FRESH)
                    self._progress = self._clock()

    def lost(self, num_blocks: int) -> None:
        """The tier has lost blocks that could not be read."""
        self._num_lost += num_blocks

    def clear(self) -> None:
        """The backlog is forgotten, and what is being written is not waited for."""
        for queue in self._queues.values():
            queue.clear()
        for chain in self._chains:
            chain.state = _State.GONE
        self._chains.clear()
        self._waiting.clear()
        self._of_request.clear()
        self._num_keys = 0
        self.writing = dict.fromkeys(self.writing)

    # Chains.

    def _split(self, keys: list[OffloadKey]) -> list[list[OffloadKey]]:
        if len(self._groups) == 1:
            return [keys]
        by_group: list[list[OffloadKey]] = [[] for _ in self._groups]
        for key in keys:
            by_group[key_group_idx(key)].append(key)
        return by_group

    def _next(self) -> _Chain | None:
        started, fresh = self._queues[_State.STARTED], self._queues[_State.FRESH]
        return next(iter(started), None) or next(reversed(fresh), None)

    def _queue(self, chain: _Chain, state: _State) -> None:
        self._leave(chain)
        chain.state = state
        self._queues[state][chain] = None

    def _leave(self, chain: _Chain) -> None:
        """The chain is in no queue any more."""
        if chain.waits_for is not None:
            waiting = self._waiting[chain.waits_for]
            del waiting[chain]
            if not waiting:
                del self._waiting[chain.waits_for]
            chain.waits_for = None
        if chain.state in self._queues:
            self._queues[chain.state].pop(chain, None)

    def _remove(self, chain: _Chain) -> None:
        if chain.state is not _State.GONE:
            self._leave(chain)
            chain.state = _State.GONE
            del self._chains[chain]
            self._num_keys -= len(chain.keys)
            if chain.request is not None and self._of_request.get(chain.request) is chain:
                del self._of_request[chain.request]

    def _stop(self, chain: _Chain, hole: OffloadKey) -> None:
        """Nothing can be written behind ``hole``, which the tier does not have and cannot be given now."""
        if not chain.is_whole or hole in self.writing:
            self._leave(chain)
            chain.state, chain.waits_for = _State.WAITING, hole
            self._waiting.setdefault(hole, {})[chain] = None
            return
        if self._host.explain_miss(hole).reason is MissReason.EVICTED:
            self._count("disk_dropped_writes", self._num_lacking(chain, in_host=False))
        self._take_back(chain)
        self._finish(chain)

    def _finish(self, chain: _Chain) -> None:
        self._remove(chain)
        if chain.is_whole and len(chain.written) > chain.num_written_before:
            # What was written after its request had ended is newer than what comes before it in the chain.
            self._tier.reorder_chain(chain.keys, chain.written)

    def _drop(self, chain: _Chain) -> None:
        self._count("disk_dropped_writes", self._num_lacking(chain, in_host=True))
        self._remove(chain)
        self._take_back(chain)

    def _num_lacking(self, chain: _Chain, in_host: bool) -> int:
        """Blocks that the tier lacks; with ``in_host`` only those that the host has."""
        lacking = ~self._is_below(chain.keys, chain)
        if in_host:
            lacking &= self._host.states(chain.keys) == LookupState.HIT
        return int(np.count_nonzero(lacking))

    def _rewind(self, chain: _Chain) -> None:
        """The chain is looked at anew from its head, and goes on where the tier lacks a block."""
        chain.done = 0
        if chain.state is _State.GONE:
            self._chains[chain] = None
            self._num_keys += len(chain.keys)
        self._queue(chain, _State.STARTED)

    def _take_back(self, chain: _Chain) -> None:
        """Deletes what of the chain no lookup can reach: all behind a hole in a group with full attention, and what the
        chain has written behind the last position at which a request could go on. The rest there may serve other
        chains. What is being written counts as held by the tier: if it fails, its own chain is put right."""
        held = [
            (self._tier.contains(keys) == LookupState.HIT)
            | np.fromiter(map(self.writing.__contains__, keys), np.bool_, len(keys))
            for keys in chain.by_group
        ]
        sizes = [group.block_tokens for group in self._groups]
        most = chain.num_units * self._align
        limit = max(size * len(keys) for size, keys in zip(sizes, chain.by_group, strict=True))
        for group, size, have in zip(self._groups, sizes, held, strict=True):
            if group.is_full and not have.all():
                limit = min(limit, int(have.argmin()) * size)
        ends = np.arange(self._align, min(most, limit) + 1, self._align, dtype=np.int64)
        usable = np.ones(len(ends), dtype=np.bool_)
        for group, size, have in zip(self._groups, sizes, held, strict=True):
            if not group.is_full:
                first = np.array([group.skipped_tokens(end) // size for end in ends.tolist()], dtype=np.int64)
                holes = np.concatenate(([0], np.cumsum(~have)))
                usable &= holes[ends // size] == holes[first]
        last = int(ends[usable].max(initial=0))
        written = set(chain.written)
        unreachable = [
            key
            for size, keys in zip(sizes, chain.by_group, strict=True)
            for i, key in enumerate(keys[last // size :], last // size + 1)
            if (i * size > limit or key in written) and self.writing.get(key, chain) is chain
        ]
        self._num_lost += int(np.count_nonzero(self._tier.contains(unreachable)))
        self._tier.delete(unreachable)

    # Writing.

    def _is_below(self, keys: Sequence[OffloadKey], chain: _Chain) -> Bools:
        """Which of ``keys`` the tier has or is being given for this chain: if that fails, the chain is put right."""
        below: Bools = self._tier.contains(keys) == LookupState.HIT
        if self.writing and not self.writing.keys().isdisjoint(keys):
            for i in np.flatnonzero(~below).tolist():
                below[i] = self.writing.get(keys[i]) is chain
        return below

    def _can_be_written(self, keys: Sequence[OffloadKey]) -> Bools:
        """Which of ``keys``, none of them being written for this chain, the host has and nobody else writes."""
        found: Bools = self._host.states(keys) == LookupState.HIT
        if self.writing and not self.writing.keys().isdisjoint(keys):
            for i in np.flatnonzero(found).tolist():
                found[i] = keys[i] not in self.writing
        return found

    @property
    def _losses(self) -> int:
        return self._tier.num_evicted + self._num_lost

    def _plan(self, chain: _Chain, room: int) -> _Plan:
        """What of the chain is to be written next, at most ``room`` blocks."""
        before = chain.done
        if self._losses != chain.losses and before >= chain.verify_at:
            # The less often the longer the chain is, so that each block is looked up a few times at most.
            chain.verify_at, chain.losses, chain.done = before + before // 4, self._losses, 0
        # The last unit that is done is looked up again in any case.
        start, num_units = max(0, chain.done - 1), FIRST_UNITS
        while True:
            stop = min(chain.num_units, start + num_units)
            plan = self._plan_units(chain, start, stop, room)
            if plan.keys or plan.hole is not None or stop == chain.num_units:
                return plan
            start, num_units = max(start, plan.done), 2 * num_units

    def _plan_units(self, chain: _Chain, start: int, stop: int, room: int) -> _Plan:
        """What is to be written so that requests can go on at the ends of units ``start`` to ``stop``."""
        ends = np.arange(start + 1, stop + 1, dtype=np.int64) * self._align
        usable = np.ones(len(ends), dtype=np.bool_)
        num_full = len(ends)
        parts = []
        missing: list[tuple[int, OffloadKey, bool]] = []
        """The first of each group: where it ends, and whether the group has full attention."""
        for group, per_unit, keys in zip(self._groups, self._blocks_per_unit, chain.by_group, strict=True):
            size = group.block_tokens
            if group.is_full:
                first = np.full(len(ends), start * per_unit)
            else:
                first = np.array([group.skipped_tokens(end) // size for end in ends.tolist()], dtype=np.int64)
            low = int(first[0])
            names = keys[low : stop * per_unit]
            below = self._is_below(names, chain)
            parts.append((size, low, first, names, below))
            if below.all():
                continue
            here = below.copy()
            absent = np.flatnonzero(~below)
            here[absent] = self._can_be_written([names[i] for i in absent.tolist()])
            holes = np.concatenate(([0], np.cumsum(~here)))
            good = holes[ends // size - low] == holes[first - low]
            usable &= good
            if not here.all():
                i = int(here.argmin())
                missing.append(((low + i + 1) * size, names[i], group.is_full))
                if group.is_full:
                    num_full = min(num_full, int(good.argmin()))
        if not missing and all(below.all() for *_, below in parts):
            return _Plan([], stop, None)
        points = np.flatnonzero(usable)
        wanted: list[tuple[int, OffloadKey]] = []
        for size, low, first, names, below in parts:
            needed = self._is_needed(points, ends // size - low, first - low, len(names))
            wanted += [((low + i + 1) * size, names[i]) for i in np.flatnonzero(needed & ~below).tolist()]
        if len(parts) > 1:
            wanted.sort(key=lambda item: item[0])
        done = start + int(points[-1]) + 1 if len(points) else start
        if len(wanted) > room:
            # Done are units of which nothing is left.
            complete = points[ends[points] < wanted[room][0]]
            done = start + int(complete[-1]) + 1 if len(complete) else start
            return _Plan([key for _, key in wanted[:room]], done, None)
        hole = None
        if num_full < len(ends):
            hole = min((end, name) for end, name, is_full in missing if is_full)[1]
        elif stop == chain.num_units and done < stop:
            hole = min(missing)[1]
        return _Plan([key for _, key in wanted], done, hole)

    @staticmethod
    def _is_needed(points: Ints, stops: Ints, firsts: Ints, num_blocks: int) -> Bools:
        """Which blocks a request needs that goes on at one of ``points``: from ``firsts`` to ``stops`` each."""
        edges = np.zeros(num_blocks + 1, dtype=np.int64)
        np.add.at(edges, firsts[points], 1)
        np.add.at(edges, stops[points], -1)
        needed: Bools = np.cumsum(edges[:-1]) > 0
        return needed

    def _write(self, chain: _Chain, keys: list[OffloadKey]) -> int:
        """How many of ``keys``, from the first one on, the tier has taken on."""
        if not keys:
            return 0
        lease = self._host.prepare_load(keys)
        taken = frozenset(self._tier.write(keys, lease.slots))
        self.writing.update((key, chain) for key in keys if key in taken)
        self._slots.update(zip(keys, lease.slots.tolist(), strict=True))
        self._unpin([key for key in keys if key not in taken])
        if not taken:
            return 0
        chain.written += [key for key in keys if key in taken]
        self._progress, self._refused_at = self._clock(), None
        if chain.state is _State.FRESH:
            self._queue(chain, _State.STARTED)
        return next((i for i, key in enumerate(keys) if key not in taken), len(keys))

    def _unpin(self, keys: Sequence[OffloadKey]) -> None:
        slots = np.array([self._slots.pop(key) for key in keys], dtype=np.int64)
        self._host.complete_load(LoadStoreSpec(self._host.backend.medium, slots))

    def unpin_all(self) -> None:
        """Unpins all blocks that are being written, whatever becomes of the writes."""
        self._unpin(list(self.writing))

    def _refuse(self, chain: _Chain) -> None:
        """The tier did not take on all that it was given."""
        self._refused_at = now = self._clock()
        if self.writing:
            chain.refused_at = None
        elif chain.refused_at is None:
            chain.refused_at = now
        elif now - chain.refused_at > GIVE_UP_S:
            self._drop(chain)

    def check_integrity(self) -> None:
        """Raises IntegrityError if the backlog's books do not balance, or if the tier lacks a block before the place up
        to which a chain counts as written, although it has lost none since that was looked up."""
        queued = sum(map(len, self._queues.values())) + sum(map(len, self._waiting.values()))
        if queued != len(self._chains) or self._num_keys != sum(len(chain.keys) for chain in self._chains):
            raise IntegrityError("the backlog has lost count of its chains")
        for chain in self._chains:
            if chain.losses == self._losses:
                for group, per_unit, keys in zip(self._groups, self._blocks_per_unit, chain.by_group, strict=True):
                    before = keys[: chain.done * per_unit] if group.is_full else []
                    gone = self._tier.contains(before) == LookupState.MISS
                    if any(self.writing.get(before[i]) is not chain for i in np.flatnonzero(gone).tolist()):
                        raise IntegrityError("a chain is written behind a hole")

"""The self-tuning policy: two lists, one of four rules, chosen by what each would have found of late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.abc import CachePolicy, IntegrityError, OffloadKey, Slots
from kvoffload.cache.policies.base import NO_END, RecencyList
from kvoffload.cache.policies.ghosts import GhostTable, Hashes, key_hashes
from kvoffload.cache.policies.tournament import GHOSTS, RULES, Plan, Tournament, plan

Positions = npt.NDArray[np.int64]


class AutoPolicy(CachePolicy):
    """Blocks used by one request (``once``) and by more (``again``), each list oldest first, on one clock; and ghosts:
    blocks that left, or were not let in, and when they were last used.

    A rule (see ``tournament.RULES``) tells from which list a block leaves, whether new blocks enter at all,
    and which of those that return count as used again. A ``Tournament`` chooses the rule; the lists are the same
    for all of them, so that a change costs nothing.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._once = RecencyList(capacity)
        self._again = RecencyList(capacity)
        self._ghosts = GhostTable(GHOSTS * capacity)
        self._tournament = Tournament(capacity)
        self._clock = 0
        self._hash_of = np.zeros(capacity, dtype=np.uint64)
        """Of the key in each slot."""
        self._entering = 0
        """Blocks that were admitted, are not inserted yet, and will be in ``once``."""
        self._hashed: tuple[tuple[OffloadKey, ...], Hashes] = ((), key_hashes(()))
        """The keys that were observed or admitted last: what follows is often about the same."""

    def state(self) -> Mapping[str, Any]:
        scores = zip((rule.name for rule in RULES), self._tournament.scores, strict=True)
        return {"rule": self._tournament.rule.name, "scores": dict(scores)}

    def observe(self, keys: Sequence[OffloadKey]) -> None:
        self._tournament.observe(self._hashes(keys))

    def touch_absent(self, keys: Sequence[OffloadKey]) -> None:
        hashes = self._hashes(keys[::-1])[::-1]
        entries = self._ghosts.find(hashes)
        entries = entries[entries >= 0]
        if len(entries):
            tested = self._tournament.rule.is_tested(self.capacity, len(self._again))
            floor = self._again.oldest_position() if tested else -1
            self._ghosts.mark(entries, self._ghosts.stamps(entries) > floor)

    def touch(self, slots: Slots, ready: npt.NDArray[np.bool_], pinned: npt.NDArray[np.bool_]) -> None:
        positions = self._tick(len(slots))
        in_once = self._once.holds(slots)
        still = in_once & ~ready
        self._once.append(slots[still], positions[still])
        promoted = slots[in_once & ready]
        self._once.discard(promoted)
        self._again.join_parked(promoted)
        moved = ~still & ~pinned
        self._again.append(slots[moved], positions[moved])

    def refresh(self, slots: Slots, new: npt.NDArray[np.bool_], pinned: npt.NDArray[np.bool_]) -> None:
        positions = self._tick(len(slots))
        in_once = self._once.holds(slots)
        for blocks, chosen in ((self._once, in_once & ~pinned), (self._again, ~in_once & ~pinned)):
            blocks.append(slots[chosen], positions[chosen])

    def admit(self, keys: Sequence[OffloadKey], shortage: int) -> npt.NDArray[np.bool_] | None:
        hashes = self._hashes(keys)
        entries = self._ghosts.find(hashes)
        returning = self._ghosts.is_marked(entries)
        num_again = int(np.count_nonzero(returning))
        num_once = len(keys) - num_again
        self._entering = num_once
        made = self._plan(num_once, num_again, shortage)
        if not self.may_refuse or not (made.drop_once or made.drop_again):
            return None
        self._entering -= made.drop_once
        admitted = np.ones(len(keys), dtype=np.bool_)
        admitted[np.flatnonzero(~returning)[num_once - made.drop_once :]] = False
        admitted[np.flatnonzero(returning)[num_again - made.drop_again :]] = False
        self._leave_out(hashes[~admitted])
        self._hashed = tuple(compress(keys, admitted)), hashes[admitted]
        return admitted

    def _hashes(self, keys: Sequence[OffloadKey]) -> Hashes:
        if self._hashed[0] != (asked := tuple(keys)):
            self._hashed = asked, key_hashes(asked)
        return self._hashed[1]

    def refuse(self, keys: Sequence[OffloadKey]) -> None:
        self._leave_out(key_hashes(keys))

    def _leave_out(self, hashes: Hashes) -> None:
        self._ghosts.add(hashes[::-1], self._tick(len(hashes)))

    def _plan(self, num_once: int, num_again: int, need: int) -> Plan:
        rule, again = self._tournament.rule, len(self._again)
        if rule.share is None:
            return Plan()
        return plan(rule, self.capacity, len(self._once), again, num_once, num_again, need, again)

    def evict(self, n: int, busy: npt.NDArray[np.bool_], key_of: npt.NDArray[np.object_]) -> Slots:
        rule = self._tournament.rule
        if rule.share is None:
            victims, positions = self._evict_oldest(n, busy)
        else:
            excess = len(self._once) + self._entering - rule.quota(self.capacity)
            victims, positions = _none()
            for blocks, most in ((self._once, max(0, excess)), (self._again, n), (self._once, n)):
                more, at = blocks.pop_with_positions(min(most, n - len(victims)), busy)
                victims, positions = np.concatenate((victims, more)), np.concatenate((positions, at))
        self._ghosts.add(self._hash_of[victims], positions)
        return victims

    def _evict_oldest(self, n: int, busy: npt.NDArray[np.bool_]) -> tuple[Slots, Positions]:
        parts = [_none()]
        while n > 0:
            (once, end), (again, other_end) = self._once.peek(busy), self._again.peek(busy)
            end = min(end, other_end)
            known = np.sort(np.concatenate((once, again)))
            known = known[known < end]
            if len(known) > n:
                end = int(known[n])
            popped = [blocks.pop_with_positions(n, busy, end) for blocks in (self._once, self._again)]
            victims, positions = (np.concatenate(column) for column in zip(*popped, strict=True))
            order = np.argsort(positions)
            parts.append((victims[order], positions[order]))
            n -= len(victims)
            if end == NO_END:
                break
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    def insert(self, slots: Slots, keys: Sequence[OffloadKey]) -> None:
        hashes = self._hashes(keys)
        self._entering = 0
        # Not as ``admit`` found them: what was evicted since may have taken their entries.
        entries = self._ghosts.find(hashes)
        positions = self._tick(len(slots))
        returning = self._ghosts.is_marked(entries)
        self._ghosts.take_out(hashes, entries)
        self._hash_of[slots] = hashes
        self._again.append(slots[returning], positions[returning])
        self._once.append(slots[~returning], positions[~returning])

    def _tick(self, n: int) -> Positions:
        self._clock += n
        return np.arange(self._clock - n, self._clock)

    def settle(self, slots: Slots) -> None:
        in_once = self._once.holds(slots)
        self._once.settle(slots[in_once])
        self._again.settle(slots[~in_once])

    def pin(self, slots: Slots) -> None:
        in_once = self._once.holds(slots)
        self._once.park(slots[in_once])
        self._again.park(slots[~in_once])

    def unpin(self, slots: Slots) -> None:
        self.refresh(slots, *np.zeros((2, len(slots)), dtype=np.bool_))

    def remove(self, slots: Slots) -> None:
        in_once = self._once.holds(slots)
        self._once.discard(slots[in_once])
        self._again.discard(slots[~in_once])

    def clear(self) -> None:
        self._once.clear()
        self._again.clear()
        self._ghosts.clear()
        self._tournament.clear()
        self._clock = self._entering = 0

    def check_integrity(self, slots: Slots) -> None:
        in_once = self._once.holds(slots)
        self._once.check_integrity(slots[in_once].tolist())
        self._again.check_integrity(slots[~in_once].tolist())
        if min(self._tournament.scores) < 0:
            raise IntegrityError("a rule's score is negative")


def _none() -> tuple[Slots, Positions]:
    return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)

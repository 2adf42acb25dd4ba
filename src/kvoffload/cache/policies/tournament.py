"""Which of several rules would have found most: small shadow caches, fed a sample of the blocks, keep score."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvoffload.cache.policies.ghosts import Hashes

GHOSTS = 5
"""How many keys that entered last, as their blocks left or were not let in, are remembered, in capacities."""
SHADOW_GHOSTS = 4
"""The same of a shadow, where those that have returned are not counted."""
SHADOW_BLOCKS = 2048
"""Capacity of a shadow: what is sampled are so many of as many blocks as the cache has."""
HALF_LIFE = 10
"""Of a score, in capacities of accesses."""
MARGIN = 1.003
"""How many times the current rule's score another must have to take its place."""
FIRST = 1
"""The rule to begin with."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How two lists, blocks used once and blocks used again, share a cache.

    ``share``: of the capacity, which blocks used once may hold; None: the oldest block leaves, of whichever list.
    ``tests_distance``: a block that returns counts as used again only if it was last used after the oldest of those
    was. ``holds``: while blocks used once have their share, new ones are not stored.
    """

    name: str
    share: float | None = None
    tests_distance: bool = False
    holds: bool = False

    def quota(self, capacity: int) -> int:
        assert self.share is not None
        return max(1, int(self.share * capacity))

    def is_tested(self, capacity: int, num_again: int) -> bool:
        """Whether the distance is tested: blocks used again have all that they may."""
        if self.share is None or not self.tests_distance:
            return False
        return num_again >= capacity - max(1.0, min(self.share, 0.5) * capacity)


RULES = (Rule("lru"), Rule("slru", 0.5, True), Rule("lirs", 0.01, True, True), Rule("2q", 0.01))
"""After what each behaves like: LRU; SLRU, and S3-FIFO, with half for newcomers; LIRS; 2Q."""


class Plan(NamedTuple):
    """How room is made: so many of the oldest blocks leave each list, so many of the deepest new ones stay out."""

    evict_once: int = 0
    evict_again: int = 0
    drop_once: int = 0
    drop_again: int = 0


def plan(
    rule: Rule, capacity: int, once: int, again: int, new_once: int, new_again: int, need: int, idle_again: int
) -> Plan:
    """How a rule with a share makes ``need`` places, where the lists hold ``once`` and ``again`` blocks.

    Of those in ``again``, ``idle_again`` may be evicted. ``new_once`` and ``new_again`` are to enter.
    """
    quota, drop, evict = rule.quota(capacity), 0, 0
    if rule.holds and once > quota:
        drop = min(need, new_once)
    evict = min(need - drop, once, max(0, once + new_once - drop - quota))
    drop += min(need - drop - evict, new_once - drop, max(0, once - evict + new_once - drop - quota))
    left = need - drop - evict
    evict_again = min(left, idle_again)
    left -= evict_again
    more = min(left, new_once - drop)
    drop += more
    left -= more
    more = min(left, once - evict)
    return Plan(evict + more, evict_again, drop, min(left - more, new_again))


class Shadow:
    """A cache of ``capacity`` names without blocks that goes by one rule.

    ``once`` and ``again``: stamp by name, oldest first. ``ghosts``: the same of what is gone or was not let in.
    """

    def __init__(self, capacity: int, rule: Rule) -> None:
        self.capacity = capacity
        self.rule = rule
        self.once: OrderedDict[int, int] = OrderedDict()
        self.again: OrderedDict[int, int] = OrderedDict()
        self.ghosts: OrderedDict[int, int] = OrderedDict()
        self._clock = 0

    def access(self, names: Sequence[int]) -> int:
        """A request uses a chain of distinct names, head first. Returns how many leading ones were there."""
        once, again = self.once, self.again
        found = 0
        for name in names:
            if name not in again and name not in once:
                break
            found += 1
        self._clock += len(names)
        tested = again and self.rule.is_tested(self.capacity, len(again))
        floor = next(iter(again.values())) if tested else -1
        new_once: list[int] = []
        new_again: list[int] = []
        num_here = 0
        for i in range(len(names) - 1, -1, -1):
            name = names[i]
            if name in again or once.pop(name, None) is not None:
                again[name] = self._clock - i
                again.move_to_end(name)
                num_here += 1
            elif self.ghosts.get(name, -1) > floor:
                new_again.append(i)
            else:
                new_once.append(i)
        self._make_room(names, new_once, new_again, num_here)
        for i in new_once:
            self.ghosts.pop(names[i], None)
            once[names[i]] = self._clock - i
        if new_again:
            for i in new_again:
                self.ghosts.pop(names[i], None)
                again[names[i]] = self._clock - i
            for name in reversed(names):
                if name in again:
                    again.move_to_end(name)
        return found

    def _make_room(self, names: Sequence[int], new_once: list[int], new_again: list[int], num_here: int) -> None:
        """Evicts, and takes the deepest out of ``new_once`` and ``new_again``: indexes into ``names``, deepest first.
        ``num_here`` of the names are at the recent end of ``again``, and stay."""
        once, again = self.once, self.again
        need = len(once) + len(again) + len(new_once) + len(new_again) - self.capacity
        if need <= 0:
            return
        idle = len(again) - num_here
        made = plan(self.rule, self.capacity, len(once), len(again), len(new_once), len(new_again), need, idle)
        dropped = sorted(new_once[: made.drop_once] + new_again[: made.drop_again], reverse=True)
        del new_once[: made.drop_once], new_again[: made.drop_again]
        for i in dropped:
            self._remember(names[i], self._clock - i)
        gone = [once.popitem(last=False) for _ in range(made.evict_once)]
        gone += [again.popitem(last=False) for _ in range(made.evict_again)]
        for name, stamp in gone:
            self._remember(name, stamp)
        while len(self.ghosts) > SHADOW_GHOSTS * self.capacity:
            self.ghosts.popitem(last=False)

    def _remember(self, name: int, stamp: int) -> None:
        self.ghosts[name] = stamp
        self.ghosts.move_to_end(name)


class LRUShadow(Shadow):
    """By the rule without a share, in which lists and ghosts make no difference: ``again`` holds all, and no stamps."""

    def access(self, names: Sequence[int]) -> int:
        blocks = self.again
        found = next((n for n, name in enumerate(names) if name not in blocks), len(names))
        for name in reversed(names):
            blocks[name] = 0
            blocks.move_to_end(name)
        while len(blocks) > self.capacity:
            blocks.popitem(last=False)
        return found


class Tournament:
    """``rule`` is the one whose shadow has found most of late.

    Which blocks are sampled is told by the key's own bytes; sampling works because what is cached of a chain
    is nearly always its head.
    """

    def __init__(self, capacity: int) -> None:
        self._rate = min(1.0, SHADOW_BLOCKS / capacity)
        self._limit = np.uint64(min(2**64 - 1, int(self._rate * 2**64)))
        self._capacity = min(capacity, SHADOW_BLOCKS)
        self.clear()

    def clear(self) -> None:
        self.scores = [0.0] * len(RULES)
        self._current = FIRST
        self._shadows = [(LRUShadow if rule.share is None else Shadow)(self._capacity, rule) for rule in RULES]

    @property
    def rule(self) -> Rule:
        return RULES[self._current]

    def observe(self, hashes: Hashes) -> None:
        """A request uses a chain: the ``key_hashes`` of its keys, head first."""
        if self._rate < 1:
            hashes = hashes[hashes < self._limit]
        names = list(dict.fromkeys(hashes.tolist()))
        if not names:
            return
        decay = 0.5 ** (len(names) / (HALF_LIFE * self._capacity))
        self.scores = [
            score * decay + shadow.access(names) for score, shadow in zip(self.scores, self._shadows, strict=True)
        ]
        best = max(range(len(RULES)), key=self.scores.__getitem__)
        if self.scores[best] > MARGIN * self.scores[self._current]:
            self._current = best

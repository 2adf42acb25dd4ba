"""Chooses the rule that would have found most. Small shadow caches, which see a sample of the blocks, keep score."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from kvoffload.cache.keys import Hashes
from kvoffload.native import load
from kvoffload.native.reference import GAP_CLASSES, RATES_HALF_LIFE, ReturnRates, gap_class, next_update

GHOSTS = 5
"""How many ghosts are remembered, as a multiple of the capacity. A ghost counts even after its block has returned."""
SHADOW_GHOSTS = 4
"""How many ghosts a shadow remembers, as a multiple of its capacity. Ghosts of blocks that have returned do not
count."""
SHADOW_BLOCKS = 2048
"""The capacity of a shadow. If the cache is larger, a sample of the blocks is taken: this many of its capacity."""
HALF_LIFE = 10
"""Half-life of a score, in accesses, as a multiple of the capacity."""
HALF_LIFE_REQUESTS = 30
"""The same in requests, at least."""
MARGIN = 1.003
"""Another rule takes over when its score is this many times the score of the current rule."""
FIRST = 1
"""Index of the rule to begin with."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How two lists, of blocks used once and of blocks used again, share a cache."""

    name: str
    share: float | None = None
    """The share of the capacity that blocks used once may hold. None: the oldest block leaves, whichever list it is
    in."""
    tests_distance: bool = False
    """Whether a block that returns counts as used again only if it was last used after the oldest block used again."""
    holds: bool = False
    """Whether new blocks are refused while blocks used once hold more than their share."""
    by_gap: bool = False
    """Whether blocks leave, or are refused, by what it is worth to keep them, see ``ReturnRates``."""

    def quota(self, capacity: int) -> int:
        """Returns how many blocks used once may hold their places."""
        assert self.share is not None
        return max(1, int(self.share * capacity))

    def is_tested(self, capacity: int, num_again: int) -> bool:
        """Returns whether the distance is tested now: only if blocks used again hold all that they may."""
        return num_again >= self.tested_from(capacity)

    def tested_from(self, capacity: int) -> float:
        """Returns how many blocks used again make the rule test the distance."""
        if self.share is None or not self.tests_distance:
            return inf
        return capacity - max(1.0, min(self.share, 0.5) * capacity)


RULES = (
    Rule("lru"),
    Rule("slru", 0.5, True),
    Rule("lirs", 0.01, True, True),
    Rule("2q", 0.01),
    Rule("gap", by_gap=True),
)
"""Named after the policies that they resemble: LRU; SLRU and S3-FIFO, with half for new blocks; LIRS; 2Q. ``gap`` goes
by the time between the last two uses of a block."""


class EvictionCounts(NamedTuple):
    """How room is made: how many of the oldest blocks of each list leave, and how many of the deepest new blocks are
    refused."""

    evict_once: int = 0
    evict_again: int = 0
    drop_once: int = 0
    drop_again: int = 0


def plan(
    rule: Rule, capacity: int, once: int, again: int, new_once: int, new_again: int, need: int, idle_again: int
) -> EvictionCounts:
    """Returns how a rule with a share makes ``need`` places.

    The lists hold ``once`` and ``again`` blocks; ``idle_again`` of the latter may be evicted. ``new_once`` and
    ``new_again`` blocks are to enter.
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
    return EvictionCounts(evict + more, evict_again, drop, min(left - more, new_again))


class Shadow:
    """A cache of ``capacity`` names without blocks that follows one rule.

    ``once`` and ``again``: the stamp of each name, oldest first. ``ghosts``: the same, of names that left or were
    refused. Where the oldest leaves whatever list it is in, one list is enough, and ghosts make no difference.
    """

    def __init__(self, capacity: int, rule: Rule, max_ghosts: int) -> None:
        self.capacity, self.rule, self.max_ghosts = capacity, rule, max_ghosts
        self.once: OrderedDict[int, int] = OrderedDict()
        self.again: OrderedDict[int, int] = OrderedDict()
        self.ghosts: OrderedDict[int, int] = OrderedDict()
        self.gone: list[int] = []
        """Names that were forgotten."""

    def holds(self, name: int) -> bool:
        return name in self.once or name in self.again or name in self.ghosts

    def lists(self) -> list[list[int]]:
        return [list(self.once), list(self.again), *([] for _ in range(GAP_CLASSES - 2)), list(self.ghosts)]

    def access(self, names: Sequence[int], clock: int, gaps: Mapping[int, int]) -> int:
        """Serves a request for a chain of distinct names, head first. Returns how many leading names were present.
        ``gaps``: the class of the gap between the last two uses of each known name."""
        present = [name in self.again or name in self.once for name in names]
        found = present.index(False) if False in present else len(names)
        stamped = list(zip(reversed(names), range(clock + 1, clock + 1 + len(names)), strict=True))
        if self.rule.share is None:
            append(self.again, stamped)
            self.gone += cut(self.again, self.capacity)
        else:
            self._serve(stamped)
        return found

    def _serve(self, stamped: list[tuple[int, int]]) -> None:
        once, again, ghosts = self.once, self.again, self.ghosts
        floor = next(iter(again.values()), -1) if self.rule.is_tested(self.capacity, len(again)) else -1
        new_once = [(name, stamp) for name, stamp in stamped if name not in once and name not in again]
        new_again = [(name, stamp) for name, stamp in new_once if ghosts.get(name, -1) > floor]
        new_once = [(name, stamp) for name, stamp in new_once if ghosts.get(name, -1) <= floor]
        used = [(name, stamp) for name, stamp in stamped if name in once or name in again]
        for name, _ in used:
            once.pop(name, None)
        append(again, used)
        self._make_room(new_once, new_again, len(again) - len(used))
        for name, _ in (*new_once, *new_again):
            ghosts.pop(name, None)
        append(once, new_once)
        append(again, sorted(used + new_again, key=lambda each: each[1]))

    def _make_room(self, new_once: list[tuple[int, int]], new_again: list[tuple[int, int]], idle_again: int) -> None:
        """Evicts names, and removes from the new ones, given tail first, the names that the rule refuses."""
        once, again = self.once, self.again
        need = len(once) + len(again) + len(new_once) + len(new_again) - self.capacity
        if need <= 0:
            return
        made = plan(self.rule, self.capacity, len(once), len(again), len(new_once), len(new_again), need, idle_again)
        refused = new_once[: made.drop_once] + new_again[: made.drop_again]
        del new_once[: made.drop_once], new_again[: made.drop_again]
        append(self.ghosts, sorted(refused, key=lambda each: each[1]))
        append(self.ghosts, [once.popitem(last=False) for _ in range(made.evict_once)])
        append(self.ghosts, [again.popitem(last=False) for _ in range(made.evict_again)])
        self.gone += cut(self.ghosts, self.max_ghosts)


def append(names: OrderedDict[int, int], stamped: Sequence[tuple[int, int]]) -> None:
    for name, stamp in stamped:
        names[name] = stamp
        names.move_to_end(name)


def cut(names: OrderedDict[int, int], limit: int) -> list[int]:
    """Forgets the oldest names until ``limit`` are left, and returns them."""
    return [names.popitem(last=False)[0] for _ in range(len(names) - limit)]


class GapShadow:
    """The same for the rule that goes by gaps. ``_members[c]``: the stamps of names of class c, oldest first."""

    def __init__(self, capacity: int, rates: ReturnRates) -> None:
        self.capacity, self._rates = capacity, rates
        self._members: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(GAP_CLASSES)]
        self.gone: list[int] = []

    def holds(self, name: int) -> bool:
        return any(name in members for members in self._members)

    def lists(self) -> list[list[int]]:
        return [*map(list, self._members), []]

    def access(self, names: Sequence[int], clock: int, gaps: Mapping[int, int]) -> int:
        present = [self.holds(name) for name in names]
        found = present.index(False) if False in present else len(names)
        for name in names:
            for members in self._members:
                members.pop(name, None)
        new = [name for name, is_present in zip(reversed(names), reversed(present), strict=True) if not is_present]
        refused = self._make_room(len(names), new, clock, gaps)
        for i, name in reversed(list(enumerate(names))):
            if name not in refused:
                self._members[gaps[name]][name] = clock + len(names) - i
        return found

    def _make_room(self, num: int, new: list[int], clock: int, gaps: Mapping[int, int]) -> set[int]:
        """Makes room for the ``num`` names of a request, and returns those of the new ones, given tail first, that are
        worth less than what would leave for them."""

        def worth(gap: int) -> tuple[float, int]:
            oldest = next(iter(self._members[gap].values()), None)
            return (inf, 0) if oldest is None else (self._rates.value(gap, clock - oldest), oldest)

        num_refused = 0
        for _ in range(sum(map(len, self._members)) + num - self.capacity):
            least = min(range(GAP_CLASSES), key=worth)
            if num_refused < len(new) and self._rates.value(gaps[new[num_refused]], 0) < worth(least)[0]:
                num_refused += 1
            elif self._members[least]:
                self.gone.append(self._members[least].popitem(last=False)[0])
        return set(new[:num_refused])


class PlainShadows:
    """One shadow per rule, all of one capacity, each with at most ``max_ghosts`` ghosts; and the ``rates`` of return of
    all names that a shadow knows."""

    def __init__(self, capacity: int, rules: Sequence[Rule], max_ghosts: int) -> None:
        self.capacity = capacity
        self.rates = ReturnRates()
        self._shadows = [
            GapShadow(capacity, self.rates) if rule.by_gap else Shadow(capacity, rule, max_ghosts) for rule in rules
        ]
        self._clock = 0
        self._num_accesses = 0
        self._next_update = next_update(0, capacity)
        self._stamps: dict[int, int] = {}
        self._gaps: dict[int, int] = {}

    def access(self, hashes: Hashes, limit: int, now: int) -> tuple[int, Sequence[int]]:
        """Serves a request for a chain at time ``now``, in ticks: those of ``hashes`` that are at most ``limit``, head
        first. Returns how many distinct ones these are and, unless there are none, how many leading ones each shadow
        had."""
        names = list(dict.fromkeys(hashes[hashes <= limit].tolist()))
        if not names:
            return 0, ()
        self._clock = max(self._clock, now)
        for name in names:
            self._learn(name)
        found = tuple(shadow.access(names, self._clock, self._gaps) for shadow in self._shadows)
        for i, name in enumerate(names):
            self._stamps[name] = self._clock + len(names) - i
        self._forget(set(names))
        self._clock += len(names)
        self._num_accesses += len(names)
        if self._num_accesses >= self._next_update:
            self._update()
        return len(names), found

    def _update(self) -> None:
        for name, stamp in self._stamps.items():
            self.rates.wait(self._gaps[name], self._clock - stamp)
        before, self._next_update = self._next_update, next_update(self._num_accesses, self.capacity)
        self.rates.update(0.5 ** ((self._next_update - before) / (RATES_HALF_LIFE * self.capacity)))

    def _learn(self, name: int) -> None:
        """Counts that a name returns, if it is known, and takes note of the gap."""
        gap = self._clock - self._stamps.get(name, self._clock)
        if name in self._stamps:
            self.rates.add(self._gaps[name], gap, True)
        self._gaps[name] = gap_class(gap) if name in self._stamps else 0

    def _forget(self, names: set[int]) -> None:
        """Forgets what no shadow knows any more. ``names`` are those of the present request."""
        gone = {name for shadow in self._shadows for name in shadow.gone} | names
        for name in gone:
            if not any(shadow.holds(name) for shadow in self._shadows):
                if name not in names:
                    self.rates.add(self._gaps[name], self._clock - self._stamps[name], False)
                del self._gaps[name], self._stamps[name]
        for shadow in self._shadows:
            shadow.gone.clear()

    def lists(self, rule: int) -> list[list[int]]:
        """Returns the names that a shadow holds, by the class of their last gap, and its ghosts, each oldest first.
        Most rules know two classes: used once, and used again."""
        return self._shadows[rule].lists()


if TYPE_CHECKING or (native := load("_ghosts")) is None:  # noqa: SIM108  (mypy does not know ``native``)
    Shadows = PlainShadows
else:
    Shadows = native.Shadows


class Tournament:
    """Keeps the scores of the rules for a cache of ``num_blocks``. ``rule`` has the shadow that found most recently.

    The bytes of a key decide whether it is in the sample. A sample is enough because the cached part of a chain is
    nearly always its head.
    """

    rules: ClassVar[Sequence[Rule]] = RULES
    first: ClassVar[int] = FIRST

    def __init__(self, num_blocks: int) -> None:
        self._begin(num_blocks)

    def _begin(self, num_blocks: int) -> None:
        self._num_blocks = max(1, num_blocks)
        self._limit = int(min(1.0, SHADOW_BLOCKS / self._num_blocks) * 2**64) - 1
        """The greatest hash in the sample."""
        self._capacity = min(self._num_blocks, SHADOW_BLOCKS)
        self.clear()

    def clear(self) -> None:
        self.scores = [0.0] * len(self.rules)
        self._current = self.first
        self.shadows = Shadows(self._capacity, self.rules, SHADOW_GHOSTS * self._capacity)

    @property
    def rule(self) -> Rule:
        return self.rules[self._current]

    def observe(self, hashes: Hashes, num_blocks: int, now: int, must_store: bool = False) -> None:
        """Records a request for a chain, given as the ``key_hashes`` of its keys, head first, at time ``now``, in
        ticks. The scores begin again if the cache's number of blocks has halved or doubled. The rule that goes by gaps
        is not chosen if the cache ``must_store`` every block: without refusals it brings nothing, and may drop the head
        of a chain whose tail is on its way from a lower tier."""
        if not self._num_blocks / 2 <= max(1, num_blocks) < 2 * self._num_blocks:
            self._begin(num_blocks)
        num_names, found = self.shadows.access(hashes, self._limit, now)
        if not num_names:
            return
        decay = 0.5 ** min(num_names / (HALF_LIFE * self._capacity), 1 / HALF_LIFE_REQUESTS)
        self.scores = [score * decay + leading for score, leading in zip(self.scores, found, strict=True)]
        best = max(
            (i for i, rule in enumerate(self.rules) if not (must_store and rule.by_gap)), key=self.scores.__getitem__
        )
        if self.scores[best] > MARGIN * self.scores[self._current]:
            self._current = best

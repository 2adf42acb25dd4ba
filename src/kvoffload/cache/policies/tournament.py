"""Chooses the rule that would have found most beyond the device. Small shadow caches, which see a sample of the blocks,
keep score."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, ClassVar

from kvoffload.cache.keys import Hashes
from kvoffload.native import load
from kvoffload.native.reference import GAP_CLASSES, RATES_HALF_LIFE, ReturnRates, gap_class, next_update

GHOSTS = 5
"""How many ghosts are remembered, as a multiple of the capacity of host memory and device."""
SHADOW_NAMES = 5
"""How many names the shadows know, as a multiple of the capacity of host memory and device; more only while a shadow
holds them."""
SHADOW_BLOCKS = 2048
"""The capacity of a shadow and the device in front of it. If cache and device are larger, a sample of the blocks is
taken: this many of their capacity."""
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
    """How blocks used once and blocks used again share a cache."""

    name: str
    share: float | None = None
    """The share of the capacity that blocks used once may hold. None: the oldest block leaves, however it was used."""
    by_gap: bool = False
    """Whether blocks leave, or are refused, by what it is worth to keep them, see ``ReturnRates``."""

    def quota(self, capacity: int) -> int:
        """Returns how many blocks used once may hold their places."""
        assert self.share is not None
        return max(1, int(self.share * capacity))


RULES = (Rule("lru"), Rule("2q", 0.01), Rule("gap", by_gap=True))
"""Named after the policies that they resemble: LRU and 2Q. ``gap`` goes by the time between the last two uses of a
block."""


def refusals(quota: int, once: int, again: int, new_once: int, new_again: int, need: int) -> tuple[int, int]:
    """Returns how many of ``new_once`` and ``new_again`` blocks a rule with a share refuses if there are ``need``
    places too few. ``once`` blocks are held, of which ``quota`` keep their places, and ``again`` others."""
    above = max(0, once + new_once - quota)
    if need <= once and need <= above:
        return 0, 0
    evicted = min(need, once, above)
    refused = min(need - evicted, new_once, above - evicted)
    need -= evicted + refused
    need -= min(need, again)
    more = min(need, new_once - refused)
    need -= more
    need -= min(need, once - evicted)
    return refused + more, min(need, new_again)


class PlainShadows:
    """One shadow per rule: a cache of ``host`` names without blocks, behind a device of ``device`` names that all
    shadows share.

    The device holds the names used last. A name that leaves it enters each shadow, which then lets names leave by its
    rule. A known name has the class of its last gap, and the time of its last use; the ``rates`` of return are learned
    from all of them.
    """

    def __init__(self, host: int, device: int, rules: Sequence[Rule]) -> None:
        self.host, self.device = host, device
        self.rates = ReturnRates()
        self._rules = tuple(rules)
        self._on_device: OrderedDict[int, None] = OrderedDict()
        """The least recently used name first."""
        self._off_device: OrderedDict[int, None] = OrderedDict()
        """The other known names, in the order in which they left the device."""
        self._held: list[list[OrderedDict[int, None]]] = [[OrderedDict() for _ in range(GAP_CLASSES)] for _ in rules]
        """What each shadow holds, by class of the gap, the least recently used name first."""
        self._clock = 0
        self._num_accesses = 0
        self._next_update = next_update(0, host + device)
        self._stamps: dict[int, int] = {}
        self._gaps: dict[int, int] = {}

    def access(self, hashes: Hashes, limit: int, now: int) -> tuple[int, Sequence[int]]:
        """Serves a request for a chain at time ``now``, in ticks: those of ``hashes`` that are at most ``limit``, head
        first. Returns how many distinct ones these are and, unless there are none, how many leading ones each shadow
        had beyond those on the device."""
        names = list(dict.fromkeys(hashes[hashes <= limit].tolist()))
        if not names:
            return 0, ()
        self._clock = max(self._clock, now)
        on_device = _leading([name in self._on_device for name in names])
        found = [
            _leading([name in self._on_device or any(name in members for members in held) for name in names])
            - on_device
            for held in self._held
        ]
        for name in names:
            self._learn(name)
        for i, name in reversed(list(enumerate(names))):
            self._stamps[name] = self._clock + len(names) - i
            self._off_device.pop(name, None)
            self._on_device[name] = None
            self._on_device.move_to_end(name)
        self._clock += len(names)
        while len(self._on_device) > self.device:
            name, _ = self._on_device.popitem(last=False)
            self._off_device[name] = None
            for held in self._held:
                held[self._gaps[name]][name] = None
        for rule, held in zip(self._rules, self._held, strict=True):
            self._make_room(rule, held)
        self._forget()
        self._num_accesses += len(names)
        if self._num_accesses >= self._next_update:
            self._update()
        return len(names), found

    def _learn(self, name: int) -> None:
        """Counts the return of a known name, and sets the class of the name's gap. No shadow holds the name then."""
        if name in self._stamps:
            for held in self._held:
                held[self._gaps[name]].pop(name, None)
            gap = self._clock - self._stamps[name]
            self.rates.add(self._gaps[name], gap, True)
            self._gaps[name] = gap_class(gap)
        else:
            self._gaps[name] = 0

    def _make_room(self, rule: Rule, held: list[OrderedDict[int, None]]) -> None:
        def oldest(gap: int) -> float:
            return self._stamps[next(iter(held[gap]))] if held[gap] else inf

        def worth(gap: int) -> tuple[float, float]:
            value = self.rates.value(gap, self._clock - int(oldest(gap))) if held[gap] else inf
            return value, oldest(gap)

        for _ in range(sum(map(len, held)) - self.host):
            if rule.by_gap:
                least = min(range(GAP_CLASSES), key=worth)
            elif rule.share is not None and len(held[0]) > rule.quota(self.host):
                least = 0
            else:
                first = 0 if rule.share is None or not any(held[1:]) else 1
                least = min(range(first, GAP_CLASSES), key=oldest)
            held[least].popitem(last=False)

    def _forget(self) -> None:
        """Forgets the names that left the device first, unless a shadow holds them."""
        limit = max(0, SHADOW_NAMES * (self.host + self.device) - len(self._on_device))
        for _ in range(len(self._off_device) - limit):
            name, _ = self._off_device.popitem(last=False)
            gap = self._gaps[name]
            if any(name in held[gap] for held in self._held):
                self._off_device[name] = None
                continue
            self.rates.add(gap, self._clock - self._stamps[name], False)
            del self._gaps[name], self._stamps[name]

    def _update(self) -> None:
        for name, stamp in self._stamps.items():
            self.rates.wait(self._gaps[name], self._clock - stamp)
        capacity = self.host + self.device
        before, self._next_update = self._next_update, next_update(self._num_accesses, capacity)
        self.rates.update(0.5 ** ((self._next_update - before) / (RATES_HALF_LIFE * capacity)))

    def held(self, rule: int) -> list[int]:
        """Returns the names that a shadow holds, the least recently used first."""
        return sorted((name for members in self._held[rule] for name in members), key=self._stamps.__getitem__)

    def known(self) -> list[int]:
        """Returns all known names: those off the device, then those on it, each in the order in which they came."""
        return [*self._off_device, *self._on_device]


def _leading(present: Sequence[bool]) -> int:
    return present.index(False) if False in present else len(present)


if TYPE_CHECKING or (native := load("_ghosts")) is None:  # noqa: SIM108  (mypy does not know ``native``)
    Shadows = PlainShadows
else:
    Shadows = native.Shadows


class Tournament:
    """Keeps the scores of the rules for a cache of ``num_blocks`` behind a device of ``device_blocks``. ``rule`` has
    the shadow that found most beyond the device recently.

    The bytes of a key decide whether it is in the sample. A sample is enough because the cached part of a chain is
    nearly always its head.
    """

    rules: ClassVar[Sequence[Rule]] = RULES
    first: ClassVar[int] = FIRST

    def __init__(self, num_blocks: int, device_blocks: int = 0) -> None:
        self.begin(num_blocks, device_blocks)

    def begin(self, num_blocks: int, device_blocks: int) -> None:
        """Begins again with these capacities."""
        self._num_blocks, self._device_blocks = max(1, num_blocks), device_blocks
        share = min(1.0, SHADOW_BLOCKS / (self._num_blocks + device_blocks))
        self._limit = int(share * 2**64) - 1
        """The greatest hash in the sample."""
        self._capacities = max(1, round(share * self._num_blocks)), round(share * device_blocks)
        self.clear()

    def clear(self) -> None:
        self.scores = [0.0] * len(self.rules)
        self._current = self.first
        self.shadows = Shadows(*self._capacities, self.rules)

    @property
    def rule(self) -> Rule:
        return self.rules[self._current]

    def observe(self, hashes: Hashes, num_blocks: int, now: int, must_store: bool = False) -> None:
        """Records a request for a chain, given as the ``key_hashes`` of its keys, head first, at time ``now``, in
        ticks. The scores begin again if the cache's number of blocks has halved or doubled. The rule that goes by gaps
        is not chosen if the cache ``must_store`` every block: without refusals it brings nothing, and may drop the head
        of a chain whose tail is on its way from a lower tier."""
        if not self._num_blocks / 2 <= max(1, num_blocks) < 2 * self._num_blocks:
            self.begin(num_blocks, self._device_blocks)
        num_names, found = self.shadows.access(hashes, self._limit, now)
        if not num_names:
            return
        decay = 0.5 ** min(num_names / (HALF_LIFE * sum(self._capacities)), 1 / HALF_LIFE_REQUESTS)
        self.scores = [score * decay + leading for score, leading in zip(self.scores, found, strict=True)]
        best = max(
            (i for i, rule in enumerate(self.rules) if not (must_store and rule.by_gap)), key=self.scores.__getitem__
        )
        if self.scores[best] > MARGIN * self.scores[self._current]:
            self._current = best

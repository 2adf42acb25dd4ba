"""The self-tuning policy: lists, and the one of three rules that would have found most blocks recently."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.abc import Access, CachePolicy, Eviction, IntegrityError, Keys, Slots
from kvoffload.cache.keys import Hashes, key_hashes, seem_of_several_groups
from kvoffload.cache.policies.tournament import GHOSTS, Tournament, refusals
from kvoffload.native.structures import GapLists, GhostTable

_NO_HASHES = np.zeros(0, dtype=np.uint64)


class AutoPolicy(CachePolicy):
    """Blocks used by one request (``once``), and those used by several (``again``) by the gap between their last two
    uses, each list oldest first, on one clock; and ghosts: blocks that left, were refused, or are on the device only,
    with the time of their last use and the class of its gap.

    A rule (see ``tournament.RULES``) says from which list a block leaves, and whether new blocks enter at all. A
    ``Tournament`` chooses the rule. The lists are the same for all rules, so that a change of rule costs nothing.

    Behind a device the lists order what the device does not hold. A block enters when it leaves the device, as what it
    has become there: a use that the device has served counts as any other.

    Blocks of several KV cache groups that end at one token share a ghost and a place in the sample of the shadows: a
    state and the attention block that ends there are of no use without each other.
    """

    def __init__(self, capacity: int, tournament: Tournament | None = None) -> None:
        super().__init__(capacity)
        self._lists = GapLists(capacity)
        self._ghosts = GhostTable(GHOSTS * capacity)
        self._tournament = tournament or Tournament(capacity)
        self._hash_of = np.zeros(capacity, dtype=np.uint64)
        """The hash of the key in each slot."""
        self._has_shared_names = False
        """Whether a key of another group than the first was seen. Then a ghost stays when a block returns, for the
        other blocks of its name. Blocks that came before have names of their own until they leave."""
        self._last: tuple[Keys, Hashes] = ((), _NO_HASHES)
        """Keys and hashes of the last call, because the next call is often about the same keys."""

    def put_behind(self, device_blocks: int) -> None:
        self._ghosts = GhostTable(GHOSTS * (self.capacity + device_blocks))
        self._tournament.begin(self.capacity, device_blocks)

    def state(self) -> Mapping[str, Any]:
        scores = zip((rule.name for rule in self._tournament.rules), self._tournament.scores, strict=True)
        return {"rule": self._tournament.rule.name, "scores": dict(scores)}

    def access(self, access: Access) -> None:
        now = self._lists.begin(access.time)
        missing = access.found < 0
        num_missing = np.count_nonzero(missing)
        if num_missing == len(missing):
            absent = self._hashes(access.keys[::-1])
            chain = absent[::-1]
        else:
            absent = self._hashes(list(compress(access.keys, missing.tolist()))[::-1]) if num_missing else _NO_HASHES
            chain = self._hash_of[access.found]
            chain[missing] = absent[::-1]
        self._ghosts.use(absent, now)
        self._tournament.observe(chain, self.full, now, self.must_store)
        self._lists.use(access.slots, access.ready)

    def insert(self, slots: Slots, keys: Keys) -> None:
        hashes = self._hashes(keys)
        classes = self._ghosts.classes(hashes) if self._has_shared_names else self._ghosts.take(hashes)
        self._hash_of[slots] = hashes
        self._lists.insert(slots, classes)

    def reorder(self, slots: Slots, new: npt.NDArray[np.bool_]) -> None:
        self._lists.move_to_end(slots)

    def mark_evictable(self, slots: Slots) -> None:
        self._lists.mark_evictable(slots)

    def remove(self, slots: Slots) -> None:
        self._lists.discard(slots)

    def lend(self, slots: Slots) -> None:
        self._remember(self._hash_of[slots], self._lists.tick(len(slots)), self._lists.classes(slots))
        self._lists.discard(slots)

    def admit(self, keys: Keys, shortage: int) -> npt.NDArray[np.bool_] | None:
        rule = self._tournament.rule
        if rule.by_gap:
            hashes, now = self._hashes(keys), self._lists.begin(0.0)
            stamps = self._ghosts.stamps(hashes)
            stamps[stamps < 0] = now
            rates = self._tournament.shadows.rates
            num_refused = self._lists.num_refused(self._classes(keys), stamps, shortage, rates)
            return np.arange(len(keys)) >= num_refused if num_refused else None
        if rule.share is None:
            return None
        classes = self._classes(keys)
        num_returning = int(np.count_nonzero(classes))
        held = rule.quota(self.full), self._lists.num_once, self._lists.num_again
        once, again = refusals(*held, len(keys) - num_returning, num_returning, shortage)
        if not (once or again):
            return None
        admitted = np.ones(len(keys), dtype=np.bool_)
        admitted[np.flatnonzero(classes == 0)[:once]] = False
        admitted[np.flatnonzero(classes)[:again]] = False
        return admitted

    def refuse(self, keys: Keys) -> None:
        self._remember(self._hashes(keys), self._lists.tick(len(keys)))

    def evict(self, eviction: Eviction) -> Slots:
        rule, n, busy = self._tournament.rule, eviction.n, eviction.busy
        if rule.by_gap:
            victims, positions = self._lists.pop_least(n, busy, self._tournament.shadows.rates)
        elif rule.share is None:
            victims, positions = self._lists.pop_oldest(n, busy)
        else:
            num_new = len(eviction.entering) - int(np.count_nonzero(self._classes(eviction.entering)))
            excess = self._lists.num_once + num_new - rule.quota(self.full)
            victims, positions = self._lists.pop_shared(n, max(0, excess), busy)
        self._remember(self._hash_of[victims], positions)
        return victims

    def _remember(self, hashes: Hashes, positions: Slots, classes: Slots | None = None) -> None:
        """Adds ghosts."""
        if self._has_shared_names:
            _, last = np.unique(hashes[::-1], return_index=True)
            chosen = np.sort(len(hashes) - 1 - last)
            hashes, positions = hashes[chosen], positions[chosen]
            classes = None if classes is None else classes[chosen]
        self._ghosts.add(hashes, positions, classes)

    def clear(self) -> None:
        self._lists.clear()
        self._ghosts.clear()
        self._tournament.clear()

    def check_integrity(self, slots: Slots) -> None:
        self._lists.check_integrity(slots)
        if min(self._tournament.scores) < 0:
            raise IntegrityError("the score of a rule is negative")

    def _classes(self, keys: Keys) -> Slots:
        """Returns the class that each absent key will have if it is stored now: 0 if it counts as used once."""
        return self._ghosts.classes(self._hashes(keys))

    def _hashes(self, keys: Keys) -> Hashes:
        if self._last[0] != keys:
            if not self._has_shared_names:
                self._has_shared_names = seem_of_several_groups(keys)
            self._last = keys, key_hashes(keys, self._has_shared_names)
        return self._last[1]

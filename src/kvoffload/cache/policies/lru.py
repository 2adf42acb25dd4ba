"""Least recently used."""

from __future__ import annotations

from kvoffload.abc import Access, Eviction, Keys, Slots
from kvoffload.cache.policies.base import ListPolicy


class LRUPolicy(ListPolicy):
    """Evicts the block whose insertion or last use is longest ago."""

    def insert(self, slots: Slots, keys: Keys) -> None:
        self.lists[0].append(slots)

    def access(self, access: Access) -> None:
        self.lists[0].append(access.slots)

    def evict(self, eviction: Eviction) -> Slots:
        return self.lists[0].pop_oldest(eviction.n, eviction.busy)

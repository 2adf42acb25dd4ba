"""Duplicates: blocks that the engine's device cache holds too, which leave host memory before all others."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvoffload.abc import Keys, Slots
from kvoffload.cache.table import BlockTable

MAX_PASSED = 4096
"""Blocks that one ``take`` passes over, because they are busy, before it leaves the rest to the policy."""


class Duplicates:
    """Blocks of ``table`` that the engine's device cache holds too, by tenant. ``tenant_of``: the tenant of the block
    in each slot.

    The engine finds these blocks without host memory, so they leave first: the most recently used one first, since the
    device keeps that for longest.
    """

    def __init__(self, table: BlockTable, tenant_of: npt.NDArray[np.int8]) -> None:
        self._table = table
        self._tenant_of = tenant_of
        self._slots: dict[int, dict[int, None]] = {}
        """By tenant, the least recently used first."""
        self.holds = np.zeros(table.num_blocks, dtype=np.bool_)
        """Of each slot, whether its block is one of them. Read only."""
        self.num = 0

    def others(self, found: Slots) -> Slots:
        """Returns ``found`` with -1 in place of duplicates."""
        return np.where((found >= 0) & self.holds[found], -1, found) if self.num else found

    def add(self, slots: Slots) -> Slots:
        """Adds the blocks in ``slots``, tail first, each once, which were used just now. Returns those that are new."""
        is_new = ~self.holds[slots]
        new: Slots = slots[is_new]
        for slot in () if len(new) == len(slots) else slots[~is_new].tolist():
            self._slots[int(self._tenant_of[slot])].pop(slot)
        tenants = self._tenant_of[slots].tolist()
        for tenant in set(tenants):
            own = slots[self._tenant_of[slots] == tenant] if tenants.count(tenant) < len(tenants) else slots
            self._slots.setdefault(tenant, {}).update(dict.fromkeys(own.tolist()))
        self.holds[slots] = True
        self.num += len(new)
        return new

    def find(self, keys: Keys) -> Slots:
        """Returns the slots of those of ``keys``, each once, that are duplicates."""
        found = self._table.find(keys) if self.num else np.empty(0, dtype=np.int64)
        found = found[found >= 0]
        return self._table.distinct(found[self.holds[found]])

    def discard(self, slots: Slots) -> None:
        """Removes the blocks that the device does not hold any more, or that leave host memory, each once."""
        if not self.num:
            return
        slots = slots[self.holds[slots]]
        self.holds[slots] = False
        self.num -= len(slots)
        for of_tenant in self._slots.values():
            for slot in slots.tolist():
                of_tenant.pop(slot, None)

    def take(self, n: int, busy: npt.NDArray[np.bool_], tenant: int = 0) -> Slots:
        """Returns up to ``n`` blocks of ``tenant`` that leave now, in the order in which they leave. None of them is
        busy."""
        found: list[int] = []
        num_passed = 0
        for slot in reversed(self._slots.get(tenant, {})):
            if len(found) == n or num_passed == MAX_PASSED:
                break
            if busy[slot]:
                num_passed += 1
            else:
                found.append(slot)
        return np.array(found, dtype=np.int64)

    def clear(self) -> None:
        self._slots.clear()
        self.holds.fill(False)
        self.num = 0

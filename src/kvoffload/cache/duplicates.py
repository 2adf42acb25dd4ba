"""Duplicates: blocks that the engine's device cache holds too, which leave host memory before all others."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvoffload.abc import OffloadKey, Slots
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
        self._keys: dict[int, dict[OffloadKey, None]] = {}
        """By tenant, the least recently used first. Some may have left host memory."""

    def __len__(self) -> int:
        return sum(map(len, self._keys.values()))

    def add(self, slots: Slots) -> None:
        """Adds the blocks in ``slots``, tail first, which were used just now."""
        keys = self._table.key_of[slots].tolist()
        for key, tenant in zip(keys, self._tenant_of[slots].tolist(), strict=True):
            of_tenant = self._keys.setdefault(tenant, {})
            of_tenant.pop(key, None)
            of_tenant[key] = None

    def discard(self, keys: Iterable[OffloadKey]) -> None:
        """Removes the blocks that the device does not hold any more."""
        for key in keys:
            for of_tenant in self._keys.values():
                of_tenant.pop(key, None)

    def take(self, n: int, busy: npt.NDArray[np.bool_], tenant: int = 0) -> Slots:
        """Returns up to ``n`` blocks of ``tenant`` that leave now, in the order in which they leave. None of them is
        busy."""
        keys = self._keys.get(tenant)
        if not keys:
            return np.empty(0, dtype=np.int64)
        found: list[int] = []
        gone: list[OffloadKey] = []
        num_passed = 0
        for key in reversed(keys):
            if len(found) == n or num_passed == MAX_PASSED:
                break
            slot = self._table.get(key)
            if slot >= 0 and busy[slot]:
                num_passed += 1
                continue
            gone.append(key)
            if slot >= 0:
                found.append(slot)
        for key in gone:
            del keys[key]
        return np.array(found, dtype=np.int64)

    def clear(self) -> None:
        self._keys.clear()

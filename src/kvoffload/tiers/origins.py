"""Origins: from which tier blocks in host memory have come, and whether a faster tier is worth filling with them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from kvoffload.abc import OffloadKey
from kvoffload.tiers.plan import Bools
from kvoffload.tiers.rates import ReadEstimator

MAX_ORIGINS = 1 << 16
"""Blocks whose origin is remembered. A block whose origin is forgotten is written like one that was computed here."""


class Origins:
    """Remembers which blocks were promoted, and from where."""

    def __init__(self) -> None:
        self._estimators: list[ReadEstimator] = []
        """The read rate of each tier, the fastest first as configured."""
        self._origin: OrderedDict[OffloadKey, int] = OrderedDict()
        """The index of the tier that each block came from, the block that came first, first."""

    def arrived(self, keys: Iterable[OffloadKey], tier: int) -> None:
        """Notes that blocks came from a tier. For the first tier there is no faster one."""
        if tier == 0:
            return
        for key in keys:
            self._origin[key] = tier
            self._origin.move_to_end(key)
        while len(self._origin) > MAX_ORIGINS:
            self._origin.popitem(last=False)

    def forget(self, keys: Collection[OffloadKey]) -> None:
        """Notes that blocks were computed here."""
        if self._origin and not self._origin.keys().isdisjoint(keys):
            for key in keys:
                self._origin.pop(key, None)

    def add_tier(self, estimator: ReadEstimator) -> Callable[[Sequence[OffloadKey]], Bools]:
        """Adds the next tier. Returns a function that says which blocks are worth writing to it: not those that came
        from a slower tier whose measured read rate is as good or better. While a rate is unknown, the order of the
        tiers counts."""
        tier = len(self._estimators)
        self._estimators.append(estimator)

        def is_worth(keys: Sequence[OffloadKey]) -> Bools:
            if not self._origin:
                return np.ones(len(keys), dtype=np.bool_)
            fills = [self._is_faster(tier, other) for other in range(len(self._estimators))]
            origins = map(self._origin.get, keys)
            return np.fromiter((origin is None or fills[origin] for origin in origins), np.bool_, len(keys))

        return is_worth

    def _is_faster(self, tier: int, other: int) -> bool:
        if other <= tier:
            return True
        mine, its = self._estimators[tier].seconds_to_read(1), self._estimators[other].seconds_to_read(1)
        return mine is None or its is None or mine < its

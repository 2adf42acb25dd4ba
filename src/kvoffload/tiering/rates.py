"""How fast tiers read and the engine computes, which of the two is faster, and which tier is worth filling."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.abc import OffloadKey, TierError, TierResult
from kvoffload.tiering.plan import Bools

RATE_TTL_S = 30.0
"""A measured read rate is trusted for this long. After that, one run of blocks is loaded to measure it again."""
MAX_ORIGINS = 1 << 16
"""Blocks whose origin is remembered. A block whose origin is forgotten is written like one that was computed here."""


class Ended:
    """Results of transfers in one direction, in order. If none has an error (``all_ok``), callers need no loop over
    them."""

    def __init__(self, results: Sequence[TierResult]) -> None:
        self.results = results
        self.keys: tuple[OffloadKey, ...] = ()
        self.errors: tuple[TierError | None, ...] = ()
        self.nbytes: tuple[int, ...] = ()
        self.seconds: tuple[float, ...] = ()
        self.begun: tuple[float, ...] = ()
        self.ended: tuple[float, ...] = ()
        if results:
            self.keys, _, self.errors, self.nbytes, self.seconds, self.begun, self.ended = zip(*results, strict=True)
        self.all_ok = self.errors.count(None) == len(results)

    def __len__(self) -> int:
        return len(self.results)

    @property
    def good(self) -> Ended:
        """The results without an error."""
        if self.all_ok:
            return self
        return Ended([result for result in self.results if result.error is None])

    def select(self, indices: Iterable[int]) -> Ended:
        """Returns the results at ``indices``."""
        return Ended([self.results[i] for i in indices])


def by_direction(results: Sequence[TierResult]) -> tuple[Ended, Ended]:
    """Returns the reads and the writes of ``results``."""
    reads = [result for result in results if result.is_read]
    if len(reads) == len(results):
        return Ended(reads), Ended(())
    return Ended(reads), Ended([result for result in results if not result.is_read] if reads else results)


class MovingRate:
    """An amount per second, as a moving average in which larger samples have more weight."""

    KEEP = 0.9
    """Factor by which each new sample reduces the weight of older ones."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self._amount = self._amount * self.KEEP + amount
        self._seconds = self._seconds * self.KEEP + seconds

    def seconds_for(self, amount: float) -> float | None:
        """Returns how long ``amount`` takes, or None while that is unknown."""
        return amount * self._seconds / self._amount if self._amount > 0 and self._seconds > 0 else None


class ReadEstimator:
    """Estimates how long a tier takes to read blocks of ``block_bytes``, from the reads that have ended."""

    def __init__(self, block_bytes: int) -> None:
        self.measured_at = float("-inf")
        """When the rate was last measured."""
        self._block_bytes = block_bytes
        self._rate = MovingRate()
        self._busy_until = float("-inf")
        """Time up to this moment has been counted."""

    def add(self, reads: Ended, now: float) -> None:
        """Takes in reads that have ended: their bytes over the time in which at least one of them was under way."""
        good, busy = reads.good, 0.0
        # Blocks of one job have the same times.
        for begun, ended in sorted(set(zip(good.begun, good.ended, strict=True))):
            busy += max(0.0, ended - max(begun, self._busy_until))
            self._busy_until = max(self._busy_until, ended)
        if good.keys:
            self._rate.add(sum(good.nbytes), busy)
            self.measured_at = now

    def seconds_to_read(self, num_blocks: int) -> float | None:
        """Returns how long reading this many blocks takes, or None while that is unknown."""
        return self._rate.seconds_for(num_blocks * self._block_bytes)

    def num_blocks_within(self, seconds: float, limit: int) -> int:
        """Returns how many blocks can be read in ``seconds``: at least 1 and at most ``limit``, which is also the
        answer while the rate is unknown."""
        seconds_per_block = self.seconds_to_read(1)
        return limit if not seconds_per_block else max(1, min(limit, int(seconds / seconds_per_block)))


class LoadOrCompute:
    """Decides how much of a run of blocks is loaded, because that is faster than computing its tokens.

    ``tokens_per_block``: per KV cache group, the tokens that one loaded block saves. With ``always_load`` the answer is
    always all of it.
    """

    def __init__(self, tokens_per_block: Sequence[float], always_load: bool) -> None:
        self._tokens_per_block = tokens_per_block
        self._always_load = always_load
        self._prefill = MovingRate()

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Takes in that the engine took ``seconds`` to compute ``num_tokens`` of a prompt."""
        self._prefill.add(num_tokens, seconds)

    def num_worth_loading(
        self,
        group: int,
        sources: npt.NDArray[np.int8],
        num_ahead: Sequence[int],
        estimators: Sequence[ReadEstimator],
        now: float,
        num_states: Sequence[float] | None = None,
    ) -> int:
        """Returns how many leading blocks of a run of ``group`` are to be loaded, so that loading these and computing
        the rest takes the least time, as far as that is known.

        ``sources[i]`` is the index of the tier that holds block i. Tier t reads ``num_ahead[t]`` blocks before; tiers
        read at the same time. With ``num_states`` a request can resume at the end of the run only, so all of it is
        loaded or nothing, and tier t reads ``num_states[t]`` states for it.
        """
        computing = self._prefill.seconds_for(self._tokens_per_block[group])
        num_blocks = len(sources)
        if self._always_load or computing is None:
            return num_blocks
        loading = np.zeros(num_blocks + 1)
        """Seconds, by number of blocks that are loaded."""
        for index, (estimator, ahead) in enumerate(zip(estimators, num_ahead, strict=True)):
            seconds_per_block = _seconds_per_block(estimator, ahead, now)
            if seconds_per_block:
                num_read = np.cumsum(sources == index) + (num_states[index] if num_states else 0)
                seconds = np.where(num_read > 0, (ahead + num_read) * seconds_per_block, 0.0)
                loading[1:] = np.maximum(loading[1:], seconds)
        total = loading - np.arange(num_blocks + 1) * computing
        if num_states is not None:
            return num_blocks if total[-1] <= 0 else 0
        return num_blocks - int(np.argmin(total[::-1]))

    def is_worth_loading(
        self, num_tokens: int, num_blocks: int, num_ahead: int, estimator: ReadEstimator, now: float
    ) -> bool:
        """Returns whether reading ``num_blocks`` of one tier takes no longer than computing ``num_tokens``, as far as
        that is known. The tier reads ``num_ahead`` blocks before."""
        computing = self._prefill.seconds_for(num_tokens)
        seconds_per_block = _seconds_per_block(estimator, num_ahead, now)
        if self._always_load or computing is None or not seconds_per_block:
            return True
        return (num_ahead + num_blocks) * seconds_per_block <= computing


def _seconds_per_block(estimator: ReadEstimator, num_ahead: int, now: float) -> float | None:
    """Returns how long a tier takes to read a block, or None if that is to be measured."""
    is_outdated = num_ahead == 0 and now - estimator.measured_at > RATE_TTL_S
    return None if is_outdated else estimator.seconds_to_read(1)


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

"""Results of transfers, and rates that are measured from them."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.abc import OffloadKey, TierError, TierResult


class Ended:
    """Results of transfers in one direction, in order. Callers need no loop over them if none failed (``all_ok``)."""

    def __init__(self, results: Sequence[TierResult]) -> None:
        self.results = results
        columns = list(zip(*results, strict=True)) or [()] * len(TierResult._fields)
        self.keys: tuple[OffloadKey, ...]
        self.errors: tuple[TierError | None, ...]
        self.keys, _, self.errors, self.nbytes, self.seconds, self.begun, self.ended = columns
        self.all_ok = self.errors.count(None) == len(results)

    def __len__(self) -> int:
        return len(self.results)

    @property
    def good(self) -> Ended:
        """The results without an error."""
        if self.all_ok:
            return self
        return Ended([result for result in self.results if result.error is None])


def by_direction(results: Sequence[TierResult]) -> tuple[Ended, Ended]:
    """Returns the reads and the writes of ``results``."""
    writes = [result for result in results if not result.is_read]
    return Ended([result for result in results if result.is_read]), Ended(writes)


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
        """Returns how many blocks can be read in ``seconds``, 1 to ``limit``; ``limit`` while the rate is unknown."""
        seconds_per_block = self.seconds_to_read(1)
        return limit if not seconds_per_block else max(1, min(limit, int(seconds / seconds_per_block)))

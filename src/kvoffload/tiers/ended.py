"""Ended: results of a tier's transfers, one tuple per field."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvoffload.abc import OffloadKey, TierError, TierResult


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

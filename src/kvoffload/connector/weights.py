"""Comparisons of a rank's weights: blocks that were computed with other weights must not be stored or loaded."""

from __future__ import annotations

from typing import Protocol


class WeightWatch(Protocol):
    """Compares the weights of one rank with the weights that it accepted last, at first with those at its creation."""

    def accept(self) -> None:
        """Accepts the weights as they are after all work issued so far. Cancels a comparison in progress."""

    def begin(self) -> None:
        """Begins to compare the weights as they are after all work issued so far. Does not wait for the device."""

    def poll(self) -> bool | None:
        """Returns whether the weights differed at the last ``begin``, or None while that is not known."""

    def are_same(self) -> bool:
        """Returns whether every byte of the weights is as it was when they were last accepted; False if that is not
        known. Takes as long as the device needs to read them. After True, the next comparison expects the weights at
        their present addresses."""


class WeightComparisons:
    """Compares the weights in every step that computes or has jobs, in the background: a block is stored long after its
    tokens were computed, and the weights may be the former ones again by then. The comparisons are numbered: a job
    belongs to the ``latest`` one when it begins, and can be trusted when that one, or a later one, has succeeded.

    Without ``watch`` nothing is compared, and jobs are trusted at once. Errors of the watch are raised.
    """

    def __init__(self, watch: WeightWatch | None = None) -> None:
        self.watch = watch
        self.latest = 0
        """Number of the latest comparison that a step needs."""
        self.is_stale = False
        """Whether the weights have changed in this epoch."""
        self._must_accept = False
        """Whether a new epoch has begun and no step of it has used the weights yet."""
        self._begun = self._answered = 0
        """Numbers of the latest comparisons that have begun and that have ended."""

    def begin_epoch(self) -> None:
        """Called when the scheduler half has dropped all blocks: the weights that the next step uses will be
        accepted."""
        self.is_stale, self._must_accept = False, True
        self.latest = self._answered = self._begun

    def cancel_pending(self) -> None:
        """Begins no comparison before the next step that needs one, because the weights may lose their memory."""
        self.latest = self._begun

    def use(self) -> bool:
        """Accepts or compares the weights for a step that uses them. Returns whether a change was found."""
        if self.watch is None:
            return False
        if self._must_accept:
            self._must_accept = False
            self.watch.accept()
        elif not self.is_stale:
            self.latest += 1
            return self.advance()
        return False

    def are_same(self) -> bool:
        """Whether the weights are known to be those of the epoch before. If so, this epoch need not accept them."""
        if self.watch is None or not self._must_accept:
            return False
        self._must_accept = not self.watch.are_same()
        return not self._must_accept

    def advance(self) -> bool:
        """Begins the comparison that is needed, unless one is in progress, and processes the result of the one that has
        ended. Returns whether it found a change."""
        if self.watch is None:
            return False
        while self._answered < self.latest and not self.is_stale:
            if self._begun == self._answered:
                self.watch.begin()
                self._begun = self.latest
            changed = self.watch.poll()
            if changed is None:
                return False
            self._answered = self._begun
            if changed:
                self.is_stale = True
                return True
        return False

    def has_answered(self, number: int) -> bool:
        """Whether comparison ``number`` has ended."""
        return number <= self._answered

"""Finds the requests that may complete a block in a step, without looking at all running requests."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

FEW_TOKENS = 16
"""A request that computes more tokens in a step is looked at in it; the others advance by at most that many."""


class DueList:
    """Requests, by the earliest step in which they may complete a block.

    The list counts tokens. In each step the count grows by the largest number of tokens that a request computes,
    ignoring requests that compute more than FEW_TOKENS. So a request that lacks n tokens cannot be due before the count
    has grown by n. If the engine takes tokens back, the request only becomes due later. Each request is in the list at
    most once.

    With ``together`` above 1, requests that become due within as many counts come out at the last of these, so that one
    job stores what neighbouring steps complete.
    """

    def __init__(self, together: int = 1) -> None:
        self._together = together
        self._count = 0
        self._by_count: dict[int, dict[str, None]] = {}
        """Ids of requests, in order of arrival, by the count at which to look at them."""
        self._count_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._count_of)

    def __contains__(self, req_id: str) -> bool:
        return req_id in self._count_of

    def add(self, req_id: str, tokens: int) -> None:
        """Adds a request that cannot be due before it has computed ``tokens`` more, at least one. One comes out in the
        next step."""
        if req_id in self._count_of:
            self.remove(req_id)
        at = self._count + tokens
        if tokens > 1:
            at += -at % self._together
        self._count_of[req_id] = at
        requests = self._by_count.get(at)
        if requests is None:
            self._by_count[at] = {req_id: None}
        else:
            requests[req_id] = None

    def remove(self, req_id: str) -> None:
        at = self._count_of.pop(req_id, None)
        if at is not None:
            requests = self._by_count[at]
            del requests[req_id]
            if not requests:
                del self._by_count[at]

    def take(self, scheduled: Mapping[str, int]) -> list[str]:
        """Removes and returns the requests that may be due in a step that computes these numbers of tokens. Requests
        that are not scheduled may be among them."""
        most = max(scheduled.values(), default=0)
        due: list[str] = []
        if most > FEW_TOKENS:
            due = [req_id for req_id, tokens in scheduled.items() if tokens > FEW_TOKENS]
            tokens = sorted(scheduled.values())
            few = bisect_right(tokens, FEW_TOKENS)
            most = tokens[few - 1] if few else 0
        for req_id in due:
            self.remove(req_id)
        before = self._count
        # A request that is to be looked at again in the next step is taken out even if nothing is computed.
        self._count = before + max(most, 1)
        for at in range(before + 1, self._count + 1):
            requests = self._by_count.pop(at, None)
            if requests is not None:
                for req_id in requests:
                    del self._count_of[req_id]
                due += requests
        return due

    def clear(self) -> None:
        self._by_count.clear()
        self._count_of.clear()

"""Requests that wait in the engine's queue, for which lower tiers are read ahead."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from kvoffload.abc import OffloadingManager, Request
from kvoffload.connector.request import RequestState

MAX_QUEUED = 1024
"""Requests that are noted. Those that come while there are more are not read ahead."""
NEW_PER_STEP = 4
"""For so many requests reading ahead begins in a step, so that a step with many new requests takes little longer."""


class QueuedRequests:
    """The requests that the engine has announced and not looked up yet. For those that it does not look up in its next
    step either, in the order in which they came, the manager is told to expect them. Models with several KV cache
    groups, and requests with adapters, are left out."""

    def __init__(self, manager: OffloadingManager, make_state: Callable[[Request], RequestState]) -> None:
        self._manager = manager
        self._make_state = make_state
        self._new: OrderedDict[str, Request] = OrderedDict()
        self._expected: dict[str, RequestState] = {}

    def __len__(self) -> int:
        return len(self._new) + len(self._expected)

    def add(self, request: Request) -> None:
        if self._manager.reads_ahead and len(self) < MAX_QUEUED:
            self._new[request.request_id] = request

    def take(self, req_id: str) -> RequestState | None:
        """Removes a request that is looked up, or ends before. Returns its state if that was made."""
        self._new.pop(req_id, None)
        return self._expected.pop(req_id, None)

    def clear(self) -> None:
        self._new.clear()
        self._expected.clear()

    def read_ahead(self) -> None:
        """Called in every step, after its lookups."""
        for _ in range(min(NEW_PER_STEP, len(self._new))):
            req_id, request = self._new.popitem(last=False)
            state = self._expected[req_id] = self._make_state(request)
            if state.may_load and state.adapter is None and len(state.blocks.keys) == 1:
                state.extend_keys()
                num_loadable = state.blocks.layout.num_final(0, min(request.num_tokens - 1, state.blocks.max_tokens))
                self._manager.expect(state.blocks.keys[0][:num_loadable], state.context)

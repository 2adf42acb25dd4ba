"""The states of new requests, and of those in the engine's queue, for which lower tiers are read ahead."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from kvoffload.abc import OffloadingManager, Request, TieredManager
from kvoffload.cache.tenants import Tenants
from kvoffload.connector.adapters import AdapterDigests
from kvoffload.connector.engine import EngineSpec
from kvoffload.connector.request import RequestState
from kvoffload.connector.resets import BlockOrigins

MAX_QUEUED = 1024
"""Requests that are noted. Those that come while there are more are not read ahead."""
NEW_PER_STEP = 4
"""For so many requests reading ahead begins in a step, so that a step with many new requests takes little longer."""


class QueuedRequests:
    """The requests that the engine has announced and not looked up yet. Those that it does not look up in its next step
    either are announced to the manager, in the order in which they came. Models with several KV cache groups, and
    requests with adapters, are left out."""

    def __init__(
        self,
        manager: OffloadingManager,
        engine: EngineSpec,
        tenants: Tenants,
        adapters: AdapterDigests | None,
        sound: BlockOrigins,
    ) -> None:
        self._manager = manager
        self._engine = engine
        self._tenants = tenants
        self._adapters = adapters
        self._sound = sound
        self.requests: dict[str, Request] = {}
        """By id. Read only for others."""
        self.new: deque[Request] = deque()
        """Those that no step has followed yet, and some that were taken. Read only for others."""
        self._states: dict[str, RequestState] = {}
        """Of those that the manager expects."""

    def make(self, request: Request) -> RequestState:
        """Returns the state of a new request."""
        engine, adapters = self._engine, self._adapters
        state = RequestState.new(
            request,
            engine.layout,
            self._tenants,
            self._manager.most_blocks,
            None if engine.engine_options is None else engine.engine_options(request),
            None if adapters is None else adapters.begin(request),
            has_adapters=adapters is not None,
        )
        if engine.drops_tokens is not None and engine.drops_tokens(request):
            self._sound.track()
            state.give_up()
        if engine.is_beside_others:
            state.options = replace(state.options, remote_decode=False)
            state.context = replace(state.context, goes_on=False)
        return state

    def add(self, request: Request) -> None:
        is_read_ahead = isinstance(self._manager, TieredManager)
        if is_read_ahead and len(self.new) < MAX_QUEUED and len(self.requests) < MAX_QUEUED:
            self.requests[request.request_id] = request
            self.new.append(request)

    def take(self, request: Request) -> RequestState | None:
        """Removes a request that is looked up, or ends before. Returns its state if that was made."""
        self.requests.pop(request.request_id, None)
        state = self._states.pop(request.request_id, None)
        # An engine may use an id again.
        return state if state is not None and state.request is request else None

    def clear(self) -> None:
        self.requests.clear()
        self.new.clear()
        self._states.clear()

    def read_ahead(self) -> None:
        """Called in every step, after its lookups."""
        num_left, manager = NEW_PER_STEP, self._manager
        while isinstance(manager, TieredManager) and self.new and num_left:
            request = self.new.popleft()
            if self.requests.get(request.request_id) is not request:
                continue
            num_left -= 1
            state = self._states[request.request_id] = self.make(request)
            if state.may_load and state.adapter is None and len(state.blocks.keys) == 1:
                state.extend_keys()
                num_loadable = state.blocks.layout.num_final(0, min(request.num_tokens - 1, state.blocks.max_tokens))
                manager.expect(state.blocks.keys[0][:num_loadable], state.context)

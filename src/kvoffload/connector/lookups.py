"""Lookups: what a request is offered, whether it waits, and how long the answer is remembered."""

from __future__ import annotations

from collections.abc import Callable

from kvoffload.abc import OffloadingManager, OffloadKey
from kvoffload.connector.adapter_book import AdapterBook
from kvoffload.connector.hits import HitSearch, last_loadable
from kvoffload.connector.layout import Layout
from kvoffload.connector.request import Changes, Match, RequestState
from kvoffload.connector.shelf import Shelf

MAX_WAITS_PER_REQUEST = 3
"""A request that has waited, had its answer and could not be scheduled may find less when it is looked up again, and
wait again. It waits at most this often until it is given device blocks, each time up to the load deadline."""


class Lookups:
    """Answers how much of a request can be loaded, using ``hits``, and remembers the answer in the request.

    A request waits for blocks that are being loaded for another request, for a lower tier, for the digest of its
    adapter, and, after a reset, for the comparison of the weights: each time at most ``deadline_s``.
    """

    def __init__(
        self,
        manager: OffloadingManager,
        layout: Layout,
        hits: HitSearch,
        shelf: Shelf,
        adapters: AdapterBook,
        changes: Changes,
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._manager = manager
        self._layout = layout
        self._hits = hits
        self._shelf = shelf
        self._adapters = adapters
        self._changes = changes
        self.deadline_s = deadline_s
        self._clock = clock

    def match(self, state: RequestState, computed: int) -> Match:
        """Returns what can be loaded for a request with ``computed`` tokens on the device."""
        match = state.match
        if match is None or not self._still_holds(match, computed):
            match = state.match = self._look_up(state, computed)
            if match.tokens is not None and state.waiting_since is not None:
                state.waited_s += self._clock() - state.waiting_since
                state.waiting_since = None
                state.num_waits += 1
        return match

    def _still_holds(self, match: Match, computed: int) -> bool:
        change = self._changes.loads if match.tokens is None else self._contents
        return (match.change, match.computed) == (change, computed) and self._clock() < match.expires

    @property
    def _contents(self) -> int:
        """Grows when an answer other than to wait may have become wrong."""
        return self._changes.contents + self._manager.num_removed

    def _look_up(self, state: RequestState, computed: int) -> Match:
        if state.adapter is not None and (state.options.load or state.options.store):
            known = self._adapters.digests(state.adapter)
            if known is None and (wait := self._wait(state, computed)):
                return wait
            if not known or state.digests not in (None, known):
                state.give_up()
            elif state.digests is None:
                state.bind(known)
        if not state.has_keys:
            return Match(self._contents, computed, 0, None)
        state.extend_keys()
        if not state.may_load:
            self._touch(state)
            return Match(self._contents, computed, 0, self._first_missing(state, computed))
        if self._shelf.is_hidden:
            self._shelf.ask_for_check()
            return self._wait(state, computed) or Match(self._contents, computed, 0, None)
        self._touch(state)
        if computed % self._layout.device_align:
            return Match(self._contents, computed, 0, None)
        if self._hits.is_next_loading(state, computed) and (wait := self._wait(state, computed)):
            return wait
        may_wait = state.num_waits < MAX_WAITS_PER_REQUEST
        hit = self._hits.longest(state, computed, may_wait)
        if not hit.is_known or (hit.end > computed and self._hits.is_any_loading(state, computed, hit.end)):
            wait = self._wait(state, computed)
            if wait is not None:
                return wait
        if not hit.is_known:
            # It may not wait any longer.
            hit = self._hits.longest(state, computed, may_wait=False)
        tokens = last_loadable(state, hit.end) - computed if hit.end - computed >= self._layout.align else 0
        return Match(self._contents, computed, tokens, hit.missed, junction=hit.junction, no_state=hit.no_state)

    def _first_missing(self, state: RequestState, computed: int) -> OffloadKey | None:
        """Returns the key of the first block behind ``computed`` tokens; None if the request has no whole one there."""
        keys, first = state.blocks.keys[0], computed // self._layout.block_tokens[0]
        return keys[first] if first < len(keys) else None

    def _touch(self, state: RequestState) -> None:
        """Counts one use of the request's blocks, and of the last state that it could continue from. States are kept at
        few boundaries: to a policy, those at all the others would be blocks that it has lost."""
        if state.touched:
            return
        state.touched = True
        if not self._layout.states:
            self._manager.touch(state.blocks.keys_in_order(), state.context)
            return
        last = self._hits.last_state(state)
        used = state.blocks.used_keys([last] if last else [])
        self._manager.touch(used, state.context, state.blocks.keys_in_order())

    def _wait(self, state: RequestState, computed: int) -> Match | None:
        """Returns an answer that makes the request ask again: when a load has started or ended, when the manager may
        find more, or at the deadline. Returns None if the deadline is over, or if the request has waited
        MAX_WAITS_PER_REQUEST times."""
        if state.num_waits >= MAX_WAITS_PER_REQUEST:
            return None
        now = self._clock()
        if state.waiting_since is None:
            state.waiting_since = now
        deadline = state.waiting_since + self.deadline_s
        return Match(self._changes.loads, computed, None, None, deadline) if now < deadline else None

"""What a request is offered, whether it waits, and how long the answer is remembered.

``hits`` asks the manager, and ``tiering/lookup.py`` behind it asks the tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvoffload.abc import OffloadKey
from kvoffload.connector.adapters import AdapterDigests
from kvoffload.connector.handover import Patience
from kvoffload.connector.hits import is_any_loading, is_next_loading, last_loadable, last_state, longest, most_end
from kvoffload.connector.jobs import JobTable
from kvoffload.connector.leaving import LeavingBlocks
from kvoffload.connector.observer import RequestObserver
from kvoffload.connector.request import Match, RequestState
from kvoffload.connector.resets import PausedContents

MAX_WAITS_PER_REQUEST = 3
"""A request that has waited, had its answer and could not be scheduled may find less when it is looked up again, and
wait again. It waits at most this often until it is given device blocks, each time up to the load deadline."""
OTHER_NAME = (
    "kvoffload: another server handed over a request whose blocks have other keys there than here, so this server "
    "computes the prompt: models, versions, layouts or tenants of the servers differ; `kvoffload doctor` names the "
    "difference"
)
NOTHING_COMES = (
    "kvoffload: several requests in a row did not find all blocks that another server had handed over to them, so "
    "requests from that server wait less: check that both servers use the same store, and that the other one can write "
    "to it"
)


@dataclass(slots=True, eq=False)
class Lookups:
    """What lookups ask and remember. A request waits for blocks that are being loaded for another request, for a lower
    tier, for the digest of its adapter, for blocks that the engine has forgotten on the device, and, after a reset, for
    the comparison of the weights: each time at most ``deadline_s``."""

    jobs: JobTable
    keys_loading: Mapping[OffloadKey, int]
    """Those of ``jobs``; empty if loads are not shared."""
    paused: PausedContents
    adapters: AdapterDigests | None
    deadline_s: float
    clock: Callable[[], float]
    leaving: LeavingBlocks | None
    patience: Patience = field(default_factory=Patience)

    @property
    def contents(self) -> int:
        """Grows when an answer other than to wait may have become wrong."""
        return self.jobs.changes.contents + self.jobs.manager.num_removed


def locate(lookups: Lookups, state: RequestState, computed: int) -> Match:
    """Returns what can be loaded for a request with ``computed`` tokens on the device."""
    match = state.match
    if match is None or not _still_holds(lookups, match, computed):
        match = state.match = _look_up(lookups, state, computed)
        if match.tokens is not None and state.waiting_since is not None:
            state.waited_s += lookups.clock() - state.waiting_since
            state.waiting_since = None
            state.num_waits += 1
    return match


def _still_holds(lookups: Lookups, match: Match, computed: int) -> bool:
    change = lookups.jobs.changes.loads if match.tokens is None else lookups.contents
    return (match.change, match.computed) == (change, computed) and lookups.clock() < match.expires


def _look_up(lookups: Lookups, state: RequestState, computed: int) -> Match:
    adapters, adapter, layout = lookups.adapters, state.adapter, lookups.jobs.layout
    if adapters is not None and adapter is not None and (state.options.load or state.options.store):
        known = adapters.digests(adapter)
        if known is None and (wait := _wait(lookups, state, computed)):
            return wait
        if not known or state.digests not in (None, known):
            state.give_up()
        elif state.digests is None:
            state.bind(known)
    if state.origin is None:
        return Match(lookups.contents, computed, 0, None)
    state.extend_keys()
    if not state.may_load:
        _touch(lookups, state)
        # The first block behind what the device has was not looked up.
        keys, first = state.blocks.keys[0], computed // layout.block_tokens[0]
        return Match(lookups.contents, computed, 0, keys[first] if first < len(keys) else None)
    if lookups.paused.is_hidden:
        lookups.paused.must_check = True
        return _wait(lookups, state, computed) or Match(lookups.contents, computed, 0, None)
    _touch(lookups, state)
    if computed % layout.device_align:
        return Match(lookups.contents, computed, 0, None)
    # The engine computes less than a block in one step. A load would take a step of its own.
    is_worth = last_loadable(state, most_end(layout, state)) - computed >= layout.device_align
    if (
        is_worth
        and is_next_loading(lookups.keys_loading, layout, state, computed)
        and (wait := _wait(lookups, state, computed))
    ):
        return wait
    if state.handover is not None:
        state.await_blocks(lookups.clock(), lookups.patience.wait_s(state.handover.server, lookups.deadline_s))
    if not is_worth:
        return Match(lookups.contents, computed, 0, None)
    may_wait = state.num_waits < MAX_WAITS_PER_REQUEST
    hit = longest(lookups.jobs.manager, layout, state, computed, may_wait)
    if not hit.is_known or (
        hit.end > computed and is_any_loading(lookups.keys_loading, layout, state, computed, hit.end)
    ):
        wait = _wait(lookups, state, computed)
        if wait is not None:
            return wait
    if not hit.is_known:
        # It may not wait any longer.
        hit = longest(lookups.jobs.manager, layout, state, computed, may_wait=False)
    leaving = lookups.leaving
    if leaving is not None and leaving.bring_back(state, hit.end) and (wait := _wait(lookups, state, computed)):
        return wait
    tokens = last_loadable(state, hit.end) - computed if hit.end - computed >= layout.align else 0
    return Match(lookups.contents, computed, tokens, hit.missed, junction=hit.junction, no_state=hit.no_state)


def _touch(lookups: Lookups, state: RequestState) -> None:
    """Counts one use of the request's blocks, and of the last state that it could continue from. States are kept at
    few boundaries: to a policy, those at all the others would be blocks that it has lost."""
    if state.touched:
        return
    state.touched = True
    if not lookups.jobs.layout.states:
        lookups.jobs.manager.touch(state.blocks.keys_in_order(), state.context)
        return
    last = last_state(lookups.jobs.manager, lookups.jobs.layout, state)
    used = state.blocks.used_keys([last] if last else [])
    lookups.jobs.manager.touch(used, state.context, state.blocks.keys_in_order())


def _wait(lookups: Lookups, state: RequestState, computed: int) -> Match | None:
    """Returns an answer that makes the request ask again: when a load has started or ended, when the manager may
    find more, or at the deadline. Returns None if the deadline is over, or if the request has waited
    MAX_WAITS_PER_REQUEST times."""
    if state.num_waits >= MAX_WAITS_PER_REQUEST:
        return None
    now = lookups.clock()
    if state.waiting_since is None:
        state.waiting_since = now
    deadline = state.waiting_since + lookups.deadline_s
    return Match(lookups.jobs.changes.loads, computed, None, None, deadline) if now < deadline else None


def end_handover(lookups: Lookups, observer: RequestObserver, state: RequestState, num_found: int) -> None:
    """Notes how much of what was handed over to a request it has found."""
    handover, awaited = state.handover, state.context.awaited
    state.handover = None
    if handover is None or awaited is None:
        return
    if not awaited.keys:
        result = "other_name"
        observer.warn(OTHER_NAME)
    else:
        is_complete = min(handover.tokens, state.request.num_tokens - 1) - num_found < lookups.jobs.layout.device_align
        result = "complete" if is_complete else "partial" if num_found else "none"
        # A part may be what this server has computed itself.
        lookups.patience.ended(handover.server, is_complete)
        if lookups.patience.is_lost(handover.server):
            observer.warn(NOTHING_COMES)
    observer.metrics.add("handovers", label=result)

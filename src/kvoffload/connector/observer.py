"""The observer of requests: records, reasons of misses, speed of prefills, metrics, descriptions for events, traces."""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import TypeAlias

from kvoffload.abc import (
    BlockDescription,
    Keys,
    Miss,
    MissReason,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    Retained,
    TieredManager,
)
from kvoffload.cache.bills import MovedBytes
from kvoffload.cache.history import MAX_PENDING_EVENTS
from kvoffload.cache.keys import key_group_idx
from kvoffload.cache.tenants import HOST
from kvoffload.connector.engine import TraceHeaders
from kvoffload.connector.jobs import Job
from kvoffload.connector.layout import Block, KeyLayout
from kvoffload.connector.request import Match, RequestState
from kvoffload.observe.metrics import Metrics
from kvoffload.observe.records import RECORD_RING_SIZE, RequestRecord
from kvoffload.observe.server import log_record
from kvoffload.observe.spans import RequestSpans
from kvoffload.observe.trace import TraceRecorder
from kvoffload.tiering.rates import MovingRate

logger = logging.getLogger(__name__)

WARN_EVERY_S = 60.0
MIN_PREFILL_SAMPLE = 64
"""Tokens. A shorter prompt says little about how fast the engine computes."""
Promoted: TypeAlias = Mapping[str, Keys]
"""The blocks that lower tiers have delivered for a request, by tier."""


class EventDescriptions:
    """Describes the blocks of events, unless their requests have other tokens by now."""

    def __init__(self, layout: KeyLayout) -> None:
        self._layout = layout
        self._stored: OrderedDict[OffloadKey, tuple[RequestState, Block]] = OrderedDict()
        """Blocks that became loadable since events were last taken, each with a request that can describe it."""
        self._coming: dict[OffloadKey, dict[RequestState, Block]] = {}
        """Blocks that may be promoted for requests that wait."""
        self._awaited: dict[RequestState, list[Block]] = {}
        """Those of each request. It may have other keys by now."""

    def stored(self, job: Job) -> None:
        self._stored.update((block.key, (state, block)) for _, state, block in job.blocks if state is not None)
        while len(self._stored) > MAX_PENDING_EVENTS:
            self._stored.popitem(last=False)

    def expect(self, state: RequestState) -> None:
        """Describes blocks that a lower tier brings for a request that waits."""
        if not self._awaited.get(state):
            by_group = enumerate(state.blocks.keys)
            self._awaited[state] = [Block(g, i, key, 0, []) for g, keys in by_group for i, key in enumerate(keys)]
            for block in self._awaited[state]:
                self._coming.setdefault(block.key, {})[state] = block

    def forget(self, state: RequestState) -> None:
        for block in self._awaited.pop(state, ()):
            waiting = self._coming[block.key]
            del waiting[state]
            if not waiting:
                del self._coming[block.key]

    def add_to(self, events: Iterable[OffloadingEvent]) -> list[OffloadingEvent]:
        """Returns all events since the last call with descriptions."""
        describe = self._describe
        described = [each if each.removed else replace(each, blocks=[*map(describe, each.keys)]) for each in events]
        self._stored.clear()
        return described

    def _describe(self, key: OffloadKey) -> BlockDescription | None:
        found = self._stored.get(key) or next(iter(self._coming.get(key, {}).items()), None)
        if found is None:
            return None
        state, block = found
        return self._layout.describe(state.request, block, state.blocks.namespace)


def make_spans(trace_headers: TraceHeaders, block_bytes: int) -> RequestSpans | None:
    """Returns what makes spans, or None, with a warning, if it cannot."""
    try:
        return RequestSpans(trace_headers, block_bytes)
    except Exception as error:
        logger.warning(
            "kvoffload: makes no spans, although the engine's tracing is on: %s; install opentelemetry-api", error
        )
        return None


@dataclass(eq=False)
class RequestObserver:
    """Observes requests and jobs, for records, metrics and events. Only the speed of computing, which it reports to a
    manager with lower tiers, takes part in a decision: whether to load or to compute.

    ``records`` has the latest requests. ``recorder`` gets every request that was given device blocks, when it ends.
    ``spans`` gets every request. ``descriptions`` are those of the blocks of events, if they have any. ``moved`` counts
    the bytes that are copied for tenants; None if there are none.
    """

    manager: OffloadingManager
    layout: KeyLayout
    metrics: Metrics
    recorder: TraceRecorder | None
    spans: RequestSpans | None
    descriptions: EventDescriptions | None
    clock: Callable[[], float]
    moved: MovedBytes | None
    records: deque[RequestRecord] = field(default_factory=lambda: deque(maxlen=RECORD_RING_SIZE))
    prefilling: dict[str, tuple[RequestState, int, float]] = field(default_factory=dict)
    """Requests that compute their whole prompts, their tokens when they were given device blocks, and when that was."""
    _speed: MovingRate = field(default_factory=MovingRate)
    """At which prompts are computed beside other requests, in tokens per second."""
    _num_records: int = 0
    _last_warning: dict[str, float] = field(default_factory=dict)

    def begin(self, state: RequestState) -> None:
        """Observes a request that is looked up for the first time."""
        state.observed.arrived = time.time()
        for option in state.options.ignored:
            self.metrics.add("ignored_options", label=option)
        if self.spans is not None:
            state.observed.traced = self.spans.begin(state.request)

    def allocated(self, state: RequestState, match: Match | None, num_external_tokens: int, promoted: Promoted) -> None:
        """Records a request that was given device blocks. Without a match it had some, and continues with them."""
        req_id, waited_s, traced = state.context.req_id, state.lookup.waited_s, state.observed.traced
        if self.descriptions is not None:
            self.descriptions.forget(state)
        if match is not None and state.observed.record is None:
            self._record(state, match, num_external_tokens, promoted)
        if waited_s:
            self.metrics.add("wait_seconds", waited_s)
        if self.spans is not None and traced is not None:
            traced.looked_up = traced.looked_up or self.spans.now()
            traced.waited_s += waited_s
            traced.loaded_tokens += num_external_tokens
        if match is not None and num_external_tokens == 0:
            self.prefilling[req_id] = state, state.request.num_tokens, self.clock()
        else:
            self.prefilling.pop(req_id, None)

    def measure_prefills(self, scheduled: Mapping[str, int]) -> None:
        """Called in every step. A measurement ends with the first new token."""
        for req_id, (state, num_tokens, since) in list(self.prefilling.items()):
            if req_id in scheduled and state.request.num_tokens > num_tokens:
                del self.prefilling[req_id]
                tokens, seconds = num_tokens - state.filled.computed, self.clock() - since
                if tokens >= MIN_PREFILL_SAMPLE:
                    if isinstance(self.manager, TieredManager):
                        self.manager.observe_prefill(tokens, seconds)
                    self._speed.add(tokens, seconds)
                    state.observed.prefill = tokens, seconds

    def end(self, state: RequestState, retained: Retained | None = None, retained_tokens: int = 0) -> None:
        """Writes a request that has ended to the trace, and whether its first tokens are retained, if it asked."""
        record, request, options = state.observed.record, state.request, state.options
        if record is not None and retained is not None and (answer := retained.refusal or retained.tier):
            self.metrics.add("retentions", label=answer)
            record.retain_refused, record.retained_in = retained.refusal, retained.tier
            record.retained_tokens = retained_tokens if retained.tier is not None else 0
        if self.descriptions is not None:
            self.descriptions.forget(state)
        self.prefilling.pop(state.context.req_id, None)
        if not any(state.blocks.tables):
            self.planned_last_stores([state])
        if self.recorder is not None and record is not None:
            state.blocks.extend_keys()
            keys, observed, hints = state.blocks.keys[self.layout.traced], state.observed, state.context.hints
            num_tokens = request.num_tokens, request.num_computed_tokens
            names = {"session": options.session, "tenant": options.tenant or observed.tenant}
            self.recorder.add(observed.arrived, record, keys, *num_tokens, names, observed.prefill, hints)

    def planned_last_stores(self, states: Iterable[RequestState]) -> None:
        """Called for requests that have ended, once the stores of their last blocks have begun."""
        for state in states:
            state.observed.has_ended = True
            record = state.observed.record
            if record is not None and (record.stored_tokens or record.retained_in or record.retain_refused):
                log_record(record)
            self._make_spans(state)

    def _make_spans(self, state: RequestState) -> None:
        """Makes the spans of a request that has ended, once the last of its jobs has."""
        observed, traced = state.observed, state.observed.traced
        if self.spans is not None and traced is not None and observed.has_ended and state.num_jobs == 0:
            observed.traced = None
            self.spans.make(state.context.req_id, traced, observed.record)

    def _record(self, state: RequestState, match: Match, num_external_tokens: int, promoted: Promoted) -> None:
        tier_tokens = self._count_tier_hits(promoted, num_external_tokens)
        below_host = sum(tier_tokens.values())
        missed, miss = match.hit.missed, None
        if missed is not None:
            missed, miss = self._explain(missed, match.hit.no_state)
            if not state.may_load:
                miss = Miss(MissReason.NOT_LOOKED_UP, policy=miss.policy)
        elif state.has_given_up:
            miss = Miss(MissReason.NOT_LOOKED_UP if state.adapter is None else MissReason.ADAPTER_UNKNOWN)
        if miss is not None:
            self.metrics.add("misses", label=miss.reason)
        tenant, num_asked = state.observed.tenant, state.request.num_tokens
        saved_s = self._speed.seconds_for(num_external_tokens)
        if saved_s:
            self.metrics.add("saved_seconds", saved_s)
        if tenant is not None:
            if saved_s:
                self.metrics.add("tenant_saved_seconds", saved_s, label=tenant)
            self.metrics.add("tenant_asked_tokens", num_asked, label=tenant)
            self.metrics.add("tenant_hit_tokens", num_external_tokens, label=tenant)
        self.metrics.add("asked_tokens", num_asked)
        self.metrics.add("device_hit_tokens", match.computed)
        self.metrics.add("host_hit_tokens", num_external_tokens - below_host)
        record = RequestRecord(
            time.time(),
            state.context.req_id,
            num_asked,
            match.computed,
            num_external_tokens - below_host,
            missed[len(state.blocks.namespace) :].hex() if missed else None,
            disk_tokens=below_host,
            tier_tokens=tier_tokens,
            tenant=tenant,
            saved_s=saved_s,
        )
        if miss is not None:
            record.reason, record.age_s, record.policy = miss.reason, miss.age_s, miss.policy
            record.missed_in = miss.tier
        state.observed.record, state.observed.number = record, self._num_records
        self._num_records += 1
        self.records.append(record)
        log_record(record)

    def _explain(self, missed: OffloadKey, no_state: OffloadKey | None) -> tuple[OffloadKey, Miss]:
        """Returns the block that was missing and why: ``missed``, or the state without which it is of no use."""
        miss = self.manager.explain_miss(missed)
        if no_state is not None and miss.reason is MissReason.NOT_IN_TIME:
            # A lower tier has the block, and was not asked for it.
            missed, miss = no_state, self.manager.explain_miss(no_state)
        if key_group_idx(missed) in self.layout.states and miss.reason in (MissReason.NEVER_STORED, MissReason.RESET):
            # Not kept, or dropped when a later one was stored: a reset would have dropped the blocks before it too.
            miss = Miss(MissReason.NO_STATE, policy=miss.policy)
        return missed, miss

    def _count_tier_hits(self, promoted: Promoted, num_external_tokens: int) -> dict[str, int]:
        """Counts the tokens that lower tiers have delivered for a request. Returns how many each tier has. Without full
        attention, the few blocks that are loaded stand for all tokens before them."""
        left, by_tier = num_external_tokens, {}
        for tier, keys in promoted.items():
            tokens = min(left, self.layout.num_tokens(keys)) if self.layout.full else left
            if tokens:
                left -= tokens
                by_tier[tier] = tokens
                self.metrics.add("tier_hit_tokens", tokens, label=tier)
        return by_tier

    def copied(self, jobs: Sequence[Job]) -> None:
        """Observes jobs that have ended."""
        for job in jobs:
            if self.moved is not None and not job.failed:
                self.moved.add(HOST, job.keys, repeat(self.moved.block_bytes))
        if (spans := self.spans) is None:
            return
        copied = [(job, state) for job in jobs for state in job.requests]
        for job, state in copied:
            if (traced := state.observed.traced) is not None:
                copies = traced.store if job.is_store else traced.load
                # Requests share a job only if each has one block in it.
                copies.add(len(job.keys) // len(job.requests), job.failed, job.began, spans.now())
        for _, state in copied:
            self._make_spans(state)

    def stored(self, job: Job) -> None:
        """Counts the blocks of a store, which can be loaded now, also in records. Logs records of ended requests."""
        self.metrics.add("store_blocks", len(job.lease.slots))
        records, traced, block_tokens = self.records, self.layout.traced, self.layout.block_tokens[self.layout.traced]
        num_gone = self._num_records - len(records)
        running = {state.observed.number for state in job.requests if not state.observed.has_ended}
        for number, num_blocks in Counter([number for number, _, block in job.blocks if block.group == traced]).items():
            if number >= num_gone:
                record = records[number - num_gone]
                record.stored_tokens += num_blocks * block_tokens
                if number not in running:
                    log_record(record)
        if self.descriptions is not None:
            self.descriptions.stored(job)

    def warn(self, message: str) -> None:
        """Logs ``message``, at most once in WARN_EVERY_S."""
        now = self.clock()
        if now - self._last_warning.get(message, float("-inf")) >= WARN_EVERY_S:
            self._last_warning[message] = now
            logger.warning(message)

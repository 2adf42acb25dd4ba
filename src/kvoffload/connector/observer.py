"""The observer of requests: records, reasons of misses, speed of prefills, metrics, descriptions for events, traces."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

from kvoffload.abc import (
    BlockDescription,
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
from kvoffload.connector.jobs import Job
from kvoffload.connector.layout import Block, KeyLayout
from kvoffload.connector.messages import WorkerReport
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


class Prefills:
    """Measures how long requests that compute their whole prompts take for it beside other requests. ``manager`` is
    told if it has lower tiers."""

    def __init__(self, clock: Callable[[], float], manager: OffloadingManager) -> None:
        self.speed = MovingRate()
        """At which prompts are computed, in tokens per second."""
        self._clock = clock
        self._manager = manager
        self.running: dict[str, tuple[RequestState, int, float]] = {}
        """By request, its tokens when it was given device blocks, and when that was."""

    def begin(self, state: RequestState) -> None:
        self.running[state.context.req_id] = state, state.request.num_tokens, self._clock()

    def measure(self, scheduled: Mapping[str, int]) -> None:
        """Called in every step. A measurement ends with the first new token."""
        for req_id, (state, num_tokens, since) in list(self.running.items()):
            if req_id in scheduled and state.request.num_tokens > num_tokens:
                del self.running[req_id]
                tokens, seconds = num_tokens - state.computed_at_load, self._clock() - since
                if tokens >= MIN_PREFILL_SAMPLE:
                    if isinstance(self._manager, TieredManager):
                        self._manager.observe_prefill(tokens, seconds)
                    self.speed.add(tokens, seconds)
                    state.prefill = tokens, seconds


@dataclass(slots=True, eq=False)
class _Place:
    """A block of requests that wait: ``ordinal`` of ``group`` of one of them."""

    state: RequestState
    group: int
    ordinal: int
    num_requests: int = 0
    """Requests that wait for it."""


class _ComingBlocks:
    """The blocks of requests that wait, which may be promoted for them. Any of these requests can describe a block."""

    def __init__(self) -> None:
        self._places: dict[OffloadKey, _Place] = {}
        self._keys: dict[str, list[OffloadKey]] = {}
        """By request. Its keys may have changed since."""

    def add(self, state: RequestState) -> None:
        """Adds the blocks of a request, once."""
        keys = self._keys.setdefault(state.context.req_id, [])
        if keys:
            return
        for g, of_group in enumerate(state.blocks.keys):
            keys += of_group
            for i, key in enumerate(of_group):
                place = self._places.get(key)
                if place is None:
                    place = self._places[key] = _Place(state, g, i)
                place.num_requests += 1

    def remove(self, req_id: str) -> None:
        """Removes the blocks of a request for which no other one waits."""
        for key in self._keys.pop(req_id, ()):
            place = self._places[key]
            place.num_requests -= 1
            if not place.num_requests:
                del self._places[key]

    def get(self, key: OffloadKey) -> tuple[RequestState, Block] | None:
        place = self._places.get(key)
        return None if place is None else (place.state, Block(place.group, place.ordinal, key, 0, []))

    def __len__(self) -> int:
        return len(self._places)


class RequestObserver:
    """Observes requests and jobs, for records, metrics and events. Only the speed of computing, which it reports to the
    manager, takes part in a decision: whether to load or to compute.

    ``records`` has the latest requests. ``recorder`` gets every request that was given device blocks, when it ends.
    ``spans`` gets every request. ``describes_blocks``: events of stored blocks carry a BlockDescription,
    unless their requests have other tokens by now. ``moved`` counts the bytes that are copied for tenants; None if
    there are none.
    """

    def __init__(
        self,
        manager: OffloadingManager,
        layout: KeyLayout,
        metrics: Metrics,
        recorder: TraceRecorder | None,
        spans: RequestSpans | None,
        describes_blocks: bool,
        clock: Callable[[], float],
        moved: MovedBytes | None,
    ) -> None:
        self.metrics = metrics
        self.records: deque[RequestRecord] = deque(maxlen=RECORD_RING_SIZE)
        self._num_records = 0
        """Records that were made."""
        self.describes_blocks = describes_blocks
        self._manager = manager
        self._layout = layout
        self._recorder = recorder
        self._spans = spans
        self._clock = clock
        self._moved = moved
        self.prefills = Prefills(clock, manager)
        self._stored: OrderedDict[OffloadKey, tuple[RequestState, Block]] = OrderedDict()
        """Blocks that became loadable since events were last taken, each with a request that can describe it."""
        self._coming = _ComingBlocks()
        """Empty unless events describe blocks."""
        self._last_warning: dict[str, float] = {}

    # Requests.

    def begin(self, state: RequestState) -> None:
        """Observes a request that is looked up for the first time."""
        state.arrived = time.time()
        for option in state.options.ignored:
            self.metrics.add("ignored_options", label=option)
        if self._spans is not None:
            state.traced = self._spans.begin(state.request)

    def waits(self, state: RequestState) -> None:
        """Notes that a request waits, perhaps for blocks that a lower tier is asked for."""
        if self.describes_blocks:
            self._coming.add(state)

    def allocated(
        self,
        state: RequestState,
        match: Match | None,
        num_external_tokens: int,
        promoted: Mapping[str, Sequence[OffloadKey]],
    ) -> None:
        """Records a request that was given device blocks. Without a match it had blocks before and continues with
        them. ``promoted``: the blocks that lower tiers have delivered for it, by tier."""
        req_id = state.context.req_id
        self._coming.remove(req_id)
        if match is not None:
            self._record(state, match, num_external_tokens, promoted)
        if state.waited_s:
            self.metrics.add("wait_seconds", state.waited_s)
        if self._spans is not None and (traced := state.traced) is not None:
            traced.looked_up = traced.looked_up or self._spans.now()
            traced.waited_s += state.waited_s
            traced.loaded_tokens += num_external_tokens
        if match is not None and num_external_tokens == 0:
            self.prefills.begin(state)
        else:
            self.prefills.running.pop(req_id, None)

    def end(self, state: RequestState, retained: Retained | None = None, retained_tokens: int = 0) -> None:
        """Writes a request that has ended to the trace. ``retained``: the answer, if it has asked for its blocks of the
        first ``retained_tokens`` tokens to be retained."""
        if state.record is not None and retained is not None and (answer := retained.refusal or retained.tier):
            self.metrics.add("retentions", label=answer)
            state.record.retain_refused, state.record.retained_in = retained.refusal, retained.tier
            state.record.retained_tokens = retained_tokens if retained.tier is not None else 0
        req_id, request = state.context.req_id, state.request
        self._coming.remove(req_id)
        self.prefills.running.pop(req_id, None)
        if not any(state.blocks.tables):
            self.planned_last_stores([state])
        if self._recorder is not None and state.record is not None:
            state.extend_keys()
            keys = state.blocks.keys[self._layout.traced]
            self._recorder.add(
                state.arrived,
                state.record,
                keys,
                request.num_tokens,
                request.num_computed_tokens,
                {"session": state.options.session, "tenant": state.options.tenant or state.tenant},
                state.prefill,
                state.context.hints,
            )

    def planned_last_stores(self, states: Iterable[RequestState]) -> None:
        """Called for requests that have ended, once the stores of their last blocks have begun."""
        for state in states:
            state.has_ended = True
            record = state.record
            if record is not None and (record.stored_tokens or record.retained_in or record.retain_refused):
                log_record(record)
            self._make_spans(state)

    def _make_spans(self, state: RequestState) -> None:
        """Makes the spans of a request that has ended, once the last of its jobs has."""
        traced = state.traced
        if self._spans is not None and traced is not None and state.has_ended and state.num_jobs == 0:
            state.traced = None
            self._spans.make(state.context.req_id, traced, state.record)

    def _count_stored(self, job: Job) -> None:
        """Adds the tokens of a store to the records of its requests, and logs those of requests that have ended. Old
        records are not kept."""
        records, traced = self.records, self._layout.traced
        num_gone = self._num_records - len(records)
        running = {state.number for state in job.states if not state.has_ended}
        for number, num_blocks in job.blocks_of.items():
            if number >= num_gone:
                record = records[number - num_gone]
                record.stored_tokens += num_blocks * self._layout.block_tokens[traced]
                if number not in running:
                    log_record(record)

    def _record(
        self,
        state: RequestState,
        match: Match,
        num_external_tokens: int,
        promoted: Mapping[str, Sequence[OffloadKey]],
    ) -> None:
        if state.record is not None:
            return
        tier_tokens = self._count_tier_hits(promoted, num_external_tokens)
        below_host = sum(tier_tokens.values())
        missed, miss = match.missed, None
        if missed is not None:
            missed, miss = self._explain(missed, match.no_state)
            if not state.may_load:
                miss = Miss(MissReason.NOT_LOOKED_UP, policy=miss.policy)
        elif state.has_given_up:
            miss = Miss(MissReason.NOT_LOOKED_UP if state.adapter is None else MissReason.ADAPTER_UNKNOWN)
        if miss is not None:
            self.metrics.add("misses", label=miss.reason)
        saved_s = self.prefills.speed.seconds_for(num_external_tokens)
        if saved_s:
            self.metrics.add("saved_seconds", saved_s)
        if state.tenant is not None:
            if saved_s:
                self.metrics.add("tenant_saved_seconds", saved_s, label=state.tenant)
            self.metrics.add("tenant_asked_tokens", state.request.num_tokens, label=state.tenant)
            self.metrics.add("tenant_hit_tokens", num_external_tokens, label=state.tenant)
        self.metrics.add("asked_tokens", state.request.num_tokens)
        self.metrics.add("device_hit_tokens", match.computed)
        self.metrics.add("host_hit_tokens", num_external_tokens - below_host)
        record = state.record = RequestRecord(
            time.time(),
            state.context.req_id,
            state.request.num_tokens,
            match.computed,
            num_external_tokens - below_host,
            missed[len(state.blocks.namespace) :].hex() if missed else None,
            disk_tokens=below_host,
            tier_tokens=tier_tokens,
            tenant=state.tenant,
            saved_s=saved_s,
        )
        if miss is not None:
            record.reason, record.age_s, record.policy = miss.reason, miss.age_s, miss.policy
            record.missed_in = miss.tier
        state.number = self._num_records
        self._num_records += 1
        self.records.append(record)
        log_record(record)

    def _explain(self, missed: OffloadKey, no_state: OffloadKey | None) -> tuple[OffloadKey, Miss]:
        """Returns the block that was missing and why: ``missed``, or the state without which it is of no use."""
        miss = self._manager.explain_miss(missed)
        if no_state is not None and miss.reason is MissReason.NOT_IN_TIME:
            # A lower tier has the block, and was not asked for it.
            missed, miss = no_state, self._manager.explain_miss(no_state)
        if key_group_idx(missed) in self._layout.states and miss.reason in (MissReason.NEVER_STORED, MissReason.RESET):
            # Not kept, or dropped when a later one was stored: a reset would have dropped the blocks before it too.
            miss = Miss(MissReason.NO_STATE, policy=miss.policy)
        return missed, miss

    def _count_tier_hits(
        self, promoted: Mapping[str, Sequence[OffloadKey]], num_external_tokens: int
    ) -> dict[str, int]:
        """Counts the tokens that lower tiers have delivered for a request. Returns how many each tier has. Without full
        attention, the few blocks that are loaded stand for all tokens before them."""
        left, by_tier = num_external_tokens, {}
        for tier, keys in promoted.items():
            tokens = min(left, self._layout.num_tokens(keys)) if self._layout.full else left
            if tokens:
                left -= tokens
                by_tier[tier] = tokens
                self.metrics.add("tier_hit_tokens", tokens, label=tier)
        return by_tier

    # Jobs and events.

    def reported(self, report: WorkerReport) -> None:
        """Counts what workers have copied."""
        for name in ("store_bytes", "store_seconds", "load_bytes", "load_seconds"):
            if amount := getattr(report, name):
                self.metrics.add(name, amount)

    def copied(self, jobs: Sequence[Job]) -> None:
        """Observes jobs that have ended."""
        if (moved := self._moved) is not None:
            for job in jobs:
                if not job.failed:
                    moved.add(HOST, job.keys, repeat(moved.block_bytes))
        if self._spans is None:
            return
        for job in jobs:
            for state in job.states:
                if (traced := state.traced) is not None:
                    copies = traced.store if job.is_store else traced.load
                    # Requests share a job only if each has one block in it.
                    num_blocks = len(job.keys) // len(job.states)
                    copies.add(num_blocks, job.failed, job.began, self._spans.now())
        for state in (state for job in jobs for state in job.states):
            self._make_spans(state)

    def stored(self, job: Job) -> None:
        """Counts the blocks of a store, which can be loaded now, and describes them for events."""
        self.metrics.add("store_blocks", len(job.lease.slots))
        self._count_stored(job)
        self._stored.update((block.key, (state, block)) for state, block in job.blocks)
        while len(self._stored) > MAX_PENDING_EVENTS:
            self._stored.popitem(last=False)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Returns the blocks that became loadable or were removed since the last call."""
        events = list(self._manager.take_events())
        if not self.describes_blocks:
            return events
        stored, self._stored = self._stored, OrderedDict()

        def describe(key: OffloadKey) -> BlockDescription | None:
            found = stored.get(key) or self._coming.get(key)
            if found is None:
                return None
            state, block = found
            return self._layout.describe(state.request, block, state.blocks.namespace)

        return [event if event.removed else replace(event, blocks=list(map(describe, event.keys))) for event in events]

    # Metrics and warnings.

    def read_metrics(self) -> None:
        """Sets gauges and adds the manager's counts."""
        self.metrics.take_in(self._manager.take_counts())
        if self._moved is not None:
            self.metrics.take_in(self._moved.take())

    def warn(self, message: str) -> None:
        """Logs ``message``, at most once in WARN_EVERY_S."""
        now = self._clock()
        if now - self._last_warning.get(message, float("-inf")) >= WARN_EVERY_S:
            self._last_warning[message] = now
            logger.warning(message)

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()

"""The scheduler half of the connector: which blocks to load, to store and to fence, engine-neutral.

Everything here runs on the engine's scheduler thread, and each module has one job: ``request`` is the state of one
request, ``lookups`` finds what can be loaded, ``loads`` makes loads, ``stores`` says what is stored, ``states`` which
states are kept, ``device_blocks`` knows what the device holds, ``leaving`` stores what leaves it, ``jobs`` has the
copies in progress, ``resets`` knows what is valid after a reset, ``adapters`` the bytes of adapters, ``observer`` makes
records and metrics. The scheduler half takes the engine's calls and passes them on.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from kvoffload.abc import KVBlocks, OffloadingEvent, OffloadingManager, Request, ScheduledStep, TieredManager
from kvoffload.cache.bills import MovedBytes
from kvoffload.cache.misses import MissMemory
from kvoffload.cache.tenants import Tenants
from kvoffload.connector.adapters import AdapterDigests
from kvoffload.connector.engine import EngineSpec, guarded
from kvoffload.connector.handover import Handover
from kvoffload.connector.jobs import JobTable
from kvoffload.connector.layout import NULL_BLOCK
from kvoffload.connector.leaving import LeavingBlocks
from kvoffload.connector.loads import LoadPlanner
from kvoffload.connector.lookups import Lookups, end_handover, locate
from kvoffload.connector.messages import COPIED, IDLE_WAIT_S, StepMeta, WorkerReport
from kvoffload.connector.observer import EventDescriptions, RequestObserver, make_spans
from kvoffload.connector.options import PARAM
from kvoffload.connector.request import QueuedRequests, RequestState
from kvoffload.connector.resets import BlockOrigins, PausedContents
from kvoffload.connector.stores import StorePlanner
from kvoffload.observe.metrics import Metrics
from kvoffload.observe.trace import TraceRecorder

logger = logging.getLogger(__name__)

WEIGHTS_CHANGED = (
    "kvoffload: THE WEIGHTS HAVE CHANGED in the running engine: all offloaded blocks are forgotten, and what is stored "
    "from now on serves no later process. After an update call reset_prefix_cache(reset_connector=True), which also "
    "keeps the engine's own cache from answering with old KV"
)
OFF = "kvoffload: OFFLOADING IS OFF: %s failed; requests are computed from here on"
OTHERS_FAILED = (
    "kvoffload: another connector failed to load blocks, and requests have computed with them: nothing that requests "
    "in progress have computed is stored"
)


def _has_tokens(step: ScheduledStep) -> bool:
    """Whether the step computes anything. False if it cannot be read: workers must not look at the weights then."""
    with contextlib.suppress(Exception):
        return any(step.num_scheduled_tokens.values())
    return False


def _answer(state: RequestState, handover: Handover | None) -> dict[str, Any] | None:
    """Returns what the client of a request that has ended is answered."""
    options = state.options
    # Routers send the answer to a remote decode on in place of what the client has sent.
    said = options.to_pass_on() if options.is_passed_on else state.observed.usage()
    if handover is not None:
        said |= handover.to_options()
        return {"do_remote_prefill": True, "do_remote_decode": False, PARAM: said}
    return {PARAM: said} if options.is_sent and state.observed.record is not None else None


class OffloadingConnectorScheduler:
    """Decides, per request and step, what is loaded and stored; talks to ``manager`` in batches.

    ``tenants`` says what precedes every block hash. With ``misses``, blocks are stored when they leave the device, for
    a ``manager`` made for that, which explains misses from there. ``recorder`` gets every request that was given device
    blocks, when it ends. ``slot_bytes``: the bytes of a block in each host pool.

    Call it from the engine's scheduler thread only. No method raises for anything that goes wrong while serving: after
    an unexpected error ``off`` is True, nothing more is loaded or stored, and every promised load or store is reported
    as failed. The parts (``requests``, ``jobs``, ``stores``, ...) are public for tests and tools.
    """

    def __init__(
        self,
        manager: OffloadingManager,
        engine: EngineSpec,
        *,
        tenants: Tenants | None = None,
        misses: MissMemory | None = None,
        load_deadline_ms: float = 1000.0,
        recorder: TraceRecorder | None = None,
        slot_bytes: Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.manager = manager
        self.off = False
        self.layout = layout = engine.layout
        self.requests: dict[str, RequestState] = {}
        """By id, every request that was looked up and has not ended."""
        tenants, deadline_s = tenants or Tenants(b""), load_deadline_ms / 1000
        block_bytes = sum(slot_bytes)
        moved = MovedBytes(tenants, block_bytes) if tenants.names else None
        spans = None if engine.trace_headers is None else make_spans(engine.trace_headers, block_bytes)
        self.metrics = Metrics(self._read_metrics)
        described = EventDescriptions(layout) if engine.enable_events else None
        self.observer = RequestObserver(manager, layout, self.metrics, recorder, spans, described, clock, moved)
        self.jobs = jobs = JobTable(manager, layout, self.observer, engine.num_workers or 1)
        leaving = None if misses is None else LeavingBlocks(jobs, misses, engine.next_free, slot_bytes)
        self.stores = StorePlanner(jobs, leaving)
        self.paused = PausedContents(jobs)
        adapters = AdapterDigests(engine.adapter_of, jobs, deadline_s) if engine.adapter_of else None
        self.sound = BlockOrigins(has_adapters=adapters is not None)
        self.loads = LoadPlanner(jobs, self.sound, leaving)
        loading = jobs.keys_loading if engine.share_loads else {}
        self.lookups = Lookups(jobs, loading, self.paused, adapters, leaving, deadline_s)
        self.queued = QueuedRequests(manager, engine, tenants, adapters, self.sound)
        self.records = self.observer.records
        """Records of the latest requests: what each asked for and found."""
        self.metrics.set("pool_blocks", manager.most_blocks())
        self.metrics.set("off", 0)

    @guarded(lambda self, request: None)
    def on_new_request(self, request: Request) -> None:
        """Takes note of a request that the engine has queued. If the engine does not look it up in its next step, what
        lower tiers hold of it is read ahead. An engine need not call this."""
        self.queued.add(request)

    @guarded(lambda self, request, num_computed_tokens: (0, False))
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Returns how many tokens past the device's own ``num_computed_tokens`` can be loaded.

        ``(n, True)``: n tokens, loaded asynchronously; ``(0, False)``: none; ``(None, False)``: ask again at the next
        step. At least one token is left to compute. A request whose load failed is never offered another: in the queue
        it may precede requests that hold the blocks which another load would need. This includes the load of another
        connector, which has failed if the request is looked up again before it was in a step.
        """
        state = self._state(request)
        if state.filled.of_others:
            state.filled.of_others, state.may_load, state.lookup.match = frozenset(), False, None
        match = locate(self.lookups, state, num_computed_tokens)
        if match.tokens is None and self.observer.descriptions is not None:
            self.observer.descriptions.expect(state)
        if (leaving := self.stores.leaving) is not None:
            behind = request.num_tokens - num_computed_tokens
            leaving.expect(request.request_id, behind if match.tokens is None else match.tokens)
        return match.tokens, bool(match.tokens)

    @guarded(lambda self, request, blocks, num_tokens: self.loads.fail(self.requests, request, blocks, num_tokens))
    def update_state_after_alloc(self, request: Request, blocks: KVBlocks, num_external_tokens: int) -> None:
        """Starts the load of ``num_external_tokens`` tokens of the offer into ``blocks``, just allocated, and pins the
        slots that it reads. Zero tokens: the engine has declined the offer, or there was none."""
        state = self._state(request)
        match = state.take_match()
        self.jobs.allocated.add(request.request_id)
        self.stores.allocated(state, match, num_external_tokens)
        if num_external_tokens and not self.loads.begin(state, match, blocks, num_external_tokens):
            self.loads.fail(self.requests, request, blocks, num_external_tokens)
        elif self.queued.engine.is_beside_others and match is not None:
            self.loads.leave_to_others(state, blocks)
        promoted = self.manager.release_request(state.context)
        self.observer.allocated(state, match, num_external_tokens, promoted)
        if state.lookup.handover is not None and match is not None:
            end_handover(self.lookups, state, match.computed + num_external_tokens)
        state.lookup.end_wait()

    @guarded(lambda self, step: self.jobs.take_step(_has_tokens(step)))
    def build_connector_meta(self, step: ScheduledStep) -> StepMeta:
        """Returns the loads, stores and fences of this step, for the workers."""
        if self.layout.parts.is_divided:
            step = self.layout.parts.step(step)
        has_tokens, jobs, meta = _has_tokens(step), self.jobs, self.jobs.meta
        if self.paused.is_hidden:
            meta.check_weights = self.paused.begin_step(has_tokens)
        if (adapters := self.lookups.adapters) is not None:
            adapters.begin_step(meta, step.num_scheduled_tokens, self.requests)
        if self.queued.new:
            self.queued.read_ahead()
        jobs.poll(0.0 if has_tokens else IDLE_WAIT_S)
        requests, preempted = self.requests, tuple(step.preempted)
        if preempted:
            self.stores.preempt(preempted, requests)
        leaving = jobs.handed_out
        if step.block_ids:
            leaving += self.stores.take_tables(step, requests, self.sound)
        leaving += step.written
        handed_out = set(leaving) - {NULL_BLOCK}
        if jobs.finished:
            # Their device blocks may have been handed out again in this very step: then they are read first.
            self.stores.store_finished(jobs.finished)
            self.observer.planned_last_stores(jobs.finished)
        if (leaving_blocks := self.stores.leaving) is not None:
            self.loads.cut(handed_out)
            loading = [at for spec in meta.loads.values() for at in spec.device.block_ids.tolist()]
            leaving_blocks.store(loading, leaving, step.overwritten)
            leaving_blocks.store_forgotten(requests.values())
        if jobs.jobs:
            jobs.fence(step, requests, handed_out)
        if self.observer.prefilling:
            self.observer.measure_prefills(step.num_scheduled_tokens)
        self.stores.store_running(step.num_scheduled_tokens, requests)
        if step.boundary_states:
            # A request may have lost its blocks and compute on new ones in the same step.
            self.stores.store_states(step, set(preempted) - step.replaced, requests)
        if jobs.held:
            meta.releases += jobs.take_unheld(self.observer.clock())
        return jobs.take_step(has_tokens)

    @guarded(lambda self, report: None)
    def update_connector_output(self, report: WorkerReport) -> None:
        """Takes in what the workers have done. Reports of unknown jobs are ignored."""
        if report.changed_at == self.jobs.changes.resets:
            # Before anything that the same workers report as stored: it may belong to either weights.
            self.metrics.add("weight_changes")
            self.observer.warn(WEIGHTS_CHANGED)
            self.reset()
            self.paused.drop()
        if self.paused.checks:
            self.paused.take_report(report)
        if (adapters := self.lookups.adapters) is not None and (report.adapters or report.answers):
            states = [*self.requests.values(), *self.jobs.finished]
            self.sound.discard(adapters.take_report(report, states))
        self.jobs.poll()
        for name in COPIED:
            if amount := getattr(report, name):
                self.metrics.add(name, amount)
        if self.stores.leaving is not None:
            self.stores.leaving.measure(report)
        if report.done:
            reported = self.jobs.take_reports(report)
            ended = [job for job in reported if (self.stores if job.is_store else self.loads).end_job(job)]
            self.observer.copied(ended)
        if report.broken:
            self.switch_off("a worker's transfer engine")

    @guarded(lambda self, device_blocks: None)
    def loads_of_others_failed(self, device_blocks: Collection[int]) -> None:
        """Takes note that another connector of the engine has failed to fill these device blocks. Call it before the
        ``update_connector_output`` of the same step.

        Requests that waited for their load have computed nothing with these blocks. Otherwise they were computed with
        in the step that reports them, and the engine computes them again: no store in progress counts, and neither
        what requests in progress have computed nor what was computed with it is stored.
        """
        awaited = frozenset().union(*(state.filled.of_others for state in self.requests.values()))
        if not awaited.issuperset(device_blocks):
            self.observer.warn(OTHERS_FAILED)
            for job in self.jobs.jobs.values():
                job.failed |= job.is_store
            self._distrust_device()

    def _distrust_device(self) -> None:
        """Stores nothing that is on the device now, and nothing that is computed with it."""
        self.stores.reset()
        self.sound.reset()
        for state in self.requests.values():
            state.forget_stores()
            self.manager.release_request(state.context)
        self.observer.planned_last_stores(self.jobs.finished)
        self.jobs.finished.clear()

    @guarded(lambda self, request: self._forget(request))
    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """``(False, None)``: the engine may free the blocks at once, fences protect what is being stored.

        True for a request with ``do_remote_decode``: its blocks stay until all of it is in the host pool,
        at most the load deadline, and then it is reported once. If a tier is shared, the answer is what a client sends
        with the same request to the server that is to go on. The answer to a client that has sent options says, under
        the key PARAM, what its request has found and had retained, or with ``do_remote_decode`` repeats the options.
        """
        if (state := self.requests.pop(request.request_id, None)) is None:
            if (queued := self.queued.take(request)) is not None:
                self.manager.release_request(queued.context)
            return False, None
        self.manager.release_request(state.context)
        self.stores.end(state)
        self.observer.end(state, *self.stores.retain(state))
        if has_blocks := any(state.blocks.tables):
            self.jobs.finished[state] = request.num_computed_tokens
        if not has_blocks or not state.options.remote_decode:
            return False, _answer(state, None)
        if (handover := self.stores.hand_over(state)) is not None:
            self.metrics.add("handovers", label="sent")
        self.jobs.held[request.request_id] = state, self.observer.clock() + self.lookups.deadline_s
        return True, _answer(state, handover)

    def _forget(self, request: Request) -> tuple[bool, None]:
        self.requests.pop(request.request_id, None)
        return False, None

    @guarded(lambda self: self.jobs.has_promises)
    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping although no request needs it to."""
        if self.jobs.has_promises or self.jobs.jobs or self.jobs.finished:
            return True
        return isinstance(self.manager, TieredManager) and self.manager.has_pending_writes

    @guarded(lambda self: [])
    def take_events(self) -> Iterable[OffloadingEvent]:
        """Returns the blocks that became loadable or were removed since the last call."""
        events, descriptions = self.manager.take_events(), self.observer.descriptions
        return list(events) if descriptions is None else descriptions.add_to(events)

    @guarded(lambda self, is_pause=False: None)
    def reset(self, is_pause: bool = False) -> None:
        """Drops every block. KV that requests in progress have computed so far, or compute on top of it, is not stored:
        it may belong to weights that are gone, as may older KV in the engine's cache. Jobs in progress count as failed.

        ``is_pause``: the engine pauses or falls asleep. No block is dropped yet, and none is found before all workers
        have compared all of their weights with those that the blocks were computed with, at the first lookup or
        computation; then all are dropped, unless the weights are the same everywhere. Without ``is_pause`` this holds
        for the blocks of shared tiers only.
        """
        self.paused.reset(keeps=is_pause)
        # With the next step workers learn of the reset: a load in it would pass for one that began afterwards.
        self.observer.copied(self.loads.break_unsent())
        self._distrust_device()
        if is_pause:
            # The time of a pause does not count as a wait for blocks.
            for state in self.requests.values():
                state.lookup.end_wait()

    def shutdown(self) -> None:
        """Releases everything, even if offloading is off: lower tiers have threads and files. May be called twice."""
        if self.observer.recorder is not None:
            self.observer.recorder.close()
        try:
            self.paused.drop()
            self.manager.shutdown()
        except Exception:
            logger.exception("kvoffload: shutting down failed")

    def _state(self, request: Request) -> RequestState:
        if (state := self.requests.get(request.request_id)) is None:
            state = self.requests[request.request_id] = self.queued.take(request) or self.queued.make(request)
            self.observer.begin(state)
        return state

    @guarded(lambda self: None)
    def _read_metrics(self) -> None:
        self.metrics.take_in(self.manager.take_counts())
        if self.observer.moved is not None:
            self.metrics.take_in(self.observer.moved.take())

    def switch_off(self, where: str) -> None:
        """Ends offloading for good: promised loads and stores count as failed. Logs the exception in progress."""
        logger.error(OFF, where, exc_info=sys.exception())
        self.off = True
        self.metrics.set("off", 1)
        self.jobs.break_off()
        self.queued.clear()

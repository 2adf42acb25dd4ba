"""The scheduler half of the connector: which blocks to load, to store and to fence, engine-neutral."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, TypeVar, cast

import numpy as np

from kvoffload.abc import (
    BlockDescription,
    BlockNotReadyError,
    DeviceSpec,
    IntegrityError,
    KVBlocks,
    KVGroup,
    LoadStoreSpec,
    LookupState,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    Request,
    ScheduledStep,
    TransferSpec,
)
from kvoffload.cache.manager import MAX_PENDING_EVENTS
from kvoffload.connector.control import RequestControl
from kvoffload.connector.layout import NULL_BLOCK, Block, Layout
from kvoffload.connector.messages import StepMeta, WorkerReport
from kvoffload.connector.request import Match, RequestState
from kvoffload.connector.snapshot import JobSnapshot, RequestSnapshot, SchedulerSnapshot
from kvoffload.observe.metrics import Metrics
from kvoffload.observe.records import RECORD_RING_SIZE, RequestRecord
from kvoffload.observe.trace import TraceRecorder

logger = logging.getLogger(__name__)

WARN_EVERY_S = 60.0
IDLE_WAIT_S = 0.002
"""How long a step without tokens waits for blocks on their way from a lower tier, so that an idle engine does not spin
against the threads that read them."""
READ_POLICY_EVERY_S = 1.0
"""How old the gauges of a self-tuning policy may be. Engines take metrics in every step."""
WEIGHTS_CHANGED = (
    "kvoffload: THE WEIGHTS HAVE CHANGED in the running engine: all offloaded blocks are forgotten, and what is stored "
    "from now on serves no later process. After an update call reset_prefix_cache(reset_connector=True), which also "
    "keeps the engine's own cache from answering with old KV"
)
MAX_WAITS_PER_REQUEST = 3
"""A request that has waited, had its answer and could not be scheduled may find less when it is looked up again, and
wait again: so often in all until it is given device blocks, each time up to the load deadline."""
MIN_PREFILL_SAMPLE = 64
"""Tokens; what takes less says little of how fast the engine computes."""
JOB_IDS = itertools.count()
"""Numbers of jobs, of all scheduler halves of this process: none takes another's report for that of its own job."""

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(slots=True, eq=False)
class _Due:
    """Blocks of one request that are to be stored when ``num_computed`` of its tokens are computed."""

    state: RequestState
    num_computed: int
    blocks: list[Block]

    @property
    def keys(self) -> list[OffloadKey]:
        return [block.key for block in self.blocks]


@dataclass(slots=True, eq=False)
class _Job:
    state: RequestState
    keys: list[OffloadKey]
    is_store: bool
    pending: int
    """Workers that have not reported yet."""
    device_blocks: frozenset[int]
    blocks: list[Block] = field(default_factory=list)
    """What is stored, if events are to describe it."""
    failed: bool = False
    epoch: int = 0
    """How often caches had been reset when it began."""


class _Shelf(Enum):
    """What the manager's contents are worth after a reset."""

    EMPTY = auto()
    """No contents are shelved: those of the manager are valid."""
    RESET = auto()
    """They are from before the reset, and are dropped when the engine goes on, unless it has slept."""
    AWAKE = auto()
    """The engine has slept since. They are valid again if all workers find that their weights are the same."""


def _guarded(fallback: Callable[..., Any]) -> Callable[[Method], Method]:
    """Nothing raises into the engine: an unexpected error switches offloading off, and from then on
    ``fallback`` answers in the method's place."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def guarded(self: OffloadingConnectorScheduler, *args: Any, **kwargs: Any) -> Any:
            if not self.off:
                try:
                    return method(self, *args, **kwargs)
                except Exception:
                    self.switch_off(method.__name__)
            return fallback(self, *args, **kwargs)

        return cast(Method, guarded)

    return decorate


class OffloadingConnectorScheduler:
    """Decides, per request and step, what is loaded and stored; talks to ``manager`` in batches.

    ``groups`` are the engine's KV cache groups. ``hash_block_size`` is the tokens that one block hash covers, by
    default the greatest common divisor of the device block sizes. ``namespace`` goes in front of every block
    hash. ``num_workers`` workers report each job. ``share_loads``: a request whose blocks are being loaded for
    another waits, to find them on the device; for engines that share device blocks between requests, and schedule
    waiting requests that hold some before those that hold none. ``describe_blocks``: stored events carry a
    BlockDescription. ``recorder`` is told of every request that was given device blocks, when it ends. ``may_sleep``:
    the engine calls ``wake_up`` after each sleep, and a reset may belong to one. Call it from
    the engine's scheduler thread only. No method raises for anything that goes wrong in service: after an unexpected
    error ``off`` is True, no more is loaded or stored, and every promise made is reported as failed. Raises ConfigError
    if block sizes do not divide.
    """

    def __init__(
        self,
        manager: OffloadingManager,
        *,
        groups: Sequence[KVGroup],
        hash_block_size: int | None = None,
        namespace: bytes = b"",
        num_workers: int = 1,
        share_loads: bool = True,
        describe_blocks: bool = False,
        load_deadline_ms: float = 1000.0,
        recorder: TraceRecorder | None = None,
        may_sleep: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.manager = manager
        self.metrics = Metrics(self._read_metrics)
        self._read_policy_at = float("-inf")
        self.records: deque[RequestRecord] = deque(maxlen=RECORD_RING_SIZE)
        """The latest requests: what each asked for and found."""
        self.off = False
        self._layout = layout = Layout(groups, hash_block_size, namespace)
        self._max_tokens = manager.num_blocks // layout.blocks_per_align * layout.align
        """Of a chain longer than the pool only the head can be kept: its tail would push it out."""
        self._num_workers = num_workers
        self._share_loads = share_loads
        self._descriptions: dict[OffloadKey, BlockDescription] | None = {} if describe_blocks else None
        """Of blocks that became loadable since events were last taken."""
        self._deadline_s = load_deadline_ms / 1000
        self._recorder = recorder
        self._may_sleep = may_sleep
        self._clock = clock
        self._epoch = 0
        """Grows whenever a remembered lookup may have become wrong."""
        self._load_epoch = 0
        """Grows whenever a load starts or ends: what requests that wait for another's load wait for."""
        self._states: dict[str, RequestState] = {}
        self._jobs: dict[int, _Job] = {}
        self._keys_loading: dict[OffloadKey, int] = {}
        """Keys on their way to the device, and for how many loads."""
        self._finished: list[tuple[RequestState, int]] = []
        """Requests that finished since the last step, with their computed tokens."""
        self._held: dict[str, tuple[RequestState, float]] = {}
        """Finished requests whose device blocks the engine keeps for us, and until when at most."""
        self._allocated: set[str] = set()
        """Requests that were given blocks since the last step."""
        self._handed_out: set[int] = set()
        """Device blocks given to loads since the last step."""
        self._meta = StepMeta()
        self._num_resets = 0
        self._sound_blocks: set[int] | None = None
        """Device blocks that were filled since the last reset with nothing from before it; None if there was none. Of
        all others that the engine finds in its own cache it is not known whether they belong to the weights of now."""
        self._was_reset = False
        """Since the last step: one is needed to tell, by events and metrics."""
        self._shelf = _Shelf.EMPTY
        self._check: tuple[int, int] | None = None
        """The job in which workers compare their weights after a sleep, and how many have not reported yet."""
        self._must_check = False
        """The next step must begin that job: a request needs the answer."""
        self._last_warning: dict[str, float] = {}
        self.metrics.set("pool_blocks", manager.num_blocks)
        self.metrics.set("off", 0)

    # Lookup.

    @_guarded(lambda self, request, num_computed_tokens: (0, False))
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens past the device's own ``num_computed_tokens`` can be loaded.

        ``(n, True)``: n tokens, loaded asynchronously; ``(0, False)``: none; ``(None, False)``: ask again
        at the next step. At least one token is left to compute. A request whose load failed is never offered
        another: it may stand before requests that hold what another load would need.
        """
        state = self._state(request)
        match = state.match
        if match is None or not self._still_holds(match, num_computed_tokens):
            match = state.match = self._look_up(state, num_computed_tokens)
            if match.tokens is not None and state.waiting_since is not None:
                state.waiting_since = None
                state.num_waits += 1
        return match.tokens, bool(match.tokens)

    def _still_holds(self, match: Match, num_computed_tokens: int) -> bool:
        epoch = self._load_epoch if match.tokens is None else self._epoch
        return (match.epoch, match.computed) == (epoch, num_computed_tokens) and self._clock() < match.expires

    def _look_up(self, state: RequestState, computed: int) -> Match:
        state.extend_keys()
        if self._shelf is _Shelf.AWAKE and (wait := self._wait(state, computed)):
            self._must_check = True
            return wait
        self._drop_shelf()
        if not state.touched:
            state.touched = True
            self.manager.touch(state.keys_in_order(), state.context)
        if not state.may_load or computed % self._layout.device_align:
            return Match(self._epoch, computed, 0, None)
        if self._next_is_on_its_way(state, computed) and (wait := self._wait(state, computed)):
            return wait
        may_wait = state.num_waits < MAX_WAITS_PER_REQUEST
        end, missed, known = self._longest_hit(state, computed, state.context if may_wait else None)
        if not known or (end > computed and self._on_their_way(state, computed, end)):
            wait = self._wait(state, computed)
            if wait is not None:
                return wait
        if not known:
            # It may not wait any longer: without a context the manager tells what is there now.
            end, missed, _ = self._longest_hit(state, computed, None)
        if end - computed < self._layout.align:
            return Match(self._epoch, computed, 0, missed)
        return Match(self._epoch, computed, self._last_loadable(state, end) - computed, missed)

    def _wait(self, state: RequestState, computed: int) -> Match | None:
        """The request asks again when a load has started or ended, or the manager says that it may find more, or at the
        deadline. Not after that, and not more often than MAX_WAITS_PER_REQUEST."""
        if state.num_waits >= MAX_WAITS_PER_REQUEST:
            return None
        now = self._clock()
        if state.waiting_since is None:
            state.waiting_since = now
        deadline = state.waiting_since + self._deadline_s
        return Match(self._load_epoch, computed, None, None, deadline) if now < deadline else None

    @staticmethod
    def _last_loadable(state: RequestState, end: int) -> int:
        """One token at least is left to compute."""
        return min(end, state.request.num_tokens - 1)

    def _longest_hit(
        self, state: RequestState, computed: int, context: ReqContext | None
    ) -> tuple[int, OffloadKey | None, bool]:
        """Up to which token all groups have what a request needs that goes on there; the first key that was missing
        for more; and whether all of it is known yet.

        Full-attention groups need every block from ``computed`` on, the others only those that the next token
        attends to. Each group's answer shortens the next one's question until all agree.
        """
        layout, known, missed = self._layout, True, None
        end = state.most_tokens
        for g, group in enumerate(layout.groups):
            end = min(end, len(state.keys[g]) * group.block_tokens)
        end = end // layout.align * layout.align
        for g in layout.full:
            size = layout.groups[g].block_tokens
            first = computed // size
            if first * size >= end:
                continue
            hits = self.manager.lookup(state.keys[g][first : end // size], context)
            known &= hits is not None
            found = (first + (hits or 0)) * size
            if found < end:
                end, missed = found // layout.align * layout.align, state.keys[g][found // size]
        while end > computed:
            gap = self._first_gap(state, computed, end, context)
            if gap is None:
                break
            g, index, found = gap
            missed = state.keys[g][index]
            if found is LookupState.RETRY:
                return computed, missed, False
            end = index * layout.groups[g].block_tokens // layout.align * layout.align
        return max(end, computed), missed, known

    def _first_gap(
        self, state: RequestState, computed: int, end: int, context: ReqContext | None
    ) -> tuple[int, int, LookupState] | None:
        """The first block missing of those that windows need in order to go on at ``end``, in the group where a hit
        ends soonest for it. Any hit that reaches past that block needs it too. A block of which it is not known yet
        counts only if none is missing for sure."""
        gaps, unknown = [], None
        for g in self._layout.windows:
            needed = self._layout.needed_blocks(g, computed, self._last_loadable(state, end))
            states = self.manager.lookup_each(state.keys[g][needed.start : needed.stop], context)
            for index, found in zip(needed, states, strict=True):
                if found is LookupState.RETRY:
                    unknown = unknown or (g, index, found)
                elif found is not LookupState.HIT:
                    gaps.append((index * self._layout.groups[g].block_tokens, g, index, found))
                    break
        return min(gaps)[1:] if gaps else unknown

    def _next_is_on_its_way(self, state: RequestState, computed: int) -> bool:
        """Whether the first block it lacks is being loaded for another, as in a convoy: no need to look up more."""
        if not self._share_loads or not self._keys_loading or not self._layout.full:
            return False
        g = self._layout.full[0]
        first = computed // self._layout.groups[g].block_tokens
        whole = state.most_tokens // self._layout.align * self._layout.align
        return computed < whole and first < len(state.keys[g]) and state.keys[g][first] in self._keys_loading

    def _on_their_way(self, state: RequestState, computed: int, end: int) -> bool:
        if not self._share_loads or not self._keys_loading:
            return False
        loading, last = self._keys_loading.keys(), self._last_loadable(state, end)
        for g, keys in enumerate(state.keys):
            needed = self._layout.needed_blocks(g, computed, last)
            if not loading.isdisjoint(keys[needed.start : needed.stop]):
                return True
        return False

    @_guarded(lambda self, request, blocks, num_external_tokens: self._break_load(request, blocks, num_external_tokens))
    def update_state_after_alloc(self, request: Request, blocks: KVBlocks, num_external_tokens: int) -> None:
        """The engine has allocated ``blocks`` and takes ``num_external_tokens`` of what was offered.

        Records the load and pins what it reads. Zero means that it declined, or had no offer.
        """
        state = self._state(request)
        match, state.match, state.waiting_since, state.num_waits = state.match, None, None, 0
        state.has_kv = True
        self._allocated.add(request.request_id)
        state.computed_at_load = 0 if match is None else match.computed
        if match is not None:
            self._record(state, match, num_external_tokens)
            state.forget_loaded()
        if num_external_tokens == 0:
            self.manager.release_request(state.context)
            # Without a match it was told of its blocks before: it goes on with what was loaded.
            state.prefill_since = None if match is None else self._clock()
            state.prefill_until = 0
            return
        state.prefill_since = None
        if match is None or not self._was_offered(match, num_external_tokens):
            self._break_load(request, blocks, num_external_tokens)
            return
        spans, device = self._load_device_spec(blocks, match.computed, match.computed + num_external_tokens)
        keys = [key for g, span in spans for key in state.keys[g][span.start : span.stop]]
        try:
            host = self.manager.prepare_load(keys, state.context)
        except BlockNotReadyError:
            logger.exception("kvoffload: a promised block is gone; the request computes instead")
            self._break_load(request, blocks, num_external_tokens)
            return
        job_id = self._new_job(_Job(state, keys, False, self._num_workers, frozenset()))
        self._meta.loads[job_id] = TransferSpec(request.request_id, host, device)
        self.manager.release_request(state.context)
        self._handed_out.update(device.block_ids.tolist())
        if self._sound_blocks is not None:
            self._sound_blocks.update(device.block_ids.tolist())
        for key in keys:
            self._keys_loading[key] = self._keys_loading.get(key, 0) + 1
        state.loading = True
        if not state.control.remote_decode:
            state.loaded = [span for _, span in spans]
        self._load_epoch += 1

    def _was_offered(self, match: Match, num_external_tokens: int) -> bool:
        """Fewer tokens will do too, unless a group has a window: what it needs to end sooner was not looked up."""
        offered = match.tokens or 0
        return num_external_tokens == offered or (num_external_tokens < offered and not self._layout.windows)

    def _load_device_spec(
        self, blocks: KVBlocks, computed: int, end: int
    ) -> tuple[list[tuple[int, range]], DeviceSpec]:
        """Where tokens ``computed`` to ``end`` go, and per group which offloaded blocks hold them. The engine has given
        null blocks to what the next token does not attend to."""
        spans, ids, sizes, firsts = [], [], [], []
        for g, (group, table) in enumerate(zip(self._layout.groups, blocks.get_block_ids(), strict=True)):
            first = computed // group.device_block_size
            last = min(-(-end // group.device_block_size), len(table))
            while first < last and table[first] == NULL_BLOCK:
                first += 1
            factor = group.block_size_factor
            spans.append((g, range(first // factor, -(-last // factor) if first < last else first // factor)))
            ids += table[first:last]
            sizes.append(len(table[first:last]))
            firsts.append(first)
        return spans, DeviceSpec(np.array(ids, dtype=np.int64), tuple(sizes), tuple(firsts))

    def _break_load(self, request: Request, blocks: KVBlocks, num_external_tokens: int) -> None:
        """A load that was promised cannot be done: the workers report it as failed."""
        if num_external_tokens:
            state = self._state(request)
            state.may_load = False
            self.manager.release_request(state.context)
            self._meta.broken_loads[request.request_id] = []
            self.metrics.add("load_failures")
            end = state.computed_at_load + num_external_tokens
            # What is not what it should be raised an error before, and may do so again: not into the engine.
            with contextlib.suppress(Exception):
                _, device = self._load_device_spec(blocks, state.computed_at_load, end)
                self._meta.broken_loads[request.request_id] = device.block_ids.tolist()

    # Steps.

    @_guarded(lambda self, step: self._take_meta(step))
    def build_connector_meta(self, step: ScheduledStep) -> StepMeta:
        """The loads, stores and fences of this step, for the workers."""
        has_tokens = any(step.num_scheduled_tokens.values())
        if self._shelf is _Shelf.RESET and has_tokens:
            self._drop_shelf()
        elif self._shelf is _Shelf.AWAKE and self._check is None and (has_tokens or self._must_check):
            self._check = next(JOB_IDS), self._num_workers
            self._meta.check_weights = self._check[0]
        self._poll()
        if not has_tokens:
            self.manager.wait(IDLE_WAIT_S)
            self._poll()
        handed_out = self._handed_out
        for req_id in step.preempted:
            self._forget_blocks(req_id)
        for req_id, tables in step.block_ids.items():
            state = self._states.get(req_id)
            new, found = set[int](), set[int]()
            if state is not None and req_id in step.replaced:
                state.set_blocks(tables)
                computed = state.request.num_computed_tokens
                # What is computed already was shared with it, or loaded: loads are in the set.
                for group, table in zip(self._layout.groups, tables, strict=True):
                    first = computed // group.device_block_size
                    new.update(table[first:])
                    if self._sound_blocks is not None:
                        found.update(table[:first])
            else:
                if state is not None:
                    state.add_blocks(tables)
                new.update(*tables)
            handed_out |= new
            self._trace_soundness(state, new, found)
        handed_out.discard(NULL_BLOCK)
        # Blocks of finished requests may have been handed out again in this very step: then they are read first.
        self._store([self._due(state, computed, computed) for state, computed in self._finished])
        for state, _ in self._finished:
            if state.touched:
                keys = state.keys_in_order()
                self.manager.reorder_chain(keys, state.stored, state.context)
                self.manager.offer_chain(keys, state.context)
        self._finished.clear()
        self._fence(handed_out, step.overwritten)
        running = []
        for req_id, scheduled in step.num_scheduled_tokens.items():
            state = self._states.get(req_id)
            if state is not None:
                before = state.request.num_computed_tokens
                if before + scheduled >= state.store_at:
                    running.append(self._due(state, before + scheduled, before))
                if state.prefill_since is not None:
                    self._measure_prefill(state)
        self._store(running)
        self._release_held()
        self._handed_out = set()
        self._allocated.clear()
        return self._take_meta(step)

    def _trace_soundness(self, state: RequestState | None, new: set[int], found: set[int]) -> None:
        """After a reset: a request that goes on from blocks of before it stores nothing, and the blocks that it fills
        are no sounder than those."""
        if self._sound_blocks is None:
            return
        found.discard(NULL_BLOCK)
        if state is not None and not found <= self._sound_blocks:
            state.may_store = False
        if state is not None and state.may_store:
            self._sound_blocks |= new
        else:
            self._sound_blocks -= new

    @_guarded(lambda self: None)
    def _read_metrics(self) -> None:
        self.metrics.set("pool_used_blocks", self.manager.num_used_blocks)
        self.metrics.take_in(self.manager.take_counts())
        now = self._clock()
        if now < self._read_policy_at:
            return
        self._read_policy_at = now + READ_POLICY_EVERY_S
        state = self.manager.policy_state()
        for rule, score in state.get("scores", {}).items():
            self.metrics.set("policy_rule", float(rule == state["rule"]), label=rule)
            self.metrics.set("policy_score", score, label=rule)

    def _poll(self) -> None:
        if self.manager.poll():
            self._epoch += 1
            self._load_epoch += 1

    def _measure_prefill(self, state: RequestState) -> None:
        """Once a request that computes its prompt has its first new token: how long that took, in its company."""
        assert state.prefill_since is not None
        if state.prefill_until == 0:
            state.prefill_until = state.request.num_tokens
        elif state.request.num_tokens > state.prefill_until:
            tokens = state.prefill_until - state.computed_at_load
            if tokens >= MIN_PREFILL_SAMPLE:
                self.manager.observe_prefill(tokens, self._clock() - state.prefill_since)
            state.prefill_since = None

    def _fence(self, handed_out: set[int], overwritten: Collection[int]) -> None:
        """Stores that read blocks which now belong to others end before the step's forward pass; those that read blocks
        which may be overwritten by then count as failed, whatever the workers say."""
        if not handed_out and not overwritten:
            return
        for job_id, job in self._jobs.items():
            if job.is_store and not job.device_blocks.isdisjoint(handed_out):
                self._meta.fences.append(job_id)
            if job.is_store and not job.device_blocks.isdisjoint(overwritten):
                job.failed = True

    def _take_meta(self, step: ScheduledStep) -> StepMeta:
        meta, self._meta = self._meta, StepMeta()
        self._was_reset = False
        meta.has_tokens = any(step.num_scheduled_tokens.values())
        meta.epoch = self._num_resets
        return meta

    def _forget_blocks(self, req_id: str) -> None:
        state = self._states.get(req_id)
        if state is None:
            return
        state.forget_blocks()
        state.may_store = True
        # It may have got new blocks already, in the step that tells that it lost the old ones.
        if req_id not in self._allocated:
            state.prefill_since = None
            state.forget_loaded()
            state.match = None
            state.has_kv = False

    def _due(self, state: RequestState, num_computed: int, num_before: int) -> _Due | None:
        """The request's whole blocks of computed, known tokens that were not stored yet."""
        if min(num_computed, state.request.num_tokens) < state.store_at or not state.may_store or state.loading:
            return None
        if not state.control.store:
            return None
        return _Due(state, num_computed, state.due_blocks(num_computed, num_before, self._max_tokens))

    def _store(self, maybe_due: list[_Due | None]) -> None:
        """Starts what can be stored: single blocks, as decoding makes them, in one call if there is room for all, and
        each prompt's in one of its own, since policies judge a chain by its depth."""
        single: list[_Due] = []
        dues: list[_Due] = []
        for due in maybe_due:
            if due is None:
                continue
            if due.blocks and not due.state.refused:
                (single if len(due.blocks) == 1 else dues).append(due)
                continue
            if due.blocks:
                self.manager.refuse(due.keys, due.state.context)
            due.state.stored_up_to(due.num_computed, self._max_tokens)
        if len(single) > 1:
            output = self.manager.prepare_store([key for due in single for key in due.keys])
            if output is not None:
                self._start_stores(single, output)
                single = []
        for due in [*dues, *single]:
            output = self.manager.prepare_store(due.keys, due.state.context)
            if output is None:
                self.metrics.add("refused_stores")
                self._warn_rarely("kvoffload: no room in the host pool, every block is in use; stores wait")
            else:
                self._start_stores([due], output)

    def _start_stores(self, dues: list[_Due], output: PrepareStoreOutput) -> None:
        if output.evicted_keys:
            self._epoch += 1
            self.metrics.add("evicted_blocks", len(output.evicted_keys))
        slot_of = dict(zip(output.keys_to_store, output.store_spec.slots.tolist(), strict=True))
        refused = frozenset(output.refused_keys)
        for due in dues:
            state = due.state
            state.stored_up_to(due.num_computed, self._max_tokens)
            if refused and not refused.isdisjoint(due.keys):
                state.refused = True
            new = [(block, slot_of.pop(block.key)) for block in due.blocks if block.key in slot_of]
            if not new:
                continue
            keys = [block.key for block, _ in new]
            state.stored += keys
            if len(keys) > 1:
                self.manager.reorder_chain(keys, keys, state.context)
            self._start_store(state, new, output.store_spec.medium())

    def _start_store(self, state: RequestState, new: list[tuple[Block, int]], medium: str) -> None:
        num_groups = len(self._layout.groups)
        if num_groups > 1:
            new.sort(key=lambda entry: entry[0].group)
        sizes, firsts = [0] * num_groups, [0] * num_groups
        for block, _ in reversed(new):
            sizes[block.group] += len(block.device_blocks)
            firsts[block.group] = block.first_device_block
        ids = [device_block for block, _ in new for device_block in block.device_blocks]
        slots = [slot for _, slot in new]
        job = _Job(state, [block.key for block, _ in new], True, self._num_workers, frozenset(ids))
        if self._descriptions is not None:
            job.blocks = [block for block, _ in new]
        job_id = self._new_job(job)
        host = LoadStoreSpec(medium, np.array(slots, dtype=np.int64))
        device = DeviceSpec(np.array(ids, dtype=np.int64), tuple(sizes), tuple(firsts))
        self._meta.stores[job_id] = TransferSpec(state.context.req_id, host, device)

    def _release_held(self) -> None:
        if self._held:
            now = self._clock()
            for req_id, (state, deadline) in list(self._held.items()):
                if state.jobs == 0 or now >= deadline:
                    del self._held[req_id]
                    self._meta.releases.append(req_id)

    @_guarded(lambda self, report: None)
    def update_connector_output(self, report: WorkerReport) -> None:
        """Takes in what the workers have done. Reports of jobs that are not known are ignored."""
        if report.changed_at == self._num_resets:
            # Before anything that the same workers report as stored: it may belong to either weights.
            self.metrics.add("weight_changes")
            self._warn_rarely(WEIGHTS_CHANGED)
            self.reset()
            self._drop_shelf()
        if self._check is not None and self._check[0] in report.done:
            self._end_check(report)
        self._poll()
        for name in ("store_bytes", "load_bytes", "store_seconds", "load_seconds"):
            self.metrics.add(name, getattr(report, name))
        stored: list[OffloadKey] = []
        for job_id, count in report.done.items():
            job = self._jobs.get(job_id)
            if job is None:
                continue
            job.pending -= count
            # A manager that keeps its contents would take a store of before the reset for a good one.
            job.failed |= job_id in report.failed or (job.is_store and job.epoch != self._num_resets)
            if job.pending < 0:
                raise IntegrityError(f"job {job_id} was reported more often than there are workers")
            if job.pending == 0:
                del self._jobs[job_id]
                job.state.jobs -= 1
                if not job.is_store:
                    self._end_load(job)
                elif job.failed:
                    self.manager.complete_store(job.keys, job.state.context, success=False)
                    if job.epoch == self._num_resets:
                        self.metrics.add("store_failures")
                        self._warn_rarely("kvoffload: a store failed, or came too late for its blocks, and was dropped")
                else:
                    stored += job.keys
                    self._describe(job)
        if stored:
            self._epoch += 1
            self.manager.complete_store(stored)
            self.metrics.add("store_blocks", len(stored))
        if report.broken:
            self.switch_off("a worker's transfer engine")

    def _end_load(self, job: _Job) -> None:
        self._load_epoch += 1
        self.manager.complete_load(job.keys, job.state.context)
        for key in job.keys:
            left = self._keys_loading[key] - 1
            if left:
                self._keys_loading[key] = left
            else:
                del self._keys_loading[key]
        job.state.loading = False
        if job.failed:
            job.state.may_load = False
            job.state.forget_loaded()
            self.metrics.add("load_failures")
            if job.epoch == self._num_resets:
                self._warn_rarely("kvoffload: a load failed twice; its request computes instead")
        else:
            self.metrics.add("load_blocks", len(job.keys))

    # The end of requests, and of everything.

    @_guarded(lambda self, request, block_ids=(): self._forget(request))
    def request_finished(self, request: Request, block_ids: object = ()) -> tuple[bool, dict[str, Any] | None]:
        """``(False, None)``: the engine may free the blocks at once, fences protect what is being stored.

        True for a request with ``do_remote_decode``: its blocks stay until all of it is in the host pool,
        at most the load deadline, and then it is reported once.
        """
        state = self._states.pop(request.request_id, None)
        if state is None:
            return False, None
        self.manager.release_request(state.context)
        if self._recorder is not None and state.record is not None:
            state.extend_keys()
            keys = state.keys[self._layout.traced]
            self._recorder.add(state.arrived, state.record, keys, request.num_tokens, request.num_computed_tokens)
        if any(state.block_ids):
            self._finished.append((state, request.num_computed_tokens))
            if state.control.remote_decode:
                self._held[request.request_id] = (state, self._clock() + self._deadline_s)
                return True, None
        return False, None

    def _forget(self, request: Request) -> tuple[bool, None]:
        self._states.pop(request.request_id, None)
        return False, None

    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping although no request needs it to."""
        meta = self._meta
        promises = bool(meta.broken_loads or meta.releases or self._held or self._was_reset)
        if self.off or promises:
            return promises
        return bool(self._jobs or self._finished) or self.manager.has_pending_writes

    @_guarded(lambda self: [])
    def take_events(self) -> Iterable[OffloadingEvent]:
        """What became loadable or was removed since the last call."""
        events = list(self.manager.take_events())
        if self._descriptions is None:
            return events
        known, self._descriptions = self._descriptions, {}
        return [event if event.removed else replace(event, blocks=list(map(known.get, event.keys))) for event in events]

    def _describe(self, job: _Job) -> None:
        if self._descriptions is not None:
            for block in job.blocks:
                self._descriptions[block.key] = self._layout.describe(job.state.request, block)
            while len(self._descriptions) > MAX_PENDING_EVENTS:
                del self._descriptions[next(iter(self._descriptions))]

    @_guarded(lambda self: None)
    def reset(self) -> None:
        """Forgets every block. What requests under way have computed so far, or compute on top of it, is
        not stored: it may belong to weights that are gone. The same holds for what they find in the engine's own cache
        from before. Loads and stores under way count as failed.

        An engine that falls asleep resets its caches too. So with ``may_sleep`` the manager keeps its contents, which
        no request can find, until the engine looks up or computes again; see ``wake_up``.
        """
        # Of two resets one was no sleep's: what it was to drop must not come back.
        keeps = self._may_sleep and self._shelf is _Shelf.EMPTY
        self._shelf = _Shelf.RESET
        if not keeps:
            self._drop_shelf()
        self._num_resets += 1
        self._sound_blocks = set()
        self._was_reset = True
        self._epoch += 1
        self._load_epoch += 1
        for state in self._states.values():
            state.match = None
            state.stored.clear()
            state.restart_stores()
            state.may_store = not state.has_kv
        self._finished.clear()

    @_guarded(lambda self: None)
    def wake_up(self) -> None:
        """The engine has slept since the last reset, and is awake. Before any request finds something, the workers
        compare all of their weights with those that the blocks were computed with. If they are the same, the blocks
        that the reset has hidden can be found again; else they are dropped."""
        if self._shelf is _Shelf.RESET:
            self._shelf = _Shelf.AWAKE
        for state in self._states.values():
            # The sleep was no wait for blocks.
            state.waiting_since, state.num_waits = None, 0
            self.manager.release_request(state.context)

    def _end_check(self, report: WorkerReport) -> None:
        assert self._check is not None
        job_id, pending = self._check
        pending -= report.done[job_id]
        self._check = job_id, pending
        if job_id in report.failed:
            self._drop_shelf()
            logger.info("kvoffload: the weights are not known to be those of before the sleep: all blocks are dropped")
        elif pending == 0:
            self._clear_shelf()
            logger.info("kvoffload: the weights are those of before the sleep: offloaded blocks can be found again")

    def _drop_shelf(self) -> None:
        """Resets the manager, if its contents are from before a reset."""
        if self._shelf is not _Shelf.EMPTY:
            self.manager.reset()
            self._was_reset = True
            self._clear_shelf()

    def _clear_shelf(self) -> None:
        self._shelf, self._check, self._must_check = _Shelf.EMPTY, None, False
        self._epoch += 1
        self._load_epoch += 1

    def shutdown(self) -> None:
        """Releases everything; may be called twice. Also when offloading is off: lower tiers have threads and files."""
        if self._recorder is not None:
            self._recorder.close()
        try:
            self._drop_shelf()
            self.manager.shutdown()
        except Exception:
            logger.exception("kvoffload: shutting down failed")

    # Odds and ends.

    def snapshot(self) -> SchedulerSnapshot:
        """What is known of requests and jobs now. O(requests + jobs): for tests and tools, not for every step."""
        requests = {
            req_id: RequestSnapshot(
                req_id,
                state.phase,
                state.storing,
                state.may_load,
                tuple(state.next_store),
                tuple(map(tuple, state.block_ids)),
                state.jobs,
            )
            for req_id, state in self._states.items()
        }
        jobs = {
            job_id: JobSnapshot(
                job_id,
                job.is_store,
                (job.state.context.req_id,),
                len(job.keys),
                job.device_blocks,
                job.pending,
                job.failed,
            )
            for job_id, job in self._jobs.items()
        }
        return SchedulerSnapshot(
            requests, jobs, dict(self._keys_loading), tuple(self._held), self._num_resets, self.off
        )

    def _state(self, request: Request) -> RequestState:
        state = self._states.get(request.request_id)
        if state is None:
            params = request.kv_transfer_params
            context = ReqContext(request.request_id, params)
            control = RequestControl.from_params(params)
            state = self._states[request.request_id] = RequestState(request, context, control, self._layout)
        return state

    def _new_job(self, job: _Job) -> int:
        job_id = next(JOB_IDS)
        job.epoch = self._num_resets
        self._jobs[job_id] = job
        job.state.jobs += 1
        return job_id

    def _record(self, state: RequestState, match: Match, taken: int) -> None:
        if state.record is not None:
            return
        promoted = self.manager.num_promoted(state.context)
        from_disk = min(taken, promoted * self._layout.align // self._layout.blocks_per_align)
        missed, reason, age_s, policy = match.missed, None, None, None
        if missed is not None:
            policy = self.manager.policy_state() or None
            miss = self.manager.explain_miss(missed)
            reason, age_s = miss.reason, miss.age_s
            self.metrics.add("misses", label=reason)
        self.metrics.add("asked_tokens", state.request.num_tokens)
        self.metrics.add("device_hit_tokens", match.computed)
        self.metrics.add("host_hit_tokens", taken - from_disk)
        self.metrics.add("disk_hit_tokens", from_disk)
        record = state.record = RequestRecord(
            time.time(),
            state.context.req_id,
            state.request.num_tokens,
            match.computed,
            taken - from_disk,
            missed[len(self._layout.namespace) :].hex() if missed else None,
            reason,
            age_s,
            from_disk,
            policy,
        )
        self.records.append(record)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("kvoffload: record %s", json.dumps(record.to_dict()))

    def _warn_rarely(self, message: str) -> None:
        now = self._clock()
        if now - self._last_warning.get(message, float("-inf")) >= WARN_EVERY_S:
            self._last_warning[message] = now
            logger.warning(message)

    def switch_off(self, where: str) -> None:
        """Ends offloading for good: what was promised is reported as failed. Logs the exception under way."""
        logger.error(
            "kvoffload: OFFLOADING IS OFF: %s failed; requests are computed from here on",
            where,
            exc_info=sys.exc_info()[0] is not None,
        )
        self.off = True
        self.metrics.set("off", 1)
        meta = self._meta
        for spec in meta.loads.values():
            meta.broken_loads[spec.req_id] = spec.device.block_ids.tolist()
        meta.loads = {}
        meta.stores = {}
        meta.fences = [job_id for job_id in meta.fences if job_id in self._jobs]
        meta.releases.extend(self._held)
        self._held.clear()
        self._jobs.clear()
        self._finished.clear()

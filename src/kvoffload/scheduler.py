"""The scheduler half of the connector: which blocks to load, to store and to fence, engine-neutral."""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np

from kvoffload.base import (
    BlockHash,
    BlockNotReadyError,
    ConfigError,
    DeviceSpec,
    IntegrityError,
    KVBlocks,
    LoadStoreSpec,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    Request,
    ScheduledStep,
    TransferSpec,
)
from kvoffload.explain import RECORD_RING_SIZE, RequestRecord
from kvoffload.keys import make_offload_key
from kvoffload.metrics import Metrics
from kvoffload.worker import StepMeta, WorkerReport

logger = logging.getLogger(__name__)

GROUP = 0
"""The one KV cache group served."""
NULL_BLOCK = 0
WARN_EVERY_S = 60.0

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(slots=True, eq=False)
class _Match:
    """A remembered lookup: for ``computed`` tokens on the device, at ``epoch``, until ``expires``.

    ``tokens`` None: the request waits, for another's load or for an answer; its ``epoch`` is that of loads.
    """

    epoch: int
    computed: int
    tokens: int | None
    missed: OffloadKey | None
    expires: float = float("inf")


@dataclass(slots=True, eq=False)
class _RequestState:
    request: Request
    context: ReqContext
    keys: list[OffloadKey] = field(default_factory=list)
    """Of its whole blocks so far."""
    block_ids: list[int] = field(default_factory=list)
    """Its device blocks, from its first token on."""
    next_store: int = 0
    """Index of the first block not yet given to ``prepare_store``."""
    loaded: range = range(0)
    """Blocks that came from the host: not stored again."""
    match: _Match | None = None
    waiting_since: float | None = None
    touched: bool = False
    recorded: bool = False
    loading: bool = False
    first_loaded: int = 0
    """Index of the first device block that its last load was to fill."""
    has_kv: bool = False
    """Whether device blocks were allocated to it and not lost since."""
    may_load: bool = True
    may_store: bool = True
    jobs: int = 0
    """Jobs under way."""

    def wants(self, param: str) -> bool:
        params = self.context.kv_transfer_params
        # They come from a client: anything may be in them.
        return isinstance(params, Mapping) and bool(params.get(param))


@dataclass(slots=True, eq=False)
class _Due:
    """Blocks of one request that are to be stored: up to block ``end``, of which ``indices``."""

    state: _RequestState
    end: int
    indices: list[int]
    keys: list[OffloadKey]


@dataclass(slots=True, eq=False)
class _Job:
    state: _RequestState
    keys: list[OffloadKey]
    is_store: bool
    pending: int
    """Workers that have not reported yet."""
    device_blocks: frozenset[int]
    failed: bool = False


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

    ``device_block_size`` and ``hash_block_size`` are in tokens; an offloaded block has
    ``block_size_factor`` device blocks. ``namespace`` goes in front of every block hash.
    ``device_prefix_caching`` says whether the engine shares device blocks between requests. Call it from
    the engine's scheduler thread only. No method raises for anything that goes wrong in service: after an
    unexpected error ``off`` is True, no more is loaded or stored, and every promise made is reported as
    failed. Raises ConfigError if block sizes do not divide.
    """

    def __init__(
        self,
        manager: OffloadingManager,
        *,
        device_block_size: int,
        block_size_factor: int = 1,
        hash_block_size: int | None = None,
        namespace: bytes = b"",
        num_workers: int = 1,
        device_prefix_caching: bool = True,
        load_deadline_ms: float = 1000.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        hash_block_size = hash_block_size or device_block_size
        if device_block_size % hash_block_size:
            raise ConfigError(
                f"device block size {device_block_size}: must be a multiple of the {hash_block_size} tokens that one "
                "block hash covers; set the engine's hash block size to a divisor of its block size"
            )
        self.manager = manager
        self.metrics = Metrics()
        self.records: deque[RequestRecord] = deque(maxlen=RECORD_RING_SIZE)
        """The latest requests: what each asked for and found."""
        self.off = False
        self._device_block_size = device_block_size
        self._factor = block_size_factor
        self._block_tokens = device_block_size * block_size_factor
        self._hashes_per_block = self._block_tokens // hash_block_size
        self._namespace = namespace
        self._num_workers = num_workers
        self._share_loads = device_prefix_caching
        self._deadline_s = load_deadline_ms / 1000
        self._clock = clock
        self._epoch = 0
        """Grows whenever a remembered lookup may have become wrong."""
        self._load_epoch = 0
        """Grows whenever a load starts or ends: what requests that wait for another's load wait for."""
        self._states: dict[str, _RequestState] = {}
        self._jobs: dict[int, _Job] = {}
        self._next_job = 0
        self._keys_loading: dict[OffloadKey, int] = {}
        """Keys on their way to the device, and for how many loads."""
        self._finished: list[tuple[_RequestState, int]] = []
        """Requests that finished since the last step, with their computed tokens."""
        self._held: dict[str, tuple[_RequestState, float]] = {}
        """Finished requests whose device blocks the engine keeps for us, and until when at most."""
        self._allocated: set[str] = set()
        """Requests that were given blocks since the last step."""
        self._handed_out: set[int] = set()
        """Device blocks given to loads since the last step."""
        self._meta = StepMeta()
        self._last_warning: dict[str, float] = {}
        self.metrics.set("pool_blocks", manager.num_blocks)
        self.metrics.set("off", 0)

    # Lookup.

    @_guarded(lambda self, request, num_computed_tokens: (0, False))
    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens past the device's own ``num_computed_tokens`` can be loaded.

        ``(n, True)``: n tokens, loaded asynchronously; ``(0, False)``: none; ``(None, False)``: ask again
        at the next step. At least one token is left to compute.
        """
        state = self._state(request)
        match = state.match
        if match is None or not self._still_holds(match, num_computed_tokens):
            match = state.match = self._look_up(state, num_computed_tokens)
        return match.tokens, bool(match.tokens)

    def _still_holds(self, match: _Match, num_computed_tokens: int) -> bool:
        epoch = self._load_epoch if match.tokens is None else self._epoch
        return (match.epoch, match.computed) == (epoch, num_computed_tokens) and self._clock() < match.expires

    def _look_up(self, state: _RequestState, computed: int) -> _Match:
        self._extend_keys(state)
        if not state.touched:
            state.touched = True
            self.manager.touch(state.keys, state.context)
        block = self._block_tokens
        start = computed // block
        keys = state.keys[start:]
        if not state.may_load or computed % self._device_block_size:
            return _Match(self._epoch, computed, 0, None)
        hits = self.manager.lookup(keys, state.context)
        if hits is None or self._on_their_way(keys[:hits]):
            now = self._clock()
            if state.waiting_since is None:
                state.waiting_since = now
            deadline = state.waiting_since + self._deadline_s
            if now < deadline:
                # An unknown answer must be asked for again, a known wait ends by an event or the deadline.
                return _Match(self._load_epoch, computed, None, None, now if hits is None else deadline)
        hits = hits or 0
        missed = keys[hits] if hits < len(keys) else None
        tokens = (start + hits) * block - computed
        if tokens < block:
            return _Match(self._epoch, computed, 0, missed)
        tokens = min(tokens, state.request.num_tokens - 1 - computed)
        return _Match(self._epoch, computed, tokens, missed)

    def _on_their_way(self, keys: list[OffloadKey]) -> bool:
        return self._share_loads and bool(self._keys_loading) and not self._keys_loading.keys().isdisjoint(keys)

    @_guarded(lambda self, request, blocks, num_external_tokens: self._break_load(request, blocks, num_external_tokens))
    def update_state_after_alloc(self, request: Request, blocks: KVBlocks, num_external_tokens: int) -> None:
        """The engine has allocated ``blocks`` and takes ``num_external_tokens`` of what was offered.

        Records the load and pins what it reads. Zero means that it declined, or had no offer.
        """
        state = self._state(request)
        match, state.match, state.waiting_since = state.match, None, None
        state.has_kv = True
        self._allocated.add(request.request_id)
        state.first_loaded = 0 if match is None else match.computed // self._device_block_size
        if match is not None:
            self._record(state, match, num_external_tokens)
            state.loaded = range(0)
        if num_external_tokens == 0:
            return
        if match is None or not match.tokens or num_external_tokens > match.tokens:
            self._break_load(request, blocks, num_external_tokens)
            return
        end = match.computed + num_external_tokens
        first_device = state.first_loaded
        last_device = -(-end // self._device_block_size)
        span = range(match.computed // self._block_tokens, -(-end // self._block_tokens))
        keys = state.keys[span.start : span.stop]
        device_blocks = blocks.get_block_ids()[GROUP][first_device:last_device]
        try:
            host = self.manager.prepare_load(keys, state.context)
        except BlockNotReadyError:
            logger.exception("kvoffload: a promised block is gone; the request computes instead")
            self._break_load(request, blocks, num_external_tokens)
            return
        device = DeviceSpec(np.array(device_blocks, dtype=np.int64), (len(device_blocks),), (first_device,))
        job_id = self._new_job(_Job(state, keys, False, self._num_workers, frozenset()))
        self._meta.loads[job_id] = TransferSpec(request.request_id, host, device)
        self._handed_out.update(device_blocks)
        for key in keys:
            self._keys_loading[key] = self._keys_loading.get(key, 0) + 1
        state.loading = True
        if not state.wants("do_remote_decode"):
            state.loaded = span
        self._load_epoch += 1

    def _break_load(self, request: Request, blocks: KVBlocks, num_external_tokens: int) -> None:
        """A load that was promised cannot be done: the workers report it as failed."""
        if num_external_tokens:
            state = self._state(request)
            state.may_load = False
            self._meta.broken_loads[request.request_id] = blocks.get_block_ids()[GROUP][state.first_loaded :]
            self.metrics.add("load_failures")

    # Steps.

    @_guarded(lambda self, step: self._take_meta(step))
    def build_connector_meta(self, step: ScheduledStep) -> StepMeta:
        """The loads, stores and fences of this step, for the workers."""
        handed_out = self._handed_out
        for req_id in step.preempted:
            self._forget_blocks(req_id)
        for req_id, groups in step.block_ids.items():
            state, blocks = self._states.get(req_id), groups[GROUP]
            if state is None:
                handed_out.update(blocks)
            elif req_id in step.replaced:
                state.block_ids = list(blocks)
                # What is computed already was shared with it, or loaded: loads are in the set.
                handed_out.update(blocks[state.request.num_computed_tokens // self._device_block_size :])
            else:
                state.block_ids.extend(blocks)
                handed_out.update(blocks)
        if handed_out:
            for job_id, job in self._jobs.items():
                if job.is_store and not job.device_blocks.isdisjoint(handed_out):
                    self._meta.fences.append(job_id)
        # Blocks of finished requests may have been handed out again in this very step: then they are read first.
        finished = [self._due(state, computed) for state, computed in self._finished]
        self._finished.clear()
        for job_id in self._store(finished):
            if not self._jobs[job_id].device_blocks.isdisjoint(handed_out):
                self._meta.fences.append(job_id)
        running = []
        for req_id, scheduled in step.num_scheduled_tokens.items():
            state = self._states.get(req_id)
            if state is not None:
                running.append(self._due(state, state.request.num_computed_tokens + scheduled))
        self._store(running)
        self._release_held()
        self._handed_out = set()
        self._allocated.clear()
        self.metrics.set("pool_used_blocks", self.manager.num_used_blocks)
        return self._take_meta(step)

    def _take_meta(self, step: ScheduledStep) -> StepMeta:
        meta, self._meta = self._meta, StepMeta()
        meta.has_tokens = any(step.num_scheduled_tokens.values())
        return meta

    def _forget_blocks(self, req_id: str) -> None:
        state = self._states.get(req_id)
        if state is None:
            return
        state.block_ids = []
        state.may_store = True
        # It may have got new blocks already, in the step that tells that it lost the old ones.
        if req_id not in self._allocated:
            state.loaded = range(0)
            state.match = None
            state.has_kv = False

    def _due(self, state: _RequestState, num_computed: int) -> _Due | None:
        """The request's whole blocks of computed, known tokens that were not stored yet."""
        known = min(num_computed, state.request.num_tokens)
        # Of a chain longer than the pool only the head can be kept: its tail would push it out.
        end = min(known // self._block_tokens, len(state.block_ids) // self._factor, self.manager.num_blocks)
        if end <= state.next_store or not state.may_store or state.loading:
            return None
        self._extend_keys(state)
        end = min(end, len(state.keys))
        if end <= state.next_store:
            return None
        indices = [
            i
            for i in range(state.next_store, end)
            if i not in state.loaded and NULL_BLOCK not in self._device_blocks(state, i)
        ]
        return _Due(state, end, indices, [state.keys[i] for i in indices])

    def _device_blocks(self, state: _RequestState, index: int) -> list[int]:
        return state.block_ids[index * self._factor : (index + 1) * self._factor]

    def _store(self, maybe_due: list[_Due | None]) -> list[int]:
        """Starts what can be stored, in one call if there is room for all, and returns the jobs."""
        dues = [due for due in maybe_due if due is not None]
        if len(dues) > 1:
            output = self.manager.prepare_store([key for due in dues for key in due.keys])
            if output is not None:
                return self._start_stores(dues, output)
        jobs = []
        for due in dues:
            output = self.manager.prepare_store(due.keys, due.state.context)
            if output is None:
                self.metrics.add("refused_stores")
                self._warn_rarely("kvoffload: no room in the host pool, every block is in use; stores wait")
            else:
                jobs += self._start_stores([due], output)
        return jobs

    def _start_stores(self, dues: list[_Due], output: PrepareStoreOutput) -> list[int]:
        if output.evicted_keys:
            self._epoch += 1
            self.metrics.add("evicted_blocks", len(output.evicted_keys))
        slot_of = dict(zip(output.keys_to_store, output.store_spec.slots.tolist(), strict=True))
        jobs = []
        lone: list[OffloadKey] = []
        """Single new blocks, as decoding makes them: touched in one call for all requests."""
        for due in dues:
            state = due.state
            state.next_store = due.end
            new = [(i, key, slot_of.pop(key)) for i, key in zip(due.indices, due.keys, strict=True) if key in slot_of]
            if len(due.keys) == len(new) == 1:
                lone += due.keys
            else:
                self.manager.touch(due.keys, state.context)
            if not new:
                continue
            blocks = [block for i, _, _ in new for block in self._device_blocks(state, i)]
            job = _Job(state, [key for _, key, _ in new], True, self._num_workers, frozenset(blocks))
            host = LoadStoreSpec(output.store_spec.medium(), np.array([slot for _, _, slot in new], dtype=np.int64))
            device = DeviceSpec(np.array(blocks, dtype=np.int64), (len(blocks),), (0,))
            jobs.append(self._new_job(job))
            self._meta.stores[jobs[-1]] = TransferSpec(state.context.req_id, host, device)
        if lone:
            self.manager.touch(lone)
        return jobs

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
        for name in ("store_bytes", "load_bytes", "store_seconds", "load_seconds"):
            self.metrics.add(name, getattr(report, name))
        stored: list[OffloadKey] = []
        for job_id, count in report.done.items():
            job = self._jobs.get(job_id)
            if job is None:
                continue
            job.pending -= count
            job.failed |= job_id in report.failed
            if job.pending < 0:
                raise IntegrityError(f"job {job_id} was reported more often than there are workers")
            if job.pending == 0:
                del self._jobs[job_id]
                job.state.jobs -= 1
                if not job.is_store:
                    self._end_load(job)
                elif job.failed:
                    self.manager.complete_store(job.keys, job.state.context, success=False)
                    self.metrics.add("store_failures")
                    self._warn_rarely("kvoffload: a store failed twice and was dropped")
                else:
                    stored += job.keys
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
            job.state.loaded = range(0)
            self.metrics.add("load_failures")
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
        if state.block_ids:
            self._finished.append((state, request.num_computed_tokens))
            if state.wants("do_remote_decode"):
                self._held[request.request_id] = (state, self._clock() + self._deadline_s)
                return True, None
        return False, None

    def _forget(self, request: Request) -> tuple[bool, None]:
        self._states.pop(request.request_id, None)
        return False, None

    def has_pending_work(self) -> bool:
        """Whether the engine must keep stepping although no request needs it to."""
        meta = self._meta
        promises = bool(meta.broken_loads or meta.releases or self._held)
        return promises or (not self.off and bool(self._jobs or self._finished))

    @_guarded(lambda self: [])
    def take_events(self) -> Iterable[OffloadingEvent]:
        """What became loadable or was removed since the last call."""
        return list(self.manager.take_events())

    @_guarded(lambda self: None)
    def reset(self) -> None:
        """Forgets every block. What requests under way have computed so far, or compute on top of it, is
        not stored: it may belong to weights that are gone."""
        self.manager.reset()
        self._epoch += 1
        self._load_epoch += 1
        for state in self._states.values():
            state.match = None
            state.next_store = 0
            state.may_store = not state.has_kv
        self._finished.clear()
        self.metrics.set("pool_used_blocks", self.manager.num_used_blocks)

    @_guarded(lambda self: None)
    def shutdown(self) -> None:
        """Releases everything; may be called twice."""
        self.manager.shutdown()

    # Odds and ends.

    def _state(self, request: Request) -> _RequestState:
        state = self._states.get(request.request_id)
        if state is None:
            context = ReqContext(request.request_id, request.kv_transfer_params)
            state = self._states[request.request_id] = _RequestState(request, context)
        return state

    def _extend_keys(self, state: _RequestState) -> None:
        hashes, step = state.request.block_hashes, self._hashes_per_block
        done = len(state.keys)
        if done and (done * step > len(hashes) or state.keys[-1] != self._key(hashes[done * step - 1])):
            # The engine has taken tokens back and given others. Hashes are chained: the last one tells.
            state.keys.clear()
            state.next_store = 0
        for i in range(len(state.keys), len(hashes) // step):
            state.keys.append(self._key(hashes[(i + 1) * step - 1]))

    def _key(self, block_hash: BlockHash) -> OffloadKey:
        return make_offload_key(self._namespace + block_hash, GROUP)

    def _new_job(self, job: _Job) -> int:
        job_id = self._next_job
        self._next_job += 1
        self._jobs[job_id] = job
        job.state.jobs += 1
        return job_id

    def _record(self, state: _RequestState, match: _Match, taken: int) -> None:
        if state.recorded:
            return
        state.recorded = True
        missed, reason, age_s = match.missed, None, None
        if missed is not None:
            miss = self.manager.explain_miss(missed)
            reason, age_s = miss.reason, miss.age_s
            self.metrics.add("misses", label=reason)
        self.metrics.add("asked_tokens", state.request.num_tokens)
        self.metrics.add("device_hit_tokens", match.computed)
        self.metrics.add("host_hit_tokens", taken)
        record = RequestRecord(
            time.time(),
            state.context.req_id,
            state.request.num_tokens,
            match.computed,
            taken,
            missed[len(self._namespace) :].hex() if missed else None,
            reason,
            age_s,
        )
        self.records.append(record)
        logger.debug("kvoffload: %s", record)

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

"""Loads: which host slots go to which device blocks, and the work collected for the next step."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from kvoffload.abc import BlockNotReadyError, DeviceSpec, KVBlocks, Request, TransferSpec
from kvoffload.connector.adapters import AdapterNeed
from kvoffload.connector.jobs import Job, JobTable
from kvoffload.connector.layout import NULL_BLOCK
from kvoffload.connector.leaving import LeavingBlocks
from kvoffload.connector.request import Match, Phase, RequestState
from kvoffload.connector.resets import BlockOrigins

logger = logging.getLogger(__name__)

LOAD_FAILED = "kvoffload: a load failed twice, or its adapter has changed; its request computes instead"


@dataclass(eq=False)
class LoadPlanner:
    """Pins the blocks that a request takes from its offer until they are loaded.

    Where host memory does not repeat the device, a load for which many blocks leave it is done in pieces: what leaves
    for a piece takes the slots of the pieces before it, so that it need not take those of other blocks.
    """

    jobs: JobTable
    sound: BlockOrigins
    leaving: LeavingBlocks | None

    def begin(self, state: RequestState, match: Match | None, blocks: KVBlocks, num_tokens: int) -> bool:
        """Adds the load of ``num_tokens`` of the offer ``match`` to the next step. Returns False, and the request will
        load nothing more, if that cannot be done, or was not offered. It may load fewer tokens than it was offered,
        unless a group has a window or a state: the blocks that these need for a shorter load were not looked up."""
        offered, layout = 0 if match is None else match.tokens or 0, self.jobs.layout
        if num_tokens == offered or (num_tokens < offered and not layout.windows and not layout.states):
            try:
                self.start(state, blocks, num_tokens)
                return True
            except BlockNotReadyError:
                logger.exception("kvoffload: a promised block is gone; the request computes instead")
        state.may_load = False
        self.jobs.observer.metrics.add("load_failures")
        return False

    def start(self, state: RequestState, blocks: KVBlocks, num_tokens: int) -> None:
        """Adds the load to the next step. Raises BlockNotReadyError, and changes nothing, if a block is gone, or the
        engine has no device block for a state."""
        end = state.filled.computed + num_tokens
        spans, device = self.device_spec(blocks, state.filled.computed, end)
        if any(not spans[g] for g in self.jobs.layout.states):
            raise BlockNotReadyError(f"the engine has no device block for the state at token {end}")
        keys = [key for g, span in enumerate(spans) for key in state.blocks.keys[g][span.start : span.stop]]
        lease, ids = self.jobs.manager.prepare_load(keys, state.context), device.block_ids.tolist()
        job_id = self.jobs.add(Job(False, [state], lease, keys, fills=ids))
        state.phase, state.filled.loaded_end = Phase.LOADING, end
        if not state.options.remote_decode and self.leaving is None:
            state.blocks.loaded = tuple(spans)
        self._add(job_id, TransferSpec(state.context.req_id, lease, device), state)
        if self.sound.origins is not None:
            self.sound.origins.update(dict.fromkeys(ids, state.origin))
        self.jobs.changes.wakeups += 1

    def cut(self, handed_out: Collection[int]) -> None:
        """Replaces each load of the next step that displaces many blocks by its first piece. What has to leave
        it in this step, because its device blocks may be written to before their piece, does not count."""
        leaving = self.leaving
        if leaving is None or len(self.jobs.layout.groups) > 1:
            return
        for job_id, spec in list(self.jobs.meta.loads.items()):
            device_blocks = [at for at in spec.device.block_ids.tolist() if at not in handed_out]
            if len(device_blocks) > leaving.piece_blocks < leaving.device.num_late(device_blocks):
                self._next_piece(job_id, self.jobs.jobs[job_id], spec, leaving.piece_blocks)

    def _add(self, job_id: int, spec: TransferSpec, state: RequestState) -> None:
        """Adds a load of the request, or a piece of it, to the next step."""
        meta, adapter = self.jobs.meta, state.adapter
        meta.loads[job_id] = spec
        if adapter is not None and state.origin is not None:
            meta.needs[job_id] = AdapterNeed(adapter.number, state.origin, adapter.is_reread)

    def _next_piece(self, job_id: int, job: Job, spec: TransferSpec, num_blocks: int) -> None:
        """Adds the first ``num_blocks`` of ``spec`` to the next step. The others are the rest of the job."""
        job.rest = _part(spec, num_blocks, None) if num_blocks < len(spec.host.slots) else None
        self._add(job_id, _part(spec, 0, num_blocks), job.requests[0])
        self.jobs.meta.pieces[job_id] = [] if job.rest else list(job.fills)

    def _go_on(self, job: Job, rest: TransferSpec) -> None:
        """Adds the next piece, and gives back the host slots of the one that was loaded."""
        slots, num_left = job.lease.slots, len(rest.host.slots)
        num_read, start, end = len(slots) - num_left, len(job.keys) - len(slots), len(job.keys) - num_left
        # First, so that the load is reported as failed if one of the others raises.
        self._next_piece(self.jobs.add(job), job, rest, num_read)
        self.jobs.manager.complete_load(replace(job.lease, slots=slots[:num_read]))
        job.lease = rest.host
        if self.leaving is not None:
            first = rest.device.block_indices[0] - num_read
            self.leaving.arrived(job, first, slice(start, end))

    def break_unsent(self) -> list[Job]:
        """Ends the loads of the next step, which no worker has been given, as failed. Returns them."""
        meta = self.jobs.meta
        ended = [self.jobs.remove(job_id) for job_id in meta.loads]
        meta.loads, meta.needs, meta.pieces = {}, {}, {}
        # All are reported before one is ended, which may raise.
        for job in ended:
            job.failed = True
            self.jobs.break_load(job)
        for job in ended:
            self.end_job(job)
        return ended

    def end_job(self, job: Job) -> bool:
        """Ends a load that all workers have reported, or its piece in progress: then returns False."""
        if job.rest is not None:
            if not job.failed and self.jobs.is_current(job):
                self._go_on(job, job.rest)
                return False
            job.failed = True
            self.jobs.break_load(job)
        observer = self.jobs.observer
        self.jobs.changes.wakeups += 1
        self.jobs.manager.complete_load(job.lease)
        (state,) = job.requests
        state.phase = Phase.RUNNING
        if job.failed:
            state.may_load = False
            state.blocks.loaded, state.filled.loaded_end = None, 0
            observer.metrics.add("load_failures")
            if self.jobs.is_current(job):
                observer.warn(LOAD_FAILED)
        else:
            observer.metrics.add("load_blocks", len(job.keys))
        return True

    def fail(self, requests: Mapping[str, RequestState], request: Request, blocks: KVBlocks, num_tokens: int) -> None:
        """Reports a promised load as failed, whatever state the request is in."""
        if not num_tokens:
            return
        state, broken = requests.get(request.request_id), self.jobs.meta.broken_loads
        computed = 0 if state is None else (state.lookup.match or state.filled).computed
        broken[request.request_id] = []
        # The input that raised before may raise again, and must not reach the engine.
        with contextlib.suppress(Exception):
            _, device = self.device_spec(blocks, computed, computed + num_tokens)
            broken[request.request_id] = device.block_ids.tolist()

    def leave_to_others(self, state: RequestState, blocks: KVBlocks) -> None:
        """Takes note that another connector may fill the request's ``blocks`` before the request is in a step."""
        layout = self.jobs.layout
        tables = zip(layout.device_block_sizes, layout.parts.of_groups(blocks.get_block_ids()), strict=True)
        given = [block for size, table in tables for block in table[state.filled.computed // size :]]
        self.jobs.handed_out += given
        state.filled.of_others = frozenset(given)
        self.sound.trace(None, set(given), set())

    def device_spec(self, blocks: KVBlocks, computed: int, end: int) -> tuple[list[range], DeviceSpec]:
        """Returns per group which offloaded blocks hold tokens ``computed`` to ``end``, of a state the one that ends
        there, and where these go. Tokens to which the next one does not attend have null blocks."""
        ids: list[int] = []
        spans, sizes, firsts = [], [], []
        layout = self.jobs.layout
        for group, table in zip(layout.groups, layout.parts.of_groups(blocks.get_block_ids()), strict=True):
            first = (group.skipped_tokens(end) if group.state else computed) // group.device_block_size
            last = min(-(-end // group.device_block_size), len(table))
            while first < last and table[first] == NULL_BLOCK:
                first += 1
            factor = group.block_size_factor
            spans.append(range(first // factor, -(-last // factor) if first < last else first // factor))
            ids += table[first:last]
            sizes.append(len(table[first:last]))
            firsts.append(first)
        return spans, DeviceSpec(np.array(ids, dtype=np.int64), tuple(sizes), tuple(firsts))


def _part(spec: TransferSpec, start: int, stop: int | None) -> TransferSpec:
    """Returns some blocks of a load of one group whose blocks are one device block each."""
    host, device = replace(spec.host, slots=spec.host.slots[start:stop]), spec.device
    ids = device.block_ids[start:stop]
    return TransferSpec(spec.req_id, host, DeviceSpec(ids, (len(ids),), (device.block_indices[0] + start,)))

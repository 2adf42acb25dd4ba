"""Loads: which host slots go to which device blocks."""

from __future__ import annotations

import contextlib
import logging

import numpy as np

from kvoffload.abc import BlockNotReadyError, DeviceSpec, KVBlocks, OffloadingManager, TransferSpec
from kvoffload.connector.jobs import Job, JobTable
from kvoffload.connector.layout import NULL_BLOCK, KeyLayout
from kvoffload.connector.observer import RequestObserver
from kvoffload.connector.request import Match, Phase, RequestState
from kvoffload.connector.shelf import BlockOrigins
from kvoffload.connector.upcoming import UpcomingStep

logger = logging.getLogger(__name__)

LOAD_FAILED = "kvoffload: a load failed twice, or its adapter has changed; its request computes instead"


class LoadPlanner:
    """Pins the blocks that a request takes from its offer until the job that loads them has ended."""

    def __init__(
        self,
        manager: OffloadingManager,
        layout: KeyLayout,
        jobs: JobTable,
        observer: RequestObserver,
        sound: BlockOrigins,
    ) -> None:
        self._manager = manager
        self._layout = layout
        self._jobs = jobs
        self._observer = observer
        self._sound = sound

    def begin(
        self,
        state: RequestState,
        match: Match | None,
        blocks: KVBlocks,
        num_tokens: int,
        upcoming: UpcomingStep,
    ) -> bool:
        """Adds the load of ``num_tokens`` of the offer ``match`` to the next step. Returns False, and the request will
        load nothing more, if that cannot be done."""
        if self.was_offered(match, num_tokens):
            try:
                job_id, spec = self.start(state, blocks, num_tokens)
            except BlockNotReadyError:
                logger.exception("kvoffload: a promised block is gone; the request computes instead")
            else:
                state.loaded_end = state.computed_at_load + num_tokens
                self._sound.add(state, upcoming.add_load(job_id, spec, state))
                self._jobs.changes.loads += 1
                return True
        state.may_load = False
        self._observer.metrics.add("load_failures")
        return False

    def end_job(self, job: Job) -> None:
        """Ends a load that all workers have reported."""
        metrics = self._observer.metrics
        self._jobs.changes.loads += 1
        self._manager.complete_load(job.lease)
        (state,) = job.states
        state.phase = Phase.RUNNING
        if job.failed:
            state.may_load = False
            state.blocks.loaded, state.loaded_end = None, 0
            metrics.add("load_failures")
            if self._jobs.is_current(job):
                self._observer.warn(LOAD_FAILED)
        else:
            metrics.add("load_blocks", len(job.keys))

    def was_offered(self, match: Match | None, num_tokens: int) -> bool:
        """Whether a request with this lookup may load ``num_tokens``. It may load fewer tokens than it was offered,
        unless a group has a window or a state: the blocks that these need for a shorter load were not looked up."""
        offered = 0 if match is None else match.tokens or 0
        return num_tokens == offered or (num_tokens < offered and not self._layout.windows and not self._layout.states)

    def start(self, state: RequestState, blocks: KVBlocks, num_tokens: int) -> tuple[int, TransferSpec]:
        """Returns the id and the spec of a new load of ``num_tokens`` behind ``state.computed_at_load``.

        Raises BlockNotReadyError, and changes nothing, if a block is gone, or if the engine has no device block for a
        state.
        """
        computed = state.computed_at_load
        spans, device = self.device_spec(blocks, computed, computed + num_tokens)
        if any(not spans[g] for g in self._layout.states):
            raise BlockNotReadyError(f"the engine has no device block for the state at token {computed + num_tokens}")
        keys = [key for g, span in enumerate(spans) for key in state.blocks.keys[g][span.start : span.stop]]
        lease = self._manager.prepare_load(keys, state.context)
        job_id = self._jobs.add(Job(False, [state], lease, keys))
        state.phase = Phase.LOADING
        if not state.options.remote_decode:
            state.blocks.loaded = tuple(spans)
        return job_id, TransferSpec(state.context.req_id, lease, device)

    def device_blocks(self, state: RequestState | None, blocks: KVBlocks, num_tokens: int) -> list[int]:
        """Returns the device blocks of a load that cannot be done, none if they cannot be read: the input that raised
        before may raise again, and must not reach the engine."""
        computed = 0 if state is None else state.computed_at_load if state.match is None else state.match.computed
        with contextlib.suppress(Exception):
            ids: list[int] = self.device_spec(blocks, computed, computed + num_tokens)[1].block_ids.tolist()
            return ids
        return []

    def blocks_behind(self, computed: int, blocks: KVBlocks) -> list[int]:
        """Returns the device blocks of all groups for the tokens behind ``computed``."""
        ids: list[int] = []
        tables = self._layout.parts.tables(blocks.get_block_ids())
        for group, table in zip(self._layout.groups, tables, strict=True):
            ids += table[computed // group.device_block_size :]
        return ids

    def device_spec(self, blocks: KVBlocks, computed: int, end: int) -> tuple[list[range], DeviceSpec]:
        """Returns per group which offloaded blocks hold tokens ``computed`` to ``end``, and where these go. The engine
        has given null blocks to tokens that the next token does not attend to. Of a state, that is the one block that
        ends at ``end``, whatever precedes it."""
        ids: list[int] = []
        spans, sizes, firsts = [], [], []
        tables = self._layout.parts.tables(blocks.get_block_ids())
        for group, table in zip(self._layout.groups, tables, strict=True):
            before = group.skipped_tokens(end) if group.state else computed
            first = max(before, computed) // group.device_block_size
            last = min(-(-end // group.device_block_size), len(table))
            while first < last and table[first] == NULL_BLOCK:
                first += 1
            factor = group.block_size_factor
            spans.append(range(first // factor, -(-last // factor) if first < last else first // factor))
            ids += table[first:last]
            sizes.append(len(table[first:last]))
            firsts.append(first)
        return spans, DeviceSpec(np.array(ids, dtype=np.int64), tuple(sizes), tuple(firsts))

"""Loads: which host slots go to which device blocks."""

from __future__ import annotations

import contextlib

import numpy as np

from kvoffload.abc import BlockNotReadyError, DeviceSpec, KVBlocks, OffloadingManager, TransferSpec
from kvoffload.connector.jobs import Job, JobTable
from kvoffload.connector.layout import NULL_BLOCK, Layout
from kvoffload.connector.request import Match, Phase, RequestState


class LoadPlanner:
    """Pins the blocks that a request takes from its offer, and makes the job that loads them."""

    def __init__(self, manager: OffloadingManager, layout: Layout, jobs: JobTable) -> None:
        self._manager = manager
        self._layout = layout
        self._jobs = jobs

    def was_offered(self, match: Match | None, num_tokens: int) -> bool:
        """Whether a request with this lookup may load ``num_tokens``. It may load fewer tokens than it was offered,
        unless a group has a window or a state: the blocks that these need for a shorter load were not looked up."""
        offered = 0 if match is None else match.tokens or 0
        return num_tokens == offered or (num_tokens < offered and not self._layout.windows and not self._layout.states)

    def start(self, state: RequestState, blocks: KVBlocks, num_tokens: int, epoch: int) -> tuple[int, TransferSpec]:
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
        job_id = self._jobs.add(Job(False, [state], lease, keys, epoch=epoch))
        state.phase = Phase.LOADING
        if not state.options.remote_decode:
            state.blocks.loaded = tuple(spans)
        return job_id, TransferSpec(state.context.req_id, lease, device)

    def device_blocks(self, blocks: KVBlocks, computed: int, num_tokens: int) -> list[int]:
        """Returns the device blocks of a load that cannot be done, none if they cannot be read: the input that raised
        before may raise again, and must not reach the engine."""
        with contextlib.suppress(Exception):
            ids: list[int] = self.device_spec(blocks, computed, computed + num_tokens)[1].block_ids.tolist()
            return ids
        return []

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

"""Store jobs: how blocks that the manager has room for become a copy, and how it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvoffload.abc import (
    DeviceSpec,
    IntegrityError,
    LoadStoreSpec,
    OffloadingManager,
    PrepareStoreOutput,
    TransferSpec,
)
from kvoffload.connector.jobs import Job, JobTable
from kvoffload.connector.layout import Block, KeyLayout
from kvoffload.connector.observer import RequestObserver
from kvoffload.connector.request import RequestState

STORE_FAILED = "kvoffload: a store failed, or came too late for its blocks, and was dropped"
NO_ROOM = "kvoffload: no room in the host pool, every block is in use; stores wait"


class StoreJobs:
    """Makes the jobs of all stores, and ends them."""

    def __init__(
        self, manager: OffloadingManager, layout: KeyLayout, table: JobTable, observer: RequestObserver
    ) -> None:
        self._manager = manager
        self._layout = layout
        self.table = table
        self.observer = observer

    def refused(self) -> None:
        """Counts a store for which the manager has no room."""
        self.observer.metrics.add("refused_stores")
        self.observer.warn(NO_ROOM)

    def add(
        self,
        new: Sequence[tuple[RequestState | None, Block]],
        states: Sequence[RequestState],
        output: PrepareStoreOutput,
        specs: dict[int, TransferSpec],
        blocks_of: Mapping[int, int] | None = None,
    ) -> None:
        """Adds the job that stores ``new`` blocks, each with a request that can describe it, for ``states``, or for
        requests that may have ended: ``blocks_of`` says for how many blocks, by their ``number``."""
        if output.evicted_keys:
            self.observer.metrics.add("evicted_blocks", len(output.evicted_keys))
        # The slots of the lease stand in this order: with any other, blocks would be stored under wrong keys.
        if [block.key for _, block in new] != output.keys_to_store:
            raise IntegrityError("the manager has room for other blocks than it was offered, or in another order")
        if not new:
            return
        lease = output.store_spec
        num_groups, host = len(self._layout.groups), lease
        if num_groups > 1:
            order = sorted(range(len(new)), key=lambda i: new[i][1].group)
            new = [new[i] for i in order]
            host = LoadStoreSpec(lease.medium(), lease.slots[order])
        if num_groups == 1:
            ids = [device_block for _, block in new for device_block in block.device_blocks]
            sizes, firsts = [len(ids)], [new[0][1].first_device_block]
        else:
            ids = []
            sizes, firsts = [0] * num_groups, [0] * num_groups
            for _, block in new:
                if not sizes[block.group]:
                    firsts[block.group] = block.first_device_block
                sizes[block.group] += len(block.device_blocks)
                ids += block.device_blocks
        described = [(state, block) for state, block in new if state is not None]
        described = described if self.observer.describes_blocks else []
        job = Job(True, states, lease, output.keys_to_store, described, frozenset(ids), blocks_of=blocks_of or {})
        device = DeviceSpec(np.array(ids, dtype=np.int64), tuple(sizes), tuple(firsts))
        req_id = states[0].context.req_id if states else ""
        specs[self.table.add(job)] = TransferSpec(req_id, host, device)

    def end(self, job: Job) -> None:
        """Ends a store that all workers have reported."""
        self._manager.complete_store(job.lease, success=not job.failed)
        if not job.states:
            # Requests may wait for it, see ``LeavingBlocks.bring_back``.
            self.table.changes.loads += 1
        if not job.failed:
            self.table.changes.contents += 1
            self.observer.stored(job)
            return
        keys = frozenset(job.keys)
        for state in job.states:
            state.discard_stored(keys)
            self.observer.count_stored(state)
        if self.table.is_current(job):
            self.observer.metrics.add("store_failures")
            self.observer.warn(STORE_FAILED)

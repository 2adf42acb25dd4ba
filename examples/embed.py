"""kvoffload in an engine of your own: the calls of one request's life, with numpy arrays as the device.

Run it: ``python examples/embed.py``. An engine that calls these methods in this order gets everything the vLLM
adapter gets; ``kvoffload.testing.engine`` is a complete small engine to compare with.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvoffload import (
    HostBackend,
    HostPool,
    InlineTransfer,
    KVGroup,
    LRUOffloadingManager,
    OffloadingConnectorScheduler,
    OffloadingConnectorWorker,
    PageGroup,
    ScheduledStep,
    hash_blocks,
)

BLOCK_TOKENS, LAYERS, PAGE_BYTES, DEVICE_BLOCKS, HOST_BLOCKS = 16, 4, 4096, 32, 256


@dataclass
class Request:
    """What kvoffload reads of a request."""

    request_id: str
    tokens: list[int]
    num_computed_tokens: int = 0
    kv_transfer_params: None = None
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.block_hashes = hash_blocks(self.tokens, BLOCK_TOKENS)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass
class Blocks:
    """The device blocks given to a request."""

    ids: list[int]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self.ids,)


# The device's KV cache: one page a layer and block. The pool: one slot a block.
device = np.zeros((LAYERS, DEVICE_BLOCKS, PAGE_BYTES), dtype=np.uint8)
pool = HostPool(HOST_BLOCKS, LAYERS * PAGE_BYTES)
worker = OffloadingConnectorWorker(InlineTransfer([PageGroup(list(device))], pool.data))
scheduler = OffloadingConnectorScheduler(
    LRUOffloadingManager(HostBackend(BLOCK_TOKENS, HOST_BLOCKS)), groups=[KVGroup(BLOCK_TOKENS)]
)


def engine_step(step: ScheduledStep) -> set[str]:
    """One step of the engine; returns the requests whose load has ended."""
    meta = scheduler.build_connector_meta(step)
    worker.begin_step(meta)
    # ... the forward pass runs here ...
    worker.start_loads(meta)
    worker.end_step(meta)
    finished = worker.get_finished(meta)
    report = worker.take_report()
    if report is not None:
        scheduler.update_connector_output(report)
    return finished.loaded


prompt = list(range(4 * BLOCK_TOKENS))

# The first request misses, computes its four blocks, and they are stored behind its back.
first, blocks = Request("first", prompt), Blocks([1, 2, 3, 4])
assert scheduler.get_num_new_matched_tokens(first, 0) == (0, False)
scheduler.update_state_after_alloc(first, blocks, 0)
device[:, blocks.ids] = np.arange(1, 5, dtype=np.uint8)[None, :, None]
engine_step(ScheduledStep({"first": len(prompt)}, {"first": (blocks.ids,)}, frozenset({"first"})))
scheduler.request_finished(first)
while scheduler.has_pending_work():
    engine_step(ScheduledStep({}))

# Its device blocks are lost; the second request loads them into others.
device[:] = 0
second, blocks = Request("second", [*prompt, 7]), Blocks([9, 8, 7, 6, 5])
tokens, is_async = scheduler.get_num_new_matched_tokens(second, 0)
assert (tokens, is_async) == (len(prompt), True)
scheduler.update_state_after_alloc(second, blocks, tokens)
loaded: set[str] = set()
while "second" not in loaded:
    loaded |= engine_step(ScheduledStep({}))
assert (device[:, blocks.ids[:4]] == np.arange(1, 5, dtype=np.uint8)[None, :, None]).all()

for record in scheduler.records:
    print(record)
pool.close()

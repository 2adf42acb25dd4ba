"""kvoffload in an engine of your own: a request is computed, the server restarts, and the same request loads its KV."""

import tempfile
from types import SimpleNamespace

import numpy as np

import kvoffload as kv

TOKENS, LAYERS, PAGE_BYTES = 16, 4, 4096  # tokens per block, layers of the model, bytes per block and layer
ENGINE = kv.EngineSpec([kv.KVGroup(TOKENS)], share_loads=False)


def serve(config: kv.OffloadConfig, ids: list[int]) -> int:
    """Starts a server that answers one request in the device blocks ``ids``. Returns how many tokens it loaded."""
    device = np.zeros((LAYERS, 32, PAGE_BYTES), dtype=np.uint8)  # the engine's KV cache, here without a GPU
    pool = kv.HostPool(config.num_blocks(LAYERS * PAGE_BYTES), LAYERS * PAGE_BYTES)
    worker = kv.OffloadingConnectorWorker(kv.InlineTransfer([kv.PageGroup(list(device))], pool.data))
    fingerprint = kv.fingerprint({"weights": "version 1"})  # in earnest: everything that shapes the bytes
    scheduler = kv.build_scheduler(config, ENGINE, [pool.handle()], fingerprint)
    request = SimpleNamespace(request_id="r", num_tokens=65, num_computed_tokens=0, kv_transfer_params=None)
    request.block_hashes = kv.hash_blocks(range(65), TOKENS)

    def step(scheduled: kv.ScheduledStep, computed: list[int]):
        with worker.step(scheduler.build_connector_meta(scheduled), scheduler.update_connector_output) as finished:
            device[:, computed] = 1 + np.arange(len(computed))[:, None]  # the forward pass
        return finished

    while (offer := scheduler.get_num_new_matched_tokens(request, 0)[0]) is None:
        step(kv.ScheduledStep({}), [])  # the disk is read meanwhile
    scheduler.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: (ids,)), offer)
    while offer and "r" not in (finished := step(kv.ScheduledStep({}), [])).loaded:
        pass
    request.num_computed_tokens = offer = 0 if offer and "r" in finished.failed else offer
    step(kv.ScheduledStep({"r": 65 - offer}, {"r": (ids,)}, frozenset({"r"})), ids[offer // TOKENS : 4])
    request.num_computed_tokens = 65
    while scheduler.has_pending_work():
        step(kv.ScheduledStep({}), [])  # blocks are stored and written to disk meanwhile
    scheduler.request_finished(request)
    scheduler.shutdown()
    assert (device[:, ids[:4]] == 1 + np.arange(4)[:, None]).all()
    return offer


with tempfile.TemporaryDirectory() as directory:
    config = kv.OffloadConfig(host_bytes=4 << 20, disk_dir=directory, disk_bytes=64 << 20, load_deadline_ms=60_000)
    assert [serve(config, ids) for ids in ([1, 2, 3, 4, 5], [9, 8, 7, 6, 5])] == [0, 64]

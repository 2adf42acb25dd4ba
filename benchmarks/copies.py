"""Gather and scatter of KV pages compared with memcpy, in GB/s.

The device side is one array (layers, blocks, page bytes), the layout of vLLM's CPU backend; blocks are copied in random
order. memcpy copies the same number of bytes at once in the same run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.report import Row, publish
from kvoffload.abc import DeviceSpec, LoadStoreSpec, PageGroup, TransferSpec
from kvoffload.host.pool import HostPool, padded_slot_bytes
from kvoffload.transfer.inline import InlineTransfer

LAYERS = 32
TOTAL_BYTES = 512 << 20
ROUNDS = 7


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main(out: Path, quick: bool) -> None:
    rows: list[Row] = []
    total = TOTAL_BYTES // (8 if quick else 1)
    for page in (8 << 10, 64 << 10):
        num_blocks = total // (LAYERS * page)
        device = np.zeros((LAYERS, num_blocks, page), dtype=np.uint8)
        device[:] = 1
        pool = HostPool(num_blocks, padded_slot_bytes(LAYERS * page))
        pool.data[:] = 2
        transfer = InlineTransfer([PageGroup(list(device))], pool.data)
        flat = np.empty(num_blocks * LAYERS * page, dtype=np.uint8)
        flat[:] = 3
        blocks = np.random.default_rng(0).permutation(num_blocks).astype(np.int64)
        slots = np.random.default_rng(1).permutation(num_blocks).astype(np.int64)
        spec = TransferSpec("bench", LoadStoreSpec("CPU", slots), DeviceSpec(blocks, (num_blocks,), (0,)))

        def job(is_store: bool, transfer: InlineTransfer = transfer, spec: TransferSpec = spec) -> None:
            transfer.submit(0, spec, is_store)
            (result,) = transfer.poll(busy=False)
            assert result.ok

        times: dict[str, list[float]] = {"gather": [], "scatter": [], "memcpy": []}
        for _ in range(ROUNDS):
            times["gather"].append(seconds(lambda: job(True)))
            times["scatter"].append(seconds(lambda: job(False)))
            times["memcpy"].append(seconds(partial(np.copyto, flat, device.reshape(-1))))
        nbytes = flat.nbytes
        speed = {name: nbytes / statistics.median(t) / 1e9 for name, t in times.items()}
        for name, direction in (("gather", "store"), ("scatter", "load")):
            what = f"{name} ({direction}), {page >> 10} KiB pages, {LAYERS} layers"
            rows.append(Row(what, speed[name], "GB/s", "memcpy", speed[name] / speed["memcpy"]))
        rows.append(Row(f"memcpy, {nbytes >> 20} MiB", speed["memcpy"], "GB/s"))
        pool.close()
    publish("copies", "Copies on the engine's thread", rows, out)

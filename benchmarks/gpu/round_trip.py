"""``python -m benchmarks.gpu.round_trip``: stores and loads a few blocks, small enough for a sanitizer of memory.

With ``--planted`` the kernel is given a block number outside the cache, which the sanitizer must find.
"""

from __future__ import annotations

import sys

import numpy as np

from benchmarks.gpu import cuda
from benchmarks.gpu.rig import Layout, make_views, rig
from kvoffload.abc import PageGroup
from kvoffload.transfer.cuda import driver
from tests.transfer.cuda.calls import launch

NUM_BLOCKS, LAYERS, PAGE = 32, 4, 2048


def main(arguments: list[str]) -> None:
    group = PageGroup(make_views(Layout.MERGED, LAYERS, NUM_BLOCKS, PAGE))
    blocks, slots = np.random.default_rng(0).permutation(NUM_BLOCKS), np.arange(NUM_BLOCKS)
    rows = np.random.default_rng(1).integers(0, 256, (NUM_BLOCKS, LAYERS * PAGE), np.uint8)
    with rig([group], NUM_BLOCKS) as r:
        r.write(0, blocks, rows)
        if "--planted" in arguments:
            staging = cuda.empty(group.device_block_bytes + 256)
            aligned = -(-int(staging.data_ptr()) // 256) * 256
            kernel = r.device.native_calls().kernels[0]
            assert kernel is not None
            calls = driver.Driver(0)
            calls.use_context()
            launch(calls, kernel, kernel.gather, r.device.new_stream(), np.array([1 << 30]), aligned)
            cuda.synchronize()
        assert r.result(r.store(slots, blocks)).ok
        r.fill(0, blocks, 0xEE)
        r.transfer.before_forward()
        assert r.result(r.load(slots, blocks)).ok
        assert np.array_equal(r.rows(0, blocks), rows)
    print("right bytes")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Storage of SGLang's HiCache: KVOffloadStorage with a disk tier beside SGLang's HiCacheFile, on the same file system.

Both are called as SGLang's controller calls them, with CALL_PAGES pages at once from one of its host pools, in turn.
Stored means taken over: by the staging pool and the operating system; "until written" adds the time until the disk tier
has written all. The pages are read after a restart. Neither waits for the disk itself: where the files lie in memory,
this compares what both cost beside the medium. A figure is the median of ROUNDS rounds with different pages.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from benchmarks.report import Row, publish

CALL_PAGES = 128
ROUNDS = 5
PAGE_TOKENS = 16
SIZES = (("page_first", 8, 8, 64), ("layer_first", 8, 8, 64), ("page_first_direct", 32, 8, 128))
"""Layout of the host pool, layers, heads and the size of a head: pages of 256 KiB, and of 2 MiB."""

Times = dict[str, list[float]]


class Calls(NamedTuple):
    """SGLang's calls for one batch of pages."""

    load: Callable[..., int]
    store: Callable[..., bool]
    request: object
    pages: tuple[Any, ...]
    head: tuple[Any, ...] = ()
    """What ``store`` needs beside the pages."""

    def time(self, times: Times, name: str, is_load: bool) -> None:
        began = time.perf_counter()
        done = self.load(self.request, *self.pages) == CALL_PAGES if is_load else self.store(*self.pages, *self.head)
        times[f"{name}: {'load' if is_load else 'store'}"].append(time.perf_counter() - began)
        if not done:
            raise RuntimeError(f"{name}: some pages were not {'loaded' if is_load else 'stored'}")


def measure(parts: Any, folder: Path, layout: str, layers: int, heads: int, dim: int) -> tuple[Times, int]:
    """Returns the seconds of each call, and the bytes of a page."""
    parts.BUDGET = 8 << 30
    # Several threads make HiCacheFile's copies slower where others use the machine.
    parts.torch.set_num_threads(1)
    pool = parts.mha_pool(layout, CALL_PAGES, PAGE_TOKENS, layers, heads, dim)
    parts.fill(pool, 1)
    nbytes = pool.size_per_token * PAGE_TOKENS
    indices = parts.torch.arange(CALL_PAGES * PAGE_TOKENS)
    chains = [parts.page_hashes([i] * CALL_PAGES * PAGE_TOKENS, None, PAGE_TOKENS) for i in range(ROUNDS)]
    options = parts.extra_config(
        tier={"kind": "disk", "dir": str(folder / "disk"), "bytes": max(1 << 28, 2 * ROUNDS * CALL_PAGES * nbytes)}
    )
    theirs = parts.storage_interface.HiCacheFile(parts.storage_config(extra_config={}), str(folder))
    head = parts.storage_interface.HiCacheStorageExtraInfo(prefix_keys=[])
    times: Times = defaultdict(list)
    request: Any = SimpleNamespace(is_terminated=lambda: False, request_id="")
    for is_load in (False, True):
        rank = parts.Rank({"kv": pool}, options)
        made = rank.controller
        for keys in chains:
            ours = Calls(made._page_get_zero_copy, made._page_set_zero_copy, request, (keys, indices), (head,))
            control = Calls(made._generic_page_get, made._generic_page_set, request, (keys, indices))
            began = time.perf_counter()
            ours.time(times, "kvoffload", is_load)
            while not is_load and not rank.storage._transfers.bridge.is_idle:
                time.sleep(0.001)
            if not is_load:
                times["kvoffload: store until written"].append(time.perf_counter() - began)
            made.storage_backend = theirs
            control.time(times, "HiCacheFile", is_load)
            made.storage_backend = rank.storage
        rank.close()
    return times, nbytes


def main(out: Path, quick: bool = False) -> None:
    try:
        from tests.sglang import parts
    except pytest.skip.Exception as reason:
        print(f"\nhicache: left out: {reason}")
        return
    rows = []
    for layout, layers, heads, dim in SIZES[: 1 if quick else None]:
        with tempfile.TemporaryDirectory() as folder:
            times, nbytes = measure(parts, Path(folder), layout, layers, heads, dim)
        speeds = {name: CALL_PAGES / statistics.median(each) for name, each in times.items()}
        for name, speed in speeds.items():
            other = f"HiCacheFile: {'load' if name.endswith('load') else 'store'}"
            versus = "" if name == other else other
            what = f"{name}, {layout}, pages of {nbytes >> 10} KiB"
            rows.append(Row(what, speed * nbytes / 1e9, "GB/s", versus, speed / speeds[other] if versus else None))
    publish("hicache", f"Storage of HiCache, {CALL_PAGES} pages per call", rows, out)

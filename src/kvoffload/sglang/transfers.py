"""PageTransfers: moves pages between SGLang's host pools and the tiers, in batches."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvoffload.abc import LookupState, OffloadKey
from kvoffload.sglang import engine
from kvoffload.sglang.pools import KV, HostPages
from kvoffload.tiering.bridge import TierBridge

if TYPE_CHECKING:
    import torch

PAGES_PER_CALL = 128
"""Pages that are handed to the bridge at once. SGLang calls v2 methods with all pages of an operation."""
MAX_SAMPLES = 1024
"""Measured transfers that are kept until SGLang asks for them."""
HIT = int(LookupState.HIT)


class PageTransfers:
    """Finds, loads and stores pages while there is a ``bridge``; without one every page is a miss.

    ``pools`` are SGLang's host pools by name. ``weights``: what ``engine.weights`` returned when the server started.
    ``samples``: the transfers of pages of KV that were measured, if ``is_measured``: pages, and GiB per second.
    """

    def __init__(self, pools: dict[str, HostPages], weights: tuple[str, str] | None) -> None:
        self.bridge: TierBridge | None = None
        self.is_measured = False
        self.samples = {name: deque[tuple[int, float]](maxlen=MAX_SAMPLES) for name in ("prefetch", "backup")}
        self._pools = pools
        self._weights = weights
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            bridge, self.bridge = self.bridge, None
        if bridge is not None:
            bridge.close()

    def reset(self) -> None:
        """Forgets all pages."""
        with self._lock:
            if self.bridge is not None:
                self.bridge.reset()

    def exists(self, pool: HostPages, hashes: Sequence[str]) -> list[bool]:
        bridge = self._serving()
        if bridge is None or not hashes:
            return [False] * len(hashes)
        return pool.is_complete((bridge.exists(pool.keys(hashes)) == HIT).tolist())

    def get(self, pool: HostPages, hashes: Sequence[str], indices: torch.Tensor | None) -> list[bool]:
        """Loads pages to ``indices`` of ``pool``. Returns which have arrived."""

        def load(bridge: TierBridge, batch: Sequence[str], at: torch.Tensor) -> list[bool]:
            if pool.is_addressed:
                return bridge.get(pool.keys(batch), pool.views(at))
            pages = pool.empty(len(batch))
            blocks = bridge.get(pool.keys(batch), pool.blocks_of(pages))
            pool.fill(at, pages, pool.is_complete(blocks))
            return blocks

        return self._in_batches("prefetch", pool, hashes, indices, load)

    def put(
        self,
        pool: HostPages,
        hashes: Sequence[str],
        indices: torch.Tensor | None,
        before: Sequence[str],
        chained: Sequence[HostPages],
    ) -> list[bool]:
        """Stores pages of ``pool``, one of the pools ``chained``: a page is of use only with those of all these pools
        from the head of the sequence on, of which ``before`` comes first. Without ``chained`` each page is of use
        alone. Returns which will be stored."""
        chain = _merged(chained, before)

        def store(bridge: TierBridge, batch: Sequence[str], at: torch.Tensor) -> list[bool]:
            keys = pool.keys(batch)
            chain.extend(_merged(chained, batch) if chained else keys)
            return bridge.put(keys, pool.views(at) if pool.is_addressed else pool.copies(at), chain)

        return self._in_batches("backup", pool, hashes, indices, store)

    def _serving(self) -> TierBridge | None:
        """Returns the bridge, None if there is none. Everything stored is forgotten first if the weights may have
        changed: SGLang then flushes its caches, or says that it has others."""
        with self._lock:
            if self.bridge is not None:
                weights = engine.weights()
                if self._pools[KV].was_cleared() or weights != self._weights:
                    self._weights = weights
                    self.bridge.reset()
            return self.bridge

    def _in_batches(
        self,
        name: str,
        pool: HostPages,
        hashes: Sequence[str],
        indices: torch.Tensor | None,
        transfer: Callable[[TierBridge, Sequence[str], torch.Tensor], list[bool]],
    ) -> list[bool]:
        """Transfers pages in batches, until one fails in part: pages behind it are of no use. ``transfer`` returns
        which blocks of a batch were transferred."""
        bridge = self._serving()
        if bridge is None or indices is None or not hashes or pool.num_pages(indices) != len(hashes):
            return [False] * len(hashes)
        done: list[bool] = []
        for first in range(0, len(hashes), PAGES_PER_CALL):
            batch = hashes[first : first + PAGES_PER_CALL]
            began = time.monotonic()
            at = indices[first * pool.tokens : (first + len(batch)) * pool.tokens]
            ok = pool.is_complete(transfer(bridge, batch, at))
            done += ok
            if not all(ok):
                break
            if self.is_measured and pool.name == KV:
                seconds = max(time.monotonic() - began, 1e-9)
                self.samples[name].append((len(batch), len(batch) * pool.nbytes / seconds / (1 << 30)))
        return done + [False] * (len(hashes) - len(done))


def _merged(pools: Sequence[HostPages], hashes: Sequence[str]) -> list[OffloadKey]:
    """Returns the keys of the blocks of pages in all ``pools``, page by page."""
    columns = [(pool.parts, pool.keys(hashes)) for pool in pools]
    if len(columns) == 1:
        return columns[0][1]
    return [key for i in range(len(hashes)) for n, keys in columns for key in keys[i * n : (i + 1) * n]]

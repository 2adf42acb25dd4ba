"""The worker half of one rank: vLLM's KV caches, the host pool that is made for them, and the copies between both."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from kvoffload.abc import PageGroup
from kvoffload.connector.parts import plan_parts
from kvoffload.connector.ranks import CanonicalRows, KVShare, LayerPages, check_settings, join
from kvoffload.connector.worker import OffloadingConnectorWorker
from kvoffload.host.pool import boot_id
from kvoffload.vllm import versions
from kvoffload.vllm.adapters import watch_adapters
from kvoffload.vllm.cuda import numa_node
from kvoffload.vllm.layout import EngineLayout, RankInfo
from kvoffload.vllm.pages import RankPages, layer_pages, log_layout, make_transfer, page_groups, rank_pages
from kvoffload.vllm.replicas import engine_ranks, open_pool, own_replicas
from kvoffload.vllm.weights import watch_weights

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

LOGGED_WASTE = 0.01
"""The log says how much of the host pool holds nothing from this share on."""


class RankHalf:
    """Agrees with the other ranks on how to divide blocks, opens the pool of this rank and makes its ``worker``.

    All ranks of the engine must make theirs. ``layout`` is the given one, with what was agreed on. Raises ConfigError
    for a layout that is not served, and if there is too little memory on some rank.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        layout: EngineLayout,
        kv_caches: dict[str, torch.Tensor],
    ) -> None:
        self._vllm_config = vllm_config
        self._ranks = ranks = engine_ranks(layout)
        self._layers: tuple[LayerPages, ...] = ()
        """See ``RankInfo.layers``."""
        self._was_watched = False
        """Whether the worker has got its WeightWatch, if there is one."""
        groups: list[PageGroup] = []
        canonical: list[RankPages] = []

        def describe() -> KVShare:
            # This refuses a layout that is not served, before any memory is allocated.
            groups.extend(page_groups(layout, kv_caches))
            log_layout(versions.kv_cache_layout(vllm_config), groups)
            self._layers = layer_pages(layout, vllm_config, kv_caches)
            replicas = own_replicas(layout, vllm_config)
            node = (boot_id(), layout.node)
            share = KVShare(replicas, self._layers, layout.device_block_bytes, node, layout.settings)
            if not layout.config.canonical_layout:
                return share
            rank = ranks.index % layout.tensor_parallel
            pages = rank_pages(layout, vllm_config, kv_cache_config, kv_caches, rank)
            if isinstance(pages, str):
                return replace(share, canonical=pages)
            canonical.append(pages)
            return replace(share, canonical=pages.pages)

        shares = ranks.collect(describe)
        check_settings(shares)
        rows = join(shares, layout.kv_groups, ranks.index, layout.tensor_parallel)
        sizes, stores, row_bytes = [share.device_block_bytes for share in shares], None, None
        if isinstance(rows, CanonicalRows):
            sizes, row_bytes, self._layers = [rows.row_bytes], rows.row_bytes, rows.layers
            groups, stores = canonical[0].place(groups, rows), canonical[0].stores
        elif layout.config.canonical_layout and ranks.index == 0:
            logger.warning(
                "kvoffload: canonical_layout has no effect: %s. Tiers give blocks to engines of the same parallelism",
                rows,
            )
        plan = plan_parts(layout.kv_groups, sizes)
        if ranks.index == 0 and plan.waste_of_whole >= LOGGED_WASTE:
            logger.info("kvoffload: %s", plan.describe())
        self.layout = replace(layout, row_bytes=row_bytes, parts=plan.parts)
        self.pool = open_pool(self.layout, ranks, shares, lambda: numa_node(groups), stores)
        try:
            self.worker = OffloadingConnectorWorker(make_transfer(plan.parts.page_groups(groups), self.pool))
        except BaseException:
            self.pool.close()
            raise

    def handshake(self) -> RankInfo:
        """Returns what the scheduler half must know of this rank."""
        if not self._was_watched:
            # At the first call the engine is warmed up and the weights cannot have been updated yet.
            self._was_watched = True
            self.worker.weights.watch = watch_weights(self._vllm_config)
            self.worker.adapters.watch = watch_adapters(self._vllm_config, self._ranks.index)
        return RankInfo(self.pool.handle, self._layers, self.layout.parts, self.layout.row_bytes is not None)

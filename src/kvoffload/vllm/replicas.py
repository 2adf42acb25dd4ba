"""KV that several tensor-parallel ranks hold alike: which ranks these are, and the pool that they share.

With latent attention (MLA), all tensor-parallel ranks hold the same KV. If there are fewer KV heads than ranks, vLLM
gives the same heads to consecutive ranks. The first rank of such a set, its leader, stores the blocks of all of them
into its pool, and each rank loads them from there. Kernels may round differently on each rank; the bytes of any rank
are valid KV of the block.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import GroupCoordinator, get_pp_group, get_tp_group
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.v1.kv_cache_interface import MambaSpec

from kvoffload.abc import ByteArray
from kvoffload.connector.ranks import Gather, KVShare, Ranks, count_pools, count_replicas
from kvoffload.host.pool import HostPool, PoolHandle
from kvoffload.vllm import versions
from kvoffload.vllm.engine_worker import calling_worker, models_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvoffload.vllm.layout import EngineLayout

logger = logging.getLogger(__name__)

POOL_DEADLINE_S = 3600.0
"""How long a rank waits until its leader has allocated its pool. vLLM's process groups may have a shorter deadline."""


@dataclass(frozen=True, slots=True)
class RankPool:
    """The host pool of a rank, its own or that of its leader."""

    handle: PoolHandle
    data: ByteArray
    """Bytes of shape (num_blocks, slot_bytes)."""
    own: HostPool | None
    """None: it is another rank's."""
    stores: bool
    """Whether this rank stores blocks. Otherwise another one stores those of both."""

    def close(self) -> None:
        """Frees the memory, if it is this rank's. May be called twice."""
        if self.own is not None:
            self.own.close()


def engine_ranks(layout: EngineLayout) -> Ranks:
    """Returns the ranks of the engine that this worker belongs to."""
    if layout.ranks == 1:
        return Ranks()
    tensor, pipeline = get_tp_group(), get_pp_group()
    index = pipeline.rank_in_group * tensor.world_size + tensor.rank_in_group
    return Ranks(index, [_gather(tensor), _gather(pipeline)])


def open_pool(
    layout: EngineLayout,
    ranks: Ranks,
    shares: list[KVShare],
    find_numa_node: Callable[[], int | None],
    stores: bool | None = None,
) -> RankPool:
    """Returns the pool of this rank. If it is its own, it is on the node that ``find_numa_node`` returns.

    ``stores``: in the canonical layout, in which all ranks share a pool, whether this rank stores. All ranks of the
    engine must call this. Raises ConfigError if there is too little memory on some rank.
    """
    replicas = count_replicas(shares) if stores is None else layout.ranks
    num_blocks = layout.count_blocks(count_pools(shares, ranks.index, replicas))
    if replicas == 1:
        pool = HostPool(num_blocks, layout.slot_bytes, find_numa_node())
        return RankPool(pool.handle(layout.node), pool.data, pool, stores is not False)
    leader = ranks.index - ranks.index % replicas
    pools: list[HostPool] = []

    def make() -> PoolHandle | None:
        if ranks.index != leader:
            return None
        pools.append(HostPool(num_blocks, layout.slot_bytes, find_numa_node()))
        return pools[0].handle(layout.node)

    try:
        handle = ranks.collect(make, POOL_DEADLINE_S)[leader]
    except Exception:
        for pool in pools:
            pool.close()
        raise
    assert handle is not None
    if not pools:
        return RankPool(handle, handle.open(), None, bool(stores))
    if stores is None:
        logger.info("kvoffload: rank %d stores the KV of %d ranks, which hold the same", leader, replicas)
    return RankPool(handle, pools[0].data, pools[0], stores is not False)


def own_replicas(layout: EngineLayout, vllm_config: VllmConfig) -> int:
    """Returns how many consecutive tensor-parallel ranks hold the same KV in every layer of this rank. Returns 1 if
    vLLM does not say so of some layer."""
    if layout.tensor_parallel == 1:
        return 1
    try:
        return replicas_of(layout, vllm_config, models_of(calling_worker()))
    except Exception:
        logger.warning("kvoffload: each rank stores its own KV: it cannot be compared with others", exc_info=True)
        return 1


def replicas_of(layout: EngineLayout, vllm_config: VllmConfig, models: Iterable[torch.nn.Module]) -> int:
    """Returns what ``own_replicas`` does, for a worker with these models."""
    layers = vllm_config.compilation_config.static_forward_context
    ranks = layout.tensor_parallel
    by_heads = _replicas_of_heads(models, ranks)
    known = [
        _replicas_of_layer(layer.spec, ranks, by_heads.get(id(layers[layer.name]), 1))
        for group in layout.groups
        for layer in group.layers
    ]
    return math.gcd(ranks, *known)


def _replicas_of_layer(spec: Any, ranks: int, by_heads: int) -> int:
    """Returns how many consecutive ranks hold the same KV of a layer: as its spec says, else ``by_heads``. States are
    divided between all ranks unless their spec says otherwise."""
    if isinstance(spec, MambaSpec):
        return ranks if versions.attribute(spec, "tp_replicated") else 1
    shards = versions.attribute(spec, "max_tp_shards")
    return by_heads if shards is None else max(1, ranks // int(shards))


def _replicas_of_heads(models: Iterable[torch.nn.Module], ranks: int) -> dict[int, int]:
    """Returns how many consecutive ranks hold the same KV heads, by the id of an attention layer.

    A layer counts if it is the only one beside the projection that computes its keys and values: configurations of
    models with several kinds of layers do not say how many heads each has.
    """
    found: dict[int, int] = {}
    for model in models:
        for parent in model.modules():
            # With adapters, the projection is inside another layer.
            children = [getattr(child, "base_layer", child) for child in parent.children()]
            layers = [child for child in children if isinstance(child, AttentionLayerBase)]
            projections = [child for child in children if isinstance(child, QKVParallelLinear)]
            if len(layers) != 1 or len(projections) != 1:
                continue
            (layer,), (projection,) = layers, projections
            same_heads = getattr(layer, "num_kv_heads", None) == projection.num_kv_heads
            if same_heads and projection.tp_size == ranks:
                found[id(layer)] = int(projection.num_kv_head_replicas)
    return found


def _gather(group: GroupCoordinator) -> Gather:
    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(values, value, group=group.cpu_group)
        return values

    return gather

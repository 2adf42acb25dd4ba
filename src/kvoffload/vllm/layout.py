"""What both halves of the connector derive from vLLM's configuration: KV cache groups, ranks and engines."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvoffload.abc import NOT_SET, ConfigError, KVGroup
from kvoffload.config import IntegrationConfig, OffloadConfig
from kvoffload.connector.parts import Parts
from kvoffload.connector.ranks import LayerPages
from kvoffload.host.pool import PoolHandle
from kvoffload.tiers.config import TierEntry
from kvoffload.vllm import versions
from kvoffload.vllm.refusals import refuse_unserved, refuse_unserved_specs, refuse_unserved_with_tiers

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


class Layer(NamedTuple):
    """A layer, and the bytes of one device block in it, without those that vLLM appends to make pages equally large."""

    name: str
    page_bytes: int
    spec: KVCacheSpec


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """One KV cache group as this rank sees it."""

    group: KVGroup
    layers: tuple[Layer, ...]
    spec: KVCacheSpec

    @property
    def device_block_bytes(self) -> int:
        """Bytes of one device block on this rank."""
        return sum(layer.page_bytes for layer in self.layers)


@dataclass(frozen=True, slots=True)
class RankInfo(KVConnectorHandshakeMetadata):
    """What a worker sends to the scheduler half at start."""

    pool: PoolHandle
    """The pool that the rank loads from. Ranks with the same KV have the same one."""
    layers: tuple[LayerPages, ...]
    """Group after group."""
    parts: Parts
    """How the ranks divide blocks."""
    is_canonical: bool = False
    """Whether blocks have the canonical layout. Then ``layers`` are those of all ranks, as they are without
    parallelism."""


def one_per_pool(infos: Sequence[RankInfo]) -> list[RankInfo]:
    """Returns the ranks that store: of those with the same pool, the first."""
    first: dict[PoolHandle, RankInfo] = {}
    for info in infos:
        first.setdefault(info.pool, info)
    return list(first.values())


def layers_of(infos: Sequence[RankInfo]) -> list[list[list[Any]]]:
    """Returns the layers of each rank that stores, for the fingerprint: a block has one part per pool."""
    return [list(map(list, info.layers)) for info in one_per_pool(infos)]


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """What is served of a model, and its place on the node."""

    config: OffloadConfig | IntegrationConfig
    groups: tuple[GroupLayout, ...]
    hash_block_size: int
    engine: int
    """Index of this engine among the engines of its node."""
    engines: int
    """Engines that share the budgets of this node."""
    parts: Parts
    """How blocks are divided."""

    @property
    def kv_groups(self) -> list[KVGroup]:
        return [group.group for group in self.groups]


@dataclass(frozen=True, slots=True)
class EngineLayout(ModelLayout):
    """What both halves of the connector derive from vLLM's configuration. In the scheduler's process the groups are
    those of the first rank. Blocks are whole until the ranks have agreed on how to divide them."""

    config: OffloadConfig
    num_device_blocks: int
    ranks: int
    tensor_parallel: int
    """How many of the ranks compute the same layers. These ranks are consecutive."""
    node: int = 0
    """Number of this node among the nodes of the engine."""
    row_bytes: tuple[int, ...] | None = None
    """In the canonical layout: bytes of one device block of each group on all ranks together."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot of this rank's pool. A part of a block of any group fits into it."""
        return self.parts.slot_bytes(self.kv_groups, self.row_bytes or self.device_block_bytes)

    @property
    def device_block_bytes(self) -> tuple[int, ...]:
        """Bytes of one device block of each group on this rank."""
        return tuple(group.device_block_bytes for group in self.groups)

    @property
    def has_states(self) -> bool:
        """Whether some layers have states instead of KV."""
        return any(group.state for group in self.kv_groups)

    @property
    def settings(self) -> tuple[tuple[str, Any], ...]:
        """What has to be the same on all nodes. See ``KVShare.settings``."""
        factors = [group.block_size_factor for group in self.kv_groups]
        return (
            ("host_bytes", self.config.host_bytes),
            ("engines_per_node", self.engines),
            ("block_size_factor", factors),
            ("canonical_layout", self.config.canonical_layout),
        )

    def count_blocks(self, pools: int) -> int:
        """Returns the number of slots of this rank's pool, if this engine has so many pools on the node. Raises
        ConfigError if the pool's share of ``host_bytes`` holds none."""
        return self.config.num_blocks(self.slot_bytes, pools * self.engines)

    def check_ranks(self, infos: Sequence[RankInfo]) -> None:
        """Raises ConfigError unless every rank has sent its RankInfo, and all divide blocks into the same parts."""
        if len(infos) != self.ranks:
            raise ConfigError(
                f"{len(infos)} of {self.ranks} workers have sent the location of their host pool, and kvoffload needs "
                "all of them: set distributed_executor_backend to mp or uni"
            )
        if len({info.parts for info in infos}) > 1:
            raise ConfigError(
                f"the workers divide blocks into different parts ({[info.parts.counts for info in infos]}): run the "
                "same version of kvoffload in all of them"
            )

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> EngineLayout:
        """Raises ConfigError for a wrong option, and for a model or a layout that kvoffload does not serve."""
        options: Mapping[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
        config = OffloadConfig.from_mapping(options)
        groups = group_layouts(vllm_config, kv_cache_config, config.tier_entries, config.factor)
        engine, engines = node_engines(vllm_config, config.engines_per_node)
        return cls(
            config=config,
            groups=groups,
            num_device_blocks=kv_cache_config.num_blocks,
            hash_block_size=versions.hash_block_size(vllm_config, kv_cache_config),
            ranks=vllm_config.parallel_config.world_size,
            tensor_parallel=vllm_config.parallel_config.tensor_parallel_size,
            node=versions.attribute(vllm_config.parallel_config, "node_rank_within_dp"),
            engine=engine,
            engines=engines,
            parts=Parts.none(len(groups)),
        )


def group_layouts(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, tiers: Sequence[TierEntry], factor: Callable[[int], int]
) -> tuple[GroupLayout, ...]:
    """Returns the KV cache groups. ``tiers``: those below host memory. ``factor`` returns the device blocks per
    offloaded block for a number of tokens per device block.

    Raises ConfigError for a configuration or a model that kvoffload does not serve.
    """
    refuse_unserved(vllm_config)
    if tiers:
        refuse_unserved_with_tiers(vllm_config, tiers[0])
    if not kv_cache_config.kv_cache_groups:
        raise ConfigError(fault="this model keeps no KV cache", fix="run it without kvoffload")
    lookahead = _lookahead(vllm_config, kv_cache_config)
    return tuple(
        _group_layout(factor, group.kv_cache_spec, group.layer_names, tokens)
        for group, tokens in zip(kv_cache_config.kv_cache_groups, lookahead, strict=True)
    )


def _group_layout(factor: Callable[[int], int], spec: KVCacheSpec, names: Sequence[str], lookahead: int) -> GroupLayout:
    mixed = isinstance(spec, UniformTypeKVCacheSpecs)
    specs = spec.kv_cache_specs if mixed else dict.fromkeys(names, spec)
    refuse_unserved_specs(specs.values() if mixed else [spec])
    first = next(iter(specs.values()), spec)
    # A FullAttentionSpec may have a window too: its layers attend to no more than that, but all blocks are kept.
    window = first.sliding_window + first.extra_retained_tokens if isinstance(first, SlidingWindowSpec) else None
    chunk = first.attention_chunk_size if isinstance(first, ChunkedLocalAttentionSpec) else None
    # All layers of a group are of one kind.
    state = isinstance(first, MambaSpec)
    group = KVGroup(
        device_block_size=spec.block_size,
        # A state is whole in one device block.
        block_size_factor=1 if state else factor(spec.block_size),
        sliding_window=window,
        attention_chunk=chunk,
        lookahead=0 if state else lookahead,
        state=state,
    )
    page_bytes = operator.attrgetter("state_content_size_bytes" if state else "unpadded_page_size_bytes")
    return GroupLayout(group, tuple(Layer(name, int(page_bytes(specs[name])), specs[name]) for name in names), spec)


def _lookahead(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[int]:
    """Returns, per group, on how many tokens after its own the KV of a position depends.

    The drafter's layers, if it reads the hidden states of the model, are given the token after each of these. They are
    in the groups that vLLM marks, or, if it marks none, perhaps in all that hold KV per token. A draft model that is
    run on the same tokens as the model looks ahead to none.
    """
    groups, tokens = kv_cache_config.kv_cache_groups, versions.num_lookahead_tokens(vllm_config)
    with_kv = [g for g, group in enumerate(groups) if not isinstance(group.kv_cache_spec, MambaSpec)]
    drafting = [g for g in with_kv if groups[g].is_eagle_group] or with_kv
    return [tokens if g in drafting else 0 for g in range(len(groups))]


def without_parallelism(spec: KVCacheSpec, heads: int) -> KVCacheSpec:
    """Returns ``spec`` as it is on a single rank, which has ``heads`` KV heads."""
    if isinstance(spec, (MLAAttentionSpec, MambaSpec)):
        return spec
    # Everything that follows from the number of heads on a rank is left out.
    return replace(spec, num_kv_heads=heads, num_head_slots=None, max_tp_shards=None)


def node_engines(vllm_config: VllmConfig, given: int | None) -> tuple[int, int]:
    """Returns the index of this engine on its node, and how many engines share the node's budgets. ``given``: the
    option ``engines_per_node``. Raises ConfigError if that is wrong or needed."""
    parallel = vllm_config.parallel_config
    rank, index = parallel.data_parallel_rank_local or 0, parallel.data_parallel_index
    # With an external load balancer each engine has local rank 0.
    engine = rank or (index % given if given else 0)
    if parallel.data_parallel_size > 1:
        local = int(parallel.data_parallel_size_local)
        if local > 1 and given not in (None, local):
            raise ConfigError("engines_per_node", given, f"vLLM runs {local} engines on this node", "leave it out")
        return (rank, local) if local > 1 else (engine, _given_engines(given, rank, None))
    if index == 0 and not re.search(r"_dp\d+$", vllm_config.kv_transfer_config.engine_id or ""):
        return engine, given or 1
    return engine, _given_engines(given, rank, versions.most_data_parallel_engines(vllm_config))


def _given_engines(given: int | None, rank: int, otherwise: int | None) -> int:
    """Returns ``engines_per_node``, or ``otherwise`` if it is not set. ``rank`` is this engine's local rank.

    Raises ConfigError if both are None or the number is too small for ``rank``.
    """
    most = given or otherwise
    if most is None:
        raise ConfigError(
            "engines_per_node",
            NOT_SET,
            "is not set: this is one of several data-parallel engines that share one budget, and "
            f"{versions.NAME} does not say how many they are",
            "set engines_per_node to the number that run on this node (--data-parallel-size-local)",
        )
    if rank >= most:
        raise ConfigError(
            "engines_per_node",
            given,
            f"this is data-parallel engine {rank} of this node, counted from 0",
            f"set engines_per_node to the number that run here, {rank + 1} or more",
        )
    return most

"""What a tier of vLLM's own offloading derives from vLLM's configuration: groups, rows of host memory, fingerprint."""

from __future__ import annotations

import dataclasses
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import AttentionSpec, MLAAttentionSpec

from kvoffload.abc import ConfigError, KVGroup
from kvoffload.config import IntegrationConfig
from kvoffload.connector.parts import Parts
from kvoffload.fingerprints import package_version
from kvoffload.tiers.config import TierEntry
from kvoffload.tiers.identity import digest
from kvoffload.vllm import versions
from kvoffload.vllm.fingerprint import ANY, describe_parts, fingerprint_parts
from kvoffload.vllm.layout import GroupLayout, ModelLayout, group_layouts, node_engines, without_parallelism

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.kv_offload.base import OffloadingSpec

CONNECTOR = 'use kvoffload\'s own connector ("kv_connector": "KVOffloadConnector"), which serves this'
"""How errors end where the connector is the way out."""
KERNELS = ("flashinfer-python", "flash-attn", "aiter")
"""Packages with attention kernels among which vLLM chooses."""
CPU_INFO = Path("/proc/cpuinfo")


def calling_engine() -> tuple[VllmConfig, KVCacheConfig]:
    """Returns the configuration of the engine whose OffloadingConnector makes its tiers: vLLM gives it to none of them.

    Raises ConfigError if no such connector is among the callers.
    """
    found = versions.caller_locals(OffloadingConnectorScheduler.__init__) or {}
    try:
        return found["vllm_config"], found["kv_cache_config"]
    except KeyError:
        raise ConfigError(
            fault=f"{versions.NAME} has made this tier outside its OffloadingConnector, so the tier "
            "cannot know which model it serves",
            fix=f'write "kv_connector": "OffloadingConnector", or {CONNECTOR}',
        ) from None


@dataclass(frozen=True, slots=True)
class TierLayout(ModelLayout):
    """What a tier of vLLM's own offloading serves. A block is a chunk of vLLM's, which has one row of its host
    memory."""

    config: IntegrationConfig
    block_bytes: int
    """Bytes at the beginning of a row that hold KV, of all ranks together."""
    fingerprint_parts: dict[str, Any]
    identity: dict[str, str]

    @classmethod
    def from_vllm(
        cls,
        config: IntegrationConfig,
        spec: OffloadingSpec,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        row_bytes: int,
    ) -> TierLayout:
        """Raises ConfigError for a model or a setting that this tier does not serve."""
        tier = config.tier_entries[0]
        _refuse_unserved(tier, vllm_config, spec, kv_cache_config)
        factor = int(spec.config.cache.blocks_per_chunk)
        groups = group_layouts(vllm_config, kv_cache_config, config.tier_entries, lambda _: factor)
        if any(group.group.lookahead for group in groups):
            raise ConfigError(
                *tier.named,
                f"with speculative method {vllm_config.speculative_config.method!r} the KV of the drafter depends on "
                "the token after a block, which vLLM's keys do not name",
                CONNECTOR,
            )
        groups = tuple(dataclasses.replace(group, group=_chunks(group.group, factor)) for group in groups)
        engine, engines = node_engines(vllm_config, config.engines_per_node)
        shares = _shares_heads(vllm_config, spec, groups)
        bare = cls(
            config=config,
            groups=groups,
            hash_block_size=versions.hash_block_size(vllm_config, kv_cache_config),
            block_bytes=_block_bytes(spec, shares, row_bytes),
            engine=engine,
            engines=engines,
            parts=Parts.none(len(groups)),
            fingerprint_parts={},
            identity={},
        )
        parts = fingerprint_parts(vllm_config, bare, _layers(vllm_config, groups, shares is not None))
        parts["rows"] = _rows(spec, bare.block_bytes)
        if shares is not None:
            parts["parallel"] = [ANY, ANY]
        return dataclasses.replace(bare, fingerprint_parts=parts, identity=describe_parts(vllm_config, bare, parts))


def _refuse_unserved(
    tier: TierEntry, vllm_config: VllmConfig, spec: OffloadingSpec, kv_cache_config: KVCacheConfig
) -> None:
    """Raises ConfigError for what the connector serves and this tier does not."""
    if vllm_config.lora_config is not None:
        raise ConfigError(
            *tier.named,
            "with --enable-lora vLLM's keys name an adapter and not its bytes, so a later process might find KV of "
            "other bytes",
            CONNECTOR,
        )
    served = [group.group_id for group in spec.config.groups]
    if served != list(range(len(kv_cache_config.kv_cache_groups))):
        raise ConfigError(
            *tier.named,
            f"vLLM offloads only {len(served)} of the {len(kv_cache_config.kv_cache_groups)} KV "
            "cache groups of this model, which kvoffload has not been tested with",
            "remove this tier",
        )


def _chunks(group: KVGroup, factor: int) -> KVGroup:
    """Returns ``group`` with chunks of ``factor`` device blocks. The state of a chunk is that of its last block."""
    if not group.state:
        return group
    return dataclasses.replace(group, device_block_size=group.device_block_size * factor)


def _shares_heads(vllm_config: VllmConfig, spec: OffloadingSpec, groups: Sequence[GroupLayout]) -> int | None:
    """Returns how many ranks hold the same KV heads, if rows have the same bytes for every number of ranks. Otherwise
    returns None.

    vLLM's canonical layout makes it so. Its workers certify each layer at the start, and the engine does not start if
    they cannot.
    """
    parallel = spec.config.parallel
    if not (spec.config.canonical_layout and parallel.is_parallelism_agnostic and parallel.pp_size == 1):
        return None
    total = vllm_config.model_config.get_total_num_kv_heads()
    specs = [layer.spec for group in groups for layer in group.layers]
    if not all(isinstance(each, AttentionSpec) for each in specs):
        return None
    if spec.replicated_layout:
        return 1
    if any(isinstance(each, MLAAttentionSpec) for each in specs):
        return None
    counts = {parallel.tp_size * each.num_kv_heads / total for each in specs}
    (count,) = counts if len(counts) == 1 else (math.nan,)
    return int(count) if count >= 1 and count == int(count) else None


def _block_bytes(spec: OffloadingSpec, shares: int | None, row_bytes: int) -> int:
    """Returns the bytes of a row that hold KV. Behind them is padding, or room for copies that are not made."""
    copies = 1 if spec.replicated_layout else spec.config.parallel.world_size
    used: int = spec.config.worker_kv_bytes_per_block * copies * spec.config.cache.blocks_per_chunk // (shares or 1)
    return min(used, row_bytes)


def _layers(vllm_config: VllmConfig, groups: Sequence[GroupLayout], is_shared: bool) -> list[Any]:
    """Returns names and formats of the layers of each group. ``is_shared``: as they are without parallelism."""
    heads = vllm_config.model_config.get_total_num_kv_heads()

    def described(spec: KVCacheSpec) -> str:
        return repr(without_parallelism(spec, heads) if is_shared else spec)

    return [[[name, described(spec)] for name, _, spec in group.layers] for group in groups]


def _rows(spec: OffloadingSpec, block_bytes: int) -> list[Any]:
    """Returns what else shapes the bytes of a row: vLLM's layout of rows, and what attention kernels are chosen by."""
    config = spec.config
    return [
        block_bytes,
        int(config.cache.blocks_per_chunk),
        int(config.cache.tokens_per_hash),
        str(config.kv_cache_layout),
        _canonical_format(config) if config.canonical_layout else None,
        bool(spec.replicated_layout),
        [list(group.layer_names) for group in config.groups],
        current_platform.device_type,
        str(current_platform.get_device_name()),
        str(current_platform.get_device_capability()),
        [package_version(name) for name in KERNELS],
        platform.machine(),
        # Attention on a CPU packs KV for its instruction set.
        _cpu_features() if current_platform.device_type == "cpu" else None,
    ]


def _canonical_format(config: Any) -> str:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id

    return str(canonical_format_id(config.kv_cache_layout))


def _cpu_features() -> str:
    """Returns a digest of what the kernel says of the instruction sets of this machine."""
    lines = CPU_INFO.read_text(errors="replace").splitlines()
    return digest(next((line for line in lines if line.lower().startswith(("flags", "features"))), ""))

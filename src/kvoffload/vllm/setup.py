"""What vLLM's configuration means for offloading, and what of it is refused at start."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import vllm
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvoffload.base import ConfigError
from kvoffload.config import OffloadConfig
from kvoffload.fingerprint import fingerprint, model_identity
from kvoffload.hostpool import HostBackend, format_bytes, padded_slot_bytes
from kvoffload.keys import root_hash
from kvoffload.manager import PolicyOffloadingManager
from kvoffload.policies import make_policy

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvoffload.base import OffloadingManager

logger = logging.getLogger(__name__)

TESTED_VERSIONS = ("0.32",)
NAMESPACE_BYTES = 8


@dataclass(frozen=True, slots=True)
class Setup:
    """The numbers both halves of the connector agree on."""

    config: OffloadConfig
    layer_names: tuple[str, ...]
    page_bytes: int
    """Bytes of one device block in one layer."""
    num_device_blocks: int
    device_block_size: int
    hash_block_size: int
    factor: int
    num_blocks: int

    @property
    def slot_bytes(self) -> int:
        return padded_slot_bytes(self.page_bytes * len(self.layer_names) * self.factor)

    @property
    def block_tokens(self) -> int:
        return self.device_block_size * self.factor

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Setup:
        """Raises ConfigError for a wrong option or a model or layout that is not served."""
        options: Mapping[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
        config = OffloadConfig.from_mapping(options)
        _refuse_unserved(vllm_config, kv_cache_config)
        (group,) = kv_cache_config.kv_cache_groups
        spec = group.kv_cache_spec
        factor = config.factor(spec.block_size)
        return cls(
            config=config,
            layer_names=tuple(group.layer_names),
            page_bytes=spec.page_size_bytes,
            num_device_blocks=kv_cache_config.num_blocks,
            device_block_size=spec.block_size,
            hash_block_size=getattr(kv_cache_config, "hash_block_size", None) or spec.block_size,
            factor=factor,
            num_blocks=config.num_blocks(spec.page_size_bytes * len(group.layer_names) * factor),
        )

    def describe(self) -> str:
        """What the pool means, for the log: "8 GiB = 65,536 tokens, 4.1x the device cache"."""
        tokens = self.num_blocks * self.block_tokens
        device = self.num_device_blocks * self.device_block_size
        size = format_bytes(self.num_blocks * self.slot_bytes)
        return f"{size} = {tokens:,} tokens, {tokens / device:.1f}x the device cache"

    def make_manager(self, enable_events: bool) -> OffloadingManager:
        policy = make_policy(self.config.policy, self.num_blocks)
        backend = HostBackend(self.block_tokens, self.num_blocks)
        manager: OffloadingManager = PolicyOffloadingManager(backend, policy, enable_events)
        if self.config.store_threshold is not None:
            from kvoffload.admission import FilterReusedOffloadingManager

            manager = FilterReusedOffloadingManager(manager, self.config.store_threshold)
        return manager


def _refuse_unserved(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    parallel = vllm_config.parallel_config
    for name, value in (
        ("tensor_parallel_size", parallel.tensor_parallel_size),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size),
        ("data_parallel_size", parallel.data_parallel_size),
        ("decode_context_parallel_size", getattr(parallel, "decode_context_parallel_size", 1)),
        ("prefill_context_parallel_size", getattr(parallel, "prefill_context_parallel_size", 1)),
    ):
        if value > 1:
            raise ConfigError(f"{name}={value}: kvoffload serves one rank only so far; set it to 1")
    transfer = vllm_config.kv_transfer_config
    # vLLM makes independent engines of a dense model's data-parallel ranks, each of which believes to be alone.
    if getattr(parallel, "data_parallel_index", 0) > 0 or re.search(r"_dp\d+$", transfer.engine_id or ""):
        raise ConfigError(
            "data parallelism: each engine would take host_bytes for itself; kvoffload serves one engine on a node "
            "only so far; set data_parallel_size to 1"
        )
    model = vllm_config.model_config
    if model.runner_type == "pooling" and not model.is_prefix_caching_supported:
        raise ConfigError(
            f"model {model.model}: its pooler needs the hidden states of the whole prompt, so no part of a prompt can "
            "come from a cache; run it without kvoffload"
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and (speculative.use_eagle() or speculative.method == "draft_model"):
        raise ConfigError(
            f"speculative method {speculative.method!r}: EAGLE, MTP and draft models keep KV of their own that "
            "kvoffload does not serve yet; remove the speculative config, or use ngram"
        )
    groups = kv_cache_config.kv_cache_groups
    kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
    if len(groups) != 1:
        raise ConfigError(
            f"this model has {len(groups)} KV cache groups ({kinds}); kvoffload serves one full-attention group "
            "only so far; models that mix full attention with windows work with --disable-hybrid-kv-cache-manager"
        )
    if not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        raise ConfigError(
            f"this model's KV cache is of kind {kinds}; kvoffload serves full attention only so far; run this model "
            "without kvoffload"
        )


def warn_if_untested() -> None:
    if not vllm.__version__.startswith(TESTED_VERSIONS):
        logger.warning(
            "kvoffload is tested with vLLM %s; this is %s, and it tries",
            ", ".join(TESTED_VERSIONS),
            vllm.__version__,
        )


def model_fingerprint(vllm_config: VllmConfig, setup: Setup) -> str:
    """The fingerprint of all that shapes this engine's KV bytes and block hashes."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    return fingerprint(
        {
            "model": model_identity(model.model, model.revision, setup.config.model_fingerprint),
            "dtype": str(model.dtype),
            "quantization": str(model.quantization),
            "cache_dtype": str(cache.cache_dtype),
            "layout": str(getattr(cache, "kv_cache_layout", None)),
            "page_bytes": setup.page_bytes,
            "layers": list(setup.layer_names),
            "device_block_size": setup.device_block_size,
            "block_size_factor": setup.factor,
            "hash_block_size": setup.hash_block_size,
            "hash_algorithm": str(cache.prefix_caching_hash_algo),
            "ranks": vllm_config.parallel_config.world_size,
        }
    )


def namespace(model: str) -> bytes:
    """The bytes of a fingerprint that go in front of every block hash."""
    return root_hash(model)[:NAMESPACE_BYTES]

"""Configurations of vLLM that kvoffload refuses at start: for each, why and what to change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from kvoffload.abc import NOT_SET, ConfigError
from kvoffload.tiers.config import TierEntry
from kvoffload.vllm import versions

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

SERVED = {
    "FullAttentionSpec",
    "MLAAttentionSpec",
    "SlidingWindowSpec",
    "SlidingWindowMLASpec",
    "ChunkedLocalAttentionSpec",
    "MambaSpec",
}
"""Kinds of KV cache that kvoffload serves."""
REFUSED = {
    "CrossAttentionSpec": "it belongs to the encoder's input, which the hashes of the blocks do not cover",
    "EncoderOnlyAttentionSpec": "it is not kept between requests",
}
"""Known kinds of KV cache that kvoffload does not serve, and why."""
STATES_AT_BOUNDARIES = "align"
"""The mode of MambaSpec in which vLLM keeps the states of recurrent and convolutional layers at block boundaries."""


def refuse_unserved(vllm_config: VllmConfig) -> None:
    """Raises ConfigError for a version, a setting or a model with which kvoffload cannot be used at all."""
    if reason := versions.why_too_old():
        raise ConfigError(reason)
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        value = versions.attribute(parallel, name)
        if value > 1:
            raise ConfigError(
                name,
                value,
                "context parallelism spreads the tokens of a block over several ranks, so no rank "
                "holds a whole block that could be stored",
                "set it to 1",
            )
    if versions.attribute(parallel, "enable_elastic_ep"):
        raise ConfigError(
            "enable_elastic_ep",
            NOT_SET,
            "engines that start later would take shares of host_bytes that are already in use",
            "set it to False, or run without kvoffload",
        )
    model = vllm_config.model_config
    if versions.attribute(model, "is_diffusion"):
        raise ConfigError(
            fault=f"model {model.model}: a diffusion model knows tokens before it computes their KV, and "
            "never computes the KV of some",
            fix="run it without kvoffload",
        )
    if versions.attribute(versions.attribute(vllm_config, "aux_output_config"), "enable_return_routed_experts"):
        raise ConfigError(
            "enable_return_routed_experts",
            NOT_SET,
            "no experts are recorded for tokens that are loaded from host memory",
            "set it to False, or run without kvoffload",
        )
    on_cpu = vllm_config.device_config.device_type == "cpu"
    if model.use_mla and on_cpu and not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            fault=f"model {model.model}: on this CPU vLLM cannot continue from an MLA cache that holds "
            "part of a prompt",
            fix="run it without kvoffload",
        )
    if model.runner_type == "pooling" and not model.is_prefix_caching_supported:
        raise ConfigError(
            fault=f"model {model.model}: its pooler needs the hidden states of the whole prompt, so no "
            "part of a prompt can come from a cache",
            fix="run it without kvoffload",
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method == "extract_hidden_states":
        raise ConfigError(
            fault="speculative method 'extract_hidden_states': what it caches is not KV from which a "
            "request could continue",
            fix="remove the speculative config, or run without kvoffload",
        )
    ahead = versions.attribute(vllm_config, "num_hash_lookahead_tokens", 0)
    if ahead:
        raise ConfigError(
            "num_hash_lookahead_tokens",
            ahead,
            "vLLM's hash of a block then covers tokens behind the block, so it does not name a prefix",
            "set disable_lookahead_block_hashes to true in the speculative config",
        )


def refuse_unserved_with_tiers(vllm_config: VllmConfig, tier: TierEntry) -> None:
    """Raises ConfigError for a setting that works with host memory, but not with blocks that another process has left
    in ``tier``."""
    nodes = versions.attribute(vllm_config.parallel_config, "nnodes_within_dp")
    if nodes > 1:
        raise ConfigError(
            "nnodes",
            nodes,
            f"{tier.setting} and other tiers below host memory run beside the scheduler, which cannot reach the host "
            "memory of other nodes",
            "remove the tier, so that blocks are kept in the host memory of each node, or run one engine per node",
        )
    if versions.expected_hash_root(vllm_config) is None:
        algorithm = vllm_config.cache_config.prefix_caching_hash_algo
        raise ConfigError(
            "prefix_caching_hash_algo",
            algorithm,
            "its hashes begin with a random number in every process, so no process would find what "
            "another has left in a tier",
            "set the environment variable PYTHONHASHSEED=0 (any number, the same at every start), "
            "or use --prefix-caching-hash-algo sha256",
        )
    multimodal, cache = vllm_config.model_config.multimodal_config, vllm_config.cache_config
    if multimodal and versions.attribute(multimodal, "mm_processor_cache_gb") == 0 and not cache.enable_prefix_caching:
        raise ConfigError(
            *tier.named,
            "with mm_processor_cache_gb=0 and no prefix caching vLLM identifies images and other inputs by a counter "
            "that starts again in every process, not by their content",
            "turn one of the two on",
        )


def refuse_unserved_specs(specs: Iterable[KVCacheSpec]) -> None:
    """Raises ConfigError for a kind of KV cache that kvoffload does not serve. ``specs`` are those of one group."""
    for spec in sorted(specs, key=lambda spec: type(spec).__name__):
        kind = type(spec).__name__
        if kind not in SERVED:
            reason = REFUSED.get(kind, "kvoffload has not been tested with how its blocks are filled and freed")
            raise ConfigError(
                fault=f"this model has a KV cache of kind {kind}: {reason}", fix="run this model without kvoffload"
            )
        if isinstance(spec, MambaSpec):
            _refuse_unserved_states(spec)
        if isinstance(spec, FullAttentionSpec) and spec.non_causal:
            raise ConfigError(
                fault="this model attends to tokens that come later, so its KV depends on more than the "
                "prefix that identifies it",
                fix="run it without kvoffload",
            )
        if not versions.attribute(spec, "prefix_cacheable"):
            raise ConfigError(
                fault=f"this model has a KV cache ({kind}) that vLLM itself does not reuse between requests",
                fix="run it without kvoffload",
            )


def _refuse_unserved_states(spec: MambaSpec) -> None:
    """Raises ConfigError if vLLM does not keep the states from which a request could continue."""
    if spec.mamba_cache_mode != STATES_AT_BOUNDARIES:
        raise ConfigError(
            "mamba_cache_mode",
            spec.mamba_cache_mode,
            "this model has recurrent or convolutional layers, and a request can continue only "
            "from a state that vLLM keeps at a block boundary",
            "turn prefix caching on (--enable-prefix-caching), which sets "
            f"mamba_cache_mode={STATES_AT_BOUNDARIES}, or run this model without kvoffload",
        )

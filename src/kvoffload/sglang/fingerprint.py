"""The fingerprint of the pages of a SGLang rank: everything that shapes their bytes. Also in words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvoffload.abc import ConfigError
from kvoffload.digests import DigestCache, file_digests
from kvoffload.fingerprints import files_fingerprint, has_weights, is_commit, model_dirs, package_version
from kvoffload.tiers.identity import MODEL, digest

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    from kvoffload.config import IntegrationConfig
    from kvoffload.sglang.pools import HostPages

PAGES_VERSION = 1
"""The version of how pages become blocks: their order, division and keys."""
READ_FROM_FILES = {
    "auto",
    "pt",
    "safetensors",
    "instanttensor",
    "npcache",
    "sharded_state",
    "presharded",
    "bitsandbytes",
    "mistral",
    "layered",
    "fastsafetensors",
    "runai_streamer",
}
"""Load formats that read a model's weights from its directory and nowhere else."""
SETTINGS = (
    "load_format",
    "model_loader_extra_config",
    "custom_weight_loader",
    "context_length",
    "model_impl",
    "model_config_parser",
    "json_model_override_args",
    "is_embedding",
    "dtype",
    "quantization",
    "quantize_and_serve",
    "kv_cache_dtype",
    "qsa_indexer_dtype",
    "modelopt_quant",
    "rl_quant_profile",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "prefill_kv_cache_dequant_dtype",
    "mm_attention_backend",
    "mm_process_config",
    "image_processor_backend",
    "disable_fast_image_processor",
    "enable_precise_embedding_interpolation",
    "enable_encoder_swa_bounded_replay",
    "enable_decoder_swa_bounded_replay",
    "enable_tf32_matmul",
    "enable_deterministic_inference",
    "rl_on_policy_target",
    "dllm_algorithm",
    "fp8_gemm_runner_backend",
    "fp4_gemm_runner_backend",
    "bf16_gemm_backend",
    "moe_runner_backend",
    "flashinfer_mxfp4_moe_precision",
    "enable_deepseek_v4_fp4_indexer",
    "enable_dsa_fused_indexer",
    "dsa_prefill_backend",
    "dsa_decode_backend",
    "mamba_backend",
    "mamba_ssm_dtype",
    "enable_mamba_cache_stochastic_rounding",
    "enable_int8_mamba_checkpoint",
    "linear_attn_backend",
    "linear_attn_decode_backend",
    "linear_attn_prefill_backend",
    "enable_linear_replayssm",
    "speculative_algorithm",
    "speculative_draft_load_format",
    "speculative_draft_kv_cache_dtype",
    "speculative_draft_model_quantization",
    "enable_multi_layer_eagle",
    "enable_prefill_cp",
    "cp_strategy",
    "enable_kv_cache_sharding",
    "enable_dsa_cache_layer_split",
)
"""Arguments of SGLang that shape the bytes of KV. The paths of models are not among them: their files are."""
FILES = ("quantization_param_path", "speculative_token_map")
"""Arguments of SGLang that name a file beside the model's, whose content shapes KV."""


def fingerprint_parts(
    options: IntegrationConfig,
    config: HiCacheStorageConfig,
    kv: HostPages,
    block_bytes: int,
    arguments: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns everything that shapes the bytes of this rank's pages in the pool ``kv``, and their blocks of
    ``block_bytes``. ``kvoffload.fingerprint`` makes its fingerprint from that. Keys of other pools contain what shapes
    their pages. ``arguments``: the resolved arguments of SGLang.

    Raises ConfigError if nothing identifies the weights.
    """
    digests = DigestCache()
    replicated = config.is_mla_model
    return {
        "pages": PAGES_VERSION,
        "engine": [f"{name}={package_version(name)}" for name in ("sglang", "torch", "transformers")],
        "weights": _weights(options, config, arguments, digests),
        "draft": _draft(options, arguments, digests),
        "files": [_file(arguments.get(name), digests) for name in FILES],
        "settings": {name: arguments.get(name) for name in SETTINGS},
        "pool": kv.describe(),
        "block_bytes": block_bytes,
        # Ranks of a model whose KV is replicated share it, also with servers that have other numbers of ranks.
        "tensor": None if replicated else [config.tp_rank, config.tp_size],
        "heads": None if replicated else [config.should_split_heads, config.tp_lcm_size],
        "pipeline": [config.pp_rank, config.pp_size],
        "context": [config.attn_cp_rank, config.attn_cp_size, config.dcp_rank, config.dcp_size],
    }


def describe_parts(parts: Mapping[str, Any], arguments: Mapping[str, Any], model: str | None) -> dict[str, str]:
    """Returns ``parts`` in words, for people on other servers: see ``kvoffload.tiers.identity``."""
    kv = parts["pool"]
    weights: str = parts["weights"]
    described = {
        MODEL: Path(model or "unknown").name,
        "weights": weights if weights.startswith(("given:", "revision:")) else digest(weights),
        "draft model": "none" if parts["draft"] is None else digest(json.dumps(parts["draft"])),
        "dtype of the KV cache": kv[3],
        "layout of the host pool": kv[2],
        "tokens per page": kv[4],
        "host pool": digest(json.dumps(kv, default=str)),
        "tensor parallel rank": parts["tensor"],
        "pipeline parallel rank": parts["pipeline"],
        "context parallel rank": parts["context"],
        "division of heads": parts["heads"],
        "installed software": ", ".join(parts["engine"]),
        "files": digest(json.dumps(parts["files"])),
        "dtype": arguments.get("dtype"),
        "quantization": arguments.get("quantization"),
        "settings of SGLang": digest(json.dumps(parts["settings"], sort_keys=True, default=str)),
    }
    return {name: str(value) for name, value in described.items()}


def _weights(
    options: IntegrationConfig, config: HiCacheStorageConfig, arguments: Mapping[str, Any], digests: DigestCache
) -> str:
    """Returns text that identifies the weights of the model. Reads every byte of them unless the user identifies them.

    Raises ConfigError if nothing does.
    """
    if options.model_fingerprint is not None:
        return f"given:{options.model_fingerprint}"
    model = arguments.get("model_path") or config.model_name
    load_format = str(arguments.get("load_format", "auto"))
    if load_format not in READ_FROM_FILES or arguments.get("custom_weight_loader"):
        reason = f"load_format={load_format} may read weights from elsewhere than the model's files"
    elif not model:
        reason = "SGLang does not say where its files are"
    else:
        return _files(str(model), arguments.get("revision"), arguments.get("download_dir"), digests)
    raise _unidentified(str(model), reason)


def _draft(options: IntegrationConfig, arguments: Mapping[str, Any], digests: DigestCache) -> str | None:
    """Returns text that identifies the weights of the draft model, whose KV some pools hold too; None without one."""
    model = arguments.get("speculative_draft_model_path")
    if not arguments.get("speculative_algorithm") or not model or options.model_fingerprint is not None:
        return None
    return _files(str(model), arguments.get("speculative_draft_model_revision"), arguments.get("download_dir"), digests)


def _files(model: str, revision: str | None, download_dir: str | None, digests: DigestCache) -> str:
    reason = "its weight files are not found on this machine"
    try:
        for folder in model_dirs(model, revision, download_dir):
            if has_weights(folder):
                return f"weights:{files_fingerprint(folder, digests)}"
        if is_commit(revision):
            return f"revision:{model}@{revision}"
    except (OSError, ValueError) as error:
        reason = f"its weights cannot be read: {error}"
    raise _unidentified(model, reason)


def _unidentified(model: str, reason: str) -> ConfigError:
    return ConfigError(
        fault=f"model_fingerprint is not set, and nothing distinguishes the weights of model {model} "
        f"from others after a restart or on another server: {reason}",
        fix='add "model_fingerprint": "..." to --hicache-storage-backend-extra-config and change it with the weights',
    )


def _file(path: object, digests: DigestCache) -> str | None:
    if not path:
        return None
    try:
        return file_digests([Path(str(path))], digests)[0]
    except OSError:
        # A name that is not a file stands for itself.
        return f"name:{path}"

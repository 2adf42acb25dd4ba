"""The fingerprint of a vLLM engine: everything that shapes the bytes of its KV blocks and their hashes. Also in words,
so that a server can log why it cannot use the blocks of another."""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.config.utils import normalize_value

from kvoffload.abc import ConfigError
from kvoffload.digests import DigestCache
from kvoffload.fingerprints import (
    files_fingerprint,
    find_model_dir,
    has_weights,
    is_commit,
    model_dirs,
    package_version,
)
from kvoffload.tiers.identity import MODEL, SOFTWARE, VALUES, VARIABLES, digest
from kvoffload.vllm import versions
from kvoffload.vllm.nesting import page_layout

if TYPE_CHECKING:
    from vllm.config import CacheConfig, LoadConfig, ModelConfig, VllmConfig

    from kvoffload.config import IntegrationConfig, OffloadConfig
    from kvoffload.vllm.layout import ModelLayout

logger = logging.getLogger(__name__)

READ_FROM_FILES = {
    "auto",
    "hf",
    "safetensors",
    "fastsafetensors",
    "instanttensor",
    "mistral",
    "pt",
    "npcache",
    "sharded_state",
    "runai_streamer",
    "runai_streamer_sharded",
}
"""Load formats that read a model's weights from its directory and nowhere else."""
SHAPES_NOTHING = (
    # Where the files are. Their content counts instead.
    "model",
    "model_weights",
    "revision",
    "max_model_len",
    "generation_config",
    "override_generation_config",
    "max_logprobs",
    "renderer_num_workers",
    "enable_sleep_mode",
    "sleep_preserve_parameter_names",
    "sleep_mode_backend",
    "sleep_mode_offload_cudagraph",
    "enable_nccl_comm_suspend",
    "enable_cumem_allocator",
)
"""Settings of a model that vLLM's own hash covers although KV is the same for all their values."""
MULTIMODAL_SHAPES_NOTHING = {
    "limit_per_prompt",
    "mm_processor_cache_gb",
    "mm_processor_cache_type",
    "mm_shm_cache_max_object_size_mb",
    "mm_encoder_tp_mode",
    "mm_encoder_fp8_scale_save_path",
    "mm_encoder_fp8_scale_save_margin",
    "skip_mm_profiling",
    "mm_tensor_ipc",
    "mm_ipc_gpu_memory_gb",
}
"""Multimodal settings that do not shape KV."""
CACHE_TOGGLES = ("kv_sharing_fast_prefill", "swa_bounded_replay")
"""Settings that decide for which tokens some layers compute KV, and which vLLM's own hash does not cover."""
HASHED = ("attention_config", "kernel_config", "engram_config", "lora_config")
"""Configurations of vLLM whose own hashes count as a whole."""
BESIDE_COMPUTING = re.compile(r"_(HOST|PORT|IPS?|TIMEOUT|LOG|RAY)(_|$)")
"""Matches names of environment variables that concern communication, timeouts and logs, not what is computed."""
LAYOUT_VARIABLE = "VLLM_KV_CACHE_LAYOUT"
"""An environment variable whose effect counts instead of its value: the layout that vLLM has chosen."""
PLACES = {"VLLM_CPU_OMP_THREADS_BIND": "auto"}
"""Environment variables that say on which processors something runs, with the value that counts in place of theirs:
vLLM's default, so that the fingerprint of a server without them has stayed the same."""
ANY = "any"
"""The size of a parallelism that does not shape the bytes."""
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
"""The form in which a model's configuration names another model."""


DIGESTED = {
    "weights": "weights",
    "model": "model configuration",
    "multimodal": "multimodal settings",
    "load_format": "settings of the load format",
    "draft": "draft model",
    "cache": "cache settings",
    "cache_toggles": "cache settings that skip tokens",
    "attention_config": "attention settings",
    "kernel_config": "kernel settings",
    "engram_config": "engram settings",
    "lora_config": "LoRA settings",
    "additional": "additional settings",
    "groups": "KV cache groups",
    "parts": "parts of blocks",
    "environment": VALUES,
    "ranks": "layers and pages of the ranks",
    "rows": "rows of vLLM's host memory",
    "hash_root": "seed of the block hashes",
    "states": "settings of states",
}
"""Parts of the fingerprint whose values say nothing to people, and what they are called."""


def fingerprint_parts(vllm_config: VllmConfig, layout: ModelLayout, ranks: Sequence[Any]) -> dict[str, Any]:
    """Returns everything that shapes this engine's KV bytes and block hashes. ``kvoffload.fingerprint`` makes its
    fingerprint from that. ``ranks``: for each part of a block, the layers and pages of the rank that stores it.

    Raises ConfigError if blocks outlive or leave this process and nothing identifies the weights.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    load, digests, draft = vllm_config.load_config, DigestCache(), None
    identity = _identity(layout.config, model, load, digests)
    speculative = vllm_config.speculative_config
    if speculative is not None and (speculative.use_eagle() or speculative.method == "draft_model"):
        drafting, own = speculative.draft_model_config, getattr(speculative, "draft_load_config", None)
        # Layers that predict several tokens are among the model's own files.
        is_apart = own is not None or (drafting.model, drafting.revision) != (model.model, model.revision)
        drafts = _identity(layout.config, drafting, own or load, digests) if is_apart else identity
        draft = [speculative.method, drafts, _model(drafting)]
    root = versions.expected_hash_root(vllm_config)
    return {
        "weights": identity,
        "model": _model(model),
        # It chooses between two sets of factors. For other models it shapes nothing, and may depend on free memory.
        "max_model_len": model.max_model_len if "longrope" in _hf_config(model) else None,
        "multimodal": _multimodal(model),
        "load_format": [str(load.load_format), _plain(load.model_loader_extra_config)],
        "draft": draft,
        "engine": [versions.NAME, *_installed()],
        "device": str(vllm_config.device_config.device_type),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(cache.cache_dtype),
        "cache": _vllm_hash(_with_page_layout(cache)),
        "cache_toggles": [getattr(cache, name, None) for name in CACHE_TOGGLES],
        **{name: _vllm_hash(getattr(vllm_config, name, None)) for name in HASHED},
        "additional": _plain(getattr(vllm_config, "additional_config", None)),
        "environment": _same_everywhere(_environment),
        # The order of layers and blocks does not change pages.
        "layout": str(page_layout(versions.kv_cache_layout(vllm_config))),
        # Groups without states or a lookahead are described as they were before there were any.
        "groups": [
            repr(group).replace(", state=False", "").replace("lookahead=0", "draft=False") for group in layout.kv_groups
        ],
        # Whole blocks have no such part, for the same reason.
        **({"parts": list(layout.parts.counts)} if layout.parts.is_divided else {}),
        "ranks": list(ranks),
        "parallel": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
        "hash_block_size": layout.hash_block_size,
        "hash_algorithm": str(cache.prefix_caching_hash_algo),
        # It depends on the seed, the algorithm and how the algorithm serializes.
        "hash_root": None if root is None else root.hex(),
        # Blocks on disk of models without states must be found after an upgrade, so these have no such part.
        **(
            {"states": _plain(versions.attribute(vllm_config, "mamba_config"))}
            if any(group.state for group in layout.kv_groups)
            else {}
        ),
    }


def describe_parts(vllm_config: VllmConfig, layout: ModelLayout, parts: Mapping[str, Any]) -> dict[str, str]:
    """Returns ``parts`` in words, for people on other servers: see ``kvoffload.tiers.identity``. If a part differs, so
    does its description."""
    tensor, pipeline = parts["parallel"]
    engine, *libraries = parts["engine"]
    # Names alone: a value may be a secret, and others read this.
    variables = [
        name
        for name in os.environ
        if name.startswith("VLLM_")
        and name != LAYOUT_VARIABLE
        and name not in PLACES
        and f'"{name}"' in parts["environment"]
    ]
    described = {
        MODEL: _model_name(vllm_config.model_config.model),
        "dtype": parts["dtype"].removeprefix("torch."),
        "dtype of the KV cache": parts["cache_dtype"],
        "quantization": parts["quantization"],
        "tensor parallel size": tensor,
        "pipeline parallel size": pipeline,
        "number of tokens per block": [group.block_tokens for group in layout.kv_groups],
        "number of tokens per block hash": parts["hash_block_size"],
        "block hash algorithm": parts["hash_algorithm"],
        "layout of the KV cache": parts["layout"],
        "max_model_len": parts["max_model_len"],
        "device": parts["device"],
        "engine": engine,
        SOFTWARE: ", ".join(libraries),
        VARIABLES: ", ".join(sorted(variables)),
    }
    given = parts["weights"].startswith(("given:", "revision:"))
    described |= {
        name: parts[part] if part == "weights" and given else digest(json.dumps(parts[part], sort_keys=True))
        for part, name in DIGESTED.items()
        if part in parts
    }
    return {name: str(value) for name, value in described.items()}


def _model_name(model: str) -> str:
    """Returns the name of ``model`` without the place where its files are."""
    path = Path(model)
    cached = next((part for part in path.parts if part.startswith("models--")), None)
    return path.name if cached is None else cached.rpartition("--")[2]


def _model(model: ModelConfig) -> list[Any]:
    """Returns everything besides weights and tokens that determines what ``model`` computes: its configuration, and
    code named in it."""
    overrides = getattr(model, "model_class_overrides", None) or {}
    config = copy.copy(model)
    for name in SHAPES_NOTHING:
        setattr(config, name, None)
    for name in ("hf_config", "hf_text_config"):
        described = copy.copy(getattr(model, name))
        described._name_or_path = ""
        setattr(config, name, described)
    return [
        _hf_config(model),
        _vllm_hash(config),
        [_source(target.partition(":")[0]) for _, target in sorted(overrides.items())],
    ]


def _identity(
    config: OffloadConfig | IntegrationConfig, model: ModelConfig, load: LoadConfig, digests: DigestCache
) -> str:
    """Returns text that identifies the weights of ``model``. Reads every byte of them only if blocks outlive this
    process. Raises ConfigError if they do and nothing identifies the weights."""
    if config.model_fingerprint is not None:
        return f"given:{config.model_fingerprint}"
    tiers = config.tier_entries
    if not tiers:
        return "of this process"
    load_format = str(load.load_format)
    if load_format == "dummy":
        # vLLM draws them with a fixed seed. Weights that are not floats keep what the memory held before.
        return "dummy" if model.quantization is None else f"dummy:{os.urandom(16).hex()}"
    reason = f"load_format={load_format} may read weights from elsewhere than the model's files"
    if load_format in READ_FROM_FILES and not getattr(model, "model_weights", ""):
        reason = "its weight files are not found on this machine"
        try:
            folders = _folders(model.model, model.revision, load.download_dir)
            if any(map(has_weights, folders)):
                folders += _other_folders(model, load.download_dir)
                return f"weights:{[files_fingerprint(folder, digests) for folder in folders]}"
            if is_commit(model.revision):
                return f"revision:{model.model}@{model.revision}"
        except (OSError, ValueError) as error:
            reason = f"its weights cannot be read: {error}"
    raise ConfigError(
        *tiers[0].named,
        f"nothing distinguishes the weights of model {model.model} from others after a restart or "
        f"on another server: {reason}",
        'set model_fingerprint="..." and change it with the weights',
    )


def _folders(model: str, revision: str | None, download_dir: str | None) -> list[Path]:
    """Returns the directories with the files of ``model``, none if they come from elsewhere than Hugging Face."""
    if getattr(envs, "VLLM_USE_MODELSCOPE", False) and not Path(model).is_dir():
        return []
    return model_dirs(model, revision, download_dir)


def _other_folders(model: ModelConfig, download_dir: str | None) -> list[Path]:
    """Returns the directories of other models that the configuration of ``model`` names: some models take code, or the
    weights of an encoder, from there."""
    folders: list[Path] = []
    for text in _texts(model.hf_config.to_dict()):
        name = text.split("--")[0]
        is_path = os.path.isabs(name) and Path(name, "config.json").is_file()
        if name != model.model and (is_path or REPOSITORY.fullmatch(name)):
            folders += _folders(name, model.code_revision if "--" in text else None, download_dir)
    return list(dict.fromkeys(folders))


def _texts(described: Any) -> Iterator[str]:
    """Yields all strings in a model's configuration, except the place that it was loaded from."""
    if isinstance(described, str):
        yield described
    elif isinstance(described, Mapping):
        for key, value in described.items():
            if key != "_name_or_path":
                yield from _texts(value)
    elif isinstance(described, Sequence):
        for value in described:
            yield from _texts(value)


def _with_page_layout(cache: CacheConfig) -> CacheConfig:
    """Returns ``cache`` as if layers were outermost in memory: the order of layers and blocks does not change pages."""
    layout = getattr(cache, "kv_cache_layout", None)
    if page_layout(layout) == layout:
        return cache
    config = copy.copy(cache)
    config.kv_cache_layout = page_layout(layout)
    return config


def _multimodal(model: ModelConfig) -> list[Any] | None:
    """Returns the settings that determine how the model sees images, videos and audio."""
    config = model.multimodal_config
    if config is None:
        return None
    directory = find_model_dir(model.model, model.revision)
    files = sorted(directory.glob("*processor_config.json")) if directory is not None else []
    scales = getattr(config, "mm_encoder_fp8_scale_path", None)
    if scales is not None and Path(scales).is_file():
        files.append(Path(scales))
    return [
        {name: _plain(value) for name, value in vars(config).items() if name not in MULTIMODAL_SHAPES_NOTHING},
        [f"{path.name}:{hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files],
    ]


def _hf_config(model: ModelConfig) -> str:
    """Returns the model's configuration, including what the user overrides in it, as JSON."""
    described = model.hf_config.to_dict()
    described.pop("_name_or_path", None)
    return json.dumps(described, sort_keys=True, default=str)


def _vllm_hash(config: Any) -> str | None:
    """Returns vLLM's own hash over those settings of ``config`` that shape what is computed."""
    return None if config is None else _same_everywhere(config.compute_hash)


def _same_everywhere(make: Callable[[], Any]) -> str:
    """Returns what ``make`` returns, as text. If it raises, returns random text, so that no other process finds the
    blocks of this one."""
    try:
        return json.dumps(make(), sort_keys=True, default=str)
    except Exception:
        logger.exception("kvoffload: a setting cannot be hashed; no later process finds what this one leaves on disk")
        return os.urandom(16).hex()


def _plain(value: Any) -> str:
    """Returns ``value`` as text that is the same in every process with this setting."""
    return _same_everywhere(lambda: normalize_value(value))


def _source(module: str) -> str:
    """Returns a digest of the code of ``module``, or "" if there is no code to read."""
    try:
        spec = importlib.util.find_spec(module)
        return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest() if spec and spec.origin else ""
    except (ImportError, OSError, ValueError):
        return ""


def _installed() -> list[str]:
    """Returns the versions of the libraries that compute KV, and of packages that add models to vLLM."""
    plugins = {
        entry.dist.name
        for group in ("vllm.general_plugins", "vllm.platform_plugins")
        for entry in importlib.metadata.entry_points(group=group)
        if entry.dist is not None and entry.dist.name != "kvoffload"
    }
    return [f"{name}={package_version(name)}" for name in ("torch", "transformers", *sorted(plugins))]


def _environment() -> dict[str, Any]:
    """Returns vLLM's environment variables that may change how something is computed."""
    return {
        name: None if name == LAYOUT_VARIABLE else PLACES.get(name, value)
        for name, value in envs.compile_factors().items()
        if name.startswith("VLLM_") and not BESIDE_COMPUTING.search(name)
    }

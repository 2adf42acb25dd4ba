"""What vLLM's configuration means for offloading, and what of it is refused at start."""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.config.utils import normalize_value
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvoffload.abc import ConfigError, KVGroup
from kvoffload.cache.admission import FilterReusedOffloadingManager, tracker_size
from kvoffload.cache.keys import root_hash
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.slots import HostBackend
from kvoffload.config import OffloadConfig
from kvoffload.connector.layout import Layout
from kvoffload.digests import DigestCache
from kvoffload.fingerprint import files_fingerprint, find_model_dir, fingerprint, has_weights, is_commit
from kvoffload.host.pool import PoolHandle, padded_slot_bytes
from kvoffload.observe.trace import TraceRecorder
from kvoffload.tiers.disk.start import open_disk_tier
from kvoffload.tiers.manager import TieredOffloadingManager
from kvoffload.units import format_bytes
from kvoffload.vllm import versions

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

    from kvoffload.abc import OffloadingManager

logger = logging.getLogger(__name__)

NAMESPACE_BYTES = 8
MULTI_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"
"""Loaded only where it is used."""

SERVED = {
    "FullAttentionSpec",
    "MLAAttentionSpec",
    "SlidingWindowSpec",
    "SlidingWindowMLASpec",
    "ChunkedLocalAttentionSpec",
}
REFUSED = {
    "MambaSpec": "the state of a recurrent layer is not a function of blocks that could be put together again",
    "CrossAttentionSpec": "it belongs to the encoder's input, which the blocks' hashes do not name",
    "EncoderOnlyAttentionSpec": "it is not kept between requests",
}
"""Kinds of KV cache, and why they are not served."""

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
    # Where the files are: what is in them counts.
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
"""Settings of a model that vLLM's own hash takes in although KV is the same with all their values."""
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
CACHE_TOGGLES = ("kv_sharing_fast_prefill", "swa_bounded_replay")
"""Settings that decide for which tokens some layers compute KV, and are not in vLLM's own hash."""
HASHED = ("attention_config", "kernel_config", "engram_config", "lora_config")
"""Configurations of vLLM whose own hashes count whole."""
BESIDE_COMPUTING = re.compile(r"_(HOST|PORT|IPS?|TIMEOUT|LOG|RAY)(_|$)")
"""In the name of an environment variable: with whom to talk, for how long, and what to log."""
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
"""How a model's configuration names another model."""


@dataclass(frozen=True, slots=True)
class GroupSetup:
    """One KV cache group as this rank sees it: its layers, and the bytes of one device block in each."""

    group: KVGroup
    layer_names: tuple[str, ...]
    page_bytes: tuple[int, ...]
    spec: KVCacheSpec

    @property
    def block_bytes(self) -> int:
        return sum(self.page_bytes) * self.group.block_size_factor


@dataclass(frozen=True, slots=True)
class RankInfo(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler half at start."""

    pool: PoolHandle
    layers: tuple[tuple[str, int, str], ...]
    """Name, page bytes and format of each layer, group after group. A format tells how a page's bytes are laid out."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What both halves of the connector make of vLLM's configuration. In the scheduler's process the groups are
    those of the first rank."""

    config: OffloadConfig
    groups: tuple[GroupSetup, ...]
    num_device_blocks: int
    hash_block_size: int
    ranks: int
    engine: int
    """Number of this engine among those of its node, from 0."""
    engines: int
    """Engines that share the budgets of this node."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot of this rank's pool: any group's block fits into it."""
        return padded_slot_bytes(max(1, *(group.block_bytes for group in self.groups)))

    def count_blocks(self) -> int:
        """Slots of this rank's pool. Raises ConfigError if the rank's share of ``host_bytes`` holds none."""
        return self.config.num_blocks(self.slot_bytes, self.ranks * self.engines)

    @property
    def kv_groups(self) -> list[KVGroup]:
        return [group.group for group in self.groups]

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Setup:
        """Raises ConfigError for a wrong option or a model or layout that is not served."""
        options: Mapping[str, Any] = vllm_config.kv_transfer_config.kv_connector_extra_config
        config = OffloadConfig.from_mapping(options)
        _refuse_unserved(vllm_config)
        if config.disk_dir is not None:
            _refuse_unserved_with_disk(vllm_config, config)
        draft_groups = _draft_groups(vllm_config, kv_cache_config)
        groups = tuple(
            _group_setup(config, group.kv_cache_spec, tuple(group.layer_names), g in draft_groups)
            for g, group in enumerate(kv_cache_config.kv_cache_groups)
        )
        if not groups:
            raise ConfigError("this model keeps no KV cache; run it without kvoffload")
        if len(groups) > 1 and not versions.FAILS_WHOLE_LOADS:
            raise ConfigError(
                f"this model has {len(groups)} KV cache groups, and a failed load of several groups ends "
                f"{versions.NAME}; use vLLM {versions.FIRST_TO_FAIL_WHOLE_LOADS} or later, or "
                "--disable-hybrid-kv-cache-manager"
            )
        engine, engines = _engines(vllm_config, config)
        return cls(
            config=config,
            groups=groups,
            num_device_blocks=kv_cache_config.num_blocks,
            hash_block_size=versions.hash_block_size(vllm_config, kv_cache_config),
            ranks=vllm_config.parallel_config.world_size,
            engine=engine,
            engines=engines,
        )

    def describe(self, num_blocks: int) -> str:
        """What the pools mean, for the log: "8 GiB = 65,536 tokens, 4.1x the device cache"."""
        tokens = self._tokens(num_blocks)
        per_token = sum(1 / group.group.device_block_size for group in self.groups)
        size = format_bytes(num_blocks * self.slot_bytes * self.ranks)
        ranks = f" on {self.ranks} ranks" if self.ranks > 1 else ""
        ranks += f", one of {self.engines} engines' shares," if self.engines > 1 else ""
        return f"{size}{ranks} = {tokens:,} tokens, {tokens * per_token / self.num_device_blocks:.1f}x the device cache"

    def _tokens(self, num_blocks: int) -> int:
        """Tokens whose KV so many blocks hold."""
        layout = Layout(self.kv_groups, self.hash_block_size, b"")
        return num_blocks * layout.align // layout.blocks_per_align

    def make_host_manager(self, num_blocks: int, enable_events: bool) -> PolicyOffloadingManager:
        policy = make_policy(self.config.policy, num_blocks)
        backend = HostBackend(self.groups[0].group.block_tokens, num_blocks)
        return PolicyOffloadingManager(backend, policy, enable_events)

    def make_tiers(
        self, host: PolicyOffloadingManager, infos: Sequence[RankInfo], fingerprint: str
    ) -> TieredOffloadingManager | None:
        """``host`` in front of the disk, where blocks of this ``fingerprint`` are found and kept. None if the disk
        fails: requests are served from ``host`` alone. Raises ConfigError if the directory cannot be used."""
        config = self.config
        assert config.disk_dir is not None
        assert config.disk_bytes is not None
        try:
            tier = open_disk_tier(
                config.disk_dir,
                config.disk_bytes,
                [info.pool.open()[: host.num_blocks] for info in infos],
                fingerprint,
                policy=config.policy,
                engine=self.engine,
                engines=self.engines,
            )
        except OSError as error:
            logger.warning(
                "kvoffload: disk_dir=%r: THERE IS NO DISK TIER: %s; requests are served from host memory or computed. "
                "When that is fixed, start again",
                config.disk_dir,
                error.strerror or error,
            )
            return None
        tokens = self._tokens(tier.capacity_bytes // tier.block_bytes)
        logger.info(
            "kvoffload: disk tier in %s of %s = %s tokens; found %s blocks of this model there",
            config.disk_dir,
            format_bytes(tier.capacity_bytes),
            f"{tokens:,}",
            f"{tier.num_blocks:,}",
        )
        full = sum(group.is_full for group in self.kv_groups)
        return TieredOffloadingManager(
            host,
            [tier],
            # Tokens are spared when the blocks of all groups are there, of which windows need few.
            tokens_per_block=[group.block_tokens / max(1, full) for group in self.kv_groups],
            groups=self.kv_groups,
            lookup_deadline_ms=config.lookup_deadline_ms,
            load_deadline_ms=config.load_deadline_ms,
            load_only_if_faster=config.load_only_if_faster,
        )

    def with_admission(self, manager: OffloadingManager) -> OffloadingManager:
        """``manager`` behind the reuse filter, if the user wants one."""
        if self.config.store_threshold is None:
            return manager
        disk_blocks = (self.config.disk_bytes or 0) // (self.slot_bytes * self.ranks * self.engines)
        return FilterReusedOffloadingManager(
            manager,
            self.config.store_threshold,
            tracker_size(manager.num_blocks + disk_blocks),
            versions.parent_request,
        )

    def make_recorder(self, num_blocks: int) -> TraceRecorder | None:
        """Of the trace, if the user wants one; each of several engines has a file of its own. ``num_blocks``: of the
        host pool. Raises ConfigError if the file cannot be written."""
        config = self.config
        if config.record_trace is None:
            return None
        path = Path(config.record_trace)
        if self.engines > 1:
            path = path.with_name(f"{path.stem}-engine{self.engine}{path.suffix}")
        layout = Layout(self.kv_groups, self.hash_block_size, b"")
        block_tokens = layout.groups[layout.traced].block_tokens
        align = layout.device_align
        per_align = sum(align // group.device_block_size for group in self.kv_groups)
        # One device block, the null block, is never used.
        device_tokens = (self.num_device_blocks - 1) * align // per_align
        header = {
            "device_blocks": device_tokens // block_tokens,
            "pool_blocks": self._tokens(num_blocks) // block_tokens,
            "policy": config.policy,
            "store_threshold": config.store_threshold,
            "groups": len(self.groups),
        }
        logger.info("kvoffload: a trace of all requests goes to %s", path)
        return TraceRecorder(str(path), block_tokens, header)

    def check_ranks(self, infos: Sequence[RankInfo]) -> int:
        """Blocks that every rank has room for. Raises ConfigError if a rank is missing or on another node."""
        if len(infos) != self.ranks:
            raise ConfigError(
                f"{len(infos)} of {self.ranks} workers have told where their host pool is, and kvoffload needs to "
                "hear of all: set distributed_executor_backend to mp or uni"
            )
        for info in infos:
            info.pool.check_reachable()
        return min(info.pool.num_blocks for info in infos)


def _group_setup(config: OffloadConfig, spec: KVCacheSpec, names: tuple[str, ...], draft: bool) -> GroupSetup:
    mixed = isinstance(spec, UniformTypeKVCacheSpecs)
    specs = spec.kv_cache_specs if mixed else dict.fromkeys(names, spec)
    kinds = {type(one).__name__ for one in (specs.values() if mixed else [spec])}
    for kind in sorted(kinds - SERVED):
        reason = REFUSED.get(kind, "its blocks may be freed or filled in ways that kvoffload has not been tested with")
        raise ConfigError(f"this model has a KV cache of kind {kind}: {reason}; run this model without kvoffload")
    first = next(iter(specs.values()), spec)
    if any(isinstance(one, FullAttentionSpec) and one.non_causal for one in specs.values()):
        raise ConfigError(
            "this model attends to tokens that come later, so its KV depends on more than the prefix that names it; "
            "run it without kvoffload"
        )
    if not versions.attribute(first, "prefix_cacheable", True):
        raise ConfigError(
            f"this model has a KV cache ({type(first).__name__}) that vLLM itself does not reuse between requests; "
            "run it without kvoffload"
        )
    # A full-attention spec may name a window too: of layers that attend to it, but whose blocks are all kept.
    window = first.sliding_window + first.extra_retained_tokens if isinstance(first, SlidingWindowSpec) else None
    chunk = first.attention_chunk_size if isinstance(first, ChunkedLocalAttentionSpec) else None
    group = KVGroup(
        device_block_size=spec.block_size,
        block_size_factor=config.factor(spec.block_size),
        sliding_window=window,
        attention_chunk=chunk,
        draft=draft,
    )
    return GroupSetup(group, names, tuple(specs[name].page_size_bytes for name in names), spec)


def _draft_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> set[int]:
    """Groups with layers of a draft model. Where vLLM does not tell them apart, all."""
    speculative = vllm_config.speculative_config
    if speculative is None or not (speculative.use_eagle() or speculative.method == "draft_model"):
        return set()
    groups = kv_cache_config.kv_cache_groups
    flagged = {g for g, group in enumerate(groups) if group.is_eagle_group}
    return flagged or set(range(len(groups)))


def _engines(vllm_config: VllmConfig, config: OffloadConfig) -> tuple[int, int]:
    """Which engine of this node this is, from 0, and how many share its budgets."""
    parallel, given = vllm_config.parallel_config, config.engines_per_node
    rank, index = parallel.data_parallel_rank_local or 0, parallel.data_parallel_index
    # With a load balancer outside each engine believes to be alone on its node.
    engine = rank or (index % given if given else 0)
    if parallel.data_parallel_size > 1:
        told = int(parallel.data_parallel_size_local)
        if told > 1 and given not in (None, told):
            raise ConfigError(f"engines_per_node={given}: vLLM runs {told} engines on this node; leave it out")
        return (rank, told) if told > 1 else (engine, _given_engines(given, rank, None))
    if index == 0 and not re.search(r"_dp\d+$", vllm_config.kv_transfer_config.engine_id or ""):
        return engine, given or 1
    return engine, _given_engines(given, rank, versions.most_data_parallel_engines(vllm_config))


def _given_engines(given: int | None, rank: int, otherwise: int | None) -> int:
    """``engines_per_node``, or what is known ``otherwise``. ``rank`` is this engine's on its node, from 0."""
    most = given or otherwise
    if most is None:
        raise ConfigError(
            "engines_per_node is not set: this is one of several data-parallel engines, they share one budget, and "
            f"{versions.NAME} does not tell how many they are; set engines_per_node to how many run on this node "
            "(--data-parallel-size-local)"
        )
    if rank >= most:
        raise ConfigError(
            f"engines_per_node={given}: this is data-parallel engine {rank} of this node, counted from 0; set "
            f"engines_per_node to how many run here, {rank + 1} or more"
        )
    return most


def _refuse_unserved(vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        value = versions.attribute(parallel, name)
        if value > 1:
            raise ConfigError(
                f"{name}={value}: context parallelism deals the tokens of a block out to several ranks, and no rank "
                "holds a block that could be stored; set it to 1"
            )
    if versions.attribute(parallel, "enable_elastic_ep"):
        raise ConfigError(
            "enable_elastic_ep: engines that come later would take shares of host_bytes that others hold already; "
            "set it to False, or run without kvoffload"
        )
    model = vllm_config.model_config
    if versions.attribute(model, "is_diffusion"):
        raise ConfigError(
            f"model {model.model}: a diffusion model's tokens are known before their KV is, and some are never "
            "computed; run it without kvoffload"
        )
    if versions.returns_routed_experts(vllm_config):
        raise ConfigError(
            "enable_return_routed_experts: for tokens that come from host memory no experts are recorded; set it to "
            "False, or run without kvoffload"
        )
    on_cpu = vllm_config.device_config.device_type == "cpu"
    if model.use_mla and on_cpu and not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            f"model {model.model}: on this CPU vLLM cannot go on from an MLA cache that holds part of a prompt; run "
            "it without kvoffload"
        )
    if MULTI_CONNECTOR in sys.modules:
        raise ConfigError(
            "kv_connector=MultiConnector: it keeps from kvoffload where the workers' pools are, and from vLLM that "
            "failed loads are to be recomputed; name KVOffloadConnector as kv_connector"
        )
    if model.runner_type == "pooling" and not model.is_prefix_caching_supported:
        raise ConfigError(
            f"model {model.model}: its pooler needs the hidden states of the whole prompt, so no part of a prompt can "
            "come from a cache; run it without kvoffload"
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method == "extract_hidden_states":
        raise ConfigError(
            "speculative method 'extract_hidden_states': what it caches is no KV that a request could go on from; "
            "remove the speculative config, or run without kvoffload"
        )


def _refuse_unserved_with_disk(vllm_config: VllmConfig, config: OffloadConfig) -> None:
    """What is served from host memory, but not from bytes of an earlier process."""
    if not versions.DRAINS_HOLDERS_FIRST:
        raise ConfigError(
            f"disk_dir={config.disk_dir!r}: in {versions.NAME} no request can be told to wait for blocks from disk; "
            f"use vLLM {versions.FIRST_TO_DRAIN_HOLDERS_FIRST} or later, or remove disk_dir and disk_bytes"
        )
    if versions.expected_hash_root(vllm_config) is None:
        algorithm = vllm_config.cache_config.prefix_caching_hash_algo
        raise ConfigError(
            f"prefix_caching_hash_algo={algorithm}: its hashes begin with a random number in every process, so none "
            "would find what another has left on disk; set the environment variable PYTHONHASHSEED=0 (any number, the "
            "same at every start), or use --prefix-caching-hash-algo sha256"
        )
    multimodal, cache = vllm_config.model_config.multimodal_config, vllm_config.cache_config
    if multimodal and versions.attribute(multimodal, "mm_processor_cache_gb") == 0 and not cache.enable_prefix_caching:
        raise ConfigError(
            f"disk_dir={config.disk_dir!r} with mm_processor_cache_gb=0 and no prefix caching: vLLM then names images "
            "and other inputs by a number that begins anew with every process, and not by their content; turn one of "
            "the two on"
        )
    if vllm_config.lora_config is not None and config.model_fingerprint is None:
        raise ConfigError(
            f"disk_dir={config.disk_dir!r} with LoRA: a block tells its adapter by name and path alone, and an adapter "
            'may be another one after a restart; set model_fingerprint="..." and change it with the weights of the '
            "model or of any adapter"
        )


def model_fingerprint(vllm_config: VllmConfig, setup: Setup, infos: Sequence[RankInfo]) -> str:
    """The fingerprint of all that shapes this engine's KV bytes and block hashes. Raises ConfigError if they outlive
    this process and nothing tells these weights from others."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    load, digests, draft = vllm_config.load_config, DigestCache(), None
    identity = _identity(setup.config, model, load, digests)
    if any(group.draft for group in setup.kv_groups):
        speculative = vllm_config.speculative_config
        drafting, own = speculative.draft_model_config, getattr(speculative, "draft_load_config", None)
        # Layers that predict several tokens lie among the model's own files.
        is_apart = own is not None or (drafting.model, drafting.revision) != (model.model, model.revision)
        drafts = _identity(setup.config, drafting, own or load, digests) if is_apart else identity
        draft = [speculative.method, drafts, _model(drafting)]
    root = versions.expected_hash_root(vllm_config)
    return fingerprint(
        {
            "weights": identity,
            "model": _model(model),
            # It decides between two sets of factors. Otherwise it shapes nothing, and may depend on free memory.
            "max_model_len": model.max_model_len if "longrope" in _hf_config(model) else None,
            "multimodal": _multimodal(model),
            "load_format": [str(load.load_format), _plain(load.model_loader_extra_config)],
            "draft": draft,
            "engine": [versions.NAME, *_installed()],
            "device": str(vllm_config.device_config.device_type),
            "dtype": str(model.dtype),
            "quantization": str(model.quantization),
            "cache_dtype": str(cache.cache_dtype),
            "cache": _vllm_hash(cache),
            "cache_toggles": [getattr(cache, name, None) for name in CACHE_TOGGLES],
            **{name: _vllm_hash(getattr(vllm_config, name, None)) for name in HASHED},
            "additional": _plain(getattr(vllm_config, "additional_config", None)),
            "environment": _same_everywhere(_environment),
            "layout": str(getattr(cache, "kv_cache_layout", None)),
            "groups": [repr(group) for group in setup.kv_groups],
            "ranks": [list(map(list, info.layers)) for info in infos],
            "parallel": [parallel.tensor_parallel_size, parallel.pipeline_parallel_size],
            "hash_block_size": setup.hash_block_size,
            "hash_algorithm": str(cache.prefix_caching_hash_algo),
            # Of seed, algorithm and how it serializes.
            "hash_root": None if root is None else root.hex(),
        }
    )


def _model(model: ModelConfig) -> list[Any]:
    """What makes of weights and tokens what ``model`` computes: its configuration, and code that is named there."""
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


def _identity(config: OffloadConfig, model: ModelConfig, load: LoadConfig, digests: DigestCache) -> str:
    """What names the weights of ``model``. Every byte of them is read only for a cache that outlives this process.
    Raises ConfigError for such a cache if nothing names them."""
    if config.model_fingerprint is not None:
        return f"given:{config.model_fingerprint}"
    if config.disk_dir is None:
        return "of this process"
    load_format = str(load.load_format)
    if load_format == "dummy":
        # Drawn with a seed of vLLM's own; numbers that are no floats stay what was in memory before.
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
        f"disk_dir={config.disk_dir!r}: nothing tells the weights of model {model.model} from others after a restart: "
        f'{reason}; set model_fingerprint="..." and change it with the weights'
    )


def _folders(model: str, revision: str | None, download_dir: str | None) -> list[Path]:
    """Where the files of ``model`` lie: those that vLLM loads are in ``download_dir``, others always where Hugging
    Face's own library puts them."""
    if getattr(envs, "VLLM_USE_MODELSCOPE", False) and not Path(model).is_dir():
        return []
    found = (find_model_dir(model, revision, place) for place in (download_dir, None))
    return list(dict.fromkeys(folder for folder in found if folder is not None))


def _other_folders(model: ModelConfig, download_dir: str | None) -> list[Path]:
    """Where the files of other models lie that the configuration of ``model`` names: some take the weights of an
    encoder, or code, from there."""
    folders: list[Path] = []
    for text in _texts(model.hf_config.to_dict()):
        name = text.split("--")[0]
        is_path = os.path.isabs(name) and Path(name, "config.json").is_file()
        if name != model.model and (is_path or REPOSITORY.fullmatch(name)):
            folders += _folders(name, model.code_revision if "--" in text else None, download_dir)
    return list(dict.fromkeys(folders))


def _texts(described: Any) -> Iterator[str]:
    """The strings anywhere in a model's configuration, but where itself was loaded from."""
    if isinstance(described, str):
        yield described
    elif isinstance(described, Mapping):
        for key, value in described.items():
            if key != "_name_or_path":
                yield from _texts(value)
    elif isinstance(described, Sequence):
        for value in described:
            yield from _texts(value)


def _multimodal(model: ModelConfig) -> list[Any] | None:
    """What makes of an image, a video or a sound what the model sees, besides its weights and the input's own hash."""
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
    """The model's configuration with what the user overrides in it, as JSON."""
    described = model.hf_config.to_dict()
    described.pop("_name_or_path", None)
    return json.dumps(described, sort_keys=True, default=str)


def _vllm_hash(config: Any) -> str | None:
    """vLLM's own hash over what of ``config`` shapes what is computed."""
    return None if config is None else _same_everywhere(config.compute_hash)


def _same_everywhere(make: Callable[[], Any]) -> str:
    """What ``make`` gives, as text; if it raises, something that no other process has, so that none finds blocks of
    this one."""
    try:
        return json.dumps(make(), sort_keys=True, default=str)
    except Exception:
        logger.exception("kvoffload: a setting cannot be hashed; no later process finds what this one leaves on disk")
        return os.urandom(16).hex()


def _plain(value: Any) -> str:
    """``value`` as text that is the same in every process with this setting."""
    return _same_everywhere(lambda: normalize_value(value))


def _source(module: str) -> str:
    """A digest of the code of ``module``, empty where there is none to be read."""
    try:
        spec = importlib.util.find_spec(module)
        return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest() if spec and spec.origin else ""
    except (ImportError, OSError, ValueError):
        return ""


def _installed() -> list[str]:
    """Versions of what computes: libraries, and packages that add models to vLLM."""
    plugins = {
        entry.dist.name
        for group in ("vllm.general_plugins", "vllm.platform_plugins")
        for entry in importlib.metadata.entry_points(group=group)
        if entry.dist is not None and entry.dist.name != "kvoffload"
    }
    return [
        f"{name}={next((d.version for d in importlib.metadata.distributions(name=name)), None)}"
        for name in ("torch", "transformers", *sorted(plugins))
    ]


def _environment() -> dict[str, Any]:
    """Variables of vLLM that may choose how something is computed."""
    return {
        name: value
        for name, value in envs.compile_factors().items()
        if name.startswith("VLLM_") and not BESIDE_COMPUTING.search(name)
    }


def namespace(model: str) -> bytes:
    """The bytes of a fingerprint that go in front of every block hash."""
    return root_hash(model)[:NAMESPACE_BYTES]

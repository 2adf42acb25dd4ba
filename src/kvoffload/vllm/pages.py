"""vLLM's KV cache tensors as pages of bytes, and the transfer engine that fits their device.

In the canonical layout, vLLM says for each layer which bytes of a page that no parallelism changes are on this rank,
and checks that the ranks of a stage fill its page exactly.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_cache_interface import MambaSpec

from kvoffload.abc import ConfigError, PageGroup, Transfer
from kvoffload.connector.ranks import CanonicalPages, CanonicalRows, LayerPages, PageRun, place
from kvoffload.transfer.cuda.native_loop import native_module
from kvoffload.transfer.cuda.pages import page_table
from kvoffload.transfer.failed import FailedTransfer
from kvoffload.transfer.follower import FollowerTransfer
from kvoffload.transfer.inline import InlineTransfer
from kvoffload.vllm import versions
from kvoffload.vllm.layout import without_parallelism
from kvoffload.vllm.nesting import page_layout

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

    from kvoffload.vllm.layout import EngineLayout
    from kvoffload.vllm.replicas import RankPool

logger = logging.getLogger(__name__)

MAX_RUNS = 2
"""The most runs per page. There is one of keys and one of values, or one of both, if heads lie before tokens."""


def page_view(name: str, cache: torch.Tensor, num_blocks: int, page_bytes: int) -> torch.Tensor:
    """Returns the bytes of one layer's cache as uint8 of shape (num_blocks, page_bytes), without copying.

    The first dimension of ``cache`` counts blocks, or equal parts of blocks. There may be other bytes between blocks:
    pages of other layers, or padding. Raises ConfigError unless the strides make every block one run of exactly
    ``page_bytes`` bytes.
    """
    parts, rest = divmod(cache.shape[0], num_blocks)
    part_items = cache[0].numel() if cache.shape[0] else 0
    span = 1 + sum((size - 1) * stride for size, stride in zip(cache.shape[1:], cache.stride()[1:], strict=True))
    item = cache.element_size()
    block_stride = cache.stride(0) * parts
    whole_parts = parts == 1 or cache.stride(0) == part_items
    if rest or span != part_items or not whole_parts or part_items * parts * item != page_bytes:
        raise ConfigError(
            fault=f"KV cache of layer {name}, shape {tuple(cache.shape)}, strides {cache.stride()}, "
            f"{cache.dtype}: its {num_blocks} blocks are not whole pages of {page_bytes} bytes each",
            fix="kvoffload serves only KV cache layouts in which a block's page in a layer is one "
            "piece: unset VLLM_KV_CACHE_LAYOUT",
        )
    storage = cache.untyped_storage()
    view = torch.empty(0, dtype=torch.uint8, device=cache.device)
    return view.set_(storage, cache.storage_offset() * item, (num_blocks, page_bytes), (block_stride * item, 1))


def page_format(layer: Any, cache: torch.Tensor, spec: KVCacheSpec) -> str:
    """Describes how a page of ``cache`` is laid out: its shape and order, the attention backend, and on a CPU the
    instruction set for which the backend packs it. The page of a state has the tensors that ``spec`` names, one behind
    the other."""
    tensors = ""
    if isinstance(spec, MambaSpec):
        parts = zip(spec.dtypes, spec.shapes, strict=True)
        tensors = f" {spec.mamba_type.name}" + "".join(f" {dtype} {tuple(shape)}" for dtype, shape in parts)
    return _format(layer, cache, f"{tuple(cache.shape[1:])} {cache.stride()[1:]}{tensors}")


def _format(layer: Any, cache: torch.Tensor, shape: str) -> str:
    return f"{layer.get_attn_backend().get_name()} {getattr(layer, 'isa', '')} {cache.dtype} {shape}"


def layer_pages(
    layout: EngineLayout, vllm_config: VllmConfig, kv_caches: Mapping[str, torch.Tensor]
) -> tuple[LayerPages, ...]:
    """Returns all layers of this rank, group after group."""
    layers = vllm_config.compilation_config.static_forward_context
    return tuple(
        LayerPages(name, page_bytes, page_format(layers[name], kv_caches[name], spec))
        for group in layout.groups
        for name, page_bytes, spec in group.layers
    )


def page_groups(layout: EngineLayout, kv_caches: Mapping[str, torch.Tensor]) -> list[PageGroup]:
    """Returns the pages of every group's layers, torch tensors in the order of ``layout``.

    Raises ConfigError for a layout or a device that is not served, or not without native code.
    """
    groups = []
    for group in layout.groups:
        missing = [layer.name for layer in group.layers if layer.name not in kv_caches]
        if missing:
            raise ConfigError(
                fault=f"vLLM registered no KV cache for layers {missing}", fix="kvoffload cannot serve this model"
            )
        views = [
            page_view(name, kv_caches[name], layout.num_device_blocks, page_bytes)
            for name, page_bytes, _ in group.layers
        ]
        kinds = {view.device.type for view in views}
        for kind in kinds - {"cpu", "cuda"}:
            raise ConfigError(fault=f"the KV cache is on device {kind!r}", fix="kvoffload serves cpu and cuda")
        if "cuda" in kinds:
            native_module()
        groups.append(PageGroup(views, group.group.block_size_factor))
    return groups


def log_layout(name: str | None, groups: list[PageGroup]) -> None:
    """Logs into how many pieces of memory ``name``, vLLM's KV cache layout, divides the blocks of each group."""
    pieces = sorted({len(page_table(group).runs) for group in groups if group.views})
    if not pieces:
        return
    logger.info(
        "kvoffload: KV cache layout %s: a device block is %s",
        name or "of vLLM",
        "one piece of memory" if pieces == [1] else f"in {' or '.join(map(str, pieces))} pieces of memory",
    )


def make_transfer(groups: list[PageGroup], pool: RankPool) -> Transfer:
    """Returns the transfer between the pages of ``groups`` and the slots of ``pool``, for the device of the pages. It
    stores only if this rank does. If the device's driver or memory does not allow copies, the engine starts
    nevertheless, and its first step switches offloading off."""
    try:
        transfer = _device_transfer(groups, pool)
    except ConfigError:
        raise
    except Exception as error:
        logger.exception("kvoffload: blocks cannot be copied to and from the device; the engine starts without it")
        return FailedTransfer(error)
    return transfer if pool.stores else FollowerTransfer(transfer)


def _device_transfer(groups: list[PageGroup], pool: RankPool) -> Transfer:
    if any(view.device.type == "cuda" for group in groups for view in group.views):
        from kvoffload.vllm.cuda import make_cuda_transfer

        return make_cuda_transfer(groups, pool.data, pool.own)
    arrays = [PageGroup([view.numpy() for view in each.views], each.factor, each.placement) for each in groups]
    return InlineTransfer(arrays, pool.data)


@dataclass(frozen=True, slots=True)
class RankPages:
    """The pages of this rank. ``runs``: by KV cache group and layer. ``stores``: whether it is the one that stores, of
    the ranks that hold the same heads."""

    pages: CanonicalPages
    runs: tuple[tuple[tuple[PageRun, ...], ...], ...]
    stores: bool

    def place(self, groups: Sequence[PageGroup], rows: CanonicalRows) -> list[PageGroup]:
        """Returns the pages of ``groups`` with their places in ``rows``."""
        return [
            place(group, runs, [layer.page_bytes for layer in layers], begin, row_bytes)
            for group, runs, layers, begin, row_bytes in zip(
                groups, self.runs, self.pages, rows.begins, rows.row_bytes, strict=True
            )
        ]


def rank_pages(
    layout: EngineLayout,
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    rank: int,
) -> RankPages | str:
    """Returns the pages of the tensor-parallel rank with this number, or why they have no canonical layout."""
    if layout.has_states:
        return "layers with states have none"
    try:
        mappings = versions.canonical_mappings(vllm_config, kv_cache_config, kv_caches, rank)
    except Exception as error:
        logger.warning("kvoffload: vLLM cannot say how pages divide between ranks", exc_info=True)
        return f"vLLM cannot say how pages divide between ranks ({type(error).__name__})"
    layers = vllm_config.compilation_config.static_forward_context
    heads = vllm_config.model_config.get_total_num_kv_heads()
    family = page_layout(versions.kv_cache_layout(vllm_config))
    pages: list[tuple[LayerPages, ...]] = []
    runs: list[tuple[tuple[PageRun, ...], ...]] = []
    stores = set()
    for group in layout.groups:
        described, of_group = [], []
        for name, page_bytes, spec in group.layers:
            mapping, cache, layer = mappings.get(name), kv_caches[name], layers[name]
            if mapping is None or not mapping.parallelism_agnostic or mapping.local_page_size_bytes != page_bytes:
                return f"the pages of layer {name} have none, as vLLM says"
            of_layer = tuple(_runs(mapping))
            if len(of_layer) > MAX_RUNS:
                return (
                    f"in KV cache layout {family} the bytes of a head are in {len(of_layer)} pieces: unset "
                    "VLLM_KV_CACHE_LAYOUT"
                )
            described_as = _format(layer, cache, f"{family} {without_parallelism(spec, heads)!r}")
            described.append(LayerPages(name, int(mapping.canonical_page_size_bytes), described_as))
            of_group.append(of_layer)
            stores.add(mapping.writer_index == 0)
        pages.append(tuple(described))
        runs.append(tuple(of_group))
    if len(stores) > 1:
        return "some layers divide between more ranks than others"
    return RankPages(tuple(pages), tuple(runs), False not in stores)


def _runs(mapping: Any) -> list[PageRun]:
    return [
        PageRun(
            int(run.local_offset + i * run.local_stride),
            int(run.canonical_offset + i * run.canonical_stride),
            int(run.fragment_size),
        )
        for run in mapping.runs
        for i in range(run.num_fragments)
    ]

"""The canonical layout of vLLM's pages: which bytes of a page that no parallelism changes are on this rank.

vLLM says so for each layer, and checks that the ranks of a stage fill its page exactly.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec

from kvoffload.abc import PageGroup
from kvoffload.connector.canonical import CanonicalLayer, CanonicalPages, CanonicalRows, PageRun, place
from kvoffload.vllm import versions
from kvoffload.vllm.nesting import page_layout

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

    from kvoffload.vllm.layout import EngineLayout

logger = logging.getLogger(__name__)

MAX_RUNS = 2
"""The most runs per page. There is one of keys and one of values, or one of both, if heads lie before tokens."""


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
                groups, self.runs, self.pages.layers, rows.begins, rows.row_bytes, strict=True
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
    pages: list[tuple[CanonicalLayer, ...]] = []
    runs: list[tuple[tuple[PageRun, ...], ...]] = []
    stores = set()
    for group in layout.groups:
        described, of_group = [], []
        for name, page_bytes in zip(group.layer_names, group.page_bytes, strict=True):
            mapping, cache, layer = mappings.get(name), kv_caches[name], layers[name]
            if mapping is None or not mapping.parallelism_agnostic or mapping.local_page_size_bytes != page_bytes:
                return f"the pages of layer {name} have none, as vLLM says"
            of_layer = tuple(_runs(mapping))
            if len(of_layer) > MAX_RUNS:
                return (
                    f"in KV cache layout {family} the bytes of a head are in {len(of_layer)} pieces: unset "
                    "VLLM_KV_CACHE_LAYOUT"
                )
            spec = without_parallelism(group.layer_spec(name), heads)
            backend = layer.get_attn_backend().get_name()
            page_format = f"{backend} {getattr(layer, 'isa', '')} {cache.dtype} {family} {spec!r}"
            described.append(CanonicalLayer(name, int(mapping.canonical_page_size_bytes), page_format))
            of_group.append(of_layer)
            stores.add(mapping.writer_index == 0)
        pages.append(tuple(described))
        runs.append(tuple(of_group))
    if len(stores) > 1:
        return "some layers divide between more ranks than others"
    return RankPages(CanonicalPages(tuple(pages)), tuple(runs), False not in stores)


def without_parallelism(spec: KVCacheSpec, heads: int) -> KVCacheSpec:
    """Returns ``spec`` as it is on a single rank, which has ``heads`` KV heads."""
    if isinstance(spec, (MLAAttentionSpec, MambaSpec)):
        return spec
    # Everything that follows from the number of heads on a rank is left out.
    return dataclasses.replace(spec, num_kv_heads=heads, num_head_slots=None, max_tp_shards=None)


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

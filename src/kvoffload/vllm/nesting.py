"""The order of layers and blocks in the memory of vLLM's KV cache: which one to ask for, and which ones are alike."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.worker.utils import select_common_block_size

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

LAYERS_FIRST = "HND"
"""The page of a block in a layer is one piece of memory. An older name of LBHNC."""
BLOCKS_FIRST = "BLHNC"
"""A block is one piece of memory: its pages in all layers, each with the same bytes as in LAYERS_FIRST."""
READ_BY_STRIDE = {
    "FLASH_ATTN",
    "FLASH_ATTN_DIFFKV",
    "FLASHINFER",
    "TRITON_ATTN",
    "TRITON_ATTN_DIFFKV",
    "CUTLASS_MLA",
    "FLASH_ATTN_MLA",
    "FLASHINFER_MLA",
    "FLASHMLA",
    "TRITON_MLA",
}
"""Attention backends that take the distance between blocks from the tensor. vLLM lets
any backend be given any layout unless it says otherwise, and with some of them vLLM then does not start, or computes
something else: sparse MLA (vLLM #55431), MLA on a CPU."""


def required_layout(vllm_config: VllmConfig) -> str:
    """Returns the layout that kvoffload asks vLLM for. vLLM does not ask for it if the user has set
    VLLM_KV_CACHE_LAYOUT, and ignores the answer, with a warning, if an attention backend cannot use this layout."""
    if vllm_config.device_config.device_type != "cuda":
        return LAYERS_FIRST
    try:
        reason = reason_against_blocks_first(vllm_config)
    except Exception:
        logger.exception("kvoffload: cannot find out which KV cache layout is the best")
        return LAYERS_FIRST
    if reason is None:
        return BLOCKS_FIRST
    logger.info(
        "kvoffload: does not ask vLLM for KV cache layout %s, in which a block is one piece of memory and is copied "
        "without using the GPU's processors: %s",
        BLOCKS_FIRST,
        reason,
    )
    return LAYERS_FIRST


def reason_against_blocks_first(vllm_config: VllmConfig) -> str | None:
    """Returns why vLLM might not start or not compute the same with BLOCKS_FIRST, or None if nothing speaks against it.

    vLLM asks once, in the process of the scheduler, after the workers have loaded the model.
    """
    cache = vllm_config.cache_config
    if str(cache.cache_dtype).endswith("per_token_head"):
        return f"kv_cache_dtype={cache.cache_dtype} keeps scales between the values (vLLM #49226)"
    layers = get_layers_from_vllm_config(vllm_config, cast(type[Any], AttentionLayerBase))
    if not layers:
        return (
            "the workers have processes of their own, so their attention backends are not known here; if all of them "
            f"are among {', '.join(sorted(READ_BY_STRIDE))}, set the environment variable "
            f"VLLM_KV_CACHE_LAYOUT={BLOCKS_FIRST}"
        )
    backends = {layer.get_attn_backend() for layer in layers.values()}
    names = sorted(backend.get_name() for backend in backends)
    if len(backends) > 1:
        return f"the model has several attention backends: {', '.join(names)}"
    (backend,) = backends
    if names[0] not in READ_BY_STRIDE:
        return f"attention backend {names[0]} is not known to read blocks by their distance"
    declared = backend.supported_kv_cache_layouts()
    if declared is not None and BLOCKS_FIRST not in [layout.name for layout in declared]:
        return f"attention backend {names[0]} does not support it"
    specs = [spec for layer in layers.values() if (spec := layer.get_kv_cache_spec(vllm_config)) is not None]
    if len({spec.page_size_bytes for spec in specs}) > 1:
        return "the pages of the model's layers differ in size, and vLLM would group the layers otherwise"
    with set_current_vllm_config(vllm_config):
        for block_size in {spec.block_size for spec in specs}:
            # vLLM gives the backend parts of blocks of another size, which are not equally far apart in BLOCKS_FIRST.
            if select_common_block_size(block_size, [backend]) != block_size:
                return f"attention backend {names[0]} computes with a part of a block of {block_size} tokens"
    return None


def page_layout(layout: str | None) -> str | None:
    """Returns the layout with layers outermost whose pages have the same bytes as those of ``layout``, a name of
    vLLM's."""
    return layout if layout is None else {"BLHNC": "LBHNC", "BLNHC": "LBNHC"}.get(layout, layout)

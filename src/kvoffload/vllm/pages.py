"""vLLM's KV cache tensors as pages of bytes, and the transfer engine that fits their device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from kvoffload.base import ConfigError
from kvoffload.hostpool import HostPool
from kvoffload.transfer.base import Transfer
from kvoffload.transfer.inline import InlineTransfer

if TYPE_CHECKING:
    from kvoffload.vllm.setup import Setup


def page_view(name: str, cache: torch.Tensor, num_blocks: int, page_bytes: int) -> torch.Tensor:
    """The bytes of one layer's cache, uint8 of shape (num_blocks, page_bytes), derived from its strides.

    ``cache`` has blocks, or equal parts of them, in its first dimension. Raises ConfigError unless every
    block is one run of exactly ``page_bytes`` bytes.
    """
    parts, rest = divmod(cache.shape[0], num_blocks)
    part_items = cache[0].numel() if cache.shape[0] else 0
    span = 1 + sum((size - 1) * stride for size, stride in zip(cache.shape[1:], cache.stride()[1:], strict=True))
    item = cache.element_size()
    block_stride = cache.stride(0) * parts
    whole_parts = parts == 1 or cache.stride(0) == part_items
    if rest or span != part_items or not whole_parts or part_items * parts * item != page_bytes:
        raise ConfigError(
            f"KV cache of layer {name}, shape {tuple(cache.shape)}, strides {cache.stride()}, {cache.dtype}: its "
            f"{num_blocks} blocks are not pages of {page_bytes} bytes each; kvoffload needs the KV cache layout LBHNC "
            "or another with whole pages: unset VLLM_KV_CACHE_LAYOUT"
        )
    storage = cache.untyped_storage()
    view = torch.empty(0, dtype=torch.uint8, device=cache.device)
    return view.set_(storage, cache.storage_offset() * item, (num_blocks, page_bytes), (block_stride * item, 1))


def page_views(setup: Setup, kv_caches: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The pages of every layer, in the order of its name in ``setup``. Raises ConfigError for what is not served."""
    missing = [name for name in setup.layer_names if name not in kv_caches]
    if missing:
        raise ConfigError(f"vLLM registered no KV cache for layers {missing}; kvoffload cannot serve this model")
    views = [page_view(name, kv_caches[name], setup.num_device_blocks, setup.page_bytes) for name in setup.layer_names]
    kind = views[0].device.type
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"the KV cache is on device {kind!r}; kvoffload serves cpu and cuda")
    return views


def make_transfer(views: list[torch.Tensor], pool: HostPool, factor: int) -> Transfer:
    """The transfer engine between ``page_views`` and ``pool``."""
    if views[0].device.type == "cuda":
        from kvoffload.transfer.cuda import CudaTransfer

        return CudaTransfer(views, pool.data, factor)
    return InlineTransfer([view.numpy() for view in views], pool.data, factor)

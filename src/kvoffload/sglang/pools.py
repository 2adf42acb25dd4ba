"""HostPages: the pages of one of SGLang's host pools, as arrays of bytes that a bridge copies from and to."""

from __future__ import annotations

import hashlib
import json
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from kvoffload.abc import ConfigError, OffloadKey
from kvoffload.cache.keys import make_offload_key
from kvoffload.host.pool import padded_slot_bytes
from kvoffload.tiering.bridge import Page

if TYPE_CHECKING:
    from sglang.srt.mem_cache.pool_host.base import HostKVCache

Bytes = npt.NDArray[np.uint8]

MAX_PARTS = 8
"""Blocks per page of KV at most: each costs as much as a page."""
MAX_WASTE = 0.1
"""The share of the bytes of blocks that may be padding before pages are divided further."""
KV = "kv"
"""SGLang's name of the pool with the KV of the tokens. All others hold something beside it for the same pages."""
REPLICATED = {"MLATokenToKVPoolHost", "DSAIndexerPoolHost", "DeepSeekV4PagedHostPool"}
"""Classes of host pools in which all tensor-parallel ranks of a model with replicated KV hold the same bytes."""
_FIRST_STATES: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""By host pool, its ``mem_state`` when a backend was attached to it for the first time. A server may detach its backend
and attach another one, which then has to know that there was a flush in between."""


class HostPages:
    """The pages of ``pool``, which SGLang calls ``name``.

    A page of a side pool is divided into ``parts`` blocks of the bridge, since pools have pages of different sizes and
    a bridge has blocks of one size. ``rank`` distinguishes the keys of a pool that each rank has for itself beside KV
    that all ranks share. Raises ConfigError for a pool whose pages can be neither addressed nor copied.
    """

    def __init__(self, name: str, pool: HostKVCache, rank: str = "") -> None:
        self.name, self.pool = name, pool
        self.tokens = int(getattr(pool, "logical_page_size", pool.page_size))
        """Indices per page."""
        self.parts = 1
        self.is_of_rank = bool(rank)
        """Whether this rank has bytes of its own beside KV that all ranks share."""
        state = getattr(pool, "mem_state", None)
        self._mem_state = None if state is None else _FIRST_STATES.setdefault(pool, weakref.ref(state))()
        self._buffers = _buffers(pool)
        self._starts = [start for start, _ in self._buffers]
        sizes = self._addressed_sizes()
        self.is_addressed = bool(sizes) and sum(sizes) >= int(pool.size_per_token) * int(pool.page_size)
        """Whether pages are copied in place. Otherwise SGLang copies them to and from one tensor per page."""
        self.nbytes = sum(sizes) if self.is_addressed else self._flat_bytes()
        self.sizes = sizes if self.is_addressed else []
        """Bytes of each piece of a page that is copied in place."""
        self._padding: Bytes = np.zeros(0, np.uint8)
        shape = json.dumps(self.describe(), sort_keys=True, default=str)
        self._mark = f"{name}/{rank}/{hashlib.sha256(shape.encode()).hexdigest()}"
        """What every key of the pool begins with: pools may come later than the fingerprint is made."""

    def divide(self, block_bytes: int) -> None:
        """Divides every page into blocks of ``block_bytes``. The last one ends with padding."""
        self.parts = -(-self.nbytes // block_bytes)
        self._block_bytes = block_bytes
        self._padding = np.zeros(self.parts * block_bytes - self.nbytes, np.uint8)

    def was_cleared(self) -> bool:
        """Returns whether SGLang has cleared the pool since the last call, or since a backend was first attached to it:
        it does when it flushes its caches."""
        state = getattr(self.pool, "mem_state", None)
        cleared, self._mem_state = state is not self._mem_state, state
        return cleared

    def describe(self) -> list[Any]:
        """Returns everything about a page that shapes its bytes, as JSON."""
        pool = self.pool
        layers = [getattr(pool, name, None) for name in ("start_layer", "end_layer", "layer_num")]
        return [
            self.name,
            type(pool).__name__,
            str(pool.layout),
            str(pool.dtype),
            self.tokens,
            layers,
            self.sizes or self.nbytes,
            [getattr(pool, name, None) for name in ("head_num", "head_dim", "kv_cache_dim")],
            getattr(pool, "storage_format_tag", None),
        ]

    def keys(self, hashes: Sequence[str]) -> list[OffloadKey]:
        """Returns the keys of the blocks of pages with these ``hashes``, ``parts`` per page."""
        if self.name == KV and self.parts == 1:
            return [make_offload_key(_digest(each), 0) for each in hashes]
        marks = [f"{self._mark}/{part}/".encode() for part in range(self.parts)]
        return [
            make_offload_key(hashlib.blake2b(mark + each.encode(), digest_size=32).digest(), 0)
            for each in hashes
            for mark in marks
        ]

    def is_complete(self, blocks: Sequence[bool]) -> list[bool]:
        """Returns, per page, whether all of its blocks are True in ``blocks``."""
        if self.parts == 1:
            return list(blocks)
        return [all(blocks[i : i + self.parts]) for i in range(0, len(blocks), self.parts)]

    def num_pages(self, indices: torch.Tensor | None) -> int:
        """Returns how many pages ``indices`` name, or -1 if these are not whole pages."""
        count = 0 if indices is None else indices.numel()
        return -1 if count % self.tokens else count // self.tokens

    def views(self, indices: torch.Tensor) -> list[Page]:
        """Returns the memory of the pages at ``indices``, divided into blocks."""
        pointers, sizes = self.pool.get_page_buffer_meta(indices)
        count = len(sizes) // self.num_pages(indices)
        views = [self._view(int(pointer), int(size)) for pointer, size in zip(pointers, sizes, strict=True)]
        return [block for i in range(0, len(views), count) for block in self._blocks(views[i : i + count])]

    def copies(self, indices: torch.Tensor) -> list[Page]:
        """Returns the bytes of the pages at ``indices`` in memory of their own, divided into blocks."""
        found = (self.pool.get_data_page(first, flat=True) for first in self._firsts(indices))
        return [block for page in found for block in self._blocks([_as_bytes(page.contiguous())])]

    def empty(self, count: int) -> list[torch.Tensor]:
        """Returns memory for ``count`` pages, which ``fill`` takes."""
        return [self.pool.get_dummy_flat_data_page() for _ in range(count)]

    def blocks_of(self, pages: Sequence[torch.Tensor]) -> list[Page]:
        """Returns ``pages`` divided into blocks."""
        return [block for page in pages for block in self._blocks([_as_bytes(page)])]

    def fill(self, indices: torch.Tensor, pages: Sequence[torch.Tensor], arrived: Sequence[bool]) -> None:
        """Copies the ``pages`` that have ``arrived`` to the pool, at ``indices``."""
        for first, page, here in zip(self._firsts(indices), pages, arrived, strict=True):
            if here:
                self.pool.set_from_flat_data_page(first, page)

    def close(self) -> None:
        """Gives up all references to the memory of the pool."""
        self._buffers, self._starts, self._mem_state = [], [], None

    def _firsts(self, indices: torch.Tensor) -> list[int]:
        return [int(first) for first in indices[:: self.tokens].tolist()]

    def _view(self, pointer: int, size: int) -> Bytes:
        at = bisect_right(self._starts, pointer) - 1
        start, data = self._buffers[at] if at >= 0 else (0, self._padding)
        begin = pointer - start
        if not 0 <= begin <= len(data) - size:
            raise ValueError(f"host pool {self.name}: a page at an address outside the buffers of the pool")
        return data[begin : begin + size]

    def _blocks(self, views: list[Bytes]) -> Iterator[Page]:
        if self.parts == 1 and not len(self._padding):
            yield views
            return
        block: list[Bytes] = []
        room = self._block_bytes
        for view in (*views, self._padding):
            rest = view
            while len(rest):
                block.append(rest[:room])
                rest, room = rest[room:], room - len(rest[:room])
                if not room:
                    yield block
                    block, room = [], self._block_bytes

    def _addressed_sizes(self) -> list[int]:
        """Returns the bytes of each piece of a page, nothing if the pool does not give addresses of its memory."""
        try:
            pointers, sizes = self.pool.get_page_buffer_meta(torch.arange(self.tokens))
            for pointer, size in zip(pointers, sizes, strict=True):
                self._view(int(pointer), int(size))
        except (ValueError, NotImplementedError, AttributeError, TypeError, AssertionError):
            # So do pools that have no addresses in their layout.
            return []
        return [int(size) for size in sizes]

    def _flat_bytes(self) -> int:
        try:
            page = self.pool.get_dummy_flat_data_page()
            nbytes: int = page.numel() * page.element_size()
        except (ValueError, NotImplementedError, AttributeError) as error:
            nbytes, reason = 0, str(error)
        else:
            reason = "it holds no memory of its own"
        if not nbytes:
            raise ConfigError(
                fault=f"host pool {self.name} of class {type(self.pool).__name__} with layout "
                f"{self.pool.layout}: its pages cannot be stored ({reason})",
                fix="try --hicache-mem-layout page_first_direct, or run this model without --hicache-storage-backend",
            )
        return nbytes


def rank_of(name: str, pool: Any, is_replicated: bool, rank: str) -> str:
    """Returns what distinguishes the keys of a pool in a cache that ranks share: ``rank``, or "" if all ranks hold the
    same bytes. ``is_replicated``: whether the model's KV is the same on all tensor-parallel ranks."""
    if name == KV or not is_replicated or any(cls.__name__ in REPLICATED for cls in type(pool).__mro__):
        return ""
    return rank


def block_bytes_of(pools: Sequence[HostPages]) -> int:
    """Returns the bytes of a block that waste least where a page of each of ``pools`` is divided into such blocks.

    Pages of KV are divided at most into MAX_PARTS blocks, into as few as waste less than MAX_WASTE.
    """
    (kv,) = (each for each in pools if each.name == KV)
    used = sum(each.nbytes for each in pools)

    def size(parts: int) -> int:
        return kv.nbytes if parts == 1 else padded_slot_bytes(-(-kv.nbytes // parts))

    def waste(parts: int) -> float:
        return 1 - used / sum(-(-each.nbytes // size(parts)) * padded_slot_bytes(size(parts)) for each in pools)

    wastes = {parts: waste(parts) for parts in range(1, MAX_PARTS + 1)}
    best = next((parts for parts, share in wastes.items() if share < MAX_WASTE), min(wastes, key=wastes.__getitem__))
    return size(best)


def _buffers(pool: Any) -> list[tuple[int, Bytes]]:
    """Returns the tensors that a host pool consists of, as bytes, with their addresses, in order."""
    found: list[Any] = []
    if hasattr(pool, "get_hybrid_pool_buffer"):
        found.extend(pool.get_hybrid_pool_buffer())
    kv = getattr(pool, "kv_buffer", None)
    found.extend(kv if isinstance(kv, (list, tuple)) else [kv])
    by_start: dict[int, Bytes] = {}
    for tensor in found:
        if tensor is not None and tensor.numel() and tensor.device.type == "cpu" and tensor.is_contiguous():
            data, start = _as_bytes(tensor), tensor.data_ptr()
            if len(data) > len(by_start.get(start, ())):
                by_start[start] = data
    # A tensor within another one, such as the keys of a buffer with keys and values, is left out.
    whole: list[tuple[int, Bytes]] = []
    for start, data in sorted(by_start.items()):
        if not whole or start + len(data) > whole[-1][0] + len(whole[-1][1]):
            whole.append((start, data))
    return whole


def _as_bytes(tensor: torch.Tensor) -> Bytes:
    """Returns the memory of a contiguous tensor as bytes."""
    data: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return data


def _digest(page_hash: str) -> bytes:
    """Returns the 32 bytes that SGLang's ``page_hash`` spells, or of a digest of any other text."""
    try:
        raw = bytes.fromhex(page_hash)
    except ValueError:
        raw = b""
    return raw if len(raw) == 32 else hashlib.sha256(page_hash.encode()).digest()

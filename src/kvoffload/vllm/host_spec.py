"""vLLM's own offloading on a CPU: its connector, managers and tiers, with copies by this project.

vLLM's ``CPUOffloadingSpec`` refuses to make a worker unless the device is a GPU. These specs are given to vLLM through
its extension point ``spec_module_path`` and replace only that worker. It copies inside the step, with one memcpy per
block and layer, which is the fastest way that was found on a CPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.abc import ConfigError
from kvoffload.vllm import versions

if _reason := versions.why_too_old():
    raise ConfigError(_reason)

from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CopyRun, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec, LoadStoreSpec

Bytes: TypeAlias = npt.NDArray[np.int8]
"""Shape (rows, bytes per row). Rows may be apart from each other."""


class HostWorker(OffloadingWorker):
    """Copies pages between vLLM's KV cache and host memory.

    ``device``: one array per tensor, a row per device block. ``host``: one array per tensor, a row per chunk, which has
    ``blocks_per_chunk`` pages, one behind the other. ``group_refs``: per KV cache group, its layers. ``is_canonical``:
    pages in host memory are those of all ranks together, and each rank writes its own bytes of them. ``region``: the
    memory of ``host`` if it is shared, which ``shutdown`` releases.
    """

    def __init__(
        self,
        device: Sequence[Bytes],
        host: Sequence[Bytes],
        group_refs: Sequence[Sequence[CanonicalKVCacheRef]],
        blocks_per_chunk: int,
        is_canonical: bool = False,
        region: SharedOffloadRegion | None = None,
    ) -> None:
        self._device, self._host = list(device), list(host)
        self._group_refs = group_refs
        self._blocks_per_chunk = blocks_per_chunk
        self._is_canonical = is_canonical
        self._region = region
        self._results: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        return self._copy(job_id, dst_spec, src_spec, is_store=False)

    def _copy(self, job_id: int, device: GPULoadStoreSpec, host: BlockIDsLoadStoreSpec, is_store: bool) -> bool:
        start, size = time.perf_counter(), 0
        for refs, pages in zip(self._group_refs, self._pages(device, host), strict=True):
            for ref in refs:
                copy = self._copy_canonical if self._is_canonical else self._copy_direct
                size += copy(ref, pages, is_store)
        self._results.append(TransferResult(job_id, True, size, time.perf_counter() - start))
        return True

    def _pages(self, device: GPULoadStoreSpec, host: BlockIDsLoadStoreSpec) -> Iterator[list[tuple[int, int, int]]]:
        """Yields, per group, the pages of a transfer: device block, chunk, and the page's place in the chunk. The first
        and the last chunk of a group may be transferred in part."""
        blocks, chunks = iter(device.block_ids.tolist()), iter(host.block_ids.tolist())
        for size, index in zip(device.group_sizes, device.block_indices, strict=True):
            pages, chunk = [], -1
            first = index % self._blocks_per_chunk
            for i in range(first, first + size):
                place = i % self._blocks_per_chunk
                if i == first or place == 0:
                    chunk = next(chunks)
                pages.append((next(blocks), chunk, place))
            yield pages
        if next(blocks, None) is not None or next(chunks, None) is not None:
            raise ValueError("a transfer has more blocks or chunks than its groups say")

    def _copy_direct(self, ref: CanonicalKVCacheRef, pages: list[tuple[int, int, int]], is_store: bool) -> int:
        device, host = self._device[ref.tensor_idx], self._host[ref.tensor_idx]
        size, step = int(ref.page_size_bytes), host.shape[1] // self._blocks_per_chunk
        for block, chunk, place in pages:
            begin = place * step
            if is_store:
                host[chunk, begin : begin + size] = device[block, :size]
            else:
                device[block, :size] = host[chunk, begin : begin + size]
        return len(pages) * size

    def _copy_canonical(self, ref: CanonicalKVCacheRef, pages: list[tuple[int, int, int]], is_store: bool) -> int:
        """As ``_copy_direct``. Ranks that hold the same bytes take turns in writing them."""
        device, host, mapping = self._device[ref.tensor_idx], self._host[ref.tensor_idx], ref.mapping
        step, copied = host.shape[1] // self._blocks_per_chunk, 0
        for block, chunk, place in pages:
            if is_store and not mapping.is_writer(chunk * self._blocks_per_chunk + place):
                continue
            page = host[chunk, place * step : (place + 1) * step]
            for run in mapping.runs:
                local = _fragments(device[block], run, run.local_offset, run.local_stride)
                canonical = _fragments(page, run, run.canonical_offset, run.canonical_stride)
                if is_store:
                    canonical[:] = local
                else:
                    local[:] = canonical
                copied += local.size
        return copied

    def get_finished(self) -> list[TransferResult]:
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Does nothing: copies end before their submission returns."""

    def shutdown(self) -> None:
        self._device.clear()
        self._host.clear()
        if self._region is not None:
            self._region.cleanup()
            self._region = None


def _fragments(page: Bytes, run: CopyRun, offset: int, stride: int) -> Bytes:
    """Returns the bytes of ``run`` in ``page``, shape (fragments, bytes per fragment)."""
    shape = (int(run.num_fragments), int(run.fragment_size))
    if offset + (shape[0] - 1) * stride + shape[1] > page.shape[0]:
        raise ValueError(f"{run} leaves a page of {page.shape[0]} bytes")
    return np.lib.stride_tricks.as_strided(page[offset:], shape, (stride, 1))


def _device_arrays(kv_caches: CanonicalKVCaches) -> list[Bytes]:
    import torch

    return [each.tensor.view(torch.int8).view((-1, each.page_size_bytes)).numpy() for each in kv_caches.tensors]


class HostMemorySpec(CPUOffloadingSpec):
    """vLLM's single tier in host memory."""

    _worker: Any

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            device = _device_arrays(kv_caches)
            host = [np.zeros((self.num_chunks, each.shape[1] * self.blocks_per_chunk), np.int8) for each in device]
            self._worker = HostWorker(device, host, kv_caches.group_data_refs, self.blocks_per_chunk)
        return self._worker


class HostTieringSpec(TieringOffloadingSpec):
    """vLLM's tiers below host memory, whose region is shared with the scheduler's process."""

    _worker: Any

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            try:
                self._worker = self._make_worker(kv_caches, region)
            except Exception:
                region.cleanup()
                raise
        return self._worker

    def _make_worker(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> HostWorker:
        device, refs, factor = _device_arrays(kv_caches), kv_caches.group_data_refs, self.blocks_per_chunk
        is_canonical = bool(self.config.canonical_layout)
        if is_canonical:
            self._validate_canonical_refs(kv_caches)
            sizes = [0] * len(device)
            for ref in (ref for of_group in refs for ref in of_group):
                sizes[ref.tensor_idx] = max(sizes[ref.tensor_idx], ref.mapping.canonical_page_size_bytes)
            host = [region.create_next_canonical_view(size * factor).numpy() for size in sizes]
        else:
            host = [region.create_next_worker_view(each.shape[1] * factor).numpy() for each in device]
        return HostWorker(device, host, refs, factor, is_canonical, region)

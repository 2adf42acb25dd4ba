"""vLLM's own offloading on a CPU: its connector, managers and tiers, with copies by this project.

vLLM's ``CPUOffloadingSpec`` refuses to make a worker unless the device is a GPU. These specs are given to vLLM through
its extension point ``spec_module_path`` and replace only that worker. It copies with one memcpy per block and layer,
inside the step, which is the fastest way that was found on a CPU. So what is measured is vLLM's scheduling and
bookkeeping, not its copies.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies blocks between vLLM's KV cache and ``host``, one array of bytes per tensor with a row per chunk."""

    def __init__(self, device: list[Any], host: list[Any], blocks_per_chunk: int) -> None:
        if blocks_per_chunk != 1:
            raise ValueError(f"blocks_per_chunk is {blocks_per_chunk}; this worker needs chunks of one block")
        self._device, self._host = device, host
        self._results: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._device, src_spec, self._host, dst_spec)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._host, src_spec, self._device, dst_spec)

    def _copy(self, job_id: int, sources: list[Any], src_spec: Any, targets: list[Any], dst_spec: Any) -> bool:
        start = time.perf_counter()
        pairs = list(zip(src_spec.block_ids.tolist(), dst_spec.block_ids.tolist(), strict=True))
        size = 0
        for source, target in zip(sources, targets, strict=True):
            for i, j in pairs:
                target[j] = source[i]
            size += len(pairs) * source.shape[1]
        self._results.append(TransferResult(job_id, True, size, time.perf_counter() - start))
        return True

    def get_finished(self) -> list[Any]:
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: set[int]) -> None:
        pass


def _device_arrays(kv_caches: Any) -> list[Any]:
    import torch

    return [each.tensor.view(torch.int8).view((-1, each.page_size_bytes)).numpy() for each in kv_caches.tensors]


class HostMemorySpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's single tier in host memory."""

    _worker: Any

    def get_worker(self, kv_caches: Any) -> Any:
        if self._worker is None:
            device = _device_arrays(kv_caches)
            host = [np.zeros((self.num_chunks, each.shape[1]), dtype=np.int8) for each in device]
            self._worker = HostWorker(device, host, self.blocks_per_chunk)
        return self._worker


class HostTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's tiers below host memory, whose region is shared with the scheduler's process."""

    _worker: Any

    def get_worker(self, kv_caches: Any) -> Any:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            device = _device_arrays(kv_caches)
            host = [region.create_next_worker_view(each.shape[1]).numpy() for each in device]
            self._worker = HostWorker(device, host, self.blocks_per_chunk)
        return self._worker

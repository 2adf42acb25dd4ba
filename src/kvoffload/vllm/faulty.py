"""Connectors that misbehave on purpose: controls for demonstrations and tests, never for service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffload.testing.faults import CorruptingTransfer, FailingTransfer
from kvoffload.vllm.connector import KVOffloadConnector

if TYPE_CHECKING:
    import torch


class CorruptedKVOffloadConnector(KVOffloadConnector):
    """Loads spoiled bytes: outputs must change, or a comparison of outputs proves nothing."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        assert self._pool is not None
        worker = self.connector_worker
        worker.transfer = CorruptingTransfer(worker.transfer, self._pool.data)


class FailingKVOffloadConnector(KVOffloadConnector):
    """Fails seven tries of ten, so about half of all loads and stores: outputs must not change."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        worker = self.connector_worker
        worker.transfer = FailingTransfer(worker.transfer, rate=0.7)

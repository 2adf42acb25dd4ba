"""Connectors that misbehave on purpose: controls for demonstrations and tests, never for service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffload.testing.faults import CorruptingTransfer, FailingTransfer, SlowTransfer, ThreadedTransfer
from kvoffload.tiers.disk import blockio
from kvoffload.vllm.connector import KVOffloadConnector

if TYPE_CHECKING:
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata


class CorruptedKVOffloadConnector(KVOffloadConnector):
    """Loads spoiled bytes: outputs must change, or a comparison of outputs proves nothing."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        assert self._pool is not None
        worker = self.connector_worker
        worker.transfer = CorruptingTransfer(worker.transfer, self._pool.data)


class SlowKVOffloadConnector(KVOffloadConnector):
    """Copies take many steps, on every rank other ones, and a third of the tries fails: outputs must not change."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        seed = self._vllm_config.parallel_config.rank
        worker = self.connector_worker
        worker.transfer = FailingTransfer(SlowTransfer(worker.transfer, seed), rate=0.33, seed=seed)


class FailingKVOffloadConnector(KVOffloadConnector):
    """Fails seven tries of ten, so about half of all loads and stores: outputs must not change."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        worker = self.connector_worker
        worker.transfer = FailingTransfer(worker.transfer, rate=0.7)


class ThreadedKVOffloadConnector(KVOffloadConnector):
    """Copies on a thread beside the engine's: what waiting in idle steps is measured with."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        worker = self.connector_worker
        worker.transfer = ThreadedTransfer(worker.transfer)


class SpinningKVOffloadConnector(ThreadedKVOffloadConnector):
    """The same without the wait: an idle engine's steps compete with the thread that it waits for."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self.connector_worker.idle_wait_s = 0.0


class UnverifiedKVOffloadConnector(KVOffloadConnector):
    """Takes what lies on disk as it is: with spoiled files outputs must change."""

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        vars(blockio)["payload_checksum"] = lambda header, key, buffers: _EqualToAny()
        super().set_xfer_handshake_metadata_pp_aware(metadata)


class _EqualToAny(int):
    """A checksum that is always right."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__

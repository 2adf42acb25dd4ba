"""Connectors for ``benchmarks.ttft``: on a CPU they copy on a thread, as a GPU copies beside its computations."""

from __future__ import annotations

from typing import Any

from kvoffload.testing.faults import ThreadedTransfer
from kvoffload.vllm.connector import KVOffloadConnector


class ThreadedKVOffloadConnector(KVOffloadConnector):
    """Copies on a thread beside the engine's thread."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        worker = self.connector_worker
        worker.transfer = ThreadedTransfer(worker.transfer)


class SpinningKVOffloadConnector(ThreadedKVOffloadConnector):
    """Does the same without waiting in idle steps, so that these compete with the thread."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self.connector_worker.idle_wait_s = 0.0

"""The demo's negative control: a connector that loads wrong bytes. Never use it to serve requests."""

from __future__ import annotations

from typing import Any

from kvoffload.testing.faults import CorruptingTransfer
from kvoffload.vllm.connector import KVOffloadConnector


class CorruptedKVOffloadConnector(KVOffloadConnector):
    """Corrupts what it loads. Outputs must change, or a comparison of outputs proves nothing."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        worker = self.connector_worker
        worker.transfer = CorruptingTransfer(worker.transfer, self.pool.data)

"""The demo's negative control: a connector that loads wrong bytes. Never use it to serve requests."""

from __future__ import annotations

from typing import Any

from kvoffload.vllm.connector import KVOffloadConnector
from tests.sim.faults import CorruptingTransfer


class CorruptedKVOffloadConnector(KVOffloadConnector):
    """Corrupts what it loads. Outputs must change, or a comparison of outputs proves nothing."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        corrupt_loads(self)


def corrupt_loads(connector: KVOffloadConnector) -> None:
    """Makes ``connector`` corrupt everything that it loads from now on."""
    worker = connector.connector_worker
    worker.transfer = CorruptingTransfer(worker.transfer, connector.pool.data)

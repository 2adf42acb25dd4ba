"""The demo's negative control: a connector that loads wrong bytes. Never use it to serve requests."""

from __future__ import annotations

from typing import Any

from kvoffload.abc import ByteArray, Transfer, TransferSpec
from kvoffload.vllm.connector import KVOffloadConnector
from tests.sim.faults import WrappedTransfer


class CorruptedKVOffloadConnector(KVOffloadConnector):
    """Corrupts what it loads. Outputs must change, or a comparison of outputs proves nothing."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        corrupt_loads(self)


class BitClearingTransfer(WrappedTransfer):
    """Clears one bit per float32, its sign, in every block in the pool before it is loaded."""

    def __init__(self, inner: Transfer, pool_data: ByteArray) -> None:
        super().__init__(inner)
        self._pool_data = pool_data

    def submit(self, job_id: int, spec: TransferSpec, is_store: bool) -> None:
        if not is_store:
            self._pool_data[spec.host.slots, 3::4] &= 0x7F
        super().submit(job_id, spec, is_store)


def corrupt_loads(connector: KVOffloadConnector) -> None:
    """Makes ``connector`` corrupt everything that it loads from now on, after it was verified."""
    worker = connector.connector_worker
    worker.transfer = BitClearingTransfer(worker.transfer, connector.pool.data)

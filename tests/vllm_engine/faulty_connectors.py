"""Connectors that misbehave on purpose: slow or failing copies, unverified disk blocks, a forgetful scheduler half.
And one that asks for another KV cache layout."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvoffload.abc import ByteArray, Transfer, TransferSpec
from kvoffload.vllm import rank_half, versions
from kvoffload.vllm.connector import KVOffloadConnector
from kvoffload.vllm.nesting import BLOCKS_FIRST, reason_against_blocks_first
from tests.sim.faults import CorruptingTransfer, FailingTransfer, SlowTransfer, WrappedTransfer


class SlowKVOffloadConnector(KVOffloadConnector):
    """Copies take many steps, different ones on every rank, and a third of the tries fail. Outputs must not change."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        seed = self._vllm_config.parallel_config.rank
        worker = self.connector_worker
        worker.transfer = FailingTransfer(SlowTransfer(worker.transfer, seed), rate=0.33, seed=seed, fails_first=True)


class CorruptedStates(WrappedTransfer):
    """Corrupts the blocks of those groups in the pool before they are loaded for which ``corrupted`` is true. Blocks
    must be single device blocks."""

    def __init__(self, inner: Transfer, pool_data: ByteArray, corrupted: list[bool]) -> None:
        super().__init__(inner)
        self._pool_data = pool_data
        self._corrupted = corrupted

    def submit(self, job_id: int, spec: TransferSpec, is_store: bool) -> None:
        if not is_store:
            assert sum(spec.device.group_sizes) == len(spec.host.slots)
            chosen = np.repeat(self._corrupted, spec.device.group_sizes)
            # Makes values negative: each of float32, every other one of bfloat16.
            self._pool_data[spec.host.slots[chosen], 3::4] |= 0x80
        super().submit(job_id, spec, is_store)


class CorruptedFollowerKVOffloadConnector(KVOffloadConnector):
    """Only ranks that load from the pool of another one get corrupted bytes. Outputs must change."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        worker = self.connector_worker
        if self.pool.own is None:
            worker.transfer = CorruptingTransfer(worker.transfer, self.pool.data)


class UnfencedKVOffloadConnector(KVOffloadConnector):
    """Takes vLLM's model runner for one that fills blocks with zeros before fences can protect them. Copies must fail,
    and outputs stay right."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        vars(versions)["fences_first"] = lambda config: False
        super().__init__(*args, **kwargs)


class ForgetfulKVOffloadConnector(KVOffloadConnector):
    """Knows nothing of sleep: every handshake makes a new scheduler half."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._scheduler = None
        super().set_xfer_handshake_metadata_pp_aware(metadata)


class BlocksFirstKVOffloadConnector(KVOffloadConnector):
    """Asks for the layout in which a block is one piece of memory, as on CUDA. Outputs must not change."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        reason = reason_against_blocks_first(vllm_config)
        assert reason is None, reason
        return BLOCKS_FIRST


class CorruptedSecondNodeKVOffloadConnector(KVOffloadConnector):
    """Corrupts what is loaded on every node but the first. Outputs must change."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        if self.layout.node:
            worker = self.connector_worker
            worker.transfer = CorruptingTransfer(worker.transfer, self.pool.data)


class SwappedKVOffloadConnector(KVOffloadConnector):
    """In the canonical layout, each of two ranks takes the heads of the other. Outputs must change."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        right: Any = vars(rank_half)["rank_pages"]
        vars(rank_half)["rank_pages"] = lambda *args: right(*args[:-1], 1 - args[-1])
        super().register_kv_caches(kv_caches)

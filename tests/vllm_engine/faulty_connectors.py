"""Connectors that misbehave on purpose: slow or failing copies, unverified disk blocks, a forgetful scheduler half.
And one that asks for another KV cache layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvoffload.abc import ByteArray, Transfer, TransferSpec
from kvoffload.tiers.disk import blockio
from kvoffload.vllm import connector, versions
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


class FailingKVOffloadConnector(KVOffloadConnector):
    """Seven tries of ten fail, so about half of all loads and stores do. Outputs must not change."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        worker = self.connector_worker
        worker.transfer = FailingTransfer(worker.transfer, rate=0.7)


class CorruptedStatesKVOffloadConnector(KVOffloadConnector):
    """What is loaded of layers with states is corrupted, their KV beside it is not. Outputs must change."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        worker = self.connector_worker
        groups = [group.state for group in self.layout.parts.groups(self.layout.kv_groups)]
        worker.transfer = CorruptedStates(worker.transfer, self.pool.data, groups)


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


class ExchangedPartsKVOffloadConnector(KVOffloadConnector):
    """The first two parts of a block are loaded in each other's place. Outputs must change."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        worker = self.connector_worker
        worker.transfer = ExchangedParts(worker.transfer, self.layout.parts.group_of)


class ExchangedParts(WrappedTransfer):
    """Exchanges the slots of the first two parts of a group before they are loaded. Blocks must be single device
    blocks."""

    def __init__(self, inner: Transfer, group_of: Sequence[int]) -> None:
        super().__init__(inner)
        self._first = next(i for i, g in enumerate(group_of[1:]) if g == group_of[i])

    def submit(self, job_id: int, spec: TransferSpec, is_store: bool) -> None:
        if not is_store:
            slots = np.split(spec.host.slots, np.cumsum(spec.device.group_sizes)[:-1])
            slots[self._first : self._first + 2] = slots[self._first + 1], slots[self._first]
            spec = replace(spec, host=replace(spec.host, slots=np.concatenate(slots)))
        super().submit(job_id, spec, is_store)


class CorruptedFollowerKVOffloadConnector(KVOffloadConnector):
    """Only ranks that load from the pool of another one get corrupted bytes. Outputs must change."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        worker = self.connector_worker
        if self.pool.own is None:
            worker.transfer = CorruptingTransfer(worker.transfer, self.pool.data)


class ForgetfulOfFollowingKVOffloadConnector(KVOffloadConnector):
    """Names blocks of a drafter without the token after them. Requests with another token find them too, and drafts
    must be accepted less often."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        vars(connector)["following"] = lambda request, position, n: b""
        super().set_xfer_handshake_metadata_pp_aware(metadata)


class UnfencedKVOffloadConnector(KVOffloadConnector):
    """Takes vLLM's model runner for one that fills blocks with zeros before fences can protect them. Copies must fail,
    and outputs stay right."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        vars(versions)["fences_first"] = lambda config: False
        super().__init__(*args, **kwargs)


class UnverifiedKVOffloadConnector(KVOffloadConnector):
    """Accepts blocks from disk without comparing their checksum. With corrupted files outputs must change."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        vars(blockio)["are_damaged"] = lambda header, keys, blocks, checksums: np.zeros(len(keys), bool)
        super().set_xfer_handshake_metadata_pp_aware(metadata)


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

    def _canonical_pages(self, kv_caches: dict[str, Any]) -> Any:
        self._rank = 1 - self._rank
        try:
            return super()._canonical_pages(kv_caches)
        finally:
            self._rank = 1 - self._rank

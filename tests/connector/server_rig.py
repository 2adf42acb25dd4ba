"""A scheduler half with real tiers below it, whose blocks are named by tenant and number."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvoffload import KVGroup, OffloadConfig, build_scheduler
from kvoffload.abc import Hints, OffloadKey, ReqContext, Retained
from kvoffload.cache.keys import make_offload_key, namespace
from kvoffload.cache.tenants import Tenants
from kvoffload.connector.engine import EngineSpec
from kvoffload.tiering.manager import TieredOffloadingManager

SLOT, HOST_BLOCKS, FINGERPRINT, DEADLINE_S = 4096, 64, "ab" * 32, 60.0


class TierServer:
    """Host memory of HOST_BLOCKS in front of ``tiers``."""

    num_requests = 0

    def __init__(self, tiers: Sequence[Mapping[str, Any]], tenants: Mapping[str, Any], **options: Any) -> None:
        config = OffloadConfig.from_mapping(
            {"host_bytes": 1 << 20, "tiers": tiers, "tenants": tenants, "policy": "lru", **options}
        )
        pools = [np.zeros((HOST_BLOCKS, SLOT), dtype=np.uint8)]
        self.half = build_scheduler(config, EngineSpec([KVGroup(16)]), pools, FINGERPRINT)
        assert isinstance(self.half.manager, TieredOffloadingManager)
        self.manager = self.half.manager
        self.names = Tenants(namespace(FINGERPRINT), config.tenants)

    def keys_of(self, tenant: str, names: Iterable[bytes]) -> list[OffloadKey]:
        start = self.names.of(tenant).namespace
        return [make_offload_key(start + name, 0) for name in names]

    def serve(self, keys: list[OffloadKey], hints: Hints | None = None) -> Retained | None:
        """A request computes and stores ``keys``, and ends. Returns the answer to what its hints ask for."""
        self.num_requests += 1
        context, manager = ReqContext(f"r{self.num_requests}", hints=hints), self.manager
        manager.touch(keys, context)
        output = manager.prepare_store(keys, context)
        answer = None if hints is None else manager.retain(keys, context)
        if output is not None:
            manager.complete_store(output.store_spec, context)
        manager.end_chain(keys, () if output is None else output.keys_to_store, context)
        manager.poll()
        return answer

    def settle(self) -> None:
        """Waits until the tiers have written everything."""
        deadline = time.monotonic() + DEADLINE_S
        while self.manager.has_transfers or self.manager.has_pending_writes:
            assert time.monotonic() < deadline, "the tiers do not write"
            self.manager.poll(0.001)

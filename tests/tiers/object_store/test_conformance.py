"""The tier passes the conformance suite on moto, with blocks that share objects."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence

import pytest

from kvoffload.abc import ByteArray, Tier
from kvoffload.testing.tier_conformance import SharedTierConformance
from kvoffload.tiers.object_store.client import ObjectStoreClient
from kvoffload.tiers.object_store.obstore_bucket import open_bucket
from kvoffload.tiers.remote.record import ValueFormat
from tests.tiers.object_store.rig import CREDENTIALS, PATIENT, Moto, needs_moto, patched
from tests.tiers.remote.memory_store import SteppedProcess
from tests.tiers.remote.rig import FINGERPRINT, tier_here

pytestmark = needs_moto


VALUE_BYTES = 4096
"""What the client takes for the size of values, so that several share an object."""


class WaitingProcess(SteppedProcess):
    """Spends no CPU time on waiting."""

    def wait(self, timeout_s: float) -> None:
        if not self.requests:
            time.sleep(timeout_s)
        super().wait(timeout_s)


class TestOnMoto(SharedTierConformance):
    _numbers = itertools.count()

    @pytest.fixture(autouse=True)
    def _bucket(self, moto: Moto) -> Iterator[None]:
        settings = {"url": "s3://kv-bucket", "endpoint": moto.endpoint, "prefix": "kv"}
        with patched(CREDENTIALS):
            self.bucket = open_bucket(settings, PATIENT)
        yield
        self.bucket.close()

    def make_tier(self, pools: Sequence[ByteArray], num_blocks: int) -> Tier:
        self.prefix = f"kv{next(self._numbers)}"
        return self.on(pools)

    def on(self, pools: Sequence[ByteArray]) -> Tier:
        client = ObjectStoreClient(self.bucket, VALUE_BYTES, [0])
        return tier_here(client, pools, ValueFormat(FINGERPRINT, self.prefix), "object_store", WaitingProcess)

    def reopen(self, tier: Tier, pools: Sequence[ByteArray], num_blocks: int) -> Tier:
        return self.on(pools)

    def another(self, tier: Tier, pools: Sequence[ByteArray]) -> Tier:
        return self.on(pools)

    # Each request takes moto milliseconds.
    @pytest.mark.parametrize("seed", range(2))
    def test_any_calls_in_any_order(self, seed: int) -> None:
        super().test_any_calls_in_any_order(seed)

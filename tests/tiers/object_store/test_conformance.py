"""The tier passes the conformance suite on moto, with blocks that share objects and with blocks that do not."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence

import pytest

from kvoffload.abc import ByteArray, Tier
from kvoffload.testing.tier_conformance import SharedTierConformance
from kvoffload.tiers.object_store.client import ObjectStoreClient
from kvoffload.tiers.object_store.obstore_bucket import open_bucket
from kvoffload.tiers.remote.memory import ValueMemory
from kvoffload.tiers.remote.record import ValueFormat
from kvoffload.tiers.remote.tier import RemoteTier
from kvoffload.tiers.remote.worker import StoreWorker
from tests.tiers.object_store.rig import CREDENTIALS, FINGERPRINT, PATIENT, Moto, needs_moto, patched
from tests.tiers.remote.memory_store import SteppedChannel

pytestmark = needs_moto


class WaitingChannel(SteppedChannel):
    """A channel that spends no CPU time on waiting."""

    def wait(self, timeout_s: float) -> None:
        if not self.requests:
            time.sleep(timeout_s)
        super().wait(timeout_s)


class OnMoto(SharedTierConformance):
    values_kind: type[ValueFormat] = ValueFormat
    value_bytes: int
    """What the client takes for the size of values: it decides how many share an object."""
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
        client = ObjectStoreClient(self.bucket, self.value_bytes, [0])
        values = self.values_kind(FINGERPRINT, self.prefix)
        worker = StoreWorker(client, ValueMemory(pools), values)
        tier = RemoteTier(WaitingChannel(worker), sum(pool.shape[1] for pool in pools), name="object_store")
        tier.poll()
        return tier

    def reopen(self, tier: Tier, pools: Sequence[ByteArray], num_blocks: int) -> Tier:
        return self.on(pools)

    def another(self, tier: Tier, pools: Sequence[ByteArray]) -> Tier:
        return self.on(pools)

    # Each request takes moto milliseconds.
    @pytest.mark.parametrize("seed", range(2))
    def test_any_calls_in_any_order(self, seed: int) -> None:
        super().test_any_calls_in_any_order(seed)


class TestSharedObjects(OnMoto):
    value_bytes = 4096


@pytest.mark.soak
class TestSeparateObjects(OnMoto):
    value_bytes = 0

"""Sessions of many tenants that retain, return and drop: every table stays within its bound, and no pin is left."""

from __future__ import annotations

import random

from kvoffload.abc import Hints, KVGroup, OffloadKey, ReqContext
from kvoffload.cache.hints import MAX_DROPPED
from kvoffload.cache.keys import make_offload_key, namespace
from kvoffload.cache.manager import READ_STATE_EVERY_S, PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.slots import HostBackend
from kvoffload.cache.tenants import HOST, MAX_TENANTS, TenantConfig, Tenants
from kvoffload.lab.tier import CatalogTier
from kvoffload.tiering.manager import TieredOffloadingManager, TieringSettings
from kvoffload.tiering.prefetch import MAX_CHAINS
from tests.clock import Clock

NUM_SESSIONS = 5_000
"""More than there may be chains to prefetch."""
NUM_BLOCKS, DISK_BLOCKS, BLOCK_BYTES = 512, 2048, 4096
RETAIN = {HOST: 4 * BLOCK_BYTES, "disk": 16 * BLOCK_BYTES}


class Disk(CatalogTier):
    name = "disk"


def make(clock: Clock) -> tuple[TieredOffloadingManager, Tenants, Disk]:
    configured = [TenantConfig(f"t{i}", retain=RETAIN) for i in range(MAX_TENANTS)]
    tenants = Tenants(namespace("00" * 32), configured)
    shares = tenants.shares(HOST, NUM_BLOCKS, BLOCK_BYTES)
    host = PolicyOffloadingManager(
        HostBackend(16, NUM_BLOCKS), make_policy("lru", NUM_BLOCKS, shares), must_store=True, clock=clock
    )
    disk = Disk(DISK_BLOCKS, BLOCK_BYTES, "lru", clock, shares=tenants.shares("disk", DISK_BLOCKS, BLOCK_BYTES))
    settings = TieringSettings([KVGroup(16)], load_only_if_faster=False, tenants=tenants)
    return TieredOffloadingManager(host, [disk], settings, clock=clock), tenants, disk


def test_tables_are_bounded_with_thousands_of_sessions_of_33_tenants() -> None:
    rng, clock = random.Random(4), Clock()
    manager, tenants, disk = make(clock)
    names = [*(f"t{i}" for i in range(MAX_TENANTS)), "unknown"]
    answers = set()
    for number in range(NUM_SESSIONS):
        tenant = tenants.of(rng.choice(names))
        length = rng.randrange(1, 4)
        keys: list[OffloadKey] = [
            make_offload_key(tenant.namespace + f"{number:016}{i:016}".encode(), 0) for i in range(length)
        ]
        hints = Hints(2 + number, rng.random() < 0.2, rng.choice([None, 0.5, 60.0]), None, rng.choice([None, 1.0, 1e6]))
        context = ReqContext(f"r{number}", hints=hints)
        manager.touch(keys, context)
        output = manager.prepare_store(keys, context)
        if hints.retain_s is not None:
            answer = manager.retain(keys, context)
            answers.add(answer.tier or answer.refusal)
        if output is not None:
            manager.complete_store(output.store_spec, context)
        manager.end_chain(keys, () if output is None else output.keys_to_store, context)
        clock.now += 0.01
        manager.poll()
        if number % 1250 == 1249:
            manager.check_integrity()
            assert len(manager.prefetcher.expected) <= MAX_CHAINS
            assert len(manager.host._hints._dropped) <= MAX_DROPPED
            clock.now += READ_STATE_EVERY_S
            counts = manager.take_counts()
            for name in tenants.names[:-1]:
                for tier, most in RETAIN.items():
                    assert counts[f"tenant_retained_blocks:{name},{tier}"] * BLOCK_BYTES <= most
    assert {"host", "disk", "over_quota", "no_quota"} <= {str(answer) for answer in answers}
    clock.now += 1e7
    for _ in range(3):
        manager.poll()
    manager.take_counts()
    assert not manager.host.retention.blocks
    assert not disk._catalog.retention.blocks
    manager.drop([], only_host=True)
    manager.check_integrity()
    assert manager.host.num_available_blocks == NUM_BLOCKS

"""What a tier has promised to retain and has not got yet: it is written, or counted as lost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import Hints, KVGroup, OffloadKey, ReqContext, Retained, Slots, TierError, TierResult
from kvoffload.abc.tier import HIT
from kvoffload.cache.admission import ReuseFilter
from kvoffload.cache.keys import make_offload_key
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.slots import HostBackend
from kvoffload.cache.tenants import Tenants, load_tenants
from kvoffload.lab.tier import CatalogTier
from kvoffload.tiering.chains import MAX_REST_S
from kvoffload.tiering.manager import TieredOffloadingManager, TieringSettings, TierSettings
from kvoffload.tiering.unwritten import WRITE_WITHIN_S
from kvoffload.tiering.writes import GIVE_UP_S
from tests.clock import Clock

SLOT, HOST_BLOCKS, STEP_S = 4096, 128, 0.05
NAMES = ("a", "b", "other")


class Disk(CatalogTier):
    """A disk that refuses writes, or of which some fail."""

    refuses = False
    num_fails = 0
    """This many writes fail, then they succeed."""
    error = TierError.IO

    def most_blocks(self, key: OffloadKey) -> int:
        return self._catalog.blocks.room.most_blocks(key)

    def write(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        return [] if self.refuses else super().write(keys, slots)

    def _end(self, ended: list[tuple[OffloadKey, int]], is_read: bool) -> list[TierResult]:
        failed = [] if is_read else ended[: self.num_fails]
        self.num_fails -= len(failed)
        if failed:
            slots = np.array([slot for _, slot in failed], dtype=np.int64)
            self._catalog.end_writes(slots, np.zeros(len(failed), dtype=np.bool_))
        now = self._clock()
        errors = [TierResult(key, False, self.error, 0, 0.0, now, now) for key, _ in failed]
        return errors + super()._end(ended[len(failed) :], is_read)


class Rig:
    """A host in front of disks. ``retain``: blocks per disk that each tenant may have retained."""

    def __init__(
        self,
        *retain: Mapping[str, int],
        rates: Sequence[float] = (math.inf, math.inf),
        disk_blocks: int = 800,
        guaranteed: Mapping[str, int] | None = None,
        settings: Sequence[TierSettings] = (),
        groups: Sequence[KVGroup] = (KVGroup(16),),
    ) -> None:
        self.clock, disks = Clock(), [f"disk-{i}" for i in range(len(retain))]
        config: dict[str, Any] = {}
        for name in NAMES:
            blocks = {disk: of[name] for disk, of in zip(disks, retain, strict=True) if name in of}
            config[name] = {"retain": {disk: n * SLOT for disk, n in blocks.items()}}
        for name, n in (guaranteed or {}).items():
            config[name]["guaranteed"] = {"disk-0": n * SLOT}
        self.tenants = Tenants(b"", load_tenants(config))
        host = PolicyOffloadingManager(
            HostBackend(16, HOST_BLOCKS), make_policy("lru", HOST_BLOCKS), must_store=True, clock=self.clock
        )
        self.disks = []
        for name, rate in zip(disks, rates, strict=False):
            shares = self.tenants.shares(name, disk_blocks, SLOT)
            self.disks.append(Disk(disk_blocks, SLOT, "lru", self.clock, rate, shares))
            self.disks[-1].name = name
        self.manager = TieredOffloadingManager(
            host,
            self.disks,
            TieringSettings(groups, load_only_if_faster=False, tiers=settings, tenants=self.tenants),
            clock=self.clock,
            random=lambda: 0.0,
        )
        self.num_requests = 0

    def keys(self, tenant: str, conversation: int, length: int, group: int = 0) -> list[OffloadKey]:
        start = self.tenants.of(tenant).namespace
        return [make_offload_key(start + f"{conversation:016}{i:016}".encode(), group) for i in range(length)]

    def serve(
        self, keys: list[OffloadKey], hints: Hints | None = None, chain: list[OffloadKey] | None = None
    ) -> Retained | None:
        self.num_requests += 1
        context, manager = ReqContext(f"r{self.num_requests}", hints=hints), self.manager
        manager.touch(keys, context, chain)
        output = manager.prepare_store(keys, context)
        answer = None if hints is None else manager.retain(keys, context)
        if output is not None:
            manager.complete_store(output.store_spec, context)
        manager.end_chain(keys, () if output is None else output.keys_to_store, context, chain)
        manager.poll()
        manager.check_integrity()
        return answer

    def flood(self, tenant: str, times: int = 60, every_s: float = STEP_S) -> None:
        for i in range(times):
            self.serve(self.keys(tenant, 1000 + self.num_requests + i, 8))
            self.clock.now += every_s

    def wait(self, seconds: float) -> None:
        for _ in range(math.ceil(seconds / STEP_S)):
            self.clock.now += STEP_S
            self.manager.poll()
        self.manager.check_integrity()

    def on_disk(self, keys: list[OffloadKey], disk: int = 0) -> int:
        return int(np.count_nonzero(self.disks[disk].contains(keys) == HIT))

    def kept(self, disk: int = 0) -> tuple[int, int]:
        """Returns how many blocks of all tenants are charged, and how many were lost."""
        uses = self.disks[disk].tenant_uses()
        return sum(use.num_retained for use in uses), sum(use.num_retained_lost for use in uses)


def retain(session: int | None = None) -> Hints:
    return Hints(session, retain_s=3600.0)


def test_a_burst_of_others_does_not_keep_a_promised_chain_from_being_written() -> None:
    rig = Rig({"a": 50}, rates=[8.0])
    keys = rig.keys("a", 1, 16)
    for i in range(4):
        rig.serve(rig.keys("b", i, 8))
    assert rig.serve(keys, retain(2)) == Retained(None, "disk-0", 16)
    rig.flood("b", every_s=0.1)
    assert rig.on_disk(keys) == 16
    assert rig.kept() == (16, 0)
    assert not rig.manager._unwritten.slots
    rig.wait(WRITE_WITHIN_S)
    rig.flood("a")
    assert rig.on_disk(keys) == 16


def test_what_was_not_written_in_time_is_lost_and_charged_no_more() -> None:
    rig = Rig({"a": 50}, rates=[0.25])
    keys = rig.keys("a", 1, 16)
    rig.serve(keys, retain(2))
    assert rig.kept() == (16, 0)
    rig.wait(WRITE_WITHIN_S - 1)
    assert not rig.kept()[1]
    rig.wait(2)
    written = rig.on_disk(keys)
    assert 0 < written < 16
    assert rig.kept() == (written, 16 - written)
    assert not rig.manager._unwritten.slots
    counts = rig.manager.take_counts()
    assert counts["tenant_lost_retained_blocks:a,disk-0"] == 16 - written


def test_what_the_disk_does_not_take_on_is_lost_soon() -> None:
    """An idle disk that refuses it holds nobody else up for long."""
    rig = Rig({"a": 50})
    rig.disks[0].refuses = True
    rig.serve(rig.keys("a", 1, 16), retain(2))
    rig.wait(GIVE_UP_S + 0.5)
    assert rig.kept() == (0, 16)


def test_blocks_that_never_come_are_lost() -> None:
    rig = Rig({"a": 50})
    keys = rig.keys("a", 1, 4)
    context = ReqContext("r", hints=retain(2))
    assert rig.manager.retain(keys, context).tier == "disk-0"
    rig.wait(WRITE_WITHIN_S + 1)
    assert rig.kept() == (0, 4)
    assert rig.manager.retain(keys, context).tier == "disk-0"
    output = rig.manager.prepare_store(keys[:2], context)
    assert output is not None
    rig.manager.complete_store(output.store_spec, context)
    rig.manager.end_chain(keys, output.keys_to_store, context)
    rig.wait(1)
    assert rig.kept() == (2, 6)


def test_a_reset_loses_what_is_not_written_yet() -> None:
    rig = Rig({"a": 50}, rates=[1.0])
    rig.serve(rig.keys("a", 1, 8), retain(2))
    rig.wait(2.5)
    rig.manager.reset()
    assert rig.kept() == (0, 8)
    assert not rig.manager._unwritten.slots


def test_a_retained_chain_is_written_whole_however_little_else_is_sure() -> None:
    rig = Rig({"a": 20}, disk_blocks=100, guaranteed={"b": 75})
    keys = rig.keys("a", 1, 16)
    assert rig.disks[0].most_blocks(keys[0]) == 5
    assert rig.serve(keys, retain(2)) == Retained(None, "disk-0", 16)
    rig.wait(2)
    assert rig.on_disk(keys) == 16
    rig.serve(other := rig.keys("a", 2, 16))
    rig.wait(2)
    assert rig.on_disk(other) == 5


@pytest.mark.parametrize("order", [1, -1])
def test_a_block_stays_in_host_memory_until_the_disk_that_retains_it_has_it(order: int) -> None:
    """The other disk has written it long before."""
    retaining = [{}, {"a": 50}][::order]
    slow = retaining.index({"a": 50})
    rig = Rig(*retaining, rates=[math.inf, 1.0][::order])
    keys = rig.keys("a", 1, 8)
    assert rig.serve(keys, retain(2)) == Retained(None, f"disk-{slow}", 8)
    rig.wait(1)
    assert rig.on_disk(keys, 1 - slow) == 8
    assert len(rig.manager._unwritten.slots) > 5
    rig.flood("b", times=100)
    rig.wait(10)
    assert rig.on_disk(keys, slow) == 8
    assert rig.kept(slow) == (8, 0)


def test_failed_writes_of_a_retained_chain_are_repeated() -> None:
    rig = Rig({"a": 50}, rates=[20.0])
    rig.disks[0].num_fails = 12
    keys = rig.keys("a", 1, 8)
    rig.serve(keys, retain(2))
    rig.wait(0.5)
    assert len(rig.manager._unwritten.slots) == 8
    rig.wait(5)
    assert not rig.disks[0].num_fails
    assert rig.on_disk(keys) == 8
    assert rig.kept() == (8, 0)
    rig.flood("a", times=200)
    assert rig.on_disk(keys) == 8


@pytest.mark.parametrize("error", [TierError.NO_SPACE, TierError.AWAY])
def test_a_retained_chain_is_written_to_a_full_disk_at_a_growing_pace(error: TierError) -> None:
    rig = Rig({"a": 50})
    disk = rig.disks[0]
    disk.error, disk.num_fails = error, 10**6
    rig.serve(rig.keys("a", 1, 8), retain(2))
    rig.wait(WRITE_WITHIN_S)
    assert 16 <= 10**6 - disk.num_fails < 8 * (WRITE_WITHIN_S / MAX_REST_S + 8)


def test_only_what_the_disk_retains_passes_its_reuse_filter() -> None:
    rig = Rig({"a": 16}, settings=[TierSettings(None, ReuseFilter(3))])
    for tenant, length, written in (("b", 8, 0), ("a", 17, 0), ("a", 16, 16)):
        keys = rig.keys(tenant, length, length)
        answer = rig.serve(keys, retain(2))
        assert answer is not None
        assert (answer.refusal is None) is (written > 0)
        rig.wait(2)
        assert rig.on_disk(keys) == written


def test_what_is_handed_over_waits_within_the_same_bounds() -> None:
    rig = Rig({}, rates=[0.1])
    rig.manager.tiers[0].tier.is_shared = True
    pins = rig.manager._unwritten
    keys = rig.keys("a", 1, pins.most + 1)
    for num_blocks in (pins.most - 1, pins.most, pins.most + 1):
        rig.serve(keys[:num_blocks], retain(2))
        places = {"disk-0": ""} if num_blocks <= pins.most else {}
        assert rig.manager.hand_over(keys[:num_blocks]) == (places, min(num_blocks, pins.most))
        assert list(pins.slots) == keys[: min(num_blocks, pins.most)]
        rig.manager.check_integrity()


def test_however_often_a_waiting_chain_is_renewed_only_one_comes_first() -> None:
    rig = Rig({"a": 50}, rates=[0.1])
    for _ in range(200):
        rig.serve(rig.keys("a", 1, 16), retain(2))
    backlog = rig.manager.tiers[0].writes.backlog
    assert sum(bool(chain.promised) for chain in backlog) == 1
    assert sum(len(chain.keys) for chain in backlog) <= 2 * HOST_BLOCKS + 16


def test_blocks_behind_the_last_state_are_charged_no_more() -> None:
    """No lookup could use them. They are written when a later request brings a state behind them."""
    rig = Rig({"a": 50}, groups=(KVGroup(16), KVGroup(16, state=True)))
    kv, states = (rig.keys("a", 1, 10, group) for group in range(2))
    whole = [key for pair in zip(kv, states, strict=True) for key in pair]
    kept = [*kv[:7], states[6], *kv[7:9]]
    assert rig.serve(kept, retain(2), whole[:18]) == Retained(None, "disk-0", 10)
    rig.wait(2)
    assert rig.on_disk(kept) == 8
    assert rig.kept() == (8, 2)
    assert not rig.manager._unwritten.slots
    rig.wait(WRITE_WITHIN_S + 1)
    rig.serve([*kv, states[9]], None, whole)
    rig.wait(2)
    assert rig.on_disk(kept) == 10
    assert rig.kept() == (8, 2)


def test_a_promised_state_that_never_comes_is_lost() -> None:
    rig = Rig({"a": 50}, groups=(KVGroup(16), KVGroup(16, state=True)))
    kv, states = (rig.keys("a", 1, 8, group) for group in range(2))
    whole = [key for pair in zip(kv, states, strict=True) for key in pair]
    context = ReqContext("r", hints=retain(2))
    assert rig.manager.retain([*kv[:4], states[3], *kv[4:], states[7]], context).tier == "disk-0"
    output = rig.manager.prepare_store([*kv, states[3]], context)
    assert output is not None
    rig.manager.complete_store(output.store_spec, context)
    rig.manager.end_chain([*kv, states[3]], output.keys_to_store, context, whole)
    rig.wait(2)
    assert rig.on_disk([*kv, *states]) == 5
    assert rig.kept() == (5, 5)


def test_a_block_that_two_disks_wait_for_stays_until_both_have_it() -> None:
    """The session is retained in the first one, and then, since it has grown, in the other."""
    rig = Rig({"a": 8}, {"a": 50}, rates=[40.0, 1.0])
    keys = rig.keys("a", 1, 9)
    assert rig.serve(keys[:8], retain(2)) == Retained(None, "disk-0", 8)
    assert rig.serve(keys, retain(2)) == Retained(None, "disk-1", 9)
    rig.wait(0.5)
    assert rig.on_disk(keys, 0) == 9
    assert len(rig.manager._unwritten.slots) == 9
    rig.wait(10)
    assert rig.on_disk(keys, 1) == 9
    assert not rig.manager._unwritten.slots
    assert (rig.kept(0), rig.kept(1)) == ((8, 0), (9, 0))

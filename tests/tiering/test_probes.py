"""How often one key is looked up in the indexes of host and disk, from a request to its load from disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from kvoffload.abc import LookupState, OffloadKey, ScheduledStep
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.slots import HostBackend
from kvoffload.cache.table import BlockTable
from kvoffload.testing.tier_conformance import make_pools
from kvoffload.tiering.manager import TieredOffloadingManager, TieringSettings
from kvoffload.tiers.disk.tier import DiskSettings, DiskTier
from tests.clock import Clock
from tests.connector.rig import TOKENS, FakeRequest, Rig, prompt
from tests.native.twins import PlainBlockTable
from tests.sim.executor import SteppedExecutor
from tests.sim.storage import SimulatedStorage

NUM_BLOCKS = 64
"""Blocks of the request."""
HOST_BLOCKS = 512
HOST, DISK = "host", "disk"


class Probes:
    """Counts, by phase and index, how often each key is looked up. The index of HOST_BLOCKS slots is the host's.
    Tables that are made later are those of the reference, which can be watched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.phase = "before"
        self._counts: dict[tuple[str, str], Counter[OffloadKey]] = {}
        self._is_counting = False
        monkeypatch.setattr("kvoffload.cache.manager.BlockTable", PlainBlockTable)
        for name in ("find_in_transfer", "split", "get"):
            self._watch(name, monkeypatch)

    def _watch(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        method = getattr(PlainBlockTable, name)

        def counted(index: BlockTable, keys: Any) -> Any:
            # Within one lookup of many keys the index may look single keys up itself.
            is_outermost, self._is_counting = not self._is_counting, True
            try:
                if is_outermost:
                    self._add(index, [keys] if name == "get" else keys)
                return method(index, keys)
            finally:
                self._is_counting = not is_outermost

        monkeypatch.setattr(PlainBlockTable, name, counted)

    def _add(self, index: BlockTable, keys: Sequence[OffloadKey]) -> None:
        where = HOST if len(index.key_of) == HOST_BLOCKS else DISK
        self._counts.setdefault((self.phase, where), Counter()).update(keys)

    def most(self, keys: Sequence[OffloadKey], phases: Sequence[str]) -> dict[str, dict[str, int]]:
        """Returns, by phase and index, how often one of ``keys`` was looked up at most."""
        none = Counter[OffloadKey]()
        return {
            phase: {where: max(self._counts.get((phase, where), none)[key] for key in keys) for where in (HOST, DISK)}
            for phase in phases
        }


class DiskRig(Rig):
    """A scheduler half over host memory and a DiskTier on a simulated medium."""

    def __init__(self) -> None:
        clock = Clock()
        pools = make_pools(HOST_BLOCKS, 4096)
        self.executor = SteppedExecutor(clock=clock)
        self.tier = DiskTier(
            SimulatedStorage(64 << 20),
            pools,
            DiskSettings("0f" * 32, 32 << 20, slab_bytes=1 << 20),
            executor=self.executor,
            clock=clock,
        )
        policy = make_policy("lru", HOST_BLOCKS)
        host = PolicyOffloadingManager(HostBackend(TOKENS, HOST_BLOCKS), policy, clock=clock)
        manager = TieredOffloadingManager(
            host, [self.tier], TieringSettings([TOKENS], load_deadline_ms=1000), clock=clock
        )
        super().__init__(HOST_BLOCKS, manager=manager, clock=clock)

    def put_below(self, tokens: list[int]) -> None:
        """The blocks of ``tokens`` are on disk, and not in the host."""
        self.store(tokens)
        for _ in range(100):
            self.executor.drain()
            self.step()
            if not self.half.has_pending_work():
                break
        self.manager.host.reset()
        assert (self.tier.contains(self.keys(tokens)) == LookupState.HIT).all()


def load_from_disk(rig: DiskRig, probes: Probes, request: FakeRequest) -> None:
    probes.phase = "look up"
    assert rig.look_up(request) == (None, False)
    probes.phase = "promote"
    rig.half.build_connector_meta(ScheduledStep({"another": 1}))
    probes.phase = "arrive"
    rig.executor.drain()
    rig.step()
    probes.phase = "ask again"
    assert rig.look_up(request) == (NUM_BLOCKS * TOKENS, True)
    probes.phase = "allocate"
    rig.allocate(request, rig.new_blocks(NUM_BLOCKS + 1), NUM_BLOCKS * TOKENS)
    request.num_computed_tokens = NUM_BLOCKS * TOKENS
    probes.phase = "load"
    loads = rig.step().loads
    assert len(loads) == 1
    probes.phase = "complete"
    rig.report(*loads)


PHASES = ("look up", "promote", "arrive", "ask again", "allocate", "load", "complete")


def test_a_key_is_looked_up_six_times_until_it_is_loaded_from_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    probes = Probes(monkeypatch)
    rig = DiskRig()
    tokens = prompt(NUM_BLOCKS * TOKENS)
    rig.put_below(tokens)
    load_from_disk(rig, probes, FakeRequest("r", [*tokens, 1]))
    none = {HOST: 0, DISK: 0}
    assert probes.most(rig.keys(tokens), PHASES) == {
        "look up": {HOST: 2, DISK: 2},  # one touch, one lookup
        "promote": {HOST: 1, DISK: 1},
        "arrive": none,
        "ask again": none,
        "allocate": none,
        "load": none,
        "complete": none,
    }
    assert rig.half.metrics.snapshot()["load_blocks"] == NUM_BLOCKS
    rig.manager.check_integrity()


def test_the_counter_sees_one_lookup_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    probes = Probes(monkeypatch)
    rig = DiskRig()
    tokens = prompt(NUM_BLOCKS * TOKENS)
    keys = rig.keys(tokens)
    rig.put_below(tokens)
    prepare_load = rig.manager.prepare_load

    def look_up_again(wanted: Sequence[OffloadKey], context: Any = None) -> Any:
        rig.manager.host.block_status(wanted[-1])
        assert (rig.tier.contains(wanted[:20]) == LookupState.HIT).all()
        return prepare_load(wanted, context)

    monkeypatch.setattr(rig.manager, "prepare_load", look_up_again)
    load_from_disk(rig, probes, FakeRequest("r", [*tokens, 1]))
    assert probes.most(keys, ["allocate"]) == {"allocate": {HOST: 1, DISK: 1}}
    assert probes.most(keys[:-1], ["allocate"]) == {"allocate": {HOST: 0, DISK: 1}}
    assert probes.most(keys[20:], ["allocate"]) == {"allocate": {HOST: 1, DISK: 0}}

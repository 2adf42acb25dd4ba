"""Random requests that wait for tiers which lose blocks, refuse, fail and hang: every wait ends, and no pin is left."""

from __future__ import annotations

from random import Random

import pytest

from kvoffload.abc import IntegrityError, LoadStoreSpec, OffloadKey, ReqContext, TierError
from kvoffload.tiering.reads import Wait
from tests.scale import scaled
from tests.sim.memory_tier import StoredBlock, checksum_of
from tests.tiering.rig import A, Rig, below, chain, content

DEADLINE_S = 1.0
NAMES = [f"r{i}" for i in range(6)]
CHAINS = [[*chain("head", 2), *chain(name, 6)] for name in "abcd"]


class Walk:
    """A small host in front of tiers, and what was promised to requests. Chains have a head in common."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.rig = Rig(
            self.rng.choice((8, 12, 32)),
            num_tiers=self.rng.choice((1, 2)),
            load_deadline_ms=1000 * DEADLINE_S,
            load_only_if_faster=False,
        )
        self.manager = self.rig.manager
        self.asking_since: dict[str, float] = {}
        """When each request was first told to ask again, of those whose wait goes on or has passed its deadline."""
        self.leases: list[tuple[LoadStoreSpec, list[OffloadKey]]] = []

    def step(self) -> None:
        actions = (self.ask, self.ask, self.ask, self.poll, self.poll, self.let_time_pass, self.end, self.fill)
        self.rng.choice((*actions, self.disturb, self.complete))()
        self.manager.check_integrity()

    def ask(self) -> None:
        name, keys = self.rng.choice(NAMES), self.rng.choice(CHAINS)
        wait = self.manager._waits.get(name)
        if wait is None or not (wait.is_waiting or wait.host_only_until >= self.manager._waits.num_polls):
            self.asking_since.pop(name, None)
        num_found = self.manager.lookup(keys, ReqContext(name))
        if num_found is None:
            begun = self.asking_since.setdefault(name, self.rig.clock.now)
            assert self.rig.clock.now - begun < DEADLINE_S, "a request waits for longer than its deadline"
            return
        self.asking_since.pop(name, None)
        if num_found and self.rng.random() < 0.5:
            lease = self.manager.prepare_load(keys[:num_found], ReqContext(name))
            self.leases.append((lease, keys[:num_found]))
            self.check_bytes()
            self.manager.release_request(ReqContext(name))

    def check_bytes(self) -> None:
        for lease, keys in self.leases:
            for key, slot in zip(keys, lease.slots.tolist(), strict=True):
                assert (self.rig.pools[0][slot] == content(key)).all(), "a load has the bytes of another block"

    def poll(self) -> None:
        self.manager.poll()
        if self.rng.random() < 0.7:
            self.rig.executor.drain()
            self.manager.poll()

    def let_time_pass(self) -> None:
        self.rig.clock.now += self.rng.choice((0.01, 0.3, DEADLINE_S))

    def complete(self) -> None:
        self.check_bytes()
        for lease, _ in self.leases:
            self.manager.complete_load(lease)
        self.leases.clear()

    def end(self) -> None:
        name = self.rng.choice(NAMES)
        self.manager.release_request(ReqContext(name))
        self.asking_since.pop(name, None)

    def fill(self) -> None:
        """Tiers get blocks that they have lost, and new blocks take the room of others in the host."""
        for tier in self.rig.tiers:
            for key in self.rng.choice(CHAINS):
                raw = [content(key)]
                tier.blocks.setdefault(key, StoredBlock(raw, checksum_of(raw), ready=True))
        for key in chain(f"new{self.rng.random()}", 3):
            output = self.rig.host.prepare_store([key])
            if output is not None:
                slots = output.store_spec.slots
                self.rig.pools[0][slots] = content(key)
                self.rig.host.complete_store(output.store_spec)

    def disturb(self) -> None:
        tier, keys = self.rng.choice(self.rig.tiers), self.rng.choice(CHAINS)
        what = self.rng.randrange(5)
        if what == 0:
            tier.delete(self.rng.sample(keys, 3))
        elif what == 1:
            tier.refuses = not tier.refuses
        elif what == 2:
            tier.fails = self.rng.choice((None, None, None, TierError.IO, TierError.AWAY))
        elif what == 3:
            self.manager.drop(self.rng.sample(keys, 2), only_host=self.rng.random() < 0.5)
        elif self.rng.random() < 0.3:
            self.manager.reset()
            assert self.manager.num_promotions == 0
            assert not any(self.manager.lookup(each, ReqContext(name)) for each in CHAINS for name in NAMES)

    def finish(self) -> None:
        """All requests end, and so do their reads."""
        self.complete()
        for name in NAMES:
            self.manager.release_request(ReqContext(name))
        for _ in range(3):
            self.rig.settle()
        assert self.manager.num_promotions == 0
        assert not any(tier.reads for tier in self.manager.tiers)
        assert self.rig.host.num_available_blocks == self.rig.host.num_blocks


@pytest.mark.parametrize("seed", range(scaled(40)))
def test_every_wait_ends_and_no_pin_is_left(seed: int) -> None:
    walk = Walk(seed)
    walk.fill()
    for _ in range(150):
        walk.step()
    walk.finish()


def drop_deadline(wait: Wait, rig: Rig) -> None:
    rig.manager._waits._begun.clear()


def forget_read(wait: Wait, rig: Rig) -> None:
    rig.manager.tiers[0].reads[chain("x", 4)[0]].waits.clear()


def end_pin(wait: Wait, rig: Rig) -> None:
    rig.executor.drain()
    rig.manager.poll()
    rig.host.complete_load([next(iter(wait.pinned))])


@pytest.mark.parametrize(
    ("bug", "message"),
    [(drop_deadline, "without a deadline"), (forget_read, "nobody reads"), (end_pin, "can be evicted")],
)
def test_the_check_finds_a_wait_that_does_not_end_as_it_should(bug, message: str) -> None:  # type: ignore[no-untyped-def]
    rig, keys = below(4)
    rig.manager.lookup(keys, A)
    with rig.executor.hold():
        rig.manager.poll()
    wait = rig.manager._waits.get(A.req_id)
    assert wait is not None
    bug(wait, rig)
    with pytest.raises(IntegrityError, match=message):
        rig.manager.check_integrity()

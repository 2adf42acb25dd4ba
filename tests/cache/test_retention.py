"""Retention: what was promised stays for its time, within its quota, whatever anybody calls."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvoffload.abc import Hints, IntegrityError, OffloadKey, ReqContext
from kvoffload.cache import retention
from kvoffload.cache.keys import NAMESPACE_BYTES, make_offload_key
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.slots import HostBackend
from kvoffload.cache.tenants import OTHER, Shares
from tests.clock import Clock

NAMES = ("a", "b", OTHER)


def namespace(name: str) -> bytes:
    return name.encode().ljust(NAMESPACE_BYTES, b".")


def chain(name: str, conversation: int, length: int, groups: int = 1) -> list[OffloadKey]:
    """Conversations of one tenant share their first 4 blocks."""
    blocks = [f"{0 if i < 4 else conversation:06}{i:06}".encode() for i in range(length)]
    return [make_offload_key(namespace(name) + block, g) for block in blocks for g in range(groups)]


def make(
    num_blocks: int = 64,
    retain: tuple[int, ...] = (16, 8, 0),
    guaranteed: tuple[int, ...] = (0, 16, 0),
    policy: str = "auto",
    clock: Callable[[], float] | None = None,
) -> PolicyOffloadingManager:
    index_of = {namespace(name): i for i, name in enumerate(NAMES[:-1])}
    shares = Shares(NAMES, index_of, guaranteed, (num_blocks,) * 3, num_blocks, retain)
    return PolicyOffloadingManager(
        HostBackend(16, num_blocks), make_policy(policy, num_blocks, shares), clock=clock or Clock()
    )


def context(retain_s: float | None = None, session: int | None = None, drop: bool = False) -> ReqContext:
    return ReqContext("r", hints=Hints(session, drop, None, None, retain_s))


def store(manager: PolicyOffloadingManager, keys: list[OffloadKey], of: ReqContext | None = None) -> bool:
    manager.touch(keys, of)
    output = manager.prepare_store(keys, of)
    if output is None:
        return False
    manager.complete_store(output.store_spec)
    manager.end_chain(keys, output.keys_to_store, of)
    return True


def flood(manager: PolicyOffloadingManager, times: int = 50, name: str = "a") -> None:
    for i in range(times * manager.num_blocks // 8):
        store(manager, chain(name, 1000 + i, 12)[4:])


def retain(
    manager: PolicyOffloadingManager, keys: list[OffloadKey], seconds: float, session: int | None = None
) -> None:
    of = context(seconds, session)
    store(manager, keys, of)
    assert manager.retain(keys, of).refusal is None


def test_a_chain_that_is_still_being_written_is_retained_when_it_is_ready() -> None:
    manager, keys = make(), chain("a", 1, 10)
    output = manager.prepare_store(keys, context(60.0))
    assert output is not None
    assert manager.retain(keys, context(60.0)).num_blocks == 10
    assert manager.retention.num_absent == 10
    manager.complete_store(output.store_spec)
    flood(manager)
    assert manager.lookup(keys) == 10


def test_drops_and_resets_end_it_and_are_counted_and_a_block_that_returns_is_retained_again() -> None:
    manager, keys = make(), chain("a", 1, 10)
    retain(manager, keys, 60.0)
    manager.drop(keys[5:6])
    assert manager.lookup(keys) == 5
    assert (manager.retention.tenants.num_lost, manager.retention.num_absent) == ([1, 0, 0], 1)
    store(manager, keys)
    flood(manager)
    assert manager.lookup(keys) == 10
    manager.check_integrity()
    manager.reset()
    assert manager.retention.tenants.num_lost == [11, 0, 0]
    assert manager.num_used_blocks == 0
    manager.check_integrity()


def test_chains_of_several_groups_and_states_are_released_whole() -> None:
    clock = Clock()
    manager, keys = make(clock=clock), chain("a", 1, 7, groups=2)
    # Of the second group, which may be one of states, requests keep different blocks.
    retain(manager, [*keys[::2], keys[5]], 60.0, session=2)
    retain(manager, [*keys[::2], keys[9]], 60.0, session=3)
    assert manager.retention.tenants.num_charged[0] == 9
    manager.check_integrity()
    manager.retain(keys, context(0.0, session=2))
    assert manager.retention.tenants.num_charged[0] == 8
    manager.retain(keys, context(0.0, session=3))
    assert manager.retention.tenants.num_charged[0] == 7
    clock.now += 60.0
    flood(manager)
    assert manager.table.num_evictable == manager.table.num_held


def test_many_retentions_that_end_together_take_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MAX_ENDED_AT_ONCE", 4)
    clock = Clock()
    manager = make(clock=clock)
    for session in range(10):
        retain(manager, chain("a", 100 + session, 5)[4:], 60.0, session=2 + session)
    clock.now += 61
    manager.retention.expire()
    assert manager.retention.tenants.num_charged[0] == 6
    # Who needs the room gets it.
    retain(manager, chain("a", 1, 16), 60.0, session=50)
    assert manager.retention.tenants.num_charged[0] == 16
    manager.check_integrity()


def test_what_was_charged_is_counted_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "MAX_ENDED_AT_ONCE", 4)
    clock = Clock()
    manager = make(clock=clock)
    retain(manager, chain("a", 1, 6), 60.0)
    clock.now += 3600
    _, (use, *_) = manager.tenant_uses(), manager.tenant_uses()
    assert (use.num_retained, use.retained_block_s) == (0, 6 * 60)


def test_what_finds_no_room_or_fails_to_be_stored_is_lost_and_not_charged() -> None:
    manager, keys = make(), chain("a", 1, 8)
    output = manager.prepare_store(keys[:6], context(60.0))
    assert output is not None
    assert manager.retain(keys, context(60.0)).refusal is None
    manager.end_chain(keys, output.keys_to_store, context(60.0))
    assert (manager.retention.tenants.num_charged[0], manager.retention.tenants.num_lost[0]) == (6, 2)
    manager.complete_store(output.store_spec, success=False)
    assert (manager.retention.tenants.num_charged[0], manager.retention.tenants.num_lost[0]) == (0, 8)
    manager.check_integrity()
    # A later request can have them retained.
    retain(manager, keys, 60.0)
    assert manager.retention.tenants.num_charged[0] == 8
    flood(manager)
    assert manager.lookup(keys) == 8
    manager.check_integrity()


class Adversary:
    """Calls a manager at random, and keeps books of its own of what must still be there."""

    def __init__(self, seed: int, policy: str) -> None:
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.manager = make(policy=policy, clock=self.clock)
        self.promised: dict[OffloadKey, tuple[float, int | None]] = {}
        """Until when each block must stay, and which session can end that."""
        self.gone: set[OffloadKey] = set()
        """Blocks that were dropped, or never stored, since they were promised."""
        self.num_retained = self.num_refused = 0

    def step(self) -> None:
        rng, manager = self.rng, self.manager
        keys = chain(rng.choice(NAMES), rng.randrange(1, 30), rng.randrange(1, 20))
        match rng.randrange(20):
            case 0:
                manager.drop(dropped := rng.sample(keys, len(keys) // 2))
                self.gone |= set(dropped)
            case 1 if rng.random() < 0.02:
                manager.reset()
                self.promised.clear()
            case 2:
                self.clock.now += rng.choice([0.0, 0.1, 1.0, 7.0, 100.0])
            case 3 | 4 | 5 | 6:
                session = rng.choice([None, *range(2, 12)])
                if session is not None:
                    session += 100 * NAMES.index(keys[0][:1].decode().replace("o", OTHER))
                of = context(rng.choice([0.0, 0.5, 5.0, 50.0]), session, drop=rng.random() < 0.1)
                assert of.hints is not None
                if rng.random() < 0.9:
                    store(manager, keys, of)
                answer = manager.retain(keys, of)
                if of.hints.drop or not of.hints.retain_s:
                    ended = {key for key, (_, own) in self.promised.items() if own == session}
                    for key in ended if session is not None else ():
                        del self.promised[key]
                elif answer.refusal is None:
                    self.num_retained += 1
                    self.promise(session, keys, of.hints.retain_s)
                else:
                    self.num_refused += 1
            case _:
                store(manager, keys, ReqContext("r", hints=rng.choice([None, Hints(3, False, 1e6), Hints(104, True)])))
        self.check()

    def promise(self, session: int | None, keys: list[OffloadKey], seconds: float) -> None:
        new = self.clock() + seconds
        for key in keys:
            until, own = self.promised.get(key, (new, session))
            self.promised[key] = max(until, new), own if own == session else None
        self.gone |= {key for key in keys if self.manager.lookup([key]) == 0}

    def check(self) -> None:
        now, manager = self.clock(), self.manager
        self.promised = {key: entry for key, entry in self.promised.items() if entry[0] > now}
        manager.retention.expire()
        kept, retained = set(self.promised), manager.retention.blocks
        present = {key for key in kept if manager.lookup([key]) == 1}
        # What has left, and was not stored again at the end of a request that asked for it, is not charged any more.
        assert present <= retained.keys() <= kept
        assert {key: (block.until, block.session) for key, block in retained.items()} == {
            key: self.promised[key] for key in retained
        }
        self.promised = {key: self.promised[key] for key in retained}
        charged = manager.retention.tenants.num_charged
        assert charged == [sum(key.startswith(namespace(name)) for key in retained) for name in NAMES]
        assert all(n <= most for n, most in zip(charged, (16, 8, 0), strict=True))
        assert kept - present <= self.gone
        self.gone = kept - present


@pytest.mark.parametrize("policy", ["auto", "lru", "arc"])
def test_an_adversary_neither_exceeds_a_quota_nor_evicts_what_was_promised(policy: str) -> None:
    of = Adversary(1, policy)
    for i in range(4000):
        of.step()
        if i % 100 == 0:
            of.manager.check_integrity()
    assert of.num_retained > 100
    assert of.num_refused > 100


def test_checks_find_a_retained_block_that_has_left() -> None:
    manager, keys = make(), chain("a", 1, 10)
    retain(manager, keys, 60.0)
    slots = manager.table.find(keys[:1])
    manager.complete_load(manager.lease(slots))
    with pytest.raises(IntegrityError, match="before its time"):
        manager.check_integrity()

"""Tenants: what they may take of a tier is kept at every moment, and nothing that one does shows another's blocks."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import (
    CachePolicy,
    ConfigError,
    Hints,
    IntegrityError,
    LoadStoreSpec,
    LookupState,
    Offer,
    OffloadKey,
    ReqContext,
)
from kvoffload.cache.hints import HintedBlocks
from kvoffload.cache.keys import make_offload_key
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.policies.auto import AutoPolicy
from kvoffload.cache.policies.tenants import TenantPolicy, _from_the_top
from kvoffload.cache.slots import HostBackend
from kvoffload.cache.tenants import OTHER, Shares, TenantConfig, Tenants
from kvoffload.testing.conformance import PolicyConformance
from tests.suites.reference import ReferenceLRUManager
from tests.suites.stateful import WALK_SEEDS, manager_machine, walk

NAMES = ("a", "b", OTHER)


def key(tenant: str, number: int) -> OffloadKey:
    return make_offload_key(f"tenant-{tenant[0]}".encode() + number.to_bytes(4, "big"), 0)


def chain(tenant: str, first: int, n: int) -> list[OffloadKey]:
    return [key(tenant, number) for number in range(first, first + n)]


def shares(num_blocks: int, guaranteed: Sequence[int], quota: Sequence[int] | None = None) -> Shares:
    """Of tenants "a", "b" and the others."""
    index_of = {key(name, 0)[:8]: i for i, name in enumerate(NAMES[:-1])}
    return Shares(NAMES, index_of, tuple(guaranteed), tuple(quota or [num_blocks] * 3), num_blocks)


def manager(made: Shares, policy: str = "lru", **options: Any) -> PolicyOffloadingManager:
    chosen = make_policy(policy, made.num_blocks, made)
    return PolicyOffloadingManager(HostBackend(16, made.num_blocks), chosen, enable_events=True, **options)


def tenant_policy(of: PolicyOffloadingManager) -> TenantPolicy:
    assert isinstance(of.policy, TenantPolicy)
    return of.policy


def held(of: PolicyOffloadingManager) -> list[int]:
    return [use.num_blocks for use in of.room.uses()]


def store(to: PolicyOffloadingManager, keys: list[OffloadKey], hints: Hints | None = None) -> bool:
    """Stores a chain as one request. Returns whether there was room."""
    context = ReqContext("r", hints=hints)
    to.touch(keys, context)
    output = to.prepare_store(keys, context)
    if output is not None:
        to.complete_store(output.store_spec)
        to.end_chain(keys, output.keys_to_store, context)
    to.check_integrity()
    return output is not None


def present(of: PolicyOffloadingManager, keys: list[OffloadKey]) -> int:
    return int(np.count_nonzero(of.table.states(keys) == LookupState.HIT))


class TestThreeTenants(PolicyConformance):
    """The blocks of random calls belong to three tenants, all others to one."""

    def make_policy(self, capacity: int) -> CachePolicy:
        names = [make_offload_key(b"block %d" % number, 0)[:8] for number in range(40)]
        made = Shares(
            NAMES, {name: i % 2 for i, name in enumerate(names) if i % 3}, (0,) * 3, (capacity,) * 3, capacity
        )
        return make_policy("lru", capacity, made)


@pytest.mark.parametrize("seed", WALK_SEEDS[::2])
def test_a_tenant_beside_others_that_store_nothing_has_it_all(seed: int) -> None:
    walk(manager_machine(lambda n: manager(shares(n, (0, 0, 0))), ReferenceLRUManager), seed)


# Who loses.


def test_a_refused_store_counts_for_the_tenant_that_is_over_its_quota() -> None:
    of = manager(shares(12, [0, 0, 0], [2, 12, 12]))
    assert of.prepare_store([*chain("a", 0, 3), *chain("b", 0, 1)]) is None
    assert [use.num_refused for use in of.room.uses()] == [1, 0, 0]


def test_hints_say_which_blocks_a_tenant_loses_and_not_which_tenant_does() -> None:
    of = manager(shares(12, [0, 0, 0]))
    for name, first, hints in (("a", 10, Hints(2, drop=True)), ("a", 0, None), ("b", 0, Hints(3, drop=True))):
        assert store(of, chain(name, first, 4), hints)
    assert store(of, chain("b", 10, 2))
    assert [present(of, chain("a", first, 4)) for first in (10, 0)] == [2, 4]
    assert present(of, chain("b", 0, 4)) == 4
    assert [use.num_evicted for use in of.room.uses()] == [2, 0, 0]


def test_how_many_blocks_a_tenant_can_have() -> None:
    of = manager(shares(10, (4, 1, 0), (10, 3, 10)))
    assert [of.most_blocks(key(name, 0)) for name in NAMES] == [9, 3, 5]
    assert [of.room.num_storable(key(name, 0)) for name in NAMES] == [10, 3, 10]
    assert store(of, chain("a", 0, 6))
    assert [of.room.num_storable(key(name, 0)) for name in NAMES] == [10, 3, 6]


# The laws under random calls.


class Checked:
    """A manager with tenants, and after every call: what is guaranteed was kept, no quota was exceeded. Behind a device
    that ``holds_back`` blocks, these count for their tenant and are in no order."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        n = rng.randint(3, 30)
        guaranteed = [rng.randint(0, n // 3) for _ in NAMES]
        quota = [rng.randint(max(1, least), n) for least in guaranteed]
        self.shares = shares(n, guaranteed, quota)
        self.holds_back = seed % 4 >= 2
        self.of = manager(
            self.shares,
            rng.choice(["lru", "auto", "arc"]),
            must_store=rng.random() < 0.5,
            device_blocks=10 * self.holds_back,
        )
        self.writing: list[LoadStoreSpec] = []
        self.pins: list[LoadStoreSpec] = []
        self.num_stored = self.num_refused = self.num_lent = 0
        self.has_hints = seed % 2 == 1

    def hints(self, name: str) -> Hints | None:
        if not self.has_hints:
            return None
        session = 2 + 3 * self.rng.randrange(3) + NAMES.index(name)
        return self.rng.choice([None, Hints(session), Hints(session, drop=True)])

    def run(self, steps: int) -> None:
        for _ in range(steps):
            before, name = held(self.of), self.rng.choice(NAMES)
            actions = [self.store, self.store, self.store, self.written, self.pin, self.unpin]
            step = self.rng.choice([*actions, self.note, self.note, self.drop] if self.holds_back else actions)
            step(name)
            self.of.check_integrity()
            self.num_lent += int(np.count_nonzero(tenant_policy(self.of).tenants[0].lent))
            for each, least, most, was, now in zip(
                NAMES, self.shares.guaranteed, self.shares.quota, before, held(self.of), strict=True
            ):
                assert now <= most, f"{each} is over its quota"
                # A write that fails loses its own blocks.
                kept = each == name or step == self.written or now >= min(least, was)
                assert kept, f"{each} has lost blocks that are guaranteed to it"

    def store(self, name: str) -> None:
        keys = chain(name, self.rng.randrange(20), self.rng.randint(1, 12))
        context = ReqContext("r", hints=self.hints(name))
        self.of.touch(keys, context)
        new = [each for each in keys if self.of.table.find([each])[0] < 0]
        can = self.can_store(name, keys, len(new))
        offer = Offer.LEAVING if self.holds_back and self.rng.random() < 0.3 else Offer.COMPUTED
        output = self.of.allocate(keys) if self.rng.random() < 0.2 else self.of.prepare_store(keys, context, offer)
        if output is None:
            assert self.holds_back or not can, "a store was refused for which there is room"
            self.num_refused += 1
            return
        assert self.holds_back or can or output.refused_keys, "there was no room"
        self.num_stored += len(output.keys_to_store)
        self.writing.append(output.store_spec)
        self.of.end_chain(keys, output.keys_to_store, context)

    def can_store(self, name: str, keys: list[OffloadKey], num_new: int) -> bool:
        """Counts block by block whether there is room, as the documentation says."""
        policy = tenant_policy(self.of)
        t = NAMES.index(name)
        table = self.of.table
        slots = table.slots()
        owner = policy.tenant_of[slots]
        idle = ~table.busy[slots] & ~np.isin(slots, self.of.table.find(keys))
        count = [int(np.count_nonzero(owner == i)) for i in range(3)]
        free_of = [int(np.count_nonzero((owner == i) & idle)) for i in range(3)]
        own = free_of[t]
        room = self.of.backend.get_num_free_blocks() + own
        for i in range(3):
            if i != t:
                room += min(free_of[i], max(0, count[i] - self.shares.guaranteed[i]))
        # It may give its own blocks for its own, whatever is guaranteed to it.
        return num_new <= room and num_new + count[t] - own <= self.shares.quota[t]

    def written(self, name: str) -> None:
        if self.writing:
            lease = self.writing.pop(self.rng.randrange(len(self.writing)))
            self.of.complete_store(lease, success=self.rng.random() < 0.9)

    def note(self, name: str) -> None:
        """The device holds other blocks than before."""
        held, left = ([key(name, self.rng.randrange(20)) for _ in range(3)] for _ in range(2))
        self.of.note_device(held=held, left=[each for each in left if each not in held])

    def drop(self, name: str) -> None:
        self.of.drop(chain(name, self.rng.randrange(20), 2))

    def pin(self, name: str) -> None:
        keys = chain(name, self.rng.randrange(20), 4)
        ready = [each for each in keys if self.of.table.states([each])[0] == LookupState.HIT]
        if ready:
            self.pins.append(self.of.prepare_load(ready))

    def unpin(self, name: str) -> None:
        if self.pins:
            self.of.complete_load(self.pins.pop(self.rng.randrange(len(self.pins))))


def test_shares_are_kept_at_every_moment() -> None:
    num_refused = num_lent = 0
    for seed in range(12):
        checked = Checked(seed)
        checked.run(400)
        assert checked.num_stored > 20
        assert (checked.of.take_counts().get("early_evictions", 0) > 0) == checked.has_hints
        num_refused += checked.num_refused
        num_lent += checked.num_lent
    assert num_refused > 50, "the random calls reach the limits"
    assert num_lent > 100


def test_what_is_left_above_the_guarantees_is_as_equal_as_possible() -> None:
    rng = random.Random(5)
    for _ in range(2000):
        excess = [rng.randint(-3, 12) for _ in range(rng.randint(1, 6))]
        most = [rng.randint(0, 12) for _ in excess]
        n = rng.randint(0, sum(most))
        if not any(most) or not n:
            continue
        taken, expected = _from_the_top(excess, most, n), [0] * len(excess)
        for _ in range(n):
            top = max((t for t in range(len(excess)) if expected[t] < most[t]), key=lambda t: excess[t] - expected[t])
            expected[top] += 1
        left, by_one = ([e - k for e, k in zip(excess, some, strict=True)] for some in (taken, expected))
        assert sum(taken) == n
        assert all(0 <= k <= m for k, m in zip(taken, most, strict=True))
        assert sorted(left) == sorted(by_one)


# The laws broken on purpose.


def test_taking_what_is_guaranteed_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    of = manager(shares(6, (4, 0, 0)))
    assert store(of, chain("a", 0, 4))
    assert store(of, chain("b", 0, 2))
    monkeypatch.setattr(TenantPolicy, "_leaving", lambda self, entering, shortage, idle: [shortage, 0, 0])
    with pytest.raises(IntegrityError, match="tenant a would lose what is guaranteed"):
        of.prepare_store(chain("b", 10, 1))


def test_an_early_eviction_of_another_tenants_block_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    of = manager(shares(4, (2, 0, 0)))
    assert store(of, chain("a", 0, 2))
    assert store(of, chain("b", 0, 2), Hints(2, drop=True))
    slots = of.table.find([key("a", 0)])
    monkeypatch.setattr(HintedBlocks, "take", lambda self, n, busy, tenant: slots)
    with pytest.raises(IntegrityError, match="more blocks of a tenant leave early"):
        of.prepare_store(chain("b", 10, 1))


def test_a_store_over_the_quota_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    of = manager(shares(6, (0, 0, 0), (6, 2, 6)))
    assert store(of, chain("b", 0, 2))
    monkeypatch.setattr(TenantPolicy, "_leaving", lambda self, entering, shortage, idle: [0, 0, 0])
    with pytest.raises(IntegrityError):
        of.prepare_store(chain("b", 10, 1))


@pytest.mark.parametrize("damage", ["tenant", "place", "count", "busy", "key"])
def test_damaged_tables_are_found(damage: str) -> None:
    of = manager(shares(6, (0, 0, 0)))
    assert store(of, chain("a", 0, 2))
    assert store(of, chain("b", 0, 2))
    policy = tenant_policy(of)
    slot = int(of.table.find([key("a", 0)])[0])
    mine = policy.tenants[0]
    if damage == "tenant":
        policy.tenant_of[slot] = 1
    elif damage == "place":
        policy._place_of[slot] = policy._place_of[int(of.table.find([key("a", 1)])[0])]
    elif damage == "count":
        mine.num_held += 1
    elif damage == "busy":
        mine.busy[policy._place_of[slot]] = True
    else:
        mine.key_of[policy._place_of[slot]] = key("b", 5)
    with pytest.raises(IntegrityError):
        of.check_integrity()


# Who is who.


def test_a_tenant_has_a_namespace_of_its_own() -> None:
    tenants = Tenants(b"12345678", [TenantConfig("search"), TenantConfig("chat")])
    found = [tenants.of(name) for name in (None, "search", "chat", "unknown", OTHER)]
    assert [each.label for each in found] == [OTHER, "search", "chat", OTHER, OTHER]
    assert len({each.namespace for each in found}) == 5
    assert all(len(each.namespace) == 8 for each in found)
    assert Tenants(b"another.", [TenantConfig("search")]).of("search").namespace != found[1].namespace
    assert Tenants(b"12345678").of("search") == (found[1].namespace, None), "the same without shares"
    assert Tenants(b"12345678").of(None) == (b"12345678", None)


def test_a_salt_names_a_configured_tenant() -> None:
    salt = "s3cret"
    digest = "1ec1c26b50d5d3c58d9583181af8076655fe00756bf7285940ba3670f99fcba0"
    tenants = Tenants(b"12345678", [TenantConfig("search", salt_sha256=digest), TenantConfig("chat")])
    assert tenants.of(None, salt) == tenants.of("search")
    assert tenants.of(None, "chat") == tenants.of("chat")
    assert tenants.of(None, "search") == tenants.of(None), "its salt is a secret, and its name is not"
    assert tenants.of("chat", salt) == tenants.of("chat"), "the option comes first"
    assert tenants.of(None, "s3cre") == tenants.of(None), "vLLM's hashes depend on any other salt already"
    assert tenants.of(None, "\ud800") == tenants.of(None)
    assert tenants.of(None, 7) == tenants.of(None)


def test_shares_are_counted_in_whole_blocks_of_one_engine() -> None:
    tenants = Tenants(b"", [TenantConfig("a", {"host": 1000}, {"host": 3999}), TenantConfig("b")])
    made = tenants.shares("host", 20, 100, engines=2)
    assert (made.names, made.guaranteed, made.quota) == (("a", "b", OTHER), (5, 0, 0), (19, 20, 20))
    assert tenants.shares("disk", 20, 100).guaranteed == (0, 0, 0)


def test_a_tier_may_have_less_room_for_blocks_than_its_budget() -> None:
    tenants = Tenants(b"", [TenantConfig("a", {"disk": 2000})])
    assert tenants.shares("disk", 10, 100, engines=2).guaranteed == (10, 0)
    wrong = "tenants: 2 KiB of disk are guaranteed, and its budget has room for 1.8 KiB of blocks; lower some"
    with pytest.raises(ConfigError, match=wrong):
        tenants.shares("disk", 9, 100, engines=2)


@pytest.mark.parametrize(
    ("a", "b", "wrong"),
    [
        ((50, 50), (50, 0), "tenants.a.retain.disk=50 (50 bytes): leaves it no block"),
        ((0, 50), (50, 0), "tenants.a.retain.disk=50 (50 bytes): leaves it no block"),
        ((90, 40), (0, 10), "raise its guaranteed.disk above it, or raise the budget of disk"),
        ((50, 50), (49, 0), None),
        ((50, 49), (50, 0), None),
        ((50, 0), (50, 0), None),
    ],
)
def test_what_a_tenant_may_retain_leaves_it_a_block(a: tuple[int, int], b: tuple[int, int], wrong: str | None) -> None:
    """Each has a guarantee and a retention quota, of 100 blocks."""
    tenants = Tenants(
        b"",
        [
            TenantConfig(name, {"disk": guaranteed} if guaranteed else {}, {}, {"disk": retain} if retain else {})
            for name, (guaranteed, retain) in (("a", a), ("b", b))
        ],
    )
    if wrong is None:
        tenants.shares("disk", 100, 1)
    else:
        with pytest.raises(ConfigError, match=re.escape(wrong)):
            tenants.shares("disk", 100, 1)


# A policy that is told how many blocks it holds.


def test_blocks_on_the_device_do_not_raise_what_the_policy_of_their_tenant_may_hold() -> None:
    made = shares(8, (0, 0, 0), (4, 8, 8))
    host = PolicyOffloadingManager(HostBackend(16, 8), make_policy("lru", 8, made), device_blocks=4)
    output = host.prepare_store(chain("a", 0, 4), offer=Offer.LEAVING)
    assert output is not None
    host.complete_store(output.store_spec)
    host.note_device(held=chain("a", 0, 2))
    own, seen = tenant_policy(host).tenants[0].policy, list[tuple[int, int]]()
    own.admit = lambda keys, shortage: seen.append((own.full, shortage))  # type: ignore[method-assign]
    assert host.prepare_store(chain("a", 4, 4), offer=Offer.LEAVING) is not None
    assert seen == [(4, 2)]


def test_each_tenant_is_behind_its_share_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[int] = []
    monkeypatch.setattr(AutoPolicy, "put_behind", lambda policy, device_blocks: shared.append(device_blocks))
    policy = make_policy("auto", 12, shares(12, (0, 0, 0), quota=(12, 6, 6)))
    PolicyOffloadingManager(HostBackend(16, 12), policy, device_blocks=8)
    assert shared == [4, 2, 2]


def test_a_tenant_behind_a_device_has_what_it_knows_of_its_blocks() -> None:
    host = PolicyOffloadingManager(HostBackend(16, 12), make_policy("auto", 12, shares(12, (0, 0, 0))), device_blocks=6)
    for _ in range(2):
        host.touch(chain("a", 0, 3))
        host.end_chain(chain("a", 0, 3), ())
    output = host.prepare_store(chain("a", 0, 3), offer=Offer.LEAVING)
    assert output is not None
    host.complete_store(output.store_spec)
    own = tenant_policy(host).tenants[0].policy
    assert isinstance(own, AutoPolicy)
    assert own._lists.num_again == 3
    host.touch(chain("a", 0, 3))
    host.note_device(held=chain("a", 0, 3))
    assert (own._lists.num_again, held(host)) == (0, [3, 0, 0])
    host.note_device(left=chain("a", 0, 3))
    assert (own._lists.num_again, held(host)) == (3, [3, 0, 0])
    host.check_integrity()

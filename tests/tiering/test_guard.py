"""A tier with a bug costs its own blocks only: host memory serves on, and nothing raises."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import (
    Awaited,
    ByteArray,
    Hints,
    IntegrityError,
    KVGroup,
    LookupState,
    OffloadKey,
    ReqContext,
    Tier,
    TierResult,
    TierStats,
)
from kvoffload.abc.tier import HIT, PENDING
from kvoffload.cache.keys import make_offload_key
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.slots import HostBackend
from kvoffload.tiering.guard import GuardedTier
from kvoffload.tiering.manager import TieredOffloadingManager, TieringSettings
from tests.sim.memory_tier import MemoryTier

BLOCKS = 32
"""In the host: the slots of transfers that are never reported stay taken."""


def chain(name: str, n: int) -> list[OffloadKey]:
    return [make_offload_key(f"{name}{i}".encode().ljust(32, b"."), 0) for i in range(n)]


def all_in(state: Any, keys: Sequence[OffloadKey], ahead: Sequence[OffloadKey]) -> list[Any]:
    return [state] * len(keys)


NUMBERS: Sequence[Any] = (None, "1", b"1", 0.5, float("nan"), float("inf"), -1, 10**400, [1], {}, ...)
"""What is no amount of anything."""
KEYS: Sequence[Any] = (None, 7, float("nan"), ["key"], [None], [[]], [{}], [np.zeros(2)], [...], iter(()))
"""What is no list of keys."""
STATES: Sequence[Any] = (None, 7, -1, "1", [], PENDING, 0.0)
LIES: dict[str, Sequence[Any]] = {
    "num_failed_lookups": (None, "1", 0.5, [1]),
    "most_blocks": ("1", 0.5, [1]),
    "stats": (None, {}, (None,) * 5, [TierStats()]),
    "tenant_uses": (None, 7, {}),
    "contains": (None, HIT, [HIT] * 100, *(partial(all_in, state) for state in STATES)),
    "read": (*KEYS, lambda keys, slots: [*keys, *keys], lambda keys, slots: chain("other", 1)),
    "write": (*KEYS, lambda keys, slots: [*keys, *keys], lambda keys, slots: chain("other", 1)),
    "take_evicted": KEYS,
    "retain": (7, "no", [], True, float("nan"), OSError()),
    "hand_over": (None, 7, b"memory", ["memory"]),
    "poll": (
        *KEYS,
        [("too", "short")],
        [(*chain("other", 1), True, None, 0, 0.0, 0.0, 0.0)],
        [TierResult(chain("other", 1)[0], True)],
    ),
}
"""By member of Tier, wrong answers: the value of an attribute, or what a method returns for any arguments."""
FIELD_LIES: dict[str, Sequence[Any]] = {
    "key": (None, 7, "key", [], float("nan"), chain("other", 1)[0]),
    "is_read": (None, "yes", 7, [], float("nan")),
    "error": (False, 5, "corrupt", [], OSError()),
    **dict.fromkeys(("nbytes", "seconds"), tuple(each for each in NUMBERS if each != 0.5)),
    **dict.fromkeys(("begun", "ended"), tuple(each for each in NUMBERS if each not in (0.5, -1))),
}
"""By field of each result of ``poll``."""
CALLS: dict[str, tuple[Any, ...]] = {
    "stats": (),
    "tenant_uses": (),
    "most_blocks": (chain("a", 1)[0],),
    "contains": (chain("a", 2),),
    "read": (chain("a", 2), np.arange(2)),
    "write": (chain("a", 2), np.arange(2)),
    "take_evicted": (),
    "retain": (chain("a", 2), 7, 1.0),
    "hand_over": (chain("a", 2),),
    "poll": (),
}
"""The arguments with which methods are called."""
AT_START = {"name", "is_shared", "block_bytes"}
"""Attributes, which are read once."""
NO_ANSWER = {"look_for", "touch", "delete", "reset", "wait", "close", "check_integrity"}
SELDOM_ASKED = {"check_integrity", "wait", "close", "hand_over", "look_for"}
"""What ``use`` does not call."""


class Liar:
    """A tier in which ``lies`` take the place of attributes and methods."""

    def __init__(self, tier: MemoryTier, lies: Mapping[str, Any]) -> None:
        self.tier = tier
        self.lies = dict(lies)

    def __getattr__(self, name: str) -> Any:
        return self.lies[name] if name in self.lies else getattr(self.tier, name)


class Rig:
    """A manager of host memory in front of a tier that lies, and of another one that does not."""

    def __init__(self, **lies: Any) -> None:
        pools: list[ByteArray] = [np.zeros((BLOCKS, 4096), dtype=np.uint8)]
        self.tier, self.other = MemoryTier(pools, 4 * BLOCKS), MemoryTier(pools, 4 * BLOCKS)
        self.other.name = "other"
        self.liar: Any = Liar(self.tier, lies)
        host = PolicyOffloadingManager(HostBackend(1, BLOCKS), make_policy("lru", BLOCKS), True, must_store=True)
        tiers: list[Any] = [self.liar, self.other]
        self.manager = TieredOffloadingManager(host, tiers, TieringSettings([KVGroup(1)], load_deadline_ms=1e6))

    def break_(self, method: str, replacement: Any) -> None:
        self.liar.lies[method] = replacement

    def store(self, keys: Sequence[OffloadKey], name: str) -> None:
        context = ReqContext(name)
        self.manager.lookup(keys, context)
        self.manager.poll()
        self.manager.touch(keys, context)
        output = self.manager.prepare_store(keys, context)
        assert output is not None
        self.manager.complete_store(output.store_spec)
        self.manager.end_chain(keys, output.keys_to_store, context)
        self.manager.release_request(context)
        for _ in range(200):
            self.manager.poll(0.001)
            self.tier.executor.wait(0.001)
            self.other.executor.wait(0.001)
            self.manager.poll()
            writing = any(tier.writes.writing for tier in self.manager.tiers[self.is_off :])
            if not writing and not self.manager.has_pending_writes:
                break
        list(self.manager.take_events())
        assert all(math.isfinite(count) for count in self.manager.take_counts().values())

    @property
    def is_off(self) -> bool:
        return self.manager.tiers[0].is_off


@pytest.fixture
def rig() -> Rig:
    return Rig()


def boom(*args: object, **kwargs: object) -> Any:
    raise RuntimeError("boom")


def use(rig: Rig) -> None:
    """Stores more than the host holds, and asks for what the tiers have."""
    for round_ in range(2):
        for name in "abcde":
            rig.store(chain(name, 8), f"{name}{round_}")
    rig.manager.retain(chain("e", 1), ReqContext("r", hints=Hints(7, retain_s=1.0)))
    rig.manager.drop(chain("a", 1))
    rig.manager.reset()
    rig.store(chain("z", 8), "z")


def assert_only_one_is_lost(rig: Rig, log: str) -> None:
    rig.manager.host.check_integrity()
    assert rig.is_off
    assert "failed: a bug in the tier" in log
    assert "TIER IS OFF" in log
    assert rig.manager.host.lookup(chain("z", 8)) == 8
    assert not rig.manager.tiers[1].is_off
    assert (rig.other.contains(chain("z", 8)) == HIT).all()
    rig.manager.shutdown()


def test_a_tier_without_a_bug_stays_on(rig: Rig) -> None:
    use(rig)
    rig.manager.check_integrity()
    assert not rig.is_off
    assert (rig.tier.contains(chain("z", 8)) == HIT).all()


def test_lies_are_known_for_every_answer() -> None:
    members = {name for name in dir(Tier) if not name.startswith("_")} | set(Tier.__annotations__)
    assert members == LIES.keys() | NO_ANSWER | AT_START
    assert FIELD_LIES.keys() == set(TierResult._fields)


@pytest.mark.parametrize("method", sorted((LIES.keys() | NO_ANSWER) - SELDOM_ASKED))
def test_a_method_that_raises_switches_the_tier_off_and_nothing_else(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(**{method: boom})
    use(rig)
    assert f"{'poll' if method == 'num_failed_lookups' else method} of the" in caplog.text
    assert_only_one_is_lost(rig, caplog.text)


def test_a_tier_that_raises_when_it_is_to_give_up_blocks_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(retain=lambda keys, session, seconds: None if seconds else boom())
    assert rig.manager.retain(chain("x", 2), ReqContext("r", hints=Hints(7, retain_s=1.0))).tier == "memory"
    use(rig)
    assert "retain of the" in caplog.text
    assert_only_one_is_lost(rig, caplog.text)


def hand_over(rig: Rig) -> Mapping[str, str]:
    """Hands blocks over, and awaits others that no server writes. Returns where the former are looked for."""
    keys, now = chain("h", 4), time.monotonic()
    rig.store(keys, "h")
    context = ReqContext("w", awaited=Awaited(frozenset(chain("w", 4)), {"memory": "there"}, now, now + 1e6))
    rig.manager.lookup(chain("w", 4), context)
    rig.manager.poll()
    rig.manager.release_request(context)
    places: Mapping[str, str] = rig.manager.hand_over(keys).places
    rig.manager.poll()
    return places


def test_a_shared_tier_without_a_bug_is_asked() -> None:
    """Negative control."""
    looked_for: list[Any] = []
    rig = Rig(is_shared=True, hand_over=lambda keys: "here", look_for=lambda *args: looked_for.append(args))
    assert hand_over(rig) == {"memory": "here"}
    assert [place for _, place, *_ in looked_for] == ["there"]
    assert not rig.is_off
    rig.manager.shutdown()


@pytest.mark.parametrize("method", ["hand_over", "look_for"])
def test_a_shared_tier_that_raises_when_blocks_are_handed_over_is_switched_off(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(is_shared=True, **{method: boom})
    assert hand_over(rig).get("memory", "") == ""
    assert f"{method} of the" in caplog.text
    assert rig.is_off
    use(rig)
    assert_only_one_is_lost(rig, caplog.text)


@pytest.mark.parametrize("method", ["wait", "close"])
def test_a_method_that_raises_when_nothing_is_asked_raises_no_further(rig: Rig, method: str) -> None:
    rig.break_(method, boom)
    use(rig)
    assert rig.manager.host.lookup(chain("z", 8)) == 8
    rig.manager.shutdown()


def answer_of(member: str, lie: Any) -> tuple[GuardedTier, Any]:
    """Returns a guarded tier that was asked for ``member`` and has lied, and what it made of that."""
    tier, keys = MemoryTier([np.zeros((4, 4096), dtype=np.uint8)], 4), chain("w", 2)
    liar: Any = Liar(tier, {})
    guarded = GuardedTier(liar)
    guarded.write(keys, np.arange(2))
    is_method = member in CALLS
    liar.lies[member] = (lambda *args: lie(*args) if callable(lie) else lie) if is_method else lie
    method = member if is_method else "poll"
    return guarded, getattr(guarded, method)(*CALLS[method])


@pytest.mark.parametrize("member", LIES)
def test_an_answer_that_breaks_the_contract_is_a_fault(member: str) -> None:
    for lie in LIES[member]:
        guarded, answer = answer_of(member, lie)
        assert guarded.fault is not None, lie
        assert answer is None or not isinstance(answer, list) or set(map(type, answer)) <= {bytes}, lie
        assert (guarded.contains(chain("w", 2)) == LookupState.MISS).all(), lie


@pytest.mark.parametrize("field", FIELD_LIES)
def test_a_wrong_field_is_a_fault(field: str) -> None:
    for lie in FIELD_LIES[field]:
        results = [TierResult(key, False)._replace(**{field: lie}) for key in chain("w", 2)]
        guarded, answer = answer_of("poll", results)
        assert guarded.fault is not None, lie
        assert answer == [], lie


def test_right_results_count_beside_a_wrong_one(rig: Rig) -> None:
    guarded = GuardedTier(rig.liar)
    keys = chain("a", 2)
    guarded.write(keys, np.arange(2))
    rig.break_("poll", lambda: [TierResult(keys[0], False, nbytes=-1), TierResult(keys[1], False)])
    assert guarded.poll() == [TierResult(keys[1], False)]
    assert guarded.fault is not None


@pytest.mark.parametrize("method", ["read", "write"])
def test_equal_keys_of_another_type_count_as_the_given_keys(rig: Rig, method: str) -> None:
    """Bytearrays are equal to the keys, but have no hash."""
    guarded, keys = GuardedTier(rig.tier), chain("new", 2)
    setattr(rig.tier, method, lambda keys, slots: list(map(bytearray, keys)))
    taken = getattr(guarded, method)(keys, np.arange(2))
    assert taken == keys
    assert set(map(type, taken)) == {bytes}


def test_totals_do_not_shrink_with_a_fault(rig: Rig) -> None:
    """Counters of metrics would."""
    guarded = GuardedTier(rig.liar)
    rig.break_("stats", lambda: TierStats(num_evicted=5))
    assert guarded.stats().num_evicted == 5
    rig.break_("stats", boom)
    assert guarded.stats().num_evicted == 5


def test_a_result_reported_twice_counts_once(rig: Rig) -> None:
    guarded = GuardedTier(rig.liar)
    keys = chain("a", 2)
    assert guarded.write(keys, np.arange(2)) == keys
    results: list[TierResult] = []
    for _ in range(1000):
        rig.tier.wait(0.001)
        results += rig.tier.poll()
    assert len(results) == 2
    rig.break_("poll", lambda: [*results, results[0]])
    assert guarded.poll() == results
    assert guarded.fault is not None


def test_a_read_that_raises_keeps_its_host_slots(rig: Rig) -> None:
    """Threads of the tier may have begun to fill them. Nothing else is asked any more."""
    guarded, keys = GuardedTier(rig.liar), chain("a", 2)
    rig.break_("read", boom)
    rig.break_("contains", lambda keys, ahead: [HIT] * len(keys))
    assert guarded.read(keys, np.arange(2)) == keys
    assert guarded.contains(keys).tolist() == [LookupState.MISS] * 2
    assert guarded.read(chain("b", 2), np.arange(2)) == []
    results = [TierResult(key, True) for key in keys]
    rig.break_("poll", lambda: results)
    assert guarded.poll() == results


def test_a_check_of_our_own_is_raised_on(rig: Rig) -> None:
    def wrong(keys: Sequence[OffloadKey], ahead: Sequence[OffloadKey]) -> Any:
        raise IntegrityError("accounts do not balance")

    rig.break_("contains", wrong)
    with pytest.raises(IntegrityError):
        GuardedTier(rig.liar).contains(chain("a", 1))

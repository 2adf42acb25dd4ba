"""A tier with a bug costs its own blocks only: host memory serves on, and nothing raises."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import ByteArray, IntegrityError, KVGroup, LookupState, OffloadKey, ReqContext, TierResult
from kvoffload.cache.keys import make_offload_key
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.slots import HostBackend
from kvoffload.tiering.health import GuardedTier
from kvoffload.tiering.manager import TieredOffloadingManager, TieringSettings
from tests.sim.memory_tier import MemoryTier

BLOCKS = 16


def chain(name: str, n: int) -> list[OffloadKey]:
    return [make_offload_key(f"{name}{i}".encode().ljust(32, b"."), 0) for i in range(n)]


class Rig:
    """A manager of host memory in front of a tier of which some methods are replaced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        pools: list[ByteArray] = [np.zeros((BLOCKS, 4096), dtype=np.uint8)]
        self.tier = MemoryTier(pools, 4 * BLOCKS)
        host = PolicyOffloadingManager(HostBackend(1, BLOCKS), make_policy("lru", BLOCKS), must_store=True)
        self.manager = TieredOffloadingManager(
            host, [self.tier], TieringSettings([1], groups=[KVGroup(1)], load_deadline_ms=1e6)
        )

    def break_(self, method: str, replacement: Any) -> None:
        self.monkeypatch.setattr(self.tier, method, replacement)

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
            self.manager.poll()
            if not self.manager.has_transfers and not self.manager.has_pending_writes:
                break

    @property
    def is_off(self) -> bool:
        return bool(self.manager.take_counts()["tier_off:memory"])


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def boom(*args: object, **kwargs: object) -> Any:
    raise RuntimeError("boom")


def use(rig: Rig) -> None:
    """Stores more than the host holds, and asks for what the tier has."""
    for round_ in range(3):
        for name in "abc":
            rig.store(chain(name, 8), f"{name}{round_}")
    rig.manager.drop(chain("a", 1))
    rig.manager.reset()
    rig.store(chain("z", 8), "z")


def test_a_tier_without_a_bug_stays_on(rig: Rig) -> None:
    use(rig)
    assert not rig.is_off
    assert (rig.tier.contains(chain("z", 8)) == LookupState.HIT).all()


@pytest.mark.parametrize("method", ["contains", "read", "write", "touch", "delete", "reset", "poll", "wait"])
def test_a_method_that_raises_switches_the_tier_off_and_nothing_else(
    rig: Rig, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig.break_(method, boom)
    with caplog.at_level(logging.ERROR):
        use(rig)
    rig.manager.check_integrity()
    assert rig.manager.host.lookup(chain("z", 8)) == 8
    if method != "wait":
        assert rig.is_off
        assert f"{method} of the {rig.tier.name} tier raised an error" in caplog.text
    rig.manager.shutdown()


@pytest.mark.parametrize(
    ("method", "replacement"),
    [
        ("contains", lambda keys, ahead: np.zeros(len(keys) + 1, dtype=np.uint8)),
        ("contains", lambda keys, ahead: np.full(len(keys), 7, dtype=np.uint8)),
        ("contains", lambda keys, ahead: np.full(len(keys), LookupState.PENDING, dtype=np.uint8)),
        ("contains", lambda keys, ahead: [None] * len(keys)),
        ("contains", lambda keys, ahead: np.full(len(keys), np.nan)),
        ("write", lambda keys, slots: None),
        ("write", lambda keys, slots: [[0]]),
        ("write", lambda keys, slots: [*keys, *keys]),
        ("write", lambda keys, slots: chain("other", 1)),
        ("poll", lambda: [TierResult(chain("other", 1)[0], True)]),
        ("poll", lambda: None),
        ("poll", lambda: [None]),
        ("poll", lambda: [("too", "short")]),
        ("stats", lambda: None),
    ],
)
def test_an_answer_that_breaks_the_contract_switches_the_tier_off(rig: Rig, method: str, replacement: Any) -> None:
    rig.break_(method, replacement)
    use(rig)
    rig.manager.check_integrity()
    assert rig.is_off
    assert rig.manager.host.lookup(chain("z", 8)) == 8


def test_a_result_reported_twice_counts_once(rig: Rig) -> None:
    guarded = GuardedTier(rig.tier)
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
    """Threads of the tier may have begun to fill them."""
    guarded = GuardedTier(rig.tier)
    rig.break_("read", boom)
    assert guarded.read(chain("a", 2), np.arange(2)) == chain("a", 2)
    assert guarded.contains(chain("a", 2)).tolist() == [LookupState.MISS] * 2
    assert guarded.read(chain("b", 2), np.arange(2)) == []


def test_a_check_of_our_own_is_raised_on(rig: Rig) -> None:
    def wrong(keys: Sequence[OffloadKey], ahead: Sequence[OffloadKey]) -> Any:
        raise IntegrityError("accounts do not balance")

    rig.break_("contains", wrong)
    with pytest.raises(IntegrityError):
        GuardedTier(rig.tier).contains(chain("a", 1))

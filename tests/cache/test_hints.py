"""Blocks that leave early because of hints: which, in what order, and that no hint touches the blocks of others."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from kvoffload.abc import Hints, IntegrityError, OffloadKey, ReqContext
from kvoffload.cache import hints as hints_module
from kvoffload.cache.hints import HintedBlocks
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.slots import HostBackend
from kvoffload.testing.conformance import keys, letters
from tests.scale import scaled

A, B, C = 2, 3, 4
DROP_A, DROP_B = Hints(A, drop=True), Hints(B, drop=True)


class Cache:
    """A manager with a clock, and the requests that use it."""

    def __init__(self, num_blocks: int, policy: str = "lru") -> None:
        self.manager = PolicyOffloadingManager(HostBackend(1, num_blocks), make_policy(policy, num_blocks))
        self.num_requests = 0

    def context(self, hints: Hints | None) -> ReqContext:
        self.num_requests += 1
        return ReqContext(f"r{self.num_requests}", hints=hints)

    def request(self, names: str, hints: Hints | None = None) -> str:
        """Runs a request whose chain is ``names``. Returns what it evicted."""
        return letters(self.run(keys(names), hints))

    def run(self, chain: Sequence[OffloadKey], hints: Hints | None) -> list[OffloadKey]:
        context = self.context(hints)
        self.manager.touch(chain, context)
        output = self.manager.prepare_store(chain, context)
        stored: list[OffloadKey] = []
        if output is not None:
            stored = output.keys_to_store
            self.manager.complete_store(output.store_spec, context)
        self.manager.end_chain(chain, stored, context)
        self.manager.check_integrity()
        return [] if output is None else output.evicted_keys

    @property
    def num_early(self) -> int:
        """Blocks that have left early since this was last read."""
        return int(self.manager.take_counts().get("early_evictions", 0))

    @property
    def hints(self) -> HintedBlocks:
        return self.manager._hints


def test_the_blocks_of_a_session_that_has_ended_leave_first_tail_first() -> None:
    cache = Cache(6)
    cache.request("abc")
    cache.request("def", DROP_A)
    assert cache.request("xy") == "fe"
    assert cache.request("uvw") == "dcb", "then the policy is asked"
    assert cache.num_early == 3


def test_without_a_session_a_request_drops_what_it_has_stored() -> None:
    cache = Cache(6)
    cache.request("xy")
    cache.request("ab", Hints(drop=True))
    cache.request("cd", Hints(drop=True))
    assert cache.request("uv") == "ba"
    cache = Cache(6)
    cache.request("xy")
    cache.request("ab")
    cache.request("abc", Hints(drop=True))
    assert cache.request("uv") == "c"


def test_the_policy_learns_from_the_return_of_a_block_that_left_early() -> None:
    """It stays longer than one that is new."""
    for returning, left in (("f", "yx12"), ("q", "yxq1")):
        cache = Cache(6, "arc")
        cache.request("abc")
        cache.request("abc")
        cache.request("def", DROP_A)
        assert cache.request("xy") == "fe"
        assert cache.request(returning) == "d"
        assert "".join(map(cache.request, "1234")) == left


# Bounds.


def test_the_number_of_sessions_that_have_ended_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints_module, "MAX_DROPPED", 2)
    cache = Cache(8)
    for name, session in zip("abc", (A, B, C), strict=True):
        cache.request(name, Hints(session, drop=True))
    cache.request("vwxyz")
    assert cache.request("u") == "b", "what was known of the oldest is forgotten"
    cache.request("q", Hints(9, drop=True))
    monkeypatch.setattr(hints_module, "MAX_DROPPED", 0)
    with pytest.raises(IntegrityError, match="than hints may concern"):
        cache.manager.check_integrity()


def test_one_eviction_looks_at_few_blocks_and_the_next_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but one of the dropped blocks are shared by then."""
    monkeypatch.setattr(hints_module, "MIN_SCAN", 4)
    monkeypatch.setattr(hints_module, "MAX_SCAN", 8)
    cache = Cache(26)
    chain = "abcdefghijklmnopqrst"
    cache.request("uvwxyz")
    cache.request(chain, DROP_A)
    cache.manager.touch([*keys("a"), *keys(chain[2:])])
    evicted = "".join(cache.request(name) for name in "123456")
    assert evicted == "zyxwbv"
    assert cache.num_early == 1


def test_a_block_that_must_stay_is_never_evicted_whatever_hints_say(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(4)
    cache.request("ab", DROP_A)
    cache.request("cd")
    cache.manager.prepare_load(keys("ab"))
    monkeypatch.setattr(HintedBlocks, "take", lambda self, n, busy, tenant: np.array([0], dtype=np.int64))
    with pytest.raises(IntegrityError, match="may not evict"):
        cache.request("x")


# Random calls.


class Model:
    """Who owns which block, and which sessions have ended, in dicts."""

    def __init__(self) -> None:
        self.owner: dict[OffloadKey, int] = {}
        """Of each block that belongs to a session."""
        self.ended: dict[int, set[OffloadKey]] = {}
        """By session that waits, its blocks."""

    def use(self, chain: Sequence[OffloadKey], session: int) -> None:
        self.ended.pop(session, None)
        for key in chain:
            if self.owner.get(key) != session:
                self.owner.pop(key, None)

    def end(self, chain: Sequence[OffloadKey], stored: Sequence[OffloadKey], hints: Hints) -> None:
        assert hints.session is not None
        self.owner |= dict.fromkeys(stored, hints.session)
        if hints.drop:
            self.ended[hints.session] = {key for key in chain if self.owner.get(key) == hints.session}

    def leave(self, gone: Sequence[OffloadKey]) -> None:
        for key in gone:
            self.owner.pop(key, None)

    def dropped(self) -> set[OffloadKey]:
        return {key for session, held in self.ended.items() for key in held if self.owner.get(key) == session}


@pytest.mark.parametrize("policy", ["lru", "arc", "auto"])
@pytest.mark.parametrize("seed", range(scaled(3)))
def test_random_requests_evict_what_was_dropped_and_only_that(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    cache, model = Cache(rng.randint(6, 9), policy), Model()
    tails = [rng.choices(keys("abcdefghijklpqrstu"), k=rng.randint(1, 5)) for _ in range(12)]
    num_early = 0
    for _ in range(200):
        session = rng.randint(A, A + 5)
        chain = list(dict.fromkeys([*keys("mno")[: rng.randint(0, 3)], *tails[rng.randrange(12)]]))
        hints = Hints(session, drop=rng.random() < 0.4)
        before = {key for key in chain if cache.manager.block_status(key)}
        model.use([key for key in chain if key in before], session)
        dropped = model.dropped()
        gone = cache.run(chain, hints)
        early, rest = gone[: (n := cache.num_early)], gone[n:]
        num_early += n
        assert set(early) <= dropped
        if rest:
            assert not [key for key in dropped - set(early) - set(chain) if cache.manager.block_status(key)]
        model.leave(gone)
        now = [key for key in chain if cache.manager.block_status(key)]
        model.end(now, [key for key in now if key not in before], hints)
        if rng.random() < 0.02:
            cache.manager.reset()
            model.leave(list(model.owner))
    assert num_early > 20

"""Prefetch: what is expected to be used is in the host before that, at the cost of no request that waits."""

from __future__ import annotations

import pytest

from kvoffload.abc import Hints, OffloadKey, ReqContext
from kvoffload.tiering import prefetch
from kvoffload.tiering.lookup import find_hit
from kvoffload.tiering.prefetch import BATCH_S, HELD_SHARE, LEAD_S, MAX_CHAINS, SWEEP_EVERY_S
from tests.tiering.rig import Rig, chain

RETURNS_IN_S = 100.0


def hints(session: int | None = 7, **others: float | bool) -> Hints:
    return Hints(session, **{"expect_return_s": RETURNS_IN_S, **others})  # type: ignore[arg-type]


def end(rig: Rig, keys: list[OffloadKey], given: Hints | None, name: str = "r") -> None:
    rig.manager.end_chain(keys, [], ReqContext(name, hints=given))


def wait(rig: Rig, seconds: float) -> None:
    rig.clock.now += seconds
    rig.settle(8)


def num_in_host(rig: Rig, keys: list[OffloadKey]) -> int:
    return rig.host.lookup(keys) or 0


def is_watching(rig: Rig) -> bool:
    return bool(rig.manager.prefetcher.expected or rig.manager.prefetcher.held)


@pytest.fixture
def rig() -> Rig:
    rig = Rig(host_blocks=32, tier_blocks=128)
    rig.store_below(chain("a", 6))
    return rig


def test_a_chain_is_in_the_host_before_its_use_and_not_long_before(rig: Rig) -> None:
    keys = chain("a", 6)
    end(rig, keys, hints())
    wait(rig, RETURNS_IN_S - LEAD_S - 0.1)
    assert num_in_host(rig, keys) == 0
    wait(rig, 0.2)
    assert num_in_host(rig, keys) == 6
    rig.fill_host()
    assert num_in_host(rig, keys) == 6, "pinned until its use"
    rig.manager.touch(keys, ReqContext("next", hints=Hints(7)))
    counts = rig.counts()
    assert (counts["prefetched_blocks"], counts["prefetched_used_blocks"]) == (6, 6)
    assert not is_watching(rig)
    rig.fill_host("others")
    assert num_in_host(rig, keys) == 0, "and not longer"


def make_steps(rig: Rig, seconds: float) -> None:
    """Makes four steps per second. What a step begins to read has arrived at the next one."""
    for _ in range(int(4 * seconds)):
        rig.clock.now += 0.25
        rig.settle()


def measure_reads(rig: Rig, keys: list[OffloadKey]) -> None:
    """Has a chain prefetched and used, so that it is known how long that takes, and leaves the host without it."""
    end(rig, keys, hints(1))
    make_steps(rig, RETURNS_IN_S + LEAD_S - 1)
    assert num_in_host(rig, keys) == len(keys)
    rig.manager.touch(keys, ReqContext("measured", hints=Hints(1)))
    rig.fill_host()
    assert num_in_host(rig, keys) == 0


def test_a_chain_of_which_more_is_missing_is_begun_earlier(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "BATCH_BYTES", 1)
    rig.tier.seconds_per_block = 0.25
    rig.store_below(chain("b", 12))
    measure_reads(rig, chain("a", 5))
    end(rig, chain("a", 6), hints(1))
    end(rig, chain("b", 12), hints(2))
    make_steps(rig, RETURNS_IN_S - LEAD_S - 4)
    assert num_in_host(rig, chain("a", 6)) == 0 < num_in_host(rig, chain("b", 12))


def test_what_leaves_the_device_after_a_look_at_its_chain_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "BATCH_BYTES", 1)
    rig = Rig(host_blocks=32, tier_blocks=128, device_blocks=16)
    rig.tier.seconds_per_block = 0.25
    for name in "ab":
        rig.store_below(chain(name, 5))
    measure_reads(rig, chain("a", 5))
    end(rig, chain("b", 5), hints())
    rig.manager.note_device(held=chain("b", 5))
    make_steps(rig, RETURNS_IN_S - LEAD_S - 1)
    assert num_in_host(rig, chain("b", 5)) == 0
    rig.manager.note_device(left=chain("b", 5))
    make_steps(rig, LEAD_S + 2)
    assert num_in_host(rig, chain("b", 5)) > 0


def test_a_slow_tier_reads_few_blocks_at_a_time(rig: Rig) -> None:
    """A request that comes meanwhile waits for no more than BATCH_S, or one block."""
    keys = chain("a", 6)
    rig.tier.seconds_per_block = 2.5 * BATCH_S
    measure_reads(rig, keys)
    end(rig, keys, hints())
    rig.clock.now += RETURNS_IN_S - 1
    num_read = []
    for _ in range(6):
        before = len(rig.tier.reads)
        rig.clock.now += 0.1
        rig.settle()
        num_read.append(len(rig.tier.reads) - before)
    assert sum(num_read) == 6
    assert max(num_read) == 2


def test_without_its_use_the_blocks_are_let_go(rig: Rig) -> None:
    keys = chain("a", 6)
    end(rig, keys, hints())
    wait(rig, RETURNS_IN_S - 1)
    assert num_in_host(rig, keys) == 6
    wait(rig, 2 * LEAD_S)
    rig.fill_host()
    assert num_in_host(rig, keys) == 0
    assert not is_watching(rig)


@pytest.mark.parametrize(
    "given",
    [None, Hints(7), hints(drop=True), hints(p_return=0.4)],
    ids=["no hints", "no time", "the last request", "not likely"],
)
def test_what_is_not_expected_is_not_read(rig: Rig, given: Hints | None) -> None:
    end(rig, chain("a", 6), given)
    assert not is_watching(rig)


def test_the_next_request_of_the_session_ends_the_wait(rig: Rig) -> None:
    end(rig, chain("a", 6), hints())
    rig.manager.touch(chain("b", 2), ReqContext("next", hints=Hints(7)))
    wait(rig, RETURNS_IN_S)
    assert rig.counts().get("prefetched_blocks", 0) == 0


def test_a_request_that_comes_while_its_chain_is_read_gets_it_and_nothing_stays_pinned(rig: Rig) -> None:
    keys = chain("a", 6)
    end(rig, keys, hints())
    rig.clock.now += RETURNS_IN_S - 1
    rig.manager.poll()
    assert rig.manager.prefetcher.reading
    context = ReqContext("next", hints=Hints(7))
    rig.manager.touch(keys, context)
    assert rig.manager.lookup(keys, context) is None, "it waits for the reads under way"
    wait(rig, 0.0)
    assert rig.manager.lookup(keys, context) == 6
    rig.manager.release_request(context)
    wait(rig, 0.0)
    assert rig.manager.num_promotions == 0
    assert rig.host.table.num_evictable == rig.host.table.num_held


def test_nothing_is_read_while_a_request_waits_for_a_tier(rig: Rig) -> None:
    rig.store_below(chain("b", 3))
    end(rig, chain("a", 6), hints())
    waiting = ReqContext("waits")
    rig.clock.now += RETURNS_IN_S - 1
    rig.manager.lookup(chain("b", 3), waiting)
    rig.manager.poll()
    rig.manager.poll()
    assert not rig.manager.prefetcher.reading
    rig.manager.release_request(waiting)
    wait(rig, 0.0)
    assert num_in_host(rig, chain("a", 6)) == 6


def test_the_room_is_bounded_and_given_back_by_uses() -> None:
    rig = Rig(host_blocks=32, tier_blocks=256)
    names = [f"n{i}" for i in range(4)]
    for name in names:
        rig.store_below(chain(name, 6))
    for i, name in enumerate(names):
        end(rig, chain(name, 6), hints(10 + i, expect_return_s=RETURNS_IN_S + i / 10))
    wait(rig, RETURNS_IN_S - 1)
    held = [num_in_host(rig, chain(name, 6)) for name in names]
    assert held == [6, 6, 4, 0]
    assert sum(held) == 32 * HELD_SHARE
    rig.manager.touch(chain("n0", 6), ReqContext("next", hints=Hints(10)))
    wait(rig, SWEEP_EVERY_S)
    assert num_in_host(rig, chain("n2", 6)) == 6
    rig.manager.check_integrity()


def test_what_is_held_gives_way_to_what_is_pinned_meanwhile() -> None:
    """A request that waits for a tier gets its blocks, although others pin what is not held."""
    rig = Rig(host_blocks=32, tier_blocks=256)
    rig.store_below(chain("a", 16))
    rig.store_below(chain("w", 14))
    end(rig, chain("a", 16), hints())
    wait(rig, RETURNS_IN_S - 1)
    assert num_in_host(rig, chain("a", 16)) == 16
    rig.fill_host()
    loading = rig.manager.prepare_load([key for key in chain("filler", 32) if key in rig.host.table][:8])
    waiting = ReqContext("waits")
    assert rig.manager.lookup(chain("w", 14), waiting) is None
    wait(rig, 0.0)
    assert rig.manager.lookup(chain("w", 14), waiting) == 14
    assert 0 < num_in_host(rig, chain("a", 16)) < 16, "of the chain that is held, the tail left"
    rig.manager.release_request(waiting)
    rig.manager.complete_load(loading)


@pytest.mark.parametrize(("most", "num_held"), [(1, 0), (8, 4)])
def test_a_tenant_has_its_share_and_holds_nobody_up(most: int, num_held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(host_blocks=32, tier_blocks=256)
    small, other = chain("tenant-s", 6), chain("tenant-o", 6)
    monkeypatch.setattr(rig.host, "most_blocks", lambda key: most if key[:8] == b"tenant-s" else 32)
    for keys in (small, other):
        for i in range(0, 6, 3):
            rig.store_below(keys[: i + 3])
    end(rig, small, hints(10))
    end(rig, other, hints(11, expect_return_s=RETURNS_IN_S + 0.1))
    wait(rig, RETURNS_IN_S - 1)
    assert (num_in_host(rig, small), num_in_host(rig, other)) == (num_held, 6)


def test_of_a_long_chain_each_batch_looks_at_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "PIECE", 3)
    monkeypatch.setattr(prefetch, "BATCH_BYTES", 1)
    rig, keys = Rig(host_blocks=64, tier_blocks=256), chain("a", 12)
    rig.store_below(keys)
    looks = []

    def counting(search: object, of: list[OffloadKey], *others: object) -> object:
        looks.append(len(of))
        return find_hit(search, of, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(prefetch, "find_hit", counting)
    end(rig, keys, hints())
    wait(rig, RETURNS_IN_S - 1)
    for _ in range(4):
        wait(rig, 0.1)
    assert num_in_host(rig, keys) == 12
    assert looks[0] == 12
    assert set(looks[1:]) <= {1, 2, 3}


def test_the_number_of_chains_is_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(rig.manager.prefetcher.chains.max_keys + 10):
        end(rig, chain(f"c{i}", 1), hints(10 + i))
    assert len(rig.manager.prefetcher.expected) <= MAX_CHAINS
    rig.manager.check_integrity()
    rig.manager.reset()
    assert not is_watching(rig)


def test_a_plan_without_a_bound_is_found(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: blocks are held that were never let go."""
    monkeypatch.setattr(prefetch.PrefetchedBlocks, "_num_excess", -100)
    monkeypatch.setattr(prefetch.PrefetchedBlocks, "room", lambda self, key: 100)
    rig.store_below(chain("b", 20))
    end(rig, chain("b", 20), hints())
    with pytest.raises(Exception, match="held for expected uses"):
        wait(rig, RETURNS_IN_S - 1)

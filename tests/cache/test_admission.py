"""The reuse filter: what it counts, what it lets in, and that all else is the backing manager's."""

from __future__ import annotations

import pytest

from kvoffload.abc import ConfigError, LookupState, MissReason, Offer, OffloadingManager, ReqContext
from kvoffload.cache import admission
from kvoffload.cache.admission import FilterReusedOffloadingManager, ReuseFilter, tracker_size
from kvoffload.cache.manager import LRUOffloadingManager
from kvoffload.cache.policies.engine_arc import ARCOffloadingManager
from kvoffload.cache.slots import HostBackend
from kvoffload.testing.conformance import keys, letters
from tests.cache.reference_filter import FilteredARCManager, FilteredLRUManager
from tests.suites.reference import ReferenceLRUManager
from tests.suites.stateful import WALK_SEEDS, manager_machine, walk

R1, R2, R3 = (ReqContext(name) for name in ("r1", "r2", "r3"))


def make_filter(num_blocks: int = 8, store_threshold: int = 2, max_tracker_size: int = 64_000) -> OffloadingManager:
    backing = LRUOffloadingManager(HostBackend(16, num_blocks), enable_events=True)
    return FilterReusedOffloadingManager(backing, store_threshold, max_tracker_size)


def admitted(manager: OffloadingManager, names: str, context: ReqContext | None = None) -> str:
    """Which of ``names`` a store of them would write now; the store is then given up."""
    output = manager.prepare_store(keys(names), context)
    assert output is not None
    manager.complete_store(output.keys_to_store, context, success=False)
    return letters(output.keys_to_store)


MACHINES = {
    "large tracker": manager_machine(lambda n: make_filter(n, store_threshold=3), lambda n: FilteredLRUManager(n, 3)),
    "small tracker": manager_machine(
        lambda n: FilterReusedOffloadingManager(
            ARCOffloadingManager(HostBackend(16, n), enable_events=True), max_tracker_size=5
        ),
        lambda n: FilteredARCManager(n, max_tracker_size=5),
    ),
}
TestAgainstTheReference = MACHINES["large tracker"].TestCase
TestSmallTrackerAgainstTheReference = MACHINES["small tracker"].TestCase


@pytest.mark.parametrize("seed", WALK_SEEDS)
@pytest.mark.parametrize("machine", MACHINES)
def test_walk_matches_the_reference(machine: str, seed: int) -> None:
    walk(MACHINES[machine], seed)


# The tracker


def test_requests_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_SEEN_REQUESTS", 10)
    reuse = ReuseFilter(store_threshold=3)
    for n in range(100):
        reuse.count(keys("a"), ReqContext(str(n)))
        reuse.count(keys("b"), R1)
        assert reuse.num_requests <= 10
    reuse.check_integrity()
    assert reuse.accepts(keys("ab")) == [True, False], "a request that asks again is the last to be forgotten"


@pytest.mark.parametrize(
    ("num_blocks", "tracked"), [(1, 64_000), (16_000, 64_000), (200_000, 800_000), (10**9, admission.MAX_TRACKER_SIZE)]
)
def test_the_tracker_of_a_large_pool_is_larger(num_blocks: int, tracked: int) -> None:
    assert tracker_size(num_blocks) == tracked


# Parts of one request


def test_parts_of_a_request_count_as_one() -> None:
    backing = LRUOffloadingManager(HostBackend(16, 8))
    manager = FilterReusedOffloadingManager(backing, request_of=lambda name: name.split("_")[-1])
    for part in range(5):
        manager.touch(keys("ab"), ReqContext(f"{part}_one"))
        manager.lookup(keys("ab"), ReqContext(f"{part}_one"))
    assert admitted(manager, "ab") == ""
    manager.touch(keys("a"), ReqContext("0_two"))
    assert admitted(manager, "ab") == "a"


# What is wrong, and what is passed on


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"store_threshold": 1}, "store_threshold=1"),
        ({"store_threshold": 0}, "store_threshold=0"),
        ({"max_tracker_size": 0}, "max_tracker_size=0"),
        ({"max_tracker_size": -5}, "max_tracker_size=-5"),
    ],
)
def test_wrong_settings_are_errors_that_say_so(settings: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=f"{named}: must be at least"):
        make_filter(1, **settings)
    make_filter(1, store_threshold=2, max_tracker_size=1)


def test_a_manager_that_takes_no_admission_says_so() -> None:
    with pytest.raises(ConfigError, match="ReferenceLRUManager takes no admission"):
        FilterReusedOffloadingManager(ReferenceLRUManager(1))


def test_what_was_stored_before_can_be_loaded_whatever_the_counts_say() -> None:
    backing = LRUOffloadingManager(HostBackend(16, 2))
    backing.prepare_store(keys("ab"))
    backing.complete_store(keys("ab"))
    manager = FilterReusedOffloadingManager(backing)
    assert manager.lookup(keys("abc"), R1) == 2
    assert manager.lookup_each(keys("ac"), R1).tolist() == [LookupState.HIT, LookupState.MISS]
    manager.prepare_load(keys("ab"), R1)
    manager.complete_load(keys("ab"), R1)
    assert (manager.most_blocks(), manager.take_counts()["pool_used_blocks"]) == (2, 2)


def test_a_key_kept_out_is_explained() -> None:
    manager = make_filter()
    assert manager.explain_miss(keys("a")[0]).reason is MissReason.NEVER_STORED
    manager.lookup(keys("a"), R1)
    manager.prepare_store(keys("a"), R1)
    assert manager.explain_miss(keys("a")[0]).reason is MissReason.NOT_ADMITTED


def reason(manager: OffloadingManager, name: str) -> MissReason:
    """Why a block is not there, after a store of it was tried."""
    manager.prepare_store(keys(name))
    return manager.explain_miss(keys(name)[0]).reason


def test_a_key_that_the_tracker_has_forgotten_is_distinguished_from_one_that_was_asked_for_too_rarely() -> None:
    manager = make_filter(store_threshold=3, max_tracker_size=2)
    manager.lookup(keys("a"), R1)
    manager.lookup(keys("bc"))
    assert reason(manager, "a") is MissReason.NOT_ADMITTED, "once is too rarely, remembered or not"
    manager.lookup(keys("a"), R2)
    assert reason(manager, "a") is MissReason.NOT_ADMITTED
    manager.lookup(keys("bc"))
    manager.lookup(keys("a"), R3)
    assert reason(manager, "a") is MissReason.FORGOTTEN, "three requests have asked, and the tracker knows of one"
    assert manager.explain_miss(keys("a")[0]).age_s is not None
    assert reason(manager, "b") is MissReason.NOT_ADMITTED
    manager.prepare_store(keys("ac"), offer=Offer.BEHIND_REFUSED)
    assert manager.explain_miss(keys("a")[0]).reason is MissReason.FORGOTTEN


def test_why_a_key_was_refused_is_known_as_long_as_the_tracker_is() -> None:
    manager = make_filter(max_tracker_size=1 << 18)
    many = [b"%d" % n for n in range(1 << 17)]
    manager.touch(many, R1)
    manager.prepare_store(many, R1)
    known = sum(manager.explain_miss(key).reason is MissReason.NOT_ADMITTED for key in many[:1000])
    assert known > 500

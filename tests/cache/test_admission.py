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
from tests.cache.reference_filter import ReferenceFilter
from tests.cache.reference_policies import ReferenceARCManager
from tests.suites.conformance import ManagerConformance
from tests.suites.reference import ReferenceLRUManager
from tests.suites.stateful import WALK_SEEDS, manager_machine, walk

R1, R2, R3 = (ReqContext(name) for name in ("r1", "r2", "r3"))


def make_filter(num_blocks: int = 8, threshold: int = 2, tracker: int = 64_000) -> OffloadingManager:
    backing = LRUOffloadingManager(HostBackend(16, num_blocks), enable_events=True)
    return FilterReusedOffloadingManager(backing, threshold, tracker)


def admitted(manager: OffloadingManager, names: str, context: ReqContext | None = None) -> str:
    """Which of ``names`` a store of them would write now; the store is then given up."""
    output = manager.prepare_store(keys(names), context)
    assert output is not None
    manager.complete_store(output.keys_to_store, context, success=False)
    return letters(output.keys_to_store)


class TestConformance(ManagerConformance):
    """Once its keys have been asked for often enough, a filtered manager is a manager like any other."""

    def make_manager(self, num_blocks: int) -> OffloadingManager:
        return make_filter(num_blocks)

    def admit(self, manager: OffloadingManager, names: str) -> None:
        for _ in range(2):
            manager.lookup(keys(names))


class TestConformanceOfTheReference(TestConformance):
    def make_manager(self, num_blocks: int) -> OffloadingManager:
        return ReferenceFilter(ReferenceLRUManager(num_blocks))


MACHINES = {
    "large tracker": manager_machine(
        lambda n: make_filter(n, threshold=3), lambda n: ReferenceFilter(ReferenceLRUManager(n), 3)
    ),
    "small tracker": manager_machine(
        lambda n: FilterReusedOffloadingManager(
            ARCOffloadingManager(HostBackend(16, n), enable_events=True), max_tracker_size=5
        ),
        lambda n: ReferenceFilter(ReferenceARCManager(n), max_tracker_size=5),
    ),
}
TestAgainstTheReference = MACHINES["large tracker"].TestCase
TestSmallTrackerAgainstTheReference = MACHINES["small tracker"].TestCase


@pytest.mark.parametrize("seed", WALK_SEEDS)
@pytest.mark.parametrize("machine", MACHINES)
def test_walk_matches_the_reference(machine: str, seed: int) -> None:
    walk(MACHINES[machine], seed)


# What counts


@pytest.mark.parametrize("call", ["lookup", "lookup_each", "touch"])
def test_a_key_enters_when_enough_requests_have_asked_for_it(call: str) -> None:
    manager = make_filter(threshold=3)
    for context in (R1, R2):
        getattr(manager, call)(keys("ab"), context)
        assert admitted(manager, "ab") == ""
    getattr(manager, call)(keys("a"), R3)
    assert admitted(manager, "ba") == "a"


def test_a_waiting_request_that_asks_repeatedly_counts_once() -> None:
    manager = make_filter()
    for _ in range(5):
        manager.lookup(keys("ab"), R1)
        manager.lookup_each(keys("ab"), R1)
        manager.touch(keys("ab"), R1)
    assert admitted(manager, "ab", R1) == ""
    manager.lookup(keys("ab"), R2)
    assert admitted(manager, "ab", R1) == "ab"


def test_two_waiting_requests_that_take_turns_count_once_each() -> None:
    manager = make_filter(threshold=3)
    for _ in range(5):
        manager.lookup(keys("a"), R1)
        manager.lookup(keys("a"), R2)
    assert admitted(manager, "a") == ""
    manager.lookup(keys("a"), R3)
    assert admitted(manager, "a") == "a"


def test_a_request_that_grows_counts_its_new_keys() -> None:
    manager = make_filter()
    manager.lookup(keys("ab"), R1)
    manager.lookup(keys("abcd"), R1)
    manager.touch(keys("abcd"), R2)
    assert admitted(manager, "abcd") == "abcd"


def test_without_a_context_every_call_counts() -> None:
    manager = make_filter()
    manager.lookup(keys("a"))
    assert admitted(manager, "a") == ""
    manager.lookup(keys("a"))
    assert admitted(manager, "a") == "a"


def test_a_duplicate_in_one_call_counts_once() -> None:
    manager = make_filter()
    manager.lookup(keys("aaa"))
    assert admitted(manager, "a") == ""
    manager.touch(keys("aba"))
    assert admitted(manager, "aabb") == "a"


def test_keys_past_the_first_miss_count() -> None:
    manager = make_filter()
    for context in (R1, R2):
        assert manager.lookup(keys("abcdef"), context) == 0
    assert admitted(manager, "abcdef") == "abcdef"


def test_a_store_never_counts() -> None:
    manager = make_filter()
    manager.lookup(keys("a"), R1)
    for context in (None, R1, R2, R3):
        assert admitted(manager, "ab", context) == ""


def test_other_calls_do_not_count() -> None:
    manager = make_filter()
    manager.lookup(keys("a"), R1)
    manager.complete_store(keys("a"), R2)
    manager.explain_miss(keys("a")[0])
    manager.take_events()
    assert admitted(manager, "a") == ""


# The tracker


def test_the_tracker_forgets_the_key_least_recently_counted() -> None:
    manager = make_filter(tracker=3)
    for name in "abc":
        manager.lookup(keys(name))
    manager.lookup(keys("a"))
    manager.lookup(keys("d"))
    manager.check_integrity()
    for name in "acd":
        manager.lookup(keys(name))
    assert admitted(manager, "acd") == "acd"
    manager.lookup(keys("b"))
    assert admitted(manager, "b") == ""


def test_asking_again_in_the_same_request_does_not_keep_a_key_in_the_tracker() -> None:
    manager = make_filter(tracker=2)
    manager.lookup(keys("a"), R1)
    manager.lookup(keys("b"), R1)
    manager.lookup(keys("a"), R1)
    manager.lookup(keys("c"), R1)
    manager.lookup(keys("b"), R2)
    assert admitted(manager, "b") == "b"
    manager.lookup(keys("a"), R2)
    assert admitted(manager, "a") == ""


def test_a_call_larger_than_the_tracker_is_no_trouble() -> None:
    manager = make_filter(tracker=2)
    for _ in range(3):
        manager.lookup(keys("abcdef"))
        manager.check_integrity()
    assert len(admitted(manager, "abcdef")) <= 2


def test_tables_stay_bounded_over_many_requests() -> None:
    manager = make_filter(tracker=100)
    for n in range(10_000):
        manager.lookup([b"%d" % n, b"shared"], ReqContext(str(n)))
    manager.check_integrity()
    assert manager.prepare_store([b"shared"]) is not None
    manager.complete_store([b"shared"])
    assert manager.lookup([b"shared"]) == 1


def test_requests_without_a_block_leave_nothing_behind() -> None:
    reuse = ReuseFilter()
    for n in range(1000):
        reuse.count([], ReqContext(str(n)))
    assert reuse.num_requests == 0


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


def hits_of_rounds(num_blocks: int, tracked: int) -> int:
    """Blocks found in the last of three rounds over three quarters of a pool."""
    manager = make_filter(num_blocks, tracker=tracked)
    chains = [[b"%d/%d" % (chain, i) for i in range(8)] for chain in range(num_blocks * 3 // 32)]
    found = 0
    for number in range(3):
        for n, chain in enumerate(chains):
            context = ReqContext(f"{number}/{n}")
            manager.touch(chain, context)
            found += (manager.lookup(chain, context) or 0) * (number == 2)
            output = manager.prepare_store(chain, context)
            assert output is not None
            manager.complete_store(output.keys_to_store, context)
    return found


def test_what_the_pool_has_room_for_is_met_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MIN_TRACKER_SIZE", 10)
    assert hits_of_rounds(320, tracked=10) == 0, "as with any tracker that is smaller than the working set"
    assert hits_of_rounds(320, tracked=tracker_size(320)) == 240


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


@pytest.mark.parametrize("make", [FilterReusedOffloadingManager, ReferenceFilter])
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"store_threshold": 1}, "store_threshold=1"),
        ({"store_threshold": 0}, "store_threshold=0"),
        ({"max_tracker_size": 0}, "max_tracker_size=0"),
        ({"max_tracker_size": -5}, "max_tracker_size=-5"),
    ],
)
def test_wrong_settings_are_errors_that_say_so(make: type, settings: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=f"{named}: must be at least"):
        make(ReferenceLRUManager(1), **settings)


def test_the_least_settings_are_right() -> None:
    manager = make_filter(threshold=2, tracker=1)
    manager.lookup(keys("a"))
    manager.lookup(keys("a"))
    assert admitted(manager, "a") == "a"


def test_defaults() -> None:
    reuse = ReuseFilter()
    assert (reuse.store_threshold, reuse.max_tracker_size) == (2, 64_000)


def test_a_manager_that_takes_no_admission_says_so() -> None:
    with pytest.raises(ConfigError, match="ReferenceLRUManager takes no admission"):
        FilterReusedOffloadingManager(ReferenceLRUManager(1))


def test_the_thin_constructor_gives_back_its_manager() -> None:
    backing = LRUOffloadingManager(HostBackend(16, 2))
    manager = FilterReusedOffloadingManager(backing)
    assert manager is backing
    assert admitted(manager, "a") == ""


def test_a_store_of_nothing_admitted_is_empty_even_when_nothing_could_be_evicted() -> None:
    manager = make_filter(num_blocks=1)
    for _ in range(2):
        manager.lookup(keys("a"))
    assert manager.prepare_store(keys("a")) is not None
    output = manager.prepare_store(keys("xyz"))
    assert output is not None
    assert output.keys_to_store == []
    assert output.evicted_keys == []
    assert len(output.store_spec.slots) == 0


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
    manager = make_filter(threshold=3, tracker=2)
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
    manager = make_filter(tracker=1 << 18)
    many = [b"%d" % n for n in range(1 << 17)]
    manager.touch(many, R1)
    manager.prepare_store(many, R1)
    known = sum(manager.explain_miss(key).reason is MissReason.NOT_ADMITTED for key in many[:1000])
    assert known > 500

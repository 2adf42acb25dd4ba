"""The suites of the contracts of managers and of their free slots, which no setting replaces."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from kvoffload.abc import (
    Backend,
    BlockNotPinnedError,
    BlockNotReadyError,
    IntegrityError,
    LookupState,
    Need,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    Slots,
)
from kvoffload.cache.keys import make_offload_key
from kvoffload.testing.conformance import ALPHABET, check_slots, keys, letters

MISS, HIT, PENDING = LookupState.MISS, LookupState.HIT, LookupState.PENDING


class ManagerConformance:
    """The contract of ``OffloadingManager``.

    The manager must have events enabled, if that is an option. While no block was used twice, it must evict the oldest
    block first, as LRU and ARC do.
    """

    def make_manager(self, num_blocks: int) -> OffloadingManager:
        """Returns a new, empty manager with room for ``num_blocks``."""
        raise NotImplementedError

    def admit(self, manager: OffloadingManager, names: str) -> None:
        """Makes ``manager`` accept ``names`` for a store, without moving any block. Only needed by managers with an
        admission rule."""

    # How the tests drive it.

    def begin(self, manager: OffloadingManager, names: str) -> PrepareStoreOutput | None:
        """Begins a store and leaves it unfinished."""
        self.admit(manager, names)
        output = manager.prepare_store(keys(names))
        manager.check_integrity()
        return output

    def begun(self, manager: OffloadingManager, names: str) -> PrepareStoreOutput:
        """Begins a store and leaves it unfinished. There must be room for it."""
        output = self.begin(manager, names)
        assert output is not None, f"no room for {names!r}"
        return output

    def store(self, manager: OffloadingManager, names: str) -> str:
        """Runs a whole store. Returns the names that it evicted."""
        output = self.begun(manager, names)
        self.finish(manager, names)
        return letters(output.evicted_keys)

    def finish(self, manager: OffloadingManager, names: str, success: bool = True) -> None:
        manager.complete_store(keys(names), success=success)
        manager.check_integrity()

    def full(self, names: str) -> OffloadingManager:
        """Returns a manager that holds exactly ``names``, ready, oldest first, with no event waiting."""
        manager = self.make_manager(len(names))
        for name in names:
            assert self.store(manager, name) == ""
        list(manager.take_events())
        return manager

    def present(self, manager: OffloadingManager, names: str = ALPHABET) -> str:
        """Returns the ``names`` that can be loaded."""
        states = manager.lookup_each(keys(names))
        return "".join(name for name, state in zip(names, states, strict=True) if state == HIT)

    def events(self, manager: OffloadingManager) -> list[str]:
        """Returns the events since the last call: ``"+ab"`` became ready, ``"-c"`` left."""
        return [("-" if event.removed else "+") + letters(event.keys) for event in manager.take_events()]

    def last(self, manager: OffloadingManager, chain: Sequence[OffloadKey]) -> int:
        """Returns the index of the last of ``chain`` that can be loaded, -1 if none can."""
        ready = np.flatnonzero(manager.lookup_each(chain, need=Need.LAST) == HIT)
        return int(ready[-1]) if len(ready) else -1

    def used(self, manager: OffloadingManager) -> float:
        """Returns how many blocks take a slot."""
        return manager.take_counts()["pool_used_blocks"]

    # lookup, lookup_each

    def test_lookup_is_the_leading_run_of_ready_blocks(self) -> None:
        manager = self.make_manager(8)
        self.store(manager, "abd")
        assert manager.lookup(keys("ab")) == 2
        assert manager.lookup(keys("abcd")) == 2
        assert manager.lookup(keys("ba")) == 2
        assert manager.lookup(keys("cabd")) == 0
        assert manager.lookup([]) == 0

    @pytest.mark.parametrize("gap", [0, 1, 63, 64, 65, 191, 192, 193, 255, 256, 257, 511, 512, 599])
    def test_lookup_of_a_long_chain_finds_the_first_gap(self, gap: int) -> None:
        chain = [make_offload_key(b"%032d" % n, 0) for n in range(600)]
        manager = self.make_manager(600)
        for _ in range(4):  # for managers with an admission rule
            assert manager.lookup(chain) == 0
        manager.prepare_store(chain)
        manager.complete_store(chain[:gap] + chain[gap + 1 :])
        assert manager.lookup(chain) == gap
        manager.complete_store(chain)
        assert manager.lookup(chain) == 600
        manager.check_integrity()

    def test_lookup_each_returns_the_state_of_every_key(self) -> None:
        manager = self.make_manager(8)
        self.store(manager, "ac")
        self.begun(manager, "d")
        assert list(manager.lookup_each(keys("abcdc"))) == [HIT, MISS, HIT, PENDING, HIT]
        assert list(manager.lookup_each([])) == []

    def test_lookup_of_the_last_finds_the_last_ready_block(self) -> None:
        manager = self.make_manager(8)
        self.store(manager, "bd")
        self.begun(manager, "f")
        assert self.last(manager, keys("abcdefg")) == 3, "missing blocks and those being written are skipped"
        assert self.last(manager, keys("abc")) == 1
        assert self.last(manager, keys("bxb")) == 2
        assert self.last(manager, keys("acf")) == -1
        assert self.last(manager, []) == -1
        self.finish(manager, "f")
        assert self.last(manager, keys("abcdefg")) == 5
        manager.drop(keys("fd"))
        assert self.last(manager, keys("abcdefg")) == 1

    @pytest.mark.parametrize("need", [None, *Need])
    def test_lookups_change_no_recency(self, need: Need | None) -> None:
        manager = self.full("abc")
        for _ in range(3):
            manager.lookup(keys("a")) if need is None else manager.lookup_each(keys("a"), need=need)
        assert self.store(manager, "d") == "a"

    # prepare_load, complete_load

    def test_load_reads_where_the_store_wrote(self) -> None:
        manager = self.make_manager(8)
        output = self.begun(manager, "abcd")
        self.finish(manager, "abcd")
        spec = manager.prepare_load(keys("dab"))
        assert spec.medium() == output.store_spec.medium()
        written = dict(zip("abcd", output.store_spec.slots.tolist(), strict=True))
        assert spec.slots.tolist() == [written[name] for name in "dab"]
        assert len(manager.prepare_load([]).slots) == 0

    @pytest.mark.parametrize("missing", ["x", "w"])
    def test_load_of_a_block_that_is_not_ready_is_an_error_and_pins_nothing(self, missing: str) -> None:
        manager = self.make_manager(3)
        self.store(manager, "ba")
        self.begun(manager, "w")
        with pytest.raises(BlockNotReadyError):
            manager.prepare_load(keys("a" + missing + "b"))
        manager.check_integrity()
        with pytest.raises(BlockNotPinnedError):
            manager.complete_load(keys("a"))
        assert self.store(manager, "cd") == "ab"

    def test_pinned_block_is_not_evicted_until_its_last_reader_is_done(self) -> None:
        manager = self.full("ab")
        manager.prepare_load(keys("a"))
        manager.prepare_load(keys("ab"))
        assert self.begin(manager, "c") is None
        manager.complete_load(keys("ab"))
        assert self.store(manager, "c") == "b"
        manager.prepare_load(keys("c"))
        assert self.begin(manager, "d") is None
        assert self.present(manager) == "ac"
        manager.complete_load(keys("a"))
        assert self.store(manager, "d") == "a"

    def test_a_duplicate_in_one_load_counts_once(self) -> None:
        manager = self.full("a")
        spec = manager.prepare_load(keys("aa"))
        assert len(set(spec.slots.tolist())) == 1
        manager.complete_load(keys("aa"))
        with pytest.raises(BlockNotPinnedError):
            manager.complete_load(keys("a"))
        assert self.store(manager, "b") == "a"

    @pytest.mark.parametrize("unpinned", ["b", "x", "w"])
    def test_unpinning_a_block_without_a_pin_is_an_error_and_unpins_nothing(self, unpinned: str) -> None:
        manager = self.make_manager(3)
        self.store(manager, "ab")
        self.begun(manager, "w")
        manager.prepare_load(keys("a"))
        with pytest.raises(BlockNotPinnedError):
            manager.complete_load(keys("a" + unpinned))
        manager.check_integrity()
        assert self.store(manager, "c") == "b"
        assert self.begin(manager, "de") is None
        manager.complete_load(keys("a"))
        assert self.store(manager, "de") == "ac"

    def test_a_pinned_block_that_was_passed_over_is_evicted_from_its_old_place(self) -> None:
        manager = self.full("abc")
        lease = manager.prepare_load(keys("a"))
        assert self.store(manager, "x") == "b"
        manager.complete_load(lease)
        assert self.store(manager, "yz") == "ac"

    def test_a_load_may_be_completed_in_parts_by_lease_or_by_key_and_in_any_order(self) -> None:
        manager = self.full("abc")
        lease = manager.prepare_load(keys("abc"))
        manager.complete_load(keys("c"))
        assert self.begin(manager, "xy") is None
        manager.complete_load(replace(lease, slots=lease.slots[:2]))
        assert self.store(manager, "xyz") == "abc"

    # drop

    def test_a_block_dropped_in_transfer_keeps_its_slot_until_its_lease_is_completed(self) -> None:
        manager = self.make_manager(2)
        self.store(manager, "a")
        load, store = manager.prepare_load(keys("a")), self.begun(manager, "b").store_spec
        manager.drop(keys("ab"))
        manager.check_integrity()
        assert (self.present(manager), self.used(manager)) == ("", 2)
        assert self.begin(manager, "c") is None
        manager.complete_load(load)
        manager.complete_store(store)
        manager.check_integrity()
        assert (self.present(manager), self.used(manager)) == ("", 0)

    def test_every_ready_block_that_leaves_is_counted(self) -> None:
        """Requests are offered the blocks that a lookup found, until one has left."""
        manager = self.full("abc")
        before = manager.num_removed
        self.store(manager, "d")
        assert manager.num_removed == before + 1, "evicted"
        manager.drop(keys("bx"))
        assert manager.num_removed == before + 2, "dropped"
        self.begun(manager, "e")
        self.finish(manager, "e", success=False)
        assert manager.num_removed == before + 2, "a block that was being written could not be found"
        manager.reset()
        assert manager.num_removed == before + 4, "reset"

    # touch

    def test_a_duplicate_in_one_touch_counts_where_it_came_first(self) -> None:
        manager = self.full("abc")
        manager.touch(keys("acbac"))
        assert self.store(manager, "xyz") == "bca"

    def test_touch_moves_a_block_being_written(self) -> None:
        manager = self.make_manager(3)
        self.begun(manager, "cba")
        manager.touch(keys("a"))
        manager.check_integrity()
        self.finish(manager, "abc")
        assert self.store(manager, "xyz") == "bca"

    # prepare_store

    def test_store_drops_what_is_present_or_in_flight_and_keeps_order(self) -> None:
        manager = self.make_manager(8)
        self.store(manager, "b")
        self.begun(manager, "d")
        output = self.begun(manager, "edcba")
        assert letters(output.keys_to_store) == "eca"
        assert output.evicted_keys == []
        check_slots(output.store_spec.slots, 8)
        self.finish(manager, "eca")
        assert manager.prepare_load(keys("eca")).slots.tolist() == output.store_spec.slots.tolist()

    def test_store_with_nothing_to_do_is_empty_and_not_refused(self) -> None:
        manager = self.full("ab")
        manager.prepare_load(keys("ab"))
        for names in ("", "a", "ba"):
            output = self.begun(manager, names)
            assert output.keys_to_store == []
            assert len(output.store_spec.slots) == 0
            assert output.evicted_keys == []

    def test_a_duplicate_in_one_store_takes_one_slot(self) -> None:
        manager = self.make_manager(3)
        output = self.begun(manager, "abaab")
        assert letters(output.keys_to_store) == "ab"
        assert len(check_slots(output.store_spec.slots, 3)) == 2
        self.finish(manager, "abaab")
        assert self.store(manager, "c") == ""
        assert self.store(manager, "def") == "bac"

    def test_new_blocks_are_not_ready_and_cannot_be_evicted(self) -> None:
        manager = self.make_manager(2)
        self.begun(manager, "ab")
        assert self.present(manager) == ""
        assert self.begin(manager, "c") is None
        self.finish(manager, "b")
        assert self.present(manager) == "b"
        assert self.store(manager, "c") == "b"

    def test_store_never_evicts_one_of_its_own_keys(self) -> None:
        manager = self.full("abc")
        assert self.store(manager, "abx") == "c"
        assert self.present(manager) == "abx"
        assert self.begin(manager, "abxy") is None
        assert self.present(manager) == "abx"
        assert self.store(manager, "y") == "a"

    def test_store_without_room_is_refused_and_nothing_changed(self) -> None:
        manager = self.make_manager(5)
        self.store(manager, "cba")
        self.begun(manager, "w")
        manager.prepare_load(keys("b"))
        list(manager.take_events())
        assert self.begin(manager, "wpqrs") is None  # one is free and two can be made free: four cannot
        assert self.events(manager) == []
        assert self.present(manager) == "abc"
        assert manager.lookup_each(keys("wpqrs")).tolist() == [PENDING, MISS, MISS, MISS, MISS]
        output = self.begun(manager, "pqr")
        assert letters(output.evicted_keys) == "ac"
        assert len(output.keys_to_store) == 3

    def test_no_slot_is_handed_out_twice_while_in_use(self) -> None:
        manager = self.make_manager(4)
        in_use: dict[str, int] = {}
        for names in ("ab", "cd", "ef", "gab", "hcd", "i"):
            output = self.begun(manager, names)
            for name in letters(output.evicted_keys):
                del in_use[name]
            slots = check_slots(output.store_spec.slots, 4)
            in_use |= dict(zip(letters(output.keys_to_store), slots, strict=True))
            assert len(set(in_use.values())) == len(in_use)
            self.finish(manager, names)

    # complete_store

    def test_completing_unknown_or_ready_keys_is_ignored(self) -> None:
        manager = self.make_manager(2)
        self.begun(manager, "a")
        self.finish(manager, "xa")
        for success in (True, False):
            self.finish(manager, "ax", success=success)
        assert manager.lookup_each(keys("ax")).tolist() == [HIT, MISS]
        assert self.events(manager) == ["+a"]
        manager.prepare_load(keys("a"))
        self.finish(manager, "a")
        assert self.store(manager, "b") == ""
        assert self.store(manager, "c") == "b"
        manager.complete_load(keys("a"))

    def test_a_store_may_be_completed_in_parts_with_different_ends(self) -> None:
        manager = self.make_manager(3)
        self.begun(manager, "abc")
        self.finish(manager, "b", success=False)
        self.finish(manager, "c")
        assert manager.lookup_each(keys("abc")).tolist() == [PENDING, MISS, HIT]
        self.finish(manager, "abc")
        assert manager.lookup_each(keys("abc")).tolist() == [HIT, MISS, HIT]

    # take_events

    def test_there_are_events_when_blocks_become_ready_and_when_they_are_evicted(self) -> None:
        manager = self.make_manager(2)
        output = self.begun(manager, "ab")
        assert self.events(manager) == []
        self.finish(manager, "ab")
        (event,) = manager.take_events()
        assert (letters(event.keys), event.removed) == ("ab", False)
        assert event.medium == output.store_spec.medium()
        self.begun(manager, "c")
        assert self.events(manager) == ["-b"]
        self.finish(manager, "c")
        assert self.events(manager) == ["+c"]
        assert self.events(manager) == []

    def test_the_events_say_which_blocks_are_ready(self) -> None:
        rng = random.Random(0)
        manager = self.make_manager(5)
        known: Counter[str] = Counter()
        for _ in range(200):
            names = "".join(rng.sample(ALPHABET[:12], rng.randint(1, 4)))
            self.begin(manager, names)
            self.finish(manager, names, success=rng.random() < 0.8)
            if rng.random() < 0.05:
                manager.reset()
            for event in manager.take_events():
                known.update(dict.fromkeys(letters(event.keys), -1 if event.removed else 1))
            assert set(known.values()) <= {0, 1}
            assert "".join(sorted(known.elements())) == self.present(manager)

    # reset, shutdown

    def test_reset_empties_the_manager_and_says_so(self) -> None:
        manager = self.full("abc")
        manager.reset()
        manager.check_integrity()
        removed = self.events(manager)
        assert all(event[0] == "-" for event in removed)
        assert sorted("".join(event[1:] for event in removed)) == list("abc")
        assert self.present(manager) == ""
        assert self.store(manager, "xyz") == ""
        manager.reset()
        manager.reset()
        assert self.store(manager, "abc") == ""

    def test_after_a_reset_a_slot_being_written_returns_when_its_transfer_ends(self) -> None:
        for success in (True, False):
            manager = self.make_manager(3)
            old = self.begun(manager, "ab")
            manager.reset()
            manager.check_integrity()
            assert self.present(manager) == ""
            assert self.begin(manager, "xy") is None
            new = self.begun(manager, "x")
            assert not set(new.store_spec.slots.tolist()) & set(old.store_spec.slots.tolist())
            self.finish(manager, "a", success=success)
            assert self.begin(manager, "yz") is None
            self.finish(manager, "b", success=success)
            assert manager.lookup_each(keys("ab")).tolist() == [MISS, MISS]
            assert self.events(manager) == []
            assert letters(self.begun(manager, "yz").keys_to_store) == "yz"

    def test_after_a_reset_a_slot_being_read_returns_when_its_last_reader_is_done(self) -> None:
        manager = self.full("ab")
        held = manager.prepare_load(keys("a")).slots.tolist()
        manager.prepare_load(keys("a"))
        manager.reset()
        assert self.present(manager) == ""
        new = self.begun(manager, "x")
        assert new.store_spec.slots.tolist() != held
        assert self.begin(manager, "y") is None
        manager.complete_load(keys("a"))
        manager.check_integrity()
        assert self.begin(manager, "y") is None
        manager.complete_load(keys("a"))
        manager.check_integrity()
        assert self.begun(manager, "y").store_spec.slots.tolist() == held
        with pytest.raises(BlockNotPinnedError):
            manager.complete_load(keys("a"))

    def test_after_a_reset_a_key_in_transfer_counts_as_in_flight(self) -> None:
        manager = self.make_manager(8)
        self.store(manager, "r")
        manager.prepare_load(keys("r"))
        self.begun(manager, "w")
        manager.reset()
        assert letters(self.begun(manager, "rwx").keys_to_store) == "x"
        for name in "rw":
            with pytest.raises(BlockNotReadyError):
                manager.prepare_load(keys(name))
        manager.touch(keys("wr"))
        manager.reset()
        self.finish(manager, "w")
        manager.complete_load(keys("r"))
        manager.check_integrity()
        assert letters(self.begun(manager, "rw").keys_to_store) == "rw"
        self.finish(manager, "rw")
        assert self.present(manager) == "rw"

    def test_after_a_reset_a_completion_of_the_other_kind_ends_no_transfer(self) -> None:
        manager = self.make_manager(2)
        self.store(manager, "r")
        manager.prepare_load(keys("r"))
        self.begun(manager, "w")
        manager.reset()
        self.finish(manager, "r")
        self.finish(manager, "r", success=False)
        with pytest.raises(BlockNotPinnedError):
            manager.complete_load(keys("w"))
        assert self.begin(manager, "x") is None
        manager.complete_load(keys("r"))
        self.finish(manager, "w")
        assert self.store(manager, "xy") == ""

    def test_shutdown_releases_everything(self) -> None:
        manager = self.full("ab")
        assert self.used(manager) == 2
        manager.shutdown()
        assert self.used(manager) == 0
        manager.check_integrity()

    # every call

    def test_context_and_kind_of_sequence_do_not_matter(self) -> None:
        manager = self.make_manager(2)
        self.admit(manager, "ab")
        context = ReqContext("r1", {"any": "thing"})
        batch = tuple(keys("ab"))
        assert manager.prepare_store(batch, context) is not None
        manager.complete_store(batch, context, success=True)
        assert manager.lookup(batch, context) == 2
        assert list(manager.lookup_each(batch, context)) == [HIT, HIT]
        manager.touch(batch, context)
        assert len(manager.prepare_load(batch, context).slots) == 2
        manager.complete_load(batch, context)
        assert manager.lookup(keys("ab")) == 2

    def test_the_callers_keys_are_left_alone(self) -> None:
        manager = self.make_manager(2)
        batch = keys("aab")
        self.admit(manager, "ab")
        manager.touch(batch)
        output = manager.prepare_store(batch)
        assert output is not None
        manager.complete_store(batch)
        manager.prepare_load(batch)
        manager.complete_load(batch)
        manager.lookup(batch)
        assert batch == keys("aab")
        assert output.keys_to_store is not batch

    def test_groups_of_one_block_hash_are_different_blocks(self) -> None:
        manager = self.make_manager(2)
        first, second = (make_offload_key(b"h" * 32, group) for group in (0, 1))
        for _ in range(4):  # for managers with an admission rule
            manager.lookup([first, second])
        assert manager.prepare_store([first]) is not None
        manager.complete_store([first])
        assert manager.lookup_each([first, second]).tolist() == [HIT, MISS]

    def test_used_blocks_are_counted(self) -> None:
        manager = self.make_manager(3)
        assert (manager.most_blocks(), self.used(manager)) == (3, 0)
        self.begun(manager, "ab")
        assert self.used(manager) == 2
        self.finish(manager, "a")
        assert self.used(manager) == 2
        self.finish(manager, "b", success=False)
        assert (manager.most_blocks(), self.used(manager)) == (3, 1)


class BackendConformance:
    """The contract of ``Backend``."""

    def make_backend(self, num_blocks: int) -> Backend:
        """Returns a new backend with ``num_blocks`` free slots."""
        raise NotImplementedError

    def test_a_new_backend_is_all_free(self) -> None:
        backend = self.make_backend(5)
        assert backend.num_blocks == 5
        assert backend.get_num_free_blocks() == 5
        assert backend.block_size > 0
        assert backend.medium
        backend.check_integrity()

    def test_freed_slots_can_be_had_again_and_others_cannot(self) -> None:
        backend = self.make_backend(4)
        slots = backend.allocate_blocks(keys("abcd")).tolist()
        backend.free(_array([slots[2], slots[0]]))
        assert backend.get_num_free_blocks() == 2
        again = check_slots(backend.allocate_blocks(keys("ef")), 4)
        assert set(again) == {slots[0], slots[2]}
        backend.check_integrity()

    def test_handed_out_slots_do_not_change_afterwards(self) -> None:
        backend = self.make_backend(4)
        first = backend.allocate_blocks(keys("abcd"))
        before = first.tolist()
        backend.free(_array(before[1:3]))
        second = backend.allocate_blocks(keys("x"))
        after = second.tolist()
        backend.free(_array(before[:1]))
        backend.allocate_blocks(keys("yz"))
        assert first.tolist() == before
        assert second.tolist() == after

    def test_freeing_twice_is_found(self) -> None:
        backend = self.make_backend(3)
        slots = backend.allocate_blocks(keys("ab"))
        backend.free(slots[:1])
        backend.check_integrity()
        with pytest.raises(IntegrityError):
            self.free_and_check(backend, slots[:1])

    def free_and_check(self, backend: Backend, slots: Slots) -> None:
        backend.free(slots)
        backend.check_integrity()

    def test_a_spec_says_where_keys_lie_in_order(self) -> None:
        backend = self.make_backend(4)
        slots = backend.allocate_blocks(keys("abc"))
        spec = backend.get_load_store_spec(keys("ca"), slots[[2, 0]])
        assert spec.medium() == backend.medium
        assert spec.slots.tolist() == [slots[2], slots[0]]
        spec = backend.get_load_store_spec(keys("ac"), slots[[0, 2]])
        assert spec.slots.tolist() == [slots[0], slots[2]]

    def test_slots_balance_under_random_calls(self) -> None:
        rng = random.Random(1)
        backend = self.make_backend(16)
        held: list[int] = []
        for _ in range(500):
            if rng.random() < 0.5:
                n = rng.randint(0, backend.get_num_free_blocks())
                slots = check_slots(backend.allocate_blocks(keys(ALPHABET[:n])), 16)
                assert len(slots) == n
                assert not set(slots) & set(held), "a slot in use was handed out again"
                held += slots
            else:
                rng.shuffle(held)
                cut = rng.randint(0, len(held))
                backend.free(_array(held[cut:]))
                del held[cut:]
            assert backend.get_num_free_blocks() == 16 - len(held)
            backend.check_integrity()


def _array(slots: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.array(list(slots), dtype=np.int64)

"""A Hypothesis state machine that runs a manager and its reference side by side.

    TestMyManager = manager_machine(MyManager, ReferenceLRUManager).TestCase

makes a test case. Batches come from a small universe of keys and include duplicates; capacities are tiny;
stores and loads end late, in part, twice, with failure, after a reset. Every answer of the manager must equal the
reference's, and the owner of every slot is tracked.

Runs are deterministic if ``CI`` is set. ``KVOFFLOAD_TEST_SCALE`` multiplies their number; above 1 they are longer too.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvoffload.abc import (
    BlockNotPinnedError,
    BlockNotReadyError,
    Hints,
    LoadStoreSpec,
    LookupState,
    Need,
    OffloadingManager,
    OffloadKey,
    ReqContext,
)
from kvoffload.cache.keys import make_offload_key
from tests.scale import SCALE, scaled
from tests.suites.reference import ReferenceManager

MAX_BLOCKS = 12
MAX_UNDER_WAY = 3
"""How many stores, and how many loads, may be in progress at once."""
OBSERVER = ReqContext("observer")
"""The request that looks up every key after every rule."""

SETTINGS = settings(
    max_examples=scaled(50),
    stateful_step_count=100 if SCALE > 1 else 40,
    derandomize=bool(os.environ.get("CI")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

CONTEXTS = [
    None,
    *(ReqContext(f"r{n}") for n in range(5)),
    # The name of a session alone changes nothing.
    ReqContext("r5", hints=Hints(session=5)),
]

WALK_SEEDS = range(scaled(10))
"""Seeds for ``walk``, one per test."""

numbers = st.integers(0, MAX_BLOCKS + 3)
"""``ManagerMachine.keys`` turns these into keys."""
batches = st.lists(numbers, min_size=1, max_size=MAX_BLOCKS)
others = st.lists(numbers, max_size=2)
contexts = st.sampled_from(CONTEXTS)


class ManagerMachine(RuleBasedStateMachine):
    """Compares a manager with its reference, call by call. ``manager_machine`` makes subclasses."""

    def make_manager(self, num_blocks: int) -> OffloadingManager:
        raise NotImplementedError

    def make_reference(self, num_blocks: int) -> ReferenceManager:
        raise NotImplementedError

    def make_key(self, n: int) -> OffloadKey:
        raise NotImplementedError

    def compare_more(self, manager: Any, reference: Any) -> None:
        """Asserts what only this kind of manager can answer. Called after every rule."""

    @initialize(num_blocks=st.one_of(st.integers(1, 5), st.integers(1, MAX_BLOCKS)), batch=batches)
    def start(self, num_blocks: int, batch: list[int]) -> None:
        self.capacity = num_blocks
        # Only a few more than fit, so that most batches find something.
        self.universe = [self.make_key(n) for n in range(num_blocks + 4)]
        self.manager = self.make_manager(num_blocks)
        self.reference = self.make_reference(num_blocks)
        self.slot_of: dict[OffloadKey, int] = {}
        self.stores: list[list[OffloadKey]] = []
        self.loads: list[list[OffloadKey]] = []
        self.end_store(self.begin_store(self.keys(batch), None), success=True)

    # Rules. Each makes the same call to both.

    @rule(batch=batches, context=contexts)
    def look_up(self, batch: list[int], context: ReqContext | None) -> None:
        keys = self.keys(batch)
        assert self.manager.lookup(keys, context) == self.reference.lookup(keys, context)
        expected = self.reference.lookup_each(keys, context)
        assert self.manager.lookup_each(keys, context).tolist() == expected.tolist()
        run = self.manager.lookup_each(keys, context, Need.RUN) == LookupState.HIT
        assert [*run.tolist(), False].index(False) == self.reference.lookup(keys, context)
        last = self.manager.lookup_each(keys, context, Need.LAST) == LookupState.HIT
        assert last.nonzero()[0][-1:].tolist() == (expected == LookupState.HIT).nonzero()[0][-1:].tolist()

    @rule(batch=batches, context=contexts)
    def touch(self, batch: list[int], context: ReqContext | None) -> None:
        self.manager.touch(self.keys(batch), context)
        self.reference.touch(self.keys(batch), context)

    @rule(batch=batches, stored=batches, context=contexts)
    def refresh(self, batch: list[int], stored: list[int], context: ReqContext | None) -> None:
        self.manager.end_chain(self.keys(batch), self.keys(stored), context)
        self.reference.end_chain(self.keys(batch), self.keys(stored), context)

    @rule(batch=batches, context=contexts)
    def store(self, batch: list[int], context: ReqContext | None) -> None:
        self.end_store(self.begin_store(self.keys(batch), context), success=True)

    @precondition(lambda self: len(self.stores) < MAX_UNDER_WAY)
    @rule(batch=batches, context=contexts)
    def prepare_store(self, batch: list[int], context: ReqContext | None) -> None:
        if keys := self.begin_store(self.keys(batch), context):
            self.stores.append(keys)

    @precondition(lambda self: self.stores)
    @rule(which=st.integers(0, MAX_UNDER_WAY - 1), others=others, success=st.booleans())
    def complete_store(self, which: int, others: list[int], success: bool) -> None:
        keys = self.stores.pop(which % len(self.stores))
        self.end_store(self.keys(others) + keys, success)

    @precondition(lambda self: len(self.loads) < MAX_UNDER_WAY)
    @rule(batch=batches, context=contexts, only_ready=st.booleans())
    def prepare_load(self, batch: list[int], context: ReqContext | None, only_ready: bool) -> None:
        keys = self.keys(batch)
        if only_ready:
            keys = [key for key in keys if self.reference.state(key) is LookupState.HIT]
        spec, error = attempt(self.manager.prepare_load, keys, context)
        _, expected_error = attempt(self.reference.prepare_load, keys, context)
        assert error is expected_error
        if error is None:
            assert list(dict.fromkeys(self.slots(spec))) == [self.slot_of[key] for key in dict.fromkeys(keys)]
        if error is None and keys:
            self.loads.append(keys)

    @precondition(lambda self: self.loads)
    @rule(which=st.integers(0, MAX_UNDER_WAY - 1), others=others)
    def complete_load(self, which: int, others: list[int]) -> None:
        keys = self.loads.pop(which % len(self.loads))
        if self.end_load(keys + self.keys(others)) is not None:
            self.loads.append(keys)

    @rule(batch=batches)
    def drop(self, batch: list[int]) -> None:
        self.take_events()
        for manager in (self.manager, self.reference):
            manager.drop(self.keys(batch))
        self.compare_removals()

    @rule()
    def take_events(self) -> None:
        assert flat_events(self.manager) == flat_events(self.reference)

    @precondition(lambda self: self.stores or self.loads)
    @rule(seldom=st.integers(0, 3))
    def reset(self, seldom: int) -> None:
        if seldom == 3:
            self.reset_now()

    # Invariants.

    @invariant()
    def integrity_holds(self) -> None:
        self.manager.check_integrity()
        self.reference.check_integrity()

    @invariant()
    def both_know_the_same(self) -> None:
        states = self.manager.lookup_each(self.universe, OBSERVER).tolist()
        assert states == self.reference.lookup_each(self.universe, OBSERVER).tolist()
        assert self.manager.most_blocks() == self.reference.most_blocks()
        assert self.manager.take_counts()["pool_used_blocks"] == self.reference.take_counts()["pool_used_blocks"]
        assert self.manager.num_removed == self.reference.num_removed
        self.compare_more(self.manager, self.reference)

    @invariant()
    def slots_and_pins_agree(self) -> None:
        self.forget_freed_slots()
        block_status = getattr(self.manager, "block_status", None)
        if block_status is None:
            return
        for key in self.slot_of:
            block, expected = block_status(key), self.reference.block_status(key)
            if block is None or expected is None:
                assert block is expected, f"only one has the block: {block} {expected}"
            else:
                assert (block.slot, block.ref_cnt) == (self.slot_of[key], expected.ref_cnt)

    def teardown(self) -> None:
        """Evicts everything, which compares the whole order, then checks that every slot can be allocated again."""
        if not hasattr(self, "manager"):
            return
        written = self.evict_all_that_may_go("first")
        self.end_store([*self.universe, *written], success=True)
        for key in self.universe:
            while (block := self.reference.held(key)) is not None and block.ref_cnt > 0:
                self.end_load([key])
        self.evict_all_that_may_go("second")
        self.take_events()
        self.reset_now()
        self.end_store(list(self.slot_of), success=False)
        self.slots_and_pins_agree()
        self.both_know_the_same()
        assert len(self.evict_all_that_may_go("third")) == self.capacity
        assert sorted(self.slot_of.values()) == list(range(self.capacity))
        self.integrity_holds()
        self.manager.shutdown()
        self.manager.shutdown()

    # Helpers.

    def keys(self, batch: list[int]) -> list[OffloadKey]:
        return [self.universe[n % len(self.universe)] for n in batch]

    def begin_store(self, keys: list[OffloadKey], context: ReqContext | None) -> list[OffloadKey]:
        """Prepares a store in both. Returns the keys to be written, which must be equal; none if there is no room."""
        output = self.manager.prepare_store(keys, context)
        expected = self.reference.prepare_store(keys, context)
        if output is None or expected is None:
            assert output is expected, f"only one has room: {output} {expected}"
            return []
        assert output.keys_to_store == expected.keys_to_store
        assert output.evicted_keys == expected.evicted_keys
        for key in output.evicted_keys:
            del self.slot_of[key]
        for key, slot in zip(output.keys_to_store, self.slots(output.store_spec), strict=True):
            assert slot not in self.slot_of.values(), f"slot {slot} was allocated while in use"
            self.slot_of[key] = slot
        return output.keys_to_store

    def evict_all_that_may_go(self, name: str) -> list[OffloadKey]:
        """Stores new keys one by one until there is no room. Returns them."""
        written: list[OffloadKey] = []
        while len(written) <= self.capacity:
            key = make_offload_key(b"%s %d" % (name.encode(), len(written)), 0)
            for _ in range(4):  # for managers with an admission rule
                self.manager.lookup([key])
                self.reference.lookup([key])
            begun = self.begin_store([key], None)
            if not begun:
                return written
            written += begun
        raise AssertionError("blocks being written were evicted")

    def end_store(self, keys: list[OffloadKey], success: bool) -> None:
        self.manager.complete_store(keys, success=success)
        self.reference.complete_store(keys, success=success)
        self.forget_freed_slots()

    def end_load(self, keys: list[OffloadKey]) -> type[Exception] | None:
        _, error = attempt(self.manager.complete_load, keys, None)
        _, expected_error = attempt(self.reference.complete_load, keys, None)
        assert error is expected_error
        self.forget_freed_slots()
        return error

    def reset_now(self) -> None:
        """Resets both. The contract does not define the order of the removal events."""
        self.take_events()
        self.manager.reset()
        self.reference.reset()
        self.compare_removals()

    def compare_removals(self) -> None:
        assert sorted(flat_events(self.manager)) == sorted(flat_events(self.reference))
        self.forget_freed_slots()

    def forget_freed_slots(self) -> None:
        self.slot_of = {key: slot for key, slot in self.slot_of.items() if self.reference.held(key)}

    def slots(self, spec: LoadStoreSpec) -> list[int]:
        slots: list[int] = spec.slots.tolist()
        assert all(0 <= slot < self.capacity for slot in slots), f"slot out of range: {slots}"
        return slots


def manager_machine(
    make_manager: Callable[[int], OffloadingManager],
    make_reference: Callable[[int], ReferenceManager],
    compare_more: Callable[[Any, Any], None] = lambda manager, reference: None,
    make_key: Callable[[int], OffloadKey] = lambda n: make_offload_key(b"%d" % n, 0),
) -> type[ManagerMachine]:
    """Returns a machine that compares the two; both factories get a number of blocks.

    ``compare_more(manager, reference)`` asserts what only this kind of manager can answer. ``make_key`` makes the
    keys, for managers that must handle special ones. The machine looks up every key once as a request of its own, which
    a reference that counts requests must count too.
    """
    members = {
        "make_manager": staticmethod(make_manager),
        "make_reference": staticmethod(make_reference),
        "compare_more": staticmethod(compare_more),
        "make_key": staticmethod(make_key),
    }
    machine: type[ManagerMachine] = type("ManagerMachine", (ManagerMachine,), members)
    machine.TestCase.settings = SETTINGS
    return machine


def walk(machine_class: type[ManagerMachine], seed: int, num_blocks: int | None = None, num_steps: int = 200) -> None:
    """Applies ``num_steps`` rules of the machine, chosen uniformly by ``seed``. Hypothesis finds and shrinks unusual
    cases; long walks find bugs that need a full, busy cache."""
    rng = random.Random(seed)
    machine = machine_class()

    def batch(least: int = 1) -> list[int]:
        """Returns the numbers of a chain or of arbitrary keys."""
        n = rng.randint(least, 2 + machine.capacity // rng.choice([1, 4, 8]))
        start = rng.randrange(len(machine.universe))
        return list(range(start, start + n)) if rng.random() < 0.5 else rng.choices(range(1000), k=n)

    machine.start(num_blocks or rng.randint(1, MAX_BLOCKS), [0, 1, 2])
    for _ in range(num_steps):
        rules: list[Callable[[], None]] = [
            lambda: machine.look_up(batch(), rng.choice(CONTEXTS)),
            lambda: machine.touch(batch(), rng.choice(CONTEXTS)),
            lambda: machine.touch(batch(), rng.choice(CONTEXTS)),
            lambda: machine.store(batch(), rng.choice(CONTEXTS)),
            lambda: machine.store(batch(), rng.choice(CONTEXTS)),
            lambda: machine.refresh(batch(), batch(), rng.choice(CONTEXTS)),
            machine.take_events,
        ]
        if len(machine.stores) < MAX_UNDER_WAY:
            rules.append(lambda: machine.prepare_store(batch(), rng.choice(CONTEXTS)))
        if len(machine.loads) < MAX_UNDER_WAY:
            rules.append(lambda: machine.prepare_load(batch(), rng.choice(CONTEXTS), only_ready=rng.random() < 0.9))
        if machine.stores:
            rules.append(lambda: machine.complete_store(rng.randrange(3), batch(0)[:2], success=rng.random() < 0.7))
        if machine.loads:
            rules.append(lambda: machine.complete_load(rng.randrange(3), batch(0)[:1]))
            rules.append(lambda: machine.complete_load(rng.randrange(3), []))
        if rng.random() < 0.01:
            machine.reset_now()
        if rng.random() < 0.03:
            machine.drop(batch()[:3])
        rng.choice(rules)()
        machine.integrity_holds()
        machine.both_know_the_same()
        machine.slots_and_pins_agree()
    machine.teardown()


def flat_events(manager: OffloadingManager) -> list[tuple[OffloadKey, bool]]:
    """Returns the events since the last call as (key, removed): the contract does not define how events group keys."""
    return [(key, event.removed) for event in manager.take_events() for key in event.keys]


def attempt(
    call: Callable[[Sequence[OffloadKey], ReqContext | None], Any],
    keys: list[OffloadKey],
    context: ReqContext | None,
) -> tuple[Any, type[Exception] | None]:
    """Returns the result of a load call, and the type of the contract's error that it raised."""
    try:
        return call(keys, context), None
    except (BlockNotReadyError, BlockNotPinnedError) as error:
        return None, type(error)

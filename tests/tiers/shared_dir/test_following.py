"""Whatever is interleaved with it, a follower ends up with what the indexes of other seats say, and stays bounded."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvoffload.abc import OffloadKey
from kvoffload.tiers.disk.format import EMPTY_RECORD
from kvoffload.tiers.disk.journal import digests_of
from kvoffload.tiers.disk.recovery import open_files
from kvoffload.tiers.disk.start import remove_blocks
from kvoffload.tiers.shared_dir.followers import Follower
from kvoffload.tiers.shared_dir.foreign import ForeignBlocks
from kvoffload.tiers.shared_dir.seats import seat_name
from tests.clock import Clock
from tests.sim.shared_storage import Mount, NfsClient, NfsServer
from tests.tiers.disk.rig import pack_record

FINGERPRINT = "ab" * 32
BLOCK = 4096
NUM_SLOTS = 24
SLOTS_PER_SLAB = 8
CAPACITY = 1 << 20
NUM_SEATS = 2
KEYS = [hashlib.sha256(b"%d" % number).digest() for number in range(20)]
SETTLING_PASSES = 4
LONG_S = 100.0
"""Attributes and directory entries of every mount are newer than that."""


class Owner:
    """A process that has a seat, and its model: ``keys`` by slot."""

    def __init__(self, name: str, client: NfsClient, numbers: Iterator[int]) -> None:
        self.name = name
        self.client = client
        self.keys: dict[int, OffloadKey] = {}
        self.is_transient = False
        self._numbers = numbers
        self.open()

    def open(self) -> None:
        storage = self.client.storage().child(self.name)
        self.files = open_files(
            storage,
            FINGERPRINT,
            [BLOCK],
            CAPACITY,
            SLOTS_PER_SLAB * BLOCK,
            lambda: next(self._numbers),
            with_journal=True,
        )
        while self.files.num_allocated < NUM_SLOTS:
            self.files.grow()

    def put(self, slot: int, key: OffloadKey) -> None:
        """Stores a block as BlockIO does, but for the payload."""
        self.files.index.empty_records(slot, 1)
        self.files.index.withdraw(slice(slot, slot + 1))
        record = pack_record(
            self.files.index.header, key, sequence=1, stored_at=1, payload_checksum=next(self._numbers)
        )
        self.files.index.write_records(slot, record)
        self.keys[slot] = key

    def empty(self, slot: int) -> None:
        self.files.index.write_records(slot, EMPTY_RECORD)
        self.keys.pop(slot, None)

    def reset(self) -> None:
        self.files.index.header = replace(self.files.index.header, generation=next(self._numbers), transient=True)
        self.keys.clear()
        self.is_transient = True
        self.files.index.write_header()

    def restart(self) -> None:
        """Another process opens the seat."""
        self.files.index.write_journal()
        self.files.close()
        self.open()
        if self.is_transient:
            self.is_transient = False
            self.keys.clear()

    def clear(self) -> None:
        """The seat is emptied, and then used again."""
        self.files.close()
        remove_blocks(self.client.storage().child(self.name))
        self.keys.clear()
        self.is_transient = False
        self.open()

    def churn(self) -> None:
        """Changes so much that a follower falls behind."""
        for number in range(NUM_SLOTS * 4):
            for slot in range(NUM_SLOTS):
                self.put(slot, KEYS[(number + slot) % len(KEYS)])
            if number % 2:
                self.files.index.write_journal()


class World:
    """Owners of seats, and a follower, each on a machine of its own."""

    def __init__(self, mounts: list[Mount], max_blocks: int) -> None:
        self.clock = Clock(1000.0)
        self.max_blocks = max_blocks
        server = NfsServer(64 << 20, clock=self.clock)
        numbers = itertools.count(1)
        self.owners = [
            Owner(seat_name(number), server.connect(mounts[number], number), numbers) for number in range(NUM_SEATS)
        ]
        self.client = server.connect(mounts[-1], 9)
        self.blocks = ForeignBlocks(max_blocks)
        self.follower = Follower(
            self.client.storage(), FINGERPRINT, [BLOCK], self.blocks, own="writer-9", clock=self.clock
        )
        self.is_following = False

    def run(self, steps: list[Any]) -> None:
        """Runs the steps in order. Those after a step "follow n" are run within it, one per access, n at most."""
        queue = list(steps)
        while queue:
            step = queue.pop(0)
            if step[0] == "follow":
                inside, queue = queue[: step[1]], queue[step[1] :]
                self.follow(partial(self.do_next, inside))
                queue = inside + queue
            else:
                self.do(step)

    def do_next(self, steps: list[Any]) -> None:
        if steps:
            self.do(steps.pop(0))

    def follow(self, between: Callable[[], None] = lambda: None) -> None:
        if self.is_following:
            return
        self.is_following = True
        self.client.on_pause(between)
        self.follower.follow()
        self.client.on_pause(lambda: None)
        self.is_following = False
        self.check()

    def do(self, step: Any) -> None:
        name, *arguments = step
        if name == "wait":
            self.clock.now += arguments[0]
            for owner in self.owners:
                owner.client.tick()
            return
        if name == "follow":
            return
        owner = self.owners[arguments[0]]
        if name == "put":
            owner.put(arguments[1], KEYS[arguments[2]])
        elif name == "empty":
            owner.empty(arguments[1])
        elif name == "journal":
            owner.files.index.write_journal()
        elif name == "journal, and follow":
            # The follower reads the journal while it is being written.
            owner.client.on_pause(self.follow)
            owner.files.index.write_journal()
            owner.client.on_pause(lambda: None)
        else:
            {"reset": owner.reset, "restart": owner.restart, "clear": owner.clear, "churn": owner.churn}[name]()

    def check(self) -> None:
        assert len(self.blocks) <= self.max_blocks
        self.blocks.check_integrity()

    def settle(self) -> None:
        """Lets everything become known."""
        for owner in self.owners:
            owner.files.index.write_header()
            owner.files.index.write_journal()
        for _ in range(SETTLING_PASSES):
            self.do(("wait", LONG_S))
            self.follow()

    def found(self) -> dict[OffloadKey, tuple[str, int]]:
        """Returns where the follower finds each key."""
        digests = digests_of(KEYS)
        found = {}
        for key, digest, place in zip(KEYS, digests.tolist(), self.blocks.find(digests).tolist(), strict=True):
            if place >= 0:
                located = self.blocks.locate(place, digest)
                assert located is not None, "the table has a place that no view confirms"
                found[key] = (seat_name(located.view.number), located.slot)
        return found


def held(world: World) -> dict[OffloadKey, set[tuple[str, int]]]:
    """Returns where each key may be found, by the model."""
    places: dict[OffloadKey, set[tuple[str, int]]] = {}
    for owner in world.owners:
        for slot, key in {} if owner.is_transient else owner.keys.items():
            places.setdefault(key, set()).add((owner.name, slot))
    return places


seats = st.integers(0, NUM_SEATS - 1)
slots = st.integers(0, NUM_SLOTS - 1)
STEPS = st.one_of(
    st.tuples(st.just("put"), seats, slots, st.integers(0, len(KEYS) - 1)),
    st.tuples(st.just("put"), seats, slots, st.integers(0, len(KEYS) - 1)),
    st.tuples(st.just("empty"), seats, slots),
    st.tuples(st.just("journal"), seats),
    st.tuples(st.just("journal, and follow"), seats),
    st.tuples(st.just("follow"), st.integers(0, 6)),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 1.0, 5.0, 40.0])),
    st.tuples(st.sampled_from(["reset", "restart", "clear", "churn"]), seats),
)
MOUNTS = st.builds(
    Mount,
    attributes_s=st.sampled_from([0.0, 3.0, 60.0]),
    entries_s=st.sampled_from([0.0, 30.0, 60.0]),
    is_direct=st.booleans(),
)


@settings(max_examples=60, derandomize=True)
@example([("put", 0, 1, 1), ("reset", 0), ("put", 0, 2, 2)], [Mount()] * (NUM_SEATS + 1))
@given(st.lists(STEPS, max_size=30), st.lists(MOUNTS, min_size=NUM_SEATS + 1, max_size=NUM_SEATS + 1))
def test_a_follower_ends_up_with_the_indexes(steps: list[Any], mounts: list[Mount]) -> None:
    world = World(mounts, max_blocks=1 << 10)
    world.run(steps)
    world.settle()
    found, expected = world.found(), held(world)
    assert set(found) == set(expected)
    assert all(place in expected[key] for key, place in found.items())


@settings(max_examples=30, derandomize=True)
@given(st.lists(STEPS, max_size=30), st.integers(0, 12))
def test_a_follower_never_has_more_blocks_than_it_may(steps: list[Any], max_blocks: int) -> None:
    world = World([Mount()] * (NUM_SEATS + 1), max_blocks)
    world.run(steps)
    world.settle()
    found, expected = world.found(), held(world)
    assert len(found) <= max_blocks
    assert all(place in expected[key] for key, place in found.items())

"""Random schedules of a bridge against a model, with a tier that fails, hangs, corrupts and evicts; and planted bugs,
which these schedules must find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from kvoffload.abc import IntegrityError, OffloadKey, TierError
from kvoffload.abc.tier import HIT
from kvoffload.tiering.bridge import JobEnd, Page
from kvoffload.tiering.bridge_jobs import BridgeJob, Jobs, RequestChain
from kvoffload.tiering.writes import WriteThrough
from tests.scale import scaled
from tests.sim.memory_tier import StoredBlock
from tests.tiering.bridge_rig import BridgeRig
from tests.tiering.rig import SLOT_BYTES, SharedTier, SpyTier, chain

NUM_PAGES = 96
SCRIBBLE = 0xEE


@dataclass(slots=True)
class Open:
    """A job that has not been reported."""

    is_load: bool
    keys: Sequence[OffloadKey]
    pages: Sequence[int]
    generation: int


@dataclass(slots=True)
class Conversation:
    """A chain that requests make longer."""

    keys: list[OffloadKey]
    request: str
    num_stored: int = 0
    stored: set[OffloadKey] = field(default_factory=set)
    """Keys of finished or open stores since the last reset."""


class Schedule:
    """Calls a bridge at random, plays its thread and its tier, and checks every answer."""

    def __init__(self, seed: int, tier_class: type[SpyTier] = SpyTier) -> None:
        self.random = random = Random(seed)
        self.corrupts = random.random() < 0.5
        """A block that was corrupt is gone, and leaves a hole in the tier until its chain is written again."""
        if tier_class is SpyTier and random.random() < 0.3:
            tier_class = SharedTier
        self.rig = BridgeRig(
            staging=random.choice((4, 8, 24)),
            tier_blocks=random.choice((12, 40, 400)),
            num_pages=NUM_PAGES,
            max_pages=random.choice((16, 1000)),
            num_tiers=random.choice((1, 1, 2)),
            tier_class=tier_class,
            lookup_deadline_ms=50.0,
            load_deadline_ms=200.0,
        )
        self.free = list(range(NUM_PAGES))
        self.jobs: dict[int, Open] = {}
        self.generation = self.num_jobs = self.num_requests = 0
        self.talks = [self._talk(f"t{i}-") for i in range(5)]
        self.num_done: Counter[bool] = Counter()
        """Blocks that were stored, and that were loaded."""
        self.scribble(self.free)

    def _talk(self, name: str) -> Conversation:
        self.num_requests += 1
        return Conversation(chain(name, self.random.randint(1, 30)), f"request {self.num_requests}")

    def scribble(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.rig.foreign.memory[page * SLOT_BYTES : (page + 1) * SLOT_BYTES] = bytes([SCRIBBLE]) * SLOT_BYTES

    def run(self, num_calls: int) -> None:
        calls: list[tuple[int, Callable[[], None]]] = [
            (6, self.store),
            (5, self.load),
            (3, self.look_up),
            (2, self.end),
            (12, self.turn),
            (3, self.pass_time),
            (1, self.trouble),
            (2 * self.corrupts, self.corrupt),
            (1, self.drain_or_reset),
        ]
        weights, functions = zip(*calls, strict=True)
        for _ in range(num_calls):
            self.random.choices(functions, weights)[0]()
            self.take_reports()
        self.calm()
        self.finish()

    # Calls.

    def store(self) -> None:
        talk = self.random.choice(self.talks)
        n = self.random.randint(1, 8)
        keys = talk.keys[talk.num_stored : talk.num_stored + n]
        if self.random.random() < 0.1:
            keys = self.random.sample(talk.keys, min(n, len(talk.keys)))
        if len(keys) > len(self.free) or not keys:
            return
        talk.num_stored = max(talk.num_stored, talk.keys.index(keys[-1]) + 1)
        talk.stored.update(keys)
        job, pages = self._open(False, keys)
        filled = self.rig.foreign.fill(pages, keys, self.generation)
        length = max(map(talk.keys.index, keys)) + 1
        self.rig.bridge.store(job, keys, filled, talk.keys[:length], talk.request)

    def load(self) -> None:
        talk = self.random.choice(self.talks)
        first = self.random.randrange(len(talk.keys))
        keys = talk.keys[first : first + self.random.randint(1, 12)]
        if len(keys) <= len(self.free):
            job, pages = self._open(True, keys)
            self.rig.bridge.load(job, keys, self.rig.foreign.pages(pages), talk.request)

    def _open(self, is_load: bool, keys: Sequence[OffloadKey]) -> tuple[int, Sequence[int]]:
        self.num_jobs += 1
        pages, self.free = self.free[: len(keys)], self.free[len(keys) :]
        self.jobs[self.num_jobs] = Open(is_load, keys, pages, self.generation)
        return self.num_jobs, pages

    def look_up(self) -> None:
        talk = self.random.choice(self.talks)
        states = self.rig.bridge.lookup(talk.keys, talk.keys)
        found = {key for key, state in zip(talk.keys, states.tolist(), strict=True) if state == HIT}
        assert found <= talk.stored, "found what was never stored, or before a reset"

    def end(self) -> None:
        i = self.random.randrange(len(self.talks))
        talk = self.talks[i]
        if self.random.random() < 0.8:
            self.rig.bridge.end_request(talk.request, talk.keys[: talk.num_stored])
        self.num_requests += 1
        if self.random.random() < 0.3:
            self.talks[i] = self._talk(f"n{self.num_requests}-")
        else:
            # The next turn of the conversation; some requests use a name again.
            talk.request = self.random.choice((talk.request, f"request {self.num_requests}"))
            talk.num_stored = self.random.randint(0, talk.num_stored)

    def turn(self) -> None:
        for _ in range(self.random.choice((0, 1, 8))):
            self.rig.executor.tick()
        self.rig.step()

    def pass_time(self) -> None:
        self.rig.clock.now += self.random.choice((0.001, 0.001, 0.02, 0.02, 0.1, 0.1, 0.1, 1.0, 1.0, 20.0))

    def trouble(self) -> None:
        tier = self.random.choice(self.rig.rig.tiers)
        kind = self.random.choice(("fails", "hangs", "unsure", "refuses", "slow", "calm", "calm", "calm"))
        if kind == "fails":
            tier.fails = TierError.IO
        elif kind == "hangs" and tier.blocks:
            tier.hanging[self.random.choice(list(tier.blocks))] = self.random.choice((0.3, 30.0))
        elif kind == "refuses":
            tier.refuses = True
        elif kind == "unsure":
            tier.unsure = tier.is_shared
        elif kind == "slow":
            tier.most_writes = 1
        else:
            self.calm()

    def corrupt(self) -> None:
        for tier in self.rig.rig.tiers:
            held = [each for each in tier.blocks.values() if each.ready and each.raw]
            for each in self.random.sample(held, min(2, len(held))):
                each.raw[0][self.random.randrange(SLOT_BYTES)] ^= 1

    def calm(self) -> None:
        for tier in self.rig.rig.tiers:
            tier.fails, tier.unsure, tier.refuses, tier.most_writes = None, False, False, 1 << 30
            tier.hanging.clear()

    def drain_or_reset(self) -> None:
        kind = self.random.random()
        if kind < 0.2:
            self.rig.bridge.reset()
            self.generation += 1
            for talk in self.talks:
                talk.stored.clear()
                talk.num_stored = 0
        elif kind < 0.6:
            self.rig.bridge._jobs.stop()
        else:
            return
        self.take_reports()
        assert not self.jobs, "a drained job is not reported"

    # Checks.

    def take_reports(self) -> None:
        for end in self.rig.bridge.finished():
            self.take(end, self.jobs.pop(end.job))

    def take(self, end: JobEnd, job: Open) -> None:
        assert end.is_load == job.is_load
        assert end.done <= set(job.keys)
        assert end.ok == (end.done == set(job.keys))
        self.num_done[job.is_load] += len(end.done)
        foreign = self.rig.foreign
        for page, key in zip(job.pages, job.keys, strict=True):
            if not job.is_load:
                assert foreign.holds(page, key, job.generation), "a page of a store has changed"
            elif key in end.done:
                assert foreign.holds(page, key, job.generation), "wrong bytes"
        self.scribble(job.pages)
        self.free += job.pages

    def finish(self) -> None:
        """Ends everything, and checks what is left."""
        bridge, rig = self.rig.bridge, self.rig
        for talk in self.talks:
            bridge.end_request(talk.request, talk.keys[: talk.num_stored])
        for _ in range(100):
            rig.clock.now += 5.0
            rig.executor.drain()
            rig.step(3)
            self.take_reports()
        assert not self.jobs, "jobs that never end"
        assert bridge.is_idle
        assert rig.foreign.memory[:] == bytes([SCRIBBLE]) * (NUM_PAGES * SLOT_BYTES), "a page was touched after its job"
        assert rig.rig.host.num_available_blocks == rig.rig.host.num_blocks, "a pin is left"
        if not self.corrupts and not self.generation:
            for tier in rig.rig.tiers:
                for talk in self.talks:
                    found = (tier.contains(rig.name(talk.keys)) == HIT).tolist()
                    assert found == sorted(found, reverse=True), "a block behind a hole"
        bridge.close()
        rig.foreign.close()


def run(seed: int, tier_class: type[SpyTier] = SpyTier, num_calls: int = 250) -> Counter[bool]:
    schedule = Schedule(seed, tier_class)
    schedule.run(num_calls)
    return schedule.num_done


def test_random_schedules() -> None:
    done: Counter[bool] = Counter()
    for seed in range(scaled(20)):
        try:
            done += run(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
    assert done[False] > 400
    assert done[True] > 100


class Unverified(SpyTier):
    """Does not verify what it reads."""

    def read_block(self, key: OffloadKey, slot: int, block: StoredBlock) -> None:
        for pool, raw in zip(self.pools, block.raw, strict=True):
            pool[slot] = raw
        self._end(key, True, None, self.clock(), block)


def copies_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a bug: a block is copied when the next one is, after its job was reported."""
    late: list[Callable[[], int]] = []
    copy = Jobs.copy

    def copy_late(self: Jobs, job: BridgeJob, indices: Sequence[int], slots: Sequence[int]) -> int:
        pages = job.pages

        def copy_now() -> int:
            again = BridgeJob(None, job.keys, pages, b"", 0.0, 0.0, job.chain, False)
            return copy(self, again, indices, slots)

        late.append(copy_now)
        if len(late) > 1:
            late.pop(0)()
        return len(indices)

    monkeypatch.setattr(Jobs, "copy", copy_late)


def keeps_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a bug: the pages of the last job are referred to."""
    kept: list[Sequence[Page]] = []
    submit = Jobs.submit

    def keep(self: Jobs, entry: BridgeJob | RequestChain) -> None:
        if isinstance(entry, BridgeJob):
            kept[:] = [entry.pages]
        submit(self, entry)

    monkeypatch.setattr(Jobs, "submit", keep)


def offers_without_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a bug: chains are offered as if they began with their second block."""
    offer = WriteThrough.offer

    def offer_tail(self: WriteThrough, keys: Sequence[OffloadKey], *how: Any, **also: Any) -> None:
        offer(self, keys[1:], *how, **also)

    monkeypatch.setattr(WriteThrough, "offer", offer_tail)


def releases_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plants a bug: pages are given back while the job is under way."""
    copy = Jobs.copy

    def copy_once_more(self: Jobs, job: BridgeJob, indices: Sequence[int], slots: Sequence[int]) -> int:
        num_copied = copy(self, job, indices, slots)
        self.settle(job, range(len(job.keys)), True)
        return num_copied

    monkeypatch.setattr(Jobs, "copy", copy_once_more)


def finds_bug(plant: Callable[[], type[SpyTier]], seeds: Sequence[int]) -> bool:
    for seed in seeds:
        try:
            run(seed, plant())
        except (AssertionError, BufferError, IntegrityError, KeyError):
            return True
    return False


@pytest.mark.parametrize("plant", [copies_late, keeps_pages, offers_without_heads, releases_too_early])
def test_planted_bugs_are_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert finds_bug(lambda: SpyTier, range(20))


def test_a_tier_that_verifies_nothing_is_found() -> None:
    assert finds_bug(lambda: Unverified, [4, *range(40)])

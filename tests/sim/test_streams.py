"""The simulated device finds races in small programs, and nothing in programs that order their work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import ByteArray, PageGroup
from tests.sim.races import DeviceFault, Race, Ranges
from tests.sim.streams import SimulatedDevice, Timing

BLOCKS, PAGE, LAYERS = 6, 12, 2
ROW = LAYERS * PAGE


def copy(device: SimulatedDevice, stream: Any, to: list[int], of: list[int], sizes: list[int]) -> None:
    device.copy(stream, *(np.array(each, dtype=np.int64) for each in (to, of, sizes)))


class Bench:
    """A device with one page group, staging memory, pinned memory and a pool, and one stream beside the engine's."""

    def __init__(self, seed: int, timing: Timing | None = None, num_registered: int = 8 * ROW) -> None:
        self.kv: ByteArray = np.random.default_rng(seed).integers(0, 256, (LAYERS, BLOCKS, PAGE)).astype(np.uint8)
        self.pool: ByteArray = np.zeros((8, ROW), np.uint8)
        self.device = device = SimulatedDevice([PageGroup(list(self.kv))], seed, timing)
        device.add_memory("the KV cache", self.kv)
        device.add_host("the pool", self.pool, lambda: num_registered)
        self.staging = device.allocate(1024)
        self.pinned = device.allocate_host(64)
        self.stream, self.event = device.new_stream(), device.new_event()
        self.pool_at = int(self.pool.ctypes.data)

    def store(self, blocks: list[int]) -> None:
        self.device.gather(self.stream, 0, np.array(blocks), self.staging)
        copy(self.device, self.stream, [self.pool_at], [self.staging], [len(blocks) * ROW])
        self.device.record(self.event, self.stream)

    def compute(self, value: int) -> None:
        """Writes all pages on the engine's stream."""

        def steps() -> Iterator[None]:
            self.kv[:] = value
            yield

        ranges = Ranges.of([int(self.kv.ctypes.data)], self.kv.nbytes)
        self.device.launch(self.device.engine_stream(), "a forward pass", steps(), Ranges.none(), ranges)

    def read_pool(self) -> None:
        self.device.touch_host(Ranges.of([self.pool_at], 3 * ROW), "a reader")


def with_order(bench: Bench) -> None:
    device, engine, computed = bench.device, bench.device.engine_stream(), bench.device.new_event()
    for value in (1, 2, 3):
        bench.compute(value)
        device.record(computed, engine)
        device.wait(bench.stream, computed)
        bench.store([4, 0, 3])
        device.wait(engine, bench.event)
        device.sleep_until_done(bench.event)
        bench.read_pool()
        assert (bench.pool[:3] == value).all()
        assert (bench.pool[3:] == 0).all()
    assert device.seconds_between(computed, bench.event) > 0


def no_wait_for_the_engine(bench: Bench) -> None:
    bench.compute(1)
    bench.store([1])


def no_fence(bench: Bench) -> None:
    bench.store([1])
    bench.compute(1)


def read_before_it_is_done(bench: Bench) -> None:
    bench.store([1])
    bench.read_pool()


def pinned_memory_overwritten(bench: Bench) -> None:
    for value in (1, 2):
        bench.pinned[:] = value
        copy(bench.device, bench.stream, [bench.staging], [int(bench.pinned.ctypes.data)], [64])


def staging_shared_between_streams(bench: Bench) -> None:
    bench.store([1])
    device, other = bench.device, bench.device.new_stream()
    copy(device, other, [bench.staging], [bench.pool_at], [ROW])


def event_recorded_too_early(bench: Bench) -> None:
    device, engine, computed = bench.device, bench.device.engine_stream(), bench.device.new_event()
    device.record(computed, engine)
    bench.compute(1)
    device.wait(bench.stream, computed)
    bench.store([1])


def event_recorded_again_before_its_wait(bench: Bench) -> None:
    """The wait is for the point that was recorded when it was called, which is too early."""
    device, engine, computed = bench.device, bench.device.engine_stream(), bench.device.new_event()
    device.record(computed, engine)
    device.wait(bench.stream, computed)
    bench.compute(1)
    device.record(computed, engine)
    bench.store([1])


RACES = [
    no_wait_for_the_engine,
    no_fence,
    read_before_it_is_done,
    pinned_memory_overwritten,
    staging_shared_between_streams,
    event_recorded_too_early,
    event_recorded_again_before_its_wait,
]


def run(program: Callable[[Bench], None], seed: int, timing: Timing | None = None) -> None:
    bench = Bench(seed, timing)
    program(bench)
    bench.device.finish()
    bench.device.check()
    bench.device.close()


@pytest.mark.parametrize("seed", range(60))
def test_work_in_order_is_accepted(seed: int) -> None:
    run(with_order, seed)


@pytest.mark.parametrize("timing", Timing)
@pytest.mark.parametrize("program", RACES)
def test_a_race_is_found_whenever_the_work_runs(program: Callable[[Bench], None], timing: Timing) -> None:
    for seed in range(10):
        with pytest.raises(Race):
            run(program, seed, timing)


@pytest.mark.parametrize("timing", [Timing.LATEST, Timing.RANDOM])
def test_bytes_are_wrong_without_a_wait(timing: Timing) -> None:
    """What the clocks find does happen: the pool has bytes from before the forward pass."""

    def is_wrong(seed: int) -> bool:
        bench = Bench(seed, timing)
        bench.compute(1)
        bench.store([1])
        bench.device.sleep_until_done(bench.event)
        return bool((bench.pool[0] != 1).any())

    assert any(map(is_wrong, range(20)))


def test_copies_are_torn() -> None:
    def is_torn(seed: int) -> bool:
        bench = Bench(seed, Timing.RANDOM)
        bench.store([1, 2, 3])
        for _ in range(100):
            written = (bench.pool[:3] != 0).mean()
            if 0.1 < written < 0.9:
                return True
            bench.device.tick()
        return False

    assert any(map(is_torn, range(20)))


def unregistered(bench: Bench) -> None:
    copy(bench.device, bench.stream, [bench.staging], [bench.pool_at + 8 * ROW - 1], [2])


def nowhere(bench: Bench) -> None:
    copy(bench.device, bench.stream, [bench.staging], [64], [8])


def within_the_device(bench: Bench) -> None:
    copy(bench.device, bench.stream, [bench.staging], [bench.staging + 512], [8])


def twice(bench: Bench) -> None:
    bench.device.gather(bench.stream, 0, np.array([3]), bench.staging)
    copy(bench.device, bench.stream, [bench.pool_at, bench.pool_at + 4], [bench.staging] * 2, [8, 8])


def never_written(bench: Bench) -> None:
    copy(bench.device, bench.stream, [bench.pool_at], [bench.staging], [8])


def no_such_block(bench: Bench) -> None:
    bench.store([BLOCKS])


def scatter_twice_to_a_block(bench: Bench) -> None:
    copy(bench.device, bench.stream, [bench.staging], [bench.pool_at], [2 * ROW])
    bench.device.scatter(bench.stream, 0, np.array([2, 2]), bench.staging)


def not_aligned(bench: Bench) -> None:
    bench.device.gather(bench.stream, 0, np.array([1]), bench.staging + 8)


def time_of_what_has_not_happened(bench: Bench) -> None:
    bench.device.seconds_between(bench.event, bench.event)


@pytest.mark.parametrize(
    "program",
    [
        unregistered,
        nowhere,
        within_the_device,
        twice,
        never_written,
        no_such_block,
        scatter_twice_to_a_block,
        not_aligned,
        time_of_what_has_not_happened,
    ],
)
def test_misuse_is_found(program: Callable[[Bench], None]) -> None:
    with pytest.raises(DeviceFault):
        run(program, 0)


def test_a_full_launch_queue_blocks_until_work_has_run() -> None:
    bench = Bench(0, Timing.LATEST)
    for value in range(1, 2000):
        bench.compute(value % 256)
    assert bench.device.now > 900


def test_work_runs_as_early_or_as_late_as_possible() -> None:
    early, late = Bench(0, Timing.EARLIEST), Bench(0, Timing.LATEST)
    for bench in (early, late):
        bench.store([1])
    assert early.device.is_done(early.event)
    assert late.device.now == 0
    late.device.sleep_until_done(late.event)
    assert np.array_equal(early.pool, late.pool)

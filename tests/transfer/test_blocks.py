"""BlockCopier: the native version copies the same bytes as the plain one, and refuses the same arguments."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvoffload.abc import ByteArray, DeviceSpec, LoadStoreSpec, PageGroup, TransferSpec
from kvoffload.native import load
from kvoffload.transfer import blocks
from kvoffload.transfer.blocks import BlockCopier, PlainBlockCopier
from kvoffload.transfer.copies import Numbers, copy_lists

needs_native = pytest.mark.skipif(load("_copies") is None, reason="there is no native code here")
COPIERS = [PlainBlockCopier, pytest.param(BlockCopier, marks=needs_native)]
PAGE_BYTES = [1, 3, 64, 65, 1000, 2047, 2048, 2049, 2111, 2112, 2303, 4096, 4097, 8192, 10_001]
"""From 2,048 on, pages are copied past the processor's caches."""

Copy = Callable[[Numbers, Numbers, Numbers, bool], object]


def numbers(values: Sequence[int]) -> Numbers:
    return np.array(values, dtype=np.int64)


@dataclass
class Memory:
    """The memory of a device and of a pool, with the views of both."""

    device: list[ByteArray]
    pool: ByteArray
    views: list[ByteArray]
    host: ByteArray
    offsets: list[int]
    """Where a row has the page of each view."""

    def contents(self) -> list[bytes]:
        """Returns all bytes, also those between pages and slots."""
        return [memory.tobytes() for memory in (*self.device, self.pool)]


@dataclass(frozen=True)
class Layout:
    """How many layers of which page size lie how far apart in one allocation, for each of several allocations."""

    allocations: tuple[tuple[int, int, int, bool], ...]
    """Layers, page bytes, bytes between pages, and whether the layers of a block are next to each other."""
    num_blocks: int
    num_slots: int
    factor: int
    shift: int
    """Bytes before the first page and the first slot."""
    gaps: tuple[int, ...] | None = None
    """For each allocation, the bytes in a row before each of its pages and after the last: the layers of a gap of 0 are
    beside one another there too. Its pages come before those of the allocations before it. None: the pages fill a row
    in the order of the layers."""

    def memory(self, seed: int = 0) -> Memory:
        rng = np.random.default_rng(seed)
        device, views = [], []
        for layers, page_bytes, gap, blocks_first in self.allocations:
            pitch = page_bytes + gap
            memory = rng.integers(0, 256, self.shift + layers * self.num_blocks * pitch, dtype=np.uint8)
            pages = memory[self.shift :].reshape(-1, pitch)[:, :page_bytes]
            device.append(memory)
            each = [
                slice(i, None, layers) if blocks_first else slice(i * self.num_blocks, (i + 1) * self.num_blocks)
                for i in range(layers)
            ]
            views += [pages[layer] for layer in each]
        offsets, size = (
            list(accumulate((view.shape[1] for view in views), initial=0))[:-1],
            sum(view.shape[1] for view in views),
        )
        if self.gaps is not None:
            offsets, size = [], 0
            for (layers, page_bytes, _, _), gap in zip(self.allocations[::-1], self.gaps[::-1], strict=True):
                offsets = [size + gap + i * (page_bytes + gap) for i in range(layers)] + offsets
                size += layers * (page_bytes + gap) + gap
        pitch = size * self.factor + self.shift
        pool = rng.integers(0, 256, self.shift + self.num_slots * pitch, dtype=np.uint8)
        slots = pool[self.shift :].reshape(self.num_slots, pitch)[:, : size * self.factor]
        return Memory(device, pool, views, slots.reshape(self.num_slots, self.factor, size), offsets)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    allocation = st.tuples(
        st.integers(1, 10), st.sampled_from(PAGE_BYTES), st.sampled_from([0, 0, 1, 40]), st.booleans()
    )
    allocations = tuple(draw(st.lists(allocation, min_size=1, max_size=3)))
    gaps = st.tuples(*[st.sampled_from([0, 1, 40, 600])] * len(allocations))
    return Layout(
        allocations,
        num_blocks=draw(st.integers(1, 20)),
        num_slots=draw(st.integers(1, 8)),
        factor=draw(st.integers(1, 4)),
        shift=draw(st.integers(0, 70)),
        gaps=draw(st.none() | gaps),
    )


@st.composite
def jobs(draw: st.DrawFn, layout: Layout) -> tuple[Numbers, Numbers, Numbers]:
    """Device blocks, and the places that they are copied to or from; none occurs twice."""
    places = draw(st.permutations(range(layout.num_slots * layout.factor)))
    device_blocks = draw(st.permutations(range(layout.num_blocks)))
    n = draw(st.integers(0, min(len(places), len(device_blocks))))
    chosen = numbers(places[:n])
    return numbers(device_blocks[:n]), chosen // layout.factor, chosen % layout.factor


def copier_of(memory: Memory, make: type[PlainBlockCopier] = PlainBlockCopier) -> Any:
    return make(memory.views, memory.host, memory.offsets)


def same_as_plain(layout: Layout, job: tuple[Numbers, Numbers, Numbers], make_copy: Callable[[Memory], Copy]) -> bool:
    """Whether a copy leaves all memory as the plain copier does, in both directions."""
    same = True
    for is_store in (True, False):
        wanted, found = layout.memory(), layout.memory()
        copier_of(wanted).copy(*job, is_store)
        make_copy(found)(*job, is_store)
        same = same and wanted.contents() == found.contents()
    return same


def native_copy(use_two_threads: bool = False) -> Callable[[Memory], Copy]:
    native: Any = load("_copies")

    def make(memory: Memory) -> Copy:
        copier = copier_of(memory, native.BlockCopier)
        return lambda *job: copier.copy_rows(*job, use_two_threads)

    return make


@needs_native
@settings(max_examples=150)
@given(st.data(), layouts())
def test_native_copies_are_those_of_the_plain_version(data: st.DataObject, layout: Layout) -> None:
    assert same_as_plain(layout, data.draw(jobs(layout)), native_copy())


LARGE = Layout(((3, 1 << 20, 0, False), (2, (64 << 10) + 1, 7, True)), num_blocks=9, num_slots=3, factor=3, shift=5)
LARGE_JOB = numbers([8, 1, 0, 7, 2, 6]), numbers([2, 2, 2, 0, 0, 1]), numbers([0, 1, 2, 0, 2, 1])


@needs_native
def test_two_threads_copy_many_small_pages() -> None:
    layout = Layout(((5, 3000, 8, False), (1, 100, 0, False)), num_blocks=600, num_slots=300, factor=2, shift=3)
    places = np.random.default_rng(0).permutation(600)
    job = np.random.default_rng(1).permutation(600), places // 2, places % 2
    assert same_as_plain(layout, job, native_copy(use_two_threads=True))


@needs_native
@pytest.mark.parametrize("fault", ["block", "slot", "part", "short", "swapped", "place"])
def test_the_comparison_finds_a_copy_that_is_wrong_in_one_place(fault: str) -> None:
    """The negative control of the comparisons above."""
    layout = Layout(((2, 2049, 3, False), (1, 64, 0, True)), num_blocks=8, num_slots=4, factor=2, shift=1, gaps=(5, 0))
    job = numbers([5, 0, 3]), numbers([1, 2, 2]), numbers([1, 0, 1])

    def make(memory: Memory) -> Copy:
        if fault == "place":
            memory.offsets = [at + 1 for at in memory.offsets]
        right = native_copy()(memory)

        def copy(device_blocks: Numbers, slots: Numbers, parts: Numbers, is_store: bool) -> None:
            last = numbers([0, 0, 1])
            if fault == "block":
                device_blocks = device_blocks + last
            elif fault == "slot":
                slots = slots + last
            elif fault == "part":
                parts = parts - last
            elif fault == "short":
                device_blocks, slots, parts = device_blocks[:-1], slots[:-1], parts[:-1]
            elif fault == "swapped":
                is_store = not is_store
            right(device_blocks, slots, parts, is_store)

        return copy

    assert same_as_plain(layout, job, native_copy())
    assert not same_as_plain(layout, job, make)


@settings(max_examples=100)
@given(st.data(), layouts(), st.booleans())
def test_plain_copies_are_those_by_hand(data: st.DataObject, layout: Layout, is_store: bool) -> None:
    """All other bytes remain as they were, also those of a row in which no page is."""
    job = data.draw(jobs(layout))
    found, wanted = layout.memory(), layout.memory()
    copier_of(found).copy(*job, is_store)
    for block, slot, part in zip(*job, strict=True):
        for view, at in zip(wanted.views, wanted.offsets, strict=True):
            place = wanted.host[slot, part, at : at + view.shape[1]]
            to, of = (place, view[block]) if is_store else (view[block], place)
            to[:] = of
    assert found.contents() == wanted.contents()


# Arguments.

SMALL = Layout(((2, 600, 0, False),), num_blocks=4, num_slots=3, factor=2, shift=0)


@pytest.mark.parametrize("is_store", [True, False])
@pytest.mark.parametrize(
    "job",
    [([1, 4], [0, 1], [0, 0]), ([1, -1], [0, 1], [0, 0]), ([1, 2], [0, 3], [0, 0]), ([1, 2], [0, -1], [0, 0])]
    + [([1, 2], [0, 1], [0, 2]), ([1, 2], [0, 1], [0, -1]), ([1, 1 << 62], [0, 1], [0, 1])]
    + [([1, 2], [0], [0, 0]), ([1], [0], [0, 0]), ([], [0], [0])],
)
@pytest.mark.parametrize("make", COPIERS)
def test_a_job_that_is_not_possible_is_refused_before_anything_is_copied(
    make: type[PlainBlockCopier], job: tuple[list[int], list[int], list[int]], is_store: bool
) -> None:
    memory = SMALL.memory()
    before = memory.contents()
    with pytest.raises(IndexError if len(set(map(len, job))) == 1 else ValueError):
        copier_of(memory, make).copy(numbers(job[0]), numbers(job[1]), numbers(job[2]), is_store)
    assert memory.contents() == before


@needs_native
def test_numbers_of_another_type_are_refused() -> None:
    memory = SMALL.memory()
    copier = copier_of(memory, BlockCopier)
    good = numbers([1])
    for bad in (good.astype(np.int32), good.astype(np.float64), [1], None):
        for job in ((bad, good, good), (good, bad, good), (good, good, bad)):
            with pytest.raises(TypeError):
                copier.copy(*job, True)


@pytest.mark.parametrize("make", COPIERS)
def test_memory_of_another_shape_is_refused(make: type[PlainBlockCopier]) -> None:
    view, host = np.zeros((4, 16), dtype=np.uint8), np.zeros((3, 2, 16), dtype=np.uint8)
    make([view], host, [0])
    for bad_views, bad_host in (
        ([view], host[:, :, :15]),
        ([view, np.zeros((5, 0), dtype=np.uint8)], host),
        ([view[0]], host),
        ([view], host[0]),
        ([np.zeros((4, 32), dtype=np.uint8)[:, ::2]], host),
        ([view], np.zeros((3, 2, 32), dtype=np.uint8)[:, :, ::2]),
    ):
        with pytest.raises(ValueError):
            make(bad_views, bad_host, [0] * len(bad_views))
    with pytest.raises(TypeError):
        make([view.astype(np.int16)], host, [0])
    with pytest.raises(TypeError):
        make([view], host.astype(np.int8), [0])


@pytest.mark.parametrize("offsets", [*([0, at] for at in (-1, 25, 1 << 40, 1 << 70)), [0], []])
@pytest.mark.parametrize("make", COPIERS)
def test_places_that_are_not_in_a_row_are_refused(make: type[PlainBlockCopier], offsets: list[int]) -> None:
    views, host = [np.zeros((4, 8), np.uint8) for _ in range(2)], np.zeros((3, 2, 32), np.uint8)
    make(views, host, [0, 24])
    with pytest.raises(ValueError):
        make(views, host, offsets)


@pytest.mark.parametrize("is_store", [True, False])
@pytest.mark.parametrize("make", COPIERS)
def test_read_only_memory_is_not_written_to(make: type[PlainBlockCopier], is_store: bool) -> None:
    memory = SMALL.memory()
    for array in [memory.host] if is_store else memory.views:
        array.flags.writeable = False
    copier = copier_of(memory, make)
    copier.copy(numbers([1]), numbers([2]), numbers([0]), not is_store)
    before = memory.contents()
    with pytest.raises(ValueError):
        copier.copy(numbers([1]), numbers([2]), numbers([0]), is_store)
    assert memory.contents() == before


# Threads.


@needs_native
@pytest.mark.skipif(platform.machine() != "x86_64", reason="only this processor's copies bypass the caches")
def test_stores_that_bypass_the_caches_are_fenced() -> None:
    """No copy can show this: what ends a thread is a fence by chance. So the instruction must be there."""
    native: Any = load("_copies")
    assert b"\x0f\xae\xf8" in Path(native.__file__).read_bytes(), "there is no SFENCE in the compiled code"


def large_copier() -> tuple[Any, tuple[Numbers, Numbers, Numbers]]:
    return copier_of(LARGE.memory(), BlockCopier), LARGE_JOB


@pytest.fixture
def one_processor() -> Iterator[None]:
    """Lets the calling thread run on one processor only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@needs_native
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one processor")
def test_a_large_job_is_copied_by_two_threads_of_which_one_ends_with_it() -> None:
    copier, job = large_copier()
    before = set(os.listdir("/proc/self/task"))
    assert copier.copy_rows(*job, True, True) == 2
    end = time.monotonic() + 60
    # The kernel removes the entry of a thread a little after it has ended.
    while not set(os.listdir("/proc/self/task")) <= before:
        assert time.monotonic() < end, "the thread is still there"
        time.sleep(0.001)
    assert copier.copy_rows(*job, True, False) == 1


@needs_native
def test_a_thread_that_may_use_one_processor_copies_alone(one_processor: None) -> None:
    copier, job = large_copier()
    assert copier.copy_rows(*job, True, True) == 1


@needs_native
def test_the_size_of_a_job_decides_about_the_second_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    copier = copier_of(SMALL.memory(), BlockCopier)
    assert copier.copy_rows(numbers([1, 2]), numbers([1, 1]), numbers([0, 1]), True, True) == 1
    modes = []
    monkeypatch.setattr(type(copier), "copy_rows", lambda self, *arguments: modes.append(arguments[-1]))
    monkeypatch.setattr(blocks, "TWO_THREADS_BYTES", 3 * 1200)
    for n in (2, 3):
        copier.copy(numbers(range(n)), numbers([0] * n), numbers([0] * n), True)
    assert modes == [False, True]


@needs_native
def test_a_forked_process_copies_too() -> None:
    copier, job = large_copier()
    copier.copy_rows(*job, True, True)
    pid = os.fork()
    if pid == 0:
        ok = False
        try:
            ok = same_as_plain(LARGE, LARGE_JOB, native_copy(use_two_threads=True))
            copier.copy_rows(*job, True, True)
        finally:
            os._exit(0 if ok else 1)
    assert os.waitpid(pid, 0)[1] == 0


def other_thread_runs_during(call: Callable[[], object], attempts_s: float) -> bool:
    """Whether another thread of Python gets its turn while this one does nothing but ``call``, again and again."""
    gate, ran = threading.Lock(), []
    gate.acquire()

    def other() -> None:
        with gate:
            ran.append(True)

    thread = threading.Thread(target=other)
    before = sys.getswitchinterval()
    thread.start()
    # From here on, a thread that does not give Python's lock away keeps it.
    sys.setswitchinterval(1000)
    try:
        gate.release()
        end = time.monotonic() + attempts_s
        while not ran and time.monotonic() < end:
            call()
        return bool(ran)
    finally:
        sys.setswitchinterval(before)
        thread.join()


@needs_native
def test_other_threads_of_python_run_during_a_copy() -> None:
    copier, job = large_copier()
    assert other_thread_runs_during(lambda: copier.copy(*job, True), attempts_s=60)
    assert not other_thread_runs_during(lambda: sum(range(1000)), attempts_s=0.1), "the test finds a lock that is kept"


# The copies of a job: those of a count one by one, or an error.

FACTORS = (1, 3, 2)
NUM_BLOCKS = (20, 0, 9)
"""The rank has no layer of the second group."""
NUM_SLOTS = 12


@st.composite
def specs(draw: st.DrawFn) -> TransferSpec:
    """Returns a job, which often is possible."""
    parts = draw(st.tuples(*(st.tuples(st.integers(0, 5), st.integers(0, 7)) for _ in FACTORS)))
    sizes, firsts = tuple(size for size, _ in parts), tuple(first for _, first in parts)
    if draw(st.integers(0, 9)) == 0:
        sizes = sizes[:-1]
    blocks = [draw(st.integers(0, NUM_BLOCKS[g] or 99)) for g, size in enumerate(sizes) for _ in range(size)]
    needed = sum(
        -(-(first % factor + size) // factor)
        for size, first, factor in zip(sizes, firsts, FACTORS, strict=False)
        if size
    )
    num_slots = needed + (draw(st.integers(-1, 1)) if draw(st.integers(0, 9)) == 0 else 0)
    slots = draw(st.lists(st.integers(0, NUM_SLOTS), min_size=max(num_slots, 0), max_size=max(num_slots, 0)))
    device = DeviceSpec(np.array(blocks, dtype=np.int64), sizes, firsts)
    return TransferSpec("r", LoadStoreSpec("CPU", np.array(slots, dtype=np.int64)), device)


def rows_of(spec: TransferSpec) -> list[tuple[int, int, int, int]] | None:
    """Returns group, device block, slot and part of each copy, one by one; None if the job is not possible."""
    device, slots, blocks = spec.device, spec.host.slots.tolist(), spec.device.block_ids.tolist()
    if len(device.group_sizes) != len(FACTORS):
        return None
    rows, used, taken = [], 0, 0
    for g, (size, first, factor) in enumerate(zip(device.group_sizes, device.block_indices, FACTORS, strict=True)):
        for i in range(size):
            at = used + (first % factor + i) // factor
            if at >= len(slots):
                return None
            if NUM_BLOCKS[g]:
                if not (0 <= blocks[taken] < NUM_BLOCKS[g] and 0 <= slots[at] < NUM_SLOTS):
                    return None
                rows.append((g, blocks[taken], slots[at], (first % factor + i) % factor))
            taken += 1
        used += -(-(first % factor + size) // factor) if size else 0
    return rows if (used, taken) == (len(slots), len(blocks)) else None


GROUPS = [
    PageGroup([np.zeros((n, 8), np.uint8)] if n else [], factor) for factor, n in zip(FACTORS, NUM_BLOCKS, strict=True)
]


def lists_of(spec: TransferSpec) -> list[tuple[int, int, int, int]] | None:
    """Returns what ``copy_lists`` makes of a job, as ``rows_of`` does."""
    try:
        lists = copy_lists(spec, GROUPS, NUM_SLOTS)
    except ValueError:
        return None
    return [
        (copies.group, *row)
        for copies in lists
        for row in zip(copies.device_blocks.tolist(), copies.slots.tolist(), copies.parts.tolist(), strict=True)
    ]


@given(specs())
def test_a_job_has_the_copies_of_a_count_one_by_one_or_an_error(spec: TransferSpec) -> None:
    assert lists_of(spec) == rows_of(spec)

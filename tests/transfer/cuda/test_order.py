"""The order of copies: faults in the waits, events and answers between the native loop and the driver are found.

Trials over the emulated driver find them by wrong bytes.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload.abc import ByteArray, PageGroup
from kvoffload.host.registration import Registration
from kvoffload.native import load
from kvoffload.transfer.copies import Numbers
from kvoffload.transfer.cuda import native_loop
from kvoffload.transfer.cuda.cuda_device import CudaDevice
from kvoffload.transfer.cuda.pages import PageTable, page_table
from kvoffload.transfer.cuda.transfer import CudaTransfer
from tests.transfer.cuda.calls import NOT_READY, SUCCESS, WrappedDevice
from tests.transfer.cuda.emulator import trials
from tests.transfer.cuda.emulator.trials import FailsOnce, Fault, Trial
from tests.transfer.cuda.test_emulator import UncheckedDevice, trials_until_caught

pytestmark = pytest.mark.skipif(load("_transfer") is None, reason="needs native code")


class Role(enum.Enum):
    """What a stream is for."""

    ENGINE = enum.auto()
    SCATTERS = enum.auto()
    LOADS = enum.auto()
    GATHERS = enum.auto()
    STORES = enum.auto()


ENGINE, SCATTERS, LOADS, GATHERS, STORES = Role
LANES = tuple(
    (role, is_fence) for pair in ((SCATTERS, LOADS), (GATHERS, STORES)) for is_fence in (False, True) for role in pair
)
"""The loop's streams in the order in which it makes them: what each is for, and whether for the rows of fences."""


class Watched(WrappedDevice):
    """Learns what streams are for. An event may stand for another one, which was recorded at another point."""

    def __init__(self, inner: CudaDevice) -> None:
        super().__init__(inner)
        self.random = Random(0)
        self.roles = {inner.engine_stream(): ENGINE}
        """By stream."""
        self.of_fences: set[int] = set()
        """Streams for the rows of fences."""
        self.recorded_on: dict[int, int] = {}
        """By event."""
        self.stands_for: dict[int, int] = {}

    def new_stream(self) -> int:
        stream = super().new_stream()
        self.roles[stream], of_fences = LANES[len(self.roles) - 1]
        if of_fences:
            self.of_fences.add(stream)
        return stream

    def record(self, event: int, stream: int) -> int:
        self.recorded_on[event] = stream
        return super().record(event, stream)

    def wait(self, stream: int, event: int, flags: int = 0) -> int:
        return super().wait(stream, self.stands_for.get(event, event))

    def query(self, event: int) -> int:
        return super().query(self.stands_for.get(event, event))

    def elapsed(self, milliseconds: Any, start: int, end: int) -> int:
        milliseconds[0] = 1e-3
        return SUCCESS


def planted(
    kind: Callable[[CudaDevice], CudaDevice],
) -> Callable[[Sequence[PageTable], Callable[[], int], str], CudaDevice]:
    return lambda *arguments: kind(UncheckedDevice()(*arguments))


class DropsWaits(Watched):
    """Streams of one kind do not wait for those of another, in the lane of fences or in the other one."""

    def __init__(self, inner: CudaDevice, streams: tuple[Role, Role], of_fences: bool) -> None:
        super().__init__(inner)
        self._dropped = streams
        self._of_fences = of_fences

    def wait(self, stream: int, event: int, flags: int = 0) -> int:
        on = self.recorded_on[event]
        is_of_fences = not self.of_fences.isdisjoint((stream, on))
        if (self.roles[stream], self.roles[on]) == self._dropped and is_of_fences is self._of_fences:
            return SUCCESS
        return super().wait(stream, event)


WAITS = {
    (SCATTERS, LOADS): (0, 0),
    (STORES, GATHERS): (0, 0),
    (SCATTERS, ENGINE): (0, 341),
    (LOADS, ENGINE): (0, 0),
    (GATHERS, ENGINE): (0, 0),
    (STORES, ENGINE): (0, 0),
    (ENGINE, SCATTERS): (0, 0),
    (ENGINE, LOADS): (0, 0),
    (ENGINE, GATHERS): (263, 0),
    (ENGINE, STORES): (0, 0),
    # Staging memory that is used again. Each chunk of the ordinary lane has its own until it has ended.
    (LOADS, SCATTERS): (None, 0),
    (GATHERS, STORES): (None, 0),
}
"""Which streams wait for which, and the first trial to run without these waits, in the ordinary lane and in that of
fences. None: there are no such waits."""
CASES = [
    pytest.param(streams, lane, first, id=" for ".join(each.name for each in streams) + (", fences" if lane else ""))
    for streams, lanes in WAITS.items()
    for lane, first in zip((False, True), lanes, strict=True)
    if first is not None
]


@pytest.mark.parametrize(("streams", "of_fences", "first"), CASES)
def test_a_wait_that_is_left_out_is_found(
    emulator_library: Path, streams: tuple[Role, Role], of_fences: bool, first: int
) -> None:
    make = planted(partial(DropsWaits, streams=streams, of_fences=of_fences))
    trials_until_caught(emulator_library, make, first)


class StalePoints(Watched):
    """Points of the engine's stream are those that were recorded before, as if before_forward did nothing."""

    previous: int | None = None

    def record(self, event: int, stream: int) -> int:
        if self.roles[stream] is ENGINE:
            now = self.inner.new_event()
            super().record(now, stream)
            self.stands_for[event], self.previous = self.previous or now, now
        return super().record(event, stream)


class EarlyEvents(Watched):
    """Events of streams of one kind are recorded before their last work."""

    kind: Role = GATHERS

    def __init__(self, inner: CudaDevice) -> None:
        super().__init__(inner)
        self._before_last: dict[int, int] = {}
        """By stream."""

    def before_copies(self, stream: int, targets: Numbers, sources: Numbers, sizes: Numbers) -> None:
        self._note(stream)

    def before_launch(self, stream: int, is_scatter: bool) -> None:
        self._note(stream)

    def _note(self, stream: int) -> None:
        self._before_last[stream] = self.inner.new_event()
        super().record(self._before_last[stream], stream)

    def record(self, event: int, stream: int) -> int:
        if self.roles[stream] is self.kind:
            self.stands_for[event] = self._before_last.get(stream, event)
        return super().record(event, stream)


class EarlyEndsOfStores(EarlyEvents):
    kind = STORES


class EarlyEndsOfScatters(EarlyEvents):
    kind = SCATTERS


class EarlyEndsOfLoads(EarlyEvents):
    kind = LOADS


class DirectCopiesFencedByGathers(Watched):
    """The engine waits for the last gather where it had to wait for a copy."""

    gathered: int | None = None

    def record(self, event: int, stream: int) -> int:
        if self.roles[stream] is GATHERS:
            self.gathered = event
        return super().record(event, stream)

    def wait(self, stream: int, event: int, flags: int = 0) -> int:
        if self.roles[stream] is ENGINE and self.roles[self.recorded_on[event]] is STORES:
            if self.gathered is None:
                return SUCCESS
            event = self.gathered
        return super().wait(stream, event)


class DoneTooEarly(Watched):
    """Chunks are taken for done while they are copied: bounce buffers are read, and jobs are reported."""

    def query(self, event: int) -> int:
        code = super().query(event)
        return SUCCESS if code == NOT_READY and self.random.random() < 0.2 else code


class OneBounceBuffer(Watched):
    """All chunks have the same."""

    buffer: ByteArray | None = None

    def allocate_host(self, nbytes: int) -> ByteArray:
        self.buffer = self.buffer if self.buffer is not None else super().allocate_host(nbytes)
        return self.buffer


@pytest.mark.parametrize(
    "fault",
    [
        StalePoints,
        EarlyEvents,
        EarlyEndsOfStores,
        EarlyEndsOfScatters,
        EarlyEndsOfLoads,
        DirectCopiesFencedByGathers,
        DoneTooEarly,
    ],
)
def test_an_event_or_an_answer_that_comes_too_early_is_found(emulator_library: Path, fault: type[Watched]) -> None:
    trials_until_caught(emulator_library, planted(fault))


@pytest.mark.parametrize("fault", [DoneTooEarly, OneBounceBuffer])
def test_a_bounce_buffer_that_is_used_too_early_is_found(emulator_library: Path, fault: type[Watched]) -> None:
    trials_until_caught(emulator_library, planted(fault), registered=0)


def test_staging_memory_that_chunks_share_is_found(emulator_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = native_loop.native_module()

    class SharedStaging(real.Loop):  # type: ignore[misc, name-defined]
        """All chunks have that of the first one."""

        shared = 0

        def add_chunk(self, direction: int, lane: int, events: Sequence[int], stage: int | None = None) -> None:
            self.shared = self.shared or stage or 0
            super().add_chunk(direction, lane, events, None if stage is None else self.shared)

    monkeypatch.setattr(native_loop, "native_module", lambda: SimpleNamespace(Loop=SharedStaging))
    trials_until_caught(emulator_library, UncheckedDevice())


def test_slots_that_count_as_registered_too_early_are_found(
    emulator_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Registration, "num_ready_slots", property(lambda self: self._num_ready + 1))
    trials_until_caught(emulator_library, UncheckedDevice(), registered=8, chunk_slots=1)


@pytest.mark.parametrize("leaves_out", [lambda blocks: blocks[:-1], lambda blocks: []], ids=["the last block", "all"])
def test_a_fence_that_leaves_blocks_out_is_found(
    emulator_library: Path, leaves_out: Callable[[list[int]], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = CudaTransfer.wait

    def leave_out(self: CudaTransfer, job_ids: Iterable[int], device_blocks: Collection[int] | None = None) -> None:
        wait(self, job_ids, None if device_blocks is None else leaves_out(sorted(device_blocks)))

    monkeypatch.setattr(CudaTransfer, "wait", leave_out)
    trials_until_caught(emulator_library, UncheckedDevice())


def test_stores_that_begin_after_the_next_forward_pass_are_found(
    emulator_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CudaTransfer, "before_forward", lambda self: None)
    trials_until_caught(emulator_library, UncheckedDevice())


def test_changed_bytes_of_other_ranks_are_found(emulator_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of those trials in which bytes of other ranks are between the pages in a slot."""

    def one_byte_more(group: PageGroup) -> PageTable:
        table, ends = page_table(group), sorted(run.offset for run in page_table(group).runs)
        runs = [
            run
            if {run.offset + run.nbytes, run.offset + run.nbytes + 1} & {*ends, table.row_bytes, table.row_bytes + 1}
            else dataclasses.replace(run, nbytes=run.nbytes + 1)
            for run in table.runs
        ]
        return dataclasses.replace(table, runs=tuple(runs))

    monkeypatch.setattr(trials, "page_table", one_byte_more)
    trials_until_caught(emulator_library, UncheckedDevice(), says="slots were changed")


class NoEnd(FailsOnce):
    """After the error copies that go on count as done, and the engine's stream does not wait for them."""

    def query(self, event: int) -> int:
        return SUCCESS if self.has_failed else super().query(event)

    def wait(self, stream: int, event: int, flags: int = 0) -> int:
        if self.has_failed and stream == self.engine_stream():
            return SUCCESS
        return super().wait(stream, event)


def test_an_error_after_which_nothing_is_waited_for_is_found(emulator_library: Path) -> None:
    class WithoutEnd(Trial):
        fails_once = NoEnd

    trials_until_caught(emulator_library, trials.make_device, kind=WithoutEnd, fault=Fault.ONCE)

"""The CUDA transfer under the model engine on simulated streams: no fault, and every planted bug is found."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any, TypeAlias

import numpy as np
import pytest

from kvoffload.transfer.copies import Numbers
from kvoffload.transfer.cuda import native_loop, slots
from kvoffload.transfer.cuda.device import Addresses, Event, Stream
from kvoffload.transfer.cuda.driver import DriverError
from tests.scale import scaled
from tests.sim import stream_schedules
from tests.sim.__main__ import main
from tests.sim.engine import Leak
from tests.sim.faults import WrappedDevice, WrappedTransfer
from tests.sim.races import DeviceFault
from tests.sim.ranks import WrongBytes
from tests.sim.stream_ranks import LOOPS, MakeTransfer, Registration
from tests.sim.stream_schedules import plan, run_schedule
from tests.sim.streams import Mark, SimulatedDevice

SCHEDULES = scaled(40)
PLANTED_SCHEDULES = 60
EVENTS = (
    "stores copied",
    "stores failed",
    "loads copied",
    "tokens loaded",
    "gathers",
    "scatters",
    "direct copies",
    "copies from the device, registered memory",
    "copies from the device, pinned memory",
    "copies to the device, registered memory",
    "stores beside other ranks",
    "full launch queues",
    "ranks that load what another stores",
    "schedules with the merged layout",
    "schedules with the separate layout",
    "schedules with the packed layout",
)
"""What must have happened in each part of the schedules."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("loop", LOOPS)
def test_schedules(loop: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        seen += run_schedule(seed, LOOPS[loop])
    never = [what for what in EVENTS if not seen[what]]
    assert not never, f"never happened, so was not tested: {never}"


# Bugs planted in the device that CudaTransfer sees, and in what it is made of.


class WatchedDevice(WrappedDevice):
    """Passes everything on to ``inner``, and learns what the streams are for."""

    inner: SimulatedDevice

    def __init__(self, inner: SimulatedDevice) -> None:
        super().__init__(inner)
        self.users: dict[str, set[int]] = {"gather": set(), "scatter": set(), "to host": set(), "to device": set()}
        """Ids of the streams that did each kind of work."""
        self.recorded_on: dict[int, Stream] = {}
        """Where each event was recorded last, by id of the event."""
        self.before_last: dict[int, Mark | None] = {}
        """By id of a stream, the point before its last work."""

    def uses(self, stream: Stream, *kinds: str) -> bool:
        return any(id(stream) in self.users[kind] for kind in kinds)

    def is_engine(self, stream: Stream | None) -> bool:
        return stream is self.inner.engine_stream()

    def note(self, kind: str, stream: Stream) -> None:
        self.users[kind].add(id(stream))
        event = self.inner.new_event()
        self.inner.record(event, stream)
        self.before_last[id(stream)] = event.mark

    def record(self, event: Event, stream: Stream) -> None:
        self.recorded_on[id(event)] = stream
        self.inner.record(event, stream)

    def copy(self, stream: Stream, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        found = self.inner.memory.find(int(sources[0]), 1)
        assert found is not None
        self.note("to host" if found[0].is_device else "to device", stream)
        self.inner.copy(stream, targets, sources, sizes)

    def gather(self, stream: Stream, group: int, blocks: Numbers, staging: int) -> None:
        self.note("gather", stream)
        self.inner.gather(stream, group, blocks, staging)

    def scatter(self, stream: Stream, group: int, blocks: Numbers, staging: int) -> None:
        self.note("scatter", stream)
        self.inner.scatter(stream, group, blocks, staging)


class NoStoreWait(WatchedDevice):
    """Blocks are read although the forward pass that computes them may still run."""

    def wait(self, stream: Stream, event: Event) -> None:
        if not (self.is_engine(self.recorded_on.get(id(event))) and self.uses(stream, "gather", "to host")):
            super().wait(stream, event)


class NoLoadWait(WatchedDevice):
    """Blocks are filled although a forward pass, or a store that was fenced, may still read them."""

    def wait(self, stream: Stream, event: Event) -> None:
        is_load = self.uses(stream, "scatter", "to device") and not self.uses(stream, "gather")
        if not (self.is_engine(self.recorded_on.get(id(event))) and is_load):
            super().wait(stream, event)


class NoFence(WatchedDevice):
    def wait(self, stream: Stream, event: Event) -> None:
        if not self.is_engine(stream):
            super().wait(stream, event)


class StalePoint(WatchedDevice):
    """Points of the engine's stream are those that were recorded before, as if before_forward did nothing."""

    previous: Mark | None = None

    def record(self, event: Event, stream: Stream) -> None:
        super().record(event, stream)
        if self.is_engine(stream):
            event.mark, self.previous = self.previous or event.mark, event.mark


class DropsWaits(WatchedDevice):
    """Streams that do ``waiting`` work do not wait for those that do ``awaited`` work."""

    waiting = awaited = ""

    def wait(self, stream: Stream, event: Event) -> None:
        on = self.recorded_on.get(id(event))
        if on is None or not (self.does(stream, self.waiting) and self.does(on, self.awaited)):
            super().wait(stream, event)

    def does(self, stream: Stream, kind: str) -> bool:
        return self.uses(stream, kind)


class SharedStagingOfStores(DropsWaits):
    waiting, awaited = "gather", "to host"


class SharedStagingOfLoads(DropsWaits):
    waiting, awaited = "to device", "scatter"


class CopyBeforeGather(DropsWaits):
    waiting, awaited = "to host", "gather"


class ScatterBeforeCopy(DropsWaits):
    waiting, awaited = "scatter", "to device"


class EarlyEvents(WatchedDevice):
    """Events of streams that do ``kind`` of work are recorded before their last work."""

    kind = ""

    def record(self, event: Event, stream: Stream) -> None:
        super().record(event, stream)
        if self.uses(stream, self.kind):
            event.mark = self.before_last[id(stream)]


class EndOfStoresTooEarly(EarlyEvents):
    kind = "to host"


class EndOfLoadsTooEarly(EarlyEvents):
    kind = "scatter"


class EndOfGathersTooEarly(EarlyEvents):
    kind = "gather"


class DirectCopyFencedByGather(WatchedDevice):
    """The engine waits for the last gather where it had to wait for a copy."""

    gathered: Event = None

    def record(self, event: Event, stream: Stream) -> None:
        super().record(event, stream)
        if self.uses(stream, "gather"):
            self.gathered = event

    def wait(self, stream: Stream, event: Event) -> None:
        if self.is_engine(stream) and self.uses(self.recorded_on[id(event)], "to host"):
            event = self.gathered or self.new_event()
        super().wait(stream, event)


class DoneTooEarly(WatchedDevice):
    """Chunks are taken for done while they are copied: bounce buffers are read, and jobs are reported."""

    def is_done(self, event: Event) -> bool:
        return super().is_done(event) or self.inner.random.random() < 0.2

    def seconds_between(self, start: Event, end: Event) -> float:
        return 1e-6


class MergesStrangers(WatchedDevice):
    """Copies to neighbours become one, although their sources are no neighbours."""

    def copy(self, stream: Stream, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        if len(targets) > 1 and targets[0] + sizes[0] == targets[1]:
            sizes = np.concatenate(([sizes[0] + sizes[1]], sizes[2:]))
            targets, sources = np.delete(targets, 1), np.delete(sources, 1)
        super().copy(stream, targets, sources, sizes)


class LosesTheLastRow(WatchedDevice):
    def copy(self, stream: Stream, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        keep = slice(None, -1) if len(targets) > 1 else slice(None)
        super().copy(stream, targets[keep], sources[keep], sizes[keep])


class LosesTheLastBlock(WatchedDevice):
    def scatter(self, stream: Stream, group: int, blocks: Numbers, staging: int) -> None:
        super().scatter(stream, group, blocks[: max(1, len(blocks) - 1)], staging)


class AnotherGroup(WatchedDevice):
    """Blocks are gathered with the pages of the first group."""

    def gather(self, stream: Stream, group: int, blocks: Numbers, staging: int) -> None:
        super().gather(stream, 0, blocks, staging)


class FencesTooFewBlocks(WrappedTransfer):
    def wait(self, job_ids: Iterable[int], device_blocks: Collection[int] | None = None) -> None:
        super().wait(job_ids, None if device_blocks is None else sorted(device_blocks)[:-1])


class FencesNothing(WrappedTransfer):
    def wait(self, job_ids: Iterable[int], device_blocks: Collection[int] | None = None) -> None:
        super().wait([], device_blocks)


class NoBeforeForward(WrappedTransfer):
    """Stores are handed over by their fences only."""

    def before_forward(self) -> None:
        pass


class EarlyRegistration:
    """One more slot counts as registered than is."""

    def __init__(self, inner: Registration) -> None:
        self.inner = inner
        self.boundary_slots = inner.boundary_slots

    @property
    def num_ready_slots(self) -> int:
        return self.inner.num_ready_slots + 1

    def release(self) -> None:
        self.inner.release()


class NoBoundaries(EarlyRegistration):
    """Pieces of the pool that were registered by different calls count as one."""

    def __init__(self, inner: Registration) -> None:
        super().__init__(inner)
        self.boundary_slots = 1 << 30

    @property
    def num_ready_slots(self) -> int:
        return self.inner.num_ready_slots


def one_bounce_buffer_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    new = slots.new_bounce_buffers
    for module in (slots, native_loop):
        monkeypatch.setattr(module, "new_bounce_buffers", lambda *arguments: new(*arguments)[:1] * 8)


Bug: TypeAlias = type[WatchedDevice | WrappedTransfer | EarlyRegistration]


def with_bug(bug: Bug, loop: str = "plain") -> MakeTransfer:
    make_cuda_transfer: Any = LOOPS[loop]

    def make(groups: Any, host: Any, registration: Any, device: Any, plan: Any) -> Any:
        if issubclass(bug, WatchedDevice):
            return make_cuda_transfer(groups, host, registration, bug(device), plan)
        if issubclass(bug, EarlyRegistration):
            wrapped: Any = bug(registration)
            return make_cuda_transfer(groups, host, wrapped, device, plan)
        transfer, advance = make_cuda_transfer(groups, host, registration, device, plan)
        return bug(transfer), advance

    return make


def finds(seed: int, make: MakeTransfer = LOOPS["plain"]) -> bool:
    """Returns whether a law is broken in the schedule of ``seed``."""
    try:
        run_schedule(seed, make)
    except (DeviceFault, WrongBytes) as error:
        print(f"found by seed {seed}: {error}")
        return True
    except Leak:
        return False
    return False


BUGS: dict[Bug, dict[str, int]] = {
    EarlyRegistration: {"plain": 3, "native": 5},
    NoStoreWait: {"plain": 3, "native": 3},
    NoLoadWait: {"plain": 44, "native": 12},
    NoFence: {"plain": 3, "native": 6},
    StalePoint: {"plain": 3, "native": 0},
    SharedStagingOfStores: {"plain": 3, "native": 4},
    SharedStagingOfLoads: {"plain": 52, "native": 278},
    CopyBeforeGather: {"plain": 1, "native": 1},
    ScatterBeforeCopy: {"plain": 1, "native": 4},
    EndOfStoresTooEarly: {"plain": 0, "native": 0},
    EndOfLoadsTooEarly: {"plain": 1, "native": 4},
    EndOfGathersTooEarly: {"plain": 0, "native": 0},
    DirectCopyFencedByGather: {"plain": 6, "native": 6},
    DoneTooEarly: {"plain": 0, "native": 0},
    MergesStrangers: {"plain": 2, "native": 3},
    LosesTheLastRow: {"plain": 2, "native": 2},
    LosesTheLastBlock: {"plain": 55, "native": 4},
    AnotherGroup: {"plain": 3, "native": 4},
    FencesTooFewBlocks: {"plain": 3, "native": 2},
    FencesNothing: {"plain": 3, "native": 2},
    NoBeforeForward: {"plain": 44, "native": 44},
    NoBoundaries: {"plain": 14, "native": 14},
}
"""A seed that has found each in each loop, which is tried first."""


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(bug: Bug, loop: str) -> None:
    make = with_bug(bug, loop)
    assert any(finds(seed, make) for seed in (BUGS[bug][loop], *range(PLANTED_SCHEDULES)))


@pytest.mark.parametrize("loop", LOOPS)
def test_a_bug_planted_in_a_part_is_found(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one_bounce_buffer_for_all(monkeypatch)
    assert any(finds(seed, LOOPS[loop]) for seed in (3, *range(PLANTED_SCHEDULES)))


def test_a_changed_byte_of_another_rank_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    write = slots.HostSlots.write

    def write_too_much(self: slots.HostSlots, buffer: Any, at: Addresses, offsets: Addresses, sizes: Addresses) -> None:
        write(self, buffer, at, offsets, sizes)
        self._bytes[(offsets + sizes) % len(self._bytes)] ^= 1

    monkeypatch.setattr(slots.HostSlots, "write", write_too_much)
    with pytest.raises(WrongBytes, match="bytes of other ranks"):
        run_schedule(7, LOOPS["plain"])


def test_the_program_prints_counts_and_how_to_replay(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["streams", "--seeds", "2", "--first", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["schedules"], report["failures"]) == (2 * len(LOOPS), {})

    def fail(seed: int) -> Counter[str]:
        raise WrongBytes("a block of another")

    monkeypatch.setattr(stream_schedules, "run_loops", fail)
    assert main(["streams", "--seeds", "2", "--first", "7"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED: seed 8: WrongBytes: a block of another" in printed
    assert "python -m tests.sim streams --first 8 --seeds 1" in printed


class FailsOnce(WatchedDevice):
    """One call fails, and enqueues nothing. What was enqueued before goes on."""

    def __init__(self, inner: SimulatedDevice) -> None:
        super().__init__(inner)
        self.calls_left = inner.random.randrange(20, 200)

    def fail(self) -> None:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise DriverError("a call", "CUDA_ERROR_LAUNCH_FAILED", 719)

    def copy(self, stream: Stream, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        self.fail()
        self.inner.copy(stream, targets, sources, sizes)

    def gather(self, stream: Stream, group: int, blocks: Numbers, staging: int) -> None:
        self.fail()
        self.inner.gather(stream, group, blocks, staging)

    def scatter(self, stream: Stream, group: int, blocks: Numbers, staging: int) -> None:
        self.fail()
        self.inner.scatter(stream, group, blocks, staging)

    def record(self, event: Event, stream: Stream) -> None:
        self.fail()
        self.inner.record(event, stream)

    def wait(self, stream: Stream, event: Event) -> None:
        self.fail()
        self.inner.wait(stream, event)


@pytest.mark.parametrize("loop", LOOPS)
def test_an_error_of_the_driver_leaves_no_wrong_bytes(loop: str) -> None:
    """Loads in progress have ended before they are reported as failed, and their blocks belong to others."""
    seeds = [seed for seed in range(scaled(30)) if plan(seed)[0].num_ranks == 1]
    num_failed = 0
    for seed in seeds:
        try:
            run_schedule(seed, with_bug(FailsOnce, loop))
        except Leak:
            # Offloading is off, and nothing is wrong with the engine.
            num_failed += 1
    assert num_failed > len(seeds) // 4


@pytest.mark.parametrize("loop", LOOPS)
def test_an_error_of_the_driver_after_which_nothing_is_waited_for_is_found(loop: str) -> None:
    class NoEnd(FailsOnce):
        """Copies that go on after an error count as done, and the engine's stream does not wait for them."""

        def is_done(self, event: Event) -> bool:
            return self.calls_left <= 0 or super().is_done(event)

        def wait(self, stream: Stream, event: Event) -> None:
            if not (self.calls_left <= 0 and self.is_engine(stream)):
                super().wait(stream, event)

    seeds = (seed for seed in range(PLANTED_SCHEDULES) if plan(seed)[0].num_ranks == 1)
    assert any(finds(seed, with_bug(NoEnd, loop)) for seed in seeds)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_seed_replays_a_schedule(loop: str) -> None:
    assert run_schedule(3, LOOPS[loop]) == run_schedule(3, LOOPS[loop])

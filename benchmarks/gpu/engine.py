"""The model engine on the device: it checks every byte that a request attends to, after real copies on real streams.

The scheduler half, the workers and CudaTransfer are the real ones. Forward passes are operations on the engine's
stream, which nothing waits for; streams are delayed at random. Planted faults must be caught.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from random import Random
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import cuda
from benchmarks.gpu.parts import Options
from benchmarks.gpu.report import Report
from benchmarks.gpu.rig import DelayedDevice, Ready
from kvoffload.abc import ByteArray, KVGroup, PageGroup, Transfer
from kvoffload.connector.messages import StepMeta, WorkerReport
from kvoffload.connector.worker import Finished
from kvoffload.transfer.cuda.cuda_device import CudaDevice
from kvoffload.transfer.cuda.limits import DEFAULT_LIMITS, Limits
from kvoffload.transfer.cuda.pages import page_table
from kvoffload.transfer.cuda.transfer import CudaTransfer
from tests.sim.content import Access, Batch, EngineRequest, to_words
from tests.sim.engine import ModelEngine, Scenario
from tests.sim.faults import FailingTransfer, WrappedTransfer
from tests.sim.ranks import Rank, WrongBytes, layers_of, salt
from tests.transfer.cuda.calls import SUCCESS, WrappedDevice

SLOT_ALIGNMENT = 64
DELAYS_S = (0.0, 0.0, 0.3e-3, 3e-3)
"""How long streams do nothing before an operation, at random."""
DELAYED = ("copy", "gather", "scatter")
IDLE_STEP_S = 0.5e-3
SHARE_OF_RIGHT_RUNS = 0.5
"""How much of the time is for runs without a planted fault."""
MAX_SEEDS = 400
MAX_SEEDS_PER_FAULT = 60
MAX_REQUESTS = 8


class Layout(enum.Enum):
    """How the device blocks of all layers lie in memory."""

    MERGED = enum.auto()
    """One array of shape (layers, blocks, page)."""
    SEPARATE = enum.auto()
    """One array per layer."""
    PACKED = enum.auto()
    """One array of shape (blocks, layers, page): a device block is one run of bytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class DevicePlan:
    """How the ranks of an engine lay out their KV and use their devices, with small chunks and buffers."""

    layout: Layout
    registered_chance: float
    """The chance that one more slot of the pool is registered at a step."""
    num_registered_first: float
    """The share of the slots that is registered at the start."""
    boundary_slots: int
    """How many slots are registered by one call."""
    syncs_chance: float
    """The chance that the engine waits for the results of a step before the next one begins."""
    limits: Limits

    @classmethod
    def random(cls, rng: Random) -> DevicePlan:
        return cls(
            layout=rng.choice(list(Layout)),
            registered_chance=rng.choice((0.0, 0.02, 0.3)),
            num_registered_first=rng.choice((0.0, 0.5, 1.0, 1.0)),
            boundary_slots=rng.choice((1, 2, 5, 1000)),
            syncs_chance=rng.choice((0.0, 0.5, 1.0)),
            limits=Limits(
                chunk_bytes=rng.choice((256, 1024, 4096)),
                chunk_rows=rng.choice((2, 5, 64)),
                bounce_bytes=rng.choice((64, 512)),
                num_bounce_buffers=DEFAULT_LIMITS.in_flight + rng.choice((0, 1, 4)),
                stage_bytes=rng.choice((256, 1024)),
                fence_bytes=rng.choice((64, 256, 1024)),
            ),
        )


def plan(seed: int) -> tuple[Scenario, DevicePlan]:
    """Returns the engine, its workload and its devices."""
    rng = Random(seed)
    devices = DevicePlan.random(rng)
    scenario, is_replicated = Scenario.random_without_heads(seed), rng.random() < 0.15
    return (
        dataclasses.replace(
            scenario,
            num_requests=min(scenario.num_requests, MAX_REQUESTS),
            # Requests repeat prompts that the device does not keep, so that many load.
            num_documents=1,
            document_tokens=min(scenario.document_tokens, 10 * scenario.block_size + rng.randint(0, 7)),
            max_new_tokens=min(scenario.max_new_tokens, 4),
            max_tokens_per_step=max(scenario.max_tokens_per_step, 12),
            prefix_caching=rng.random() < 0.3,
            num_host_blocks=max(scenario.num_host_blocks, rng.choice((8, 32))),
            store_threshold=None,
            tensor_parallel=scenario.tensor_parallel or is_replicated,
            num_ranks=2 if is_replicated else scenario.num_ranks,
            # As with MLA: all ranks hold the same KV.
            replicas=2 if is_replicated else scenario.replicas,
            async_scheduling=rng.random() < 0.6,
            sleep_chance=rng.choice((0.0, 0.0, 0.0, 0.05)),
        ),
        devices,
    )


class RandomlyDelayed(DelayedDevice):
    """Chooses the delay of each operation by ``rng``."""

    def __init__(self, inner: CudaDevice, rng: Random) -> None:
        super().__init__(inner, 0.0, DELAYED)
        self._rng = rng

    def delay(self) -> float:
        return self._rng.choice(DELAYS_S)


# Planted faults.


class NoFence(WrappedTransfer):
    """The engine's stream waits for no store."""

    def wait(self, job_ids: Iterable[int], device_blocks: Collection[int] | None = None) -> None:
        """Does nothing."""


class StalePoints(WrappedDevice):
    """Copies wait for the end of an earlier forward pass: events that are used again keep their first point."""

    def __init__(self, inner: CudaDevice) -> None:
        super().__init__(inner)
        self._recorded: list[int] = []

    def record(self, event: int, stream: int) -> int:
        if stream == self.engine_stream():
            if event in self._recorded:
                return SUCCESS
            self._recorded.append(event)
        return super().record(event, stream)


class NoOrder(WrappedDevice):
    """Streams do not wait for those events that were recorded on a stream for which ``ignores`` is true."""

    def __init__(self, inner: CudaDevice) -> None:
        super().__init__(inner)
        self._recorded_on: dict[int, int] = {}
        self._engine = inner.engine_stream()

    def ignores(self, stream: int) -> bool:
        return stream == self._engine

    def record(self, event: int, stream: int) -> int:
        self._recorded_on[event] = stream
        return super().record(event, stream)

    def wait(self, stream: int, event: int, flags: int = 0) -> int:
        recorded_on = self._recorded_on.get(event)
        if recorded_on is None or stream == self._engine or not self.ignores(recorded_on):
            return super().wait(stream, event)
        return SUCCESS


class NoOrderOfCopies(NoOrder):
    """Gathers, scatters and copies do not wait for one another."""

    def ignores(self, stream: int) -> bool:
        return not super().ignores(stream)


class EndsTooEarly(WrappedDevice):
    """Copies count as done when they are issued."""

    def query(self, event: int) -> int:
        return SUCCESS

    def elapsed(self, milliseconds: Any, start: int, end: int) -> int:
        milliseconds[0] = 1.0
        return SUCCESS


TRANSFER_FAULTS: dict[str, Callable[[Transfer], Transfer]] = {
    "no fence": NoFence,
}
DEVICE_FAULTS: dict[str, Callable[[CudaDevice], CudaDevice]] = {
    "a stale point of the forward pass": StalePoints,
    "copies do not wait for the engine": NoOrder,
    "copies do not wait for kernels": NoOrderOfCopies,
    "copies are reported too early": EndsTooEarly,
}


class DeviceRank(Rank):
    """A rank whose KV is on the device."""

    def __init__(
        self,
        s: Scenario,
        groups: Sequence[KVGroup],
        number: int,
        devices: DevicePlan,
        wrap_device: Callable[[CudaDevice], CudaDevice] | None,
        wrap_transfer: Callable[[Transfer], Transfer],
        leader: Rank | None,
    ) -> None:
        self._groups = groups
        self._random = Random(s.seed + (number << 40))
        self._syncs_chance = devices.syncs_chance
        layers = [layers_of(s, len(groups), g, number) for g in range(len(groups))]
        self._planes = _planes(devices.layout, [len(own) for own in layers], groups, s.num_device_blocks)
        self._salts = [
            [to_words([salt(str(s.leader_of(number)), g, layer)]) for layer in own] for g, own in enumerate(layers)
        ]
        page_groups = [
            PageGroup([plane.view(torch.uint8) for plane in planes], group.block_size_factor)
            for group, planes in zip(groups, self._planes, strict=True)
        ]
        size = max(group.block_bytes for group in page_groups)
        slot_bytes = -(-size // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        self._memory = cuda.pinned(s.num_host_blocks * slot_bytes)
        host: ByteArray = leader.host if leader else self._memory.numpy().reshape(s.num_host_blocks, slot_bytes)
        self._ready = Ready(int(devices.num_registered_first * len(host)), devices.boundary_slots)
        self._registered_chance = devices.registered_chance
        self._num_wrong = cuda.zero()
        self._last = cuda.record()
        device: CudaDevice = cuda.make_device(page_groups)
        if wrap_device is not None:
            device = wrap_device(RandomlyDelayed(device, Random(s.seed)))
        tables = [page_table(group) for group in page_groups]
        transfer = CudaTransfer(tables, host, device, self._ready, limits=devices.limits)
        failing = FailingTransfer(wrap_transfer(transfer), s.copy_failure_rate, s.seed + number)
        super().__init__(number, host, failing, lambda: None, leader)

    def step(self, meta: StepMeta, batch: Batch, loads_first: bool) -> tuple[Finished, WorkerReport | None]:
        if self._random.random() < self._syncs_chance:
            self._last.synchronize()
        if self._random.random() < self._registered_chance:
            self._ready.num_ready_slots = min(len(self.host), self._ready.num_ready_slots + 1)
        if not batch:
            # The engine's clock is not that of the device, which needs time to copy.
            time.sleep(IDLE_STEP_S)
        results = super().step(meta, batch, loads_first)
        self._last = cuda.record()
        return results

    def compute(self, request: EngineRequest, start: int, end: int) -> None:
        delay = self._random.choice(DELAYS_S)
        if delay:
            cuda.sleep(delay)
        for g, (group, planes, salts) in enumerate(zip(self._groups, self._planes, self._salts, strict=True)):
            if not planes:
                continue
            access = Access.of(request, g, group, start, end)
            places = cuda.send(access.blocks * planes[0].shape[1] + access.offsets)
            for plane, mask in zip(planes, salts, strict=True):
                want = cuda.send((access.words ^ mask).view(np.int64))
                cuda.launch(_attend(plane, places, want, access.num_read, self._num_wrong))

    def finish(self) -> None:
        cuda.synchronize()
        self.worker.shutdown()
        if int(self._num_wrong.item()):
            raise WrongBytes(f"rank {self.number} has attended to {int(self._num_wrong.item())} wrong words")


def _attend(plane: Any, places: Any, want: Any, num_read: int, num_wrong: Any) -> Callable[[], None]:
    """Returns work that compares the first words and writes the others. ``places``: block and offset as one number."""
    width = plane.shape[1]

    def work() -> None:
        blocks, offsets = places // width, places % width
        num_wrong.add_((plane[blocks[:num_read], offsets[:num_read]] != want[:num_read]).sum())
        plane.index_put_((blocks[num_read:], offsets[num_read:]), want[num_read:])

    return work


def _planes(layout: Layout, layers: Sequence[int], groups: Sequence[KVGroup], num_blocks: int) -> list[list[Any]]:
    """Returns words of shape (blocks, tokens) per group and layer. Groups use the same memory."""
    most, width = max(layers), max(group.device_block_size for group in groups)
    if layout is Layout.PACKED:
        whole = cuda.zeros((num_blocks, most, width))
        own = [whole[:, layer] for layer in range(most)]
    elif layout is Layout.MERGED:
        own = list(cuda.zeros((most, num_blocks, width)))
    else:
        own = [cuda.zeros((num_blocks, width)) for _ in range(most)]
    return [[plane[:, : group.device_block_size] for plane in own[:n]] for n, group in zip(layers, groups, strict=True)]


def run_schedule(
    seed: int,
    wrap_device: Callable[[CudaDevice], CudaDevice] | None = lambda device: device,
    wrap_transfer: Callable[[Transfer], Transfer] = lambda transfer: transfer,
) -> int:
    """Runs an engine and its workload, and returns the tokens that it has loaded. Raises an error if bytes are wrong,
    or something is held at the end. A wrapped device has random delays; with None it is as the product makes it."""
    scenario, devices = plan(seed)
    ranks: list[DeviceRank] = []

    def make_rank(
        s: Scenario, groups: Sequence[KVGroup], number: int, copy_chance: float, others: Sequence[Rank]
    ) -> Rank:
        leader = None if s.leader_of(number) == number else others[s.leader_of(number)]
        ranks.append(DeviceRank(s, groups, number, devices, wrap_device, wrap_transfer, leader))
        return ranks[-1]

    try:
        engine = ModelEngine(scenario, make_rank=make_rank)
        engine.run()
        return engine.hits
    finally:
        for rank in ranks:
            rank.worker.shutdown()
        cuda.synchronize()


def run(report: Report, options: Options) -> None:
    begin = time.monotonic()
    until = begin + options.seconds * SHARE_OF_RIGHT_RUNS
    loaded: dict[int, int] = {}
    """By seed, how many tokens were loaded."""
    failures: dict[int, str] = {}
    for seed in range(MAX_SEEDS if not options.dry_run else 2):
        if time.monotonic() > until or len(failures) > 3:
            break
        try:
            loaded[seed] = run_schedule(seed, None if seed % 2 else lambda device: device)
        except Exception as error:
            failures[seed] = f"{type(error).__name__}: {error}"
    runs, tokens = len(loaded) + len(failures), sum(loaded.values())
    report.add("runs of the model engine", runs)
    report.add("tokens loaded", tokens)
    for seed, failure in failures.items():
        report.add(f"seed {seed}", failure)
    report.must(
        "every byte attended to is right",
        not failures and (tokens > 0 or options.dry_run),
        f"{len(failures)} of {runs} failed" if failures else "",
    )
    faults: dict[str, dict[str, Any]] = {name: {"wrap_transfer": wrap} for name, wrap in TRANSFER_FAULTS.items()}
    faults |= {name: {"wrap_device": wrap} for name, wrap in DEVICE_FAULTS.items()}
    for i, (name, wraps) in enumerate(faults.items()):
        end = begin + options.seconds * 0.9
        until = time.monotonic() + (end - time.monotonic()) / (len(faults) - i)
        # Runs that load much attend to what the fault has spoiled.
        _find(report, name, wraps, until, sorted(loaded, key=lambda seed: -loaded[seed]))


def _find(report: Report, name: str, wraps: dict[str, Any], until: float, seeds: Sequence[int]) -> None:
    """Runs seeds until the planted fault is found."""
    for number, seed in enumerate(seeds[:MAX_SEEDS_PER_FAULT]):
        if time.monotonic() > until:
            break
        try:
            run_schedule(seed, **wraps)
        except WrongBytes:
            report.must(f"planted: {name}", True, f"caught by run {number + 1}")
            return
        except Exception as error:
            # What else goes wrong is not what a check of bytes has found.
            report.add(f"planted: {name}, seed {seed}", f"{type(error).__name__}: {error}"[:120])
    report.must(f"planted: {name}", False, "not caught")

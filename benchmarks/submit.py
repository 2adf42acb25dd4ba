"""CPU time that the CUDA transfer costs the engine's thread, and its own, with a driver that does nothing.

No GPU is needed: all calls of the device return at once, so the figures are what kvoffload itself does in Python. A
device block has 128 KiB of 32 layers. A store is submitted, handed over at the forward pass, and its result is taken.
"copying thread" is what the helper thread does for it: planning, issuing and ending all chunks; the interpreter's lock
is held for at most that long, and not longer than its longest step at a time. All figures are CPU time, the best of
several rounds.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from benchmarks.report import Row, publish
from kvoffload.abc import ByteArray, DeviceSpec, LoadStoreSpec, TransferSpec
from kvoffload.transfer.copies import Numbers
from kvoffload.transfer.cuda.device import Addresses, Device, Event, Stream
from kvoffload.transfer.cuda.pages import PageTable, Run
from kvoffload.transfer.cuda.transfer import CudaTransfer

LAYERS, PAGE_BYTES = 32, 4096
NUM_BLOCKS = 8192
ROUNDS = 15
LIMIT_MS = 1.0
"""How long the engine's thread may be busy with 512 jobs or blocks."""
CASES = (
    ("512 blocks, one job", 512, 1),
    ("512 blocks, a job per block", 512, 512),
    ("6,250 blocks, one job", 6250, 1),
    ("6,250 blocks, a job per block", 6250, 6250),
    ("256 requests that complete a block each", 256, 256),
)


class NoDevice(Device):
    """Does nothing, at once."""

    def enter_thread(self) -> None: ...

    def new_stream(self) -> Stream:
        return object()

    def engine_stream(self) -> Stream:
        return None

    def new_event(self) -> Event:
        return object()

    def record(self, event: Event, stream: Stream) -> None: ...

    def wait(self, stream: Stream, event: Event) -> None: ...

    def is_done(self, event: Event) -> bool:
        return True

    def seconds_between(self, start: Event, end: Event) -> float:
        return 0.0

    def allocate(self, nbytes: int) -> int:
        return 1 << 40

    def allocate_host(self, nbytes: int) -> ByteArray:
        return np.zeros(nbytes, dtype=np.uint8)

    def copy(self, stream: Stream, targets: Addresses, sources: Addresses, sizes: Addresses) -> None: ...

    def gather(self, stream: Stream, group: int, blocks: Numbers, staging: int) -> None: ...

    def scatter(self, stream: Stream, group: int, blocks: Numbers, staging: int) -> None: ...

    def close(self) -> None: ...


class _Registered:
    num_ready_slots = NUM_BLOCKS
    boundary_slots = 64

    def release(self) -> None: ...


def make_transfer(is_direct: bool) -> CudaTransfer:
    block_bytes = LAYERS * PAGE_BYTES
    # No memory is behind these addresses: nothing reads or writes them.
    runs = [Run(1 << 41, block_bytes, block_bytes, 0)]
    if not is_direct:
        layer_bytes = NUM_BLOCKS * PAGE_BYTES
        runs = [Run((1 << 41) + i * layer_bytes, PAGE_BYTES, PAGE_BYTES, i * PAGE_BYTES) for i in range(LAYERS)]
    pool = np.lib.stride_tricks.as_strided(np.zeros(1, dtype=np.uint8), (NUM_BLOCKS, block_bytes), (block_bytes, 1))
    return CudaTransfer([PageTable(tuple(runs), NUM_BLOCKS)], pool, NoDevice(), _Registered(), with_threads=False)


def measure(num_blocks: int, num_jobs: int, is_direct: bool, rng: np.random.Generator) -> tuple[float, float, float]:
    """Returns milliseconds of the engine's thread, of the copying thread, and of its longest step."""
    transfer = make_transfer(is_direct)
    blocks, slots = (rng.permutation(NUM_BLOCKS)[:num_blocks] for _ in range(2))
    specs = [
        TransferSpec("r", LoadStoreSpec("CPU", here), DeviceSpec(there, (len(there),), (0,)))
        for here, there in zip(np.split(slots, num_jobs), np.split(blocks, num_jobs), strict=True)
    ]
    start = time.thread_time()
    for job_id, spec in enumerate(specs):
        transfer.submit(job_id, spec, is_store=True)
    transfer.before_forward()
    submitted = time.thread_time()
    steps = [submitted]
    while transfer.advance():
        steps.append(time.thread_time())
    ended = time.thread_time()
    results = transfer.poll(busy=True)
    polled = time.thread_time()
    assert len(results) == num_jobs
    longest = max(np.diff(steps))
    return 1e3 * (submitted - start + polled - ended), 1e3 * (ended - submitted), 1e3 * float(longest)


def main(out: Path, quick: bool) -> None:
    rows: list[Row] = []
    rng = np.random.default_rng(0)
    for what, num_blocks, num_jobs in CASES:
        times = [measure(num_blocks, num_jobs, False, rng) for _ in range(2 if quick else ROUNDS)]
        engine, thread, longest = (min(each) for each in zip(*times, strict=True))
        if num_blocks <= 512:
            rows.append(Row(f"engine's thread: {what}", engine, "ms", "limit", LIMIT_MS / engine))
        else:
            rows.append(Row(f"engine's thread: {what}", engine, "ms"))
        direct = min(measure(num_blocks, num_jobs, True, rng)[1] for _ in range(2 if quick else ROUNDS))
        rows += [
            Row(f"copying thread: {what}", thread, "ms"),
            Row(f"copying thread: {what}, longest step", longest, "ms"),
            Row(f"copying thread: {what}, blocks in one piece", direct, "ms"),
        ]
    publish("submit", "Submitting copies to a CUDA device, with a driver that does nothing", rows, out)

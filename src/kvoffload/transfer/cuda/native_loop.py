"""Makes the loop of copies, which is native code, with what it needs of a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kvoffload.abc import ByteArray, ConfigError
from kvoffload.native import ENVIRONMENT_VARIABLE, describe, load
from kvoffload.transfer.cuda.calls import DriverCalls
from kvoffload.transfer.cuda.driver import DriverError
from kvoffload.transfer.cuda.limits import ROW_ALIGNMENT, Limits, aligned, device_bytes
from kvoffload.transfer.cuda.pages import PageTable
from kvoffload.transfer.cuda.slots import ReadySlots

if TYPE_CHECKING:
    from kvoffload.transfer.cuda.cuda_device import CudaDevice

LOADS, STORES = DIRECTIONS = range(2)
ORDINARY, FENCES = range(2)
"""The lanes of a direction."""
EVENTS_PER_CHUNK = 3
NUM_POINTS = 4


def native_module() -> ModuleType:
    """Returns the compiled module. Raises ConfigError if there is none: no other code copies on a GPU."""
    module = load("_transfer")
    if module is None:
        raise ConfigError(
            fault=f"a CUDA device is served with native code only, and kvoffload runs on {describe()}",
            fix=f"reinstall kvoffload from a wheel or where there is a C compiler, and unset {ENVIRONMENT_VARIABLE}",
        )
    return module


def new_events(device: CudaDevice, number: int = EVENTS_PER_CHUNK) -> list[int]:
    return [device.new_event() for _ in range(number)]


def error_of(loop: Any) -> DriverError:
    """Returns the error that has stopped a loop."""
    what, code, count, copy = loop.error
    if count:
        what += f" of {count} copies" + (f" at copy {copy}" if copy < count else "")
    return DriverError(what, "CUDA error", code)


def make_loop(
    device: CudaDevice,
    calls: DriverCalls,
    tables: Sequence[PageTable],
    pool_data: ByteArray,
    registration: ReadySlots,
    limits: Limits,
) -> tuple[Any, int]:
    """Returns a ``Loop`` of the native module, and the bytes of device memory that it has got. A point of the engine's
    stream must be recorded before it is used otherwise."""
    is_staged = [kernel is not None and table.needs_gather for kernel, table in zip(calls.kernels, tables, strict=True)]
    largest = max((table.device_block_bytes for table in tables), default=0)
    stages = [
        aligned(max(size, largest) + ROW_ALIGNMENT * (len(tables) - 1))
        for size in (limits.stage_bytes, limits.fence_bytes)
    ]
    bounce_bytes = max(limits.bounce_bytes, largest)
    loop = native_module().Loop(
        astuple(calls)[:-1],
        [
            (
                table.num_blocks if table.runs else 0,
                table.factor,
                table.row_bytes,
                table.runs,
                kernel if staged else None,
            )
            for table, kernel, staged in zip(tables, calls.kernels, is_staged, strict=True)
        ],
        pool_data,
        registration.boundary_slots,
        (
            max(limits.chunk_bytes, largest),
            limits.chunk_rows,
            max(limits.stage_bytes, largest),
            max(limits.fence_bytes, largest),
            bounce_bytes,
        ),
    )
    # One piece, because the driver takes whole pages for each.
    nbytes = len(DIRECTIONS) * (stages[FENCES] + limits.in_flight * stages[ORDINARY]) if any(is_staged) else 0
    at = device.allocate(nbytes) if nbytes else 0
    for direction in DIRECTIONS:
        for lane in (ORDINARY, FENCES):
            shared = at if lane == FENCES else 0
            streams = [device.new_stream() for _ in range(2)]
            loop.set_streams(direction, lane, *streams, new_events(device, 2), shared)
        at += stages[FENCES] if nbytes else 0
        for _ in range(limits.in_flight):
            loop.add_chunk(direction, ORDINARY, new_events(device), at)
            at += stages[ORDINARY] if nbytes else 0
        loop.add_chunk(direction, FENCES, new_events(device))
        for _ in range(limits.num_bounce_buffers if registration.num_ready_slots < len(pool_data) else 0):
            loop.add_bounce(direction, int(device.allocate_host(bounce_bytes).ctypes.data))
    for event in new_events(device, NUM_POINTS):
        loop.add_point(event)
    return loop, device_bytes(nbytes)

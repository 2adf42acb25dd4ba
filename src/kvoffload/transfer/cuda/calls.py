"""The functions of a CUDA driver and the kernels that copies call from native code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_BLOCKS = 960
"""How many blocks one launch gathers or scatters: their numbers are arguments, of which a launch takes 4,096 bytes."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """The two kernels of a page group, which copy its device blocks to rows in staging memory and back.

    Their arguments, in this order: the address of the pieces and that of the first row (uint64), ``row_bytes``
    (uint64), ``num_pieces`` and the number of rows (uint32), and MAX_BLOCKS block numbers (int32) by value.
    """

    gather: int
    """The handle of the function, as cuLaunchKernel takes it."""
    scatter: int
    pieces: int
    """The address, on the device, of ``num_pieces`` pieces of 32 bytes each."""
    num_pieces: int
    row_bytes: int
    threads: int
    """Threads per program."""
    max_programs: int
    rows_per_program: float
    """As many rows keep one program busy; more rows start more programs."""


@dataclass(frozen=True, slots=True)
class DriverCalls:
    """Addresses of C functions with the CUDA driver's own signatures. They are called on the engine's thread and on
    threads that have called ``CudaDevice.enter_thread``."""

    copy_batch: int
    """cuMemcpyBatchAsync of CUDA 12.8, or 0: copies are issued one by one."""
    copy: int
    """cuMemcpyAsync"""
    launch: int
    """cuLaunchKernel"""
    record: int
    """cuEventRecord"""
    wait: int
    """cuStreamWaitEvent"""
    query: int
    """cuEventQuery"""
    elapsed: int
    """cuEventElapsedTime"""
    kernels: Sequence[Kernel | None]
    """By group. None: the runs of the group's device blocks are copied one by one."""

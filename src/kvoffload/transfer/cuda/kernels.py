"""The kernels that gather device blocks into rows and scatter rows into device blocks: see kernel.cu."""

from __future__ import annotations

import math
from importlib.resources import files

import numpy as np
import numpy.typing as npt

from kvoffload.transfer.cuda.calls import Kernel
from kvoffload.transfer.cuda.driver import Driver
from kvoffload.transfer.cuda.pages import PageTable

MAX_PROGRAMS = 16
"""How many multiprocessors of the device a copy occupies at most; the others compute meanwhile."""
THREADS, WARP = 512, 32
PIECE_BYTES = 16 << 10
"""What a warp copies at once. The 256 warps of a launch have 1 MiB of reads under way, which is about the rate of the
device's memory times the time that a read takes."""
WORD_SIZES = (16, 4, 1)


def kernel_code() -> bytes:
    """Returns the kernels as PTX, which the driver compiles for its device."""
    return files("kvoffload.transfer.cuda").joinpath("kernel.ptx").read_bytes()


def word_size(table: PageTable) -> int:
    """Returns the bytes of the widest word that divides all addresses and sizes of the pages."""
    numbers = [(run.base, run.stride, run.nbytes, run.offset) for run in table.runs]
    common = math.gcd(table.row_bytes, *(number for run in numbers for number in run))
    return next(size for size in WORD_SIZES if common % size == 0)


def cut(table: PageTable) -> npt.NDArray[np.int64]:
    """Returns the runs of a table in pieces of at most PIECE_BYTES, shape (pieces, 4): base, stride, nbytes, offset."""
    pieces = [
        (run.base + at, run.stride, min(PIECE_BYTES, run.nbytes - at), run.offset + at)
        for run in table.runs
        for at in range(0, run.nbytes, PIECE_BYTES)
    ]
    return np.array(pieces, np.int64).reshape(-1, 4)


def make_kernel(driver: Driver, module: int, table: PageTable, pieces: int) -> Kernel:
    """Returns the kernels for the blocks of ``table``. ``pieces``: where the device has what ``cut`` returns."""
    size, num_pieces = word_size(table), len(cut(table))
    return Kernel(
        gather=driver.function(module, f"gather{size}"),
        scatter=driver.function(module, f"scatter{size}"),
        pieces=pieces,
        num_pieces=num_pieces,
        row_bytes=table.row_bytes,
        threads=THREADS,
        max_programs=MAX_PROGRAMS,
        rows_per_program=THREADS / WARP / num_pieces,
    )

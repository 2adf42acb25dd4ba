"""Mappings of memory files at addresses that are chosen here, which Python's mmap cannot do."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

from kvoffload.abc import ByteArray

HUGE_PAGE = 2 << 20
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000

_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]


def map_file(fd: int, nbytes: int) -> ByteArray:
    """Returns the first ``nbytes`` of the memory file ``fd``, shared with all who map it, until the last array made
    from them is gone. Huge pages of the file are mapped as such, which needs an aligned address. Raises OSError."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    reserved: ByteArray = np.frombuffer(mmap.mmap(-1, nbytes + HUGE_PAGE, flags=flags), dtype=np.uint8)
    first = -reserved.ctypes.data % HUGE_PAGE
    mapped = reserved[first : first + nbytes]
    address = mapped.ctypes.data
    if _mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return mapped

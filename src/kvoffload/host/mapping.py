"""Mappings of memory files at addresses that are chosen here, which Python's mmap cannot do."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

from kvoffload.abc import ByteArray

HUGE_PAGE = 2 << 20
_MAP_FIXED = 0x10
_MAP_POPULATE = 0x8000
_MAP_NORESERVE = 0x4000

_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]


def reserve_addresses(nbytes: int) -> ByteArray:
    """Returns a range of addresses that begins at a multiple of HUGE_PAGE. It takes no memory before it is written to,
    and ends with the last array made from it, whatever has been mapped there."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    addresses: ByteArray = np.frombuffer(mmap.mmap(-1, nbytes + HUGE_PAGE, flags=flags), dtype=np.uint8)
    first = -addresses.ctypes.data % HUGE_PAGE
    return addresses[first : first + nbytes]


def map_over(addresses: ByteArray, fd: int, offset: int, populate: bool = False) -> None:
    """Maps the memory file ``fd`` from ``offset`` on over whole pages of reserved ``addresses``, in place of what was
    there. With ``populate`` the pages that the file has are mapped at once. Raises OSError."""
    flags = mmap.MAP_SHARED | _MAP_FIXED | (_MAP_POPULATE if populate else 0)
    address = addresses.ctypes.data
    if _mmap(address, addresses.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset) != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def map_file(fd: int, nbytes: int) -> ByteArray:
    """Returns the first ``nbytes`` of the memory file ``fd``, shared with all who map it. Huge pages of the file are
    mapped as such, which needs an aligned address."""
    addresses = reserve_addresses(nbytes)
    map_over(addresses, fd, 0)
    return addresses

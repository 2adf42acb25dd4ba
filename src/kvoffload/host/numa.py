"""The allocation of a memory file on a NUMA node."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from kvoffload.host.limits import node_list

logger = logging.getLogger(__name__)

_MBIND = {"x86_64": 237, "aarch64": 235}
"""Number of the system call, by machine. libnuma, which has a function for it, is not installed everywhere."""
_MPOL_PREFERRED = 1
_MASK_BITS = 1024
_NODES = Path("/sys/devices/system/node")


@contextlib.contextmanager
def allocated_on(node: int | None, address: int, nbytes: int) -> Iterator[None]:
    """Memory that is allocated in the ``with`` statement for the memory file that is mapped at ``address`` comes from
    NUMA ``node`` while that node has free memory, then from other nodes. None: from where the kernel takes it.

    The policy belongs to the file, so it holds for ``fallocate`` and for other mappings too. Containers often forbid
    policies. Then this thread runs on the node's processors meanwhile, because the kernel allocates near the processor.
    """
    if node is None:
        yield
        return
    try:
        _prefer(node, address, nbytes)
    except OSError as error:
        reason = error.strerror
    else:
        logger.info("kvoffload: the host pool is allocated on NUMA node %d, next to the device", node)
        yield
        return
    before = os.sched_getaffinity(0)
    near = before & _processors(node)
    if not near:
        logger.warning(
            "kvoffload: the host pool cannot be allocated on NUMA node %d, next to the device (mbind: %s; this process "
            "may not run on the node's processors either), so copies may be slower; start the container with "
            "--cap-add SYS_NICE, and give it the memory and the processors of the node",
            node,
            reason,
        )
        yield
        return
    logger.info(
        "kvoffload: the host pool is allocated by the processors of NUMA node %d, next to the device (mbind: %s)",
        node,
        reason,
    )
    os.sched_setaffinity(0, near)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _prefer(node: int, address: int, nbytes: int) -> None:
    """Sets the policy of the memory file that is mapped at ``address``. Raises OSError."""
    number = _MBIND.get(platform.machine())
    if number is None or node >= _MASK_BITS:
        raise OSError(0, "not known on this machine")
    mask = (ctypes.c_ulong * (_MASK_BITS // (8 * ctypes.sizeof(ctypes.c_ulong))))()
    word, bit = divmod(node, 8 * ctypes.sizeof(ctypes.c_ulong))
    mask[word] = 1 << bit
    libc = ctypes.CDLL(None, use_errno=True)
    # The kernel ignores the last of the bits that it is given.
    bits = ctypes.c_ulong(_MASK_BITS)
    where, length = ctypes.c_void_p(address), ctypes.c_ulong(nbytes)
    if libc.syscall(ctypes.c_long(number), where, length, _MPOL_PREFERRED, mask, bits, 0):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _processors(node: int) -> frozenset[int]:
    with contextlib.suppress(OSError):
        return node_list((_NODES / f"node{node}/cpulist").read_text().strip())
    return frozenset()

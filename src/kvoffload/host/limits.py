"""How much memory this process may allocate, and how much other processes have reserved but not allocated yet.

A reservation is a memory file whose length is the amount that its process will allocate. The part that is allocated
already is missing from the machine's free memory; the rest is outstanding. The file has no name in any file system, so
the reservation ends with its process, however that ends.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

RESERVATION = "kvoffload"
"""The name of a reservation's file is this, a colon, and the NUMA nodes on which its process may allocate."""

_LINK = re.compile(rf"/memfd:{RESERVATION}:([0-9,-]*) \(deleted\)")
_BIND_POLICY = re.compile(r" bind(?:=[a-z+|]+)?:([0-9,-]+)")
_RECLAIMABLE = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
"""Fields of a NUMA node's meminfo. The node has at most their sum of the machine's available memory."""


def available_memory(others: Iterable[Reservation] = ()) -> int:
    """Returns how many bytes this process may still allocate once ``others`` have allocated all that they reserved: the
    available memory of the NUMA nodes that it may use, or less if a cgroup limit is lower."""
    # Read this first: memory that is allocated between the two reads then counts twice, and never not at all.
    outstanding = [(other, other.outstanding()) for other in others]
    nodes = allowed_nodes()
    available = _on_nodes("MemAvailable", nodes, _RECLAIMABLE)
    available -= sum(nbytes for other, nbytes in outstanding if not nodes or nodes & other.nodes or not other.nodes)
    for limit in cgroup_limits():
        within = sum(nbytes for other, nbytes in outstanding if limit.holds(other.pid))
        available = min(available, limit.most - limit.used - within)
    return max(0, available)


def total_memory() -> int:
    """Returns the bytes that a server could allocate at most: the memory of the NUMA nodes in its cpuset, or less if a
    cgroup limit is lower. The memory policy of this process is ignored: other ranks may have another."""
    total = _on_nodes("MemTotal", cpuset_nodes(), ("MemTotal",))
    return min([total, *(limit.most for limit in cgroup_limits())])


def memory_grows() -> bool:
    """Returns whether this is a virtual machine that gets more memory when it uses what it has (virtio-mem)."""
    return any(Path("/sys/bus/virtio/drivers/virtio_mem").glob("virtio*"))


@dataclass(frozen=True, slots=True)
class Reservation:
    """A memory file of process ``pid``, which may allocate on NUMA ``nodes`` (empty: not known)."""

    path: Path
    pid: int
    inode: int
    nodes: frozenset[int]

    def outstanding(self) -> int:
        """Returns the bytes that are reserved but not allocated; 0 once the process has ended or closed the file."""
        try:
            status = os.stat(self.path)
        except OSError:
            return 0
        return max(0, status.st_size - status.st_blocks * 512) if status.st_ino == self.inode else 0


def reserve(nbytes: int) -> int:
    """Returns the descriptor of a new memory file of ``nbytes``, none of them allocated. Other processes count it from
    now on. Raises OSError."""
    nodes = ",".join(map(str, sorted(allowed_nodes())))
    fd = os.memfd_create(f"{RESERVATION}:{nodes}", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def other_reservations(fd: int) -> list[Reservation]:
    """Returns the outstanding reservations, except that of ``fd``, of the processes that this one may inspect: those of
    the same user, or for root all that it can see. The order is the same in every process."""
    mine = os.fstat(fd).st_ino
    found: dict[int, Reservation] = {}
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
        with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as files:
            for file in files:
                with contextlib.suppress(OSError):
                    match = _LINK.fullmatch(os.readlink(file.path))
                    if match is None:
                        continue
                    inode = os.stat(file.path).st_ino
                    one = Reservation(Path(file.path), pid, inode, node_list(match[1]))
                    if inode != mine and one.outstanding():
                        found.setdefault(inode, one)
    return sorted(found.values(), key=lambda one: (one.pid, one.inode))


# NUMA nodes.


def _on_nodes(field: str, nodes: frozenset[int], parts: Sequence[str]) -> int:
    """Returns ``field`` of the machine's meminfo minus the ``parts`` of every node not in ``nodes``, in bytes."""
    total = meminfo_field(Path("/proc/meminfo"), field)
    if nodes:
        for folder in Path("/sys/devices/system/node").glob("node[0-9]*"):
            if int(folder.name.removeprefix("node")) not in nodes:
                total -= sum(meminfo_field(folder / "meminfo", part) for part in parts)
    return max(0, total)


def meminfo_field(file: Path, name: str) -> int:
    """Returns the field ``name`` of a file such as /proc/meminfo, in bytes."""
    found = re.search(rf"\b{re.escape(name)}:\s+(\d+) kB", file.read_text())
    return int(found[1]) * 1024 if found else 0


def allowed_nodes() -> frozenset[int]:
    """Returns the NUMA nodes that this thread may allocate on; an empty set if that is not known."""
    nodes = cpuset_nodes()
    with contextlib.suppress(OSError), Path("/proc/thread-self/numa_maps").open() as maps:
        # The first mapping, the program, has no policy of its own: the kernel shows the thread's.
        bound = _BIND_POLICY.search(maps.readline())
        if bound is not None:
            nodes = (nodes & node_list(bound[1])) or nodes
    return nodes


def cpuset_nodes() -> frozenset[int]:
    """Returns the NUMA nodes in this process's cpuset, without those that are the memory of a GPU; an empty set if they
    are not known."""
    with contextlib.suppress(OSError):
        found = re.search(r"^Mems_allowed_list:\s*([0-9,-]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
        if found is not None:
            return node_list(found[1]) - gpu_nodes()
    return frozenset()


def gpu_nodes() -> frozenset[int]:
    """Returns the NUMA nodes that are the memory of a GPU, as on GH200 and GB200, where Linux counts it as the
    machine's. Such a node has no processors."""
    nodes: set[int] = set()
    for file in Path("/proc/driver/nvidia/gpus").glob("*/numa_status"):
        with contextlib.suppress(OSError):
            nodes.update(map(int, re.findall(r"^Node:\s*(\d+)", file.read_text(), re.MULTILINE)))
    return frozenset(node for node in nodes if not _has_processors(node))


def _has_processors(node: int) -> bool:
    with contextlib.suppress(OSError):
        return bool(Path(f"/sys/devices/system/node/node{node}/cpulist").read_text().strip())
    return False


def node_list(text: str) -> frozenset[int]:
    """Returns the numbers in a list in the kernel's format, such as "0,2-3"."""
    nodes: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        nodes.update(range(int(first), int(last or first) + 1))
    return frozenset(nodes)


# Cgroups.


@dataclass(frozen=True, slots=True)
class CgroupLimit:
    """The memory limit of one cgroup, in bytes."""

    controllers: str
    """The controllers of its hierarchy, as in /proc/PID/cgroup; empty for cgroup version 2."""
    group: str
    most: int
    used: int
    """Without page cache that can be reclaimed."""

    def holds(self, pid: int) -> bool:
        """Whether process ``pid`` allocates under this limit too; True if that is not known."""
        paths = dict(_cgroups(pid))
        path = paths.get(self.controllers)
        return path is None or f"{path}/".startswith(f"{self.group.rstrip('/')}/")


def _cgroups(pid: int | str) -> list[tuple[str, str]]:
    """Returns the memory cgroups of a process as (controllers of the hierarchy, path in it)."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                found.append((controllers, path))
    return found


def cgroup_limits() -> list[CgroupLimit]:
    """Returns the limits of all memory cgroups that contain this process."""
    limits = []
    for controllers, path in _cgroups("self"):
        root = Path("/sys/fs/cgroup") / ("memory" if controllers else "")
        names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if controllers
            else ("memory.max", "memory.current", "inactive_file")
        )
        here = root / path.lstrip("/")
        for group in [here, *here.parents]:
            with contextlib.suppress(OSError, ValueError):
                most, used = (int((group / name).read_text()) for name in names[:2])
                within = "/" + group.relative_to(root).as_posix().removeprefix(".")
                limits.append(CgroupLimit(controllers, within, most, used - _cgroup_stat(group, names[2])))
            if group == root:
                break
    return limits


def _cgroup_stat(group: Path, name: str) -> int:
    for line in (group / "memory.stat").read_text().splitlines():
        if line.startswith(name + " "):
            return int(line.split()[1])
    return 0

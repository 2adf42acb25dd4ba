"""How much memory this process may take, and what other processes have reserved and not allocated yet.

A reservation is a memory file whose length says how much its process will take. The part that is allocated already
shows in the free memory of the machine; the rest is outstanding. The file has no name in any file system. It is gone
when its process is, whatever ends that, and the reservation with it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

RESERVATION = "kvoffload"
"""Before the colon in a reservation's name; behind it are the NUMA nodes that its process may allocate on."""

_LINK = re.compile(rf"/memfd:{RESERVATION}:([0-9,-]*) \(deleted\)")
_BIND_POLICY = re.compile(r" bind(?:=[a-z+|]+)?:([0-9,-]+)")
_RECLAIMABLE = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
"""Of a NUMA node: at most so much of the machine's available memory is on it."""


def available_memory(others: Iterable[Reservation] = ()) -> int:
    """Bytes this process may still allocate when ``others`` have allocated all of theirs: available memory of the
    machine on the NUMA nodes that it may allocate on, less if a cgroup grants less."""
    # Before anything else is read: what is allocated in between counts twice, rather than not at all.
    outstanding = [(other, other.outstanding()) for other in others]
    nodes = _allowed_nodes()
    available = _on_nodes("MemAvailable", nodes, _RECLAIMABLE)
    available -= sum(nbytes for other, nbytes in outstanding if not nodes or nodes & other.nodes or not other.nodes)
    for limit in _cgroup_limits():
        within = sum(nbytes for other, nbytes in outstanding if limit.holds(other.pid))
        available = min(available, limit.most - limit.used - within)
    return max(0, available)


def total_memory() -> int:
    """Bytes this process could have at best: the memory of the machine's NUMA nodes that its cpuset allows, less if a
    cgroup grants less. A binding of this process alone does not count: others of the server may have another."""
    total = _on_nodes("MemTotal", _cpuset_nodes(), ("MemTotal",))
    return min([total, *(limit.most for limit in _cgroup_limits())])


@dataclass(frozen=True, slots=True)
class Reservation:
    """A memory file of process ``pid``, which may allocate on NUMA ``nodes`` (none: not known)."""

    path: Path
    pid: int
    inode: int
    nodes: frozenset[int]

    def outstanding(self) -> int:
        """Bytes that are reserved and not allocated; none once the process has ended or closed the file."""
        try:
            status = os.stat(self.path)
        except OSError:
            return 0
        return max(0, status.st_size - status.st_blocks * 512) if status.st_ino == self.inode else 0


def reserve(nbytes: int) -> int:
    """A new memory file of ``nbytes``, of which nothing is allocated. From here on others count it. Raises OSError."""
    nodes = ",".join(map(str, sorted(_allowed_nodes())))
    fd = os.memfd_create(f"{RESERVATION}:{nodes}", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def other_reservations(fd: int) -> list[Reservation]:
    """Those that are outstanding besides ``fd``'s, of processes that this one may look into: those of the same user;
    for root, all that it sees. The order is the same in every process."""
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
                    one = Reservation(Path(file.path), pid, inode, _node_list(match[1]))
                    if inode != mine and one.outstanding():
                        found.setdefault(inode, one)
    return sorted(found.values(), key=lambda one: (one.pid, one.inode))


# NUMA nodes.


def _on_nodes(field: str, nodes: frozenset[int], parts: Sequence[str]) -> int:
    """``field`` of the machine's memory, less the sum of ``parts`` on every node that is not in ``nodes``."""
    total = _field(Path("/proc/meminfo"), field)
    if nodes:
        for folder in Path("/sys/devices/system/node").glob("node[0-9]*"):
            if int(folder.name.removeprefix("node")) not in nodes:
                total -= sum(_field(folder / "meminfo", part) for part in parts)
    return max(0, total)


def _field(file: Path, name: str) -> int:
    """Bytes under ``name`` in a file such as /proc/meminfo."""
    found = re.search(rf"\b{re.escape(name)}:\s+(\d+) kB", file.read_text())
    return int(found[1]) * 1024 if found else 0


def _allowed_nodes() -> frozenset[int]:
    """NUMA nodes that this thread may allocate on; none if that is not known, and then all."""
    nodes = _cpuset_nodes()
    with contextlib.suppress(OSError), Path("/proc/thread-self/numa_maps").open() as maps:
        # The first mapping is the program, which has no policy of its own.
        bound = _BIND_POLICY.search(maps.readline())
        if bound is not None:
            nodes = (nodes & _node_list(bound[1])) or nodes
    return nodes


def _cpuset_nodes() -> frozenset[int]:
    with contextlib.suppress(OSError):
        found = re.search(r"^Mems_allowed_list:\s*([0-9,-]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
        if found is not None:
            return _node_list(found[1])
    return frozenset()


def _node_list(text: str) -> frozenset[int]:
    """The numbers in a list as the kernel writes it, such as "0,2-3"."""
    nodes: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        nodes.update(range(int(first), int(last or first) + 1))
    return frozenset(nodes)


# Cgroups.


@dataclass(frozen=True, slots=True)
class _CgroupLimit:
    controllers: str
    """Of its hierarchy, as /proc/PID/cgroup has them; none: of version 2."""
    group: str
    most: int
    used: int
    """Without page cache that can go."""

    def holds(self, pid: int) -> bool:
        """Whether process ``pid`` allocates under this limit too; yes if that is not known."""
        paths = dict(_cgroups(pid))
        path = paths.get(self.controllers)
        return path is None or f"{path}/".startswith(f"{self.group.rstrip('/')}/")


def _cgroups(pid: int | str) -> list[tuple[str, str]]:
    """The memory cgroups of a process: controllers of the hierarchy and path in it."""
    found = []
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                found.append((controllers, path))
    return found


def _cgroup_limits() -> list[_CgroupLimit]:
    """Every memory cgroup around this process that has a limit."""
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
                limits.append(_CgroupLimit(controllers, within, most, used - _cgroup_stat(group, names[2])))
            if group == root:
                break
    return limits


def _cgroup_stat(group: Path, name: str) -> int:
    for line in (group / "memory.stat").read_text().splitlines():
        if line.startswith(name + " "):
            return int(line.split()[1])
    return 0

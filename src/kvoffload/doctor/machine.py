"""Checks the machine: memory and its limits, huge pages, NUMA nodes, processors, open files, speed of copies."""

from __future__ import annotations

import mmap
import os
import platform
import re
import resource
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from kvoffload.abc import ConfigError
from kvoffload.doctor.configuration import Plan
from kvoffload.doctor.doors import Door
from kvoffload.doctor.findings import Figure, Finding, Level
from kvoffload.doctor.process import Report
from kvoffload.host.limits import (
    available_memory,
    cgroup_limits,
    cpuset_nodes,
    gpu_nodes,
    meminfo_field,
    memory_grows,
    other_reservations,
    reserve,
    total_memory,
)
from kvoffload.host.pool import HostPool
from kvoffload.tiers.disk.start import allow_descriptors
from kvoffload.transfer.blocks import BlockCopier
from kvoffload.units import format_bytes, percentage

MEMINFO = Path("/proc/meminfo")
PINNED_BYTES = 256 << 20
"""What a store's client pins at most for RDMA, beside the memory that it gives to the store."""
SHARED_MEMORY = Path("/dev/shm")
NODES = Path("/sys/devices/system/node")
SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
TIGHT_SHARE = 0.9
"""A pool that takes more of the available memory than this leaves too little for the engine."""
MEASURED_SHARE = 8
"""At most one part in so many of the available memory is used to measure copies."""
BLOCK_BYTES = 2 << 20
DEVICE_BLOCKS = 32
HUGE_SHARE = 0.75
"""A few pages that cannot be collapsed matter little."""
HUGE_KERNEL = (6, 1)
"""The first version of Linux that collapses pages of memory files on request."""
LEAST_PROCESSORS = 2
_OVERCOMMIT_NEVER = 2


def check(arguments: Mapping[str, Any], report: Report) -> None:
    """Reports findings, and the fact "copy_bytes_per_s". ``arguments``: "plan"; "seconds" per measurement; "pool_bytes"
    of the pool that is measured."""
    plan = Plan.from_dict(arguments["plan"])
    report.stage("looks at memory and its limits")
    _check_memory(plan, report)
    _check_swap(report)
    _check_nodes(plan, report)
    _check_processors(report)
    _check_descriptors(plan, report)
    _check_locked_memory(plan, report)
    report.stage("measures copies")
    _measure_copies(arguments["seconds"], arguments["pool_bytes"], report)


def _check_memory(plan: Plan, report: Report) -> None:
    """Compares the memory of the configuration with the memory that this process could allocate now."""
    mark = reserve(mmap.PAGESIZE)
    try:
        others = other_reservations(mark)
        available, total = available_memory(others), total_memory()
        reserved = sum(other.outstanding() for other in others)
    finally:
        os.close(mark)
    machine = meminfo_field(MEMINFO, "MemTotal")
    limits = sorted(cgroup_limits(), key=lambda limit: limit.most)
    where = "on this machine"
    if limits and limits[0].most < machine:
        where = f"within the memory limit of {format_bytes(limits[0].most)} of cgroup {limits[0].group}"
    figures: dict[str, Figure] = {
        "available_bytes": available,
        "total_bytes": total,
        "machine_bytes": machine,
        "cgroup_limit_bytes": limits[0].most if limits else None,
        "reserved_by_other_pools_bytes": reserved,
    }
    if plan.host_bytes is None and not plan.staging_bytes:
        text = f"{format_bytes(available)} of memory can be allocated {where}"
        report.found("memory.available", Level.OK, text, figures=figures)
        return
    needed = plan.needed_bytes
    figures["needed_bytes"] = needed
    parts = {
        plan.host_setting: plan.host_bytes,
        "kvoffload's staging memory": plan.staging_bytes,
        "the memory that is given to stores": sum(tier.memory_bytes for tier in plan.tiers),
    }
    first, *others_beside = (name for name, nbytes in parts.items() if nbytes)
    what = " with ".join([first, " and ".join(others_beside)]) if others_beside else first
    taken = f"; other pools that start now take {format_bytes(reserved)} of it" if reserved else ""
    limit = "" if where == "on this machine" else ", or raise the container's memory limit"
    fix = f"{plan.set_host_bytes(max(0, available - needed + (plan.host_bytes or 0)) * 8 // 10)} or less{limit}"
    if needed > available and memory_grows():
        text = (
            f"{what} is {format_bytes(needed)}, and {format_bytes(available)} can be allocated {where} now{taken}; "
            "this virtual machine gets more memory when it uses what it has, up to a limit that it does not know"
        )
        report.found("memory.tight", Level.WARNING, text, fix, figures=figures)
    elif needed > available:
        text = (
            f"{what} is {format_bytes(needed)}, and only {format_bytes(available)} can be allocated "
            f"{where}{taken}: a server would not start"
        )
        report.found("memory.too_little", Level.PROBLEM, text, fix, figures=figures)
    elif needed > available * TIGHT_SHARE:
        text = (
            f"{what} is {format_bytes(needed)} of the {format_bytes(available)} that can be allocated "
            f"{where}{taken}: {format_bytes(available - needed)} are left for the engine and the page cache"
        )
        report.found("memory.tight", Level.WARNING, text, fix, figures=figures)
    else:
        text = f"{what} is {format_bytes(needed)} of {format_bytes(available)} available {where}{taken}"
        report.found("memory.fits", Level.OK, text, figures=figures)
    _check_overcommit(needed, report)
    check_shared_memory(plan, report)


def check_shared_memory(plan: Plan, report: Report, at: Path = SHARED_MEMORY) -> None:
    """Compares the file of vLLM in ``at`` with the room there, which a container limits to 64 MiB."""
    if not plan.shared_memory_bytes or not at.is_dir():
        return
    free, size = shutil.disk_usage(at).free, plan.shared_memory_bytes
    figures: dict[str, Figure] = {"free_bytes": free, "needed_bytes": size}
    text = f"{plan.host_setting} is {format_bytes(size)}, in {at}, where {format_bytes(free)} are free"
    if size <= free:
        report.found("memory.shm_fits", Level.OK, text, figures=figures)
        return
    fix = (
        f"give it more: docker run --shm-size or --ipc=host, in Kubernetes an emptyDir with medium Memory at "
        f"{at}, else mount -o remount,size=...; or {plan.set_host_bytes(free * 8 // 10)}"
    )
    report.found("memory.shm_small", Level.PROBLEM, f"{text}: vLLM does not start", fix, figures=figures)


def _check_overcommit(needed: int, report: Report) -> None:
    if _number("/proc/sys/vm/overcommit_memory") != _OVERCOMMIT_NEVER:
        return
    left = meminfo_field(MEMINFO, "CommitLimit") - meminfo_field(MEMINFO, "Committed_AS")
    if needed > left:
        text = (
            f"vm.overcommit_memory is 2, and the kernel commits only {format_bytes(max(0, left))} more: allocating the "
            "pool would fail"
        )
        fix = "sysctl vm.overcommit_memory=0, or raise vm.overcommit_ratio"
        report.found("memory.overcommit", Level.PROBLEM, text, fix, figures={"commit_left_bytes": left})


def _check_swap(report: Report) -> None:
    swap = meminfo_field(MEMINFO, "SwapTotal")
    if swap:
        text = f"{format_bytes(swap)} of swap: the kernel may swap out blocks of the pool, whose loads then take longer"
        fix = "swapoff -a, or sysctl vm.swappiness=1"
        report.found("memory.swap", Level.WARNING, text, fix, {"swap_bytes": swap})


def _check_nodes(plan: Plan, report: Report) -> None:
    report.finding(*node_findings(node_sizes(NODES, gpu_nodes()), cpuset_nodes(), plan))


def node_sizes(folder: Path, of_gpus: frozenset[int]) -> dict[int, int]:
    """Returns the bytes of the NUMA nodes that are described in ``folder``, without those ``of_gpus``."""
    nodes = sorted({int(path.name[4:]) for path in folder.glob("node[0-9]*")} - of_gpus)
    return {node: meminfo_field(folder / f"node{node}" / "meminfo", "MemTotal") for node in nodes}


def node_findings(sizes: Mapping[int, int], allowed: frozenset[int], plan: Plan) -> list[Finding]:
    """Returns the findings about NUMA nodes with so many bytes each; ``allowed`` are the nodes of the cpuset."""
    with_memory = {node: size for node, size in sizes.items() if size}
    if len(with_memory) < 2:
        return []
    figures: dict[str, Figure] = {f"node{node}_bytes": size for node, size in with_memory.items()}
    inside = {node: size for node, size in with_memory.items() if not allowed or node in allowed}
    amounts = ", ".join(format_bytes(size) for size in with_memory.values())
    text = f"{len(with_memory)} NUMA nodes with {amounts}"
    if len(inside) < len(with_memory):
        nodes = ", ".join(map(str, sorted(inside)))
        larger = f"if {plan.host_setting} is to be larger"
        fix = f"give the container the memory of the other nodes too, {larger} (cpuset.mems)"
        text += f"; this process may use {nodes} only"
        return [Finding("numa.cpuset", Level.NOTE, text, fix, figures=figures)]
    if plan.host_bytes is not None and plan.host_bytes > max(inside.values()):
        text += (
            f"; {plan.host_setting} is more than any of them, so a part of each pool is far from its device: {_SLOWER}"
        )
        setting = ", engines_per_node" if plan.door is Door.CONNECTOR else ""
        fix = f"run one engine per node, with a pool that fits its node (numactl --membind{setting})"
        return [Finding("numa.spans", Level.NOTE, text, fix, figures=figures)]
    return [Finding("numa.nodes", Level.OK, f"{text}; the pool fits one of them", figures=figures)]


_SLOWER = "copies of that part are slower"


def _check_processors(report: Report) -> None:
    may_use, quota = len(os.sched_getaffinity(0)), _processor_quota()
    usable = min(float(may_use), quota or float(may_use))
    figures: dict[str, Figure] = {"processors": may_use, "quota_processors": quota}
    of = f" (CPU limit of the container; the machine has {may_use})" if quota is not None and quota < may_use else ""
    if usable < LEAST_PROCESSORS:
        text = f"{usable:g} processor{of}: threads that move bytes take time from the engine's steps"
        fix = f"give the container at least {LEAST_PROCESSORS} processors, better 4, per engine"
        report.found("processors.few", Level.WARNING, text, fix, figures=figures)
    else:
        report.found("processors.enough", Level.OK, f"{usable:g} processors{of}", figures=figures)


def _processor_quota() -> float | None:
    """Returns the processors that the control group of this process may use, or None if there is no limit."""
    root = Path("/sys/fs/cgroup")
    groups = {root}
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, inside = line.split(":", 2)
            if not controllers:
                here = root / inside.lstrip("/")
                groups |= {here, *here.parents}
    quotas = []
    for group in groups:
        # "max" is no number: there is no limit.
        with suppress(OSError, ValueError):
            allowed, period = map(int, (group / "cpu.max").read_text().split())
            quotas.append(allowed / period)
    allowed_1, period_1 = _number(root / "cpu/cpu.cfs_quota_us"), _number(root / "cpu/cpu.cfs_period_us")
    if allowed_1 is not None and allowed_1 > 0 and period_1:
        quotas.append(allowed_1 / period_1)
    return min(quotas, default=None)


def _check_descriptors(plan: Plan, report: Report) -> None:
    for tier in plan.tiers:
        if tier.directory is None or tier.bytes is None:
            continue
        try:
            allow_descriptors(tier.bytes, engines=1)
        except ConfigError as error:
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            wrong = error.within(tier.prefix).wrong
            report.found("descriptors.few", Level.PROBLEM, wrong, error.fix, {"hard_limit": hard})


def _check_locked_memory(plan: Plan, report: Report) -> None:
    """Checks the limit only where it applies: drivers of GPUs pin memory without regard to it."""
    pinning = [tier for tier in plan.tiers if tier.pins_memory]
    if not pinning:
        return
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    needed = sum(tier.memory_bytes + PINNED_BYTES for tier in pinning)
    if hard != resource.RLIM_INFINITY and hard < needed and os.geteuid() != 0:
        text = (
            f"{pinning[0].prefix}protocol: RDMA pins {format_bytes(needed)} of the client's memory, and this process "
            f"may lock {format_bytes(hard)}: the store's client would fail"
        )
        fix = "ulimit -l unlimited; in Docker --ulimit memlock=-1, or --cap-add IPC_LOCK"
        report.found("memory.locked", Level.PROBLEM, text, fix, {"limit_bytes": hard, "needed_bytes": needed})


# Measured.


def _measure_copies(seconds: float, pool_bytes: int, report: Report) -> None:
    """Allocates a small pool as a server does, and copies blocks into it and out of it."""
    nbytes = min(pool_bytes, available_memory() // MEASURED_SHARE) // BLOCK_BYTES * BLOCK_BYTES
    if nbytes < BLOCK_BYTES:
        return
    pool = HostPool(nbytes // BLOCK_BYTES, BLOCK_BYTES)
    try:
        pool.wait_until_touched()
        _check_sharing(pool, report)
        _check_huge_pages(_huge_bytes(pool.data.ctypes.data), nbytes, report)
        blocks = min(DEVICE_BLOCKS, pool.num_blocks)
        device = np.ones((1, blocks, BLOCK_BYTES), dtype=np.uint8)
        copier = BlockCopier([device], pool.data.reshape(pool.num_blocks, 1, BLOCK_BYTES))
        store, load = (_copy_rate(copier, blocks, pool.num_blocks, is_store, seconds) for is_store in (True, False))
    finally:
        pool.close()
    text = (
        f"copies between memory and the pool: {store / 1e9:.1f} GB/s in, {load / 1e9:.1f} GB/s out, with this "
        "processor; a GPU copies by itself, over its bus"
    )
    figures: dict[str, Figure] = {"store_bytes_per_s": round(store), "load_bytes_per_s": round(load)}
    report.found("copies.measured", Level.OK, text, figures=figures)
    report.fact("copy_bytes_per_s", load)


def _check_sharing(pool: HostPool, report: Report) -> None:
    """Opens the pool from another process, as the scheduler's process does if there are tiers."""
    handle = pool.handle()
    pid = os.fork()
    if pid == 0:
        try:
            handle.open()
        except BaseException:
            os._exit(1)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        text = "a process of this user cannot open the memory of another one (/proc/PID/fd): tiers need that"
        fix = "run without the sandbox that forbids it (gVisor, a mount of /proc with hidepid, a seccomp profile)"
        report.found("memory.not_shared", Level.PROBLEM, text, fix)


def _copy_rate(copier: BlockCopier, blocks: int, slots: int, is_store: bool, seconds: float) -> float:
    """Returns the bytes per second of copies of so many blocks at a time, round and round through the slots."""
    moved, begun = 0, time.perf_counter()
    numbers, parts = np.arange(blocks), np.zeros(blocks, dtype=np.int64)
    at = 0
    while True:
        copier.copy(numbers, (numbers + at) % slots, parts, is_store)
        moved, at = moved + blocks * BLOCK_BYTES, at + blocks
        passed = time.perf_counter() - begun
        if passed >= seconds:
            return moved / passed


def _huge_bytes(address: int) -> int:
    """Returns how many bytes of the mapping at ``address`` are in huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        mapping = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if mapping:
            inside = int(mapping[1], 16) <= address < int(mapping[2], 16)
        elif inside and line.startswith("ShmemPmdMapped:"):
            return int(line.split()[1]) * 1024
    return 0


def _check_huge_pages(huge: int, nbytes: int, report: Report) -> None:
    figures: dict[str, Figure] = {"huge_bytes": huge, "tested_bytes": nbytes}
    if huge >= nbytes * HUGE_SHARE:
        text = f"huge pages: the pool gets them ({percentage(huge, nbytes)})"
        report.found("huge_pages.used", Level.OK, text, figures=figures)
        return
    setting = _shmem_setting()
    kernel = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    text = f"huge pages: the pool gets {format_bytes(huge)} of {format_bytes(nbytes)}"
    slower = "; copies and direct I/O are slower with ordinary pages"
    if setting == "deny" or kernel < HUGE_KERNEL:
        text += f" (Linux {platform.release()}, shmem_enabled is {setting or 'unknown'}){slower}"
        fix = f"echo advise > {SHMEM_ENABLED}" if kernel >= HUGE_KERNEL else f"echo always > {SHMEM_ENABLED}"
        report.found("huge_pages.none", Level.WARNING, text, fix, figures=figures)
    else:
        text += f": memory is fragmented, or it took too long{slower}"
        fix = "echo 1 > /proc/sys/vm/compact_memory before the server starts"
        report.found("huge_pages.few", Level.NOTE, text, fix, figures=figures)


def _shmem_setting() -> str:
    with suppress(OSError):
        chosen = re.search(r"\[(\w+)\]", SHMEM_ENABLED.read_text())
        return chosen[1] if chosen else ""
    return ""


def _number(path: str | Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(Path(path).read_text())
    return None

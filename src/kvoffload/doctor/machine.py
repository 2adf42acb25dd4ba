"""Checks the memory of the machine and its limits."""

from __future__ import annotations

import mmap
import os
import shutil
from contextlib import suppress
from pathlib import Path

from kvoffload.doctor.configuration import PlannedServer
from kvoffload.doctor.findings import Figure, Level, Report
from kvoffload.host.limits import (
    available_memory,
    cgroup_limits,
    meminfo_field,
    memory_grows,
    other_reservations,
    reserve,
    total_memory,
)
from kvoffload.host.pool import SLOT_ALIGNMENT, HostPool
from kvoffload.units import format_bytes

MEMINFO = Path("/proc/meminfo")
SHARED_MEMORY = Path("/dev/shm")
TIGHT_SHARE = 0.9
"""A pool that takes more of the available memory than this leaves too little for the engine."""


def check(plan: PlannedServer, report: Report) -> None:
    """Reports whether the memory of ``plan`` can be allocated and shared."""
    report.stage("looks at memory and its limits")
    _check_memory(plan, report)
    if plan.tiers:
        _check_sharing(report)


def _check_memory(plan: PlannedServer, report: Report) -> None:
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
    check_shared_memory(plan, report)


def check_shared_memory(plan: PlannedServer, report: Report, at: Path = SHARED_MEMORY) -> None:
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


def _check_sharing(report: Report) -> None:
    """Opens a pool from another process, as the clients of stores do."""
    pool = HostPool(1, SLOT_ALIGNMENT)
    try:
        pool.wait_until_touched()
        handle = pool.handle()
        pid = os.fork()
        if pid == 0:
            with suppress(BaseException):
                handle.open()
                os._exit(0)
            os._exit(1)
        is_shared = os.waitpid(pid, 0)[1] == 0
    finally:
        pool.close()
    if not is_shared:
        text = "a process of this user cannot open the memory of another one (/proc/PID/fd): tiers need that"
        fix = "run without the sandbox that forbids it (gVisor, a mount of /proc with hidepid, a seccomp profile)"
        report.found("memory.not_shared", Level.PROBLEM, text, fix)

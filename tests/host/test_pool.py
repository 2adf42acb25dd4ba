"""HostPool: its memory is allocated when the constructor returns, and freed when it is closed or its process killed."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pickle
import platform
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import ByteArray, ConfigError
from kvoffload.host import limits as memory
from kvoffload.host import numa, touch
from kvoffload.host import pool as hostpool
from kvoffload.host.limits import Reservation, available_memory, cpuset_nodes, total_memory
from kvoffload.host.pool import HostPool, PoolHandle, padded_slot_bytes
from kvoffload.units import parse_bytes

GIB = 1 << 30
NUM_BLOCKS, SLOT = 64, 8192


@pytest.fixture
def pool() -> Iterator[HostPool]:
    pool = HostPool(NUM_BLOCKS, SLOT)
    yield pool
    pool.close()


def open_files() -> set[str]:
    """Returns the files that this process has open, with their inodes."""
    names = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{fd}")
            names.add(f"{name} {os.fstat(int(fd)).st_ino}")
    return names


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("block_bytes", "slot_bytes"), [(1, 4096), (4095, 4096), (4096, 4096), (4097, 8192), (40_000, 40_960)]
)
def test_slots_are_padded_to_4_kib(block_bytes: int, slot_bytes: int) -> None:
    assert padded_slot_bytes(block_bytes) == slot_bytes


# The pool.


def test_all_memory_is_allocated_at_once(pool: HostPool) -> None:
    status = os.fstat(pool.fd)
    assert status.st_size == pool.nbytes == NUM_BLOCKS * SLOT
    assert status.st_blocks * 512 >= pool.nbytes


def test_where_huge_pages_take_too_long_the_pages_remain_small(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(touch, "STEP", 16 * SLOT)
    monkeypatch.setattr(touch, "COLLAPSE_GRACE_S", -1.0)
    with caplog.at_level(logging.INFO):
        pool = HostPool(NUM_BLOCKS, SLOT)
        pool.data[:] = 5
        assert pool.wait_until_touched()
    assert [line for line in caplog.messages if "ordinary pages from 128 KiB on" in line] == caplog.messages
    assert (pool.data == 5).all()
    pool.close()
    assert not pool.wait_until_touched(pool.nbytes + 1), "a closed pool is not touched any more"


def test_nothing_is_touched_after_a_toucher_was_closed() -> None:
    """Its memory may be unmapped then."""
    toucher = touch.Toucher(np.empty(touch.STEP, dtype=np.uint8), collapse=False)
    toucher.close()
    assert not toucher._thread.is_alive()


def test_a_closed_pool_leaves_no_open_file() -> None:
    before = open_files()
    pool = HostPool(NUM_BLOCKS, SLOT)
    assert len(open_files() - before) >= 1
    fd = pool.fd
    pool.close()
    assert open_files() == before
    with pytest.raises(OSError):
        os.fstat(fd)
    assert pool.data.size == 0


def test_closing_twice_closes_no_other_file() -> None:
    pool = HostPool(NUM_BLOCKS, SLOT)
    pool.close()
    other = os.open("/dev/null", os.O_RDONLY)
    reused = other if other == pool.fd else os.dup2(other, pool.fd)
    try:
        pool.close()
        os.fstat(reused)
    finally:
        for fd in {other, reused}:
            os.close(fd)


def test_arrays_in_use_outlive_the_pool() -> None:
    before = open_files()
    pool = HostPool(NUM_BLOCKS, SLOT)
    row = pool.data[2]
    row[:] = 3
    pool.close()
    assert (row == 3).all()
    del row, pool
    assert open_files() == before


def test_the_pool_has_no_name_and_a_kill_leaves_nothing_behind() -> None:
    code = f"""
import os, sys
from kvoffload.host.pool import HostPool
pool = HostPool({NUM_BLOCKS}, {SLOT})
pool.data[:] = 1
print(os.fstat(pool.fd).st_nlink, os.readlink(f"/proc/self/fd/{{pool.fd}}"), flush=True)
sys.stdin.read()
"""
    shared = Path("/dev/shm")
    before = {path.name for path in shared.iterdir()} if shared.is_dir() else set()
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        links, name = child.stdout.readline().strip().split(" ", 1)
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    assert links == "0", "no directory contains the file: it ends with its last user"
    assert name.startswith("/memfd:")
    assert not Path(name).exists()
    after = {path.name for path in shared.iterdir()} if shared.is_dir() else set()
    assert not any("kvoffload" in new for new in after - before)
    assert not Path(f"/proc/{child.pid}").exists()


# Opened by another process.

OTHER = """
import pickle, sys
handle = pickle.loads(bytes.fromhex(sys.argv[1]))
"""


def in_another_process(handle: PoolHandle, code: str) -> str:
    command = [sys.executable, "-c", OTHER + code, pickle.dumps(handle).hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_another_process_reads_and_writes_the_same_bytes(pool: HostPool) -> None:
    pool.data[3, :4] = [1, 2, 3, 4]
    printed = in_another_process(
        pool.handle(),
        "data = handle.open(); print(data.shape, data[3, :4].tolist()); data[5, 7] = 99",
    )
    assert printed == f"({NUM_BLOCKS}, {SLOT}) [1, 2, 3, 4]\n"
    assert pool.data[5, 7] == 99


def test_a_handle_of_a_closed_pool_does_not_open_another_file() -> None:
    pool = HostPool(1, SLOT)
    handle = pool.handle()
    pool.close()
    with pytest.raises(ConfigError, match=r"cannot be opened|is gone"):
        handle.open()
    with open(os.devnull) as other:
        stale = dataclasses.replace(handle, fd=other.fileno())
        with pytest.raises(ConfigError, match="is gone"):
            stale.open()


def test_a_pool_of_another_machine_is_refused(pool: HostPool) -> None:
    elsewhere = dataclasses.replace(pool.handle(), boot_id="11111111-2222-3333-4444-555555555555")
    with pytest.raises(ConfigError, match="another node"):
        elsewhere.check_reachable()
    with pytest.raises(ConfigError, match="another node"):
        elsewhere.open()


# Several pools at once.

RESERVING = """
import os, sys
from kvoffload.host import pool as hostpool
from kvoffload.host import touch
hostpool.available_memory = lambda others=(): 1 << 40
def blocked(fd, offset, size):
    print("reserved", flush=True)
    sys.stdin.read()
os.posix_fallocate = blocked
hostpool.HostPool(int(sys.argv[1]), 4096)
"""


@contextlib.contextmanager
def reserving(num_blocks: int) -> Iterator[subprocess.Popen[str]]:
    """Starts a process that has reserved its pool but not allocated it yet."""
    command = [sys.executable, "-c", RESERVING, str(num_blocks)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "reserved\n"
            yield process
        finally:
            process.kill()


def leave(monkeypatch: pytest.MonkeyPatch, num_blocks: int) -> None:
    """Pretends that the machine has ``num_blocks`` pages of memory, minus those that pools allocate from now on.
    Ignores the reservations of processes other than this one and its children, which may run the same tests."""
    here, before = os.getpid(), allocated_by_pools().keys()

    def is_mine(pid: int) -> bool:
        with contextlib.suppress(OSError):
            parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
            return here in (pid, int(parent))
        return False

    def field(file: Path, name: str) -> int:
        assert name == "MemAvailable"
        return num_blocks * 4096 - sum(nbytes for inode, nbytes in allocated_by_pools().items() if inode not in before)

    monkeypatch.setattr(memory, "meminfo_field", field)
    monkeypatch.setattr(memory, "cgroup_limits", list)
    see = memory.other_reservations
    monkeypatch.setattr(hostpool, "other_reservations", lambda fd: [one for one in see(fd) if is_mine(one.pid)])


def allocated_by_pools() -> dict[int, int]:
    """Returns the bytes allocated by each pool of this process, by inode."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "memfd:kvoffload" in os.readlink(f"/proc/self/fd/{fd}"):
                found[os.fstat(int(fd)).st_ino] = os.fstat(int(fd)).st_blocks * 512
    return found


def test_a_reservation_of_another_process_counts_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that start together must not all see the same free memory and then all allocate it."""
    leave(monkeypatch, 100)
    monkeypatch.setattr(hostpool, "RESERVATION_DEADLINE_S", 0.0)
    with reserving(60) as other:
        HostPool(40, 4096).close()
        with pytest.raises(ConfigError, match=r"164 KiB requested, but only 160 KiB .*beside 240 KiB") as caught:
            HostPool(41, 4096)
        assert f"process {other.pid}" in str(caught.value)
        other.kill()
        other.wait()
        HostPool(100, 4096).close()


def test_allocated_memory_does_not_count_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    leave(monkeypatch, 100)
    first = HostPool(60, 4096)
    HostPool(40, 4096).close()
    with pytest.raises(ConfigError, match=r"only 160 KiB can be allocated here; set"):
        HostPool(41, 4096)
    first.close()


def test_if_pools_reserve_at_the_same_time_only_those_that_fit_together_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leave(monkeypatch, 100)
    monkeypatch.setattr(hostpool, "RESERVATION_DEADLINE_S", 600.0)
    for _ in range(10):
        together, made, refused = threading.Barrier(4), list[HostPool](), list[ConfigError]()

        def make(together: threading.Barrier = together, made: list[HostPool] = made, no: Any = refused) -> None:
            together.wait()
            try:
                made.append(HostPool(60, 4096))
            except ConfigError as error:
                no.append(error)

        makers = [threading.Thread(target=make) for _ in range(4)]
        for maker in makers:
            maker.start()
        for maker in makers:
            maker.join()
        assert (len(made), len(refused)) == (1, 3)
        made[0].close()


class Time:
    """A clock that advances only in ``sleep``."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_wait_for_others_is_logged_and_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    leave(monkeypatch, 100)
    time = Time()
    monkeypatch.setattr(hostpool, "time", time)
    monkeypatch.setattr(os, "getpid", lambda: 0)
    with reserving(60) as other, caplog.at_level(logging.INFO), pytest.raises(ConfigError, match="beside 240 KiB"):
        HostPool(60, 4096)
    (line,) = (message for message in caplog.messages if "waiting" in message)
    assert f"beside 240 KiB that other pools have reserved but not allocated yet (process {other.pid})" in line
    assert 0.0 <= time.now - hostpool.RESERVATION_DEADLINE_S < 0.1


def test_memory_allocated_by_others_meanwhile_is_noticed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = iter([100, 100, 100, 100, 50])
    monkeypatch.setattr(hostpool, "available_memory", lambda others=(): next(left) * 4096)
    monkeypatch.setattr(hostpool, "ALLOCATION_STEP", 20 * 4096)
    monkeypatch.setattr(hostpool, "LOG_EVERY_S", 0.0)
    before = open_files()
    with caplog.at_level(logging.INFO), pytest.raises(ConfigError) as caught:
        HostPool(100, 4096)
    assert open_files() == before
    assert "240 KiB are still to be allocated, but only 200 KiB are available; set host_bytes to 288 KiB" in str(
        caught.value
    )
    assert caplog.messages == [f"kvoffload: host pool: {done} KiB of 400 KiB allocated" for done in (80, 160)]


# No room.


def test_a_pool_that_does_not_fit_is_refused_before_any_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostpool, "available_memory", lambda others=(): 10 * 4096)
    before, reserved = open_files(), list[int]()
    with monkeypatch.context() as patch:
        patch.setattr(hostpool, "reserve", reserved.append)
        with pytest.raises(ConfigError) as caught:
            HostPool(11, 4096)
    assert open_files() == before
    assert not reserved, "other pools that start meanwhile would be refused because of it"
    message = str(caught.value)
    assert "host_bytes" in message
    assert "44 KiB" in message, "the request"
    assert "40 KiB" in message, "the available memory"
    fix = re.search(r"set host_bytes to (.+) or less", message)
    assert fix is not None
    assert 0 < parse_bytes("host_bytes", fix[1]) <= 10 * 4096
    HostPool(10, 4096).close()


@pytest.mark.parametrize(("most", "starts"), [(100, True), (90, False)])
def test_a_pool_takes_memory_that_grows_with_use(monkeypatch: pytest.MonkeyPatch, most: int, starts: bool) -> None:
    """A virtual machine with 30 pages that gets as many more as are taken, up to a limit."""
    taken = 0
    allocate = os.posix_fallocate

    def take(fd: int, offset: int, nbytes: int) -> None:
        nonlocal taken
        allocate(fd, offset, nbytes)
        taken += nbytes // 4096
        assert taken <= most, "more than there is"

    monkeypatch.setattr(os, "posix_fallocate", take)
    monkeypatch.setattr(hostpool, "available_memory", lambda others=(): min(30, most - taken) * 4096)
    monkeypatch.setattr(hostpool, "ALLOCATION_STEP", 20 * 4096)
    monkeypatch.setattr(hostpool, "GROWTH_DEADLINE_S", 0.1)
    with pytest.raises(ConfigError, match="only 120 KiB can be allocated here"):
        HostPool(100, 4096)
    assert taken == 0, "where memory does not grow nothing is taken"
    monkeypatch.setattr(hostpool, "memory_grows", lambda: True)
    before = open_files()
    if starts:
        HostPool(100, 4096).close()
        assert taken == 100
    else:
        with pytest.raises(
            ConfigError, match="memory does not grow: 80 KiB are still to be allocated, but only 40 KiB"
        ):
            HostPool(100, 4096)
    assert open_files() == before


def test_a_refusal_of_the_kernel_is_a_config_error_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = open_files()
    with pytest.raises(ConfigError, match=r"host_bytes.*512 KiB.*No space left on device.*set host_bytes lower"):
        HostPool(NUM_BLOCKS, SLOT)
    assert open_files() == before


# Available memory.


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that replaces /: 8 GiB of memory are available, and there is no cgroup."""
    monkeypatch.setattr(memory, "Path", lambda path: tmp_path / str(path).lstrip("/"))
    write(tmp_path, "proc/meminfo", f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {8 << 20} kB\n")
    return tmp_path


def write(root: Path, path: str, text: object) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(f"{text}\n")


def cgroup2(root: Path, path: str, limit: object, used: int, inactive: int = 0) -> None:
    folder = f"sys/fs/cgroup/{path}"
    write(root, f"{folder}/memory.max", limit)
    write(root, f"{folder}/memory.current", used)
    write(root, f"{folder}/memory.stat", f"anon 1\ninactive_file {inactive}\nactive_file 77")


def test_without_a_cgroup_the_machines_memory_counts(root: Path) -> None:
    assert available_memory() == 8 * GIB


@pytest.mark.parametrize(
    ("limit", "used", "inactive", "available"),
    [
        ("max", GIB, 0, 8 * GIB),
        (4 * GIB, 3 * GIB, 0, GIB),
        (4 * GIB, 3 * GIB, 2 * GIB, 3 * GIB),
        (64 * GIB, GIB, 0, 8 * GIB),
        (4 * GIB, 5 * GIB, 0, 0),
    ],
    ids=["no limit", "limit", "reclaimable page cache", "limit beyond the machine", "over the limit"],
)
def test_a_cgroup_limit_may_be_lower(root: Path, limit: object, used: int, inactive: int, available: int) -> None:
    """Names of cgroups may have colons: containerd's do."""
    write(root, "proc/self/cgroup", "0::/pod/slice:cri-containerd:box")
    cgroup2(root, "pod/slice:cri-containerd:box", limit, used, inactive)
    assert available_memory() == available


def test_the_lowest_limit_of_nested_cgroups_counts(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/pod/box")
    cgroup2(root, "pod/box", "max", GIB)
    cgroup2(root, "pod", 3 * GIB, 2 * GIB)
    assert available_memory() == GIB


def test_a_cgroup_of_version_1(root: Path) -> None:
    write(root, "proc/self/cgroup", "5:cpu,cpuacct:/other\n4:memory:/box\n0::/box")
    write(root, "sys/fs/cgroup/memory/other/memory.limit_in_bytes", 1)
    write(root, "sys/fs/cgroup/memory/other/memory.usage_in_bytes", 1)
    write(root, "sys/fs/cgroup/memory/other/memory.stat", "")
    folder = "sys/fs/cgroup/memory/box"
    write(root, f"{folder}/memory.limit_in_bytes", 5 * GIB)
    write(root, f"{folder}/memory.usage_in_bytes", 4 * GIB)
    write(root, f"{folder}/memory.stat", f"inactive_file 5\ntotal_inactive_file {GIB}")
    assert available_memory() == 2 * GIB


def numa_files(root: Path, allowed: str, policy: str = "default") -> None:
    """Describes two nodes: the first has 10 of the 16 GiB, and 5 of the 8 GiB available."""
    write(root, "proc/self/status", f"Name:\tx\nMems_allowed:\t3\nMems_allowed_list:\t{allowed}\nvoluntary:\t1")
    write(root, "proc/thread-self/numa_maps", f"55aa {policy} file=/bin/x\n66bb bind:1 heap")
    for node, (total, free) in enumerate([(10 << 20, 5 << 20), (6 << 20, 3 << 20)]):
        parts = {"MemTotal": total, "MemFree": free // 2, "Active(file)": free // 4, "Inactive(file)": free // 8}
        parts |= {"SReclaimable": free // 8, "Active(anon)": 77, "Inactive": 88}
        lines = "".join(f"Node {node} {name}:  {kib} kB\n" for name, kib in parts.items())
        write(root, f"sys/devices/system/node/node{node}/meminfo", lines)


@pytest.mark.parametrize(
    ("allowed", "policy", "available", "total"),
    [
        ("0-1", "default", 8, 16),
        ("0", "default", 5, 10),
        ("1", "default", 3, 6),
        ("0-1", "bind:1", 3, 16),
        ("0-1", "bind=static:0", 5, 16),
        ("0,1", "bind=relative|balancing:0-1", 8, 16),
        ("0-1", "interleave:1", 8, 16),
        ("0-1", "prefer:1", 8, 16),
    ],
)
def test_memory_of_other_numa_nodes_does_not_count(
    root: Path, allowed: str, policy: str, available: int, total: int
) -> None:
    numa_files(root, allowed, policy)
    assert available_memory() == available * GIB
    assert total_memory() == total * GIB, "one rank's memory policy does not apply to the others"


@pytest.mark.parametrize(
    ("node", "processors", "available", "total"), [("1", "", 5, 10), ("1", "8-15", 8, 16), ("-1", "", 8, 16)]
)
def test_memory_of_a_gpu_that_linux_counts_does_not_count(
    root: Path, node: str, processors: str, available: int, total: int
) -> None:
    """As on GH200, where each GPU is a NUMA node without processors; -1: the GPU's memory is not one."""
    numa_files(root, "0-1")
    write(root, "sys/devices/system/node/node1/cpulist", processors)
    write(root, "proc/driver/nvidia/gpus/0009:01:00.0/numa_status", f"Node:   {node}\nStatus: online\n")
    assert available_memory() == available * GIB
    assert total_memory() == total * GIB


def test_a_real_memory_policy_is_respected() -> None:
    if not Path("/proc/thread-self/numa_maps").exists():
        pytest.skip("this kernel has no NUMA")
    code = """
import ctypes, os, platform
from kvoffload.host import limits as memory
number = {"x86_64": 238, "aarch64": 237}[platform.machine()]
print(sorted(memory.allowed_nodes()))
node = max(memory.allowed_nodes())
mask = ctypes.c_ulong(1 << node)
assert ctypes.CDLL(None).syscall(number, 2, ctypes.byref(mask), 64) == 0
memory.cpuset_nodes = lambda: frozenset(range(64))
print(sorted(memory.allowed_nodes()) == [node])
fd = memory.reserve(1 << 20)
print(os.readlink(f"/proc/self/fd/{fd}") == f"/memfd:kvoffload:{node} (deleted)")
"""
    printed = run_python(code).splitlines()
    assert printed[0] != "[]"
    assert printed[1:] == ["True", "True"]


class Outstanding(Reservation):
    """Another process's reservation of 1 GiB."""

    def outstanding(self) -> int:
        return GIB


def other(pid: int = 7, nodes: Iterable[int] = ()) -> Reservation:
    return Outstanding(Path("/nowhere"), pid, 1, frozenset(nodes))


@pytest.mark.parametrize(("nodes", "counts"), [(set(), True), ({0}, False), ({1}, True), ({0, 1}, True)])
def test_a_reservation_on_other_numa_nodes_does_not_count(root: Path, nodes: set[int], counts: bool) -> None:
    numa_files(root, "0-1", "bind:1")
    assert available_memory([other(nodes=nodes)]) == (2 if counts else 3) * GIB


@pytest.mark.parametrize(
    ("cgroup", "available"),
    [("0::/pod/box", 2), ("0::/pod/box/inner", 2), ("0::/pod/boxer", 3), ("0::/pod", 3), ("", 2)],
    ids=["the same", "nested", "a sibling", "the parent", "not known"],
)
def test_a_reservation_in_another_cgroup_does_not_count(root: Path, cgroup: str, available: int) -> None:
    write(root, "proc/self/cgroup", "0::/pod/box")
    cgroup2(root, "pod/box", 4 * GIB, GIB)
    cgroup2(root, "pod", "max", GIB)
    if cgroup:
        write(root, "proc/7/cgroup", cgroup)
    assert available_memory([other()]) == available * GIB


# The pool's memory policy: it belongs to the memory file, and a container that forbids it does not keep the pool.


def policy(slots: ByteArray) -> str:
    """Returns the memory policy of the mapping that begins with ``slots``."""
    lines = (line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines())
    return {words[0]: words[1] for words in lines}[f"{slots.ctypes.data:x}"]


@pytest.fixture
def node() -> int:
    nodes = cpuset_nodes()
    if not nodes or not Path("/proc/self/numa_maps").exists():
        pytest.skip("this machine does not say where its memory is")
    return min(nodes)


def is_allowed(node: int) -> bool:
    """Whether this process may set memory policies; containers often forbid it."""
    pool = HostPool(1, SLOT, node)
    found = policy(pool.data)
    pool.close()
    return found != "default"


def test_the_policy_holds_for_the_file_and_not_only_for_this_mapping(
    node: int, caplog: pytest.LogCaptureFixture
) -> None:
    if not is_allowed(node):
        pytest.skip("this process may not set memory policies")
    with caplog.at_level(logging.INFO):
        pool = HostPool(NUM_BLOCKS, SLOT, node)
    again = pool.handle().open()
    again[0] = 1
    assert policy(pool.data) == policy(again) == f"prefer:{node}"
    assert f"allocated on NUMA node {node}" in caplog.text
    del again
    pool.close()


def test_without_a_node_there_is_no_policy(node: int) -> None:
    pool = HostPool(NUM_BLOCKS, SLOT)
    assert policy(pool.data) == "default"
    pool.close()


def test_where_policies_are_forbidden_the_processors_of_the_node_allocate(
    node: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before, during = os.sched_getaffinity(0), list[set[int]]()
    allocate = os.posix_fallocate

    def note(fd: int, offset: int, size: int) -> None:
        during.append(os.sched_getaffinity(0))
        allocate(fd, offset, size)

    one = min(before)
    monkeypatch.setattr(os, "posix_fallocate", note)
    monkeypatch.setattr(platform, "machine", lambda: "none")
    monkeypatch.setattr(numa, "_processors", lambda node: frozenset({one, 10_000}))
    with caplog.at_level(logging.INFO):
        HostPool(NUM_BLOCKS, SLOT, node).close()
    assert during == [{one}]
    assert os.sched_getaffinity(0) == before
    assert f"by the processors of NUMA node {node}" in caplog.text


def test_a_node_that_is_out_of_reach_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    before = os.sched_getaffinity(0)
    pool = HostPool(NUM_BLOCKS, SLOT, 1000)
    assert os.fstat(pool.fd).st_blocks * 512 >= pool.nbytes
    assert os.sched_getaffinity(0) == before
    assert "--cap-add SYS_NICE" in caplog.text
    pool.close()

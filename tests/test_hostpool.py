"""HostPool: memory that is there when it says so, and gone when it is closed or killed."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvoffload import hostpool
from kvoffload.base import ConfigError
from kvoffload.config import parse_bytes
from kvoffload.hostpool import HostPool, PoolHandle, available_memory, format_bytes, padded_slot_bytes

GIB = 1 << 30
NUM_BLOCKS, SLOT = 64, 8192


@pytest.fixture
def pool() -> Iterator[HostPool]:
    pool = HostPool(NUM_BLOCKS, SLOT)
    yield pool
    pool.close()


def open_files() -> set[str]:
    """What this process has open, pools by inode."""
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


def test_all_memory_is_taken_at_once(pool: HostPool) -> None:
    status = os.fstat(pool.fd)
    assert status.st_size == pool.nbytes == NUM_BLOCKS * SLOT
    assert status.st_blocks * 512 >= pool.nbytes


def test_a_file_that_was_only_made_longer_would_be_noticed() -> None:
    fd = os.memfd_create("sparse")
    try:
        os.ftruncate(fd, NUM_BLOCKS * SLOT)
        assert os.fstat(fd).st_blocks == 0
    finally:
        os.close(fd)


def test_it_is_an_array_of_slots(pool: HostPool) -> None:
    assert pool.data.shape == (NUM_BLOCKS, SLOT)
    assert pool.data.dtype == np.uint8
    assert pool.data.flags.writeable
    assert not pool.data.any()
    pool.data[3] = 7
    pool.data[-1, -1] = 9
    assert os.pread(pool.fd, SLOT, 3 * SLOT) == bytes([7]) * SLOT
    assert os.pread(pool.fd, 1, pool.nbytes - 1) == b"\t"


def test_slots_begin_at_pages(pool: HostPool) -> None:
    assert pool.data.ctypes.data % mmap.PAGESIZE == 0


def test_touching_in_the_background_changes_no_byte(pool: HostPool) -> None:
    pool.data[:] = 5
    pool._toucher.join()
    assert (pool.data == 5).all()


def test_two_pools_do_not_share_memory(pool: HostPool) -> None:
    other = HostPool(NUM_BLOCKS, SLOT)
    other.data[:] = 1
    assert not pool.data.any()
    other.close()


def test_nothing_is_left_when_it_is_closed() -> None:
    before = open_files()
    pool = HostPool(NUM_BLOCKS, SLOT)
    assert len(open_files() - before) >= 1
    fd = pool.fd
    pool.close()
    assert open_files() == before
    with pytest.raises(OSError):
        os.fstat(fd)
    assert pool.data.size == 0


def test_closing_twice_closes_nobody_elses_file() -> None:
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


def test_arrays_that_are_still_used_outlive_it() -> None:
    before = open_files()
    pool = HostPool(NUM_BLOCKS, SLOT)
    row = pool.data[2]
    row[:] = 3
    pool.close()
    assert (row == 3).all()
    del row, pool
    assert open_files() == before


def test_it_has_no_name_and_a_kill_leaves_nothing() -> None:
    code = f"""
import os, sys
from kvoffload.hostpool import HostPool
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
    assert links == "0", "no directory holds it: it ends with its last user"
    assert name.startswith("/memfd:")
    assert not Path(name).exists()
    after = {path.name for path in shared.iterdir()} if shared.is_dir() else set()
    assert not any("kvoffload" in new for new in after - before)
    assert not Path(f"/proc/{child.pid}").exists()


# Handed over to another process.

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
    said = in_another_process(
        pool.handle(),
        "data = handle.open(); print(data.shape, data[3, :4].tolist()); data[5, 7] = 99",
    )
    assert said == f"({NUM_BLOCKS}, {SLOT}) [1, 2, 3, 4]\n"
    assert pool.data[5, 7] == 99


def test_a_pool_that_is_gone_is_not_taken_for_another_file() -> None:
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


def test_processes_look_at_free_memory_one_after_the_other() -> None:
    """Ranks that start together must not all see the same free memory and then all take it."""
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys\nfrom kvoffload.hostpool import _one_at_a_time\n"
            "with _one_at_a_time():\n    print('held', flush=True)\n    sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    made: list[HostPool] = []
    maker = threading.Thread(target=lambda: made.append(HostPool(1, SLOT)))
    maker.start()
    maker.join(timeout=0.3)
    assert not made, "a pool was made while another process was making its own"
    holder.kill()
    holder.wait()
    maker.join(timeout=60)
    assert len(made) == 1, "the end of a process, whatever ended it, lets the next one go on"
    made[0].close()


def test_a_child_process_does_not_inherit_it(pool: HostPool) -> None:
    assert not os.get_inheritable(pool.fd)


# No room.


def test_more_than_there_is_is_refused_before_any_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostpool, "available_memory", lambda: 10 * 4096)
    before = open_files()
    with pytest.raises(ConfigError) as caught:
        HostPool(11, 4096)
    assert open_files() == before
    message = str(caught.value)
    assert "host_bytes" in message
    assert "44 KiB" in message, "what was asked for"
    assert "40 KiB" in message, "what there is"
    mend = re.search(r"set host_bytes to (.+) or less", message)
    assert mend is not None
    assert 0 < parse_bytes("host_bytes", mend[1]) <= 10 * 4096
    HostPool(10, 4096).close()


def test_a_kernel_that_refuses_is_a_config_error_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = open_files()
    with pytest.raises(ConfigError, match=r"host_bytes.*512 KiB.*No space left on device.*set host_bytes lower"):
        HostPool(NUM_BLOCKS, SLOT)
    assert open_files() == before


def test_a_real_limit_is_a_config_error_and_nothing_is_left() -> None:
    code = """
import os, resource
from kvoffload import ConfigError
from kvoffload.hostpool import HostPool
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
HostPool(256, 4096).close()
before = os.listdir("/proc/self/fd")
try:
    HostPool(257, 4096)
except ConfigError as error:
    print(error, os.listdir("/proc/self/fd") == before)
"""
    said = run_python(code)
    assert said.startswith("host_bytes: the kernel refused 1 MiB (File too large)")
    assert said.strip().endswith("True")


def test_no_address_space_is_a_config_error_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    before = open_files()
    try:
        with pytest.raises(ConfigError, match="host_bytes"):
            HostPool(NUM_BLOCKS, SLOT)
        assert open_files() == before
    finally:
        close_leaked(before)


def close_leaked(before: set[str]) -> None:
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{fd}")
            if "memfd:kvoffload" in name and f"{name} {os.fstat(int(fd)).st_ino}" not in before:
                os.close(int(fd))


# How much there is.


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that stands for /, with 8 GiB free and no cgroup."""
    monkeypatch.setattr(hostpool, "Path", lambda path: tmp_path / str(path).lstrip("/"))
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


def test_without_a_cgroup_it_is_what_the_machine_has(root: Path) -> None:
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
    ids=["no limit", "limit", "page cache can go", "limit beyond the machine", "over the limit"],
)
def test_a_cgroup_may_grant_less(root: Path, limit: object, used: int, inactive: int, available: int) -> None:
    write(root, "proc/self/cgroup", "0::/pod/box")
    cgroup2(root, "pod/box", limit, used, inactive)
    assert available_memory() == available


def test_the_tightest_of_nested_cgroups_counts(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/pod/box")
    cgroup2(root, "pod/box", "max", GIB)
    cgroup2(root, "pod", 3 * GIB, 2 * GIB)
    assert available_memory() == GIB


def test_a_container_sees_its_cgroup_as_the_root(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/")
    cgroup2(root, "", 2 * GIB, GIB)
    assert available_memory() == GIB


def test_the_old_kind_of_cgroup(root: Path) -> None:
    write(root, "proc/self/cgroup", "5:cpu,cpuacct:/other\n4:memory:/box\n0::/box")
    write(root, "sys/fs/cgroup/memory/other/memory.limit_in_bytes", 1)
    write(root, "sys/fs/cgroup/memory/other/memory.usage_in_bytes", 1)
    write(root, "sys/fs/cgroup/memory/other/memory.stat", "")
    folder = "sys/fs/cgroup/memory/box"
    write(root, f"{folder}/memory.limit_in_bytes", 5 * GIB)
    write(root, f"{folder}/memory.usage_in_bytes", 4 * GIB)
    write(root, f"{folder}/memory.stat", f"inactive_file 5\ntotal_inactive_file {GIB}")
    assert available_memory() == 2 * GIB


@pytest.mark.parametrize("garbage", ["", "nonsense", "-"])
def test_a_cgroup_that_cannot_be_read_is_passed_over(root: Path, garbage: str) -> None:
    write(root, "proc/self/cgroup", "0::/box")
    cgroup2(root, "box", garbage, GIB)
    assert available_memory() == 8 * GIB


def test_here_there_is_some() -> None:
    assert 0 < available_memory() < 1 << 50


# Words.


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1 << 20, "1 MiB"),
        (8 * GIB, "8 GiB"),
        (10 * GIB, "10 GiB"),
        (100 * GIB, "100 GiB"),
        (int(2.5 * (1 << 40)), "2.5 TiB"),
        (GIB + 1, "1 GiB"),
    ],
)
def test_bytes_are_written_as_people_do(n: int, text: str) -> None:
    assert format_bytes(n) == text

"""Checks the directory of a disk tier or of a shared directory tier, and measures its medium."""

from __future__ import annotations

import errno
import mmap
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvoffload.abc import ByteArray, ConfigError
from kvoffload.doctor.configuration import PlannedTier
from kvoffload.doctor.findings import Figure, Level, Report
from kvoffload.tiers.disk.directory import LOCK_NAME, NO_INODES, DirectoryStorage, has_no_inodes
from kvoffload.tiers.disk.layout import check_capacity
from kvoffload.tiers.disk.start import allow_descriptors
from kvoffload.tiers.disk.storage import Storage, StoredFile, aligned_buffer, is_full
from kvoffload.tiers.shared_dir.seats import MAX_SEATS, NO_LOCK_ERRORS, seat_names
from kvoffload.tiers.threads import NUM_THREADS
from kvoffload.units import counted, format_bytes

BLOCK_BYTES = 2 << 20
"""Bytes per write and read, as large as blocks usually are."""
MAX_BLOCKS = 256
FILE_SHARE = 4
"""The file that is measured takes at most one part in so many of the free space."""
SLOW_BYTES_PER_S = 200e6
"""Below this, computing a prefix is nearly always faster than reading it."""
SHARED = "shared_dir"
SCRATCH_PREFIX = ".kvoffload-doctor-"

MEMORY_KINDS = ("tmpfs", "ramfs")
LAYER_KINDS = ("overlay", "aufs")
NETWORK_KINDS = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "glusterfs", "9p", "beegfs", "wekafs", "afs")
"""File systems that several machines can mount."""
SHARED_KINDS = (*NETWORK_KINDS, "virtiofs", "ocfs2", "gfs2")
NFS_KINDS = ("nfs", "nfs4")


@dataclass(frozen=True, slots=True)
class Mount:
    """The file system that has a path. ``options``: of the mount and of the file system."""

    point: str
    kind: str
    options: Mapping[str, str]


def mount_of(path: str) -> Mount:
    """Returns the mount that has ``path``, an absolute path without symbolic links."""
    best = Mount("/", "unknown", {})
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4])
        kind, _, *options = after.split(" ", 2)
        if os.path.commonpath([point, path]) == point and len(point) >= len(best.point):
            texts = [*fields[5].split(","), *(options[0].split(",") if options else [])]
            pairs = (text.partition("=") for text in texts)
            best = Mount(point, kind, {name: value for name, _, value in pairs})
    return best


def check(tier: PlannedTier, seconds: float, report: Report) -> None:
    """Reports findings about the directory of ``tier``. ``seconds``: per measurement, about."""
    _DirectoryCheck(tier, report, seconds).run()


class _DirectoryCheck:
    def __init__(self, tier: PlannedTier, report: Report, seconds: float) -> None:
        self._tier = tier
        self._report = report
        self._found = report.found
        self._seconds = seconds
        self._path = Path(tier.place)
        self._is_shared = tier.config.kind == SHARED
        self._wanted = tier.config.capacity_bytes

    def run(self) -> None:
        self._report.stage(f"looks at {self._path}")
        where = self._existing()
        if where is None:
            return
        mount = mount_of(os.path.realpath(where))
        self._check_kind(mount)
        if "ro" in mount.options:
            text = f"{mount.point} is mounted read-only: blocks that are there are served, none are written"
            self._found("directory.read_only", Level.PROBLEM, text, f"mount -o remount,rw {mount.point}")
            return
        try:
            scratch = tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=where)
        except OSError as error:
            text = f"this user cannot write to {where} ({error.strerror})"
            fix = f"let root make it: install -d -m 700 -o {os.geteuid()} {self._path}"
            if is_full(error):
                fix = f"remove what fills {mount.point}, or name a directory on another disk"
            self._found("directory.not_writable", Level.PROBLEM, text, fix)
            return
        try:
            self._measure(scratch, where)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    # What is there.

    def _existing(self) -> Path | None:
        """Returns the directory, or the one in which a server would make it; None if it cannot be used."""
        path = self._path
        if not os.path.lexists(path):
            parent = next(each for each in path.parents if os.path.exists(each))
            if not parent.is_dir():
                text = f"{parent} is not a directory"
                self._found("directory.refused", Level.PROBLEM, text, "name another directory")
                return None
            text, fix = f"{path} does not exist; a server makes it", f"install -d -m 700 -o {os.geteuid()} {path}"
            level = Level.NOTE
            if self._is_shared or parent != path.parent:
                level, fix = Level.WARNING, f"mount it, then {fix}"
                point = mount_of(os.path.realpath(parent)).point
                text += f", on the file system of {point}: another file system may not be mounted"
            self._found("directory.missing", level, text, fix)
            self._check_space(parent, 0)
            return parent
        try:
            storage = DirectoryStorage(path)
        except ConfigError as error:
            self._refused(error)
            return None
        try:
            self._check_use(storage)
            self._check_space(path, storage.held_bytes())
        finally:
            storage.close()
        return path

    def _refused(self, error: ConfigError) -> None:
        text, fix = error.within(self._tier.prefix).wrong, error.fix
        owner = -1
        with suppress(OSError):
            owner = os.stat(self._path).st_uid
        if owner not in (os.geteuid(), 0, -1):
            fix += f". If the server runs as user {owner}, run the doctor so too: sudo -u '#{owner}' kvoffload doctor"
        self._found("directory.refused", Level.PROBLEM, text, fix, {"owner_uid": owner})

    def _check_use(self, storage: DirectoryStorage) -> None:
        path, user = self._path, os.geteuid()
        if self._is_shared:
            seats = len(seat_names(storage))
            if seats >= MAX_SEATS:
                text = f"{MAX_SEATS} servers have a seat in {path}, the most that there can be"
                self._found("directory.seats", Level.PROBLEM, text, "name another directory", figures={"seats": seats})
            else:
                text = f"{path} is private to user {user}, with {counted(seats, 'seat')} of servers"
                self._found("directory.private", Level.OK, text, figures={"seats": seats})
            return
        # Without a lock file no server was here, and the doctor should leave none.
        has_lock = LOCK_NAME in storage.files("") and not storage.read_only
        if has_lock and (owner := storage.take_lock()) is not None:
            text = f"{path} is in use by {owner.name}: a second server is refused"
            fix = owner.remedy or "stop that server first, or give each server a directory of its own"
            self._found("directory.in_use", Level.WARNING, text, fix)
        else:
            self._found("directory.private", Level.OK, f"{path} is private to user {user}, and not in use")

    def _check_space(self, where: Path, held: int) -> None:
        wanted = self._wanted
        if wanted is None:
            return
        try:
            allow_descriptors(wanted, engines=1)
        except ConfigError as error:
            wrong = error.within(self._tier.prefix).wrong
            self._found("directory.descriptors", Level.PROBLEM, wrong, error.fix)
        usage = os.statvfs(where)
        free = usage.f_bavail * usage.f_frsize
        if has_no_inodes(usage):
            text, fix = f"{where}: {NO_INODES}".split("; ")
            self._found("directory.inodes", Level.PROBLEM, text, f"{fix}: df -i {where} shows how many there are")
            return
        figures: dict[str, Figure] = {"bytes": wanted, "free_bytes": free, "held_bytes": held}
        try:
            check_capacity(wanted, free + held)
        except ConfigError as error:
            text, fix = error.within(self._tier.prefix).wrong, error.fix
            if held:
                text += ": it evicts before it has what was set"
            is_refused = not held and not self._is_shared
            self._found("directory.space", Level.PROBLEM if is_refused else Level.WARNING, text, fix, figures=figures)
            return
        if held > wanted:
            text = (
                f"{format_bytes(held)} are in the directory already, more than {self._tier.prefix}bytes="
                f"{format_bytes(wanted)}: blocks of kvoffload are evicted, and other files leave less room for blocks"
            )
            fix = "raise the budget, or remove what is not kvoffload's"
            self._found("directory.space", Level.WARNING, text, fix, figures=figures)
            return
        beside = f", of which {format_bytes(held)} are used already" if held else ""
        text = f"{format_bytes(wanted)}{beside} fit: {format_bytes(free)} are free"
        if self._is_shared:
            text += "; every server that shares it needs as much"
        self._found("directory.space", Level.OK, text, figures=figures)

    def _check_kind(self, mount: Mount) -> None:
        kind, options, is_shared = mount.kind, mount.options, self._is_shared
        about = f"{mount.point} is {kind}"
        found = Level.WARNING, "directory.kind"
        if kind in MEMORY_KINDS:
            text = f"{about}, which is memory: blocks there take memory of the machine and end with it"
            fix = "give that memory to host_bytes, and name a directory on a disk"
        elif kind in LAYER_KINDS:
            text = f"{about}, the container's own layer: blocks end with the container, and writes are slow"
            fix = "mount a volume of the host there (docker run -v, in Kubernetes hostPath or a local volume)"
        elif kind in NETWORK_KINDS and not is_shared:
            text = f"{about}, a network file system, and the tier is of kind disk: other servers cannot share it"
            fix = f'write "kind": "{SHARED}", or name a directory on a local disk'
        elif kind in NFS_KINDS and ("nolock" in options or options.get("local_lock", "none") != "none"):
            found = Level.PROBLEM, "directory.locks"
            text = f"{about} without locks that other machines see (nolock or local_lock)"
            fix = f"mount -o vers=4.2 without nolock and local_lock on {mount.point}"
        elif kind in NFS_KINDS and options.get("vers", "4").startswith(("2", "3")):
            found = Level.WARNING, "directory.locks"
            text = f"{about} version {options['vers']}, whose locks need a daemon of their own"
            fix = f"mount -o vers=4.2 on {mount.point}"
        elif kind.startswith("fuse"):
            found = Level.NOTE, "directory.kind"
            text = f"{about}: locks and speed depend on the program behind it, and are tested below"
            fix = ""
        elif is_shared and kind not in SHARED_KINDS:
            text = f"{about}, a file system of this machine alone: servers on other machines cannot share it"
            fix = "mount the shared file system there, or name a directory on it"
        else:
            found = Level.OK, "directory.kind"
            text, fix = f"{about}, {'which machines can share' if is_shared else 'a local file system'}", ""
        self._found(found[1], found[0], text, fix, {"file_system": kind, "mounted_at": mount.point})

    # Measured.

    def _measure(self, scratch: str, where: Path) -> None:
        storage = DirectoryStorage(scratch)
        try:
            if self._is_shared:
                self._report.stage(f"locks a file in {where}")
                self._check_lock(storage)
            self._report.stage(f"writes to {where}")
            self._check_medium(storage, where)
        finally:
            storage.close()

    def _check_lock(self, storage: Storage) -> None:
        try:
            storage.try_lock()
        except OSError as error:
            if error.errno not in NO_LOCK_ERRORS:
                raise
            text = f"{self._path}: its file system has no file locks, by which servers agree on their folders"
            fix = "mount it with locks (NFS: version 4, without nolock or local_lock; Lustre: -o flock)"
            self._found("directory.locks", Level.PROBLEM, text, fix)
        else:
            self._found("directory.locks", Level.OK, "a file lock works")

    def _check_medium(self, storage: Storage, where: Path) -> None:
        with closing(storage.open("", "speed", create=True, direct=True)) as file:
            # From here on nothing is left behind, even if this process is killed.
            storage.remove("", "speed")
            # Some file systems accept the flag when a file is opened, and refuse it later.
            with suppress(OSError):
                file.write([aligned_buffer(mmap.PAGESIZE)], 0)
            if file.is_cached:
                text = "its file system has no O_DIRECT: blocks go through the page cache, with one more copy"
                fix = "use ext4 or xfs on a local disk if speed matters"
                self._found("directory.direct_io", Level.WARNING, text, fix)
            else:
                self._found("directory.direct_io", Level.OK, "O_DIRECT works: blocks bypass the page cache")
            self._check_speed(file, storage.free_bytes(), where)

    def _check_speed(self, file: StoredFile, free: int, where: Path) -> None:
        most = min(MAX_BLOCKS, free // FILE_SHARE // BLOCK_BYTES, (self._wanted or free) // BLOCK_BYTES)
        if most < 1:
            self._found("directory.speed", Level.NOTE, f"{format_bytes(free)} are free: too little to measure")
            return
        try:
            # So that a slow medium is done in time.
            file.resize(BLOCK_BYTES)
            one_s = BLOCK_BYTES / _rate(file.write, 1, file.sync)
            blocks = min(most, max(1, int(NUM_THREADS * self._seconds / one_s)))
            file.resize(blocks * BLOCK_BYTES)
            write_rate = _rate(file.write, blocks, file.sync)
            self._report.stage(f"reads from {where}")
            read_rate = _rate(file.read, blocks)
        except OSError as error:
            problem = "is full" if is_full(error) else f"fails ({error.strerror})"
            text = f"{where}: its medium {problem} within {format_bytes(most * BLOCK_BYTES)}"
            fix = "free space, or look at quotas" if is_full(error) else "dmesg | tail shows what the disk reports"
            self._found("directory.fails", Level.PROBLEM, text, fix, {"error": errno.errorcode.get(error.errno or 0)})
            return
        text = f"writes {write_rate / 1e9:.2f} GB/s, reads {read_rate / 1e9:.2f} GB/s in blocks of 2 MiB"
        if file.is_cached:
            text += ", perhaps from the page cache"
        figures: dict[str, Figure] = {"write_bytes_per_s": round(write_rate), "read_bytes_per_s": round(read_rate)}
        if read_rate < SLOW_BYTES_PER_S:
            text += ": computing is nearly always faster than reading that slowly"
            fix = "name a directory on a faster disk, or remove the tier"
            self._found("directory.speed", Level.WARNING, text, fix, figures)
        else:
            self._found("directory.speed", Level.OK, text, figures=figures)


def _rate(move: Callable[[list[ByteArray], int], int], blocks: int, end: Callable[[], None] = lambda: None) -> float:
    """Moves so many blocks with the threads that a tier has, then calls ``end``. Returns the bytes per second. Raises
    OSError."""
    buffer = aligned_buffer(BLOCK_BYTES)
    # Not zeros, which some disks and file systems do not store.
    buffer[:] = np.random.default_rng().integers(0, 256, BLOCK_BYTES, dtype=np.uint8)

    def work(number: int) -> None:
        if move([buffer], number * BLOCK_BYTES) != BLOCK_BYTES:
            raise OSError(errno.EIO, "a part of a block was not moved")

    begun = time.perf_counter()
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for done in [threads.submit(work, number) for number in range(blocks)]:
            done.result()
    end()
    return blocks * BLOCK_BYTES / max(time.perf_counter() - begun, 1e-9)

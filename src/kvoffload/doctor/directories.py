"""Checks the directory of a disk tier or of a shared directory tier, and measures its medium."""

from __future__ import annotations

import errno
import mmap
import os
import re
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvoffload.abc import ByteArray, ConfigError
from kvoffload.doctor.configuration import PlannedTier, tier_from_dict
from kvoffload.doctor.findings import Figure, Finding, Level
from kvoffload.doctor.process import Report
from kvoffload.tiers.disk.directory import LOCK_NAME, NO_INODES, DirectoryStorage, has_no_inodes
from kvoffload.tiers.disk.layout import check_capacity
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


@dataclass(frozen=True, slots=True)
class Space:
    """The budget of a tier, the free bytes of its file system, and the bytes that the tier holds."""

    device: int
    wanted: int
    free: int
    held: int


def space_findings(spaces: Sequence[tuple[PlannedTier, Space]]) -> Iterator[Finding]:
    """Yields a warning per file system with room for each of its tiers, but not for all of them together."""
    for device in dict.fromkeys(space.device for _, space in spaces):
        here = [(tier, space) for tier, space in spaces if space.device == device]
        wanted, held = sum(space.wanted for _, space in here), sum(space.held for _, space in here)
        possible = min(space.free for _, space in here) + held
        if len(here) > 1 and wanted > possible and all(space.wanted <= space.free + space.held for _, space in here):
            names = ", ".join(tier.name for tier, _ in here)
            text = f"{names} are on one file system: it can give them {format_bytes(possible)}, and they want "
            text += f"{format_bytes(wanted)} together"
            fix = f"set the bytes of all to {format_bytes(possible * 9 // 10)} or less together"
            figures: dict[str, Figure] = {"wanted_bytes": wanted, "possible_bytes": possible}
            last = here[-1][0].name
            yield Finding("directory.space_together", Level.WARNING, text, fix, last, figures)


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


def check(arguments: Mapping[str, Any], report: Report) -> None:
    """Reports findings, and as far as they could be found the facts "read_bytes_per_s", "write_bytes_per_s" and
    "clock_offset_s". ``arguments``: "tier", and "seconds" per measurement."""
    tier = tier_from_dict(arguments["tier"])
    report.tier = tier.name
    _DirectoryCheck(tier, report, arguments["seconds"]).run()


class _DirectoryCheck:
    """The checks of one directory."""

    def __init__(self, tier: PlannedTier, report: Report, seconds: float) -> None:
        assert tier.directory is not None
        self._tier = tier
        self._report = report
        self._found = report.found
        self._seconds = seconds
        self._path = Path(tier.directory)

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
                self._found(
                    "directory.refused", Level.PROBLEM, f"{parent} is not a directory", "name another directory"
                )
                return None
            fix = f"install -d -m 700 -o {os.geteuid()} {path}"
            if self._tier.kind == SHARED:
                text = f"{path} does not exist: the shared file system may not be mounted. A server would make it, on "
                text += f"the file system of {mount_of(os.path.realpath(parent)).point}"
                self._found("directory.missing", Level.WARNING, text, f"mount it, then {fix}")
            elif parent != path.parent:
                text = (
                    f"neither {path} nor {path.parent} exists: a disk may not be mounted. A server would make both, on "
                )
                text += f"the file system of {mount_of(os.path.realpath(parent)).point}"
                self._found("directory.missing", Level.WARNING, text, f"mount the disk, then {fix}")
            else:
                self._found("directory.missing", Level.NOTE, f"{path} does not exist; a server makes it", fix)
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
        mode = 0
        with suppress(OSError):
            mode = stat.S_IMODE(os.lstat(self._path).st_mode)
        self._found("directory.refused", Level.PROBLEM, text, fix, {"owner_uid": owner, "mode": f"{mode:o}"})

    def _check_use(self, storage: DirectoryStorage) -> None:
        path, user = self._path, os.geteuid()
        if self._tier.kind == SHARED:
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
        wanted = self._tier.bytes
        if wanted is None:
            return
        usage = os.statvfs(where)
        free = usage.f_bavail * usage.f_frsize
        if has_no_inodes(usage):
            text, fix = f"{where}: {NO_INODES}".split("; ")
            self._found("directory.inodes", Level.PROBLEM, text, f"{fix}: df -i {where} shows how many there are")
            return
        figures: dict[str, Figure] = {"bytes": wanted, "free_bytes": free, "held_bytes": held}
        self._report.fact("space", asdict(Space(os.stat(where).st_dev, wanted, free, held)))
        try:
            check_capacity(wanted, free + held)
        except ConfigError as error:
            text, fix = error.within(self._tier.prefix).wrong, error.fix
            if held:
                text += ": it evicts before it has what was set"
            is_refused = not held and self._tier.kind != SHARED
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
        if self._tier.kind == SHARED:
            text += "; every server that shares it needs as much"
        self._found("directory.space", Level.OK, text, figures=figures)

    def _check_kind(self, mount: Mount) -> None:
        kind, options, is_shared = mount.kind, mount.options, self._tier.kind == SHARED
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
            if self._tier.kind == SHARED:
                self._report.stage(f"locks a file in {where}")
                self._check_lock(storage)
            self._report.stage(f"writes to {where}")
            self._check_direct(storage)
            self._check_speed(storage, where)
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

    def _check_direct(self, storage: Storage) -> None:
        file = storage.open("", "direct", create=True, direct=True)
        try:
            storage.remove("", "direct")
            # Some file systems accept the flag when a file is opened, and refuse it later.
            with suppress(OSError):
                file.write([aligned_buffer(mmap.PAGESIZE)], 0)
            is_direct = not file.is_cached
        finally:
            file.close()
        if is_direct:
            self._found("directory.direct_io", Level.OK, "O_DIRECT works: blocks bypass the page cache")
        else:
            text = "its file system has no O_DIRECT: blocks go through the page cache, with one more copy"
            fix = "use ext4 or xfs on a local disk if speed matters"
            self._found("directory.direct_io", Level.WARNING, text, fix)

    def _check_speed(self, storage: Storage, where: Path) -> None:
        free = storage.free_bytes()
        blocks = int(min(MAX_BLOCKS, free // FILE_SHARE // BLOCK_BYTES, (self._tier.bytes or free) // BLOCK_BYTES))
        if blocks < 1:
            text = f"{format_bytes(free)} are free: too little to measure"
            self._found("directory.speed", Level.NOTE, text)
            return
        written = storage.open("", "speed", create=True, direct=True)
        read = None
        try:
            read = storage.open("", "speed", fresh=True)
            # From here on nothing is left behind, even if this process is killed.
            storage.remove("", "speed")
            try:
                written.resize(BLOCK_BYTES)
                one_rate, _ = _move(written, 1, self._seconds, is_read=False)
                # So that a slow medium, which may have to write zeros first, is done in time.
                blocks = min(blocks, max(NUM_THREADS, int(one_rate * NUM_THREADS * self._seconds) // BLOCK_BYTES))
                written.resize(blocks * BLOCK_BYTES)
                write_rate, blocks = _move(written, blocks, self._seconds, is_read=False)
                written.sync()
                self._report.fact("write_bytes_per_s", write_rate)
                self._report.fact("clock_offset_s", written.modified() - time.time())
                self._report.stage(f"reads from {where}")
                read_rate, _ = _move(read, blocks, self._seconds, is_read=True)
            except OSError as error:
                problem = "is full" if is_full(error) else f"fails ({error.strerror})"
                text = f"{where}: its medium {problem}, after {format_bytes(blocks * BLOCK_BYTES)} or less"
                fix = "free space, or look at quotas" if is_full(error) else "dmesg | tail shows what the disk reports"
                self._found(
                    "directory.fails", Level.PROBLEM, text, fix, {"error": errno.errorcode.get(error.errno or 0)}
                )
                return
            self._report.fact("read_bytes_per_s", read_rate)
            self._rate(write_rate, read_rate)
        finally:
            written.close()
            if read is not None:
                read.close()

    def _rate(self, write_rate: float, read_rate: float) -> None:
        text = f"writes {write_rate / 1e9:.2f} GB/s, reads {read_rate / 1e9:.2f} GB/s in blocks of 2 MiB"
        figures: dict[str, Figure] = {
            "write_bytes_per_s": round(write_rate),
            "read_bytes_per_s": round(read_rate),
            "block_bytes": BLOCK_BYTES,
            "threads": NUM_THREADS,
        }
        if read_rate < SLOW_BYTES_PER_S:
            text += ": computing is nearly always faster than reading that slowly"
            fix = "name a directory on a faster disk, or remove the tier"
            self._found("directory.speed", Level.WARNING, text, fix, figures=figures)
        else:
            self._found("directory.speed", Level.OK, text, figures=figures)


def _move(file: StoredFile, blocks: int, seconds: float, *, is_read: bool) -> tuple[float, int]:
    """Moves up to ``blocks`` blocks with the threads that a tier has, each at least once, for ``seconds``. Returns the
    bytes per second, and the blocks from the first on that were moved. Raises OSError."""
    lock, deadline = threading.Lock(), time.perf_counter() + seconds
    state = {"next": 0}
    errors: list[OSError] = []
    random = np.random.default_rng()

    def work(buffer: ByteArray) -> None:
        while not errors:
            with lock:
                number = state["next"]
                if number >= blocks or (number and time.perf_counter() >= deadline):
                    return
                state["next"] = number + 1
            try:
                move = file.read if is_read else file.write
                if move([buffer], number * BLOCK_BYTES) != BLOCK_BYTES:
                    raise OSError(errno.EIO, "a part of a block was not moved")
                if not is_read and file.is_cached:
                    file.sync()
            except OSError as error:
                errors.append(error)

    buffers = [aligned_buffer(BLOCK_BYTES) for _ in range(min(NUM_THREADS, blocks))]
    for buffer in buffers:
        # Not zeros, which some disks and file systems do not store.
        buffer[:] = random.integers(0, 256, BLOCK_BYTES, dtype=np.uint8)
    threads = [threading.Thread(target=work, args=(buffer,), daemon=True) for buffer in buffers]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    passed = max(time.perf_counter() - begun, 1e-9)
    if errors:
        raise errors[0]
    return state["next"] * BLOCK_BYTES / passed, state["next"]

"""Seats: the folders ``writer-0``, ``writer-1`` and so on of a shared directory, each written by one process at a time.

A process that has a seat holds the lock of its folder and rewrites the file ``heartbeat`` there every BEAT_S. The lock
alone is not enough: on some mounts each machine has locks of its own, and a machine that is cut off loses its locks
without noticing. The heartbeat alone is not enough either: a process that was killed a second ago looks alive.

- A seat is *adopted* by a process that starts if its lock is free, and its owner has said that it has ended, or ran
  under the same kernel, for which a free lock is a proof, or has been silent for SILENT_S; but not if it has blocks of
  another disk format, which servers of that release find again.
- A process that finds another owner in its heartbeat, or no heartbeat, has lost its seat: it writes nothing more there
  and takes another one. Until it notices, both may write into the same files; every reader verifies what it reads, so
  that is a miss at worst.
- A seat that has been silent for a longer bound is *emptied* by a process that serves, so that its budget returns.

How long a seat has been silent is not judged by the time in its heartbeat, since clocks of machines differ. Both ages
are differences between times that the medium has given to two files: the heartbeat, and a file written just now. So
that a jump of the medium's clock empties no seat, the process must also have seen the heartbeat unchanged for SILENT_S
of its own clock.
"""

from __future__ import annotations

import enum
import errno
import json
import logging
import os
import re
import socket
from collections.abc import Callable, Collection
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvoffload.abc import ByteArray, ConfigError
from kvoffload.tiers.disk.format import HEADER_BYTES, INDEX_NAME, is_fingerprint, is_of_other_version
from kvoffload.tiers.disk.start import remove_blocks
from kvoffload.tiers.disk.storage import NO_FILE_ERRORS, Storage, read_at, read_fresh, write_file

logger = logging.getLogger(__name__)

HEARTBEAT_NAME = "heartbeat"
HEARTBEAT_BYTES = 4096
HEARTBEAT_VERSION = 1
CLOCK_NAME = "clock"
"""A file of the shared directory that a process writes to learn the medium's time."""
BEAT_S = 3.0
SILENT_S = 60.0
GONE_AFTER_S = 3600
"""By default a seat is emptied after so long."""
MAX_SEATS = 256
MAX_NUMBER = 1 << 62
"""No number in a heartbeat is higher."""
NO_LOCK_ERRORS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

_SEAT = re.compile(r"writer-(0|[1-9][0-9]{0,3})")


def seat_name(number: int) -> str:
    return f"writer-{number}"


def seat_number(name: str) -> int | None:
    """Returns the number of the seat with this folder name, None for other folders."""
    match = _SEAT.fullmatch(name)
    return int(match[1]) if match else None


def seat_names(storage: Storage) -> list[str]:
    """Returns the names of the seats in a shared directory, by number, at most MAX_SEATS. Raises OSError."""
    numbers = sorted(number for name in storage.folders() if (number := seat_number(name)) is not None)
    return [seat_name(number) for number in numbers[:MAX_SEATS]]


class SeatState(enum.StrEnum):
    """What the last owner of a seat was doing when it wrote the heartbeat."""

    SERVING = "serving"
    ENDED = "ended"
    EMPTIED = "emptied"
    """The blocks of a seat without an owner were removed."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a process runs. ``boot``: differs from kernel to kernel, and from boot to boot."""

    host: str
    pid: int
    boot: str

    @classmethod
    def this(cls) -> Machine:
        boot = ""
        with suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return cls(socket.gethostname(), os.getpid(), boot)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The contents of a heartbeat. ``owner``: a random number in hexadecimal. ``beat``: grows with every write.
    ``time``: in seconds since 1970, by the owner's clock."""

    owner: str
    host: str
    pid: int
    boot: str
    state: SeatState
    beat: int
    time: float
    capacity_bytes: int

    def pack(self) -> ByteArray:
        """Returns HEARTBEAT_BYTES bytes: a JSON object and padding."""
        text = json.dumps({"version": HEARTBEAT_VERSION, **asdict(self)}, indent=1) + "\n"
        return np.frombuffer(text.encode().ljust(HEARTBEAT_BYTES), dtype=np.uint8)

    @classmethod
    def unpack(cls, raw: bytes) -> Heartbeat | None:
        """Returns None unless these are the bytes of a heartbeat of this version. Any bytes may come."""
        try:
            found: dict[str, Any] = json.loads(raw)
            if found.pop("version") != HEARTBEAT_VERSION:
                return None
            for name in ("pid", "beat", "capacity_bytes"):
                if not 0 <= found[name] <= MAX_NUMBER:
                    return None
                found[name] = int(found[name])
            for name in ("owner", "host", "boot"):
                found[name] = str(found[name])
            return cls(**found | {"state": SeatState(found["state"]), "time": float(found["time"])})
        except Exception:
            # Numbers without bounds and deep nesting raise more than ValueError.
            return None


@dataclass(frozen=True, slots=True)
class Sighting:
    """A heartbeat as it was read. ``modified``: by the medium's clock."""

    raw: bytes
    modified: float

    @property
    def heartbeat(self) -> Heartbeat | None:
        return Heartbeat.unpack(self.raw)


def look(seat: Storage) -> Sighting | None:
    """Reads the heartbeat in a seat's folder, None if there is none. Raises OSError."""
    try:
        file = seat.open("", HEARTBEAT_NAME, fresh=True)
    except OSError as error:
        if error.errno in NO_FILE_ERRORS:
            return None
        raise
    with closing(file):
        return Sighting(read_at(file, 0, HEARTBEAT_BYTES).tobytes(), file.modified())


class Seat:
    """A seat that this process has. ``beat`` and ``end`` may be called by any one thread at a time."""

    def __init__(self, name: str, storage: Storage, claimant: Claimant) -> None:
        self.name = name
        self.storage = storage
        self.owner = claimant.random(16).hex()
        self.is_lost = False
        """Whether another process has the seat now, or its files have vanished or were moved away."""
        self.modified = 0.0
        """When the heartbeat was last written, by the medium's clock."""
        self.is_new = False
        """Whether no process had the seat before."""
        self._claimant = claimant
        self._num_beats = 0

    def beat(self, state: SeatState = SeatState.SERVING) -> None:
        """Writes the heartbeat again, unless the seat is lost, which is noticed here. Raises OSError."""
        found = None if self.storage.has_vanished() else look(self.storage)
        heartbeat = None if found is None else found.heartbeat
        if found is None or (heartbeat is not None and heartbeat.owner != self.owner):
            self.is_lost = True
        if not self.is_lost:
            self.write(state)

    def write(self, state: SeatState) -> None:
        """Writes the heartbeat, whoever has the seat. Raises OSError."""
        self._num_beats += 1
        mine, on = self._claimant, self._claimant.machine
        heartbeat = Heartbeat(
            self.owner, on.host, on.pid, on.boot, state, self._num_beats, mine.wall_clock(), mine.capacity_bytes
        )
        self.modified = write_file(self.storage, "", HEARTBEAT_NAME, heartbeat.pack())


@dataclass(frozen=True, slots=True)
class Claimant:
    """A process that wants a seat in ``root``. ``random(n)`` returns n random bytes. ``capacity_bytes``: the budget,
    for people who inspect the directory."""

    root: Storage
    fingerprint: str
    machine: Machine
    random: Callable[[int], bytes]
    wall_clock: Callable[[], float]
    capacity_bytes: int = 0

    def take(self, unusable: Collection[str] = ()) -> Seat:
        """Returns a seat, locked: one that can be adopted, preferably one with blocks of ``fingerprint``, else a new
        one. Seats with ``unusable`` names, and those that cannot be claimed, are left alone. Raises ConfigError if the
        file system has no locks or MAX_SEATS are taken, and OSError."""
        try:
            seat = self._adopt(set(unusable)) or self._new_seat()
        except OSError as error:
            if error.errno not in NO_LOCK_ERRORS:
                raise
            raise ConfigError(
                fault="its file system has no file locks, which servers need to agree on their folders",
                fix="mount it with locks (NFS: version 4, without nolock or local_lock; Lustre: -o "
                "flock; CephFS has them)",
            ) from error
        if seat is None:
            raise ConfigError(
                fault=f"{MAX_SEATS} servers use it already, the most that there can be", fix="name another directory"
            )
        return seat

    def _adopt(self, unusable: set[str]) -> Seat | None:
        now = _medium_time(self.root)
        for has_blocks in (True, False):

            def may_adopt(seat: Storage, has_blocks: bool = has_blocks) -> bool:
                is_wanted = (self.fingerprint in seat.folders()) is has_blocks
                return is_wanted and _is_free(seat, self.machine, now) and not _has_other_format(seat)

            for name in [name for name in seat_names(self.root) if name not in unusable]:
                try:
                    seat = self._claim(name, may_adopt)
                except (OSError, ConfigError) as error:
                    if isinstance(error, OSError) and error.errno in NO_LOCK_ERRORS:
                        raise
                    unusable.add(name)
                    log_unusable_seat(name, error)
                else:
                    if seat is not None:
                        return seat
        return None

    def _new_seat(self) -> Seat | None:
        folders, files = seat_names(self.root), self.root.files("")
        for name in map(seat_name, range(MAX_SEATS)):
            if name in folders or name in files:
                continue
            seat = self._claim(name, lambda storage: storage.try_lock())
            if seat is not None:
                seat.is_new = True
                return seat
        return None

    def _claim(self, name: str, may_take: Callable[[Storage], bool]) -> Seat | None:
        """Returns the seat ``name`` if this process may take it. Raises OSError and ConfigError."""
        with ExitStack() as opened:
            storage = self.root.child(name)
            opened.callback(storage.close)
            if not may_take(storage):
                return None
            seat = Seat(name, storage, self)
            seat.write(SeatState.SERVING)
            opened.pop_all()
            return seat


def log_unusable_seat(name: str, error: Exception) -> None:
    logger.warning(
        "kvoffload: shared directory: %s cannot be used (%s), so the server takes another folder; check its owner and "
        "the file system",
        name,
        error,
    )


def _medium_time(root: Storage) -> float:
    """Returns the medium's time; a time before all others if it cannot be learned."""
    try:
        return write_file(root, "", CLOCK_NAME, np.zeros(8, dtype=np.uint8))
    except OSError as error:
        logger.warning(
            "kvoffload: shared directory: %s cannot be written (%s), so folders of servers on machines that were lost "
            "are not taken over; remove it",
            CLOCK_NAME,
            error,
        )
        return -float("inf")


def _is_free(seat: Storage, machine: Machine, now: float) -> bool:
    """Returns whether a seat may be adopted. It is locked then. Raises OSError."""
    if not seat.try_lock():
        return False
    seen = look(seat)
    if seen is None:
        return True
    heartbeat = seen.heartbeat
    if heartbeat is not None and (heartbeat.state is not SeatState.SERVING or heartbeat.boot == machine.boot != ""):
        return True
    return now - seen.modified >= SILENT_S


def _has_other_format(seat: Storage) -> bool:
    """Returns whether servers of a release with another format have blocks in a seat, which these find again. Raises
    OSError."""
    for folder in filter(is_fingerprint, seat.folders()):
        with suppress(FileNotFoundError):
            if is_of_other_version(read_fresh(seat, folder, INDEX_NAME, HEADER_BYTES)):
                return True
    return False


class GoneSeats:
    """Empties the seats of servers that are gone, on behalf of ``seat``. ``look_around`` waits for the medium."""

    def __init__(self, root: Storage, seat: Seat, gone_after_s: float, clock: Callable[[], float]) -> None:
        self._root = root
        self._seat = seat
        self._gone_after_s = max(gone_after_s, SILENT_S)
        self._clock = clock
        self._seen: dict[str, tuple[bytes, float]] = {}
        """Per seat, its heartbeat, and since when it has not changed."""

    def look_around(self) -> None:
        """Looks at each seat, and empties those that are gone. Raises OSError."""
        names = [name for name in seat_names(self._root) if name != self._seat.name]
        self._seen = {name: seen for name, seen in self._seen.items() if name in names}
        for name in names:
            try:
                with closing(self._root.child(name)) as storage:
                    if self._is_gone(name, look(storage)) and storage.try_lock():
                        self._empty(name, storage)
            except (OSError, ConfigError) as error:
                logger.debug("kvoffload: shared directory: %s cannot be looked at (%s)", name, error)

    def _is_gone(self, name: str, seen: Sighting | None) -> bool:
        found = seen.raw if seen is not None else b""
        heartbeat = Heartbeat.unpack(found)
        if heartbeat is not None and heartbeat.state is SeatState.EMPTIED:
            return False
        now = self._clock()
        raw, since = self._seen.setdefault(name, (found, now))
        if raw != found:
            self._seen[name] = (found, now)
            return False
        if seen is None or seen.modified > self._seat.modified:
            # It has no heartbeat, or one with a time in the future: only the own clock can say for how long.
            return now - since >= self._gone_after_s
        return now - since >= SILENT_S and self._seat.modified - seen.modified >= self._gone_after_s

    def _empty(self, name: str, storage: Storage) -> None:
        """Empties a seat, which is locked, unless another process has done so meanwhile. Raises OSError."""
        again = look(storage)
        if (again.raw if again is not None else b"") != self._seen[name][0]:
            return
        logger.warning(
            "kvoffload: shared directory: %s has been without a server for more than %.0f s; its blocks are removed",
            name,
            self._gone_after_s,
        )
        remove_blocks(storage)
        # Not again until its heartbeat changes, even if that cannot be written.
        self._seen[name] = (self._seen[name][0], float("inf"))
        left = Heartbeat(self._seat.owner, "", 0, "", SeatState.EMPTIED, 0, 0.0, 0)
        write_file(storage, "", HEARTBEAT_NAME, left.pack())

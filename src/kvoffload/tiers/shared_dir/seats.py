"""Seats: the folders ``writer-0``, ``writer-1`` and so on of a shared directory, each written by one process at a time.

A process that has a seat holds the lock of its folder and rewrites the file ``heartbeat`` there every BEAT_S. The lock
alone is not enough: on some mounts each machine has locks of its own, and a machine that is cut off loses its locks
without noticing. The heartbeat alone is not enough either: a process that was killed a second ago looks alive.

- A seat is *adopted* by a process that starts if its lock is free, and its owner has said that it has ended, or ran
  under the same kernel, for which a free lock is a proof, or has been silent for SILENT_S.
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
import mmap
import os
import re
import socket
import time
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvoffload.abc import ByteArray, ConfigError
from kvoffload.tiers.disk.start import remove_blocks
from kvoffload.tiers.disk.storage import NO_FILE_ERRORS, Storage

logger = logging.getLogger(__name__)

HEARTBEAT_NAME = "heartbeat"
HEARTBEAT_BYTES = 4096
HEARTBEAT_VERSION = 1
GATE_NAME = "gate"
"""The folder whose lock a process holds while it chooses a seat."""
CLOCK_NAME = "clock"
"""A file in GATE_NAME, or for a moment beside it, whose time is the medium's."""
BEAT_S = 3.0
SILENT_S = 60.0
GONE_AFTER_S = 3600
"""By default a seat is emptied after so long."""
GATE_DEADLINE_S = 20.0
GATE_RETRY_S = 0.05
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
        """Returns None if these are not the bytes of a heartbeat of this version, whatever they are."""
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
    try:
        page = aligned_buffer(HEARTBEAT_BYTES)
        return Sighting(page[: file.read([page], 0)].tobytes(), file.modified())
    finally:
        file.close()


def aligned_buffer(nbytes: int) -> ByteArray:
    """Returns memory into which files can be read directly."""
    return np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)


def _write(storage: Storage, name: str, data: ByteArray) -> float:
    """Writes a small file. Returns the time that the medium has given it. Raises OSError."""
    file = storage.open("", name, create=True)
    try:
        if file.write([data], 0) < data.size:
            raise OSError(errno.ENOSPC, f"{name} could not be written in full")
        file.sync()
        return file.modified()
    finally:
        file.close()


class Seat:
    """A seat that this process has. ``beat`` and ``end`` may be called by any one thread at a time."""

    def __init__(self, name: str, storage: Storage, machine: Machine, owner: str, wall_clock: Callable[[], float]):
        self.name = name
        self.storage = storage
        self.owner = owner
        self.is_lost = False
        """Whether another process has the seat now, or its files have vanished."""
        self.modified = 0.0
        """When the heartbeat was last written, by the medium's clock."""
        self.capacity_bytes = 0
        """The budget, for those who inspect the directory."""
        self.is_new = False
        """Whether no process had the seat before."""
        self._machine = machine
        self._wall_clock = wall_clock
        self._num_beats = 0

    def claim(self) -> None:
        """Writes the first heartbeat. Raises OSError."""
        self._write(SeatState.SERVING)

    def beat(self) -> None:
        """Writes the heartbeat again, unless the seat is lost, which is noticed here. Raises OSError."""
        self._beat(SeatState.SERVING)

    def end(self) -> None:
        """Writes that the process has ended. Raises OSError."""
        self._beat(SeatState.ENDED)

    def _beat(self, state: SeatState) -> None:
        found = look(self.storage)
        heartbeat = None if found is None else found.heartbeat
        if found is None or (heartbeat is not None and heartbeat.owner != self.owner):
            self.is_lost = True
        if not self.is_lost:
            self._write(state)

    def _write(self, state: SeatState) -> None:
        self._num_beats += 1
        machine = self._machine
        heartbeat = Heartbeat(
            self.owner,
            machine.host,
            machine.pid,
            machine.boot,
            state,
            self._num_beats,
            self._wall_clock(),
            self.capacity_bytes,
        )
        self.modified = _write(self.storage, HEARTBEAT_NAME, heartbeat.pack())


def take_seat(
    root: Storage,
    fingerprint: str,
    machine: Machine,
    random: Callable[[int], bytes],
    wall_clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    unusable: Collection[str] = (),
) -> Seat:
    """Returns a seat for this process, locked: one that can be adopted, preferably one with blocks of ``fingerprint``,
    else a new one. Seats with ``unusable`` names, and those that cannot be claimed, are left alone. Raises ConfigError
    if the file system has no locks or MAX_SEATS are taken, and OSError."""
    try:
        with _alone(root, sleep) as now, closing(_candidates(root, fingerprint, machine, now, unusable)) as candidates:
            for name, storage, is_new in candidates:
                seat = Seat(name, storage, machine, random(16).hex(), wall_clock)
                seat.is_new = is_new
                try:
                    seat.claim()
                    return seat
                except BaseException as error:
                    storage.close()
                    if is_new or not isinstance(error, OSError):
                        raise
                    _log_unusable(name, error)
    except OSError as error:
        if error.errno not in NO_LOCK_ERRORS:
            raise
        raise ConfigError(
            "its file system has no file locks, which servers need to agree on their folders; mount it with locks "
            "(NFS: version 4, without nolock or local_lock; Lustre: -o flock; CephFS has them)"
        ) from error
    raise ConfigError(f"{MAX_SEATS} servers use it already, the most that there can be; name another directory")


@contextmanager
def _alone(root: Storage, sleep: Callable[[float], None]) -> Iterator[float]:
    """Waits until no other process is choosing a seat. Yields the medium's time. If that takes GATE_DEADLINE_S, or the
    gate cannot be used, it goes on regardless: at worst this process takes a new seat although an old one could be
    adopted."""
    gate, now = None, -float("inf")
    try:
        try:
            gate = root.child(GATE_NAME)
            _enter(gate, sleep)
            now = _write(gate, CLOCK_NAME, np.zeros(8, dtype=np.uint8))
        except (OSError, ConfigError) as error:
            if isinstance(error, OSError) and error.errno in NO_LOCK_ERRORS:
                raise
            _log_unusable(GATE_NAME, error)
            # Without the medium's time, no silent seat would ever be adopted.
            with suppress(OSError):
                now = _write(root, CLOCK_NAME, np.zeros(8, dtype=np.uint8))
                root.remove("", CLOCK_NAME)
        yield now
    finally:
        if gate is not None:
            gate.close()


def _enter(gate: Storage, sleep: Callable[[float], None]) -> None:
    for _ in range(int(GATE_DEADLINE_S / GATE_RETRY_S)):
        if gate.try_lock():
            return
        sleep(GATE_RETRY_S)
    logger.warning("kvoffload: shared directory: another server has been starting for %.0f s", GATE_DEADLINE_S)


def _candidates(
    root: Storage, fingerprint: str, machine: Machine, now: float, unusable: Collection[str]
) -> Generator[tuple[str, Storage, bool], None, None]:
    """Yields the seats that this process may have, best first: name, storage, which is locked, and whether it is
    new."""
    found: list[tuple[str, Storage, bool]] = []
    names = seat_names(root)
    try:
        for name in names:
            adopted = _adopt(root, name, fingerprint, machine, now) if name not in unusable else None
            if adopted is not None:
                found.append((name, *adopted))
        found.sort(key=lambda each: not each[2])
        while found:
            name, storage, _ = found.pop(0)
            yield name, storage, False
    finally:
        for _, storage, _ in found:
            storage.close()
    files = root.files("")
    for name in map(seat_name, range(MAX_SEATS)):
        if name in files:
            logger.warning("kvoffload: shared directory: %s is not a folder and is left alone; remove it", name)
        elif name not in names:
            storage = root.child(name)
            try:
                is_mine = storage.try_lock()
            except BaseException:
                storage.close()
                raise
            if is_mine:
                yield name, storage, True
            else:
                storage.close()


def _adopt(root: Storage, name: str, fingerprint: str, machine: Machine, now: float) -> tuple[Storage, bool] | None:
    """Returns the seat's storage, locked, and whether it has a folder of ``fingerprint``. Returns None if this process
    may not have the seat, or cannot use it."""
    try:
        storage = root.child(name)
    except (OSError, ConfigError) as error:
        _log_unusable(name, error)
        return None
    try:
        if storage.try_lock():
            seen = look(storage)
            if seen is None or _may_be_adopted(seen, machine, now):
                return storage, fingerprint in storage.folders()
    except OSError as error:
        storage.close()
        if error.errno in NO_LOCK_ERRORS:
            raise
        _log_unusable(name, error)
        return None
    except BaseException:
        storage.close()
        raise
    storage.close()
    return None


def _log_unusable(name: str, error: Exception) -> None:
    logger.warning("kvoffload: shared directory: %s cannot be used (%s)", name, error)


def _may_be_adopted(seen: Sighting, machine: Machine, now: float) -> bool:
    heartbeat = seen.heartbeat
    if heartbeat is not None and (heartbeat.state is not SeatState.SERVING or heartbeat.boot == machine.boot != ""):
        return True
    return now - seen.modified >= SILENT_S


class GoneSeats:
    """Empties the seats of servers that are gone, on behalf of ``seat``. ``look_around`` waits for the medium."""

    def __init__(self, root: Storage, seat: Seat, gone_after_s: float, clock: Callable[[], float]) -> None:
        self._root = root
        self._seat = seat
        self._gone_after_s = max(gone_after_s, SILENT_S)
        self._clock = clock
        self._seen: dict[str, tuple[bytes, float]] = {}
        """Per seat, its heartbeat, and since when it has not changed."""

    def look_around(self) -> list[str]:
        """Looks at each seat, and empties those that are gone. Returns their names. Raises OSError."""
        emptied = []
        names = [name for name in seat_names(self._root) if name != self._seat.name]
        self._seen = {name: seen for name, seen in self._seen.items() if name in names}
        for name in names:
            try:
                if self._look_at(name):
                    emptied.append(name)
            except (OSError, ConfigError) as error:
                logger.debug("kvoffload: shared directory: %s cannot be looked at (%s)", name, error)
        return emptied

    def _look_at(self, name: str) -> bool:
        """Returns whether the seat was emptied. Raises OSError and ConfigError."""
        storage = self._root.child(name)
        try:
            return self._is_gone(name, look(storage)) and self._empty(name, storage)
        finally:
            storage.close()

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

    def _empty(self, name: str, storage: Storage) -> bool:
        """Returns whether the seat was emptied: not if another process has it, or is doing the same."""
        if not storage.try_lock():
            return False
        again = look(storage)
        if (again.raw if again is not None else b"") != self._seen[name][0]:
            return False
        logger.warning(
            "kvoffload: shared directory: %s has been without a server for more than %.0f s; its blocks are removed",
            name,
            self._gone_after_s,
        )
        remove_blocks(storage)
        # Not again until its heartbeat changes, even if that cannot be written.
        self._seen[name] = (self._seen[name][0], float("inf"))
        left = Heartbeat(self._seat.owner, "", 0, "", SeatState.EMPTIED, 0, 0.0, 0)
        _write(storage, HEARTBEAT_NAME, left.pack())
        return True

"""Offline tools for the directory of a disk tier or of a shared directory tier: inspect it, verify its blocks, clear
it.

Inspecting and verifying change nothing and work beside a running server: a block that seems wrong is read again, since
the server may have replaced it in between. Nothing that is read is trusted, and no symbolic link is followed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvoffload.abc import KVOffloadError
from kvoffload.cli.folder import Cleared, Folder, OpenFolder, Verification, not_ours, open_file, open_folder, read
from kvoffload.locks import try_to_lock
from kvoffload.tiers.disk.directory import LOCK_NAME, LOCK_NAMES, end_it, owner_of
from kvoffload.tiers.disk.format import ENGINE_FOLDER, is_fingerprint
from kvoffload.tiers.shared_dir.seats import (
    CLOCK_NAME,
    HEARTBEAT_BYTES,
    HEARTBEAT_NAME,
    SILENT_S,
    Heartbeat,
    SeatState,
    seat_number,
)


class InspectError(KVOffloadError):
    """A directory cannot be inspected or cleared, for the reason that the message gives."""


@dataclass(slots=True)
class Writer:
    """The owner of a seat in a shared directory, as its heartbeat says."""

    host: str
    pid: int
    state: str
    """"serving", "ended" or "emptied"."""
    age_s: float
    """Seconds since the heartbeat, by the clocks of the storage and of this machine."""
    capacity_bytes: int
    """The budget of the seat."""


@dataclass(slots=True)
class Owned:
    """A directory that one server owns at a time: the inspected one (``path`` "") or the folder of an engine or of a
    writer in it."""

    path: str
    in_use: bool = False
    pid: int | None = None
    """The process that uses it, as the lock file says."""
    writer: Writer | None = None
    """In a shared directory only."""
    folders: list[Folder] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)


def inspect(directory: Path) -> list[Owned]:
    """Describes the blocks in ``directory`` and in the engines' folders below it. Raises InspectError if it is not the
    directory of a disk tier."""
    with _errors_in(directory), ExitStack() as stack:
        found = _open_owned(directory, stack)
        for owned, fd in found:
            with _finding(owned, LOCK_NAME):
                owned.in_use, owned.pid = _owner(fd)
            if seat_number(owned.path) is not None:
                with _finding(owned, HEARTBEAT_NAME):
                    owned.writer = _writer(owned, fd)
            for folder in _open_folders(owned, fd, stack):
                folder.inspect()
        return [owned for owned, _ in found]


def verify(
    directory: Path, begin: Callable[[int], None] = lambda _: None, advance: Callable[[int], None] = lambda _: None
) -> Verification:
    """Reads every block and compares it with its checksum. Raises InspectError if ``directory`` is not the directory of
    a disk tier.

    Calls ``begin`` with the number of bytes to read, then ``advance`` with the bytes of each block when it is done.
    """
    result = Verification()
    with _errors_in(directory), ExitStack() as stack:
        found = _open_owned(directory, stack)
        folders = [folder for owned, fd in found for folder in _open_folders(owned, fd, stack)]
        for folder in folders:
            folder.inspect()
        begin(sum(folder.report.num_blocks * folder.report.block_bytes for folder in folders))
        for folder in folders:
            folder.verify(result, advance)
        result.lost = [folder.report.path for folder in folders if folder.report.is_lost]
        result.findings = findings([owned for owned, _ in found])
    return result


def findings(parts: Iterable[Owned]) -> list[str]:
    """Returns all findings, each with its path."""
    return [
        f"{path or '.'}: {finding}"
        for owned in parts
        for path, found in ((owned.path, owned.findings), *((folder.path, folder.findings) for folder in owned.folders))
        for finding in found
    ]


def clear(directory: Path, fingerprint: str | None = None) -> Cleared:
    """Removes the blocks of ``fingerprint``, or all blocks: the files that kvoffload has written, and no others.

    Raises InspectError if ``directory`` is not the directory of a disk tier, if a server uses it, or if a file cannot
    be removed.
    """
    result = Cleared()
    with _errors_in(directory), ExitStack() as stack:
        found = _open_owned(directory, stack)
        for owned, fd in found:
            _lock(directory / owned.path, fd, stack)
        for owned, fd in found:
            for folder in _open_folders(owned, fd, stack):
                if fingerprint in (None, folder.report.fingerprint):
                    folder.remove(result)
    return result


def _open_owned(directory: Path, stack: ExitStack) -> list[tuple[Owned, int]]:
    """Opens ``directory`` and the engines' folders in it. Returns each with its descriptor."""
    fix = "name the directory of a disk tier or of a shared_dir tier"
    try:
        root = stack.enter_context(open_folder(directory))
    except OSError as error:
        raise InspectError(f"{directory}: {error.strerror}; {fix}") from error
    names = sorted(os.listdir(root))
    engines = [name for name in names if ENGINE_FOLDER.fullmatch(name)]
    engines += sorted(
        (name for name in names if seat_number(name) is not None), key=lambda name: seat_number(name) or 0
    )
    if not (engines or LOCK_NAME in names or any(map(is_fingerprint, names))):
        raise InspectError(f"{directory}: is not the directory of a disk tier; {fix}")
    found = [(Owned(""), root)]
    for name in engines:
        try:
            found.append((Owned(name), stack.enter_context(open_folder(name, root))))
        except OSError as error:
            found[0][0].findings.append(f"{name} cannot be opened: {error.strerror}")
    return found


def _open_folders(owned: Owned, fd: int, stack: ExitStack) -> list[OpenFolder]:
    """Opens the folders of the fingerprints in ``owned``, which gets their reports."""
    opened: list[OpenFolder] = []
    foreign = []
    for name in sorted(os.listdir(fd)):
        if is_fingerprint(name):
            try:
                folder = stack.enter_context(open_folder(name, fd))
            except FileNotFoundError:
                continue
            except OSError as error:
                owned.findings.append(f"{name} cannot be opened: {error.strerror}")
                continue
            report = Folder(f"{owned.path}/{name}".lstrip("/"), name)
            owned.folders.append(report)
            opened.append(OpenFolder(report, folder, fd))
        elif not _is_of_tier(owned, name):
            foreign.append(name)
    if foreign:
        owned.findings.append(not_ours(foreign))
    return opened


def _is_of_tier(owned: Owned, name: str) -> bool:
    """Returns whether a file or folder beside those of the fingerprints is one of kvoffload's."""
    if name in LOCK_NAMES:
        return True
    if owned.path:
        return seat_number(owned.path) is not None and name == HEARTBEAT_NAME
    return name == CLOCK_NAME or seat_number(name) is not None or ENGINE_FOLDER.fullmatch(name) is not None


def _writer(owned: Owned, fd: int) -> Writer | None:
    """Reads the heartbeat of a seat. Sets ``owned.in_use`` if its owner is alive on another machine."""
    try:
        with open_file(HEARTBEAT_NAME, fd) as file:
            raw, modified = read(file, HEARTBEAT_BYTES, 0).tobytes(), os.fstat(file).st_mtime
    except FileNotFoundError:
        return None
    found = Heartbeat.unpack(raw)
    if found is None:
        owned.findings.append("the heartbeat cannot be read")
        return None
    age_s = max(0.0, time.time() - modified)
    if found.state is SeatState.SERVING:
        # Locks may be known to one machine only.
        owned.in_use = owned.in_use or age_s < SILENT_S
        owned.pid = found.pid
    return Writer(found.host, found.pid, str(found.state), age_s, found.capacity_bytes)


def _owner(fd: int) -> tuple[bool, int | None]:
    """Returns whether a server uses the directory ``fd``, and its process id. Takes a shared lock for a moment."""
    with suppress(FileNotFoundError), open_file(LOCK_NAME, fd) as lock:
        if not try_to_lock(lock, 0.0, shared=True):
            return True, owner_of(lock)
    return False, None


def _lock(path: Path, fd: int, stack: ExitStack) -> None:
    """Locks the directory ``fd`` until ``stack`` ends. If no server has ever used it, it has no lock file."""
    with suppress(FileNotFoundError):
        lock = stack.enter_context(open_file(LOCK_NAME, fd))
        if not try_to_lock(lock, 0.0):
            pid = owner_of(lock)
            owner = "another process" if pid is None else f"process {pid}"
            raise InspectError(f"{path} is in use by {owner}; {end_it(lock) or 'stop that server first'}")


@contextmanager
def _errors_in(directory: Path) -> Iterator[None]:
    """Turns an OSError into an InspectError."""
    try:
        yield
    except OSError as error:
        where = "" if error.filename is None else f" ({error.filename})"
        raise InspectError(f"{directory}: {error.strerror}{where}") from error


@contextmanager
def _finding(owned: Owned, name: str) -> Iterator[None]:
    """Turns an OSError of one file into a finding."""
    try:
        yield
    except OSError as error:
        owned.findings.append(f"{name} cannot be read ({error.strerror})")

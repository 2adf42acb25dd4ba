"""Moves request records from a serving process to another, over a local socket or through the log, and metrics that
concern tenants and paused tiers over the socket."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import re
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvoffload.abc import KVOffloadError
from kvoffload.observe.records import RequestRecord
from kvoffload.printable import printable

LOG_MARKER = "kvoffload: record "
"""Precedes a record, in JSON, on a line of a log."""
CLIENT_DEADLINE_S = 5.0
MAX_ANSWER_BYTES = 16 << 20
MAX_LINE_BYTES = 1 << 16
MAX_FAULTS_LISTED = 5
MAX_ANCESTORS = 8
MAX_PAUSED = 64
"""Abilities of tiers that are named as paused."""
_SENT_METRICS = ("tenant_", "tier_paused:")
_MAX_AMOUNT = 1e30
PROC_NET_UNIX = Path("/proc/net/unix")

# Num RefCount Protocol Flags Type St Inode Path: only a listener has these flags.
_LISTENER = re.compile(
    rb"\S+ \S+ \S+ 00010000 \S+ \S+ +\S+ (/[ -~]*kvoffload(?:-[0-9]{1,10})?)/([0-9]{1,10})-([A-Za-z0-9_.:-]{1,64})"
)
_SOCKET = re.compile("([0-9]{1,10})-[A-Za-z0-9_.:-]{1,64}")
_MAX_PATH_BYTES = 107
"""What the kernel takes for the path of a socket."""
_MAX_STALE = 1024
"""Files that are looked at for those of servers that were killed."""
_FORMAT = 2
_BACKLOG = 64
_COPY_TRIES = 100
_ENTRIES_PER_SEND = 64
_RETRY_S = 1.0
_CONNECT_RETRY_S = 0.001

logger = logging.getLogger(__name__)


class RecordsError(KVOffloadError):
    """Records could not be read. The message tells the user from where, and why."""


def paused_in(totals: Iterable[tuple[str, float]]) -> list[str]:
    """Returns which abilities of tiers are paused, in words, by ``totals``, metrics by labelled names."""
    labels = (name.removeprefix("tier_paused:") for name, value in totals if value and name.startswith("tier_paused:"))
    words = {"read": "reads of", "write": "writes to"}
    return [
        f"{words.get(ability, ability)} the {printable(tier)} tier"
        for ability, _, tier in (label.partition(",") for label in sorted(labels)[:MAX_PAUSED])
    ]


class RecordServer:
    """Sends the records that ``source`` returns to processes of the same user and of root on this machine.

    It listens on the Unix socket ``<pid>-<name>`` in a directory that only this user may enter: ``kvoffload`` in
    XDG_RUNTIME_DIR, else ``/tmp/kvoffload-<uid>``. One daemon thread answers one client at a time, in pieces, for at
    most CLIENT_DEADLINE_S. With the records it sends those of ``totals()``, metrics by labelled names, that concern
    tenants and paused tiers. That thread calls both functions; other threads may append to the sequence that ``source``
    returns. Nothing raises: if no socket or thread can be made, one warning says so and nothing is served.
    """

    def __init__(
        self,
        source: Callable[[], Sequence[RequestRecord]],
        name: str,
        totals: Callable[[], Iterable[tuple[str, float]]] = tuple,
    ) -> None:
        self._source = source
        self._totals = totals
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._client: socket.socket | None = None
        self._listener: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, name="kvoffload-records", daemon=True)
        self._path: Path | None = None
        try:
            self._path, self._listener = _listen(f"{os.getpid()}-{re.sub('[^A-Za-z0-9_.:-]', '_', name)[:64]}")
            self._thread.start()
        except Exception as error:
            logger.warning("kvoffload: `kvoffload explain` cannot read this server: %s", error)
            if self._listener is not None:
                self._listener.close()

    def close(self) -> None:
        """Ends the thread, even while it waits for a client. May be called twice."""
        with self._lock:
            self._closing.set()
            if self._path is not None:
                self._path.unlink(missing_ok=True)
                self._path = None
            for sock in (self._listener, self._client):
                if sock is not None:
                    with contextlib.suppress(OSError):
                        # Unlike shutdown, close would not wake the thread.
                        sock.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join(CLIENT_DEADLINE_S)

    def _serve(self) -> None:
        assert self._listener is not None
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                # The process may be out of file descriptors: do not spin.
                self._closing.wait(_RETRY_S)
                continue
            with self._lock:
                self._client = client
            try:
                if not self._closing.is_set():
                    self._answer(client)
            except Exception as error:
                logger.debug("kvoffload: records were not sent: %s", error)
            finally:
                with self._lock:
                    self._client = None
                    client.close()
        with self._lock:
            self._listener.close()

    def _answer(self, client: socket.socket) -> None:
        deadline = time.monotonic() + CLIENT_DEADLINE_S
        records = self._copy()
        totals = [{name: total} for name, total in self._totals() if name.startswith(_SENT_METRICS)]
        header = {"kvoffload_records": _FORMAT, "count": len(records), "totals_count": len(totals)}
        entries = itertools.chain([header], map(RequestRecord.to_dict, records), totals)
        # In pieces, so that the engine's thread can take the interpreter lock in between.
        while piece := b"".join(_line(entry) for entry in itertools.islice(entries, _ENTRIES_PER_SEND)):
            client.settimeout(_left(deadline))
            client.sendall(piece)

    def _copy(self) -> list[RequestRecord]:
        for _ in range(_COPY_TRIES):
            with contextlib.suppress(RuntimeError):  # the deque changed while it was copied
                return list(self._source())
        raise RuntimeError("records arrive too fast to be copied")


def _line(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _listen(name: str) -> tuple[Path, socket.socket]:
    """Returns a socket that listens under ``name`` in this user's directory, and its path. Raises OSError."""
    path = _own_directory(name) / name
    _remove_stale(path.parent)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(os.fspath(path))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(f"socket {path}: {error}") from error
    return path, listener


def _own_directory(name: str) -> Path:
    """Returns the directory for the sockets of this user, which it makes if it is missing. ``name`` must fit in there.
    Raises OSError if another user could enter it, or has made it."""
    uid = os.geteuid()
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if runtime.is_absolute():
        # A variable of another user's session, as after su, or a directory that is gone: there is another place.
        with contextlib.suppress(OSError):
            directory = runtime / "kvoffload"
            if len(os.fsencode(directory / name)) <= _MAX_PATH_BYTES and os.stat(runtime).st_uid == uid:
                return _private(directory)
    return _private(Path(f"/tmp/kvoffload-{uid}"))


def _private(directory: Path) -> Path:
    with contextlib.suppress(FileExistsError):
        directory.mkdir(0o700)
    owner = owner_of(directory)
    if owner != os.geteuid():
        raise PermissionError(f"directory {directory} belongs to user {owner}: remove it")
    return directory


def owner_of(directory: Path) -> int:
    """Returns the id of the user to whom ``directory`` belongs. Raises OSError if other users may enter it."""
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{directory} is no directory: remove it")
    if status.st_mode & 0o077:
        raise PermissionError(f"other users may enter directory {directory}: run chmod 700 {directory}")
    return status.st_uid


def _remove_stale(directory: Path) -> None:
    """Removes sockets on which no process listens any more: those of servers that were killed."""
    with os.scandir(directory) as entries:
        for entry in itertools.islice(entries, _MAX_STALE):
            match = _SOCKET.fullmatch(entry.name)
            if match is None or (int(match[1]) != os.getpid() and os.path.exists(f"/proc/{match[1]}")):
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock, contextlib.suppress(OSError):
                sock.setblocking(False)
                if sock.connect_ex(entry.path) == errno.ECONNREFUSED:
                    os.unlink(entry.path)


def peer(sock: socket.socket) -> tuple[int, int]:
    """Returns the process at the other end, 0 if it is in another container, and its user."""
    size = struct.calcsize("iII")
    pid, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, uid


@dataclass(slots=True)
class Reading:
    """What was read from one source, the number of malformed entries, and descriptions of the first few."""

    records: list[RequestRecord] = field(default_factory=list)
    totals: dict[str, float] = field(default_factory=dict)
    """Metrics of a server by labelled names."""
    malformed: int = 0
    faults: list[str] = field(default_factory=list)

    def take(self, text: str, where: str, are_totals: bool = False) -> None:
        """Adds the record, or the totals, that ``text`` begins with, or counts it as malformed."""
        try:
            if len(text) > MAX_LINE_BYTES:
                raise ValueError(f"longer than {MAX_LINE_BYTES:,} characters")
            data, _ = json.JSONDecoder().raw_decode(text)
            if not isinstance(data, dict):
                raise ValueError("not a JSON object")
            if not are_totals:
                self.records.append(RequestRecord.from_dict(data))
            elif all(isinstance(value, int | float) and 0 <= value <= _MAX_AMOUNT for value in data.values()):
                self.totals |= data
            else:
                raise ValueError("not metrics")
        except (ValueError, RecursionError) as error:
            self.malformed += 1
            if len(self.faults) < MAX_FAULTS_LISTED:
                fault = f"not JSON ({error.msg})" if isinstance(error, json.JSONDecodeError) else error
                self.faults.append(printable(f"{where}: {fault}"))


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A process that serves records. ``pid`` is its own, as seen in its container."""

    pid: int
    name: str
    directory: Path
    """Where its socket is."""

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name})"

    def describe(self) -> str:
        """Returns its process, and the model and the port in the command of its engine, if this process may read it."""
        for pid in (self.pid, *ancestors(self.pid)):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
                model = re.search(r" (?:serve |--model(?:-path)?[ =])([^ -][^ ]*)", command)
                port = re.search(r" --port[ =]([^ ]+)", command)
                if model is not None:
                    known = [model[1], *([f"port {port[1]}"] if port is not None else [])]
                    return f"process {self.pid} ({', '.join(map(printable, known))})"
        return f"process {self.pid}"


def ancestors(pid: int) -> Iterator[int]:
    """Yields the processes that started ``pid``, the nearest first, as far as this process can see them."""
    for _ in range(MAX_ANCESTORS):
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            return
        if pid <= 1:
            return
        yield pid


def running_servers() -> list[RunningServer]:
    """Returns every RecordServer in this network namespace, of any user, ordered by process."""
    try:
        lines = PROC_NET_UNIX.read_bytes().split(b"\n")
    except OSError:
        return []
    matches = [match for line in lines if (match := _LISTENER.fullmatch(line))]
    return sorted(
        {RunningServer(int(match[2]), match[3].decode(), Path(match[1].decode())) for match in matches},
        key=lambda server: (server.pid, server.name, server.directory),
    )


def read_records(server: RunningServer, timeout_s: float, of_any_user: bool = False) -> Reading:
    """Returns the records that ``server`` keeps, within ``timeout_s`` seconds. ``of_any_user``: root wants them even if
    the server is another user's, who can answer what he likes.

    Raises RecordsError if it does not answer in time, belongs to another user, or answers in another format.
    """
    deadline = time.monotonic() + timeout_s
    try:
        owner = owner_of(server.directory)
        if owner != os.geteuid() and not (of_any_user and os.geteuid() == 0):
            raise RecordsError(
                f"{server} was ignored: it belongs to user {owner}; run this command as that user, or as root with "
                f"--pid {server.pid}"
            )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            connect(sock, os.fspath(server.directory / f"{server.pid}-{server.name}"), deadline)
            pid, uid = peer(sock)
            if uid != owner or (owner != os.geteuid() and pid != server.pid):
                raise RecordsError(f"{server} was ignored: process {pid} of user {uid} answers in its place")
            return _read(server, _lines(sock, deadline))
    except OSError as error:
        raise RecordsError(f"{server} does not answer: {error}") from error


def _read(server: RunningServer, lines: Iterator[bytes]) -> Reading:
    header = next(lines, None)
    if header is None:
        raise RecordsError(f"{server} closed the connection without an answer: try again")
    count = totals_count = None
    with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError):
        announced = json.loads(header)
        if announced["kvoffload_records"] == _FORMAT:
            count, totals_count = announced["count"], announced["totals_count"]
    if not isinstance(count, int) or not isinstance(totals_count, int):
        raise RecordsError(f"{server} answered in another format: use the version of kvoffload that it runs")
    reading, number = Reading(), 0
    # What a server sends beyond its announcement is not read.
    for number, line in zip(range(1, count + totals_count + 1), lines, strict=False):
        reading.take(line.decode("utf-8", "replace"), f"{server}, line {number + 1}", number > count)
    if number < count + totals_count:
        raise RecordsError(f"{server} stopped after {number} of {count + totals_count} records and metrics: try again")
    return reading


def _lines(sock: socket.socket, deadline: float) -> Iterator[bytes]:
    """Yields the lines that arrive. Of one that is longer than MAX_LINE_BYTES, only the beginning."""
    size, rest, is_open = 0, b"", True
    while is_open:
        sock.settimeout(_left(deadline))
        piece = sock.recv(1 << 16)
        size, is_open = size + len(piece), bool(piece)
        if size > MAX_ANSWER_BYTES:
            raise OSError(f"it sent more than {MAX_ANSWER_BYTES:,} bytes")
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
        rest = rest[: MAX_LINE_BYTES + 1]
    if rest:
        yield rest


def connect(sock: socket.socket, address: str, deadline: float) -> None:
    """Connects; retries while other clients fill the server's queue."""
    while True:
        sock.settimeout(_left(deadline))
        try:
            sock.connect(address)
            return
        except BlockingIOError:
            time.sleep(_CONNECT_RETRY_S)


def log_record(record: RequestRecord) -> None:
    """Logs ``record`` at the level DEBUG, as ``read_log`` reads it."""
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug("%s%s", LOG_MARKER, json.dumps(record.to_dict()))


def read_log(lines: Iterable[bytes], name: str) -> Reading:
    """Returns the records in a log called ``name``: JSON after LOG_MARKER anywhere in a line, or alone on a line."""
    reading = Reading()
    for number, line in enumerate(lines, 1):
        text = line.decode("utf-8", "replace")
        _, marker, record = text.partition(LOG_MARKER + "{")
        if marker:
            reading.take("{" + record, f"{name}:{number}")
        elif text.startswith("{") and '"req_id"' in text:
            reading.take(text, f"{name}:{number}")
    return reading

"""How a server's records reach another process: over a local socket, or through its log."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvoffload.abc import KVOffloadError
from kvoffload.observe.records import RequestRecord

LOG_MARKER = "kvoffload: record "
"""What stands before a record, in JSON, in a log."""
CLIENT_DEADLINE_S = 5.0
MAX_ANSWER_BYTES = 64 << 20
MAX_LINE_BYTES = 1 << 16
MAX_FAULTS_TOLD = 5
PROC_NET_UNIX = Path("/proc/net/unix")

# Num RefCount Protocol Flags Type St Inode Path: only a listener has these flags.
_LISTENER = re.compile(rb"\S+ \S+ \S+ 00010000 \S+ \S+ +\S+ @kvoffload/([0-9]{1,10})/([A-Za-z0-9_.:-]{1,64})")
_FORMAT = 1
_BACKLOG = 64
_COPY_TRIES = 100
_RECORDS_A_SEND = 64
_RETRY_S = 1.0
REFUSALS_AT_ONCE = 64
REFUSAL_PAUSE_S = 0.05
"""After so many connections of other users none is accepted for so long: a flood of them costs little."""
_CONNECT_AGAIN_S = 0.001

logger = logging.getLogger(__name__)


class RecordsError(KVOffloadError):
    """Records could not be read. The message is for the user: from where, and why."""


class RecordServer:
    """Gives the records that ``source`` returns to any process of the same user, or of root, on this machine.

    Listens on the abstract socket ``kvoffload/<pid>/<name>``, which lies in no file system and is gone when
    the process is. One daemon thread answers one client at a time, for CLIENT_DEADLINE_S at most, in pieces.
    ``source`` is called there; what it returns may be appended to by other threads meanwhile. Nothing raises:
    if there can be no socket or no thread, one warning says so and nothing is served.
    """

    def __init__(self, source: Callable[[], Sequence[RequestRecord]], name: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._client: socket.socket | None = None
        self._listener: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, name="kvoffload-records", daemon=True)
        address = f"kvoffload/{os.getpid()}/{re.sub('[^A-Za-z0-9_.:-]', '_', name)[:64]}"
        try:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind("\0" + address)
            self._listener.listen(_BACKLOG)
            self._thread.start()
        except Exception as error:
            logger.warning("kvoffload: `kvoffload explain` cannot read this server: socket @%s: %s", address, error)
            if self._listener is not None:
                self._listener.close()

    def close(self) -> None:
        """Ends the thread, also while it waits for a client. May be called twice."""
        with self._lock:
            self._closing.set()
            for sock in (self._listener, self._client):
                if sock is not None:
                    with contextlib.suppress(OSError):
                        # Closing would not wake the thread.
                        sock.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join(CLIENT_DEADLINE_S)

    def _serve(self) -> None:
        assert self._listener is not None
        refusals = 0
        while not self._closing.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                # Out of file descriptors, perhaps: not again at once.
                self._closing.wait(_RETRY_S)
                continue
            if not _is_trusted(client):
                client.close()
                refusals += 1
                if refusals % REFUSALS_AT_ONCE == 0:
                    self._closing.wait(REFUSAL_PAUSE_S)
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
        header = {"kvoffload_records": _FORMAT, "count": len(records)}
        _send(client, [header], deadline)
        # Between the pieces the engine gets the interpreter.
        for i in range(0, len(records), _RECORDS_A_SEND):
            _send(client, [record.to_dict() for record in records[i : i + _RECORDS_A_SEND]], deadline)

    def _copy(self) -> list[RequestRecord]:
        for _ in range(_COPY_TRIES):
            with contextlib.suppress(RuntimeError):  # the deque was appended to meanwhile
                return list(self._source())
        raise RuntimeError("records come too fast to be copied")


def _send(client: socket.socket, values: Iterable[dict[str, Any]], deadline: float) -> None:
    client.settimeout(_left(deadline))
    client.sendall(b"".join(json.dumps(value).encode() + b"\n" for value in values))


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _is_trusted(client: socket.socket) -> bool:
    with contextlib.suppress(OSError):
        return _peer_uid(client) in (0, os.geteuid())
    return False


def _peer_uid(sock: socket.socket) -> int:
    size = struct.calcsize("iII")
    _, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


@dataclass(slots=True)
class Reading:
    """Records from one source, and what was there that is none: how many, and the first few in words."""

    records: list[RequestRecord] = field(default_factory=list)
    malformed: int = 0
    faults: list[str] = field(default_factory=list)

    def take(self, text: str, where: str) -> None:
        """Adds the record that ``text`` begins with, or counts it as malformed."""
        try:
            if len(text) > MAX_LINE_BYTES:
                raise ValueError(f"longer than {MAX_LINE_BYTES:,} characters")
            data, _ = json.JSONDecoder().raw_decode(text)
            if not isinstance(data, dict):
                raise ValueError("not a JSON object")
            self.records.append(RequestRecord.from_dict(data))
        except (ValueError, RecursionError) as error:
            self.malformed += 1
            if len(self.faults) < MAX_FAULTS_TOLD:
                fault = f"not JSON ({error.msg})" if isinstance(error, json.JSONDecodeError) else error
                self.faults.append(f"{where}: {fault}")


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A process whose records can be asked for. ``pid`` is as the server knows it, in its own container."""

    pid: int
    name: str

    def __str__(self) -> str:
        return f"process {self.pid} ({self.name})"


def running_servers() -> list[RunningServer]:
    """Every RecordServer in this network namespace, of whatever user, by process."""
    try:
        lines = PROC_NET_UNIX.read_bytes().split(b"\n")
    except OSError:
        return []
    matches = [match for line in lines if (match := _LISTENER.fullmatch(line))]
    return sorted(
        {RunningServer(int(match[1]), match[2].decode()) for match in matches},
        key=lambda server: (server.pid, server.name),
    )


def read_records(server: RunningServer, timeout_s: float) -> Reading:
    """The records that ``server`` keeps, after ``timeout_s`` seconds at most.

    Raises RecordsError if it does not answer, belongs to a user that this one does not trust, or speaks
    otherwise.
    """
    deadline = time.monotonic() + timeout_s
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            _connect(sock, f"\0kvoffload/{server.pid}/{server.name}", deadline)
            uid = _peer_uid(sock)
            # Anybody may listen under such a name.
            if os.geteuid() not in (0, uid):
                raise RecordsError(f"{server} is of user {uid}: run this as that user or as root")
            answer = b"".join(_pieces(sock, deadline))
    except OSError as error:
        raise RecordsError(f"{server} does not answer: {error}") from error
    if not answer:
        raise RecordsError(f"{server} closes the connection without an answer: try again")
    header, *lines = answer.splitlines()
    try:
        told = json.loads(header)
        count = told["count"] if told["kvoffload_records"] == _FORMAT else None
    except (ValueError, RecursionError, TypeError, KeyError):
        count = None
    if not isinstance(count, int):
        raise RecordsError(f"{server} answers in another format: use the kvoffload that it runs with")
    reading = Reading()
    for number, line in enumerate(lines, 2):
        reading.take(line.decode("utf-8", "replace"), f"{server}, line {number}")
    if count != len(lines):
        raise RecordsError(f"{server} broke off after {len(lines)} of {count} records: try again")
    return reading


def _connect(sock: socket.socket, address: str, deadline: float) -> None:
    """Tries again while others fill the server's queue."""
    while True:
        sock.settimeout(_left(deadline))
        try:
            sock.connect(address)
            return
        except BlockingIOError:
            time.sleep(_CONNECT_AGAIN_S)


def _pieces(sock: socket.socket, deadline: float) -> Iterator[bytes]:
    size = 0
    while True:
        sock.settimeout(_left(deadline))
        piece = sock.recv(1 << 16)
        if not piece:
            return
        size += len(piece)
        if size > MAX_ANSWER_BYTES:
            raise OSError(f"it sends more than {MAX_ANSWER_BYTES:,} bytes")
        yield piece


def read_log(lines: Iterable[bytes], name: str) -> Reading:
    """The records in a log called ``name``: behind LOG_MARKER anywhere in a line, or alone on a line as JSON."""
    reading = Reading()
    for number, line in enumerate(lines, 1):
        text = line.decode("utf-8", "replace")
        _, marker, logged = text.partition(LOG_MARKER + "{")
        if marker:
            reading.take("{" + logged, f"{name}:{number}")
        elif text.startswith("{") and '"req_id"' in text:
            reading.take(text, f"{name}:{number}")
    return reading

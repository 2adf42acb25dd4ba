"""Records served requests to a trace file: their lengths and which blocks they share, but nothing of their text.

``kvoffload.lab`` replays the file. It has a header, ``{"kvoffload_trace": 1, "started": seconds since 1970,
"block_tokens": ..., ...}``, then one JSON object per request, in the order in which they ended. Its fields are those of
Mooncake's traces: ``timestamp``, milliseconds from ``started`` to the request's first lookup; ``input_length`` and
``output_length``, the tokens of prompt and output; ``hash_ids``, 63 bits per whole block of the prompt and then of the
output as far as it was computed; and ``device_tokens``, ``host_tokens``, ``disk_tokens``: where the prompt was found.
The last counts all tiers below host memory. ``session`` and ``tenant`` are there if the request has them: 63 bits of a
hash of each name. ``prefill_tokens`` and ``prefill_ms`` say how many tokens of the prompt were computed in which time,
where the server measured it: beside other requests, for prompts of which nothing was loaded.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import xxhash

from kvoffload.abc import ConfigError, Hints, Keys
from kvoffload.deadlines import FILES_DEADLINE_S, within
from kvoffload.locks import try_to_lock
from kvoffload.observe.records import RequestRecord

MAX_FILE_BYTES = 1 << 30
"""Includes what the file held before."""
MAX_PENDING_BYTES = 16 << 20
FLUSH_EVERY_S = 1.0
CLOSE_DEADLINE_S = 5.0
LOCK_DEADLINE_S = 2.0
"""A killed server keeps the lock until the kernel has freed its memory."""
HEADER = "kvoffload_trace"
VERSION = 1
"""The first field of a header, and its value."""
HINTS = ("drop", "expect_return_s", "p_return", "retain_s")
"""The fields of Hints that are written, beside the session."""
_MODE = 0o600
# O_NONBLOCK because the path might be a pipe.
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC

logger = logging.getLogger(__name__)


class TraceRecorder:
    """Appends a header, which includes ``header``, and one line per request to the file ``path``, which only its owner
    may read.

    A thread writes the lines about once per second. Only the constructor raises: ConfigError if the file cannot be
    opened or another server records to it. Later, if the file is full or cannot be written, or after a bug, one warning
    says so and recording ends.
    """

    def __init__(
        self, path: str, block_tokens: int, header: Mapping[str, Any], clock: Callable[[], float] = time.time
    ) -> None:
        self.path = path
        self._block_tokens = block_tokens
        self._started = clock()
        self._lock = threading.Lock()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._off = False
        self._wake, self._closing = threading.Event(), threading.Event()
        try:
            self._fd = within(FILES_DEADLINE_S, lambda: _open(path))
        except TimeoutError as error:
            raise ConfigError("record_trace", path, str(error.strerror), "look at the mount") from None
        self._bytes = os.fstat(self._fd).st_size
        self._whole = self._bytes
        """Length of the part of the file that is whole lines."""
        self._thread = threading.Thread(target=self._run, name="kvoffload-trace", daemon=True)
        if self._bytes and os.pread(self._fd, 1, self._bytes - 1) != b"\n":
            self._append(b"\n")
        first = {HEADER: VERSION, "started": self._started, "block_tokens": block_tokens, **header}
        self._append(json.dumps(first).encode() + b"\n")
        self._thread.start()

    def add(
        self,
        arrived: float,
        record: RequestRecord,
        keys: Keys,
        num_tokens: int,
        num_computed: int,
        names: Mapping[str, str | None],
        prefill: tuple[int, float] | None = None,
        hints: Hints | None = None,
    ) -> None:
        """Records a request that ended with ``num_tokens`` tokens, of which ``num_computed`` were computed or loaded.

        It arrived at ``arrived``, in seconds since 1970. ``keys`` are the keys of its whole blocks; ``record`` has the
        length of its prompt. ``names``: those of its "session" and "tenant", of which only a hash is written.
        ``prefill``: how many tokens were computed in how many seconds, if measured. ``hints``: what its client knew.
        """
        if self._off or self._closing.is_set():
            return
        try:
            prompt = record.tokens_asked
            whole = max(prompt, min(num_computed, num_tokens)) // self._block_tokens
            digest = xxhash.xxh3_64_intdigest
            line: dict[str, Any] = {
                "timestamp": max(0, round(1e3 * (arrived - self._started))),
                "input_length": prompt,
                "output_length": max(0, num_tokens - prompt),
                "hash_ids": [digest(key) >> 1 for key in keys[:whole]],
                "device_tokens": record.device_tokens,
                "host_tokens": record.host_tokens,
                "disk_tokens": record.disk_tokens,
            }
            line |= {field: name_hash(name) for field, name in names.items() if name is not None}
            if prefill is not None:
                line |= {"prefill_tokens": prefill[0], "prefill_ms": round(1e3 * prefill[1], 3)}
            known = {} if hints is None else {name: getattr(hints, name) for name in HINTS}
            line |= {name: value for name, value in known.items() if value is not None and value is not False}
            self._append(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        except Exception as error:
            self._stop(error)

    def _append(self, line: bytes) -> None:
        with self._lock:
            if self._bytes + len(line) > MAX_FILE_BYTES:
                reason = f"the file is full ({MAX_FILE_BYTES:,} bytes); move it away and start the server again"
            elif self._pending_bytes + len(line) > MAX_PENDING_BYTES:
                reason = f"the disk is too slow: {self._pending_bytes:,} bytes are waiting to be written"
            else:
                self._pending.append(line)
                self._pending_bytes += len(line)
                self._bytes += len(line)
                reason = None
        if reason is None:
            self._wake.set()
        else:
            self._stop(reason)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._wake.wait()
                # Lines that arrive meanwhile are written together.
                self._closing.wait(FLUSH_EVERY_S)
                self._wake.clear()
                self._write()
            self._write()
        except Exception as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._whole)
            self._stop(error)
        finally:
            os.close(self._fd)

    def _write(self) -> None:
        with self._lock:
            data = b"".join(self._pending)
            self._pending.clear()
            self._pending_bytes = 0
        left = memoryview(data)
        while left:
            left = left[os.write(self._fd, left) :]
        self._whole += len(data)

    def _stop(self, reason: object) -> None:
        with self._lock:
            was_off, self._off = self._off, True
        if not was_off:
            logger.warning("kvoffload: recording of the trace %s has ended: %s", self.path, reason)

    def close(self) -> None:
        """Writes the pending lines, for at most CLOSE_DEADLINE_S. May be called twice."""
        self._closing.set()
        self._wake.set()
        self._thread.join(CLOSE_DEADLINE_S)


def name_hash(name: str) -> int:
    """Returns what a trace has in place of the name of a session or tenant."""
    return xxhash.xxh3_64_intdigest(name.encode("utf-8", "backslashreplace")) >> 1


def _open(path: str) -> int:
    """Opens and locks the file, and creates it if needed. Raises ConfigError."""
    named = "record_trace", path
    try:
        fd = os.open(path, _FLAGS, _MODE)
    except OSError as error:
        make = "make it, for this server's user only: install -d -m 700 -o USER DIRECTORY"
        known = {
            errno.ELOOP: ("a symbolic link", "name the file itself"),
            errno.ENOENT: (f"there is no directory {os.path.dirname(path)}", make),
            errno.EISDIR: ("a directory", "name a file in it"),
        }
        other = f"cannot be written: {error.strerror}", "name a file in a folder you own"
        raise ConfigError(*named, *known.get(error.errno or 0, other)) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(*named, "not a regular file", "name another path")
        if status.st_uid != os.geteuid():
            raise ConfigError(*named, f"belongs to user {status.st_uid}", "name a new file in a folder you own")
        if status.st_nlink != 1:
            raise ConfigError(*named, f"has {status.st_nlink} hard links", "name a new file in a folder you own")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(*named, "others may write to it", "remove it, or name a new file in a folder you own")
        if not try_to_lock(fd, LOCK_DEADLINE_S):
            raise ConfigError(*named, "another server records to it", "give each server its own file")
        os.fchmod(fd, _MODE)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError):
            raise ConfigError(*named, str(error.strerror), "name a file on a local disk in a folder you own") from None
        raise
    return fd

"""Stream: commands to a server and its replies, in the protocol RESP2. Values go from and into the caller's memory.

Anything but a complete reply to the command raises Lost, and the connection is then closed: bytes behind it could be
taken for the reply to another command. One deadline holds for everything until the next is set, so a server
that sends a byte now and then gains no time.
"""

from __future__ import annotations

import math
import re
import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvoffload.printable import printable
from kvoffload.tiers.remote.client import StoreError

BUFFER_BYTES = 16 << 10
HEADER_BYTES = 32
"""Bytes received at once where the bytes of a value follow: those behind its header are copied."""
MAX_VALUE_BYTES = 512 << 20
"""The longest string that servers take (``proto-max-bulk-len``)."""
MAX_ITEMS = 1 << 17
"""Parts of one reply, all levels together."""
MAX_DEPTH = 8
MAX_LINE_CHARS = 200
"""Characters of a server's text that a log line has."""
MAX_BUFFERS = 512
"""Buffers of one system call."""
TOLERANCE_S = 0.1
"""A system call may wait for so much longer than until the deadline."""
_SMALL_BYTES = 4096
"""Buffers up to this size are sent together over TLS."""
_NUMBER = re.compile(rb"-?[0-9]{1,18}")

Buffer: TypeAlias = bytes | memoryview


class Lost(StoreError):
    """The connection cannot be used any more."""


class Late(Lost):
    """The deadline has passed."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """A reply that is an error. ``text`` is printable, and cut."""

    code: str
    text: str


Reply: TypeAlias = "bytes | int | ErrorReply | list[Reply] | None"


def command(*words: bytes) -> bytes:
    """Returns a command as it is sent."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


class Stream:
    """A connection. One thread uses it. ``deadline``: of the monotonic clock, until which sending and receiving may
    wait. ``silence_s``: how long each system call may."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self.deadline = deadline
        self.silence_s = math.inf
        self.idle_since = 0.0
        self.is_sound = True
        """Whether the connection may serve further calls."""
        self._socket = connection
        self._is_tls = isinstance(connection, ssl.SSLSocket)
        if not self._is_tls:
            # Timeouts of the kernel instead of Python's, which would ask for readiness before each call.
            connection.settimeout(None)
        self._buffer = bytearray(BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._limits: dict[int, float] = {}
        """The timeouts that the kernel has."""
        self._ending = bytearray(2)
        """The two bytes behind a value."""
        self._num_items = 0
        """Parts of the reply that is received."""
        self._bytes_left = 0
        """Bytes that the reply may still have."""
        self._begin = self._end = 0
        """The part of the buffer that was received and is not used yet."""

    @property
    def has_unread(self) -> bool:
        """Whether bytes of the server wait, or it closed the connection."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        decrypted = self._socket.pending() if isinstance(self._socket, ssl.SSLSocket) else 0
        return self._begin < self._end or bool(decrypted or poller.poll(0))

    def close(self) -> None:
        self._socket.close()

    # Sending.

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Sends the bytes of ``buffers``."""
        views = [memoryview(buffer) for buffer in (_joined(buffers) if self._is_tls else buffers)]
        first = 0
        while first < len(views):
            self._limit(socket.SO_SNDTIMEO)
            try:
                if self._is_tls:
                    sent = self._socket.send(views[first])
                else:
                    sent = self._socket.sendmsg(views[first : first + MAX_BUFFERS])
            except (TimeoutError, BlockingIOError):
                raise Late("it took no more data before the deadline") from None
            except OSError as error:
                raise Lost(f"the connection was lost ({error})") from None
            first = _advance(views, first, sent)

    # Receiving.

    def reply(self, most: int = BUFFER_BYTES) -> Reply:
        """Returns the next reply, which may have ``most`` bytes, all of its parts and their headers together."""
        self._num_items, self._bytes_left = 0, most
        return self._reply(MAX_DEPTH)

    def reply_into(self, buffers: Sequence[memoryview]) -> int | ErrorReply | None:
        """Receives a value into ``buffers``. Returns its size, or None if there is no value. If the size is not theirs,
        they have the first bytes of the value, as far as it goes."""
        line = self._line(HEADER_BYTES)
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            return _error(rest)
        if kind != b"$":
            raise Lost("malformed reply: it does not fit the command")
        size = _size(rest, MAX_VALUE_BYTES)
        if size is None:
            return None
        views, left = [], size
        for buffer in buffers:
            views.append(buffer[:left])
            left -= len(views[-1])
        self._fill(views, ends=not left)
        if left:
            scratch = memoryview(bytearray(min(left, BUFFER_BYTES)))
            for at in range(0, left, BUFFER_BYTES):
                self._fill([scratch[: left - at]], ends=at + BUFFER_BYTES >= left)
        return size

    def _reply(self, depth: int) -> Reply:
        line = self._line(BUFFER_BYTES)
        kind, rest = line[:1], line[1:]
        self._num_items += 1
        self._bytes_left -= len(line) + 2
        if self._num_items > MAX_ITEMS or self._bytes_left < 0:
            raise Lost("malformed reply: longer than any reply to this command")
        if kind == b"+":
            return rest
        if kind == b"-":
            return _error(rest)
        if kind == b":":
            return _number(rest)
        if kind == b"$":
            size = _size(rest, self._bytes_left)
            if size is None:
                return None
            self._bytes_left -= size
            value = bytearray(size)
            self._fill([memoryview(value)])
            return bytes(value)
        if kind == b"*" and depth > 0:
            count = _size(rest, MAX_ITEMS)
            return None if count is None else [self._reply(depth - 1) for _ in range(count)]
        raise Lost("malformed reply: not RESP2")

    def _line(self, at_once: int) -> bytes:
        """Returns the next line, and receives ``at_once`` bytes at most at a time."""
        while (at := self._buffer.find(b"\r\n", self._begin, self._end)) < 0:
            if self._begin:
                rest = self._buffer[self._begin : self._end]
                self._begin, self._end = 0, len(rest)
                self._view[: self._end] = rest
            if self._end == BUFFER_BYTES:
                raise Lost("malformed reply: a line without an end")
            self._end += self._receive([self._view[self._end : self._end + at_once]])
        line = bytes(self._view[self._begin : at])
        self._begin = at + 2
        return line

    def _fill(self, buffers: Sequence[memoryview], ends: bool = True) -> None:
        """Receives the bytes of ``buffers``, and the line end behind them if the value ``ends`` there."""
        views = [view for view in buffers if len(view)]
        if ends:
            views.append(memoryview(self._ending))
        first = 0
        while first < len(views) and self._begin < self._end:
            part = self._view[self._begin : min(self._end, self._begin + len(views[first]))]
            views[first][: len(part)] = part
            self._begin += len(part)
            first = _advance(views, first, len(part))
        while first < len(views):
            first = _advance(views, first, self._receive(views[first:], socket.MSG_WAITALL))
        if ends and self._ending != b"\r\n":
            raise Lost("malformed reply: a value of another size than announced")

    def _receive(self, views: Sequence[memoryview], flags: int = 0) -> int:
        """Receives at least one byte. Returns how many."""
        self._limit(socket.SO_RCVTIMEO)
        try:
            tls = self._is_tls
            count = self._socket.recv_into(views[0]) if tls else self._socket.recvmsg_into(views, 0, flags)[0]
        except (TimeoutError, BlockingIOError):
            raise Late("no answer before the deadline") from None
        except OSError as error:
            raise Lost(f"the connection was lost ({error})") from None
        if not count:
            raise Lost("the server closed the connection")
        return count

    def _limit(self, option: int) -> None:
        """Limits the next system call to the time that is left."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise Late("no answer before the deadline")
        left = min(left, self.silence_s)
        if self._is_tls:
            self._socket.settimeout(left)
        elif abs(self._limits.get(option, math.inf) - left) > TOLERANCE_S:
            # Zero would be no limit.
            seconds = max(left, 0.001)
            value = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, option, value)
            self._limits[option] = left


def _advance(views: list[memoryview], first: int, count: int) -> int:
    """Cuts ``count`` bytes off the views from ``first`` on. Returns the index of the first that has bytes left."""
    while first < len(views) and count >= len(views[first]):
        count -= len(views[first])
        first += 1
    if count:
        views[first] = views[first][count:]
    return first


def _joined(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Returns the same bytes, small buffers that follow each other joined: TLS makes a record of each."""
    joined: list[Buffer] = []
    small = bytearray()
    for buffer in buffers:
        if len(buffer) <= _SMALL_BYTES:
            small += buffer
            continue
        joined += [bytes(small), buffer] if small else [buffer]
        small.clear()
    return [*joined, bytes(small)] if small else joined


def _error(line: bytes) -> ErrorReply:
    text = printable(line, MAX_LINE_CHARS)
    return ErrorReply(text.partition(" ")[0], text)


def _number(digits: bytes) -> int:
    if not _NUMBER.fullmatch(digits):
        raise Lost("malformed reply: not a number")
    return int(digits)


def _size(digits: bytes, most: int) -> int | None:
    """Returns the size of a value or an array, or None if there is none."""
    size = _number(digits)
    if size == -1:
        return None
    if not 0 <= size <= most:
        raise Lost(f"malformed reply: {size} bytes or items announced")
    return size

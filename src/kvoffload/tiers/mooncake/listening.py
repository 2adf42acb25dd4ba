"""Where Mooncake's client takes connections: it listens on all addresses of the machine, and has no setting for that.

A filter on its listening sockets drops what is sent to other addresses (Linux, SO_ATTACH_FILTER: classic BPF, which
later connections of the socket inherit).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
from collections.abc import Iterator
from functools import partial

_SO_ATTACH_FILTER = 26
_IP = (socket.AF_INET, socket.AF_INET6)
_NETWORK_HEADER = 0xFFF00000
_LOAD_BYTE, _LOAD_WORD, _AND, _IF_EQUAL, _RETURN = 0x30, 0x20, 0x54, 0x15, 0x06


@contextlib.contextmanager
def listening_only_on(host: str) -> Iterator[None]:
    """Makes the TCP sockets with which this process begins to listen meanwhile take only what is sent to the address
    ``host``. Does nothing if that is a name, which others may resolve otherwise, or not this machine's own, as behind
    NAT. Raises OSError."""
    before = {os.fstat(each.fileno()).st_ino for each in _listening()}
    yield
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        address = socket.inet_pton(family, host)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((host, 0))
    except OSError:
        return
    program = b"".join(struct.pack("=HBBI", *each) for each in _program(address))
    code = ctypes.create_string_buffer(program, len(program))
    program_at = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    for each in _listening():
        if os.fstat(each.fileno()).st_ino not in before:
            each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program_at)


def _program(address: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yields code, jumps and operand of each instruction."""
    # The version is in the first half of the first byte; the address of the destination is the last in IPv6's header.
    version, at = (0x40, 16) if len(address) == 4 else (0x60, 24)
    words = struct.unpack(f">{len(address) // 4}I", address)
    drop = 2 * len(words) + 1
    yield _LOAD_BYTE, 0, 0, _NETWORK_HEADER
    yield _AND, 0, 0, 0xF0
    yield _IF_EQUAL, 0, drop, version
    for i, word in enumerate(words):
        yield _LOAD_WORD, 0, 0, _NETWORK_HEADER + at + 4 * i
        yield _IF_EQUAL, 0, drop - 2 * (i + 1), word
    yield _RETURN, 0, 0, 0xFFFFFFFF
    yield _RETURN, 0, 0, 0


def _listening() -> Iterator[socket.socket]:
    """Yields copies of the listening TCP sockets of this process, each open until the next."""
    for name in os.listdir("/proc/self/fd"):
        # fstat fails for the closed descriptor of the listing itself. fromfd leaves its copy of a file open.
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                with socket.fromfd(int(name), socket.AF_INET, socket.SOCK_STREAM) as copy:
                    option = partial(copy.getsockopt, socket.SOL_SOCKET)
                    if option(socket.SO_ACCEPTCONN) and option(socket.SO_DOMAIN) in _IP:
                        yield copy

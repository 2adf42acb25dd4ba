"""Two servers share a directory on two real NFS mounts: each machine has caches and locks of its own."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvoffload.abc import TierError
from tests.tiers.disk.rig import key
from tests.tiers.shared_dir.rig import Server

MOUNTS = [os.environ.get(f"KVOFFLOAD_NFS_{name}", "") for name in "AB"]
"""Mounts of one directory by two NFS clients, see tools/nfs_guest.py."""
NUM_BLOCKS = 40
PATIENCE_S = 60.0
Start = Callable[[int], Server]

pytestmark = pytest.mark.skipif(
    not all(MOUNTS), reason="needs two NFS mounts; tools/nfs_guest.py makes them, see tests/tools/test_nfs_guest.py"
)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts servers on one directory, which the mounts have in turn, each as on a machine of its own."""
    folder, servers = uuid.uuid4().hex, list[Server]()

    def run(number: int) -> Server:
        path = Path(MOUNTS[number % 2]) / folder
        servers.append(Server(path, NUM_BLOCKS, boot=f"boot-{number}", time=time.time, seed=number))
        return servers[-1]

    yield run
    for server in servers:
        server.tier.close()


def wait_until_found(server: Server, *names: int) -> None:
    end = time.monotonic() + PATIENCE_S
    while server.finds(*names) != list(names):
        assert time.monotonic() < end, "they are not found in time"
        time.sleep(0.01)
        server.background()


def test_real_servers_have_seats_of_their_own_and_read_each_others_blocks(start: Start) -> None:
    first, second = start(0), start(1)
    assert {first.tier.seat.name, second.tier.seat.name} == {"writer-0", "writer-1"}
    mine, others = range(10), range(10, 20)
    assert first.write(*mine) == list(mine)
    assert second.write(*others) == list(others)
    wait_until_found(first, *others)
    wait_until_found(second, *mine)
    assert first.read(*others) == dict.fromkeys(others)
    assert second.read(*mine) == dict.fromkeys(mine)
    # A block that another one has is not stored again.
    assert second.write(*mine) == []


def test_real_blocks_that_were_replaced_are_gone_and_not_wrong(start: Start) -> None:
    first, second = start(0), start(1)
    first.write(*range(8))
    wait_until_found(second, *range(8))
    first.tier.delete([key(number) for number in range(8)])
    # New blocks take the slots, before the second server has noticed.
    first.write(*range(8, NUM_BLOCKS))
    assert set(second.read(*range(8)).values()) <= {None, TierError.GONE}


def test_real_seats_are_used_again_after_an_end_in_order(start: Start) -> None:
    first, second = start(0), start(1)
    first.write(*range(10))
    first.tier.close()
    third = start(2)
    assert third.tier.seat.name == first.tier.seat.name != second.tier.seat.name
    assert third.finds(*range(10)) == list(range(10))

"""Servers that share a directory of a network file system break no law, and each bug planted in them breaks one."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from kvoffload.tiers.disk.start import remove_blocks
from kvoffload.tiers.disk.storage import Storage
from kvoffload.tiers.shared_dir import reads, seats
from kvoffload.tiers.shared_dir import writer as writer_module
from kvoffload.tiers.shared_dir.seats import Seat, Sighting, seat_names
from tests.clock import Clock
from tests.scale import scaled
from tests.sim import shared_folder
from tests.sim.engine import WrongBytes
from tests.sim.life import Patch
from tests.sim.planted import Bug, bugs, check_found
from tests.sim.servers import DeletedOthers, SharedMedium, SharingServer, simulate_servers
from tests.sim.shared_folder import SeatTaken, SharedFolderMedium
from tests.sim.shared_storage import Mount, NfsServer
from tests.sim.simulation import run_each
from tests.tiers.shared_dir.rig import Server

SEEDS = scaled(12)
PLANTED_SEEDS = 300


@pytest.fixture(scope="module")
def counts() -> Counter[str]:
    # In the first seeds few servers live at the same time.
    report = run_each(range(8, 8 + SEEDS), lambda seed: simulate_servers(SharedFolderMedium, seed))
    assert report.failures == {}
    return report.counts


def test_no_law_is_broken_and_servers_find_blocks_of_others(counts: Counter[str]) -> None:
    assert counts["simulations"] == SEEDS
    assert counts["servers that read blocks of others"] > SEEDS / 4
    assert counts["blocks found again"] > 0
    assert counts["seats that came back"] > SEEDS / 10
    assert counts["shared writes: ok"] > SEEDS


def test_faults_happen(counts: Counter[str]) -> None:
    for fault in ("stalls", "failures"):
        assert counts[f"faults: {fault}"] > 0, f"never injected: {fault}"


def test_a_seed_replays_its_simulation() -> None:
    assert simulate_servers(SharedFolderMedium, 1) == simulate_servers(SharedFolderMedium, 1)


# Planted bugs.


class _EqualToAll:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class SmallMedium(SharedFolderMedium):
    """Its blocks are overwritten all the time."""

    def __init__(self, seed: int, is_calm: bool) -> None:
        super().__init__(seed, is_calm=True)
        self.num_blocks, self.slab_blocks = 3, 2


def foreign_blocks_are_not_verified(patch: pytest.MonkeyPatch) -> type[SharedMedium]:
    patch.setattr(reads, "payload_checksum", lambda *arguments: _EqualToAll())
    return SmallMedium


def living_seats_are_adopted(patch: pytest.MonkeyPatch) -> type[SharedMedium]:
    patch.setattr(NfsServer, "take_lock", lambda server, inode, client: True)
    patch.setattr(seats, "SILENT_S", -1e9)
    return SharedFolderMedium


def living_seats_are_emptied(patch: pytest.MonkeyPatch) -> type[SharedMedium]:
    class EmptiesAll:
        """Takes every other seat for one whose server is gone."""

        def __init__(self, root: Storage, seat: Seat, gone_after_s: float, clock: object) -> None:
            self.root, self.seat = root, seat

        def look_around(self) -> None:
            for name in seat_names(self.root):
                if name != self.seat.name:
                    remove_blocks(self.root.child(name))

    patch.setattr(writer_module, "GoneSeats", EmptiesAll)
    return SharedFolderMedium


def a_reset_deletes(patch: pytest.MonkeyPatch) -> type[SharedMedium]:
    """A reset removes the blocks of all seats."""
    start = SharingServer.start

    def start_with_the_bug(server: SharingServer, others: Patch[SharingServer] | None = None) -> None:
        start(server, others)
        tier, connection = server.tier, server.connection
        if tier is None or not isinstance(connection, shared_folder.FolderConnection):
            return
        reset, root = tier.reset, connection.client.storage()

        def remove_all() -> None:
            with suppress(OSError):
                for name in seat_names(root):
                    remove_blocks(root.child(name))

        def resetting() -> None:
            reset()
            server.executor.submit_write(remove_all)

        tier.reset = resetting  # type: ignore[method-assign]

    patch.setattr(SharingServer, "start", start_with_the_bug)
    return SharedFolderMedium


BUGS: dict[Bug, tuple[type[AssertionError], int]] = {
    foreign_blocks_are_not_verified: (WrongBytes, 56),
    living_seats_are_adopted: (SeatTaken, 0),
    living_seats_are_emptied: (DeletedOthers, 0),
    a_reset_deletes: (DeletedOthers, 1),
}
"""The law that finds each bug, and a seed that does."""


@pytest.mark.parametrize("bug", bugs(BUGS, slow={a_reset_deletes}))
def test_a_planted_bug_is_found(bug: Bug) -> None:
    law, hint = BUGS[bug]
    check_found(bug, [law], hint, PLANTED_SEEDS)


# Two servers, by hand.


class Pair:
    """Two machines, by hand."""

    def __init__(self) -> None:
        self.clock = Clock(1e6)
        self.server = NfsServer(1 << 30, clock=self.clock)
        self.started: list[Server] = []

    def start(self, number: int, skew_s: float, boot: str = "") -> Server:
        client = self.server.connect(Mount(skew_s=skew_s, entries_s=0.0), number)
        self.started.append(
            Server(
                Path(),
                boot=boot or f"boot-{number}",
                time=self.clock,
                storage=client.storage,
                seed=number,
                gone_after_s=100.0,
                wall_clock=client.wall_clock,
            )
        )
        return self.started[-1]

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.clock.now += 1.0
            for server in self.started:
                server.background()
                server.tier.poll()


def seats_of_living_servers(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[int]]:
    """Runs a server whose clock is days behind, then another one, on mounts whose locks exclude no one. Returns their
    seats, the blocks that the first one has, and those that the second one knows of."""
    monkeypatch.setattr(NfsServer, "take_lock", lambda server, inode, client: True)
    pair = Pair()
    first = pair.start(1, -1e6)
    first.write(1)
    pair.run(5.0)
    second = pair.start(2, 0.0)
    pair.run(300.0)
    blocks = [first.tier.own.catalog.num_blocks, len(second.tier.others.blocks)]
    return [first.tier.seat.name, second.tier.seat.name], blocks


def test_a_server_whose_clock_is_wrong_keeps_its_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    names, blocks = seats_of_living_servers(monkeypatch)
    assert names == ["writer-0", "writer-1"]
    assert blocks == [1, 1]


def test_a_heartbeat_judged_by_its_owners_clock_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    look = seats.look

    def planted(seat: object) -> Sighting | None:
        seen = look(seat)  # type: ignore[arg-type]
        heartbeat = seen.heartbeat if seen is not None else None
        return seen if seen is None or heartbeat is None else Sighting(seen.raw, heartbeat.time)

    monkeypatch.setattr(seats, "look", planted)
    names, _ = seats_of_living_servers(monkeypatch)
    # The first server has lost its seat to the second one.
    assert names == ["writer-0", "writer-0"]

"""Retention in host memory and on disk together: where it is, what outlives floods and restarts, and its quotas."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvoffload.abc import Hints, OffloadKey, Retained, RetainRefusal, States
from kvoffload.abc.tier import HIT
from kvoffload.cache.admission import ReuseFilter
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.slots import HostBackend
from kvoffload.cache.tenants import OTHER, Shares, TenantConfig, Tenants
from kvoffload.tiers.disk.tier import DiskTier
from kvoffload.tiers.late import LateTier
from tests.connector.rig import TOKENS, FakeRequest, Rig, prompt, start_together
from tests.connector.server_rig import HOST_BLOCKS, SLOT, TierServer
from tests.scale import scaled

NAMES = ("a", "b", "other")
RETAIN = {"a": {"host": 8, "disk": 24}, "b": {"disk": 12}, "other": {}}


pytestmark = pytest.mark.usefixtures("quiet")


class Server(TierServer):
    """With a disk of about 100 blocks, on which it restarts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.start()

    def start(self) -> None:
        tenants = {name: {"retain": {t: n * SLOT for t, n in retain.items()}} for name, retain in RETAIN.items()}
        tiers = [{"kind": "disk", "dir": str(self.path / "disk"), "bytes": 1 << 20}]
        super().__init__(tiers, tenants, load_only_if_faster=False)
        tier = self.manager.tiers[0].tier._tier
        assert isinstance(tier, LateTier)
        disk = tier.join()
        assert isinstance(disk, DiskTier)
        self.disk = disk

    def restart(self) -> None:
        self.settle()
        self.manager.shutdown()
        self.start()

    def keys(self, tenant: str, conversation: int, length: int) -> list[OffloadKey]:
        """Conversations of a tenant share their first 2 blocks."""
        return self.keys_of(tenant, (f"{0 if i < 2 else conversation:016}{i:016}".encode() for i in range(length)))

    def flood(self, tenant: str, times: int = 6, is_written: bool = False) -> None:
        """``is_written``: the disk gets all of it, however slow it is."""
        for i in range(times * HOST_BLOCKS // 8):
            self.serve(self.keys(tenant, 10_000 + self.num_requests + i, 10)[2:])
            if is_written:
                self.settle()

    def on_disk(self, keys: list[OffloadKey]) -> int:
        return int(np.count_nonzero(self.disk.contains(keys) == HIT))

    def states(self, tier: str, keys: list[OffloadKey]) -> States:
        return self.manager.host.table.states(keys) if tier == "host" else self.disk.contains(keys)

    def charged(self) -> dict[str, list[int]]:
        return {
            "host": self.manager.host.retention.tenants.num_charged,
            "disk": self.disk.catalog.retention.tenants.num_charged,
        }

    def check(self) -> None:
        self.manager.check_integrity()
        for tier, counts in self.charged().items():
            for name, n in zip(NAMES, counts, strict=True):
                assert n <= RETAIN[name].get(tier, 0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.manager.shutdown()


def retain(session: int | None = None, seconds: float = 3600.0) -> Hints:
    return Hints(session, retain_s=seconds)


def test_the_first_tier_with_room_for_all_of_it_retains_it(server: Server) -> None:
    def answer(keys: list[OffloadKey], session: int) -> Retained | None:
        # So that none of it is still to be written.
        server.serve(keys)
        server.settle()
        return server.serve(keys, retain(session))

    assert answer(server.keys("a", 1, 6), 2) == Retained(None, "host", 6)
    assert answer(server.keys("a", 2, 6), 3) == Retained(None, "disk", 6)
    assert answer(server.keys("b", 1, 4), 4) == Retained(None, "disk", 4)
    assert answer(server.keys("b", 2, 12), 5) == Retained(RetainRefusal.OVER_QUOTA)
    assert answer(server.keys("other", 1, 4), 6) == Retained(RetainRefusal.NO_QUOTA)
    for name in NAMES:
        server.flood(name, is_written=True)
    assert server.manager.host.lookup(server.keys("a", 1, 6)) == 6
    assert server.on_disk(server.keys("a", 2, 6)) == 6
    assert server.on_disk(server.keys("b", 1, 4)) == 4
    server.check()


def test_what_a_session_has_in_several_tiers_ends_together(server: Server) -> None:
    server.serve(server.keys("a", 1, 8), retain(2))
    assert server.charged() == {"host": [8, 0, 0], "disk": [0, 0, 0]}
    server.settle()
    server.serve(server.keys("a", 1, 10), retain(2))
    assert server.charged() == {"host": [8, 0, 0], "disk": [10, 0, 0]}
    server.settle()
    server.serve(server.keys("a", 1, 8), retain(2))
    assert server.charged() == {"host": [8, 0, 0], "disk": [10, 0, 0]}
    server.serve(server.keys("a", 1, 8), retain(2, 0.0))
    assert server.charged() == {"host": [0, 0, 0], "disk": [0, 0, 0]}


def leading(flags: Iterable[bool]) -> int:
    """Returns the number of leading True values."""
    return sum(1 for _ in itertools.takewhile(bool, flags))


def test_random_calls_exceed_no_quota_and_lose_nothing_that_was_promised(tmp_path: Path) -> None:
    """Hints, drops, retentions, tenants, resets and restarts. A promise holds for what the tier had when it was made,
    up to a block that was dropped: what is behind it cannot be found. A restart ends those of the host, and after a
    reset those of the disk: its blocks may be of other weights."""
    rng, server, was_reset = random.Random(3), Server(tmp_path), False
    promised: dict[tuple[int, int], tuple[str, list[OffloadKey]]] = {}
    """By step and session."""
    for step in range(1500 * scaled(1)):
        keys = server.keys(rng.choice(NAMES), rng.randrange(1, 40), rng.randrange(1, 14))
        session = rng.randrange(2, 9)
        match rng.randrange(40):
            case 0:
                server.manager.drop(dropped := rng.sample(keys, len(keys) // 2))
                for _, of in promised.values():
                    del of[leading(key not in dropped for key in of) :]
            case 1 if rng.random() < 0.1:
                server.manager.reset()
                promised.clear()
                was_reset = True
            case 2 if rng.random() < 0.3:
                server.restart()
                on_disk = [entry for entry in promised.items() if entry[1][0] == "disk" and not was_reset]
                was_reset = False
                # No later request can end them.
                promised = {(before, 0): entry for (before, _), entry in on_disk}
            case 3 | 4 | 5:
                session += 100 * NAMES.index(next(n for n in NAMES if keys[0].startswith(server.names.of(n).namespace)))
                hints = Hints(
                    session, rng.random() < 0.1, rng.choice([None, 0.0, 1e6]), None, rng.choice([0.0, 3600.0])
                )
                answer = server.serve(keys, hints)
                server.settle()
                if hints.drop or not hints.retain_s:
                    promised = {name: entry for name, entry in promised.items() if name[1] != session}
                elif answer is not None and answer.refusal is None and answer.tier is not None:
                    held = server.states(answer.tier, keys)
                    promised[step, session] = answer.tier, keys[: leading(state == HIT for state in held)]
            case _:
                server.serve(keys, rng.choice([None, None, Hints(3, False, 1e6), Hints(1104, True)]))
        for tier, of in promised.values():
            assert (server.states(tier, of) == HIT).all(), f"step {step}: a promise of {tier} is broken"
        if step % 25 == 0:
            server.settle()
            server.check()
    assert promised
    server.manager.shutdown()


# The scheduler half.

RETAINED = {"kvoffload": {"retain_s": 3600}}


def half_with(num_blocks: int, admission: ReuseFilter | None = None) -> Rig:
    """A scheduler half whose requests may have half of the host's blocks retained."""
    shares = Shares((OTHER,), {}, (0,), (num_blocks,), num_blocks, (num_blocks // 2,))
    manager = PolicyOffloadingManager(
        HostBackend(TOKENS, num_blocks), make_policy("lru", num_blocks, shares), admission=admission
    )
    return Rig(manager=manager, options={"tenants": Tenants(b"", [TenantConfig(OTHER)])})


def test_requests_that_decode_together_are_retained_whatever_the_filter_says() -> None:
    rig = half_with(64, ReuseFilter(2))
    requests = [FakeRequest(f"r{i}", prompt(8, start=100 * i), RETAINED) for i in range(2)]
    rig.report(*start_together(rig, *requests).stores)
    for i in range(9):
        for request in requests:
            request.tokens.append(1000 + request.num_tokens)
        more = {request.request_id: [12 + 10 * n + i // 4] for n, request in enumerate(requests)} if i % 4 == 0 else {}
        rig.report(*rig.step(dict.fromkeys(requests, 1), more=more).stores)
    for request in requests:
        _, answer = rig.half.request_finished(request)
        assert answer is not None
        assert answer["kvoffload"]["retained_tokens"] == 16
    rig.report(*rig.step().stores)
    assert rig.manager.retention.tenants.num_charged == [8]
    assert rig.manager.retention.num_absent == 0


def test_what_has_left_host_memory_meanwhile_is_stored_again() -> None:
    rig = half_with(16)
    request = FakeRequest("r", prompt(16), RETAINED)
    rig.report(*rig.start(request).stores)
    for i in range(3):
        other = FakeRequest(f"o{i}", prompt(32, start=1000 * (i + 1)))
        rig.report(*rig.start(other).stores)
        rig.end(other)
    assert rig.manager.lookup(rig.half.requests["r"].blocks.keys[0]) == 0
    keys = list(rig.half.requests["r"].blocks.keys[0])
    rig.report(*rig.end(request).stores)
    assert rig.manager.lookup(keys) == len(keys) == 4
    assert rig.manager.retention.tenants.num_charged == [4]
    assert rig.manager.retention.num_absent == 0

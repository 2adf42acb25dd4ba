"""Remote tiers on a store in a folder, with a real process of its client."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from kvoffload.abc import ByteArray, OffloadKey, TierError, TierResult
from kvoffload.abc.tier import HIT, MISS, RETRY
from kvoffload.host.pool import HostPool
from kvoffload.tiers.remote.messages import Response, Setup
from kvoffload.tiers.remote.process import ProcessChannel
from kvoffload.tiers.remote.tier import RemoteTier
from tests.clock import RealClock
from tests.tiers.remote.folder_store import FolderStore

CLIENT = "tests.tiers.remote.folder_store:connect"
FINGERPRINT = "5e" * 32
DEADLINE_S = 60.0
STORE_DEADLINE_S = 90.0


def pause(pid: int) -> None:
    """Stops a child process. It answers nothing any more when this returns."""
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)


class ShiftedChannel(ProcessChannel):
    """A channel whose responses have times of ``clock``, as all processes of a machine have the same clock."""

    def __init__(self, setup: Setup, name: str, clock: RealClock) -> None:
        super().__init__(setup, name)
        self._clock = clock

    def poll(self) -> list[Response]:
        shift = self._clock.shift
        return [replace(each, begun=each.begun + shift, ended=each.ended + shift) for each in super().poll()]


@dataclass
class Server:
    """A tier with pools of its own."""

    store: FolderStore
    num_slots: int = 32
    slot_bytes: Sequence[int] = (4096, 8192)
    fingerprint: str = FINGERPRINT
    identity: dict[str, str] = field(default_factory=dict)
    clock: RealClock = field(default_factory=RealClock)
    hmac_key_file: str | None = None
    client: str = CLIENT

    def __post_init__(self) -> None:
        self.hosts = [HostPool(self.num_slots, nbytes) for nbytes in self.slot_bytes]
        handles = tuple(host.handle() for host in self.hosts)
        settings, identity, key_file = self.store.settings(), self.identity, self.hmac_key_file
        setup = Setup(
            self.client,
            settings,
            handles,
            self.num_slots,
            self.fingerprint,
            "kv",
            identity,
            key_file,
        )
        self.channel = ShiftedChannel(setup, "folder", self.clock)
        self.tier = RemoteTier(self.channel, sum(self.slot_bytes), name="folder", clock=self.clock, random=lambda: 0.5)

    @property
    def pools(self) -> list[ByteArray]:
        return [host.data for host in self.hosts]

    def close(self) -> None:
        self.tier.close()
        for host in self.hosts:
            host.close()

    def until(self, condition: Callable[[], bool], what: str) -> list[TierResult]:
        """Polls until ``condition`` holds. Returns the results."""
        results = []
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, what
            self.tier.wait(0.01)
            results += self.tier.poll()
        return results

    def connect(self) -> None:
        self.until(lambda: self.tier.stats().is_connected, "the tier never reached the store")

    def finish(self, taken: Sequence[OffloadKey]) -> dict[OffloadKey, TierResult]:
        results: dict[OffloadKey, TierResult] = {}
        deadline = time.monotonic() + DEADLINE_S
        while len(results) < len(taken):
            assert time.monotonic() < deadline, "transfers never ended"
            self.tier.wait(0.01)
            results |= {result.key: result for result in self.tier.poll()}
        return results

    def states(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Returns the states of ``keys`` once they are known."""
        self.until(lambda: 3 not in self.tier.contains(keys).tolist(), "lookups were never answered")
        states: list[int] = self.tier.contains(keys).tolist()
        return states

    def fill(self, keys: Sequence[OffloadKey]) -> None:
        """Puts bytes that depend on the key into slots 0, 1 and so on."""
        for slot, key in enumerate(keys):
            for rank, pool in enumerate(self.pools):
                pool[slot] = content(key, rank, pool.shape[1])

    def write(self, keys: Sequence[OffloadKey]) -> dict[OffloadKey, TierResult]:
        self.fill(keys)
        taken = self.tier.write(keys, np.arange(len(keys)))
        return self.finish(taken)

    def read(self, keys: Sequence[OffloadKey], first_slot: int = 16) -> dict[OffloadKey, TierResult]:
        taken = self.tier.read(keys, np.arange(first_slot, first_slot + len(keys)))
        return self.finish(taken)

    def has(self, key: OffloadKey, slot: int) -> bool:
        return all((pool[slot] == content(key, rank, pool.shape[1])).all() for rank, pool in enumerate(self.pools))


class StoreServer:
    """The tier of one server on a real store. ``pools``: those that it has."""

    def __init__(self, tier: RemoteTier, pools: Sequence[ByteArray]) -> None:
        self.tier = tier
        self.pools = pools

    def close(self) -> None:
        self.tier.close()

    def poll(self) -> list[TierResult]:
        self.tier.wait(0.01)
        return self.tier.poll()

    def connect(self) -> None:
        deadline = time.monotonic() + STORE_DEADLINE_S
        while not self.tier.stats().is_connected:
            assert time.monotonic() < deadline, "the tier never reached the store"
            self.poll()

    def states(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Returns the states of ``keys`` once they are known."""
        deadline = time.monotonic() + STORE_DEADLINE_S
        while RETRY in (states := list(self.tier.contains(keys).tolist())):
            assert time.monotonic() < deadline, "lookups were never answered"
            self.poll()
        return states

    def move(self, keys: Sequence[OffloadKey], is_read: bool) -> dict[OffloadKey, TierResult]:
        """Reads ``keys`` into the upper half of the slots, or writes them from the lower one. Asserts that what was
        read is right."""
        half = len(self.pools[0]) // 2
        slots = np.arange(len(keys)) + half * is_read
        for key, slot in zip(keys, slots.tolist(), strict=True):
            for rank, pool in enumerate(self.pools):
                pool[slot] = 0 if is_read else content(key, rank, pool.shape[1])
        taken = (self.tier.read if is_read else self.tier.write)(keys, slots)
        results = {result.key: result for result in self.finish(taken)}
        for i, key in enumerate(keys):
            if is_read and key in results and results[key].ok:
                assert self.has(key, half + i), "a read that has succeeded has other bytes"
        return results

    def finish(self, taken: Sequence[OffloadKey]) -> list[TierResult]:
        """Returns the results of a transfer."""
        results: list[TierResult] = []
        deadline = time.monotonic() + STORE_DEADLINE_S
        while len(results) < len(taken):
            assert time.monotonic() < deadline, "transfers never ended"
            results += self.poll()
        return results

    def has(self, key: OffloadKey, slot: int) -> bool:
        return all((pool[slot] == content(key, rank, pool.shape[1])).all() for rank, pool in enumerate(self.pools))

    def write(self, keys: Sequence[OffloadKey]) -> dict[OffloadKey, TierResult]:
        return self.move(keys, is_read=False)

    def read(self, keys: Sequence[OffloadKey]) -> dict[OffloadKey, TierResult]:
        return self.move(keys, is_read=True)

    def errors(self, keys: Sequence[OffloadKey]) -> list[TierError | None]:
        """Reads ``keys``. Returns the error of each."""
        results = self.read(keys)
        return [results[key].error for key in keys]

    def reads_all(self, keys: Sequence[OffloadKey]) -> bool:
        results = self.read(keys)
        return len(results) == len(keys) and all(each.ok for each in results.values())

    def works_again(self, keys: Sequence[OffloadKey]) -> None:
        """Asserts that in the end, without a restart of the server, ``keys`` are written and read."""
        deadline = time.monotonic() + STORE_DEADLINE_S
        while time.monotonic() < deadline:
            self.write([key for key, state in zip(keys, self.states(keys), strict=True) if state == MISS])
            if self.states(keys) == [HIT] * len(keys) and self.reads_all(keys):
                return
            until = time.monotonic() + 0.2
            while time.monotonic() < until:
                self.poll()
        raise AssertionError("the tier never worked again")


def content(key: OffloadKey, rank: int, nbytes: int) -> ByteArray:
    return np.random.default_rng([rank, *key]).integers(0, 256, nbytes, dtype=np.uint8)


def store_in(folder: Path) -> FolderStore:
    folder.mkdir(exist_ok=True)
    return FolderStore(folder)

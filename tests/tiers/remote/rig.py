"""Servers with a remote tier: on any store, and on one in a folder, with a real process of its client."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvoffload.abc import ByteArray, KVGroup, OffloadKey, Tier, TierError, TierResult
from kvoffload.abc.tier import HIT, MISS, RETRY
from kvoffload.host.pool import HostPool
from kvoffload.tiers.config import TierContext
from kvoffload.tiers.limited_log import LimitedLog
from kvoffload.tiers.remote.client import StoreClient
from kvoffload.tiers.remote.messages import Response, Setup
from kvoffload.tiers.remote.process import ChildProcess
from kvoffload.tiers.remote.record import ValueFormat
from kvoffload.tiers.remote.tier import RemoteTier
from kvoffload.tiers.remote.worker import StoreWorker, ValueMemory
from tests.clock import RealClock
from tests.tiers.made import closed_later
from tests.tiers.remote.folder_store import FolderStore
from tests.tiers.remote.memory_store import DirectProcess, SteppedProcess

CLIENT = "tests.tiers.remote.folder_store:connect"
FINGERPRINT = "5e" * 32
DEADLINE_S = 90.0


def pause(pid: int) -> None:
    """Stops a child process. It answers nothing any more when this returns."""
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)


def eventually(condition: Callable[[], object], what: str = "it never came about") -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def tier_here(
    client: StoreClient,
    pools: Sequence[ByteArray],
    values: ValueFormat,
    name: str = "store",
    process_class: type[SteppedProcess] = DirectProcess,
    has_rows: bool = False,
) -> RemoteTier:
    """Returns a tier whose client runs in this process, when the tier is polled."""
    worker = StoreWorker(client, ValueMemory(pools, has_rows), values)
    tier = RemoteTier(process_class(worker).start, sum(pool.shape[1] for pool in pools), name=name)
    tier.poll()
    return tier


class StoreServer:
    """A server with host pools of ``slot_bytes`` and the tier that ``open_tier`` opens on a real store."""

    def __init__(
        self,
        open_tier: Callable[[TierContext], Tier],
        slot_bytes: Sequence[int],
        num_slots: int = 64,
        fingerprint: str = FINGERPRINT,
    ) -> None:
        self.hosts = [HostPool(num_slots, nbytes) for nbytes in slot_bytes]
        self.pools = [host.data for host in self.hosts]
        handles = [host.handle() for host in self.hosts]
        tier = open_tier(TierContext(self.pools, fingerprint, handles, groups=[KVGroup(16)]))
        assert isinstance(tier, RemoteTier)
        self.tier = tier
        closed_later(self)

    def close(self) -> None:
        self.tier.close()
        while self.hosts:
            self.hosts.pop().close()

    def poll(self) -> list[TierResult]:
        self.tier.wait(0.01)
        return self.tier.poll()

    def until(self, condition: Callable[[], bool], what: str) -> list[TierResult]:
        """Polls until ``condition`` holds. Returns the results."""
        results = []
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, what
            results += self.poll()
        return results

    def connect(self) -> None:
        self.until(lambda: self.tier.stats().is_connected, "the tier never reached the store")

    def states(self, keys: Sequence[OffloadKey]) -> list[int]:
        """Returns the states of ``keys`` once they are known."""
        self.until(lambda: RETRY not in self.tier.contains(keys).tolist(), "lookups were never answered")
        states: list[int] = self.tier.contains(keys).tolist()
        return states

    def fill(self, keys: Sequence[OffloadKey]) -> None:
        """Puts bytes that depend on the key into slots 0, 1 and so on."""
        for slot, key in enumerate(keys):
            for rank, pool in enumerate(self.pools):
                pool[slot] = content(key, rank, pool.shape[1])

    def write(self, keys: Sequence[OffloadKey]) -> dict[OffloadKey, TierResult]:
        self.fill(keys)
        return self.finish(self.tier.write(keys, np.arange(len(keys))))

    def read(self, keys: Sequence[OffloadKey]) -> dict[OffloadKey, TierResult]:
        """Reads ``keys`` into the upper half of the slots. Asserts that what was read is right."""
        half = len(self.pools[0]) // 2
        for pool in self.pools:
            pool[half : half + len(keys)] = 0
        results = self.finish(self.tier.read(keys, np.arange(half, half + len(keys))))
        for i, key in enumerate(keys):
            if key in results and results[key].ok:
                assert self.has(key, half + i), "a read that has succeeded has other bytes"
        return results

    def finish(self, taken: Sequence[OffloadKey]) -> dict[OffloadKey, TierResult]:
        """Returns the results of transfers."""
        results: dict[OffloadKey, TierResult] = {}
        deadline = time.monotonic() + DEADLINE_S
        while len(results) < len(taken):
            assert time.monotonic() < deadline, "transfers never ended"
            results |= {result.key: result for result in self.poll()}
        return results

    def has(self, key: OffloadKey, slot: int) -> bool:
        return all((pool[slot] == content(key, rank, pool.shape[1])).all() for rank, pool in enumerate(self.pools))

    def errors(self, keys: Sequence[OffloadKey]) -> list[TierError | None]:
        """Reads ``keys``. Returns the error of each."""
        results = self.read(keys)
        return [results[key].error for key in keys]

    def reads_all(self, keys: Sequence[OffloadKey]) -> bool:
        results = self.read(keys)
        return len(results) == len(keys) and all(each.ok for each in results.values())

    def works_again(self, keys: Sequence[OffloadKey]) -> None:
        """Asserts that in the end, without a restart of the server, ``keys`` are written and read."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            self.write([key for key, state in zip(keys, self.states(keys), strict=True) if state == MISS])
            if self.states(keys) == [HIT] * len(keys) and self.reads_all(keys):
                return
            until = time.monotonic() + 0.2
            while time.monotonic() < until:
                self.poll()
        raise AssertionError("the tier never worked again")


class ShiftedProcess(ChildProcess):
    """A process whose responses have times of ``clock``, as all processes of a machine have the same clock."""

    clock = RealClock()

    def poll(self) -> list[Response]:
        shift = self.clock.shift
        return [replace(each, begun=each.begun + shift, ended=each.ended + shift) for each in super().poll()]


class Server(StoreServer):
    """A server on a store in a folder. ``setup``: further fields of Setup. The test moves its ``clock``."""

    def __init__(self, store: FolderStore, fingerprint: str = FINGERPRINT, client: str = CLIENT, **setup: Any) -> None:
        self.store = store
        self.clock = RealClock()

        def open_tier(context: TierContext) -> Tier:
            handles = tuple(handle for handle in context.handles if handle is not None)
            made = Setup(client, store.settings(), handles, len(context.pools[0]), fingerprint, "kv", **setup)
            log = LimitedLog(logging.getLogger(__name__), time.monotonic)

            def start() -> ShiftedProcess:
                self.process = ShiftedProcess(made, "folder", log, log)
                self.process.clock = self.clock
                return self.process

            payload_bytes = sum(pool.shape[1] for pool in context.pools)
            return RemoteTier(start, payload_bytes, name="folder", clock=self.clock, random=lambda: 0.5)

        super().__init__(open_tier, (4096, 8192), 32, fingerprint)


def content(key: OffloadKey, rank: int, nbytes: int) -> ByteArray:
    return np.random.default_rng([rank, *key]).integers(0, 256, nbytes, dtype=np.uint8)


def store_in(folder: Path) -> FolderStore:
    folder.mkdir(exist_ok=True)
    return FolderStore(folder)

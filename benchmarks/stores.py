"""Benchmark of remote tiers on stores of this machine: GB/s and latency per block beside plain scripts that move the
same bytes, and what a tier costs the scheduler's thread.

The scripts run in processes of their own, like the tier's client, and verify nothing: see ``store_peers``. All sides
take turns, so that they share whatever else the machine does.
"""

from __future__ import annotations

import json
import logging
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np

from benchmarks.report import Row, publish
from demo.stores import MooncakeStore, RedisStore, Store, StoreMissingError
from kvoffload.abc import OffloadKey, Slots
from kvoffload.cache.keys import make_offload_key
from kvoffload.host.pool import HostPool
from kvoffload.tiers.config import TierContext, load_tiers
from kvoffload.tiers.remote.tier import RemoteTier
from kvoffload.units import format_bytes

ROUND_BYTES = 128 << 20
"""Bytes moved per round: as many as a tier has under way at most."""
BLOCK_BYTES = 2 << 20
SMALL_BYTES = 64 << 10
ROUNDS = 15
READS = 3
"""Reads per round."""
SINGLES = 200
LONG_PROMPT = 8192
"""Blocks."""
CONNECT_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of store. ``peers``: the modules of ``store_peers`` that are compared, each with its arguments from an
    entry of the tier. The ratios are those to the first one."""

    title: str
    start: Callable[[Path], Store]
    peers: Mapping[str, Callable[[Mapping[str, Any]], Sequence[str]]]
    block_bytes: Sequence[int] = (BLOCK_BYTES,)


KINDS = {
    "redis": Kind(
        "Redis over TCP",
        RedisStore,
        {
            "sockets": lambda entry: (),
            "redis_py": lambda entry: (entry["url"],),
            "client": lambda entry: (json.dumps(entry),),
        },
        (BLOCK_BYTES, SMALL_BYTES),
    ),
    "mooncake": Kind("Mooncake Store over TCP", MooncakeStore, {"mooncake": lambda entry: (entry["master"],)}),
}


class Side(Protocol):
    """One that moves values."""

    def seconds(self, do: str, name: str, number: int) -> float:
        """Returns how long it takes to put, get or remove ``number`` values."""


class Peer:
    """A plain script."""

    def __init__(self, module: str, count: int, nbytes: int, arguments: Sequence[str]) -> None:
        command = [sys.executable, "-m", f"benchmarks.store_peers.{module}", str(count), str(nbytes), *arguments]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> Peer:
        assert self._reply() == "ready"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def seconds(self, do: str, name: str, number: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{do} {name} {number}\n")
        self._process.stdin.flush()
        return float(self._reply())

    def _reply(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


class TierSide:
    """A tier, whose blocks have the same keys as long as ``name`` is the same."""

    def __init__(self, entry: Mapping[str, Any], host: HostPool) -> None:
        (config,) = load_tiers([entry])
        tier = config.open(TierContext([host.data], "b" * 64, [host.handle()]))
        assert isinstance(tier, RemoteTier)
        self.tier = tier
        self._keys: dict[str, list[OffloadKey]] = {}

    def __enter__(self) -> TierSide:
        self.settle(lambda: self.tier.stats().is_connected)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tier.close()

    def seconds(self, do: str, name: str, number: int) -> float:
        keys = self._keys.setdefault(name, new_keys(number))
        if do == "remove":
            del self._keys[name]
            self.tier.delete(keys)
            self.settle(lambda: not self.tier.contains(keys).any())
            return 0.0
        return self._move(self.tier.write if do == "put" else self.tier.read, keys)

    def _move(self, move: Callable[[list[OffloadKey], Slots], list[OffloadKey]], keys: list[OffloadKey]) -> float:
        """Returns how long ``move`` takes for ``keys``, from the first call to the last result."""
        left = dict(zip(keys, range(len(keys)), strict=True))
        under_way = 0
        begun = time.perf_counter()
        while left or under_way:
            if left:
                taken = move(list(left), np.array(list(left.values()), dtype=np.int64))
                under_way += len(taken)
                for key in taken:
                    del left[key]
            self.tier.wait(0.01)
            for result in self.tier.poll():
                assert result.ok, result
                under_way -= 1
        return time.perf_counter() - begun

    def settle(self, is_settled: Callable[[], bool]) -> None:
        deadline = time.monotonic() + CONNECT_DEADLINE_S
        while not is_settled():
            assert time.monotonic() < deadline, "the store does not answer"
            self.tier.wait(0.01)
            self.tier.poll()


def new_keys(n: int) -> list[OffloadKey]:
    raw = np.random.default_rng().bytes(32 * n)
    return [make_offload_key(raw[32 * i : 32 * i + 32], 0) for i in range(n)]


def throughput(sides: Mapping[str, Side], base: str, block_bytes: int, rounds: int) -> list[Row]:
    """Returns the GB/s of each side, compared with the side ``base``."""
    number = ROUND_BYTES // block_bytes
    measured: dict[tuple[str, str], list[float]] = {(do, name): [] for do in ("put", "get") for name in sides}
    for turn in range(rounds):
        for do, times in (("put", 1), ("get", READS)):
            for _ in range(times):
                for name, side in sides.items():
                    measured[do, name].append(side.seconds(do, f"{name}-{turn}", number))
        for name, side in sides.items():
            side.seconds("remove", f"{name}-{turn}", number)
    rows = []
    for (do, name), taken in measured.items():
        rate = number * block_bytes / statistics.median(taken) / 1e9
        # Each turn is compared with that of the other side next to it, because the machine's speed changes meanwhile.
        ratio = statistics.median(b / a for a, b in zip(taken, measured[do, base], strict=True))
        what = f"{format_bytes(block_bytes)}, {'write' if do == 'put' else 'read'}: {name}"
        rows.append(Row(what, rate, "GB/s", *(() if name == base else (base, ratio))))
    return rows


def latency(sides: Mapping[str, Side], base: str, block_bytes: int, singles: int) -> list[Row]:
    """Returns the time of one block at a time."""
    measured: dict[str, list[float]] = {name: [] for name in sides}
    for name, side in sides.items():
        side.seconds("put", f"{name}-single", 1)
    for _ in range(singles):
        for name, side in sides.items():
            measured[name].append(side.seconds("get", f"{name}-single", 1) * 1000)
    for name, side in sides.items():
        side.seconds("remove", f"{name}-single", 1)
    rows = []
    for percent in (50, 99):
        for name, taken in measured.items():
            value, other = float(np.percentile(taken, percent)), float(np.percentile(measured[base], percent))
            what = f"{format_bytes(block_bytes)}, one block, p{percent}: {name}"
            rows.append(Row(what, value, "ms", *(() if name == base else (base, other / value))))
    return rows


def scheduler_thread(side: TierSide) -> list[Row]:
    """Returns the CPU time of the calling thread per block."""
    rows: list[Row] = []
    tier = side.tier

    def measure(what: str, num_blocks: int, call: Callable[[], object]) -> None:
        begun = time.thread_time()
        call()
        rows.append(Row(f"scheduler thread: {what}", (time.thread_time() - begun) / num_blocks * 1e6, "us/block"))

    chain = new_keys(LONG_PROMPT)
    measure("contains of an unknown chain", LONG_PROMPT, lambda: tier.contains(chain))
    measure("contains while the store is asked", LONG_PROMPT, lambda: tier.contains(chain))
    time.sleep(2.0)
    measure("poll with the answers", LONG_PROMPT, tier.poll)
    side.settle(lambda: 3 not in tier.contains(chain))
    measure("contains of a known chain", LONG_PROMPT, lambda: tier.contains(chain))
    keys, slots = new_keys(32), np.arange(32)
    for what, move in (("write", tier.write), ("read", tier.read)):
        taken: list[OffloadKey] = []

        def begin(move: Callable[[list[OffloadKey], Slots], list[OffloadKey]] = move) -> None:
            taken.extend(move(keys, slots))  # noqa: B023

        measure(what, len(keys), begin)
        time.sleep(2.0)
        measure(f"poll after that {what}", len(keys), tier.poll)
        side.settle(lambda: bool(tier.contains(keys).all()))
    return rows


def measure_kind(kind: Kind, folder: Path, quick: bool) -> list[Row]:
    """Returns the figures of a store that is started for that."""
    rows: list[Row] = []
    key_file = folder / "hmac-key"
    key_file.write_text(secrets.token_hex(32))
    base = next(iter(kind.peers))
    with kind.start(folder) as store:
        entry = store.entry()
        for block_bytes in kind.block_bytes:
            count = ROUND_BYTES // block_bytes
            with ExitStack() as opened:
                host = HostPool(count, block_bytes)
                opened.callback(host.close)
                host.data[:] = np.random.default_rng(0).integers(0, 256, host.data.shape, dtype=np.uint8)
                tier = opened.enter_context(TierSide(entry, host))
                sides: dict[str, Side] = {"tier": tier}
                sides["tier with HMAC"] = opened.enter_context(
                    TierSide({**entry, "hmac_key_file": str(key_file)}, host)
                )
                for name, arguments in kind.peers.items():
                    sides[name] = opened.enter_context(Peer(name, count, block_bytes, arguments(entry)))
                rows += throughput(sides, base, block_bytes, 2 if quick else ROUNDS)
                rows += latency(sides, base, block_bytes, 20 if quick else SINGLES)
                if block_bytes == BLOCK_BYTES:
                    rows += scheduler_thread(tier)
    return rows


def main(out: Path, quick: bool = False) -> None:
    logging.disable(logging.WARNING)
    try:
        for name, kind in KINDS.items():
            with tempfile.TemporaryDirectory() as folder:
                try:
                    rows = measure_kind(kind, Path(folder), quick)
                except StoreMissingError as error:
                    print(f"\nstores, {name}: skipped, {error}")
                    continue
            publish(f"stores-{name}", f"{kind.title} on this machine", rows, out)
    finally:
        logging.disable(logging.NOTSET)

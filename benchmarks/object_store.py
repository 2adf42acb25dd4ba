"""Benchmark of the object store tier beside plain obstore, on moto: GB/s and CPU time per GB, for blocks of 2 MiB, and
of 64 KiB with and without shared objects.

The plain script runs in a process of its own, like the tier's client. It puts and gets every value as an object of its
own from as many threads as the tier has, verifies nothing, and leaves what it gets where obstore has put it. moto is a
slow server, so the ratio counts. Both sides take turns.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.report import Row, publish
from demo.stores import ObjectStore
from kvoffload.abc import OffloadKey
from kvoffload.cache.keys import make_offload_key
from kvoffload.tiers.object_store.client import ObjectStoreClient
from kvoffload.tiers.object_store.obstore_bucket import TRANSFERS, open_bucket
from kvoffload.tiers.remote.client import Outcome
from kvoffload.tiers.remote.messages import Op, StoreRequest
from kvoffload.tiers.remote.record import RECORD_BYTES, ValueFormat
from kvoffload.tiers.remote.worker import StoreWorker, ValueMemory

FINGERPRINT = "5e" * 32
ROUNDS = 3
BYTES = 32 << 20
"""Moved per round."""
SIZES = ((2 << 20, True), (64 << 10, True), (64 << 10, False))
"""Bytes per block, and whether blocks may share objects."""

PEER = """
import resource, sys, time
from concurrent.futures import ThreadPoolExecutor
import numpy as np, obstore
from obstore.store import from_url
url, endpoint, count, nbytes, threads = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
options = dict(endpoint=endpoint, region="us-east-1", unsigned_payload=True, client_options={"allow_http": True})
store = from_url(url, **options)
rows = np.random.default_rng(1).integers(0, 256, (count, nbytes), dtype=np.uint8)
pool = ThreadPoolExecutor(threads)
def cpu():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
print("ready", flush=True)
for line in sys.stdin:
    do, name = line.split()
    begun, cpu_begun = time.perf_counter(), cpu()
    if do == "put":
        list(pool.map(lambda i: obstore.put(store, f"peer/{name}/{i}", rows[i], mode="create"), range(count)))
    else:
        list(pool.map(lambda i: obstore.get(store, f"peer/{name}/{i}").bytes(), range(count)))
    print(time.perf_counter() - begun, cpu() - cpu_begun, flush=True)
"""


class Side:
    """The tier's client and worker, in this process."""

    def __init__(self, settings: dict[str, str], block_bytes: int, shares: bool) -> None:
        self.count = BYTES // block_bytes
        self.pool = np.random.default_rng(0).integers(0, 256, (2 * self.count, block_bytes), dtype=np.uint8)
        client = ObjectStoreClient(open_bucket(settings), RECORD_BYTES + block_bytes if shares else 0, [0])
        self._worker = StoreWorker(client, ValueMemory([self.pool]), ValueFormat(FINGERPRINT))

    def run(self, op: Op, keys: list[OffloadKey]) -> tuple[float, float]:
        """Returns seconds and CPU seconds."""
        first = self.count if op is Op.READ else 0
        begun, cpu_begun = time.perf_counter(), cpu()
        response = self._worker.run(StoreRequest(1, op, keys, range(first, first + len(keys))))
        assert set(response.outcomes) == {Outcome.OK}, response.problem or "some blocks have failed"
        return time.perf_counter() - begun, cpu() - cpu_begun


def cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Peer:
    def __init__(self, url: str, endpoint: str, block_bytes: int) -> None:
        count = BYTES // block_bytes
        command = [sys.executable, "-c", PEER, url, endpoint, str(count), str(block_bytes), str(TRANSFERS)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._reply() == "ready"

    def run(self, do: str, name: str) -> tuple[float, float]:
        """Returns seconds and CPU seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{do} {name}\n")
        self._process.stdin.flush()
        seconds, cpu_seconds = self._reply().split()
        return float(seconds), float(cpu_seconds)

    def _reply(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def new_chain(n: int) -> list[OffloadKey]:
    raw = np.random.default_rng().bytes(32 * n)
    return [make_offload_key(raw[32 * i : 32 * i + 32], 0) for i in range(n)]


def measure(url: str, endpoint: str, block_bytes: int, shares: bool, rounds: int) -> list[Row]:
    side = Side({"url": url, "endpoint": endpoint, "region": "", "prefix": "kv"}, block_bytes, shares)
    peer = Peer(url, endpoint, block_bytes)
    taken: dict[str, list[tuple[float, ...]]] = {}
    try:
        for number in range(rounds + 1):
            keys = new_chain(side.count)
            made = {"put": side.run(Op.WRITE, keys), "peer put": peer.run("put", f"{block_bytes}-{shares}-{number}")}
            made |= {"get": side.run(Op.READ, keys), "peer get": peer.run("get", f"{block_bytes}-{shares}-{number}")}
            if number:
                for name, values in made.items():
                    taken.setdefault(name, []).append(values)
    finally:
        peer.close()
    size = f"{block_bytes >> 10} KiB" + (" grouped" if shares and BYTES // block_bytes > 64 else "")

    def median(name: str, column: int) -> float:
        return statistics.median(values[column] for values in taken[name])

    rows = []
    for do in ("put", "get"):
        ratio = statistics.median(b[0] / a[0] for a, b in zip(taken[do], taken[f"peer {do}"], strict=True))
        plain = f"plain obstore: {BYTES / median(f'peer {do}', 0) / 1e9:.2f}"
        rows.append(Row(f"{size}: {do}", BYTES / median(do, 0) / 1e9, "GB/s", plain, ratio))
        mine, theirs = median(do, 1) / BYTES * 1e9, median(f"peer {do}", 1) / BYTES * 1e9
        rows.append(Row("  CPU time of the client", mine, "s/GB", f"plain obstore: {theirs:.2f}", theirs / mine))
    return rows


def main(out: Path, quick: bool = False) -> None:
    reason = ObjectStore.missing()
    if reason is not None:
        print(f"\nobject_store: skipped, {reason}")
        return
    rounds = 1 if quick else ROUNDS
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as work, ObjectStore(Path(work)) as store:
        entry = store.entry()
        for block_bytes, shares in SIZES:
            rows += measure(entry["url"], entry["endpoint"], block_bytes, shares, rounds)
    title = f"Object store tier beside plain obstore, {BYTES >> 20} MiB per round"
    publish("object_store", title, rows, out)

"""The cost of hashing a model's weights for its fingerprint, at the first start and at later ones.

The file is in the page cache, where a loader leaves it. ``read`` reads it once into a buffer, a lower bound for any
digest of every byte. SHA-256 is the cost of a cryptographic digest. CPU seconds are the sum over all threads.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import Row, publish
from kvoffload import digests
from kvoffload.digests import BUFFER_BYTES, DigestCache, file_digests

FILE_BYTES = 3 << 30
SHA_BYTES = 256 << 20
SCALE = 10e9
"""Figures are per 10 GB."""
FILES = 200
"""Number of files of a large model."""
ROUNDS = 3


def costs(run: Callable[[], object], nbytes: int) -> tuple[float, float]:
    """Returns wall and CPU seconds per 10 GB, medians of ROUNDS runs."""
    walls, cpus = [], []
    for _ in range(ROUNDS):
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        walls.append((time.perf_counter() - wall) / nbytes * SCALE)
        cpus.append((time.process_time() - cpu) / nbytes * SCALE)
    return statistics.median(walls), statistics.median(cpus)


def read(path: Path, digest: Callable[[memoryview], object] | None = None, nbytes: int = FILE_BYTES) -> None:
    buffer = memoryview(bytearray(BUFFER_BYTES))
    with path.open("rb", buffering=0) as file:
        while nbytes > 0 and (count := file.readinto(buffer)):
            nbytes -= count
            if digest is not None:
                digest(buffer[:count])


def hash_with(threads: int, path: Path) -> None:
    most, digests.MAX_THREADS = digests.MAX_THREADS, threads
    try:
        file_digests([path])
    finally:
        digests.MAX_THREADS = most


def main(out: Path, quick: bool) -> None:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvoffload-bench-") as folder:
        nbytes = FILE_BYTES // (64 if quick else 1)
        path = Path(folder, "weights")
        with path.open("wb") as file:
            for _ in range(nbytes >> 24):
                file.write(os.urandom(1 << 20) * 16)
        read(path)
        least = costs(lambda: read(path), nbytes)
        for threads in (1, 2, 4, 8):
            if threads <= len(os.sched_getaffinity(0)):
                wall, cpu = costs(lambda threads=threads: hash_with(threads, path), nbytes)  # type: ignore[misc]
                what = f"hash 10 GB, {threads} thread{'s' * (threads > 1)}"
                rows.append(Row(f"{what}, wall", wall, "s", "read", least[0] / wall))
                rows.append(Row(f"{what}, CPU", cpu, "s", "read", least[1] / cpu))
        rows.append(Row("read 10 GB, wall", least[0], "s"))
        rows.append(Row("read 10 GB, CPU", least[1], "s"))
        sha = hashlib.sha256()
        _, cpu = costs(lambda: read(path, sha.update, SHA_BYTES), min(SHA_BYTES, nbytes))
        rows.append(Row("SHA-256 of 10 GB, 1 thread, CPU", cpu, "s", "read", least[1] / cpu))
        files = [Path(folder, f"shard-{i}") for i in range(FILES)]
        for small in files:
            small.write_bytes(os.urandom(100))
        cache = DigestCache(Path(folder, "cache"), lambda: time.time_ns() + 10**12)
        file_digests(files, cache)
        wall, cpu = costs(lambda: file_digests(files, cache), int(SCALE))
        rows.append(Row(f"a later start, {FILES} files, wall", 1e3 * wall, "ms"))
        rows.append(Row(f"a later start, {FILES} files, CPU", 1e3 * cpu, "ms"))
    publish("fingerprint", "Hashing the weights of a model", rows, out)

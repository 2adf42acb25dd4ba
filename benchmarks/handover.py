"""Time to first token of a prompt that one vLLM server has computed and another one goes on with.

For each way to hand over there are two servers that compute on one thread each. The first one computes the prompt. The
second one gets the request as soon as the first has answered, as from a proxy. The second server is also asked for the
same prompt from its own device cache (the floor), for a new prompt (computed), and for a prompt that was handed over a
second before, when all bytes are in the store. A plain client of the same store measures the time of the bytes: written
and read, or only read. The overhead is the time to first token, minus the floor, minus the bytes' time.

vLLM's NixlConnector, which sends from server to server, is measured if Python finds the packages ``nixl`` and
``nixl-cu12``: ``pip install --no-deps --target DIR nixl nixl-cu12; PYTHONPATH=DIR make bench ARGS=handover``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import mmap
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Row, publish
from demo.engine import connector
from demo.model import CONFIG, HEAD_DIM, KV_HEADS, write_model
from demo.process import HOST, DemoError, free_ports
from demo.servers import TO_HAND_OVER, Answer, VllmServer
from demo.stores import DirectoryStore, RedisStore, StoreMissingError

BLOCK_SIZE = 128
PROMPT_TOKENS = 2000
ARGUMENTS = (
    *("--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", "64"),
    *("--max-model-len", "2304", "--max-num-batched-tokens", "2304"),
)
NUM_BLOCKS = PROMPT_TOKENS // BLOCK_SIZE
BLOCK_BYTES = 2 * CONFIG["num_hidden_layers"] * KV_HEADS * HEAD_DIM * 4 * BLOCK_SIZE
WARM_UP = 2
"""Rounds that are not counted: connections are made in them."""
WRITTEN_S = 1.0
REQUEST_S = 120.0
NIXL: dict[str, Any] = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"} | {
    # Its threads never sleep, and by default there are more of them than cores here.
    "kv_connector_extra_config": {"num_threads": 1}
}
HOST_BYTES = "512MiB"

BytesTime = Callable[[], tuple[float, float]]
"""Writes and reads as many values as a prompt has blocks. Returns the seconds of both."""


@dataclass
class Times:
    """Seconds by round."""

    prefill: list[float] = field(default_factory=list)
    handed: list[float] = field(default_factory=list)
    written: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)
    write: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    found: list[int] = field(default_factory=list)
    """Tokens that the second server found outside its own device cache."""


class Pair:
    """A server that computes prompts and one that goes on."""

    def __init__(
        self, model: Path, logs: Path, transfer: Mapping[str, Any], environments: list[dict[str, str]]
    ) -> None:
        servers = []
        with contextlib.ExitStack() as opened:
            for i, name in enumerate(("prefill", "decode")):
                environment = {**environments[i], "OMP_NUM_THREADS": "1"}
                server = VllmServer(model, logs / f"{name}.log", transfer, ARGUMENTS, environment)
                opened.callback(server.kill)
                servers.append(server)
            for server in servers:
                server.wait()
            self._opened = opened.pop_all()
        self._first, self._second = servers

    def close(self) -> None:
        self._opened.close()

    def round(self, rng: np.random.Generator, times: Times, bytes_time: BytesTime) -> None:
        """Measures everything once."""
        answer, handed = self._hand_over(rng, 0.0)
        prompt = self._prompt
        times.prefill.append(answer.total_s)
        times.handed.append(handed.total_s)
        times.found.append(_num_found(handed))
        self._second.complete(prompt, 1, REQUEST_S)
        times.device.append(self._second.complete(prompt, 1, REQUEST_S).total_s)
        times.written.append(self._hand_over(rng, WRITTEN_S)[1].total_s)
        times.computed.append(self._second.complete(_prompt(rng), 1, REQUEST_S).total_s)
        time.sleep(WRITTEN_S)
        write_s, read_s = bytes_time()
        times.write.append(write_s)
        times.read.append(read_s)

    def _hand_over(self, rng: np.random.Generator, pause_s: float) -> tuple[Answer, Answer]:
        self._prompt = _prompt(rng)
        first = self._first.complete(self._prompt, 1, REQUEST_S, TO_HAND_OVER)
        time.sleep(pause_s)
        return first, self._second.complete(self._prompt, 1, REQUEST_S, first.transfer or None)


def _prompt(rng: np.random.Generator) -> list[int]:
    tokens: list[int] = rng.integers(5, 500, PROMPT_TOKENS).tolist()
    return tokens


def _num_found(answer: Answer) -> int:
    found = answer.transfer.get("kvoffload", {})
    return int(sum(found.get("tier_tokens", {}).values()) + found.get("host_tokens", 0))


def _through_redis(port: int) -> tuple[float, float]:
    """Sets and gets values one after the other, on one connection."""
    value, into = os.urandom(BLOCK_BYTES), bytearray(BLOCK_BYTES + 64)
    with socket.create_connection((HOST, port), REQUEST_S) as stream:

        def receive(count: int) -> None:
            view = memoryview(into)
            while count:
                got = stream.recv_into(view, count)
                if not got:
                    raise DemoError("redis-server has closed the connection")
                view, count = view[got:], count - got

        names = [b"plain-%03d" % i for i in range(NUM_BLOCKS)]
        begun = time.perf_counter()
        for name in names:
            stream.sendall(b"*3\r\n$3\r\nSET\r\n$9\r\n%b\r\n$%d\r\n" % (name, len(value)))
            stream.sendall(value)
            stream.sendall(b"\r\n")
            receive(len(b"+OK\r\n"))
        written = time.perf_counter()
        header = len(b"$%d\r\n" % len(value))
        for name in names:
            stream.sendall(b"*2\r\n$3\r\nGET\r\n$9\r\n%b\r\n" % name)
            receive(header + len(value) + 2)
        return written - begun, time.perf_counter() - written


def _through_files(directory: Path) -> tuple[float, float]:
    """Writes and reads a file, past the page cache where the file system allows that."""
    path = directory / "plain"
    with mmap.mmap(-1, BLOCK_BYTES) as block:
        block.write(os.urandom(BLOCK_BYTES))
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        except OSError:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(file, 0, NUM_BLOCKS * BLOCK_BYTES)
            begun = time.perf_counter()
            for i in range(NUM_BLOCKS):
                os.pwrite(file, block, i * BLOCK_BYTES)
            written = time.perf_counter()
            for i in range(NUM_BLOCKS):
                os.preadv(file, [block], i * BLOCK_BYTES)
            return written - begun, time.perf_counter() - written
        finally:
            os.close(file)
            path.unlink()


@contextlib.contextmanager
def _redis(model: Path, folder: Path) -> Iterator[tuple[Pair, BytesTime]]:
    with RedisStore(folder) as store:
        options = {"host_bytes": HOST_BYTES, "tiers": [store.entry()]}
        port = int(store.entry()["url"].rpartition(":")[2])
        with contextlib.closing(Pair(model, folder, connector(options), [{}, {}])) as pair:
            yield pair, lambda: _through_redis(port)


@contextlib.contextmanager
def _shared_dir(model: Path, folder: Path) -> Iterator[tuple[Pair, BytesTime]]:
    with DirectoryStore(folder / "shared") as store:
        options = {"host_bytes": HOST_BYTES, "tiers": [store.entry()]}
        with contextlib.closing(Pair(model, folder, connector(options), [{}, {}])) as pair:
            yield pair, lambda: _through_files(folder)


@contextlib.contextmanager
def _nixl(model: Path, folder: Path) -> Iterator[tuple[Pair, BytesTime]]:
    if importlib.util.find_spec("nixl") is None:
        raise StoreMissingError("run pip install --no-deps --target DIR nixl nixl-cu12, and set PYTHONPATH=DIR")
    environments = [{"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)} for port in free_ports(2)]
    with contextlib.closing(Pair(model, folder, NIXL, environments)) as pair:
        yield pair, lambda: (0.0, 0.0)


WAYS = {"redis": _redis, "shared_dir": _shared_dir, "NixlConnector": _nixl}


def rows_of(way: str, times: Times) -> list[Row]:
    """Returns the rows of one way to hand over. A ratio compares with the same prompt computed by the same server."""
    in_ms = {name: 1e3 * statistics.median(getattr(times, name)) for name in Times.__dataclass_fields__}
    computed = in_ms["computed"]
    rows = [
        Row(f"{way}: computed by the second server", computed, "ms"),
        Row(f"{way}: in its device cache, the floor", in_ms["device"], "ms", "computed", computed / in_ms["device"]),
        Row(f"{way}: handed over", in_ms["handed"], "ms", "computed", computed / in_ms["handed"]),
        Row(
            f"{way}: handed over {WRITTEN_S:.0f} s ago", in_ms["written"], "ms", "computed", computed / in_ms["written"]
        ),
        Row(f"{way}: the first server's answer", in_ms["prefill"], "ms"),
    ]
    pairs = zip(times.handed, times.device, times.write, times.read, strict=True)
    overhead = [handed - device - write - read for handed, device, write, read in pairs]
    if any(times.read):
        rows += [
            Row(f"{way}: bytes' time, written and read", in_ms["write"] + in_ms["read"], "ms"),
            Row(f"{way}: bytes' time, read", in_ms["read"], "ms"),
            Row(f"{way}: hand-overs of which all was found", _share(times.found, NUM_BLOCKS * BLOCK_SIZE), "%"),
        ]
    rows.append(Row(f"{way}: overhead of a hand-over", 1e3 * statistics.median(overhead), "ms"))
    if any(times.read):
        later = statistics.median(
            written - device - read
            for written, device, read in zip(times.written, times.device, times.read, strict=True)
        )
        rows.append(Row(f"{way}: overhead {WRITTEN_S:.0f} s later", 1e3 * later, "ms"))
    return rows


def _share(found: list[int], expected: int) -> float:
    return 100 * sum(each >= expected for each in found) / len(found)


def main(out: Path, quick: bool) -> None:
    rows: list[Row] = []
    base = os.environ.get("KVOFFLOAD_BENCH_DIR")
    with tempfile.TemporaryDirectory(prefix="kvoffload-bench-", dir=base or Path.cwd()) as temporary:
        model = Path(temporary) / "model"
        write_model(model, seed=0)
        for way, start in WAYS.items():
            folder = Path(temporary) / way
            folder.mkdir()
            times, rng = Times(), np.random.default_rng(0)
            try:
                with start(model, folder) as (pair, bytes_time):
                    for _ in range(WARM_UP):
                        pair.round(rng, Times(), bytes_time)
                    for _ in range(2 if quick else 15):
                        pair.round(rng, times, bytes_time)
            except DemoError as error:
                print(f"{way} is skipped: {error}")
                continue
            rows += rows_of(way, times)
    publish(
        "handover", f"Time to first token of {PROMPT_TOKENS} tokens that another server has computed, p50", rows, out
    )

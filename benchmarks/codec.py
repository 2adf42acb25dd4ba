"""What ``compress`` of a remote tier gains on KV of a trained model: bytes, CPU time, and time to first token in real
vLLM over a slow network. A tier alone reads the same blocks with and without it in turn.

A first server computes prompts of real text and writes their blocks to Redis, a second one with empty caches loads
them, each in a process of its own. Between the second one and Redis there is a proxy that lets 1 Gbit/s through, or
nothing. The control is random bytes for the codec, and the fast network for the time to first token.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Row, publish
from benchmarks.stores import TierSide
from demo.engine import IN_THIS_PROCESS, Engine, connector
from demo.process import HOST, ROOT, kill_session
from demo.smollm2 import MISSING, NAME, is_installed, smollm2_directory
from demo.stores import RedisStore
from kvoffload.abc import ByteArray
from kvoffload.host.pool import HostPool
from kvoffload.tiers.remote.codec import ByteCodec
from kvoffload.tiers.remote.record import RECORD_BYTES

BLOCK_SIZE = 128
PROMPT_TOKENS = 1920
WARM_UP = 1
"""Prompts that are not counted: connections are made, and memory is touched."""
LINK_BYTES_PER_S = 1e9 / 8
PIECE_BYTES = 1 << 16
BURST_S = 0.02
"""Time that a link may catch up on, because threads wake late."""
CHILD_S = 600.0
ROUNDS = 15
MEASURED_BYTES = 64 << 20


class SlowLink:
    """A proxy in front of ``port`` that lets ``bytes_per_s`` through in each direction, all connections together."""

    def __init__(self, port: int, bytes_per_s: float) -> None:
        self._target = port
        self._rate = bytes_per_s
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._free_at = {True: 0.0, False: 0.0}
        """When the bytes taken so far have passed, to the store and back."""
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                store = socket.create_connection((HOST, self._target))
                for ends, is_up in (((client, store), True), ((store, client), False)):
                    threading.Thread(target=self._pass, args=(*ends, is_up), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, is_up: bool) -> None:
        buffer = memoryview(bytearray(PIECE_BYTES))
        with contextlib.suppress(OSError):
            while count := source.recv_into(buffer):
                with self._lock:
                    self._free_at[is_up] = max(time.monotonic() - BURST_S, self._free_at[is_up]) + count / self._rate
                    due = self._free_at[is_up]
                time.sleep(max(0.0, due - time.monotonic()))
                sink.sendall(buffer[:count])
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def codec_rows(name: str, block: ByteArray, count: int) -> list[Row]:
    """Returns ratio and CPU time per GB of ``count`` blocks that follow each other in ``block``."""
    codec = ByteCodec()
    size = block.size // count
    out, back = np.ones(size, dtype=np.uint8), np.ones(size, dtype=np.uint8)
    stored, spent = 0, [0.0, 0.0]
    for at in range(0, count * size, size):
        part = block[at : at + size]
        begun = time.thread_time()
        nbytes = codec.compress([part], out)
        spent[0] += time.thread_time() - begun
        stored += nbytes or size
        if nbytes:
            begun = time.thread_time()
            assert codec.decompress(out[:nbytes], [back])
            spent[1] += time.thread_time() - begun
            assert (back == part).all()
    gigabytes = count * size / 1e9
    return [
        Row(f"{name}: times smaller", count * size / stored, ""),
        Row(f"{name}: compressing", spent[0] / gigabytes, "CPU s/GB"),
        Row(f"{name}: decompressing", spent[1] / gigabytes, "CPU s/GB"),
    ]


def measure_codec(payloads: Sequence[ByteArray]) -> list[Row]:
    """Returns the figures of the codec on blocks of bfloat16 KV."""
    import torch

    kv = np.concatenate(payloads)
    numbers = torch.from_numpy(kv).view(torch.bfloat16).float()
    fp8 = numbers.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    float32 = numbers[: len(numbers) // 2].numpy().view(np.uint8)
    random = np.random.default_rng(0).integers(0, 256, kv.size, dtype=np.uint8)
    rows = []
    for name, data in (("bfloat16", kv), ("fp8 (e4m3)", fp8), ("bfloat16 in float32", float32), ("random", random)):
        rows += codec_rows(name, data, len(payloads))
    return rows


def load_rows(title: str, entry: dict[str, Any], payloads: Sequence[ByteArray], rounds: int) -> list[Row]:
    """Returns the times in which a tier of ``entry`` with and without ``compress`` reads the blocks of a prompt, in
    turn."""
    taken: dict[bool, list[float]] = {False: [], True: []}
    with contextlib.ExitStack() as opened:
        host = HostPool(len(payloads), payloads[0].size)
        opened.callback(host.close)
        sides = {each: opened.enter_context(TierSide({**entry, "compress": each}, host)) for each in taken}
        for side in sides.values():
            host.data[:] = payloads
            side.seconds("put", "prompt", len(payloads))
        for _ in range(rounds):
            for compress, side in sides.items():
                host.data[:] = 0
                taken[compress].append(side.seconds("get", "prompt", len(payloads)) * 1e3)
                assert all((row == payload).all() for row, payload in zip(host.data, payloads, strict=True))
    plain, compressed = (statistics.median(taken[each]) for each in (False, True))
    ratio = statistics.median(a / b for a, b in zip(taken[False], taken[True], strict=True))
    return [
        Row(f"{title}: blocks of a prompt read", plain, "ms"),
        Row(f"{title}: blocks of a prompt read, compress", compressed, "ms", "without", ratio),
    ]


def prompts(model: Path, count: int) -> list[list[int]]:
    """Returns prompts of this project's documentation."""
    from tokenizers import Tokenizer

    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    tokens: list[int] = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    return [tokens[i * PROMPT_TOKENS : (i + 1) * PROMPT_TOKENS] for i in range(count)]


def main(out: Path, quick: bool = False) -> None:
    missing = RedisStore.missing() or (None if is_installed() else f"{NAME} {MISSING}")
    if missing:
        print(f"\ncodec: skipped, {missing}")
        return
    model = smollm2_directory()
    asked = prompts(model, WARM_UP + (2 if quick else 8))
    rows = []
    with tempfile.TemporaryDirectory() as folder, RedisStore(Path(folder)) as store:
        entry = store.entry()
        for compress in (False, True):
            computed = _in_child(model, {**entry, "compress": compress}, asked)
            if not compress:
                payloads = [np.frombuffer(raw, dtype=np.uint8)[RECORD_BYTES:] for raw in store.values().values()]
                rows += measure_codec(payloads[: max(1, MEASURED_BYTES // payloads[0].size)])
                blocks = payloads[: PROMPT_TOKENS // BLOCK_SIZE]
                rows.append(Row("computed, and written to Redis", computed * 1e3, "ms"))
        for title, link in _links(int(entry["url"].rpartition(":")[2])):
            rows += load_rows(title, {**entry, "url": link}, blocks, 3 if quick else ROUNDS)
            plain, compressed = (
                _in_child(model, {**entry, "url": link, "compress": compress}, asked) for compress in (False, True)
            )
            rows.append(Row(f"{title}: found in Redis", plain * 1e3, "ms"))
            rows.append(
                Row(f"{title}: found in Redis, compress", compressed * 1e3, "ms", "without", plain / compressed)
            )
    publish("codec", f"Compressed blocks of {NAME}; time to first token, {PROMPT_TOKENS} tokens, p50", rows, out)


def _links(port: int) -> Iterator[tuple[str, str]]:
    """Yields each network and the URL of the store behind it."""
    slow = SlowLink(port, LINK_BYTES_PER_S)
    with contextlib.closing(slow):
        yield "1 Gbit/s", f"redis://{HOST}:{slow.port}"
    yield "loopback", f"redis://{HOST}:{port}"


def _in_child(model: Path, entry: dict[str, Any], asked: Sequence[list[int]]) -> float:
    """Returns the time to first token of the prompts ``asked`` in a new server, p50."""
    config = {"model": str(model), "entry": entry, "prompts": list(asked)}
    variables = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1", **IN_THIS_PROCESS}
    with tempfile.NamedTemporaryFile("r") as result, tempfile.NamedTemporaryFile("w") as given:
        json.dump(config, given)
        given.flush()
        command = [sys.executable, "-m", "benchmarks.codec", given.name, result.name]
        child = subprocess.Popen(command, env=variables, start_new_session=True)
        try:
            child.wait(timeout=CHILD_S)
            return float(json.load(result))
        finally:
            kill_session(child)


def _serve(config: dict[str, Any]) -> float:
    options = {
        "host_bytes": "512MiB",
        "tiers": [config["entry"]],
        "load_only_if_faster": False,
        "load_deadline_ms": 10_000,
    }
    arguments = {
        "dtype": "bfloat16",
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": 32,
        "max_model_len": PROMPT_TOKENS + BLOCK_SIZE,
        "max_num_batched_tokens": PROMPT_TOKENS + BLOCK_SIZE,
    }
    engine = Engine(config["model"], connector(options), arguments)
    answers = []
    for prompt in config["prompts"]:
        answers += engine.run([[prompt]], 1, 1)
        engine.settle()
    found = [answer["cached"] for answer in answers]
    print(f"  {config['entry']['url']}, compress {config['entry'].get('compress')}: tokens found {found}", flush=True)
    engine.close()
    times: list[float] = [answer["ttft_s"] for answer in answers[WARM_UP:]]
    return statistics.median(times)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(_serve(json.loads(Path(sys.argv[1]).read_text()))))
    os._exit(0)

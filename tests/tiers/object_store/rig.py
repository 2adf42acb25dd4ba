"""moto in a process of its own, an S3 server in this process that misbehaves, and servers with a tier on them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from demo.process import HOST, START_DEADLINE_S, CommandedProcess, free_ports
from kvoffload.abc import OffloadKey, Tier, TierResult
from kvoffload.cache.keys import make_offload_key
from kvoffload.tiers.config import TierContext
from kvoffload.tiers.object_store import client
from kvoffload.tiers.object_store.bucket import Times
from kvoffload.tiers.object_store.config import ObjectStoreConfig
from kvoffload.tiers.object_store.obstore_bucket import TEST_NAME
from kvoffload.tiers.remote.config import read_hmac_key
from kvoffload.tiers.remote.record import RECORD_BYTES, ValueFormat
from tests.tiers.made import closed_later
from tests.tiers.remote.memory_store import SteppedProcess
from tests.tiers.remote.rig import FINGERPRINT, StoreServer, pause, tier_here

needs_obstore = pytest.mark.skipif(
    importlib.util.find_spec("obstore") is None, reason="needs obstore: pip install obstore"
)
needs_moto = pytest.mark.skipif(
    importlib.util.find_spec("obstore") is None or importlib.util.find_spec("moto") is None,
    reason="needs obstore and moto: pip install obstore 'moto[server]'",
)
BUCKET = "kv-bucket"
SECRET = "PLANTEDSECRETKEY"
KEY_ID = "PLANTEDKEYID"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_EC2_METADATA_DISABLED": "true"}


def chain(length: int, seed: int = 0) -> list[OffloadKey]:
    """Returns the keys of a chain of blocks of one KV cache group."""
    return [make_offload_key(bytes([seed, i]) * 16, 0) for i in range(length)]


PATIENT = Times(20.0, 20.0, 20.0, 20.0, 20.0, retry_within_s=10.0, more_within_s=20.0)
"""Of clients that are made in this process, because tests may run on a busy machine."""


class Moto:
    """An S3 server with an empty bucket."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self.start()

    @property
    def endpoint(self) -> str:
        return f"http://{HOST}:{self.port}"

    def start(self) -> None:
        config = {"port": self.port, "bucket": BUCKET}
        self._process = CommandedProcess(["-m", "tests.tiers.object_store.moto_program"], Path(os.devnull), config)
        self._process.receive(START_DEADLINE_S)

    def do(self, command: str) -> int:
        """Runs a command of ``moto_program.FaultyS3``."""
        return int(self._process.call(command))

    def pause(self) -> None:
        pause(self._process.pid)

    def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()


@dataclass
class Stored:
    body: bytes
    note: str = ""


@dataclass
class FakeS3:
    """An S3 server of one bucket that a test can see into. ``answer`` gives a status and a body for requests with these
    methods instead of what they ask for. ``drip_s``: the pause before each piece of a body."""

    objects: dict[str, Stored] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    tests: dict[str, Stored] = field(default_factory=dict)
    """Objects with which clients test the store when they connect. These requests are not in ``requests``."""
    signers: set[str] = field(default_factory=set)
    """The access keys with which requests were signed."""
    answers: dict[str, tuple[int, str]] = field(default_factory=dict)
    is_conditional: bool = True
    keeps_notes: bool = True
    drip_s: float = 0.0
    storms: int = 0
    """The next so many requests are answered with 503 SlowDown."""

    def __post_init__(self) -> None:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle_one_request()

            def do_GET(self) -> None:
                fake.read(self, self.path)

            do_HEAD = do_GET

            def do_PUT(self) -> None:
                fake.write(self)

            def do_DELETE(self) -> None:
                if not fake.refuses(self):
                    fake.objects.pop(fake.name(self.path), None)
                    fake.send(self, 204)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        closed_later(self)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def blocks(self) -> dict[str, Stored]:
        """Returns the objects that have blocks."""
        return {name: each for name, each in self.objects.items() if "identities" not in name}

    def count(self, method: str) -> int:
        return sum(each == method for each, _ in self.requests)

    @staticmethod
    def name(path: str) -> str:
        return unquote(urlsplit(path).path).removeprefix(f"/{BUCKET}/")

    def refuses(self, request: BaseHTTPRequestHandler) -> bool:
        if TEST_NAME not in request.path:
            self.requests.append((request.command, self.name(request.path)))
        self.signers.update(re.findall(r"Credential=([^/]*)/", request.headers.get("Authorization", "")))
        answer = self.answers.get(request.command)
        if self.storms > 0:
            self.storms -= 1
            answer = 503, "<Error><Code>SlowDown</Code></Error>"
        if answer is None:
            return False
        self.send(request, answer[0], answer[1].encode())
        return True

    def send(
        self, request: BaseHTTPRequestHandler, status: int, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> None:
        request.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            step = max(1, len(body) // 20) if self.drip_s else max(1, len(body))
            for at in range(0, len(body), step):
                time.sleep(self.drip_s)
                request.wfile.write(body[at : at + step])

    def read(self, request: BaseHTTPRequestHandler, path: str) -> None:
        if self.refuses(request):
            return
        stored = (self.tests if TEST_NAME in path else self.objects).get(self.name(path))
        if stored is None:
            return self.send(request, 404, b"<Error><Code>NoSuchKey</Code></Error>")
        headers = {"ETag": '"0"', "Last-Modified": "Sun, 01 Nov 2026 00:00:00 GMT"}
        if stored.note:
            headers["x-amz-meta-kvoffload"] = stored.note
        wanted = request.headers.get("Range")
        size = len(stored.body)
        if request.command == "HEAD":
            return self.send(request, 200, b"", headers | {"Content-Length": str(size)})
        if wanted is None:
            return self.send(request, 200, stored.body, headers)
        begin, end = (int(each) for each in wanted.removeprefix("bytes=").split("-"))
        if begin >= size:
            return self.send(request, 416, b"<Error><Code>InvalidRange</Code></Error>")
        end = min(end + 1, size)
        return self.send(
            request, 206, stored.body[begin:end], headers | {"Content-Range": f"bytes {begin}-{end - 1}/{size}"}
        )

    def write(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["Content-Length"]))
        if self.refuses(request):
            return
        name = self.name(request.path)
        if request.headers.get("If-None-Match"):
            if not self.is_conditional:
                return self.send(request, 501, b"<Error><Code>NotImplemented</Code></Error>")
            if name in self.objects:
                return self.send(request, 412, b"<Error><Code>PreconditionFailed</Code></Error>")
        note = request.headers.get("x-amz-meta-kvoffload", "") if self.keeps_notes else ""
        (self.tests if TEST_NAME in name else self.objects)[name] = Stored(body, note)
        self.send(request, 200, b"", {"ETag": '"0"'})


class Server(StoreServer):
    """A tier of one server. Its client runs in a process of its own if ``has_process``; otherwise here, when the server
    polls."""

    def __init__(
        self,
        endpoint: str,
        fingerprint: str = FINGERPRINT,
        slot_bytes: Sequence[int] = (4096, 8192),
        num_slots: int = 256,
        url: str = f"s3://{BUCKET}/folder",
        has_process: bool = False,
        **settings: Any,
    ) -> None:
        config = ObjectStoreConfig(url=url, endpoint=endpoint, **settings)

        def open_here(context: TierContext) -> Tier:
            sizes = {"value_bytes": RECORD_BYTES + sum(slot_bytes), "chained_groups": [0]}
            values = ValueFormat(fingerprint, config.prefix, read_hmac_key(config.hmac_key_file))
            made = client.connect({**config.settings(), **sizes}, PATIENT)
            return tier_here(made, context.pools, values, config.kind, SteppedProcess)

        with patched(CREDENTIALS):
            super().__init__(config.open if has_process else open_here, slot_bytes, num_slots, fingerprint)
        if not has_process:
            self.connect()

    def poll(self) -> list[TierResult]:
        with patched(CREDENTIALS):
            # A client that has ended is started again.
            return super().poll()


@contextlib.contextmanager
def patched(environment: dict[str, str]) -> Iterator[None]:
    """Sets variables for the processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

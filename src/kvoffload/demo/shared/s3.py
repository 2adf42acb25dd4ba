"""A process that runs moto, an S3 server for tests, and changes what is stored there.

Run as ``python -m kvoffload.demo.shared.s3 PORT BUCKET``. When it serves, it writes a line to standard output, and then
one line per line of its input, ``{"do": NAME}``: the number of objects that it has changed. Objects whose names contain
"identities" are left alone.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kvoffload.demo.shared.processes import HOST

REGION = "us-east-1"
_FULL = b"<?xml version='1.0'?><Error><Code>QuotaExceeded</Code><Message>the bucket is full</Message></Error>"


class Server:
    """moto with one bucket. While it is full, it answers every PUT of an object with the status 507."""

    def __init__(self, port: int, bucket: str) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        from moto.s3.models import s3_backends
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        self.is_full = False
        self._app = DomainDispatcherApplication(create_backend_app)
        backend: Any = s3_backends["123456789012"]["aws"]
        self._bucket = backend.create_bucket(bucket, REGION)

        class Handler(WSGIRequestHandler):
            protocol_version = "HTTP/1.1"

        server = make_server(HOST, port, self._serve, threaded=True, request_handler=Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def _serve(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if self.is_full and environ["REQUEST_METHOD"] == "PUT":
            # A connection with an unread body cannot be used again.
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("507 Insufficient Storage", [("Content-Length", str(len(_FULL)))])
            return [_FULL]
        answer: Iterable[bytes] = self._app(environ, start_response)
        return answer

    def _objects(self) -> Iterator[tuple[str, Any]]:
        yield from sorted((name, key) for name, key in self._bucket.keys.items() if "identities" not in name)

    def count(self) -> int:
        return len(list(self._objects()))

    def fill(self) -> int:
        self.is_full = True
        return 0

    def drain(self) -> int:
        """Ends what ``fill`` has begun."""
        self.is_full = False
        return 0

    def empty(self) -> int:
        """Deletes every object."""
        names = list(self._bucket.keys)
        for name in names:
            self._bucket.keys.pop(name)
        return len(names)

    def corrupt(self) -> int:
        """Changes bytes of every object."""
        count = 0
        for _, key in self._objects():
            raw = bytearray(key.value)
            raw[3::1024] = bytes(byte ^ 0x5A for byte in raw[3::1024])
            key.value = bytes(raw)
            count += 1
        return count

    def exchange(self) -> int:
        """Gives each object the bytes of the next one, and the last those of the first."""
        found = list(self._objects())
        values = [key.value for _, key in found]
        for (_, key), value in zip(found, [*values[1:], *values[:1]], strict=True):
            key.value = value
        return len(found)


def main() -> None:
    server = Server(int(sys.argv[1]), sys.argv[2])
    commands = {each.__name__: each for each in (server.count, server.fill, server.drain, server.empty)}
    commands |= {each.__name__: each for each in (server.corrupt, server.exchange)}
    print("ready", flush=True)
    for line in sys.stdin:
        print(commands[json.loads(line)["do"]](), flush=True)


if __name__ == "__main__":
    main()

"""Programs that stores consist of, and that change what is stored there: ``python -m demo.store_programs KIND FD``.

See ``process.serve``: the first line of standard input has the arguments of the class. Each reply is the number of
values that were changed.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from demo.process import HOST, Served, serve
from demo.stores import changed

LOCAL_BUFFER_BYTES = 64 << 20
FILLER_BYTES = 2 << 20
REGION = "us-east-1"
_FULL = b"<?xml version='1.0'?><Error><Code>QuotaExceeded</Code><Message>the bucket is full</Message></Error>"


class MooncakeMemory(Served):
    """Lends memory to a Mooncake Store. The end of this process is the end of the memory."""

    def __init__(self, master: str, segment_bytes: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store = MooncakeDistributedStore()
        self._num_fillers = segment_bytes // FILLER_BYTES
        code = self._store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, LOCAL_BUFFER_BYTES, "tcp", "", master)
        if code != 0:
            raise OSError(f"cannot join the store at {master}: error {code}")

    def corrupt(self, keys: list[str]) -> int:
        """Puts values of the same size with other bytes under ``keys``."""
        return sum(self._replace(key, changed(raw)) for key in keys if (raw := self._store.get(key)))

    def exchange(self, keys: list[str]) -> int:
        """Puts the value of the next key under each of ``keys``, and that of the first under the last."""
        values = [self._store.get(key) for key in keys]
        return sum(self._replace(key, raw) for key, raw in zip(keys, values[1:] + values[:1], strict=True) if raw)

    def fill(self, keys: list[str]) -> int:
        """Puts as much as the store has room for."""
        filler = os.urandom(FILLER_BYTES)
        return sum(self._store.put(f"filler/{i}", filler) == 0 for i in range(self._num_fillers))

    def drain(self, keys: list[str]) -> int:
        """Removes what ``fill`` has put."""
        return sum(self._store.remove(f"filler/{i}", True) == 0 for i in range(self._num_fillers))

    def _replace(self, key: str, raw: bytes) -> bool:
        self._store.remove(key, True)
        return bool(self._store.put(key, raw) == 0)

    def close(self) -> None:
        self._store.close()


class S3(Served):
    """moto, an S3 server for tests, with one bucket. While it is full, it answers every PUT of an object with the
    status 507. Objects whose names contain "identities" are left alone."""

    def __init__(self, port: int, bucket: str) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        from moto.s3.models import s3_backends
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        self._is_full = False
        self._app = DomainDispatcherApplication(create_backend_app)
        backend: Any = s3_backends["123456789012"]["aws"]
        self._bucket = backend.create_bucket(bucket, REGION)

        class Handler(WSGIRequestHandler):
            protocol_version = "HTTP/1.1"

        server = make_server(HOST, port, self._serve, threaded=True, request_handler=Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def _serve(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if self._is_full and environ["REQUEST_METHOD"] == "PUT":
            # A connection with an unread body cannot be used again.
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("507 Insufficient Storage", [("Content-Length", str(len(_FULL)))])
            return [_FULL]
        answer: Iterable[bytes] = self._app(environ, start_response)
        return answer

    def _objects(self) -> Iterator[Any]:
        """Yields the objects by name."""
        yield from (key for name, key in sorted(self._bucket.keys.items()) if "identities" not in name)

    def count(self) -> int:
        return len(list(self._objects()))

    def fill(self) -> int:
        self._is_full = True
        return 0

    def drain(self) -> int:
        """Ends what ``fill`` has begun."""
        self._is_full = False
        return 0

    def clear(self) -> int:
        """Deletes every object."""
        names = list(self._bucket.keys)
        for name in names:
            self._bucket.keys.pop(name)
        return len(names)

    def corrupt(self) -> int:
        """Changes bytes of every object."""
        return self._replace([changed(key.value) for key in self._objects()])

    def exchange(self) -> int:
        """Gives each object the bytes of the next one, and the last those of the first."""
        values = [key.value for key in self._objects()]
        return self._replace(values[1:] + values[:1])

    def _replace(self, values: list[bytes]) -> int:
        for key, value in zip(self._objects(), values, strict=True):
            key.value = value
        return len(values)


if __name__ == "__main__":
    serve({"mooncake": MooncakeMemory, "s3": S3}[sys.argv[1]])

"""Programs that stores consist of, and that change what is stored there: ``python -m demo.store_programs KIND FD``.

See ``process.serve``: the first line of standard input has the arguments of the class. Each reply is the number of
values that were changed.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from demo.process import HOST, Served, serve
from demo.stores import changed

LOCAL_BUFFER_BYTES = 64 << 20
REGION = "us-east-1"


class MooncakeMemory(Served):
    """Lends memory to a Mooncake Store. The end of this process is the end of the memory."""

    def __init__(self, master: str, segment_bytes: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store = MooncakeDistributedStore()
        code = self._store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, LOCAL_BUFFER_BYTES, "tcp", "", master)
        if code != 0:
            raise OSError(f"cannot join the store at {master}: error {code}")

    def corrupt(self, keys: list[str]) -> int:
        """Puts values of the same size with other bytes under ``keys``."""
        return sum(self._replace(key, changed(raw)) for key in keys if (raw := self._store.get(key)))

    def _replace(self, key: str, raw: bytes) -> bool:
        self._store.remove(key, True)
        return bool(self._store.put(key, raw) == 0)

    def close(self) -> None:
        self._store.close()


class S3(Served):
    """moto, an S3 server for tests, with one bucket. Objects whose names contain "identities" are left alone."""

    def __init__(self, port: int, bucket: str) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        from moto.s3.models import s3_backends
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        self._app = DomainDispatcherApplication(create_backend_app)
        backend: Any = s3_backends["123456789012"]["aws"]
        self._bucket = backend.create_bucket(bucket, REGION)

        class Handler(WSGIRequestHandler):
            protocol_version = "HTTP/1.1"

        server = make_server(HOST, port, self.answer, threaded=True, request_handler=Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()

    def answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answers a request, as a WSGI application."""
        answer: Iterable[bytes] = self._app(environ, start_response)
        return answer

    def _objects(self) -> Iterator[Any]:
        """Yields the objects by name."""
        yield from (key for name, key in sorted(self._bucket.keys.items()) if "identities" not in name)

    def corrupt(self) -> int:
        """Changes bytes of every object."""
        objects = list(self._objects())
        for each in objects:
            each.value = changed(each.value)
        return len(objects)


if __name__ == "__main__":
    serve({"mooncake": MooncakeMemory, "s3": S3}[sys.argv[1]])

"""moto with faults: ``python -m tests.tiers.object_store.moto_program FD``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from demo.process import serve
from demo.store_programs import S3

FULL = b"<?xml version='1.0'?><Error><Code>QuotaExceeded</Code><Message>the bucket is full</Message></Error>"


class FaultyS3(S3):
    """While it is full, it answers every PUT of an object with the status 507."""

    is_full = False

    def answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if self.is_full and environ["REQUEST_METHOD"] == "PUT":
            # A connection with an unread body cannot be used again.
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("507 Insufficient Storage", [("Content-Length", str(len(FULL)))])
            return [FULL]
        return super().answer(environ, start_response)

    def count(self) -> int:
        """Returns the number of objects."""
        return len(list(self._objects()))

    def fill(self) -> int:
        """Makes the store full."""
        self.is_full = True
        return 0

    def drain(self) -> int:
        """Ends what ``fill`` has begun."""
        self.is_full = False
        return 0

    def clear(self) -> int:
        """Deletes every object."""
        names = list(self._bucket.keys)
        for name in names:
            self._bucket.keys.pop(name)
        return len(names)

    def exchange(self) -> int:
        """Gives each object the bytes of the next one, and the last those of the first."""
        objects = list(self._objects())
        values = [each.value for each in objects]
        for each, value in zip(objects, values[1:] + values[:1], strict=True):
            each.value = value
        return len(objects)


if __name__ == "__main__":
    serve(FaultyS3)

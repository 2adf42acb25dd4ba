"""redis-py, with pipelines of a few values.

Arguments: COUNT BYTES URL.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import redis

from benchmarks.store_peers.loop import new_rows, serve
from kvoffload.abc import ByteArray

PIPELINE_BYTES = 4 << 20


def main() -> None:
    nbytes = int(sys.argv[2])
    server = redis.Redis.from_url(sys.argv[3])
    step = max(1, PIPELINE_BYTES // nbytes)

    def put(names: Sequence[str], rows: ByteArray) -> None:
        for at in range(0, len(names), step):
            pipeline = server.pipeline(transaction=False)
            for name, row in zip(names[at : at + step], rows[at : at + step], strict=True):
                pipeline.set(name, row.data, nx=True)
            assert all(pipeline.execute())

    def get(names: Sequence[str], rows: ByteArray) -> None:
        for at in range(0, len(names), step):
            pipeline = server.pipeline(transaction=False)
            for name in names[at : at + step]:
                pipeline.get(name)
            for row, value in zip(rows[at : at + step], pipeline.execute(), strict=True):
                row.data[:] = value

    serve(
        new_rows(int(sys.argv[1]), nbytes),
        {"put": put, "get": get, "remove": lambda names, rows: server.unlink(*names)},
    )


if __name__ == "__main__":
    main()

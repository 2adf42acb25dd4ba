"""Mooncake's own client, which moves all values with one call, between registered memory and the store.

Arguments: COUNT BYTES MASTER.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.store_peers.loop import new_rows, serve
from kvoffload.abc import ByteArray


def main() -> None:
    from mooncake.store import MooncakeDistributedStore

    rows = new_rows(int(sys.argv[1]), int(sys.argv[2]))
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", sys.argv[3]) == 0
    assert store.register_buffer(rows.ctypes.data, rows.nbytes) == 0

    def put(names: Sequence[str], rows: ByteArray) -> None:
        codes = store.batch_put_from(list(names), [row.ctypes.data for row in rows], [row.nbytes for row in rows])
        assert set(codes) == {0}

    def get(names: Sequence[str], rows: ByteArray) -> None:
        sizes = [row.nbytes for row in rows]
        assert store.batch_get_into(list(names), [row.ctypes.data for row in rows], sizes) == sizes

    serve(rows, {"put": put, "get": get, "remove": lambda names, rows: store.batch_remove(list(names), True)})


if __name__ == "__main__":
    main()

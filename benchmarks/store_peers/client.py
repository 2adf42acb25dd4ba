"""kvoffload's client of a store, without a tier: no process in between, no checksums.

Arguments: COUNT BYTES ENTRY, the entry of the tier as JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence

from benchmarks.store_peers.loop import new_rows, serve
from kvoffload.abc import ByteArray
from kvoffload.tiers.config import load_tiers
from kvoffload.tiers.remote.client import Outcome
from kvoffload.tiers.remote.config import RemoteTierConfig

CALL_BYTES = 64 << 20
"""Bytes of one call, as those of the tier."""


def main() -> None:
    rows = new_rows(int(sys.argv[1]), int(sys.argv[2]))
    (config,) = load_tiers([json.loads(sys.argv[3])])
    assert isinstance(config, RemoteTierConfig)
    module, _, name = config.connect.partition(":")
    client = getattr(importlib.import_module(module), name)(config.settings())
    client.register(rows.reshape(-1))

    def move(call: Callable[..., Sequence[Outcome]], names: Sequence[str], rows: ByteArray) -> None:
        step = max(1, min(64, CALL_BYTES // rows.shape[1]))
        for at in range(0, len(names), step):
            assert set(call(names[at : at + step], [[row] for row in rows[at : at + step]])) == {Outcome.OK}

    serve(
        rows,
        {
            "put": lambda names, rows: move(client.put, names, rows),
            "get": lambda names, rows: move(client.get, names, rows),
            "remove": lambda names, rows: client.remove(names),
        },
    )


if __name__ == "__main__":
    main()

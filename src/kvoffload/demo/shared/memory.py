"""A process that lends memory to a Mooncake Store, and changes what is stored there.

Run as ``python -m kvoffload.demo.shared.memory MASTER SEGMENT_BYTES``. When it serves, it writes a line to standard
output, and then one line per line of its input, ``{"do": NAME, "keys": [...]}``: the number of values that it has
changed. Its end is the end of the memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

LOCAL_BUFFER_BYTES = 64 << 20
FILLER_BYTES = 2 << 20


def main() -> None:
    # The client writes to standard output, too.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    from mooncake.store import MooncakeDistributedStore

    master, segment_bytes = sys.argv[1], int(sys.argv[2])
    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, LOCAL_BUFFER_BYTES, "tcp", "", master)
    if code != 0:
        sys.exit(f"cannot join the store at {master}: error {code}")
    out.write("ready\n")
    for line in sys.stdin:
        command = json.loads(line)
        out.write(f"{json.dumps(_COMMANDS[command['do']](store, command['keys'], segment_bytes))}\n")
    with contextlib.suppress(Exception):
        store.close()


def _corrupt(store: Any, keys: list[str], segment_bytes: int) -> int:
    """Puts values of the same size with other bytes under ``keys``."""
    changed = 0
    for key in keys:
        raw = bytearray(store.get(key))
        if raw:
            raw[3::1024] = bytes(byte ^ 0x5A for byte in raw[3::1024])
            changed += _replace(store, key, bytes(raw))
    return changed


def _exchange(store: Any, keys: list[str], segment_bytes: int) -> int:
    """Puts the value of the next key under each of ``keys``, and that of the first under the last."""
    values = [store.get(key) for key in keys]
    following = [*values[1:], *values[:1]]
    return sum(_replace(store, key, raw) for key, raw in zip(keys, following, strict=True) if raw)


def _fill(store: Any, keys: list[str], segment_bytes: int) -> int:
    """Puts as much as the store has room for."""
    filler = os.urandom(FILLER_BYTES)
    return sum(store.put(f"filler/{i}", filler) == 0 for i in range(segment_bytes // FILLER_BYTES))


def _empty(store: Any, keys: list[str], segment_bytes: int) -> int:
    """Removes what ``fill`` has put."""
    count = segment_bytes // FILLER_BYTES
    return sum(store.remove(f"filler/{i}", True) == 0 for i in range(count))


def _replace(store: Any, key: str, raw: bytes) -> bool:
    store.remove(key, True)
    return bool(store.put(key, raw) == 0)


_COMMANDS = {"corrupt": _corrupt, "exchange": _exchange, "fill": _fill, "empty": _empty}


if __name__ == "__main__":
    main()

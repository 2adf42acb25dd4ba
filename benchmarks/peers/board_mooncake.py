"""A Mooncake Store for the board: its master, and a process that owns the memory and can flip bits in it.

``python -m benchmarks.peers.board_mooncake MASTER SEGMENT_BYTES`` is that process. It writes a line when it serves, and
then the number of flipped bits for each line of its input, which has the keys of the values, as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.peers import faults
from kvoffload.demo.shared.processes import kill

HOST = "127.0.0.1"
LOCAL_BUFFER_BYTES = 64 << 20
START_DEADLINE_S = 30.0
FLIP_DEADLINE_S = 60.0
CLIENT_TTL_S = 2


class MooncakeStore:
    """``mooncake_master`` and the owner of the memory, on ports that stay the same."""

    def __init__(self, logs: Path, ports: list[int]) -> None:
        self._logs = logs
        self._port, self._admin_port = ports
        self._master: subprocess.Popen[bytes] | None = None
        self._owner: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        return f"{HOST}:{self._port}"

    def start(self, segment_bytes: int) -> None:
        """Starts both, with nothing stored. Raises TimeoutError if they do not come up."""
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None
        assert spec.origin is not None
        with (self._logs / "mooncake-master.log").open("ab") as log:
            self._master = subprocess.Popen(
                [
                    str(Path(spec.origin).with_name("mooncake_master")),
                    f"-rpc_port={self._port}",
                    f"-metrics_port={self._admin_port}",
                    f"-client_ttl={CLIENT_TTL_S}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_DEADLINE_S
        while True:
            try:
                self._admin("/health")
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise TimeoutError("mooncake_master does not start") from error
                time.sleep(0.1)
        with (self._logs / "mooncake-owner.log").open("ab") as log:
            self._owner = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.peers.board_mooncake", self.address, str(segment_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                cwd=Path(__file__).parents[2],
            )
        self._reply(START_DEADLINE_S)

    def flip(self) -> int:
        """Flips one bit in every 64 KiB of every value. Returns the number of flipped bits."""
        assert self._owner is not None
        assert self._owner.stdin is not None
        self._owner.stdin.write(json.dumps(self.keys()) + "\n")
        self._owner.stdin.flush()
        return int(self._reply(FLIP_DEADLINE_S))

    def keys(self) -> list[str]:
        return sorted(self._admin("/get_all_keys").split())

    def kill(self) -> None:
        """Kills both. What is stored is lost."""
        for child in (self._owner, self._master):
            if child is not None:
                kill(child)
        self._owner = self._master = None

    def _admin(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{HOST}:{self._admin_port}{path}", timeout=5) as answer:
            return str(answer.read().decode())

    def _reply(self, deadline_s: float) -> str:
        assert self._owner is not None
        assert self._owner.stdout is not None
        if not select.select([self._owner.stdout], [], [], deadline_s)[0]:
            raise TimeoutError("the process with the store's memory does not answer")
        line = self._owner.stdout.readline()
        if not line:
            raise TimeoutError(f"the process with the store's memory has ended; see {self._logs}")
        return line.strip()


def _flip(store: Any, key: str) -> int:
    """Puts the value of ``key`` again, with one bit in every 64 KiB flipped."""
    raw = bytearray(store.get(key))
    if not raw:
        return 0
    flipped = faults.flip_bytes(memoryview(raw))
    store.remove(key, True)
    return flipped if store.put(key, bytes(raw)) == 0 else 0


def main() -> None:
    # The client writes to standard output, too.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    from mooncake.store import MooncakeDistributedStore

    master, segment_bytes = sys.argv[1], int(sys.argv[2])
    store = MooncakeDistributedStore()
    code = store.setup(HOST, "P2PHANDSHAKE", segment_bytes, LOCAL_BUFFER_BYTES, "tcp", "", master)
    if code != 0:
        sys.exit(f"cannot join the store at {master}: error {code}")
    out.write("ready\n")
    for line in sys.stdin:
        out.write(f"{sum(_flip(store, key) for key in json.loads(line))}\n")


if __name__ == "__main__":
    main()

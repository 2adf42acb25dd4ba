"""MooncakeClient: a Mooncake Store as a StoreClient. It runs in the client's process."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from kvoffload.abc import ByteArray
from kvoffload.tiers.mooncake.listening import listening_only_on
from kvoffload.tiers.remote.client import Outcome, StoreClient, StoreError
from kvoffload.tiers.remote.record import RECORD_BYTES

LOCAL_BUFFER_BYTES = 16 << 20
"""The client's own staging memory, which transfers of registered memory do not use."""
CONNECT_TIMEOUT_S = 2.0
AWAY_S = 5.0
"""A value that could not be moved, although others could within this time, is not asked for again for so long. Until
the master notices that a node is gone, it says that the node's values are there, and each attempt takes a second."""
MAX_AWAY = 1 << 14
"""Values of which that is remembered; the oldest are asked for again."""

# Error codes of the store.
_FULL = (-200, -101, -10, -1700)
"""No segment has room, there is no segment, or no staging memory; or the quota of the tenant is used up."""
_MISSING = (-703, -704, -710, -712)
"""The value is not complete, not there, or its replica is gone."""
_HELD = -705
_NOT_MOVED = -800
_MAY_BE_OTHER_SIZE = (-600, _NOT_MOVED)


def connect(settings: Mapping[str, Any]) -> MooncakeClient:
    """Joins the store and returns its client. ``settings``: the fields of MooncakeConfig; ``segment_bytes`` is the
    share of this client. Raises StoreError if the store cannot be reached."""
    host, _, port = settings["master"].rpartition(":")
    try:
        # The store's client tries for more than a minute, which the deadline of the start would end.
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise StoreError(f"the master at {settings['master']} cannot be reached ({error})") from error
    os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise StoreError(f"its client cannot be loaded ({error}); docs/shared.md says what it needs") from error
    store = MooncakeDistributedStore()
    code, advice = -1, ""
    try:
        with listening_only_on(settings["host"]):
            code = store.setup(
                settings["host"],
                settings["metadata"],
                settings["segment_bytes"],
                LOCAL_BUFFER_BYTES,
                settings["protocol"],
                settings["devices"],
                settings["master"],
            )
    except OSError as error:
        advice = f"its client listens on all addresses of this machine ({error}); close its ports to other networks"
    if code:
        raise StoreError(f"the store at {settings['master']} cannot be joined (code {code})")
    return MooncakeClient(store, settings["protocol"], advice)


class MooncakeClient(StoreClient):
    """Values in ``store``, a MooncakeDistributedStore after its setup."""

    registers_memory = True

    def __init__(self, store: Any, protocol: str, advice: str = "") -> None:
        self._store = store
        self._advice = advice
        # A caller spins until its transfers have ended. Over TCP one thread of the client moves all bytes, so a second
        # call at the same time would gain nothing, and take a core from it.
        new = threading.Lock if protocol == "tcp" else contextlib.nullcontext[Any]
        self._getting: contextlib.AbstractContextManager[Any] = new()
        self._putting: contextlib.AbstractContextManager[Any] = new()
        self._moved_at = -math.inf
        """When a value was last moved."""
        self._away: OrderedDict[str, float] = OrderedDict()
        """Until when each value is not asked for, the oldest first."""
        self._lock = threading.Lock()

    def register(self, memory: ByteArray) -> None:
        code = self._store.register_buffer(memory.ctypes.data, memory.nbytes)
        if code:
            raise StoreError(f"{memory.nbytes} bytes of memory cannot be registered (code {code})")

    def exists(self, names: Sequence[str]) -> list[Outcome]:
        answers = {1: Outcome.OK, 0: Outcome.MISSING}
        codes = self._store.batch_is_exist(list(names))
        return self._but_away(names, [answers.get(code, Outcome.FAILED) for code in codes], Outcome.OK)

    def _but_away(self, names: Sequence[str], outcomes: list[Outcome], is_there: Outcome) -> list[Outcome]:
        """Returns ``outcomes``, with AWAY in place of ``is_there`` for values that could not be moved just now."""
        now = time.monotonic()
        return [
            Outcome.AWAY if outcome is is_there and self._away.get(name, now) > now else outcome
            for name, outcome in zip(names, outcomes, strict=True)
        ]

    def _note(self, names: Sequence[str], codes: Sequence[int], outcomes: list[Outcome]) -> list[Outcome]:
        """Takes in a transfer. Returns ``outcomes``, with AWAY for values of nodes that are gone, while others work."""
        now = time.monotonic()
        if Outcome.OK in outcomes:
            self._moved_at = now
        if now - self._moved_at < AWAY_S:
            for i, code in enumerate(codes):
                if code == _NOT_MOVED and outcomes[i] is Outcome.FAILED:
                    outcomes[i] = Outcome.AWAY
                    with self._lock:
                        self._away.pop(names[i], None)
                        self._away[names[i]] = now + AWAY_S
                        if len(self._away) > MAX_AWAY:
                            self._away.popitem(last=False)
        return outcomes

    def get(self, names: Sequence[str], buffers: Sequence[Sequence[ByteArray]]) -> list[Outcome]:
        rows = [row for (row,) in buffers]
        pointers, sizes = [row.ctypes.data for row in rows], [row.nbytes for row in rows]
        with self._getting:
            codes = self._store.batch_get_into(list(names), pointers, sizes)
        outcomes = [self._get_outcome(name, code, row) for name, code, row in zip(names, codes, rows, strict=True)]
        return self._note(names, codes, outcomes)

    def _get_outcome(self, name: str, code: int, row: ByteArray) -> Outcome:
        size = row.nbytes
        if code == size:
            return Outcome.OK
        if 0 < code < size:
            return Outcome.OTHER_SIZE
        if code in _MISSING:
            return Outcome.MISSING
        held = self._store.get_size(name) if code in _MAY_BE_OTHER_SIZE else code
        if held < 0 or held == size:
            return Outcome.FAILED
        if held >= RECORD_BYTES:
            begin, ranges = [[[0]]], [[[RECORD_BYTES]]]
            with self._getting:
                self._store.get_into_ranges([row.ctypes.data], [[name]], begin, begin, ranges)
        return Outcome.OTHER_SIZE

    def put(self, names: Sequence[str], buffers: Sequence[Sequence[ByteArray]]) -> list[Outcome]:
        pointers, sizes = [[row.ctypes.data] for (row,) in buffers], [[row.nbytes] for (row,) in buffers]
        with self._putting:
            codes = self._store.batch_put_from_multi_buffers(list(names), pointers, sizes)
        outcomes = self._note(names, codes, [_put_outcome(code) for code in codes])
        return self._but_away(names, outcomes, Outcome.HELD)

    def remove(self, names: Sequence[str]) -> list[Outcome]:
        # Without force the store keeps values that were read within the last seconds.
        codes = self._store.batch_remove(list(names), True)
        return [Outcome.OK if code >= 0 else Outcome.MISSING if code in _MISSING else Outcome.FAILED for code in codes]

    def advice(self) -> str:
        return self._advice

    def close(self) -> None:
        self._store.close()


def _put_outcome(code: int) -> Outcome:
    if code == 0:
        return Outcome.OK
    if code == _HELD:
        return Outcome.HELD
    return Outcome.FULL if code in _FULL else Outcome.FAILED

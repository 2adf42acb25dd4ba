"""Checks a store that servers share: connection, speed, and whether values come back unchanged."""

from __future__ import annotations

import importlib
import secrets
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from kvoffload.abc import ByteArray
from kvoffload.doctor.configuration import PlannedTier
from kvoffload.doctor.findings import Figure, Level, Report
from kvoffload.printable import printable
from kvoffload.tiers.disk.storage import aligned_buffer
from kvoffload.tiers.remote.client import Outcome, StoreClient, StoreError
from kvoffload.tiers.remote.config import RemoteTierConfig
from kvoffload.tiers.remote.growth import GrowthWatch

FOLDER = "doctor"
"""Between the prefix of the store and the names of the doctor's values."""
VALUE_BYTES = 2 << 20
NUM_VALUES = 8
"""Values per call."""
ASKED, ASKED_S = 20, 1.0
"""Lookups whose time is measured, and the time after which there are no more."""
MAX_SEGMENT_BYTES = 64 << 20
"""Memory that the doctor contributes to a store to which a server would contribute."""
ROOM = {
    "mooncake": "set segment_bytes on servers, or run Mooncake's own store service on other nodes",
    "redis": "redis-cli CONFIG SET maxmemory-policy allkeys-lru, with a maxmemory that has room",
}
"""How a store gets room, by kind."""
OWN_BYTES = 96 << 20
"""Memory for the values, and for a client and its libraries."""
MAX_REASON = 1000
"""Characters of an error, a part of which the store may have written."""
SLOW_SHARE = 0.5
"""A round trip that takes more of the deadline for lookups than this is too slow for a busy server."""


def check(tier: PlannedTier, report: Report) -> None:
    """Reports findings about the store of ``tier``. Ends its process if the store makes it hold too much memory."""
    assert tier.store is not None
    check = _StoreCheck(tier, tier.store, report)
    try:
        with GrowthWatch(OWN_BYTES + tier.memory_bytes + tier.store.client_bytes) as watch, watch.asking():
            check.run()
    except StoreError as error:
        check.failed(str(error))
    except Exception as error:
        check.failed(f"{type(error).__name__}: {error}")


class _StoreCheck:
    def __init__(self, tier: PlannedTier, store: RemoteTierConfig, report: Report) -> None:
        self._tier = tier
        self._store = store
        self._report = report
        self._found = report.found
        self._settings = dict(store.settings())
        if self._settings.get("segment_bytes"):
            # Little, because values of others there are lost when the doctor leaves.
            self._settings["segment_bytes"] = min(self._settings["segment_bytes"], MAX_SEGMENT_BYTES)
        self._step = "connect"

    def run(self) -> None:
        """Raises StoreError if a whole call fails."""
        store = self._store
        self._report.stage(f"connects to {store.address}")
        module, _, name = store.connect.partition(":")
        connect: Callable[[Mapping[str, Any]], StoreClient] = getattr(importlib.import_module(module), name)
        begun = time.perf_counter()
        client = connect(self._settings)
        try:
            took = time.perf_counter() - begun
            self._found(
                "store.connects", Level.OK, f"connects to {store.address}", figures={"connect_ms": round(took * 1e3, 1)}
            )
            self._ask(client)
            advice = client.advice()
            if advice:
                text, _, fix = advice.partition("; ")
                self._found("store.advice", Level.WARNING, text, fix)
            self._move(client)
        finally:
            self._report.clean_up(f"leaves {store.address}")
            client.close()

    def failed(self, reason: str) -> None:
        """Reports that the store cannot be used."""
        text = f"cannot {self._step}: {printable(reason, MAX_REASON)}"
        entry = self._tier.prefix.rstrip(".")
        fix = f"see that the store runs and that this machine reaches it; correct {entry} or its credentials"
        if self._step != "connect":
            fix = "give this server's user the right to do that in the store, and look at the store's own log"
        self._found(f"store.{self._step}_fails", Level.PROBLEM, text, fix)

    def _ask(self, client: StoreClient) -> None:
        self._step = "ask"
        self._report.stage(f"asks {self._store.address} for a value")
        times: list[float] = []
        deadline = time.perf_counter() + ASKED_S
        while len(times) < ASKED and (not times or time.perf_counter() < deadline):
            begun = time.perf_counter()
            outcome = client.exists([self._name()])[0]
            times.append(time.perf_counter() - begun)
            if outcome in (Outcome.FAILED, Outcome.AWAY):
                raise StoreError("it did not answer, or refused to say whether it has a value")
        deadline_ms = self._tier.lookup_deadline_ms
        p50_ms = statistics.median(times) * 1e3
        text = f"round trip {p50_ms:.2f} ms (p50 of {len(times)} lookups)"
        figures: dict[str, Figure] = {"round_trip_p50_ms": round(p50_ms, 3), "round_trip_max_ms": max(times) * 1e3}
        if p50_ms > deadline_ms * SLOW_SHARE:
            text += f", and its lookup_deadline_ms is {deadline_ms:g}: many lookups will be misses"
            wanted = max(deadline_ms, p50_ms) * 4
            fix = f"set {self._tier.prefix}lookup_deadline_ms to {wanted:.0f}, or use a store that is nearer"
            self._found("store.round_trip", Level.WARNING, text, fix, figures=figures)
        else:
            self._found("store.round_trip", Level.OK, text, figures=figures)

    def _move(self, client: StoreClient) -> None:
        memory = aligned_buffer(2 * NUM_VALUES * VALUE_BYTES)
        client.register(memory)
        sent, got = memory.reshape(2, NUM_VALUES, VALUE_BYTES)
        sent[:] = np.random.default_rng().integers(0, 256, sent.shape, dtype=np.uint8)
        names = [self._name() for _ in range(NUM_VALUES)]
        try:
            self._step = "put"
            self._report.stage(f"puts values of 2 MiB under {self._folder} into {self._store.address}")
            # One first: a client may still have to connect to other nodes.
            names.append(self._name())
            if not self._put(client, names[-1:], sent[:1]):
                return
            begun = time.perf_counter()
            if not self._put(client, names[:NUM_VALUES], sent):
                return
            put_rate = sent.size / (time.perf_counter() - begun)
            self._step = "get"
            self._report.stage(f"gets values of 2 MiB from {self._store.address}")
            self._get(client, names[-1:], got[:1])
            begun = time.perf_counter()
            self._get(client, names[:NUM_VALUES], got)
            get_rate = got.size / (time.perf_counter() - begun)
            if (sent != got).any():
                text = f"{self._store.address} gives back other bytes than were put"
                fix = "look for a proxy, or for a bug of the store; kvoffload would count bad blocks and pause it"
                self._found("store.other_bytes", Level.PROBLEM, text, fix)
                return
            text = f"puts {put_rate / 1e9:.2f} GB/s, gets {get_rate / 1e9:.2f} GB/s in values of 2 MiB"
            if self._settings.get("segment_bytes"):
                text += "; some of the values may be in this machine's own memory"
            figures: dict[str, Figure] = {"put_bytes_per_s": round(put_rate), "get_bytes_per_s": round(get_rate)}
            self._found("store.speed", Level.OK, text, figures=figures)
        finally:
            self._report.clean_up(f"removes its values from {self._store.address}")
            self._remove(client, names)

    def _put(self, client: StoreClient, names: Sequence[str], values: ByteArray) -> bool:
        """Returns whether the store has room. Raises StoreError."""
        outcomes = client.put(names, [[value] for value in values])
        if Outcome.FULL in outcomes:
            text = f"{self._store.address} has no room: nothing new would be written"
            fix = ROOM.get(self._store.kind, "give the store room, or let it evict")
            self._found("store.full", Level.PROBLEM, text, fix)
            return False
        if any(outcome is not Outcome.OK for outcome in outcomes):
            raise StoreError("it did not store a value")
        return True

    def _get(self, client: StoreClient, names: Sequence[str], values: ByteArray) -> None:
        """Raises StoreError."""
        outcomes = client.get(names, [[value] for value in values])
        if any(outcome is not Outcome.OK for outcome in outcomes):
            lost = ", ".join(sorted({outcome.name for outcome in outcomes} - {Outcome.OK.name}))
            raise StoreError(f"a value that was just put is {lost}")

    def _remove(self, client: StoreClient, names: Sequence[str]) -> None:
        outcomes: Sequence[Outcome] = [Outcome.FAILED]
        with suppress(Exception):
            outcomes = client.remove(names)
        if {Outcome.FAILED, Outcome.AWAY}.intersection(outcomes):
            text = f"values of the doctor are left under {self._folder}"
            fix = "give this server's user the right to remove values, and remove them"
            self._found("store.not_removed", Level.WARNING, text, fix)

    @property
    def _folder(self) -> str:
        return f"{self._store.prefix}/{FOLDER}/"

    def _name(self) -> str:
        return self._folder + secrets.token_hex(16)

"""Checks a store that servers share: connection, speed, and whether values come back unchanged."""

from __future__ import annotations

import email.utils
import http.client
import importlib
import secrets
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from kvoffload.abc import ByteArray
from kvoffload.doctor.configuration import PlannedTier, Store, tier_from_dict
from kvoffload.doctor.findings import Figure, Level
from kvoffload.doctor.process import Report
from kvoffload.printable import printable
from kvoffload.tiers.disk.storage import aligned_buffer
from kvoffload.tiers.remote.client import Outcome, StoreClient, StoreError
from kvoffload.tiers.remote.growth import GrowthWatch

FOLDER = "doctor"
"""Between the prefix of the store and the names of the doctor's values."""
VALUE_BYTES = 2 << 20
NUM_VALUES = 8
"""Values per call."""
MAX_ROUNDS = 8
"""Calls that are measured, in each direction."""
ASKED = 20
"""Lookups whose time is measured."""
ROOM = {
    "mooncake": "set segment_bytes on servers, or run Mooncake's own store service on other nodes",
    "redis": "redis-cli CONFIG SET maxmemory-policy allkeys-lru, with a maxmemory that has room",
}
"""How a store gets room, by kind."""
OWN_BYTES = 96 << 20
"""Memory for the values, and for a client and its libraries."""
MAX_REASON = 1000
"""Characters of an error, a part of which the store may have written."""
HTTP_TIMEOUT_S = 2.0
SLOW_SHARE = 0.5
"""A round trip that takes more of the deadline for lookups than this is too slow for a busy server."""


def check(arguments: Mapping[str, Any], report: Report) -> None:
    """Reports findings, and the facts "read_bytes_per_s", "write_bytes_per_s" and "clock_offset_s". ``arguments``:
    "tier", and "seconds" per measurement. Ends its process if the store makes it hold too much memory."""
    tier = tier_from_dict(arguments["tier"])
    report.tier = tier.name
    assert tier.store is not None
    check = _StoreCheck(tier, tier.store, report, arguments["seconds"])
    try:
        with GrowthWatch(OWN_BYTES + tier.memory_bytes + tier.store.client_bytes) as watch, watch.asking():
            check.run()
    except StoreError as error:
        check.failed(str(error))
    except Exception as error:
        check.failed(f"{type(error).__name__}: {error}")


class _StoreCheck:
    """The checks of one store."""

    def __init__(self, tier: PlannedTier, store: Store, report: Report, seconds: float) -> None:
        self._tier = tier
        self._store = store
        self._report = report
        self._found = report.found
        self._seconds = seconds
        self._step = "connect"
        self._has_left_values = False

    def run(self) -> None:
        """Raises StoreError if a whole call fails."""
        store = self._store
        self._report.stage(f"connects to {store.address}")
        module, _, name = store.client.partition(":")
        connect: Callable[[Mapping[str, Any]], StoreClient] = getattr(importlib.import_module(module), name)
        begun = time.perf_counter()
        client = connect(store.settings)
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
            self._ask_for_the_time()
        finally:
            self._report.stage(f"leaves {store.address}")
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
        deadline = time.perf_counter() + max(self._seconds, 0.05)
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
        names: list[str] = []
        try:
            self._step = "put"
            self._report.stage(f"puts values of 2 MiB under {self._folder} into {self._store.address}")
            put_rate = self._put_for_a_while(client, names, sent)
            if put_rate is None:
                return
            self._report.fact("write_bytes_per_s", put_rate)
            self._step = "get"
            self._report.stage(f"gets values of 2 MiB from {self._store.address}")
            get_rate = self._get_for_a_while(client, names[-NUM_VALUES:], got)
            if (sent != got).any():
                text = f"{self._store.address} gives back other bytes than were put"
                fix = "look for a proxy, or for a bug of the store; kvoffload would count bad blocks and pause it"
                self._found("store.other_bytes", Level.PROBLEM, text, fix)
                return
            text = f"puts {put_rate / 1e9:.2f} GB/s, gets {get_rate / 1e9:.2f} GB/s in values of 2 MiB"
            if self._store.settings.get("segment_bytes"):
                text += "; some of the values may be in this machine's own memory"
            figures: dict[str, Figure] = {
                "put_bytes_per_s": round(put_rate),
                "get_bytes_per_s": round(get_rate),
                "value_bytes": VALUE_BYTES,
            }
            self._found("store.speed", Level.OK, text, figures=figures)
            self._report.fact("read_bytes_per_s", get_rate)
        finally:
            self._report.stage(f"removes its values from {self._store.address}")
            self._remove(client, names)

    def _put_for_a_while(self, client: StoreClient, names: list[str], values: ByteArray) -> float | None:
        """Puts ``values`` again and again under new names. ``names`` has the values that the store may have, at most
        two rounds, so that the store evicts few values of others. Returns the bytes per second, or None if the store
        has no room. Raises StoreError."""
        # One first: a client may still have to connect to other nodes.
        names.append(self._name())
        if not self._put(client, names, values[:1]):
            self._full()
            return None
        rounds, passed = 0, 0.0
        while rounds == 0 or (rounds < MAX_ROUNDS and passed < self._seconds):
            fresh, old = [self._name() for _ in values], list(names)
            names += fresh
            begun = time.perf_counter()
            if not self._put(client, fresh, values):
                self._full()
                return None
            passed += time.perf_counter() - begun
            rounds += 1
            self._remove(client, old)
            del names[: len(old)]
        return rounds * values.size / passed

    def _get_for_a_while(self, client: StoreClient, names: Sequence[str], values: ByteArray) -> float:
        """Gets ``values`` again and again. Returns the bytes per second. Raises StoreError."""
        rounds, begun = 0, time.perf_counter()
        while rounds == 0 or (rounds < MAX_ROUNDS and time.perf_counter() - begun < self._seconds):
            self._get(client, names, values)
            rounds += 1
        return rounds * values.size / (time.perf_counter() - begun)

    def _put(self, client: StoreClient, names: Sequence[str], values: ByteArray) -> bool:
        """Returns whether the store has room. Raises StoreError."""
        with self._report.whole():
            outcomes = client.put(names, [[value] for value in values])
        if Outcome.FULL not in outcomes and any(outcome is not Outcome.OK for outcome in outcomes):
            raise StoreError("it did not store a value")
        return Outcome.FULL not in outcomes

    def _full(self) -> None:
        text = f"{self._store.address} has no room: nothing new would be written"
        fix = ROOM.get(self._tier.kind, "give the store room, or let it evict")
        self._found("store.full", Level.PROBLEM, text, fix)

    def _get(self, client: StoreClient, names: Sequence[str], values: ByteArray) -> None:
        """Raises StoreError."""
        outcomes = client.get(names, [[value] for value in values])
        if any(outcome is not Outcome.OK for outcome in outcomes):
            lost = ", ".join(sorted({outcome.name for outcome in outcomes} - {Outcome.OK.name}))
            raise StoreError(f"a value that was just put is {lost}")

    def _ask_for_the_time(self) -> None:
        url = _http_address(self._store.settings)
        if url is not None:
            self._report.stage(f"asks {url} for the time")
            # OverflowError: a date beyond all calendars.
            with suppress(OSError, ValueError, OverflowError, http.client.HTTPException):
                self._report.fact("clock_offset_s", _http_offset(url))

    def _remove(self, client: StoreClient, names: Sequence[str]) -> None:
        outcomes: Sequence[Outcome] = [Outcome.FAILED]
        with suppress(Exception):
            outcomes = client.remove(names)
        if {Outcome.FAILED, Outcome.AWAY}.intersection(outcomes) and not self._has_left_values:
            self._has_left_values = True
            text = f"values of the doctor are left under {self._folder}"
            fix = "give this server's user the right to remove values, and remove them"
            self._found("store.not_removed", Level.WARNING, text, fix)

    @property
    def _folder(self) -> str:
        return f"{self._store.prefix}/{FOLDER}/"

    def _name(self) -> str:
        return self._folder + secrets.token_hex(16)


def _http_address(settings: Mapping[str, Any]) -> str | None:
    """Returns the first setting that is the address of an HTTP server."""
    return next(
        (value for value in settings.values() if isinstance(value, str) and value.startswith(("http://", "https://"))),
        None,
    )


def _http_offset(url: str) -> float:
    """Returns the seconds by which an HTTP server's clock is ahead, from the header of any answer."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=HTTP_TIMEOUT_S)
    try:
        connection.request("HEAD", "/")
        answer = connection.getresponse()
        date = answer.getheader("Date")
        if date is None:
            raise ValueError("no date")
        return email.utils.parsedate_to_datetime(date).timestamp() - time.time()
    finally:
        connection.close()

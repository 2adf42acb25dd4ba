"""Checks a store that servers share: whether it can be reached, how fast it is, and whether it keeps what is put."""

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
from kvoffload.doctor.configuration import PlannedTier, Store, tier_from_dict
from kvoffload.doctor.findings import Area, Figure, Finding, Level
from kvoffload.doctor.process import Report
from kvoffload.tiers.remote.client import Outcome, StoreClient, StoreError
from kvoffload.tiers.shared_dir.seats import aligned_buffer
from kvoffload.units import milliseconds

FOLDER = "doctor"
"""Between the prefix of the store and the names of the doctor's values."""
VALUE_BYTES = 2 << 20
NUM_VALUES = 8
ASKED = 20
"""Lookups whose time is measured."""
SLOW_SHARE = 0.5
"""A round trip that takes more of the deadline for lookups than this is too slow for a busy server."""


def check(arguments: Mapping[str, Any], report: Report) -> None:
    """Reports findings, and the facts "read_bytes_per_s" and "write_bytes_per_s". ``arguments``: "tier", and "seconds"
    per measurement."""
    tier = tier_from_dict(arguments["tier"])
    assert tier.store is not None
    check = _StoreCheck(tier, tier.store, report, arguments["seconds"])
    try:
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
        self._seconds = seconds
        self._step = "connect"

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
            self._move(client)
        finally:
            self._report.stage(f"leaves {store.address}")
            client.close()

    def failed(self, reason: str) -> None:
        """Reports that the store cannot be used."""
        text = f"{self._store.address}: cannot {self._step} ({reason})"
        fix = f"start the store, and correct the address, user or password in {self._tier.prefix.rstrip('.')}"
        if self._step != "connect":
            fix = "give this server's user the right to do that in the store, and look at the store's own log"
        self._found(f"store.{self._step}_fails", Level.PROBLEM, text, fix)

    def _found(
        self, id: str, level: Level, text: str, fix: str = "", figures: Mapping[str, Figure] | None = None
    ) -> None:
        self._report.finding(Finding(id, level, Area.TIER, text, fix, self._tier.name, figures or {}))

    def _ask(self, client: StoreClient) -> None:
        self._step = "ask"
        self._report.stage(f"asks {self._store.address} for a value")
        times: list[float] = []
        deadline = time.perf_counter() + max(self._seconds, 0.05)
        while len(times) < ASKED and (not times or time.perf_counter() < deadline):
            begun = time.perf_counter()
            outcome = client.exists([self._name()])[0]
            times.append(time.perf_counter() - begun)
            if outcome is Outcome.FAILED:
                raise StoreError("it did not answer, or refused to say whether it has a value")
        deadline_ms = self._tier.lookup_deadline_ms
        p50_ms = statistics.median(times) * 1e3
        text = f"round trip {milliseconds(p50_ms)} (p50 of {len(times)} lookups)"
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
        self._step = "put"
        try:
            self._report.stage(f"puts values of 2 MiB, {names[0]} and others, into {self._store.address}")
            # One first: a client may still have to connect to other nodes.
            if self._put(client, names[:1], sent[:1]) is None:
                return
            put_rate = self._put(client, names[1:], sent[1:])
            if put_rate is None:
                return
            self._report.fact("write_bytes_per_s", put_rate)
            self._step = "get"
            self._report.stage(f"gets values of 2 MiB from {self._store.address}")
            get_rate = self._get(client, names, got)
            if (sent != got).any():
                text = f"{self._store.address}: gives back other bytes than were put"
                fix = "look for a proxy, or for a bug of the store; kvoffload would count bad blocks and pause it"
                self._found("store.other_bytes", Level.PROBLEM, text, fix)
                return
            self._report.fact("read_bytes_per_s", get_rate)
            text = f"puts {put_rate / 1e9:.2f} GB/s, gets {get_rate / 1e9:.2f} GB/s in values of 2 MiB"
            figures: dict[str, Figure] = {
                "put_bytes_per_s": round(put_rate),
                "get_bytes_per_s": round(get_rate),
                "value_bytes": VALUE_BYTES,
            }
            self._found("store.speed", Level.OK, text, figures=figures)
        finally:
            self._remove(client, names)

    def _put(self, client: StoreClient, names: Sequence[str], values: ByteArray) -> float | None:
        """Returns the bytes per second, or None if the store has no room. Raises StoreError."""
        begun = time.perf_counter()
        outcomes = client.put(names, [[value] for value in values])
        passed = time.perf_counter() - begun
        if Outcome.FULL in outcomes:
            text = f"{self._store.address}: has no room; nothing new would be written"
            fix = "give the store memory, or let it evict"
            if self._tier.kind == "mooncake":
                fix = "set segment_bytes on servers, or run Mooncake's own store service on other nodes"
            elif self._tier.kind == "redis":
                fix = "redis-cli CONFIG SET maxmemory-policy allkeys-lru, and a maxmemory with room"
            self._found("store.full", Level.PROBLEM, text, fix)
            return None
        if any(outcome is not Outcome.OK for outcome in outcomes):
            raise StoreError("it did not store the value")
        return values.size / passed

    def _get(self, client: StoreClient, names: Sequence[str], values: ByteArray) -> float:
        """Returns the bytes per second. Raises StoreError."""
        begun = time.perf_counter()
        outcomes = client.get(names, [[value] for value in values])
        passed = time.perf_counter() - begun
        if any(outcome is not Outcome.OK for outcome in outcomes):
            lost = ", ".join(sorted({outcome.name for outcome in outcomes} - {Outcome.OK.name}))
            raise StoreError(f"values that were just put: {lost}")
        return values.size / passed

    def _remove(self, client: StoreClient, names: Sequence[str]) -> None:
        self._report.stage(f"removes its values from {self._store.address}")
        outcomes: Sequence[Outcome] = [Outcome.FAILED]
        with suppress(Exception):
            outcomes = client.remove(names)
        if Outcome.FAILED in outcomes:
            folder = f"{self._store.prefix}/{FOLDER}/"
            text = f"{self._store.address}: values of the doctor are left under {folder}"
            fix = "give this server's user the right to remove values, and remove them"
            self._found("store.not_removed", Level.WARNING, text, fix)

    def _name(self) -> str:
        return f"{self._store.prefix}/{FOLDER}/{secrets.token_hex(16)}"

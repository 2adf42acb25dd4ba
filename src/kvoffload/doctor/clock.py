"""Checks the clocks: whether reading one is cheap, and whether the time of day is right."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvoffload.doctor.configuration import Plan
from kvoffload.doctor.findings import Figure, Finding, Level
from kvoffload.doctor.process import Report

CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
SLOW_CALL_S = 2e-6
"""A server reads the clock several times per block."""
CALLS = 2000
STA_UNSYNC = 0x40
MAX_OFFSET_S = 300.0
"""TLS and the signatures of object stores fail from some minutes on."""
NOTABLE_OFFSET_S = 30.0
SIGNING_KINDS = ("object_store",)


class _Timex(ctypes.Structure):
    """The beginning of struct timex, with more than enough room for the rest."""

    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 512),
    ]


def is_synchronized() -> bool | None:
    """Returns whether the kernel says that its time of day is synchronized; None if it does not say."""
    state = _Timex()
    try:
        if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(state)) < 0:
            return None
    except (OSError, AttributeError):
        return None
    return not state.status & STA_UNSYNC


def check(arguments: Mapping[str, Any], report: Report) -> None:
    """Reports findings. ``arguments``: "plan", and "offsets": seconds by which media are ahead of this clock, by the
    name of the tier."""
    plan, offsets = Plan.from_dict(arguments["plan"]), arguments["offsets"]
    report.stage("reads the clocks")
    report.finding(monotonic_finding(_call_seconds()))
    needs_time = [
        tier.name for tier in plan.tiers if tier.store is not None and _needs_time(tier.kind, tier.store.settings)
    ]
    report.finding(*time_findings(is_synchronized(), offsets, needs_time))


def _call_seconds() -> float:
    """Returns the seconds that one reading of the monotonic clock takes."""
    best = float("inf")
    for _ in range(3):
        begun = time.perf_counter()
        for _ in range(CALLS):
            time.monotonic()
        best = min(best, (time.perf_counter() - begun) / CALLS)
    return best


def monotonic_finding(seconds: float) -> Finding:
    """Returns the finding about a monotonic clock whose reading takes so long."""
    source = ""
    with suppress(OSError):
        source = CLOCK_SOURCE.read_text().strip()
    figures: dict[str, Figure] = {"call_ns": round(seconds * 1e9), "source": source}
    if seconds > SLOW_CALL_S:
        text = f"reading the monotonic clock takes {seconds * 1e6:.1f} µs (clock source {source or 'unknown'})"
        fix = f"echo tsc > {CLOCK_SOURCE}, or choose another type of machine"
        return Finding("clock.slow", Level.WARNING, text, fix, figures=figures)
    text = f"the monotonic clock is cheap to read ({seconds * 1e9:.0f} ns)"
    return Finding("clock.monotonic", Level.OK, text, figures=figures)


def time_findings(synchronized: bool | None, offsets: Mapping[str, float], needs_time: list[str]) -> Iterator[Finding]:
    """Yields findings about the time of day. ``offsets``: seconds by which media are ahead, by the name of
    the tier; ``needs_time``: the tiers that fail if the time is wrong."""
    for name, offset in offsets.items():
        figures: dict[str, Figure] = {"offset_s": round(offset, 3)}
        if abs(offset) <= NOTABLE_OFFSET_S:
            continue
        side = "ahead of" if offset > 0 else "behind"
        text = f"the clock of {name} is {abs(offset):,.0f} s {side} this machine's"
        fix = "synchronize both (timedatectl set-ntp true, or chronyd)"
        if name in needs_time:
            level = Level.PROBLEM if abs(offset) > MAX_OFFSET_S else Level.WARNING
            text += ": signatures and certificates are checked by the time"
        else:
            level = Level.NOTE
            text += "; kvoffload does not need them to agree"
        yield Finding("clock.offset", level, text, fix, name, figures)
    if synchronized:
        yield Finding("clock.synchronized", Level.OK, "the time of day is synchronized")
        return
    how = "is not synchronized" if synchronized is False else "may not be synchronized: the kernel does not say"
    level, text, fix = Level.NOTE, f"the time of day {how}", "timedatectl set-ntp true, or start chronyd on the machine"
    if needs_time:
        level = Level.WARNING
        text += f"; once it is off by some minutes, this server cannot use {', '.join(needs_time)}"
    yield Finding("clock.unsynchronized", level, text, fix)


def _needs_time(kind: str, settings: Mapping[str, Any]) -> bool:
    return kind in SIGNING_KINDS or any(_is_tls(value) for value in settings.values())


def _is_tls(value: object) -> bool:
    return isinstance(value, str) and urlsplit(value).scheme in ("https", "rediss")

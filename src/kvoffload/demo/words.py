"""Numbers as people read them."""

from __future__ import annotations

NOTHING = "–"  # noqa: RUF001


def milliseconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:,.0f} ms" if value >= 10 else f"{value:.1f} ms"


def times(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f}×"  # noqa: RUF001


def faster(value: float | None) -> str:
    return NOTHING if value is None else f"{times(value)} faster"


def gigabytes_per_second(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f} GB/s"


def share(part: int, whole: int) -> str:
    return NOTHING if not whole else f"{100 * part / whole:.0f}%"

"""Prints the table of a benchmark and writes its JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. ``ratio`` compares it with ``versus``, measured in the same run; above 1 is better, unless ``versus``
    says otherwise. ``interval``: where the ratio lies in 19 of 20 runs."""

    what: str
    value: float
    unit: str
    versus: str = ""
    ratio: float | None = None
    interval: tuple[float, float] | None = None


def publish(name: str, title: str, rows: list[Row], out: Path) -> None:
    """Prints ``rows`` as a table and writes them to ``out/NAME.json``."""
    widths = [max(len(row.what) for row in rows), max(len(row.versus) for row in rows)]
    print(f"\n{title}")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:8.2f}x"
        if row.ratio is not None and row.interval is not None:
            low, high = row.interval
            ratio = f"{row.ratio:8.3f} ({low:.3f} to {high:.3f})"
        print(f"  {row.what:<{widths[0]}}  {row.value:>10,.2f} {row.unit:<8} {row.versus:<{widths[1]}} {ratio}")
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    path.write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=2) + "\n")

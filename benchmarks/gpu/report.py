"""What a part of the proof has measured: a JSON file per part, written after every figure, and one table."""

from __future__ import annotations

import enum
import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


class State(enum.StrEnum):
    """How far a part has come."""

    RUNNING = "running"
    ENDED = "ended"
    SKIPPED = "skipped"
    FAILED = "failed"
    TIMED_OUT = "timed out"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. ``gate`` says what it must be; ``passed`` is None if there is no gate."""

    what: str
    value: float | str
    unit: str = ""
    gate: str = ""
    passed: bool | None = None


@dataclass(slots=True)
class Report:
    """The figures of one part. ``note`` says why it was skipped or has failed."""

    part: str
    path: Path
    state: State = State.RUNNING
    note: str = ""
    seconds: float = 0.0
    rehearsal: bool = False
    rows: list[Row] = field(default_factory=list)
    _begin: float = field(default_factory=time.monotonic)

    def add(self, what: str, value: float | str, unit: str = "") -> None:
        """Adds a figure without a gate."""
        self._add(Row(what, value, unit))

    def at_least(self, least: float, what: str, value: float, unit: str = "") -> None:
        self._add(Row(what, value, unit, f">= {least:g}", value >= least))

    def at_most(self, most: float, what: str, value: float, unit: str = "") -> None:
        self._add(Row(what, value, unit, f"<= {most:g}", value <= most))

    def must(self, what: str, holds: bool, found: str = "") -> None:
        """Adds something that must hold. ``found`` says what was found."""
        self._add(Row(what, found or ("yes" if holds else "no"), "", "yes", holds))

    def end(self, state: State, note: str = "") -> None:
        self.state, self.note = state, note
        self.write()

    def write(self) -> None:
        self.seconds = round(time.monotonic() - self._begin, 1)
        fields = {name: getattr(self, name) for name in ("part", "state", "note", "seconds", "rehearsal")}
        text = json.dumps({**fields, "rows": [asdict(row) for row in self.rows]}, indent=2) + "\n"
        part = self.path.with_suffix(".part")
        part.write_text(text)
        part.replace(self.path)

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        self.write()


def read(path: Path) -> dict[str, Any]:
    """Returns the fields of a report; ``rows`` are Rows."""
    fields: dict[str, Any] = json.loads(path.read_text())
    fields["rows"] = [Row(**row) for row in fields["rows"]]
    return fields


def table(reports: Iterable[dict[str, Any]]) -> str:
    """Returns the parts and their figures as text."""
    lines: list[str] = []
    for report in reports:
        note = f": {report['note']}" if report["note"] else ""
        lines.append(f"{report['part']}: {report['state']} after {report['seconds']:.0f} s{note}")
        width = max((len(row.what) for row in report["rows"]), default=0)
        for row in report["rows"]:
            value = row.value if isinstance(row.value, str) else f"{row.value:,.4g}"
            verdict = "" if row.passed is None else f"{'pass' if row.passed else 'FAIL'} ({row.gate})"
            lines.append(f"  {row.what:<{width}}  {value:>12} {row.unit:<8} {verdict}".rstrip())
    return "\n".join(lines)

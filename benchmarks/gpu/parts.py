"""What every part of the proof is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class Skipped(Exception):
    """A part cannot run here. Its text says why."""


@dataclass(frozen=True, slots=True)
class Options:
    """``seconds``: how long the part may take. ``dry_run``: sizes are small, and figures say nothing. ``out``: the
    directory for files. ``share``: that of the usual time."""

    seconds: float
    dry_run: bool
    out: Path
    share: float = 1.0

    def size(self, nbytes: int) -> int:
        """Returns how much memory to use where ``nbytes`` are asked for."""
        return nbytes >> 12 if self.dry_run else nbytes

    def rounds(self, number: int) -> int:
        return 1 if self.dry_run else max(1, round(number * min(1.0, self.share)))

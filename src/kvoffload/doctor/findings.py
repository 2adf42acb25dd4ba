"""Findings of the doctor: one per fact that an operator can act on or rely on."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvoffload.abc.shown import HIDDEN, shown

Figure = int | float | str | bool | None


class Level(enum.StrEnum):
    """How much a finding matters, from least to most."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing. Nothing has to be changed; a fix may be proposed."""
    WARNING = "warning"
    """The server starts and serves, but worse than it could, or not for long."""
    PROBLEM = "problem"
    """Stops a deployment, or makes a part of it useless."""


class Area(enum.StrEnum):
    """The subject of a finding. The report groups findings by area, tiers by name."""

    CONFIGURATION = "configuration"
    MACHINE = "machine"
    TIER = "tier"
    ENGINE = "engine"
    MODEL = "model"
    CLOCK = "clock"
    WORTH = "worth"


AREAS = {
    "config": Area.CONFIGURATION,
    **dict.fromkeys(("memory", "huge_pages", "numa", "processors", "descriptors", "copies"), Area.MACHINE),
    **dict.fromkeys(("directory", "store", "tier"), Area.TIER),
    **{str(area): area for area in (Area.ENGINE, Area.MODEL, Area.CLOCK, Area.WORTH)},
}
"""The area of a finding by the first word of its id."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check.

    ``id`` is stable across releases. ``tier``: the name of the tier that it is about, if any. ``fix`` is one line to
    run or the setting to change; empty if there is nothing to do. ``figures``: numbers by name, with the unit at the
    end of the name. ``check``: the area of the check for ids that begin with "doctor".
    """

    id: str
    level: Level
    text: str
    fix: str = ""
    tier: str = ""
    figures: Mapping[str, Figure] = field(default_factory=dict)
    check: Area | None = None

    @property
    def area(self) -> Area:
        return self.check or AREAS[self.id.partition(".")[0]]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON."""
        return {
            "id": self.id,
            "level": str(self.level),
            "area": str(self.area),
            "tier": self.tier,
            "text": self.text,
            "fix": self.fix,
            "figures": dict(self.figures),
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Finding:
        """Returns the finding of a ``to_dict``."""
        fields = {name: value for name, value in found.items() if name != "area"}
        is_of_doctor = found["id"].partition(".")[0] not in AREAS
        return cls(**{**fields, "level": Level(found["level"]), "check": Area(found["area"]) if is_of_doctor else None})


class Hidden:
    """Removes from texts the values of a configuration that may not be shown. Errors do not have them; a library, a
    store or a file system may repeat them."""

    _MIN_CHARACTERS = 6
    """A shorter value is more probably part of ordinary text than secret."""

    def __init__(self, options: object = None) -> None:
        """``options``: the configuration, as parsed JSON."""
        values = {value for name, value in strings_in(options) if shown(name, value) == HIDDEN}
        self._values = sorted((each for each in values if len(each) >= self._MIN_CHARACTERS), key=len, reverse=True)

    def hide(self, text: str) -> str:
        for value in self._values:
            text = text.replace(value, HIDDEN)
        return text

    def hide_in(self, finding: Finding) -> Finding:
        figures = {
            name: self.hide(value) if isinstance(value, str) else value for name, value in finding.figures.items()
        }
        return replace(finding, text=self.hide(finding.text), fix=self.hide(finding.fix), figures=figures)


def strings_in(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields every string in parsed JSON with the setting that it belongs to."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from strings_in(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, Sequence):
        for inner in value:
            yield from strings_in(inner, name)

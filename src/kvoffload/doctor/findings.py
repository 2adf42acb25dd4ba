"""Findings of the doctor: one per fact that an operator can act on or rely on."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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


def split_fix(message: str) -> tuple[str, str]:
    """Returns the fault and the fix from the message of a ConfigError, which has the form "SETTING: fault; fix"."""
    for separator in ("; ", ": "):
        wrong, found, fix = message.partition(separator)
        if found:
            return wrong, fix
    return message, "correct the setting"


class Secrets:
    """Removes secrets from texts: passwords in URLs, and the values of settings and environment variables whose names
    say that they are secret."""

    MASK = "***"
    _NAME = re.compile(r"passw|secret|token|credential|(^|_|-)(key|pwd|auth)$", re.IGNORECASE)
    _NOT_SECRET = re.compile(r"(file|dir|path)$", re.IGNORECASE)
    _IN_URL = re.compile(r"(?<=://)([^/@\s:]*):([^/@\s]*)@")
    _MIN_CHARACTERS = 3
    _MIN_ENVIRONMENT_CHARACTERS = 8
    """A shorter value of a variable is more probably part of ordinary text than secret."""

    def __init__(self, options: object = None, environment: Mapping[str, str] | None = None) -> None:
        """``options``: the configuration, as parsed JSON. ``environment``: by default that of this process."""
        values = {value for name, value in _strings(options) if self._is_secret(name, value, self._MIN_CHARACTERS)}
        for name, value in (os.environ if environment is None else environment).items():
            if self._is_secret(name, value, self._MIN_ENVIRONMENT_CHARACTERS):
                values.add(value)
        self._values = sorted(values, key=len, reverse=True)

    @classmethod
    def _is_secret(cls, name: str, value: str, least: int) -> bool:
        is_named = cls._NAME.search(name) and not cls._NOT_SECRET.search(name)
        return bool(is_named) and len(value) >= least and not value.startswith("/")

    def hide(self, text: str) -> str:
        """Returns ``text`` with all secrets replaced by MASK."""
        text = self._IN_URL.sub(rf"\1:{self.MASK}@", text)
        for value in self._values:
            text = text.replace(value, self.MASK)
        return text

    def hide_in(self, finding: Finding) -> Finding:
        """Returns ``finding`` without secrets."""
        figures = {
            name: self.hide(value) if isinstance(value, str) else value for name, value in finding.figures.items()
        }
        return replace(finding, text=self.hide(finding.text), fix=self.hide(finding.fix), figures=figures)


def _strings(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields every string in parsed JSON with the key that it belongs to."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _strings(inner, str(key))
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _strings(inner, name)

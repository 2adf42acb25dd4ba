"""Findings of the doctor, one per fact that an operator can act on or rely on, and how a check reports them."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvoffload.abc.shown import HIDDEN, shown

Figure = int | float | str | bool | None
CHECKS = {
    "config.valid": "every setting is accepted",
    "config.refused": "an error for which a server would refuse the configuration",
    "config.connector": "--kv-transfer-config names another connector, or nothing of kvoffload",
    "config.role": "kv_role excludes stores or loads",
    "config.plugin": "VLLM_PLUGINS leaves the plugin out",
    "config.several": "the connectors of a MultiConnector do not work together",
    "config.misplaced": "options of kvoffload are one level too high",
    "config.spec": "vLLM's own connector would ignore secondary_tiers",
    "config.policy": "the cache policy is not read",
    "config.ignored": "settings of kvoffload are where vLLM does not read them",
    "config.interface": "a key of SGLang is missing without which nothing is stored",
    "config.key_file_open": "other users can read an HMAC key, a password or a private key",
    "memory.available": "memory that can be allocated, where the configuration does not say how much it takes",
    "memory.fits": "the memory of the configuration fits within the machine and every cgroup",
    "memory.tight": "it takes more than nine tenths of what is available",
    "memory.too_little": "it does not fit, and a server would not start",
    "memory.shm_fits": "vLLM's host memory fits in /dev/shm",
    "memory.shm_small": "vLLM's host memory does not fit in /dev/shm",
    "memory.not_shared": "a sandbox keeps another process of this user from opening a pool",
    "directory.private": "it belongs to this user or root, others cannot write to it, and no server uses it",
    "directory.refused": "another owner, open to others, a symbolic link, or not a directory",
    "directory.missing": "it does not exist; perhaps a file system is not mounted",
    "directory.not_writable": "no file can be made in it",
    "directory.read_only": "its file system is mounted read-only",
    "directory.in_use": "another server has it now",
    "directory.seats": "the shared directory has no seat left",
    "directory.inodes": "the file system has no inode left",
    "directory.descriptors": "ulimit -n forbids one open file per GiB",
    "directory.space": "the budget against free space and the files of the tier",
    "directory.kind": "memory, a container's layer, a network under disk, or a local disk under shared_dir",
    "directory.locks": "a file lock was taken, and the mount shows it to other machines",
    "directory.direct_io": "a write with O_DIRECT was tried",
    "directory.speed": "GB/s of writes and reads in blocks of 2 MiB",
    "directory.fails": "the medium failed or became full while it was measured",
    "store.connects": "the client of the server reached the store",
    "store.connect_fails": "it did not: refused, wrong password, no certificate",
    "store.ask_fails": "a lookup failed",
    "store.put_fails": "a value could not be stored",
    "store.get_fails": "a value that was just stored could not be loaded",
    "store.advice": "settings of the store that do not suit a cache",
    "store.round_trip": "p50 of lookups, against lookup_deadline_ms",
    "store.speed": "GB/s of puts and gets of values of 2 MiB",
    "store.full": "the store has no room",
    "store.other_bytes": "the store gave back other bytes than were put",
    "store.not_removed": "values of the doctor could not be removed",
    "tier.unknown": "a tier of your own, in which nothing was measured",
    "engine.tested": "the installed version of the engine is tested",
    "engine.missing": "the engine is not installed here",
    "engine.untested": "the installed version of the engine is not tested",
    "engine.too_old": "kvoffload needs a later version of the engine",
    "engine.plugin": "this vLLM does not know the plugin",
    "model.contents": "the model does not allow exclusive contents",
    "model.room": "tokens that fit in host memory and in each tier",
    "model.shares": "a share of a tenant has no room for one block",
    "doctor.hung": "a check did not end in time; the text names the step",
    "doctor.failed": "a check raised an error, or its process ended",
}
"""What each finding is about, by its id."""


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


AREAS = {
    "config": Area.CONFIGURATION,
    "memory": Area.MACHINE,
    **dict.fromkeys(("directory", "store", "tier"), Area.TIER),
    **{str(area): area for area in (Area.ENGINE, Area.MODEL)},
}
"""The area of a finding by the first word of its id."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of a check.

    ``id`` is one of CHECKS. ``tier``: the name of the tier that it is about, if any. ``fix`` is one line to run or the
    setting to change; empty if there is nothing to do. ``figures``: numbers by name, with the unit at the end of the
    name.
    """

    id: str
    level: Level
    area: Area
    tier: str
    text: str
    fix: str = ""
    figures: Mapping[str, Figure] = field(default_factory=dict)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Finding:
        """Returns the finding of which ``found`` is the JSON."""
        return cls(**{**found, "level": Level(found["level"]), "area": Area(found["area"])})


class Report:
    """Reports of a check. ``send`` takes each message, plain JSON."""

    def __init__(self, send: Callable[[Mapping[str, Any]], None]) -> None:
        self.tier = ""
        """The tier that the check is about, if any."""
        self.is_ended = False
        """Whether the check is to end, and clean up, at its next report."""
        self._send = send

    def send(self, **message: Any) -> None:
        if self.is_ended:
            # Not again: what could not be cleaned up is reported too.
            self.is_ended = False
            sys.exit(1)
        self._send(message)

    def stage(self, text: str) -> None:
        """Names the next step of the check, such as "connects", for the report of a check that hangs."""
        self.send(stage=text)

    def clean_up(self, text: str) -> None:
        """Names the next step like ``stage``, but never ends the check: it cleans up."""
        self._send({"stage": text})

    def found(
        self, id: str, level: Level, text: str, fix: str = "", figures: Mapping[str, Figure] | None = None
    ) -> None:
        """Reports a finding: see Finding."""
        area = AREAS[id.partition(".")[0]]
        self.send(finding=asdict(Finding(id, level, area, self.tier, text, fix, figures or {})))


MIN_SECRET = 6
"""Characters; a shorter value is more probably part of ordinary text than secret."""


def secrets_in(options: object) -> list[str]:
    """Returns the values in parsed JSON that may not be shown, the longest first."""
    found = {value for name, value in _strings_in(options) if shown(name, value) == HIDDEN}
    return sorted((value for value in found if len(value) >= MIN_SECRET), key=len, reverse=True)


def hide(value: Any, secrets: Sequence[str]) -> Any:
    """Returns a text, or a mapping with texts, without ``secrets``. Errors do not have them; a library, a store or a
    file system may repeat them."""
    if isinstance(value, Mapping):
        return {name: hide(inner, secrets) for name, inner in value.items()}
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, HIDDEN)
    return value


def _strings_in(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields every string in parsed JSON with the setting that it belongs to."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _strings_in(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _strings_in(inner, name)

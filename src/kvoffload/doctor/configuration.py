"""Checks the configuration: every setting, with the errors that a server would give."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kvoffload.abc import ConfigError
from kvoffload.config import OffloadConfig
from kvoffload.doctor.findings import Area, Finding, Level, split_fix
from kvoffload.doctor.process import Report
from kvoffload.tiers.config import TierConfig
from kvoffload.tiers.remote.config import RemoteTierConfig
from kvoffload.units import format_bytes

CONNECTOR = "KVOffloadConnector"
ROLE = "kv_both"
PLUGIN = "kvoffload"
MAX_ERRORS = 16
"""Errors that are shown; each costs one more attempt to read the configuration."""
_INDEX = re.compile(r"tiers\[(\d+)\]")
_STAND_IN_BYTES = 1 << 20
"""In place of a wrong ``host_bytes``, so that the other settings can be checked."""


@dataclass(frozen=True, slots=True)
class Store:
    """How to reach a remote store: ``client`` is the import path of the function that connects, with ``settings``."""

    client: str
    settings: Mapping[str, Any]
    prefix: str
    address: str


@dataclass(frozen=True, slots=True)
class PlannedTier:
    """A tier of the configuration. ``setting`` is what errors call it."""

    name: str
    kind: str
    setting: str
    directory: str | None = None
    bytes: int | None = None
    store: Store | None = None
    memory_bytes: int = 0
    """Memory of this node that the tier takes beside the host pools."""
    pins_memory: bool = False
    """Whether the tier's client pins the host pools, for RDMA."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a server would do with the configuration: the settings that could be read. None: not set, or wrong."""

    host_bytes: int | None = None
    policy: str = "auto"
    block_size: int | None = None
    block_size_factor: int = 1
    lookup_deadline_ms: float = 100.0
    load_deadline_ms: float = 1000.0
    has_fingerprint: bool = False
    tiers: list[PlannedTier] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Plan:
        """Returns the plan that ``to_dict`` has described."""
        return cls(**{**found, "tiers": [tier_from_dict(each) for each in found["tiers"]]})


def tier_from_dict(found: Mapping[str, Any]) -> PlannedTier:
    """Returns the tier that ``dataclasses.asdict`` has described."""
    return PlannedTier(**{**found, "store": Store(**found["store"]) if found["store"] else None})


def check(arguments: Mapping[str, Any], report: Report) -> None:
    """Reports what is wrong with the configuration, and the fact "plan". ``arguments``: the fields of a Source."""
    report.stage("reads the configuration")
    if arguments["transfer"] is not None:
        _check_transfer(arguments["transfer"], report)
    config, errors = read_config(arguments["options"])
    for error in errors:
        text, fix = split_fix(error)
        report.finding(Finding("config.refused", Level.PROBLEM, Area.CONFIGURATION, text, fix))
    is_host_wrong = any(re.match(r"host_bytes\b", error) for error in errors)
    plan = _plan(config, is_host_wrong, report) if config is not None else Plan()
    if not errors:
        host = format_bytes(plan.host_bytes or 0)
        tiers = ", ".join(tier.name for tier in plan.tiers) or "none"
        text = f"every setting is valid: host_bytes {host}, policy {plan.policy}, tiers: {tiers}"
        figures = {"host_bytes": plan.host_bytes, "num_tiers": len(plan.tiers)}
        report.finding(Finding("config.valid", Level.OK, Area.CONFIGURATION, text, figures=figures))
    report.fact("plan", plan.to_dict())


def read_config(options: Mapping[str, Any]) -> tuple[OffloadConfig | None, list[str]]:
    """Returns the configuration without its wrong settings, and the message of the ConfigError for each of these. The
    configuration is None if it has more than MAX_ERRORS."""
    left, errors = dict(options), list[str]()
    tiers = left.get("tiers")
    indexes = list(range(len(tiers))) if isinstance(tiers, list) else []
    while len(errors) < MAX_ERRORS:
        try:
            return OffloadConfig.from_mapping(left), errors
        except ConfigError as error:
            message = str(error)
        wrong = _INDEX.match(message)
        errors.append(_INDEX.sub(lambda found: f"tiers[{indexes[int(found[1])]}]", message))
        setting = re.split(r"\W", message, maxsplit=1)[0]
        if wrong is not None:
            index = int(wrong[1])
            left["tiers"] = [each for i, each in enumerate(left["tiers"]) if i != index]
            del indexes[index]
        elif setting == "host_bytes":
            left["host_bytes"] = _STAND_IN_BYTES
        elif setting in left:
            del left[setting]
        elif setting == "disk_":
            left.pop("disk_dir", None)
            left.pop("disk_bytes", None)
        else:
            break
    return None, errors


def _plan(config: OffloadConfig, is_host_wrong: bool, report: Report) -> Plan:
    tiers = []
    for name, entry in zip(config.tier_names, config.tier_entries, strict=True):
        try:
            tiers.append(_planned(name, entry.setting, entry.config))
        except ConfigError as error:
            text, fix = split_fix(entry.name_setting(str(error)))
            report.finding(Finding("config.refused", Level.PROBLEM, Area.CONFIGURATION, text, fix))
    return Plan(
        host_bytes=None if is_host_wrong else config.host_bytes,
        policy=config.policy,
        block_size=config.block_size,
        block_size_factor=config.block_size_factor or 1,
        lookup_deadline_ms=config.lookup_deadline_ms,
        load_deadline_ms=config.load_deadline_ms,
        has_fingerprint=config.model_fingerprint is not None,
        tiers=tiers,
    )


def _planned(name: str, setting: str, config: TierConfig) -> PlannedTier:
    """Returns what the doctor needs to know of a tier. Raises ConfigError."""
    store = None
    if isinstance(config, RemoteTierConfig):
        store = Store(config.connect, config.settings(), config.prefix, config.address)
    return PlannedTier(
        name,
        config.kind,
        setting,
        directory=config.directory,
        bytes=config.capacity_bytes,
        store=store,
        memory_bytes=int(getattr(config, "segment_bytes", 0)),
        pins_memory=getattr(config, "protocol", "") == "rdma",
    )


def _check_transfer(transfer: Mapping[str, Any], report: Report) -> None:
    """Checks what belongs to vLLM in its ``--kv-transfer-config``."""

    def problem(name: str, text: str, fix: str, level: Level = Level.PROBLEM) -> None:
        report.finding(Finding(f"config.{name}", level, Area.CONFIGURATION, text, fix))

    connector, role = transfer.get("kv_connector"), transfer.get("kv_role")
    if connector != CONNECTOR:
        problem("connector", f"kv_connector={connector!r}: is not kvoffload", f'write "kv_connector": "{CONNECTOR}"')
    if role is None:
        problem("role", "kv_role is not set, and vLLM refuses a connector without it", f'add "kv_role": "{ROLE}"')
    elif role != ROLE:
        fix = f'write "kv_role": "{ROLE}"'
        problem("role", f"kv_role={role!r}: a server both stores and loads blocks", fix, Level.WARNING)
    plugins = os.environ.get("VLLM_PLUGINS")
    if plugins is not None and PLUGIN not in plugins.split(",") and "kv_connector_module_path" not in transfer:
        problem(
            "plugin",
            f"VLLM_PLUGINS={plugins!r}: vLLM then does not load kvoffload's plugin",
            f'add ",{PLUGIN}" to the variable, or "kv_connector_module_path": "kvoffload.vllm" to the configuration',
        )

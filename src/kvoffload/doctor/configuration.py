"""Checks the configuration: every setting, with the errors that a server would give."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kvoffload.abc import ConfigError, Tier
from kvoffload.abc.shown import HIDDEN, shown
from kvoffload.cache.tenants import load_tenants
from kvoffload.config import DoorConfig, OffloadConfig
from kvoffload.doctor.doors import Door, Given, Part, Say, door_of, read_sglang, read_vllm
from kvoffload.doctor.findings import Level, strings_in
from kvoffload.doctor.process import Report
from kvoffload.supported import CONNECTOR, refuse_companions
from kvoffload.tiering.bridge import STAGING_BYTES
from kvoffload.tiers.config import TierConfig, TierContext, TierEntry, check_distinct, distinct_names
from kvoffload.tiers.remote.config import RemoteTierConfig
from kvoffload.units import format_bytes

ROLE = "kv_both"
OPTIONS_KEY = "kv_connector_extra_config"
PLUGIN = "kvoffload"
MAX_ERRORS = 16
"""Errors that are shown; each costs one more attempt to read the configuration."""
MAX_SEGMENT_BYTES = 64 << 20
"""Memory that the doctor contributes to a store to which a server would contribute."""
_SECRET_FILES = {
    "hmac_key_file": "could forge blocks",
    "password_file": "could read and forge what is in the store",
    "key_file": "could take this server's part",
}
"""Settings of tiers that name a file with a secret, and the harm that its readers could do."""
_TOGETHER = ("disk_dir", "disk_bytes")
_OF_BUDGET = re.compile("host_bytes|disk_|tiers")
_ENTRY = re.compile(r"tiers\[(\d+)\]")
_OTHERS = 0o077
_GROUP = 0o070
_OPTIONS = frozenset(each.name for each in fields(OffloadConfig))
_STAND_IN_BYTES = 1 << 20
"""In place of a wrong ``host_bytes``, so that the other settings can be checked."""


@dataclass(frozen=True, slots=True)
class Store:
    """How to reach a remote store: ``client`` is the import path of the function that connects, with ``settings``.
    ``client_bytes``: see ``RemoteTierConfig``."""

    client: str
    settings: Mapping[str, Any]
    prefix: str
    address: str
    client_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PlannedTier:
    """A tier of the configuration. ``prefix`` stands before its keys in errors, such as "tiers[1]."."""

    name: str
    kind: str
    prefix: str
    lookup_deadline_ms: float
    directory: str | None = None
    bytes: int | None = None
    store: Store | None = None
    memory_bytes: int = 0
    """Memory of this node that the tier takes beside the host pools."""
    pins_memory: bool = False
    """Whether the tier's client pins its memory, for RDMA."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A server's view of the configuration: the readable settings. None: not set, or wrong."""

    door: Door = Door.CONNECTOR
    host_bytes: int | None = None
    """Host memory for blocks: kvoffload's own pool, or behind another door that of the engine."""
    staging_bytes: int = 0
    """Memory of kvoffload beside the engine's host memory."""
    shared_memory_bytes: int = 0
    """The part of ``host_bytes`` that the engine allocates in /dev/shm."""
    is_for_cpus: bool | None = None
    """Whether copies are made for an engine on CPUs. None: kvoffload finds out."""
    policy: str = "auto"
    block_size: int | None = None
    block_size_factor: int = 1
    has_fingerprint: bool = False
    tiers: list[PlannedTier] = field(default_factory=list)
    is_beside_others: bool = False
    """Whether vLLM has other connectors too."""
    tenants: list[str] = field(default_factory=list)
    shares: dict[str, int] = field(default_factory=dict)
    """Bytes of each share of a tenant by its setting, such as "tenants.search.quota.host"."""

    @property
    def host_setting(self) -> str:
        """The setting that says how much host memory there is."""
        return {Door.CONNECTOR: "host_bytes", Door.VLLM: "cpu_bytes_to_use", Door.SGLANG: "--hicache-size"}[self.door]

    @property
    def needed_bytes(self) -> int:
        """Memory of this node that a server would allocate, as far as it is known."""
        return (self.host_bytes or 0) + self.staging_bytes + sum(tier.memory_bytes for tier in self.tiers)

    def set_host_bytes(self, nbytes: int) -> str:
        """Returns the fix that gives the engine so much host memory. vLLM reads a number without a unit."""
        amount = f"{nbytes} ({format_bytes(nbytes)})" if self.door is Door.VLLM else format_bytes(nbytes)
        return f"set {self.host_setting} to {amount}"

    @property
    def engine(self) -> str:
        return "SGLang" if self.door is Door.SGLANG else "vLLM"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Plan:
        """Returns the plan of a ``to_dict``."""
        tiers = [tier_from_dict(each) for each in found["tiers"]]
        return cls(**{**found, "door": Door(found["door"]), "tiers": tiers})


def tier_from_dict(found: Mapping[str, Any]) -> PlannedTier:
    """Returns the tier of a ``dataclasses.asdict``."""
    return PlannedTier(**{**found, "store": Store(**found["store"]) if found["store"] else None})


def check(arguments: Mapping[str, Any], report: Report) -> None:
    """Reports faults of the configuration, and the fact "plan". ``arguments``: the fields of a Source."""
    door = door_of(arguments["options"], arguments["transfer"])
    for name, path in strings_in(arguments["options"]):
        if not path.startswith(("/", "~")) or shown(name, path) == HIDDEN:
            continue
        # Reading the configuration touches them. If one hangs, this stage names it.
        report.stage(f"looks at {path}")
        with suppress(OSError, ValueError):
            os.lstat(os.path.expanduser(path))
    report.stage("reads the configuration")
    is_valid = True

    def say(name: str, text: str, fix: str = "", level: Level = Level.PROBLEM) -> None:
        nonlocal is_valid
        is_valid &= level is not Level.PROBLEM
        report.found(f"config.{name}", level, text, fix)

    options, transfer = arguments["options"], arguments["transfer"] or {}
    if arguments["transfer"] is not None:
        _check_transfer(transfer, arguments.get("several"), door, say)
    misplaced = {name: transfer[name] for name in transfer if name in _OPTIONS}
    if misplaced and door is Door.CONNECTOR:
        # They are checked there: what else is wrong is said too.
        options = {**misplaced, **options}
        text = f"{', '.join(misplaced)}: vLLM knows no such {'keys' if len(misplaced) > 1 else 'key'} there"
        say("misplaced", text, f'write kvoffload\'s options one level below, into "{OPTIONS_KEY}": {{...}}')
    given = Given([Part(options)])
    if door is not Door.CONNECTOR:
        given = (read_vllm if door is Door.VLLM else read_sglang)(arguments["options"], say)
    plan, errors = _plan(door, given, arguments["options"], report)
    plan = replace(plan, is_beside_others=arguments.get("several") is not None)
    for error in errors:
        say("refused", error.wrong, re.sub("^or ", "correct it, or ", error.fix) or "correct the setting")
    if is_valid:
        text = f"every setting is valid: tiers: {', '.join(tier.name for tier in plan.tiers) or 'none'}"
        if plan.host_bytes is not None:
            host = f"{plan.host_setting} {format_bytes(plan.host_bytes)}"
            text = text.replace("valid:", f"valid: {host}, policy {plan.policy},")
        if plan.tenants:
            text += f", tenants: {', '.join(plan.tenants)}"
        figures = {"host_bytes": plan.host_bytes, "num_tiers": len(plan.tiers)}
        report.found("config.valid", Level.OK, text, figures=figures)
    report.fact("plan", plan.to_dict())


@dataclass(frozen=True, kw_only=True)
class _WrongTier(TierConfig):
    """Takes the place of a wrong entry, so that the others keep theirs."""

    kind = "wrong"
    index: int

    def open(self, context: TierContext) -> Tier:
        raise NotImplementedError


Config = TypeVar("Config", OffloadConfig, DoorConfig)


def read_config(
    kind: type[Config], options: Mapping[str, Any], prefix: str = ""
) -> tuple[Config | None, list[ConfigError]]:
    """Returns the configuration that a server would read from ``options``, without its wrong settings, and every error
    for which the server would refuse them. ``prefix``: the words before the settings of a DoorConfig in errors.

    The configuration is None if there are more than MAX_ERRORS, or if a DoorConfig has no tier.
    """
    read: Any = partial(DoorConfig.from_mapping, prefix=prefix) if kind is DoorConfig else kind.from_mapping
    left, errors = dict(options), list[ConfigError]()
    while len(errors) < MAX_ERRORS:
        try:
            return read(left), errors
        except ConfigError as error:
            errors.append(error)
        setting = errors[-1].setting.removeprefix(prefix)
        name, entry = re.split(r"\W", setting, maxsplit=1)[0], _ENTRY.match(setting)
        if setting in left and name not in left:
            del left[setting]
        elif entry is not None:
            left["tiers"] = [
                _WrongTier(index=i) if i == int(entry[1]) else each for i, each in enumerate(left["tiers"])
            ]
        elif name == "tier" and kind is DoorConfig and "tier" in left and "tiers" not in left:
            left["tier"] = _WrongTier(index=0)
        elif name == "tenants":
            if _are_tenants_right(left["tenants"]) and any(_OF_BUDGET.match(each.setting) for each in errors):
                # The error follows from the settings that were left out.
                errors.pop()
            left["tenants"] = (
                _without(left["tenants"], _path_in(left["tenants"], setting.removeprefix("tenants"))) or {}
            )
        elif name == "host_bytes":
            left["host_bytes"] = _STAND_IN_BYTES
        elif name in left:
            # Without the one the other would be an error too, which the user has not made.
            for each in _TOGETHER if name in _TOGETHER else (name,):
                left.pop(each, None)
        else:
            break
    return None, errors


def _are_tenants_right(tenants: object) -> bool:
    with suppress(ConfigError):
        return bool(load_tenants(tenants)) or not tenants
    return False


def _path_in(value: object, rest: str) -> tuple[str, ...]:
    """Returns the keys in nested mappings that ``rest`` begins with. A key may contain dots itself."""
    rest = rest.removeprefix(".")
    names = value if isinstance(value, Mapping) else {}
    keys = [str(key) for key in names if rest == str(key) or rest.startswith(f"{key}.")]
    if not keys:
        return ()
    key = max(keys, key=len)
    return key, *_path_in(names.get(key), rest[len(key) :])


def _without(value: Any, path: tuple[str, ...]) -> Any:
    """Returns nested mappings without the value at ``path``; None without a path."""
    if not path or not isinstance(value, Mapping) or path[0] not in value:
        return value if path else None
    inner = _without(value[path[0]], path[1:])
    others = {key: each for key, each in value.items() if key != path[0]}
    return others if inner is None else {**value, path[0]: inner}


def _plan(door: Door, given: Given, options: Mapping[str, Any], report: Report) -> tuple[Plan, list[ConfigError]]:
    """Returns the plan, and every error that a server would give."""
    is_connector = door is Door.CONNECTOR
    planned, tiers, errors = list[TierEntry](), list[PlannedTier](), list[ConfigError]()
    config: OffloadConfig | DoorConfig | None = None
    for part in given.parts:
        kind: Any = OffloadConfig if is_connector else DoorConfig
        config, found = read_config(kind, part.options, part.prefix)
        errors += found
        if config is None:
            continue
        for entry in config.tier_entries:
            if isinstance(entry.config, _WrongTier):
                continue
            try:
                check_distinct([*planned, entry])
                tier = _planned(entry, config.lookup_deadline_ms, report)
            except ConfigError as error:
                errors.append(error if error.setting.startswith(entry.prefix) else entry.name_error(error))
            else:
                planned.append(entry)
                tiers.append(tier)
    names = distinct_names(tier.name for tier in tiers)
    tiers = [replace(tier, name=name) for tier, name in zip(tiers, names, strict=True)]
    if not is_connector:
        return Plan(
            door,
            given.host_bytes,
            staging_bytes=STAGING_BYTES * len(given.parts),
            shared_memory_bytes=(given.host_bytes or 0) if given.in_shared_memory else 0,
            is_for_cpus=given.is_for_cpus,
            policy=str(options.get("eviction_policy", "lru")),
            block_size=_whole(options.get("block_size")),
            block_size_factor=_whole(options.get("blocks_per_chunk")) or 1,
            has_fingerprint=any("model_fingerprint" in part.options for part in given.parts),
            tiers=tiers,
        ), errors
    if not isinstance(config, OffloadConfig):
        return Plan(), errors
    is_host_wrong = any(error.setting == "host_bytes" for error in errors)
    plan = Plan(
        host_bytes=None if is_host_wrong else config.host_bytes,
        policy=config.policy,
        block_size=config.block_size,
        block_size_factor=config.block_size_factor or 1,
        has_fingerprint=config.model_fingerprint is not None,
        tiers=tiers,
        tenants=[tenant.name for tenant in config.tenants],
        shares={
            f"tenants.{tenant.name}.{kind}.{tier}": amount
            for tenant in config.tenants
            for kind, amounts in (("guaranteed", tenant.guaranteed), ("quota", tenant.quota))
            for tier, amount in amounts.items()
        },
    )
    return plan, errors


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _planned(entry: TierEntry, lookup_deadline_ms: float, report: Report) -> PlannedTier:
    """Returns the doctor's view of a tier. Raises ConfigError."""
    prefix, config = entry.prefix, entry.config
    store, memory_bytes, pins_memory = None, 0, False
    if isinstance(config, RemoteTierConfig):
        memory_bytes, pins_memory = config.memory_bytes, config.pins_memory
        for key, harm in _SECRET_FILES.items():
            _check_secret_file(f"{prefix}{key}", getattr(config, key, None), harm, report)
        settings = dict(config.settings())
        if settings.get("segment_bytes"):
            # Little, because values of others there are lost when the doctor leaves.
            settings["segment_bytes"] = min(settings["segment_bytes"], MAX_SEGMENT_BYTES)
        store = Store(config.connect, settings, config.prefix, config.address, config.client_bytes)
    return PlannedTier(
        config.kind,
        config.kind,
        prefix,
        lookup_deadline_ms if config.lookup_deadline_ms is None else config.lookup_deadline_ms,
        directory=config.directory,
        bytes=config.capacity_bytes,
        store=store,
        memory_bytes=memory_bytes,
        pins_memory=pins_memory,
    )


def _check_secret_file(setting: str, name: str | None, harm: str, report: Report) -> None:
    if name is None:
        return
    try:
        status = Path(name).expanduser().stat()
    except OSError:
        return  # The store's client says so.
    # A mounted secret, as in Kubernetes, belongs to root, and this user reads it through its group.
    forbidden = _OTHERS if status.st_uid == os.geteuid() else _OTHERS & ~_GROUP
    if status.st_mode & forbidden:
        mode = status.st_mode & 0o777
        text = f"{setting}={name!r}: other users may read it (mode {mode:o}), and {harm}"
        fix = f"chmod {0o600 if forbidden & _GROUP else 0o440:o} {name}"
        report.found("config.key_file_open", Level.WARNING, text, fix)


def _check_transfer(transfer: Mapping[str, Any], several: Mapping[str, Any] | None, door: Door, say: Say) -> None:
    """Checks vLLM's own keys in its ``--kv-transfer-config``, or in that of ``several`` connectors too."""
    connector, role = transfer.get("kv_connector"), transfer.get("kv_role")
    if door is Door.CONNECTOR and connector != CONNECTOR:
        text = f"kv_connector={shown('kv_connector', connector)}: is not kvoffload"
        say("connector", text, f'write "kv_connector": "{CONNECTOR}"')
    if role is None:
        say("role", "kv_role is not set, and vLLM refuses a connector without it", f'add "kv_role": "{ROLE}"')
    elif role != ROLE:
        is_known = role in ("kv_producer", "kv_consumer")
        why = "a server both stores and loads blocks" if is_known else "vLLM knows no such role"
        text = f"kv_role={shown('kv_role', role)}: {why}"
        say("role", text, f'write "kv_role": "{ROLE}"', Level.WARNING if is_known else Level.PROBLEM)
    plugins = os.environ.get("VLLM_PLUGINS") if door is Door.CONNECTOR else None
    has_plugin = plugins is None or PLUGIN in plugins.split(",")
    if not has_plugin and "kv_connector_module_path" not in transfer:
        say(
            "plugin",
            f"VLLM_PLUGINS={plugins!r}: vLLM then does not load kvoffload's plugin",
            f'add ",{PLUGIN}" to the variable, or "kv_connector_module_path": "kvoffload.vllm" to the configuration',
        )
    if several is not None:
        entries = [each for each in several[OPTIONS_KEY]["connectors"] if isinstance(each, Mapping)]
        # A module's class may be derived from one that is served: only vLLM can tell.
        known = [
            each for each in entries if "kv_connector_module_path" not in each or each.get("kv_connector") == CONNECTOR
        ]
        try:
            refuse_companions(several.get("kv_role"), [[str(each.get("kv_connector"))] for each in known], has_plugin)
        except ConfigError as error:
            say("several", error.wrong, error.fix)

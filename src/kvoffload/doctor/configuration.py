"""Checks the configuration: every setting, with the errors that a server would give."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from kvoffload.abc import ConfigError
from kvoffload.config import DoorConfig, OffloadConfig
from kvoffload.doctor.doors import Door, Given, Part, door_of, read_sglang, read_vllm
from kvoffload.doctor.findings import Level, split_fix
from kvoffload.doctor.process import Report
from kvoffload.settings import shown
from kvoffload.tiering.bridge import STAGING_BYTES
from kvoffload.tiers.config import TierConfig, TierEntry, check_distinct, distinct_names
from kvoffload.tiers.remote.config import RemoteTierConfig
from kvoffload.units import format_bytes

CONNECTOR = "KVOffloadConnector"
ROLE = "kv_both"
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
_IS_OF_BUDGET = re.compile("this configuration has no tier|are guaranteed, more than")
_INDEX = re.compile(r"(?<!\w)tiers\[(\d+)\]")
_OTHERS = 0o077
_GROUP = 0o070
_STAND_IN_BYTES = 1 << 20
"""In place of a wrong ``host_bytes``, so that the other settings can be checked."""


@dataclass(frozen=True, slots=True)
class Store:
    """How to reach a remote store: ``client`` is the import path of the function that connects, with ``settings``.
    ``client_bytes`` and ``compress``: see ``RemoteTierConfig``."""

    client: str
    settings: Mapping[str, Any]
    prefix: str
    address: str
    client_bytes: int = 0
    compress: bool = False


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
    if arguments["transfer"] is not None:
        _check_transfer(arguments["transfer"], door, report)
    for path in _paths(arguments["options"]):
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

    given = Given([Part(arguments["options"])])
    if door is not Door.CONNECTOR:
        given = (read_vllm if door is Door.VLLM else read_sglang)(arguments["options"], say)
    plan, errors = _plan(door, given, arguments["options"], report)
    for error in errors:
        say("refused", *split_fix(error))
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


def _paths(options: object) -> Iterator[str]:
    """Yields every string in parsed JSON that is a path."""
    if isinstance(options, str) and options.startswith(("/", "~")):
        yield options
    elif isinstance(options, (list, dict)):
        for inner in options.values() if isinstance(options, dict) else options:
            yield from _paths(inner)


Config = TypeVar("Config", OffloadConfig, DoorConfig)


@dataclass(frozen=True, slots=True)
class ReadConfig(Generic[Config]):
    """A configuration without its wrong settings, and the message of the ConfigError for each of these. ``config`` is
    None if there are more than MAX_ERRORS, or if a DoorConfig has no tier left. ``indexes``: the places that entries
    left in ``tiers`` had."""

    config: Config | None
    errors: list[str]
    indexes: list[int]

    def named(self, message: str) -> str:
        """Returns ``message`` about an entry of ``config`` with the entry's index in the user's list."""
        return _renumbered(message, self.indexes)


def _renumbered(message: str, indexes: Sequence[int]) -> str:
    places = dict(enumerate(indexes))
    # A key that the user has made up may look like an entry.
    return _INDEX.sub(lambda found: f"tiers[{places.get(int(found[1]), found[1])}]", message)


def read_config(kind: type[Config], options: Mapping[str, Any], prefix: str = "") -> ReadConfig[Config]:
    """Returns the configuration that a server would read from ``options``, and every error for which it would refuse
    them. ``prefix``: the words before the settings of a DoorConfig in errors."""
    read: Any = partial(DoorConfig.from_mapping, prefix=prefix) if kind is DoorConfig else kind.from_mapping
    left, errors = dict(options), list[str]()
    tiers = left.get("tiers")
    indexes = list(range(len(tiers))) if isinstance(tiers, list) else []
    while len(errors) < MAX_ERRORS:
        try:
            return ReadConfig(read(left), errors, indexes)
        except ConfigError as error:
            message = str(error)
        errors.append(_renumbered(message, indexes))
        message = message.removeprefix(prefix)
        setting, entry = re.split(r"\W", message, maxsplit=1)[0], _INDEX.match(message)
        if entry is not None and int(entry[1]) < len(indexes):
            index = int(entry[1])
            left["tiers"] = [each for i, each in enumerate(left["tiers"]) if i != index]
            del indexes[index]
            if not indexes and kind is DoorConfig:
                break
        elif setting == "tier" and kind is DoorConfig and left.get("tiers") is None:
            break
        elif setting == "tenants":
            if any(re.match("host_bytes|disk_|tiers", each) for each in errors) and _IS_OF_BUDGET.search(message):
                # The error follows from the settings that were left out.
                errors.pop()
            left["tenants"] = _without_fault(left["tenants"], message)
        elif setting == "host_bytes":
            left["host_bytes"] = _STAND_IN_BYTES
        elif setting in left:
            # Without the one the other would be an error too, which the user has not made.
            for each in _TOGETHER if setting in _TOGETHER else (setting,):
                left.pop(each, None)
        else:
            break
    return ReadConfig(None, errors, indexes)


def _without_fault(tenants: object, message: str) -> dict[str, Any]:
    """Returns the option ``tenants`` without the subject of ``message``: a key of one tenant, one tenant, or all
    guarantees of a tier; nothing if the message is about all tenants."""
    if not isinstance(tenants, Mapping):
        return {}
    found = re.search(r" of (\S+) are guaranteed", message)
    if message.startswith("tenants: ") and found is not None:
        return {name: _without(entry, ("guaranteed", found[1])) for name, entry in tenants.items()}
    for name in tenants:
        if message.startswith(f"tenants: {shown(name)} "):
            return {each: tenants[each] for each in tenants if each != name}
    return dict(_without(tenants, _path_in(tenants, message.removeprefix("tenants"))) or {})


def _path_in(value: object, rest: str) -> tuple[str, ...]:
    """Returns the keys in nested mappings that ``rest`` begins with. A key may contain dots itself."""
    rest = rest.lstrip(".: ")
    names = value if isinstance(value, Mapping) else {}
    keys = [str(key) for key in names if re.match(re.escape(str(key)) + r"[.:= ]", rest)]
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


def _plan(door: Door, given: Given, options: Mapping[str, Any], report: Report) -> tuple[Plan, list[str]]:
    """Returns the plan, and every error that a server would give."""
    is_connector = door is Door.CONNECTOR
    planned, tiers, errors, config = list[TierEntry](), list[PlannedTier](), list[str](), None
    for part in given.parts:
        read: ReadConfig[Any] = read_config(OffloadConfig if is_connector else DoorConfig, part.options, part.prefix)
        errors += read.errors
        config = read.config
        if config is None:
            continue
        for entry in config.tier_entries:
            prefix = read.named(entry.prefix)
            named = TierEntry(prefix, entry.config)
            try:
                tier = _planned(entry.config.kind, prefix, entry.config, config.lookup_deadline_ms, report)
                check_distinct([*planned, named])
            except ConfigError as error:
                message = str(error)
                errors.append(message if message.startswith(prefix) else named.name_setting(message))
            else:
                planned.append(named)
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
    is_host_wrong = any(re.match(r"host_bytes\b", error) for error in errors)
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


def _planned(name: str, prefix: str, config: TierConfig, lookup_deadline_ms: float, report: Report) -> PlannedTier:
    """Returns the doctor's view of a tier. Raises ConfigError."""
    store, memory_bytes, pins_memory = None, 0, False
    if isinstance(config, RemoteTierConfig):
        memory_bytes, pins_memory = config.memory_bytes, config.pins_memory
        for key, harm in _SECRET_FILES.items():
            _check_secret_file(f"{prefix}{key}", getattr(config, key, None), harm, report)
        settings = dict(config.settings())
        if settings.get("segment_bytes"):
            # Little, because values of others there are lost when the doctor leaves.
            settings["segment_bytes"] = min(settings["segment_bytes"], MAX_SEGMENT_BYTES)
        store = Store(config.connect, settings, config.prefix, config.address, config.client_bytes, config.compress)
    return PlannedTier(
        name,
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


def _check_transfer(transfer: Mapping[str, Any], door: Door, report: Report) -> None:
    """Checks vLLM's own keys in its ``--kv-transfer-config``."""

    def problem(name: str, text: str, fix: str, level: Level = Level.PROBLEM) -> None:
        report.found(f"config.{name}", level, text, fix)

    connector, role = transfer.get("kv_connector"), transfer.get("kv_role")
    if door is Door.CONNECTOR and connector != CONNECTOR:
        problem("connector", f"kv_connector={connector!r}: is not kvoffload", f'write "kv_connector": "{CONNECTOR}"')
    if role is None:
        problem("role", "kv_role is not set, and vLLM refuses a connector without it", f'add "kv_role": "{ROLE}"')
    elif role != ROLE:
        fix = f'write "kv_role": "{ROLE}"'
        problem("role", f"kv_role={role!r}: a server both stores and loads blocks", fix, Level.WARNING)
    plugins = os.environ.get("VLLM_PLUGINS") if door is Door.CONNECTOR else None
    if plugins is not None and PLUGIN not in plugins.split(",") and "kv_connector_module_path" not in transfer:
        problem(
            "plugin",
            f"VLLM_PLUGINS={plugins!r}: vLLM then does not load kvoffload's plugin",
            f'add ",{PLUGIN}" to the variable, or "kv_connector_module_path": "kvoffload.vllm" to the configuration',
        )

"""Checks the configuration: every setting, with the errors that a server would give."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvoffload.abc import ConfigError
from kvoffload.abc.shown import shown
from kvoffload.cache.tenants import TenantConfig
from kvoffload.config import HostContents, IntegrationConfig, OffloadConfig
from kvoffload.doctor.findings import Level, Report
from kvoffload.doctor.integrations import Given, Integration, Say, integration_of, read_sglang, read_vllm
from kvoffload.doctor.source import OPTIONS_KEY, ConfigSource
from kvoffload.supported import CONNECTOR, refuse_companions
from kvoffload.tiering.bridge import STAGING_BYTES
from kvoffload.tiers.config import TierConfig, TierEntry, check_distinct, distinct_names, load_tiers
from kvoffload.tiers.remote.config import RemoteTierConfig
from kvoffload.units import format_bytes

ROLE = "kv_both"
PLUGIN = "kvoffload"
DEVICE_BLOCK_TOKENS = 16
"""vLLM's usual block size."""
LOOKUP_DEADLINE_MS = 100.0
"""For the tiers of a configuration that cannot be read otherwise."""
_SECRET_FILES = {
    "hmac_key_file": "could forge blocks",
    "password_file": "could read and forge what is in the store",
    "key_file": "could take this server's part",
}
"""Settings of tiers that name a file with a secret, and the harm that its readers could do."""
_OTHERS = 0o077
_GROUP = 0o070
_OPTIONS = frozenset(each.name for each in fields(OffloadConfig))


@dataclass(frozen=True, slots=True)
class PlannedTier:
    """A tier of the configuration. ``prefix`` stands before its keys in errors, such as "tiers[1]."."""

    name: str
    prefix: str
    config: TierConfig
    lookup_deadline_ms: float

    @property
    def store(self) -> RemoteTierConfig | None:
        """The settings of a remote store, None for other tiers."""
        return self.config if isinstance(self.config, RemoteTierConfig) else None

    @property
    def memory_bytes(self) -> int:
        """Memory of this node that the tier takes beside the host pools."""
        return self.store.memory_bytes if self.store is not None else 0

    @property
    def place(self) -> str:
        """The directory or the address of the tier, empty if it has neither."""
        return self.config.directory or (self.store.address if self.store is not None else "")


@dataclass(frozen=True, slots=True)
class PlannedServer:
    """A server's view of the configuration: the readable settings. None: not set, or wrong."""

    integration: Integration = Integration.CONNECTOR
    host_bytes: int | None = None
    """Host memory for blocks: kvoffload's own pool, or elsewhere that of the engine."""
    staging_bytes: int = 0
    """Memory of kvoffload beside the engine's host memory."""
    shared_memory_bytes: int = 0
    """The part of ``host_bytes`` that the engine allocates in /dev/shm."""
    policy: str = "auto"
    host_contents: HostContents | None = None
    block_tokens: int = DEVICE_BLOCK_TOKENS
    tiers: Sequence[PlannedTier] = ()
    tenants: Sequence[TenantConfig] = ()

    @property
    def host_setting(self) -> str:
        """The setting that says how much host memory there is."""
        return {
            Integration.CONNECTOR: "host_bytes",
            Integration.VLLM: "cpu_bytes_to_use",
            Integration.SGLANG: "--hicache-size",
        }[self.integration]

    @property
    def needed_bytes(self) -> int:
        """Memory of this node that a server would allocate, as far as it is known."""
        return (self.host_bytes or 0) + self.staging_bytes + sum(tier.memory_bytes for tier in self.tiers)

    def set_host_bytes(self, nbytes: int) -> str:
        """Returns the fix that gives the engine so much host memory. vLLM reads a number without a unit."""
        amount = f"{nbytes} ({format_bytes(nbytes)})" if self.integration is Integration.VLLM else format_bytes(nbytes)
        return f"set {self.host_setting} to {amount}"

    @property
    def engine(self) -> str:
        return "SGLang" if self.integration is Integration.SGLANG else "vLLM"


def check(source: ConfigSource, report: Report) -> PlannedServer:
    """Reports faults of the configuration. Returns the plan."""
    report.stage("reads the configuration")
    is_valid = True

    def say(name: str, text: str, fix: str = "", level: Level = Level.PROBLEM) -> None:
        nonlocal is_valid
        is_valid &= level is not Level.PROBLEM
        report.found(f"config.{name}", level, text, fix)

    options, transfer = source.options, source.transfer or {}
    integration = integration_of(options, source.transfer)
    if source.transfer is not None:
        _check_transfer(transfer, source.several, integration, say)
    misplaced = {name: transfer[name] for name in transfer if name in _OPTIONS}
    if misplaced and integration is Integration.CONNECTOR:
        # They are checked there: what else is wrong is said too.
        options = {**misplaced, **options}
        text = f"{', '.join(misplaced)}: vLLM knows no such {'keys' if len(misplaced) > 1 else 'key'} there"
        say("misplaced", text, f'write kvoffload\'s options one level below, into "{OPTIONS_KEY}": {{...}}')
    given = Given({"": options})
    if integration is not Integration.CONNECTOR:
        given = (read_vllm if integration is Integration.VLLM else read_sglang)(options, say)
    plan, errors = _plan(integration, given, options)
    for error in errors:
        say("refused", error.wrong, re.sub("^or ", "correct it, or ", error.fix) or "correct the setting")
    for tier in plan.tiers:
        for key, harm in _SECRET_FILES.items():
            _check_secret_file(f"{tier.prefix}{key}", getattr(tier.config, key, None), harm, report)
    if is_valid:
        text = f"every setting is valid: tiers: {', '.join(tier.name for tier in plan.tiers) or 'none'}"
        if plan.host_bytes is not None:
            host = f"{plan.host_setting} {format_bytes(plan.host_bytes)}"
            text = text.replace("valid:", f"valid: {host}, policy {plan.policy},")
        if plan.tenants:
            text += f", tenants: {', '.join(tenant.name for tenant in plan.tenants)}"
        figures = {"host_bytes": plan.host_bytes, "num_tiers": len(plan.tiers)}
        report.found("config.valid", Level.OK, text, figures=figures)
    return plan


def read_config(
    integration: Integration, options: Mapping[str, Any], prefix: str = ""
) -> tuple[OffloadConfig | IntegrationConfig | None, list[TierEntry], list[ConfigError]]:
    """Returns the configuration that a server would read from ``options``, its tiers, and the errors for which the
    server would refuse it: that of each entry of ``tiers``, and the first one of everything else. ``prefix``: the words
    before the settings of a IntegrationConfig in errors.

    With a wrong entry, everything that depends on tiers is left out. The configuration is None if the rest is wrong.
    """
    entries, errors = list[TierEntry](), list[ConfigError]()
    tiers = options.get("tiers")
    for i, entry in enumerate(tiers if isinstance(tiers, list) else []):
        name = f"{prefix}tiers[{i}]"
        try:
            (config,) = load_tiers([entry], [name])
            entries.append(TierEntry(f"{name}.", config))
        except ConfigError as error:
            errors.append(error)
    if errors:
        options = {name: value for name, value in options.items() if name not in ("tiers", "tenants")}
    try:
        if integration is Integration.CONNECTOR:
            found: OffloadConfig | IntegrationConfig = OffloadConfig.from_mapping(options)
        elif errors:
            return None, entries, errors
        else:
            found = IntegrationConfig.from_mapping(options, prefix)
    except ConfigError as error:
        return None, entries, [*errors, error]
    return found, [*found.tier_entries, *(entries if errors else [])], errors


def _plan(
    integration: Integration, given: Given, options: Mapping[str, Any]
) -> tuple[PlannedServer, list[ConfigError]]:
    """Returns the plan, and the errors that a server would give."""
    planned, deadlines, errors = list[TierEntry](), list[float](), list[ConfigError]()
    config: OffloadConfig | IntegrationConfig | None = None
    for prefix, part in given.parts.items():
        config, entries, found = read_config(integration, part, prefix)
        errors += found
        usual = LOOKUP_DEADLINE_MS if config is None else config.lookup_deadline_ms
        for entry in entries:
            try:
                # Of other parts, too.
                check_distinct([*planned, entry])
            except ConfigError as error:
                errors.append(error)
                continue
            planned.append(entry)
            deadlines.append(entry.config.lookup_deadline_ms or usual)
    names = distinct_names(entry.config.kind for entry in planned)
    tiers = [
        PlannedTier(name, entry.prefix, entry.config, deadline)
        for name, entry, deadline in zip(names, planned, deadlines, strict=True)
    ]
    if integration is not Integration.CONNECTOR:
        block_size, factor = options.get("block_size"), options.get("blocks_per_chunk")
        return PlannedServer(
            integration,
            given.host_bytes,
            staging_bytes=STAGING_BYTES * len(given.parts),
            shared_memory_bytes=(given.host_bytes or 0) if given.in_shared_memory else 0,
            policy=str(options.get("eviction_policy", "lru")),
            block_tokens=_block_tokens(block_size, factor),
            tiers=tiers,
        ), errors
    if not isinstance(config, OffloadConfig):
        return PlannedServer(tiers=tiers), errors
    return PlannedServer(
        host_bytes=config.host_bytes,
        policy=config.policy,
        host_contents=config.host_contents,
        block_tokens=_block_tokens(config.block_size, config.block_size_factor),
        tiers=tiers,
        tenants=config.tenants,
    ), errors


def _block_tokens(block_size: object, factor: object) -> int:
    if isinstance(block_size, int) and block_size > 0:
        return block_size
    return DEVICE_BLOCK_TOKENS * (factor if isinstance(factor, int) and factor > 0 else 1)


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


def _check_transfer(
    transfer: Mapping[str, Any], several: Mapping[str, Any] | None, integration: Integration, say: Say
) -> None:
    """Checks vLLM's own keys in its ``--kv-transfer-config``, or in that of ``several`` connectors too."""
    connector, role = transfer.get("kv_connector"), transfer.get("kv_role")
    if integration is Integration.CONNECTOR and connector != CONNECTOR:
        text = f"kv_connector={shown('kv_connector', connector)}: is not kvoffload"
        say("connector", text, f'write "kv_connector": "{CONNECTOR}"')
    if role in ("kv_producer", "kv_consumer"):
        text = f"kv_role={role!r}: a server both stores and loads blocks"
        say("role", text, f'write "kv_role": "{ROLE}"', Level.WARNING)
    plugins = os.environ.get("VLLM_PLUGINS") if integration is Integration.CONNECTOR else None
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

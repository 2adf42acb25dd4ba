"""The configuration, typed and checked. Errors name the setting, its value and what to write instead."""

from __future__ import annotations

import dataclasses
import enum
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvoffload.abc import NOT_SET, ConfigError
from kvoffload.cache.policies import policy_class
from kvoffload.cache.tenants import HOST, TenantConfig, check_budgets, load_tenants
from kvoffload.host.limits import available_memory, total_memory
from kvoffload.host.pool import padded_slot_bytes
from kvoffload.settings import absolute_path, check_deadline, check_whole_number, unknown
from kvoffload.tiers.config import TierConfig, TierEntry, check_distinct, distinct_names, load_tiers
from kvoffload.tiers.disk.config import DiskConfig
from kvoffload.units import MIN_BUDGET, Amount, format_bytes, parse_bytes

_PATHS = {"disk_dir": "/var/cache/kvoffload", "record_trace": "/var/log/kvoffload/trace.jsonl"}
"""Options that are paths, with an example of each."""


def _half(free: int) -> str:
    """Returns half of ``free`` bytes, at least 1 MiB, as a value for an option."""
    half = max(free // 2, 1 << 20)
    return f"{half >> 30}GiB" if half >> 30 else f"{half >> 20}MiB"


def _free_disk(directory: str) -> int:
    """Returns the free bytes of the disk on which ``directory`` is, or would be."""
    path = Path(directory)
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


class HostContents(enum.StrEnum):
    """Which blocks host memory is given."""

    INCLUSIVE = "inclusive"
    """Those that are computed, so the most recent ones are on the device too."""
    EXCLUSIVE = "exclusive"
    """Those that leave the device. The blocks that the device holds too leave host memory first."""


def contents_of(asked: HostContents | None, why_inclusive: str | None) -> HostContents:
    """Returns the contents of host memory, of a server and of what is computed for one: those that are ``asked`` for,
    or else exclusive ones, unless ``why_inclusive`` says why they cannot be. Raises ConfigError if these are asked for.
    """
    if asked is HostContents.EXCLUSIVE and why_inclusive is not None:
        raise ConfigError("host_contents", asked.value, why_inclusive, "leave it out")
    return asked or (HostContents.EXCLUSIVE if why_inclusive is None else HostContents.INCLUSIVE)


LARGE_BLOCKS = "a block has several device blocks (block_size, block_size_factor)"
OTHER_LAYERS = "the model has layers other than full attention"
"""Why contents are inclusive."""


def _host_contents(value: object) -> HostContents | None:
    if value is None:
        return None
    if isinstance(value, str) and value in set(HostContents):
        return HostContents(value)
    raise ConfigError("host_contents", value, 'must be "inclusive" or "exclusive"', "or leave it out")


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """What a user can set. In vLLM these are the keys of ``kv_connector_extra_config``.

    Every value is checked before any memory is allocated: the constructor raises ConfigError. Amounts of bytes may be
    strings such as "8GiB".
    """

    host_bytes: int
    """Host RAM for offloaded blocks on this node, including padding."""
    policy: str = "auto"
    """The eviction policy: "auto", which tunes itself, "lru", "arc", or a CachePolicy as "package.module:Class"."""
    host_contents: HostContents | None = None
    """"exclusive": a block is stored when it leaves the device, so host memory adds its whole size to the device's.
    "inclusive": a block is stored when it is computed. By default exclusive where the engine and the model allow it."""
    block_size_factor: int | None = None
    """Device blocks per offloaded block. Default 1."""
    block_size: int | None = None
    """The same in tokens per offloaded block. Set at most one of the two."""
    store_threshold: int | None = None
    """How many requests must ask for a block before it is stored, 2 or more. By default all blocks are stored."""
    disk_dir: str | None = None
    """Directory of the disk tier: an absolute path, or a path that begins with "~"."""
    disk_bytes: int | None = None
    """Disk space for offloaded blocks on this node, including everything else that the tier keeps there."""
    tiers: tuple[TierConfig, ...] = ()
    """Tiers below host memory and below the disk of ``disk_dir``, the fastest first: a list of mappings, each with the
    key "kind" and the keys of that kind."""
    tenants: tuple[TenantConfig, ...] = ()
    """What each tenant may take of each tier: a mapping from names to mappings with any of the keys "guaranteed" and
    "quota", bytes on this node by the name of a tier ("host", or as in metrics), and "salt_sha256"."""
    load_deadline_ms: float = 1000.0
    """How long a request waits for blocks: for blocks that another request is loading, before it loads its own copy;
    for blocks that a lower tier is reading, before it computes those that have not arrived."""
    lookup_deadline_ms: float = 100.0
    """How long a tier may take to answer whether it holds a block. After that the block is a miss."""
    load_only_if_faster: bool = True
    """Whether a prefix is computed if loading it from a tier below host memory would take longer."""
    engines_per_node: int | None = None
    """Number of data-parallel engines that share these budgets on this node. Needed only if vLLM does not say."""
    canonical_layout: bool = False
    """Whether a block has the same bytes whatever the parallelism, so that lower tiers give the blocks of an engine to
    engines with other numbers of ranks. Where the layout of the KV cache has no such form, this has no effect."""
    record_trace: str | None = None
    """File to which one line per request is appended, for ``kvoffload replay``. A path as for ``disk_dir``."""
    model_fingerprint: str | None = None
    """Identifies the weights if they cannot be read. Normally this is derived from the model's files."""

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> OffloadConfig:
        """Returns the configuration with these options. An option that is None counts as not set.

        Raises ConfigError for an unknown option, a wrong value, or if ``host_bytes`` is missing.
        """
        _check_known(options, [field.name for field in dataclasses.fields(cls)])
        if options.get("host_bytes") is None:
            free = available_memory()
            fix = (
                f'say how much host RAM to use, such as host_bytes="{_half(free)}" '
                f"(half of the {format_bytes(free)} free here)"
            )
            raise ConfigError("host_bytes", NOT_SET, "is not set", fix)
        for name in ("host_bytes", "disk_bytes"):
            if options.get(name) is not None:
                parse_bytes(name, options[name], MIN_BUDGET)
        return cls(**{name: value for name, value in options.items() if value is not None})

    def __post_init__(self) -> None:
        for name in ("host_bytes", "disk_bytes"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, parse_bytes(name, getattr(self, name)))
        for name in _PATHS:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, absolute_path(name, getattr(self, name), _PATHS[name]))
        _check_policy(self.policy)
        object.__setattr__(self, "host_contents", _host_contents(self.host_contents))
        total = total_memory()
        if self.host_bytes > total:
            raise ConfigError(
                "host_bytes",
                Amount(self.host_bytes),
                f"this machine has {format_bytes(total)} in all",
                f"set host_bytes to what it can spare, such as {format_bytes(total // 2)}",
            )
        for name, least in (
            ("block_size_factor", 1),
            ("block_size", 1),
            ("store_threshold", 2),
            ("engines_per_node", 1),
        ):
            check_whole_number(name, getattr(self, name), least)
        if self.block_size_factor is not None and self.block_size is not None:
            raise ConfigError("block_size", self.block_size, "block_size_factor sets the same", "remove one of the two")
        contents_of(self.host_contents, LARGE_BLOCKS if (self.block_size_factor or 1) > 1 else None)
        self._check_disk()
        object.__setattr__(self, "tiers", load_tiers(self.tiers))
        check_distinct(self.tier_entries)
        object.__setattr__(self, "tenants", load_tenants(self.tenants))
        named = zip(self.tier_names, self.tier_entries, strict=True)
        retaining = [HOST, *(name for name, entry in named if entry.config.retains)]
        check_budgets(self.tenants, {HOST: self.host_bytes, **self.tier_budgets}, retaining)
        for name in ("load_deadline_ms", "lookup_deadline_ms"):
            check_deadline(name, getattr(self, name))
        for name in ("load_only_if_faster", "canonical_layout"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(name, getattr(self, name), "must be true or false, without quotes")
        _check_model_fingerprint(self.model_fingerprint)

    def _check_disk(self) -> None:
        if self.disk_dir is None and self.disk_bytes is not None:
            fix = 'say where, such as disk_dir="/var/cache/kvoffload"; or remove it'
            raise ConfigError("disk_bytes", Amount(self.disk_bytes), "disk_dir is not set", fix)
        if self.disk_dir is not None and self.disk_bytes is None:
            free = _free_disk(self.disk_dir)
            fix = (
                f'say how much of that disk to use, such as disk_bytes="{_half(free)}" '
                f"(half of the {format_bytes(free)} free there)"
            )
            raise ConfigError("disk_dir", self.disk_dir, "disk_bytes is not set", fix)

    @property
    def tier_entries(self) -> list[TierEntry]:
        """All tiers below host memory, the fastest first, with what errors call them."""
        entries = [TierEntry(f"tiers[{i}].", tier) for i, tier in enumerate(self.tiers)]
        if self.disk_dir is not None and self.disk_bytes is not None:
            entries.insert(0, TierEntry("disk_", DiskConfig(self.disk_dir, self.disk_bytes)))
        return entries

    @property
    def tier_names(self) -> list[str]:
        """The names of these tiers in logs, metrics and events."""
        return distinct_names(entry.config.kind for entry in self.tier_entries)

    @property
    def tier_budgets(self) -> dict[str, int | None]:
        """The bytes of which tenants have shares, by the name of the tier; None if they have none there."""
        budgets = (each.config.capacity_bytes if each.config.has_shares else None for each in self.tier_entries)
        return dict(zip(self.tier_names, budgets, strict=True))

    def factor(self, device_block_size: int) -> int:
        """Returns the device blocks per offloaded block for an engine with ``device_block_size`` tokens per block.

        Raises ConfigError if ``block_size`` is not a multiple of that.
        """
        if self.block_size is None:
            return self.block_size_factor or 1
        factor, rest = divmod(self.block_size, device_block_size)
        if rest or factor < 1:
            raise ConfigError(
                "block_size",
                self.block_size,
                f"must be a multiple of the engine's block size, {device_block_size} tokens",
                f"set it to {device_block_size * max(1, factor)} or leave it out",
            )
        return factor

    def num_blocks(self, block_bytes: int, ranks: int = 1) -> int:
        """Returns how many blocks fit into ``host_bytes`` if one takes ``block_bytes`` on each of ``ranks``.

        Raises ConfigError if none does.
        """
        slot_bytes = padded_slot_bytes(block_bytes) * ranks
        blocks = self.host_bytes // slot_bytes
        if blocks < 1:
            raise ConfigError(
                "host_bytes",
                Amount(self.host_bytes),
                "holds no block",
                f"one takes {format_bytes(slot_bytes)} ({slot_bytes} bytes); set host_bytes to many times that",
            )
        return blocks


@dataclass(frozen=True, slots=True)
class IntegrationConfig:
    """What a user can set where kvoffload keeps what lies below the host memory of an engine's own offloading.

    The fields are options of OffloadConfig with the same meaning. Every value is checked: the constructor raises
    ConfigError.
    """

    tiers: tuple[TierConfig, ...]
    policy: str = "auto"
    load_deadline_ms: float = 1000.0
    lookup_deadline_ms: float = 100.0
    engines_per_node: int | None = None
    model_fingerprint: str | None = None
    names: tuple[str, ...] = ()
    """What errors call each of the tiers, by default "tiers[0]" and so on."""

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any], prefix: str = "") -> IntegrationConfig:
        """Returns the configuration with these keys: the names of the fields, and ``tier`` for a single tier. A key
        that is None counts as not set. ``prefix`` is put in front of every key in errors.

        Raises ConfigError for an unknown key, a wrong value, or if there is no tier.
        """
        given = {name: value for name, value in options.items() if value is not None}
        is_single = "tier" in given and "tiers" not in given
        try:
            fields = [field.name for field in dataclasses.fields(cls) if field.name != "names"]
            _check_known(given, ["tier", *fields])
            if is_single:
                given["tiers"] = [given.pop("tier")]
            elif "tier" in given:
                raise ConfigError("tier", NOT_SET, "tiers is set too", "move the entry of tier into tiers")
            if not given.get("tiers"):
                example = {"kind": "disk", **DiskConfig.example}
                raise ConfigError("tier", NOT_SET, "is not set", f"add a tier, such as {json.dumps({'tier': example})}")
            tiers = given["tiers"]
            names = [f"{prefix}tiers[{i}]" for i in range(len(tiers) if isinstance(tiers, Sequence) else 0)]
            return cls(**given, names=(f"{prefix}tier",) if is_single else tuple(names))
        except ConfigError as error:
            raise (error if error.setting.startswith(prefix) else error.within(prefix)) from error

    def __post_init__(self) -> None:
        _check_policy(self.policy)
        object.__setattr__(self, "tiers", load_tiers(self.tiers, self.names))
        if not self.names:
            object.__setattr__(self, "names", tuple(f"tiers[{i}]" for i in range(len(self.tiers))))
        check_distinct(self.tier_entries)
        check_whole_number("engines_per_node", self.engines_per_node, 1)
        for name in ("load_deadline_ms", "lookup_deadline_ms"):
            check_deadline(name, getattr(self, name))
        _check_model_fingerprint(self.model_fingerprint)

    @property
    def tier_entries(self) -> list[TierEntry]:
        """All tiers, the fastest first, with what errors call them."""
        return [TierEntry(f"{name}.", tier) for name, tier in zip(self.names, self.tiers, strict=True)]


def _check_known(options: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in options:
        if name not in known:
            raise unknown(name, options[name], "option", known)


def _check_policy(policy: object) -> None:
    if not isinstance(policy, str):
        raise ConfigError("policy", policy, "", 'write a name such as policy="lru"')
    policy_class(policy)


def _check_model_fingerprint(value: object) -> None:
    if value is not None and not (isinstance(value, str) and value):
        raise ConfigError("model_fingerprint", value, "must be a string that changes with the weights")

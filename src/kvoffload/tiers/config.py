"""Entries of the option ``tiers``: the kinds of tiers, their settings, and the context in which they are opened."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import count
from typing import Any, ClassVar

from kvoffload.abc import NOT_SET, ByteArray, ConfigError, KVGroup, Tier
from kvoffload.abc.shown import shown
from kvoffload.cache.tenants import MakeShares
from kvoffload.deadlines import FILES_DEADLINE_S, within
from kvoffload.host.pool import PoolHandle
from kvoffload.settings import check_deadline, check_whole_number, import_subclass, unknown

PATHS_DEADLINE_S = 0.5
"""Time to follow the symbolic links of all directories. A server does that several times before it opens tiers."""
BUILTIN = {
    "disk": "kvoffload.tiers.disk.config:DiskConfig",
    "shared_dir": "kvoffload.tiers.shared_dir.config:SharedDirConfig",
    "redis": "kvoffload.tiers.redis.config:RedisConfig",
    "mooncake": "kvoffload.tiers.mooncake.config:MooncakeConfig",
    "object_store": "kvoffload.tiers.object_store.config:ObjectStoreConfig",
}
"""The TierConfig of each kind by its import path: only kinds in use are imported."""
_KNOWN_KINDS = ", ".join(BUILTIN)
_ALIASES = {
    "s3": ["object_store"],
    "gcs": ["object_store"],
    "valkey": ["redis"],
    "nfs": ["shared_dir"],
    "ssd": ["disk"],
}
"""Other names for the kinds."""


@dataclass(frozen=True, slots=True)
class TierContext:
    """The context in which a tier is opened.

    ``pools`` are the host pools, one per rank, shape (num_slots, slot_bytes); ``handles`` open them in another process,
    or are None for a pool that other processes cannot reach. ``fingerprint``: 64 hexadecimal digits; blocks are found
    again only under the same one. ``identity`` says in words what the fingerprint depends on, such as {"dtype":
    "bfloat16"}, so that a log can say in what another fingerprint differs: see ``tiers.identity``. ``policy``: the
    eviction policy. ``engine``: the index of this engine among the ``engines`` of this node that share the budgets.
    ``groups``: the KV cache groups that keys name, none if they are not known. ``shares`` returns what each tenant may
    take of a tier of this engine with so many blocks of so many bytes; None if tenants share nothing.
    """

    pools: Sequence[ByteArray]
    fingerprint: str
    handles: Sequence[PoolHandle | None] = ()
    identity: Mapping[str, str] = field(default_factory=dict)
    policy: str = "lru"
    engine: int = 0
    engines: int = 1
    groups: Sequence[KVGroup] = ()
    shares: MakeShares | None = None

    def num_tokens(self, num_blocks: int) -> int:
        """Returns how many tokens have all their KV in so many blocks; states come on top."""
        groups = [group for group in self.groups if not group.state] or self.groups
        per_token = sum(Fraction(1, group.block_tokens) for group in groups)
        return int(num_blocks / per_token) if groups else num_blocks


@dataclass(frozen=True, kw_only=True)
class TierConfig(ABC):
    """One entry of ``tiers``. Subclasses are frozen dataclasses whose fields are the keys of the entry, beside ``kind``
    and those that every tier has.

    The constructor and ``open`` raise ConfigError(KEY, VALUE, FAULT, FIX); the caller puts "tiers[INDEX]." in front of
    the key. An error of ``open`` about something else is about the whole tier.
    """

    kind: ClassVar[str]
    """Name of the tier in logs and metrics. A second tier of the kind is called "KIND-2"."""
    example: ClassVar[Mapping[str, object]] = {}
    """Keys and values of an entry, which errors propose."""
    has_shares: ClassVar[bool] = False
    """Whether tenants have shares of the tier: see ``TierContext.shares``."""
    retains: ClassVar[bool] = False
    """Whether tenants can have blocks retained in it: see ``Tier.retain``."""
    is_shared: ClassVar[bool] = False
    """Whether its tier is, see ``Tier.is_shared``."""

    store_threshold: int | None = None
    """How many requests must ask for a block before it is written to this tier, 2 or more. By default all blocks that
    are stored are written."""
    lookup_deadline_ms: float | None = None
    """How long this tier may take to answer whether it holds a block. By default as the option of the same name says.
    """

    @property
    def capacity_bytes(self) -> int | None:
        """The tier's budget in the medium on this node, or None if the medium bounds itself. By default None."""
        return None

    @property
    def directory(self) -> str | None:
        """The directory that is the tier's alone on this node, an absolute path. By default None."""
        return None

    @abstractmethod
    def open(self, context: TierContext) -> Tier:
        """Returns the tier, ready to serve. A tier whose server cannot be reached is opened too, and reaches it later.
        A thread of its own calls this, at the same time as that of other tiers, and again after a failure. It may hang,
        and ends when the tier is open.

        Raises ConfigError for a wrong setting, and OSError if the medium fails: a server continues without the tier
        then, with a warning, and tries again.
        """


@dataclass(frozen=True, slots=True)
class TierEntry:
    """A tier of a configuration. ``prefix`` stands before a key in errors: "tiers[1].", or "disk_"."""

    prefix: str
    config: TierConfig

    @property
    def named(self) -> tuple[str, str]:
        """The setting that stands for the whole tier, and its value, such as "tiers[1].dir" and "/cache"."""
        if self.config.directory is not None:
            return f"{self.prefix}dir", self.config.directory
        return f"{self.prefix}kind", _import_path(type(self.config))

    @property
    def setting(self) -> str:
        """The same as text, such as "tiers[1].dir='/cache'"."""
        name, value = self.named
        return f"{name}={shown(name, value)}"

    def name_error(self, error: ConfigError) -> ConfigError:
        """Returns ``error`` about a key of the entry, or about the whole tier, as one about the configuration."""
        if error.setting in ("kind", *(each.name for each in dataclasses.fields(self.config))):
            return error.within(self.prefix)
        return ConfigError(*self.named, error.wrong, error.fix)


def load_tiers(value: object, names: Sequence[str] = ()) -> tuple[TierConfig, ...]:
    """Returns the tiers of the option ``tiers``: a list whose items are mappings with the key "kind", or TierConfigs.

    ``names``: the name of each item in errors, by default "tiers[0]" and so on. Raises ConfigError that has this name,
    the key and its value for everything that is wrong with one entry alone.
    """
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise ConfigError(
            "tiers",
            value,
            f"must be a list of tiers, the fastest first, such as tiers={json.dumps([_example('disk')])}",
        )
    names = names or [f"tiers[{i}]" for i in range(len(value))]
    return tuple(_load(name, entry) for name, entry in zip(names, value, strict=True))


def check_distinct(entries: Sequence[TierEntry]) -> None:
    """Raises ConfigError if two tiers are the same, or have a directory in common."""
    directories = _real([entry.config.directory for entry in entries])
    pairs = list(zip(entries, directories, strict=True))
    for n, (entry, mine) in enumerate(pairs):
        for other, theirs in pairs[:n]:
            if mine is not None and theirs is not None and os.path.commonpath([mine, theirs]) in (mine, theirs):
                raise ConfigError(
                    *entry.named,
                    f"{other.setting} has the same directory or one inside the other",
                    "give each tier a directory of its own",
                )
            if entry.config == other.config:
                raise ConfigError(*entry.named, f"the same tier as {other.setting}", "remove one of them")


def distinct_names(wanted: Iterable[str]) -> list[str]:
    """Returns one name per wanted name, in order: a second "disk" becomes "disk-2"."""
    names: list[str] = []
    for name in wanted:
        names.append(next(each for n in count(1) if (each := name if n == 1 else f"{name}-{n}") not in names))
    return names


@contextmanager
def prefixed(prefix: str) -> Iterator[None]:
    """Puts ``prefix`` in front of the setting of a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise error.within(prefix) from error


def _real(directories: Sequence[str | None]) -> Sequence[str | None]:
    """Returns the real paths of ``directories``, or these themselves if a file system hangs."""
    if len(directories) - directories.count(None) < 2:
        return directories
    with suppress(TimeoutError):
        return within(
            PATHS_DEADLINE_S, lambda: [None if path is None else os.path.realpath(path) for path in directories]
        )
    return directories


def _load(setting: str, entry: object) -> TierConfig:
    if not isinstance(entry, (TierConfig, Mapping)):
        example = json.dumps(_example("disk"))
        raise ConfigError(setting, entry, f"must be a mapping with the key kind, such as {example}")
    if isinstance(entry, Mapping) and "kind" not in entry:
        raise ConfigError(setting, entry, "no kind", f'add one, such as "kind": "disk". Known: {_KNOWN_KINDS}')
    with prefixed(f"{setting}."):
        made = entry if isinstance(entry, TierConfig) else _make(entry)
        check_whole_number("store_threshold", made.store_threshold, 2)
        if made.lookup_deadline_ms is not None:
            check_deadline("lookup_deadline_ms", made.lookup_deadline_ms)
    return made


def _tier_class(kind: object) -> type[TierConfig]:
    """Returns the TierConfig of ``kind``. Raises ConfigError if there is none."""
    choice = f'write one of {_KNOWN_KINDS}, or your own TierConfig as "package.module:Class"'
    if not isinstance(kind, str):
        raise ConfigError("kind", kind, "not a kind of tier", choice)
    path = BUILTIN.get(kind, kind)
    if not path.partition(":")[2]:
        near = _ALIASES.get(kind.lower(), []) or difflib.get_close_matches(kind, BUILTIN, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? Otherwise {choice}" if near else choice
        raise ConfigError("kind", kind, "no kind of tier has this name", hint)
    found = import_subclass("kind", path, TierConfig, choice)  # type: ignore[type-abstract]
    name = getattr(found, "kind", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(
            "kind",
            kind,
            "has no name for logs and metrics",
            f'give the class a line such as kind = "{found.__name__.removesuffix("Config").lower()}"',
        )
    return found


def _make(entry: Mapping[Any, Any]) -> TierConfig:
    """Returns the TierConfig with these keys. Raises ConfigError for an unknown, missing or wrong one."""
    found = _tier_class(entry["kind"])
    given = {key: value for key, value in entry.items() if key != "kind" and value is not None}
    fields = [each for each in dataclasses.fields(found) if each.init]
    # Those that every tier has come last.
    shared = {each.name for each in dataclasses.fields(TierConfig)}
    known = [each.name for each in sorted(fields, key=lambda each: each.name in shared)]
    for key in given:
        if key not in known:
            raise unknown(str(key), given[key], f"key of a tier of kind {found.kind}", ["kind", *known])
    for each in fields:
        is_needed = each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
        if is_needed and each.name not in given:
            example = json.dumps({"kind": found.kind, **found.example}) if each.name in found.example else None
            fix = f"write all of {example}" if example else "add it"
            raise ConfigError(each.name, NOT_SET, f"is not set, and a tier of kind {found.kind} needs it", fix)
    try:
        # It may look at files.
        return within(FILES_DEADLINE_S, lambda: found(**given))
    except ConfigError:
        raise
    except TimeoutError as error:
        raise ConfigError("kind", found.kind, f"a file of the entry: {error.strerror}", "look at the mount") from error
    except Exception as error:
        raise ConfigError(
            "kind",
            found.kind,
            f"{found.__name__} does not accept these values ({type(error).__name__})",
            f"correct {', '.join(map(str, given))}",
        ) from None


def _import_path(found: type[TierConfig]) -> str:
    """Returns the kind by which an entry names ``found``."""
    path = f"{found.__module__}:{found.__qualname__}"
    return next((kind for kind, builtin in BUILTIN.items() if builtin == path), path)


def _example(kind: str) -> dict[str, object]:
    return {"kind": kind, **_tier_class(kind).example}

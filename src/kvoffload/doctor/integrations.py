"""Configurations of the offloading of engines themselves: finds kvoffload's settings in them, and mistakes for which
the engine would refuse or ignore them."""

from __future__ import annotations

import difflib
import enum
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvoffload.abc.shown import shown
from kvoffload.doctor.findings import Level
from kvoffload.host.limits import total_memory

CONNECTOR = "OffloadingConnector"
TIERING_SPEC = "TieringOffloadingSpec"
DEFAULT_SPEC = "CPUOffloadingSpec"
TIER_MODULE, TIER = "kvoffload.vllm.secondary_tier", "KVOffloadTier"
POLICY_MODULE = "kvoffload.vllm.cache_policy"
POLICIES = ("AutoCachePolicy", "LRUCachePolicy", "ARCCachePolicy")
SPEC_MODULE, TIERING_SPEC_ON_CPUS, SPEC_ON_CPUS = "kvoffload.vllm.host_spec", "HostTieringSpec", "HostMemorySpec"
SPECS = {TIERING_SPEC: False, DEFAULT_SPEC: False, TIERING_SPEC_ON_CPUS: True, SPEC_ON_CPUS: True}
"""Whether the worker of a spec copies for an engine on CPUs. vLLM's own refuse to start there."""
STORAGE_MODULE, STORAGE = "kvoffload.sglang", "KVOffloadStorage"
BUILTIN_POLICIES = ("lru", "arc")
"""Names that vLLM takes for its own policies, whatever module is named beside them."""
_ENTRY_KEYS = ("type", "module_path", "locality", "backpressure")
"""Keys of an entry of ``secondary_tiers`` that are vLLM's."""
_STORAGE_KEYS = ("backend_name", "module_path", "class_name", "interface_v1", "file_storage_path")
_SGLANG_KEYS = (
    *_STORAGE_KEYS,
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
    "tp_lcm_size",
)
_OF_VLLM = ("secondary_tiers", "spec_name", "spec_module_path", "cpu_bytes_to_use", "eviction_policy")
_MISPLACED = ("tier", "tiers", "host_bytes", "disk_dir", "disk_bytes", "model_fingerprint", "policy")
"""kvoffload's settings that vLLM would ignore beside ``secondary_tiers``."""
_TIER_EXAMPLE = '"tier": {"kind": "disk", "dir": "/var/cache/kvoffload", "bytes": "500GiB"}'
_ENTRY_EXAMPLE = f'{{"type": "{TIER}", "module_path": "{TIER_MODULE}", {_TIER_EXAMPLE}}}'

Say = Callable[..., None]
"""Reports a finding: the end of its id, its text, its fix, and ``level``, by default Level.PROBLEM."""


class Integration(enum.StrEnum):
    """The way in by which an engine reaches kvoffload."""

    CONNECTOR = "connector"
    VLLM = "vllm"
    """vLLM's own connector, with a secondary tier or a cache policy of kvoffload."""
    SGLANG = "sglang"


@dataclass(frozen=True, slots=True)
class TierOptions:
    """kvoffload's settings of one set of tiers. ``prefix``: the words before their names in the configuration."""

    options: Mapping[str, Any]
    prefix: str = ""


@dataclass(slots=True)
class Given:
    """The contents of a configuration of an engine's own offloading. ``host_bytes``: memory that the engine itself
    allocates, None if unknown. ``in_shared_memory``: whether it does so in /dev/shm. ``is_for_cpus``: see
    ``PlannedServer``."""

    parts: list[TierOptions] = field(default_factory=list)
    host_bytes: int | None = None
    in_shared_memory: bool = False
    is_for_cpus: bool | None = None


def integration_of(options: Mapping[str, Any], transfer: Mapping[str, Any] | None) -> Integration:
    """Returns whose configuration this is. ``transfer``: see ``ConfigSource``."""
    if transfer is not None:
        return Integration.VLLM if transfer.get("kv_connector") == CONNECTOR else Integration.CONNECTOR
    if any(name in options for name in _OF_VLLM):
        return Integration.VLLM
    return Integration.SGLANG if any(name in options for name in _STORAGE_KEYS) else Integration.CONNECTOR


# vLLM.


def read_vllm(extra: Mapping[str, Any], say: Say) -> Given:
    """Reads the ``kv_connector_extra_config`` of vLLM's connector, and reports its faults."""
    entries = extra.get("secondary_tiers", [])
    if not isinstance(entries, list):
        say(
            "refused",
            f"secondary_tiers={shown('secondary_tiers', entries)}: not a list",
            f'write "secondary_tiers": [{_ENTRY_EXAMPLE}]',
        )
        entries = []
    parts = [part for i, entry in enumerate(entries) for part in _entry(f"secondary_tiers[{i}]", entry, say)]
    spec = _check_spec(extra, bool(entries), say)
    has_policy = _check_policy(extra, say)
    misplaced = [name for name in _MISPLACED if name in extra]
    if misplaced:
        text = f"{', '.join(misplaced)}: vLLM ignores {'them' if len(misplaced) > 1 else 'it'} here"
        say("ignored", text, f'write kvoffload\'s settings into an entry: "secondary_tiers": [{_ENTRY_EXAMPLE}]')
    if not parts and not has_policy and not any(TIER in str(entry) for entry in entries):
        say("connector", "nothing in it is kvoffload's", f'add "secondary_tiers": [{_ENTRY_EXAMPLE}]')
    if parts:
        text = (
            "LoRA adapters, EAGLE and MTP are refused here: vLLM's keys do not name the bytes that KV then depends on"
        )
        say("refusals", text, 'with one of these use "kv_connector": "KVOffloadConnector"', level=Level.NOTE)
    in_shared_memory = spec in (TIERING_SPEC, TIERING_SPEC_ON_CPUS)
    return Given(parts, _cpu_bytes(extra, say), in_shared_memory, SPECS.get(spec))


def _entry(setting: str, entry: object, say: Say) -> Iterator[TierOptions]:
    """Yields the settings of a tier of kvoffload in an entry of ``secondary_tiers``."""
    if not isinstance(entry, Mapping):
        say("refused", f"{setting}={shown(setting, entry)}: not a JSON object", f"write {_ENTRY_EXAMPLE}")
        return
    kind, module = entry.get("type"), entry.get("module_path")
    if kind != TIER and not str(module).startswith("kvoffload"):
        said = f"{setting}.type={shown('type', kind)}: not a tier of kvoffload, and not checked"
        say("other_tier", said, level=Level.NOTE)
        return
    if kind != TIER:
        say("class", f"{setting}.type={shown('type', kind)}: kvoffload has no such tier", f'write "type": "{TIER}"')
    _expect(entry, "module_path", TIER_MODULE, say, f"{setting}.")
    yield _part(entry, f"{setting}.", _ENTRY_KEYS)


def _expect(settings: Mapping[str, Any], name: str, right: str, say: Say, prefix: str = "") -> None:
    """Reports a setting that names a class of kvoffload, or its module, unless it is ``right``."""
    given = settings.get(name)
    if given != right:
        wrong = f"{name}={shown(name, given)}: not kvoffload's" if given else f"{name} is not set"
        say("class", prefix + wrong, f'write "{name}": "{right}"')


def _part(entry: Mapping[str, Any], prefix: str, engines: Collection[str]) -> TierOptions:
    """Returns kvoffload's settings in ``entry``, without the settings of the engine."""
    return TierOptions({name: value for name, value in entry.items() if name not in engines}, prefix)


def _check_spec(extra: Mapping[str, Any], has_tiers: bool, say: Say) -> str:
    """Returns the name of the OffloadingSpec."""
    name, module = extra.get("spec_name", DEFAULT_SPEC), extra.get("spec_module_path")
    if has_tiers and "spec_name" not in extra:
        text = f"spec_name is not set: vLLM takes {DEFAULT_SPEC} then, which ignores secondary_tiers without a word"
        say("spec", text, f'add "spec_name": "{TIERING_SPEC}"')
    elif has_tiers and name in (DEFAULT_SPEC, SPEC_ON_CPUS):
        right = TIERING_SPEC if name == DEFAULT_SPEC else TIERING_SPEC_ON_CPUS
        text = f"spec_name={name!r}: it ignores secondary_tiers without a word"
        say("spec", text, f'write "spec_name": "{right}"')
    elif name in (TIERING_SPEC_ON_CPUS, SPEC_ON_CPUS) or str(module).startswith("kvoffload"):
        if name not in (TIERING_SPEC_ON_CPUS, SPEC_ON_CPUS):
            say(
                "class",
                f"spec_name={shown('spec_name', name)}: not in {module}",
                f'write "spec_name": "{TIERING_SPEC_ON_CPUS}"',
            )
        _expect(extra, "spec_module_path", SPEC_MODULE, say)
    elif name not in (TIERING_SPEC, DEFAULT_SPEC) and module is None:
        say(
            "spec",
            f"spec_name={shown('spec_name', name)}: vLLM knows no such spec",
            f'write "spec_name": "{TIERING_SPEC}"',
        )
    return str(name)


def _check_policy(extra: Mapping[str, Any], say: Say) -> bool:
    """Returns whether the cache policy is one of kvoffload's."""
    name, module = extra.get("eviction_policy", BUILTIN_POLICIES[0]), extra.get("cache_policy_module_path")
    is_ours = str(module).startswith("kvoffload")
    named = f'"eviction_policy": "{POLICIES[0]}"'
    if name in BUILTIN_POLICIES:
        if is_ours:
            text = f"eviction_policy={name!r}: that is vLLM's own policy, and cache_policy_module_path is not read"
            say("policy", text, f"write {named}")
    elif is_ours or name in POLICIES or name == "auto":
        if name not in POLICIES:
            near = difflib.get_close_matches(str(name), POLICIES, n=1, cutoff=0.3)
            fix = f'write "eviction_policy": "{(near or POLICIES)[0]}"'
            say("class", f"eviction_policy={shown('eviction_policy', name)}: kvoffload has no such policy", fix)
        _expect(extra, "cache_policy_module_path", POLICY_MODULE, say)
        return True
    return False


def _cpu_bytes(extra: Mapping[str, Any], say: Say) -> int | None:
    """Returns vLLM's host memory per engine. vLLM reads a number of bytes only."""
    value = extra.get("cpu_bytes_to_use")
    if not value:
        text = "cpu_bytes_to_use is not set: vLLM does not start without it"
        say("refused", text, f'add "cpu_bytes_to_use": {total_memory() // 2 >> 30 << 30}, a number of bytes')
        return None
    try:
        return int(value)
    except (TypeError, ValueError):
        text = f"cpu_bytes_to_use={shown('cpu_bytes_to_use', value)}: vLLM reads a number of bytes, without a unit"
        say("refused", text, 'write a number such as "cpu_bytes_to_use": 68719476736')
        return None


# SGLang.


def read_sglang(extra: Mapping[str, Any], say: Say) -> Given:
    """Reads SGLang's ``--hicache-storage-backend-extra-config``, and reports its faults."""
    if not extra.get("backend_name"):
        say("class", "backend_name is not set, and SGLang refuses that", 'add "backend_name": "kvoffload"')
    _expect(extra, "module_path", STORAGE_MODULE, say)
    _expect(extra, "class_name", STORAGE, say)
    if not extra.get("interface_v1"):
        text = "interface_v1 is not 1: SGLang would use an interface of its own classes, which kvoffload refuses"
        say("interface", text, 'add "interface_v1": 1')
    if extra.get("hicache_storage_pass_prefix_keys") is not True:
        text = "hicache_storage_pass_prefix_keys is not true: SGLang does not say what comes before a page"
        say("interface", text, 'add "hicache_storage_pass_prefix_keys": true')
    return Given([_part(extra, "", _SGLANG_KEYS)])

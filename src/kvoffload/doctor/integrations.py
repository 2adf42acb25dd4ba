"""Configurations of the offloading of engines themselves: finds kvoffload's settings in them, and mistakes with which
the engine would start and not use them. What an engine refuses, it says itself."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

CONNECTOR = "OffloadingConnector"
TIERING_SPEC, DEFAULT_SPEC = "TieringOffloadingSpec", "CPUOffloadingSpec"
TIERING_SPEC_ON_CPUS, SPEC_ON_CPUS = "HostTieringSpec", "HostMemorySpec"
"""Specs of kvoffload, in place of those of vLLM."""
TIER_MODULE, TIER = "kvoffload.vllm.secondary_tier", "KVOffloadTier"
POLICY = "AutoCachePolicy"
BUILTIN_POLICIES = ("lru", "arc")
"""Names that vLLM takes for its own policies, whatever module is named beside them."""
_ENTRY_KEYS = ("type", "module_path", "locality", "backpressure")
"""Keys of an entry of ``secondary_tiers`` that are vLLM's."""
_STORAGE_KEYS = ("backend_name", "module_path", "class_name", "interface_v1", "file_storage_path")
_PREFIX_KEYS = "hicache_storage_pass_prefix_keys"
_SGLANG_KEYS = (
    *_STORAGE_KEYS,
    *("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token", _PREFIX_KEYS, "tp_lcm_size"),
)
_OF_VLLM = ("secondary_tiers", "spec_name", "spec_module_path", "cpu_bytes_to_use", "eviction_policy")
_MISPLACED = ("tier", "tiers", "host_bytes", "disk_dir", "disk_bytes", "model_fingerprint", "policy")
"""kvoffload's settings that vLLM would ignore beside ``secondary_tiers``."""
_ENTRY_EXAMPLE = (
    f'{{"type": "{TIER}", "module_path": "{TIER_MODULE}", '
    '"tier": {"kind": "disk", "dir": "/var/cache/kvoffload", "bytes": "500GiB"}}'
)

Say = Callable[..., None]
"""Reports a finding: the end of its id, its text, its fix, and ``level``, by default Level.PROBLEM."""


class Integration(enum.StrEnum):
    """The way in by which an engine reaches kvoffload."""

    CONNECTOR = "connector"
    VLLM = "vllm"
    """vLLM's own connector, with a secondary tier or a cache policy of kvoffload."""
    SGLANG = "sglang"


@dataclass(frozen=True, slots=True)
class Given:
    """What a configuration says. ``parts``: kvoffload's settings of each set of tiers, by the words before their names.
    ``host_bytes``: memory that the engine itself allocates, None if unknown, ``in_shared_memory``: in /dev/shm."""

    parts: Mapping[str, Mapping[str, Any]]
    host_bytes: int | None = None
    in_shared_memory: bool = False


def integration_of(options: Mapping[str, Any], transfer: Mapping[str, Any] | None) -> Integration:
    """Returns whose configuration this is. ``transfer``: see ``ConfigSource``."""
    if transfer is not None:
        return Integration.VLLM if transfer.get("kv_connector") == CONNECTOR else Integration.CONNECTOR
    if any(name in options for name in _OF_VLLM):
        return Integration.VLLM
    return Integration.SGLANG if any(name in options for name in _STORAGE_KEYS) else Integration.CONNECTOR


def read_vllm(extra: Mapping[str, Any], say: Say) -> Given:
    """Reads the ``kv_connector_extra_config`` of vLLM's connector, and reports what vLLM would ignore."""
    entries = extra.get("secondary_tiers")
    parts = {
        f"secondary_tiers[{i}].": {name: value for name, value in entry.items() if name not in _ENTRY_KEYS}
        for i, entry in enumerate(entries if isinstance(entries, list) else [])
        if isinstance(entry, Mapping) and entry.get("type") == TIER
    }
    spec = extra.get("spec_name", DEFAULT_SPEC)
    if entries and spec in (DEFAULT_SPEC, SPEC_ON_CPUS):
        wrong = f"spec_name={spec!r}" if "spec_name" in extra else f"spec_name is not set, and vLLM takes {spec}"
        right = TIERING_SPEC if spec == DEFAULT_SPEC else TIERING_SPEC_ON_CPUS
        say("spec", f"{wrong}: it ignores secondary_tiers without a word", f'write "spec_name": "{right}"')
    policy, has_policy = extra.get("eviction_policy", BUILTIN_POLICIES[0]), "cache_policy_module_path" in extra
    if has_policy and policy in BUILTIN_POLICIES:
        text = f"eviction_policy={policy!r}: that is vLLM's own policy, and cache_policy_module_path is not read"
        say("policy", text, f'write "eviction_policy": "{POLICY}"')
    misplaced = [name for name in _MISPLACED if name in extra]
    if misplaced:
        text = f"{', '.join(misplaced)}: vLLM ignores {'them' if len(misplaced) > 1 else 'it'} here"
        say("ignored", text, f'write kvoffload\'s settings into an entry: "secondary_tiers": [{_ENTRY_EXAMPLE}]')
    if not has_policy and "kvoffload" not in str(entries):
        say("connector", "nothing in it is kvoffload's", f'add "secondary_tiers": [{_ENTRY_EXAMPLE}]')
    try:
        host_bytes = int(extra["cpu_bytes_to_use"])
    except (KeyError, TypeError, ValueError):
        # vLLM does not start, and says why.
        host_bytes = None
    return Given(parts, host_bytes, spec in (TIERING_SPEC, TIERING_SPEC_ON_CPUS))


def read_sglang(extra: Mapping[str, Any], say: Say) -> Given:
    """Reads SGLang's ``--hicache-storage-backend-extra-config``, and reports if nothing would be stored."""
    if extra.get(_PREFIX_KEYS) is not True:
        text = f"{_PREFIX_KEYS} is not true: SGLang does not say what comes before a page, and nothing is stored"
        say("interface", text, f'add "{_PREFIX_KEYS}": true')
    return Given({"": {name: value for name, value in extra.items() if name not in _SGLANG_KEYS}})

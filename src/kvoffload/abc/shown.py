"""The one rule for what errors, logs and reports may show of a configuration."""

from __future__ import annotations

import re

MAX_SHOWN = 200
"""A value is cut after this many characters."""
HIDDEN = "***"
_NAMES = (
    # Of kvoffload, in any configuration.
    "host_bytes policy host_contents block_size_factor block_size store_threshold disk_dir disk_bytes load_deadline_ms "
    "lookup_deadline_ms load_only_if_faster engines_per_node canonical_layout record_trace "
    "model_fingerprint kind dir bytes gone_after_s prefix ttl_s region protocol devices segment_bytes "
    # Of engines.
    "kv_connector kv_role connectors spec_name spec_module_path module_path class_name type eviction_policy "
    "cache_policy_module_path cpu_bytes_to_use backend_name interface_v1 prefix_caching_hash_algo mamba_cache_mode "
    "model speculative_method VLLM_PLUGINS "
    # Of the library's calls.
    "fingerprint lookahead engine identity groups parts num_workers hash_block_size jobs ram disk device device_blocks "
    "slot_bytes capacity dtype format trace"
)
_HARMLESS = frozenset(_NAMES.split())
"""Settings whose values are no secrets, whatever they are."""
_FILES = frozenset(("hmac_key_file", "password_file", "ca_file", "cert_file", "key_file", "path"))
"""Settings that are paths. Somebody may have written the contents of the file in their place."""
_TEXTS = _FILES | {"url", "endpoint", "username"}
"""Settings that are never numbers. A number in their place may be a password."""
_CREDENTIALS = re.compile(r"://[^/]*@")
_PATH = re.compile(r"(~|\.{1,2})?/[\w./@-]+")
_OPTION_WITH_FILE = ("--config", "--tenants")
"""Options that are JSON or the name of a file."""
_ADDRESSES = frozenset(("url", "endpoint", "master", "metadata", "host"))
_ADDRESS = re.compile(r"([a-z0-9]+://)[^@?#%\n]*|[\w.-]+(:\d+)|\[[0-9a-fA-F:]+\](:\d+)|[\d.:]+")
"""An address without a user, a password or a query, in which signatures are. A word alone may be a password."""
_AMOUNT_OF_TENANT = re.compile(r"tenants\.[\w.-]+\.(guaranteed|quota|retain)\.(host|disk|shared_dir)(-\d+)?")
_NAME = re.compile(r"([\w-]+)(\[\d+\])?$")


def shown(setting: str, value: object) -> str:
    """Returns ``value`` of ``setting`` as it may be shown: as it is if it is known to be harmless, else HIDDEN."""
    if value is None or isinstance(value, bool) or (isinstance(value, (int, float)) and _last(setting) not in _TEXTS):
        text = repr(value)
    elif isinstance(value, (str, bytes)):
        text = repr(value) if not value or _may_be_shown(setting, value) else HIDDEN
    elif isinstance(value, (list, tuple)):
        text = f"[{', '.join(shown(setting, each) for each in value[:MAX_SHOWN])}]"
    elif isinstance(value, dict):
        text = f"{{{HIDDEN}}}" if value else "{}"
    else:
        text = HIDDEN
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."


def _last(setting: str) -> str:
    found = _NAME.search(setting)
    return found[1] if found is not None else ""


def _may_be_shown(setting: str, value: str | bytes) -> bool:
    name = _last(setting)
    if isinstance(value, bytes):
        return name in _HARMLESS
    if name in _FILES:
        return _PATH.fullmatch(value) is not None
    if setting in _OPTION_WITH_FILE:
        return re.search(r"[\s{}:'\"=]", value) is None
    if name in _ADDRESSES and not _AMOUNT_OF_TENANT.fullmatch(setting):
        return _ADDRESS.fullmatch(value) is not None
    if _CREDENTIALS.search(value):
        return False
    return name in _HARMLESS or setting.startswith("--") or _AMOUNT_OF_TENANT.fullmatch(setting) is not None

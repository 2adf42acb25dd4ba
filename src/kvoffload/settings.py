"""Checks of values that people set. Every error names the setting, its value and what to write instead."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import re
from collections.abc import Sequence
from typing import TypeVar

from kvoffload.abc import ConfigError
from kvoffload.abc.shown import HIDDEN, shown

Base = TypeVar("Base")

MAX_WHOLE_NUMBER = 1 << 30
"""The largest value of a setting that counts something: far above useful values, and safe in arithmetic."""
MAX_DEADLINE_MS = 3_600_000.0


_ELSEWHERE = {
    # LMCache.
    "max_local_cpu_size": "host_bytes",
    "local_cpu": "host_bytes",
    "local_disk": "disk_dir",
    "max_local_disk_size": "disk_bytes",
    "remote_url": "tiers",
    "remote_serde": "tiers",
    "chunk_size": "block_size",
    "cache_policy": "policy",
    # vLLM.
    "cpu_bytes_to_use": "host_bytes",
    "num_cpu_blocks": "host_bytes",
    "kv_offloading_size": "host_bytes",
    "cpu_offload_gb": "host_bytes",
    "swap_space": "host_bytes",
    "eviction_policy": "policy",
    "blocks_per_chunk": "block_size_factor",
    "offloaded_block_size": "block_size",
    "secondary_tiers": "tiers",
    # Mooncake's client.
    "master_server_address": "master",
    "metadata_server": "metadata",
    "global_segment_size": "segment_bytes",
    "device_name": "devices",
    "local_hostname": "host",
}
"""Options of other software, and those here that do the same."""


def unknown(name: str, value: object, what: str, known: Sequence[str], otherwise: str = "remove it.") -> ConfigError:
    """Returns the error about a setting that is not ``known``; ``what`` it is: "option", or "key" and whose. Proposes
    the setting that was meant, or ``otherwise``."""
    meant = _ELSEWHERE.get(name)
    begun = [each for each in known if each.startswith(f"{name}_")]
    near = [meant] if meant in known else begun or difflib.get_close_matches(name, known, n=1, cutoff=0.65)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # It may be a password.
        value = str(value) if shown(name, str(value)) == HIDDEN else value
    hint = f"did you mean {near[0]}?" if near else otherwise
    return ConfigError(name, value, f"unknown {what}", f"{hint} Known: {', '.join(known)}")


def absolute_path(setting: str, value: object, example: str) -> str:
    """Returns ``value``, a path that may begin with "~", as an absolute path. Raises ConfigError that names
    ``setting`` and proposes ``example``."""
    fix = f'write an absolute path such as {setting}="{example}"'
    if not isinstance(value, str) or "\0" in value:
        raise ConfigError(setting, value, "not a path", fix)
    path = os.path.expanduser(value)
    if not os.path.isabs(path):
        raise ConfigError(setting, value, "not an absolute path", f"{fix}. Variables are not expanded")
    return os.path.normpath(path)


def check_whole_number(setting: str, value: object, least: int) -> None:
    """Raises ConfigError unless ``value`` is None or a whole number from ``least`` to MAX_WHOLE_NUMBER."""
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(setting, value, f"must be a whole number, {least} or more", "or leave it out")
    if value > MAX_WHOLE_NUMBER:
        raise ConfigError(setting, value, f"must be a whole number, {MAX_WHOLE_NUMBER} at most", "or leave it out")


def check_deadline(setting: str, value: object) -> None:
    """Raises ConfigError unless ``value`` is a number of milliseconds from 0 to MAX_DEADLINE_MS."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MAX_DEADLINE_MS:  # type: ignore[operator]
        raise ConfigError(
            setting,
            value,
            f"must be a number of milliseconds, from 0 to {MAX_DEADLINE_MS:.0f} (an hour), without quotes",
        )


def import_subclass(setting: str, path: str, base: type[Base], choice: str) -> type[Base]:
    """Returns the class at ``path``, "package.module:Class". Errors name ``setting``, and ``choice`` says what to write
    instead. Raises ConfigError unless it can be imported and is a subclass of
    ``base``, one of the package's public names, without abstract methods."""
    if not re.fullmatch(r"[\w.]+:\w+", path):
        raise ConfigError(setting, path, "is not the path of a class", choice)
    module_name, _, class_name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:
        raise ConfigError(setting, path, f"cannot be imported ({error})", choice) from error
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(setting, path, f"is not a subclass of kvoffload.{base.__name__}", choice)
    if inspect.isabstract(found):
        missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
        raise ConfigError(
            setting, path, f"does not define {missing} of kvoffload.{base.__name__}", "add what is missing"
        )
    return found

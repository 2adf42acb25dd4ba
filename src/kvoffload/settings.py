"""Checks of values that people set. Every error names the setting, its value and what to write instead."""

from __future__ import annotations

import os

from kvoffload.abc import ConfigError

MAX_WHOLE_NUMBER = 1 << 30
"""The largest value of a setting that counts something: far above useful values, and safe in arithmetic."""


def absolute_path(setting: str, value: object, example: str) -> str:
    """Returns ``value``, a path that may begin with "~", as an absolute path. Raises ConfigError that names
    ``setting`` and proposes ``example``."""
    fix = f'write an absolute path such as {setting}="{example}"'
    if not isinstance(value, str) or "\0" in value:
        raise ConfigError(f"{setting}={value!r}: not a path; {fix}")
    path = os.path.expanduser(value)
    if not os.path.isabs(path):
        raise ConfigError(f"{setting}={value!r}: not an absolute path; {fix}. Variables are not expanded")
    return os.path.normpath(path)


def check_whole_number(setting: str, value: object, least: int) -> None:
    """Raises ConfigError unless ``value`` is None or a whole number from ``least`` to MAX_WHOLE_NUMBER."""
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{setting}={value!r}: must be a whole number, {least} or more; or leave it out")
    if value > MAX_WHOLE_NUMBER:
        raise ConfigError(f"{setting}={value!r}: must be a whole number, {MAX_WHOLE_NUMBER} at most; or leave it out")

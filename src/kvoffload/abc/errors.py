"""Errors that kvoffload raises on purpose."""

from __future__ import annotations


class KVOffloadError(Exception):
    """Base class of all errors that kvoffload raises on purpose."""


class ConfigError(KVOffloadError, ValueError):
    """A setting is wrong. The message names the setting, its value and the fix."""


class BlockNotReadyError(KVOffloadError):
    """``prepare_load`` was called for a block that is not ready."""


class BlockNotPinnedError(KVOffloadError):
    """``complete_load`` was called for a block that has no pin."""


class IntegrityError(KVOffloadError):
    """A check that is always on found inconsistent state; offloading must be switched off."""

"""The errors that kvoffload raises on purpose."""

from __future__ import annotations


class KVOffloadError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(KVOffloadError, ValueError):
    """A setting is wrong. The message names the setting, its value and what to write instead."""


class BlockNotReadyError(KVOffloadError):
    """``prepare_load`` was asked for a block that is not ready."""


class BlockNotPinnedError(KVOffloadError):
    """``complete_load`` was asked to unpin a block that nobody holds."""


class IntegrityError(KVOffloadError):
    """An always-on check found the state inconsistent; offloading must be switched off."""

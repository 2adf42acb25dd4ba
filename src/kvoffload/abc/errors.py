"""Errors that kvoffload raises on purpose."""

from __future__ import annotations

from typing import Final

from kvoffload.abc.shown import shown

NOT_SET: Final = object()
"""In place of the value of a setting that has none, or whose error is not about its value."""


class KVOffloadError(Exception):
    """Base class of all errors that kvoffload raises on purpose."""


class ConfigError(KVOffloadError, ValueError):
    """A setting is wrong. The text is "SETTING=VALUE: FAULT; FIX", without the parts that are not given.

    ``value`` is kept as text, and only if it is known to be harmless: see ``shown``. A single argument is the fault.
    """

    def __init__(self, setting: str = "", value: object = NOT_SET, fault: str = "", fix: str = "") -> None:
        if not fault and not fix:
            setting, fault = "", setting
        self.setting = setting
        self.value = "" if value is NOT_SET else shown(setting, value)
        self.fault = fault
        self.fix = fix
        super().__init__(str(self))

    def __str__(self) -> str:
        if not self.fix:
            return self.wrong
        return f"{self.wrong}{';' if self.fault else ':'} {self.fix}" if self.wrong else self.fix

    @property
    def subject(self) -> str:
        """The setting and its value."""
        return f"{self.setting}={self.value}" if self.value else self.setting

    @property
    def wrong(self) -> str:
        """The text without the fix."""
        if not self.subject or not self.fault:
            return self.subject or self.fault
        return f"{self.subject}{' ' if self.fault.startswith('is not set') else ': '}{self.fault}"

    def within(self, prefix: str) -> ConfigError:
        """Returns the error of the same setting in a larger configuration, where ``prefix`` stands before its name."""
        setting = prefix + self.setting if self.setting else prefix.rstrip("._")
        found = ConfigError(setting, NOT_SET, self.fault, self.fix)
        found.value = self.value
        return found


class BlockNotReadyError(KVOffloadError):
    """``prepare_load`` was called for a block that is not ready."""


class BlockNotPinnedError(KVOffloadError):
    """``complete_load`` was called for a block that has no pin."""


class IntegrityError(KVOffloadError):
    """A check that is always on found inconsistent state; offloading must be switched off."""

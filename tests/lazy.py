"""Modules that are imported when they are used, so that the collection of tests does not wait for vLLM and torch."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


class _Lazy(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_mock_name":
            # pytest asks for these of everything that it sees in a module.
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


def lazily(name: str) -> Any:
    """Returns what stands for the module ``name``. Its attributes can be read; to replace one, name the module."""
    return _Lazy(name)

"""Native versions of hot classes and copies. Without them everything works, on plain versions in Python and numpy.

They are missing where the package was installed without a C compiler, and switched off by ``KVOFFLOAD_NATIVE=0``. The
plain version of each class is the reference: both give the same answers.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType

ENVIRONMENT_VARIABLE = "KVOFFLOAD_NATIVE"
MODULES = ("_cache", "_ghosts")


def load(name: str) -> ModuleType | None:
    """Returns one of MODULES, or None if it is missing or switched off."""
    if os.environ.get(ENVIRONMENT_VARIABLE, "1") == "0":
        return None
    try:
        return import_module(f"{__name__}.{name}")
    except ImportError:
        return None


def describe() -> str:
    """Returns in words what the hot parts run on."""
    if os.environ.get(ENVIRONMENT_VARIABLE, "1") == "0":
        return f"plain Python: {ENVIRONMENT_VARIABLE}=0 switches native code off"
    missing = [name for name in MODULES if load(name) is None]
    if missing:
        return "plain Python: installed without a C compiler, so there is no native code"
    return "native code"

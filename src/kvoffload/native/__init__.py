"""Native versions of hot classes. Without them everything works, on the plain versions in Python and numpy.

They are missing where the package was installed without a C compiler, and switched off by ``KVOFFLOAD_NATIVE=0``.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType

ENVIRONMENT_VARIABLE = "KVOFFLOAD_NATIVE"


def load(name: str) -> ModuleType | None:
    """Returns a native module of this package, or None if it is not there or switched off."""
    if os.environ.get(ENVIRONMENT_VARIABLE, "1") == "0":
        return None
    try:
        return import_module(f"{__name__}.{name}")
    except ModuleNotFoundError:
        return None

"""Loads the native versions of hot classes and copies, if they were compiled.

Without them everything works, on the reference of plain dicts and lists (``reference.py``): both give the same
answers. ``KVOFFLOAD_NATIVE=0`` switches native code off. It needs the GIL: a Python that runs without it uses the plain
versions.
"""

from __future__ import annotations

import logging
import os
import sys
import zlib
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

ENVIRONMENT_VARIABLE = "KVOFFLOAD_NATIVE"
MODULES = ("_cache", "_copies", "_ghosts", "_transfer")

_logger = logging.getLogger("kvoffload")
_broken: dict[str, str] = {}
"""The error of each module that was compiled but cannot be used."""


def load(name: str) -> ModuleType | None:
    """Returns one of MODULES, or None if it is missing, cannot be loaded or is switched off."""
    if _reason_against() is not None or name in _broken:
        return None
    full_name = f"{__name__}.{name}"
    try:
        module = import_module(full_name)
    except ModuleNotFoundError as error:
        if error.name == full_name:
            return None
        reason: Exception = error
    except (ImportError, ValueError, RuntimeError) as error:  # The last two: compiled for another numpy.
        reason = error
    else:
        if sources_checksum() in (None, getattr(module, "SOURCES", None)):
            return module
        reason = ImportError("it was compiled from other sources than those beside it")
    _broken[name] = f"{type(reason).__name__}: {reason}"
    _logger.warning(
        "%s cannot be loaded, plain Python is used instead: %s; reinstall kvoffload", full_name, _broken[name]
    )
    return None


@cache
def sources_checksum() -> int | None:
    """Returns the checksum of the sources of native code, or None where only compiled modules are installed.

    Each compiled module has the checksum of its sources as ``SOURCES``. In a checkout these may have changed since.
    """
    folder = Path(__file__).parent
    sources = [folder / name for name in source_names()]
    return zlib.crc32(b"".join(source.read_bytes() for source in sources)) if sources else None


def source_names() -> list[str]:
    """Returns the names of all source files of native code that are in this folder."""
    return sorted(path.name for path in Path(__file__).parent.iterdir() if path.suffix in (".pyx", ".pxi", ".h"))


def describe() -> str:
    """Returns in words what the hot parts run on."""
    reason = _reason_against()
    if reason is not None:
        return f"plain Python: {reason}"
    missing = [name for name in MODULES if load(name) is None]
    if not missing:
        return "native code"
    for name in missing:
        if name in _broken:
            return f"plain Python: {name} cannot be loaded ({_broken[name]}); reinstall kvoffload"
    if len(missing) == len(MODULES):
        return "plain Python: native code was not compiled when kvoffload was installed"
    return f"native code, but plain Python instead of {', '.join(missing)}, which could not be compiled"


def _reason_against() -> str | None:
    if os.environ.get(ENVIRONMENT_VARIABLE, "1") == "0":
        return f"{ENVIRONMENT_VARIABLE}=0 switches native code off"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return "native code needs the GIL, and this Python runs without it"
    return None

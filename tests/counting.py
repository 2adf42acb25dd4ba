"""Counts the lines that a call executes: how its cost grows, whatever the speed of the machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines_of(call: Callable[[], object]) -> int:
    """Returns how many lines of Python ``call`` executes, a line of a loop once per turn."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    # A collection would count too: its callbacks, such as Hypothesis's, are Python.
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count

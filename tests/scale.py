"""The amount of random testing per run, set by the environment variable KVOFFLOAD_TEST_SCALE."""

from __future__ import annotations

import os

SCALE = float(os.environ.get("KVOFFLOAD_TEST_SCALE", "1"))
"""Multiplies the numbers of random examples and repetitions. Above 1, tests that are marked ``soak`` run too."""


def scaled(number: int) -> int:
    """Returns ``number`` times SCALE, at least 1."""
    return max(1, round(number * SCALE))

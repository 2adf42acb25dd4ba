"""How much random testing a run does."""

from __future__ import annotations

import os

SCALE = float(os.environ.get("KVOFFLOAD_TEST_SCALE", "1"))
"""Multiplies the numbers of random examples and repetitions. Above 1, tests that are left out otherwise run too."""


def scaled(number: int) -> int:
    """Returns ``number`` times SCALE, at least 1."""
    return max(1, round(number * SCALE))

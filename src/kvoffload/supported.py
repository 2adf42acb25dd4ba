"""Which versions of engines are served. Known without them, so that it can be said before one is installed."""

from __future__ import annotations

TESTED = ("0.31", "0.32", "0.33")
"""The minor versions of vLLM that are tested. Those before the first are refused."""
TESTED_SGLANG = ("0.5",)

FIRST_BESIDE_OTHERS = "0.32"
"""The first version in whose MultiConnector kvoffload is tested."""
COMPANIONS = {"NixlPullConnector": "NixlConnector", "ExampleConnector": "ExampleConnector"}
"""Connectors beside which it is tested: the class in vLLM, and the name in a configuration."""


def release_of(version: str) -> tuple[int, int] | None:
    """Returns the major and the minor number of a version such as "0.32.1", or None if it is not a number."""
    numbers = version.split(".")
    if len(numbers) < 2 or not all(each.isdecimal() for each in numbers[:2]):
        return None
    return int(numbers[0]), int(numbers[1])

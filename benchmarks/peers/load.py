"""The prompts of the comparison, the same for every system."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FIRST_TOKEN, LAST_TOKEN = 5, 500
"""Tokens that the small model of the demo has."""


@dataclass(frozen=True, slots=True)
class Load:
    """What every system is asked.

    Attributes:
        prompts: Lists of prompts by their number of tokens. Each list is asked twice, in order. Together its prompts
            exceed the device's cache, so that the second time no prompt is there.
        repeated: Prompts that are asked twice in a row, so that the second time each is in the device's cache.
        conversations: Prompts of each turn of each conversation; each extends the one before.
    """

    prompts: dict[int, list[list[int]]]
    repeated: list[list[int]]
    conversations: list[list[list[int]]]
    slots: int = 4
    answer_tokens: int = 16
    turn_tokens: int = 32


def make_load(quick: bool, seed: int = 0) -> Load:
    """Returns the load. ``quick``: less of it, to check that everything runs."""
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> list[int]:
        drawn: list[int] = rng.integers(FIRST_TOKEN, LAST_TOKEN, count).tolist()
        return drawn

    sizes = {2000: 6, 3500: 4} if quick else {2000: 16, 3500: 10}
    prompts = {size: [tokens(size) for _ in range(count)] for size, count in sizes.items()}
    repeated = [tokens(2000) for _ in range(2 if quick else 6)]
    conversations = []
    for _ in range(1 if quick else 3):
        system = tokens(1024)
        for _ in range(4):
            history = system + tokens(512)
            turns = [history]
            for _ in range(1 if quick else 3):
                # The history is given, and not the engine's own answers, so that every system gets the same prompts.
                history = history + tokens(288)
                turns.append(history)
            conversations.append(turns)
    return Load(prompts, repeated, conversations)

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
        repeated: Prompts by their number of tokens, each asked ``repeats`` times in a row: after the first time it
            is in the device's cache.
        rounds: The mixed load, in rounds with different prompts. Each has conversations, and these the prompts of
            their turns; each prompt extends the one before.
    """

    prompts: dict[int, list[list[int]]]
    repeated: dict[int, list[list[int]]]
    rounds: list[list[list[list[int]]]]
    slots: int = 4
    answer_tokens: int = 16
    turn_tokens: int = 32
    repeats: int = 5


def make_load(quick: bool, seed: int = 0) -> Load:
    """Returns the load. ``quick``: less of it, to check that everything runs."""
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> list[int]:
        drawn: list[int] = rng.integers(FIRST_TOKEN, LAST_TOKEN, count).tolist()
        return drawn

    sizes = {2000: 6, 3500: 4} if quick else {2000: 12, 3500: 8}
    prompts = {size: [tokens(size) for _ in range(count)] for size, count in sizes.items()}
    repeated = {size: [tokens(size) for _ in range(2)] for size in sizes}

    def conversations(groups: int, num_turns: int) -> list[list[list[int]]]:
        made = []
        for _ in range(groups):
            system = tokens(1024)
            for _ in range(4):
                history = system + tokens(512)
                turns = [history]
                for _ in range(num_turns - 1):
                    # The history is given, and not the engine's own answers: every system gets the same prompts.
                    history = history + tokens(288)
                    turns.append(history)
                made.append(turns)
        return made

    rounds = [conversations(1, 2)] if quick else [conversations(3, 2) for _ in range(3)]
    return Load(prompts, repeated, rounds)

"""What a system did with the prompts of one cell of the integrity board."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

TOLERANCE = 1e-3
"""Logprobs of float32 sums in another order differ by less than this."""
FROM_CACHE_SHARE = 0.5
"""A prompt counts as answered from the cache if at least this share of its tokens was not computed."""


class Outcome(enum.StrEnum):
    RIGHT = "right answer from the cache"
    MISS = "miss"
    WRONG = "wrong answer"
    HANG = "hang"
    CRASH = "crash"
    REFUSED = "refused to start"
    FAILED = "request failed"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine answered to one prompt, and how many of its tokens it did not compute."""

    tokens: list[int]
    logprobs: list[float]
    prompt_tokens: int
    cached_tokens: int
    error: str | None = None
    ttft_ms: float = 0.0

    @property
    def from_cache(self) -> bool:
        return self.cached_tokens >= FROM_CACHE_SHARE * self.prompt_tokens


def is_right(answer: Answer, reference: Answer) -> bool:
    """Returns whether ``answer`` has the tokens and logprobs of ``reference``, up to the first tie.

    A tie is a position at which both chose different tokens with the same logprob: what follows says nothing.
    """
    if len(answer.tokens) != len(reference.tokens):
        return False
    ours = zip(answer.tokens, answer.logprobs, strict=True)
    right = zip(reference.tokens, reference.logprobs, strict=True)
    for (token, logprob), (right_token, right_logprob) in zip(ours, right, strict=True):
        # Written so that NaN is not within the tolerance.
        if not abs(logprob - right_logprob) <= TOLERANCE:
            return False
        if token != right_token:
            return True
    return True


@dataclass(frozen=True, slots=True)
class Asked:
    """What came back when prompts were asked: the answers, in order, and how it ended if not all were answered."""

    answers: list[Answer]
    ended: Outcome | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """One fault of one system, judged."""

    outcome: Outcome
    from_cache: int = 0
    computed: int = 0
    wrong: int = 0
    failed: int = 0
    unanswered: int = 0
    message: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether something happened that never should: it counts only if it happens twice."""
        return self.outcome in (Outcome.WRONG, Outcome.HANG, Outcome.CRASH, Outcome.FAILED)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "outcome": str(self.outcome)}

    def __str__(self) -> str:
        if self.outcome is Outcome.NOT_APPLICABLE:
            return f"not applicable: {self.message}" if self.message else "not applicable"
        if self.outcome is Outcome.REFUSED:
            return f"refused to start: {self.message}"
        parts = [
            (self.from_cache, "right from the cache"),
            (self.computed, "computed again"),
            (self.wrong, "wrong"),
            (self.failed, "failed"),
            (self.unanswered, "not answered"),
        ]
        counts = ", ".join(f"{count} {name}" for count, name in parts if count)
        return ": ".join(filter(None, [str(self.outcome), counts, self.message]))


def judge(asked: Asked, reference: Sequence[Answer]) -> Cell:
    """Returns the cell: the worst that happened, and how many prompts met each fate.

    A wrong answer is worse than a hang, a hang worse than a crash, and a crash worse than a request that failed.
    """
    if asked.ended in (Outcome.REFUSED, Outcome.NOT_APPLICABLE):
        return Cell(asked.ended, message=asked.message)
    from_cache = computed = wrong = failed = 0
    for answer, right in zip(asked.answers, reference, strict=False):
        if answer.error is not None:
            failed += 1
        elif not is_right(answer, right):
            wrong += 1
        elif answer.from_cache:
            from_cache += 1
        else:
            computed += 1
    unanswered = len(reference) - len(asked.answers)
    if wrong:
        outcome = Outcome.WRONG
    elif asked.ended is not None:
        outcome = asked.ended
    elif failed or unanswered:
        outcome = Outcome.FAILED
    else:
        outcome = Outcome.RIGHT if from_cache >= computed else Outcome.MISS
    return Cell(outcome, from_cache, computed, wrong, failed, unanswered, asked.message)

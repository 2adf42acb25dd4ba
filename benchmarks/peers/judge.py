"""What a system did with the prompts of one cell of the table of faults."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

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


def short(cells: Sequence[Cell]) -> str:
    """Returns in few words what happened, and if that was bad, what happened again. What should never happen is bold if
    it has happened twice."""
    marks = "**" if len(cells) == 2 and all(cell.is_bad for cell in cells) else ""
    return "; again: ".join(_short(cell, marks) for cell in cells)


def _short(cell: Cell, marks: str) -> str:
    if cell.outcome is Outcome.NOT_APPLICABLE:
        return "not run" if cell.message else "-"
    if cell.outcome is Outcome.REFUSED:
        return "does not start"
    good = (cell.from_cache, "from cache"), (cell.computed, "computed")
    parts = [f"{count} {words}" for count, words in good if count]
    if cell.outcome in (Outcome.HANG, Outcome.CRASH):
        parts.append(f"{marks}{cell.outcome}{marks}")
    bad = (cell.wrong, "wrong"), (cell.failed, "failed"), (cell.unanswered, "not answered")
    parts += [f"{marks}{count} {words}{marks}" for count, words in bad if count]
    return ", ".join(parts)


def judge(asked: Asked, reference: Sequence[Answer]) -> Cell:
    """Returns the cell: the worst that happened, and how many prompts met each fate.

    A wrong answer is worse than a hang, a hang worse than a crash, and a crash worse than a request that failed.
    """
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

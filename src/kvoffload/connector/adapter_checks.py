"""What the worker half finds out about the bytes of its adapters, for the scheduler half."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from kvoffload.connector.adapters import DROPPED, UNREADABLE, Adapter, AdapterWatch, Digests, Need
from kvoffload.connector.messages import WorkerReport

logger = logging.getLogger(__name__)

CHECK_DEADLINE_S = 1.0
"""How long a load that has ended waits for the check of its adapter. After that it counts as failed."""


@dataclass(slots=True)
class AdapterCheck:
    """Whether the request of a load will compute with the bytes with which its blocks were computed."""

    need: Need
    result: Future[bool] | None = None
    """Asked for when the load has ended."""
    until: float = 0.0


class AdapterChecks:
    """Reports which bytes the adapters of one rank have. Without ``watch``, and after an error of it, no adapter can be
    read, and a load that needs one fails."""

    def __init__(self, watch: AdapterWatch | None = None) -> None:
        self.watch = watch

    def note(self, report: WorkerReport) -> None:
        """Reports which adapters the engine has loaded, so that the scheduler half does not store blocks of one as
        those of another."""
        if self.watch is not None:
            try:
                for number, digest in self.watch.changes().items():
                    report.adapters.setdefault(number, set()).add(digest)
            except Exception:
                self._lose()

    def compare(self, computes_with: Mapping[int, set[Digests]], report: WorkerReport) -> None:
        """Reports with which bytes the step has computed, where these are not those that it was planned with: vLLM
        loads one of the adapters that the requests of a batch name under one number, and not at every occasion."""
        for number, expected in computes_with.items():
            digest = DROPPED if self.watch is None else self.watch.digest(number)
            if any(digest not in digests for digests in expected):
                report.adapters.setdefault(number, set()).add(digest if digest != DROPPED else UNREADABLE)

    def ask(self, questions: Mapping[int, Adapter], report: WorkerReport) -> None:
        for question, adapter in questions.items():
            if self.watch is not None:
                try:
                    self.watch.ask(question, adapter)
                    continue
                except Exception:
                    self._lose()
            report.answers[question] = [UNREADABLE]

    def take_answers(self, report: WorkerReport, wait_s: float) -> None:
        """Reports the digests that were found. Waits at most ``wait_s`` for one if there are questions."""
        if self.watch is not None:
            try:
                for question, digest in self.watch.answers(wait_s).items():
                    report.answers[question] = [digest]
            except Exception:
                self._lose()

    def is_running(self, check: AdapterCheck | None) -> bool:
        """Whether a check is in progress. Begins it."""
        if check is None or self.watch is None:
            return False
        if check.result is None:
            try:
                check.result, check.until = self.watch.check(check.need), time.monotonic() + CHECK_DEADLINE_S
            except Exception:
                self._lose()
                return False
        return not check.result.done() and time.monotonic() < check.until

    def has_passed(self, check: AdapterCheck | None) -> bool:
        if check is None:
            return True
        need, result = check.need, check.result
        if self.watch is None or result is None or not (result.done() and result.result()):
            return False
        # It may have been loaded during the check.
        return need.is_reread or self.watch.digest(need.adapter) in {DROPPED, *need.digests}

    def _lose(self) -> None:
        logger.exception(
            "kvoffload: the adapters of this worker cannot be read any more. Requests with an adapter are not offloaded"
        )
        self.watch = None

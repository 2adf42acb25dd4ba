"""The contract of a transfer engine: it runs copy jobs and tells which ended how."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from kvoffload.base import TransferSpec


@dataclass(frozen=True, slots=True)
class TransferResult:
    """One ended job. ``nbytes`` were copied in ``seconds``; a job that is not ``ok`` copied nothing of use."""

    job_id: int
    ok: bool
    nbytes: int = 0
    seconds: float = 0.0


class Transfer(ABC):
    """Copies between the device blocks and the host slots of one rank.

    Called from the engine's worker thread only. No method raises for a copy that failed: the job is
    reported with ``ok=False``. Jobs of one direction start in the order they were submitted.
    """

    @abstractmethod
    def submit(self, job_id: int, spec: TransferSpec, is_store: bool) -> None:
        """Queues a job. A store reads what the device blocks hold after the work issued so far."""

    @abstractmethod
    def poll(self, busy: bool) -> list[TransferResult]:
        """Jobs that ended since the last call. ``busy``: the engine computes tokens in this step, so an
        implementation that copies on this thread bounds what it does now."""

    @abstractmethod
    def wait(self, job_ids: Iterable[int]) -> None:
        """On return, device work issued from now on sees these jobs done. Unknown or ended ones are
        ignored."""

    @abstractmethod
    def wait_any(self, timeout_s: float) -> None:
        """Gives the processor away until a job has ended, at most ``timeout_s``."""

    def before_forward(self) -> None:
        """The engine is about to issue a forward pass; loads submitted after it need not wait for that."""

    def close(self) -> None:
        """Ends what is under way and lets go of memory. May be called twice."""

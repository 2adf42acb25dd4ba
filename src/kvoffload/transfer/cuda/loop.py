"""The contract of a loop of copies, which CudaTransfer drives: from submitted jobs to results."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvoffload.abc import TransferResult, TransferSpec
from kvoffload.transfer.copies import Numbers

WAITS_FOR_DRIVER = (
    "kvoffload: copies have waited for %.0f s for a call of the driver that issues others: a debugger, a profiler, "
    "swapping or a full launch queue delays it; they go on after it"
)


class Loop(ABC):
    """Copies jobs on the streams of a device, with ``num_threads`` threads that call ``run``.

    All other methods are called on the engine's thread. After the first error of the device no copy is issued:
    ``poll`` and ``fence`` raise RuntimeError, and ``run`` returns.
    """

    num_threads: int
    staging_bytes: int
    """Device memory that was allocated."""

    @property
    @abstractmethod
    def has_failed(self) -> bool:
        """Whether there was an error of the device."""

    @abstractmethod
    def submit(self, job_id: int, spec: TransferSpec, is_store: bool) -> None:
        """Queues a job. A store waits for the next ``record_point``, a load is copied after the last one."""

    @abstractmethod
    def record_point(self) -> None:
        """Records a point of the engine's stream: stores submitted before it, and loads submitted after it, wait for
        it."""

    @abstractmethod
    def poll(self) -> list[TransferResult]:
        """Returns the jobs that have ended. Stores that still wait for a point get one."""

    @abstractmethod
    def fence(self, jobs: Numbers, blocks: Numbers | None) -> None:
        """Makes the engine's stream wait until ``jobs`` have read, or filled, ``blocks`` (None: all of their device
        blocks). Their rows are issued first. Jobs with rows for which there is no bounce buffer fail."""

    @abstractmethod
    def wait_any(self, timeout_s: float) -> None:
        """Waits until there are results or an error, or ``stop`` was called, at most ``timeout_s``. Returns at once if
        no job is open."""

    @abstractmethod
    def advance(self) -> bool:
        """Makes one step of the copies that wait, where no thread does. Returns whether there was anything to do."""

    @abstractmethod
    def run(self, thread: int) -> None:
        """Copies until ``stop`` or an error, in one of ``num_threads`` threads."""

    @abstractmethod
    def stop(self) -> None:
        """Makes ``run`` return."""

    @abstractmethod
    def wait_until_idle(self, deadline: float) -> bool:
        """Makes the engine's later work wait for all that was issued, waits for it until ``deadline`` (of
        time.monotonic), and returns whether it has ended. Called after ``stop``, when no thread is in ``run``; works
        after an error, too. Raises the error of a device that cannot say it."""

"""The transfer of a rank on which no copies are possible."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NoReturn

from kvoffload.abc import Transfer, TransferResult, TransferSpec


class FailedTransfer(Transfer):
    """Raises ``error``, which has kept the real transfer from being made, whenever it is used.

    So the engine starts, and its first step switches offloading off on all ranks and says why.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error

    def submit(self, job_id: int, spec: TransferSpec, is_store: bool) -> None:
        self._fail()

    def poll(self, busy: bool) -> list[TransferResult]:
        self._fail()

    def wait(self, job_ids: Iterable[int], device_blocks: Collection[int] | None = None) -> None:
        self._fail()

    def wait_any(self, timeout_s: float) -> None:
        self._fail()

    def before_forward(self) -> None:
        self._fail()

    def _fail(self) -> NoReturn:
        raise RuntimeError("no blocks can be copied on this rank") from self.error

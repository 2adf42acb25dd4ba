"""The transfer of a rank whose KV another rank stores."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kvoffload.abc import Transfer, TransferResult, TransferSpec


class FollowerTransfer(Transfer):
    """Copies loads through ``inner``, whose pool belongs to the rank that stores for both, the leader.

    Each store is reported as done without copying. The scheduler half counts a store only when all ranks have reported
    it, and as failed if any of them says so, so the leader's report decides.
    """

    def __init__(self, inner: Transfer) -> None:
        self.inner = inner
        self._stores: list[TransferResult] = []
        """Stores that ``poll`` has not returned yet."""

    def submit(self, job_id: int, spec: TransferSpec, is_store: bool) -> None:
        if is_store:
            self._stores.append(TransferResult(job_id, ok=True))
        else:
            self.inner.submit(job_id, spec, is_store)

    def poll(self, busy: bool) -> list[TransferResult]:
        stores, self._stores = self._stores, []
        return [*stores, *self.inner.poll(busy)]

    def wait(self, job_ids: Iterable[int], device_blocks: Collection[int] | None = None) -> None:
        self.inner.wait(job_ids, device_blocks)

    def wait_any(self, timeout_s: float) -> None:
        if not self._stores:
            self.inner.wait_any(timeout_s)

    def before_forward(self) -> None:
        self.inner.before_forward()

    def close(self) -> None:
        self._stores.clear()
        self.inner.close()

"""Transfer engines that misbehave on purpose."""

from __future__ import annotations

from collections.abc import Iterable

from kvoffload.base import TransferSpec
from kvoffload.hostpool import ByteArray
from kvoffload.transfer.base import Transfer, TransferResult


class WrappedTransfer(Transfer):
    """Passes everything on to ``inner``: what the faulty ones are built on."""

    def __init__(self, inner: Transfer) -> None:
        self.inner = inner

    def submit(self, job_id: int, spec: TransferSpec, is_store: bool) -> None:
        self.inner.submit(job_id, spec, is_store)

    def poll(self, busy: bool) -> list[TransferResult]:
        return self.inner.poll(busy)

    def wait(self, job_ids: Iterable[int]) -> None:
        self.inner.wait(job_ids)

    def wait_any(self, timeout_s: float) -> None:
        self.inner.wait_any(timeout_s)

    def close(self) -> None:
        self.inner.close()


class CorruptingTransfer(WrappedTransfer):
    """Spoils every block in the pool before it is loaded: the control that shows that tests would notice."""

    def __init__(self, inner: Transfer, pool_data: ByteArray) -> None:
        super().__init__(inner)
        self._pool_data = pool_data

    def submit(self, job_id: int, spec: TransferSpec, is_store: bool) -> None:
        if not is_store:
            # A byte of each value that leaves floats finite.
            self._pool_data[spec.host.slots, 1::4] = 0x5A
        super().submit(job_id, spec, is_store)


class FailingTransfer(WrappedTransfer):
    """Fails every ``every``-th job without copying anything, and its second try too."""

    def __init__(self, inner: Transfer, every: int = 2, loads: bool = True, stores: bool = True) -> None:
        super().__init__(inner)
        self._every = every
        self._kinds = {False: loads, True: stores}
        self._failed: list[TransferResult] = []

    def submit(self, job_id: int, spec: TransferSpec, is_store: bool) -> None:
        if self._kinds[is_store] and job_id % self._every == 0:
            self._failed.append(TransferResult(job_id, ok=False))
        else:
            super().submit(job_id, spec, is_store)

    def poll(self, busy: bool) -> list[TransferResult]:
        failed, self._failed = self._failed, []
        return [*failed, *super().poll(busy)]

"""Transfers that misbehave on purpose."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Collection, Iterable

from kvoffload.abc import ByteArray, Transfer, TransferResult, TransferSpec


class WrappedTransfer(Transfer):
    """Passes every call on to ``inner``: the base class of the faulty transfers."""

    def __init__(self, inner: Transfer) -> None:
        self.inner = inner

    def submit(self, job_id: int, spec: TransferSpec, is_store: bool) -> None:
        self.inner.submit(job_id, spec, is_store)

    def poll(self, busy: bool) -> list[TransferResult]:
        return self.inner.poll(busy)

    def wait(self, job_ids: Iterable[int], device_blocks: Collection[int] | None = None) -> None:
        self.inner.wait(job_ids, device_blocks)

    def wait_any(self, timeout_s: float) -> None:
        self.inner.wait_any(timeout_s)

    def before_forward(self) -> None:
        self.inner.before_forward()

    def close(self) -> None:
        self.inner.close()


class CorruptingTransfer(WrappedTransfer):
    """Corrupts every block in the pool before it is loaded: the negative control, which tests must notice."""

    def __init__(self, inner: Transfer, pool_data: ByteArray) -> None:
        super().__init__(inner)
        self._pool_data = pool_data

    def submit(self, job_id: int, spec: TransferSpec, is_store: bool) -> None:
        if not is_store:
            # A byte of each value that leaves floats finite.
            self._pool_data[spec.host.slots, 1::4] = 0x5A
        super().submit(job_id, spec, is_store)


class FailingTransfer(WrappedTransfer):
    """Fails a share ``rate`` of the tries, chosen by ``seed``, without copying anything.

    With ``fails_first`` all tries of the first load and of the first store fail too, so that every run has both.
    ``failures`` is the number of failed tries by direction ("load", "store").
    """

    def __init__(self, inner: Transfer, rate: float, seed: int = 0, *, fails_first: bool = False) -> None:
        super().__init__(inner)
        self._rate = rate
        self._fails_first = fails_first
        self._first: dict[bool, int] = {}
        """The first job of each direction."""
        self._random = random.Random(seed)
        self._failed: list[TransferResult] = []
        self.failures = {"load": 0, "store": 0}

    def submit(self, job_id: int, spec: TransferSpec, is_store: bool) -> None:
        is_first = self._first.setdefault(is_store, job_id) == job_id
        if self._random.random() < self._rate or (is_first and self._fails_first):
            self.failures["store" if is_store else "load"] += 1
            self._failed.append(TransferResult(job_id, ok=False))
        else:
            super().submit(job_id, spec, is_store)

    def poll(self, busy: bool) -> list[TransferResult]:
        failed, self._failed = self._failed, []
        return [*failed, *super().poll(busy)]


class SlowTransfer(WrappedTransfer):
    """Submits jobs later, at moments chosen by ``seed``, as a device's copy engine would begin them. Each ``tick``
    passes the oldest job of each direction on with probability ``chance``. An engine that reuses a block before its
    copy has ended gets wrong bytes."""

    def __init__(self, inner: Transfer, seed: int, chance: float = 0.3) -> None:
        super().__init__(inner)
        self._random = random.Random(seed)
        self._chance = chance
        self._queued: dict[int, tuple[TransferSpec, bool]] = {}

    def submit(self, job_id: int, spec: TransferSpec, is_store: bool) -> None:
        self._queued[job_id] = (spec, is_store)

    def tick(self) -> None:
        """Lets time pass on the device."""
        for direction in (False, True):
            if self._random.random() < self._chance:
                job = next((j for j, (_, is_store) in self._queued.items() if is_store is direction), None)
                if job is not None:
                    self._run(job)

    def poll(self, busy: bool) -> list[TransferResult]:
        self.tick()
        return super().poll(busy)

    def wait(self, job_ids: Iterable[int], device_blocks: Collection[int] | None = None) -> None:
        jobs = list(job_ids)
        for job_id in jobs:
            if job_id in self._queued:
                self._run(job_id)
        super().wait(jobs, device_blocks)

    def wait_any(self, timeout_s: float) -> None:
        self.tick()
        super().wait_any(timeout_s)

    def close(self) -> None:
        self._queued.clear()
        super().close()

    def _run(self, job_id: int) -> None:
        self.inner.submit(job_id, *self._queued.pop(job_id))


class ThreadedTransfer(WrappedTransfer):
    """Copies on a thread of its own, as fast as the engine's thread allows. An idle step must wait for it."""

    def __init__(self, inner: Transfer) -> None:
        super().__init__(inner)
        self._queue: queue.SimpleQueue[tuple[int, TransferSpec, bool] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._open: set[int] = set()
        self._ended: list[TransferResult] = []
        self._thread = threading.Thread(target=self._run, name="kvoffload-copies", daemon=True)
        self._thread.start()

    def submit(self, job_id: int, spec: TransferSpec, is_store: bool) -> None:
        with self._changed:
            self._open.add(job_id)
        self._queue.put((job_id, spec, is_store))

    def poll(self, busy: bool) -> list[TransferResult]:
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: Iterable[int], device_blocks: Collection[int] | None = None) -> None:
        wanted = set(job_ids)
        with self._changed:
            self._changed.wait_for(lambda: self._open.isdisjoint(wanted))

    def wait_any(self, timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._ended) or not self._open, timeout_s)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=5.0)
        super().close()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            self.inner.submit(*job)
            results = self.inner.poll(busy=False)
            while all(result.job_id != job[0] for result in results):
                self.inner.wait_any(0.1)
                results += self.inner.poll(busy=False)
            with self._changed:
                self._ended += results
                self._open.discard(job[0])
                self._changed.notify_all()

"""The worker half of the connector: carries out the jobs of each step, and compares the weights that they need."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvoffload.abc import Transfer, TransferResult, TransferSpec
from kvoffload.connector.adapters import AdapterChecks, AdapterNeed, AdapterWatch
from kvoffload.connector.messages import IDLE_WAIT_S, StepMeta, WorkerReport

logger = logging.getLogger(__name__)

SUSPEND_DEADLINE_S = 5.0
"""How long ``suspend`` waits for copies in progress."""


@dataclass(slots=True)
class Finished:
    """Requests whose loads or stores have ended since the previous step."""

    loaded: set[str] = field(default_factory=set)
    """Requests whose load has ended, successfully or not."""
    failed: dict[str, list[int]] = field(default_factory=dict)
    """Those of ``loaded`` whose load failed, with the device blocks to be filled, whose content must not be used."""
    released: set[str] = field(default_factory=set)
    """Finished requests whose device blocks were kept for the connector, and can be freed now."""


@dataclass(slots=True)
class _PendingJob:
    spec: TransferSpec
    is_store: bool
    epoch: int
    comparison: int
    """Number of the comparison of weights that must have ended before this job is reported as successful."""
    need: AdapterNeed | None = None
    has_passed: Callable[[], bool | None] | None = None
    """Its check, which begins when the load has ended."""
    may_retry: bool = True
    piece: list[int] | None = None
    """See StepMeta."""
    broken: list[int] | None = None
    """The device blocks of all pieces, if the others cannot be loaded."""


class WeightWatch(Protocol):
    """Compares the weights of one rank with the weights that it accepted last, at first with those at its creation."""

    def accept(self) -> None:
        """Accepts the weights as they are after all work issued so far. Cancels a comparison in progress."""

    def begin(self) -> None:
        """Begins to compare the weights as they are after all work issued so far. Does not wait for the device."""

    def poll(self) -> bool | None:
        """Returns whether the weights differed at the last ``begin``, or None while that is not known."""

    def are_same(self) -> bool:
        """Returns whether every byte is known to be as it was when last accepted, after the time that the device needs
        to read them. After True, the next comparison expects the weights at their present addresses."""


class WeightComparisons:
    """Compares the weights in every step that computes or has jobs, in the background: a block is stored long after its
    tokens were computed, and the weights may be the former ones again by then. The comparisons are numbered: a job
    belongs to the ``latest`` one when it begins, and can be trusted when that one, or a later one, has succeeded.

    Without ``watch`` nothing is compared, and jobs are trusted at once. Errors of the watch are raised.
    """

    def __init__(self, watch: WeightWatch | None = None) -> None:
        self.watch = watch
        self.latest = 0
        """Number of the latest comparison that a step needs."""
        self.is_stale = False
        """Whether the weights have changed in this epoch."""
        self._must_accept = False
        """Whether a new epoch has begun and no step of it has used the weights yet."""
        self._begun = self.answered = 0
        """Numbers of the latest comparisons that have begun and that have ended."""

    def begin_epoch(self) -> None:
        """Called when the scheduler half has dropped all blocks: the weights that the next step uses are accepted."""
        self.is_stale, self._must_accept = False, True
        self.latest = self.answered = self._begun

    def cancel_pending(self) -> None:
        """Begins no comparison before the next step that needs one, because the weights may lose their memory."""
        self.latest = self._begun

    def use(self) -> bool:
        """Accepts or compares the weights for a step that uses them. Returns whether a change was found."""
        if self.watch is None:
            return False
        if self._must_accept:
            self._must_accept = False
            self.watch.accept()
        elif not self.is_stale:
            self.latest += 1
            return self.advance()
        return False

    def are_same(self) -> bool:
        """Whether the weights are known to be those of the epoch before. If so, this epoch need not accept them."""
        if self.watch is None or not self._must_accept:
            return False
        self._must_accept = not self.watch.are_same()
        return not self._must_accept

    def advance(self) -> bool:
        """Begins the comparison that is needed, or takes the result of one. Returns whether it found a change."""
        while self.watch is not None and self.answered < self.latest and not self.is_stale:
            if self._begun == self.answered:
                self.watch.begin()
                self._begun = self.latest
            if (changed := self.watch.poll()) is None:
                break
            self.answered, self.is_stale = self._begun, changed
            if changed:
                return True
        return False


class OffloadingConnectorWorker:
    """Carries out the jobs of one rank through ``transfer``.

    An engine runs its forward pass inside ``step``. An engine with hooks of its own calls, in every step and in this
    order: ``begin_step`` before its forward pass, ``start_loads`` before or after it, ``end_step`` after it,
    ``get_finished`` and ``take_report``. Nothing raises into the engine's step.

    Stores are submitted to the transfer at the next ``begin_step``: the step that computes them is complete then, and
    its tokens are not delayed. A job that fails is tried once more, unless its source may have changed.

    ``weights`` is asked in every step that computes, loads or stores. If the weights have changed, all jobs fail, in
    progress or new, until the epoch of a StepMeta shows that the scheduler half has forgotten all blocks. A job is not
    reported as successful before the comparison of its step, or a later one, has succeeded. ``adapters`` answers which
    bytes the model's adapters have; a load for other bytes than these fails.
    """

    def __init__(
        self, transfer: Transfer, weights: WeightWatch | None = None, adapters: AdapterWatch | None = None
    ) -> None:
        self.transfer = transfer
        self.adapters = AdapterChecks(adapters)
        self.weights = WeightComparisons(weights)
        self._jobs: dict[int, _PendingJob] = {}
        self._unsubmitted: list[int] = []
        self._waiting: dict[int, set[int]] = {}
        """Loads that have not started, and the stores that must have read their device blocks before."""
        self._finished = Finished()
        self._report = WorkerReport()
        self._broken = False
        self._suspended = False
        self._epoch = 0
        self._unconfirmed: list[TransferResult] = []
        """Results of jobs that have ended before their comparison."""

    @contextlib.contextmanager
    def step(self, meta: StepMeta, send_report: Callable[[WorkerReport], None]) -> Iterator[Finished]:
        """Runs one step. The forward pass goes into the body of the ``with`` statement.

        The Finished that this yields is complete when the body has ended. ``send_report`` then passes the report, if
        there is one, to the scheduler half: in one process ``scheduler.update_connector_output``. If the body raises,
        its blocks are reported as not stored, and the exception propagates.
        """
        finished = self._finished
        self.begin_step(meta)
        self.start_loads(meta)
        try:
            yield finished
        except BaseException:
            not_computed = meta.stores.keys() - meta.before_forward()
            self._report.done.update(dict.fromkeys(not_computed, 1))
            self._report.failed |= not_computed
            meta = replace(meta, stores={})
            raise
        finally:
            self.end_step(meta)
            self.get_finished(meta)
            if (report := self.take_report()) is not None:
                send_report(report)

    def begin_step(self, meta: StepMeta) -> None:
        """Submits the stores of the previous step, and of blocks that have left requests; completes the fenced ones."""
        try:
            self._check_weights(meta)
        except Exception:
            self._give_up()
        if meta.questions or self.adapters.watch is not None:
            self.adapters.begin_step(meta.questions, self._report)
        for job_id in meta.before_forward() if meta.stores else ():
            self._accept_store(job_id, meta.stores[job_id])
        self._submit_stores()
        if not self._broken:
            try:
                if meta.fences:
                    self.transfer.wait(meta.fences, meta.fenced_blocks)
                self.transfer.before_forward()
            except Exception:
                self._give_up()
        for job_id in meta.fences:
            if job_id in self._jobs:
                # From here on its source may be overwritten, so a second try could read other bytes.
                self._jobs[job_id].may_retry = False

    def start_loads(self, meta: StepMeta) -> None:
        """Starts the loads of the step, or lets them wait for the stores that read their device blocks."""
        for job_id, spec in meta.loads.items():
            job = self._jobs[job_id] = _PendingJob(spec, False, self._epoch, self.weights.latest)
            job.need, job.piece = meta.needs.get(job_id), meta.pieces.get(job_id)
            unread = set(self._jobs).difference(result.job_id for result in self._unconfirmed)
            if after := unread.intersection(meta.load_after.get(job_id, ())):
                self._waiting[job_id] = after
            else:
                self._submit(job_id)
        for req_id, blocks in meta.broken_loads.items():
            for job in self._jobs.values():
                if not job.is_store and job.spec.req_id == req_id:
                    # A piece of the load still writes to them.
                    job.broken = blocks
                    break
            else:
                self._finished.loaded.add(req_id)
                self._finished.failed[req_id] = blocks

    def end_step(self, meta: StepMeta) -> None:
        """Accepts the stores of the step: the forward pass has computed their blocks."""
        if meta.stores:
            accepted = meta.before_forward()
            for job_id, spec in meta.stores.items():
                if job_id not in accepted:
                    self._accept_store(job_id, spec)
        self._finished.released.update(meta.releases)
        if meta.has_tokens and (meta.computes_with or self.adapters.watch is not None):
            self.adapters.end_step(meta.computes_with, self._report)

    def get_finished(self, meta: StepMeta) -> Finished:
        """Returns the requests whose loads or stores have ended since the last call. An InlineTransfer copies during
        this call. A step without tokens waits briefly for loads in progress, and for digests of adapters."""
        if self.adapters.watch is not None:
            self.adapters.take_answers(self._report, 0.0 if meta.has_tokens else IDLE_WAIT_S)
        self._collect(busy=meta.has_tokens)
        if not meta.has_tokens and not self._finished.loaded and any(not job.is_store for job in self._jobs.values()):
            self._collect(busy=False, wait_s=IDLE_WAIT_S)
        finished, self._finished = self._finished, Finished()
        return finished

    def take_report(self) -> WorkerReport | None:
        """Returns the report for the scheduler half since the last call, or None if there is nothing to report."""
        report = self._report
        if not (report.done or report.broken or report.changed_at >= 0 or report.answers or report.adapters):
            return None
        self._report = WorkerReport()
        return report

    def suspend(self) -> None:
        """Ends all jobs, because the device blocks are about to lose their memory. May be called twice.

        Waits at most SUSPEND_DEADLINE_S for copies in progress, and then closes the transfer for good. Loads count
        as failed, as do stores that were not submitted and all jobs until ``resume``.
        """
        self._suspended = True
        if self._broken:
            return
        deadline = time.monotonic() + SUSPEND_DEADLINE_S
        try:
            self._submit_stores()
            self.transfer.wait(list(self._jobs))
            self._collect(busy=False)
            while self._jobs and not self._broken:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"{len(self._jobs)} copies did not end within {SUSPEND_DEADLINE_S} s")
                self._collect(busy=False, wait_s=left)
        except Exception:
            self._give_up()
        self.weights.cancel_pending()

    def resume(self) -> None:
        """Accepts jobs again: the device blocks have memory. May be called twice."""
        self._suspended = False

    def shutdown(self) -> None:
        """Closes the transfer. May be called twice."""
        self.transfer.close()

    def _check_weights(self, meta: StepMeta) -> None:
        if meta.epoch != self._epoch:
            self._epoch = meta.epoch
            self.weights.begin_epoch()
        is_able, check = not self._broken and not self._suspended, meta.check_weights
        if check is not None:
            self._report.done[check] = 1
            self._report.failed.add(check)
            if is_able and self.weights.are_same():
                self._report.failed.remove(check)
        # Steps without tokens and jobs must not read the weights: a sleeping engine runs such steps while its weights
        # have no memory. While suspended all jobs fail anyway.
        if is_able and (meta.has_tokens or meta.loads or meta.stores) and self.weights.use():
            self._report.changed_at = self._epoch

    def _is_outdated(self, job: _PendingJob) -> bool:
        return self.weights.is_stale or job.epoch != self._epoch

    def _accept_store(self, job_id: int, spec: TransferSpec) -> None:
        self._jobs[job_id] = _PendingJob(spec, True, self._epoch, self.weights.latest)
        if self._suspended:
            # It must fail now: after ``resume`` its device blocks hold other bytes.
            self._submit(job_id)
        else:
            self._unsubmitted.append(job_id)

    def _submit_stores(self) -> None:
        for job_id in self._unsubmitted:
            self._submit(job_id)
        self._unsubmitted.clear()

    def _submit(self, job_id: int) -> None:
        if (job := self._jobs.get(job_id)) is None:
            return
        if self._broken or self._suspended or self._is_outdated(job):
            self._end(TransferResult(job_id, ok=False))
            return
        try:
            self.transfer.submit(job_id, job.spec, job.is_store)
        except Exception:
            self._give_up()

    def _give_up(self) -> None:
        """Closes the transfer and fails all jobs: after an unexpected error no copy can be trusted."""
        logger.exception("kvoffload: OFFLOADING IS OFF on this worker: a transfer or a check raised an error")
        self._broken = self._report.broken = True
        self.adapters.watch = None
        try:
            self.transfer.close()
        except Exception:
            logger.exception("kvoffload: the transfer engine could not be closed")
        self._waiting.clear()
        for job_id in list(self._jobs):
            self._end(TransferResult(job_id, ok=False))

    def _collect(self, busy: bool, wait_s: float = 0.0) -> None:
        """Processes the jobs that have ended, after a wait of at most ``wait_s`` for one."""
        if self._broken:
            return
        ended, self._unconfirmed = self._unconfirmed, []
        try:
            if wait_s:
                self.transfer.wait_any(wait_s)
            ended += self.transfer.poll(busy)
            if self.weights.advance():
                self._report.changed_at = self._epoch
        except Exception:
            self._give_up()
        for result in ended:
            if (job := self._jobs.get(result.job_id)) is None:
                continue
            if self._suspended and not job.is_store:
                # The device blocks that it has filled are about to lose their memory.
                self._end(replace(result, ok=False))
            elif not result.ok and job.may_retry and not self._suspended:
                job.may_retry = False
                self._submit(result.job_id)
            elif result.ok and not self._is_outdated(job) and self._is_unconfirmed(job):
                self._unconfirmed.append(result)
                self._end_reading(result.job_id)
            else:
                self._end(result)

    def _is_unconfirmed(self, job: _PendingJob) -> bool:
        """Whether a comparison of its weights, or the check of its adapter, is in progress."""
        return job.comparison > self.weights.answered or self._fits_adapter(job) is None

    def _fits_adapter(self, job: _PendingJob) -> bool | None:
        if job.need is not None and job.has_passed is None:
            job.has_passed = self.adapters.begin_check(job.need)
        return job.has_passed is None or job.has_passed()

    def _end_reading(self, job_id: int) -> None:
        """Starts the loads that have waited for this store only."""
        for load, stores in list(self._waiting.items()):
            stores.discard(job_id)
            if not stores:
                self._waiting.pop(load, None)
                self._submit(load)

    def _end(self, result: TransferResult) -> None:
        report, job = self._report, self._jobs.pop(result.job_id)
        ok = result.ok and not self._is_outdated(job) and bool(self._fits_adapter(job))
        report.done[result.job_id] = 1
        if not ok:
            report.failed.add(result.job_id)
        if job.is_store:
            report.store_bytes += result.nbytes
            report.store_seconds += result.seconds
            self._end_reading(result.job_id)
        else:
            report.load_bytes += result.nbytes
            report.load_seconds += result.seconds
            if job.broken is None and job.piece == []:
                # Other pieces of the load follow.
                return
            self._finished.loaded.add(job.spec.req_id)
            if not ok or job.broken is not None:
                blocks = job.broken or job.piece or job.spec.device.block_ids.tolist()
                self._finished.failed[job.spec.req_id] = blocks

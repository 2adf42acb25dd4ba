"""FailedTransfer: the engine serves without offloading."""

from __future__ import annotations

import logging

import pytest

from kvoffload.connector.messages import StepMeta, WorkerReport
from kvoffload.connector.worker import OffloadingConnectorWorker
from kvoffload.transfer.failed import FailedTransfer
from tests.transfer.specs import job

SPEC = job([0], [7])


@pytest.mark.parametrize("meta", [StepMeta(), StepMeta(stores={1: SPEC}), StepMeta(stores={1: SPEC}, fences=[1])])
def test_the_first_step_switches_offloading_off_and_says_why(meta: StepMeta, caplog: pytest.LogCaptureFixture) -> None:
    worker = OffloadingConnectorWorker(FailedTransfer(RuntimeError("no driver")))
    total = WorkerReport()

    def add(report: WorkerReport) -> None:
        total.add(report)

    with worker.step(meta, add):
        pass
    assert total.broken
    assert "no driver" in caplog.text
    with worker.step(StepMeta(loads={2: SPEC}), add) as finished:
        pass
    assert finished.loaded == {"r"}
    assert finished.failed == {"r": [7]}
    assert total.failed == set(meta.stores) | {2}
    assert (
        sum("OFFLOADING IS OFF" in record.message for record in caplog.records if record.levelno >= logging.ERROR) == 1
    )
    worker.suspend()
    worker.shutdown()

"""The checks and numbers of the report."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from demo.shared_report import FaultResult, SharedReport, SkippedStore

from .conftest import FOUND, answers, make_fault, make_store, wrong


def with_store(report: SharedReport, **changes: Any) -> SharedReport:
    return replace(report, stores=[replace(make_store(), **changes)], faults=[])


def with_fault(report: SharedReport, **changes: Any) -> SharedReport:
    return replace(report, faults=[replace(make_fault(), **changes)])


def test_a_good_run(report: SharedReport) -> None:
    assert report.failures == []
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["ok"] is True
    assert list(data["stores"]) == ["shared_dir", "mooncake"]
    for store in data["stores"].values():
        assert store["identical"] is True
        assert store["hit_tokens"] == 6 * FOUND
        assert store["ttft_ms"] == {"recompute": 702.5, "shared": 70.0}
        assert store["control_detected"] is True
    assert data["faults"][1] == {
        "store": "mooncake",
        "fault": "full",
        "how": "something was killed",
        "requests": 18,
        "slowest_request_s": 0.805,
        "longest_wait_s": 0.03,
        "within_deadline": True,
        "identical": True,
        "hit_tokens": {"before": 6 * FOUND, "during": 0, "after": 6 * FOUND},
        "recovered_s": 4.0,
        "bad_blocks": 0,
    }


def test_how_much_faster_is_measured_at_the_second_server(report: SharedReport) -> None:
    """The run without kvoffload came minutes earlier, when the machine may have been busier. Prompts that the store did
    not have count on neither side."""
    busy = {document: replace(each, ttft_ms=10 * each.ttft_ms) for document, each in report.baseline.items()}
    shared = [replace(each, ttft_ms=50.0 + each.document) for each in answers(FOUND)]
    shared[5] = replace(answers()[5], ttft_ms=9000.0)
    computed = [replace(each, ttft_ms=500.0 + each.document) for each in answers()]
    measured = replace(with_store(report, shared=shared, computed=computed), baseline=busy)
    (store,) = measured.results
    assert measured.ttft_ms(store) == {"recompute": 502.0, "shared": 52.0}


def test_a_skipped_store_says_why(report: SharedReport) -> None:
    skipped = replace(report, stores=[make_store(), SkippedStore("mooncake", "run: apt-get")])
    assert skipped.failures == []
    assert skipped.to_dict()["stores"]["mooncake"] == {"skipped": "run: apt-get"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"shared": wrong(answers(FOUND))}, "the second server differ from those without kvoffload in 1 of 6"),
        ({"first": wrong(answers())}, "the first server differ"),
        ({"computed": wrong(answers())}, "the second server, without loading, differ"),
        ({"corrupted": wrong(answers())}, "after the stored values were changed"),
        ({"shared": answers()}, "the second server found nothing"),
        ({"back": answers()}, "the first server found nothing"),
        ({"control": answers(FOUND)}, "the control was not detected"),
        ({"control": wrong(answers())}, "the control was not detected"),
        ({"bad_blocks": 0}, "no checksum has found the changed values"),
    ],
)
def test_a_failed_check_of_a_store(report: SharedReport, changes: dict[str, object], sentence: str) -> None:
    (found,) = with_store(report, **changes).failures
    assert sentence in found


def test_a_run_that_ended_early_has_failed(report: SharedReport) -> None:
    (sentence,) = replace(report, errors=["mooncake: the engine ended too early"]).failures
    assert sentence == "mooncake: the engine ended too early"


def test_a_logprob_that_is_not_finite_leaves_the_file_readable(report: SharedReport) -> None:
    shared = [replace(each, logprobs=[None, -2.0, -1.5]) for each in answers(FOUND)]
    content = json.dumps(with_store(report, shared=shared).to_dict(), allow_nan=False)
    assert json.loads(content)["stores"]["shared_dir"]["max_logprob_diff"] is None


def test_different_outputs_are_not_identical(report: SharedReport) -> None:
    for name in ("first", "shared", "computed", "back", "corrupted"):
        broken = with_store(report, **{name: wrong(answers(FOUND))})
        assert broken.to_dict()["stores"]["shared_dir"]["identical"] is False


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"during": wrong(answers())}, "outputs differ"),
        ({"during": [replace(answers()[0], waited_s=2.5)]}, "a request waited 2.5 s for blocks, more than 2.0 s"),
        ({"during": [replace(answers()[0], total_ms=60_000.0)]}, "a request took 60.0 s, more than 10.1 s"),
        ({"recovered_s": None}, "the store gave no hits again"),
        ({"before": answers()}, "the store gave no hits before"),
    ],
)
def test_a_failed_check_of_a_fault(report: SharedReport, changes: dict[str, object], sentence: str) -> None:
    (found,) = with_fault(report, **changes).failures
    assert found.startswith("shared_dir, killed: ")
    assert sentence in found


def test_the_limit_depends_on_the_slowest_request_without_kvoffload(report: SharedReport) -> None:
    slow = {document: replace(each, total_ms=2000.0) for document, each in report.baseline.items()}
    assert replace(report, baseline=slow).stuck_s == 22.0


def test_requests_count_before_during_and_after() -> None:
    fault: FaultResult = make_fault()
    assert len(fault.requests) == 18

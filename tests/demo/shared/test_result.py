"""The checks and numbers of the report."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from demo.shared_report import SharedReport

from .conftest import FOUND, answers, make_store, wrong


def with_store(report: SharedReport, **changes: Any) -> SharedReport:
    return replace(report, stores=[replace(make_store(), **changes)])


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

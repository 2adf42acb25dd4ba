"""Spans: what is looked up, loaded and stored for requests that have a trace, and that nothing else is touched."""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk", reason="needs the package opentelemetry-sdk")
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvoffload.observe import spans as spans_module
from kvoffload.observe.spans import RequestSpans
from tests.connector.rig import FakeRequest, Rig, prompt
from tests.connector.test_tiered_scheduler import TieredRig
from tests.scale import scaled
from tests.sim.engine import ModelEngine, Scenario

BLOCK_BYTES = 100
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
TRACED = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}


@dataclass(eq=False)
class TracedRequest(FakeRequest):
    trace_headers: Mapping[str, str] | None = None


def traced(name: str, tokens: list[int]) -> TracedRequest:
    return TracedRequest(name, tokens, trace_headers=TRACED)


class Ticks:
    """A clock that moves on by a second each time it is read."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        self.now += 1_000_000_000
        return self.now


class Collected:
    """The spans that were made."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    def all(self) -> tuple[ReadableSpan, ...]:
        spans: tuple[ReadableSpan, ...] = self._exporter.get_finished_spans()
        return spans

    def names(self) -> list[str]:
        return [span.name for span in self.all()]

    def only(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.all() if span.name == name]
        return span


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[TracerProvider]:
    """Takes the place of the process's provider, which can be set only once."""
    provider = TracerProvider()
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield provider
    provider.shutdown()


@pytest.fixture
def collected(provider: TracerProvider) -> Collected:
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Collected(exporter)


def make_spans(now: Callable[[], int] | None = None) -> RequestSpans:
    return RequestSpans(lambda request: getattr(request, "trace_headers", None), BLOCK_BYTES, now or Ticks())


def traced_rig(**options: Any) -> Rig:
    rig = Rig(**options)
    rig.half.observer.spans = make_spans()
    return rig


def serve(rig: Rig, request: TracedRequest) -> None:
    """Serves a request that computes its prompt."""
    rig.report(*rig.start(request).stores)
    rig.half.request_finished(request)
    rig.step()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return {name.removeprefix("kvoffload."): value for name, value in (span.attributes or {}).items()}


def test_a_request_that_computes_has_a_lookup_and_a_store(collected: Collected) -> None:
    rig = traced_rig()
    serve(rig, traced("r", prompt(9)))
    assert collected.names() == ["kvoffload.lookup", "kvoffload.store"]
    for span in collected.all():
        assert span.parent is not None
        assert f"{span.context.trace_id:032x}" == f"{span.parent.trace_id:032x}" == TRACE_ID
        assert f"{span.parent.span_id:016x}" == PARENT_ID
        assert span.instrumentation_scope is not None
        assert span.instrumentation_scope.name == "kvoffload"
        assert span.status.is_ok or span.status.is_unset
    assert attributes(collected.only("kvoffload.lookup")) == {
        "request_id": "r",
        "wait_seconds": 0.0,
        "asked_tokens": 9,
        "device_tokens": 0,
        "host_tokens": 0,
        "missing_tokens": 9,
        "miss_reason": "never_stored",
    }
    store = collected.only("kvoffload.store")
    assert attributes(store) == {"request_id": "r", "blocks": 2, "bytes": 200, "failed_blocks": 0}


def test_a_load_has_its_tokens_blocks_and_bytes(collected: Collected) -> None:
    rig = traced_rig()
    rig.store(prompt(12), "untraced")
    assert collected.names() == []
    request = traced("r", prompt(9))
    meta = rig.load(request)
    rig.report(*meta.loads)
    rig.half.request_finished(request)
    rig.step()
    assert collected.names() == ["kvoffload.lookup", "kvoffload.load"]
    load = collected.only("kvoffload.load")
    assert attributes(load) == {"request_id": "r", "tokens": 8, "blocks": 2, "bytes": 200, "failed_blocks": 0}
    assert attributes(collected.only("kvoffload.lookup"))["host_tokens"] == 8


def test_a_wait_for_a_lower_tier_is_in_the_lookup_and_in_the_metrics(collected: Collected) -> None:
    rig = TieredRig()
    rig.half.observer.spans = make_spans()
    rig.put_below(prompt(8))
    request = traced("r", prompt(9))
    assert rig.look_up(request) == (None, False)
    rig.clock.now += 0.25
    rig.arrive()
    rig.report(*rig.load(request).loads)
    rig.half.request_finished(request)
    rig.step()
    lookup = attributes(collected.only("kvoffload.lookup"))
    assert lookup["tier_tokens.memory"] == 8
    assert lookup["wait_seconds"] == pytest.approx(0.25)
    assert rig.half.metrics.snapshot()["wait_seconds"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    "headers",
    [None, {}, {"traceparent": "nonsense"}, {"tracestate": "a=b"}, {"traceparent": TRACED["traceparent"][:-2] + "00"}],
)
def test_without_a_sampled_trace_there_is_no_span(collected: Collected, headers: Mapping[str, str] | None) -> None:
    """Nor if the engine's tracing is off, and the request has a trace."""
    serve(traced_rig(), TracedRequest("r", prompt(9), trace_headers=headers))
    serve(Rig(), traced("r", prompt(9)))
    assert collected.names() == []


class Hanging(SpanExporter):
    """Hangs until it is freed."""

    def __init__(self) -> None:
        self.called, self.freed = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.called.set()
        self.freed.wait()
        return SpanExportResult.FAILURE


def test_an_exporter_that_hangs_is_not_waited_for(provider: TracerProvider) -> None:
    """With the processor that vLLM uses. The queue is bounded, and more requests than it holds are served meanwhile."""
    exporter = Hanging()
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=8, max_export_batch_size=4))
    rig = traced_rig(num_host_blocks=64)
    try:
        for i in range(32):
            serve(rig, traced(f"r{i}", prompt(8, start=100 * i)))
        # This thread has not waited: the exporter hangs, and it has been called by another one.
        assert exporter.called.wait(60)
        assert not exporter.freed.is_set()
        assert rig.half.metrics.snapshot()["store_blocks"] == 64
        assert not rig.half.off
    finally:
        exporter.freed.set()


class BrokenProcessor(SpanProcessor):
    def on_end(self, span: ReadableSpan) -> None:
        raise RuntimeError("planted")


@pytest.mark.parametrize("fault", ["headers", "provider"])
def test_an_error_ends_spans_and_nothing_else(
    provider: TracerProvider, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("planted")

    spans = make_spans()
    if fault == "headers":
        spans = RequestSpans(broken, BLOCK_BYTES)
    else:
        provider.add_span_processor(BrokenProcessor())
    rig = Rig()
    rig.half.observer.spans = spans
    with caplog.at_level(logging.WARNING):
        for i in range(3):
            serve(rig, traced(f"r{i}", prompt(8, start=100 * i)))
    assert not rig.half.off
    assert rig.half.metrics.snapshot()["store_blocks"] == 6
    assert len([r for r in caplog.records if "no more spans are made: RuntimeError: planted" in r.getMessage()]) == 1


def test_every_attribute_is_documented() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "monitoring.md").read_text()
    made = set(re.findall(r'"kvoffload\.(\w+)', Path(spans_module.__file__).read_text()))
    rows = set(re.findall(r"^\| `(\w+)", text.partition("## Traces")[2], re.MULTILINE))
    assert made == rows


def test_opentelemetry_is_needed_only_for_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the module is imported without it is in test_layers."""
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ImportError):
        make_spans()


class Counting(SpanProcessor):
    """Counts spans and their blocks by name, and lookups by request."""

    def __init__(self) -> None:
        self.lookups: Counter[str] = Counter()
        self.blocks: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    def on_end(self, span: ReadableSpan) -> None:
        values = attributes(span)
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time
        if span.name == "kvoffload.lookup":
            self.lookups[values["request_id"]] += 1
        else:
            self.blocks[span.name] += values["blocks"]
            self.failed[span.name] += values["failed_blocks"]


def run_traced(
    seed: int, monkeypatch: pytest.MonkeyPatch, patch: Callable[[ModelEngine], None] | None = None
) -> list[str]:
    """Runs the model engine: preemptions, aborts, resets, sleeps, several groups and ranks, and failing copies. Returns
    what is wrong with the spans."""
    provider, counted = TracerProvider(shutdown_on_exit=False), Counting()
    provider.add_span_processor(counted)
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    spans = RequestSpans(lambda request: TRACED, BLOCK_BYTES)
    engine = ModelEngine(Scenario.random(seed), patch)
    engine.scheduler.observer.spans = spans
    engine.run()
    totals = engine.scheduler.metrics.snapshot()
    # Blocks that are stored because they leave the device belong to no request.
    names = ("load", "store") if engine.scheduler.stores.leaving is None else ("load",)
    good = {name: counted.blocks[f"kvoffload.{name}"] - counted.failed[f"kvoffload.{name}"] for name in names}
    faults = {
        "a request has several lookups": not set(counted.lookups.values()) <= {1},
        "a request has no lookup": not set(engine.outputs) <= set(counted.lookups),
        "blocks are not counted": any(good[name] != totals.get(f"{name}_blocks", 0) for name in good),
    }
    return [f"seed {seed}: {text}" for text, is_so in faults.items() if is_so]


@pytest.mark.parametrize("chunk", range(2))
def test_random_schedules(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, chunk: int) -> None:
    with caplog.at_level(logging.ERROR):
        faults = [fault for seed in range(chunk, scaled(20), 2) for fault in run_traced(seed, monkeypatch)]
    assert faults == []


def never_close(engine: ModelEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler half does not say that the last stores have begun."""
    monkeypatch.setattr(engine.scheduler.observer, "planned_last_stores", lambda states: None)


def close_early(engine: ModelEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans are made when the first of several jobs of a report is looked at."""
    observer = engine.scheduler.observer
    copied = observer.copied
    monkeypatch.setattr(observer, "copied", lambda jobs: [copied([job]) for job in jobs])


@pytest.mark.parametrize(
    ("plant", "fault"), [(never_close, "a request has no lookup"), (close_early, "blocks are not counted")]
)
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, plant: Any, fault: str
) -> None:
    """Negative controls."""
    with caplog.at_level(logging.ERROR):
        faults = [
            found
            for seed in range(5)
            for found in run_traced(seed, monkeypatch, lambda engine: plant(engine, monkeypatch))
        ]
    assert any(fault in found for found in faults), faults

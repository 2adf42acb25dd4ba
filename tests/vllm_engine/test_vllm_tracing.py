"""Spans of kvoffload in the traces of vLLM's server, as a collector receives them, in ``make soak``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driver import BLOCK_SIZE
from serve_harness import Server, flag
from vllm_harness import Runner, eventually

from demo.process import HOST

pytestmark = [pytest.mark.vllm, pytest.mark.soak]

BLOCKS = 6
PROMPT: list[int] = np.random.default_rng(7).integers(5, 500, size=BLOCKS * BLOCK_SIZE + 1).tolist()
PARENT = "00f067aa0ba902b7"


@dataclass
class Collector:
    """Receives spans over OTLP/HTTP: by trace and name, the scope, the parent and the attributes."""

    spans: dict[tuple[str, str], tuple[str, str, dict[str, Any]]] = field(default_factory=dict)
    url: str = ""

    def take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    values = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
                    parent = span.parent_span_id.hex()
                    self.spans[span.trace_id.hex(), span.name] = scope.scope.name, parent, values


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.proto", reason="vLLM's tracing needs the packages of opentelemetry")
    collected = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collected.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer((HOST, 0), Handler) as server:
        collected.url = f"http://{HOST}:{server.server_port}/v1/traces"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield collected
        server.shutdown()
        thread.join()


def ask(server: Server, number: int, flags: str = "01") -> str:
    """Sends PROMPT with a trace of its own, and an empty device cache. Returns the id of the trace."""
    server.forget_device_blocks()
    trace = f"{number:032x}"
    request = server.request(PROMPT, None, {"max_tokens": 2})
    request["extra_headers"] = {"traceparent": f"00-{trace}-{PARENT}-{flags}"}
    server.client.completions.create(**request)
    return trace


OPTIONS = {"host_bytes": "64MiB", "host_contents": "inclusive"}
"""What is stored when it leaves the device is stored for no request."""


@pytest.mark.parametrize("is_on", [True, False])
def test_spans_of_a_request_are_in_its_trace(
    run: Runner, collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_on: bool
) -> None:
    """A store, and a load. The control: the exporters of vLLM's processes, but not the flag."""
    run.write_model(tmp_path / "model")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    # vLLM's processes set up their tracing if they find this, even if it is off.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    arguments = ["--otlp-traces-endpoint", collector.url] if is_on else []
    with Server(tmp_path / "model", tmp_path / "server.log", flag(**OPTIONS), arguments, run) as server:
        first, second, unsampled = ask(server, 1), ask(server, 2), ask(server, 3, "00")
        wanted = {(first, "store"), (first, "lookup"), (second, "lookup"), (second, "load")}
        if is_on:
            assert eventually(lambda: {(t, f"kvoffload.{n}") for t, n in wanted} <= collector.spans.keys())
            assert eventually(lambda: (second, "llm_request") in collector.spans), "vLLM's own span stands beside ours"
        server.process.terminate()
        server.process.wait(60)
    ours = {at: span for at, span in collector.spans.items() if span[0] == "kvoffload"}
    assert set(ours) == {(t, f"kvoffload.{n}") for t, n in wanted if is_on}
    assert unsampled not in {trace for trace, _ in collector.spans}
    if is_on:
        assert {parent for _, parent, _ in ours.values()} == {PARENT}
        assert ours[first, "kvoffload.lookup"][2]["kvoffload.miss_reason"] == "never_stored"
        assert ours[second, "kvoffload.load"][2]["kvoffload.tokens"] == BLOCKS * BLOCK_SIZE
        assert ours[second, "kvoffload.load"][2]["kvoffload.failed_blocks"] == 0

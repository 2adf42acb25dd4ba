"""Spans of kvoffload in the traces of vLLM's server, as a collector receives them."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Not "vllm": a directory of that name on sys.path could be imported instead.
pytest.importorskip("vllm.version")
pytest.importorskip("opentelemetry.proto", reason="vLLM's tracing needs the packages of opentelemetry")
from driver import BLOCK_SIZE
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from serve_harness import Server, flag
from vllm_harness import Runner, eventually

from demo.process import HOST

pytestmark = pytest.mark.vllm

POOL_BLOCKS = 64
BLOCK_BYTES = BLOCK_SIZE << 10
PROMPT_BLOCKS = 6
PARENT = "00f067aa0ba902b7"
NUMBERS = itertools.count(1)


@dataclass(frozen=True)
class Span:
    name: str
    scope: str
    trace: str
    parent: str
    seconds: float
    attributes: dict[str, Any]


@dataclass
class Collector:
    """Receives spans over OTLP/HTTP."""

    spans: list[Span] = field(default_factory=list)
    url: str = ""

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    values = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
                    seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
                    ids = span.trace_id.hex(), span.parent_span_id.hex()
                    self.spans.append(Span(span.name, scope.scope.name, *ids, seconds, values))

    def ours(self) -> list[Span]:
        return [span for span in self.spans if span.scope == "kvoffload"]

    def of(self, trace: str, *names: str) -> dict[str, Span]:
        """Waits for the spans ``names`` of a trace, and returns all spans of kvoffload in it."""

        def arrived() -> dict[str, Span]:
            return {span.name: span for span in self.ours() if span.trace == trace}

        assert eventually(lambda: arrived().keys() >= set(names)), f"of {names} only {list(arrived())} arrived"
        return arrived()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
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


@pytest.fixture(scope="module")
def start(run: Runner, collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Server]:
    directory = tmp_path_factory.mktemp("tracing")
    model = directory / "model"
    run.write_model(model)
    variables = {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        # vLLM's processes set up their tracing if they find this, even if it is off.
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": collector.url,
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }

    def start(name: str, config: str, *arguments: str) -> Server:
        with pytest.MonkeyPatch.context() as patch:
            for variable, value in variables.items():
                patch.setenv(variable, value)
            return Server(model, directory / f"{name}.log", config, arguments, run)

    return start


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(7)
    return [rng.integers(5, 500, size=PROMPT_BLOCKS * BLOCK_SIZE + 1).tolist() for _ in range(count)]


def ask(server: Server, prompt: list[int], flags: str = "01") -> str:
    """Sends a request with a trace of its own. Returns the id of the trace."""
    trace = f"{next(NUMBERS):032x}"
    request = server.request(prompt, None, {"max_tokens": 2})
    request["extra_headers"] = {"traceparent": f"00-{trace}-{PARENT}-{flags}"}
    server.client.completions.create(**request)
    return trace


def test_spans_of_a_request_are_in_its_trace(
    start: Callable[..., Server], collector: Collector, tmp_path: Path
) -> None:
    """Stores, a load from host memory, and one from disk."""
    tiers = [{"kind": "disk", "dir": str(tmp_path / "disk"), "bytes": "64MiB"}]
    options: dict[str, Any] = {"policy": "lru", "load_only_if_faster": False, "load_deadline_ms": 60_000}
    config = flag(host_bytes=POOL_BLOCKS * BLOCK_BYTES, tiers=tiers, **options)
    first, *others = prompts(1 + 2 * POOL_BLOCKS // PROMPT_BLOCKS)
    size = {
        "kvoffload.blocks": PROMPT_BLOCKS,
        "kvoffload.bytes": PROMPT_BLOCKS * BLOCK_BYTES,
        "kvoffload.failed_blocks": 0,
    }
    tokens = PROMPT_BLOCKS * BLOCK_SIZE
    with start("on", config, "--otlp-traces-endpoint", collector.url) as server:
        stored = collector.of(ask(server, first), "kvoffload.lookup", "kvoffload.store")
        assert set(stored) == {"kvoffload.lookup", "kvoffload.store"}
        assert {span.parent for span in stored.values()} == {PARENT}
        lookup = stored["kvoffload.lookup"].attributes
        assert lookup["kvoffload.asked_tokens"] == lookup["kvoffload.missing_tokens"] == len(first)
        assert lookup["kvoffload.miss_reason"] == "never_stored"
        assert stored["kvoffload.store"].attributes.items() >= size.items()
        assert 0 < stored["kvoffload.store"].seconds < 60

        server.forget_device_blocks()
        loaded = collector.of(ask(server, first), "kvoffload.lookup", "kvoffload.load")
        assert loaded["kvoffload.lookup"].attributes["kvoffload.host_tokens"] == tokens
        assert loaded["kvoffload.load"].attributes.items() >= {**size, "kvoffload.tokens": tokens}.items()

        assert eventually(lambda: server.metrics()["tier_write_blocks:disk"] >= PROMPT_BLOCKS)
        for other in others:
            server.complete(other, max_tokens=1)
        server.forget_device_blocks()
        promoted = collector.of(ask(server, first), "kvoffload.lookup", "kvoffload.load")
        found = promoted["kvoffload.lookup"].attributes
        assert found["kvoffload.host_tokens"] + found["kvoffload.tier_tokens.disk"] == tokens
        assert found["kvoffload.tier_tokens.disk"] > 0
        assert promoted["kvoffload.lookup"].seconds >= found["kvoffload.wait_seconds"] > 0

        unsampled = ask(server, first, flags="00")
        last = ask(server, first)
        collector.of(last, "kvoffload.lookup")
        traces = {span.trace for span in collector.ours()}
        assert unsampled not in traces
        # Those of other prompts had no trace.
        assert len(traces) == 4
        # vLLM's own span of the request stands beside ours.
        assert eventually(lambda: any(s.name == "llm_request" and s.trace == last for s in collector.spans))
        assert server.metrics()["off"] == 0


@pytest.mark.soak
def test_without_tracing_there_is_no_span(start: Callable[..., Server], collector: Collector) -> None:
    """Negative control: the same requests, and exporters in vLLM's processes, but not the flag."""
    with start("off", flag(host_bytes="64MiB")) as server:
        before = len(collector.ours())
        trace = ask(server, prompts(1)[0])
        assert server.metrics()["store_blocks"] == PROMPT_BLOCKS
        server.process.terminate()
        with contextlib.suppress(Exception):
            server.process.wait(60)
    assert len(collector.ours()) == before
    assert trace not in {span.trace for span in collector.spans}

"""Spans of OpenTelemetry: what was looked up, loaded and stored for a request, as a part of the request's own trace.

Spans are made once a request has ended and its last store was reported, and not at all for requests without a trace.
The process's tracer provider, which the engine sets up, sends them. The package ``opentelemetry`` is found at run time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvoffload.observe.records import RequestRecord

SCOPE = "kvoffload"
"""Name of the instrumentation scope of all spans."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Copies:
    """The copies of one direction that were made for a request. Times are in nanoseconds since 1970."""

    blocks: int = 0
    failed_blocks: int = 0
    began: int = 0
    ended: int = 0

    def add(self, blocks: int, failed: bool, began: int, ended: int) -> None:
        self.began = min(self.began, began) if self.blocks else began
        self.ended = ended
        self.blocks += blocks
        self.failed_blocks += blocks if failed else 0


@dataclass(slots=True, eq=False)
class TracedRequest:
    """What spans of a request say beside its record. Times are in nanoseconds since 1970."""

    headers: Mapping[str, str]
    began: int
    looked_up: int = 0
    """When it was first given device blocks; 0 before."""
    waited_s: float = 0.0
    loaded_tokens: int = 0
    load: Copies = field(default_factory=Copies)
    store: Copies = field(default_factory=Copies)


class RequestSpans:
    """Makes spans of requests whose ``headers(request)`` have a trace context (W3C: "traceparent"); ``headers`` may
    return None. ``block_bytes`` is the size of a block on all ranks.

    Raises ImportError without the package ``opentelemetry``. Later nothing raises: after an unexpected error one
    warning says so, and no more spans are made. Call it from the engine's scheduler thread only. It never waits:
    sending is the task of the tracer provider's threads.
    """

    def __init__(
        self,
        headers: Callable[[Any], Mapping[str, str] | None],
        block_bytes: int,
        now: Callable[[], int] = time.time_ns,
    ) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._tracer = trace.get_tracer(SCOPE)
        self._propagator = TraceContextTextMapPropagator()
        self._headers = headers
        self._block_bytes = block_bytes
        self.now = now
        """Returns the time in nanoseconds since 1970."""
        self._has_failed = False

    def begin(self, request: Any) -> TracedRequest | None:
        """Returns what is to be noted of a request, None if it has no trace."""
        if self._has_failed:
            return None
        try:
            headers = self._headers(request)
            return TracedRequest(dict(headers), self.now()) if headers else None
        except Exception as error:
            self._fail(error)
            return None

    def make(self, req_id: str, request: TracedRequest, record: RequestRecord | None) -> None:
        """Makes the spans of a request that has ended, of which no copy is in progress."""
        if self._has_failed:
            return
        try:
            context = self._propagator.extract(request.headers)
            # With a malformed header the spans would be a trace of their own.
            if self._trace.get_current_span(context).get_span_context().is_valid:
                self._make(req_id, request, record, context)
        except Exception as error:
            self._fail(error)

    def _make(self, req_id: str, request: TracedRequest, record: RequestRecord | None, context: Any) -> None:
        attributes = {"kvoffload.request_id": req_id}
        lookup = attributes | {"kvoffload.wait_seconds": request.waited_s} | _found(record)
        self._span("kvoffload.lookup", context, request.began, request.looked_up or self.now(), lookup)
        if request.load.blocks:
            loaded = attributes | {"kvoffload.tokens": request.loaded_tokens}
            self._copies("kvoffload.load", context, request.load, loaded)
        if request.store.blocks:
            self._copies("kvoffload.store", context, request.store, attributes)

    def _copies(self, name: str, context: Any, copies: Copies, attributes: Mapping[str, Any]) -> None:
        counts = {
            "kvoffload.blocks": copies.blocks,
            "kvoffload.bytes": copies.blocks * self._block_bytes,
            "kvoffload.failed_blocks": copies.failed_blocks,
        }
        problem = f"{copies.failed_blocks} of {copies.blocks} blocks failed" if copies.failed_blocks else ""
        self._span(name, context, copies.began, copies.ended, {**attributes, **counts}, problem)

    def _span(
        self, name: str, context: Any, began: int, ended: int, attributes: Mapping[str, Any], problem: str = ""
    ) -> None:
        span = self._tracer.start_span(name, context=context, attributes=attributes, start_time=began)
        if problem:
            span.set_status(self._trace.StatusCode.ERROR, problem)
        span.end(end_time=max(began, ended))

    def _fail(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.warning("kvoffload: no more spans are made: %s: %s", type(error).__name__, error)


def _found(record: RequestRecord | None) -> dict[str, Any]:
    if record is None:
        return {}
    attributes = {
        "kvoffload.asked_tokens": record.tokens_asked,
        "kvoffload.device_tokens": record.device_tokens,
        "kvoffload.host_tokens": record.host_tokens,
        "kvoffload.missing_tokens": record.tokens_missing,
        **{f"kvoffload.tier_tokens.{tier}": tokens for tier, tokens in record.tier_tokens.items()},
        "kvoffload.miss_reason": record.reason and str(record.reason),
        "kvoffload.missed_in": record.missed_in,
    }
    return {name: value for name, value in attributes.items() if value is not None}

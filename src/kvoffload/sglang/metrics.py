"""kvoffload's metrics in the /metrics of SGLang's server."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from kvoffload.observe.metrics import METRICS, PREFIX


class ServerMetrics:
    """The metrics of the tiers of one rank. Its SGLang process shows them with its own, since both are in the registry
    of prometheus_client."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        """``labels`` distinguish this rank from others."""
        self._labels = dict(labels)

    def add(self, counts: Mapping[str, float]) -> None:
        """Adds ``counts``, by "NAME", "NAME:TIER" or "NAME:ABILITY,TIER", to counters, and sets gauges to them."""
        for name, value in counts.items():
            metric, _, label = name.partition(":")
            spec = METRICS.get(metric)
            if spec is None or spec.label not in ("tier", "ability,tier"):
                # The rest is about the staging pool, or about requests, which only the engine knows.
                continue
            labels = dict(zip(spec.labels, spec.split(label), strict=True))
            child = _metric(metric, tuple(self._labels)).labels(**self._labels, **labels)
            if spec.kind == "gauge":
                child.set(value)
            else:
                child.inc(max(0.0, value))


@cache
def _metric(name: str, labels: tuple[str, ...]) -> Any:
    """Returns the metric of that name, which a process can register once."""
    # SGLang sets prometheus_client up for several processes before it imports it.
    from prometheus_client import Counter, Gauge

    spec = METRICS[name]
    if spec.kind == "gauge":
        return Gauge(PREFIX + name, spec.help, [*labels, *spec.labels], multiprocess_mode="mostrecent")
    return Counter(PREFIX + name, spec.help, [*labels, *spec.labels])

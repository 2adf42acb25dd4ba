"""Counters and gauges: their names, their totals, and what changed since they were last reported."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

PREFIX = "kvoffload:"
"""What the names of METRICS begin with at an engine's endpoint."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """Describes a metric: its kind ("counter" or "gauge"), what it counts, and the name of its label if it has one.
    Several labels, and their values, are separated by commas."""

    kind: str
    help: str
    label: str | None = None

    @property
    def labels(self) -> list[str]:
        """The names of its labels."""
        return self.label.split(",") if self.label else []

    def split(self, label: str) -> list[str]:
        """Returns the value of each of its labels. Only the last one, the name of a tier or of a rule, may have a comma
        in it."""
        return label.split(",", len(self.labels) - 1) if label else []


_counter, _gauge = partial(MetricSpec, "counter"), partial(MetricSpec, "gauge")
METRICS: dict[str, MetricSpec] = {
    "store_blocks": _counter("Blocks stored in host memory"),
    "load_blocks": _counter("Blocks loaded to the device"),
    "store_bytes": _counter("Bytes copied from device to host"),
    "load_bytes": _counter("Bytes copied from host to device"),
    "store_seconds": _counter("Time spent copying from device to host"),
    "load_seconds": _counter("Time spent copying from host to device"),
    "store_failures": _counter("Stores that failed twice or came too late, and were dropped"),
    "load_failures": _counter("Loads that failed; their tokens were recomputed"),
    "weight_changes": _counter("Changes of the weights, each of which drops all blocks"),
    "evicted_blocks": _counter("Blocks evicted from host memory"),
    "early_evictions": _counter("Of the evicted blocks, those that left early because of a hint of their session"),
    "ignored_options": _counter("Request options that were not valid or do not exist", "option"),
    "refused_stores": _counter("Stores that were refused because no room could be made"),
    "lost_blocks": _counter(
        "Blocks that left the device with more than can be stored in one step, and were not stored"
    ),
    "asked_tokens": _counter("Tokens of admitted requests"),
    "device_hit_tokens": _counter("Tokens found in the engine's own cache"),
    "host_hit_tokens": _counter("Tokens found in host memory"),
    "saved_seconds": _counter("Time in which the engine would have computed what was loaded, by its measured speed"),
    "misses": _counter("Requests that missed, by the reason of their first missing block", "reason"),
    "wait_seconds": _counter(
        "Time that requests waited for lower tiers, or for blocks that were loaded for another request"
    ),
    "promoted_blocks": _counter("Blocks read from lower tiers into host memory and verified"),
    "late_promotions": _counter("Requests whose reads from lower tiers did not all end within the load deadline"),
    "prefetched_blocks": _counter("Blocks read from lower tiers before the request that was expected to use them"),
    "prefetched_used_blocks": _counter("Of these, blocks that a request then asked for in time"),
    "tier_hit_tokens": _counter("Tokens that were read from a lower tier for their request", "tier"),
    "tier_read_bytes": _counter("Bytes read from the tier and verified", "tier"),
    "tier_read_seconds": _counter("Time spent reading from the tier, added up over threads", "tier"),
    "tier_read_failures": _counter("Blocks that could not be read from the tier", "tier"),
    "tier_bad_blocks": _counter("Blocks of the tier that failed verification and were dropped", "tier"),
    "tier_write_blocks": _counter("Blocks written to the tier", "tier"),
    "tier_write_bytes": _counter("Bytes written to the tier", "tier"),
    "tier_write_seconds": _counter("Time spent writing to the tier, added up over threads", "tier"),
    "tier_write_failures": _counter("Blocks that could not be written to the tier", "tier"),
    "tier_dropped_writes": _counter("Blocks evicted or given up before they were written to the tier", "tier"),
    "tier_evicted_blocks": _counter("Blocks evicted from the tier", "tier"),
    "tier_lookup_failures": _counter("Lookups in the tier that failed or were answered too late", "tier"),
    "tier_blocks": _gauge("Blocks in the tier; 0 if it does not know", "tier"),
    "tier_used_bytes": _gauge("Bytes taken in the tier; 0 if it does not know", "tier"),
    "tier_capacity_bytes": _gauge("Budget of the tier in bytes; 0 if its medium bounds itself", "tier"),
    "tier_off": _gauge("1 if the tier is not used any more until the server restarts", "tier"),
    "tier_paused": _gauge(
        "1 while the ability (read, write) of the tier is not used, or only tested, because it has failed or the tier "
        "cannot be reached",
        "ability,tier",
    ),
    "pool_used_blocks": _gauge("Blocks of the host pool in use"),
    "pool_blocks": _gauge("Capacity of the host pool in blocks"),
    "tenant_asked_tokens": _counter("Tokens of admitted requests, by tenant", "tenant"),
    "tenant_hit_tokens": _counter("Tokens found in host memory or read from a lower tier", "tenant"),
    "tenant_blocks": _gauge("Blocks of the tenant in the tier", "tenant,tier"),
    "tenant_evicted_blocks": _counter("Blocks of the tenant evicted from the tier", "tenant,tier"),
    "tenant_refused_stores": _counter(
        "Stores of the tenant that were refused, because of its quota or because no room could be made", "tenant,tier"
    ),
    "tenant_retained_blocks": _gauge(
        "Blocks of the tenant that are charged to its retention quota of the tier", "tenant,tier"
    ),
    "tenant_lost_retained_blocks": _counter(
        "Retained blocks of the tenant that the tier has lost before their time", "tenant,tier"
    ),
    "tenant_byte_seconds": _counter(
        "Bytes of the tenant in the tier times the seconds for which they were held", "tenant,tier"
    ),
    "tenant_retained_byte_seconds": _counter(
        "The same for blocks that are charged to the tenant's retention quota", "tenant,tier"
    ),
    "tenant_moved_bytes": _counter(
        "Bytes of whole blocks that were copied for the tenant between device and host memory (host), or read from and "
        "written to the tier",
        "tenant,tier",
    ),
    "tenant_saved_seconds": _counter(
        "Time in which the engine would have computed what was loaded for the tenant", "tenant"
    ),
    "handovers": _counter(
        "Requests handed over to another server (sent), and requests of others by how much was found of what was "
        "handed over (complete, partial, none, other_name)",
        "result",
    ),
    "retentions": _counter(
        "Requests that asked for their blocks to be retained: by the tier that retains them, or why none does", "answer"
    ),
    "policy_rule": _gauge("1 for the rule that a self-tuning policy follows now, 0 for the others", "rule"),
    "policy_score": _gauge("Recent hits that each rule would have had, in sampled blocks", "rule"),
    "off": _gauge("1 if a failed check has switched offloading off"),
}
"""Every metric by name. A labelled metric's values are stored under "name:label value"."""


class Metrics:
    """Running totals by name, and the changes since the last ``take``.

    ``snapshot`` and ``take`` first call ``read``, which may count and set gauges lazily, so that no step has to.
    """

    def __init__(self, read: Callable[[], None] | None = None) -> None:
        self._read = read or (lambda: None)
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._taken: dict[str, float] = {}
        self._touched: set[str] = set()
        """Names that were counted or set since the last ``take``."""

    def add(self, name: str, amount: float = 1.0, label: str | None = None) -> None:
        """Adds ``amount`` to the counter ``name`` of METRICS.

        A counter never falls: a negative amount, from a tier or manager that counts from 0 again, is ignored.
        """
        labelled = self._labelled(name, label)
        self._totals[labelled] += max(0, amount)
        self._touched.add(labelled)

    def set(self, name: str, value: float, label: str | None = None) -> None:
        """Sets a gauge."""
        if METRICS[name].kind != "gauge":
            raise ValueError(f"metric {name} is not a gauge")
        labelled = self._labelled(name, label)
        self._totals[labelled] = value
        self._touched.add(labelled)

    @staticmethod
    def _labelled(name: str, label: str | None) -> str:
        spec = METRICS[name]
        if (spec.label is None) != (label is None):
            raise ValueError(f"metric {name} takes {'no label' if spec.label is None else 'a ' + spec.label}")
        return name if label is None else f"{name}:{label}"

    def take_in(self, counts: Mapping[str, float]) -> None:
        """Adds every counter and sets every gauge in ``counts``, whose names are "NAME" or "NAME:LABEL"."""
        for labelled, value in counts.items():
            name, _, label = labelled.partition(":")
            if METRICS[name].kind == "gauge":
                self.set(name, value, label or None)
            else:
                self.add(name, value, label or None)

    def snapshot(self) -> dict[str, float]:
        """Returns the totals since the start, and the gauges."""
        self._read()
        return dict(self._totals)

    def totals(self) -> list[tuple[str, float]]:
        """Returns the totals as they were last read. Any thread may call it."""
        return list(self._totals.items())

    def take(self) -> dict[str, float]:
        """Returns what changed since the last call: the increase of each counter, the new value of each gauge."""
        self._read()
        changes = {}
        for name in self._touched:
            value, before = self._totals[name], self._taken.get(name)
            if value != before:
                is_gauge = METRICS[name.partition(":")[0]].kind == "gauge"
                changes[name] = value if is_gauge else value - (before or 0.0)
                self._taken[name] = value
        self._touched.clear()
        return changes


def merge(into: dict[str, float], changes: dict[str, float]) -> None:
    """Adds ``changes`` (from ``Metrics.take``) to ``into``: counters add up, gauges take the newer value."""
    for name, value in changes.items():
        if METRICS[name.partition(":")[0]].kind == "gauge":
            into[name] = value
        else:
            into[name] = into.get(name, 0.0) + value

"""kvoffload's metrics in vLLM's own stats log and on its Prometheus endpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvoffload.abc import Ability, ConfigError, MissReason, RetainRefusal
from kvoffload.cache.tenants import HOST, Tenants
from kvoffload.config import OffloadConfig
from kvoffload.connector.options import OPTIONS, UNKNOWN
from kvoffload.observe.metrics import METRICS, PREFIX, merge

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass
class KVOffloadStats(KVConnectorStats):
    """Carries the result of ``Metrics.take`` to vLLM's loggers."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns the figures for vLLM's periodic log line."""
        data = self.data
        shown: dict[str, int | float] = {}
        for direction in ("store", "load"):
            moved, seconds = data.get(f"{direction}_bytes", 0.0), data.get(f"{direction}_seconds", 0.0)
            shown[f"{direction} MB"] = round(moved / 1e6, 1)
            if seconds:
                shown[f"{direction} GB/s"] = round(moved / seconds / 1e9, 1)
        for direction in ("read", "write"):
            for tier, moved in self._labelled(f"tier_{direction}_bytes"):
                shown[f"{tier} {direction} MB"] = round(moved / 1e6, 1)
        for name in ("asked_tokens", "device_hit_tokens", "host_hit_tokens"):
            shown[name.replace("_", " ")] = int(data.get(name, 0))
        for tier, tokens in self._labelled("tier_hit_tokens"):
            shown[f"{tier} hit tokens"] = int(tokens)
        for reason, count in self._labelled("misses"):
            shown[f"missed ({reason.replace('_', ' ')})"] = int(count)
        for tier, is_off in self._labelled("tier_off"):
            if is_off:
                shown[f"{tier} off"] = 1
        return shown

    def _labelled(self, name: str) -> list[tuple[str, float]]:
        """Returns label and value of each series of ``name``, ordered by label."""
        prefix = f"{name}:"
        return [(key.removeprefix(prefix), value) for key, value in sorted(self.data.items()) if key.startswith(prefix)]

    def is_empty(self) -> bool:
        return not self.data


class KVOffloadPromMetrics(KVConnectorPromMetrics):
    """One Prometheus metric for each of METRICS, named ``kvoffload:NAME``."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        self._children: dict[int, dict[str, Any]] = {engine: {} for engine in per_engine_labelvalues}
        tiers, tenants, shared = _configured(vllm_config)
        known = {
            "reason": list(map(str, MissReason)),
            "tier": tiers,
            "ability,tier": [f"{ability},{tier}" for ability in Ability for tier in tiers],
            "tenant": tenants,
            "tenant,tier": [f"{tenant},{tier}" for tenant in tenants for tier in shared],
            "option": [*OPTIONS, UNKNOWN],
            "answer": [HOST, *tiers, *map(str, RetainRefusal)],
        }
        for name, spec in METRICS.items():
            kind = metric_types[Gauge if spec.kind == "gauge" else Counter]
            labels = [*labelnames, *spec.labels]
            # Only gauges take multiprocess_mode; vLLM's own gauges use the same.
            extra = {"multiprocess_mode": "mostrecent"} if spec.kind == "gauge" else {}
            self._metrics[name] = kind(name=PREFIX + name, documentation=spec.help, labelnames=labels, **extra)
            # Every series whose labels are known exists from the start, with the value 0.
            for engine in per_engine_labelvalues:
                if spec.label is None:
                    self._child(engine, name)
                for label in known.get(spec.label or "", []):
                    self._child(engine, f"{name}:{label}")

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        if engine_idx not in self._children:
            return
        for name, value in transfer_stats_data.items():
            spec = METRICS.get(name.partition(":")[0])
            if spec is None:
                continue
            if spec.kind == "gauge":
                self._child(engine_idx, name).set(value)
            else:
                self._child(engine_idx, name).inc(max(0.0, value))

    def _child(self, engine: int, name: str) -> Any:
        """Returns the time series of ``name``, which is "NAME" or "NAME:LABEL"."""
        children = self._children[engine]
        if name not in children:
            metric, _, label = name.partition(":")
            values = self.per_engine_labelvalues[engine]
            children[name] = self._metrics[metric].labels(*values, *METRICS[metric].split(label))
        return children[name]


def _configured(vllm_config: VllmConfig) -> tuple[list[str], list[str], list[str]]:
    """Returns the names of the tiers and of the tenants that are configured, and of the tiers of which tenants have
    shares. They are empty if the engine has refused the configuration."""
    transfer = vllm_config.kv_transfer_config
    try:
        config = OffloadConfig.from_mapping(transfer.kv_connector_extra_config) if transfer else None
    except ConfigError:
        config = None
    if config is None:
        return [], [], []
    shared = [
        name for name, entry in zip(config.tier_names, config.tier_entries, strict=True) if entry.config.has_shares
    ]
    return config.tier_names, list(Tenants(b"", config.tenants).names), [HOST, *shared]

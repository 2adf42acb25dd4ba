"""KVOffloadTier: tiers of kvoffload below the host memory of vLLM's own offloading.

vLLM's OffloadingConnector copies between the device and its host memory. With ``"spec_name": "TieringOffloadingSpec"``
it stores every chunk in its secondary tiers as well, and promotes from them what a request asks for. An entry of
``secondary_tiers`` with ``"type": "KVOffloadTier"`` and ``"module_path": "kvoffload.vllm.secondary_tier"`` names this
class; its other keys are those of ``kvoffload.config.IntegrationConfig``.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvoffload.abc import ConfigError, OffloadKey
from kvoffload.abc.tier import HIT, MISS
from kvoffload.cache.keys import key_group_idx
from kvoffload.config import IntegrationConfig
from kvoffload.connector.engine import guarded
from kvoffload.fingerprints import fingerprint
from kvoffload.observe.metrics import METRICS, PREFIX, Metrics
from kvoffload.tiering.bridge import BridgeSettings, TierBridge, build_bridge
from kvoffload.tiering.plan import ChainLayout
from kvoffload.tiers.disk.config import DiskConfig
from kvoffload.units import format_bytes
from kvoffload.vllm import versions

if _reason := versions.why_too_old():
    raise ConfigError(_reason)

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvoffload.vllm.tier_layout import TierLayout, calling_engine
from kvoffload.vllm.tier_requests import MAX_LOADS, TierJobs, TierRecords, TierRequest

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec, ReqContext, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

logger = logging.getLogger(__name__)

FIRST_BATCH = 16
"""Keys that the tiers are first asked for at once. Each further batch of a step is twice as large."""
MAX_BATCH = 4096
STATS_PERIOD_S = 0.5
"""How often statistics are read in steps in which nothing has happened here. vLLM asks for them in every step."""
METRIC_NAMES = frozenset(
    name
    for name, spec in METRICS.items()
    if name.startswith("tier_") or name in ("misses", "asked_tokens", "device_hit_tokens", "promoted_blocks", "off")
)
"""The metrics of this class. What concerns host memory and the device is vLLM's."""


class KVOffloadTier(SecondaryTierManager):
    """See the module. vLLM calls everything on the scheduler's thread, or under a lock. No method raises for anything
    that goes wrong while serving: after an unexpected error ``off`` is True, all jobs fail and all lookups are misses.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **options: Any,
    ) -> None:
        """``primary_kv_view``: vLLM's host memory, a row per chunk. ``options``: see IntegrationConfig.

        Raises ConfigError for a wrong option, and for a model or a setting that is not served.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        config = IntegrationConfig.from_mapping(options, _setting(offloading_spec, tier_type, options))
        vllm_config, kv_cache_config = calling_engine()
        versions.warn_if_untested()
        row_bytes = self.block_size_bytes
        self.layout = TierLayout.from_vllm(config, offloading_spec, vllm_config, kv_cache_config, row_bytes)
        self.off = False
        self._enable_events = bool(offloading_spec.kv_events_config.enable_kv_cache_events)
        self.bridge = self._open(config)
        are_local = {isinstance(tier, DiskConfig) for tier in config.tiers}
        if len(are_local) == 1:
            self.locality = Locality.LOCAL if are_local == {True} else Locality.REMOTE
        if False in are_local and versions.HIT_SOURCE is not None:
            self.cache_hit_source = type(versions.HIT_SOURCE).EXTERNAL_UNSPECIFIED
        self._jobs = TierJobs(np.asarray(primary_kv_view).view(np.uint8)[:, : self.layout.block_bytes])
        self._groups = self.layout.kv_groups
        self.metrics = Metrics(self._read_metrics)
        self._statistics = _Statistics(self.metrics)
        self._requests: dict[str, TierRequest] = {}
        self._step = 0
        self._expected_root = versions.expected_hash_root(vllm_config)
        engine_id = vllm_config.kv_transfer_config.engine_id
        self._records = TierRecords(self._groups, "+".join(self.bridge.names) or "none", self.metrics, engine_id or "0")

    def _open(self, config: IntegrationConfig) -> TierBridge:
        layout = self.layout
        made = fingerprint(layout.fingerprint_parts)
        bridge = build_bridge(
            config.tier_entries,
            layout.kv_groups,
            layout.block_bytes,
            made,
            BridgeSettings(
                identity=layout.identity,
                policy=config.policy,
                engine=layout.engine,
                engines=layout.engines,
                lookup_deadline_ms=config.lookup_deadline_ms,
                load_deadline_ms=config.load_deadline_ms,
                enable_events=self._enable_events,
            ),
        )
        chunks = self._primary_kv_view.shape[0]
        logger.info(
            "kvoffload: tiers below vLLM's host memory of %d chunks (%s each, %s tokens in all): %s",
            chunks,
            format_bytes(layout.block_bytes),
            f"{ChainLayout(layout.kv_groups).tokens(chunks):,}",
            ", ".join(bridge.names) or "none",
        )
        return bridge

    def switch_off(self, where: str) -> None:
        """Ends offloading to these tiers for good. Logs the exception in progress."""
        logger.error(
            "kvoffload: OFFLOADING TO TIERS IS OFF: %s failed; vLLM's host memory serves without them from here on",
            where,
            exc_info=sys.exc_info()[0] is not None,
        )
        self.off = True
        self.metrics.set("off", 1)
        with contextlib.suppress(Exception):
            self.bridge.close()

    # Requests.

    @guarded(lambda self, req_context: RequestOffloadingContext())
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if self._expected_root is not None:
            error, self._expected_root = versions.hash_root_error(self._expected_root), None
            if error is not None:
                self.switch_off(f"the comparison of block hashes ({error})")
        self._requests[req_context.req_id] = TierRequest()
        return RequestOffloadingContext()

    @guarded(lambda self, req_context: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        request = self._request(req_context)
        self._requests.pop(req_context.req_id, None)
        if request.chain:
            self.bridge.end_request(req_context.req_id, request.chain)

    def _request(self, context: ReqContext) -> TierRequest:
        """Returns what is known of a request, with all keys that vLLM has named so far."""
        request = self._requests.get(context.req_id) or TierRequest()
        request.extend(context._offload_key_positions, self._groups)
        return request

    # Lookups.

    @guarded(lambda self, key, req_context: LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Answers from a batch that holds for this step."""
        request = self._request(req_context)
        if key not in request.places:
            # The key of a chunk that is not full, or one of another server's request.
            return LookupResult.MISS
        if request.answered_in != self._step:
            request.answers.clear()
            request.answered_in, request.batch, request.missed = self._step, FIRST_BATCH, None
        if key not in request.answers:
            self._ask(key, request)
        state = request.answers[key]
        if state == HIT and request.loads.get(key, 0) < MAX_LOADS:
            return LookupResult.HIT
        if state in (HIT, MISS):
            self._records.missed(request, key, self.bridge.explain)
            return LookupResult.MISS
        return LookupResult.RETRY

    def _ask(self, key: OffloadKey, request: TierRequest) -> None:
        wanted = request.wanted(key, self._groups[key_group_idx(key)].is_full)
        chain = () if request.was_asked else request.chain
        request.was_asked = True
        self._statistics.has_news = True
        states = self.bridge.lookup(wanted, chain)
        request.answers.update(zip(wanted, states.tolist(), strict=True))
        request.batch = min(2 * request.batch, MAX_BATCH)

    # Jobs.

    @guarded(lambda self, job_metadata: self._jobs.add(job_metadata))
    def submit_store(self, job_metadata: TransferJob) -> None:
        request = self._request(job_metadata.req_context)
        keys, pages = self._jobs.chunks(job_metadata, request)
        self._jobs.add(job_metadata)
        if keys and not request.is_stale:
            self.bridge.store(job_metadata.job_id, keys, pages, request.chain, job_metadata.req_context.req_id)
        else:
            self._jobs.refuse(job_metadata)

    @guarded(lambda self, job_metadata: self._jobs.add(job_metadata))
    def submit_load(self, job_metadata: TransferJob) -> None:
        keys, pages = self._jobs.chunks(job_metadata, self._request(job_metadata.req_context))
        self._jobs.add(job_metadata)
        self.bridge.load(job_metadata.job_id, keys, pages, job_metadata.req_context.req_id)

    @guarded(lambda self: self._jobs.fail_all())
    def get_finished_jobs(self) -> Iterable[JobResult]:
        if not self._jobs:
            return ()
        results = self._jobs.report(self.bridge.finished(), self._requests)
        self._statistics.has_news |= bool(results)
        return results

    def has_pending_work(self) -> bool:
        return bool(self._jobs)

    # Steps, events, metrics.

    @guarded(lambda self, context: None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._step += 1
        for req_id in context.new_req_ids:
            request = self._requests.get(req_id)
            if request is not None:
                self._records.scheduled(req_id, request)
                self._statistics.has_news = True

    @guarded(lambda self: ())
    def take_events(self) -> Iterable[OffloadingEvent]:
        if not self._enable_events:
            return ()
        return [
            OffloadingEvent(
                list(event.keys),
                Medium.STORAGE,
                event.removed,
                Locality.REMOTE if event.is_shared else Locality.LOCAL,
                event.tier,
            )
            for event in self.bridge.take_events()
        ]

    @classmethod
    def build_metric_definitions(cls, extra_config: Mapping[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """Returns the metrics by name. vLLM calls this in other processes as well."""
        kinds = {"counter": OffloadingCounterMetadata, "gauge": OffloadingGaugeMetadata}
        return {
            PREFIX + name: kinds[spec.kind](documentation=spec.help, labelnames=tuple(spec.labels))
            for name, spec in METRICS.items()
            if name in METRIC_NAMES
        }

    def _read_metrics(self) -> None:
        if self.bridge.fault is not None:
            self.metrics.set("off", 1)
        if not self.off:
            self.metrics.take_in(self.bridge.take_counts())

    @guarded(lambda self: self._statistics.take())
    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._statistics.take_if_due()

    # The end.

    @guarded(lambda self: None)
    def drain_jobs(self) -> None:
        """Ends all jobs. vLLM calls this when it resets its caches only, perhaps because the weights have changed: so
        no block that was stored before is found by this process, and nothing more is stored for the present requests.
        """
        self.bridge.reset()
        for request in self._requests.values():
            request.answers.clear()
            request.is_stale = True
        logger.info("kvoffload: the cache was reset: this process finds no block that was stored before")

    def shutdown(self) -> None:
        self._records.close()
        with contextlib.suppress(Exception):
            self.bridge.close()
        self._jobs.close()


class _Statistics:
    """The statistics of ``metrics`` for vLLM, which asks for them in every step."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.has_news = False
        """Whether something was looked up or has ended since they were read."""
        self._read_at = 0.0
        """When they are read next, without news."""

    def take_if_due(self) -> OffloadingConnectorStats | None:
        now = time.monotonic()
        if not self.has_news and now < self._read_at:
            return None
        self.has_news, self._read_at = False, now + STATS_PERIOD_S
        return self.take()

    def take(self) -> OffloadingConnectorStats | None:
        """Returns the metrics that have changed since the last call; None if none has."""
        stats = OffloadingConnectorStats()
        for labelled, value in self._metrics.take().items():
            name, _, label = labelled.partition(":")
            if name not in METRIC_NAMES:
                continue
            spec = METRICS[name]
            put = stats.set_gauge if spec.kind == "gauge" else stats.increase_counter
            put(PREFIX + name, float(value), tuple(spec.split(label)))
        return None if stats.is_empty() else stats


def _setting(spec: OffloadingSpec, tier_type: str, options: Mapping[str, Any]) -> str:
    """Returns what stands before a key of ``options`` in errors."""
    entries = spec.extra_config.get("secondary_tiers", ())
    for i, entry in enumerate(entries):
        if entry.get("type") == tier_type and options.items() <= entry.items():
            return f"secondary_tiers[{i}]."
    return f"secondary_tiers[{tier_type}]."

"""The vLLM adapter: a thin KVConnectorBase_V1 over the engine-neutral scheduler and worker."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger

from kvoffload.abc import BoundaryState, ConfigError, ScheduledStep
from kvoffload.connector.build import build_scheduler
from kvoffload.connector.engine import EngineSpec
from kvoffload.connector.messages import StepMeta, WorkerReport
from kvoffload.connector.scheduler import OffloadingConnectorScheduler
from kvoffload.connector.worker import OffloadingConnectorWorker
from kvoffload.fingerprints import fingerprint
from kvoffload.observe.server import RecordServer
from kvoffload.tiering.manager import TieredOffloadingManager
from kvoffload.vllm import companions, versions
from kvoffload.vllm.adapters import adapters_of
from kvoffload.vllm.events import EventTranslator
from kvoffload.vllm.fingerprint import ANY, describe_parts, fingerprint_parts
from kvoffload.vllm.hints import drops_tokens, engine_options, following
from kvoffload.vllm.layout import EngineLayout, RankInfo, layers_of, one_per_pool
from kvoffload.vllm.metrics import KVOffloadPromMetrics, KVOffloadStats
from kvoffload.vllm.nesting import required_layout
from kvoffload.vllm.rank_half import RankHalf
from kvoffload.vllm.replicas import RankPool

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

# vLLM configures only the logger "vllm". As its child, the logger of kvoffload has the same handlers and level.
logging.getLogger("kvoffload").parent = init_logger("vllm")
logger = logging.getLogger(__name__)


@dataclass
class KVOffloadMetadata(KVConnectorMetadata):
    """Carries one step's work from the scheduler half to the workers."""

    step: StepMeta


@dataclass
class KVOffloadWorkerMetadata(KVConnectorWorkerMetadata):
    """Carries what the workers have done back to the scheduler half."""

    report: WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, KVOffloadWorkerMetadata)
        self.report.add(other.report)
        return self


class KVOffloadConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps vLLM's KV cache in host RAM and in tiers below it. Its options are those of ``kvoffload.OffloadConfig``."""

    _cache_hit_source = versions.HIT_SOURCE

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        outer = companions.join(self)
        self._is_beside_others = outer is not None
        # A failed load is a miss, but "fail", vLLM's default, would fail the request. Whether the user has set it
        # cannot be seen here, so this is no warning.
        transfer = outer or self._kv_transfer_config
        policy = transfer.kv_load_failure_policy
        if role == KVConnectorRole.SCHEDULER and policy != "recompute":
            transfer.kv_load_failure_policy = "recompute"
            logger.debug(
                "kvoffload: kv_load_failure_policy=%r, vLLM's default, has no effect: a request whose load fails is "
                "computed instead",
                policy,
            )
        self.layout = EngineLayout.from_vllm(vllm_config, kv_cache_config)
        self._half: RankHalf | None = None
        """The worker half, after the KV caches were registered."""
        self._scheduler: OffloadingConnectorScheduler | None = None
        self._ranks: list[RankInfo] = []
        """What each worker sent at the first handshake."""
        self._records: RecordServer | None = None
        self._has_adapters = vllm_config.lora_config is not None
        self._events = EventTranslator(self.layout, self._has_adapters)
        self._block_pool: BlockPool | None = None
        self._fences_first = versions.fences_first(vllm_config)
        self._expected_root: bytes | None = None
        """The root of the block hashes as predicted at start; None once it has been compared with vLLM's."""
        if role == KVConnectorRole.SCHEDULER:
            versions.warn_if_untested()
            if self.layout.has_states:
                log_kept_states(vllm_config, self.layout)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Builds the scheduler half once every worker has its pool. Raises ConfigError if a pool cannot be used.

        vLLM from 0.33 on calls this again after each sleep. If the workers have other pools then than at the start,
        offloading is switched off, because the blocks that the scheduler half knows are not in them.
        """
        infos = [info for _, info in sorted(metadata.items()) if isinstance(info, RankInfo)]
        if self._scheduler is not None:
            if infos != self._ranks:
                self._scheduler.switch_off("the handshake (the workers' host pools are not those of the start)")
            return
        self.layout.check_ranks(infos)
        self.layout = layout = replace(self.layout, parts=infos[0].parts)
        self._events = EventTranslator(layout, self._has_adapters)
        events = self._vllm_config.kv_events_config
        if layout.config.tier_entries:
            self._expected_root = versions.expected_hash_root(self._vllm_config)
        parts = fingerprint_parts(self._vllm_config, layout, layers_of(infos))
        if infos[0].is_canonical:
            parts["parallel"] = [ANY, ANY]
        engine = EngineSpec(
            layout.kv_groups,
            hash_block_size=layout.hash_block_size,
            parts=layout.parts,
            following=following,
            num_workers=len(infos),
            share_loads=bool(self._vllm_config.cache_config.enable_prefix_caching),
            enable_events=events is not None and events.enable_kv_cache_events,
            device_blocks=layout.num_device_blocks,
            keeps_blocks=versions.keeps_blocks(self._vllm_config),
            next_free=self._next_free,
            engine=layout.engine,
            engines=layout.engines,
            parent_request=versions.parent_request,
            engine_options=engine_options,
            drops_tokens=drops_tokens,
            adapter_of=adapters_of(self._vllm_config),
            trace_headers=versions.trace_headers(self._vllm_config),
            identity=describe_parts(self._vllm_config, layout, parts),
            is_beside_others=self._is_beside_others,
        )
        pools = [info.pool for info in one_per_pool(infos)]
        self._scheduler = build_scheduler(layout.config, engine, pools, fingerprint(parts))
        self._ranks = infos
        scheduler, engine_id = self._scheduler, self._kv_transfer_config.engine_id
        self._records = RecordServer(lambda: scheduler.records, engine_id or "0", scheduler.metrics.totals)

    @property
    def connector_scheduler(self) -> OffloadingConnectorScheduler:
        """The scheduler half, after the first handshake. Exists in the scheduler's process only."""
        if self._scheduler is None:
            raise ConfigError(
                fault="vLLM has not passed on the location of the workers' host pools",
                fix="set distributed_executor_backend to mp or uni",
            )
        return self._scheduler

    @property
    def connector_worker(self) -> OffloadingConnectorWorker:
        """The worker half, after the KV caches were registered. Exists in a worker's process only."""
        assert self._half is not None
        return self._half.worker

    @property
    def pool(self) -> RankPool:
        """The host pool of this rank, after the KV caches were registered. Exists in a worker's process only."""
        assert self._half is not None
        return self._half.pool

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a store that is lost is a miss later, and nothing waits for it."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        return companions.LAYOUT if companions.are_asked_together() else required_layout(vllm_config)

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._half = RankHalf(self._vllm_config, self._kv_cache_config, self.layout, kv_caches)
        self.layout = self._half.layout

    def unregister_kv_caches(self) -> None:
        """Ends all copies. vLLM from 0.33 on calls this before the KV caches lose their memory."""
        if self._half is not None:
            self._half.worker.suspend()

    def restore_kv_caches(self) -> None:
        """Accepts jobs again: the KV caches have memory again, at the same addresses."""
        if self._half is not None:
            self._half.worker.resume()

    def get_handshake_metadata(self) -> RankInfo | None:
        return None if self._half is None else self._half.handshake()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Begins a step of the worker half: vLLM calls this first in each step."""
        assert isinstance(kv_connector_metadata, KVOffloadMetadata)
        self.connector_worker.begin_step(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self.connector_worker.start_loads(self._step_meta())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: a request runs after its load has been reported."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: blocks are stored after the step."""

    def wait_for_save(self) -> None:
        """Does nothing: ``get_transfer_results`` accepts the stores."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> base.KVConnectorTransferResults:
        step = self._step_meta()
        self.connector_worker.end_step(step)
        finished = self.connector_worker.get_finished(step)
        return base.KVConnectorTransferResults(finished.released, finished.loaded, set(finished.failed))

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        if self._half is None:
            return None
        report = self._half.worker.take_report()
        return None if report is None else KVOffloadWorkerMetadata(report)

    def _step_meta(self) -> StepMeta:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KVOffloadMetadata)
        return metadata.step

    # Scheduler side.

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._block_pool = gpu_block_pool

    def _next_free(self, n: int) -> Iterable[int]:
        return () if self._block_pool is None else versions.next_free(self._block_pool, n)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._expected_root is not None:
            error, self._expected_root = versions.hash_root_error(self._expected_root), None
            manager = self.connector_scheduler.manager
            if error is not None and isinstance(manager, TieredOffloadingManager):
                manager.switch_off_tiers(error)
        return self.connector_scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def on_new_request(self, request: Request) -> None:
        self.connector_scheduler.on_new_request(request)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.connector_scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        try:
            step = scheduled_step(scheduler_output, self.layout.has_states, self._fences_first)
        except Exception:
            self.connector_scheduler.switch_off("reading vLLM's SchedulerOutput")
            step = ScheduledStep(dict(scheduler_output.num_scheduled_tokens))
        return KVOffloadMetadata(self.connector_scheduler.build_connector_meta(step))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self._is_beside_others and connector_output.invalid_block_ids:
            self.connector_scheduler.loads_of_others_failed(connector_output.invalid_block_ids)
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, KVOffloadWorkerMetadata):
            self.connector_scheduler.update_connector_output(metadata.report)

    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.connector_scheduler.request_finished(request)

    request_finished_all_groups = request_finished

    def has_pending_push_work(self) -> bool:
        return self.connector_scheduler.has_pending_work()

    def take_events(self) -> Iterable[KVCacheEvent]:
        scheduler = self.connector_scheduler
        try:
            has_tiers = isinstance(scheduler.manager, TieredOffloadingManager)
            return list(self._events.translate(scheduler.take_events(), has_tiers))
        except Exception:
            scheduler.switch_off("passing events to vLLM")
            return []

    def reset_cache(self) -> bool | None:
        is_pause = versions.keeps_over_pauses(self._vllm_config) and versions.is_pausing()
        self.connector_scheduler.reset(is_pause)
        if is_pause:
            logger.info("kvoffload: the engine pauses: offloaded blocks are found again if its weights stay the same")
        else:
            logger.info("kvoffload: the cache was reset: the blocks in host memory and on disk are dropped")
        return True

    def shutdown(self) -> None:
        if self._records is not None:
            self._records.close()
        if self._half is not None:
            self._half.worker.shutdown()
        if self._scheduler is not None:
            self._scheduler.shutdown()
        if self._half is not None:
            self._half.pool.close()

    # Metrics.

    def get_kv_connector_stats(self) -> KVOffloadStats | None:
        if self._scheduler is None:
            return None
        changes = self._scheduler.metrics.take()
        return KVOffloadStats(data=changes) if changes else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVOffloadStats:
        return KVOffloadStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVOffloadPromMetrics:
        return KVOffloadPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def log_kept_states(vllm_config: VllmConfig, layout: EngineLayout) -> None:
    """Logs how to keep the states of outputs, if vLLM does not keep them. By default it keeps those at the end of a
    prompt and where prompts part."""
    if versions.attribute(vllm_config.cache_config, "prefix_cache_retention_interval") == 0:
        size = max(group.device_block_size for group in layout.kv_groups if group.state)
        logger.info(
            "kvoffload: vLLM keeps no states of outputs (prefix_cache_retention_interval=0), so the next turn of a "
            "conversation computes the former answer again; set --prefix-cache-retention-interval %d to keep them",
            size,
        )


def scheduled_step(output: SchedulerOutput, has_states: bool, fences_first: bool) -> ScheduledStep:
    """Returns vLLM's SchedulerOutput in engine-neutral form. ``fences_first``: see ``versions.fences_first``."""
    block_ids: dict[str, tuple[list[int], ...]] = {new.req_id: new.block_ids for new in output.scheduled_new_reqs}
    replaced = set(block_ids)
    cached = output.scheduled_cached_reqs
    replaced.update(cached.resumed_req_ids)
    pairs = zip(cached.req_ids, cached.new_block_ids, strict=True)
    block_ids.update({req_id: ids for req_id, ids in pairs if ids is not None})
    prepared = set(output.new_block_ids_to_zero or ())
    prepared.update(copy.dst_block_id for copy in output.kv_cache_block_copies or ())
    return ScheduledStep(
        output.num_scheduled_tokens,
        block_ids,
        frozenset(replaced),
        output.preempted_req_ids or (),
        overwritten=() if fences_first else prepared,
        boundary_states=_boundary_states(output) if has_states else {},
        written=prepared if fences_first else (),
    )


def _boundary_states(output: SchedulerOutput) -> dict[str, list[BoundaryState]]:
    """Returns the states that vLLM says are final after this step. Where a state lies in the block table says nothing:
    vLLM moves blocks there. Raises ConfigError if vLLM says nothing, because then no state would ever be stored."""
    named = versions.attribute(output, "kv_connector_block_state")
    if named is None:
        raise ConfigError(f"{versions.NAME} names no device blocks of states in a step")
    return {
        req_id: [BoundaryState(*offered) for offered in states]
        for req_id, states in named.boundary_state_offloads.items()
    }

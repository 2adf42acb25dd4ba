"""A small paged LLM engine that checks every byte it attends to.

It has what makes offloading hard: a prefix cache, chunked prefill, preemption, aborts, asynchronous loads, scheduling
one step ahead of the results, several KV cache groups whose blocks slide out of windows and are handed out again,
states that are updated in place, and several ranks that copy at their own speed, some of which may hold the same KV.
Its "KV" is not computed by a model: the bytes of a position are a function of all tokens up to it (in draft layers also
of the one after it), of rank, group and layer, and of the version of the weights, and so are the bytes of a state. So a
wrong, stale or torn block, or the state of another position, is noticed at the first token that needs it. The engine
drives the real scheduler half, manager and worker halves; it needs neither torch nor a model. One seed replays a whole
run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvoffload.abc import ByteArray, KVGroup, OffloadingManager, Tier
from kvoffload.cache.admission import FilterReusedOffloadingManager
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.slots import HostBackend
from kvoffload.cache.tenants import HOST, Tenants
from kvoffload.connector.adapters import AdapterChecks
from kvoffload.connector.engine import EngineSpec
from kvoffload.connector.messages import StepMeta, WorkerReport
from kvoffload.connector.scheduler import OffloadingConnectorScheduler
from kvoffload.connector.worker import Finished
from kvoffload.tiering.manager import WRITE_SHARE, TieredOffloadingManager, TieringSettings
from tests.clock import Clock
from tests.sim.adapters import ModelAdapters
from tests.sim.batching import STEP_S, Batcher, Late
from tests.sim.content import Batch, EngineRequest, first_attended, following, sample
from tests.sim.device import BlockPool, DeviceCache
from tests.sim.ranks import InlineRank, ModelWatch, Rank, RankReports, WrongBytes
from tests.sim.scenario import Scenario, make_requests, random_groups

MAX_STEPS = 10_000
"""A run that takes longer has hung."""
MAX_RESET_STEP = 200
"""Resets make requests start again; after this step there are none, so that every run ends."""
REPLACE_CHANCE = 0.05
"""How often an adapter gets other bytes, per step."""
__all__ = [
    "BrokenPromise",
    "Clock",
    "EngineRequest",
    "Hang",
    "Late",
    "Leak",
    "LowerTiers",
    "ModelEngine",
    "Scenario",
    "SwitchedOff",
    "WrongBytes",
    "first_attended",
    "random_groups",
    "run_seed",
]


class Hang(AssertionError):
    """Requests did not finish within the steps that were allowed."""


class BrokenPromise(AssertionError):
    """A load that was offered and accepted could not even be started."""


class Leak(AssertionError):
    """Something was still held when all requests were done."""


class SwitchedOff(Leak):
    """The connector has switched itself off. Apart from that, nothing is wrong with the engine."""


class LowerTiers:
    """What is around a ModelEngine: the tiers below its host, of which this class has none, and who shares it."""

    has_tiers = True
    """Whether it may have any. Without them its manager is that of the host alone."""
    lookup_deadline_ms = 100.0
    load_only_if_faster = False
    write_share = WRITE_SHARE
    tenants: Tenants | None = None
    """What precedes every block hash, and what tenants may take of the host, where a block has one byte. None: nothing,
    and whatever comes."""
    spec: Mapping[str, Any] = {}
    """Further fields of the EngineSpec."""
    adapters: ModelAdapters | None = None
    """The adapters that requests may compute with. None: the engine serves none."""

    def change(self, requests: Sequence[EngineRequest]) -> None:
        """May change requests before they come."""

    def make(self, pools: Sequence[ByteArray]) -> Sequence[Tier]:
        """Returns the tiers. Called once, with all pools."""
        return []

    def tick(self) -> None:
        """Lets some time pass for the tiers' threads. Called several times per step."""

    def settle(self) -> None:
        """Ends what the tiers have begun. Called when all requests have ended."""


@dataclass(slots=True)
class _Results:
    """The results of one step. The engine takes them in after the step, in async scheduling after the next one."""

    batch: Batch
    finished: list[Finished] = field(default_factory=list)
    """One per rank."""
    report: WorkerReport | None = None


class ModelEngine:
    """Runs a scenario. ``patch`` may change the engine and the connector's halves before the run, for instance to plant
    a bug. ``lower`` has the tiers below the host. ``clock`` continues from its present time. ``version`` is the version
    of the weights at the start, and ``new_versions`` has the later ones, by default the numbers after it. ``make_rank``
    makes a rank from the scenario, the groups, its number, the chance that it carries out a copy at a tick, and the
    ranks before it.

    After ``run``: ``outputs`` has each finished request's tokens, ``hits`` is the number of tokens loaded from the
    host, and ``steps`` the number of steps. ``loaded_blocks`` and ``partial_loads`` count, per group, the device blocks
    of all loads and the loads that began inside an offloaded block. ``slid_out`` counts the blocks that left a window.
    """

    def __init__(
        self,
        scenario: Scenario,
        patch: Callable[[ModelEngine], None] | None = None,
        *,
        lower: LowerTiers | None = None,
        clock: Clock | None = None,
        version: int = 0,
        new_versions: Iterator[int] | None = None,
        make_rank: Callable[[Scenario, Sequence[KVGroup], int, float, Sequence[Rank]], Rank] = InlineRank,
    ) -> None:
        self.scenario = s = scenario
        self.random = Random(s.seed)
        self._new_versions = new_versions or itertools.count(version + 1)
        self.clock = clock or Clock(0.0)
        self.groups = s.groups or (KVGroup(s.block_size, s.block_size_factor),)
        hash_block_size = s.hash_block_size or math.gcd(*(group.device_block_size for group in self.groups))
        self.lower = lower or LowerTiers()
        has_tiers = lower is not None and lower.has_tiers
        self.cache = DeviceCache(self.groups, hash_block_size, BlockPool(s.num_device_blocks, s.prefix_caching))
        speeds = Random(s.seed)
        self.ranks: list[Rank] = []
        for number in range(s.num_ranks):
            speed = speeds.choice((0.1, 0.4, 1.0)) if number else s.copy_chance
            self.ranks.append(make_rank(s, self.groups, number, speed, self.ranks))
        self.backend = HostBackend(max(group.block_tokens for group in self.groups), s.num_host_blocks)
        spec = EngineSpec(
            self.groups,
            hash_block_size=s.hash_block_size,
            parts=s.parts,
            following=following,
            num_workers=s.num_ranks,
            share_loads=s.prefix_caching,
            device_blocks=s.num_device_blocks,
            keeps_blocks=s.prefix_caching,
            next_free=self.cache.pool.next_free if s.looks_ahead else None,
            **self.lower.spec,
        )
        is_exclusive = s.is_exclusive and spec.why_inclusive is None
        tenants = self.lower.tenants
        shares = tenants.shares(HOST, s.num_host_blocks, 1) if tenants is not None and tenants.names else None
        self.policy_manager = PolicyOffloadingManager(
            self.backend,
            make_policy(s.policy, s.num_host_blocks, shares),
            spec.enable_events,
            must_store=has_tiers,
            clock=self.clock,
            device_blocks=s.num_device_blocks - 1 if is_exclusive else 0,
        )
        manager: OffloadingManager = self.policy_manager
        self.tiered: TieredOffloadingManager | None = None
        if has_tiers:
            manager = self.tiered = self._on_top_of(self.lower)
        if s.store_threshold is not None:
            manager = FilterReusedOffloadingManager(manager, s.store_threshold)
        self.scheduler = OffloadingConnectorScheduler(
            manager,
            spec,
            tenants=self.lower.tenants,
            misses=self.policy_manager.history.misses if is_exclusive else None,
            load_deadline_ms=s.load_deadline_ms,
            slot_bytes=[pool.shape[1] for pool in self.host_pools],
            clock=self.clock,
        )
        self.batcher = Batcher(s, self.cache, self.scheduler, self.clock, self.random, version, self.lower.adapters)
        self.held: dict[str, EngineRequest] = {}
        """Finished requests whose blocks the connector has asked to keep."""
        self.outputs: dict[str, list[int]] = {}
        self.steps = 0
        self._asked_at = 0
        """The step after which requests were last added."""
        self.loaded_blocks = [0] * len(self.groups)
        self.partial_loads = [0] * len(self.groups)
        self._unreported: list[_Results] = []
        """Results of steps that are not reported back yet, oldest first."""
        self._aborted_loading: list[EngineRequest] = []
        self._in_pieces: set[str] = set()
        """Requests with a load in pieces. If one fails, the scheduler half reports the load."""
        self._rank_reports = RankReports(s.num_ranks)
        if s.update_chance or s.sleep_chance:
            for rank in self.ranks:
                rank.worker.weights.watch = ModelWatch(lambda: self.version, rank.number, s.seed)
        self._has_woken_up = False
        """Whether it has, since the last step."""
        self.on_end: Callable[[EngineRequest, dict[str, Any] | None], None] = lambda request, answer: None
        """Called with each request that ends, and what its client is answered."""
        self._todo = make_requests(s, self.random, hash_block_size)
        self.lower.change(self._todo)
        if self.lower.adapters is not None:
            for rank in self.ranks:
                rank.worker.adapters = AdapterChecks(self.lower.adapters.watch(rank.number))
        if patch is not None:
            patch(self)

    def _on_top_of(self, lower: LowerTiers) -> TieredOffloadingManager:
        parts = self.scenario.parts.of_groups(self.groups)
        return TieredOffloadingManager(
            self.policy_manager,
            lower.make(self.host_pools),
            TieringSettings(
                parts,
                lookup_deadline_ms=lower.lookup_deadline_ms,
                tenants=lower.tenants,
                load_deadline_ms=self.scenario.load_deadline_ms,
                load_only_if_faster=lower.load_only_if_faster,
                write_share=lower.write_share,
            ),
            clock=self.clock,
            random=Random(self.scenario.seed).random,
        )

    @property
    def host_pools(self) -> list[ByteArray]:
        """Each host pool once: ranks may share one."""
        return list({id(rank.host): rank.host for rank in self.ranks}.values())

    @property
    def version(self) -> int:
        """The version of the weights."""
        return self.batcher.version

    @property
    def hits(self) -> int:
        return self.batcher.hits

    @property
    def slid_out(self) -> int:
        return self.batcher.slid_out

    # Runs and steps.

    def run(self, num_steps: int | None = None) -> None:
        """Runs until every request is finished or aborted, or for ``num_steps`` if that is shorter. Raises WrongBytes,
        BrokenPromise, Late, Hang or Leak."""
        while self.has_work:
            if self.steps == num_steps:
                return
            self.turn()
        self.finish()

    @property
    def has_work(self) -> bool:
        """Whether there are requests, or something that the connector wants more steps for."""
        return bool(self._todo or self.batcher.requests or self._unreported or self.scheduler.has_pending_work())

    @property
    def has_requests(self) -> bool:
        """Whether some request has not ended, or is still to come."""
        return bool(self._todo or self.batcher.requests)

    def ask(self, requests: Sequence[EngineRequest]) -> None:
        """Adds requests, with names of their own, to those that are still to come."""
        self._todo += requests
        self._asked_at = self.steps

    def turn(self) -> None:
        """Lets requests come, be aborted and so on, and runs one step."""
        batcher = self.batcher
        if self.steps - self._asked_at > MAX_STEPS:
            raise Hang(f"after {MAX_STEPS} steps: {len(batcher.waiting)} waiting, {len(batcher.running)} running")
        if self._todo and self.random.random() < 0.4:
            batcher.waiting.append(self._todo.pop(0))
            self.scheduler.on_new_request(batcher.waiting[-1])
        if batcher.requests and self.random.random() < self.scenario.abort_chance:
            self._finish(self.random.choice(batcher.requests))
        if self.steps < MAX_RESET_STEP and self.random.random() < self.scenario.reset_chance:
            self._reset(preempt=self.random.random() < 0.5)
        if self.scenario.sleep_chance and self.steps < MAX_RESET_STEP:
            self._sleep()
        self._update(preempt=True)
        self._replace_adapters()
        self.step()

    def finish(self) -> None:
        """Lets transfers end, when no work is left. Raises Leak if something is still held."""
        for rank in self.ranks:
            rank.finish()
        self._settle()
        self._check_nothing_held()

    def _settle(self) -> None:
        """Goes past every deadline, until nothing is in progress below the host."""
        if self.tiered is not None:
            self.clock.now += self.scenario.load_deadline_ms / 1000
            for _ in range(MAX_STEPS):
                self.lower.settle()
                self.tiered.poll()
                if not self.tiered.has_transfers:
                    break

    def step(self) -> None:
        """Runs one step of the engine: schedules, computes, and takes in the results, perhaps one step late."""
        self.steps += 1
        self.clock.now += STEP_S
        self.lower.tick()
        step, batch = self.batcher.schedule()
        meta = self.scheduler.build_connector_meta(step)
        self._update(preempt=False)
        self._start_with_new_weights([request for request, _ in batch if request.request_id in step.replaced])
        for request, n in batch:
            request.num_computed_tokens += n
            request.tokens_in_flight += n
            request.in_flight += 1
        self._unreported.append(self._execute(meta, batch))
        while len(self._unreported) > (1 if self.scenario.async_scheduling and batch else 0):
            results = self._unreported.pop(0)
            self._report_transfers(results)
            self._report_tokens(results.batch)

    # The workers.

    def _execute(self, meta: StepMeta, batch: Batch) -> _Results:
        self.batcher.num_executed += 1
        self._in_pieces.update(meta.loads[job_id].req_id for job_id in meta.pieces)
        if not self.scheduler.off and meta.broken_loads.keys() - self._in_pieces:
            raise BrokenPromise(f"seed {self.scenario.seed}, step {self.steps}: load of {sorted(meta.broken_loads)}")
        self._count_loads(meta)
        for request, _ in batch:
            if request.num_computed_tokens == len(request.real_tokens):
                request.real_tokens.append(sample(request.real_tokens))
        results = _Results(batch)
        for rank in self.ranks:
            self.lower.tick()
            if self.lower.adapters is not None:
                for request, _ in batch:
                    self.lower.adapters.load(rank.number, request.adapter)
            try:
                finished, report = rank.step(meta, batch, loads_first=self.random.random() < 0.5)
            except WrongBytes as error:
                raise WrongBytes(f"seed {self.scenario.seed}, step {self.steps}: {error}") from None
            results.finished.append(finished)
            if report is not None:
                results.report = report if results.report is None else results.report.add(report)
        return results

    def _count_loads(self, meta: StepMeta) -> None:
        parts = self.scenario.parts
        for spec in meta.loads.values():
            for g, part in enumerate(parts.last):
                size, first = spec.device.group_sizes[part], spec.device.block_indices[part]
                self.loaded_blocks[g] += size
                self.partial_loads[g] += bool(size and first % self.groups[g].block_size_factor)

    def _report_transfers(self, results: _Results) -> None:
        """Passes on what the workers report: the sum goes to the connector; the engine acts when every rank has
        reported."""
        if results.report is not None:
            self.scheduler.update_connector_output(results.report)
        for rank, finished in zip(self.ranks, results.finished, strict=True):
            self._rank_reports.add(rank.number, finished)
        by_id = {request.request_id: request for request in [*self.batcher.waiting, *self._aborted_loading]}
        for req_id, failed in self._rank_reports.take_loaded():
            self._end_load(by_id[req_id], failed)
        for req_id in self._rank_reports.take_released():
            self.batcher.release(self.held.pop(req_id))

    def _end_load(self, request: EngineRequest, failed: bool) -> None:
        request.loading = False
        if request.finished:
            self._aborted_loading.remove(request)
            self.batcher.release(request)
        elif failed or (request.version != self.version and not self.scenario.update_chance):
            self.batcher.release(request)
            request.num_computed_tokens = 0
        else:
            self._cache_blocks(request, request.num_computed_tokens)
            # As vLLM does: what was loaded enters its prefix cache like what was computed.
            self.batcher.states.offer(request, request.num_computed_tokens)

    # Results, and the end of requests.

    def _report_tokens(self, batch: Batch) -> None:
        for request, n in batch:
            request.in_flight -= 1
            request.tokens_in_flight -= n
            if request.finished:
                continue
            self._cache_blocks(request, min(request.num_computed_tokens, request.num_tokens))
            if request.num_computed_tokens >= request.num_tokens and len(request.real_tokens) > request.num_tokens:
                request.append([request.real_tokens[request.num_tokens]])
                if request.num_tokens >= request.wanted_tokens:
                    self.outputs[request.request_id] = list(request.tokens)
                    self._finish(request)
        self.batcher.free_deferred()

    def _cache_blocks(self, request: EngineRequest, num_tokens: int) -> None:
        if request.version == self.version or self.scenario.keeps_device_cache:
            self.cache.add(request, num_tokens)

    def _finish(self, request: EngineRequest) -> None:
        request.finished = True
        batcher = self.batcher
        (batcher.running if request in batcher.running else batcher.waiting).remove(request)
        if request.blocks:
            batcher.slide(request)
        hold, answer = self.scheduler.request_finished(request)
        if request.loading:
            self._aborted_loading.append(request)
        elif hold:
            self.held[request.request_id] = request
        else:
            batcher.release(request)
        self.on_end(request, answer)

    # New weights, resets and sleeps.

    def _reset(self, preempt: bool) -> None:
        """Brings new weights and empties the caches. Running requests start again, or continue with what they have."""
        self._change_weights()
        if preempt:
            self.batcher.preempt_all()
        self.scheduler.reset()

    def _sleep(self) -> None:
        """Perhaps sleeps, or brings new weights right after a sleep."""
        rng = self.random
        if self._has_woken_up and rng.random() < 0.2:
            self._change_weights()
        self._has_woken_up = False
        # Engines wait for the steps in progress before they sleep.
        if self._unreported or rng.random() >= self.scenario.sleep_chance:
            return
        if rng.random() < 0.1:
            self._change_weights()
        self.cache.pool.forget_all()
        self.batcher.preempt_all()
        self.scheduler.reset(is_pause=True)
        for rank in self.ranks:
            rank.worker.suspend()
        if rng.random() < 0.3:
            self._change_weights()
        if rng.random() < 0.1:
            # It sleeps again before it has computed anything.
            self.scheduler.reset(is_pause=rng.random() < 0.5)
        for rank in self.ranks:
            rank.worker.resume()
        for request in self.batcher.waiting:
            # The request may wait as long as a new one.
            request.waiting_since, request.num_waits = None, 0
        self._has_woken_up = True

    def _change_weights(self) -> None:
        self.batcher.version = next(self._new_versions)
        self.cache.pool.forget_all()

    def _update(self, preempt: bool) -> None:
        """Perhaps brings new weights. ``preempt``: running requests may have to start again."""
        s, rng = self.scenario, self.random
        if not s.update_chance or self.steps >= MAX_RESET_STEP:
            return
        if s.keeps_device_cache and rng.random() < 0.05:
            self.cache.pool.forget_all()
        if rng.random() < s.update_chance:
            self.batcher.version = next(self._new_versions)
            if not s.keeps_device_cache:
                self.cache.pool.forget_all()
            if preempt and rng.random() < 0.3:
                self.batcher.preempt_all()

    def _replace_adapters(self) -> None:
        """Perhaps gives other bytes to an adapter that no request computes with."""
        adapters = self.lower.adapters
        if adapters is None or self.steps >= MAX_RESET_STEP or adapters.random.random() >= REPLACE_CHANCE:
            return
        number = adapters.random.randint(1, adapters.count)
        if not any(request.blocks for request in self.batcher.requests if request.adapter == number):
            adapters.replace(number)
            self.cache.pool.forget_all()

    def _start_with_new_weights(self, requests: list[EngineRequest]) -> None:
        """Lets requests that compute for the first time continue with weights that came after they were scheduled, on
        top of the blocks that they have."""
        for request in requests:
            computed = request.num_computed_tokens
            if request.version == self.version or computed % self.cache.hit_tokens:
                continue
            for g, group in enumerate(self.groups):
                for i in range(computed // group.device_block_size):
                    request.old_blocks.setdefault((g, i), request.version)
            request.version = self.version

    def _check_nothing_held(self) -> None:
        if self.held or self._aborted_loading or self._rank_reports:
            raise Leak("finished requests still hold device blocks")
        num_busy = self.scenario.num_device_blocks - 1 - len(self.cache.pool.free)
        if num_busy:
            raise Leak(f"{num_busy} device blocks are not free")
        if self.scheduler.off:
            raise SwitchedOff("a check failed, or a transfer engine broke")
        self.scheduler.manager.check_integrity()
        if self.tiered is not None and self.tiered.num_promotions:
            raise Leak("blocks are still pinned for requests that have ended")
        # Not for requests in progress, but for promises and expectations.
        self.policy_manager.retention.clear()
        if self.tiered is not None:
            self.tiered.prefetcher.clear()
        num_busy = self.policy_manager.num_blocks - self.policy_manager.num_available_blocks
        if num_busy:
            raise Leak(f"{num_busy} slots of the host are still pinned or being written")


def run_seed(seed: int, patch: Callable[[ModelEngine], None] | None = None) -> ModelEngine:
    """Runs the scenario of ``seed``. If it raises an error, the same seed raises it again."""
    engine = ModelEngine(Scenario.random(seed), patch)
    engine.run()
    return engine

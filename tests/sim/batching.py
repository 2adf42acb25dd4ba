"""The model engine's own scheduler: which requests compute in a step, and on which device blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from kvoffload.abc import ScheduledStep
from kvoffload.connector.lookups import MAX_WAITS_PER_REQUEST
from kvoffload.connector.options import PARAM
from kvoffload.connector.scheduler import OffloadingConnectorScheduler
from tests.clock import Clock
from tests.sim.adapters import ModelAdapters
from tests.sim.content import NULL_BLOCK, Batch, EngineRequest, Table, first_attended
from tests.sim.device import DeviceCache
from tests.sim.scenario import Scenario
from tests.sim.states import StateBlocks

STEP_S = 0.001
"""How long a step takes."""


class Late(AssertionError):
    """A request had to wait although its deadline had passed."""


@dataclass(slots=True)
class Allocation:
    """The blocks of a request, as the connector asks for them."""

    tables: Sequence[Table]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return tuple(list(table) for table in self.tables)


class Batcher:
    """Schedules requests on device blocks, as engines do: those that run first, then those that wait; if blocks are
    short, the last ones are preempted. ``half`` is the scheduler half of the connector.

    ``hits`` counts the tokens loaded from the host, ``slid_out`` the blocks that left a window.
    """

    def __init__(
        self,
        scenario: Scenario,
        cache: DeviceCache,
        half: OffloadingConnectorScheduler,
        clock: Clock,
        random: Random,
        version: int,
        adapters: ModelAdapters | None = None,
    ) -> None:
        self._scenario = scenario
        self._cache = cache
        self._half = half
        self._clock = clock
        self._random = random
        self.adapters = adapters
        s = scenario
        self.states = StateBlocks(
            cache.groups, cache.hit_tokens, s.max_tokens_per_step, s.num_scratch_blocks, s.drops_last_state
        )
        self.version = version
        """The version of the weights."""
        self.waiting: list[EngineRequest] = []
        self.running: list[EngineRequest] = []
        self.is_full = False
        """Whether no request is given device blocks, whatever is free."""
        self.hits = 0
        self.slid_out = 0
        self.num_executed = 0
        """Steps that were executed."""
        self._num_reported = 0
        """Steps whose results were reported back."""
        self._preempted: set[str] = set()
        """Requests that were preempted since the last step. The next step, which may resume them already, says so."""
        self._deferred: list[tuple[int, list[int]]] = []
        """Blocks to free, and the number of reported steps after which that is possible."""

    @property
    def requests(self) -> list[EngineRequest]:
        return self.waiting + self.running

    def schedule(self) -> tuple[ScheduledStep, Batch]:
        s = self._scenario
        budget = s.max_tokens_per_step
        scheduled: dict[str, int] = {}
        block_ids: dict[str, tuple[list[int], ...]] = {}
        replaced: set[str] = set()
        known_preempted, starved = len(self._preempted), False
        batch: Batch = []
        for request in list(self.running):
            # A later request must not take the blocks that this one lacks.
            if request not in self.running or budget == 0 or starved:
                continue
            n = self._chunk(request, budget)
            if n <= 0:
                continue
            new = self._grow(request, n, keep=[r for r, _ in batch])
            if new is None:
                starved = True
                continue
            scheduled[request.request_id] = n
            block_ids[request.request_id] = tuple(new)
            batch.append((request, n))
            budget -= n
        # Waiting requests must not take the blocks that a running one lacks.
        may_admit = len(self._preempted) == known_preempted and not starved
        for request in list(self.waiting):
            if not may_admit or budget == 0 or len(self.running) >= s.max_running:
                break
            if request.loading or request.in_flight:
                continue
            if request.num_computed_tokens == 0 and not self._admit(request):
                continue
            if request.loading:
                continue
            n = self._chunk(request, budget)
            needed = sum(self._lacking(request, n))
            while needed > self._num_free and not self.running and self._take_from_later(request):
                pass
            if n <= 0 or needed > self._num_free:
                break
            self._extend(request, request.num_computed_tokens + n)
            if request.num_computed_tokens:
                # vLLM announces the request again when it runs after its load.
                self._half.update_state_after_alloc(request, Allocation(request.blocks), 0)
            self.waiting.remove(request)
            self.running.append(request)
            scheduled[request.request_id] = n
            block_ids[request.request_id] = tuple(list(table) for table in request.blocks)
            replaced.add(request.request_id)
            batch.append((request, n))
            budget -= n
        preempted, self._preempted = self._preempted, set()
        for request, n in batch:
            self.states.complete(request, request.num_computed_tokens + n)
        offers = self.states.take_offers()
        return ScheduledStep(scheduled, block_ids, frozenset(replaced), preempted, boundary_states=offers), batch

    @property
    def _num_free(self) -> int:
        return len(self._cache.pool.free)

    def _take_from_later(self, request: EngineRequest) -> bool:
        """Waiting requests that hold loaded blocks could starve each other: the last one gives way."""
        holders = [r for r in self.waiting if r.held_blocks and not r.loading and r is not request]
        if not holders:
            return False
        self.release(holders[-1])
        holders[-1].num_computed_tokens = 0
        return True

    def _chunk(self, request: EngineRequest, budget: int) -> int:
        """Tokens that the request computes next. None, if its chunk would end at the wrong place."""
        return self.states.chunk(request, min(budget, _next_tokens(request)))

    def _lacking(self, request: EngineRequest, n: int) -> list[int]:
        """Blocks per group that the request needs for its next ``n`` tokens."""
        return self._lacking_to(request.blocks, request.states.has_scratch, request.num_computed_tokens + n)

    def _lacking_to(self, tables: Sequence[Table], has_scratch: bool, end: int) -> list[int]:
        return [
            self.states.num_lacking(g, table, has_scratch, end)
            if group.state
            else max(0, -(-end // group.device_block_size) - len(table))
            for g, (group, table) in enumerate(zip(self._cache.groups, tables, strict=True))
        ]

    def _extend(self, request: EngineRequest, end: int) -> list[list[int]]:
        """Allocates the blocks for the request's first ``end`` tokens. Returns what was appended to its tables."""
        appended = []
        lacking = self._lacking_to(request.blocks, request.states.has_scratch, end)
        for g, (group, table) in enumerate(zip(self._cache.groups, request.blocks, strict=True)):
            new = self._cache.pool.new(lacking[g])
            if group.state:
                appended.append(self.states.extend(g, table, request.states.has_scratch, end, new))
            else:
                table += new
                appended.append(new)
        request.states.has_scratch |= end > 0
        return appended

    def _grow(self, request: EngineRequest, n: int, keep: list[EngineRequest]) -> list[list[int]] | None:
        self.slide(request)
        needed = sum(self._lacking(request, n))
        while needed > self._num_free:
            victims = [r for r in self.running if r not in keep and not r.in_flight]
            if victims and victims[-1] is not request:
                self._preempt(victims[-1])
            elif not self._take_from_later(request):
                # Later ones that compute give way when their step has ended.
                if victims and self.running[-1] is request and not any(r.loading for r in self.waiting):
                    self._preempt(request)
                return None
        return self._extend(request, request.num_computed_tokens + n)

    def slide(self, request: EngineRequest) -> None:
        """Frees the blocks that no token will attend to any more, neither those to come nor those in progress."""
        for group, table in zip(self._cache.groups, request.blocks, strict=True):
            end = first_attended(group, request.processed_tokens) // group.device_block_size
            gone = [block for block in table[:end] if block != NULL_BLOCK]
            if gone:
                table[:end] = [NULL_BLOCK] * len(table[:end])
                self._cache.pool.release(gone, at_once=self._random.random() < 0.5)
                self.slid_out += len(gone)

    def _preempt(self, request: EngineRequest) -> None:
        self.running.remove(request)
        self.release(request)
        request.num_computed_tokens = 0
        request.version = self.version
        self.waiting.insert(0, request)
        self._preempted.add(request.request_id)

    def preempt_all(self) -> None:
        """Preempts all requests for which no step computes."""
        for request in reversed(list(self.running)):
            if not request.in_flight:
                self._preempt(request)

    def _admit(self, request: EngineRequest) -> bool:
        """Looks the request up on the device and in the host, and allocates. False: not now."""
        request.version = self.version
        if self.adapters is not None and request.adapter:
            request.variant = self.adapters.variants[request.adapter]
        request.old_blocks.clear()
        computed = self._cache.hit(request)
        external, is_async = self._half.get_num_new_matched_tokens(request, computed)
        if external is None:
            self.check_wait(request)
            return False
        if request.waiting_since is not None:
            request.waiting_since = None
            request.num_waits += 1
        total = computed + external
        self._check_offer(request, external, total)
        assert is_async == bool(external)
        hits = self._cache.tables_for(request, computed, total)
        # Scratch blocks for states come with the blocks that a load fills, otherwise with those for the next tokens.
        end = total if external else 0
        needed = self._lacking_to(hits, False, end)
        pool = self._cache.pool
        idle = sum(pool.refs[block] == 0 for table in hits for block in table if block != NULL_BLOCK)
        if self.is_full or sum(needed) + (0 if external else len(hits)) > len(pool.free) - idle:
            return False
        for table in hits:
            pool.take([block for block in table if block != NULL_BLOCK])
        self._cache.note_versions(request, hits, self.version)
        request.num_cached = [len(table) for table in hits]
        request.blocks, request.states.has_scratch = hits, False
        request.states.ends, request.states.unoffered = {total}, []
        self._extend(request, end)
        self._half.update_state_after_alloc(request, Allocation(request.blocks), external)
        request.num_computed_tokens = request.found_tokens = total
        request.loading = is_async
        request.num_waits = 0
        self.hits += external
        return True

    def _check_offer(self, request: EngineRequest, external: int, total: int) -> None:
        aligned = math.lcm(*(group.block_tokens for group in self._cache.groups))
        assert total < request.num_tokens, "no token is left to compute"
        has_states = any(group.state for group in self._cache.groups)
        may_be_short = total == request.num_tokens - 1 and not has_states
        assert not external or total % aligned == 0 or may_be_short, f"to {total}?"
        most = _most_loadable(request)
        assert not external or total <= most, f"{total} tokens, where the client allows {most}"

    def check_wait(self, request: EngineRequest) -> None:
        """Raises Late if the request has waited past its deadline, or too often."""
        where = f"seed {self._scenario.seed}, step {self.num_executed + 1}: {request.request_id}"
        if request.waiting_since is None:
            request.waiting_since = self._clock.now
        elif self._clock.now - request.waiting_since > self._scenario.load_deadline_ms / 1000 + STEP_S:
            raise Late(f"{where} still waits")
        if request.num_waits >= MAX_WAITS_PER_REQUEST:
            raise Late(f"{where} waits again and again")

    def release(self, request: EngineRequest) -> None:
        """Frees the request's blocks, but not before the end of the steps in progress that may write to them."""
        blocks = request.held_blocks
        self.states.withdraw(request)
        if request.in_flight:
            self._deferred.append((self.num_executed, blocks))
        else:
            self._cache.pool.release(blocks)
        request.blocks = []

    def free_deferred(self) -> None:
        """The results of one more step were reported back."""
        self._num_reported += 1
        due = [blocks for after, blocks in self._deferred if after <= self._num_reported]
        self._deferred = [entry for entry in self._deferred if entry[0] > self._num_reported]
        for blocks in due:
            self._cache.pool.release(blocks)


def _next_tokens(request: EngineRequest) -> int:
    """Tokens that the request could compute now: to the end of what is known, or one sampled token ahead."""
    if request.num_computed_tokens + 1 >= request.wanted_tokens:
        return 0
    return max(len(request.real_tokens) - request.num_computed_tokens, 0)


def _most_loadable(request: EngineRequest) -> int:
    """Tokens that the client allows to be loaded."""
    options = (request.kv_transfer_params or {}).get(PARAM, {})
    return int(options.get("max_tokens", request.num_tokens)) if options.get("load", True) else 0

"""A small paged LLM engine that checks every byte it attends to.

It has what makes offloading hard: a prefix cache, chunked prefill, preemption, aborts, asynchronous loads
and scheduling one step ahead of the results. Its "KV" is no mathematics: the bytes of a position are a
function of all tokens up to it, the layer and the version of the weights, so a wrong, stale or torn block is
noticed at the first token that attends to it. It drives the real scheduler half, manager and worker half;
neither torch nor a model is needed. One seed replays a whole run.
"""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvoffload.admission import FilterReusedOffloadingManager
from kvoffload.base import BlockHash, OffloadingManager, ScheduledStep
from kvoffload.hostpool import ByteArray, HostBackend, padded_slot_bytes
from kvoffload.keys import hash_blocks
from kvoffload.manager import PolicyOffloadingManager
from kvoffload.policies import make_policy
from kvoffload.scheduler import OffloadingConnectorScheduler
from kvoffload.testing.faults import FailingTransfer, SlowTransfer
from kvoffload.transfer.inline import InlineTransfer
from kvoffload.worker import OffloadingConnectorWorker, StepMeta

TOKEN_BYTES = 8
"""KV bytes of one token in one layer."""
MAX_STEPS = 10_000
"""A run that takes longer has hung."""
MAX_RESET_STEP = 200
"""Resets make requests start again; after this step there are none, so that every run ends."""


class WrongBytes(AssertionError):
    """A request attended to KV that is not its own."""


class Hang(AssertionError):
    """Requests did not finish within the steps that were allowed."""


class Leak(AssertionError):
    """Something was still held when all requests were done."""


@dataclass(frozen=True)
class Scenario:
    """One engine and its workload. Sizes in blocks are device blocks; chances are per step."""

    seed: int = 0
    num_layers: int = 2
    block_size: int = 4
    num_device_blocks: int = 20
    max_tokens_per_step: int = 24
    max_running: int = 4
    prefix_caching: bool = True
    async_scheduling: bool = False
    block_size_factor: int = 1
    num_host_blocks: int = 24
    policy: str = "lru"
    store_threshold: int | None = None
    load_deadline_ms: float = 1000.0
    num_requests: int = 16
    num_documents: int = 3
    document_tokens: int = 40
    max_question_tokens: int = 12
    max_new_tokens: int = 10
    abort_chance: float = 0.0
    reset_chance: float = 0.0
    copy_chance: float = 0.4
    copy_failure_rate: float = 0.0
    remote_decode_rate: float = 0.0

    @classmethod
    def random(cls, seed: int) -> Scenario:
        """A scenario chosen by ``seed``, small enough that blocks are short everywhere."""
        rng = random.Random(seed)
        factor = rng.choice((1, 1, 2, 3, 4))
        block_size = rng.choice((1, 2, 4))
        document_tokens, max_new_tokens = rng.randint(8, 56), rng.choice((1, 6, 18))
        longest = (document_tokens + cls.max_question_tokens + max_new_tokens) // block_size + 1
        return cls(
            seed=seed,
            num_layers=rng.choice((1, 2)),
            block_size=block_size,
            num_device_blocks=1 + longest + rng.randint(1, longest),
            max_tokens_per_step=rng.choice((5, 16, 64)),
            max_running=rng.randint(1, 6),
            prefix_caching=rng.random() < 0.75,
            async_scheduling=rng.random() < 0.4,
            block_size_factor=factor,
            num_host_blocks=rng.choice((2, 8, 24, 100)),
            policy=rng.choice(("lru", "arc")),
            store_threshold=rng.choice((None, None, None, 2)),
            load_deadline_ms=rng.choice((0.0, 3.0, 1000.0)),
            num_requests=rng.randint(6, 24),
            num_documents=rng.randint(1, 4),
            document_tokens=document_tokens,
            max_new_tokens=max_new_tokens,
            abort_chance=rng.choice((0.0, 0.0, 0.1)),
            reset_chance=rng.choice((0.0, 0.0, 0.04)),
            copy_chance=rng.choice((0.1, 0.4, 1.0)),
            copy_failure_rate=rng.choice((0.0, 0.0, 0.15, 0.6)),
            remote_decode_rate=rng.choice((0.0, 0.0, 0.2)),
        )


@dataclass(eq=False)
class EngineRequest:
    """A request, as the engine and the connector see it."""

    request_id: str
    tokens: list[int]
    """What is known: the prompt and the sampled tokens that have been reported back."""
    max_new_tokens: int
    block_size: int
    version: int
    """Of the weights its KV is computed with."""
    kv_transfer_params: Mapping[str, Any] | None = None
    num_computed_tokens: int = 0
    block_hashes: list[BlockHash] = field(default_factory=list)
    real_tokens: list[int] = field(default_factory=list)
    """``tokens`` and those that were sampled but not yet reported back."""
    blocks: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0
    loading: bool = False
    in_flight: int = 0
    """Steps under way that compute for it."""
    finished: bool = False

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)
        self.real_tokens = list(self.tokens)
        self.append([])

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def append(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)
        done = len(self.block_hashes) * self.block_size
        parent = self.block_hashes[-1] if self.block_hashes else b""
        self.block_hashes += hash_blocks(self.tokens[done:], self.block_size, parent)

    @property
    def wanted_tokens(self) -> int:
        return self.num_prompt_tokens + self.max_new_tokens


@dataclass(slots=True)
class _Allocation:
    """The blocks of a request, as the connector asks for them."""

    ids: list[int]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (list(self.ids),)


class BlockPool:
    """Device blocks with reference counts and a prefix cache; freed blocks keep their content, and their
    place in the cache, until they are handed out again."""

    def __init__(self, num_blocks: int, prefix_caching: bool) -> None:
        self.refs = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.block_of: dict[BlockHash, int] = {}
        self.hash_of: dict[int, BlockHash] = {}
        self.prefix_caching = prefix_caching

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        found = []
        for h in hashes if self.prefix_caching else ():
            if h not in self.block_of:
                break
            found.append(self.block_of[h])
        return found

    def take(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.free.pop(block, None)
            self.refs[block] += 1

    def new(self, n: int) -> list[int]:
        blocks = [self.free.popitem(last=False)[0] for _ in range(n)]
        for block in blocks:
            self.refs[block] = 1
            h = self.hash_of.pop(block, None)
            if h is not None:
                del self.block_of[h]
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free[block] = None

    def cache(self, block: int, h: BlockHash) -> None:
        if self.prefix_caching and h not in self.block_of and block not in self.hash_of:
            self.block_of[h] = block
            self.hash_of[block] = h

    def forget_all(self) -> None:
        self.block_of.clear()
        self.hash_of.clear()


class ModelEngine:
    """Runs a scenario. ``patch`` may change the connector's halves first: to plant a bug, say.

    After ``run``: ``outputs`` holds each finished request's tokens, ``hits`` the tokens loaded from the
    host, ``steps`` the steps it took.
    """

    def __init__(self, scenario: Scenario, patch: Callable[[ModelEngine], None] | None = None) -> None:
        self.scenario = s = scenario
        self.random = random.Random(s.seed)
        self.version = 0
        self.now = 0.0
        page = s.block_size * TOKEN_BYTES
        self.device: ByteArray = np.zeros((s.num_layers, s.num_device_blocks, page), dtype=np.uint8)
        self.pool = BlockPool(s.num_device_blocks, s.prefix_caching)
        slot_bytes = padded_slot_bytes(page * s.num_layers * s.block_size_factor)
        host_data: ByteArray = np.zeros((s.num_host_blocks, slot_bytes), dtype=np.uint8)
        copier = InlineTransfer(list(self.device), host_data, s.block_size_factor)
        self.failing = FailingTransfer(copier, s.copy_failure_rate, s.seed)
        self.transfer = SlowTransfer(self.failing, s.seed + 1, s.copy_chance)
        self.backend = HostBackend(s.block_size * s.block_size_factor, s.num_host_blocks)
        self.policy_manager = PolicyOffloadingManager(
            self.backend, make_policy(s.policy, s.num_host_blocks), clock=lambda: self.now
        )
        manager: OffloadingManager = self.policy_manager
        if s.store_threshold is not None:
            manager = FilterReusedOffloadingManager(manager, s.store_threshold)
        self.scheduler = OffloadingConnectorScheduler(
            manager,
            device_block_size=s.block_size,
            block_size_factor=s.block_size_factor,
            device_prefix_caching=s.prefix_caching,
            load_deadline_ms=s.load_deadline_ms,
            clock=lambda: self.now,
        )
        self.worker = OffloadingConnectorWorker(self.transfer)
        self.waiting: list[EngineRequest] = []
        self.running: list[EngineRequest] = []
        self.held: dict[str, EngineRequest] = {}
        """Finished requests whose blocks the connector has asked to keep."""
        self.outputs: dict[str, list[int]] = {}
        self.hits = 0
        self.steps = 0
        self._unreported: list[list[EngineRequest]] = []
        """Steps whose sampled tokens are not reported back yet, oldest first."""
        self._deferred: list[tuple[int, list[int]]] = []
        """Blocks to free once so many steps have been reported."""
        self._preempted: set[str] = set()
        """Requests that a reset preempted, to be told with the next step, which may resume them already."""
        self._reported = 0
        self._executed = 0
        self._aborted_loading: list[EngineRequest] = []
        if patch is not None:
            patch(self)

    # What a run is made of.

    def run(self) -> None:
        """Raises WrongBytes, Hang or Leak, or returns with every request finished or aborted."""
        todo = self._make_requests()
        limit = MAX_STEPS
        while todo or self.waiting or self.running or self._unreported or self.scheduler.has_pending_work():
            if self.steps > limit:
                raise Hang(f"after {limit} steps: {len(self.waiting)} waiting, {len(self.running)} running")
            if todo and self.random.random() < 0.4:
                self.waiting.append(todo.pop(0))
            if self.waiting + self.running and self.random.random() < self.scenario.abort_chance:
                self._finish(self.random.choice(self.waiting + self.running))
            if self.steps < MAX_RESET_STEP and self.random.random() < self.scenario.reset_chance:
                self._reset(preempt=self.random.random() < 0.5)
            self.step()
        self._check_nothing_held()

    def step(self) -> None:
        """One step of the engine: schedule, compute, and take in the results, perhaps one step late."""
        self.steps += 1
        self.now += 0.001
        step, batch = self._schedule()
        meta = self.scheduler.build_connector_meta(step)
        for request in batch:
            request.num_computed_tokens += step.num_scheduled_tokens[request.request_id]
            request.in_flight += 1
        self._execute(step, meta, batch)
        self._unreported.append(batch)
        while len(self._unreported) > (1 if self.scenario.async_scheduling and batch else 0):
            self._report_tokens()

    def _make_requests(self) -> list[EngineRequest]:
        s, rng = self.scenario, self.random
        documents = [[rng.randrange(1000) for _ in range(s.document_tokens)] for _ in range(s.num_documents)]
        requests = []
        for i in range(s.num_requests):
            document = rng.choice(documents)
            prompt = document[: rng.randint(1, len(document))] if rng.random() < 0.3 else list(document)
            prompt += [rng.randrange(1000) for _ in range(rng.randint(0, s.max_question_tokens))]
            params = {"do_remote_decode": True} if rng.random() < s.remote_decode_rate else None
            new = rng.randint(1, s.max_new_tokens)
            requests.append(EngineRequest(f"r{i}", prompt, new, s.block_size, 0, params))
        return requests

    # The scheduler.

    def _schedule(self) -> tuple[ScheduledStep, list[EngineRequest]]:
        s = self.scenario
        budget = s.max_tokens_per_step
        scheduled: dict[str, int] = {}
        block_ids: dict[str, tuple[list[int], ...]] = {}
        replaced: set[str] = set()
        preempted, self._preempted = self._preempted, set()
        known_preempted, starved = len(preempted), False
        batch: list[EngineRequest] = []
        for request in list(self.running):
            if request not in self.running or budget == 0:
                continue
            n = min(budget, self._next_tokens(request))
            if n <= 0:
                continue
            new = self._grow(request, n, preempted, keep=batch)
            if new is None:
                starved = True
                continue
            scheduled[request.request_id] = n
            block_ids[request.request_id] = (new,)
            batch.append(request)
            budget -= n
        # Who waits must not take the blocks that a running request lacks.
        may_admit = len(preempted) == known_preempted and not starved
        for request in list(self.waiting):
            if not may_admit or budget == 0 or len(self.running) >= s.max_running:
                break
            if request.loading or request.in_flight:
                continue
            if request.num_computed_tokens == 0 and not self._admit(request):
                continue
            if request.loading:
                continue
            n = min(budget, self._next_tokens(request))
            needed = self._blocks_for(request.num_computed_tokens + n) - len(request.blocks)
            while needed > len(self.pool.free) and not self.running and self._take_from_later(request):
                pass
            if needed > len(self.pool.free):
                break
            request.blocks += self.pool.new(max(0, needed))
            self.waiting.remove(request)
            self.running.append(request)
            scheduled[request.request_id] = n
            block_ids[request.request_id] = (list(request.blocks),)
            replaced.add(request.request_id)
            batch.append(request)
            budget -= n
        return ScheduledStep(scheduled, block_ids, frozenset(replaced), preempted), batch

    def _take_from_later(self, request: EngineRequest) -> bool:
        """Waiting requests that hold loaded blocks could starve each other: the last one gives way."""
        holders = [r for r in self.waiting if r.blocks and not r.loading and r is not request]
        if not holders:
            return False
        self._release(holders[-1])
        holders[-1].num_computed_tokens = 0
        return True

    def _next_tokens(self, request: EngineRequest) -> int:
        """Tokens it could compute now: to the end of what is known, or one sampled token ahead."""
        if request.num_computed_tokens + 1 >= request.wanted_tokens:
            return 0
        ahead = len(request.real_tokens) - request.num_computed_tokens
        return max(ahead, 0)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.scenario.block_size)

    def _grow(self, request: EngineRequest, n: int, preempted: set[str], keep: list[EngineRequest]) -> list[int] | None:
        needed = self._blocks_for(request.num_computed_tokens + n) - len(request.blocks)
        while needed > len(self.pool.free):
            victims = [r for r in self.running if r not in keep and not r.in_flight]
            if victims and victims[-1] is not request:
                self._preempt(victims[-1], preempted)
            elif not self._take_from_later(request):
                if victims and not any(r.loading for r in self.waiting):
                    self._preempt(request, preempted)
                return None
        new = self.pool.new(max(0, needed))
        request.blocks += new
        return new

    def _preempt(self, request: EngineRequest, preempted: set[str]) -> None:
        self.running.remove(request)
        self._release(request)
        request.num_computed_tokens = 0
        request.version = self.version
        self.waiting.insert(0, request)
        preempted.add(request.request_id)

    def _admit(self, request: EngineRequest) -> bool:
        """Looks the request up on the device and in the host, and allocates. False: not now."""
        request.version = self.version
        size = self.scenario.block_size
        local = self.pool.match(request.block_hashes[: (request.num_tokens - 1) // size])
        computed = len(local) * size
        external, is_async = self.scheduler.get_num_new_matched_tokens(request, computed)
        if external is None:
            return False
        assert is_async == bool(external)
        assert computed + external < request.num_tokens, "no token is left to compute"
        needed = self._blocks_for(computed + external) - len(local)
        idle = [block for block in local if self.pool.refs[block] == 0]
        if external and needed > len(self.pool.free) - len(idle):
            return False
        if not external and needed + 1 > len(self.pool.free) - len(idle):
            return False
        self.pool.take(local)
        request.blocks = local + self.pool.new(needed)
        self.scheduler.update_state_after_alloc(request, _Allocation(request.blocks), external)
        request.num_computed_tokens = computed + external
        request.loading = is_async
        self.hits += external
        return True

    # The worker.

    def _execute(self, step: ScheduledStep, meta: StepMeta, batch: list[EngineRequest]) -> None:
        self._executed += 1
        self.worker.begin_step(meta)
        early = self.random.random() < 0.5
        if early:
            self.worker.start_loads(meta)
        for request in batch:
            n = step.num_scheduled_tokens[request.request_id]
            self.transfer.tick()
            self._compute(request, request.num_computed_tokens - n, n)
        if not early:
            self.worker.start_loads(meta)
        self.worker.end_step(meta)
        finished = self.worker.get_finished(meta)
        report = self.worker.take_report()
        if report is not None:
            self.scheduler.update_connector_output(report)
        by_id = {request.request_id: request for request in [*self.waiting, *self._aborted_loading]}
        for req_id in finished.loaded:
            self._end_load(by_id[req_id], finished.failed_blocks)
        for req_id in finished.released:
            self._release(self.held.pop(req_id))

    def _compute(self, request: EngineRequest, start: int, n: int) -> None:
        size = self.scenario.block_size
        for layer in range(self.scenario.num_layers):
            expected = kv_bytes(request.real_tokens[: start + n], layer, request.version)
            for i in range(self._blocks_for(start)):
                have = self.device[layer, request.blocks[i]]
                want = expected[i * size * TOKEN_BYTES : min((i + 1) * size, start) * TOKEN_BYTES]
                if not np.array_equal(have[: len(want)], want):
                    raise WrongBytes(
                        f"seed {self.scenario.seed}, step {self.steps}: request {request.request_id} attends to "
                        f"wrong bytes in layer {layer}, block {i} (device block {request.blocks[i]})"
                    )
            for position in range(start, start + n):
                at = position % size * TOKEN_BYTES
                page = self.device[layer, request.blocks[position // size]]
                page[at : at + TOKEN_BYTES] = expected[position * TOKEN_BYTES : (position + 1) * TOKEN_BYTES]
        if start + n == len(request.real_tokens):
            request.real_tokens.append(sample(request.real_tokens))

    def _end_load(self, request: EngineRequest, failed_blocks: set[int]) -> None:
        request.loading = False
        if request.finished:
            self._aborted_loading.remove(request)
            self._release(request)
            return
        good = next((i for i, block in enumerate(request.blocks) if block in failed_blocks), None)
        if good is not None or request.version != self.version:
            good = 0 if request.version != self.version else good
            assert good is not None
            request.num_computed_tokens = good * self.scenario.block_size
            if good == 0:
                self._release(request)
                return
        self._cache_blocks(request, request.num_computed_tokens)

    # Results, and the end of requests.

    def _report_tokens(self) -> None:
        batch = self._unreported.pop(0)
        self._reported += 1
        for request in batch:
            request.in_flight -= 1
            if request.finished:
                continue
            self._cache_blocks(request, min(request.num_computed_tokens, request.num_tokens))
            if request.num_computed_tokens >= request.num_tokens and len(request.real_tokens) > request.num_tokens:
                request.append([request.real_tokens[request.num_tokens]])
                if request.num_tokens >= request.wanted_tokens:
                    self.outputs[request.request_id] = list(request.tokens)
                    self._finish(request)
        due = [blocks for after, blocks in self._deferred if after <= self._reported]
        self._deferred = [entry for entry in self._deferred if entry[0] > self._reported]
        for blocks in due:
            self.pool.release(blocks)

    def _cache_blocks(self, request: EngineRequest, num_tokens: int) -> None:
        if request.version == self.version:
            for i in range(min(num_tokens // self.scenario.block_size, len(request.block_hashes))):
                self.pool.cache(request.blocks[i], request.block_hashes[i])

    def _finish(self, request: EngineRequest) -> None:
        request.finished = True
        (self.running if request in self.running else self.waiting).remove(request)
        hold, _ = self.scheduler.request_finished(request, list(request.blocks))
        if request.loading:
            self._aborted_loading.append(request)
        elif hold:
            self.held[request.request_id] = request
        else:
            self._release(request)

    def _release(self, request: EngineRequest) -> None:
        """Frees its blocks, but not before the steps under way that may write to them are through."""
        if request.in_flight:
            self._deferred.append((self._executed, request.blocks))
        else:
            self.pool.release(request.blocks)
        request.blocks = []

    def _reset(self, preempt: bool) -> None:
        """New weights: caches are emptied; running requests start again, or go on with what they have."""
        self.version += 1
        self.pool.forget_all()
        if preempt:
            for request in reversed(list(self.running)):
                if not request.in_flight:
                    self._preempt(request, self._preempted)
        self.scheduler.reset()

    def _check_nothing_held(self) -> None:
        if self.scheduler.off:
            raise Leak("a check failed and switched offloading off")
        self.policy_manager.check_integrity()
        busy = [key for key, n in self.reference_counts().items() if n != 0]
        if busy:
            raise Leak(f"{len(busy)} blocks are still pinned or being written")
        if self.held or self._aborted_loading or self._deferred:
            raise Leak("finished requests still hold device blocks")
        if len(self.pool.free) != self.scenario.num_device_blocks - 1:
            raise Leak(f"{self.scenario.num_device_blocks - 1 - len(self.pool.free)} device blocks are not free")

    def reference_counts(self) -> dict[bytes, int]:
        """Readers per key held in the host, -1 while it is being written."""
        table = self.policy_manager._table
        slots = table.slots()
        return dict(zip(table.key_of[slots].tolist(), table.ref_cnt[slots].tolist(), strict=True))


def kv_bytes(tokens: Sequence[int], layer: int, version: int) -> ByteArray:
    """The KV of every position: a function of all tokens up to it, the layer and the weights' version."""
    state = hashlib.blake2b(f"{layer}/{version}".encode(), digest_size=16).digest()
    out = bytearray()
    for token in tokens:
        state = hashlib.blake2b(state + token.to_bytes(4, "little"), digest_size=16).digest()
        out += state[:TOKEN_BYTES]
    return np.frombuffer(bytes(out), dtype=np.uint8)


def sample(tokens: Sequence[int]) -> int:
    """The next token: a function of all before it."""
    raw = ",".join(map(str, tokens)).encode()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=2).digest(), "little") % 1000


def run_seed(seed: int, patch: Callable[[ModelEngine], None] | None = None) -> ModelEngine:
    """Runs the scenario of ``seed``. The error it may raise can be had again with the same seed."""
    engine = ModelEngine(Scenario.random(seed), patch)
    engine.run()
    return engine

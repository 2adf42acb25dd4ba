"""Random schedules of vLLM's manager of host memory with a policy of kvoffload, compared with a simple model."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvoffload.vllm import cache_policy

MODULE = cache_policy.__name__
POLICIES = ("AutoCachePolicy", "LRUCachePolicy", "ARCCachePolicy")


class CarelessCachePolicy(cache_policy.AutoCachePolicy):
    """A planted bug: it evicts chunks that are in use."""

    def evict(self, n: int, protected: Any) -> Any:
        return [(key, self._chunks[key]) for key in list(self._chunks)[:n]]


class BrokenCachePolicy(cache_policy.AutoCachePolicy):
    """A bug in what every method begins with, after the first chunks."""

    def _enter(self, keys: Any) -> None:
        if len(self._chunks) > 3:
            raise RuntimeError("planted")
        super()._enter(keys)


@dataclass
class Request:
    context: ReqContext
    chain: list[Any]
    stored_to: int = 0
    writing: list[list[Any]] = field(default_factory=list)
    loading: list[Any] = field(default_factory=list)


def begin(name: str, blocks: list[int], groups: int) -> Request:
    """Returns a request for the chunks of a chain, whose groups alternate."""
    context, chain = ReqContext(name), []
    for i, block in enumerate(blocks, 1):
        for group in range(groups):
            key = make_offload_key(block.to_bytes(32, "big"), group)
            context.set_offload_key_position(key, 16 * i)
            chain.append(key)
    return Request(context, chain)


class Schedule:
    """One manager, and what must be true of it. ``pins``: -1 for a chunk that is written, else its number of pins."""

    def __init__(self, policy: str, seed: int, module: str = MODULE) -> None:
        self.random = Random(seed)
        self.num_chunks = self.random.randint(2, 40)
        self.groups = self.random.choice((1, 1, 2))
        self.manager = CPUOffloadingManager(self.num_chunks, policy, module)
        self.policy = self.manager._policy
        self.kind = type(self.policy._policy)
        self.pins: dict[Any, int] = {}
        self.requests: list[Request] = []
        self.evicted = self.failed = self.refused = 0

    def run(self, steps: int) -> None:
        random = self.random
        for step in range(steps):
            if len(self.requests) < 4 and random.random() < 0.5:
                self.arrive(step)
            elif self.requests:
                request = random.choice(self.requests)
                random.choice((self.store, self.store, self.written, self.loaded, self.finish))(request)
            if random.random() < 0.01:
                self.manager.reset_cache()
                self.pins.clear()
                self.requests.clear()
            self.check()

    def arrive(self, step: int) -> None:
        random = self.random
        node, blocks = random.randrange(5), []
        for _ in range(random.randint(1, self.num_chunks + 4)):
            blocks.append(node)
            node = node * 3 + 7 + random.randrange(2) * (random.random() < 0.2)
        request = begin(str(step), blocks, self.groups)
        self.manager.on_new_request(request.context)
        found = 0
        for key in request.chain:
            result = self.manager.lookup(key, request.context)
            assert (result is LookupResult.HIT) == (self.pins.get(key, -1) >= 0)
            if result is not LookupResult.HIT:
                break
            found += 1
        request.loading, request.stored_to = request.chain[:found], found
        if found:
            self.manager.prepare_load(request.loading, request.context)
            for key in request.loading:
                self.pins[key] += 1
        self.requests.append(request)

    def store(self, request: Request) -> None:
        end = request.stored_to + self.random.randint(1, 8)
        keys = request.chain[request.stored_to : end]
        new = [key for key in keys if key not in self.pins]
        before = dict(self.pins)
        output = self.manager.prepare_store(keys, request.context)
        needed = len(new) - (self.num_chunks - len(self.pins))
        evictable = sum(pins == 0 and key not in keys for key, pins in self.pins.items())
        assert (output is None) == (bool(new) and needed > evictable)
        if output is None:
            self.refused += 1
            assert self.held() == before.keys()
            return
        request.stored_to = end
        assert output.keys_to_store == new
        assert len(output.evicted_keys) == len(set(output.evicted_keys)) == (max(0, needed) if new else 0)
        for key in output.evicted_keys:
            assert key not in keys, "a protected chunk was evicted"
            assert self.pins.pop(key) == 0, "a chunk in use was evicted"
        self.evicted += len(output.evicted_keys)
        self.pins.update(dict.fromkeys(new, -1))
        if new:
            request.writing.append(new)

    def written(self, request: Request) -> None:
        if not request.writing:
            return
        keys = request.writing.pop(0)
        success = self.random.random() < 0.9
        self.manager.complete_store(keys, request.context, success)
        for key in keys:
            if success:
                self.pins[key] = 0
            else:
                del self.pins[key]
        self.failed += not success

    def loaded(self, request: Request) -> None:
        if request.loading:
            self.manager.complete_load(request.loading, request.context)
            for key in request.loading:
                self.pins[key] -= 1
            request.loading = []

    def finish(self, request: Request) -> None:
        self.manager.on_request_finished(request.context)
        while request.writing:
            self.written(request)
        self.loaded(request)
        self.requests.remove(request)

    def held(self) -> Any:
        return self.policy._chunks.keys()

    def check(self) -> None:
        policy = self.policy
        assert type(policy._policy) is self.kind, "the policy has failed, and LRU has replaced it"
        assert len(policy._marks) + len(policy._entering) <= 2 * self.num_chunks
        policy.check_integrity()
        assert self.held() == self.pins.keys()
        chunks = {key: policy.get(key) for key in self.pins}
        assert {key: chunk.ref_cnt for key, chunk in chunks.items()} == self.pins
        assert len({chunk.chunk_id for chunk in chunks.values()}) == len(chunks)
        assert not policy._marks
        assert len(policy._aside) <= self.num_chunks


def random_schedules(seeds: int, steps: int) -> dict[str, int]:
    """Runs every policy, and returns how often what must occur has occurred."""
    seen = {"evicted": 0, "failed": 0, "refused": 0, "aside": 0}
    for policy in POLICIES:
        for seed in range(seeds):
            schedule = Schedule(policy, seed)
            schedule.run(steps)
            seen["evicted"] += schedule.evicted
            seen["failed"] += schedule.failed
            seen["refused"] += schedule.refused
            seen["aside"] += len(schedule.policy._aside)
    return seen


def is_careless_seen(seeds: int, steps: int) -> bool:
    """Returns whether the planted bug is found."""
    try:
        for seed in range(seeds):
            Schedule("CarelessCachePolicy", seed, __name__).run(steps)
    except AssertionError:
        return True
    return False


def fill(policy: str, num_chunks: int, chain: list[int], step: int) -> tuple[CPUOffloadingManager, Request]:
    """Returns a manager that has served one request, which has stored its chain in steps."""
    manager = CPUOffloadingManager(num_chunks, policy, MODULE)
    return manager, serve(manager, "first", chain, step)


def serve(manager: CPUOffloadingManager, name: str, chain: list[int], step: int) -> Request:
    request = begin(name, chain, 1)
    manager.on_new_request(request.context)
    found = 0
    while found < len(chain) and manager.lookup(request.chain[found], request.context) is LookupResult.HIT:
        found += 1
    if found:
        manager.prepare_load(request.chain[:found], request.context)
        manager.complete_load(request.chain[:found], request.context)
    for start in range(found, len(chain), step):
        output = manager.prepare_store(request.chain[start : start + step], request.context)
        assert output is not None
        manager.complete_store(output.keys_to_store, request.context)
    manager.on_request_finished(request.context)
    request.stored_to = found
    return request


def left_of(manager: CPUOffloadingManager, request: Request) -> list[int]:
    """Returns which chunks of a request's chain can be loaded, by their place."""
    looked_up = [manager.lookup(key, request.context) for key in request.chain]
    return [i for i, result in enumerate(looked_up) if result is LookupResult.HIT]


def chains() -> dict[str, Any]:
    """What is left of chains, by policy."""
    seen: dict[str, Any] = {}
    for policy in POLICIES:
        manager, first = fill(policy, 12, list(range(100, 108)), 3)
        for i in range(3):
            serve(manager, f"other {i}", [200 + 10 * i, 201 + 10 * i], 2)
        tail = left_of(manager, first)
        manager, long = fill(policy, 12, list(range(300, 330)), 3)
        manager._policy.check_integrity()
        again = serve(manager, "again", list(range(300, 330)), 3)
        seen[policy] = {"tail": tail, "long": left_of(manager, long), "again": again.stored_to}
    return seen


class _Counting(dict[Any, Any]):
    """Chunks that count how often it is asked whether one is there."""

    num_asked = 0

    def __contains__(self, key: object) -> bool:
        self.num_asked += 1
        return super().__contains__(key)


def one_by_one(num_chunks: int) -> float:
    """Stores a chain chunk by chunk in one step, as vLLM does when chunks are promoted from a secondary tier. Returns
    how often per chunk the policy has looked for one."""
    manager, _ = fill("LRUCachePolicy", num_chunks, list(range(1000, 1000 + num_chunks)), num_chunks)
    policy = manager._policy
    policy._chunks = counting = _Counting(policy._chunks)
    policy.__dict__["get"] = counting.get
    request = begin("promoting", list(range(2000, 2000 + num_chunks // 2)), 1)
    manager.on_new_request(request.context)
    for key in request.chain:
        assert manager.prepare_store([key], request.context) is not None
    policy.check_integrity()
    return counting.num_asked / len(request.chain)


def starts_over() -> dict[str, Any]:
    """A policy that fails is replaced, and vLLM does not notice."""
    manager, first = fill("AutoCachePolicy", 4, [1, 2], 1)
    policy = manager._policy

    def fail(self: Any, eviction: Any) -> Any:
        raise RuntimeError("planted")

    policy._policy = type("Failing", (type(policy._policy),), {"evict": fail})(4)
    policy._policy.insert(policy._table.slots(), policy._table.key_of[policy._table.slots()].tolist())
    second = serve(manager, "second", [3, 4, 5], 3)
    policy.check_integrity()
    return {"policy": type(policy._policy).__name__, "left": left_of(manager, first) + left_of(manager, second)}


def keeps_failing() -> dict[str, Any]:
    """A policy that fails in every call, as with a version of vLLM whose requests have other attributes. vLLM serves
    on."""
    manager = CPUOffloadingManager(6, "BrokenCachePolicy", __name__)
    first, second = begin("first", [1, 2, 3], 1), begin("second", [4, 5], 1)
    for request in (first, second):
        manager.on_new_request(request.context)
        assert manager.prepare_store(request.chain, request.context) is not None
    manager.complete_store(second.chain, second.context, success=False)
    manager.complete_store(first.chain, first.context)
    return {"after_failed_stores": left_of(manager, second), "first": left_of(manager, first)}

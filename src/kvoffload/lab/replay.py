"""Replays a trace through the managers and policies that serve an engine, without copying bytes, on the trace's clock.

Requests run one after the other. As when serving: the device's own prefix cache has some leading blocks, the host has
the blocks that follow, and blocks on disk are promoted to the host. The rest is computed, stored in the host unless it
came from there, and written through to the disk. Outputs are stored after their prompt if the trace has their blocks.
With exclusive contents a block is stored only when it leaves the device.

The disk is always fast enough, and a request waits for all blocks that it can promote, so disk hits are an upper bound.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
import traceback
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvoffload.abc import (
    ConfigError,
    Hints,
    IntegrityError,
    Keys,
    KVGroup,
    Miss,
    MissReason,
    Offer,
    OffloadingManager,
    OffloadKey,
    ReqContext,
)
from kvoffload.abc.tier import HIT
from kvoffload.cache.admission import FilterReusedOffloadingManager, tracker_size
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.misses import MissMemory
from kvoffload.cache.policies import BUILTIN, make_policy
from kvoffload.cache.slots import HostBackend
from kvoffload.cache.tenants import HOST, RETAIN_SHARE, Shares, TenantConfig, Tenants
from kvoffload.config import HostContents, contents_of
from kvoffload.connector.leaving import piece_blocks
from kvoffload.lab.capacity import MAX_BLOCKS
from kvoffload.lab.device import NOTHING, DeviceCache
from kvoffload.lab.latency import DEFAULT_SPEEDS, Speeds, ttft_seconds
from kvoffload.lab.model import DEFAULT_MODEL, ModelShape
from kvoffload.lab.tier import CatalogTier
from kvoffload.lab.trace import Floats, Ints, Progress, Trace
from kvoffload.observe.trace import name_hash
from kvoffload.tiering.manager import WRITE_SHARE, TieredOffloadingManager, TieringSettings

DISK = "disk"
"""The tier below host memory, in the shares of tenants."""
REPORT_EVERY = 256
"""Requests between two calls of ``on_progress``."""
PROGRESS_EVERY_S = 0.1
"""How often ``replay_many`` reports the progress of its processes."""
LITTLE_WORK = 200_000
"""Up to this many block accesses, starting processes would take longer than the replays."""
MAX_DEVICE_BLOCKS = 1 << 24
"""A bound for the memory of a replay; with 16 tokens per block, 268 million tokens."""
MAX_POLLS = 1 << 16
"""Polls per request until all its promotions must have ended."""


@dataclass(frozen=True, slots=True)
class Contract:
    """What tenants were promised, and whether what clients know counts."""

    tenants: tuple[TenantConfig, ...] = ()
    """Shares of the tiers "host" and "disk", in bytes. Names are those of the trace."""
    block_bytes: int = 1
    uses_hints: bool = True
    """Whether hints of the trace are given to the managers, and its requests for retention."""

    def counts_in(self, trace: Trace) -> bool:
        """Returns whether a replay of ``trace`` may find something else with this contract than without any."""
        return bool(self.tenants) or (self.uses_hints and trace.has_hints)

    def shares(self, tier: str, num_blocks: int) -> Shares:
        """Returns the shares of ``tier``, in blocks. Raises ConfigError if they do not fit into ``num_blocks``."""
        return Tenants(b"", self.tenants).shares(tier, num_blocks, self.block_bytes)

    def least_blocks(self, tier: str) -> int:
        """Returns how many blocks ``tier`` needs to have room for all that is guaranteed and may be retained. Raises
        ConfigError if a share has no room for one block."""
        if not self.tenants:
            return 0
        shares = self.shares(tier, MAX_BLOCKS)
        # A tenant that has all of its blocks retained needs one more.
        needs_more = any(retain and retain >= own for own, retain in zip(shares.guaranteed, shares.retain, strict=True))
        claimed = MAX_BLOCKS - shares.num_unclaimed + needs_more
        return max(claimed, math.ceil(sum(shares.retain) / RETAIN_SHARE))


DEFAULT_CONTRACT = Contract()
NO_CONTRACT = Contract(uses_hints=False)


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """The settings of a replay. Raises ConfigError if one is invalid."""

    policy: str
    """The policy of host and disk: a name or "package.module:Class"."""
    capacity_blocks: int
    """Capacity of host memory."""
    device_blocks: int = 0
    """Capacity of the engine's own prefix cache; 0: none."""
    disk_blocks: int = 0
    """Capacity of the disk; 0: none."""
    store_threshold: int | None = None
    """Store a block once this many requests have asked for it."""
    host_contents: HostContents | None = None
    """None stands for those of a server with full attention and this device."""
    contract: Contract = DEFAULT_CONTRACT

    def __post_init__(self) -> None:
        for name, least in (("capacity_blocks", 1), ("device_blocks", 0), ("disk_blocks", 0)):
            if getattr(self, name) < least:
                raise ConfigError(name, getattr(self, name), f"must be {least} or more")
        if self.store_threshold is not None and self.store_threshold < 2:
            raise ConfigError("store_threshold", self.store_threshold, "must be 2 or more", "leave it out to store all")
        contents = contents_of(self.host_contents, why_inclusive(self.device_blocks))
        object.__setattr__(self, "host_contents", contents)


def why_inclusive(device: int, model: ModelShape = DEFAULT_MODEL) -> str | None:
    """Returns why host memory repeats what a device cache of this size holds; None if it need not."""
    return model.why_inclusive if device else "the size of the device's own cache is not given"


@dataclass(frozen=True, slots=True)
class TierUse:
    """What one tier contributed to the requests of a trace, and at what cost."""

    name: str
    """device, host or disk."""
    capacity_blocks: int
    hit_tokens: int
    """Prompt tokens found in this tier and in none above."""
    hit_tokens_pct: float
    saved_flops_pct: float
    """Percent of the prefill FLOPs of all prompts."""
    written_bytes: int
    """0 for the device."""
    read_bytes: int
    """Read by the tier above; 0 for the device."""
    write_amplification: float
    """Bytes written divided by the bytes of the trace's distinct blocks."""
    evicted_blocks: int


@dataclass(frozen=True, slots=True)
class TenantFound:
    """What the requests of one tenant asked for and found, in prompt tokens."""

    name: str
    requests: int
    tokens_asked: int
    tokens_found: int
    found_pct: float


@dataclass(frozen=True, eq=False)
class ReplayResult:
    """What the requests of a trace found, and what it cost to keep it.

    A hit token is a prompt token that need not be computed: one in the longest run of leading blocks that were found.
    """

    policy: str
    capacity_blocks: int
    device_blocks: int
    disk_blocks: int
    store_threshold: int | None
    host_contents: HostContents
    contract: Contract
    requests: int
    accesses: int
    prompt_tokens: int
    saved_flops_pct: float
    block_hits: int
    """Prompt blocks that were on the device or in the host, at any place in their chain."""
    stored_blocks: int
    """Blocks stored from the device to the host."""
    evicted_blocks: int
    """Blocks evicted from the host."""
    dropped_writes: int
    """Blocks that were not written to disk because too many writes were in progress."""
    misses: dict[MissReason, int]
    """Requests by the reason of their first missing block."""
    tiers: tuple[TierUse, ...]
    """The configured tiers, from the device down."""
    ttft_p50_s: float
    ttft_p95_s: float
    seconds: float
    """Duration of the replay."""
    device_tokens: Ints
    """Hit tokens on the device, per request."""
    host_tokens: Ints
    """Hit tokens in the host, per request."""
    disk_tokens: Ints
    """Hit tokens on disk, per request."""
    tenants: tuple[TenantFound, ...] = ()
    """By tenant of the trace; empty if it has none."""

    @property
    def device_hit_tokens(self) -> int:
        return int(self.device_tokens.sum())

    @property
    def host_hit_tokens(self) -> int:
        return int(self.host_tokens.sum())

    @property
    def disk_hit_tokens(self) -> int:
        return int(self.disk_tokens.sum())

    @property
    def prefix_hit_tokens(self) -> int:
        return self.device_hit_tokens + self.host_hit_tokens + self.disk_hit_tokens

    @property
    def prefix_hit_tokens_pct(self) -> float:
        return _percent(self.prefix_hit_tokens, self.prompt_tokens)

    @property
    def writes_per_access(self) -> float:
        return self.stored_blocks / self.accesses if self.accesses else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns all but the arrays, for JSON."""
        return {
            **{name: getattr(self, name) for name in _NUMBERS},
            "misses": {str(reason): count for reason, count in self.misses.items()},
            "tiers": [asdict(tier) for tier in self.tiers],
            **({"by_tenant": [asdict(tenant) for tenant in self.tenants]} if self.tenants else {}),
            **{name: getattr(self, name) for name in ("ttft_p50_s", "ttft_p95_s", "seconds")},
        }


_NUMBERS = (
    *(field.name for field in fields(ReplayConfig) if field.name != "contract"),
    *("prefix_hit_tokens_pct", "saved_flops_pct", "writes_per_access", "requests", "accesses", "prompt_tokens"),
    *("prefix_hit_tokens", "device_hit_tokens", "host_hit_tokens", "disk_hit_tokens"),
    *("block_hits", "stored_blocks", "evicted_blocks", "dropped_writes"),
)
"""What ``to_dict`` takes of a result as it is."""


def replay(
    trace: Trace,
    config: ReplayConfig,
    *,
    model: ModelShape = DEFAULT_MODEL,
    speeds: Speeds = DEFAULT_SPEEDS,
    on_progress: Progress | None = None,
    hints: Sequence[Hints | None] | None = None,
) -> ReplayResult:
    """Serves the requests of ``trace`` in the order of their time.

    ``model`` and ``speeds`` determine what a hit saves. ``on_progress`` gets the share of requests that are done.
    ``hints`` has those of each request. Raises ConfigError if the policy cannot be made, if a custom policy fails, or
    if the device is too small or too large.
    """
    started = time.perf_counter()
    run = (ExclusiveRun if config.host_contents is HostContents.EXCLUSIVE else Run)(trace, config, hints)
    done = 0
    try:
        for done in run.serve_all():
            if on_progress is not None and done % REPORT_EVERY == 0:
                on_progress(done / trace.num_requests)
    except Exception as error:
        if config.policy in BUILTIN:
            raise
        raise _failed(config.policy, done, error) from error
    if on_progress is not None:
        on_progress(1.0)
    return result_of(run, model, speeds, time.perf_counter() - started)


def replay_many(
    trace: Trace,
    configs: Sequence[ReplayConfig],
    *,
    model: ModelShape = DEFAULT_MODEL,
    speeds: Speeds = DEFAULT_SPEEDS,
    processes: int | None = None,
    on_progress: Progress | None = None,
) -> list[ReplayResult]:
    """Returns one result per configuration, in order. Uses ``processes`` processes, by default one per core.

    As the processes import the caller's module, a script must call this below ``if __name__ == "__main__"``. Raises as
    ``replay`` does.
    """
    if processes is None:
        processes = len(os.sched_getaffinity(0)) if trace.num_accesses * len(configs) > LITTLE_WORK else 1
    processes = min(processes, len(configs))
    if processes <= 1:
        return [
            replay(
                trace,
                config,
                model=model,
                speeds=speeds,
                on_progress=part(on_progress, i / len(configs), (i + 1) / len(configs)),
            )
            for i, config in enumerate(configs)
        ]
    context = multiprocessing.get_context("spawn")
    done = context.Array("d", len(configs), lock=False)
    with ProcessPoolExecutor(processes, context, _start_worker, (trace, model, speeds, done)) as pool:
        futures = [pool.submit(_work, i, config) for i, config in enumerate(configs)]
        try:
            left = set(futures)
            while left:
                finished, left = wait(left, PROGRESS_EVERY_S)
                for future in finished:
                    future.result()
                if on_progress is not None:
                    on_progress(sum(done) / len(configs))
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise ConfigError(
                "jobs", processes, "a process died, perhaps because memory ran out", "use fewer jobs, or 1 to see why"
            ) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _failed(policy: str, request: int, error: Exception) -> ConfigError:
    where = traceback.extract_tb(error.__traceback__)[-1]
    words = " ".join(f"{type(error).__name__}: {error}".split())
    fault = f"failed at request {request}, {where.filename}:{where.lineno}: {words}"
    return ConfigError("policy", policy, fault, "test it with kvoffload.testing.conformance")


def part(on_progress: Progress | None, start: float, end: float) -> Progress | None:
    """Returns a callback that maps the progress of a part of the work to progress of the whole."""
    return None if on_progress is None else lambda share: on_progress(start + (end - start) * share)


_worker: tuple[Trace, ModelShape, Speeds, MutableSequence[float]]
"""Set in each process of ``replay_many``."""


def _start_worker(*shared: Any) -> None:
    global _worker
    _worker = shared


def _work(index: int, config: ReplayConfig) -> ReplayResult:
    trace, model, speeds, done = _worker

    def on_progress(share: float) -> None:
        done[index] = share

    return replay(trace, config, model=model, speeds=speeds, on_progress=on_progress)


class ExactMisses(MissMemory):
    """Never forgets a key of the trace. It takes one byte per distinct block."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._reasons = np.zeros(trace.num_distinct, dtype=np.uint8)
        """Index in _REASONS of why each block left, by its rank."""

    def record(self, keys: Iterable[OffloadKey], reason: MissReason) -> None:
        keys = keys if isinstance(keys, list | tuple) else list(keys)
        if keys:
            self._reasons[self._trace.ranks_of(keys)] = _REASONS.index(reason)

    def explain(self, key: OffloadKey) -> Miss:
        return _MISSES[int(self._reasons[self._trace.ranks_of((key,))[0]])]


_REASONS = tuple(sorted(MissReason, key=lambda reason: reason is not MissReason.NEVER_STORED))
"""The reason of blocks that never left is the first."""
_MISSES = tuple(map(Miss, _REASONS))


class DeviceUse(NamedTuple):
    """What a request needs of the device: see ``DeviceCache.serve``."""

    chain: list[int]
    """Its whole blocks on the device, by their ids in the trace."""
    hits: int
    num_held: int


@dataclass(slots=True, eq=False)
class Tally:
    """What the requests served so far have found, and what that has cost."""

    hits: array[int] = field(default_factory=lambda: array("q"))
    """Blocks found on the device, in the host and on disk, per request."""
    block_hits: int = 0
    stored: int = 0
    evicted: int = 0
    misses: Counter[MissReason] = field(default_factory=Counter)


class Run:
    """A replay in progress: managers that requests are served with, and a ``tally``. Arguments as for ``replay``."""

    def __init__(self, trace: Trace, config: ReplayConfig, hints: Sequence[Hints | None] | None = None) -> None:
        self.trace = trace
        self.config = config
        self.now = 0.0
        self.capacity = self.useful_blocks(HOST, config.capacity_blocks)
        uses_own = hints is None and config.contract.uses_hints and trace.has_hints
        self.hints: Callable[[int], Hints | None] | None = trace.hints if uses_own else None
        """Returns the hints of a request."""
        if hints is not None:
            self.hints = hints.__getitem__
        self.tier: CatalogTier | None = None
        self.device: DeviceCache | None = None
        self.tally = Tally()
        self.make_managers()

    def make_managers(self) -> None:
        trace, config = self.trace, self.config
        is_exclusive = config.host_contents is HostContents.EXCLUSIVE
        self.host = PolicyOffloadingManager(
            HostBackend(trace.block_tokens, self.capacity),
            make_policy(config.policy, self.capacity, self.shares(HOST, self.capacity)),
            # As in service: with a disk below, a refused block would end the chain there too.
            must_store=bool(config.disk_blocks),
            misses=ExactMisses(trace),
            clock=self.clock,
            device_blocks=config.device_blocks if is_exclusive else 0,
        )
        self.manager: OffloadingManager = self.host
        self.store_step = max(1, trace.num_accesses)
        if config.disk_blocks:
            disk_blocks = self.useful_blocks(DISK, config.disk_blocks)
            shares = self.shares(DISK, disk_blocks)
            self.tier = CatalogTier(disk_blocks, 1, config.policy, self.clock, shares=shares)
            self.manager = TieredOffloadingManager(
                self.host, [self.tier], TieringSettings([KVGroup(trace.block_tokens)]), clock=self.clock
            )
            # As an engine stores step by step, writes in progress are bounded.
            self.store_step = max(1, int(self.capacity * WRITE_SHARE))
        if config.store_threshold is not None:
            tracked = tracker_size(config.capacity_blocks + config.disk_blocks)
            self.manager = FilterReusedOffloadingManager(self.manager, config.store_threshold, tracked)
        self.has_contexts = self.tier is not None or config.store_threshold is not None or self.hints is not None
        """Whether a tier, an admission or the host looks at the request of a call."""
        if config.device_blocks:
            self.device = _device(trace, config.device_blocks)

    def useful_blocks(self, tier: str, num_blocks: int) -> int:
        """Returns ``num_blocks``, or fewer: more than the trace can fill and the shares of ``tier`` need would only
        make the arrays larger."""
        return min(num_blocks, max(1, self.trace.num_distinct, self.config.contract.least_blocks(tier)))

    def shares(self, tier: str, num_blocks: int) -> Shares | None:
        contract = self.config.contract
        return _shares(self.trace, contract, tier, num_blocks) if contract.tenants else None

    def take_counts(self) -> Mapping[str, float]:
        """Returns what the managers have counted."""
        return self.manager.take_counts()

    def clock(self) -> float:
        return self.now

    def serve_all(self) -> Iterator[int]:
        """Serves one request per iteration, and yields how many are done."""
        trace = self.trace
        rows = zip(trace.prompt_blocks.tolist(), trace.times.tolist(), strict=True)
        for request, (prompt_blocks, now) in enumerate(rows):
            self.prefetch_until(now)
            self.now = now
            chain = trace.keys_of(trace.chain(request))
            self.serve(request, chain, chain if len(chain) == prompt_blocks else chain[:prompt_blocks])
            yield request + 1

    def prefetch_until(self, now: float) -> None:
        """Prefetches what is due before ``now``, as an engine that makes steps all the time."""
        manager = self.manager
        while isinstance(manager, TieredOffloadingManager) and manager.prefetcher.chains.next_due <= now:
            self.now = max(self.now, manager.prefetcher.chains.next_due)
            before = manager.prefetcher.chains.next_due
            manager.poll()
            assert self.tier is not None
            while self.tier.is_busy:
                manager.poll()
            if manager.prefetcher.chains.next_due == before and not manager.prefetcher.reading:
                break

    def serve(self, request: int, chain: list[OffloadKey], prompt: list[OffloadKey]) -> None:
        manager, context = self.manager, self.context(request) if self.has_contexts else None
        on_device = 0
        if self.device is not None:
            use = self.device_use(request, self.device)
            on_device = use.hits
            self.device.serve(*use)
        loaded_to = self.find(prompt, on_device, context)
        # Loaded blocks are not stored again. Only the head of a chain that is longer than the pool is stored, because
        # its tail would evict its head.
        head = prompt if len(prompt) <= self.capacity else prompt[: self.capacity]
        due = head if self.device is None else head[:on_device] + head[loaded_to:]
        stored, refused = self.store(due, context)
        output = chain[len(prompt) : self.capacity]
        if output and refused:
            manager.prepare_store(output, context, Offer.BEHIND_REFUSED)
        elif output:
            # As in an engine, after the prompt's blocks.
            stored = [*stored, *self.store(output, context)[0]]
        self.end(chain, stored, context)

    def find(self, prompt: list[OffloadKey], on_device: int, context: ReqContext | None) -> int:
        """Touches a prompt whose first ``on_device`` blocks are on the device, looks up the others, and counts what was
        found. Returns up to which block the prompt can be loaded."""
        if self.tier is None:
            slots = self.host.table.find(prompt)
            self.host.touch(prompt, context, found=slots)
            # Without a tier, all stores are complete between requests, so what is present is ready.
            ready = slots[on_device:] >= 0
            found, from_disk = _leading(ready), 0
        else:
            assert context is not None
            self.manager.touch(prompt, context)
            found, from_disk, ready = self.promote(prompt[on_device:], context)
        loaded_to = on_device + found
        self.tally.hits.extend((on_device, found - from_disk, from_disk))
        self.tally.block_hits += on_device + int(np.count_nonzero(ready))
        if loaded_to < len(prompt):
            self.tally.misses[self.manager.explain_miss(prompt[loaded_to]).reason] += 1
        return loaded_to

    def end(self, chain: list[OffloadKey], stored: Keys, context: ReqContext | None) -> None:
        if context is not None and (hints := context.hints) and (hints.drop or hints.retain_s is not None):
            self.manager.retain(chain[: self.capacity], context)
        self.manager.end_chain(chain, stored, context)
        # As if the engine made steps until the disk has written everything.
        while self.tier is not None and self.tier.is_busy:
            self.manager.poll()

    def context(self, request: int) -> ReqContext:
        return ReqContext(str(request), hints=None if self.hints is None else self.hints(request))

    def store(
        self, keys: list[OffloadKey], context: ReqContext | None, offer: Offer = Offer.COMPUTED
    ) -> tuple[Keys, bool]:
        """Returns which of ``keys`` the host has stored, and whether it refused any."""
        manager = self.manager
        output = manager.prepare_store(keys, context, offer)
        if output is None:
            return (), False
        stored, lease = output.keys_to_store, output.store_spec
        self.tally.evicted += len(output.evicted_keys)
        self.tally.stored += len(stored)
        if self.tier is None:
            if stored:
                manager.complete_store(lease, context)
        else:
            for start in range(0, len(stored), self.store_step):
                manager.complete_store(replace(lease, slots=lease.slots[start : start + self.store_step]), context)
                manager.poll()
        return stored, bool(output.refused_keys)

    def device_use(self, request: int, device: DeviceCache) -> DeviceUse:
        """Looks a request up on the device."""
        trace = self.trace
        chain: list[int] = trace.chain(request).tolist()
        size, asked = trace.block_tokens, int(trace.input_tokens[request])
        total = asked + int(trace.output_tokens[request])
        has_output = trace.prompt_blocks[request] < len(chain)
        whole = chain[: (total if has_output else asked) // size]
        # An engine computes at least one token.
        return DeviceUse(whole, device.lookup(whole[: max(0, asked - 1) // size]), -(-total // size))

    def promote(self, prompt: list[OffloadKey], context: ReqContext) -> tuple[int, int, npt.NDArray[np.bool_]]:
        """Returns how many leading blocks of ``prompt`` can be loaded, how many of them were promoted from disk, and
        which of all are in the host then."""
        manager = self.manager
        for _ in range(MAX_POLLS):
            found = manager.lookup(prompt, context)
            if found is not None:
                break
            manager.poll()
        else:
            raise IntegrityError("a request waited forever for blocks on disk")
        ready = self.host.table.states(prompt) == HIT
        from_disk = min(found, sum(map(len, manager.release_request(context).values())))
        return found, from_disk, ready


class ExclusiveRun(Run):
    """A replay in which host memory does not repeat what the device holds. As when serving, the blocks of requests with
    hints are stored at once, because hints concern blocks in host memory, and not again when they leave the device."""

    def make_managers(self) -> None:
        super().make_managers()
        self._noted: set[int] = set()
        """What is stored when it leaves the device, by its ids in the trace."""

    def serve(self, request: int, chain: list[OffloadKey], prompt: list[OffloadKey]) -> None:
        host, manager, device = self.host, self.manager, self.device
        assert device is not None
        context = self.context(request) if self.has_contexts else None
        use = self.device_use(request, device)
        loaded_to = self.find(prompt, use.hits, context)
        loading = prompt[use.hits : loaded_to]
        lease = host.prepare_load(loading, context)
        left, computed = device.serve(*use), set(use.chain)
        # As in an engine: the blocks that are loaded are pinned while others leave the device for them. If these are
        # many, it is done in pieces.
        size, num_loaded = piece_blocks(host.num_blocks), len(loading)
        has_hints = context is not None and context.hints is not None
        if sum(block in self._noted for block in left[:num_loaded]) <= size:
            size = max(1, num_loaded)
        for start in range(0, num_loaded, size):
            end = start + size
            self._leave(left[start:end], computed)
            host.complete_load(replace(lease, slots=lease.slots[start:end]))
            if end < num_loaded and not has_hints:
                manager.note_device(held=loading[start:end])
        self._leave(left[num_loaded:], computed)
        is_stored = self.tier is not None or has_hints
        stored = self.store(chain[: self.capacity], context)[0] if is_stored else ()
        self.end(chain, stored, context)
        if not has_hints:
            self._noted.update(use.chain)
            manager.note_device(held=self._keys(use.chain))

    def _leave(self, left: list[int], computed: set[int]) -> None:
        """Stores blocks that have left the device, unless the request has ``computed`` them again."""
        host, manager, noted = self.host, self.manager, self._noted
        manager.note_device(left=self._keys([block for block in left if block != NOTHING]))
        # They leave from the tail of their chain. If there is not room for all, the heads are stored.
        lost = self._keys([block for block in reversed(left) if block in noted and block not in computed])
        noted.difference_update(left)
        absent = [key for key in lost if key not in host.table]
        if (room := host.num_available_blocks) < len(absent) and self.tier is None:
            host.history.misses.record(absent[room:], MissReason.NO_ROOM)
        self.store(absent[:room], None, Offer.LEAVING)

    def _keys(self, blocks: list[int]) -> list[OffloadKey]:
        return self.trace.keys_of(np.array(blocks, dtype=np.int64)) if blocks else []


def result_of(run: Run, model: ModelShape, speeds: Speeds, seconds: float) -> ReplayResult:
    """Returns what a replay has found that took ``seconds``."""
    trace, config, tally = run.trace, run.config, run.tally
    asked = trace.input_tokens
    hits = np.frombuffer(tally.hits, dtype=np.int64).reshape(-1, 3).T
    # Row t: the tokens of each prompt that tier t and the tiers above it have.
    reach: Ints = np.minimum(np.cumsum(hits, axis=0) * trace.block_tokens, asked)
    device, host, disk = np.diff(reach, axis=0, prepend=0)
    all_flops = _flops(model, np.zeros_like(asked), asked)
    counts = run.take_counts()
    tally.evicted += int(counts.get("evicted_blocks", 0))
    ttft = ttft_seconds(model, speeds, asked, device, host, disk)
    p50, p95 = np.percentile(ttft, [50, 95]).tolist() if len(ttft) else (0.0, 0.0)
    return ReplayResult(
        **{field.name: getattr(config, field.name) for field in fields(config)},
        requests=trace.num_requests,
        accesses=trace.num_accesses,
        prompt_tokens=int(asked.sum()),
        saved_flops_pct=_percent(_flops(model, np.zeros_like(asked), reach[2]), all_flops),
        block_hits=tally.block_hits,
        stored_blocks=tally.stored,
        evicted_blocks=tally.evicted,
        dropped_writes=int(counts.get("tier_dropped_writes:disk", 0)),
        misses=dict(tally.misses.most_common()),
        tiers=_tier_uses(run, model, reach, hits.sum(axis=1).tolist(), all_flops),
        ttft_p50_s=p50,
        ttft_p95_s=p95,
        seconds=seconds,
        device_tokens=device,
        host_tokens=host,
        disk_tokens=disk,
        tenants=_by_tenant(trace, config.contract, device + host + disk),
    )


def _tier_uses(run: Run, model: ModelShape, reach: Ints, found: list[int], all_flops: float) -> tuple[TierUse, ...]:
    """Returns the use of each tier. ``reach[t]``: the tokens of each prompt that tier t and those above it have;
    ``found[t]``: the blocks found in tier t."""
    trace, config, tally, tier = run.trace, run.config, run.tally, run.tier
    block_bytes = model.bytes_per_token * trace.block_tokens
    prompt_tokens = int(trace.input_tokens.sum())
    written, read = (0, 0) if tier is None else (tier.num_written, tier.num_read)
    rows = (
        ("device", config.device_blocks, 0, 0, 0 if run.device is None else run.device.num_evicted),
        ("host", config.capacity_blocks, tally.stored + read, found[1] + found[2] + written, tally.evicted),
        ("disk", config.disk_blocks, written, read, 0 if tier is None else tier.stats().num_evicted),
    )
    uses = []
    start = np.zeros_like(trace.input_tokens)
    for (name, capacity, blocks_in, blocks_out, evicted), end in zip(rows, reach, strict=True):
        tokens = int((end - start).sum())
        uses.append(
            TierUse(
                name,
                capacity,
                tokens,
                _percent(tokens, prompt_tokens),
                _percent(_flops(model, start, end), all_flops),
                int(blocks_in * block_bytes),
                int(blocks_out * block_bytes),
                blocks_in / trace.num_distinct if trace.num_distinct else 0.0,
                evicted,
            )
        )
        start = end
    return tuple(use for use in uses if use.capacity_blocks)


def _device(trace: Trace, num_blocks: int) -> DeviceCache:
    needed: Ints = -(-(trace.input_tokens + trace.output_tokens) // trace.block_tokens)
    longest = int(needed.max(initial=0))
    if longest > num_blocks:
        raise ConfigError(
            "device_blocks",
            num_blocks,
            f"the longest request needs {longest} blocks of the device at once, so no engine could serve it",
            f"use {longest} or more, or leave the device out",
        )
    used = min(num_blocks, max(1, int(needed.sum())))
    if used > MAX_DEVICE_BLOCKS:
        raise ConfigError("device_blocks", num_blocks, f"a replay supports at most {MAX_DEVICE_BLOCKS:,}", "use fewer")
    return DeviceCache(used, trace.num_distinct)


@dataclass(frozen=True, slots=True)
class _TraceShares(Shares):
    """Shares of the tenants of a trace, whose keys do not name them."""

    tenants_of_keys: Callable[[Keys], int | list[int]] = field(kw_only=True)

    def tenants_of(self, keys: Keys) -> int | list[int]:
        return self.tenants_of_keys(keys)


def _shares(trace: Trace, contract: Contract, tier: str, num_blocks: int) -> Shares:
    """Returns the shares of ``tier``, in blocks. A block belongs to the tenant that asks for it first."""
    made = contract.shares(tier, num_blocks)
    # Recorded traces have hashes in place of names.
    index = {each: i for i, name in enumerate(made.names) for each in (name, str(name_hash(name)))}
    other = len(made.names) - 1
    of_name = np.array([index.get(name, other) for name in trace.tenant_names] + [other])
    owners = np.full(trace.num_distinct, other, dtype=np.int64)
    for request in range(trace.num_requests - 1, -1, -1):
        owners[trace.ranks_of(trace.keys_of(trace.chain(request)))] = of_name[trace.tenants[request]]

    def tenants_of(keys: Keys) -> int | list[int]:
        found = owners[trace.ranks_of(keys)]
        return int(found[0]) if len(found) and (found == found[0]).all() else found.tolist()

    return _TraceShares(
        made.names, {}, made.guaranteed, made.quota, made.num_blocks, made.retain, tenants_of_keys=tenants_of
    )


def _by_tenant(trace: Trace, contract: Contract, found: Ints) -> tuple[TenantFound, ...]:
    rows = []
    names = {str(name_hash(tenant.name)): tenant.name for tenant in contract.tenants}
    for i, name in enumerate(trace.tenant_names):
        own = trace.tenants == i
        asked, hit = int(trace.input_tokens[own].sum()), int(found[own].sum())
        rows.append(TenantFound(names.get(name, name), int(np.count_nonzero(own)), asked, hit, _percent(hit, asked)))
    return tuple(rows)


def _leading(ready: npt.NDArray[np.bool_]) -> int:
    if not len(ready):
        return 0
    first = int(ready.argmin())
    return len(ready) if ready[first] else first


def _flops(model: ModelShape, start: Ints, end: Ints) -> float:
    flops: Floats = model.prefill_flops(start.astype(np.float64), end.astype(np.float64))
    return float(flops.sum())


def _percent(part: float, whole: float) -> float:
    return 100.0 * part / whole if whole else 0.0

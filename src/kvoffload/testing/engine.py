"""A small paged LLM engine that checks every byte it attends to.

It has what makes offloading hard: a prefix cache, chunked prefill, preemption, aborts, asynchronous loads,
scheduling one step ahead of the results, several KV cache groups whose blocks slide out of windows and are handed
out again, and several ranks that copy at their own speed. Its "KV" is no mathematics: the bytes of a position are a
function of all tokens up to it (in draft layers also of the one after it), of rank, group and layer, and of the
version of the weights, so a wrong, stale or torn block is noticed at the first token that attends to it. It drives
the real scheduler half, manager and worker halves; neither torch nor a model is needed. One seed replays a whole run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.abc import BlockHash, ByteArray, KVGroup, OffloadingManager, PageGroup, ScheduledStep, Tier
from kvoffload.cache.admission import FilterReusedOffloadingManager
from kvoffload.cache.keys import hash_blocks
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.slots import HostBackend
from kvoffload.connector.control import PARAM
from kvoffload.connector.messages import StepMeta, WorkerReport
from kvoffload.connector.scheduler import MAX_WAITS_PER_REQUEST, OffloadingConnectorScheduler
from kvoffload.connector.worker import Finished, OffloadingConnectorWorker
from kvoffload.host.pool import padded_slot_bytes
from kvoffload.testing.faults import FailingTransfer, SlowTransfer
from kvoffload.tiers.manager import TieredOffloadingManager
from kvoffload.transfer.inline import InlineTransfer

Words: TypeAlias = npt.NDArray[np.uint64]
Table: TypeAlias = list[int]
"""Device blocks of one request in one group, from its first token on."""

TOKEN_BYTES = 8
"""KV bytes of one token in one layer: one word."""
SPREAD = 0x9E3779B97F4A7C15
"""An odd number that spreads small ones over a word."""
NULL_BLOCK = 0
"""In a table: a block that no token of the request attends to any more."""
STEP_S = 0.001
"""What a step takes."""
MAX_STEPS = 10_000
"""A run that takes longer has hung."""
MAX_RESET_STEP = 200
"""Resets make requests start again; after this step there are none, so that every run ends."""


WISHES: tuple[Mapping[str, Any], ...] = ({"store": False}, {"load": False}, {"max_tokens": 0}, {"max_tokens": 13})
"""What clients may ask for."""


class WrongBytes(AssertionError):
    """A request attended to KV that is not its own."""


class Hang(AssertionError):
    """Requests did not finish within the steps that were allowed."""


class BrokenPromise(AssertionError):
    """A load that was offered and accepted could not even be started."""


class Leak(AssertionError):
    """Something was still held when all requests were done."""


class Late(AssertionError):
    """A request was told to wait although its deadline had passed."""


class SwitchedOff(Leak):
    """The connector has switched itself off; but for that, nothing is wrong with the engine."""


@dataclass
class Clock:
    """Simulated time in seconds."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class LowerTiers:
    """What lies below the host of a ModelEngine; without more, nothing."""

    lookup_deadline_ms = 100.0
    load_only_if_faster = False

    def make(self, pools: Sequence[ByteArray]) -> Sequence[Tier]:
        """The tiers. Called once, with each rank's pool."""
        return []

    def tick(self) -> None:
        """Some time passes for the tiers' threads. Called several times a step."""

    def settle(self) -> None:
        """Called when all requests have ended: what the tiers have begun comes to its end."""


@dataclass(frozen=True)
class Scenario:
    """One engine and its workload. Sizes in blocks are device blocks; chances are per step."""

    seed: int = 0
    num_layers: int = 2
    """Of each group."""
    block_size: int = 4
    num_device_blocks: int = 20
    """Shared by all groups, the null block included."""
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
    sleep_chance: float = 0.0
    """Of a sleep, with which weights may change, before it, meanwhile and right after it."""
    update_chance: float = 0.0
    """Of new weights without a reset of the connector."""
    keeps_device_cache: bool = False
    """With new weights the engine's own cache stays as it is, and is emptied some time later."""
    copy_chance: float = 0.4
    """Of the first rank; the others have speeds of their own."""
    copy_failure_rate: float = 0.0
    remote_decode_rate: float = 0.0
    wishes_rate: float = 0.0
    """Requests whose client limits what is stored and loaded."""
    groups: tuple[KVGroup, ...] = ()
    """None: one group of full attention with ``block_size`` and ``block_size_factor``."""
    hash_block_size: int | None = None
    """None: the most tokens that divide every group's blocks."""
    num_ranks: int = 1
    tensor_parallel: bool = False
    """Every rank holds its share of every layer. Otherwise the ranks share out the layers."""
    documents_seed: int | None = None
    """Engines with the same one are asked about the same documents. None: ``seed``."""

    @classmethod
    def random(cls, seed: int) -> Scenario:
        """A scenario chosen by ``seed``, small enough that blocks are short everywhere."""
        rng = Random(seed)
        factor = rng.choice((1, 1, 2, 3, 4))
        block_size = rng.choice((1, 2, 4))
        document_tokens, max_new_tokens = rng.randint(8, 56), rng.choice((1, 6, 18))
        longest = (document_tokens + cls.max_question_tokens + max_new_tokens) // block_size + 1
        one_group = cls(
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
            policy=rng.choice(("lru", "auto") if seed % 2 else ("auto", "arc")),
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
        return one_group.with_groups(random_groups(rng), rng) if rng.random() < 0.65 else one_group.with_ranks(rng)

    def with_groups(self, groups: tuple[KVGroup, ...], rng: Random) -> Scenario:
        """The same workload on ``groups``, with ranks drawn and with device blocks for one request at least."""
        longest = self.document_tokens + self.max_question_tokens + self.max_new_tokens
        need = sum(_most_blocks(group, longest, self.max_tokens_per_step) for group in groups)
        return dataclasses.replace(
            self,
            groups=groups,
            num_device_blocks=1 + need + rng.randint(len(groups), need),
            num_host_blocks=self.num_host_blocks * len(groups),
            hash_block_size=rng.choice((None, None, 1)),
            wishes_rate=rng.choice((0.0, 0.0, 0.3)),
        ).with_ranks(rng)

    def with_ranks(self, rng: Random) -> Scenario:
        num_ranks, tensor_parallel = rng.choice((1, 1, 1, 2, 3)), rng.random() < 0.5
        if not tensor_parallel:
            num_ranks = min(num_ranks, self.num_layers * max(1, len(self.groups)))
        return dataclasses.replace(self, num_ranks=num_ranks, tensor_parallel=tensor_parallel)


def random_groups(rng: Random) -> tuple[KVGroup, ...]:
    """One to four groups whose blocks line up every dozen tokens at the latest, at most one of them a draft's."""
    while True:
        groups = tuple(_random_group(rng) for _ in range(rng.choice((1, 2, 2, 3, 4))))
        aligned = math.lcm(*(group.block_tokens for group in groups)) <= 12
        if aligned and sum(group.draft for group in groups) <= 1:
            return groups


def _random_group(rng: Random) -> KVGroup:
    size, factor, kind = rng.choice((1, 2, 4)), rng.choice((1, 1, 2, 3)), rng.random()
    draft = rng.random() < 0.2
    if kind < 0.4:
        return KVGroup(size, factor, draft=draft)
    if kind < 0.8:
        return KVGroup(size, factor, sliding_window=rng.choice((1, 2, 3, 5, 8, 17)), draft=draft)
    return KVGroup(size, factor, attention_chunk=rng.choice((1, 3, 4, 6, 8, 16)))


def _most_blocks(group: KVGroup, longest: int, max_tokens_per_step: int) -> int:
    """Device blocks that a request of ``longest`` tokens holds at most: what a step attends to and computes, and what
    the step before it computes when its results are not there yet."""
    span = group.sliding_window or group.attention_chunk
    tokens = longest if span is None else min(longest, span + 2 * max_tokens_per_step)
    return -(-tokens // group.device_block_size) + 1


def first_attended(group: KVGroup, position: int) -> int:
    """The first token that the token at ``position`` attends to: the engine's own reading of ``group``."""
    if group.sliding_window is not None:
        return max(0, position - (group.sliding_window - 1))
    if group.attention_chunk is not None:
        return position - position % group.attention_chunk
    return 0


@dataclass(eq=False)
class EngineRequest:
    """A request, as the engine and the connector see it."""

    request_id: str
    tokens: list[int]
    """What is known: the prompt and the sampled tokens that have been reported back."""
    max_new_tokens: int
    hash_block_size: int
    version: int
    """Of the weights its KV is computed with."""
    kv_transfer_params: Mapping[str, Any] | None = None
    num_computed_tokens: int = 0
    block_hashes: list[BlockHash] = field(default_factory=list)
    real_tokens: list[int] = field(default_factory=list)
    """``tokens`` and those that were sampled but not yet reported back."""
    blocks: list[Table] = field(default_factory=list)
    """A table a group; empty while it holds no blocks."""
    num_cached: list[int] = field(default_factory=list)
    """A group, how many of its blocks were given to the prefix cache."""
    num_prompt_tokens: int = 0
    loading: bool = False
    waiting_since: float | None = None
    num_waits: int = 0
    """When the connector first told it to ask again, since it was last given blocks."""
    in_flight: int = 0
    """Steps under way that compute for it."""
    tokens_in_flight: int = 0
    """Tokens that these compute."""
    finished: bool = False
    old_blocks: dict[tuple[int, int], int] = field(default_factory=dict)
    """Blocks that it found in the engine's own cache with the KV of other weights: group and index, and the version."""
    _contents: dict[int, Content] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)
        self.real_tokens = list(self.tokens)
        self.append([])

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def append(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)
        done = len(self.block_hashes) * self.hash_block_size
        parent = self.block_hashes[-1] if self.block_hashes else b""
        self.block_hashes += hash_blocks(self.tokens[done:], self.hash_block_size, parent)

    @property
    def wanted_tokens(self) -> int:
        return self.num_prompt_tokens + self.max_new_tokens

    @property
    def processed_tokens(self) -> int:
        """Computed tokens that no step under way may attend from any more."""
        return self.num_computed_tokens - self.tokens_in_flight

    def words(self, g: int, group: KVGroup, end: int) -> Words:
        """The KV that its first ``end`` positions must have in group ``g``, without salts."""
        words = self._words(self.version, group)[:end]
        if any(old_group == g for old_group, _ in self.old_blocks):
            words, size = words.copy(), group.device_block_size
            for (old_group, index), version in self.old_blocks.items():
                if old_group == g:
                    block = slice(index * size, (index + 1) * size)
                    words[block] = self._words(version, group)[:end][block]
        return words

    def _words(self, version: int, group: KVGroup) -> Words:
        content = self._contents.setdefault(version, Content(version))
        content.extend(self.real_tokens)
        return content.draft_words if group.draft else content.words


Batch: TypeAlias = list[tuple[EngineRequest, int]]
"""The requests that compute in a step, and how many tokens each."""


class Content:
    """The KV of a sequence, a word a position: ``words`` are a function of the version and of all tokens up to the
    position, ``draft_words`` also of the token after it. Layers and ranks add salts of their own."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.words = self.draft_words = _words([])
        self._state = _digest(f"version {version}".encode())

    def extend(self, tokens: Sequence[int]) -> None:
        done, end = len(self.words), len(tokens) - 1
        if end <= done:
            return
        new = []
        for token in tokens[done:end]:
            self._state = _digest(self._state + token.to_bytes(4, "little"))
            new.append(int.from_bytes(self._state, "little"))
        after = [(token + 1) * SPREAD % 2**64 for token in tokens[done + 1 : end + 1]]
        self.words = np.concatenate((self.words, _words(new)))
        self.draft_words = np.concatenate((self.draft_words, _words(new) ^ _words(after)))


def _words(words: Sequence[int]) -> Words:
    return np.array(words, np.uint64)


def _digest(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=TOKEN_BYTES).digest()


@dataclass(slots=True)
class _Allocation:
    """The blocks of a request, as the connector asks for them."""

    tables: list[Table]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return tuple(list(table) for table in self.tables)


BlockName: TypeAlias = tuple[int, BlockHash]
"""What the prefix cache knows a device block by: its group, and the hash that covers all its bytes depend on."""


class BlockPool:
    """Device blocks of all groups with reference counts and a prefix cache; freed blocks keep their content, and their
    place in the cache, until they are handed out again."""

    def __init__(self, num_blocks: int, prefix_caching: bool) -> None:
        self.refs = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.block_of: dict[BlockName, int] = {}
        self.name_of: dict[int, BlockName] = {}
        self.prefix_caching = prefix_caching

    def take(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.free.pop(block, None)
            self.refs[block] += 1

    def new(self, n: int) -> list[int]:
        blocks = [self.free.popitem(last=False)[0] for _ in range(n)]
        for block in blocks:
            self.refs[block] = 1
            name = self.name_of.pop(block, None)
            if name is not None:
                del self.block_of[name]
        return blocks

    def release(self, blocks: Sequence[int], at_once: bool = False) -> None:
        """``at_once``: they are the next to be handed out again."""
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free[block] = None
                if at_once:
                    self.free.move_to_end(block, last=False)

    def cache(self, block: int, name: BlockName) -> bool:
        """Whether the block is new there."""
        is_new = self.prefix_caching and name not in self.block_of and block not in self.name_of
        if is_new:
            self.block_of[name] = block
            self.name_of[block] = name
        return is_new

    def forget_all(self) -> None:
        self.block_of.clear()
        self.name_of.clear()


class Rank:
    """One worker process: its share of the layers, its host pool and its half of the connector.

    All groups lie in the same memory, as an engine lays them out: a device block that goes from one group to another is
    overwritten. ``copy_chance`` is its transfer's.
    """

    def __init__(self, s: Scenario, groups: Sequence[KVGroup], number: int, copy_chance: float) -> None:
        self.number = number
        self._groups = groups
        layers = [_layers_of(s, len(groups), g, number) for g in range(len(groups))]
        memory = (max(map(len, layers)), s.num_device_blocks, max(group.device_block_size for group in groups))
        self.memory: Words = np.zeros(memory, np.uint64)
        self._pages = [self.memory[: len(own), :, : g.device_block_size] for g, own in zip(groups, layers, strict=True)]
        self._salts = [
            _words([_salt(number, g, layer) for layer in own]).reshape(-1, 1) for g, own in enumerate(layers)
        ]
        page_groups = [
            PageGroup(list(pages.view(np.uint8)), group.block_size_factor)
            for group, pages in zip(groups, self._pages, strict=True)
        ]
        slot_bytes = padded_slot_bytes(max(group.block_bytes for group in page_groups))
        self.host: ByteArray = np.zeros((s.num_host_blocks, slot_bytes), dtype=np.uint8)
        seed = s.seed + (number << 40)
        self.failing = FailingTransfer(InlineTransfer(page_groups, self.host), s.copy_failure_rate, seed)
        self.transfer = SlowTransfer(self.failing, seed + 1, copy_chance)
        self.worker = OffloadingConnectorWorker(self.transfer)
        self.loads = 0
        """Loads that went well here."""

    def step(self, meta: StepMeta, batch: Batch, loads_first: bool) -> tuple[Finished, WorkerReport | None]:
        self.worker.begin_step(meta)
        if loads_first:
            self.worker.start_loads(meta)
        for request, n in batch:
            self.transfer.tick()
            self._compute(request, request.num_computed_tokens - n, request.num_computed_tokens)
        if not loads_first:
            self.worker.start_loads(meta)
        self.worker.end_step(meta)
        finished = self.worker.get_finished(meta)
        self.loads += len(finished.loaded - finished.failed.keys())
        return finished, self.worker.take_report()

    def _compute(self, request: EngineRequest, start: int, end: int) -> None:
        """Checks every byte that the tokens from ``start`` to ``end`` attend to, and writes theirs."""
        for g, (group, pages, salts) in enumerate(zip(self._groups, self._pages, self._salts, strict=True)):
            if not len(pages):
                continue
            size = group.device_block_size
            want = request.words(g, group, end) ^ salts
            low = first_attended(group, start)
            if low < start:
                first = low // size
                blocks = request.blocks[g][first : -(-start // size)]
                have = pages[:, blocks].reshape(len(pages), -1)[:, low - first * size : start - first * size]
                wrong = have != want[:, low:start]
                if wrong.any():
                    self._complain(request, g, low + int(np.argmax(wrong.any(axis=0))))
            at = np.arange(start, end)
            blocks_of = np.array(request.blocks[g])[at // size]
            pages[:, blocks_of, at % size] = want[:, start:]

    def _complain(self, request: EngineRequest, g: int, position: int) -> None:
        block = request.blocks[g][position // self._groups[g].device_block_size]
        raise WrongBytes(
            f"request {request.request_id} attends to wrong bytes at position {position} of group {g} "
            f"({self._groups[g]}), device block {block}, rank {self.number}"
        )


def _layers_of(s: Scenario, num_groups: int, g: int, rank: int) -> list[int]:
    """The layers of group ``g`` that ``rank`` holds: all, or those of its stretch of the model."""
    total = s.num_layers * num_groups
    if not s.tensor_parallel and s.num_ranks > total:
        raise ValueError(f"{total} layers are too few for {s.num_ranks} ranks")
    depth = [layer * num_groups + g for layer in range(s.num_layers)]
    return [layer for layer in range(s.num_layers) if s.tensor_parallel or depth[layer] * s.num_ranks // total == rank]


def _salt(rank: int, g: int, layer: int) -> int:
    return int.from_bytes(_digest(f"{rank}/{g}/{layer}".encode()), "little")


class ModelWatch:
    """A watch over the weights of one rank of ``engine``. Answers take their time, and some changes are not seen by
    some ranks, but by the first one always."""

    def __init__(self, engine: ModelEngine, rank: int) -> None:
        self._engine = engine
        self._rank = rank
        self._random = Random(engine.scenario.seed + (rank << 20))
        self._accepted = self._compared = engine.version

    def accept(self) -> None:
        self._accepted = self._compared = self._engine.version

    def begin(self) -> None:
        overlooks = self._rank > 0 and (self._engine.version + self._rank) % 3 == 0
        self._compared = self._accepted if overlooks else self._engine.version

    def poll(self) -> bool | None:
        return self._compared != self._accepted if self._random.random() < 0.5 else None

    def note_new(self) -> None:
        pass

    def are_same(self) -> bool:
        return self._accepted == self._engine.version


@dataclass(slots=True)
class _Results:
    """What one step has brought. The engine takes it in after the step, in async scheduling after the next one."""

    batch: Batch
    finished: list[Finished] = field(default_factory=list)
    """One a rank."""
    report: WorkerReport | None = None


class ModelEngine:
    """Runs a scenario. ``patch`` may change the connector's halves first: to plant a bug, say. ``lower`` has the tiers
    below the host, ``clock`` goes on from where it stands, ``version`` is that of the weights; ``new_versions`` has
    those that resets bring, by default the numbers after it.

    After ``run``: ``outputs`` holds each finished request's tokens, ``hits`` the tokens loaded from the
    host, ``steps`` the steps it took; ``loaded_blocks`` and ``partial_loads`` have, a group, the device blocks of all
    loads and the loads that began inside an offloaded block; ``slid_out`` counts the blocks that left a window.
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
    ) -> None:
        self.scenario = s = scenario
        self.random = Random(s.seed)
        self.version = version
        self._new_versions = new_versions or itertools.count(version + 1)
        self.clock = clock or Clock()
        self.groups = s.groups or (KVGroup(s.block_size, s.block_size_factor),)
        self.hash_block_size = s.hash_block_size or math.gcd(*(group.device_block_size for group in self.groups))
        self._hit_tokens = math.lcm(*(group.device_block_size for group in self.groups))
        """A hit of the engine's own cache is a multiple of it."""
        self._load_tokens = math.lcm(*(group.block_tokens for group in self.groups))
        self.pool = BlockPool(s.num_device_blocks, s.prefix_caching)
        speeds = Random(s.seed)
        self.ranks = [
            Rank(s, self.groups, rank, speeds.choice((0.1, 0.4, 1.0)) if rank else s.copy_chance)
            for rank in range(s.num_ranks)
        ]
        self.backend = HostBackend(max(group.block_tokens for group in self.groups), s.num_host_blocks)
        self.policy_manager = PolicyOffloadingManager(
            self.backend, make_policy(s.policy, s.num_host_blocks), clock=self.clock
        )
        manager: OffloadingManager = self.policy_manager
        self.lower = lower or LowerTiers()
        self.tiered: TieredOffloadingManager | None = None
        if lower is not None:
            manager = self.tiered = self._on_top_of(lower)
        if s.store_threshold is not None:
            manager = FilterReusedOffloadingManager(manager, s.store_threshold)
        self.scheduler = OffloadingConnectorScheduler(
            manager,
            groups=self.groups,
            hash_block_size=s.hash_block_size,
            num_workers=s.num_ranks,
            share_loads=s.prefix_caching,
            load_deadline_ms=s.load_deadline_ms,
            may_sleep=s.sleep_chance > 0,
            clock=self.clock,
        )
        self.waiting: list[EngineRequest] = []
        self.running: list[EngineRequest] = []
        self.held: dict[str, EngineRequest] = {}
        """Finished requests whose blocks the connector has asked to keep."""
        self.outputs: dict[str, list[int]] = {}
        self.hits = 0
        self.steps = 0
        self.loaded_blocks = [0] * len(self.groups)
        self.partial_loads = [0] * len(self.groups)
        self.slid_out = 0
        self._unreported: list[_Results] = []
        """What steps have brought that is not reported back yet, oldest first."""
        self._deferred: list[tuple[int, list[int]]] = []
        """Blocks to free once so many steps have been reported."""
        self._preempted: set[str] = set()
        """Requests that a reset preempted, to be told with the next step, which may resume them already."""
        self._reported = 0
        self._executed = 0
        self._aborted_loading: list[EngineRequest] = []
        self._loaded: dict[str, set[int]] = {}
        """Requests whose load has ended on some ranks, and on which."""
        self._load_failed: set[str] = set()
        """Those of them whose load failed on some rank."""
        self._released: dict[str, set[int]] = {}
        """Held requests that some ranks have released, and which."""
        self._version_of: dict[int, int] = {}
        """Of blocks in the engine's own cache: the weights their KV was computed with."""
        if s.update_chance or s.sleep_chance:
            for rank in self.ranks:
                rank.worker.weights = ModelWatch(self, rank.number)
        self._has_woken_up = False
        """Since the last step."""
        self.is_full = False
        """Whether no request is given device blocks, whatever is free."""
        self._todo = self._make_requests()
        if patch is not None:
            patch(self)

    def _on_top_of(self, lower: LowerTiers) -> TieredOffloadingManager:
        full = sum(group.is_full for group in self.groups)
        return TieredOffloadingManager(
            self.policy_manager,
            lower.make([rank.host for rank in self.ranks]),
            tokens_per_block=[group.block_tokens / max(1, full) for group in self.groups],
            groups=self.groups,
            lookup_deadline_ms=lower.lookup_deadline_ms,
            load_deadline_ms=self.scenario.load_deadline_ms,
            load_only_if_faster=lower.load_only_if_faster,
            clock=self.clock,
        )

    # What a run is made of.

    def run(self, num_steps: int | None = None) -> None:
        """Raises WrongBytes, BrokenPromise, Late, Hang or Leak, or returns with every request finished or aborted; or,
        if that comes first, after ``num_steps`` in the middle of everything."""
        while self._todo or self.waiting or self.running or self._unreported or self.scheduler.has_pending_work():
            if self.steps == num_steps:
                return
            if self.steps > MAX_STEPS:
                raise Hang(f"after {MAX_STEPS} steps: {len(self.waiting)} waiting, {len(self.running)} running")
            if self._todo and self.random.random() < 0.4:
                self.waiting.append(self._todo.pop(0))
            if self.waiting + self.running and self.random.random() < self.scenario.abort_chance:
                self._finish(self.random.choice(self.waiting + self.running))
            if self.steps < MAX_RESET_STEP and self.random.random() < self.scenario.reset_chance:
                self._reset(preempt=self.random.random() < 0.5)
            if self.scenario.sleep_chance and self.steps < MAX_RESET_STEP:
                self._sleep()
            self._update(preempt=True)
            self.step()
        self._settle()
        self._check_nothing_held()

    def _settle(self) -> None:
        """Past every deadline, with nothing under way below the host."""
        if self.tiered is not None:
            self.clock.now += self.scenario.load_deadline_ms / 1000
            for _ in range(MAX_STEPS):
                self.lower.settle()
                self.tiered.poll()
                if not any(lane.writing or lane.flights for lane in self.tiered._lanes):
                    break

    def step(self) -> None:
        """One step of the engine: schedule, compute, and take in the results, perhaps one step late."""
        self.steps += 1
        self.clock.now += STEP_S
        self.lower.tick()
        step, batch = self._schedule()
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

    def _make_requests(self) -> list[EngineRequest]:
        s, rng = self.scenario, self.random
        source = rng if s.documents_seed is None else Random(s.documents_seed)
        documents = [[source.randrange(1000) for _ in range(s.document_tokens)] for _ in range(s.num_documents)]
        requests = []
        for i in range(s.num_requests):
            document = rng.choice(documents)
            prompt = document[: rng.randint(1, len(document))] if rng.random() < 0.3 else list(document)
            prompt += [rng.randrange(1000) for _ in range(rng.randint(0, s.max_question_tokens))]
            params: dict[str, Any] | None = {"do_remote_decode": True} if rng.random() < s.remote_decode_rate else None
            if s.wishes_rate and rng.random() < s.wishes_rate:
                params = {PARAM: rng.choice(WISHES), **(params or {})}
            new = rng.randint(1, s.max_new_tokens)
            requests.append(EngineRequest(f"r{i}", prompt, new, self.hash_block_size, 0, params))
        return requests

    # The scheduler.

    def _schedule(self) -> tuple[ScheduledStep, Batch]:
        s = self.scenario
        budget = s.max_tokens_per_step
        scheduled: dict[str, int] = {}
        block_ids: dict[str, tuple[list[int], ...]] = {}
        replaced: set[str] = set()
        preempted, self._preempted = self._preempted, set()
        known_preempted, starved = len(preempted), False
        batch: Batch = []
        for request in list(self.running):
            if request not in self.running or budget == 0:
                continue
            n = min(budget, self._next_tokens(request))
            if n <= 0:
                continue
            new = self._grow(request, n, preempted, keep=[r for r, _ in batch])
            if new is None:
                starved = True
                continue
            scheduled[request.request_id] = n
            block_ids[request.request_id] = tuple(new)
            batch.append((request, n))
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
            needed = sum(self._lacking(request, n))
            while needed > len(self.pool.free) and not self.running and self._take_from_later(request):
                pass
            if needed > len(self.pool.free):
                break
            self._extend(request, n)
            if request.num_computed_tokens:
                # As vLLM does: told of again, now that it runs after its load.
                self.scheduler.update_state_after_alloc(request, _Allocation(request.blocks), 0)
            self.waiting.remove(request)
            self.running.append(request)
            scheduled[request.request_id] = n
            block_ids[request.request_id] = tuple(list(table) for table in request.blocks)
            replaced.add(request.request_id)
            batch.append((request, n))
            budget -= n
        return ScheduledStep(scheduled, block_ids, frozenset(replaced), preempted), batch

    def _take_from_later(self, request: EngineRequest) -> bool:
        """Waiting requests that hold loaded blocks could starve each other: the last one gives way."""
        holders = [r for r in self.waiting if _held_blocks(r) and not r.loading and r is not request]
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

    def _lacking(self, request: EngineRequest, n: int) -> list[int]:
        """Blocks that it needs for its next ``n`` tokens, a group."""
        end = request.num_computed_tokens + n
        return [
            max(0, -(-end // group.device_block_size) - len(table))
            for group, table in zip(self.groups, request.blocks, strict=True)
        ]

    def _extend(self, request: EngineRequest, n: int) -> list[list[int]]:
        new = [self.pool.new(lacking) for lacking in self._lacking(request, n)]
        for table, blocks in zip(request.blocks, new, strict=True):
            table += blocks
        return new

    def _grow(
        self, request: EngineRequest, n: int, preempted: set[str], keep: list[EngineRequest]
    ) -> list[list[int]] | None:
        self._slide(request)
        needed = sum(self._lacking(request, n))
        while needed > len(self.pool.free):
            victims = [r for r in self.running if r not in keep and not r.in_flight]
            if victims and victims[-1] is not request:
                self._preempt(victims[-1], preempted)
            elif not self._take_from_later(request):
                if victims and not any(r.loading for r in self.waiting):
                    self._preempt(request, preempted)
                return None
        return self._extend(request, n)

    def _slide(self, request: EngineRequest) -> None:
        """Frees the blocks that no token will attend to any more, neither those to come nor those under way."""
        for group, table in zip(self.groups, request.blocks, strict=True):
            end = first_attended(group, request.processed_tokens) // group.device_block_size
            gone = [block for block in table[:end] if block != NULL_BLOCK]
            if gone:
                table[:end] = [NULL_BLOCK] * len(table[:end])
                self.pool.release(gone, at_once=self.random.random() < 0.5)
                self.slid_out += len(gone)

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
        request.old_blocks.clear()
        computed = self._local_hit(request)
        external, is_async = self.scheduler.get_num_new_matched_tokens(request, computed)
        if external is None:
            self._check_wait(request)
            return False
        if request.waiting_since is not None:
            request.waiting_since = None
            request.num_waits += 1
        total = computed + external
        assert is_async == bool(external)
        assert total < request.num_tokens, "no token is left to compute"
        assert not external or total % self._load_tokens == 0 or total == request.num_tokens - 1, f"to {total}?"
        most = _most_loadable(request)
        assert not external or total <= most, f"{total} tokens, where the client allows {most}"
        hits, needed = self._tables_for(request, computed, total)
        idle = sum(self.pool.refs[block] == 0 for table in hits for block in table if block != NULL_BLOCK)
        room = len(self.pool.free) - idle
        if self.is_full or sum(needed) + (0 if external else len(self.groups)) > room:
            return False
        for table in hits:
            self.pool.take([block for block in table if block != NULL_BLOCK])
        request.blocks = [table + self.pool.new(n) for table, n in zip(hits, needed, strict=True)]
        request.num_cached = [len(table) for table in hits]
        for g, table in enumerate(hits):
            for i, block in enumerate(table):
                version = self._version_of[block] if block != NULL_BLOCK else self.version
                if version != self.version:
                    request.old_blocks[g, i] = version
        self.scheduler.update_state_after_alloc(request, _Allocation(request.blocks), external)
        request.num_computed_tokens = total
        request.loading = is_async
        request.num_waits = 0
        self.hits += external
        return True

    def _check_wait(self, request: EngineRequest) -> None:
        if request.waiting_since is None:
            request.waiting_since = self.clock.now
        elif self.clock.now - request.waiting_since > self.scenario.load_deadline_ms / 1000 + STEP_S:
            raise Late(f"seed {self.scenario.seed}, step {self.steps}: {request.request_id} still waits")
        if request.num_waits >= MAX_WAITS_PER_REQUEST:
            raise Late(f"seed {self.scenario.seed}, step {self.steps}: {request.request_id} waits again and again")

    def _local_hit(self, request: EngineRequest) -> int:
        """Leading tokens that the prefix cache holds in all groups: in each, all that the next token attends to."""
        limit = request.num_tokens - 1 if self.scenario.prefix_caching else 0
        for g, group in enumerate(self.groups):
            if group.sliding_window is None and group.attention_chunk is None:
                size, n = group.device_block_size, 0
                while n + size <= limit and self._cached_block(request, g, n // size):
                    n += size
                limit = n
        for n in range(limit // self._hit_tokens * self._hit_tokens, 0, -self._hit_tokens):
            if all(self._holds(request, g, n) for g in range(len(self.groups))):
                return n
        return 0

    def _holds(self, request: EngineRequest, g: int, n: int) -> bool:
        group = self.groups[g]
        first = first_attended(group, n) // group.device_block_size
        return all(self._cached_block(request, g, i) for i in range(first, n // group.device_block_size))

    def _cached_block(self, request: EngineRequest, g: int, index: int) -> int | None:
        name = self._block_name(request, g, index)
        return None if name is None else self.pool.block_of.get(name)

    def _block_name(self, request: EngineRequest, g: int, index: int) -> BlockName | None:
        """What covers all tokens that the bytes of a block depend on: of a draft's, the tokens after it too. So the
        last whole block of a draft group is neither cached nor found."""
        group = self.groups[g]
        last = (index + 1) * (group.device_block_size // self.hash_block_size) - (0 if group.draft else 1)
        return (g, request.block_hashes[last]) if last < len(request.block_hashes) else None

    def _tables_for(self, request: EngineRequest, computed: int, total: int) -> tuple[list[Table], list[int]]:
        """A group: the cached blocks of ``computed`` tokens that the token at ``total`` attends to, with nulls before
        them, and how many blocks must be added for ``total`` tokens."""
        hits: list[Table] = []
        needed = []
        for g, group in enumerate(self.groups):
            size = group.device_block_size
            skipped = first_attended(group, total) // size
            cached = [self._cached_block(request, g, i) for i in range(skipped, computed // size)]
            hits.append([NULL_BLOCK] * skipped + [block for block in cached if block is not None])
            needed.append(-(-total // size) - len(hits[-1]))
        return hits, needed

    # The workers.

    def _execute(self, meta: StepMeta, batch: Batch) -> _Results:
        self._executed += 1
        if meta.broken_loads and not self.scheduler.off:
            raise BrokenPromise(f"seed {self.scenario.seed}, step {self.steps}: load of {sorted(meta.broken_loads)}")
        self._count_loads(meta)
        for request, _ in batch:
            if request.num_computed_tokens == len(request.real_tokens):
                request.real_tokens.append(sample(request.real_tokens))
        results = _Results(batch)
        for rank in self.ranks:
            self.lower.tick()
            try:
                finished, report = rank.step(meta, batch, loads_first=self.random.random() < 0.5)
            except WrongBytes as error:
                raise WrongBytes(f"seed {self.scenario.seed}, step {self.steps}: {error}") from None
            results.finished.append(finished)
            if report is not None:
                results.report = report if results.report is None else results.report.add(report)
        return results

    def _count_loads(self, meta: StepMeta) -> None:
        for spec in meta.loads.values():
            for g, (size, first) in enumerate(zip(spec.device.group_sizes, spec.device.block_indices, strict=True)):
                self.loaded_blocks[g] += size
                self.partial_loads[g] += bool(size and first % self.groups[g].block_size_factor)

    def _report_transfers(self, results: _Results) -> None:
        """What the workers of one step tell: added up for the connector, and counted until every rank has told it."""
        if results.report is not None:
            self.scheduler.update_connector_output(results.report)
        for rank, finished in zip(self.ranks, results.finished, strict=True):
            _add_rank(self._loaded, finished.loaded, rank.number)
            _add_rank(self._released, finished.released, rank.number)
            self._load_failed.update(finished.failed)
        by_id = {request.request_id: request for request in [*self.waiting, *self._aborted_loading]}
        for req_id in self._all_ranks(self._loaded):
            failed = req_id in self._load_failed
            self._load_failed.discard(req_id)
            self._end_load(by_id[req_id], failed)
        for req_id in self._all_ranks(self._released):
            self._release(self.held.pop(req_id))

    def _all_ranks(self, told: dict[str, set[int]]) -> list[str]:
        """Takes out the requests that every rank has told of."""
        complete = [req_id for req_id, ranks in told.items() if len(ranks) == len(self.ranks)]
        for req_id in complete:
            del told[req_id]
        return complete

    def _end_load(self, request: EngineRequest, failed: bool) -> None:
        request.loading = False
        if request.finished:
            self._aborted_loading.remove(request)
            self._release(request)
        elif failed or (request.version != self.version and not self.scenario.update_chance):
            self._release(request)
            request.num_computed_tokens = 0
        else:
            self._cache_blocks(request, request.num_computed_tokens)

    # Results, and the end of requests.

    def _report_tokens(self, batch: Batch) -> None:
        self._reported += 1
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
        due = [blocks for after, blocks in self._deferred if after <= self._reported]
        self._deferred = [entry for entry in self._deferred if entry[0] > self._reported]
        for blocks in due:
            self.pool.release(blocks)

    def _cache_blocks(self, request: EngineRequest, num_tokens: int) -> None:
        if not self.scenario.prefix_caching:
            return
        if request.version != self.version and not self.scenario.keeps_device_cache:
            return
        for g, (group, table) in enumerate(zip(self.groups, request.blocks, strict=True)):
            for i in range(request.num_cached[g], num_tokens // group.device_block_size):
                name = self._block_name(request, g, i)
                if name is None:
                    break
                request.num_cached[g] = i + 1
                if table[i] != NULL_BLOCK and self.pool.cache(table[i], name):
                    self._version_of[table[i]] = request.old_blocks.get((g, i), request.version)

    def _finish(self, request: EngineRequest) -> None:
        request.finished = True
        (self.running if request in self.running else self.waiting).remove(request)
        if request.blocks:
            self._slide(request)
        hold, _ = self.scheduler.request_finished(request, _Allocation(request.blocks).get_block_ids())
        if request.loading:
            self._aborted_loading.append(request)
        elif hold:
            self.held[request.request_id] = request
        else:
            self._release(request)

    def _release(self, request: EngineRequest) -> None:
        """Frees its blocks, but not before the steps under way that may write to them are through."""
        blocks = _held_blocks(request)
        if request.in_flight:
            self._deferred.append((self._executed, blocks))
        else:
            self.pool.release(blocks)
        request.blocks = []

    def _reset(self, preempt: bool) -> None:
        """New weights: caches are emptied; running requests start again, or go on with what they have."""
        self.version = next(self._new_versions)
        self.pool.forget_all()
        if preempt:
            self._preempt_all()
        self.scheduler.reset()

    def _sleep(self) -> None:
        """Perhaps sleeps, or has new weights right after it did."""
        rng = self.random
        if self._has_woken_up and rng.random() < 0.2:
            self._change_weights()
        self._has_woken_up = False
        # As engines do, it waits for the steps under way.
        if self._unreported or rng.random() >= self.scenario.sleep_chance:
            return
        if rng.random() < 0.1:
            self._change_weights()
        self.pool.forget_all()
        self._preempt_all()
        self.scheduler.reset()
        for rank in self.ranks:
            rank.worker.suspend()
        if rng.random() < 0.3:
            self._change_weights()
        if rng.random() < 0.1:
            # It sleeps again before anything was computed.
            self.scheduler.reset()
        for rank in self.ranks:
            rank.worker.resume()
        for request in self.waiting:
            # It may wait as if it had just come.
            request.waiting_since, request.num_waits = None, 0
        self.scheduler.wake_up()
        self._has_woken_up = True

    def _change_weights(self) -> None:
        self.version = next(self._new_versions)
        self.pool.forget_all()

    def _preempt_all(self) -> None:
        for request in reversed(list(self.running)):
            if not request.in_flight:
                self._preempt(request, self._preempted)

    def _update(self, preempt: bool) -> None:
        """Perhaps new weights. ``preempt``: running requests may have to start again."""
        s, rng = self.scenario, self.random
        if not s.update_chance or self.steps >= MAX_RESET_STEP:
            return
        if s.keeps_device_cache and rng.random() < 0.05:
            self.pool.forget_all()
        if rng.random() < s.update_chance:
            self.version = next(self._new_versions)
            if not s.keeps_device_cache:
                self.pool.forget_all()
            if preempt and rng.random() < 0.3:
                self._preempt_all()

    def _start_with_new_weights(self, requests: list[EngineRequest]) -> None:
        """Requests that compute for the first time, with weights that came after they were scheduled, on top of what
        they have."""
        for request in requests:
            computed = request.num_computed_tokens
            if request.version == self.version or computed % self._hit_tokens:
                continue
            for g, group in enumerate(self.groups):
                for i in range(computed // group.device_block_size):
                    request.old_blocks.setdefault((g, i), request.version)
            request.version = self.version

    def _check_nothing_held(self) -> None:
        if self.held or self._aborted_loading or self._deferred or self._loaded or self._released:
            raise Leak("finished requests still hold device blocks")
        if len(self.pool.free) != self.scenario.num_device_blocks - 1:
            raise Leak(f"{self.scenario.num_device_blocks - 1 - len(self.pool.free)} device blocks are not free")
        if self.scheduler.off:
            raise SwitchedOff("a check failed, or a transfer engine broke")
        self.scheduler.manager.check_integrity()
        if len(self.policy_manager._table.slots()) + self.backend.get_num_free_blocks() != self.backend.num_blocks:
            raise Leak("slots of the host are neither free nor in use")
        if self.tiered is not None and self.tiered._waiters:
            raise Leak("blocks are still kept ready for requests that have ended")
        busy = [key for key, n in self.reference_counts().items() if n != 0]
        if busy:
            raise Leak(f"{len(busy)} blocks are still pinned or being written")

    def reference_counts(self) -> dict[bytes, int]:
        """Readers per key held in the host, writers to lower tiers included; -1 while it is being written."""
        table = self.policy_manager._table
        slots = table.slots()
        return dict(zip(table.key_of[slots].tolist(), table.ref_cnt[slots].tolist(), strict=True))


def _held_blocks(request: EngineRequest) -> list[int]:
    return [block for table in request.blocks for block in table if block != NULL_BLOCK]


def _most_loadable(request: EngineRequest) -> int:
    """Tokens that the client allows to be loaded."""
    wishes = (request.kv_transfer_params or {}).get(PARAM, {})
    return int(wishes.get("max_tokens", request.num_tokens)) if wishes.get("load", True) else 0


def _add_rank(told: dict[str, set[int]], req_ids: set[str], rank: int) -> None:
    for req_id in sorted(req_ids):
        ranks = told.setdefault(req_id, set())
        assert rank not in ranks, f"rank {rank} told of {req_id} twice"
        ranks.add(rank)


def sample(tokens: Sequence[int]) -> int:
    """The next token: a function of all before it."""
    raw = ",".join(map(str, tokens)).encode()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=2).digest(), "little") % 1000


def run_seed(seed: int, patch: Callable[[ModelEngine], None] | None = None) -> ModelEngine:
    """Runs the scenario of ``seed``. The error it may raise can be had again with the same seed."""
    engine = ModelEngine(Scenario.random(seed), patch)
    engine.run()
    return engine

"""Scenarios of the model engine: one engine and its workload, written out or chosen by a seed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from kvoffload.abc import KVGroup
from kvoffload.connector.options import PARAM
from kvoffload.connector.parts import Parts
from tests.sim.content import EngineRequest
from tests.sim.heads import Heads

REQUEST_OPTIONS: tuple[Mapping[str, Any], ...] = (
    {"store": False},
    {"load": False},
    {"max_tokens": 0},
    {"max_tokens": 13},
)
"""Options that clients send."""
HINTS_RATE = 0.5
"""How many requests have hints, where clients send options."""
STATES_SHARE = 0.25
"""How many of the random scenarios have hybrid models."""
PARTS_SHARE = 0.2
"""How many of the random scenarios have blocks that are divided."""
HEADS_SHARE = 0.2
"""How many of the others have the canonical layout."""


@dataclass(frozen=True)
class Scenario:
    """One engine and its workload. Sizes in blocks are device blocks; chances are per step, rates per request."""

    seed: int = 0
    num_layers: int = 2
    """Layers per group."""
    block_size: int = 4
    num_device_blocks: int = 20
    """Shared by all groups, the null block included."""
    max_tokens_per_step: int = 24
    max_running: int = 4
    prefix_caching: bool = True
    async_scheduling: bool = False
    block_size_factor: int = 1
    num_host_blocks: int = 24
    is_exclusive: bool = False
    """Whether blocks are stored when they leave the device, where the connector can do that."""
    looks_ahead: bool = False
    """Whether the engine says which device blocks it hands out next."""
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
    """The chance of a sleep. Weights may change before it, during it and right after it."""
    update_chance: float = 0.0
    """The chance of new weights without a reset of the connector."""
    keeps_device_cache: bool = False
    """Whether new weights leave the engine's own cache alone, which is emptied some time later."""
    copy_chance: float = 0.4
    """The chance that the first rank carries out a copy at a tick; the other ranks have speeds of their own."""
    copy_failure_rate: float = 0.0
    remote_decode_rate: float = 0.0
    options_rate: float = 0.0
    """How many requests have options that limit what is stored and loaded."""
    groups: tuple[KVGroup, ...] = ()
    """Empty: one group of full attention with ``block_size`` and ``block_size_factor``."""
    num_scratch_blocks: int = 0
    """Blocks that follow the running state in each table of a state group."""
    counts: tuple[int, ...] = ()
    """Into how many parts the blocks of each group are divided. Empty: they are not divided."""
    drops_last_state: bool = False
    """Whether no state is kept at the last boundary of a prompt, but at the one before it."""
    hash_block_size: int | None = None
    """None: the largest number of tokens that divides every group's blocks."""
    num_ranks: int = 1
    tensor_parallel: bool = False
    """Whether every rank holds its share of every layer. Otherwise each rank holds some of the layers."""
    replicas: int = 1
    """How many consecutive tensor-parallel ranks hold the same KV and share a host pool, at most: as many as divide the
    number of ranks."""
    heads: Heads | None = None
    """Not None: blocks have the canonical layout, and all ranks share a host pool. This has their number and how many
    hold the same KV."""
    documents_seed: int | None = None
    """Engines with the same seed here are asked about the same documents. None: ``seed``."""

    @classmethod
    def random(cls, seed: int) -> Scenario:
        """Returns a scenario chosen by ``seed``, small enough that blocks are scarce everywhere."""
        return cls.random_without_heads(seed).with_heads(Random(f"heads {seed}"))

    @classmethod
    def random_without_heads(cls, seed: int) -> Scenario:
        """As ``random``, but never with the canonical layout."""
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
        several = rng.random() < 0.65
        scenario = one_group.with_groups(random_groups(rng), rng) if several else one_group.with_ranks(rng)
        rng = Random(f"states {seed}")
        scenario = scenario.with_states(rng) if rng.random() < STATES_SHARE else scenario
        rng = Random(f"parts {seed}")
        scenario = scenario.with_parts(rng) if rng.random() < PARTS_SHARE else scenario
        rng = Random(f"exclusive {seed}")
        return dataclasses.replace(scenario, is_exclusive=rng.random() < 0.5, looks_ahead=rng.random() < 0.5)

    def with_groups(self, groups: tuple[KVGroup, ...], rng: Random) -> Scenario:
        """Returns the same workload on ``groups``, on random ranks and with device blocks for at least one request."""
        longest = self.document_tokens + self.max_question_tokens + self.max_new_tokens
        need = sum(_most_blocks(group, longest, self.max_tokens_per_step) for group in groups)
        return dataclasses.replace(
            self,
            groups=groups,
            counts=(),
            num_device_blocks=1 + need + rng.randint(len(groups), need),
            num_host_blocks=self.num_host_blocks * len(groups),
            hash_block_size=rng.choice((None, None, 1)),
            options_rate=rng.choice((0.0, 0.0, 0.3)),
        ).with_ranks(rng)

    def with_states(self, rng: Random) -> Scenario:
        """Returns the same workload on a hybrid model: with one to three state groups, rarely with nothing else."""
        before = self.groups or (KVGroup(self.block_size, self.block_size_factor),)
        groups = add_states(before, rng)
        s = dataclasses.replace(
            self,
            groups=groups,
            counts=(),
            heads=None,
            num_scratch_blocks=rng.choice((0, 0, 1, 2)),
            drops_last_state=rng.random() < 0.2,
            # A state is found only by requests with the same tokens up to it.
            max_question_tokens=min(self.max_question_tokens, rng.choice((0, 2, 12))),
        )
        longest = s.document_tokens + s.max_question_tokens + s.max_new_tokens
        need = sum(_most_blocks(group, longest, s.max_tokens_per_step, s.num_scratch_blocks) for group in groups)
        return dataclasses.replace(
            s,
            num_device_blocks=1 + need + rng.randint(len(groups), need),
            num_host_blocks=self.num_host_blocks // len(before) * len(groups),
            num_ranks=s.num_ranks if s.tensor_parallel else min(s.num_ranks, s.num_layers * len(groups)),
        )

    def with_parts(self, rng: Random) -> Scenario:
        """Returns the same workload with blocks that are divided into up to three parts, and a slot for each part."""
        counts = tuple(rng.choice((1, 2, 3)) for _ in range(max(1, len(self.groups))))
        num_host_blocks = self.num_host_blocks * sum(counts) // len(counts)
        return dataclasses.replace(self, counts=counts, num_host_blocks=num_host_blocks, heads=None)

    @property
    def parts(self) -> Parts:
        return Parts(self.counts) if self.counts else Parts.none(max(1, len(self.groups)))

    def with_ranks(self, rng: Random) -> Scenario:
        """Returns the same workload on random ranks."""
        num_ranks, tensor_parallel = rng.choice((1, 1, 1, 2, 3)), rng.random() < 0.5
        if not tensor_parallel:
            num_ranks = min(num_ranks, self.num_layers * max(1, len(self.groups)))
        replicas = rng.choice((1, 6)) if tensor_parallel and num_ranks > 1 else 1
        return dataclasses.replace(
            self, num_ranks=num_ranks, tensor_parallel=tensor_parallel, replicas=replicas, heads=None
        )

    def with_heads(self, rng: Random) -> Scenario:
        """Returns the same workload, perhaps with the canonical layout, which there is neither with states nor with
        blocks that are divided."""
        if rng.random() >= HEADS_SHARE or self.parts.is_divided or any(group.state for group in self.groups):
            return self
        num_layers = max(self.num_layers, rng.choice((1, 2)))
        scenario = dataclasses.replace(self, num_layers=num_layers, heads=Heads.random(rng))
        return scenario.with_parallelism(rng)

    def with_parallelism(self, rng: Random) -> Scenario:
        """Returns the same model on random ranks, if it has the canonical layout."""
        if self.heads is None:
            return self
        heads = self.heads.on_ranks(rng, self.num_layers * max(1, len(self.groups)))
        return dataclasses.replace(self, heads=heads, num_ranks=heads.num_ranks, tensor_parallel=True)

    @property
    def num_stages(self) -> int:
        """Into how many stretches of layers the ranks divide the model."""
        if self.heads is not None:
            return self.heads.stages
        return 1 if self.tensor_parallel else self.num_ranks

    def leader_of(self, rank: int) -> int:
        """Returns the rank that stores the KV of ``rank``: itself, or the first of those that hold the same."""
        replicas = math.gcd(self.replicas, self.num_ranks) if self.tensor_parallel else 1
        if self.heads is not None:
            replicas = self.heads.replicas
        return rank - rank % replicas


def random_groups(rng: Random) -> tuple[KVGroup, ...]:
    """Returns one to four groups whose blocks line up at least every twelve tokens, at most one of them a draft
    group."""
    while True:
        groups = tuple(_random_group(rng) for _ in range(rng.choice((1, 2, 2, 3, 4))))
        aligned = math.lcm(*(group.block_tokens for group in groups)) <= 12
        if aligned and sum(group.lookahead > 0 for group in groups) <= 1:
            return groups


def add_states(groups: tuple[KVGroup, ...], rng: Random) -> tuple[KVGroup, ...]:
    """Returns the groups and one to three state groups, in any order, and rarely the state groups alone. Their blocks
    line up as often as before, or at least every twelve tokens."""
    longest = max(12, math.lcm(*(group.block_tokens for group in groups)))
    while True:
        states = tuple(KVGroup(rng.choice((1, 2, 4, 6, 8, 12)), state=True) for _ in range(rng.choice((1, 1, 2, 3))))
        together = [*(() if rng.random() < 0.05 else groups), *states]
        if math.lcm(*(group.block_tokens for group in together)) <= longest:
            rng.shuffle(together)
            return tuple(together)


def _random_group(rng: Random) -> KVGroup:
    size, factor, kind = rng.choice((1, 2, 4)), rng.choice((1, 1, 2, 3)), rng.random()
    lookahead = min(size * factor, rng.choice((1, 2))) if rng.random() < 0.2 else 0
    if kind < 0.4:
        return KVGroup(size, factor, lookahead=lookahead)
    if kind < 0.8:
        return KVGroup(size, factor, sliding_window=rng.choice((1, 2, 3, 5, 8, 17)), lookahead=lookahead)
    return KVGroup(size, factor, attention_chunk=rng.choice((1, 3, 4, 6, 8, 16)))


def _most_blocks(group: KVGroup, longest: int, max_tokens_per_step: int, num_scratch: int = 0) -> int:
    """Device blocks that a request of ``longest`` tokens holds at most: what a step attends to and computes, and what
    the step before it computes when its results are not there yet."""
    if group.state:
        return 4 + num_scratch
    span = group.sliding_window or group.attention_chunk
    tokens = longest if span is None else min(longest, span + 2 * max_tokens_per_step)
    return -(-tokens // group.device_block_size) + 1


def _random_hints(rng: Random) -> dict[str, Any]:
    found: dict[str, Any] = {"session": f"session {rng.randrange(4)}"} if rng.random() < 0.8 else {}
    if rng.random() < 0.4:
        found["drop"] = True
    if rng.random() < 0.4:
        found["expect_return_s"] = 10 ** rng.uniform(-3, 3)
    if rng.random() < 0.1:
        found |= {"p_return": rng.random(), "retain_s": 10 ** rng.uniform(-3, 3)}
    return found


def make_requests(s: Scenario, rng: Random, hash_block_size: int) -> list[EngineRequest]:
    """Returns the requests of a scenario, in the order in which they come."""
    source = rng if s.documents_seed is None else Random(s.documents_seed)
    documents = [[source.randrange(1000) for _ in range(s.document_tokens)] for _ in range(s.num_documents)]
    requests = []
    hints = Random(f"hints {s.seed}")
    for i in range(s.num_requests):
        document = rng.choice(documents)
        prompt = document[: rng.randint(1, len(document))] if rng.random() < 0.3 else list(document)
        prompt += [rng.randrange(1000) for _ in range(rng.randint(0, s.max_question_tokens))]
        params: dict[str, Any] | None = {"do_remote_decode": True} if rng.random() < s.remote_decode_rate else None
        if s.options_rate and rng.random() < s.options_rate:
            params = {PARAM: rng.choice(REQUEST_OPTIONS), **(params or {})}
        if s.options_rate and hints.random() < HINTS_RATE:
            params = {**(params or {}), PARAM: {**(params or {}).get(PARAM, {}), **_random_hints(hints)}}
        new = rng.randint(1, s.max_new_tokens)
        requests.append(EngineRequest(f"r{i}", prompt, new, hash_block_size, 0, params))
    return requests

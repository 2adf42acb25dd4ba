"""Prefix-hit tokens of hybrid models, by the rule that says which states are kept, and by the size of host memory.

A hybrid model resumes only where the state of its recurrent layers was kept: a hit is the longest run of attention
blocks that ends at a kept state, below the last token. The hit search, the class that decides which states are kept,
the manager and the policies are those that serve an engine; no bytes are copied. States and attention blocks share one
pool, whose size is given in percent of all attention blocks of a trace.

The traces are the ``*.jsonl.gz`` in the folder that KVOFFLOAD_TRACES names; without one, synthetic workloads.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from benchmarks.report import Row, publish
from benchmarks.traces import traces
from kvoffload.abc import BlockHash, KVGroup, OffloadKey
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.slots import HostBackend
from kvoffload.cache.tenants import Tenants
from kvoffload.cli.lab import progress
from kvoffload.connector import hits
from kvoffload.connector.layout import Block, Layout
from kvoffload.connector.request import NEVER, RequestState
from kvoffload.connector.states import StateKeeper
from kvoffload.lab.trace import Trace

SYNTHETIC = {"chat": 5000, "agent": 5000}
SHARES = (0.05, 0.1, 0.4)
MIDDLE = 0.1
"""The share at which everything else varies."""
POLICIES = ("lru", "auto")


# The trace.


@dataclass(frozen=True, eq=False)
class Turns:
    """A trace in blocks of another size, with the blocks of outputs."""

    name: str
    block_tokens: int
    times: list[float]
    input_tokens: list[int]
    chains: list[list[int]]
    """The whole blocks of each request's prompt and output, numbered from 0."""
    num_distinct: int
    num_continued: int
    """Requests whose output is a part of a later prompt."""


def turns_of(trace: Trace, factor: int = 1) -> Turns:
    """Returns the trace with ``factor`` of its blocks in one.

    Traces of prompts do not have the blocks of outputs. They are taken from the request that continues the
    conversation: the first later one that contains all whole blocks of the prompt, of which the last was new, and that
    is long enough for the output. The blocks of other outputs occur once.
    """
    size = trace.block_tokens
    asked, answered = trace.input_tokens.tolist(), trace.output_tokens.tolist()
    prompts = [trace.chain(r)[: tokens // size].tolist() for r, tokens in enumerate(asked)]
    ended_by: dict[int, int] = {}
    """By block: the request whose prompt was the first with it, and ended with it."""
    seen: set[int] = set()
    outputs: dict[int, list[int]] = {}
    for r, prompt in enumerate(prompts):
        before = next((ended_by[block] for block in reversed(prompt) if block in ended_by), None)
        if before is not None and before not in outputs and asked[r] >= asked[before] + answered[before]:
            outputs[before] = prompt[len(prompts[before]) : _num_whole(asked[before], answered[before], size)]
        if prompt and prompt[-1] not in seen:
            ended_by[prompt[-1]] = r
        seen.update(prompt)
    num_blocks = trace.num_distinct
    numbers: dict[int, int] = {}
    chains = []
    for r, prompt in enumerate(prompts):
        chain = prompt + outputs.get(r, [])
        num_more = max(0, _num_whole(asked[r], answered[r], size) - len(chain))
        chain += range(num_blocks, num_blocks + num_more)
        num_blocks += num_more
        chains.append([numbers.setdefault(block, len(numbers)) for block in chain[factor - 1 :: factor]])
    return Turns(trace.name, size * factor, trace.times.tolist(), asked, chains, len(numbers), len(outputs))


def _num_whole(prompt: int, output: int, size: int) -> int:
    """Returns how many blocks a request has filled when it ends. The last token that it has sampled is never computed,
    so it has no KV."""
    return (prompt + max(0, output - 1)) // size


# Rules.


class KeepAll(StateKeeper):
    """Keeps every state that an engine offers."""

    def choose(self, state: RequestState, ends: Iterable[int]) -> list[int]:
        return sorted(ends)

    def stored(self, state: RequestState, blocks: Iterable[Block], new: Collection[OffloadKey]) -> list[OffloadKey]:
        return []


class NoJunctions(StateKeeper):
    def begin(self, state: RequestState, end: int, junction: int) -> None:
        super().begin(state, end, 0)


class PromptsOnly(StateKeeper):
    """Keeps no state of outputs."""

    def choose(self, state: RequestState, ends: Iterable[int]) -> list[int]:
        return [end for end in super().choose(state, ends) if end <= state.request.num_computed_tokens]


@dataclass(frozen=True, slots=True)
class Rule:
    """Which states are kept. Without ``keeper``, one is at every boundary and takes no room: the upper bound."""

    name: str
    keeper: type[StateKeeper] | None
    stops_at_junctions: bool = True
    """Whether the engine ends a chunk where a prompt leaves what is stored, as vLLM does where the device's cache has
    the blocks."""


BOUND = "every boundary, for free"
RULES = {
    rule.name: rule
    for rule in (
        Rule("all that is offered", KeepAll),
        Rule("resume", StateKeeper),
        Rule("resume, engine never stops at junctions", StateKeeper, False),
        Rule("resume, no junctions", NoJunctions),
        Rule("resume, no outputs", PromptsOnly),
        Rule(BOUND, None),
    )
}
RIVALS = ("all that is offered", "resume")


# The replay.


@dataclass(frozen=True, slots=True)
class Setting:
    """One replay. ``num_slots`` is the size of host memory; an attention block and a state take some each."""

    rule: str = "resume"
    policy: str = "lru"
    share: float = MIDDLE
    """Size of host memory: the slots of this share of all attention blocks."""
    factor: int = 1
    """Blocks of the trace in one."""
    chunk_tokens: int = 8192
    block_slots: int = 1
    state_slots: int = 3


@dataclass(slots=True)
class Found:
    """What the requests of a trace have found."""

    prompt_tokens: int
    hit_tokens: int = 0
    hits: int = 0
    blocks_stored: int = 0
    """Attention blocks."""
    states_stored: int = 0

    @property
    def hit_pct(self) -> float:
        return 100 * self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(slots=True)
class TraceRequest:
    """A request of a trace, as the scheduler half reads it."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int
    """The prompt, from the first lookup on."""
    block_hashes: list[BlockHash]
    kv_transfer_params: Mapping[str, Any] | None = field(default=None)


class StateReplay:
    """Serves the requests of ``turns`` one after the other, without a cache on the device."""

    def __init__(self, turns: Turns, setting: Setting) -> None:
        rule, size = RULES[setting.rule], turns.block_tokens
        num_slots = max(1, int(setting.share * turns.num_distinct * setting.block_slots))
        states = setting.state_slots if rule.keeper is not None else 0
        groups = [KVGroup(size)] * setting.block_slots + [KVGroup(size, state=True)] * states
        self.turns, self.rule, self.size = turns, rule, size
        self.chunk = max(1, setting.chunk_tokens // size) * size
        self.layout, self.tenants = Layout(groups, None), Tenants(b"")
        self.now = 0.0
        policy = make_policy(setting.policy, num_slots)
        self.manager = PolicyOffloadingManager(HostBackend(1, num_slots), policy, clock=lambda: self.now)
        self.keeper = None if rule.keeper is None else rule.keeper(self.layout)
        self.found = Found(sum(turns.input_tokens))
        xxh = xxhash.xxh3_128_digest
        self.hashes = [xxh(block.to_bytes(8, "little")) for block in range(turns.num_distinct)]

    def run(self) -> Found:
        for r in range(len(self.turns.chains)):
            self.serve(r)
        return self.found

    def serve(self, r: int) -> None:
        size, keeper, found, manager = self.size, self.keeper, self.found, self.manager
        self.now, asked, chain = self.turns.times[r], self.turns.input_tokens[r], self.turns.chains[r]
        hashes = [self.hashes[block] for block in chain]
        request = TraceRequest(str(r), asked, asked, hashes[: asked // size])
        state = RequestState.new(request, self.layout, self.tenants, lambda _: NEVER)
        state.extend_keys()
        last = max(0, asked - 1) // size * size
        self.touch(state)
        hit = hits.longest(self.manager, self.layout, state, 0, may_wait=False)
        end = min(hit.end, last)
        found.hit_tokens += end
        found.hits += end > 0
        if keeper is not None:
            keeper.begin(state, end, hit.junction)
        stored: list[OffloadKey] = []
        begun, is_refused = end, False
        junction = hit.junction if self.rule.stops_at_junctions else 0
        for at in boundaries(end, last, junction, self.chunk, size, len(chain) * size):
            if at > asked:
                request.num_tokens, request.block_hashes = at, hashes[: at // size]
                state.extend_keys()
            blocks = self.blocks(state, begun, at)
            begun = at
            if is_refused:
                manager.prepare_store(blocks, state.context, behind_refused=True)
                continue
            done, is_refused = self.store(blocks, state)
            found.blocks_stored += len(done) // max(1, len(self.layout.full))
            stored += done
            if keeper is not None and not is_refused:
                for chosen in keeper.choose(state, [at]):
                    stored += self.store_state(state, chosen, keeper)
        used = () if keeper is None else keeper.end(request.request_id)
        manager.end_chain(state.blocks.used_keys(used), stored, state.context)

    def touch(self, state: RequestState) -> None:
        last = hits.last_state(self.manager, self.layout, state) if self.layout.states else 0
        used = state.blocks.used_keys([last] if last else [])
        self.manager.touch(used, state.context, state.blocks.keys_in_order())

    def store_state(self, state: RequestState, end: int, keeper: StateKeeper) -> list[OffloadKey]:
        ordinal = end // self.size - 1
        blocks = [Block(g, ordinal, state.blocks.keys[g][ordinal], ordinal, [1]) for g in self.layout.states]
        output = self.manager.prepare_store([block.key for block in blocks], state.context)
        if output is None:
            return []
        self.manager.complete_store(output.store_spec, state.context)
        self.found.states_stored += bool(output.keys_to_store)
        present = [block for block in blocks if block.key not in output.refused_keys]
        self.manager.drop(keeper.stored(state, present, frozenset(output.keys_to_store)))
        return output.keys_to_store

    def store(self, keys: Sequence[OffloadKey], state: RequestState) -> tuple[list[OffloadKey], bool]:
        """Returns which of ``keys`` are new, and whether the manager has refused any."""
        output = self.manager.prepare_store(keys, state.context) if keys else None
        if output is None:
            return [], False
        self.manager.complete_store(output.store_spec, state.context)
        return output.keys_to_store, bool(output.refused_keys)

    def blocks(self, state: RequestState, start: int, end: int) -> list[OffloadKey]:
        """Returns the keys of the attention blocks from token ``start`` to ``end``, by position."""
        columns = [state.blocks.keys[g][start // self.size : end // self.size] for g in self.layout.full]
        return [key for keys in zip(*columns, strict=True) for key in keys]


def boundaries(start: int, last: int, junction: int, chunk: int, size: int, total: int) -> Iterator[int]:
    """Yields the boundaries at which an engine offers states, in tokens: the ends of the chunks of a prefill, the last
    one below the end of the prompt, and all behind it up to ``total``."""
    at = start
    while at < last:
        end = min(at + chunk, last)
        at = junction if at < junction < end else end
        yield at
    yield from range(at + size, total + 1, size)


# The benchmark.


@dataclass(frozen=True, slots=True)
class Cell:
    """The result of one replay."""

    trace: str
    setting: Setting
    hit_pct: float
    states_stored: int
    blocks_stored: int


def settings() -> Iterator[Setting]:
    """Yields the settings of the tables, in their order."""
    for share in SHARES:
        for policy in POLICIES:
            for rule in (*RIVALS, BOUND):
                yield Setting(rule, policy, share)
    for rule in RULES:
        if rule not in (*RIVALS, BOUND):
            yield Setting(rule)
    for rule in RIVALS:
        for other in VARIATIONS.values():
            yield Setting(rule, **other)


VARIATIONS: dict[str, dict[str, Any]] = {
    "state of half a block": {"block_slots": 2, "state_slots": 1},
    "state of 1 block": {"state_slots": 1},
    "state of 8 blocks": {"state_slots": 8},
    "blocks of 1,024 tokens": {"factor": 2},
    "blocks of 2,048 tokens": {"factor": 4},
    "chunks of 2,048 tokens": {"chunk_tokens": 2048},
}
"""Each differs from the defaults of ``Setting`` in one thing."""

_trace: Trace


def _start(trace: Trace) -> None:
    global _trace
    _trace = trace


def run(trace: Trace, setting: Setting) -> Cell:
    found = StateReplay(turns_of(trace, setting.factor), setting).run()
    return Cell(trace.name, setting, found.hit_pct, found.states_stored, found.blocks_stored)


def _cell(setting: Setting) -> Cell:
    return run(_trace, setting)


def main(out: Path, quick: bool) -> None:
    jobs = list(settings())
    cells: list[Cell] = []
    for trace in traces(SYNTHETIC):
        if quick:
            trace = trace.between(0, 0.02)
        with ProcessPoolExecutor(initializer=_start, initargs=(trace,)) as pool, progress(trace.name) as on_progress:
            for cell in pool.map(_cell, jobs):
                cells.append(cell)
                on_progress((len(cells) % len(jobs) or len(jobs)) / len(jobs))
        show(cells[-len(jobs) :])
    out.mkdir(parents=True, exist_ok=True)
    (out / "states-cells.json").write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n")
    publish("states", "Which states are kept: `resume` beside `all that is offered`", list(summary(cells)), out)


def show(cells: list[Cell]) -> None:
    by_setting = {cell.setting: cell for cell in cells}
    print(f"\n{cells[0].trace}: prefix-hit tokens, % (states stored)")
    print(f"  {'':<48}" + "".join(f"{share:>16.0%}" for share in SHARES))
    for policy in POLICIES:
        for rule in RULES:
            row = [by_setting.get(Setting(rule, policy, share)) for share in SHARES]
            if any(row):
                print(f"  {policy + ': ' + rule:<48}" + "".join(map(_figure, row)))
    print(f"  {f'lru, {MIDDLE:.0%}':<48}" + "".join(f"{rule:>24}" for rule in RIVALS))
    for name, other in VARIATIONS.items():
        row = [by_setting[Setting(rule, **other)] for rule in RIVALS]
        print(f"  {name:<48}" + "".join(f"{_figure(cell):>24}" for cell in row))


def _figure(cell: Cell | None) -> str:
    return f"{'':>16}" if cell is None else f"{f'{cell.hit_pct:.2f} ({cell.states_stored})':>16}"


def summary(cells: list[Cell]) -> Iterator[Row]:
    """Yields how far ``resume`` is from ``all that is offered``, over all pairs."""
    by_place: dict[tuple[str, str], dict[str, Cell]] = {}
    for cell in cells:
        place = str({**asdict(cell.setting), "rule": ""})
        by_place.setdefault((cell.trace, place), {})[cell.setting.rule] = cell
    pairs = [(found[RIVALS[0]], found[RIVALS[1]]) for found in by_place.values() if RIVALS[0] in found]
    gaps = [resume.hit_pct - everything.hit_pct for everything, resume in pairs]
    yield Row("resume minus all, mean", sum(gaps) / len(gaps), "points")
    yield Row("the worst", min(gaps), "points")
    yield Row("the best", max(gaps), "points")
    writes = [resume.states_stored / max(1, everything.states_stored) for everything, resume in pairs]
    yield Row("states stored, in % of all", 100 * sum(writes) / len(writes), "%")

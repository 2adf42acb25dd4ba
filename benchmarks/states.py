"""Prefix-hit tokens of hybrid models, by the rule that says which states are kept, and by the budget.

In a hybrid model a request resumes only where the state of its recurrent layers was kept: a hit is the longest run of
attention blocks that ends at a kept state, below the last token. States and attention blocks share one pool and one
policy, those of the manager that serves an engine. A state takes the room of one or several attention blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from kvoffload.abc import LookupState, OffloadKey, ReqContext
from kvoffload.cache.keys import make_offload_key
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.slots import HostBackend
from kvoffload.lab.trace import Ints, Trace

FRESH = 1 << 62
"""Ids of blocks of outputs that no later prompt contains."""


# The trace.


@dataclass(frozen=True, eq=False)
class Turns:
    """A trace in blocks of another size, with the blocks of outputs."""

    block_tokens: int
    input_tokens: list[int]
    output_tokens: list[int]
    chains: list[list[int]]
    """The whole blocks of each request's prompt and output, numbered from 0."""
    num_distinct: int
    num_continued: int
    """Requests whose output is a part of a later prompt."""


def turns_of(trace: Trace, factor: int) -> Turns:
    """Returns the trace with ``factor`` of its blocks in one.

    The traces do not have the blocks of outputs. They are taken from the request that continues the conversation: the
    first later one whose prompt contains all whole blocks of a prompt, of which the last was new, and is long enough
    for the output. Other outputs are blocks of their own.
    """
    size = trace.block_tokens
    chains = [trace.chain(r)[: int(tokens) // size].tolist() for r, tokens in enumerate(trace.input_tokens)]
    asked, answered = trace.input_tokens.tolist(), trace.output_tokens.tolist()
    last_of: dict[int, int] = {}
    """The request whose prompt ended with this block, which was new."""
    seen: set[int] = set()
    outputs: dict[int, list[int]] = {}
    for r, chain in enumerate(chains):
        before = next((last_of[block] for block in reversed(chain) if block in last_of), None)
        if before is not None and before not in outputs and asked[r] >= asked[before] + answered[before]:
            whole = (asked[before] + answered[before] - 1) // size
            outputs[before] = chain[len(chains[before]) : whole]
        if chain and chain[-1] not in seen:
            last_of[chain[-1]] = r
        seen.update(chain)
    fresh = trace.num_distinct
    numbers: dict[int, int] = {}
    whole_chains = []
    for r, chain in enumerate(chains):
        whole = max(asked[r], asked[r] + answered[r] - 1) // size
        full = chain + outputs.get(r, [])
        missing = whole - len(full)
        full += range(fresh, fresh + missing)
        fresh += missing
        ends = full[factor - 1 :: factor]
        whole_chains.append([numbers.setdefault(block, len(numbers)) for block in ends])
    return Turns(size * factor, asked, answered, whole_chains, len(numbers), len(outputs))


# Rules.


class Offer(StrEnum):
    PREFILL = "prefill"
    PROMPT = "prompt"
    """The last boundary below the prompt's last token."""
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Rule:
    """Which of the boundaries that an engine offers are kept."""

    name: str
    prefill: str = "none"
    """none, all, latest: superseded by the next."""
    prompt: bool = True
    decode: str = "latest"
    """none, all, latest."""
    junction: str = "near"
    """none; near: the last boundary offered at or before it; exact: the engine ends a chunk there; twice: exact, when
    it was seen twice; always: for free at every boundary."""
    touch: str = "used"
    """used: a request uses the state at which it resumes; path: all states on its way."""
    move: bool = False
    """Drop the state at which a request resumed if no other did and the request has kept a later one."""


FREE = Rule("free", junction="always")
RULES = {
    rule.name: rule
    for rule in (
        Rule("all", prefill="all", decode="all", junction="exact"),
        Rule("all,near", prefill="all", decode="all", junction="near"),
        Rule("all,path", prefill="all", decode="all", junction="exact", touch="path"),
        Rule("resume", junction="exact"),
        Rule("resume,near", junction="near"),
        Rule("resume,path", junction="exact", touch="path"),
        Rule("resume,present", junction="exact", touch="present"),
        Rule("resume,wanted", junction="exact", touch="wanted"),
        Rule("resume,move", junction="exact", move=True),
        Rule("resume,twice", junction="twice"),
        Rule("resume,latest", prefill="latest", junction="exact"),
        Rule("no junction", junction="none"),
        Rule("prompt", decode="none", junction="exact"),
        Rule("prompt only", decode="none", junction="none"),
        Rule("end only", prompt=False, decode="latest", junction="exact"),
        Rule("prefill", prefill="all", decode="latest", junction="exact"),
        FREE,
    )
}


@dataclass(frozen=True, slots=True)
class Cost:
    """The slots of an attention block and of a state."""

    block_slots: int = 1
    state_slots: int = 3


@dataclass(slots=True)
class Result:
    hit_tokens: int = 0
    attention_tokens: int = 0
    """Leading attention blocks that were found, with or without a state at their end."""
    prompt_tokens: int = 0
    states_written: int = 0
    states_used: int = 0
    """Hits."""
    blocks_written: int = 0
    per_request: list[int] = field(default_factory=list)

    @property
    def hit_pct(self) -> float:
        return 100 * self.hit_tokens / self.prompt_tokens


class StateReplay:
    """Serves the requests of ``turns`` one after the other."""

    def __init__(self, turns: Turns, rule: Rule, cost: Cost, policy: str, num_slots: int, chunk_tokens: int) -> None:
        self.turns, self.rule, self.cost = turns, rule, cost
        self.chunk = max(1, chunk_tokens // turns.block_tokens)
        self.manager = PolicyOffloadingManager(HostBackend(1, num_slots), make_policy(policy, num_slots))
        self.is_free = rule.junction == "always"
        self.num_seen: dict[int, int] = {}
        """How often a junction was seen at a block."""
        self.num_used: dict[int, int] = {}
        """How many requests have resumed at the state after a block."""
        self.is_junction: set[int] = set()
        self.result = Result(prompt_tokens=sum(turns.input_tokens))
        a, b = cost.block_slots, 0 if self.is_free else cost.state_slots
        self.block_keys = _keys(turns.num_distinct, range(a))
        self.state_keys = _keys(turns.num_distinct, range(a, a + b))

    def run(self) -> Result:
        for r in range(len(self.turns.chains)):
            self.serve(r)
        return self.result

    def serve(self, r: int) -> None:
        turns, manager, rule, result = self.turns, self.manager, self.rule, self.result
        chain, context = turns.chains[r], ReqContext(str(r))
        asked = turns.input_tokens[r]
        num_prompt, limit = asked // turns.block_tokens, max(0, asked - 1) // turns.block_tokens
        prompt = chain[:num_prompt]
        found = manager.lookup(self.blocks(prompt), context) or 0
        found //= self.cost.block_slots
        end = min(found, limit) if self.is_free else self.last_state(prompt[: min(found, limit)])
        junction = found if found > end else 0
        on_path: Sequence[int] = ()
        if not self.is_free:
            on_path = self.touched(prompt, end, limit, junction)
        manager.touch(self.in_order(prompt, 0, on_path), context)
        result.hit_tokens += end * turns.block_tokens
        result.attention_tokens += found * turns.block_tokens
        result.per_request.append(end * turns.block_tokens)
        result.states_used += end > 0
        if end:
            self.num_used[prompt[end - 1]] = self.num_used.get(prompt[end - 1], 0) + 1
        stop = self.stop_at(prompt, junction)
        kept: list[int] = []
        """Boundaries that this request has stored and not dropped, ascending."""
        stored: list[OffloadKey] = []
        at, refused = end, False
        superseded = 0
        for boundary, offer in self.offers(end, stop, num_prompt, limit, len(chain)):
            keep, supersedes = self.decide(boundary, offer, stop, junction, chain)
            states = [boundary] if keep and not self.is_free else []
            keys = self.blocks(chain[at:boundary])
            if refused:
                manager.refuse(keys, context)
            elif keys:
                refused = self.store(keys, stored, context)
                result.blocks_written += 0
            if states and not refused:
                states = self.states(chain[boundary - 1 : boundary])
                num = len(stored)
                self.store(states, stored, context)
                if len(stored) > num:
                    result.states_written += 1
                    if superseded:
                        manager.drop(self.states(chain[superseded - 1 : superseded]))
                        superseded = 0
                    if supersedes:
                        superseded = boundary
                    else:
                        kept.append(boundary)
            at = boundary
        if superseded:
            kept.append(superseded)
        last = max(kept, default=0)
        if rule.move and end and last > end:
            block = prompt[end - 1]
            if self.num_used[block] == 1 and block not in self.is_junction:
                manager.drop(self.states([block]))
        on_path = on_path if rule.touch == "path" else [*(at for at in on_path if at <= end), *kept]
        manager.reorder_chain(self.in_order(chain, 0, sorted(set(on_path))), stored, context)

    def store(self, keys: Sequence[OffloadKey], stored: list[OffloadKey], context: ReqContext) -> bool:
        """Returns whether the manager has refused any of ``keys``."""
        output = self.manager.prepare_store(keys, context)
        if output is None:
            return False
        self.manager.complete_store(output.store_spec, context)
        stored += output.keys_to_store
        return bool(output.refused_keys)

    def touched(self, prompt: Sequence[int], end: int, limit: int, junction: int) -> Sequence[int]:
        how = self.rule.touch
        if how == "path":
            return range(1, len(prompt) + 1)
        if how == "present":
            n = self.cost.state_slots
            ready = (self.manager.find(self.states(prompt)) >= 0).reshape(-1, n).all(axis=1)
            return (np.flatnonzero(ready) + 1).tolist()
        if how == "wanted":
            return sorted({at for at in (end, limit, junction) if at})
        return [end] if end else []

    def stop_at(self, prompt: Sequence[int], junction: int) -> int:
        """Returns the boundary at which the engine ends a chunk for a junction; 0: none."""
        if not junction or self.rule.junction in ("none", "near", "always"):
            return 0
        block = prompt[junction - 1]
        self.num_seen[block] = self.num_seen.get(block, 0) + 1
        return junction if self.rule.junction == "exact" or self.num_seen[block] > 1 else 0

    def offers(self, start: int, stop: int, num_prompt: int, limit: int, total: int) -> Iterator[tuple[int, Offer]]:
        """Yields the boundaries whose state the engine has had, in blocks, and one at the end of all whole blocks."""
        at = start
        while at < limit:
            chunk_end = min(at + self.chunk, limit)
            at = stop if at < stop < chunk_end else chunk_end
            yield at, Offer.PROMPT if at == limit else Offer.PREFILL
        for boundary in range(at + 1, total + 1):
            yield boundary, Offer.DECODE

    def decide(self, boundary: int, offer: Offer, stop: int, junction: int, chain: Sequence[int]) -> tuple[bool, bool]:
        """Returns whether the state is kept, and whether the next of the request supersedes it."""
        rule = self.rule
        if stop and boundary == stop:
            self.is_junction.add(chain[boundary - 1])
            return True, False
        if rule.junction == "near" and offer is Offer.PREFILL and boundary <= junction < boundary + self.chunk:
            self.is_junction.add(chain[boundary - 1])
            return True, False
        if offer is Offer.PROMPT:
            return rule.prompt, False
        how = rule.prefill if offer is Offer.PREFILL else rule.decode
        return how != "none", how == "latest"

    # Keys.

    def blocks(self, chain: Sequence[int]) -> list[OffloadKey]:
        keys = self.block_keys
        return [key for block in chain for key in keys[block]]

    def states(self, chain: Sequence[int]) -> list[OffloadKey]:
        keys = self.state_keys
        return [key for block in chain for key in keys[block]]

    def in_order(self, chain: Sequence[int], first: int, boundaries: Sequence[int]) -> list[OffloadKey]:
        """Returns the keys of the blocks from ``first`` on, and of the states at ``boundaries``, by their end."""
        keys: list[OffloadKey] = []
        for boundary in boundaries:
            keys += self.blocks(chain[first:boundary])
            keys += self.states(chain[boundary - 1 : boundary])
            first = boundary
        return keys + self.blocks(chain[first:])

    def last_state(self, chain: Sequence[int]) -> int:
        """Returns the last boundary of ``chain`` at which there is a whole state, 0 if there is none."""
        n = self.cost.state_slots
        ready = self.manager.states(self.states(chain)) == LookupState.HIT
        whole: Ints = np.flatnonzero(ready.reshape(-1, n).all(axis=1))
        return int(whole[-1]) + 1 if len(whole) else 0


def _keys(num_blocks: int, groups: range) -> list[tuple[OffloadKey, ...]]:
    import xxhash

    digest = xxhash.xxh3_128_digest
    hashes = (digest(block.to_bytes(8, "little")) for block in range(num_blocks))
    return [tuple(make_offload_key(block_hash, g) for g in groups) for block_hash in hashes]

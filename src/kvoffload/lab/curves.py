"""Prefix-hit curves: which share of a trace's prompt tokens is found in a cache, by capacity.

The curve of LRU takes one pass, by stack distance (Mattson et al., "Evaluation techniques for storage hierarchies", IBM
Systems Journal 9(2), 1970). Other policies are replayed at each capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvoffload.lab.replay import ReplayConfig, replay_many
from kvoffload.lab.trace import Floats, Ints, Progress, Trace


@dataclass(frozen=True, eq=False)
class Curve:
    """The prefix hits of a policy in a trace, at several capacities."""

    policy: str
    capacities: tuple[int, ...]
    """In blocks, ascending."""
    hit_pct: Floats
    """Prefix-hit tokens in percent of all prompt tokens, one number per capacity."""
    hit_tokens: tuple[Ints, ...]
    """Prefix-hit tokens per request, one array per capacity."""


def hit_curve(
    trace: Trace,
    policy: str,
    capacities: Sequence[int],
    *,
    processes: int | None = None,
    on_progress: Progress | None = None,
) -> Curve:
    """Returns the curve of ``policy`` at ``capacities``, in blocks. Raises ConfigError for an unknown policy."""
    capacities = sorted(set(capacities))
    if policy == "lru":
        lru = LRUCurve(trace)
        tokens = [lru.hit_tokens(capacity) for capacity in capacities]
    else:
        configs = [ReplayConfig(policy, capacity) for capacity in capacities]
        results = replay_many(trace, configs, processes=processes, on_progress=on_progress)
        tokens = [result.host_tokens for result in results]
    asked = max(1, int(trace.input_tokens.sum()))
    hit_pct = np.array([100.0 * int(each.sum()) / asked for each in tokens])
    return Curve(policy, tuple(capacities), hit_pct, tuple(tokens))


class LRUCurve:
    """The prefix hits of LRU in a trace at every capacity, equal token for token to a replay through the managers.

    A request is one use of its whole chain and moves it to the top of the stack, head first. A cache of C blocks holds
    the top C of the stack, so a block is a prefix hit if it and all blocks before it in its prompt are among those when
    the request arrives. ``needed`` has, per block access, the smallest capacity in blocks at which it is a prefix hit;
    ``NEVER`` for first uses, accesses after them, and outputs. It ascends within a request.
    """

    NEVER = np.iinfo(np.int32).max

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.needed = _needed(trace)
        # Ascending over the whole trace, so that one search finds the hits of every request at a capacity.
        self._ranked = self.needed + _request_of(trace) * (self.NEVER + 1)

    def hit_tokens(self, capacity: int) -> Ints:
        """Returns the prefix-hit tokens of each request with a cache of ``capacity`` blocks."""
        trace = self.trace
        bounds = np.arange(trace.num_requests, dtype=np.int64) * (self.NEVER + 1) + min(capacity, self.NEVER - 1)
        hits = np.searchsorted(self._ranked, bounds, side="right") - trace.offsets[:-1]
        tokens: Ints = np.minimum(hits * trace.block_tokens, trace.input_tokens)
        return tokens

    def total_hit_tokens(self) -> Ints:
        """Returns the prefix-hit tokens of the whole trace: entry C for C blocks, the last for any larger cache."""
        reached = self.needed < self.NEVER
        sums = np.zeros(self.trace.num_distinct + 1, dtype=np.int64)
        np.add.at(sums, self.needed[reached], _block_tokens(self.trace)[reached])
        return np.cumsum(sums)


def _request_of(trace: Trace) -> Ints:
    return np.repeat(np.arange(trace.num_requests, dtype=np.int64), np.diff(trace.offsets))


def _block_tokens(trace: Trace) -> Ints:
    """Returns, per access, the prompt tokens in its block."""
    request = _request_of(trace)
    before = (np.arange(trace.num_accesses) - trace.offsets[request]) * trace.block_tokens
    tokens: Ints = np.clip(trace.input_tokens[request] - before, 0, trace.block_tokens)
    return tokens


def _needed(trace: Trace) -> Ints:
    request = _request_of(trace)
    place = np.arange(trace.num_accesses) - trace.offsets[request]
    needed = _stack_depths(trace, request) + 1
    needed[place >= trace.prompt_blocks[request]] = LRUCurve.NEVER
    floor = request * (LRUCurve.NEVER + 1)
    highest: Ints = np.maximum.accumulate(needed + floor) - floor
    return highest


def _stack_depths(trace: Trace, request: Ints) -> Ints:
    """Returns, per access, how many blocks were used more recently than its block when its request arrives;
    ``NEVER`` - 1 for a first use.

    The accesses are placed on a line in the order of their recency: requests by time, each chain tail first. A block's
    depth is the number of distinct blocks on the line between its last use, at p, and its request's start, at s: the
    number of q < s whose block was last used at p or before, minus the p + 1 accesses up to p.
    """
    by_block = np.argsort(trace.blocks, kind="stable")
    again = np.diff(trace.blocks[by_block]) == 0
    first = np.ones(trace.num_accesses, dtype=np.bool_)
    # If a chain repeats a block, only its first place counts: the others find the same.
    first[by_block[1:]] = ~(again & (np.diff(request[by_block]) == 0))
    counts = np.bincount(request[first], minlength=trace.num_requests)
    ends = np.cumsum(counts)
    starts = (ends - counts)[request]
    position = starts + ends[request] - np.cumsum(first)
    last_use = np.full(trace.num_accesses, -1, dtype=np.int64)
    by_block = by_block[first[by_block]]
    again = np.diff(trace.blocks[by_block]) == 0
    last_use[by_block[1:][again]] = position[by_block[:-1][again]]

    line = np.empty(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
    line[position[first]] = last_use[first] + 1
    used = first & (last_use >= 0)
    depths = np.where(first, LRUCurve.NEVER - 1, 0)
    depths[used] = _count_smaller(line, starts[used], last_use[used] + 2) - last_use[used] - 1
    return depths


def _count_smaller(values: Ints, ends: Ints, bounds: Ints) -> Ints:
    """Returns, per query i, how many of ``values[:ends[i]]`` are below ``bounds[i]``. No number may be negative.

    All queries descend a wavelet matrix together (Claude, Navarro and Ordonez, "The wavelet matrix", Information
    Systems 47, 2015), which is built one level at a time: O((values + queries) log largest).
    """
    counts = np.zeros(len(ends), dtype=np.int64)
    low, high = np.zeros_like(ends), ends
    largest = int(max(values.max(initial=0), bounds.max(initial=0)))
    for bit in reversed(range(largest.bit_length())):
        zero = (values >> bit) & 1 == 0
        zeros = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(zero)))
        left = (bounds >> bit) & 1 == 0
        zeros_low, zeros_high = zeros[low], zeros[high]
        counts += np.where(left, 0, zeros_high - zeros_low)
        low = np.where(left, zeros_low, zeros[-1] + low - zeros_low)
        high = np.where(left, zeros_high, zeros[-1] + high - zeros_high)
        values = np.concatenate((values[zero], values[~zero]))
    return counts

"""Prefix-hit curves: which share of a trace's prompt tokens is found in a cache, by capacity.

The curve of LRU is exact and takes one pass, by stack distance (Mattson et al., "Evaluation techniques for storage
hierarchies", IBM Systems Journal 9(2), 1970). Other policies are replayed at each capacity; long traces in miniature,
with blocks sampled by hash (Waldspurger et al., "Cache modeling and optimization using miniature simulations", ATC
2017).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload.abc import ConfigError
from kvoffload.lab.columns import renumber
from kvoffload.lab.replay import ReplayConfig, part, replay_many
from kvoffload.lab.trace import Floats, Ints, Progress, Trace

NUM_SAMPLES = 8
"""The number of disjoint samples; the error is estimated from their differences."""

MAX_SAMPLE_BITS = 20
MIN_SAMPLE_BLOCKS = 512
"""The smallest capacity of a sample's cache. Smaller caches behave unlike the large ones that they represent."""

FULL_ACCESSES = 1 << 20
"""Traces with at most this many block accesses are replayed in full."""

MIN_GAIN = 2.0
"""Sampling is used only if it cuts the work by this factor. A short request costs nearly as much as a long one, so
sampling pays only if most requests have no block in a sample."""

T_99 = 3.50
"""Student's t for two-sided 99% and NUM_SAMPLES - 1 degrees of freedom."""

GAP_BIAS = 1 / 3
"""Small caches adapt less, so all samples may share an error: at most this share of the policy's distance from LRU."""


@dataclass(frozen=True, eq=False)
class Curve:
    """The prefix hits of a policy in a trace, at several capacities."""

    policy: str
    capacities: tuple[int, ...]
    """In blocks, ascending."""
    hit_pct: Floats
    """Prefix-hit tokens in percent of all prompt tokens, one number per capacity."""
    bound_pct: Floats
    """The error bound of ``hit_pct`` in percentage points; 0: exact."""
    hit_tokens: tuple[Floats, ...]
    """Prefix-hit tokens per request, one array per capacity. Sampled capacities have estimates that are only valid for
    sums over many requests."""


def hit_curve(
    trace: Trace,
    policy: str,
    capacities: Sequence[int],
    *,
    sample_bits: int | None = None,
    processes: int | None = None,
    on_progress: Progress | None = None,
) -> Curve:
    """Returns the curve of ``policy`` at ``capacities``, in blocks.

    A sample has one in ``2**sample_bits`` blocks and is replayed with a cache that is smaller by the same factor. Only
    the policy's distance from LRU is estimated from samples: a few popular blocks cause most of the error of any
    estimate, but both policies hit or miss these alike, and LRU's hits are known exactly. The bound is a 99% interval
    from the spread of the samples plus ``GAP_BIAS``. By default the value of ``sample_bits`` with the least work is
    used, and short traces are not sampled; if given, 3 or more, it applies to all capacities. Raises ConfigError for
    an unknown policy.
    """
    least = NUM_SAMPLES.bit_length() - 1
    if sample_bits is not None and not least <= sample_bits <= MAX_SAMPLE_BITS:
        raise ConfigError("sample_bits", sample_bits, f"must be {least} to {MAX_SAMPLE_BITS}", "or leave it out")
    capacities = sorted(set(capacities))
    asked = max(1, int(trace.input_tokens.sum()))
    lru = LRUCurve(trace)
    tokens: dict[int, Floats] = {capacity: lru.hit_tokens(capacity).astype(np.float64) for capacity in capacities}
    bounds = dict.fromkeys(capacities, 0.0)
    pct = {capacity: 100.0 * float(tokens[capacity].sum()) / asked for capacity in capacities}
    if policy == "lru":
        return _curve(policy, tokens, pct, bounds)
    bits = _best_sample_bits(trace, capacities) if sample_bits is None else sample_bits
    sampled = [c for c in capacities if bits and (sample_bits or c >> bits >= MIN_SAMPLE_BLOCKS)]
    full = [c for c in capacities if c not in sampled]
    work = len(full) + NUM_SAMPLES * len(sampled) * _requests_in_sample(trace, bits)
    share = len(full) / work if work else 0.0
    configs = [ReplayConfig(policy, capacity) for capacity in full]
    results = replay_many(trace, configs, processes=processes, on_progress=part(on_progress, 0.0, share))
    for capacity, result in zip(full, results, strict=True):
        tokens[capacity] = result.host_tokens.astype(np.float64)
        pct[capacity] = result.prefix_hit_tokens_pct
    if sampled:
        gains, totals = _sampled_gains(trace, policy, sampled, bits, processes, part(on_progress, share, 1.0))
        for i, capacity in enumerate(sampled):
            points = 100.0 * totals[:, i] / asked
            gap = float(points.mean())
            error = T_99 * float(points.std(ddof=1)) / NUM_SAMPLES**0.5
            pct[capacity] = min(max(pct[capacity] + gap, 0.0), 100.0)
            bounds[capacity] = error + GAP_BIAS * abs(gap)
            tokens[capacity] = np.clip(tokens[capacity] + gains[i], 0.0, trace.input_tokens)
    return _curve(policy, tokens, pct, bounds)


def _curve(policy: str, tokens: dict[int, Floats], pct: dict[int, float], bounds: dict[int, float]) -> Curve:
    return Curve(
        policy, tuple(tokens), np.array(list(pct.values())), np.array(list(bounds.values())), tuple(tokens.values())
    )


def _requests_in_sample(trace: Trace, bits: int) -> float:
    """Returns the average share of requests that have a block in a sample."""
    return float(np.mean(1.0 - (1.0 - 0.5**bits) ** np.diff(trace.offsets))) if trace.num_requests else 0.0


def _best_sample_bits(trace: Trace, capacities: Sequence[int]) -> int:
    """Returns the sample bits with the least work; 0: do not sample."""
    if trace.num_accesses <= FULL_ACCESSES:
        return 0
    work = {0: len(capacities) / MIN_GAIN}
    for bits in range(NUM_SAMPLES.bit_length() - 1, MAX_SAMPLE_BITS + 1):
        small = sum(capacity >> bits < MIN_SAMPLE_BLOCKS for capacity in capacities)
        work[bits] = small + (len(capacities) - small) * NUM_SAMPLES * _requests_in_sample(trace, bits)
    return min(work, key=lambda bits: work[bits])


def _sampled_gains(
    trace: Trace,
    policy: str,
    capacities: Sequence[int],
    bits: int,
    processes: int | None,
    on_progress: Progress | None,
) -> tuple[Floats, Floats]:
    """Returns the tokens that ``policy`` finds beyond LRU's: estimates by capacity and request, and totals by sample
    and capacity."""
    gains = np.zeros((len(capacities), trace.num_requests))
    totals = np.zeros((NUM_SAMPLES, len(capacities)))
    weights = _block_tokens(trace)
    for j in range(NUM_SAMPLES):
        sample, requests, accesses = _sample(trace, bits, j)
        tokens_before = np.concatenate((np.zeros(1), np.cumsum(weights[accesses])))
        lru = LRUCurve(sample)
        configs = [ReplayConfig(policy, max(1, round(capacity * 0.5**bits))) for capacity in capacities]
        report = part(on_progress, j / NUM_SAMPLES, (j + 1) / NUM_SAMPLES)
        results = replay_many(sample, configs, processes=processes, on_progress=report)
        for i, (config, result) in enumerate(zip(configs, results, strict=True)):
            found = sample.offsets[:-1] + result.host_tokens
            found_by_lru = sample.offsets[:-1] + lru.hit_tokens(config.capacity_blocks)
            gain = (tokens_before[found] - tokens_before[found_by_lru]) * 2.0**bits
            totals[j, i] = gain.sum()
            gains[i, requests] += gain / NUM_SAMPLES
    return gains, totals


def _sample(trace: Trace, bits: int, j: int) -> tuple[Trace, Ints, Ints]:
    """Returns a trace of the blocks whose hash begins with the ``bits`` bits of ``j``, of one token each and without
    requests that have no such block; and the numbers in ``trace`` of its requests and accesses."""
    chosen = _mixed(trace.ids) >> np.uint64(64 - bits) == np.uint64(j)
    accesses = np.flatnonzero(chosen[trace.blocks])
    request = _request_of(trace)[accesses]
    in_prompt = accesses - trace.offsets[request] < trace.prompt_blocks[request]
    lengths = np.bincount(request, minlength=trace.num_requests)
    prompts = np.bincount(request[in_prompt], minlength=trace.num_requests)
    requests = np.flatnonzero(lengths)
    blocks, ids = renumber(trace.ids[trace.blocks[accesses]])
    sample = Trace(
        name=trace.name,
        block_tokens=1,
        times=trace.times[requests],
        input_tokens=prompts[requests],
        output_tokens=(lengths - prompts)[requests],
        offsets=np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths[requests]))),
        blocks=blocks,
        prompt_blocks=prompts[requests],
        ids=ids,
        sessions=trace.sessions[requests],
        tenants=trace.tenants[requests],
        returns_in=trace.returns_in[requests],
        retains=trace.retains[requests],
    )
    return sample, requests, accesses


def _mixed(ids: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Returns a hash of each id: the finalizer of SplitMix64."""
    mixed = ids + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


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

"""Generates synthetic workloads: conversations, agents, and questions about documents.

``python -m benchmarks.synthetic KIND FILE [--requests N] [--seed N]`` writes one to a file that ``kvoffload size`` and
``kvoffload replay`` read.

``chat``: sessions of a few turns after one of 20 system prompts. ``agent``: long sessions of many short turns in quick
succession, with breaks, after one of four sets of tools. ``documents``: single questions, each about one of 500
documents. The prompt, set or document is drawn from a Zipf distribution. Sessions, and questions about documents, start
as a Poisson process; the gaps between turns are exponential. Each prompt of a session consists of the one before, its
answer, and new tokens. Lengths are log-normal. The same options give the same trace on every machine.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

from kvoffload.lab.trace import Trace, TraceBuilder
from kvoffload.lab.writer import write_trace

BLOCK_TOKENS = 256
REQUESTS = 5000
MAX_PROMPT = 128 * 1024
"""A session ends before it exceeds this many tokens."""

Turn = tuple[float, int, int]
"""Seconds since the previous turn, tokens of the prompt, tokens of the answer."""
Session = tuple[int, int, Iterator[Turn]]
"""Number and tokens of the shared text at the start of all its prompts, and its turns."""


def generate(kind: str, requests: int = REQUESTS, seed: int = 0, block_tokens: int = BLOCK_TOKENS) -> Trace:
    """Returns a workload of one of KINDS."""
    rows = TraceBuilder()
    for at, number, (shared, shared_tokens), (_, prompt, answer) in _in_time(kind, requests, seed):
        # The last token of an answer is sampled, but its KV is not computed.
        chain = _chain(number, shared, shared_tokens // block_tokens, (prompt + answer - 1) // block_tokens)
        rows.add(at, prompt, answer, chain, prompt // block_tokens, str(number) if kind in _WITH_SESSIONS else None)
    return rows.build(f"synthetic {kind}", block_tokens, info={"format": "synthetic"})


def _in_time(kind: str, requests: int, seed: int) -> Iterator[tuple[float, int, tuple[int, int], Turn]]:
    """Yields the time of each request, its session, the number and tokens of its shared text, and the turn."""
    rng = random.Random(f"{kind} {seed}")
    begin, every_s = KINDS[kind]
    waiting: list[tuple[float, int, int, int, Turn, Iterator[Turn]]] = []
    sessions, next_start = 0, 0.0
    for _ in range(requests):
        while not waiting or next_start <= waiting[0][0]:
            shared, tokens, turns = begin(rng)
            heapq.heappush(waiting, (next_start, sessions, shared, tokens, next(turns), turns))
            sessions += 1
            next_start += _exponential(rng, every_s)
        at, number, shared, tokens, turn, turns = waiting[0]
        yield at, number, (shared, tokens), turn
        following = next(turns, None)
        if following is None:
            heapq.heappop(waiting)
        else:
            heapq.heapreplace(waiting, (at + following[0], number, shared, tokens, following, turns))


def _chain(session: int, shared: int, shared_blocks: int, blocks: int) -> list[int]:
    """Returns the ids of a chain that begins with the blocks of a shared text and continues with the session's own."""
    common = min(shared_blocks, blocks)
    first_shared, first_own = (1 << 62) + (shared << 32), session << 32
    return [*range(first_shared, first_shared + common), *range(first_own + common, first_own + blocks)]


def _chat(rng: random.Random) -> Session:
    shared = _zipf(rng, _PROMPTS)

    def turns() -> Iterator[Turn]:
        context, gap = _SYSTEM_TOKENS[shared], 0.0
        while True:
            prompt, answer = context + _lengths(rng, 120, 1.0), _lengths(rng, 250, 0.8)
            if prompt + answer > MAX_PROMPT:
                return
            yield gap, prompt, answer
            if rng.random() < 1 / CHAT_TURNS:
                return
            context, gap = prompt + answer, _exponential(rng, CHAT_GAP_S)

    return shared, _SYSTEM_TOKENS[shared], turns()


def _agent(rng: random.Random) -> Session:
    shared = _zipf(rng, _TOOLSETS)

    def turns() -> Iterator[Turn]:
        context, gap = _TOOL_TOKENS[shared] + _lengths(rng, 2000, 1.0), 0.0
        while True:
            prompt, answer = context + _lengths(rng, 600, 1.2), _lengths(rng, 150, 1.0)
            if prompt + answer > MAX_PROMPT:
                return
            yield gap, prompt, answer
            if rng.random() < 1 / AGENT_TURNS:
                return
            is_break = rng.random() < AGENT_BREAKS
            context, gap = prompt + answer, _exponential(rng, AGENT_BREAK_S if is_break else AGENT_GAP_S)

    return shared, _TOOL_TOKENS[shared], turns()


def _documents(rng: random.Random) -> Session:
    shared = _zipf(rng, _DOCUMENTS)
    turn = 0.0, _DOCUMENT_TOKENS[shared] + _lengths(rng, 60, 0.7), _lengths(rng, 200, 0.8)
    return shared, _DOCUMENT_TOKENS[shared], iter([turn])


def _exponential(rng: random.Random, mean: float) -> float:
    return -mean * math.log(1.0 - rng.random())


def _lengths(rng: random.Random, median: int, sigma: float) -> int:
    """Draws a log-normal length, at least 1 and at most 64 times the median. Uses the Box-Muller transform, because its
    sequence of draws is fixed."""
    normal = math.sqrt(-2 * math.log(1.0 - rng.random())) * math.cos(2 * math.pi * rng.random())
    return max(1, min(64 * median, round(median * math.exp(sigma * normal))))


def _zipf(rng: random.Random, cumulative: list[float]) -> int:
    return rng.choices(range(len(cumulative)), cum_weights=cumulative)[0]


def _weights(count: int, exponent: float) -> list[float]:
    return list(accumulate((rank + 1) ** -exponent for rank in range(count)))


CHAT_TURNS, CHAT_GAP_S = 4, 60.0
AGENT_TURNS, AGENT_GAP_S, AGENT_BREAKS, AGENT_BREAK_S = 60, 8.0, 0.05, 600.0
_PROMPTS, _TOOLSETS, _DOCUMENTS = _weights(20, 1.0), _weights(4, 1.0), _weights(500, 0.9)
_FIXED = random.Random("lengths of the shared texts")
_SYSTEM_TOKENS = [_lengths(_FIXED, 600, 0.8) for _ in _PROMPTS]
_TOOL_TOKENS = [_lengths(_FIXED, 9000, 0.4) for _ in _TOOLSETS]
_DOCUMENT_TOKENS = [_lengths(_FIXED, 6000, 0.8) for _ in _DOCUMENTS]

KINDS: dict[str, tuple[Callable[[random.Random], Session], float]] = {
    "chat": (_chat, 2.0),
    "agent": (_agent, 60.0),
    "documents": (_documents, 1.0),
}
"""For each kind: the function that starts a session, and the mean seconds between two starts."""
_WITH_SESSIONS = ("chat", "agent")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.synthetic", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("file", type=Path)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_trace(generate(args.kind, args.requests, args.seed), args.file, force=True)


if __name__ == "__main__":
    main()

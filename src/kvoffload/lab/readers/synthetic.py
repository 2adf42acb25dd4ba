"""Generates synthetic workloads: conversations, agents, and questions about documents.

``synthetic:chat``: sessions of a few turns after one of 20 system prompts. ``synthetic:agent``: long sessions of many
short turns in quick succession, with breaks, after one of four sets of tools. ``synthetic:documents``: single
questions, each about one of 500 documents. The prompt, set or document is drawn from a Zipf distribution. Sessions, and
questions about documents, start as a Poisson process; the gaps between turns are exponential. Each prompt of a session
consists of the one before, its answer, and new tokens. Lengths are log-normal. The same options give the same trace on
every machine.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator
from itertools import accumulate
from urllib.parse import parse_qsl

from kvoffload.lab.readers.lines import positive_or
from kvoffload.lab.trace import MEMORY_BYTES, Trace, TraceBuilder, TraceError

PREFIX = "synthetic:"
BLOCK_TOKENS = 256
REQUESTS = 5000
MAX_REQUESTS = 1_000_000
MAX_SEED = (1 << 63) - 1
MAX_PROMPT = 128 * 1024
"""A session ends before it exceeds this many tokens."""

Turn = tuple[float, int, int]
"""Seconds since the previous turn, tokens of the prompt, tokens of the answer."""
Session = tuple[int, int, Iterator[Turn]]
"""Number and tokens of the shared text at the start of all its prompts, and its turns."""


def generate(source: str, block_tokens: int | None = None, memory_bytes: int = MEMORY_BYTES) -> Trace:
    """Returns the trace described by ``source``, such as "synthetic:chat?requests=5000&seed=1". Raises TraceError."""
    size = positive_or(block_tokens, BLOCK_TOKENS)
    kind, _, query = source.removeprefix(PREFIX).partition("?")
    if kind not in KINDS:
        raise TraceError(f"{source}: unknown; use one of {', '.join(PREFIX + each for each in KINDS)}")
    requests, seed = _options(source, query)
    rows = TraceBuilder(memory_bytes)
    for at, number, (shared, shared_tokens), (_, prompt, answer) in _in_time(kind, requests, seed):
        # The last token of an answer is sampled, but its KV is not computed.
        chain = _chain(number, shared, shared_tokens // size, (prompt + answer - 1) // size)
        rows.add(at, prompt, answer, chain, prompt // size, str(number) if kind in _WITH_SESSIONS else None)
    return rows.build(
        source,
        size,
        info={"format": "synthetic", "kind": kind, "requests": requests, "seed": seed},
    )


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


def _options(source: str, query: str) -> tuple[int, int]:
    """Returns ``requests`` and ``seed``. Raises TraceError."""
    found = {"requests": REQUESTS, "seed": 0}
    limits = {"requests": (1, MAX_REQUESTS), "seed": (0, MAX_SEED)}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in found:
            raise TraceError(f"{source}: unknown option {name}; the options are {', '.join(found)}")
        least, most = limits[name]
        if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
            raise TraceError(f"{source}: {name}={text}: must be a whole number from {least} to {most:,}")
        found[name] = int(text)
    return found["requests"], found["seed"]

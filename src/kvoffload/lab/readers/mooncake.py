"""Reads Mooncake's traces (https://github.com/kvcache-ai/Mooncake, FAST25-release/traces): one JSON object per request.

``{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}``, where ``hash_ids[i]`` names
the prompt's whole prefix up to and including block i; the last block may be incomplete.

As in AIPerf's traces, requests may be turns of a ``session_id``, and all but the first may have a ``delay`` in place of
the timestamp: milliseconds after the previous turn of the session ended. How long a turn took no trace says, so it is
assumed to take OUTPUT_TOKEN_S per token of its answer.
"""

from __future__ import annotations

from kvoffload.lab.readers.lines import Source, optional_name, parse_object, positive_or, prefix_ids, seconds, whole
from kvoffload.lab.trace import Trace, TraceBuilder

BLOCK_TOKENS = 512
MILLISECOND = 1e-3
OUTPUT_TOKEN_S = 0.02


def read(source: Source, block_tokens: int | None = None) -> Trace:
    """Reads the trace. ``block_tokens``: by default 512. Raises TraceError."""
    size = positive_or(block_tokens, BLOCK_TOKENS)
    rows = TraceBuilder()
    ends: dict[str, float] = {}
    """When the latest turn of each session ended."""

    def request(line: bytes) -> tuple[float, int, int, list[int], None, str | None]:
        data = parse_object(line)
        tokens, output, session = (
            whole(data, "input_length", 1),
            whole(data, "output_length"),
            optional_name(data, "session_id"),
        )
        chain = prefix_ids(data)
        check_length(len(chain), tokens, size)
        if "timestamp" not in data and session in ends:
            at = ends[session] + seconds(data, "delay", MILLISECOND)
        elif "timestamp" not in data and "delay" in data:
            raise ValueError(f"timestamp is missing, and there is no turn of session_id={str(session)[:40]!r} before")
        else:
            at = seconds(data, "timestamp", MILLISECOND)
        if session is not None:
            ends[session] = at + output * OUTPUT_TOKEN_S
        return at, tokens, output, chain, None, session

    for row in source.parsed(request):
        rows.add(*row)
    return source.trace(rows, size)


def check_length(ids: int, tokens: int, block_tokens: int) -> None:
    """Raises ValueError unless every whole block has an id; an incomplete last block may have one."""
    if tokens // block_tokens <= ids <= -(-tokens // block_tokens):
        return
    raise ValueError(
        f"{ids} hash_ids for input_length={tokens}, which has {-(-tokens // block_tokens)} blocks of {block_tokens} "
        "tokens; if blocks have another size, give it with --block-tokens (block_tokens=)"
    )

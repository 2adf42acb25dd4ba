"""Reads Mooncake's traces (https://github.com/kvcache-ai/Mooncake, FAST25-release/traces): one JSON object per request.

``{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}``, where ``hash_ids[i]`` names
the prompt's whole prefix up to and including block i; the last block may be incomplete.
"""

from __future__ import annotations

from kvoffload.lab.readers.lines import Source, parse_object, positive_or, prefix_ids, seconds, whole
from kvoffload.lab.trace import Trace

BLOCK_TOKENS = 512
MILLISECOND = 1e-3


def read(source: Source, block_tokens: int | None = None) -> Trace:
    """Reads the trace. ``block_tokens``: by default 512. Raises TraceError."""
    size = positive_or(block_tokens, BLOCK_TOKENS)
    rows = source.builder()

    def request(line: bytes) -> tuple[float, int, int, list[int]]:
        data = parse_object(line)
        at, tokens = seconds(data, "timestamp", MILLISECOND), whole(data, "input_length", 1)
        output, chain = whole(data, "output_length"), prefix_ids(data)
        check_length(len(chain), tokens, size)
        return at, tokens, output, chain

    for _, row in source.parsed(request):
        rows.add(*row, None)
    return source.trace(rows, size)


def check_length(ids: int, tokens: int, block_tokens: int) -> None:
    """Raises ValueError unless every whole block has an id; an incomplete last block may have one."""
    if tokens // block_tokens <= ids <= -(-tokens // block_tokens):
        return
    raise ValueError(
        f"{ids} hash_ids for input_length={tokens}, which has {-(-tokens // block_tokens)} blocks of {block_tokens} "
        "tokens; if blocks have another size, give it with --block-tokens (block_tokens=)"
    )

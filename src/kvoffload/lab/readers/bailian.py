"""Reads the traces of Alibaba's Bailian (https://github.com/alibaba-edu/qwen-bailian-usagetraces-anon): one JSON object
per request.

``{"chat_id": 159, "parent_chat_id": 55 or -1, "timestamp": seconds, "input_length": tokens, "output_length": tokens,
"type": "text", "turn": 2, "hash_ids": [...]}``. An id names the 16 tokens of a block, not the prefix, so this reader
chains ids: a block is named by all ids up to its end. Incomplete blocks are left out. Requests that continue each
other, by their ``parent_chat_id``, are a session.
"""

from __future__ import annotations

import xxhash

from kvoffload.lab.readers.lines import Source, block_ids, parse_object, positive_or, seconds, whole
from kvoffload.lab.readers.mooncake import check_length
from kvoffload.lab.trace import Trace, TraceBuilder, TraceError

PARENT = "parent_chat_id"
UNIT = 16
NO_PARENT = -1


def read(source: Source, block_tokens: int | None = None) -> Trace:
    """Reads the trace. ``block_tokens`` must be a multiple of 16, the default. Raises TraceError."""
    size = positive_or(block_tokens, UNIT)
    per_block, rest = divmod(size, UNIT)
    if rest:
        fault = f"blocks of {source.path.name} have {UNIT} tokens"
        raise TraceError("block_tokens", size, fault, "use a multiple of that")
    rows = TraceBuilder()
    first_of: dict[int, int] = {}
    """The first request of the session of each request."""
    for at, tokens, output, request, parent, ids in source.parsed(_request):
        # The trace may begin in the middle of a session.
        session = first_of[request] = request if parent == NO_PARENT else first_of.get(parent, parent)
        chain = _prefixes(ids[: tokens // UNIT])[per_block - 1 :: per_block]
        rows.add(at, tokens, output, chain, None, str(session))
    return source.trace(rows, size)


def _request(line: bytes) -> tuple[float, int, int, int, int, list[int]]:
    """Returns time, tokens of prompt and answer, id, the parent's id, and the ids of the blocks."""
    data = parse_object(line)
    at, tokens, output = seconds(data, "timestamp"), whole(data, "input_length", 1), whole(data, "output_length")
    request, parent, ids = whole(data, "chat_id"), whole(data, PARENT, NO_PARENT), block_ids(data)
    check_length(len(ids), tokens, UNIT)
    return at, tokens, output, request, parent, ids


def _prefixes(ids: list[int]) -> list[int]:
    """Returns a name for each prefix of ``ids``."""
    names: list[int] = []
    last, digest = 0, xxhash.xxh3_64_intdigest
    for each in ids:
        last = digest(each.to_bytes(8, "little"), seed=last)
        names.append(last)
    return names

"""Reads conversations in ShareGPT's form, such as the Codex traces on SWE-bench Pro
(https://huggingface.co/datasets/Inferact/codex_swebenchpro_traces, file codex_swebenchpro.json).

The file is a JSON array of ``{"conversations": [{"from": "human" or "gpt", "value": text}, ...]}``, or has one such
object per line. Each turn of ``gpt`` is a request, and all turns before it are its prompt.

There is text, but no tokens, times or names. This reader takes 4 bytes for a token, and names a block by all text up to
its end. Each conversation is a session. Its requests are 10 s apart, and it starts at a time derived from its place in
the file, uniformly distributed over the length of the longest conversation.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import xxhash

from kvoffload.lab.readers.lines import SessionStarts, Source, parse_object, positive_or
from kvoffload.lab.trace import Trace

BLOCK_TOKENS = 64
TOKEN_BYTES = 4
GAP_S = 10.0
HUMAN, GPT = "human", "gpt"


def read(source: Source, block_tokens: int | None = None) -> Trace:
    """Reads the conversations. ``block_tokens``: by default 64. Raises TraceError."""
    size = positive_or(block_tokens, BLOCK_TOKENS)
    rows = source.builder()
    starts = SessionStarts()
    for number, record in _records(source):
        try:
            turns = _turns(record)
        except ValueError as error:
            source.problem(number, error)
            continue
        before = rows.num_requests
        text = _Text(size * TOKEN_BYTES)
        for speaker, value in turns:
            # An engine is given the mark of the speaker too, before it answers.
            text.add(f"{speaker}\n")
            prompt, blocks = text.tokens, text.num_blocks
            text.add(f"{value}\n")
            if speaker == GPT:
                at = GAP_S * (rows.num_requests - before)
                # The last token of an answer is sampled, but its KV is not computed.
                chain = text.names[: (text.tokens - 1) // size]
                rows.add(at, prompt, text.tokens - prompt, chain, min(blocks, len(chain)), str(number))
        requests = rows.num_requests - before
        starts.add(b"%d" % number, requests, GAP_S * (requests - 1))
    return source.trace(rows, size, starts.delays(), {"sessions": len(starts)})


class _Text:
    """A text that grows, and the names of its whole blocks."""

    def __init__(self, block_bytes: int) -> None:
        self.names: list[int] = []
        self._block_bytes = block_bytes
        self._rest = b""
        """What follows the last whole block."""

    @property
    def num_blocks(self) -> int:
        return len(self.names)

    @property
    def tokens(self) -> int:
        return -(-(self.num_blocks * self._block_bytes + len(self._rest)) // TOKEN_BYTES)

    def add(self, text: str) -> None:
        # The replacement keeps lone surrogates, which JSON may contain, apart from valid text.
        data = self._rest + text.encode("utf-8", "backslashreplace")
        size, names, digest = self._block_bytes, self.names, xxhash.xxh3_64_intdigest
        ends = range(0, len(data) + 1, size)
        for start, end in pairwise(ends):
            names.append(digest(data[start:end], seed=names[-1] if names else 0))
        self._rest = data[ends[-1] :]


def _records(source: Source) -> Iterator[tuple[int, Any]]:
    """Yields the number of each element or line, and its value."""
    if source.head(1 << 10).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        yield from source.elements()
    else:
        yield from source.parsed(parse_object)


def _turns(record: Any) -> list[tuple[str, str]]:
    """Returns the speakers and texts of a conversation. Raises ValueError unless it begins with a human and has an
    answer."""
    turns = record.get("conversations") if isinstance(record, dict) else None
    if not isinstance(turns, list):
        raise ValueError(f"not a conversation: {_EXPECTED}")
    found = []
    for index, turn in enumerate(turns):
        speaker, value = (turn.get("from"), turn.get("value")) if isinstance(turn, dict) else (None, None)
        if speaker not in (HUMAN, GPT) or not isinstance(value, str):
            raise ValueError(f"turn {index}: {_EXPECTED}")
        found.append((speaker, value))
    if not found or found[0][0] != HUMAN or GPT not in (speaker for speaker, _ in found):
        raise ValueError("the conversation does not begin with a human turn, or no gpt turn follows")
    return found


_EXPECTED = 'expected {"conversations": [{"from": "human" or "gpt", "value": text}, ...]}'

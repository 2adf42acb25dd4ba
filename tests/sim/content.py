"""The KV that requests of the model engine must have, and the requests themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.abc import BlockHash, KVGroup
from kvoffload.cache.keys import hash_blocks

Words: TypeAlias = npt.NDArray[np.uint64]
Integers: TypeAlias = npt.NDArray[np.int64]
Table: TypeAlias = list[int]
"""Device blocks of one request in one group, from its first token on."""

TOKEN_BYTES = 8
"""KV bytes per token and layer: one word. A state has as many as the tokens of a block."""
SPREAD = 0x9E3779B97F4A7C15
"""An odd number that spreads small ones over a word."""
NULL_BLOCK = 0
"""In a table: a block that no token of the request attends to any more."""


def first_attended(group: KVGroup, position: int) -> int:
    """The first token that the token at ``position`` attends to: the engine's own reading of ``group``. With a state,
    that is the token before it, at which the state stands."""
    if group.state:
        return max(0, position - 1)
    if group.sliding_window is not None:
        return max(0, position - (group.sliding_window - 1))
    if group.attention_chunk is not None:
        return position - position % group.attention_chunk
    return 0


@dataclass(eq=False)
class RequestStates:
    """Where the states of a request are, in groups that have states."""

    has_scratch: bool = False
    """Whether its tables of these groups end with scratch blocks."""
    ends: set[int] = field(default_factory=set)
    """Numbers of tokens after which a state stood in its blocks when a step or load had ended."""
    unoffered: list[int] = field(default_factory=list)
    """Those of which the connector does not know yet."""
    junction: int = 0
    """The device had KV up to here when the request was last looked up, but no state. 0: it had all or nothing."""


@dataclass(eq=False)
class EngineRequest:
    """A request, as the engine and the connector see it."""

    request_id: str
    tokens: list[int]
    """The known tokens: the prompt and the sampled tokens that have been reported back."""
    max_new_tokens: int
    hash_block_size: int
    version: int
    """The version of the weights with which its KV is computed."""
    kv_transfer_params: Mapping[str, Any] | None = None
    adapter: int = 0
    """The number of the adapter that it computes with; 0: none."""
    variant: int = 0
    """The bytes of that adapter."""
    num_computed_tokens: int = 0
    block_hashes: list[BlockHash] = field(default_factory=list)
    real_tokens: list[int] = field(default_factory=list)
    """``tokens`` and those that were sampled but not yet reported back."""
    blocks: list[Table] = field(default_factory=list)
    """One table per group; empty while it holds no blocks."""
    num_cached: list[int] = field(default_factory=list)
    """Per group, how many of its blocks were given to the prefix cache."""
    states: RequestStates = field(default_factory=RequestStates)
    num_prompt_tokens: int = 0
    found_tokens: int = 0
    """How many tokens it had computed when it was last given its first blocks: those on the device and the loaded
    ones."""
    loading: bool = False
    waiting_since: float | None = None
    """When the connector first answered "ask again", since it was last given blocks."""
    num_waits: int = 0
    """Waits that have ended since then."""
    in_flight: int = 0
    """Steps in progress that compute for it."""
    tokens_in_flight: int = 0
    """Tokens that these compute."""
    finished: bool = False
    old_blocks: dict[tuple[int, int], int] = field(default_factory=dict)
    """Blocks that it found in the engine's own cache with the KV of other weights: the version by group and index."""
    _contents: dict[tuple[int, int], Content] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)
        self.real_tokens = list(self.tokens)
        self.append([])

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def append(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(tokens)
        done = len(self.block_hashes) * self.hash_block_size
        root = b"adapter %d" % self.adapter if self.adapter else b""
        parent = self.block_hashes[-1] if self.block_hashes else root
        self.block_hashes += hash_blocks(self.tokens[done:], self.hash_block_size, parent)

    @property
    def held_blocks(self) -> list[int]:
        return [block for table in self.blocks for block in table if block != NULL_BLOCK]

    @property
    def wanted_tokens(self) -> int:
        return self.num_prompt_tokens + self.max_new_tokens

    @property
    def processed_tokens(self) -> int:
        """Computed tokens that no step in progress may attend from any more."""
        return self.num_computed_tokens - self.tokens_in_flight

    def words(self, g: int, group: KVGroup, end: int) -> Words:
        """Returns the KV that its first ``end`` positions must have in group ``g``, without salts."""
        words = self._words(self.version, group, end)
        if any(old_group == g for old_group, _ in self.old_blocks):
            words, size = words.copy(), group.device_block_size
            for (old_group, index), version in self.old_blocks.items():
                if old_group == g:
                    block = slice(index * size, (index + 1) * size)
                    words[block] = self._words(version, group, end)[block]
        return words

    def state(self, g: int, group: KVGroup, end: int) -> Words:
        """Returns the state that it must have after ``end`` tokens in group ``g``, without salts."""
        size = group.device_block_size
        version = self.old_blocks.get((g, (end - 1) // size), self.version)
        salts: Words = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(SPREAD)
        words: Words = salts ^ self._words(version, group, end)[end - 1]
        return words

    def _words(self, version: int, group: KVGroup, end: int) -> Words:
        key = version, self.variant
        content = self._contents.setdefault(key, Content(*key))
        content.extend(self.real_tokens)
        return content.ahead(end, group.lookahead)

    def first_written(self, group: KVGroup, start: int) -> int:
        """Returns the first position whose KV a step computes that begins at token ``start``. With a lookahead of
        several tokens, the last positions of the step before are computed again, because now these tokens are known."""
        again = max(self.found_tokens, first_attended(group, start), start - group.lookahead + 1)
        return min(start, again)


def following(request: Any, position: int, n: int) -> bytes:
    """Describes ``n`` tokens of an EngineRequest, for the connector."""
    return b"".join(token.to_bytes(4, "little") for token in request.tokens[position : position + n])


Batch: TypeAlias = list[tuple[EngineRequest, int]]
"""The requests that compute in a step, with their numbers of tokens."""


class Content:
    """The KV of a sequence, one word per position: ``words`` are a function of the version of the weights, of the bytes
    of an adapter, and of all tokens up to the position. Layers and ranks add salts of their own."""

    def __init__(self, version: int, variant: int = 0) -> None:
        self.words = to_words([])
        self._tokens = to_words([])
        self._state = digest(f"version {version} {variant}".encode())

    def extend(self, tokens: Sequence[int]) -> None:
        done, end = len(self.words), len(tokens) - 1
        if end <= done:
            return
        new = []
        for token in tokens[done:end]:
            self._state = digest(self._state + token.to_bytes(4, "little"))
            new.append(int.from_bytes(self._state, "little"))
        self.words = np.concatenate((self.words, to_words(new)))
        self._tokens = to_words(tokens)

    def ahead(self, end: int, lookahead: int) -> Words:
        """Returns the words of the first ``end`` positions, each mixed with the ``lookahead`` tokens after it. As the
        token at ``end`` is the last that a step knows, words near the end do without the others."""
        words = self.words[:end]
        for distance in range(1, lookahead + 1):
            after = (self._tokens[distance : end + 1] + np.uint64(1)) * np.uint64(SPREAD + 2 * (distance - 1))
            words = words ^ np.pad(after, (0, len(words) - len(after)))
        return words


class Access(NamedTuple):
    """What the layers of a group read and write in a step: first ``num_read`` words, then the others."""

    blocks: Integers
    offsets: Integers
    words: Words
    """What must be there, or is written, without salts."""
    num_read: int

    @classmethod
    def of(cls, request: EngineRequest, g: int, group: KVGroup, start: int, end: int) -> Access:
        """Returns what the tokens from ``start`` to ``end`` read and write in group ``g``: they attend to KV and write
        their own, or go on from the state after ``start`` tokens and leave the one after ``end`` tokens."""
        size, table = group.device_block_size, np.array(request.blocks[g])
        if group.state:
            ends = [start, end] if start else [end]
            words = np.concatenate([request.state(g, group, each) for each in ends])
            blocks = table[(np.array(ends) - 1) // size]
            offsets = np.tile(np.arange(size), len(ends))
            return cls(np.repeat(blocks, size), offsets, words, size if start else 0)
        written = request.first_written(group, start)
        low = min(first_attended(group, start), written)
        tokens = np.arange(low, end)
        return cls(table[tokens // size], tokens % size, request.words(g, group, end)[low:], written - low)


def to_words(words: Sequence[int]) -> Words:
    return np.array(words, np.uint64)


def digest(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=TOKEN_BYTES).digest()


def sample(tokens: Sequence[int]) -> int:
    """The next token: a function of all before it."""
    raw = ",".join(map(str, tokens)).encode()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=2).digest(), "little") % 1000

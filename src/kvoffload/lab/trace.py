"""A request trace as arrays: arrival times, lengths, and the chain of blocks of each request."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import xxhash

from kvoffload.abc import KVOffloadError, OffloadKey
from kvoffload.cache.keys import make_offload_key

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Keys = npt.NDArray[np.void]

PIECE = 1 << 16
"""Entries that are worked on at once where a whole column might not fit into memory."""
KEY = np.dtype("V20")
DIGEST = np.dtype([("digest", "<u8"), ("rest", "V12")])
"""A key, split where its bytes distinguish it well enough: they are a hash."""


class TraceError(KVOffloadError, ValueError):
    """A trace cannot be used. The message names the file, and the line if a line is the cause."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A line that was skipped, and why."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


@dataclass(frozen=True, eq=False)
class Trace:
    """``num_requests`` requests, ordered by time, and the chain of blocks of each.

    Blocks are numbered from 0 in the order in which they first occur. Equal numbers mean an equal prefix up to and
    including that block. ``ids[b]`` is the id of block b in the file: the same in all traces of one source.
    """

    name: str
    block_tokens: int
    """Tokens per block; 1 if the trace has no tokens."""
    times: Floats
    """Arrival times in seconds, ascending."""
    input_tokens: Ints
    """Lengths of the prompts. The last block of a prompt may be incomplete."""
    output_tokens: Ints
    offsets: Ints
    """Shape (num_requests + 1,): request r has ``blocks[offsets[r]:offsets[r + 1]]``."""
    blocks: Ints
    """The chains of all requests, each head first: the prompt's blocks, then the output's if the trace has them."""
    prompt_blocks: Ints
    """How many of each request's blocks belong to its prompt, including an incomplete last one."""
    ids: npt.NDArray[np.uint64]
    problems: tuple[Problem, ...] = ()
    """The first of the lines that were skipped."""
    num_problems: int = 0
    """How many lines were skipped."""
    info: dict[str, object] = field(default_factory=dict)
    """Further properties from the file, such as the cache sizes of a recorded server."""

    @property
    def num_requests(self) -> int:
        return len(self.times)

    @property
    def num_accesses(self) -> int:
        return len(self.blocks)

    @property
    def num_distinct(self) -> int:
        return len(self.ids)

    @cached_property
    def _keys(self) -> Keys:
        """One OffloadKey per distinct block, made from its id: the same in every run."""
        keys = np.empty(self.num_distinct, dtype=KEY)
        xxh = xxhash.xxh3_128_digest
        for start in range(0, len(keys), PIECE):
            ids = self.ids[start : start + PIECE].tolist()
            made = b"".join([make_offload_key(xxh(block_id.to_bytes(8, "little")), 0) for block_id in ids])
            keys[start : start + len(ids)] = np.frombuffer(made, dtype=KEY)
        return keys

    @cached_property
    def _digests(self) -> npt.NDArray[np.uint64]:
        """The first 64 bits of each key, ascending."""
        digests = np.ascontiguousarray(self._keys.view(DIGEST)["digest"])
        digests.sort()
        return digests

    def keys_of(self, blocks: Ints) -> list[OffloadKey]:
        """Returns the key of each of ``blocks``. They are made anew by each call, so no more are in memory than are in
        use."""
        keys: list[OffloadKey] = self._keys[blocks].tolist()
        return keys

    def ranks_of(self, keys: Collection[OffloadKey]) -> Ints:
        """Returns for each of the trace's ``keys`` a number below ``num_distinct`` that no other block of it has."""
        asked = np.frombuffer(b"".join(keys), dtype=DIGEST)["digest"]
        return self._digests.searchsorted(asked)

    def chain(self, request: int) -> Ints:
        chain: Ints = self.blocks[self.offsets[request] : self.offsets[request + 1]]
        return chain

    def between(self, start: float, end: float) -> Trace:
        """Returns a trace of the requests between two fractions of the time from the first request to the last."""
        first, last = (self.times[0], self.times[-1]) if self.num_requests else (0.0, 0.0)
        low = int(np.searchsorted(self.times, first + start * (last - first))) if start > 0 else 0
        high = int(np.searchsorted(self.times, first + end * (last - first))) if end < 1 else self.num_requests
        raw = self.blocks[self.offsets[low] : self.offsets[high]]
        blocks, ids = renumber(self.ids[raw])
        return replace(
            self,
            times=self.times[low:high],
            input_tokens=self.input_tokens[low:high],
            output_tokens=self.output_tokens[low:high],
            offsets=self.offsets[low : high + 1] - self.offsets[low],
            blocks=blocks,
            prompt_blocks=self.prompt_blocks[low:high],
            ids=ids,
        )


def renumber(ids: npt.NDArray[np.uint64]) -> tuple[Ints, npt.NDArray[np.uint64]]:
    """Returns block numbers in the order of first occurrence, and the id of each number."""
    distinct, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return rank[inverse], distinct[order]


def make_trace(
    name: str,
    block_tokens: int,
    times: Sequence[float],
    input_tokens: Sequence[int],
    output_tokens: Sequence[int],
    chains: Sequence[Sequence[int]],
    prompt_blocks: Sequence[int] | None = None,
    **more: object,
) -> Trace:
    """Returns a trace made from lists. Requests are sorted by time; requests of the same time stay in order.

    ``chains`` has the block ids of each request, in [0, 2**64). ``prompt_blocks``: by default the length of the chain.
    """
    order = np.argsort(np.asarray(times, dtype=np.float64), kind="stable")
    lengths = np.array([len(chains[i]) for i in order], dtype=np.int64)
    offsets = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths)))
    flat = np.fromiter((b for i in order for b in chains[i]), dtype=np.uint64, count=int(offsets[-1]))
    blocks, ids = renumber(flat)
    return Trace(
        name,
        block_tokens,
        np.asarray(times, dtype=np.float64)[order],
        np.asarray(input_tokens, dtype=np.int64)[order],
        np.asarray(output_tokens, dtype=np.int64)[order],
        offsets,
        blocks,
        lengths if prompt_blocks is None else np.asarray(prompt_blocks, dtype=np.int64)[order],
        ids,
        **more,  # type: ignore[arg-type]
    )

"""The canonical layout in the model engine: which heads each rank holds, and where a slot has their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from kvoffload.abc import KVGroup, PageGroup
from kvoffload.connector.ranks import CanonicalRows, KVShare, LayerPages, PageRun, join, place

NUMBERS = (1, 2, 3, 4, 6)
"""Heads per layer. One head, as with MLA, is on all ranks."""
MOST_RANKS = 4


@dataclass(frozen=True)
class Heads:
    """The heads of a model, and the parallelism of the ranks that hold them. The content of a head depends on no rank.

    A page has a word per piece, head and token, in this order.
    """

    number: int
    """Heads per layer."""
    pieces: int
    """2: the keys of all heads lie before the values of all, so the heads of a rank are two runs of bytes."""
    tensor: int = 1
    """Tensor-parallel ranks per stage. Where there are more than heads, consecutive ranks hold the same one."""
    stages: int = 1
    """Pipeline stages."""

    @classmethod
    def random(cls, rng: Random) -> Heads:
        """Returns the heads of a random model, on one rank."""
        return cls(rng.choice(NUMBERS), rng.choice((1, 2)))

    def on_ranks(self, rng: Random, num_layers: int) -> Heads:
        """Returns the same heads on random ranks, each with some of the ``num_layers`` layers."""
        able = [
            (tensor, stages)
            for tensor in range(1, MOST_RANKS + 1)
            for stages in range(1, min(num_layers, MOST_RANKS // tensor) + 1)
            if self.number % tensor == 0 or tensor % self.number == 0
        ]
        return Heads(self.number, self.pieces, *rng.choice(able))

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.stages

    @property
    def replicas(self) -> int:
        """Consecutive ranks that hold the same head."""
        return max(1, self.tensor // self.number)

    def of(self, rank: int) -> range:
        """Returns the heads of a rank."""
        first = rank % self.tensor * self.number // self.tensor
        return range(first, first + max(1, self.number // self.tensor))

    def salts(self, rank: int) -> list[str]:
        """Returns what the content of each piece and head of a rank depends on."""
        return [f"piece {piece} of head {head}" for piece in range(self.pieces) for head in self.of(rank)]

    def place(
        self,
        rank: int,
        groups: Sequence[KVGroup],
        layers: Sequence[Sequence[Sequence[int]]],
        pages: Sequence[PageGroup],
    ) -> list[PageGroup]:
        """Returns ``pages``, those of a rank, with their places in slots. ``layers``: by rank and group."""
        word_bytes = [8 * group.device_block_size for group in groups]
        sizes = [self.pieces * self.number * nbytes for nbytes in word_bytes]
        shares = [
            KVShare(
                1,
                (),
                canonical=tuple(
                    tuple(LayerPages(f"{g}/{layer}", size, "words") for layer in of_group)
                    for g, (of_group, size) in enumerate(zip(of_rank, sizes, strict=True))
                ),
            )
            for of_rank in layers
        ]
        rows = join(shares, groups, rank, self.tensor)
        assert isinstance(rows, CanonicalRows), rows
        return [
            place(group, [self._runs(rank, nbytes)] * len(group.views), [size] * len(group.views), begin, row)
            for group, nbytes, size, begin, row in zip(
                pages, word_bytes, sizes, rows.begins, rows.row_bytes, strict=True
            )
        ]

    def _runs(self, rank: int, nbytes: int) -> list[PageRun]:
        own = self.of(rank)
        return [
            PageRun(piece * len(own) * nbytes, (piece * self.number + own.start) * nbytes, len(own) * nbytes)
            for piece in range(self.pieces)
        ]

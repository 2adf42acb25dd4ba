"""The device cache, compared with a simple model of a block pool."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest

from kvoffload.lab.device import DeviceCache


@dataclass
class PlainBlock:
    content: int | None = None


class PlainPool:
    """A list of free blocks in the order of their allocation; every lookup searches it."""

    def __init__(self, num_blocks: int) -> None:
        self.free = [PlainBlock() for _ in range(num_blocks)]

    def lookup(self, chain: list[int]) -> int:
        cached = {block.content for block in self.free}
        hits = 0
        while hits < len(chain) and chain[hits] in cached:
            hits += 1
        return hits

    def serve(self, chain: list[int], hits: int, num_held: int) -> None:
        mine = [next(block for block in self.free if block.content == content) for content in chain[:hits]]
        self.free = [block for block in self.free if not any(block is one for one in mine)]
        fresh, self.free = self.free[: num_held - hits], self.free[num_held - hits :]
        for block in fresh:
            block.content = None
        for block, content in zip(fresh, chain[hits:], strict=False):
            for other in self.free + fresh:
                if other.content == content:
                    other.content = None
            block.content = content
        self.free += reversed(mine + fresh)


@pytest.mark.parametrize("seed", range(20))
def test_the_cache_agrees_with_a_simple_pool(seed: int) -> None:
    rng = Random(seed)
    num_blocks = rng.randint(8, 24)
    cache, plain = DeviceCache(num_blocks, 400), PlainPool(num_blocks)
    found = 0
    for _ in range(300):
        root, length = rng.randrange(8), rng.randint(1, 8)
        forks = rng.randrange(3)
        chain = [root * 50 + depth + (forks * 10 if depth > 3 else 0) for depth in range(length)]
        hits = cache.lookup(chain[: rng.randint(length - 1, length)])
        assert plain.lookup(chain[:hits]) == hits
        assert hits == length or plain.lookup(chain) in (hits, hits + 1)
        cache.serve(chain, hits, held := rng.randint(length, 8))
        plain.serve(chain, hits, held)
        found += hits
    assert 0 < found < 300 * 8

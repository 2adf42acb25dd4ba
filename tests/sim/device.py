"""The device blocks of the model engine: a pool with reference counts, and a prefix cache."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

from kvoffload.abc import BlockHash, KVGroup
from tests.sim.content import NULL_BLOCK, EngineRequest, Table, first_attended

BlockName: TypeAlias = tuple[int, BlockHash]
"""The name of a device block in the prefix cache: its group, and the hash of its tokens, with the tokens after it on
which its bytes depend."""


class BlockPool:
    """Device blocks of all groups, with reference counts and names in a prefix cache. Freed blocks keep their content,
    and their names, until they are handed out again."""

    def __init__(self, num_blocks: int, prefix_caching: bool) -> None:
        self.refs = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.block_of: dict[BlockName, int] = {}
        self.name_of: dict[int, BlockName] = {}
        self.prefix_caching = prefix_caching

    def take(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.free.pop(block, None)
            self.refs[block] += 1

    def new(self, n: int) -> list[int]:
        blocks = [self.free.popitem(last=False)[0] for _ in range(n)]
        for block in blocks:
            self.refs[block] = 1
            name = self.name_of.pop(block, None)
            if name is not None:
                del self.block_of[name]
        return blocks

    def next_free(self, n: int) -> list[int]:
        return list(itertools.islice(self.free, n))

    def release(self, blocks: Sequence[int], at_once: bool = False) -> None:
        """Drops one reference each. ``at_once``: the blocks that are free now are handed out again next."""
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free[block] = None
                if at_once:
                    self.free.move_to_end(block, last=False)

    def cache(self, block: int, name: BlockName) -> bool:
        """Gives the block a name. Returns whether it has it now and had none before."""
        is_new = self.prefix_caching and name not in self.block_of and block not in self.name_of
        if is_new:
            self.block_of[name] = block
            self.name_of[block] = name
        return is_new

    def forget_all(self) -> None:
        self.block_of.clear()
        self.name_of.clear()


class DeviceCache:
    """The engine's own cache: finds the device blocks of a request by the hashes of its tokens."""

    def __init__(self, groups: Sequence[KVGroup], hash_block_size: int, pool: BlockPool) -> None:
        self.groups = groups
        self.hash_block_size = hash_block_size
        self.pool = pool
        self.hit_tokens = math.lcm(*(group.device_block_size for group in groups))
        """A hit is a multiple of it."""
        self.version_of: dict[int, int] = {}
        """Version of the weights that computed the KV of each cached block."""

    def hit(self, request: EngineRequest) -> int:
        """Leading tokens that the cache holds in all groups: in each, all that the next token attends to. If groups
        with full attention hold more, the request's ``junction`` says how much."""
        limit = request.num_tokens - 1 if self.pool.prefix_caching else 0
        for g, group in enumerate(self.groups):
            if group.is_full:
                size, n = group.device_block_size, 0
                while n + size <= limit and self._block(request, g, n // size):
                    n += size
                limit = n
        request.states.junction = limit // self.hit_tokens * self.hit_tokens
        for n in range(limit // self.hit_tokens * self.hit_tokens, 0, -self.hit_tokens):
            if all(self._holds(request, g, n) for g in range(len(self.groups))):
                return n
        return 0

    def _holds(self, request: EngineRequest, g: int, n: int) -> bool:
        group = self.groups[g]
        first = first_attended(group, n) // group.device_block_size
        return all(self._block(request, g, i) for i in range(first, n // group.device_block_size))

    def _block(self, request: EngineRequest, g: int, index: int) -> int | None:
        name = self._name(request, g, index)
        return None if name is None else self.pool.block_of.get(name)

    def _name(self, request: EngineRequest, g: int, index: int) -> BlockName | None:
        """The name covers all tokens that the bytes of a block depend on, those after it too. It has none before these
        are known."""
        group = self.groups[g]
        end = (index + 1) * group.device_block_size
        if end + group.lookahead > request.num_tokens:
            return None
        after = request.tokens[end : end + group.lookahead]
        return g, request.block_hashes[end // self.hash_block_size - 1] + repr(after).encode()

    def tables_for(self, request: EngineRequest, computed: int, total: int) -> list[Table]:
        """Returns, per group, the cached blocks of ``computed`` tokens that the token at ``total`` attends to, with
        nulls before them."""
        hits: list[Table] = []
        for g, group in enumerate(self.groups):
            size = group.device_block_size
            skipped = first_attended(group, total) // size
            cached = [self._block(request, g, i) for i in range(skipped, computed // size)]
            hits.append([NULL_BLOCK] * skipped + [block for block in cached if block is not None])
        return hits

    def note_versions(self, request: EngineRequest, hits: Sequence[Table], version: int) -> None:
        """Tells the request which of its ``hits`` have the KV of other weights than ``version``."""
        for g, table in enumerate(hits):
            for i, block in enumerate(table):
                found = self.version_of[block] if block != NULL_BLOCK else version
                if found != version:
                    request.old_blocks[g, i] = found

    def add(self, request: EngineRequest, num_tokens: int) -> None:
        """Enters the whole blocks of the request's first ``num_tokens`` tokens."""
        if not self.pool.prefix_caching:
            return
        for g, (group, table) in enumerate(zip(self.groups, request.blocks, strict=True)):
            num_final = max(0, num_tokens - max(0, group.lookahead - 1))
            for i in range(request.num_cached[g], num_final // group.device_block_size):
                name = self._name(request, g, i)
                if name is None:
                    break
                request.num_cached[g] = i + 1
                if group.state and (i + 1) * group.device_block_size not in request.states.ends:
                    continue
                if table[i] != NULL_BLOCK and self.pool.cache(table[i], name):
                    self.version_of[table[i]] = request.old_blocks.get((g, i), request.version)

"""Layout: the KV cache groups of an engine, and how block hashes become keys."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from kvoffload.abc import NOT_SET, BlockDescription, ConfigError, Following, Keys, KVGroup, OffloadKey, Request
from kvoffload.cache.keys import make_offload_key, num_of_group, with_following
from kvoffload.connector.parts import Parts
from kvoffload.tiering.plan import ChainLayout, last_resumable

NULL_BLOCK = 0


class KeyLayout:
    """The KV cache groups, and how block hashes become keys. Raises ConfigError if block sizes do not divide, or a
    group has a ``lookahead`` and ``following`` is None.

    If blocks are divided into ``parts``, each part is a group here, in ``groups`` and in everything counted by group.

    A block's key is made of the hash of its last hash-block. In a group with a ``lookahead`` the KV depends on tokens
    after the block too. There the key is made of the hash and of what ``following`` says of these tokens, so such a
    block can be named, stored and found as soon as they are known.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        hash_block_size: int | None,
        following: Following | None = None,
        parts: Parts | None = None,
    ) -> None:
        if not groups:
            raise ConfigError("groups", NOT_SET, "an engine has at least one KV cache group")
        self.parts = parts or Parts.none(len(groups))
        self.groups = groups = tuple(self.parts.of_groups(groups))
        self.hash_block_size = hash_block_size or math.gcd(*(group.device_block_size for group in groups))
        for group in groups:
            if group.device_block_size % self.hash_block_size:
                fault = f"must divide the {group.device_block_size} tokens of each device block"
                fix = "set the engine's hash block size to a divisor of its block size"
                raise ConfigError("hash_block_size", self.hash_block_size, fault, fix)
        if following is None and any(group.lookahead for group in groups):
            fault = "the KV of a group with a lookahead depends on the tokens after a block"
            raise ConfigError("following", None, fault, "pass a function that describes them")
        self._following = following
        self.device_block_sizes = tuple(group.device_block_size for group in groups)
        self.block_tokens = tuple(group.block_tokens for group in groups)
        self.chains = ChainLayout(groups)
        self.align = self.chains.unit_tokens
        """Tokens: whole blocks of all groups end at multiples of it."""
        self.full = tuple(g for g, group in enumerate(groups) if group.is_full)
        self.windows = tuple(g for g, group in enumerate(groups) if not group.is_full and not group.state)
        self.states = tuple(g for g, group in enumerate(groups) if group.state)
        self.ahead = tuple(g for g, group in enumerate(groups) if group.lookahead)
        """The groups whose keys depend on tokens after a block."""
        self._suffixes = tuple(make_offload_key(b"", g) for g in range(len(groups)))
        self.traced = self.full[0] if self.full else 0
        """The group whose blocks are recorded in a trace."""

    def num_named(self, g: int, request: Request) -> int:
        """Returns the number of blocks of group ``g`` that have a key."""
        hashed = len(request.block_hashes) * self.hash_block_size
        lookahead = self.groups[g].lookahead
        known = min(hashed, request.num_tokens - lookahead) if lookahead else hashed
        return max(0, known) // self.block_tokens[g]

    def num_final(self, g: int, computed: int) -> int:
        """Returns how many blocks of group ``g`` are final when ``computed`` tokens are computed. Where KV depends on
        several tokens after its own, the engine computes the last positions again when it knows these."""
        return max(0, computed - max(0, self.groups[g].lookahead - 1)) // self.block_tokens[g]

    def last_within(self, g: int, end: int) -> int:
        """Returns the index of the last block of group ``g`` that ends at token ``end`` or before; -1 if none does."""
        return end // self.block_tokens[g] - 1

    def extend_keys(self, keys: Sequence[list[OffloadKey]], request: Request, namespace: bytes) -> None:
        """Appends to the ``keys`` of each group those of new whole blocks. ``namespace`` precedes the block hashes."""
        hashes = request.block_hashes
        for g, of_group in enumerate(keys):
            if g in self.ahead:
                new = range(len(of_group), self.num_named(g, request))
                of_group += [self.key(g, index, request, namespace) for index in new]
            else:
                per_block, suffix = self.block_tokens[g] // self.hash_block_size, self._suffixes[g]
                for block_hash in hashes[(len(of_group) + 1) * per_block - 1 :: per_block]:
                    of_group.append(namespace + block_hash + suffix)

    def key(self, g: int, index: int, request: Request, namespace: bytes) -> OffloadKey:
        """Returns the key of block ``index`` of group ``g`` of ``request``. ``namespace`` precedes the block hash."""
        end = (index + 1) * self.block_tokens[g]
        name = request.block_hashes[end // self.hash_block_size - 1]
        if self._following is not None and (lookahead := self.groups[g].lookahead):
            name = with_following(name, self._following(request, end, lookahead))
        return make_offload_key(namespace + name, g)

    def describe(self, request: Request, block: Block, namespace: bytes) -> BlockDescription | None:
        """Describes ``block`` of a request with this ``namespace``, for events; None if it has other tokens by now."""
        g, ordinal = block.group, block.ordinal
        if ordinal >= self.num_named(g, request) or self.key(g, ordinal, request, namespace) != block.key:
            return None
        size = self.block_tokens[g]
        start, end = ordinal * size, (ordinal + 1) * size
        hashes = request.block_hashes
        parent = hashes[start // self.hash_block_size - 1] if start else None
        return BlockDescription(request, start, end, hashes[end // self.hash_block_size - 1], parent)

    def longest_chain(self, num_blocks: int) -> int:
        """Returns how many tokens of one chain fit into ``num_blocks`` blocks, with a state at their end."""
        return max(0, num_blocks - len(self.states)) // self.chains.kv_blocks_per_unit * self.align

    def boundary_keys(self, g: int, keys: Keys, first: int, end: int) -> Keys:
        """Returns those of the ``keys`` of group ``g`` that end at multiples of ``align`` behind ``first``, itself a
        multiple, up to ``end``."""
        step = self.align // self.block_tokens[g]
        return keys[(first // self.align + 1) * step - 1 : end // self.block_tokens[g] : step]

    def needed_blocks(self, g: int, computed: int, end: int) -> range:
        """Returns the blocks of group ``g`` that must be loaded for a request that continues at token ``end``, where
        the device holds the first ``computed`` tokens. The device may hold a part of the first one."""
        size = self.block_tokens[g]
        first = max(self.groups[g].skipped_tokens(end), computed) // size
        return range(first, max(first, -(-end // size)))

    def needed_keys(self, keys: Sequence[Keys], end: int) -> list[OffloadKey]:
        """Returns those of a chain's ``keys``, by group, that a request needs to continue at token ``end``, a multiple
        of ``align``, by the position at which their blocks end."""
        needed = [
            ((i + 1) * size, g in self.states, g, keys[g][i])
            for g, size in enumerate(self.block_tokens)
            for i in self.needed_blocks(g, 0, end)
        ]
        return [key for *_, key in sorted(needed)]

    def last_resumable(self, keys: Sequence[Keys], present: Collection[OffloadKey], most: int) -> int:
        """Returns the last token up to ``most`` at which a request can continue with the blocks ``present`` of a chain
        with ``keys``, by group; 0 if there is none."""
        held = [np.fromiter(map(present.__contains__, of_group), np.bool_, len(of_group)) for of_group in keys]
        num_units = min(self.chains.num_units(keys), most // self.align)
        return last_resumable(self.chains, keys, held, num_units)

    def num_tokens(self, keys: Keys) -> int:
        """Returns how many tokens have KV in ``keys``, blocks of one chain: as many as those of one group with full
        attention, which has all of them, or of the first group if there is none."""
        return num_of_group(set(keys), self.traced) * self.block_tokens[self.traced]


class Block(NamedTuple):
    """The ``ordinal``-th block of a request in group ``group``, from 0. ``first_device_block`` is the index, within the
    request, of the first of the ``device_blocks`` that hold it: leading ones may have slid out of the window."""

    group: int
    ordinal: int
    key: OffloadKey
    first_device_block: int
    device_blocks: list[int]

"""What is known of one request: its keys, its block tables, what of it was loaded and is to be stored."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from kvoffload.abc import OffloadKey, ReqContext, Request
from kvoffload.connector.control import RequestControl
from kvoffload.connector.layout import NULL_BLOCK, Block, Layout
from kvoffload.observe.records import RequestRecord

NEVER = 1 << 62
"""More tokens than any request has."""


MAX_BLOCKS_A_STEP = 8192
"""Of one request and group: more than a step computes, so only a very long hit on the device takes several steps to be
stored, and none of them takes long."""


class Phase(Enum):
    """Which device blocks a request holds."""

    WAITING = auto()
    """None."""
    LOADING = auto()
    """A load is filling them."""
    RUNNING = auto()
    """It computes on them, or could."""


class Storing(Enum):
    """Whether the blocks that a request completes are stored."""

    ALLOWED = auto()
    REFUSED = auto()
    """The manager has refused one of them: those after it could not be found without it."""
    STALE = auto()
    """Its KV may belong to weights that are gone."""


@dataclass(slots=True, eq=False)
class Match:
    """A remembered lookup: for ``computed`` tokens on the device, at ``epoch``, until ``expires``.

    ``tokens`` None: the request waits, for another's load or for an answer; its ``epoch`` is that of loads.
    """

    epoch: int
    computed: int
    tokens: int | None
    missed: OffloadKey | None
    expires: float = float("inf")


@dataclass(slots=True, eq=False)
class RequestState:
    request: Request
    context: ReqContext
    control: RequestControl
    layout: Layout
    keys: list[list[OffloadKey]] = field(init=False)
    """Per group, of its whole blocks so far."""
    block_ids: list[list[int]] = field(init=False)
    """Per group, its device blocks, from its first token on."""
    next_store: list[int] = field(init=False)
    """Per group, index of the first block not yet given to ``prepare_store``."""
    loaded: list[range] = field(init=False)
    """Per group, blocks that came from the host: not stored again."""
    stored: list[OffloadKey] = field(default_factory=list)
    """What it has stored itself."""
    store_at: int = 0
    """No block becomes due before so many tokens are computed."""
    match: Match | None = None
    waiting_since: float | None = None
    """When the wait under way began: it has been told to ask again ever since."""
    num_waits: int = 0
    """Waits that have ended since it was last given device blocks."""
    touched: bool = False
    arrived: float = field(default_factory=time.time)
    """When it was first looked up, in seconds since 1970."""
    record: RequestRecord | None = None
    """Made when it is first given device blocks."""
    loading: bool = False
    computed_at_load: int = 0
    """Tokens the device held when blocks were last allocated to it."""
    prefill_since: float | None = None
    """When it was given device blocks, if it computes its whole rest itself and that is still to be measured."""
    prefill_until: int = 0
    """How many tokens it had when it first ran; 0 before."""
    has_kv: bool = False
    """Whether device blocks were allocated to it and not lost since."""
    may_load: bool = True
    may_store: bool = True
    refused: bool = False
    """Whether a block of it was not let in: those after it would be of no use without it."""
    jobs: int = 0
    """Jobs under way."""

    def __post_init__(self) -> None:
        self.keys = [[] for _ in self.layout.groups]
        self.may_load = self.control.load
        self.forget_blocks()
        self.restart_stores()
        self.forget_loaded()

    def forget_blocks(self) -> None:
        self.block_ids = [[] for _ in self.layout.groups]

    def forget_loaded(self) -> None:
        self.loaded = [range(0)] * len(self.layout.groups)

    def restart_stores(self) -> None:
        self.next_store = [0] * len(self.layout.groups)
        self.store_at = 0
        self.refused = False

    @property
    def phase(self) -> Phase:
        if self.loading:
            return Phase.LOADING
        return Phase.RUNNING if self.has_kv else Phase.WAITING

    @property
    def storing(self) -> Storing:
        if not self.may_store:
            return Storing.STALE
        return Storing.REFUSED if self.refused else Storing.ALLOWED

    @property
    def most_tokens(self) -> int:
        """Tokens that may be stored and loaded: those known, or fewer if the client says so."""
        cap = self.control.max_tokens
        return self.request.num_tokens if cap is None else min(cap, self.request.num_tokens)

    def extend_keys(self) -> None:
        """Makes the keys of blocks that became whole. If the engine has taken tokens back and given others, all keys
        are made anew, and what follows is stored anew."""
        hashes, layout = self.request.block_hashes, self.layout
        known = len(hashes) * layout.hash_block_size
        for g, keys in enumerate(self.keys):
            # Hashes are chained: the last one tells.
            last = len(keys) - 1
            if keys and (layout.known_tokens(g, last) > known or keys[last] != layout.key(g, last, hashes)):
                self.keys = [[] for _ in layout.groups]
                self.restart_stores()
                break
        for g, keys in enumerate(self.keys):
            while layout.known_tokens(g, len(keys)) <= known:
                keys.append(layout.key(g, len(keys), hashes))

    def keys_in_order(self) -> list[OffloadKey]:
        """All keys so far, by the position at which their blocks end, so that groups lose their tails together."""
        groups = self.layout.groups
        if len(groups) == 1:
            return self.keys[0]
        ends = sorted(
            ((i + 1) * groups[g].block_tokens, g, i) for g, keys in enumerate(self.keys) for i in range(len(keys))
        )
        return [self.keys[g][i] for _, g, i in ends]

    def add_blocks(self, tables: Sequence[Sequence[int]]) -> None:
        for mine, new in zip(self.block_ids, tables, strict=True):
            mine.extend(new)

    def set_blocks(self, tables: Sequence[Sequence[int]]) -> None:
        self.block_ids = [list(table) for table in tables]

    def due_blocks(self, num_computed: int, num_before: int, max_tokens: int) -> list[Block]:
        """Whole blocks of computed, known tokens that were not stored yet and whose KV is still there, by their end.

        ``num_computed`` tokens are computed when the step is through, ``num_before`` were before it: what the
        token after those does not attend to may be gone. Blocks past ``max_tokens`` are left out.
        """
        self.extend_keys()
        due: list[Block] = []
        for g, group in enumerate(self.layout.groups):
            ordinals = range(self.next_store[g], self.store_end(g, num_computed, max_tokens))
            if not group.is_full:
                due += self._due_in_window(g, ordinals, num_before)
                continue
            keys, table, loaded, factor = self.keys[g], self.block_ids[g], self.loaded[g], group.block_size_factor
            blocks = (
                Block(g, i, keys[i], i * factor, table[i * factor : (i + 1) * factor])
                for i in ordinals
                if i not in loaded
            )
            if NULL_BLOCK in table[ordinals.start * factor : ordinals.stop * factor]:
                blocks = (block for block in blocks if NULL_BLOCK not in block.device_blocks)
            due += blocks
        if len(self.layout.groups) > 1:
            groups = self.layout.groups
            due.sort(key=lambda block: (block.ordinal + 1) * groups[block.group].block_tokens)
        return due

    def _due_in_window(self, g: int, ordinals: range, num_before: int) -> Iterator[Block]:
        group, table = self.layout.groups[g], self.block_ids[g]
        size, factor = group.device_block_size, group.block_size_factor
        gone = group.skipped_tokens(num_before) // size
        for ordinal in ordinals:
            if ordinal in self.loaded[g]:
                continue
            first, last = ordinal * factor, (ordinal + 1) * factor
            # Whoever finds the block needs no more of it than the token at its end, or before it, attends to.
            needed = max(first, group.skipped_tokens(last * size - 1) // size)
            first = max(first, min(gone, last))
            while first < last and table[first] == NULL_BLOCK:
                first += 1
            if first <= needed and NULL_BLOCK not in table[first:last]:
                yield Block(g, ordinal, self.keys[g][ordinal], first, table[first:last])

    def store_end(self, g: int, num_computed: int, max_tokens: int) -> int:
        """Blocks of group ``g`` that are whole when ``num_computed`` tokens are, and are stored in this step."""
        group = self.layout.groups[g]
        tokens = min(num_computed, self.most_tokens, max_tokens)
        blocks = len(self.block_ids[g]) // group.block_size_factor
        most = self.next_store[g] + MAX_BLOCKS_A_STEP
        return max(self.next_store[g], min(tokens // group.block_tokens, blocks, len(self.keys[g]), most))

    def stored_up_to(self, num_computed: int, max_tokens: int) -> None:
        """``due_blocks`` of the same figures were given to ``prepare_store``."""
        self.next_store = [self.store_end(g, num_computed, max_tokens) for g in range(len(self.layout.groups))]
        self.store_at = min(self._due_at(g, max_tokens) for g in range(len(self.layout.groups)))

    def _due_at(self, g: int, max_tokens: int) -> int:
        """Tokens to be computed before the next block of group ``g`` is due."""
        end = (self.next_store[g] + 1) * self.layout.groups[g].block_tokens
        cap = self.control.max_tokens
        if end > max_tokens or (cap is not None and end > cap):
            return NEVER
        named = self.layout.known_tokens(g, self.next_store[g])
        return end if named <= self.request.num_tokens else named

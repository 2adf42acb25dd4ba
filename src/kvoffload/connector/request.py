"""The requests of the scheduler half: what it knows about each, and those in the engine's queue."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from itertools import zip_longest
from operator import mul
from typing import TYPE_CHECKING, Any, NamedTuple

from kvoffload.abc import BlockHash, OffloadingManager, OffloadKey, ReqContext, Request, TieredManager
from kvoffload.cache.tenants import Tenants
from kvoffload.connector.adapters import NO_ADAPTER, Adapter, AdapterDigests, Digests, variant
from kvoffload.connector.handover import Handover
from kvoffload.connector.layout import NULL_BLOCK, Block, KeyLayout
from kvoffload.connector.options import NEVER, RequestOptions
from kvoffload.observe.records import RequestRecord
from kvoffload.observe.spans import TracedRequest

if TYPE_CHECKING:
    from kvoffload.connector.engine import EngineSpec
    from kvoffload.connector.resets import BlockOrigins

MAX_BLOCKS_PER_STEP = 8192
"""Blocks per request and group that one step stores. Only a very long hit in the engine's own cache has more."""
MAX_QUEUED = 1024
"""Requests that are noted. Those that come while there are more are not read ahead."""
NEW_PER_STEP = 4
"""For so many requests reading ahead begins in a step, so that a step with many new requests takes little longer."""


class Phase(Enum):
    """Which device blocks a request holds."""

    WAITING = auto()
    """It holds none."""
    LOADING = auto()
    """It holds some, and a load is writing to them."""
    RUNNING = auto()
    """It holds some, and may run."""


class Storing(Enum):
    """Whether the blocks that a request completes are stored."""

    ALLOWED = auto()
    REFUSED = auto()
    """The manager has refused one of them: those after it could not be found without it."""
    STALE = auto()
    """Its KV may belong to weights that are gone."""


@dataclass(slots=True)
class Changes:
    """Counts what makes remembered lookups and jobs in progress wrong. The manager counts blocks that leave it."""

    contents: int = 0
    """Blocks came, or were hidden or shown."""
    wakeups: int = 0
    """Something happened that a waiting request waits for: a load started or ended, or the manager may find more."""
    resets: int = 0
    """The scheduler half was reset. Jobs that began before count as failed."""
    was_reset: bool = False
    """Whether it was since the last step: the engine must take one, so that events and metrics show the reset."""


class Hit(NamedTuple):
    """The longest hit of a request."""

    end: int = 0
    """Up to this token, every group has the blocks that the request needs to continue there."""
    missed: OffloadKey | None = None
    """The first key that was missing for more."""
    is_known: bool = True
    """False: a lower tier has not answered yet, and the hit may become longer."""
    junction: int = 0
    """The last position behind ``end`` up to which host memory has the blocks but not the states."""
    no_state: OffloadKey | None = None
    """A state behind ``end`` that no tier has either: without it, blocks in lower tiers are of no use."""


@dataclass(slots=True, eq=False)
class Match:
    """A lookup with ``computed`` tokens on the device, remembered until ``change`` or ``expires``."""

    change: int
    """``Lookups.contents`` at the lookup; if the request waits, ``Changes.wakeups``."""
    computed: int
    tokens: int | None = 0
    """How many tokens can be loaded. None: the request waits, for the load of another or for an answer."""
    hit: Hit = Hit()  # noqa: RUF009  (it is immutable)
    expires: float = float("inf")


@dataclass(slots=True, eq=False)
class RequestLookup:
    """What lookups remember of a request."""

    match: Match | None = None
    handover: Handover | None = None
    waiting_since: float | None = None
    """When the wait in progress began. Since then the engine was answered to ask again."""
    num_waits: int = 0
    """Waits that have ended since it was last given device blocks."""
    waited_s: float = 0.0
    brought_back: OffloadKey | None = None
    """The first of the blocks that the engine has forgotten on the device and that were stored for it."""
    was_touched: bool = False
    """Whether its use was counted, which happens once."""

    def end_wait(self) -> None:
        """Ends the wait in progress; waits count from zero again."""
        self.waiting_since, self.num_waits, self.waited_s = None, 0, 0.0


@dataclass(slots=True, eq=False)
class FilledBlocks:
    """What was in the device blocks of a request before it has computed."""

    computed: int = 0
    """Tokens that the device held when blocks were last allocated."""
    loaded_end: int = 0
    """The token with which its last load ended, if that has not failed; 0 if it has loaded nothing since."""
    of_others: frozenset[int] = frozenset()
    """Device blocks that another connector may be filling, before it was scheduled with them."""


@dataclass(slots=True, eq=False)
class ObservedRequest:
    """What the observer notes of a request."""

    tenant: str | None
    """Its tenant in metrics; None without configured tenants."""
    arrived: float = 0.0
    """When it was first looked up, in seconds since 1970."""
    record: RequestRecord | None = None
    """Made when it is first given device blocks."""
    number: int = -1
    """How many records were made before its own; -1 if it has none."""
    prefill: tuple[int, float] | None = None
    """The tokens of its prompt that were computed, and in how many seconds, if that was measured."""
    traced: TracedRequest | None = None
    """What its spans will say, if it has a trace and they have not been made."""
    has_ended: bool = False
    """Whether its request has ended, and the stores of its last blocks have begun."""

    def usage(self) -> dict[str, Any]:
        """Returns what the request has found and had retained, for its client; nothing before it has a record."""
        if (record := self.record) is None:
            return {}
        found = {name: getattr(record, name) for name in ("device_tokens", "host_tokens", "saved_s", "retained_tokens")}
        retention = {"retained_in": record.retained_in, "retain_refused": record.retain_refused}
        said = {name: str(value) for name, value in retention.items() if value is not None}
        return {**found, "tier_tokens": dict(record.tier_tokens), **said}


@dataclass(slots=True, eq=False)
class RequestState:
    """What the scheduler half knows about one request."""

    request: Request
    context: ReqContext
    options: RequestOptions
    blocks: RequestBlocks
    observed: ObservedRequest
    adapter: Adapter | None
    origin: Digests | None
    """The digests of the adapter that computes its KV, for which its keys stand, none for the model alone. None if they
    are not known, or its block hashes may be of tokens that it has dropped: it has no keys then."""
    lookup: RequestLookup = field(default_factory=RequestLookup)
    filled: FilledBlocks = field(default_factory=FilledBlocks)
    has_given_up: bool = False
    """Whether nothing is loaded or stored for it: its adapter is not known or has changed, or it may drop tokens."""
    phase: Phase = Phase.WAITING
    may_load: bool = True
    num_jobs: int = 0

    @property
    def may_store(self) -> bool:
        return self.options.store and self.blocks.storing is not Storing.STALE and self.origin is not None

    @property
    def has_copied_part(self) -> bool:
        """Whether its computed tokens end within a block that it has not loaded: a part was copied from any origin."""
        computed = self.request.num_computed_tokens
        return self.filled.loaded_end != computed and any(computed % n for n in self.blocks.layout.device_block_sizes)

    def bind(self, digests: Digests) -> None:
        """Makes its keys stand for these bytes of its adapter."""
        self.origin = digests
        self.blocks.namespace = self.blocks.namespace[: -len(NO_ADAPTER)] + variant(digests)

    def give_up(self) -> None:
        """Loads and stores nothing more for it. What its client has asked for stays: another server may go on."""
        self.may_load, self.origin, self.lookup.match = False, None, None
        self.has_given_up = True

    def take_match(self) -> Match | None:
        """Called when device blocks were allocated. Returns the lookup since the last time: the engine acts on it."""
        match, self.lookup.match = self.lookup.match, None
        self.phase = Phase.RUNNING
        self.filled.computed = self.filled.loaded_end = 0
        if match is not None:
            self.filled.computed, self.blocks.loaded = match.computed, None
        return match

    def lose_blocks(self, has_new_ones: bool) -> None:
        """Called when the request was preempted. ``has_new_ones``: device blocks were allocated to it again since."""
        self.blocks.clear_tables()
        if self.blocks.storing is Storing.STALE:
            self.blocks.storing = Storing.ALLOWED
            self.blocks.restart_stores()
        if not has_new_ones:
            self.blocks.loaded = None
            self.lookup.match = None
            if self.phase is Phase.RUNNING:
                self.phase = Phase.WAITING

    def forget_stores(self) -> None:
        """Called after a reset: none of its blocks is stored any more, and KV computed so far must not be stored."""
        self.lookup.match = None
        self.blocks.stored.clear()
        self.blocks.restart_stores()
        self.blocks.storing = Storing.ALLOWED if self.phase is Phase.WAITING else Storing.STALE


@dataclass(slots=True, eq=False)
class RequestBlocks:
    """The blocks of one request, per group: their keys, the device blocks that hold them, and which were stored."""

    request: Request
    layout: KeyLayout
    namespace: bytes
    """What precedes its block hashes in keys."""
    max_stored_tokens: int
    """No more than this number of its first tokens are stored."""
    keys: tuple[list[OffloadKey], ...] = field(init=False)
    """The keys of its whole blocks so far."""
    tables: tuple[list[int], ...] = field(init=False)
    """Its device blocks, from its first token on."""
    next_store: tuple[int, ...] = field(init=False)
    """The index of the first block not yet given to ``prepare_store``."""
    loaded: tuple[range, ...] | None = None
    """Blocks that came from the host and are not stored again, because it repeats the device; None: there are none."""
    stored: list[OffloadKey] = field(default_factory=list)
    """What the request has stored itself."""
    state_ends: Collection[int] = ()
    """When it has ended: where it has continued from a state, and where states of it are kept."""
    store_at: int = 0
    """No block becomes due before this many tokens are computed."""
    stored_end: int = 0
    """The end, in tokens, of the blocks in its present tables that were given to ``prepare_store`` or noted."""
    storing: Storing = Storing.ALLOWED
    _hashed: tuple[int, BlockHash] = 0, b""
    """The block hashes of which keys were made: their number and the last one."""

    def __post_init__(self) -> None:
        self.keys = tuple([] for _ in self.layout.groups)
        self.clear_tables()
        self.restart_stores()

    def clear_tables(self) -> None:
        self.tables = tuple([] for _ in self.layout.groups)
        self.stored_end = 0

    def restart_stores(self) -> None:
        self.next_store = (0,) * len(self.layout.groups)
        self.store_at = 0

    def extend_keys(self) -> bool:
        """Makes the keys of blocks that became whole. If the engine has taken tokens back and given others, all keys
        are made again and False is returned: what was stored or refused belongs to other tokens."""
        request, layout, is_same = self.request, self.layout, True
        hashes, (before, last) = request.block_hashes, self._hashed
        num_hashes = len(hashes)
        # Hashes are chained, so the last one shows whether any has changed.
        has_changed = num_hashes < before or (before and hashes[before - 1] != last)
        if has_changed or layout.ahead:
            # No hash may cover the tokens after a block yet.
            is_same = not self.has_other_tokens(None if has_changed else layout.ahead)
            if not is_same:
                self.keys = tuple([] for _ in layout.groups)
                self.restart_stores()
                if self.storing is Storing.REFUSED:
                    self.storing = Storing.ALLOWED
        elif num_hashes == before:
            return True
        self._hashed = num_hashes, hashes[-1] if num_hashes else b""
        layout.extend_keys(self.keys, request, self.namespace)
        return is_same

    def has_other_tokens(self, groups: Iterable[int] | None = None) -> bool:
        """Whether the engine has taken tokens back, and given others, since the keys of ``groups`` (all) were made."""
        layout, request, namespace = self.layout, self.request, self.namespace
        for g in range(len(self.keys)) if groups is None else groups:
            keys, last = self.keys[g], len(self.keys[g]) - 1
            if keys and (last >= layout.num_named(g, request) or keys[last] != layout.key(g, last, request, namespace)):
                return True
        return False

    def keys_in_order(self) -> list[OffloadKey]:
        """Returns all keys so far, by the position at which their blocks end: groups lose their tails together."""
        return self.keys[0] if len(self.keys) == 1 else self._merged(range(len(self.keys)))

    def used_keys(self, state_ends: Collection[int]) -> list[OffloadKey]:
        """Returns the same with the states after ``state_ends`` tokens only, each behind the blocks that end there."""
        layout = self.layout
        if not layout.states:
            return self.keys_in_order()
        positional = [*layout.full, *layout.windows]
        merged = self._merged(sorted(positional))
        for end in sorted(state_ends, reverse=True):
            before = sum(min(end // layout.block_tokens[g], len(self.keys[g])) for g in positional)
            last = [(g, layout.last_within(g, end)) for g in layout.states]
            merged[before:before] = [self.keys[g][i] for g, i in last if 0 <= i < len(self.keys[g])]
        return merged

    def computed_keys(self) -> list[OffloadKey]:
        """Returns the keys of ``used_keys`` whose blocks are computed and may be stored."""
        layout, most = self.layout, min(self.request.num_computed_tokens, self.max_stored_tokens)
        ends = [layout.num_final(g, min(most, self.request.num_tokens)) for g in range(len(self.keys))]
        wanted = {key for keys, end in zip(self.keys, ends, strict=True) for key in keys[:end]}
        return [key for key in self.used_keys(self.state_ends) if key in wanted]

    def _merged(self, groups: Collection[int]) -> list[OffloadKey]:
        """Returns the keys of ``groups``, by the position at which their blocks end."""
        sizes, keys_of = self.layout.block_tokens, [self.keys[g] for g in groups]
        if len({sizes[g] for g in groups}) <= 1:
            # Groups of one size have the same number of keys, except that those with a lookahead may have one less.
            common = min(map(len, keys_of), default=0)
            merged = [b""] * (common * len(keys_of))
            for i, keys in enumerate(keys_of):
                merged[i :: len(keys_of)] = keys[:common]
            rest = zip_longest(*(keys[common:] for keys in keys_of))
            return merged + [key for keys in rest for key in keys if key is not None]
        ends = sorted(((i + 1) * sizes[g], g, i) for g in groups for i in range(len(self.keys[g])))
        return [self.keys[g][i] for _, g, i in ends]

    def replace_tables(self, tables: Sequence[Sequence[int]]) -> tuple[list[Sequence[int]], tuple[Sequence[int], ...]]:
        """Takes a whole new table per group. Returns the device blocks of computed tokens, and the others."""
        self.tables = tuple(list(table) for table in tables)
        computed, sizes = self.request.num_computed_tokens, self.layout.device_block_sizes
        pairs = [(table, computed // size) for table, size in zip(tables, sizes, strict=True)]
        return [table[:end] for table, end in pairs], tuple(table[end:] for table, end in pairs)

    def computed_again(self) -> list[int]:
        """Returns the device blocks that stores may be reading and in which taken-back tokens are computed again."""
        first, end = self.request.num_computed_tokens, self.stored_end
        tables = zip(self.layout.device_block_sizes, self.tables, strict=True)
        return [block for size, table in tables for block in table[first // size : -(-end // size)]]

    def due(self, num_computed: int, num_before: int) -> tuple[list[Block], tuple[int, ...]]:
        """Returns the whole blocks of computed, known tokens that were not stored yet and whose KV still exists, by
        their end, without those ``loaded``; and, per group, the ``next_store`` that holds once they are stored. Call
        ``extend_keys`` first.

        ``num_computed`` tokens are computed at the end of this step, ``num_before`` were at its beginning: KV that the
        token after those does not attend to may be gone. States are left out: no block table says where they are.
        """
        layout = self.layout
        tokens, most = self.request.num_tokens, self.max_stored_tokens
        if num_computed < tokens:
            tokens = num_computed
        if self.loaded is None and len(self.tables) == 1 and layout.full and not layout.ahead:
            # Decoding completes one block at a time, which is most of what a step costs.
            size, factor = layout.block_tokens[0], layout.groups[0].block_size_factor
            (first,), (keys,), (table,) = self.next_store, self.keys, self.tables
            end = min(tokens // size, most // size, len(keys), len(table) // factor)
            if end == first + 1:
                device_blocks = table[first * factor : end * factor]
                next_one = Block(0, first, keys[first], first * factor, device_blocks)
                return [] if NULL_BLOCK in device_blocks else [next_one], (end,)
        due, ends = list[Block](), list(self.next_store)
        for g, start in enumerate(self.next_store):
            if g in layout.states:
                continue
            keys, table, group = self.keys[g], self.tables[g], layout.groups[g]
            size, factor = group.device_block_size, group.block_size_factor
            num_whole = min(layout.num_final(g, tokens), most // layout.block_tokens[g], len(keys))
            ends[g] = max(start, min(num_whole, len(table) // factor, start + MAX_BLOCKS_PER_STEP))
            loaded = self.loaded[g] if self.loaded is not None else ()
            is_full = g in layout.full
            gone = 0 if is_full else group.skipped_tokens(num_before) // size
            for ordinal in range(start, ends[g]):
                first, last = ordinal * factor, (ordinal + 1) * factor
                if not is_full:
                    # A request that finds the block needs only what the token at its end, or before it, attends to.
                    needed = max(first, group.skipped_tokens(last * size - 1) // size)
                    first = max(first, min(gone, last))
                    while first < needed and table[first] == NULL_BLOCK:
                        first += 1
                    if first > needed:
                        continue
                device_blocks = table[first:last]
                if NULL_BLOCK not in device_blocks and ordinal not in loaded:
                    due.append(Block(g, ordinal, keys[ordinal], first, device_blocks))
        if len(ends) > 1:
            due.sort(key=lambda block: (block.ordinal + 1) * layout.block_tokens[block.group])
        return due, tuple(ends)

    def stored_up_to(self, next_store: tuple[int, ...]) -> None:
        """Notes that the blocks before ``next_store`` were given to ``prepare_store``."""
        sizes = self.layout.block_tokens
        if len(next_store) == 1 and not self.layout.states:
            end = next_store[0] * sizes[0]
            if next_store != self.next_store:
                self.next_store, self.stored_end = next_store, end
            self.store_at = end + sizes[0] if end + sizes[0] <= self.max_stored_tokens else NEVER
            return
        if next_store != self.next_store:
            self.next_store, self.stored_end = next_store, max(map(mul, next_store, sizes))
        ends = [(next_store[g] + 1) * size for g, size in enumerate(sizes) if g not in self.layout.states]
        self.store_at = min((end for end in ends if end <= self.max_stored_tokens), default=NEVER)


@dataclass(eq=False)
class QueuedRequests:
    """Makes the states of requests. Announces to a manager with lower tiers, in order, those that the engine has queued
    and does not look up in its next step, unless they have an adapter or several KV cache groups."""

    manager: OffloadingManager
    engine: EngineSpec
    tenants: Tenants
    adapters: AdapterDigests | None
    sound: BlockOrigins
    new: OrderedDict[str, Request] = field(default_factory=OrderedDict)
    """By id, those that no step has followed yet. Read only for others."""
    expected: dict[str, RequestState] = field(default_factory=dict)
    """By id, those that the manager expects. Read only for others."""

    def make(self, request: Request) -> RequestState:
        """Returns the state of a new request."""
        engine, adapters, params = self.engine, self.adapters, request.kv_transfer_params
        known = None if engine.engine_options is None else engine.engine_options(request)
        options = RequestOptions.from_params(params, known)
        if engine.is_beside_others:
            options = replace(options, remote_decode=False)
        tenant = self.tenants.of(options.tenant, getattr(request, "cache_salt", None))
        most = engine.layout.longest_chain(self.manager.most_blocks(tenant.namespace))
        namespace = tenant.namespace if adapters is None else tenant.namespace + NO_ADAPTER
        hints = options.hints(tenant.namespace)
        context = ReqContext(request.request_id, params, hints=hints, goes_on=options.remote_decode)
        blocks = RequestBlocks(request, engine.layout, namespace, min(most, options.max_tokens))
        adapter = None if adapters is None else adapters.begin(request)
        origin = frozenset[bytes]() if adapter is None else None
        state = RequestState(request, context, options, blocks, ObservedRequest(tenant.label), adapter, origin)
        state.may_load = options.load
        if options.handover is not None:
            state.lookup.handover = Handover(**options.handover)
        if engine.drops_tokens is not None and engine.drops_tokens(request):
            self.sound.track()
            state.give_up()
        return state

    def add(self, request: Request) -> None:
        if isinstance(self.manager, TieredManager) and len(self.new) + len(self.expected) < MAX_QUEUED:
            self.new[request.request_id] = request

    def take(self, request: Request) -> RequestState | None:
        """Removes a request that is looked up, or ends before. Returns its state if that was made."""
        self.new.pop(request.request_id, None)
        state = self.expected.pop(request.request_id, None)
        # An engine may use an id again.
        return state if state is not None and state.request is request else None

    def clear(self) -> None:
        self.new.clear()
        self.expected.clear()

    def read_ahead(self) -> None:
        """Called in every step, after its lookups."""
        manager = self.manager
        for _ in range(min(NEW_PER_STEP, len(self.new))):
            req_id, request = self.new.popitem(last=False)
            state = self.expected[req_id] = self.make(request)
            keys, layout = state.blocks.keys, self.engine.layout
            if isinstance(manager, TieredManager) and state.may_load and state.adapter is None and len(keys) == 1:
                state.blocks.extend_keys()
                end = layout.num_final(0, min(request.num_tokens - 1, state.options.max_tokens))
                manager.expect(keys[0][:end], state.context)

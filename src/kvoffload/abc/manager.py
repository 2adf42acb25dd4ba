"""The contract of an offloading manager: which blocks are offloaded, where, and which may be evicted."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import compress

from kvoffload.abc.engine import Request
from kvoffload.abc.tier import HIT, RETRY, States
from kvoffload.abc.types import (
    BlockHash,
    HandedOver,
    Keys,
    LoadStoreSpec,
    Miss,
    OffloadKey,
    ReqContext,
    Retained,
    RetainRefusal,
)


@dataclass(frozen=True, slots=True, eq=False)
class PrepareStoreOutput:
    """Result of ``prepare_store``. ``store_spec``, the lease, has slot ``slots[i]`` for ``keys_to_store[i]``.

    Read only. ``refused_keys`` are absent and not stored; blocks behind them in their chain could not be found.
    """

    keys_to_store: list[OffloadKey]
    store_spec: LoadStoreSpec
    evicted_keys: list[OffloadKey]
    refused_keys: Keys = ()


@dataclass(frozen=True, slots=True, eq=False)
class BlockDescription:
    """The contents of a block: tokens ``start`` to ``end`` of ``request``. ``parent_hash`` is the hash of the block
    before it, None for a request's first block."""

    request: Request
    start: int
    end: int
    block_hash: BlockHash
    parent_hash: BlockHash | None


@dataclass(frozen=True, slots=True)
class OffloadingEvent:
    """Blocks became ready in a medium (``removed`` is False), or left it.

    Events of host memory are exact. Those of a lower tier are hints: a block may be announced again, or as removed
    without having been announced, and what the tier held before this process started is announced when it is read.
    """

    keys: list[OffloadKey]
    medium: str
    removed: bool
    blocks: list[BlockDescription | None] | None = None
    """Descriptions of blocks that became ready, in the order of ``keys``; None if they are not kept."""
    tier: str | None = None
    """Name of the lower tier. None: host memory."""
    is_shared: bool = False
    """Whether other processes use the same blocks of the tier."""


class Admission(ABC):
    """Decides which new blocks a manager stores, by how requests have asked for them."""

    @abstractmethod
    def count(self, keys: Keys, req_context: ReqContext | None) -> None:
        """Counts a lookup or a touch of ``keys`` by a request."""

    @abstractmethod
    def accepts(self, keys: Keys) -> list[bool]:
        """Returns which of ``keys``, all absent, may be stored. Changes nothing."""

    @abstractmethod
    def refuse(self, keys: Collection[OffloadKey]) -> None:
        """Remembers that ``keys`` were not accepted."""

    def sift(self, keys: list[OffloadKey]) -> tuple[list[OffloadKey], list[OffloadKey]]:
        """Splits ``keys``, all absent, into accepted and refused ones. Remembers the refused ones."""
        accepted = self.accepts(keys)
        if all(accepted):
            return keys, []
        refused = list(compress(keys, (not each for each in accepted)))
        self.refuse(refused)
        return list(compress(keys, accepted)), refused

    @abstractmethod
    def explain(self, key: OffloadKey) -> Miss:
        """Returns why ``key`` was refused, or NEVER_STORED if that is not known."""

    def check_integrity(self) -> None:
        """Raises IntegrityError if a bound is exceeded."""


class Need(enum.Enum):
    """Which of the blocks that a request looks up it can use. Lower tiers are asked to read only those."""

    ALL = enum.auto()
    """All of them, or none if one is certainly missing."""
    RUN = enum.auto()
    """The leading ones. The states of blocks behind the first that is not ready may be MISS, whatever they are."""
    LAST = enum.auto()
    """The last one that is not certainly missing. The states of blocks before it may be MISS unless they are HIT."""


class Offer(enum.Enum):
    """Why blocks are offered to a manager, which stores those that it wants."""

    COMPUTED = enum.auto()
    """They were computed just now."""
    BEHIND_REFUSED = enum.auto()
    """They were computed, but a block before them in their chain was refused, so all that are absent are refused
    too."""
    LEAVING = enum.auto()
    """They leave the device. They are stored whatever lower tiers hold, or refused, unless somebody waits for them
    (``goes_on``)."""


class OffloadingManager(ABC):
    """Keeps track of which blocks are offloaded, in which slots, and which may be evicted.

    All methods are called from the engine's scheduler thread; none blocks, none raises for a miss. ``req_context`` is
    optional in every call. A duplicate key within one call counts once.
    """

    # Lookup.

    @abstractmethod
    def lookup_each(self, keys: Keys, req_context: ReqContext | None = None, need: Need = Need.ALL) -> States:
        """Returns the state of each key. RETRY: a lower tier is asked, or is asked to read what the request needs; ask
        again after ``poll`` has returned True. Does not change the eviction order."""

    def lookup(self, keys: Keys, req_context: ReqContext | None = None) -> int | None:
        """Returns the length of the longest run of leading keys that are all ready, or None if that is not known
        yet."""
        states = self.lookup_each(keys, req_context, Need.RUN)
        unready = (states != HIT).nonzero()[0]
        if not len(unready):
            return len(keys)
        return None if states[unready[0]] == RETRY else int(unready[0])

    @abstractmethod
    def explain_miss(self, key: OffloadKey) -> Miss:
        """Returns why ``key``, which is not ready, cannot be loaded now."""

    @property
    @abstractmethod
    def num_removed(self) -> int:
        """Blocks that have left host memory since the start, for whatever reason: evicted, dropped or reset. While it
        does not grow, blocks that a lookup has found can still be loaded."""

    # Loads and stores.

    @abstractmethod
    def prepare_load(self, keys: Keys, req_context: ReqContext | None = None) -> LoadStoreSpec:
        """Pins every block and returns the lease: its slots stay unchanged until ``complete_load``. A pinned block is
        never evicted. Raises BlockNotReadyError, and changes nothing, if a block is not ready."""

    @abstractmethod
    def complete_load(self, blocks: LoadStoreSpec | Keys, req_context: ReqContext | None = None) -> None:
        """Removes one pin per block. ``blocks``: a lease of ``prepare_load``, one with a part of its slots, or keys.
        Raises BlockNotPinnedError, and changes nothing, if a block has no pin."""

    @abstractmethod
    def prepare_store(
        self, keys: Keys, req_context: ReqContext | None = None, offer: Offer = Offer.COMPUTED
    ) -> PrepareStoreOutput | None:
        """Allocates slots for those of ``keys`` that are absent and admitted. Evicts only ready blocks without a pin,
        and none of ``keys``. Returns None, and changes nothing, if there is not enough room."""

    @abstractmethod
    def complete_store(
        self, blocks: LoadStoreSpec | Keys, req_context: ReqContext | None = None, success: bool = True
    ) -> None:
        """Blocks that were being written become ready, or vanish if the write failed. ``blocks``: a lease of
        ``prepare_store``, one with a part of its slots, or keys. Ready blocks do not change, unknown keys are
        ignored."""

    # Requests.

    @abstractmethod
    def touch(
        self,
        keys: Keys,
        req_context: ReqContext | None = None,
        chain: Keys | None = None,
    ) -> None:
        """Marks a chain as recently used, last key first, so that its tail is evicted before its head. Called once per
        request, which counts as one use of each block.

        ``chain``: the whole chain, if ``keys`` leave out states that the request does not use. For these too an
        admission counts the request, and lower tiers are offered them when they are stored."""

    @abstractmethod
    def end_chain(
        self,
        keys: Keys,
        stored: Collection[OffloadKey],
        req_context: ReqContext | None = None,
        chain: Keys | None = None,
    ) -> None:
        """Reorders a request's chain as if all of it were touched now; not counted as a use. Lower tiers may write the
        blocks of it that they lack. Called when a request has ended, and no more of its chain will be stored.

        ``stored``: the keys that the request has stored itself. Of the states, ``keys`` have those that the request has
        kept or used; ``chain`` is the whole chain, if that is more."""

    def note_device(self, held: Keys = (), left: Keys = ()) -> None:
        """Tells what the engine's device cache holds, if blocks are stored when they leave it: the chain ``held``, head
        first, which was used just now, and none of ``left``. Of the blocks that it holds, those in host memory should
        leave before all others. Called after ``end_chain``, and in the step in which blocks leave. Does nothing by
        default."""

    def retain(self, keys: Keys, req_context: ReqContext) -> Retained:
        """Retains ``keys``, the chain of a request that has ended, head first, for ``req_context.hints.retain_s``
        seconds, or ends what its session has retained (``retain_s`` 0, ``drop``). Blocks that are not stored yet are
        retained when they are. Returns where, or why not. By default nothing can be retained."""
        return Retained(RetainRefusal.NO_QUOTA)

    def hand_over(self, keys: Keys) -> HandedOver:
        """Another server waits for ``keys``, the blocks of a request that has ended, head first, which host memory has
        or is given. They are written first to the tiers that other servers use. If none of these has room for all of
        them, nothing is promised, and the caller may ask again with fewer. By default there are no such tiers."""
        return HandedOver({}, 0)

    def release_request(self, req_context: ReqContext) -> Mapping[str, Keys]:
        """Releases the blocks that were promoted for a request, because it has got its device blocks or has ended.
        Returns, by name of the tier, the blocks that lower tiers have delivered for it, by default none."""
        return {}

    # Steps.

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Handles results of other threads, and starts the reads that lookups have asked for. Called in every step, but
        never between a request's lookup and its allocation. While lower tiers read blocks for requests, or write, it
        waits for them for at most ``timeout_s``. Returns whether a lookup may have another result now. Does nothing by
        default."""
        return False

    @abstractmethod
    def take_events(self) -> Iterable[OffloadingEvent]:
        """Returns the events since the last call."""

    @abstractmethod
    def take_counts(self) -> Mapping[str, float]:
        """Returns counts since the last call, and gauges, by names of ``kvoffload.observe.metrics.METRICS``: "NAME", or
        "NAME:LABEL" if the metric has a label. Among them is the gauge ``pool_used_blocks``: blocks that take a slot
        now, those being written included."""

    # Capacity and removal.

    @abstractmethod
    def most_blocks(self, key: OffloadKey | None = None) -> int:
        """Returns the capacity in blocks, or how many the tenant of ``key``, of which the first bytes count, can have
        whatever other tenants have."""

    @abstractmethod
    def drop(self, keys: Keys, only_host: bool = False) -> None:
        """``keys`` vanish at once. The slot of a block in transfer is free again when its lease is completed; until
        then its key cannot be stored. Unknown keys are ignored. ``only_host``: what a lower tier holds too can still be
        found there."""

    @abstractmethod
    def reset(self, keep_shared: bool = False) -> bool:
        """Drops every key; with ``keep_shared`` the blocks of shared tiers stay. Returns whether there may be some."""

    @abstractmethod
    def shutdown(self) -> None:
        """Releases all resources. May be called twice."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises IntegrityError if the manager's state is inconsistent. Takes O(blocks)."""


class TieredManager(OffloadingManager):
    """A manager with lower tiers, which are written from host memory.

    Blocks are therefore offered to it as soon as they are computed, even if host memory does not repeat the device.
    """

    @abstractmethod
    def expect(self, keys: Keys, req_context: ReqContext) -> None:
        """A request that waits in the engine's queue will ask for ``keys``, its chain. Blocks that only lower tiers
        hold may be read before it does."""

    @abstractmethod
    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Records that the engine took ``seconds`` to compute ``num_tokens`` of a prompt."""

    @property
    @abstractmethod
    def has_pending_writes(self) -> bool:
        """Whether lower tiers have work that needs further calls of ``poll``."""

"""The contract of an offloading manager: which blocks are offloaded, where, and which may be evicted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvoffload.abc.engine import Request
from kvoffload.abc.errors import ConfigError
from kvoffload.abc.types import (
    BlockHash,
    LoadStoreSpec,
    LookupState,
    Miss,
    MissReason,
    OffloadKey,
    ReqContext,
    TenantUse,
)


@dataclass(frozen=True, slots=True, eq=False)
class PrepareStoreOutput:
    """Result of ``prepare_store``. ``store_spec``, the lease, has slot ``slots[i]`` for ``keys_to_store[i]``.

    Read only. ``refused_keys`` are absent and not stored; blocks behind them in their chain could not be found.
    """

    keys_to_store: list[OffloadKey]
    store_spec: LoadStoreSpec
    evicted_keys: list[OffloadKey]
    refused_keys: Sequence[OffloadKey] = ()


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
    def count(self, keys: Sequence[OffloadKey], req_context: ReqContext | None) -> None:
        """Counts a lookup or a touch of ``keys`` by a request."""

    @abstractmethod
    def accepts(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Returns which of ``keys``, all absent, may be stored. Changes nothing."""

    @abstractmethod
    def refuse(self, keys: Collection[OffloadKey]) -> None:
        """Takes note that ``keys`` were not accepted."""

    @abstractmethod
    def explain(self, key: OffloadKey) -> Miss:
        """Returns why ``key`` was refused, or NEVER_STORED if that is not known."""

    def check_integrity(self) -> None:
        """Raises IntegrityError if a bound is exceeded."""


class OffloadingManager(ABC):
    """Keeps track of which blocks are offloaded, in which slots, and which may be evicted.

    All methods are called from the engine's scheduler thread; none blocks, none raises for a miss. ``req_context`` is
    optional in every call. A duplicate key within one call counts once.
    """

    @abstractmethod
    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> int | None:
        """Returns the length of the longest run of leading keys that are all ready, or None if that is not known yet:
        then ask again after ``poll`` has returned True. Does not change the eviction order."""

    @abstractmethod
    def lookup_each(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> list[LookupState]:
        """Returns the state of each key."""

    def lookup_last(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> tuple[int, LookupState]:
        """Returns the index and the state of the last of ``keys`` that is not certainly missing: HIT, or RETRY if a
        lower tier has it or has not answered. Returns (-1, MISS) if all are missing or being written. Lower tiers are
        asked to read that one block only. Does not change the eviction order."""
        for i in range(len(keys) - 1, -1, -1):
            (found,) = self.lookup_each(keys[i : i + 1], req_context)
            if found in (LookupState.HIT, LookupState.RETRY):
                return i, found
        return -1, LookupState.MISS

    @abstractmethod
    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> LoadStoreSpec:
        """Pins every block and returns the lease: its slots stay unchanged until ``complete_load``. A pinned block is
        never evicted. Raises BlockNotReadyError, and changes nothing, if a block is not ready."""

    @abstractmethod
    def complete_load(
        self, blocks: LoadStoreSpec | Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> None:
        """Removes one pin per block. ``blocks``: a lease of ``prepare_load``, one with a part of its slots, or keys.
        Raises BlockNotPinnedError, and changes nothing, if a block has no pin."""

    @abstractmethod
    def touch(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext | None = None,
        chain: Sequence[OffloadKey] | None = None,
    ) -> None:
        """Marks a chain as recently used, last key first, so that its tail is evicted before its head. Called once per
        request, which counts as one use of each block.

        ``chain``: the whole chain, if ``keys`` leave out states that the request does not use. For these too an
        admission counts the request, and lower tiers are offered them when they are stored."""

    def reorder_chain(
        self,
        keys: Sequence[OffloadKey],
        stored: Collection[OffloadKey],
        req_context: ReqContext | None = None,
    ) -> None:
        """Reorders a request's chain as if all of it were touched now; not counted as a use. ``stored``: the keys that
        the request has stored itself. Of the states, ``keys`` have those that the request has kept or used. Called when
        a request has ended."""
        self.touch(keys, req_context)

    def offer_chain(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        """Offers a request's whole chain, head first, to lower tiers, which may write the blocks that they lack. Called
        after ``reorder_chain``, when no more of the chain will be stored."""

    @abstractmethod
    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> PrepareStoreOutput | None:
        """Allocates slots for those of ``keys`` that are absent and admitted. Evicts only ready blocks without a pin,
        and none of ``keys``. Returns None, and changes nothing, if there is not enough room."""

    def refuse(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        """Takes note of ``keys`` that are not stored because ``prepare_store`` has refused a block before them in their
        chain."""

    @abstractmethod
    def complete_store(
        self,
        blocks: LoadStoreSpec | Sequence[OffloadKey],
        req_context: ReqContext | None = None,
        success: bool = True,
    ) -> None:
        """Blocks that were being written become ready, or vanish if the write failed. ``blocks``: a lease of
        ``prepare_store``, one with a part of its slots, or keys. Ready blocks do not change, unknown keys are
        ignored."""

    def set_admission(self, admission: Admission) -> None:
        """From now on only blocks that ``admission`` accepts are stored. Raises ConfigError if this kind of manager
        takes none."""
        raise ConfigError(f"{type(self).__name__} takes no admission; put a PolicyOffloadingManager in its place")

    @abstractmethod
    def take_events(self) -> Iterable[OffloadingEvent]:
        """Returns the events since the last call."""

    @abstractmethod
    def drop(self, keys: Sequence[OffloadKey]) -> None:
        """``keys`` vanish at once. The slot of a block in transfer is free again when its lease is completed; until
        then its key cannot be stored. Unknown keys are ignored."""

    def drop_from_host(self, keys: Sequence[OffloadKey]) -> None:
        """Drops ``keys`` from host memory. Those that a lower tier holds too can still be found there."""
        self.drop(keys)

    @abstractmethod
    def reset(self) -> None:
        """Drops every key."""

    def reset_own(self) -> bool:
        """Drops every key, but keeps the blocks of shared tiers. Returns whether there may be some. By default there
        is no such tier."""
        self.reset()
        return False

    @abstractmethod
    def shutdown(self) -> None:
        """Releases all resources. May be called twice."""

    def explain_miss(self, key: OffloadKey) -> Miss:
        """Returns why ``key``, which is not ready, cannot be loaded now."""
        return Miss(MissReason.NEVER_STORED)

    # For managers with lower tiers.

    def poll(self) -> bool:
        """Handles results of other threads, and starts the reads that lookups have asked for. Called in every step, but
        never between a request's lookup and its allocation. Returns whether a lookup may have another result now."""
        return True

    def release_request(self, req_context: ReqContext) -> None:
        """Releases the blocks that were promoted for a request, because it has got its device blocks or has ended."""

    @property
    def has_pending_writes(self) -> bool:
        """Whether lower tiers have work that needs further calls of ``poll``."""
        return False

    def num_promoted(self, req_context: ReqContext) -> int:
        """Returns how many blocks lower tiers have delivered for this request."""
        return sum(self.promoted_by_tier(req_context).values())

    def promoted_by_tier(self, req_context: ReqContext) -> Mapping[str, int]:
        """Returns, by name of the tier, how many blocks lower tiers have delivered for this request."""
        return {}

    def wait(self, timeout_s: float) -> None:
        """Waits for lower tiers, for at most ``timeout_s``, while they read blocks for requests or write."""

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Records that the engine took ``seconds`` to compute ``num_tokens`` of a prompt."""

    def policy_state(self) -> Mapping[str, Any]:
        """Returns ``CachePolicy.state`` of the policy that evicts from host memory."""
        return {}

    def take_counts(self) -> Mapping[str, float]:
        """Returns counts since the last call, and gauges, by names of ``kvoffload.observe.metrics.METRICS``: "NAME", or
        "NAME:LABEL" if the metric has a label."""
        return {}

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Capacity in blocks."""

    def uses_by_tier(self) -> Mapping[str, Sequence[TenantUse]]:
        """Returns what each tenant holds, by the name of the tier. By default nothing is shared among tenants."""
        return {}

    def most_blocks(self, key: OffloadKey) -> int:
        """Returns how many blocks the tenant of ``key``, of which the first bytes count, can have whatever other
        tenants have. By default the capacity."""
        return self.num_blocks

    @property
    @abstractmethod
    def num_removed(self) -> int:
        """Blocks that have left host memory since the start, for whatever reason: evicted, dropped or reset. While it
        does not grow, blocks that a lookup has found can still be loaded."""

    @property
    @abstractmethod
    def num_used_blocks(self) -> int:
        """Blocks that take a slot now, those being written included."""

    def check_integrity(self) -> None:
        """Raises IntegrityError if the manager's state is inconsistent. Takes O(blocks)."""

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
)


@dataclass(frozen=True, slots=True, eq=False)
class PrepareStoreOutput:
    """What ``prepare_store`` decided: ``store_spec.slots[i]`` is the place for ``keys_to_store[i]``. ``refused_keys``:
    absent, and not worth a place; what comes after them in their chain could not be found."""

    keys_to_store: list[OffloadKey]
    store_spec: LoadStoreSpec
    evicted_keys: list[OffloadKey]
    refused_keys: Sequence[OffloadKey] = ()


@dataclass(frozen=True, slots=True, eq=False)
class BlockDescription:
    """What a block holds: tokens ``start`` to ``end`` of ``request``. ``parent_hash`` names the block before it, None
    for a request's first."""

    request: Request
    start: int
    end: int
    block_hash: BlockHash
    parent_hash: BlockHash | None


@dataclass(frozen=True, slots=True)
class OffloadingEvent:
    """Blocks became ready (``removed`` False) in a medium, or left it."""

    keys: list[OffloadKey]
    medium: str
    removed: bool
    blocks: list[BlockDescription | None] | None = None
    """Of blocks that became ready, in the order of ``keys``, where somebody asked for it and takes events in time."""


class Admission(ABC):
    """Decides which new blocks a manager stores, by how requests have asked for them."""

    @abstractmethod
    def count(self, keys: Sequence[OffloadKey], req_context: ReqContext | None) -> None:
        """A request asks for ``keys``, in a lookup or a touch."""

    @abstractmethod
    def accepts(self, keys: Sequence[OffloadKey]) -> list[bool]:
        """Returns which of ``keys``, all absent, may be stored. Changes nothing."""

    @abstractmethod
    def refuse(self, keys: Collection[OffloadKey]) -> None:
        """``keys`` were not accepted, and are not stored."""

    @abstractmethod
    def explain(self, key: OffloadKey) -> Miss:
        """Returns why ``key`` was refused, or NEVER_STORED if that is not known."""

    def check_integrity(self) -> None:
        """Raises IntegrityError if a bound is exceeded."""


class OffloadingManager(ABC):
    """Which blocks are offloaded, where, and which may go.

    Lives on the engine's scheduler thread; never blocks, never raises for a miss. ``req_context`` may be
    left out of every call. A duplicate key within one call counts once.
    """

    @abstractmethod
    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> int | None:
        """Length of the longest run of leading keys that are all ready. None: not known yet, ask again when
        ``poll`` tells of a change. Changes no recency."""

    @abstractmethod
    def lookup_each(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> list[LookupState]:
        """The state of every key."""

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
    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        """A request uses a chain, called once a request: marks as recently used, last key first, so that a chain loses
        its tail before its head."""

    def reorder_chain(
        self,
        keys: Sequence[OffloadKey],
        stored: Collection[OffloadKey],
        req_context: ReqContext | None = None,
    ) -> None:
        """Puts a request's whole chain, which it has touched and of which it has stored ``stored``, into the order of
        one touch, last key first. It counts as no further use. Called when the request has stored all that it will."""
        self.touch(keys, req_context)

    def offer_chain(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        """``keys`` are a request's whole chain, head first, of which no more will be stored: what lower tiers lack of
        it may be written to them. Called after ``reorder_chain``."""

    @abstractmethod
    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> PrepareStoreOutput | None:
        """Makes room for those of ``keys`` that are absent and admitted, evicting ready, unpinned blocks and never one
        of ``keys``. None when room cannot be made, and then nothing has changed."""

    def refuse(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        """``keys`` go on a chain of which ``prepare_store`` has refused a block, and are not stored without it."""

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
        """What became ready or left since the last call, once each."""

    @abstractmethod
    def drop(self, keys: Sequence[OffloadKey]) -> None:
        """``keys`` vanish at once. The slot of a block in transfer is free again when its lease is completed; until
        then its key cannot be stored. Unknown keys are ignored."""

    @abstractmethod
    def reset(self) -> None:
        """Drops every key."""

    @abstractmethod
    def shutdown(self) -> None:
        """Releases everything; may be called twice."""

    def explain_miss(self, key: OffloadKey) -> Miss:
        """Why ``key``, which is not ready, cannot be loaded now."""
        return Miss(MissReason.NEVER_STORED)

    # What managers with lower tiers need to be told, and tell.

    def poll(self) -> bool:
        """Takes in what other threads have done, and starts what lookups have asked for. Called in every step, never
        between a request's lookup and its allocation. Returns whether a lookup may now find more, or less."""
        return True

    def release_request(self, req_context: ReqContext) -> None:
        """The request was given device blocks, with or without a load, or has ended: nothing is kept ready for it any
        more."""

    @property
    def has_pending_writes(self) -> bool:
        """Whether lower tiers have work that only further calls of ``poll`` bring forward."""
        return False

    def num_promoted(self, req_context: ReqContext) -> int:
        """Blocks that came from a lower tier for this request, and are kept ready for it."""
        return 0

    def wait(self, timeout_s: float) -> None:
        """Gives the processor away while blocks that requests wait for are on their way from a lower tier, at most
        ``timeout_s``."""

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """The engine took ``seconds`` to compute ``num_tokens`` of a prompt."""

    def policy_state(self) -> Mapping[str, Any]:
        """``CachePolicy.state`` of the policy by which blocks leave host memory."""
        return {}

    def take_counts(self) -> Mapping[str, float]:
        """What was counted since the last call, and gauges, by names of ``kvoffload.observe.metrics.METRICS``."""
        return {}

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Blocks there is room for."""

    @property
    @abstractmethod
    def num_used_blocks(self) -> int:
        """Blocks held now, those being written included."""

    def check_integrity(self) -> None:
        """Raises IntegrityError if the manager's books do not balance. O(blocks)."""

"""The contracts: value types, errors and abstract classes that everything else is written against.

Read it top to bottom; nothing here imports another part of kvoffload.

Vocabulary: a *device block* is one page of the engine's paged KV cache. A *block* is the unit we offload:
``block_size_factor`` consecutive device blocks of one KV cache group. A *slot* is a place for one block in a
medium. *Store* is device to host, *load* is host to device.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

BlockHash: TypeAlias = bytes
"""Chained hash of a token block: names the whole prefix that ends there."""

OffloadKey: TypeAlias = bytes
"""A block's name: the block hash of its last hash-block, then the group index as a big-endian u32."""

Slots: TypeAlias = npt.NDArray[np.int64]
"""One-dimensional array of slot numbers in ``[0, num_blocks)``."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """One KV cache group: layers that share a block table, and how far back their tokens look.

    ``device_block_size`` tokens make a device block, ``block_size_factor`` of these an offloaded block. At most one of
    ``sliding_window`` (a token attends to itself and the ``sliding_window - 1`` before it) and
    ``attention_chunk`` (the token at position p attends to ``p // attention_chunk * attention_chunk`` to p) is set;
    neither means full attention. ``draft``: KV of a position depends on the token after it too, as in layers of
    EAGLE and MTP draft models.
    """

    device_block_size: int
    block_size_factor: int = 1
    sliding_window: int | None = None
    attention_chunk: int | None = None
    draft: bool = False

    def __post_init__(self) -> None:
        if self.sliding_window is not None and self.attention_chunk is not None:
            raise ConfigError("a KV cache group has a sliding window or an attention chunk, not both")
        for name in ("device_block_size", "block_size_factor", "sliding_window", "attention_chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: must be at least 1")

    @property
    def block_tokens(self) -> int:
        """Tokens of an offloaded block."""
        return self.device_block_size * self.block_size_factor

    @property
    def is_full(self) -> bool:
        return self.sliding_window is None and self.attention_chunk is None

    def skipped_tokens(self, num_computed: int) -> int:
        """Leading tokens that the token at position ``num_computed`` does not attend to.

        The engine may free device blocks that lie in them as a whole, and puts the null block in their place.
        """
        if self.sliding_window is not None:
            return max(0, num_computed - self.sliding_window + 1)
        if self.attention_chunk is not None:
            return num_computed // self.attention_chunk * self.attention_chunk
        return 0


class KVOffloadError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(KVOffloadError, ValueError):
    """A setting is wrong. The message names the setting, its value and what to write instead."""


class BlockNotReadyError(KVOffloadError):
    """``prepare_load`` was asked for a block that is not ready."""


class BlockNotPinnedError(KVOffloadError):
    """``complete_load`` was asked to unpin a block that nobody holds."""


class IntegrityError(KVOffloadError):
    """An always-on check found the state inconsistent; offloading must be switched off."""


@dataclass(frozen=True, slots=True)
class ReqContext:
    """Which request a manager call is made for. ``kv_transfer_params`` is what the client sent along."""

    req_id: str
    kv_transfer_params: Mapping[str, Any] | None = None


class LookupState(enum.IntEnum):
    """State of one key, as ``OffloadingManager.lookup_each`` reports it."""

    MISS = 0
    HIT = 1
    PENDING = 2
    """Known, not readable yet."""
    RETRY = 3
    """Not known yet: a lower tier is being asked."""


class MissReason(enum.StrEnum):
    """Why a block was not there when a request asked for it."""

    NEVER_STORED = "never_stored"
    NOT_ADMITTED = "not_admitted"
    FORGOTTEN = "forgotten"
    """Asked for often enough to be stored, but the reuse filter had forgotten that."""
    EVICTED = "evicted"
    BEING_WRITTEN = "being_written"
    NO_ROOM = "no_room"
    RESET = "reset"
    COPY_FAILED = "copy_failed"
    CORRUPT = "corrupt"
    """A lower tier gave back other bytes than were written to it."""
    READ_FAILED = "read_failed"
    """A lower tier could not read it."""
    NOT_IN_TIME = "not_in_time"
    """A lower tier has it, or may have it, but did not deliver before the request's deadline."""
    FASTER_TO_COMPUTE = "faster_to_compute"
    """A lower tier has it, but loading would have taken longer than computing."""
    TOO_LARGE = "too_large"
    """A lower tier has it, but all that a request needs of it at once is more than may be promoted."""


@dataclass(frozen=True, slots=True)
class Miss:
    """A reason, and for evictions, resets and refusals how many seconds ago that was."""

    reason: MissReason
    age_s: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LoadStoreSpec:
    """Where blocks are in a medium, in the order of the keys they were asked for."""

    medium_name: str
    slots: Slots

    def medium(self) -> str:
        return self.medium_name


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSpec:
    """Device blocks of one transfer, group after group.

    ``block_ids`` is int64, all groups concatenated; ``group_sizes[g]`` of them belong to group ``g``.
    ``block_indices[g]`` is the index, within its request, of the group's first device block: modulo
    ``block_size_factor`` it tells where inside its offloaded block that device block lies. The host's slots
    are concatenated in the same way.
    """

    block_ids: npt.NDArray[np.int64]
    group_sizes: tuple[int, ...]
    block_indices: tuple[int, ...]

    def medium(self) -> str:
        return "device"


@dataclass(frozen=True, slots=True, eq=False)
class TransferSpec:
    """One job for a worker. A load copies ``host`` slots to ``device`` blocks, a store the other way."""

    req_id: str
    host: LoadStoreSpec
    device: DeviceSpec


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


@dataclass(slots=True)
class BlockStatus:
    """A view of one block, made when somebody asks. ``ref_cnt`` -1: being written; n > 0: n readers."""

    slot: int
    ref_cnt: int

    @property
    def is_ready(self) -> bool:
        return self.ref_cnt >= 0


class Backend(ABC):
    """Hands out slots of one medium. Knows nothing of keys or order.

    Slots are integers in ``[0, num_blocks)``, so that other parts can keep arrays by slot.
    """

    def __init__(self, block_size: int, medium: str) -> None:
        self.block_size = block_size
        self.medium = medium

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Slots in all, free or not."""

    @abstractmethod
    def get_num_free_blocks(self) -> int: ...

    @abstractmethod
    def allocate_blocks(self, keys: Sequence[OffloadKey]) -> Slots:
        """One free slot a key. The caller has checked the room."""

    @abstractmethod
    def free(self, slots: Slots) -> None:
        """Takes slots back, each once per allocation."""

    def get_load_store_spec(self, keys: Sequence[OffloadKey], slots: Slots) -> LoadStoreSpec:
        """The spec that tells a worker where ``keys`` lie; ``slots`` has their places, in order."""
        return LoadStoreSpec(self.medium, slots)

    def check_integrity(self) -> None:
        """Raises IntegrityError if the books do not balance."""


class CachePolicy(ABC):
    """Decides which block leaves. Owns order only: no bytes, no pins, no events.

    Blocks are known by slot; a policy may keep numpy arrays of ``capacity`` entries. The caller (the
    manager) promises: a slot is inserted once until it is evicted or removed; ``pin``, ``unpin``,
    ``settle``, ``touch`` and ``remove`` are called for inserted slots only, each slot at most once in a
    call; ``evict`` is asked for at most as many blocks as are evictable.

    The policy must: return from ``evict`` exactly ``n`` distinct slots, none of them ``busy``; forget
    them; keep every list in the order the calls came. Lists are given oldest first: the last slot
    becomes the most recent.

    One request is one use of its blocks, however often the engine tries it. Of each request the policy is told, in
    this order: ``observe`` (the whole chain), ``touch_absent`` (what of it is not here), ``touch`` (what is); then, as
    it computes, ``admit``, ``evict`` and ``insert`` for what it stores, in one or several parts; at its end
    ``refresh``.
    """

    may_refuse = True
    """Whether ``admit`` is heeded. Not in a host pool through which lower tiers are fed: there all must enter."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    def observe(self, keys: Sequence[OffloadKey]) -> None:
        """A request asks for a chain: ``keys``, head first, cached or not."""

    @abstractmethod
    def insert(self, slots: Slots, keys: Sequence[OffloadKey]) -> None:
        """New blocks, at the recent end. They are being written: not evictable until ``settle``."""

    @abstractmethod
    def touch(self, slots: Slots, ready: npt.NDArray[np.bool_], pinned: npt.NDArray[np.bool_]) -> None:
        """Blocks were used. ``ready[i]`` False: still being written. ``pinned[i]``: a reader holds it, see ``pin``."""

    def touch_absent(self, keys: Sequence[OffloadKey]) -> None:
        """Keys that are not cached were used, the last of the chain first. Policies with ghost lists learn from it."""

    def refresh(self, slots: Slots, new: npt.NDArray[np.bool_], pinned: npt.NDArray[np.bool_]) -> None:
        """A request that used or stored ``slots``, one by one or in parts, has all of its chain now, which takes the
        places that it would have if all had come at this moment. No further use. ``new[i]``: stored by this request;
        policies in which a use moves nothing move only those."""

    def admit(self, keys: Sequence[OffloadKey], shortage: int) -> npt.NDArray[np.bool_] | None:
        """``keys``, absent and in the order of their chain, are to be stored, and ``shortage`` of them have no free
        slot. Which may enter; None: all. Blocks are evicted for those only. Called before ``evict`` and ``insert``,
        heeded if ``may_refuse``."""
        return None

    def refuse(self, keys: Sequence[OffloadKey]) -> None:
        """``keys``, absent, go on a chain of which ``admit`` has refused a block. They are not stored, and to be
        remembered as if ``admit`` had refused them too."""

    def state(self) -> Mapping[str, Any]:
        """What a policy that adapts goes by now, for metrics and records of misses: ``rule``, a name, and ``scores``, a
        number a rule. Empty: it does not adapt."""
        return {}

    @abstractmethod
    def settle(self, slots: Slots) -> None:
        """Blocks that were passed over may be evicted now, from the place they had."""

    @abstractmethod
    def pin(self, slots: Slots) -> None:
        """Blocks get their first reader: they must not be evicted until ``unpin``."""

    @abstractmethod
    def unpin(self, slots: Slots) -> None:
        """The last reader has let go: blocks may be evicted again, from the recent end of the list they belong to if
        uses move blocks in it."""

    @abstractmethod
    def evict(self, n: int, busy: npt.NDArray[np.bool_], key_of: npt.NDArray[np.object_]) -> Slots:
        """Chooses and forgets ``n`` blocks. ``busy[slot]``: being written, pinned or protected; such a
        block keeps its place. A busy block that is not pinned is announced by ``settle`` when it no longer
        is. ``key_of[slot]`` is its key."""

    @abstractmethod
    def remove(self, slots: Slots) -> None:
        """Blocks vanished for another reason than ``evict``."""

    @abstractmethod
    def clear(self) -> None:
        """Everything vanished; what was learned about absent keys too."""

    def check_integrity(self, slots: Slots) -> None:
        """Raises IntegrityError unless the policy knows exactly ``slots``. A policy that does not check serves as
        well; the conformance suite asks for it."""


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
        """Pins every key; a pinned block is never evicted. Raises BlockNotReadyError, and changes nothing,
        if one is not ready."""

    @abstractmethod
    def complete_load(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        """Undoes one pin each. Raises BlockNotPinnedError, and changes nothing, if a key holds none."""

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        """A request uses a chain, called once a request: marks as recently used, last key first, so that a chain loses
        its tail before its head."""

    def refresh(
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
        it may be written to them. Called after ``refresh``."""

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
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None, success: bool = True
    ) -> None:
        """Blocks that were being written become ready, or vanish if the write failed. Ready blocks stay
        as they are, unknown keys are ignored."""

    @abstractmethod
    def take_events(self) -> Iterable[OffloadingEvent]:
        """What became ready or left since the last call, once each."""

    @abstractmethod
    def reset(self) -> None:
        """Every key vanishes at once. A slot in transfer comes back when its transfer ends."""

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

    def let_go(self, req_context: ReqContext) -> None:
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
        """By names of ``kvoffload.metrics.METRICS``: what was counted since the last call, and gauges as they are."""
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


class Request(Protocol):
    """What the scheduler half of the connector reads of an engine's request."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and what was sampled so far."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is computed, or will be when the steps under way are done."""
        ...

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        """One per whole hash-block of known tokens."""
        ...

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None: ...


class KVBlocks(Protocol):
    """The device blocks a request holds."""

    def get_block_ids(self) -> tuple[list[int], ...]:
        """Block ids per KV cache group, from the request's first block on. 0 is the null block; any other
        id belongs to one group at a time."""
        ...


@dataclass(slots=True)
class ScheduledStep:
    """What an engine decided for one step, in engine-neutral form."""

    num_scheduled_tokens: Mapping[str, int]
    """Per request, tokens to compute in this step."""
    block_ids: Mapping[str, tuple[Sequence[int], ...]] = field(default_factory=dict)
    """Per request and group, device block ids given to it since its last step."""
    replaced: frozenset[str] = frozenset()
    """Requests whose ``block_ids`` are their whole block table: new and resumed ones."""
    preempted: Iterable[str] = ()
    """Requests that lost all their blocks in this step."""
    overwritten: Collection[int] = ()
    """Device blocks that the engine may write to before its workers are told of this step, so that no fence can
    protect them: what still reads them is lost."""

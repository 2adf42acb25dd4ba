"""Value types that all contracts share.

A *device block* is one page of the engine's paged KV cache. A *block* is the unit that is offloaded:
``block_size_factor`` consecutive device blocks of one KV cache group. A *slot* is a place for one block in a
medium. A *store* copies from device to host, a *load* from host to device.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.abc.errors import ConfigError

BlockHash: TypeAlias = bytes
"""Chained hash of a token block, which identifies the whole prefix that ends with the block."""


OffloadKey: TypeAlias = bytes
"""Identifies a block: the block hash of its last hash-block, then the group index as a big-endian u32."""
Keys: TypeAlias = Sequence[OffloadKey]


Slots: TypeAlias = npt.NDArray[np.int64]
"""One-dimensional array of slot numbers in ``[0, num_blocks)``."""


ByteArray: TypeAlias = npt.NDArray[np.uint8]
"""Bytes of any shape; a pool has the shape (num_blocks, slot_bytes)."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """One KV cache group: layers that share a block table, and how far back their tokens look.

    A device block has ``device_block_size`` tokens, an offloaded block has ``block_size_factor`` device blocks. At most
    one of ``sliding_window`` (a token attends to itself and the ``sliding_window - 1`` tokens before it),
    ``attention_chunk`` (the token at position p attends to ``p // attention_chunk * attention_chunk`` to p) and
    ``state`` is set; with none, attention is full. The KV of a position depends on the next ``lookahead`` tokens too:
    in layers of EAGLE and MTP draft models on one, and on as many as there are modules where each has KV of its own.

    With ``state`` the layers are recurrent or short convolutions: a block holds no KV per token but the whole state
    after its last token. A request continues from one such state, exactly where its hit ends. Which device blocks hold
    a state says ``ScheduledStep.boundary_states``, never a position in the block table.

    Raises ConfigError if a size is below 1, several of the three are set, ``lookahead`` is more than a block, or a
    state has a ``block_size_factor`` or a ``lookahead``.
    """

    device_block_size: int
    block_size_factor: int = 1
    sliding_window: int | None = None
    attention_chunk: int | None = None
    lookahead: int = 0
    state: bool = False

    def __post_init__(self) -> None:
        if (self.sliding_window is not None) + (self.attention_chunk is not None) + self.state > 1:
            raise ConfigError("a KV cache group has a sliding window, an attention chunk or a state, not several")
        if self.state and self.block_size_factor != 1:
            raise ConfigError("block_size_factor", self.block_size_factor, "must be 1 for a group with a state")
        for name in ("device_block_size", "block_size_factor", "sliding_window", "attention_chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(name, value, "must be at least 1")
        most = 0 if self.state else self.block_tokens
        if not 0 <= self.lookahead <= most:
            raise ConfigError(
                f"lookahead={self.lookahead}: must be 0 for a group with a state"
                if self.state
                else f"lookahead={self.lookahead}: must be from 0 to {most}, the tokens of one block"
            )

    @property
    def block_tokens(self) -> int:
        """Tokens per offloaded block."""
        return self.device_block_size * self.block_size_factor

    @property
    def is_full(self) -> bool:
        return self.sliding_window is None and self.attention_chunk is None and not self.state

    def skipped_tokens(self, num_computed: int) -> int:
        """Returns how many leading tokens the token at position ``num_computed`` does not attend to. With a state, that
        is all but the last token before it, at which the state stands.

        The engine may free device blocks that hold only such tokens, and puts the null block in their place.
        """
        if self.state:
            return max(0, num_computed - 1)
        if self.sliding_window is not None:
            return max(0, num_computed - self.sliding_window + 1)
        if self.attention_chunk is not None:
            return num_computed // self.attention_chunk * self.attention_chunk
        return 0


LEAST_LIKELY = 0.5
"""A return that is less likely than this is as good as unknown."""


@dataclass(frozen=True, slots=True)
class Hints:
    """What a client knows about the next use of the blocks of its request, see ``kvoffload.cache.hints``."""

    session: int | None = None
    """Identifies the conversation or agent, from 2 to 2**63 - 1. Its blocks belong to it, not to the request."""
    drop: bool = False
    """Whether the session ends with this request."""
    expect_return_s: float | None = None
    """Seconds from the end of the request to the next one of the session."""
    p_return: float | None = None
    """The probability that there is a next one, from 0 to 1. None: not known."""
    retain_s: float | None = None
    """For how many seconds after the request's end its chain is to be retained, see ``kvoffload.cache.retention``;
    0 ends what was retained for the session. None: nothing was asked for."""

    @property
    def likely_return_s(self) -> float | None:
        """``expect_return_s``, unless the return is less likely than LEAST_LIKELY."""
        return None if self.p_return is not None and self.p_return < LEAST_LIKELY else self.expect_return_s


@dataclass(frozen=True, slots=True)
class Awaited:
    """Blocks that another server hands over to a request: it stores them in a tier that both use.

    Between ``since`` and ``until``, by the manager's clock, a block of ``keys`` that shared tiers lack may still come.
    ``keys`` are in the order of their chain, and one is found among them at once, as in a dict. ``places`` says by name
    of the tier where it is looked for, see ``Tier.hand_over``.
    """

    keys: Collection[OffloadKey]
    places: Mapping[str, str]
    since: float
    until: float


@dataclass(frozen=True, slots=True)
class ReqContext:
    """The request that a manager call is made for, with the ``kv_transfer_params`` of its client.

    With ``may_wait`` False a lookup is answered at once, with the blocks that can be loaded now. With ``goes_on``
    somebody waits for its blocks, such as a server that goes on with it: they are stored whatever admission and policy
    say and lower tiers hold.
    """

    req_id: str
    kv_transfer_params: Mapping[str, Any] | None = None
    may_wait: bool = True
    hints: Hints | None = None
    awaited: Awaited | None = None
    goes_on: bool = False


class LookupState(enum.IntEnum):
    """State of one key."""

    MISS = 0
    HIT = 1
    PENDING = 2
    """Being written: known, but not readable yet."""
    RETRY = 3
    """Not known yet, or held by a lower tier only: ask again."""


class MissReason(enum.StrEnum):
    """Why a block was missing when a request asked for it."""

    NEVER_STORED = "never_stored"
    NOT_ADMITTED = "not_admitted"
    FORGOTTEN = "forgotten"
    """Enough requests had asked for it, but the reuse filter had forgotten that."""
    EVICTED = "evicted"
    BEING_WRITTEN = "being_written"
    NO_ROOM = "no_room"
    OVER_QUOTA = "over_quota"
    """Its tenant had used up its quota, and all blocks of the tenant were in use."""
    LEFT_UNSTORED = "left_unstored"
    """It left the device together with more blocks than could be stored then."""
    RESET = "reset"
    COPY_FAILED = "copy_failed"
    CORRUPT = "corrupt"
    """A lower tier returned other bytes than were written to it."""
    READ_FAILED = "read_failed"
    """A lower tier could not read it."""
    NOT_IN_TIME = "not_in_time"
    """A lower tier has it, but did not deliver before the request's deadline."""
    NOT_ANSWERED = "not_answered"
    """A lower tier did not say in time whether it has it."""
    FASTER_TO_COMPUTE = "faster_to_compute"
    """A lower tier has it, but loading would have taken longer than computing."""
    TOO_LARGE = "too_large"
    """A lower tier has it, but the request needs more blocks at once than may be promoted."""
    NO_STATE = "no_state"
    """The blocks before it are stored, but recurrent layers have no state at their end: none was kept there."""
    NOT_LOOKED_UP = "not_looked_up"
    """The request may not load: its client or its engine said so."""
    ADAPTER_UNKNOWN = "adapter_unknown"
    """The bytes of the request's adapter were not known in time, or have changed."""


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a block is missing. ``age_s``: seconds since it was evicted, reset or refused, if that is known. ``tier``:
    the name of the lower tier that holds it. ``policy``: ``CachePolicy.state`` of the policy that evicts
    from host memory, if it has any."""

    reason: MissReason
    age_s: float | None = None
    tier: str | None = field(default=None, compare=False)
    policy: Mapping[str, Any] | None = field(default=None, compare=False)


class TenantUse(NamedTuple):
    """What a tenant holds of a tier, and since the start its evicted blocks and its refused stores."""

    name: str
    num_blocks: int
    num_evicted: int
    num_refused: int
    num_retained: int = 0
    """Blocks that are charged to its retention quota."""
    num_retained_lost: int = 0
    """Retained blocks that were lost before their time, since the start."""
    retained_block_s: int = 0
    """Blocks that were charged to its retention quota, times seconds, since the start."""


class RetainRefusal(enum.StrEnum):
    """Why a request's blocks are not retained."""

    NO_QUOTA = "no_quota"
    """Its tenant may not have blocks retained in any tier."""
    OVER_QUOTA = "over_quota"
    """They are more than is left of its tenant's quota in every tier."""
    NOT_WRITTEN = "not_written"
    """A lower tier has room for them, but too many are still to be written there."""
    NOTHING = "nothing"
    """The request has no whole block that may be stored."""


class Retained(NamedTuple):
    """The answer to a request that asks for its blocks to be retained."""

    refusal: RetainRefusal | None
    """None: they are retained."""
    tier: str | None = None
    """Where: "host", or the name of a lower tier."""
    num_blocks: int = 0
    """Blocks of the chain, those that others have retained too included."""


class HandedOver(NamedTuple):
    """The answer to a request whose blocks are to be handed over to another server."""

    places: Mapping[str, str]
    """By the name of each tier that has all of them or will be given them, where they are looked for, see
    ``Tier.hand_over``."""
    num_blocks: int
    """Leading blocks for which there is such a tier."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadStoreSpec:
    """Slots of blocks in a medium, in the order of the keys that were asked for. Read only.

    A spec that ``prepare_load`` or ``prepare_store`` returned is also the lease on these slots: they hold the same
    blocks until the lease is completed, as a whole or by specs that have some of its slots each.
    """

    medium_name: str
    slots: Slots

    def medium(self) -> str:
        return self.medium_name


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSpec:
    """Device blocks of one transfer, group after group.

    ``block_ids`` is int64, all groups concatenated; ``group_sizes[g]`` of them belong to group ``g``.
    ``block_indices[g]`` is the index, within its request, of the group's first device block; modulo
    ``block_size_factor`` it is the place of that device block inside its offloaded block. The host slots of the
    transfer are concatenated in the same way.
    """

    block_ids: npt.NDArray[np.int64]
    group_sizes: tuple[int, ...]
    block_indices: tuple[int, ...]

    def medium(self) -> str:
        return "device"


@dataclass(frozen=True, slots=True, eq=False)
class TransferSpec:
    """One copy job of a worker: a load copies ``host`` slots to ``device`` blocks, a store the other way."""

    req_id: str
    """The request that is loaded. A store may copy blocks of several requests: the first of them."""
    host: LoadStoreSpec
    device: DeviceSpec


@dataclass(slots=True)
class BlockStatus:
    """State of one block. ``ref_cnt`` is -1 while it is being written, else its number of pins."""

    slot: int
    ref_cnt: int

    @property
    def is_ready(self) -> bool:
        return self.ref_cnt >= 0

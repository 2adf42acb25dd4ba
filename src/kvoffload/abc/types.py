"""Value types that all contracts share.

A *device block* is one page of the engine's paged KV cache. A *block* is the unit that is offloaded:
``block_size_factor`` consecutive device blocks of one KV cache group. A *slot* is a place for one block in a
medium. A *store* copies from device to host, a *load* from host to device.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.abc.errors import ConfigError

BlockHash: TypeAlias = bytes
"""Chained hash of a token block: names the whole prefix that ends there."""


OffloadKey: TypeAlias = bytes
"""A block's name: the block hash of its last hash-block, then the group index as a big-endian u32."""


Slots: TypeAlias = npt.NDArray[np.int64]
"""One-dimensional array of slot numbers in ``[0, num_blocks)``."""


ByteArray: TypeAlias = npt.NDArray[np.uint8]


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


@dataclass(frozen=True, slots=True)
class ReqContext:
    """The request that a manager call is made for. ``kv_transfer_params`` is what the client sent along.

    With ``may_wait`` False a lookup is answered at once, with the blocks that can be loaded now.
    """

    req_id: str
    kv_transfer_params: Mapping[str, Any] | None = None
    may_wait: bool = True


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


@dataclass(slots=True)
class BlockStatus:
    """A view of one block, made when somebody asks. ``ref_cnt`` -1: being written; n > 0: n readers."""

    slot: int
    ref_cnt: int

    @property
    def is_ready(self) -> bool:
        return self.ref_cnt >= 0

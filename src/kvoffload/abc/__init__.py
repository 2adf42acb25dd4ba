"""The contracts that the parts of kvoffload are written against: value types, errors and abstract classes.

Nothing here imports another part of kvoffload.
"""

from kvoffload.abc.backend import Backend
from kvoffload.abc.engine import BoundaryState, Following, KVBlocks, Request, ScheduledStep
from kvoffload.abc.errors import BlockNotPinnedError, BlockNotReadyError, ConfigError, IntegrityError, KVOffloadError
from kvoffload.abc.manager import (
    Admission,
    BlockDescription,
    HostOffloadingManager,
    Need,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
)
from kvoffload.abc.policy import Access, CachePolicy, Eviction
from kvoffload.abc.tier import Ability, States, Tier, TierError, TierResult, TierStats
from kvoffload.abc.transfer import PageGroup, Placement, Transfer, TransferResult
from kvoffload.abc.types import (
    Awaited,
    BlockHash,
    BlockStatus,
    ByteArray,
    DeviceSpec,
    Hints,
    KVGroup,
    LoadStoreSpec,
    LookupState,
    Miss,
    MissReason,
    OffloadKey,
    ReqContext,
    Retained,
    RetainRefusal,
    Slots,
    TenantUse,
    TransferSpec,
)

__all__ = [
    "Ability",
    "Access",
    "Admission",
    "Awaited",
    "Backend",
    "BlockDescription",
    "BlockHash",
    "BlockNotPinnedError",
    "BlockNotReadyError",
    "BlockStatus",
    "BoundaryState",
    "ByteArray",
    "CachePolicy",
    "ConfigError",
    "DeviceSpec",
    "Eviction",
    "Following",
    "Hints",
    "HostOffloadingManager",
    "IntegrityError",
    "KVBlocks",
    "KVGroup",
    "KVOffloadError",
    "LoadStoreSpec",
    "LookupState",
    "Miss",
    "MissReason",
    "Need",
    "OffloadKey",
    "OffloadingEvent",
    "OffloadingManager",
    "PageGroup",
    "Placement",
    "PrepareStoreOutput",
    "ReqContext",
    "Request",
    "RetainRefusal",
    "Retained",
    "ScheduledStep",
    "Slots",
    "States",
    "TenantUse",
    "Tier",
    "TierError",
    "TierResult",
    "TierStats",
    "Transfer",
    "TransferResult",
    "TransferSpec",
]

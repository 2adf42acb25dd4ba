"""kvoffload keeps the KV cache of an LLM server beyond its device memory."""

from kvoffload.admission import FilterReusedOffloadingManager
from kvoffload.base import (
    Backend,
    BlockHash,
    BlockNotPinnedError,
    BlockNotReadyError,
    BlockStatus,
    CachePolicy,
    ConfigError,
    DeviceSpec,
    IntegrityError,
    KVBlocks,
    KVGroup,
    KVOffloadError,
    LoadStoreSpec,
    LookupState,
    Miss,
    MissReason,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    Request,
    ScheduledStep,
    TransferSpec,
)
from kvoffload.config import OffloadConfig
from kvoffload.explain import RequestRecord
from kvoffload.hostpool import HostBackend, HostPool
from kvoffload.keys import hash_blocks, make_offload_key, root_hash
from kvoffload.manager import ARCOffloadingManager, LRUOffloadingManager, PolicyOffloadingManager
from kvoffload.policies import make_policy
from kvoffload.scheduler import OffloadingConnectorScheduler
from kvoffload.table import BlockTable
from kvoffload.tiering import TieredOffloadingManager
from kvoffload.tiers.base import Tier, TierError, TierResult
from kvoffload.tiers.disk import DiskTier, open_disk_tier
from kvoffload.transfer.base import PageGroup, Transfer, TransferResult
from kvoffload.transfer.inline import InlineTransfer
from kvoffload.worker import OffloadingConnectorWorker, StepMeta, WorkerReport

__version__ = "0.1.0"

__all__ = [
    "ARCOffloadingManager",
    "Backend",
    "BlockHash",
    "BlockNotPinnedError",
    "BlockNotReadyError",
    "BlockStatus",
    "BlockTable",
    "CachePolicy",
    "ConfigError",
    "DeviceSpec",
    "DiskTier",
    "FilterReusedOffloadingManager",
    "HostBackend",
    "HostPool",
    "InlineTransfer",
    "IntegrityError",
    "KVBlocks",
    "KVGroup",
    "KVOffloadError",
    "LRUOffloadingManager",
    "LoadStoreSpec",
    "LookupState",
    "Miss",
    "MissReason",
    "OffloadConfig",
    "OffloadKey",
    "OffloadingConnectorScheduler",
    "OffloadingConnectorWorker",
    "OffloadingEvent",
    "OffloadingManager",
    "PageGroup",
    "PolicyOffloadingManager",
    "PrepareStoreOutput",
    "ReqContext",
    "Request",
    "RequestRecord",
    "ScheduledStep",
    "StepMeta",
    "Tier",
    "TierError",
    "TierResult",
    "TieredOffloadingManager",
    "Transfer",
    "TransferResult",
    "TransferSpec",
    "WorkerReport",
    "hash_blocks",
    "make_offload_key",
    "make_policy",
    "open_disk_tier",
    "root_hash",
]

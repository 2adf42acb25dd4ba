"""kvoffload keeps the KV cache of an LLM server beyond its device memory."""

from kvoffload.abc import (
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
    PageGroup,
    PrepareStoreOutput,
    ReqContext,
    Request,
    ScheduledStep,
    Tier,
    TierError,
    TierResult,
    Transfer,
    TransferResult,
    TransferSpec,
)
from kvoffload.cache.admission import FilterReusedOffloadingManager
from kvoffload.cache.keys import hash_blocks, make_offload_key, root_hash
from kvoffload.cache.manager import ARCOffloadingManager, LRUOffloadingManager, PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.slots import HostBackend
from kvoffload.cache.table import BlockTable
from kvoffload.config import OffloadConfig
from kvoffload.connector.messages import StepMeta, WorkerReport
from kvoffload.connector.scheduler import OffloadingConnectorScheduler
from kvoffload.connector.worker import OffloadingConnectorWorker
from kvoffload.host.pool import HostPool
from kvoffload.observe.records import RequestRecord
from kvoffload.tiers.disk.start import open_disk_tier
from kvoffload.tiers.disk.tier import DiskTier
from kvoffload.tiers.manager import TieredOffloadingManager
from kvoffload.transfer.inline import InlineTransfer

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

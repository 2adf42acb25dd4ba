"""kvoffload keeps the KV cache of an LLM server beyond its device memory.

These are the names that an engine needs to embed it. The contracts are in ``kvoffload.abc``; everything else is
imported from its own package.
"""

from kvoffload.abc import (
    Backend,
    CachePolicy,
    ConfigError,
    KVGroup,
    KVOffloadError,
    OffloadingManager,
    PageGroup,
    ReqContext,
    ScheduledStep,
    Tier,
)
from kvoffload.cache.admission import FilterReusedOffloadingManager
from kvoffload.cache.keys import hash_blocks, make_offload_key
from kvoffload.cache.manager import LRUOffloadingManager
from kvoffload.cache.policies.engine_arc import ARCOffloadingManager
from kvoffload.cache.slots import HostBackend
from kvoffload.config import OffloadConfig
from kvoffload.connector.build import build_scheduler
from kvoffload.connector.engine import EngineSpec
from kvoffload.connector.scheduler import OffloadingConnectorScheduler
from kvoffload.connector.worker import OffloadingConnectorWorker
from kvoffload.fingerprints import fingerprint
from kvoffload.host.pool import HostPool
from kvoffload.tiers.config import TierConfig, TierContext
from kvoffload.transfer.inline import InlineTransfer

__version__ = "0.1.0"

__all__ = [
    "ARCOffloadingManager",
    "Backend",
    "CachePolicy",
    "ConfigError",
    "EngineSpec",
    "FilterReusedOffloadingManager",
    "HostBackend",
    "HostPool",
    "InlineTransfer",
    "KVGroup",
    "KVOffloadError",
    "LRUOffloadingManager",
    "OffloadConfig",
    "OffloadingConnectorScheduler",
    "OffloadingConnectorWorker",
    "OffloadingManager",
    "PageGroup",
    "ReqContext",
    "ScheduledStep",
    "Tier",
    "TierConfig",
    "TierContext",
    "build_scheduler",
    "fingerprint",
    "hash_blocks",
    "make_offload_key",
]

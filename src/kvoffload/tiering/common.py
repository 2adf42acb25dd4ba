"""What the parts of a TieredOffloadingManager have in common."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvoffload.abc import Admission, KVGroup
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.misses import MissMemory
from kvoffload.cache.tenants import Tenants
from kvoffload.tiering.unwritten import UnwrittenPins

if TYPE_CHECKING:
    from kvoffload.tiering.health import LowerTier

WRITE_SHARE = 0.125
"""At most this share of the host's blocks is pinned for writes to lower tiers. Above it, blocks are written later."""
BACKLOG_SHARE = 2.0
"""Keys of the chains that are still to be written to a tier, as a multiple of the host's blocks. Above it the oldest
chain is dropped."""


@dataclass(frozen=True, slots=True)
class TierSettings:
    """How one lower tier is used, where that differs from TieringSettings."""

    lookup_deadline_ms: float | None = None
    admission: Admission | None = None
    """What decides which blocks are worth writing to it. None: all are."""


@dataclass(frozen=True, slots=True)
class TieringSettings:
    """How host memory and lower tiers work together."""

    groups: Sequence[KVGroup]
    """The KV cache groups that keys name."""
    load_only_if_faster: bool = True
    """A run of blocks that would take longer to read than to compute is not loaded."""
    load_deadline_ms: float = 1000.0
    """How long a request waits for a promotion."""
    lookup_deadline_ms: float = 100.0
    """A block counts as missing if a tier does not say within this time whether it holds it."""
    tiers: Sequence[TierSettings] = ()
    """What differs per tier, by default nothing."""
    tenants: Tenants | None = None
    """For whom the bytes that are moved are counted, by default for nobody."""
    write_share: float = WRITE_SHARE
    backlog_share: float = BACKLOG_SHARE


class Common:
    """``host``, the tiers below it, and what all parts of one manager use."""

    def __init__(self, host: PolicyOffloadingManager, settings: TieringSettings, clock: Callable[[], float]) -> None:
        self.host = host
        self.settings = settings
        self.clock = clock
        self.tiers: tuple[LowerTier, ...] = ()
        """The fastest first. Set by the manager, once."""
        self.load_deadline_s = settings.load_deadline_ms / 1000
        self.counts = defaultdict[str, float](float)
        """Counts since they were last taken, by names of METRICS: "NAME", or "NAME:TIER"."""
        self.reasons = MissMemory(clock=clock)
        """Why blocks were not promoted."""
        self.unwritten = UnwrittenPins(self)

"""The entry of the disk tier in a configuration, and the common part of the entries of tiers in directories."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvoffload.abc import Tier
from kvoffload.settings import absolute_path
from kvoffload.tiers.config import TierConfig, TierContext
from kvoffload.tiers.disk.start import open_disk_tier
from kvoffload.units import MIN_BUDGET, format_bytes, parse_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DirectoryConfig(TierConfig):
    """A directory, of which this node takes at most so many bytes. ``example`` has a ``dir``."""

    dir: str
    """An absolute path, or a path that begins with "~"."""
    bytes: int
    """Space for offloaded blocks of this node, including everything else that the tier keeps there."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dir", absolute_path("dir", self.dir, str(self.example["dir"])))
        object.__setattr__(self, "bytes", parse_bytes("bytes", self.bytes, MIN_BUDGET))

    has_shares = True

    @property
    def capacity_bytes(self) -> int:
        return self.bytes

    @property
    def directory(self) -> str:
        return self.dir


@dataclass(frozen=True)
class DiskConfig(DirectoryConfig):
    """A directory of a local disk, used by this server alone."""

    kind = "disk"
    retains = True
    example = {"dir": "/var/cache/kvoffload", "bytes": "500GiB"}

    def open(self, context: TierContext) -> Tier:
        tier = open_disk_tier(self.dir, self.bytes, context)
        logger.info(
            "kvoffload: disk tier in %s of %s = %s tokens; found %s blocks of this model there",
            self.dir,
            format_bytes(tier.files.budget.capacity_bytes),
            f"{context.num_tokens(tier.files.budget.num_slots):,}",
            f"{tier.catalog.num_blocks:,}",
        )
        return tier

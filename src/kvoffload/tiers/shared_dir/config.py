"""The entry of the shared directory tier in a configuration."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from kvoffload.abc import ConfigError, Tier
from kvoffload.tiers.config import TierContext
from kvoffload.tiers.disk.config import DirectoryConfig
from kvoffload.tiers.shared_dir.seats import GONE_AFTER_S, SILENT_S
from kvoffload.tiers.shared_dir.start import open_shared_dir_tier
from kvoffload.units import format_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SharedDirConfig(DirectoryConfig):
    """A directory of a shared file system, the same on every server. Each server writes into a folder of its own there,
    with a budget of its own, and reads the others'."""

    kind = "shared_dir"
    example = {"dir": "/mnt/shared/kvoffload", "bytes": "2TiB"}

    gone_after_s: float = GONE_AFTER_S
    """The blocks of a server that has been gone for so many seconds are removed by another one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        seconds = self.gone_after_s
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not SILENT_S <= seconds < float("inf"):
            raise ConfigError(
                f"gone_after_s={seconds!r}: must be a number of seconds, {SILENT_S:.0f} or more; leave it out for "
                f"{GONE_AFTER_S:.0f}"
            )

    def open(self, context: TierContext) -> Tier:
        existed = os.path.isdir(self.dir)
        tier = open_shared_dir_tier(
            self.dir,
            self.bytes,
            context.pools,
            context.fingerprint,
            identity=context.identity,
            policy=context.policy,
            engines=context.engines,
            gone_after_s=self.gone_after_s,
            shares=context.shares,
        )
        logger.info(
            "kvoffload: shared directory %s: writes to %s, %s = %s tokens; found %s blocks of this model there, and "
            "looks for those of other servers",
            self.dir,
            tier.seat.name,
            format_bytes(tier.capacity_bytes),
            f"{context.num_tokens(tier.capacity_bytes // tier.block_bytes):,}",
            f"{tier.num_blocks:,}",
        )
        if not existed:
            logger.warning(
                "kvoffload: %s did not exist and was made, on the file system that is mounted at %s: if the shared one "
                "is not mounted there, nothing is shared; stop the server, mount it, and remove what was made",
                self.dir,
                _mount_point(self.dir),
            )
        return tier


def _mount_point(path: str) -> str:
    """Returns where the file system that has ``path`` is mounted."""
    return next(str(folder) for folder in (Path(path), *Path(path).parents) if folder.is_mount())

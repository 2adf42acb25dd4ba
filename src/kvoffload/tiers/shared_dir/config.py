"""The entry of the shared directory tier in a configuration."""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import dataclass

from kvoffload.abc import ConfigError
from kvoffload.tiers.config import TierContext
from kvoffload.tiers.disk.config import DirectoryConfig
from kvoffload.tiers.disk.directory import DirectoryStorage
from kvoffload.tiers.disk.start import allow_descriptors, closed_on_failure
from kvoffload.tiers.late import mount_point
from kvoffload.tiers.shared_dir.seats import GONE_AFTER_S, SILENT_S
from kvoffload.tiers.shared_dir.tier import SharedDirTier
from kvoffload.units import format_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SharedDirConfig(DirectoryConfig):
    """A directory of a shared file system, the same on every server. Each server writes into a folder of its own there,
    with a budget of its own, and reads the others'."""

    kind = "shared_dir"
    is_shared = True
    example = {"dir": "/mnt/shared/kvoffload", "bytes": "2TiB"}

    gone_after_s: float = GONE_AFTER_S
    """The blocks of a server that has been gone for so many seconds are removed by another one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        seconds = self.gone_after_s
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not SILENT_S <= seconds < float("inf"):
            raise ConfigError(
                "gone_after_s",
                seconds,
                f"must be a number of seconds, {SILENT_S:.0f} or more",
                f"leave it out for {GONE_AFTER_S:.0f}",
            )

    def open(self, context: TierContext) -> SharedDirTier:
        existed = os.path.isdir(self.dir)
        tier = self._open(context)
        capacity_bytes = tier.own.files.budget.capacity_bytes
        logger.info(
            "kvoffload: shared directory %s: writes to %s, %s = %s tokens; found %s blocks of this model there, and "
            "looks for those of other servers",
            self.dir,
            tier.seat.name,
            format_bytes(capacity_bytes),
            f"{context.num_tokens(tier.own.files.budget.num_slots):,}",
            f"{tier.own.catalog.num_blocks:,}",
        )
        if not existed:
            logger.warning(
                "kvoffload: %s did not exist and was made, on the file system that is mounted at %s: if the shared one "
                "is not mounted there, nothing is shared; stop the server, mount it, and remove what was made",
                self.dir,
                mount_point(self.dir),
            )
        return tier

    def _open(self, context: TierContext) -> SharedDirTier:
        """Opens the tier of one engine, with an equal share of the budget."""
        try:
            root = DirectoryStorage(self.dir)
        except ConfigError as error:
            fix = f"{error.fix}. All servers that share a directory run as the same user"
            raise ConfigError(error.setting, self.dir, error.fault, fix) from error
        with closed_on_failure(root, "name a directory that this user can write to"):
            if root.read_only:
                raise OSError(errno.EROFS, "the file system is mounted read-only")
            allow_descriptors(self.bytes, context.engines)
            return SharedDirTier(root, context, self.bytes // context.engines, self.gone_after_s)

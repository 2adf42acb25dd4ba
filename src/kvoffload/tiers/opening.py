"""Opens the tiers of a configuration: the one place where a medium that fails, or hangs, becomes a warning."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from kvoffload.abc import ConfigError, Tier, TierStats
from kvoffload.cache.tenants import MakeShares
from kvoffload.tiers.config import TierConfig, TierContext, TierEntry, distinct_names
from kvoffload.tiers.late import LateTier, Opener, RenewableTier

logger = logging.getLogger(__name__)

OPEN_DEADLINE_S = 15.0
"""Time for the file systems of all tiers to answer. A tier that is later is used as soon as it is open."""
LEAST_WAIT_S = 0.5
"""Each of them gets this, whatever the others have taken."""


def open_tiers(
    entries: Sequence[TierEntry],
    context: TierContext,
    opened: ExitStack,
    shares: Callable[[str], MakeShares] | None = None,
) -> list[tuple[Tier, TierConfig | None]]:
    """Returns the tiers that ``entries`` ask for, with distinct names, each beside its entry. Tiers whose media fail
    are left out, with a warning. ``opened`` closes what is open if the caller fails later. ``shares``: returns, by the
    name of a tier, what makes the shares of tenants; None if they share nothing.

    Raises ConfigError if a setting is wrong.
    """
    found: list[tuple[Tier, TierConfig | None]] = []
    deadline = time.monotonic() + OPEN_DEADLINE_S
    for entry, name in zip(entries, distinct_names(entry.config.kind for entry in entries), strict=True):
        mine = replace(context, shares=None if shares is None else shares(name))
        if entry.config.directory is None:
            tier = _open_tier(entry, mine)
        else:
            tier = _open_in_directory(entry, entry.config.directory, mine, name, deadline)
        if tier is not None:
            opened.callback(tier.close)
            found.append((named(tier, name), entry.config))
    return found


def _open_tier(entry: TierEntry, context: TierContext) -> Tier | None:
    """Returns the tier that ``entry`` asks for. Returns None, with a warning, if its medium fails.

    Raises ConfigError if a setting is wrong.
    """
    try:
        return _open(entry, context)
    except OSError as error:
        logger.warning(
            "kvoffload: %s: THERE IS NO %s TIER: %s; the server continues without it. Fix that and start again",
            entry.setting,
            entry.config.kind.upper(),
            error.strerror or error,
        )
        return None


def _open_in_directory(entry: TierEntry, directory: str, context: TierContext, name: str, deadline: float) -> Tier:
    """Returns the tier that ``entry`` asks for in ``directory``. If its medium fails, or has not answered by
    ``deadline``, the tier is empty until it does.

    Raises ConfigError if a setting is wrong.
    """
    opener = Opener(partial(_open, entry, context), directory, name, entry.setting)
    opener.wait(max(LEAST_WAIT_S, deadline - time.monotonic()))
    capacity_bytes = entry.config.capacity_bytes
    standby = TierStats(None if capacity_bytes is None else capacity_bytes // context.engines, 0, 0)
    block_bytes = sum(pool.shape[1] for pool in context.pools)
    late = LateTier(opener, standby, block_bytes, is_shared=entry.config.is_shared)
    tier = late.join()
    if tier is None and opener.error is not None:
        if not isinstance(opener.error, OSError):
            late.close()
            raise opener.error
        opener.log_failure()
    return late if tier is None or isinstance(tier, RenewableTier) else tier


def _open(entry: TierEntry, context: TierContext) -> Tier:
    """Returns the tier that ``entry`` asks for. Raises ConfigError if a setting is wrong, and OSError if its medium
    fails."""
    try:
        tier = entry.config.open(context)
    except ConfigError as error:
        raise entry.name_error(error) from error
    except OSError:
        raise
    except Exception as error:
        raise ConfigError(
            *entry.named,
            f"the tier cannot be opened ({type(error).__name__}: {error})",
            "correct its class, or remove the entry",
        ) from error
    if not isinstance(tier, Tier):
        raise ConfigError(*entry.named, f"open() returned a {type(tier).__name__}", "it must return a kvoffload.Tier")
    return tier


def named(tier: Tier, name: str) -> Tier:
    """Gives ``tier`` its name among all tiers."""
    if tier.name != name:
        tier.name = name
    return tier

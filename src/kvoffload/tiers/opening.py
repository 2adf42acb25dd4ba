"""Opens the tiers of a configuration: the one place where a medium that fails, or hangs, becomes a warning."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from kvoffload.abc import ConfigError, Tier
from kvoffload.cache.tenants import MakeShares
from kvoffload.tiers.config import TierConfig, TierContext, TierEntry, distinct_names
from kvoffload.tiers.late import LateTier, Opener, RenewableTier

logger = logging.getLogger(__name__)

NOTICE_S = 5.0
"""The log says who is waited for after this time."""
OPEN_DEADLINE_S = 15.0
"""Time for all tiers together, which open at once. A tier that is later is used as soon as it is open."""


def open_tiers(
    entries: Sequence[TierEntry],
    context: TierContext,
    opened: ExitStack,
    shares: Callable[[str], MakeShares] | None = None,
) -> list[tuple[Tier, TierConfig]]:
    """Returns the tiers that ``entries`` ask for, with distinct names, each beside its entry. A tier whose medium
    fails, or has not answered after ``OPEN_DEADLINE_S``, is empty until it does; a warning says so. ``opened`` closes
    them if the caller fails later. ``shares``: returns, by the name of a tier, what makes the shares of tenants; None
    if they share nothing.

    Raises ConfigError if a setting is wrong.
    """
    started = time.monotonic()
    block_bytes = sum(pool.shape[1] for pool in context.pools)
    found: list[tuple[Opener, LateTier]] = []
    for entry, name in zip(entries, distinct_names(entry.config.kind for entry in entries), strict=True):
        mine = replace(context, shares=None if shares is None else shares(name))
        opener = Opener(partial(_open, entry, mine, name), entry.config.directory, name, entry.setting)
        late = LateTier(opener, block_bytes, is_shared=entry.config.is_shared)
        opened.callback(late.close)
        found.append((opener, late))
    for opener, _ in found:
        if not opener.wait(started + NOTICE_S):
            logger.warning(
                "kvoffload: %s: the tier is not open after %.0f s: its medium is slow or hangs. After %.0f s the "
                "server starts without it",
                opener.setting,
                NOTICE_S,
                OPEN_DEADLINE_S,
            )
    for opener, _ in found:
        opener.wait(started + OPEN_DEADLINE_S)
    return [(_joined(*each), entry.config) for each, entry in zip(found, entries, strict=True)]


def _joined(opener: Opener, late: LateTier) -> Tier:
    """Returns the tier that ``opener`` has opened, or ``late`` in its place. Raises ConfigError if a setting is
    wrong."""
    opener.is_awaited = False
    tier = late.join()
    if tier is not None:
        return late if isinstance(tier, RenewableTier) else tier
    if opener.error is None:
        opener.log_missing(f"its medium has not answered for {OPEN_DEADLINE_S:.0f} s", "uses it once it answers")
    elif isinstance(opener.error, OSError):
        opener.log_failure()
    else:
        raise opener.error
    return late


def _open(entry: TierEntry, context: TierContext, name: str) -> Tier:
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
    config = entry.config
    if tier.is_shared != config.is_shared:
        tier.close()
        raise ConfigError(
            *entry.named,
            f"is_shared is {tier.is_shared} in the tier, and {config.is_shared} in its {type(config).__name__}",
            "write the same in both classes",
        )
    return named(tier, name)


def named(tier: Tier, name: str) -> Tier:
    """Gives ``tier`` its name among all tiers."""
    if tier.name != name:
        tier.name = name
    return tier

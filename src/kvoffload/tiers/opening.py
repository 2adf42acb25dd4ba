"""Opens the tiers of a configuration: the one place where a medium that fails becomes a warning."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from kvoffload.abc import ConfigError, Tier
from kvoffload.cache.tenants import MakeShares
from kvoffload.tiers.config import TierConfig, TierContext, TierEntry, distinct_names

logger = logging.getLogger(__name__)


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
    for entry, name in zip(entries, distinct_names(entry.config.kind for entry in entries), strict=True):
        tier = _open_tier(entry, replace(context, shares=None if shares is None else shares(name)))
        if tier is not None:
            opened.callback(tier.close)
            found.append((named(tier, name), entry.config))
    return found


def _open_tier(entry: TierEntry, context: TierContext) -> Tier | None:
    """Returns the tier that ``entry`` asks for. Returns None, with a warning, if its medium fails.

    Raises ConfigError if a setting is wrong.
    """
    kind = entry.config.kind
    try:
        tier = entry.config.open(context)
    except ConfigError as error:
        raise entry.name_error(error) from error
    except OSError as error:
        logger.warning(
            "kvoffload: %s: THERE IS NO %s TIER: %s; the server continues without it. Fix that and start again",
            entry.setting,
            kind.upper(),
            error.strerror or error,
        )
        return None
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

"""Opens a remote tier with its client in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kvoffload.abc import ConfigError
from kvoffload.tiers.config import TierContext
from kvoffload.tiers.remote.channel import ChannelState
from kvoffload.tiers.remote.messages import Setup
from kvoffload.tiers.remote.process import ProcessChannel
from kvoffload.tiers.remote.tier import RemoteTier

START_WAIT_S = 20.0
"""How long the start of a server waits for the client of a store that does not refuse it, so that the first requests
find blocks."""


def open_remote_tier(
    client: str,
    settings: Mapping[str, Any],
    context: TierContext,
    *,
    name: str,
    prefix: str,
    hmac_key_file: str | None = None,
    client_bytes: int = 0,
) -> RemoteTier:
    """Returns a tier whose store's client is made by ``client``, an import path "package.module:function", from
    ``settings``, and waits up to START_WAIT_S for it. ``prefix``: what the names of all values begin with.
    ``hmac_key_file``: see ``RemoteTierConfig``. ``client_bytes``: see ``Setup``.

    Raises ConfigError if another process cannot open a host pool.
    """
    handles = [handle for handle in context.handles if handle is not None]
    if len(handles) != len(context.pools):
        raise ConfigError(
            f"kind={name!r}: the process of the store's client cannot open {len(context.pools) - len(handles)} of the "
            f"{len(context.pools)} host pools; give build_scheduler HostPool.handle() of each pool, not its bytes"
        )
    num_slots = min(len(pool) for pool in context.pools)
    setup = Setup(
        client,
        settings,
        tuple(handles),
        num_slots,
        context.fingerprint,
        prefix,
        context.identity,
        hmac_key_file,
        client_bytes,
    )
    payload_bytes = sum(pool.shape[1] for pool in context.pools)
    channel = ProcessChannel(setup, name)
    tier = RemoteTier(channel, payload_bytes, name=name)
    deadline = time.monotonic() + START_WAIT_S
    while channel.state is ChannelState.STARTING and time.monotonic() < deadline:
        tier.wait(0.05)
        tier.poll()
    return tier

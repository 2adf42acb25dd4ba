"""Replays the recorded trace of the second act and compares the hits with those that the server measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from demo.process import DemoError
from demo.protocol import RequestResult
from kvoffload.abc import KVOffloadError
from kvoffload.config import HostContents
from kvoffload.lab.readers import read_trace
from kvoffload.lab.replay import ReplayConfig, replay

TOLERANCE = 0.01
TIERS = ("device", "host")


@dataclass(frozen=True, slots=True)
class Agreement:
    """Hit tokens of the act's requests per tier, as measured by the server and as replayed."""

    requests: int
    measured: dict[str, int]
    replayed: dict[str, int]
    largest_difference: int
    """The largest difference of any request in any tier, in tokens."""

    @property
    def agrees(self) -> bool:
        """Whether both agree within TOLERANCE in each tier."""
        return all(abs(self.replayed[tier] - found) <= TOLERANCE * found for tier, found in self.measured.items())

    def to_dict(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "measured_hit_tokens": self.measured,
            "replayed_hit_tokens": self.replayed,
            "largest_difference": self.largest_difference,
            "agrees": self.agrees,
        }


def replay_act(trace: Path, requests: Sequence[RequestResult]) -> Agreement | None:
    """Replays ``trace``, whose last requests are ``requests``, and compares these.

    Returns None for a model with several KV cache groups, because the lab supports only one. Raises DemoError if the
    trace cannot be replayed or has fewer requests.
    """
    try:
        recorded = read_trace(trace)
        if recorded.info["groups"] != 1:
            return None
        # The pool holds everything, so nothing is read from disk.
        names = "policy", "pool_blocks", "device_blocks", "host_contents"
        policy, pool, device, contents = (str(recorded.info[name]) for name in names)
        config = ReplayConfig(policy, int(pool), int(device), host_contents=HostContents(contents))
        result = replay(recorded, config)
    except KVOffloadError as error:
        raise DemoError(f"the trace of the second act cannot be replayed: {error}") from error
    warm_up = recorded.num_requests - len(requests)
    if warm_up < 0:
        raise DemoError(f"{trace}: only {recorded.num_requests} of {len(requests)} requests were recorded")
    measured = {
        "device": np.array([request.device_tokens for request in requests]),
        "host": np.array([request.host_tokens + request.disk_tokens for request in requests]),
    }
    replayed = {"device": result.device_tokens[warm_up:], "host": result.host_tokens[warm_up:]}
    return Agreement(
        requests=len(requests),
        measured={tier: int(measured[tier].sum()) for tier in TIERS},
        replayed={tier: int(replayed[tier].sum()) for tier in TIERS},
        largest_difference=max(int(np.abs(measured[tier] - replayed[tier]).max()) for tier in TIERS),
    )

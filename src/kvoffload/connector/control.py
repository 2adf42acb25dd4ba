"""What a client may ask for its own request."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

PARAM = "kvoffload"
"""The key under which ``kv_transfer_params`` holds a request's wishes."""


@dataclass(frozen=True, slots=True)
class RequestControl:
    """``kv_transfer_params["kvoffload"]``, a mapping with any of ``store``, ``load`` and ``max_tokens``, and
    ``kv_transfer_params["do_remote_decode"]``."""

    store: bool = True
    """Whether its KV may be stored."""
    load: bool = True
    """Whether stored KV may be loaded for it."""
    max_tokens: int | None = None
    """Only so many of its first tokens are stored and loaded."""
    remote_decode: bool = False
    """Whether a decoder elsewhere reads its KV when it is done."""

    @classmethod
    def from_params(cls, params: object) -> RequestControl:
        """Reads what a client sent: anything may be in it. What makes no sense is left out, with a debug line."""
        if not isinstance(params, Mapping):
            return DEFAULT
        wishes = params.get(PARAM)
        if wishes is None and not params.get("do_remote_decode"):
            return DEFAULT
        known: dict[str, Any] = {"remote_decode": bool(params.get("do_remote_decode"))}
        for name, value in wishes.items() if isinstance(wishes, Mapping) else ():
            if (name in ("store", "load") and isinstance(value, bool)) or (
                name == "max_tokens" and type(value) is int and value >= 0
            ):
                known[name] = value
            else:
                logger.debug("kvoffload: a request asks for %r=%r, which says nothing; it is left out", name, value)
        return cls(**known)


DEFAULT = RequestControl()

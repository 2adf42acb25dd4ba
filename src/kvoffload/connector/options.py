"""Request options: what a client may ask for its own request."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

PARAM = "kvoffload"
"""The key under which ``kv_transfer_params`` holds a request's options."""
MAX_TENANT_CHARS = 128


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """``kv_transfer_params["kvoffload"]``, a mapping with any of ``store``, ``load``, ``max_tokens`` and ``tenant``,
    and ``kv_transfer_params["do_remote_decode"]``."""

    store: bool = True
    """Whether its KV may be stored."""
    load: bool = True
    """Whether stored KV may be loaded for it."""
    max_tokens: int | None = None
    """The number of its first tokens that may be stored and loaded; None: all."""
    tenant: str | None = None
    """Whose request it is; None: its ``cache_salt`` may say."""
    remote_decode: bool = False
    """Whether a decoder elsewhere reads its KV when it is done."""

    @classmethod
    def from_params(cls, params: object) -> RequestOptions:
        """Reads what a client sent, which may be anything. Options that are unknown or invalid are left out, with a
        debug line."""
        if not isinstance(params, Mapping):
            return DEFAULT
        options = params.get(PARAM)
        if options is None and not params.get("do_remote_decode"):
            return DEFAULT
        known: dict[str, Any] = {"remote_decode": bool(params.get("do_remote_decode"))}
        for name, value in options.items() if isinstance(options, Mapping) else ():
            if (
                (name in ("store", "load") and isinstance(value, bool))
                or (name == "max_tokens" and type(value) is int and value >= 0)
                or (name == "tenant" and _is_tenant(value))
            ):
                known[name] = value
            else:
                logger.debug(
                    "kvoffload: a request has the option %r=%r, which is not valid; it is left out", name, value
                )
        return cls(**known)


def _is_tenant(value: object) -> bool:
    return type(value) is str and 0 < len(value) <= MAX_TENANT_CHARS and value.isprintable()


DEFAULT = RequestOptions()

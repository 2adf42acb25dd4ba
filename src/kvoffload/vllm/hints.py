"""What vLLM itself knows about a request's session, and hints that an orchestrator has attached to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvoffload.connector.options import PARAM

MAX_ACTIONS = 64
"""Actions of a request that are looked at."""


def engine_options(request: Any) -> Mapping[str, object]:
    """Returns request options: the ``session`` that vLLM names, and the payloads of the actions of type PARAM in its
    ``kv_hints``, of which the last one counts most. Versions before 0.32 have neither. Values are not checked."""
    options: dict[str, object] = {}
    session = getattr(request, "session_id", None)
    if session is not None:
        options["session"] = session
    actions = getattr(getattr(request, "kv_hints", None), "actions", None)
    for action in actions[:MAX_ACTIONS] if isinstance(actions, list) else ():
        payload = getattr(action, "payload", None)
        if getattr(action, "action_type", None) == PARAM and isinstance(payload, Mapping):
            options |= payload
    return options

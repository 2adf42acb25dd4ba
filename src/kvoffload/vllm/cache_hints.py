"""CacheHints: an ASGI middleware that turns the cache options of OpenAI's and Anthropic's clients into request options.

``vllm serve MODEL --middleware kvoffload.vllm.cache_hints.CacheHints``. vLLM drops these fields before they reach a
connector.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from kvoffload.connector.options import MAX_SESSION_CHARS, PARAM

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
"""Larger bodies pass unchanged."""
MAX_MARKS = 4096
"""Parts of a prompt that are looked at for marks, the last ones."""
SECONDS = {"5m": 300, "30m": 1800, "1h": 3600, "24h": 86_400}
"""Times that clients may name."""
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
"""Ends of the paths whose bodies are read."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class CacheHints:
    """Adds to ``kv_transfer_params.kvoffload`` of a request what it does not say there itself: ``session``, from
    ``prompt_cache_key``, and ``retain_s``, from ``prompt_cache_retention`` ("24h"), from ``prompt_cache_options.ttl``,
    or the longest ``ttl`` of Anthropic's ``cache_control`` marks (5 minutes without one).

    A mark retains the whole prompt, not only what is before it. What is no JSON object, is encoded, or has more than
    MAX_BODY_BYTES, passes unchanged, as do the answers.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        is_request = scope.get("type") == "http" and scope.get("method") == "POST"
        if not is_request or not str(scope.get("path", "")).endswith(PATHS) or not _is_plain(scope):
            await self._app(scope, receive, send)
            return
        messages, body = [], bytearray()
        while True:
            message = await receive()
            messages.append(message)
            if message.get("type") != "http.request":
                break
            body += message.get("body", b"")
            if not message.get("more_body") or len(body) > MAX_BODY_BYTES:
                break
        changed = None
        if messages[-1].get("type") == "http.request" and len(body) <= MAX_BODY_BYTES:
            changed = rewritten(bytes(body))
        if changed is not None:
            messages = [{"type": "http.request", "body": changed, "more_body": False}]
            others = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
            scope = {**scope, "headers": [*others, (b"content-length", str(len(changed)).encode())]}
        queue = iter(messages)

        async def replay() -> Message:
            return next(queue, None) or await receive()

        await self._app(scope, replay, send)


def _is_plain(scope: Message) -> bool:
    return all(name.lower() != b"content-encoding" for name, _ in scope.get("headers", ()))


def rewritten(body: bytes) -> bytes | None:
    """Returns the JSON of a request with the options that its fields stand for; None if there is nothing to change."""
    try:
        request = json.loads(body)
        options = cache_options(request) if isinstance(request, dict) else {}
        if not options:
            return None
        params = request.get("kv_transfer_params") or {}
        own = params.get(PARAM) or {}
        if all(name in own for name in options):
            return None
        request["kv_transfer_params"] = {**params, PARAM: {**options, **own}}
        return json.dumps(request).encode()
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        logger.debug("kvoffload: the cache options of a request are left out (%s)", error)
        return None


def cache_options(request: dict[str, Any]) -> dict[str, Any]:
    """Returns request options for the fields of a request: any of ``session`` and ``retain_s``."""
    options: dict[str, Any] = {}
    key = request.get("prompt_cache_key")
    if isinstance(key, str) and 0 < len(key) <= MAX_SESSION_CHARS:
        options["session"] = key
    named = request.get("prompt_cache_options")
    times = [
        request.get("prompt_cache_retention"),
        named.get("ttl") if isinstance(named, dict) else None,
        *(mark.get("ttl", "5m") for mark in _marks(request) if mark.get("type") == "ephemeral"),
    ]
    seconds = [SECONDS[each] for each in times if isinstance(each, str) and each in SECONDS]
    if seconds:
        options["retain_s"] = max(seconds)
    return options


def _marks(request: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Returns the ``cache_control`` marks of a prompt: of the request, its tools, system prompt and messages."""
    parts: list[Any] = [request]
    for name in ("tools", "system", "messages"):
        of_name = request.get(name)
        for part in of_name[-MAX_MARKS:] if isinstance(of_name, list) else ():
            content = part.get("content") if isinstance(part, dict) else None
            parts += [part, *(content[-MAX_MARKS:] if isinstance(content, list) else ())]
    marks = (part.get("cache_control") for part in parts[:1] + parts[-MAX_MARKS:] if isinstance(part, dict))
    return [mark for mark in marks if isinstance(mark, dict)]

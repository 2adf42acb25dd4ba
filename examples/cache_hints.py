"""CacheHints: an ASGI middleware that turns the cache options of OpenAI's and Anthropic's clients into request options.

``PYTHONPATH=FOLDER vllm serve MODEL --middleware cache_hints.CacheHints``, where FOLDER has a copy of this file. vLLM
drops these fields before they reach a connector.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from itertools import islice
from typing import Any

import msgspec
from msgspec import Raw

from kvoffload.connector.options import MAX_SESSION_CHARS, PARAM

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 << 20
MAX_COMMAS = 1 << 18
"""Bodies with more bytes or commas pass unchanged: each item of a list takes memory, and time of the event loop."""
MAX_VALUE_BYTES = 1 << 12
"""Longer values of the fields count as not sent."""
MAX_MARKS = 4096
"""Parts of a prompt that are looked at for marks, the last ones."""
SECONDS = {"5m": 300, "30m": 1800, "1h": 3600, "24h": 86_400}
"""Times that clients may name."""
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
"""Ends of the paths whose bodies are read."""
MARK = "cache_control"
FIELDS = ("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", MARK)
"""Fields of clients that stand for request options."""

_Object = Mapping[str, Raw]
"""A JSON object whose values have not been parsed."""
_NULL = Raw(b"null")
_OBJECT = msgspec.json.Decoder(dict[str, Raw] | None)
_LIST = msgspec.json.Decoder(list[Raw])

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class CacheHints:
    """Adds to ``kv_transfer_params.kvoffload`` of a request what it does not say there itself: ``session``, from
    ``prompt_cache_key``, and ``retain_s``, from ``prompt_cache_retention`` ("24h"), from ``prompt_cache_options.ttl``,
    or the longest ``ttl`` of Anthropic's ``cache_control`` marks (5 minutes without one).

    A mark retains the whole prompt, not only what is before it. What is no JSON object in UTF-8, is encoded, or has
    more than MAX_BODY_BYTES or MAX_COMMAS, passes unchanged, as do the answers. Nothing but the fields is parsed,
    because that holds the server's event loop, on a thread too: all other values are copied as they are.
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
            others = [(name, value) for name, value in scope.get("headers", ()) if name.lower() != b"content-length"]
            scope = {**scope, "headers": [*others, (b"content-length", str(len(changed)).encode())]}
        queue = iter(messages)

        async def replay() -> Message:
            return next(queue, None) or await receive()

        await self._app(scope, replay, send)


def _is_plain(scope: Message) -> bool:
    return all(name.lower() != b"content-encoding" for name, _ in scope.get("headers", ()))


def rewritten(body: bytes) -> bytes | None:
    """Returns the JSON of a request with the options that its fields stand for; None if there is nothing to change."""
    if not any(name.encode() in body for name in FIELDS) or body.count(b",") > MAX_COMMAS:
        return None
    try:
        request = _read_object(body)
        options = cache_options(request)
        if not options:
            return None
        params = _read_object(request.get("kv_transfer_params", _NULL))
        own = _read_object(params.get(PARAM, _NULL))
        if all(name in own for name in options):
            return None
        changed: bytes = msgspec.json.encode({**request, "kv_transfer_params": {**params, PARAM: {**options, **own}}})
        return changed
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        logger.debug("kvoffload: the cache options of a request are left out (%s)", error)
        return None


def _read_object(text: bytes | Raw) -> _Object:
    """Returns a JSON object, an empty one for null. Raises MsgspecError if the text is neither."""
    return _OBJECT.decode(text) or {}


def cache_options(request: _Object) -> dict[str, Any]:
    """Returns request options for the fields of a request: any of ``session`` and ``retain_s``."""
    options: dict[str, Any] = {}
    key = _value(request, "prompt_cache_key")
    if isinstance(key, str) and 0 < len(key) <= MAX_SESSION_CHARS:
        options["session"] = key
    named = _value(request, "prompt_cache_options")
    times = [
        _value(request, "prompt_cache_retention"),
        named.get("ttl") if isinstance(named, dict) else None,
        *(mark.get("ttl", "5m") for mark in _marks(request) if mark.get("type") == "ephemeral"),
    ]
    seconds = [SECONDS[each] for each in times if isinstance(each, str) and each in SECONDS]
    if seconds:
        options["retain_s"] = max(seconds)
    return options


def _value(of: _Object, name: str) -> Any:
    raw = of.get(name)
    return None if raw is None or len(bytes(raw)) > MAX_VALUE_BYTES else msgspec.json.decode(raw)


def _marks(request: _Object) -> Iterable[dict[str, Any]]:
    """Returns the ``cache_control`` marks of a prompt: of the request, its tools, system prompt and messages."""
    marks = (_value(part, MARK) for part in islice(_parts(request), 1 + MAX_MARKS))
    return [mark for mark in marks if isinstance(mark, dict)]


def _parts(request: _Object) -> Iterator[_Object]:
    """Yields the request and the parts of its prompt, the last ones first."""
    yield request
    for name in ("messages", "system", "tools"):
        for part in _items(request, name):
            yield part
            yield from _items(part, "content")


def _items(of: _Object, name: str) -> Iterator[_Object]:
    """Yields the items of a list, the last one first: empty ones in place of those without marks, which are not
    read."""
    raw = bytes(of.get(name, b""))
    if raw.startswith(b"[") and MARK.encode() in raw:
        for item in reversed(_LIST.decode(raw)):
            text = bytes(item)
            yield _read_object(text) if text.startswith(b"{") and MARK.encode() in text else {}

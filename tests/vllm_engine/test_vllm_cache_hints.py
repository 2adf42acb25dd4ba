"""CacheHints: what clients of OpenAI and Anthropic say of the cache reaches a connector, and nothing else changes."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from typing import Any

import pytest

from examples.cache_hints import MAX_BODY_BYTES, MAX_COMMAS, MAX_MARKS, CacheHints, rewritten
from kvoffload.connector.options import RequestOptions

pytestmark = pytest.mark.vllm
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
MARK = {"type": "ephemeral"}


def options_of(request: dict[str, Any]) -> dict[str, Any] | None:
    changed = rewritten(json.dumps(request).encode())
    return None if changed is None else json.loads(changed)["kv_transfer_params"]["kvoffload"]


def text(**others: Any) -> dict[str, Any]:
    return {"type": "text", "text": "x", **others}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt_cache_key": "agent-7"}, {"session": "agent-7"}),
        ({"prompt_cache_retention": "24h"}, {"retain_s": 86_400}),
        ({"prompt_cache_options": {"ttl": "30m"}}, {"retain_s": 1800}),
        ({"cache_control": MARK}, {"retain_s": 300}),
        ({"system": [text(cache_control={**MARK, "ttl": "1h"})]}, {"retain_s": 3600}),
        ({"tools": [{"name": "t", "cache_control": MARK}]}, {"retain_s": 300}),
        (
            {"messages": [{"role": "user", "content": [text(cache_control=MARK), text()]}], "prompt_cache_key": "k"},
            {"retain_s": 300, "session": "k"},
        ),
        (
            {"prompt_cache_key": "k", "kv_transfer_params": {"a": 1, "kvoffload": {"session": "mine", "drop": True}}},
            None,
        ),
        (
            {"prompt_cache_retention": "24h", "kv_transfer_params": {"kvoffload": {"session": "mine"}}},
            {"session": "mine", "retain_s": 86_400},
        ),
        ({}, None),
        ({"prompt_cache_key": "", "prompt_cache_retention": "in_memory", "cache_control": "always"}, None),
        ({"prompt_cache_key": 7, "prompt_cache_options": [], "messages": "x", "system": None}, None),
        ({"cache_control": {"type": "ephemeral", "ttl": "9999h"}}, None),
        ({"prompt_cache_key": "k", "kv_transfer_params": "nonsense"}, None),
    ],
)
def test_fields_become_options(fields: dict[str, Any], expected: dict[str, Any] | None) -> None:
    assert options_of({**ASK, **fields}) == expected


def test_vllm_passes_the_options_on_in_each_api() -> None:
    body = {**ASK, "prompt_cache_key": "agent-7", "prompt_cache_retention": "24h"}
    changed = json.loads(rewritten(json.dumps(body).encode()) or b"")
    chat = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol").ChatCompletionRequest(**changed)
    params = chat.to_sampling_params(8, {}).extra_args["kv_transfer_params"]
    found = RequestOptions.from_params(params)
    assert (found.session, found.retain_s, found.ignored) == ("agent-7", 86_400, ())
    protocol = pytest.importorskip("vllm.entrypoints.anthropic.protocol")
    body = {**ASK, "max_tokens": 8, "system": [text(cache_control=MARK)]}
    anthropic = protocol.AnthropicMessagesRequest(**json.loads(rewritten(json.dumps(body).encode()) or b""))
    assert anthropic.kv_transfer_params == {"kvoffload": {"retain_s": 300}}


@pytest.mark.parametrize(
    "value",
    [
        '"\\u00e9 \u00e9 \\ud83d\\ude00"',
        "1.50",
        "1e400",
        "9" * 5000,
        "[" * 900 + "]" * 900,
        '{"prompt_cache_key": null,\n "c" : [ "cache_control" ]}',
    ],
)
def test_other_values_are_copied_as_they_are(value: str) -> None:
    body = f'{{"prompt_cache_key": "k", "x": {value}, "kv_transfer_params": {{"y": {value}}}}}'.encode()
    changed = rewritten(body) or b""
    assert changed.count(value.encode()) == 2
    assert b'{"session":"k"}' in changed
    assert len(changed) < len(body) + 50


def test_only_the_last_parts_are_looked_at_for_marks() -> None:
    marked, parts = text(cache_control=MARK), [text()] * MAX_MARKS
    assert options_of({**ASK, "messages": [{"content": [marked, *parts[:-2], marked]}]}) == {"retain_s": 300}
    assert options_of({**ASK, "messages": [{"content": [marked, *parts]}]}) is None


def test_the_memory_of_a_body_is_bounded() -> None:
    def peak(items: int) -> tuple[int, bytes | None]:
        body = b'{"prompt_cache_key": "k", "messages": ["cache_control"' + b",1" * items + b"]}"
        tracemalloc.start()
        try:
            changed = rewritten(body)
            return tracemalloc.get_traced_memory()[1], changed
        finally:
            tracemalloc.stop()

    most, changed = peak(MAX_COMMAS - 1)
    assert changed is not None
    assert most < 64 << 20
    least, unchanged = peak(MAX_BODY_BYTES // 2 - 40)
    assert unchanged is None
    assert least < 1 << 20


def serve(
    chunks: list[bytes], path: str = "/v1/chat/completions", headers: Any = ()
) -> tuple[bytes, dict[bytes, bytes]]:
    """Returns the body and the headers that the application behind the middleware gets."""
    got: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body"):
                break
        got.update(body=body, headers=dict(scope["headers"]))

    pieces = [{"type": "http.request", "body": c, "more_body": i < len(chunks) - 1} for i, c in enumerate(chunks)]
    queue = iter([*pieces, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(queue)

    async def send(message: Any) -> None:
        pass

    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path}
    if headers is not None:
        scope["headers"] = [(b"content-length", b"1"), *headers]
    asyncio.run(CacheHints(app)(scope, receive, send))
    return got["body"], got["headers"]


BODY = json.dumps({**ASK, "prompt_cache_key": "k"}).encode()


def test_a_body_in_pieces_is_rewritten_with_its_length() -> None:
    body, headers = serve([BODY[:10], BODY[10:]])
    assert json.loads(body)["kv_transfer_params"] == {"kvoffload": {"session": "k"}}
    assert headers[b"content-length"] == str(len(body)).encode()


def test_a_request_without_headers_is_rewritten_too() -> None:
    body, headers = serve([BODY], headers=None)
    assert headers == {b"content-length": str(len(body)).encode()}


@pytest.mark.parametrize(
    ("chunks", "path", "headers"),
    [
        ([BODY], "/v1/models", ()),
        ([BODY], "/v1/completions", [(b"content-encoding", b"gzip")]),
        ([b"{", b"no json"], "/v1/completions", ()),
        ([b"[" * 100_000], "/v1/completions", ()),
        ([b'{"prompt_cache_key": "k", "a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"], "/v1/completions", ()),
        ([b'{"prompt_cache_key": "\\ud800"}'], "/v1/completions", ()),
        ([b'{"prompt_cache_key": "k", "a": "\\ud800"}'], "/v1/completions", ()),
        ([b'{"prompt_cache_key": "k", "\xff": 1}'], "/v1/completions", ()),
        ([b'{"prompt_cache_key": "k"} {}'], "/v1/completions", ()),
        ([json.dumps({**ASK, "prompt_cache_key": "k"}).encode("utf-16")], "/v1/completions", ()),
        ([b"\xff\xfe"], "/v1/completions", ()),
        ([BODY[:-1], b" " * MAX_BODY_BYTES, b"}"], "/v1/completions", ()),
        ([b""], "/v1/completions", ()),
    ],
)
def test_everything_else_passes_unchanged(chunks: list[bytes], path: str, headers: Any) -> None:
    body, got = serve(chunks, path, headers)
    assert body == b"".join(chunks)
    assert got[b"content-length"] == b"1"

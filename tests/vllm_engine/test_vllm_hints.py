"""What the adapter reads of vLLM's own fields about a request's session."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.lazy import lazily

kv_hints, hints_module = lazily("vllm.v1.kv_hints"), lazily("kvoffload.vllm.hints")

pytestmark = pytest.mark.vllm


def envelope(*actions: tuple[str, dict[str, Any]]) -> Any:
    made = [kv_hints.KvHintAction(f"a{i}", kind, "1", payload) for i, (kind, payload) in enumerate(actions)]
    return kv_hints.KvHintsEnvelope("1", "m", made)


def request(**fields: Any) -> Any:
    return SimpleNamespace(**{"skip_reading_prefix_cache": False, "resumable": False, **fields})


def test_the_session_and_the_payload_of_actions_are_read() -> None:
    hints = envelope(("kvoffload", {"drop": True}), ("prefetch", {"drop": False}), ("kvoffload", {"session": "s"}))
    assert hints_module.engine_options(request(session_id="of vLLM", kv_hints=hints)) == {"session": "s", "drop": True}
    assert hints_module.engine_options(request(session_id="of vLLM", kv_hints=None)) == {"session": "of vLLM"}


@pytest.mark.parametrize("hints", [None, 7, "kvoffload", SimpleNamespace(actions={}), SimpleNamespace(actions=[7])])
def test_anything_else_is_no_option(hints: Any) -> None:
    assert hints_module.engine_options(request(session_id=None, kv_hints=hints)) == {}


def test_few_actions_are_looked_at() -> None:
    hints = envelope(*[("other", {})] * hints_module.MAX_ACTIONS, ("kvoffload", {"drop": True}))
    assert hints_module.engine_options(request(session_id=None, kv_hints=hints)) == {}


def test_vllm_still_has_these_fields() -> None:
    names = lazily("vllm.v1.request").Request.__init__.__annotations__
    assert {"session_id", "kv_hints", "resumable"} <= names.keys()


def test_a_request_that_vllms_own_cache_does_not_serve_may_not_load() -> None:
    """Whatever an orchestrator says."""
    hints = envelope(("kvoffload", {"load": True}))
    assert hints_module.engine_options(request(skip_reading_prefix_cache=True, kv_hints=hints)) == {"load": False}


@pytest.mark.parametrize(
    ("version", "is_streamed", "drops"), [("0.31.2", True, True), ("0.31.2", False, False), ("0.32.0", True, False)]
)
def test_sessions_drop_tokens_where_names_do_not_last(
    version: str, is_streamed: bool, drops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    assert hints_module.drops_tokens(request(resumable=is_streamed)) is drops

"""What the adapter reads of vLLM's own fields about a request's session."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

# Not "vllm": a directory of that name on sys.path could be imported instead.
pytest.importorskip("vllm.version")

from kvoffload.vllm.hints import MAX_ACTIONS, engine_options

pytestmark = pytest.mark.vllm


def envelope(*actions: tuple[str, dict[str, Any]]) -> Any:
    kv_hints = pytest.importorskip("vllm.v1.kv_hints", reason="vLLM 0.32 is the first with hints")
    made = [kv_hints.KvHintAction(f"a{i}", kind, "1", payload) for i, (kind, payload) in enumerate(actions)]
    return kv_hints.KvHintsEnvelope("1", "m", made)


def request(**fields: Any) -> Any:
    return SimpleNamespace(**{"skip_reading_prefix_cache": False, **fields})


def test_the_session_and_the_payload_of_actions_are_read() -> None:
    hints = envelope(("kvoffload", {"drop": True}), ("prefetch", {"drop": False}), ("kvoffload", {"session": "s"}))
    assert engine_options(request(session_id="of vLLM", kv_hints=hints)) == {"session": "s", "drop": True}
    assert engine_options(request(session_id="of vLLM", kv_hints=None)) == {"session": "of vLLM"}


@pytest.mark.parametrize("kv_hints", [None, 7, "kvoffload", SimpleNamespace(actions={}), SimpleNamespace(actions=[7])])
def test_anything_else_is_no_option(kv_hints: Any) -> None:
    assert engine_options(request(session_id=None, kv_hints=kv_hints)) == {}
    assert engine_options(request()) == {}, "as before vLLM 0.32"


def test_few_actions_are_looked_at() -> None:
    hints = envelope(*[("other", {})] * MAX_ACTIONS, ("kvoffload", {"drop": True}))
    assert engine_options(request(session_id=None, kv_hints=hints)) == {}


def test_vllm_still_has_these_fields() -> None:
    request = pytest.importorskip("vllm.v1.request")
    pytest.importorskip("vllm.v1.kv_hints", reason="vLLM 0.32 is the first with hints")
    names = request.Request.__init__.__annotations__
    assert {"session_id", "kv_hints"} <= names.keys()


def test_a_request_that_vllms_own_cache_does_not_serve_may_not_load() -> None:
    """Whatever an orchestrator says."""
    hints = envelope(("kvoffload", {"load": True}))
    assert engine_options(request(skip_reading_prefix_cache=True, kv_hints=hints)) == {"load": False}

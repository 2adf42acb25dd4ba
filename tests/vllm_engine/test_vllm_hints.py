"""What the adapter reads of vLLM's own fields about a request's session."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

# Not "vllm": a directory of that name on sys.path could be imported instead.
pytest.importorskip("vllm.version")

from vllm.v1 import kv_hints
from vllm.v1.request import Request

from kvoffload.vllm import hints as hints_module
from kvoffload.vllm.hints import MAX_ACTIONS, StreamedSessions, engine_options

pytestmark = pytest.mark.vllm


def envelope(*actions: tuple[str, dict[str, Any]]) -> Any:
    made = [kv_hints.KvHintAction(f"a{i}", kind, "1", payload) for i, (kind, payload) in enumerate(actions)]
    return kv_hints.KvHintsEnvelope("1", "m", made)


def request(**fields: Any) -> Any:
    return SimpleNamespace(**{"skip_reading_prefix_cache": False, "resumable": False, **fields})


def test_the_session_and_the_payload_of_actions_are_read() -> None:
    hints = envelope(("kvoffload", {"drop": True}), ("prefetch", {"drop": False}), ("kvoffload", {"session": "s"}))
    assert engine_options(request(session_id="of vLLM", kv_hints=hints)) == {"session": "s", "drop": True}
    assert engine_options(request(session_id="of vLLM", kv_hints=None)) == {"session": "of vLLM"}


@pytest.mark.parametrize("hints", [None, 7, "kvoffload", SimpleNamespace(actions={}), SimpleNamespace(actions=[7])])
def test_anything_else_is_no_option(hints: Any) -> None:
    assert engine_options(request(session_id=None, kv_hints=hints)) == {}


def test_few_actions_are_looked_at() -> None:
    hints = envelope(*[("other", {})] * MAX_ACTIONS, ("kvoffload", {"drop": True}))
    assert engine_options(request(session_id=None, kv_hints=hints)) == {}


def test_vllm_still_has_these_fields() -> None:
    names = Request.__init__.__annotations__
    assert {"session_id", "kv_hints", "resumable"} <= names.keys()


def test_a_request_that_vllms_own_cache_does_not_serve_may_not_load() -> None:
    """Whatever an orchestrator says."""
    hints = envelope(("kvoffload", {"load": True}))
    assert engine_options(request(skip_reading_prefix_cache=True, kv_hints=hints)) == {"load": False}


@pytest.mark.parametrize(
    ("said", "most"), [({}, 40), ({"max_tokens": 9}, 9), ({"max_tokens": 99}, 40), ({"max_tokens": -1}, 40)]
)
@pytest.mark.parametrize(("version", "is_limited"), [("0.31.2", True), ("0.32.0", False)])
def test_only_the_first_input_of_a_session_where_names_do_not_last(
    said: dict[str, int], most: int, version: str, is_limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.__version__", version)
    monkeypatch.setattr(hints_module, "_streamed", StreamedSessions())
    hints = envelope(("kvoffload", said))
    streamed = request(resumable=True, num_prompt_tokens=40, block_hashes=[b"a", b"b"], kv_hints=hints)
    assert engine_options(streamed) == ({"max_tokens": most} if is_limited else said)
    streamed.block_hashes += [b"of a dropped token", b"behind it"]

    def plain(*hashes: bytes) -> Mapping[str, object]:
        return engine_options(request(num_prompt_tokens=90, block_hashes=list(hashes), kv_hints=hints))

    assert plain(b"a", b"b", b"of a dropped token", b"d") == ({"max_tokens": most} if is_limited else said)
    assert plain(b"a", b"b", b"c", b"d") == plain(b"a") == said

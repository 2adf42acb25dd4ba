"""The example of a router: its choice between servers from their KV events alone. test_vllm_serve.py has events of real
engines."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

ROUTER = Path(__file__).parents[2] / "examples" / "router.py"


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("router", ROUTER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXAMPLE = load_example()


def stored(first: int, last: int, medium: str, **place: str) -> dict[str, Any]:
    """An event of blocks ``first`` to ``last`` of the prompt 0, 1, 2, ... in blocks of 16 tokens."""
    return {
        "type": "BlockStored",
        "block_hashes": list(range(first, last)),
        "parent_block_hash": first - 1 if first else None,
        "token_ids": list(range(first * 16, last * 16)),
        "block_size": 16,
        "medium": medium,
        **place,
    }


def removed(*names: int, medium: str, **place: str) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": medium, **place}


LOCAL, REMOTE = {"locality": "LOCAL", "ownership": "disk"}, {"locality": "REMOTE", "ownership": "shared_dir"}
PROMPT = list(range(70))


def test_the_longest_prefix_wins_and_faster_media_count_more() -> None:
    index = EXAMPLE.Index(["a", "b"])
    index.take("a", stored(0, 4, "CPU"))
    index.take("b", stored(0, 4, "GPU"))
    scores = index.scores(PROMPT)
    assert scores["b"] > scores["a"] > 0
    index.take("b", removed(1, medium="GPU"))
    scores = index.scores(PROMPT)
    assert scores["a"] > scores["b"] > 0, "what is behind a hole cannot be used"
    assert index.scores([7, *PROMPT]) == {"a": 0, "b": 0}


def test_a_block_in_several_media_counts_as_in_the_fastest() -> None:
    index = EXAMPLE.Index(["a", "b"])
    index.take("a", stored(0, 2, "CPU"))
    expected = index.scores(PROMPT)["a"]
    index.take("a", stored(0, 2, "STORAGE", **LOCAL))
    assert index.scores(PROMPT)["a"] == expected
    index.take("a", removed(0, 1, medium="CPU"))
    assert 0 < index.scores(PROMPT)["a"] < expected
    index.take("a", removed(0, 1, medium="STORAGE", **LOCAL))
    assert index.scores(PROMPT)["a"] == 0


def test_every_server_reads_a_shared_tier_but_only_one_its_disk() -> None:
    index = EXAMPLE.Index(["a", "b"])
    index.take("a", stored(0, 2, "STORAGE", **REMOTE))
    shared = index.scores(PROMPT)
    assert shared["a"] == shared["b"] > 0
    index.take("a", stored(0, 2, "STORAGE", **LOCAL))
    scores = index.scores(PROMPT)
    assert scores["a"] > scores["b"] == shared["b"]
    index.take("b", removed(0, 1, medium="STORAGE", **REMOTE))
    assert index.scores(PROMPT)["b"] == 0


def test_a_block_named_by_its_hash_only_is_found_if_its_tokens_are_known() -> None:
    index = EXAMPLE.Index(["a", "b"])
    index.take("a", stored(0, 2, "CPU"))
    nothing = {"token_ids": [], "block_size": 0, "parent_block_hash": None}
    index.take("b", stored(0, 2, "STORAGE", **LOCAL) | nothing)
    assert index.scores(PROMPT)["b"] > 0


def test_a_server_whose_events_were_lost_is_forgotten() -> None:
    index = EXAMPLE.Index(["a", "b"])
    index.take("a", stored(0, 2, "CPU"))
    index.forget("a")
    assert index.scores(PROMPT) == {"a": 0, "b": 0}

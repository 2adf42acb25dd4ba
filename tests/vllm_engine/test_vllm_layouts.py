"""How vLLM lays its KV cache out in memory, and the layout that kvoffload asks for."""

from __future__ import annotations

from typing import Any

import pytest

# Not "vllm": a directory of that name on sys.path could be imported instead.
pytest.importorskip("vllm.version")
from vllm_harness import POOL, Runner, assert_at_rest, differences, with_gemma3

pytestmark = pytest.mark.vllm


def test_outputs_are_identical_with_blocks_in_one_piece(run: Runner, gemma3_expected: list[Any]) -> None:
    result = run(
        "rounds", rounds=3, slow=1, **with_gemma3(connector=POOL), connector_class="BlocksFirstKVOffloadConnector"
    )
    assert "Using BLHNC KV cache layout" in result.log
    assert "KV cache layout BLHNC: a device block is one piece of memory" in result.log
    for got in result["outputs"]:
        assert differences(got, gemma3_expected) == []
    assert_at_rest(result.result)
    assert min(result["loaded_blocks"]) > 0, "hits in both groups"

"""Retention in vLLM: what a client has retained survives floods, and nothing outlives its time. In ``make soak``."""

from __future__ import annotations

import pytest
from driver import BLOCK_SIZE
from vllm_harness import Runner

pytestmark = [pytest.mark.vllm, pytest.mark.soak]

BLOCK_BYTES = 2 * 2 * BLOCK_SIZE * 64 * 4
"""Two layers with keys and values of 64 floats per token."""
SESSIONS = 4


@pytest.mark.parametrize("contents", ["exclusive", "inclusive"])
@pytest.mark.parametrize("seconds", [3600, 0])
def test_retained_prefixes_survive_floods(run: Runner, contents: str, seconds: int) -> None:
    """The control: nothing survives that is not retained."""
    connector = {
        "host_bytes": 64 * BLOCK_BYTES,
        "host_contents": contents,
        "tenants": {"other": {"retain": {"host": SESSIONS * 8 * BLOCK_BYTES}}},
    }
    result = run("retained", connector=connector, seconds=seconds, sessions=SESSIONS, rounds=3, floods=6)
    assert (result["wrong"], result["kept"]) == (0, 0)
    assert set(result["found"]) == {result["expected"] * BLOCK_SIZE if seconds else 0}

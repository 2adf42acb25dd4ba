"""A storm on vLLM's own offloading with kvoffload's disk tier below it: outputs do not change, and every request and
job ends, while bytes in the tier's files change. ``KVOFFLOAD_TEST_SCALE=34`` makes 2,000 requests of each storm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_vllm_doors import SMALL, SPEC, disk, with_tier
from vllm_harness import Run, Runner, with_gemma3, wrong_of_storm

from tests.scale import scaled

pytestmark = [pytest.mark.vllm, pytest.mark.soak, pytest.mark.timeout(7200)]

REQUESTS = scaled(60)
PROMPTS, MAX_TOKENS = 16, 36
SIZES = {"prompts": PROMPTS, "max_tokens": MAX_TOKENS, "seed": 0, "requests": REQUESTS}
BYTES = 2 << 20
"""Less than the prompts have together, so that blocks are evicted."""


def storm(run: Runner, folder: Path, **config: Any) -> Run:
    config = {
        "offloading": with_tier(SMALL, tier=disk(folder) | {"bytes": BYTES}),
        "patches": ["little staging"],
    } | config
    result = run("storm", folder=str(folder), **{"arrivals": 0.5, "flips": 0.01, **SIZES, **config})
    assert result["left"] == 0
    assert len(result["answers"]) + result["aborted"] == REQUESTS
    assert result["free_device_blocks"] == result["usable_device_blocks"]
    return result


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_storm(run: Runner, tmp_path: Path, kind: str) -> None:
    """With windows, caches of the connector are not reset: vLLM then stores the chunks of running requests anew, from
    device blocks that windows have left and other requests have by now."""
    config = {} if kind == "llama" else with_gemma3(**SIZES, keeps_connector=True)
    result = storm(run, tmp_path / "disk", **config)
    assert wrong_of_storm(result, run.right(kind, PROMPTS, MAX_TOKENS)) == []
    assert (result["jobs"], result["requests"], result["off"]) == ([0], [0], [False])
    (metrics,) = result["metrics"]
    assert metrics["tier_hit_tokens:disk"] > 0
    assert metrics["tier_evicted_blocks:disk"] > 0
    assert metrics["tier_used_bytes:disk"] <= BYTES
    assert kind == "llama" or result["preemptions"] > 0


@pytest.mark.parametrize("tier", ["ours", "fs"])
def test_a_tier_that_does_not_verify_is_noticed(run: Runner, tmp_path: Path, tier: str) -> None:
    """The control: the same storm with the comparison of checksums taken out, and with vLLM's fs tier."""
    config: dict[str, Any] = {"flips": 0.5, "keeps_connector": True, "patches": ["little staging", "unverified"]}
    if tier == "fs":
        entry = {"type": "fs", "root_dir": str(tmp_path / "files")}
        config["offloading"] = SPEC | {"cpu_bytes_to_use": SMALL, "secondary_tiers": [entry]}
    assert wrong_of_storm(storm(run, tmp_path / "files", **config), run.right("llama", PROMPTS, MAX_TOKENS))

"""A storm on vLLM's own offloading with kvoffload's disk tier below it: outputs do not change, the disk never takes
more than its budget, every request and job ends, and nothing is left of the tier after the engine's end.

``KVOFFLOAD_TEST_SCALE=34`` makes 2,000 requests of each storm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_harness import Run, Runner, with_gemma3, wrong_of_storm

from tests.scale import scaled

pytestmark = [pytest.mark.vllm, pytest.mark.soak]

REQUESTS = scaled(60)
ROUND = 500
"""Requests of one server. The next one goes on with its files."""
PROMPTS = 16
MAX_TOKENS = 36
HOST_BYTES = 1 << 20
"""32 chunks of the Llama: less than three prompts."""
DISK_BYTES = 2 << 20
"""Less than the prompts have together, so that blocks are evicted."""
WINDOWS: dict[str, Any] = with_gemma3(prompts=PROMPTS, max_tokens=MAX_TOKENS)
OURS: dict[str, Any] = {"type": "KVOffloadTier", "module_path": "kvoffload.vllm.secondary_tier"}


def offloading(tier: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Returns the options of vLLM's own offloading with one tier below host memory."""
    return {
        "spec_name": "HostTieringSpec",
        "spec_module_path": "kvoffload.vllm.host_spec",
        "cpu_bytes_to_use": HOST_BYTES,
        "secondary_tiers": [tier],
        **options,
    }


def disk(folder: Path, **fields: Any) -> dict[str, Any]:
    return OURS | {"tier": {"kind": "disk", "dir": str(folder), "bytes": DISK_BYTES}} | fields


def storms(
    run: Runner, tier: dict[str, Any], folder: Path, requests: int = REQUESTS, resets: float = 0.004, **config: Any
) -> list[Run]:
    """Runs storms one after the other on the same folder. Each has at most ROUND requests."""
    folder.mkdir(mode=0o700, exist_ok=True)
    config = {"prompts": PROMPTS, "max_tokens": MAX_TOKENS, "resets": resets} | config
    results = []
    for seed, first in enumerate(range(0, requests, ROUND)):
        settings: dict[str, Any] = {"seed": seed, "requests": min(ROUND, requests - first), "folder": str(folder)}
        settings |= {"patches": ["little staging"]} | config
        results.append(run("tier_storm", offloading=offloading(tier), **settings))
        check_ends(results[-1], settings["requests"])
    return results


def own(result: Run) -> dict[str, float]:
    """Returns the metrics of kvoffload's tier by name, without labels."""
    prefix = "kvoffload:"
    return {
        name.removeprefix(prefix).partition(":")[0].removesuffix("_total"): value
        for name, value in result["prometheus"].items()
        if name.startswith(prefix) and "_created" not in name
    }


def wrong(results: list[Run], expected: list[Any]) -> list[int]:
    return [index for result in results for index in wrong_of_storm(result, expected)]


@pytest.fixture(scope="session")
def windows(run: Runner) -> list[Any]:
    """The right answers of the model with windows."""
    return run.right("gemma3", PROMPTS, MAX_TOKENS)


@pytest.fixture(scope="session")
def answers(run: Runner) -> list[Any]:
    """The right answers of the Llama."""
    return run.right("llama", PROMPTS, MAX_TOKENS)


def check_ends(result: Run, requests: int) -> None:
    """Every request and job has ended, nothing is pinned, and nothing is left after the end."""
    counts, jobs = result["counts"], result["jobs"]
    assert result["left"] == 0
    assert counts["arrived"] == requests == len(result["answers"]) + counts.get("aborted", 0)
    assert (result["unfinished_jobs"], result["managers_jobs"], result["managers_requests"]) == (0, 0, 0)
    assert result["host_free"] == result["host_chunks"]
    assert result["free_device_blocks"] == result["usable_device_blocks"]
    assert result["maps_left"] == []
    assert result["threads_left"] == []
    for trouble in ("BufferError", "Failed to close", "Failed to shut down", "ARE OFF", "IS OFF"):
        assert trouble not in result.log, result.log[-6000:]
    assert jobs["loads:done"] > 0
    # vLLM's own counts of what the tier has read are those of the jobs that it has reported.
    read = sum(
        value
        for name, value in result["prometheus"].items()
        if name.startswith("vllm:kv_offload_tiering_read_bytes_total")
    )
    assert read == jobs["loads:done"] * result["chunk_bytes"]


def check_disk(results: list[Run]) -> None:
    """The disk's budget held at every moment, blocks were evicted and found again, and its counts add up."""
    assert 0 < max(result["most_taken"] for result in results) <= DISK_BYTES
    assert min(result["samples"] for result in results) > 50
    for result in results:
        counts = own(result)
        assert counts.get("off", 0) == counts["tier_off"] == 0
        assert counts["tier_used_bytes"] <= counts["tier_capacity_bytes"] <= DISK_BYTES
        assert counts["tier_write_bytes"] == counts["tier_write_blocks"] * result["chunk_bytes"]
        assert counts["tier_read_bytes"] == counts["promoted_blocks"] * result["chunk_bytes"] > 0


@pytest.mark.timeout(7200)
def test_a_storm(run: Runner, answers: list[Any], tmp_path: Path) -> None:
    results = storms(run, disk(tmp_path / "disk"), tmp_path / "disk", flips=0.01)
    check_disk(results)
    assert wrong(results, answers) == []


@pytest.mark.timeout(7200)
def test_a_storm_with_windows(run: Runner, windows: list[Any], tmp_path: Path) -> None:
    """Caches of the connector are not reset: vLLM then stores the chunks of running requests anew, from device blocks
    that windows have left and other requests have by now."""
    config = WINDOWS | {"flips": 0.01, "kinds": ["reset_device"]}
    results = storms(run, disk(tmp_path / "disk"), tmp_path / "disk", **config)
    check_disk(results)
    assert wrong(results, windows) == []
    assert sum(result["preemptions"] for result in results) > 0


def test_a_tier_that_does_not_verify_is_noticed(run: Runner, answers: list[Any], tmp_path: Path) -> None:
    """The control: the same storm with the comparison of checksums taken out."""
    config: dict[str, Any] = {"flips": 0.2, "resets": 0.001, "patches": ["little staging", "unverified"]}
    assert wrong(storms(run, disk(tmp_path / "disk"), tmp_path / "disk", **config), answers)


@pytest.mark.timeout(7200)
def test_vllms_own_tier_does_not_verify(run: Runner, answers: list[Any], tmp_path: Path) -> None:
    """The control without any code of the tier: vLLM's fs tier."""
    tier = {"type": "fs", "root_dir": str(tmp_path / "fs")}
    assert wrong(storms(run, tier, tmp_path / "fs", flips=0.2), answers)

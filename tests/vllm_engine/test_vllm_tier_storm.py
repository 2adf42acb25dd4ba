"""A storm on vLLM's own offloading with kvoffload's disk tier below it: outputs do not change, the disk never takes
more than its budget, every request and job ends, and nothing is left of the tier after the engine's end.

``KVOFFLOAD_TEST_SCALE=34`` makes 2,000 requests of each storm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

# Not "vllm": a directory of that name on sys.path could be imported instead.
pytest.importorskip("vllm.version")
from test_vllm_ranks import PARALLEL, TWO_RANKS
from vllm_harness import TOLERANCE, Run, Runner, differences_beyond_ties, with_gemma3

from kvoffload.testing.scale import SCALE, scaled

pytestmark = pytest.mark.vllm

REQUESTS = scaled(60)
PROMPTS = 16
MAX_TOKENS = 36
HOST_BYTES = 1 << 20
"""32 chunks of the Llama: less than three prompts."""
DISK_BYTES = 2 << 20
"""Less than the prompts have together, so that blocks are evicted."""
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


def storm(run: Runner, tier: dict[str, Any], folder: Path, requests: int = REQUESTS, **config: Any) -> Run:
    folder.mkdir(mode=0o700, exist_ok=True)
    settings = {"seed": 5, "prompts": PROMPTS, "max_tokens": MAX_TOKENS, "resets": 0.004} | config
    return run("tier_storm", offloading=offloading(tier), folder=str(folder), requests=requests, **settings)


def wrong(result: Run, expected: list[Any]) -> list[int]:
    """Returns the prompts whose answers are not the beginning of the expected ones, up to ties."""
    found = []
    for index, (tokens, logprobs) in result["answers"]:
        right = [each[: len(tokens)] for each in expected[index]]
        if differences_beyond_ties([[tokens, logprobs]], [right], TOLERANCE):
            found.append(index)
    return found


@pytest.fixture(scope="session")
def answers(run: Runner) -> list[Any]:
    """The answers of the Llama without offloading."""
    settings = {"prompts": PROMPTS, "max_tokens": MAX_TOKENS, "rounds": 1}
    return list(run.once("tier-storm", "rounds", **settings)["outputs"][0])


def check_ends(result: Run, requests: int = REQUESTS) -> None:
    """Every request and job has ended, nothing is pinned, and nothing is left after the end."""
    counts, jobs = result["counts"], result["jobs"]
    assert result["left"] == 0
    assert counts["arrived"] == requests == len(result["answers"]) + counts.get("aborted", 0)
    assert counts["aborted"] > 0
    assert result["preemptions"] > 0
    assert (result["unfinished_jobs"], result["managers_jobs"], result["managers_requests"]) == (0, 0, 0)
    assert result["host_free"] == result["host_chunks"]
    assert result["free_device_blocks"] == result["usable_device_blocks"]
    assert result["maps_left"] == []
    for trouble in ("BufferError", "Failed to close", "Failed to shut down", "Error in", "kvoffload is off"):
        assert trouble not in result.log, result.log[-6000:]
    assert jobs["loads:done"] > 0
    # vLLM's own counts of what the tier has read and written are those of the jobs that it has reported.
    read, written = (
        sum(value for name, value in result["prometheus"].items() if name.startswith(f"vllm:kv_offload_tiering_{what}"))
        for what in ("read_bytes_total", "write_bytes_total")
    )
    assert read == jobs["loads:done"] * result["chunk_bytes"]
    successful = jobs["stores:done"] if not jobs.get("stores:failed") else None
    assert successful is None or written == successful * result["chunk_bytes"]


def test_a_storm(run: Runner, answers: list[Any], tmp_path: Path) -> None:
    result = storm(run, disk(tmp_path / "disk"), tmp_path / "disk", flips=0.01)
    check_ends(result)
    assert wrong(result, answers) == []
    assert result["samples"] > 100
    assert 0 < result["most_taken"] <= DISK_BYTES
    assert [name for name in result["threads_left"] if "kvoffload" in name] == []


@pytest.mark.skipif(SCALE <= 1, reason="what the shorter storm proves too; set KVOFFLOAD_TEST_SCALE above 1")
@pytest.mark.timeout(7200)
def test_a_storm_with_windows(run: Runner, tmp_path: Path) -> None:
    settings = with_gemma3(prompts=PROMPTS, max_tokens=MAX_TOKENS)
    expected = run("rounds", rounds=1, **settings)["outputs"][0]
    result = storm(run, disk(tmp_path / "disk"), tmp_path / "disk", flips=0.01, **settings)
    check_ends(result)
    assert wrong(result, expected) == []
    assert 0 < result["most_taken"] <= DISK_BYTES


@pytest.mark.skipif(SCALE <= 1, reason="steps on two ranks take three times as long")
@pytest.mark.timeout(7200)
def test_a_storm_on_two_ranks(run: Runner, answers: list[Any], tmp_path: Path) -> None:
    requests = REQUESTS // 5
    config: dict[str, Any] = {"environment": TWO_RANKS, "engine": PARALLEL["tensor"], "flips": 0.01}
    result = storm(run, disk(tmp_path / "disk"), tmp_path / "disk", requests, **config)
    check_ends(result, requests)
    assert wrong(result, answers) == []
    assert 0 < result["most_taken"] <= DISK_BYTES


def test_a_tier_that_does_not_verify_is_noticed(run: Runner, answers: list[Any], tmp_path: Path) -> None:
    """The control: the same storm with the comparison of checksums taken out."""
    result = storm(run, disk(tmp_path / "disk"), tmp_path / "disk", flips=0.2, resets=0.001, unverified=True)
    check_ends(result)
    assert wrong(result, answers)


@pytest.mark.skipif(SCALE <= 1, reason="one more engine; set KVOFFLOAD_TEST_SCALE above 1")
def test_vllms_own_tier_does_not_verify(run: Runner, answers: list[Any], tmp_path: Path) -> None:
    """The control without any code of the tier: vLLM's fs tier."""
    tier = {"type": "fs", "root_dir": str(tmp_path / "fs")}
    result = storm(run, tier, tmp_path / "fs", flips=0.2)
    check_ends(result)
    assert wrong(result, answers)

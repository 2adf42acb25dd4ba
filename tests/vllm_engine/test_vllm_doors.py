"""vLLM's own offloading with KVOffloadTier below its host memory, and with the worker that copies on a CPU."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

# Not "vllm": a directory of that name on sys.path could be imported instead.
pytest.importorskip("vllm.version")
from driver import BLOCK_SIZE, make_prompts
from test_vllm_disk import corrupt
from test_vllm_ranks import PARALLEL, TWO_RANKS
from test_vllm_versions import OVERLAYS
from vllm_harness import DEADLINE_S, GEMMA3, Run, Runner, differences, with_lfm2

from kvoffload.testing.scale import SCALE

pytestmark = pytest.mark.vllm

SPEC = {"spec_name": "HostTieringSpec", "spec_module_path": "kvoffload.vllm.host_spec"}
LARGE, SMALL = 64 << 20, 1 << 20
"""Sizes of vLLM's host memory: one has room for all prompts, and the other for less than two of them."""


def with_tier(host_bytes: int = LARGE, **tier: Any) -> dict[str, Any]:
    """Returns options of vLLM's OffloadingConnector. Requests wait for the tier, however slow this machine is."""
    patient = {"load_deadline_ms": 1000 * DEADLINE_S, "lookup_deadline_ms": 1000 * DEADLINE_S}
    entry = {"type": "KVOffloadTier", "module_path": "kvoffload.vllm.secondary_tier", **patient, **tier}
    return SPEC | {"cpu_bytes_to_use": host_bytes, "secondary_tiers": [entry]}


def disk(directory: Path) -> dict[str, Any]:
    return {"kind": "disk", "dir": str(directory), "bytes": "32MiB"}


def check(run: Run, expected: list[Any]) -> None:
    """Checks all answers, and that nothing is left."""
    for answers in run["outputs"]:
        assert differences(answers, expected) == []
    assert (run["off"], run["jobs"], run["requests"]) == ([False], [0], [0])
    assert run["free_device_blocks"] == run["usable_device_blocks"]


def tier_tokens(run: Run) -> int:
    return sum(record["disk_tokens"] for record in run["records"])


@pytest.fixture(scope="module")
def left(run: Runner, expected: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which a server has left the blocks of all prompts."""
    directory = tmp_path_factory.mktemp("doors") / "left"
    result = run("offloading", rounds=1, offloading=with_tier(tier=disk(directory)))
    check(result, expected)
    assert tier_tokens(result) == 0
    assert result["metrics"][0]["tier_write_blocks:disk"] > 0
    return directory


@pytest.fixture
def copied(left: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(left, tmp_path / "copied"))


def test_a_restarted_server_finds_its_chunks_on_disk(run: Runner, expected: list[Any], copied: Path) -> None:
    result = run("offloading", rounds=2, offloading=with_tier(tier=disk(copied)))
    check(result, expected)
    assert "kvoffload: tiers below vLLM's host memory" in result.log
    (metrics,) = result["metrics"]
    names = {record["req_id"] for record in result["records"]}
    assert tier_tokens(result) == metrics["tier_hit_tokens:disk"] > sum(map(len, make_prompts())) / 2
    assert metrics.get("tier_bad_blocks:disk", 0) == 0
    assert len(names) == len(result["records"]) >= len(expected)
    samples = result["prometheus"]
    assert samples["kvoffload:tier_hit_tokens_total:disk"] == metrics["tier_hit_tokens:disk"]
    assert samples["vllm:kv_offload_tiering_read_bytes_total:1:KVOffloadTier"] > 0


def test_corrupted_bytes_are_misses(run: Runner, expected: list[Any], copied: Path) -> None:
    corrupt(copied)
    result = run("offloading", rounds=1, offloading=with_tier(tier=disk(copied)))
    check(result, expected)
    assert tier_tokens(result) == 0
    assert result["metrics"][0]["tier_bad_blocks:disk"] > 0
    assert "corrupt" in {record["reason"] for record in result["records"]}


def test_the_same_bytes_in_the_tier_of_vllm_change_outputs(run: Runner, expected: list[Any], tmp_path: Path) -> None:
    """The control: without it the comparisons here would prove nothing."""
    options = SPEC | {"cpu_bytes_to_use": LARGE, "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path)}]}
    result = run("offloading", rounds=1, offloading=options)
    assert differences(result["outputs"][0], expected) == []
    files = list(tmp_path.rglob("*.bin"))
    assert files
    for path in files:
        np.memmap(path, np.uint8, "r+")[3::64] ^= 0x80
    result = run("offloading", rounds=1, offloading=options)
    assert len(differences(result["outputs"][0], expected)) > len(expected) / 2


def test_weights_that_were_replaced_find_nothing(
    run: Runner, expected: list[Any], copied: Path, tmp_path: Path
) -> None:
    config = {"rounds": 1, "model": str(tmp_path / "model"), "new_rows": 128}
    result = run("offloading", offloading=with_tier(tier=disk(copied)), **config)
    assert tier_tokens(result) == 0
    # Every prompt has some of the changed tokens.
    assert len(differences(result["outputs"][0], expected)) == len(expected)
    assert result["metrics"][0]["tier_write_blocks:disk"] > 0


def test_a_reset_forgets_what_was_stored(run: Runner, expected: list[Any], copied: Path) -> None:
    """vLLM resets its caches when weights are updated, and does not say whether they were."""
    options = with_tier(tier=disk(copied))
    result = run("offloading", rounds=2, reset=True, offloading=options)
    check(result, expected)
    before, after = result["records"][: len(expected)], result["records"][len(expected) :]
    assert sum(record["disk_tokens"] for record in before) > 0
    assert sum(record["disk_tokens"] for record in after) == 0
    assert "kvoffload: the cache was reset" in result.log


WINDOWS: dict[str, Any] = GEMMA3 | {"prompts": 6, "max_tokens": 24}
STATES: dict[str, Any] = with_lfm2(prompts=6, max_tokens=24)


@pytest.mark.parametrize("model", [WINDOWS, STATES], ids=["windows", "states"])
def test_several_groups(run: Runner, tmp_path: Path, model: dict[str, Any]) -> None:
    (expected,) = run("rounds", rounds=1, **model)["outputs"]
    for _ in range(2):
        result = run("offloading", rounds=1, offloading=with_tier(SMALL, tier=disk(tmp_path / "disk")), **model)
        check(result, expected)
    assert tier_tokens(result) > sum(map(len, make_prompts(6))) / 2


def test_servers_of_one_and_of_two_ranks_share_blocks(run: Runner, expected: list[Any], tmp_path: Path) -> None:
    """With vLLM's canonical layout. Without it, each finds its own only."""
    # Other variables of vLLM count as other software.
    binding = "VLLM_CPU_OMP_THREADS_BIND"
    parallel = {"environment": {binding: TWO_RANKS[binding]}, "engine": PARALLEL["tensor"]}
    canonical = with_tier(tier=disk(tmp_path / "disk")) | {"canonical_layout": True}
    found = {}
    for name, config in {"two": parallel, "one": {}, "two again": parallel}.items():
        result = run("offloading", rounds=1, prompts=4, offloading=canonical, **config)
        check(result, expected[:4])
        found[name] = tier_tokens(result)
    assert found["two"] == 0
    assert found["one"] == found["two again"] > 0
    direct = with_tier(tier=disk(tmp_path / "disk"))
    result = run("offloading", rounds=1, prompts=4, offloading=direct)
    check(result, expected[:4])
    assert tier_tokens(result) == 0


@pytest.mark.parametrize("version", [name for name in OVERLAYS if name >= "0.31"])
def test_other_versions(run: Runner, version: str, tmp_path: Path) -> None:
    paths = [str(OVERLAYS[version]), *filter(None, [os.environ.get("PYTHONPATH")])]
    overlaid = {"environment": {"PYTHONPATH": os.pathsep.join(paths), "VLLM_USE_V2_MODEL_RUNNER": "0"}}
    (expected,) = run("rounds", rounds=1, prompts=6, **overlaid)["outputs"]
    result = run("offloading", prompts=6, offloading=with_tier(SMALL, tier=disk(tmp_path / "disk")), **overlaid)
    assert result["vllm"].startswith(version)
    check(result, expected)
    assert tier_tokens(result) > 0
    assert "kvoffload is tested with" not in result.log

"""The disk tier in ``make soak``: what test_vllm_outputs.py leaves out. No content of a disk causes wrong answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_harness import (
    PARALLEL,
    TWO_RANKS,
    Runner,
    assert_at_rest,
    assert_counted,
    check,
    corrupt,
    differences,
    disk_tokens,
    found,
    with_disk,
    wrong_of_storm,
)

pytestmark = [pytest.mark.vllm, pytest.mark.soak]


def test_corrupted_bytes_are_misses_if_they_are_verified(run: Runner, expected: list[Any], tmp_path: Path) -> None:
    """The control: without the comparison of checksums outputs change."""
    connector = with_disk(tmp_path / "disk")
    check(run("rounds", rounds=1, close=True, connector=connector), expected)
    corrupt(tmp_path / "disk")
    wrong = run("rounds", rounds=1, connector=connector, patches=["unverified"])
    assert disk_tokens(wrong) > 0
    assert len(differences(wrong["outputs"][0], expected)) == len(expected)
    result = run("rounds", connector=connector)
    check(result, expected)
    assert disk_tokens(result) == 0
    assert_counted(result, "tier_bad_blocks:disk")
    assert "corrupt" in {record["reason"] for record in result["records"]}


def test_after_a_reset_nothing_is_found_again(run: Runner, expected: list[Any], tmp_path: Path) -> None:
    """Neither in that process nor in a later one: the weights in memory may have differed from the files."""
    connector = with_disk(tmp_path / "disk")
    check(run("rounds", rounds=1, close=True, connector=connector), expected)
    for is_first in (True, False):
        result = run("rounds", rounds=1, reset=is_first, close=True, connector=connector)
        check(result, expected)
        assert (found(result) > 0) is is_first
        assert disk_tokens(result) == 0


def test_a_storm(run: Runner, expected: list[Any], tmp_path: Path) -> None:
    """Preemptions, aborts, resets, failing copies and blocks from disk, all at once in a small pool."""
    connector = with_disk(tmp_path / "disk") | {"host_bytes": "1MiB"}
    result = run("storm", seed=2, requests=150, slow=1, failing=0.4, connector=connector)
    assert result["left"] == 0
    assert wrong_of_storm(result, expected) == []
    hits = ("tier_hit_tokens:disk", "host_hit_tokens")
    assert_counted(result, *hits, "load_failures", "store_failures", "evicted_blocks")
    assert_at_rest(result.result)


def test_two_ranks_and_a_fast_hash_with_a_seed(run: Runner, expected: list[Any], tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "prompts": 4,
        "environment": TWO_RANKS | {"PYTHONHASHSEED": "7"},
        "engine": PARALLEL["tensor"] | {"prefix_caching_hash_algo": "xxhash"},
        "connector": with_disk(tmp_path / "disk"),
    }
    check(run("rounds", rounds=1, close=True, **config), expected[:4])
    result = run("rounds", rounds=1, **config)
    check(result, expected[:4])
    assert found(result) > 0
    assert all(record["disk_tokens"] > 0 for record in result["records"])


def test_hashes_with_an_unexpected_root_switch_the_disk_tier_off(
    run: Runner, expected: list[Any], tmp_path: Path
) -> None:
    """Offloading continues, and the log says what to set."""
    result = run("rounds", connector=with_disk(tmp_path / "disk"), patches=["another root"])
    check(result, expected)
    assert disk_tokens(result) == 0
    assert result["metrics"]["host_hit_tokens"] > 0
    assert result["metrics"]["tier_off:disk"] == 1
    assert result.log.count("TIER IS OFF") == 1
    assert "set PYTHONHASHSEED=0" in result.log

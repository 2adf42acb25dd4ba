"""The disk tier: a server that starts again answers from disk, and nothing that lies there can make it answer wrong."""

from __future__ import annotations

import os
import re
import shutil
import signal
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# Not "vllm": from tests/ on sys.path this directory itself could be imported under that name.
pytest.importorskip("vllm.version")
from driver import BLOCK_SIZE, PROMPTS, make_prompts
from test_vllm_ranks import PARALLEL, TWO_RANKS
from vllm_harness import DEADLINE_S, POOL, Run, Runner, assert_at_rest, differences, eventually, kill_session

from kvoffload.tiers.disk.format import HEADER_BYTES, RECORD

pytestmark = pytest.mark.vllm

DISK_BYTES = 32 << 20
FOUND = re.compile(r"found ([\d,]+) blocks of this model there")


def with_disk(directory: Path) -> dict[str, Any]:
    """Options with which what is on disk is waited for, and loaded, however slow this machine is."""
    return POOL | {
        "disk_dir": str(directory),
        "disk_bytes": DISK_BYTES,
        "load_deadline_ms": 1000 * DEADLINE_S,
        "load_only_if_faster": False,
    }


def found(run: Run) -> int:
    """Blocks that a server found on disk when it started."""
    match = FOUND.search(run.log)
    assert match is not None, "the log does not tell of the disk tier"
    return int(match[1].replace(",", ""))


def disk_tokens(run: Run) -> int:
    return sum(record["disk_tokens"] for record in run["records"])


def check_answers(run: Run, expected: list[Any]) -> None:
    for answers in run["outputs"]:
        assert differences(answers, expected) == []
    assert_at_rest(run.result)


@pytest.fixture(scope="module")
def left(run: Runner, expected: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a server has left on disk: the whole prompts, and their answers."""
    directory = tmp_path_factory.mktemp("disk") / "of a server"
    result = run("rounds", rounds=1, close=True, connector=with_disk(directory))
    check_answers(result, expected)
    assert (found(result), disk_tokens(result)) == (0, 0)
    assert result["metrics"]["disk_write_blocks"] == result["metrics"]["store_blocks"] > 0
    return directory


@pytest.fixture
def copied(left: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(left, tmp_path / "copied"))


def test_only_the_owner_can_read_it_and_the_budget_is_held(left: Path) -> None:
    files = [path for path in left.rglob("*") if path.is_file()]
    assert files
    for path in (left, *left.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o600 if path.is_file() else 0o700)
    assert sum(512 * path.stat().st_blocks for path in files) <= DISK_BYTES


def test_a_restarted_server_answers_from_disk_until_its_weights_are_replaced(
    run: Runner, expected: list[Any], copied: Path, tmp_path: Path
) -> None:
    """The same weights under another path are the same; weights that differ in the last rows of the embedding alone,
    under the same path, are others."""
    model = str(tmp_path / "model")
    result = run("rounds", model=model, close=True, connector=with_disk(copied))
    check_answers(result, expected)
    assert found(result) > 0
    first = result["records"][:PROMPTS]
    assert first[0]["host_tokens"] == 0
    # They go on in the order in which their blocks arrive.
    first.sort(key=lambda record: record["tokens_asked"])
    for record, prompt in zip(first, sorted(make_prompts(), key=len), strict=True):
        assert record["tokens_asked"] == len(prompt)
        assert record["disk_tokens"] > 0
        tokens = record["device_tokens"] + record["host_tokens"] + record["disk_tokens"]
        assert len(prompt) // BLOCK_SIZE * BLOCK_SIZE - 1 <= tokens < len(prompt)
    samples = result["prometheus"]
    assert samples["kvoffload:disk_hit_tokens_total"] == disk_tokens(result)
    assert samples["kvoffload:disk_read_bytes_total"] == result["metrics"]["disk_read_bytes"] > 0

    # Without kvoffload: what the other weights answer. Every prompt has some of these tokens.
    alone = run("rounds", rounds=1, model=model, new_rows=128)
    (others,) = alone["outputs"]
    assert len(differences(others, expected)) == len(expected)
    result = run("rounds", rounds=1, model=model, connector=with_disk(copied))
    check_answers(result, others)
    assert (found(result), disk_tokens(result)) == (0, 0)


def spoil(directory: Path) -> None:
    """Turns the sign of one number in sixteen, in all that is there."""
    slabs = list(directory.rglob("slab-*"))
    assert slabs
    for slab in slabs:
        np.memmap(slab, np.uint8, "r+")[3::64] ^= 0x80


def test_spoiled_bytes_are_misses(run: Runner, expected: list[Any], copied: Path) -> None:
    spoil(copied)
    result = run("rounds", connector=with_disk(copied))
    check_answers(result, expected)
    assert found(result) > 0
    assert disk_tokens(result) == 0
    assert result["metrics"]["disk_bad_blocks"] > 0
    assert "corrupt" in {record["reason"] for record in result["records"]}


def test_spoiled_bytes_that_nobody_verifies_change_outputs(run: Runner, expected: list[Any], copied: Path) -> None:
    """The control without which no comparison here proves anything."""
    spoil(copied)
    result = run("rounds", rounds=1, connector=with_disk(copied), connector_class="UnverifiedKVOffloadConnector")
    assert disk_tokens(result) > 0
    assert len(differences(result["outputs"][0], expected)) == len(expected)


def test_after_a_reset_nothing_is_found_again(run: Runner, expected: list[Any], copied: Path) -> None:
    """Not in that process, and in no later one: the weights in memory may have been others than the files'."""
    result = run("rounds", rounds=1, reset=True, close=True, connector=with_disk(copied))
    check_answers(result, expected)
    assert found(result) > 0
    assert disk_tokens(result) == 0
    result = run("rounds", rounds=1, connector=with_disk(copied))
    check_answers(result, expected)
    assert (found(result), disk_tokens(result)) == (0, 0)


def test_a_storm(run: Runner, expected: list[Any], tmp_path: Path) -> None:
    """Preemptions, aborts, resets, failing copies, and blocks from disk, all at once in a pool too small for it."""
    connector = with_disk(tmp_path / "disk") | {"host_bytes": "1MiB"}
    result = run("storm", seed=2, requests=150, slow=1, failing=0.4, connector=connector)
    assert result["left"] == 0
    for index, (tokens, logprobs) in result["answers"]:
        right = [part[: len(tokens)] for part in expected[index]]
        assert differences([[tokens, logprobs]], [right]) == []
    for name in ("disk_hit_tokens", "host_hit_tokens", "load_failures", "store_failures", "evicted_blocks"):
        assert result["metrics"][name] > 0, name
    assert_at_rest(result.result)


def test_two_ranks_and_a_fast_hash_with_a_seed(run: Runner, expected: list[Any], tmp_path: Path) -> None:
    pytest.importorskip("xxhash")
    config = {
        "environment": TWO_RANKS | {"PYTHONHASHSEED": "7"},
        "engine": PARALLEL["tensor"] | {"prefix_caching_hash_algo": "xxhash"},
        "connector": with_disk(tmp_path / "disk"),
    }
    check_answers(run("rounds", rounds=1, close=True, **config), expected)
    result = run("rounds", rounds=1, **config)
    check_answers(result, expected)
    assert found(result) > 0
    assert all(record["disk_tokens"] > 0 for record in result["records"])


def test_hashes_that_begin_otherwise_than_expected_end_the_disk_tier(
    run: Runner, expected: list[Any], copied: Path
) -> None:
    """Offloading goes on, and the log says what to set."""
    result = run("rounds", connector=with_disk(copied), unexpected_root=True)
    check_answers(result, expected)
    assert disk_tokens(result) == 0
    assert result["metrics"]["host_hit_tokens"] > 0
    assert result["metrics"]["disk_off"] == 1
    assert result.log.count("TIER IS OFF") == 1
    assert "set PYTHONHASHSEED=0" in result.log


def num_records(directory: Path) -> int:
    """Blocks that the index in ``directory`` tells of, if there is one."""
    records = [np.fromfile(path, RECORD, offset=HEADER_BYTES) for path in directory.rglob("index")]
    return sum(np.count_nonzero(each["magic"]) for each in records)


def test_one_server_a_directory_even_if_it_is_killed(run: Runner, expected: list[Any], tmp_path: Path) -> None:
    """A second server is told who is there. When the first is killed while it writes, the next one starts and is
    right."""
    directory = tmp_path / "disk"
    first, result = run.start("endless", multiprocessing=True, connector=with_disk(directory))
    try:
        assert eventually(lambda: num_records(directory) > 10 or first.poll() is not None, DEADLINE_S)
        # In nobody's way until it is killed.
        os.killpg(first.pid, signal.SIGSTOP)
        assert first.poll() is None, result.with_suffix(".log").read_text()[-6000:]
        second, result = run.start("rounds", connector=with_disk(directory))
        assert second.wait(DEADLINE_S) != 0
        said = result.with_suffix(".log").read_text()
        assert f"ConfigError: disk_dir={str(directory)!r}: in use by process" in said
        assert "give each server its own directory" in said
    finally:
        kill_session(first)
    third = run("rounds", connector=with_disk(directory))
    check_answers(third, expected)
    assert found(third) > 0
    assert disk_tokens(third) > 0

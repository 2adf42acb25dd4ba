"""The disk tier: a restarted server answers from disk, and no content of the disk can cause wrong answers."""

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

# Not "vllm": a directory of that name on sys.path could be imported instead.
pytest.importorskip("vllm.version")
from driver import BLOCK_SIZE, PROMPTS, make_prompts
from test_vllm_ranks import PARALLEL, TWO_RANKS
from vllm_harness import DEADLINE_S, POOL, Run, Runner, assert_at_rest, differences, eventually

from demo.process import kill_session
from kvoffload.tiers.disk.format import HEADER_BYTES, RECORD

pytestmark = pytest.mark.vllm

DISK_BYTES = 32 << 20
FOUND = re.compile(r"found ([\d,]+) blocks of this model there")


def with_disk(directory: Path) -> dict[str, Any]:
    """Returns options with which requests wait for blocks from disk, however slow this machine is."""
    return POOL | {
        "disk_dir": str(directory),
        "disk_bytes": DISK_BYTES,
        "load_deadline_ms": 1000 * DEADLINE_S,
        "load_only_if_faster": False,
    }


def found(run: Run) -> int:
    """Returns the number of blocks that a server found on disk at start."""
    match = FOUND.search(run.log)
    assert match is not None, "the log does not mention the disk tier"
    return int(match[1].replace(",", ""))


def disk_tokens(run: Run) -> int:
    return sum(record["disk_tokens"] for record in run["records"])


def check_answers(run: Run, expected: list[Any]) -> None:
    for answers in run["outputs"]:
        assert differences(answers, expected) == []
    assert_at_rest(run.result)


@pytest.fixture(scope="module")
def left(run: Runner, expected: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which a server has left the blocks of all prompts and answers."""
    directory = tmp_path_factory.mktemp("disk") / "of a server"
    result = run("rounds", rounds=1, close=True, connector=with_disk(directory))
    check_answers(result, expected)
    assert (found(result), disk_tokens(result)) == (0, 0)
    assert result["metrics"]["tier_write_blocks:disk"] == result["metrics"]["store_blocks"] > 0
    return directory


@pytest.fixture
def copied(left: Path, tmp_path: Path) -> Path:
    """A copy of that directory."""
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
    """Equal weights under another path count as the same. Weights under the same path that differ only in the last rows
    of the embedding count as others."""
    model = str(tmp_path / "model")
    result = run("rounds", model=model, close=True, connector=with_disk(copied))
    check_answers(result, expected)
    assert found(result) > 0
    first = result["records"][:PROMPTS]
    assert first[0]["host_tokens"] == 0
    # Requests continue in the order in which their blocks arrive.
    first.sort(key=lambda record: record["tokens_asked"])
    for record, prompt in zip(first, sorted(make_prompts(), key=len), strict=True):
        assert record["tokens_asked"] == len(prompt)
        assert record["disk_tokens"] > 0
        tokens = record["device_tokens"] + record["host_tokens"] + record["disk_tokens"]
        assert len(prompt) // BLOCK_SIZE * BLOCK_SIZE - 1 <= tokens < len(prompt)
    samples = result["prometheus"]
    assert samples["kvoffload:tier_hit_tokens_total:disk"] == disk_tokens(result)
    assert samples["kvoffload:tier_read_bytes_total:disk"] == result["metrics"]["tier_read_bytes:disk"] > 0

    # The answers of the other weights without kvoffload. Every prompt has some of the changed tokens.
    alone = run("rounds", rounds=1, model=model, new_rows=128)
    (others,) = alone["outputs"]
    assert len(differences(others, expected)) == len(expected)
    result = run("rounds", rounds=1, model=model, connector=with_disk(copied))
    check_answers(result, others)
    assert (found(result), disk_tokens(result)) == (0, 0)


def corrupt(directory: Path) -> None:
    """Flips the sign of one number in sixteen, in all slabs."""
    slabs = list(directory.rglob("slab-*"))
    assert slabs
    for slab in slabs:
        np.memmap(slab, np.uint8, "r+")[3::64] ^= 0x80


def test_corrupted_bytes_are_misses(run: Runner, expected: list[Any], copied: Path) -> None:
    corrupt(copied)
    result = run("rounds", connector=with_disk(copied))
    check_answers(result, expected)
    assert found(result) > 0
    assert disk_tokens(result) == 0
    assert result["metrics"]["tier_bad_blocks:disk"] > 0
    assert "corrupt" in {record["reason"] for record in result["records"]}


def test_corrupted_bytes_that_are_not_verified_change_outputs(run: Runner, expected: list[Any], copied: Path) -> None:
    """The control: without it the comparisons here would prove nothing."""
    corrupt(copied)
    result = run("rounds", rounds=1, connector=with_disk(copied), connector_class="UnverifiedKVOffloadConnector")
    assert disk_tokens(result) > 0
    assert len(differences(result["outputs"][0], expected)) == len(expected)


@pytest.mark.soak
def test_after_a_reset_nothing_is_found_again(run: Runner, expected: list[Any], copied: Path) -> None:
    """Neither in that process nor in a later one: the weights in memory may have differed from the files."""
    result = run("rounds", rounds=1, reset=True, close=True, connector=with_disk(copied))
    check_answers(result, expected)
    assert found(result) > 0
    assert disk_tokens(result) == 0
    result = run("rounds", rounds=1, connector=with_disk(copied))
    check_answers(result, expected)
    assert (found(result), disk_tokens(result)) == (0, 0)


@pytest.mark.soak
def test_a_storm(run: Runner, expected: list[Any], tmp_path: Path) -> None:
    """Preemptions, aborts, resets, failing copies and blocks from disk, all at once in a small pool."""
    connector = with_disk(tmp_path / "disk") | {"host_bytes": "1MiB"}
    result = run("storm", seed=2, requests=150, slow=1, failing=0.4, connector=connector)
    assert result["left"] == 0
    for index, (tokens, logprobs) in result["answers"]:
        right = [part[: len(tokens)] for part in expected[index]]
        assert differences([[tokens, logprobs]], [right]) == []
    for name in ("tier_hit_tokens:disk", "host_hit_tokens", "load_failures", "store_failures", "evicted_blocks"):
        assert result["metrics"][name] > 0, name
    assert_at_rest(result.result)


@pytest.mark.soak
def test_two_ranks_and_a_fast_hash_with_a_seed(run: Runner, expected: list[Any], tmp_path: Path) -> None:
    pytest.importorskip("xxhash")
    config = {
        "prompts": 4,
        "environment": TWO_RANKS | {"PYTHONHASHSEED": "7"},
        "engine": PARALLEL["tensor"] | {"prefix_caching_hash_algo": "xxhash"},
        "connector": with_disk(tmp_path / "disk"),
    }
    check_answers(run("rounds", rounds=1, close=True, **config), expected[:4])
    result = run("rounds", rounds=1, **config)
    check_answers(result, expected[:4])
    assert found(result) > 0
    assert all(record["disk_tokens"] > 0 for record in result["records"])


@pytest.mark.soak
def test_hashes_with_an_unexpected_root_switch_the_disk_tier_off(
    run: Runner, expected: list[Any], copied: Path
) -> None:
    """Offloading continues, and the log says what to set."""
    result = run("rounds", connector=with_disk(copied), unexpected_root=True)
    check_answers(result, expected)
    assert disk_tokens(result) == 0
    assert result["metrics"]["host_hit_tokens"] > 0
    assert result["metrics"]["tier_off:disk"] == 1
    assert result.log.count("TIER IS OFF") == 1
    assert "set PYTHONHASHSEED=0" in result.log


def num_records(directory: Path) -> int:
    """Returns the number of blocks in the index in ``directory``, 0 if there is none."""
    records = [np.fromfile(path, RECORD, offset=HEADER_BYTES) for path in directory.rglob("index")]
    return sum(int(np.count_nonzero(each["magic"])) for each in records)


@pytest.mark.soak
def test_a_directory_serves_one_server_at_a_time(run: Runner, expected: list[Any], tmp_path: Path) -> None:
    """A second server is refused. After the first is killed while it writes, the next one starts and answers
    correctly."""
    directory = tmp_path / "disk"
    first, result = run.start("endless", multiprocessing=True, connector=with_disk(directory))
    try:
        assert eventually(lambda: num_records(directory) > 10 or first.poll() is not None, DEADLINE_S)
        # It uses no CPU time until it is killed.
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


@pytest.mark.soak
def test_what_waits_in_the_queue_is_read_from_disk_before_its_turn(
    run: Runner, expected: list[Any], copied: Path
) -> None:
    result = run("queued", connector=with_disk(copied), engine={"max_num_seqs": 1})
    check_answers(result, expected)
    read, used = (result["metrics"][f"prefetched_{what}"] for what in ("blocks", "used_blocks"))
    assert read >= used > 0
    assert sum(record["host_tokens"] for record in result["records"][1:]) >= used * BLOCK_SIZE // 2

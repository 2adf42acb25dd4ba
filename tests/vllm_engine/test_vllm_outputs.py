"""Offloading changes when KV is computed, but never the outputs. The right answers are those of ``transformers``.

The rows of docs/support.md's table: full attention; chunked prefill, preemption and asynchronous scheduling; the
canonical layout; tensor parallelism; the disk tier after ``kill -9``, with damaged files, on two ranks.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from driver import BLOCK_SIZE
from serve_harness import memory_files, named_segments
from vllm_harness import (
    DEADLINE_S,
    DISK_BYTES,
    FEW,
    HAS_CUDA,
    PARALLEL,
    POOL,
    TOLERANCE,
    TWO_RANKS,
    Run,
    Runner,
    assert_at_rest,
    assert_counted,
    check,
    corrupt,
    differences,
    differences_beyond_ties,
    disk_tokens,
    eventually,
    found,
    with_disk,
    wrong_of_storm,
)

from demo.process import kill_session, session_pids
from kvoffload.lab.readers import read_trace

pytestmark = pytest.mark.vllm

BFLOAT16_TOLERANCE = 0.1
NOT_STORED = {"kv_transfer_params": {"kvoffload": {"store": False}}}
ACTS: dict[str, dict[str, Any]] = {
    "service": {},
    # A reset of the connector would end the use of the disk.
    "storm": {"slow": 3, "seed": 2, "requests": 40, "keeps_connector": True},
    "rounds, failing": {"failing": 0.7, "forget": True, "rounds": 3},
    # What is corrupted must not get to the disk.
    "rounds, corrupted": {"corrupt": "all", "forget": True, "rounds": 1, "extra_args": NOT_STORED},
    "endless": {},
}
"""What one engine plays until it is killed. Each act is as hard as the configuration of the engine: steps are shorter
than prompts, requests preempt each other, and the scheduler is a step ahead."""


@dataclass(frozen=True)
class Killed:
    """What an engine has answered before it was killed with SIGKILL, and its disk."""

    acts: dict[str, Run]
    disk: Path
    trace: Path
    pools: list[os.stat_result]
    """Its host pools, while it ran."""
    named: set[Path]
    """The files in /dev/shm that it had mapped."""


@pytest.fixture(scope="module")
def killed(run: Runner, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    directory = tmp_path_factory.mktemp("killed")
    disk, trace, said = directory / "disk", directory / "trace.jsonl", directory / "said"
    child, result = run.start(
        {**ACTS, "endless": {"said": str(said)}},
        connector=with_disk(disk) | {"canonical_layout": True, "record_trace": str(trace)},
        environment=TWO_RANKS,
        events=True,
        force_async=True,
        plugin=True,
        engine={"max_num_batched_tokens": 96},
    )
    log = result.with_suffix(".log")
    try:
        assert eventually(lambda: (said.exists() and said.read_text()) or child.poll() is not None, DEADLINE_S)
        assert child.poll() is None, log.read_text()[-6000:]
        processes = [Path(f"/proc/{pid}") for pid in session_pids(child.pid)]
        pools = [os.stat(each) for process in processes for each in (process / "fd").iterdir() if _is_pool(each)]
        named = set().union(*map(named_segments, processes))
        os.kill(child.pid, signal.SIGKILL)
        assert eventually(lambda: not any(memory_files(process) for process in processes))
    finally:
        kill_session(child)
    text = log.read_text(errors="replace")
    results = json.loads(result.read_text())
    return Killed({name: Run(each, text) for name, each in results.items()}, disk, trace, pools, named)


def _is_pool(descriptor: Path) -> bool:
    try:
        return "memfd:kvoffload" in os.readlink(descriptor)
    except OSError:
        return False


class TestOneRank:
    """Rows "full attention", "chunked prefill, preemption, asynchronous scheduling" and "canonical_layout"."""

    def test_outputs_are_identical(self, killed: Killed, expected: list[Any]) -> None:
        service = killed.acts["service"]
        check(service, expected)
        assert service["preemptions"] > 0
        assert_counted(service, "host_hit_tokens", "load_bytes", "tier_write_blocks:disk")
        assert killed.acts["rounds, failing"]["async_scheduling"]
        assert "canonical_layout has no effect" not in service.log
        assert "kvoffload: KV cache layout" in service.log

    def test_failing_copies_are_misses(self, killed: Killed, expected: list[Any]) -> None:
        result = killed.acts["rounds, failing"]
        check(result, expected)
        assert_counted(result, "load_failures", "load_blocks")

    def test_corrupted_bytes_change_outputs(self, killed: Killed, expected: list[Any]) -> None:
        """The control: without it the comparisons here would prove nothing. Everything that is loaded is corrupted."""
        result = killed.acts["rounds, corrupted"]
        assert len(differences(result["outputs"][0], expected)) == len(expected)

    def test_aborts_leave_nothing_and_other_answers_are_identical(self, killed: Killed, expected: list[Any]) -> None:
        result = killed.acts["storm"]
        assert (result["left"], len(result["answers"]) + result["aborted"]) == (0, 40)
        assert result["aborted"] > 0
        assert wrong_of_storm(result, expected) == []
        assert_at_rest(result.result)

    def test_events_name_blocks_as_the_engine_does(self, killed: Killed) -> None:
        """What became loadable, with the names that blocks have on the device, and where."""
        service, kinds = killed.acts["service"], dict[str, Counter[str]]()
        for kind, medium, *hashes in service["events"]:
            assert kind == "BlockStored" or medium == "GPU"
            if kind == "BlockStored":
                kinds.setdefault(medium, Counter()).update(hashes)
        assert sum(kinds["CPU"].values()) == service["metrics"]["store_blocks"] > 0
        assert sum(kinds["STORAGE"].values()) == service["metrics"]["tier_write_blocks:disk"] > 0
        assert kinds["STORAGE"].keys() <= kinds["CPU"].keys() <= kinds["GPU"].keys()

    def test_failed_loads_are_recomputed_with_the_default_of_vllm(self, killed: Killed) -> None:
        """By default vLLM fails the request."""
        service = killed.acts["service"]
        assert service["policy"] == "recompute"
        assert service["recomputes_failed_loads"] is True

    def test_the_recorded_trace_has_one_line_per_request(self, killed: Killed) -> None:
        trace, records = read_trace(killed.trace), killed.acts["service"]["records"]
        assert trace.num_requests > len(records) == 20
        asked = sorted(record["tokens_asked"] for record in records)
        assert not Counter(asked) - Counter(trace.input_tokens.tolist())
        assert trace.block_tokens == BLOCK_SIZE
        assert (trace.prompt_blocks < np.diff(trace.offsets)).any(), "blocks of outputs"


class TestKilled:
    """Rows "disk tier" and "canonical_layout": what a killed server leaves, and what the next one finds."""

    def test_it_leaves_no_memory_and_its_disk_holds_the_budget(self, killed: Killed) -> None:
        assert killed.pools
        for pool in killed.pools:
            assert pool.st_nlink == 0, "the pool has a name on disk"
        assert not [path for path in killed.named if path.exists()]
        files = [path for path in killed.disk.rglob("*") if path.is_file()]
        for path in (killed.disk, *killed.disk.rglob("*")):
            assert stat.S_IMODE(path.stat().st_mode) == (0o600 if path.is_file() else 0o700)
        assert 0 < sum(512 * path.stat().st_blocks for path in files) <= DISK_BYTES

    @pytest.mark.skipif(HAS_CUDA, reason="two ranks need two devices")
    def test_two_ranks_answer_from_its_disk_a_part_of_which_is_damaged(
        self, run: Runner, expected: list[Any], killed: Killed, tmp_path: Path
    ) -> None:
        """Each rank takes its heads. Their copies end, or fail, at other times. Row "tensor parallelism", too."""
        directory = Path(shutil.copytree(killed.disk, tmp_path / "copied"))
        corrupt(directory, stripe=1 << 18)
        result = run(
            "rounds",
            rounds=3,
            prompts=FEW,
            connector=with_disk(directory) | {"canonical_layout": True},
            connector_class="SlowKVOffloadConnector",
            environment=TWO_RANKS,
            engine={"max_num_batched_tokens": 96, **PARALLEL["tensor"]},
        )
        for answers in result["outputs"]:
            assert differences_beyond_ties(answers, expected[:FEW], TOLERANCE) == []
        assert_at_rest(result.result)
        assert found(result) > 0
        assert disk_tokens(result) > 0
        assert_counted(result, "tier_bad_blocks:disk", "host_hit_tokens", "load_failures", "store_failures")
        assert " on 2 ranks = " in result.log or " in 1 pool for 2 ranks = " in result.log


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_with_cuda_graphs_outputs_are_identical(run: Runner, layout: str) -> None:
    """In bfloat16, as served: blocks are gathered in one layout and copied directly in the other."""
    config: dict[str, Any] = {
        "engine": {"dtype": "bfloat16", "enforce_eager": False},
        "environment": {"VLLM_KV_CACHE_LAYOUT": layout},
        "force_async": True,
    }
    right = run("rounds", rounds=1, **config)["outputs"][0]
    result = run("rounds", connector=POOL, **config)
    for answers in result["outputs"]:
        assert differences_beyond_ties(answers, right, BFLOAT16_TOLERANCE) == []
    assert result["metrics"]["load_bytes"] > 0
    assert_at_rest(result.result)

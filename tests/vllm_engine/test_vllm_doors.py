"""vLLM's own offloading with KVOffloadTier below its host memory, whose chunks AutoCachePolicy evicts, and with the
worker that copies on a CPU: the second and third column of docs/engines.md."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from driver import make_prompts
from test_vllm_versions import OVERLAYS, in_front
from vllm_harness import DEADLINE_S, GEMMA3, PARALLEL, TWO_RANKS, Run, Runner, differences, with_lfm2

from kvoffload.abc import KVGroup
from kvoffload.cache.keys import make_offload_key

pytestmark = pytest.mark.vllm

SPEC = {"spec_name": "HostTieringSpec", "spec_module_path": "kvoffload.vllm.host_spec"}
AUTO = {"eviction_policy": "AutoCachePolicy", "cache_policy_module_path": "kvoffload.vllm.cache_policy"}
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
    for state in run["states"]:
        assert (state["jobs"], state["requests"]) == ([0], [0]) or state["off"] == [True]
        assert state["free_device_blocks"] == state["usable_device_blocks"]
    assert run["threads"] == []
    # vLLM releases its host memory, so no view of it is left.
    assert "Removed mmap file" in run.log
    assert "BufferError" not in run.log
    assert "AutoCachePolicy failed" not in run.log


def tier_tokens(state: Any) -> int:
    return sum(record["disk_tokens"] for record in state["records"])


ROUNDS = ("", "again", "corrupt", "reset", "break")
"""What is done before each round of one engine."""


@pytest.fixture(scope="module")
def door(run: Runner, tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("doors") / "disk"
    options = with_tier(SMALL, tier=disk(directory)) | AUTO
    config = {"rounds": ROUNDS, "disk": str(directory), "events": True, "patches": ["little staging"]}
    return run("offloading", offloading=options, **config)


def state_of(door: Run, what: str) -> Any:
    return door["states"][ROUNDS.index(what)]


class TestDoor:
    """All tests look at one engine."""

    def test_answers_do_not_change_and_nothing_is_left(self, door: Run, expected: list[Any]) -> None:
        check(door, expected)
        assert min(door["loaded"], door["evicted"]) > 0
        assert "kvoffload: tiers below vLLM's host memory" in door.log
        assert "kvoffload's policy auto evicts from vLLM's host memory" in door.log

    def test_chunks_that_left_host_memory_are_found_on_disk(self, door: Run, expected: list[Any]) -> None:
        before, after = state_of(door, ""), state_of(door, "again")
        tokens = tier_tokens(before) + tier_tokens(after)
        (metrics,) = after["metrics"]
        assert tier_tokens(after) > sum(map(len, make_prompts())) / 4
        assert tokens == metrics["tier_hit_tokens:disk"]
        assert metrics["tier_write_blocks:disk"] > metrics.get("tier_bad_blocks:disk", 0) == 0
        names = [record["req_id"] for record in after["records"]]
        assert len(names) == len(set(names)) > 0
        samples = after["prometheus"]
        assert samples["kvoffload:tier_hit_tokens_total:disk"] == tokens
        assert samples["vllm:kv_offload_tiering_read_bytes_total:1:KVOffloadTier"] > 0

    def test_corrupted_bytes_are_misses(self, door: Run) -> None:
        state = state_of(door, "corrupt")
        assert state["off"] == [False]
        assert state["metrics"][0]["tier_bad_blocks:disk"] > 0
        assert "corrupt" in {record["reason"] for record in state["records"]}

    def test_a_reset_forgets_what_was_stored(self, door: Run) -> None:
        """vLLM resets its caches when weights are updated, and does not say whether they were."""
        first = min(state_of(door, "reset")["records"], key=lambda record: int(record["req_id"].split("-")[0]))
        assert first["disk_tokens"] == 0
        assert "kvoffload: the cache was reset" in door.log

    def test_a_bug_in_the_tier_is_a_miss(self, door: Run) -> None:
        """Requests are computed from then on, and all that waits for the tier ends."""
        state = state_of(door, "break")
        assert state["off"] == [True]
        assert door.log.count("OFFLOADING TO TIERS IS OFF: submit_load failed") == 1
        assert state["metrics"][0]["off"] == 1

    def test_events_name_what_is_in_the_tier(self, door: Run) -> None:
        stored = [event for event in door["events"] if event[:2] == ["BlockStored", "STORAGE"]]
        written = state_of(door, "again")["metrics"][0]["tier_write_blocks:disk"]
        assert sum(len(event) - 2 for event in stored) >= written > 0


@pytest.mark.soak
def test_a_restarted_server_finds_its_chunks_unless_its_weights_were_replaced(
    run: Runner, expected: list[Any], tmp_path: Path
) -> None:
    """Every prompt has some of the changed tokens. Hashes with an unexpected root switch the tier off."""
    options = with_tier(tier=disk(tmp_path / "disk"))
    others = {"model": str(tmp_path / "model"), "new_rows": 128}
    runs: tuple[tuple[bool, dict[str, Any]], ...] = (
        (False, {}),
        (True, {}),
        (False, {"patches": ["another root"]}),
        (False, others),
    )
    for is_found, config in runs:
        if "patches" in config:
            elsewhere = run("rounds", rounds=1, multiprocessing=True, offloading=options)
        result = run("offloading", rounds=[""], offloading=options, **config)
        assert len(differences(result["outputs"][0], expected)) == (len(expected) if config is others else 0)
        assert (tier_tokens(result) > 0) is is_found
        assert result["off"] == ["patches" in config]
        assert ("set PYTHONHASHSEED=0" in result.log) == ("patches" in config)
    assert differences(elsewhere["outputs"][0], expected) == []
    assert elsewhere["prometheus"]["kvoffload:tier_hit_tokens_total:disk"] > 0, "the frontend makes the metrics"
    assert elsewhere["prometheus"]["kvoffload:tier_capacity_bytes:disk"] == 32 << 20


@pytest.mark.soak
def test_windows_and_states_and_chunks_of_several_blocks(
    run: Runner, gemma3_expected: list[Any], tmp_path: Path
) -> None:
    options = with_tier(SMALL, tier=disk(tmp_path / "windows")) | {"blocks_per_chunk": 2} | AUTO
    for _ in range(2):
        result = run("offloading", rounds=[""], offloading=options, **GEMMA3)
        check(result, gemma3_expected)
    # How much was stored depends on the disk: vLLM replaces no chunk that is still being written.
    assert tier_tokens(result) > sum(map(len, make_prompts())) / 4
    options, model = with_tier(SMALL, tier=disk(tmp_path / "states")) | AUTO, with_lfm2(prompts=6, max_tokens=24)
    computed = run("offloading", rounds=[""], offloading=options, **model)
    assert tier_tokens(computed) == 0
    result = run("offloading", rounds=[""], offloading=options, **model)
    check(result, computed["outputs"][0])
    assert tier_tokens(result) > sum(map(len, make_prompts(6))) / 3


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["disk", "shared_dir"])
def test_servers_of_one_and_of_two_ranks_share_blocks(
    run: Runner, expected: list[Any], tmp_path: Path, kind: str
) -> None:
    """With vLLM's canonical layout. The control: without it vLLM's fs tier gives the blocks of one rank to two."""
    # Other variables of vLLM count as other software.
    binding = "VLLM_CPU_OMP_THREADS_BIND"
    parallel = {"environment": {binding: TWO_RANKS[binding]}, "engine": PARALLEL["tensor"]}
    canonical = with_tier(tier=disk(tmp_path / "disk") | {"kind": kind}) | {"canonical_layout": True}
    tokens = []
    for config in ({}, parallel, {}):
        result = run("offloading", rounds=[""], prompts=4, offloading=canonical, **config)
        check(result, expected[:4])
        tokens.append(tier_tokens(result))
    assert tokens[0] == 0
    assert len(set(tokens[1:])) == 1
    assert tokens[1] > sum(map(len, make_prompts(4))) / 2
    of_vllm = SPEC | {"cpu_bytes_to_use": LARGE, "secondary_tiers": [{"type": "fs", "root_dir": str(tmp_path / "fs")}]}
    for is_wrong, config in ((False, {}), (True, parallel)):
        result = run("rounds", rounds=1, multiprocessing=True, prompts=4, offloading=of_vllm, **config)
        assert len(differences(result["outputs"][0], expected[:4])) == (4 if is_wrong else 0)


@pytest.mark.soak
@pytest.mark.parametrize("version", OVERLAYS)
def test_other_versions(run: Runner, version: str, expected: list[Any], tmp_path: Path) -> None:
    overlaid = {"environment": {"PYTHONPATH": in_front(version), "VLLM_USE_V2_MODEL_RUNNER": "0"}}
    options = with_tier(SMALL, tier=disk(tmp_path / "disk"))
    result = run("offloading", prompts=6, rounds=["", "again"], offloading=options, **overlaid)
    assert result["vllm"].startswith(version)
    check(result, expected[:6])
    assert sum(map(tier_tokens, result["states"])) > 0
    assert "kvoffload is tested with" not in result.log


CACHE = {"kind": "disk", "dir": "DIRECTORY", "bytes": "32MiB"}
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "an unknown key": (
        {"tier": CACHE, "disk_dir": "/c"},
        ["secondary_tiers[0].disk_dir='/c': unknown option", "tiers"],
    ),
    "a wrong value of the second": (
        {"tiers": [CACHE, CACHE | {"dir": "/c", "bytes": "x"}]},
        ["secondary_tiers[0].tiers[1].bytes='x': not an amount of memory"],
    ),
    "a file instead of a directory": (
        {"tier": CACHE | {"dir": "/proc/version"}},
        ["secondary_tiers[0].tier.dir='/proc/version'"],
    ),
    "adapters": ({"tier": CACHE}, ["--enable-lora", '"kv_connector": "KVOffloadConnector"']),
    "a drafter that looks ahead": ({"tier": CACHE}, ["method 'eagle'", '"kv_connector": "KVOffloadConnector"']),
    "context parallelism": ({"tier": CACHE}, ["decode_context_parallel_size=2", "set it to 1"]),
    "hashes with a random root": ({"tier": CACHE}, ["prefix_caching_hash_algo='xxhash'", "PYTHONHASHSEED=0"]),
    "weights without files": ({"tier": CACHE}, ["secondary_tiers[0].tier.dir=", 'set model_fingerprint="..."']),
    "one of several engines": ({"tier": CACHE}, ["engines_per_node is not set", "--data-parallel-size-local"]),
    "states that are not kept": ({"tier": CACHE}, ["mamba_cache_mode='none'"]),
}
FLAGS: dict[str, dict[str, Any]] = {
    "adapters": {"enable_lora": True},
    "context parallelism": {"decode_context_parallel_size": 2, "tensor_parallel_size": 4},
    "hashes with a random root": {"prefix_caching_hash_algo": "xxhash"},
}
CHANGES: dict[str, dict[str, Any]] = {
    "a drafter that looks ahead": {"speculative_config": "eagle"},
    "weights without files": {"model_config.model": "some/model"},
    "one of several engines": {"parallel_config.data_parallel_index": 1},
    "states that are not kept": {"kv_cache": "mamba"},
    "another seed": {"PYTHONHASHSEED": "1"},
    "the canonical layout": {"cache_config.kv_cache_layout": "LBHNC"},
    "two engines": {"parallel_config.data_parallel_index": 3},
}
DIFFERENT: dict[str, dict[str, Any]] = {
    "larger chunks": {"blocks_per_chunk": 2},
    "the canonical layout": {"canonical_layout": True},
    "another seed": {},
}
"""Settings that change the bytes or the names of chunks, besides those that the connector knows."""


@pytest.fixture(scope="module")
def said(run: Runner, tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("doors")

    def case(number: int, name: str, tier: dict[str, Any], **options: Any) -> dict[str, Any]:
        text = json.dumps(with_tier(**tier) | options).replace("DIRECTORY", str(directory / str(number)))
        flags, changes = FLAGS.get(name), CHANGES.get(name, {})
        return {"own": True, "options": json.loads(text), "flags": flags, "changes": changes}

    tiers: dict[str, dict[str, Any]] = {name: tier for name, (tier, _) in REFUSED.items()}
    tiers |= {name: {"tier": CACHE} for name in (*DIFFERENT, "right", "right again")}
    tiers["two engines"] = {"tier": CACHE, "engines_per_node": 2}
    cases = {name: case(i, name, tier, **DIFFERENT.get(name, {})) for i, (name, tier) in enumerate(tiers.items())}
    return run("configurations", cases=cases)


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_configuration_is_refused_with_the_fix(said: Run, name: str) -> None:
    assert said["said"][name] is not None, "accepted without an error"
    kind, message = said["said"][name]
    assert kind == "ConfigError", message
    for part in REFUSED[name][1]:
        assert part in message


def test_what_shapes_chunks_changes_the_fingerprint(said: Run) -> None:
    prints = {name: said["fingerprints"][name] for name in ("right", *DIFFERENT)}
    assert len(set(prints.values())) == len(prints)
    assert said["fingerprints"]["right again"] == prints["right"]


def test_engines_of_a_node_share_the_budget(said: Run) -> None:
    assert said["said"]["two engines"] is None
    assert said["engines"]["two engines"] == [1, 2]


class _Ref(SimpleNamespace):
    """A layer: see CanonicalKVCacheRef."""


def test_the_worker_copies_parts_of_chunks(run: Runner) -> None:
    """Chunks of two blocks, of which the first and the last of a transfer may be partly on the device."""
    from kvoffload.vllm.host_spec import HostWorker

    rng = np.random.default_rng(0)
    device = [rng.integers(-99, 99, (9, 8), np.int8), rng.integers(-99, 99, (9, 6), np.int8)]
    host = [np.zeros((4, 16), np.int8), np.zeros((4, 12), np.int8)]
    refs = [
        [_Ref(tensor_idx=0, page_size_bytes=8)],
        [_Ref(tensor_idx=0, page_size_bytes=5), _Ref(tensor_idx=1, page_size_bytes=6)],
    ]
    worker = HostWorker(device, host, refs, 2)
    before = [array.copy() for array in device]
    # Group 0 has blocks 1 to 3 of a request in chunks 0 and 1, group 1 has its block 4 in chunk 3.
    blocks = SimpleNamespace(block_ids=np.array([7, 2, 5, 4]), group_sizes=[3, 1], block_indices=[1, 4])
    chunks = SimpleNamespace(block_ids=np.array([0, 1, 3]))
    assert worker.submit_store(1, blocks, chunks)
    assert (host[0][0, 8:] == before[0][7]).all()
    assert (host[0][1] == np.concatenate([before[0][2], before[0][5]])).all()
    assert (host[0][3, :5] == before[0][4, :5]).all()
    assert (host[1][3, :6] == before[1][4]).all()
    assert not host[0][0, :8].any()
    assert not host[0][2].any()
    for array in device:
        array[:] = 0
    assert worker.submit_load(2, chunks, blocks)
    for block in (7, 2, 5):
        assert (device[0][block] == before[0][block]).all()
    assert (device[0][4, :5] == before[0][4, :5]).all()
    assert (device[1][4] == before[1][4]).all()
    assert [(result.job_id, result.success, result.transfer_size) for result in worker.get_finished()] == [
        (1, True, 3 * 8 + 5 + 6),
        (2, True, 3 * 8 + 5 + 6),
    ]


def test_ranks_write_their_own_bytes_of_a_canonical_page() -> None:
    """Two ranks have two of four heads each. Two more ranks hold the same as the first two, and take turns."""
    from vllm.v1.kv_offload.base import CanonicalPageMapping, CopyRun

    from kvoffload.vllm.host_spec import HostWorker

    whole = np.arange(3 * 16, dtype=np.int8).reshape(3, 16)
    host = [np.zeros((2, 32), np.int8)]
    transfer = (
        SimpleNamespace(block_ids=np.array([2, 0, 1]), group_sizes=[3], block_indices=[0]),
        SimpleNamespace(block_ids=np.array([1, 0])),
    )
    workers = []
    for rank in range(4):
        # Fragments of four bytes, each rank has every other one.
        run = CopyRun(0, 4 * (rank % 2), 4, 2, 4, 8)
        mapping = CanonicalPageMapping(16, 8, (run,), 2, rank // 2, True)
        device = whole.reshape(3, 2, 2, 4)[:, :, rank % 2].reshape(3, 8).copy()
        refs = [[_Ref(tensor_idx=0, page_size_bytes=8, mapping=mapping)]]
        workers.append(HostWorker([device], host, refs, 2, is_canonical=True))
        workers[-1].submit_store(1, *transfer)
        device[:] = 0
    assert (host[0][1] == np.concatenate([whole[2], whole[0]])).all()
    assert (host[0][0, :16] == whole[1]).all()
    for rank, worker in enumerate(workers):
        worker.submit_load(2, *transfer[::-1])
        assert (worker._device[0] == whole.reshape(3, 2, 2, 4)[:, :, rank % 2].reshape(3, 8)).all()
        stored, loaded = worker.get_finished()
        # Of three pages each writes one or two, and reads all.
        assert stored.transfer_size in (8, 16)
        assert loaded.transfer_size == 24


def test_a_chain_merges_groups_and_leaves_out_what_is_not_whole() -> None:
    from kvoffload.vllm.tier_requests import TierRequest

    groups = [KVGroup(32), KVGroup(64, sliding_window=70)]

    def key(name: str, group: int) -> bytes:
        return make_offload_key(name.encode(), group)

    request = TierRequest()
    positions = {key("a", 0): 32, key("b", 0): 64, key("b", 1): 64, key("tail", 0): 80}
    request.extend(positions, groups)
    # vLLM adds keys group by group.
    positions |= {key("c", 0): 96, key("d", 0): 128, key("d", 1): 128}
    request.extend(positions, groups)
    request.extend(positions, groups)
    chain = [key("a", 0), key("b", 0), key("b", 1), key("c", 0), key("d", 0), key("d", 1)]
    assert request.chain == chain
    request.batch = 2
    request.answers[key("b", 0)] = 0
    assert request.wanted(key("a", 0), is_full=True) == [key("a", 0)]
    assert request.wanted(key("d", 1), is_full=False) == [key("b", 1), key("d", 1)]

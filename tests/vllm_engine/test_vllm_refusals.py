"""A wrong setting is refused at start, by name, with its value and what to write instead."""

from __future__ import annotations

from typing import Any

import pytest

# Not "vllm": from tests/ on sys.path this directory itself could be imported under that name.
pytest.importorskip("vllm.version")
from vllm_harness import DEADLINE_S, POOL, Run, Runner

pytestmark = pytest.mark.vllm

DISK = POOL | {"disk_dir": "/var/cache/kvoffload", "disk_bytes": "1GiB"}
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown option": ({"host_byte": "1GiB"}, ["host_byte='1GiB'", "did you mean host_bytes?"]),
    "no host_bytes": ({}, ["host_bytes is not set", 'host_bytes="']),
    "not an amount": ({"host_bytes": "lots"}, ["host_bytes='lots'", 'host_bytes="8GiB"']),
    "more than the machine has": ({"host_bytes": "900TiB"}, ["host_bytes=", "900 TiB", "set host_bytes to"]),
    "less than one block": ({"host_bytes": 4096}, ["host_bytes=4096", "set host_bytes to many times"]),
    "policy not importable": (POOL | {"policy": "no.such.module:Policy"}, ["policy='no.such.module:Policy'"]),
    "policy not a policy": (
        POOL | {"policy": "collections:OrderedDict"},
        ["policy='collections:OrderedDict'"],
    ),
    "block_size does not divide": (POOL | {"block_size": 48}, ["block_size=48", "32 tokens", "set it to 32"]),
    "two block sizes": (POOL | {"block_size": 64, "block_size_factor": 2}, ["block_size=64", "remove one"]),
    "threshold too low": (POOL | {"store_threshold": 1}, ["store_threshold=1", "2 or more"]),
    "context parallelism of prompts": (POOL, ["prefill_context_parallel_size=2", "set it to 1"]),
    "context parallelism": (POOL, ["decode_context_parallel_size=2", "set it to 1"]),
    "an engine of several": (POOL, ["engines_per_node is not set", "--data-parallel-size-local"]),
    "the first engine of several": (POOL, ["engines_per_node is not set"]),
    "more engines than said": (POOL | {"engines_per_node": 2}, ["engines_per_node=2", "engine 2", "3 or more"]),
    "no engines": (POOL | {"engines_per_node": 0}, ["engines_per_node=0", "1 or more"]),
    "a recurrent layer": (POOL, ["MambaSpec", "without kvoffload"]),
    "a window that only generated tokens see": (POOL, ["RSWASpec", "without kvoffload"]),
    "hidden states": (POOL, ["extract_hidden_states", "remove the speculative config"]),
    "attention to what comes later": (POOL, ["attends to tokens that come later", "without kvoffload"]),
    "a diffusion model": (POOL, ["diffusion", "without kvoffload"]),
    "experts are to be told": (POOL, ["enable_return_routed_experts", "set it to False"]),
    "MLA on a CPU without what it needs": (POOL, ["MLA", "without kvoffload"]),
    "engines that come and go": (POOL, ["enable_elastic_ep", "set it to False"]),
    "a load balancer outside": (POOL, ["engines_per_node is not set"]),
    "engines miscounted": (
        POOL | {"engines_per_node": 3},
        ["engines_per_node=3", "vLLM runs 2 engines", "leave it out"],
    ),
    "among other connectors": (POOL, ["MultiConnector", "name KVOffloadConnector"]),
    "a pooler of whole prompts": (POOL, ["pooler", "without kvoffload"]),
    "a disk of any size": (POOL | {"disk_dir": "/"}, ["disk_dir='/' without disk_bytes", 'disk_bytes="']),
    "a disk anywhere": (POOL | {"disk_bytes": "1GiB"}, ["disk_bytes=1073741824 without disk_dir", 'disk_dir="/']),
    "hashes of this process alone": (
        DISK,
        ["prefix_caching_hash_algo=xxhash", "set the environment variable PYTHONHASHSEED=0", "hash-algo sha256"],
    ),
    "images without a name": (DISK, ["mm_processor_cache_gb=0", "turn one of the two on"]),
    "adapters with a disk": (DISK, ["LoRA", 'set model_fingerprint="..."']),
    "weights without a name": (DISK, ["model some/model", "weight files are not found", 'set model_fingerprint="..."']),
}
FLAGS: dict[str, dict[str, Any]] = {
    "context parallelism": {"decode_context_parallel_size": 2, "tensor_parallel_size": 4},
    "experts are to be told": {"enable_return_routed_experts": True},
    "a pooler of whole prompts": {"runner": "pooling", "pooler_config": {"seq_pooling_type": "MEAN"}},
    "engines miscounted": {"data_parallel_size": 2, "data_parallel_size_local": 2},
    "a load balancer outside": {
        "data_parallel_size": 2,
        "data_parallel_size_local": 1,
        "data_parallel_rank": 0,
        "hf_overrides": {"num_local_experts": 4},
    },
    "hashes of this process alone": {"prefix_caching_hash_algo": "xxhash"},
    "adapters with a disk": {"enable_lora": True},
    "images without a name": {"enable_prefix_caching": False},
    "MLA on a CPU without what it needs": {"enable_prefix_caching": False},
}
"""What of a case vLLM's own arguments set, so that a flag that vLLM keeps elsewhere is not missed."""
CHANGES: dict[str, dict[str, Any]] = {
    "context parallelism of prompts": {"parallel_config.prefill_context_parallel_size": 2},
    "more engines than said": {
        "parallel_config.data_parallel_index": 2,
        "parallel_config.data_parallel_rank_local": 2,
    },
    "a recurrent layer": {"kv_cache": "mamba"},
    "a window that only generated tokens see": {"kv_cache": "rswa"},
    "hidden states": {"speculative_config": "extract_hidden_states"},
    "attention to what comes later": {"kv_cache": "prefix-lm"},
    "a diffusion model": {"model_config.is_diffusion": True},
    "MLA on a CPU without what it needs": {"mla": True},
    "engines that come and go": {"parallel_config.enable_elastic_ep": True},
    "among other connectors": {"multi_connector": True},
    "an engine of several": {"parallel_config.data_parallel_index": 1},
    "the first engine of several": {"kv_transfer_config.engine_id": "some-engine_dp0"},
    "images without a name": {"model_config.multimodal_config": {"mm_processor_cache_gb": 0}},
    "weights without a name": {"model_config.model": "some/model"},
}
"""What of it is a property of a model, is set by vLLM's own launcher, or is refused by vLLM on a CPU."""


SHARES: dict[str, dict[str, Any]] = {
    "told by vLLM": {"parallel_config.data_parallel_size": 2, "parallel_config.data_parallel_size_local": 2},
    "known from another setting": {
        "parallel_config.data_parallel_index": 1,
        "parallel_config.elastic_ep_max_dp_size": 2,
    },
    "told by the user with a load balancer outside": {
        "parallel_config.data_parallel_size": 2,
        "parallel_config.data_parallel_size_local": 1,
        "options": {"engines_per_node": 2},
    },
    "told by the user": {"parallel_config.data_parallel_index": 1, "options": {"engines_per_node": 2}},
    "the second with a load balancer outside": {
        "parallel_config.data_parallel_size": 4,
        "parallel_config.data_parallel_size_local": 1,
        "parallel_config.data_parallel_index": 3,
        "options": {"engines_per_node": 2},
    },
    "the second on the second node": {
        "parallel_config.data_parallel_index": 3,
        "parallel_config.data_parallel_rank_local": 1,
        "options": {"engines_per_node": 2},
    },
    "two ranks": {"parallel_config.world_size": 2},
}
"""Engines and ranks that have half of host_bytes each."""
ENGINES = {
    "told by vLLM": [0, 2],
    "known from another setting": [0, 2],
    "told by the user with a load balancer outside": [0, 2],
    "the second with a load balancer outside": [1, 2],
    "the second on the second node": [1, 2],
    "told by the user": [1, 2],
    "two ranks": [0, 1],
}
"""Which engine of its node it is, and of how many."""

SHAPES: dict[str, dict[str, Any]] = {
    "a seed": {"PYTHONHASHSEED": "1"},
    "another seed": {"PYTHONHASHSEED": "2"},
    "an algorithm": {"cache_config.prefix_caching_hash_algo": "sha256_cbor"},
    "a fast algorithm with a seed": {"cache_config.prefix_caching_hash_algo": "xxhash", "PYTHONHASHSEED": "1"},
    "what the user overrides": {"model_config.hf_config.rope_parameters": {"rope_type": "default", "rope_theta": 17}},
    "images": {"model_config.multimodal_config": {}},
    "how images are prepared": {"model_config.multimodal_config": {"mm_processor_kwargs": {"do_normalize": False}}},
    "how weights are read": {"load_config.load_format": "dummy"},
    "a length for which other factors hold": {
        "model_config.hf_config.rope_parameters": {"rope_type": "longrope"},
        "model_config.max_model_len": 64,
    },
    "and one for which they do not": {
        "model_config.hf_config.rope_parameters": {"rope_type": "longrope"},
        "model_config.max_model_len": 128,
    },
}
"""Settings with which blocks are other ones."""
SAME: dict[str, dict[str, Any]] = {
    "the same again": {},
    "a length": {"model_config.max_model_len": 64},
    "the path": {"model_config.hf_config._name_or_path": "/somewhere/else"},
}
"""Settings with which they are not."""


@pytest.fixture(scope="module")
def said(run: Runner) -> Run:
    cases = {
        name: {"options": options, "flags": FLAGS.get(name), "changes": CHANGES.get(name, {})}
        for name, (options, _) in CASES.items()
    }
    for name, changes in {**SHAPES, **SAME}.items():
        cases[name] = {"options": DISK, "changes": changes}
    for name, changes in SHARES.items():
        cases[name] = {"options": POOL | changes.pop("options", {}), "changes": changes}
    cases["tried"] = {"options": POOL, "changes": {"version": "0.33.4"}}
    cases["not named alike"] = {"options": POOL, "changes": {"version": "0.320.0"}}
    later = {"options": POOL, "changes": {"version": "0.99.1"}}
    return run(
        "refusals", cases={"right": {"options": POOL}, "with a disk": {"options": DISK}, **cases, "later": later}
    )


def test_a_right_configuration_is_taken(said: Run) -> None:
    assert said["said"]["right"] is None


@pytest.mark.parametrize("case", SHARES)
def test_host_bytes_is_shared_out(said: Run, case: str) -> None:
    assert said["said"][case] is None
    assert said["blocks"][case] == said["blocks"]["right"] // 2 > 0


@pytest.mark.parametrize("case", ENGINES)
def test_engines_of_a_node_are_numbered(said: Run, case: str) -> None:
    assert said["engines"][case] == ENGINES[case]


def test_what_shapes_blocks_is_in_the_fingerprint(said: Run) -> None:
    fingerprints = [said["fingerprints"][case] for case in ("with a disk", *SHAPES)]
    assert len(set(fingerprints)) == len(fingerprints)


@pytest.mark.parametrize("case", SAME)
def test_what_does_not_is_not(said: Run, case: str) -> None:
    assert said["fingerprints"][case] == said["fingerprints"]["with a disk"]


def test_a_version_nobody_has_tested_is_tried_with_a_warning(said: Run) -> None:
    assert said["said"]["later"] is None
    assert said.log.count("not with 0.99.1, but tries to serve it") == 1
    assert said.log.count("not with 0.320.0, but tries to serve it") == 1
    assert said.log.count("kvoffload is tested with") == 2


def test_one_that_was_only_tried_is_told_of_too(said: Run) -> None:
    assert said["said"]["tried"] is None
    assert said.log.count("kvoffload is not tested with vLLM 0.33: its Python code was run by hand") == 1


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_one_is_refused_with_the_fix(said: Run, case: str) -> None:
    assert said["said"][case] is not None, "taken without a word"
    kind, message = said["said"][case]
    assert kind == "ConfigError"
    for part in CASES[case][1]:
        assert part in message


def test_the_server_ends_with_the_same_words(run: Runner) -> None:
    """Through the whole of vLLM's start."""
    child, result = run.start("rounds", connector={"host_bytes": "900TiB"})
    assert child.wait(DEADLINE_S) != 0
    assert not result.exists()
    assert (
        "ConfigError: host_bytes=989560464998400 (900 TiB): this machine has" in result.with_suffix(".log").read_text()
    )

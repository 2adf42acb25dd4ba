"""A wrong setting is refused at start. The error names the setting, its value and the fix."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_harness import DEADLINE_S, POOL, Run, Runner

pytestmark = pytest.mark.vllm

DISK = POOL | {"disk_dir": "/var/cache/kvoffload", "disk_bytes": "1GiB"}
TIERS = POOL | {"tiers": [{"kind": "disk", "dir": "/var/cache/kvoffload", "bytes": "1GiB"}]}
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "less than one block": ({"host_bytes": 4096}, ["host_bytes=4096", 'did you mean host_bytes="4096GiB"?']),
    "block_size does not divide": (POOL | {"block_size": 48}, ["block_size=48", "32 tokens", "set it to 32"]),
    "context parallelism of prompts": (POOL, ["prefill_context_parallel_size=2", "set it to 1"]),
    "context parallelism": (POOL, ["decode_context_parallel_size=2", "set it to 1"]),
    "one of several engines": (POOL, ["engines_per_node is not set", "--data-parallel-size-local"]),
    "the first of several engines": (POOL, ["engines_per_node is not set"]),
    "more engines than configured": (POOL | {"engines_per_node": 2}, ["engines_per_node=2", "engine 2", "3 or more"]),
    "states without prefix caching": (
        POOL,
        [
            "mamba_cache_mode='none': this model has recurrent or convolutional layers, and a request can continue "
            "only from a state that vLLM keeps at a block boundary; turn prefix caching on (--enable-prefix-caching)"
        ],
    ),
    "an older version": (
        POOL,
        ["vLLM 0.30.1 is installed, and kvoffload needs 0.31 or later: pip install 'vllm==0.33.*'"],
    ),
    "a window for generated tokens only": (POOL, ["RSWASpec", "without kvoffload"]),
    "hidden states": (POOL, ["extract_hidden_states", "remove the speculative config"]),
    "hashes of tokens behind a block": (
        POOL,
        ["num_hash_lookahead_tokens=1", "set disable_lookahead_block_hashes to true in the speculative config"],
    ),
    "attention to later tokens": (POOL, ["attends to tokens that come later", "without kvoffload"]),
    "a diffusion model": (POOL, ["diffusion", "without kvoffload"]),
    "answers that name experts": (POOL, ["enable_return_routed_experts", "set it to False"]),
    "MLA on a CPU without prefix caching": (POOL, ["MLA", "without kvoffload"]),
    "elastic engines": (POOL, ["enable_elastic_ep", "set it to False"]),
    "an external load balancer": (POOL, ["engines_per_node is not set"]),
    "wrong number of engines": (
        POOL | {"engines_per_node": 3},
        ["engines_per_node=3", "vLLM runs 2 engines", "leave it out"],
    ),
    "beside a connector that may change KV": (POOL, ["connectors[1].kv_connector='DecodeBenchConnector'", "remove it"]),
    "beside itself": (POOL, ["connectors: 2 of them are kvoffload's", "remove all but one"]),
    "beside others that only produce": (POOL, ["kv_role='kv_producer'", '"kv_role": "kv_both"']),
    "beside others in an older version": (
        POOL,
        [
            "kv_connector='MultiConnector': beside others kvoffload needs vLLM 0.32 or later",
            "name KVOffloadConnector as kv_connector",
        ],
    ),
    "a pooler of whole prompts": (POOL, ["pooler", "without kvoffload"]),
    "hashes with a random root": (
        DISK,
        [
            "prefix_caching_hash_algo='xxhash': its hashes begin with a random number in every process, so no process "
            "would find what another has left in a tier; set the environment variable PYTHONHASHSEED=0 (any number, "
            "the same at every start), or use --prefix-caching-hash-algo sha256"
        ],
    ),
    "images without a content hash": (
        TIERS,
        [
            "tiers[0].dir='/var/cache/kvoffload': with mm_processor_cache_gb=0 and no prefix caching vLLM identifies "
            "images and other inputs by a counter that starts again in every process, not by their content; turn one "
            "of the two on"
        ],
    ),
    "weights without files": (
        DISK,
        ["model some/model", "weight files are not found", 'set model_fingerprint="..."'],
    ),
    "weights without files, with a tier": (
        TIERS,
        [
            "tiers[0].dir='/var/cache/kvoffload': nothing distinguishes the weights of model some/model from others "
            "after a restart or on another server: its weight files are not found on this machine; set "
            'model_fingerprint="..." and change it with the weights'
        ],
    ),
    "a disk with workers on another node": (
        DISK,
        [
            "nnodes=2: disk_dir=",
            "cannot reach the host memory of other nodes",
            "remove the tier",
            "engine per node",
        ],
    ),
}
FLAGS: dict[str, dict[str, Any]] = {
    "context parallelism": {"decode_context_parallel_size": 2, "tensor_parallel_size": 4},
    "answers that name experts": {"enable_return_routed_experts": True},
    "a pooler of whole prompts": {"runner": "pooling", "pooler_config": {"seq_pooling_type": "MEAN"}},
    "wrong number of engines": {"data_parallel_size": 2, "data_parallel_size_local": 2},
    "an external load balancer": {
        "data_parallel_size": 2,
        "data_parallel_size_local": 1,
        "data_parallel_rank": 0,
        "hf_overrides": {"num_local_experts": 4},
    },
    "hashes with a random root": {"prefix_caching_hash_algo": "xxhash"},
    "images without a content hash": {"enable_prefix_caching": False},
    "a disk with workers on another node": {
        "nnodes": 2,
        "node_rank": 1,
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
    },
    "MLA on a CPU without prefix caching": {"enable_prefix_caching": False},
}
"""Arguments of vLLM for some of CASES. They show that the adapter looks where vLLM keeps the setting."""
BOTH = {"kv_role": "kv_both"}
EXAMPLE = [{"kv_connector": "ExampleConnector"} | BOTH]
CHANGES: dict[str, dict[str, Any]] = {
    "context parallelism of prompts": {"parallel_config.prefill_context_parallel_size": 2},
    "more engines than configured": {
        "parallel_config.data_parallel_index": 2,
        "parallel_config.data_parallel_rank_local": 2,
    },
    "states without prefix caching": {"kv_cache": "mamba"},
    "an older version": {"version": "0.30.1"},
    "a window for generated tokens only": {"kv_cache": "rswa"},
    "hidden states": {"speculative_config": "extract_hidden_states"},
    "hashes of tokens behind a block": {"version": "0.33.0", "num_hash_lookahead_tokens": 1},
    "attention to later tokens": {"kv_cache": "prefix-lm"},
    "a diffusion model": {"model_config.is_diffusion": True},
    "MLA on a CPU without prefix caching": {"mla": True},
    "elastic engines": {"parallel_config.enable_elastic_ep": True},
    "beside a connector that may change KV": {"others": [{"kv_connector": "DecodeBenchConnector"} | BOTH]},
    "beside itself": {"others": [{"kv_connector": "KVOffloadConnector"} | BOTH]},
    "beside others that only produce": {"others": EXAMPLE, "role_of_all": "kv_producer"},
    "beside others in an older version": {"others": EXAMPLE, "version": "0.31.2"},
    "one of several engines": {"parallel_config.data_parallel_index": 1},
    "the first of several engines": {"kv_transfer_config.engine_id": "some-engine_dp0"},
    "images without a content hash": {"model_config.multimodal_config": {"mm_processor_cache_gb": 0}},
    "weights without files": {"model_config.model": "some/model"},
    "weights without files, with a tier": {"model_config.model": "some/model"},
}
"""Changes to the configuration, where no argument sets it or vLLM itself refuses the argument on a CPU."""


SHARES: dict[str, tuple[dict[str, Any], dict[str, Any], list[int]]] = {
    "given by vLLM": ({"data_parallel_size": 2, "data_parallel_size_local": 2}, {}, [0, 2]),
    "known from another setting": ({"data_parallel_index": 1, "elastic_ep_max_dp_size": 2}, {}, [0, 2]),
    "given by the user": ({"data_parallel_index": 1}, {"engines_per_node": 2}, [1, 2]),
    "the second engine with an external load balancer": (
        {"data_parallel_size": 4, "data_parallel_size_local": 1, "data_parallel_index": 3},
        {"engines_per_node": 2},
        [1, 2],
    ),
    "the second engine of the second node": (
        {"data_parallel_index": 3, "data_parallel_rank_local": 1},
        {"engines_per_node": 2},
        [1, 2],
    ),
    "two ranks": ({"world_size": 2}, {}, [0, 1]),
}
"""Cases in which each engine or rank has half of host_bytes: fields of vLLM's parallel_config, options, and the index
of the engine on its node with the number of engines there."""


@pytest.fixture(scope="module")
def said(run: Runner) -> Run:
    cases = {
        name: {"options": options, "flags": FLAGS.get(name), "changes": CHANGES.get(name, {})}
        for name, (options, _) in CASES.items()
    }
    for name, (fields, options, _) in SHARES.items():
        changes = {f"parallel_config.{field}": value for field, value in fields.items()}
        cases[name] = {"options": POOL | options, "changes": changes}
    cases["states"] = {"options": POOL, "changes": {"kv_cache": "mamba, aligned"}}
    changes = {"others": EXAMPLE, "scheduler_config.disable_hybrid_kv_cache_manager": True}
    cases["beside another"] = {"options": POOL, "changes": changes}
    cases["a similar version number"] = {"options": POOL, "changes": {"version": "0.320.0"}}
    later = {"options": POOL, "changes": {"version": "0.99.1"}}
    return run("configurations", cases={"right": {"options": POOL}, **cases, "later": later})


def test_a_right_configuration_is_accepted_alone_and_beside_another_connector(said: Run) -> None:
    assert said["said"]["right"] is None
    assert said["said"]["beside another"] is None
    assert said["fingerprints"]["beside another"] == said["fingerprints"]["right"]


def test_states_at_boundaries_are_accepted(said: Run) -> None:
    assert said["said"]["states"] is None
    assert said["fingerprints"]["states"] != said["fingerprints"]["right"]


@pytest.mark.parametrize("case", SHARES)
def test_host_bytes_is_shared_out_and_engines_are_numbered(said: Run, case: str) -> None:
    assert said["said"][case] is None
    assert said["blocks"][case] == said["blocks"]["right"] // 2 > 0
    assert said["engines"][case] == SHARES[case][2]


def test_an_untested_version_is_served_with_a_warning(said: Run) -> None:
    assert said["said"]["later"] is None
    assert said.log.count("not with 0.99.1, but tries to serve it") == 1
    assert said.log.count("not with 0.320.0, but tries to serve it") == 1
    assert said.log.count("kvoffload is tested with") == 2


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_configuration_is_refused_with_the_fix(said: Run, case: str) -> None:
    assert said["said"][case] is not None, "accepted without an error"
    kind, message = said["said"][case]
    assert kind == "ConfigError"
    for part in CASES[case][1]:
        assert part in message


@pytest.mark.soak
def test_the_server_ends_with_the_same_words(run: Runner) -> None:
    """The error passes through the whole start of vLLM."""
    child, result = run.start("rounds", connector={"host_bytes": "900TiB"})
    assert child.wait(DEADLINE_S) != 0
    assert not result.exists()
    assert (
        "ConfigError: host_bytes=989560464998400 (900 TiB): this machine has" in result.with_suffix(".log").read_text()
    )

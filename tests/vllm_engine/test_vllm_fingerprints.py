"""What the fingerprint covers, for settings that vLLM itself makes of its arguments."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_harness import POOL, Run, Runner

from kvoffload.tiers.identity import describe_difference

pytestmark = pytest.mark.vllm

DISK = POOL | {"disk_dir": "/var/cache/kvoffload", "disk_bytes": "1GiB"}
TIERS = POOL | {"tiers": [{"kind": "disk", "dir": "/var/cache/kvoffload", "bytes": "1GiB"}]}
QUANTIZED = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def quantized(**changes: Any) -> dict[str, Any]:
    return {"flags": {"hf_overrides": {"quantization_config": QUANTIZED | changes}}}


def quantized_at_start(**changes: Any) -> dict[str, Any]:
    return {"flags": {"quantization": "int8_per_channel_weight_only", "dtype": "bfloat16"} | changes}


def images(**settings: Any) -> dict[str, Any]:
    return {"changes": {"model_config.multimodal_config": settings}}


def of_options(**options: Any) -> dict[str, Any]:
    return {"options": DISK | options}


def longrope(max_model_len: int) -> dict[str, Any]:
    rope = {"rope_type": "longrope"}
    changes = {"model_config.hf_config.rope_parameters": rope, "model_config.max_model_len": max_model_len}
    return {"changes": changes}


OTHERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "quantized by the model's configuration": quantized(),
    "quantization without another layer": quantized(ignore=["lm_head", "model.layers.0.mlp.down_proj"]),
    "quantized at start": quantized_at_start(),
    "quantized at start without another layer": quantized_at_start(
        quantization_config={"ignore": ["model.layers.0.mlp.down_proj"]}
    ),
    "another RoPE base": {"flags": {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 17}}}},
    "another number of layers": {"flags": {"hf_overrides": {"num_hidden_layers": 1}}},
    "other code of the model": {"flags": {"model_impl": "transformers"}},
    "code in the model's folder": {"files": {"modeling_own.py": "scale = 1"}},
    "other code in the model's folder": {"files": {"modeling_own.py": "scale = 2"}},
    "trusted code in the model's folder": {
        "files": {"modeling_own.py": "scale = 2"},
        "flags": {"trust_remote_code": True},
    },
    "scales beside the weights": {"files": {"hf_quant_config.json": "{}"}},
    "weights in another format": {"files": {"pytorch_model.bin": "weights"}, "flags": {"load_format": "pt"}},
    "other weights in that format": {"files": {"pytorch_model.bin": "Weights"}, "flags": {"load_format": "pt"}},
    "random weights": {"flags": {"load_format": "dummy"}},
    # vLLM does not draw integers: they keep what the memory held.
    "quantized dummy weights": quantized_at_start(load_format="dummy"),
    "quantized dummy weights in another process": quantized_at_start(load_format="dummy"),
    "a format of the cache": {"flags": {"kv_cache_dtype": "fp8_e5m2"}},
    "a dtype": {"flags": {"dtype": "bfloat16"}},
    "images": images(),
    "pruned videos": images(video_pruning_rate=0.5),
    "more pruned videos": images(video_pruning_rate=0.75),
    "media reading": images(media_io_kwargs={"video": {"num_frames": 8}}),
    "image preprocessing": images(mm_processor_kwargs={"do_normalize": False}),
    "a kernel with another precision": {"environment": {"VLLM_FLOAT32_MATMUL_PRECISION": "medium"}},
    "a fingerprint of the user": of_options(model_fingerprint="v1"),
    "another fingerprint of the user": of_options(model_fingerprint="v2"),
    "weights from elsewhere with a fingerprint of the user": {
        "flags": {"load_format": "tensorizer"},
        **of_options(model_fingerprint="v3"),
    },
    "a hash seed": {"changes": {"PYTHONHASHSEED": "1"}},
    "another hash seed": {"changes": {"PYTHONHASHSEED": "2"}},
    "a hash algorithm": {"flags": {"prefix_caching_hash_algo": "sha256_cbor"}},
    "a fast algorithm and a seed": {
        "changes": {"cache_config.prefix_caching_hash_algo": "xxhash", "PYTHONHASHSEED": "1"}
    },
    "a length with scaling factors of its own": longrope(64),
    "another length with scaling factors of its own": longrope(128),
    # This must be last, because vLLM never undoes it.
    "a class for the model": {
        "flags": {"model_class_overrides": {"LlamaForCausalLM": "vllm.model_executor.models.llama:LlamaForCausalLM"}}
    },
}
"""Settings that change KV. All fingerprints must differ."""
SAME: dict[str, tuple[str, dict[str, Any]]] = {
    "the same settings": ("plain", {}),
    "quantized again": ("quantized by the model's configuration", quantized()),
    "quantized at start again": ("quantized at start", quantized_at_start()),
    "random weights again": ("random weights", OTHERS["random weights"]),
    "another max_model_len": ("plain", {"flags": {"max_model_len": 64}}),
    "another size of the device cache": ("plain", {"flags": {"num_gpu_blocks_override": 77}}),
    "another share of device memory": ("plain", {"flags": {"gpu_memory_utilization": 0.3}}),
    "another step size": ("plain", {"flags": {"max_num_batched_tokens": 4096, "max_num_seqs": 7}}),
    "without compilation": ("plain", {"flags": {"enforce_eager": True}}),
    "another served_model_name": ("plain", {"flags": {"served_model_name": "other"}}),
    "sampling settings": ("plain", {"flags": {"override_generation_config": {"temperature": 0.5}, "seed": 7}}),
    "another chat template": ("plain", {"files": {"chat_template.jinja": "{{ x }}"}}),
    "other ports": ("plain", {"environment": {"VLLM_PORT": "12345", "VLLM_NIXL_SIDE_CHANNEL_PORT": "6789"}}),
    "other processors": ("plain", {"environment": {"VLLM_CPU_OMP_THREADS_BIND": "0"}}),
    "the disk in its long form": ("plain", {"options": TIERS}),
    "another path of the model": ("plain", {"changes": {"model_config.hf_config._name_or_path": "/somewhere/else"}}),
    "another host_bytes": ("plain", of_options(host_bytes="32MiB")),
    "another image limit": ("images", images(limit_per_prompt={"image": 3}, mm_processor_cache_gb=1)),
}
"""Settings that do not change KV, each with the case that has the same fingerprint."""
UNKNOWN: dict[str, dict[str, Any]] = {
    "weights from elsewhere": {"flags": {"load_format": "tensorizer"}},
}


@pytest.fixture(scope="module")
def fingerprints(run: Runner, tmp_path_factory: pytest.TempPathFactory) -> Run:
    cases = {**OTHERS, **{name: case for name, (_, case) in SAME.items()}, **UNKNOWN}
    encoder = tmp_path_factory.mktemp("encoder")
    (encoder / "config.json").write_text("{}")
    for name, weights in {"an encoder": "one", "another encoder": "two", "an encoder again": "one"}.items():
        cases[name] = {
            "files": {str(encoder / "model.safetensors"): weights},
            "flags": {"hf_overrides": {"audio_model_id": str(encoder)}},
        }
    cases["without a disk"] = {"options": POOL, "files": {"broken.safetensors": ""}}
    cases["without a disk, other weights"] = {"options": POOL, "files": {"broken.safetensors": "x"}}
    return run("configurations", cases={name: {"options": DISK} | case for name, case in cases.items()})


def test_settings_that_shape_kv_change_the_fingerprint(fingerprints: Run) -> None:
    assert {name: said for name, said in fingerprints["said"].items() if said and name not in UNKNOWN} == {}
    made = {name: fingerprints["fingerprints"][name] for name in OTHERS}
    groups: dict[str, list[str]] = {}
    for name, text in made.items():
        groups.setdefault(text, []).append(name)
    assert [names for names in groups.values() if len(names) > 1] == []


@pytest.mark.parametrize("case", SAME)
def test_other_settings_do_not(fingerprints: Run, case: str) -> None:
    made, identities = fingerprints["fingerprints"], fingerprints["identities"]
    assert made[case] == made[SAME[case][0]]
    assert describe_difference(identities[case], identities[SAME[case][0]]) == NOTHING


def test_ranks_that_share_a_pool_count_once(fingerprints: Run) -> None:
    """A block has one part per pool. Without shared pools the text is what it was before there were any."""
    layers = [["layer", 64, "format"]]
    assert fingerprints["ranks"] == {"a pool per rank": [layers, layers], "a pool for both ranks": [layers]}


PARTS = (
    "additional attention_config cache cache_dtype cache_toggles device draft dtype engine engram_config environment "
    "groups hash_algorithm hash_block_size hash_root kernel_config layout load_format lora_config max_model_len model "
    "multimodal parallel quantization ranks weights"
)
NOTHING = "something that the two descriptions leave out"
DIFFERENCES = {
    "a dtype": "dtype is bfloat16 there, float32 here",
    "a format of the cache": "dtype of the KV cache is fp8_e5m2 there, auto here",
    "quantized at start": "quantization is int8_per_channel_weight_only there, None here",
    "another number of layers": "other model configuration there",
    "weights in another format": "other weights there",
    "images": "other multimodal settings there",
    "a kernel with another precision": "variables set for vLLM: VLLM_FLOAT32_MATMUL_PRECISION there, nothing more here",
    "a fingerprint of the user": "weights is given:v1 there",
}
"""What people read about some of OTHERS, among more, if the model is also served with the settings of "plain"."""


def test_blocks_on_disk_survive_an_upgrade(fingerprints: Run) -> None:
    """A fingerprint has these parts. Each part that comes, goes or gets another name makes all disk caches useless: it
    must be worth that, as other bytes or other hashes of blocks are."""
    assert fingerprints["parts"] == PARTS.split()


@pytest.mark.parametrize("case", DIFFERENCES)
def test_an_identity_says_in_words_what_differs(fingerprints: Run, case: str) -> None:
    identities = fingerprints["identities"]
    assert DIFFERENCES[case] in describe_difference(identities["plain"], identities[case])


def test_an_identity_covers_every_part_of_the_fingerprint(fingerprints: Run) -> None:
    assert fingerprints["unsaid"] == []
    identities = fingerprints["identities"]
    for case in OTHERS:
        said = describe_difference(identities["plain"], identities[case])
        assert (said == NOTHING) == (case == "plain"), case


def test_an_identity_has_no_values_of_variables(fingerprints: Run) -> None:
    """They may be secrets. Digests and names are enough to find what differs."""
    identity = fingerprints["identities"]["a kernel with another precision"]
    assert "VLLM_FLOAT32_MATMUL_PRECISION" in identity["variables set for vLLM"]
    assert [name for name, value in identity.items() if "medium" in value] == []


def test_weights_of_another_model_that_its_configuration_names_count(fingerprints: Run) -> None:
    made = fingerprints["fingerprints"]
    assert made["an encoder"] == made["an encoder again"]
    assert len({made[name] for name in ("plain", "an encoder", "another encoder")}) == 3


def test_weights_that_nothing_identifies_are_refused(fingerprints: Run) -> None:
    kind, said = fingerprints["said"]["weights from elsewhere"]
    assert kind == "ConfigError"
    for part in ("load_format=tensorizer", 'set model_fingerprint="..."'):
        assert part in said


def test_without_a_disk_no_weights_are_read(fingerprints: Run) -> None:
    """Blocks do not outlive the process that has loaded the weights."""
    made = fingerprints["fingerprints"]
    assert made["without a disk"] == made["without a disk, other weights"]

"""The cost of a token, compared with published figures of models; and TTFT, compared with sums computed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import ConfigError
from kvoffload.lab.capacity import parse_capacity
from kvoffload.lab.latency import Speeds, ttft_seconds
from kvoffload.lab.model import DEFAULT_MODEL, ModelShape
from tests.lab.traces import LLAMA, make_trace

DEEPSEEK_V3: dict[str, Any] = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}
QWEN3_30B_A3B: dict[str, Any] = {
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "dtype": "bfloat16",
}


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def test_grouped_query_attention() -> None:
    shape = ModelShape.from_config(LLAMA)
    assert shape == DEFAULT_MODEL
    assert shape.bytes_per_token == 32 * 2 * 8 * 128 * 2 == 131_072
    # 8.03 billion parameters, less embedding and head of 128,256 x 4,096 each.
    assert shape.linear_flops_per_token == pytest.approx(2 * (8.03e9 - 2 * 128_256 * 4096), rel=0.001)
    assert shape.attention_flops_per_pair == 4 * 32 * 32 * 128
    assert shape.notes == ()
    assert ModelShape.from_config(without(LLAMA, "num_key_value_heads")).bytes_per_token == 4 * 131_072
    assert ModelShape.from_config({**LLAMA, "head_dim": 64}).bytes_per_token == 131_072 / 2
    assert ModelShape.from_config(QWEN3_30B_A3B).bytes_per_token == 48 * 2 * 4 * 128 * 2


def test_latent_attention_keeps_one_vector_for_all_heads() -> None:
    shape = ModelShape.from_config(DEEPSEEK_V3)
    assert shape.bytes_per_token == 61 * (512 + 64) * 2 == 70_272
    # 37 billion active, 1.85 of them embedding and head.
    assert shape.linear_flops_per_token == pytest.approx(2 * (37e9 - 2 * 129_280 * 7168), rel=0.02)
    assert shape.attention_flops_per_pair == 61 * 2 * 128 * (128 + 64 + 128)


def test_a_mixture_counts_only_the_experts_of_a_token() -> None:
    shape = ModelShape.from_config(QWEN3_30B_A3B)
    assert shape.linear_flops_per_token == pytest.approx(2 * (3.3e9 - 2 * 151_936 * 2048), rel=0.05)
    every = ModelShape.from_config({**QWEN3_30B_A3B, "num_experts_per_tok": 128})
    assert every.linear_flops_per_token > 8 * shape.linear_flops_per_token


def test_the_language_model_in_a_multi_modal_config() -> None:
    nested = {"model_type": "llava", "torch_dtype": "float32", "text_config": without(LLAMA, "torch_dtype")}
    assert ModelShape.from_config(nested).bytes_per_token == 2 * 131_072
    inner = {**nested, "text_config": LLAMA}
    assert ModelShape.from_config(inner).bytes_per_token == 131_072


def test_dtypes() -> None:
    for dtype, factor in (("float16", 1.0), ("float32", 2.0), ("torch.bfloat16", 1.0)):
        config = {**without(LLAMA, "torch_dtype"), "dtype": dtype}
        assert ModelShape.from_config(config).bytes_per_token == factor * 131_072
        assert ModelShape.from_config(config, dtype_bytes=1.0).bytes_per_token == 131_072 / 2
    with pytest.raises(ConfigError, match="dtype='float8_e4m3': unknown; give the dtype of the KV cache"):
        ModelShape.from_config({**LLAMA, "dtype": "float8_e4m3"})
    assumed = ModelShape.from_config(without(LLAMA, "torch_dtype"))
    assert assumed.bytes_per_token == 131_072
    assert "2 bytes" in assumed.notes[0]


GEMMA_SIZES: dict[str, Any] = {
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 64,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "torch_dtype": "float32",
}


@pytest.mark.parametrize(
    ("more", "nbytes"),
    [
        # Gemma 3n: four layers have KV of their own.
        ({"intermediate_size": [256] * 4 + [384] * 2}, 4 * 2 * 2 * 32 * 4),
        # Gemma 4: the only layer with full attention among them has one head of 64.
        ({"global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True}, (3 * 2 * 32 + 64) * 2 * 4),
        (
            {"global_head_dim": 64, "per_layer_config": {"2": {"head_dim": 64, "num_key_value_heads": 1}}},
            (3 * 2 * 32 + 64) * 2 * 4,
        ),
        ({"num_key_value_heads": [1, 2, 1, 2, 4, 4]}, 6 * 2 * 32 * 4),
    ],
)
def test_layers_that_differ(more: dict[str, Any], nbytes: int) -> None:
    """The sizes of the first three are those that vLLM allocates for such layers."""
    shape = ModelShape.from_config({"intermediate_size": 256, **GEMMA_SIZES, **more})
    assert shape.bytes_per_token == nbytes
    assert "2 of 6 layers use the KV of earlier ones" in shape.notes[0]
    same = ModelShape.from_config({"intermediate_size": 256, **GEMMA_SIZES})
    mlps = [256] * 4 + [384] * 2
    added = ModelShape.from_config({**GEMMA_SIZES, "intermediate_size": mlps}).linear_flops_per_token
    assert added - same.linear_flops_per_token == 2 * 2 * 3 * 128 * 128


def test_sliding_windows_are_an_upper_bound_of_bytes_but_not_of_attention() -> None:
    types = ["full_attention" if i % 4 == 3 else "sliding_attention" for i in range(32)]
    shape = ModelShape.from_config({**LLAMA, "layer_types": types, "sliding_window": 1024})
    full = ModelShape.from_config(LLAMA)
    assert shape.bytes_per_token == full.bytes_per_token
    assert shape.attention_flops_per_pair == full.attention_flops_per_pair / 4
    assert shape.prefill_flops(0.0, 100_000.0) < full.prefill_flops(0.0, 100_000.0)
    assert "24 of 32 layers" in shape.notes[0]
    assert "upper bound" in shape.notes[0]
    unused = ModelShape.from_config({**LLAMA, "sliding_window": 1024, "use_sliding_window": False})
    assert unused == full


@pytest.mark.parametrize(
    "more",
    [
        {"layer_types": ["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"] * 28},
        {"hybrid_override_pattern": "M*" + "M" * 30},
        {"attn_layer_period": 32, "attn_layer_offset": 5},
        {"full_attention_interval": 32},
    ],
)
def test_layers_with_a_state_add_nothing_per_token(more: dict[str, Any]) -> None:
    shape = ModelShape.from_config({**LLAMA, **more})
    assert shape.bytes_per_token == 131_072 / 32
    assert "31 of 32 layers keep a state" in shape.notes[0]


def test_missing_invalid_and_inconsistent_sizes_are_named() -> None:
    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
        with pytest.raises(ConfigError, match=f"{name} is missing.*; add it"):
            ModelShape.from_config(without(LLAMA, name))
    for value in (0, -1, "32", 1.5, True, 10**12, 10**400):
        with pytest.raises(ConfigError, match=f"num_hidden_layers={repr(value)[:40]}.*: must be a whole number"):
            ModelShape.from_config({**LLAMA, "num_hidden_layers": value})
    with pytest.raises(ConfigError, match="layer_types has 3 entries for 32 layers"):
        ModelShape.from_config({**LLAMA, "layer_types": ["full_attention"] * 3})
    with pytest.raises(ConfigError, match=r"hidden_size=4100 is not a multiple.*add head_dim"):
        ModelShape.from_config({**LLAMA, "hidden_size": 4100})
    with pytest.raises(ConfigError, match=r"intermediate_size=\[1, 2\]: must be .* or a list with one per layer"):
        ModelShape.from_config({**GEMMA_SIZES, "intermediate_size": [1, 2]})


def test_config_files(tmp_path: Path) -> None:
    directory = tmp_path / "My-Model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(without(LLAMA, "_name_or_path")))
    assert ModelShape.from_config(directory).name == "My-Model"
    assert ModelShape.from_config(str(directory / "config.json")).bytes_per_token == 131_072
    with pytest.raises(ConfigError, match=r"No such file.*give a model's config\.json"):
        ModelShape.from_config(tmp_path / "none")
    for content in ("{", "[]", "\xff"):
        (directory / "config.json").write_text(content, encoding="latin-1")
        with pytest.raises(ConfigError, match=r"not (a )?JSON"):
            ModelShape.from_config(directory)


# Time to first token.

MODEL = ModelShape("plain", bytes_per_token=1000.0, linear_flops_per_token=10.0, attention_flops_per_pair=0.0)
SPEEDS = Speeds(prefill_tokens_per_s=100.0, host_bytes_per_s=1e6, disk_bytes_per_s=5e5)
"""A token takes 10 ms to compute, 1 ms to load from the host, and 3 ms to load from disk."""


def ttft(prompt: int, device: int = 0, host: int = 0, disk: int = 0, speeds: Speeds = SPEEDS) -> float:
    arrays = (np.array([tokens]) for tokens in (prompt, device, host, disk))
    return float(ttft_seconds(MODEL, speeds, *arrays)[0])


def test_found_tokens_are_loaded_and_the_rest_computed() -> None:
    assert ttft(100) == pytest.approx(1.0)
    assert ttft(100, device=100) == pytest.approx(0.01), "at least one token is computed"
    assert ttft(0) == 0.0
    assert ttft(100, device=40) == pytest.approx(0.6)
    assert ttft(100, host=40) == pytest.approx(0.04 + 0.6)
    assert ttft(100, device=10, host=40, disk=30) == pytest.approx(0.04 + 0.09 + 0.2)


# Capacities.

SMALL = ModelShape("small", 64.0, 1.0, 1.0)
TRACE = make_trace("made", 16, [0.0], [16 * 1999], [0], [range(1999)])
"""1,999 distinct blocks of 1 KiB."""


def test_valid_capacities() -> None:
    amounts = {"1%": 19, "0.001%": 1, "100%": 1999, " 12.5 % ": 249, "5859": 5859}
    amounts |= {"1KiB": 1, "2047 B": 1, "1.5MiB": 1536, "1MB": 976}
    assert {text: parse_capacity(text, TRACE, SMALL) for text in amounts} == amounts


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("0%", "more than 0%"),
        ("101%", "at most 100%"),
        ("0", "must be 1 to 1099511627776 blocks"),
        ("9" * 14, "must be 1 to 1099511627776 blocks"),
        ("1000B", "too small for one block of 1 KiB"),
        ("-1", "not a capacity"),
        ("1.5", "too small for one block"),
        ("", "not a capacity"),
        ("much", "not a capacity"),
    ],
)
def test_invalid_capacities(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=f"^device='{text}': .*{match}.*; write a percentage of the trace"):
        parse_capacity(text, TRACE, SMALL, "device")

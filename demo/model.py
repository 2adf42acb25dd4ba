"""Writes a small Llama with random weights in Hugging Face's format, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN = 512
INTERMEDIATE = 1408
HEADS = 8
KV_HEADS = 4
HEAD_DIM = HIDDEN // HEADS
VOCAB = 512
SPECIALS = 3
"""Number of special tokens: 0 padding, 1 begin, 2 end. Byte ``b`` is token ``SPECIALS + b``."""
MAX_POSITIONS = 8192
INITIALIZER_RANGE = 0.08
"""Four times the usual value: with smaller weights a random model repeats one token regardless of its input."""

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 8,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": INITIALIZER_RANGE,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_model(directory: Path, seed: int, config: Mapping[str, Any] = CONFIG) -> int:
    """Writes ``config.json`` and ``model.safetensors`` into ``directory``. Returns the number of weights.

    ``config`` may have another number of layers. The same seed gives the same bytes on every machine.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors = {
        name: np.ones(shape, dtype=np.float32)
        if len(shape) == 1
        else rng.standard_normal(shape, dtype=np.float32) * np.float32(INITIALIZER_RANGE)
        for name, shape in _shapes(config["num_hidden_layers"]).items()
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _write_safetensors(directory / "model.safetensors", tensors)
    return sum(t.size for t in tensors.values())


def write_tokenizer(directory: Path, template: str | None = None) -> None:
    """Writes a tokenizer for the model in ``directory``, for which each byte of a text is a token, with ``template`` as
    its chat template. Needs the package tokenizers, which vLLM brings."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: SPECIALS + i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({"chat_template": template} if template else {})
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def kv_bytes_per_token(directory: Path) -> int | None:
    """Returns the bytes of float32 KV per token, from ``config.json``; None if fields are missing."""
    config = _config(directory)
    try:
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        return int(2 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * head_dim * 4)
    except (KeyError, TypeError):
        return None


def max_positions(directory: Path) -> int | None:
    """Returns the longest sequence of the model, from ``config.json``; None if the field is missing."""
    length = _config(directory).get("max_position_embeddings")
    return length if isinstance(length, int) else None


def _config(directory: Path) -> dict[str, Any]:
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    text: dict[str, Any] = config.get("text_config", config)
    return text


def _shapes(layers: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for i in range(layers):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": (HIDDEN,),
            layer + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            layer + "post_attention_layernorm.weight": (HIDDEN,),
            layer + "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            layer + "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            layer + "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    return shapes | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}


def _write_safetensors(path: Path, tensors: dict[str, np.ndarray[Any, np.dtype[np.float32]]]) -> None:
    """Writes the safetensors format: length of the header as u64, the header as JSON, the bytes of the tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little"))
        file.write(raw)
        for tensor in tensors.values():
            file.write(tensor.astype("<f4", copy=False).tobytes())

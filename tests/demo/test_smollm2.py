"""The trained model is converted as it was published: tokens, template, weights in their places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from demo import smollm2

LAYERS, HEADS, HEAD = 2, 2, 4
HIDDEN = HEADS * HEAD
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = (*SPECIAL, "a", "b", "ab", "1", "2", "12", "\u0120")
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def weights(name: str, *shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Returns weights that bfloat16 has, and no other tensor."""
    first = sum(name.encode()) % 64
    return (np.arange(np.prod(shape)) % 64 + first).astype(np.float32).reshape(shape)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    gguf = pytest.importorskip("gguf")
    source, made = (tmp_path_factory.mktemp(name) for name in ("package", "model"))
    writer = gguf.GGUFWriter(str(source / "small.gguf"), "llama")
    writer.add_vocab_size(len(WORDS))
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(3)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(HEAD)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(list(WORDS))
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(WORDS) - len(SPECIAL)))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    writer.add_tensor("token_embd.weight", weights("token_embd", len(WORDS), HIDDEN))
    writer.add_tensor("output_norm.weight", weights("output_norm", HIDDEN))
    for layer in range(LAYERS):
        for name in smollm2.LAYER:
            rows = HEAD if name == "attn_k" else HIDDEN
            shape = (HIDDEN,) if name.endswith("norm") else (rows, HIDDEN)
            writer.add_tensor(f"blk.{layer}.{name}.weight", weights(f"{layer}{name}", *shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    smollm2.convert(source / "small.gguf", made)
    return made


def test_tokens_and_template(directory: Path) -> None:
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(directory)
    words = tokenizer.convert_ids_to_tokens(tokenizer.encode("ab12 a<|im_end|>"))
    assert words == ["ab", "1", "2", "\u0120", "a", "<|im_end|>"], "each digit is a token of its own"
    assert tokenizer.decode(tokenizer.encode("ab12 a<|im_end|>"), skip_special_tokens=True) == "ab12 a"
    assert tokenizer.apply_chat_template([{"content": "a"}], tokenize=False) == "<|im_start|>a<|im_end|>"
    assert tokenizer.eos_token_id == json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == 2


def test_weights_are_in_their_places(directory: Path) -> None:
    tensors = pytest.importorskip("safetensors.torch").load_file(directory / "model.safetensors")
    assert len(tensors) == 2 + LAYERS * len(smollm2.LAYER)
    for layer in range(LAYERS):
        for name, theirs in smollm2.LAYER.items():
            if name not in ("attn_q", "attn_k"):
                found = tensors[f"model.layers.{layer}.{theirs}.weight"].float().numpy()
                assert (found == weights(f"{layer}{name}", *found.shape)).all()
    # Hugging Face rotates number i of a head with number i + HEAD / 2, GGUF with the next one.
    queries = tensors["model.layers.0.self_attn.q_proj.weight"].float().numpy()
    rows = weights("0attn_q", HIDDEN, HIDDEN)
    assert (queries == rows[[0, 2, 1, 3, 4, 6, 5, 7]]).all()
    assert not (queries == rows).all()

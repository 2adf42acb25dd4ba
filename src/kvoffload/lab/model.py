"""The cost of a token in a model, from its config.json: bytes of KV cache and FLOPs of prefill."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy.typing as npt

from kvoffload.abc import NOT_SET, ConfigError
from kvoffload.abc.shown import MAX_SHOWN
from kvoffload.config import OTHER_LAYERS
from kvoffload.printable import printable

DTYPE_BYTES = {
    "float32": 4.0,
    "float16": 2.0,
    "bfloat16": 2.0,
    "fp8": 1.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "int8": 1.0,
    "int4": 0.5,
}
"""Bytes per number, by the names that models and engines use."""

MAX_NUMBER = 1 << 24
"""No number in a config.json that this module uses is higher."""
MAX_CONFIG_BYTES = 16 << 20

ALIASES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "multi_query_group_num"),
    "head_dim": ("kv_channels",),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "num_experts_per_tok": ("experts_per_token", "moe_topk"),
    "decoder_sparse_step": ("interleave_moe_layer_step",),
    "num_experts": ("num_local_experts", "n_routed_experts"),
}
"""Other names of a field, by its most common name."""

PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Sections in which multi-modal models keep the fields of their language model."""

UNGATED = frozenset({"gpt2", "gpt_bigcode", "gpt_neox", "gptj", "opt", "bloom", "falcon", "mpt", "phi", "starcoder2"})
"""Model types whose MLP has two matrices instead of three."""


class LayerKind(Enum):
    """How far back the tokens of a layer attend."""

    FULL = auto()
    SLIDING = auto()
    STATE = auto()
    """Not at all: the layer keeps a state of fixed size."""


Amount = TypeVar("Amount", float, npt.NDArray[Any])


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The cost of a token in a model."""

    name: str
    bytes_per_token: float
    """KV cache of all layers and ranks together."""
    linear_flops_per_token: float
    """FLOPs of the layers' matrices: two per parameter that a token passes through. Embedding and output head are left
    out: prefill only looks up the first, and applies the second only to the last token."""
    attention_flops_per_pair: float
    """FLOPs per pair of query and key, in all layers whose tokens attend to the whole prompt."""
    notes: tuple[str, ...] = ()
    """The assumptions that were made, one sentence each."""
    why_inclusive: str | None = None
    """Why the host memory of a server must repeat what the device holds; None if it need not."""

    def prefill_flops(self, start: Amount, end: Amount) -> Amount:
        """Returns the FLOPs to compute tokens [start, end) of a prompt whose first ``start`` tokens have their KV.
        Takes numbers or arrays."""
        pairs = (end * end - start * start) / 2
        flops: Amount = self.linear_flops_per_token * (end - start) + self.attention_flops_per_pair * pairs
        return flops

    @classmethod
    def from_config(cls, source: str | Path | Mapping[str, Any], dtype_bytes: float | None = None) -> ModelShape:
        """Returns the shape for a Hugging Face config.json: its path, its directory, or its content. ``dtype_bytes``:
        bytes per number in the KV cache, if it does not use the model's dtype.

        Every token counts with its KV in all attention layers. For sliding windows that is an upper bound, because an
        engine may free tokens outside the window. Layers with a state of fixed size (Mamba, linear attention) add
        nothing. Raises ConfigError.
        """
        if isinstance(source, Mapping):
            return _shape(source, "config", "model", dtype_bytes)
        path = Path(source)
        name, path = (path.resolve().name, path / "config.json") if path.is_dir() else (path.stem, path)
        return _shape(_read(path), str(path), name, dtype_bytes)


DEFAULT_MODEL = ModelShape("Llama-3.1-8B", 131_072.0, 13_958_643_712.0, 524_288.0)
"""bfloat16: 32 layers, 32 query and 8 KV heads of 128, hidden size 4,096, MLP of 14,336."""


def _read(path: Path) -> Mapping[str, Any]:
    fix = "give a model's config.json, or the directory it is in"
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error.strerror) if isinstance(error, OSError) else f"not JSON ({error})"
        raise ConfigError("model", str(path), reason, fix) from error
    if not isinstance(content, Mapping):
        raise ConfigError("model", str(path), "not a JSON object", fix)
    return content


@dataclass(frozen=True, slots=True)
class _Config:
    """A config whose fields are checked when they are read."""

    fields: Mapping[str, Any]
    where: str

    def fault(self, text: str, fix: str = "correct the file") -> ConfigError:
        return ConfigError(self.where, NOT_SET, text, fix)

    def has(self, name: str) -> bool:
        return any(self.fields.get(each) is not None for each in (name, *ALIASES.get(name, ())))

    def of_layer(self, index: int, layers: int) -> _Config:
        """Returns the config of one layer: of each list with an entry per layer, that entry; and its own fields in
        ``per_layer_config``."""
        lists = {
            name: value[index]
            for name, value in self.fields.items()
            if isinstance(value, list) and len(value) == layers
        }
        each = self.fields.get("per_layer_config")
        own = each.get(str(index)) if isinstance(each, Mapping) else None
        return _Config({**self.fields, **lists, **(own if isinstance(own, Mapping) else {})}, self.where)

    def number(self, name: str, default: int | None = None) -> int:
        """Returns a whole number, 1 or more (0 or more if ``default`` is 0). Raises ConfigError if it is missing or
        invalid."""
        for each in (name, *ALIASES.get(name, ())):
            value = self.fields.get(each)
            if value is None:
                continue
            least = 0 if default == 0 else 1
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_NUMBER:
                shown = printable(repr(value), MAX_SHOWN)
                most = f"{MAX_NUMBER:,}, or a list with one per layer"
                raise self.fault(f"{each}={shown}: must be a whole number from {least} to {most}")
            return value
        if default is None:
            fix = "add it, or give the config.json of the language model itself"
            raise self.fault(f"{name} is missing, so the KV bytes per token are unknown", fix)
        return default


def _shape(content: Mapping[str, Any], where: str, default_name: str, dtype_bytes: float | None) -> ModelShape:
    name = content.get("_name_or_path") or default_name
    fields = content
    for part in PARTS:
        inner = fields.get(part)
        if isinstance(inner, Mapping):
            fields = {**inner, "dtype": _dtype(inner) or _dtype(fields)}
    config = _Config(fields, where)
    layers = config.number("num_hidden_layers")
    notes: list[str] = []
    if dtype_bytes is None:
        dtype_bytes = _dtype_bytes(config, notes)
    kinds = _layer_kinds(config, layers)
    costs = [_attention(config.of_layer(i, layers), kind) for i, kind in enumerate(kinds)]
    if LayerKind.STATE in kinds:
        notes.append(
            f"{kinds.count(LayerKind.STATE)} of {layers} layers keep a state of fixed size, which is not counted."
        )
    # The last layers may use the KV of earlier ones.
    own = max(0, layers - config.number("num_kv_shared_layers", 0))
    if own < layers:
        notes.append(f"{layers - own} of {layers} layers use the KV of earlier ones, and add none.")
    kept = sum(kind is not LayerKind.STATE for kind in kinds[:own])
    numbers = sum(cost.numbers for cost in costs[:own])
    extra = 0.0
    if config.has("index_head_dim"):
        # The keys by which sparse attention selects tokens: one byte per number, and one scale.
        extra = kept * (config.number("index_head_dim") + 4.0)
        notes.append("Sparse attention is counted as if every token attended to the whole prompt.")
    sliding = kinds.count(LayerKind.SLIDING)
    windows = 0.0
    if sliding:
        window = config.number("attention_chunk_size" if not config.has("sliding_window") else "sliding_window")
        windows = float(window * sum(cost.per_pair for cost in costs if cost.kind is LayerKind.SLIDING))
        notes.append(
            f"{sliding} of {layers} layers attend to at most {window:,} tokens; their KV is counted for every token, "
            "an upper bound."
        )
    pairs = sum(cost.per_pair for cost in costs if cost.kind is LayerKind.FULL)
    parameters = sum(cost.parameters for cost in costs) + _mlp_parameters(config, layers)
    return ModelShape(
        str(name),
        numbers * dtype_bytes + extra,
        2.0 * parameters + windows,
        float(pairs),
        tuple(notes),
        None if set(kinds) == {LayerKind.FULL} else OTHER_LAYERS,
    )


def _dtype(fields: Mapping[str, Any]) -> Any:
    return fields.get("dtype") or fields.get("torch_dtype")


def _dtype_bytes(config: _Config, notes: list[str]) -> float:
    dtype = _dtype(config.fields)
    if dtype is None:
        notes.append("The config has no dtype: 2 bytes per number are assumed.")
        return 2.0
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise config.fault(
            f"dtype={dtype!r}: unknown", f"give the dtype of the KV cache: one of {', '.join(DTYPE_BYTES)}"
        )
    return DTYPE_BYTES[name]


def _layer_kinds(config: _Config, layers: int) -> list[LayerKind]:
    types = config.fields.get("layer_types") or config.fields.get("layers_block_type")
    if isinstance(types, list):
        if len(types) != layers:
            raise config.fault(f"layer_types has {len(types)} entries for {layers} layers")
        return [_kind(str(each)) for each in types]
    pattern = config.fields.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return [LayerKind.FULL if each == "*" else LayerKind.STATE for each in pattern]
    period = config.number("attn_layer_period", 0) or config.number("full_attention_interval", 0)
    if period:
        offset = config.number("attn_layer_offset", 0) if config.has("attn_layer_offset") else period - 1
        return [LayerKind.FULL if i % period == offset else LayerKind.STATE for i in range(layers)]
    if not config.has("sliding_window") or config.fields.get("use_sliding_window") is False:
        return [LayerKind.FULL] * layers
    period = config.number("sliding_window_pattern", 0)
    return [LayerKind.FULL if period and (i + 1) % period == 0 else LayerKind.SLIDING for i in range(layers)]


def _kind(layer_type: str) -> LayerKind:
    if "sliding" in layer_type or "chunked" in layer_type:
        return LayerKind.SLIDING
    if layer_type == "attention" or "full" in layer_type or "global" in layer_type:
        return LayerKind.FULL
    return LayerKind.STATE


class _LayerCost(NamedTuple):
    """What the attention of one layer costs: KV numbers per token, FLOPs per pair of query and key, parameters."""

    kind: LayerKind
    numbers: int
    per_pair: int
    parameters: int


def _attention(config: _Config, kind: LayerKind) -> _LayerCost:
    heads = config.number("num_attention_heads")
    hidden = config.number("hidden_size")
    if config.has("kv_lora_rank"):
        # Multi-head latent attention (DeepSeek-V2): one compressed vector for all heads, and one rotary key.
        rank, rotary = config.number("kv_lora_rank"), config.number("qk_rope_head_dim")
        plain, value = config.number("qk_nope_head_dim"), config.number("v_head_dim")
        query = heads * (plain + rotary)
        low = config.number("q_lora_rank", 0)
        queries = hidden * low + low * query if low else hidden * query
        parameters = queries + hidden * (rank + rotary) + rank * heads * (plain + value) + heads * value * hidden
        numbers = 0 if kind is LayerKind.STATE else rank + rotary
        return _LayerCost(kind, numbers, 2 * heads * (plain + rotary + value), parameters)
    # Gemma 4: layers with full attention have heads of another size, and may have another number of them.
    is_global = kind is LayerKind.FULL and config.has("global_head_dim") and not config.has("per_layer_config")
    if is_global:
        size = config.number("global_head_dim")
    elif config.has("head_dim"):
        size = config.number("head_dim")
    else:
        size, rest = divmod(hidden, heads)
        if rest:
            raise config.fault(f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}", "add head_dim")
    one_head = config.fields.get("multi_query") is True and not config.fields.get("new_decoder_architecture")
    kv_heads = (
        1 if one_head and not config.has("multi_query_group_num") else config.number("num_key_value_heads", heads)
    )
    if is_global and config.fields.get("attention_k_eq_v") is True:
        kv_heads = config.number("num_global_key_value_heads", kv_heads)
    numbers = 0 if kind is LayerKind.STATE else 2 * kv_heads * size
    return _LayerCost(kind, numbers, 4 * heads * size, 2 * hidden * size * (heads + kv_heads))


def _mlp_parameters(config: _Config, layers: int) -> int:
    """Returns the MLP parameters of all layers that a token passes through: with a mixture of experts, those of the
    selected and the shared experts."""
    hidden = config.number("hidden_size")
    matrices = 2 if config.fields.get("model_type") in UNGATED else 3
    if not config.has("num_experts_per_tok") or not config.has("num_experts"):
        sizes = (config.of_layer(i, layers).number("intermediate_size", 4 * hidden) for i in range(layers))
        return matrices * hidden * sum(sizes)
    dense = config.number("intermediate_size", 4 * hidden)
    expert = config.number("moe_intermediate_size", dense)
    shared = config.number("shared_expert_intermediate_size", 0) or config.number("n_shared_experts", 0) * expert
    active = config.number("num_experts_per_tok") * expert + shared
    first = min(config.number("first_k_dense_replace", 0), layers)
    step = config.number("decoder_sparse_step", 1)
    sparse = (layers - first) // step
    return matrices * hidden * (sparse * active + (layers - sparse) * dense)

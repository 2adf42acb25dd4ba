"""Checks a model by its config.json alone: whether kvoffload serves it, and how many tokens fit where."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvoffload.abc import ConfigError
from kvoffload.digests import user_folder
from kvoffload.doctor.configuration import Plan
from kvoffload.doctor.directories import LAYER_KINDS, MEMORY_KINDS, mount_of
from kvoffload.doctor.doors import Door
from kvoffload.doctor.findings import Figure, Finding, Level
from kvoffload.doctor.process import Report
from kvoffload.host.pool import padded_slot_bytes
from kvoffload.lab.model import MAX_CONFIG_BYTES, PARTS, LayerKind, ModelShape
from kvoffload.units import counted, format_bytes

DEVICE_BLOCK_TOKENS = 16
"""vLLM's usual block size."""
PROMOTION_PART = 2
"""Blocks from lower tiers take at most one part in so many of host memory."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
LOST_KINDS = (*LAYER_KINDS, *MEMORY_KINDS)
"""File systems that end with a container."""
ENCODER_TYPES = frozenset(
    {"bert", "roberta", "xlm-roberta", "modernbert", "distilbert", "nomic_bert", "electra", "deberta-v2", "camembert"}
)
RUN_WITHOUT = "run this model without kvoffload"


def find_config(name: str) -> Path:
    """Returns the path of a model's config.json. ``name``: that path; the model's directory; its folder in a Hugging
    Face cache; or "organization/model", if it is in this user's cache.

    Raises ConfigError if there is none.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    candidates = [path] if path.is_dir() else [_hub_cache() / f"models--{name.replace('/', '--')}"]
    for folder in candidates:
        for found in (folder / "config.json", *_snapshots(folder)):
            if found.is_file():
                return found
    where = "has no config.json" if path.is_dir() else f"is neither a path nor in the cache {_hub_cache()}"
    raise ConfigError("--model", name, where, "give the model's directory or its config.json")


def _hub_cache() -> Path:
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()


def _snapshots(folder: Path) -> list[Path]:
    """Returns the configurations in a model's folder of a Hugging Face cache, that of the branch "main" first, then the
    newest."""
    found = sorted(folder.glob("snapshots/*/config.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    main = folder / "refs" / "main"
    if main.is_file():
        wanted = main.read_text().strip()
        found.sort(key=lambda path: path.parent.name != wanted)
    return found


def check(arguments: Mapping[str, Any], report: Report) -> None:
    """Reports findings, and the fact "bytes_per_token". ``arguments``: "path" and "plan"."""
    report.stage(f"reads {arguments['path']}")
    plan, path = Plan.from_dict(arguments["plan"]), Path(arguments["path"])
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(MAX_CONFIG_BYTES))
        if not isinstance(content, Mapping):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        text, fix = f"{path}: cannot be read ({reason})", "give the model's directory or its config.json"
        report.found("model.unreadable", Level.PROBLEM, text, fix)
        return
    support = list(support_findings(content))
    report.finding(*support)
    if any(finding.level is Level.PROBLEM for finding in support):
        return
    try:
        shape = ModelShape.from_config(content)
    except ConfigError as error:
        report.found("model.unknown_shape", Level.WARNING, f"{path.parent.name}: {error.wrong}", error.fix)
        return
    report.fact("bytes_per_token", shape.bytes_per_token)
    _check_weights(path.parent, plan, report)
    report.finding(*room_findings(shape, _language(content), plan))


def support_findings(content: Mapping[str, Any]) -> Iterator[Finding]:
    """Yields whether kvoffload serves a model with this config.json, with the installed version of vLLM if any."""
    language = _language(content)
    refusal = _refusal(content, language)
    if refusal is not None:
        name, text = refusal
        yield Finding(f"model.{name}", Level.PROBLEM, text, RUN_WITHOUT)
        return
    try:
        layers = ModelShape.from_config(content).layers
    except ConfigError:
        return
    kinds = {kind: layers.count(kind) for kind in LayerKind if kind in layers}
    is_latent = language.get("kv_lora_rank") is not None
    words = {
        LayerKind.FULL: "latent attention (MLA)" if is_latent else "full attention",
        LayerKind.SLIDING: "a sliding window or chunks",
        LayerKind.STATE: "a recurrent or convolutional state",
    }
    figures: dict[str, Figure] = {f"{kind.name.lower()}_layers": number for kind, number in kinds.items()}
    names = ", ".join(map(str, content.get("architectures") or [])) or str(content.get("model_type", "the model"))
    text = f"{names}: " + ", ".join(f"{counted(number, 'layer')} with {words[kind]}" for kind, number in kinds.items())
    if LayerKind.STATE in kinds:
        text += ": served, with prefix caching on"
        fix = "do not pass --no-enable-prefix-caching; add --prefix-cache-retention-interval to keep states of outputs"
        yield Finding("model.states", Level.NOTE, text, fix, figures=figures)
    elif is_latent:
        text += ": served on GPUs and on CPUs with AMX; not tested there"
        yield Finding("model.latent", Level.NOTE, text, figures=figures)
    else:
        yield Finding("model.served", Level.OK, f"{text}: served", figures=figures)


def _refusal(content: Mapping[str, Any], language: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns the id of a finding and its text if kvoffload refuses the model."""
    name = ", ".join(map(str, content.get("architectures") or [])) or str(content.get("model_type", "the model"))
    if content.get("is_encoder_decoder") or language.get("cross_attention_layers"):
        return "cross_attention", (
            f"{name} has cross attention: its KV depends on the encoder's input, which the hashes of blocks do not "
            "cover, so a server refuses it"
        )
    if language.get("canvas_length") is not None:
        return "diffusion", f"{name} is a diffusion model, which never computes the KV of some tokens: refused"
    if content.get("model_type") in ENCODER_TYPES:
        return "no_kv", f"{name} is an encoder, which keeps no KV between requests: there is nothing to offload"
    if language.get("is_causal") is False or language.get("use_bidirectional_attention") in (True, "all"):
        return "not_causal", (
            f"{name} attends to later tokens, so its KV depends on more than the prefix that names it: refused"
        )
    if language.get("param_sink_number") or content.get("rswa_window") is not None:
        return (
            "untested_kind",
            f"{name} has attention sinks or reference sliding windows, which are not tested: refused",
        )
    return None


def room_findings(shape: ModelShape, language: Mapping[str, Any], plan: Plan) -> Iterator[Finding]:
    """Yields the bytes of a token and of a block, and the tokens that fit in host memory and in each tier."""
    tokens = plan.block_size or plan.block_size_factor * DEVICE_BLOCK_TOKENS
    block = padded_slot_bytes(round(shape.bytes_per_token * tokens))
    per_token = block / tokens
    figures: dict[str, Figure] = {
        "bytes_per_token": round(shape.bytes_per_token),
        "block_tokens": tokens,
        "block_bytes": block,
    }
    if not per_token:
        return
    text = f"{format_bytes(round(shape.bytes_per_token))} of KV per token, {format_bytes(block)} per block of {tokens}"
    yield Finding("model.bytes", Level.OK, ". ".join([f"{text} tokens", *shape.notes]), figures=figures)
    for setting, amount in plan.shares.items():
        if amount < block:
            text = f"{setting}={amount} ({format_bytes(amount)}): has no room for one block"
            fix = f"write {format_bytes(block)} or more"
            yield Finding("model.shares", Level.PROBLEM, text, fix)
    context = language.get("max_position_embeddings")
    context = context if isinstance(context, int) else 0
    if plan.host_bytes is not None:
        fits = plan.host_bytes // block * tokens
        rooms = {"host memory": fits}
        rooms |= {tier.name: tier.bytes // block * tokens for tier in plan.tiers if tier.bytes is not None}
        figures = {f"{name.replace(' ', '_').replace('-', '_')}_tokens": room for name, room in rooms.items()}
        text = "room for " + ", ".join(f"{room:,} tokens in {name}" for name, room in rooms.items())
        is_halved = plan.tiers and plan.door is Door.CONNECTOR
        part = PROMOTION_PART if is_halved else 1
        if fits == 0:
            fix = plan.set_host_bytes(1000 * block)
            yield Finding("model.room", Level.PROBLEM, f"{plan.host_setting} holds no block: {text}", fix)
        elif fits < context * part:
            which = "blocks of tiers take at most half of host memory, " if is_halved else "that is "
            text += f"; {which}less than one prompt of the model's {context:,} tokens"
            fix = f"{plan.set_host_bytes(round(context * per_token * part))} or more, unless prompts are shorter"
            yield Finding("model.room", Level.NOTE, text, fix, figures=figures)
        else:
            yield Finding("model.room", Level.OK, text, figures=figures)


def _check_weights(folder: Path, plan: Plan, report: Report) -> None:
    """Reports the bytes of weights to hash at each start, where tiers need digests that are not kept."""
    if not plan.tiers or plan.has_fingerprint:
        return
    nbytes = sum(path.stat().st_size for path in folder.iterdir() if path.suffix in WEIGHTS and path.is_file())
    kept = user_folder()
    where = next((each for each in (kept, *kept.parents) if each.exists()), None) if kept is not None else None
    if not nbytes or (where is not None and mount_of(os.path.realpath(where)).kind not in LOST_KINDS):
        return
    text = (
        f"the digests of {format_bytes(nbytes)} of weights are lost with this container: every start hashes them again"
    )
    fix = f"mount a volume at {kept}, or set XDG_CACHE_HOME to one; or set model_fingerprint"
    report.found("model.digests", Level.NOTE, text, fix, {"weight_bytes": nbytes})


def _language(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the fields of the language model in a config.json, which may be in a section of their own."""
    fields = content
    for part in PARTS:
        inner = fields.get(part)
        if isinstance(inner, Mapping):
            fields = {**fields, **inner}
    return fields

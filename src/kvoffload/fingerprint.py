"""What makes cached bytes belong together: same fingerprint, or a different cache."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from kvoffload.digests import DigestCache, file_digests

FORMAT_VERSION = 2

MAX_FILES = 20_000
"""Of one model."""
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
"""Files of which a directory must have one, or it does not tell what a model computes."""
SKIPPED_FOLDERS = (".*", "__pycache__", "checkpoint-*", "global_step*", "original")
"""Of a model's directory: what training or downloading left there. No loader reads a model's weights from these."""
SKIPPED_FILES = (
    ".*",
    "*.md",
    "*.txt",
    "*.log",
    "*.jinja",
    "LICENSE*",
    "*.png",
    "*.jpg",
    # They make tokens and choose among them; KV is named by tokens.
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "generation_config.json",
    # They are of no use but to go on training.
    "*optimizer.pt",
    "*optimizer.bin",
    "*scheduler.pt",
    "*scaler.pt",
    "*training_args.bin",
    "rng_state*.pth",
    "trainer_state.json",
    "events.out.tfevents*",
)
"""Files that shape no KV. Any other counts: one too many is a miss, one too few would be a wrong answer."""


def fingerprint(parts: Mapping[str, Any]) -> str:
    """64 hex digits over ``parts``, which hold everything that shapes the cached bytes. Values must be JSON."""
    canonical = json.dumps({"format": FORMAT_VERSION, **parts}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def has_weights(model_dir: Path) -> bool:
    """Whether there are weights among the files of ``model_dir``. Raises what ``files_fingerprint`` does."""
    return any(_is_any(path.name, WEIGHTS) for path in _model_files(model_dir).values())


def files_fingerprint(model_dir: Path, cache: DigestCache | None = None) -> str:
    """64 hex digits over every byte of the files in ``model_dir`` that may shape KV, by their names in it: weights of
    any format, configurations, code.

    A loader reads some of these files, depending on its settings and on the model; that all of them count is safe.
    Digests are XXH3-128, as ``kvoffload.digests`` says, and come from ``cache`` where it knows a file.
    Raises OSError if weights cannot be read or a file changes meanwhile, ValueError for more than MAX_FILES.
    """
    files = _model_files(model_dir)
    # What this user cannot read, no loader has read. Not so weights: they may have been removed since they were loaded.
    names = [name for name, path in sorted(files.items()) if _is_any(path.name, WEIGHTS) or _is_readable(path)]
    digests = file_digests([files[name] for name in names], cache)
    return fingerprint({"files": dict.fromkeys(files) | dict(zip(names, digests, strict=True))})


def _model_files(model_dir: Path) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for folder, folders, names in os.walk(model_dir, onerror=_raise, followlinks=True):
        folders[:] = [name for name in folders if not _is_any(name, SKIPPED_FOLDERS)]
        paths = [Path(folder, name) for name in names if not _is_any(name, SKIPPED_FILES)]
        files.update((str(path.relative_to(model_dir)), path) for path in paths)
        if len(files) > MAX_FILES:
            raise ValueError(f"{model_dir}: more than {MAX_FILES:,} files, which is no model's directory")
    return files


def _is_readable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.R_OK)


def _raise(error: OSError) -> None:
    raise error


def _is_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def find_model_dir(model: str, revision: str | None, cache_dir: str | None = None) -> Path | None:
    """Where the files of ``model`` lie: it is a directory, or in the Hugging Face cache, by default this user's."""
    if Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except Exception:
        return None


def is_commit(revision: str | None) -> bool:
    """Whether ``revision`` means the same files for ever: a full commit hash, not a branch or a tag."""
    return revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision) is not None

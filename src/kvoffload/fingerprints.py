"""Fingerprints: blocks with the same fingerprint belong to the same cache, all others do not."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from fnmatch import fnmatch
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from kvoffload.digests import DigestCache, file_digests

FORMAT_VERSION = 2

MAX_FILES = 20_000
"""Files in the directory of a model."""
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
"""Files with weights. A directory without any does not determine what a model computes."""
SKIPPED_FOLDERS = (".*", "__pycache__", "checkpoint-*", "global_step*", "original")
"""Subdirectories left by training or downloading. No loader reads a model's weights from them."""
SKIPPED_FILES = (
    ".*",
    "*.md",
    "*.txt",
    "*.log",
    "*.jinja",
    "LICENSE*",
    "*.png",
    "*.jpg",
    # They produce tokens and choose between them. Keys of blocks already depend on the tokens.
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "generation_config.json",
    # They are only used to resume training.
    "*optimizer.pt",
    "*optimizer.bin",
    "*scheduler.pt",
    "*scaler.pt",
    "*training_args.bin",
    "rng_state*.pth",
    "trainer_state.json",
    "events.out.tfevents*",
)
"""Files that do not shape KV. All others count: one too many costs misses, one too few would cause wrong answers."""


def fingerprint(parts: Mapping[str, Any]) -> str:
    """Returns 64 hex digits over ``parts``, which must hold everything that shapes the bytes of a block.

    That is at least: weights (see ``files_fingerprint``), dtype, KV layout, parallelism, the versions of the engine and
    its kernels, and the algorithm and seed of the block hashes. Values must be JSON.
    """
    canonical = json.dumps({"format": FORMAT_VERSION, **parts}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def has_weights(model_dir: Path) -> bool:
    """Whether the files of ``model_dir`` include weights. Raises the errors of ``files_fingerprint``."""
    return any(_is_any(path.name, WEIGHTS) for path in _model_files(model_dir).values())


def files_fingerprint(model_dir: Path, cache: DigestCache | None = None) -> str:
    """Returns 64 hex digits over every byte, and the relative paths, of all files in ``model_dir`` that may shape KV:
    weights of any format, configurations, code.

    A loader reads only some of these files, depending on its settings and on the model, but counting all of them is
    safe. Digests are XXH3-128 (see ``kvoffload.digests``), and are taken from ``cache`` if it knows the file.
    Raises OSError if weights cannot be read or a file changes meanwhile, ValueError for more than MAX_FILES.
    """
    files = _model_files(model_dir)
    # A file that this user cannot read was not read by the loader, except weights: these may have been removed since.
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
            raise ValueError(f"{model_dir}: more than {MAX_FILES:,} files, so this is not a model's directory")
    return files


def _is_readable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.R_OK)


def _raise(error: OSError) -> None:
    raise error


def _is_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def find_model_dir(model: str, revision: str | None, cache_dir: str | None = None) -> Path | None:
    """Returns the directory with the files of ``model``: ``model`` itself if it is one, or its directory in the Hugging
    Face cache, by default this user's cache. Returns None if there is no such directory."""
    if Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, cache_dir=cache_dir, local_files_only=True))
    except Exception:
        return None


def model_dirs(model: str, revision: str | None, download_dir: str | None) -> list[Path]:
    """Returns the directories with the files of ``model``. Engines load weights from ``download_dir``; some other files
    always lie where Hugging Face's own library puts them."""
    found = (find_model_dir(model, revision, place) for place in (download_dir, None))
    return list(dict.fromkeys(folder for folder in found if folder is not None))


def package_version(name: str) -> str | None:
    """Returns the version of an installed package that may compute KV, or None if there is none."""
    return next((each.version for each in distributions(name=name)), None)


def is_commit(revision: str | None) -> bool:
    """Whether ``revision`` always means the same files: a full commit hash, not a branch or a tag."""
    return revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision) is not None

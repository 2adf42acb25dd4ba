"""What makes cached bytes belong together: same fingerprint, or a different cache."""

from __future__ import annotations

import hashlib
import json
import logging
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
SAMPLE_BYTES = 4096
MAX_HEADER_BYTES = 100 << 20


def fingerprint(parts: Mapping[str, Any]) -> str:
    """64 hex digits over ``parts``, which hold everything that shapes the cached bytes. Values must be JSON."""
    canonical = json.dumps({"format": FORMAT_VERSION, **parts}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def weights_fingerprint(model_dir: Path) -> str | None:
    """64 hex digits over config.json and, of each safetensors file, the header and 4 KiB from the middle of
    every tensor. None where there are no safetensors: then somebody else has to say which weights these are.

    Raises ValueError for a file that is not well-formed safetensors.
    """
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        return None
    digest = hashlib.sha256()
    config = model_dir / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    for path in files:
        digest.update(path.name.encode())
        _add_safetensors(digest, path)
    return digest.hexdigest()


def _add_safetensors(digest: hashlib._Hash, path: Path) -> None:
    """The format: u64 little-endian header length, JSON header, then the tensors' bytes."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{path}: not a safetensors file, its header is cut off")
        raw = file.read(length)
        digest.update(raw)
        for name, entry in sorted(json.loads(raw).items()):
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            middle = 8 + length + max(begin, (begin + end - SAMPLE_BYTES) // 2)
            file.seek(middle)
            digest.update(file.read(min(SAMPLE_BYTES, end - begin)))


def find_model_dir(model: str, revision: str | None) -> Path | None:
    """Where the files of ``model`` lie: it is a directory, or in the Hugging Face cache of this machine."""
    if Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except Exception:
        return None
    return Path(found).parent if isinstance(found, str) else None


def model_identity(model: str, revision: str | None, given: str | None) -> str:
    """What names the weights: the user's own fingerprint, else the files', else the revision."""
    if given:
        return f"given:{given}"
    directory = find_model_dir(model, revision)
    if directory is not None:
        try:
            weights = weights_fingerprint(directory)
        except (OSError, ValueError, KeyError):
            logger.exception("kvoffload: the weights in %s cannot be read for a fingerprint", directory)
            weights = None
        if weights is not None:
            return f"weights:{weights}"
    logger.warning(
        "kvoffload: no safetensors files found for model %s; its cache is told apart by name and revision (%s) only. "
        'Set model_fingerprint="..." and change it with the weights',
        model,
        revision,
    )
    return f"revision:{model}@{revision}"

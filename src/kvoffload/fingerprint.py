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
        _add(digest, config.read_bytes())
    for path in files:
        _add(digest, path.name.encode())
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
        _add(digest, raw)
        for begin, end in _tensor_spans(path, raw, size - 8 - length):
            file.seek(8 + length + max(begin, (begin + end - SAMPLE_BYTES) // 2))
            _add(digest, file.read(min(SAMPLE_BYTES, end - begin)))


def _tensor_spans(path: Path, header: bytes, data_bytes: int) -> list[tuple[int, int]]:
    """Where each tensor's bytes begin and end in the data, by tensor name."""
    try:
        entries = json.loads(header)
        if not isinstance(entries, dict):
            raise ValueError("its header is no JSON object")
        spans = {name: entries[name]["data_offsets"] for name in sorted(entries) if name != "__metadata__"}
        for name, span in spans.items():
            begin, end = span
            if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= data_bytes:
                raise ValueError(f"tensor {name!r} lies at {span}, outside the {data_bytes} bytes of data")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path}: not a well-formed safetensors file: {error}") from error
    return [(begin, end) for begin, end in spans.values()]


def _add(digest: hashlib._Hash, raw: bytes) -> None:
    """Framed by its length, so that no two files run into the same bytes."""
    digest.update(len(raw).to_bytes(8, "big"))
    digest.update(raw)


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
        except (OSError, ValueError):
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

"""Changes bytes in the files of a cache, as a bad disk would."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

CHANGED_EVERY = 1024
OFFSET = 3
"""Of the first changed byte: one of the exponent, if the bytes are those of a float32 in little-endian order."""
MASK = 0x5A


def flip(paths: Iterable[Path]) -> int:
    """Changes a byte in every KiB of each file. Returns the number of files."""
    count = 0
    for path in paths:
        raw = np.memmap(path, np.uint8, "r+")
        raw[OFFSET::CHANGED_EVERY] ^= MASK
        raw.flush()
        count += 1
    return count

"""Faults that are planted in the files of a cache, the same for every system."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

FLIP_EVERY = 64 << 10
FLIPPED_BYTE = 3
FLIPPED_BIT = 6
"""The highest bit of the exponent, if the bytes are those of a float32 in little-endian order: it changes any value of
usual size to one that no answer survives."""
FREE_WHEN_FULL = 8 << 20
"""Bytes that a nearly full disk has left."""


def data_files(folder: Path) -> list[Path]:
    """Returns the files in ``folder`` that have bytes, in order of their paths."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sorted(path for path in files if path.stat().st_size > 0)


def flip(folder: Path) -> int:
    """Flips one bit in every whole 64 KiB of every file in ``folder``. Returns the number of flipped bits.

    Smaller files, which describe others, stay as they are: it is the blocks' bytes that are to be wrong.
    """
    flipped = 0
    for path in data_files(folder):
        raw = np.memmap(path, np.uint8, "r+")
        bytes_to_flip = raw[: len(raw) // FLIP_EVERY * FLIP_EVERY][FLIP_EVERY // 2 + FLIPPED_BYTE :: FLIP_EVERY]
        bytes_to_flip ^= 1 << FLIPPED_BIT
        raw.flush()
        flipped += len(bytes_to_flip)
    return flipped


def truncate(folder: Path) -> int:
    """Cuts every file to half its size. Returns the number of files."""
    files = data_files(folder)
    for path in files:
        os.truncate(path, path.stat().st_size // 2)
    return len(files)


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Callable[[], None]]:
    """Makes ``folder`` a folder of a disk of ``size`` bytes. Yields a function that fills the disk: another file there
    then takes all that is free but FREE_WHEN_FULL bytes.

    Raises OSError if this user may not mount one.
    """
    disk = folder.with_name(folder.name + "-disk")
    disk.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    mounted: list[Path] = []
    try:
        _mount(["-t", "tmpfs", "-o", f"size={size},mode=700", "kvoffload-peers", str(disk)])
        mounted.append(disk)
        inside = disk / "cache"
        inside.mkdir(mode=0o700)
        _mount(["--bind", str(inside), str(folder)])
        mounted.append(folder)
        yield lambda: _fill(disk)
    finally:
        for path in reversed(mounted):
            # Lazily: a process that was killed a moment ago may still hold files.
            subprocess.run(["umount", "--lazy", str(path)], capture_output=True, check=False)


def _fill(disk: Path) -> None:
    free = os.statvfs(disk)
    with (disk / "taken").open("wb") as other:
        os.posix_fallocate(other.fileno(), 0, max(1, free.f_bavail * free.f_frsize - FREE_WHEN_FULL))


def _mount(arguments: list[str]) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"a small disk cannot be mounted: {done.stderr.strip()}")


def copy_folder(source: Path, target: Path) -> None:
    """Makes ``target`` a copy of ``source``, with holes where that has them."""
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run(["cp", "-a", "--sparse=auto", str(source), str(target)], check=True)


def negate_tensor(model: Path, name: str) -> None:
    """Changes the sign of one float32 tensor in the file of weights in ``model``."""
    path = model / "model.safetensors"
    raw = bytearray(path.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    start, end = (8 + length + offset for offset in json.loads(raw[8 : 8 + length])[name]["data_offsets"])
    np.frombuffer(raw, np.uint8)[start + 3 : end : 4] ^= 0x80
    path.write_bytes(raw)

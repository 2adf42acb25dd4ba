"""A tier of a stranger, which servers of the tests name in their flag: one file per block in a directory."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvoffload import ConfigError, Tier, TierConfig, TierContext
from kvoffload.abc import ByteArray, OffloadKey, Slots, States, TierError, TierResult, TierStats
from kvoffload.tiers.threads import IOThreads


@dataclass(frozen=True)
class FolderConfig(TierConfig):
    kind = "folder"

    path: str
    """A directory that exists, or the word "broken"."""

    def __post_init__(self) -> None:
        if self.path != "broken" and not Path(self.path).is_dir():
            raise ConfigError("path", self.path, "is not a directory", "make it first")

    def open(self, context: TierContext) -> Tier:
        if self.path == "broken":
            raise OSError("the medium is broken")
        return FolderTier(Path(self.path, context.fingerprint), context.pools)


class FolderTier(Tier):
    """Keeps each block in a file whose name is its key: a checksum, then the bytes of all ranks. Bounds nothing."""

    name = "folder"

    def __init__(self, path: Path, pools: Sequence[ByteArray]) -> None:
        path.mkdir(exist_ok=True)
        self.path, self.pools, self.threads = path, pools, IOThreads(num_threads=2)
        self.block_bytes = sum(pool.shape[1] for pool in pools)
        self.held = {bytes.fromhex(file.name) for file in path.iterdir()}
        self.moving: set[OffloadKey] = set()
        self.ended: deque[TierResult] = deque()

    def stats(self) -> TierStats:
        return TierStats(num_blocks=len(self.held))

    def contains(self, keys: Sequence[OffloadKey], ahead: Sequence[OffloadKey] = ()) -> States:
        return np.array([key in self.held for key in keys], dtype=np.uint8)

    def read(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        return self._begin([(key, slot) for key, slot in zip(keys, slots, strict=True) if key in self.held], True)

    def write(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        return self._begin([(key, slot) for key, slot in zip(keys, slots, strict=True) if key not in self.held], False)

    def _begin(self, blocks: Sequence[tuple[OffloadKey, Any]], is_read: bool) -> list[OffloadKey]:
        submit = self.threads.submit_read if is_read else self.threads.submit_write
        taken = []
        for key, slot in blocks:
            if key not in self.moving and submit(partial(self._move, key, slot, is_read)):
                self.moving.add(key)
                taken.append(key)
        return taken

    def _move(self, key: OffloadKey, slot: int, is_read: bool) -> None:
        begun, file, error = time.monotonic(), self.path / key.hex(), None
        try:
            if is_read:
                raw = file.read_bytes()
                whole = np.frombuffer(raw[4:], dtype=np.uint8)
                if len(whole) != self.block_bytes or zlib.crc32(raw[4:]) != int.from_bytes(raw[:4], "big"):
                    raise ValueError
                for pool in self.pools:
                    pool[slot], whole = whole[: pool.shape[1]], whole[pool.shape[1] :]
            else:
                raw = b"".join(pool[slot].tobytes() for pool in self.pools)
                file.with_suffix(".new").write_bytes(zlib.crc32(raw).to_bytes(4, "big") + raw)
                file.with_suffix(".new").rename(file)
        except (OSError, ValueError) as problem:
            error = TierError.IO if isinstance(problem, OSError) else TierError.CORRUPT
        ended = time.monotonic()
        self.ended.append(TierResult(key, is_read, error, self.block_bytes, ended - begun, begun, ended))

    def poll(self) -> list[TierResult]:
        results = [self.ended.popleft() for _ in range(len(self.ended))]
        for result in results:
            self.moving.discard(result.key)
            (self.held.add if result.ok else self.held.discard)(result.key)
        return results

    def touch(self, keys: Sequence[OffloadKey], stored: Collection[OffloadKey] | None = None) -> None:
        pass

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        raise NotImplementedError

    def reset(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.threads.close(timeout_s=5.0)
        self.held.clear()

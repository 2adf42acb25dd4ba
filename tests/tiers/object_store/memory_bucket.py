"""A bucket in a dictionary, which counts requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvoffload.abc import ByteArray
from kvoffload.tiers.object_store.bucket import Answer, Bucket, Found, NewObject, Piece
from kvoffload.tiers.remote.client import Outcome


class MemoryBucket(Bucket):
    """Requests for ``broken`` names fail."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[ByteArray, str]] = {}
        self.requests: list[tuple[str, str]] = []
        self.broken: set[str] = set()
        self.is_conditional = True

    def take_counts(self) -> dict[str, int]:
        """Returns how many requests there were of each kind since the last call."""
        kinds = [kind for kind, _ in self.requests]
        self.requests.clear()
        return {kind: kinds.count(kind) for kind in kinds}

    def head(self, names: Sequence[str]) -> list[Answer]:
        return [self._find("head", name) for name in names]

    def _find(self, kind: str, name: str) -> Answer:
        self.requests.append((kind, name))
        if name in self.broken:
            return Outcome.FAILED
        if name not in self.objects:
            return Outcome.MISSING
        data, note = self.objects[name]
        return Found(data.size, note)

    def get(self, pieces: Sequence[Piece]) -> list[Answer]:
        answers = []
        for piece in pieces:
            answer = self._find("get", piece.name)
            if isinstance(answer, Found):
                data = self.objects[piece.name][0][piece.start :]
                if not data.size:
                    answer = Outcome.OTHER_SIZE
                for buffer in piece.buffers:
                    part, data = data[: buffer.size], data[buffer.size :]
                    buffer[: part.size] = part
            answers.append(answer)
        return answers

    def put(self, objects: Sequence[NewObject]) -> list[Outcome]:
        return [self._put(each) for each in objects]

    def _put(self, item: NewObject) -> Outcome:
        self.requests.append(("put", item.name))
        if item.name in self.broken:
            return Outcome.FAILED
        if item.name in self.objects and self.is_conditional:
            return Outcome.HELD
        self.objects[item.name] = np.concatenate(item.buffers), item.note
        return Outcome.OK

    def delete(self, names: Sequence[str]) -> list[Outcome]:
        return [self._delete(name) for name in names]

    def _delete(self, name: str) -> Outcome:
        self.requests.append(("delete", name))
        if name in self.broken:
            return Outcome.FAILED
        return Outcome.MISSING if self.objects.pop(name, None) is None else Outcome.OK

"""Adapters in the model engine: the KV of a request with one depends on its bytes, which others may replace."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from random import Random

from kvoffload.abc import Request
from kvoffload.connector.adapters import DROPPED, Adapter, AdapterNeed


class ModelAdapters:
    """Adapters with the numbers 1 to ``count``, and which bytes each rank has loaded."""

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self.random = Random(f"adapters {seed}")
        self.variants = dict.fromkeys(range(1, count + 1), 1)
        """The bytes that each has now, as a number."""
        self.watches: dict[int, ModelAdapterWatch] = {}

    @staticmethod
    def adapter_of(request: Request) -> Adapter | None:
        number: int = request.adapter  # type: ignore[attr-defined]
        return Adapter(number, number) if number else None

    def watch(self, rank: int) -> ModelAdapterWatch:
        self.watches[rank] = ModelAdapterWatch(self, rank)
        return self.watches[rank]

    def replace(self, number: int) -> None:
        """Gives an adapter other bytes. Ranks load them at once, or when they compute with them."""
        self.variants[number] += 1
        at_once = self.random.random() < 0.5
        for watch in self.watches.values():
            if number in watch.loaded:
                watch.loaded[number] = self.variants[number] if at_once else 0

    def load(self, rank: int, number: int) -> None:
        """The rank is about to compute with an adapter, or with none."""
        if number:
            self.watches[rank].loaded[number] = self.variants[number]


class ModelAdapterWatch:
    """An AdapterWatch of one rank. Answers take their time."""

    def __init__(self, adapters: ModelAdapters, rank: int) -> None:
        self._adapters = adapters
        self._rank = rank
        self.loaded: dict[int, int] = {}
        """The bytes of each adapter that was loaded; 0: dropped since."""
        self._reported: dict[int, int] = {}
        self._questions: dict[int, int] = {}

    def _digest(self, number: int, variant: int) -> bytes:
        return f"rank {self._rank}, adapter {number}, bytes {variant}".encode() if variant else DROPPED

    def changes(self) -> Mapping[int, bytes]:
        changed = {
            n: self._digest(n, variant) for n, variant in self.loaded.items() if self._reported.get(n) != variant
        }
        self._reported = dict(self.loaded)
        return changed

    def ask(self, question: int, adapter: Adapter) -> None:
        self._questions[question] = adapter.number

    def answers(self, wait_s: float = 0.0) -> Mapping[int, bytes]:
        ready = [question for question in self._questions if wait_s or self._adapters.random.random() < 0.5]
        numbers = {question: self._questions.pop(question) for question in ready}
        return {question: self._digest(n, self._adapters.variants[n]) for question, n in numbers.items()}

    def digest(self, number: int) -> bytes:
        return self._digest(number, self._reported.get(number, 0))

    def check(self, need: AdapterNeed) -> Future[bool]:
        result: Future[bool] = Future()
        result.set_result(self._digest(need.adapter, self._adapters.variants[need.adapter]) in need.digests)
        return result

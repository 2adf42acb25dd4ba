"""A store in a dictionary, and a process that runs requests when a test says so."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

import numpy as np

from kvoffload.abc import ByteArray
from kvoffload.tiers.remote.client import Outcome, StoreClient, StoreError
from kvoffload.tiers.remote.link import StoreProcess
from kvoffload.tiers.remote.messages import Op, Response, StoreRequest
from kvoffload.tiers.remote.worker import StoreWorker


class MemoryClient(StoreClient):
    """Values in ``values``. The next ``num_errors`` calls fail; ``room``: values that fit."""

    def __init__(self) -> None:
        self.values: MutableMapping[str, ByteArray] = {}
        self.num_errors = 0
        self.room = 1 << 20
        self.calls: list[tuple[str, int]] = []

    def exists(self, names: Sequence[str]) -> list[Outcome]:
        self._call("exists", names)
        return [Outcome.OK if name in self.values else Outcome.MISSING for name in names]

    def get(self, names: Sequence[str], buffers: Sequence[Sequence[ByteArray]]) -> list[Outcome]:
        self._call("get", names)
        return [self._get(name, parts) for name, parts in zip(names, buffers, strict=True)]

    def _get(self, name: str, parts: Sequence[ByteArray]) -> Outcome:
        data = self.values.get(name)
        return Outcome.MISSING if data is None else fill(data, parts)

    def put(self, names: Sequence[str], buffers: Sequence[Sequence[ByteArray]]) -> list[Outcome]:
        self._call("put", names)
        outcomes = []
        for name, parts in zip(names, buffers, strict=True):
            if name in self.values:
                outcomes.append(Outcome.HELD)
            elif len(self.values) >= self.room:
                outcomes.append(Outcome.FULL)
            else:
                self.values[name] = np.concatenate(parts)
                outcomes.append(Outcome.OK)
        return outcomes

    def remove(self, names: Sequence[str]) -> list[Outcome]:
        self._call("remove", names)
        return [Outcome.MISSING if self.values.pop(name, None) is None else Outcome.OK for name in names]

    def _call(self, name: str, names: Sequence[str]) -> None:
        self.calls.append((name, len(names)))
        if self.num_errors:
            self.num_errors -= 1
            raise StoreError("fails on purpose")


def fill(data: ByteArray, parts: Sequence[ByteArray]) -> Outcome:
    """Reads the value ``data`` into its buffers. Returns the outcome of ``get``."""
    surplus = data.size - sum(part.size for part in parts)
    for part in parts:
        taken, data = data[: part.size], data[part.size :]
        part[: taken.size] = taken
    return Outcome.OTHER_SIZE if surplus else Outcome.OK


class SteppedProcess(StoreProcess):
    """All processes of a client, one after the other, which run requests in ``run``. A process is ready as soon as it
    is polled while ``is_reachable``, and ends as soon as it is looked at after it was killed."""

    is_ready = False

    def __init__(self, worker: StoreWorker) -> None:
        self.worker = worker
        self.requests: list[StoreRequest] = []
        self.is_reachable = True
        self.is_stuck = False
        """Whether a process that was killed does not end."""
        self.num_starts = 0
        self.responses: list[Response] = []
        """What the next ``poll`` returns. They come in any order."""
        self._is_killed = False

    def start(self) -> StoreProcess:
        self.is_ready = self._is_killed = False
        self.num_starts += 1
        return self

    @property
    def has_ended(self) -> bool:
        return self._is_killed and not self.is_stuck

    def submit(self, request: StoreRequest) -> bool:
        self.requests.append(StoreRequest.unpack(request.pack()))
        return True

    def run(self, *ops: Op) -> None:
        """Runs the requests with ``ops``, by default all."""
        chosen = [request for request in self.requests if not ops or request.op in ops]
        self.requests = [request for request in self.requests if request not in chosen]
        self.responses += [Response.unpack(self.worker.run(request).pack()) for request in chosen]

    def poll(self) -> list[Response]:
        self.is_ready |= self.is_reachable and not self._is_killed
        responses, self.responses = self.responses, []
        return responses

    def wait(self, timeout_s: float) -> None:
        self.run()

    def kill(self) -> None:
        """The process ends."""
        self.requests.clear()
        self.responses.clear()
        self.is_ready, self._is_killed = False, True

    def close(self, timeout_s: float) -> bool:
        self.run()
        return not self.is_stuck


class DirectProcess(SteppedProcess):
    """Runs requests when it is polled."""

    def poll(self) -> list[Response]:
        self.run()
        return super().poll()

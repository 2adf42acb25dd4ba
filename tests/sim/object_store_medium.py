"""Servers that share a simulated bucket through the client of object stores, for the simulation of several servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kvoffload.abc import ByteArray, Tier
from kvoffload.tiers.object_store import bucket
from kvoffload.tiers.object_store.bucket import Bucket, Found, NewObject, Piece
from kvoffload.tiers.object_store.client import ObjectStoreClient
from kvoffload.tiers.object_store.contents import contents
from kvoffload.tiers.remote.client import Outcome, StoreClient, StoreError
from kvoffload.tiers.remote.record import RECORD_BYTES
from tests.sim.servers import Connection, SharingServer
from tests.sim.store_medium import StoreConnection, StoreMedium
from tests.sim.stores import ClientState, FaultyCalls, SimulatedStore, StoreFaults, first_bytes

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class BucketFaults(StoreFaults):
    """Faults of a bucket; those of StoreFaults are per request."""

    throttled: float = 0.0
    """A request fails, and the store has done nothing."""
    stale_note: float = 0.0
    """A request returns the note of another object."""
    lost_note: float = 0.0


class SimulatedBucket(Bucket):
    """The bucket of one process on ``store``. ``values_put``: marks of values that this server has put."""

    def __init__(self, store: SimulatedStore, state: ClientState, values_put: set[bytes]) -> None:
        self._store = store
        self._state = state
        self._values_put = values_put
        self._calls = FaultyCalls(store, state)

    def head(self, names: Sequence[str]) -> list[bucket.Answer]:
        return self._each([partial(self._head, name) for name in names])

    def get(self, pieces: Sequence[Piece]) -> list[bucket.Answer]:
        return self._each([partial(self._get, piece) for piece in pieces])

    def put(self, objects: Sequence[NewObject]) -> list[Outcome]:
        return self._each([partial(self._put, each) for each in objects])

    def delete(self, names: Sequence[str]) -> list[Outcome]:
        return self._each([partial(self._delete, name) for name in names])

    def _each(self, acts: Sequence[Callable[[], _Answer]]) -> list[_Answer | Any]:
        self._calls.begin()
        failed: Any = Outcome.FAILED
        answers: list[_Answer | Any] = [self._calls.one(partial(self._throttle, act), failed) for act in acts]
        if all(answer is Outcome.FAILED for answer in answers):
            raise StoreError("every request to the simulated bucket has failed")
        return answers

    def _throttle(self, act: Callable[[], _Answer]) -> _Answer | Any:
        return Outcome.FAILED if self._calls.injects("throttled") else act()

    def _head(self, name: str) -> bucket.Answer:
        value = self._store.values.get(name)
        if value is None:
            # An answer from before the object was deleted.
            return Found(RECORD_BYTES) if self._calls.injects("says_it_has") else Outcome.MISSING
        if self._calls.injects("says_it_lacks"):
            return Outcome.MISSING
        return Found(value.data.size, self._note(name, value.note))

    def _note(self, name: str, note: str) -> str:
        is_wrong = self._calls.injects("lost_note") or self._calls.injects("stale_note")
        if not is_wrong:
            return note
        # What this server does because of that is no fault of it.
        self._state.misread.add(name)
        other = self._state.random.choice(list(self._store.values.values())).note
        return other if self._state.random.random() < 0.7 else ""

    def _get(self, piece: Piece) -> bucket.Answer:
        value = self._store.values.get(piece.name)
        if value is None:
            return Outcome.MISSING
        found = Found(value.data.size, self._note(piece.name, value.note))
        if piece.start >= value.data.size:
            return Outcome.OTHER_SIZE
        part = slice(piece.start, min(piece.start + piece.nbytes, value.data.size))
        if not self._calls.read(piece.name, value, first_bytes(piece.buffers, part.stop - part.start), part):
            # Of another, shorter object.
            self._state.misread.add(piece.name)
        return found

    def _put(self, item: NewObject) -> Outcome:
        outcome = self._calls.write(item.name, item.buffers, item.note)
        if outcome is Outcome.OK:
            self._values_put.update(contents(item.name, Found(0, item.note)))
        return outcome

    def _delete(self, name: str) -> Outcome:
        value = self._store.values.get(name)
        # A server may delete what it has put, whatever object has it now.
        if value is not None and self._values_put.issuperset(contents(name, Found(value.data.size, value.note))):
            self._state.put.add(name)
        return self._store.remove(name, self._state)


class ObjectStoreMedium(StoreMedium):
    """A bucket with the faults of StoreMedium, and with notes that are wrong or lost."""

    kind = "object_store"
    faults_kind = BucketFaults

    def __init__(self, seed: int, is_calm: bool) -> None:
        super().__init__(seed, is_calm)
        # A lookup makes several rounds of requests, and must end within deadlines of 30 ms.
        self.latency_s = min(self.latency_s, 0.002)
        self.values_per_object = self.random.choice((1, 2, 3, 8, 64))

    def connect(self, server: SharingServer) -> Connection:
        return ObjectStoreConnection(self, server)


class ObjectStoreConnection(StoreConnection):
    """The tier of one server. All threads of a process share a client. ``client_class`` may have a planted bug."""

    client_class: type[ObjectStoreClient] = ObjectStoreClient

    def __init__(self, medium: ObjectStoreMedium, server: SharingServer) -> None:
        super().__init__(medium, server)
        self._values_per_object = medium.values_per_object
        self._values_put: set[bytes] = set()
        self._value_bytes = 0
        self._client: ObjectStoreClient | None = None
        self._made_for = 0
        """The start of the process that has ``_client``."""

    def open(self, pools: Sequence[ByteArray]) -> Tier:
        self._value_bytes = RECORD_BYTES + sum(pool.shape[1] for pool in pools)
        return super().open(pools)

    def make_client(self) -> StoreClient:
        assert self.starter is not None
        if self._client is None or self._made_for != self.starter.num_starts:
            simulated = SimulatedBucket(self.medium.store, self.state, self._values_put)
            object_bytes = self._value_bytes * self._values_per_object
            groups = [i for i, group in enumerate(self.server.life.scenario.groups) if group.is_full] or [0]
            self._client = self.client_class(simulated, self._value_bytes, groups, object_bytes, self.server.clock)
            self._made_for = self.starter.num_starts
        return self._client

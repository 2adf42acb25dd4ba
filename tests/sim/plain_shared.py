"""The simplest shared tier: it calls the client of a store without a process between them, and has no circuit breaker
or pause of its own. For tests of whatever works on shared tiers.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from random import Random

import numpy as np

from kvoffload.abc import ByteArray, LookupState, OffloadKey, Slots, States, Tier, TierError, TierResult, TierStats
from kvoffload.tiers.executor import Executor
from kvoffload.tiers.remote.client import Outcome, StoreClient, StoreError
from tests.sim.executor import SteppedExecutor
from tests.sim.servers import Connection, SharingServer
from tests.sim.store_medium import StoreMedium
from tests.sim.stores import ClientState, SimulatedClient

ERRORS = {Outcome.MISSING: TierError.GONE, Outcome.OTHER_SIZE: TierError.CORRUPT}
HIT_TTL_S = 5.0
"""How long a tier trusts the answer that a block is there."""
MISS_TTL_S = 0.05
"""How long a tier trusts the answer that a block is not there."""


class PlainSharedTier(Tier):
    """A tier of one server. Subclasses with a bug override its methods, of which ``ask_for`` and those whose names end
    with ``_block`` run on the executor's threads."""

    name = "shared"
    is_shared = True

    def __init__(
        self,
        client: StoreClient,
        pools: Sequence[ByteArray],
        executor: Executor | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        fingerprint: str = "",
    ) -> None:
        self.client = client
        self.pools = pools
        self.block_bytes = sum(pool.shape[1] for pool in pools)
        self.executor = executor or SteppedExecutor(clock=clock)
        self.clock = clock
        self.fingerprint = fingerprint
        self.answers: dict[OffloadKey, tuple[bool, float]] = {}
        """Whether the store has a block, and until when that is trusted."""
        self.unread: set[OffloadKey] = set()
        """Blocks whose answer was not looked at yet. It is trusted from then on, however seldom an engine looks."""
        self.asking: set[OffloadKey] = set()
        self.written: set[OffloadKey] = set()
        """Blocks that this process has written and not deleted."""
        self.under_way: set[OffloadKey] = set()
        self.deleted: set[OffloadKey] = set()
        """Those of them that were deleted meanwhile."""
        self.removing: set[OffloadKey] = set()
        """Blocks that are being removed from the store."""
        self.ended: deque[TierResult] = deque()
        self.is_off = False
        """After a reset or the end."""

    def stats(self) -> TierStats:
        return TierStats()

    def name_of(self, key: OffloadKey) -> str:
        return f"{self.fingerprint}/{key.hex()}"

    def contains(self, keys: Sequence[OffloadKey], ahead: Sequence[OffloadKey] = ()) -> States:
        if ahead:
            self._find(ahead)
        return self._find(keys)

    def _find(self, keys: Sequence[OffloadKey]) -> States:
        states = np.zeros(len(keys), np.uint8)
        unknown = []
        for i, key in enumerate(keys):
            if key in self.unread:
                self.unread.discard(key)
                self._trust(key, self.answers[key][0])
            is_there, until = self.answers.get(key, (False, float("-inf")))
            if self.is_off or key in self.removing or (key in self.under_way and not is_there):
                states[i] = LookupState.MISS
            elif self.clock() < until:
                states[i] = LookupState.HIT if is_there else LookupState.MISS
            else:
                states[i] = LookupState.RETRY
                unknown.append(key)
        unknown = [key for key in unknown if key not in self.asking]
        if unknown and self.executor.submit_read(partial(self.ask_for, unknown)):
            self.asking.update(unknown)
        return states

    def _trust(self, key: OffloadKey, is_there: bool) -> None:
        self.answers[key] = is_there, self.clock() + (HIT_TTL_S if is_there else MISS_TTL_S)

    def read(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        return self._begin(keys, slots, is_read=True)

    def write(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        return self._begin(keys, slots, is_read=False)

    def _begin(self, keys: Sequence[OffloadKey], slots: Slots, is_read: bool) -> list[OffloadKey]:
        taken: list[OffloadKey] = []
        for key, slot in zip(keys, slots.tolist(), strict=True):
            is_there, until = self.answers.get(key, (False, float("-inf")))
            is_held = is_there and self.clock() < until
            if self.is_off or key in self.under_way or key in self.removing or is_held != is_read:
                continue
            submit = self.executor.submit_read if is_read else self.executor.submit_write
            if submit(partial(self.read_block if is_read else self.write_block, key, slot)):
                self.under_way.add(key)
                taken.append(key)
        return taken

    def touch(self, keys: Sequence[OffloadKey], stored: Collection[OffloadKey] | None = None) -> None:
        pass

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        for key in keys:
            self.deleted.update({key} & self.under_way)
            self.answers.pop(key, None)
            self.unread.discard(key)
            if key in self.written:
                self.written.discard(key)
                self._remove(key)

    def _remove(self, key: OffloadKey) -> None:
        if not self.is_off and self.executor.submit_write(partial(self.remove_block, key)):
            self.removing.add(key)

    def reset(self) -> None:
        self.is_off = True
        self.deleted |= self.under_way
        self.answers.clear()
        self.unread.clear()

    def poll(self) -> list[TierResult]:
        results = []
        while self.ended:
            result = self.ended.popleft()
            self.under_way.discard(result.key)
            if result.key in self.deleted:
                self.deleted.discard(result.key)
                if not result.is_read and result.nbytes:
                    self._remove(result.key)
                result = TierResult(result.key, result.is_read, TierError.GONE)
            elif not result.is_read and result.ok:
                self._trust(result.key, True)
                self.unread.discard(result.key)
                self.written.update([result.key] if result.nbytes else [])
            elif result.error in (TierError.GONE, TierError.CORRUPT):
                self._trust(result.key, False)
                self.unread.discard(result.key)
            results.append(result)
        return results

    def wait(self, timeout_s: float) -> None:
        if not self.ended:
            self.executor.wait(timeout_s)

    def close(self) -> None:
        self.is_off = True
        self.executor.close(timeout_s=1.0)
        self.answers.clear()

    # On the executor's threads.

    def ask_for(self, keys: Sequence[OffloadKey]) -> None:
        try:
            for key, outcome in zip(keys, self.client.exists([self.name_of(key) for key in keys]), strict=True):
                is_there = outcome is Outcome.OK
                if outcome is not Outcome.FAILED:
                    self._trust(key, is_there)
                    self.unread.add(key)
        except StoreError:
            self.num_failed_lookups += 1
        finally:
            self.asking.difference_update(keys)

    def read_block(self, key: OffloadKey, slot: int) -> None:
        start, parts = self.clock(), [np.empty(4, np.uint8), *(np.empty_like(pool[slot]) for pool in self.pools)]
        try:
            (outcome,) = self.client.get([self.name_of(key)], [parts])
        except StoreError:
            outcome = Outcome.FAILED
        error: TierError | None = ERRORS.get(outcome, TierError.IO)
        if outcome is Outcome.OK:
            error = None if self.is_right(key, parts) else TierError.CORRUPT
            for pool, part in zip(self.pools, parts[1:], strict=True):
                pool[slot] = part
        self._end(key, True, error, start)

    def is_right(self, key: OffloadKey, parts: Sequence[ByteArray]) -> bool:
        """Returns whether ``parts`` are those of this block: a checksum, and the payload of each rank."""
        return bool(np.array_equal(parts[0], self.checksum(key, parts[1:])))

    def checksum(self, key: OffloadKey, payloads: Sequence[ByteArray]) -> ByteArray:
        checksum = zlib.crc32(self.name_of(key).encode())
        for payload in payloads:
            checksum = zlib.crc32(payload.data, checksum)
        return np.frombuffer(checksum.to_bytes(4), np.uint8)

    def write_block(self, key: OffloadKey, slot: int) -> None:
        start, payloads = self.clock(), [pool[slot].copy() for pool in self.pools]
        try:
            (outcome,) = self.client.put([self.name_of(key)], [[self.checksum(key, payloads), *payloads]])
        except StoreError:
            outcome = Outcome.FAILED
        if outcome in (Outcome.OK, Outcome.HELD):
            self._end(key, False, None, start, self.block_bytes if outcome is Outcome.OK else 0)
        else:
            self._end(key, False, TierError.IO, start)

    def remove_block(self, key: OffloadKey) -> None:
        with suppress(StoreError):
            self.client.remove([self.name_of(key)])
        self.removing.discard(key)

    def _end(
        self, key: OffloadKey, is_read: bool, error: TierError | None, start: float, nbytes: int | None = None
    ) -> None:
        now = self.clock()
        nbytes = self.block_bytes if nbytes is None and error is None else nbytes or 0
        self.ended.append(TierResult(key, is_read, error, nbytes, now - start, start, now))


class PlainMedium(StoreMedium):
    """A store that servers use through plain tiers."""

    kind = "plain"

    def __init__(self, seed: int, is_calm: bool) -> None:
        super().__init__(seed, is_calm)
        # These tiers ask again when they trust an answer no more.
        self.handover_s += 3 * MISS_TTL_S
        # There is no process that could crash, and no HMAC key.
        self.faults = dataclasses.replace(self.faults, crash=0.0)

    def connect(self, server: SharingServer) -> Connection:
        return PlainConnection(self, server)


class PlainConnection(Connection):
    def __init__(self, medium: PlainMedium, server: SharingServer) -> None:
        self.server = server
        state = ClientState(
            server,
            lambda: medium.faults,
            Random(f"client {server.life.scenario.seed}"),
            server.pause,
            server.executor.stall,
            medium.stall_s,
            lambda: medium.call_s,
            medium.injected,
        )
        self.client = SimulatedClient(medium.store, state)

    def open(self, pools: Sequence[ByteArray]) -> Tier:
        server = self.server
        return PlainSharedTier(self.client, pools, server.executor, server.clock, server.fingerprint)

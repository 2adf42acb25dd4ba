"""RemoteTier: blocks in a store that other servers use too, reached through processes of a client."""

from __future__ import annotations

import random as random_module
import time
from collections.abc import Callable, Collection
from itertools import takewhile

import numpy as np

from kvoffload.abc import IntegrityError, Keys, OffloadKey, Slots, States, Tier, TierError, TierResult, TierStats
from kvoffload.abc.tier import HIT, MISS, RETRY
from kvoffload.tiers.remote.client import Outcome
from kvoffload.tiers.remote.known import PresenceCache, Removals
from kvoffload.tiers.remote.link import StoreLink, StoreProcess
from kvoffload.tiers.remote.messages import MAX_KEYS, Op, Response, StoreRequest
from kvoffload.tiers.remote.record import MAX_KEY_BYTES, RECORD_BYTES

CLOSE_DEADLINE_S = 5.0
MAX_MOVING_BYTES = 128 << 20
"""Bytes of reads under way at once, and of writes; at least one block."""
MAX_MOVING_BLOCKS = 1024
"""Blocks read at once, and blocks written at once."""
REQUEST_BYTES = 64 << 20
"""Smaller blocks share a request of this size."""
MAX_ASKED = 1 << 16
"""Keys that the store is being asked about at once; others count as missing meanwhile."""
MAX_LOOKED_FOR = 256
"""Blocks that are asked for again at once, and blocks before them. They are written in the order of their chain."""

_DONE = {Op.READ: (Outcome.OK,), Op.WRITE: (Outcome.OK, Outcome.HELD)}
_ERRORS = {
    Outcome.MISSING: TierError.GONE,
    Outcome.FULL: TierError.NO_SPACE,
    Outcome.CORRUPT: TierError.CORRUPT,
    Outcome.AWAY: TierError.AWAY,
}
"""The errors of outcomes; of others, the medium has failed."""


class RemoteTier(Tier):
    """Blocks of ``payload_bytes`` each, all ranks together, in a store. ``start`` starts a process of its client.

    The store is asked about whole chains at once, and its answers are remembered for a short while. While it cannot be
    reached, nothing is held and nothing is taken on; the tier comes back by itself. A corrupt block is removed from the
    store, whoever has written it, and counts as missing until that is done. ``random`` returns numbers from 0 to 1.
    """

    is_shared = True

    def __init__(
        self,
        start: Callable[[], StoreProcess],
        payload_bytes: int,
        *,
        name: str = "remote",
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[], float] = random_module.random,
    ) -> None:
        self.name = name
        self.block_bytes = RECORD_BYTES + payload_bytes
        self._max_moving = max(1, min(MAX_MOVING_BLOCKS, MAX_MOVING_BYTES // self.block_bytes))
        self._clock = clock
        self._link = StoreLink(start, name, clock, random)
        self._presence = PresenceCache()
        self._asked: set[OffloadKey] = set()
        """Keys that the store is being asked about."""
        self._moving: dict[Op, dict[OffloadKey, bool]] = {Op.READ: {}, Op.WRITE: {}}
        """Blocks being read and written. False: the block was deleted during the transfer."""
        self._removals = Removals()
        self._unreported: list[TierResult] = []
        """Results that ``close`` has found, for ``poll``."""
        self._is_off = False
        """Whether the tier was closed or reset: nothing is held or taken on any more."""
        self._link.poll()

    @property
    def is_starting(self) -> bool:
        """Whether a process of the client runs and has not reached the store yet."""
        return self._link.is_starting

    def stats(self) -> TierStats:
        return TierStats(is_connected=self._link.is_ready)

    # Lookups.

    def contains(self, keys: Keys, ahead: Keys = ()) -> States:
        if self._is_off:
            return np.zeros(len(keys), dtype=np.uint8)
        if ahead:
            self._find(ahead)
        return self._find(keys)

    def look_for(self, keys: Keys, place: str, pause_s: float, chain: Collection[OffloadKey] = ()) -> None:
        now = self._clock()
        again = self._presence.forget_missing(keys[:MAX_LOOKED_FOR], now - pause_s)
        if again and not self._is_off:
            # Values may share an object, which has the name of the first. So blocks before are asked for too, also if
            # they are on the device.
            before = list(takewhile(lambda key: key != again[0], chain))[-MAX_LOOKED_FOR:]
            self._presence.forget_missing(before, now - pause_s)
            unknown = np.flatnonzero(self._presence.states(before, now) == RETRY)
            self._ask([before[i] for i in unknown.tolist()] + again)

    def _find(self, keys: Keys) -> States:
        """Returns one state per key, and asks the store about unknown keys."""
        states = self._presence.states(keys, self._clock())
        unknown = np.flatnonzero(states == RETRY)
        if len(unknown):
            names = [keys[i] for i in unknown.tolist()] if len(unknown) < len(keys) else list(keys)
            self._ask(names)
            if not self._asked.issuperset(names):
                is_asked = np.fromiter(map(self._asked.__contains__, names), np.bool_, len(names))
                states[unknown[~is_asked]] = MISS
        return states

    def _ask(self, keys: Keys) -> None:
        """Asks the store, if it can be reached, about the ``keys`` that no request under way names."""
        if not self._link.is_ready or self._asked.issuperset(keys):
            return
        new = [key for key in dict.fromkeys(keys) if key not in self._asked and len(key) <= MAX_KEY_BYTES]
        new = new[: MAX_ASKED - len(self._asked)]
        for start in range(0, len(new), MAX_KEYS):
            part = new[start : start + MAX_KEYS]
            if not self._link.send(Op.LOOKUP, part):
                return
            self._asked.update(part)

    # Transfers.

    def read(self, keys: Keys, slots: Slots) -> list[OffloadKey]:
        return self._begin(Op.READ, keys, slots, MISS)

    def write(self, keys: Keys, slots: Slots) -> list[OffloadKey]:
        taken = self._begin(Op.WRITE, keys, slots, HIT)
        # A block can be read only after the report of its write.
        self._presence.note_missing(taken, self._clock(), float("inf"))
        return taken

    def _begin(self, op: Op, keys: Keys, slots: Slots, refused: int) -> list[OffloadKey]:
        """Begins the transfers of the ``keys`` that are not in the state ``refused``. Returns them."""
        if self._is_off or not keys or not self._link.is_ready:
            return []
        moving = self._moving[op]
        fits = self._presence.states(keys, self._clock()) != refused
        chosen = [i for i in np.flatnonzero(fits).tolist() if self._may_move(keys[i])]
        del chosen[max(0, self._max_moving - len(moving)) :]
        step = max(1, REQUEST_BYTES // self.block_bytes)
        taken: list[OffloadKey] = []
        for start in range(0, len(chosen), step):
            part = chosen[start : start + step]
            names = [keys[i] for i in part]
            if not self._link.send(op, names, slots[part].tolist()):
                break
            taken += names
        moving.update(dict.fromkeys(taken, True))
        return taken

    def _may_move(self, key: OffloadKey) -> bool:
        is_moving = any(key in moving for moving in self._moving.values())
        return not is_moving and key not in self._removals and len(key) <= MAX_KEY_BYTES

    def poll(self) -> list[TierResult]:
        results, self._unreported = self._unreported, []
        for request, response in self._link.poll():
            results += self._take(request, response)
        self._ask_to_remove()
        return results

    def _take(self, request: StoreRequest, response: Response) -> list[TierResult]:
        if request.op is Op.LOOKUP:
            self._end_lookup(request.keys, response)
        elif request.op is Op.REMOVE:
            self._end_removal(request.keys, response)
        else:
            return self._end_transfers(request, response)
        return []

    def _end_lookup(self, keys: Keys, response: Response) -> None:
        """Takes in an answer as old as it is: an idle engine may take it in much later."""
        self._asked.difference_update(keys)
        # A block that is being written or removed is not found before that ends. The write may also have ended after
        # the store was asked.
        answers = [
            (key, outcome)
            for key, outcome in zip(keys, response.outcomes, strict=True)
            if key not in self._moving[Op.WRITE]
            and key not in self._removals
            and (outcome is Outcome.OK or not self._presence.is_present_since(key, response.begun))
        ]
        self._presence.note_present([key for key, outcome in answers if outcome is Outcome.OK], response.ended)
        self._presence.note_missing([key for key, outcome in answers if outcome is not Outcome.OK], response.ended)
        self._removals.note_missing(key for key, outcome in answers if outcome is Outcome.MISSING)
        self.num_failed_lookups += Outcome.FAILED in response.outcomes

    def _end_removal(self, keys: Keys, response: Response) -> None:
        kept = (Outcome.FAILED, Outcome.AWAY)
        removed = [key for key, outcome in zip(keys, response.outcomes, strict=True) if outcome not in kept]
        self._removals.answered(removed, len(removed) < len(keys), self._clock())
        self._presence.note_missing(removed, self._clock())

    def _end_transfers(self, request: StoreRequest, response: Response) -> list[TierResult]:
        op, begun, ended = request.op, response.begun, response.ended
        seconds = max(0.0, ended - begun) / len(request.keys)
        results = []
        for key, outcome in zip(request.keys, response.outcomes, strict=True):
            is_wanted = self._moving[op].pop(key)
            self._note_end(op, key, outcome, is_wanted)
            error = None if outcome in _DONE[op] else _ERRORS.get(outcome, TierError.IO)
            if not is_wanted:
                error = TierError.GONE
            nbytes = self.block_bytes if outcome is Outcome.OK and is_wanted else 0
            results.append(TierResult(key, op is Op.READ, error, nbytes, seconds, begun, ended))
        return results

    def _note_end(self, op: Op, key: OffloadKey, outcome: Outcome, is_wanted: bool) -> None:
        now = self._clock()
        if outcome is Outcome.CORRUPT or (op is Op.WRITE and outcome is Outcome.OK and not is_wanted):
            self._removals.remove([key])
            self._presence.note_missing([key], now, float("inf"))
        elif key in self._removals or not is_wanted:
            self._presence.note_missing([key], now)
        elif outcome in (Outcome.OK, Outcome.HELD):
            self._presence.note_present([key], now)
            if op is Op.WRITE and outcome is Outcome.OK:
                self._removals.note_written([key])
        else:
            self._presence.note_missing([key], now)
            if outcome is Outcome.MISSING:
                self._removals.note_missing([key])

    def _ask_to_remove(self) -> None:
        keys = self._removals.to_ask(self._clock()) if self._link.is_ready else []
        # A write that is under way would bring the block back.
        keys = [key for key in keys if key not in self._moving[Op.WRITE]]
        if keys and self._link.send(Op.REMOVE, keys):
            self._removals.asked()

    def take_evicted(self) -> list[OffloadKey]:
        return self._removals.take_lost()

    def wait(self, timeout_s: float) -> None:
        if not self._unreported:
            self._link.wait(timeout_s)

    # Order and removal.

    def touch(self, keys: Keys, stored: Collection[OffloadKey] | None = None) -> None:
        """Does nothing: the store has an order of its own."""

    def delete(self, keys: Keys) -> None:
        if self._is_off:
            return
        self._drop_transfers(keys)
        self._removals.delete(keys)
        self._presence.note_missing(keys, self._clock())
        self._ask_to_remove()

    def _drop_transfers(self, keys: Keys) -> None:
        for moving in self._moving.values():
            moving.update((key, False) for key in keys if key in moving)

    def reset(self) -> None:
        for moving in self._moving.values():
            self._drop_transfers(list(moving))
        self._presence.clear()
        self._is_off = True

    def close(self) -> None:
        self._is_off = True
        for request, response in self._link.close(CLOSE_DEADLINE_S):
            self._unreported += self._take(request, response)
        self._presence.clear()

    def check_integrity(self) -> None:
        if any(len(moving) > self._max_moving for moving in self._moving.values()):
            raise IntegrityError(f"the {self.name} tier moves more than {self._max_moving} blocks at once")
        if len(self._asked) > MAX_ASKED:
            raise IntegrityError(f"the {self.name} tier asks about more than {MAX_ASKED} keys at once")

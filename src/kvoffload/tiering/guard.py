"""GuardedTier: a tier whose exceptions and wrong answers cost nothing but the tier itself."""

from __future__ import annotations

import logging
import reprlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import groupby, repeat
from numbers import Integral, Real
from types import NoneType
from typing import Any, TypeVar, cast

import numpy as np

from kvoffload.abc import (
    IntegrityError,
    Keys,
    OffloadingEvent,
    OffloadKey,
    RetainRefusal,
    Slots,
    States,
    Tier,
    TierError,
    TierResult,
    TierStats,
)
from kvoffload.abc.tier import MISS, PENDING, RETRY
from kvoffload.cache.history import MAX_PENDING_EVENTS

logger = logging.getLogger(__name__)

MAX_AMOUNT = 1 << 62
"""The most bytes, blocks, lookups or seconds that a tier may report: sums of them are finite."""
ALWAYS_ASKED = ("reset", "close")
"""The methods that are called although the tier has a fault. So is ``poll``."""

STORAGE_MEDIUM = "STORAGE"
"""The medium of every lower tier, as vLLM names it. Events distinguish tiers by their names."""
Answer = TypeVar("Answer")
Method = TypeVar("Method", bound=Callable[..., Any])


# Checks of answers. Each returns the answer, and raises TypeError or ValueError if it breaks the contract.


def _check_type(kind: Any, answer: Any) -> Any:
    if not isinstance(answer, kind):
        raise TypeError(f"must be {kind}, not {reprlib.repr(answer)}")
    return answer


def _check_keys(answer: Any) -> list[OffloadKey]:
    keys = list(_check_type(Collection, answer))
    if not all(issubclass(kind, bytes) for kind in set(map(type, keys))):
        raise TypeError(f"must be keys, not {reprlib.repr(keys)}")
    return keys


def _check_taken(keys: Keys, answer: Any) -> list[OffloadKey]:
    taken = list(_check_type(Collection, answer))
    if taken == keys:
        # Not the tier's own objects: bytearrays are equal to the keys and have no hash.
        return list(keys)
    if len(set(keys).intersection(taken)) < len(taken):
        raise ValueError(f"must be some of the given keys, each once, not {reprlib.repr(taken)}")
    return taken


def _check_states(num_keys: int, answer: Any) -> States:
    states: States = np.asarray(answer)
    is_one_each = states.shape == (num_keys,) and states.dtype.kind in "biu"
    if not is_one_each or ((states < MISS) | (states == PENDING) | (states > RETRY)).any():
        raise ValueError(f"must be HIT, MISS or RETRY for each of {num_keys} keys, not {reprlib.repr(states)}")
    return states


def _check_results(results: list[TierResult]) -> set[tuple[OffloadKey, bool]]:
    """Returns key and direction of each transfer."""
    keys, is_read, errors, nbytes, seconds, begun, ended = zip(*results, strict=True)
    transfers = set(zip(keys, is_read, strict=True))
    amounts, numbers = [*nbytes, *seconds], [*nbytes, *seconds, *begun, *ended]
    if (
        set(map(type, results)) != {TierResult}
        or len(transfers) != len(results)
        or not set(map(type, errors)) <= {NoneType, TierError}
        or not all(issubclass(kind, Real) for kind in set(map(type, numbers)))
        # The sum shows one that is not a number.
        or not (
            min(amounts) >= 0 and -MAX_AMOUNT <= min(numbers) <= max(numbers) <= MAX_AMOUNT and sum(numbers) < 1e300
        )
    ):
        raise ValueError(f"must be TierResults, one per transfer, not {reprlib.repr(results)}")
    return transfers


class TierEvents:
    """The events of ``tier``, in order, at most MAX_PENDING_EVENTS blocks of them: beyond it the oldest are lost.

    A block is announced when its write has ended well, also if a shared medium held it already, and when it was read,
    so that a router learns of blocks that the tier held before this process started. What has left is announced before
    what has ended, because a block that ends now was given to the tier before, and may have left before that.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._pending: deque[tuple[OffloadKey, bool]] = deque(maxlen=MAX_PENDING_EVENTS)
        """Blocks, and whether they have left."""
        self.deleted: deque[OffloadKey] = deque(maxlen=MAX_PENDING_EVENTS)
        """Blocks that the tier was given to delete since its latest ``poll``."""
        tier.take_evicted()

    def ended(self, results: Sequence[TierResult]) -> None:
        """Takes in what ``poll`` of the tier has reported."""
        lost = [each.key for each in results if each.is_read and each.error in (TierError.CORRUPT, TierError.GONE)]
        left = dict.fromkeys([*self.deleted, *lost, *self._tier.take_evicted()])
        self.deleted.clear()
        self._pending.extend((key, True) for key in left)
        self._pending.extend((each.key, False) for each in results if each.ok)

    def take(self) -> Iterator[OffloadingEvent]:
        """Yields the events since the last call."""
        pending = [self._pending.popleft() for _ in range(len(self._pending))]
        for removed, blocks in groupby(pending, key=lambda each: each[1]):
            keys = [key for key, _ in blocks]
            yield OffloadingEvent(keys, STORAGE_MEDIUM, removed, tier=self._tier.name, is_shared=self._tier.is_shared)


def _guarded(method: Method, otherwise: Any = None, check: Callable[[Any], Any] | None = None) -> Method:
    """Returns ``method`` of Tier for GuardedTier, see ``GuardedTier._ask``."""

    def ask(self: GuardedTier, *args: Any) -> Any:
        return self._ask(method.__name__, otherwise, check, *args)

    return cast(Method, ask)


class GuardedTier(Tier):
    """Passes calls on to ``tier`` and checks the answers.

    If a call raises, or an answer is of no use, ``fault`` says so. From then on the tier answers that it holds nothing
    and takes nothing on; only ``poll``, ``reset`` and ``close`` still reach it. A read or a write that raises, or whose
    answer is wrong, counts as taken on, because threads of the tier may use the host slots: these stay taken until
    ``poll`` reports them. An IntegrityError is raised on: it is a check of kvoffload's own.

    ``events``, with ``enable_events``, are the tier's events, else None. ``num_failed_lookups`` is that of the latest
    ``poll``.
    """

    def __init__(self, tier: Tier, enable_events: bool = False) -> None:
        self._tier = tier
        self.fault: str | None = None
        """Why the tier cannot be used any more; None if it can."""
        self.name = tier.name
        self.is_shared = tier.is_shared
        self.block_bytes = tier.block_bytes
        self._stats = TierStats(is_connected=False)
        """The latest that it has answered."""
        self._under_way: set[tuple[OffloadKey, bool]] = set()
        """Key and direction of each transfer that ``poll`` has not reported yet."""
        self.events = TierEvents(self) if enable_events else None

    def stats(self) -> TierStats:
        self._stats = self._ask("stats", self._stats, partial(_check_type, TierStats))
        return self._stats

    tenant_uses = _guarded(Tier.tenant_uses, (), partial(_check_type, Sequence))
    most_blocks = _guarded(Tier.most_blocks, None, partial(_check_type, Integral | None))
    touch = _guarded(Tier.touch)
    retain = _guarded(Tier.retain, RetainRefusal.NO_QUOTA, partial(_check_type, RetainRefusal | None))
    hand_over = _guarded(Tier.hand_over, "", partial(_check_type, str))
    look_for = _guarded(Tier.look_for)
    reset = _guarded(Tier.reset)
    take_evicted = _guarded(Tier.take_evicted, (), _check_keys)
    wait = _guarded(Tier.wait)
    close = _guarded(Tier.close)

    def contains(self, keys: Keys, ahead: Keys = ()) -> States:
        missing = np.zeros(len(keys), dtype=np.uint8)
        return self._ask("contains", missing, partial(_check_states, len(keys)), keys, ahead)

    def read(self, keys: Keys, slots: Slots) -> list[OffloadKey]:
        return self._begin("read", keys, slots)

    def write(self, keys: Keys, slots: Slots) -> list[OffloadKey]:
        return self._begin("write", keys, slots)

    def _begin(self, name: str, keys: Keys, slots: Slots) -> list[OffloadKey]:
        if self.fault is not None:
            return []
        taken = self._ask(name, list(keys), partial(_check_taken, keys), keys, slots)
        self._under_way.update(zip(taken, repeat(name == "read")))
        return taken

    def delete(self, keys: Keys) -> None:
        self._ask("delete", None, None, keys)
        if self.events is not None:
            self.events.deleted += keys

    def poll(self) -> list[TierResult]:
        results: list[TierResult] = []
        try:
            answer, num_failed = self._tier.poll(), self._tier.num_failed_lookups
            if num_failed != self.num_failed_lookups:
                self.num_failed_lookups = _check_type(Integral, num_failed)
            if answer != [] and (listed := list(_check_type(Collection, answer))):
                results = self._end(listed)
        except IntegrityError:
            raise
        except Exception as error:
            self._fail("poll", error)
        if self.events is not None:
            self.events.ended(results)
        return results

    def _end(self, results: list[TierResult]) -> list[TierResult]:
        """Ends the transfers that ``results`` report. Returns those of ``results`` that are right."""
        try:
            transfers = _check_results(results)
            if not transfers <= self._under_way:
                raise ValueError(f"poll reported blocks that were not under way: {reprlib.repr(results)}")
        except Exception as error:
            self._fail("poll", error)
            return [right for each in results for right in self._end([each])] if len(results) > 1 else []
        self._under_way -= transfers
        return results

    def check_integrity(self) -> None:
        self._tier.check_integrity()

    def _ask(self, name: str, otherwise: Answer, check: Callable[[Any], Answer] | None, *args: Any) -> Answer:
        """Returns what ``check`` returns for the answer of the tier's method ``name``; ``otherwise`` if there is
        nothing to check, if the tier has a fault, or if it raises or ``check`` does."""
        if self.fault is not None and name not in ALWAYS_ASKED:
            return otherwise
        try:
            answer = getattr(self._tier, name)(*args)
            return otherwise if check is None else check(answer)
        except IntegrityError:
            raise
        except Exception as error:
            self._fail(name, error)
            return otherwise

    def _fail(self, name: str, error: Exception) -> None:
        if self.fault is None:
            logger.error("kvoffload: %s of the %s tier failed: a bug in the tier", name, self.name, exc_info=error)
            self.fault = f"{name} failed ({type(error).__name__})"

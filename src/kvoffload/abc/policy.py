"""The contract of a cache policy, which decides which blocks are evicted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.abc.types import Keys, Slots

# Neither of the two is frozen: there is one per request, and to set the fields of a frozen one takes long.


@dataclass(eq=False)
class Access:
    """One request's use of its chain of blocks. Read only."""

    keys: Keys
    """The whole chain, head first, cached or not. A key may occur twice."""
    found: Slots
    """The slot of each of ``keys``; -1 if the key is absent."""
    slots: Slots
    """The cached blocks of the chain, each once, tail first."""
    ready: npt.NDArray[np.bool_]
    """For each of ``slots``: whether it has been written. A block that is still being written is used for the first
    time, by the requests that wait for it."""
    time: float
    """When the request came, in seconds of the manager's clock."""

    @cached_property
    def absent(self) -> Keys:
        """The keys that are not cached, each once, tail first."""
        return list(reversed(dict.fromkeys(compress(self.keys, (self.found < 0).tolist()))))


@dataclass(slots=True, eq=False)
class Eviction:
    """The room that a store needs. Read only."""

    n: int
    """The number of blocks that must leave."""
    busy: npt.NDArray[np.bool_]
    """For each slot: whether its block must stay. It is being written or read, or belongs to the chain that is
    stored."""
    key_of: npt.NDArray[np.object_]
    """For each slot: the key of its block."""
    entering: Keys
    """The keys for which room is made. They are inserted next."""


class CachePolicy(ABC):
    """Decides which blocks are evicted. It keeps an order, and knows nothing of bytes, pins and events.

    A policy knows a block by its slot, a number below ``capacity``. All calls are about batches. Batches are tail
    first, in the order in which blocks become more recent: the last one, the head of a chain, becomes the most
    recent, so that a chain loses its tail before its head. Only ``Access.keys`` is head first.

    The caller, a manager, promises:

    - ``insert`` gets slots that the policy does not hold; all other calls get slots that it holds, each once per call.
    - ``evict`` asks for no more blocks than are evictable.
    - For each request it calls ``access`` once, with the whole chain; then ``admit``, ``evict`` and ``insert`` as
      blocks are stored, in one or several parts; and in the end ``reorder``. Requests may overlap.

    The four abstract methods are enough for a policy that works. Override others where the policy cares.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.full = capacity
        """How many blocks the policy holds when room is short. The caller sets it, at any time: to fewer than
        ``capacity`` where tenants share the slots. A policy that divides its blocks into parts should divide so many;
        it may hold more for a while."""
        self.must_store = False
        """Whether the caller stores every block, and never calls ``admit``. The caller sets it."""

    def put_behind(self, device_blocks: int) -> None:
        """Tells, before any block is inserted, that an engine's device cache of so many blocks is in front.

        Then the policy holds the blocks that the device does not hold. One that leaves the device is inserted, if it is
        admitted. One that the device holds again is lent, and inserted when it has left it. Uses that the device serves
        reach the policy by ``access`` as all others. By default, nothing changes.
        """

    @abstractmethod
    def insert(self, slots: Slots, keys: Keys) -> None:
        """Adds new blocks: ``keys[i]`` is in ``slots[i]``. They are busy until they have been written."""

    @abstractmethod
    def evict(self, eviction: Eviction) -> Slots:
        """Removes ``eviction.n`` blocks and returns their slots, each once, in the order in which they leave.

        Busy blocks must stay. They are passed over, and keep their places.
        """

    @abstractmethod
    def remove(self, slots: Slots) -> None:
        """Removes blocks that vanished for another reason than eviction. They may be busy."""

    def lend(self, slots: Slots) -> None:
        """Removes blocks that the device holds again. What is known of them counts when they come back."""
        self.remove(slots)

    @abstractmethod
    def clear(self) -> None:
        """Removes all blocks, and forgets what was learned from absent keys."""

    def access(self, access: Access) -> None:
        """Records that a request uses a chain. By default, uses change nothing."""

    def reorder(self, slots: Slots, new: npt.NDArray[np.bool_]) -> None:
        """Puts a request's whole chain into one order when it will store no more. This is no further use.

        The request has used ``slots``; it has stored those that are ``new``, possibly in parts. A policy in which uses
        move blocks should move all of ``slots``, another policy the new ones. By default, the order stays: then a
        chain that was stored in parts loses its head first.
        """

    def admit(self, keys: Keys, shortage: int) -> npt.NDArray[np.bool_] | None:
        """Decides which of ``keys`` are worth storing; ``shortage`` of them have no free slot. Returns None for all.

        The keys are absent, and ordered as in their chain. Must change nothing: the store may still fail. Called only
        if there is a shortage and the manager may refuse blocks.
        """
        return None

    def refuse(self, keys: Keys) -> None:
        """Records that absent ``keys`` were used last now and are not stored: ``admit`` refused them or a block before
        them in their chain, or the device holds them. By default, that is forgotten."""

    def mark_evictable(self, slots: Slots) -> None:
        """Tells that these blocks are not busy any more: ``evict`` may have passed over them. Their places stay.

        A policy that looks at all its blocks in every ``evict`` need not care.
        """

    def state(self) -> Mapping[str, Any]:
        """Returns what a policy that tunes itself has chosen, for metrics and records of misses: ``rule``, a name, and
        ``scores``, a number for each rule. By default empty."""
        return {}

    def check_integrity(self, slots: Slots) -> None:
        """Raises IntegrityError unless the policy holds exactly ``slots``. By default, nothing is checked."""

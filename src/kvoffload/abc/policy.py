"""The contract of a cache policy, which decides which block is evicted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.abc.types import (
    OffloadKey,
    Slots,
)


class CachePolicy(ABC):
    """Decides which block leaves. Owns order only: no bytes, no pins, no events.

    Blocks are known by slot; a policy may keep numpy arrays of ``capacity`` entries. The caller (the
    manager) promises: a slot is inserted once until it is evicted or removed; ``pin``, ``unpin``,
    ``settle``, ``touch`` and ``remove`` are called for inserted slots only, each slot at most once in a
    call; ``evict`` is asked for at most as many blocks as are evictable.

    The policy must: return from ``evict`` exactly ``n`` distinct slots, none of them ``busy``; forget
    them; keep every list in the order the calls came. Lists are given oldest first: the last slot
    becomes the most recent.

    One request is one use of its blocks, however often the engine tries it. Of each request the policy is told, in
    this order: ``observe`` (the whole chain), ``touch_absent`` (what of it is not here), ``touch`` (what is); then, as
    it computes, ``admit``, ``evict`` and ``insert`` for what it stores, in one or several parts; at its end
    ``refresh``.
    """

    may_refuse = True
    """Whether ``admit`` is heeded. Not in a host pool through which lower tiers are fed: there all must enter."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    def observe(self, keys: Sequence[OffloadKey]) -> None:
        """A request asks for a chain: ``keys``, head first, cached or not."""

    @abstractmethod
    def insert(self, slots: Slots, keys: Sequence[OffloadKey]) -> None:
        """New blocks, at the recent end. They are being written: not evictable until ``settle``."""

    @abstractmethod
    def touch(self, slots: Slots, ready: npt.NDArray[np.bool_], pinned: npt.NDArray[np.bool_]) -> None:
        """Blocks were used. ``ready[i]`` False: still being written. ``pinned[i]``: a reader holds it, see ``pin``."""

    def touch_absent(self, keys: Sequence[OffloadKey]) -> None:
        """Keys that are not cached were used, the last of the chain first. Policies with ghost lists learn from it."""

    def refresh(self, slots: Slots, new: npt.NDArray[np.bool_], pinned: npt.NDArray[np.bool_]) -> None:
        """A request that used or stored ``slots``, one by one or in parts, has all of its chain now, which takes the
        places that it would have if all had come at this moment. No further use. ``new[i]``: stored by this request;
        policies in which a use moves nothing move only those."""

    def admit(self, keys: Sequence[OffloadKey], shortage: int) -> npt.NDArray[np.bool_] | None:
        """``keys``, absent and in the order of their chain, are to be stored, and ``shortage`` of them have no free
        slot. Which may enter; None: all. Blocks are evicted for those only. Called before ``evict`` and ``insert``,
        heeded if ``may_refuse``."""
        return None

    def refuse(self, keys: Sequence[OffloadKey]) -> None:
        """``keys``, absent, go on a chain of which ``admit`` has refused a block. They are not stored, and to be
        remembered as if ``admit`` had refused them too."""

    def state(self) -> Mapping[str, Any]:
        """What a policy that adapts goes by now, for metrics and records of misses: ``rule``, a name, and ``scores``, a
        number a rule. Empty: it does not adapt."""
        return {}

    @abstractmethod
    def settle(self, slots: Slots) -> None:
        """Blocks that were passed over may be evicted now, from the place they had."""

    @abstractmethod
    def pin(self, slots: Slots) -> None:
        """Blocks get their first reader: they must not be evicted until ``unpin``."""

    @abstractmethod
    def unpin(self, slots: Slots) -> None:
        """The last reader has let go: blocks may be evicted again, from the recent end of the list they belong to if
        uses move blocks in it."""

    @abstractmethod
    def evict(self, n: int, busy: npt.NDArray[np.bool_], key_of: npt.NDArray[np.object_]) -> Slots:
        """Chooses and forgets ``n`` blocks. ``busy[slot]``: being written, pinned or protected; such a
        block keeps its place. A busy block that is not pinned is announced by ``settle`` when it no longer
        is. ``key_of[slot]`` is its key."""

    @abstractmethod
    def remove(self, slots: Slots) -> None:
        """Blocks vanished for another reason than ``evict``."""

    @abstractmethod
    def clear(self) -> None:
        """Everything vanished; what was learned about absent keys too."""

    def check_integrity(self, slots: Slots) -> None:
        """Raises IntegrityError unless the policy knows exactly ``slots``. A policy that does not check serves as
        well; the conformance suite asks for it."""

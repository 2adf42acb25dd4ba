"""GuardedTier: a tier whose bugs cost its own blocks and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from itertools import repeat
from typing import TypeVar

import numpy as np

from kvoffload.abc import IntegrityError, OffloadKey, Slots, States, TenantUse, Tier, TierResult
from kvoffload.abc.tier import MISS, PENDING, RETRY
from kvoffload.tiers.events import TierEvents

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class GuardedTier(Tier):
    """Passes calls on to ``tier`` and checks the answers.

    If a call raises, or an answer breaks the contract, ``fault`` says so. From then on the tier answers that it holds
    nothing and takes nothing on; only ``poll``, ``reset`` and ``close`` still reach it. A read or a write that raises
    counts as taken on, because threads of the tier may use the host slots: these stay taken until ``poll`` reports
    them. An IntegrityError is raised on: it is a check of kvoffload's own.

    ``events``, with ``enable_events``, are the tier's events, else None.
    """

    def __init__(self, tier: Tier, enable_events: bool = False) -> None:
        self._tier = tier
        self.name = tier.name
        self.is_shared = tier.is_shared
        self.fault: str | None = None
        """Why the tier cannot be used any more; None if it can."""
        self._under_way: set[tuple[OffloadKey, bool]] = set()
        """Key and direction of each transfer that ``poll`` has not reported yet."""
        self.events = TierEvents(self) if enable_events else None

    @property
    def capacity_bytes(self) -> int | None:
        return self._tier.capacity_bytes

    @property
    def block_bytes(self) -> int:
        return self._tier.block_bytes

    @property
    def num_blocks(self) -> int | None:
        return self._try("num_blocks", lambda: self._tier.num_blocks, None)

    @property
    def used_bytes(self) -> int | None:
        return self._try("used_bytes", lambda: self._tier.used_bytes, None)

    def most_blocks(self, key: OffloadKey) -> int | None:
        return self._try("most_blocks", lambda: self._tier.most_blocks(key), None)

    def tenant_uses(self) -> Sequence[TenantUse]:
        return self._try("tenant_uses", lambda: list(self._tier.tenant_uses()), list[TenantUse]())

    @property
    def num_evicted(self) -> int:
        return self._try("num_evicted", lambda: self._tier.num_evicted, 0)

    @property
    def num_failed_lookups(self) -> int:
        return self._try("num_failed_lookups", lambda: self._tier.num_failed_lookups, 0)

    @property
    def is_connected(self) -> bool:
        return self._try("is_connected", lambda: self._tier.is_connected, False)

    def expect(self, keys: Sequence[OffloadKey]) -> None:
        if self.fault is None:
            self._try("expect", lambda: self._tier.expect(keys), None)

    def contains(self, keys: Sequence[OffloadKey]) -> States:
        missing = np.zeros(len(keys), dtype=np.uint8)
        if self.fault is not None:
            return missing
        states = self._try("contains", lambda: np.asarray(self._tier.contains(keys)), missing)
        if states.shape != missing.shape or ((states < MISS) | (states == PENDING) | (states > RETRY)).any():
            self._blame("contains did not answer HIT, MISS or RETRY for each key")
            return missing
        return states

    def read(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        return self._begin("read", keys, lambda: self._tier.read(keys, slots))

    def write(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        return self._begin("write", keys, lambda: self._tier.write(keys, slots))

    def _begin(
        self, name: str, keys: Sequence[OffloadKey], call: Callable[[], Sequence[OffloadKey]]
    ) -> list[OffloadKey]:
        if self.fault is not None:
            return []
        taken = self._try(name, lambda: list(call()), list(keys))
        if taken != keys:
            distinct, given = set(taken), set(keys)
            if len(distinct) != len(taken) or not distinct <= given:
                self._blame(f"{name} took on blocks that it was not given, or one twice")
                taken = [key for key in dict.fromkeys(taken) if key in given]
        self._under_way.update(zip(taken, repeat(name == "read")))
        return taken

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        if self.fault is None:
            self._try("touch", lambda: self._tier.touch(keys), None)

    def reorder_chain(self, keys: Sequence[OffloadKey], stored: Collection[OffloadKey]) -> None:
        if self.fault is None:
            self._try("reorder_chain", lambda: self._tier.reorder_chain(keys, stored), None)

    def delete(self, keys: Sequence[OffloadKey]) -> None:
        if self.fault is None:
            self._try("delete", lambda: self._tier.delete(keys), None)
            if self.events is not None:
                self.events.deleted(keys)

    def reset(self) -> None:
        self._try("reset", self._tier.reset, None)

    def take_evicted(self) -> list[OffloadKey]:
        return self._try("take_evicted", lambda: list(self._tier.take_evicted()), list[OffloadKey]())

    def poll(self) -> list[TierResult]:
        known = self._try("poll", lambda: self._known(list(self._tier.poll())), list[TierResult]())
        if self.events is not None:
            self.events.ended(known)
        return known

    def _known(self, results: list[TierResult]) -> list[TierResult]:
        """Returns those of ``results`` whose transfers were under way, and ends these."""
        if not results:
            return results
        keys, is_read, *_ = zip(*results, strict=True)
        transfers = set(zip(keys, is_read, strict=True))
        if len(transfers) == len(results) and transfers <= self._under_way:
            self._under_way -= transfers
            return results
        self._blame("poll reported a block that was not under way")
        known = []
        for result, transfer in zip(results, zip(keys, is_read, strict=True), strict=True):
            if transfer in self._under_way:
                self._under_way.remove(transfer)
                known.append(result)
        return known

    def wait(self, timeout_s: float) -> None:
        if self.fault is None:
            self._try("wait", lambda: self._tier.wait(timeout_s), None)

    def close(self) -> None:
        self._try("close", self._tier.close, None)

    def check_integrity(self) -> None:
        self._tier.check_integrity()

    def _try(self, name: str, call: Callable[[], Answer], otherwise: Answer) -> Answer:
        try:
            return call()
        except IntegrityError:
            raise
        except Exception:
            if self.fault is None:
                logger.exception("kvoffload: %s of the %s tier raised an error", name, self.name)
            self._blame(f"{name} raised an error")
            return otherwise

    def _blame(self, fault: str) -> None:
        if self.fault is None:
            self.fault = fault

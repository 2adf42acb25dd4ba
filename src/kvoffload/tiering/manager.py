"""TieredOffloadingManager: host memory first, then lower tiers that must not stall the engine.

Everything here runs on the scheduler's thread. Tiers do their work on threads of their own and report in ``Tier.poll``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import compress

import numpy as np

from kvoffload.abc import (
    HandedOver,
    IntegrityError,
    Keys,
    LoadStoreSpec,
    Miss,
    MissReason,
    Need,
    Offer,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    Retained,
    States,
    Tier,
    TieredManager,
)
from kvoffload.abc.tier import HIT, PENDING, RETRY
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.tiering.common import WRITE_SHARE, Common, TieringSettings, TierSettings
from kvoffload.tiering.guard import GuardedTier
from kvoffload.tiering.health import LowerTier
from kvoffload.tiering.lookup import LoadGate, TierSearch, explain_miss, find_hit, states_below
from kvoffload.tiering.prefetch import Prefetcher
from kvoffload.tiering.rates import by_direction
from kvoffload.tiering.steps import TierSteps
from kvoffload.tiering.waits import Waits

__all__ = ["WRITE_SHARE", "TierSettings", "TieredOffloadingManager", "TieringSettings"]

SHARED_RESET = (
    "the weights may have changed, so this server must not load blocks from before the reset, and other servers use "
    "the blocks of this tier"
)
SHARED_RESET_EFFECT = "nothing was deleted there; restart this server to use it again"


class TieredOffloadingManager(TieredManager):
    """A manager with ``host`` in front of ``tiers``, the fastest first.

    Chains that requests touch or store are written through to every tier, see WriteThrough. A lookup that finds blocks
    below the host answers RETRY, and the request waits, see Waits: ``poll`` begins to read them, together for all
    lookups of a step and each key at most once at a time. Without a context, or with one that may not wait, only host
    memory is consulted. A tier that fails or hangs is paused and tested, see CircuitBreaker. After a reset, a shared
    tier is not used any more.

    Make ``host`` with ``must_store``: nothing behind a block that its policy refuses is written to a tier. ``random``
    returns numbers from 0 to 1. If ``host`` has events, so have the tiers.
    """

    def __init__(
        self,
        host: PolicyOffloadingManager,
        tiers: Sequence[Tier],
        settings: TieringSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[], float] = random.random,
    ) -> None:
        self.host = host
        self._common = Common(host, settings, clock)
        self._clock = clock
        self._unwritten = self._common.unwritten
        self.tiers = self._common.tiers = tuple(
            LowerTier(self._common, i, GuardedTier(tier, host.history.has_events), random)
            for i, tier in enumerate(tiers)
        )
        """The fastest first; read only."""
        self._waits = Waits(self._common)
        self._gate = LoadGate(self._common, self._waits)
        self._steps = TierSteps(self._common, self._waits)
        self.prefetcher = Prefetcher(self._common, self._waits, self._gate, self._steps.on_device)

    # Lookup. ``lookup`` is the contract's: it calls ``lookup_each`` with Need.RUN.

    def lookup_each(self, keys: Keys, req_context: ReqContext | None = None, need: Need = Need.ALL) -> States:
        if req_context is None or not req_context.may_wait:
            return self.host.lookup_each(keys, req_context, need)
        wait = self._waits.get(req_context.req_id)
        if wait is not None and wait.is_waiting and wait.asked_at != self._waits.num_polls:
            return np.full(len(keys), RETRY, dtype=np.uint8)
        if self._steps.is_off or not self._waits.may_ask(wait):
            return self.host.lookup_each(keys, req_context, need)
        if self.host.admission is not None:
            self.host.admission.count(keys, req_context)
        search = TierSearch(self._gate, self._clock(), wait, req_context.awaited)
        states, coming = find_hit(search, keys, need)
        self._steps.may_change |= search.is_unanswered
        if coming:
            wait = self._waits.begin(coming, req_context.req_id)
            # It may bring the whole chain.
            wait.chain = self._steps.touched.pop(req_context.req_id, wait.chain)
        return states

    def states(self, keys: Keys, chain: Keys = ()) -> States:
        """Returns the state of every key without promoting any, and without counting a request: HIT for one that the
        host or a tier holds, RETRY for one that a tier must be asked for again. ``chain``: what may be looked up
        next."""
        states = self.host.table.states(keys)
        below = np.flatnonzero(states != HIT)
        if len(below):
            search = TierSearch(self._gate, self._clock())
            states[below], _ = states_below(search, [*keys, *chain], below, states[below])
            self._steps.may_change |= search.is_unanswered
            states[states == PENDING] = RETRY
        return states

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        self._gate.prefill.add(num_tokens, seconds)

    def release_request(self, req_context: ReqContext) -> Mapping[str, Keys]:
        if self.prefetcher.expected:
            self.prefetcher.forget(req_context)
        wait = self._waits.release(req_context.req_id)
        if wait is None:
            return {}
        if wait.chain:
            self._steps.offer(wait.chain, req_context.req_id, wait.promoted)
        return wait.promoted

    # Steps.

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Takes in the transfers that tiers have ended, and begins the reads that lookups have asked for, and writes.
        With ``timeout_s`` it then waits until some request has all the blocks that it waits for, until more blocks can
        be written, or until a tier may have answered."""
        if self._unwritten.slots:
            for tier in self.tiers:
                tier.writes.promised.expire()
        prefetcher = self.prefetcher
        if prefetcher.expected or prefetcher.held or prefetcher.reading:
            prefetcher.poll()
        changed = self._steps.poll()
        if timeout_s > 0:
            changed |= self._steps.wait(timeout_s)
        self._steps.may_change = False
        return changed

    def switch_off_tiers(self, reason: str) -> None:
        """Stops reading and writing all tiers. Host memory is not affected."""
        for tier in self.tiers:
            self._steps.switch_off(tier, reason)

    @property
    def has_pending_writes(self) -> bool:
        # The answer about the blocks of a test is of use for a short while only, and no request waits for it.
        return any(tier.writes.is_busy or tier.probe for tier in self.tiers)

    @property
    def has_transfers(self) -> bool:
        """Whether a tier has blocks to read or to write that it has not reported yet."""
        return any(tier.reads or tier.writes.writing for tier in self.tiers)

    @property
    def num_promotions(self) -> int:
        """Requests that wait for lower tiers, or for which promoted blocks may be pinned."""
        return len(self._waits)

    @property
    def max_promoted(self) -> int:
        """Blocks that may be read from lower tiers, or pinned after that, at a time."""
        return self._waits.reads.max_blocks

    # Loads and stores.

    def prepare_load(self, keys: Keys, req_context: ReqContext | None = None) -> LoadStoreSpec:
        return self._waits.take_pins(keys, req_context)

    def complete_load(self, blocks: LoadStoreSpec | Keys, req_context: ReqContext | None = None) -> None:
        self.host.complete_load(blocks, req_context)

    def touch(self, keys: Keys, req_context: ReqContext | None = None, chain: Keys | None = None) -> None:
        if self.prefetcher.expected or self.prefetcher.held:
            self.prefetcher.used(keys, req_context)
        found = self.host.table.find(keys)
        self.host.touch(keys, req_context, chain, found)
        for tier in self._steps.touch(keys, chain, found, req_context):
            tier.tier.touch(keys)

    def end_chain(
        self,
        keys: Keys,
        stored: Collection[OffloadKey],
        req_context: ReqContext | None = None,
        chain: Keys | None = None,
    ) -> None:
        self.host.end_chain(keys, stored, req_context)
        if req_context is not None and req_context.hints is not None and not self._steps.is_off:
            self.prefetcher.expect_return(keys, req_context)
        self._steps.end_chain(keys, stored, req_context, keys if chain is None else chain)
        self._steps.write()

    def retain(self, keys: Keys, req_context: ReqContext) -> Retained:
        """Retains ``keys`` in the first tier whose quota has room for all of them, host memory first."""
        hints = req_context.hints
        answer = self.host.retain(keys, req_context)
        if hints is None or (hints.retain_s is None and not hints.drop):
            return answer
        return self._unwritten.retain_below(keys, hints, answer)

    def hand_over(self, keys: Keys) -> HandedOver:
        return self._unwritten.hand_over(keys)

    def expect(self, keys: Keys, req_context: ReqContext) -> None:
        self.prefetcher.expect_now(keys, req_context)

    def prepare_store(
        self, keys: Keys, req_context: ReqContext | None = None, offer: Offer = Offer.COMPUTED
    ) -> PrepareStoreOutput | None:
        hints = None if req_context is None else req_context.hints
        is_promised = req_context is not None and (req_context.goes_on or (hints is not None and hints.retain_s))
        if self.host.is_behind_device and keys and offer is not Offer.LEAVING and not is_promised:
            # What leaves the device is stored then. Before, only the tiers need it.
            keys = list(compress(keys, (~self._steps.are_written(keys)).tolist()))
        return self.host.prepare_store(keys, req_context, offer)

    def note_device(self, held: Keys = (), left: Keys = ()) -> None:
        self._steps.note_device(held, left)

    def complete_store(
        self, blocks: LoadStoreSpec | Keys, req_context: ReqContext | None = None, success: bool = True
    ) -> None:
        self.host.complete_store(blocks, req_context, success)
        keys = self.host.table.loadable_keys(blocks.slots) if isinstance(blocks, LoadStoreSpec) else blocks
        if success and self._unwritten.slots:
            self._unwritten.entered(keys)
        for tier in self.tiers:
            # After a failure, chains that wait for blocks which were to become ready in the host are planned again.
            tier.writes.stored(keys if success else list(tier.writes.backlog.waited_for))
        self._steps.write()

    def note_dropped(self, keys: Keys) -> None:
        """Counts writes of ``keys``, which the host has no room for."""
        for tier in self.tiers:
            tier.count("dropped_writes", int(np.count_nonzero(tier.writes.lacks(keys))))
        self._common.reasons.record(keys, MissReason.NO_ROOM)

    # Counts, and the end.

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Returns the events of host memory, then those of each tier."""
        yield from self.host.take_events()
        for tier in self.tiers:
            if tier.tier.events is not None:
                yield from tier.tier.events.take()

    def take_counts(self) -> Mapping[str, float]:
        now, moved = self._clock(), {} if self._steps.moved is None else self._steps.moved.take()
        gauges = [each for tier in self.tiers for each in tier.gauges.take(now).items()]
        counts = {name: count for name, count in self._common.counts.items() if count}
        self._common.counts.clear()
        return {**self.host.take_counts(), **counts, **moved, **dict(gauges)}

    def explain_miss(self, key: OffloadKey) -> Miss:
        return explain_miss(key, self.host.explain_miss(key), self._common.reasons.explain(key), self.tiers)

    def drop(self, keys: Keys, only_host: bool = False) -> None:
        self._waits.drop(keys)
        if self.prefetcher.expected or self.prefetcher.held:
            self.prefetcher.blocks.let_go(keys)
        self.host.drop(keys)
        for tier in self.tiers if not only_host else ():
            tier.tier.delete(keys)
            tier.writes.note_lost(len(keys))

    def reset(self, keep_shared: bool = False, keep_own: bool = False) -> bool:
        """``keep_own``: tiers that are not shared keep their blocks for the next process, because the caller uses other
        keys from now on. See ``OffloadingManager.reset``."""
        self.prefetcher.clear()
        self._waits.release_all()
        self._steps.touched.clear()
        for tier in self.tiers:
            tier.writes.clear()
        self.host.reset()
        for tier in self.tiers:
            is_shared = tier.tier.is_shared
            if not (keep_shared if is_shared else keep_own):
                tier.tier.reset()
            if is_shared and not keep_shared:
                self._steps.switch_off(tier, SHARED_RESET, SHARED_RESET_EFFECT)
        return any(tier.tier.is_shared and not tier.is_off for tier in self.tiers)

    def shutdown(self) -> None:
        for tier in self.tiers:
            tier.tier.close()
            tier.writes.ended(by_direction(tier.tier.poll())[1])
            tier.writes.close()
        self.host.shutdown()

    def most_blocks(self, key: OffloadKey | None = None) -> int:
        return self.host.most_blocks(key)

    @property
    def num_removed(self) -> int:
        return self.host.num_removed

    def check_integrity(self) -> None:
        self.host.check_integrity()
        self._unwritten.check_integrity()
        self.prefetcher.blocks.check_integrity()
        self._waits.check_integrity()
        for tier in self.tiers:
            tier.writes.check_integrity()
            tier.tier.check_integrity()
        if any(len(tier.writes.writing) > self._steps.max_writing for tier in self.tiers):
            raise IntegrityError("more blocks are being written to lower tiers than WRITE_SHARE allows")

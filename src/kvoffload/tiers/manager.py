"""TieredOffloadingManager: host memory first, then lower tiers that must not stall the engine.

Everything here runs on the scheduler's thread. Tiers do their work on threads of their own and report in ``Tier.poll``.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np

from kvoffload.abc import (
    Admission,
    IntegrityError,
    KVGroup,
    LoadStoreSpec,
    LookupState,
    Miss,
    MissReason,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    States,
    TenantUse,
    Tier,
    TierResult,
)
from kvoffload.abc.tier import HIT, PENDING, RETRY
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.misses import MissMemory
from kvoffload.tiers.chains import BACKLOG_SHARE
from kvoffload.tiers.counts import TierCounts
from kvoffload.tiers.ended import by_direction
from kvoffload.tiers.gate import LoadGate
from kvoffload.tiers.guard import GuardedTier
from kvoffload.tiers.lookup import TierLookup
from kvoffload.tiers.origins import Origins
from kvoffload.tiers.promoter import Promoter
from kvoffload.tiers.promotion import waiting_for
from kvoffload.tiers.rates import LoadOrCompute, ReadEstimator
from kvoffload.tiers.requests import RequestLookup
from kvoffload.tiers.state import TierState
from kvoffload.tiers.uses import HeldBackUses
from kvoffload.tiers.writethrough import WriteThrough

logger = logging.getLogger(__name__)

WRITE_SHARE = 0.125
"""At most this share of the host's blocks is pinned for writes to lower tiers. Above it, blocks are written later."""
MAX_WAITS = 64
"""How often an idle step looks for results."""
SHARED_RESET = (
    "the weights are not known to be those of before, so blocks from before must not be found, and other servers use "
    "those of this tier"
)
SHARED_RESET_EFFECT = "nothing was deleted there; restart this server to use it again"


class TieredOffloadingManager(OffloadingManager):
    """A manager with ``host`` in front of ``tiers``, the fastest first.

    Chains that requests touch or store are written through to every tier, see WriteThrough. A lookup that finds blocks
    below the host answers None, and ``poll`` starts to promote them, together for all lookups of a step and each key at
    most once at a time, see Promoter. A request that has waited for ``load_deadline_ms`` gets the blocks that have
    arrived. Promoted blocks stay pinned for the requests that waited for them until these are given device blocks or
    end. Without a context, or with one that may not wait, only host memory is consulted.

    If a tier does not say within ``lookup_deadline_ms`` whether it holds a block, the block counts as missing;
    ``lookup_deadlines_ms`` are the deadlines per tier, None for those that have no other. A tier
    that fails or hangs is paused and tested, see CircuitBreaker. After a reset, a shared tier is not used any more.

    Make ``host`` with ``must_store``: nothing behind a block that its policy refuses is written to a tier. ``groups``:
    the KV cache groups that keys name, by default with full attention and blocks of one size. ``tokens_per_block``: per
    KV cache group, the tokens that one loaded block saves. With ``load_only_if_faster`` a run of blocks that would take
    longer to read than to compute is not loaded. ``write_share``, ``backlog_share``: see WRITE_SHARE and BACKLOG_SHARE.
    ``admissions``: per tier, what decides which blocks are worth writing to it, or None. ``random`` returns numbers
    from 0 to 1. If ``host`` has events, so have the tiers.
    """

    def __init__(
        self,
        host: PolicyOffloadingManager,
        tiers: Sequence[Tier],
        *,
        tokens_per_block: Sequence[float],
        groups: Sequence[KVGroup] | None = None,
        lookup_deadline_ms: float = 100.0,
        lookup_deadlines_ms: Sequence[float | None] = (),
        load_deadline_ms: float = 1000.0,
        load_only_if_faster: bool = True,
        write_share: float = WRITE_SHARE,
        backlog_share: float = BACKLOG_SHARE,
        admissions: Sequence[Admission | None] = (),
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[], float] = random.random,
    ) -> None:
        self.host = host
        groups = groups or [KVGroup(1)] * len(tokens_per_block)
        deadline_s = load_deadline_ms / 1000
        self._counts = TierCounts()
        self._origins = Origins()
        self.tiers = _make_states(
            host, tiers, groups, admissions, backlog_share, deadline_s, self._counts, self._origins, clock, random
        )
        """State of each tier; read only."""
        self._reasons = MissMemory(clock=clock)
        deadlines_s = [
            (lookup_deadline_ms if own is None else own) / 1000 for _, own in zip_longest(tiers, lookup_deadlines_ms)
        ]
        self._lookup = TierLookup(host, self.tiers, deadlines_s, self._reasons, clock)
        self._promoter = Promoter(
            host,
            self.tiers,
            groups=groups,
            deadline_s=deadline_s,
            count=self._counts.add,
            reasons=self._reasons,
            clock=clock,
        )
        rates = LoadOrCompute(tokens_per_block, always_load=not load_only_if_faster)
        self._gate = LoadGate(self.tiers, groups, self._promoter, rates, self._reasons, clock)
        self._requests = RequestLookup(host, self.tiers, self._lookup, self._promoter, self._gate, self._reasons)
        self._max_writing = max(1, int(host.num_blocks * write_share) // max(1, len(tiers)))
        """Blocks that may be pinned for writes to one tier. Each has its own share: one that hangs stops no other."""
        self._uses = HeldBackUses()
        self._clock = clock
        self._is_asking = False
        """Whether, at the last ``poll``, a tier did not know yet whether it holds a block that was looked up."""
        self._has_changed = False
        """Whether something has changed for waiting requests that ``poll`` has not reported yet."""

    # Lookup.

    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> int | None:
        return self._requests.lookup(keys, req_context)

    def lookup_each(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> list[LookupState]:
        """Returns the state of every key: RETRY for one that must be promoted first, or for which a tier must be asked.
        If some key is missing everywhere, or all together are more than may be promoted, none is promoted."""
        return self._requests.lookup_each(keys, req_context)

    def lookup_last(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> tuple[int, LookupState]:
        """Returns the last of ``keys`` that the host or a tier holds: states of one group, one for every position at
        which a request can resume. While a tier must be asked again, nothing is promoted."""
        return self._requests.lookup_last(keys, req_context)

    def states(self, keys: Sequence[OffloadKey], chain: Sequence[OffloadKey] = ()) -> States:
        """Returns the state of every key without promoting any, and without counting a request: HIT for one that the
        host or a tier holds, RETRY for one that a tier must be asked for again. ``chain``: what may be looked up
        next."""
        states = self.host.states(keys)
        below = np.flatnonzero(states != HIT)
        if len(below):
            states[below], _ = self._lookup.states_below([*keys, *chain], below, states[below], set())
            states[states == PENDING] = RETRY
        return states

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        self._gate.observe_prefill(num_tokens, seconds)

    def promoted_by_tier(self, req_context: ReqContext) -> Mapping[str, int]:
        promotion = self._promoter.get(req_context)
        return promotion.promoted if promotion is not None else {}

    def release_request(self, req_context: ReqContext) -> None:
        self._promoter.release(req_context)
        for tier in self.tiers:
            tier.writes.resume(req_context.req_id)

    # Steps.

    def poll(self) -> bool:
        changed = False
        for tier in self.tiers:
            results = tier.tier.poll()
            if results:
                changed |= self._take_in(tier, results)
            tier.update(self._clock())
            if tier.take_paused():
                self._promoter.abandon(tier)
                changed = True
            if tier.tier.fault is not None:
                self._switch_off(tier, tier.tier.fault)
        changed |= self._promoter.poll(may_take_back=not changed)
        self._is_asking = self._lookup.take_unanswered()
        changed |= self._is_asking | self._has_changed
        self._has_changed = False
        self._write()
        return changed

    def _take_in(self, tier: TierState, results: Sequence[TierResult]) -> bool:
        """Takes in transfers of a tier that have ended. Returns whether there were reads."""
        reads, writes = by_direction(results)
        if writes:
            tier.end_writes(writes, self._clock())
        if reads:
            self._promoter.end_reads(tier, reads)
            if tier.index:
                self._origins.arrived((result.key for result in reads.results if result.ok), tier.index)
        for ended in (writes, reads):
            tier.judge(ended, self._clock())
        return bool(reads)

    def wait(self, timeout_s: float) -> None:
        """Waits until some request has all the blocks that it waits for, until more blocks can be written, or until a
        tier may have answered."""
        for tier in self.tiers:
            promotions = waiting_for(set(tier.reads.values()))
            for _ in range(MAX_WAITS if promotions else 0):
                begun = self._clock()
                tier.tier.wait(timeout_s)
                self._has_changed |= self.poll()
                timeout_s -= self._clock() - begun
                if timeout_s <= 0 or not all(promotion.is_waiting for promotion in promotions):
                    return
            is_asked = self._is_asking and tier is self.tiers[-1]
            if not promotions and (tier.writes.is_busy or is_asked):
                tier.tier.wait(timeout_s)
                return

    def switch_off_tiers(self, reason: str) -> None:
        """Stops reading and writing all tiers. Host memory is not affected."""
        for tier in self.tiers:
            self._switch_off(tier, reason)

    def _switch_off(
        self,
        tier: TierState,
        reason: str,
        effect: str = "requests are served from host memory or computed from here on",
    ) -> None:
        if not tier.breaker.is_off:
            tier.breaker.switch_off()
            logger.error("kvoffload: THE %s TIER IS OFF: %s; %s", tier.name.upper(), reason, effect)
            tier.writes.clear()
            self._promoter.abandon(tier)
            self._has_changed = True

    def _write(self) -> None:
        """Begins to write as many blocks as there is room for."""
        for tier in self.tiers:
            if tier.writes.has_backlog:
                tier.write(self._max_writing - tier.writes.num_writing, self._clock())

    @property
    def has_pending_writes(self) -> bool:
        return any(tier.writes.is_busy for tier in self.tiers)

    @property
    def has_transfers(self) -> bool:
        """Whether a tier has blocks to read or to write that it has not reported yet."""
        return any(tier.has_transfers for tier in self.tiers)

    @property
    def num_promotions(self) -> int:
        """Requests that wait for lower tiers, or for which promoted blocks may be pinned."""
        return len(self._promoter)

    @property
    def max_promoted(self) -> int:
        """Blocks that may be read from lower tiers, or pinned after that, at a time."""
        return self._promoter.max_blocks

    # Loads and stores.

    def prepare_load(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> LoadStoreSpec:
        if req_context is None:
            return self.host.prepare_load(keys)
        return self._promoter.take_pins(keys, req_context)

    def complete_load(
        self, blocks: LoadStoreSpec | Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> None:
        self.host.complete_load(blocks, req_context)

    def touch(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext | None = None,
        chain: Sequence[OffloadKey] | None = None,
    ) -> None:
        found = self.host.find(keys)
        # With states, a request's chain has other keys at its end than at its begin.
        num_held_back = self._uses.hold_back(found, req_context) if chain is None else 0
        chain = keys if chain is None else chain
        self.host.touch(keys, req_context, chain, found)
        for tier in self._tiers_on():
            tier.writes.count_request(chain, req_context)
            if not num_held_back:
                tier.tier.touch(keys)
                if not _ends_session(req_context):
                    tier.writes.offer(chain, _request(req_context), is_whole=False)

    def reorder_chain(
        self,
        keys: Sequence[OffloadKey],
        stored: Collection[OffloadKey],
        req_context: ReqContext | None = None,
    ) -> None:
        self.host.reorder_chain(keys, stored, req_context)
        num_held_back = self._uses.end(req_context)
        head, tail = keys[:num_held_back], keys[num_held_back:]
        for tier in self._tiers_on():
            if tail:
                tier.tier.reorder_chain(tail, stored)
            if head:
                tier.tier.touch(head)

    def offer_chain(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        for tier in self._tiers_on() if not _ends_session(req_context) else ():
            tier.writes.offer(keys, _request(req_context), is_whole=True)
        self._write()

    def prepare_store(
        self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None
    ) -> PrepareStoreOutput | None:
        return self.host.prepare_store(keys, req_context)

    def complete_store(
        self,
        blocks: LoadStoreSpec | Sequence[OffloadKey],
        req_context: ReqContext | None = None,
        success: bool = True,
    ) -> None:
        self.host.complete_store(blocks, req_context, success)
        if success:
            keys = self.host.keys_of(blocks) if isinstance(blocks, LoadStoreSpec) else blocks
            self._origins.forget(keys)
            for tier in self.tiers:
                tier.writes.stored(keys)
        else:
            for tier in self.tiers:
                tier.writes.store_failed()
        self._write()

    def refuse(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> None:
        self.host.refuse(keys, req_context)

    def note_dropped(self, keys: Sequence[OffloadKey]) -> None:
        """Counts writes of ``keys``, which the host has no room for."""
        for tier in self.tiers:
            tier.count("dropped_writes", int(np.count_nonzero(tier.writes.lacks(keys))))
        self._reasons.record(keys, MissReason.NO_ROOM)

    def set_admission(self, admission: Admission) -> None:
        self.host.set_admission(admission)

    def _tiers_on(self) -> list[TierState]:
        return [tier for tier in self.tiers if tier.takes_chains]

    # Counts, and the end.

    def policy_state(self) -> Mapping[str, Any]:
        return self.host.policy_state()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Returns the events of host memory, then those of each tier."""
        yield from self.host.take_events()
        for tier in self.tiers:
            if tier.tier.events is not None:
                yield from tier.tier.events.take()

    def take_counts(self) -> Mapping[str, float]:
        return {**self.host.take_counts(), **self._counts.take(self.tiers)}

    def explain_miss(self, key: OffloadKey) -> Miss:
        host, mine = self.host.explain_miss(key), self._reasons.explain(key)
        for tier in self.tiers:
            if key in tier.reads or (tier.can_read and tier.tier.contains([key])[0] == LookupState.HIT):
                is_choice = mine.reason in (MissReason.FASTER_TO_COMPUTE, MissReason.TOO_LARGE)
                return replace(mine if is_choice else Miss(MissReason.NOT_IN_TIME), tier=tier.name)
        if host.reason is MissReason.BEING_WRITTEN or mine.age_s is None:
            return host
        return mine if host.age_s is None or mine.age_s <= host.age_s else host

    def drop(self, keys: Sequence[OffloadKey]) -> None:
        self.drop_from_host(keys)
        for tier in self.tiers:
            tier.tier.delete(keys)
            tier.writes.lose(len(keys))

    def drop_from_host(self, keys: Sequence[OffloadKey]) -> None:
        self._promoter.drop(keys)
        self.host.drop(keys)

    def reset(self) -> None:
        self.reset_own()
        self._leave_shared_tiers()

    def forget(self) -> None:
        """Does the same as ``reset``, but tiers that are not shared keep their blocks for the next process: the caller
        uses other keys from now on."""
        self._reset_host()
        self._leave_shared_tiers()

    def _reset_host(self) -> None:
        self._promoter.release_all()
        self.host.reset()
        for tier in self.tiers:
            tier.writes.clear()

    def _leave_shared_tiers(self) -> None:
        for tier in self.tiers:
            if tier.tier.is_shared:
                tier.tier.reset()
                self._switch_off(tier, SHARED_RESET, SHARED_RESET_EFFECT)

    def reset_own(self) -> bool:
        self._reset_host()
        for tier in self.tiers:
            if not tier.tier.is_shared:
                tier.tier.reset()
        return any(tier.tier.is_shared and not tier.breaker.is_off for tier in self.tiers)

    def shutdown(self) -> None:
        for tier in self.tiers:
            tier.tier.close()
            tier.writes.ended(by_direction(tier.tier.poll())[1])
            tier.writes.close()
        self.host.shutdown()

    @property
    def num_blocks(self) -> int:
        return self.host.num_blocks

    def uses_by_tier(self) -> Mapping[str, Sequence[TenantUse]]:
        lower = {tier.name: tier.tier.tenant_uses() for tier in self.tiers}
        return {**self.host.uses_by_tier(), **{name: uses for name, uses in lower.items() if uses}}

    def most_blocks(self, key: OffloadKey) -> int:
        return self.host.most_blocks(key)

    @property
    def num_removed(self) -> int:
        return self.host.num_removed

    @property
    def num_used_blocks(self) -> int:
        return self.host.num_used_blocks

    def check_integrity(self) -> None:
        self.host.check_integrity()
        self._promoter.check_integrity()
        for tier in self.tiers:
            tier.check_integrity()
        if any(tier.writes.num_writing > self._max_writing for tier in self.tiers):
            raise IntegrityError("more blocks are being written to lower tiers than WRITE_SHARE allows")


def _make_states(
    host: PolicyOffloadingManager,
    tiers: Sequence[Tier],
    groups: Sequence[KVGroup],
    admissions: Sequence[Admission | None],
    backlog_share: float,
    deadline_s: float,
    counts: TierCounts,
    origins: Origins,
    clock: Callable[[], float],
    random: Callable[[], float],
) -> tuple[TierState, ...]:
    states = []
    for i, (each, admission) in enumerate(zip_longest(tiers, admissions)):
        tier, count = GuardedTier(each, host.has_events), counts.of(each.name)
        estimator = ReadEstimator(tier.block_bytes)
        is_worth = origins.add_tier(estimator) if len(tiers) > 1 else None
        writes = WriteThrough(host, tier, groups, count, clock, admission, is_worth, backlog_share)
        states.append(TierState(i, tier, writes, estimator, deadline_s, count, random))
    return tuple(states)


def _ends_session(context: ReqContext | None) -> bool:
    """Whether the request is the last of its session, so that its blocks are not worth writing."""
    return context is not None and context.hints is not None and context.hints.drop


def _request(context: ReqContext | None) -> str | None:
    return None if context is None else context.req_id

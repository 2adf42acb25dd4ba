"""RequestLookup: answers the lookups of requests from host memory and lower tiers, and has blocks promoted for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvoffload.abc import LookupState, MissReason, OffloadKey, ReqContext
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.misses import MissMemory
from kvoffload.tiers.gate import LoadGate
from kvoffload.tiers.lookup import TierLookup
from kvoffload.tiers.promoter import Promoter
from kvoffload.tiers.promotion import Located, Promotion
from kvoffload.tiers.state import TierState


class RequestLookup:
    """The three lookups of TieredOffloadingManager.

    Until ``poll`` starts the reads that a request waits for, further lookups may add blocks to them: the KV and the
    states of one hit arrive together.
    """

    def __init__(
        self,
        host: PolicyOffloadingManager,
        tiers: Sequence[TierState],
        lookup: TierLookup,
        promoter: Promoter,
        gate: LoadGate,
        reasons: MissMemory,
    ) -> None:
        self._host = host
        self._tiers = tiers
        self._lookup = lookup
        self._promoter = promoter
        self._gate = gate
        self._reasons = reasons

    def lookup(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> int | None:
        if req_context is None or not req_context.may_wait:
            return self._host.lookup(keys, req_context)
        promotion = self._promoter.get(req_context)
        if promotion is not None and not promotion.may_want_more:
            return None
        if not self._may_wait(promotion):
            return self._host.lookup(keys, req_context)
        self._host.count_request(keys, req_context)
        run = self._lookup.find_run(keys, promotion, self._promoter.room_for)
        worth = self._gate.worth_loading(run.below, promotion) if run.below else run.below
        if worth:
            self._promote(worth, req_context)
            return None
        return None if run.is_unanswered and not run.below else run.num_ready

    def lookup_each(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> list[LookupState]:
        self._host.count_request(keys, req_context)
        may_wait = req_context is not None and req_context.may_wait
        promotion = self._promoter.get(req_context) if req_context is not None and may_wait else None
        if promotion is not None and not promotion.may_want_more:
            return [LookupState.RETRY] * len(keys)
        states = self._lookup.host_states(keys, promotion)
        below = np.flatnonzero(states != LookupState.HIT)
        if len(below) and req_context is not None and may_wait and self._may_wait(promotion):
            found, sources = self._lookup.states_below(keys, below, states[below], set())
            is_found = found == LookupState.HIT
            if is_found.any() and (is_found | (found == LookupState.RETRY)).all():
                coming = Located([keys[i] for i in below[is_found].tolist()], sources[is_found])
                if not self._has_room(coming, promotion):
                    found[is_found] = LookupState.MISS
                else:
                    self._promote(coming, req_context)
            found[found == LookupState.HIT] = LookupState.RETRY
            states[below] = found
        return list(map(LookupState, states.tolist()))

    def lookup_last(self, keys: Sequence[OffloadKey], req_context: ReqContext | None = None) -> tuple[int, LookupState]:
        if req_context is None or not req_context.may_wait:
            return self._host.lookup_last(keys, req_context)
        promotion = self._promoter.get(req_context)
        if promotion is not None and not promotion.may_want_more:
            return len(keys) - 1, LookupState.RETRY if keys else LookupState.MISS
        if not self._may_wait(promotion):
            return self._host.lookup_last(keys, req_context)
        self._host.count_request(keys, req_context)
        last = self._lookup.find_last(keys, promotion)
        if last.below:
            if self._gate.is_state_worth_loading(last) and self._has_room(last.below, promotion):
                self._promote(last.below, req_context)
            else:
                last = last._replace(at=last.in_host)
        if last.at > last.in_host:
            return last.at, LookupState.RETRY
        return last.in_host, LookupState.MISS if last.in_host < 0 else LookupState.HIT

    def _has_room(self, coming: Located, promotion: Promotion | None) -> bool:
        """Returns whether ``coming`` may be promoted with what the request waits for. If not, remembers why they are
        missing."""
        wanted = set(coming.keys).union(() if promotion is None else promotion.wanted.keys)
        has_room = len(wanted) <= self._promoter.room_for(promotion, next(iter(wanted), b""), in_all=True)
        if not has_room:
            self._reasons.record(coming.keys, MissReason.TOO_LARGE)
        return has_room

    def _may_wait(self, promotion: Promotion | None) -> bool:
        return not all(tier.breaker.is_off for tier in self._tiers) and self._promoter.may_wait(promotion)

    def _promote(self, wanted: Located, context: ReqContext) -> None:
        self._promoter.promote(wanted, context)
        for tier in self._tiers:
            tier.writes.postpone(context.req_id)

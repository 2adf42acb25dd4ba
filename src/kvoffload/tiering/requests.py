"""RequestChains: passes the uses of requests' chains to the tiers, and offers them blocks to write."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from kvoffload.abc import OffloadKey, ReqContext, Slots
from kvoffload.tiering.health import TierState
from kvoffload.tiering.promotion import Promotion

MAX_REQUESTS = 4096
"""Requests that are remembered. The oldest is forgotten: its use is not counted."""


class HeldBackUses:
    """Counts, per request, the blocks of its chain whose use the tiers count when it ends, and not when it arrives.

    If host memory holds the whole chain of a request when it arrives, nothing is read from a tier for it, and one pass
    over the chain is enough. Otherwise the tiers count the whole chain at once, so that no head is older than its tail.
    """

    def __init__(self) -> None:
        self._num_blocks: OrderedDict[str, int] = OrderedDict()

    def hold_back(self, found: Slots, context: ReqContext | None) -> int:
        """Takes in the slots of a request's chain in host memory, -1 for blocks that it lacks. Returns for how many
        blocks the use is held back: all or none."""
        if context is None:
            return 0
        self._num_blocks.pop(context.req_id, None)
        if not found.size or found.min() < 0:
            return 0
        self._num_blocks[context.req_id] = len(found)
        if len(self._num_blocks) > MAX_REQUESTS:
            self._num_blocks.popitem(last=False)
        return len(found)

    def end(self, context: ReqContext | None) -> int:
        """Returns for how many leading blocks of the request the use was held back."""
        return 0 if context is None else self._num_blocks.pop(context.req_id, 0)


class RequestChains:
    """Passes uses of chains to ``tiers``, and offers them chains to write: at most ``max_writing`` blocks per tier at a
    time.

    A chain that was touched is offered at once. If the host has nothing of it, that is left to the next ``write``,
    unless its request waits for a promotion by then: then it is offered when the request is released, to those tiers
    from which not all of it has come.
    """

    def __init__(self, tiers: Sequence[TierState], max_writing: int, clock: Callable[[], float]) -> None:
        self.max_writing = max_writing
        """Each tier has its own share: one that hangs stops no other."""
        self._tiers = tiers
        self._clock = clock
        self._uses = HeldBackUses()
        self._touched: dict[str, Sequence[OffloadKey]] = {}
        """Chains, by request, that were touched since the last ``write``."""

    def touch(
        self,
        keys: Sequence[OffloadKey],
        found: Slots,
        context: ReqContext | None,
        chain: Sequence[OffloadKey] | None,
    ) -> None:
        """A request uses ``keys`` of its ``chain``. ``found``: their slots in the host, -1 where it lacks them."""
        # With states, a request's chain has other keys at its end than at its begin.
        num_held_back = self._uses.hold_back(found, context) if chain is None else 0
        chain = keys if chain is None else chain
        is_offered = not num_held_back and not _ends_session(context)
        # A promotion may bring all of it, from a tier that has it then.
        is_later = is_offered and context is not None and context.may_wait and (found < 0).all()
        for tier in self._on():
            tier.writes.count_request(chain, context)
            if not num_held_back:
                tier.tier.touch(keys)
            if is_offered and not is_later and tier.takes_chains:
                tier.writes.offer(chain, _request(context), is_whole=False)
        if is_later and context is not None:
            self._touched[context.req_id] = chain

    def end(
        self,
        keys: Sequence[OffloadKey],
        stored: Collection[OffloadKey],
        context: ReqContext | None,
        chain: Sequence[OffloadKey],
    ) -> None:
        """A request has ended, see ``OffloadingManager.end_chain``."""
        num_held_back = self._uses.end(context)
        if context is not None:
            self._touched.pop(context.req_id, None)
        head, tail = keys[:num_held_back], keys[num_held_back:]
        for tier in self._on():
            if tail:
                tier.tier.touch(tail, stored)
            if head:
                tier.tier.touch(head)
            if tier.takes_chains and (not _ends_session(context) or tier.writes.owes(chain)):
                tier.writes.offer(chain, _request(context), is_whole=True)

    def waits(self, promotion: Promotion) -> None:
        """A request waits for a promotion, which may bring all of its chain."""
        promotion.chain = self._touched.pop(promotion.context.req_id, promotion.chain)

    def released(self, promotion: Promotion) -> None:
        """A request with a promotion waits no more."""
        for tier in self._on() if promotion.chain else ():
            if tier.takes_chains and len(promotion.promoted.get(tier.name, ())) < len(promotion.chain):
                tier.writes.offer(promotion.chain, promotion.context.req_id, is_whole=False)

    def write(self) -> None:
        """Offers the chains that were touched, and begins to write as many blocks as there is room for."""
        if self._touched:
            for tier in filter(lambda tier: tier.takes_chains, self._tiers):
                for request, chain in self._touched.items():
                    tier.writes.offer(chain, request, is_whole=False)
            self._touched.clear()
        for tier in self._tiers:
            if tier.writes.backlog.is_ready:
                tier.write(self.max_writing - len(tier.writes.writing), self._clock())

    def clear(self) -> None:
        self._touched.clear()
        for tier in self._tiers:
            tier.writes.clear()

    def _on(self) -> list[TierState]:
        return [tier for tier in self._tiers if tier.can_read or tier.takes_chains]


def _ends_session(context: ReqContext | None) -> bool:
    """Whether the request is the last of its session, so that its blocks are not worth writing."""
    return context is not None and context.hints is not None and context.hints.drop


def _request(context: ReqContext | None) -> str | None:
    return None if context is None else context.req_id

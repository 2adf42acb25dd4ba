"""RequestChains: when the chains of requests are offered to the tiers to be written, and their uses counted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

from kvoffload.abc import OffloadKey, ReqContext, Slots
from kvoffload.tiering.health import TierState
from kvoffload.tiering.waits import Wait

MAX_REQUESTS = 4096
"""Requests that are remembered. The oldest is forgotten: its use is not counted."""


class RequestChains:
    """Offers chains to ``tiers`` to write: at most ``max_writing`` blocks per tier at a time.

    A chain that was touched is offered at once. If the host has nothing of it, that is left to the next ``write``,
    unless its request waits for a tier by then, which may bring all of it: then it is offered when the request is
    released, to those tiers from which not all of it has come.

    If host memory holds the whole chain of a request when it arrives, nothing is read from a tier for it: the tiers
    count its use when it ends, because one pass over the chain is enough. Otherwise they count the whole chain at once,
    so that no head is older than its tail.
    """

    def __init__(self, tiers: Sequence[TierState], max_writing: int, clock: Callable[[], float]) -> None:
        self.max_writing = max_writing
        """Each tier has its own share: one that hangs stops no other."""
        self._tiers = tiers
        self._clock = clock
        self._held_back: OrderedDict[str, int] = OrderedDict()
        """By request, the blocks of its chain whose use is counted when it ends."""
        self._touched: dict[str, Sequence[OffloadKey]] = {}
        """Chains, by request, that were touched since the last ``write``."""

    def hold_back(self, found: Slots, context: ReqContext | None) -> bool:
        """Returns whether the use of a request's chain is counted when the request ends. ``found``: the slots of the
        chain in the host, -1 for blocks that it lacks."""
        if context is None:
            return False
        self._held_back.pop(context.req_id, None)
        if not found.size or found.min() < 0:
            return False
        self._held_back[context.req_id] = len(found)
        if len(self._held_back) > MAX_REQUESTS:
            self._held_back.popitem(last=False)
        return True

    def touch(self, chain: Sequence[OffloadKey], found: Slots, context: ReqContext | None) -> None:
        """A request uses ``chain``. ``found``: as for ``hold_back``."""
        if _ends_session(context):
            return
        if context is not None and context.may_wait and (found < 0).all():
            self._touched[context.req_id] = chain
        else:
            self._offer(chain, None if context is None else context.req_id)

    def end(
        self,
        keys: Sequence[OffloadKey],
        stored: Collection[OffloadKey],
        context: ReqContext | None,
        chain: Sequence[OffloadKey],
    ) -> None:
        """A request has ended, see ``OffloadingManager.end_chain``."""
        request, num_held_back = None, 0
        if context is not None:
            request = context.req_id
            num_held_back = self._held_back.pop(request, 0)
            self._touched.pop(request, None)
        head, tail = keys[:num_held_back], keys[num_held_back:]
        for tier in self._tiers:
            if tier.can_read or tier.takes_chains:
                if tail:
                    tier.tier.touch(tail, stored)
                if head:
                    tier.tier.touch(head)
            if tier.takes_chains and (not _ends_session(context) or tier.writes.owes(chain)):
                tier.writes.offer(chain, request, is_whole=True)

    def waits(self, wait: Wait) -> None:
        """A request waits for blocks, which may be all of its chain."""
        wait.chain = self._touched.pop(wait.context.req_id, wait.chain)

    def released(self, wait: Wait) -> None:
        """A request waits no more."""
        for tier in self._tiers if wait.chain else ():
            if tier.takes_chains and len(wait.promoted.get(tier.name, ())) < len(wait.chain):
                tier.writes.offer(wait.chain, wait.context.req_id, is_whole=False)

    def _offer(self, chain: Sequence[OffloadKey], request: str | None) -> None:
        for tier in self._tiers:
            if tier.takes_chains:
                tier.writes.offer(chain, request, is_whole=False)

    def write(self) -> None:
        """Offers the chains that were touched, and begins to write as many blocks as there is room for."""
        if self._touched:
            for request, chain in self._touched.items():
                self._offer(chain, request)
            self._touched.clear()
        for tier in self._tiers:
            if tier.writes.backlog.is_ready:
                tier.write(self.max_writing - len(tier.writes.writing), self._clock())

    def clear(self) -> None:
        self._touched.clear()
        for tier in self._tiers:
            tier.writes.clear()


def _ends_session(context: ReqContext | None) -> bool:
    """Whether the request is the last of its session, so that its blocks are not worth writing."""
    return context is not None and context.hints is not None and context.hints.drop

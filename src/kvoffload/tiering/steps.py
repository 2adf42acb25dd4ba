"""TierSteps: what is done with tiers for each request, in every step of the engine, and while it waits for them."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from itertools import compress

import numpy as np

from kvoffload.abc import Keys, OffloadKey, ReqContext, Slots, TierResult
from kvoffload.cache.bills import MovedBytes
from kvoffload.tiering.common import Common
from kvoffload.tiering.health import LowerTier
from kvoffload.tiering.plan import Bools
from kvoffload.tiering.rates import by_direction
from kvoffload.tiering.waits import Waits

logger = logging.getLogger(__name__)

MAX_LOOKS = 64
"""How often an idle step looks for results."""
SERVED_WITHOUT = "requests are served from host memory or computed from here on"
MAX_REQUESTS = 4096
"""Requests that are remembered. The oldest is forgotten: its use is not counted."""


class TierSteps:
    """Takes in what tiers have ended, begins reads and writes, and switches off tiers that have a fault.

    A chain that was touched is offered to tiers at once, to be written. If the host has nothing of it, that is left to
    the next ``write``, unless its request waits for a tier by then, which may bring all of it: then it is offered when
    the request is released, to those tiers from which not all of it has come.

    If host memory holds the whole chain of a request when it arrives, nothing is read from a tier for it: the tiers
    count its use when it ends, because one pass over the chain is enough. Otherwise they count the whole chain at once,
    so that no head is older than its tail.
    """

    def __init__(self, common: Common, waits: Waits) -> None:
        host, tiers, tenants = common.host, common.tiers, common.settings.tenants
        self.is_off = not tiers
        """Whether all tiers are off."""
        self.may_change = False
        """Whether lookups may have another result in the next step in any case: a tier did not know yet whether it
        holds a block, or was switched off."""
        self.on_device: set[OffloadKey] = set()
        """What the device holds of the requests that have ended, if ``host`` does not repeat it."""
        self.moved = MovedBytes(tenants) if tenants is not None and tenants.names else None
        self.max_writing = max(1, int(host.num_blocks * common.settings.write_share) // max(1, len(tiers)))
        """Blocks that one tier writes at a time. Each has its own share: one that hangs stops no other."""
        self.touched: dict[str, Keys] = {}
        """Chains, by request, that were touched since the last ``write``, without those of requests that wait."""
        self._host = host
        self._tiers = tiers
        self._waits = waits
        self._clock = common.clock
        self._held_back: OrderedDict[str, int] = OrderedDict()
        """By request, the blocks of its chain whose use is counted when it ends."""

    # Requests.

    def touch(self, keys: Keys, chain: Keys | None, found: Slots, context: ReqContext | None) -> list[LowerTier]:
        """A request uses ``keys``: its ``chain``, if that is None. ``found``: their slots in the host, -1 for blocks
        that it lacks. Returns the tiers in which this is a use now."""
        is_held_back = False
        # With states, a request's chain has other keys at its end than at its begin.
        if chain is None and context is not None:
            self._held_back.pop(context.req_id, None)
            is_held_back = bool(found.size) and found.min() >= 0
            if is_held_back:
                self._held_back[context.req_id] = len(found)
                if len(self._held_back) > MAX_REQUESTS:
                    self._held_back.popitem(last=False)
        chain = keys if chain is None else chain
        working = [tier for tier in self._tiers if tier.can_read or tier.takes_chains]
        for tier in working:
            if tier.writes.admission is not None:
                tier.writes.admission.count(chain, context)
        if is_held_back:
            return []
        if context is not None and context.may_wait and (found < 0).all():
            if not _ends_session(context):
                self.touched[context.req_id] = chain
        elif not _ends_session(context):
            self.offer(chain, None if context is None else context.req_id, {})
        return working

    def end_chain(self, keys: Keys, stored: Collection[OffloadKey], context: ReqContext | None, chain: Keys) -> None:
        """A request has ended, see ``OffloadingManager.end_chain``."""
        request, num_held_back = None, 0
        if context is not None:
            request = context.req_id
            num_held_back = self._held_back.pop(request, 0)
            self.touched.pop(request, None)
        head, tail = keys[:num_held_back], keys[num_held_back:]
        for tier in self._tiers:
            if tier.can_read or tier.takes_chains:
                if tail:
                    tier.tier.touch(tail, stored)
                if head:
                    tier.tier.touch(head)
            promised = tier.writes.promised.deadlines.keys()
            if tier.takes_chains and (not _ends_session(context) or not promised.isdisjoint(chain)):
                tier.writes.offer(chain, request, is_whole=True)

    def offer(self, chain: Keys, request: str | None, promoted: Mapping[str, Keys]) -> None:
        """Offers a chain to the tiers, except those from which all of it has come: by tier, ``promoted`` has come."""
        for tier in self._tiers:
            if tier.takes_chains and len(promoted.get(tier.name, ())) < len(chain):
                tier.writes.offer(chain, request, is_whole=False)

    def write(self) -> None:
        """Offers the chains that were touched, and begins to write as many blocks as there is room for."""
        if self.touched:
            for request, chain in self.touched.items():
                self.offer(chain, request, {})
            self.touched.clear()
        for tier in self._tiers:
            if tier.writes.backlog.num_ready:
                tier.write(self.max_writing - len(tier.writes.writing), self._clock())

    # Steps.

    def poll(self) -> bool:
        """Does what there is to do now. Returns whether a lookup may have another result now."""
        changed = False
        for tier in self._tiers:
            results = tier.tier.poll()
            if results:
                changed |= self._take_in(tier, results)
            tier.update(self._clock())
            if tier.read_health.was_paused:
                tier.read_health.was_paused, changed = False, True
                self._waits.abandon(tier)
            if tier.tier.fault is not None:
                self.switch_off(tier, tier.tier.fault)
        changed |= self._waits.poll(may_take_back=not changed)
        self.write()
        return changed | self.may_change

    def _take_in(self, tier: LowerTier, results: Sequence[TierResult]) -> bool:
        """Takes in transfers of a tier that have ended. Returns whether there were reads."""
        reads, writes = by_direction(results)
        if writes.keys:
            tier.writes.ended(writes)
            tier.write_health.ended(writes, self._clock())
            if not self.on_device.isdisjoint(writes.keys):
                self.note_device([key for key in writes.keys if key in self.on_device])
        if reads.keys:
            self._waits.end_reads(tier, reads)
        if self.moved is not None:
            for ended in (writes, reads):
                self.moved.add(tier.name, ended.good.keys, ended.good.nbytes)
        return bool(reads.keys)

    def note_device(self, held: Keys = (), left: Keys = ()) -> None:
        """See ``OffloadingManager.note_device``. Of what the device holds, blocks leave the host first when all tiers
        have them."""
        self.on_device.difference_update(left)
        self.on_device.update(held)
        self._host.note_device(list(compress(held, self.are_written(held).tolist())) if held else [], left)

    def are_written(self, keys: Keys) -> Bools:
        """Returns which of ``keys`` all tiers hold, or will not be given."""
        written = np.ones(len(keys), dtype=np.bool_)
        for tier in self._tiers:
            if not tier.is_off:
                written &= tier.writes.is_done(keys)
        return written

    def wait(self, timeout_s: float) -> bool:
        """Waits for tiers and polls them. Returns whether a lookup may have another result now."""
        changed = False
        for tier in self._tiers:
            waits = self._waits.waiting_for(tier) if tier.reads else ()
            for _ in range(MAX_LOOKS if waits else 0):
                begun = self._clock()
                tier.tier.wait(timeout_s)
                changed |= self.poll()
                timeout_s -= self._clock() - begun
                if timeout_s <= 0 or not all(wait.is_waiting for wait in waits):
                    return changed
            is_asked = self.may_change and tier is self._tiers[-1]
            if not waits and (tier.writes.is_busy or is_asked):
                tier.tier.wait(timeout_s)
                return changed | self.poll()
        return changed

    def switch_off(self, tier: LowerTier, reason: str, effect: str = SERVED_WITHOUT) -> None:
        """Stops reading and writing the tier, for good. Logs ``reason`` and ``effect``."""
        if not tier.is_off:
            tier.switch_off()
            self.is_off = all(each.is_off for each in self._tiers)
            logger.error("kvoffload: THE %s TIER IS OFF: %s; %s", tier.name.upper(), reason, effect)
            tier.writes.clear()
            self._waits.abandon(tier)
            self.may_change = True


def _ends_session(context: ReqContext | None) -> bool:
    """Whether the request is the last of its session, so that its blocks are not worth writing."""
    return context is not None and context.hints is not None and context.hints.drop

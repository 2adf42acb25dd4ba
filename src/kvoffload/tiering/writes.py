"""WriteThrough: writes chains of blocks to a lower tier, whole, head first, and never behind a hole."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, KeysView
from functools import partial

import numpy as np

from kvoffload.abc import Admission, IntegrityError, Keys, MissReason, OffloadKey, Tier, TierError
from kvoffload.abc.tier import HIT, MISS, PENDING
from kvoffload.tiering.chains import Backlog, Chain, ChainState, TierBlocks, among
from kvoffload.tiering.common import Common
from kvoffload.tiering.plan import Bools, ByGroup, ChainLayout, WritePlan, plan_writes
from kvoffload.tiering.rates import Ended
from kvoffload.tiering.unwritten import PromisedBlocks

MAX_REWRITES = 1
"""How often a chain is written again from where a write has failed."""
MAX_WRITES_PER_BLOCK = 2
"""Writes per block of one chain, on average: a tier that keeps evicting the chain is given no more of it."""
FIRST_UNITS = 256
"""Units of a chain that are looked up first; doubled while there is nothing to write."""
REFUSAL_S = 0.01
"""A tier that takes on nothing although it has nothing to do is asked again after this time."""
PATIENCE_S = 0.25
"""How long an idle engine is kept stepping for a backlog on which the tier makes no progress."""
GIVE_UP_S = 1.0
"""After this time without a block that the tier takes on, although it has nothing to do, a chain is dropped."""


class Pace:
    """How fast a tier takes on what it is given, and when it is asked again."""

    def __init__(self) -> None:
        self.progress_at = -math.inf
        """When a write last began or ended, or a chain was offered."""
        self.refused_at = -math.inf
        """When the tier last took on nothing, unless it has done something since."""
        self._idle_since = math.inf
        """Since when the tier takes on nothing although it has nothing to do."""

    def progressed(self, now: float) -> None:
        """A write has begun or ended."""
        self.progress_at, self.refused_at, self._idle_since = now, -math.inf, math.inf

    def refused(self, now: float, is_idle: bool) -> bool:
        """The tier has refused some blocks; ``is_idle``: although it has nothing to do. Returns whether their chain is
        to be dropped."""
        self.refused_at = now
        self._idle_since = min(self._idle_since, now) if is_idle else math.inf
        gives_up = now - self._idle_since > GIVE_UP_S
        if gives_up:
            self._idle_since = math.inf
        return gives_up


class WriteThrough:
    """Writes to ``tier`` the blocks that it lacks of chains that requests touch or store.

    A block is written only if every earlier block that a lookup needs is in the tier or is being written: in a group
    with full attention every block, in a group with a window the blocks that a request needs to resume at some later
    position. In a chain with states nothing is written behind the last state, which comes after all blocks before it:
    when a later request of the conversation brings another one, the blocks between are written for that. Blocks that
    cannot be written now stay in the backlog while the host holds them. A block of which the tier does not know yet
    whether it holds it is written, since the tier then finds out, but nothing is deleted because of it.

    Chains with blocks of ``promised``, which the tier has promised to retain, are written first and up to the last of
    these, whatever the admission says. If that fails they are written again until ``promised`` ends.

    ``admission``: only leading blocks of a chain that it accepts are written; None accepts all. ``count`` takes the
    counters ``tier_NAME`` of METRICS, by NAME.
    """

    def __init__(
        self, common: Common, tier: Tier, admission: Admission | None, count: Callable[[str, float], None]
    ) -> None:
        self._host = common.host
        self._tier = tier
        self._clock = common.clock
        self._count = count
        self._layout = ChainLayout(common.settings.groups)
        self.admission = admission
        self._blocks = TierBlocks(common.host, tier, self._layout)
        self.writing: KeysView[OffloadKey] = self._blocks.chain_of.keys()
        """Blocks that the tier has not reported yet, each with a pin in the host."""
        # Chains name a state for every unit; hardly any of them exist.
        keys_per_block = sum(self._layout.blocks_per_unit) / self._layout.kv_blocks_per_unit
        self.backlog = Backlog(max(1, int(self._host.num_blocks * common.settings.backlog_share * keys_per_block)))
        self.promised = PromisedBlocks(common, self.backlog, tier)
        self._pace = Pace()

    # What the tier has, and lacks.

    @property
    def is_busy(self) -> bool:
        """Whether there is a backlog, or promised blocks are being written, and the tier makes progress."""
        urgent = (self.backlog.waited_for, self.promised.deadlines)
        has_work = self.backlog.num_ready > 0 or not all(map(self.writing.isdisjoint, urgent))
        return has_work and self._clock() - self._pace.progress_at < PATIENCE_S

    def lacks(self, keys: Keys) -> Bools:
        """Returns which of ``keys`` are worth having in the host, so that they can be written: the tier neither holds
        them nor is being given them, and the admission accepts them."""
        return ~(self.is_done(keys) | among(keys, self.writing))

    def is_done(self, keys: Keys) -> Bools:
        """Returns which of ``keys`` the tier holds, or will not be given."""
        done: Bools = self._tier.contains(keys) == HIT
        if self.admission is not None and not done.all():
            done |= ~np.array(self.admission.accepts(keys), dtype=np.bool_)
        return done

    def may_write(self, keys: Keys, request: str) -> bool:
        """Returns whether some of ``keys``, of the chain of ``request``, are being written, or will be as soon as the
        tier takes them on or has written others."""
        if not self.writing.isdisjoint(keys):
            return True
        if (chain := self.backlog.of_request(request)) is None or chain.state is ChainState.HELD:
            return False
        if chain.state is ChainState.WAITING and self.writing.isdisjoint(chain.waits_for):
            return False
        return not self._blocks.in_tier(keys, chain).all()

    # What happens elsewhere.

    def offer(self, keys: Keys, request: str | None, is_whole: bool) -> None:
        """Adds ``keys``, the chain of ``request``, to the backlog: head first, the groups merged by the position at
        which blocks end. It takes the place of the chain that was offered for the same request before. If the tier
        holds all of it, there is nothing to do."""
        chain = self.backlog.of_request(request)
        if chain is None and self._holds(keys):
            return
        chain = chain or Chain(request)
        state = chain.state if chain.state in (ChainState.STARTED, ChainState.RESTING) else ChainState.FRESH
        self.backlog.move(chain, ChainState.GONE)
        keys = list(keys)
        by_group = self._layout.split(keys)
        num_units, waiting = self._most_units(by_group), self.promised.deadlines
        promised = [key for key in keys if key in waiting] if waiting else []
        if promised:
            num_units = max(num_units, promised_units(self._layout, by_group, waiting))
        if num_units == 0:
            return
        chain.grow(keys, by_group, num_units, is_whole)
        self.backlog.move(chain, state)
        if promised:
            self.backlog.promise(chain, promised)
        self._pace.progress_at = self._clock()
        while (excess := self.backlog.excess()) is not None:
            self._drop(excess)

    def _most_units(self, by_group: ByGroup) -> int:
        """Returns how many leading units of a chain the tier may be given: what it has room for, since the tail of a
        longer chain would evict its head, and what the admission accepts, since nothing behind could be found."""
        layout = self._layout
        num_units = layout.num_units(by_group)
        most_blocks = self._tier.most_blocks(by_group[0][0]) if num_units else None
        if most_blocks is not None:
            num_units = min(num_units, max(0, most_blocks - layout.num_states) // layout.kv_blocks_per_unit)
        if self.admission is not None:
            for keys, per_unit in zip(by_group, layout.blocks_per_unit, strict=True):
                accepted = self.admission.accepts(keys[: num_units * per_unit])
                if not all(accepted):
                    num_units = accepted.index(False) // per_unit
        return num_units

    def _holds(self, keys: Keys) -> bool:
        """Returns whether the tier certainly holds all of ``keys``. The last one, which is lacking if others are, is
        looked up first. A shared tier would have to ask its medium."""
        if self._tier.is_shared or not keys or self._tier.contains(keys[-1:])[0] != HIT:
            return False
        return bool((self._tier.contains(keys) == HIT).all())

    def stored(self, keys: Collection[OffloadKey]) -> None:
        """Called when ``keys`` have become ready in the host."""
        if self.backlog.wake(keys):
            self._pace.progress_at = self._clock()

    def note_lost(self, num_blocks: int) -> None:
        """Notes that the tier has lost blocks that could not be read."""
        self._blocks.num_lost += num_blocks

    def clear(self) -> None:
        """Empties the backlog. Writes in progress continue, but belong to no chain. Gives up what is promised."""
        for chain in list(self.backlog):
            self.backlog.move(chain, ChainState.GONE)
        self.promised.give_up(list(self.promised.deadlines))
        self._blocks.chain_of.update(dict.fromkeys(self.writing))

    def close(self) -> None:
        """Called when the tier is closed: it reports no more writes."""
        self.clear()
        self._blocks.end(list(self.writing))

    # Writing.

    def pump(self, room: int) -> list[OffloadKey]:
        """Begins to write as much of the backlog as the tier takes on, at most ``room`` blocks. Returns these."""
        begun: list[OffloadKey] = []
        if self._clock() - self._pace.refused_at < REFUSAL_S:
            return begun
        self.backlog.wake_rested(self._clock())
        while len(begun) < room and (chain := self.backlog.next()) is not None:
            plan = self._plan(chain)
            keys = plan.keys[: room - len(begun)]
            if keys:
                if self._is_evicted_again(chain):
                    self._drop(chain)
                    continue
                taken = self._blocks.begin(keys, chain)
                begun += taken
                if taken:
                    self._pace.progressed(self._clock())
                    if chain.state is ChainState.FRESH:
                        self.backlog.move(chain, ChainState.STARTED)
                if len(taken) < len(keys):
                    if self._pace.refused(self._clock(), is_idle=not self.writing):
                        self._drop(chain)
                    break
                if len(keys) < len(plan.keys):
                    break
            chain.done = plan.done
            if plan.holes:
                self._stop(chain, plan.holes)
            elif chain.done == chain.num_units:
                self._finish(chain)
        return begun

    def _is_evicted_again(self, chain: Chain) -> bool:
        """Returns whether the blocks of the chain that were written were written MAX_WRITES_PER_BLOCK times on average.
        A chain may name many more: those behind its units, and a state for every unit, of which hardly any exist."""
        fewest = max(chain.num_units * self._layout.kv_blocks_per_unit, len(chain.log.given))
        return chain.log.num_writes - chain.log.num_failed_writes >= MAX_WRITES_PER_BLOCK * fewest

    def ended(self, writes: Ended) -> None:
        """Takes in writes that have ended."""
        if not writes:
            return
        self._pace.progressed(self._clock())
        _count_results(writes, self._count)
        chains = self._blocks.end(writes.keys)
        if self.promised.deadlines:
            # The tier keeps what is promised of these from now on.
            self.promised.written(writes.good.keys)
        failed: dict[Chain, bool] = {}
        """The chains of which writes have failed, and whether that was a failure of the tier."""
        if not writes.all_ok or 0 in writes.nbytes:
            self._blocks.num_lost += len(writes) - writes.errors.count(None)
            for chain, result in zip(chains, writes.results, strict=True):
                if chain is not None and not result.ok:
                    # A block that is GONE was deleted for another chain.
                    is_failure = result.error is not TierError.GONE
                    chain.log.lost.add(result.key)
                    chain.log.num_failed_writes += is_failure
                    failed[chain] = failed.get(chain, False) or is_failure
                elif chain is not None and not result.nbytes:
                    chain.log.foreign.add(result.key)
        self.backlog.wake(writes.keys)
        for chain, is_failure in failed.items():
            chain.log.num_failures += is_failure
            self._rewrite(chain)

    def _plan(self, chain: Chain) -> WritePlan:
        """Returns which blocks of the chain are to be written next."""
        before, losses = chain.done, self._blocks.num_losses
        if losses != chain.losses and before >= chain.verify_at:
            # The longer the chain, the less often, so that each block is looked up a few times at most.
            chain.verify_at, chain.losses, chain.done = before + before // 4, losses, 0
        # The last unit that is done is looked up again in any case.
        start, num_units = max(0, chain.done - 1), FIRST_UNITS
        look = partial(self._blocks.look, chain=chain)
        while True:
            stop = min(chain.num_units, start + num_units)
            plan = plan_writes(self._layout, chain.by_group, start, stop, stop == chain.num_units, look)
            if plan.keys or plan.holes or stop == chain.num_units:
                return plan
            start, num_units = plan.done, 2 * num_units
            chain.done = max(chain.done, start)

    # The end of a chain.

    def _stop(self, chain: Chain, holes: Keys) -> None:
        """Stops writing the chain where the tier lacks ``holes`` and cannot be given any of them now, see WritePlan."""
        # The last blocks of a request are still on their way to the host when it ends.
        pending = (self._host.table.states(holes) == PENDING).tolist()
        coming = [key for key, is_pending in zip(holes, pending, strict=True) if is_pending or key in self.writing]
        if not chain.is_whole or coming:
            self.backlog.move(chain, ChainState.WAITING, coming if chain.is_whole else holes)
            return
        if self._host.explain_miss(holes[0]).reason is MissReason.EVICTED:
            self._count("dropped_writes", self._blocks.num_lacking(chain, in_host=False))
        self._blocks.delete_unreachable(chain)
        self._finish(chain)

    def _finish(self, chain: Chain) -> None:
        is_over = chain.is_whole or chain.request is None
        if chain.promised and is_over:
            # It has these already, or no lookup could use them.
            self.promised.give_up([key for key in chain.promised if key not in self.writing])
        self.backlog.move(chain, ChainState.HELD if chain.promised or not is_over else ChainState.GONE)
        if chain.is_whole and chain.log.num_writes > chain.num_writes_before:
            # Blocks written after the request had ended are newer than those before them in the chain.
            self._tier.touch(chain.keys, chain.log.given)

    def _rewrite(self, chain: Chain) -> None:
        """A write has failed: after a pause, looks the chain up again from its head, so that writing continues where
        the tier lacks a block, or cuts it off there."""
        if not chain.promised and chain.log.num_failures > MAX_REWRITES:
            self._blocks.delete_unreachable(chain)
            self.backlog.move(chain, ChainState.GONE)
        else:
            chain.done = 0
            self.backlog.rest(chain, self._clock())

    def _drop(self, chain: Chain) -> None:
        self._count("dropped_writes", self._blocks.num_lacking(chain, in_host=True))
        self.promised.give_up(list(chain.promised))
        self.backlog.move(chain, ChainState.GONE)
        self._blocks.delete_unreachable(chain)

    def check_integrity(self) -> None:
        """Raises IntegrityError if the backlog is inconsistent, or if the tier lacks a block before the position up to
        which a chain counts as written, although it has lost none since that was looked up."""
        self.backlog.check_integrity()
        if self._tier.is_shared or self._tier.stats().capacity_bytes is None:
            # The medium may lose blocks without counting them.
            return
        for chain in self.backlog:
            if chain.losses == self._blocks.num_losses:
                layout = self._layout
                for group, per_unit, keys in zip(layout.groups, layout.blocks_per_unit, chain.by_group, strict=True):
                    before = keys[: chain.done * per_unit] if group.is_full else []
                    lacking = (self._tier.contains(before) == MISS) & ~self._blocks.in_tier(before, chain)
                    if lacking.any():
                        raise IntegrityError("a chain is written behind a hole")


def promised_units(layout: ChainLayout, by_group: ByGroup, promised: Collection[OffloadKey]) -> int:
    """Returns how many leading units of a chain have all of ``promised``."""
    num_units = 0
    for keys, per_unit in zip(by_group, layout.blocks_per_unit, strict=True):
        last = next((i for i in range(len(keys) - 1, -1, -1) if keys[i] in promised), -1)
        num_units = max(num_units, last // per_unit + 1)
    return min(num_units, layout.num_units(by_group))


def _count_results(writes: Ended, count: Callable[[str, float], None]) -> None:
    # Those of no bytes were held by a shared medium already.
    written = [nbytes for nbytes, error in zip(writes.nbytes, writes.errors, strict=True) if nbytes and not error]
    num_ok, num_gone = writes.errors.count(None), writes.errors.count(TierError.GONE)
    count("write_seconds", sum(writes.seconds))
    count("write_blocks", len(written))
    count("write_bytes", sum(written))
    count("write_failures", len(writes) - num_ok - num_gone)

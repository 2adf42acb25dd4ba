"""WriteThrough: writes chains of blocks to a lower tier, whole, head first, and never behind a hole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from kvoffload.abc import (
    Admission,
    IntegrityError,
    KVGroup,
    MissReason,
    OffloadKey,
    ReqContext,
    Tier,
    TierError,
    TierResult,
)
from kvoffload.abc.tier import HIT, MISS, PENDING
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.tiers.chains import BACKLOG_SHARE, READY, Backlog, Chain, ChainRef, ChainState
from kvoffload.tiers.ended import Ended
from kvoffload.tiers.plan import Bools, ChainLayout
from kvoffload.tiers.planner import ChainPlanner

MAX_REWRITES = 1
"""How often a chain is written again from where a write has failed."""
MAX_WRITES_PER_BLOCK = 2
"""Writes per block of one chain, on average: a tier that keeps evicting the chain is given no more of it."""
REFUSAL_S = 0.01
"""A tier that takes on nothing although it has nothing to do is asked again after this time."""
PATIENCE_S = 0.25
"""How long an idle engine is kept stepping for a backlog on which the tier makes no progress."""
GIVE_UP_S = 1.0
"""A chain of which the tier takes on nothing for this long, although it has nothing to do, is dropped."""


class WriteThrough:
    """Writes to ``tier`` the blocks that it lacks of chains that requests touch or store. Their bytes come from
    ``host``.

    A block is written only if every earlier block that a lookup needs is in the tier or is being written: in a group
    with full attention every block, in a group with a window the blocks that a request needs to resume at some later
    position. In a chain with states nothing is written behind the last state, which comes after all blocks before it:
    when a later request of the conversation brings another one, the blocks between are written for that. Blocks that
    cannot be written now stay in the backlog while the host holds them.

    ``groups``: the KV cache groups that keys name. ``count`` takes the counters ``tier_NAME`` of METRICS, by NAME.
    ``admission``: only leading blocks of a chain that it accepts are written. ``is_worth``: see ChainPlanner.
    """

    def __init__(
        self,
        host: PolicyOffloadingManager,
        tier: Tier,
        groups: Sequence[KVGroup],
        count: Callable[[str, float], None],
        clock: Callable[[], float],
        admission: Admission | None = None,
        is_worth: Callable[[Sequence[OffloadKey]], Bools] | None = None,
        backlog_share: float = BACKLOG_SHARE,
    ) -> None:
        self._host = host
        self._tier = tier
        self._layout = ChainLayout(groups)
        self._count = count
        self._clock = clock
        # Chains name a state for every unit; hardly any of them exist.
        keys_per_block = sum(self._layout.blocks_per_unit) / self._layout.kv_blocks_per_unit
        self._backlog = Backlog(max(1, int(host.num_blocks * backlog_share * keys_per_block)))
        self._writing: dict[OffloadKey, ChainRef] = {}
        """Blocks that the tier has not reported yet, and the chains that they are written for."""
        self._slots: dict[OffloadKey, int] = {}
        """The host slots of these blocks, pinned."""
        self._planner = ChainPlanner(host, tier, self._layout, self._writing, is_worth)
        self._admission = admission
        self._num_lost = 0
        """Blocks that the tier was given and has lost, without those that it has evicted."""
        self._progress_at = float("-inf")
        """When a write last began or ended, or a chain was offered."""
        self._refused_at: float | None = None
        """When the tier took on nothing, or None if it has done something since."""

    # State.

    @property
    def num_writing(self) -> int:
        """Blocks that the tier has not reported yet, each with a pin in the host."""
        return len(self._writing)

    @property
    def keys_writing(self) -> set[OffloadKey]:
        """These blocks."""
        return set(self._writing)

    @property
    def has_backlog(self) -> bool:
        """Whether there are chains to be written now."""
        return self._backlog.is_ready

    @property
    def is_busy(self) -> bool:
        """Whether there is a backlog and the tier makes progress."""
        has_work = self.has_backlog or self._backlog.waits_for_any(self._writing)
        return has_work and self._clock() - self._progress_at < PATIENCE_S

    def chain_of(self, request: str) -> Chain | None:
        """Returns the chain of a request that is in the backlog."""
        return self._backlog.of_request(request)

    def lacks(self, keys: Sequence[OffloadKey]) -> Bools:
        """Returns which of ``keys`` are worth having in the host, so that they can be written: the tier neither holds
        them nor is being given them, and the admission accepts them."""
        lacking: Bools = (self._tier.contains(keys) != HIT) & ~self._planner.is_writing(keys)
        if self._admission is not None and lacking.any():
            lacking &= np.array(self._admission.accepts(keys), dtype=np.bool_)
        return lacking

    def may_write(self, keys: Sequence[OffloadKey], request: str) -> bool:
        """Returns whether some of ``keys``, of the chain of ``request``, are being written, or will be as soon as the
        tier takes them on or has written others."""
        if not self._writing.keys().isdisjoint(keys):
            return True
        chain = self._backlog.of_request(request)
        if chain is None or not (chain.state in READY or any(key in self._writing for key in chain.waits_for)):
            return False
        return not self._planner.in_tier(keys, chain).all()

    # What happens elsewhere.

    def offer(self, keys: Sequence[OffloadKey], request: str | None, is_whole: bool) -> None:
        """Adds ``keys``, the chain of ``request``, to the backlog: head first, the groups merged by the position at
        which blocks end.

        It takes the place of the chain that was offered for the same request before.
        """
        before = self._backlog.of_request(request)
        state = ChainState.FRESH
        if before is not None:
            state = ChainState.STARTED if before.state is ChainState.STARTED else state
            self._backlog.remove(before)
        keys = list(keys)
        by_group = self._layout.split(keys)
        num_units = self._layout.num_units(by_group)
        most_blocks = self._tier.most_blocks(keys[0]) if keys else None
        if most_blocks is not None:
            # The tail of a chain longer than the tier would evict its head.
            most_blocks = max(0, most_blocks - self._layout.num_states)
            num_units = min(num_units, most_blocks // self._layout.kv_blocks_per_unit)
        if self._admission is not None:
            num_units = min(num_units, self._num_admitted(by_group, num_units))
        if num_units == 0:
            return
        chain = Chain(keys, by_group, num_units, is_whole, request)
        if before is not None:
            chain.take_over(before)
        self._backlog.add(chain, state)
        self._progress_at = self._clock()
        while (excess := self._backlog.excess()) is not None:
            self._drop(excess)

    def _num_admitted(self, by_group: Sequence[Sequence[OffloadKey]], num_units: int) -> int:
        """Returns how many leading units of a chain the admission accepts. Nothing behind them could be found."""
        assert self._admission is not None
        for keys, per_unit in zip(by_group, self._layout.blocks_per_unit, strict=True):
            accepted = self._admission.accepts(keys[: num_units * per_unit])
            if not all(accepted):
                num_units = accepted.index(False) // per_unit
        return num_units

    def count_request(self, keys: Sequence[OffloadKey], req_context: ReqContext | None) -> None:
        """Tells the admission that a request asks for ``keys``."""
        if self._admission is not None:
            self._admission.count(keys, req_context)

    def postpone(self, request: str) -> None:
        """Called when the request waits for a promotion: its chain is not planned until that has ended."""
        self._backlog.postpone(request)

    def resume(self, request: str) -> None:
        """Called when the request no longer waits for a promotion."""
        if self._backlog.resume(request):
            self._progress_at = self._clock()

    def stored(self, keys: Sequence[OffloadKey]) -> None:
        """Called when ``keys`` have become ready in the host."""
        if self._backlog.wake(keys):
            self._progress_at = self._clock()

    def store_failed(self) -> None:
        """Plans all chains that wait for a block again, because blocks that were to become ready in the host have
        vanished."""
        if self._backlog.wake(self._backlog.awaited):
            self._progress_at = self._clock()

    def lose(self, num_blocks: int) -> None:
        """Notes that the tier has lost blocks that could not be read."""
        self._num_lost += num_blocks

    def clear(self) -> None:
        """Empties the backlog. Writes in progress continue, but belong to no chain."""
        self._backlog.clear()
        for ref in set(self._writing.values()):
            ref.chain = None

    def close(self) -> None:
        """Called when the tier is closed: it reports no more writes."""
        self.clear()
        self._unpin(self._slots.values())
        self._writing.clear()
        self._slots.clear()

    # Writing.

    def pump(self, room: int) -> list[OffloadKey]:
        """Begins to write as much of the backlog as the tier takes on, at most ``room`` blocks. Returns these."""
        begun: list[OffloadKey] = []
        if self._refused_at is not None and self._clock() - self._refused_at < REFUSAL_S:
            return begun
        while len(begun) < room:
            chain = self._backlog.next()
            if chain is None:
                break
            plan = self._planner.plan(chain, room - len(begun), self._losses)
            if plan.keys and self._is_evicted_again(chain):
                self._drop(chain)
                continue
            taken = self._write(chain, plan.keys)
            begun += plan.keys[:taken]
            if taken < len(plan.keys):
                self._refuse(chain)
                break
            chain.refused_at = None
            chain.done = plan.done
            if plan.holes:
                self._stop(chain, plan.holes)
            elif chain.done == chain.num_units:
                self._finish(chain)
        return begun

    def _is_evicted_again(self, chain: Chain) -> bool:
        """Returns whether the blocks of the chain that were written were written MAX_WRITES_PER_BLOCK times on average.
        A chain may name many more: those behind its units, and a state for every unit, of which hardly any exist."""
        fewest = chain.num_units * self._layout.kv_blocks_per_unit
        num_written = len(chain.written)
        return num_written >= MAX_WRITES_PER_BLOCK * fewest and (
            num_written >= MAX_WRITES_PER_BLOCK * len(set(chain.written))
        )

    def _write(self, chain: Chain, keys: list[OffloadKey]) -> int:
        """Returns how many of ``keys``, from the first one on, the tier has taken on."""
        if not keys:
            return 0
        lease = self._host.prepare_load(keys)
        slots = dict(zip(keys, lease.slots.tolist(), strict=True))
        taken = self._tier.write(keys, lease.slots)
        if len(taken) < len(keys):
            given = frozenset(taken)
            self._unpin([slot for key, slot in slots.items() if key not in given])
            slots = {key: slot for key, slot in slots.items() if key in given}
        if not slots:
            return 0
        self._writing.update(dict.fromkeys(slots, chain.ref))
        self._slots.update(slots)
        chain.written += slots
        chain.lost.difference_update(slots)
        self._progress_at, self._refused_at = self._clock(), None
        if chain.state is ChainState.FRESH:
            self._backlog.enqueue(chain, ChainState.STARTED)
        return len(keys) if len(slots) == len(keys) else next(i for i, key in enumerate(keys) if key not in slots)

    def _refuse(self, chain: Chain) -> None:
        """The tier has refused some blocks."""
        self._refused_at = now = self._clock()
        if self._writing:
            chain.refused_at = None
        elif chain.refused_at is None:
            chain.refused_at = now
        elif now - chain.refused_at > GIVE_UP_S:
            self._drop(chain)

    def ended(self, writes: Ended) -> None:
        """Takes in writes that have ended."""
        if not writes:
            return
        self._progress_at, self._refused_at = self._clock(), None
        self._count_results(writes)
        refs = list(map(self._writing.pop, writes.keys))
        self._unpin(list(map(self._slots.pop, writes.keys)))
        failed: dict[Chain, list[TierResult]] = {}
        if not writes.all_ok or 0 in writes.nbytes:
            for ref, result in zip(refs, writes.results, strict=True):
                if result.ok and not result.nbytes and ref.chain is not None:
                    ref.chain.foreign.add(result.key)
                if not result.ok:
                    self._num_lost += 1
                    if ref.chain is not None:
                        ref.chain.lost.add(result.key)
                        failed.setdefault(ref.chain, []).append(result)
        self._backlog.wake(writes.keys)
        for chain, failures in failed.items():
            # A block that is GONE was deleted for another chain.
            chain.failures += any(result.error is not TierError.GONE for result in failures)
            if chain.failures > MAX_REWRITES:
                self._delete_unreachable(chain)
                self._backlog.remove(chain)
            else:
                self._rewrite(chain)

    def _count_results(self, writes: Ended) -> None:
        # Those of no bytes were held by a shared medium already.
        written = [nbytes for nbytes, error in zip(writes.nbytes, writes.errors, strict=True) if nbytes and not error]
        num_ok, num_gone = writes.errors.count(None), writes.errors.count(TierError.GONE)
        self._count("write_seconds", sum(writes.seconds))
        self._count("write_blocks", len(written))
        self._count("write_bytes", sum(written))
        self._count("write_failures", len(writes) - num_ok - num_gone)

    def _unpin(self, slots: Collection[int]) -> None:
        if slots:
            self._host.complete_load(self._host.lease(slots))

    # The end of a chain.

    def _stop(self, chain: Chain, holes: Sequence[OffloadKey]) -> None:
        """Stops writing the chain where the tier lacks ``holes`` and cannot be given any of them now, see Plan."""
        # The last blocks of a request are still on their way to the host when it ends.
        pending = (self._host.states(holes) == PENDING).tolist()
        coming = [key for key, is_pending in zip(holes, pending, strict=True) if is_pending or key in self._writing]
        if not chain.is_whole or coming:
            self._backlog.wait_for(chain, coming if chain.is_whole else holes)
            return
        if self._host.explain_miss(holes[0]).reason is MissReason.EVICTED:
            self._count("dropped_writes", self._planner.num_lacking(chain, in_host=False))
        self._delete_unreachable(chain)
        self._finish(chain)

    def _finish(self, chain: Chain) -> None:
        if not chain.is_whole and chain.request is not None:
            self._backlog.hold(chain)
            return
        self._backlog.remove(chain)
        if chain.is_whole and len(chain.written) > chain.num_written_before:
            # Blocks written after the request had ended are newer than those before them in the chain.
            self._tier.reorder_chain(chain.keys, chain.written)

    def _drop(self, chain: Chain) -> None:
        self._count("dropped_writes", self._planner.num_lacking(chain, in_host=True))
        self._backlog.remove(chain)
        self._delete_unreachable(chain)

    def _delete_unreachable(self, chain: Chain) -> None:
        """Deletes the blocks of the chain that no lookup can use. From a shared tier only those that were written for
        this chain."""
        keys, num_held = self._planner.unreachable(chain)
        self._num_lost += num_held
        self._tier.delete(keys)

    def _rewrite(self, chain: Chain) -> None:
        """Looks the chain up again from its head; writing continues where the tier lacks a block."""
        chain.done = 0
        if chain.state is ChainState.GONE:
            self._backlog.add(chain, ChainState.STARTED)
        else:
            self._backlog.enqueue(chain, ChainState.STARTED)

    @property
    def _losses(self) -> int:
        return self._tier.num_evicted + self._num_lost

    def check_integrity(self) -> None:
        """Raises IntegrityError if the backlog is inconsistent, or if the tier lacks a block before the position up to
        which a chain counts as written, although it has lost none since that was looked up."""
        self._backlog.check_integrity()
        if self._tier.is_shared or self._tier.capacity_bytes is None:
            # The medium may lose blocks without counting them.
            return
        for chain in self._backlog:
            if chain.losses == self._losses:
                layout = self._layout
                for group, per_unit, keys in zip(layout.groups, layout.blocks_per_unit, chain.by_group, strict=True):
                    before = keys[: chain.done * per_unit] if group.is_full else []
                    lacking = (self._tier.contains(before) == MISS) & ~self._planner.in_tier(before, chain)
                    if lacking.any():
                        raise IntegrityError("a chain is written behind a hole")

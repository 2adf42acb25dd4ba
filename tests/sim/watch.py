"""TierWatch: records what a tier is given and what it reports, and checks what must hold between it and the host."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from kvoffload.abc import LookupState, OffloadKey, ReqContext, Slots, States, Tier, TierResult
from kvoffload.cache.keys import key_group_idx
from tests.sim.engine import ModelEngine


class SlotTaken(AssertionError):
    """A host slot was freed, or given to another block, while the tier still read into it or wrote from it."""


class Unreachable(AssertionError):
    """A block was written or kept behind one that the tier has never had."""


class TierWatch:
    """Watches the calls of ``tier``, which must be new, and of the engine on top of it, see ``attach``.

    ``given``: keys of blocks that some server was given to write; servers that share a medium share this set.
    """

    def __init__(self, tier: Tier, given: set[OffloadKey] | None = None) -> None:
        self.tier = tier
        self.written: dict[OffloadKey, None] = {}
        """Keys that the tier has taken on to write."""
        self.counts: Counter[str] = Counter()
        """Blocks read and written, by how that has ended."""
        self.was_reset = False
        self.unreachable: Unreachable | None = None
        """The first broken law that ``write`` has found: the connector would handle an error raised there."""
        self._given = given
        self._in_use: dict[OffloadKey, int] = {}
        """Blocks that the tier has not reported yet, and their host slots."""
        self._chains_of: defaultdict[OffloadKey, list[tuple[Sequence[OffloadKey], int]]] = defaultdict(list)
        """The chains that each key is in, and its position there."""
        self._had: set[OffloadKey] = set()
        """Keys that the tier was seen to hold. It may lose them later."""
        self._unknown: set[OffloadKey] = set()
        """Keys about which the tier's latest answer was that it does not know."""
        self._engine: ModelEngine | None = None
        self._wrap(tier)

    def _wrap(self, tier: Tier) -> None:
        read, write, poll, contains, reset = tier.read, tier.write, tier.poll, tier.contains, tier.reset

        def watched_read(keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
            taken = read(keys, slots)
            self._in_use.update(item for item in zip(keys, slots.tolist(), strict=True) if item[0] in taken)
            return taken

        def watched_write(keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
            taken = write(keys, slots)
            self._in_use.update(item for item in zip(keys, slots.tolist(), strict=True) if item[0] in taken)
            self.written.update(dict.fromkeys(taken))
            if self._given is not None:
                self._given.update(taken)
            try:
                self.check_reachable(taken)
            except Unreachable as error:
                self.unreachable = self.unreachable or error
            return taken

        def watched_poll() -> list[TierResult]:
            results = poll()
            for result in results:
                self._in_use.pop(result.key, None)
                self.counts[f"{'reads' if result.is_read else 'writes'}: {result.error or 'ok'}"] += 1
                self.counts["reads of others"] += result.is_read and result.ok and result.key not in self.written
            self._had.update(result.key for result in results if result.ok)
            return results

        def watched_contains(keys: Sequence[OffloadKey], ahead: Sequence[OffloadKey] = ()) -> States:
            states = contains(keys, ahead)
            self._had.update(keys[i] for i in np.flatnonzero(states == LookupState.HIT).tolist())
            self._unknown.difference_update(keys)
            self._unknown.update(keys[i] for i in np.flatnonzero(states == LookupState.RETRY).tolist())
            return states

        def watched_reset() -> None:
            self.was_reset = True
            reset()

        tier.read, tier.write, tier.poll = watched_read, watched_write, watched_poll  # type: ignore[method-assign]
        tier.contains, tier.reset = watched_contains, watched_reset  # type: ignore[method-assign]

    def attach(self, engine: ModelEngine) -> None:
        """Learns the chains that the requests of ``engine`` touch and offer from now on."""
        tiered = engine.tiered
        assert tiered is not None
        self._engine = engine
        touch, end_chain = tiered.touch, tiered.end_chain

        def learn(keys: Sequence[OffloadKey]) -> None:
            keys = list(keys)
            for i, key in enumerate(keys):
                self._chains_of[key].append((keys, i))
            if not self.tier.is_shared:
                # A shared tier would ask its medium.
                self.tier.contains(keys)

        def watched_touch(
            keys: Sequence[OffloadKey],
            req_context: ReqContext | None = None,
            chain: Sequence[OffloadKey] | None = None,
        ) -> None:
            learn(keys if chain is None else chain)
            touch(keys, req_context, chain)

        def watched_end(
            keys: Sequence[OffloadKey],
            stored: Collection[OffloadKey],
            req_context: ReqContext | None = None,
            chain: Sequence[OffloadKey] | None = None,
        ) -> None:
            learn(keys if chain is None else chain)
            end_chain(keys, stored, req_context, chain)

        tiered.touch, tiered.end_chain = watched_touch, watched_end  # type: ignore[method-assign]

    def check_reachable(self, keys: Iterable[OffloadKey]) -> None:
        """Raises Unreachable if the tier has never had, and is not writing, some block before one of ``keys`` in a
        group with full attention. It is enough that one chain of the key is complete: in draft groups, chains that
        differ in the next token share keys."""
        for key in keys:
            chains = self._chains_of[key]
            if chains and not any(self._is_reached(chain[:place]) for chain, place in reversed(chains)):
                raise Unreachable(f"block {chains[-1][1]} of a chain of {len(chains[-1][0])}")

    def _is_reached(self, before: Sequence[OffloadKey]) -> bool:
        assert self._engine is not None
        groups = self._engine.scheduler.layout.groups
        needed = [key for key in before if groups[key_group_idx(key)].is_full and key not in self._had]
        if self._given is not None:
            needed = [key for key in needed if key not in self._given and key not in self._unknown]
            return all(key in self._in_use for key in needed)
        missing = np.flatnonzero(self.tier.contains(needed) == LookupState.MISS).tolist()
        return all(needed[i] in self._in_use for i in missing)

    def check_all_reachable(self) -> None:
        """Raises Unreachable if a block is left behind one whose write has failed. For when nothing is under way."""
        keys = list(self._chains_of)
        there = np.flatnonzero(self.tier.contains(keys) == LookupState.HIT)
        # A kill may leave blocks behind a hole, but those belong to another life.
        mine = [keys[i] for i in there.tolist() if keys[i] in self.written]
        self.check_reachable(mine)
        self._check_before_states(mine)

    def _check_before_states(self, keys: Iterable[OffloadKey]) -> None:
        """Raises Unreachable if one of ``keys`` lies behind the last position of its chains at which the tier has ever
        had all states."""
        assert self._engine is not None
        if not any(group.state for group in self._engine.scheduler.layout.groups):
            return
        for key in keys:
            if not any(self._is_before_states(chain, place) for chain, place in reversed(self._chains_of[key])):
                chain, place = self._chains_of[key][-1]
                raise Unreachable(f"block {place} of a chain of {len(chain)}, behind its last state")

    def _is_before_states(self, chain: Sequence[OffloadKey], place: int) -> bool:
        assert self._engine is not None
        groups, num_blocks, num_states = self._engine.scheduler.layout.groups, Counter[int](), Counter[int]()
        end_of_block = 0
        for i, key in enumerate(chain):
            g = key_group_idx(key)
            num_blocks[g] += 1
            end = num_blocks[g] * groups[g].block_tokens
            num_states[end] += groups[g].state and key in self._had
            end_of_block = end if i == place else end_of_block
        all_states = sum(group.state for group in groups)
        return any(n == all_states and end >= end_of_block for end, n in num_states.items())

    def check_slots(self) -> None:
        """Raises SlotTaken if a host slot in transfer does not belong to its block any more."""
        assert self._engine is not None
        host = self._engine.policy_manager
        for key, slot in self._in_use.items():
            status = host.block_status(key)
            is_in_transfer = status is not None and status.slot == slot and status.ref_cnt != 0
            # A block that was dropped keeps its slot until its transfer has ended.
            if not is_in_transfer and not host.table.dropped[slot]:
                raise SlotTaken(f"slot {slot} of block {key.hex()}")

"""TierReads: gives blocks to tiers to read, for promotions and as tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress

import numpy as np

from kvoffload.abc import LookupState, OffloadKey
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.tiers.promotion import Located, Promotion
from kvoffload.tiers.state import TierState

MAX_READS = 1024
"""Maximum number of blocks that are read from one tier at a time."""


class TierReads:
    """Begins reads from ``tiers`` into slots of ``host``. A request waits for ``deadline_s``; ``count`` takes the
    counters of METRICS, by name."""

    def __init__(
        self,
        host: PolicyOffloadingManager,
        tiers: Sequence[TierState],
        deadline_s: float,
        count: Callable[[str, float], None],
    ) -> None:
        self._host = host
        self._tiers = tiers
        self._deadline_s = deadline_s
        self._count = count

    def num_in_time(self, tier: TierState) -> int:
        """Returns how many more blocks the tier can read within the deadline. Blocks of a tier that is not read are
        looked up in others."""
        if not tier.can_read:
            return MAX_READS
        return tier.estimator.num_blocks_within(self._deadline_s, MAX_READS) - tier.num_reading

    def begin(
        self,
        slots: dict[OffloadKey, int],
        blocks: Located,
        promotion: Promotion,
        allowed: list[int],
        now: float,
    ) -> dict[OffloadKey, int]:
        """Gives those of ``blocks`` that have slots to their tiers to read. ``promotion`` waits for them from now on.
        Returns those that these have not taken on. ``allowed``: see ``num_in_time``; it becomes less."""
        refused: dict[OffloadKey, int] = {}
        for tier in self._tiers:
            mine = slots
            if len(self._tiers) > 1:
                its = compress(blocks.keys, (blocks.sources == tier.index).tolist())
                mine = {key: slots[key] for key in its if key in slots}
            if mine:
                left = self._give(tier, mine, promotion, now) if tier.can_read else mine
                allowed[tier.index] -= len(mine) - len(left)
                refused |= left
        return refused

    def _give(
        self, tier: TierState, slots: dict[OffloadKey, int], promotion: Promotion, now: float
    ) -> dict[OffloadKey, int]:
        """Gives blocks to the tier to read into ``slots``. Returns those that it has not taken on."""
        taken = tier.tier.read(list(slots), np.fromiter(slots.values(), np.int64, len(slots)))
        promotion.reading.update(taken)
        if len(taken) == len(slots):
            tier.begin_reads(slots, (promotion,), now)
            return {}
        tier.begin_reads({key: slots[key] for key in taken}, (promotion,), now)
        refused = slots.keys() - taken
        return {key: slot for key, slot in slots.items() if key in refused}

    def readable(self, keys: list[OffloadKey]) -> Located:
        """Returns those of ``keys`` that some tier can read now, in the fastest that can."""
        sources = np.full(len(keys), -1, dtype=np.int8)
        for tier in self._tiers:
            left = np.flatnonzero(sources < 0)
            if tier.can_read and len(left):
                is_held = tier.tier.contains([keys[i] for i in left.tolist()]) == LookupState.HIT
                sources[left[is_held]] = tier.index
        return Located(keys, sources).select(sources >= 0)

    def probe(self, tier: TierState, room: int, now: float) -> bool:
        """Reads a block for no request from a tier that was paused, to see whether it works again, if there is ``room``
        for it."""
        key = tier.probe
        if key is None or not tier.may_probe:
            tier.choose_probe(None, now)
            return False
        state = tier.tier.contains([key])[0]
        if state == LookupState.RETRY:
            tier.await_probe(now)
            return False
        tier.choose_probe(None, now)
        if state != LookupState.HIT or room <= 0:
            return False
        output = self._host.allocate([key])
        if output is None or not output.keys_to_store:
            return False
        self._count("evicted_blocks", len(output.evicted_keys))
        slots = output.store_spec.slots
        if not tier.tier.read([key], slots):
            self._host.complete_store(output.store_spec, success=False)
            return False
        tier.begin_probe(key, int(slots[0]), now)
        return True

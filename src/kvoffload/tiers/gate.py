"""LoadGate: what of a hit below host memory is loaded, because that is faster than computing it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvoffload.abc import KVGroup, MissReason
from kvoffload.cache.keys import key_group_idx
from kvoffload.cache.misses import MissMemory
from kvoffload.tiers.lookup import Last
from kvoffload.tiers.plan import ChainLayout
from kvoffload.tiers.promoter import Promoter
from kvoffload.tiers.promotion import Located, Promotion
from kvoffload.tiers.rates import LoadOrCompute
from kvoffload.tiers.state import TierState


class LoadGate:
    """Judges hits by ``rates``, by what ``tiers`` are reading already, and by what ``promoter`` has queued.

    A state saves nothing by itself. So it is first compared with all tokens up to it, and then the KV of these tokens
    is judged together with the states that the request wants.
    """

    def __init__(
        self,
        tiers: Sequence[TierState],
        groups: Sequence[KVGroup],
        promoter: Promoter,
        rates: LoadOrCompute,
        reasons: MissMemory,
        clock: Callable[[], float],
    ) -> None:
        self._tiers = tiers
        self._layout = ChainLayout(groups)
        self._num_full = max(1, sum(group.is_full for group in groups))
        self._promoter = promoter
        self._rates = rates
        self._reasons = reasons
        self._clock = clock

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Takes in that the engine took ``seconds`` to compute ``num_tokens`` of a prompt."""
        self._rates.observe_prefill(num_tokens, seconds)

    def worth_loading(self, below: Located, promotion: Promotion | None) -> Located:
        """Returns the leading blocks of a run that are to be loaded; the rest is faster to compute. With states all of
        it is loaded, or nothing: then the request that waits with ``promotion`` does not want its states any more."""
        num_ahead, num_states = [], []
        for tier in self._tiers:
            # What the request itself wants is judged with its blocks. Groups with full attention share its states.
            its_own = 0 if promotion is None else promotion.num_wanted_from(tier.index)
            num_ahead.append(self._num_ahead(tier) - its_own)
            num_states.append(self._num_states(promotion, tier) / self._num_full if its_own else 0.0)
        num_loaded = self._rates.num_worth_loading(
            key_group_idx(below.keys[0]),
            below.sources,
            num_ahead,
            [tier.estimator for tier in self._tiers],
            self._clock(),
            num_states if self._layout.num_states else None,
        )
        self._reasons.record(below.keys[num_loaded : num_loaded + 1], MissReason.FASTER_TO_COMPUTE)
        if not num_loaded and promotion is not None and promotion.is_waiting:
            self._promoter.withdraw(promotion)
        return Located(below.keys[:num_loaded], below.sources[:num_loaded])

    def is_state_worth_loading(self, last: Last) -> bool:
        """Returns whether a state in a tier takes less time to load than the tokens to compute between it and the last
        one in the host."""
        tier = self._tiers[int(last.below.sources[0])]
        is_worth = self._rates.is_worth_loading(
            (last.at - last.in_host) * self._layout.unit_tokens,
            self._layout.num_states,
            self._num_ahead(tier),
            tier.estimator,
            self._clock(),
        )
        if not is_worth:
            self._reasons.record(last.below.keys, MissReason.FASTER_TO_COMPUTE)
        return is_worth

    def _num_ahead(self, tier: TierState) -> int:
        """Returns how many blocks the tier is to read before others."""
        return tier.num_reading + self._promoter.num_queued(tier)

    def _num_states(self, promotion: Promotion | None, tier: TierState) -> int:
        """Returns how many states of the tier the request wants."""
        if promotion is None or not self._layout.num_states:
            return 0
        groups, wanted = self._layout.groups, promotion.wanted
        return sum(
            groups[key_group_idx(key)].state
            for key, source in zip(wanted.keys, wanted.sources.tolist(), strict=True)
            if source == tier.index
        )

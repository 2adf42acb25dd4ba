"""Device blocks of state groups in the model engine, handed out as vLLM does with ``mamba_cache_mode="align"``."""

from __future__ import annotations

from collections.abc import Sequence

from kvoffload.abc import BoundaryState, KVGroup
from tests.sim.content import NULL_BLOCK, EngineRequest, Table


class StateBlocks:
    """Says how block tables of state groups grow, where chunks of prompts end, and which states a step completes.

    The running state is updated in place, in the block at the position of the latest token. A step that goes on from a
    boundary, or past one, writes to another block; positions between are null. So the block at the end of a step that
    ends on a boundary keeps its state until it is freed. ``num_scratch`` blocks follow the running state, as for
    speculative tokens: the next state is written to the first of them, or they move behind it. A table therefore is not
    append-only: in a copy that is only appended to, a scratch block that has moved stands at two places.

    Chunks end at multiples of ``align`` if ``max_chunk`` tokens suffice for that, and one ends at the last boundary of
    the prompt; with ``drops_last`` at the one before it, as vLLM does with EAGLE and MTP.
    """

    def __init__(
        self, groups: Sequence[KVGroup], align: int, max_chunk: int, num_scratch: int, drops_last: bool = False
    ) -> None:
        self._sizes = {g: group.device_block_size for g, group in enumerate(groups) if group.state}
        self._align = align
        self._max_chunk = max_chunk
        self._num_scratch = num_scratch
        self._drops_last = drops_last
        self._offers: dict[str, list[BoundaryState]] = {}
        """Per request, the states that the next step offers."""

    def chunk(self, request: EngineRequest, num_tokens: int) -> int:
        """Returns how many of the next ``num_tokens`` tokens the request may compute in a step. 0: not now."""
        start, align = request.num_computed_tokens, self._align
        end, prefill_end = start + num_tokens, max(request.num_prompt_tokens, request.num_tokens - 1)
        if not self._sizes or start >= prefill_end:
            return num_tokens
        if end < prefill_end:
            aligned = end // align * align
            if aligned > start or align <= self._max_chunk:
                end = aligned
        # A state that is not at a boundary yet, the last boundary of the prompt, and where other requests branch off.
        next_boundary = (start // align + 1) * align if start % align else 0
        last = request.num_tokens - (align if self._drops_last else 1)
        stops = (next_boundary, last // align * align, request.states.junction)
        return max(min((stop for stop in stops if start < stop < end), default=end) - start, 0)

    def num_lacking(self, g: int, table: Table, has_scratch: bool, end: int) -> int:
        """Returns how many blocks must be added to the table of state group ``g`` for ``end`` tokens."""
        running = -(-end // self._sizes[g])
        length, moving = len(table), self._moving(table, has_scratch, running)
        if not end or running + self._num_scratch <= length:
            return 0
        return running + self._num_scratch - max(length, running - 1) - len(moving)

    def extend(self, g: int, table: Table, has_scratch: bool, end: int, new: Sequence[int]) -> list[int]:
        """Adds the blocks ``new`` to the table for ``end`` tokens, and returns what was appended to it."""
        running, length = -(-end // self._sizes[g]), len(table)
        if not new:
            return []
        table += [NULL_BLOCK] * (running - 1 - length)
        for i in self._moving(table[:length], has_scratch, running):
            table.append(table[i])
            table[i] = NULL_BLOCK
        table += new
        return table[length:]

    def _moving(self, table: Table, has_scratch: bool, running: int) -> range:
        """The places of scratch blocks before the running state."""
        first = len(table) - self._num_scratch if has_scratch else len(table)
        return range(first, max(first, min(len(table), running - 1)))

    def complete(self, request: EngineRequest, end: int) -> None:
        """Notes that a step which ends at ``end`` is scheduled. Offers the states whose tokens are all known: the step
        that samples the last of them may not be reported yet."""
        if not self._sizes:
            return
        request.states.ends.add(end)
        request.states.unoffered.append(end)
        known = [end for end in request.states.unoffered if end <= request.num_tokens]
        request.states.unoffered = [end for end in request.states.unoffered if end > request.num_tokens]
        for end in known:
            self.offer(request, end)

    def offer(self, request: EngineRequest, end: int) -> None:
        """Offers the states after ``end`` tokens that stand at a boundary of their group."""
        for g, size in self._sizes.items():
            if end % size == 0 and request.blocks[g][end // size - 1] != NULL_BLOCK:
                state = BoundaryState(g, request.blocks[g][end // size - 1], end)
                self._offers.setdefault(request.request_id, []).append(state)

    def withdraw(self, request: EngineRequest) -> None:
        """Offers none of the request's states: its blocks are being freed."""
        self._offers.pop(request.request_id, None)

    def take_offers(self) -> dict[str, list[BoundaryState]]:
        offers, self._offers = self._offers, {}
        return offers

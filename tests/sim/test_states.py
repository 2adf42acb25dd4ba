"""Block tables of state groups in the model engine: where the running state is, and which blocks move."""

from __future__ import annotations

import pytest

from kvoffload.abc import BoundaryState, KVGroup
from tests.sim.content import EngineRequest, RequestStates
from tests.sim.states import StateBlocks

GROUPS = (KVGroup(4), KVGroup(4, state=True))


def grown(num_scratch: int, *ends: int) -> tuple[list[int], list[int]]:
    """The table of a request whose steps end at ``ends``, and a copy to which everything reported is appended."""
    states = StateBlocks(GROUPS, 4, 64, num_scratch)
    table: list[int] = []
    appended: list[int] = []
    for i, end in enumerate(ends):
        new = [10 * (i + 1) + k for k in range(states.num_lacking(1, table, i > 0, end))]
        appended += states.extend(1, table, i > 0, end, new)
    return table, appended


@pytest.mark.parametrize(
    ("num_scratch", "ends", "table"),
    [
        (0, (3,), [10]),
        (0, (3, 4), [10]),
        (0, (3, 4, 5), [10, 30]),
        (0, (12,), [0, 0, 10]),
        (0, (4, 13), [10, 0, 0, 20]),
        (2, (4,), [10, 11, 12]),
        (2, (12,), [0, 0, 10, 11, 12]),
    ],
)
def test_the_running_state_is_in_the_block_of_the_latest_token(
    num_scratch: int, ends: tuple[int, ...], table: list[int]
) -> None:
    assert grown(num_scratch, *ends) == (table, table)


def test_the_next_state_is_written_to_the_first_scratch_block() -> None:
    assert grown(2, 4, 5) == ([10, 11, 12, 20], [10, 11, 12, 20])


def test_scratch_blocks_before_the_running_state_move_behind_it() -> None:
    assert grown(2, 4, 16) == ([10, 0, 0, 11, 12, 20], [10, 11, 12, 11, 12, 20])


def chunk(
    num_prompt: int, computed: int, budget: int, junction: int = 0, max_chunk: int = 64, drops_last: bool = False
) -> int:
    request = EngineRequest(
        "r", list(range(num_prompt)), 1, 4, 0, num_computed_tokens=computed, states=RequestStates(junction=junction)
    )
    return StateBlocks(GROUPS, 4, max_chunk, 0, drops_last).chunk(request, budget)


def test_chunks_end_on_boundaries() -> None:
    assert chunk(30, 0, 11) == 8
    assert chunk(30, 0, 3) == 0, "a later step reaches a boundary"
    assert chunk(30, 0, 3, max_chunk=3) == 3, "no step reaches it at once"
    assert chunk(30, 3, 9, max_chunk=3) == 1, "a chunk that begins inside a block ends with it"
    assert chunk(30, 0, 30) == 28, "at the last boundary of the prompt"
    assert chunk(30, 28, 2) == 2, "the last chunk ends with the prompt"
    assert chunk(28, 0, 28) == 24, "one token at least is computed behind a hit"
    assert chunk(30, 0, 30, junction=12) == 12
    assert chunk(30, 12, 18, junction=12) == 16
    assert chunk(30, 0, 30, drops_last=True) == 24
    assert chunk(28, 0, 28, drops_last=True) == 24
    assert chunk(30, 24, 6, drops_last=True) == 6


def test_a_state_is_offered_once_when_its_tokens_are_known() -> None:
    states = StateBlocks(GROUPS, 4, 64, 0)
    request = EngineRequest("r", list(range(7)), 9, 4, 0, blocks=[[1, 2], [0, 3]])
    states.complete(request, 7)
    states.complete(request, 8)
    assert states.take_offers() == {}, "the eighth token is not reported yet"
    request.append([5])
    states.complete(request, 9)
    assert states.take_offers() == {"r": [BoundaryState(1, 3, 8)]}
    assert states.take_offers() == {}
    states.offer(request, 8)
    states.withdraw(request)
    assert states.take_offers() == {}, "its blocks are freed"

"""Which blocks of a chain are written next, and which are of no use, from masks alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from random import Random

import numpy as np
import pytest

from kvoffload.abc import KVGroup, OffloadKey
from kvoffload.tiering.plan import Bools, ChainLayout, WritePlan, plan_writes, unreachable

FULL = KVGroup(16)
WINDOW = KVGroup(16, sliding_window=33)
"""A request that resumes at the end of a block needs the last two."""
CHUNKED = KVGroup(32, attention_chunk=64)


def names(group: int, n: int) -> list[OffloadKey]:
    return [f"{'abcdefgh'[group]}{i}".encode() for i in range(n)]


def mask(text: str) -> Bools:
    """'x': present, '.': absent."""
    return np.array([char == "x" for char in text])


def plan(groups: list[KVGroup], in_tier: list[str], available: list[str], *, is_last: bool = True) -> WritePlan:
    """A plan for whole chains. Masks begin with each group's first block."""
    layout = ChainLayout(groups)
    by_group = [names(g, len(text)) for g, text in enumerate(in_tier)]
    held = {key for keys, text in zip(by_group, in_tier, strict=True) for key in compress(keys, mask(text))}
    in_host = {key for keys, text in zip(by_group, available, strict=True) for key in compress(keys, mask(text))}

    def look(keys: Sequence[OffloadKey]) -> tuple[Bools, Bools]:
        mine = np.array([key in held for key in keys], np.bool_)
        return mine, mine | np.array([key in in_host for key in keys], np.bool_)

    return plan_writes(layout, by_group, 0, layout.num_units(by_group), is_last, look)


def test_nothing_is_written_behind_a_hole() -> None:
    assert plan([FULL], ["....."], ["xx.xx"]) == WritePlan([b"a0", b"a1"], 2, (b"a2",))


def test_a_window_that_is_incomplete_at_the_end_of_the_chain_is_a_hole() -> None:
    made = plan([FULL, WINDOW], ["....", "...."], ["xxxx", "xx.."])
    assert made == WritePlan([b"a0", b"b0", b"a1", b"b1"], 2, (b"b2",))
    more_to_come = plan([FULL, WINDOW], ["....", "...."], ["xxxx", "xx.."], is_last=False)
    assert not more_to_come.holes


def lost(groups: list[KVGroup], held: list[str], written: list[bytes]) -> list[bytes]:
    layout = ChainLayout(groups)
    by_group = [names(g, len(text)) for g, text in enumerate(held)]
    useless = unreachable(layout, by_group, [mask(text) for text in held], layout.num_units(by_group), written)
    return [keys[i] for keys, mask in zip(by_group, useless, strict=True) for i in np.flatnonzero(mask).tolist()]


def test_blocks_behind_a_hole_are_unreachable() -> None:
    assert lost([FULL], ["xx.xx"], []) == [b"a2", b"a3", b"a4"]
    assert lost([FULL], ["xxxx"], [b"a0"]) == []


def test_blocks_of_others_behind_the_last_usable_position_stay() -> None:
    held = ["xxxx", "xx.."]
    assert lost([FULL, WINDOW], held, []) == []
    assert lost([FULL, WINDOW], held, [b"a1", b"a3"]) == [b"a3"]


def needed_blocks(group: KVGroup, end: int) -> range:
    return range(group.skipped_tokens(end) // group.block_tokens, end // group.block_tokens)


@pytest.mark.parametrize("seed", range(200))
def test_a_plan_leads_to_positions_at_which_requests_can_resume(seed: int) -> None:
    """Compares with a search that looks at every position and every block."""
    rng = Random(seed)
    groups = [FULL, *rng.sample([WINDOW, CHUNKED, KVGroup(16, lookahead=1)], rng.randint(0, 2))]
    layout = ChainLayout(groups)
    units = rng.randint(1, 6)
    sizes = [units * n for n in layout.blocks_per_unit]
    in_tier = ["".join(rng.choice("xxx.") for _ in range(n)) for n in sizes]
    available = ["".join(rng.choice("xxxx.") for _ in range(n)) for n in sizes]
    present = [mask(a) | mask(b) for a, b in zip(in_tier, available, strict=True)]
    usable = [
        end
        for end in range(layout.unit_tokens, (units + 1) * layout.unit_tokens, layout.unit_tokens)
        if all(present[g][i] for g, group in enumerate(groups) for i in needed_blocks(group, end))
    ]
    expected = {
        names(g, n)[i]
        for g, (group, n) in enumerate(zip(groups, sizes, strict=True))
        for end in usable
        for i in needed_blocks(group, end)
        if in_tier[g][i] == "."
    }
    made = plan(groups, in_tier, available)
    if all(set(text) == {"x"} for text in in_tier):
        assert made == WritePlan([], units)
        return
    assert set(made.keys) == expected
    assert len(made.keys) == len(expected)
    assert made.done == (usable[-1] // layout.unit_tokens if usable else 0)
    assert (not made.holes) == (made.done == units)

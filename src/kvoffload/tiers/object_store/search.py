"""Search: which values of chains a bucket has, found with few requests."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from kvoffload.tiers.object_store.bucket import Answer, Found
from kvoffload.tiers.object_store.contents import Places, contents, mark
from kvoffload.tiers.remote.client import Outcome

MAX_ROUNDS = 8
WIDTHS = (1, 1, 4, 16, 64)
"""How many of the first names of a gap are asked for in each round; in later ones MAX_WIDTH."""
MAX_WIDTH = 256
_GROUP_DIGITS = 8
"""The last digits of a block's name are its KV cache group."""


def group_of(name: str) -> int:
    """Returns the KV cache group of the block with this name, or -1 if that is not the name of a block."""
    try:
        return int(name[-_GROUP_DIGITS:], 16)
    except ValueError:
        return -1


class ObjectSearch:
    """Finds the existing values of ``names`` in rounds of requests for objects.

    ``names`` are the names of chains, head first. Servers store a chain of one of the ``groups`` in objects of up to
    ``step`` values, named by the first. So the first round asks for every ``step``-th name, and for known objects.
    Later rounds ask for names behind the values found, because a chain that was stored bit by bit has smaller objects;
    not for names behind a gap, which lookups cannot use. Names of other groups are all asked for.

    Every answer OK rests on a note that was read in this search.
    """

    def __init__(self, names: Sequence[str], step: int, places: Places, groups: Collection[int]) -> None:
        self._names = names
        self._marks = [mark(name) for name in names]
        self._step = step
        self._places = places
        self._answers: list[Outcome | None] = [None] * len(names)
        self._asked: dict[str, bool] = {}
        """Requested objects, and whether there was an answer."""
        self._has_failed = False
        self._round = 0
        self._chains: dict[int, list[int]] = {}
        """The indices of the names of each of ``groups``. Other names are chains of their own."""
        for i, name in enumerate(names):
            group = group_of(name)
            self._chains.setdefault(group if group in groups else -1 - i, []).append(i)

    def next_round(self) -> list[str]:
        """Returns the objects to ask for now; none at the end of the search."""
        if self._round == MAX_ROUNDS:
            return []
        width = WIDTHS[self._round] if self._round < len(WIDTHS) else MAX_WIDTH
        self._round += 1
        wanted: dict[str, None] = {}
        for chain in self._chains.values():
            for gap in self._gaps(chain, wanted):
                if self._names[gap[0]] not in self._asked:
                    near = range(min(width, len(gap)))
                    wanted.update((self._names[gap[i]], None) for i in [*near, *range(0, len(gap), self._step)])
        return [name for name in wanted if name not in self._asked]

    def _gaps(self, chain: Sequence[int], wanted: dict[str, None]) -> Iterator[list[int]]:
        """Yields the runs of the chain's values without a known place. Adds the objects of the other values to
        ``wanted``."""
        gap: list[int] = []
        for i in chain:
            place = None if self._answers[i] is not None else self._places.find(self._marks[i])
            if place is not None:
                wanted[place.name] = None
            if self._answers[i] is None and place is None:
                gap.append(i)
            elif gap:
                yield gap
                gap = []
        if gap:
            yield gap

    def take(self, answers: Mapping[str, Answer]) -> None:
        """Takes in the answers of a round."""
        found: set[bytes] = set()
        for name, answer in answers.items():
            self._asked[name] = answer is not Outcome.FAILED
            self._has_failed |= answer is Outcome.FAILED
            if isinstance(answer, Found):
                marks = contents(name, answer)
                self._places.note(name, marks, answer.size)
                found.update(each for each in marks if not self._places.is_hidden(each, name))
            elif answer is Outcome.MISSING:
                self._places.gone(name)
        for i, value in enumerate(self._marks):
            if self._answers[i] is None and value in found:
                self._answers[i] = Outcome.OK

    def stop(self) -> None:
        """Ends the search early."""
        self._has_failed = True

    def outcomes(self) -> list[Outcome]:
        """Returns OK, MISSING or FAILED per name: FAILED for unrequested names after a failed request or an early
        end."""
        unknown = Outcome.FAILED if self._has_failed else Outcome.MISSING
        return [
            answer or (Outcome.MISSING if self._asked.get(name) else unknown)
            for answer, name in zip(self._answers, self._names, strict=True)
        ]

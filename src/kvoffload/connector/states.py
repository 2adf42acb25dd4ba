"""Which states are kept in host memory: those at which requests are likely to continue."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from kvoffload.abc import OffloadKey
from kvoffload.connector.layout import Block, KeyLayout
from kvoffload.connector.request import RequestState


class StatePlace(Enum):
    """Why a state of a request is kept. Each place holds the latest one; a state that holds none is superseded."""

    JUNCTION = auto()
    """Other requests have the same text up to there, and none of them left a state behind it."""
    PROMPT = auto()
    """The end of the prompt: the same prompt may come again."""
    TURN = auto()
    """The end of the output: the conversation may continue."""


@dataclass(slots=True, eq=False)
class _Kept:
    """The states of one request."""

    prompt_end: int
    """The last boundary below the end of the prompt at which the same prompt can continue, within what is stored."""
    prompt_start: int
    """States of the prompt from here on are kept until the next one comes."""
    junction: int = 0
    resumed: int = 0
    """Where the request has continued, at a state that was loaded or that the device had; 0 if it began anew."""
    at: dict[StatePlace, int] = field(default_factory=dict)
    turn_before: int = 0
    """Where that of TURN was before."""
    own: dict[int, list[OffloadKey]] = field(default_factory=dict)
    """By position, the states that the request has stored itself and that no other request has used yet."""

    def places(self, end: int) -> list[StatePlace]:
        """Returns the places that a state at ``end`` takes."""
        found = [StatePlace.JUNCTION] if end <= self.junction < self.prompt_end else []
        if end >= self.prompt_start:
            found.append(StatePlace.TURN if end > self.prompt_end else StatePlace.PROMPT)
        return found

    def take(self, end: int) -> None:
        """Takes note that the state at ``end`` is in the host."""
        places, turn = self.places(end), self.at.get(StatePlace.TURN, 0)
        if StatePlace.TURN in places and end != turn:
            self.turn_before = turn
        self.at.update(dict.fromkeys(places, end))

    def needed(self, named: int) -> set[int]:
        """Returns where states are kept, if all blocks of the request's first ``named`` tokens have a name. A request
        cannot continue behind these, so until there are more of them the state before the last is kept as well."""
        needed = set(self.at.values())
        return needed | {self.turn_before} if self.at.get(StatePlace.TURN, 0) > named else needed


class StateKeeper:
    """Decides which of the states that an engine offers are stored, and which of them are dropped later.

    A state takes as much memory as hundreds of tokens of KV, and engines offer one at each boundary at which a step
    ends. Kept are, of each request, the last state of its prompt, the latest one of its output, and the latest one up
    to its *junction*, where its text leaves what is stored of other requests. Superseded states that the request has
    stored itself are dropped, unless another request has continued from them.
    """

    def __init__(self, layout: KeyLayout) -> None:
        self._layout = layout
        self._lookahead = max(group.lookahead for group in layout.groups)
        self._requests: dict[str, _Kept] = {}
        self._owners: dict[OffloadKey, tuple[str, int]] = {}
        """Request and position of each state in ``_Kept.own``, by its key in the first state group."""

    def begin(self, state: RequestState, end: int, junction: int) -> None:
        """Takes note of a request that continues at ``end``. Stored KV of other requests reaches to ``junction``."""
        kept = self._kept(state)
        kept.junction = max(kept.junction, junction)
        if end % self._layout.align == 0:
            kept.resumed = end
        if end:
            self._use(state, end)

    def clear(self) -> None:
        """Forgets everything: after a reset, no state is where it was."""
        self._requests.clear()
        self._owners.clear()

    def choose(self, state: RequestState, ends: Iterable[int]) -> list[int]:
        """Returns at which of ``ends``, where the engine offers states of a request, they are to be stored."""
        kept, ends = self._kept(state), sorted(ends)
        last = {place: end for end in ends for place in kept.places(end)}
        return [end for end in ends if end in last.values()]

    def stored(self, state: RequestState, blocks: Iterable[Block], new: Collection[OffloadKey]) -> list[OffloadKey]:
        """Takes note that a request's states ``blocks`` are in the host, of which ``new`` were not there before.
        Returns the states that are superseded now, which are to be dropped."""
        kept, dropped = self._kept(state), list[OffloadKey]()
        by_end: dict[int, list[OffloadKey]] = {}
        for block in sorted(blocks):
            by_end.setdefault((block.ordinal + 1) * self._layout.block_tokens[block.group], []).append(block.key)
        for end, keys in sorted(by_end.items()):
            kept.take(end)
            self._use(state, end)
            if end in kept.own and kept.own[end] != keys:
                # The engine has taken tokens back and given others.
                dropped += self._disown(kept, end)
            if all(key in new for key in keys):
                kept.own[end] = keys
                self._owners[keys[0]] = state.context.req_id, end
        needed = kept.needed(state.request.num_tokens - self._lookahead)
        superseded = [end for end in kept.own if end not in needed]
        return dropped + [key for end in superseded for key in self._disown(kept, end)]

    def end(self, req_id: str) -> set[int]:
        """Forgets a request that has ended. Returns where its states are kept, and where it has continued from one."""
        if (kept := self._requests.pop(req_id, None)) is None:
            return set()
        for end in list(kept.own):
            self._disown(kept, end)
        return {kept.resumed, *kept.at.values()} - {0}

    def _use(self, state: RequestState, end: int) -> None:
        """Takes note that a request needs the state at ``end``: if another has stored it, that one does not drop it."""
        g = self._layout.states[0]
        keys, ordinal = state.blocks.keys[g], self._layout.last_within(g, end)
        if 0 <= ordinal < len(keys) and keys[ordinal] in self._owners:
            owner, position = self._owners[keys[ordinal]]
            if owner != state.context.req_id:
                self._disown(self._requests[owner], position)

    def _disown(self, kept: _Kept, end: int) -> list[OffloadKey]:
        keys = kept.own.pop(end)
        self._owners.pop(keys[0], None)
        return keys

    def _kept(self, state: RequestState) -> _Kept:
        if (kept := self._requests.get(state.context.req_id)) is None:
            # The next token is computed, and blocks with a lookahead have no name before the tokens behind are known.
            last = state.request.num_tokens - max(1, self._lookahead)
            stored, align = state.blocks.max_stored_tokens, self._layout.align
            end = min(last, stored) // align * align
            # An engine may offer none at the very end, as with draft models, and none near an end that a limit sets.
            start = end - align if last <= stored else 0
            kept = self._requests[state.context.req_id] = _Kept(end, start)
        return kept

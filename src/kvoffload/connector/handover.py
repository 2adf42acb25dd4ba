"""Hand-overs: one server computes a prompt and names the blocks that it has stored; another waits for these."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from kvoffload.abc import Keys, OffloadKey
from kvoffload.abc.tier import MAX_PLACE_CHARS
from kvoffload.connector.layout import KeyLayout

MAX_PLACES = 32
MAX_HANDED_TOKENS = 1 << 32
NAME_CHARS = 32
SERVER_CHARS = 16
MAX_SERVERS = 1024
"""Servers of which is remembered that what they hand over does not come. The one that was noted first is forgotten."""
MISSES_IN_A_ROW = 3
"""After so many hand-overs of one server that were not found complete, its requests wait less, until one is."""
IMPATIENT_SHARE = 0.1
"""How much less,"""
PATIENT_AGAIN = 8
"""except one of so many: if blocks come again, but not as soon, it finds them."""


@dataclass(frozen=True, slots=True)
class Handover:
    """The blocks of the first ``tokens`` tokens of a prompt, which another server has stored, or is storing.

    ``name`` depends on tokens, weights, layout, tenant and adapter: servers that compute the same name have the same
    blocks. ``places`` says by tier where they are looked for, see ``Tier.hand_over``. ``server`` names one run of the
    server that hands them over.
    """

    tokens: int
    name: str
    places: Mapping[str, str]
    server: str

    def to_options(self) -> dict[str, Any]:
        """Returns the options of a request to the server that goes on."""
        return {"handover": {**asdict(self), "places": dict(self.places)}}

    def keys(self, layout: KeyLayout, keys: Sequence[Keys]) -> dict[OffloadKey, None] | None:
        """Returns those of a request's ``keys``, by group, that it is about: what a request needs to continue behind
        its tokens, in order. None if the request has other tokens, or this server gives blocks other names."""
        if self.name != name_of(layout, keys, self.tokens):
            return None
        return dict.fromkeys(layout.needed_keys(keys, self.tokens))


def is_handover(value: object) -> bool:
    """Returns whether ``value``, which may be anything, describes a hand-over."""
    if not isinstance(value, Mapping) or value.keys() != Handover.__dataclass_fields__.keys():
        return False
    tokens, places = value["tokens"], value["places"]
    if type(tokens) is not int or not isinstance(places, Mapping):
        return False
    texts = [(value["name"], NAME_CHARS), (value["server"], SERVER_CHARS)]
    return (
        0 < tokens <= MAX_HANDED_TOKENS
        and all(type(text) is str and len(text) == length for text, length in texts)
        and len(places) <= MAX_PLACES
        and all(type(text) is str and len(text) <= MAX_PLACE_CHARS for item in places.items() for text in item)
    )


def name_of(layout: KeyLayout, keys: Sequence[Keys], tokens: int) -> str | None:
    """Returns a name for the blocks of the first ``tokens`` tokens of a chain; None if ``keys``, by group, do not have
    them all. Keys name the whole prefix, so the last one of each group names them all."""
    if tokens % layout.align:
        return None
    last = [layout.last_within(g, tokens) for g in range(len(keys))]
    if any(not 0 <= i < len(of_group) for i, of_group in zip(last, keys, strict=True)):
        return None
    digest = xxhash.xxh3_128()
    for i, of_group in zip(last, keys, strict=True):
        digest.update(len(of_group[i]).to_bytes(4, "little") + of_group[i])
    return digest.hexdigest()


class Patience:
    """How long requests wait for what a server hands over to them: less if several have waited for that server in vain,
    so that one with another store, or one that has died, costs little, and no other server's requests anything."""

    def __init__(self) -> None:
        self._num_misses: OrderedDict[str, int] = OrderedDict()
        """By server, the one that was noted first, first."""

    def wait_s(self, server: str, deadline_s: float) -> float:
        is_asked_again = self._num_misses.get(server, 0) % PATIENT_AGAIN == 0
        return deadline_s if is_asked_again or not self.is_lost(server) else deadline_s * IMPATIENT_SHARE

    def is_lost(self, server: str) -> bool:
        return self._num_misses.get(server, 0) >= MISSES_IN_A_ROW

    def ended(self, server: str, is_complete: bool) -> None:
        """Notes whether a request has found all that ``server`` has handed over to it."""
        num_misses = self._num_misses.pop(server, 0)
        if not is_complete:
            self._num_misses[server] = num_misses + 1
        if len(self._num_misses) > MAX_SERVERS:
            self._num_misses.popitem(last=False)

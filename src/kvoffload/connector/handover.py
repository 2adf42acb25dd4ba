"""Hand-overs: one server computes a prompt and names the blocks that it has stored; another waits for these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from kvoffload.abc import OffloadKey
from kvoffload.abc.tier import MAX_PLACE_CHARS
from kvoffload.connector.layout import Layout

MAX_PLACES = 32
MAX_HANDED_TOKENS = 1 << 32
NAME_CHARS = 32
MISSES_IN_A_ROW = 3
"""After so many hand-overs that were not found complete, requests wait less, until one is."""
IMPATIENT_SHARE = 0.1
"""How much less,"""
PATIENT_AGAIN = 8
"""except one of so many: if blocks come again, but not as soon, it finds them."""


@dataclass(frozen=True, slots=True)
class Handover:
    """The blocks of the first ``tokens`` tokens of a prompt, which another server has stored, or is storing.

    ``name`` depends on tokens, weights, layout, tenant and adapter: servers that compute the same name have the same
    blocks. ``places`` says by tier where they are looked for, see ``Tier.hand_over``.
    """

    tokens: int
    name: str
    places: Mapping[str, str]

    def to_options(self) -> dict[str, Any]:
        """Returns the options of a request to the server that goes on."""
        return {"handover": {"tokens": self.tokens, "name": self.name, "places": dict(self.places)}}

    @classmethod
    def from_option(cls, value: Mapping[str, Any]) -> Handover:
        """Reads what ``is_handover`` accepts."""
        return cls(value["tokens"], value["name"], value["places"])

    def keys(self, layout: Layout, keys: Sequence[Sequence[OffloadKey]]) -> frozenset[OffloadKey] | None:
        """Returns those of a request's ``keys``, by group, that it is about: of states the one at its end. None if the
        request has other tokens, or this server gives blocks other names."""
        if self.name != name_of(layout, keys, self.tokens):
            return None
        found: set[OffloadKey] = set()
        for g, of_group in enumerate(keys):
            end = layout.last_within(g, self.tokens) + 1
            found.update(of_group[end - 1 : end] if g in layout.states else of_group[:end])
        return frozenset(found)


def is_handover(value: object) -> bool:
    """Returns whether ``value``, which may be anything, describes a hand-over."""
    if not isinstance(value, Mapping) or value.keys() != {"tokens", "name", "places"}:
        return False
    tokens, name, places = value["tokens"], value["name"], value["places"]
    return (
        type(tokens) is int
        and 0 < tokens <= MAX_HANDED_TOKENS
        and type(name) is str
        and len(name) == NAME_CHARS
        and isinstance(places, Mapping)
        and len(places) <= MAX_PLACES
        and all(type(text) is str and len(text) <= MAX_PLACE_CHARS for item in places.items() for text in item)
    )


def name_of(layout: Layout, keys: Sequence[Sequence[OffloadKey]], tokens: int) -> str | None:
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
    """How long requests wait for what is handed over to them: less if several have waited in vain, so that servers with
    different stores, or a server that has died, cost little."""

    def __init__(self) -> None:
        self._num_misses = 0

    def wait_s(self, deadline_s: float) -> float:
        is_patient = self._num_misses < MISSES_IN_A_ROW or self._num_misses % PATIENT_AGAIN == 0
        return deadline_s if is_patient else deadline_s * IMPATIENT_SHARE

    @property
    def is_lost(self) -> bool:
        return self._num_misses >= MISSES_IN_A_ROW

    def ended(self, is_complete: bool) -> None:
        """Notes whether a request has found all that was handed over to it."""
        self._num_misses = 0 if is_complete else self._num_misses + 1

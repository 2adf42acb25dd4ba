"""What is known about a store's blocks is trusted for a while, and bounded."""

from __future__ import annotations

import pytest

from kvoffload.abc.tier import HIT, MISS, RETRY
from kvoffload.tiers.remote import known
from kvoffload.tiers.remote.known import PresenceCache


def test_the_oldest_knowledge_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "MAX_KNOWN", 3)
    cache = PresenceCache()
    cache.note_present([b"a", b"b", b"c"], 0.0)
    cache.note_present([b"a"], 1.0)
    cache.note_missing([b"d"], 1.0)
    assert cache.states([b"a", b"b", b"c", b"d"], 1.0).tolist() == [HIT, RETRY, HIT, MISS]


def test_what_is_missing_is_forgotten_if_it_is_old_enough() -> None:
    """Neither what is there nor what is missing until the end of its transfer."""
    cache = PresenceCache()
    cache.note_missing([b"old"], 0.0)
    cache.note_missing([b"new"], 0.2)
    cache.note_missing([b"moving"], 0.0, float("inf"))
    cache.note_present([b"there"], 0.0)
    keys = [b"there", b"old", b"new", b"moving", b"unknown"]
    assert cache.forget_missing(keys, -0.1) == []
    assert cache.forget_missing(keys, 0.1) == [b"old"]
    assert cache.states(keys, 0.3).tolist() == [HIT, RETRY, MISS, MISS, RETRY]
    assert cache.forget_missing(keys, 0.1) == [], "it is not known any more"
    assert cache.forget_missing(keys, 0.2) == [b"new"]

"""Every two features together: the rows of the covering array keep all laws, and planted bugs of pairs are caught."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvoffload.abc import TierResult
from kvoffload.connector import request
from kvoffload.connector.adapters import variant
from tests.scale import scaled
from tests.sim.pairs import (
    FEATURES,
    REFUSED,
    SHARED,
    PairServer,
    beside_the_default,
    conflicts_in_words,
    covering_array,
    pairs_of,
    run_row,
)
from tests.sim.planted import wrap

ROWS = covering_array()
DEFAULTS = beside_the_default(0) + beside_the_default(1)
SUPPORT = Path(__file__).parents[2] / "docs" / "support.md"


def test_every_two_values_are_in_a_row() -> None:
    values = [(name, value) for name, of_feature in FEATURES.items() for value in of_feature]
    pairs = {frozenset(pair) for pair in itertools.combinations(values, 2) if pair[0][0] != pair[1][0]}
    assert set().union(*map(pairs_of, ROWS)) == pairs - REFUSED


def test_rows() -> None:
    seen: Counter[str] = Counter()
    for seed, row in itertools.product(range(scaled(1)), ROWS + DEFAULTS):
        seen += run_row(row, seed)
    never = [what for what in HAPPENS if not seen[what]]
    assert not never, f"never happened, so was not tested: {never}"


HAPPENS = (
    *(f"blocks handed over by a {medium}" for medium in SHARED),
    "blocks never stored",
    "blocks retained on disk",
    "events",
    "load_failures",
    "loaded blocks",
    "retained requests",
    "store_failures",
    "stored blocks",
    "weight_changes",
)


Bug = Callable[[PairServer], None]


def adapters_share_keys(server: PairServer) -> None:
    request.variant = lambda digests: b"a" * 8  # type: ignore[attr-defined]


def retains_twice_as_much(server: PairServer) -> None:
    def retain_more(retain: Callable[[Any], Any], state: Any) -> Any:
        answer, tokens = retain(state)
        return answer, 2 * tokens

    wrap(server.engine.scheduler.stores, "retain", retain_more)


def the_last_tenant_takes_a_device_block(server: PairServer) -> None:
    if (leaving := server.engine.scheduler.stores.leaving) is not None:
        wrap(leaving.device, "_is_named", lambda is_named, first, held, left: first[0] == held[0])


def events_leave_out_what_is_removed(server: PairServer) -> None:
    wrap(server.engine.scheduler, "take_events", lambda take: [event for event in take() if not event.removed])


def loads_are_not_billed(server: PairServer) -> None:
    observer = server.engine.scheduler.observer
    wrap(observer, "copied", lambda copied, jobs: copied([job for job in jobs if job.is_store]))


def a_folder_loses_what_it_has_written(server: PairServer) -> None:
    tier = server.tier
    assert tier is not None

    def lose(poll: Callable[[], list[TierResult]]) -> list[TierResult]:
        results = poll()
        tier.delete([result.key for result in results if result.ok and not result.is_read][-1:])
        return results

    wrap(tier, "poll", lose)


BUGS: dict[Bug, tuple[dict[str, str], str]] = {
    adapters_share_keys: ({"adapters": "two"}, ""),
    retains_twice_as_much: ({"retention": "on", "tenants": "shares"}, ""),
    the_last_tenant_takes_a_device_block: ({"tenants": "shares", "tier": "none"}, ""),
    events_leave_out_what_is_removed: ({"events": "on"}, ""),
    loads_are_not_billed: ({"tenants": "shares", "tier": "memory"}, ""),
    a_folder_loses_what_it_has_written: ({"hand-over": "on", "tier": "folder"}, "handed over some are not in the tier"),
}
"""The features that show each bug, and words of the law that finds it."""


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_planted_bug_of_two_features_is_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "variant", variant)
    together, words = BUGS[bug]
    rows = [row for row in DEFAULTS + ROWS if row.items() >= together.items()][:3]
    for seed, row in itertools.product(range(40), rows):
        try:
            run_row(row, seed, bug)
        except AssertionError as error:
            if words in str(error):
                print(f"{bug.__name__}: {error}")
                return
    pytest.fail(f"{bug.__name__} went unnoticed")


def test_docs_say_what_excludes_what() -> None:
    assert conflicts_in_words() in SUPPORT.read_text()


def test_one_seed_replays_a_row() -> None:
    assert run_row(ROWS[0], 3) == run_row(ROWS[0], 3)

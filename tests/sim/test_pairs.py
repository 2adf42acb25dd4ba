"""Every two features together: the rows of the covering array keep all laws, and planted bugs of pairs are caught."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffload.connector import request
from kvoffload.connector.adapters import variant
from tests.scale import scaled
from tests.sim.pairs import (
    FEATURES,
    REFUSED,
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


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


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
    "blocks never stored",
    "blocks retained on disk",
    "blocks that were handed over",
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


@pytest.mark.parametrize(
    ("bug", "together"),
    [
        (adapters_share_keys, {"adapters": "two"}),
        (retains_twice_as_much, {"retention": "on", "tenants": "shares"}),
        (the_last_tenant_takes_a_device_block, {"tenants": "shares", "tier": "none"}),
        (events_leave_out_what_is_removed, {"events": "on"}),
        (loads_are_not_billed, {"tenants": "shares", "tier": "memory"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_planted_bug_of_two_features_is_caught(
    bug: Bug, together: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "variant", variant)
    rows = [row for row in DEFAULTS + ROWS if row.items() >= together.items()][:3]
    for seed, row in itertools.product(range(40), rows):
        try:
            run_row(row, seed, bug)
        except AssertionError as error:
            print(f"{bug.__name__}: {error}")
            return
    pytest.fail(f"{bug.__name__} went unnoticed")


def test_docs_say_what_excludes_what() -> None:
    assert conflicts_in_words() in SUPPORT.read_text()


def test_one_seed_replays_a_row() -> None:
    assert run_row(ROWS[0], 3) == run_row(ROWS[0], 3)

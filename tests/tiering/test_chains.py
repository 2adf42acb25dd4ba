"""The backlog of chains: their states, their order, and its bounds."""

from __future__ import annotations

import pytest

from kvoffload.abc import IntegrityError
from kvoffload.tiering import chains
from kvoffload.tiering.chains import Backlog, Chain, ChainState, Fate

FRESH, STARTED = ChainState.FRESH, ChainState.STARTED


def chain(name: str, n: int = 3) -> Chain:
    keys = [f"{name}{i}".encode() for i in range(n)]
    return Chain(keys, [keys], n, is_whole=False, request=name)


def backlog_of(*all_chains: Chain, max_keys: int = 100) -> Backlog:
    backlog = Backlog(max_keys)
    for each in all_chains:
        backlog.move(each, FRESH)
    backlog.check_integrity()
    return backlog


def test_a_started_chain_comes_first_and_then_the_latest() -> None:
    a, b, c = chain("a"), chain("b"), chain("c")
    backlog = backlog_of(a, b, c)
    assert backlog.next() is c
    backlog.move(a, STARTED)
    assert backlog.next() is a
    backlog.move(a, ChainState.GONE)
    assert backlog.next() is c
    assert a.state is ChainState.GONE


def test_a_waiting_chain_is_woken_by_its_block() -> None:
    a, b = chain("a"), chain("b")
    backlog = backlog_of(a, b)
    for each in (a, b):
        backlog.move(each, ChainState.WAITING, [b"x"])
    assert not backlog.is_ready
    assert list(backlog.awaited) == [b"x"]
    assert not backlog.wake([b"w"])
    b.history.fates[b"b0"] = Fate.WRITTEN
    assert backlog.wake([b"x"])
    assert (a.state, b.state) == (FRESH, STARTED)
    assert not backlog.awaited
    backlog.check_integrity()


def test_beyond_its_bounds_the_oldest_chain_that_is_not_started_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = chain("a"), chain("b"), chain("c")
    backlog = backlog_of(a, b, c)
    backlog.move(a, STARTED)
    assert backlog.excess() is None
    monkeypatch.setattr(chains, "MAX_CHAINS", 2)
    assert backlog.excess() is b
    monkeypatch.undo()
    few_keys = backlog_of(chain("d"), chain("e"), max_keys=5)
    assert few_keys.excess() is not None
    few_keys.move(next(iter(few_keys)), ChainState.GONE)
    assert few_keys.excess() is None, "one chain is kept, however long"


@pytest.mark.parametrize("state", [FRESH, ChainState.WAITING, ChainState.HELD])
def test_a_removed_chain_leaves_nothing_behind(state: ChainState) -> None:
    a = chain("a")
    backlog = backlog_of(a)
    if state is ChainState.WAITING:
        backlog.move(a, ChainState.WAITING, [b"x"])
    elif state is ChainState.HELD:
        backlog.move(a, ChainState.HELD)
    backlog.move(a, ChainState.GONE)
    backlog.move(a, ChainState.GONE)
    assert list(backlog) == []
    assert backlog.of_request("a") is None
    assert not backlog.wake([b"x"])
    backlog.check_integrity()


def test_the_check_finds_a_chain_in_the_wrong_queue() -> None:
    a = chain("a")
    backlog = backlog_of(a)
    a.state = STARTED
    with pytest.raises(IntegrityError, match="wrong one"):
        backlog.check_integrity()

"""The backlog of chains: their states, their order, and its bounds."""

from __future__ import annotations

import pytest

from kvoffload.abc import IntegrityError
from kvoffload.tiering import chains
from kvoffload.tiering.chains import Backlog, Chain, ChainState

FRESH, STARTED = ChainState.FRESH, ChainState.STARTED


def chain(name: str, n: int = 3) -> Chain:
    keys = [f"{name}{i}".encode() for i in range(n)]
    return Chain(name, keys, [keys], n)


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
    assert not backlog.num_ready
    assert list(backlog.waited_for) == [b"x"]
    assert not backlog.wake([b"w"])
    b.log.given.add(b"b0")
    assert backlog.wake([b"x"])
    assert (a.state, b.state) == (FRESH, STARTED)
    assert not backlog.waited_for
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


def test_the_check_finds_a_chain_in_the_wrong_queue() -> None:
    a = chain("a")
    backlog = backlog_of(a)
    a.state = STARTED
    with pytest.raises(IntegrityError, match="wrong one"):
        backlog.check_integrity()


def test_a_chain_with_promised_blocks_comes_first_and_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c, d = chain("a"), chain("b"), chain("c"), chain("d")
    backlog = backlog_of(a, b, c, d)
    backlog.move(d, STARTED)
    backlog.promise(a, a.keys[:2])
    assert backlog.next() is a
    monkeypatch.setattr(chains, "MAX_CHAINS", 2)
    assert backlog.excess() is b
    backlog.move(b, ChainState.GONE)
    assert backlog.excess() is None
    backlog.settle(a.keys[:1])
    backlog.check_integrity()
    assert backlog.next() is a
    backlog.settle(a.keys)
    backlog.check_integrity()
    assert backlog.next() is d
    assert backlog.excess() is a


def test_a_promised_block_belongs_to_the_chain_that_was_offered_last() -> None:
    a, b = chain("a"), chain("b")
    backlog = backlog_of(a, b)
    backlog.promise(a, [b"x", b"y"])
    backlog.promise(b, [b"y", b"z"])
    assert (a.promised, b.promised) == ({b"x"}, {b"y", b"z"})
    backlog.move(a, ChainState.GONE)
    backlog.move(b, ChainState.WAITING, [b"b0"])
    backlog.check_integrity()
    assert not backlog.num_ready
    backlog.wake([b"b0"])
    assert backlog.next() is b
    backlog.check_integrity()


def test_a_chain_of_an_ended_request_is_held_until_its_promised_blocks_are_there() -> None:
    whole, part = chain("a"), chain("b")
    whole.is_whole = True
    backlog = backlog_of(whole, part)
    for each in (whole, part):
        backlog.promise(each, each.keys[:1])
        backlog.move(each, ChainState.HELD)
    assert not backlog.num_ready
    backlog.settle(whole.keys + part.keys)
    assert (whole.state, part.state) == (ChainState.GONE, ChainState.HELD)
    backlog.check_integrity()

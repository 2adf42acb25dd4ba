"""The backlog of chains: their states, their order, and its bounds."""

from __future__ import annotations

import pytest

from kvoffload.abc import IntegrityError
from kvoffload.tiers import chains
from kvoffload.tiers.chains import Backlog, Chain, ChainState

FRESH, STARTED = ChainState.FRESH, ChainState.STARTED


def chain(name: str, n: int = 3) -> Chain:
    keys = [f"{name}{i}".encode() for i in range(n)]
    return Chain(keys, [keys], n, is_whole=False, request=name)


def backlog_of(*all_chains: Chain, max_keys: int = 100) -> Backlog:
    backlog = Backlog(max_keys)
    for each in all_chains:
        backlog.add(each, FRESH)
    backlog.check_integrity()
    return backlog


def test_a_started_chain_comes_first_and_then_the_latest() -> None:
    a, b, c = chain("a"), chain("b"), chain("c")
    backlog = backlog_of(a, b, c)
    assert backlog.next() is c
    backlog.enqueue(a, STARTED)
    assert backlog.next() is a
    backlog.remove(a)
    assert backlog.next() is c
    assert a.state is ChainState.GONE


def test_a_waiting_chain_is_woken_by_its_block() -> None:
    a, b = chain("a"), chain("b")
    backlog = backlog_of(a, b)
    for each in (a, b):
        backlog.wait_for(each, [b"x"])
    assert not backlog.is_ready
    assert backlog.waits_for_any([b"w", b"x"])
    assert not backlog.wake([b"w"])
    b.written.append(b"b0")
    assert backlog.wake([b"x"])
    assert (a.state, b.state) == (FRESH, STARTED)
    assert not backlog.waits_for_any([b"x"])
    backlog.check_integrity()


def test_a_postponed_chain_is_not_written_before_it_is_resumed() -> None:
    a, b = chain("a"), chain("b")
    backlog = backlog_of(a, b)
    backlog.enqueue(b, STARTED)
    backlog.postpone("a")
    backlog.postpone("b")
    backlog.postpone("unknown")
    assert (a.state, b.state) == (ChainState.POSTPONED, STARTED), "a chain that was begun goes on"
    backlog.check_integrity()
    backlog.remove(b)
    assert backlog.next() is None
    assert backlog.resume("a")
    assert backlog.next() is a
    assert not backlog.resume("a")


def test_beyond_its_bounds_the_oldest_chain_that_is_not_started_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = chain("a"), chain("b"), chain("c")
    backlog = backlog_of(a, b, c)
    backlog.enqueue(a, STARTED)
    assert backlog.excess() is None
    monkeypatch.setattr(chains, "MAX_CHAINS", 2)
    assert backlog.excess() is b
    monkeypatch.undo()
    few_keys = backlog_of(chain("d"), chain("e"), max_keys=5)
    assert few_keys.excess() is not None
    few_keys.remove(next(iter(few_keys)))
    assert few_keys.excess() is None, "one chain is kept, however long"


@pytest.mark.parametrize("state", [FRESH, ChainState.WAITING, ChainState.POSTPONED])
def test_a_removed_chain_leaves_nothing_behind(state: ChainState) -> None:
    a = chain("a")
    backlog = backlog_of(a)
    if state is ChainState.WAITING:
        backlog.wait_for(a, [b"x"])
    elif state is ChainState.POSTPONED:
        backlog.postpone("a")
    backlog.remove(a)
    backlog.remove(a)
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

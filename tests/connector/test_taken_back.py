"""An engine that takes tokens back and computes others in the same device blocks: what is loaded later is right.

It does not say which device blocks it writes to again. Each page has a digest of the tokens up to each of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
import pytest

from kvoffload.abc import BlockHash, PageGroup, ScheduledStep
from kvoffload.cache.keys import hash_blocks
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies.lru import LRUPolicy
from kvoffload.cache.slots import HostBackend
from kvoffload.connector.worker import OffloadingConnectorWorker
from kvoffload.transfer.inline import InlineTransfer
from tests.connector.rig import TOKENS, FakeRequest, Rig, device_ids, prompt
from tests.connector.test_device_blocks import rig_of

DIGEST_BYTES = 8
DropsTokens: TypeAlias = Callable[[Any], bool]


class SmallEngine:
    """Both halves of the connector, with device blocks of digests."""

    def __init__(self, is_exclusive: bool, drops_tokens: DropsTokens | None = None) -> None:
        engine = {"drops_tokens": drops_tokens}
        self.rig = rig_of(engine=engine) if is_exclusive else Rig(options=engine)
        self.device = np.zeros((32, TOKENS, DIGEST_BYTES), dtype=np.uint8)
        pages = self.device.reshape(len(self.device), -1)
        pool = np.zeros((16, pages.shape[1]), dtype=np.uint8)
        self._worker = OffloadingConnectorWorker(InlineTransfer([PageGroup([pages])], pool))
        self._tables: dict[str, list[int]] = {}

    def begin(self, request: FakeRequest, ids: list[int]) -> None:
        """Gives a request device blocks, and computes all of its tokens in one step."""
        self.rig.look_up(request)
        self.rig.allocate(request, ids)
        self.step({request: request.num_tokens}, {request.request_id: ids})

    def step(self, scheduled: Mapping[FakeRequest, int], new: Mapping[str, list[int]] | None = None) -> set[str]:
        """Runs a step. Returns the requests whose load has ended."""
        new = new or {}
        self._tables |= new
        step = ScheduledStep(
            {request.request_id: n for request, n in scheduled.items()},
            {name: (ids,) for name, ids in new.items()},
            frozenset(new),
        )
        half = self.rig.half
        with self._worker.step(half.build_connector_meta(step), half.update_connector_output) as finished:
            for request, n in scheduled.items():
                first = request.num_computed_tokens
                for position in range(first, first + n):
                    block = self._tables[request.request_id][position // TOKENS]
                    self.device[block, position % TOKENS] = digest(request.tokens[: position + 1])
                request.num_computed_tokens += n
        assert not half.off
        assert not finished.failed
        return finished.loaded

    def rest(self) -> None:
        while self.rig.half.has_pending_work():
            self.step({})

    def load(self, tokens: Sequence[int], ids: list[int]) -> list[int]:
        """Loads what is offered of ``tokens`` and one more. Returns the positions with other bytes than theirs."""
        request = FakeRequest("reader", [*tokens, 99])
        while (found := self.rig.look_up(request)[0]) is None:
            self.step({})
        if not found:
            return []
        self.rig.allocate(request, ids, found)
        while request.request_id not in self.step({}):
            pass
        request.num_computed_tokens = found
        computed = self.device[ids].reshape(-1, DIGEST_BYTES)
        return [i for i in range(found) if computed[i].tobytes() != digest(tokens[: i + 1]).tobytes()]


def digest(tokens: Sequence[int]) -> np.ndarray:
    return np.frombuffer(blake2b(repr(list(tokens)).encode(), digest_size=DIGEST_BYTES).digest(), dtype=np.uint8)


def take_back(request: FakeRequest, to: int, others: Sequence[int]) -> None:
    request.tokens[to:] = others
    request.num_computed_tokens = to


@pytest.mark.parametrize("is_exclusive", [False, True])
def test_while_a_store_reads_it(is_exclusive: bool) -> None:
    engine, request = SmallEngine(is_exclusive), FakeRequest("a", prompt(8))
    engine.begin(request, [1, 2])
    if is_exclusive:
        # Its store begins for a request that does not find its blocks on the device.
        assert engine.rig.look_up(FakeRequest("b", [*prompt(8), 99])) == (None, False)
        engine.step({})
    take_back(request, 6, [90, 91])
    engine.step({request: 2})
    engine.rest()
    assert engine.load(prompt(8), [10, 11]) == []
    assert engine.rig.half.metrics.snapshot()["load_bytes"] > 0, "the old tokens were found"


@pytest.mark.parametrize("has_ended", [False, True])
def test_for_a_request_that_does_not_find_it(has_ended: bool) -> None:
    """On the device, where other tokens have taken their place."""
    engine, request = SmallEngine(is_exclusive=True), FakeRequest("a", prompt(8))
    engine.begin(request, [1, 2])
    take_back(request, 6, [90, 91])
    engine.step({request: 2})
    if has_ended:
        engine.rig.half.request_finished(request)
    assert engine.load(prompt(8), [10, 11]) == []


@dataclass(eq=False)
class Session(FakeRequest):
    """A request that gets more input, and then drops the token that was sampled last. It keeps the names of its blocks,
    as the sessions of vLLM before 0.32 do."""

    _names: list[BlockHash] = field(default_factory=list)

    @property
    def block_hashes(self) -> list[BlockHash]:
        done = len(self._names)
        self._names += hash_blocks(self.tokens[done * TOKENS :], TOKENS, self._names[-1] if done else b"")
        return self._names


def is_session(request: Any) -> bool:
    return isinstance(request, Session)


def streamed(is_exclusive: bool, drops_tokens: DropsTokens | None) -> tuple[list[int], list[int]]:
    """Returns the positions with wrong bytes of the first input with what was sampled after it, and of the session's
    own text."""
    engine, session = SmallEngine(is_exclusive, drops_tokens), Session("a", prompt(7))
    engine.begin(session, [1, 2])
    session.tokens.append(80)
    dropped = list(session.tokens)
    assert len(session.block_hashes) == 2
    session.tokens[7:] = prompt(6, start=90)
    engine.step({session: 6}, {"a": [1, 2, 3, 4]})
    engine.rig.half.request_finished(session)
    engine.rest()
    return engine.load(dropped, [10, 11]), engine.load(session.tokens[:12], [12, 13, 14])


@pytest.mark.parametrize("is_exclusive", [False, True])
def test_an_engine_says_which_names_last(is_exclusive: bool) -> None:
    assert streamed(is_exclusive, is_session) == ([], [])


@pytest.mark.parametrize("is_exclusive", [False, True])
def test_names_that_do_not_last_are_noticed(is_exclusive: bool) -> None:
    assert streamed(is_exclusive, None) == ([7], [])


def behind_a_session(drops_tokens: DropsTokens | None) -> dict[str, list[int]]:
    """Returns the device blocks that are stored for requests of which some go on from device block 2, which a session
    has filled. 1 is older."""
    rig, stored = Rig(options={"drops_tokens": drops_tokens}), dict[str, list[int]]()

    def run(request: FakeRequest, ids: list[int], found: int = 0) -> None:
        meta = rig.start(request, ids, computed=found, num_tokens=request.num_tokens - found)
        stored[request.request_id] = [block for spec in meta.stores.values() for block in device_ids(spec)]

    run(FakeRequest("before", prompt(4)), [1])
    waiting, preempted = FakeRequest("waiting", prompt(12)), FakeRequest("preempted", [*prompt(7), 80])
    rig.look_up(waiting)
    run(preempted, [3, 4])
    session = Session("session", prompt(7))
    run(session, [1, 2], found=4)
    session.tokens += prompt(6, start=90)
    rig.step({session: 6}, more={"session": [5, 6]})
    rig.step(preempted=["preempted"])
    preempted.tokens += prompt(4, start=60)
    run(waiting, [1, 2, 7], found=8)
    run(preempted, [1, 2, 8], found=8)
    run(FakeRequest("behind it", [*prompt(12), *prompt(4, start=70)]), [1, 2, 7, 9], found=12)
    run(FakeRequest("beside", [*prompt(4), *prompt(4, start=70)]), [1, 10], found=4)
    run(FakeRequest("in its place", prompt(8, start=20)), [2, 7])
    return stored


def test_nothing_is_stored_behind_a_block_that_a_session_has_filled() -> None:
    assert behind_a_session(is_session) == {
        "before": [1],
        "preempted": [],
        "session": [],
        "waiting": [],
        "behind it": [],
        "beside": [10],
        "in its place": [2, 7],
    }


def test_blocks_that_a_session_has_filled_are_noticed() -> None:
    stored = behind_a_session(None)
    assert (stored["waiting"], stored["preempted"], stored["behind it"]) == ([2, 7], [8], [9])


@pytest.mark.parametrize("others", [[], prompt(4, start=90)])
def test_events_describe_no_other_text(others: list[int]) -> None:
    rig = Rig(
        options={"enable_events": True}, manager=PolicyOffloadingManager(HostBackend(TOKENS, 8), LRUPolicy(8), True)
    )
    request = FakeRequest("a", prompt(8))
    stored = rig.start(request).stores
    take_back(request, 4, others)
    rig.report(*stored)
    (event,) = rig.half.take_events()
    assert event.blocks is not None
    assert [block and block.block_hash for block in event.blocks] == [hash_blocks(prompt(4), TOKENS)[0], None]
    assert list(event.keys) == rig.keys(prompt(8))

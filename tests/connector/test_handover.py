"""A server that computes a prompt hands it over to one that goes on, through a store that both use."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pytest

from kvoffload.abc import KVGroup, MissReason, OffloadKey, Slots
from kvoffload.abc.tier import MAX_PLACE_CHARS
from kvoffload.cache.admission import ReuseFilter
from kvoffload.cache.manager import PolicyOffloadingManager
from kvoffload.cache.policies import make_policy
from kvoffload.cache.slots import HostBackend
from kvoffload.cache.tenants import Tenants
from kvoffload.connector.handover import (
    IMPATIENT_SHARE,
    MAX_HANDED_TOKENS,
    MAX_SERVERS,
    MISSES_IN_A_ROW,
    NAME_CHARS,
    PATIENT_AGAIN,
    Handover,
    Patience,
    is_handover,
)
from kvoffload.connector.options import PARAM
from kvoffload.testing.tier_conformance import make_pools
from kvoffload.tiering.manager import TieredOffloadingManager, TieringSettings, TierSettings
from kvoffload.tiering.unwritten import UNWRITTEN_SHARE, WRITE_WITHIN_S
from kvoffload.tiering.writes import REFUSAL_S
from tests.clock import Clock
from tests.connector.rig import REMOTE_DECODE, TOKENS, FakeRequest, Rig, prompt
from tests.sim.executor import SteppedExecutor
from tests.sim.memory_tier import MemoryTier, StoredBlock

HOST_BLOCKS = 64
DEADLINE_S = 1.0
PLACE = "seat-7"


class StoreTier(MemoryTier):
    """A server's tier of a store that others use too. It writes the first ``most_writes`` blocks that it is given."""

    name = "store"
    is_shared = True
    most_writes = 1 << 30

    def hand_over(self, keys: Sequence[OffloadKey]) -> str:
        return PLACE

    def write(self, keys: Sequence[OffloadKey], slots: Slots) -> list[OffloadKey]:
        taken = super().write(keys[: self.most_writes], slots[: self.most_writes])
        self.most_writes -= len(taken)
        return taken


class Server(Rig):
    """A scheduler half over host memory and ``store``."""

    def __init__(
        self,
        clock: Clock,
        store: OrderedDict[OffloadKey, StoredBlock],
        tenants: Tenants | None = None,
        is_shared: bool = True,
        threshold: int | None = None,
    ) -> None:
        self.executor = SteppedExecutor(clock=clock)
        self.tier = StoreTier(make_pools(HOST_BLOCKS, 4096), 4 * HOST_BLOCKS, self.executor, clock)
        self.tier.blocks, self.tier.is_shared = store, is_shared
        host = PolicyOffloadingManager(
            HostBackend(TOKENS, HOST_BLOCKS), make_policy("lru", HOST_BLOCKS), True, clock=clock
        )
        tiers = []
        if threshold is not None:
            host.admission = ReuseFilter(threshold)
            tiers = [TierSettings(admission=ReuseFilter(threshold))]
        settings = TieringSettings([KVGroup(TOKENS)], load_deadline_ms=1000 * DEADLINE_S, tiers=tiers)
        manager = TieredOffloadingManager(host, [self.tier], settings, clock=clock)
        options = {} if tenants is None else {"tenants": tenants}
        super().__init__(HOST_BLOCKS, manager=manager, clock=clock, options=options)

    def compute(self, tokens: list[int], answers: bool = True, **options: Any) -> dict[str, Any] | None:
        """Computes a prompt that another server goes on with. Returns the answer. Nothing is written yet."""
        params = REMOTE_DECODE | ({PARAM: options} if options else {})
        request = FakeRequest(f"p{self.next_block}", tokens, params)
        self.report(*self.start(request).stores)
        holds, answer = self.half.request_finished(request)
        assert holds is True, "its device blocks stay until all is in host memory"
        assert (answer is not None) == answers
        # A client sends it on.
        assert json.loads(json.dumps(answer)) == answer
        self.report(*self.step().stores)
        return answer

    def settle(self) -> None:
        """Ends what the store was asked for."""
        for _ in range(3):
            self.step()
            self.executor.drain()
        self.step()

    def give_up(self) -> None:
        """Lets the time pass in which the store can take on what was handed over."""
        self.clock.now += WRITE_WITHIN_S
        self.step()
        self.clock.now += 2 * REFUSAL_S

    def count(self, result: str) -> float:
        return self.half.metrics.snapshot().get(f"handovers:{result}", 0)

    def ends(self, request: FakeRequest) -> int:
        """The request is given device blocks. Returns how many tokens it has found."""
        tokens, _ = self.look_up(request)
        assert tokens is not None, "it waits"
        self.allocate(request, self.new_blocks(-(-request.num_tokens // TOKENS)), tokens)
        self.step()
        return tokens

    def waits(self, tokens: list[int], answer: dict[str, Any] | None) -> float:
        """A request comes. Returns for how long it waits if nothing is written."""
        start, request = self.clock.now, FakeRequest(f"d{self.next_block}-{tokens[0]}", tokens, answer)
        while self.look_up(request) == (None, False):
            self.clock.now += DEADLINE_S / 64
            self.step()
            assert self.clock.now < start + 10 * DEADLINE_S
        waited_s = self.clock.now - start
        self.ends(request)
        self.half.request_finished(request)
        return waited_s


class Pair:
    """A server that computes prompts, and one that goes on with them."""

    def __init__(self, **options: Any) -> None:
        self.clock = Clock()
        store: OrderedDict[OffloadKey, StoredBlock] = OrderedDict()
        self.prefill = Server(self.clock, store, **options)
        self.decode = Server(self.clock, store, **options)


@pytest.fixture
def pair() -> Pair:
    return Pair()


def handover_of(answer: dict[str, Any] | None) -> dict[str, Any]:
    assert answer is not None
    value: dict[str, Any] = answer[PARAM]["handover"]
    return value


def with_handover(value: object) -> dict[str, Any]:
    return {"do_remote_prefill": True, "do_remote_decode": False, PARAM: {"handover": value}}


# All goes well.


def test_the_answer_names_the_prompts_blocks_and_where_they_are(pair: Pair) -> None:
    answer = pair.prefill.compute(prompt(11))
    value = handover_of(answer)
    assert answer == with_handover(value)
    assert value == {"tokens": 8, "name": value["name"], "places": {"store": PLACE}, "server": value["server"]}
    assert is_handover(value)
    assert Handover(**value).to_options() == {"handover": value}
    assert handover_of(pair.decode.compute(prompt(11)))["name"] == value["name"]
    assert handover_of(pair.decode.compute(prompt(11, start=1)))["name"] != value["name"]
    assert pair.prefill.count("sent") == 1


@pytest.mark.parametrize("is_handed_over", [True, False])
def test_a_request_waits_for_blocks_that_are_not_written_yet(pair: Pair, is_handed_over: bool) -> None:
    """Without the answer, which is the control, it is computed at once."""
    answer = pair.prefill.compute(prompt(9))
    request = FakeRequest("d", prompt(9), answer if is_handed_over else {"do_remote_prefill": True})
    assert pair.decode.look_up(request) == ((None, False) if is_handed_over else (0, False))
    pair.clock.now += 0.9 * DEADLINE_S
    pair.decode.step()
    assert pair.decode.look_up(request) == ((None, False) if is_handed_over else (0, False))
    pair.prefill.settle()
    pair.decode.settle()
    if not is_handed_over:
        assert pair.decode.ends(request) == 0
        assert pair.decode.half.metrics.snapshot().get("handovers:none", 0) == 0
        return
    assert pair.decode.look_up(request) == (None, False), "it is being read"
    pair.decode.settle()
    assert pair.decode.ends(request) == 8
    assert pair.decode.count("complete") == 1
    assert pair.decode.half.records[-1].tier_tokens == {"store": 8}


@pytest.mark.parametrize(("num_tokens", "result"), [(8, "complete"), (12, "partial")])
def test_a_handover_is_complete_if_less_than_a_block_of_it_is_computed(
    pair: Pair, num_tokens: int, result: str
) -> None:
    """The device has the first block, and the last token is computed in any case."""
    answer = pair.prefill.compute(prompt(num_tokens))
    request = FakeRequest("d", prompt(num_tokens), answer)
    assert pair.decode.look_up(request, 4) == ((0, False) if result == "complete" else (None, False))
    pair.clock.now += 2 * DEADLINE_S
    assert pair.decode.look_up(request, 4) == (0, False)
    pair.decode.allocate(request, pair.decode.new_blocks(3), 0)
    assert pair.decode.count(result) == 1


def test_a_server_hands_over_what_it_has_found_itself(pair: Pair) -> None:
    pair.prefill.store(prompt(12))
    pair.prefill.settle()
    request = FakeRequest("p", prompt(13), REMOTE_DECODE)
    ids = pair.prefill.new_blocks(4)
    pair.prefill.report(*pair.prefill.load(request, ids=ids).loads)
    pair.prefill.step({request: 1}, new={"p": ids})
    _, answer = pair.prefill.half.request_finished(request)
    assert handover_of(answer)["tokens"] == 12


# What is promised is kept.


@pytest.mark.parametrize("threshold", [None, 2])
@pytest.mark.parametrize("options", [{}, {"drop": True}, {"session": "a", "drop": True}, {"expect_return_s": 9.0}])
def test_what_is_handed_over_is_written_whatever_hints_and_filters_say(
    threshold: int | None, options: dict[str, Any]
) -> None:
    """The same request is not written if it is not handed over, which is the control."""
    pair = Pair(threshold=threshold)
    alone = FakeRequest("alone", prompt(9, start=100), {PARAM: options})
    pair.prefill.report(*pair.prefill.start(alone).stores)
    pair.prefill.half.request_finished(alone)
    pair.prefill.settle()
    is_stored = threshold is None and not options.get("drop")
    assert len(pair.prefill.tier.blocks) == 2 * is_stored
    answer = pair.prefill.compute(prompt(9), **options)
    pair.prefill.settle()
    request = FakeRequest("d", prompt(9), answer)
    assert pair.decode.look_up(request) == (None, False)
    pair.decode.settle()
    assert pair.decode.ends(request) == 8
    assert pair.decode.count("complete") == 1


def test_the_answer_names_only_what_has_room_until_it_is_written(pair: Pair) -> None:
    """The store takes nothing on. What is named waits in host memory, whatever is stored meanwhile."""
    pair.prefill.tier.most_writes, room = 0, int(HOST_BLOCKS * UNWRITTEN_SHARE)
    named = [handover_of(pair.prefill.compute(prompt(size))) for size in (9, 4 * room + 21)]
    assert [value["tokens"] for value in named] == [8, 4 * room]
    manager = pair.prefill.half.manager
    assert isinstance(manager, TieredOffloadingManager)
    assert len(manager._unwritten.slots) == room
    assert pair.prefill.compute(prompt(9, start=500), answers=False) is None, "there is no room at all"
    pair.prefill.give_up()
    assert handover_of(pair.prefill.compute(prompt(9, start=600)))["tokens"] == 8


def test_nothing_is_read_for_a_request_that_has_ended(pair: Pair) -> None:
    """Although its blocks have left host memory meanwhile: they are stored again."""
    server, request = pair.prefill, FakeRequest("p", prompt(11), REMOTE_DECODE)
    server.report(*server.start(request).stores)
    server.settle()
    server.manager.drop(server.keys(prompt(8)), only_host=True)
    handover_of(server.half.request_finished(request)[1])
    assert len(server.step().stores) == 1
    assert server.manager.num_promotions == 0


# Nothing is handed over.


@pytest.mark.parametrize(("size", "options"), [(3, {}), (9, {"store": False}), (9, {"max_tokens": 3})])
def test_what_is_not_stored_is_not_handed_over(pair: Pair, size: int, options: dict[str, Any]) -> None:
    """Neither are prompts that are shorter than a block."""
    answer = pair.prefill.compute(prompt(size), answers=bool(options), **options)
    # A client that sends the answer on sends its own options.
    assert answer == ({PARAM: options} if options else None)
    assert pair.prefill.count("sent") == 0


def test_without_a_shared_tier_there_is_no_answer() -> None:
    assert Pair(is_shared=False).prefill.compute(prompt(9), answers=False) is None


def test_without_do_remote_decode_there_is_no_answer(pair: Pair) -> None:
    request = FakeRequest("p", prompt(9))
    pair.prefill.report(*pair.prefill.start(request).stores)
    assert pair.prefill.half.request_finished(request) == (False, None)


def test_a_request_that_may_not_load_does_not_wait(pair: Pair) -> None:
    value = handover_of(pair.prefill.compute(prompt(9)))
    assert pair.decode.waits(prompt(9), {PARAM: {"handover": value, "load": False}}) == 0.0


# Something is missing.


def test_a_request_is_computed_when_its_deadline_is_over(pair: Pair) -> None:
    """Its record says why."""
    answer = pair.prefill.compute(prompt(9))
    request = FakeRequest("d", prompt(9), answer)
    start = pair.clock.now
    for waited in (0.0, 0.5, 0.99):
        pair.clock.now = start + waited * DEADLINE_S
        pair.decode.step()
        assert pair.decode.look_up(request) == (None, False)
    pair.clock.now = start + DEADLINE_S
    pair.decode.step()
    assert pair.decode.ends(request) == 0
    assert pair.decode.count("none") == 1
    record = pair.decode.half.records[-1]
    assert record.reason is MissReason.NOT_IN_TIME
    assert record.missed_key is not None


def test_what_has_come_in_time_is_used(pair: Pair) -> None:
    pair.prefill.tier.most_writes = 1
    answer = pair.prefill.compute(prompt(13))
    request = FakeRequest("d", prompt(13), answer)
    pair.prefill.settle()
    for _ in range(3):
        assert pair.decode.look_up(request) == (None, False)
        pair.decode.settle()
    pair.clock.now += DEADLINE_S
    pair.decode.step()
    assert pair.decode.ends(request) == 4
    assert pair.decode.count("partial") == 1


def test_requests_wait_less_when_nothing_comes_and_in_full_again_when_it_does(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.prefill.tier.most_writes = 0
    waited = []
    with caplog.at_level(logging.WARNING):
        for i in range(2 * PATIENT_AGAIN):
            tokens = prompt(9, start=100 * (i + 1))
            waited.append(pair.decode.waits(tokens, pair.prefill.compute(tokens)))
            pair.prefill.give_up()
    patient = {*range(MISSES_IN_A_ROW), PATIENT_AGAIN}
    for i, seconds in enumerate(waited):
        assert seconds == pytest.approx(DEADLINE_S if i in patient else IMPATIENT_SHARE * DEADLINE_S, abs=1 / 63), i
    assert "requests in a row did not find all" in caplog.text
    # One finds all of it. The next one waits in full.
    pair.prefill.tier.most_writes = 1 << 30
    answer = pair.prefill.compute(prompt(9))
    pair.prefill.settle()
    request = FakeRequest("found", prompt(9), answer)
    assert pair.decode.look_up(request) == (None, False)
    pair.decode.settle()
    assert pair.decode.ends(request) == 8
    pair.prefill.tier.most_writes = 0
    assert pair.decode.waits(prompt(9, start=5000), pair.prefill.compute(prompt(9, start=5000))) >= DEADLINE_S


def test_a_server_whose_blocks_do_not_come_costs_the_requests_of_others_nothing(pair: Pair) -> None:
    other = Server(pair.clock, OrderedDict())
    pair.prefill.tier.most_writes = 0
    for i in range(2 * MISSES_IN_A_ROW):
        tokens = prompt(9, start=100 * (i + 1))
        answer = other.compute(tokens)
        waited_s = pair.decode.waits(tokens, answer)
        assert (waited_s == DEADLINE_S) == (i < MISSES_IN_A_ROW)
        other.settle()
    assert pair.decode.waits(prompt(9), pair.prefill.compute(prompt(9))) == DEADLINE_S


def test_only_so_many_servers_are_remembered() -> None:
    patience = Patience()
    for i in range(MISSES_IN_A_ROW * (MAX_SERVERS + 1)):
        patience.ended(str(i // MISSES_IN_A_ROW), False)
    assert not patience.is_lost("0")
    assert patience.is_lost("1")
    assert len(patience._num_misses) == MAX_SERVERS
    patience.ended("1", True)
    assert not patience.is_lost("1")


# What clients send.

SERVER = "fedcba9876543210"
GOOD = {"tokens": 8, "name": "0123456789abcdef" * 2, "places": {"store": PLACE}, "server": SERVER}
NOT_HANDOVERS: dict[str, Any] = {
    "a number": 7,
    "a list": [GOOD],
    "a text": json.dumps(GOOD),
    "an empty one": {},
    "without places": {"tokens": 8, "name": GOOD["name"], "server": SERVER},
    "without a server": {"tokens": 8, "name": GOOD["name"], "places": {}},
    "a huge server": GOOD | {"server": "0" * (1 << 20)},
    "a server of bytes": GOOD | {"server": SERVER.encode()},
    "more fields": GOOD | {"more": 1},
    "true tokens": GOOD | {"tokens": True},
    "no tokens": GOOD | {"tokens": 0},
    "less than no tokens": GOOD | {"tokens": -4},
    "half a token": GOOD | {"tokens": 8.0},
    "no number": GOOD | {"tokens": float("nan")},
    "tokens as text": GOOD | {"tokens": "8"},
    "huge tokens": GOOD | {"tokens": 10**400},
    "a short name": GOOD | {"name": "0"},
    "a huge name": GOOD | {"name": "0" * (1 << 20)},
    "a name of bytes": GOOD | {"name": b"0" * NAME_CHARS},
    "a name of letters": GOOD | {"name": ["0"] * NAME_CHARS},
    "a list of places": GOOD | {"places": ["store"]},
    "places without a name": GOOD | {"places": {7: PLACE}},
    "places that are nothing": GOOD | {"places": {"store": None}},
    "deep places": GOOD | {"places": {"store": {"store": PLACE}}},
    "a huge place": GOOD | {"places": {"store": "x" * (MAX_PLACE_CHARS + 1)}},
    "a huge tier": GOOD | {"places": {"x" * (1 << 20): PLACE}},
    "thousands of places": GOOD | {"places": {str(i): PLACE for i in range(5000)}},
}


@pytest.mark.parametrize("value", NOT_HANDOVERS.values(), ids=NOT_HANDOVERS)
def test_what_is_no_handover_is_ignored_and_counted(pair: Pair, value: object) -> None:
    assert not is_handover(value)
    assert pair.decode.waits(prompt(9), with_handover(value)) == 0.0
    snapshot = pair.decode.half.metrics.snapshot()
    assert snapshot["ignored_options:handover"] == 1
    assert not any(count for name, count in snapshot.items() if name.startswith("handovers:"))
    assert not pair.decode.half.off


def test_what_is_one_is_not_ignored(pair: Pair) -> None:
    """Negative control. It is of other blocks, which nobody waits for."""
    assert is_handover(GOOD)
    assert pair.decode.waits(prompt(9), with_handover(GOOD)) == 0.0
    assert pair.decode.half.metrics.snapshot().get("ignored_options:handover", 0) == 0
    assert pair.decode.count("other_name") == 1


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"name": "0" * NAME_CHARS},
        {"tokens": 4},
        {"tokens": 6},
        {"tokens": 7},
        {"tokens": 9},
        {"tokens": 12},
        {"tokens": MAX_HANDED_TOKENS},
    ],
    ids=str,
)
def test_a_request_waits_only_for_its_own_blocks(
    pair: Pair, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Without a change, which is the control, it waits until its deadline."""
    answer = with_handover(handover_of(pair.prefill.compute(prompt(9))) | change)
    waited_s = pair.decode.waits(prompt(9), answer)
    assert waited_s == (0.0 if change else DEADLINE_S)
    assert pair.decode.count("other_name") == bool(change)
    assert ("have other keys there than here" in caplog.text) == bool(change)
    assert not pair.decode.half.off


def test_the_answer_of_another_prompt_is_no_reason_to_wait(pair: Pair) -> None:
    answer = pair.prefill.compute(prompt(9))
    assert pair.decode.waits(prompt(9, start=1), answer) == 0.0
    assert pair.decode.count("other_name") == 1
    for _ in range(2 * MISSES_IN_A_ROW):
        pair.decode.waits(prompt(9, start=1), answer)
    assert pair.decode.waits(prompt(9), answer) == DEADLINE_S, "it costs no other request its patience"


@pytest.mark.parametrize("places", [{}, {"unknown": PLACE}, {"store": "../../" * 10}, {"": ""}], ids=str)
def test_blocks_are_found_whatever_a_client_says_where_they_are(pair: Pair, places: dict[str, str]) -> None:
    answer = with_handover(handover_of(pair.prefill.compute(prompt(9))) | {"places": places})
    request = FakeRequest("d", prompt(9), answer)
    assert pair.decode.look_up(request) == (None, False)
    pair.prefill.settle()
    for _ in range(2):
        pair.decode.settle()
        pair.decode.look_up(request)
    assert pair.decode.ends(request) == 8
    assert pair.decode.count("complete") == 1


def test_the_answer_keeps_the_tenant(pair: Pair) -> None:
    answer = pair.prefill.compute(prompt(9), tenant="search")
    assert answer is not None
    assert answer[PARAM] == {"handover": handover_of(answer), "tenant": "search"}
    assert pair.decode.waits(prompt(9), answer) == DEADLINE_S
    for tenant in ({}, {"tenant": "chat"}):
        assert pair.decode.waits(prompt(9), {PARAM: {"handover": handover_of(answer), **tenant}}) == 0.0
    assert pair.decode.count("other_name") == 2

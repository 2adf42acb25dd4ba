"""RedisClient against a server that answers wrongly: no value counts as read unless all of its bytes have come in one
well-formed reply, nothing of a broken connection is used again, and no call takes longer than its timeout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

import numpy as np
import pytest

from kvoffload.tiers.redis.client import RedisClient
from kvoffload.tiers.redis.nodes import NodeTimes
from kvoffload.tiers.remote.client import Outcome, StoreError
from tests.tiers.redis.rig import TIMEOUT_S, FakeServer, make_client, names

TIMES = NodeTimes(server_rest_s=0.0)
"""A server that did not answer is asked again at once."""
SIZE = 1000
WAIT_S = 0.3
"""The timeout of calls whose reply never is complete."""
WAITING = ("says nothing", "says half", "drips", "drips fast", "garbage")
VALUE = b"v" * SIZE
GOOD = b"$%d\r\n%b\r\n" % (SIZE, VALUE)
T = TypeVar("T")
Send = Callable[[bytes], None]
Act = Callable[[Send], None]


def close() -> None:
    raise EOFError


def ends(data: bytes) -> Act:
    def act(send: Send) -> None:
        send(data)
        close()

    return act


def says(data: bytes) -> Act:
    return lambda send: send(data)


def drips(data: bytes, pause_s: float = WAIT_S / 8) -> Act:
    """A byte now and then: each comes in time, and all together do not."""

    def act(send: Send) -> None:
        for i in range(len(data)):
            send(data[i : i + 1])
            time.sleep(pause_s)

    return act


ONE = says(b":1\r\n")
BAD: dict[str, Act] = {
    "closes without a reply": ends(b""),
    "closes in the header": ends(b"$10"),
    "closes behind the header": ends(b"$%d\r\n" % SIZE),
    "closes in the value": ends(GOOD[:-500]),
    "closes before the ending": ends(GOOD[:-2]),
    "closes in the ending": ends(GOOD[:-1]),
    "says nothing": says(b""),
    "says half": says(GOOD[:-500]),
    "drips": drips(GOOD),
    "drips fast": drips(GOOD, 2 * WAIT_S / SIZE),
    "a line without an end": says(b"$" + b"1" * (32 << 10)),
    "bytes behind the announced size": says(b"$%d\r\n%b!\r\n" % (SIZE, VALUE)),
    "fewer bytes than announced": says(b"$%d\r\n%b\r\n" % (SIZE, VALUE[:-1]) + GOOD),
    "a size that is none": says(b"$1e3\r\n" + VALUE + b"\r\n"),
    "a size with blanks": says(b"$ %d\r\n%b\r\n" % (SIZE, VALUE)),
    "a negative size": says(b"$-2\r\n"),
    "a huge size": says(b"$9999999999999\r\n" + VALUE),
    "more digits than a number has": says(b"$" + b"9" * 400 + b"\r\n"),
    "a status": says(b"+OK\r\n"),
    "a number": says(b":1\r\n" + GOOD),
    "a number as large as the value": says(b":" + GOOD[1:]),
    "a status as large as the value": says(b"+" + GOOD[1:]),
    "an array": says(b"*1\r\n" + GOOD),
    "a push of another protocol": says(b">2\r\n+invalidate\r\n*0\r\n"),
    "garbage": says(bytes(range(128, 256)) * 20),
    "an empty line": says(b"\r\n" + GOOD),
}


@contextmanager
def served(get: Act, other: Act = ONE, timeout_s: float = TIMEOUT_S) -> Iterator[tuple[FakeServer, RedisClient]]:
    """Yields a server that answers GET once with ``get`` and then well, and ``other`` with that; and its client."""
    is_bad = True

    def script(words: list[bytes], send: Send) -> None:
        nonlocal is_bad
        if words[0] == b"GET":
            was_bad, is_bad = is_bad, False
            (get if was_bad else says(GOOD))(send)
        elif words[0] == b"INFO":
            send(b"$-1\r\n")
        else:
            other(send)

    server = FakeServer(script)
    client = make_client(server.url, timeout_s, TIMES)
    try:
        yield server, client
    finally:
        client.close()
        server.close()


def get(client: RedisClient, count: int = 1) -> tuple[Sequence[Outcome], np.ndarray]:
    buffers = np.zeros((count, SIZE), dtype=np.uint8)
    return client.get(names(count), [[row[:100], row[100:]] for row in buffers]), buffers


@pytest.mark.parametrize("name", BAD)
def test_a_bad_reply_is_never_taken_for_a_value(name: str) -> None:
    with served(BAD[name], timeout_s=WAIT_S if name in WAITING else TIMEOUT_S) as (server, client):
        with pytest.raises(StoreError, match=r"127\.0\.0\.1:\d+: "):
            get(client)
        connections = server.num_connections
        outcomes, buffers = eventually(lambda: get(client))
        assert outcomes == [Outcome.OK]
        assert buffers.tobytes() == VALUE
        assert server.num_connections > connections, "the broken connection was used again"


def eventually(call: Callable[[], T]) -> T:
    """Returns what ``call`` returns. On a busy machine, even good replies may come too late for WAIT_S."""
    for _ in range(50):
        with suppress(StoreError):
            return call()
    raise AssertionError("the client never works again")


def test_replies_before_a_broken_one_count() -> None:
    replies = iter([says(GOOD), says(b"$-1\r\n"), ends(GOOD[:-700])])
    server = FakeServer(lambda words, send: next(replies)(send))
    client = make_client(server.url, times=TIMES)
    outcomes, buffers = get(client, 5)
    assert outcomes == [Outcome.OK, Outcome.MISSING, Outcome.FAILED, Outcome.FAILED, Outcome.FAILED]
    assert buffers[0].tobytes() == VALUE


def test_a_reply_that_comes_late_is_not_taken_for_the_next() -> None:
    """The reply to the first GET comes after its timeout: on the same connection, the second would get it."""
    sent: list[bytes] = []

    def script(words: list[bytes], send: Send) -> None:
        sent.append(words[1])
        if len(sent) == 1:
            time.sleep(2 * WAIT_S)
        send(b"$%d\r\n%b\r\n" % (SIZE, words[1][-1:] * SIZE))

    server = FakeServer(script)
    client = make_client(server.url, WAIT_S, TIMES)
    first, second = names(2, first=7)
    buffer = np.zeros(SIZE, dtype=np.uint8)
    with pytest.raises(StoreError, match="no answer before the deadline"):
        client.get([first], [[buffer]])
    time.sleep(2 * WAIT_S)
    assert eventually(lambda: client.get([second], [[buffer]])) == [Outcome.OK]
    assert buffer.tobytes() == second[-1:].encode() * SIZE


def test_bytes_behind_the_last_reply_close_the_connection() -> None:
    with served(says(GOOD + GOOD)) as (server, client):
        assert get(client)[0] == [Outcome.OK]
        connections = server.num_connections
        assert get(client)[0] == [Outcome.OK]
        assert server.num_connections == connections + 1


@pytest.mark.parametrize(
    "reply", [b":2\r\n", b":-1\r\n", b"+OK\r\n", b"$1\r\n1\r\n", b"$-1\r\n", b"*0\r\n", b":x\r\n", b":\r\n"]
)
def test_a_lookup_or_removal_that_is_answered_wrongly_fails(reply: bytes) -> None:
    with served(says(GOOD), says(reply)) as (_, client):
        for call in (client.exists, client.remove):
            with pytest.raises(StoreError):
                call(names(1))


@pytest.mark.parametrize("reply", [b":1\r\n", b"+QUEUED\r\n", b"$2\r\nOKAY\r\n", b"*0\r\n", b"+OK\n\r\n"])
def test_a_write_that_is_answered_wrongly_fails(reply: bytes) -> None:
    with served(says(GOOD), says(reply)) as (_, client), pytest.raises(StoreError):
        client.put(names(1), [[np.ones(SIZE, dtype=np.uint8)]])


@pytest.mark.parametrize(
    "reply",
    [
        b"*1\r\n" * 20 + b":1\r\n",
        b"*9999999\r\n",
        b"*3\r\n" + (b"*60000\r\n" + b":1\r\n" * 60000) * 3,
        b"*2\r\n*1\r\n:1\r\n:2\r\n",
        b"*1\r\n*3\r\n:0\r\n:x\r\n",
        b"*9\r\n" + (b"$4000000\r\n" + b"x" * 4_000_000 + b"\r\n") * 3,
        b"*9999\r\n" + (b"+" + b"x" * 10_000 + b"\r\n") * 900,
    ],
    ids=["deep", "huge", "long", "shapeless", "no number", "strings", "lines"],
)
def test_a_server_that_describes_no_cluster_is_not_used(reply: bytes) -> None:
    server = FakeServer(lambda words, send: send(reply), answers_setup=False)
    with pytest.raises(StoreError):
        make_client(server.url, times=TIMES)


@pytest.mark.parametrize("reply", [b"$100000\r\n", b"*2\r\n$10000\r\n" + b"x" * 10_000 + b"\r\n$10000\r\n"])
def test_no_reply_is_received_past_what_was_asked(reply: bytes) -> None:
    """A number is, so the rest of an announced string is not waited for."""
    with served(says(GOOD), says(reply)) as (_, client), pytest.raises(StoreError, match="bytes or items announced"):
        client.exists(names(1))


def test_one_name_may_fail_alone_and_the_log_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    replies = iter([b":1\r\n", b"-CLUSTERDOWN Hash slot not served\r\n", b":0\r\n"])

    def script(words: list[bytes], send: Send) -> None:
        send(next(replies))

    server = FakeServer(script)
    client = make_client(server.url, times=TIMES)
    assert client.exists(names(3)) == [Outcome.OK, Outcome.FAILED, Outcome.MISSING]
    assert "no node for a part of the keys" in capfd.readouterr().err


def test_the_text_of_errors_is_cut_and_printable() -> None:
    with served(says(GOOD), says(b"-ERR \x1b[31m\xff" + b"x" * 5000 + b"\r\n")) as (_, client):
        with pytest.raises(StoreError) as caught:
            client.exists(names(1))
        assert len(str(caught.value)) < 400
        assert str(caught.value).isprintable()


def test_a_moved_name_at_a_single_server_says_which_permission_is_missing() -> None:
    moved = says(b"-MOVED 1 10.0.0.1:6379\r\n")
    with served(says(GOOD), moved) as (_, client), pytest.raises(StoreError, match=r"grant \+cluster\|slots"):
        client.exists(names(1))

"""RedisClient: a Redis or Valkey server, or a Cluster, as a StoreClient. It runs in the client's process.

A value is one string. It goes from the host slots to the server, and from the server into them, without a copy. Nothing
of the server is changed: neither its memory limit nor its policy.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvoffload.abc import Ability, ByteArray, ConfigError
from kvoffload.printable import printable
from kvoffload.tiers.redis.location import NOWHERE, Address, parse_address, parse_url
from kvoffload.tiers.redis.login import Login, explain
from kvoffload.tiers.redis.nodes import NO_ADDRESS, Nodes, share_of
from kvoffload.tiers.redis.stream import MAX_LINE_CHARS, Buffer, ErrorReply, Lost, Reply, Stream, command
from kvoffload.tiers.remote.client import Outcome, StoreClient, StoreError
from kvoffload.units import format_bytes

LOOKUP_TIMEOUT_S = 3.0
TRANSFER_TIMEOUT_S = 12.0
"""Below the deadlines after which the client's process is killed."""
MAX_REDIRECTS = 16
"""Nodes to which one call is redirected. Names beyond that fail: the next call reads the Cluster's map first."""
MAX_PROBLEMS = 8
"""Distinct problems of one call that the log names."""
MAX_INFO_BYTES = 1 << 16
MAX_COMMANDS = 512
"""Commands sent at once; as many again before their replies have come."""
MAX_VALUE_BYTES_SENT = 1 << 20
"""Bytes of values asked for or sent at once, or one value. The server has them in its memory beside the stored ones,
and is slower if they do not fit into its processor's cache."""


def connect(settings: Mapping[str, Any]) -> RedisClient:
    """Returns a client of the store. ``settings`` are fields of RedisConfig. Raises StoreError if the store cannot be
    reached or does not accept the login."""
    try:
        nodes = Nodes(parse_url(settings["url"]).seeds, Login.from_settings(settings))
    except ConfigError as error:
        # A file was replaced after the start of the server.
        raise StoreError(str(error)) from error
    return RedisClient(nodes, settings["ttl_s"])


class RedisClient(StoreClient):
    """Values in the store of ``nodes``. ``ttl_s``: they expire so many seconds after they were put."""

    def __init__(
        self,
        nodes: Nodes,
        ttl_s: int | None = None,
        *,
        lookup_timeout_s: float = LOOKUP_TIMEOUT_S,
        transfer_timeout_s: float = TRANSFER_TIMEOUT_S,
    ) -> None:
        self._nodes = nodes
        self._ttl_s = ttl_s
        self._lookup_timeout_s = lookup_timeout_s
        self._transfer_timeout_s = transfer_timeout_s
        options = (b"NX",) if ttl_s is None else (b"NX", b"EX", b"%d" % ttl_s)
        self._num_words = 3 + len(options)
        self._options = b"".join(b"\r\n$%d\r\n%b" % (len(option), option) for option in options) + b"\r\n"

    def exists(self, names: Sequence[str]) -> list[Outcome]:
        return self._numbers(b"EXISTS", names, Ability.READ)

    def remove(self, names: Sequence[str]) -> list[Outcome]:
        return self._numbers(b"UNLINK", names, None)

    def _numbers(self, word: bytes, names: Sequence[str], ability: Ability | None) -> list[Outcome]:
        """Runs a command that answers how many of its names, one, there are."""
        call = _Call(
            names,
            lambda index: [command(word, names[index].encode())],
            lambda index, stream: _count_answer(stream.reply()),
            ability,
            time.monotonic() + self._lookup_timeout_s,
        )
        return self._run(call)

    def get(self, names: Sequence[str], buffers: Sequence[Sequence[ByteArray]]) -> list[Outcome]:
        views = [[part.data for part in parts] for parts in buffers]

        def answer(index: int, stream: Stream) -> Answer:
            reply = stream.reply_into(views[index])
            if isinstance(reply, ErrorReply):
                # A value that is no string.
                return Outcome.OTHER_SIZE if reply.code == "WRONGTYPE" else reply
            if reply is None:
                return Outcome.MISSING
            return Outcome.OK if reply == _nbytes(views[index]) else Outcome.OTHER_SIZE

        deadline = time.monotonic() + self._transfer_timeout_s
        most = max(map(_nbytes, views), default=0)
        requests = [[command(b"GET", name.encode())] for name in names]
        return self._run(_Call(names, requests.__getitem__, answer, Ability.READ, deadline, most))

    def put(self, names: Sequence[str], buffers: Sequence[Sequence[ByteArray]]) -> list[Outcome]:
        views = [[part.data for part in parts] for parts in buffers]

        def request(index: int) -> list[Buffer]:
            name = names[index].encode()
            head = (self._num_words, len(name), name, _nbytes(views[index]))
            return [b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % head, *views[index], self._options]

        def answer(index: int, stream: Stream) -> Answer:
            reply = stream.reply()
            if isinstance(reply, ErrorReply):
                return Outcome.FULL if reply.code == "OOM" else reply
            if reply is None:
                return Outcome.HELD
            return Outcome.OK if reply == b"OK" else None

        deadline = time.monotonic() + self._transfer_timeout_s
        most = max(map(_nbytes, views), default=0)
        return self._run(_Call(names, request, answer, Ability.WRITE, deadline, most))

    def _run(self, call: _Call) -> list[Outcome]:
        parts = self._nodes.split(call.names)
        for left, (address, indexes) in zip(range(len(parts), 0, -1), parts.items(), strict=True):
            self._converse(call, address, indexes, left)
        # Once more, for the names that are at other nodes now.
        redirected = call.take_redirected()
        for left, (redirect, indexes) in zip(range(len(redirected), 0, -1), redirected.items(), strict=True):
            self._converse(call, redirect.address, indexes, left, redirect.asks)
        for redirect in call.take_redirected():
            call.note(
                f"{redirect.address}: names were redirected twice and are misses; the Cluster's map is read again"
            )
        if call.away and self._nodes.works_in_part(call.ability):
            for index in call.away:
                call.outcomes[index] = Outcome.AWAY
        if call.problems:
            words = "; ".join(call.problems)
            if call.outcomes and all(outcome is Outcome.FAILED for outcome in call.outcomes):
                raise StoreError(words)
            print(words, file=sys.stderr, flush=True)
        return call.outcomes

    def _converse(
        self, call: _Call, address: Address, indexes: Sequence[int], num_nodes: int, asks: bool = False
    ) -> None:
        """Sends the commands about the names at ``indexes`` to a node, the first of ``num_nodes`` that share the time
        that is left, and takes its replies."""
        if address == NOWHERE or self._nodes.rests(address):
            why = self._nodes.health.why_away(address)
            rests = f"{address}: {why}; its blocks are misses, and it gets no requests until it answers a test"
            call.note(NO_ADDRESS if address == NOWHERE else rests)
            call.away.update(indexes)
            self._nodes.note_lost()
            return
        refusal = self._nodes.health.refusal(address) if call.ability is Ability.WRITE else None
        if refusal is not None:
            call.note(f"{address}: it refused writes, and is given none for a few seconds; its blocks are read")
            call.away.update(indexes)
            for index in indexes:
                call.outcomes[index] = refusal
            return
        if time.monotonic() >= call.deadline:
            call.note(f"{address}: no time left after other nodes of this request; its blocks are misses")
            return
        before: Sequence[int] = ()
        begun = time.monotonic()
        deadline = share_of(call.deadline, num_nodes)
        try:
            with self._nodes.node(address).connection(deadline, self._nodes.silence_s) as stream:
                # While the server works on some, the next are on their way.
                for group in [*call.groups(indexes), ()]:
                    if group:
                        stream.send([part for index in group for part in call.command(index, asks)])
                    for index in before:
                        self._take(call, index, stream, address, asks)
                    before = group
        except StoreError as error:
            call.away.update(index for index in indexes if call.outcomes[index] is Outcome.FAILED)
            self._nodes.note_lost()
            has_hung = time.monotonic() - begun > (deadline - begun) / 2
            self._nodes.note_failed(address, call.names[indexes[0]], str(error).removeprefix(f"{address}: "), has_hung)
            # Other errors name the address.
            call.note(f"{address}: {error}" if isinstance(error, Lost) else str(error))

    def _take(self, call: _Call, index: int, stream: Stream, address: Address, asks: bool) -> None:
        if asks and stream.reply() != b"OK":
            raise Lost("malformed reply: it does not fit the command")
        answer = call.answer(index, stream)
        if answer is None:
            raise Lost("malformed reply: it does not fit the command")
        if isinstance(answer, Outcome):
            call.outcomes[index] = answer
            if call.ability is Ability.WRITE:
                self._note_write(call, index, address, answer)
            return
        redirect = _redirect(answer, address) if self._nodes.is_cluster else None
        if redirect is None or not redirect.asks:
            self._nodes.note_stale()
        if redirect is None:
            # A new connection may reach another server, which works.
            stream.is_sound = False
            problem = explain(answer)
            call.note(f"{address}: {problem}")
            if call.ability is Ability.WRITE:
                self._note_write(call, index, address, Outcome.FAILED)
            elif call.ability is Ability.READ and answer.code not in ("MOVED", "ASK"):
                call.away.add(index)
                self._nodes.note_failed(address, call.names[index], problem)
        elif redirect in call.redirected or len(call.redirected) < MAX_REDIRECTS:
            call.redirected.setdefault(redirect, []).append(index)
        else:
            call.note(f"{address}: it redirects names to more than {MAX_REDIRECTS} other nodes; the rest are misses")

    def _note_write(self, call: _Call, index: int, address: Address, outcome: Outcome) -> None:
        if not self._nodes.is_cluster:
            return
        if outcome in (Outcome.FULL, Outcome.FAILED):
            call.away.add(index)
            self._nodes.health.refused(address, outcome)
        else:
            self._nodes.health.wrote(address)

    def advice(self) -> str:
        """Returns a warning about the memory limit of the store. Asks one node, if the user may do that."""
        node = self._nodes.first
        try:
            with node.connection(time.monotonic() + LOOKUP_TIMEOUT_S) as stream:
                stream.send([command(b"INFO", b"memory")])
                reply = stream.reply(MAX_INFO_BYTES)
        except StoreError:
            return ""
        text = reply.decode("ascii", "replace") if isinstance(reply, bytes) else ""
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        limit, policy = fields.get("maxmemory", ""), fields.get("maxmemory_policy", "")
        if limit == "0":
            return (
                f"{node.address} has no memory limit, and may take all memory of its machine; set maxmemory there, and "
                "maxmemory-policy allkeys-lru, so that it evicts what is not used"
            )
        evicts_none = policy == "noeviction" or (policy.startswith("volatile") and self._ttl_s is None)
        if re.fullmatch("[0-9]{1,18}", limit) and evicts_none:
            return (
                f"{node.address} stores nothing new once its {format_bytes(int(limit))} are full, because "
                f"maxmemory-policy is {printable(policy, MAX_LINE_CHARS)}; set allkeys-lru, so that it evicts what is "
                "not used"
            )
        return ""

    def close(self) -> None:
        self._nodes.close()


@dataclass(frozen=True, slots=True)
class _Redirect:
    """Another node that has a name. ``asks``: only for now, and each command must be announced."""

    address: Address
    asks: bool


Answer: TypeAlias = Outcome | ErrorReply | None
"""None: a reply that does not fit."""


@dataclass(slots=True)
class _Call:
    """One call of the client, with the outcomes and problems so far. ``request`` returns the bytes of the command about
    the name at an index, ``answer`` reads its reply. ``ability``: that of a node about which its errors say something.
    ``value_bytes``: the size of the largest value."""

    names: Sequence[str]
    request: Callable[[int], Sequence[Buffer]]
    answer: Callable[[int, Stream], Answer]
    ability: Ability | None
    deadline: float
    value_bytes: int = 0
    outcomes: list[Outcome] = field(init=False)
    away: set[int] = field(default_factory=set)
    """The indexes of names whose node does not work, or takes no writes."""
    problems: dict[str, None] = field(default_factory=dict)
    redirected: dict[_Redirect, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.outcomes = [Outcome.FAILED] * len(self.names)

    def command(self, index: int, asks: bool) -> Sequence[Buffer]:
        return [_ASKING, *self.request(index)] if asks else self.request(index)

    def groups(self, indexes: Sequence[int]) -> Iterator[Sequence[int]]:
        """Yields the indexes of commands that are sent at once."""
        step = MAX_COMMANDS
        if self.value_bytes:
            step = max(1, min(step, MAX_VALUE_BYTES_SENT // self.value_bytes))
        for start in range(0, len(indexes), step):
            yield indexes[start : start + step]

    def note(self, problem: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems[problem] = None

    def take_redirected(self) -> dict[_Redirect, list[int]]:
        redirected, self.redirected = self.redirected, {}
        return redirected


_ASKING = command(b"ASKING")


def _count_answer(reply: Reply) -> Answer:
    if isinstance(reply, ErrorReply):
        return reply
    if reply == 1:
        return Outcome.OK
    return Outcome.MISSING if reply == 0 else None


def _redirect(error: ErrorReply, asked: Address) -> _Redirect | None:
    """Returns the node to which ``error``, an answer of ``asked``, redirects; None if it does not."""
    words = error.text.split()
    if error.code not in ("MOVED", "ASK") or len(words) != 3:
        return None
    address = parse_address(words[2], asked)
    return None if address is None else _Redirect(address, error.code == "ASK")


def _nbytes(views: Sequence[memoryview]) -> int:
    return sum(len(view) for view in views)

"""Nodes: the servers of a store, the connections to them, and which of them has which name."""

from __future__ import annotations

import binascii
import bisect
import math
import random
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvoffload.abc import Ability
from kvoffload.tiers.redis.location import NOWHERE, Address, node_address
from kvoffload.tiers.redis.login import Login, explain
from kvoffload.tiers.redis.node_health import NodeHealth
from kvoffload.tiers.redis.stream import ErrorReply, Lost, Reply, Stream, command
from kvoffload.tiers.remote.client import StoreError

NUM_SLOTS = 16384
"""Parts of the names of a Cluster; each part belongs to one node."""
MAX_NODES = 1024
"""Nodes of a Cluster, replicas included. Redis is made for 1,000."""
MAX_MAP_BYTES = 8 << 20
"""The longest answer about which node has which part: 16,384 parts, or fewer with many replicas."""
MAX_CONNECTIONS = 6
"""Connections per server: as many as threads use a client."""
MAX_IDLE_CONNECTIONS = 256
"""Connections that all servers together keep while they are not used, or one per server."""
MAX_ASKED = 4
"""Nodes that are asked for the map of a Cluster, one after the other, until one answers."""
REFRESH_TIMEOUT_S = 0.5
"""Time for each of them after the start, within the time of a lookup."""
NO_ADDRESS = (
    "the Cluster names nodes without an address that can be used; set cluster-announce-hostname on each node, or "
    "cluster-preferred-endpoint-type ip"
)


@dataclass(frozen=True, slots=True)
class NodeTimes:
    """Times in seconds for the nodes of a store."""

    start_timeout_s: float = 3.0
    """Until a node answers the first question about the map."""
    refresh_pause_s: float = 1.0
    """Between two questions about the map."""
    silence_s: float = 0.5
    """A node of a Cluster that lets a request wait for longer is away, until a test finds that it answers."""
    server_rest_s: float = 1.0
    """How long a server that is no Cluster, and did not answer in time, is not asked: calls that waited behind the
    failed one would outlast their deadlines."""
    max_idle_s: float = 60.0
    """A connection that was idle for longer is not used again: firewalls drop such connections silently."""


class Node:
    """Connections to one server, MAX_CONNECTIONS at most. Up to ``max_idle`` unused connections stay open for
    ``max_idle_s``."""

    def __init__(self, address: Address, login: Login, max_idle: int = 0, max_idle_s: float = 0.0) -> None:
        self.address = address
        self._login = login
        self._max_idle = max_idle
        self._max_idle_s = max_idle_s
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._idle: list[Stream] = []
        """Used last to first. Appending to a list and popping from it are atomic."""

    @contextmanager
    def connection(self, deadline: float, silence_s: float = math.inf) -> Iterator[Stream]:
        """Returns a context with a connection on which the server is silent for ``silence_s`` at most. It is closed
        afterwards if an exception leaves the context, or if it is not sound any more. Raises StoreError."""
        if not self._free.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise StoreError(f"{self.address}: all {MAX_CONNECTIONS} connections are in use")
        try:
            stream = self._take_idle()
            if stream is None:
                stream = self._login.connect(self.address, min(deadline, time.monotonic() + silence_s))
            stream.deadline, stream.silence_s = deadline, silence_s
            try:
                yield stream
            except BaseException:
                stream.close()
                raise
            if stream.is_sound and len(self._idle) < self._max_idle:
                stream.idle_since = time.monotonic()
                self._idle.append(stream)
            else:
                stream.close()
        finally:
            self._free.release()

    def _take_idle(self) -> Stream | None:
        while self._idle:
            stream = self._idle.pop()
            if not stream.has_unread and time.monotonic() - stream.idle_since < self._max_idle_s:
                return stream
            stream.close()
        return None

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


class Nodes:
    """The servers of a store that is reached through ``seeds``: one server, or the nodes of a Cluster that have parts
    of its names. Several threads may use it. Raises StoreError if none of the seeds can be reached."""

    def __init__(self, seeds: Sequence[Address], login: Login, times: NodeTimes | None = None) -> None:
        self._login = login
        self._times = times or NodeTimes()
        self._seeds = list(seeds)
        self._known = frozenset(seeds)
        """The seeds, and all nodes of the Cluster. Connections to others are not kept."""
        self._nodes: dict[Address, Node] = {}
        self._map: tuple[list[int], list[Address]] = ([], [])
        """The last slots of ranges, in order, and their owners. Without slots, the store is no Cluster, and has one
        owner."""
        self._is_stale = False
        """Whether the map may be wrong."""
        self._not_before = 0.0
        self._rests_until = 0.0
        """Until when a server that is no Cluster is not asked."""
        self.health = NodeHealth(self._test)
        """The health of the nodes of a Cluster."""
        self._refreshing = threading.Lock()
        self._ask(self._seeds, self._times.start_timeout_s)

    @property
    def is_cluster(self) -> bool:
        return bool(self._map[0])

    @property
    def first(self) -> Node:
        """The server that is not part of a Cluster, or any node."""
        return self.node(next(owner for owner in self._map[1] if owner != NOWHERE))

    def node(self, address: Address) -> Node:
        found = self._nodes.get(address)
        if found is not None:
            return found
        if address not in self._known:
            return Node(address, self._login)
        max_idle = max(1, min(MAX_CONNECTIONS, MAX_IDLE_CONNECTIONS // len(self._known)))
        return self._nodes.setdefault(address, Node(address, self._login, max_idle, self._times.max_idle_s))

    def split(self, names: Sequence[str]) -> dict[Address, list[int]]:
        """Returns the indexes of the names that each node has; NOWHERE has those of nodes without an address."""
        if self._is_stale:
            self._refresh()
        ends, owners = self._map
        if not ends:
            return {owners[0]: list(range(len(names)))}
        parts: dict[Address, list[int]] = {}
        for index, name in enumerate(names):
            at = bisect.bisect_left(ends, binascii.crc_hqx(name.encode(), 0) % NUM_SLOTS)
            parts.setdefault(owners[min(at, len(owners) - 1)], []).append(index)
        return parts

    def note_stale(self) -> None:
        """A server has answered with an error that is not about a value: others may have its names now."""
        self._is_stale = True

    def note_lost(self) -> None:
        """A server did not answer: others of its Cluster may have its names now."""
        self._is_stale |= self.is_cluster

    @property
    def silence_s(self) -> float:
        """How long a server may let a request wait within the deadline."""
        return self._times.silence_s if self.is_cluster else math.inf

    def note_failed(self, address: Address, name: str, problem: str, has_hung: bool = False) -> None:
        """A server did not answer for ``name``, or with an error. The time of the next calls belongs to the others."""
        if self.is_cluster:
            if address in self._known:
                self.health.failed(address, name, problem)
                # They may have logged in before the password was changed, or lead to a server that is gone.
                self.node(address).close()
        elif has_hung:
            self._rests_until = time.monotonic() + self._times.server_rest_s

    def rests(self, address: Address) -> bool:
        """Returns whether a server is not asked now."""
        return self.health.is_away(address) if self.is_cluster else time.monotonic() < self._rests_until

    def works_in_part(self, ability: Ability | None) -> bool:
        """Returns whether some node of a Cluster works, or takes writes if that is asked for."""
        return self.is_cluster and any(self.health.works(each, ability) for each in set(self._map[1]) - {NOWHERE})

    def _test(self, address: Address, name: str) -> bool:
        try:
            with self.node(address).connection(time.monotonic() + self._times.silence_s) as stream:
                stream.send([command(b"EXISTS", name.encode())])
                reply = stream.reply()
                return not isinstance(reply, ErrorReply) or reply.code in ("MOVED", "ASK")
        except StoreError:
            return False

    def _refresh(self) -> None:
        if time.monotonic() < self._not_before or not self._refreshing.acquire(blocking=False):
            return
        try:
            self._not_before = time.monotonic() + self._times.refresh_pause_s
            self._is_stale = False
            # Random nodes, because a node that left the Cluster still answers from its old map, and always a seed,
            # whose name may lead to another server now. Nodes that are away are asked last.
            others = self._known.difference(self._seeds)
            chosen = random.sample(sorted(others), min(MAX_ASKED - 1, len(others)))
            chosen += random.sample(self._seeds, min(MAX_ASKED - len(chosen), len(self._seeds)))
            random.shuffle(chosen)
            self._ask(sorted(chosen, key=self.rests), REFRESH_TIMEOUT_S)
        except StoreError:
            self._is_stale = True
        finally:
            self._refreshing.release()

    def _ask(self, addresses: Iterable[Address], timeout_s: float) -> None:
        """Asks the first of ``addresses`` that answers whether it is part of a Cluster, and which. Each has
        ``timeout_s``."""
        problems = []
        for _, address in zip(range(MAX_ASKED), addresses, strict=False):
            try:
                with self.node(address).connection(time.monotonic() + timeout_s) as stream:
                    stream.send([command(b"CLUSTER", b"SLOTS")])
                    reply = stream.reply(MAX_MAP_BYTES)
                self._take(reply, address)
                return
            except StoreError as error:
                # Other errors name the address.
                problems.append(f"{address}: {error}" if isinstance(error, Lost) else str(error))
        raise StoreError("; ".join(problems))

    def _take(self, reply: Reply, asked: Address) -> None:
        if isinstance(reply, ErrorReply):
            if reply.code not in ("ERR", "NOPERM"):
                raise StoreError(f"{asked}: {explain(reply)}")
            # It is no Cluster, or the user may not ask. Then other nodes are named in errors, which say so.
            is_other = self.is_cluster and "cluster support disabled" not in reply.text
            if self._seeds != [asked] or is_other:
                raise StoreError(f"{asked} does not answer as a node of a Cluster ({reply.text}); name one server")
            self._learn([], [asked])
            return
        parts = sorted(_parts(reply, asked))
        if not parts:
            raise StoreError(f"{asked}: its Cluster has no nodes with slots yet")
        if all(nodes[0] == NOWHERE for _, nodes in parts):
            raise StoreError(f"{asked}: {NO_ADDRESS}")
        self._learn([end for end, _ in parts], [nodes[0] for _, nodes in parts], *(nodes for _, nodes in parts))

    def _learn(self, ends: list[int], owners: list[Address], *nodes: list[Address]) -> None:
        known = frozenset(self._seeds).union(*nodes) - {NOWHERE}
        if len(known) > MAX_NODES + len(self._seeds):
            raise StoreError(f"{owners[0]}: its Cluster has {len(known)} nodes, and {MAX_NODES} is the most")
        self._known, self._map = known, (ends, owners)
        for address in list(self._nodes):
            if address not in known:
                self._nodes.pop(address).close()
        self.health.keep(known)

    def close(self) -> None:
        self.health.close()
        for node in list(self._nodes.values()):
            node.close()


def share_of(deadline: float, num_nodes: int) -> float:
    """Returns the deadline of the first of so many nodes that are asked one after the other: a node that hangs leaves
    the others their time."""
    now = time.monotonic()
    return now + (deadline - now) / num_nodes


def _parts(reply: Reply, asked: Address) -> Iterator[tuple[int, list[Address]]]:
    """Yields the last slot of each range, and the nodes that have it, its owner first: NOWHERE if that is named by no
    address. Raises StoreError."""
    for part in reply if isinstance(reply, list) else []:
        match part:
            case [int(), int(end), owner, *replicas]:
                others = (_described(each, asked) for each in replicas)
                yield end, [_described(owner, asked), *(node for node in others if node != NOWHERE)]
            case _:
                raise StoreError(f"{asked}: its answer about the Cluster's slots cannot be read")


def _described(node: Reply, asked: Address) -> Address:
    match node:
        case [bytes() | None as host, int(port), *_]:
            return node_address((host or b"").decode("ascii", "replace"), port, asked) or NOWHERE
    return NOWHERE

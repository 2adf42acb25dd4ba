"""NodeHealth: which nodes of a Cluster do not work now, and which of them refuse writes only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from kvoffload.abc import Ability
from kvoffload.tiers.redis.location import Address
from kvoffload.tiers.remote.client import Outcome

FIRST_TEST_S = 0.1
MAX_TEST_PAUSE_S = 2.0
"""The first and the longest pause between two tests of the nodes that are away."""
MAX_TESTERS = 8
"""Nodes that are tested at once."""
FIRST_REST_S = 1.0
MAX_REST_S = 6.0
"""How long a node that refused a write is given no more: at first, and at most."""


class _Refusal(NamedTuple):
    outcome: Outcome
    until: float
    rest_s: float


class NodeHealth:
    """The health of the nodes of a Cluster. Names of a node that is away are absent until ``test``, which is called
    with its address and one of its names, returns True. A thread calls it, so no request waits for a test. A node that
    refuses writes is read, and given the writes of a later call as a test. Several threads may use it.
    """

    def __init__(self, test: Callable[[Address, str], bool]) -> None:
        self._test = test
        self._away: dict[Address, tuple[str, str]] = {}
        """Each with a name that it did not answer for, and why."""
        self._refusals: dict[Address, _Refusal] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_testing = False
        self._is_closed = False

    def is_away(self, address: Address) -> bool:
        return address in self._away

    def why_away(self, address: Address) -> str:
        return self._away.get(address, ("", "no answer in time"))[1]

    def refusal(self, address: Address) -> Outcome | None:
        """Returns how a node has refused writes, if it is given none now."""
        refusal = self._refusals.get(address)
        return None if refusal is None or time.monotonic() >= refusal.until else refusal.outcome

    def works(self, address: Address, ability: Ability | None) -> bool:
        """Returns whether a node answers, and takes writes if that is asked for."""
        return address not in self._away and (ability is not Ability.WRITE or address not in self._refusals)

    def failed(self, address: Address, name: str, problem: str) -> None:
        """A node has not answered for ``name``, or with an error."""
        with self._lock:
            self._away[address] = name, problem
            starts, self._is_testing = not self._is_testing and not self._is_closed, True
        if starts:
            threading.Thread(target=self._run, name="kvoffload-nodes", daemon=True).start()

    def refused(self, address: Address, outcome: Outcome) -> None:
        """A node has refused a write with ``outcome``, and is given none for a while."""
        before, now = self._refusals.get(address), time.monotonic()
        if before is None or now >= before.until:
            rest_s = FIRST_REST_S if before is None else min(MAX_REST_S, 2 * before.rest_s)
            self._refusals[address] = _Refusal(outcome, now + rest_s, rest_s)

    def wrote(self, address: Address) -> None:
        """A node has taken a write."""
        if self._refusals:
            self._refusals.pop(address, None)

    def keep(self, known: Collection[Address]) -> None:
        """Forgets all nodes but ``known``."""
        with self._lock:
            for states in (self._away, self._refusals):
                for address in [each for each in states if each not in known]:
                    states.pop(address, None)

    def close(self) -> None:
        self._is_closed = True
        self._wake.set()

    def _run(self) -> None:
        """Tests the nodes that are away until none is left."""
        pause_s = FIRST_TEST_S
        with ThreadPoolExecutor(MAX_TESTERS, "kvoffload-node") as testers:
            while not self._wake.wait(pause_s):
                pause_s = min(MAX_TEST_PAUSE_S, 2 * pause_s)
                away = dict(self._away)
                names = [name for name, _ in away.values()]
                for address, works in zip(away, testers.map(self._test, away, names), strict=True):
                    if works:
                        self._away.pop(address, None)
                with self._lock:
                    if not self._away:
                        self._is_testing = False
                        return

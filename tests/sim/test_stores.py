"""Simulated processes of a store's client."""

from __future__ import annotations

from random import Random

import numpy as np

from kvoffload.tiers.remote.messages import Op, StoreRequest
from kvoffload.tiers.remote.record import ValueFormat
from kvoffload.tiers.remote.worker import StoreWorker, ValueMemory
from tests.clock import Clock
from tests.sim.stores import ClientState, SimulatedClient, SimulatedStarter, SimulatedStore, StoreFaults

SEEDS = 50


def test_no_thread_of_a_process_that_has_crashed_goes_on() -> None:
    """It would find its process ended, and wait for its own end."""
    num_open = 0
    for seed in range(SEEDS):
        clock, pools = Clock(1000.0), [np.zeros((8, 64), dtype=np.uint8)]
        store = SimulatedStore(clock)
        state = ClientState(
            object(),
            lambda: StoreFaults(crash=0.2),
            Random(seed),
            lambda: starter.pause(),  # noqa: B023
            lambda seconds: None,
        )
        starter = SimulatedStarter(
            lambda: StoreWorker(SimulatedClient(store, state), ValueMemory(pools), ValueFormat("0f" * 32, "kv")),  # noqa: B023
            clock,
            seed,
            chance=0.95,
        )
        process = starter.start()
        process.poll()
        for number in range(8):
            keys = [bytes([number, i]) * 18 for i in range(4)]
            assert process.submit(StoreRequest(number, Op.WRITE, keys, list(range(4))))
        while starter.process is not None and not starter.process.has_crashed and not starter.is_idle:
            starter.tick()
        assert starter.process is not None
        num_open += starter.process.has_crashed and starter.process.num_open > 0
        starter.end()
    assert num_open > SEEDS / 4, "none was under way"

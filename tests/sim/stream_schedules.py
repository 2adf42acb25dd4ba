"""Schedules of the CUDA transfer: the model engine with the real connector and CudaTransfer on simulated streams.

A schedule is an engine, its workload, and the moments at which streams, helper threads and registrations make progress,
all chosen by a seed. These laws must hold:

- every byte that a request attends to is its own, when the forward pass runs on the device;
- a job that is reported as done has copied the bytes that it had to;
- no two accesses to a byte race, whenever they run: by streams, and by the host after a report;
- the device is used as its contract says: addresses, alignment, registered memory, no bytes that were never written;
- all requests end, nothing is left pinned or in flight, and the connector is never switched off.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random

from kvoffload.abc import KVGroup
from tests.sim.engine import ModelEngine, Scenario
from tests.sim.ranks import Rank
from tests.sim.stream_ranks import LOOPS, MakeTransfer, StreamPlan, StreamRank

MAX_REQUESTS = 8


def plan(seed: int) -> tuple[Scenario, StreamPlan]:
    """Returns the engine, its workload and its devices."""
    rng = Random(seed)
    devices = StreamPlan.random(rng)
    scenario, is_replicated = Scenario.random_without_heads(seed), rng.random() < 0.15
    return (
        dataclasses.replace(
            scenario,
            num_requests=min(scenario.num_requests, MAX_REQUESTS),
            # Requests repeat prompts that the device does not keep, so that many load.
            num_documents=1,
            document_tokens=min(scenario.document_tokens, 10 * scenario.block_size + rng.randint(0, 7)),
            max_new_tokens=min(scenario.max_new_tokens, 4),
            max_tokens_per_step=max(scenario.max_tokens_per_step, 12),
            prefix_caching=rng.random() < 0.3,
            num_host_blocks=max(scenario.num_host_blocks, rng.choice((8, 32))),
            store_threshold=None,
            tensor_parallel=scenario.tensor_parallel or is_replicated,
            num_ranks=2 if is_replicated else scenario.num_ranks,
            # As with MLA: all ranks hold the same KV.
            replicas=2 if is_replicated else scenario.replicas,
            async_scheduling=rng.random() < 0.6,
            sleep_chance=rng.choice((0.0, 0.0, 0.0, 0.05)),
        ),
        devices,
    )


def run_schedule(
    seed: int,
    make_transfer: MakeTransfer = LOOPS["plain"],
    patch: Callable[[ModelEngine], None] | None = None,
    change: Callable[[StreamPlan], StreamPlan] = lambda devices: devices,
) -> Counter[str]:
    """Runs the schedule of ``seed`` and returns what happened. Raises an error if a law is broken.

    ``make_transfer`` may plant a bug in the transfer or the device, ``patch`` one elsewhere. ``change`` returns other
    devices for the same workload.
    """
    scenario, devices = plan(seed)
    devices = change(devices)
    ranks: list[StreamRank] = []

    def make_rank(s: Scenario, groups: Sequence[KVGroup], number: int, _: float, others: Sequence[Rank]) -> Rank:
        leader = None if s.leader_of(number) == number else others[s.leader_of(number)]
        ranks.append(StreamRank(s, groups, number, devices, make_transfer, leader))
        return ranks[-1]

    engine = ModelEngine(scenario, patch, make_rank=make_rank)
    engine.run()
    seen = Counter({"schedules": 1, "steps": engine.steps, "tokens loaded": engine.hits})
    seen[f"schedules with the {devices.layout.name.lower()} layout"] = 1
    for rank in ranks:
        seen += rank.seen()
        seen["ranks that load what another stores"] += rank.leader is not None
    return seen


def run_loops(seed: int) -> Counter[str]:
    """Runs the schedule of ``seed`` with each loop and returns what happened."""
    seen: Counter[str] = Counter()
    for name, make_transfer in LOOPS.items():
        counts = run_schedule(seed, make_transfer)
        seen += counts
        seen[f"schedules of the {name} loop"] += 1
    return seen

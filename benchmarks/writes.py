"""Which blocks reach a disk that is too slow for all of them: complete prompts, and blocks that no lookup finds.

The clock, the engine and the disk, which writes a fixed number of blocks per second, are simulated; the scheduler half
and the managers are real. So a run gives the same figures on any machine. The engine computes one prompt after the
other, or several at a time; the bandwidth of the disk is a percentage of what writing every block would take.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvoffload.abc import KVGroup, LookupState, OffloadKey, ScheduledStep
from kvoffload.cache.keys import make_offload_key
from kvoffload.cache.manager import LRUOffloadingManager
from kvoffload.cache.slots import HostBackend
from kvoffload.connector.engine import EngineSpec
from kvoffload.connector.messages import WorkerReport
from kvoffload.connector.scheduler import OffloadingConnectorScheduler
from kvoffload.lab.tier import CatalogTier
from kvoffload.tiering.manager import TieredOffloadingManager, TieringSettings

BLOCK_TOKENS = 16
STEP_S = 0.02
BLOCKS_PER_STEP = 64
RUNNING = (1, 16)
"""Prompts computed at a time."""
PROMPT_BLOCKS = 256
HOST_BLOCKS = 16 * PROMPT_BLOCKS
LONG_PROMPT_BLOCKS = HOST_BLOCKS // 2
MAX_IDLE_STEPS = 10_000
BANDWIDTHS = (25, 50, 75, 100, 150)
"""Percent of the bandwidth that writing every block takes."""


@dataclass(eq=False)
class Prompt:
    """A request that ends when its prompt is computed."""

    request_id: str
    block_hashes: list[bytes]
    num_computed_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    kv_transfer_params: Mapping[str, Any] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.block_hashes) * BLOCK_TOKENS

    @property
    def keys(self) -> list[OffloadKey]:
        return [make_offload_key(name, 0) for name in self.block_hashes]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self.block_ids,)


class Engine:
    """Computes ``prompts``, at most ``max_running`` at a time, and writes what the disk takes."""

    def __init__(self, prompts: list[Prompt], max_running: int, blocks_per_s: float) -> None:
        self.max_running = max_running
        self.now = 0.0
        self.prompts = prompts
        num_blocks = sum(len(prompt.block_hashes) for prompt in prompts)
        self.tier = CatalogTier(num_blocks, 1, "lru", self.clock, blocks_per_s)
        self.host = LRUOffloadingManager(HostBackend(BLOCK_TOKENS, HOST_BLOCKS))
        self.manager = TieredOffloadingManager(
            self.host, [self.tier], TieringSettings([BLOCK_TOKENS]), clock=self.clock
        )
        engine = EngineSpec([KVGroup(BLOCK_TOKENS)])
        self.scheduler = OffloadingConnectorScheduler(self.manager, engine, clock=self.clock)
        self._next_block = 1

    def clock(self) -> float:
        return self.now

    def run(self, blocks_per_step: int, drain: bool) -> None:
        """Runs all prompts. With ``drain``, idle steps follow while the scheduler half has work."""
        waiting, running = deque(self.prompts), list[Prompt]()
        while waiting or running:
            while waiting and len(running) < self.max_running:
                running.append(waiting.popleft())
                self.scheduler.get_num_new_matched_tokens(running[-1], 0)
                self.scheduler.update_state_after_alloc(running[-1], running[-1], 0)
            share = max(1, blocks_per_step // len(running))
            self.step({prompt: min(share, len(prompt.block_hashes) - len(prompt.block_ids)) for prompt in running})
            for prompt in [prompt for prompt in running if prompt.num_computed_tokens == prompt.num_tokens]:
                running.remove(prompt)
                self.scheduler.request_finished(prompt)
        self.step({})
        for _ in range(MAX_IDLE_STEPS if drain else 0):
            if not self.scheduler.has_pending_work():
                break
            self.step({})
        self.now += 1e6
        self.manager.poll()
        assert not self.scheduler.off

    def step(self, blocks: Mapping[Prompt, int]) -> None:
        self.now += STEP_S
        new, ids = set(), {}
        for prompt, n in blocks.items():
            if not prompt.block_ids:
                new.add(prompt.request_id)
            ids[prompt.request_id] = (list(range(self._next_block, self._next_block + n)),)
            prompt.block_ids += ids[prompt.request_id][0]
            self._next_block += n
        scheduled = {prompt.request_id: n * BLOCK_TOKENS for prompt, n in blocks.items()}
        meta = self.scheduler.build_connector_meta(ScheduledStep(scheduled, ids, frozenset(new)))
        for prompt, n in blocks.items():
            prompt.num_computed_tokens += n * BLOCK_TOKENS
        self.scheduler.update_connector_output(WorkerReport(done=dict.fromkeys(meta.stores, 1)))


@dataclass(frozen=True)
class Outcome:
    """The contents of the disk at the end."""

    what: str
    prompts: int
    whole: int
    written: int
    unreachable: int
    """Blocks on disk behind a missing one."""
    dropped: int
    """Blocks that are neither on disk nor in host memory."""


def run(
    what: str, num_prompts: int, prompt_blocks: int, max_running: int, percent: float, blocks_per_step: int, drain: bool
) -> Outcome:
    rng = random.Random(0)
    prompts = [Prompt(f"r{i}", [rng.randbytes(32) for _ in range(prompt_blocks)]) for i in range(num_prompts)]
    engine = Engine(prompts, max_running, percent / 100 * BLOCKS_PER_STEP / STEP_S)
    engine.run(blocks_per_step, drain)
    whole = written = unreachable = dropped = 0
    for prompt in prompts:
        on_disk = engine.tier.contains(prompt.keys) == LookupState.HIT
        in_host = engine.host.table.states(prompt.keys) == LookupState.HIT
        reachable = len(on_disk) if on_disk.all() else int(on_disk.argmin())
        whole += bool(on_disk.all())
        written += int(on_disk.sum())
        unreachable += int(on_disk.sum()) - reachable
        dropped += int((~on_disk & ~in_host).sum())
    return Outcome(what, num_prompts, whole, written, unreachable, dropped)


def main(out: Path, quick: bool) -> None:
    num_prompts = 8 if quick else 160
    outcomes = [
        run(
            f"{percent}% of the bandwidth, {running} at a time",
            num_prompts,
            PROMPT_BLOCKS,
            running,
            percent,
            BLOCKS_PER_STEP,
            drain=False,
        )
        for running in RUNNING
        for percent in BANDWIDTHS
    ]
    # Two steps compute more than may be pinned for writes. Then the engine is idle.
    outcomes.append(run("idle disk, one long prompt", 1, LONG_PROMPT_BLOCKS, 1, 100, LONG_PROMPT_BLOCKS // 2, True))
    print(f"\nWrites to a slow disk: {num_prompts} prompts of {PROMPT_BLOCKS} blocks, a host of {HOST_BLOCKS:,} blocks")
    print(f"  {'disk':36} {'whole on disk':>14} {'written':>10} {'unreachable':>12} {'dropped':>10}")
    for each in outcomes:
        whole = f"{each.whole} of {each.prompts}"
        print(f"  {each.what:36} {whole:>14} {each.written:>10,} {each.unreachable:>12,} {each.dropped:>10,}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "writes.json").write_text(json.dumps({"rows": [asdict(each) for each in outcomes]}, indent=2) + "\n")

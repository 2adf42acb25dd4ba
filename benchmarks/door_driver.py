"""vLLM's scheduler half over one tier, driven without an engine. Needs vLLM."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from demo.vllm_servers import BLOCK_TOKENS, Server, offloading_scheduler

CHUNK_BYTES = 4096
HOST_CHUNKS = 2048
CHAIN_CHUNKS = 512
"""Chunks per prompt that the tiers hold."""
PAUSE_S = 0.03
"""Between two steps of a request."""
SHORT_PAUSE_S = 0.005
"""The same where many requests come one after the other."""
DEADLINE_S = 60.0


def entry(kind: str, folder: Path, nbytes: int) -> dict[str, Any]:
    """Returns the entry of ``secondary_tiers``."""
    if kind == "fs":
        return {"type": "fs", "root_dir": str(folder)}
    tier = {"kind": "disk", "dir": str(folder), "bytes": nbytes}
    return {"type": "KVOffloadTier", "module_path": "kvoffload.vllm.secondary_tier", "tier": tier}


def hashes(num_chunks: int, name: str) -> list[bytes]:
    return [hashlib.sha256(f"{name} {i}".encode()).digest() for i in range(num_chunks)]


class Door:
    """vLLM's scheduler half over one tier, and the time that it has taken."""

    def __init__(self, kind: str, folder: Path, nbytes: int) -> None:
        made = entry(kind, folder / kind, nbytes)
        size = HOST_CHUNKS * CHUNK_BYTES
        self.scheduler, _ = offloading_scheduler(TieringOffloadingSpec, Server(), folder / "models", made, size)
        self.manager = self.scheduler.manager
        (self.tier,) = self.manager.secondary_tiers
        self.cpu = self.wall = 0
        self.steps = self.count = self.block = self.loaded = 0

    def timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
        result = call(*arguments)
        self.cpu += time.thread_time_ns() - cpu
        self.wall += time.perf_counter_ns() - wall
        return result

    def step(self, new: Any = None, scheduled: int = 0, finished: Sequence[Any] = ()) -> None:
        """One step, in which ``new`` gets ``scheduled`` tokens. The workers' copies have ended before the next."""

        output = SchedulerOutput.make_empty()
        output.finished_req_ids = {request.request_id for request in finished}
        if new is not None:
            output.scheduled_new_reqs = [Scheduled(new.request_id, (self.new_blocks(new.num_tokens // BLOCK_TOKENS),))]
            output.num_scheduled_tokens = {new.request_id: scheduled}
        meta = self.timed(self.scheduler.build_connector_meta, output)
        done = OffloadingWorkerMetadata(dict.fromkeys([*meta.load_jobs, *meta.store_jobs], 1))
        self.timed(self.scheduler.update_connector_output, KVConnectorOutput(kv_connector_worker_meta=done))
        # vLLM asks for these in every step, too.
        self.timed(self.scheduler.get_stats)
        self.timed(lambda: list(self.scheduler.take_events()))
        self.timed(self.scheduler.has_pending_push_work)
        self.steps += 1

    def new_blocks(self, count: int) -> list[int]:
        self.block += count
        return list(range(self.block - count + 1, self.block + 1))

    def request(self, block_hashes: list[bytes], looks_up: bool = True) -> Any:
        """A request for a prompt with these hashes, as it arrives."""

        self.count += 1
        tokens = [0] * (BLOCK_TOKENS * len(block_hashes) + 1)
        request = Request(f"request-{self.count}", tokens, SamplingParams(max_tokens=1), None)
        request.block_hashes = block_hashes
        request.skip_reading_prefix_cache = not looks_up
        self.timed(self.scheduler.on_new_request, request)
        return request

    def match(self, request: Any) -> int:
        """Asks, step by step, for what can be loaded. Returns the number of chunks, whose load has ended."""

        deadline = time.monotonic() + DEADLINE_S
        while (found := self.timed(self.scheduler.get_num_new_matched_tokens, request, 0)[0]) is None:
            self.step()
            self.settle()
            assert time.monotonic() < deadline
        if found:
            blocks = KVCacheBlocks(([KVCacheBlock(i) for i in self.new_blocks(found // BLOCK_TOKENS)],))
            self.timed(self.scheduler.update_state_after_alloc, request, blocks, found)
        self.step()
        return int(found) // BLOCK_TOKENS

    def settle(self) -> None:
        """Gives the tier time, as the model does."""
        time.sleep(PAUSE_S)

    def end(self, request: Any) -> None:

        request.status = RequestStatus.FINISHED_ABORTED
        self.timed(self.scheduler.request_finished, request)
        self.step(finished=[request])

    def until_idle(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while self.timed(self.manager.has_pending_work):
            assert time.monotonic() < deadline
            time.sleep(0.001)
            self.step()

    # What is measured.

    def look_up_misses(self, n: int) -> None:
        request = self.request(hashes(n, f"unknown {self.count}"))
        assert self.match(request) == 0
        self.end(request)

    def load_hits(self, n: int) -> None:
        """Loads a chain that host memory has forgotten since it was stored."""
        self.loaded += 1
        request = self.request(hashes(CHAIN_CHUNKS, f"chain {self.loaded}")[:n])
        assert self.match(request) == n
        assert self.steps > 1, "it was in host memory"
        self.end(request)

    def store(self, n: int, name: str | None = None) -> None:
        """Stores the chunks of a prompt that is new, without a lookup."""
        request = self.request(hashes(n, name or f"new {self.count}"), looks_up=False)
        self.timed(self.scheduler.get_num_new_matched_tokens, request, 0)
        self.step(request, BLOCK_TOKENS * n)
        self.settle()
        self.end(request)

    def under_load(self, n: int) -> None:
        """In each of ``n`` steps one request arrives whose chunks nobody has, and another one stores 64 chunks."""
        finished: list[Any] = []
        for _ in range(n):
            asking = self.request(hashes(64, f"asked {self.count}"))
            self.timed(self.scheduler.get_num_new_matched_tokens, asking, 0)
            storing = self.request(hashes(64, f"stored {self.count}"), looks_up=False)
            self.timed(self.scheduler.get_num_new_matched_tokens, storing, 0)
            for request in finished:
                self.timed(self.scheduler.request_finished, request)
            self.step(storing, BLOCK_TOKENS * 64, finished)
            finished = [asking, storing]
            for request in finished:
                request.status = RequestStatus.FINISHED_ABORTED
            time.sleep(SHORT_PAUSE_S)
        for request in finished:
            self.timed(self.scheduler.request_finished, request)
        self.step(finished=finished)

    def idle(self, n: int) -> None:
        for _ in range(n):
            self.step()


class Scheduled:
    """A request that is scheduled for the first time."""

    def __init__(self, req_id: str, block_ids: tuple[list[int], ...]) -> None:
        self.req_id, self.block_ids = req_id, block_ids

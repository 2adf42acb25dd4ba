"""Replays traces through vLLM's own manager of host memory."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvoffload.abc import MissReason, OffloadKey
from kvoffload.lab.latency import DEFAULT_SPEEDS
from kvoffload.lab.model import DEFAULT_MODEL
from kvoffload.lab.replay import ExactMisses, ReplayConfig, ReplayResult, Run, result_of
from kvoffload.lab.trace import Trace
from kvoffload.vllm.cache_policy import PolicyAdapter

STEP_TOKENS = 8192
"""Tokens of a prompt that are computed, and then stored, per step: what vLLM's server has by default on a large GPU."""


def replay_in_vllm(trace: Trace, policy: str, capacity_blocks: int) -> ReplayResult:
    """Serves the requests of ``trace`` with a policy of vLLM, "lru" or "arc", or with "package.module:Class"."""
    run = VLLMRun(trace, ReplayConfig(policy, capacity_blocks))
    for _ in run.serve_all():
        pass
    return result_of(run, DEFAULT_MODEL, DEFAULT_SPEEDS, 0.0)


class VLLMRun(Run):
    """A replay with vLLM's CPUOffloadingManager for the host, called as vLLM's scheduler calls it. A copy ends before
    the next step. vLLM's manager stores all that it is offered."""

    def make_managers(self) -> None:
        module, _, name = self.config.policy.rpartition(":")
        self.theirs = CPUOffloadingManager(self.capacity, name, module or None)
        policy = getattr(self.theirs, "_policy", None)
        if isinstance(policy, PolicyAdapter):
            policy.clock = self.clock
        self.gone = ExactMisses(self.trace)

    def serve(self, request: int, chain: list[OffloadKey], prompt: list[OffloadKey]) -> None:
        manager, context = self.theirs, ReqContext(str(request))
        manager.on_new_request(context)
        self.name_blocks(context, prompt)
        found = 0
        for key in prompt:
            if manager.lookup(key, context) is not LookupResult.HIT:
                self.tally.misses[self.gone.explain(key).reason] += 1
                break
            found += 1
        self.tally.hits.extend((0, found, 0))
        self.tally.block_hits += found
        if found:
            manager.prepare_load(prompt[:found], context)
            manager.complete_load(prompt[:found], context)
        self.store_all(prompt[found:], context)
        self.name_blocks(context, chain)
        self.store_all(chain[len(prompt) :], context)
        manager.on_request_finished(context)

    def name_blocks(self, context: ReqContext, chain: list[OffloadKey]) -> None:
        for i, key in enumerate(chain, 1):
            context.set_offload_key_position(key, i * self.trace.block_tokens)

    def store_all(self, keys: list[OffloadKey], context: ReqContext) -> None:
        """Stores blocks in the steps in which they are computed."""
        size = max(1, STEP_TOKENS // self.trace.block_tokens)
        for start in range(0, len(keys), size):
            output = self.theirs.prepare_store(keys[start : start + size], context)
            if output is None:
                continue
            self.theirs.complete_store(output.keys_to_store, context)
            self.tally.stored += len(output.keys_to_store)
            self.tally.evicted += len(output.evicted_keys)
            self.gone.record(output.evicted_keys, MissReason.EVICTED)

    def prefetch_until(self, now: float) -> None:
        """vLLM's manager prefetches nothing."""

    def take_counts(self) -> Mapping[str, float]:
        return {}

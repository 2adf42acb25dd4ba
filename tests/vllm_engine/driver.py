"""Runs one vLLM engine in a process of its own: ``python driver.py CONFIG RESULT``. Both are JSON files.

CONFIG has ``scenario`` (a name in SCENARIOS), ``model`` (a directory, written if it does not exist), ``new_rows`` (how
many of the last rows of its embedding are drawn again), ``prompts`` (how many there are, by default PROMPTS),
``max_tokens`` (of an answer, by default MAX_TOKENS), ``engine`` (arguments of ``vllm.LLM`` that differ from the usual),
``model_kind``, ``multiprocessing`` (whether the engine has processes of its own), ``connector`` (its options, or null),
``connector_class``, ``plugin`` (whether vLLM finds the connector by its entry point alone), ``offloading`` (instead of
``connector``: the options of vLLM's own), and what the scenario reads. The caller sets the environment variables that
vLLM reads.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import numpy as np
from companion_scenarios import beside

from demo.engine import connector, sampling, start_llm

BLOCK_SIZE = 32
DEVICE_BLOCKS = 24
MAX_TOKENS = 33
"""A block and the last token, which has no KV: each answer fills one block."""
PROMPTS = 10
MAX_STEPS = 20_000
SETTLE_DEADLINE_S = 60.0
WINDOW = 70
"""Window of sliding layers in tokens: more than two blocks, and not a multiple of a block."""


def write_model(directory: Path, kind: str = "llama", new_rows: int = 0, seed: int = 0) -> None:
    """Writes a tiny model, with weights large enough that the prompt decides the output.

    "gemma3" alternates between layers with a window of WINDOW tokens and layers with full attention. "lfm2" has short
    convolutions and full attention, "qwen3next" gated delta nets and full attention, in bfloat16 because vLLM computes
    these in nothing else on a CPU. "one-head" has a single KV head. The last ``new_rows`` tokens get other embeddings
    than by default.
    """
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    dtype = torch.float32
    sizes = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        # Builds of attention for GPUs may lack small heads.
        "head_dim": 128 if torch.cuda.is_available() else 32,
        "max_position_embeddings": 2048,
        "initializer_range": 0.08,
        "tie_word_embeddings": False,
    }
    if kind == "gemma3":
        layers = ["sliding_attention", "full_attention"] * 2
        config = Gemma3TextConfig(num_hidden_layers=4, sliding_window=WINDOW, layer_types=layers, **sizes)
        model = Gemma3ForCausalLM(config)
    elif kind == "lfm2":
        from transformers import Lfm2Config, Lfm2ForCausalLM

        layers = ["conv", "conv", "full_attention", "conv"]
        sizes |= {"block_ff_dim": 256, "block_auto_adjust_ff_dim": False}
        config = Lfm2Config(num_hidden_layers=4, layer_types=layers, **sizes)
        # vLLM reads these, and files of real models have them.
        config.conv_dim = config.conv_dim_out = config.block_dim = sizes["hidden_size"]
        model = Lfm2ForCausalLM(config)
    elif kind == "qwen3next":
        from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

        layers = ["linear_attention"] * 3 + ["full_attention"]
        heads = {"num_key_value_heads": 4, "head_dim": 64}
        heads |= {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
        heads |= {f"linear_{name}_head_dim": 64 for name in ("key", "value")}
        # All experts are used: otherwise rounding decides between them.
        experts = {"num_experts": 2, "num_experts_per_tok": 2}
        experts |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
        config = Qwen3NextConfig(num_hidden_layers=4, layer_types=layers, **sizes | heads | experts)
        model, dtype = Qwen3NextForCausalLM(config), torch.bfloat16
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                # The state keeps what was many tokens ago. By default it forgets within a few.
                weight.data.copy_(torch.linspace(0.004, 0.05, weight.numel()).log())
    else:
        heads = {"num_key_value_heads": 1} if kind == "one-head" else {}
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes | heads))
    if new_rows:
        with torch.no_grad():
            model.get_input_embeddings().weight[-new_rows:].normal_(std=sizes["initializer_range"])
    model.to(dtype).save_pretrained(directory)


def write_drafter(directory: Path, model: Path) -> None:
    """Writes an EAGLE drafter that computes what ``model`` does, without the hidden states that it is given. As it
    reads at each position the token after it, it drafts what the model would without its first token."""
    import safetensors.torch

    config = json.loads((model / "config.json").read_text())
    scale = 1 / config["initializer_range"]
    weights = {}
    for name, weight in safetensors.torch.load_file(model / "model.safetensors").items():
        # The first layer of the drafter has no norm before it, so everything is as large as behind that norm.
        larger = scale if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        if ".layers." in name and not name.endswith("layers.0.input_layernorm.weight"):
            weights[name.removeprefix("model.")] = weight * larger
        elif name.endswith("embed_tokens.weight"):
            hidden = weight.shape[1]
            weights["fc.weight"] = weight.new_zeros(hidden, 2 * hidden)
            weights["fc.weight"][:, :hidden].fill_diagonal_(scale)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(weights, directory / "model.safetensors", {"format": "pt"})


def make_prompts(n: int = PROMPTS) -> list[list[int]]:
    """Returns ``n`` prompts of three to twelve blocks. Every other one begins with the same three blocks."""
    rng = np.random.default_rng(1)
    shared = rng.integers(5, 500, size=3 * BLOCK_SIZE).tolist()
    prompts = []
    for i in range(n):
        own = rng.integers(5, 500, size=int(rng.integers(20, 9 * BLOCK_SIZE))).tolist()
        prompts.append(shared + own if i % 2 else own + shared)
    return prompts


class TierJobs:
    """Counts what the tiers of this process have accepted and not reported yet."""

    def __init__(self) -> None:
        from kvoffload.tiering.guard import GuardedTier

        self.pending: Counter[tuple[str, bytes, bool]] = Counter()
        """Number of jobs per tier, key and direction; True is a read."""
        poll = GuardedTier.poll

        def counting(accept: Callable[..., Any], is_read: bool) -> Callable[..., Any]:
            def call(tier: Any, keys: Any, slots: Any) -> Any:
                accepted = accept(tier, keys, slots)
                self.pending.update((tier.name, key, is_read) for key in accepted)
                return accepted

            return call

        def counted_poll(tier: Any) -> Any:
            results = poll(tier)
            self.pending -= Counter((tier.name, result.key, result.is_read) for result in results)
            return results

        GuardedTier.read = counting(GuardedTier.read, True)  # type: ignore[method-assign]
        GuardedTier.write = counting(GuardedTier.write, False)  # type: ignore[method-assign]
        GuardedTier.poll = counted_poll  # type: ignore[method-assign, assignment]


def connector_module(name: str) -> str:
    """Returns the module that defines the connector ``name``."""
    own = {"KVOffloadConnector": "kvoffload.vllm", "CorruptedKVOffloadConnector": "demo.corrupted"}
    return own.get(name, "faulty_connectors")


class Engine:
    """A vLLM engine, observed from inside its process."""

    def __init__(self, config: dict[str, Any]) -> None:
        kind = config.get("model_kind", "llama")
        model = Path(config["model"] + "-" + kind)
        if "new_rows" in config or not model.exists():
            write_model(model, kind, config.get("new_rows", 0))
        if config.get("unexpected_root"):
            _expect_another_root()
        self._max_tokens = config.get("max_tokens", MAX_TOKENS)
        self._tiers = TierJobs()
        from vllm.config import KVEventsConfig

        force_async = config.get("force_async", False)
        if force_async:
            _allow_async_scheduling()
        if kind == "lfm2":
            _rotate_by_token()
        if config.get("connector_class") == "BlocksFirstKVOffloadConnector":
            _allow_blocks_first()
        arguments: dict[str, Any] = {
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks_override": DEVICE_BLOCKS,
            "max_model_len": 512,
            "max_num_batched_tokens": 1024,
            "disable_log_stats": False,
            # By default it is on with CUDA, and off on a CPU.
            **({} if force_async else {"async_scheduling": False}),
            **config.get("engine", {}),
        }
        transfer = None
        if config.get("connector") is not None:
            name = config.get("connector_class", "KVOffloadConnector")
            module = None if config.get("plugin") else connector_module(name)
            transfer = connector(config["connector"], name, module)
        if config.get("offloading") is not None:
            # Its host memory has a name in /dev/shm.
            transfer = connector(config["offloading"], "OffloadingConnector", None)
            transfer["engine_id"] = f"driver-{os.getpid()}"
        if config.get("draft"):
            # The model is its own draft model, so correct KV gives correct drafts.
            draft = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
            arguments["speculative_config"] = draft
        if config.get("eagle"):
            drafter = model.with_name(model.name + "-eagle")
            if not drafter.exists():
                write_drafter(drafter, model)
            arguments["speculative_config"] = {"method": "eagle", "model": str(drafter), "num_speculative_tokens": 3}
        if config.get("events"):
            arguments["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        if arguments.get("node_rank"):
            run_second_node(model, transfer, arguments)
        self.llm: Any = start_llm(model, transfer, **arguments)
        if arguments.get("pipeline_parallel_size", 1) > 1:
            self.llm.collective_rpc(_make_room_for_hidden_states)
        self.prompts = make_prompts(config.get("prompts", PROMPTS))
        if config.get("corrupt_drafts"):
            self._corrupt_drafts()
        if "slow" in config:
            self._slow_down(config["slow"], config.get("failing", 0.0))
        self.loaded_blocks: Counter[int] = Counter()
        """Number of device blocks in loads, by group."""
        if config.get("connector") is not None and not config.get("multiprocessing"):
            self._count_loads()

    def _count_loads(self) -> None:
        build, parts = self.offload.build_connector_meta, self.offload.layout.parts

        def counting(step: Any) -> Any:
            meta = build(step)
            for spec in meta.loads.values():
                sizes = zip(parts.group_of, spec.device.group_sizes, strict=True)
                self.loaded_blocks.update(dict(sizes))
            return meta

        self.offload.build_connector_meta = counting

    def _corrupt_drafts(self) -> None:
        """Overwrites with zeros what is loaded for the second half of the layers, which belong to the draft model."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = get_kv_transfer_group()
        (group,) = connector.layout.groups
        pool, transfer = connector.pool.data, connector.connector_worker.transfer
        submit = transfer.submit

        def blanking(job_id: int, spec: Any, is_store: bool) -> None:
            if not is_store:
                pool[spec.host.slots, group.device_block_bytes // 2 :] = 0
            submit(job_id, spec, is_store)

        transfer.submit = blanking

    def log_drafts(self) -> list[list[int]]:
        """Returns a list to which every step appends what the model sampled, and every draft that is proposed then."""
        scheduler, log = self.scheduler, list[list[int]]()
        update, propose = scheduler.update_from_output, scheduler.update_draft_token_ids

        def sampled(scheduled: Any, output: Any) -> Any:
            log.extend(map(list, output.sampled_token_ids))
            return update(scheduled, output)

        def proposed(drafts: Any) -> None:
            log.extend(map(list, drafts.draft_token_ids))
            propose(drafts)

        scheduler.update_from_output, scheduler.update_draft_token_ids = sampled, proposed
        return log

    def _slow_down(self, seed: int, failing: float) -> None:
        """Makes copies take many steps, and a share of them fail."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from tests.sim.faults import FailingTransfer, SlowTransfer

        worker = get_kv_transfer_group().connector_worker
        worker.transfer = FailingTransfer(SlowTransfer(worker.transfer, seed), failing, seed)

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def tiers(self) -> list[Any]:
        """The tiers of vLLM's own offloading."""
        return list(self.scheduler.connector.connector_scheduler.manager.secondary_tiers)

    @property
    def offload(self) -> Any:
        """The scheduler half of the connector."""
        return self.scheduler.connector.connector_scheduler

    def sampling(self, **changes: Any) -> Any:
        return sampling(**{"max_tokens": self._max_tokens, **changes})

    def round(self, prompts: list[list[int]] | None = None, lora_request: Any = None, **sampling: Any) -> list[Any]:
        """Runs every prompt once and returns the answers."""
        outputs = self.llm.generate(
            [{"prompt_token_ids": p} for p in prompts or self.prompts],
            self.sampling(**sampling),
            use_tqdm=False,
            lora_request=lora_request,
        )
        return [answer(output) for output in outputs]

    def drain(self) -> None:
        """Runs steps until nothing is pending, as a server does between requests."""
        for _ in range(MAX_STEPS):
            if not self.scheduler.has_requests():
                return
            self.llm.llm_engine.step()
        raise AssertionError("the engine never comes to rest")

    def settle(self) -> None:
        """Waits until all tiers have read and written what they were given."""
        deadline = time.monotonic() + SETTLE_DEADLINE_S
        while self._tiers.pending:
            assert time.monotonic() < deadline, "the tier does not end its reads and writes"
            time.sleep(0.001)
            self.offload.manager.poll()

    def close(self) -> None:
        """Shuts the engine down as a server does."""
        self.llm.llm_engine.engine_core.shutdown()

    def tier_state(self) -> dict[str, Any]:
        """Returns what is left, and the counters of KVOffloadTier, after the engine and its tiers have come to rest."""
        self.drain()
        deadline = time.monotonic() + SETTLE_DEADLINE_S
        tiers = [tier for tier in self.tiers if hasattr(tier, "bridge")]
        while not all(tier.off or tier.bridge.is_idle for tier in tiers):
            assert time.monotonic() < deadline, "the tier does not come to rest"
            time.sleep(0.001)
        return self.device_state() | {
            "off": [tier.off or bool(tier.bridge.fault) for tier in tiers],
            "jobs": [len(tier._jobs) for tier in tiers],
            "requests": [len(tier._requests) for tier in tiers],
            "metrics": [tier.metrics.snapshot() for tier in tiers],
            "records": [record.to_dict() for tier in tiers for record in tier._records.records],
            "prometheus": {k: v for k, v in prometheus().items() if k.startswith(("kvoffload:", "vllm:kv_offload"))},
        }

    def device_state(self) -> dict[str, Any]:
        """Returns the state of the device's blocks, and what vLLM counts."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return {
            "free_device_blocks": pool.get_num_free_blocks(),
            "usable_device_blocks": pool.num_gpu_blocks - 1,
            "preemptions": prometheus().get("vllm:num_preemptions_total", 0),
            "drafted": prometheus().get("vllm:spec_decode_num_draft_tokens_total", 0),
            "accepted": prometheus().get("vllm:spec_decode_num_accepted_tokens_total", 0),
        }

    def state(self) -> dict[str, Any]:
        """Returns what is left, and all counters, after the engine has come to rest."""
        self.drain()
        state = self.device_state()
        if self.scheduler.connector is None:
            return state
        offload = self.offload
        self.settle()
        host = getattr(offload.manager, "host", offload.manager)
        offload.manager.check_integrity()
        return state | {
            "off": offload.off,
            "jobs": len(offload.jobs.jobs),
            "requests": len(offload.requests),
            "used_blocks": host.num_used_blocks,
            "busy_blocks": host.num_blocks - host.num_available_blocks,
            "metrics": offload.metrics.snapshot(),
            "prometheus": {k: v for k, v in prometheus().items() if k.startswith("kvoffload:")},
            "records": [record.to_dict() for record in offload.records],
            "loaded_blocks": [n for _, n in sorted(self.loaded_blocks.items())],
        }


def run_second_node(model: Path, transfer: dict[str, Any] | None, arguments: dict[str, Any]) -> NoReturn:
    """Does what ``vllm serve --headless`` does on a node without the scheduler: runs workers until one of them ends."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    usual = {"skip_tokenizer_init": True, "dtype": "float32", "seed": 0, "enforce_eager": True}
    engine = EngineArgs(
        **{**usual, **arguments},
        model=str(model),
        kv_transfer_config=None if transfer is None else KVTransferConfig(**transfer),
    )
    executor = MultiprocExecutor(engine.create_engine_config(headless=True), monitor_workers=False)
    executor.start_worker_monitor(inline=True)
    raise SystemExit("a worker has ended")


def _make_room_for_hidden_states(worker: Any) -> None:
    """Does what vLLM's warm-up does for all but the first rank of a pipeline, but not on a CPU without compilation."""
    runner = worker.model_runner
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def _allow_async_scheduling() -> None:
    """Switches on asynchronous scheduling, which vLLM switches off on CPU because it gains nothing there."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def _rotate_by_token() -> None:
    """Lets LFM2 compute the same in every batch. In this model heads have a dimension of their own, and vLLM's rotary
    kernel for CPUs then takes the distance between heads for the one between tokens."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    original = RotaryEmbedding.forward_cpu

    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        rotated = original(self, positions, query.flatten(1), key.flatten(1))
        return tuple(part.view_as(like) for part, like in zip(rotated, (query, key), strict=True))

    RotaryEmbedding.forward_cpu = forward_cpu


def _allow_blocks_first() -> None:
    """Lets the CPU's attention backend have the layout in which a block is one piece of memory: it reads blocks by
    their distance, but does not say so."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from kvoffload.vllm import nesting

    layouts = (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)
    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda cls: layouts)
    nesting.READ_BY_STRIDE.add("CPU_ATTN")


def _expect_another_root() -> None:
    """Simulates a vLLM that chooses the root of its hashes in an unknown way."""
    from kvoffload.vllm import versions

    versions.expected_hash_root = lambda vllm_config: b"another root"


def answer(output: Any) -> list[Any]:
    """Returns the tokens of ``output`` and their logprobs."""
    best = output.outputs[0]
    return [list(best.token_ids), [next(iter(entry.values())).logprob for entry in best.logprobs]]


def prometheus() -> dict[str, float]:
    """Returns every sample in this process by its name, followed by its reason, rule or tier if it has one."""
    from prometheus_client import REGISTRY

    samples = {}
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            label = next((sample.labels[name] for name in ("reason", "rule", "tier") if name in sample.labels), None)
            samples[sample.name if label is None else f"{sample.name}:{label}"] = sample.value
    return samples


def rounds(config: dict[str, Any]) -> dict[str, Any]:
    """Runs the same prompts ``rounds`` times, after a reset if ``reset`` is set. ``close`` shuts the engine down."""
    engine = Engine(config)
    if config.get("reset"):
        assert engine.llm.reset_prefix_cache(reset_connector=True)
    outputs = [engine.round() for _ in range(config.get("rounds", 2))]
    if config.get("multiprocessing"):
        return {"outputs": outputs, "prometheus": prometheus()}
    import vllm

    result = {
        "vllm": vllm.__version__,
        "outputs": outputs,
        "async_scheduling": type(engine.scheduler).__name__ == "AsyncScheduler",
        **engine.state(),
    }
    if config.get("replicas"):
        result["replicas"] = engine.llm.collective_rpc(_count_replicas)
    if config.get("close"):
        engine.close()
    return result


def offloading(config: dict[str, Any]) -> dict[str, Any]:
    """Runs the same prompts ``rounds`` times with vLLM's own offloading, whose options are ``offloading``. After each
    round all tiers come to rest. Then shuts the engine down. Before the last round the caches are reset, if ``reset``
    is set, or the tier is given a bug, if ``break`` is set. ``threads`` are those of kvoffload that are left."""
    import threading

    import vllm

    engine, outputs, events = Engine(config), [], list[list[str]]()
    if config.get("events"):
        publisher = engine.scheduler.kv_event_publisher
        publisher.publish = lambda batch: events.extend(map(_event, batch.events))
    rounds = config.get("rounds", 2)
    for i in range(rounds):
        if i == rounds - 1 and config.get("reset"):
            assert engine.llm.reset_prefix_cache(reset_connector=True)
        if i == rounds - 1 and config.get("break"):
            engine.tiers[0].bridge.load = None
        outputs.append(engine.round())
        state = engine.tier_state()
    engine.close()
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("kvoffload")]
    return {"vllm": vllm.__version__, "outputs": outputs, "events": events, "threads": threads, **state}


def own_policy(config: dict[str, Any]) -> dict[str, Any]:
    """Does the same as ``offloading`` with host memory alone. Counts the chunks that were loaded and evicted."""
    engine = Engine(config)
    manager = engine.scheduler.connector.connector_scheduler.manager
    counts = Counter[str]()
    load, evict = manager.prepare_load, manager._policy.evict

    def prepare_load(keys: Any, context: Any) -> Any:
        counts["loaded"] += len(keys)
        return load(keys, context)

    def evict_counted(n: int, protected: Any) -> Any:
        evicted = evict(n, protected)
        counts["evicted"] += len(evicted or ())
        return evicted

    manager.prepare_load, manager._policy.evict = prepare_load, evict_counted
    outputs = [engine.round() for _ in range(config.get("rounds", 2))]
    manager._policy.check_integrity()
    engine.close()
    return {"outputs": outputs, **counts}


def cache_policies(config: dict[str, Any]) -> dict[str, Any]:
    """Runs random and chosen schedules of vLLM's manager with kvoffload's policies, without an engine."""
    from kvoffload.abc import ConfigError

    try:
        import policy_schedules
    except ConfigError as error:
        return {"refused": str(error)}
    from benchmarks.vllm_replay import replay_in_vllm
    from kvoffload.lab.readers import read_trace
    from kvoffload.lab.replay import ReplayConfig, replay

    trace = read_trace(config["chat"])
    pairs = [(trace, "lru", "LRUCachePolicy", trace.num_distinct // 4)]
    if config.get("traces"):
        published = read_trace(str(Path(config["traces"]) / "mooncake_conversation.jsonl.gz"))
        pairs += [(published, "auto", "AutoCachePolicy", blocks) for blocks in (1827, 9139)]
    found = [
        [
            found.prefix_hit_tokens_pct
            for found in (
                replay(of, ReplayConfig(ours, blocks)),
                replay_in_vllm(of, f"{policy_schedules.MODULE}:{theirs}", blocks),
            )
        ]
        for of, ours, theirs, blocks in pairs
    ]
    return {
        "schedules": policy_schedules.random_schedules(config["seeds"], config["steps"]),
        "control": policy_schedules.is_careless_seen(config["seeds"], config["steps"]),
        "chains": policy_schedules.chains(),
        "one_use": policy_schedules.one_use(),
        "one_by_one": [policy_schedules.one_by_one(num_chunks) for num_chunks in (64, 512)],
        "starts_over": policy_schedules.starts_over(),
        "keeps_failing": policy_schedules.keeps_failing(),
        "replays": found,
    }


def _count_replicas(worker: Any) -> list[int]:
    """Returns how many ranks hold the same KV as this one: as it is, if one layer had other heads, and if nothing were
    known of the heads."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.model_executor.layers.linear import QKVParallelLinear

    from kvoffload.vllm.replicas import replicas_of

    layout, model = get_kv_transfer_group().layout, worker.get_model()
    counts = [replicas_of(layout, worker.vllm_config, [model])]
    projection = next(module for module in model.modules() if isinstance(module, QKVParallelLinear))
    before, projection.num_kv_head_replicas = projection.num_kv_head_replicas, 1
    counts += [replicas_of(layout, worker.vllm_config, models) for models in ([model], [])]
    projection.num_kv_head_replicas = before
    return counts


def one_by_one(config: dict[str, Any]) -> dict[str, Any]:
    """Runs each of ``asked`` alone, and then each with its answer and ``more`` tokens. The device's own cache is
    emptied after each, unless ``keeps_device_cache``. ``drafts`` has for each what the model sampled in its steps, and
    what was drafted."""
    engine = Engine(config)
    log = engine.log_drafts()
    outputs: list[Any] = []
    drafts: list[Any] = []
    prompts = list(config["asked"])
    for i in range(len(prompts) * 2 if config.get("more") else len(prompts)):
        if i == len(prompts):
            prompts += [[*p, *tokens, *config["more"]] for p, (tokens, _) in zip(prompts, outputs, strict=True)]
        outputs += engine.round([prompts[i]], **config.get("sampling", {}))
        engine.drain()
        drafts.append(log[:])
        log.clear()
        if not config.get("keeps_device_cache"):
            assert engine.llm.reset_prefix_cache()
    return {"outputs": outputs, "drafts": drafts, "scheduler": type(engine.scheduler).__name__, **engine.state()}


def whole_prompts(config: dict[str, Any]) -> dict[str, Any]:
    """Stores the blocks of all prompts, empties the device's cache, and asks for an answer about every token of the
    prompts: embeddings from a pooling model, else logprobs. ``outputs`` has a list of tokens and one of values for
    each."""
    from vllm import PoolingParams
    from vllm.entrypoints.pooling import offline

    # These need a tokenizer.
    offline.init_pooling_io_processors = lambda *args, **kwargs: {}
    engine = Engine(config)
    core = engine.llm.llm_engine

    def ask(params: Any) -> list[Any]:
        outputs: dict[str, Any] = {}
        for i, prompt in enumerate(engine.prompts):
            core.add_request(str(i), {"prompt_token_ids": prompt}, params)
        while core.has_unfinished_requests():
            outputs |= {output.request_id: output for output in core.step() if output.finished}
        return [output for _, output in sorted(outputs.items())]

    if core.model_config.runner_type == "pooling":
        first, then = PoolingParams(task="embed"), PoolingParams(task="token_embed")
    else:
        first, then = engine.sampling(max_tokens=2), engine.sampling(max_tokens=2, prompt_logprobs=0)
    ask(first)
    engine.drain()
    assert engine.llm.reset_prefix_cache()
    outputs = []
    for output in ask(then):
        if core.model_config.runner_type == "pooling":
            values = output.outputs.data[..., :2].flatten().tolist()
        else:
            values = [next(iter(each.values())).logprob for each in output.prompt_logprobs[1:]]
        outputs.append([output.prompt_token_ids, values])
    return {"outputs": outputs, **engine.state()}


def service(config: dict[str, Any]) -> dict[str, Any]:
    """Runs two rounds, a reset, another round, and a prefill for a remote decoder."""
    engine = Engine(config)
    scheduler = engine.scheduler
    events: list[list[str]] = []
    publisher = scheduler.kv_event_publisher
    publisher.publish = lambda batch: events.extend(map(_event, batch.events))
    outputs = [engine.round(), engine.round()]
    warm = engine.state()
    cleared = engine.llm.reset_prefix_cache(reset_connector=True)
    used_after_reset = engine.offload.manager.num_used_blocks
    outputs.append(engine.round())
    after, announced = engine.state(), [event for event in events if event]
    remote = _remote_decode(engine)
    result = {
        "outputs": outputs,
        "warm": warm,
        "cleared": cleared,
        "used_after_reset": used_after_reset,
        "after": after,
        "events": announced,
        "recomputes_failed_loads": scheduler.recompute_kv_load_failures,
        "policy": engine.llm.llm_engine.vllm_config.kv_transfer_config.kv_load_failure_policy,
        "remote": remote,
    }
    engine.close()
    return result


def _event(event: Any) -> list[str]:
    """Returns kind, medium and hashes of a stored or removed event, or an empty list for other events."""
    hashes = getattr(event, "block_hashes", None)
    return [] if hashes is None else [type(event).__name__, event.medium, *map(repr, hashes)]


def _remote_decode(engine: Engine) -> dict[str, Any]:
    """Runs a prefill for a remote decoder, and then a request with all of its tokens."""
    prompt = engine.prompts[0][: 4 * BLOCK_SIZE + 5]
    extra = {"kv_transfer_params": {"do_remote_decode": True}}
    ((tokens, _),) = engine.round([prompt], extra_args=extra)
    state = engine.state()
    engine.llm.reset_prefix_cache()
    whole = [*prompt, *tokens]
    engine.round([whole], max_tokens=1)
    records = engine.state()["records"]
    return {"tokens": len(whole), "host_tokens": records[-1]["host_tokens"], "state": state, "records": records}


def reuse(config: dict[str, Any]) -> dict[str, Any]:
    """Runs rounds with a reuse filter, and then one in which the manager raises an error."""
    engine = Engine(config)
    outputs, states = [], []
    for _ in range(3):
        outputs.append(engine.round())
        states.append(engine.state())

    samples = _stored_by_samples(engine)

    def lookup(*args: Any) -> int:
        raise RuntimeError("planted: the table is broken")

    engine.offload.manager.lookup = lookup
    broken = engine.round()
    return {"outputs": outputs, "states": states, "samples": samples, "broken": broken, "after": engine.state()}


def _stored_by_samples(engine: Engine) -> list[float]:
    """Returns the number of stored blocks before a request with three samples, after it, and after its prompt again."""
    from vllm.sampling_params import SamplingParams

    prompt = [token ^ 1 for token in engine.prompts[0][: 4 * BLOCK_SIZE + 2]]
    stored = [engine.state()["metrics"]["store_blocks"]]
    for n in (3, 1):
        settings = SamplingParams(n=n, temperature=1.0, max_tokens=2, detokenize=False, ignore_eos=True)
        (output,) = engine.llm.generate([{"prompt_token_ids": prompt}], settings, use_tqdm=False)
        assert len(output.outputs) == n
        engine.drain()
        stored.append(engine.state()["metrics"]["store_blocks"])
    return stored


def turns(config: dict[str, Any]) -> dict[str, Any]:
    """Runs three turns of each conversation. The next prompt is the former one, its answer and a question. By turn,
    ``known`` has the lengths of prompt and answer together."""
    engine, rng = Engine(config), np.random.default_rng(2)
    conversations, outputs, known = engine.prompts, [], []
    for _ in range(3):
        outputs.append(engine.round(conversations))
        engine.drain()
        conversations = [[*asked, *tokens] for asked, (tokens, _) in zip(conversations, outputs[-1], strict=True)]
        known.append(list(map(len, conversations)))
        conversations = [[*said, *rng.integers(5, 500, size=17).tolist()] for said in conversations]
    return {"outputs": outputs, "known": known, **engine.state()}


def divergent(config: dict[str, Any]) -> dict[str, Any]:
    """Repeats a prompt after vLLM's own cache has lost a part of it: ``found`` has the tokens that were found then on
    the device and in host memory, by what was lost."""
    from vllm.v1.core.kv_cache_utils import get_group_id

    engine = Engine(config)
    prompt = max(engine.prompts, key=len)
    whole = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    pool = engine.scheduler.kv_cache_manager.block_pool
    states = {g for g, group in enumerate(engine.scheduler.connector.layout.kv_groups) if group.state}

    def lose(is_state: bool, last: int) -> None:
        """Evicts the blocks that end after ``last`` tokens."""
        blocks = [block for block in pool.blocks if block.block_hash is not None]
        pool.evict_blocks(
            {
                block.block_id
                for block in blocks
                if (get_group_id(block.block_hash) in states) == is_state and block.block_hash_num_tokens > last
            }
        )

    (expected,) = engine.round([prompt])
    engine.drain()
    outputs, found = [], {}
    for name, *lost in (
        ("the last state", (True, whole - 1)),
        ("the last KV", (False, whole - 1)),
        ("the last state and more KV", (True, whole - 1), (False, whole - 2 * BLOCK_SIZE)),
        ("nothing",),
        ("all states", (True, 0)),
        ("all KV", (False, 0)),
    ):
        for one in lost:
            lose(*one)
        outputs += engine.round([prompt])
        record = engine.state()["records"][-1]
        found[name] = [record["device_tokens"], record["host_tokens"]]
    return {"expected": expected, "outputs": outputs, "whole": whole, "found": found, **engine.state()}


def aborts(config: dict[str, Any]) -> dict[str, Any]:
    """Aborts one request in each stage of its life while others continue, with half of the blocks in the pool."""
    from vllm.v1.request import RequestStatus

    engine = Engine(config)
    engine.round(engine.prompts[: PROMPTS // 2])
    engine.drain()
    engine.llm.reset_prefix_cache()
    core, names = engine.llm.llm_engine, [f"r{i}" for i in range(PROMPTS)]
    for name, prompt in zip(names, engine.prompts, strict=True):
        core.add_request(name, {"prompt_token_ids": prompt}, engine.sampling())

    def stage(request: Any) -> str | None:
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            return "loading"
        if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            return "preempted" if request.num_preemptions else "waiting"
        if request.status == RequestStatus.RUNNING:
            return "prefilling" if request.num_computed_tokens < request.num_prompt_tokens else "decoding"
        return None

    aborted: dict[str, str] = {}
    answers: dict[str, Any] = {}
    for _ in range(MAX_STEPS):
        if not core.has_unfinished_requests():
            break
        for request in list(engine.scheduler.requests.values()):
            seen, name = stage(request), request.request_id.split("-")[0]
            if seen is not None and seen not in aborted and name not in aborted.values():
                aborted[seen] = name
                core.abort_request([name])
                break
        for output in core.step():
            if output.finished and output.outputs[0].finish_reason == "length":
                answers[output.request_id] = answer(output)
    outputs = [answers.get(name) for name in names]
    return {"outputs": outputs, "aborted": aborted, **engine.state()}


def queued(config: dict[str, Any]) -> dict[str, Any]:
    """Adds all prompts while a long request runs."""
    engine = Engine(config)
    core, names, answers = engine.llm.llm_engine, [f"r{i}" for i in range(PROMPTS)], dict[str, Any]()
    core.add_request("long", {"prompt_token_ids": list(range(5, 25))}, engine.sampling(max_tokens=400))
    core.step()
    for name, prompt in zip(names, engine.prompts, strict=True):
        core.add_request(name, {"prompt_token_ids": prompt}, engine.sampling())
    while core.has_unfinished_requests():
        answers |= {output.request_id: answer(output) for output in core.step() if output.finished}
        if "long" not in answers:
            # So that the disk's threads get the processor.
            time.sleep(0.001)
    result = {"outputs": [[answers[name] for name in names]], **engine.state()}
    engine.close()
    return result


def failed_load(config: dict[str, Any]) -> dict[str, Any]:
    """Fails the whole load of a prompt that takes more than half of the device's blocks.

    With ``again`` the request is offered another load, which kvoffload never does. Returns the ``steps`` until the
    request finished, or None if it did not.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from tests.sim.faults import FailingTransfer

    engine = Engine(config)
    everything = [token for prompt in engine.prompts for token in prompt]
    prompt = everything[: (DEVICE_BLOCKS // 2 + 2) * BLOCK_SIZE - 5]
    (expected,) = engine.round([prompt])
    engine.drain()
    engine.llm.reset_prefix_cache()
    worker, offload = get_kv_transfer_group().connector_worker, engine.offload
    working, worker.transfer = worker.transfer, FailingTransfer(worker.transfer, rate=1.0)
    update = offload.update_connector_output

    def update_once_failed(report: Any) -> None:
        update(report)
        if report.failed:
            worker.transfer = working
            if config["again"]:
                # The scheduler half forgets that a load of this request has failed.
                offload.request_finished(*engine.scheduler.requests.values())

    offload.update_connector_output = update_once_failed
    core = engine.llm.llm_engine
    core.add_request("again", {"prompt_token_ids": prompt}, engine.sampling())
    for step in range(500):
        for output in core.step():
            if output.finished:
                return {"steps": step, "outputs": [[answer(output)]], "expected": [expected], **engine.state()}
    return {"steps": None, "metrics": offload.metrics.snapshot()}


def storm(config: dict[str, Any]) -> dict[str, Any]:
    """Runs ``requests`` random requests by ``seed``. Some are aborted, some ask for remote decode, and caches are reset
    while they run. Answers are [index of the prompt, answer]."""
    engine = Engine(config)
    random = Random(config["seed"])
    core = engine.llm.llm_engine
    resets = [
        engine.llm.reset_prefix_cache,
        lambda: engine.llm.reset_prefix_cache(reset_connector=True),
        engine.scheduler.connector.reset_cache,
    ]
    live: dict[str, int] = {}
    answers: list[Any] = []
    arrived = aborted = 0
    for step in range(MAX_STEPS):
        if arrived < config["requests"] and len(live) < 12 and random.random() < 0.25:
            index, name = random.randrange(PROMPTS), f"s{arrived}"
            remote = {"kv_transfer_params": {"do_remote_decode": random.random() < 0.15}}
            sampling = engine.sampling(max_tokens=random.choice([1, 3, 20, MAX_TOKENS]), extra_args=remote)
            core.add_request(name, {"prompt_token_ids": engine.prompts[index]}, sampling)
            live[name] = index
            arrived += 1
        if live and random.random() < 0.05:
            name = random.choice(list(live))
            core.abort_request([name])
            del live[name]
            aborted += 1
        if random.random() < 0.01:
            random.choice(resets)()
        if "disk_dir" in config["connector"] and random.random() < 0.3:
            # This bounds the steps that a job of the disk takes, however fast this machine runs steps.
            engine.settle()
        finished = [output for output in core.step() if output.finished and output.request_id in live]
        answers += [[live.pop(output.request_id), answer(output)] for output in finished]
        if step % 50 == 0:
            engine.offload.manager.check_integrity()
        if arrived == config["requests"] and not live:
            break
    return {"answers": answers, "aborted": aborted, "left": len(live), **engine.state()}


def tier_storm(config: dict[str, Any]) -> dict[str, Any]:
    """Runs a storm on vLLM's own connector: see ``tier_storm``. ``unverified`` plants a bug in the disk tier."""
    import tier_storm

    tier_storm.shrink_staging()
    if config.get("unverified"):
        tier_storm.accept_any_bytes()
    before = set(threading.enumerate())
    return tier_storm.run_storm(Engine(config), config, before)


def sleeps(config: dict[str, Any]) -> dict[str, Any]:
    """Sleeps and wakes up once per entry of ``modes``, the pause modes of vLLM, each time under load and with stores in
    progress. Device blocks lose their content meanwhile.

    With ``forgetful`` the connector treats each handshake as its first, and its job numbers begin again. Otherwise the
    engine then sleeps without load, with the same weights and with others. At the end the workers have other pools.
    Answers are [index of the prompt, answer] for all requests that were not aborted.
    """

    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kvoffload.connector import jobs as job_table
    from kvoffload.observe import server as records
    from kvoffload.vllm import versions

    versions.keeps_over_pauses = lambda vllm_config: not config.get("forgetful")
    if config.get("forgetful"):
        config["connector_class"] = "ForgetfulKVOffloadConnector"
    engine = Engine(config)
    core, connector = engine.llm.llm_engine, engine.scheduler.connector
    half = connector.connector_scheduler
    _let_workers_sleep(hooks=not config.get("forgetful"))
    answers: list[Any] = []
    answered: list[str] = []
    live: dict[str, int] = {}
    asked = 0

    def ask(count: int) -> None:
        nonlocal asked
        for _ in range(count):
            name, index = f"q{asked}", asked % PROMPTS
            core.add_request(name, {"prompt_token_ids": engine.prompts[index]}, engine.sampling())
            live[name] = index
            asked += 1

    def step() -> None:
        for output in core.step():
            if output.finished and output.request_id in live:
                index = live.pop(output.request_id)
                if output.outputs[0].finish_reason == "length":
                    answers.append([index, answer(output)])
                    answered.append(output.request_id)

    def finish() -> None:
        for _ in range(MAX_STEPS):
            if not live:
                return
            step()
        raise AssertionError("the engine never comes to rest")

    under_way = []
    handshake = _handshake_of_a_wake(core.engine_core.engine_core)
    for mode in config["modes"]:
        # Blocks kept from before an earlier sleep would leave nothing to store.
        if not config.get("forgetful"):
            connector.reset_cache()
        ask(PROMPTS // 2)
        finish()
        # Half of them can be loaded, the others will be stored.
        ask(PROMPTS)
        for _ in range(MAX_STEPS):
            step()
            jobs = dict(connector.connector_scheduler.jobs.jobs)
            # vLLM does not take the blocks of a request that waits for its load.
            if (jobs and all(job.is_store for job in jobs.values())) or not live:
                break
        assert jobs, "nothing is under way"
        under_way.append(len(jobs))
        core.sleep(1, mode)
        if mode == "abort":
            # An engine in this process does not report the requests that it has aborted.
            core.abort_request(list(live))
            live.clear()
        if config.get("forgetful"):
            job_table.JOB_IDS = itertools.count(min(jobs))
        core.wake_up()
        handshake()
    ask(PROMPTS)
    finish()
    (server,) = [server for server in records.running_servers() if server.pid == os.getpid()]
    served = records.read_records(server, 10.0).records
    result = {
        "answers": answers,
        "answered": list(answered),
        "recorded": [record.req_id.split("-")[0] for record in served],
        "one_half": connector.connector_scheduler is half,
        "under_way": under_way,
        **engine.state(),
    }
    if not config.get("forgetful"):
        result["naps"] = _naps(engine, config, handshake)
    own = get_kv_transfer_group().get_handshake_metadata()
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): replace(own, pool=replace(own.pool, inode=0))})
    answers = result["without"] = []
    ask(PROMPTS)
    finish()
    return result | {"off_with_other_pools": connector.connector_scheduler.off}


def _naps(engine: Engine, config: dict[str, Any], handshake: Callable[[], None]) -> dict[str, Any]:
    """Sleeps without load several times, and runs a round after each sleep.

    "right N" is the answer of weights N if everything is computed. At the end the weights are those of the start again.
    """
    from types import SimpleNamespace

    from vllm.distributed.kv_transfer import get_kv_transfer_group

    core, life = engine.llm.llm_engine, _Life(engine)
    directories = [Path(config["model"] + f"-weights-{seed}") for seed in range(2)]
    for seed, directory in enumerate(directories):
        write_model(directory, seed=seed)

    def update(seed: int) -> None:
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(directories[seed])})

    def change_one() -> None:
        model = core.engine_core.engine_core.model_executor.driver_worker.get_model()
        weights = next(weights for name, weights in model.named_parameters() if "layers.0" in name and "norm" in name)
        weights.data[7] += 3

    def nap(name: str, asleep: Callable[[], Any] = int, awake: Callable[[], Any] = int) -> None:
        engine.drain()
        engine.settle()
        core.sleep(1, "abort")
        asleep()
        core.wake_up()
        handshake()
        awake()
        life.play(name)

    nap("same")
    nap("same, host memory lost", asleep=engine.offload.manager.host.reset)
    nap("others", asleep=lambda: update(1))
    life.play("right 1", extra_args=NOT_OFFLOADED)
    nap("others, again")
    nap("one weight", asleep=change_one)
    life.play("right, one weight", extra_args=NOT_OFFLOADED)
    nap("others, right after waking", awake=lambda: update(0))
    life.play("right 0", extra_args=NOT_OFFLOADED)
    nap("reset, after waking", awake=engine.scheduler.connector.reset_cache)
    # The control: no weights are compared.
    get_kv_transfer_group().connector_worker.weights.watch = SimpleNamespace(
        accept=int, begin=int, poll=lambda: False, are_same=lambda: True
    )
    nap("not compared", asleep=lambda: update(1))
    update(0)
    assert engine.llm.reset_prefix_cache()
    return {"answers": life.answers, "counts": life.counts}


def _let_workers_sleep(hooks: bool) -> None:
    """Makes the CPU worker sleep as vLLM 0.33's GPU worker does: its device blocks lose their content. With ``hooks``
    its connector is called before and after."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.v1.worker.cpu_worker import CPUWorker

    def sleep(self: Any, level: int = 1) -> None:
        if hooks:
            get_kv_transfer_group().unregister_kv_caches()
        for cache in self.model_runner.kv_caches:
            cache.fill_(7.0)

    def wake_up(self: Any, tags: list[str] | None = None) -> None:
        if hooks:
            get_kv_transfer_group().restore_kv_caches()

    CPUWorker.sleep, CPUWorker.wake_up = sleep, wake_up


def _handshake_of_a_wake(core: Any) -> Callable[[], None]:
    """Returns a function that repeats the handshake, or does nothing if this vLLM repeats it itself after a sleep."""
    if hasattr(core, "_set_kv_connector_handshake_metadata"):
        return lambda: None

    def handshake() -> None:
        infos = core.model_executor.get_kv_connector_handshake_metadata()
        merged = {rank: info for worker in infos for rank, info in worker.items()}
        core.scheduler.get_kv_connector().set_xfer_handshake_metadata_pp_aware(merged)

    return handshake


SHORT = 12
"""Tokens of each answer in a _Life."""
NOT_OFFLOADED = {"kv_transfer_params": {"kvoffload": {"load": False, "store": False}}}
"""Arguments of a request that neither loads nor stores blocks."""


class _Life:
    """Runs named rounds of an engine, and keeps the answers and how the counters grew."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: dict[str, list[Any]] = {}
        self.counts: dict[str, dict[str, float]] = {}

    def play(self, name: str, *, reset: bool = True, **arguments: Any) -> None:
        """Runs a round, after emptying the engine's own cache unless ``reset`` is False. Never resets the connector."""
        engine = self.engine
        if reset:
            assert engine.llm.reset_prefix_cache()
        before = engine.offload.metrics.snapshot()
        self.answers[name] = engine.round(max_tokens=SHORT, **arguments)
        engine.drain()
        engine.settle()
        after = engine.offload.metrics.snapshot()
        counted = ("host_hit_tokens", "tier_hit_tokens:disk", "weight_changes", "load_failures")
        self.counts[name] = {key: after.get(key, 0) - before.get(key, 0) for key in counted}

    def result(self) -> dict[str, Any]:
        return {"answers": self.answers, "counts": self.counts, **self.engine.state()}


def updates(config: dict[str, Any]) -> dict[str, Any]:
    """Changes all weights of the running engine. "right N" is the answer of weights N if everything is computed."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    engine = Engine(config)
    core, life = engine.llm.llm_engine, _Life(engine)
    directories = [Path(config["model"] + f"-weights-{seed}") for seed in range(3)]
    for seed, directory in enumerate(directories):
        write_model(directory, seed=seed)

    def update(seed: int) -> None:
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(directories[seed])})

    life.play("first")
    life.play("again")
    update(1)
    life.play("updated")
    life.play("updated, again")
    update(2)
    # Until it is reset, the engine's own cache holds old KV.
    life.play("not reset", reset=False)
    life.play("late reset")
    life.play("late reset, again")
    for i, prompt in enumerate(engine.prompts):
        core.add_request(f"r{i}", {"prompt_token_ids": prompt}, engine.sampling())
    loading = False
    for _ in range(config["steps"]):
        core.step()
        loading |= any(
            request.status.name == "WAITING_FOR_REMOTE_KVS" for request in engine.scheduler.requests.values()
        )
    update(0)
    while core.has_unfinished_requests():
        core.step()
    life.play("under requests")
    life.play("under requests, again")
    for seed in (1, 2, 0):
        update(seed)
        life.play(f"right {seed}", extra_args=NOT_OFFLOADED)
    life.play("stored")
    # The control: the weights are not watched.
    get_kv_transfer_group().connector_worker.weights.watch = None
    update(1)
    life.play("unwatched", extra_args={"kv_transfer_params": {"kvoffload": {"store": False}}})
    engine.close()
    return {"loading": loading, **life.result()}


def _write_embedding(worker: Any, weights: list[Any], number: int) -> None:
    """Writes in place, at the same address, so that only the values differ. ``weights`` keeps both."""
    import torch

    parameter = worker.get_model().model.embed_tokens.weight
    if not weights:
        weights += [parameter.detach().clone(), parameter.detach().flip(0).clone()]
    with torch.inference_mode():
        parameter.data.copy_(weights[number])


def swapped(config: dict[str, Any]) -> dict[str, Any]:
    """Writes other weights in place and then the former ones again. Before each round only the engine's own cache is
    emptied. "right N" is the answer of weights N if everything is computed; in the last two rounds nothing compares."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    engine = Engine(config)
    life, weights = _Life(engine), list[Any]()
    for name, number in (("right 1", 1), ("right 0", 0), ("other", 1), ("back", 0), ("unwatched", 1), ("and back", 0)):
        if name == "unwatched":
            get_kv_transfer_group().connector_worker.weights.watch = None
        engine.llm.collective_rpc(_write_embedding, args=(weights, number))
        arguments: dict[str, Any] = {"extra_args": NOT_OFFLOADED} if name.startswith("right") else {}
        life.play(name, **arguments)
    engine.close()
    return life.result()


def sessions(config: dict[str, Any]) -> dict[str, Any]:
    """Runs sessions with streaming input of two inputs each. A session drops the token that it has sampled after the
    first, which completes a block, when the second comes. Then asks for prompts that begin with the first input and
    that token: "plain", "again", and "right" if everything is computed. If ``unlimited``, kvoffload offloads sessions,
    whatever the version of vLLM.

    ``meanwhile``: "waiting": such a prompt was looked up before the first input was computed, and gets device blocks
    after the second. "preempted": a request of the first input alone samples that token, loses its device blocks and
    gets others; the prompts begin with what it has sampled. ``ask``: prompts for which an engine without sessions is
    asked."""
    if config.get("unlimited"):
        from kvoffload.vllm import hints

        hints.FIRST_TO_NAME_SESSIONS = "0"
    engine, random, prompts = Engine(config), Random(3), list[list[int]](config.get("ask", []))
    core, meanwhile, refused = engine.llm.llm_engine, config.get("meanwhile"), set[str]()
    manager = engine.scheduler.kv_cache_manager
    allocate = manager.allocate_slots
    manager.allocate_slots = lambda request, *args, **kwargs: (
        None if request.request_id in refused else allocate(request, *args, **kwargs)
    )

    def send(name: str, tokens: list[int], resumable: bool = True, **sampling: Any) -> Any:
        """Sends an input as AsyncLLM does, and returns the request."""
        inputs = {"prompt_token_ids": list(tokens)}, engine.sampling(**{"max_tokens": 1, **sampling})
        made = core.input_processor.process_inputs(name, *inputs, core.get_supported_tasks(), resumable=resumable)
        core.engine_core.add_request(made)
        return engine.scheduler.requests.get(name)

    def step(request: Any, until: Callable[[Any], bool]) -> None:
        while not until(request):
            core.step()

    firsts = [random.choices(range(5, 500), k=blocks * BLOCK_SIZE - 1) for blocks in config.get("blocks", ())]
    answers = engine.round(firsts, max_tokens=1, extra_args=NOT_OFFLOADED) if firsts else []
    assert engine.llm.reset_prefix_cache()
    for i, (first, (sampled, _)) in enumerate(zip(firsts, answers, strict=True)):
        session, other = f"session {i}", f"other {i}"
        then, more = (random.choices(range(5, 500), k=k) for k in (40, 60))
        prompt = [*first, *sampled, *more]
        request = send(session, first)
        if meanwhile == "waiting":
            refused.add(other)
            waiting = send(other, prompt, resumable=False)
        step(request, lambda each: each.status.name == "WAITING_FOR_STREAMING_REQ")
        assert request.all_token_ids[-1:] == sampled
        send(session, then)
        step(request, lambda each: each.status.name == "WAITING_FOR_STREAMING_REQ")
        if meanwhile == "preempted":
            waiting = send(other, first, resumable=False, max_tokens=50)
            step(waiting, lambda each: each.num_output_tokens == 3)
            refused.add(other)
            step(waiting, lambda each: each.status.name == "PREEMPTED")
        refused.clear()
        send(session, [0], resumable=False)
        engine.drain()
        prompts.append([*waiting.all_token_ids, *more] if meanwhile else prompt)
    life = _Life(engine)
    # A version that keeps the hashes answers wrongly itself here. What it computes behind such blocks must not be kept.
    life.play("from the device", prompts=prompts, reset=False)
    life.play("plain", prompts=prompts)
    life.play("again", prompts=prompts)
    life.play("right", prompts=prompts, extra_args=NOT_OFFLOADED)
    result = life.result()
    engine.close()
    return {"prompts": prompts, **result}


def write_adapter(directory: Path, seed: int) -> None:
    """Writes a LoRA adapter that changes the answers of the tiny model."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    outputs = {"q_proj": 128, "k_proj": 64, "v_proj": 64}
    tensors = {}
    for layer in range(2):
        for name, size in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = rng.normal(0, 0.3, (8, 128)).astype(np.float32)
            tensors[f"{prefix}.lora_B.weight"] = rng.normal(0, 0.3, (size, 8)).astype(np.float32)
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": list(outputs), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(described))


def adapters(config: dict[str, Any]) -> dict[str, Any]:
    """Runs rounds with LoRA adapters whose files are replaced, with one slot on the device and two places in host
    memory. ``plays`` are tuples of the name of a round, the name and the number of its adapter, the seed with which the
    files of that name are written before (0: they are left as they are) and how it is loaded then: "" in the first step
    that uses it, "load" or "reload" as a server does when it is asked to, "reload once" without a word in the requests.
    Each round is computed again after that, as "right NAME". If ``blind``, all adapters have the same digest."""
    from vllm.lora.request import LoRARequest

    changes = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2, "max_lora_rank": 8}
    if config.get("blind"):
        from kvoffload.vllm import adapters as watched

        watched.digest_of = lambda model, rank=0: b"the same"
    engine = Engine({**config, "engine": {**changes, **config.get("engine", {})}})
    life = _Life(engine)
    directory = Path(config["model"] + "-adapters")
    directory.mkdir(exist_ok=True)
    for name, adapter, number, seed, how in config["plays"]:
        path = directory / adapter
        if seed:
            write_adapter(path, seed)
        if how:
            loaded = LoRARequest(adapter, number, str(path), load_inplace=how.startswith("reload"))
            engine.llm.llm_engine.add_lora(loaded)
        request = LoRARequest(adapter, number, str(path), load_inplace=how == "reload")
        life.play(name, lora_request=request)
        life.play(f"right {name}", lora_request=request, extra_args=NOT_OFFLOADED)
    engine.close()
    return life.result()


def retained(config: dict[str, Any]) -> dict[str, Any]:
    """Asks prompts whose blocks are to be retained for ``seconds``, then as many others as fill the host pool
    ``floods`` times, then the first ones again, without the device's cache: in each of ``rounds``. ``found`` has the
    tokens of each prompt that were found the second time, ``wrong`` which answers changed. With ``ask_first``, before
    all that, the prompts of the first round are asked that another process has had retained, after a flood.
    ``kept``: the blocks that are still charged a second after the time of a last retention of one second."""
    engine = Engine(config)
    offload, rng = engine.offload, np.random.default_rng(config.get("seed", 7))
    host = getattr(offload.manager, "host", offload.manager)
    size, found, wrong = 6 * BLOCK_SIZE + 3, [], 0

    def ask(prompts: list[list[int]], **options: Any) -> list[Any]:
        assert engine.llm.reset_prefix_cache()
        answers = []
        for i, prompt in enumerate(prompts):
            params = {"kvoffload": {"session": f"s{i}", **options}} if options else {}
            answers += engine.round([prompt], extra_args={"kv_transfer_params": params}, max_tokens=4)
            # Only a part of the host's blocks may wait, pinned, until the disk has what it is to retain.
            engine.drain()
            engine.settle()
        return answers

    def flood() -> None:
        per_round = 8
        for _ in range(int(config["floods"] * host.num_blocks) // (per_round * 12) + 1):
            others = rng.integers(5, 500, size=(per_round, 12 * BLOCK_SIZE + 1)).tolist()
            engine.round(others, max_tokens=1)
        engine.drain()
        engine.settle()

    def tokens(records: list[Any]) -> list[int]:
        return [record.host_tokens + record.disk_tokens for record in records]

    def prompts_of(number: int) -> list[list[int]]:
        shared = np.random.default_rng(number).integers(5, 500, size=(config["sessions"], size))
        return shared.tolist()  # type: ignore[no-any-return]

    params = {"kvoffload": {"session": "answered", "retain_s": config["seconds"]}}
    output = engine.llm.generate(
        [{"prompt_token_ids": prompts_of(2000)[0]}],
        engine.sampling(max_tokens=1, extra_args={"kv_transfer_params": params}),
        use_tqdm=False,
    )
    answered = output[0].kv_transfer_params
    ask(prompts_of(2001)[:1], session="answered", retain_s=0)
    before: list[int] = []
    if config.get("ask_first"):
        flood()
        ask(prompts_of(0))
        before = tokens(list(offload.records)[-config["sessions"] :])
    for number in range(config["rounds"]):
        prompts, options = prompts_of(number), {"retain_s": config["seconds"]} if config["seconds"] else {}
        right = ask(prompts, **options)
        flood()
        again = ask(prompts, **({"retain_s": 0} if options and not config.get("keeps") else {}))
        found += tokens(list(offload.records)[-len(prompts) :])
        wrong += sum(one[0] != other[0] for one, other in zip(right, again, strict=True))
    ask(prompts_of(1000)[:1], session="another", retain_s=1.0)
    time.sleep(2.0)
    kept = sum(n for name, n in offload.metrics.snapshot().items() if name.startswith("tenant_retained_blocks:"))
    result = {
        "found": found,
        "wrong": wrong,
        "before": before,
        "kept": kept,
        "answered": answered,
        "expected": size // BLOCK_SIZE,
    }
    state = engine.state()
    engine.close()
    return result | {"pool": host.num_blocks, **state}


def endless(config: dict[str, Any]) -> dict[str, Any]:
    """Runs two rounds, writes the result, and continues to run rounds until the process is killed."""
    engine = Engine(config)
    write_result({"outputs": [engine.round(), engine.round()]})
    while True:
        engine.round()


def tier_rounds(config: dict[str, Any]) -> dict[str, Any]:
    """Asks each prompt alone on vLLM's own connector, and shuts down as a server does. ``cached`` has the number of
    tokens per prompt that were not computed."""
    engine = Engine(config)
    outputs: list[Any] = []
    for prompt in engine.prompts:
        outputs += engine.llm.generate([{"prompt_token_ids": prompt}], engine.sampling(), use_tqdm=False)
        engine.drain()
    engine.close()
    return {"outputs": [answer(each) for each in outputs], "cached": [each.num_cached_tokens or 0 for each in outputs]}


def tier_endless(config: dict[str, Any]) -> dict[str, Any]:
    """Asks the first prompt, then random ones, two at a time, until the process is killed. Writes a line of JSON per
    answer to the file ``said``."""
    engine, random = Engine(config), Random(config["seed"])
    with open(config["said"], "w") as said:
        for number in itertools.count():
            chosen = [random.randrange(len(engine.prompts)) for _ in range(2)] if number else [0]
            prompts = [{"prompt_token_ids": engine.prompts[i]} for i in chosen]
            for index, output in zip(
                chosen, engine.llm.generate(prompts, engine.sampling(), use_tqdm=False), strict=True
            ):
                line = {"prompt": index, "answer": answer(output), "cached": output.num_cached_tokens or 0}
                print(json.dumps(line), file=said, flush=True)
    raise AssertionError("not reached")


class _Speculative:
    """The part of a speculative config that the adapter reads before it refuses it."""

    def __init__(self, method: str) -> None:
        self.method = method

    def use_eagle(self) -> bool:
        return self.method == "eagle"

    def use_eagle_block_drop(self) -> bool:
        return self.use_eagle()

    def use_multi_module_mtp(self) -> bool:
        return False


def refusals(config: dict[str, Any]) -> dict[str, Any]:
    """Makes a connector for each of ``cases`` and returns its error, number of blocks, engines and fingerprint.

    A case has ``options`` of the connector (with ``own`` of vLLM's own one), ``flags`` for vLLM's EngineArgs, and
    ``changes`` to the resulting configuration by dotted name, for what no flag sets or a CPU cannot have. Names that
    vLLM does not know raise.
    """
    model = Path(config["model"] + "-llama")
    if not model.exists():
        write_model(model)
    import torch
    import vllm
    from vllm.config import KVTransferConfig, ModelConfig, PoolerConfig, VllmConfig
    from vllm.config.multimodal import MultiModalConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, RSWASpec

    from kvoffload.fingerprints import fingerprint
    from kvoffload.vllm import KVOffloadConnector
    from kvoffload.vllm.fingerprint import fingerprint_parts

    def make_config(flags: dict[str, Any]) -> Any:
        made = {"pooler_config": lambda v: PoolerConfig(**v)}
        arguments = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "float32",
            "block_size": BLOCK_SIZE,
            **{name: made[name](value) if name in made else value for name, value in flags.items()},
        }
        connector = KVTransferConfig(
            kv_connector="KVOffloadConnector", kv_connector_module_path="kvoffload.vllm", kv_role="kv_both"
        )
        return EngineArgs(model=str(model), kv_transfer_config=connector, **arguments).create_engine_config()

    # Newer versions accept this flag only with a GPU.
    if hasattr(VllmConfig, "_verify_aux_output_compatibility"):
        VllmConfig._verify_aux_output_compatibility = lambda self: None
    usual = make_config({})
    common = {"block_size": BLOCK_SIZE, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    specs: dict[str, Any] = {
        "full": FullAttentionSpec(**common),
        "prefix-lm": FullAttentionSpec(**common, non_causal=True),
        "rswa": RSWASpec(**common, rswa_window=64),
        "mamba": MambaSpec(block_size=BLOCK_SIZE, shapes=((2, 2),), dtypes=(torch.float32,)),
    }
    specs["mamba, aligned"] = replace(specs["mamba"], mamba_cache_mode="align")
    said: dict[str, Any] = {}
    blocks: dict[str, int] = {}
    engines: dict[str, list[int]] = {}
    fingerprints: dict[str, str] = {}
    os.environ.pop("PYTHONHASHSEED", None)
    for name, case in config["cases"].items():
        vllm_config = make_config(case["flags"]) if case.get("flags") else usual
        vllm_config.kv_transfer_config.kv_connector_extra_config = case["options"]
        changes = dict(case.get("changes", {}))
        caches = KVCacheConfig(
            num_blocks=DEVICE_BLOCKS,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer0", "layer1"], specs[changes.pop("kv_cache", "full")])],
        )
        before: list[tuple[Any, str, Any]] = [(vllm, "__version__", vllm.__version__)]
        seed = changes.pop("PYTHONHASHSEED", None)
        if seed is not None:
            os.environ["PYTHONHASHSEED"] = seed
        others, role_of_all = changes.pop("others", None), changes.pop("role_of_all", "kv_both")
        if others is not None:
            entry = connector(case["options"])
            before.append((vllm_config, "kv_transfer_config", vllm_config.kv_transfer_config))
            vllm_config.kv_transfer_config = KVTransferConfig(
                kv_connector="MultiConnector",
                kv_role=role_of_all,
                kv_connector_extra_config={"connectors": [entry, *others]},
            )
        # Versions before 0.33 lack it, and later ones set it only without a connector.
        ahead = changes.pop("num_hash_lookahead_tokens", 0)
        before.append((VllmConfig, "num_hash_lookahead_tokens", getattr(VllmConfig, "num_hash_lookahead_tokens", 0)))
        if ahead:
            VllmConfig.num_hash_lookahead_tokens = ahead
        if changes.pop("mla", False):
            before.append((ModelConfig, "use_mla", ModelConfig.use_mla))
            ModelConfig.use_mla = property(lambda self: True)
        vllm.__version__ = changes.pop("version", vllm.__version__)
        for name_, value in changes.items():
            path, _, key = name_.rpartition(".")
            part = functools.reduce(getattr, path.split("."), vllm_config) if path else vllm_config
            before.append((part, key, getattr(part, key)))
            makers: dict[str, Callable[[Any], Any]] = {
                "multimodal_config": lambda v: MultiModalConfig(**v),
                "speculative_config": _Speculative,
            }
            setattr(part, key, makers[key](value) if key in makers else value)
        try:
            if case.get("own"):
                made = OffloadingConnector(vllm_config, KVConnectorRole.SCHEDULER, caches)
                (tier,) = made.connector_scheduler.manager.secondary_tiers
                engines[name] = [tier.layout.engine, tier.layout.engines]
                fingerprints[name] = fingerprint(tier.layout.fingerprint_parts)
                made.shutdown()
                said[name] = None
                continue
            # vLLM makes them in this order.
            for role in (KVConnectorRole.WORKER, KVConnectorRole.SCHEDULER):
                if others is None:
                    made = KVOffloadConnector(vllm_config, role, caches)
                else:
                    made = MultiConnector(vllm_config, role, caches).sub_connectors[0]
            said[name] = None
            layout = made.layout
            blocks[name] = layout.count_blocks(layout.ranks)
            engines[name] = [layout.engine, layout.engines]
            fingerprints[name] = fingerprint(fingerprint_parts(vllm_config, layout, []))
        except Exception as error:
            said[name] = [type(error).__name__, str(error)]
        finally:
            for part, key, value in before:
                setattr(part, key, value)
            os.environ.pop("PYTHONHASHSEED", None)
    return {"said": said, "blocks": blocks, "engines": engines, "fingerprints": fingerprints}


def fingerprints(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the fingerprint, or the error, of each of ``cases``, their identities in words, the names of the
    parts of a fingerprint, and those of which an identity says nothing.

    A case has ``engine`` (arguments of vLLM), ``options`` of the connector, ``environment``, ``multimodal`` (settings,
    as if the model were multimodal) and ``changes`` (text of files of the model).
    """
    model = Path(config["model"] + "-fingerprints")
    write_model(model)
    import torch
    from vllm.config import KVTransferConfig
    from vllm.config.multimodal import MultiModalConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from kvoffload.connector.ranks import LayerPages
    from kvoffload.fingerprints import fingerprint
    from kvoffload.host.pool import PoolHandle
    from kvoffload.vllm.fingerprint import describe_parts, fingerprint_parts
    from kvoffload.vllm.layout import EngineLayout, RankInfo, layers_of

    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32)
    caches = KVCacheConfig(DEVICE_BLOCKS, [], [KVCacheGroupSpec(["layer0", "layer1"], spec)])
    results: dict[str, str] = {}
    identities: dict[str, dict[str, str]] = {}
    for name, case in config["cases"].items():
        environment = case.get("environment", {})
        os.environ.update(environment)
        own = {path: (model / path).read_bytes() for path in case.get("changes", {}) if (model / path).exists()}
        for path, text in case.get("changes", {}).items():
            (model / path).write_text(text)
        try:
            vllm_config = EngineArgs(
                **{
                    "model": str(model),
                    "skip_tokenizer_init": True,
                    "dtype": "float32",
                    "block_size": BLOCK_SIZE,
                    "kv_transfer_config": KVTransferConfig(
                        kv_connector="KVOffloadConnector",
                        kv_connector_module_path="kvoffload.vllm",
                        kv_role="kv_both",
                        kv_connector_extra_config=case["options"],
                    ),
                    **case.get("engine", {}),
                }
            ).create_engine_config()
            if "multimodal" in case:
                vllm_config.model_config.multimodal_config = MultiModalConfig(**case["multimodal"])
            layout = EngineLayout.from_vllm(vllm_config, caches)
            parts = fingerprint_parts(vllm_config, layout, [])
            results[name] = fingerprint(parts)
            identities[name] = describe_parts(vllm_config, layout, parts)
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
        for variable in environment:
            del os.environ[variable]
        for path in case.get("changes", {}):
            (model / path).unlink()
        for path, raw in own.items():
            (model / path).write_bytes(raw)
    pools = {"a pool per rank": [3, 4], "a pool for both ranks": [3, 3]}
    ranks = {
        name: fingerprint_parts(
            vllm_config,
            layout,
            layers_of(
                [
                    RankInfo(PoolHandle("boot", 1, fd, fd, 8, 4096), (LayerPages("layer", 64, "format"),), layout.parts)
                    for fd in files
                ]
            ),
        )["ranks"]
        for name, files in pools.items()
    }
    others = dict.fromkeys(parts, "another") | {"parallel": [3, 5], "engine": ["another"]}
    described = describe_parts(vllm_config, layout, parts)
    unsaid = [name for name in parts if describe_parts(vllm_config, layout, parts | {name: others[name]}) == described]
    return results | {"ranks": ranks, "identities": identities, "parts": sorted(parts), "unsaid": unsaid}


SCENARIOS = {
    f.__name__: f
    for f in (
        rounds,
        offloading,
        own_policy,
        cache_policies,
        one_by_one,
        whole_prompts,
        service,
        reuse,
        turns,
        divergent,
        aborts,
        failed_load,
        storm,
        tier_storm,
        tier_rounds,
        tier_endless,
        sleeps,
        updates,
        swapped,
        sessions,
        adapters,
        retained,
        queued,
        endless,
        refusals,
        fingerprints,
        beside,
    )
}


def write_result(result: dict[str, Any]) -> None:
    """Writes the result atomically."""
    path = Path(sys.argv[2])
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result))
    part.rename(path)


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())
    start = time.perf_counter()
    result = SCENARIOS[config["scenario"]](config)
    result["seconds"] = time.perf_counter() - start
    write_result(result)
    sys.stdout.flush()
    sys.stderr.flush()
    # The result is written. How vLLM shuts down is not tested here.
    os._exit(0)


if __name__ == "__main__":
    main()

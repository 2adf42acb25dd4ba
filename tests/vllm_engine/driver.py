"""Runs one vLLM engine in a process of its own: ``python driver.py CONFIG RESULT``. Both are JSON files.

CONFIG has ``acts`` (names in SCENARIOS, each with changes to CONFIG: one engine plays them one after the other, and
RESULT has what each returns), ``model`` (a directory, written if it does not exist), ``new_rows`` (how many of the last
rows of its embedding are drawn again), ``prompts`` (how many there are, by default PROMPTS), ``max_tokens`` (of an
answer, by default MAX_TOKENS), ``engine`` (arguments of ``vllm.LLM`` that differ from the usual), ``model_kind``,
``multiprocessing`` (whether the engine has processes of its own), ``connector`` (its options, or null),
``connector_class``, ``plugin`` (whether vLLM finds the connector by its entry point alone), ``offloading`` (instead of
``connector``: the options of vLLM's own), ``patches`` (names in PATCHES), ``slow``, ``failing`` and ``corrupt`` (see
``Engine.set_faults``), and what the scenario reads. The caller sets the environment variables that vLLM reads.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
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
PAGE = 4096
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
        for name in config.get("patches", ()):
            PATCHES[name]()
        self._max_tokens = config.get("max_tokens", MAX_TOKENS)
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
        self.loaded_blocks: Counter[int] = Counter()
        """Number of device blocks in loads, by group."""
        self._transfer: Any = None
        """That of the only rank, without faults."""
        self._before: dict[str, Any] = {}
        """What ``state`` returned at the end of the act before."""
        self._counts = config.get("connector") is not None and not config.get("multiprocessing")
        if self._counts:
            self._count_loads()

    def _count_loads(self) -> None:
        build, parts = self.offload.build_connector_meta, self.offload.layout.parts

        def counting(step: Any) -> Any:
            meta = build(step)
            for spec in meta.loads.values():
                self.loaded_blocks.update({g: spec.device.group_sizes[part] for g, part in enumerate(parts.last)})
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

    def set_faults(self, config: dict[str, Any]) -> None:
        """Makes copies of the only rank misbehave from now on. ``slow``, a seed: they take many steps. ``failing``: the
        share of tries that fail. ``corrupt``, "all" or "states": loads of all groups, or of those with states, bring
        wrong bytes."""
        slow, failing, corrupt = config.get("slow"), config.get("failing", 0.0), config.get("corrupt")
        if self._transfer is None and (slow, failing, corrupt) == (None, 0.0, None):
            return
        from faulty_connectors import CorruptedStates
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from tests.sim.faults import CorruptingTransfer, FailingTransfer, SlowTransfer

        self.drain()
        connector = get_kv_transfer_group()
        transfer = self._transfer = self._transfer or connector.connector_worker.transfer
        if slow is not None:
            transfer = SlowTransfer(transfer, slow)
        if failing:
            transfer = FailingTransfer(transfer, failing, slow or 0)
        if corrupt == "all":
            transfer = CorruptingTransfer(transfer, connector.pool.data)
        if corrupt == "states":
            groups = [group.state for group in connector.layout.parts.of_groups(connector.layout.kv_groups)]
            transfer = CorruptedStates(transfer, connector.pool.data, groups)
        connector.connector_worker.transfer = transfer

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

    def forget(self) -> None:
        """Empties the cache of the device, not that of the connector."""
        self.drain()
        assert self.llm.reset_prefix_cache()

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
        deadline, manager = time.monotonic() + SETTLE_DEADLINE_S, self.offload.manager
        while getattr(manager, "has_transfers", False):
            assert time.monotonic() < deadline, "the tier does not end its reads and writes"
            time.sleep(0.001)
            manager.poll()

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
        """Returns what is left after the engine has come to rest, and what was counted since the act began."""
        self.drain()
        state = self.device_state()
        state |= {name: state[name] - self._before.get(name, 0) for name in ("preemptions", "drafted", "accepted")}
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
            "metrics": self._grown(offload.metrics.snapshot()),
            "prometheus": {k: v for k, v in prometheus().items() if k.startswith("kvoffload:")},
            "records": [record.to_dict() for record in offload.records][self._before.get("records", 0) :],
            "loaded_blocks": [n for _, n in sorted(self.loaded_blocks.items())],
        }

    def _grown(self, counts: dict[str, float]) -> dict[str, float]:
        """Returns by how much counters have grown since the act began, and the values of gauges."""
        from kvoffload.observe.metrics import METRICS

        before = self._before.get("metrics", {})
        counters = {name for name in counts if METRICS[name.partition(":")[0]].kind == "counter"}
        return {name: n - before.get(name, 0) if name in counters else n for name, n in counts.items()}

    def begin(self, config: dict[str, Any]) -> None:
        """Begins an act: what was counted before counts no more, except in ``prometheus``."""
        self.set_faults(config)
        self.loaded_blocks.clear()
        if self._counts:
            self.drain()
            metrics, records = self.offload.metrics.snapshot(), len(self.offload.records)
            self._before = {**self.device_state(), "metrics": metrics, "records": records}


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


def _plant(module: Any, name: str, value: object) -> None:
    """Replaces what a module uses. A name that it no longer has would leave a control without its fault."""
    assert hasattr(module, name), f"{module.__name__} has no {name}"
    setattr(module, name, value)


def _expect_another_root() -> None:
    """Simulates a vLLM that chooses the root of its hashes in an unknown way."""
    from kvoffload.vllm import versions

    _plant(versions, "expected_hash_root", lambda vllm_config: b"another root")


def _keep_over_pauses() -> None:
    """Takes vLLM for 0.33, which calls connectors before and after a sleep."""
    from kvoffload.vllm import versions

    _plant(versions, "keeps_over_pauses", lambda vllm_config: True)


def _offload_sessions() -> None:
    """Offloads sessions with streaming input, whatever the version of vLLM."""
    from kvoffload.vllm import hints

    _plant(hints, "FIRST_TO_NAME_SESSIONS", "0")


KNOWS_FOLLOWING = [True]


def _may_forget_following() -> None:
    """Names blocks of a drafter without the tokens after them while KNOWS_FOLLOWING says so."""
    from kvoffload.vllm import connector
    from kvoffload.vllm.hints import following

    def may_forget(request: Any, position: int, n: int) -> bytes:
        return following(request, position, n) if KNOWS_FOLLOWING[0] else b""

    _plant(connector, "following", may_forget)


def _blind_adapters() -> None:
    """Gives all adapters the same digest."""
    from kvoffload.vllm import adapters as watched

    _plant(watched, "digest_of", lambda model, rank=0: b"the same")


def _shrink_staging() -> None:
    """Gives the memory between vLLM's and the tiers its least size. It would hold all blocks here, and none would be
    read from disk again."""
    from kvoffload.tiering.bridge import BridgeSettings
    from kvoffload.vllm import secondary_tier

    _plant(secondary_tier, "BridgeSettings", functools.partial(BridgeSettings, staging_bytes=0))


def _accept_any_bytes() -> None:
    """Plants a bug: blocks from disk are accepted whatever their checksums are."""
    from kvoffload.tiers.disk import blockio
    from kvoffload.tiers.disk.format import payload_checksums

    class Equal(np.ndarray):
        def __ne__(self, other: object) -> Any:
            return np.zeros(len(self), bool)

    _plant(blockio, "payload_checksums", lambda *arguments: payload_checksums(*arguments).view(Equal))


PATCHES: dict[str, Callable[[], None]] = {
    "another root": _expect_another_root,
    "keeps over pauses": _keep_over_pauses,
    "offloads sessions": _offload_sessions,
    "may forget following tokens": _may_forget_following,
    "blind to adapters": _blind_adapters,
    "little staging": _shrink_staging,
    "unverified": _accept_any_bytes,
}


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


def reference(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the answers to the prompts as ``transformers`` computes them, without vLLM."""
    import torch
    from transformers import AutoModelForCausalLM

    directory = Path(config["model"] + "-" + config["model_kind"])
    if not directory.exists():
        write_model(directory, config["model_kind"])
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    answers = []
    with torch.inference_mode():
        for prompt in config.get("asked") or make_prompts(config["prompts"]):
            known, tokens, logprobs, cache = prompt, list[int](), list[float](), None
            for _ in range(config["max_tokens"]):
                output = model(torch.tensor([known]), past_key_values=cache, use_cache=True)
                cache, likely = output.past_key_values, output.logits[0, -1].log_softmax(-1)
                known = [int(likely.argmax())]
                tokens += known
                logprobs.append(float(likely[known]))
            answers.append([tokens, logprobs])
    return {"outputs": [answers]}


def computed(engine: Engine, config: dict[str, Any]) -> dict[str, Any]:
    """Runs a round in which nothing is loaded or stored, with an empty device cache before and after it."""
    engine.forget()
    outputs = [engine.round(extra_args=NOT_OFFLOADED)]
    engine.forget()
    return {"outputs": outputs, **engine.state()}


def rounds(engine: Engine, config: dict[str, Any]) -> dict[str, Any]:
    """Runs the same prompts ``rounds`` times, after a reset if ``reset`` is set. ``close`` shuts the engine down. With
    ``forget`` the device's cache is empty before each round. ``extra_args`` are those of the requests."""
    if config.get("reset"):
        assert engine.llm.reset_prefix_cache(reset_connector=True)
    outputs = []
    for _ in range(config.get("rounds", 2)):
        if config.get("forget"):
            engine.forget()
        outputs.append(engine.round(extra_args=config.get("extra_args")))
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


def offloading(engine: Engine, config: dict[str, Any]) -> dict[str, Any]:
    """Runs the same prompts with vLLM's own offloading, whose options are ``offloading``, once per entry of ``rounds``:
    what is done before, "reset" (the caches), "corrupt" (the files of the disk tier in ``disk``), "break" (the tier is
    given a bug) or nothing. After each round all tiers come to rest; ``states`` has what was left then, and the records
    of the round. Then shuts the engine down. ``threads`` are those of kvoffload that are left, and ``loaded`` and
    ``evicted`` count chunks of vLLM's host memory."""
    import vllm
    from vllm_harness import corrupt

    manager = engine.scheduler.connector.connector_scheduler.manager
    host, counts, outputs, events = getattr(manager, "primary_tier", manager), Counter[str](), [], list[list[str]]()
    load, evict = host.prepare_load, host._policy.evict

    def prepare_load(keys: Any, context: Any) -> Any:
        counts["loaded"] += len(keys)
        return load(keys, context)

    def evict_counted(n: int, protected: Any) -> Any:
        evicted = evict(n, protected)
        counts["evicted"] += len(evicted or ())
        return evicted

    host.prepare_load, host._policy.evict = prepare_load, evict_counted
    if config.get("events"):
        publisher = engine.scheduler.kv_event_publisher
        publisher.publish = lambda batch: events.extend(map(_event, batch.events))
    states: list[dict[str, Any]] = []
    for before in config["rounds"]:
        if before == "reset":
            assert engine.llm.reset_prefix_cache(reset_connector=True)
        if before == "corrupt":
            corrupt(Path(config["disk"]))
        if before == "break":
            engine.tiers[0].bridge.load = None
        outputs.append(engine.round())
        known = sum(len(state["records"]) for state in states)
        states.append(engine.tier_state())
        states[-1]["records"] = states[-1]["records"][known:]
    if hasattr(host._policy, "check_integrity"):
        host._policy.check_integrity()
    engine.close()
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("kvoffload")]
    return {
        "vllm": vllm.__version__,
        "outputs": outputs,
        "events": events,
        "threads": threads,
        "states": states,
        **counts,
        **states[-1],
    }


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


def one_by_one(engine: Engine, config: dict[str, Any]) -> dict[str, Any]:
    """Runs each of ``asked`` alone, and then each with its answer and ``more`` tokens. The device's own cache is
    emptied after each, unless ``keeps_device_cache``. ``drafts`` has for each what the model sampled in its steps, and
    what was drafted. If it ``forgets_following``, kvoffload has forgotten all blocks, and names new ones without the
    tokens after them."""
    if config.get("forgets_following"):
        engine.offload.reset()
    KNOWS_FOLLOWING[:] = [not config.get("forgets_following")]
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


def service(engine: Engine, config: dict[str, Any]) -> dict[str, Any]:
    """Runs two rounds while events are published."""
    scheduler, events = engine.scheduler, list[list[str]]()
    publisher = scheduler.kv_event_publisher
    publisher.publish = lambda batch: events.extend(map(_event, batch.events))
    outputs = [engine.round(), engine.round()]
    state = engine.state()
    return {
        "outputs": outputs,
        "events": [event for event in events if event],
        "recomputes_failed_loads": scheduler.recompute_kv_load_failures,
        "policy": engine.llm.llm_engine.vllm_config.kv_transfer_config.kv_load_failure_policy,
        **state,
    }


def _event(event: Any) -> list[str]:
    """Returns kind, medium and hashes of a stored or removed event, or an empty list for other events."""
    hashes = getattr(event, "block_hashes", None)
    return [] if hashes is None else [type(event).__name__, event.medium, *map(repr, hashes)]


def broken(engine: Engine, config: dict[str, Any]) -> dict[str, Any]:
    """Runs a round in which the manager raises an error, with an empty device cache."""
    engine.forget()

    def lookup(*args: Any) -> int:
        raise RuntimeError("planted: the table is broken")

    engine.offload.manager.lookup = lookup
    return {"outputs": [engine.round()], **engine.state()}


def storm(engine: Engine, config: dict[str, Any]) -> dict[str, Any]:
    """Runs ``requests`` random requests by ``seed``. Some are aborted, some ask for remote decode, and caches are reset
    while they run; with ``keeps_connector`` only that of the device. ``flips``: the chance per step that bytes of a
    file in ``folder`` change. Answers are [index of the prompt, answer]."""
    random = Random(config["seed"])
    core = engine.llm.llm_engine
    resets = [
        engine.llm.reset_prefix_cache,
        lambda: engine.llm.reset_prefix_cache(reset_connector=True),
        engine.scheduler.connector.reset_cache,
    ][: 1 if config.get("keeps_connector") else None]
    live: dict[str, int] = {}
    answers: list[Any] = []
    arrived = aborted = 0
    options = config.get("connector")
    for step in range(MAX_STEPS):
        if arrived < config["requests"] and len(live) < 12 and random.random() < config.get("arrivals", 0.25):
            index, name = random.randrange(len(engine.prompts)), f"s{arrived}"
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
        if "flips" in config and random.random() < config["flips"]:
            _change_a_page(Path(config["folder"]), random)
        if options is not None and "disk_dir" in options and random.random() < 0.3:
            # This bounds the steps that a job of the disk takes, however fast this machine runs steps.
            engine.settle()
        finished = [output for output in core.step() if output.finished and output.request_id in live]
        answers += [[live.pop(output.request_id), answer(output)] for output in finished]
        if options is not None and step % 50 == 0:
            engine.offload.manager.check_integrity()
        if arrived == config["requests"] and not live:
            break
    state = engine.tier_state() if options is None else engine.state()
    return {"answers": answers, "aborted": aborted, "left": len(live), **state}


def _change_a_page(folder: Path, random: Random) -> None:
    """Changes the highest byte of each sixteenth float in a random page of a random file."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size >= PAGE)
    if not paths:
        return
    path = random.choice(paths)
    page = random.randrange(path.stat().st_size // PAGE)
    # Files may disappear while this runs.
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        file.seek(page * PAGE)
        raw = np.frombuffer(file.read(PAGE), np.uint8).copy()
        raw[3::64] ^= 0x5A
        file.seek(page * PAGE)
        file.write(raw.tobytes())


def sleeps(engine: Engine, config: dict[str, Any]) -> dict[str, Any]:
    """Sleeps and wakes up once per entry of ``modes``, the pause modes of vLLM, each time under load and with stores in
    progress. Device blocks lose their content meanwhile.

    With ``forgetful`` the job numbers begin again at each handshake. Otherwise the engine then sleeps without load,
    with the same weights and with others, and weights are written in place while it is awake. At the end the workers
    have other pools. Answers are [index of the prompt, answer] for all requests that were not aborted.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kvoffload.connector import jobs as job_table
    from kvoffload.observe import server as records

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
        result["swapped"] = swapped(engine, config)
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
        write_model(directory, config.get("model_kind", "llama"), seed=seed)

    def update(seed: int) -> None:
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(directories[seed])})

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
    nap("others, right after waking", awake=lambda: update(0))
    life.play("right 0", extra_args=NOT_OFFLOADED)
    nap("reset, after waking", awake=engine.scheduler.connector.reset_cache)
    # The control: no weights are compared.
    weights = get_kv_transfer_group().connector_worker.weights
    watch, weights.watch = (
        weights.watch,
        SimpleNamespace(accept=int, begin=int, poll=lambda: False, are_same=lambda: True),
    )
    nap("not compared", asleep=lambda: update(1))
    weights.watch = watch
    update(0)
    assert engine.llm.reset_prefix_cache(reset_connector=True)
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


def _write_embedding(worker: Any, weights: list[Any], number: int) -> None:
    """Writes in place, at the same address, so that only the values differ. ``weights`` keeps both."""
    import torch

    parameter = worker.get_model().model.embed_tokens.weight
    if not weights:
        weights += [parameter.detach().clone(), parameter.detach().flip(0).clone()]
    with torch.inference_mode():
        parameter.data.copy_(weights[number])


def swapped(engine: Engine, config: dict[str, Any]) -> dict[str, Any]:
    """Writes other weights in place and then the former ones again. Before each round only the engine's own cache is
    emptied. "right N" is the answer of weights N if everything is computed; in the last two rounds nothing compares."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    life, weights = _Life(engine), list[Any]()
    for name, number in (("right 1", 1), ("right 0", 0), ("other", 1), ("back", 0), ("unwatched", 1), ("and back", 0)):
        if name == "unwatched":
            get_kv_transfer_group().connector_worker.weights.watch = None
        engine.llm.collective_rpc(_write_embedding, args=(weights, number))
        arguments: dict[str, Any] = {"extra_args": NOT_OFFLOADED} if name.startswith("right") else {}
        life.play(name, **arguments)
    return life.result()


def sessions(engine: Engine, config: dict[str, Any]) -> dict[str, Any]:
    """Runs sessions with streaming input of two inputs each. A session drops the token that it has sampled after the
    first, which completes a block, when the second comes. Then asks for prompts that begin with the first input and
    that token: "plain", "again", and "right" if everything is computed. ``ask``: prompts for which an engine without
    sessions is asked."""
    random, prompts = Random(3), list[list[int]](config.get("ask", []))
    core = engine.llm.llm_engine

    def send(name: str, tokens: list[int], resumable: bool = True) -> Any:
        """Sends an input as AsyncLLM does, and returns the request."""
        inputs = {"prompt_token_ids": list(tokens)}, engine.sampling(max_tokens=1)
        made = core.input_processor.process_inputs(name, *inputs, core.get_supported_tasks(), resumable=resumable)
        core.engine_core.add_request(made)
        return engine.scheduler.requests.get(name)

    def step_until_it_waits(request: Any) -> None:
        while request.status.name != "WAITING_FOR_STREAMING_REQ":
            core.step()

    firsts = [random.choices(range(5, 500), k=blocks * BLOCK_SIZE - 1) for blocks in config.get("blocks", ())]
    answers = engine.round(firsts, max_tokens=1, extra_args=NOT_OFFLOADED) if firsts else []
    assert engine.llm.reset_prefix_cache()
    for i, (first, (sampled, _)) in enumerate(zip(firsts, answers, strict=True)):
        then, more = (random.choices(range(5, 500), k=k) for k in (40, 60))
        request = send(f"session {i}", first)
        step_until_it_waits(request)
        assert request.all_token_ids[-1:] == sampled
        send(f"session {i}", then)
        step_until_it_waits(request)
        send(f"session {i}", [0], resumable=False)
        engine.drain()
        prompts.append([*first, *sampled, *more])
    life = _Life(engine)
    # A version that keeps the hashes answers wrongly itself here. What it computes behind such blocks must not be kept.
    life.play("from the device", prompts=prompts, reset=False)
    life.play("plain", prompts=prompts)
    life.play("again", prompts=prompts)
    life.play("right", prompts=prompts, extra_args=NOT_OFFLOADED)
    return {"prompts": prompts, **life.result()}


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


def adapters(engine: Engine, config: dict[str, Any]) -> dict[str, Any]:
    """Runs rounds with LoRA adapters whose files are replaced. ``plays`` are tuples of the name of a round, the name
    and the number of its adapter, the seed with which the files of that name are written before (0: they stay as they
    are) and how it is loaded then: "" in the first step that uses it, "load" or "reload" as a server does when it is
    asked to, "reload once" without a word in the requests. Each round is computed again after it: "right NAME"."""
    from vllm.lora.request import LoRARequest

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


def endless(engine: Engine, config: dict[str, Any]) -> NoReturn:
    """Asks the first prompt, then random ones, until the process is killed. Writes a line to the file ``said`` per
    answer."""
    random, index = Random(0), 0
    engine.forget()
    with open(config["said"], "w") as said:
        while True:
            engine.round([engine.prompts[index]])
            print(f"answered prompt {index}", file=said, flush=True)
            index = random.randrange(len(engine.prompts))


@dataclass
class Speculative:
    """The part of vLLM's speculative config that says how far a drafter looks ahead."""

    method: str
    modules: int = 1
    num_speculative_tokens: int = 3

    def use_eagle(self) -> bool:
        return self.method in ("eagle", "mtp", "dflash", "dspark")

    def use_multi_module_mtp(self) -> bool:
        return self.modules > 1

    def use_eagle_block_drop(self) -> bool:
        return self.use_eagle()


def configurations(config: dict[str, Any]) -> dict[str, Any]:
    """Makes the connector's halves for each of ``cases`` and returns by case: what is ``said`` (the error or None),
    ``blocks``, ``engines``, ``fingerprints``, and ``identities`` in words. Beside that the names of the ``parts`` of a
    fingerprint, those of which an identity says nothing (``unsaid``), and the parts of ranks with and without a pool of
    their own (``ranks``).

    A case has ``options`` of the connector (with ``own`` of vLLM's own one), ``flags`` for vLLM's EngineArgs,
    ``environment``, ``files`` (text of files of the model), and ``changes`` to the resulting configuration by dotted
    name, for what no flag sets or a CPU cannot have. Names that vLLM does not know raise.
    """
    model = Path(config["model"] + "-configurations")
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

    from kvoffload.connector.ranks import LayerPages
    from kvoffload.fingerprints import fingerprint
    from kvoffload.host.pool import PoolHandle
    from kvoffload.vllm import KVOffloadConnector
    from kvoffload.vllm.fingerprint import describe_parts, fingerprint_parts
    from kvoffload.vllm.layout import RankInfo, layers_of

    def make_config(flags: dict[str, Any]) -> Any:
        made = {"pooler_config": lambda v: PoolerConfig(**v)}
        usual = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32", "block_size": BLOCK_SIZE}
        flags = {name: made[name](value) if name in made else value for name, value in flags.items()}
        transfer = KVTransferConfig(**connector({}))
        return EngineArgs(model=str(model), kv_transfer_config=transfer, **(usual | flags)).create_engine_config()

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
    result: dict[str, Any] = {name: {} for name in ("said", "blocks", "engines", "fingerprints", "identities")}
    os.environ.pop("PYTHONHASHSEED", None)
    for name, case in config["cases"].items():
        changes, files, environment = (dict(case.get(what, {})) for what in ("changes", "files", "environment"))
        if "PYTHONHASHSEED" in changes:
            environment["PYTHONHASHSEED"] = changes.pop("PYTHONHASHSEED")
        own = {path: (model / path).read_bytes() for path in files if (model / path).exists()}
        for path, text in files.items():
            (model / path).write_text(text)
        os.environ.update(environment)
        before: list[tuple[Any, str, Any]] = [(vllm, "__version__", vllm.__version__)]
        try:
            is_usual = not (case.get("flags") or environment)
            vllm_config = usual if is_usual else make_config(case.get("flags") or {})
            vllm_config.kv_transfer_config.kv_connector_extra_config = case["options"]
            spec = specs[changes.pop("kv_cache", "full")]
            caches = KVCacheConfig(DEVICE_BLOCKS, [], [KVCacheGroupSpec(["layer0", "layer1"], spec)])
            others, role_of_all = changes.pop("others", None), changes.pop("role_of_all", "kv_both")
            if others is not None:
                before.append((vllm_config, "kv_transfer_config", vllm_config.kv_transfer_config))
                vllm_config.kv_transfer_config = KVTransferConfig(
                    kv_connector="MultiConnector",
                    kv_role=role_of_all,
                    kv_connector_extra_config={"connectors": [connector(case["options"]), *others]},
                )
            # Versions before 0.33 lack it, and later ones set it only without a connector.
            ahead = changes.pop("num_hash_lookahead_tokens", 0)
            then = getattr(VllmConfig, "num_hash_lookahead_tokens", 0)
            before.append((VllmConfig, "num_hash_lookahead_tokens", then))
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
                    "speculative_config": Speculative,
                }
                setattr(part, key, makers[key](value) if key in makers else value)
            if case.get("own"):
                made = OffloadingConnector(vllm_config, KVConnectorRole.SCHEDULER, caches)
                (tier,) = made.connector_scheduler.manager.secondary_tiers
                layout, parts = tier.layout, tier.layout.fingerprint_parts
                made.shutdown()
            else:
                # vLLM makes them in this order.
                for role in (KVConnectorRole.WORKER, KVConnectorRole.SCHEDULER):
                    if others is None:
                        made = KVOffloadConnector(vllm_config, role, caches)
                    else:
                        made = MultiConnector(vllm_config, role, caches).sub_connectors[0]
                layout = made.layout
                parts = fingerprint_parts(vllm_config, layout, [])
                result["blocks"][name] = layout.count_blocks(layout.ranks)
            result["said"][name] = None
            result["engines"][name] = [layout.engine, layout.engines]
            result["fingerprints"][name] = fingerprint(parts)
            result["identities"][name] = describe_parts(vllm_config, layout, parts)
        except Exception as error:
            result["said"][name] = [type(error).__name__, str(error)]
        finally:
            for part, key, value in before:
                setattr(part, key, value)
            for variable in environment:
                del os.environ[variable]
            for path in files:
                (model / path).unlink()
            for path, raw in own.items():
                (model / path).write_bytes(raw)
    pages, others = (LayerPages("layer", 64, "format"),), {"parallel": [3, 5], "engine": ["another"]}
    described = describe_parts(vllm_config, layout, parts)
    return result | {
        "ranks": {
            name: layers_of([RankInfo(PoolHandle("boot", 1, fd, fd, 8, 4096), pages, layout.parts) for fd in files])
            for name, files in {"a pool per rank": [3, 4], "a pool for both ranks": [3, 3]}.items()
        },
        "parts": sorted(parts),
        "unsaid": [
            name
            for name in parts
            if describe_parts(vllm_config, layout, parts | {name: others.get(name, "another")}) == described
        ],
    }


SCENARIOS = {
    f.__name__: f
    for f in (
        computed,
        rounds,
        offloading,
        one_by_one,
        service,
        broken,
        storm,
        sleeps,
        sessions,
        adapters,
        endless,
    )
}
WITHOUT_ENGINE = {f.__name__: f for f in (reference, cache_policies, configurations, beside)}
"""Scenarios that start no engine, or another one."""


def write_result(result: dict[str, Any]) -> None:
    """Writes the result atomically."""
    path = Path(sys.argv[2])
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result))
    part.rename(path)


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())
    acts: dict[str, dict[str, Any]] = config["acts"]
    start, results = time.perf_counter(), dict[str, Any]()
    if set(acts) <= WITHOUT_ENGINE.keys():
        results = {name: WITHOUT_ENGINE[name](config | changes) for name, changes in acts.items()}
    else:
        engine = Engine(config)
        for name, changes in acts.items():
            engine.begin(config | changes)
            write_result(results)
            # The same scenario may be played more than once: "rounds, failing".
            results[name] = SCENARIOS[name.partition(",")[0]](engine, config | changes)
    results["seconds"] = time.perf_counter() - start
    write_result(results)
    sys.stdout.flush()
    sys.stderr.flush()
    # The result is written. How vLLM shuts down is not tested here.
    os._exit(0)


if __name__ == "__main__":
    main()

"""One vLLM engine in a process of its own: ``python driver.py CONFIG RESULT``, both JSON files.

CONFIG: ``scenario`` (a name in SCENARIOS), ``model`` (directory, written if it is not there), ``weights`` (the seed of
its weights; given, they replace those that are there), ``engine``
(arguments of ``vllm.LLM`` that differ from the usual), ``model_kind``, ``multiprocessing`` (whether the engine
has processes of its own), ``connector`` (its options, null for none),
``connector_class``, and what the scenario reads. The environment that vLLM reads is set by the caller.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

BLOCK_SIZE = 32
DEVICE_BLOCKS = 24
MAX_TOKENS = 48
PROMPTS = 10
MAX_STEPS = 20_000
WINDOW = 70
"""Of sliding layers, in tokens: more than two blocks, and no whole number of them."""


def write_model(directory: Path, kind: str = "llama", seed: int = 0) -> None:
    """A tiny model. Its weights are large enough for what it reads to decide what it says. "gemma3": layers that see a
    window of WINDOW tokens, and layers that see all, by turns."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "initializer_range": 0.08,
        "tie_word_embeddings": False,
    }
    if kind == "gemma3":
        layers = ["sliding_attention", "full_attention"] * 2
        config = Gemma3TextConfig(num_hidden_layers=4, sliding_window=WINDOW, layer_types=layers, **sizes)
        model = Gemma3ForCausalLM(config)
    else:
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes))
    model.float().save_pretrained(directory)


def make_prompts() -> list[list[int]]:
    """Three to twelve blocks each; every other one begins with the same three blocks."""
    rng = np.random.default_rng(1)
    shared = rng.integers(5, 500, size=3 * BLOCK_SIZE).tolist()
    prompts = []
    for i in range(PROMPTS):
        own = rng.integers(5, 500, size=int(rng.integers(20, 9 * BLOCK_SIZE))).tolist()
        prompts.append(shared + own if i % 2 else own + shared)
    return prompts


class Engine:
    """A vLLM engine, and what can be seen of it from inside its process."""

    def __init__(self, config: dict[str, Any]) -> None:
        kind = config.get("model_kind", "llama")
        model = Path(config["model"] + "-" + kind)
        if "weights" in config or not model.exists():
            write_model(model, kind, config.get("weights", 0))
        if config.get("unexpected_root"):
            _expect_another_root()
        from vllm.config import KVEventsConfig, KVTransferConfig
        from vllm.entrypoints.llm import LLM

        if config.get("force_async"):
            _allow_async_scheduling()
        arguments: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks_override": DEVICE_BLOCKS,
            "dtype": "float32",
            "max_model_len": 512,
            "max_num_batched_tokens": 1024,
            "disable_log_stats": False,
            "seed": 0,
            **config.get("engine", {}),
        }
        if config.get("connector") is not None:
            name = config.get("connector_class", "KVOffloadConnector")
            arguments["kv_transfer_config"] = KVTransferConfig(
                kv_connector=name,
                kv_connector_module_path="kvoffload.vllm" if name == "KVOffloadConnector" else "kvoffload.vllm.faulty",
                kv_role="kv_both",
                kv_connector_extra_config=config["connector"],
            )
        if config.get("draft"):
            # The model drafts for itself: right KV gives right drafts.
            draft = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
            arguments["speculative_config"] = draft
        if config.get("events"):
            arguments["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        self.llm: Any = LLM(model=str(model), **arguments)
        if arguments.get("pipeline_parallel_size", 1) > 1:
            self.llm.collective_rpc(_make_room_for_hidden_states)
        self.prompts = make_prompts()
        if config.get("spoil_drafts"):
            self._spoil_drafts()
        if "slow" in config:
            self._slow_down(config["slow"], config.get("failing", 0.0))
        self.loaded_blocks: Counter[int] = Counter()
        """Device blocks that loads were to fill, by group."""
        if config.get("connector") is not None and not config.get("multiprocessing"):
            self._count_loads()

    def _count_loads(self) -> None:
        build = self.offload.build_connector_meta

        def counting(step: Any) -> Any:
            meta = build(step)
            for spec in meta.loads.values():
                self.loaded_blocks.update(dict(enumerate(spec.device.group_sizes)))
            return meta

        self.offload.build_connector_meta = counting

    def _spoil_drafts(self) -> None:
        """Blanks what is loaded for the second half of the layers: those of the draft model."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = get_kv_transfer_group()
        (group,) = connector._setup.groups
        pool, transfer = connector._pool.data, connector.connector_worker.transfer
        submit = transfer.submit

        def blanking(job_id: int, spec: Any, is_store: bool) -> None:
            if not is_store:
                pool[spec.host.slots, group.block_bytes // 2 :] = 0
            submit(job_id, spec, is_store)

        transfer.submit = blanking

    def _slow_down(self, seed: int, failing: float) -> None:
        """Copies take many steps, and a share of them fail."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from kvoffload.testing.faults import FailingTransfer, SlowTransfer

        worker = get_kv_transfer_group().connector_worker
        worker.transfer = FailingTransfer(SlowTransfer(worker.transfer, seed), failing, seed)

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def offload(self) -> Any:
        """The scheduler half of the connector."""
        return self.scheduler.connector.connector_scheduler

    def sampling(self, **changes: Any) -> Any:
        from vllm.sampling_params import SamplingParams

        settings = {"max_tokens": MAX_TOKENS, "logprobs": 1, "detokenize": False, "ignore_eos": True}
        return SamplingParams(temperature=0, **{**settings, **changes})

    def round(self, prompts: list[list[int]] | None = None, lora_request: Any = None, **sampling: Any) -> list[Any]:
        """Every prompt once; what was answered."""
        outputs = self.llm.generate(
            [{"prompt_token_ids": p} for p in prompts or self.prompts],
            self.sampling(**sampling),
            use_tqdm=False,
            lora_request=lora_request,
        )
        return [answer(output) for output in outputs]

    def drain(self) -> None:
        """Steps on until nothing is pending, as a server does between requests."""
        for _ in range(MAX_STEPS):
            if not self.scheduler.has_requests():
                return
            self.llm.llm_engine.step()
        raise AssertionError("the engine never comes to rest")

    def settle(self) -> None:
        """Waits until lower tiers have written what they were given."""
        manager = getattr(self.offload.manager, "backing", self.offload.manager)
        for lane in getattr(manager, "_lanes", []):
            for _ in range(MAX_STEPS):
                if not lane.writing:
                    break
                lane.tier.wait(0.1)
                manager.poll()
            assert not lane.writing, "the tier does not end its writes"

    def close(self) -> None:
        """Ends the engine as a server ends."""
        self.llm.llm_engine.engine_core.shutdown()

    def state(self) -> dict[str, Any]:
        """What is left and what was counted once the engine is at rest."""
        self.drain()
        pool = self.scheduler.kv_cache_manager.block_pool
        state: dict[str, Any] = {
            "free_device_blocks": pool.get_num_free_blocks(),
            "usable_device_blocks": pool.num_gpu_blocks - 1,
            "preemptions": prometheus().get("vllm:num_preemptions_total", 0),
            "drafted": prometheus().get("vllm:spec_decode_num_draft_tokens_total", 0),
            "accepted": prometheus().get("vllm:spec_decode_num_accepted_tokens_total", 0),
        }
        if self.scheduler.connector is None:
            return state
        offload = self.offload
        self.settle()
        manager = getattr(offload.manager, "backing", offload.manager)
        manager = getattr(manager, "host", manager)
        offload.manager.check_integrity()
        return state | {
            "off": offload.off,
            "jobs": len(offload._jobs),
            "states": len(offload._states),
            "used_blocks": manager.num_used_blocks,
            "idle_blocks": manager._table.num_evictable,
            "metrics": offload.metrics.snapshot(),
            "prometheus": {k: v for k, v in prometheus().items() if k.startswith("kvoffload:")},
            "records": [record.to_dict() for record in offload.records],
            "loaded_blocks": [n for _, n in sorted(self.loaded_blocks.items())],
        }


def _make_room_for_hidden_states(worker: Any) -> None:
    """What vLLM's warm-up does for all but the first rank of a pipeline, and leaves out on CPU without compilation."""
    runner = worker.model_runner
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def _allow_async_scheduling() -> None:
    """vLLM switches asynchronous scheduling off on CPU, where it gains nothing: switch it on again."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def _expect_another_root() -> None:
    """As if a vLLM drew the root of its hashes in a way that nobody knows of."""
    from kvoffload.vllm import versions

    versions.expected_hash_root = lambda vllm_config: b"another root"


def answer(output: Any) -> list[Any]:
    """Tokens and their logprobs."""
    best = output.outputs[0]
    return [list(best.token_ids), [next(iter(entry.values())).logprob for entry in best.logprobs]]


def prometheus() -> dict[str, float]:
    """Every sample in this process, by name, and by reason or rule where it has one."""
    from prometheus_client import REGISTRY

    samples = {}
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            label = sample.labels.get("reason", sample.labels.get("rule"))
            samples[sample.name if label is None else f"{sample.name}:{label}"] = sample.value
    return samples


def rounds(config: dict[str, Any]) -> dict[str, Any]:
    """The same prompts, ``rounds`` times, perhaps after a ``reset``. ``close`` ends the engine."""
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
    if config.get("close"):
        engine.close()
    return result


def service(config: dict[str, Any]) -> dict[str, Any]:
    """A day in a server's life: two rounds, a reset, another round, then a prefill for a remote decoder."""
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
    after = engine.state()
    remote = _remote_decode(engine)
    result = {
        "outputs": outputs,
        "warm": warm,
        "cleared": cleared,
        "used_after_reset": used_after_reset,
        "after": after,
        "events": [event for event in events if event],
        "recomputes_failed_loads": scheduler.recompute_kv_load_failures,
        "policy": engine.llm.llm_engine.vllm_config.kv_transfer_config.kv_load_failure_policy,
        "remote": remote,
    }
    engine.close()
    return result


def _event(event: Any) -> list[str]:
    """Kind, medium and hashes of a stored or removed event, in that order; nothing of other events."""
    hashes = getattr(event, "block_hashes", None)
    return [] if hashes is None else [type(event).__name__, event.medium, *map(repr, hashes)]


def _remote_decode(engine: Engine) -> dict[str, Any]:
    """Prefills for a decoder elsewhere, then asks for the whole of it again."""
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
    """Rounds with a reuse filter, then one in which the manager breaks."""
    engine = Engine(config)
    outputs, states = [], []
    for _ in range(3):
        outputs.append(engine.round())
        states.append(engine.state())

    def lookup(*args: Any) -> int:
        raise RuntimeError("planted: the table is broken")

    engine.offload.manager.lookup = lookup
    broken = engine.round()
    return {"outputs": outputs, "states": states, "broken": broken, "after": engine.state()}


def aborts(config: dict[str, Any]) -> dict[str, Any]:
    """With the pool half warm, aborts one request in each stage of its life; the others go on."""
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


def failed_load(config: dict[str, Any]) -> dict[str, Any]:
    """The whole load of a prompt that takes more than half of the device's blocks fails. With ``again`` the request is
    offered another load, which kvoffload never does. ``steps`` it took, None if it was not through by then."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kvoffload.testing.faults import FailingTransfer

    engine = Engine(config)
    everything = [token for prompt in engine.prompts for token in prompt]
    prompt = everything[: (DEVICE_BLOCKS // 2 + 2) * BLOCK_SIZE - 5]
    (expected,) = engine.round([prompt])
    engine.drain()
    engine.llm.reset_prefix_cache()
    worker, offload = get_kv_transfer_group().connector_worker, engine.offload
    working, worker.transfer = worker.transfer, FailingTransfer(worker.transfer, rate=1.0)
    end_load = offload._end_load

    def end_and_mend(job: Any) -> None:
        end_load(job)
        worker.transfer = working
        job.state.may_load = config["again"]

    offload._end_load = end_and_mend
    core = engine.llm.llm_engine
    core.add_request("again", {"prompt_token_ids": prompt}, engine.sampling())
    for step in range(500):
        for output in core.step():
            if output.finished:
                return {"steps": step, "outputs": [[answer(output)]], "expected": [expected], **engine.state()}
    return {"steps": None, "metrics": offload.metrics.snapshot()}


def storm(config: dict[str, Any]) -> dict[str, Any]:
    """``requests`` requests, by ``seed``: they come at any time, some hang up, some ask for remote decode,
    and now and then a cache is reset under them. Answers are [index of the prompt, answer]."""
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
        finished = [output for output in core.step() if output.finished and output.request_id in live]
        answers += [[live.pop(output.request_id), answer(output)] for output in finished]
        if step % 50 == 0:
            engine.offload.manager.check_integrity()
        if arrived == config["requests"] and not live:
            break
    return {"answers": answers, "aborted": aborted, "left": len(live), **engine.state()}


SHORT = 12
"""Tokens of each answer in a long life."""
NOT_OFFLOADED = {"kv_transfer_params": {"kvoffload": {"load": False, "store": False}}}
"""What makes a request compute all that the engine's own cache does not hold, and leave nothing behind."""


class _Life:
    """The rounds of an engine, by name: what was answered, and what was counted meanwhile."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: dict[str, list[Any]] = {}
        self.counts: dict[str, dict[str, float]] = {}

    def play(self, name: str, *, reset: bool = True, **arguments: Any) -> None:
        """A round, with nothing in the engine's own cache unless ``reset`` is False. The connector is never reset."""
        engine = self.engine
        if reset:
            assert engine.llm.reset_prefix_cache()
        before = engine.offload.metrics.snapshot()
        self.answers[name] = engine.round(max_tokens=SHORT, **arguments)
        engine.drain()
        engine.settle()
        after = engine.offload.metrics.snapshot()
        counted = ("host_hit_tokens", "weight_changes", "load_failures")
        self.counts[name] = {key: after.get(key, 0) - before.get(key, 0) for key in counted}

    def result(self) -> dict[str, Any]:
        return {"answers": self.answers, "counts": self.counts, **self.engine.state()}


def updates(config: dict[str, Any]) -> dict[str, Any]:
    """A trainer changes all weights of the running engine. "right N" is what weights N answer when all is computed."""
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
    # Until it is reset, the engine's own cache answers with old KV.
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
    # The control: nobody watches the weights.
    get_kv_transfer_group().connector_worker.weights = None
    update(1)
    life.play("unwatched", extra_args={"kv_transfer_params": {"kvoffload": {"store": False}}})
    engine.close()
    return {"loading": loading, **life.result()}


def write_adapter(directory: Path, seed: int) -> None:
    """A LoRA adapter of the tiny model that changes what it says."""
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
    """Three LoRA adapters take turns in one slot of the device and two places in host memory; then one is loaded again
    with other weights."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.lora.request import LoRARequest

    changes = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2, "max_lora_rank": 8}
    engine = Engine({**config, "engine": {**changes, **config.get("engine", {})}})
    life = _Life(engine)
    directory = Path(config["model"] + "-adapters")
    directory.mkdir(exist_ok=True)
    requests = []
    for number in range(1, 4):
        write_adapter(directory / str(number), number)
        requests.append(LoRARequest(f"adapter {number}", number, str(directory / str(number))))

    def play(name: str, number: int, **sampling: Any) -> None:
        life.play(name, prompts=engine.prompts[:2], lora_request=requests[number - 1], **sampling)

    for turn in ("first", "again"):
        for number in (1, 2, 3):
            play(f"adapter {number}, {turn}", number)
    write_adapter(directory / "1", 4)
    requests[0] = LoRARequest("adapter 1", 1, requests[0].lora_path, load_inplace=True)
    engine.llm.llm_engine.add_lora(requests[0])
    requests[0] = LoRARequest("adapter 1", 1, requests[0].lora_path)
    play("loaded again", 1)
    play("loaded again, again", 1)
    play("right", 1, extra_args=NOT_OFFLOADED)
    get_kv_transfer_group().connector_worker.weights = None
    write_adapter(directory / "1", 5)
    engine.llm.llm_engine.add_lora(LoRARequest("adapter 1", 1, requests[0].lora_path, load_inplace=True))
    play("unwatched", 1, extra_args={"kv_transfer_params": {"kvoffload": {"store": False}}})
    play("right, unwatched", 1, extra_args=NOT_OFFLOADED)
    return life.result()


def endless(config: dict[str, Any]) -> dict[str, Any]:
    """Answers twice, writes its result, and serves on until somebody kills it."""
    engine = Engine(config)
    write_result({"outputs": [engine.round(), engine.round()]})
    while True:
        engine.round()


class _Speculative:
    """Enough of a speculative config to be refused for."""

    def __init__(self, method: str) -> None:
        self.method = method

    def use_eagle(self) -> bool:
        return False


def refusals(config: dict[str, Any]) -> dict[str, Any]:
    """What the connector says to each of ``cases``: options, and changes to vLLM's configuration by dotted name."""
    model = Path(config["model"] + "-llama")
    if not model.exists():
        write_model(model)
    import torch
    import vllm
    from vllm.config import KVTransferConfig, ModelConfig, PoolerConfig
    from vllm.config.multimodal import MultiModalConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, RSWASpec

    from kvoffload.vllm import KVOffloadConnector
    from kvoffload.vllm.setup import MULTI_CONNECTOR, model_fingerprint

    vllm_config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        block_size=BLOCK_SIZE,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVOffloadConnector",
            kv_connector_module_path="kvoffload.vllm",
            kv_role="kv_both",
        ),
    ).create_engine_config()
    common = {"block_size": BLOCK_SIZE, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    specs: dict[str, Any] = {
        "full": FullAttentionSpec(**common),
        "prefix-lm": FullAttentionSpec(**common, non_causal=True),
        "rswa": RSWASpec(**common, rswa_window=64),
        "mamba": MambaSpec(block_size=BLOCK_SIZE, shapes=((2, 2),), dtypes=(torch.float32,)),
    }
    said: dict[str, Any] = {}
    blocks: dict[str, int] = {}
    engines: dict[str, list[int]] = {}
    fingerprints: dict[str, str] = {}
    os.environ.pop("PYTHONHASHSEED", None)
    for name, case in config["cases"].items():
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
        if changes.pop("multi_connector", False):
            sys.modules[MULTI_CONNECTOR] = vllm
        if changes.pop("mla", False):
            before.append((ModelConfig, "use_mla", ModelConfig.use_mla))
            ModelConfig.use_mla = property(lambda self: True)
        vllm.__version__ = changes.pop("version", vllm.__version__)
        for name_, value in changes.items():
            path, _, key = name_.rpartition(".")
            part = functools.reduce(getattr, path.split("."), vllm_config) if path else vllm_config
            before.append((part, key, getattr(part, key, None)))
            made = {
                "pooler_config": lambda v: PoolerConfig(**v),
                "multimodal_config": lambda v: MultiModalConfig(**v),
                "speculative_config": _Speculative,
            }.get(key)
            setattr(part, key, made(value) if made else value)
        try:
            # In vLLM's order.
            for role in (KVConnectorRole.WORKER, KVConnectorRole.SCHEDULER):
                connector = KVOffloadConnector(vllm_config, role, caches)
            said[name] = None
            setup = connector._setup
            blocks[name] = setup.count_blocks()
            engines[name] = [setup.engine, setup.engines]
            fingerprints[name] = model_fingerprint(vllm_config, setup, [])
        except Exception as error:
            said[name] = [type(error).__name__, str(error)]
        for part, key, value in before:
            setattr(part, key, value)
        sys.modules.pop(MULTI_CONNECTOR, None)
        os.environ.pop("PYTHONHASHSEED", None)
    return {"said": said, "blocks": blocks, "engines": engines, "fingerprints": fingerprints}


SCENARIOS = {
    f.__name__: f for f in (rounds, service, reuse, aborts, failed_load, storm, updates, adapters, endless, refusals)
}


def write_result(result: dict[str, Any]) -> None:
    """Whole or not at all."""
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
    # The result is out: what vLLM does on its way down is not under test here.
    os._exit(0)


if __name__ == "__main__":
    main()

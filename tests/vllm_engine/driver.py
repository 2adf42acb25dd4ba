"""One vLLM engine in a process of its own: ``python driver.py CONFIG RESULT``, both JSON files.

CONFIG: ``scenario`` (a name in SCENARIOS), ``model`` (directory, written if it is not there), ``engine``
(arguments of ``vllm.LLM`` that differ from the usual), ``connector`` (its options, null for none),
``connector_class``, and what the scenario reads. The environment that vLLM reads is set by the caller.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

BLOCK_SIZE = 32
DEVICE_BLOCKS = 24
MAX_TOKENS = 48
PROMPTS = 10
MAX_STEPS = 20_000


def write_model(directory: Path) -> None:
    """A tiny Llama. Its weights are large enough for what it reads to decide what it says."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.08,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).float().save_pretrained(directory)


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
        model = Path(config["model"])
        if not model.exists():
            write_model(model)
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
        if config.get("events"):
            arguments["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        self.llm: Any = LLM(model=str(model), **arguments)
        self.prompts = make_prompts()
        if "slow" in config:
            self._slow_down(config["slow"], config.get("failing", 0.0))

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

    def round(self, prompts: list[list[int]] | None = None, **sampling: Any) -> list[Any]:
        """Every prompt once; what was answered."""
        outputs = self.llm.generate(
            [{"prompt_token_ids": p} for p in prompts or self.prompts],
            self.sampling(**sampling),
            use_tqdm=False,
        )
        return [answer(output) for output in outputs]

    def drain(self) -> None:
        """Steps on until nothing is pending, as a server does between requests."""
        for _ in range(MAX_STEPS):
            if not self.scheduler.has_requests():
                return
            self.llm.llm_engine.step()
        raise AssertionError("the engine never comes to rest")

    def state(self) -> dict[str, Any]:
        """What is left and what was counted once the engine is at rest."""
        self.drain()
        pool = self.scheduler.kv_cache_manager.block_pool
        state: dict[str, Any] = {
            "free_device_blocks": pool.get_num_free_blocks(),
            "usable_device_blocks": pool.num_gpu_blocks - 1,
            "preemptions": prometheus().get("vllm:num_preemptions_total", 0),
        }
        if self.scheduler.connector is None:
            return state
        offload = self.offload
        manager = getattr(offload.manager, "backing", offload.manager)
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
        }


def _allow_async_scheduling() -> None:
    """vLLM switches asynchronous scheduling off on CPU, where it gains nothing: switch it on again."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def answer(output: Any) -> list[Any]:
    """Tokens and their logprobs."""
    best = output.outputs[0]
    return [list(best.token_ids), [next(iter(entry.values())).logprob for entry in best.logprobs]]


def prometheus() -> dict[str, float]:
    """Every sample in this process, by name, and by reason where it has one."""
    from prometheus_client import REGISTRY

    samples = {}
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            reason = sample.labels.get("reason")
            samples[sample.name if reason is None else f"{sample.name}:{reason}"] = sample.value
    return samples


def rounds(config: dict[str, Any]) -> dict[str, Any]:
    """The same prompts, ``rounds`` times."""
    engine = Engine(config)
    outputs = [engine.round() for _ in range(config.get("rounds", 2))]
    return {
        "outputs": outputs,
        "async_scheduling": type(engine.scheduler).__name__ == "AsyncScheduler",
        **engine.state(),
    }


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
    return {
        "outputs": outputs,
        "warm": warm,
        "cleared": cleared,
        "used_after_reset": used_after_reset,
        "after": after,
        "events": [event for event in events if event],
        "recomputes_failed_loads": scheduler.recompute_kv_load_failures,
        "policy": engine.llm.llm_engine.vllm_config.kv_transfer_config.kv_load_failure_policy,
        "remote": _remote_decode(engine),
    }


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
    record = engine.state()["records"][-1]
    return {"tokens": len(whole), "host_tokens": record["host_tokens"], "state": state}


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


def endless(config: dict[str, Any]) -> dict[str, Any]:
    """Answers twice, writes its result, and serves on until somebody kills it."""
    engine = Engine(config)
    write_result({"outputs": [engine.round(), engine.round()]})
    while True:
        engine.round()


def refusals(config: dict[str, Any]) -> dict[str, Any]:
    """What the connector says to each of ``cases``: options, and changes to vLLM's configuration by dotted name."""
    model = Path(config["model"])
    if not model.exists():
        write_model(model)
    import torch
    from vllm.config import KVTransferConfig, PoolerConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from kvoffload.vllm import KVOffloadConnector

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
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=32, dtype=torch.float32)
    caches = KVCacheConfig(
        num_blocks=DEVICE_BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer0", "layer1"], spec)],
    )
    said: dict[str, Any] = {}
    for name, case in config["cases"].items():
        vllm_config.kv_transfer_config.kv_connector_extra_config = case["options"]
        before = []
        for name_, value in case.get("changes", {}).items():
            part, key = name_.split(".")
            before.append((getattr(vllm_config, part), key, getattr(getattr(vllm_config, part), key)))
            setattr(getattr(vllm_config, part), key, PoolerConfig(**value) if key == "pooler_config" else value)
        try:
            # In vLLM's order.
            for role in (KVConnectorRole.WORKER, KVConnectorRole.SCHEDULER):
                KVOffloadConnector(vllm_config, role, caches)
            said[name] = None
        except Exception as error:
            said[name] = [type(error).__name__, str(error)]
        for part, key, value in before:
            setattr(part, key, value)
    return {"said": said}


SCENARIOS = {f.__name__: f for f in (rounds, service, reuse, aborts, storm, endless, refusals)}


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

"""One vLLM engine for the integrity board, in a process that is forked from one that has imported vLLM."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

PRELOAD = (
    "benchmarks.peers.board_engine",
    "transformers.models.llama",
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
)
"""Modules that the parent of the engines imports. Names that do not exist are skipped."""

BLOCK_SIZE = 32
DEVICE_BLOCKS = 64
MAX_TOKENS = 12
MAX_MODEL_LEN = 1024
SETTLE_STEPS = 2000
PAUSES = 4
PAUSE_S = 0.25
"""Between two steps while what the engine's threads still write settles."""


class Engine:
    """An engine in this process, which counts the prompt tokens that it computes."""

    def __init__(self, model: str, connector: dict[str, Any] | None) -> None:
        from vllm.config import KVTransferConfig
        from vllm.entrypoints.llm import LLM

        self._llm: Any = LLM(
            model=model,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=DEVICE_BLOCKS,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=MAX_MODEL_LEN,
            disable_log_stats=False,
            seed=0,
            kv_transfer_config=None if connector is None else KVTransferConfig(**connector),
        )
        self._scheduled: Counter[str] = Counter()
        """Number of tokens that steps were given, by request: a prompt token from a cache is never among them."""
        self._num_asked = 0
        core = self._llm.llm_engine.engine_core
        self._scheduler: Any = core.engine_core.scheduler if hasattr(core, "engine_core") else None
        """None if the engine core has a process of its own: what vLLM reports is then believed."""
        if self._scheduler is not None:
            self._count(self._scheduler)

    def _count(self, scheduler: Any) -> None:
        schedule = scheduler.schedule

        def counting(*args: Any, **kwargs: Any) -> Any:
            step = schedule(*args, **kwargs)
            for name, tokens in step.num_scheduled_tokens.items():
                # The engine appends something of its own to the name.
                self._scheduled[name.partition("-")[0]] += tokens
            return step

        scheduler.schedule = counting

    def ask(self, prompt: list[int], max_tokens: int = MAX_TOKENS) -> dict[str, Any]:
        from vllm.sampling_params import SamplingParams

        engine = self._llm.llm_engine
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=1, detokenize=False)
        name = f"board{self._num_asked}"
        self._num_asked += 1
        start = time.perf_counter()
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
        first = None
        while True:
            for output in engine.step():
                if first is None and output.outputs[0].token_ids:
                    first = time.perf_counter() - start
                if output.finished:
                    # As in a server, one more step tells the connector of the end.
                    engine.step()
                    return self._answer(name, len(prompt), output, first or 0.0)

    def _answer(self, name: str, prompt_tokens: int, output: Any, ttft_s: float) -> dict[str, Any]:
        (completion,) = output.outputs
        tokens = list(completion.token_ids)
        logprobs = [float(step[token].logprob) for token, step in zip(tokens, completion.logprobs or [], strict=False)]
        reported = output.num_cached_tokens or 0
        # Each answered token but the last is computed, too.
        computed = self._scheduled.pop(name, 0) - (len(tokens) - 1)
        cached = reported if self._scheduler is None else max(0, prompt_tokens - computed)
        return {
            "tokens": tokens,
            "logprobs": logprobs,
            "error": None if len(tokens) == len(logprobs) and tokens else str(completion.finish_reason),
            "cached_tokens": cached,
            "reported_tokens": reported,
            "ttft_ms": 1e3 * ttft_s,
        }

    def settle(self) -> None:
        """Steps until the engine has nothing to do, and lets threads of a cache end what they write."""
        for _ in range(PAUSES):
            # Some connectors learn only in a step that a write has ended.
            self.ask([7, 8, 9], max_tokens=2)
            for _ in range(SETTLE_STEPS):
                if self._scheduler is None or not self._scheduler.has_requests():
                    break
                self._llm.llm_engine.step()
            time.sleep(PAUSE_S)

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def run(
    conversation: Connection, log: str, environment: Mapping[str, str], model: str, connector: dict[str, Any] | None
) -> None:
    """Serves one engine. Sends ``{"ready": True}`` or ``{"refused": MESSAGE}``, then answers commands.

    ``{"do": "ask", "prompts": [...]}`` is answered with a message per prompt, one prompt after the other, ``{"do":
    "settle"}`` once nothing is left to do, ``{"do": "close"}`` once the engine has shut down as a server does.
    """
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    try:
        engine = Engine(model, connector)
    except BaseException as error:
        conversation.send({"refused": f"{type(error).__name__}: {error}"})
        raise
    conversation.send({"ready": True})
    while True:
        try:
            command = conversation.recv()
        except EOFError:
            return
        if command["do"] == "ask":
            for prompt in command["prompts"]:
                conversation.send(engine.ask(prompt))
        elif command["do"] == "settle":
            engine.settle()
            conversation.send({"settled": True})
        else:
            engine.close()
            conversation.send({"closed": True})
            return

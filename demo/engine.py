"""Real vLLM in this process. Run as ``python -m demo.engine FD`` it answers prompts for another process.

See ``process.serve``: the first line of standard input has the arguments of ``Engine``. This module imports nothing of
kvoffload, so that it runs in any environment with vLLM.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Mapping
from typing import Any

from demo.process import Served, serve

IN_THIS_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
"""Environment variables for an engine whose core is in its own process, and that fetches nothing from the network."""


def connector(
    options: Mapping[str, Any], name: str = "KVOffloadConnector", module: str | None = "kvoffload.vllm"
) -> dict[str, Any]:
    """Returns the fields of vLLM's KVTransferConfig for a connector with these options. Without ``module`` vLLM finds
    the connector by its name."""
    fields = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": dict(options)}
    return fields if module is None else fields | {"kv_connector_module_path": module}


def start_llm(model: object, connector: Mapping[str, Any] | None = None, **arguments: Any) -> Any:
    """Returns a ``vllm.LLM`` of the model in a directory, which computes in float32 and takes tokens, not text.
    ``connector`` has the fields of KVTransferConfig, ``arguments`` are others of ``vllm.LLM``."""
    import vllm
    from vllm.config import KVTransferConfig

    usual = {"skip_tokenizer_init": True, "dtype": "float32", "seed": 0, "enforce_eager": True}
    transfer = None if connector is None else KVTransferConfig(**connector)
    return vllm.LLM(**{**usual, **arguments}, model=str(model), kv_transfer_config=transfer)


def sampling(max_tokens: int, **changes: Any) -> Any:
    """Returns vLLM's parameters for an answer of so many of the most likely tokens, with their logprobs."""
    import vllm

    usual = {"temperature": 0.0, "ignore_eos": True, "logprobs": 1, "detokenize": False}
    return vllm.SamplingParams(max_tokens=max_tokens, **{**usual, **changes})


class Engine(Served):
    """Answers prompts, each of which is a list of tokens."""

    def __init__(self, model: str, connector: Mapping[str, Any] | None, arguments: Mapping[str, Any]) -> None:
        self.llm: Any = start_llm(model, connector, **arguments)
        core = getattr(self.llm.llm_engine.engine_core, "engine_core", None)
        self.scheduler: Any = getattr(core, "scheduler", None)
        """vLLM's scheduler, None if the engine core has a process of its own."""
        self.num_asked = 0
        self._is_closed = False

    def ready(self) -> dict[str, Any]:
        import vllm

        return {"version": vllm.__version__}

    def ask(self, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
        """Answers ``prompts`` one after the other."""
        return [self.run([[prompt]], 1, max_tokens)[0] for prompt in prompts]

    def converse(self, conversations: list[list[list[int]]], slots: int, max_tokens: int) -> dict[str, Any]:
        """Answers the prompts of all conversations, ``slots`` at a time. A conversation has one request at a time.

        After an answer its conversation waits until each other one has had its turn. Returns the answers, conversation
        by conversation, and the seconds that all of it took.
        """
        start = time.perf_counter()
        answers = self.run(conversations, slots, max_tokens)
        return {"answers": answers, "wall_s": time.perf_counter() - start}

    def run(
        self, conversations: list[list[list[int]]], slots: int, max_tokens: int, **changes: Any
    ) -> list[dict[str, Any]]:
        """Returns the answers by conversation and turn. ``changes`` are of the sampling parameters."""
        engine, params = self.llm.llm_engine, sampling(max_tokens, **changes)
        answers: dict[tuple[int, int], dict[str, Any]] = {}
        queue = collections.deque((c, 0) for c in range(len(conversations)))
        running: dict[str, tuple[int, int]] = {}
        started: dict[str, float] = {}
        first: dict[str, float] = {}
        while queue or running:
            while queue and len(running) < slots:
                turn = queue.popleft()
                self.num_asked += 1
                name = f"request{self.num_asked}"
                running[name] = turn
                started[name] = time.perf_counter()
                engine.add_request(name, {"prompt_token_ids": conversations[turn[0]][turn[1]]}, params)
            for output in engine.step():
                name = output.request_id
                if output.outputs[0].token_ids:
                    first.setdefault(name, time.perf_counter() - started[name])
                if output.finished:
                    total_s = time.perf_counter() - started.pop(name)
                    conversation, index = turn = running.pop(name)
                    prompt = conversations[conversation][index]
                    answers[turn] = self.answer(prompt, output, first.pop(name, total_s), total_s)
                    if index + 1 < len(conversations[conversation]):
                        queue.append((conversation, index + 1))
        # As in a server, one more step tells the connector of the end.
        self.step()
        return [answers[turn] for turn in sorted(answers)]

    def answer(self, prompt: list[int], output: Any, ttft_s: float, total_s: float) -> dict[str, Any]:
        """Returns the answer to a request that has ended."""
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        return {
            "tokens": tokens,
            "logprobs": [float(step[token].logprob) for token, step in zip(tokens, completion.logprobs, strict=True)],
            "ttft_s": ttft_s,
            "total_s": total_s,
            "cached": output.num_cached_tokens,
        }

    def settle(self) -> None:
        """Runs steps until nothing is left to do, such as to write to tiers."""
        while self.step():
            pass

    def step(self) -> bool:
        """Runs one step, if the engine core is in this process and has something to do."""
        if self.scheduler is None or not self.scheduler.has_requests():
            return False
        self.llm.llm_engine.step()
        return True

    def close(self) -> None:
        """Shuts the engine down as a server does, so that what is pending is written. May be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    serve(Engine)

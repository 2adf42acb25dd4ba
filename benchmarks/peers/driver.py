"""One vLLM engine, the same for all systems. Run as ``python -m benchmarks.peers.driver FD``.

The first line of standard input is a JSON object with ``engine`` (arguments of ``vllm.LLM``) and ``connector``
(``kv_transfer_config``, or null). Each further line is a command ``{"do": NAME, ...}``. The driver writes one line of
JSON per line of input to the open file descriptor FD; a reply with the key ``error`` says what was raised. The engine
core runs in a process of its own, as in a server. This module imports nothing of kvoffload, so that it runs in any
environment with vLLM.
"""

from __future__ import annotations

import collections
import json
import os
import sys
import time
from typing import Any


class Driver:
    """Carries out commands. Each public method is a command, with its arguments; what it returns is the reply."""

    def __init__(self, engine: dict[str, Any], connector: dict[str, Any] | None) -> None:
        import vllm
        from vllm.config import KVTransferConfig

        self.llm: Any = vllm.LLM(
            **engine, kv_transfer_config=None if connector is None else KVTransferConfig(**connector)
        )
        self.version = vllm.__version__
        self._sampling = vllm.SamplingParams
        self._requests = 0

    def ask(self, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
        """Answers ``prompts`` one after the other."""
        return [self._run([[prompt]], 1, max_tokens)[0] for prompt in prompts]

    def converse(self, conversations: list[list[list[int]]], slots: int, max_tokens: int) -> dict[str, Any]:
        """Answers the prompts of all conversations, ``slots`` at a time. A conversation has one request at a time.

        After an answer its conversation waits until each other one has had its turn. Returns the answers, conversation
        by conversation, and the seconds that all of it took.
        """
        start = time.perf_counter()
        answers = self._run(conversations, slots, max_tokens)
        return {"answers": answers, "wall_s": time.perf_counter() - start}

    def _run(self, conversations: list[list[list[int]]], slots: int, max_tokens: int) -> list[dict[str, Any]]:
        engine = self.llm.llm_engine
        params = self._sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=1, detokenize=False)
        answers: dict[tuple[int, int], dict[str, Any]] = {}
        queue = collections.deque((c, 0) for c in range(len(conversations)))
        running: dict[str, tuple[int, int]] = {}
        started: dict[str, float] = {}
        first: dict[str, float] = {}
        while queue or running:
            while queue and len(running) < slots:
                turn = queue.popleft()
                self._requests += 1
                name = f"request{self._requests}"
                running[name] = turn
                started[name] = time.perf_counter()
                engine.add_request(name, {"prompt_token_ids": conversations[turn[0]][turn[1]]}, params)
            for output in engine.step():
                name = output.request_id
                if output.outputs[0].token_ids:
                    first.setdefault(name, time.perf_counter() - started[name])
                if output.finished:
                    conversation, index = turn = running.pop(name)
                    answers[turn] = self._answer(output, first.pop(name), time.perf_counter() - started.pop(name))
                    if index + 1 < len(conversations[conversation]):
                        queue.append((conversation, index + 1))
        return [answers[turn] for turn in sorted(answers)]

    def _answer(self, output: Any, ttft_s: float, total_s: float) -> dict[str, Any]:
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        logprobs = [step[token].logprob for token, step in zip(tokens, completion.logprobs, strict=True)]
        return {
            "tokens": tokens,
            "logprobs": logprobs,
            "ttft_s": ttft_s,
            "total_s": total_s,
            "cached": output.num_cached_tokens,
        }

    def close(self) -> None:
        """Shuts the engine down in order, so that a system may finish what it is writing."""
        self.llm.llm_engine.engine_core.shutdown()


def main() -> None:
    out = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8", buffering=1)

    def send(message: Any) -> None:
        out.write(json.dumps(message) + "\n")

    start = time.perf_counter()
    try:
        driver = Driver(**json.loads(sys.stdin.readline()))
    except Exception as error:
        send({"error": f"{type(error).__name__}: {error}"})
        raise
    send({"version": driver.version, "start_s": time.perf_counter() - start})
    for line in sys.stdin:
        command = json.loads(line)
        try:
            send(getattr(driver, command.pop("do"))(**command))
        except Exception as error:
            send({"error": f"{type(error).__name__}: {error}"})
            raise


if __name__ == "__main__":
    main()

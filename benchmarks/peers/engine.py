"""The engine that is asked after a fault: ``python -m benchmarks.peers.engine FD``. See ``demo.engine``."""

from __future__ import annotations

import importlib
import time
from collections import Counter
from typing import Any

from demo.engine import Engine
from demo.process import serve

BLOCK_SIZE = 32
DEVICE_BLOCKS = 64
MAX_TOKENS = 12
MAX_MODEL_LEN = 1024
PAUSES = 4
PAUSE_S = 0.25
"""Between two steps while what the engine's threads still write settles."""


def hide_from_vars() -> None:
    """Lets vLLM search the modules that are loaded for Triton kernels although llvmlite, which LMCache loads, is one:
    its library answers for every name, ``__dict__`` too, with a function."""
    library = importlib.import_module("llvmlite.binding.ffi")._lib_wrapper
    find = library.__getattr__

    def find_function(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return find(self, name)

    library.__getattr__ = find_function


class CountingEngine(Engine):
    """An engine that counts the prompt tokens that it computes."""

    def __init__(self, model: str, connector: dict[str, Any] | None) -> None:
        if connector is not None and connector["kv_connector"].startswith("LMCache"):
            hide_from_vars()
        arguments = {
            "block_size": BLOCK_SIZE,
            "num_gpu_blocks_override": DEVICE_BLOCKS,
            "max_model_len": MAX_MODEL_LEN,
            "max_num_batched_tokens": MAX_MODEL_LEN,
            "disable_log_stats": False,
        }
        super().__init__(model, connector, arguments)
        self._scheduled: Counter[str] = Counter()
        """Number of tokens that steps were given, by request: a prompt token from a cache is never among them."""
        schedule = self.scheduler.schedule

        def counting(*args: Any, **kwargs: Any) -> Any:
            step = schedule(*args, **kwargs)
            for name, tokens in step.num_scheduled_tokens.items():
                # The engine appends something of its own to the name.
                self._scheduled[name.partition("-")[0]] += tokens
            return step

        self.scheduler.schedule = counting

    def answer(self, prompt: list[int], output: Any, ttft_s: float, total_s: float) -> dict[str, Any]:
        (completion,) = output.outputs
        tokens = list(completion.token_ids)
        logprobs = [float(step[token].logprob) for token, step in zip(tokens, completion.logprobs or [], strict=False)]
        # Each answered token but the last is computed, too.
        computed = self._scheduled.pop(output.request_id, 0) - (len(tokens) - 1)
        return {
            "tokens": tokens,
            "logprobs": logprobs,
            "error": None if len(tokens) == len(logprobs) and tokens else str(completion.finish_reason),
            "cached_tokens": max(0, len(prompt) - computed),
        }

    def settle(self) -> None:
        """Steps until the engine has nothing to do, and lets threads of a cache end what they write."""
        for _ in range(PAUSES):
            # Some connectors learn only in a step that a write has ended.
            self.ask([[7, 8, 9]], max_tokens=2)
            super().settle()
            time.sleep(PAUSE_S)


if __name__ == "__main__":
    serve(CountingEngine)

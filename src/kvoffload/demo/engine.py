"""An engine of the demo: real vLLM in this process, one request at a time.

Run as ``python -m kvoffload.demo.engine FD``. The first line of standard input is an ``ActConfig`` as JSON, each
further line a command ``{"do": NAME, ...}``. Writes one line of JSON per line of input to the open file descriptor FD:
an ``EngineInfo`` when the engine is warm, then the result of each command. Standard output and error are for vLLM's
log. Between commands the engine steps while it has something to do, as a server does. The caller watches the time and
ends the process when it is out.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import random
import selectors
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

from kvoffload.demo.protocol import ActConfig, ActSummary, EngineInfo, RequestResult, classify
from kvoffload.demo.shared.files import BrokenFiles, FileMode
from kvoffload.observe.metrics import METRICS

RECORDS_SEARCHED = 16
_MESSAGES = (EngineInfo, RequestResult, ActSummary)


class Probe:
    """Reads records and counters of kvoffload. Returns empty results if the engine runs without it.

    ``waited_s``: how long the latest request has waited for the answer to what can be loaded for it.
    """

    def __init__(self, llm: Any) -> None:
        from kvoffload.vllm.connector import KVOffloadConnector

        self._scheduler: Any = None
        self._asked: tuple[str, float] | None = None
        self.waited_s = 0.0
        try:
            connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
            self._scheduler = connector.connector_scheduler if isinstance(connector, KVOffloadConnector) else None
        except AttributeError as error:
            print(f"demo: cannot see kvoffload's counters: {error}", file=sys.stderr)
        if self._scheduler is not None:
            connector.get_num_new_matched_tokens = self._timed(connector.get_num_new_matched_tokens)

    def _timed(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``get_num_new_matched_tokens`` with a clock. vLLM asks again in each step until it has an answer."""

        def timed(request: Any, *args: Any, **kwargs: Any) -> Any:
            if self._asked is None or self._asked[0] != request.request_id:
                self._asked = request.request_id, time.monotonic()
            answer = ask(request, *args, **kwargs)
            self.waited_s = time.monotonic() - self._asked[1]
            return answer

        return timed

    def record(self, request_id: str) -> Any:
        """Returns the RequestRecord of a request. vLLM appends a suffix to the id that it is given."""
        if self._scheduler is None:
            return None
        recent = islice(reversed(self._scheduler.records), RECORDS_SEARCHED)
        return next((r for r in recent if r.req_id.split("-")[0] == request_id), None)

    def pool(self) -> tuple[int, int]:
        """Returns the number of used blocks and of all blocks of the host pool."""
        if self._scheduler is None:
            return 0, 0
        manager = self._scheduler.manager
        return manager.num_used_blocks, manager.num_blocks

    def counters(self) -> dict[str, float]:
        """Returns the values of kvoffload's counters by name."""
        if self._scheduler is None:
            return {}
        totals = self._scheduler.metrics.snapshot()
        return {k: v for k, v in totals.items() if METRICS[k.partition(":")[0]].kind == "counter"}


class Act:
    """An engine and the conversations with it."""

    def __init__(self, config: ActConfig) -> None:
        import vllm
        from vllm.config import KVTransferConfig

        self.config = config
        self._closed = False
        self.version = vllm.__version__
        self.llm: Any = vllm.LLM(
            model=config.model,
            skip_tokenizer_init=True,
            dtype="float32",
            seed=config.seed,
            enforce_eager=True,
            enable_prefix_caching=True,
            block_size=config.block_size,
            num_gpu_blocks_override=config.device_blocks,
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.max_model_len,
            max_num_seqs=4,
            disable_log_stats=False,
            kv_transfer_config=KVTransferConfig(**_on_this_device(config.connector)) if config.connector else None,
        )
        self.params = vllm.SamplingParams(
            temperature=0.0, max_tokens=config.answer_tokens, ignore_eos=True, logprobs=1, detokenize=False
        )
        self.recomputing = self.params.clone()
        # kvoffload loads nothing either for such a request.
        self.recomputing.skip_reading_prefix_cache = True
        self.probe = Probe(self.llm)
        self.encode = self._encoder()
        self.prompts = [self.encode(text)[:tokens] for text, tokens in config.documents]
        self.answers: list[list[int]] = [[] for _ in self.prompts]
        self.questions = [self.encode(question)[: config.question_tokens] for question in config.questions]

    def _encoder(self) -> Any:
        if self.config.tokenizer:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(self.config.model)
            return lambda text: tokenizer.encode(text, add_special_tokens=False)
        offset = self.config.token_offset
        return lambda text: [offset + byte for byte in text.encode()]

    def generate(self, request_id: str, prompt: list[int], load: bool = True) -> tuple[Any, float, float]:
        """Runs one request. Returns vLLM's output, and the milliseconds to the first token and to the last. Without
        ``load`` the whole prompt is computed, whatever any cache has of it."""
        engine = self.llm.llm_engine
        start = time.perf_counter()
        engine.add_request(request_id, {"prompt_token_ids": prompt}, self.params if load else self.recomputing)
        first = 0.0
        while True:
            for output in engine.step():
                if not first and output.outputs[0].token_ids:
                    first = time.perf_counter() - start
                if output.finished:
                    total = time.perf_counter() - start
                    # As in a server, one more step tells the connector of the end.
                    engine.step()
                    return output, 1e3 * first, 1e3 * total

    def warm_up(self) -> None:
        """Runs a new prompt twice, so that it is computed and then found on the device. No act has used it before."""
        prompt = self.prompts[0].copy()
        random.SystemRandom().shuffle(prompt)
        for i in range(2):
            self.generate(f"warmup{i}", prompt)

    def visit(self, index: int) -> RequestResult | None:
        """Asks a question about a document and keeps the answer. Returns None if an earlier act has asked it."""
        document, question = self.config.visits[index]
        self.prompts[document] += self.answers[document] + self.questions[question]
        known = self.config.answers[index]
        if known is not None:
            self.answers[document] = known
            return None
        follow_up = (
            index > 0 and self.config.visits[index - 1][0] == document and self.config.answers[index - 1] is None
        )
        result = self._request(index, document, self.prompts[document], follow_up)
        self.answers[document] = result.output_tokens
        return result

    def repeat(self, index: int) -> RequestResult:
        """Asks the last question about the document of a visit once more."""
        document, _ = self.config.visits[index]
        return self._request(index, document, self.prompts[document], follow_up=False)

    def ask(self, index: int, document: int, load: bool) -> RequestResult:
        """Asks the first question about a document, as if it had not been asked before."""
        return self._request(index, document, self.prompts[document] + self.questions[0], follow_up=False, load=load)

    def _request(
        self, index: int, document: int, prompt: list[int], follow_up: bool, load: bool = True
    ) -> RequestResult:
        request_id = f"demo{index}"
        output, ttft_ms, total_ms = self.generate(request_id, prompt, load)
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        record = self.probe.record(request_id)
        cached = output.num_cached_tokens or 0
        device, host, disk = (
            (cached, 0, 0) if record is None else (record.device_tokens, record.host_tokens, record.disk_tokens)
        )
        used, blocks = self.probe.pool()
        return RequestResult(
            index=index,
            document=document,
            follow_up=follow_up,
            prompt_tokens=len(prompt),
            device_tokens=device,
            host_tokens=host,
            disk_tokens=disk,
            source=classify(len(prompt), device, host, disk),
            reason=None if record is None or record.reason is None else str(record.reason),
            ttft_ms=ttft_ms,
            total_ms=total_ms,
            output_tokens=tokens,
            logprobs=[_finite(step[t].logprob) for t, step in zip(tokens, completion.logprobs, strict=True)],
            pool_used=used,
            pool_blocks=blocks,
            waited_s=self.probe.waited_s,
        )

    def settle(self) -> None:
        """Runs steps until nothing is left to write to tiers."""
        while self.step():
            pass

    def step(self) -> bool:
        """Runs one step. Returns whether there was something to do."""
        engine = self.llm.llm_engine
        if not engine.engine_core.engine_core.scheduler.has_requests():
            return False
        engine.step()
        return True

    def forget(self) -> None:
        """Empties the device's own cache."""
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the device's cache cannot be emptied: blocks are in use")

    def corrupt_loads(self) -> None:
        """Corrupts everything that is loaded from now on, after it was verified: the negative control."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from kvoffload.demo.corrupted import corrupt_loads

        corrupt_loads(get_kv_transfer_group())

    def direct_io(self) -> bool:
        """Whether files of the disk tier are open with direct I/O."""
        options = (self.config.connector or {}).get("kv_connector_extra_config", {})
        if "disk_dir" not in options:
            return False
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                inside = os.readlink(f"/proc/self/fd/{fd}").startswith(options["disk_dir"] + "/")
                if inside and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                    return True
        return False

    def close(self) -> None:
        """Shuts the engine down, so that pending blocks are written to disk. May be called twice."""
        if not self._closed:
            self._closed = True
            self.llm.llm_engine.engine_core.shutdown()

    def device_name(self) -> str:
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            return f"CPU, {len(os.sched_getaffinity(0))} cores"
        return str(current_platform.get_device_name())


def _on_this_device(connector: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of KVTransferConfig. On a CPU vLLM's own offloading needs a worker that copies there."""
    from vllm.platforms import current_platform

    options = connector["kv_connector_extra_config"]
    if options.get("spec_name") != "TieringOffloadingSpec" or not current_platform.is_cpu():
        return connector
    on_cpu = {"spec_name": "HostTieringSpec", "spec_module_path": "kvoffload.vllm.host_spec"}
    return connector | {"kv_connector_extra_config": options | on_cpu}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class Engine:
    """Carries out commands. Each method is a command, with its arguments; what it returns is the reply."""

    def __init__(self, act: Act) -> None:
        self._act = act
        self._before = act.probe.counters()
        self._start = time.perf_counter()
        self._files: BrokenFiles | None = None

    def visit(self, index: int) -> RequestResult | None:
        return self._act.visit(index)

    def repeat(self, index: int) -> RequestResult:
        return self._act.repeat(index)

    def ask(self, index: int, document: int, load: bool) -> RequestResult:
        return self._act.ask(index, document, load)

    def settle(self) -> None:
        self._act.settle()

    def forget(self) -> None:
        self._act.forget()

    def corrupt_loads(self) -> None:
        self._act.corrupt_loads()

    def break_files(self, directory: str, mode: str) -> int:
        """Sets how files in ``directory`` behave. Returns the number of calls on them that have met a fault so far."""
        if self._files is None:
            self._files = BrokenFiles(directory)
        self._files.set_mode(FileMode(mode))
        return self._files.num_calls

    def metrics(self) -> dict[str, float]:
        """Returns kvoffload's counters since the warm-up, by name."""
        return {name: value - self._before.get(name, 0.0) for name, value in self._act.probe.counters().items()}

    def summary(self) -> ActSummary:
        """Returns the summary of everything since the warm-up."""
        return ActSummary(time.perf_counter() - self._start, self.metrics(), self._act.direct_io())

    def end(self) -> ActSummary:
        result = self.summary()
        self._act.close()
        return result


def _commands(act: Act) -> Iterator[dict[str, Any]]:
    """Yields the lines of standard input. While there is none, the engine steps if it has something to do."""
    lines = sys.stdin
    with selectors.DefaultSelector() as selector:
        selector.register(lines, selectors.EVENT_READ)
        while True:
            while not selector.select(0) and act.step():
                pass
            line = lines.readline()
            if not line:
                return
            yield json.loads(line)


def main() -> None:
    out = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8", buffering=1)

    def send(message: Any) -> None:
        out.write(json.dumps(asdict(message) if isinstance(message, _MESSAGES) else message) + "\n")

    start = time.perf_counter()
    act = Act(ActConfig(**json.loads(sys.stdin.readline())))
    act.warm_up()
    engine = Engine(act)
    send(EngineInfo(act.version, act.device_name(), time.perf_counter() - start))
    try:
        for command in _commands(act):
            send(getattr(engine, command.pop("do"))(**command))
    finally:
        # Whoever has started this process may have ended without another command.
        act.close()


if __name__ == "__main__":
    main()

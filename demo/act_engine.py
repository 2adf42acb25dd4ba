"""The engine of an act: ``python -m demo.act_engine FD``, with the fields of an ``ActConfig``. See ``engine``."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import random
import time
from dataclasses import asdict
from itertools import islice
from typing import Any

from demo.engine import Engine
from demo.process import serve
from demo.protocol import ActConfig, ActSummary, EngineInfo, RequestResult, classify
from demo.talks import ByteTalk, ChatTalk, Talk, load_tokenizer
from kvoffload.observe.metrics import METRICS

RECORDS_SEARCHED = 16


class Probe:
    """Reads records and counters of kvoffload. Returns empty results if the engine runs without it."""

    def __init__(self, scheduler: Any) -> None:
        from kvoffload.vllm.connector import KVOffloadConnector

        self._scheduler: Any = None
        connector = getattr(scheduler, "connector", None)
        if isinstance(connector, KVOffloadConnector):
            self._scheduler = connector.connector_scheduler

    def record(self, request_id: str) -> Any:
        """Returns the RequestRecord of a request. vLLM appends a suffix to the id that it is given."""
        if self._scheduler is None:
            return None
        recent = islice(reversed(self._scheduler.records), RECORDS_SEARCHED)
        return next((r for r in recent if r.req_id.split("-")[0] == request_id), None)

    def counters(self) -> dict[str, float]:
        """Returns the values of kvoffload's counters by name."""
        if self._scheduler is None:
            return {}
        totals = self._scheduler.metrics.snapshot()
        return {k: v for k, v in totals.items() if METRICS[k.partition(":")[0]].kind == "counter"}


class ActEngine(Engine):
    """An engine and the conversations with it. It is warm once it is made."""

    def __init__(self, config: ActConfig) -> None:
        start = time.perf_counter()
        self.config = config
        super().__init__(
            config.model,
            config.connector,
            {
                "seed": config.seed,
                "enable_prefix_caching": True,
                "block_size": config.block_size,
                "num_gpu_blocks_override": config.device_blocks,
                "max_model_len": config.max_model_len,
                "max_num_batched_tokens": config.max_model_len,
                "max_num_seqs": 4,
                "disable_log_stats": False,
            },
        )
        self.probe = Probe(self.scheduler)
        self._tokenizer = load_tokenizer(config.model) if config.tokenizer else None
        self.talks = [self._talk(document) for document in range(len(config.documents))]
        self._sampling: dict[str, Any] = {}
        if self._tokenizer is not None:
            self._sampling = {"ignore_eos": False, "stop_token_ids": [self._tokenizer.eos_token_id]}
        self._warm_up()
        self._before = self.probe.counters()
        self._started = time.perf_counter()
        self._start_s = self._started - start

    def _talk(self, document: int) -> Talk:
        """Returns a new conversation about a document."""
        config = self.config
        text, tokens = config.documents[document]
        if self._tokenizer is not None:
            return ChatTalk(self._tokenizer, text, tokens)
        return ByteTalk(text, tokens, config.question_tokens, config.token_offset)

    def _warm_up(self) -> None:
        """Runs a new prompt twice, so that it is computed and then found on the device. No act has used it before."""
        prompt = self._talk(0).ask(self.config.questions[0][0]).copy()
        random.SystemRandom().shuffle(prompt)
        self.run([[prompt, prompt]], 1, self.config.answer_tokens)

    def ready(self) -> dict[str, Any]:
        from vllm.platforms import current_platform

        cores = f"CPU, {len(os.sched_getaffinity(0))} cores"
        device = cores if current_platform.is_cpu() else str(current_platform.get_device_name())
        return asdict(EngineInfo(super().ready()["version"], device, self._start_s))

    def visit(self, index: int) -> dict[str, Any] | None:
        """Asks a question about a document and keeps the answer. Returns None if an earlier act has asked it."""
        document, turn = self.config.visits[index]
        talk, question = self.talks[document], self.config.questions[document][turn]
        prompt = talk.ask(question)
        known = self.config.answers[index]
        if known is not None:
            talk.answer(known)
            return None
        follow_up = (
            index > 0 and self.config.visits[index - 1][0] == document and self.config.answers[index - 1] is None
        )
        result = self._request(index, document, question, prompt, follow_up)
        talk.answer(result["output_tokens"])
        return result

    def repeat(self, index: int) -> dict[str, Any]:
        """Asks the last question about the document of a visit once more."""
        document, turn = self.config.visits[index]
        return self._request(index, document, self.config.questions[document][turn], self.talks[document].prompt)

    def first_question(self, index: int, document: int, load: bool) -> dict[str, Any]:
        """Asks the first question about a document, as if it had not been asked before. Without ``load`` the whole
        prompt is computed, whatever any cache has of it."""
        question = self.config.questions[document][0]
        return self._request(index, document, question, self._talk(document).ask(question), load=load)

    def _request(
        self,
        index: int,
        document: int,
        question: str,
        prompt: list[int],
        follow_up: bool = False,
        load: bool = True,
    ) -> dict[str, Any]:
        # kvoffload loads nothing either for a request that does not read the device's cache.
        changes = self._sampling | ({} if load else {"skip_reading_prefix_cache": True})
        (answer,) = self.run([[prompt]], 1, self.config.answer_tokens, **changes)
        record = self.probe.record(f"request{self.num_asked}")
        cached = answer["cached"] or 0
        device, host, disk = (
            (cached, 0, 0) if record is None else (record.device_tokens, record.host_tokens, record.disk_tokens)
        )
        result = RequestResult(
            index=index,
            document=document,
            follow_up=follow_up,
            prompt_tokens=len(prompt),
            device_tokens=device,
            host_tokens=host,
            disk_tokens=disk,
            source=classify(len(prompt), device, host, disk),
            reason=None if record is None or record.reason is None else str(record.reason),
            ttft_ms=1e3 * answer["ttft_s"],
            total_ms=1e3 * answer["total_s"],
            output_tokens=answer["tokens"],
            logprobs=[logprob if math.isfinite(logprob) else None for logprob in answer["logprobs"]],
            question=question,
            answer=self.talks[document].text(answer["tokens"]),
        )
        return asdict(result)

    def corrupt_loads(self) -> None:
        """Corrupts everything that is loaded from now on, after it was verified: the negative control."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from demo.corrupted import corrupt_loads

        corrupt_loads(get_kv_transfer_group())

    def metrics(self) -> dict[str, float]:
        """Returns kvoffload's counters since the warm-up, by name."""
        return {name: value - self._before.get(name, 0.0) for name, value in self.probe.counters().items()}

    def summary(self) -> dict[str, Any]:
        """Returns the summary of everything since the warm-up."""
        return asdict(ActSummary(time.perf_counter() - self._started, self.metrics(), self._direct_io()))

    def end(self) -> dict[str, Any]:
        """Shuts down, and returns the summary."""
        result = self.summary()
        self.close()
        return result

    def _direct_io(self) -> bool:
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


if __name__ == "__main__":
    serve(lambda **fields: ActEngine(ActConfig(**fields)))

"""The result of the demo's acts: comparisons, numbers, and the list of failed checks."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from demo.act import ActResult
from demo.protocol import RequestResult, Source
from demo.replay import Agreement

LOGPROB_TOLERANCE = 1e-4
"""Another order of float32 additions changes a logprob by about 1e-6, a wrong block by far more."""
BUSY = 0.5
"""Load average per core above which other programs affect the timings."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of ``count`` times in milliseconds; None if ``count`` is 0."""

    p50: float | None
    p95: float | None
    count: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of two acts' outputs by request. Logprobs are compared up to the first different token."""

    different: list[int]
    """Requests whose tokens differ or whose logprobs differ by more than the tolerance."""
    max_logprob_diff: float
    """Infinite if a logprob is not finite."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a demo, with its acts ``baseline``, ``offload`` and ``restart``.

    ``restart`` has some of the requests of the others, with the same indexes, and repeats them as the control.
    """

    model: str
    seed: int
    made_at: str
    load_average: float
    """Load average of the machine in the minute before the first act."""
    baseline: ActResult
    offload: ActResult
    restart: ActResult
    versus_offload: Comparison
    versus_restart: Comparison
    versus_control: Comparison
    replay: Agreement | None = None
    """None if the trace was not replayed."""
    documents: Sequence[str] = ()
    """The names of the documents. Conversation ``c`` is about the one at ``c % len(documents)``."""

    @property
    def pairs(self) -> list[tuple[str, list[tuple[str, RequestResult]]]]:
        """Returns a question about each document that was asked again after the restart, if possible no follow-up, with
        the answers of all acts. Empty without a tokenizer."""
        shown: dict[str, tuple[str, list[tuple[str, RequestResult]]]] = {}
        again = zip(self.restart.requests, self.restart.control, strict=True)
        for restarted, corrupted in sorted(again, key=lambda pair: self.baseline.requests[pair[0].index].follow_up):
            before = self.baseline.requests[restarted.index]
            answers = [
                ("without kvoffload", before),
                ("with kvoffload", self.offload.requests[restarted.index]),
                ("after the restart, from disk", restarted),
                ("with corrupted bytes", corrupted),
            ]
            if before.answer:
                name = self.documents[before.document % len(self.documents)]
                shown.setdefault(name, (f"{name}: {before.question}", answers))
        return [shown[name] for name in self.documents if name in shown]

    @property
    def warnings(self) -> list[str]:
        """Reasons to doubt the timings. They do not affect the comparison of outputs."""
        cores = len(os.sched_getaffinity(0))
        if self.load_average <= BUSY * cores:
            return []
        return [
            f"The machine was busy before the demo began (load {self.load_average:.1f} on {cores} cores): the times "
            "may be unreliable."
        ]

    @property
    def ttft_ms(self) -> dict[Source, Quantiles]:
        """TTFT by source: recomputing without kvoffload, device and host hits with it, disk hits after the restart."""
        acts = {
            Source.RECOMPUTE: self.baseline,
            Source.DEVICE: self.offload,
            Source.HOST: self.offload,
            Source.DISK: self.restart,
        }
        return {source: ttft_quantiles(act.requests, source) for source, act in acts.items()}

    @property
    def speedups(self) -> dict[Source, float | None]:
        """Returns how many times faster than recomputing a hit in each cache is, by the medians of the TTFT."""
        recompute = self.ttft_ms[Source.RECOMPUTE].p50
        return {
            source: None if recompute is None or found.p50 is None else recompute / found.p50
            for source, found in self.ttft_ms.items()
        }

    @property
    def hit_tokens(self) -> dict[str, int]:
        return {
            "device": sum(r.device_tokens for r in self.offload.requests),
            "host": sum(r.host_tokens for r in self.offload.requests),
            "disk": sum(r.disk_tokens for r in self.restart.requests),
        }

    @property
    def tokens_asked(self) -> int:
        return sum(r.prompt_tokens for r in self.offload.requests)

    @property
    def restart_tokens_asked(self) -> int:
        return sum(r.prompt_tokens for r in self.restart.requests)

    @property
    def failures(self) -> list[str]:
        """One sentence per failed check; empty if all passed."""
        sentences = []
        for when, act, versus in (
            ("with kvoffload", self.offload, self.versus_offload),
            ("after the restart", self.restart, self.versus_restart),
        ):
            if versus.different:
                sentences.append(
                    f"Outputs {when} differ from those without kvoffload in {len(versus.different)} of "
                    f"{len(act.requests)} requests, the first of which is {versus.different[0]}."
                )
        if not self.hit_tokens["host"]:
            sentences.append("Nothing was loaded from host memory, so the acts prove nothing about kvoffload.")
        elif not self.versus_control.different:
            sentences.append(
                "Corruption was not detected: corrupted bytes changed no output, so identical outputs prove nothing."
            )
        if not self.hit_tokens["disk"]:
            sentences.append("Nothing was read from disk after the restart, so it proves nothing about the disk tier.")
        if self.replay is not None and not self.replay.agrees:
            sentences.append(
                "A replay of the recorded trace has other hits than the server: "
                + ", ".join(
                    f"{self.replay.replayed[tier]:,} instead of {found:,} tokens on the {tier}"
                    for tier, found in self.replay.measured.items()
                )
                + "."
            )
        return sentences

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of ``report.json``."""
        info = self.offload.info
        acts = {"baseline": self.baseline, "offload": self.offload, "restart": self.restart}
        return {
            "ok": not self.failures,
            "failures": self.failures,
            "warnings": self.warnings,
            "max_logprob_diff": finite(max(self.versus_offload.max_logprob_diff, self.versus_restart.max_logprob_diff)),
            "corrupted_outputs": len(self.versus_control.different),
            "hit_tokens": self.hit_tokens,
            "ttft_ms": {str(source): asdict(q) for source, q in self.ttft_ms.items()},
            "speedups": {str(source): ratio for source, ratio in self.speedups.items()},
            "replay": None if self.replay is None else self.replay.to_dict(),
            "model": self.model,
            "documents": list(self.documents),
            "seed": self.seed,
            "vllm_version": info.vllm_version,
            "device": info.device,
            "made_at": self.made_at,
            "load_average": self.load_average,
            "acts": {name: asdict(act) for name, act in acts.items()},
        }


def make_report(
    acts: Sequence[ActResult],
    model: str,
    seed: int,
    load_average: float = 0.0,
    replay: Agreement | None = None,
    documents: Sequence[str] = (),
) -> Report:
    """Compares the acts and returns the report. The acts: without kvoffload, with it, after the restart."""
    baseline, offload, restart = acts
    repeated = [baseline.requests[request.index] for request in restart.requests]
    return Report(
        model=model,
        seed=seed,
        made_at=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        load_average=load_average,
        baseline=baseline,
        offload=offload,
        restart=restart,
        versus_offload=compare(baseline.requests, offload.requests),
        versus_restart=compare(repeated, restart.requests),
        versus_control=compare(repeated, restart.control),
        replay=replay,
        documents=documents,
    )


def compare(expected: Sequence[RequestResult], actual: Sequence[RequestResult]) -> Comparison:
    """Compares the outputs of the same requests, in the same order. (A different answer changes later prompts too.)"""
    different, worst = [], 0.0
    for a, b in zip(expected, actual, strict=True):
        pairs = list(itertools.zip_longest(a.output_tokens, b.output_tokens))
        agree = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        # Include the first different token: both acts chose it as the most likely one after the same tokens.
        diff = max(map(_difference, a.logprobs[: agree + 1], b.logprobs[: agree + 1]), default=0.0)
        worst = max(worst, diff)
        if agree < len(pairs) or diff > LOGPROB_TOLERANCE:
            different.append(a.index)
    return Comparison(different, worst)


def _difference(a: float | None, b: float | None) -> float:
    return math.inf if a is None or b is None else abs(a - b)


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def ttft_quantiles(requests: Iterable[RequestResult], source: Source) -> Quantiles:
    times = [r.ttft_ms for r in requests if r.source is source]
    if not times:
        return Quantiles(None, None, 0)
    p50, p95 = np.percentile(times, [50, 95])
    return Quantiles(float(p50), float(p95), len(times))

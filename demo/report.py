"""The result of the demo's acts: comparisons, numbers, and the list of failed checks."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from demo.act import ActResult
from demo.inside import Trial, from_disk
from demo.protocol import RequestResult, Source
from demo.replay import Agreement

LOGPROB_TOLERANCE = 1e-4
"""Another order of float32 additions changes a logprob by about 1e-6, a wrong block by far more."""

BUSY = 0.5
"""Load average per core above which other programs affect the timings."""

DISTURBED = 1.3
"""Timings are doubtful if the same work takes longer in another act by more than this factor."""


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
    first_token_mismatch: int | None
    max_logprob_diff: float
    """Infinite if a logprob is not finite."""


@dataclass(frozen=True, slots=True)
class JudgedTrial:
    """A tier below vLLM's own host memory, and how its answers compare with those of vLLM alone."""

    trial: Trial
    versus_before: Comparison
    versus_after: Comparison

    @property
    def found(self) -> int:
        """How many prompts were loaded before bytes changed."""
        return from_disk(self.trial.before)

    @property
    def wrong(self) -> int:
        """How many answers were wrong after bytes had changed."""
        return len(self.versus_after.different)

    @property
    def computed(self) -> int:
        """How many prompts were computed again after bytes had changed."""
        return len(self.trial.after) - from_disk(self.trial.after)

    @property
    def failures(self) -> list[str]:
        name, asked = self.trial.tier, len(self.trial.after)
        sentences = []
        if self.versus_before.different:
            sentences.append(
                f"{name}: {len(self.versus_before.different)} of {len(self.trial.before)} answers differ from those "
                "without offloading."
            )
        if not self.found:
            sentences.append(f"{name}: no prompt was loaded, so the act proves nothing about it.")
        if self.trial.is_ours and self.wrong:
            sentences.append(f"{name}: {self.wrong} of {asked} answers are wrong after bytes on disk have changed.")
        if not self.trial.is_ours and not self.wrong:
            sentences.append(f"{name}: changed bytes changed no answer, so the acts with them prove nothing.")
        return sentences

    def to_dict(self) -> dict[str, Any]:
        return {"found": self.found, "wrong": self.wrong, "computed": self.computed} | self.trial.to_dict()


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
    trials: Sequence[JudgedTrial] = ()
    """Empty if this vLLM does not take a tier of kvoffload."""
    documents: Sequence[str] = ()
    """The names of the documents. Conversation ``c`` is about the one at ``c % len(documents)``."""

    @property
    def identical(self) -> bool:
        return not self.versus_offload.different

    @property
    def restart_identical(self) -> bool:
        return not self.versus_restart.different

    @property
    def corruption_detected(self) -> bool:
        return bool(self.versus_control.different)

    @property
    def pairs(self) -> list[tuple[str, RequestResult, list[tuple[str, RequestResult]]]]:
        """Returns a question about each document that was asked again after the restart, if possible no follow-up: the
        document's name, the request, and the answers of all acts. Empty without a tokenizer."""
        shown: dict[str, tuple[str, RequestResult, list[tuple[str, RequestResult]]]] = {}
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
                name = self.name_of(before.document)
                shown.setdefault(name, (name, before, answers))
        return [shown[name] for name in self.documents if name in shown]

    def name_of(self, conversation: int) -> str:
        """Returns the name of the document of a conversation."""
        return self.documents[conversation % len(self.documents)]

    @property
    def warnings(self) -> list[str]:
        """Reasons to doubt the timings. They do not affect the comparison of outputs."""
        warnings = []
        cores = len(os.sched_getaffinity(0))
        if self.load_average > BUSY * cores:
            warnings.append(
                f"The machine was busy before the demo began (load {self.load_average:.1f} on {cores} cores): "
                "the times may be unreliable."
            )
        # Prompts that are recomputed in both acts should take the same time.
        computed = {r.index for r in self.offload.requests if r.source is Source.RECOMPUTE}
        without, with_it = (
            float(np.median([r.ttft_ms for r in act.requests if r.index in computed] or [0.0]))
            for act in (self.baseline, self.offload)
        )
        if max(without, with_it) > DISTURBED * min(without, with_it):
            warnings.append(
                f"Computing the same prompts took {without:.0f} ms without kvoffload and {with_it:.0f} ms with it: "
                "other programs disturbed the demo, so the ratios are off by a similar factor."
            )
        return warnings

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
    def ratios(self) -> dict[str, float | None]:
        """Ratios of the median TTFT."""
        p50 = {source: q.p50 for source, q in self.ttft_ms.items()}

        def ratio(slow: Source, fast: Source) -> float | None:
            a, b = p50[slow], p50[fast]
            return None if a is None or b is None else a / b

        return {
            "recompute_to_host": ratio(Source.RECOMPUTE, Source.HOST),
            "recompute_to_device": ratio(Source.RECOMPUTE, Source.DEVICE),
            "recompute_to_disk": ratio(Source.RECOMPUTE, Source.DISK),
            "host_to_device": ratio(Source.HOST, Source.DEVICE),
        }

    @property
    def failures(self) -> list[str]:
        """One sentence per failed check; empty if all passed."""
        sentences = []
        for when, act, versus in (
            ("with kvoffload", self.offload, self.versus_offload),
            ("after the restart", self.restart, self.versus_restart),
        ):
            if versus.different:
                detail = (
                    f"the tokens of request {versus.first_token_mismatch} differ"
                    if versus.first_token_mismatch is not None
                    else f"logprobs differ by up to {versus.max_logprob_diff:.1e}, over {LOGPROB_TOLERANCE:.0e}"
                )
                sentences.append(
                    f"Outputs {when} differ from those without kvoffload in {len(versus.different)} of "
                    f"{len(act.requests)} requests: {detail}."
                )
        if not self.hit_tokens["host"]:
            sentences.append("Nothing was loaded from host memory, so the acts prove nothing about kvoffload.")
        elif not self.corruption_detected:
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
        return sentences + [sentence for judged in self.trials for sentence in judged.failures]

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of ``report.json``. Its keys are stable; new ones may be added."""
        info = self.offload.info
        return {
            "ok": not self.failures,
            "failures": self.failures,
            "warnings": self.warnings,
            "requests": len(self.offload.requests),
            "identical": self.identical,
            "max_logprob_diff": finite(self.versus_offload.max_logprob_diff),
            "corruption_detected": self.corruption_detected,
            "corrupted_outputs": len(self.versus_control.different),
            "restart": {
                "requests": len(self.restart.requests),
                "identical_outputs": len(self.restart.requests) - len(self.versus_restart.different),
                "max_logprob_diff": finite(self.versus_restart.max_logprob_diff),
                "tokens_asked": self.restart_tokens_asked,
                "direct_io": self.restart.summary.direct_io,
            },
            "tokens_asked": self.tokens_asked,
            "hit_tokens": self.hit_tokens,
            "ttft_ms": {str(source): asdict(q) for source, q in self.ttft_ms.items()},
            "ttft_ratios": self.ratios,
            "replay": None if self.replay is None else self.replay.to_dict(),
            "store_gbps": gbps(self.offload, "store"),
            "load_gbps": gbps(self.offload, "load"),
            "model": self.model,
            "documents": list(self.documents),
            "seed": self.seed,
            "vllm_version": info.vllm_version,
            "device": info.device,
            "made_at": self.made_at,
            "load_average": self.load_average,
            "acts": [
                {
                    "name": name,
                    "wall_s": act.summary.wall_s,
                    "start_s": act.info.start_s,
                    "ttft_ms": {str(s): asdict(ttft_quantiles(act.requests, s)) for s in Source},
                    "miss_reasons": miss_reasons(act.requests),
                    "metrics": act.summary.metrics,
                    "requests": [asdict(request) for request in act.requests],
                }
                for name, act in (("baseline", self.baseline), ("offload", self.offload), ("restart", self.restart))
            ],
            "control": [asdict(request) for request in self.restart.control],
            "inside_vllm": [judged.to_dict() for judged in self.trials],
        }


def make_report(
    acts: Sequence[ActResult],
    model: str,
    seed: int,
    load_average: float = 0.0,
    replay: Agreement | None = None,
    trials: Sequence[Trial] = (),
    documents: Sequence[str] = (),
) -> Report:
    """Compares the acts and returns the report. The acts: without kvoffload, with it, after the restart."""
    baseline, offload, restart = acts
    first_seen = {request.document: request for request in reversed(baseline.requests)}
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
        trials=[
            JudgedTrial(
                trial,
                *(
                    compare([first_seen[request.document] for request in requests], requests)
                    for requests in (trial.before, trial.after)
                ),
            )
            for trial in trials
        ],
        documents=documents,
    )


def compare(expected: Sequence[RequestResult], actual: Sequence[RequestResult]) -> Comparison:
    """Compares the outputs of the same requests, in the same order. (A different answer changes later prompts too.)"""
    different, mismatch, worst = [], None, 0.0
    for a, b in zip(expected, actual, strict=True):
        pairs = list(itertools.zip_longest(a.output_tokens, b.output_tokens))
        agree = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        same = agree == len(pairs)
        if not same and mismatch is None:
            mismatch = a.index
        # Include the first different token: both acts chose it as the most likely one after the same tokens.
        diff = max(map(_difference, a.logprobs[: agree + 1], b.logprobs[: agree + 1]), default=0.0)
        worst = max(worst, diff)
        if not same or diff > LOGPROB_TOLERANCE:
            different.append(a.index)
    return Comparison(different, mismatch, worst)


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


def gbps(act: ActResult, direction: str) -> float | None:
    """Returns the speed of copies in GB/s ("store" or "load"); None if nothing was copied."""
    seconds = act.summary.metrics.get(f"{direction}_seconds", 0.0)
    return act.summary.metrics.get(f"{direction}_bytes", 0.0) / seconds / 1e9 if seconds else None


def miss_reasons(requests: Iterable[RequestResult]) -> dict[str, int]:
    """Returns the number of requests by the reason of their first missing block."""
    return dict(Counter(r.reason for r in requests if r.reason is not None))

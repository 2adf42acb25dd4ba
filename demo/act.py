"""Runs the engines of acts in processes of their own, under deadlines, and collects what they report."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from demo import forks, process
from demo.engine import IN_THIS_PROCESS
from demo.process import CommandedProcess
from demo.protocol import ActConfig, ActSummary, EngineInfo, RequestResult

ENGINE = ("-m", "demo.act_engine")


@dataclass(slots=True)
class ActResult:
    """Everything that one act reported."""

    info: EngineInfo
    requests: list[RequestResult] = field(default_factory=list)
    summary: ActSummary = field(default_factory=lambda: ActSummary(0.0))
    """Without the control."""
    control: list[RequestResult] = field(default_factory=list)
    """The same requests once more, if they were repeated with corrupted loads."""


class Progress:
    """Is told how a run goes on. Shows nothing."""

    def begin(self, title: str, requests: int) -> None: ...
    def request(self, result: RequestResult) -> None: ...
    def skip(self, store: str, reason: str) -> None: ...


class EngineProcess(CommandedProcess):
    """An ``ActEngine`` in a process of its own. Its output goes to ``log``."""

    def __init__(self, config: ActConfig, log: Path, program: Sequence[str] = ENGINE) -> None:
        self._info: EngineInfo | None = None
        cache = {"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", str(config.device_cache_gib))}
        log.unlink(missing_ok=True)
        super().__init__(
            program, log, asdict(config), {**os.environ, **IN_THIS_PROCESS, **cache}, start=forks.start_engine
        )

    def wait_ready(self) -> EngineInfo:
        """Returns once the engine has started and warmed up."""
        if self._info is None:
            self._info = EngineInfo(**self.receive(process.START_DEADLINE_S))
        return self._info

    def visit(self, index: int) -> RequestResult | None:
        """Asks the question of a visit. Returns None if an earlier act has asked it."""
        reply = self.call("visit", index=index)
        return None if reply is None else RequestResult(**reply)

    def repeat(self, index: int) -> RequestResult:
        """Asks the last question about a document once more."""
        return RequestResult(**self.call("repeat", index=index))

    def ask(self, index: int, document: int, load: bool = True) -> RequestResult:
        """Asks the first question about a document, as if it had not been asked before. Without ``load`` the whole
        prompt is computed, whatever any cache has of it."""
        self.wait_ready()
        return RequestResult(**self.call("first_question", index=index, document=document, load=load))

    def shut_down(self) -> ActSummary:
        """Shuts the engine down as a server does, and returns the summary."""
        summary = ActSummary(**self.call("end"))
        self.end()
        return summary


def run_act(
    config: ActConfig,
    log: Path,
    on_request: Callable[[RequestResult], None],
    program: Sequence[str] = ENGINE,
    with_control: bool = False,
) -> ActResult:
    """Runs all visits of ``config`` in an engine of their own, and calls back after each.

    ``with_control`` then repeats the requests with corrupted loads. They must be the last ones about their documents.
    Raises EngineError, with the end of ``log``, if the engine fails or is silent past a deadline. In any case no
    process of the act is left behind.
    """
    with EngineProcess(config, log, program) as engine:
        result = ActResult(engine.wait_ready())
        for index in range(len(config.visits)):
            request = engine.visit(index)
            if request is not None:
                result.requests.append(request)
                on_request(request)
        if with_control:
            result.summary = ActSummary(**engine.call("summary"))
            engine.call("corrupt_loads")
            for request in result.requests:
                result.control.append(engine.repeat(request.index))
                on_request(result.control[-1])
            engine.shut_down()
        else:
            result.summary = engine.shut_down()
    return result

"""An engine in a child process, asked under deadlines."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.peers.engine import MAX_TOKENS
from benchmarks.peers.judge import Answer, Asked, Outcome
from benchmarks.peers.systems import environment, last_error
from demo.forks import start_engine
from demo.process import CommandedProcess, EndedError, RaisedError, SilentError, start_process

START_DEADLINE_S = 480.0
ANSWER_DEADLINE_S = 120.0
"""For each prompt. An engine without a cache computes one in a tenth of a second on a machine without other work."""
SETTLE_DEADLINE_S = 120.0
EXIT_DEADLINE_S = 20.0
MESSAGE_CHARS = 200
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
ENGINE = ("-m", "benchmarks.peers.engine")


class FailedError(Exception):
    """The engine hangs, has ended, or does not start. The text is its own message."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


class Running:
    """An engine that has started. As a context manager it leaves no process behind.

    ``connector`` has the fields of vLLM's ``KVTransferConfig``, or is None. Raises FailedError if the engine does not
    start.
    """

    def __init__(
        self,
        model: Path,
        connector: dict[str, Any] | None,
        log: Path,
        variables: Mapping[str, str] | None = None,
        python: str = sys.executable,
        program: Sequence[str] = ENGINE,
    ) -> None:
        self.log = log
        config = {"model": str(model), "connector": connector}
        start = start_engine if python == sys.executable else start_process
        variables = {**environment(), **ENVIRONMENT, **(variables or {})}
        self._engine = CommandedProcess(program, log, config, variables, python, start)
        try:
            self._receive(START_DEADLINE_S, Outcome.REFUSED)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.kill()

    def ask(self, prompts: Sequence[list[int]]) -> Asked:
        """Asks one prompt after the other."""
        answers: list[Answer] = []
        try:
            for prompt in prompts:
                self.begin([prompt])
                (reply,) = self._receive(ANSWER_DEADLINE_S)
                answers.append(Answer(prompt_tokens=len(prompt), **reply))
        except FailedError as error:
            return Asked(answers, error.outcome, str(error))
        return Asked(answers)

    def begin(self, prompts: Sequence[list[int]]) -> None:
        """Asks, without reading the answers."""
        self._engine.send("ask", prompts=prompts, max_tokens=MAX_TOKENS)

    def settle(self) -> None:
        """Waits until what is to be stored is stored."""
        self._engine.send("settle")
        self._receive(SETTLE_DEADLINE_S)

    def stop(self) -> None:
        """Shuts the engine down as a server does, then ends what is left."""
        with contextlib.suppress(FailedError):
            self._engine.send("close")
            self._receive(EXIT_DEADLINE_S)
            self._engine.end(EXIT_DEADLINE_S)
        self.kill()

    def kill(self) -> None:
        """Sends SIGKILL to all processes of the engine."""
        self._engine.kill()

    def _receive(self, deadline_s: float, raised: Outcome = Outcome.CRASH) -> Any:
        """Returns a reply. An exception of the engine is the outcome ``raised``."""
        try:
            return self._engine.receive(deadline_s)
        except SilentError as error:
            raise FailedError(Outcome.HANG, f"no answer in {deadline_s:.0f} s") from error
        except RaisedError as error:
            raise FailedError(raised, textwrap.shorten(error.error, MESSAGE_CHARS)) from error
        except EndedError as error:
            status = self._engine.status(EXIT_DEADLINE_S)
            words = last_error(self.log.read_text(errors="replace")) or f"exit status {status}"
            raise FailedError(Outcome.CRASH, textwrap.shorten(words, MESSAGE_CHARS)) from error

"""An engine of the board in a child process, under deadlines."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.peers.board_engine import MAX_TOKENS
from benchmarks.peers.board_judge import Answer, Asked, Outcome
from benchmarks.peers.processes import last_error
from benchmarks.peers.systems import HangError
from demo.forks import Forked
from demo.process import CommandedProcess, EndedError, RaisedError, SilentError, Start

START_DEADLINE_S = 480.0
ANSWER_DEADLINE_S = 120.0
"""For each prompt. An engine without a cache computes one in a tenth of a second on a machine without other work."""
SETTLE_DEADLINE_S = 120.0
EXIT_DEADLINE_S = 20.0
MESSAGE_CHARS = 200
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "PYTHONHASHSEED": "0",
}
ENGINE = ("-m", "benchmarks.peers.board_engine")


class RefusedError(Exception):
    """The engine does not start. The text is its own message."""


class CrashError(Exception):
    """The engine has ended."""


class Running:
    """An engine that has started. As a context manager it leaves no process behind.

    ``connector`` has the fields of vLLM's ``KVTransferConfig``, or is None. ``paths`` are folders with modules that it
    needs. Raises RefusedError, HangError or CrashError if the engine does not start.
    """

    def __init__(
        self,
        model: Path,
        connector: dict[str, Any] | None,
        log: Path,
        environment: Mapping[str, str] | None = None,
        paths: Sequence[str] = (),
        program: Sequence[str] = ENGINE,
        start: Start = Forked,
    ) -> None:
        self.log = log
        config = {"model": str(model), "connector": connector}
        variables = {**os.environ, **ENVIRONMENT, **(environment or {})}
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [variables.get("PYTHONPATH"), *paths]))
        self._engine = CommandedProcess(program, log, config, variables, start=start)
        try:
            self._receive(START_DEADLINE_S, RefusedError)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.kill()

    def ask(
        self,
        prompts: Sequence[list[int]],
        source: dict[str, Any] | None = None,
        answered: Callable[[int], None] = lambda count: None,
    ) -> Asked:
        """Asks one prompt after the other. Calls ``answered`` with the number of answers after each.

        ``source`` is the engine that requests name as that which has their blocks.
        """
        answers: list[Answer] = []
        try:
            for prompt in prompts:
                self._engine.send("ask", prompts=[prompt], max_tokens=MAX_TOKENS, source=source)
                (reply,) = self._receive(ANSWER_DEADLINE_S)
                answers.append(
                    Answer(
                        tokens=reply["tokens"],
                        logprobs=reply["logprobs"],
                        prompt_tokens=len(prompt),
                        cached_tokens=reply["cached_tokens"],
                        error=reply["error"],
                        ttft_ms=reply["ttft_ms"],
                    )
                )
                answered(len(answers))
        except HangError as error:
            return Asked(answers, Outcome.HANG, str(error))
        except CrashError as error:
            return Asked(answers, Outcome.CRASH, str(error))
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
        with contextlib.suppress(HangError, CrashError):
            self._engine.send("close")
            self._receive(EXIT_DEADLINE_S)
            self._engine.end(EXIT_DEADLINE_S)
        self.kill()

    def kill(self) -> None:
        """Sends SIGKILL to all processes of the engine."""
        self._engine.kill()

    def _receive(self, deadline_s: float, raised: type[Exception] | None = None) -> Any:
        try:
            return self._engine.receive(deadline_s)
        except SilentError as error:
            raise HangError(f"no answer in {deadline_s:.0f} s") from error
        except RaisedError as error:
            raise (raised or CrashError)(shorten(error.error)) from error
        except EndedError as error:
            raise CrashError(self._last_words()) from error

    def _last_words(self) -> str:
        """Returns the last error in the log, else how the process ended."""
        status = self._engine.status(EXIT_DEADLINE_S)
        log = self.log.read_text(errors="replace") if self.log.exists() else ""
        return shorten(last_error(log) or f"exit status {status}")


def shorten(text: str) -> str:
    """Returns ``text`` in one line of at most MESSAGE_CHARS characters."""
    line = " ".join(text.split())
    return line if len(line) <= MESSAGE_CHARS else line[: MESSAGE_CHARS - 3] + "..."

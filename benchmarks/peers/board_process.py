"""An engine of the board in a child process, under deadlines."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.peers import board_engine
from benchmarks.peers.board_judge import Answer, Asked, Outcome

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
FORKS = multiprocessing.get_context("forkserver")
"""Importing vLLM takes longer than starting an engine of a small model, so that it is done once."""
FORKS.set_forkserver_preload(list(board_engine.PRELOAD))


class RefusedError(Exception):
    """The engine does not start. The text is its own message."""


class HangError(Exception):
    """The engine is silent past a deadline."""


class CrashError(Exception):
    """The engine has ended."""


class Running:
    """An engine that has started. As a context manager it leaves no process behind.

    ``connector`` has the fields of vLLM's ``KVTransferConfig``, or is None. Raises RefusedError, HangError or
    CrashError if the engine does not start. ``program`` is what the process runs.
    """

    def __init__(
        self,
        model: Path,
        connector: dict[str, Any] | None,
        log: Path,
        environment: Mapping[str, str] | None = None,
        program: Callable[..., None] = board_engine.run,
    ) -> None:
        self.log = log
        self._conversation, theirs = FORKS.Pipe()
        arguments = (theirs, str(log), {**ENVIRONMENT, **(environment or {})}, str(model), connector)
        self._child = FORKS.Process(target=program, args=arguments)
        self._child.start()
        theirs.close()
        try:
            reply = self._receive(START_DEADLINE_S)
            if "refused" in reply:
                raise RefusedError(shorten(reply["refused"]))
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.kill()

    def ask(self, prompts: Sequence[list[int]], answered: Callable[[int], None] = lambda count: None) -> Asked:
        """Asks one prompt after the other. Calls ``answered`` with the number of answers after each."""
        answers: list[Answer] = []
        try:
            self._send(do="ask", prompts=list(prompts))
            for prompt in prompts:
                reply = self._receive(ANSWER_DEADLINE_S)
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
        self._send(do="ask", prompts=list(prompts))

    def settle(self) -> None:
        """Waits until what is to be stored is stored."""
        self._send(do="settle")
        self._receive(SETTLE_DEADLINE_S)

    def stop(self) -> None:
        """Shuts the engine down as a server does, then ends what is left."""
        with contextlib.suppress(HangError, CrashError):
            self._send(do="close")
            self._receive(EXIT_DEADLINE_S)
            self._child.join(EXIT_DEADLINE_S)
        self.kill()

    def kill(self) -> None:
        """Sends SIGKILL to all processes of the engine."""
        assert self._child.pid is not None
        with contextlib.suppress(ProcessLookupError):
            # A child that has only just been forked is not the leader of a session yet.
            if os.getsid(self._child.pid) == self._child.pid:
                os.killpg(self._child.pid, signal.SIGKILL)
        self._child.kill()
        self._child.join()
        self._conversation.close()

    def _send(self, **message: Any) -> None:
        try:
            self._conversation.send(message)
        except OSError as error:
            raise CrashError(self._last_words()) from error

    def _receive(self, deadline_s: float) -> dict[str, Any]:
        try:
            if not self._conversation.poll(deadline_s):
                raise HangError(f"no answer in {deadline_s:.0f} s")
            reply: dict[str, Any] = self._conversation.recv()
        except (EOFError, ConnectionResetError) as error:
            raise CrashError(self._last_words()) from error
        return reply

    def _last_words(self) -> str:
        """Returns the last line of the log that names an error, else how the process ended."""
        self._child.join(EXIT_DEADLINE_S)
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        named = [line for line in lines if "Error" in line or "Exception" in line or "assert" in line]
        return shorten(named[-1].strip() if named else f"exit status {self._child.exitcode}")


def shorten(text: str) -> str:
    """Returns ``text`` in one line of at most MESSAGE_CHARS characters."""
    line = " ".join(text.split())
    return line if len(line) <= MESSAGE_CHARS else line[: MESSAGE_CHARS - 3] + "..."

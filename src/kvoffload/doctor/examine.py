"""Runs all checks in another process, which is ended if one of them hangs."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvoffload.abc import ConfigError
from kvoffload.doctor.findings import Area, Finding, Level, hide
from kvoffload.printable import printable

PROBLEM_STATUS = 1
START_DEADLINE_S = 30.0
"""For the start of the process, and for the files of the options."""
FIX_FOR_FILES = "copy the configuration to a local disk"
MAX_STRETCH = 4
"""A check takes at most this many times its deadline. The time for which it waits for a processor does not count."""
CLEAN_UP_S = 3.0
"""Time for a check that is ended to remove its files and values."""
KILL_WAIT_S = 1.0
"""A process that the kernel cannot end, because it waits for a dead medium, is left behind after this."""
POLL_S = 0.1
MAX_TAIL_BYTES = 600
READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Effort:
    """How long the doctor may take: ``seconds`` per measurement, ``deadline_s`` per check."""

    seconds: float = 1.0
    deadline_s: float = 15.0


@dataclass(slots=True)
class Examination:
    """All findings, in the order of the checks; the place of each tier by its name; the name of the engine."""

    findings: list[Finding] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)
    engine: str = "vLLM"

    def count(self, level: Level) -> int:
        """Returns the number of findings of this level."""
        return sum(finding.level is level for finding in self.findings)

    @property
    def exit_status(self) -> int:
        """1 if something stops or damages a deployment, otherwise 0."""
        return PROBLEM_STATUS if self.count(Level.PROBLEM) else 0


Progress = Callable[[str, int, int], None]
"""Gets the current step, the number of checks that ended, and the number of all checks."""


def examine(
    config: str,
    model: str | None = None,
    effort: Effort = Effort(),
    on_progress: Progress = lambda stage, done, total: None,
) -> Examination:
    """Runs all checks of the configuration in ``config``, JSON or the path of a file, and of ``model``, a config.json
    or its directory.

    Does not hang: a check that does is ended at its deadline, and is the last finding. Raises ConfigError if the
    configuration or the model cannot be read.
    """
    examiner = _Examiner(effort.deadline_s, on_progress)
    reading, writing = os.pipe()
    # Not a temporary file: containers often have no directory that can be written to.
    with os.fdopen(reading, "rb", 0) as answers, os.fdopen(os.memfd_create("output"), "w+b") as output:
        try:
            process = _start(
                {"config": config, "model_config": model, "seconds": effort.seconds}, writing, output.fileno()
            )
        except OSError as error:
            raise ConfigError(f"the process of the checks cannot be started ({error})") from error
        finally:
            os.close(writing)
        try:
            examiner.follow(answers.fileno(), process, output.fileno())
        finally:
            _end(process)
    return examiner.examination


class _Examiner:
    """Collects the findings of the process that runs the checks, and notices when one of them takes too long."""

    def __init__(self, deadline_s: float, on_progress: Progress) -> None:
        self.examination = Examination()
        self._deadline_s = deadline_s
        self._on_progress = on_progress
        self._hidden: list[str] = []
        self._done, self._total = -1, 4
        self._check: Mapping[str, Any] = {"begin": Area.CONFIGURATION, "tier": "", "fix": FIX_FOR_FILES}
        """The check that has begun last."""
        self._stage = ""
        self._allowed_s, self._began = START_DEADLINE_S, time.monotonic()
        """How long the check may take, and when it has begun."""

    def follow(self, answers: int, process: subprocess.Popen[bytes], output: int) -> None:
        """Takes the messages of ``process`` until it has done everything, has ended, or hangs."""
        unread, is_done = b"", False
        while not is_done:
            if select.select([answers], [], [], POLL_S)[0]:
                data = os.read(answers, READ_BYTES)
                if not data:
                    return self._fail(f"its process has ended ({_why_ended(process, output)})")
                *lines, unread = (unread + data).split(b"\n")
                for line in lines:
                    message = json.loads(line)
                    is_done = "done" in message
                    self._take(message)
            self._on_progress(hide(self._stage, self._hidden) or "starts", max(0, self._done), self._total)
            late_s = time.monotonic() - self._began - self._allowed_s
            if late_s > 0 and late_s > min(_waited_s(process.pid), (MAX_STRETCH - 1) * self._allowed_s):
                text = f"no answer within {self._allowed_s:.0f} s{self._doing}; nothing else was checked"
                return self._add("doctor.hung", text, self._check["fix"])

    def _take(self, message: Mapping[str, Any]) -> None:
        if "error" in message:
            raise ConfigError(message["error"])
        if "begin" in message:
            self._check, self._stage = message, ""
            self._done += 1
            self._allowed_s, self._began = self._deadline_s, time.monotonic()
        elif "hidden" in message:
            self._hidden = message["hidden"]
        elif "total" in message:
            self._total = message["total"]
            self.examination.places, self.examination.engine = message["places"], message["engine"]
        elif "stage" in message:
            self._stage = message["stage"]
        elif "failed" in message:
            self._fail(message["failed"])
        elif "finding" in message:
            self._found(message["finding"])

    @property
    def _doing(self) -> str:
        return f" while the doctor {self._stage}" if self._stage else ""

    def _fail(self, failure: str) -> None:
        fix = "look at the medium's own log" if self._check["tier"] else "report this as a bug of kvoffload"
        self._add("doctor.failed", f"the check failed{self._doing}: {failure}", fix)

    def _add(self, id: str, text: str, fix: str) -> None:
        area, tier = self._check["begin"], self._check["tier"]
        self._found({"id": id, "level": Level.PROBLEM, "area": area, "tier": tier, "text": text, "fix": fix})

    def _found(self, finding: Mapping[str, Any]) -> None:
        self.examination.findings.append(Finding.from_json(hide(finding, self._hidden)))


def _start(arguments: Mapping[str, Any], answers: int, output: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "kvoffload.doctor.checks", str(answers)],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        pass_fds=[answers],
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(json.dumps(arguments).encode() + b"\n")
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    """Lets the process clean up, and ends it with all that it has started."""
    with suppress(OSError, subprocess.TimeoutExpired):
        process.terminate()
        process.wait(CLEAN_UP_S)
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_WAIT_S)


def _waited_s(pid: int) -> float:
    """Returns for how long a thread of the process has waited for a processor: that of the thread for which it was
    longest."""
    waits = [0.0]
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        # Threads may end meanwhile, and some sandboxes have no such file.
        with suppress(OSError, ValueError, IndexError):
            waits.append(int(path.read_text().split()[1]) / 1e9)
    return max(waits)


def _why_ended(process: subprocess.Popen[bytes], output: int) -> str:
    """Returns how the process ended, and its last line of output."""
    status = None
    with suppress(subprocess.TimeoutExpired):
        status = process.wait(KILL_WAIT_S)
    size = os.fstat(output).st_size
    lines = os.pread(output, MAX_TAIL_BYTES, max(0, size - MAX_TAIL_BYTES)).decode(errors="replace").split("\n")
    last = next((printable(line.strip()) for line in reversed(lines) if line.strip()), "")
    how = f"killed by signal {-status}" if status is not None and status < 0 else f"exit status {status}"
    return f"{how}{': ' + last if last else ''}"

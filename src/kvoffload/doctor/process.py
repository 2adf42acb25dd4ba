"""Runs checks in another process, which is killed if a check hangs.

A check is a function ``check(arguments, report)``. Its process is reused for the next check unless it was killed, since
starting one takes half a second.
"""

from __future__ import annotations

import enum
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvoffload.doctor.findings import Figure, Finding, Level
from kvoffload.printable import printable
from kvoffload.tiers.remote.child import end_with_parent

CLEAN_UP_S = 1.0
"""Time for a check that is ended to remove its files and values."""
KILL_WAIT_S = 1.0
"""A process that the kernel cannot end, because it waits for a dead medium, is left behind after this."""
POLL_S = 0.1
START_DEADLINE_S = 30.0
"""For the start of the process, which does not count against a check's deadline."""
MAX_STRETCH = 4
"""A check takes at most this many times its deadline. The deadline does not count the longest time for which a thread
waits for a processor."""
MAX_TAIL_BYTES = 600
READ_BYTES = 1 << 16


class Report:
    """The reports of a check, which it makes in its process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._is_whole = False
        self._is_ended = False
        self.tier = ""
        """The tier that the check is about, if any."""

    def end_check(self) -> None:
        """Ends the check by an exception, so that it cleans up; in ``whole``, at the end of the context."""
        self._is_ended = True
        if not self._is_whole:
            sys.exit(1)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Returns a context in which the check does not end, because it could not clean up yet."""
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False
        if self._is_ended:
            sys.exit(1)

    def begin(self) -> None:
        self.tier = ""
        self._send({"begin": True})

    def stage(self, text: str) -> None:
        """Names the next step of the check, such as "connects", for the report of a check that hangs."""
        self._send({"stage": text})

    def found(
        self, id: str, level: Level, text: str, fix: str = "", figures: Mapping[str, Figure] | None = None
    ) -> None:
        """Reports a finding: see Finding."""
        self.finding(Finding(id, level, text, fix, self.tier, figures or {}))

    def finding(self, *findings: Finding) -> None:
        for finding in findings:
            self._send({"finding": finding.to_dict()})

    def fact(self, name: str, value: Any) -> None:
        """Hands plain JSON to later checks."""
        self._send({"fact": [name, value]})

    def end(self, failure: str = "") -> None:
        self._send({"end": failure})

    def _send(self, message: Mapping[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        while line:
            line = line[os.write(self._descriptor, line) :]


class Ending(enum.Enum):
    """The end of a check."""

    DONE = enum.auto()
    HUNG = enum.auto()
    """Its process was killed at the deadline."""
    STARVED = enum.auto()
    """Its process was killed after MAX_STRETCH times the deadline, and a thread had waited for a processor for most of
    it."""
    FAILED = enum.auto()
    """It raised an exception, or its process ended."""


class Outcome:
    """The reports of a check. ``stage``: its last step. ``failure``: the cause of a failure. ``waited_s``: the time for
    which it waited for a processor."""

    def __init__(self) -> None:
        self.ending = Ending.DONE
        self.findings: list[Finding] = []
        self.facts: dict[str, Any] = {}
        self.stage = ""
        self.failure = ""
        self.waited_s = 0.0
        self.has_begun = False


@dataclass(slots=True)
class _Thread:
    """The kernel's counters of a thread, as text, and the time of their last change."""

    counts: str
    since: float
    waited_s: float
    """The time for which it was ready to run without running, and the part before the clock began."""
    before_s: float


class _Clock:
    """Measures the time of the process with the threads in ``tasks``, a folder of /proc, less the longest time for
    which one of its threads waited for a processor."""

    def __init__(self, tasks: Path, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._tasks = tasks
        self._deadline_s = deadline_s
        self._clock = clock
        self._began = clock()
        self._looked = self._began
        self._threads: dict[str, _Thread] = {}
        self._look(self._began)

    def _look(self, now: float) -> None:
        # Threads may end meanwhile, and the process too. Some sandboxes have no schedstat: no wait is known there.
        with suppress(OSError):
            for name in os.listdir(self._tasks):
                with suppress(OSError, ValueError, IndexError):
                    counts = (self._tasks / name / "schedstat").read_text()
                    state = (self._tasks / name / "stat").read_text().rpartition(")")[2].split()[0]
                    counted_s = int(counts.split()[1]) / 1e9
                    before_s = counted_s if now == self._began else 0.0
                    thread = self._threads.setdefault(name, _Thread(counts, now, counted_s, before_s))
                    if thread.counts != counts:
                        # The next wait may have begun right after the last look.
                        thread.counts, thread.since = counts, self._looked
                    # The kernel counts a wait when it ends.
                    thread.waited_s = counted_s + (now - thread.since if state == "R" else 0.0)
        self._looked = now

    def ending(self, outcome: Outcome) -> Ending | None:
        """Returns how the check ends now, None if it goes on. Updates ``outcome.waited_s``."""
        now = self._clock()
        elapsed_s = now - self._began
        self._look(now)
        # Not the sum: threads that wait side by side would hide a thread that hangs.
        waited_s = max((thread.waited_s - thread.before_s for thread in self._threads.values()), default=0.0)
        outcome.waited_s = min(waited_s, elapsed_s)
        if elapsed_s - outcome.waited_s >= self._deadline_s:
            return Ending.HUNG
        return Ending.STARVED if elapsed_s >= MAX_STRETCH * self._deadline_s else None


class CheckProcess:
    """Runs checks one after the other. ``on_progress`` is called several times per second with the current stage."""

    def __init__(self, on_progress: Callable[[str], None] = lambda stage: None) -> None:
        self.on_progress = on_progress
        self._process: subprocess.Popen[bytes] | None = None
        self._answers = -1
        # Not a temporary file: containers often have no directory that can be written to.
        self._output = os.fdopen(os.memfd_create("kvoffload-doctor", os.MFD_CLOEXEC), "w+b")
        self._buffer = b""

    def run(self, check: str, arguments: Mapping[str, Any], deadline_s: float) -> Outcome:
        """Runs the function with the import path ``check``, "package.module:function", for at most ``deadline_s``
        seconds, and up to MAX_STRETCH times as many if it waits for a processor. ``arguments`` are plain JSON."""
        outcome = Outcome()
        try:
            process = self._started()
            request = json.dumps({"check": check, "arguments": arguments}).encode() + b"\n"
            assert process.stdin is not None
            process.stdin.write(request)
            process.stdin.flush()
        except OSError as error:
            outcome.ending, outcome.failure = Ending.FAILED, f"its process cannot be started ({error})"
            self.close()
            return outcome
        tasks = Path(f"/proc/{process.pid}/task")
        has_begun, clock = False, _Clock(tasks, START_DEADLINE_S)
        while True:
            ready, _, _ = select.select([self._answers], [], [], min(POLL_S, deadline_s))
            if ready:
                data = os.read(self._answers, READ_BYTES)
                if not data:
                    outcome.ending, outcome.failure = Ending.FAILED, self._why_ended()
                    break
                if self._take(data, outcome):
                    return outcome
                if outcome.has_begun and not has_begun:
                    has_begun, clock = True, _Clock(tasks, deadline_s)
            self.on_progress(outcome.stage)
            ending = clock.ending(outcome)
            if ending is not None:
                outcome.ending = ending
                break
        self.close()
        return outcome

    def close(self) -> None:
        """Ends the process. May be called at any time; the next check starts another one."""
        process, self._process, self._buffer = self._process, None, b""
        if process is not None:
            # It may still report its cleaning up.
            with suppress(OSError, subprocess.TimeoutExpired):
                process.terminate()
                process.wait(CLEAN_UP_S)
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1
        if process is None:
            return
        with suppress(OSError):
            # Its own session: whatever a store's client has started ends too.
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(KILL_WAIT_S)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._answers, theirs = os.pipe()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "kvoffload.doctor.process", str(theirs)],
                    stdin=subprocess.PIPE,
                    stdout=self._output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs],
                    start_new_session=True,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
            finally:
                os.close(theirs)
        return self._process

    def _take(self, data: bytes, outcome: Outcome) -> bool:
        """Adds messages of the process to ``outcome``. Returns whether the check ended."""
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for message in map(json.loads, lines):
            if "begin" in message:
                outcome.has_begun = True
            elif "stage" in message:
                outcome.stage = message["stage"]
            elif "finding" in message:
                outcome.findings.append(Finding.from_dict(message["finding"]))
            elif "fact" in message:
                name, value = message["fact"]
                outcome.facts[name] = value
            else:
                outcome.failure = message["end"]
                outcome.ending = Ending.FAILED if outcome.failure else Ending.DONE
                return True
        return False

    def _why_ended(self) -> str:
        """Returns how the process ended, and its last line of output."""
        process = self._process
        status = None
        if process is not None:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(KILL_WAIT_S)
        self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, self._output.tell() - MAX_TAIL_BYTES))
        lines = self._output.read().decode(errors="replace").split("\n")
        last = next((printable(line.strip()) for line in reversed(lines) if line.strip()), "")
        how = f"killed by signal {-status}" if status is not None and status < 0 else f"exit status {status}"
        return f"its process has ended ({how}{': ' + last if last else ''})"


def main(descriptor: int) -> None:
    """Runs checks that the parent names, until it closes its end."""
    end_with_parent(os.getppid())
    os.set_inheritable(descriptor, False)
    report = Report(descriptor)
    signal.signal(signal.SIGTERM, lambda number, frame: report.end_check())
    for line in sys.stdin.buffer:
        request = json.loads(line)
        module, _, name = request["check"].partition(":")
        check = getattr(importlib.import_module(module), name)
        report.begin()
        try:
            check(request["arguments"], report)
        except Exception as error:
            report.end(f"{type(error).__name__}: {error}")
        else:
            report.end()


if __name__ == "__main__":
    main(int(sys.argv[1]))
    # Threads of a client may hang, and must not keep the process.
    os._exit(0)

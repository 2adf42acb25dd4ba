"""What the kernel and the logs report about processes."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from demo.process import kill_session

STOP_S = 60.0
"""How long a process may take to end in order before it is killed."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_EXCEPTION = re.compile(r"(?:^|[\s:])((?:\w+\.)*\w*(?:Error|Exception|Refused|Exit)\b: .+)$")
_ERROR = re.compile(r"\bERROR:\s*(.+)$")
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_PREFIX = re.compile(r"^(?:\(\w+ pid=\d+\) )?(?:[A-Z]+ [\d-]+ [\d:.]+ \[[^]]*\] )?")
_FOLLOWING = ("Engine core initialization failed", "EngineDeadError", "EngineCore encountered an issue")
"""Messages that only say that another process has failed."""


def stop(process: subprocess.Popen[bytes], stop_s: float = STOP_S) -> None:
    """Ends a program with SIGTERM, and what is left of its session with SIGKILL past the deadline."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(stop_s)
    kill_session(process)


def _stat(pid: int) -> list[str]:
    """Returns the fields of ``/proc/PID/stat`` from the state on; none if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def cpu_s(pids: Iterable[int]) -> float:
    """Returns the CPU time of the processes so far, in user mode and in the kernel, in seconds."""
    return sum(sum(map(int, fields[11:13])) for pid in pids if (fields := _stat(pid))) / TICKS_PER_S


def pss_bytes(pids: Iterable[int]) -> int:
    """Returns the memory of the processes: their proportional set size, which counts a shared page once."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
            total += 1024 * int(found[1]) if found else 0
    return total


def disk_usage(folder: Path | None) -> int:
    """Returns the bytes that the files below ``folder`` occupy on disk."""
    total = 0
    for directory, _, names in os.walk(folder) if folder is not None else ():
        for name in names:
            with contextlib.suppress(OSError):
                total += 512 * os.lstat(os.path.join(directory, name)).st_blocks
    return total


def wait_for_port(port: int, process: subprocess.Popen[bytes], deadline_s: float) -> bool:
    """Waits until ``process`` listens on ``port``. Returns False if it ends before, or if the deadline passes."""
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        time.sleep(0.1)
    return False


def failure(log: str) -> str:
    """Returns the message with which a program has failed: the last error in its log, or its last line."""
    return last_error(log) or next((line for line in reversed(_lines(log)) if line), "no output")


def last_error(log: str) -> str:
    """Returns the last exception in a log that names a cause, or the last line that is an error; empty without any."""
    lines = _lines(log)
    found = [match[1] for line in lines if (match := _EXCEPTION.search(line))]
    causes = [message for message in found if not any(word in message for word in _FOLLOWING)]
    errors = [match[1] for line in lines if (match := _ERROR.search(line))]
    return next((messages[-1] for messages in (causes, found, errors) if messages), "")


def _lines(log: str) -> list[str]:
    return [_PREFIX.sub("", line).strip() for line in _COLOUR.sub("", log).splitlines()]

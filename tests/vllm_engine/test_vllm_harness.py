"""The processes of these tests: children forked from a warm parent must behave as new processes do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_harness import DEADLINE_S, ENVIRONMENT, Child, Runner, eventually

from demo.process import kill_session

pytestmark = pytest.mark.vllm

REPORTING = """
import json, os, sys
descriptors = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")[:-1]]
threads = len(os.listdir("/proc/self/task"))
report = [dict(os.environ), sys.argv, os.getsid(0), os.getpid(), __name__, "vllm" in sys.modules, threads, descriptors]
print(json.dumps(report))
sys.exit(int(sys.argv[1]))
"""
FOREVER = """
import subprocess, sys, time
group = int(sys.argv[1]) if len(sys.argv) > 1 else None
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], process_group=group)
print(child.pid, flush=True)
time.sleep(3600)
"""
Start = Callable[..., tuple[Child, Path]]


@pytest.fixture
def start(run: Runner, tmp_path: Path) -> Start:
    def start(program: str, *arguments: str, **environment: str) -> tuple[Child, Path]:
        """Starts a child that runs ``program``. Returns it and its log."""
        path, log = tmp_path / f"{len(list(tmp_path.iterdir()))}.py", tmp_path / "log"
        path.write_text(program)
        variables = {**os.environ, **ENVIRONMENT, **environment}
        return run.parent(variables).start([str(path), *arguments], variables, log), log

    return start


def first_line(log: Path) -> str:
    """Returns what the program printed. Libraries of vLLM may print more when a process ends."""
    return log.read_text().splitlines()[0]


@pytest.mark.parametrize("code", [0, 3])
def test_a_child_is_as_a_new_process_but_warm(start: Start, code: int) -> None:
    child, log = start(REPORTING, str(code), MINE=f"value {code}")
    assert child.wait(DEADLINE_S) == code
    environment, argv, session, pid, name, warm, threads, descriptors = json.loads(first_line(log))
    assert environment == {**os.environ, **ENVIRONMENT, "MINE": f"value {code}"}
    assert argv[1:] == [str(code)]
    assert session == pid == child.pid
    assert (name, warm, threads) == ("__main__", True, 1)
    assert descriptors == [os.devnull, str(log), str(log)], "nothing of the parent's is open in it"


def test_a_child_that_fails_says_why(start: Start, run: Runner) -> None:
    child, log = start("import nothing_of_this_name")
    assert child.wait(DEADLINE_S) == 1
    assert "ModuleNotFoundError: No module named 'nothing_of_this_name'" in log.read_text()
    with pytest.raises(AssertionError, match=r"ended with 1:(.|\n)*KeyError: 'no such scenario'"):
        run("no such scenario")


@pytest.mark.parametrize("group", [[], ["0"]], ids=["one process group", "a group of its own"])
def test_a_child_that_is_killed_is_gone_with_its_session(start: Start, group: list[str]) -> None:
    child, log = start(FOREVER, *group)
    assert eventually(lambda: log.exists() and log.read_text().endswith("\n"), DEADLINE_S)
    command = Path(f"/proc/{int(log.read_text())}/cmdline")
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.01)
    assert child.poll() is None
    kill_session(child)
    assert child.poll() == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
    # A process that has ended has no command line, even before its parent has waited for it.
    assert eventually(lambda: not command.exists() or not command.read_bytes())

"""A system's way through ``make peers``, with a stand-in for vLLM and for a service of a system."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest

from benchmarks.peers.load import Load
from benchmarks.peers.measure import measure
from benchmarks.peers.processes import disk_usage, failure, wait_for_port
from benchmarks.peers.report import tables
from benchmarks.peers.systems import AskError, HangError, Service, Settings, StartError, System
from demo.process import free_ports, kill_session, session_pids, start_program

FAKE_VLLM = '''
import pathlib, sys, time, types
__version__ = "0.0"

class Params:
    def __init__(self, max_tokens, **others):
        self.max_tokens = max_tokens

SamplingParams = Params

class LLM:
    """Answers each prompt with its sum. A connector may make it fail, hang, or answer wrongly the second time."""
    def __init__(self, kv_transfer_config, **arguments):
        self.mode = (kv_transfer_config or {}).get("mode")
        if self.mode == "refuse":
            raise RuntimeError("offloading needs a GPU")
        self.llm_engine = self
        self.engine_core = self
        self.queue, self.seen = [], set()

    def add_request(self, name, prompt, params):
        self.queue.append((name, prompt["prompt_token_ids"], params.max_tokens))

    def step(self):
        if self.mode == "hang":
            time.sleep(3600)
        if self.mode == "raise":
            raise ValueError("the store is gone")
        name, prompt, count = self.queue.pop(0)
        again = tuple(prompt) in self.seen
        self.seen.add(tuple(prompt))
        token = sum(prompt) % 1000 + (1 if again and self.mode == "wrong" else 0)
        logprobs = [{token: types.SimpleNamespace(logprob=-3.0 if again and self.mode == "wrong" else -1.0)}] * count
        text = types.SimpleNamespace(token_ids=[token] * count, logprobs=logprobs)
        return [types.SimpleNamespace(request_id=name, outputs=[text], finished=True, num_cached_tokens=0)]

    def shutdown(self):
        pathlib.Path("/proc/self/fd").exists()
'''
LISTEN = "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(3600)"
LOAD = Load({8: [[1] * 8, [2] * 8]}, {8: [[3] * 8]}, [[[[4] * 4, [4] * 6]], [[[5] * 4, [5] * 6]]], slots=2)


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    package = tmp_path / "fake" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(FAKE_VLLM)
    (package / "config.py").write_text("KVTransferConfig = dict\n")
    return package.parent


class Fake(System):
    """A system whose engine is the stand-in."""

    name = "fake"
    title = "Fake"

    def __init__(self, fake: Path, mode: str | None = None, service: list[str] | None = None) -> None:
        self._fake, self._mode, self._service = fake, mode, service

    def services(self, work_dir: Path, host_bytes: int, disk_bytes: int | None) -> list[Service]:
        if self._service is None:
            return []
        (port,) = free_ports(1)
        return [Service("store", [sys.executable, "-c", *self._service, str(port)], port, work_dir, os.environ)]

    def settings(self, work_dir: Path, host_bytes: int, disk_bytes: int | None) -> Settings:
        if disk_bytes is not None:
            (self.disk_dir(work_dir) / "block").write_bytes(b"x" * 5000)
        path = os.pathsep.join([str(self._fake), str(Path(__file__).parents[2])])
        return Settings({"mode": self._mode}, {"PYTHONPATH": path})


def test_a_system_is_started_asked_and_stopped(fake: Path, tmp_path: Path) -> None:
    running = Fake(fake, service=[LISTEN]).start(tmp_path / "work", tmp_path, 1)
    pids = running.processes()
    assert len(pids) >= 2
    answers = running.ask([[1, 2], [3, 4]], max_tokens=3)
    assert [a.tokens for a in answers] == [[3] * 3, [7] * 3]
    turns, _ = running.converse([[[1], [1, 2]], [[5]]], slots=2, max_tokens=1)
    assert [a.tokens for a in turns] == [[1], [3], [5]]
    assert running.stop()
    assert running.processes() == []


def test_the_engines_own_message_is_reported(fake: Path, tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"^RuntimeError: offloading needs a GPU$"):
        Fake(fake, "refuse").start(tmp_path / "work", tmp_path, 1)
    running = Fake(fake, "raise").start(tmp_path / "work", tmp_path, 1)
    with pytest.raises(AskError, match=r"^ValueError: the store is gone$"):
        running.ask([[1]])
    running.kill()


def test_a_service_that_ends_is_reported_and_no_engine_starts(fake: Path, tmp_path: Path) -> None:
    system = Fake(fake, service=["raise OSError('port taken')"])
    with pytest.raises(StartError, match=r"^store: OSError: port taken$"):
        system.start(tmp_path / "work", tmp_path, 1)
    assert not (tmp_path / "work" / "engine.json").exists()


def test_an_engine_that_does_not_answer_hangs_and_can_be_killed(fake: Path, tmp_path: Path) -> None:
    running = Fake(fake, "hang").start(tmp_path / "work", tmp_path, 1)
    with pytest.raises(HangError):
        running.ask([[1]], deadline_s=0.2)
    assert running.alive()
    running.kill()
    assert not running.alive()


def test_a_killed_engine_is_an_error_not_a_wait(fake: Path, tmp_path: Path) -> None:
    running = Fake(fake).start(tmp_path / "work", tmp_path, 1)
    for pid in running.processes():
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(AskError):
        running.ask([[1]])
    running.kill()


def test_every_figure_of_a_system_is_measured(fake: Path, tmp_path: Path) -> None:
    steps: list[str] = []
    reference = measure(Fake(fake), LOAD, tmp_path / "a", tmp_path, 16, steps.append)
    assert reference.problem is None
    assert reference.disk_problem is None
    assert len(reference.times[8].first) == len(reference.times[8].again) == 2
    assert len(reference.times[8].device) == LOAD.repeats - 1
    assert [(mixed.prompt_tokens, mixed.output_tokens) for mixed in reference.mixed] == [(10, 2 * 32)] * 2
    assert reference.memory_end > 0
    assert reference.disk_bytes == 8192
    assert steps[0] == "start"
    assert "mixed load, round 2" in steps


def test_wrong_answers_are_counted(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.measure.settle", lambda *_: None)

    def step(what: str) -> None:
        pass

    reference = measure(Fake(fake), LOAD, tmp_path / "a", tmp_path, 16, step)
    reference.name = "recompute"
    for mode, expected in (None, "0"), ("wrong", "2"):
        other = measure(Fake(fake, mode), LOAD, tmp_path / str(mode), tmp_path, 16, step)
        (rows,) = (rows for title, _, rows in tables([reference, other]) if "Answers" in title)
        assert rows[0][-1] == expected


def test_what_cannot_be_started_is_a_result(fake: Path, tmp_path: Path) -> None:
    result = measure(Fake(fake, "refuse"), LOAD, tmp_path / "a", tmp_path, 16, lambda what: None)
    assert result.problem == "does not start: RuntimeError: offloading needs a GPU"


def test_the_cause_is_found_in_vllms_log() -> None:
    log = textwrap.dedent("""
        (EngineCore pid=7) ERROR 11-22 06:21:34 [core.py:1044] Traceback (most recent call last):
        (EngineCore pid=7) ERROR 11-22 06:21:34 [core.py:1044] Exception: only supported on GPUs
        (APIServer pid=3) RuntimeError: Engine core initialization failed. See root cause above.
    """)
    assert failure(log) == "Exception: only supported on GPUs"
    assert failure("starting\nlibrdmacm.so.1: cannot open\n") == "librdmacm.so.1: cannot open"
    assert failure("") == "no output"
    assert failure("\x1b[31m[06:25] Store ERROR:\x1b[0m no handler\nwaiting\n") == "no handler"


def test_a_kill_takes_the_children_too(tmp_path: Path) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(3600)'])"
    process = start_program([sys.executable, "-c", code], tmp_path / "log")
    deadline = time.monotonic() + 60
    while len(session_pids(process.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(session_pids(process.pid)) == 2
    kill_session(process)
    assert session_pids(process.pid) == []


def test_a_port_is_awaited_no_longer_than_its_process_lives(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    process = start_program([sys.executable, "-c", "pass"], tmp_path / "log")
    assert not wait_for_port(port, process, deadline_s=600.0)
    assert process.poll() is not None


def test_disk_usage_counts_what_is_allocated(tmp_path: Path) -> None:
    assert disk_usage(None) == 0
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 20)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "full").write_bytes(b"x" * 4096)
    assert 4096 <= disk_usage(tmp_path) < 1 << 20


def test_settings_of_real_systems_have_the_budgets(tmp_path: Path) -> None:
    from benchmarks.peers.systems import VLLM, KVOffload, Recompute, VLLMAsIs

    assert Recompute().settings(tmp_path, 1000, None).connector is None
    options = json.dumps(KVOffload().settings(tmp_path, 1000, 2000).connector)
    assert '"host_bytes": 1000' in options
    assert '"disk_bytes": 2000' in options
    for system in VLLM(), VLLMAsIs():
        assert '"cpu_bytes_to_use": 1000' in json.dumps(system.settings(tmp_path, 1000, None).connector)
    with pytest.raises(StartError, match="no blocks on disk"):
        Recompute().start(tmp_path, tmp_path, 1, disk_bytes=1)

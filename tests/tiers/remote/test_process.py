"""The process of a store's client, on a store in a folder: it is killed, hangs, crashes, and ends with the engine."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.abc import TierError
from kvoffload.abc.tier import HIT, MISS
from kvoffload.tiers.remote.child import SMALL_READ_BLOCKS, TRANSFER_NICENESS
from kvoffload.tiers.remote.known import PRESENT_TTL_S
from kvoffload.tiers.remote.link import LOOKUP_DEADLINE_S, MAX_PAUSE_S, TRANSFER_DEADLINE_S
from kvoffload.tiers.remote.messages import Op, Setup, StoreRequest
from kvoffload.tiers.remote.process import starter
from tests.tiers.remote.folder_store import FolderStore
from tests.tiers.remote.rig import FINGERPRINT, Server, eventually, store_in

KEYS = [bytes([i]) * 36 for i in range(16)]


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return store_in(tmp_path / "store")


@pytest.fixture
def server(store: FolderStore) -> Server:
    """A server whose client registers memory. Others that a test makes move records and slots one by one."""
    store.switch("rows")
    server = Server(store)
    server.connect()
    return server


def exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def restart(server: Server) -> None:
    server.until(lambda: not server.tier.stats().is_connected, "the tier never noticed that the process has ended")
    server.clock.shift += MAX_PAUSE_S
    server.connect()
    server.clock.shift += PRESENT_TTL_S


def test_two_servers_share_blocks_of_several_ranks(store: FolderStore, server: Server) -> None:
    server.works_again(KEYS[:4])
    store.switch("rows", False)
    other = Server(store)
    other.connect()
    assert other.states(KEYS[:5]) == [HIT] * 4 + [MISS]
    assert other.reads_all(KEYS[:4])
    assert all(result.nbytes == 0 for result in other.write(KEYS[:4]).values())
    other.works_again(KEYS[4:6])
    server.works_again(KEYS[4:6])


def test_starting_the_process_does_not_wait(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    may_start, begun, real = threading.Event(), threading.Event(), subprocess.Popen

    def start_late(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        begun.set()
        assert may_start.wait(10)
        return real(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", start_late)
    server = Server(store)
    try:
        assert begun.wait(10)
        assert server.tier.is_starting
        assert server.process.pid is None
        # A process that is killed before it exists ends as soon as it does.
        server.process.kill()
        assert server.tier.poll() == []
        assert not server.process.has_ended
        may_start.set()
        server.until(lambda: server.process.has_ended, "the process was never ended")
        restart(server)
        server.works_again(KEYS[:2])
    finally:
        may_start.set()
        server.close()


def test_a_process_that_cannot_be_started_is_tried_again(
    store: FolderStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    server = Server(store)
    server.until(lambda: not server.tier.is_starting, "it was never noticed")
    assert "the store's client cannot be started" in caplog.text
    monkeypatch.undo()
    restart(server)
    server.works_again(KEYS[:2])


def test_a_process_that_is_killed_is_replaced(server: Server) -> None:
    server.works_again(KEYS[:2])
    server.store.switch("hang-get")
    taken = server.tier.read(KEYS[:2], np.array([20, 21]))
    assert server.process.pid is not None
    os.kill(server.process.pid, signal.SIGKILL)
    assert {result.error for result in server.finish(taken).values()} == {TierError.IO}
    server.store.switch("hang-get", False)
    restart(server)
    server.works_again(KEYS[:3])


@pytest.mark.parametrize(("fault", "deadline_s"), [("hang", LOOKUP_DEADLINE_S), ("hang-get", TRANSFER_DEADLINE_S)])
def test_a_call_that_hangs_ends_at_its_deadline(server: Server, fault: str, deadline_s: float) -> None:
    server.works_again(KEYS[:2])
    first = server.process.pid
    assert first is not None
    server.store.switch(fault)
    taken = server.tier.read(KEYS[:2], np.array([20, 21]))
    server.tier.contains(KEYS[4:6])
    server.clock.shift += deadline_s
    assert {result.error for result in server.finish(taken).values()} == {TierError.IO}
    # Its slots are free again, because nothing can write to them any more.
    assert not exists(first)
    server.store.switch(fault, False)
    restart(server)
    server.works_again(KEYS[:3])


def test_lookups_do_not_queue_behind_transfers(server: Server) -> None:
    server.works_again(KEYS[:2])
    server.store.switch("hang-get")
    server.store.switch("hang-put")
    reads = [key for key in KEYS[:2] for key in server.tier.read([key], np.array([20]))]
    server.fill(KEYS[:8])
    writes = [key for key in KEYS[2:8] for key in server.tier.write([key], np.array([KEYS.index(key)]))]
    assert server.states(KEYS[8:10]) == [MISS] * 2
    server.store.switch("hang-put", False)
    assert all(result.ok for result in server.finish(writes).values()), "writes queued behind reads"
    server.store.switch("hang-get", False)
    assert all(result.ok for result in server.finish(reads).values())


def test_a_store_that_cannot_be_reached_at_start_is_reached_later(
    store: FolderStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.switch("unreachable")
    with caplog.at_level(logging.WARNING):
        server = Server(store)
        server.until(lambda: "the store is unreachable on purpose" in caplog.text, "no warning says so")
    assert server.states(KEYS[:2]) == [MISS] * 2
    store.switch("unreachable", False)
    server.clock.shift += MAX_PAUSE_S
    server.connect()
    server.works_again(KEYS[:2])


def test_what_a_store_says_at_the_start_reaches_the_log_printable_and_cut(caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup("tests.tiers.remote.folder_store:refuse", {}, (), 0, FINGERPRINT, "kv")
    process = starter(setup, "rude")()
    eventually(lambda: process.has_ended)
    process.poll()
    (said,) = [record.getMessage() for record in caplog.records if "rude" in record.getMessage()]
    assert "go away" in said
    assert said.isprintable()
    assert len(said) < 3000


def test_a_client_that_writes_much_output_does_not_block(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.store.switch("chatter")
    with caplog.at_level(logging.WARNING):
        for key in KEYS[:8]:
            server.works_again([key])
    said = [record.getMessage() for record in caplog.records if "output of the store's client" in record.getMessage()]
    assert len(said) == 1
    assert len(said[0]) < 3000


def test_close_ends_the_process_and_what_it_does(server: Server) -> None:
    server.works_again(KEYS[:2])
    pid = server.process.pid
    assert pid is not None
    server.store.switch("hang-get")
    server.tier.read(KEYS[:2], np.array([20, 21]))
    server.tier.close()
    assert not exists(pid)
    assert {result.error for result in server.tier.poll()} == {TierError.IO}


def test_a_process_that_does_not_hang_ends_by_itself(server: Server) -> None:
    server.works_again(KEYS[:2])
    process = server.process._process
    assert process is not None
    server.tier.close()
    assert process.returncode == 0


def test_what_the_process_does_not_take_at_once_is_sent_later(server: Server) -> None:
    pid, answered = server.process.pid, set[int]()
    assert pid is not None
    requests = [StoreRequest(1000 + i, Op.LOOKUP, KEYS * 64, []) for i in range(32)]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert all(map(server.process.submit, requests))
    finally:
        os.kill(pid, signal.SIGCONT)

    def has_answered() -> bool:
        answered.update(response.number for response in server.process.poll())
        return len(answered) == len(requests)

    eventually(has_answered)


ENGINE = """
import os, sys, time
from pathlib import Path
from tests.tiers.remote.rig import Server, store_in
server = Server(store_in(Path(sys.argv[1])))
server.connect()
if os.fork() == 0:
    time.sleep(600)  # It has inherited the socket.
print(server.process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_process_ends_with_the_engine_however_that_ends(tmp_path: Path, number: int) -> None:
    path = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", ENGINE, str(tmp_path / "store")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}, start_new_session=True
    ) as engine:
        assert engine.stdout is not None
        pid = int(engine.stdout.readline())
        assert exists(pid)
        # A signal of the terminal reaches the engine's group, and the process is not in it.
        assert os.getpgid(pid) != os.getpgid(engine.pid)
        engine.send_signal(number)
        engine.wait()
        eventually(lambda: not exists(pid))
        os.killpg(engine.pid, signal.SIGKILL)


def test_only_threads_that_move_many_blocks_run_at_lower_priority(server: Server) -> None:
    def niceness(thread: Path) -> int:
        return int((thread / "stat").read_text().rpartition(")")[2].split()[16])

    mine = os.getpriority(os.PRIO_PROCESS, 0)
    tasks = Path(f"/proc/{server.process.pid}/task")
    assert server.states(KEYS[:1]) == [MISS]
    assert {niceness(thread) for thread in tasks.iterdir()} == {mine}
    server.works_again(KEYS[: SMALL_READ_BLOCKS + 1])
    assert [niceness(thread) for thread in tasks.iterdir() if niceness(thread) != mine] == 2 * [
        min(19, mine + TRANSFER_NICENESS)
    ], "one thread has written, and one has read"
    server.works_again(KEYS[:1])
    assert niceness(tasks / str(server.process.pid)) == mine


def test_a_forked_copy_of_the_engine_does_not_kill_the_process(server: Server) -> None:
    server.works_again(KEYS[:2])
    child = os.fork()
    if child == 0:
        server.process.kill()
        os._exit(0)
    os.waitpid(child, 0)
    server.works_again(KEYS[:2])

"""Records that leave their process: over sockets of real child processes, through logs as vLLM writes them, and from
faulty or hostile sources."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import re
import select
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvoffload.abc import MissReason
from kvoffload.observe import server as records
from kvoffload.observe.records import RECORD_RING_SIZE, RequestRecord
from kvoffload.observe.server import (
    LOG_MARKER,
    RecordsError,
    RecordServer,
    RunningServer,
    read_log,
    read_records,
    running_servers,
)

TIMEOUT_S = 60.0

SERVER = """
import os, sys, threading, itertools
from collections import deque
from kvoffload.observe import server as records
from kvoffload.observe.records import RequestRecord
from kvoffload.observe.server import RecordServer

# On a busy machine an answer may take long.
records.CLIENT_DEADLINE_S = 600.0
name, count, appending = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "appending"
ring = deque(maxlen=4096)

def append(numbers):
    for i in numbers:
        ring.append(RequestRecord(float(i), f"r{i}", 100, 16, 64))

append(range(count))
server = RecordServer(lambda: ring, name)
if appending:
    sys.setswitchinterval(1e-6)
    threading.Thread(target=append, args=[itertools.count(count)], daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""

Start = Callable[..., RunningServer]


@pytest.fixture(autouse=True)
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's runtime directory: its path is short, as the paths of sockets must be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        monkeypatch.setenv("XDG_RUNTIME_DIR", path)
        yield Path(path)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine an answer may take long."""
    monkeypatch.setattr(records, "CLIENT_DEADLINE_S", TIMEOUT_S)


def record(i: int) -> RequestRecord:
    return RequestRecord(float(i), f"r{i}", 100, 16, 64)


@contextlib.contextmanager
def child(name: str, count: int, appending: bool) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SERVER, name, str(count), "appending" if appending else ""]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def start() -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def run(name: str = "engine", count: int = 3, appending: bool = False) -> RunningServer:
            process = stack.enter_context(child(name, count, appending))
            return at(process.pid, name)

        yield run


@pytest.fixture
def serve() -> Iterator[Callable[..., RecordServer]]:
    """Starts a server in this process."""
    with contextlib.ExitStack() as stack:

        def run(
            source: Callable[[], Sequence[RequestRecord]], name: str = "here", totals: Callable[[], Any] = tuple
        ) -> RecordServer:
            server = RecordServer(source, name, totals)
            stack.callback(server.close)
            return server

        yield run


def at(pid: int, name: str) -> RunningServer:
    return RunningServer(pid, name, Path(os.environ["XDG_RUNTIME_DIR"]) / "kvoffload")


def here(name: str = "here") -> RunningServer:
    return at(os.getpid(), name)


def path_of(server: RunningServer) -> Path:
    return server.directory / f"{server.pid}-{server.name}"


def connect(server: RunningServer) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(TIMEOUT_S)
    sock.connect(os.fspath(path_of(server)))
    return sock


@contextlib.contextmanager
def listening(name: str) -> Iterator[socket.socket]:
    """A socket of this process that is none of ours."""
    path = path_of(here(name))
    path.parent.mkdir(0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(os.fspath(path))
        listener.listen(0)
        yield listener


def read_all(sock: socket.socket) -> bytes:
    return b"".join(iter(lambda: sock.recv(1 << 16), b""))


# The server.


def test_records_of_child_processes_are_read(start: Start) -> None:
    servers = {start(count=200): 200, start("a.b:c-d_e", count=0): 0}
    assert servers.keys() <= set(running_servers())
    for server, count in servers.items():
        for _ in range(2):
            reading = read_records(server, TIMEOUT_S)
            assert reading.records == [record(i) for i in range(count)]
            assert (reading.malformed, reading.faults) == (0, [])


def test_the_metrics_of_all_tenants_and_tiers_arrive(serve: Callable[..., RecordServer]) -> None:
    labels = [f"{f'tenant-{i}'.ljust(63, 'x')},{f'tier-{j}'.ljust(63, 'x')}" for i in range(33) for j in range(32)]
    totals = {f"tenant_{name}:{label}": 1.2345678901234567e15 for name in ("blocks", "moved_bytes") for label in labels}
    serve(lambda: [record(1)], totals=lambda: [*totals.items(), ("asked_tokens", 7.0), ("tier_paused:read,x", 1.0)])
    reading = read_records(here(), TIMEOUT_S)
    assert (reading.records, reading.malformed) == ([record(1)], 0)
    assert reading.totals == totals | {"tier_paused:read,x": 1.0}


def test_a_killed_server_is_not_found_and_the_next_one_removes_its_socket(
    serve: Callable[..., RecordServer], start: Start
) -> None:
    with child("engine", 3, False) as process:
        server = at(process.pid, "engine")
        connection = connect(server)
        assert server in running_servers()
        process.kill()
        process.wait()
        assert server not in running_servers()
        with pytest.raises(RecordsError, match="does not answer"):
            read_records(server, TIMEOUT_S)
        connection.close()
    running = start()
    # As of a process with the id of this one, as the first of every container has.
    with listening("here"):
        pass
    kept = server.directory / "notes"
    kept.touch()
    serve(lambda: [record(1)])
    assert set(server.directory.iterdir()) == {kept, path_of(running), path_of(here())}
    assert read_records(here(), TIMEOUT_S).records == [record(1)]


def test_records_read_during_appends_are_consecutive(start: Start) -> None:
    server = start(count=RECORD_RING_SIZE, appending=True)
    last = 0.0
    for _ in range(4):
        reading = read_records(server, TIMEOUT_S)
        assert reading.malformed == 0
        assert len(reading.records) == RECORD_RING_SIZE
        first = int(reading.records[0].time)
        assert reading.records == [record(i) for i in range(first, first + RECORD_RING_SIZE)]
        assert reading.records[-1].time >= last
        last = reading.records[-1].time


class Mutated(deque[RequestRecord]):
    """A deque that seems to change during its next ``failures`` iterations."""

    failures = 0

    def __iter__(self) -> Iterator[RequestRecord]:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("deque mutated during iteration")
        return super().__iter__()


def test_a_disturbed_copy_is_retried_given_up_eventually_and_the_server_goes_on(
    serve: Callable[..., RecordServer],
) -> None:
    ring = Mutated([record(1), record(2)])
    serve(lambda: ring)
    ring.failures = 10**6
    with pytest.raises(RecordsError, match="without an answer"):
        read_records(here(), TIMEOUT_S)
    assert ring.failures > 0
    ring.failures = 5
    assert read_records(here(), TIMEOUT_S).records == [record(1), record(2)]
    assert ring.failures == 0


def test_a_client_that_never_reads_is_disconnected_after_the_deadline(
    serve: Callable[..., RecordServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "CLIENT_DEADLINE_S", 0.3)
    many = [record(i) for i in range(20_000)]
    serve(lambda: many)
    with connect(here()) as deaf:
        gone = select.poll()
        gone.register(deaf, 0)
        assert gone.poll(TIMEOUT_S * 1000) == [(deaf.fileno(), select.POLLHUP)]
        monkeypatch.setattr(records, "CLIENT_DEADLINE_S", TIMEOUT_S)
        assert read_records(here(), TIMEOUT_S).records[0] == record(0)
        left = read_all(deaf)
    assert 0 < left.count(b"\n") < len(many), "it got what the socket buffers, and no more"


def test_close_ends_the_thread_even_while_a_client_does_not_read(
    serve: Callable[..., RecordServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "CLIENT_DEADLINE_S", 300.0)
    server = serve(lambda: [record(i) for i in range(20_000)])
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "kvoffload-records"]
    assert thread.daemon
    with connect(here()) as deaf:
        assert deaf.recv(1) == b"{"
        server.close()
        assert not thread.is_alive()
        read_all(deaf)
    server.close()
    assert here() not in running_servers()
    assert not path_of(here()).exists()


def test_a_name_in_use_is_only_a_warning(serve: Callable[..., RecordServer], caplog: pytest.LogCaptureFixture) -> None:
    first = serve(lambda: [record(1)])
    assert not caplog.records
    second = serve(lambda: [record(2)])
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING
    assert "kvoffload explain" in warning.getMessage()
    assert str(path_of(here())) in warning.getMessage()
    second.close()
    second.close()
    assert read_records(here(), TIMEOUT_S).records == [record(1)], "the first goes on"
    first.close()
    serve(lambda: [record(3)])
    assert read_records(here(), TIMEOUT_S).records == [record(3)], "the name can be used again"


@pytest.mark.parametrize("is_set", [False, True])
def test_without_a_runtime_directory_sockets_are_in_tmp(
    serve: Callable[..., RecordServer], monkeypatch: pytest.MonkeyPatch, runtime_dir: Path, is_set: bool
) -> None:
    """Also with one in which the path would be longer than the kernel takes."""
    if is_set:
        long = runtime_dir / ("x" * 100)
        long.mkdir()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    else:
        monkeypatch.delenv("XDG_RUNTIME_DIR")
    serve(lambda: [record(1)], "y" * 64)
    server = RunningServer(os.getpid(), "y" * 64, Path(f"/tmp/kvoffload-{os.geteuid()}"))
    assert stat.S_IMODE(server.directory.stat().st_mode) == 0o700
    assert server in running_servers()
    assert read_records(server, TIMEOUT_S).records == [record(1)]


@contextlib.contextmanager
def another_user(act: Callable[[], Any]) -> Iterator[tuple[int, Any]]:
    """Runs ``act`` in a child process of another user, which ends with the context. Gives its id and the result."""
    end, result = os.pipe()
    ending, end_now = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(end_now)
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            done = act()
            os.write(result, json.dumps(done if isinstance(done, list) else None).encode())
            os.close(result)
            os.read(ending, 1)
        finally:
            os._exit(0)
    try:
        os.close(result)
        with open(end, "rb") as pipe:
            yield pid, json.loads(pipe.read())
    finally:
        os.close(end_now)
        os.close(ending)
        os.waitpid(pid, 0)


def problem(server: RunningServer, of_any_user: bool = False) -> str:
    with pytest.raises(RecordsError) as raised:
        read_records(server, TIMEOUT_S, of_any_user)
    return str(raised.value)


only_as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@only_as_root
def test_another_user_is_refused_and_the_error_names_the_owner(start: Start, runtime_dir: Path) -> None:
    """Nor can another user connect: nobody may enter the directory."""
    runtime_dir.chmod(0o755)
    server = start()

    def act() -> list[Any]:
        try:
            connect(server).close()
            connected = True
        except PermissionError:
            connected = False
        return [server in running_servers(), connected, problem(server, True)]

    with another_user(act) as (_, (found, connected, message)):
        assert found
        assert not connected
        assert f"belongs to user 0; run this command as that user, or as root with --pid {server.pid}" in message


@only_as_root
def test_root_reads_what_another_user_serves_only_if_it_asks_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with another_user(lambda: RecordServer(lambda: [record(1)], "fake")) as (pid, _):
        fake = RunningServer(pid, "fake", Path("/tmp/kvoffload-65534"))
        assert fake in running_servers()
        assert "(fake) was ignored: it belongs to user 65534; run this command as" in problem(fake)
        assert read_records(fake, TIMEOUT_S, of_any_user=True).records == [record(1)]
        # A socket that the other user has named like one of another process.
        path_of(fake).rename(fake.directory / f"{os.getpid()}-fake")
        found = RunningServer(os.getpid(), "fake", fake.directory)
        assert f"process {pid} of user 65534 answers in its place" in problem(found, True)
        (fake.directory / f"{os.getpid()}-fake").unlink()


@only_as_root
def test_a_server_that_another_user_has_made_a_directory_for_says_so(
    serve: Callable[..., RecordServer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    runtime_dir: Path,
) -> None:
    """Everybody may make directories in /tmp."""
    mine = runtime_dir / "tmp"
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: mine.mkdir(0o700), "belongs to user 65534: remove it"),
        (lambda: mine.mkdir(0o755), f"chmod 700 {mine}"),
        (lambda: mine.symlink_to(runtime_dir), "is no directory: remove it"),
        (lambda: mine.touch(), "is no directory: remove it"),
    ]
    for make, fix in cases:
        make()
        os.chown(mine, 65534, 65534, follow_symlinks=False)
        monkeypatch.setattr(records, "_own_directory", lambda name: records._private(mine))
        caplog.clear()
        serve(lambda: [record(1)])
        (warning,) = caplog.records
        assert fix in warning.getMessage()
        assert here() not in running_servers()
        mine.rmdir() if mine.is_dir() and not mine.is_symlink() else mine.unlink()


@only_as_root
def test_the_runtime_directory_of_another_user_is_not_used(
    serve: Callable[..., RecordServer], runtime_dir: Path
) -> None:
    """As of the session from which a server was started with su."""
    os.chown(runtime_dir, 65534, 65534)
    serve(lambda: [record(1)])
    assert RunningServer(os.getpid(), "here", Path(f"/tmp/kvoffload-{os.geteuid()}")) in running_servers()
    assert not list(runtime_dir.iterdir())


def test_connecting_to_a_full_queue_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if many wanted the records at once."""
    pauses: list[float] = []
    with listening("busy") as busy, contextlib.ExitStack() as strangers:
        with contextlib.suppress(BlockingIOError):
            while True:
                stranger = strangers.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                stranger.setblocking(False)
                stranger.connect(os.fspath(path_of(here("busy"))))

        def sleep(seconds: float) -> None:
            pauses.append(seconds)
            if len(pauses) == 3:
                busy.accept()[0].close()

        monkeypatch.setattr(time, "sleep", sleep)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            records.connect(sock, os.fspath(path_of(here("busy"))), time.monotonic() + TIMEOUT_S)
        assert len(pauses) == 3


# The client, and servers that are not ours.


@pytest.fixture
def answer() -> Iterator[Callable[[bytes], RunningServer]]:
    """Starts a listener that answers one client with the given bytes."""
    with contextlib.ExitStack() as stack:

        def run(content: bytes) -> RunningServer:
            listener = stack.enter_context(listening("fake"))

            def serve_one() -> None:
                client, _ = listener.accept()
                with client, contextlib.suppress(OSError):
                    client.sendall(content)

            thread = threading.Thread(target=serve_one)
            thread.start()
            stack.callback(thread.join)
            return here("fake")

        yield run


def lines(*values: Any) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def header(count: Any) -> dict[str, Any]:
    return {"kvoffload_records": 2, "count": count, "totals_count": 0}


Answer = Callable[[bytes], RunningServer]


@pytest.mark.parametrize(
    "content",
    [b"\n", b"hello\n", b"[1]\n", b"\x80\x04K\x01.\n", b"[" * 100_000, lines({"kvoffload_records": 1, "count": 0})],
)
def test_another_format_is_named(answer: Answer, content: bytes) -> None:
    with pytest.raises(RecordsError, match="another format"):
        read_records(answer(content), TIMEOUT_S)


def test_malformed_records_are_counted_and_described(answer: Answer) -> None:
    good = record(1).to_dict()
    bad = [{**good, "tokens_asked": -1}, [], {}, "x" * 100_000, {**good, "reason": "\x1b[2J"}, 1, 2]
    reading = read_records(answer(lines(header(8), *bad[:3], good, *bad[3:])), TIMEOUT_S)
    assert reading.records == [record(1)]
    assert reading.malformed == 7
    assert len(reading.faults) == records.MAX_FAULTS_LISTED
    assert "line 2: tokens_asked=-1" in reading.faults[0]
    assert all(fault.isprintable() and len(fault) < 200 for fault in reading.faults)


@pytest.mark.parametrize("announced", [{"count": 3, "totals_count": 0}, {"count": 1, "totals_count": 2}])
def test_an_incomplete_answer_is_an_error(answer: Answer, announced: dict[str, int]) -> None:
    sent = lines({**header(0), **announced}, record(1).to_dict(), {})
    with pytest.raises(RecordsError, match="stopped after 2 of 3 records and metrics"):
        read_records(answer(sent), TIMEOUT_S)


@pytest.mark.parametrize("wrong", [[], {"a": "1"}, {"a": -1}, {"a": math.nan}, {"a": {}}, {"a": None}])
def test_malformed_metrics_are_counted(answer: Answer, wrong: object) -> None:
    sent = lines({**header(1), "totals_count": 2}, record(1).to_dict(), wrong, {"b": 1.5})
    reading = read_records(answer(sent), TIMEOUT_S)
    assert (reading.records, reading.malformed) == ([record(1)], 1)
    assert reading.totals == {"b": 1.5}


def test_an_endless_answer_is_cut_off(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_ANSWER_BYTES", 1 << 20)
    with pytest.raises(RecordsError, match="more than 1,048,576 bytes"):
        read_records(answer(b"x" * (8 << 20)), TIMEOUT_S)


def test_an_answer_of_empty_lines_is_not_kept(answer: Answer) -> None:
    """Millions of lines would take a hundred times the memory of their bytes."""
    tracemalloc.start()
    try:
        with contextlib.suppress(RecordsError):
            assert read_records(answer(lines(header(3)) + b"\n" * (4 << 20)), TIMEOUT_S).records == []
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


def test_a_silent_server_is_given_up_after_the_timeout() -> None:
    with listening("mute"), pytest.raises(RecordsError, match=r"\(mute\) does not answer: timed out"):
        read_records(here("mute"), 0.2)


def test_malformed_socket_names_are_not_servers(monkeypatch: pytest.MonkeyPatch, runtime_dir: Path) -> None:
    pid, home = os.getpid(), runtime_dir / "kvoffload"
    names = [f"{pid}-", f"{pid}-a b", f"x{pid}-a", f"{pid}-\x1b[2J", f"{pid}/{pid}-a"]
    hostile = f"{pid}-a\nx x x zzz x x x /kvoffload/{pid}-b\x1b[2J"
    before = set(running_servers())
    with contextlib.ExitStack() as stack:
        for name in [*names, hostile]:
            (home / name).parent.mkdir(0o700, parents=True, exist_ok=True)
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sock.bind(f"{home}/{name}")
            sock.listen()
        bound = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        bound.bind(f"{home}/{pid}-does-not-listen")
        # The part of a name before a line break looks like one of ours, but nothing answers there.
        assert {server for server in running_servers() if server.pid == pid} - before == {here("a")}
    monkeypatch.setattr(records, "PROC_NET_UNIX", runtime_dir / "none")
    assert running_servers() == []


# Logs.

PLAIN = "(EngineCore_DP0 pid=41) DEBUG 11-20 10:00:00 [scheduler.py:585] "
COLOURED = "\x1b[0;36m(EngineCore_DP0 pid=41)\x1b[0;0m DEBUG \x1b[90m11-20 10:00:00\x1b[0m [scheduler.py:585] "


def logged(value: RequestRecord, prefix: str = PLAIN, end: str = "\n") -> str:
    return prefix + LOG_MARKER + json.dumps(value.to_dict()) + end


def read_text(text: str) -> records.Reading:
    return read_log(io.BytesIO(text.encode()), "server.log")


def test_records_are_found_in_a_log() -> None:
    evicted = RequestRecord(2.5, "r2", 100, 16, 0, "ab" * 36, MissReason.EVICTED, 12.34)
    text = (
        "INFO 11-20 10:00:00 kvoffload: host pool of 8 GiB = 65,536 tokens\n\n"
        + logged(record(1))
        + "DEBUG kvoffload: request r1: 100 tokens asked, 16 on device, 64 in host\n"
        + '{"level": "info", "message": "another program\'s"}\n'
        + logged(evicted, COLOURED, "\x1b[0m\r\n")
        + logged(record(3), end="")
    )
    reading = read_text(text)
    assert reading.records == [record(1), evicted, record(3)]
    assert (reading.malformed, reading.faults) == (0, [])


def test_a_request_cannot_forge_records() -> None:
    """Clients choose the ids of their requests."""
    sly = RequestRecord(1.0, "\n" + logged(record(7)) + json.dumps(record(8).to_dict()), 100, 16, 64)
    assert read_text(logged(sly)).records == [sly]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (logged(record(1))[:-20], r"not JSON \("),
        (logged(record(1)).replace('"host_tokens": 64', '"host_tokens": 640'), "tokens_asked=100"),
        (LOG_MARKER + '{"a":' * 10_000, "recursion"),
        (LOG_MARKER + "{" + "x" * 100_000, "longer than 65,536"),
        (LOG_MARKER + "{\udcff", r"not JSON \("),
        ('{"req_id": "r1", "tok', r"not JSON \("),
    ],
)
def test_a_malformed_record_is_counted_and_its_line_named(line: str, fault: str) -> None:
    text = f"INFO\n{line.rstrip()}\n{logged(record(2))}"
    reading = read_log(io.BytesIO(text.encode("utf-8", "surrogateescape")), "server.log")
    assert reading.records == [record(2)]
    assert reading.malformed == 1
    (described,) = reading.faults
    assert described.startswith("server.log:2: ")
    assert re.search(fault, described)

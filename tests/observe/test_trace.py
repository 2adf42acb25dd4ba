"""Traces that a scheduler half records: correct, without the text of requests, bounded, and harmless to serving."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from kvoffload.abc import ConfigError, Hints
from kvoffload.cache.keys import hash_blocks
from kvoffload.lab.readers import read_trace
from kvoffload.lab.trace import UNKNOWN, Trace
from kvoffload.observe import trace as recorder_module
from kvoffload.observe.records import RequestRecord
from kvoffload.observe.trace import TraceRecorder
from tests.connector.rig import TOKENS, FakeRequest, Rig, prompt


class Recording:
    """A scheduler half that records to ``path``."""

    def __init__(self, path: Path, factor: int = 1, **header: Any) -> None:
        self.path = path
        self.recorder = TraceRecorder(str(path), TOKENS * factor, header)
        self.rig = Rig(num_host_blocks=64, factor=factor, options={"recorder": self.recorder})
        self.names = 0

    def serve(self, tokens: list[int], output: int = 0, load: bool = False) -> FakeRequest:
        """Runs a request from its first lookup to its end."""
        self.names += 1
        request = FakeRequest(f"secret-{self.names}", list(tokens))
        if load:
            meta = self.rig.load(request)
            self.rig.report(*meta.loads)
            rest = request.num_tokens - request.num_computed_tokens
            meta = self.rig.step({request: rest}, new={request.request_id: self.rig.new_blocks(64)})
        else:
            meta = self.rig.start(request)
        self.rig.report(*meta.stores)
        for i in range(output):
            request.tokens.append(10_000 * self.names + i)
            if i < output - 1:
                # The last token is sampled and not computed.
                self.rig.step({request: 1}, more={request.request_id: self.rig.new_blocks(1)})
        self.rig.half.request_finished(request)
        meta = self.rig.step()
        self.rig.report(*meta.stores)
        return request

    def read(self) -> Trace:
        self.rig.half.shutdown()
        return read_trace(self.path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def add(recorder: TraceRecorder, blocks: int = 4, hints: Hints | None = None, **names: str | None) -> None:
    """Records a request that found nothing. ``names``: those of its session and tenant."""
    tokens = prompt(blocks * TOKENS)
    record = RequestRecord(time.time(), "r", len(tokens), 0, 0)
    keys = hash_blocks(tokens, TOKENS)
    recorder.add(time.time(), record, keys, len(tokens), len(tokens), names, hints=hints)


def test_the_speed_of_long_prompts_is_recorded(path: Path) -> None:
    recording = Recording(path, device_blocks=9, pool_blocks=64)
    report = recording.rig.report

    def report_later(*jobs: int, failed: bool = False, times: int = 1) -> None:
        recording.rig.clock.now += 0.5
        report(*jobs, failed=failed, times=times)

    recording.rig.report = report_later  # type: ignore[method-assign]
    recording.serve(prompt(80), output=3)
    recording.serve(prompt(20, start=500), output=3)
    trace = recording.read()
    long, short = lines(path)[1:]
    assert (long["prefill_tokens"], long["prefill_ms"]) == (80, 500)
    assert "prefill_ms" not in short
    assert trace.prefill_tokens_per_s == 160.0


def test_a_recorded_trace_can_be_read_back(path: Path) -> None:
    recording = Recording(path, device_blocks=9, pool_blocks=64)
    began = time.time()
    recording.serve(prompt(10), output=3)
    recording.serve(prompt(14), load=True)
    recording.serve(prompt(12, start=500))
    trace = recording.read()
    assert trace.info["device_blocks"] == 9
    assert trace.block_tokens == TOKENS
    assert trace.input_tokens.tolist() == [10, 14, 12]
    assert trace.output_tokens.tolist() == [3, 0, 0]
    # The first request computed 12 tokens: two blocks of the prompt, and one that has tokens of the output.
    assert [trace.chain(r).tolist() for r in range(3)] == [[0, 1, 2], [0, 1, 3], [4, 5, 6]]
    assert trace.prompt_blocks.tolist() == [2, 3, 3]
    assert (trace.info["device_tokens"], trace.info["host_tokens"], trace.info["disk_tokens"]) == (0, 8, 0)
    assert [line["host_tokens"] for line in lines(path)[1:]] == [0, 8, 0]
    assert lines(path)[0]["started"] == pytest.approx(began, abs=5)
    assert 0 <= trace.times[0] <= trace.times[-1] < 60


def test_the_file_contains_no_text_of_a_request(path: Path) -> None:
    recording = Recording(path)
    request = recording.serve(prompt(40, start=123_456_000), output=2)
    recording.read()
    text = path.read_text()
    _, line = lines(path)
    lengths = {"timestamp", "input_length", "output_length", "hash_ids"}
    assert line.keys() == lengths | {"device_tokens", "host_tokens", "disk_tokens"}
    assert len(line["hash_ids"]) == 10
    assert all(0 <= each < 1 << 63 for each in line["hash_ids"])
    assert "secret" not in text
    assert "123456" not in text
    for block_hash in request.block_hashes:
        assert block_hash.hex() not in text
        for i in range(len(block_hash) - 7):
            assert str(int.from_bytes(block_hash[i : i + 8], "big") >> 1) not in text


def test_sessions_and_tenants_are_recorded_as_hashes(path: Path) -> None:
    recorder = TraceRecorder(str(path), TOKENS, {})
    names = [("chat-of-alice", "acme"), ("chat-of-bob", "acme"), (None, None), ("chat-of-alice", None), ("\ud800", "")]
    for session, tenant in names:
        add(recorder, session=session, tenant=tenant)
    recorder.close()
    text = path.read_text()
    assert not any(name in text for name in ("alice", "bob", "acme"))
    _, *recorded = lines(path)
    assert all(0 <= line[name] < 1 << 63 for line in recorded for name in ("session", "tenant") if name in line)
    assert [("session" in line, "tenant" in line) for line in recorded] == [
        (session is not None, tenant is not None) for session, tenant in names
    ]
    trace = read_trace(path)
    assert trace.sessions.tolist() == [0, 1, UNKNOWN, 0, 2]
    assert trace.tenants.tolist() == [0, 0, UNKNOWN, UNKNOWN, 1]


def test_closing_twice_and_recording_after_it_do_no_harm_and_only_the_owner_may_read(path: Path) -> None:
    path.write_text("")
    path.chmod(0o644)
    recorder = TraceRecorder(str(path), TOKENS, {})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    add(recorder)
    recorder.close()
    recorder.close()
    add(recorder)
    assert len(lines(path)) == 2


def refused(path: Path, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^record_trace={str(path)!r}: {words}"):
        TraceRecorder(str(path), TOKENS, {})


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("keep")
    target.chmod(0o644)
    path.symlink_to(target)
    refused(path, "a symbolic link; name the file itself")
    path.unlink()
    path.symlink_to(tmp_path / "new")
    refused(path, "a symbolic link")
    assert not (tmp_path / "new").exists()
    path.unlink()
    path.hardlink_to(target)
    refused(path, "has 2 hard links; name a new file")
    assert (target.read_text(), stat.S_IMODE(target.stat().st_mode)) == ("keep", 0o644)


def test_a_file_of_another_user_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text("")
    for mode in (0o620, 0o602):
        path.chmod(mode)
        refused(path, "others may write to it; remove it")
    path.chmod(0o600)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    refused(path, f"belongs to user {owner}; name a new file in a folder you own")


def test_a_request_that_got_no_blocks_is_left_out(path: Path) -> None:
    recording = Recording(path)
    waiting = FakeRequest("waits", prompt(12))
    recording.rig.look_up(waiting)
    recording.rig.half.request_finished(waiting)
    recording.rig.half.request_finished(FakeRequest("unknown", prompt(12)))
    recording.serve(prompt(8))
    assert recording.read().num_requests == 1


def test_a_request_aborted_during_its_prompt_counts_the_whole_prompt(path: Path) -> None:
    recording = Recording(path)
    rig, request = recording.rig, FakeRequest("aborted", prompt(40))
    rig.look_up(request)
    rig.allocate(request, ids := rig.new_blocks(10))
    rig.step({request: 8}, new={"aborted": ids})
    rig.half.request_finished(request)
    trace = recording.read()
    assert trace.input_tokens.tolist() == [40]
    assert len(trace.chain(0)) == 10


def test_a_preempted_request_is_recorded_once(path: Path) -> None:
    recording = Recording(path)
    rig, request = recording.rig, FakeRequest("preempted", prompt(10))
    rig.start(request)
    request.tokens.append(99)
    request.num_computed_tokens = 0
    rig.step(preempted=["preempted"])
    rig.start(request)
    rig.half.request_finished(request)
    trace = recording.read()
    assert (trace.input_tokens.tolist(), trace.output_tokens.tolist()) == ([10], [1])


def test_a_server_appends_to_an_older_file_even_after_a_torn_line(path: Path) -> None:
    first = TraceRecorder(str(path), TOKENS, {})
    add(first)
    first.close()
    with path.open("ab") as file:
        file.write(b'{"timestamp": 12, "inp')
    second = TraceRecorder(str(path), TOKENS, {})
    add(second)
    second.close()
    trace = read_trace(path)
    assert trace.num_requests == 2
    assert [problem.line for problem in trace.problems] == [3]
    assert trace.info["starts"] == 2


def test_two_servers_cannot_share_a_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "LOCK_DEADLINE_S", 0.0)
    first = TraceRecorder(str(path), TOKENS, {})
    refused(path, "another server records to it; give each server its")
    first.close()
    TraceRecorder(str(path), TOKENS, {}).close()


def test_an_unusable_path_is_an_error_that_names_the_fix(tmp_path: Path) -> None:
    refused(tmp_path / "none" / "trace.jsonl", f"there is no directory {tmp_path}/none; make it,.* install -d -m 700")
    refused(tmp_path, "a directory; name a file in it")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "not a regular file")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_file_size_is_bounded(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder_module, "MAX_FILE_BYTES", 2000)
    recording = Recording(path)
    for _ in range(40):
        recording.serve(prompt(12))
    trace = recording.read()
    assert 3 < trace.num_requests < 40
    assert path.stat().st_size <= 2000
    (warning,) = warnings(caplog)
    assert "the file is full (2,000 bytes)" in warning
    assert recording.rig.half.off is False
    # Its earlier content counts.
    again = TraceRecorder(str(path), TOKENS, {})
    for _ in range(40):
        add(again)
    again.close()
    assert path.stat().st_size <= 2000


def test_pending_lines_are_bounded(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder_module, "MAX_PENDING_BYTES", 4000)
    recorder = TraceRecorder(str(path), TOKENS, {})
    add(recorder, 1000)
    recorder.close()
    (warning,) = warnings(caplog)
    assert "the disk is too slow" in warning
    assert len(lines(path)) == 1


def test_a_full_disk_ends_the_recording_and_nothing_else(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recording = Recording(path)
    recording.serve(prompt(12))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
    try:
        for _ in range(5):
            recording.serve(prompt(40))
        recording.recorder.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (warning,) = warnings(caplog)
    assert "recording of the trace" in warning
    assert "File too large" in warning
    assert recording.rig.half.off is False
    recording.serve(prompt(12), load=True)
    recording.rig.half.shutdown()
    assert path.read_bytes() == b"" or path.read_bytes().endswith(b"\n"), "no line is torn"


def test_a_bug_ends_the_recording_and_nothing_else(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recording = Recording(path)
    recording.serve(prompt(12))
    add_as_it_is = recording.recorder.add
    recording.recorder.add = lambda *args, **names: add_as_it_is(None, *args[1:], **names)  # type: ignore[method-assign, arg-type]
    recording.serve(prompt(12))
    recording.serve(prompt(12))
    assert len(warnings(caplog)) == 1
    assert recording.rig.half.off is False
    assert recording.read().num_requests == 1


def test_what_clients_know_is_recorded(path: Path) -> None:
    recorder = TraceRecorder(str(path), TOKENS, {})
    for hints in (Hints(7, True), Hints(7, False, 30.0, 0.5, 60.0), Hints(7, retain_s=0.0), None):
        add(recorder, session="s", hints=hints)
    recorder.close()
    found = [{name: line[name] for name in recorder_module.HINTS if name in line} for line in lines(path)[1:]]
    returns = {"expect_return_s": 30.0, "p_return": 0.5, "retain_s": 60.0}
    assert found == [{"drop": True}, returns, {"retain_s": 0.0}, {}]
    trace = read_trace(path)
    assert trace.returns_in.tolist()[:2] == [math.inf, 30.0]
    assert [hints and hints.retain_s for hints in map(trace.hints, range(3))] == [None, 60.0, 0.0]

"""Traces that a scheduler half records: correct, without the text of requests, bounded, and harmless to serving."""

from __future__ import annotations

import json
import logging
import math
import os
import random
import resource
import stat
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvoffload.abc import ConfigError, Hints, MissReason
from kvoffload.cache.keys import hash_blocks
from kvoffload.lab.readers import read_trace
from kvoffload.lab.trace import UNKNOWN, Trace
from kvoffload.observe import trace as recorder_module
from kvoffload.observe.metrics import Metrics, merge
from kvoffload.observe.records import MAX_PERIODS, Period, ReasonSummary, RequestRecord, by_reason, over_time
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


# Records.

HIT = RequestRecord(1.5, "r1", 100, 16, 64)
FROM_DISK = RequestRecord(1.5, "r1", 100, 16, 0, disk_tokens=64, tier_tokens={"disk": 64})
FROM_TIERS = RequestRecord(1.5, "r1", 100, 16, 0, disk_tokens=64, tier_tokens={"disk": 16, "shared_dir": 48})
MISSED = RequestRecord(2.5, "r2", 100, 16, 0, "ab" * 36, MissReason.EVICTED, 12.34)
REFUSED = RequestRecord(
    2.5, "r3", 100, 0, 0, "ab", MissReason.NOT_ADMITTED, policy={"rule": "2q", "scores": {"lru": 1.5, "2q": 3.0}}
)


def test_a_record_can_be_written_as_json() -> None:
    assert json.loads(json.dumps(MISSED.to_dict())) == {
        "time": 2.5,
        "req_id": "r2",
        "tokens_asked": 100,
        "device_tokens": 16,
        "host_tokens": 0,
        "missed_key": "ab" * 36,
        "reason": "evicted",
        "age_s": 12.34,
        "disk_tokens": 0,
        "policy": None,
        "tier_tokens": {},
        "missed_in": None,
        "tenant": None,
        "engine": None,
        "saved_s": None,
        "stored_tokens": 0,
        "retained_tokens": 0,
        "retained_in": None,
        "retain_refused": None,
    }
    assert RequestRecord(**HIT.to_dict()) == HIT


def test_a_record_can_be_read_from_json() -> None:
    for record in (HIT, MISSED, FROM_DISK, FROM_TIERS, REFUSED, replace(HIT, engine="vLLM")):
        data = json.loads(json.dumps(record.to_dict()))
        assert RequestRecord.from_dict(data) == record
        assert RequestRecord.from_dict({**data, "field_of_a_newer_version": [1]}) == record
    needed = ("time", "req_id", "tokens_asked", "device_tokens", "host_tokens")
    data = {name: HIT.to_dict()[name] for name in needed}
    assert RequestRecord.from_dict(data | {"disk_tokens": 0}) == replace(HIT, disk_tokens=0)
    for name in needed:
        with pytest.raises(ValueError, match=f"^{name} is missing"):
            RequestRecord.from_dict({field: value for field, value in data.items() if field != name})


IMPOSSIBLE: dict[str, list[Any]] = {
    "policy": [
        *("2q", {"rule": "2q"}, {"rule": "2q", "scores": {"lru": 1.0}}, {"rule": ["2q"], "scores": {"2q": 1.0}}),
        *({"rule": "2q", "scores": {"2q": True}}, {"rule": "2q", "scores": {f"{n}q": 1.0 for n in range(100)}}),
    ],
    "time": ["1.5", math.nan, math.inf, -1, 10**400, True],
    "req_id": [7, "x" * 5000],
    "tokens_asked": [100.0, -1, 10**400, True, 17],
    "device_tokens": [None],
    "host_tokens": ["64"],
    "disk_tokens": ["64"],
    "tier_tokens": [64, {"disk": 64}, {"disk": "64"}, {str(n): 0 for n in range(100)}, {"x" * 5000: 0}],
    "missed_key": [1],
    "missed_in": [1],
    "reason": ["bad luck", ["evicted"], "\x1b[2J\u202e"],
    "age_s": ["old", -0.5],
}


@pytest.mark.parametrize("field", IMPOSSIBLE)
def test_an_impossible_field_is_named(field: str) -> None:
    for value in IMPOSSIBLE[field]:
        with pytest.raises(ValueError, match=f"^{field}=") as caught:
            RequestRecord.from_dict({**HIT.to_dict(), field: value})
        assert len(str(caught.value)) < 200
        assert str(caught.value).isascii()
        assert str(caught.value).isprintable()


# Summaries.


def missed(at: float, reason: MissReason | None, asked: int = 100, age: float | None = None) -> RequestRecord:
    return RequestRecord(at, f"r{at}", asked, 10, 20, None if reason is None else "ab", reason, age)


def test_reasons_are_ordered_by_missing_tokens() -> None:
    records = [
        missed(1, MissReason.NEVER_STORED, asked=50),
        missed(2, MissReason.EVICTED, age=10.0),
        missed(3, None, asked=10_000),
        missed(4, MissReason.NEVER_STORED, asked=50),
        missed(5, MissReason.EVICTED, age=30.0),
        missed(6, MissReason.EVICTED, age=40.0),
    ]
    assert by_reason(records) == [
        ReasonSummary(MissReason.EVICTED, 3, 210, 30.0),
        ReasonSummary(MissReason.NEVER_STORED, 2, 40, None),
        ReasonSummary(None, 1, 9970, None),
    ]
    assert by_reason([]) == []


def test_periods_begin_at_multiples_of_their_length_and_empty_ones_are_kept() -> None:
    records = [missed(61.0, None), missed(200.0, MissReason.RESET), missed(119.9, MissReason.RESET)]
    assert over_time(records, 60) == [
        Period(60, 60, 2, 200, 20, 40, {MissReason.RESET: 1}),
        Period(120, 60, 0, 0, 0, 0, {}),
        Period(180, 60, 1, 100, 10, 20, {MissReason.RESET: 1}),
    ]
    assert over_time([]) == []


@pytest.mark.parametrize("span", [0.0, 0.5, 11.0, 60.0, 3599.0, 86_400.0, 3e6, 1e8])
def test_there_are_about_twelve_periods_by_default(span: float) -> None:
    start = 1.7e9
    periods = over_time([missed(start, None), missed(start + span, None)])
    assert 1 <= len(periods) <= 14
    assert span < 12 or len(periods) >= 5
    assert periods[0].start <= start < periods[0].start + periods[0].length_s
    assert periods[-1].start <= start + span < periods[-1].start + periods[-1].length_s


def test_the_number_of_periods_is_bounded() -> None:
    records = [missed(0.0, None), missed(float(MAX_PERIODS), None)]
    with pytest.raises(ValueError, match="1,001 periods of 1 s"):
        over_time(records, 1)
    assert len(over_time(records[:1] + [missed(MAX_PERIODS - 1.0, None)], 1)) == MAX_PERIODS


def test_periods_and_reasons_add_up_to_the_records() -> None:
    rng = random.Random(0)
    records = [missed(rng.uniform(1e9, 1e9 + 5000), rng.choice([None, *MissReason])) for _ in range(500)]
    periods, reasons = over_time(records), by_reason(records)
    total = Period.of(records, 0.0, 0.0)
    for name in ("requests", "tokens_asked", "device_tokens", "host_tokens"):
        assert sum(getattr(period, name) for period in periods) == getattr(total, name)
    counts: Counter[MissReason] = Counter()
    for period in periods:
        counts.update(period.misses)
    assert counts == total.misses == {each.reason: each.requests for each in reasons if each.reason is not None}
    assert sum(each.requests for each in reasons) == 500
    assert sum(each.tokens_missing for each in reasons) == sum(record.tokens_missing for record in records)


# Metrics: totals, changes since the last report, and merging the changes of several processes.


def test_counters_add_up_by_label_and_gauges_are_replaced() -> None:
    metrics = Metrics()
    assert metrics.snapshot() == metrics.take() == {}
    metrics.add("store_blocks")
    before = metrics.snapshot()
    metrics.add("store_blocks", 4)
    metrics.add("misses", label="evicted")
    metrics.add("misses", 2, label="reset")
    metrics.set("pool_used_blocks", 7)
    metrics.set("pool_used_blocks", 3)
    assert metrics.snapshot() == {"store_blocks": 5, "misses:evicted": 1, "misses:reset": 2, "pool_used_blocks": 3}
    assert before == {"store_blocks": 1}, "a snapshot does not change later"


def test_take_returns_increases_of_counters_and_new_values_of_gauges() -> None:
    metrics = Metrics()
    metrics.add("store_blocks", 5)
    metrics.add("misses", label="evicted")
    metrics.set("off", 0)
    assert metrics.take() == {"store_blocks": 5, "misses:evicted": 1, "off": 0}
    metrics.add("store_blocks", 2)
    metrics.add("load_blocks", 1)
    assert metrics.take() == {"store_blocks": 2, "load_blocks": 1}
    for _ in range(2):
        metrics.set("off", 1)
    assert metrics.take() == {"off": 1}
    metrics.set("off", 1)
    assert metrics.take() == {}, "nothing changed"
    assert metrics.snapshot()["store_blocks"] == 7, "take keeps the totals"


def test_merged_changes_equal_the_totals() -> None:
    metrics = Metrics()
    seen: dict[str, float] = {}
    for n in range(1, 4):
        metrics.add("load_bytes", n)
        metrics.add("misses", label="reset")
        metrics.set("pool_used_blocks", 10 * n)
        merge(seen, metrics.take())
        merge(seen, {})
    assert seen == metrics.snapshot() == {"load_bytes": 6, "misses:reset": 3, "pool_used_blocks": 30}


def test_an_unknown_name_or_a_wrong_label_is_an_error() -> None:
    metrics = Metrics()
    for name in ("", "nonsense", "misses:evicted", "Off"):
        with pytest.raises(KeyError):
            metrics.add(name)
        with pytest.raises(KeyError):
            metrics.set(name, 1)
    with pytest.raises(KeyError):
        merge({}, {"nonsense": 1})
    with pytest.raises(ValueError, match="misses takes a reason"):
        metrics.add("misses")
    with pytest.raises(ValueError, match="store_blocks takes no label"):
        metrics.add("store_blocks", label="evicted")
    with pytest.raises(ValueError, match="store_blocks is not a gauge"):
        metrics.set("store_blocks", 5)
    assert metrics.snapshot() == {}


def test_counts_of_a_tier_are_taken_in_under_its_label() -> None:
    metrics = Metrics()
    metrics.take_in({"tier_read_bytes:disk": 5, "tier_off:disk": 1})
    metrics.take_in({"tier_read_bytes:disk-2": 2, "tier_read_bytes:disk": 1, "tier_off:disk": 0})
    assert metrics.snapshot() == {"tier_read_bytes:disk": 6, "tier_read_bytes:disk-2": 2, "tier_off:disk": 0}
    with pytest.raises(ValueError, match="takes a tier"):
        metrics.take_in({"tier_read_bytes": 1})

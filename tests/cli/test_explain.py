"""``kvoffload explain`` on running servers, on logs, and on its own output."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvoffload import cli
from kvoffload.abc import MissReason
from kvoffload.cli.explain import ADVICE, BEHIND_ENGINE
from kvoffload.observe.records import RequestRecord
from kvoffload.observe.server import LOG_MARKER

testing = pytest.importorskip("click.testing")
pytest.importorskip("rich")

TIMEOUT_S = 120
START = 1_700_000_000.0
OF_THE_CONNECTOR = (MissReason.OVER_QUOTA, MissReason.FASTER_TO_COMPUTE, MissReason.NOT_LOOKED_UP)
"""Reasons that no tier below an engine's own host memory gives."""
COMMAND = [sys.executable, "-c", "from kvoffload.cli import main; main()", "explain"]

SERVER = """
import json, sys
from kvoffload.observe.records import RequestRecord
from kvoffload.observe.server import RecordServer
records = [RequestRecord.from_dict(data) for data in json.load(open(sys.argv[2]))]
server = RecordServer(lambda: records, sys.argv[1], lambda: [(each, 1.0) for each in sys.argv[3:]])
print("ready", flush=True)
sys.stdin.read()
"""


def some_records(engine: str = "a") -> list[RequestRecord]:
    """Returns ten minutes of records, one every ten seconds: in turn a hit, one never stored, and two evicted."""
    records = []
    for i in range(60):
        reason = (None, MissReason.NEVER_STORED, MissReason.EVICTED, MissReason.EVICTED)[i % 4]
        age = 35.0 if reason is MissReason.EVICTED else None
        missed = None if reason is None else "ab" * 36
        policy = None if reason is None else {"rule": "lru", "scores": {"lru": float(i), "2q": 0.0}}
        records.append(
            RequestRecord(START + 10 * i, f"{engine}{i}", 1000, 400, 200, missed, reason, age, policy=policy)
        )
    return records


def as_log(records: Sequence[RequestRecord]) -> str:
    return "".join(f"DEBUG [scheduler.py:585] {LOG_MARKER}{json.dumps(record.to_dict())}\n" for record in records)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "server.log"
    path.write_text("INFO starting\n" + as_log(some_records()))
    return path


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Starts a server with records and returns its process id."""
    with contextlib.ExitStack() as stack:

        def run(name: str, records: Sequence[RequestRecord], *gauges: str) -> int:
            path = tmp_path / f"{name}.json"
            path.write_text(json.dumps([record.to_dict() for record in records]))
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", SERVER, name, str(path), *gauges],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            return process.pid

        yield run


def run(*args: object, stdin: str = "") -> Any:
    """Runs the command in this process. Its output goes to a pipe."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(stdin.encode())
        file.seek(0)
        return testing.CliRunner().invoke(cli.group(), ["explain", *map(str, args)], input=file)


def run_program(*args: object, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, args)],
        input=stdin,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=TIMEOUT_S,
        env={**os.environ, "TZ": "UTC", **environment},
    )


def words(text: str) -> str:
    return re.sub(r"\s+", " ", text)


# Logs.


def test_a_log_is_first_summarized_in_sentences(log: Path) -> None:
    done = run(log)
    assert (done.exit_code, done.stderr) == (0, "")
    first = words(done.stdout.split("\n\n")[0])
    assert first.startswith(
        "60 requests within 10 min found 60% of 60k prompt tokens: 40% on the device, 20% in host memory. "
        "30 missed because the block had been evicted (median 35 s ago), 15 because the block was never stored."
    )
    assert "raise host_bytes" in first


def test_the_tables_show_reasons_and_time(log: Path) -> None:
    lines = run_program(log, "--every", "5m").stdout.splitlines()
    (evicted,) = [line for line in lines if line.startswith("evicted ")]
    assert evicted.split()[:6] == ["evicted", "30", "50%", "12k", "35", "s"]
    assert "Raise host_bytes" in evicted
    (hits,) = [line for line in lines if line.startswith("no miss ")]
    assert hits.split()[2:] == ["15", "25%", "6.0k"]
    (first,) = [line for line in lines if line.startswith("22:10")]
    assert first.split() == ["22:10", "10", "████▒▒····", "40%", "20%", "4", "3"]
    assert [line[:5] for line in lines if line.startswith("22:")] == ["22:10", "22:15", "22:20"]


def test_stdin_and_several_logs_are_merged_without_duplicates(log: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.log"
    other.write_text(as_log(some_records("b")))
    result = run_program("--records", log, other, log, "-", stdin=as_log(some_records("c")))
    assert result.returncode == 0
    ids = [json.loads(line)["req_id"] for line in result.stdout.splitlines()]
    assert sorted(ids) == sorted(record.req_id for engine in "abc" for record in some_records(engine))
    times = [json.loads(line)["time"] for line in result.stdout.splitlines()]
    assert times == sorted(times)


def test_only_the_latest_requests_or_those_of_a_tenant(log: Path) -> None:
    report = json.loads(run(log, "--last", "95s", "--json").stdout)
    assert report["total"]["requests"] == 10
    assert [record["time"] for record in report["records"]] == [START + 500 + 10 * i for i in range(10)]
    log.write_text(as_log([RequestRecord(START + i, f"r{i}", 10, 0, 0, tenant="ab"[i % 2]) for i in range(9)]))
    shown = json.loads(run(log, "--tenant", "b", "--json").stdout)
    assert [record["req_id"] for record in shown["records"]] == ["r1", "r3", "r5", "r7"]


def test_json_is_complete(log: Path) -> None:
    report = json.loads(run(log, "--json", "--every", "1m").stdout)
    assert report["total"]["tokens_asked"] == 60_000
    assert report["total"]["misses"] == {"evicted": 30, "never_stored": 15}
    assert [(each["reason"], each["requests"], each["share"]) for each in report["reasons"]] == [
        ("evicted", 30, 0.5),
        ("never_stored", 15, 0.25),
        (None, 15, 0.25),
    ]
    assert report["reasons"][0]["tokens_missing"] == 12_000
    assert report["reasons"][0]["median_age_s"] == 35.0
    assert "host_bytes" in report["reasons"][0]["fix"]
    assert sum(period["requests"] for period in report["periods"]) == 60
    assert {period["length_s"] for period in report["periods"]} == {60}
    assert report["records"] == [record.to_dict() for record in some_records()]
    assert (report["servers"], report["malformed"], report["warnings"]) == ([], 0, [])


@pytest.mark.parametrize("option", ["--json", "--records"])
def test_it_can_read_its_own_output(log: Path, tmp_path: Path, option: str) -> None:
    saved = tmp_path / "saved"
    saved.write_text(run(log, option).stdout)
    assert run(saved).stdout == run(log).stdout
    assert run(saved, "--json").stdout == run(log, "--json").stdout


def test_malformed_records_are_reported_and_the_rest_is_explained(log: Path) -> None:
    lines = log.read_text().splitlines()
    lines[5] = lines[5][:-10]
    log.write_text("\n".join(lines))
    done = run(log)
    assert done.exit_code == 0
    assert "skipped 1 malformed record" in done.stderr
    assert f"{log}:6: not JSON" in done.stderr
    assert "59 requests within" in done.stdout
    assert json.loads(run(log, "--json").stdout)["malformed"] == 1
    log.write_text((LOG_MARKER + "{}\n") * 1000 + as_log(some_records()))
    done = run(log)
    assert "1,000 malformed records" in done.stderr
    assert "and 995 more" in done.stderr
    assert len(done.stderr.splitlines()) < 10


def test_a_log_without_records_says_how_to_get_them(log: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.log"
    empty.write_text("INFO 11-20 10:00:00 kvoffload: host pool of 8 GiB\n")
    done = run(empty)
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"{empty}: contains no records" in done.stderr
    assert "VLLM_LOGGING_LEVEL=DEBUG" in done.stderr
    done = run(empty, log)
    assert done.exit_code == 0, "the other log has records"
    assert f"{empty}: contains no records" in done.stderr


def test_wrong_options_are_named_with_an_example(log: Path) -> None:
    for option in ("--every", "--last"):
        for value in ("5", "0s", "-1m", "1.5h", "m", "1 m", "1234567s", "\u0663m"):
            result = run(log, option, value)
            assert result.exit_code == 2
            assert option in result.output
            assert "15m" in result.output
    for options in (["--json", "--records"], ["--pid", "1"], ["/no/such.log"]):
        assert run(log, *options).exit_code == 2


def test_nothing_in_host_memory_because_the_device_held_everything() -> None:
    new = RequestRecord(START, "new", 1000, 0, 0, "ab", MissReason.NEVER_STORED)
    again = [RequestRecord(START + i, f"again{i}", 1000, 992, 0) for i in range(2)]
    reset = RequestRecord(START + 3, "reset", 1000, 0, 992)
    held = "For 2 requests the device cache held all 2.0k tokens that could be found, so nothing had to be loaded."

    def first(*records: RequestRecord) -> str:
        return words(run("-", stdin=as_log(records)).stdout.split("\n\n")[0])

    assert held in first(new, *again)
    assert held in first(new, *again, reset)
    others = [new, reset, RequestRecord(START, "behind", 1000, 500, 0, "ab", MissReason.EVICTED)]
    assert "device cache" not in first(*others), "for these, another reason is right"
    assert "device cache" not in first(RequestRecord(START, "short", 10, 0, 0)), "the device held nothing"


def test_below_the_host_memory_of_an_engine_other_settings_help() -> None:
    """A tier does not learn what was on the device and what in the engine's host memory."""
    behind = [
        RequestRecord(START, "new", 1000, 0, 0, "ab", MissReason.EVICTED, 5.0, engine="vLLM"),
        RequestRecord(START, "again", 1000, 400, 0, None, None, None, 600, None, {"disk": 600}, engine="vLLM"),
    ]
    text = run("-", stdin=as_log(behind)).stdout
    first = words(text.split("\n\n")[0])
    assert "found 50% of 2.0k prompt tokens: 20% on the device or in vLLM's host memory, 30% on disk." in first
    assert "What would help most: raise the bytes of the tier, or cpu_bytes_to_use" in first
    assert "host_bytes" not in text
    assert "engine disk evicted" in words(text.split("Prompt tokens over time")[1])
    own = [RequestRecord(START, "own", 1000, 0, 0, "ab", MissReason.EVICTED, 5.0)]
    assert "What would help most: raise host_bytes" in words(run("-", stdin=as_log(own)).stdout)
    assert "in vLLM's host memory, 0% in host memory" in words(run("-", stdin=as_log([*behind, *own])).stdout)


# Running servers.


def test_abilities_of_tiers_that_are_paused_have_a_line_each(start: Callable[..., int]) -> None:
    pid = start("dp0", some_records(), "tier_paused:write,redis", "tier_paused:read,disk", "tier_off:disk")
    done = run("--pid", pid)
    assert done.exit_code == 0
    lines = [line for line in done.stderr.splitlines() if "paused" in line]
    assert ["reads of the disk tier are paused" in lines[0], "writes to the redis tier are paused" in lines[1]] == [
        True
    ] * 2
    assert len(lines) == 2


def test_each_server_has_a_line_before_all_are_added_up(start: Callable[..., int], tmp_path: Path) -> None:
    """And the process that started a server stands for it, as vLLM's API server does for its engines."""
    hits, misses = [[replace(r, host_tokens=tokens) for r in some_records(str(tokens))] for tokens in (400, 0)]
    pids = [start("h", hits), start("m", misses[:10])]
    lines = run().stdout.splitlines()
    assert f"process {pids[0]}: 60 requests, 80% of 60k prompt tokens found" in lines
    assert f"process {pids[1]}: 10 requests, 40% of 10k prompt tokens found" in lines
    assert not any(line.startswith(f"process {pids[0]}:") for line in run("--pid", pids[0]).stdout.splitlines())
    both = json.loads(run("--pid", os.getpid(), "--json").stdout)
    assert {server["pid"] for server in both["servers"]} == set(pids)
    # The command of the process that started the engine names the model and the port.
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SERVER!r}, 'd', sys.argv[1]])"
    arguments = [sys.executable, "-c", code, str(tmp_path / "h.json"), "serve", "/models/one", "--port", "8123"]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        assert "(/models/one, port 8123): 60 requests" in run().stdout
        assert [each["name"] for each in json.loads(run("--pid", parent.pid, "--json").stdout)["servers"]] == ["d"]
        parent.kill()


def test_a_server_that_cannot_be_read_is_reported_and_the_others_are_read(start: Callable[..., int]) -> None:
    good = start("good", some_records())
    fake = (
        "import os; from kvoffload.observe.server import _listen; _, s = _listen(f'{os.getpid()}-fake');"
        "print('ready', flush=True)\nwhile True: s.accept()[0].sendall(b'nonsense')"
    )
    with subprocess.Popen([sys.executable, "-c", fake], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            done = run("--json")
            alone = run("--pid", process.pid)
        finally:
            process.kill()
    assert done.exit_code == 0
    assert f"process {process.pid} (fake) answered in another format" in done.stderr
    assert good in [server["pid"] for server in json.loads(done.stdout)["servers"]]
    assert (alone.exit_code, alone.stdout) == (2, "")
    assert "another format" in alone.stderr


def test_without_a_server_the_error_says_what_to_do() -> None:
    """Runs in a new network namespace, which has no server."""
    inside = ["unshare", "--user", "--map-root-user", "--net"]
    try:
        subprocess.run([*inside, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the privilege to make a network namespace")
    done = subprocess.run([*inside, *COMMAND], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no server with kvoffload was found" in done.stderr
    assert "docker exec" in done.stderr
    assert "`kvoffload explain LOG` reads a log" in done.stderr


def test_every_reason_has_advice() -> None:
    assert set(ADVICE) == set(MissReason)
    assert set(BEHIND_ENGINE) <= set(MissReason)
    settings = ("host_bytes", "quota", "load_only_if_faster")
    told = [BEHIND_ENGINE.get(reason, ADVICE[reason].fix) for reason in MissReason if reason not in OF_THE_CONNECTOR]
    assert [fix for fix in told if any(setting in fix for setting in settings)] == []


def test_escape_sequences_of_another_process_are_not_printed(tmp_path: Path) -> None:
    """Neither those in texts of records, nor those in malformed ones."""
    evil = "\x1b[2J\u202e"
    record = {**some_records()[0].to_dict(), "disk_tokens": 100, "tier_tokens": {evil: 100}, "req_id": evil}
    log = tmp_path / "server.log"
    log.write_text(as_log([]) + f"{LOG_MARKER}{json.dumps(record)}\n{LOG_MARKER}{json.dumps({'req_id': evil})}\n")
    for more in ([], ["--json"], ["--records"]):
        done = run_program(*more, log)
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout + done.stderr
        assert "\u202e" not in done.stdout + done.stderr
        assert more or "\\x1b[2J\\u202e" in done.stdout


def test_a_setting_that_concerns_few_requests_is_not_said_to_help_most() -> None:
    late = RequestRecord(START, "late", 1000, 0, 0, "ab", MissReason.NOT_ANSWERED)
    new = [RequestRecord(START, f"new{i}", 1000, 0, 0, "ab", MissReason.NEVER_STORED) for i in range(99)]
    assert "What would help most" not in words(run("-", stdin=as_log([late, *new])).stdout)
    text = words(run("-", stdin=as_log([late, *new[:9]])).stdout)
    assert "What would help most: raise lookup_deadline_ms" in text
    assert "load_deadline_ms" not in text

"""The proof on a GPU is rehearsed: every part runs on a stand-in for a device, and the table says what has happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.gpu import __main__ as proof
from benchmarks.gpu import bundle, cuda, sanitizer
from benchmarks.gpu.parts import Options
from benchmarks.gpu.report import Report, State, read, table
from benchmarks.gpu.suite import FOLDER

ROOT = Path(__file__).resolve().parents[3]
TIMED = "control or bus"
"""Tests that a slow machine could fail in a rehearsal: what is delayed there is delayed by the host's clock."""
OWN_TEST = {"tests"}
"""Parts that ``test_the_tests_for_a_gpu_are_rehearsed`` covers."""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def test_every_part_is_rehearsed(tmp_path: Path) -> None:
    parts = [name for name in proof.PARTS if name not in OWN_TEST]
    done = run("benchmarks.gpu", "--dry-run", "--out", str(tmp_path), *parts)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in parts:
        report = read(tmp_path / f"{name}.json")
        assert report["state"] == (State.SKIPPED if name == "vllm" else State.ENDED), report["note"]
        assert f"\n{name}: {report['state']}" in f"\n{done.stdout}"
        assert report["rehearsal"] or name == "vllm"
        for row in report["rows"]:
            assert row.what in done.stdout
    (right,) = [row for row in read(tmp_path / "engine.json")["rows"] if row.what.startswith("every byte")]
    assert right.passed
    assert "wrong bytes" not in done.stdout
    assert "gates passed" in done.stdout
    assert "rehearsal without a GPU" in done.stdout


@pytest.mark.soak
def test_the_tests_for_a_gpu_are_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVOFFLOAD_GPU_REHEARSAL", "1")
    done = run("pytest", FOLDER, "-m", "cuda", "-k", f"not ({TIMED})", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_the_suite_has_every_test_for_a_gpu() -> None:
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.cuda" in path.read_text()]
    # The part "vllm" runs its tests in an environment of its own.
    marked = [path for path in marked if path != Path(__file__) and "vllm_engine" not in path.parts]
    assert marked
    for path in marked:
        assert path.is_relative_to(ROOT / FOLDER), path


@pytest.mark.skipif(cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_one_line_says_so() -> None:
    done = run("benchmarks.gpu")
    assert done.returncode == 1
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "there is no CUDA device" in done.stderr


@pytest.mark.soak
@pytest.mark.skipif(cuda.is_available(), reason="needs a machine without a GPU")
def test_a_part_that_fails_or_takes_too_long_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(proof.PARTS, "submit", ("submit", 0.01))
    monkeypatch.setattr(proof, "MIN_S", 0)
    proof.run_all(["submit", "facts"], tmp_path, 120, resume=False)
    assert read(tmp_path / "submit.json")["state"] == State.TIMED_OUT
    facts = read(tmp_path / "facts.json")
    assert facts["state"] == State.FAILED
    assert facts["note"]
    assert proof.print_table(tmp_path) == 1
    assert "failed: facts, submit" in capsys.readouterr().out


@pytest.mark.parametrize("rehearsal", [True, False])
def test_gates_of_a_rehearsal_do_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str], rehearsal: bool) -> None:
    report = Report("copies", tmp_path / "copies.json", rehearsal=rehearsal)
    report.at_least(0.9, "share of memcpy", 0.5)
    report.end(State.ENDED)
    assert proof.print_table(tmp_path) == (0 if rehearsal else 1)
    capsys.readouterr()
    proof.run_all([], tmp_path, 120, resume=False)
    assert report.path.exists() is not rehearsal, "figures of a rehearsal must not be shown beside real ones"


def install(folder: Path, name: str, script: str) -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


@pytest.mark.parametrize("planted", ["========= Invalid __global__ read of size 16 bytes", "nothing"])
@pytest.mark.parametrize("errors", [0, 1])
def test_the_sanitizer_must_find_the_planted_fault_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str, errors: int
) -> None:
    install(
        tmp_path,
        sanitizer.PROGRAM,
        f'case "$*" in *--planted*) echo "{planted}"; exit 1;; esac\n'
        f'echo "right bytes"; echo "========= ERROR SUMMARY: {errors} errors"',
    )
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    report = Report("sanitizer", tmp_path / "sanitizer.json")
    sanitizer.run(report, Options(10, False, tmp_path))
    assert [row.passed for row in report.rows] == [errors == 0, "Invalid" in planted]


def test_a_missed_gate_is_in_the_table_and_in_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report("copies", tmp_path / "copies.json")
    report.at_least(0.9, "share of memcpy", 0.5)
    report.at_most(1, "milliseconds", 0.5, "ms")
    report.must("right bytes", True)
    # What was measured is in the file before the part has ended.
    assert len(json.loads(report.path.read_text())["rows"]) == 3
    report.end(State.ENDED)
    text = table([read(report.path)])
    assert "FAIL (>= 0.9)" in text
    assert text.count("pass (") == 2
    assert proof.print_table(tmp_path) == 1
    assert "2 of 3 gates passed" in capsys.readouterr().out


def test_the_file_to_send_holds_figures_and_logs_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = {"user": "mallory", "host": "rack17-node4", "uuid": "GPU-6f2a9c1e-0b77-4d1c-9e0f-1234567890ab"}
    planted |= {
        "token": "hf_verysecretvalue",
        "address": "10.11.12.13",
        "mail": "ops@example.org",
        "home": "/home/mallory",
    }
    monkeypatch.setattr("getpass.getuser", lambda: planted["user"])
    monkeypatch.setattr("socket.gethostname", lambda: planted["host"])
    monkeypatch.setenv("HOME", planted["home"])
    monkeypatch.setenv("HF_TOKEN", planted["token"])
    report = Report("facts", tmp_path / "facts.json")
    report.add("device", "NVIDIA H100 80GB HBM3")
    for name, value in planted.items():
        report.add(name, f"is {value}.")
    report.at_least(0.8, "share of memcpy", 0.93)
    report.end(State.ENDED)
    (tmp_path / "facts.log").write_text(
        "first\n" + "x" * bundle.LOG_BYTES + "\n".join(planted.values()) + " end of the log"
    )
    text = bundle.write(tmp_path, ["facts", "copies"]).read_text()
    for value in planted.values():
        assert value not in text
    content = json.loads(text)
    assert [row["what"] for row in content["parts"][0]["rows"]][-1] == "share of memcpy"
    assert "NVIDIA H100 80GB HBM3" in text
    assert content["logs"]["facts.log"].endswith("end of the log")
    assert "first" not in content["logs"]["facts.log"]

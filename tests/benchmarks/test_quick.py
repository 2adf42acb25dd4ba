"""The benchmarks run, and their help needs no package: an API that has changed breaks none unnoticed."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import benchmarks
from benchmarks.__main__ import BENCHMARKS
from demo.process import with_demo

FAST = ("calls", "copies", "hints", "shared_dir", "steps", "tenants", "waiting")
"""Benchmarks that take less than two seconds if they are quick, without vLLM and without stores."""
MODULES = [module.name for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")]
OF_AN_ENGINE = ("libcachesim", "mooncake", "obstore", "redis", "sglang", "torch", "triton", "vllm")


def test_every_module_can_be_imported() -> None:
    for name in MODULES:
        if name.endswith("__main__"):
            continue
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] not in OF_AN_ENGINE:
                raise


@pytest.mark.soak
def test_those_that_are_fast_run(tmp_path: Path) -> None:
    """One after the other, in a process of their own, which they change."""
    command = [sys.executable, "-m", "benchmarks", "--quick", "--out", str(tmp_path), *FAST]
    environment = with_demo(os.environ) | {"KVOFFLOAD_BENCH_DIR": str(tmp_path)}
    # With the traces of real servers some take minutes.
    environment.pop("KVOFFLOAD_TRACES", None)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-6000:]
    for name in FAST:
        assert json.loads((tmp_path / f"{name}.json").read_text())["rows"], name
    assert set(FAST) < set(BENCHMARKS)


def test_libcachesim_is_not_asked_for_a_size_that_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policies = pytest.importorskip("benchmarks.policies")
    pytest.importorskip("libcachesim")
    for name, value in {"POLICIES": ("lru", "s3fifo", "auto", "bound"), "PEERS": (), "SYNTHETIC": {"chat": 30}}.items():
        monkeypatch.setattr(policies, name, value)
    monkeypatch.delenv("KVOFFLOAD_TRACES", raising=False)
    policies.main(tmp_path, quick=False)
    (row,) = (line.split() for line in capsys.readouterr().out.splitlines() if "s3fifo" in line.split()[:1])
    assert row[1] == "-" != row[-1]


ROOT = Path(__file__).resolve().parents[2]


def run(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("package", ["benchmarks", "benchmarks.peers"])
def test_help_needs_no_package(package: str) -> None:
    # Without the packages of the environment.
    shown = run(sys.executable, "-S", "-E", "-m", package, "--help")
    assert f"usage: python -m {package}" in shown


def test_each_benchmark_says_what_it_measures() -> None:
    words = run(sys.executable, "-S", "-E", "-m", "benchmarks", "--help").split("benchmarks:\n")[1]
    lines = dict(line.split(maxsplit=1) for line in words.splitlines() if line[:3].strip())
    assert sorted(lines) == sorted(BENCHMARKS)
    assert min(map(len, lines.values())) > 30

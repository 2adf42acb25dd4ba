"""Native code is there where it must be, and what runs is said."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffload import native
from tests.cache.test_manager_policies import CASES

MUST_BE_BUILT = "KVOFFLOAD_TEST_NATIVE"
"""If this environment variable is "required", missing native code is an error. Otherwise its tests are skipped."""


def describe(**environment: str) -> str:
    run = [sys.executable, "-c", "from kvoffload.cli import main; main()", "--version"]
    return subprocess.run(run, env={**os.environ, **environment}, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(os.environ.get(MUST_BE_BUILT) != "required", reason=f"{MUST_BE_BUILT}=required is not set")
@pytest.mark.parametrize("name", native.MODULES)
def test_native_code_was_compiled(name: str) -> None:
    assert native.load(name) is not None, native.describe()


def test_the_version_says_what_runs() -> None:
    assert native.describe() in describe()
    assert "plain Python: KVOFFLOAD_NATIVE=0" in describe(KVOFFLOAD_NATIVE="0")


def test_a_module_that_cannot_be_loaded_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str) -> None:
        raise ImportError("numpy is too old")

    monkeypatch.delenv(native.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(native, "import_module", fail)
    monkeypatch.setattr(native, "_broken", {})
    assert native.load("_cache") is None
    assert native.load("_cache") is None
    assert len(caplog.records) == 1
    assert "_cache cannot be loaded (ImportError: numpy is too old)" in native.describe()


@pytest.mark.skipif(native.load("_cache") is None, reason="there is no native code here")
@pytest.mark.parametrize("change", ["nothing", "a source", "no sources"])
def test_native_code_of_other_sources_is_not_used(tmp_path: Path, change: str) -> None:
    """In a checkout the sources may be newer than what was compiled from them. Where there are no sources, as in a
    wheel, both were installed together."""
    package = Path(native.__file__).parents[1]
    folder = tmp_path / "kvoffload" / "native"
    shutil.copytree(package, tmp_path / "kvoffload", ignore=shutil.ignore_patterns("__pycache__", "*.c"))
    if change == "a source":
        with (folder / "_copies.pyx").open("a") as source:
            source.write("# a change\n")
    elif change == "no sources":
        for name in native.source_names():
            (folder / name).unlink()
    said = describe(PYTHONPATH=str(tmp_path), KVOFFLOAD_NATIVE="1")
    if change == "a source":
        assert "plain Python: _cache cannot be loaded (ImportError: it was compiled from other sources" in said
        assert "reinstall kvoffload" in said
    else:
        assert "(native code)" in said


def test_a_missing_module_means_that_there_was_no_compiler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(native.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(native, "MODULES", ("_no_such_module",))
    assert native.load("_no_such_module") is None
    assert "was not compiled" in native.describe()
    assert not caplog.records


def test_without_the_gil_plain_python_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert native.load("_cache") is None
    assert "GIL" in native.describe()


WALK = """
from kvoffload.native import describe
from tests.suites.stateful import walk
from tests.cache.test_manager_policies import machine
assert describe().startswith("plain Python"), describe()
for seed in range(3):
    walk(machine({policy!r}), seed)
print("walked")
"""


@pytest.mark.parametrize("policy", CASES)
def test_a_manager_works_without_native_code(policy: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WALK.format(policy=policy)],
        env={**os.environ, "KVOFFLOAD_NATIVE": "0"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (ended.returncode, ended.stdout) == (0, "walked\n"), ended.stderr[-2000:]

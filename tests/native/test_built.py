"""Native code is there where it must be, and what runs is said."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module

import pytest

from kvoffload import native

MUST_BE_BUILT = "KVOFFLOAD_TEST_NATIVE"
"""If this environment variable is "required", missing native code is an error. Otherwise its tests are skipped."""


def describe(**environment: str) -> str:
    run = [sys.executable, "-c", "from kvoffload.cli import main; main()", "--version"]
    return subprocess.run(run, env={**os.environ, **environment}, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(os.environ.get(MUST_BE_BUILT) != "required", reason=f"{MUST_BE_BUILT}=required is not set")
@pytest.mark.parametrize("name", native.MODULES)
def test_native_code_was_compiled(name: str) -> None:
    import_module(f"kvoffload.native.{name}")


def test_the_version_says_that_native_code_is_switched_off() -> None:
    assert "plain Python: KVOFFLOAD_NATIVE=0" in describe(KVOFFLOAD_NATIVE="0")


def test_the_version_says_what_runs() -> None:
    assert native.describe() in describe()


def test_a_module_that_cannot_be_loaded_is_reported(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    def fail(name: str) -> None:
        raise ImportError("numpy is too old")

    monkeypatch.delenv(native.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(native, "import_module", fail)
    monkeypatch.setattr(native, "_broken", {})
    assert native.load("_cache") is None
    assert native.load("_cache") is None
    assert len(caplog.records) == 1
    assert "_cache cannot be loaded (ImportError: numpy is too old)" in native.describe()


def test_a_missing_module_means_that_there_was_no_compiler(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.delenv(native.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(native, "MODULES", ("_no_such_module",))
    assert native.load("_no_such_module") is None
    assert "without a C compiler" in native.describe()
    assert not caplog.records


def test_without_the_gil_plain_python_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    assert native.load("_cache") is None
    assert "GIL" in native.describe()

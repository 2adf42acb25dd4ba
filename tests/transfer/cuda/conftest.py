"""A stand-in for the CUDA driver, for tests on machines without a GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

STUB = Path(__file__).with_name("libcuda_stub.c")


class StubDriver:
    """A library with the driver's functions that copies at once; see libcuda_stub.c."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)
        self._library.stub_log.restype = ctypes.c_char_p
        self._library.stub_reset()

    @property
    def calls(self) -> list[str]:
        return str(self._library.stub_log().decode()).splitlines()

    @property
    def num_allocated(self) -> int:
        """How many pieces of device memory are allocated."""
        return int(self._library.stub_allocated())

    def be_version(self, version: int) -> None:
        """Behaves like the driver of this CUDA version, such as 12080."""
        self._library.stub_version(version)

    def limit_registrations(self, mebibytes: int) -> None:
        self._library.stub_max_registration(mebibytes)

    def fail(self, function: str, code: int, after: int = 0) -> None:
        """Lets ``after`` calls of a function pass and then fails all with ``code``."""
        self._library.stub_fail(function.encode(), code, after)

    def fail_copy(self, number: int) -> None:
        """Lets batches fail at this copy."""
        self._library.stub_fail_copy(number)


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc")
    path = tmp_path_factory.mktemp("stub") / "libcuda_stub.so"
    subprocess.run([compiler, "-Wall", "-Werror", "-O1", "-shared", "-fPIC", STUB, "-o", path], check=True)
    return path


@pytest.fixture
def stub(stub_library: Path) -> StubDriver:
    return StubDriver(stub_library)

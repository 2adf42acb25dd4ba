"""Calls of the CUDA driver, made to the emulator; none of them reaches a GPU here."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvoffload.transfer.cuda.driver import _SIGNATURES as SIGNATURES
from kvoffload.transfer.cuda.driver import Driver, DriverError
from tests.transfer.cuda.calls import copy
from tests.transfer.cuda.emulator import SOURCES, Count, Emulator, bytes_at

INVALID_VALUE, ALREADY_REGISTERED = 1, 712
STREAM = 0x5500


def driver_of(emulator: Emulator) -> Driver:
    driver = Driver(0, library=emulator.path)
    driver.enter_thread()
    assert driver.new_stream() == STREAM
    return driver


@pytest.mark.parametrize(("version", "batches"), [(12080, 1), (13010, 1), (12040, 0)])
def test_copies_are_issued_in_batches_with_the_arguments_of_12_8_or_one_by_one(
    emulator: Emulator, version: int, batches: int
) -> None:
    emulator.be_version(version)
    driver = driver_of(emulator)
    source, target = driver.allocate(64), driver.allocate_host(64)
    bytes_at(source, 64)[:] = np.arange(64)
    copy(driver, STREAM, target + np.arange(2) * 32, source + np.arange(2) * 32, np.full(2, 32))
    assert bytes_at(target, 64).tolist() == list(range(64))
    assert [emulator.count(Count.BATCHES), emulator.count(Count.COPIES)] == [batches, 2]
    driver.stop_batches()
    assert not driver.copies_in_batches


def test_a_thread_enters_before_it_calls(emulator: Emulator) -> None:
    """A context is current per thread."""
    driver = driver_of(emulator)
    errors: list[int] = []

    def run(enter: bool) -> None:
        try:
            if enter:
                driver.enter_thread()
            driver.allocate(8)
        except DriverError as error:
            errors.append(error.code)

    for enter in (False, True):
        thread = threading.Thread(target=run, args=(enter,))
        thread.start()
        thread.join()
        assert errors == [201], "invalid context, and only in the thread that did not enter"
    assert emulator.calls.count("capture mode 2") == 2


def test_host_memory_is_registered_for_all_contexts_and_unregistered(emulator: Emulator) -> None:
    driver = driver_of(emulator)
    memory = np.zeros(1 << 21, np.uint8)
    driver.register(memory.ctypes.data, 1 << 20)
    driver.register(memory.ctypes.data + (1 << 20), 1 << 20)
    assert emulator.calls[-1] == "register 1048576 flags 1"
    with pytest.raises(DriverError, match="ALREADY_REGISTERED") as error:
        driver.register(memory.ctypes.data + 5, 8)
    assert error.value.code == ALREADY_REGISTERED
    driver.unregister(memory.ctypes.data)
    with pytest.raises(DriverError, match="cuMemHostUnregister failed: CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"):
        driver.unregister(memory.ctypes.data)


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("0\n", 0), ("-1\n", None), ("", None), (None, None)])
def test_the_numa_node_is_the_one_in_sysfs(
    emulator: Emulator, tmp_path: Path, text: str | None, node: int | None
) -> None:
    folder = tmp_path / "0000:3b:00.0"
    folder.mkdir()
    if text is not None:
        (folder / "numa_node").write_text(text)
    assert driver_of(emulator).numa_node(tmp_path) == node


def test_the_context_is_given_back_once(emulator: Emulator) -> None:
    driver = driver_of(emulator)
    driver.close()
    driver.close()
    assert emulator.calls.count("retain") == emulator.calls.count("release 100") == 1


def test_no_context_is_created_before_a_thread_enters(emulator: Emulator) -> None:
    driver = Driver(0, library=emulator.path)
    driver.numa_node(Path("/nowhere"))
    assert "retain" not in emulator.calls
    driver.enter_thread()
    assert "retain" in emulator.calls


@pytest.mark.parametrize("function", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"])
def test_a_driver_that_does_not_start_is_an_error_with_a_name(emulator: Emulator, function: str) -> None:
    emulator.fail(function, INVALID_VALUE)
    with pytest.raises(DriverError, match=f"{function} failed: CUDA_ERROR_INVALID_VALUE"):
        driver_of(emulator)


def test_a_machine_without_a_driver_is_an_error_that_names_the_library() -> None:
    with pytest.raises(RuntimeError, match=r"libno-such-cuda\.so cannot be loaded"):
        Driver(0, library="libno-such-cuda.so")


@pytest.fixture
def compiles(tmp_path: Path) -> Callable[[str], bool]:
    """Returns a function that says whether NVIDIA's cuda.h agrees with a source like header_check.c."""
    compiler = shutil.which("gcc")
    found = importlib.util.find_spec("triton")
    if compiler is None or found is None or found.origin is None:
        pytest.skip("needs gcc and Triton, which brings cuda.h")
    include = Path(found.origin).parent / "backends" / "nvidia" / "include"
    if not (include / "cudaTypedefs.h").exists():
        pytest.skip(f"needs cudaTypedefs.h, which is not in {include}")

    def compiles(source: str) -> bool:
        file = tmp_path / "check.c"
        file.write_text(source)
        options = ["-fsyntax-only", "-Werror=incompatible-pointer-types", f"-I{include}", f"-I{SOURCES}"]
        return subprocess.run([compiler, *options, file], capture_output=True).returncode == 0

    return compiles


def test_the_emulator_declares_what_cuda_h_declares(compiles: Callable[[str], bool]) -> None:
    source, ours = (SOURCES / "header" / "check.c").read_text(), (SOURCES / "emulator.h").read_text()
    assert compiles(source)
    planted = {
        "size_t, size_t *, CUstream": "size_t, CUstream",
        '"cuMemHostRegister_v2"': '"cuMemHostRegister"',
        "SAME(NOT_READY, CUDA_ERROR_NOT_READY)": "SAME(NOT_READY, CUDA_ERROR_NOT_FOUND)",
    }
    for right, wrong in planted.items():
        assert right in source
        assert not compiles(source.replace(right, wrong)), f"{wrong} was accepted"
    for right, wrong in {"int id;": "long id;", "PORTABLE = 1": "PORTABLE = 2"}.items():
        assert right in ours
        planted_header = source.replace('#include "emulator.h"', ours.replace(right, wrong))
        assert not compiles(planted_header), f"{wrong} was accepted"


def test_every_function_of_the_driver_that_is_called_is_checked_with_its_header() -> None:
    checked = (SOURCES / "header" / "check.c").read_text()
    for name in SIGNATURES:
        assert f"{name.removesuffix('_v2')};" in checked, name
